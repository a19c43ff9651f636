"""Copies between the host and the simulated device: which of them the host waits for, and what each touches when."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.sim.calls import Call, written
from batchstate.testing.sim.device import Device
from batchstate.testing.sim.places import Places
from batchstate.testing.sim.poison import poisoned
from batchstate.testing.sim.queues import Lane, Task
from batchstate.testing.sim.shapes import Made
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.refusals import array_of_device
from batchstate.testing.watching.sites import site


def _nothing() -> None:
    """Nobody counts."""


@final
class Transfers:
    """Copies.

    Args:
        device: runs them.
        places: whose memory is whose.
        current: the stream that copies go to.
        step: the present step.

    Attributes:
        synchronised: times that the host waited for the current stream in a call of torch, by its name.
        on_wait: called each time.
    """

    def __init__(self, device: Device, places: Places, current: Callable[[], Lane], step: Callable[[], int]) -> None:
        self._device = device
        self._places = places
        self._current = current
        self._step = step
        self.synchronised: Counter[str] = Counter()
        self.on_wait: Callable[[], None] = _nothing

    def synchronise(self, name: str) -> None:
        """A call of torch makes the host wait for the current stream."""
        self.synchronised[name] += 1
        self.on_wait()
        self._device.drain(self._current())

    def to_device(self, source: torch.Tensor, target: torch.Tensor, name: str = "copy to device") -> None:
        """A copy of pinned memory, which it reads when it runs."""
        self._enqueue(name, self._places.pack(target), source.data, self._places.memories.of(source))

    def to_host(self, source: torch.Tensor, target: torch.Tensor, name: str = "copy to host") -> None:
        """A copy to pinned memory, which holds poison until it has run.

        Not where an earlier copy still has to read it: that is no early reader, and must not be misled.
        """
        if not self._device.reads_host(self._places.memories.of(target)):
            target.copy_(poisoned(tuple(target.shape), target.dtype))
        self._enqueue(name, target.data, self._places.pack(source), None)

    def _enqueue(self, name: str, target: Any, source: Any, reads_host: object) -> None:
        work = Call(torch.Tensor.copy_, (target, source), {})
        task = Task(name, self._step(), site(3), work, lambda: written([target]), reads_host)
        self._device.enqueue(self._current(), task)

    def decide(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`copy_` was asked not to block, which nobody asks within host memory: an undecided side is the device's."""
        for one, other in ((target, source), (source, target)):
            if self._places.of(one) is Place.UNDECIDED and self._places.of(other) in (Place.HOST, Place.PINNED):
                self._places.on_device(one)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`copy_` across. Without `non_blocking`, or with memory that is not pinned, the host waits."""
        to_device = self._places.of(target) is Place.DEVICE
        pinned = self._places.of(source if to_device else target) is Place.PINNED
        if not (non_blocking and pinned):
            self.synchronise("copy_")
            target.copy_(source)
            self._device.note(self._current(), "copy_", self._step())
            return target
        if to_device:
            self.to_device(source, target)
        else:
            self.to_host(source, target)
        return target

    def host_call(
        self, name: str, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """A call that may bring numbers across without dispatching anything; whether it was made here, and its result.

        A `torch.device` is the runtime's, as `Runtime.device` gives it; the word "cpu" is the host.
        """
        place = self._places.of(tensor)
        if name == "is_pinned":
            return True, place is Place.PINNED
        if name == "pin_memory":
            return True, self._pinned_copy(tensor)
        target, dtype, non_blocking = _target(args, kwargs)
        if place is not Place.DEVICE:
            if name == "to" and place in (Place.HOST, Place.PINNED) and isinstance(target, torch.device):
                return True, self._sent(tensor, dtype or tensor.dtype, non_blocking)
            return False, None
        if name in ("numpy", "__array__"):
            raise array_of_device(name, tensor)
        if name == "to" and not isinstance(target, str):
            return False, None
        if name == "to" and non_blocking:
            return True, self._brought_later(tensor, dtype or tensor.dtype)
        self.synchronise(name)
        values = tensor.detach().to(dtype or tensor.dtype, copy=True)
        return True, values.tolist() if name == "tolist" else self._places.keep(values, Place.HOST)

    def _sent(self, tensor: torch.Tensor, dtype: torch.dtype, non_blocking: bool) -> torch.Tensor:
        like = torch.empty_like(tensor, dtype=dtype)
        result = self._places.new(Made(dtype, tuple(like.shape), like.stride()))
        return self.copy(result, tensor, non_blocking)

    def _brought_later(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = torch.empty_like(tensor, dtype=dtype)
        self._places.keep(result, Place.PINNED)  # as torch does on an accelerator
        self.to_host(tensor, result)
        return result

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._places.of(tensor) is Place.DEVICE:
            raise ArgumentError("pin_memory of a device tensor", value=None, remedy="only host memory can be pinned")
        return self._places.keep(tensor.clone(), Place.PINNED)


def _target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str | torch.device | None, Any, bool]:
    """What `.to` is told: the device, the dtype, and whether the host waits; None for what it does not say."""
    given = (*args, *kwargs.values())
    device = next((one for one in given if isinstance(one, str | torch.device)), None)
    dtype = next((one for one in given if isinstance(one, torch.dtype)), None)
    waits = kwargs.get("non_blocking", next((one for one in args if isinstance(one, bool)), False))
    return device, dtype, bool(waits)
