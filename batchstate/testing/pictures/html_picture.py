"""The picture on the page of a race: a grid of lanes and rows, and the arrows between them.

All of it is HTML and style, without a script: bars are buttons that open a sheet of details, which the browser does by
itself, and arrows are borders of elements that span the grid. So it follows the width of the page and the size of
letters, and a screen reader meets a list of events.
"""

from batchstate.testing.pictures.html_text import name, site, terms, text
from batchstate.testing.pictures.layout import Gap, Route, access_of, laid_out
from batchstate.testing.pictures.words import TAGS, awaited, dispensable, label, launched, short_site, where
from batchstate.testing.race.report import HOST, Event, EventKind, RaceReport

_MARKS = {EventKind.FENCE: "fence", EventKind.WAIT: "wait"}
_LEAST_LANE, _WIDE_LANE = 5.5, 8.5
"""Widths of a lane in rem: the least at all, and the least for a name on one line."""

_PAD, _TRACK = 0.8, 0.7
"""In rem: from the side of a gutter to an arrow, and between arrows."""

LEGEND = """<ul class="legend">
<li><span class="gem" aria-hidden="true"></span>fence: a point on a stream</li>
<li class="wait"><span class="gem" aria-hidden="true"></span>wait for a fence</li>
<li><span class="key" aria-hidden="true"></span>order: from a fence to what waits for it</li>
<li><span class="key none" aria-hidden="true"></span>missing order</li>
</ul>
"""


class HtmlPicture:
    """The picture of one report.

    Attributes:
        least: width in rem below which it has to be scrolled.
        wide: width in rem from which a lane has room for a name on one line.
        left_out: events that are not shown.
        idle: lanes that are not shown.
    """

    def __init__(self, report: RaceReport) -> None:
        self._report = report
        self._layout = laid_out(report)
        self._known = frozenset(event.number for event in report.events)
        self._grid_row: list[int] = []
        """Row of the layout -> row of the grid."""
        gutters = [_gutter(tracks) for tracks in self._layout.tracks]
        if not self._layout.tracks[-1]:
            gutters[-1] = 0.0
        self._gutters = gutters
        self.least = round(sum(gutters) + _LEAST_LANE * len(gutters), 2)
        self.wide = round(sum(gutters) + _WIDE_LANE * len(gutters), 2)
        self.left_out = self._layout.left_out
        self.idle = self._layout.idle

    def draw(self) -> str:
        """The picture as HTML."""
        events = self._events()
        last = self._grid_row[-1] + 1
        lanes = "".join(self._lane(index, last) for index in range(len(self._layout.lanes)))
        arrows = "".join(self._arrow(route) for route in self._layout.routes)
        columns = " ".join(f"minmax({_LEAST_LANE}rem,1fr) {gutter:.2f}rem" for gutter in self._gutters)
        accesses = [event for event in self._report.events if access_of(self._report, event)]
        kind = " tall" if any(launched(event)[1] for event in accesses) else ""
        return (
            f'<div class="grid{kind}" style="--lanes:{columns};--least:{self.least}rem">\n'
            f'<div class="cover" aria-hidden="true"></div>\n{lanes}<ol>\n{events}</ol>\n{arrows}</div>\n'
        )

    def sheets(self) -> str:
        """The details of every event in the picture, hidden until asked for."""
        return "".join(self._sheet(event) for event in self._layout.rows if isinstance(event, Event))

    def _lane(self, index: int, last: int) -> str:
        lane = self._layout.lanes[index]
        kind = "" if lane == HOST else "<small>stream</small>"
        return (
            f'<div class="lane" style="grid-column:{_column(index)}">'
            f'<span class="mono">{name(lane)}</span>{kind}</div>\n'
            f'<div class="life" aria-hidden="true" style="grid-area:2/{_column(index)}/{last}"></div>\n'
        )

    def _events(self) -> str:
        lines: list[str] = []
        row, step = 2, None
        for shown in self._layout.rows:
            if isinstance(shown, Gap):
                lines.append(_gap(shown, row))
                step = None
            else:
                if shown.step != step:
                    lines.append(f'<li class="step" style="grid-row:{row}"><span>step {shown.step}</span></li>\n')
                    row, step = row + 1, shown.step
                if shown.number == self._report.second.event:
                    lines.append(self._ghost(row))
                    row += 1
                lines.append(self._event(shown, row))
            self._grid_row.append(row)
            row += 1
        return "".join(lines)

    def _event(self, event: Event, row: int) -> str:
        place = f"{row}/{_column(self._layout.lane_of(event))}"
        spoken = f'<span class="vh">on {text(where(event.lane))}, {text(event.kind)}: </span>'
        access = access_of(self._report, event)
        tag = f'<span class="pre">{TAGS[event.kind]}</span>' if event.kind in TAGS else ""
        launch = launched(event)[1]
        shown = f'{spoken}{tag}<span class="name">{_bar_name(event)}</span>'
        below = f'<span class="launch">{name(launch)}</span>' if launch else ""
        at = _at(event.caller or event.site)
        if access is not None:
            which, side = access
            style = "race"
            content = (
                f'<span class="line"><span class="tag">{which}</span><span class="does">{text(side.does)}'
                f"<i> {text(side.rows)}</i></span></span>"
                f'<span class="line">{shown}{at}</span>{below}'
            )
        elif event.kind in _MARKS:
            style = f"mark {_MARKS[event.kind]}"
            content = f'<span class="gem" aria-hidden="true"></span>{shown}'
        else:
            style, content = "work", f'<span class="line">{shown}{at}</span>{below}'
        tall = " access-row" if access is not None else " launched" if launch else ""
        return (
            f'<li><span class="number mono" style="grid-row:{row}">#{event.number}</span>'
            f'<div class="event{tall}" style="grid-area:{place}"><button type="button" class="bar {style}" '
            f'id="b{event.number}" popovertarget="d{event.number}">{content}</button></div></li>\n'
        )

    def _ghost(self, row: int) -> str:
        lane = self._layout.routes[0].target
        return (
            f'<li class="ghost" style="grid-area:{row}/{_column(lane)}"><b>missing edge</b>'
            f"<span>{text(self._report.missing)}</span></li>\n"
        )

    def _arrow(self, route: Route) -> str:
        top, bottom = self._grid_row[route.top], self._grid_row[route.bottom] + 1
        tracks = self._layout.tracks[route.gutter]
        from_left = round(_PAD + route.track * _TRACK, 2)
        from_right = round(_PAD + (tracks - 1 - route.track) * _TRACK, 2)
        if route.source < route.target:
            way, stub, columns = "right", from_right, f"{_column(route.source) + 1}/{_column(route.target)}"
        elif route.source > route.target:
            way, stub, columns = "left", from_left, f"{_column(route.target) + 1}/{_column(route.source)}"
        else:
            way, stub, columns = "back", from_right, f"{_column(route.source) + 1}/{_column(route.source) + 2}"
        first, last = columns.split("/")
        kind = " missing" if route.missing else ""
        style = (
            f"grid-area:{top}/{first}/{bottom}/{last};--stub:{stub}rem;"
            f"--from:{self._half(route.top)};--to:{self._half(route.bottom)}"
        )
        return (
            f'<div class="arrow {way}{kind}" aria-hidden="true" data-edge="{self._number(route.top)} '
            f'{self._number(route.bottom)}" style="{style}"><span class="stub"></span></div>\n'
        )

    def _half(self, row: int) -> str:
        tall = self._number(row) in (self._report.first.event, self._report.second.event)
        return f"calc(var({'--tall' if tall else '--row'})/2 - 1px)"

    def _number(self, row: int) -> int:
        shown = self._layout.rows[row]
        return shown.number if isinstance(shown, Event) else 0

    def _sheet(self, event: Event) -> str:
        access = access_of(self._report, event)
        pairs = [
            ("what", text(event.kind) + (f", the {access[0]} access of the race" if access else "")),
            ("where", f"{text(where(event.lane))}, step {event.step}"),
            ("source", site(event.site)),
            ("called from", site(event.caller) if event.caller else ""),
            ("reads", "<br>".join(map(text, event.reads))),
            ("writes", "<br>".join(map(text, event.writes))),
            ("waits for", text(awaited(event, self._known))),
        ]
        number = event.number
        return (
            f'<div class="sheet" popover id="d{number}" role="dialog" aria-labelledby="t{number}">'
            f'<h3 id="t{number}"><span class="mono">#{number} {text(label(event))}</span></h3>'
            f'<button type="button" class="close" popovertarget="d{number}" popovertargetaction="hide">Close</button>'
            f'<dl>{terms(pairs)}</dl><a href="#e{number}">In the table of all events</a></div>\n'
        )


def _bar_name(event: Event) -> str:
    operation, launch = launched(event)
    begin, middle, end = dispensable(event)
    if launch or not middle:
        return name(operation)
    # Narrow lanes have a wait without these words, and wide ones a copy, whose tag they show.
    kind = "less" if event.kind is EventKind.WAIT else "told"
    end = f" {name(end)}" if end else ""
    return f'{name(begin)}<span class="{kind}"> {text(middle)}</span>{end}'


def _at(site: str) -> str:
    """The source line on a bar: the file may be cut, the line may not."""
    file, line = short_site(site)
    if not line:
        return f'<span class="where"><span class="file">{text(file)}</span></span>'
    return (
        f'<span class="where" style="--line:{len(line)}ch">'
        f'<span class="file">{text(file)}</span><span class="at">{text(line)}</span></span>'
    )


def _column(lane: int) -> int:
    return 2 + 2 * lane


def _gutter(tracks: int) -> float:
    return 2 * _PAD + (tracks - 1) * _TRACK if tracks else 0.75


def _gap(gap: Gap, row: int) -> str:
    events = "1 event is" if gap.count == 1 else f"{gap.count} events are"
    return f'<li class="gap" style="grid-row:{row}"><span>{events} left out here</span></li>\n'
