"""What a launch declares, against what torch shows of it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.race.accesses import Accesses
from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.detector import Kept
from batchstate.testing.race.history import Entry
from batchstate.testing.race.report import EventKind
from batchstate.testing.tracing.accesses import Operation, Touch, tensors_in
from batchstate.testing.tracing.memory import Place
from batchstate.testing.tracing.modes import array_of_device, mixed_operands
from batchstate.testing.tracing.regions import of_tensor

# Copies between host and device: which of them the host waits for, and what the others leave in flight.
#
# What torch does is taken from its documentation and sources (`aten/src/ATen/native/TensorConversions.cpp`): a copy
# is asynchronous if it is asked to be and the host memory is pinned; `.to("cpu", non_blocking=True)` lands in pinned
# memory of its own; everything else waits.

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


# Every operation of torch, told to the detector: whether it is the host's or the device's, and what it touches.

_HOSTS = (Place.HOST, Place.PINNED)


@final
class Operations:
    """The watcher of the race detector.

    An operation with an operand on the device is the device's, and runs on the current stream. Others are the host's;
    of what they make on a CPU it shows later where it belongs.

    Args:
        accesses: of the runtime.
        transfers: between host and device.
        lane_of: the lane of a stream, of the library or of torch.
    """

    def __init__(self, accesses: Accesses, transfers: Transfers, lane_of: Callable[[Any], Lane]) -> None:
        self._accesses = accesses
        self._transfers = transfers
        self._lane_of = lane_of

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """See `modes.Watcher`."""
        __tracebackhide__ = True
        accesses = self._accesses
        if accesses.silent:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.touches_nothing:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and accesses.on_cpu and accesses.memories.of(result) is None:
                accesses.keep(result, Place.UNDECIDED if lifted else Place.HOST)
            return result
        tensors = [one for value in (*args, *kwargs.values()) for one in tensors_in(value)]
        if operation.name == "copy_" and len(args) > 2 and args[2]:
            self._transfers.decide(args[0], args[1])
        if any(accesses.place(one) is Place.DEVICE for one in tensors):
            if operation.name == "copy_" and self._transfers.crosses(args[0], args[1]):
                return self._transfers.copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
            return self._on_device(operation, func, args, kwargs, tensors)
        return self._on_host(operation, func, args, kwargs, tensors)

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """See `modes.Watcher`."""
        accesses, transfers = self._accesses, self._transfers
        if accesses.silent or not args or not isinstance(args[0], torch.Tensor):
            return False, None
        tensor = args[0]
        with torch._C.DisableTorchFunction():
            place = accesses.place(tensor)
            if name == "record_stream":
                accesses.hand(tensor, self._lane_of(args[1]))
                return accesses.on_cpu, None
            if not accesses.on_cpu:
                return False, None  # there all of these dispatch what they do
            if name == "is_pinned":
                return True, place is Place.PINNED
            if place is Place.DEVICE:
                return transfers.to_host(name, tensor, args[1:], kwargs)
            if name == "pin_memory":
                return True, transfers.pinned_copy(tensor)
            if name == "to" and place in _HOSTS:
                return transfers.to_device(tensor, args[1:], kwargs)
            if name == "tolist" and place is Place.PINNED:
                accesses.host_access(tensor, "tolist", writes=False)
        return False, None

    # On the device

    def _on_device(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        __tracebackhide__ = True
        accesses = self._accesses
        if accesses.on_cpu:
            self._refuse_host(operation, tensors)
        touches = operation.touches(args, kwargs, accesses.read_index)
        if not accesses.on_cpu:
            touches = [one for one in touches if one.tensor.device.type != "cpu" or accesses.memories.of(one.tensor)]
        with accesses.accessing(EventKind.OPERATION, operation.name, touches) as entry:
            result = func(*args, **kwargs)
        for one in tensors_in(result):
            if accesses.memories.of(one) is None and (accesses.on_cpu or one.device.type != "cpu"):
                accesses.made(one, entry)
        # An index of the host is brought there first, and that copy waits.
        from_host = operation.takes_host_index and any(one.ndim and accesses.place(one) in _HOSTS for one in tensors)
        if operation.waits or from_host or operation.by_mask(args):
            accesses.synchronises(operation.name, entry.lane.seen)
        elif operation.name == "_to_copy" and not accesses.on_cpu:
            self._transfers.converted(entry, args[0], result, bool(kwargs.get("non_blocking", False)))
        return result

    def _refuse_host(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> None:
        for one in tensors:
            if one.ndim and self._accesses.place(one) in _HOSTS and not operation.takes_host_index:
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
        accesses = self._accesses
        if kwargs.get("pin_memory") and accesses.on_cpu:
            result = func(*args, **{**kwargs, "pin_memory": False})
            accesses.pinned(result)
            return result
        if any(accesses.place(one) is Place.PINNED for one in tensors):
            for touch in operation.touches(args, kwargs, accesses.read_index):
                if accesses.place(touch.tensor) is Place.PINNED:
                    accesses.host_touches(touch.tensor, touch.region, operation.name, writes=touch.writes)
        result = func(*args, **kwargs)
        from_host = any(accesses.place(one) in _HOSTS for one in tensors)
        for one in tensors_in(result):
            self._made(operation, one, args, kwargs, from_host)
        return result

    def _made(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        from_host: bool,
    ) -> None:
        accesses = self._accesses
        known = accesses.memories.of(tensor)
        if accesses.on_cpu:
            if from_host and known is None:
                accesses.keep(tensor, Place.HOST)
            elif not from_host:
                accesses.undecided(tensor, operation.name)
        elif tensor.device.type != "cpu":
            entry = accesses.access(EventKind.OPERATION, operation.name, ())
            if known is None:
                accesses.made(tensor, entry)
            if operation.name == "_to_copy":
                self._transfers.converted(entry, args[0], tensor, bool(kwargs.get("non_blocking", False)))


_REMEDY = "say `reads=` and `writes=`: what a kernel or the replay of a graph touches, nothing else can know"


@final
class Launches:
    """Judges launches.

    Args:
        accesses: of the runtime.
    """

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses

    @contextlib.contextmanager
    def under_way(self, name: str) -> Iterator[dict[Kept, bool]]:
        """A window in which operations belong to a launch. Yields the memory that torch shows, and whether written."""
        accesses = self._accesses
        outer = accesses.seen, accesses.launched
        accesses.seen, accesses.launched = {}, name or None
        try:
            yield accesses.seen
        finally:
            accesses.seen, accesses.launched = outer

    def check(
        self,
        name: str,
        seen: Mapping[Kept, bool],
        given: Sequence[Any],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Holds what a launch declares against what torch has shown of older memory.

        Raises:
            ArgumentError: it declares nothing, and touches memory that is watched or was given some; or it writes what
                it does not declare.
        """
        if not reads and not writes and (seen or any(self._watched(one) for one in given)):
            raise ArgumentError(
                f"the launch of {name!r} declares nothing, and touches or was given memory that is watched",
                value=name,
                remedy=_REMEDY,
            )
        written = {self._accesses.kept(one) for one in writes}
        for kept, writes_it in seen.items():
            if writes_it and kept not in written:
                raise ArgumentError(
                    f"the launch of {name!r} writes {kept}, which it does not declare", value=name, remedy=_REMEDY
                )

    def add_declared(
        self, name: str, seen: Mapping[Kept, bool], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Adds the accesses that a launch declares and torch did not show.

        Raises:
            Race: one of them is not ordered.
        """
        accesses = self._accesses
        accesses.pinned_touched(reads, writes)
        accesses.declared(
            name,
            [one for one in reads if accesses.kept(one) not in seen],
            [one for one in writes if not seen.get(accesses.kept(one), False)],
        )

    def _watched(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return bool(value.numel()) and self._accesses.memories.of(value) is not None
        if isinstance(value, Mapping):
            value = list(value.values())
        return isinstance(value, list | tuple) and any(self._watched(one) for one in value)
