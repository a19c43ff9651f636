"""`RaceRuntime`: a runtime that finds races, on a CPU or round an accelerator.

Operations run at once, in program order, and the waits that order them are traced. So one run tells of every pair of
accesses whether it is ordered, in any run. Fences are complete when the host has waited for them or for something
behind them, so that a host that reads too early meets a fence that is not.
"""

import asyncio
import functools
import pkgutil
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar, final
from unittest.mock import patch

import attrs
import numpy as np
import torch

from batchstate._source_lines import SourceLine, source_line
from batchstate.errors import ArgumentError
from batchstate.races.detector import Detector, OnRace
from batchstate.races.hints import HintFor, hint_for
from batchstate.races.owners import AskedOwners, Declared, Valid
from batchstate.races.report import EventKind, RaceReport
from batchstate.races.tracer import RaceTracer
from batchstate.races.tracing.clocks import Clocks, StreamClock
from batchstate.races.tracing.dispatch import is_raw, untraced
from batchstate.races.tracing.memory import MemoryKind
from batchstate.races.tracing.runtime import TracedRuntime
from batchstate.races.waits import Waits, WideWait
from batchstate.runtime import DoneFence, Fence, MappedMemory, Runtime, Stream
from batchstate.runtime.base import Array, Owners, foreign_fence
from batchstate.runtime.memory import StagingBlock


@final
class InFlight:
    """Counts steps with work that the host does not know to be over. Fences, waits and set-up do not count.

    Args:
        clocks: of the run.

    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._ends: deque[list[int]] = deque()  # per earlier step: its newest work on each stream, or 0
        self._before: list[int] = []  # the newest work of each stream when the present step began
        self._began = False
        self._most = 0  # in the present step
        self._past: list[int] = []

    @property
    def now(self) -> int:
        """Steps under way, the present one included. Work before the first `next_step` is no step."""
        while self._ends and self._is_over(self._ends[0]):
            self._ends.popleft()
        return len(self._ends) + (self._began and not self._is_over(self._present()))

    @property
    def depths(self) -> list[int]:
        """The most steps under way during each step, oldest first."""
        return [*self._past, self._most] if self._began and any(self._present()) else self._past

    def _present(self) -> list[int]:
        """The newest work of the present step on each stream, or 0."""
        before = [*self._before, *[0] * (len(self._clocks.streams) - 1 - len(self._before))]
        streams = self._clocks.streams[1:]
        return [stream.work if stream.work > was else 0 for stream, was in zip(streams, before, strict=True)]

    def _is_over(self, ends: list[int]) -> bool:
        return all(self._clocks.host.knows(at, event) for at, event in enumerate(ends, start=1))

    def note(self) -> None:
        """To be called before the host learns something, and before a step ends: the number only falls there."""
        self._most = max(self._most, self.now)

    def step_ends(self) -> None:
        """Work from here on belongs to another step."""
        self.note()
        present = self._present()
        if self._began and any(present):
            self._ends.append(present)
            self._past.append(self._most)
        self._before = [stream.work for stream in self._clocks.streams[1:]]
        self._began = True
        self._most = 0


PATIENCE = 10_000
"""Times that a fence is asked before it is complete: code that polls instead of waiting gets on, as on a device."""

SLEPT = 100
"""Times that a question counts behind a `time.sleep` or `asyncio.sleep` of the host: it polls with pauses."""

DONE: Fence = DoneFence()


@final
@attrs.define(eq=False)
class RaceFence:
    """A point in a stream. Complete once the host has waited for it, or for something behind it.

    Attributes:
        name: for reports; `fence 3` unless an event has a name of its own.
        event: number of its recording.
        stream: number of the stream it was recorded on.
        seen: stream -> newest event that lies before it.
        owner: the runtime.
    """

    name: str
    event: int
    stream: int
    seen: list[int] = attrs.field(repr=False)
    owner: "RaceRuntime" = attrs.field(repr=False)
    _inner: Fence = attrs.field(repr=False)
    _patience: int | None = attrs.field(repr=False)  # None: PATIENCE
    _asked: int = 0
    _slept: int = 0

    def __repr__(self) -> str:
        return f"<{self.name} on {self.owner._detector.clocks.streams[self.stream].name!r}>"

    def query(self) -> bool:
        """Whether the host knows that everything before it has run. Never waits."""
        self.owner.check_owner("asking a fence")
        if self.owner._is_over(self):
            return True
        self._asked += 1 if self._slept == self.owner.slept else SLEPT
        self._slept = self.owner.slept
        if self._asked >= (PATIENCE if self._patience is None else self._patience) and self._inner.query():
            if self._patience is None:
                self.owner.polled_at[source_line()] += 1
            self.owner._host_joins(self)
            return True
        return False

    def wait(self) -> None:
        """The host waits until everything before it has run, and knows so from then on."""
        self.owner.check_owner("waiting for a fence")
        self.owner.counters.fence_waits += 1
        self._inner.wait()
        self.owner._host_joins(self)


P = ParamSpec("P")
T = TypeVar("T")


class RaceRuntime(TracedRuntime[StreamClock]):
    """Checks everything that runs through it, and through torch in a `with` window of it.

    Example:
        with RaceRuntime() as rt:
            engine = Engine(rt, ...)
            engine.run()

    Args:
        inner: a fresh runtime to run on, used through this one alone. By default the CPU.
        steps_in_flight: see `Runtime`; ignored beside `inner`, which has its own.
        on_race: `"raise"` the first race as `Race`, before the second access happens, or `"collect"` them in `races`.
        fences: the answer to a host that asks a fence. With `"lazy"` it is complete once the host has waited for it, or
            for something behind it: the least order a device may have. With `"eager"` it is complete at once, and the
            host knows the operations before it and no others: memory freed behind the wrong fence is reused at once.
        note_waits: keep the accesses that need each wait, for `wide_waits`.
        hint_for: words the missing edge and the remedy of a report.

    Attributes:
        slept: calls of `time.sleep` and `asyncio.sleep` in the window.
        polled_at: lines that have asked a fence until it was complete for their patience alone, and how often.
    """

    _tracer: RaceTracer

    def __init__(
        self,
        inner: Runtime | None = None,
        *,
        steps_in_flight: int = 2,
        on_race: OnRace = "raise",
        fences: Literal["lazy", "eager"] = "lazy",
        note_waits: bool = False,
        hint_for: HintFor = hint_for,
    ) -> None:
        if on_race not in ("raise", "collect"):
            problem = f"expected on_race 'raise' or 'collect', got {on_race!r}"
            raise ArgumentError(problem, on_race, "'raise' stops at the first race")
        if fences not in ("lazy", "eager"):
            raise ArgumentError(f"fences is {fences!r}", fences, "use 'lazy' or 'eager'")
        self._detector = Detector(lambda: self.step, on_race, hint_for)
        if note_waits:
            self._detector.waits = Waits(self._detector.history)
        self._fences = 0
        self.slept = 0
        self.polled_at: Counter[SourceLine] = Counter()
        self._patience = 1 if fences == "eager" else None
        self._in_flight = InFlight(self._detector.clocks)
        super().__init__(inner, steps_in_flight)

    def __enter__(self) -> Self:
        """From now on the detector is told of the operations of this thread, and of pauses of the host."""
        super().__enter__()
        if self._window is not None:
            for module in (time, asyncio):
                self._window.enter_context(patch.object(module, "sleep", self._counted(module.sleep)))
        return self

    def _counted(self, sleep: Callable[P, T]) -> Callable[P, T]:
        def sleeps(*args: P.args, **kwargs: P.kwargs) -> T:
            self.slept += 1
            return sleep(*args, **kwargs)

        return sleeps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the window. Copies that are under way have run by then.

        Raises:
            Race: the source of one of them had changed; not where an error ends the window.
        """
        self._leave()
        self._in_flight.note()
        self._tracer.allocations.close()
        if error is None:
            self._tracer.host_memory.close()

    def _new_tracer(self) -> RaceTracer:
        return RaceTracer(self, self._detector)

    @property
    def races(self) -> tuple[RaceReport, ...]:
        """The reports so far, at most one for the same two lines."""
        return tuple(self._detector.races)

    @property
    def accesses(self) -> int:
        """Accesses checked."""
        return self._detector.accesses

    @property
    def comparisons(self) -> int:
        """Logs of other streams that accesses were compared with: the cost of the search."""
        return self._detector.comparisons

    def wide_waits(self) -> tuple[WideWait, ...]:
        """Waits for more than is needed, so far: the operation that each has to order, and those waited for besides.

        Raises:
            ArgumentError: the runtime was made without `note_waits`.
        """
        if self._detector.waits is None:
            problem = "wide_waits of a run that kept no waits"
            raise ArgumentError(problem, self, "pass `note_waits=True` to `RaceRuntime`")
        return self._detector.waits.wide()

    @property
    def in_flight_depths(self) -> list[int]:
        """The most steps with work that the host did not know to be over, in each step with work, oldest first."""
        self._in_flight.note()
        return list(self._in_flight.depths)

    def next_step(self) -> int:
        """Begins the next step; see `Runtime.next_step`."""
        number = super().next_step()
        self._in_flight.step_ends()
        return number

    def launch(
        self,
        operation: Callable[..., T],
        *args: Any,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        name: str = "",
        operations: int = 1,
        **kwargs: Any,
    ) -> T:
        """Runs a device operation; see `Runtime.launch`. `reads` and `writes` add accesses that torch does not show.

        A slice of a tensor declares its rows. Declared accesses of a `raw_kernel` are checked before it runs.

        Raises:
            ArgumentError: it declares nothing and accesses traced memory, or was given some and showed nothing; or it
                writes memory that it does not declare.
            Race: a declared access is not ordered.
        """
        called = name or getattr(operation, "__name__", "launch")
        tracer, arguments = self._tracer, (*args, *kwargs.values())
        named: dict[str, Any] = {"reads": reads, "writes": writes, "name": name, "operations": operations, **kwargs}
        if is_raw(operation):
            if self._window is not None:
                tracer.check_declared(called, {}, arguments, reads, writes)
                tracer.add_declared(called, {}, reads, writes)
            with untraced():
                return super().launch(operation, *args, **named)
        pieces, outer = tracer.pieces, (tracer.seen, tracer.launched)
        seen: dict[Any, bool] = {}
        tracer.seen, tracer.launched = seen, name or None
        try:
            result = super().launch(operation, *args, **named)
        finally:
            tracer.seen, tracer.launched = outer
        if self._window is not None:
            older = {memory: written for memory, written in seen.items() if memory.name.number <= pieces}
            tracer.check_declared(called, older, arguments, reads, writes)
            tracer.add_declared(called, seen, reads, writes)
        return result

    def inspect(self, tensor: torch.Tensor) -> Array:
        """Reads device memory for a check: no access, and no order for later operations. See `Runtime.inspect`."""
        self._detector.inspected(self._known_current())
        with untraced():
            values = self._inner.inspect(tensor)
        self.counters.check_reads += 1
        return values

    # Whose values

    def rows_of(self, table: torch.Tensor, owner: AskedOwners | None = None, *, valid: Valid | None = None) -> None:
        """Declares that each row of a table has an owner: reading what another owner has left is a `LEFTOVER_READ`.

        Args:
            table: contiguous, rows first.
            owner: returns row -> owner, for rows that have one, or an array with 0 for nobody; it is asked before each
                access. Left out where `owned_by` tells it. Two turns of one request are two owners: `(request, turn)`.
            valid: returns what a read counts for: the first so many rows, or row -> its first so many elements. Without
                it all of a read counts, but for one of the whole tensor, which counts for nothing.

        Raises:
            ArgumentError: the table is not contiguous, or no memory that the detector knows.
        """
        declared = self._declare(table, valid)
        if owner is not None:
            declared.ask(owner)

    def owned_by(self, table: torch.Tensor, rows: Any, who: Hashable) -> None:
        """Tells that rows belong to `who` from now on, or with None to nobody. The first call declares the table.

        Raises:
            ArgumentError: there is no such row; else as `rows_of`.
        """
        allocation = self._tracer.allocations.of(table)
        if allocation is None or not allocation.declared:
            self._declare(table, None)
        for declared in self._tracer.use_on_device(table).declared:
            declared.give(rows, who)

    def fresh(self, buffer: torch.Tensor, *, valid: Valid | None = None) -> None:
        """Declares that each step writes a buffer anew: reading what an earlier one has left is a `LEFTOVER_READ`.

        Values from before the declaration, or the first `next_step`, count for every step. Else as `rows_of`.
        """
        self._declare(buffer, valid, lambda rows: np.full(rows.size, self.step), by="step")

    def after(self, method: str, then: Callable[[Any], object]) -> None:
        """Calls `then(self)` behind each call of a method of the engine, `module:Class.method`, in the window.

        Owners and steps of an engine are declared so from outside: `after("engine.scheduler:Scheduler.schedule",
        lambda scheduler: cuda.next_step())`.

        Raises:
            ArgumentError: there is no such method, or no window is open.
        """
        if self._window is None:
            raise ArgumentError(f"after {method!r} outside of a window", method, "call it inside of `with`")
        try:
            owner, name = pkgutil.resolve_name(method.rpartition(".")[0]), method.rpartition(".")[2]
            before = getattr(owner, name)
        except (ImportError, AttributeError, ValueError) as error:
            problem = f"after names {method!r}: {error}"
            raise ArgumentError(problem, method, "name a method as `module:Class.method`") from None

        @functools.wraps(before)
        def both(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = before(this, *args, **kwargs)
            then(this)
            return result

        self._window.enter_context(patch.object(owner, name, both))

    def _declare(
        self, tensor: torch.Tensor, valid: Valid | None, owners: Owners | None = None, by: str = ""
    ) -> Declared:
        shape, allocation = list(tensor.shape), self._tracer.allocations.of(tensor)
        if not tensor.ndim or not tensor.is_contiguous():
            problem = f"owners of a tensor {shape} with strides {list(tensor.stride())}"
            raise ArgumentError(problem, shape, "declare a contiguous tensor with one row per owner")
        if allocation is None:
            problem = f"a tensor {shape} of which the detector knows no memory"
            raise ArgumentError(problem, shape, "make it on the device, inside of the window")
        allocation.declared.append(declared := Declared(tensor, owners, by=by, valid=valid))
        return declared

    def own_rows(self, memory: torch.Tensor, owners: Owners, *, by_step: bool = False) -> None:
        """See `Runtime.own_rows`."""
        if memory.numel() and memory[0].is_contiguous():
            count, by = len(memory), "step" if by_step else "owner"
            declared = Declared(memory, owners, by=by, valid=(lambda: count) if by_step else None, rows=True)
            self._tracer.use_on_device(memory).declared.append(declared)

    def name_memory(self, tensor: torch.Tensor, name: str) -> None:
        """See `Runtime.name_memory`."""
        allocation = self._tracer.allocations.of(tensor)
        if allocation is not None:
            allocation.name.label = name

    notes_host = True

    def host_accesses(self, memory: torch.Tensor, start: int, stop: int, name: str, *, writes: bool) -> None:
        """See `Runtime.host_accesses`: a race with any access of a stream to the rows that is not over."""
        with untraced():
            rows = memory[start:stop]
        self._tracer.host_accesses(rows, name, writes=writes)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with untraced():
            tensor = self._tracer.keep(self._inner._pinned(nbytes), MemoryKind.PINNED)
        self.name_memory(tensor, "staging")
        return tensor

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with untraced():
            tensor = self._inner._device_memory(shape, dtype)
        entry = self._detector.event(self._known_current(), EventKind.ALLOCATION, "empty")
        self._detector.unwritten(self._tracer.allocate_on_device(tensor, entry), entry)
        return tensor

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        with untraced():
            mapped = self._inner._mapped(shape, dtype)
        self._tracer.keep(mapped.device, MemoryKind.DEVICE)  # no stream allocated it, and none has to be waited for
        return mapped

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            self._tracer.copied_to_device(block.tensor[:nbytes], into)  # checked before it happens
            with untraced():
                return self._inner._copied_to_device(block, nbytes, into)
        with untraced():
            tensor = self._inner._copied_to_device(block, nbytes, None)
        entry = self._detector.event(self._known_current(), EventKind.ALLOCATION, "upload")
        allocation = self._tracer.allocate_on_device(tensor, entry)
        allocation.name.label = f"upload {allocation.name.number}"
        self._tracer.copied_to_device(block.tensor[:nbytes], tensor)
        return tensor

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        with untraced():
            source = source.view(torch.uint8)
            target = block.tensor[: source.numel()]
            if self.device.type == "cpu":
                values = source.clone()
            else:
                self._inner._copied_to_host(block, source)
                self._inner.record().wait()
                values = target.clone()
        self._tracer.copied_to_host(source, target, values)

    def _read_back(self, source: torch.Tensor) -> Array:
        self._tracer.declared("read back", [source], [])
        self._tracer.host_waits(self._known_current().seen)
        with untraced():
            return self._inner._read_back(source)

    def _wait_for_device(self) -> None:
        self._inner._wait_for_device()
        self._all_is_over()

    def _all_is_over(self) -> None:
        """The host has waited for the whole device: for each stream that has work, which is judged by itself."""
        self._in_flight.note()
        host = self._detector.clocks.host
        entry = self._detector.event(host, EventKind.WAIT, "wait for the device")
        for stream in self._detector.clocks.streams[1:]:
            if self._detector.waits is not None and not host.knows(stream.number, stream.work):
                self._detector.waits.note(entry, "all", stream, entry.number, list(host.seen), stream.seen)
            self._tracer.host_waits(stream.seen)

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence behind everything enqueued on a stream so far."""
        self.check_owner("record")
        self.refuse_capture("recording a fence")
        self._fences += 1
        return self._recorded(stream, f"fence {self._fences}")

    def _recorded(self, stream: Stream | None, name: str) -> RaceFence:
        return self._fence(self._known_stream(stream or self.current_stream), name, self._inner.record(stream))

    def _fence(self, clock: StreamClock, name: str, inner: Fence = DONE) -> RaceFence:
        entry = self._detector.event(clock, EventKind.FENCE, name)
        return RaceFence(name, entry.number, clock.number, list(clock.seen), self, inner, self._patience)

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        self.check_owner("wait")
        if not isinstance(fence, RaceFence) and fence.query():
            return
        if not isinstance(fence, RaceFence) or fence.owner is not self:
            raise foreign_fence(fence)
        self._inner._stream_wait(stream, fence._inner)
        clock = self._known_stream(stream)
        self._note_wait(clock, fence)
        clock.join(fence.seen)

    def _note_wait(self, waits: StreamClock, fence: RaceFence) -> None:
        """A stream, or the host, is about to wait for a fence."""
        entry = self._detector.event(waits, EventKind.WAIT, f"wait for {fence.name}", waits_for=fence.event)
        if self._detector.waits is not None:
            of = self._detector.clocks.streams[fence.stream]
            self._detector.waits.note(entry, fence.name, of, fence.event, waits.seen, fence.seen)

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        with untraced():
            self._inner._keep_alive(tensor, stream)
        self._tracer.keep_for(tensor, self._known_stream(stream))

    def _new_stream(self, name: str) -> StreamClock:
        return self._detector.clocks.add(name)

    def _known_stream(self, stream: Any) -> StreamClock:
        """The clock of a stream, which may be one of torch's that no call has named before."""
        key = stream.key if isinstance(stream, Stream) else (stream.device_index, stream.stream_id)
        clock = self._streams.get(key)
        if clock is None:
            clock = self._streams[key] = self._new_stream(getattr(stream, "name", "stream"))
        return clock

    def _note_sync(self, name: str) -> None:
        self._in_flight.note()
        super()._note_sync(name)

    def _is_over(self, fence: RaceFence) -> bool:
        return self._detector.clocks.host.knows(fence.stream, fence.event)

    def _host_joins(self, fence: RaceFence) -> None:
        if not self._is_over(fence):
            self._in_flight.note()
            self._note_wait(self._detector.clocks.host, fence)
            self._tracer.host_waits(fence.seen)
