"""`TokenArray`: one value for each token that a forward puts in, as the host knows it; ids of prompts are one."""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import UNORDERED, Array, Ints, carried, padding_row, shape_of
from batchstate.errors import DtypeError, ShapeError, expected
from batchstate.mirror import MirroredTensor
from batchstate.runtime.memory import bits_dtype, host_dtype, numpy_dtype
from batchstate.violations import Where


@final
@attrs.frozen(eq=False, repr=False)
class TokenArray:
    """Values of the tokens that requests put in: token types, encoder ids, multimodal positions.

    It goes the way that prompt ids go: laid out request by request, and uploaded at forward entry, on its stream.

    Args:
        rows: for each request its values `[query_len, *shape]`, or None where all of them are `fill`; None for all.
        dtype: of the values. Those of bfloat16 and float8, which numpy lacks, are bits, integers of their size.
        shape: of the value of one token.
        fill: the value of the tokens of other requests, and of padding; zero of the dtype by default.
        non_negative: -1 among the values is a placeholder that has escaped (`SENTINEL_ESCAPED`, at `cheap`).

    Raises:
        DtypeError: a dtype that does not cross, or one that numpy lacks with `non_negative`.
        ShapeError, DtypeError, ArgumentError: `shape` is not a tuple or list of counts.
        ShapeError, DtypeError, ValueOverflowError: a fill that is not one number of the dtype.
    """

    rows: Sequence[object] | None
    dtype: torch.dtype = torch.int64
    shape: tuple[int, ...] = ()
    fill: float | None = None
    non_negative: bool = False

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.shape, "TokenArray"))
        if self.non_negative:
            numpy_dtype(self.dtype)
        if padding_row(self.fill, *host_dtype(self.dtype), "TokenArray: fill").ndim:
            raise ShapeError(f"TokenArray: fill is {self.fill!r}", self.fill, "pass one number")

    def __repr__(self) -> str:
        return f"TokenArray({self.dtype}, shape={self.shape})"

    def laid(self, query_lens: Ints, num_rows: int, size: int, where: Where) -> Array:
        """The values of all tokens, request by request, and `fill` elsewhere: dtype `[size, *shape]`.

        Raises as `values_of`, and SENTINEL_ESCAPED, at `cheap`, for placeholders among values that are never negative.
        """
        subject = f"{where['object']}: {where['column']}"
        arrays = values_of(self.rows, self.dtype, self.shape, query_lens, num_rows, subject)
        fill = padding_row(self.fill, *host_dtype(self.dtype), "TokenArray: fill")
        laid: Array = np.full((size, *self.shape), fill, dtype=bits_dtype(self.dtype))
        if parts := [values for values in arrays if values is not None]:
            there = np.repeat([values is not None for values in arrays], query_lens)
            laid[: there.size][there] = np.concatenate(parts)
        if self.non_negative and levels.cheap:
            least = laid.min(axis=tuple(range(1, laid.ndim)), initial=0) if self.shape else laid
            invariants.sentinel_escaped(least, **where)
        return laid


def values_of(
    rows: Sequence[object] | None,
    torch_dtype: torch.dtype,
    shape: tuple[int, ...],
    query_lens: Ints,
    num_rows: int,
    subject: str,
) -> list[Array | None]:
    """The values of each request, dtype `[query_len, *shape]`; None where it has none.

    Entries of padded rows among the `num_rows` are dropped. Raises `ShapeError` unless there is an entry per
    request and a value per token, `DtypeError` and `ValueOverflowError` for other values.
    """
    num_reqs, (dtype, bits_of) = len(query_lens), host_dtype(torch_dtype)
    if rows is None:
        return [None] * num_reqs
    remedy = "pass a list with the values of each request, and None for those that have none here"
    if isinstance(rows, (MirroredTensor, *UNORDERED)):  # the host side may be bounds
        raise expected(subject, "a list", rows, remedy, DtypeError)
    if len(rows) not in (num_reqs, num_rows):
        raise ShapeError(f"{subject} of {len(rows)} for {num_reqs} requests", len(rows), remedy)
    arrays: list[Array | None] = [None] * num_reqs
    for row, (values, query) in enumerate(zip(rows, query_lens.tolist(), strict=False)):
        if values is None:
            continue
        if type(values) is np.ndarray and values.dtype is dtype and values.shape == (query, *shape):
            arrays[row] = values  # it is copied when it is laid out
            continue
        array: Array = carried(values, dtype, bits_of, f"{subject} of row {row}")
        if array.shape == (0,) and shape:
            array = np.empty((0, *shape), dtype)  # an empty list knows no shape of a token
        if array.ndim == 0 or array.shape[1:] != shape:
            wanted = f"{query} values {list(shape)}" if shape else f"{query}"
            got = f"the number {values}" if array.ndim == 0 else f"shape {list(array.shape)}"
            problem = f"{subject} of row {row}: expected a list of {wanted}, got {got}"
            remedy = "pass a list of lists: for each request one value per token, or None"
            raise ShapeError(problem, array.shape, remedy)
        if len(array) != query:
            problem = f"{subject} of row {row}: {len(array)} values for its {query} tokens"
            raise ShapeError(problem, len(array), "pass as many as `query_lens` says, 1 each by default")
        arrays[row] = array
    return arrays
