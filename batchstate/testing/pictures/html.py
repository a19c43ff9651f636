"""The page of a race, for a browser: one file that needs nothing else, and runs nothing."""

import math

from batchstate.testing.pictures.drawable import drawable
from batchstate.testing.pictures.html_picture import LEGEND, HtmlPicture
from batchstate.testing.pictures.html_text import name, sentence, site, terms, text
from batchstate.testing.pictures.layout import access_of
from batchstate.testing.pictures.style import style_sheet
from batchstate.testing.pictures.words import awaited, label, nothing_on, where
from batchstate.testing.race.report import Access, Event, RaceReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""No script, no picture, no font and no connection, whatever a name in the report says."""

_FEW = 28.0
"""Width in rem up to which a picture stands beside the words on a wide page."""

_FOOTER = """<footer>
<p>A row is a call, in the order in which the host made them; the device runs each stream by itself. Two accesses on
different lanes are ordered only if arrows lead from the first, down its lane, to the second. Drawn by batchstate.</p>
</footer>
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
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Race: {text(report.problem)}</title>
<style>
{style_sheet(picture.wide + numbers, fits)}</style>
</head>
<body style="--numbers:{numbers:.2f}rem">
<div class="wrap">
<header>
<p class="kind">Race: {text(report.kind)}</p>
<h1>{_sentence(report, report.problem)}</h1>
</header>
<main>
<div class="body {body}">
{_words(report)}{_figure(report, picture)}</div>
{_table(report)}</main>
{_FOOTER}</div>
{picture.sheets()}</body>
</html>
"""


def _words(report: RaceReport) -> str:
    about = terms([("memory", text(report.memory)), ("shared", text(report.rows))])
    return f"""<div class="words">
<section aria-labelledby="accesses">
<h2 id="accesses">The two accesses</h2>
<ol class="pair">
{_access("first", report.first)}<li class="unordered">no edge between them</li>
{_access("second", report.second)}</ol>
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


def _access(which: str, access: Access) -> str:
    came = f'<p class="at">called from {site(access.caller)}</p>\n' if access.caller else ""
    return f"""<li class="access">
<p class="what"><span class="tag">{which}</span> <code><b>{name(access.operation)}</b></code> {text(access.does)}
{text(access.rows)}</p>
<p>on {text(where(access.lane))}, step {access.step}</p>
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
    known = frozenset(event.number for event in report.events)
    rows = "".join(_row(report, event, known) for event in report.events)
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


def _row(report: RaceReport, event: Event, known: frozenset[int]) -> str:
    access = access_of(report, event)
    tag = f' <span class="tag">{access[0]}</span>' if access else ""
    style = ' class="race"' if access else ""
    waits = awaited(event, known)
    memory = [
        *(f"reads {text(one)}" for one in event.reads),
        *(f"writes {text(one)}" for one in event.writes),
        *([f"waits for {text(waits)}"] if waits else []),
    ]
    came = f"<br>called from {site(event.caller)}" if event.caller else ""
    return (
        f'<tr id="e{event.number}"{style}><th scope="row">#{event.number}{tag}</th><td>{event.step}</td>'
        f'<td class="mono">{text(event.lane)}</td><td>{text(event.kind)}</td>'
        f'<td class="mono">{name(label(event))}</td><td class="long">{"<br>".join(memory)}</td>'
        f'<td class="long">{site(event.site)}{came}</td></tr>\n'
    )
