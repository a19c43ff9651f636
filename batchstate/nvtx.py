"""NVTX ranges round the operations of a step, for Nsight Systems: off, unless `BATCHSTATE_NVTX=1` or `set_nvtx(True)`.

A range has the name of its operation, as `batchstate: Batch.upload`. Switching on puts a function that opens a range in
the place of each method, and switching off puts the methods back: what is off costs nothing.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from batchstate.errors import ArgumentError

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "BATCHSTATE_NVTX"

_methods: dict[tuple[type, str], Any] = {}
"""Every method with a range, as it is in its class without one."""
_on = os.environ.get(ENVIRONMENT_VARIABLE, "0")


def ranges(*names: str) -> Callable[[T], T]:
    """A decorator of classes: the methods of these names get ranges while they are on."""

    def decorate(cls: T) -> T:
        for name in names:
            _methods[cls, name] = vars(cls)[name]  # type: ignore[index]
            if _on == "1":
                _install(cls, name)
        return cls

    return decorate


def set_nvtx(on: bool) -> bool:
    """Switches the ranges on or off, for the whole process, and returns what was before. Call it between steps.

    Raises:
        ArgumentError: `on` is neither True nor False, or this build of torch has no NVTX.
    """
    global _on
    if type(on) is not bool:
        raise ArgumentError(f"set_nvtx: expected True or False, got {on!r}", on, "pass True to switch on")
    before = _on == "1"
    if on:
        _check_available()
    _on = "1" if on else "0"
    for (cls, name), method in _methods.items():
        if on:
            _install(cls, name)
        else:
            setattr(cls, name, method)
    return before


def _install(cls: Any, name: str) -> None:
    import torch

    method = _methods[cls, name]
    function: Callable[..., Any] = getattr(method, "__func__", method)
    label = f"batchstate: {cls.__name__}.{name}"
    nvtx: Any = torch.cuda.nvtx

    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        nvtx.range_push(label)
        try:
            return function(*args, **kwargs)
        finally:
            nvtx.range_pop()

    setattr(cls, name, classmethod(ranged) if isinstance(method, classmethod) else ranged)


def _check_available() -> None:
    import torch

    nvtx: Any = torch.cuda.nvtx
    try:
        nvtx.range_push("batchstate")
        nvtx.range_pop()
    except RuntimeError as error:
        problem = f"expected a build of torch with NVTX, got torch {torch.__version__}: {error}"
        remedy = f"use a build of torch for CUDA, or unset {ENVIRONMENT_VARIABLE}"
        raise ArgumentError(problem, torch.__version__, remedy) from None


if _on not in ("0", "1"):
    raise ArgumentError(f"environment variable {ENVIRONMENT_VARIABLE}: expected 0 or 1, got {_on!r}", _on, "use 1 or 0")
if _on == "1":
    _check_available()
