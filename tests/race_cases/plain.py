"""Runtimes without a tool that run the micro-cases: a CPU, where everything comes at once, and an accelerator."""

from typing import Any, TypeAlias, final

import torch

from batchstate.races import RaceRuntime
from batchstate.races.cuda import CudaRuntime, CudaSimRuntime, WatchedCuda
from batchstate.races.sim import SimRuntime
from batchstate.races.tracing.dispatch import is_raw
from batchstate.races.tracing.runtime import DeviceEvent
from batchstate.runtime import AcceleratorRuntime, CpuRuntime, Stream


@final
class PlainCpu(CpuRuntime):
    """Runs everything in program order: what a program computes here is right."""

    def event(self, name: str = "event") -> DeviceEvent:
        """An event that can be recorded again."""
        return DeviceEvent(name, self.record, lambda fence, stream: self.wait(fence, stream=stream))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory."""
        return torch.zeros(shape, dtype=dtype)


@final
class PlainAccelerator(AcceleratorRuntime):
    """Runs on an accelerator with its own events, unseen by any tool of this library."""

    def event(self, name: str = "event") -> "NativeEvent":
        """An event of the accelerator."""
        return NativeEvent(self, self._module.Event())

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed pinned memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)


@final
class PlainCuda(AcceleratorRuntime):
    """Says everything in plain `torch.cuda`, in a window that watches `torch.cuda`: the detector sees torch alone.

    Args:
        window: names the streams in reports, and is told of kernels that torch does not see.
    """

    def __init__(self, window: CudaRuntime | CudaSimRuntime | WatchedCuda) -> None:
        self._window = window
        super().__init__(torch.device("cuda"))

    def stream(self, name: str) -> Stream:
        """A stream of torch."""
        made = super().stream(name)
        self._window.name_stream(made.native, name)
        return made

    def event(self, name: str = "event") -> "NativeEvent":
        """An event of torch."""
        return NativeEvent(self, self._module.Event())

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed pinned memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def launch(self, operation: Any, *args: Any, **named: Any) -> Any:
        """A kernel that torch does not see is declared to the window; all else is called."""
        return self._window.launch(operation, *args, **named) if is_raw(operation) else operation(*args)


@final
class NativeEvent:
    """`torch.cuda.Event`, or that of another accelerator, by streams of the library.

    Args:
        runtime: whose current stream is meant where none is named.
        native: the event.
    """

    def __init__(self, runtime: AcceleratorRuntime, native: Any) -> None:
        self._runtime = runtime
        self._native = native

    def record(self, stream: Stream | None = None) -> None:
        """Records it on a stream, by default the current one."""
        self._native.record((stream or self._runtime.current_stream).native)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the last recording."""
        (stream or self._runtime.current_stream).native.wait_event(self._native)

    def query(self) -> bool:
        """Whether the last recording is complete."""
        return bool(self._native.query())

    def synchronize(self) -> None:
        """The host waits for the last recording."""
        self._native.synchronize()


CaseRuntime: TypeAlias = RaceRuntime | SimRuntime | PlainCpu | PlainAccelerator | PlainCuda
"""A runtime with events and pinned memory, which runs a micro-case."""
