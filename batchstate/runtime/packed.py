"""Several host arrays that crossed to the device in one copy."""

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
    """What lies at `place` of uint8[nbytes]. A write into it in place counts as one into the buffer."""
    start, dtype, shape = place
    return _strided(buffer.view(torch_dtype(dtype)), start // dtype.itemsize, shape)


def _strided(typed: torch.Tensor, first: int, shape: tuple[int, ...]) -> torch.Tensor:
    """`shape` from element `first` on, in one call instead of a slice and a view."""
    strides, size = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = size
        size *= shape[axis]
    return typed.as_strided(shape, strides, typed.storage_offset() + first)


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
    _typed: "dict[np.dtype[Any], torch.Tensor]" = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"PackedUpload({len(self._places)} arrays in {self.buffer.numel()} bytes)"

    def view(self, index: int) -> torch.Tensor:
        """The device side of array `index`, with its dtype and shape."""
        view = self._views.get(index)
        if view is None:
            # `.data` counts writes in place of its own: a write into one array is none into its neighbours.
            view = self._views[index] = self.shared(index).data
        return view

    def shared(self, index: int) -> torch.Tensor:
        """The same, made anew, of which a write in place counts as one into the buffer."""
        start, dtype, shape = self._places[index]
        return _strided(self._typed_as(dtype), start // dtype.itemsize, shape)

    def lanes(self, index: int, dtype: np.dtype[Any], num_rows: int) -> tuple[torch.Tensor, ...]:
        """The lanes of array `index` [k, n] as `dtype`, of the same width, each without what is behind `num_rows`.

        All in one call: a view of each costs several times as much. A write into one counts as one into the buffer.
        """
        start, _, (num_lanes, pitch) = self._places[index]
        typed = self._typed_as(dtype)
        first = typed.storage_offset() + start // dtype.itemsize
        return typed.as_strided((num_lanes, num_rows), (pitch, 1), first).unbind(0)

    def _typed_as(self, dtype: np.dtype[Any]) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.buffer.view(torch_dtype(dtype))
        return typed
