"""Which memory is `cuda:0`'s, and every operation of torch on it, by the word `device=` that the code itself says."""

import abc
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.races.tracing.dispatch import TracedCall, Tracer, untraced
from batchstate.races.tracing.memory import A, MemoryKind
from batchstate.races.tracing.operations import Operation, tensors_of

CUDA = torch.device("cuda", 0)
"""What the memory of the device answers as its `.device`."""

CPU = torch.device("cpu")


_is_cuda = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined]
_is_cpu = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class NotModelledError(ArgumentError, AttributeError):
    """The code under test calls something of CUDA that has no model here."""


def check_declared(device: torch.device) -> torch.device:
    """The device, if the window has it.

    Raises:
        RuntimeError: it was not declared.
    """
    if device.index not in (None, 0):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {device} was not declared; `cuda_on_cpu` has one device, {CUDA}"
        )
    return CUDA


def _is_of_torch(call: TracedCall, place: torch.device) -> bool:
    """Whether C++ of torch says that a result lies where an operand does, whose memory is the CPU's there.

    Such a call has the options of a tensor, with its layout; one of Python always says whether to pin as well.
    """
    return place.type == "cpu" and call.kwargs.get("layout") is not None and call.kwargs.get("pin_memory") is None


class CudaTracer(Tracer[A]):
    """The part of a tracer for code that names its devices: what is not `cuda` is the host's.

    Undecided is only what C++ of torch makes beside a tensor that it does not name (`one_hot`, backward passes).

    What becomes of an operation is up to the tool that it is mixed with. Pageable host memory is not kept in the books
    at all. Threads go one after the other, and are one host.

    Args:
        given: what the tool's own tracer takes.

    Attributes:
        lock: held by whichever thread is told of an operation.
        ended: whether the window is over; threads that go on run as if there had been none.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lock = threading.RLock()
        self.ended = False
        self._beside_a_gpu = torch.cuda.is_available()
        self._captures: dict[int, Any] = {}  # thread -> what it captures
        self._registered: dict[int, int] = {}  # where host memory that is pinned by its address begins -> its end

    # Memory

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies: what was not made on the device is the host's.

        Raises:
            ArgumentError: it lies on a real GPU: it was made outside of the window.
        """
        known = self.allocations.of(tensor)
        if known is not None and not (self._registered and known.kind is MemoryKind.HOST):
            return known.kind
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
            found = self.allocations.of(tensor)
        except (RuntimeError, NotImplementedError):  # without a storage: a wrapper of another library
            found = None
        if found is None and _is_wrapped(tensor):
            return self.on_device(torch._C._functorch.get_unwrapped(tensor))
        return found is not None and found.kind is MemoryKind.DEVICE

    def register(self, address: int, nbytes: int, flags: int = 0) -> int:
        """`cudaHostRegister`: host memory is pinned from now on; returns 0, for success."""
        self._registered[address] = address + nbytes
        return 0

    def unregister(self, address: int) -> int:
        """`cudaHostUnregister`; what was seen of the memory counts as pinned until it is gone."""
        self._registered.pop(address, None)
        return 0

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return any(first <= start < end for first, end in self._registered.items())

    # Operations

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], from_factory: bool) -> Any:
        """An operation is called; returns its result. `device=` says where its result lies."""
        __tracebackhide__ = True
        if self.ended:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.is_metadata:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and self.allocations.of(result) is None:
                with untraced():
                    pinned = self.allocations.pinned_at(result)
                return result if pinned is None else pinned
            return result
        tensors = tensors_of(args, kwargs)
        place = kwargs.get("device")
        if place is not None:
            if place.type not in ("cuda", "cpu"):
                return func(*args, **kwargs)
            if place.type == "cuda" and self.on_cpu:
                check_declared(place)
                kwargs = {**kwargs, "device": CPU}
        with self.lock:
            kinds: list[MemoryKind | None] = [self.kind_of(one) for one in tensors]
            return self._operation(TracedCall(operation, func, args, kwargs, tensors, kinds), place)

    def _operation(self, call: TracedCall, place: torch.device | None) -> Any:
        __tracebackhide__ = True
        operation, func, args, kwargs, tensors, kinds = call
        of_device = MemoryKind.DEVICE in kinds
        mixed = of_device and kinds.count(MemoryKind.DEVICE) < len(kinds)
        capturing = self._captures and self.capture is not None
        if place is not None and self.on_cpu and (of_device or not tensors) and _is_of_torch(call, place):
            if not tensors and not capturing:
                return self._on_host(call)
            place = CUDA if capturing else None
        to_device = of_device if place is None else place.type == "cuda"
        if MemoryKind.UNDECIDED in kinds:
            if not (of_device or to_device) and all(
                kind is MemoryKind.UNDECIDED or not one.ndim for one, kind in zip(tensors, kinds, strict=True)
            ):
                return self._on_host(call)
            for one, kind in zip(tensors, kinds, strict=True):
                if kind is MemoryKind.UNDECIDED and of_device:
                    self.use_on_device(one)
                elif kind is MemoryKind.UNDECIDED:
                    self._decide_for_host(one)
        if kwargs.get("pin_memory"):
            if to_device:
                raise RuntimeError(f"{operation.name}: only dense CPU tensors can be pinned, and device= says {place}")
            kwargs = {**kwargs, "pin_memory": False} if self.on_cpu else kwargs
            return self.keep(func(*args, **kwargs), MemoryKind.PINNED)
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
            return self.keep(result, MemoryKind.PINNED) if operation.name == "_pin_memory" else result
        if mixed:
            self._refuse_host_operands(call)
        result = self._on_device(call)
        if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
            raise NotImplementedError(
                f"cuda_on_cpu has no model of {result.layout} tensors on {CUDA} ({operation.name})"
            )
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
            return self._copy(self.keep(torch.empty_like(source, **made), MemoryKind.PINNED), source, True)
        return self._brought_to_host("to", source, made["dtype"])

    def _refuse_host_operands(self, call: TracedCall) -> None:
        try:
            super()._refuse_host_operands(call)
        except DeviceError as error:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {CUDA} and cpu! "
                f"({error.problem})"
            ) from None

    # Calls that torch does not dispatch

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `Tensor.pin_memory` returns."""
        with self.lock, untraced():
            kind = self.kind_of(tensor)
            if kind is MemoryKind.DEVICE:
                raise RuntimeError("cannot pin a tensor of cuda:0: only dense CPU tensors can be pinned")
            if kind is MemoryKind.PINNED:
                return tensor
            return self.keep(tensor.clone(), MemoryKind.PINNED)

    def to_list(self, tensor: torch.Tensor) -> Any:
        """What `Tensor.tolist` returns; the host waits for a tensor of the device."""
        with self.lock, untraced():
            kind = self.kind_of(tensor)
            if kind is MemoryKind.DEVICE:
                return self._brought_to_host("tolist", tensor, tensor.dtype).tolist()
            if kind is MemoryKind.PINNED:
                self._read_by_host(tensor, "tolist")
            return tensor.tolist()

    # Graphs

    @property
    def capture(self) -> Any:
        """What this thread captures, or None."""
        return self._captures.get(threading.get_ident()) if self._captures else None

    def begin_capture(self) -> Any:
        """What this thread launches from now on is recorded, and does not happen; returns the record."""
        capture = self._captures[threading.get_ident()] = self._new_capture()
        return capture

    def end_capture(self) -> None:
        """Ends the capture of this thread. What it recorded has changed nothing of older memory."""
        self._captures.pop(threading.get_ident(), None)

    @abc.abstractmethod
    def replay(self, capture: Any) -> None:
        """What a graph has recorded happens on the current stream."""

    @abc.abstractmethod
    def _new_capture(self) -> Any:
        """A record that is empty."""

    @abc.abstractmethod
    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        """Records an operation, or a copy between pinned memory and the device; returns its result."""

    def _check_capture(self, call: TracedCall, *, copies: bool) -> None:
        operation, _, args, kwargs, *_ = call
        if operation.waits(args, kwargs, self.kind_of):
            self.refuse_capture(f"{operation.name} waits for the device")
        if copies:
            source = args[1] if operation.name == "copy_" else args[0]
            pinned = all(self.kind_of(one) is not MemoryKind.HOST for one in (args[0], source))
            if operation.name == "_to_copy" or not pinned:
                self.refuse_capture("a copy from or to memory that is not pinned waits for the device")

    def refuse_capture(self, what: str) -> None:
        """Refuses what a stream that is captured does not permit.

        Raises:
            RuntimeError: this thread captures a graph.
        """
        if self.capture is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
