"""Watching a batch class that others wrote: `docs/how-to/watch-an-engine.md` begins with ten lines.

Each call of the declared methods is checked: at `cheap` lengths, dtypes and values of the host, at `full` all values.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import attrs

from batchstate import levels
from batchstate.errors import ArgumentError, BatchStateError
from batchstate.runtime import Runtime
from batchstate.watch._audit import Audit
from batchstate.watch.declaration import CallSite, Declaration
from batchstate.watch.hooks import Around, Hook, Hooked, OnViolation, hooks_of
from batchstate.watch.paths import Get, Name
from batchstate.watch.snapshots import Rows

__tracebackhide__ = True  # so that pytest shows the engine's frames

__all__ = ["Watched", "WatchedSpec", "audit", "watch"]

OPERATIONS = ("filter", "merge", "next_batch", "split", "advance", "update", "replace")
"""Operations of a `Batch` that leave it behind for another one."""


@final
class Watched(Hooked):
    """A watched class, until `stop` or the end of a `with` block.

    Attributes:
        declared: the columns and their checks.
    """

    def __init__(
        self,
        cls: type,
        declared: Declaration,
        on_violation: OnViolation,
        every: int,
        lag: int | None,
        runtime: Runtime | None,
    ) -> None:
        super().__init__(cls.__name__, on_violation, every)
        self.cls = cls
        self.declared = declared
        self._audit = None if lag is None else Audit(declared, self, lag, runtime)
        self._uncompared = {*declared.moves, *declared.adds}
        self._unsettled: dict[int, list[Rows]] = {}  # moves that the engine applies later, by the batch's identity

    def __repr__(self) -> str:
        return f"Watched({self.name}, {'active' if self.active else 'stopped'}, {self.counters.calls} calls)"

    def spec(self, **calls: Any) -> "WatchedSpec":
        """The same declaration for the fuzzer: `batchstate.testing.fuzz_twins(watched.spec(row=..., build=..., ...))`.

        Args:
            **calls: fields of `batchstate.testing.TwinSpec`: `row`, `build`, `filter`, and `merge` or `add`; perhaps
                `advance`, `ops`, `pad`, `copy`, `ascending`, `least_rows`, `max_rows`. `advance` may be the name of a
                method; its `adds` are found by that name, or by the function's own.
        """
        advance = calls.get("advance")
        if isinstance(advance, str):
            calls["advance"] = _call_of(self.cls, advance)
        elif advance is not None and self.declared.adds and getattr(advance, "__name__", "<lambda>") == "<lambda>":
            problem = f"spec of {self.name}: `advance` has no name, and `adds` is of {', '.join(self.declared.adds)}"
            raise ArgumentError(problem, advance, f"name the method: advance={next(iter(self.declared.adds))!r}")
        defaults = {"num_rows": self.declared.count, "name": self.name, "least_rows": 1}
        return WatchedSpec(self.declared, {**defaults, **calls})

    def stop(self) -> None:
        """Takes the hooks away, lets go of the requests that were checked last, and prints what was not compared.

        At `full` these are `undeclared`, and methods of `moves` and `adds`; with `lag`, a watch that compared nothing.
        """
        sampled, ended = self._audit is not None, not self.active
        super().stop()
        self.declared.answers.forget()
        idle = not any(map(self.counters.as_dict().get, ("samples", "compared", "skipped", "violations")))
        if sampled and self.counters.checked and idle:
            print(f"{self!r}: `lag` compared nothing: no pair, and no derived tensor, had both sides in a checked call")
        if levels.full and not (sampled or ended or sys.exc_info()[0]) and self._uncompared:
            print(f"{self!r}: in `moves` or `adds`, and never compared: {', '.join(sorted(self._uncompared))}")
        if levels.full and (undeclared := self.undeclared()):
            print(f"{self!r}: as long as the batch in every call, and not declared: {', '.join(undeclared)}")

    def undeclared(self) -> list[str]:
        """Attributes whose length followed `num_rows` in every call at `full`, and that no argument names.

        Those of the batch, and of objects through which declared paths lead. Empty until batches had two lengths.
        """
        return self.declared.undeclared()

    def flush(self) -> None:
        """Waits for the samples of this thread that are under way, and compares them."""
        if self._audit is not None:
            self.ask("flush", self._audit.compare, None)

    def check(self, batch: object, operation: str = "check") -> None:
        """Checks everything of one object now."""
        site = CallSite(self.name, operation, None, self.report)
        try:
            self.ask(operation, self.declared.check, batch, site, full=levels.full)
        finally:
            self.count("compared", site.compared)

    def around(self, name: str, before: bool, after: bool) -> Around:
        """The function that runs instead of a method, made once for each."""
        cls, declared, audit, report = self.cls, self.declared, self._audit, self.report
        began, ended = f"before {name}", f"after {name}"
        added = declared.adds.get(name)
        moving = added is not None or name in declared.moves
        settling = {column for column, method in declared.settled.items() if method == name}

        def run(
            step: int, due: bool, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if audit is not None and self.pending:
                self.ask(began, audit.compare, step)
                if not due:
                    return function(*args, **kwargs)
            subject = args[0] if args else None
            if not isinstance(subject, cls):  # a function, or a class method, which may make one
                subject = next(iter(_objects(cls, (*args, *kwargs.values()))), None)
            full, since = levels.full and audit is None, self.every > 1
            outermost = self.enter(subject, moves=name in declared.moves, inner=full and (moving or bool(settling)))
            if outermost is None:
                return function(*args, **kwargs)
            begins, ends = before and outermost, after and outermost  # inside another call it may be half changed
            site = CallSite(self.name, ended, step, report, since)
            compared, checked = False, subject is not None
            try:
                if begins and checked:
                    first = CallSite(self.name, began, step, report, since)
                    self.ask(began, declared.check, subject, first, full=full)
                    compared = first.compared
                    if audit is not None:
                        self.ask(began, audit.sample, subject, first, step)
                kept: list[Rows] | None = None
                if full and moving:
                    subjects = _objects(cls, (*args, *kwargs.values()))
                    kept = self.ask(began, declared.before, subjects, added)
                try:
                    result = function(*args, **kwargs)
                except Exception as error:
                    if ends and checked and not isinstance(error, BatchStateError):  # another watch has reported
                        cut_short = f"{ended}, which raised {type(error).__name__}"
                        raised = CallSite(self.name, cut_short, step, report, since)
                        self.ask(cut_short, declared.check, subject, raised, full=full)
                    raise
                outs = [subject] if result is None else _objects(cls, (result,)) or [subject]
                for out in outs if checked or (ends and outs[0] is not None) else ():
                    checked, now = True, None
                    if ends:
                        names = (added if moving else ()) if full else ()
                        now = self.ask(ended, declared.check, out, site, full=full, names=names)
                        if audit is not None:
                            self.ask(ended, audit.sample, out, site, step)
                    if kept:
                        self.ask(ended, declared.check_kept, kept, out, added, site, whole=ends, now=now)
                        if declared.settled and added is None:
                            self._unsettled.setdefault(id(out), kept)
                    if settling and (moved := self._unsettled.pop(id(out), None)) is not None:
                        self.ask(ended, declared.check_kept, moved, out, None, site, whole=True, only=settling)
                    if full and declared.vacant and outermost:
                        self.ask(ended, declared.poison, out)
                return result
            finally:
                if site.kept:
                    self._uncompared.discard(name)
                compared = full and (compared or site.compared or site.kept)
                self.leave(subject, outermost=outermost, checked=checked, compared=compared)

        return run


def _objects(cls: type, values: Iterable[Any]) -> list[Any]:
    """The objects of a class among some values, and in lists and tuples of them."""
    objects = []
    for value in values:
        if isinstance(value, cls):
            objects.append(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], cls):
            objects += value
    return objects


@final
@attrs.frozen(eq=False)
class WatchedSpec:
    """The declaration of a class, and the calls of a fuzzer. `fuzz_twins` and `twin_machine` take it."""

    declared: Declaration
    calls: Mapping[str, Any]


def _call_of(cls: type, name: str) -> Callable[[Any], Any]:
    """Calls a method of a batch by its name, as it stands at that moment."""
    if not callable(getattr(cls, name, None)):
        raise ArgumentError(f"spec of {cls.__name__}: it has no method {name!r}", name, "name a method as `advance`")

    def call(batch: Any) -> Any:
        return getattr(batch, name)()

    call.__name__ = name
    return call


def watch(
    cls: type,
    *,
    num_rows: Name,
    after: Collection[Hook] = (),
    before: Collection[Hook] = (),
    pairs: Iterable[Sequence[Any]] = (),
    rows: Iterable[Name] = (),
    key: Name | None = None,
    moves: Collection[Hook] = (),
    adds: Mapping[str, Mapping[Name, int]] | None = None,
    when: Mapping[str, Name | None] | None = None,
    upto: Mapping[str, Name] | None = None,
    buffers: bool = False,
    indices: Mapping[str, Name | None] | None = None,
    derived: Mapping[Any, Get] | None = None,
    implied: Mapping[str, Get] | None = None,
    from_requests: Mapping[Name, Get] | None = None,
    records: Mapping[str, Callable[..., object]] | None = None,
    vacant: Mapping[str, Any] | None = None,
    axis: Mapping[str, int] | None = None,
    made_from: Mapping[str, Iterable[Name]] | None = None,
    settled: Mapping[str, str] | None = None,
    on_violation: OnViolation = "raise",
    every: int = 1,
    lag: int | None = None,
    runtime: Runtime | None = None,
) -> Watched:
    """Checks a batch class that others wrote, round its own methods.

    A name is a path (`sampling_info.temperatures`, `buffers.seq_lens`, `block_table.0.num_blocks`): attributes, keys of
    dictionaries, numbers of entries; `not ` before a path turns it round. A function of the batch does as well, and
    `(label, function)` gives it a name; as a column it is called at `full` alone. A column that is None is not in use.

    Args:
        cls: the class.
        num_rows: how many requests a batch has.
        after: methods after which a batch is whole, and is checked: names, functions of the class, or
            `(class or module, "name")` for functions elsewhere that take the batch as an argument.
        before: methods before which it is checked.
        pairs: `(host, device)` columns that are one value, or `(host, device, "upper_bound")`. Their dtypes may differ,
            and a column may be in several pairs. Lists of unequal length may stand beside a padded tensor or each
            other. With `"relative"` in the third place the entries depend on the row: `moves` does not keep them.
        rows: further columns with one entry per request: tensors, arrays, lists, or dictionaries from row to entry.
        key: the column with the request of each row: ids, or request objects, or a dictionary from row to request. A
            row whose request is None, or not in the dictionary, has none: pairs are not compared there.
        moves: methods that move rows and change no entry. At `full` each request has to have what it had; of methods
            that are not in `after`, the device sides of pairs may come later.
        adds: method -> column -> the number that the method adds to each entry of it, compared at `full`. A function of
            the batch that is not in `rows` is called before and after this method alone.
        when: column -> condition under which it is valid; without it the column and its pairs are left alone. None says
            that the column may be None at any time; else `moves` reports one that had entries and is None.
        upto: column -> how many entries of each row count, on both sides of a pair; entries behind are garbage, and
            widths may change. A negative number counts from the end of the row.
        buffers: tensors and arrays are longer than the batch, and their first `num_rows` rows count.
        indices: column of row numbers of this batch -> a column of flags that says which rows they are, or None if only
            their range is known.
        derived: value, a path or a function -> the function that computes it from the rows. None is never wrong.
        implied: column -> its least value: a flag may be set without need, a maximum too large.
        from_requests: column -> a function of a request that gives its entry; None if it says nothing of it.
            Compared as a pair is; the function's value may be a list beside a padded row.
        records: method -> a function that gets a dictionary and the arguments of each call, before it runs, and keeps
            in the dictionary what the scheduler says of requests, by their entries in `key`. `from_requests` gets
            what is kept instead of the entry.
        vacant: column -> what its rows hold that have no request, or whose request says None in `from_requests`: a
            value, or `POISON`. Then, at `full`, rows without a request are overwritten after each hooked method, and
            a request whose row still holds that is reported as ROW_UNWRITTEN. Not for flags.
        axis: column -> the axis along which its rows lie, if it is not the first.
        made_from: value, such as metadata of a step -> the columns that it was made from: at `full` they have to be
            what they were when it was made, or changed in place.
        settled: column -> the method after which moves have been applied to it, if they are recorded and applied later.
        on_violation: `raise`, `log` (once for each place), or a function that gets the violation.
        every: check every n-th call of each method, beginning with the first.
        lag: for production. Pairs are compared at every level but `off`, without a wait: the device sides are packed
            and copied in the background, and compared so many hooked calls later, or once they have arrived. Nothing
            else on the device is read.
        runtime: the device, for `lag`; by default the batch's own (`batch.runtime`), or one that is opened when the
            first sample is taken.

    Raises:
        ArgumentError: a method does not exist, or the declaration contradicts itself.
    """
    name = cls.__name__
    ends, begins = hooks_of(name, cls, after, "after"), hooks_of(name, cls, before, "before")
    movers = hooks_of(name, cls, moves, "moves")
    moving = [method for _, method in movers]
    movers += [] if adds is None else hooks_of(name, cls, adds, "adds")
    if not ends and not begins and not movers:
        raise ArgumentError(f"watch of {name}: no method is named", None, "name methods in `after` or `before`")
    declared = Declaration(
        name,
        num_rows=num_rows,
        pairs=pairs,
        rows=rows,
        key=key,
        when=when,
        upto=upto,
        buffers=buffers,
        indices=indices,
        derived=derived,
        implied=implied,
        moves=moving,
        adds=adds,
        from_requests=from_requests,
        records=records,
        vacant=vacant,
        axis=axis,
        made_from=made_from,
        settled=settled,
    )
    if lag is not None and lag < 1:
        raise ArgumentError(f"watch of {name}: expected lag=1 or more, got {lag!r}", lag, "1 compares at the next call")
    if lag is not None and not declared.sampled:
        problem = f"watch of {name}: lag={lag} compares pairs and derived tensors, and none is declared"
        raise ArgumentError(problem, lag, "name them in `pairs`, `from_requests` or `derived`, or leave out `lag`")
    watched = Watched(cls, declared, on_violation, every, lag, runtime)
    hooks = [*begins, *ends, *movers]
    for column, method in (settled or {}).items():
        if method not in [end for _, end in ends]:
            problem = f"watch of {name}: {column!r} is settled by {method!r}, which is not in `after`"
            raise ArgumentError(problem, method, "name it in `after`: its moves are compared there")
    recording = zip(hooks_of(name, cls, records or (), "records"), (records or {}).values(), strict=True)
    recorded = {hook: partial(declared.record, hook[1], function) for hook, function in recording}
    arounds = {hook: watched.around(hook[1], hook in begins, hook in ends) for hook in hooks}
    watched.install(cls, arounds, recorded)
    return watched


def audit(
    cls: type,
    *,
    before: Collection[Hook] = OPERATIONS,
    every: int = 100,
    lag: int = 1,
    on_violation: OnViolation = "log",
) -> Watched:
    """Compares both sides of a `Batch` in production, as `watch(..., lag=1)` does, with the columns as declared.

    Before an operation replaces a batch whose columns have crossed, their device sides are sampled: one launch, one
    copy, no wait. A kernel's wrong write is named by column and row some calls later. Columns whose sides may differ
    (under a bound, or in a stale window) and those with one side are left out.

    Args:
        cls: a subclass of `batchstate.Batch`.
        before: operations before which it is sampled.
        every: sample before every n-th call of each.
        lag: as for `watch`.
        on_violation: as for `watch`.
    """
    batches: Any = cls  # by its public names: without the import, watching loads nothing of the state
    contracts = {name: getattr(column, "contract", None) for name, column in batches.columns().items()}
    names = [name for name, contract in contracts.items() if contract and contract.value != "device_only"]
    pairs = [((name, partial(_side, name, "np")), (f"{name}.device", partial(_side, name, "device"))) for name in names]
    return watch(cls, num_rows="num_rows", before=before, pairs=pairs, every=every, lag=lag, on_violation=on_violation)


def _side(name: str, side: str, batch: Any) -> Any:
    """One side of a column whose sides are to agree at this moment."""
    value = batch[name] if batch.device_side.uploaded else None
    agrees = value is not None and value.contract.value == "exact" and not value.open_windows
    return getattr(value, side) if agrees else None
