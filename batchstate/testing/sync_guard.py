"""A window in which nothing may wait for the device but calls named for it.

On accelerators torch's own sync-debug mode raises, and most calls are already named by the tables below. On a CPU
device nothing ever waits, so calls that would wait elsewhere are recognised by name and by the memory they use: device
memory is all that the runtime allocated or launched, at any time, and all that was computed from it inside a window.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, final
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from batchstate import invariants
from batchstate.races.tracing.operations import isin_waits
from batchstate.runtime import Runtime
from batchstate.runtime.memory import KnownMemory
from batchstate.violations import Violation

__all__ = ["no_hidden_sync"]

_READS = {
    "__array__": "an array of it",
    "__bool__": "bool()",
    "__complex__": "complex()",
    "__contains__": "in",
    "__float__": "float()",
    "__format__": "format()",
    "__index__": "an index",
    "__int__": "int()",
    "__repr__": "repr()",
    "allclose": "allclose()",
    "cpu": ".cpu()",
    "equal": "equal()",
    "is_nonzero": "is_nonzero()",
    "item": ".item()",
    "numpy": ".numpy()",
    "tolist": ".tolist()",
}
"""Calls that bring numbers to the host, and how a report names them."""
_SIZES = frozenset(("argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"))
"""Calls whose result has a shape that only the device knows."""

_NEUTRAL = frozenset(
    ("__get__", "data_ptr", "is_contiguous", "is_inference", "numel", "size", "unbind", "untyped_storage", "view"),
)
"""Calls that read no element and make no memory: not worth a look."""


@contextlib.contextmanager
def no_hidden_sync(runtime: Runtime) -> Iterator[None]:
    """A window in which a hidden synchronisation raises. `resolve`, `read_back` and `synchronize` may wait.

    On a CPU device `.to("cpu")` counts as a copy to the host, whatever it is meant for. Memory that torch has computed
    from device memory before the first window, or between two, is not known there: open it round the whole loop.

    Args:
        runtime: the device.

    Raises:
        Violation: HIDDEN_SYNC: a device tensor was read by the host, or gave a shape that only the device knows.
    """
    with contextlib.ExitStack() as window:
        # Only where host and device tensors look alike must device memory be remembered.
        seen = runtime.known_memory() if runtime.device.type == "cpu" else None
        window.enter_context(_sync_debug_mode(runtime))
        window.enter_context(_seam_allowed(runtime))
        window.enter_context(_Guard(runtime, seen))
        yield


@final
class _Guard(TorchFunctionMode):
    def __init__(self, runtime: Runtime, seen: KnownMemory | None) -> None:
        super().__init__()
        self._runtime = runtime
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.__name__ in _NEUTRAL:
            return func(*args, **named)
        uses_device = any(self._on_device(tensor) for tensor in _tensors((args, named)))
        call = _waits(func.__name__, args, named, self._on_device) if uses_device else None
        if call is not None:
            invariants.hidden_sync(call, False, object=repr(self._runtime), step=self._runtime.step)
        result = func(*args, **named)
        if uses_device and self._seen is not None and func.__name__ != "copy_":
            for tensor in _tensors(result):
                self._seen.add(tensor)  # computed from device memory, so device memory
        return result

    def _on_device(self, tensor: torch.Tensor) -> bool:
        if self._seen is None:
            return tensor.device == self._runtime.device
        return tensor.device.type == "cpu" and tensor.numel() > 0 and tensor in self._seen


Runtime.remember_memory = True


def _waits(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: Callable[[torch.Tensor], bool]
) -> str | None:
    """The part of a call with a device tensor that makes the host wait, or None."""
    if name in _READS:
        return _READS[name]
    if name in _SIZES or (name == "where" and len(args) + len(kwargs) == 1):
        return f"{name}()"
    asynchronous = bool(kwargs.get("non_blocking", False))
    if name == "to" and not asynchronous and _is_host(args[1:], kwargs):
        return '.to("cpu")'
    if name == "copy_" and not asynchronous and not on_device(args[0]):
        return "copy_() into a host tensor"
    if name == "__getitem__" and _is_mask(args[1]):
        return "an index by a boolean mask"
    if name == "__setitem__" and _is_mask(args[1]) and isinstance(args[2], torch.Tensor) and args[2].ndim:
        return "an assignment through a boolean mask"
    if name == "repeat_interleave" and kwargs.get("output_size") is None and next(_tensors(args[1:]), None) is not None:
        return "repeat_interleave() without output_size"
    if name == "isin" and isin_waits(*args, **kwargs):
        return "isin() of many test elements"
    return None


def _is_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    wanted = kwargs.get("device", args[0] if args else None)
    return isinstance(wanted, str | torch.device) and torch.device(wanted).type == "cpu"


def _is_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(index))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextlib.contextmanager
def _seam_allowed(runtime: Runtime) -> Iterator[None]:
    """A runtime's own calls are not looked into; those that wait are named for it, and counted."""
    with contextlib.ExitStack() as patches:
        for name in ("_copied_to_device", "_copied_to_host", "_read_back"):
            patches.enter_context(mock.patch.object(runtime, name, _unguarded(getattr(runtime, name))))
        yield


def _unguarded(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run


@contextlib.contextmanager
def _sync_debug_mode(runtime: Runtime) -> Iterator[None]:
    """Torch's own mode, where the device has one; its error becomes a violation."""
    module = None if runtime.device.type == "cpu" else torch.get_device_module(runtime.device)
    if module is None or not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # Torch says once that the mode is a prototype: where warnings are errors, after it was set.
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype", category=UserWarning)
            module.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        module.set_sync_debug_mode(before)
        if isinstance(error, Violation) or "synchronizing" not in str(error):
            raise
        invariants.hidden_sync(str(error).splitlines()[0], False, object=repr(runtime), step=runtime.step)
    finally:
        module.set_sync_debug_mode(before)
