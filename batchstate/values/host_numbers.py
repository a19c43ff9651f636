"""Reading a mirrored value as numbers: always from the host side, so that nothing waits for the device."""

import abc
from typing import Any

import numpy as np

from batchstate.errors import ArgumentError
from batchstate.values.host_arrays import Array


class HostNumbers(abc.ABC):
    """Reductions and comparisons of a value with a host side `np`."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def np(self) -> Array:
        """The host side as a read-only array."""

    def sum(self) -> Any:
        """Sum of the host side (of the bounds, under `upper_bound`), as a Python number; integers never wrap."""
        values = self.np
        if values.dtype.kind in "iu" and values.size and _largest(values) * values.size >= 2**63:
            return sum(values.reshape(-1).tolist())
        return values.sum().item()

    def max(self) -> Any:
        """Maximum of the host side, as a Python number.

        Raises:
            ArgumentError: no rows.
        """
        return self._not_empty("max").max().item()

    def min(self) -> Any:
        """Minimum of the host side, as a Python number.

        Raises:
            ArgumentError: no rows.
        """
        return self._not_empty("min").min().item()

    def tolist(self) -> list[Any]:
        """The host side as Python numbers."""
        values: list[Any] = self.np.tolist()
        return values

    def _not_empty(self, operation: str) -> Array:
        values = self.np
        if not values.size:
            raise ArgumentError(f"{operation} of {self!r}", value=values.shape, remedy="ask `len(value)` before")
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.np, dtype=dtype) if copy or dtype is not None else self.np

    def __eq__(self, other: object) -> Any:
        return self.np == _numbers(other)

    def __ne__(self, other: object) -> Any:
        return self.np != _numbers(other)

    def __lt__(self, other: object) -> Any:
        return self.np < _numbers(other)

    def __le__(self, other: object) -> Any:
        return self.np <= _numbers(other)

    def __gt__(self, other: object) -> Any:
        return self.np > _numbers(other)

    def __ge__(self, other: object) -> Any:
        return self.np >= _numbers(other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ArgumentError(
            f"the truth of {self!r} is ambiguous",
            value=self.np.shape,
            remedy="use `len(value) > 0`, or `.any()`/`.all()` of a comparison",
        )


def _largest(values: Array) -> int:
    return max(int(values.max()), -int(values.min()))


def _numbers(other: object) -> Any:
    return other.np if isinstance(other, HostNumbers) else other
