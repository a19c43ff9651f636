"""The picture of a race for a terminal: lanes as columns, time running down, and the report in words below."""

import sys
import textwrap
from collections.abc import Iterator
from typing import Any, final

import attrs

from batchstate.errors import ArgumentError
from batchstate.testing.race.report import Access, Event, EventKind, RaceReport
from batchstate.testing.render.layout import (
    TAGS,
    DiagramLayout,
    Gap,
    Route,
    access_of,
    dispensable,
    drawable,
    label,
    laid_out,
    launched,
    nothing_on,
    plain,
    where,
)


@final
@attrs.frozen
class Pens:
    """Characters to draw with.

    Attributes:
        life: a lane where nothing happens.
        across, down, dashed_across, dashed_down: pieces of an arrow that is there, and of one that is missing.
        crossing: of two arrows, or of an arrow and a lane.
        fork: where one arrow turns down and another goes on.
        right_then_down, left_then_down, down_then_right, down_then_left: corners.
        to_right, to_left: tips.
        work, fence, wait, missing: marks before a name.
        becomes: from one memory to another.
        cut: ends a text that was too long.
    """

    life: str
    across: str
    down: str
    dashed_across: str
    dashed_down: str
    crossing: str
    fork: str
    right_then_down: str
    left_then_down: str
    down_then_right: str
    down_then_left: str
    to_right: str
    to_left: str
    work: str
    fence: str
    wait: str
    missing: str
    becomes: str
    cut: str


LINES = Pens(*"│─│╌╎┼┬┐┌└┘▶◀■◆◇✗→…")
ASCII = Pens(*"|-|.:++..``><=*ox>~")


class Canvas:
    """Rows of characters, all of one length.

    Args:
        rows: how many there are.
        width: characters in each.
        pens: to draw with.
    """

    def __init__(self, rows: int, width: int, pens: Pens) -> None:
        self._cells = [[" "] * width for _ in range(rows)]
        self._pens = pens

    def write(self, row: int, column: int, text: str) -> None:
        """Puts a text over what is there."""
        self._cells[row][column : column + len(text)] = text

    def across(self, row: int, columns: range, pen: str) -> None:
        """Draws to the right, through whatever comes down."""
        pens = self._pens
        for column in columns:
            found = self._cells[row][column]
            if found in (pens.right_then_down, pens.left_then_down, pens.fork):
                self._cells[row][column] = pens.fork
            else:
                upright = found in (pens.life, pens.down, pens.dashed_down)
                self._cells[row][column] = pens.crossing if upright else pen

    def turn_down(self, row: int, column: int, pen: str) -> None:
        """Draws a corner at the top of an arrow."""
        pens = self._pens
        flat = self._cells[row][column] in (pens.across, pens.dashed_across, pens.fork)
        self._cells[row][column] = pens.fork if flat else pen

    def down(self, rows: range, column: int, pen: str) -> None:
        """Draws downwards, through whatever goes across."""
        flat = (self._pens.across, self._pens.dashed_across)
        for row in rows:
            self._cells[row][column] = self._pens.crossing if self._cells[row][column] in flat else pen

    def lines(self) -> list[str]:
        """The rows, without blanks at their ends."""
        return ["".join(row).rstrip() for row in self._cells]


_LEAST = 5
"""Characters of an operation, or of what launched it, below which its rest says nothing."""


def short_label(event: Event, room: int, cut: str) -> str:
    """An event's label in a number of characters.

    The number of a fence stays, and what stands in parentheses behind an operation stays before the operation does.

    Args:
        event: whose label.
        room: how many characters.
        cut: stands for what is left out of a name.
    """
    full = label(event)
    if len(full) <= room:
        return full
    return next((shorter for shorter in _shorter(event, room, cut) if len(shorter) <= room), _cut(full, room, cut))


def _shorter(event: Event, room: int, cut: str) -> Iterator[str]:
    begin, middle, end = dispensable(event)
    if middle:
        yield f"{begin} {end}".strip()
    if event.kind in (EventKind.FENCE, EventKind.WAIT):
        # The mark before it tells which of the two it is.
        fence = end or label(event).removeprefix("fence ")
        yield _cut(fence, room, cut)
        return
    operation, launch = launched(event)
    if launch:
        left = room - len(launch) - 1
        if left >= min(len(operation), _LEAST):
            yield f"{_cut(operation, left, cut)} {launch}"
        yield launch
        left = room - len(operation) - 3
        if left >= _LEAST:
            yield f"{operation} ({_cut(launch[1:-1], left, cut)})"
        yield _cut(operation, room, cut)


def _cut(text: str, room: int, cut: str) -> str:
    """A text without its middle: names differ at their ends."""
    if len(text) <= room:
        return text
    tail = max(0, room - 1) // 3
    return text[: max(0, room - 1 - tail)] + cut + text[len(text) - tail :]


_LEAST_LANE, _MOST = 10, 30
"""Characters of a lane."""


def drawn_lanes(report: RaceReport, layout: DiagramLayout, width: int, pens: Pens) -> list[str]:
    """The picture, or nothing where the lanes do not fit into the width."""
    lanes = _Lanes(report, layout, width, pens)
    return lanes.draw() if lanes.lane >= _LEAST_LANE else []


def fitted(text: str, width: int, pens: Pens) -> str:
    """A text that is cut where it is too long."""
    return text if len(text) <= width else text[: width - 1] + pens.cut


def shown_name(report: RaceReport, event: Event, pens: Pens, width: int = sys.maxsize) -> str:
    """An event's name behind a mark that tells its kind, and short enough for the width."""
    access = access_of(report, event)
    end = ""
    if access is not None:
        which, side = access
        begin, does = f"[{1 if which == 'first' else 2}]", f" {plain(side.does)}"
        if len(begin) + 1 + len(launched(event)[0]) + len(does) <= width:
            end = does
    else:
        begin = {EventKind.FENCE: pens.fence, EventKind.WAIT: pens.wait}.get(event.kind, pens.work)
        tag = TAGS.get(event.kind)
        if tag is not None:
            begin += f" {tag.replace('→', pens.becomes)}"
    return f"{begin} {short_label(event, width - len(begin) - 1 - len(end), pens.cut)}{end}"


@final
class _Lanes:
    """One picture: where its columns are, and what is drawn there."""

    def __init__(self, report: RaceReport, layout: DiagramLayout, width: int, pens: Pens) -> None:
        self._report = report
        self._layout = layout
        self._pens = pens
        events = [shown for shown in layout.rows if isinstance(shown, Event)]
        self._margin = max(len(f"step {event.step}") for event in events) + 1
        self._margin += max(len(f"#{event.number}") for event in events) + 1
        gutters = [tracks + 2 for tracks in layout.tracks]
        if not layout.tracks[-1]:
            gutters[-1] = 0
        count = len(layout.lanes)
        self.lane = min(_MOST, (width - self._margin - sum(gutters)) // count)
        self._starts: list[int] = []
        """First column of each lane."""
        column = self._margin
        for gutter in gutters:
            self._starts.append(column)
            column += self.lane + gutter
        self._width = column
        self._rows = self._placed()
        """Row of the layout -> row on the canvas. Row 0 names the lanes."""

    def draw(self) -> list[str]:
        """The lines."""
        if self.lane < _LEAST_LANE:
            return []
        canvas = Canvas(self._rows[-1] + 1, self._width, self._pens)
        last = self._rows[-1] + 1
        for start, lane in zip(self._starts, self._layout.lanes, strict=True):
            canvas.write(0, start, fitted(plain(lane), self.lane, self._pens))
            canvas.down(range(1, last), start, self._pens.life)
        ends = self._events(canvas)
        for route in reversed(self._layout.routes):  # the missing edge last, over the others
            self._arrow(canvas, route, ends)
        return canvas.lines()

    def _placed(self) -> list[int]:
        rows, row = [], 1
        for shown in self._layout.rows:
            if isinstance(shown, Event) and shown.number == self._report.second.event:
                row += 1
            rows.append(row)
            row += 1
        return rows

    def _events(self, canvas: Canvas) -> dict[int, int]:
        """Writes the names, and returns the column behind each, by row of the layout."""
        ends: dict[int, int] = {}
        step = None
        for index, (shown, row) in enumerate(zip(self._layout.rows, self._rows, strict=True)):
            if isinstance(shown, Gap):
                canvas.write(row, 0, f"{'+' + str(shown.count):>{self._margin - 1}}")
                continue
            if shown.step != step:
                step = shown.step
                canvas.write(row, 0, f"step {step}")
            number = f"#{shown.number}"
            canvas.write(row, self._margin - 1 - len(number), number)
            start = self._starts[self._layout.lane_of(shown)]
            name = shown_name(self._report, shown, self._pens, self.lane)
            canvas.write(row, start, name)
            ends[index] = start + len(name)
            if shown.number == self._report.second.event:
                missing = "missing edge" if self.lane >= 14 else "missing"
                canvas.write(row - 1, start, f"{self._pens.missing} {missing}")
        return ends

    def _arrow(self, canvas: Canvas, route: Route, ends: dict[int, int]) -> None:
        pens = self._pens
        across = pens.dashed_across if route.missing else pens.across
        down = pens.dashed_down if route.missing else pens.down
        turn = self._starts[route.gutter] + self.lane + 1 + route.track
        top, bottom = self._rows[route.top], self._rows[route.bottom]
        if self._starts[route.source] < turn:
            canvas.across(top, range(ends[route.top] + 1, turn), across)
            canvas.turn_down(top, turn, pens.right_then_down)
        else:
            canvas.across(top, range(turn + 1, self._starts[route.source]), across)
            canvas.turn_down(top, turn, pens.left_then_down)
        canvas.down(range(top + 1, bottom), turn, down)
        if turn < self._starts[route.target]:
            tip = self._starts[route.target] - 1
            canvas.write(bottom, turn, pens.down_then_right)
            canvas.across(bottom, range(turn + 1, tip), across)
            canvas.write(bottom, tip, pens.to_right)
        else:
            tip = min(ends[route.bottom] + 1, turn - 1)
            canvas.write(bottom, turn, pens.down_then_left)
            canvas.across(bottom, range(tip + 1, turn), across)
            canvas.write(bottom, tip, pens.to_left)


LEAST_WIDTH = 40
"""Characters below which neither lanes nor sentences can be read."""

_INDENT = 12
"""Of a sentence, after its term."""


def race_text(report: RaceReport, width: int = 100, *, ascii: bool = False) -> str:
    """The picture of a race as text, with the report in words.

    Args:
        report: to draw.
        width: most characters in a line. Where the lanes do not fit beside each other, the events become a list.
        ascii: use ASCII characters only; all others in the report are spelt out.

    Raises:
        ArgumentError: the report does not hang together, or the width is below `LEAST_WIDTH`.
    """
    if width < LEAST_WIDTH:
        raise ArgumentError(
            f"{width} characters are too few for a picture", value=width, remedy=f"pass at least {LEAST_WIDTH}"
        )
    report, pens = drawable(report), LINES
    if ascii:
        report, pens = RaceReport.from_dict(_spelt_out(report.as_dict())), ASCII
    layout = laid_out(report)
    picture = drawn_lanes(report, layout, width, pens) or _listed(report, layout, width, pens)
    left_out = [f"+n: n events are left out there, {layout.left_out} in all"] if layout.left_out else []
    order, missing = pens.across * 2 + pens.to_right, pens.dashed_across * 2 + pens.to_right
    legend = [f"{pens.fence} fence, {pens.wait} wait", f"{order} order, {missing} missing order", *left_out]
    picture += ["", *_wrapped("; ".join(legend), width), *_wrapped(nothing_on(layout.idle), width)]
    lines = [*_wrapped(plain(report.problem), width), "", *picture, "", *_words(report, width)]
    return "\n".join(lines) + "\n"


def _words(report: RaceReport, width: int) -> list[str]:
    lines: list[str] = []
    for term, *sentences in (
        ("kind", report.kind),
        ("memory", report.memory),
        ("both touch", report.rows),
        ("[1] first", *_access(report.first)),
        ("[2] second", *_access(report.second)),
        ("missing", report.missing),
        ("remedy", report.suggestion),
    ):
        for sentence in sentences:
            lines += _wrapped(plain(sentence), width, term, _INDENT)
            term = ""
    return lines


def _access(access: Access) -> list[str]:
    what = f"{access.operation} {access.does} {access.rows} on {where(access.lane)}, step {access.step}"
    return [what, f"at {access.site}", *([f"called from {access.caller}"] if access.caller else [])]


def _listed(report: RaceReport, layout: DiagramLayout, width: int, pens: Pens) -> list[str]:
    # A line an event: lanes of a few characters each would hide more than they show.
    lines: list[str] = []
    for shown in layout.rows:
        if isinstance(shown, Gap):
            lines.append(f"{'+' + str(shown.count):>6}")
            continue
        access = access_of(report, shown)
        if access is not None and access[0] == "second":
            lines.append(fitted(f"{'':7}{pens.missing} missing edge, from [1] to [2]", width, pens))
        waits = "" if shown.waits_for is None else f" (#{shown.waits_for})"
        line = f"{'#' + str(shown.number):>6} {shown_name(report, shown, pens)}{waits}"
        on = f" on {plain(shown.lane)}"
        if access is not None:
            line = fitted(f"{line} {plain(access[1].rows)}", max(width - len(on), len(line)), pens)
        lines.append(fitted(line + on, width, pens))
    return lines


def _wrapped(text: str, width: int, term: str = "", indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=f"{term:<{indent}}", subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _spelt_out(value: Any) -> Any:
    """All texts of a report in ASCII."""
    if isinstance(value, str):
        return value.encode("ascii", "backslashreplace").decode("ascii")
    if isinstance(value, dict):
        return {name: _spelt_out(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt_out(one) for one in value]
    return value
