"""Kernels that torch does not see (`raw_kernel`), which are enqueued as a whole."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.testing.sim.calls import Call, packed, written
from batchstate.testing.sim.device import Device, Lane, Task, poisoned
from batchstate.testing.sim.memory import Places, new_tensors
from batchstate.testing.sim.shapes import Made, Signature, UnknownError, results_of
from batchstate.testing.tracing.accesses import Operation, tensors_in
from batchstate.testing.tracing.memory import Place
from batchstate.testing.tracing.modes import array_of_device, mixed_operands
from batchstate.testing.tracing.sites import site

# Copies between the host and the simulated device: which of them the host waits for, and what each touches when.


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


# Every operation of torch: enqueued where it touches device memory, made at once where it does not.


@final
class Operations:
    """The watcher of the simulated device.

    Args:
        device: runs what is enqueued.
        places: whose memory is whose.
        transfers: between host and device.
        current: the stream that operations go to.
        step: the present step.
        record_stream: told of a tensor and of the stream that uses its memory.

    Attributes:
        seen: operations on device memory so far.
        unmodelled: operations that the host had to wait for only because torch cannot say what they return, by name.
    """

    def __init__(
        self,
        device: Device,
        places: Places,
        transfers: Transfers,
        current: Callable[[], Lane],
        step: Callable[[], int],
        record_stream: Callable[[torch.Tensor, Any], None],
    ) -> None:
        self._device = device
        self._places = places
        self._transfers = transfers
        self._current = current
        self._step = step
        self._record_stream = record_stream
        self.seen = 0
        self.unmodelled: Counter[str] = Counter()

    # What torch tells

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `modes.Watcher`."""
        operation, of = Operation.of(func), self._places.of
        if operation.touches_nothing or Signature.of(func).metadata:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and of(result) is None:
                return self._lifted(result, lifted)
            return result
        tensors = [one for value in (*args, *kwargs.values()) for one in tensors_in(value)]
        non_blocking = operation.name == "copy_" and bool(kwargs.get("non_blocking", (*args, False)[2]))
        if non_blocking:
            self._transfers.decide(args[0], args[1])
        if kwargs.get("pin_memory") or not any(of(one) is Place.DEVICE for one in tensors):
            return self._on_host(operation, func, args, kwargs, tensors)
        self.seen += 1
        if operation.name == "copy_" and (of(args[0]) in _HOST or of(args[1]) in _HOST):
            return self._transfers.copy(args[0], args[1], non_blocking)
        return self._on_device(operation, func, args, kwargs, tensors)

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """See `modes.Watcher`."""
        if not args or not isinstance(args[0], torch.Tensor):
            return False, None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if name == "record_stream":
                self._record_stream(args[0], args[1])
                return True, None
            return self._transfers.host_call(name, args[0], args[1:], kwargs)

    # On the device

    def _on_device(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        name, signature = operation.name, Signature.of(func)
        self._refuse_host(operation, args, tensors)
        if self._waits(operation, args, kwargs):
            self._transfers.synchronise(name)
            return self._now(name, func, args, kwargs, tensors)
        try:
            made = results_of(func, args, kwargs)
        except UnknownError:
            self._device.drain(self._current())
            result = self._now(name, func, args, kwargs, tensors)
            self.unmodelled[name] += 1  # only now: what torch refuses is no gap of this model
            return result
        pack = self._places.pack
        changed = [packed(one, self._places.pack_written) for one in signature.writes(args, kwargs)]
        call_args = [packed(one, pack) for one in args]
        call_kwargs = {key: packed(one, pack) for key, one in kwargs.items()}
        fresh = [self._allocated(one) for one in made]
        if name not in _LEAVE_EMPTY:
            targets = [packed(one, pack) for one in fresh] if any(made) else []
            task = Task(
                name,
                self._step(),
                site(2),
                Call(func, call_args, call_kwargs, targets, _seed(kwargs) if signature.draws(args, kwargs) else None),
                lambda: written([*changed, *targets]),
            )
            self._device.enqueue(self._current(), task)
        results = [
            one if key is None else kwargs[key] if isinstance(key, str) else args[key]
            for one, key in zip(fresh, signature.returned, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _allocated(self, made: Any) -> Any:
        if isinstance(made, Made):
            return self._places.new(made)
        return [self._allocated(one) for one in made] if isinstance(made, list) else made

    def _now(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Runs an operation at once: its stream has nothing before it."""
        for one in tensors:
            if self._places.of(one) not in _HOST:
                self._places.on_device(one)
        result = func(*args, **kwargs)
        self._device.note(self._current(), name, self._step())

        def keep(one: torch.Tensor) -> torch.Tensor:
            known = self._places.of(one) is not None or not _is_plain(one)
            return one if known else self._places.copied_to_device(one)

        return new_tensors(result, keep)

    def _waits(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the host needs the result, its shape, or has to bring an operand across."""
        if operation.waits:
            return True
        if operation.name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if not operation.takes_host_index:
            return False
        if any(one is not None and one.ndim and self._places.of(one) in _HOST for one in args[1]):
            return True
        # One number put where a mask says is a plain fill.
        fills = len(args) > 2 and args[2].ndim == 0 and self._places.of(args[2]) is not Place.DEVICE
        return operation.by_mask(args) and not fills

    def _refuse_host(self, operation: Operation, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        if not any(one.ndim and self._places.of(one) in _HOST for one in tensors):
            return
        indices = list(tensors_in(args[1])) if operation.takes_host_index else []
        for one in tensors:
            if one.ndim and self._places.of(one) in _HOST and not any(one is index for index in indices):
                raise mixed_operands(operation.name, one)

    # On the host

    def _on_host(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        places = self._places
        if kwargs.get("pin_memory"):
            return places.keep(func(*args, **{**kwargs, "pin_memory": False}), Place.PINNED)
        result = func(*args, **kwargs)
        host = any(places.of(one) in _HOST for one in tensors)
        given = [one.untyped_storage()._cdata for one in tensors if _is_plain(one)]

        def keep(one: torch.Tensor) -> torch.Tensor:
            if not _is_plain(one) or places.of(one) is not None or one.untyped_storage()._cdata in given:
                return one
            if host:
                return places.keep(one, Place.HOST)
            if operation.name in _LEAVE_EMPTY:
                return places.undecided(one)
            return places.filled(one, operation.name, self._step(), late=True)

        return new_tensors(result, keep)

    def _lifted(self, tensor: torch.Tensor, by_factory: bool) -> torch.Tensor:
        if not by_factory:
            return self._places.keep(tensor, Place.HOST)
        if tensor.untyped_storage().resizable():
            return self._places.filled(tensor, "lift", self._step(), late=False)  # the host waits for such a copy
        return self._places.keep(tensor, Place.UNDECIDED)  # numpy has it too, and goes on writing it


_HOST = (Place.HOST, Place.PINNED)

_LEAVE_EMPTY = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that allocate, and do nothing on the device."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in one piece of CPU memory: neither sparse nor of another device."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _seed(kwargs: Mapping[str, Any]) -> int:
    """Drawn when an operation is enqueued: what it draws must not depend on when it runs."""
    return int(torch.randint(1 << 62, (), generator=kwargs.get("generator")))


def task_of(
    name: str,
    function: Callable[..., Any],
    given: tuple[Sequence[Any], Mapping[str, Any]],
    declared: Sequence[torch.Tensor],
    places: Places,
    step: int,
) -> Task:
    """A call of a raw kernel, to be run later.

    Raises:
        ArgumentError: it declares nothing, or something that is not among its arguments.
        DeviceError: an argument lies in pageable host memory.
    """
    args, kwargs = given
    tensors = list(_tensors((*args, *kwargs.values())))
    for one in tensors:
        if one.ndim and places.of(one) is Place.HOST:
            raise DeviceError(
                f"{name} of a host tensor {tuple(one.shape)}",
                value=tuple(one.shape),
                remedy="bring it to the device first, with `Runtime.upload`, or use pinned memory",
            )
    memory = [one.untyped_storage()._cdata for one in tensors]
    missing = [one for one in declared if one.untyped_storage()._cdata not in memory]
    if missing or not declared:
        raise ArgumentError(
            f"the raw kernel {name!r} declares {'memory that it is not given' if missing else 'nothing'}",
            value=name,
            remedy="pass each tensor as an argument and say `reads=` and `writes=`: it runs later, on its arguments",
        )

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.data if places.of(tensor) is Place.PINNED else places.pack(tensor)

    call_args = [packed(one, pack) for one in args]
    call_kwargs = {key: packed(one, pack) for key, one in kwargs.items()}
    pinned = next((places.memories.of(one) for one in tensors if places.of(one) is Place.PINNED), None)
    everything = (*call_args, *call_kwargs.values())
    return Task(name, step, site(3), Call(function, call_args, call_kwargs), lambda: written(everything), pinned)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found
