"""What a report says is missing, and what to add: the fence that was meant, where there is one."""

from typing import NamedTuple

from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.journal import Entry, Journal
from batchstate.testing.race.report import HOST, Access, EventKind, RaceKind
from batchstate.testing.watching.sites import Site


class Advice(NamedTuple):
    """The edge that is not there, and how to add it."""

    missing: str
    suggestion: str


def advice(
    journal: Journal, lane: Lane, kind: RaceKind, first: Access, second: Access, dropped: Site | None = None
) -> Advice:
    """Advice on two accesses.

    Args:
        journal: of the run.
        lane: of the first access.
        kind: of the race.
        first: the access that came first in the run.
        second: the other one.
        dropped: where the last tensor of freed memory was dropped.
    """
    behind = journal.fence_behind(lane, first.event, first.step)
    if kind is RaceKind.FREED_IN_USE:
        where = "" if dropped is None or dropped.line is None else f", dropped at {dropped.line},"
        hold = "" if behind is None else f", or keep the tensor until {behind.name} is complete"
        return Advice(
            f"nothing keeps the memory{where} until stream {first.lane!r} is done with it",
            f"hand the tensor over with `Runtime.acquire` (on an accelerator also `record_stream`) before "
            f"{first.operation} on {first.lane!r}{hold}",
        )
    who = "the host" if second.lane == HOST else f"stream {second.lane!r}"
    where = "on the host" if second.lane == HOST else f"on stream {second.lane!r}"
    early = _waited_too_early(journal, lane, first, second)
    if early is not None:
        return Advice(
            f"{who} waits for {early.name}, which was recorded before {first.operation} on stream {first.lane!r}",
            f"record the fence behind {first.operation}: {early.name} (recorded at {early.site.line}) comes before it",
        )
    if behind is None:
        what = f"record a fence on stream {first.lane!r} behind {first.operation}, and wait for it"
    else:
        what = f"wait for {behind.name} (recorded on stream {first.lane!r} at {behind.site.line})"
    return Advice(
        f"{who} never waits for {first.operation} on stream {first.lane!r}",
        f"{what} {where} before {second.operation}",
    )


def _waited_too_early(journal: Journal, lane: Lane, first: Access, second: Access) -> Entry | None:
    """A fence of the first access's stream and step that the second one waited for, and that lies before the access."""
    for entry in journal.newest_first():
        if entry.number < first.event:
            return None
        waits = entry.kind is EventKind.WAIT and entry.lane.name == second.lane and entry.number < second.event
        if waits and entry.waits_for is not None:
            fence = journal.find(entry.waits_for)
            if fence is not None and fence.lane is lane and fence.number < first.event and fence.step == first.step:
                return fence
    return None
