"""`watch_cuda`: a window in which the race detector watches plain torch code on a GPU, and torch runs as it is."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, final

import attrs
import torch

from batchstate import levels
from batchstate._source_lines import source_line
from batchstate.errors import ArgumentError
from batchstate.races.cuda._hints import torch_hint_for
from batchstate.races.cuda._names import assigned_name, label_of
from batchstate.races.cuda._streams import GENERIC
from batchstate.races.cuda._torch import numbers_of, replace
from batchstate.races.cuda._tracer import CudaTracer
from batchstate.races.cuda._window import PlainRaceRuntime, TorchWindow
from batchstate.races.detector import OnRace, RaceAllocation
from batchstate.races.report import EventKind
from batchstate.races.runtime import DONE, RaceFence
from batchstate.races.tracer import Checked, RaceTracer
from batchstate.races.tracing.clocks import StreamClock
from batchstate.races.tracing.dispatch import TracedCall, untraced
from batchstate.races.tracing.memory import MemoryKind
from batchstate.races.tracing.operations import MemoryAccess, tensors_in
from batchstate.races.tracing.regions import ByteRegion, LateRegion, of_tensor
from batchstate.runtime import AcceleratorRuntime
from batchstate.runtime.base import Owners


class Node(NamedTuple):
    """An operation of a graph: its name and its accesses. It keeps no memory."""

    name: str
    accesses: Checked


MOST_KEPT = 1 << 16
"""Elements of an index, beyond which the whole tensor counts."""


@final
class WatchTracer(CudaTracer[RaceAllocation], RaceTracer):
    """Tells the detector of every access to a GPU's memory. Torch runs the operations.

    Attributes:
        lookups: times that values of an index mattered, for which the tool itself has waited.
    """

    _inner: AcceleratorRuntime

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lookups = 0
        self._wait: Callable[[], None] = torch._C._cuda_synchronize  # before it is one that is noted

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies, by its own device; host memory that is not known to be pinned is pageable."""
        return MemoryKind.DEVICE if self.on_device(tensor) else super().kind_of(tensor)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the GPU."""
        return tensor.device.type == self.device.type

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return self.on_device(tensor)

    def _refuse_host_operands(self, call: TracedCall) -> None:
        """Torch refuses them itself."""

    def _moved(self, source: torch.Tensor, kwargs: Mapping[str, Any], to_device: bool) -> torch.Tensor:
        return self._converted(source, kwargs)

    def _accesses(self, call: TracedCall) -> list[MemoryAccess]:
        """The accesses of a call. Values of an index on the GPU are kept there, and looked up only if they matter."""
        operation, _, args, kwargs, *_ = call
        at = operation.index_at
        indices = [] if at is None else [index for index in tensors_in(args[at]) if self.on_device(index)]
        if at is None or not indices:
            return operation.accesses(args, kwargs, self._read_index)
        accesses = operation.accesses(args, kwargs, _unknown)
        if accesses and accesses[0].tensor is args[0] and sum(index.numel() for index in indices) <= MOST_KEPT:
            kept = list(args[: at + 1])
            with untraced():
                kept[0] = _without_memory(args[0])
                index = args[at]
                if isinstance(index, torch.Tensor):
                    kept[at] = index.clone()
                else:
                    kept[at] = [None if part is None else part.clone() for part in index]

            def look_up() -> ByteRegion | None:
                with untraced(), self._inner._synchronisation_allowed():
                    self.lookups += 1
                    self._wait()
                    return operation.parts(kept, lambda index: index.cpu().numpy())

            accesses[0] = accesses[0]._replace(region=LateRegion(accesses[0].region, look_up))
        return accesses

    def resize(self, whole: torch.Tensor, nbytes: int, resize: Callable[[], object]) -> None:
        """Not noted: torch does it."""
        resize()

    def _held_back(self, result: torch.Tensor) -> None:
        return None

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to_host(source, target, None)
        target.copy_(source, non_blocking=True)

    # Graphs

    def _new_capture(self) -> list[Node]:
        return []

    def _check_capture(self, call: TracedCall, *, copies: bool) -> None:
        """Torch itself refuses operations that cannot be captured."""

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        operation, func, args, kwargs, *_ = call
        accesses: Checked = []
        for tensor, region, writes in operation.accesses(args, kwargs, _unknown):
            self._is_pinned(tensor)  # enters pinned memory among the allocations
            if (memory := self._accessed(tensor)) is not None:
                memory.captured = True
                accesses.append((memory, region, writes))
        result = func(*args, **kwargs)
        for made in tensors_in(result):
            whole = of_tensor(made)
            if self.on_device(made) and self.allocations.of(made) is None and whole is not None:
                allocation = self.allocate(made, MemoryKind.DEVICE)
                allocation.allocated_on = None  # in the graph's own pool, which no stream gets back
                accesses.append((allocation, whole, True))
        self.capture.append(Node(operation.name, accesses))
        return result

    def replay(self, capture: list[Node]) -> None:
        """A graph is about to be launched on the current stream."""
        __tracebackhide__ = True
        with self.lock:
            for name, accesses in capture:
                if self.detector.freed_under_graph(f"{name} (graph)", self.current(), accesses):
                    continue
                entry = self.detector.event(
                    self.current(),
                    EventKind.OPERATION,
                    f"{name} (graph)",
                    reads=[(memory.name, region.brief()) for memory, region, writes in accesses if not writes],
                    writes=[(memory.name, region.brief()) for memory, region, writes in accesses if writes],
                )
                self.detector.check(entry, accesses)
                self.end(entry, accesses)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and offset that has no memory."""
    extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = int(tensor.storage_offset())
    whole = torch.empty(offset + extent, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


def _unknown(index: torch.Tensor) -> Any:
    """Refuses to read an index whose values are unknown: the whole tensor counts."""
    raise IndexError


KINDS: tuple[Any, Any, Any] = torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph
"""Classes whose methods are noted."""


@contextlib.contextmanager
def _observed(rt: "WatchedCuda") -> Iterator[None]:
    """A window in which `rt` is told of streams, events, graphs and waits; afterwards torch is as it was.

    Each function and method runs as it would, and the order that it makes is noted. They are replaced where
    `torch.cuda` has them as Python, so that names the code has imported early go on working. The state of an event lies
    in its attributes: torch 2.11 frees events without clearing the weak references to them.
    """
    c: Any = torch._C
    tensor: Any = torch.Tensor
    stream, event, graph = KINDS
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda.Stream, "__new__", _makes(torch.cuda.Stream, rt.new_stream)),
            (torch.cuda.Event, "__new__", _makes(torch.cuda.Event, rt.new_event)),
            (stream, "query", _asked(stream.query, rt.stream_done)),
            (stream, "synchronize", _waits(rt, stream.synchronize, rt.end_of)),
            (event, "record", _then(event.record, rt.recorded_event)),
            (event, "wait", _then(event.wait, rt.stream_waits)),
            (event, "query", _asked(event.query, rt.event_done)),
            (event, "synchronize", _waits(rt, event.synchronize, rt.fence_of)),
            (graph, "capture_begin", _then(graph.capture_begin, rt.capture_begins)),
            (graph, "capture_end", _before(graph.capture_end, rt.capture_ends)),
            (graph, "replay", _before(graph.replay, rt.replays)),
            (tensor, "record_stream", _then(tensor.record_stream, rt.keep_for)),
            (tensor, "tolist", _before(tensor.tolist, rt.host_reads)),
            (torch, "tensor", _of_numbers(torch.tensor)),
            *((torch, name, kind) for name, kind in GENERIC.items()),
            (c, "_cuda_synchronize", _then(c._cuda_synchronize, rt.all_is_over)),
            (c, "_accelerator_synchronizeDevice", _then(c._accelerator_synchronizeDevice, rt.all_is_over)),
            (c, "_accelerator_getStream", lambda index=0: torch.cuda.current_stream()),
        ):
            replace(stack, owner, name, value)
        yield


def _of_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor`, which reads tensors among its numbers without a word."""
    return lambda data, *args, **kwargs: make(numbers_of(data), *args, **kwargs)


def _then(call: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    """A function of torch that is told once it has returned."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        told(*args, **kwargs)
        return result

    return both


def _before(call: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    """A function of torch that is told before it begins."""

    def both(*args: Any, **kwargs: Any) -> Any:
        told(*args)
        return call(*args, **kwargs)

    return both


def _asked(query: Callable[[Any], bool], answer: Callable[[Any, Callable[[], bool]], bool]) -> Callable[[Any], bool]:
    return lambda self: answer(self, lambda: query(self))


def _waits(rt: "WatchedCuda", wait: Callable[[Any], None], fence_of: Callable[[Any], RaceFence | None]) -> Any:
    def waits(self: Any) -> None:
        fence = fence_of(self)
        wait(self)
        rt.host_waited(fence)

    return waits


def _makes(kind: Any, told: Callable[[Any, str | None], None]) -> Callable[..., Any]:
    make = kind.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(cls, *args, **kwargs)
        if "stream_id" not in kwargs:  # else it is an existing stream
            told(made, assigned_name())
        return made

    return new


@final
@attrs.frozen
class _Native:
    """The inner fence while a fence is asked: it asks the GPU."""

    query: Callable[[], bool]

    def wait(self) -> None:
        """The host waits elsewhere, outside of the lock."""


@final
class WatchedCuda(TorchWindow[StreamClock], PlainRaceRuntime):
    """The race detector beside `torch.cuda`. Made by `watch_cuda`."""

    _tracer: WatchTracer

    def __init__(self, **settings: Any) -> None:
        if not torch.cuda.is_available():
            problem = "watch_cuda where torch has no GPU"
            raise ArgumentError(problem, torch.__version__, "use `cuda_on_cpu`, which needs none")
        self._polled: dict[int, RaceFence] = {}
        self._unnamed = 0
        super().__init__(AcceleratorRuntime(torch.device("cuda")), **settings)

    def _new_tracer(self) -> WatchTracer:
        return WatchTracer(self, self._detector)

    def _changed(self) -> contextlib.AbstractContextManager[None]:
        return _observed(self)

    def own_rows(self, memory: torch.Tensor, owners: Owners, *, by_step: bool = False) -> None:
        """See `Runtime.own_rows`. Not below level `full`: to read an index on the GPU is to wait for it."""
        if levels.full:
            super().own_rows(memory, owners, by_step=by_step)

    # Streams

    def new_stream(self, stream: Any, name: str | None) -> None:
        """A stream was made. Torch has few, and may give one out again: its first name stays."""
        with self.lock:
            self._unnamed += 1
            key = (stream.device_index, stream.stream_id)
            if key not in self._streams:
                self._streams[key] = self._new_stream(name or f"stream {self._unnamed}")
                self.made_at[self._streams[key].name] = source_line()
            self.stream_made(stream, key)

    def _state_of(self, stream: Any) -> StreamClock | None:
        return self._streams.get((stream.device_index, stream.stream_id))

    def name_stream(self, stream: Any, name: str) -> None:
        """Names a stream in reports; see `TorchWindow.name_stream`."""
        self._of(stream)  # a stream that a library made gets its clock now
        super().name_stream(stream, name)

    @property
    def lookups(self) -> int:
        """Times that the tool has waited for the GPU, to read an index of an access that nothing orders."""
        return self._tracer.lookups

    def _of(self, stream: Any) -> StreamClock:
        return self._known_stream(self.current_stream if stream is None else stream)

    def end_of(self, stream: Any) -> RaceFence:
        """A fence behind all that a stream has by now."""
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
            if asked is not None and not self._asked(asked, query):
                return False
            asked = self._polled[clock.number] = self._fence(clock, "all of the stream")  # with later operations
            return self._asked(asked, query)

    def _asked(self, fence: RaceFence, query: Callable[[], bool]) -> bool:
        """Whether a fence is complete as far as the host may know; `query` asks the GPU."""
        fence._inner = _Native(query)
        try:
            return fence.query()
        finally:
            fence._inner = DONE

    def all_is_over(self, *_: object) -> None:
        """`torch.cuda.synchronize()` has returned."""
        with self.lock:
            self._all_is_over()

    # Events

    def new_event(self, event: Any, name: str | None) -> None:
        """An event was made."""
        event._batchstate_name = label_of(name)

    def fence_of(self, event: Any) -> RaceFence | None:
        """The last recording of an event; None before the first."""
        fence: RaceFence | None = getattr(event, "_batchstate_fence", None)
        return fence if fence is not None and fence.owner is self else None

    def recorded_event(self, event: Any, stream: Any = None) -> None:
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

    def stream_waits(self, event: Any, stream: Any = None) -> None:
        """`event.wait(stream)` has happened."""
        fence = self.fence_of(event)
        if fence is not None and not self.capturing:
            with self.lock:
                clock = self._of(stream)
                self._note_wait(clock, fence)
                clock.join(fence.seen)

    # Memory and graphs

    def host_reads(self, tensor: torch.Tensor) -> None:
        """`tensor.tolist()`, which torch does not dispatch, is about to read: an access if the memory is pinned."""
        if self._tracer.kind_of(tensor) is MemoryKind.PINNED:
            with self.lock:
                self._tracer.host_accesses(tensor, "tolist", writes=False)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """`tensor.record_stream(stream)` has happened."""
        if self._tracer.on_device(tensor):
            with self.lock, untraced():
                self._tracer.keep_for(tensor, self._of(stream))

    def capture_begins(self, graph: Any, pool: Any = None, *_: object, **__: object) -> None:
        """Launches of this thread belong to a graph from now on."""
        self.graphs.captured(pool)
        graph._batchstate_capture = self._tracer.begin_capture()

    def capture_ends(self, graph: Any) -> None:
        """Launches of this thread happen again."""
        self._tracer.end_capture()

    def replays(self, graph: Any) -> None:
        """A graph is about to be launched."""
        with self.lock:
            self.graphs.launched(graph)
        clock = self._of(None)
        clock.join(getattr(graph, "_batchstate_launched", []))  # a graph is launched behind its launch before
        self._tracer.replay(getattr(graph, "_batchstate_capture", []))
        graph._batchstate_launched = list(clock.seen)


def watch_cuda(
    *, on_race: OnRace = "raise", fences: Literal["lazy", "eager"] = "lazy", note_waits: bool = False
) -> WatchedCuda:
    """A window in which the race detector watches plain torch code on a GPU.

    As `cuda_on_cpu`, with the same findings, but the code runs on the GPU: torch's own calls go through, and their
    accesses and orders are noted. The host waits where it would wait without it, and where two streams access one
    tensor in parts that an index names and nothing orders them: then the values of the indices are read (`lookups`).

    Example:
        with watch_cuda(on_race="collect") as rt:
            engine.run()
        for race in rt.races:
            print(race)

    Args:
        on_race: see `cuda_on_cpu`.
        fences: the answer of events and streams to `query()`. With `"lazy"` they are complete once the host has waited
            for them, or for something behind them; with `"eager"` as soon as the GPU says so.
        note_waits: see `RaceRuntime`.

    Returns:
        the runtime, for `with`.

    Raises:
        ArgumentError: there is no GPU, or on entry: a window is open.
    """
    return WatchedCuda(on_race=on_race, fences=fences, note_waits=note_waits, hint_for=torch_hint_for)
