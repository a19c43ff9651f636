"""Integer arithmetic as it should be: with Python's integers, which do not wrap."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def fits(values: Array, n: Any) -> bool:
    """Whether `values + n` stays within the dtype; `n` is one number, or one a row."""
    limits = np.iinfo(values.dtype)
    return all(int(limits.min) <= int(one) <= int(limits.max) for one in _exact(values, n).reshape(-1))


def plus(values: Array, n: Any) -> Array:
    """`values + n` in the dtype of `values`; wraps like a device where it does not fit."""
    bits = 8 * values.dtype.itemsize
    exact: Array = np.array([int(one) % 2**bits for one in _exact(values, n).reshape(-1)], dtype=f"u{bits // 8}")
    return exact.view(values.dtype).reshape(values.shape)


def _exact(values: Array, n: Any) -> Array:
    amount = np.asarray(n).astype(object)
    if amount.ndim:
        amount = amount.reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(np.asarray(values).astype(object) + amount, dtype=object)
