"""The devices: a plain CPU, and any accelerator whose torch module has the streams and events of CUDA."""

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, final

import numpy as np
import torch

from batchstate.errors import ArgumentError
from batchstate.runtime.base import Array, Counters, DoneFence, Runtime, foreign_fence
from batchstate.runtime.memory import MappedMemory, StagingBlock, device_view
from batchstate.runtime.streams import Fence, Stream

MOST_ALONE = 1 << 15
"""Bytes from which numpy copies on a CPU: torch would with all threads, in milliseconds where the machine is busy."""

MOST_EVENTS = 256  # recorded anew once their fences are gone; beyond this, the oldest in use is dropped

_DONE = DoneFence()
_ids = itertools.count()


class CpuRuntime(Runtime):
    """A plain CPU as device: every operation runs at once, and streams have a name and no concurrency.

    Device memory is an allocation of its own. `.to("cpu")` and `torch.from_numpy` would alias the host: two sides that
    alias always agree, and every check of them would be vacuous.
    """

    def __init__(self, *, steps_in_flight: int = 2) -> None:
        super().__init__(torch.device("cpu"), steps_in_flight=steps_in_flight)
        self._current = self.stream("default")

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            if nbytes < MOST_ALONE:
                return into.copy_(block.front(nbytes))
            into.numpy()[...] = block.bytes[:nbytes]
            return into
        if not nbytes:
            return self._device_memory((0,), torch.uint8)  # an empty array has a stride of 0, which torch cannot view
        return torch.from_numpy(block.bytes[:nbytes].copy())  # aliases the copy alone

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        nbytes = source.nbytes
        if nbytes < MOST_ALONE:
            block.front(nbytes, source.dtype).copy_(source)
        else:
            block.bytes[:nbytes] = source.numpy().view(np.uint8)

    def _read_back(self, source: torch.Tensor) -> Array:
        copy: Array = source.detach().numpy().copy()
        return copy

    def _wait_for_device(self) -> None:
        return

    def stream(self, name: str) -> Stream:
        """A new stream; it has an identity and runs at once."""
        return Stream(name, None, next(_ids))

    @property
    def current_stream(self) -> Stream:
        """The stream of the innermost `use`."""
        return self._current

    def stream_for(self, action: str) -> Stream:
        """See `Runtime.stream_for`; here nothing is captured."""
        if get_ident() != self.owner.ident:
            self.check_owner(action)
        return self._current

    def use(self, stream: Stream) -> "_Window":
        """A window in which `stream` is the current one."""
        return _Window(self, stream)

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence that is complete: everything has run."""
        return self._fence_behind(stream or self._current)

    def _fence_behind(self, stream: Stream) -> Fence:
        return _DONE

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        return

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        return

    @property
    def capturing(self) -> bool:
        """False: there are no graphs."""
        return False


@final
class _Window:
    """A window of a CPU's stream, which may be entered again. A generator would make it twice as expensive."""

    __slots__ = ("_before", "_runtime", "_stream")

    def __init__(self, runtime: CpuRuntime, stream: Stream) -> None:
        self._runtime, self._stream = runtime, stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._runtime.check_owner("use")
        self._before.append(self._runtime._current)
        self._runtime._current = self._stream

    def __exit__(self, *_: object) -> None:
        self._runtime._current = self._before.pop()


@final
class EventFence:
    """A recorded event: the `number`-th of its runtime, from 1."""

    def __init__(self, event: Any, counters: Counters, stream: Stream, number: int) -> None:
        self.event, self._counters, self._stream, self.number = event, counters, stream, number

    def __repr__(self) -> str:  # asks nothing: a report may be made while a graph is captured
        return f"<fence {self.number} on {self._stream.name!r}>"

    def query(self) -> bool:
        """Whether the event has happened. Never waits."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Blocks the host until the event has happened."""
        self._counters.fence_waits += 1
        self.event.synchronize()


class AcceleratorRuntime(Runtime):
    """Runs on an accelerator through `torch.get_device_module(device)`; without an index on the current one."""

    def __init__(self, device: torch.device, *, steps_in_flight: int = 2) -> None:
        try:
            module: Any = torch.get_device_module(device)
        except RuntimeError:
            module = None
        if not hasattr(module, "Event") or not module.is_available():
            problem = f"device {str(device)!r} is not available here"
            raise ArgumentError(problem, str(device), "use 'cpu', or a machine and a torch build that have this device")
        self._module = module
        index: int | None = device.index  # torch's stub says int, and a device named without one has None
        self._index: int = module.current_device() if index is None else index
        super().__init__(torch.device(device.type, self._index), steps_in_flight=steps_in_flight)
        self._streams: dict[object, Stream] = {}
        self._events: deque[Any] = deque()  # the latest that were recorded
        self._recorded = 0  # fences, ever
        self._current_ids = _stream_ids(module, self.device)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it is written in place later, and not only in inference mode
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        pinned = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        return MappedMemory(pinned, device_view(pinned, self.device))

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        if into is None:
            return block.front(nbytes).to(self.device, non_blocking=True, copy=True)
        return into.copy_(block.front(nbytes), non_blocking=True)

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        block.front(source.nbytes, source.dtype).copy_(source, non_blocking=True)

    def _read_back(self, source: torch.Tensor) -> Array:
        with self._synchronisation_allowed():
            copy: Array = source.detach().to("cpu").numpy()
        return copy

    def _wait_for_device(self) -> None:
        with self._synchronisation_allowed():
            self._module.synchronize(self.device)

    @contextlib.contextmanager
    def _synchronisation_allowed(self) -> Iterator[None]:
        """A window for calls named for waiting, where the engine runs under torch's sync-debug mode."""
        before = self._module.get_sync_debug_mode() if hasattr(self._module, "get_sync_debug_mode") else 0
        if before == 0:
            yield
            return
        self._module.set_sync_debug_mode(0)
        try:
            yield
        finally:
            self._module.set_sync_debug_mode(before)

    def stream(self, name: str) -> Stream:
        """A new stream of the device. Torch has few, and may give one out again: the last name counts."""
        native = self._module.Stream(device=self.device)
        key = (native.device_index, native.stream_id)
        stream = self._streams[key] = Stream(name, native, key)
        return stream

    @property
    def current_stream(self) -> Stream:
        """Torch's current stream, also where the engine has set it."""
        key = self._current_ids()
        stream = self._streams.get(key)
        if stream is None:
            native = self._module.current_stream(self.device)
            stream = self._streams[key] = Stream("default" if not native.stream_id else "of the engine", native, key)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """A window in which `stream` is torch's current stream."""
        self.check_owner("use")
        module = self._module
        if self._index != module.current_device():
            with module.stream(stream.native):  # which makes the device the current one, too
                yield
            return
        before = self.current_stream  # torch's own window takes three times as long to find it and to put it back
        module.set_stream(stream.native)
        try:
            yield
        finally:
            module.set_stream(before.native)

    def record(self, stream: Stream | None = None) -> Fence:
        """An event recorded on `stream`."""
        if self.capturing:  # the event would belong to the graph, and could not be queried
            self.refuse_capture("recording a fence")
        return self._fence_behind(stream or self.current_stream)

    def _fence_behind(self, stream: Stream) -> Fence:
        events = self._events
        # To record the oldest event anew takes a third of making one. A holder of it, or of its fence, may still query
        # or await it. A finalizer of the fence could not tell: another finalizer may keep its garbage alive.
        oldest = [events.popleft()] if events else []
        if oldest and sys.getrefcount(oldest[0]) == 2:
            event = oldest[0]
        else:
            if len(events) < MOST_EVENTS - 1:
                events.extend(oldest)
            event = self._module.Event()
        event.record(stream.native)
        events.append(event)
        self._recorded += 1
        return EventFence(event, self.counters, stream, self._recorded)

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        if isinstance(fence, EventFence):
            stream.native.wait_event(fence.event)
        elif not fence.query():
            raise foreign_fence(fence)

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream.native)

    @property
    def capturing(self) -> bool:
        """Whether torch's current stream is being captured."""
        return bool(self._module.is_current_stream_capturing())


def _stream_ids(module: Any, device: torch.device) -> Callable[[], tuple[int, int]]:
    """A function that returns device index and id of the current stream, which each step needs several times.

    `torch.cuda.current_stream` makes an object each time, in 2.7 us, from the answer of a private function, in 0.1 us;
    a decode step takes 25 us (torch 2.13). So that one is called if it exists and gives the same answer.
    """

    def public() -> tuple[int, int]:
        native = module.current_stream(device)
        return native.device_index, native.stream_id

    current = getattr(torch._C, "_cuda_getCurrentStream", None)
    if device.type != "cuda" or current is None:
        return public

    def private() -> tuple[int, int]:
        stream_id, device_index, _ = current(device.index)
        return device_index, stream_id

    try:
        return private if private() == public() else public
    except (TypeError, ValueError):  # another torch: other arguments, or another answer
        return public


def open_runtime(device: str | torch.device = "cpu", *, steps_in_flight: int = 2) -> Runtime:
    """The runtime of `"cpu"`, or of an accelerator that torch was built for (`"cuda"`, `"cuda:1"`, ...).

    Raises:
        ArgumentError: torch does not know the device, or it is not available here.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        remedy = "use 'cpu' or 'cuda'; `batchstate.races.open_device` also opens 'race' and 'sim'"
        raise ArgumentError(f"unknown device {device!r}", device, remedy) from None
    if wanted.type == "cpu":
        return CpuRuntime(steps_in_flight=steps_in_flight)
    return AcceleratorRuntime(wanted, steps_in_flight=steps_in_flight)
