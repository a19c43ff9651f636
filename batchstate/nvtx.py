"""NVTX ranges round the operations of a step, for Nsight Systems: off, unless `BATCHSTATE_NVTX=1` or `set_nvtx(True)`.

A range has the name of its operation, as `batchstate: Batch.upload`. Switching on replaces each method by a function
that opens a range, and switching off puts the methods back: while they are off, ranges cost nothing.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from batchstate.errors import ArgumentError

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "BATCHSTATE_NVTX"

_methods: dict[tuple[type, str], Any] = {}
"""Every method with a range, as it is in its class without one."""
_on = False


def ranges(*names: str) -> Callable[[T], T]:
    """A decorator of classes: the methods of these names get ranges while they are on."""

    def decorate(cls: T) -> T:
        for name in names:
            _methods[cls, name] = vars(cls)[name]  # type: ignore[index]
            if _on:
                _install(cls, name)
        return cls

    return decorate


def set_nvtx(on: bool) -> bool:
    """Switches the ranges on or off, for the whole process, and returns the setting before. Call it between steps.

    Raises:
        ArgumentError: this build of torch has no NVTX.
    """
    global _on
    if on:
        import torch

        try:
            with torch.cuda.nvtx.range("batchstate"):
                pass
        except RuntimeError as error:
            problem = f"expected a build of torch with NVTX, got torch {torch.__version__}: {error}"
            remedy = f"use a build of torch for CUDA, or unset {ENVIRONMENT_VARIABLE}"
            raise ArgumentError(problem, torch.__version__, remedy) from None
    before, _on = _on, on
    for (cls, name), method in _methods.items():
        if on:
            _install(cls, name)
        else:
            setattr(cls, name, method)
    return before


def _install(cls: Any, name: str) -> None:
    import torch

    method = _methods[cls, name]
    ranged = torch.cuda.nvtx.range(f"batchstate: {cls.__name__}.{name}")(getattr(method, "__func__", method))
    setattr(cls, name, classmethod(ranged) if isinstance(method, classmethod) else ranged)


if (_setting := os.environ.get(ENVIRONMENT_VARIABLE, "0")) not in ("0", "1"):
    problem = f"environment variable {ENVIRONMENT_VARIABLE}: expected 0 or 1, got {_setting!r}"
    raise ArgumentError(problem, _setting, "use 1 or 0")
set_nvtx(_setting == "1")
