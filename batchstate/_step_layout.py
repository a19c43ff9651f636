"""`StepLayout`: where the numbers of a step lie in its one copy, as far as the number of requests alone says it."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate._rows import Layout
from batchstate.runtime import PackedUpload, Runtime
from batchstate.runtime.memory import ALIGNMENT, Place, StagingBlock

Array = npt.NDArray[Any]

INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


def pitch(n: int, dtype: "np.dtype[Any]") -> int:
    """Elements from one row of `n` to the next: each begins at a multiple of `ALIGNMENT`."""
    return n + -n * dtype.itemsize % ALIGNMENT // dtype.itemsize


@final
class StepLayout:
    """Places and views for the steps of `n` requests: of the columns, and of what goes beside them in a decode step.

    Attributes:
        places: of the columns in the copy, one for each array of the batch's `Layout`.
        num_places: how many.
        columns_nbytes: of these.
        nbytes: of the copy of a decode step.
        ones, everyone: int64[n], 1 for each, and 0 to n - 1.
        query_start_loc, last_token_indices: on the device, int32[n + 1] and int64[n].
    """

    __slots__ = (
        "_beside",
        "_n",
        "_views",
        "columns_nbytes",
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
        for shared in (self.ones, self.everyone):  # by all steps of so many requests, whose plans hand them out
            shared.setflags(write=False)
        self.query_start_loc, self.last_token_indices = query_start_loc, last_token_indices
        self.places: list[Place] = []
        size = 0
        for pad in layout.pads:
            shape = (len(pad), pitch(n, pad.dtype)) if pad.ndim == 2 else (1, n, *pad.shape[2:])
            self.places.append((size, pad.dtype, shape))
            size += -(-int(np.prod(shape)) * pad.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_places, self.columns_nbytes = len(self.places), size
        self._beside: list[slice] = []  # of positions and slot mapping, int64, and KV lengths, int32, in elements
        for dtype in (INT64, INT64, INT32):
            first = size // dtype.itemsize
            self._beside.append(slice(first, first + n))
            size += pitch(n, dtype) * dtype.itemsize
        self.nbytes = size
        self._views: dict[StagingBlock, list[Array]] = {}

    def send(self, runtime: Runtime, groups: Sequence[Array], beside: Sequence[Array]) -> PackedUpload:
        """One copy of the columns, and of positions, slot mapping and KV lengths beside them."""
        block = runtime.staging_block(self.nbytes)
        self.fill(block, groups, beside)
        return runtime.send(block, self.nbytes, self.places)

    def fill(self, block: StagingBlock, groups: Sequence[Array], beside: Sequence[Array]) -> None:
        """Writes the columns, and what goes beside them in a decode step, or nothing, to where they go in `block`."""
        views = self._views.get(block)
        if views is None:
            memory = block.bytes
            views = [self._rows_at(memory, *place) for place in self.places]
            (positions, mapping, lens), wide = self._beside, memory.view(INT64)
            views += (wide[positions], wide[mapping], memory.view(INT32)[lens])
            self._views[block] = views
        for view, values in zip(views, (*groups, *beside), strict=False):
            view[...] = values

    def beside(self, upload: PackedUpload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, slot mapping and KV lengths on the device, [n] each. A write into one is none into a column."""
        memory = upload.buffer.data  # which begins where its storage does
        wide, (positions, mapping, lens) = memory.view(torch.int64), self._beside
        return wide[positions], wide[mapping], memory.view(torch.int32)[lens]

    def _rows_at(self, memory: Array, start: int, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> Array:
        """An array of `shape` from byte `start` on, the first `n` rows of it."""
        rows: Array = np.ndarray(shape, dtype, memory, start)[:, : self._n]
        return rows
