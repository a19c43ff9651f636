"""Judges every access to memory: two that touch the same bytes, one of them writing, are ordered or are a race."""

from collections.abc import Callable, Sequence
from typing import Literal, final

from batchstate import invariants
from batchstate.testing.race.advice import advice
from batchstate.testing.race.clocks import Clocks, Lane
from batchstate.testing.race.journal import Entry, Journal, Used, rows_of
from batchstate.testing.race.log import Log
from batchstate.testing.race.report import HOST, Access, EventKind, RaceKind, RaceReport
from batchstate.testing.watching.memory import Name, Place
from batchstate.testing.watching.regions import Region
from batchstate.testing.watching.sites import Site, site
from batchstate.violations import Violation

OnRace = Literal["raise", "collect"]


@final
class Race(Violation):
    """Two accesses that nothing orders: the violation RACE.

    Attributes:
        report: everything that is known of it; `report.save(path)` keeps it for `batchstate race`.
    """

    report: RaceReport

    @classmethod
    def of(cls, violation: Violation, report: RaceReport) -> "Race":
        """The violation, with its report."""
        race = cls(
            violation.code,
            violation.problem,
            expected=violation.expected,
            actual=violation.actual,
            remedy=violation.remedy,
            where={"step": report.second.step, "operation": report.second.operation, "object": report.memory},
        )
        race.report = report
        return race

    def __str__(self) -> str:
        return f"{self.code}: {self.report}"


@final
class Kept:
    """What is known of one piece of memory.

    Attributes:
        name: for reports.
        place: whose it is.
        made_on: the stream it was allocated on, which gets it back; None where it was there before the watching.
        made_at: where.
        reads, writes: lane -> its accesses.
        handed: lanes for which it was kept alive.
        made: the event that wrote it first, for memory that is undecided.
        dropped: where its last tensor was dropped.
    """

    __slots__ = ("dropped", "handed", "made", "made_at", "made_on", "name", "place", "reads", "writes")

    def __init__(self, name: Name, place: Place, made_on: Lane | None, made_at: Site | None) -> None:
        self.name = name
        self.place = place
        self.made_on = made_on
        self.made_at = made_at
        self.reads: dict[int, Log] = {}
        self.writes: dict[int, Log] = {}
        self.handed: set[int] = set()
        self.made: Entry | None = None
        self.dropped: Site | None = None

    def __str__(self) -> str:
        where = "" if self.made_at is None or self.made_at.line is None else f" at {self.made_at.line}"
        if self.place is not Place.DEVICE:
            return f"{self.name}, {self.place.value} memory{where and ', made' + where}"
        if self.made_on is None:
            return f"{self.name}, which was there before the watching"
        return f"{self.name}, allocated on {self.made_on.name!r}{where}"


@final
class Detector:
    """Judges accesses, and reports.

    Args:
        step: of the runtime, for reports.
        on_race: raise the first race, or collect them in `races`.

    Attributes:
        clocks: what each lane knows.
        journal: the newest events.
        races: all reports; at most one for the same two lines and kind.
        accesses, comparisons: how many accesses were judged, and how many lanes' logs each was held against, for cost.
    """

    def __init__(self, step: Callable[[], int], on_race: OnRace) -> None:
        self.clocks = Clocks()
        self.journal = Journal()
        self.races: list[RaceReport] = []
        self.accesses = 0
        self.comparisons = 0
        self._step = step
        self._on_race = on_race
        self._reported: set[tuple[object, ...]] = set()
        self._reads_over: dict[int, int] = {}

    # Events

    def event(
        self,
        lane: Lane,
        kind: EventKind,
        name: str,
        *,
        reads: Used = (),
        writes: Used = (),
        waits_for: int | None = None,
        at: Site | None = None,
        hidden: bool = False,
    ) -> Entry:
        """Something happens on a lane."""
        number = self.clocks.happens(lane)
        if kind in _WORK and not hidden:
            lane.work = number
        where = site(3) if at is None else at
        return self.journal.note(Entry(number, lane, kind, name, self._step(), where, reads, writes, waits_for, hidden))

    def inspected(self, lane: Lane) -> None:
        """A check has read device memory on a stream, and so waited for it: what the stream has read is over.

        That what it has written is over, the host does not learn: a check orders nothing that comes later.
        """
        self._reads_over[lane.number] = lane.newest

    # Accesses

    def judge(self, entry: Entry, touched: Sequence[tuple[Kept, Region, bool]]) -> None:
        """Holds the accesses of an event against all others; `note` them once it has happened.

        Raises:
            Race: one is not ordered behind an earlier one, and races are raised.
        """
        __tracebackhide__ = True
        lane, seen = entry.lane, entry.lane.seen
        own, known = lane.number, len(entry.lane.seen)
        for kept, region, writes in touched:
            self.accesses += 1
            for other, log in kept.writes.items():
                if other != own:
                    at = seen[other] if other < known else 0
                    self.comparisons += 1
                    if log.events[-1] > at and (found := log.conflict(region, at)) is not None:
                        self._found(kept, other, found, entry, region, first_writes=True, second_writes=writes)
            if writes:
                for other, log in kept.reads.items():
                    if other != own:
                        at = max(seen[other] if other < known else 0, self._reads_over.get(other, 0))
                        self.comparisons += 1
                        if log.events[-1] > at and (found := log.conflict(region, at)) is not None:
                            self._found(kept, other, found, entry, region, first_writes=False, second_writes=True)

    def note(self, entry: Entry, touched: Sequence[tuple[Kept, Region, bool]]) -> None:
        """Notes the accesses of an event: later ones are held against them."""
        own, over = entry.lane.number, self.clocks.lanes[0].seen
        done = over[own] if own < len(over) else 0
        for kept, region, writes in touched:
            logs = kept.writes if writes else kept.reads
            mine = logs.get(own)
            if mine is None:
                mine = logs[own] = Log()
            mine.add(entry.number, region, done)

    def unordered(self, kept: Kept, lane: Lane) -> tuple[int, tuple[int, Region]] | None:
        """A stream that uses the memory unknown to `lane`, with its newest such use; None if there is none.

        Streams that the memory was kept alive for do not count.
        """
        for logs in (kept.writes, kept.reads):
            for other, log in logs.items():
                if other != lane.number and other not in kept.handed and not lane.knows(other, log.newest()):
                    return other, (log.newest(), log.regions[-1])
        return None

    def _found(
        self,
        kept: Kept,
        other: int,
        found: tuple[int, Region],
        entry: Entry,
        region: Region,
        *,
        first_writes: bool,
        second_writes: bool,
    ) -> None:
        __tracebackhide__ = True
        event, before = found
        common = before.common(region) or region
        kind = _kind_of(kept, entry, first_writes, second_writes)
        self.report(
            kind,
            kept,
            rows_of(kept.name, common),
            self.access(event, other, "writes" if first_writes else "reads", kept, before),
            self.access(entry.number, entry.lane.number, "writes" if second_writes else "reads", kept, region),
        )

    def access(self, event: int, lane: int, does: str, kept: Kept, region: Region) -> Access:
        """One side of a report."""
        entry = self.journal.find(event)
        name = self.clocks.lanes[lane].name
        rows = f"{rows_of(kept.name, region)} of {kept.name}"
        if entry is None:
            return Access(event, does, "an operation too old to be known", name, 0, "an unknown line", None, rows)
        return Access(event, does, entry.name, name, entry.step, *entry.site.words(), rows)

    # Reports

    def report(self, kind: RaceKind, kept: Kept, rows: str, first: Access, second: Access) -> None:
        """Reports a race; of the same two lines one is collected.

        Raises:
            Race: races are raised.
        """
        __tracebackhide__ = True
        key = (kind, first.site, first.caller, first.operation, second.site, second.caller, second.operation)
        if self._on_race == "collect" and key in self._reported:
            return
        lane = next(lane for lane in self.clocks.lanes if lane.name == first.lane)
        missing, suggestion = advice(self.journal, lane, kind, first, second, kept.dropped)
        report = RaceReport(
            kind=kind,
            problem=f"{_PROBLEMS[kind]}: nothing orders {_short(second)} behind {_short(first)}",
            memory=str(kept),
            rows=rows,
            first=first,
            second=second,
            missing=missing,
            suggestion=suggestion,
            lanes=[lane.name for lane in self.clocks.lanes],
            events=self.journal.shown(first.event, second.event),
        )
        if key not in self._reported:
            self._reported.add(key)
            self.races.append(report)
        try:
            invariants.race(False, report.problem, missing, remedy=suggestion, object=report.memory)
        except Violation as violation:
            if self._on_race == "raise":
                raise Race.of(violation, report) from None


_WORK = (EventKind.OPERATION, EventKind.COPY_TO_DEVICE, EventKind.COPY_TO_HOST)

_PROBLEMS = {
    RaceKind.READ_AFTER_WRITE: "a read may come before the write it is meant to see",
    RaceKind.WRITE_AFTER_READ: "memory may be overwritten before it was read",
    RaceKind.WRITE_AFTER_WRITE: "two writes may come in either order",
    RaceKind.STAGING_REFILLED: "the source of a copy may be refilled before the copy has run",
    RaceKind.HOST_READS_EARLY: "the host may read before the copy has landed",
    RaceKind.HOST_MEMORY_REUSED: "two copies may land in the same host memory, or one where another is still read",
    RaceKind.FREED_IN_USE: "memory may be given to somebody else while it is in use",
}


def _kind_of(kept: Kept, entry: Entry, first_writes: bool, second_writes: bool) -> RaceKind:
    if kept.place in (Place.PINNED, Place.HOST):
        if entry.lane.name != HOST:
            return RaceKind.HOST_MEMORY_REUSED
        if not first_writes:
            return RaceKind.STAGING_REFILLED
        return RaceKind.HOST_MEMORY_REUSED if second_writes else RaceKind.HOST_READS_EARLY
    if first_writes and second_writes:
        return RaceKind.WRITE_AFTER_WRITE
    return RaceKind.READ_AFTER_WRITE if first_writes else RaceKind.WRITE_AFTER_READ


def _short(access: Access) -> str:
    where = "the host" if access.lane == HOST else repr(access.lane)
    return f"{access.operation} on {where}"
