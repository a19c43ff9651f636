"""Watching a batch class that others wrote.

Ten lines over the class of an engine, which is not changed::

    watched = watch(
        ScheduleBatch,
        after=["filter_batch", "merge_batch", "prepare_for_decode"],
        num_rows="batch_size",
        pairs=[("seq_lens_cpu", "seq_lens")],
        rows=["reqs", "sampling_info.temperatures"],
        derived={"seq_lens_sum": lambda batch: int(batch.seq_lens_cpu.sum())},
    )

From here on each of these calls is checked: at `cheap` by lengths, dtypes and what the host holds, at `full` by values.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, final

import attrs

from batchstate import levels
from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime
from batchstate.watch._audit import Audit
from batchstate.watch.hooks import Around, Hook, Hooked, OnViolation, hooks_of
from batchstate.watch.rows import Declaration, Get, Name, Place
from batchstate.watch.snapshots import Rows

__all__ = ["Watched", "WatchedSpec", "audit", "watch"]

F = TypeVar("F", bound=Callable[..., Any])

OPERATIONS = ("filter", "merge", "next_batch", "split", "advance", "update", "replace")
"""Operations of a `Batch` that leave it behind for another one."""


@final
class Watched(Hooked):
    """A class that is watched, until `stop` or the end of a `with` block.

    Attributes:
        declared: the columns, and the questions.
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

    def __repr__(self) -> str:
        return f"Watched({self.name}, {'active' if self.active else 'stopped'}, {self.counters.calls} calls)"

    def spec(self, **calls: Any) -> "WatchedSpec":
        """The same declaration for the fuzzer: `batchstate.testing.fuzz_twins(watched.spec(row=..., build=..., ...))`.

        Args:
            **calls: what else the fuzzer has to know, as in `batchstate.testing.TwinSpec`: `row`, `build`, `filter`,
                and `merge` or `add`; perhaps `advance`, `ops`, `pad`, `copy`, `ascending`, `least_rows`, `max_rows`.
                `advance` may be the name of a method. What it adds follows from that name, or the function's own.

        Raises:
            ArgumentError: `advance` has no name, so that it cannot be told which of `adds` it is.
        """
        advance = calls.get("advance")
        if isinstance(advance, str):
            calls["advance"] = _call_of(self.cls, advance)
        elif advance is not None and self.declared.adds and getattr(advance, "__name__", "<lambda>") == "<lambda>":
            problem = f"spec of {self.name}: `advance` has no name, and `adds` is of {', '.join(self.declared.adds)}"
            raise ArgumentError(problem, advance, f"name the method: advance={next(iter(self.declared.adds))!r}")
        return WatchedSpec(
            self.declared, {"num_rows": self.declared.count, "name": self.name, "least_rows": 1, **calls}
        )

    def stop(self) -> None:
        """Takes the hooks away, and lets go of the requests that were checked last."""
        super().stop()
        self.declared.forget()

    def flush(self) -> None:
        """Waits for the samples of this thread that are under way, and compares them."""
        if self._audit is not None:
            self.ask("flush", self._audit.compare, None)

    def check(self, batch: object, operation: str = "check", *, full: bool | None = None) -> None:
        """Asks everything of one object now; `full` by default as the level of checks says.

        Raises:
            Violation: with `on_violation="raise"`.
            DeclarationError: the object lacks what is declared.
        """
        place = Place(self.name, operation, None, self.report)
        try:
            self.ask(operation, self.declared.check, batch, place, full=levels.full if full is None else full)
        finally:
            self.count("compared", place.compared)

    def around(self, name: str, before: bool, after: bool) -> Around:
        """What runs in the place of a method, made once for each."""
        cls, declared, audit, report = self.cls, self.declared, self._audit, self.report
        began, ended = f"before {name}", f"after {name}"
        added = declared.adds.get(name)
        moving = added is not None or name in declared.moves

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
            if not self.enter(subject):
                return function(*args, **kwargs)
            full, since = levels.full and audit is None, self.every > 1
            place = Place(self.name, ended, step, report, since)
            compared, checked = False, subject is not None
            try:
                if before and checked:
                    first = Place(self.name, began, step, report, since)
                    self.ask(began, declared.check, subject, first, full=full)
                    compared = first.compared
                    if audit is not None:
                        self.ask(began, audit.sample, subject, first, step)
                kept: list[Rows] | None = None
                if full and moving:
                    subjects = _objects(cls, (*args, *kwargs.values()))
                    kept = self.ask(began, declared.before, subjects, added)
                result = function(*args, **kwargs)
                outs = [subject] if result is None else _objects(cls, (result,)) or [subject]
                for out in outs if checked or (after and outs[0] is not None) else ():
                    checked, now = True, None
                    if after:
                        names = (added if moving else ()) if full else ()
                        now = self.ask(ended, declared.check, out, place, full=full, names=names, before=kept or ())
                        if audit is not None:
                            self.ask(ended, audit.sample, out, place, step)
                    if kept:
                        self.ask(ended, declared.check_kept, kept, out, added, place, whole=after, now=now)
                return result
            finally:
                self.leave(subject, checked=checked, compared=full and (compared or place.compared))

        return run


def _objects(cls: type, values: Iterable[Any]) -> list[Any]:
    """Those of a class among some values, and in lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, cls):
            found.append(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], cls):
            found += value
    return found


@final
@attrs.frozen(eq=False)
class WatchedSpec:
    """What is declared of a class, and the calls that a fuzzer makes. `fuzz_twins` and `twin_machine` take it."""

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
    rows: Iterable[Name] | Mapping[str, Get] = (),
    key: Name | None = None,
    moves: Collection[Hook] = (),
    adds: Mapping[str, Mapping[Name, int]] | None = None,
    when: Mapping[str, Name] | None = None,
    upto: Mapping[str, Name] | None = None,
    buffers: bool = False,
    indices: Mapping[str, Name | None] | None = None,
    derived: Mapping[str, Get] | None = None,
    implied: Mapping[str, Get] | None = None,
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
            and a column may be in several pairs.
        rows: further columns with one entry per request: tensors, arrays, lists, or dictionaries from row to entry.
        key: the column that says whose each row is: request ids, or request objects; None is a row without a request.
        moves: methods that move rows and change no entry. At `full` each request has to have what it had; of methods
            that are not in `after`, the device sides of pairs may come later.
        adds: method -> column -> what the method adds to each entry of it, compared at `full`. A function of the batch
            that is not in `rows` is called before and after this method alone.
        when: column -> condition under which it is valid; without it the column and its pairs are left alone.
        upto: column -> how many entries of each row count, on both sides of a pair; what stands behind is garbage.
        buffers: tensors and arrays are longer than the batch, and their first `num_rows` rows count.
        indices: column of row numbers of this batch -> a column of flags that says which rows they are, or None if only
            their range is known.
        derived: column -> the function that computes it from the rows. None is never wrong.
        implied: column -> what it has to be at least: a flag may be set without need, a maximum too large.
        on_violation: `raise`, `log` (once for each place), or a function that gets the violation.
        every: check every n-th call of each method, beginning with the first.
        lag: for production. Pairs are compared at every level but `off`, without a wait: the device sides are packed
            and copied in the background, and compared so many hooked calls later, or once they have arrived. Nothing
            else on the device is read.
        runtime: the device, for `lag`; by default the batch's own (`batch.runtime`), or one that is opened when the
            first sample is taken.

    Raises:
        ArgumentError: `cls` is not a class, a method does not exist, or the declaration contradicts itself.
        DeclarationError: a method is watched already.
    """
    if not isinstance(cls, type):
        raise ArgumentError(f"watch: expected a class, got {cls!r}", cls, "pass the class itself")
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
    )
    if lag is not None and (type(lag) is not int or lag < 1):
        raise ArgumentError(f"watch of {name}: expected lag=1 or more, got {lag!r}", lag, "1 compares at the next call")
    watched = Watched(cls, declared, on_violation, every, lag, runtime)
    hooks = [*begins, *ends, *movers]
    watched.install(cls, {hook: watched.around(hook[1], hook in begins, hook in ends) for hook in hooks})
    return watched


def audit(
    cls: type[Batch],
    *,
    before: Collection[Hook] = OPERATIONS,
    every: int = 100,
    lag: int = 1,
    on_violation: OnViolation = "log",
) -> Watched:
    """Compares both sides of a `Batch` in production: what `watch(..., lag=1)` does, with the columns as declared.

    Before an operation takes the place of a batch whose columns have crossed, their device sides are sampled: one
    launch, one copy, no wait. What a kernel wrote is named by column and row some calls later. Columns whose sides
    may differ (under a bound, or in a stale window) and those with one side are left out.

    Args:
        cls: a batch class.
        before: operations before which it is sampled.
        every: sample before every n-th call of each.
        lag: calls until a sample is compared, at least.
        on_violation: `raise`, `log` (once for each place), or a function that gets the violation.

    Raises:
        ArgumentError: `cls` is not a batch class, or has no such operation.
        DeclarationError: it is audited already.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, Batch)):
        raise ArgumentError(f"audit: expected a subclass of Batch, got {cls!r}", cls, "for other classes use `watch`")
    names = [name for name, column in cls.columns().items() if isinstance(column, MirroredColumn)]
    pairs = [((name, partial(_host_side, name)), (f"{name}.device", partial(_device_side, name))) for name in names]
    return watch(cls, num_rows="num_rows", before=before, pairs=pairs, every=every, lag=lag, on_violation=on_violation)


def _both_hold(name: str, batch: Batch) -> bool:
    side = batch.device_side
    return side.uploaded and side.rows(name) is None and not batch[name].open_windows


def _host_side(name: str, batch: Batch) -> Any:
    return batch[name].np if _both_hold(name, batch) else None


def _device_side(name: str, batch: Batch) -> Any:
    return batch.device_side.column(name).on_current_stream(batch.runtime) if _both_hold(name, batch) else None
