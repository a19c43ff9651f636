"""Hypothesis strategies for what the library takes: dtypes, columns, keep lists, sizes, amounts, whole values.

Sizes are small on purpose: rows that collide find more bugs than rows that are many.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from batchstate.mirror import Contract
from batchstate.runtime import NUMPY_DTYPES, Runtime, numpy_dtype
from tests.selfcheck.models import Modelled, value_of

Array = npt.NDArray[Any]

MOST_ROWS = 6
"""Rows of a drawn value."""

_FLOATS = (0.0, -0.0, 1.0, -1.5, 0.5, 65504.0, float("inf"), float("-inf"), float("nan"))


def fits(values: Array, n: Any) -> bool:
    """Whether `values + n` stays within the dtype; `n` is one number, or one per row."""
    limits = np.iinfo(values.dtype)
    return all(int(limits.min) <= int(number) <= int(limits.max) for number in _exact(values, n).reshape(-1))


def plus(values: Array, n: Any) -> Array:
    """`values + n` in the dtype of `values`; wraps like a device where it does not fit."""
    bits = 8 * values.dtype.itemsize
    exact: Array = np.array([int(number) % 2**bits for number in _exact(values, n).reshape(-1)], dtype=f"u{bits // 8}")
    return exact.view(values.dtype).reshape(values.shape)


def _exact(values: Array, n: Any) -> Array:
    amount = np.asarray(n).astype(object)
    if amount.ndim:
        amount = amount.reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(np.asarray(values).astype(object) + amount, dtype=object)


def dtypes() -> SearchStrategy[torch.dtype]:
    """Dtypes that torch and numpy share."""
    return st.sampled_from([dtype for dtype, kind in NUMPY_DTYPES.items() if kind.kind in "biuf"])


def contracts(*among: str) -> SearchStrategy[Contract]:
    """Contracts: those named, or all."""
    return st.sampled_from([Contract(name) for name in among] or list(Contract))


def row_shapes() -> SearchStrategy[tuple[int, ...]]:
    """Trailing shapes of a column; mostly none."""
    return st.sampled_from([(), (), (2,), (1,), (2, 2), (0,)])


def column_values(dtype: torch.dtype, rows: int, shape: Sequence[int] = ()) -> SearchStrategy[Array]:
    """Arrays `[rows, *shape]` of `dtype`: small numbers, extremes, and for floats also zeros, infinities and NaN."""
    kind, size = numpy_dtype(dtype), (rows, *shape)
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


def keep_lists(n: int) -> SearchStrategy[Array | list[int] | list[bool]]:
    """Arguments of `filter`: masks, and unique row indices in any order; arrays of several dtypes, and lists."""
    masks = st.lists(st.booleans(), min_size=n, max_size=n)
    picks = st.permutations(range(n)).flatmap(lambda rows: st.integers(0, n).map(lambda most: rows[:most]))
    kinds = st.sampled_from([np.int64, np.int32, np.uint8])
    return st.one_of(
        masks.map(lambda mask: np.array(mask, dtype=np.bool_)),
        masks,
        picks,
        st.tuples(picks, kinds).map(lambda drawn: np.array(*drawn)),
    )


def row_lists(n: int) -> SearchStrategy[list[int]]:
    """Arguments of `take`: row indices that may repeat."""
    return st.lists(st.integers(0, n - 1), max_size=MOST_ROWS) if n else st.just([])


def split_sizes(n: int) -> SearchStrategy[list[int]]:
    """Sizes, zeros among them, that sum to `n`."""
    cuts = st.lists(st.integers(0, n), max_size=3).map(sorted)
    return cuts.map(lambda at: [stop - start for start, stop in zip([0, *at], [*at, n], strict=True)])


def amounts(n: int, least: int = -3, most: int = 3) -> SearchStrategy[int | Array]:
    """Arguments of `+`: one number, or int64[n]."""
    number = st.integers(least, most)
    rows = st.lists(number, min_size=n, max_size=n)
    return st.one_of(number, rows.map(lambda values: np.array(values, dtype=np.int64)))


@st.composite
def mirrored_tensors(
    draw: st.DrawFn,
    runtime: Runtime,
    dtypes: SearchStrategy[torch.dtype] = dtypes(),  # noqa: B008
    contracts: SearchStrategy[Contract] = contracts(),  # noqa: B008
    shapes: SearchStrategy[tuple[int, ...]] = row_shapes(),  # noqa: B008
) -> Modelled:
    """Values of any dtype, shape and contract, each with its numpy model; the device side made or not yet made."""
    contract, dtype = draw(contracts), draw(dtypes)
    if contract is Contract.UPPER_BOUND and numpy_dtype(dtype).kind not in "iu":
        dtype = torch.int64
    rows = draw(st.one_of(st.integers(1, MOST_ROWS), st.integers(0, MOST_ROWS)))
    device = draw(column_values(dtype, rows, draw(shapes)))
    host = device
    if contract is Contract.UPPER_BOUND:
        slack = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
        limit = np.iinfo(device.dtype).max
        room = np.minimum(np.array(slack, dtype=np.int64).reshape(-1, *[1] * (device.ndim - 1)), 2).astype(device.dtype)
        host = np.where(device > limit - room, device, device + room).astype(device.dtype)
    return value_of(runtime, host, device, contract, touch=draw(st.booleans()))
