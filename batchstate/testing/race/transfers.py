"""Copies between host and device: which of them the host waits for, and what the others leave in flight.

What torch does is taken from its documentation and sources (`aten/src/ATen/native/TensorConversions.cpp`): a copy is
asynchronous if it is asked to be and the host memory is pinned; `.to("cpu", non_blocking=True)` lands in pinned memory
of its own; everything else waits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.race.accesses import Accesses
from batchstate.testing.race.journal import Entry
from batchstate.testing.race.report import EventKind
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.refusals import array_of_device
from batchstate.testing.watching.regions import of_tensor
from batchstate.testing.watching.touches import Touch

_TO_DEVICE, _TO_HOST = EventKind.COPY_TO_DEVICE, EventKind.COPY_TO_HOST


@final
class Transfers:
    """Tells the detector of copies.

    Args:
        accesses: of the runtime.
    """

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses

    # Of the runtime

    def copied_to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A copy of pinned memory to device memory was enqueued on the current stream.

        Raises:
            Race: it may come across another access.
        """
        entry = self._transfer(_TO_DEVICE, source, target)
        kept, region = self._accesses.memories.of(source), of_tensor(source)
        if kept is not None and region is not None:
            with self._accesses.muted():
                self._accesses.host_memory.reads(entry, kept, region, source)

    def copied_to_host(self, source: torch.Tensor, target: torch.Tensor, values: torch.Tensor) -> None:
        """A copy of device memory to pinned memory was enqueued on the current stream; `values` is what it brings.

        Raises:
            Race: it may come across another access.
        """
        entry = self._transfer(_TO_HOST, source, target)
        kept, region = self._accesses.memories.of(target), of_tensor(target)
        if kept is not None and region is not None:
            with self._accesses.muted():
                self._accesses.host_memory.lands(entry, kept, region, target, values)

    # Of torch

    def decide(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`copy_` was asked not to block, which nobody asks within host memory: an undecided side is the device's."""
        for one, other in ((target, source), (source, target)):
            if self._accesses.place(one) is Place.UNDECIDED and self._accesses.place(other) in (
                Place.HOST,
                Place.PINNED,
            ):
                self._accesses.kept(one)

    def crosses(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether `copy_` goes from one to the other."""
        places = self._accesses.place(target), self._accesses.place(source)
        return Place.DEVICE in places and (Place.HOST in places or Place.PINNED in places)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`copy_` across. Without `non_blocking`, or with memory that is not pinned, the host waits."""
        to_device = self._accesses.place(target) is Place.DEVICE
        if not (non_blocking and self._is_pinned(source if to_device else target)):
            before = list(self._accesses.current().seen)
            entry = self._transfer(_TO_DEVICE if to_device else _TO_HOST, source, target)
            # From pageable memory the host waits for the stream and until the source was taken, not for the copy.
            staged = to_device and non_blocking
            self._accesses.synchronises("copy_", before if staged else entry.lane.seen)
            return target.copy_(source)
        if to_device:
            self.copied_to_device(source, target)
            return target.copy_(source, non_blocking=True)
        values = source.to("cpu", target.dtype, copy=True).expand(target.shape)
        self.copied_to_host(source, target, values)
        return target

    def to_host(
        self, name: str, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """A call on a CPU by which a device tensor might come to the host: whether it does, and its result.

        Raises:
            DeviceError: on an accelerator torch refuses it.
        """
        accesses = self._accesses
        if name in ("numpy", "__array__"):
            raise array_of_device(name, tensor)
        if name == "pin_memory":
            raise ArgumentError("pin_memory of a device tensor", value=None, remedy="only host memory can be pinned")
        if name == "to" and not _means_host(args, kwargs):
            return False, None
        with accesses.muted():
            values = tensor.detach().clone()
            if name == "to":
                values = values.to(*args, **kwargs)  # the dtype, where one is named
        if name == "to" and _non_blocking(args, kwargs):
            with accesses.muted():
                result = torch.empty_like(values)
            accesses.pinned(result)
            self.copied_to_host(tensor, result, values)
            return True, result
        accesses.keep(values, Place.HOST)
        entry = self._transfer(_TO_HOST, tensor, values)
        accesses.synchronises(name, entry.lane.seen)
        return True, values.tolist() if name == "tolist" else values

    def to_device(
        self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, torch.Tensor | None]:
        """`.to` of a host tensor on a CPU: whether it names the device, and then the copy there."""
        named = kwargs.get("device", args[0] if args else None)
        if not isinstance(named, torch.device) or named != self._accesses.device:
            return False, None
        dtype = kwargs.get("dtype", next((one for one in args if isinstance(one, torch.dtype)), tensor.dtype))
        with self._accesses.muted():
            result = torch.empty_like(tensor, dtype=dtype)
        self._accesses.made(result, self._accesses.access(EventKind.ALLOCATION, "empty", ()))
        return True, self.copy(result, tensor, _non_blocking(args, kwargs))

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """`pin_memory` of a host tensor on a CPU, which has no memory to pin: a copy that counts as pinned."""
        result = tensor.clone()
        self._accesses.pinned(result)
        return result

    def converted(self, entry: Entry, source: torch.Tensor, result: torch.Tensor, non_blocking: bool) -> None:
        """`_to_copy` of an accelerator has made `result`, here or there."""
        accesses = self._accesses
        here, there = source.device.type == "cpu", result.device.type == "cpu"
        if here == there:
            return
        if not (non_blocking and self._is_pinned(source if here else result)):
            accesses.synchronises("_to_copy", entry.lane.seen)
        elif here:
            kept, region = accesses.memories.of(source), of_tensor(source)
            if kept is not None and region is not None:
                with accesses.muted():
                    accesses.host_memory.reads(entry, kept, region, source)
        elif (region := of_tensor(result)) is not None:
            accesses.let_finish()
            kept = accesses.memories.of(result) or accesses.keep(result, Place.PINNED)
            entry.writes = (*entry.writes, (kept.name, region))
            accesses.detector.judge(entry, [(kept, region, True)])
            with accesses.muted():
                accesses.host_memory.lands(entry, kept, region, result, result.clone())

    # Helpers

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        accesses = self._accesses
        if not accesses.on_cpu and accesses.memories.of(tensor) is None and tensor.is_pinned():
            accesses.pinned(tensor)
        return accesses.place(tensor) is Place.PINNED

    def _transfer(self, kind: EventKind, source: torch.Tensor, target: torch.Tensor) -> Entry:
        touches = []
        for one, writes in ((source, False), (target, True)):
            region = of_tensor(one)
            known = self._accesses.on_cpu or one.device.type != "cpu" or self._accesses.memories.of(one) is not None
            if region is not None and known:
                touches.append(Touch(one, region, writes))
        return self._accesses.access(kind, str(kind), touches)


def _means_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `.to` names the host: on a CPU the word "cpu" does, and a `torch.device` is the runtime's."""
    named = kwargs.get("device", args[0] if args else None)
    return isinstance(named, str) and named == "cpu"


def _non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `.to` is asked not to block: the first of two bools."""
    return bool(kwargs.get("non_blocking", next((one for one in args if isinstance(one, bool)), False)))
