"""The picture of a race before it is drawn: its events in rows, the arrows between them, and the words for them.

Every event has a row of its own, so that an arrow can leave its fence along that row, turn down in the gutter beside
the lane it goes to, and never cross a bar. A lane is the column of a stream, or of the host.
"""

import re
from typing import final

import attrs

from batchstate.errors import ArgumentError
from batchstate.races.report import Access, Event, EventKind, RaceReport, printable
from batchstate.races.tracing.clocks import HOST

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
class DiagramLayout:
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


def laid_out(report: RaceReport) -> DiagramLayout:
    """The layout of the picture of a `drawable` report."""
    chosen = _chosen(report)
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
    return DiagramLayout(lanes, idle, tuple(rows), routes, tracks, len(report.events) - len(chosen))


def access_of(report: RaceReport, event: Event) -> tuple[str, Access] | None:
    """`first` or `second` and the access, where the event is one of the two."""
    for name, access in (("first", report.first), ("second", report.second)):
        if event.number == access.event:
            return name, access
    return None


def _chosen(report: RaceReport) -> frozenset[int]:
    events = report.events
    index_of = {event.number: index for index, event in enumerate(events)}
    first, second = index_of[report.first.event], index_of[report.second.event]
    near = range(max(0, first - _BEFORE), min(len(events), second + _AFTER + 1))

    # Fences and waits of the two lanes say more than any other operation between the accesses.
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
        if fence is not None and fence in index_of:
            wanted.add(index_of[fence])
        if len(chosen | wanted) <= LIMIT:
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


def drawable(report: RaceReport) -> RaceReport:
    """The report, with both accesses among its events: the first may have been too old to be kept.

    Asked before a report is drawn: its file may have been edited or cut.

    Raises:
        ArgumentError: an event is on no lane, or an access is not among the events.
    """
    newest = 0
    for event in report.events:
        if event.lane not in report.lanes:
            raise _damaged(f"event {event.number} is on the lane {event.lane!r}, which is none of {report.lanes}")
        if event.number <= newest:
            raise _damaged(f"event {event.number} stands after event {newest}")
        if event.waits_for is not None and event.waits_for >= event.number:
            raise _damaged(f"event {event.number} waits for event {event.waits_for}, which is not before it")
        newest = event.number
    if report.events and report.first.event < report.events[0].number and report.first.lane in report.lanes:
        report = attrs.evolve(report, events=(_event_of(report.first), *report.events))
    lanes = {event.number: event.lane for event in report.events}
    for name, access in (("first", report.first), ("second", report.second)):
        if lanes.get(access.event) != access.lane:
            raise _damaged(f"the {name} access is event {access.event} on {access.lane!r}, and there is none such")
    if report.first.event >= report.second.event:
        raise _damaged(f"the first access is event {report.first.event}, the second {report.second.event}")
    return report


def _event_of(access: Access) -> Event:
    return Event(
        access.event, access.lane, EventKind.OPERATION, access.operation, access.step, access.site, access.caller
    )


def _damaged(problem: str) -> ArgumentError:
    return ArgumentError(f"a damaged race report: {problem}", problem, "save it again with `RaceReport.save`")


_SITE = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\]+)(?P<line>:\d+)(?: in .*)?")
_LAUNCHED = re.compile(r"(?P<operation>.+?) (?P<launch>\(.+\))")
_WAIT = re.compile(r"wait:? (?P<less>(?:for )?(?:fence )?)(?P<fence>.+)")
_COPY = re.compile(r"copy (?P<less>to (?:device|host))")

TAGS = {
    EventKind.COPY_TO_DEVICE: "H→D",
    EventKind.COPY_TO_HOST: "D→H",
    EventKind.ALLOCATION: "alloc",
    EventKind.FREE: "free",
}
"""Said before the name of an event whose name alone does not tell its kind."""


def plain(text: str) -> str:
    """A text of user code on one line, with unprintable characters spelt out."""
    return printable(" ".join(text.split()))


def label(event: Event) -> str:
    """The text on an event's bar."""
    name = plain(event.name)
    if event.kind is EventKind.WAIT and not name.startswith("wait"):
        return f"wait: {name}"
    return name


def where(lane: str) -> str:
    """A lane in a sentence."""
    return "the host" if lane == HOST else f"stream '{plain(lane)}'"


def short_site(site: str) -> tuple[str, str]:
    """The file without its folders, and the line with a colon before it; no line where the site has another form."""
    parts = _SITE.fullmatch(plain(site))
    return (parts["file"], parts["line"]) if parts else (plain(site), "")


def launched(event: Event) -> tuple[str, str]:
    """An event's label as an operation and, in parentheses, its launch: `("index_fill_", "(marks: clear)")`.

    The latter is empty where the label says nothing of the kind.
    """
    parts = None if event.kind in (EventKind.FENCE, EventKind.WAIT) else _LAUNCHED.fullmatch(label(event))
    return (parts["operation"], parts["launch"]) if parts else (label(event), "")


def dispensable(event: Event) -> tuple[str, str, str]:
    """An event's label in three parts; the mark or the tag beside it tells the middle one as well.

    It is empty where all of the label is needed: `("wait", "for fence", "12")`, `("copy", "to device", "")`.
    """
    name = label(event)
    waits = _WAIT.fullmatch(name) if event.kind is EventKind.WAIT else None
    if waits is not None:
        return "wait", waits["less"].strip(), waits["fence"]
    copies = _COPY.fullmatch(name) if event.kind in TAGS else None
    return ("copy", copies["less"], "") if copies is not None else (name, "", "")


def nothing_on(lanes: tuple[str, ...]) -> str:
    """The lanes that a picture leaves out, in words; empty where it has them all."""
    return f"no events here on: {', '.join(map(plain, lanes))}" if lanes else ""


def awaited(report: RaceReport, event: Event) -> str:
    """The fence that a wait waits for; empty for other kinds."""
    if event.kind is not EventKind.WAIT:
        return ""
    in_report = any(event.waits_for == other.number for other in report.events)
    return f"#{event.waits_for}" if in_report else "a fence older than this report"
