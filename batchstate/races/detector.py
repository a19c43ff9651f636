"""Checks every access to memory: two that share bytes, one of them writing, are ordered or are a race.

Memory that is freed while another stream may still use it is a race as well. A caching allocator gives it to the next
allocation on the stream it was allocated on, at once and without waiting: for that stream its own order suffices, and
other streams are protected only where the allocator was told of them (`record_stream`). So the free is no race: the
next allocation of its stream is one, unless that use is ordered by then. Any allocation counts, because the allocator
chooses which one gets the memory.

An allocation that writes nothing (`torch.empty`) takes no time on its stream. Another stream that uses the memory need
not come behind it, but behind all earlier uses of memory that this stream had got back before.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import attrs

from batchstate import invariants
from batchstate._source_lines import SourceLine, source_line
from batchstate.races.hints import HintFor, hint_for
from batchstate.races.history import Entry, History, Used, rows_of
from batchstate.races.owners import Declared
from batchstate.races.report import Access, EventKind, RaceKind, RaceReport
from batchstate.races.tracing.clocks import HOST, Clocks, StreamClock
from batchstate.races.tracing.memory import HOST_KINDS, Allocation, MemoryKind, Name
from batchstate.races.tracing.regions import ByteRegion, union_of
from batchstate.races.waits import WORK, Waits
from batchstate.runtime.base import Runtime
from batchstate.violations import Breach, Violation

_RECENT = 32

_LARGE = 512
"""Regions of more intervals are folded at once: they are not kept longer than needed."""


@final
class _Block:
    """Accesses in program order, and the union of their bytes: a region that misses the union misses every access."""

    __slots__ = ("events", "regions", "union")

    def __init__(self, events: list[int], regions: list[ByteRegion]) -> None:
        self.events = events
        self.regions = regions
        self.union = union_of(regions)

    def conflict(self, region: ByteRegion, after: int) -> tuple[int, ByteRegion] | None:
        """See `Log.conflict`."""
        if not self.union.overlaps(region):
            return None
        for at in range(len(self.events) - 1, -1, -1):
            if self.events[at] <= after:
                break
            if self.regions[at].overlaps(region):
                return self.events[at], self.regions[at]
        return None

    def behind(self, older: "_Block") -> "_Block":
        """Both in one, without older accesses that a newer one covers: it conflicts wherever they do."""
        exact = not any(region.late for region in self.regions)
        kept = [at for at, region in enumerate(older.regions) if not (exact and self.union.covers(region))]
        events = [older.events[at] for at in kept] + self.events
        return _Block(events, [older.regions[at] for at in kept] + self.regions)


@final
class Log:
    """Accesses of one kind by one stream.

    An access that the host knows to be over can conflict with nothing any more, because every later operation lies
    behind the host. It is dropped, so that a run of any length keeps only accesses in flight. These are many where the
    host never waits: they lie in blocks of doubling size, and an access is compared with a logarithm of their number.
    """

    __slots__ = ("_blocks", "events", "regions")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.regions: list[ByteRegion] = []
        self._blocks: list[_Block] = []

    def __len__(self) -> int:
        return len(self.events) + sum(len(block.events) for block in self._blocks)

    def newest(self) -> int:
        """The newest event."""
        return self.events[-1]

    def conflict(self, region: ByteRegion, after: int) -> tuple[int, ByteRegion] | None:
        """The newest access later than event `after` that shares a byte with `region`, or None."""
        events, regions = self.events, self.regions
        at = len(events) - 1
        while at >= 0:
            if events[at] <= after:
                return None
            if regions[at].overlaps(region):
                return events[at], regions[at]
            at -= 1
        for block in reversed(self._blocks):
            if block.events[-1] <= after:
                return None
            conflict = block.conflict(region, after)
            if conflict is not None:
                return conflict
        return None

    def add(self, event: int, region: ByteRegion, over: int) -> None:
        """Notes an access. The host knows everything up to event `over` of this stream to be over."""
        events, regions = self.events, self.regions
        if events:
            last = regions[-1]
            if region.starts is None and not region.late and region.lo <= last.lo and last.hi <= region.hi:
                events[-1], regions[-1] = event, region  # it conflicts with everything that the older one does
                return
        events.append(event)
        regions.append(region)
        if len(events) > 2 * _RECENT or (region.starts is not None and len(region.starts) > _LARGE):
            self._fold(over)

    def _fold(self, over: int) -> None:
        """Drops accesses that are over, and makes a block of all but the newest."""
        self._blocks = [block for block in self._blocks if block.events[-1] > over]
        first = next((at for at, event in enumerate(self.events) if event > over), len(self.events) - 1)
        cut = len(self.events) - _RECENT
        if first < cut:
            block = _Block(self.events[first:cut], self.regions[first:cut])
            while self._blocks and len(self._blocks[-1].events) <= len(block.events):
                block = block.behind(self._blocks.pop())
            self._blocks.append(block)
            first = cut
        del self.events[:first], self.regions[:first]


OnRace = Literal["raise", "collect"]


@final
class Race(Violation):
    """Two accesses that nothing orders: the violation RACE.

    Attributes:
        report: both accesses and the events around them; `report.save(path)` keeps it for `batchstate race`.
    """

    report: RaceReport

    @classmethod
    def of(cls, violation: Violation, report: RaceReport) -> "Race":
        """The violation, with its report."""
        race = cls(
            violation.code,
            Breach(violation.problem, expected=violation.expected, actual=violation.actual),
            remedy=violation.remedy,
            where={"step": report.second.step, "operation": report.second.operation, "object": report.memory},
        )
        race.report = report
        return race

    def __str__(self) -> str:
        return f"{self.code}: {self.report}"


@final
@attrs.define(eq=False, repr=False)
class RaceAllocation(Allocation):
    """A piece of memory, with every access to it that may still matter.

    Attributes:
        name: for reports.
        allocated_on: the stream it was allocated on, which gets it back; None for memory older than the tracing.
        allocated_at: line of the allocation.
        reads, writes: stream -> its accesses.
        kept_for: streams for which it is kept alive.
        first_write: the event that wrote it first, for memory that is undecided.
        dropped: line where its last tensor was dropped.
        captured: whether a graph has its address.
        fresh: the event that allocated it without writing it; None for all other memory.
        reused: stream -> its newest use of memory that this allocation may have got; None where `fresh` is.
        written: bytes written since `fresh`.
        declared: whose its elements are, where the code says so.
        block: memory that is handed out again.
    """

    name: Name
    allocated_on: StreamClock | None
    allocated_at: SourceLine | None
    reads: dict[int, Log] = attrs.field(factory=dict)
    writes: dict[int, Log] = attrs.field(factory=dict)
    kept_for: set[int] = attrs.field(factory=set)
    first_write: Entry | None = None
    dropped: SourceLine | None = None
    captured: bool = False
    fresh: Entry | None = None
    reused: dict[int, int] | None = None
    written: ByteRegion | None = None
    declared: list[Declared] = attrs.field(factory=list)
    block: Any = None

    def __str__(self) -> str:
        where = "" if self.allocated_at is None or self.allocated_at.line is None else f" at {self.allocated_at.line}"
        if self.kind is not MemoryKind.DEVICE:
            return f"{self.name}, {self.kind.value} memory{where and ', made' + where}"
        if self.allocated_on is None:
            return f"{self.name}, which was there before the tracing"
        return f"{self.name}, allocated on {self.allocated_on.name!r}{where}"


@final
class Detector:
    """Checks accesses, and reports races: raised as `Race`, or collected.

    Args:
        step: of the runtime, for reports.
        on_race: raise the first race, or collect them in `races`.
        hint_for: words the missing edge and the remedy of a report.

    Attributes:
        clocks: of all streams.
        history: the newest events.
        races: all reports; at most one for the same two lines and kind.
        raised: those of them that were raised.
        waits: every wait with the accesses that need it; None for a run that does not ask.
        accesses, comparisons: accesses that were checked, and streams' logs that these were compared with.
    """

    def __init__(self, step: Callable[[], int], on_race: OnRace, hint_for: HintFor = hint_for) -> None:
        self.clocks = Clocks()
        self.history = History()
        self.races: list[RaceReport] = []
        self.raised: list[Race] = []
        self.waits: Waits | None = None
        self.accesses = 0
        self.comparisons = 0
        self._step = step
        self._on_race = on_race
        self._hint_for = hint_for
        self._reported: set[tuple[object, ...]] = set()
        self._reads_over: dict[int, int] = {}
        self._freed: dict[int, list[RaceAllocation]] = {}
        self._got_back: dict[int, dict[int, int]] = {}

    # Events

    def event(
        self,
        stream: StreamClock,
        kind: EventKind,
        name: str,
        *,
        reads: Used = (),
        writes: Used = (),
        waits_for: int | None = None,
        at: SourceLine | None = None,
        hidden: bool = False,
    ) -> Entry:
        """An event happens on a stream."""
        number = self.clocks.happens(stream)
        if kind in WORK and not hidden:
            stream.work = number
        where = source_line(3) if at is None else at
        return self.history.note(
            Entry(number, stream, kind, name, self._step(), where, reads, writes, waits_for, hidden)
        )

    def inspected(self, stream: StreamClock) -> None:
        """A check has read device memory on a stream, and so waited for it: the stream's reads are over.

        Its writes stay unknown to the host: a check orders no later operation.
        """
        self._reads_over[stream.number] = stream.newest

    # Accesses

    def check(
        self, entry: Entry, accesses: Sequence[tuple[RaceAllocation, ByteRegion, bool]], *, updates: bool = False
    ) -> None:
        """Compares the accesses of an event with all others; `note` them once it has happened.

        `updates` says that it reads what it writes: no further race, but perhaps what somebody else has left.
        """
        __tracebackhide__ = True
        stream, seen = entry.stream, entry.stream.seen
        own, length = stream.number, len(entry.stream.seen)
        for allocation, region, writes in accesses:
            self.accesses += 1
            before = (True, allocation.writes), (False, allocation.reads)
            if allocation.declared and (updates or not writes) and not Runtime.inspecting:
                self._check_owner(allocation, entry, region)
            if self.waits is not None:
                for _, logs in before if writes else before[:1]:
                    for other, log in logs.items():
                        if other != own and (conflict := log.conflict(region, 0)) is not None:
                            self.waits.needs(own, other, conflict[0], entry)
            if allocation.fresh is not None and not writes:
                self._check_written(allocation, allocation.fresh, entry, region)
            for wrote, logs in before if writes else before[:1]:
                for other, log in logs.items():
                    if other == own:
                        continue
                    at = seen[other] if other < length else 0
                    if not wrote:
                        at = max(at, self._reads_over.get(other, 0))
                    self.comparisons += 1
                    if log.events[-1] > at and (conflict := log.conflict(region, at)) is not None:
                        self._report_conflict(allocation, other, conflict, entry, region, wrote, writes)

    def _check_written(self, allocation: RaceAllocation, fresh: Entry, entry: Entry, region: ByteRegion) -> None:
        """Reports a read of fresh memory without one written byte: padded rows beside written ones are no mistake."""
        __tracebackhide__ = True
        if allocation.written is None or not allocation.written.overlaps(region.brief() if region.late else region):
            self.report(
                RaceKind.UNWRITTEN_READ,
                allocation,
                rows_of(allocation.name, region),
                self.access(fresh.number, fresh.stream.number, "allocates", allocation, region),
                self.access(entry.number, entry.stream.number, "reads", allocation, region),
            )

    def _check_owner(self, allocation: RaceAllocation, entry: Entry, region: ByteRegion) -> None:
        """Reports a read of what somebody else has left in declared memory."""
        __tracebackhide__ = True
        for declared in allocation.declared:
            if (left := declared.leftover(region)) is not None:
                self.report(
                    RaceKind.LEFTOVER_READ,
                    allocation,
                    rows_of(allocation.name, left.region),
                    self.access(left.event, left.stream, "writes", allocation, left.region),
                    self.access(entry.number, entry.stream.number, "reads", allocation, region),
                    owners=(left.left, left.wanted),
                )

    def note(self, entry: Entry, accesses: Sequence[tuple[RaceAllocation, ByteRegion, bool]]) -> None:
        """Notes the accesses of an event: later ones are compared with them."""
        own, over = entry.stream.number, self.clocks.streams[0].seen
        done = over[own] if own < len(over) else 0
        for allocation, region, writes in accesses:
            if writes and allocation.fresh is not None:
                allocation.written = region if allocation.written is None else union_of([allocation.written, region])
            if writes:
                for declared in allocation.declared:
                    declared.wrote(entry, region)
            logs = allocation.writes if writes else allocation.reads
            mine = logs.get(own)
            if mine is None:
                mine = logs[own] = Log()
            mine.add(entry.number, region, done)

    def note_first(self, entry: Entry, allocation: RaceAllocation, region: ByteRegion) -> None:
        """Notes the write of the event that has made the memory; no older access exists."""
        self.accesses += 1
        log = allocation.writes[entry.stream.number] = Log()
        log.events.append(entry.number)
        log.regions.append(region)

    def unordered(self, allocation: RaceAllocation, stream: StreamClock) -> tuple[int, tuple[int, ByteRegion]] | None:
        """A stream that uses the memory unknown to `stream`, with its newest such use; None if there is none.

        Streams that the memory was kept alive for do not count.
        """
        for logs in (allocation.writes, allocation.reads):
            for other, log in logs.items():
                if (
                    other != stream.number
                    and other not in allocation.kept_for
                    and not stream.knows(other, log.newest())
                ):
                    return other, (log.newest(), log.regions[-1])
        return None

    def _report_conflict(
        self,
        allocation: RaceAllocation,
        other: int,
        conflict: tuple[int, ByteRegion],
        entry: Entry,
        region: ByteRegion,
        first_writes: bool,
        second_writes: bool,
    ) -> None:
        __tracebackhide__ = True
        event, before = conflict
        common = before.common(region) or region
        kind, does = _kind_of(allocation, entry, first_writes, second_writes), "writes" if first_writes else "reads"
        if allocation.reused is not None and allocation.fresh is not None and event == allocation.fresh.number:
            if all(entry.stream.knows(*use) for use in allocation.reused.items()):
                return
            kind, does = RaceKind.FREED_IN_USE, "allocates"
        self.report(
            kind,
            allocation,
            rows_of(allocation.name, common),
            self.access(event, other, does, allocation, before),
            self.access(entry.number, entry.stream.number, "writes" if second_writes else "reads", allocation, region),
        )

    def access(self, event: int, stream: int, does: str, allocation: RaceAllocation, region: ByteRegion) -> Access:
        """One side of a report."""
        entry = self.history.find(event)
        name = self.clocks.streams[stream].name
        rows = f"{rows_of(allocation.name, region)} of {allocation.name}"
        if entry is None:
            return Access(event, does, "an operation too old to be known", name, 0, "an unknown line", None, rows)
        line, caller = entry.source_line.words()
        return Access(event, does, entry.name, name, entry.step, line, caller, rows)

    # Freed memory

    def freed(self, allocation: RaceAllocation) -> None:
        """The last tensor of a piece of memory is gone. Reports nothing: it may be called anywhere."""
        pinned = allocation.kind is MemoryKind.PINNED
        stream = self.clocks.host if pinned else allocation.allocated_on
        if allocation.captured:
            allocation.dropped = source_line(2)
        if stream is None or allocation.kind not in (MemoryKind.DEVICE, MemoryKind.PINNED):
            return
        own, foreign = stream.number, False
        got_back = self._got_back.get(own)
        if got_back is None:
            got_back = self._got_back[own] = {}
        fresh = 0 if allocation.fresh is None else allocation.fresh.number
        for logs in (allocation.writes, allocation.reads):
            for other, log in logs.items():
                newest = log.events[-1]
                if other != own and not (pinned and other in allocation.kept_for):
                    foreign = True
                    if self.waits is not None:
                        self.waits.needs(own, other, newest, None)
                if newest != fresh and newest > got_back.get(other, 0) and other not in allocation.kept_for:
                    got_back[other] = newest
        if foreign and self.unordered(allocation, stream) is not None:
            allocation.dropped = source_line(2)
            self._freed.setdefault(stream.number, []).append(allocation)

    def unwritten(self, allocation: RaceAllocation, entry: Entry) -> None:
        """An event has allocated memory, and written nothing."""
        allocation.fresh = entry
        allocation.reused = dict(self._got_back.get(entry.stream.number, ()))

    def allocates(self, stream: StreamClock, entry: Entry) -> None:
        """An event of a stream allocates memory."""
        waiting = self._freed.get(stream.number)
        while waiting:
            allocation = waiting.pop()  # it is reported once; if that raises, the others are still here
            use = self.unordered(allocation, stream)
            if use is None:
                continue
            other, (event, region) = use
            does = "writes" if other in allocation.writes and allocation.writes[other].newest() == event else "reads"
            first = self.access(event, other, does, allocation, region)
            rows = f"memory that may be that of {allocation.name}, which was freed"
            line, caller = entry.source_line.words()
            second = Access(entry.number, "allocates", entry.name, stream.name, entry.step, line, caller, rows)
            self.report(RaceKind.FREED_IN_USE, allocation, rows_of(allocation.name, region), first, second)

    def allocates_pinned(self) -> None:
        """The host allocates pinned memory, and may get a block that torch does not know to be in use."""
        __tracebackhide__ = True
        if self._freed.get(0):
            self.allocates(self.clocks.host, self.event(self.clocks.host, EventKind.ALLOCATION, "pinned memory"))

    def freed_under_graph(
        self, name: str, stream: StreamClock, accesses: Sequence[tuple[RaceAllocation, ByteRegion, bool]]
    ) -> bool:
        """Reports that a graph is about to access memory that was freed behind its capture; else returns False."""
        __tracebackhide__ = True
        for memory, region, writes in accesses:
            if memory.captured and memory.dropped is not None:
                drop = self.event(self.clocks.host, EventKind.FREE, "the drop of its last tensor", at=memory.dropped)
                entry = self.event(stream, EventKind.OPERATION, name)
                self.report(
                    RaceKind.FREED_IN_USE,
                    memory,
                    rows_of(memory.name, region),
                    self.access(drop.number, 0, "frees", memory, region),
                    self.access(entry.number, stream.number, "writes" if writes else "reads", memory, region),
                )
                return True
        return False

    # Reports

    def report(
        self,
        kind: RaceKind,
        allocation: RaceAllocation,
        rows: str,
        first: Access,
        second: Access,
        owners: tuple[str, str] | None = None,
    ) -> None:
        """Reports a race; one per pair of lines is collected. `owners` are those of a leftover and of its reader."""
        __tracebackhide__ = True
        key = (kind, first.site, first.caller, first.operation, second.site, second.caller, second.operation)
        if self._on_race == "collect" and key in self._reported:
            return
        stream = next(stream for stream in self.clocks.streams if stream.name == first.lane)
        missing, suggestion = self._hint_for(self.history, stream, kind, first, second, allocation.dropped)
        report = RaceReport(
            kind=kind,
            problem=_problem(kind, first, second, owners),
            memory=str(allocation),
            rows=rows,
            first=first,
            second=second,
            missing=missing,
            suggestion=suggestion,
            lanes=[stream.name for stream in self.clocks.streams],
            events=self.history.shown(first.event, second.event),
        )
        if key not in self._reported:
            self._reported.add(key)
            self.races.append(report)
        try:
            invariants.race(False, report.problem, missing, remedy=suggestion, object=report.memory)
        except Violation as violation:
            if self._on_race == "raise":
                self.raised.append(Race.of(violation, report))
                raise self.raised[-1] from None


_PROBLEMS = {
    RaceKind.READ_AFTER_WRITE: "a read may come before the write it is meant to see",
    RaceKind.WRITE_AFTER_READ: "memory may be overwritten before it was read",
    RaceKind.WRITE_AFTER_WRITE: "two writes may come in either order",
    RaceKind.STAGING_REFILLED: "the source of a copy may be refilled before the copy has run",
    RaceKind.HOST_READS_EARLY: "the host may read before the copy has landed",
    RaceKind.HOST_MEMORY_REUSED: "two copies may land in the same host memory, or one where another is still read",
    RaceKind.FREED_IN_USE: "memory may be given to another tensor while it is in use",
    RaceKind.UNWRITTEN_READ: "memory is read that nothing has written",
    RaceKind.LEFTOVER_READ: "a value is read that somebody else has left",
    RaceKind.PROGRAMS_CLASH: "two programs of one launch access one element, and one of them writes it",
}


def _problem(kind: RaceKind, first: Access, second: Access, owners: tuple[str, str] | None) -> str:
    if owners is not None:
        left, wanted = owners
        return f"{_PROBLEMS[kind]}: {_short(second)} reads for {wanted} what {_short(first)} wrote for {left}"
    if kind is RaceKind.PROGRAMS_CLASH:
        return f"{_PROBLEMS[kind]}: nothing orders the programs of {_short(second)}"
    if kind is RaceKind.UNWRITTEN_READ:
        return f"{_PROBLEMS[kind]}: {_short(second)} finds what {_short(first)} left there"
    if first.does == "frees":
        return f"a graph uses memory that was freed behind its capture: {_short(second)} has its address alone"
    if first.does == "allocates":
        return (
            f"memory is used on {_where(second)} with no order after its allocation on {_where(first)}, "
            "whose earlier work may still use that block"
        )
    return f"{_PROBLEMS[kind]}: nothing orders {_short(second)} after {_short(first)}"


def _kind_of(allocation: RaceAllocation, entry: Entry, first_writes: bool, second_writes: bool) -> RaceKind:
    if allocation.kind in HOST_KINDS:
        if entry.stream.name != HOST:
            return RaceKind.HOST_MEMORY_REUSED
        if not first_writes:
            return RaceKind.STAGING_REFILLED
        return RaceKind.HOST_MEMORY_REUSED if second_writes else RaceKind.HOST_READS_EARLY
    if first_writes and second_writes:
        return RaceKind.WRITE_AFTER_WRITE
    return RaceKind.READ_AFTER_WRITE if first_writes else RaceKind.WRITE_AFTER_READ


def _short(access: Access) -> str:
    return f"{access.operation} on {_where(access)}"


def _where(access: Access) -> str:
    return "the host" if access.lane == HOST else repr(access.lane)
