"""Requests of unequal lengths laid end to end: the arrays that variable-length attention kernels take."""

from typing import final

import attrs
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class Ragged:
    """The tokens of one step, those of a request together, in order.

    Attributes:
        starts: int64[n + 1], where the tokens of each request begin, and their number.
        rows: int64[t], the request of each token.
        positions: int64[t], the position of each token in its request.
    """

    starts: Ints
    rows: Ints
    positions: Ints

    @classmethod
    def of(cls, seq_lens: Ints, query_lens: Ints) -> "Ragged":
        """The last `query_lens[i]` of the `seq_lens[i]` tokens of each request."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        rows = np.repeat(np.arange(len(query_lens), dtype=np.int64), query_lens)
        first = seq_lens - query_lens - starts[:-1]
        return cls(starts, rows, np.arange(starts[-1], dtype=np.int64) + first[rows])


def padded(values: npt.NDArray[np.integer], size: int, fill: int, dtype: npt.DTypeLike) -> npt.NDArray[np.integer]:
    """`values` as `dtype`, then `fill` up to `size` elements."""
    result = np.full(size, fill, dtype=dtype)
    result[: len(values)] = values
    return result
