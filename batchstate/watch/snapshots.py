"""Columns of a batch that others wrote, read as they are at one moment, and compared with another moment."""

import contextlib
from collections.abc import Callable, Hashable, Mapping
from operator import is_, itemgetter
from typing import Any, Self, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.runtime import numpy_dtype
from batchstate.watch._requests import NEVER_CHANGE

Array: TypeAlias = npt.NDArray[Any]

_ONLY_TORCH = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16
)
"""Floats that numpy lacks (bfloat16, the 8-bit ones). float32 holds each of their values."""

_COPIED = (list, dict, set)
_SUMS_UP: dict[type, Callable[[Any], Any]] = {int: sum, bool: sum, float: sum, str: "".join}
"""What fails, or ends with another type, if an entry is neither a number nor text: a look at all types takes
three times as long."""


PLAIN_KEYS = (str, int, bytes, tuple)
"""Types of request ids. Other objects are known by identity."""


@final
@attrs.frozen(eq=False)
class Snapshot:
    """A column as it was at one moment, on the host: its dtype and its entries, rows first.

    The dtype tells bfloat16 from the float32 that it is read as; Python objects have `object`.
    """

    dtype: str
    values: Array

    @classmethod
    def of(cls, value: Any, num_rows: int | None = None) -> Self:
        """The column as it is; the memory may still be the batch's.

        Args:
            value: a tensor, an array, a sequence, or a dictionary from row to entry.
            num_rows: how many rows of it count; None for all. A dictionary needs it.
        """
        return cls(dtype_of(value), array_of(entries_of(value, num_rows)))

    def copied(self) -> Self:
        """The same in memory of its own; of lists, dictionaries, sets and tensors among the entries too."""
        values = self.values
        return attrs.evolve(self, values=array_of(copy_of(values.tolist() if values.dtype.kind == "O" else values)))


def dtype_of(value: Any) -> str:
    """The name of its dtype, as torch or numpy says it; `object` of other things."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor | np.ndarray) else "object"


def entries_of(value: Any, num_rows: int | None = None) -> Array | list[Any]:
    """The first rows of a column on the host, perhaps in the batch's memory: an array, or a list of Python objects."""
    if isinstance(value, list):
        return value[:num_rows]
    if isinstance(value, torch.Tensor):
        if not value.is_cpu:
            value = value[:num_rows].cpu()
        if value.dtype in _ONLY_TORCH:
            value = value.float()
        value = (value.detach() if value.requires_grad else value).numpy()
    if isinstance(value, np.ndarray):
        array: Array = value if value.shape[:1] == (num_rows,) else value[:num_rows]
        return array.tolist() if array.dtype.kind == "O" else array
    if isinstance(value, Mapping):
        return [value.get(row) for row in range(num_rows or 0)]
    return list(value[:num_rows])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in one run, where it lies; its own memory if it is contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return (tensor if tensor.ndim == 1 and tensor.is_contiguous() else tensor.reshape(-1)).view(torch.uint8)


def array_from(packed: Array, dtype: torch.dtype, shape: torch.Size) -> Array:
    """The entries whose bytes these are; they stay in this memory where numpy has the dtype."""
    if dtype in _ONLY_TORCH:
        return np.asarray(entries_of(torch.from_numpy(packed.copy()).view(dtype).view(shape)))
    array: Array = packed.view(numpy_dtype(dtype))
    return array if len(shape) == 1 else array.reshape(shape)


def without_tails(entries: Array | list[Any], counts: Any) -> Array:
    """Zeros in the place of what stands behind the first so many entries of each row."""
    entries = np.asarray(entries)
    inside = np.arange(entries.shape[1]) < np.asarray(counts).astype(np.int64)[:, None]
    return np.where(inside, entries, np.zeros_like(entries[:1, :1]))


def array_of(entries: Array | list[Any]) -> Array:
    """Python objects as an array of them."""
    if isinstance(entries, np.ndarray):
        return entries
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array


def copy_of(entries: Array | list[Any]) -> Array | list[Any]:
    """The same in memory of its own; of lists, dictionaries, sets and tensors among the entries too."""
    if isinstance(entries, np.ndarray):
        return entries.copy()
    if entries and (sums_up := _SUMS_UP.get(type(entries[0]))) is not None:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if type(sums_up(entries)) in NEVER_CHANGE:
                return entries
    kinds = set(map(type, entries))
    if kinds == {list}:  # the same as below, in half the time
        return list(map(list.copy, entries))
    for kind in kinds - NEVER_CHANGE:
        if issubclass(kind, _COPIED):
            entries = [one.copy() if isinstance(one, kind) else one for one in entries]
        elif issubclass(kind, torch.Tensor | np.ndarray):
            entries = [one.tolist() if isinstance(one, kind) else one for one in entries]
    return entries


def address_range(value: Any) -> tuple[int, int] | None:
    """First address and the one after the last, of what lies in host memory; None for other things."""
    if isinstance(value, torch.Tensor) and value.is_cpu:
        start: int = value.data_ptr()
        return start, start + value.nbytes
    if isinstance(value, np.ndarray):
        start = int(value.__array_interface__["data"][0])
        return start, start + value.nbytes
    return None


def rows_of(value: Any) -> int:
    """How many rows a column has."""
    return int(value.shape[0]) if hasattr(value, "shape") else len(value)


@final
@attrs.frozen(eq=False)
class Rows:
    """Entries of every column in use at one moment, on the host, and whose they are.

    Attributes:
        requests: of the rows, kept alive: what is known by identity stays the only one of its number.
        columns: arrays, or lists of Python objects.
    """

    requests: list[Any]
    columns: dict[str, Array | list[Any]]

    def in_both(self, now: "Rows") -> tuple[Any, Any] | None:
        """The rows of the requests that are in `now` too, here and there: slices or row numbers; None if none is."""
        old, new = self.requests, now.requests
        n, m = len(old), len(new)
        if n and type(None) not in set(map(type, old)):  # so that none of `new` is taken for the same
            for first in {0, m - n} if n <= m else ():  # as they were, or joined by others
                if all(map(is_, old, new[first : first + n])):
                    return slice(None), slice(first, first + n)
            left, stayed = iter(new), []
            wanted = next(left, None)
            for row, one in enumerate(old):
                if one is wanted:
                    stayed.append(row)
                    wanted = next(left, None)
            if len(stayed) == m:
                return np.fromiter(stayed, np.intp, m), slice(None)
        index = dict(zip(keys_of(old), range(n), strict=True))
        index.pop(None, None)
        found = [(index[key], row) for row, key in enumerate(keys_of(new)) if key in index]
        return (np.array(found)[:, 0], np.array(found)[:, 1]) if found else None


def picker(rows: Any) -> Callable[[Any], Any]:
    """Takes some rows out of a column, by a slice or by their numbers."""
    if isinstance(rows, slice):
        return (lambda entries: entries) if rows == slice(None) else (lambda entries: entries[rows])
    listed = rows.tolist()
    some = itemgetter(*listed) if len(listed) > 1 else lambda entries: [entries[row] for row in listed]
    return lambda entries: entries[rows] if isinstance(entries, np.ndarray) else list(some(entries))


def alike(expected: Array | list[Any], found: Array | list[Any]) -> bool:
    """Whether two columns are equal, bit by bit or by `==`: what nearly always holds, without a report."""
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return expected.dtype == found.dtype and expected.shape == found.shape and expected.tobytes() == found.tobytes()
    try:
        return isinstance(expected, list) and isinstance(found, list) and expected == found
    except (RuntimeError, ValueError):  # of tensors or arrays among the entries
        return False


def keys_of(requests: list[Any]) -> list[Hashable]:
    """Whose each row is: ids as they are, other objects by identity; None is a row without a request."""
    kinds = set(map(type, requests))
    if len(kinds) == 1 and not issubclass(kinds.pop(), (*PLAIN_KEYS, type(None))):
        return list(map(id, requests))
    return [one if one is None or isinstance(one, PLAIN_KEYS) else id(one) for one in requests]
