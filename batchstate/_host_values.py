"""`HostValues`: sums, comparisons and Python's protocols of a value that has a host side. None reads the device."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import ArgumentError, DeviceError, ShapeError

Array = npt.NDArray[Any]


class HostValues:
    """Base of `MirroredTensor`: reads of the host side."""

    __slots__ = ()

    @property
    def np(self) -> Array:
        """The host side as a read-only array."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Type, name, dtype and shape: the value in a report."""
        raise NotImplementedError

    def sum(self) -> Any:
        """Sum of the host side (of the bounds, under `upper_bound`), as a Python number; integers never wrap."""
        values = self.np
        if values.dtype.kind in "iu" and values.size and _largest(values) * values.size >= 2**63:
            return sum(values.reshape(-1).tolist())
        return values.sum().item()

    def max(self) -> Any:
        """Maximum of the host side, as a Python number. Raises `ArgumentError` if there are no rows."""
        return self._not_empty("max").max().item()

    def min(self) -> Any:
        """Minimum of the host side, as a Python number. Raises `ArgumentError` if there are no rows."""
        return self._not_empty("min").min().item()

    def tolist(self) -> list[Any]:
        """The host side as Python numbers."""
        values: list[Any] = self.np.tolist()
        return values

    def _not_empty(self, operation: str) -> Array:
        values = self.np
        if not values.size:
            raise ArgumentError(f"{operation} of {self!r}", values.shape, "ask `len(value)` before")
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.np, dtype=dtype) if copy or dtype is not None else self.np

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self.tolist()

    def __eq__(self, other: object) -> Any:
        return _compared(self.np, other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return _compared(self.np, other, operator.ne)

    def __lt__(self, other: object) -> Any:
        return _compared(self.np, other, operator.lt)

    def __le__(self, other: object) -> Any:
        return _compared(self.np, other, operator.le)

    def __gt__(self, other: object) -> Any:
        return _compared(self.np, other, operator.gt)

    def __ge__(self, other: object) -> Any:
        return _compared(self.np, other, operator.ge)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        problem = f"the truth value of {self!r} is ambiguous"
        raise ArgumentError(problem, self.np.shape, "use `len(value) > 0`, or `.any()`/`.all()` of a comparison")


def _largest(values: Array) -> int:
    return max(int(values.max()), -int(values.min()))


def _compared(first: Array, other: object, operation: Callable[[Array, Any], Any]) -> Any:
    if isinstance(other, torch.Tensor):  # numpy would leave it to Python, which compares identities
        remedy = "compare `value.np` with host values, or `value.device` with a tensor of the device"
        raise DeviceError("comparison: expected host values, got a tensor", tuple(other.shape), remedy)
    second = other.np if isinstance(other, HostValues) else other
    try:
        return operation(first, second)
    except ValueError:
        problem = f"comparison of {list(first.shape)} with values of another shape"
        raise ShapeError(problem, other, "pass one number, or as many") from None
