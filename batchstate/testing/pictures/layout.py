"""Which events a picture shows, in which row, and how its arrows run.

Every event has a row of its own, so that an arrow can leave its fence along that row, turn down in the gutter beside
the lane it goes to, and never cross a bar.
"""

from typing import final

import attrs

from batchstate.testing.race.report import Access, Event, EventKind, RaceReport

LIMIT = 40
"""Events in a picture; more are hard to take in, and all of them are in the table."""

_BEFORE, _AFTER = 6, 3
"""Events shown before the first access and after the second; besides, fences that one of those shown waits for."""

_BESIDE = 4
"""Events on both sides of each access that come before all others where there are too many."""


@final
@attrs.frozen
class Gap:
    """A row that stands for events that are left out."""

    count: int


@final
@attrs.frozen
class Route:
    """An arrow from one row down to another.

    Attributes:
        top, bottom: rows.
        source, target: lanes, counted from 0.
        gutter: in which it runs down, the one to the right of the lane of that number.
        track: its place in the gutter, from the left.
        missing: the edge that is not there.
    """

    top: int
    bottom: int
    source: int
    target: int
    gutter: int
    track: int
    missing: bool


@final
@attrs.frozen
class Layout:
    """A picture, before it is drawn.

    Attributes:
        lanes: names of those that have an event here.
        idle: names of the others, which are not drawn.
        rows: from top to bottom.
        routes: the arrows; the missing edge is the first.
        tracks: how many arrows run beside each other in the gutter to the right of each lane.
        left_out: events that are not shown.
    """

    lanes: tuple[str, ...]
    idle: tuple[str, ...]
    rows: tuple[Event | Gap, ...]
    routes: tuple[Route, ...]
    tracks: tuple[int, ...]
    left_out: int

    def lane_of(self, event: Event) -> int:
        """Where the event's lane stands, from 0."""
        return self.lanes.index(event.lane)


def laid_out(report: RaceReport, limit: int = LIMIT) -> Layout:
    """The layout of a report's picture.

    Args:
        report: what `drawable` gave.
        limit: how many events to show at most.
    """
    chosen = _chosen(report, limit)
    rows: list[Event | Gap] = []
    for event in report.events:
        if event.number in chosen:
            rows.append(event)
        elif rows and isinstance(rows[-1], Gap):
            rows[-1] = Gap(rows[-1].count + 1)
        else:
            rows.append(Gap(1))
    used = {event.lane for event in rows if isinstance(event, Event)}
    lanes = tuple(lane for lane in report.lanes if lane in used)
    idle = tuple(lane for lane in report.lanes if lane not in used)
    routes, tracks = _routed(report, rows, lanes)
    return Layout(lanes, idle, tuple(rows), routes, tracks, len(report.events) - len(chosen))


def access_of(report: RaceReport, event: Event) -> tuple[str, Access] | None:
    """`first` or `second` and the access, where the event is one of the two."""
    for name, access in (("first", report.first), ("second", report.second)):
        if event.number == access.event:
            return name, access
    return None


def _chosen(report: RaceReport, limit: int) -> frozenset[int]:
    events = report.events
    place = {event.number: index for index, event in enumerate(events)}
    first, second = place[report.first.event], place[report.second.event]
    near = range(max(0, first - _BEFORE), min(len(events), second + _AFTER + 1))

    # What orders the two lanes, or fails to, says more than any other operation between the accesses.
    lanes = {report.first.lane, report.second.lane}
    orders = [
        index
        for index in reversed(near)
        if events[index].kind in (EventKind.WAIT, EventKind.FENCE) and events[index].lane in lanes
    ]
    nearest = sorted(near, key=lambda index: min(abs(index - first), abs(index - second)))
    beside = [index for index in nearest if min(abs(index - first), abs(index - second)) <= _BESIDE]
    chosen = {first, second}
    for index in (*beside, *orders, *nearest):
        wanted = {index}
        fence = events[index].waits_for
        if fence is not None and fence in place:
            wanted.add(place[fence])
        if len(chosen | wanted) <= limit:
            chosen |= wanted
    return frozenset(events[index].number for index in chosen)


def _routed(
    report: RaceReport, rows: list[Event | Gap], lanes: tuple[str, ...]
) -> tuple[tuple[Route, ...], tuple[int, ...]]:
    row_of = {event.number: row for row, event in enumerate(rows) if isinstance(event, Event)}
    lane_at = {event.number: lanes.index(event.lane) for event in rows if isinstance(event, Event)}
    pairs = [(report.first.event, report.second.event, True)]
    for event in rows:
        if isinstance(event, Event) and event.waits_for is not None and event.waits_for in row_of:
            pairs.append((event.waits_for, event.number, False))
    routes: list[Route] = []
    for begin, end, missing in pairs:
        source, target = lane_at[begin], lane_at[end]
        gutter = target - 1 if source < target else target
        top, bottom = row_of[begin], row_of[end]
        taken = {
            other.track for other in routes if other.gutter == gutter and other.top <= bottom and top <= other.bottom
        }
        track = next(number for number in range(len(taken) + 1) if number not in taken)
        routes.append(Route(top, bottom, source, target, gutter, track, missing))
    tracks = [0] * len(lanes)
    for route in routes:
        tracks[route.gutter] = max(tracks[route.gutter], route.track + 1)
    return tuple(routes), tuple(tracks)
