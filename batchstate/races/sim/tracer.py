"""Every operation of torch: enqueued where it accesses device memory, run at once where it does not."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._source_lines import source_line
from batchstate.errors import ArgumentError, DeviceError
from batchstate.races.sim.calls import Call, View, packed, written
from batchstate.races.sim.device import Block, BlockAllocator, Device, DeviceStream, Task, bytes_of, poison, poisoned
from batchstate.races.sim.shapes import META, NewTensor, UnknownError, results_of, shapes_of
from batchstate.races.tracing.dispatch import TracedCall, Tracer
from batchstate.races.tracing.memory import HOST_KINDS, Allocation, MemoryKind
from batchstate.races.tracing.operations import Awaits, tensors_in
from batchstate.races.tracing.runtime import TracedRuntime


@final
@attrs.define(eq=False)
class Fill:
    """Numbers of a factory in memory that may turn out to be the device's.

    The numbers are there at once, as the host would need them. Once an operation of the device accesses them, it is
    decided that an operation of the stream that was current then wrote them: if that has not run, they are not there.

    Attributes:
        block: the memory.
        task: the operation.
        values: the numbers that it writes; None as long as they are there already.
        done: it has run.
    """

    block: Block
    task: Task | None = None
    values: npt.NDArray[np.uint8] | None = None
    done: bool = False

    def __call__(self) -> None:
        """Runs it."""
        self.done = True
        if self.values is not None:
            self.block.memory[...] = self.values

    def happens_late(self, device: Device) -> None:
        """It is the device's."""
        if not self.done and self.task is not None:
            self.values = self.block.memory.copy()
            poison(self.block.memory)
            device.awaken(self.task)


@final
@attrs.define(eq=False, repr=False)
class SimAllocation(Allocation):
    """A piece of memory of a program.

    Attributes:
        block: where it lies. None for memory of the host, for empty tensors, and for memory that is older than the
            window or shared with numpy: the program frees that itself, and no other tensor gets it.
        fill: numbers written while it was undecided whose memory it is.
    """

    block: Block | None = None
    fill: Fill | None = None


class SimTracer(Tracer[SimAllocation]):
    """Enqueues the device's operations, and runs the host's.

    Args:
        runtime: has the steps and the current stream.
        device: runs the operations.
        allocator: of its memory.

    Attributes:
        operations: operations on device memory so far.
        unmodelled: operations that the host had to wait for only because torch cannot predict their results, by name.
    """

    def __init__(self, runtime: TracedRuntime[DeviceStream], device: Device, allocator: BlockAllocator) -> None:
        super().__init__(runtime.device, self._died)
        self._runtime = runtime
        self._device = device
        self._allocator = allocator
        self._current = runtime._known_current
        self.operations = 0
        self.unmodelled: Counter[str] = Counter()

    # Memory

    def keep(self, tensor: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
        """Notes whose memory a new tensor is, and returns the tensor."""
        self.allocations.add(tensor, SimAllocation(kind))
        return tensor

    def new(self, like: NewTensor) -> torch.Tensor:
        """New device memory of the current stream, with the content of its block."""
        return self._tensor(like, MemoryKind.DEVICE, self._allocator.allocate)

    def new_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """New pinned memory. A copy of torch holds its tensor until it has run; a kernel has its address alone."""
        pinned = self._tensor(
            NewTensor.like(tensor), MemoryKind.PINNED, lambda _, nbytes: self._allocator.pinned(nbytes)
        )
        return pinned.copy_(tensor.detach())

    def _of_copy(self, pinned: torch.Tensor) -> View | torch.Tensor:
        """The stand-in of pinned memory in a copy."""
        return pinned.data

    def pack(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """The stand-in of a tensor that an operation reads, until it runs."""
        kind = self.kind_of(tensor)
        if kind in HOST_KINDS or (kind is MemoryKind.UNDECIDED and not tensor.ndim):
            return tensor.detach().clone()  # one number: an operation takes it along when it is enqueued
        return self._pack_written(tensor)

    def _pack_written(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """The stand-in of a tensor that an operation writes: this decides that its memory is the device's."""
        block = self.use_on_device(tensor).block
        return tensor.data if block is None else View.of(tensor, block)

    def _address(self, tensor: torch.Tensor) -> View | torch.Tensor:
        """The stand-in of a tensor that does not keep its memory, where that is a block."""
        allocation = self.allocations.of(tensor)
        block = None if allocation is None else allocation.block
        return tensor.data if block is None else View.of(tensor, block)

    def _tensor(
        self, like: NewTensor, kind: MemoryKind, allocate: Callable[[DeviceStream, int], Block]
    ) -> torch.Tensor:
        nbytes = bytes_of(like.dtype, like.shape, like.stride)
        if not nbytes:
            return self.keep(torch.empty_strided(like.shape, like.stride, dtype=like.dtype), kind)
        block = allocate(self._current(), nbytes)
        tensor = block.handed_out(like.dtype, like.shape, like.stride)
        self.allocations.add(tensor, SimAllocation(kind, block))
        return tensor

    def _copied_to_device(self, values: torch.Tensor) -> torch.Tensor:
        """New device memory with these values at once: the stream has nothing before it."""
        tensor = self.new(NewTensor.like(values))
        self._device.settle()  # the allocation's wipe comes before the values
        return tensor.copy_(values.detach())

    def _undecided(self, values: torch.Tensor) -> torch.Tensor:
        """New memory of this shape that may turn out to be the device's."""
        return self._tensor(NewTensor.like(values), MemoryKind.UNDECIDED, self._allocator.fresh)

    def _lift(self, tensor: torch.Tensor, from_factory: bool) -> torch.Tensor:
        if not from_factory:
            return self.keep(tensor, MemoryKind.HOST)
        if tensor.untyped_storage().resizable():
            return self._undecided(tensor).copy_(tensor.detach())  # the host waits for such a copy
        return self.keep(tensor, MemoryKind.UNDECIDED)  # numpy has it too, and goes on writing it

    def _existing(self, tensor: torch.Tensor) -> SimAllocation:
        return SimAllocation(MemoryKind.DEVICE)

    def _decided(self, allocation: SimAllocation) -> None:
        if allocation.fill is not None:
            allocation.fill.happens_late(self._device)
            allocation.fill = None

    def _died(self, allocation: SimAllocation) -> None:
        if allocation.block is not None and allocation.kind in (MemoryKind.DEVICE, MemoryKind.PINNED):
            self._allocator.free(allocation.block, pinned=allocation.kind is MemoryKind.PINNED)

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self._runtime._keep_alive(tensor, stream)

    # Operations

    def enqueue(
        self,
        name: str,
        work: Callable[[], None],
        writes: Callable[[], Sequence[Any]],
        *,
        reads_host: object = None,
        dormant: bool = False,
    ) -> Task:
        """Appends an operation to the current stream; see `Task`."""
        task = Task(name, self._runtime.step, source_line(2), work, writes, reads_host, dormant)
        self._enqueue(task)
        return task

    def _enqueue(self, task: Task) -> None:
        self._device.enqueue(self._current(), task)

    def _on_device(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, *_ = call
        name = operation.name
        self.operations += 1
        awaits = operation.awaits(args, kwargs, self.kind_of)
        if awaits is not Awaits.NOTHING:
            self._synchronise(name)
        if awaits is Awaits.RESULT:
            return self._now(call)
        try:
            new = results_of(func, args, kwargs)
        except UnknownError:
            if awaits is Awaits.BEFORE or self._masked_by_host(call):
                with torch.random.fork_rng(devices=[]):
                    new = shapes_of(operation, func(*args, **kwargs))  # it runs again, behind the wait
                return self._late(call, new)
            self._wait()
            result = self._now(call)
            self.unmodelled[name] += 1  # only now: a call that torch refuses is no gap of this model
            return result
        return self._late(call, new)

    def _masked_by_host(self, call: TracedCall) -> bool:
        """Whether masks of the host name the elements: then the host knows their number without a wait."""
        if call.operation.name not in ("index", "_unsafe_index"):
            return False
        return all(self.kind_of(index) is MemoryKind.HOST for index in tensors_in(call.args[1]))

    def _late(self, call: TracedCall, new: list[Any]) -> Any:
        """Enqueues an operation whose new results are described; see `results_of`."""
        operation, func, args, kwargs, *_ = call
        name = operation.name
        changed = packed(operation.writes(args, kwargs), self._pack_written)
        call_args = packed(args, self.pack)
        call_kwargs = {key: packed(value, self.pack) for key, value in kwargs.items()}
        fresh = [self._allocated(result) for result in new]
        if not operation.leaves_empty:
            targets = packed(fresh, self.pack) if any(new) else []
            seed = new_seed(kwargs.get("generator")) if operation.draws(args, kwargs) else None
            self.enqueue(name, Call(func, call_args, call_kwargs, targets, seed), lambda: written([*changed, *targets]))
        results = [
            result if key is None else kwargs[key] if isinstance(key, str) else args[key]
            for result, key in zip(fresh, operation.returned, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _allocated(self, new: Any) -> Any:
        if isinstance(new, NewTensor):
            return self.new(new)
        return [self._allocated(part) for part in new] if isinstance(new, list) else new

    def _now(self, call: TracedCall) -> Any:
        """Runs an operation at once: its stream has nothing before it."""
        for tensor in call.tensors:
            if self.kind_of(tensor) not in HOST_KINDS:
                self.use_on_device(tensor)
        result = call.func(*call.args, **call.kwargs)
        self._device.note(self._current(), call.operation.name, self._runtime.step)

        def keep(made: torch.Tensor) -> torch.Tensor:
            old = self.allocations.of(made) is not None or any(made is other for other in call.tensors)
            return made if old or not _is_plain(made) else self._copied_to_device(made)

        return _replaced(result, keep)

    def _on_host(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, tensors, kinds = call
        result = func(*args, **kwargs)
        host = any(kind in HOST_KINDS for kind in kinds)
        operands = [tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)]

        def keep(made: torch.Tensor) -> torch.Tensor:
            if not _is_plain(made) or self.allocations.of(made) is not None:
                return made
            if made.untyped_storage()._cdata in operands:
                return made
            if host:
                return self.keep(made, MemoryKind.HOST)
            tensor = self._undecided(made)
            if operation.leaves_empty:
                return tensor
            tensor.copy_(made.detach())
            allocation = self.allocations.of(tensor)
            if allocation is not None and allocation.block is not None:
                block = allocation.block
                fill = allocation.fill = Fill(block)
                fill.task = self.enqueue(operation.name, fill, lambda: [block.memory], dormant=True)
            return tensor

        return _replaced(result, keep)

    def _synchronise(self, name: str) -> None:
        self._runtime._note_sync(name)
        self._wait()

    def _wait(self) -> None:
        self._device.drain(self._current())

    # Copies

    def _copy_to_device(self, target: torch.Tensor, source: torch.Tensor, name: str = "copy to device") -> None:
        """Enqueues a copy of pinned memory, which it reads when it runs."""
        self._enqueue_copy(name, self.pack(target), self._of_copy(source), self.allocations.of(source))

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor, name: str = "copy to host") -> None:
        """Enqueues a copy to pinned memory, which holds poison until it has run.

        Not where an earlier copy still has to read it: that reader is not early, and must not be misled.
        """
        if not self._device.reads_host(self.allocations.of(target)):
            target.copy_(poisoned(tuple(target.shape), target.dtype))
        self._enqueue_copy(name, self._of_copy(target), self.pack(source), None)

    def _enqueue_copy(self, name: str, target: Any, source: Any, reads_host: object) -> None:
        work = Call(torch.Tensor.copy_, (target, source), {})
        self.enqueue(name, work, lambda: written([target]), reads_host=reads_host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        self.operations += 1
        return super()._copy(target, source, non_blocking)

    def _copy_blocking(self, target: torch.Tensor, source: torch.Tensor, to_device: bool, non_blocking: bool) -> None:
        self._synchronise("copy_")
        target.copy_(source)
        self._device.note(self._current(), "copy_", self._runtime.step)

    def _brought_to_host(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._synchronise(name)
        return self.keep(tensor.detach().to(dtype, copy=True), MemoryKind.HOST)

    def _new_on_device(self, like: torch.Tensor, dtype: torch.dtype, **layout: Any) -> torch.Tensor:
        return self.new(NewTensor.like(torch.empty_like(like, dtype=dtype, device=META, **layout)))

    # Kernels that torch does not see

    def enqueue_kernel(
        self,
        name: str,
        kernel: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        declared: Sequence[torch.Tensor],
    ) -> None:
        """Enqueues a raw kernel as a whole.

        Raises:
            ArgumentError: it declares nothing, or something that is not among its arguments.
            DeviceError: an argument lies in pageable host memory.
        """
        tensors = _tensors((*args, *kwargs.values()))
        for tensor in tensors:
            if tensor.ndim and self.kind_of(tensor) is MemoryKind.HOST:
                remedy = "bring it to the device first, with `Runtime.upload`, or use pinned memory"
                raise DeviceError(f"{name} of a host tensor {tuple(tensor.shape)}", tuple(tensor.shape), remedy)
        memory = [tensor.untyped_storage()._cdata for tensor in tensors]
        missing = any(tensor.untyped_storage()._cdata not in memory for tensor in declared)
        if missing or not declared:
            problem = f"the raw kernel {name!r} declares {'memory that it is not given' if missing else 'nothing'}"
            remedy = "pass each tensor as an argument and say `reads=` and `writes=`: it runs later, on its arguments"
            raise ArgumentError(problem, name, remedy)

        def pack(tensor: torch.Tensor) -> Any:
            return self._address(tensor) if self.kind_of(tensor) is MemoryKind.PINNED else self.pack(tensor)

        call_args = packed(args, pack)
        call_kwargs = {key: packed(value, pack) for key, value in kwargs.items()}
        pinned = next((tensor for tensor in tensors if self.kind_of(tensor) is MemoryKind.PINNED), None)
        reads_host = None if pinned is None else self.allocations.of(pinned)
        everything = (*call_args, *call_kwargs.values())
        self.enqueue(name, Call(kernel, call_args, call_kwargs), lambda: written(everything), reads_host=reads_host)


def _replaced(result: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A result with each tensor in it replaced."""
    if isinstance(result, torch.Tensor):
        return replacement(result)
    if isinstance(result, list | tuple):
        return type(result)(_replaced(part, replacement) for part in result)
    return result


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in one piece of CPU memory: neither sparse nor of another device."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def new_seed(generator: torch.Generator | None = None) -> int:
    """Drawn when an operation is enqueued: its random numbers must not depend on when it runs."""
    return int(torch.randint(1 << 62, (), generator=generator))


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors
