"""The window in which torch has a device `cuda:0`: its streams, events, graphs and memory, for either tool."""

import abc
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, final

import torch

from batchstate._source_lines import SourceLine, source_line
from batchstate.errors import ArgumentError
from batchstate.races.cuda._backward import Turns
from batchstate.races.cuda._graphs import Graphs
from batchstate.races.cuda._tracer import CudaTracer, NotModelledError
from batchstate.races.detector import Race
from batchstate.races.runtime import RaceRuntime
from batchstate.races.tracing.clocks import HOST, unused_name
from batchstate.races.tracing.dispatch import dispatching
from batchstate.races.tracing.runtime import TracedRuntime
from batchstate.runtime import CpuRuntime, Fence, Runtime, Stream

STREAMS = 32
"""Streams of a priority that torch has: it hands them out in turn, so that the next one is the first again.

As c10/cuda/CUDAStream.cpp has it (`kStreamsPerPool`)."""

_open: list[Any] = []
"""The window that is open in this process, if one is."""


@final
class ThreadedCpu(CpuRuntime):
    """A CPU on which each thread has a current stream of its own, as in torch."""

    def __init__(self) -> None:
        self._local = threading.local()
        super().__init__()

    @property
    def _current(self) -> Stream:
        return getattr(self._local, "stream", self._first)

    @_current.setter
    def _current(self, stream: Stream) -> None:
        if not hasattr(self, "_first"):
            self._first = stream
        self._local.stream = stream


@final
class Entered(threading.local):
    """Per thread, the numbers of the streams that were current before each `with stream:`, and those of its nodes."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.turns = Turns()


S = TypeVar("S")


class TorchWindow(TracedRuntime[S]):
    """A window over code that knows torch alone. Any thread may use it: they take turns, and are one host.

    Attributes:
        lock: held while an operation of the device happens.
        made_at: name of a stream -> the line of the code that made it.
        aliased_streams: pairs of streams that are alive together and one on a GPU; see `STREAMS`.
    """

    _tracer: CudaTracer[Any]

    def __init__(self, inner: Runtime, **settings: Any) -> None:
        self.made_at: dict[str, SourceLine] = {}
        self.aliased_streams: list[tuple[str, str]] = []
        self._made: dict[object, tuple[Callable[[], Any], str]] = {}
        super().__init__(inner, **settings)
        self.lock = self._tracer.lock

    def check_owner(self, operation: str) -> None:
        """Any thread may use it."""

    @property
    def capturing(self) -> bool:
        """Whether this thread captures a graph."""
        return self._tracer.capture is not None

    @abc.abstractmethod
    def _changed(self) -> contextlib.AbstractContextManager[None]:
        """The time in which torch calls this window; afterwards torch is as it was."""

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        try:
            with only_window(self), self._changed(), in_new_threads(self._tracer), dispatching(self._tracer):
                yield
        finally:
            self._tracer.ended = True

    @abc.abstractmethod
    def _state_of(self, stream: Any) -> Any:
        """The tool's state of a stream of torch; None for one that it does not know."""

    def stream_made(self, stream: Any, of_torch: object) -> None:
        """The code has made a stream; `of_torch` says which of torch's streams it is."""
        name = f"{self.label_of_stream(stream)!r}, made at {source_line().words()[0]}"
        other, other_name = self._made.get(of_torch, (lambda: None, ""))
        self._made[of_torch] = weakref.ref(stream), name
        if other() is not None:
            self.aliased_streams.append((other_name, name))

    def label_of_stream(self, stream: Any) -> str:
        """The name of a stream in reports; empty for an unknown stream."""
        state = self._state_of(stream)
        return "" if state is None else str(state.name)

    def label_of_event(self, event: Any) -> str:
        """The name of an event in reports: each event has a string of its own, perhaps equal to that of others."""
        return str(getattr(event, "_batchstate_name", ""))

    def name_stream(self, stream: Any, name: str) -> None:
        """Names a stream in reports whose name is not seen in the code: one made in a list, or by a library."""
        state, streams = self._state_of(stream), list[Any](self._streams.values())
        state.name = unused_name(name, [HOST, *(other.name for other in streams if other is not state)])


class PlainRaceRuntime(RaceRuntime):
    """A `RaceRuntime` over code that may catch a race: its window raises the first one again at its end."""

    def __init__(self, inner: Runtime, **settings: Any) -> None:
        super().__init__(inner, **settings)
        self.graphs: Graphs = Graphs(self._tracer)

    def __enter__(self) -> Self:
        """Begins the window, in which pools of every runtime name their tables, and say whose the rows are."""
        super().__enter__()
        Runtime.told.append(self)
        if self._window is not None:
            self._window.callback(Runtime.told.remove, self)
        return self

    def bind(self, graph: Any, **values: Callable[[], object]) -> None:
        """Declares numbers of the host that a graph has from its capture: a replay with others is a `LEFTOVER_READ`.

        Args:
            graph: a `torch.cuda.CUDAGraph`, captured with these values.
            values: name -> function that returns the number. It is asked now, and before each replay.
        """
        self.graphs.bind(graph, values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the window; torch is as it was.

        Raises:
            Race: one was raised in the window and the code caught it, or the source of a copy had changed. An error
                that ends the window gets a note of the races instead.
        """
        super().__exit__(kind, error, traceback)
        if error is not None:
            if self.races and not isinstance(error, Race):
                error.add_note(f"{len(self.races)} race(s) had been found by then; the first:\n{self.races[0]}")
        elif self._detector.raised:
            raise self._detector.raised[0]


class CudaWindow(TorchWindow[S]):
    """The part of a tool that is behind `torch.cuda`. `cuda_on_cpu` makes one.

    Args:
        name, memory, capability, stands_for: see `cuda_on_cpu`.
        settings: of the tool's own runtime.

    Attributes:
        name, memory, capability: of the device, as `torch.cuda` answers.
        stands_for: functions that replace the code's.
        tracer: is told of every operation.
        entered: streams that `with stream:` will make current again.
        graphs: is told of graphs; None on the simulated device.
    """

    graphs: Any = None

    def __init__(
        self,
        *,
        name: str,
        memory: int,
        capability: tuple[int, int],
        stands_for: Mapping[str, Callable[..., Any]],
        **settings: Any,
    ) -> None:
        self.name, self.memory, self.capability = name, memory, capability
        self.stands_for = dict(stands_for)
        self._polled: dict[int, Fence] = {}
        self._graph_pools = 0
        super().__init__(ThreadedCpu(), **settings)
        self.tracer = self._tracer
        self.entered = Entered()
        first = self._inner.current_stream
        self._numbers: dict[object, int] = {first.key: 0}
        self._by_number: list[Stream] = [first]

    @property
    def current_id(self) -> int:
        """Number of the current stream of this thread."""
        return self._numbers[self._inner.current_stream.key]

    def new_stream(self, name: str | None) -> int:
        """A new stream; returns its number."""
        with self.lock:
            number = len(self._by_number)
            stream = self.stream(name or f"stream {number}")
            self._by_number.append(stream)
            self._numbers[stream.key] = number
            state: Any = self._known_stream(stream)
            self.made_at[state.name] = source_line()
            return number

    def _state_of(self, stream: Any) -> Any:
        ours = getattr(stream, "_window", None) is self
        return self._known_stream(self._by_number[stream.stream_id]) if ours else None

    def known_stream(self, number: int) -> int:
        """The number, if a stream has it.

        Raises:
            NotModelledError: it is the address of a stream that another library has made.
        """
        if not 0 <= number < len(self._by_number):
            problem = f"cuda_on_cpu has no stream {number:#x}"
            raise NotModelledError(problem, number, "make a torch.cuda.Stream in the window")
        return number

    def set_current(self, number: int) -> None:
        """Makes a stream the current one of this thread."""
        self._inner._current = self._by_number[number]  # type: ignore[attr-defined]
        self.entered.turns.turned(number)

    def keep_for(self, tensor: torch.Tensor, number: int) -> None:
        """`tensor.record_stream(stream)`."""
        with self.lock:
            self._keep_alive(tensor, self._by_number[number])

    def record_event(self, event: Any, stream: Any) -> Fence | None:
        """`event.record(stream)`. Inside of a capture it belongs to the graph, and is not recorded."""
        if self.capturing:
            return event.fence  # type: ignore[no-any-return]
        number = self.current_id if stream is None else stream.stream_id
        with self.lock:
            return self._recorded(self._by_number[number], self.label_of_event(event))

    def stream_waits(self, stream: Any, fence: Fence) -> None:
        """`event.wait(stream)`."""
        if not self.capturing:
            with self.lock:
                self.wait(fence, stream=self._by_number[self.current_id if stream is None else stream.stream_id])

    def stream_done(self, number: int) -> bool:
        """`stream.query()`: whether the host knows that all of it has run."""
        self._tracer.refuse_capture("Stream.query")
        with self.lock:
            stream = self._by_number[number]
            if self._is_idle(stream):
                return True
            asked = self._polled.get(number)
            if asked is None or asked.query():  # operations behind it may not have run
                asked = self._polled[number] = self._recorded(stream, "all of the stream")
            return asked.query()

    def wait_for_stream(self, number: int) -> None:
        """`stream.synchronize()`."""
        self._tracer.refuse_capture("Stream.synchronize")
        with self.lock:
            self._recorded(self._by_number[number], "all of the stream").wait()

    @abc.abstractmethod
    def launch_kernel(self, name: str, interpret: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """A Triton kernel is launched on the current stream: `interpret(*args, **kwargs)` runs it."""

    def wait_for_everything(self) -> None:
        """`torch.cuda.synchronize()`."""
        self._tracer.refuse_capture("torch.cuda.synchronize")
        with self.lock:
            self.synchronize()

    @abc.abstractmethod
    def _is_idle(self, stream: Stream) -> bool:
        """Whether all that a stream has is over, as far as the host knows."""

    def new_graph_pool(self) -> tuple[int, int]:
        """The id of a pool for memory of graphs."""
        self._graph_pools += 1
        return 0, self._graph_pools

    # Memory

    def memory_info(self, device: object = 0) -> tuple[int, int]:
        """Free bytes, and all bytes: as declared, less those that are alive."""
        return max(0, self.memory - self._tracer.allocations.nbytes), self.memory

    def reset_peak(self, device: object = 0) -> None:
        """Forgets the peak."""
        self._tracer.allocations.most_nbytes = self._tracer.allocations.nbytes

    def memory_stats(self, device: object = 0) -> dict[str, Any]:
        """Bytes that are alive; no cache keeps more."""
        both = {
            "current": self._tracer.allocations.nbytes,
            "peak": self._tracer.allocations.most_nbytes,
            "allocated": 0,
            "freed": 0,
        }
        bytes_of = {"all": dict(both), "small_pool": dict.fromkeys(both, 0), "large_pool": dict(both)}
        nothing = {pool: dict.fromkeys(both, 0) for pool in bytes_of}
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        others = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes")
        counts = dict.fromkeys(("num_ooms", "num_alloc_retries", "num_sync_all_streams", "max_split_size"), 0)
        single = dict.fromkeys(("oversize_allocations", "oversize_segments"), dict.fromkeys(both, 0))
        return {**dict.fromkeys(names, bytes_of), **dict.fromkeys(others, nothing), **single, **counts}


def open_window() -> Any:
    """The runtime of the window that is open, or None."""
    return _open[0] if _open else None


@contextlib.contextmanager
def only_window(rt: Runtime) -> Iterator[None]:
    """The time in which a runtime has the window that there is in a process.

    Raises:
        ArgumentError: another one is open.
    """
    if _open:
        raise ArgumentError("cuda_on_cpu inside of cuda_on_cpu", _open[0], "use the runtime of the window that is open")
    _open.append(rt)
    try:
        yield
    finally:
        _open.clear()


@contextlib.contextmanager
def in_new_threads(tracer: CudaTracer[Any]) -> Iterator[None]:
    """A window in which threads that start are traced too: torch's modes are of one thread each."""
    start = threading.Thread.start

    def traced_start(self: threading.Thread) -> None:
        run = self.run

        def traced_run() -> None:
            vars(self).pop("run", None)
            with dispatching(tracer):
                run()

        self.run = traced_run  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = traced_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
