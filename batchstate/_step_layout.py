"""`StepLayout`: where the numbers of a decode step lie in its one copy. The number of requests alone says it."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate._rows import Layout
from batchstate.runtime import PackedUpload
from batchstate.runtime.memory import ALIGNMENT, Place, StagingBlock

Array = npt.NDArray[Any]

INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)

_WIDE, _NARROW = 3, 2
"""Rows beside the columns: positions, slot mapping and indices of the table write, int64; and KV lengths and values of
the table write, int32."""


def pitch(n: int, dtype: "np.dtype[Any]") -> int:
    """Elements from one row of `n` to the next: each begins at a multiple of `ALIGNMENT`."""
    return n + -n * dtype.itemsize % ALIGNMENT // dtype.itemsize


@final
class StepLayout:
    """Places and views for the decode steps of `n` requests.

    Attributes:
        places: of the columns in the copy, one for each array of the batch's `Layout`.
        num_places: how many.
        nbytes: of the copy.
        ones, everyone: int64[n], 1 for each, and 0 to n - 1.
        query_start_loc, last_token_indices: on the device, int32[n + 1] and int64[n].
    """

    __slots__ = (
        "_beside",
        "_n",
        "_starts",
        "_views",
        "everyone",
        "last_token_indices",
        "nbytes",
        "num_places",
        "ones",
        "places",
        "query_start_loc",
    )

    def __init__(self, n: int, layout: Layout, query_start_loc: torch.Tensor, last_token_indices: torch.Tensor) -> None:
        self._n = n
        self.ones, self.everyone = np.ones(n, dtype=np.int64), np.arange(n)
        self.query_start_loc, self.last_token_indices = query_start_loc, last_token_indices
        self.places: list[Place] = []
        size = 0
        for pad in layout.pads:
            shape = (len(pad), pitch(n, pad.dtype)) if pad.ndim == 2 else (1, n, *pad.shape[2:])
            self.places.append((size, pad.dtype, shape))
            size += -(-int(np.prod(shape)) * pad.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_places = len(self.places)
        self._starts = size, size + _WIDE * pitch(n, INT64) * INT64.itemsize
        self.nbytes = self._starts[1] + _NARROW * pitch(n, INT32) * INT32.itemsize
        self._views: dict[StagingBlock, list[Array]] = {}
        self._beside = [
            (dtype, (count, n), (pitch(n, place), 1), at // place.itemsize)
            for at, dtype, place, count in (
                (self._starts[0], torch.int64, INT64, _WIDE),
                (self._starts[1], torch.int32, INT32, _NARROW),
            )
        ]

    def fill(self, block: StagingBlock, groups: Sequence[Array], beside: Sequence[Array]) -> None:
        """Writes the columns, and the rows int64[n] beside them, to where they go in `block`."""
        views = self._views.get(block)
        if views is None:
            memory = block.bytes
            views = [self._rows_at(memory, *place) for place in self.places]
            views.extend(self._rows_at(memory, self._starts[0], INT64, (_WIDE, pitch(self._n, INT64))))
            views.extend(self._rows_at(memory, self._starts[1], INT32, (_NARROW, pitch(self._n, INT32))))
            self._views[block] = views
        for view, values in zip(views, (*groups, *beside), strict=True):
            view[...] = values

    def beside(self, upload: PackedUpload) -> list[torch.Tensor]:
        """The rows beside the columns, on the device: [n] each. A write in place into one is none into a column."""
        memory = upload.buffer.data  # which begins where its storage does
        rows: list[torch.Tensor] = []
        for dtype, shape, strides, first in self._beside:
            rows += memory.view(dtype).as_strided(shape, strides, first).unbind(0)
        return rows

    def _rows_at(self, memory: Array, start: int, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> Array:
        """An array of `shape` from byte `start` on, the first `n` rows of it."""
        rows: Array = np.ndarray(shape, dtype, memory, start)[:, : self._n]
        return rows
