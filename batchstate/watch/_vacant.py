"""Rows that have no request, or whose request says nothing: one value, or at `full` a poison."""

from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from batchstate.watch.snapshots import Array


class Poison(Enum):
    """At `full` rows without a request are overwritten, and a request may not be left with what was written."""

    POISON = "poison"


POISON: Final = Poison.POISON


def poison_of(dtype: Any) -> int | float | None:
    """The value that poisons a column: far from all that engines write; None for types without such a value.

    An index that is read by mistake is refused, and a factor that is read shows.
    """
    if isinstance(dtype, torch.dtype):
        if dtype.is_floating_point:
            return -torch.finfo(dtype).max / 2
        return None if dtype == torch.bool or dtype.is_complex else torch.iinfo(dtype).max - 0x4D
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max) - 0x4D
    return -float(np.finfo(dtype).max) / 2 if dtype.kind == "f" else None


def poison(column: Any, rows: list[int]) -> None:
    """Overwrites these rows of a tensor or an array, where it lies."""
    if rows and isinstance(column, torch.Tensor | np.ndarray) and (value := poison_of(column.dtype)) is not None:
        column[rows] = value


def poisoned(values: Array, counts: Array | None, dtype: Any) -> Array:
    """bool[n]: rows that hold poison: an entry that counts, or without counts all entries."""
    value = poison_of(dtype)
    if value is None:
        return np.zeros(len(values), bool)
    same = (values == values.dtype.type(value)).reshape(len(values), -1)
    if counts is None:
        return np.asarray(same.all(1))
    inside: Array = np.arange(same.shape[1]) < np.abs(counts)[:, None]
    return np.asarray((same & inside).any(1))
