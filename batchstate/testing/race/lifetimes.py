"""Memory that was given back while somebody may still use it.

A caching allocator gives memory that is freed to the next allocation on the stream it was allocated on, at once and
without waiting: for that stream its own order suffices, and other streams are protected only where the allocator was
told of them (`record_stream`). So memory that another stream may still use is no race when it is freed, and is one when
its stream allocates again before that use is ordered. Which allocation gets it is the allocator's affair: any counts.
"""

from typing import final

from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.detector import Detector, Kept
from batchstate.testing.race.journal import Entry, rows_of
from batchstate.testing.race.report import Access, RaceKind
from batchstate.testing.watching.memory import Place
from batchstate.testing.watching.regions import Region
from batchstate.testing.watching.sites import site


@final
class Lifetimes:
    """What was freed in use, by the stream that gets it back.

    Args:
        detector: judges and reports.
    """

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._freed: dict[int, list[Kept]] = {}

    def freed(self, kept: Kept) -> None:
        """The last tensor of a piece of memory is gone. Reports nothing: it may be called anywhere."""
        lane = kept.made_on if kept.place is Place.DEVICE else None
        if lane is not None and self._detector.unordered(kept, lane) is not None:
            kept.dropped = site(2)
            self._freed.setdefault(lane.number, []).append(kept)

    def allocates(self, lane: Lane, entry: Entry) -> None:
        """An event of a stream allocates memory.

        Raises:
            Race: it may get memory that another stream still uses.
        """
        waiting = self._freed.get(lane.number)
        while waiting:
            kept = waiting.pop()  # it is reported once; if that raises, the others are still here
            found = self._detector.unordered(kept, lane)
            if found is not None:
                self._report(kept, lane, entry, *found)

    def _report(self, kept: Kept, lane: Lane, entry: Entry, other: int, use: tuple[int, Region]) -> None:
        event, region = use
        does = "writes" if other in kept.writes and kept.writes[other].newest() == event else "reads"
        first = self._detector.access(event, other, does, kept, region)
        rows = f"memory that may be that of {kept.name}, which was freed"
        second = Access(entry.number, "allocates", entry.name, lane.name, entry.step, *entry.site.words(), rows)
        self._detector.report(RaceKind.FREED_IN_USE, kept, rows_of(kept.name, region), first, second)
