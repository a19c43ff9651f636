"""Functions that stand for kernels: what they touch, torch does not see."""

from collections.abc import Callable
from typing import Any, TypeVar

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
