"""The lanes and the arrows of a picture in a terminal."""

import sys
from typing import final

from batchstate.testing.pictures.canvas import Canvas, Pens
from batchstate.testing.pictures.layout import Gap, Layout, Route, access_of
from batchstate.testing.pictures.short import short_label
from batchstate.testing.pictures.words import TAGS, launched, plain
from batchstate.testing.race.report import Event, EventKind, RaceReport

_LEAST, _MOST = 10, 30
"""Characters of a lane."""


def drawn_lanes(report: RaceReport, layout: Layout, width: int, pens: Pens) -> list[str]:
    """The picture, or nothing where the lanes do not fit into the width."""
    lanes = _Lanes(report, layout, width, pens)
    return lanes.draw() if lanes.lane >= _LEAST else []


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

    def __init__(self, report: RaceReport, layout: Layout, width: int, pens: Pens) -> None:
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
        if self.lane < _LEAST:
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
