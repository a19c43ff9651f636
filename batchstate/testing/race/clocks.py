"""Fences that know what lies before them."""

from collections.abc import Callable
from typing import final

import attrs

from batchstate.runtime import Fence, Runtime
from batchstate.runtime.base import Counters
from batchstate.testing.race.report import HOST
from batchstate.testing.tracing.modes import unused_name

# What each stream, and the host, knows to have happened: vector clocks over the events of a run.
#
# Events are numbered in program order. A lane's clock holds, for each lane, the newest event of that lane which is
# known to lie before whatever the lane does next. So an event is ordered before the next operation of a lane exactly
# if the lane's clock has reached its number.
#
# The algorithm is that of vector-clock race detectors (Mattern 1989; FastTrack, Flanagan and Freund 2009), with
# streams in place of threads: a launch orders the host before the operation, a wait for a fence joins what the fence
# knew.


@final
class Lane:
    """A stream, or the host.

    Attributes:
        number: place in all clocks; the host's is 0.
        name: for reports.
        seen: lane -> newest of its events known to lie before what comes next here; grows with the lanes.
        newest: its own newest event, 0 before the first.
        work: its newest event that is an operation or a copy, 0 before the first.
    """

    __slots__ = ("_host_at", "name", "newest", "number", "seen", "work")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.seen: list[int] = [0] * (number + 1)
        self.newest = 0
        self.work = 0
        self._host_at = -1

    def __repr__(self) -> str:
        return f"Lane({self.name!r})"

    def knows(self, other: int, event: int) -> bool:
        """Whether an event of lane `other` is ordered before what comes next here."""
        seen = self.seen
        return (seen[other] if other < len(seen) else 0) >= event

    def join(self, seen: list[int]) -> None:
        """What comes next here lies behind all that `seen` has reached."""
        own = self.seen
        if len(own) < len(seen):
            own.extend([0] * (len(seen) - len(own)))
        for lane, event in enumerate(seen):
            if event > own[lane]:
                own[lane] = event


@final
class Clocks:
    """All lanes of a run.

    Attributes:
        lanes: the host first.
        now: number of the newest event.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = [Lane(0, HOST)]
        self.now = 0
        self._joins = 0

    @property
    def host(self) -> Lane:
        """The lane of the host."""
        return self.lanes[0]

    def add(self, name: str) -> Lane:
        """A lane for a new stream. It knows what the host knows when something is launched on it."""
        lane = Lane(len(self.lanes), unused_name(name, [lane.name for lane in self.lanes]))
        self.lanes.append(lane)
        return lane

    def happens(self, lane: Lane) -> int:
        """Something happens on a lane; returns its number. On a stream it lies behind all that the host knows."""
        host = self.lanes[0]
        if lane is not host and lane._host_at != self._joins:
            lane.join(host.seen)
            lane._host_at = self._joins
        self.now += 1
        lane.seen[lane.number] = lane.newest = self.now
        if lane is host:
            self._joins += 1
        return self.now

    def host_joins(self, seen: list[int]) -> None:
        """The host has waited for all that `seen` has reached."""
        self._joins += 1
        self.lanes[0].join(seen)


PATIENCE = 10_000
"""Times that a fence is asked before it is complete: what polls instead of waiting gets on, as on a device."""


@final
@attrs.define(eq=False)
class RaceFence:
    """A point in a stream. Complete once the host has waited for it, or for something behind it.

    Attributes:
        number: in the order in which the fences of a runtime were recorded, from 1.
        event: of its recording.
        lane: of its stream.
        seen: what is known to lie before it: lane -> newest event.
        owner: the runtime.
    """

    number: int
    event: int
    lane: int
    seen: list[int] = attrs.field(repr=False)
    owner: Runtime = attrs.field(repr=False)
    _inner: Fence = attrs.field(repr=False)
    _over: Callable[["RaceFence"], bool] = attrs.field(repr=False)
    _join: Callable[["RaceFence"], None] = attrs.field(repr=False)
    _counters: Counters = attrs.field(repr=False)
    _patience: int | None = attrs.field(repr=False)  # None: PATIENCE
    _asked: int = 0

    def query(self) -> bool:
        """Whether the host knows that everything before it has run. Never waits."""
        self.owner.check_owner("asking a fence")
        if self._over(self):
            return True
        self._asked += 1
        if self._asked >= (PATIENCE if self._patience is None else self._patience) and self._inner.query():
            self._join(self)
            return True
        return False

    def wait(self) -> None:
        """The host waits until everything before it has run, and knows so from then on."""
        self.owner.check_owner("waiting for a fence")
        self._counters.fence_waits += 1
        self._inner.wait()
        self._join(self)
