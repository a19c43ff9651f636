"""The declaration of a batch class: columns of an object that others wrote, and the checks that follow from them."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import torch

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError, one_of
from batchstate.invariants import Invariant, times_checked
from batchstate.violations import Code, Violation, Where
from batchstate.watch._requests import AnswerGroup, OverRequests, RequestAnswers
from batchstate.watch.paths import Get, Name, Path, Reader, all_of, failed, getter
from batchstate.watch.snapshots import (
    PLAIN_KEYS,
    Array,
    BulkColumns,
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

_DERIVED_STALE, _ROW_KEPT = Code.DERIVED_STALE, Code.ROW_KEPT

ASK_DERIVED = 8
"""Requests of a batch per call at `cheap` without a check of derived values, and at least four calls: each such check
goes through the requests in Python, so that the cost of a call does not grow with them. Values over the requests alone
are one check together."""


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
    """A value of the whole batch, the value that follows from its rows, and whether it may be larger than that."""

    name: str
    get: Get
    want: Get
    bound: bool


Report: TypeAlias = Callable[[BatchStateError], None]
"""Takes an error. It raises it, or keeps it and returns, and the next check runs."""


@final
@attrs.define(eq=False)  # not frozen: each hooked call makes one, and that takes half the time
class CallSite:
    """The call that a check belongs to: the class, after or before which operation, in which step.

    Attributes:
        since: whether earlier calls were not checked for the same.
        compared: whether values were compared: both sides of a pair, or rows with those before the call.
    """

    object: str
    operation: str
    step: int | None
    report: Report
    since: bool = False
    compared: bool = False

    def ask(
        self, invariant: Invariant[...], *args: Any, column: str, remedy: str, names: Sequence[Any] = (), **options: Any
    ) -> bool:
        """Checks an invariant, counted, and reports it in words for a class that others wrote."""
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

    @property
    def method(self) -> str:
        """The method that a remedy names."""
        return f"`{self.object}.{self.operation.rpartition(' ')[2]}`"

    @property
    def suspects(self) -> str:
        """Where a wrong value may come from."""
        return f"{self.method}, or what ran since this was last checked," if self.since else self.method


def _truth(get: Get) -> Get:
    return lambda batch: bool(get(batch))


@contextlib.contextmanager
def _blaming(argument: str) -> Iterator[None]:
    """Names the argument of the declaration that failed. Code that runs at `cheap` does so without this call."""
    try:
        yield
    except BatchStateError:
        raise
    except Exception as error:
        raise failed(argument, error) from error


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
        self.buffers = buffers
        self.moves = frozenset(moves)
        self.columns: dict[str, Get] = {}
        self._declared: dict[str, Name] = {}
        self.pairs = [self._pair(pair) for pair in pairs]
        for row_column in list(rows.items()) if isinstance(rows, Mapping) else rows:
            self._column(row_column)
        self._usual = frozenset(self.columns)
        self.adds = {
            method: {name if isinstance(name, str) else self._column(name): add for name, add in columns.items()}
            for method, columns in (adds or {}).items()
        }
        upto = self._of_both_sides(upto or {})
        counts = {count for count in upto.values() if count in self.columns}
        self.pairs.sort(key=lambda pair: not counts & {pair.host, pair.device})
        self.columns = dict(sorted(self.columns.items(), key=lambda column: column[0] not in counts))
        self._named = {name: get for name, get in self.columns.items() if isinstance(get, attrgetter | Path)}
        self._functions = {name: get for name, get in self.columns.items() if name not in self._named}
        self._paired = frozenset(name for pair in self.pairs for name in (pair.host, pair.device))
        self._read_all, self._read_named = self._reader_of(self._usual), Reader(self._named)
        self._read_paired = self._reader_of(self._paired)
        self._read_added = {frozenset(columns): self._reader_of(columns) for columns in self.adds.values()}
        self.num_rows = getter(num_rows)
        self.key = None if key is None else getter(key)
        self.when = {name: _truth(getter(condition)) for name, condition in (when or {}).items()}
        self.upto = {name: getter(count) for name, count in upto.items()}
        self.indices = {
            name: (getter(name), flags if flags is None else getter(flags)) for name, flags in (indices or {}).items()
        }
        self.derived = [
            _Derived(name, getter(name), want, bound)
            for bound, wants in ((False, derived), (True, implied))
            for name, want in (wants or {}).items()
        ]
        self._by_request = [value for value in self.derived if isinstance(value.want, OverRequests)]
        self._by_batch = [value for value in self.derived if value not in self._by_request]
        self._answers = RequestAnswers([value.want for value in self.derived if isinstance(value.want, OverRequests)])
        self._in_turn = ([self._by_request] if self._by_request else []) + [[value] for value in self._by_batch]
        self._by_request_at_once = all_of([value.name.removeprefix("not ") for value in self._by_request])
        if not (self.columns or self.derived or self.indices):
            problem = f"watch of {self.name}: no column is declared"
            raise ArgumentError(problem, None, "name columns in `pairs`, `rows`, `derived`, `implied` or `indices`")
        sides = {pair.device for pair in self.pairs}
        self._counted_on_device = frozenset(name for name, count in upto.items() if count in sides)
        self._unread: list[tuple[str, str | None, Name | None]] = [
            ("key", None, key),
            *((f"when[{name!r}]", name, condition) for name, condition in (when or {}).items()),
            *((f"upto[{name!r}]", name, count) for name, count in upto.items()),
            *((f"indices[{name!r}]", None, path) for name, flags in (indices or {}).items() for path in (name, flags)),
        ]
        self.dtypes: dict[str, Any] = {}
        self._turn = self._calls = 0
        self._last: tuple[weakref.ref[Any], Rows] | None = None
        self._refuse_unknown()

    def _column(self, name: Any) -> str:
        label: str
        if isinstance(name, str | tuple):
            label, column = (name, name) if isinstance(name, str) else name
        else:
            label, column = getattr(name, "__name__", "<lambda>"), name
            if label == "<lambda>":
                label = f"column {len(self.columns)}"
        if self._declared.setdefault(label, column) != column:
            both = f"{self._declared[label]!r} and {column!r}"
            problem = f"watch of {self.name}: two columns are called {label!r}: {both}"
            raise ArgumentError(problem, label, "give a function a name of its own: ('label', function)")
        self.columns[label] = getter(column)
        return label

    def _pair(self, pair: Sequence[Any]) -> Pair:
        parts = () if isinstance(pair, str) else tuple(pair)
        of = f"watch of {self.name}: expected a pair"
        if len(parts) not in (2, 3):
            problem = f"{of} (host, device) or (host, device, 'upper_bound'), got {pair!r}"
            raise ArgumentError(problem, pair, "name the host side first: pairs=[(host, device)]")
        if parts[2:] not in ((), ("exact",), ("upper_bound",)):
            problem = f"{of} with 'exact' or 'upper_bound' in its third place, got {pair!r}"
            raise ArgumentError(problem, pair, one_of(("exact", "upper_bound"), parts[2]))
        host, device = self._column(parts[0]), self._column(parts[1])
        return Pair(f"{host} / {device}", host, device, parts[2:] == ("upper_bound",))

    def _of_both_sides(self, upto: Mapping[str, Name]) -> dict[str, Name]:
        """A pair is one value: the count of one side holds for the other, unless that has a count of its own."""
        counts = dict(upto)
        for pair in self.pairs * len(self.pairs):  # a column may be in several
            for side, other in ((pair.host, pair.device), (pair.device, pair.host)):
                if side in counts:
                    counts.setdefault(other, counts[side])
        return counts

    def _refuse_unknown(self) -> None:
        unknown = {
            "`when`": set(self.when) - set(self.columns),
            "`upto`": set(self.upto) - set(self.columns),
            **{f"`adds` of {method!r}": set(columns) - set(self.columns) for method, columns in self.adds.items()},
        }
        for argument, names in unknown.items():
            if names:
                listed = ", ".join(sorted(names))
                problem = f"watch of {self.name}: {listed} in {argument}, and not in `pairs` or `rows`"
                raise ArgumentError(problem, listed, "name columns of `pairs` or of `rows`")
        if (self.moves or self.adds or self._by_request) and self.key is None:
            argument = "moves` or `adds" if self.moves or self.adds else "over_requests"
            remedy = "name the column that says whose each row is, as the list of requests or of their ids"
            raise ArgumentError(f"watch of {self.name}: `{argument}` without `key`", None, remedy)

    # Reading

    def _reader_of(self, names: Collection[str]) -> Reader:
        return Reader({name: get for name, get in self.columns.items() if name in names})

    def count(self, batch: Any) -> int:
        """How many requests the batch has."""
        number: Any = None
        try:
            number = self.num_rows(batch)
            return int(number() if callable(number) else number)
        except Exception as error:
            if isinstance(number, list | tuple | dict):
                of_length = "its length is `num_rows=lambda batch: len(...)`"
                problem = f"num_rows: expected a number, got a {type(number).__name__}; {of_length}"
                raise DeclarationError(problem, "num_rows") from error
            raise failed("num_rows", error) from error

    def uses(self, name: str, batch: Any) -> bool:
        """Whether the condition of a column, if it has one, holds."""
        condition = self.when.get(name)
        if condition is None:
            return True
        try:
            return bool(condition(batch))
        except Exception as error:
            raise failed(f"when[{name!r}]", error) from error

    def key_list(self, batch: Any) -> list[Hashable]:
        """Whose each row is: ids as they are, other objects by identity; None is a row without a request."""
        return keys_of(self.requests(batch))

    def requests(self, batch: Any, *, on_host: bool = False) -> list[Any]:
        """The entry of `key` for each row, in a new list; empty without `key`.

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
            raise failed("key", error) from error

    def snapshot(
        self,
        batch: Any,
        num_rows: int | None = None,
        *,
        names: Collection[str] | None = None,
        read: tuple[Rows, list[tuple[str, Any]]] | None = None,
    ) -> Rows:
        """The columns in use, perhaps in the batch's memory.

        Args:
            batch: an object of the class.
            num_rows: by default as many as there are keys, or as the batch says.
            names: only these columns.
            read: the columns, if they were read already.
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
        when, upto = self.when, self.upto
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
                rows.columns[name] = entries
            except BatchStateError:
                raise
            except Exception as error:
                raise failed(f"column {name!r}", error) from error
        return rows

    def _read_together(self, reader: Reader, values: Sequence[Any], n: int) -> tuple[Rows, list[tuple[str, Any]]]:
        """Columns that few calls can read and that are as long as the batch; and each other column, if it is in use."""
        names, types = reader.names, tuple(map(type, values))
        bulk = reader.bulk.get(types)
        read = None if bulk is None else bulk.read(values, n)
        if bulk is not None and read is not None:
            columns: dict[str, Any] = dict(zip(bulk.arrays, read[0], strict=True))
            columns.update(zip(bulk.lists, read[1], strict=True))
            return Rows(n, [], columns, bulk, *read), [(names[at], values[at]) for at in bulk.left]
        dtypes, columns = self.dtypes, dict(zip(names, values, strict=True))
        tensors = [name for name, value in columns.items() if isinstance(value, torch.Tensor)]
        if not self.buffers and n and all(name in dtypes for name in tensors):
            changed = [name for name in names if dtypes.get(name) is not getattr(columns[name], "dtype", None)]
            special = {*self.when, *self.upto, *changed}
            reader.bulk[types] = BulkColumns(names, values, n, special)
        return Rows(n, [], {}), [(name, value) for name, value in columns.items() if value is not None]

    def before(self, batches: Iterable[Any], names: Collection[str] | None) -> list[Rows]:
        """Batches before an operation, in memory of their own. Only the key is read of a batch without requests."""
        last = None if self._last is None else self._last[1]
        return [self.snapshot(batch, names=names).own(last) for batch in batches if self.requests(batch)]

    def columns_of(self, batch: Any, num_rows: int) -> dict[str, Snapshot]:
        """The columns in use, each with its dtype, in memory of their own."""
        columns = self.snapshot(batch, num_rows, names=self.columns).own().entries().items()
        return {name: Snapshot(dtype_of(self.columns[name](batch)), array_of(entries)) for name, entries in columns}

    def counts_of(self, pair: Pair, batch: Any, n: int) -> Any:
        """The number of entries that count in each row of a pair, on the host or the device; None if all do."""
        name = pair.host
        if not self.upto or name not in self.upto:
            return None
        with _blaming(f"upto[{name!r}]"):
            counts = self.upto[name](batch)
            on_device = isinstance(counts, torch.Tensor) and (name in self._counted_on_device or not counts.is_cpu)
            return counts.detach()[:n] if on_device else np.array(entries_of(counts, n))

    def _read_names(self, batch: Any) -> None:
        """Looks once for each name that `cheap` never reads, so that a typo does not wait for `full`.

        Unused columns are skipped, and so are properties, which may read the device.
        """
        unused: list[tuple[str, str | None, Name | None]] = []
        for argument, column, name in self._unread:
            if column in self._named and self.columns[column](batch) is None:
                unused.append((argument, column, name))
            elif isinstance(name, str) and column not in self._functions:
                path, _, last = name.removeprefix("not ").rpartition(".")
                with _blaming(argument):
                    owner = getter(path)(batch) if path else batch
                    if not isinstance(getattr(type(owner), last, None), property):
                        Path(last)(owner)
        self._unread = unused

    def advanced(self, row: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, Any]:
        """The entries of a row that a method leaves predictable: those that it adds to."""
        return {name: entry + added.get(name, 0) for name, entry in row.items() if name in added}

    # Checks

    def check(
        self, batch: Any, site: CallSite, *, full: bool, names: Collection[str] | None = (), before: Sequence[Rows] = ()
    ) -> Rows | None:
        """Checks a batch as it stands.

        Args:
            batch: an object of the class.
            site: for reports.
            full: read columns on the device too. Else only the host's, and now and then one of the derived values, in
                turn: in each fourth call, in larger batches less often.
            names: columns to return besides those of pairs, for `check_kept`; None for all.
            before: the batches that went into the operation.

        Returns:
            At `full` the columns, perhaps in the batch's memory; None for an empty batch.
        """
        n = self.count(batch)
        if not full or (not n and self._last_of(batch) is not None):
            self._last = None
        if not n:
            return None  # engines leave an empty batch as it was, since they never read it
        reader = self._read_all if full else self._read_named
        values = reader.read(batch)
        if not full:
            self._check_lengths(zip(reader.names, values, strict=True), n, site)
            if self._in_turn:
                self._calls += 1
                if self._calls >= 4 and self._calls >= n // ASK_DERIVED:
                    self._check_in_turn(batch, site)
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
                added = zip(apart.names, apart.read(batch), strict=True)
                read[1].extend([(name, value) for name, value in added if name not in self._usual])
        self._check_lengths(read[1], n, site)
        for value in self._by_batch:
            self._check_derived(value, batch, site)
        now = self.snapshot(batch, n, names=wanted, read=read)
        now.made_of(before)
        if self._by_request:
            self._check_by_request(batch, site, now)
            last, groups = self._last_of(batch), now.answer_groups or ()
            # Unchanged requests have the answers of the last call; nothing is kept if a row lacks its request.
            new = last is None or groups is not last.answer_groups
            if new and names is not None and len(groups) == len(now.requests):
                self._remember(batch, Rows(n, now.requests, {}, answer_groups=now.answer_groups))
        for name, (get, flags) in self.indices.items():
            self._check_indices(name, get, flags, batch, n, site)
        raw = dict(zip(reader.names, values, strict=True))
        for pair in self.pairs:
            if pair.host in now.columns and pair.device in now.columns:
                self._check_aliased(pair, raw[pair.host], raw[pair.device], site)
                self.compare(pair, now.columns[pair.host], now.columns[pair.device], site, now.requests)
        return now

    def _check_lengths(self, columns: Iterable[tuple[str, Any]], n: int, site: CallSite) -> None:
        dtype_before, buffers, tensor, array = self.dtypes.get, self.buffers, torch.Tensor, np.ndarray
        for name, value in columns:
            kind = type(value)
            if kind is tensor or kind is array:
                shape = value.shape
                if value.dtype is dtype_before(name) and shape and (shape[0] == n or (buffers and shape[0] > n)):
                    continue
            elif value is None or (kind is list and len(value) == n):
                continue
            self._check_column(name, value, n, site)

    def _check_column(self, name: str, value: Any, n: int, site: CallSite) -> None:
        """Checks a column that `_check_lengths` did not see to be right at once."""
        if isinstance(value, Mapping):
            if value and max(value) >= n:
                self._check_range(name, np.array(sorted(value)), n, site)
            return
        has_dtype = isinstance(value, torch.Tensor | np.ndarray)
        try:
            rows = len(value) if not has_dtype else value.shape[0] if value.ndim else -1
        except TypeError as error:
            raise failed(f"column {name!r}", error) from error
        if rows != n and not (has_dtype and self.buffers and rows > n):
            undeclared = has_dtype and name not in self.dtypes and rows > n
            hint = "; or, if columns are buffers longer than the batch, declare buffers=True" if undeclared else ""
            remedy = f"look in {site.suspects} for the line that treats {name!r}: every column moves with the "
            remedy += f"requests; or `num_rows` is wrong{hint}"
            site.ask(invariants.row_count, n, {name: rows}, column=name, remedy=remedy)
        elif has_dtype and value.dtype != (before := self.dtypes.setdefault(name, value.dtype)):
            dtypes = np.array([str(before)], object), np.array([str(value.dtype)], object)
            remedy = f"{site.operation} changes the dtype of {name!r}: kernels that take raw memory then read other "
            remedy += f"numbers; give an empty {name!r} its dtype too"
            site.ask(invariants.row_kept, *dtypes, what="dtype", column=name, remedy=remedy)

    def _check_range(self, name: str, indices: Array, n: int, site: CallSite) -> None:
        remedy = f"{name!r} names rows of this batch of {n}: renumber it in {site.method} as rows move"
        site.ask(invariants.slot_out_of_range, indices, n, column=name, remedy=remedy)

    def _check_in_turn(self, batch: Any, site: CallSite) -> None:
        """Checks one of the derived values, or all over the requests, but none that is on a device."""
        asked, self._calls, site = self._in_turn[self._turn], 0, attrs.evolve(site, since=True)
        self._turn = (self._turn + 1) % len(self._in_turn)
        if asked is self._by_request:
            self._check_by_request(batch, site, None)
        elif not isinstance(asked[0].get(batch), torch.Tensor):
            self._check_derived(asked[0], batch, site)

    def _check_by_request(self, batch: Any, site: CallSite, now: Rows | None) -> None:
        """Checks the values over the requests; not one by one if the same values were right for the same answers."""
        answers, values, groups = self._answers, None, None
        try:
            if now is None:
                groups = frozenset(answers.groups_of(self.requests(batch)))
            else:
                now.answer_groups = now.ask(answers, self._last_of(batch))
                groups = frozenset(now.answer_groups)
            if self._by_request_at_once is not None:
                values = self._by_request_at_once(batch)
        except AttributeError:  # a part of a path is None
            pass
        except Exception as error:
            raise failed("over_requests", error) from error
        if values is not None and groups is not None and answers.were_right(values, groups):
            times_checked[_DERIVED_STALE] += len(self._by_request)
            return
        asked = [
            value for value in self._by_request if now is not None or not isinstance(value.get(batch), torch.Tensor)
        ]
        right = [self._check_derived(value, batch, site, groups) for value in asked]
        if values is not None and groups is not None and all(right):
            answers.note_right(values, groups)

    def _check_derived(
        self, value: _Derived, batch: Any, site: CallSite, groups: frozenset[AnswerGroup] | None = None
    ) -> bool:
        try:
            actual = value.get(batch)
            if actual is None:
                return True
            if value.bound and actual is True:  # a flag that is set is never too little
                expected: Any = True
            elif isinstance(value.want, OverRequests):
                if groups is None:
                    groups = frozenset(self._answers.groups_of(self.requests(batch)))
                expected = self._answers.combined(value.want, groups)
            else:
                expected = value.want(batch)
            holds = bool(actual >= expected) if value.bound else _equal(actual, expected)
        except Exception as error:
            raise failed(f"{'implied' if value.bound else 'derived'}[{value.name!r}]", error) from error
        if holds:
            times_checked[_DERIVED_STALE] += 1
            return True
        name = repr(value.name)
        problem = f"{name} is not what follows from the rows"
        remedy = f"{site.suspects} changes rows: let it compute {name} again, or set it to None"
        if value.bound:
            problem, expected = f"{name} leaves out what the rows need", f"at least {expected}"
            remedy = f"{site.suspects} lets a request in that needs {name}: combine it with that of the others"
        return _report_stale(site, value.name, problem, expected, actual, remedy)

    def _check_indices(self, name: str, get: Get, flags: Get | None, batch: Any, n: int, site: CallSite) -> None:
        try:
            value, chosen = get(batch), None if flags is None else flags(batch)
            if value is None and chosen is None:
                return
            expected = None if chosen is None else list(compress(range(n), entries_of(chosen, n)))
            if value == expected if type(value) is list else value is None and expected == []:
                times_checked[Code.SLOT_OUT_OF_RANGE] += 1
                times_checked[_DERIVED_STALE] += 1
                return
            actual = np.asarray(entries_of(value) if value is not None else (), np.int64).reshape(-1)
        except BatchStateError:
            raise
        except Exception as error:
            raise failed(f"indices[{name!r}]", error) from error
        if value is not None:
            self._check_range(name, actual, n, site)
        if expected is None:
            return
        if actual.tolist() == expected:
            times_checked[_DERIVED_STALE] += 1
            return
        problem = f"{name!r} names other rows than those that are meant"
        remedy = f"row numbers change when rows move: make {name!r} anew in {site.method}, or shift it on a merge"
        _report_stale(site, name, problem, expected, actual.tolist(), remedy)

    def sides(self, batch: Any, n: int) -> Iterator[tuple[Pair, Any, Any]]:
        """Both sides of each pair in use, without those that are too short: ROW_COUNT reports them."""
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
                raise failed(f"pair {pair.name}", error) from error
            if whole:
                yield pair, host, device

    def _check_aliased(self, pair: Pair, host: Any, device: Any, site: CallSite) -> None:
        ranges = address_range(host), address_range(device)
        if ranges[0] is None or ranges[1] is None:
            return
        if ranges[0][0] >= ranges[1][1] or ranges[1][0] >= ranges[0][1]:
            times_checked[Code.MIRROR_ALIASED] += 1
            return
        remedy = "one memory cannot disagree with itself: on a CPU make the device side with `.clone()`"
        site.ask(invariants.mirror_aliased, *ranges, column=pair.name, remedy=remedy)

    def compare(
        self, pair: Pair, host: Array | list[Any], device: Array | list[Any], site: CallSite, requests: Sequence[Any]
    ) -> None:
        """Checks whether two sides agree, by value: a list or an int32 side may stand beside an int64 one."""
        site.compared = True
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
        remedy = f"one side was written alone: look in {site.method}, and at what ran since the last check, for a line "
        remedy += f"that changes {pair.host!r} or {pair.device!r} without the other"
        site.ask(invariant, left, right, names=requests, column=pair.name, remedy=remedy)

    def _check_short(self, names: Collection[str], batch: Any, now: Rows, n: int, site: CallSite) -> None:
        """Checks columns of the host that could not be read whole; the device sides may come later."""
        for name in sorted(set(names).difference(now.columns, (pair.device for pair in self.pairs))):
            value = self.columns[name](batch)
            if value is not None and self.uses(name, batch):
                self._check_column(name, value, n, site)

    def check_kept(
        self,
        before: list[Rows],
        batch: Any,
        added: Mapping[str, int] | None,
        site: CallSite,
        *,
        whole: bool,
        now: Rows | None = None,
    ) -> None:
        """Checks that each request has the entries that it had before, plus the declared additions.

        Args:
            before: the batches that went in.
            batch: the batch that came out.
            added: column -> number; only these columns are compared. None for an operation that only moves rows.
            site: for reports.
            whole: whether both sides of a pair have moved by now; else the device side is left alone.
            now: the columns of `batch`, if `check` read them.
        """
        if now is None:
            n = self.count(batch)
            if not n:
                return
            now = self.snapshot(batch, n, names=added)
            self._check_short({name for part in before for name in part.entries()}, batch, now, n, site)
            now.made_of(before)
        behind = frozenset() if whole else {pair.device for pair in self.pairs}
        same = now.as_before() if added is None and whole else []
        left = now.columns.keys() - same
        site.compared |= bool(same)
        for part, common in zip(before, now.stayed, strict=True) if left else ():
            if common is None:
                continue
            site.compared = True
            for name, entries in part.entries().items():
                if name in behind or name not in left:
                    continue
                expected, actual = picked(entries, common[0]), picked(now.columns[name], common[1])
                if added is not None and (plus := added[name]):
                    expected = [entry + plus for entry in expected] if isinstance(expected, list) else expected + plus
                if alike(expected, actual) or alike(expected, actual := copy_of(actual)):
                    times_checked[_ROW_KEPT] += 1
                    continue
                remedy = f"{site.method} moves rows: let it treat {name!r} as it treats the other columns"
                if added is not None:
                    remedy = f"{site.method} is to add {added[name]} to {name!r} of each request, as `adds` declares"
                elif not whole and any(pair.host == name for pair in self.pairs):
                    remedy += f"; or, if {name!r} is the device side of its pair, name the host side first in `pairs`"
                rows, sides = picked(np.arange(len(now.requests)), common[1]), (array_of(expected), array_of(actual))
                site.ask(invariants.row_kept, *sides, rows=rows, names=now.requests, column=name, remedy=remedy)
        if now.bulk is not None and now.kept:
            kept: dict[str, Any] = dict(zip(now.bulk.lists, now.lists, strict=True))
            self._remember(batch, Rows(now.num_rows, now.requests, kept, answer_groups=now.answer_groups))

    def _last_of(self, batch: Any) -> Rows | None:
        last = self._last  # read once: another thread, or the end of a batch, may take it away
        return last[1] if last is not None and last[0]() is batch else None

    def _remember(self, batch: Any, now: Rows) -> None:
        """Keeps right values while the batch lives, so that less of it is copied and asked the next time."""
        with contextlib.suppress(TypeError):  # an object without weak references
            self._last = weakref.ref(batch, self.forget), now

    def forget(self, batch: "weakref.ref[Any] | None" = None) -> None:
        """Lets go of the requests of a batch, by default of any."""
        if batch is None or (self._last is not None and self._last[0] is batch):
            self._last = None


def _shown(request: Any) -> str:
    """A request in a report: its id, as SGLang or vLLM calls it."""
    if isinstance(request, PLAIN_KEYS):
        return repr(request)
    return repr(getattr(request, "rid", getattr(request, "request_id", type(request).__name__)))


def _report_stale(site: CallSite, column: str, problem: str, expected: Any, actual: Any, remedy: str) -> bool:
    breach = np.array(True), lambda _: (problem, expected, actual)
    return site.ask(invariants.derived_stale, *breach, column=column, remedy=remedy)


def _equal(actual: Any, expected: Any) -> bool:
    if hasattr(actual, "tolist"):
        actual = actual.tolist()
    if hasattr(expected, "tolist"):
        expected = expected.tolist()
    return bool(actual == expected)
