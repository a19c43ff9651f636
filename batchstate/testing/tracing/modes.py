"""Functions that stand for kernels: what they touch, torch does not see."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from batchstate.errors import DeviceError

# The two modes of torch through which a tool sees every operation.
#
# One is told of what torch dispatches. On a CPU that leaves out what brings numbers to the host without dispatching
# anything (`.cpu()`, `.tolist()`, `.numpy()`), of which the other is told.

HOST_CALLS = frozenset(("__array__", "cpu", "is_pinned", "numpy", "pin_memory", "record_stream", "to", "tolist"))
"""Calls of tensors that may bring numbers to the host, or say who else uses the memory."""

FACTORIES = frozenset(("__setitem__", "as_tensor", "asarray", "tensor"))
"""Calls that lift numbers to a tensor wherever `device=` says, or where the tensor is that they are written into.

What is lifted outside of them comes from numpy."""


class Watcher(Protocol):
    """What a tool does with what it is told."""

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: bool) -> Any:
        """An operation is called; returns its result. `lifted` says that a factory of `FACTORIES` is at work."""
        ...

    def host_call(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """A call of `HOST_CALLS`. Returns whether the tool has made it, and then its result."""
        ...


def _unwraps(kind: type) -> bool:
    """Whether a class of tensors handles operations itself, as quantised and distributed ones do."""
    own: Any = kind
    return own.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


@final
class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, watcher: Watcher, called: "_Called") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher
        self._called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        if types and any(_unwraps(one) for one in types):
            return NotImplemented  # it takes itself apart, and what is inside comes here
        with torch._C.DisableTorchFunction():
            if torch.is_inference_mode_enabled() and func._can_decompose():
                with self:  # torch takes it apart before, in any other mode: a `reshape` that copies is no view
                    return func.decompose(*args, **(kwargs or {}))
            return self._watcher.operation(func, args, kwargs or {}, self._called.lifting)


@final
class _Called(TorchFunctionMode):
    lifting = False

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        named = kwargs or {}
        name = func.__name__
        if name in HOST_CALLS and not (args and torch._C._functorch.is_functorch_wrapped_tensor(args[0])):
            done, result = self._watcher.host_call(name, func, args, named)
            return result if done else func(*args, **named)
        if name in FACTORIES:
            before, self.lifting = self.lifting, True
            try:
                return self._lifted(func, args, named)
            finally:
                self.lifting = before
        return func(*args, **named)

    def _lifted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A CPU has no memory to pin: there the tool makes a copy that counts as pinned."""
        if not kwargs.get("pin_memory") or torch.accelerator.is_available():
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "pin_memory": False})
        done, pinned = self._watcher.host_call("pin_memory", torch.Tensor.pin_memory, (result,), {})
        return pinned if done else result


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """A window in which `watcher` is told of every operation of this thread."""
    called = _Called(watcher)
    with called, _Dispatched(watcher, called):
        yield


# What torch refuses on an accelerator, refused where host and device tensors look alike.


def mixed_operands(operation: str, host: torch.Tensor) -> DeviceError:
    """The error of an operation of device tensors that is given a host tensor with dimensions."""
    return DeviceError(
        f"{operation} of device tensors and a host tensor {tuple(host.shape)}",
        value=tuple(host.shape),
        remedy="bring it to the device first, with `Runtime.upload`; on an accelerator torch refuses too",
    )


def array_of_device(call: str, tensor: torch.Tensor) -> DeviceError:
    """The error of a call that would give numpy the memory of a device tensor."""
    return DeviceError(
        f"{call} of a device tensor {tuple(tensor.shape)}",
        value=tuple(tensor.shape),
        remedy="use `Runtime.download` or `.cpu()`; on an accelerator torch refuses too",
    )


# Names of streams in reports, each once.


def unused_name(name: str, taken: Collection[str]) -> str:
    """The name itself, or with the first number from 2 on that makes it another than those that are taken."""
    numbered = (f"{name} {number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)


F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_batchstate_raw_kernel"


def raw_kernel(function: F) -> F:
    """Marks a function that stands for a kernel of its own, for `Runtime.launch`.

    Under the race detector it runs at once, and touches what the launch declares. On the simulated device it is
    enqueued as a whole and runs later. There and then each tensor among its arguments, also in lists and tuples, is a
    plain CPU tensor over the same memory: numpy may read and write it. What it returns is dropped on the simulated
    device, so it puts its results into its arguments. Elsewhere the mark means nothing.
    """
    setattr(function, _MARK, True)
    return function


def is_raw(function: object) -> bool:
    """Whether a function is marked."""
    return bool(getattr(function, _MARK, False))
