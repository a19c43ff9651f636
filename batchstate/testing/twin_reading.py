"""How the twin fuzzer reads attributes of a batch class that it knows nothing of."""

from operator import attrgetter
from typing import Any, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ONLY_TORCH = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16
)
"""Floats that numpy lacks (bfloat16, the 8-bit ones). float32 holds each of their values."""


@final
@attrs.frozen(eq=False)
class Seen:
    """An attribute as it was at one moment, on the host.

    Attributes:
        dtype: of the attribute; `object` for Python objects. It tells bfloat16 from the float32 that it is read as.
        values: the entries, rows first.
    """

    dtype: str
    values: Array

    def copied(self) -> Self:
        """The same in memory of its own."""
        return attrs.evolve(self, values=self.values.copy())

    def rows(self, keep: list[int]) -> Self:
        """The entries of these rows."""
        return attrs.evolve(self, values=self.values[keep])

    def merged(self, other: Self) -> Self:
        """These entries, then those of `other`. A side without rows has no say in the dtype."""
        if not len(self.values):
            return other
        if not len(other.values):
            return self
        values = np.concatenate([self.values, other.values])
        return attrs.evolve(self, dtype=self.dtype if self.dtype == other.dtype else str(values.dtype), values=values)

    def same(self, other: Self) -> bool:
        """Whether shape and bits are equal; Python objects compare by `==`."""
        if self.values.shape != other.values.shape:
            return False
        if self.values.dtype.kind == "O":
            return bool(self.values.tolist() == other.values.tolist())
        return np.ascontiguousarray(self.values).tobytes() == np.ascontiguousarray(other.values).tobytes()


def attribute(batch: object, name: str) -> Any:
    """The attribute of that name; dots reach into parts."""
    return attrgetter(name)(batch)


def seen(value: Any) -> Seen:
    """An attribute as it is; the memory may still be the batch's."""
    if isinstance(value, torch.Tensor):
        readable = value.detach().float() if value.dtype in _ONLY_TORCH else value.detach()
        return Seen(str(value.dtype).removeprefix("torch."), readable.cpu().numpy())
    if isinstance(value, np.ndarray):
        return Seen(str(value.dtype), value)
    objects = np.empty(len(value), dtype=object)
    objects[:] = list(value)
    return Seen("object", objects)


def memory(value: Any) -> tuple[int, int] | None:
    """First address and the one after the last, of what lies in host memory; None for other things."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.data_ptr(), value.data_ptr() + value.nbytes
    if isinstance(value, np.ndarray):
        start = int(value.__array_interface__["data"][0])
        return start, start + value.nbytes
    return None
