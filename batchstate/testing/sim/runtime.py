"""`SimRuntime`: a device simulated on the CPU, whose streams run when a scheduler lets them.

Operations are enqueued and run later, on real memory: copies read pinned memory when they run, results land when they
run, freed memory is poisoned and given to the next. So a race does here what it does on a device: it makes wrong
tokens, and whether it does is up to the order, which the scheduler and its seed decide.
"""

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, final

import torch

from batchstate.errors import ArgumentError
from batchstate.runtime import Fence, MappedMemory, Runtime, Stream
from batchstate.runtime.base import Array
from batchstate.runtime.fences import foreign_fence
from batchstate.runtime.memory import StagingBlock
from batchstate.testing.sim.calls import Ahead
from batchstate.testing.sim.device import Allocator, Device, Lane, SimFence, poisoned
from batchstate.testing.sim.memory import Places
from batchstate.testing.sim.operations import Operations, Transfers, task_of
from batchstate.testing.sim.schedulers import scheduler_of
from batchstate.testing.sim.shapes import Made
from batchstate.testing.tracing.events import DeviceEvent
from batchstate.testing.tracing.memory import Place
from batchstate.testing.tracing.modes import is_raw, watching

T = TypeVar("T")


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A window in which operations are the tool's own."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@final
class SimRuntime(Runtime):
    """A device on CPU tensors. Streams run late in a `with` window of it, and at once outside.

    Example:
        with SimRuntime(scheduler="pct", seed=7) as rt:
            engine = Engine(rt, ...)
            engine.run()

    Args:
        scheduler: a name out of `PORTFOLIO`: who gets on.
        seed: of its choices: the same seed gives the same run.
        steps_in_flight: see `Runtime`.

    Attributes:
        scheduler, seed: as given; with the program they say all there is to say of a run.
    """

    def __init__(self, *, scheduler: str = "random", seed: int = 0, steps_in_flight: int = 2) -> None:
        self.scheduler = scheduler
        self.seed = seed
        self._device = Device(scheduler_of(scheduler, seed), lambda: self.step)
        self._allocator = Allocator(self._device)
        self._places = Places(self._device, self._allocator, self._current_lane)
        self._transfers = Transfers(self._device, self._places, self._current_lane, lambda: self.step)
        self._operations = Operations(
            self._device, self._places, self._transfers, self._current_lane, lambda: self.step, self._keep_alive
        )
        self._mapped_at: set[int] = set()
        self._ahead = Ahead(self._device, lambda memory: memory.ctypes.data in self._mapped_at)
        self._fences = itertools.count(1)
        self._current = self.stream("default")
        self._window: contextlib.ExitStack | None = None
        self._entered = False
        super().__init__(torch.device("cpu"), steps_in_flight=steps_in_flight)
        self._transfers.on_wait = self._count_wait

    def _count_wait(self) -> None:
        self.counters.forced_syncs += 1

    def __enter__(self) -> Self:
        """From now on streams run late, and the operations of this thread go to them."""
        self.check_owner("with")
        if self._entered:
            raise ArgumentError("a simulated device was entered twice", value=self, remedy="make one for each `with`")
        self._entered = True
        self._window = contextlib.ExitStack()
        self._window.enter_context(watching(self._operations))
        self._device.at_once = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Everything runs; but not where an error ends the window, or a fault did.

        Raises:
            DeviceFault: something failed that had not run before.
        """
        window, self._window = self._window, None
        # What closes the window may itself run while an error is on its way, the teardown of a test for example.
        failed = error is not None or sys.exc_info()[1] is not None or self._device.fault is not None
        try:
            if not failed:
                self._device.drain_all()
        finally:
            if window is not None:
                window.close()
            self._places.memories.close()
            self._device.at_once = True

    # What can be seen of it

    @property
    def synchronised(self) -> Counter[str]:
        """Times that the host waited for the current stream in a call of torch, by its name."""
        return self._transfers.synchronised

    @property
    def unmodelled(self) -> Counter[str]:
        """Operations that the host waited for only because torch cannot say what they return, by name."""
        return self._operations.unmodelled

    @property
    def reused(self) -> int:
        """Times that memory was handed out that had been freed."""
        return self._allocator.reused

    @property
    def in_flight_depth(self) -> int:
        """Steps of which something has not run."""
        return self._device.depth

    @property
    def in_flight_depth_max(self) -> int:
        """The most such steps there ever were."""
        return self._device.depth_max

    def pending(self, stream: Stream | None = None) -> int:
        """Operations that have not run, of one stream or of all."""
        return self._device.pending(None if stream is None else self._lane_of(stream))

    def trace(self) -> list[str]:
        """What has run, in order: number, stream, operation, step in which it was enqueued."""
        return self._device.trace()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A window in which no time passes: nothing runs but what the host waits for."""
        before, self._device.held = self._device.held, True
        try:
            yield
        finally:
            self._device.held = before

    # For tests that model what an engine does itself

    def event(self, name: str = "event") -> DeviceEvent:
        """An event as `torch.cuda.Event` is one: it can be recorded again."""
        return DeviceEvent(name, self.record, lambda fence, stream: self.wait(fence, stream=stream))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> torch.Tensor:
        """Zeroed host memory that `copy_(non_blocking=True)` uses without the host waiting; `name` is for reports."""
        with unwatched():
            return self._places.keep(torch.zeros(shape, dtype=dtype), Place.PINNED)

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
        """Runs a device operation; see `Runtime.launch`. Operations of torch in it are enqueued one by one.

        A function marked `raw_kernel` is enqueued as a whole.

        Raises:
            ArgumentError: it declares what it touches, is not marked, and torch saw nothing; or it is marked, and what
                it declares is not among its arguments.
        """
        called = name or getattr(operation, "__name__", "launch")
        declared = (*reads, *writes)
        for one in declared:
            if self._places.of(one) in (None, Place.UNDECIDED):
                self._places.on_device(one)
        run: Callable[..., Any] = operation
        if self._window is not None and is_raw(operation):
            run = functools.partial(self._enqueue_kernel, called, operation, declared)
        seen = self._operations.seen
        result: T = super().launch(run, *args, reads=reads, writes=writes, name=called, operations=operations, **kwargs)
        shown = self._window is None or run is not operation or seen != self._operations.seen
        if not shown and any(one.numel() for one in declared):
            raise ArgumentError(
                f"the launch of {called!r} declares what it touches, and torch saw nothing of it",
                value=called,
                remedy="mark the function with `raw_kernel`, so that it is enqueued as a whole; it ran at once",
            )
        return result

    def _enqueue_kernel(
        self, name: str, kernel: Callable[..., Any], declared: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        with unwatched():
            task = task_of(name, kernel, (args, kwargs), declared, self._places, self.step)
            self._device.enqueue(self._current_lane(), task)

    def inspect(self, tensor: torch.Tensor) -> Array:
        """Reads device memory for a check: what the current stream would see if it ran to here, which it does not.

        See `Runtime.inspect`.
        """
        with unwatched(), self._ahead.of(self._current_lane()):
            return super().inspect(tensor)

    # What a device implements

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with unwatched(), torch.inference_mode(False):
            return self._places.keep(poisoned((nbytes,), torch.uint8), Place.PINNED)

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with unwatched():
            stride = torch.empty(shape, dtype=dtype, device="meta").stride()
            return self._places.new(Made(dtype, tuple(shape), stride))

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        mapped = super()._mapped(shape, dtype)
        self._mapped_at.add(mapped.device.untyped_storage().data_ptr())
        return mapped

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        with unwatched():
            buffer = self._places.new(Made(torch.uint8, (nbytes,), (1,))) if into is None else into[:nbytes]
            self._transfers.to_device(block.tensor[:nbytes], buffer, "upload")
            return buffer

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        with unwatched():
            self._transfers.to_host(source, block.tensor[: source.numel()], "download")

    def _read_back(self, source: torch.Tensor) -> Array:
        self._device.drain(self._current_lane())
        with unwatched():
            copy: Array = source.detach().clone().numpy()
            return copy

    def _wait_for_device(self) -> None:
        self._device.drain_all()

    def stream(self, name: str) -> Stream:
        """A new stream."""
        lane = self._device.add(name)
        return Stream(name, lane, lane.number)

    @property
    def current_stream(self) -> Stream:
        """The stream of the innermost `use`."""
        return self._current

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """A window in which `stream` is the current one."""
        self.check_owner("use")
        self._lane_of(stream)
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence behind everything enqueued on a stream so far."""
        self.check_owner("record")
        lane = self._lane_of(stream or self._current)
        return SimFence(next(self._fences), self._device.mark(lane), self._device, self.counters)

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        self.check_owner("wait")
        if isinstance(fence, SimFence) and fence.device is self._device:
            self._device.wait_on(self._lane_of(stream), fence.marker)
        elif isinstance(fence, SimFence) or not fence.query():
            raise foreign_fence(fence)

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        lane, block = self._lane_of(stream), self._places.on_device(tensor).block
        if block is not None and lane is not block.lane:
            block.users[lane.number] = lane

    @property
    def capturing(self) -> bool:
        """False: there are no graphs."""
        return False

    # Its own affairs

    def _current_lane(self) -> Lane:
        return self._lane_of(self._current)

    def _lane_of(self, stream: Stream) -> Lane:
        lane = getattr(stream, "native", None)
        if not isinstance(lane, Lane) or lane not in self._device.lanes:
            raise ArgumentError(
                f"{stream!r} is not a stream of this runtime", value=stream, remedy="use `Runtime.stream`"
            )
        return lane
