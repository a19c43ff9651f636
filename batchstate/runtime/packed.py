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


Place = tuple[int, "np.dtype[Any]", tuple[int, ...]]
"""Where an array starts, in bytes, its dtype and its shape."""


def packed_places(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[Place], int]:
    """Where each array lies in the packed buffer, and the buffer's size in bytes.

    Raises:
        DtypeError: an array of something else than numbers.
    """
    places: list[Place] = []
    size = 0
    for array in arrays:
        dtype = array.dtype
        if dtype.kind not in "biuf":  # the bytes of an object are its address
            torch_dtype(dtype)
        places.append((size, dtype, array.shape))
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def view_at(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    """What lies at `place` of uint8[nbytes]."""
    start, dtype, shape = place
    # `.data` counts writes in place of its own: a write into one array is none into its neighbours.
    flat = buffer.data[start : start + math.prod(shape) * dtype.itemsize].view(torch_dtype(dtype))
    return flat.view(shape)


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
    _places: list[Place]
    handed: set[object] = attrs.field(factory=set, init=False)
    _views: dict[int, torch.Tensor] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"PackedUpload({len(self._places)} arrays in {self.buffer.numel()} bytes)"

    def view(self, index: int) -> torch.Tensor:
        """The device side of array `index`, with its dtype and shape."""
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = view_at(self.buffer, self._places[index])
        return view
