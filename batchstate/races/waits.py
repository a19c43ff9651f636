"""Waits that are wider than needed: for the end of a forward, although the rewritten table was read at its beginning.

An access behind another one of the same bytes needs the first wait that told its stream, or the host, of that one. A
fence may come right behind the newest operation that some access needs; later operations need not be waited for.
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
        fence: name of the fence.
        of: the stream that the fence was recorded on.
        step, site: of the wait.
        orders: the newest operation of that stream that has to come before, and its line; None if there is none.
        for_what: the access that needs it, and its line; None if there is none.
        spare: operations behind it that are waited for too, and need not be; at least one.
        recorded: where the event was recorded early enough, if it was recorded anew before this wait; else None.
    """

    lane: str
    fence: str
    of: str
    step: int
    site: str
    orders: str | None
    for_what: str | None
    spare: tuple[str, ...]
    recorded: str | None

    def __str__(self) -> str:
        who = "the host" if self.lane == HOST else f"stream {self.lane!r}"
        remedy = "wait for a fence that is recorded after what has to be ordered, and no later"
        if self.recorded is not None:
            remedy = (
                f"{self.fence} was recorded in time at {self.recorded}, and anew before this wait: use one per step"
            )
        needed = "orders nothing" if self.orders is None else f"has to order {self.orders}, for {self.for_what}"
        return (
            f"{who} waits for {self.fence} of stream {self.of!r} at {self.site}, step {self.step}: it {needed}\n"
            f"  need not   {', '.join(self.spare)}\n"
            f"  remedy     {remedy}"
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
    recordings: list[Entry]  # of the same event, earlier ones, oldest first
    needed: int = 0
    for_what: Entry | None = None
    whole: bool = False  # needed for events of other streams that the fence's stream knew

    def tells(self, stream: int, event: int) -> bool:
        before = self.before[stream] if stream < len(self.before) else 0
        return before < event <= (self.seen[stream] if stream < len(self.seen) else 0)

    def wide(self) -> WideWait | None:
        spare = [entry for entry in self.work if entry.number > self.needed]
        if not spare or self.whole:
            return None
        newest = next((_at(entry) for entry in self.work if entry.number == self.needed), None)
        in_time = (entry for entry in self.recordings if self.needed and self.needed < entry.number < spare[-1].number)
        return WideWait(
            lane=self.entry.stream.name,
            fence=self.fence,
            of=self.of.name,
            step=self.entry.step,
            site=self.entry.source_line.words()[0],
            orders=(newest or "an operation too old to be known") if self.needed else None,
            for_what=None if self.for_what is None else _at(self.for_what),
            spare=tuple(map(_at, spare)),
            recorded=next((entry.source_line.words()[0] for entry in in_time), None),
        )


@final
class Waits:
    """All waits of a run, and the accesses that need them. It keeps every wait, so a run has to ask for it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._waits: dict[int, list[_Wait]] = {}

    def note(self, entry: Entry, fence: str, of: StreamClock, event: int, before: list[int], seen: list[int]) -> None:
        """A stream, or the host, that knew the events `before` waits for a fence, which tells it of those `seen`."""
        newest = before[of.number] if of.number < len(before) else 0
        work: list[Entry] = []
        recordings: list[Entry] = []
        for earlier in self._history.newest_first():
            if earlier.number <= newest:
                break
            if earlier.stream is of and earlier.number < event and earlier.kind in WORK and not earlier.hidden:
                work.append(earlier)
            if earlier.name is fence and earlier.stream is of and earlier.number < event:
                recordings.append(earlier)
        wait = _Wait(entry, fence, of, list(before), list(seen), work[::-1], recordings[::-1])
        self._waits.setdefault(entry.stream.number, []).append(wait)

    def needs(self, stream: int, other: int, event: int, access: Entry | None) -> None:
        """An access of a stream has to come behind an event of another: the first wait that told of it is needed."""
        told = (wait for number in {stream, 0} for wait in self._waits.get(number, ()) if wait.tells(other, event))
        wait = min(told, key=lambda wait: wait.entry.number, default=None)
        if wait is None:
            return
        if wait.of.number == other:
            if event > wait.needed:
                wait.needed, wait.for_what = event, access
        else:
            wait.whole = True
            self.needs(wait.of.number, other, event, access)

    def wide(self) -> tuple[WideWait, ...]:
        """Waits for more than is needed, in program order."""
        waits = [wait for of_stream in self._waits.values() for wait in of_stream]
        wide = [wait.wide() for wait in sorted(waits, key=lambda wait: wait.entry.number)]
        return tuple(wait for wait in wide if wait is not None)


def _at(entry: Entry) -> str:
    return f"{entry.name} at {entry.source_line.words()[0]}"
