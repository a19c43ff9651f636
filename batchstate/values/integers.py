"""Integer arithmetic that never wraps silently."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import ContractError, DtypeError, ShapeError, ValueOverflowError
from batchstate.values.host_arrays import Array, as_array, check_range

Amounts = npt.NDArray[np.int64]

_LIMITS = {
    np.dtype(f"{kind}{width}"): (int(np.iinfo(f"{kind}{width}").min), int(np.iinfo(f"{kind}{width}").max))
    for kind in "iu"
    for width in (1, 2, 4, 8)
}
"""The least and the most that a dtype holds."""


def amounts(n: object, num_rows: int, what: str) -> Amounts:
    """What is added to each row: int64[] for one number, int64[num_rows] for one a row.

    Raises:
        DtypeError: no integers (booleans are none).
        ShapeError: neither one number nor one a row.
        ValueOverflowError: outside int64.
    """
    if type(n) is int:  # what a decode step adds
        if not -(2**63) <= n < 2**63:
            check_range(n, n, np.dtype(np.int64), what)
        return np.array(n, dtype=np.int64)
    array = as_array(n, what)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{what}: {array.dtype} is no integer dtype", value=array.dtype, remedy="pass integers")
    if array.ndim and array.shape != (num_rows,):
        raise ShapeError(
            f"{what}: {list(array.shape)} amounts for {num_rows} rows",
            value=array.shape,
            remedy="pass one, or one a row",
        )
    if array.size and array.dtype.kind == "u":  # every signed dtype goes into int64
        check_range(0, int(array.max()), np.dtype(np.int64), what)
    return array.astype(np.int64)


def least(values: Array) -> int:
    """The smallest of some integers. Numpy finds its place four times as fast as its value."""
    return values.item(values.argmin())  # type: ignore[no-any-return]


def most(values: Array) -> int:
    """The largest of some integers."""
    return values.item(values.argmax())  # type: ignore[no-any-return]


def negated(amount: Amounts, what: str) -> Amounts:
    """`-amount`.

    Raises:
        ValueOverflowError: an amount is the least int64, whose negative does not fit.
    """
    if amount.size and int(amount.min()) == _LIMITS[np.dtype(np.int64)][0]:
        raise ValueOverflowError(
            f"{what}: {amount.min()} cannot be negated in int64",
            value=int(amount.min()),
            remedy="pass a smaller amount",
        )
    return np.negative(amount)


def across(amount: Amounts, ndim: int) -> Amounts:
    """`amount` shaped so that it broadcasts over the trailing shape of a column of `ndim` dimensions."""
    return amount.reshape(-1, *([1] * (ndim - 1))) if amount.ndim else amount


def shifted(values: Array, amount: Amounts, what: str) -> Array:
    """`values + amount` in the dtype of `values`, as a new array. Arguments and errors as `shift`."""
    result = values.copy()
    shift(result, amount, what)
    return result


def shift(values: Array, amount: Amounts, what: str) -> None:
    """Adds `amount` to `values` in place.

    Args:
        values: integers of any dtype, [n, ...], that nobody else has seen yet.
        amount: int64, broadcastable to `values`.
        what: the operation, for messages.

    Raises:
        ValueOverflowError: a sum lies outside the dtype. Nothing was changed.
    """
    if not values.size:
        return
    floor, ceiling = _LIMITS[values.dtype]
    if amount.ndim:
        down, up = least(amount), most(amount)
    else:
        down = up = amount.item()
    if (down < 0 and least(values) + down < floor) or (up > 0 and most(values) + up > ceiling):
        # The extremes need not be in one row: look at each row with Python's integers, which do not wrap.
        exact = values.astype(object) + np.broadcast_to(amount, values.shape).astype(object)
        wrong = np.asarray((exact < floor) | (exact > ceiling), dtype=np.bool_)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), values.shape)
            raise _overflow(what, int(at[0]), exact[at], values.dtype)
    # The cast of a negative amount to an unsigned dtype wraps, and so does the sum; for arrays numpy says nothing.
    np.add(values, amount if amount.dtype is values.dtype else amount.astype(values.dtype), values)


def _overflow(what: str, row: int, value: object, dtype: np.dtype[Any]) -> ValueOverflowError:
    limits = np.iinfo(dtype)
    return ValueOverflowError(
        f"{what}: row {row} would become {value}, outside {dtype} ({limits.min} to {limits.max})",
        value=value,
        remedy="use a wider dtype, or find out why the value is so large",
    )


def check_bound_can_move(dtype: torch.dtype, amount: Amounts, what: str) -> None:
    """Refuses to lower a bound whose device side, which is smaller by an unknown amount, could wrap below zero.

    Raises:
        ContractError: a negative amount and an unsigned dtype.
    """
    if not dtype.is_signed and amount.size and int(amount.min()) < 0:
        raise ContractError(
            f"{what}: {amount.min()} added to a bound of {dtype}, whose device side may be smaller than that",
            value=int(amount.min()),
            remedy="resolve it first, or declare the column signed",
        )
