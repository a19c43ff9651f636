"""`HostValues`: numbers, comparisons and Python's protocols of a value that has a host side. None reads the device."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from batchstate._guidance import own_names, point_elsewhere, shown
from batchstate.errors import ArgumentError, DeclarationError, DeviceError, DtypeError, ShapeError

Array = npt.NDArray[Any]

_INSTEAD = {
    "cuda": "`.device` is the device side, uploaded where necessary",
    "to": "`.device` is the device side, `.host` and `.np` are the host side",
    "cpu": "`.host` is the host side as a tensor, `.np` as an array",
    "numpy": "`.np` is the host side as an array",
    "item": "`.tolist()` gives the host side as Python numbers",
    "data_ptr": "`.device.data_ptr()` is the address of the device side",
    "size": "`.shape` and `len(value)` give its size",
    "clone": "values are immutable: no copy is needed",
    "mean": "compute it on `.np`, the host side",
    "append": "`.merge(other)` returns a value with the rows of both",
    "free": "the pool that gave handles takes them back: `pool.free(slots, after=fence)`",
}
_IN_PLACE = (  # said of methods of torch that write, as `add_`
    "values are immutable: `+`, `-` and `.update(rows, values)` return a new one; a column changes with its batch: "
    "`batch = batch.advance(name, 1)`, `batch = batch.update(name, rows, values)`"
)


_INSTEAD |= {name: _IN_PLACE for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")}


class HostValues:
    """Base of `MirroredTensor`: reads of the host side, and refusals that say which side to use."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return own_names(type(self))

    @property
    def np(self) -> Array:
        """The host side as a read-only array."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """What it is, without its values."""
        raise NotImplementedError

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
        raise ArgumentError(
            f"the truth value of {self!r} is ambiguous",
            value=self.np.shape,
            remedy="use `len(value) > 0`, or `.any()`/`.all()` of a comparison",
        )

    # What a value of two sides does not do, and what to use instead

    def __getitem__(self, index: object) -> NoReturn:
        raise DeclarationError(
            f"{self.label} cannot be indexed: the result would have one side",
            value=index,
            remedy="`.np[...]` reads the host side, `.device[...]` the device side; `.take(rows)` and `.filter(mask)` "
            "select rows of both",
        )

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise DeclarationError(
            f"{self.label} is immutable: a write would reach one side",
            value=index,
            remedy="`.update(rows, values)` returns a value with those rows changed on both sides",
        )

    def _refuse_arithmetic(self, other: object) -> Any:
        if isinstance(other, np.ndarray | np.generic):
            return NotImplemented  # numpy reads the host side by itself
        raise DeclarationError(
            f"{self.label}: only `+` and `-` act on both sides",
            value=other,
            remedy="compute with `.np` to plan on the host, with `.device` for a kernel",
        )

    __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse_arithmetic

    def __rsub__(self, other: object) -> Any:
        if isinstance(other, np.ndarray | np.generic):
            return NotImplemented
        raise DeclarationError(
            f"{self.label}: a {type(self).__name__} cannot be subtracted from {shown(other)}",
            value=other,
            remedy=f"{shown(other)} - x.np on the host, {shown(other)} - x.device on the device",
        )

    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refuse_arithmetic
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = __lshift__ = __rshift__ = _refuse_arithmetic

    def _refuse_number(self) -> NoReturn:
        raise DeclarationError(
            f"{self.label} is not one number", value=self.label, remedy="`.np[row]` is the number of one row"
        )

    __int__ = __float__ = _refuse_number

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuses functions of torch: they would act on one side."""
        raise DeviceError(
            f"torch.{getattr(function, '__name__', function)}: expected a tensor, got a {cls.__name__}, "
            "which has two sides",
            value=cls.__name__,
            remedy="pass `.device` for the tensor on the device, `.host` for the one on the host",
        )

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        raise DeviceError(
            f"expected a tensor, got {self.label}, which has two sides",
            value=self.label,
            remedy="pass `.device` for the tensor on the device, `.host` for the one on the host",
        )

    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()


point_elsewhere(HostValues, _INSTEAD)


def _largest(values: Array) -> int:
    return max(int(values.max()), -int(values.min()))


def _compared(first: Array, other: object, operation: Callable[[Array, Any], Any]) -> Any:
    """Element by element.

    Raises:
        ShapeError, DtypeError: what does not compare with the host side.
    """
    second = other.np if isinstance(other, HostValues) else other
    try:
        return operation(first, second)
    except ValueError:
        raise ShapeError(
            f"comparison of {list(first.shape)} with values of another shape",
            value=other,
            remedy="pass one number, or as many",
        ) from None
    except TypeError:
        raise DtypeError(
            f"comparison of {first.dtype} with {type(other).__name__}", value=other, remedy="pass numbers"
        ) from None
