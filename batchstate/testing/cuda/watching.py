"""`watch_cuda`: a window in which the race detector watches plain torch code on a GPU, and torch runs as it is."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import attrs
import torch

from batchstate._guidance import shows_signature
from batchstate._source_lines import SourceLine, source_line
from batchstate.errors import ArgumentError
from batchstate.runtime import AcceleratorRuntime, DoneFence, Fence
from batchstate.testing.cuda._hints import torch_hint_for
from batchstate.testing.cuda._names import label_of
from batchstate.testing.cuda._observed import observed
from batchstate.testing.cuda._plain import PlainRaceRuntime
from batchstate.testing.cuda._watch_tracer import WatchTracer
from batchstate.testing.cuda._window import in_new_threads, only_window
from batchstate.testing.race.detector import OnRace
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.runtime import RaceFence
from batchstate.testing.tracing.clocks import StreamClock, unused_name
from batchstate.testing.tracing.dispatch import dispatching, untraced
from batchstate.testing.tracing.memory import MemoryKind

_DONE: Fence = DoneFence()


@final
@attrs.frozen
class _Native:
    """What a fence asks on the GPU, while it is asked."""

    query: Callable[[], bool]

    def wait(self) -> None:
        """The host waits elsewhere, outside of the lock."""


@final
class WatchedCuda(PlainRaceRuntime):
    """The race detector beside `torch.cuda`. Made by `watch_cuda`.

    Attributes:
        lock: held while the detector is told of something; threads are one host.
        made_at: name of a stream that the code has made -> where.
    """

    _tracer: WatchTracer

    def __init__(self, **given: Any) -> None:
        if not torch.cuda.is_available():
            raise ArgumentError(
                "watch_cuda where torch has no GPU",
                value=torch.__version__,
                remedy="use `cuda_on_cpu`, which needs none",
            )
        self._polled: dict[int, RaceFence] = {}
        self._unnamed = 0
        self.made_at: dict[str, SourceLine] = {}
        super().__init__(AcceleratorRuntime(torch.device("cuda")), **given)
        self.lock = self._tracer.lock

    def _new_tracer(self) -> WatchTracer:
        return WatchTracer(self._detector, self._inner, self._known_stream, self._note_sync)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with only_window(self), observed(self), in_new_threads(self._tracer), dispatching(self._tracer):
            try:
                yield
            finally:
                self._tracer.ended = True

    # Streams

    @property
    def capturing(self) -> bool:
        """Whether this thread captures a graph."""
        return self._tracer.capture is not None

    def new_stream(self, stream: Any, name: str | None) -> None:
        """A stream was made. Torch has few, and may give one out again: its first name stays."""
        with self.lock:
            self._unnamed += 1
            key = (stream.device_index, stream.stream_id)
            if key not in self._streams:
                self._streams[key] = self._new_stream(name or f"stream {self._unnamed}")
                self.made_at[self._streams[key].name] = source_line()

    def label_of_stream(self, stream: Any) -> str:
        """What reports call a stream; empty for one that they do not know."""
        known = self._streams.get((stream.device_index, stream.stream_id))
        return "" if known is None else known.name

    def label_of_event(self, event: Any) -> str:
        """What reports call an event: each has a string of its own, equal or not to that of others."""
        return str(getattr(event, "_batchstate_name", ""))

    def name_stream(self, stream: Any, name: str) -> None:
        """Says what reports call a stream whose name is not seen: one made in a list, or by a library."""
        known = self._of(stream)
        known.name = unused_name(name, [one.name for one in self._detector.clocks.streams if one is not known])

    @property
    def lookups(self) -> int:
        """Times that the tool has waited for the GPU: for an index, where nothing orders it and an access elsewhere."""
        return self._tracer.lookups

    def _of(self, stream: Any) -> StreamClock:
        return self._known_stream(self.current_stream if stream is None else stream)

    def end_of(self, stream: Any) -> RaceFence:
        """All that a stream has by now."""
        with self.lock:
            return self._fence(self._of(stream), "all of the stream")

    def host_waited(self, fence: RaceFence | None) -> None:
        """The host has waited for a fence; None for an event that was never recorded."""
        if fence is not None:
            with self.lock:
                self._host_joins(fence)

    def stream_done(self, stream: Any, query: Callable[[], bool]) -> bool:
        """`stream.query()`, which is `query`."""
        with self.lock:
            clock = self._of(stream)
            if self._detector.clocks.host.knows(clock.number, clock.work):
                return query()
            asked = self._polled.get(clock.number)
            if asked is None or self._asked(asked, query):  # what came behind it may not have run
                asked = self._polled[clock.number] = self._fence(clock, "all of the stream")
            return self._asked(asked, query)

    def _asked(self, fence: RaceFence, query: Callable[[], bool]) -> bool:
        """Whether a fence is complete as far as the host may know; `query` asks the GPU."""
        fence._inner = _Native(query)
        try:
            return fence.query()
        finally:
            fence._inner = _DONE

    def all_is_over(self) -> None:
        """`torch.cuda.synchronize()` has returned."""
        with self.lock:
            self._in_flight.note()
            self._detector.event(self._detector.clocks.host, EventKind.WAIT, "wait for the device")
            for stream in self._detector.clocks.streams[1:]:
                self._tracer.host_waits(stream.seen)

    # Events

    def new_event(self, event: Any, name: str | None) -> None:
        """An event was made."""
        event._batchstate_name = label_of(name)

    def fence_of(self, event: Any) -> RaceFence | None:
        """The last recording of an event; None before the first."""
        fence: RaceFence | None = getattr(event, "_batchstate_fence", None)
        return fence if fence is not None and fence.owner is self else None

    def recorded_event(self, event: Any, stream: Any) -> None:
        """`event.record(stream)` has happened. Inside of a capture it belongs to the graph."""
        if not self.capturing:
            with self.lock:
                name = getattr(event, "_batchstate_name", "an event")
                event._batchstate_fence = self._fence(self._of(stream), name)

    def event_done(self, event: Any, query: Callable[[], bool]) -> bool:
        """`event.query()`, which is `query`."""
        with self.lock:
            fence = self.fence_of(event)
            return query() if fence is None else self._asked(fence, query)

    def stream_waits(self, event: Any, stream: Any) -> None:
        """`event.wait(stream)` has happened."""
        fence = self.fence_of(event)
        if fence is not None and not self.capturing:
            with self.lock:
                clock = self._of(stream)
                entry = self._detector.event(clock, EventKind.WAIT, f"wait for {fence.name}", waits_for=fence.event)
                self._note_wait(entry, clock, fence)
                clock.join(fence.seen)

    def _fence(self, clock: StreamClock, name: str) -> RaceFence:
        entry = self._detector.event(clock, EventKind.FENCE, name)
        return RaceFence(name, entry.number, clock.number, list(clock.seen), self, _DONE, self._patience)

    # Memory and graphs

    def host_reads(self, tensor: torch.Tensor, name: str) -> None:
        """The host is about to read a tensor in a way that torch does not dispatch: it counts where that is pinned."""
        if self._tracer.kind_of(tensor) is MemoryKind.PINNED:
            with self.lock:
                self._tracer.host_accesses(tensor, name, writes=False)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """`tensor.record_stream(stream)` has happened."""
        if self._tracer.on_device(tensor):
            with self.lock, untraced():
                self._tracer.keep_for(tensor, self._of(stream))

    def capture_begins(self, graph: Any) -> None:
        """What this thread launches from now on belongs to a graph."""
        graph._batchstate_capture = self._tracer.begin_capture()

    def capture_ends(self) -> None:
        """What it launches happens again."""
        self._tracer.end_capture()

    def replays(self, graph: Any) -> None:
        """A graph is about to be launched.

        Raises:
            Race: one of its accesses is not ordered.
        """
        self._tracer.replay(getattr(graph, "_batchstate_capture", []))


@shows_signature
def watch_cuda(
    *, on_race: OnRace = "raise", fences: Literal["lazy", "eager"] = "lazy", note_waits: bool = False
) -> WatchedCuda:
    """A window in which the race detector watches plain torch code on a GPU.

    As `cuda_on_cpu`, with the same findings, but the code runs on the GPU: torch's own calls go through, and what they
    order and access is noted. The host waits where it would wait without it, and where two streams access one tensor
    in parts that an index names and nothing orders them: then the values of the indices are looked at (`lookups`).

    Example:
        with watch_cuda(on_race="collect") as rt:
            engine.run()
        for race in rt.races:
            print(race)

    Args:
        on_race: see `cuda_on_cpu`.
        fences: what an event or a stream answers that is asked (`query()`). With `"lazy"` it is complete once the host
            has waited for it, or for something behind it; with `"eager"` as soon as the GPU says so.
        note_waits: see `RaceRuntime`.

    Returns:
        the runtime, for `with`.

    Raises:
        ArgumentError: there is no GPU, or on entry: a window is open.
    """
    return WatchedCuda(on_race=on_race, fences=fences, note_waits=note_waits, hint_for=torch_hint_for)
