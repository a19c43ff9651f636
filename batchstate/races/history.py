"""The newest events of a run, and the memory they touched in words."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate._source_lines import SourceLine
from batchstate.races.report import Access, Event, EventKind
from batchstate.races.tracing.clocks import StreamClock
from batchstate.races.tracing.memory import Name
from batchstate.races.tracing.regions import ByteRegion

Used = Sequence[tuple[Name, ByteRegion]]

KEPT = 4096
"""Events kept with their lines: several steps of an engine. An older access is reported without its line."""

SHOWN = 240
"""Events in a report, at most."""

_MOST_ROWS = 8


@final
@attrs.define(eq=False, repr=False)
class Entry:
    """An event, as it is kept.

    Attributes:
        number, stream, kind, name, step, source_line: as in `report.Event`.
        reads, writes: memory.
        waits_for: event of the fence, for a wait.
        hidden: not shown, because it may have been an operation of the host.
    """

    number: int
    stream: StreamClock
    kind: EventKind
    name: str
    step: int
    source_line: SourceLine
    reads: Used = ()
    writes: Used = ()
    waits_for: int | None = None
    hidden: bool = False

    def shown(self, oldest: int) -> Event:
        """The event in words; a fence before event `oldest` is not in the report."""
        site, caller = self.source_line.words()
        waits_for = self.waits_for if self.waits_for is not None and self.waits_for >= oldest else None
        return Event(
            number=self.number,
            lane=self.stream.name,
            kind=self.kind,
            name=self.name,
            step=self.step,
            site=site,
            caller=caller,
            reads=[described(name, region) for name, region in self.reads],
            writes=[described(name, region) for name, region in self.writes],
            waits_for=waits_for,
        )


@final
class History:
    """The newest `KEPT` events."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)

    def note(self, entry: Entry) -> Entry:
        """Keeps an event; numbers go up by one."""
        self._entries.append(entry)
        return entry

    def find(self, number: int) -> Entry | None:
        """The event, unless it is too old."""
        entries = self._entries
        if not entries:
            return None
        at = number - entries[0].number
        return entries[at] if 0 <= at < len(entries) else None

    def fence_behind(self, stream: StreamClock, event: int, step: int, named: str = "") -> Entry | None:
        """The first fence recorded on a stream behind an event, in the same step: a later one has another purpose.

        `named` is how its name begins.
        """
        for entry in self._entries:
            fence = entry.number > event and entry.kind is EventKind.FENCE and entry.stream is stream
            if fence and entry.name.startswith(named):
                return entry if entry.step == step else None
        return None

    def waited_too_early(self, stream: StreamClock, first: Access, second: Access) -> Entry | None:
        """A fence of the first access's stream and step that the second waited for, and that lies before the access."""
        for entry in self.newest_first():
            if entry.number < first.event:
                return None
            waits = entry.kind is EventKind.WAIT and entry.stream.name == second.lane and entry.number < second.event
            if waits and entry.waits_for is not None:
                fence = self.find(entry.waits_for)
                if fence is None or fence.stream is not stream or fence.step != first.step:
                    continue
                if fence.number < first.event:
                    return fence
        return None

    def newest_first(self) -> Iterator[Entry]:
        """All events, backwards."""
        return reversed(self._entries)

    def shown(self, first: int, second: int) -> list[Event]:
        """The events of a report on two accesses: some before the first, all between, none behind the second."""
        oldest = max(min(first, second) - 12, second - SHOWN)
        kept = [entry for entry in self._entries if entry.number == first or oldest <= entry.number <= second]
        return [entry.shown(oldest) for entry in kept if not entry.hidden or entry.number in (first, second)]


def described(name: Name, region: ByteRegion) -> str:
    """The memory and the rows of it, for people."""
    return f"{name} {rows_of(name, region)}"


def rows_of(name: Name, region: ByteRegion) -> str:
    """The rows, elements or bytes of a region, seen as the tensor that the memory was first seen as."""
    region = region.exact() or region
    row = name.dtype.itemsize
    for length in name.shape[1:]:
        row *= length
    as_bytes = name.dtype is torch.uint8 and len(name.shape) == 1
    if not name.shape or not row or region.hi > row * name.shape[0] or as_bytes:
        return _listed("byte", region.intervals(), region.more)
    word = "element" if len(name.shape) == 1 else "row"
    intervals = region.intervals()
    whole = len(intervals) == 1 and region.lo == 0 and region.hi == row * name.shape[0]
    if whole:
        return f"all {name.shape[0]} {word}s" if name.shape[0] > 1 else f"its only {word}"
    rows: list[tuple[int, int]] = []
    for lo, hi in intervals:
        first, last = lo // row, -(-hi // row)
        if rows and first <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(last, rows[-1][1]))
        else:
            rows.append((first, last))
    partly = any(lo % row or hi % row for lo, hi in intervals)
    return f"{'parts of ' if partly else ''}{_listed(word, rows, region.more)}"


def element_of(name: Name, byte: int) -> str:
    """The element that a byte lies in: `row 3, column 5`, seen as the tensor that the memory was first seen as."""
    at = byte // name.dtype.itemsize
    if not name.shape or at >= math.prod(name.shape):
        return f"byte {byte}"
    where = [int(axis) for axis in np.unravel_index(at, name.shape)]
    if len(where) > 2:
        return f"element {where}"
    return f"row {where[0]}, column {where[1]}" if len(where) == 2 else f"element {where[0]}"


def _listed(word: str, intervals: Sequence[tuple[int, int]], left_out: int) -> str:
    parts = [f"{lo}" if hi - lo == 1 else f"{lo}-{hi - 1}" for lo, hi in intervals[:_MOST_ROWS]]
    more = len(intervals) - len(parts) + left_out
    many = len(intervals) > 1 or intervals[0][1] - intervals[0][0] > 1
    return f"{word}{'s' if many else ''} {', '.join(parts)}{f' and {more} more' if more else ''}"
