"""`TokenArray`: one value for each token that a forward puts in, as the host knows it; ids of prompts are one."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, converted, shape_of
from batchstate.errors import DeclarationError, ShapeError
from batchstate.runtime.memory import numpy_dtype
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False, repr=False)
class TokenArray:
    """Values of the tokens that requests put in: token types, encoder ids, multimodal positions.

    It goes the way that prompt ids go: laid out request by request, and uploaded at forward entry, on its stream.

    Args:
        rows: for each request its values `[query_len, *shape]`, or None where all of them are `fill`; None for all.
        dtype: of the values; one that numpy has.
        shape: of the value of one token.
        fill: the value of the tokens of other requests, and of padding; zero of the dtype by default.
        non_negative: -1 among the values is a placeholder that has escaped (`SENTINEL_ESCAPED`, at `cheap`).

    Raises:
        DtypeError: a dtype that numpy lacks, or a fill that is not such a number.
        ShapeError, ArgumentError: not a shape.
        ValueOverflowError: a fill outside of the dtype.
    """

    rows: Sequence[object] | None
    dtype: torch.dtype = torch.int64
    shape: tuple[int, ...] = ()
    fill: float | None = None
    non_negative: bool = False

    def __attrs_post_init__(self) -> None:
        what = "TokenArray"
        object.__setattr__(self, "shape", shape_of(self.shape, what))
        dtype = numpy_dtype(self.dtype)
        if self.fill is not None and converted(self.fill, dtype, f"{what}: fill").ndim:
            raise ShapeError(f"{what}: fill is {self.fill!r}", self.fill, "pass one number")

    def __repr__(self) -> str:
        return f"TokenArray({self.dtype}, shape={self.shape})"

    def known(self, query_lens: Ints, num_rows: int, what: str) -> list[Array | None]:
        """The values of each request, dtype `[query_len, *shape]`; None where it has none.

        Args:
            query_lens: tokens of each request.
            num_rows: requests and padded rows, whose entries are dropped.
            what: for messages.

        Raises:
            ShapeError: not an entry per request, or not a value per token.
            DtypeError, ValueOverflowError: other values.
        """
        num_reqs, rows = len(query_lens), self.rows
        if rows is None:
            return [None] * num_reqs
        if isinstance(rows, list | tuple) and len(rows) == num_rows:
            rows = rows[:num_reqs]
        if not isinstance(rows, list | tuple) or len(rows) != num_reqs:
            size = len(rows) if isinstance(rows, list | tuple) else type(rows).__name__
            remedy = "pass a list with the values of each request, and None for those that have none here"
            raise ShapeError(f"{what} of {size} for {num_reqs} requests", size, remedy)
        dtype = numpy_dtype(self.dtype)
        known: list[Array | None] = [None] * num_reqs
        lengths = query_lens.tolist()
        for row, values in enumerate(rows):
            if values is None:
                continue
            query = lengths[row]
            if type(values) is np.ndarray and values.dtype is dtype and values.shape == (query, *self.shape):
                known[row] = values  # it is copied when it is laid out
                continue
            array: Array = converted(values, dtype, f"{what} of row {row}")
            if array.shape == (0,) and self.shape:
                array = np.empty((0, *self.shape), dtype)  # an empty list knows no shape of a token
            if array.ndim != 1 + len(self.shape) or array.shape[1:] != self.shape:
                each = f" values {list(self.shape)}" if self.shape else ""
                raise ShapeError(
                    f"{what} of row {row}: expected a list of {query}{each}, got "
                    + (f"the number {values}" if array.ndim == 0 else f"shape {list(array.shape)}"),
                    array.shape,
                    "pass a list of lists: for each request one value per token, or None",
                )
            if len(array) != query:
                problem = f"{what} of row {row}: {len(array)} values for its {query} tokens"
                raise ShapeError(problem, len(array), "pass exactly those of this chunk")
            known[row] = array
        return known

    def laid_out(self, known: Sequence[Array | None], starts: Ints, size: int) -> Array:
        """The values of all tokens, one request after the other, `fill` elsewhere: dtype `[size, *shape]`.

        `starts` int64[n + 1] says where the tokens of each request begin.
        """
        parts = [values for values in known if values is not None]
        if len(parts) == len(known) > 0 and size == starts[-1]:
            return np.concatenate(parts)
        laid: Array = np.full((size, *self.shape), self.fill or 0, dtype=numpy_dtype(self.dtype))
        for row, values in enumerate(known):
            if values is not None:
                laid[starts[row] : starts[row + 1]] = values
        return laid

    def check(self, laid: npt.NDArray[Any], where: Where) -> None:
        """Refuses placeholders among values that are never negative, at `cheap`.

        Raises:
            Violation: SENTINEL_ESCAPED.
        """
        if self.non_negative and levels.cheap:
            least = laid.reshape(len(laid), -1).min(axis=1, initial=0) if self.shape else laid
            invariants.sentinel_escaped(least, **where)


def checked_arrays(arrays: object, what: str) -> dict[str, TokenArray]:
    """Named token arrays.

    Raises:
        DeclarationError: not a dict of names to token arrays.
    """
    if arrays is None:
        return {}
    if not isinstance(arrays, dict) or not all(
        isinstance(name, str) and name != "input_ids" and isinstance(one, TokenArray) for name, one in arrays.items()
    ):
        problem = f"{what}: token_arrays are {arrays!r}"
        raise DeclarationError(problem, arrays, "pass a dict of names to TokenArray(...); ids are `prompt_ids`")
    return dict(arrays)
