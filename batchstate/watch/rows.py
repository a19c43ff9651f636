"""What is declared of a batch class, and the questions that follow from it.

A declaration names columns of an object that others wrote. A name is a path: each part between dots is an attribute,
the key of a dictionary or the number of an entry (`sampling_info.temperatures`, `block_table.0.num_blocks_per_row`).
Where a part is None, the column is not in use, and nothing is asked of it. A function of the batch does as well.
"""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Self, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError, one_of
from batchstate.invariants import Invariant, times_checked
from batchstate.violations import Code, Violation, Where

Array: TypeAlias = npt.NDArray[Any]
Get: TypeAlias = Callable[[Any], Any]
Name: TypeAlias = str | Get

_ONLY_TORCH = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16
)
"""Floats that numpy lacks (bfloat16, the 8-bit ones). float32 holds each of their values."""

_COPIED = (list, dict, set)
_NEVER_CHANGE = frozenset({int, float, bool, str, bytes, type(None)})
_DERIVED_STALE, _ROW_KEPT = Code.DERIVED_STALE, Code.ROW_KEPT

_PLAIN_KEYS = (str, int, bytes, tuple)
"""Types of request ids. Other objects are known by identity."""

ASK_DERIVED = 16
"""Requests of a batch for each call at `cheap` without a question about derived values, and at least four calls: each
question goes through the requests in Python, so that the cost of a call does not grow with them."""


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
        return cls(_dtype_of(value), _array(entries_of(value, num_rows)))

    def copied(self) -> Self:
        """The same in memory of its own; of lists, dictionaries, sets and tensors among the entries too."""
        values = self.values
        return attrs.evolve(self, values=_array(copy_of(values.tolist() if values.dtype.kind == "O" else values)))


def _dtype_of(value: Any) -> str:
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
        array: Array = value[:num_rows]
        return array.tolist() if array.dtype.kind == "O" else array
    if isinstance(value, Mapping):
        return [value.get(row) for row in range(num_rows or 0)]
    return list(value[:num_rows])


def _array(entries: Array | list[Any]) -> Array:
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
    for kind in set(map(type, entries)) - _NEVER_CHANGE:
        if issubclass(kind, _COPIED):
            entries = [one.copy() if isinstance(one, kind) else one for one in entries]
        elif issubclass(kind, torch.Tensor | np.ndarray):
            entries = [one.tolist() if isinstance(one, kind) else one for one in entries]
    return entries


def address_range(value: Any) -> tuple[int, int] | None:
    """First address and the one after the last, of what lies in host memory; None for other things."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.data_ptr(), value.data_ptr() + value.nbytes
    if isinstance(value, np.ndarray):
        start = int(value.__array_interface__["data"][0])
        return start, start + value.nbytes
    return None


@final
class _Path:
    """Reads a path step by step: through dictionaries, by number, and past a part that is None."""

    def __init__(self, path: str) -> None:
        self._parts = path.split(".")
        self._at_once = attrgetter(path) if _is_plain(path) else None

    def __call__(self, batch: Any) -> Any:
        if self._at_once is not None:
            try:
                return self._at_once(batch)
            except AttributeError:
                pass
        for part in self._parts:
            if batch is None:
                return None
            if isinstance(batch, Mapping):
                batch = batch[part] if part in batch else batch[int(part)] if part.isdigit() else batch[part]
            else:
                batch = batch[int(part)] if part.isdigit() else getattr(batch, part)
        return batch


def _is_plain(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def getter(name: Name) -> Get:
    """Reads a declared name from a batch. None where a part of its path is None."""
    if not isinstance(name, str):
        return name
    if name.startswith("not "):
        inner = getter(name.removeprefix("not "))
        return lambda batch: not inner(batch)
    return attrgetter(name) if name.isidentifier() else _Path(name)


@final
@attrs.frozen(eq=False)
class Pair:
    """Two columns that are one value: a name for reports, both sides, and whether the host side may be larger."""

    name: str
    host: str
    device: str
    bound: bool


@final
@attrs.frozen(eq=False)
class Rows:
    """Entries of every column in use at one moment, on the host, and whose they are.

    Attributes:
        requests: of the rows, kept alive: what is known by identity stays the only one of its number.
        keys: of the requests; None is a row without one.
        columns: arrays, or lists of Python objects.
    """

    requests: list[Any]
    keys: list[Hashable]
    columns: dict[str, Array | list[Any]]

    def in_both(self, now: "Rows") -> tuple[Any, Any] | None:
        """The rows of the requests that are in `now` too, here and there: slices or row numbers; None if none is."""
        then, keys = self.keys, now.keys
        n, m = len(then), len(keys)
        if n and None not in then and n <= m:  # as they were, or joined by others
            for first in {0, m - n}:
                if keys[first : first + n] == then:
                    return slice(None), slice(first, first + n)
        index = dict(zip(then, range(n), strict=True))
        index.pop(None, None)
        found = list(map(index.get, keys))
        if None in found:
            new = [row for row, at in enumerate(found) if at is not None]
            return (np.array([found[row] for row in new]), np.array(new)) if new else None
        return (np.array(found), slice(None)) if found else None


def _picked(columns: Mapping[str, Array | list[Any]], rows: Any) -> dict[str, Any]:
    """Some rows of each column, by a slice or by their numbers."""
    listed = [] if isinstance(rows, slice) else rows.tolist()
    return {
        name: one[rows]
        if isinstance(rows, slice) or isinstance(one, np.ndarray)
        else list(map(one.__getitem__, listed))
        for name, one in columns.items()
    }


Report: TypeAlias = Callable[[BatchStateError], None]
"""Takes what was found. It raises it, or keeps it and returns, and the next question is asked."""


@final
@attrs.define(eq=False)  # not frozen: each hooked call makes one, and that takes half the time
class Place:
    """Where questions are asked: whose object, after or before which of its operations, in which step."""

    object: str
    operation: str
    step: int | None
    report: Report

    def ask(
        self,
        invariant: Invariant[...],
        *args: Any,
        column: str,
        remedy: str,
        names: Sequence[Any] = (),
        **options: Any,
    ) -> bool:
        """Asks an invariant, counted, and reports in words that make sense for a class that others wrote."""
        times_checked[invariant.code] += 1
        breach = invariant.question(*args, **options)
        if breach is None:
            return True
        where: Where = {"object": self.object, "operation": self.operation, "column": column}
        if self.step is not None:
            where["step"] = self.step
        if breach.row is not None and breach.row < len(names):
            breach = attrs.evolve(breach, problem=f"{breach.problem}: request {_shown(names[breach.row])}")
        self.report(Violation(invariant.code, attrs.evolve(breach, column=column), remedy=remedy, where=where))
        return False


def rows_of(value: Any) -> int:
    """How many rows a column has."""
    return int(value.shape[0]) if hasattr(value, "shape") else len(value)


def _truth(get: Get) -> Get:
    return lambda batch: bool(get(batch))


_NAME = "a name or a function of the batch"


def _is_name(value: object) -> bool:
    return isinstance(value, str) or callable(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _is_flat(pairs: object) -> bool:
    """Whether it is one pair, where a list of pairs is meant."""
    return isinstance(pairs, tuple) and pairs != () and all(isinstance(one, str) for one in pairs)


def _failed(argument: str, error: Exception) -> DeclarationError:
    return DeclarationError(f"{argument}: {type(error).__name__}: {error}", value=argument)


@contextlib.contextmanager
def _blaming(argument: str) -> Iterator[None]:
    """Says which argument of the declaration failed. What happens at `cheap` does the same without a call."""
    try:
        yield
    except BatchStateError:
        raise
    except Exception as error:
        raise _failed(argument, error) from error


@final
class Declaration:
    """Columns of a class, and how they belong together. Made by `watch`, whose arguments it has."""

    def __init__(
        self,
        name: str,
        *,
        num_rows: Name,
        pairs: Iterable[Sequence[Any]] = (),
        rows: Iterable[Name] | Mapping[str, Get] = (),
        key: Name | None = None,
        when: Mapping[str, Name] | None = None,
        upto: Mapping[str, Name] | None = None,
        buffers: bool = False,
        indices: Mapping[str, Name | None] | None = None,
        derived: Mapping[str, Get] | None = None,
        implied: Mapping[str, Get] | None = None,
        moves: Collection[str] = (),
        adds: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.name = name
        self._refuse("num_rows", num_rows, _is_name(num_rows), _NAME)
        self._refuse("key", key, key is None or _is_name(key), _NAME)
        self._refuse("buffers", buffers, type(buffers) is bool, "True or False")
        self._refuse("pairs", pairs, _is_list(pairs) and not _is_flat(pairs), "a list of pairs: pairs=[(host, device)]")
        self._refuse("rows", rows, _is_list(rows), "a list of columns, or a dictionary from label to function")
        self._refuse_map("when", when, _is_name, _NAME)
        self._refuse_map("upto", upto, _is_name, _NAME)
        self._refuse_map("indices", indices, lambda one: one is None or _is_name(one), f"{_NAME}, or None")
        self._refuse_map("derived", derived, callable, "a function of the batch")
        self._refuse_map("implied", implied, callable, "a function of the batch")
        self._refuse_map("adds", adds, lambda one: isinstance(one, Mapping), "a dictionary from column to number")
        self.buffers = buffers
        self.moves = frozenset(moves)
        self.adds = {method: dict(columns) for method, columns in (adds or {}).items()}
        self.columns: dict[str, Get] = {}
        self.pairs = [self._pair(pair) for pair in pairs]
        for one in list(rows.items()) if isinstance(rows, Mapping) else list(rows):
            self._column(one)
        self._counts = {counts for counts in (upto or {}).values() if counts in self.columns}
        self.pairs.sort(key=lambda pair: not self._counts & {pair.host, pair.device})
        self.columns = {
            name: self.columns[name] for name in sorted(self.columns, key=lambda one: one not in self._counts)
        }
        self._named = {name: get for name, get in self.columns.items() if isinstance(get, attrgetter | _Path)}
        plain = [name for name in self._named if _is_plain(name)]
        self._at_once = attrgetter(*plain) if 1 < len(plain) == len(self._named) else None
        self.num_rows = getter(num_rows)
        self.key = None if key is None else getter(key)
        self.when = {name: _truth(getter(condition)) for name, condition in (when or {}).items()}
        self.upto = {name: getter(counts) for name, counts in (upto or {}).items()}
        self.indices = {
            name: (getter(name), flags if flags is None else getter(flags)) for name, flags in (indices or {}).items()
        }
        self.derived = [(name, getter(name), want) for name, want in (derived or {}).items()]
        self.implied = [(name, getter(name), want) for name, want in (implied or {}).items()]
        if not (self.columns or self.derived or self.implied or self.indices):
            raise ArgumentError(
                f"watch of {self.name}: no column is declared",
                value=None,
                remedy="name columns in `pairs`, `rows`, `derived`, `implied` or `indices`",
            )
        self.dtypes: dict[str, Any] = {}
        self._turn = self._calls = 0
        self._refuse_unknown()

    def __repr__(self) -> str:
        return f"Declaration({self.name!r}, {len(self.columns)} columns, {len(self.pairs)} pairs)"

    def _refuse(self, argument: str, value: object, right: bool, expected: str) -> None:
        if not right:
            raise ArgumentError(
                f"watch of {self.name}: `{argument}` is {value!r}, expected {expected}",
                value=value,
                remedy=f"pass {expected}",
            )

    def _refuse_map(self, argument: str, value: object, right: Callable[[Any], bool], expected: str) -> None:
        known = value is None or isinstance(value, Mapping)
        self._refuse(argument, value, known, f"a dictionary from a name to {expected}")
        for name, one in value.items() if isinstance(value, Mapping) else ():
            self._refuse(f"{argument}[{name!r}]", one, isinstance(name, str) and right(one), expected)

    def _column(self, name: Any) -> str:
        if isinstance(name, str):
            self.columns[name] = getter(name)
            return name
        if isinstance(name, tuple) and len(name) == 2 and isinstance(name[0], str) and callable(name[1]):
            self.columns[name[0]] = name[1]
            return name[0]
        if callable(name):
            label = getattr(name, "__name__", "column")
            if label == "<lambda>":
                label = f"column {len(self.columns)}"
            self.columns[label] = name
            return label
        raise ArgumentError(
            f"watch of {self.name}: expected the name of a column or a function, got {name!r}",
            value=name,
            remedy="name an attribute ('seq_lens', 'sampling.top_k'), or pass a function of the batch",
        )

    def _pair(self, pair: Any) -> Pair:
        parts = tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else ()
        if len(parts) == 3 and parts[2] not in ("exact", "upper_bound"):
            raise ArgumentError(
                f"watch of {self.name}: expected a pair with 'exact' or 'upper_bound' in its third place, got {pair!r}",
                value=pair,
                remedy=one_of(("exact", "upper_bound"), parts[2]),
            )
        if len(parts) not in (2, 3):
            raise ArgumentError(
                f"watch of {self.name}: expected a pair (host, device) or (host, device, 'upper_bound'), got {pair!r}",
                value=pair,
                remedy="name the host side first",
            )
        host, device = self._column(parts[0]), self._column(parts[1])
        return Pair(f"{host} / {device}", host, device, parts[2:] == ("upper_bound",))

    def _refuse_unknown(self) -> None:
        for what, names in (("when", self.when), ("upto", self.upto)):
            unknown = sorted(set(names) - set(self.columns))
            if unknown:
                raise ArgumentError(
                    f"watch of {self.name}: {', '.join(unknown)} in `{what}`, and not in `pairs` or `rows`",
                    value=unknown,
                    remedy="name columns of `pairs` or of `rows`",
                )
        for method, columns in self.adds.items():
            unknown = sorted(set(columns) - set(self.columns))
            if unknown:
                raise ArgumentError(
                    f"watch of {self.name}: `adds` of {method!r} names {', '.join(unknown)}, not in `pairs` or `rows`",
                    value=unknown,
                    remedy="name columns of `pairs` or of `rows`",
                )
        if (self.moves or self.adds) and self.key is None:
            raise ArgumentError(
                f"watch of {self.name}: `moves` or `adds` without `key`",
                value=None,
                remedy="name the column that says whose each row is, as the list of requests or of their ids",
            )

    # Reading

    def count(self, batch: Any) -> int:
        """How many requests the batch has."""
        number: Any = None
        try:
            number = self.num_rows(batch)
            return int(number() if callable(number) else number)
        except Exception as error:
            if isinstance(number, list | tuple | dict):
                raise DeclarationError(
                    f"num_rows: expected a number, got a {type(number).__name__}; its length is "
                    "`num_rows=lambda batch: len(...)`",
                    value="num_rows",
                ) from error
            raise _failed("num_rows", error) from error

    def uses(self, name: str, batch: Any) -> bool:
        """Whether the condition of a column, if it has one, holds."""
        condition = self.when.get(name)
        if condition is None:
            return True
        try:
            return bool(condition(batch))
        except Exception as error:
            raise _failed(f"when[{name!r}]", error) from error

    def key_list(self, batch: Any) -> list[Hashable]:
        """Whose each row is: ids as they are, other objects by identity; None is a row without a request."""
        return _keys(self._requests(batch))

    def _requests(self, batch: Any) -> list[Any]:
        if self.key is None:
            return []
        try:
            value = self.key(batch)
            return list(value.tolist() if hasattr(value, "tolist") else value)
        except BatchStateError:
            raise
        except Exception as error:
            raise _failed("key", error) from error

    def snapshot(
        self, batch: Any, num_rows: int | None = None, *, names: Collection[str] | None = None, copied: bool = True
    ) -> Rows:
        """The columns in use, of `num_rows` rows (by default of as many as there are keys, or as the batch says).

        Of `names` alone, if they are given; with `copied` in memory of their own.
        """
        requests = self._requests(batch)
        n = num_rows if num_rows is not None else len(requests) if self.key is not None else self.count(batch)
        found = {}
        for name, get in self.columns.items():
            if names is not None and name not in names:
                continue
            try:
                value = get(batch)
                if value is None or not self.uses(name, batch):
                    continue
                if isinstance(value, Mapping) or rows_of(value) >= n:
                    entries = self._read(name, value, batch, n)
                    found[name] = copy_of(entries) if copied else entries
            except BatchStateError:
                raise
            except Exception as error:
                raise _failed(f"column {name!r}", error) from error
        del requests[n:]
        return Rows(requests, _keys(requests), found)

    def columns_of(self, batch: Any, num_rows: int) -> dict[str, Snapshot]:
        """The columns in use, each with its dtype, in memory of their own."""
        found = self.snapshot(batch, num_rows).columns
        return {name: Snapshot(_dtype_of(self.columns[name](batch)), _array(one)) for name, one in found.items()}

    def _read(self, name: str, value: Any, batch: Any, n: int) -> Array | list[Any]:
        entries = entries_of(value, n)
        if name in self.upto and n:
            with _blaming(f"upto[{name!r}]"):
                counts = np.asarray(entries_of(self.upto[name](batch), n)).astype(np.int64)
                entries = _array(entries)
                inside = np.arange(entries.shape[1]) < counts[:, None]
                entries = np.where(inside, entries, np.zeros_like(entries[:1, :1]))
        return entries

    def advanced(self, row: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
        """The entries of a row that are known behind a method that adds."""
        return {name: entry + added.get(name, 0) for name, entry in row.items() if name in added}

    # Questions

    def check(self, batch: Any, place: Place, *, full: bool) -> None:
        """Asks everything of a batch as it stands.

        Args:
            batch: an object of the class.
            place: for reports.
            full: read columns on the device too. Else only what the host holds, and now and then one of the derived
                values, in turn: in each fourth call, in larger batches less often.
        """
        n = self.count(batch)
        if not n:
            return  # engines leave an empty batch as it was, since they never read it
        self._check_lengths(batch, n, place, full=full)
        if full:
            for name, get, want in self.derived:
                self._check_derived(name, get, want, batch, place)
            for name, get, want in self.implied:
                self._check_implied(name, get, want, batch, place)
            for name, (get, flags) in self.indices.items():
                self._check_indices(name, get, flags, batch, n, place)
            for pair, host, device in self.sides(batch, n):
                self._check_pair(pair, host, device, batch, n, place)
        elif self.derived or self.implied:
            self._calls += 1
            if self._calls < max(4, n // ASK_DERIVED):
                return
            turn, self._calls = self._turn, 0
            self._turn = (turn + 1) % (len(self.derived) + len(self.implied))
            if turn < len(self.derived):
                if not isinstance(self.derived[turn][1](batch), torch.Tensor):  # it may lie on the device
                    self._check_derived(*self.derived[turn], batch, place)
            else:
                self._check_implied(*self.implied[turn - len(self.derived)], batch, place)

    def _values(self, batch: Any, *, full: bool) -> Iterable[tuple[str, Any]]:
        """Columns, those with a path by one call where each is an attribute that is there; functions only if `full`."""
        if not full and self._at_once is not None:
            try:
                return zip(self._named, self._at_once(batch), strict=True)
            except AttributeError:  # of a part that is None
                pass
        found, name = [], ""
        try:
            for name, get in (self.columns if full else self._named).items():
                found.append((name, get(batch)))
        except Exception as error:
            raise _failed(f"column {name!r}", error) from error
        return found

    def _check_lengths(self, batch: Any, n: int, place: Place, *, full: bool) -> None:
        dtypes, buffers, tensor, array = self.dtypes, self.buffers, torch.Tensor, np.ndarray
        for name, value in self._values(batch, full=full):
            kind = type(value)
            if kind is tensor:
                rows = value.size(0) if value.dim() else -1
            elif kind is array:
                rows = value.shape[0] if value.ndim else -1
            elif value is None or (kind is list and len(value) == n):
                continue
            else:
                rows = -1
            if not (rows == n or (buffers and rows > n)) or dtypes.get(name) is not value.dtype:
                self._check_column(name, value, n, place)

    def _check_column(self, name: str, value: Any, n: int, place: Place) -> None:
        """Asks of one column what `_check_lengths` sees at once of those that are as they should be."""
        if isinstance(value, Mapping):
            if value and max(value) >= n:
                self._check_range(name, np.array(sorted(value)), n, place)
            return
        has_dtype = isinstance(value, torch.Tensor | np.ndarray)
        try:
            rows = len(value) if not has_dtype else value.shape[0] if value.ndim else -1
        except TypeError as error:
            raise _failed(f"column {name!r}", error) from error
        if rows != n and not (has_dtype and self.buffers and rows > n):
            self._report_length(name, n, rows, place, first=has_dtype and name not in self.dtypes)
        elif has_dtype and value.dtype != (known := self.dtypes.setdefault(name, value.dtype)):
            place.ask(
                invariants.row_kept,
                np.array([str(known)], object),
                np.array([str(value.dtype)], object),
                what="dtype",
                column=name,
                remedy=f"{place.operation} changes the dtype of {name!r}: kernels that take raw memory then read other "
                f"numbers; give an empty {name!r} its dtype too",
            )

    def _report_length(self, name: str, n: int, rows: int, place: Place, *, first: bool = False) -> None:
        hint = "; or, if columns are buffers longer than the batch, declare buffers=True" if first and rows > n else ""
        place.ask(
            invariants.row_count,
            n,
            {name: rows},
            column=name,
            remedy=f"look in {_method(place)} for the line that treats {name!r}: every column moves with the requests"
            f"{hint}",
        )

    def _check_range(self, name: str, indices: Array, n: int, place: Place) -> None:
        place.ask(
            invariants.slot_out_of_range,
            indices,
            n,
            column=name,
            remedy=f"{name!r} names rows of this batch of {n}: renumber it in {_method(place)} as rows move",
        )

    def _check_derived(self, name: str, get: Get, want: Get, batch: Any, place: Place) -> None:
        try:
            found = get(batch)
            if found is None:
                return
            expected = want(batch)
            holds = _equal(found, expected)
        except Exception as error:
            raise _failed(f"derived[{name!r}]", error) from error
        if holds:
            times_checked[_DERIVED_STALE] += 1
            return
        place.ask(
            invariants.derived_stale,
            np.array(True),
            lambda _: (f"{name!r} is not what follows from the rows", expected, found),
            column=name,
            remedy=f"{_method(place)} changes rows: let it compute {name!r} again, or set it to None",
        )

    def _check_implied(self, name: str, get: Get, want: Get, batch: Any, place: Place) -> None:
        try:
            found = get(batch)
            if found is None:
                return
            needed = True if found is True else want(batch)  # a flag that is set is never too little
            holds = bool(found >= needed)
        except Exception as error:
            raise _failed(f"implied[{name!r}]", error) from error
        if holds:
            times_checked[_DERIVED_STALE] += 1
            return
        place.ask(
            invariants.derived_stale,
            np.array(True),
            lambda _: (f"{name!r} leaves out what the rows need", f"at least {needed}", found),
            column=name,
            remedy=f"{_method(place)} lets a request in that needs {name!r}: combine it with that of the others",
        )

    def _check_indices(self, name: str, get: Get, flags: Get | None, batch: Any, n: int, place: Place) -> None:
        try:
            value, chosen = get(batch), None if flags is None else flags(batch)
            if value is None and chosen is None:
                return
            found = np.asarray(entries_of(value) if value is not None else (), np.int64).reshape(-1)
            expected = None if chosen is None else [row for row, flag in enumerate(entries_of(chosen, n)) if flag]
        except BatchStateError:
            raise
        except Exception as error:
            raise _failed(f"indices[{name!r}]", error) from error
        if value is not None:
            self._check_range(name, found, n, place)
        if expected is None:
            return
        if found.tolist() == expected:
            times_checked[_DERIVED_STALE] += 1
            return
        place.ask(
            invariants.derived_stale,
            np.array(True),
            lambda _: (f"{name!r} names other rows than those that are meant", expected, found.tolist()),
            column=name,
            remedy=f"row numbers change when rows move: make {name!r} anew in {_method(place)}, or shift it on a merge",
        )

    def sides(self, batch: Any, n: int) -> Iterator[tuple[Pair, Any, Any]]:
        """Both sides of each pair in use. A side that is too short is left out: ROW_COUNT says so."""
        for pair in self.pairs:
            try:
                host, device = self.columns[pair.host](batch), self.columns[pair.device](batch)
                if (
                    host is None
                    or device is None
                    or not (self.uses(pair.host, batch) and self.uses(pair.device, batch))
                ):
                    continue
                whole = rows_of(host) >= n and rows_of(device) >= n
            except DeclarationError:  # of `when`
                raise
            except Exception as error:
                raise _failed(f"pair {pair.name}", error) from error
            if whole:
                yield pair, host, device

    def _check_pair(self, pair: Pair, host: Any, device: Any, batch: Any, n: int, place: Place) -> None:
        ranges = address_range(host), address_range(device)
        if ranges[0] is not None and ranges[1] is not None:
            place.ask(
                invariants.mirror_aliased,
                *ranges,
                column=pair.name,
                remedy="one memory cannot disagree with itself: on a CPU make the device side with `.clone()`",
            )
        self.compare(pair, self._read(pair.host, host, batch, n), self._read(pair.device, device, batch, n), place)

    def compare(self, pair: Pair, host: Array | list[Any], device: Array | list[Any], place: Place) -> None:
        """Asks whether two sides agree, by value: a list or an int32 side may stand beside an int64 one."""
        right = _array(device)
        if isinstance(host, list):
            left = np.array(host, dtype=right.dtype).reshape(right.shape[:1] if not host else -1, *right.shape[1:])
        else:
            left = host
            if left.dtype != right.dtype:
                if left.dtype.kind in "iu" and right.dtype.kind in "iu":
                    left, right = left.astype(np.int64), right.astype(np.int64)
                elif left.dtype.kind == "f" and right.dtype.kind == "f":
                    left = left.astype(right.dtype)
        invariant: Invariant[...] = invariants.mirror_bound if pair.bound else invariants.mirror_equal
        if _alike(left, right):
            times_checked[invariant.code] += 1
            return
        place.ask(
            invariant,
            left,
            right,
            column=pair.name,
            remedy=f"one side was written alone: look in {_method(place)}, and at what ran since the last check, for a "
            f"line that changes {pair.host!r} or {pair.device!r} without the other",
        )

    def check_kept(
        self, before: list[Rows], batch: Any, added: Mapping[str, int] | None, place: Place, *, whole: bool
    ) -> None:
        """Asks whether each request of a batch has what it had before, plus what was declared to be added.

        Args:
            before: the batches that went in.
            batch: the batch that came out.
            added: column -> number; only these columns are compared. None for an operation that only moves rows.
            place: for reports.
            whole: whether both sides of a pair have moved by now; else the device side is left alone.
        """
        n = self.count(batch)
        if not n:
            return
        after = self.snapshot(batch, n, names=added, copied=False)
        behind = frozenset() if whole else {pair.device for pair in self.pairs}
        compared = [name for name in after.columns if name not in behind]
        for part in before:
            rows = part.in_both(after)
            if rows is None:
                continue
            new = _picked({name: after.columns[name] for name in compared if name in part.columns}, rows[1])
            old = _picked({name: part.columns[name] for name in new}, rows[0])
            for name, found in new.items():
                expected, plus = old[name], 0 if added is None else added[name]
                if plus:
                    expected = [one + plus for one in expected] if isinstance(expected, list) else expected + plus
                if _alike(expected, found) or _alike(expected, found := copy_of(found)):
                    times_checked[_ROW_KEPT] += 1
                    continue
                place.ask(
                    invariants.row_kept,
                    _array(expected),
                    _array(found),
                    rows=np.arange(n)[rows[1]],
                    names=after.requests,
                    column=name,
                    remedy=f"{_method(place)} {'advances' if plus else 'moves'} rows: let it treat {name!r} as it "
                    "treats the other columns",
                )


def _alike(expected: Array | list[Any], found: Array | list[Any]) -> bool:
    """Whether two columns are equal, bit by bit or by `==`: what nearly always holds, without a report."""
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return expected.dtype == found.dtype and expected.shape == found.shape and expected.tobytes() == found.tobytes()
    try:
        return isinstance(expected, list) and isinstance(found, list) and expected == found
    except (RuntimeError, ValueError):  # of tensors or arrays among the entries
        return False


def _keys(requests: list[Any]) -> list[Hashable]:
    kinds = set(map(type, requests))
    if len(kinds) == 1 and not issubclass(kinds.pop(), (*_PLAIN_KEYS, type(None))):
        return list(map(id, requests))
    return [one if one is None or isinstance(one, _PLAIN_KEYS) else id(one) for one in requests]


def _method(place: Place) -> str:
    return f"`{place.object}.{place.operation.rpartition(' ')[2]}`"


def _shown(request: Any) -> str:
    """A request in a report: its id, as SGLang or vLLM calls it."""
    if isinstance(request, _PLAIN_KEYS):
        return repr(request)
    return repr(getattr(request, "rid", getattr(request, "request_id", type(request).__name__)))


def _equal(found: Any, expected: Any) -> bool:
    if hasattr(found, "tolist"):
        found = found.tolist()
    if hasattr(expected, "tolist"):
        expected = expected.tolist()
    return bool(found == expected)
