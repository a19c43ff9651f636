"""A run as one HTML page: what failed, how it went over time, and the figures of the terminal's table.

The page needs no network, no other file and no script, and follows the reader's colour scheme and width.
"""

import re
from collections.abc import Sequence
from typing import final

import attrs

from batchstate.races.render.html import document, terms, text
from batchstate.races.render.style import style_sheet
from examples.console import Section

MOST_POINTS = 240
"""Points of a chart; of a longer run each stands for several, with the largest value among them."""

_WIDTH, _HEIGHT = 600, 120
_FIELD = re.compile(r"^  ([a-z]+) +(.*)$")
"""A line of a violation's report: the name of a field, and its value."""

_READ = '<p class="note">Read every few steps; the figures below count every step.</p>\n'

_STYLE = """
.verdict{font-weight:650;margin-top:.5rem}
.verdict.bad{color:var(--race)}
.verdict.good{color:var(--order)}
section{margin-top:2rem}
.failure{border:2px solid var(--race);border-radius:.6rem;background:var(--tint);padding:.8rem .9rem}
.failure+.failure{margin-top:1rem}
.failure h3{font-size:1rem;margin:0 0 .5rem}
.failure .remedy{margin-top:.7rem}
.failure pre,pre{white-space:pre-wrap;font-size:.8125rem;margin:.7rem 0 0}
.charts{margin-top:.6rem;display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(19rem,100%),1fr))}
.chart{background:var(--surface);border:1px solid var(--line);border-radius:.75rem;padding:.7rem .9rem .6rem}
.chart figcaption{display:flex;justify-content:space-between;gap:1rem;font-weight:650;font-size:.9375rem}
.chart figcaption span,.chart .ends{font-weight:400;color:var(--muted);font-size:.8125rem}
.chart svg{display:block;width:100%;height:6rem;margin:.4rem 0 .2rem;border-bottom:1px solid var(--edge)}
.chart path{fill:none;stroke:var(--order);stroke-width:2;vector-effect:non-scaling-stroke}
.chart .ends{display:flex;justify-content:space-between}
.figures{display:grid;gap:1rem 2.5rem;grid-template-columns:repeat(auto-fill,minmax(min(24rem,100%),1fr));
align-items:start}
.figures td,.figures th{padding-left:0}
.figures caption{padding:.7rem 0 .4rem;font-weight:650;font-size:.9375rem;color:var(--ink)}
.figures tbody th{color:var(--ink);white-space:normal}
.figures td.value{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.figures td.remark{color:var(--muted)}
.figures tr.bad>*{color:var(--race);font-weight:650}
"""


@final
@attrs.frozen
class Failure:
    """The part of a run that failed, such as a machine, and its report as text, with how to replay it."""

    part: str
    report: str


@final
@attrs.frozen
class Chart:
    """A figure over simulated time: when each value was read, ascending, and the values.

    Attributes:
        most: the largest value possible; by default the largest there is.
    """

    title: str
    unit: str
    seconds: Sequence[float]
    values: Sequence[float]
    most: float | None = None


def page(
    kind: str,
    title: str,
    sections: Sequence[Section],
    failures: Sequence[Failure] = (),
    charts: Sequence[Chart] = (),
) -> str:
    """The page of a run of the command `kind`: failures first, then charts that have values, then the figures."""
    wrong = bool(failures) or any(row.alarming for section in sections for row in section.rows)
    verdict = ("bad", "Problems were found.") if wrong else ("good", "No problem was found.")
    failed = "".join(map(_failure, failures))
    drawn = "".join(_chart(chart) for chart in charts if chart.values)
    tables = "".join(map(_table, sections))
    parts = [
        _part("found", "What was found", failed),
        _part("time", "Over simulated time", f'{_READ}<div class="charts">\n{drawn}</div>\n' if drawn else ""),
        _part("figures", "Figures", f'<div class="figures">\n{tables}</div>\n'),
    ]
    return document(
        text(f"{kind}: {title}"),
        style_sheet(40, 40) + _STYLE,
        f"""<header>
<p class="about">batchstate {text(kind)}</p>
<h1>{text(title)}</h1>
<p class="verdict {verdict[0]}">{verdict[1]}</p>
</header>
<main>
{"".join(parts)}</main>
""",
    )


def _part(name: str, title: str, content: str) -> str:
    if not content:
        return ""
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{content}</section>\n'


def _failure(failure: Failure) -> str:
    """A violation by its fields, remedy last; text behind them, or another error, as it is."""
    head, *rest = failure.report.split("\n\n")
    problem, *lines = head.splitlines() or [""]
    fields: list[tuple[str, str]] = []
    for line in lines:
        if match := _FIELD.match(line):
            fields.append((match[1], match[2]))
        elif fields:  # a value of several lines
            fields[-1] = (fields[-1][0], f"{fields[-1][1]}\n{line}")
        else:
            rest = ["\n".join(lines), *rest]
            break
    remedy = "".join(f'<p class="remedy">Remedy: {text(value)}</p>\n' for name, value in fields if name == "remedy")
    shown = [(name, f"<code>{_lines(value)}</code>") for name, value in fields if name != "remedy"]
    about = f'<dl class="about">{terms(shown)}</dl>\n' if shown else ""
    program = "".join(f"<pre>{_lines(part)}</pre>\n" for part in rest)
    return (
        f'<article class="failure">\n<p class="kind">{text(failure.part)}</p>\n<h3>{text(problem)}</h3>\n'
        f"{about}{remedy}{program}</article>\n"
    )


def _lines(value: str) -> str:
    """A text of several lines, indented as it is."""
    return "\n".join(
        "&nbsp;" * (len(line) - len(line.lstrip(" "))) + text(line) if line.strip() else ""
        for line in value.split("\n")
    )


def _chart(chart: Chart) -> str:
    seconds, values = _thinned(chart.seconds, chart.values)
    end, peak = seconds[-1], max(values)
    top = max(peak if chart.most is None else chart.most, 1e-9)
    span = max(end, 1e-9)
    points = " ".join(
        f"{_WIDTH * at / span:.1f},{_HEIGHT * (1 - value / top) * 0.96 + 0.04 * _HEIGHT:.1f}"
        for at, value in zip(seconds, values, strict=True)
    )
    first, *others = points.split(" ")
    path = f"M{first}" + (f"L{' '.join(others)}" if others else "h1")
    last = f"{_number(values[-1])} after {_clock(end)}"
    said = f"{chart.title}, {chart.unit}: at most {_number(peak)}, {last}"
    return (
        f'<figure class="chart"><figcaption>{text(chart.title)}<span>{text(chart.unit)}</span></figcaption>\n'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{text(said)}">'
        f'<path d="{path}"/></svg>\n'
        f'<p class="ends"><span>at most {_number(peak)}</span><span>{last}</span></p>'
        "</figure>\n"
    )


def _thinned(seconds: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MOST_POINTS` points, the last among them."""
    group = -(-len(values) // MOST_POINTS)
    starts = range(0, len(values), group)
    return [seconds[min(at + group, len(seconds)) - 1] for at in starts], [
        max(values[at : at + group]) for at in starts
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def _table(section: Section) -> str:
    rows = "".join(
        f'<tr{" class=bad" if row.alarming else ""}><th scope="row">{text(row.label)}</th>'
        f'<td class="value">{text(row.value)}</td><td class="remark">{text(row.remark)}</td></tr>\n'
        for row in section.rows
    )
    return f"<table>\n<caption>{text(section.title)}</caption>\n<tbody>\n{rows}</tbody>\n</table>\n"
