"""What one lane did with one piece of memory, for as long as somebody may still come across it unordered."""

from typing import final

from batchstate.testing.watching.regions import Region, union_of

_RECENT = 32

_LARGE = 512
"""Intervals of a region that is not kept longer than it must."""


@final
class _Block:
    """Accesses that lie together, oldest first, and all their bytes: what meets none of these meets none of them."""

    __slots__ = ("events", "regions", "union")

    def __init__(self, events: list[int], regions: list[Region]) -> None:
        self.events = events
        self.regions = regions
        self.union = union_of(regions)

    def conflict(self, region: Region, known: int) -> tuple[int, Region] | None:
        """See `Log.conflict`."""
        if not self.union.overlaps(region):
            return None
        for at in range(len(self.events) - 1, -1, -1):
            if self.events[at] <= known:
                break
            if self.regions[at].overlaps(region):
                return self.events[at], self.regions[at]
        return None

    def behind(self, older: "_Block") -> "_Block":
        """Both in one, without those older accesses that a newer one covers: they are found through that."""
        kept = [at for at, region in enumerate(older.regions) if not self.union.covers(region)]
        events = [older.events[at] for at in kept] + self.events
        return _Block(events, [older.regions[at] for at in kept] + self.regions)


@final
class Log:
    """Accesses of one kind by one lane.

    An access that the host knows to be over can conflict with nothing any more, because every later operation lies
    behind the host. It is dropped, so that a run of any length keeps what is in flight. Where that is a lot, because
    nobody ever waits, it lies in blocks of doubling size, and an access is held against as many as their number has
    digits.
    """

    __slots__ = ("_blocks", "events", "regions")

    def __init__(self) -> None:
        self.events: list[int] = []
        self.regions: list[Region] = []
        self._blocks: list[_Block] = []

    def __len__(self) -> int:
        return len(self.events) + sum(len(block.events) for block in self._blocks)

    def newest(self) -> int:
        """The newest event."""
        return self.events[-1]

    def conflict(self, region: Region, known: int) -> tuple[int, Region] | None:
        """The newest access beyond event `known` that shares a byte with `region`, or None."""
        events, regions = self.events, self.regions
        at = len(events) - 1
        while at >= 0:
            if events[at] <= known:
                return None
            if regions[at].overlaps(region):
                return events[at], regions[at]
            at -= 1
        for block in reversed(self._blocks):
            if block.events[-1] <= known:
                return None
            found = block.conflict(region, known)
            if found is not None:
                return found
        return None

    def add(self, event: int, region: Region, over: int) -> None:
        """Notes an access. The host knows everything up to event `over` of this lane to be over."""
        events, regions = self.events, self.regions
        if events:
            last = regions[-1]
            if region.starts is None and region.lo <= last.lo and last.hi <= region.hi:
                events[-1], regions[-1] = event, region  # whoever meets the older one meets this one
                return
        events.append(event)
        regions.append(region)
        if len(events) > 2 * _RECENT or (region.starts is not None and len(region.starts) > _LARGE):
            self._fold(over)

    def _fold(self, over: int) -> None:
        """Drops what is over, and makes a block of all but the newest."""
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
