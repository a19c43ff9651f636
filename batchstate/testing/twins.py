"""Fuzzing of an engine's own batch class, whose twins are kept by hand.

The engine says in a `TwinSpec` how to build, filter, merge and advance its batch, and which attributes are paired. It
gets a state machine that checks the invariants of `batchstate.invariants` after each operation, and shrinks each
failure::

    spec = TwinSpec(
        name="MyBatch",
        row=st.integers(1, 9),
        build=MyBatch.from_lengths,
        filter=MyBatch.filter_batch,
        merge=MyBatch.merge_batch,
        advance=MyBatch.prepare_for_decode,
        twins=[Twin("seq_lens_cpu", "seq_lens")],
        rows=["reqs", "temperatures"],
        num_rows=lambda batch: len(batch.reqs),
    )
    TestMyBatch = twin_machine(spec).TestCase

How rows must move is taken from the batch itself, as it was before an operation: nothing has to be described twice.
Further operations are a line each, with a model of the rows that come out: `ops={name: (call, model)}`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, final

import attrs
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, multiple, precondition, rule
from hypothesis.strategies import SearchStrategy

from batchstate import invariants
from batchstate.errors import ArgumentError, BatchStateError
from batchstate.mirror import Contract
from batchstate.testing.machine import DisagreementError, Machine
from batchstate.testing.runner import STEPS, MachineResult, error_of, run_machine, with_replay
from batchstate.violations import Where
from batchstate.watch.batches import WatchedSpec
from batchstate.watch.declaration import CallSite, Declaration
from batchstate.watch.snapshots import Snapshot, address_range

__tracebackhide__ = True  # so that pytest shows the engine's frames

__all__ = ["Twin", "TwinSlots", "TwinSpec", "fuzz_twins", "twin_machine"]

Row = dict[str, Any]
"""One request of a batch: attribute -> its entry. An attribute that is not there may have any value."""

KEY = "<key>"
"""Under this name a row of a class that is watched says whose it is."""

B = TypeVar("B")
R = TypeVar("R")


@final
@attrs.frozen
class Twin:
    """Two paired attributes: one value, on the host and on the device.

    Attributes:
        host: name of the attribute on the host; dots reach into parts (`sampling.temperatures`).
        device: name of the attribute on the device.
        contract: `exact`, or `upper_bound` if the host side may be larger.
    """

    host: str
    device: str
    contract: Contract = attrs.field(default=Contract.EXACT, converter=Contract)

    def __attrs_post_init__(self) -> None:
        if self.contract not in (Contract.EXACT, Contract.UPPER_BOUND):
            problem = f"twins {self.host!r} and {self.device!r} under {self.contract.value}"
            remedy = "use 'exact' or 'upper_bound'; name an attribute that has no twin in `rows`"
            raise ArgumentError(problem, self.contract.value, remedy)


@final
@attrs.frozen(eq=False)
class TwinSlots:
    """Where a batch class has the slots of its requests, and which slots have an owner.

    No row of any batch may then have slot 0, which is for padded rows alone, and no two rows one slot. Slots of batches
    that `TwinSpec.copy` keeps are not looked at.

    Attributes:
        attribute: name of the attribute with the slot of each request; one of the twins or of `rows`.
        live: returns the slots that have an owner in the engine's pool. They have to be those of the rows, no more and
            no fewer: what an operation drops, it gives back, or the call in the spec does. None if it is not known.
        begin: called where an example begins, to make the engine's pool anew.
    """

    attribute: str
    live: Callable[[], Iterable[int]] | None = None
    begin: Callable[[], object] | None = None


def _slots_of(slots: "str | TwinSlots | None") -> TwinSlots | None:
    return TwinSlots(slots) if isinstance(slots, str) else slots


@final
@attrs.frozen(eq=False)
class TwinSpec(Generic[B, R]):
    """A batch class for the fuzzer.

    `filter`, `merge`, `advance`, `pad` and `ops` return the batch that comes out, or None if they change the (first)
    batch in place. Batches that went in are not used afterwards.

    Attributes:
        name: of the class, for reports.
        row: what describes one request; `build` gets a list of them.
        build: makes a batch.
        filter: keeps the rows at the given indices, in their order.
        merge: puts the rows of the second batch after those of the first.
        advance: a decode step, or any other change that keeps the rows; None if the class has none.
        twins: the paired attributes.
        rows: further attributes with one entry per request, on either side.
        lazy: those of the attributes that may be None, or whose part may be (`sampling.penalties`): made when they are
            first needed. Entries of one of two merged batches are not lost.
        pad: adds rows up to so many, for one launch; None if the class has none.
        padding: attribute -> the value of its padded rows, None for any; without those that `pad` leaves alone.
        idle: makes the batch of a step without requests; None if the class has none.
        copy: makes a batch that stays as it is whatever becomes of this one, as for results that are read a step later:
            a copy that shares memory, which an operation in place writes, is found. None if the class has none.
        ops: name -> `(call, model)` of each further operation. `call` takes one batch or more, `model` the rows of each
            as they were, a list of dictionaries (attribute -> entry), and returns the rows that come out: the same
            ones, in their order, or `{**row, "seq_lens": row["seq_lens"] + 1}`, or a row without the attributes that
            may have any value. Where several batches come out, both return a tuple. `(call, model, strategy)` draws
            one more argument, which both take last. The model is asked after the call: which rows leave may be read
            off the requests.
        slots: the attribute with the slot of each request, or `TwinSlots`, which also says which slots have an owner.
        num_rows: how many requests the batch has.
        least_rows: 0, or 1 for a class that is never empty.
        most_rows: of a batch that is built.
        max_rows: of any batch, for a class with buffers of a fixed length: no merge, `add` or `pad` exceeds it.
        add: lets one request, drawn from `row`, join a batch; for a class that does not merge.
        ascending: `filter` takes ascending row numbers only.
        declared: of a class that is watched, its columns, in the place of `twins`, `rows` and `lazy`. With a key, rows
            are known by it and may change places; columns that are None are not in use.
    """

    name: str
    row: SearchStrategy[R]
    build: Callable[[list[R]], B]
    filter: Callable[[B, list[int]], B | None]
    num_rows: Callable[[B], int]
    merge: Callable[[B, B], B | None] | None = None
    twins: Sequence[Twin] = ()
    advance: Callable[[B], B | None] | None = None
    rows: Sequence[str] = ()
    least_rows: int = 0
    most_rows: int = 4
    max_rows: int | None = None
    lazy: Sequence[str] = ()
    pad: Callable[[B, int], B | None] | None = None
    padding: Mapping[str, object] = attrs.field(factory=dict)
    idle: Callable[[], B] | None = None
    copy: Callable[[B], B] | None = None
    ops: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    slots: TwinSlots | None = attrs.field(default=None, converter=_slots_of)
    add: Callable[[B, R], B | None] | None = None
    ascending: bool = False
    declared: Declaration | None = None

    def __attrs_post_init__(self) -> None:
        names = self.attribute_names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArgumentError(f"{self.name}: {', '.join(twice)} twice", twice, "name each attribute once")
        unknown = sorted({*self.lazy, *self.padding} - set(names))
        if unknown:
            problem = f"{self.name}: {', '.join(unknown)} in `lazy` or `padding`, and not in `twins` or `rows`"
            raise ArgumentError(problem, unknown, "name attributes of the twins, or of `rows`")
        if self.slots is not None and self.slots.attribute not in names:
            problem = f"{self.name}: slots in {self.slots.attribute!r}, which is neither in `twins` nor in `rows`"
            raise ArgumentError(problem, self.slots.attribute, f"use one of: {', '.join(names)}")
        if not names:
            remedy = "name the twins of the class: twins=[Twin('seq_lens_cpu', 'seq_lens')]"
            raise ArgumentError(f"{self.name}: expected twins, got none", names, remedy)
        if not 0 <= self.least_rows <= self.most_rows or not self.most_rows:
            problem = f"{self.name}: {self.least_rows} to {self.most_rows} rows"
            remedy = "use 0 <= least_rows <= most_rows, most_rows at least 1"
            raise ArgumentError(problem, (self.least_rows, self.most_rows), remedy)
        if self.max_rows is not None and self.max_rows < self.most_rows:
            problem = f"{self.name}: max_rows={self.max_rows}, and {self.most_rows} rows are built"
            remedy = f"use max_rows of {self.most_rows} or more, or a smaller most_rows"
            raise ArgumentError(problem, self.max_rows, remedy)
        if self.merge is None and self.add is None:
            example = f"merge={self.name}.merge, or add=..."
            remedy = f"say how requests join a batch, with a method of the class itself: {example}"
            raise ArgumentError(f"{self.name}: expected `merge` or `add`, got neither", None, remedy)
        if self.declared is not None and (self.twins or self.rows or self.lazy):
            problem = f"{self.name}: `twins`, `rows` or `lazy` beside what is declared"
            raise ArgumentError(problem, (self.twins, self.rows, self.lazy), "declare the columns in `watch` alone")
        for name, op in self.ops.items():
            _check_op(self.name, name, op)

    @classmethod
    def of(cls, spec: "TwinSpec[Any, Any] | WatchedSpec") -> "TwinSpec[Any, Any]":
        """The same as a `TwinSpec`."""
        if isinstance(spec, WatchedSpec):
            return cls(declared=spec.declared, **spec.calls)
        return spec

    @property
    def attribute_names(self) -> list[str]:
        """Both names of each twin, then `rows`."""
        if self.declared is not None:
            return list(self.declared.columns)
        return [name for twin in self.twins for name in (twin.host, twin.device)] + list(self.rows)


def twin_machine(spec: TwinSpec[Any, Any] | WatchedSpec) -> type[Machine]:
    """A state machine for the class; collect its `TestCase`, or run it with `fuzz_twins`.

    Args:
        spec: what the class is.
    """
    spec = TwinSpec.of(spec)
    hooks = [hook for name, hook in _HOOKS.items() if getattr(spec, name) is not None]
    targets = (*_TwinMachine.TARGETS, *(target for _, target in hooks), *(_called(name) for name in spec.ops))
    if spec.slots is not None:
        targets = (*targets, _SLOTS_LEFT)
    out_of_reach = {_ADVANCED: spec.advance is None, _MERGED: spec.merge is None, _REORDERED: spec.ascending}
    targets = tuple(target for target in targets if not out_of_reach.get(target, False))
    names = {"spec": spec, "TARGETS": targets, "first_entries": {}, "varied": set(), "__doc__": f"Fuzzes {spec.name}."}
    names |= {name: _rule_of(name, *op) for name, op in spec.ops.items()}
    return type(f"{spec.name}Machine", tuple(machine for machine, _ in hooks) or (_TwinMachine,), names)


def fuzz_twins(
    spec: TwinSpec[Any, Any] | WatchedSpec,
    *,
    examples: int = 100,
    seed: int = 0,
    steps: int = STEPS,
    shrink: bool = True,
) -> MachineResult:
    """Fuzzes the class; arguments and errors as for `run_machine`.

    Raises:
        ArgumentError: a batch just built lacks an attribute that the spec names, or the attribute has no rows. Checked
            before the fuzzing begins, so that a typo is not taken for a bug of the class.
    """
    spec = TwinSpec.of(spec)
    _check_spec(spec)
    machine: Any = twin_machine(spec)
    result = run_machine(machine, examples=examples, seed=seed, steps=steps, shrink=shrink)
    replay = f"fuzz_twins(spec, examples={examples}, seed={seed}, steps={steps})  # the TwinSpec of {spec.name}"
    unproved = tuple(name for name in spec.attribute_names if name not in machine.varied)
    return with_replay(attrs.evolve(result, name=spec.name, unproved=unproved), replay)


@final
@attrs.define(eq=False)
class _Tracked:
    """A batch, its name in reports, its rows as they have to stay, and the dtypes of the attributes that are made."""

    batch: Any
    name: str
    rows: list[Row] = attrs.field(factory=list)
    dtypes: dict[str, str] = attrs.field(factory=dict)
    kept: bool = False  # a copy, whose requests belong to another batch

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<{self.name}>")


_ADVANCED, _MERGED, _REORDERED = "a batch advanced", "batches merged", "rows in another order"
_SLOTS_LEFT = "slots of rows that left"


class _TwinMachine(Machine):
    """Builds, filters, merges and advances; subclasses name the class in `spec`."""

    NAME = "twins"
    TARGETS = ("rows left", _REORDERED, _MERGED, _ADVANCED, "an empty batch")

    spec: ClassVar[TwinSpec[Any, Any]]
    first_entries: ClassVar[dict[str, Any]]
    varied: ClassVar[set[str]]

    batches = Bundle("batches")

    @initialize()
    def begin(self) -> None:
        """No batch yet."""
        self.open()
        self.alive: list[_Tracked] = []
        self.launched: list[int] = []  # slots of batches that were padded in place
        self.had: set[int] = set()
        if self.spec.slots is not None and self.spec.slots.begin is not None:
            self.spec.slots.begin()

    def check(self) -> None:
        """The twins of every batch agree, and no operation on one batch changed another."""
        for tracked in self.alive:
            columns = self._check_pairs(tracked, "check")
            self._agrees(tracked, tracked.rows, columns, tracked.dtypes, "an operation on another batch changed it")
        self._check_slots("check")

    # Rules

    @rule(target=batches, data=st.data())
    def build(self, data: st.DataObject) -> _Tracked:
        """Requests arrive."""
        spec = self.spec
        least = max(spec.least_rows, 1 if self._has_empty() else 0)
        rows = data.draw(st.lists(spec.row, min_size=least, max_size=spec.most_rows), label="rows")
        return self._track(spec.build(rows), [{}] * len(rows), "build")

    @rule(target=batches, tracked=consumes(batches), data=st.data())
    def filter(self, tracked: _Tracked, data: st.DataObject) -> _Tracked:
        """Some requests stay, perhaps in another order."""
        n = self.spec.num_rows(tracked.batch)
        drawn = _kept_rows(n).map(lambda rows: sorted(rows) if self.spec.ascending else rows)
        keep = data.draw(drawn.filter(lambda rows: len(rows) >= self.spec.least_rows), label="keep")
        self.reached("rows left", len(keep) < n)
        if not self.spec.ascending:
            self.reached(_REORDERED, sorted(keep) != keep)
        self.alive.remove(tracked)
        batch = _result(self.spec.filter(tracked.batch, keep), tracked)
        return self._track(batch, [tracked.rows[at] for at in keep], "filter", tracked)

    @precondition(lambda self: self.spec.merge is not None)
    @rule(target=batches, first=consumes(batches), second=consumes(batches))
    def merge(self, first: _Tracked, second: _Tracked) -> Any:
        """Two batches become one."""
        if first is second or self.spec.merge is None:
            return first
        if self._is_full(len(first.rows) + len(second.rows)):
            return multiple(first, second)
        self.alive.remove(first)
        self.alive.remove(second)
        self.reached(_MERGED, len(first.rows) + len(second.rows) > 0)
        batch = _result(self.spec.merge(first.batch, second.batch), first)
        return self._track(batch, first.rows + second.rows, "merge", first, second)

    @precondition(lambda self: self.spec.advance is not None)
    @rule(target=batches, tracked=consumes(batches))
    def advance(self, tracked: _Tracked) -> _Tracked:
        """A step changes values and keeps rows."""
        if self.spec.advance is None:
            return tracked
        self.alive.remove(tracked)
        self.reached(_ADVANCED, len(tracked.rows) > 0)
        rows: Sequence[Row] = [{}] * len(tracked.rows)
        if (declared := self.spec.declared) is not None:
            added = declared.adds.get(getattr(self.spec.advance, "__name__", ""), {})
            rows = [declared.advanced(row, added) for row in tracked.rows]
        return self._track(_result(self.spec.advance(tracked.batch), tracked), rows, "advance")

    def _is_full(self, num_rows: int) -> bool:
        """Whether so many rows are more than a batch can have."""
        return self.spec.max_rows is not None and num_rows > self.spec.max_rows

    # Checks

    def _value(self, batch: Any, name: str) -> Any:
        if name not in self.spec.lazy:
            return attrgetter(name)(batch)
        for part in name.split("."):
            batch = None if batch is None else getattr(batch, part)
        return batch

    def _track(self, batch: Any, rows: Sequence[Row], operation: str, *made_of: _Tracked) -> _Tracked:
        """A batch that has come out of an operation on others, and has to have these rows."""
        tracked = _Tracked(batch, f"{self.spec.name} after {operation}")
        where: Where = {"object": tracked.name, "operation": operation}
        invariants.row_count(len(rows), {"num_rows": self.spec.num_rows(batch)}, **where)
        rows = self._in_their_order(rows, tracked)
        columns = {name: column.copied() for name, column in self._check_pairs(tracked, operation).items()}
        problem = f"{operation} moved other rows than it was told to"
        self._agrees(tracked, rows, columns, _dtypes_of(made_of), problem)
        tracked.rows = [{name: column.values[at] for name, column in columns.items()} for at in range(len(rows))]
        self._note_variety(columns)
        if self.spec.declared is not None:
            for row, key in zip(tracked.rows, self.spec.declared.key_list(batch), strict=False):
                row[KEY] = key
        tracked.dtypes = {name: column.dtype for name, column in columns.items()}
        self.reached("an empty batch", not rows)
        tracked.kept = operation == "copy" and self.spec.slots is not None
        self.alive.append(tracked)
        self._check_slots(operation)
        return tracked

    def _slots(self, tracked: _Tracked) -> list[int]:
        """The slots of the requests of a batch, where they are made."""
        attribute = None if self.spec.slots is None else self.spec.slots.attribute
        return [int(row[attribute]) for row in tracked.rows if attribute in row]

    def _slot_names(self) -> list[str]:
        """The attributes with slots, both sides."""
        attribute = None if self.spec.slots is None else self.spec.slots.attribute
        pairs = [*((twin.host, twin.device) for twin in self.spec.twins), *((name,) for name in self.spec.rows)]
        return [name for pair in pairs if attribute in pair for name in pair]

    def _check_slots(self, operation: str) -> None:
        """Each request has a slot of its own, which is live, and no slot is live without one."""
        spec = self.spec.slots
        if spec is None:
            return
        held: list[int] = []
        for tracked in self.alive:
            if not tracked.kept:
                slots = self._slots(tracked)
                where: Where = {"object": tracked.name, "operation": operation, "column": spec.attribute}
                invariants.sentinel_escaped(np.array(slots, dtype=np.int64), **where)
                invariants.slot_zero_allocated(np.array(slots, dtype=np.int64), **where)
                held += slots
        where = {"object": self.spec.name, "operation": operation, "column": spec.attribute}
        rows = np.array(held, dtype=np.int64)
        invariants.slot_shared(rows, **where)
        self.reached(_SLOTS_LEFT, bool(self.had.difference(held)))
        self.had.update(held)
        if spec.live is None:
            return
        live = {int(slot) for slot in spec.live()}
        current = np.array([1 if slot in live else -1 for slot in held], dtype=np.int64)
        invariants.slot_stale_handle(rows, np.ones_like(rows), current, **where)
        lost = np.array(sorted(live.difference(held, self.launched)), dtype=np.int64)
        if operation == "check":
            problem = f"{lost.size} slots have an owner in the pool, and no row of a batch has them"
            invariants.slot_conservation(0, 0, len(live) - lost.size, len(live), leaked=lost, problem=problem, **where)

    def _note_variety(self, columns: dict[str, Snapshot]) -> None:
        for name, column in columns.items():
            if name not in self.varied and len(column.values):
                first = self.first_entries.setdefault(name, column.values[0])
                if not all(_same(first, entry) for entry in column.values):
                    self.varied.add(name)

    def _in_their_order(self, rows: Sequence[Row], tracked: _Tracked) -> Sequence[Row]:
        """The rows in the order in which the class has them now, if it knows them by key."""
        by_key = {row[KEY]: row for row in rows if KEY in row}
        if not by_key or self.spec.declared is None or self.spec.declared.key is None:
            return rows
        keys = self.spec.declared.key_list(tracked.batch)
        lost = [key for key in by_key if key not in keys]
        if lost:
            raise DisagreementError(f"{tracked.name}: requests were lost: {_listed(lost)}\n  found    {_listed(keys)}")
        return [by_key.get(key, {}) for key in keys[: len(rows)]]

    def run_op(self, name: str, inputs: Sequence[_Tracked], returned: Any, modelled: Any) -> Any:
        """Notes the batches that came out of one of `TwinSpec.ops`, by the class and by the model."""
        if not isinstance(modelled, tuple):
            returned, modelled = (_result(returned, inputs[0]),), (modelled,)
        elif not isinstance(returned, tuple | list) or len(returned) != len(modelled):
            raise DisagreementError(f"{self.spec.name}.{name}: expected {len(modelled)} batches, got {returned!r}")
        self.reached(_called(name), all(tracked.rows for tracked in inputs))
        for tracked in inputs:
            self.alive.remove(tracked)
        outputs = [self._track(*pair, name, *inputs) for pair in zip(returned, modelled, strict=True)]
        for tracked in outputs:
            self.alive.remove(tracked)
            if len(tracked.rows) >= max(self.spec.least_rows, 1 if self._has_empty() else 0):
                self.alive.append(tracked)
        return multiple(*(tracked for tracked in outputs if tracked in self.alive))

    def _has_empty(self) -> bool:
        """Whether there is a batch without requests. A single one is enough: every operation may get it."""
        return any(not tracked.rows for tracked in self.alive)

    def _check_pairs(
        self, tracked: _Tracked, operation: str, rows: dict[str, int] | None = None
    ) -> dict[str, Snapshot]:
        """Checks the twins of a batch, of as many rows as it says or as `rows` says; the attributes that are made."""
        if self.spec.declared is not None:
            self.spec.declared.check(tracked.batch, CallSite(self.spec.name, operation, None, _raised), full=True)
            return self.spec.declared.columns_of(tracked.batch, self.spec.num_rows(tracked.batch))
        values = {name: self._value(tracked.batch, name) for name in self.spec.attribute_names}
        columns = {name: Snapshot.of(value) for name, value in values.items() if value is not None}
        wanted = dict.fromkeys(columns, self.spec.num_rows(tracked.batch)) if rows is None else rows
        for name, column in columns.items():
            invariants.row_count(wanted[name], {name: len(column.values)}, object=tracked.name, operation=operation)
        for twin in self.spec.twins:
            host, device = values[twin.host], values[twin.device]
            if host is None or device is None:
                continue
            self._check_pair(twin, host, device, columns[twin.host], columns[twin.device], tracked.name, operation)
        return columns

    def _check_pair(
        self, twin: Twin, host: Any, device: Any, of_host: Snapshot, of_device: Snapshot, name: str, operation: str
    ) -> None:
        where: Where = {"object": name, "operation": operation, "column": f"{twin.host} / {twin.device}"}
        ranges = (address_range(host), address_range(device))
        if ranges[0] is not None and ranges[1] is not None:
            invariants.mirror_aliased(ranges[0], ranges[1], **where)
        if not hasattr(host, "dtype"):  # a list has no dtype of its own
            of_host = Snapshot(of_device.dtype, np.array(host, dtype=of_device.values.dtype))
        # Where the arrays differ in dtype, the invariant below reports it.
        if of_host.dtype != of_device.dtype and of_host.values.dtype == of_device.values.dtype:
            both = f"{twin.host!r} is {of_host.dtype}, {twin.device!r} is {of_device.dtype}"
            raise DisagreementError(f"{name}: the twins differ in dtype: {both}")
        invariant = invariants.mirror_bound if twin.contract is Contract.UPPER_BOUND else invariants.mirror_equal
        invariant(of_host.values, of_device.values, **where)

    def _agrees(
        self,
        tracked: _Tracked,
        rows: Sequence[Row],
        columns: dict[str, Snapshot],
        dtypes: Mapping[str, str],
        problem: str,
    ) -> None:
        """A batch has `rows`, and perhaps others behind them.

        Raises:
            DisagreementError: an attribute is lost, has another dtype, or another entry in some row.
        """
        for name in dict.fromkeys(name for row in rows for name in row):
            expected = {at: row[name] for at, row in enumerate(rows) if name in row}
            if name == KEY or (self.spec.declared is not None and name not in columns):
                continue
            if name not in self.spec.attribute_names:
                problem = f"{tracked.name}: the model has {name!r}, which is neither in `twins` nor in `rows`"
                raise ArgumentError(problem, name, f"use one of: {', '.join(self.spec.attribute_names)}")
            if name not in columns:
                raise DisagreementError(f"{tracked.name}: {name!r} was lost\n  expected {_listed(expected.values())}")
            now, before = columns[name], dtypes.get(name, columns[name].dtype)
            if now.dtype != before:
                raise DisagreementError(f"{tracked.name}: the dtype of {name!r} changed from {before} to {now.dtype}")
            for at, entry in expected.items():
                if not _same(entry, now.values[at]):
                    both = f"expected {_shown(entry)}, found {_shown(now.values[at])}"
                    lists = _listed(expected.values()), _listed(now.values[at] for at in expected)
                    report = f"{tracked.name}: {problem}: {name!r}, row {at}: {both}"
                    raise DisagreementError(f"{report}\n  expected {lists[0]}\n  found    {lists[1]}")


class _Padding(_TwinMachine):
    """A class that pads."""

    batches = _TwinMachine.batches

    @rule(target=batches, tracked=consumes(batches), more=st.integers(0, 3))
    def pad(self, tracked: _Tracked, more: int) -> Any:
        """A launch of a fixed number of rows: the batch gets padded ones, and the one that it was goes on."""
        if self.spec.pad is None:
            return tracked
        n = self.spec.num_rows(tracked.batch)
        more = more if self.spec.max_rows is None else min(more, self.spec.max_rows - n)
        returned = _result(self.spec.pad(tracked.batch, n + more), tracked)
        padded = _Tracked(returned, f"{self.spec.name} after pad")
        rows = {name: n + more * (name in self.spec.padding) for name in self.spec.attribute_names}
        columns = self._check_pairs(padded, "pad", rows)
        self._agrees(padded, tracked.rows, columns, tracked.dtypes, "pad moved rows")
        on_slot_zero = {*self._slot_names()}.intersection(self.spec.padding)
        for name, value in {**self.spec.padding, **dict.fromkeys(on_slot_zero, 0)}.items():
            if value is not None and name in columns:
                tail = columns[name].values[n:]
                invariants.tail_stale(tail, value, n, object=padded.name, operation="pad", column=name)
        self.reached("a padded batch", more > 0)
        if returned is tracked.batch:  # in place: it was for that launch
            self.alive.remove(tracked)
            self.launched += self._slots(tracked)
            return multiple()
        return tracked


class _Idling(_TwinMachine):
    """A class with idle steps."""

    batches = _TwinMachine.batches
    idled = False

    @precondition(lambda self: not self.idled)
    @rule(target=batches)
    def idle(self) -> Any:
        """A step without requests, once: it has no arguments, and would be most of what happens."""
        if self.spec.idle is None:
            return multiple()
        self.idled = True
        tracked = self._track(self.spec.idle(), [], "idle")
        self.reached("an idle step")
        if self.spec.least_rows:
            self.alive.remove(tracked)
            return multiple()
        return tracked


class _Copying(_TwinMachine):
    """A class that is copied."""

    batches = _TwinMachine.batches

    @rule(target=batches, tracked=batches)
    def copy(self, tracked: _Tracked) -> Any:
        """A batch is kept as it is, while the other goes on."""
        if self.spec.copy is None:
            return multiple()
        self.reached("a batch copied")
        kept = self._track(self.spec.copy(tracked.batch), tracked.rows, "copy", tracked)
        return multiple() if kept.kept else kept


class _Adding(_TwinMachine):
    """A class that requests join one at a time."""

    batches = _TwinMachine.batches

    @rule(target=batches, tracked=consumes(batches), data=st.data())
    def add(self, tracked: _Tracked, data: st.DataObject) -> _Tracked:
        """A request joins."""
        if self.spec.add is None or self._is_full(len(tracked.rows) + 1):
            return tracked
        self.alive.remove(tracked)
        self.reached("a request joined", len(tracked.rows) > 0)
        batch = _result(self.spec.add(tracked.batch, data.draw(self.spec.row, label="row")), tracked)
        return self._track(batch, [*tracked.rows, {}], "add", tracked)


_HOOKS = {
    "add": (_Adding, "a request joined"),
    "pad": (_Padding, "a padded batch"),
    "idle": (_Idling, "an idle step"),
    "copy": (_Copying, "a batch copied"),
}
"""Calls that a class need not have: the machine that makes them, and its coverage target."""


def _called(name: str) -> str:
    """The coverage target of an operation."""
    return f"{name} called"


def _num_batches(model: Any, arguments: int) -> int:
    return len(inspect.signature(model).parameters) - arguments


def _check_op(of: str, name: str, op: tuple[Any, ...]) -> None:
    """Refuses an operation that cannot be called.

    Raises:
        ArgumentError: not a call and a model of one batch or more, or a name that means something else.
    """
    argument = f"{of}: ops[{name!r}]"
    remedy = "pass name -> (call, model), or (call, model, strategy): both take the batches, then what was drawn"
    if not 2 <= len(op) <= 3:
        raise ArgumentError(f"{argument} is {op!r}", op, remedy)
    if not name.isidentifier() or hasattr(_TwinMachine, name) or name in _HOOKS:
        raise ArgumentError(f"{argument}: the name is taken", name, "choose another identifier")
    number = _num_batches(op[1], len(op) - 2)
    if number < 1:
        raise ArgumentError(f"{argument}: a model of {max(number, 0)} batches", op[1], remedy)


def _rule_of(name: str, call: Any, model: Any, *arguments: SearchStrategy[Any]) -> Any:
    """The rule of one of `TwinSpec.ops`."""
    names = [f"batch_{at + 1}" for at in range(_num_batches(model, len(arguments)))]

    def run(self: _TwinMachine, **drawn: Any) -> Any:
        inputs = [drawn.pop(batch) for batch in names]
        if len(set(map(id, inputs))) < len(inputs):
            return multiple(*{id(tracked): tracked for tracked in inputs}.values())
        further = tuple(drawn.values())
        returned = call(*(tracked.batch for tracked in inputs), *further)
        rows = [[dict(row) for row in tracked.rows] for tracked in inputs]
        return self.run_op(name, inputs, returned, model(*rows, *further))

    run.__name__ = name
    drawn: dict[str, SearchStrategy[Any]] = {batch: consumes(_TwinMachine.batches) for batch in names}
    if arguments:
        drawn["argument"] = arguments[0]
    untyped: Any = rule  # its overloads do not know a mapping of strategies
    return untyped(target=_TwinMachine.batches, **drawn)(run)


def _dtypes_of(batches: Sequence[_Tracked]) -> dict[str, str]:
    """The dtype that each attribute has in the batches; a side without rows has no say, nor have two that differ."""
    said: dict[str, set[str]] = {}
    for tracked in batches:
        if tracked.rows:
            for name, dtype in tracked.dtypes.items():
                said.setdefault(name, set()).add(dtype)
    return {name: dtypes.pop() for name, dtypes in said.items() if len(dtypes) == 1}


def _same(expected: Any, actual: Any) -> bool:
    """Whether two entries are equal, bit by bit if they are numbers; a model may say them in another dtype."""
    if not isinstance(actual, np.generic | np.ndarray):
        return bool(expected == actual)
    entry = np.asarray(expected)
    if entry.dtype != actual.dtype:
        if entry.dtype.kind not in "biuf" or (entry.dtype.kind == "f" and actual.dtype.kind != "f"):
            return False
        entry = entry.astype(actual.dtype)
    return entry.shape == actual.shape and entry.tobytes() == actual.tobytes()


def _listed(entries: Any) -> list[Any]:
    return [_shown(entry) for entry in entries]


def _shown(entry: Any) -> Any:
    return entry.tolist() if isinstance(entry, np.generic | np.ndarray) else entry


def _raised(error: BatchStateError) -> None:
    raise error


def _result(returned: Any, before: _Tracked) -> Any:
    """The batch that came out, or the one that was changed in place. An empty batch may be false."""
    return before.batch if returned is None else returned


def _kept_rows(n: int) -> SearchStrategy[list[int]]:
    """Rows that a filter keeps: as many in their order as in another one."""
    masks = st.lists(st.booleans(), min_size=n, max_size=n).map(lambda mask: list(compress(range(n), mask)))
    picks = st.permutations(range(n)).flatmap(lambda rows: st.integers(0, n).map(lambda most: rows[:most]))
    return st.one_of(masks, picks)


def _check_spec(spec: TwinSpec[Any, Any]) -> None:
    """Builds one batch and looks for everything that the spec names. A `build` that fails is left to the fuzzer.

    Raises:
        ArgumentError: something is not there.
    """
    batches: list[Any] = []

    @settings(
        max_examples=1,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(spec.row, min_size=max(1, spec.least_rows), max_size=spec.most_rows))
    def build(rows: list[Any]) -> None:
        batches.append(spec.build(rows))

    if error_of(build) is not None or not batches:
        return
    batch, declared = batches[0], spec.declared
    if declared is not None:
        _look(spec, "what is declared", lambda: declared.snapshot(batch, names=declared.columns))
        return
    _look(spec, "num_rows", lambda: spec.num_rows(batch))
    for name in spec.attribute_names:
        if name not in spec.lazy:
            _look(spec, f"attribute {name!r}", lambda: len(Snapshot.of(attrgetter(name)(batch)).values))  # noqa: B023


def _look(spec: TwinSpec[Any, Any], named: str, look: Callable[[], object]) -> None:
    error = error_of(look)
    if error is not None:
        problem = f"{spec.name}: {named} of a batch just built: {type(error).__name__}: {error}"
        remedy = "correct the spec: each attribute named has one entry per request (a list, an array or a tensor)"
        raise ArgumentError(problem, named, remedy) from error
