"""Operations of torch as accesses of streams and of the host, and waits of the host, for the detector."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from batchstate._source_lines import source_line
from batchstate.errors import ArgumentError
from batchstate.races.detector import Detector, RaceAllocation
from batchstate.races.history import Entry
from batchstate.races.host_memory import HostMemory
from batchstate.races.report import EventKind
from batchstate.races.tracing.clocks import StreamClock
from batchstate.races.tracing.dispatch import TracedCall, Tracer, untraced
from batchstate.races.tracing.memory import HOST_KINDS, MemoryKind, Name
from batchstate.races.tracing.operations import Awaits, MemoryAccess, Operation, tensors_in
from batchstate.races.tracing.regions import ByteRegion, of_tensor
from batchstate.races.tracing.runtime import TracedRuntime

Checked = list[tuple[RaceAllocation, ByteRegion, bool]]
"""Memory, the bytes of it, and whether they are written."""

_REMEDY = "say `reads=` and `writes=`: what a kernel or the replay of a graph touches, nothing else can know"


class RaceTracer(Tracer[RaceAllocation]):
    """Tells the detector of every access, which may raise `Race`. Operations run at once, in program order.

    Copies behave as torch documents them and `aten/src/ATen/native/TensorConversions.cpp` has them: a copy is
    asynchronous if it is asked to be and the host memory is pinned; `.to("cpu", non_blocking=True)` lands in pinned
    memory of its own; everything else waits.

    Args:
        runtime: has the clocks of streams.
        detector: checks the accesses.

    Attributes:
        host_memory: copies between host and device.
        pieces: pieces of memory seen so far: the number of the newest.
        launched: name of the innermost launch under way, for reports.
        replaying: whether operations are those of a graph.
        seen: memory accessed since that launch began -> whether it was written; None outside of launches.
    """

    def __init__(self, runtime: TracedRuntime[StreamClock], detector: Detector) -> None:
        super().__init__(runtime.device, self._freed)
        self.detector = detector
        self.host_memory = HostMemory(detector)
        self.pieces = 0
        self.launched: str | None = None
        self.replaying = False
        self.seen: dict[RaceAllocation, bool] | None = None
        self._inner = runtime._inner
        self._clock_of: Callable[[Any], StreamClock] = runtime._known_stream
        self._note_sync = runtime._note_sync

    def current(self) -> StreamClock:
        """The clock of the current stream."""
        return self._clock_of(self._inner.current_stream)

    # Memory

    def keep(self, tensor: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
        """Notes whose memory a new tensor is, and returns the tensor."""
        self.allocate(tensor, kind)
        return tensor

    def allocate(self, tensor: torch.Tensor, kind: MemoryKind) -> RaceAllocation:
        """Notes whose memory a new tensor is, and where it was made."""
        stream = None if kind in HOST_KINDS else self.current()
        if kind is MemoryKind.PINNED:
            self.detector.allocates_pinned()
        return self.allocations.add(tensor, RaceAllocation(kind, self._name(tensor), stream, source_line(2)))

    def allocate_on_device(self, tensor: torch.Tensor, entry: Entry) -> RaceAllocation:
        """New device memory, written by an event."""
        __tracebackhide__ = True
        allocation = RaceAllocation(MemoryKind.DEVICE, self._name(tensor), entry.stream, entry.source_line)
        self.allocations.add(tensor, allocation)
        region = of_tensor(tensor)
        if region is not None:
            entry.writes = (*entry.writes, (allocation.name, region))
            self.detector.note_first(entry, allocation, region)
        self.detector.allocates(entry.stream, entry)
        return allocation

    def _freed(self, allocation: RaceAllocation) -> None:
        """The last tensor of a piece of memory is gone."""
        self.detector.freed(allocation)

    def keep_for(self, tensor: torch.Tensor, stream: StreamClock) -> None:
        """The memory is kept until a stream has run all that it has by then."""
        self.use_on_device(tensor).kept_for.add(stream.number)

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.keep_for(tensor, self._clock_of(stream))

    def _existing(self, tensor: torch.Tensor) -> RaceAllocation:
        return RaceAllocation(MemoryKind.DEVICE, self._name(tensor), None, None)

    def _decided(self, allocation: RaceAllocation) -> None:
        write = allocation.first_write
        if write is not None:
            write.hidden = False
            write.stream.work = max(write.stream.work, write.number)

    def _lift(self, tensor: torch.Tensor, from_factory: bool) -> torch.Tensor:
        return self.keep(tensor, MemoryKind.UNDECIDED if from_factory else MemoryKind.HOST)

    def _name(self, tensor: torch.Tensor) -> Name:
        self.pieces += 1
        return Name(self.pieces, tensor)

    def _accessed(self, tensor: torch.Tensor) -> RaceAllocation | None:
        """The memory that a stream accesses; None if it is not checked.

        Pinned memory stays the host's, also where a copy of the device accesses it.
        """
        allocation = self.allocations.of(tensor)
        if allocation is None:
            return self.use_on_device(tensor) if self._is_checked(tensor) else None
        return self.use_on_device(tensor) if allocation.kind is MemoryKind.UNDECIDED else allocation

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        """Whether accesses to memory seen for the first time are checked: the device cannot access pageable memory."""
        return self.on_cpu or tensor.device.type != "cpu"

    # Accesses of streams

    def begin(
        self, kind: EventKind, name: str, accesses: Sequence[MemoryAccess], *, updates: bool = False
    ) -> tuple[Entry, Checked]:
        """An event of the current stream is about to access memory; `end` it once that has happened.

        Accesses to unchecked memory are left out. `updates` says that it reads what it writes.
        """
        __tracebackhide__ = True
        checked: Checked = []
        read: list[tuple[Name, ByteRegion]] = []
        written: list[tuple[Name, ByteRegion]] = []
        for tensor, region, writes in accesses:
            memory = self._accessed(tensor)
            if memory is not None:
                checked.append((memory, region, writes))
                (written if writes else read).append((memory.name, region.brief()))
        called = name if self.launched is None else f"{name} ({self.launched})"
        entry = self.detector.event(self.current(), kind, called, reads=read, writes=written, at=source_line(2))
        if checked:
            self.detector.check(entry, checked, updates=updates)
        return entry, checked

    def end(self, entry: Entry, checked: Checked) -> None:
        """The event of `begin` has happened."""
        self.detector.note(entry, checked)
        if self.seen is not None:
            for allocation, _, writes in checked:
                self.seen[allocation] = writes or self.seen.get(allocation, False)

    def access(self, kind: EventKind, name: str, accesses: Sequence[MemoryAccess]) -> Entry:
        """An event of the current stream accesses memory."""
        __tracebackhide__ = True
        entry, checked = self.begin(kind, name, accesses)
        self.end(entry, checked)
        return entry

    def declared(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Accesses that a launch declares and torch did not show."""
        accesses = _whole(reads, writes)
        if accesses:
            seen, self.seen = self.seen, None  # a launch inside of another declares for itself
            try:
                entry = self.access(EventKind.OPERATION, name, accesses)
            finally:
                self.seen = seen
            for tensor in reads:
                if self.kind_of(tensor) is MemoryKind.PINNED:  # the host may write it unseen until the kernel has run
                    self._reads_source(entry, tensor, by_torch=False)

    def _on_device(self, call: TracedCall) -> Any:
        __tracebackhide__ = True
        operation, func, args, kwargs, tensors, _ = call
        if self._converts(call):
            return self._converted(args[0], kwargs)
        accesses: Sequence[MemoryAccess] = ()
        awaits = Awaits.NOTHING
        if tensors:
            accesses = self._accesses(call)
            awaits = operation.awaits(args, kwargs, self.kind_of)  # before undecided operands become the device's
        if awaits is Awaits.BEFORE and MemoryKind.PINNED in call.kinds:  # an index, which is copied ahead of the wait
            ahead = [access for access in accesses if self.kind_of(access.tensor) is MemoryKind.PINNED]
            self.access(EventKind.COPY_TO_DEVICE, operation.name, ahead)
            accesses = [access for access in accesses if not any(access is other for other in ahead)]
        entry, checked = self.begin(EventKind.OPERATION, operation.name, accesses, updates=operation.updates)
        result = func(*args, **kwargs)
        self.end(entry, checked)
        for tensor in tensors_in(result):
            if self.allocations.of(tensor) is None and (self.on_cpu or self.kind_of(tensor) is MemoryKind.DEVICE):
                allocation = self.allocate_on_device(tensor, entry)
                if operation.leaves_empty:
                    self.detector.unwritten(allocation, entry)
        if awaits is Awaits.RESULT:
            self._synchronise(operation.name, entry.stream.seen)
        elif awaits is Awaits.BEFORE:
            seen = list(entry.stream.seen)
            seen[entry.stream.number] = entry.number - 1  # it is in flight itself
            self._synchronise(operation.name, seen)
        return result

    def _accesses(self, call: TracedCall) -> list[MemoryAccess]:
        return call.operation.accesses(call.args, call.kwargs, self._read_index)

    def _read_index(self, index: torch.Tensor) -> Any:
        """The values of an index, whichever stream made it. The tool's own look orders nothing."""
        if index.device.type == "cpu":
            return index.numpy()
        self._inner._wait_for_device()
        return self._inner._read_back(index)

    # Accesses of the host

    def host_accesses(self, tensor: torch.Tensor, name: str, *, writes: bool, region: ByteRegion | None = None) -> None:
        """The host accesses pinned memory: all of a tensor, or some bytes."""
        __tracebackhide__ = True
        allocation, region = self.allocations.of(tensor), region or of_tensor(tensor)
        if allocation is None or region is None:
            return
        used = [(allocation.name, region)]
        entry = self.detector.event(
            self.detector.clocks.host,
            EventKind.HOST_ACCESS,
            name,
            reads=() if writes else used,
            writes=used if writes else (),
            at=source_line(2),
        )
        self.detector.check(entry, [(allocation, region, writes)])
        self.detector.note(entry, [(allocation, region, writes)])
        if writes:
            with untraced():
                self.host_memory.overwritten(allocation, region)

    def host_waits(self, seen: list[int]) -> None:
        """The host has waited for the events that `seen` has reached: their copies have landed."""
        self.detector.clocks.host_joins(seen)
        if not self.host_memory.idle:
            with untraced():
                self.host_memory.settle()

    def _synchronise(self, name: str, seen: list[int]) -> None:
        self._note_sync(name)
        self.host_waits(seen)

    def _read_by_host(self, tensor: torch.Tensor, name: str) -> None:
        self.host_accesses(tensor, name, writes=False)

    def _host_uses_pinned(self, call: TracedCall) -> None:
        for tensor, region, writes in call.operation.accesses(call.args, call.kwargs, self._read_index):
            if self.kind_of(tensor) is MemoryKind.PINNED:
                self.host_accesses(tensor, call.operation.name, writes=writes, region=region)

    def _on_host(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, _, kinds = call
        if self._converts(call):
            return self._converted(args[0], kwargs)
        if MemoryKind.PINNED in kinds:
            self._host_uses_pinned(call)
        result = func(*args, **kwargs)
        from_host = any(kind in HOST_KINDS for kind in kinds)
        for tensor in tensors_in(result):
            allocation = self.allocations.of(tensor)
            if not self.on_cpu:
                if tensor.device.type != "cpu":
                    entry = self.access(EventKind.OPERATION, operation.name, ())
                    if allocation is None:
                        self.allocate_on_device(tensor, entry)
            elif not from_host:
                self._undecided(allocation or self.allocate(tensor, MemoryKind.UNDECIDED), tensor, operation)
            elif allocation is None:
                self.keep(tensor, MemoryKind.HOST)
        return result

    def _undecided(self, allocation: RaceAllocation, tensor: torch.Tensor, operation: Operation) -> None:
        """An operation of unknown device wrote a tensor.

        Should the tensor turn out to be the device's, it was written on the stream that is current now. Until then no
        access is compared with the write: memory of the host has no streams.
        """
        region = of_tensor(tensor)
        if allocation.kind is MemoryKind.UNDECIDED and region is not None:
            first = allocation.first_write
            allocation.first_write = self.detector.event(
                self.current(),
                EventKind.OPERATION,
                operation.name,
                writes=[(allocation.name, region)],
                at=source_line(2),
                hidden=first is None or first.hidden,
            )
            self.detector.note(allocation.first_write, [(allocation, region, True)])
            allocation.fresh = None
            if operation.leaves_empty:
                self.detector.unwritten(allocation, allocation.first_write)

    # Copies between host and device

    def copied_to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A copy of pinned memory to device memory was enqueued on the current stream."""
        self._reads_source(self._transfer(EventKind.COPY_TO_DEVICE, source, target), source)

    def copied_to_host(self, source: torch.Tensor, target: torch.Tensor, values: torch.Tensor | None) -> None:
        """A copy of device memory to pinned memory is enqueued on the current stream.

        `values` land in `target`; None where a device copies by itself.
        """
        entry = self._transfer(EventKind.COPY_TO_HOST, source, target)
        allocation, region = self.allocations.of(target), of_tensor(target)
        if allocation is not None and region is not None:
            with untraced():
                self.host_memory.lands(entry, allocation, region, target, values)
            if not self.replaying:
                allocation.kept_for.add(entry.stream.number)

    def _reads_source(self, entry: Entry, source: torch.Tensor, *, by_torch: bool = True) -> None:
        """Something reads pinned memory when it runs. Torch keeps the block for copies of its own, but for no graph."""
        kept = by_torch and not self.replaying
        allocation, region = self.allocations.of(source), of_tensor(source)
        if allocation is not None and region is not None:
            if kept:
                allocation.kept_for.add(entry.stream.number)
            with untraced():
                self.host_memory.reads(entry, allocation, region, source, kept)

    def _copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to_device(source, target)
        target.copy_(source, non_blocking=True)

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to_host(source, target, source.to("cpu", target.dtype, copy=True).expand(target.shape))

    def _copy_blocking(self, target: torch.Tensor, source: torch.Tensor, to_device: bool, non_blocking: bool) -> None:
        before = list(self.current().seen)
        entry = self._transfer(EventKind.COPY_TO_DEVICE if to_device else EventKind.COPY_TO_HOST, source, target)
        # From pageable memory the host waits for the stream and until the source was read, not for the copy.
        staged = to_device and non_blocking
        self._synchronise("copy_", before if staged else entry.stream.seen)
        target.copy_(source, non_blocking)

    def _brought_to_host(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if name == "tolist":  # into numbers, which are not memory
            region = of_tensor(tensor)
            read = () if region is None else (MemoryAccess(tensor, region, False),)
            entry, values = self.access(EventKind.COPY_TO_HOST, "copy to host", read), tensor
        else:
            values = self.keep(tensor.detach().to(dtype, copy=True), MemoryKind.HOST)
            entry = self._transfer(EventKind.COPY_TO_HOST, tensor, values)
        self._synchronise(name, entry.stream.seen)
        return values

    def _new_on_device(self, like: torch.Tensor, dtype: torch.dtype, **layout: Any) -> torch.Tensor:
        result = torch.empty_like(like, dtype=dtype, **layout)
        self.allocate_on_device(result, self.access(EventKind.ALLOCATION, "empty", ()))
        return result

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if not self.on_cpu and self.allocations.of(tensor) is None and tensor.is_pinned():
            self.keep(tensor, MemoryKind.PINNED)
        return self.kind_of(tensor) is MemoryKind.PINNED

    def _converts(self, call: TracedCall) -> bool:
        """Whether a call is `.to(...)` from one side of an accelerator to the other."""
        if self.on_cpu or call.operation.name != "_to_copy":
            return False
        device = call.kwargs.get("device")
        return device is not None and (device.type == "cpu") is (self.kind_of(call.args[0]) is MemoryKind.DEVICE)

    def _converted(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """`.to(...)` to the other side of an accelerator, which torch runs."""
        to_device, non_blocking = kwargs["device"].type != "cpu", bool(kwargs.get("non_blocking", False))
        pinned = non_blocking and (not to_device or self._is_pinned(source))
        made = self.access(EventKind.ALLOCATION, "empty", ()) if to_device else None
        before = list(self.current().seen)
        kind = EventKind.COPY_TO_DEVICE if to_device else EventKind.COPY_TO_HOST
        entry, checked = self.begin(kind, str(kind), _whole([source]))
        result: torch.Tensor = torch.ops.aten._to_copy.default(source, **kwargs)
        region = of_tensor(result)
        if region is not None and (to_device or pinned):
            allocation = (
                self.allocate(result, MemoryKind.PINNED) if made is None else self.allocate_on_device(result, made)
            )
            checked.append((allocation, region, True))
            entry.writes = (*entry.writes, (allocation.name, region))
            if not to_device:
                with untraced():
                    self.host_memory.lands(entry, allocation, region, result, self._held_back(result))
        self.end(entry, checked)
        if to_device and pinned:
            self._reads_source(entry, source)
        elif not pinned:  # from pageable memory the host waits for the stream, not for the copy
            self._synchronise("_to_copy", before if to_device and non_blocking else entry.stream.seen)
        return result

    def _held_back(self, result: torch.Tensor) -> torch.Tensor | None:
        """The values of a copy to the host, which finds poison until it has waited; None leaves them in place."""
        self._inner._wait_for_device()  # the tool's own look, which orders nothing
        return result.clone()

    def _transfer(self, kind: EventKind, source: torch.Tensor, target: torch.Tensor) -> Entry:
        return self.access(kind, str(kind), _whole([source], [target]))

    # Declared accesses of a launch

    def check_declared(
        self,
        name: str,
        seen: Mapping[RaceAllocation, bool],
        arguments: Sequence[Any],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Compares the accesses that a launch declares with those to older memory that torch has shown.

        Raises:
            ArgumentError: it declares nothing, and accesses traced memory or was given some; or it writes memory that
                it does not declare.
        """
        if not reads and not writes and (seen or any(map(self._is_traced, arguments))):
            problem = f"the launch of {name!r} declares nothing, and touches or was given memory that is traced"
            raise ArgumentError(problem, name, _REMEDY)
        written = set(map(self.use_on_device, writes))
        for allocation, writes_it in seen.items():
            if writes_it and allocation not in written:
                problem = f"the launch of {name!r} writes {allocation}, which it does not declare"
                raise ArgumentError(problem, name, _REMEDY)

    def add_declared(
        self,
        name: str,
        seen: Mapping[RaceAllocation, bool],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Adds the accesses that a launch declares and torch did not show."""
        stream = self.current()
        for tensor in (*reads, *writes):  # copies into pinned memory ahead of the kernel have landed by then
            allocation, region = self.allocations.of(tensor), of_tensor(tensor)
            if allocation is not None and allocation.kind is MemoryKind.PINNED and region is not None:
                with untraced():
                    self.host_memory.ordered(stream, allocation, region)
                    if any(tensor is other for other in writes):
                        self.host_memory.overwritten(allocation, region)
        self.declared(
            name,
            [tensor for tensor in reads if self.use_on_device(tensor) not in seen],
            [tensor for tensor in writes if not seen.get(self.use_on_device(tensor), False)],
        )

    def _is_traced(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return bool(value.numel()) and self.allocations.of(value) is not None
        if isinstance(value, Mapping):
            value = list(value.values())
        return isinstance(value, list | tuple) and any(map(self._is_traced, value))


def _whole(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor] = ()) -> list[MemoryAccess]:
    """Accesses to all elements of some tensors."""
    both = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
    return [MemoryAccess(tensor, region, writing) for tensor, writing in both if (region := of_tensor(tensor))]
