"""Every operation of torch, told to a tool by the two modes that torch has for that.

One mode is told of operations that torch dispatches. On a CPU some calls bring numbers to the host without dispatching
anything (`.cpu()`, `.tolist()`, `.numpy()`); the other mode is told of these.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchstate.errors import ArgumentError, DeviceError
from batchstate.races.tracing.memory import HOST_KINDS, A, Allocations, MemoryKind
from batchstate.races.tracing.operations import Operation, tensors_in, tensors_of

HOST_CALLS = frozenset(("__array__", "cpu", "is_pinned", "numpy", "pin_memory", "record_stream", "to", "tolist"))
"""Calls of tensors that may bring numbers to the host, or tell who else uses the memory."""

FACTORIES = frozenset(("as_tensor", "asarray", "tensor"))
"""Calls that lift numbers to a tensor on the device of `device=`.

Numbers lifted outside of them are the host's: they come from numpy, or are put into a tensor."""


class TracedCall(NamedTuple):
    """A call of one operation, all tensors among its arguments, and where each lies."""

    operation: Operation
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[torch.Tensor]
    kinds: list[MemoryKind | None]


class Tracer(abc.ABC, Generic[A]):
    """Sorts operations of torch: metadata, the host's, the device's, or a copy between the two.

    An operation with an operand on the device is the device's, and runs on the current stream. Others are the host's;
    their results on a CPU belong to either side, as later operations show. On a CPU a `torch.device` names the device,
    as `Runtime.device` gives it, and the word "cpu" names the host.

    Args:
        device: of the runtime.
        died: called with a piece of memory as soon as the last tensor of it is gone.

    Attributes:
        on_cpu: whether host and device memory look alike.
        allocations: all memory that was seen.
        pageable_copies: copies to the device that were asked not to block, from memory that a factory made.
    """

    def __init__(self, device: torch.device, died: Callable[[A], None]) -> None:
        self.device = device
        self.on_cpu = device.type == "cpu"
        self.allocations: Allocations[A] = Allocations(died)
        self.pageable_copies = 0

    # Called by torch

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], from_factory: bool) -> Any:
        """An operation is called inside one of `FACTORIES` or not; returns its result."""
        __tracebackhide__ = True
        operation = Operation.of(func)
        if operation.is_metadata:
            result = func(*args, **kwargs)
            return self._lifted(result, from_factory) if operation.name == "lift_fresh" else result
        tensors = tensors_of(args, kwargs)
        copies, non_blocking = operation.name == "copy_", False
        if copies:
            non_blocking = bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
            if non_blocking:
                self._decide(args[0], args[1])
        if self.on_cpu and kwargs.get("pin_memory"):
            return self.new_pinned(func(*args, **{**kwargs, "pin_memory": False}))
        call = TracedCall(operation, func, args, kwargs, tensors, [self.kind_of(tensor) for tensor in tensors])
        if MemoryKind.DEVICE not in call.kinds:
            return self._on_host(call)
        if copies and (MemoryKind.HOST in call.kinds or MemoryKind.PINNED in call.kinds):
            return self._copy(args[0], args[1], non_blocking)
        if self.on_cpu:
            self._refuse_host_operands(call)
        return self._on_device(call)

    def host_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """A call of `HOST_CALLS`. Returns whether the tool has made it, and then its result.

        Raises:
            ArgumentError, DeviceError: on an accelerator torch refuses it.
        """
        if not args or not isinstance(args[0], torch.Tensor):
            return False, None
        tensor, args = args[0], args[1:]
        with untraced():
            if name == "record_stream":
                self._record_stream(tensor, args[0])
                return self.on_cpu, None
            if not self.on_cpu:
                return False, None  # there all of these calls dispatch their operations
            kind = self.kind_of(tensor)
            if name == "is_pinned":
                return True, kind is MemoryKind.PINNED
            if name == "pin_memory":
                if kind is MemoryKind.DEVICE:
                    raise ArgumentError("pin_memory of a device tensor", None, "only host memory can be pinned")
                return True, self.new_pinned(tensor.clone())
            named = kwargs.get("device", args[0] if args else None)
            dtype = kwargs.get("dtype", next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype))
            non_blocking = bool(kwargs.get("non_blocking", next((arg for arg in args if isinstance(arg, bool)), False)))
            lifted = name == "to" and non_blocking and kind is MemoryKind.UNDECIDED
            if lifted and isinstance(named, torch.device) and named == self.device:
                self._decide_for_host(tensor)
                kind = MemoryKind.HOST
            if kind is not MemoryKind.DEVICE:
                if name == "to" and kind in HOST_KINDS and isinstance(named, torch.device) and named == self.device:
                    return True, self._copy(self._new_on_device(tensor, dtype), tensor, non_blocking)
                if name == "tolist" and kind is MemoryKind.PINNED:
                    self._read_by_host(tensor, name)
                return False, None
            if name in ("numpy", "__array__"):
                remedy = "use `Runtime.download` or `.cpu()`; on an accelerator torch refuses too"
                raise DeviceError(f"{name} of a device tensor {tuple(tensor.shape)}", tuple(tensor.shape), remedy)
            if name == "to" and named != "cpu":
                return False, None
            if name == "to" and non_blocking:
                result = self.new_pinned(torch.empty_like(tensor, dtype=dtype))  # as torch does
                self._copy(result, tensor, non_blocking)
                return True, result
            values = self._brought_to_host(name, tensor, dtype)
            return True, values.tolist() if name == "tolist" else values

    # Memory

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind | None:
        """Where a tensor lies; None for memory of a CPU that was not seen yet."""
        if not self.on_cpu and tensor.device.type != "cpu":
            return MemoryKind.DEVICE
        allocation = self.allocations.of(tensor)
        if allocation is None:
            return None if self.on_cpu else MemoryKind.HOST
        return allocation.kind

    def use_on_device(self, tensor: torch.Tensor) -> A:
        """The memory of a tensor that the device accesses: unseen or undecided memory becomes the device's."""
        allocation = self.allocations.of(tensor)
        if allocation is None:
            return self.allocations.add(tensor, self._existing(tensor))
        if allocation.kind is MemoryKind.UNDECIDED:
            allocation.kind = MemoryKind.DEVICE
            self._decided(allocation)
        return allocation

    def _lifted(self, result: torch.Tensor, from_factory: bool) -> torch.Tensor:
        """The tensor of lifted numbers, or the part of pinned memory that they lie in."""
        if self.allocations.of(result) is not None or result.device.type != "cpu":
            return result
        with untraced():
            pinned = self.allocations.pinned_at(result)
        if pinned is not None:
            return pinned
        return self._lift(result, from_factory) if self.on_cpu else result

    def _decide(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`copy_` was asked not to block, senseless within one memory: an undecided side is the other's.

        An undecided source that is copied to the device lies in pageable host memory, as `torch.tensor(...)` does.
        """
        for tensor, other in ((target, source), (source, target)):
            if self.kind_of(tensor) is MemoryKind.UNDECIDED and self.kind_of(other) in HOST_KINDS:
                self.use_on_device(tensor)
        if self.kind_of(source) is MemoryKind.UNDECIDED and self.kind_of(target) is MemoryKind.DEVICE:
            self._decide_for_host(source)

    def _decide_for_host(self, tensor: torch.Tensor) -> None:
        """Undecided memory is the host's after all; a copy from it is counted."""
        allocation = self.allocations.of(tensor)
        if allocation is not None and allocation.kind is MemoryKind.UNDECIDED:
            allocation.kind = MemoryKind.HOST
            self.pageable_copies += 1

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """`copy_` across. Without `non_blocking`, or with memory that is not pinned, the host waits."""
        to_device = self.kind_of(target) is MemoryKind.DEVICE
        if not (non_blocking and self._is_pinned(source if to_device else target)):
            self._copy_blocking(target, source, to_device, non_blocking)
        elif to_device:
            self._copy_to_device(target, source)
        else:
            self._copy_to_host(target, source)
        return target

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.kind_of(tensor) is MemoryKind.PINNED

    def _refuse_host_operands(self, call: TracedCall) -> None:
        """Refuses operands that torch refuses on an accelerator."""
        host = [tensor for tensor, kind in zip(call.tensors, call.kinds, strict=True) if kind in HOST_KINDS]
        indices = list(tensors_in(call.args[1])) if host and call.operation.takes_host_index else []
        for tensor in host:
            if tensor.ndim and not any(tensor is index for index in indices):
                problem = f"{call.operation.name} of device tensors and a host tensor {tuple(tensor.shape)}"
                remedy = "bring it to the device first, with `Runtime.upload`; on an accelerator torch refuses too"
                raise DeviceError(problem, tuple(tensor.shape), remedy)

    # Left to the tool

    @abc.abstractmethod
    def keep(self, tensor: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
        """Notes whose memory a new tensor is, and returns the tensor."""

    def new_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """New pinned memory that holds a new tensor; returns the tensor there."""
        return self.keep(tensor, MemoryKind.PINNED)

    @abc.abstractmethod
    def _existing(self, tensor: torch.Tensor) -> A:
        """Device memory that was there before the window."""

    @abc.abstractmethod
    def _decided(self, allocation: A) -> None:
        """Memory that was undecided is the device's."""

    @abc.abstractmethod
    def _lift(self, tensor: torch.Tensor, from_factory: bool) -> torch.Tensor:
        """Numbers have become a tensor: by a factory, or from numpy."""

    @abc.abstractmethod
    def _on_device(self, call: TracedCall) -> Any:
        """Runs or enqueues an operation of the device; returns its result."""

    @abc.abstractmethod
    def _on_host(self, call: TracedCall) -> Any:
        """Runs an operation of the host, or of undecided memory; returns its result."""

    @abc.abstractmethod
    def _new_on_device(self, like: torch.Tensor, dtype: torch.dtype, **layout: Any) -> torch.Tensor:
        """New device memory of the current stream; `layout` goes to `torch.empty_like`."""

    @abc.abstractmethod
    def _copy_blocking(self, target: torch.Tensor, source: torch.Tensor, to_device: bool, non_blocking: bool) -> None:
        """A copy that the host waits for."""

    @abc.abstractmethod
    def _copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy of pinned memory that the host does not wait for."""

    @abc.abstractmethod
    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy into pinned memory that the host does not wait for."""

    @abc.abstractmethod
    def _brought_to_host(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of a device tensor in new host memory; the host waits for them."""

    @abc.abstractmethod
    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """The memory is kept until a stream, of the library or of torch, has run all that it has by then."""

    def _read_by_host(self, tensor: torch.Tensor, name: str) -> None:
        """The host reads pinned memory."""

    def _host_uses_pinned(self, call: TracedCall) -> None:
        """The host is about to run an operation with pinned memory among its operands."""


def _unwraps(kind: type) -> bool:
    """Whether a class of tensors handles operations itself, as quantised and distributed ones do."""
    own: Any = kind
    return own.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


@final
class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, tracer: Tracer[Any], called: "_Called | None" = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._called = called

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call goes through a wrapper of torch's that takes longer than a small operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        if types and any(map(_unwraps, types)):
            return NotImplemented  # it takes itself apart, and its parts come here
        with torch._C.DisableTorchFunction():
            if torch.is_inference_mode_enabled() and func._can_decompose():
                with self:  # torch takes it apart before, in any other mode: a `reshape` that copies is not a view
                    return func.decompose(*args, **(kwargs or {}))
            factory = self._called is not None and self._called.in_factory
            return self._tracer.operation(func, args, kwargs or {}, factory)


@final
class _Called(TorchFunctionMode):
    in_factory = False

    def __init__(self, tracer: Tracer[Any]) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        named = kwargs or {}
        name = func.__name__
        if name in HOST_CALLS and not (args and torch._C._functorch.is_functorch_wrapped_tensor(args[0])):
            done, result = self._tracer.host_call(name, args, named)
            return result if done else func(*args, **named)
        if name in FACTORIES:
            before, self.in_factory = self.in_factory, True
            try:
                return self._lifted(func, args, named)
            finally:
                self.in_factory = before
        return func(*args, **named)

    def _lifted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A CPU has no memory to pin: there the tool makes a copy that counts as pinned."""
        if not kwargs.get("pin_memory") or not self._tracer.on_cpu:
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "pin_memory": False})
        done, pinned = self._tracer.host_call("pin_memory", (result,), {})
        return pinned if done else result


@contextlib.contextmanager
def tracing(tracer: Tracer[Any]) -> Iterator[None]:
    """A window in which `tracer` is told of every operation of this thread."""
    called = _Called(tracer)
    with called, _Dispatched(tracer, called):
        yield


def dispatching(tracer: Tracer[Any]) -> contextlib.AbstractContextManager[Any]:
    """A window in which `tracer` is told of operations that torch dispatches in this thread, and of no other call."""
    return _Dispatched(tracer)


@final
class untraced:  # noqa: N801 - used as a function is
    """A window in which operations are the tool's own."""

    __slots__ = ("_calls", "_dispatch")

    def __enter__(self) -> None:
        c: Any = torch._C
        self._calls, self._dispatch = c.DisableTorchFunction(), c._DisableTorchDispatch()
        self._calls.__enter__()
        self._dispatch.__enter__()

    def __exit__(self, *error: object) -> None:
        self._dispatch.__exit__(*error)
        self._calls.__exit__(*error)


F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_batchstate_raw_kernel"


def raw_kernel(function: F) -> F:
    """Marks a function that stands for a kernel of its own, for `Runtime.launch`.

    Under the race detector it runs at once, with the accesses that the launch declares. On the simulated device it is
    enqueued as a whole and runs later. There and then each tensor among its arguments, also in lists and tuples, is a
    plain CPU tensor over the same memory: numpy may read and write it. Its return value is dropped on the simulated
    device, so it puts its results into its arguments. Elsewhere the mark means nothing.
    """
    setattr(function, _MARK, True)
    return function


def is_raw(function: object) -> bool:
    """Whether a function is marked."""
    return bool(getattr(function, _MARK, False))
