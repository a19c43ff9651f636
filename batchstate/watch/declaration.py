"""The declaration of a batch class: columns of an object that others wrote, and the checks that follow from them."""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import torch

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError, one_of, shown
from batchstate.invariants import Invariant, times_checked
from batchstate.violations import Code, Violation, Where
from batchstate.watch._requests import AnswerGroup, OverRequests, RequestAnswers
from batchstate.watch._vacant import POISON, poison, poisoned
from batchstate.watch.paths import Along, Get, Name, Path, Reader, all_of, failed, getter, label_of
from batchstate.watch.snapshots import (
    PLAIN_KEYS,
    Array,
    Rows,
    Snapshot,
    address_range,
    alike,
    array_of,
    beside,
    copy_of,
    dtype_of,
    entries_of,
    keys_of,
    picked,
    rows_of,
    widened,
    width_of,
    without_tails,
)

__tracebackhide__ = True  # so that pytest shows the engine's frames

_DERIVED_STALE, _ROW_KEPT = Code.DERIVED_STALE, Code.ROW_KEPT

MOST_IDLE, MOST_STAMPS = 32, 16
"""Checks in which a bound may change without its device side; values whose sources are remembered."""

ASK_DERIVED = 8
"""Requests of a batch per call at `cheap` without a check of derived values, and at least four calls: each such check
goes through the requests in Python, so that the cost of a call does not grow with them. Values over the requests alone
are one check together."""


@final
@attrs.frozen(eq=False)
class Pair:
    """Two columns that are one value: a name for reports, both sides, and whether the host side may be larger.

    Attributes:
        kept: whether an operation that moves rows keeps the entries; not if they are relative to the row.
    """

    name: str
    host: str
    device: str
    bound: bool = False
    kept: bool = True


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
        compared: whether both sides of a pair were compared.
        kept: whether rows were compared with those before the call.
    """

    object: str
    operation: str
    step: int | None
    report: Report
    since: bool = False
    compared: bool = False
    kept: bool = False

    def ask(
        self,
        invariant: Invariant[...],
        *args: Any,
        column: str,
        remedy: str,
        names: Sequence[Any] = (),
        problem: str | None = None,
        **options: Any,
    ) -> bool:
        """Checks an invariant, counted, and reports it in words for a class that others wrote."""
        times_checked[invariant.code] += 1
        breach = invariant.question(*args, **options)
        if breach is None:
            return True
        where: Where = {"object": self.object, "operation": self.operation, "column": column}
        if self.step is not None:
            where["step"] = self.step
        problem = problem or breach.problem
        if breach.row is not None and breach.row < len(names):
            problem += f": request {_shown(names[breach.row])}"
        breach = attrs.evolve(breach, problem=problem, column=column)
        self.report(Violation(invariant.code, breach, remedy=remedy, where=where))
        return False

    @property
    def method(self) -> str:
        """The method that a remedy names."""
        return f"`{self.object}.{self.operation.partition(',')[0].rpartition(' ')[2]}`"

    @property
    def suspects(self) -> str:
        """Where a wrong value may come from."""
        return f"{self.method}, or what ran since this was last checked," if self.since else self.method


@final
@attrs.frozen(eq=False)
class _blaming:  # noqa: N801 - read as a function; a generator takes three times as long
    """Names the argument of the declaration that failed. Code that runs at `cheap` does so without this call."""

    argument: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, BatchStateError):
            raise failed(self.argument, error) from error


@final
class Declaration:
    """Columns of a class, and how they belong together. Made by `watch`, whose arguments it has."""

    def __init__(
        self,
        name: str,
        *,
        num_rows: Name,
        pairs: Iterable[Sequence[Any]] = (),
        rows: Iterable[Name] = (),
        key: Name | None = None,
        when: Mapping[str, Name | None] | None = None,
        upto: Mapping[str, Name] | None = None,
        buffers: bool = False,
        indices: Mapping[str, Name | None] | None = None,
        derived: Mapping[Any, Get] | None = None,
        implied: Mapping[str, Get] | None = None,
        moves: Collection[str] = (),
        adds: Mapping[str, Mapping[Name, int]] | None = None,
        from_requests: Mapping[Name, Get] | None = None,
        records: Mapping[str, Callable[..., object]] | None = None,
        vacant: Mapping[str, Any] | None = None,
        axis: Mapping[str, int] | None = None,
        made_from: Mapping[str, Iterable[Name]] | None = None,
        settled: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._axis = dict(axis or {})
        self.buffers = buffers
        self.moves = frozenset(moves)
        self.columns: dict[str, Get] = {}
        self._declared: dict[str, Name] = {}
        self.pairs = [self._pair(pair) for pair in pairs]
        for row_column in rows:
            self._column(row_column)
        self.records: dict[Any, Any] | None = {} if records else None
        self.vacant, self.settled = dict(vacant or {}), dict(settled or {})
        self._said = {column: self._from_requests(column, says) for column, says in (from_requests or {}).items()}
        self._usual = frozenset(self.columns)
        self.adds = {
            method: {name if isinstance(name, str) else self._column(name): add for name, add in columns.items()}
            for method, columns in (adds or {}).items()
        }
        upto = self._of_both_sides(upto or {})
        counts = {count for count in upto.values() if count in self.columns}
        self.pairs.sort(key=lambda pair: not counts & {pair.host, pair.device})
        self.columns = dict(sorted(self.columns.items(), key=lambda column: column[0] not in counts))
        self._named = {name: get for name, get in self.columns.items() if isinstance(get, attrgetter | Path | Along)}
        self._functions = {name: get for name, get in self.columns.items() if name not in self._named}
        self._paired = frozenset(name for pair in self.pairs for name in (pair.host, pair.device))
        self._read_all, self._read_named = self._reader_of(self._usual), Reader(self._named)
        self._read_paired = self._reader_of(self._paired)
        self._read_added = {frozenset(columns): self._reader_of(columns) for columns in self.adds.values()}
        self.num_rows = getter(num_rows)
        self.key = None if key is None else getter(key)
        self.optional = frozenset(name for name, condition in (when or {}).items() if condition is None)
        conditions = {name: condition for name, condition in (when or {}).items() if condition is not None}
        self.when = {name: getter(condition) for name, condition in conditions.items()}
        self.upto = {name: getter(count) for name, count in upto.items()}
        self.indices = {
            name: (getter(name), flags if flags is None else getter(flags)) for name, flags in (indices or {}).items()
        }
        self.derived = [
            _Derived(label_of(name), getter(name), want, bound)
            for bound, wants in ((False, derived), (True, implied))
            for name, want in (wants or {}).items()
        ]
        self._by_request = [value for value in self.derived if isinstance(value.want, OverRequests)]
        self._by_batch = [value for value in self.derived if value not in self._by_request]
        self.sampled = bool(self.pairs) or not all(value.bound for value in self._by_batch)
        self.answers = RequestAnswers([value.want for value in self.derived if isinstance(value.want, OverRequests)])
        self._in_turn = ([self._by_request] if self._by_request else []) + [[value] for value in self._by_batch]
        self._by_request_at_once = all_of([value.name.removeprefix("not ") for value in self._by_request])
        if not (self.columns or self.derived or self.indices):
            problem = f"watch of {self.name}: no column is declared"
            raise ArgumentError(problem, None, "name columns in `pairs`, `rows`, `derived`, `implied` or `indices`")
        sides = {pair.device for pair in self.pairs}
        self._counted_on_device = frozenset(name for name, count in upto.items() if count in sides)
        self._unread: list[tuple[str, str | None, Name | None]] = [
            ("key", None, key),
            *((f"when[{name!r}]", name, condition) for name, condition in conditions.items()),
            *((f"upto[{name!r}]", name, count) for name, count in upto.items()),
            *((f"indices[{name!r}]", None, path) for name, flags in (indices or {}).items() for path in (name, flags)),
        ]
        self._relative = frozenset(side for pair in self.pairs if not pair.kept for side in (pair.host, pair.device))
        self._said_hosts = frozenset(pair.host for pair in self._said.values())
        others = [pair for pair in self.pairs if pair.kept and pair.host not in self._said_hosts]
        self._relative -= {side for pair in others for side in (pair.host, pair.device)}
        self._relative |= self._said_hosts
        self.made_from = {
            name: (getter(name), [getter(source) for source in sources]) for name, sources in (made_from or {}).items()
        }
        self._stamps: dict[tuple[str, int], tuple[Any, Any, Any]] = {}
        self._idle_bounds: dict[str, tuple[int, Any, Any]] = {}
        self._lengths = {name: False for name in (key, num_rows) if isinstance(name, str)}
        self._row_counts: set[int] = set()
        self.dtypes: dict[str, Any] = {}
        self._list_lengths: dict[str, int] = {}
        self._turn = self._calls = 0
        self._refuse_unknown()

    def _column(self, name: Any) -> str:
        label, column = label_of(name), name[1] if isinstance(name, tuple) else name
        if label == "<lambda>":
            label = f"column {len(self.columns)}"
        if self._declared.setdefault(label, column) != column:
            both = f"{self._declared[label]!r} and {column!r}"
            problem = f"watch of {self.name}: two columns are called {label!r}: {both}"
            raise ArgumentError(problem, label, "give a function a name of its own: ('label', function)")
        self.columns[label] = Along(getter(column), self._axis[label]) if label in self._axis else getter(column)
        return label

    def _from_requests(self, column: Any, says: Get) -> Pair:
        label = self._column(column)

        def wanted(batch: Any) -> list[Any]:
            with _blaming(f"from_requests[{label!r}]"):
                requests = self.requests(batch)
                if self.records is not None:
                    requests = [self.records.get(request) for request in requests]
                return [None if request is None else says(request) for request in requests]

        host = self._column((f"requests' {label}", wanted))
        self.pairs.append(pair := Pair(f"{host} / {label}", host, label))
        return pair

    def record(self, method: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Keeps what the arguments of a call say of requests."""
        with _blaming(f"records[{method!r}]"):
            function(self.records, *args, **kwargs)

    def _pair(self, pair: Sequence[Any]) -> Pair:
        parts = () if isinstance(pair, str) else tuple(pair)
        of = f"watch of {self.name}: expected a pair"
        if len(parts) not in (2, 3):
            problem = f"{of} (host, device) or (host, device, 'upper_bound'), got {pair!r}"
            raise ArgumentError(problem, pair, "name the host side first: pairs=[(host, device)]")
        if parts[2:] not in ((), ("upper_bound",), ("relative",)):
            problem = f"{of} with 'upper_bound' or 'relative' in its third place, got {pair!r}"
            raise ArgumentError(problem, pair, one_of(("upper_bound", "relative"), parts[2]))
        host, device = self._column(parts[0]), self._column(parts[1])
        bound, relative = (parts[2:] == (option,) for option in ("upper_bound", "relative"))
        return Pair(f"{host} / {device}", host, device, bound, not relative)

    def _of_both_sides(self, upto: Mapping[str, Name]) -> dict[str, Name]:
        """A pair is one value: the count of one side holds for the other, unless that has a count of its own."""
        counts = dict(upto)
        for pair in self.pairs * len(self.pairs):  # a column may be in several
            for side, other in ((pair.host, pair.device), (pair.device, pair.host)):
                if side in counts:
                    counts.setdefault(other, counts[side])
        return counts

    def _refuse_unknown(self) -> None:
        of_columns: dict[str, Iterable[str]] = {"when": [*self.when, *self.optional], "upto": self.upto}
        of_columns |= {"axis": self._axis, "vacant": self.vacant, "settled": self.settled}
        of_columns |= {f"adds` of `{method}": columns for method, columns in self.adds.items()}
        for argument, names in of_columns.items():
            if unknown := ", ".join(sorted(set(names) - set(self.columns))):
                problem = f"watch of {self.name}: {unknown} in `{argument}`, and not in `pairs` or `rows`"
                raise ArgumentError(problem, unknown, "name columns of `pairs` or of `rows`")
        for_rows: list[tuple[str, Any]] = [("moves` or `adds", self.moves or self.adds), ("vacant", self.vacant)]
        for_rows += [("over_requests", self._by_request), ("from_requests", self._said)]
        if self.key is None and any(used for _, used in for_rows):
            argument = next(name for name, used in for_rows if used)
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
        with _blaming(f"when[{name!r}]"):
            return bool(condition(batch))

    def key_list(self, batch: Any) -> list[Hashable]:
        """Whose each row is: ids as they are, other objects by identity; None is a row without a request."""
        return keys_of(self.requests(batch))

    def requests(self, batch: Any, *, on_host: bool = False) -> list[Any]:
        """The entry of `key` for each row, in a new list; empty without `key`, and `on_host` if it is on a device."""
        if self.key is None:
            return []
        try:
            value = self.key(batch)
            if on_host and isinstance(value, torch.Tensor) and not value.is_cpu:
                return []
            if not isinstance(value, Mapping):
                return list(value.tolist() if hasattr(value, "tolist") else value)
        except Exception as error:
            raise failed("key", error) from error
        return [value.get(row) for row in range(self.count(batch))]

    def snapshot(
        self,
        batch: Any,
        num_rows: int | None = None,
        *,
        names: Collection[str] | None = None,
        read: Iterable[tuple[str, Any]] | None = None,
    ) -> Rows:
        """The columns in use, or those of `names`, perhaps in the batch's memory; `read`, if they were read already."""
        requests, columns = self.requests(batch), dict[str, Array | list[Any]]()
        n = num_rows if num_rows is not None else len(requests) if self.key is not None else self.count(batch)
        del requests[n:]
        if read is None:
            added = None if names is None else self._read_added.get(frozenset(names)) or self._reader_of(names)
            reader = added or self._read_all
            read = zip(reader.names, reader.read(batch), strict=True)
        when, upto = self.when, self.upto
        for name, value in read:
            if value is None or (names is not None and name not in names):
                continue
            if name in when and not self.uses(name, batch):
                continue
            try:
                entries = entries_of(value, n)
                long = len(entries) >= n
            except Exception as error:
                raise failed(f"column {name!r}", error) from error
            if long and name in upto and n:
                with _blaming(f"upto[{name!r}]"):
                    entries = without_tails(entries, entries_of(upto[name](batch), n))
            if long:
                columns[name] = entries
        return Rows(requests, columns)

    def before(self, batches: Iterable[Any], names: Collection[str] | None) -> list[Rows]:
        """Batches before an operation, in memory of their own. Only the key is read of a batch without requests."""
        return [self.snapshot(batch, names=names).own() for batch in batches if self.requests(batch)]

    def columns_of(self, batch: Any, num_rows: int) -> dict[str, Snapshot]:
        """The columns in use, each with its dtype, in memory of their own."""
        columns = self.snapshot(batch, num_rows, names=self.columns).own().columns.items()
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

    def check(self, batch: Any, site: CallSite, *, full: bool, names: Collection[str] | None = ()) -> Rows | None:
        """Checks a batch as it stands; at `full` columns on the device too, which it then returns for `check_kept`.

        Else only the host's, and one of the derived values in turn: in each fourth call, in larger batches less often.
        Those of pairs and of `names` are returned, None for all; they may be in the batch's memory.
        """
        n = self.count(batch)
        if not (full and n):
            self.answers.last = None
        if not n:
            return None  # engines leave an empty batch as it was, since they never read it
        reader = self._read_all if full else self._read_named
        values = reader.read(batch)
        if not full:
            self._check_lengths(zip(reader.names, values, strict=True), n, site, batch)
            if self._in_turn:
                self._calls += 1
                if self._calls >= 4 and self._calls >= n // ASK_DERIVED:
                    self._check_in_turn(batch, site)
            if self._unread:
                self._read_names(batch)
            return None
        wanted = self._paired.union(names) if names else self._paired if names is not None else None
        read = list(zip(reader.names, values, strict=True))
        if names and not self._usual.issuperset(names):
            apart = self._read_added[frozenset(names)]
            added = zip(apart.names, apart.read(batch), strict=True)
            read += [(name, value) for name, value in added if name not in self._usual]
        self._check_lengths(read, n, site, batch)
        for value in self._by_batch:
            self._check_derived(value, batch, site)
        now = self.snapshot(batch, n, names=wanted, read=read)
        if self._by_request:
            self._check_by_request(batch, site, now)
        for name, (get, flags) in self.indices.items():
            self._check_indices(name, get, flags, batch, n, site)
        raw = dict(zip(reader.names, values, strict=True))
        for pair in self.pairs:
            if pair.host in now.columns and pair.device in now.columns:
                self._check_aliased(pair, raw[pair.host], raw[pair.device], site)
                self.compare(pair, now.columns[pair.host], now.columns[pair.device], site, now.requests)
        for name, value in self.vacant.items():
            self._check_vacant(name, value, batch, n, site)
        for name, (get, sources) in self.made_from.items():
            self._check_stamp(name, get(batch), [copy_of(entries_of(source(batch))) for source in sources], site)
        if n not in self._row_counts:
            self._note_lengths(batch, n)
        return now

    def _check_lengths(self, columns: Iterable[tuple[str, Any]], n: int, site: CallSite, batch: Any) -> None:
        dtype_before, buffers, tensor, array = self.dtypes.get, self.buffers, torch.Tensor, np.ndarray
        for name, value in columns:
            kind = type(value)
            if kind is tensor or kind is array:
                shape = value.shape
                if value.dtype is dtype_before(name) and shape and (shape[0] == n or (buffers and shape[0] > n)):
                    continue
            elif value is None or (kind is list and len(value) == n):
                continue
            self._check_column(name, value, n, site, batch)

    def _check_column(self, name: str, value: Any, n: int, site: CallSite, batch: Any) -> None:
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
        # A preallocated list is as long in every call; one that grows has to follow the batch.
        long = self.buffers and rows > n and (has_dtype or self._list_lengths.setdefault(name, rows) == rows)
        if rows != n and not long:
            if not self.uses(name, batch):
                return
            undeclared = has_dtype and name not in self.dtypes and rows > n
            hint = "; or, if it is meant to be longer, declare buffers=True, or, in a prefill alone, `when`"
            remedy = f"look in {site.suspects} for the line that treats {name!r}: every column moves with the "
            remedy += f"requests; or `num_rows` is wrong{hint if undeclared else ''}"
            site.ask(invariants.row_count, n, {name: rows}, column=name, remedy=remedy)
        elif has_dtype and value.dtype != (before := self.dtypes.setdefault(name, value.dtype)):
            dtypes = np.array([str(before)], object), np.array([str(value.dtype)], object)
            remedy = f"{site.method} changes the dtype of {name!r}: kernels that take raw memory then read other "
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
        answers, values, groups = self.answers, None, None
        try:
            if now is None:
                groups = frozenset(answers.groups_of(self.requests(batch)))
            else:
                groups = frozenset(answers.groups_at(batch, now.requests))
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
                    groups = frozenset(self.answers.groups_of(self.requests(batch)))
                expected = self.answers.combined(value.want, groups)
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
        remedy = f"{site.method}, or what ran since this was last checked, changes rows: let it compute {name} again, "
        remedy += "or set it to None"
        if value.bound:
            problem, expected = f"{name} leaves out what the rows need", f"at least {expected}"
            remedy = f"{site.suspects} lets a request in that needs {name}: combine it with that of the others"
        return report_stale(site, value.name, problem, expected, actual, remedy)

    def _check_indices(self, name: str, get: Get, flags: Get | None, batch: Any, n: int, site: CallSite) -> None:
        with _blaming(f"indices[{name!r}]"):
            value, chosen = get(batch), None if flags is None else flags(batch)
            if value is None and chosen is None:
                return
            expected = None if chosen is None else list(compress(range(n), entries_of(chosen, n)))
            if value == expected if type(value) is list else value is None and expected == []:
                times_checked[Code.SLOT_OUT_OF_RANGE] += 1
                times_checked[_DERIVED_STALE] += 1
                return
            actual = np.asarray(entries_of(value) if value is not None else (), np.int64).reshape(-1)
        if value is not None:
            self._check_range(name, actual, n, site)
        if expected is None:
            return
        if actual.tolist() == expected:
            times_checked[_DERIVED_STALE] += 1
            return
        problem = f"{name!r} names other rows than those that are meant"
        remedy = f"row numbers change when rows move: make {name!r} anew in {site.method}, or shift it on a merge"
        report_stale(site, name, problem, expected, actual.tolist(), remedy)

    def sides(self, batch: Any, n: int) -> Iterator[tuple[Pair, Any, Any, bool]]:
        """Both sides of each pair in use, without those that are too short: ROW_COUNT reports them.

        Derived tensors beside what follows from the rows come behind; the last of each says that it has no rows.
        """
        try:
            values: Any = dict(zip(self._read_paired.names, self._read_paired.read(batch), strict=True))
        except BatchStateError:  # a column cannot be read: the pairs without it are compared
            values = None
        failing: BatchStateError | None = None
        for pair in self.pairs:
            try:
                host, device = (
                    self._reader_of([side]).read(batch)[0] if values is None else values[side]
                    for side in (pair.host, pair.device)
                )
            except BatchStateError as error:
                failing = error
                continue
            if host is None or device is None:
                continue
            if self.when and not (self.uses(pair.host, batch) and self.uses(pair.device, batch)):
                continue
            try:
                whole = rows_of(host) >= n and rows_of(device) >= n
            except Exception as error:
                raise failed(f"pair {pair.name}", error) from error
            if whole:
                yield pair, host, device, False
        for value in self._by_batch:
            if isinstance(actual := value.get(batch), torch.Tensor) and not value.bound:
                want = torch.as_tensor(value.want(batch), dtype=actual.dtype)  # a number beside a scalar tensor, too
                yield Pair(value.name, value.name, value.name), want.reshape(-1), actual.reshape(-1), True
        if failing is not None:
            raise failing

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
        if isinstance(host, list) and isinstance(device, list):
            host, device = copy_of(host), copy_of(device)  # tensors among the entries as lists
            owners = requests if None in requests else [True] * len(host)
            sides = zip(host, device, owners, strict=True)
            said = [theirs if own is None or owner is None else own for own, theirs, owner in sides]
            right = array_of(device)
            left = right if said == device else array_of(said)
        elif isinstance(host, list) or isinstance(device, list):
            try:
                left, right = beside(host, right) if isinstance(host, list) else beside(list(device), host)[::-1]
            except ValueError as error:
                shape = f"{error}; expected for each row entries of shape {list(right.shape[1:])}, or None"
                raise failed(f"pair {pair.name}", ValueError(shape)) from error
        else:
            left = host
            if left.dtype != right.dtype:
                if left.dtype.kind in "iu" and right.dtype.kind in "iu":
                    left, right = left.astype(np.int64), right.astype(np.int64)
                elif left.dtype.kind == "f" and right.dtype.kind == "f":
                    left = left.astype(right.dtype)
        if pair.host in self.upto:
            width = max(width_of(left), width_of(right))
            left, right = widened(left, width), widened(right, width)
        if pair.bound:
            self._check_reached(pair, left, right, site)
        invariant: Invariant[...] = invariants.mirror_bound if pair.bound else invariants.mirror_equal
        if alike(left, right):
            times_checked[invariant.code] += 1
            return
        if None in requests and left.shape == right.shape:  # behind the usual case: of 256 objects it takes 10 us
            owned = np.array([request is not None for request in requests], bool)
            left = np.where(owned.reshape(-1, *[1] * (left.ndim - 1)), left, right)
        remedy = f"look in {site.method}, and at what ran since the last check, for a line that writes or moves "
        remedy += f"{pair.host!r} or {pair.device!r} without the other"
        problem = None
        if pair.host in self._said_hosts:
            problem = f"{pair.device!r} is not what its request says"
            remedy = f"look for the write of {pair.device!r} that {site.suspects} leaves out, or makes in another row; "
            remedy += "or `from_requests` is wrong"
        site.ask(invariant, left, right, names=requests, column=pair.name, remedy=remedy, problem=problem)

    def compare_at_once(self, pair: Pair, host: Any, device: Any, batch: Any, n: int, site: CallSite) -> None:
        """Compares two sides that are both on the host."""
        sides, counts = [entries_of(side, n) for side in (host, device)], self.counts_of(pair, batch, n)
        if counts is not None:
            sides = [without_tails(side, counts) for side in sides]
        self.compare(pair, sides[0], sides[1], site, self.requests(batch, on_host=True))

    def _check_reached(self, pair: Pair, host: Array, device: Array, site: CallSite) -> None:
        """Checks that the device side of a bound moves at all: one that nobody writes is under each bound."""
        idle, last_host, last_device = self._idle_bounds.get(pair.name, (0, None, None))
        sides = host.tobytes(), device.tobytes()
        idle = 0 if sides[1] != last_device else idle + (sides[0] != last_host)
        self._idle_bounds[pair.name] = (idle, *sides)
        if idle == MOST_IDLE:
            problem = f"{pair.device!r} has not changed in {idle} checks in which its bound {pair.host!r} did"
            remedy = f"look for the write of {pair.device!r} that {site.suspects} leaves out"
            report_stale(site, pair.name, problem, "a device side that follows its bound", "no change", remedy)

    def _check_vacant(self, name: str, value: Any, batch: Any, n: int, site: CallSite) -> None:
        """Checks rows without a request, or whose request says nothing; or, if they are poisoned, all others."""
        column = self.columns[name](batch)
        if column is None or not self.uses(name, batch):
            return
        requests, values = self.requests(batch)[:n], array_of(entries_of(column, n))
        if value is POISON:
            counts = np.asarray(entries_of(self.upto[name](batch), n)) if name in self.upto else None
            bad = poisoned(values, counts, column.dtype) & [request is not None for request in requests]
            remedy = f"write {name!r} when a request joins, a default too: look in {site.suspects}"
            rows, written = np.arange(n), (~bad).astype(np.int64)
            site.ask(
                invariants.row_unwritten, rows, written, np.ones_like(rows), names=requests, column=name, remedy=remedy
            )
            return
        says = self.columns[self._said[name].host](batch) if name in self._said else requests
        named = np.array([entry is not None for entry in says], bool).reshape(-1, *[1] * (values.ndim - 1))
        remedy = f"reset {name!r} to {value!r} in {site.suspects} when its request leaves or no longer needs it"
        site.ask(invariants.tail_stale, np.where(named, value, values), value, 0, column=name, remedy=remedy)

    def poison(self, batch: Any) -> None:
        """Overwrites the poisoned columns in rows without a request."""
        names = [name for name, value in self.vacant.items() if value is POISON]
        free = [row for row, request in enumerate(self.requests(batch)) if request is None] if names else []
        for name in names:
            poison(self.columns[name](batch), free)

    def _check_stamp(self, name: str, value: Any, sources: list[Any], site: CallSite) -> None:
        """Checks that what a value was made from is what it was then. It was made anew if it is another or differs."""
        if value is None:
            return
        parts = list(vars(value).values()) if hasattr(value, "__dict__") and not hasattr(value, "shape") else [value]
        content = repr([part.tolist() if hasattr(part, "tolist") else part for part in parts])
        stamp = self._stamps.get((name, id(value)))
        if stamp is None or stamp[0] is not value or stamp[1] != content:
            self._stamps = dict([*self._stamps.items()][-MOST_STAMPS:]) | {(name, id(value)): (value, content, sources)}
            return
        if all(_equal(then, now) for then, now in zip(stamp[2], sources, strict=True)):
            times_checked[_DERIVED_STALE] += 1
            return
        problem = f"{name!r} was made from other rows"
        remedy = f"make {name!r} anew in {site.method}, or set it to None"
        report_stale(site, name, problem, "made from the rows of now", "made before they changed", remedy)

    def _note_lengths(self, batch: Any, n: int) -> None:
        """Notes which attributes are as long as the batch, of it and of the objects through which columns are read."""
        self._row_counts.add(n)
        owners = {path.rpartition(".")[0] for path in self._declared if path.replace(".", "").isidentifier()}
        for owner in owners | {""}:
            try:
                fields = vars(getter(owner)(batch) if owner else batch)
            except (TypeError, AttributeError, LookupError):  # None, or an object without attributes
                continue
            for field, value in fields.items():
                if isinstance(value, list | torch.Tensor | np.ndarray):
                    path = f"{owner}.{field}" if owner else field
                    rows = rows_of(value) if getattr(value, "ndim", 1) else -1
                    self._lengths[path] = self._lengths.get(path, True) and rows == n

    def undeclared(self) -> list[str]:
        """See `Watched.undeclared`."""
        named = {*self._declared, *self.when, *self.upto, *self.indices, *self.made_from}
        named |= {value.name.removeprefix("not ") for value in self.derived}
        followed = [path for path, rows in self._lengths.items() if rows and path not in named]
        return sorted(followed) if len(self._row_counts) > 1 else []

    def _check_short(self, names: Collection[str], batch: Any, now: Rows, n: int, site: CallSite) -> None:
        """Checks columns of the host that could not be read whole; the device sides may come later."""
        for name in sorted(set(names).difference(now.columns, (pair.device for pair in self.pairs))):
            value = self.columns[name](batch)
            if value is not None and self.uses(name, batch):
                self._check_column(name, value, n, site, batch)

    def check_kept(
        self,
        before: list[Rows],
        batch: Any,
        added: Mapping[str, int] | None,
        site: CallSite,
        *,
        whole: bool,
        now: Rows | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        """Checks that each request of a batch has the entries that it had in the batches `before`, plus additions.

        Args:
            before: the batches that went in.
            batch: the batch that came out.
            added: column -> number; only these columns are compared. None for an operation that only moves rows.
            site: for reports.
            whole: whether both sides of a pair have moved by now; else the device side is left alone.
            now: the columns of `batch`, if `check` read them.
            only: columns that were left until now, since their moves are applied later.
        """
        if now is None:
            n = self.count(batch)
            if not n:
                return
            now = self.snapshot(batch, n, names=added)
            self._check_short({name for part in before for name in part.columns}, batch, now, n, site)
        behind = self._relative if whole else self._relative.union(pair.device for pair in self.pairs)
        behind = behind.union(self.settled if only is None else self.columns.keys() - only)
        for part in before:
            common = part.in_both(now)
            if common is None:
                continue
            site.kept = True
            for name, entries in part.columns.items():
                if name in behind:
                    continue
                if name not in now.columns:
                    if added is None:
                        self._check_there(name, batch, site)
                    continue
                expected, actual = picked(entries, common[0]), picked(now.columns[name], common[1])
                if isinstance(expected, list) != isinstance(actual, list):  # a list may become a tensor
                    with contextlib.suppress(ValueError):  # entries of other shapes
                        listed = isinstance(expected, list)
                        sides = beside(expected, actual) if listed else beside(actual, expected)[::-1]
                        expected, actual = sides
                if added is not None and (plus := added[name]):
                    expected = [entry + plus for entry in expected] if isinstance(expected, list) else expected + plus
                if name in self.upto:
                    width = max(width_of(expected), width_of(actual))
                    expected, actual = widened(expected, width), widened(actual, width)
                if alike(expected, actual) or alike(expected, actual := copy_of(actual)):
                    times_checked[_ROW_KEPT] += 1
                    continue
                remedy = f"{site.method} moves rows: let it treat {name!r} as it treats the other columns"
                if added is not None:
                    remedy = f"{site.method} is to add {added[name]} to {name!r} of each request, as `adds` declares"
                elif not whole and any(pair.host == name for pair in self.pairs):
                    remedy += f"; or, if {name!r} is the device side of its pair, name the host side first in `pairs`"
                rows, sides = picked(np.arange(len(now.requests)), common[1]), (array_of(expected), array_of(actual))
                if sides[0].shape != sides[1].shape:
                    remedy += f"; or, if it pads {name!r} wider, say in `upto` how many entries of each row count"
                site.ask(invariants.row_kept, *sides, rows=rows, names=now.requests, column=name, remedy=remedy)

    def _check_there(self, name: str, batch: Any, site: CallSite) -> None:
        """Reports a column that had entries of these requests and is None now, if it is not declared as optional."""
        if name in self.optional or self.columns[name](batch) is not None or not self.uses(name, batch):
            return
        unused = "let its function in `when` say so" if name in self.when else f"declare when={{{name!r}: None}}"
        remedy = f"{site.method} sets {name!r} to None: let it treat {name!r} as it treats the other columns; "
        remedy += f"or, if it may be unused, {unused}"
        sides = np.array(["entries"], object), np.array(["None"], object)
        site.ask(invariants.row_kept, *sides, what="column", column=name, remedy=remedy)


def _shown(request: Any) -> str:
    """A request in a report: its id, as SGLang, vLLM, LMDeploy, TGI or mini-sglang calls it, or its `repr`."""
    if isinstance(request, PLAIN_KEYS):
        return repr(request)
    names = (getattr(request, name, None) for name in ("rid", "request_id", "req_id", "seq_id", "uid", "id"))
    if (name := next((name for name in names if name is not None), None)) is not None:
        return repr(name)
    text = repr(request)
    return shown(request) if len(text) > 40 or " object at 0x" in text else text


def report_stale(site: CallSite, column: str, problem: str, expected: Any, actual: Any, remedy: str) -> bool:
    """Reports DERIVED_STALE: a value that is kept beside what it follows from."""
    breach = np.array(True), lambda _: (problem, expected, actual)
    return site.ask(invariants.derived_stale, *breach, column=column, remedy=remedy)


def _equal(actual: Any, expected: Any) -> bool:
    if hasattr(actual, "tolist"):
        actual = actual.tolist()
    if hasattr(expected, "tolist"):
        expected = expected.tolist()
    return bool(actual == expected)
