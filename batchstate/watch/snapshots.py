"""Columns of a batch that others wrote, read as they are at one moment, and compared with another moment."""

from collections.abc import Hashable, Mapping
from operator import is_, itemgetter
from typing import Any, Self, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.runtime import numpy_dtype
from batchstate.watch._requests import NEVER_CHANGE

Array: TypeAlias = npt.NDArray[Any]


Selection: TypeAlias = slice | npt.NDArray[np.int64]
"""Rows of a batch: a range, which is not copied, or their numbers."""

_ONLY_TORCH = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16
)
"""Floats that numpy lacks (bfloat16, the 8-bit ones). float32 holds each of their values."""

PLAIN_KEYS = (str, int, bytes, tuple)
"""Types of request ids. Other objects are known by identity."""


@final
@attrs.frozen(eq=False)
class Snapshot:
    """A column at one moment, on the host: its entries, rows first, and its dtype.

    The dtype tells bfloat16 from the float32 that it is read as; Python objects have `object`.
    """

    dtype: str
    values: Array

    @classmethod
    def of(cls, value: Any, num_rows: int | None = None) -> Self:
        """The column as it is; the memory may still be the batch's.

        Args:
            value: a tensor, an array, a sequence, or a dictionary from row to entry.
            num_rows: its first rows; None for all. A dictionary needs the number.
        """
        return cls(dtype_of(value), array_of(entries_of(value, num_rows)))

    def copied(self) -> Self:
        """The same in memory of its own; see `copy_of`."""
        values = self.values
        return attrs.evolve(self, values=array_of(copy_of(values.tolist() if values.dtype.kind == "O" else values)))


def dtype_of(value: Any) -> str:
    """The name of its dtype, as torch or numpy says it; `object` for all other values."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor | np.ndarray) else "object"


def entries_of(value: Any, num_rows: int | None = None) -> Array | list[Any]:
    """The first rows of a column on the host, perhaps in the batch's memory: an array, or a list of Python objects."""
    if isinstance(value, list):
        return value if len(value) == num_rows else value[:num_rows]
    if isinstance(value, torch.Tensor):
        if not value.is_cpu:
            value = value[:num_rows].cpu()
        try:
            value = value.numpy()
        except (TypeError, RuntimeError):  # numpy lacks the dtype, or the tensor requires gradients
            value = (value.float() if value.dtype in _ONLY_TORCH else value).detach().numpy()
    if isinstance(value, np.ndarray):
        array: Array = value if value.shape[:1] == (num_rows,) else value[:num_rows]
        return array.tolist() if array.dtype.kind == "O" else array
    if isinstance(value, Mapping):
        return [value.get(row) for row in range(num_rows or 0)]
    return list(value[:num_rows])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in one run, where it lies; its own memory if it is contiguous."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.ndim != 1:
        flat = flat.reshape(-1)
    if flat.stride(0) != 1:  # a single entry of a table is contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def array_from(packed: Array, dtype: torch.dtype, shape: torch.Size) -> Array:
    """The entries whose bytes these are; they stay in this memory where numpy has the dtype."""
    if dtype in _ONLY_TORCH:
        return np.asarray(entries_of(torch.from_numpy(packed.copy()).view(dtype).view(shape)))
    array: Array = packed.view(numpy_dtype(dtype))
    return array if len(shape) == 1 else array.reshape(shape)


def without_tails(entries: Array | list[Any], counts: Any) -> Array | list[Any]:
    """The entries that count in each row, first, and zeros behind them; a negative number counts from the end."""
    counts = np.asarray(counts).astype(np.int64)
    if type(entries) is list:
        ranges = [slice(count) if count >= 0 else slice(count, None) for count in counts.tolist()]
        return [row if row is None else row[part] for row, part in zip(entries, ranges, strict=True)]
    entries = np.asarray(entries)
    if counts.size and counts.min() < 0:
        first = np.where(counts < 0, entries.shape[1] + counts, 0)
        at = (np.arange(entries.shape[1]) + first[:, None]) % entries.shape[1]
        entries = np.take_along_axis(entries, at, 1)
    inside = np.arange(entries.shape[1]) < np.abs(counts)[:, None]
    return np.where(inside, entries, np.zeros_like(entries[:1, :1]))


def widened(entries: Any, width: int) -> Any:
    """Rows of at least this width, with zeros behind them."""
    missing = width - entries.shape[1] if isinstance(entries, np.ndarray) and entries.ndim > 1 else 0
    return np.pad(entries, [(0, 0), (0, missing)]) if missing > 0 and entries.ndim == 2 else entries


def width_of(entries: Any) -> int:
    """The width of a table; 0 for what is none."""
    return int(entries.shape[1]) if isinstance(entries, np.ndarray) and entries.ndim == 2 else 0


def beside(entries: list[Any], other: Array) -> tuple[Array, Array]:
    """A list as an array of the other side's dtype, and the other side: where the list has no entry, both are equal.

    A row of the list that is shorter than the other side's says nothing of what is behind it, one that is None says
    nothing at all.
    """
    if other.ndim < 2 or all(entry is None or not hasattr(entry, "__len__") for entry in entries):
        if None in entries:
            values = [other[row] if entry is None else entry for row, entry in enumerate(entries)]
        else:
            values = entries
        return np.array(values, dtype=other.dtype).reshape(-1 if entries else 0, *other.shape[1:]), other
    rows = [() if entry is None else entry for entry in entries]
    other = widened(other, max(map(len, rows), default=0))
    filled = other.copy()
    for row, entry in enumerate(rows):
        filled[row, : len(entry)] = entry
    return filled, other


def array_of(entries: Array | list[Any]) -> Array:
    """Python objects as an array of them."""
    if isinstance(entries, np.ndarray):
        return entries
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array


def copy_of(entries: Array | list[Any]) -> Array | list[Any]:
    """The same in memory of its own; lists, dictionaries, sets and tensors among the entries are copied too."""
    if isinstance(entries, np.ndarray):
        return entries.copy()
    types = set(map(type, entries))
    if types == {list}:  # the same as below, in half the time
        return list(map(list.copy, entries))
    entries = entries.copy()
    for kind in types - NEVER_CHANGE:
        if issubclass(kind, list | dict | set):
            entries = [entry.copy() if isinstance(entry, kind) else entry for entry in entries]
        elif issubclass(kind, torch.Tensor | np.ndarray):
            entries = [entry.tolist() if isinstance(entry, kind) else entry for entry in entries]
    return entries


def address_range(value: Any) -> tuple[int, int] | None:
    """First address and the one after the last; None for values that are not in host memory."""
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
    """Entries of columns at one moment, on the host, and whose they are.

    Attributes:
        requests: one per row, kept alive, so that no other object gets the identity of one.
        columns: arrays, or lists of Python objects; perhaps in the batch's memory.
    """

    requests: list[Any]
    columns: dict[str, Array | list[Any]]

    def own(self) -> Self:
        """The same in memory of their own; see `copy_of`."""
        return attrs.evolve(self, columns={name: copy_of(entries) for name, entries in self.columns.items()})

    def in_both(self, now: "Rows") -> tuple[Selection, Selection] | None:
        """The rows of the requests that are in `now` too, here and there; None if there is none."""
        n = len(self.requests)
        if n <= len(now.requests) and None not in self.requests and all(map(is_, self.requests, now.requests)):
            return slice(n), slice(n)  # the usual case: others have joined, or nobody
        index = {key: row for row, key in enumerate(keys_of(self.requests)) if key is not None}
        common = [(index[key], row) for row, key in enumerate(keys_of(now.requests)) if key in index]
        if not common:
            return None
        sides: list[Selection] = []
        for rows in zip(*common, strict=True):
            run = rows == tuple(range(rows[0], rows[0] + len(rows)))
            sides.append(slice(rows[0], rows[0] + len(rows)) if run else np.array(rows))
        return sides[0], sides[1]


def picked(entries: Any, rows: Selection) -> Any:
    """Some rows of a list or an array."""
    if isinstance(rows, slice) or not isinstance(entries, list):
        return entries[rows]
    return list(itemgetter(*rows.tolist())(entries))  # two rows at least: a single one is a range


def alike(expected: Array | list[Any], actual: Array | list[Any]) -> bool:
    """Whether two columns are equal, bit by bit or by `==`: the usual case, without a report."""
    if isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        same_form = expected.dtype == actual.dtype and expected.shape == actual.shape
        return same_form and expected.tobytes() == actual.tobytes()
    try:
        return isinstance(expected, list) and isinstance(actual, list) and expected == actual
    except (RuntimeError, ValueError):  # tensors or arrays among the entries
        return False


def keys_of(requests: list[Any]) -> list[Hashable]:
    """Whose each row is: ids as they are, other objects by identity; None is a row without a request."""
    types = set(map(type, requests))
    if len(types) == 1 and not issubclass(types.pop(), (*PLAIN_KEYS, type(None))):
        return list(map(id, requests))
    return [request if request is None or isinstance(request, PLAIN_KEYS) else id(request) for request in requests]
