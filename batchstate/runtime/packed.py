"""Several host arrays that crossed to the device in one copy."""

import math
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.runtime.dtypes import torch_dtype
from batchstate.runtime.fences import Fence, Stream

ALIGNMENT = 16
"""Bytes at which each array starts: the widest load that a kernel makes."""


def packed_offsets(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[int], int]:
    """Where each array starts in the packed buffer, and the buffer's size; both in bytes."""
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, size


@final
@attrs.define(eq=False, repr=False)
class PackedUpload:
    """The device side of several arrays in one allocation; views are made when they are asked for.

    Attributes:
        buffer: uint8[nbytes] on the device.
        stream: the stream that ran the copy.
        ready: the fence behind the copy.
        handed: keys of the streams that the buffer was handed to (see `Runtime.acquire`).
    """

    buffer: torch.Tensor
    stream: Stream
    ready: Fence
    _offsets: list[int]
    _kinds: list[tuple[np.dtype[Any], tuple[int, ...]]]
    handed: set[object] = attrs.field(factory=set, init=False)
    _views: dict[int, torch.Tensor] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"PackedUpload({len(self._kinds)} arrays in {self.buffer.numel()} bytes)"

    def view(self, index: int) -> torch.Tensor:
        """The device side of array `index`, with its dtype and shape."""
        view = self._views.get(index)
        if view is None:
            dtype, shape = self._kinds[index]
            count = math.prod(shape)
            start = self._offsets[index]
            # `.data` counts writes in place of its own: a write into one array is none into its neighbours.
            flat = self.buffer.data[start : start + count * dtype.itemsize].view(torch_dtype(dtype))
            view = self._views[index] = flat.view(shape)
        return view
