"""Columns of a batch that others wrote, read as they are at one moment, and compared with another moment."""

import contextlib
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from itertools import chain, compress
from operator import add, is_
from typing import Any, Self, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.invariants import times_checked
from batchstate.runtime import numpy_dtype
from batchstate.violations import Code
from batchstate.watch._requests import MOST_KEPT, NEVER_CHANGE, RequestAnswers

Array: TypeAlias = npt.NDArray[Any]


@final
@attrs.frozen(eq=False)
class Stayed:
    """Rows that stayed when others left: how many there were, and the numbers of those that left, last one first."""

    num_rows: int
    gone: list[int]

    def flags(self) -> bytearray:
        """Whether each row stayed."""
        flags = bytearray(b"\1") * self.num_rows
        for row in self.gone:
            flags[row] = False
        return flags


Selection: TypeAlias = slice | Stayed | list[int]
"""Rows of a batch: a range, those that stayed, or their numbers."""

ALL = slice(None)

_ONLY_TORCH = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16
)
"""Floats that numpy lacks (bfloat16, the 8-bit ones). float32 holds each of their values."""

_COPIED = (list, dict, set)
_BY_IDENTITY: Any = object.__eq__
_SUMS_UP: dict[type, Callable[[Any], Any]] = {int: sum, bool: sum, float: sum, str: "".join}
"""Sums fail, or end with another type, if an entry is neither a number nor text; to look at all types takes three times
as long."""

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
    if entries and (sums_up := _SUMS_UP.get(type(entries[0]))) is not None:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if type(sums_up(entries)) in NEVER_CHANGE:
                return entries.copy()
    if entries and type(entries[0]) is list:  # the same as below, in half the time
        with contextlib.suppress(TypeError):
            return list(map(list.copy, entries))
    types, entries = set(map(type, entries)), entries.copy()
    for kind in types - NEVER_CHANGE:
        if issubclass(kind, _COPIED):
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


def _is_plain(tensor: torch.Tensor, num_rows: int) -> bool:
    on_host = tensor.is_cpu and not tensor.requires_grad and tensor.dtype not in _ONLY_TORCH
    return on_host and tensor.shape[:1] == (num_rows,)


@final
class BulkColumns:
    """Columns of known types that few calls read: tensors on the host and lists, each as long as the batch.

    Attributes:
        arrays: names of the tensors, those together whose entries are of one size.
        lists: names of the lists.
        left: positions of the other columns in use.
        groups: names of arrays, dtypes and shapes of their entries, bytes of an entry, and their range in `arrays`.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], num_rows: int, special: Container[str]) -> None:
        """For values like these; `special` are columns that have a condition, or another dtype than before."""
        groups: dict[int, list[tuple[int, Any]]] = {}
        self._lists = [at for at, value in enumerate(values) if type(value) is list and names[at] not in special]
        for at, value in enumerate(values):
            if type(value) is torch.Tensor and names[at] not in special and _is_plain(value, num_rows):
                array = value.numpy()
                groups.setdefault(array.nbytes // num_rows, []).append((at, (array.dtype, array.shape[1:])))
        members = [member for group in groups.values() for member in group]
        self._arrays, self._entry_types = [at for at, _ in members], [entry_type for _, entry_type in members]
        self._dtypes = [dtype for dtype, _ in self._entry_types]
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self.arrays, self.lists = [names[at] for at in self._arrays], [names[at] for at in self._lists]
        bulk = {*self._arrays, *self._lists}
        self.left = [at for at, value in enumerate(values) if value is not None and at not in bulk]
        self.groups, end = [], 0
        for size, group in groups.items():
            where = slice(end, end := end + len(group))
            self.groups.append((tuple(self.arrays[where]), tuple(self._entry_types[where]), size, where))

    def read(self, values: Sequence[Any], num_rows: int) -> tuple[list[Array], list[list[Any]]] | None:
        """The arrays and the lists among values of the same types; None if a dtype or a length differs."""
        try:
            arrays: list[Array] = [values[at].numpy() for at in self._arrays]
        except (RuntimeError, TypeError):  # on a device, or it requires gradients
            return None
        lists = [values[at] for at in self._lists]
        shapes = self._shapes.get(num_rows)
        if shapes is None:
            shapes = [(num_rows, *shape) for _, shape in self._entry_types]
            self._shapes = {num_rows: shapes} | (self._shapes if len(self._shapes) < MOST_KEPT else {})
        usual = [array.dtype for array in arrays] == self._dtypes and [array.shape for array in arrays] == shapes
        return (arrays, lists) if usual and {num_rows}.issuperset(map(len, lists)) else None

    def pack(self, arrays: list[Any]) -> list[bytes]:
        """The bytes of each group, one column behind the other."""
        try:
            return [b"".join(arrays[where]) for *_, where in self.groups]
        except TypeError:  # memory with gaps
            return [b"".join([array.tobytes() for array in arrays[where]]) for *_, where in self.groups]

    def unpack(self, packed: list[bytes], num_rows: int) -> dict[str, Array]:
        """Name -> array."""
        columns: dict[str, Array] = {}
        for (names, entry_types, size, _), run in zip(self.groups, packed, strict=True):
            for at, (name, (dtype, shape)) in enumerate(zip(names, entry_types, strict=True)):
                columns[name] = np.ndarray((num_rows, *shape), dtype, run, at * size * num_rows)
        return columns


@final
@attrs.define(eq=False)
class Rows:
    """Entries of columns at one moment, on the host, and whose they are.

    Attributes:
        requests: one per row, kept alive, so that no other object gets the identity of one.
        columns: arrays, or lists of Python objects; perhaps in the batch's memory. In rows that own their memory, only
            columns that are not in `bulk`.
        bulk: describes `arrays` and `lists`.
        packed: the bytes of `arrays`, in rows that own their memory.
        kept: whether `lists` are in memory of their own, since they were there before.
        exact: whether each row has a request, and `==` of two lists of requests says that they are the same objects.
        answer_groups: of the requests, if `over_requests` was asked.
        before: the rows that went into the operation from which these came out.
        stayed: for each of `before`, the selections of the common requests, there and here; None if there is none.
    """

    num_rows: int
    requests: list[Any]
    columns: dict[str, Array | list[Any]]
    bulk: BulkColumns | None = None
    arrays: list[Array] = attrs.field(factory=list)
    lists: list[Any] = attrs.field(factory=list)
    packed: list[bytes] = attrs.field(factory=list)
    kept: bool = False
    exact: bool = False
    answer_groups: list[Any] | None = None
    before: Sequence["Rows"] = ()
    stayed: list[tuple[Selection, Selection] | None] = attrs.field(factory=list)

    def own(self, last: "Rows | None" = None) -> Self:
        """Moves the entries to memory of its own; see `copy_of`.

        Args:
            last: rows in memory of their own; a list that is equal there is shared with them.
        """
        names = [] if self.bulk is None else self.bulk.lists
        shared: dict[str, Any] = {}
        types = set(map(type, self.requests))
        by_identity = all(kind.__eq__ is _BY_IDENTITY and kind is not type(None) for kind in types)
        self.exact = by_identity or all(issubclass(kind, PLAIN_KEYS) for kind in types)
        if self.exact and last is not None and last.requests == self.requests:
            self.answer_groups, shared = last.answer_groups, last.columns
        self.lists = [
            same if (same := shared.get(name)) is not None and alike(same, entries) else copy_of(entries)
            for name, entries in zip(names, self.lists, strict=True)
        ]
        if self.bulk is not None:
            self.packed = self.bulk.pack(self.arrays)
            for name in (*self.bulk.arrays, *names):
                del self.columns[name]
        self.columns = {name: copy_of(entries) for name, entries in self.columns.items()}
        return self

    def entries(self) -> dict[str, Any]:
        """Each column of rows that own their memory."""
        if self.bulk is None:
            return self.columns
        lists = dict(zip(self.bulk.lists, self.lists, strict=True))
        return self.columns | self.bulk.unpack(self.packed, self.num_rows) | lists

    def as_before(self) -> list[str]:
        """Names of columns that hold all rows of `before` unchanged; these are compared at once."""
        bulk, same = self.bulk, list[str]()
        parts = [(part, part.bulk, common[0]) for part, common in zip(self.before, self.stayed, strict=True) if common]
        if bulk is None or not self.exact:
            return same
        for (names, entry_types, size, _), packed in zip(bulk.groups, bulk.pack(self.arrays), strict=True):
            runs = []
            for part, part_bulk, rows in parts:
                for group, run in zip(() if part_bulk is None else part_bulk.groups, part.packed, strict=False):
                    if group[:2] == (names, entry_types):
                        block: Array = np.ndarray((len(names), part.num_rows), f"V{size}", run)
                        runs.append(run if rows is ALL else picked(block, rows, 1).tobytes())
            if len(runs) > 1:
                steps = [(run, len(run) // len(names)) for run in runs]
                runs = [b"".join([run[at * step : (at + 1) * step] for at in range(len(names)) for run, step in steps])]
            if runs == [packed]:
                same += names
        if all(part_bulk is not None and part_bulk.lists == bulk.lists for _, part_bulk, _ in parts):
            lists = [picked(entries, parts[0][2]) for entries in parts[0][0].lists]
            for part, _, _ in parts[1:]:
                lists = list(map(add, lists, part.lists))
            if alike(lists, self.lists):
                self.lists, self.kept = lists, True
                same += bulk.lists
        times_checked[Code.ROW_KEPT] += len(same) * len(parts)
        return same

    def made_of(self, before: Sequence["Rows"]) -> None:
        """Looks among these rows, which came out of an operation, for those that went in."""
        self.before, self.stayed = before, [part.in_both(self) for part in before]
        end = 0
        for part, common in zip(before, self.stayed, strict=True):
            if not part.exact or common is None or not isinstance(common[1], slice) or (common[1].start or 0) != end:
                return
            end = self.num_rows if common[1] == ALL else common[1].stop
        self.exact = bool(before) and end == len(self.requests)

    def ask(self, answers: RequestAnswers, last: "Rows | None") -> list[Any]:
        """The answer group of each request. Functions are evaluated for new requests only.

        Args:
            answers: evaluates them.
            last: the same batch when it was right the last time; reused if its requests are the same objects.
        """
        requests = self.requests
        if not requests or isinstance(requests[0], PLAIN_KEYS):
            return answers.groups_of(requests)
        if self.exact:
            groups: list[list[Any]] = [
                answers.groups_of(picked(requests, common[1]))
                if part.answer_groups is None
                else picked(part.answer_groups, common[0])
                for part, common in zip(self.before, self.stayed, strict=True)
                if common
            ]
            return groups[0] if len(groups) == 1 else list(chain.from_iterable(groups))
        if last is not None and (groups_before := last.answer_groups) is not None:
            number = len(last.requests)
            if number <= len(requests) and all(map(is_, last.requests, requests)):
                return groups_before + answers.groups_of(requests[number:]) if number < len(requests) else groups_before
        return answers.groups_of(requests)

    def in_both(self, now: "Rows") -> tuple[Selection, Selection] | None:
        """The rows of the requests that are in `now` too, here and there; None if there is none."""
        old, new = self.requests, now.requests
        n, m = len(old), len(new)
        if self.exact:
            for first in {0, m - n} if n <= m else ():  # as they were, or joined by others
                if old == (new if n == m else new[first : first + n]):
                    return ALL, slice(first, first + n)
            left, gone = iter(new), []
            wanted = next(left, None)
            for row, request in enumerate(old):
                if request is wanted:
                    wanted = next(left, None)
                else:
                    gone.append(row)
            if n - len(gone) == m:
                return Stayed(n, gone[::-1]), ALL
        index = dict(zip(keys_of(old), range(n), strict=True))
        index.pop(None, None)
        common = [(index[key], row) for row, key in enumerate(keys_of(new)) if key in index]
        return ([row for row, _ in common], [row for _, row in common]) if common else None


def picked(entries: Any, rows: Selection, axis: int = 0) -> Any:
    """Some rows of a list or an array; rows of a block of columns lie along axis 1."""
    if isinstance(rows, slice):
        return entries if rows == ALL else entries[:, rows] if axis else entries[rows]
    if isinstance(rows, Stayed):
        if not isinstance(entries, list):
            return entries.compress(np.frombuffer(rows.flags(), np.bool_), axis)
        if len(rows.gone) > len(entries) // 8:
            return list(compress(entries, rows.flags()))
        stayed = entries.copy()
        for row in rows.gone:
            del stayed[row]
        return stayed
    return [entries[row] for row in rows] if isinstance(entries, list) else entries.take(rows, axis)


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
