"""Integer arithmetic that never wraps silently."""

from typing import Any

import numpy as np
import numpy.typing as npt

from batchstate.errors import DtypeError, ShapeError, ValueOverflowError
from batchstate.host_arrays import Array, as_array, check_range

Amounts = npt.NDArray[np.int64]


def amounts(n: object, num_rows: int, what: str) -> Amounts:
    """What is added to each row: int64[] for one number, int64[num_rows] for one a row.

    Raises:
        DtypeError: no integers (booleans are none).
        ShapeError: neither one number nor one a row.
        ValueOverflowError: outside int64.
    """
    array = as_array(n, what)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{what}: {array.dtype} is no integer dtype", value=array.dtype, remedy="pass integers")
    if array.ndim and array.shape != (num_rows,):
        raise ShapeError(
            f"{what}: {list(array.shape)} amounts for {num_rows} rows",
            value=array.shape,
            remedy="pass one, or one a row",
        )
    if array.size:
        check_range(int(array.min()), int(array.max()), np.dtype(np.int64), what)
    return array.astype(np.int64)


def across(amount: Amounts, ndim: int) -> Amounts:
    """`amount` shaped so that it broadcasts over the trailing shape of a column of `ndim` dimensions."""
    return amount.reshape(-1, *([1] * (ndim - 1))) if amount.ndim else amount


def shifted(values: Array, amount: Amounts, what: str) -> Array:
    """`values + amount` in the dtype of `values`.

    Args:
        values: integers of any dtype, [n, ...].
        amount: int64, broadcastable to `values`.
        what: the operation, for messages.

    Raises:
        ValueOverflowError: a sum lies outside the dtype. Nothing was computed in place.
    """
    if not values.size:
        return values.copy()
    limits = np.iinfo(values.dtype)
    least = int(values.min()) + int(amount.min())
    most = int(values.max()) + int(amount.max())
    if least < limits.min or most > limits.max:
        # The extremes need not be in one row: look at each row with Python's integers, which do not wrap.
        exact = values.astype(object) + np.broadcast_to(amount, values.shape).astype(object)
        wrong = np.asarray((exact < int(limits.min)) | (exact > int(limits.max)), dtype=np.bool_)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), values.shape)
            raise _overflow(what, int(at[0]), exact[at], values.dtype)
    with np.errstate(over="ignore"):  # the cast of a negative amount to an unsigned dtype wraps, and so does the sum
        result: Array = values + amount.astype(values.dtype)
    return result


def _overflow(what: str, row: int, value: object, dtype: np.dtype[Any]) -> ValueOverflowError:
    limits = np.iinfo(dtype)
    return ValueOverflowError(
        f"{what}: row {row} would become {value}, outside {dtype} ({limits.min} to {limits.max})",
        value=value,
        remedy="use a wider dtype, or find out why the value is so large",
    )
