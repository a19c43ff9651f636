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
    """Rows of a batch of which some left: how many there were, and which left, the last one first."""

    num_rows: int
    gone: list[int]

    def flags(self) -> bytearray:
        """One for each row: whether it stayed."""
        flags = bytearray(b"\1") * self.num_rows
        for row in self.gone:
            flags[row] = False
        return flags


Which: TypeAlias = slice | Stayed | list[int]
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
        return value if len(value) == num_rows else value[:num_rows]
    if isinstance(value, torch.Tensor):
        if not value.is_cpu:
            value = value[:num_rows].cpu()
        try:
            value = value.numpy()
        except (TypeError, RuntimeError):  # of a dtype that numpy lacks, or a tensor that requires gradients
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
                return entries.copy()
    if entries and type(entries[0]) is list:  # the same as below, in half the time
        with contextlib.suppress(TypeError):
            return list(map(list.copy, entries))
    kinds, entries = set(map(type, entries)), entries.copy()
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


def _is_plain(tensor: torch.Tensor, num_rows: int) -> bool:
    on_host = tensor.is_cpu and not tensor.requires_grad and tensor.dtype not in _ONLY_TORCH
    return on_host and tensor.shape[:1] == (num_rows,)


@final
class Layout:
    """How columns of known types are read by few calls: tensors on the host and lists, each as long as the batch.

    Attributes:
        arrays: names of the tensors, those together whose entries are of one size.
        lists: names of the lists.
        left: where the others stand that are in use.
        groups: of the arrays: names, dtypes and shapes of their entries, bytes of an entry, and where they stand.
    """

    def __init__(self, names: Sequence[str], values: Sequence[Any], num_rows: int, special: Container[str]) -> None:
        """Of values like these; `special` are columns that have a condition, or another dtype than before."""
        groups: dict[int, list[tuple[int, Any]]] = {}
        self._lists = [at for at, one in enumerate(values) if type(one) is list and names[at] not in special]
        for at, one in enumerate(values):
            if type(one) is torch.Tensor and names[at] not in special and _is_plain(one, num_rows):
                array = one.numpy()
                groups.setdefault(array.nbytes // num_rows, []).append((at, (array.dtype, array.shape[1:])))
        members = [member for group in groups.values() for member in group]
        self._arrays, self._kinds = [at for at, _ in members], [kind for _, kind in members]
        self._dtypes = [dtype for dtype, _ in self._kinds]
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self.arrays, self.lists = [names[at] for at in self._arrays], [names[at] for at in self._lists]
        self.left = [at for at, one in enumerate(values) if one is not None and at not in {*self._arrays, *self._lists}]
        self.groups, end = [], 0
        for size, group in groups.items():
            where = slice(end, end := end + len(group))
            self.groups.append((tuple(self.arrays[where]), tuple(self._kinds[where]), size, where))

    def read(self, values: Sequence[Any], num_rows: int) -> tuple[list[Array], list[list[Any]]] | None:
        """The arrays and the lists among values of the same types; None if one is not as it was."""
        try:
            arrays: list[Array] = [values[at].numpy() for at in self._arrays]
        except (RuntimeError, TypeError):  # on a device, or it requires gradients
            return None
        lists = [values[at] for at in self._lists]
        shapes = self._shapes.get(num_rows)
        if shapes is None:
            shapes = [(num_rows, *shape) for _, shape in self._kinds]
            self._shapes = {num_rows: shapes} | (self._shapes if len(self._shapes) < MOST_KEPT else {})
        usual = [one.dtype for one in arrays] == self._dtypes and [one.shape for one in arrays] == shapes
        return (arrays, lists) if usual and {num_rows}.issuperset(map(len, lists)) else None

    def pack(self, arrays: list[Any]) -> list[bytes]:
        """The bytes of each group, one column behind the other."""
        try:
            return [b"".join(arrays[where]) for *_, where in self.groups]
        except TypeError:  # of memory with gaps
            return [b"".join([one.tobytes() for one in arrays[where]]) for *_, where in self.groups]

    def unpack(self, packed: list[bytes], num_rows: int) -> dict[str, Array]:
        """Name -> array."""
        found: dict[str, Array] = {}
        for (names, kinds, size, _), run in zip(self.groups, packed, strict=True):
            for at, (name, (dtype, shape)) in enumerate(zip(names, kinds, strict=True)):
                found[name] = np.ndarray((num_rows, *shape), dtype, run, at * size * num_rows)
        return found


@final
@attrs.define(eq=False)
class Rows:
    """Entries of columns at one moment, on the host, and whose they are.

    Attributes:
        requests: of the rows, kept alive: what is known by identity stays the only one of its number.
        columns: arrays, or lists of Python objects; perhaps in the batch's memory. Of rows that are in memory of their
            own, only what no layout describes.
        layout: of `arrays` and `lists`.
        packed: in the place of `arrays`, of rows in memory of their own.
        kept: whether `lists` are in memory of their own, since they were there before.
        exact: whether no row is without a request, and `==` of two lists of requests says that they are the same ones.
        kinds: what `over_requests` knows of each request, if it was asked.
        before: the rows that went into an operation, of which these came out.
        of: which rows of each of them are there still, and which of these they are; None if none is.
    """

    num_rows: int
    requests: list[Any]
    columns: dict[str, Array | list[Any]]
    layout: Layout | None = None
    arrays: list[Array] = attrs.field(factory=list)
    lists: list[Any] = attrs.field(factory=list)
    packed: list[bytes] = attrs.field(factory=list)
    kept: bool = False
    exact: bool = False
    kinds: list[Any] | None = None
    before: Sequence["Rows"] = ()
    of: list[tuple[Which, Which] | None] = attrs.field(factory=list)

    def own(self, known: "Rows | None" = None) -> Self:
        """Keeps the entries in memory of its own: lists, dictionaries, sets and tensors among them too.

        Args:
            known: rows in memory of their own. Where a list is what it is there, it is taken from there.
        """
        names = [] if self.layout is None else self.layout.lists
        there: dict[str, Any] = {}
        kinds = set(map(type, self.requests))
        by_identity = all(kind.__eq__ is _BY_IDENTITY and kind is not type(None) for kind in kinds)
        self.exact = by_identity or all(issubclass(kind, PLAIN_KEYS) for kind in kinds)
        if self.exact and known is not None and known.requests == self.requests:
            self.kinds, there = known.kinds, known.columns
        self.lists = [
            one if (one := there.get(name)) is not None and alike(one, entries) else copy_of(entries)
            for name, entries in zip(names, self.lists, strict=True)
        ]
        if self.layout is not None:
            self.packed = self.layout.pack(self.arrays)
            for name in (*self.layout.arrays, *names):
                del self.columns[name]
        self.columns = {name: copy_of(entries) for name, entries in self.columns.items()}
        return self

    def entries(self) -> dict[str, Any]:
        """Each column, of rows in memory of their own."""
        if self.layout is None:
            return self.columns
        lists = dict(zip(self.layout.lists, self.lists, strict=True))
        return self.columns | self.layout.unpack(self.packed, self.num_rows) | lists

    def as_before(self) -> list[str]:
        """Columns in which all rows of `before` are, with all that they had; these are compared at once."""
        layout, same = self.layout, list[str]()
        parts = [(part, part.layout, which[0]) for part, which in zip(self.before, self.of, strict=True) if which]
        if layout is None or not self.exact:
            return same
        for (names, kinds, size, _), packed in zip(layout.groups, layout.pack(self.arrays), strict=True):
            runs = []
            for part, of_part, there in parts:
                for group, run in zip(() if of_part is None else of_part.groups, part.packed, strict=False):
                    if group[:2] == (names, kinds):
                        block: Array = np.ndarray((len(names), part.num_rows), f"V{size}", run)
                        runs.append(run if there is ALL else picked(block, there, 1).tobytes())
            if len(runs) > 1:
                steps = [(run, len(run) // len(names)) for run in runs]
                runs = [b"".join([run[at * step : (at + 1) * step] for at in range(len(names)) for run, step in steps])]
            if runs == [packed]:
                same += names
        if all(of_part is not None and of_part.lists == layout.lists for _, of_part, _ in parts):
            lists = [picked(one, parts[0][2]) for one in parts[0][0].lists]
            for part, _, _ in parts[1:]:
                lists = list(map(add, lists, part.lists))
            if alike(lists, self.lists):
                self.lists, self.kept = lists, True
                same += layout.lists
        times_checked[Code.ROW_KEPT] += len(same) * len(parts)
        return same

    def made_of(self, before: Sequence["Rows"]) -> None:
        """Looks for the rows that went into an operation among these, which came out."""
        self.before, self.of = before, [part.in_both(self) for part in before]
        end = 0
        for part, which in zip(before, self.of, strict=True):
            if not part.exact or which is None or not isinstance(which[1], slice) or (which[1].start or 0) != end:
                return
            end = self.num_rows if which[1] == ALL else which[1].stop
        self.exact = bool(before) and end == len(self.requests)

    def kinds_by(self, answers: RequestAnswers, last: "Rows | None") -> list[Any]:
        """What `over_requests` knows of each request, asked of those alone of which it was not known before.

        Args:
            answers: asks.
            last: the same batch when it was right the last time; its answers, if its requests are the same objects.
        """
        requests = self.requests
        if not requests or isinstance(requests[0], PLAIN_KEYS):
            return answers.kinds_of(requests)
        if self.exact:
            kinds: list[list[Any]] = [
                answers.kinds_of(picked(requests, which[1])) if part.kinds is None else picked(part.kinds, which[0])
                for part, which in zip(self.before, self.of, strict=True)
                if which
            ]
            return kinds[0] if len(kinds) == 1 else list(chain.from_iterable(kinds))
        if last is not None and last.kinds is not None:
            number = len(last.requests)
            if number <= len(requests) and all(map(is_, last.requests, requests)):
                return last.kinds + answers.kinds_of(requests[number:]) if number < len(requests) else last.kinds
        return answers.kinds_of(requests)

    def in_both(self, now: "Rows") -> tuple[Which, Which] | None:
        """The rows of the requests that are in `now` too, here and there; None if none is."""
        old, new = self.requests, now.requests
        n, m = len(old), len(new)
        if self.exact:
            for first in {0, m - n} if n <= m else ():  # as they were, or joined by others
                if old == (new if n == m else new[first : first + n]):
                    return ALL, slice(first, first + n)
            left, gone = iter(new), []
            wanted = next(left, None)
            for row, one in enumerate(old):
                if one is wanted:
                    wanted = next(left, None)
                else:
                    gone.append(row)
            if n - len(gone) == m:
                return Stayed(n, gone[::-1]), ALL
        index = dict(zip(keys_of(old), range(n), strict=True))
        index.pop(None, None)
        found = [(index[key], row) for row, key in enumerate(keys_of(new)) if key in index]
        return ([row for row, _ in found], [row for _, row in found]) if found else None


def picked(entries: Any, which: Which, axis: int = 0) -> Any:
    """Some rows of a list or an array; of a block of columns they lie along axis 1."""
    if isinstance(which, slice):
        return entries if which == ALL else entries[:, which] if axis else entries[which]
    if isinstance(which, Stayed):
        if not isinstance(entries, list):
            return entries.compress(np.frombuffer(which.flags(), np.bool_), axis)
        if len(which.gone) > len(entries) // 8:
            return list(compress(entries, which.flags()))
        some = entries.copy()
        for row in which.gone:
            del some[row]
        return some
    return [entries[row] for row in which] if isinstance(entries, list) else entries.take(which, axis)


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
