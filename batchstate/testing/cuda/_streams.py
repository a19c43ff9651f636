"""The C side of `torch.cuda.Stream`, `Event` and `CUDAGraph`, which a CPU-only build of torch leaves empty."""

import time
from typing import TYPE_CHECKING, Any

import torch

from batchstate.errors import ArgumentError
from batchstate.testing.cuda._names import assigned_name
from batchstate.testing.cuda._tracer import CUDA

if TYPE_CHECKING:
    from batchstate.testing.cuda._window import CudaWindow

_CUDA_TYPE = 1
"""Number of the device type, as `c10::DeviceType` has it."""


def ended(one: object) -> ArgumentError:
    """The error for a stream, an event or a graph that is used when its window is over."""
    return ArgumentError(
        f"a {type(one).__mro__[1].__name__} of `cuda_on_cpu` was used after its window had ended",
        value=None,
        remedy="make streams, events and graphs inside of the window that uses them",
    )


def stream_methods(rt: "CudaWindow[Any]") -> dict[str, Any]:
    """Attributes for `torch._C._CudaStreamBase`."""

    def new(cls: Any, device: Any = None, priority: int = 0, **given: Any) -> Any:
        made = object.__new__(cls)
        number = given.get("stream_id")
        made.stream_id = rt.new_stream(assigned_name()) if number is None else number
        made.cuda_stream = made.stream_id
        made.device_index, made.device_type, made.device, made.priority = 0, _CUDA_TYPE, CUDA, priority
        if number is None:
            rt.made(made)
        return made

    def enter(self: Any) -> Any:
        rt.stack.append(rt.current_id)
        rt.set_current(self.stream_id)
        return self

    def leave(self: Any, *_: object) -> None:
        rt.set_current(rt.stack.pop())

    return {
        "__new__": new,
        "__init__": lambda self, *_, **__: None,
        "__eq__": lambda self, other: self.stream_id == getattr(other, "stream_id", None),
        "__hash__": lambda self: hash(self.stream_id),
        "__enter__": enter,
        "__exit__": leave,
        "query": lambda self: rt.stream_done(self.stream_id),
        "synchronize": lambda self: rt.wait_for_stream(self.stream_id),
        "priority_range": staticmethod(lambda: (0, -5)),
        "native_handle": property(lambda self: self.stream_id),
        "is_capturing": lambda self: rt.capturing,
    }


def event_methods(rt: "CudaWindow[Any]") -> dict[str, Any]:
    """Attributes for `torch._C._CudaEventBase`."""

    def new(cls: Any, **given: Any) -> Any:
        if given.get("interprocess"):
            raise NotImplementedError("cuda_on_cpu does not model events between processes (interprocess=True)")
        made = object.__new__(cls)
        made.name = assigned_name()
        made.fence = made.at = None
        made.timed = bool(given.get("enable_timing"))
        made.device, made.cuda_event, made.event_id = CUDA, id(made), id(made)
        rt.made(made)
        return made

    def record(self: Any, stream: Any = None) -> None:
        self.fence = rt.record_event(self, stream)
        self.at = time.perf_counter()

    def wait(self: Any, stream: Any = None) -> None:
        if self.fence is not None:  # an event that was never recorded is complete
            rt.stream_waits(stream, self.fence)

    def synchronize(self: Any) -> None:
        rt.refuse_while_capturing("Event.synchronize")
        if self.fence is not None:
            with rt.lock:
                self.fence.wait()

    def query(self: Any) -> bool:
        rt.refuse_while_capturing("Event.query")
        with rt.lock:
            return self.fence is None or bool(self.fence.query())

    def elapsed_time(self: Any, other: Any) -> float:
        for one in (self, other):
            if not one.timed:
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if one.fence is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(other.at - self.at) * 1000.0

    return {
        "__new__": new,
        "__init__": lambda self, *_, **__: None,
        "record": record,
        "wait": wait,
        "synchronize": synchronize,
        "query": query,
        "elapsed_time": elapsed_time,
    }


def graph_methods(rt: "CudaWindow[Any]") -> dict[str, Any]:
    """Attributes for `torch._C._CUDAGraph`."""

    def new(cls: Any, keep_graph: bool = False) -> Any:
        made = object.__new__(cls)
        made.capture = None
        rt.made(made)
        return made

    def begin(self: Any, pool: Any = None, capture_error_mode: str = "global") -> None:
        rt.refuse_while_capturing("capture_begin")
        self.capture = rt.tracer.begin_capture()

    def end(self: Any) -> None:
        rt.tracer.end_capture()

    def replay(self: Any) -> None:
        if self.capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        rt.tracer.replay(self.capture)

    def reset(self: Any) -> None:
        self.capture = None

    return {
        "__new__": new,
        "__init__": lambda self, *_, **__: None,
        "capture_begin": begin,
        "capture_end": end,
        "replay": replay,
        "reset": reset,
        "instantiate": lambda self: None,
        "pool": lambda self: (0, 1),
    }


def generic(kind: type, make: Any) -> type:
    """A stand-in for `torch.Stream` or `torch.Event`, whose own class cannot be changed: it makes those of CUDA."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, kind)

    return Meta(kind.__name__, (), {"__module__": "torch"})


def make_stream(device: Any = None, priority: int = 0, **given: Any) -> Any:
    """What `torch.Stream(device)` is for `cuda`."""
    kind: Any = torch.cuda.Stream
    return kind(device, priority, **given)


def make_event(device: Any = None, **given: Any) -> Any:
    """What `torch.Event(device)` is for `cuda`."""
    kind: Any = torch.cuda.Event
    return kind(**given)
