"""Waits that are wider than they have to be: for the end of a forward, where what is rewritten was read long before.

An access that comes behind another one of the same bytes needs the first wait that told its stream, or the host, of
that one. What a wait's fence stands behind, beyond the newest operation that is so needed, need not be waited for.
"""

from typing import final

import attrs

from batchstate.races.history import Entry, History
from batchstate.races.report import EventKind
from batchstate.races.tracing.clocks import HOST, StreamClock

WORK = (EventKind.OPERATION, EventKind.COPY_TO_DEVICE, EventKind.COPY_TO_HOST)
"""Events that take time on a device."""


@final
@attrs.frozen
class WideWait:
    """A wait for more than is needed.

    Attributes:
        lane: the stream that waits, or `HOST`.
        fence: what it waits for.
        of: the stream that the fence was recorded on.
        step, site: of the wait.
        orders: the newest operation of that stream that has to come before, and its line; None if there is none.
        for_what: the access that needs it, and its line; None if there is none.
        spare: operations behind it that are waited for too, and need not be; at least one.
    """

    lane: str
    fence: str
    of: str
    step: int
    site: str
    orders: str | None
    for_what: str | None
    spare: tuple[str, ...]

    def __str__(self) -> str:
        who = "the host" if self.lane == HOST else f"stream {self.lane!r}"
        needed = "orders nothing" if self.orders is None else f"has to order {self.orders}, for {self.for_what}"
        return (
            f"{who} waits for {self.fence} of stream {self.of!r} at {self.site}, step {self.step}: it {needed}\n"
            f"  need not   {', '.join(self.spare)}\n"
            f"  remedy     wait for a fence that is recorded after what has to be ordered, and no later"
        )


@final
@attrs.define(eq=False)
class _Wait:
    entry: Entry
    fence: str
    of: StreamClock
    before: list[int]
    seen: list[int]
    work: list[Entry]
    needed: int = 0
    for_what: Entry | None = None
    whole: bool = False  # what the fence's stream had learnt from others is needed

    def tells(self, stream: int, event: int) -> bool:
        known = self.before[stream] if stream < len(self.before) else 0
        return known < event <= (self.seen[stream] if stream < len(self.seen) else 0)


@final
class Waits:
    """All waits of a run, and what needs them. Only for a run that asks for it: it keeps every wait."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._waits: dict[int, list[_Wait]] = {}

    def note(self, entry: Entry, fence: str, of: StreamClock, event: int, before: list[int], seen: list[int]) -> None:
        """A stream, or the host, waits. `before` and `seen`: what it knew, and what the fence tells it."""
        known = before[of.number] if of.number < len(before) else 0
        work: list[Entry] = []
        for one in self._history.newest_first():
            if one.number <= known:
                break
            if one.stream is of and one.number < event and one.kind in WORK and not one.hidden:
                work.append(one)
        wait = _Wait(entry, fence, of, list(before), list(seen), work[::-1])
        self._waits.setdefault(entry.stream.number, []).append(wait)

    def needs(self, stream: int, other: int, event: int, what: Entry | None) -> None:
        """What a stream does next has to come behind an event of another: the first wait that told of it is needed."""
        told = (one for number in {stream, 0} for one in self._waits.get(number, ()) if one.tells(other, event))
        wait = min(told, key=lambda one: one.entry.number, default=None)
        if wait is None:
            return
        if wait.of.number == other:
            if event > wait.needed:
                wait.needed, wait.for_what = event, what
        else:
            wait.whole = True
            self.needs(wait.of.number, other, event, what)

    def wide(self) -> tuple[WideWait, ...]:
        """Those for more than is needed, in program order."""
        found = []
        for wait in sorted(
            (one for several in self._waits.values() for one in several), key=lambda one: one.entry.number
        ):
            spare = [one for one in wait.work if one.number > wait.needed]
            if spare and not wait.whole:
                needed = next((one for one in wait.work if one.number == wait.needed), None)
                found.append(
                    WideWait(
                        lane=wait.entry.stream.name,
                        fence=wait.fence,
                        of=wait.of.name,
                        step=wait.entry.step,
                        site=wait.entry.source_line.words()[0],
                        orders=None
                        if not wait.needed
                        else "an operation too old to be known"
                        if needed is None
                        else _at(needed),
                        for_what=None if wait.for_what is None else _at(wait.for_what),
                        spare=tuple(map(_at, spare)),
                    )
                )
        return tuple(found)


def _at(entry: Entry) -> str:
    return f"{entry.name} at {entry.source_line.words()[0]}"
