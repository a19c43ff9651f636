"""`SimRuntime`: a device simulated on the CPU, whose streams run when a scheduler lets them.

Operations are enqueued and run later, on real memory: copies read pinned memory when they run, results land when they
run, freed memory is poisoned and handed out again. So a race makes wrong tokens here as on a device, in some orders of
the streams, and the scheduler and its seed decide the order.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from batchstate.errors import ArgumentError
from batchstate.races.sim.device import BlockAllocator, Device, DeviceStream, SimFence, poisoned
from batchstate.races.sim.schedulers import scheduler_of
from batchstate.races.sim.shapes import NewTensor
from batchstate.races.sim.speculation import SpeculativeRead
from batchstate.races.sim.tracer import SimTracer
from batchstate.races.tracing.dispatch import is_raw, untraced
from batchstate.races.tracing.memory import MemoryKind
from batchstate.races.tracing.runtime import TracedRuntime
from batchstate.runtime import CpuRuntime, Fence, MappedMemory, Stream
from batchstate.runtime.base import Array, foreign_fence
from batchstate.runtime.memory import StagingBlock

T = TypeVar("T")


class SimRuntime(TracedRuntime[DeviceStream]):
    """A device on CPU tensors. Streams run late in a `with` window of it, and at once outside.

    Example:
        with SimRuntime(scheduler="pct", seed=7) as rt:
            engine = Engine(rt, ...)
            engine.run()

    Args:
        inner: a fresh CPU runtime, used through this one alone, which has the streams and their windows.
        scheduler: a name out of `PORTFOLIO`: it picks the stream that runs next.
        seed: of its choices: the same seed gives the same run.
        steps_in_flight: see `Runtime`.

    Attributes:
        scheduler, seed: as given; the program and these two determine a run.
    """

    _tracer: SimTracer

    def __init__(
        self,
        inner: CpuRuntime | None = None,
        *,
        scheduler: str = "random",
        seed: int = 0,
        steps_in_flight: int = 2,
    ) -> None:
        self.scheduler = scheduler
        self.seed = seed
        self._device = Device(scheduler_of(scheduler, seed), lambda: self.step)
        self._allocator = BlockAllocator(self._device)
        self._mapped_at: set[int] = set()
        self._speculative = SpeculativeRead(self._device, lambda memory: memory.ctypes.data in self._mapped_at)
        super().__init__(inner, steps_in_flight)

    def __enter__(self) -> Self:
        """From now on streams run late, and the operations of this thread go to them."""
        super().__enter__()
        self._device.at_once = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Everything runs; but not if an error ends the window, or a fault did.

        Raises:
            DeviceFault: an operation failed that had not run before.
        """
        # A window may be closed while an error is on its way, by the teardown of a test for example.
        failed = error is not None or sys.exc_info()[1] is not None or self._device.fault is not None
        try:
            if not failed:
                self._device.drain_all()
        finally:
            self._leave()
            self._tracer.allocations.close()
            self._device.at_once = True

    def _new_tracer(self) -> SimTracer:
        return SimTracer(self, self._device, self._allocator)

    @property
    def unmodelled(self) -> Counter[str]:
        """Operations that the host waited for only because torch cannot predict their results, by name."""
        return self._tracer.unmodelled

    @property
    def reused(self) -> int:
        """Times that freed memory was handed out again: without any, a run proves nothing of lifetimes."""
        return self._allocator.reused

    @property
    def in_flight_depths(self) -> list[int]:
        """The most steps with operations that had not run, during each step with operations, oldest first."""
        return [depth for _, depth in sorted(self._device.depths.items())]

    def pending(self, stream: Stream | None = None) -> int:
        """Operations that have not run, of one stream or of all."""
        return self._device.pending(None if stream is None else self._known_stream(stream))

    def trace(self) -> list[str]:
        """The operations that have run, in order: number, stream, operation, step in which it was enqueued."""
        return self._device.trace()

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
            ArgumentError: it declares accesses, is not marked, and torch saw nothing; or it is marked, and declares
                memory that is not among its arguments.
        """
        called = name or getattr(operation, "__name__", "launch")
        declared, tracer = (*reads, *writes), self._tracer
        for tensor in declared:
            if tracer.kind_of(tensor) in (None, MemoryKind.UNDECIDED):
                tracer.use_on_device(tensor)

        def enqueue(*arguments: Any, **named: Any) -> Any:
            with untraced():
                tracer.enqueue_kernel(called, operation, arguments, named, declared)

        run: Callable[..., Any] = enqueue if self._window is not None and is_raw(operation) else operation
        seen = tracer.operations
        result: T = super().launch(run, *args, reads=reads, writes=writes, name=called, operations=operations, **kwargs)
        shown = self._window is None or run is not operation or seen != tracer.operations
        if not shown and any(tensor.numel() for tensor in declared):
            problem = f"the launch of {called!r} declares what it touches, and torch saw nothing of it"
            remedy = "mark the function with `raw_kernel`, so that it is enqueued as a whole; it ran at once"
            raise ArgumentError(problem, called, remedy)
        return result

    def inspect(self, tensor: torch.Tensor) -> Array:
        """Reads device memory for a check, as the current stream would see it if it ran to here: see `Runtime.inspect`.

        The stream does not run for it.
        """
        with untraced(), self._speculative.behind(self._known_current()):
            return super().inspect(tensor)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with untraced(), torch.inference_mode(False):
            return self._tracer.keep(poisoned((nbytes,), torch.uint8), MemoryKind.PINNED)

    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with untraced():
            return self._tracer.new(NewTensor.like(torch.empty(shape, dtype=dtype, device="meta")))

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        mapped = super()._mapped(shape, dtype)
        self._mapped_at.add(mapped.device.untyped_storage().data_ptr())
        return mapped

    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        with untraced():
            buffer = self._tracer.new(NewTensor(torch.uint8, (nbytes,), (1,))) if into is None else into
            self._tracer._copy_to_device(buffer, block.tensor[:nbytes], "upload")
            return buffer

    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        with untraced():
            source = source.view(torch.uint8)
            self._tracer._copy_to_host(block.tensor[: source.numel()], source, "download")

    def _read_back(self, source: torch.Tensor) -> Array:
        self._device.drain(self._known_current())
        with untraced():
            copy: Array = source.detach().clone().numpy()
            return copy

    def _wait_for_device(self) -> None:
        self._device.drain_all()

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence behind everything enqueued on a stream so far."""
        self.check_owner("record")
        return self._recorded(stream, "a fence")

    def _recorded(self, stream: Stream | None, name: str) -> Fence:
        queue = self._known_stream(stream or self.current_stream)
        return SimFence(self._device.mark(queue), self._device, self.counters)

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        self.check_owner("wait")
        if isinstance(fence, SimFence) and fence.device is self._device:
            self._device.wait_on(self._known_stream(stream), fence.marker)
        elif isinstance(fence, SimFence) or not fence.query():
            raise foreign_fence(fence)

    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        user, block = self._known_stream(stream), self._tracer.use_on_device(tensor).block
        if block is not None and user is not block.stream:
            block.users[user.number] = user

    def _new_stream(self, name: str) -> DeviceStream:
        return self._device.add(name)
