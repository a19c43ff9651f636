"""Hypothesis strategies for what the library takes: dtypes, columns, keep lists, sizes, amounts, whole values.

Sizes are small on purpose: rows that collide find more bugs than rows that are many. Every argument is checked when a
strategy is made, not when it is drawn from.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from batchstate._arrays import count
from batchstate.errors import ArgumentError
from batchstate.mirror import Contract
from batchstate.runtime import NUMPY_DTYPES, Runtime, numpy_dtype
from batchstate.testing.models import Modelled, value_of

__all__ = [
    "MOST_ROWS",
    "amounts",
    "column_values",
    "contracts",
    "dtypes",
    "keep_lists",
    "mirrored_tensors",
    "row_lists",
    "row_shapes",
    "split_sizes",
]

Array = npt.NDArray[Any]


def fits(values: Array, n: Any) -> bool:
    """Whether `values + n` stays within the dtype; `n` is one number, or one per row."""
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


MOST_ROWS = 6
"""Rows of a drawn value, unless said otherwise."""

_KINDS = "biuf"
_FLOATS = (0.0, -0.0, 1.0, -1.5, 0.5, 65504.0, float("inf"), float("-inf"), float("nan"))


def dtypes(kinds: str = _KINDS) -> SearchStrategy[torch.dtype]:
    """Dtypes that torch and numpy share.

    Args:
        kinds: any of `b` (booleans), `i` (signed), `u` (unsigned), `f` (floats).

    Raises:
        ArgumentError: no kind, or an unknown one.
    """
    if not kinds or set(kinds) - set(_KINDS):
        raise ArgumentError(f"dtypes: kinds {kinds!r}", kinds, f"use letters of {_KINDS!r}")
    return st.sampled_from([torch_one for torch_one, dtype in NUMPY_DTYPES.items() if dtype.kind in kinds])


def contracts(*among: str | Contract) -> SearchStrategy[Contract]:
    """Contracts: those named, or all.

    Raises:
        ArgumentError: an unknown name.
    """
    return st.sampled_from([Contract(one) for one in among] or list(Contract))


def row_shapes() -> SearchStrategy[tuple[int, ...]]:
    """Trailing shapes of a column; mostly none."""
    return st.sampled_from([(), (), (2,), (1,), (2, 2), (0,)])


def column_values(dtype: torch.dtype, rows: SupportsIndex, shape: Sequence[int] = ()) -> SearchStrategy[Array]:
    """Arrays `[rows, *shape]` of `dtype`: small numbers, extremes, and for floats also zeros, infinities and NaN.

    Raises:
        DtypeError: numpy lacks the dtype.
        ArgumentError: a negative size.
    """
    kind = numpy_dtype(dtype)
    size = (count(rows, "column_values: rows"), *(count(one, "column_values: shape") for one in shape))
    total = int(np.prod(size, dtype=np.int64))
    return st.lists(_elements(kind), min_size=total, max_size=total).map(
        lambda values: np.array(values, dtype=kind).reshape(size)
    )


def _elements(dtype: np.dtype[Any]) -> SearchStrategy[Any]:
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind == "f":
        return st.sampled_from(_FLOATS)
    limits = np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    return st.one_of(st.integers(max(least, -3), 9), st.sampled_from([least, most, most - 1, least + 1]))


def keep_lists(num_rows: SupportsIndex) -> SearchStrategy[Array | list[int] | list[bool]]:
    """What `filter` takes: masks, and unique row indices in any order; arrays of several dtypes, and lists.

    Raises:
        ArgumentError: a negative number of rows.
    """
    n = count(num_rows, "keep_lists: num_rows")
    masks = st.lists(st.booleans(), min_size=n, max_size=n)
    picks = st.permutations(range(n)).flatmap(lambda rows: st.integers(0, n).map(lambda most: rows[:most]))
    return st.one_of(
        masks.map(lambda mask: np.array(mask, dtype=np.bool_)),
        masks,
        picks,
        st.tuples(picks, st.sampled_from([np.int64, np.int32, np.uint8])).map(lambda one: np.array(one[0], one[1])),
    )


def row_lists(num_rows: SupportsIndex, most: SupportsIndex = MOST_ROWS) -> SearchStrategy[list[int]]:
    """What `take` takes: row indices that may repeat, at most `most`.

    Raises:
        ArgumentError: a negative number.
    """
    n, longest = count(num_rows, "row_lists: num_rows"), count(most, "row_lists: most")
    return st.lists(st.integers(0, n - 1), max_size=longest) if n else st.just([])


def split_sizes(num_rows: SupportsIndex) -> SearchStrategy[list[int]]:
    """Sizes, zeros among them, that sum to `num_rows`.

    Raises:
        ArgumentError: a negative number of rows.
    """
    n = count(num_rows, "split_sizes: num_rows")
    cuts = st.lists(st.integers(0, n), max_size=3).map(sorted)
    return cuts.map(lambda at: [stop - start for start, stop in zip([0, *at], [*at, n], strict=True)])


def amounts(num_rows: SupportsIndex, least: int = -3, most: int = 3) -> SearchStrategy[int | Array]:
    """What `+` takes: one number, or int64[num_rows].

    Raises:
        ArgumentError: a negative number of rows, or `least` above `most`.
    """
    n = count(num_rows, "amounts: num_rows")
    if least > most:
        raise ArgumentError(f"amounts: from {least} to {most}", least, "pass least <= most")
    one = st.integers(least, most)
    return st.one_of(one, st.lists(one, min_size=n, max_size=n).map(lambda values: np.array(values, dtype=np.int64)))


@st.composite
def mirrored_tensors(
    draw: st.DrawFn,
    runtime: Runtime,
    *,
    dtypes: SearchStrategy[torch.dtype] | None = None,
    contracts: SearchStrategy[Contract] | None = None,
    shapes: SearchStrategy[tuple[int, ...]] | None = None,
    most_rows: int = MOST_ROWS,
) -> Modelled:
    """Values of any dtype, shape and contract, each with its numpy model; the device side made or not yet made.

    Args:
        draw: Hypothesis passes it.
        runtime: the device.
        dtypes: of the values; any by default. Bounds are integers whatever it says.
        contracts: of the values; any by default.
        shapes: of one row; any by default.
        most_rows: of a value.
    """
    contract = draw(_all_contracts if contracts is None else contracts)
    dtype = draw(_all_dtypes if dtypes is None else dtypes)
    if contract is Contract.UPPER_BOUND and numpy_dtype(dtype).kind not in "iu":
        dtype = torch.int64
    rows = draw(st.one_of(st.integers(min(1, most_rows), most_rows), st.integers(0, most_rows)))
    device = draw(column_values(dtype, rows, draw(row_shapes() if shapes is None else shapes)))
    host = device
    if contract is Contract.UPPER_BOUND:
        slack = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
        limit = np.iinfo(device.dtype).max
        room = np.minimum(np.array(slack, dtype=np.int64).reshape(-1, *[1] * (device.ndim - 1)), 2).astype(device.dtype)
        host = np.where(device > limit - room, device, device + room).astype(device.dtype)
    return value_of(runtime, host, device, contract, touch=draw(st.booleans()))


_all_contracts = contracts()
_all_dtypes = dtypes()
