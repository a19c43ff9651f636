"""What is declared of a batch class, and the questions that follow from it.

A declaration names columns of an object that others wrote. A name is a path: each part between dots is an attribute,
the key of a dictionary or the number of an entry (`sampling_info.temperatures`, `block_table.0.num_blocks_per_row`).
Where a part is None, the column is not in use, and nothing is asked of it. A function of the batch does as well.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import torch

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError, one_of
from batchstate.invariants import Invariant, times_checked
from batchstate.violations import Code, Violation, Where
from batchstate.watch._requests import Kind, OverRequests, RequestAnswers
from batchstate.watch.snapshots import (
    PLAIN_KEYS,
    Array,
    Layout,
    Rows,
    Snapshot,
    address_range,
    alike,
    array_of,
    copy_of,
    dtype_of,
    entries_of,
    keys_of,
    picked,
    rows_of,
    without_tails,
)

Get: TypeAlias = Callable[[Any], Any]
Name: TypeAlias = str | Get

_DERIVED_STALE, _ROW_KEPT = Code.DERIVED_STALE, Code.ROW_KEPT

ASK_DERIVED = 8
"""Requests of a batch for each call at `cheap` without a question about derived values, and at least four calls: each
question goes through the requests in Python, so that the cost of a call does not grow with them. What follows from the
requests alone is one question together."""


@final
class _Path:
    """Reads a path step by step: through dictionaries, by number, and past a part that is None. Remembers the steps."""

    def __init__(self, path: str) -> None:
        self._parts = path.split(".")
        self._steps: list[Get] = [attrgetter(path)] if _is_plain(path) else []

    def __call__(self, batch: Any) -> Any:
        if self._steps:
            try:
                value = batch
                for step in self._steps:
                    value = step(value)
                return value
            except (AttributeError, LookupError, TypeError):  # of a part that is None, or another thing than before
                pass
        steps: list[Get] = []
        for part in self._parts:
            if batch is None:
                return None
            if isinstance(batch, Mapping):
                steps.append(itemgetter(int(part) if part.isdigit() and part not in batch else part))
            else:
                steps.append(itemgetter(int(part)) if part.isdigit() else attrgetter(part))
            batch = steps[-1](batch)
        self._steps = steps
        return batch


def _is_plain(path: str) -> bool:
    return all(part.isidentifier() for part in path.split("."))


def _reads(get: Get, path: str) -> bool:
    """Whether it reads the attributes of this path; an `attrgetter` that was given may read others."""
    return isinstance(get, _Path) or (isinstance(get, attrgetter) and repr(get) == repr(attrgetter(path)))


def _all_of(names: list[str]) -> Get | None:
    """Reads several attributes by one call; None if they are fewer than two, or one is more than an attribute."""
    return attrgetter(*names) if len(names) > 1 and all(map(_is_plain, names)) else None


def getter(name: Name) -> Get:
    """Reads a declared name from a batch. None where a part of its path is None."""
    if not isinstance(name, str):
        return name
    if name.startswith("not "):
        inner = getter(name.removeprefix("not "))
        return lambda batch: not inner(batch)
    return attrgetter(name) if name.isidentifier() else _Path(name)


@final
class _Reader:
    """Reads columns: what are attributes by one call, as long as no part of a path is None, the others one by one."""

    def __init__(self, columns: Mapping[str, Get]) -> None:
        plain = [name for name, get in columns.items() if _is_plain(name) and _reads(get, name)]
        self._at_once = _all_of(plain)
        if self._at_once is None:
            plain = []
        self._others = [(name, get) for name, get in columns.items() if name not in plain]
        self._plain = [(name, columns[name]) for name in plain]
        self.names = [*plain, *(name for name, _ in self._others)]
        self.layouts: dict[tuple[type, ...], Layout] = {}

    def read(self, batch: Any) -> Sequence[Any]:
        """The value of each of `names`."""
        others, name = self._others, ""
        rest: list[Any] = []
        found: Sequence[Any] | None = None
        if self._at_once is not None:
            try:
                found = self._at_once(batch)
            except AttributeError:  # of a part that is None
                others = self._plain + others
            if not others:
                return found or ()
        try:
            for name, get in others:  # noqa: B007 - said of the one that fails
                rest.append(get(batch))
        except Exception as error:
            raise _failed(f"column {name!r}", error) from error
        return rest if found is None else [*found, *rest]


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
class _Derived:
    """A value of the whole batch, what follows from its rows, and whether it may be larger than that."""

    name: str
    get: Get
    want: Get
    bound: bool


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
    since: bool = False
    """Whether calls before this one were not checked for the same."""
    compared: bool = False
    """Whether values were compared here: both sides of a pair, or rows with what they were."""

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


def _truth(get: Get) -> Get:
    return lambda batch: bool(get(batch))


_NAME = "a name of an attribute, or a function of the batch"


def _is_name(value: object) -> bool:
    return isinstance(value, str) or callable(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _is_flat(pairs: object) -> bool:
    """Whether it is one pair, where a list of pairs is meant."""
    return isinstance(pairs, tuple) and pairs != () and all(isinstance(one, str) for one in pairs)


def _failed(argument: str, error: Exception) -> DeclarationError:
    return DeclarationError(f"{argument}: {type(error).__name__}: {error}", argument)


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
        adds: Mapping[str, Mapping[Name, int]] | None = None,
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
        self.columns: dict[str, Get] = {}
        self._given: dict[str, Name] = {}
        self.pairs = [self._pair(pair) for pair in pairs]
        for one in list(rows.items()) if isinstance(rows, Mapping) else list(rows):
            self._column(one)
        self._usual = frozenset(self.columns)
        self.adds = {
            method: {one if isinstance(one, str) else self._column(one): number for one, number in columns.items()}
            for method, columns in (adds or {}).items()
        }
        upto = self._of_both_sides(upto or {})
        self._counts = {counts for counts in upto.values() if counts in self.columns}
        self.pairs.sort(key=lambda pair: not self._counts & {pair.host, pair.device})
        self.columns = {
            name: self.columns[name] for name in sorted(self.columns, key=lambda one: one not in self._counts)
        }
        self._named = {name: get for name, get in self.columns.items() if isinstance(get, attrgetter | _Path)}
        self._functions = {name: get for name, get in self.columns.items() if name not in self._named}
        self._paired = frozenset(name for pair in self.pairs for name in (pair.host, pair.device))
        self._read_all, self._read_named = self._reader_of(self._usual), _Reader(self._named)
        self._read_paired = self._reader_of(self._paired)
        self._read_added = {frozenset(columns): self._reader_of(columns) for columns in self.adds.values()}
        self.num_rows = getter(num_rows)
        self.key = None if key is None else getter(key)
        self.when = {name: _truth(getter(condition)) for name, condition in (when or {}).items()}
        self.upto = {name: getter(counts) for name, counts in upto.items()}
        self.indices = {
            name: (getter(name), flags if flags is None else getter(flags)) for name, flags in (indices or {}).items()
        }
        self.derived = [
            _Derived(name, getter(name), want, bound)
            for bound, wants in ((False, derived), (True, implied))
            for name, want in (wants or {}).items()
        ]
        self._by_request = [one for one in self.derived if isinstance(one.want, OverRequests)]
        self._by_batch = [one for one in self.derived if one not in self._by_request]
        self._answers = RequestAnswers([one.want for one in self.derived if isinstance(one.want, OverRequests)])
        self._in_turn = ([self._by_request] if self._by_request else []) + [[one] for one in self._by_batch]
        self._by_request_at_once = _all_of([one.name.removeprefix("not ") for one in self._by_request])
        if not (self.columns or self.derived or self.indices):
            problem = f"watch of {self.name}: no column is declared"
            raise ArgumentError(problem, None, "name columns in `pairs`, `rows`, `derived`, `implied` or `indices`")
        sides = {pair.device for pair in self.pairs}
        self._counted_on_device = frozenset(name for name, counts in upto.items() if counts in sides)
        self._unread: list[tuple[str, str | None, Name | None]] = [
            ("key", None, key),
            *((f"when[{name!r}]", name, condition) for name, condition in (when or {}).items()),
            *((f"upto[{name!r}]", name, counts) for name, counts in upto.items()),
            *((f"indices[{name!r}]", None, one) for name, flags in (indices or {}).items() for one in (name, flags)),
        ]
        self.dtypes: dict[str, Any] = {}
        self._turn = self._calls = 0
        self._last: tuple[weakref.ref[Any], Rows] | None = None
        self._refuse_unknown()

    def __repr__(self) -> str:
        return f"Declaration({self.name!r}, {len(self.columns)} columns, {len(self.pairs)} pairs)"

    def _refuse(self, argument: str, value: object, right: bool, expected: str) -> None:
        if not right:
            problem = f"watch of {self.name}: `{argument}` is {value!r}, expected {expected}"
            raise ArgumentError(problem, value, f"pass {expected}")

    def _refuse_map(self, argument: str, value: object, right: Callable[[Any], bool], expected: str) -> None:
        known = value is None or isinstance(value, Mapping)
        self._refuse(argument, value, known, f"a dictionary from a name to {expected}")
        for name, one in value.items() if isinstance(value, Mapping) else ():
            self._refuse(f"{argument}[{name!r}]", one, isinstance(name, str) and right(one), expected)

    def _column(self, name: Any) -> str:
        if isinstance(name, str):
            label, column = name, name
        elif isinstance(name, tuple) and len(name) == 2 and isinstance(name[0], str) and callable(name[1]):
            label, column = name
        elif callable(name):
            label, column = getattr(name, "__name__", "<lambda>"), name
            if label == "<lambda>":
                label = f"column {len(self.columns)}"
        else:
            problem = f"watch of {self.name}: expected the name of a column or a function, got {name!r}"
            remedy = "name an attribute ('seq_lens', 'sampling.top_k'), or pass a function of the batch"
            raise ArgumentError(problem, name, remedy)
        if self._given.setdefault(label, column) != column:
            problem = f"watch of {self.name}: two columns are called {label!r}: {self._given[label]!r} and {column!r}"
            raise ArgumentError(problem, label, "give a function a name of its own: ('label', function)")
        self.columns[label] = getter(column)
        return label

    def _pair(self, pair: Any) -> Pair:
        parts = tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else ()
        if len(parts) == 3 and parts[2] not in ("exact", "upper_bound"):
            raise ArgumentError(
                f"watch of {self.name}: expected a pair with 'exact' or 'upper_bound' in its third place, got {pair!r}",
                pair,
                one_of(("exact", "upper_bound"), parts[2]),
            )
        if len(parts) not in (2, 3):
            raise ArgumentError(
                f"watch of {self.name}: expected a pair (host, device) or (host, device, 'upper_bound'), got {pair!r}",
                pair,
                "name the host side first",
            )
        host, device = self._column(parts[0]), self._column(parts[1])
        return Pair(f"{host} / {device}", host, device, parts[2:] == ("upper_bound",))

    def _of_both_sides(self, upto: Mapping[str, Name]) -> dict[str, Name]:
        """A pair is one value: what counts of one side counts of the other, unless that has a count of its own."""
        found = dict(upto)
        for pair in self.pairs * len(self.pairs):  # a column may be in several
            for one, other in ((pair.host, pair.device), (pair.device, pair.host)):
                if one in found:
                    found.setdefault(other, found[one])
        return found

    def _refuse_unknown(self) -> None:
        for what, names in (("when", self.when), ("upto", self.upto)):
            unknown = sorted(set(names) - set(self.columns))
            if unknown:
                problem = f"watch of {self.name}: {', '.join(unknown)} in `{what}`, and not in `pairs` or `rows`"
                raise ArgumentError(problem, unknown, "name columns of `pairs` or of `rows`")
        for method, columns in self.adds.items():
            unknown = sorted(set(columns) - set(self.columns))
            if unknown:
                raise ArgumentError(
                    f"watch of {self.name}: `adds` of {method!r} names {', '.join(unknown)}, not in `pairs` or `rows`",
                    unknown,
                    "name columns of `pairs` or of `rows`",
                )
        if (self.moves or self.adds or self._by_request) and self.key is None:
            raise ArgumentError(
                f"watch of {self.name}: `{'moves` or `adds' if self.moves or self.adds else 'over_requests'}` without "
                "`key`",
                None,
                "name the column that says whose each row is, as the list of requests or of their ids",
            )

    # Reading

    def _reader_of(self, names: Collection[str]) -> "_Reader":
        return _Reader({name: get for name, get in self.columns.items() if name in names})

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
                    "num_rows",
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
        return keys_of(self.requests(batch))

    def requests(self, batch: Any, *, on_host: bool = False) -> list[Any]:
        """What `key` says of each row, in a list of its own; empty without `key`.

        Args:
            batch: an object of the class.
            on_host: do not read a `key` that lies on a device, which would wait; the list is then empty.
        """
        if self.key is None:
            return []
        try:
            value = self.key(batch)
            if on_host and isinstance(value, torch.Tensor) and not value.is_cpu:
                return []
            return list(value.tolist() if hasattr(value, "tolist") else value)
        except BatchStateError:
            raise
        except Exception as error:
            raise _failed("key", error) from error

    def snapshot(
        self,
        batch: Any,
        num_rows: int | None = None,
        *,
        names: Collection[str] | None = None,
        read: tuple[Rows, list[tuple[str, Any]]] | None = None,
    ) -> Rows:
        """The columns in use, of `num_rows` rows (by default of as many as there are keys, or as the batch says).

        Of `names` alone, if they are given; of what was `read`, if it was. They may be in the batch's memory.
        """
        requests, reader = self.requests(batch), self._read_all
        n = num_rows if num_rows is not None else len(requests) if self.key is not None else self.count(batch)
        del requests[n:]
        if read is None:
            if names is not None:
                reader = self._read_added.get(frozenset(names)) or self._reader_of(names)
            read = self._read_together(reader, reader.read(batch), n)
        rows, left = read
        rows.requests = requests
        when, upto, found = self.when, self.upto, rows.columns
        for name, value in left:
            if value is None or (names is not None and name not in names):
                continue
            try:
                if name in when and not self.uses(name, batch):
                    continue
                entries = entries_of(value, n)
                if len(entries) < n:
                    continue
                if name in upto and n:
                    with _blaming(f"upto[{name!r}]"):
                        entries = without_tails(entries, entries_of(self.upto[name](batch), n))
                found[name] = entries
            except BatchStateError:
                raise
            except Exception as error:
                raise _failed(f"column {name!r}", error) from error
        return rows

    def _read_together(self, reader: _Reader, values: Sequence[Any], n: int) -> tuple[Rows, list[tuple[str, Any]]]:
        """What can be read by few calls and is as long as the batch; and each other column, if it is in use."""
        names, types = reader.names, tuple(map(type, values))
        layout = reader.layouts.get(types)
        read = None if layout is None else layout.read(values, n)
        if layout is not None and read is not None:
            columns: dict[str, Any] = dict(zip(layout.arrays, read[0], strict=True))
            columns.update(zip(layout.lists, read[1], strict=True))
            return Rows(n, [], columns, layout, *read), [(names[at], values[at]) for at in layout.left]
        known, columns = self.dtypes, dict(zip(names, values, strict=True))
        if (
            not self.buffers
            and n
            and all(name in known for name, one in columns.items() if isinstance(one, torch.Tensor))
        ):
            special = {*self.when, *self.upto}
            special.update(name for name, one in columns.items() if known.get(name) is not getattr(one, "dtype", None))
            reader.layouts[types] = Layout(names, values, n, special)
        return Rows(n, [], {}), [(name, value) for name, value in columns.items() if value is not None]

    def before(self, batches: Iterable[Any], names: Collection[str] | None) -> list[Rows]:
        """What batches are before an operation, in memory of its own; of one without requests nothing else is read."""
        known = None if self._last is None else self._last[1]
        return [self.snapshot(batch, names=names).own(known) for batch in batches if self.requests(batch)]

    def columns_of(self, batch: Any, num_rows: int) -> dict[str, Snapshot]:
        """The columns in use, each with its dtype, in memory of their own."""
        found = self.snapshot(batch, num_rows, names=self.columns).own().entries()
        return {name: Snapshot(dtype_of(self.columns[name](batch)), array_of(one)) for name, one in found.items()}

    def counts_of(self, pair: Pair, batch: Any, n: int) -> Any:
        """How many entries of each row of a pair count: on the host, or as a tensor of the device; None for all."""
        name = pair.host
        if not self.upto or name not in self.upto:
            return None
        with _blaming(f"upto[{name!r}]"):
            counts = self.upto[name](batch)
            on_device = isinstance(counts, torch.Tensor) and (name in self._counted_on_device or not counts.is_cpu)
            return counts.detach()[:n] if on_device else np.array(entries_of(counts, n))

    def _read_names(self, batch: Any) -> None:
        """Looks once for each name that `cheap` never reads, so that a typo does not wait for `full`.

        Of a column that is not in use nothing is asked, and a property, which may read the device, is left alone.
        """
        unused = []
        for one in self._unread:
            argument, column, name = one
            if column in self._named and self.columns[column](batch) is None:
                unused.append(one)
            elif isinstance(name, str) and column not in self._functions:
                owner, _, last = name.removeprefix("not ").rpartition(".")
                with _blaming(argument):
                    of = getter(owner)(batch) if owner else batch
                    if not isinstance(getattr(type(of), last, None), property):
                        _Path(last)(of)
        self._unread = unused

    def advanced(self, row: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
        """The entries of a row that are known behind a method that adds."""
        return {name: entry + added.get(name, 0) for name, entry in row.items() if name in added}

    # Questions

    def check(
        self,
        batch: Any,
        place: Place,
        *,
        full: bool,
        names: Collection[str] | None = frozenset(),
        before: Sequence[Rows] = (),
    ) -> Rows | None:
        """Asks everything of a batch as it stands.

        Args:
            batch: an object of the class.
            place: for reports.
            full: read columns on the device too. Else only what the host holds, and now and then one of the derived
                values, in turn: in each fourth call, in larger batches less often.
            names: columns to return besides those of pairs, for `check_kept`; None for all.
            before: what the batches were that went into the operation.

        Returns:
            At `full` what was read, perhaps in the batch's memory; None of an empty batch.
        """
        n = self.count(batch)
        if not full or (not n and self._last_of(batch) is not None):
            self._last = None
        if not n:
            return None  # engines leave an empty batch as it was, since they never read it
        reader = self._read_all if full else self._read_named
        values = reader.read(batch)
        if not full:
            self._check_lengths(zip(reader.names, values, strict=True), n, place)
            if self._in_turn:
                self._calls += 1
                if self._calls >= 4 and self._calls >= n // ASK_DERIVED:
                    self._check_in_turn(batch, place)
            if self._unread:
                self._read_names(batch)
            return None
        if names is None:
            wanted, read = None, self._read_together(reader, values, n)
        else:
            wanted = self._paired.union(names) if names else self._paired
            read = Rows(n, [], {}), list(zip(reader.names, values, strict=True))
            if names and not self._usual.issuperset(names):
                apart = self._read_added[frozenset(names)]
                found = zip(apart.names, apart.read(batch), strict=True)
                read[1].extend([one for one in found if one[0] not in self._usual])
        self._check_lengths(read[1], n, place)
        for one in self._by_batch:
            self._check_derived(one, batch, place)
        now = self.snapshot(batch, n, names=wanted, read=read)
        now.made_of(before)
        if self._by_request:
            self._check_by_request(batch, place, now)
            last, kinds = self._last_of(batch), now.kinds or ()
            # Unchanged requests have the answers of the last call; with a row without a request nothing is kept.
            if names is not None and len(kinds) == len(now.requests) and (last is None or kinds is not last.kinds):
                self._remember(batch, Rows(n, now.requests, {}, kinds=now.kinds))
        for name, (get, flags) in self.indices.items():
            self._check_indices(name, get, flags, batch, n, place)
        raw = dict(zip(reader.names, values, strict=True))
        for pair in self.pairs:
            if pair.host in now.columns and pair.device in now.columns:
                self._check_aliased(pair, address_range(raw[pair.host]), address_range(raw[pair.device]), place)
                self.compare(pair, now.columns[pair.host], now.columns[pair.device], place, now.requests)
        return now

    def _check_lengths(self, columns: Iterable[tuple[str, Any]], n: int, place: Place) -> None:
        known, buffers, tensor, array = self.dtypes.get, self.buffers, torch.Tensor, np.ndarray
        for name, value in columns:
            kind = type(value)
            if kind is tensor or kind is array:
                shape = value.shape
                if value.dtype is known(name) and shape and (shape[0] == n or (buffers and shape[0] > n)):
                    continue
            elif value is None or (kind is list and len(value) == n):
                continue
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
            remedy=f"look in {suspects(place)} for the line that treats {name!r}: every column moves with the "
            f"requests; or `num_rows` is wrong{hint}",
        )

    def _check_range(self, name: str, indices: Array, n: int, place: Place) -> None:
        place.ask(
            invariants.slot_out_of_range,
            indices,
            n,
            column=name,
            remedy=f"{name!r} names rows of this batch of {n}: renumber it in {method_of(place)} as rows move",
        )

    def _check_in_turn(self, batch: Any, place: Place) -> None:
        """Asks of one of the derived values, or of all that follow from the requests; not of what lies on a device."""
        asked, self._calls, place = self._in_turn[self._turn], 0, attrs.evolve(place, since=True)
        self._turn = (self._turn + 1) % len(self._in_turn)
        if asked is self._by_request:
            self._check_by_request(batch, place, None)
        elif not isinstance(asked[0].get(batch), torch.Tensor):
            self._check_derived(asked[0], batch, place)

    def _check_by_request(self, batch: Any, place: Place, now: Rows | None) -> None:
        """Asks of what follows from the requests alone; nothing more where the same was right for the same before."""
        answers, found, kinds = self._answers, None, None
        try:
            if now is None:
                kinds = frozenset(answers.kinds_of(self.requests(batch)))
            else:
                now.kinds = now.kinds_by(answers, self._last_of(batch))
                kinds = frozenset(now.kinds)
            if self._by_request_at_once is not None:
                found = self._by_request_at_once(batch)
        except AttributeError:  # of a part that is None
            pass
        except Exception as error:
            raise _failed("over_requests", error) from error
        if found is not None and kinds is not None and answers.were_right(found, kinds):
            times_checked[_DERIVED_STALE] += len(self._by_request)
            return
        asked = [one for one in self._by_request if now is not None or not isinstance(one.get(batch), torch.Tensor)]
        right = [self._check_derived(one, batch, place, kinds) for one in asked]
        if found is not None and kinds is not None and all(right):
            answers.note_right(found, kinds)

    def _check_derived(self, one: _Derived, batch: Any, place: Place, kinds: frozenset[Kind] | None = None) -> bool:
        try:
            found = one.get(batch)
            if found is None:
                return True
            if one.bound and found is True:  # a flag that is set is never too little
                expected: Any = True
            elif isinstance(one.want, OverRequests):
                if kinds is None:
                    kinds = frozenset(self._answers.kinds_of(self.requests(batch)))
                expected = self._answers.combined(one.want, kinds)
            else:
                expected = one.want(batch)
            holds = bool(found >= expected) if one.bound else _equal(found, expected)
        except Exception as error:
            raise _failed(f"{'implied' if one.bound else 'derived'}[{one.name!r}]", error) from error
        if holds:
            times_checked[_DERIVED_STALE] += 1
            return True
        problem, remedy = (
            f"{one.name!r} is not what follows from the rows",
            "changes rows: let it compute {} again, or set it to None",
        )
        if one.bound:
            problem, expected = f"{one.name!r} leaves out what the rows need", f"at least {expected}"
            remedy = "lets a request in that needs {}: combine it with that of the others"
        return place.ask(
            invariants.derived_stale,
            np.array(True),
            lambda _: (problem, expected, found),
            column=one.name,
            remedy=f"{suspects(place)} {remedy.format(repr(one.name))}",
        )

    def _check_indices(self, name: str, get: Get, flags: Get | None, batch: Any, n: int, place: Place) -> None:
        try:
            value, chosen = get(batch), None if flags is None else flags(batch)
            if value is None and chosen is None:
                return
            expected = None if chosen is None else list(compress(range(n), entries_of(chosen, n)))
            if value == expected if type(value) is list else value is None and expected == []:
                times_checked[Code.SLOT_OUT_OF_RANGE] += 1
                times_checked[_DERIVED_STALE] += 1
                return
            found = np.asarray(entries_of(value) if value is not None else (), np.int64).reshape(-1)
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
            remedy=f"row numbers change when rows move: make {name!r} anew in {method_of(place)}, or shift it on a "
            "merge",
        )

    def sides(self, batch: Any, n: int) -> Iterator[tuple[Pair, Any, Any]]:
        """Both sides of each pair in use. A side that is too short is left out: ROW_COUNT says so."""
        values = dict(zip(self._read_paired.names, self._read_paired.read(batch), strict=True))
        for pair in self.pairs:
            host, device = values[pair.host], values[pair.device]
            if host is None or device is None:
                continue
            if self.when and not (self.uses(pair.host, batch) and self.uses(pair.device, batch)):
                continue
            try:
                whole = rows_of(host) >= n and rows_of(device) >= n
            except Exception as error:
                raise _failed(f"pair {pair.name}", error) from error
            if whole:
                yield pair, host, device

    def _check_aliased(
        self, pair: Pair, host: tuple[int, int] | None, device: tuple[int, int] | None, place: Place
    ) -> None:
        if host is None or device is None:
            return
        if host[0] >= device[1] or device[0] >= host[1]:
            times_checked[Code.MIRROR_ALIASED] += 1
            return
        place.ask(
            invariants.mirror_aliased,
            host,
            device,
            column=pair.name,
            remedy="one memory cannot disagree with itself: on a CPU make the device side with `.clone()`",
        )

    def compare(
        self, pair: Pair, host: Array | list[Any], device: Array | list[Any], place: Place, requests: Sequence[Any] = ()
    ) -> None:
        """Asks whether two sides agree, by value: a list or an int32 side may stand beside an int64 one."""
        place.compared = True
        right = array_of(device)
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
        if alike(left, right):
            times_checked[invariant.code] += 1
            return
        place.ask(
            invariant,
            left,
            right,
            names=requests,
            column=pair.name,
            remedy=f"one side was written alone: look in {method_of(place)}, and at what ran since the last check, for "
            f"a line that changes {pair.host!r} or {pair.device!r} without the other",
        )

    def _check_short(self, names: Collection[str], batch: Any, now: Rows, n: int, place: Place) -> None:
        """Asks of columns that could not be read whole: those of the host, since the device sides may come later."""
        for name in sorted(set(names).difference(now.columns, (pair.device for pair in self.pairs))):
            value = self.columns[name](batch)
            if value is not None and self.uses(name, batch):
                self._check_column(name, value, n, place)

    def check_kept(
        self,
        before: list[Rows],
        batch: Any,
        added: Mapping[str, int] | None,
        place: Place,
        *,
        whole: bool,
        now: Rows | None = None,
    ) -> None:
        """Asks whether each request of a batch has what it had before, plus what was declared to be added.

        Args:
            before: the batches that went in.
            batch: the batch that came out.
            added: column -> number; only these columns are compared. None for an operation that only moves rows.
            place: for reports.
            whole: whether both sides of a pair have moved by now; else the device side is left alone.
            now: what `check` read of the batch that came out.
        """
        if now is None:
            n = self.count(batch)
            if not n:
                return
            now = self.snapshot(batch, n, names=added)
            self._check_short({name for part in before for name in part.entries()}, batch, now, n, place)
            now.made_of(before)
        behind = frozenset() if whole else {pair.device for pair in self.pairs}
        same = now.as_before() if added is None and whole else []
        left = now.columns.keys() - same
        place.compared |= bool(same)
        for part, which in zip(before, now.of, strict=True) if left else ():
            if which is None:
                continue
            place.compared = True
            for name, entries in part.entries().items():
                if name in behind or name not in left:
                    continue
                expected, found = picked(entries, which[0]), picked(now.columns[name], which[1])
                if added is not None and (plus := added[name]):
                    expected = [one + plus for one in expected] if isinstance(expected, list) else expected + plus
                if alike(expected, found) or alike(expected, found := copy_of(found)):
                    times_checked[_ROW_KEPT] += 1
                    continue
                hint = ""
                if not whole and any(pair.host == name for pair in self.pairs):
                    hint = f"; or, if {name!r} is the device side of its pair, name the host side first in `pairs`"
                place.ask(
                    invariants.row_kept,
                    array_of(expected),
                    array_of(found),
                    rows=picked(np.arange(len(now.requests)), which[1]),
                    names=now.requests,
                    column=name,
                    remedy=f"{method_of(place)} is to add {added[name]} to {name!r} of each request, as `adds` declares"
                    if added is not None
                    else f"{method_of(place)} moves rows: let it treat {name!r} as it treats the other columns{hint}",
                )
        if now.layout is not None and now.kept:
            kept: dict[str, Any] = dict(zip(now.layout.lists, now.lists, strict=True))
            self._remember(batch, Rows(now.num_rows, now.requests, kept, kinds=now.kinds))

    def _last_of(self, batch: Any) -> Rows | None:
        last = self._last  # read once: another thread, or the end of a batch, may take it away
        return last[1] if last is not None and last[0]() is batch else None

    def _remember(self, batch: Any, now: Rows) -> None:
        """Keeps what was right while the batch lives, so that less of it is copied and asked the next time."""
        with contextlib.suppress(TypeError):  # of an object without weak references
            self._last = weakref.ref(batch, self.forget), now

    def forget(self, batch: "weakref.ref[Any] | None" = None) -> None:
        """Lets go of the requests of a batch, by default of any: nothing is remembered."""
        if batch is None or (self._last is not None and self._last[0] is batch):
            self._last = None


def method_of(place: Place) -> str:
    """The method that a remedy names."""
    return f"`{place.object}.{place.operation.rpartition(' ')[2]}`"


def suspects(place: Place) -> str:
    """Where what was found may have happened."""
    return f"{method_of(place)}, or what ran since this was last checked," if place.since else method_of(place)


def _shown(request: Any) -> str:
    """A request in a report: its id, as SGLang or vLLM calls it."""
    if isinstance(request, PLAIN_KEYS):
        return repr(request)
    return repr(getattr(request, "rid", getattr(request, "request_id", type(request).__name__)))


def _equal(found: Any, expected: Any) -> bool:
    if hasattr(found, "tolist"):
        found = found.tolist()
    if hasattr(expected, "tolist"):
        expected = expected.tolist()
    return bool(found == expected)
