"""The memory of `cuda:0`, and every operation of torch on it, by the word `device=` in the code itself."""

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.races.tracing.dispatch import TracedCall, Tracer, untraced
from batchstate.races.tracing.memory import A, MemoryKind
from batchstate.races.tracing.operations import Awaits, Operation, tensors_of

CUDA = torch.device("cuda", 0)
"""The `.device` of tensors of the device."""

CPU = torch.device("cpu")


_is_cuda = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined]
_is_cpu = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class NotModelledError(ArgumentError, AttributeError):
    """The code under test calls a function of CUDA that has no model here."""

    @classmethod
    def of(cls, name: str, remedy: str) -> "NotModelledError":
        """The error of a name."""
        return cls(f"cuda_on_cpu has no model of {name}", name, remedy)


def check_declared(device: torch.device) -> torch.device:
    """The device, if the window has it.

    Raises:
        RuntimeError: it was not declared.
    """
    if device.index not in (None, 0):
        problem = f"{device} was not declared; `cuda_on_cpu` has one device, {CUDA}"
        raise RuntimeError(f"CUDA error: invalid device ordinal: {problem}")
    return CUDA


def _is_of_torch(call: TracedCall, device: torch.device) -> bool:
    """Whether C++ of torch puts a result beside an operand, whose memory is the CPU's there.

    Such a call has the options of a tensor, with its layout; a call from Python always has `pin_memory` as well.
    """
    return device.type == "cpu" and call.kwargs.get("layout") is not None and call.kwargs.get("pin_memory") is None


class CudaTracer(Tracer[A]):
    """The part of a tracer for code that names its devices: all memory but that of `cuda` is the host's.

    Undecided are only results that C++ of torch makes beside a tensor that it does not name (`one_hot`, backward
    passes).

    The tool that this is mixed with runs or enqueues the operations. Pageable host memory has no allocation. Threads go
    one after the other, and are one host.

    Args:
        arguments: of the tool's own tracer.

    Attributes:
        lock: held by the thread that runs an operation.
        resized: storage -> bytes that it says it has, where it has others.
        ended: whether the window is over; threads that go on run as if there had been none.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lock = threading.RLock()
        self.resized: dict[int, int] = {}
        self.ended = False
        self._beside_a_gpu = torch.cuda.is_available()
        self._captures: dict[int, Any] = {}  # thread -> its capture
        self._registered: dict[int, int] = {}  # host memory that is pinned by its address: begin -> end

    # Memory

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies: memory that was not made on the device is the host's.

        Raises:
            ArgumentError: it lies on a real GPU: it was made outside of the window.
        """
        allocation = self.allocations.of(tensor)
        if allocation is not None and not (self._registered and allocation.kind is MemoryKind.HOST):
            return allocation.kind
        if self._registered and _is_cpu(tensor) and self._is_registered(tensor):
            self.keep(tensor, MemoryKind.PINNED)
            return MemoryKind.PINNED
        if self._beside_a_gpu and _is_cuda(tensor):
            problem = f"a tensor {list(tensor.shape)} of the GPU of this machine, in a window of `cuda_on_cpu`"
            remedy = "make it inside of the window; `CUDA_VISIBLE_DEVICES=''` in front shows who makes it outside"
            raise ArgumentError(problem, None, remedy)
        return MemoryKind.HOST

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device. Cheap."""
        try:
            allocation = self.allocations.of(tensor)
        except (RuntimeError, NotImplementedError):  # without a storage: a wrapper of another library
            allocation = None
        if allocation is None and _is_wrapped(tensor):
            return self.on_device(torch._C._functorch.get_unwrapped(tensor))
        return allocation is not None and allocation.kind is MemoryKind.DEVICE

    def register(self, address: int, nbytes: int, flags: int = 0) -> int:
        """`cudaHostRegister`: host memory is pinned from now on; returns 0, for success."""
        self._registered[address] = address + nbytes
        return 0

    def unregister(self, address: int) -> int:
        """`cudaHostUnregister`; tensors of the memory that were seen count as pinned until they are gone."""
        self._registered.pop(address, None)
        return 0

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return any(first <= start < end for first, end in self._registered.items())

    # Operations

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], from_factory: bool) -> Any:
        """An operation is called; returns its result, which lies on the device of `device=`."""
        __tracebackhide__ = True
        if self.ended:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.is_metadata:
            result = func(*args, **kwargs)
            return self._lifted(result, from_factory) if operation.name == "lift_fresh" else result
        tensors = tensors_of(args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            if device.type not in ("cuda", "cpu"):
                return func(*args, **kwargs)
            if device.type == "cuda" and self.on_cpu:
                check_declared(device)
                kwargs = {**kwargs, "device": CPU}
        with self.lock:
            kinds: list[MemoryKind | None] = [self.kind_of(tensor) for tensor in tensors]
            return self._operation(TracedCall(operation, func, args, kwargs, tensors, kinds), device)

    def _lift(self, tensor: torch.Tensor, from_factory: bool) -> torch.Tensor:
        return tensor

    def _operation(self, call: TracedCall, device: torch.device | None) -> Any:
        __tracebackhide__ = True
        operation, func, args, kwargs, tensors, kinds = call
        of_device = MemoryKind.DEVICE in kinds
        mixed = of_device and kinds.count(MemoryKind.DEVICE) < len(kinds)
        capturing = self._captures and self.capture is not None
        if device is not None and self.on_cpu and (of_device or not tensors) and _is_of_torch(call, device):
            if not tensors and not capturing:
                return self._on_host(call)
            device = CUDA if capturing else None
        to_device = of_device if device is None else device.type == "cuda"
        if MemoryKind.UNDECIDED in kinds:
            if not (of_device or to_device) and all(
                kind is MemoryKind.UNDECIDED or not tensor.ndim for tensor, kind in zip(tensors, kinds, strict=True)
            ):
                return self._on_host(call)
            for tensor, kind in zip(tensors, kinds, strict=True):
                if kind is MemoryKind.UNDECIDED and of_device:
                    self.use_on_device(tensor)
                elif kind is MemoryKind.UNDECIDED:
                    self._decide_for_host(tensor)
        if kwargs.get("pin_memory"):
            if to_device:
                raise RuntimeError(f"{operation.name}: only dense CPU tensors can be pinned, and device= says {device}")
            kwargs = {**kwargs, "pin_memory": False} if self.on_cpu else kwargs
            return self.new_pinned(func(*args, **kwargs))
        crosses = operation.name == "copy_" and mixed and MemoryKind.UNDECIDED not in kinds
        moves = operation.name == "_to_copy" and of_device is not to_device
        if capturing and (of_device or to_device):
            self._check_capture(call, copies=crosses or moves)
            return self._captured(call, copies=crosses)
        if crosses:
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
        if moves:
            return self._moved(args[0], kwargs, to_device)
        if operation.name == "_foreach_copy_" and of_device:
            for target, source in zip(args[0], args[1], strict=True):
                self.operation(torch.ops.aten.copy_.default, (target, source, *args[2:]), kwargs, False)
            return None
        if not to_device:
            if MemoryKind.PINNED in kinds:
                self._host_uses_pinned(call)
            result = func(*args, **kwargs)
            return self.new_pinned(result) if operation.name == "_pin_memory" else result
        if mixed:
            self._refuse_host_operands(call)
        result = self._on_device(call)
        if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
            problem = f"cuda_on_cpu has no model of {result.layout} tensors on {CUDA}"
            raise NotImplementedError(f"{problem} ({operation.name})")
        return result

    def _moved(self, source: torch.Tensor, kwargs: Mapping[str, Any], to_device: bool) -> torch.Tensor:
        """`.to(...)` to the other side."""
        non_blocking = bool(kwargs.get("non_blocking", False))
        made: dict[str, Any] = {"dtype": kwargs.get("dtype") or source.dtype}
        if kwargs.get("memory_format") is not None:
            made["memory_format"] = kwargs["memory_format"]
        if to_device:
            return self._copy(self._new_on_device(source, **made), source, non_blocking)
        if non_blocking:  # lands in pinned memory of its own, as torch does
            return self._copy(self.new_pinned(torch.empty_like(source, **made)), source, True)
        return self._brought_to_host("to", source, made["dtype"])

    def _refuse_host_operands(self, call: TracedCall) -> None:
        try:
            super()._refuse_host_operands(call)
        except DeviceError as error:
            problem = "Expected all tensors to be on the same device, but found at least two devices"
            raise RuntimeError(f"{problem}, {CUDA} and cpu! ({error.problem})") from None

    # Calls that torch does not dispatch

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The result of `Tensor.pin_memory`."""
        with self.lock, untraced():
            kind = self.kind_of(tensor)
            if kind is MemoryKind.DEVICE:
                raise RuntimeError("cannot pin a tensor of cuda:0: only dense CPU tensors can be pinned")
            if kind is MemoryKind.PINNED:
                return tensor
            return self.new_pinned(tensor.clone())

    def to_list(self, tensor: torch.Tensor) -> Any:
        """The result of `Tensor.tolist`; the host waits for a tensor of the device."""
        with self.lock, untraced():
            kind = self.kind_of(tensor)
            if kind is MemoryKind.DEVICE:
                return self._brought_to_host("tolist", tensor, tensor.dtype).tolist()
            if kind is MemoryKind.PINNED:
                self._read_by_host(tensor, "tolist")
            return tensor.tolist()

    @abc.abstractmethod
    def resize(self, whole: torch.Tensor, nbytes: int, resize: Callable[[], object]) -> None:
        """`storage.resize_(nbytes)` of device memory, uint8[all of it]; `resize` does it on the CPU.

        The memory goes back to its stream, and the current stream allocates other memory.
        """

    def seen_by_numpy(self, array: Any) -> Any:
        """An array of pinned memory as the code gets it."""
        return array

    def read_by_numpy(self, array: Any, name: str) -> None:
        """An array of pinned memory is read where torch sees nothing."""

    # Graphs

    @property
    def capture(self) -> Any:
        """The capture of this thread, or None."""
        return self._captures.get(threading.get_ident()) if self._captures else None

    def begin_capture(self) -> Any:
        """Launches of this thread are recorded from now on, and do not happen; returns the record."""
        capture = self._captures[threading.get_ident()] = self._new_capture()
        return capture

    def end_capture(self) -> None:
        """Ends the capture of this thread, which has changed no older memory."""
        self._captures.pop(threading.get_ident(), None)

    @abc.abstractmethod
    def replay(self, capture: Any) -> None:
        """The operations of a graph happen on the current stream."""

    @abc.abstractmethod
    def _new_capture(self) -> Any:
        """A record that is empty."""

    @abc.abstractmethod
    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        """Records an operation, or a copy between pinned memory and the device; returns its result."""

    def _check_capture(self, call: TracedCall, *, copies: bool) -> None:
        operation, _, args, kwargs, *_ = call
        if operation.awaits(args, kwargs, self.kind_of) is not Awaits.NOTHING:
            self.refuse_capture(f"{operation.name} waits for the device")
        if copies:
            source = args[1] if operation.name == "copy_" else args[0]
            pinned = all(self.kind_of(tensor) is not MemoryKind.HOST for tensor in (args[0], source))
            if operation.name == "_to_copy" or not pinned:
                self.refuse_capture("a copy from or to memory that is not pinned waits for the device")

    def refuse_capture(self, operation: str) -> None:
        """Refuses an operation that is not permitted on a captured stream.

        Raises:
            RuntimeError: this thread captures a graph.
        """
        if self.capture is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {operation}")
