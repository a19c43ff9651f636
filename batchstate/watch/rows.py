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
from batchstate.violations import Violation, Where

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

_PLAIN_KEYS = (str, int, bytes, tuple)
"""Types of request ids. Other objects are known by identity."""

ASK_DERIVED = 4
"""Calls at `cheap` for one question about derived values: each goes through the requests in Python."""


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
        if isinstance(value, torch.Tensor):
            part = (value if num_rows is None else value[:num_rows]).detach()
            readable = part.float() if value.dtype in _ONLY_TORCH else part
            return cls(str(value.dtype).removeprefix("torch."), readable.cpu().numpy())
        if isinstance(value, np.ndarray):
            return cls(str(value.dtype), value if num_rows is None else value[:num_rows])
        if isinstance(value, Mapping):
            entries = [value.get(row) for row in range(num_rows or 0)]
        else:
            entries = list(value if num_rows is None else value[:num_rows])
        objects = np.empty(len(entries), dtype=object)
        objects[:] = entries
        return cls("object", objects)

    def copied(self) -> Self:
        """The same in memory of its own; of lists, dictionaries, sets and tensors among the entries too."""
        values = self.values.copy()
        if values.dtype.kind == "O":
            kinds = set(map(type, values))
            mutable = any(issubclass(kind, (*_COPIED, torch.Tensor, np.ndarray)) for kind in kinds)
            for row, entry in enumerate(values if mutable else ()):
                if isinstance(entry, _COPIED):
                    values[row] = entry.copy()
                elif isinstance(entry, torch.Tensor | np.ndarray):
                    values[row] = entry.tolist()
        return attrs.evolve(self, values=values)


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
    """Entries of every column in use at one moment, and whose they are, on the host and in memory of its own.

    `names` has the ids of requests, by row, for reports.
    """

    keys: dict[Hashable, int]
    columns: dict[str, Snapshot]
    names: dict[int, str]


Report: TypeAlias = Callable[[BatchStateError], None]
"""Takes what was found. It raises it, or keeps it and returns, and the next question is asked."""


@final
@attrs.frozen(eq=False)
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
        names: Mapping[int, str] | None = None,
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
        if names and breach.row is not None and breach.row in names:
            breach = attrs.evolve(breach, problem=f"{breach.problem}: request {names[breach.row]}")
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
                remedy=f"correct `{argument}`",
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
        try:
            number = self.num_rows(batch)
            return int(number() if callable(number) else number)
        except Exception as error:
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
        if self.key is None:
            return []
        return [one if one is None or isinstance(one, _PLAIN_KEYS) else id(one) for one in self._requests(batch)]

    def _requests(self, batch: Any) -> list[Any]:
        if self.key is None:
            return []
        with _blaming("key"):
            value = self.key(batch)
            return list(value.tolist() if hasattr(value, "tolist") else value)

    def snapshot(self, batch: Any, num_rows: int | None = None) -> Rows:
        """The columns in use, of `num_rows` rows (by default of as many as there are keys, or as the batch says)."""
        keys = self.key_list(batch)
        n = num_rows if num_rows is not None else len(keys) if self.key is not None else self.count(batch)
        found = {}
        for name, get in self.columns.items():
            with _blaming(f"column {name!r}"):
                value = get(batch)
                if value is None or not self.uses(name, batch):
                    continue
                if isinstance(value, Mapping) or rows_of(value) >= n:
                    found[name] = self._read(name, value, batch, n).copied()
        names = {row: _shown(one) for row, one in enumerate(self._requests(batch)[:n]) if one is not None}
        return Rows({key: row for row, key in enumerate(keys[:n]) if key is not None}, found, names)

    def _read(self, name: str, value: Any, batch: Any, n: int) -> Snapshot:
        with _blaming(f"column {name!r}"):
            column = Snapshot.of(value, n)
        if name in self.upto and n:
            with _blaming(f"upto[{name!r}]"):
                counts = np.asarray(Snapshot.of(self.upto[name](batch), n).values).astype(np.int64)
                inside = np.arange(column.values.shape[1]) < counts[:, None]
                nothing = np.zeros_like(column.values[:1, :1])
                column = attrs.evolve(column, values=np.where(inside, column.values, nothing))
        return column

    def advanced(self, row: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
        """The entries of a row that are known behind a method that adds."""
        return {name: entry + added.get(name, 0) for name, entry in row.items() if name in added}

    # Questions

    def check(self, batch: Any, place: Place, *, full: bool) -> None:
        """Asks everything of a batch as it stands.

        Args:
            batch: an object of the class.
            place: for reports.
            full: read columns on the device too. Else only what the host holds, and in each fourth call one of the
                derived values, in turn.
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
            if self._calls % ASK_DERIVED:
                return
            turn = self._turn
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
        dtypes, buffers = self.dtypes, self.buffers
        for name, value in self._values(batch, full=full):
            if value is None:
                continue
            if isinstance(value, torch.Tensor):
                rows = value.size(0) if value.dim() else -1
            elif isinstance(value, np.ndarray):
                rows = value.shape[0] if value.ndim else -1
            elif isinstance(value, Mapping):
                if value and max(value) >= n:
                    self._check_range(name, np.array(sorted(value)), n, place)
                continue
            else:
                try:
                    rows = len(value)
                except TypeError as error:
                    raise _failed(f"column {name!r}", error) from error
                if rows != n:
                    self._report_length(name, n, rows, place)
                continue
            if rows != n and (rows < n or not buffers):
                self._report_length(name, n, rows, place, first=name not in dtypes)
            elif (known := dtypes.get(name)) is not value.dtype:
                if known is None:
                    dtypes[name] = value.dtype
                elif known != value.dtype:
                    place.ask(
                        invariants.row_kept,
                        np.array([str(known)], object),
                        np.array([str(value.dtype)], object),
                        what="dtype",
                        column=name,
                        remedy=f"{place.operation} changes the dtype of {name!r}: kernels that take raw memory then "
                        f"read other numbers; give an empty {name!r} its dtype too",
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
            stale = not _equal(found, expected)
        except Exception as error:
            raise _failed(f"derived[{name!r}]", error) from error
        place.ask(
            invariants.derived_stale,
            np.array(stale),
            lambda _: (f"{name!r} is not what follows from the rows", expected, found),
            column=name,
            remedy=f"{_method(place)} changes rows: let it compute {name!r} again, or set it to None",
        )

    def _check_implied(self, name: str, get: Get, want: Get, batch: Any, place: Place) -> None:
        try:
            found = get(batch)
            if found is None:
                return
            needed = want(batch)
            stale = not found >= needed
        except Exception as error:
            raise _failed(f"implied[{name!r}]", error) from error
        place.ask(
            invariants.derived_stale,
            np.array(stale),
            lambda _: (f"{name!r} leaves out what the rows need", f"at least {needed}", found),
            column=name,
            remedy=f"{_method(place)} lets a request in that needs {name!r}: combine it with that of the others",
        )

    def _check_indices(self, name: str, get: Get, flags: Get | None, batch: Any, n: int, place: Place) -> None:
        with _blaming(f"indices[{name!r}]"):
            value, chosen = get(batch), None if flags is None else flags(batch)
            found = np.empty(0, np.int64)
            if value is not None:
                found = np.asarray(Snapshot.of(value).values).astype(np.int64).reshape(-1)
            expected = None if chosen is None else np.flatnonzero(Snapshot.of(chosen, n).values)
        if value is not None:
            self._check_range(name, found, n, place)
        if expected is None:
            return
        place.ask(
            invariants.derived_stale,
            np.array(found.tolist() != expected.tolist()),
            lambda _: (f"{name!r} names other rows than those that are meant", expected.tolist(), found.tolist()),
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

    def compare(self, pair: Pair, host: Snapshot, device: Snapshot, place: Place) -> None:
        """Asks whether two sides agree, by value: a list or an int32 side may stand beside an int64 one."""
        left, right = host.values, device.values
        if left.dtype.kind == "O":
            left = np.array(left.tolist(), dtype=right.dtype).reshape(
                right.shape[:1] if not len(left) else -1, *right.shape[1:]
            )
        elif left.dtype.kind in "iu" and right.dtype.kind in "iu":
            left, right = left.astype(np.int64), right.astype(np.int64)
        elif left.dtype.kind == "f" and right.dtype.kind == "f":
            left = left.astype(right.dtype)
        place.ask(
            invariants.mirror_bound if pair.bound else invariants.mirror_equal,
            left,
            right,
            column=pair.name,
            remedy=f"one side was written alone: look in {_method(place)}, and at what ran since the last check, for a "
            f"line that changes {pair.host!r} or {pair.device!r} without the other",
        )

    def check_moved(
        self, before: list[Rows], batch: Any, added: Mapping[str, int] | None, place: Place, *, whole: bool
    ) -> None:
        """`check_kept` of a batch as it stands."""
        if n := self.count(batch):
            self.check_kept(before, self.snapshot(batch, n), added, place, whole=whole)

    def check_kept(
        self, before: list[Rows], after: Rows, added: Mapping[str, int] | None, place: Place, *, whole: bool
    ) -> None:
        """Asks whether each request has what it had before, plus what was declared to be added.

        Args:
            before: the batches that went in.
            after: the batch that came out.
            added: column -> number; only these columns are compared. None for an operation that only moves rows.
            place: for reports.
            whole: whether both sides of a pair have moved by now; else the device side is left alone.
        """
        behind = frozenset() if whole else {pair.device for pair in self.pairs}
        for part in before:
            both = [(part.keys[key], row) for key, row in after.keys.items() if key in part.keys]
            if not both:
                continue
            old, new = np.array(both).T
            for name, now in after.columns.items():
                was = part.columns.get(name)
                if was is None or name in behind or (added is not None and name not in added):
                    continue
                plus = 0 if added is None else added[name]
                expected = was.values[old] + plus if plus else was.values[old]
                place.ask(
                    invariants.row_kept,
                    expected,
                    now.values[new],
                    rows=new,
                    names=after.names,
                    column=name,
                    remedy=f"{_method(place)} {'advances' if plus else 'moves'} rows: let it treat {name!r} as it "
                    "treats the other columns",
                )


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
