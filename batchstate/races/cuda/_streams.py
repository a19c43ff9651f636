"""Objects that `torch.cuda.Stream`, `Event`, `CUDAGraph` and `MemPool` make inside of a window.

These classes of torch are of C on a build with CUDA, and stubs on a CPU-only build. So they make objects of classes of
this file here, which pass for theirs: `isinstance` goes by `__class__`.
"""

import time
from collections import Counter
from typing import Any, ClassVar, final

import torch

from batchstate.errors import ArgumentError
from batchstate.races.cuda._names import assigned_name, label_of
from batchstate.races.cuda._tracer import CUDA, NotModelledError
from batchstate.races.cuda._window import STREAMS, CudaWindow
from batchstate.runtime import Fence

_CUDA_TYPE = 1
"""Number of the device type, as `c10::DeviceType` has it."""

_cuda: Any = torch.cuda


class _Made:
    """An object of torch that was made in a window."""

    _OF_TORCH: ClassVar[Any]

    def __init__(self, window: CudaWindow[Any]) -> None:
        self._window = window

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._OF_TORCH

    @property
    def _rt(self) -> CudaWindow[Any]:
        """The window.

        Raises:
            ArgumentError: it is over.
        """
        if self._window.tracer.ended:
            problem = f"a {self._OF_TORCH.__name__} of `cuda_on_cpu` was used after its window had ended"
            raise ArgumentError(problem, None, "make streams, events and graphs inside of the window that uses them")
        return self._window

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._OF_TORCH, name):
            remedy = "leave it out where `torch.cuda.get_device_name()` is that of the window"
            raise NotModelledError.of(f"{self._OF_TORCH.__name__}.{name}", remedy)
        raise AttributeError(f"{self._OF_TORCH.__name__!r} object has no attribute {name!r}")


@final
class _Stream(_Made):
    _OF_TORCH = _cuda.Stream

    def __init__(self, window: CudaWindow[Any], number: int, priority: int) -> None:
        super().__init__(window)
        self.stream_id = self.cuda_stream = self.native_handle = number
        self.device_index, self.device_type, self.device, self.priority = 0, _CUDA_TYPE, CUDA, priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _cuda.Stream) and self.stream_id == getattr(other, "stream_id", None)

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def __enter__(self) -> "_Stream":
        self._rt.entered.before.append(self._rt.current_id)
        self._rt.set_current(self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        self._rt.set_current(self._rt.entered.before.pop())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = _cuda.Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return self._rt.stream_done(self.stream_id)

    def synchronize(self) -> None:
        self._rt.wait_for_stream(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def is_capturing(self) -> bool:
        return self._rt.capturing


@final
class _Event(_Made):
    _OF_TORCH = _cuda.Event

    def __init__(self, window: CudaWindow[Any], name: str | None, timed: bool) -> None:
        super().__init__(window)
        self._batchstate_name, self.device = label_of(name), CUDA
        self.fence: Fence | None = None  # None: never recorded, which counts as complete
        self.cuda_event = self.event_id = id(self)
        self._timed, self._at = timed, 0.0

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"

    def record(self, stream: Any = None) -> None:
        self.fence = self._rt.record_event(self, stream)
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        rt = self._rt
        if self.fence is not None:
            rt.stream_waits(stream, self.fence)

    def synchronize(self) -> None:
        self._rt.tracer.refuse_capture("Event.synchronize")
        if self.fence is not None:
            with self._rt.lock:
                self.fence.wait()

    def query(self) -> bool:
        self._rt.tracer.refuse_capture("Event.query")
        with self._rt.lock:
            return self.fence is None or bool(self.fence.query())

    def elapsed_time(self, end_event: "_Event") -> float:
        for event in (self, end_event):
            if not event._timed:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if event.fence is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1000.0


@final
class _Graph(_Made):
    _OF_TORCH = _cuda.CUDAGraph
    _capture: Any = None
    _launched: tuple[int, Fence | None] = 0, None
    _pool: Any = None

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        self._rt.tracer.refuse_capture("capture_begin")
        self._pool = self._rt.new_graph_pool() if pool is None else pool
        if self._rt.graphs is not None:
            self._rt.graphs.captured(pool)
        self._capture = self._rt.tracer.begin_capture()

    def capture_end(self) -> None:
        self._rt.tracer.end_capture()

    def replay(self) -> None:
        rt = self._rt
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        stream, fence = self._launched
        if fence is not None and stream != rt.current_id:
            rt.stream_waits(None, fence)  # a graph is launched behind its launch before, on any stream
        if rt.graphs is not None:
            rt.graphs.launched(self)
        rt.tracer.replay(self._capture)
        self._launched = rt.current_id, rt.record_event(self, None)

    def reset(self) -> None:
        self._capture = None

    def instantiate(self) -> None:
        pass

    def pool(self) -> Any:
        return self._pool


@final
class _Pool(_Made):
    _OF_TORCH = _cuda.MemPool
    id = (0, 1)


def makers(rt: CudaWindow[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Classes of torch, each with its attributes for the length of a window.

    These raise `NotModelledError` for a stream or an event of a subclass, of another library or of other processes.
    """

    def plain(cls: type, *those: type) -> None:
        if cls not in those:
            kind = those[0].__name__
            name = f"{cls.__module__}.{cls.__qualname__}, a subclass of {kind}"
            raise NotModelledError.of(name, f"make a torch.cuda.{kind}")

    made_of: Counter[int] = Counter()

    def stream(cls: Any, device: Any = None, priority: int = 0, **ids: Any) -> _Stream:
        plain(cls, _cuda.Stream, _cuda.ExternalStream)
        number = ids.get("stream_id", ids.get("stream_ptr"))
        with _cuda.device(device):
            made = _Stream(rt, rt.new_stream(assigned_name()) if number is None else rt.known_stream(number), priority)
        if number is None:
            count = made_of[priority] = made_of[priority] + 1
            rt.stream_made(made, (priority, count % STREAMS))
        return made

    def event(
        cls: Any,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> _Event:
        plain(cls, _cuda.Event)
        if interprocess:
            raise NotImplementedError("cuda_on_cpu does not model events between processes (interprocess=True)")
        return _Event(rt, assigned_name(), enable_timing)

    return [
        (_cuda.Stream, {"__new__": stream, "priority_range": _Stream.priority_range}),
        (_cuda.Event, {"__new__": event}),
        (_cuda.CUDAGraph, {"__new__": lambda cls, keep_graph=False: _Graph(rt)}),
        (_cuda.MemPool, {"__new__": lambda cls, *_, **__: _Pool(rt)}),
    ]


def _generic(kind: type, make: Any) -> type:
    """A stand-in for `torch.Stream` or `torch.Event`, whose own class cannot be changed: it makes those of CUDA."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

    return Meta(kind.__name__, (), {"__module__": "torch"})


GENERIC: dict[str, type] = {
    "Stream": _generic(_cuda.Stream, _cuda.Stream),
    "Event": _generic(_cuda.Event, lambda device=None, **options: _cuda.Event(**options)),
}
"""`torch.Stream(device)` and `torch.Event(device)` for `cuda`."""
