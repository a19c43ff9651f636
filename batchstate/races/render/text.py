"""The picture of a race for a terminal: lanes as columns, time running down, and the report in words below."""

import sys
import textwrap
from collections.abc import Iterator
from typing import Any, final

from batchstate.errors import ArgumentError
from batchstate.races.render.layout import (
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
from batchstate.races.report import Access, Event, EventKind, RaceReport

_LINES, _ASCII = "│─╌╎┼┬┐┌└┘▶◀■◆◇✗→…", "|-.:++..``><=*ox>~"
"""What pictures are drawn with, and what stands for it in ASCII."""

_LEAST = 5
"""Characters of an operation, or of what launched it, below which its rest says nothing."""


def short_label(event: Event, room: int) -> str:
    """An event's label in a number of characters.

    The number of a fence stays, and what stands in parentheses behind an operation stays before the operation does.

    Args:
        event: whose label.
        room: how many characters.
    """
    full = label(event)
    if len(full) <= room:
        return full
    return next((shorter for shorter in _shorter(event, room) if len(shorter) <= room), _cut(full, room))


def _shorter(event: Event, room: int) -> Iterator[str]:
    begin, middle, end = dispensable(event)
    if middle:
        yield f"{begin} {end}".strip()
    if event.kind in (EventKind.FENCE, EventKind.WAIT):
        # The mark before it tells which of the two it is.
        fence = end or label(event).removeprefix("fence ")
        yield _cut(fence, room)
        return
    operation, launch = launched(event)
    if launch:
        left = room - len(launch) - 1
        if left >= min(len(operation), _LEAST):
            yield f"{_cut(operation, left)} {launch}"
        yield launch
        left = room - len(operation) - 3
        if left >= _LEAST:
            yield f"{operation} ({_cut(launch[1:-1], left)})"
        yield _cut(operation, room)


def _cut(text: str, room: int) -> str:
    """A text without its middle: names differ at their ends."""
    if len(text) <= room:
        return text
    tail = max(0, room - 1) // 3
    return f"{text[: max(0, room - 1 - tail)]}…{text[len(text) - tail :]}"


_LEAST_LANE, _MOST = 10, 30
"""Characters of a lane."""


def fitted(text: str, width: int) -> str:
    """A text that is cut where it is too long."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def shown_name(report: RaceReport, event: Event, width: int = sys.maxsize) -> str:
    """An event's name behind a mark that tells its kind, and short enough for the width."""
    access = access_of(report, event)
    end = ""
    if access is not None:
        which, side = access
        begin, does = f"[{1 if which == 'first' else 2}]", f" {plain(side.does)}"
        if len(begin) + 1 + len(launched(event)[0]) + len(does) <= width:
            end = does
    else:
        begin = {EventKind.FENCE: "◆", EventKind.WAIT: "◇"}.get(event.kind, "■")
        begin += f" {TAGS[event.kind]}" if event.kind in TAGS else ""
    return f"{begin} {short_label(event, width - len(begin) - 1 - len(end))}{end}"


@final
class _Lanes:
    """One picture: where its columns are, and the characters that are drawn there."""

    def __init__(self, report: RaceReport, layout: DiagramLayout, width: int) -> None:
        self._report = report
        self._layout = layout
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
        self._rows = self._placed()
        """Row of the layout -> row of the picture. Row 0 names the lanes."""
        self._cells = [[" "] * column for _ in range(self._rows[-1] + 1)]

    def draw(self) -> list[str]:
        """The lines, or nothing where the lanes do not fit into the width."""
        if self.lane < _LEAST_LANE:
            return []
        for start, lane in zip(self._starts, self._layout.lanes, strict=True):
            self._write(0, start, fitted(plain(lane), self.lane))
            self._down(range(1, len(self._cells)), start, "│")
        ends = self._events()
        for route in reversed(self._layout.routes):  # the missing edge last, over the others
            self._arrow(route, ends)
        return ["".join(row).rstrip() for row in self._cells]

    def _write(self, row: int, column: int, text: str) -> None:
        self._cells[row][column : column + len(text)] = text

    def _across(self, row: int, columns: range, pen: str) -> None:
        """Draws to the right, through whatever comes down."""
        cells = self._cells[row]
        for column in columns:
            cells[column] = "┬" if cells[column] in "┐┌┬" else "┼" if cells[column] in "│╎" else pen

    def _down(self, rows: range, column: int, pen: str) -> None:
        """Draws downwards, through whatever goes across."""
        for row in rows:
            self._cells[row][column] = "┼" if self._cells[row][column] in "─╌" else pen

    def _placed(self) -> list[int]:
        rows, row = [], 1
        for shown in self._layout.rows:
            if isinstance(shown, Event) and shown.number == self._report.second.event:
                row += 1
            rows.append(row)
            row += 1
        return rows

    def _events(self) -> dict[int, int]:
        """Writes the names, and returns the column behind each, by row of the layout."""
        ends: dict[int, int] = {}
        step = None
        for index, (shown, row) in enumerate(zip(self._layout.rows, self._rows, strict=True)):
            if isinstance(shown, Gap):
                self._write(row, 0, f"{'+' + str(shown.count):>{self._margin - 1}}")
                continue
            if shown.step != step:
                step = shown.step
                self._write(row, 0, f"step {step}")
            number = f"#{shown.number}"
            self._write(row, self._margin - 1 - len(number), number)
            start = self._starts[self._layout.lane_of(shown)]
            name = shown_name(self._report, shown, self.lane)
            self._write(row, start, name)
            ends[index] = start + len(name)
            if shown.number == self._report.second.event:
                missing = "missing edge" if self.lane >= 14 else "missing"
                self._write(row - 1, start, f"✗ {missing}")
        return ends

    def _arrow(self, route: Route, ends: dict[int, int]) -> None:
        across, down = "╌╎" if route.missing else "─│"
        turn = self._starts[route.gutter] + self.lane + 1 + route.track
        top, bottom = self._rows[route.top], self._rows[route.bottom]
        if self._starts[route.source] < turn:
            self._across(top, range(ends[route.top] + 1, turn), across)
            corner = "┐"
        else:
            self._across(top, range(turn + 1, self._starts[route.source]), across)
            corner = "┌"
        self._cells[top][turn] = "┬" if self._cells[top][turn] in "─╌┬" else corner
        self._down(range(top + 1, bottom), turn, down)
        if turn < self._starts[route.target]:
            tip = self._starts[route.target] - 1
            self._write(bottom, turn, "└")
            self._across(bottom, range(turn + 1, tip), across)
            self._write(bottom, tip, "▶")
        else:
            tip = min(ends[route.bottom] + 1, turn - 1)
            self._write(bottom, turn, "┘")
            self._across(bottom, range(tip + 1, turn), across)
            self._write(bottom, tip, "◀")


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
        raise ArgumentError(f"{width} characters are too few for a picture", width, f"pass at least {LEAST_WIDTH}")
    report = drawable(report)
    if ascii:
        report = RaceReport.from_dict(_spelt_out(report.as_dict()))
    layout = laid_out(report)
    picture = _Lanes(report, layout, width).draw() or _listed(report, layout, width)
    left_out = [f"+n: n events are left out there, {layout.left_out} in all"] if layout.left_out else []
    legend = ["◆ fence, ◇ wait", "──▶ order, ╌╌▶ missing order", *left_out]
    picture += ["", *_wrapped("; ".join(legend), width), *_wrapped(nothing_on(layout.idle), width)]
    lines = [*_wrapped(plain(report.problem), width), "", *picture, "", *_words(report, width)]
    text = "\n".join(lines) + "\n"
    return text.translate(str.maketrans(_LINES, _ASCII)) if ascii else text


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


def _listed(report: RaceReport, layout: DiagramLayout, width: int) -> list[str]:
    # A line an event: lanes of a few characters each would hide more than they show.
    lines: list[str] = []
    for shown in layout.rows:
        if isinstance(shown, Gap):
            lines.append(f"{'+' + str(shown.count):>6}")
            continue
        access = access_of(report, shown)
        if access is not None and access[0] == "second":
            lines.append(fitted(f"{'':7}✗ missing edge, from [1] to [2]", width))
        waits = "" if shown.waits_for is None else f" (#{shown.waits_for})"
        line = f"{'#' + str(shown.number):>6} {shown_name(report, shown)}{waits}"
        on = f" on {plain(shown.lane)}"
        if access is not None:
            line = fitted(f"{line} {plain(access[1].rows)}", max(width - len(on), len(line)))
        lines.append(fitted(line + on, width))
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
