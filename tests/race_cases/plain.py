"""Runtimes without a tool that run the micro-cases: a CPU, where everything comes at once, and an accelerator."""

from typing import Any, TypeAlias, final

import torch

from batchstate.races import RaceRuntime
from batchstate.races.cuda import CudaRuntime, CudaSimRuntime, WatchedCuda
from batchstate.races.sim import SimRuntime
from batchstate.races.tracing.dispatch import is_raw
from batchstate.runtime import AcceleratorRuntime, CpuRuntime, Fence, Runtime, Stream


@final
class PlainCpu(CpuRuntime):
    """Runs everything in program order: a program computes the right values here."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory."""
        return torch.zeros(shape, dtype=dtype)


@final
class PlainAccelerator(AcceleratorRuntime):
    """Runs on an accelerator with its own events, unseen by any tool of this library."""

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


@final
class FenceEvent:
    """An event made of fences, as an engine on a runtime makes one: a wait is for the last recording before it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: Fence | None = None

    @property
    def _recording(self) -> Fence:
        assert self._last is not None, "a device would not wait at all"
        return self._last

    def record(self, stream: Stream | None = None) -> None:
        """Records it on a stream, by default the current one."""
        self._last = self._runtime.record(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the last recording."""
        self._runtime.wait(self._recording, stream=stream)

    def query(self) -> bool:
        """Whether the last recording is complete."""
        return self._recording.query()

    def synchronize(self) -> None:
        """The host waits for the last recording."""
        self._recording.wait()


CaseRuntime: TypeAlias = RaceRuntime | SimRuntime | PlainCpu | PlainAccelerator | PlainCuda
"""A runtime with pinned memory, which runs a micro-case."""


def new_event(rt: CaseRuntime) -> NativeEvent | FenceEvent:
    """An event that can be recorded again: the accelerator's own where the runtime has one."""
    return NativeEvent(rt, rt._module.Event()) if isinstance(rt, PlainAccelerator | PlainCuda) else FenceEvent(rt)
