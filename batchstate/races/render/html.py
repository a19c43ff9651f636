"""The page of a race, for a browser: one file that needs nothing else, and runs nothing.

All of it is HTML and style, without a script: bars are buttons that open a sheet of details, which the browser does by
itself, and arrows are borders of elements that span the grid of lanes and rows. So it follows the width of the page and
the size of letters, and a screen reader meets a list of events.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from batchstate.races.render.layout import (
    TAGS,
    Gap,
    Route,
    access_of,
    awaited,
    dispensable,
    drawable,
    label,
    laid_out,
    launched,
    nothing_on,
    plain,
    short_site,
    where,
)
from batchstate.races.render.style import style_sheet
from batchstate.races.report import Access, Event, EventKind, RaceReport
from batchstate.races.tracing.clocks import HOST

_WORD = re.compile(r"\A[a-z]+(?= )")
"""A word at the start of a sentence; names of code have other characters or stand between backticks."""


def text(value: str) -> str:
    """A text, as content or in a quoted attribute."""
    return escape(plain(value), quote=True)


def sentence(value: str, *names: str) -> str:
    """A sentence, with a capital; names, and parts between backticks, become code.

    Args:
        value: the sentence.
        names: of operations, which may be of several words, so that their ends could not be seen.
    """
    line = plain(value)
    operations = sorted(filter(None, map(plain, names)), key=len, reverse=True)
    code = "|".join(rf"(?<!\w){re.escape(operation)}(?!\w)" for operation in operations)
    if not (code and re.match(code, line)):
        line = _WORD.sub(lambda word: word[0].capitalize(), line, count=1)
    pieces = re.split(rf"(`[^`]+`{'|' + code if code else ''})", line)
    return "".join(
        f"<code>{escape(piece.strip('`'))}</code>" if number % 2 else escape(piece)
        for number, piece in enumerate(pieces)
    )


def name(value: str) -> str:
    """A name on a bar, which may be broken after an underscore or a dot."""
    return re.sub(r"(?<=[_.])(?=\w)", "<wbr>", text(value))


def site(value: str) -> str:
    """A source line as code, which may be broken after a slash."""
    return f"<code>{re.sub(r'(?<=/)(?=[^/])', '<wbr>', text(value))}</code>"


def terms(pairs: list[tuple[str, str]]) -> str:
    """A list of terms, each with its value as HTML; those without a value are left out."""
    return "".join(f"<dt>{text(term)}</dt><dd>{value}</dd>" for term, value in pairs if value)


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
                if self._report.has_steps and shown.step != step:
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
        area = f"{row}/{_column(self._layout.lane_of(event))}"
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
            f'<div class="event{tall}" style="grid-area:{area}"><button type="button" class="bar {style}" '
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
            ("where", text(where(event.lane)) + f", step {event.step}" * self._report.has_steps),
            ("source", site(event.site)),
            ("called from", site(event.caller) if event.caller else ""),
            ("reads", "<br>".join(map(text, event.reads))),
            ("writes", "<br>".join(map(text, event.writes))),
            ("waits for", text(awaited(self._report, event))),
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


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""No script, no picture, no font and no connection, even if a name in the report asks for one."""

_FEW = 28.0
"""Width in rem up to which a picture stands beside the words on a wide page."""

_FOOTER = """<footer>
<p>A row is a call, in the order in which the host made them; the device runs each stream by itself. Two accesses on
different lanes are ordered only if arrows lead from the first, down its lane, to the second. Drawn by batchstate.</p>
</footer>
"""


def document(title: str, style: str, content: str, *, begin: str = "<body>", end: str = "") -> str:
    """A whole page of these parts, which are HTML. It follows the reader's width and colour scheme.

    Args:
        title: in the tab.
        style: style sheets.
        content: inside of the part as wide as the text.
        begin: the tag before it.
        end: HTML behind it.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
{begin}
<div class="wrap">
{content}</div>
{end}</body>
</html>
"""


def race_html(report: RaceReport) -> str:
    """The picture of a race as one HTML page, with the report in words and a table of all events.

    The page needs no network, no other file and no script. It follows the reader's colour scheme and width, and can be
    read with a keyboard or a screen reader.

    Args:
        report: to draw.

    Raises:
        ArgumentError: the report does not hang together.
    """
    report = drawable(report)
    picture = HtmlPicture(report)
    digits = max(len(str(event.number)) for event in report.events)
    numbers = 0.9 + 0.45 * digits
    narrow, wide = picture.least + 3.8, picture.least + numbers + 6.8
    fits = math.ceil(narrow if wide < 40 else wide)
    body = "few" if picture.least <= _FEW else "many"
    return document(
        text(report.problem),
        style_sheet(picture.wide + numbers, fits),
        f"""<header>
<p class="kind">Finding: {text(report.kind)}</p>
<h1>{_sentence(report, report.problem)}</h1>
</header>
<main>
<div class="body {body}">
{_words(report)}{_figure(report, picture)}</div>
{_table(report)}</main>
{_FOOTER}""",
        begin=f'<body style="--numbers:{numbers:.2f}rem">',
        end=picture.sheets(),
    )


def _words(report: RaceReport) -> str:
    about = terms([("memory", text(report.memory)), ("shared", text(report.rows))])
    return f"""<div class="words">
<section aria-labelledby="accesses">
<h2 id="accesses">The two accesses</h2>
<ol class="pair">
{_access("first", report.first, report.has_steps)}<li class="unordered">no edge between them</li>
{_access("second", report.second, report.has_steps)}</ol>
</section>
<section class="missing-words" aria-labelledby="missing">
<h2 id="missing">What is missing</h2>
<p>{_sentence(report, report.missing)}</p>
</section>
<section class="remedy" aria-labelledby="remedy">
<h2 id="remedy">What to do</h2>
<p>{_sentence(report, report.suggestion)}</p>
</section>
<section aria-labelledby="memory">
<h2 id="memory">What both touch</h2>
<dl class="about">{about}</dl>
</section>
</div>
"""


def _sentence(report: RaceReport, value: str) -> str:
    return sentence(value, report.first.operation, report.second.operation)


def _access(which: str, access: Access, steps: bool) -> str:
    came = f'<p class="at">called from {site(access.caller)}</p>\n' if access.caller else ""
    return f"""<li class="access">
<p class="what"><span class="tag">{which}</span> <code><b>{name(access.operation)}</b></code> {text(access.does)}
{text(access.rows)}</p>
<p>on {text(where(access.lane))}{f", step {access.step}" * steps}</p>
<p class="at">{site(access.site)}</p>
{came}</li>
"""


def _figure(report: RaceReport, picture: HtmlPicture) -> str:
    left_out = ""
    if picture.left_out:
        left_out = f" Left out: {picture.left_out} of {len(report.events)} events; the table has them all."
    idle = f" {sentence(nothing_on(picture.idle))}." if picture.idle else ""
    drawn = picture.draw()
    return f"""<section aria-labelledby="picture">
<h2 id="picture">The picture</h2>
<a class="skip" href="#all">Skip the picture</a>
<figure>
<div class="scroll picture" role="region" tabindex="0" aria-label="Lanes beside each other, time running down">
{drawn}</div>
<figcaption>
{LEGEND}<p class="note">Time runs down. Choose a bar to see its details.{left_out}{idle}</p>
</figcaption>
</figure>
</section>
"""


def _table(report: RaceReport) -> str:
    rows = "".join(_row(report, event) for event in report.events)
    count = len(report.events)
    return f"""<section class="all" aria-labelledby="all">
<h2 id="all">All events</h2>
<div class="scroll" role="region" tabindex="0" aria-label="Table of all events">
<table>
<caption>{count} events up to the race, in the order of the calls</caption>
<thead><tr><th scope="col">event</th><th scope="col">step</th><th scope="col">lane</th><th scope="col">what</th>
<th scope="col">name</th><th scope="col">memory</th><th scope="col">source line</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
</div>
</section>
"""


def _row(report: RaceReport, event: Event) -> str:
    access = access_of(report, event)
    tag = f' <span class="tag">{access[0]}</span>' if access else ""
    style = ' class="race"' if access else ""
    waits = awaited(report, event)
    memory = [
        *(f"reads {text(memory)}" for memory in event.reads),
        *(f"writes {text(memory)}" for memory in event.writes),
        *([f"waits for {text(waits)}"] if waits else []),
    ]
    came = f"<br>called from {site(event.caller)}" if event.caller else ""
    return (
        f'<tr id="e{event.number}"{style}><th scope="row">#{event.number}{tag}</th><td>{event.step}</td>'
        f'<td class="mono">{text(event.lane)}</td><td>{text(event.kind)}</td>'
        f'<td class="mono">{name(label(event))}</td><td class="long">{"<br>".join(memory)}</td>'
        f'<td class="long">{site(event.site)}{came}</td></tr>\n'
    )


def run_html(script: str, reports: Sequence[RaceReport], notes: Sequence[str]) -> str:
    """The findings of a run as one page, each folded up with a page of its own inside.

    Args:
        script: that was run.
        reports: its findings.
        notes: lines of the summary.

    Raises:
        ArgumentError: a report does not hang together.
    """
    parts = "".join(
        f"<details{' open' * (len(reports) == 1)}><summary>{sentence(report.problem)}</summary>\n"
        f'<iframe title="{text(report.kind)}" srcdoc="{escape(race_html(report), quote=True)}"></iframe></details>\n'
        for report in reports
    )
    lines = "".join(f"<p>{text(line)}</p>\n" for line in notes)
    style = style_sheet(0, 40) + "iframe{border:0;width:100%;height:90vh}summary{cursor:pointer;padding:.5rem 0}\n"
    many = f"{len(reports)} finding{'s' * (len(reports) != 1)}"
    kinds = Counter(str(report.kind) for report in reports)
    counted = ", ".join(kinds) if len(reports) == 1 else ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    content = f"<header>\n<h1>{many} in <code>{text(script)}</code></h1>\n</header>\n<main>\n{lines}{parts}</main>\n"
    return document(f"{many} in {text(script)}{text(f': {counted}' * bool(reports))}", style, content + _FOOTER)
