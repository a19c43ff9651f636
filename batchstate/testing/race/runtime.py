"""`RaceRuntime`: a runtime that finds races, on a CPU or round an accelerator.

Operations run at once, in program order; what is watched is what orders them. So one run says of every pair of accesses
whether something orders it, and not only what happened to come first this time. Fences are complete when the host has
waited for them or for something behind them, so that whoever reads too early meets a fence that is not.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, final

import torch

from batchstate.errors import ArgumentError
from batchstate.runtime import CpuRuntime, Fence, MappedMemory, Runtime, Stream
from batchstate.runtime.base import Array
from batchstate.runtime.fences import foreign_fence
from batchstate.runtime.memory import StagingBlock
from batchstate.testing.race.accesses import Accesses
from batchstate.testing.race.clocks import Clocks, Lane, RaceFence
from batchstate.testing.race.detector import Detector, OnRace
from batchstate.testing.race.operations import Launches, Operations, Transfers
from batchstate.testing.race.report import EventKind, RaceReport
from batchstate.testing.tracing.events import DeviceEvent
from batchstate.testing.tracing.memory import Place
from batchstate.testing.tracing.modes import is_raw, watching

# How many steps are under way at once, as far as the host knows: without two there is nothing to race.


@final
class InFlight:
    """Counts steps with work that the host does not know to be over. Fences and waits are no work, set-up no step.

    Args:
        clocks: of the run.

    Attributes:
        most: the most there ever were, as of the last `note`.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._ends: deque[list[int]] = deque()  # of each earlier step: the newest work of each stream by then
        self._before: list[int] = []  # the newest work of each stream when the present step began
        self._began = False
        self.most = 0

    @property
    def now(self) -> int:
        """Steps under way, the present one included. What comes before the first `next_step` is no step."""
        host, streams = self._clocks.host, self._clocks.lanes[1:]
        while self._ends and all(host.knows(at, event) for at, event in enumerate(self._ends[0], start=1)):
            self._ends.popleft()
        before = self._before
        present = any(
            not host.knows(lane.number, lane.work)
            and (lane.number > len(before) or lane.work > before[lane.number - 1])
            for lane in streams
        )
        return len(self._ends) + (present and self._began)

    def note(self) -> None:
        """To be called before the host learns something, and before a step ends: the number only falls there."""
        self.most = max(self.most, self.now)

    def step_ends(self) -> None:
        """What comes next is another step's."""
        self.note()
        ends = [lane.work for lane in self._clocks.lanes[1:]]
        if self._began and any(ends) and ends != self._before:
            self._ends.append(ends)
        self._before = ends
        self._began = True


T = TypeVar("T")


@final
class RaceRuntime(Runtime):
    """Watches everything that runs through it, and through torch in a `with` window of it.

    Example:
        with RaceRuntime() as rt:
            engine = Engine(rt, ...)
            engine.run()

    Args:
        inner: what it runs on: a fresh runtime, used through this one alone. By default the CPU.
        steps_in_flight: see `Runtime`; where `inner` is given, its own.
        on_race: `"raise"` the first race as `Race`, before the second access happens, or `"collect"` them in `races`.
        fences: what a host finds that asks a fence. With `"late"` it is complete once the host has waited for it, or
            for something behind it: the least order a device may have. With `"prompt"` it is complete at once, and the
            host knows what lies before it and nothing more: what changes hands behind the wrong fence does so at once.

    Attributes:
        synchronised: calls of torch that made the host wait, by name. They count as forced syncs.
    """

    def __init__(
        self,
        inner: Runtime | None = None,
        *,
        steps_in_flight: int = 2,
        on_race: OnRace = "raise",
        fences: Literal["late", "prompt"] = "late",
    ) -> None:
        if on_race not in ("raise", "collect"):
            raise ArgumentError(f"on_race is {on_race!r}", value=on_race, remedy="use 'raise' or 'collect'")
        if fences not in ("late", "prompt"):
            raise ArgumentError(f"fences is {fences!r}", value=fences, remedy="use 'late' or 'prompt'")
        self._inner = CpuRuntime(steps_in_flight=steps_in_flight) if inner is None else inner
        self._detector = Detector(lambda: self.step, on_race)
        self._lanes: dict[object, Lane] = {}
        self._fences = 0
        self._window: contextlib.ExitStack | None = None
        self._entered = False
        self._patience = 1 if fences == "prompt" else None
        self.synchronised: Counter[str] = Counter()
        self._accesses = Accesses(self._detector, self._inner, self._current_lane, self._note_sync)
        self._transfers = Transfers(self._accesses)
        self._launches = Launches(self._accesses)
        self._in_flight = InFlight(self._detector.clocks)
        super().__init__(self._inner.device, steps_in_flight=self._inner.steps_in_flight)
        self._lane_of(self._inner.current_stream)

    def __enter__(self) -> Self:
        """Begins to watch the operations of this thread."""
        self.check_owner("with")
        if self._entered:
            raise ArgumentError("a race runtime was entered twice", value=self, remedy="use one `with` for each")
        self._entered = True
        self._window = contextlib.ExitStack()
        self._window.enter_context(watching(Operations(self._accesses, self._transfers, self._lane_of)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the watching. Copies that are under way have run by then.

        Raises:
            Race: the source of one of them had changed; not where an error ends the window.
        """
        window, self._window = self._window, None
        if window is not None:
            window.close()
        self._in_flight.note()
        self._accesses.memories.close()
        if error is None:
            self._accesses.host_memory.close()

    # What was found

    @property
    def races(self) -> tuple[RaceReport, ...]:
        """The reports so far, at most one for the same two lines."""
        return tuple(self._detector.races)

    @property
    def accesses(self) -> int:
        """Accesses judged."""
        return self._detector.accesses

    @property
    def comparisons(self) -> int:
        """How often an access was held against what another lane did with the same memory: what watching costs."""
        return self._detector.comparisons

    def trace(self) -> list[str]:
        """The newest events in program order: number, lane, what it is, step. The same program gives the same."""
        return self._detector.journal.lines()

    @property
    def in_flight_depth(self) -> int:
        """Steps with work of which the host does not know that it has run, the present one included."""
        return self._in_flight.now

    @property
    def in_flight_depth_max(self) -> int:
        """The most steps that were under way at once, as far as the host knew."""
        self._in_flight.note()
        return self._in_flight.most

    def next_step(self) -> int:
        """Begins the next step; see `Runtime.next_step`."""
        number = super().next_step()
        self._in_flight.step_ends()
        return number

    # For tests that model what an engine does itself

    def event(self, name: str = "event") -> DeviceEvent:
        """An event as `torch.cuda.Event` is one: it can be recorded again."""
        return DeviceEvent(name, self.record, lambda fence, stream: self.wait(fence, stream=stream))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> torch.Tensor:
        """Zeroed host memory that `copy_(non_blocking=True)` uses without the host waiting; `name` is for reports."""
        with self._accesses.muted():
            tensor = torch.zeros(shape, dtype=dtype, pin_memory=self.device.type != "cpu")
        self._accesses.pinned(tensor)
        if name:
            self._named(tensor, name)
        return tensor

    # Operations

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
        """Runs a device operation; see `Runtime.launch`. What torch does not show is taken from `reads` and `writes`.

        A slice of a tensor declares its rows.

        Raises:
            ArgumentError: it declares nothing and touches memory that is watched, or was given some and showed nothing;
                or it writes what it does not declare.
            Race: a declared access is not ordered.
        """
        called = name or getattr(operation, "__name__", "launch")
        if is_raw(operation):
            return self._launch_raw(called, operation, args, kwargs, reads, writes, operations)
        pieces = self._accesses.pieces
        with self._launches.under_way(name) as seen:
            result = super().launch(
                operation, *args, reads=reads, writes=writes, name=name, operations=operations, **kwargs
            )
        if self._window is not None:
            older = {kept: written for kept, written in seen.items() if kept.name.number <= pieces}
            self._launches.check(called, older, (*args, *kwargs.values()), reads, writes)
            self._launches.add_declared(called, seen, reads, writes)
        return result

    def _launch_raw(
        self,
        name: str,
        operation: Callable[..., T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        operations: int,
    ) -> T:
        """A kernel that torch does not see: what it declares is judged before it runs."""
        if self._window is not None:
            self._launches.check(name, {}, (*args, *kwargs.values()), reads, writes)
            self._launches.add_declared(name, {}, reads, writes)
        with self._accesses.muted(), torch._C.DisableTorchFunction():
            return super().launch(
                operation, *args, reads=reads, writes=writes, name=name, operations=operations, **kwargs
            )

    def inspect(self, tensor: torch.Tensor) -> Array:
        """Reads device memory for a check: no access, and no order for what comes later. See `Runtime.inspect`."""
        self._detector.inspected(self._current_lane())
        with self._accesses.muted(), torch._C.DisableTorchFunction():
            return super().inspect(tensor)

    # What a device implements

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with self._accesses.muted():
            tensor = self._inner._pinned(nbytes)
        self._accesses.pinned(tensor)
        self._named(tensor, "staging")
        return tensor

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._accesses.muted():
            tensor = self._inner._device_memory(shape, dtype)
        entry = self._detector.event(self._current_lane(), EventKind.ALLOCATION, "empty")
        self._accesses.made(tensor, entry)
        return tensor

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        with self._accesses.muted():
            mapped = self._inner._mapped(shape, dtype)
        self._accesses.keep(mapped.device, Place.DEVICE)  # no stream has made it, and none has to be waited for
        return mapped

    def host_writes_rows(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        """See `Runtime.host_writes_rows`: whatever a stream still does with the rows is a race."""
        with self._accesses.muted():
            rows = tensor[start:stop]
        self._accesses.host_access(rows, "host tier: rows change hands", writes=True)

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            with self._accesses.muted():
                target = into[:nbytes]
            self._transfers.copied_to_device(block.tensor[:nbytes], target)  # judged before it happens
            with self._accesses.muted():
                return self._inner._copied_to_device(block, nbytes, into)
        with self._accesses.muted():
            tensor = self._inner._copied_to_device(block, nbytes, None)
        entry = self._detector.event(self._current_lane(), EventKind.ALLOCATION, "upload")
        kept = self._accesses.made(tensor, entry)
        kept.name.label = f"upload {kept.name.number}"
        self._transfers.copied_to_device(block.tensor[:nbytes], tensor)
        return tensor

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        target = block.tensor[: source.numel()]
        with self._accesses.muted(), torch._C.DisableTorchFunction():
            if self.device.type == "cpu":
                values = source.clone()
            else:
                self._inner._copied_to_host(block, source)
                self._inner.record().wait()
                values = target.clone()
        self._transfers.copied_to_host(source, target, values)

    def _named(self, tensor: torch.Tensor, name: str) -> None:
        kept = self._accesses.memories.of(tensor)
        if kept is not None:
            kept.name.label = name

    def _host_writes(self, block: StagingBlock, nbytes: int) -> None:
        self._accesses.host_access(block.tensor[:nbytes], "staging: fill", writes=True)

    def _host_reads(self, block: StagingBlock, nbytes: int) -> None:
        self._accesses.host_access(block.tensor[:nbytes], "download: take out", writes=False)

    def _read_back(self, source: torch.Tensor) -> Array:
        if not self._accesses.silent:
            self._accesses.declared("read back", [source], [])
            self._accesses.host_waits(self._current_lane().seen)
        with self._accesses.muted(), torch._C.DisableTorchFunction():
            return self._inner._read_back(source)

    def _wait_for_device(self) -> None:
        self._in_flight.note()
        self._inner._wait_for_device()
        for lane in self._detector.clocks.lanes[1:]:
            self._accesses.host_waits(lane.seen)

    def stream(self, name: str) -> Stream:
        """A new stream."""
        made = self._inner.stream(name)
        self._lane_of(made)
        return made

    @property
    def current_stream(self) -> Stream:
        """The current stream of the runtime it runs on."""
        return self._inner.current_stream

    def use(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """A window in which `stream` is the current one."""
        return self._inner.use(stream)

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence behind everything enqueued on a stream so far."""
        self.check_owner("record")
        self._refuse_capture("recording a fence")
        lane = self._lane_of(stream or self.current_stream)
        self._fences += 1
        entry = self._detector.event(lane, EventKind.FENCE, f"fence {self._fences}")
        return RaceFence(
            self._fences,
            entry.number,
            lane.number,
            list(lane.seen),
            self,
            self._inner.record(stream),
            self._over,
            self._join,
            self.counters,
            self._patience,
        )

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        self.check_owner("wait")
        if not isinstance(fence, RaceFence) and fence.query():
            return
        if not isinstance(fence, RaceFence) or fence.owner is not self:
            raise foreign_fence(fence)
        self._inner._stream_wait(stream, fence._inner)
        lane = self._lane_of(stream)
        self._detector.event(lane, EventKind.WAIT, f"wait for fence {fence.number}", waits_for=fence.event)
        lane.join(fence.seen)

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self._accesses.muted(), torch._C.DisableTorchFunction():
            self._inner._keep_alive(tensor, stream)
        self._accesses.hand(tensor, self._lane_of(stream))

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self._inner.capturing

    # Clocks

    def _current_lane(self) -> Lane:
        return self._lane_of(self._inner.current_stream)

    def _lane_of(self, stream: Any) -> Lane:
        key = stream.key if isinstance(stream, Stream) else (stream.device_index, stream.stream_id)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._detector.clocks.add(getattr(stream, "name", "stream"))
        return lane

    def _note_sync(self, name: str) -> None:
        self._in_flight.note()
        self.synchronised[name] += 1
        self.counters.forced_syncs += 1

    def _over(self, fence: RaceFence) -> bool:
        return self._detector.clocks.host.knows(fence.lane, fence.event)

    def _join(self, fence: RaceFence) -> None:
        if not self._over(fence):
            self._in_flight.note()
            clocks = self._detector.clocks
            self._detector.event(clocks.host, EventKind.WAIT, f"wait for fence {fence.number}", waits_for=fence.event)
            self._accesses.host_waits(fence.seen)
