"""Watching logs of staged writes: what was staged is on the device after they are applied."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from batchstate import levels
from batchstate.invariants import times_checked
from batchstate.violations import Code
from batchstate.watch.declaration import CallSite, report_stale
from batchstate.watch.hooks import Around, Hook, OnViolation, hooks_of
from batchstate.watch.paths import Name, getter
from batchstate.watch.pools import WatchedPool
from batchstate.watch.snapshots import entries_of

__tracebackhide__ = True  # so that pytest shows the engine's frames

__all__ = ["watch_log"]

Write: TypeAlias = tuple[int, int, Iterable[Any]]
"""Row, first entry, values."""


def watch_log(
    cls: type,
    *,
    stage: Mapping[str, Callable[..., Write]],
    apply: Collection[Hook],
    device: Name,
    staged: Collection[Name] = (),
    on_violation: OnViolation = "raise",
) -> WatchedPool:
    """Checks at `full` that staged writes reach the device: all of them, where they belong, none of them twice.

    Args:
        cls: the log, or the tensor that has it.
        stage: method that stages a write -> a function of its arguments that gives row, first entry and values.
        apply: methods that bring what was staged to the device: names, or `(class, "name")` for one that takes logs, or
            lists of them, as arguments.
        device: where it goes: a tensor of rows, or of one entry each.
        staged: what the log keeps of staged writes; empty, or 0, after they were applied.
        on_violation: as for `watch`.
    """
    read_device, still = getter(device), [(name, getter(name)) for name in staged]
    writes: dict[int, tuple[Any, list[Write]]] = {}  # by identity; an entry keeps its log alive until it is applied

    def question(log: Any, site: CallSite, _: object) -> None:
        _, expected = writes.pop(id(log), (None, []))
        table, seen = entries_of(read_device(log)), dict[tuple[int, int], Any]()
        for row, first, values in expected:
            for at, value in enumerate(values, first):
                if (row, at) in seen:
                    remedy = f"writes of one launch have no order: look for who stages before {site.method}"
                    report_stale(
                        site, "staged", f"entry {at} of row {row} is written twice", seen[row, at], value, remedy
                    )
                    return
                seen[row, at] = value
        remedy = f"what is staged has to reach the device in {site.method}, with its row and its place"
        for (row, at), value in seen.items():
            actual = np.asarray(table[row]).reshape(-1)[at]
            if actual != np.asarray(value).astype(actual.dtype):
                problem = f"entry {at} of row {row} was staged and is not on the device"
                site.compared = True
                report_stale(site, "staged", problem, value, actual, remedy)
                return
        times_checked[Code.DERIVED_STALE] += bool(seen)
        for name, get in still:
            if left := get(log):
                report_stale(site, "staged", f"{name!r} is left after its writes were applied", 0, left, remedy)

    watched = WatchedPool(cls, question, "watch_log", on_violation, 1, question)

    def note(says: Callable[..., Write], log: Any, *args: Any, **kwargs: Any) -> None:
        if levels.full:
            row, first, values = says(*args, **kwargs)
            writes.setdefault(id(log), (log, []))[1].append((row, first, list(values)))

    def applying(name: str) -> Around:
        def run(
            step: int, due: bool, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            result = function(*args, **kwargs)
            if levels.full:
                site = CallSite(watched.name, f"after {name}", step, watched.report)
                flat = [item for value in args for item in (value if isinstance(value, list | tuple) else [value])]
                for log in [item for item in flat if isinstance(item, cls)]:
                    watched.ask(site.operation, question, log, site, ())
            return result

        return run

    arounds = {hook: applying(hook[1]) for hook in hooks_of(cls.__name__, cls, apply, "apply")}
    watched.install(cls, arounds, {(cls, name): partial(note, says) for name, says in stage.items()})
    return watched
