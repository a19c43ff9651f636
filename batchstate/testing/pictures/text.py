"""The picture of a race for a terminal: lanes as columns, time running down, and the report in words below."""

import textwrap
from typing import Any

from batchstate.errors import ArgumentError
from batchstate.testing.pictures.canvas import ASCII, LINES, Pens
from batchstate.testing.pictures.drawable import drawable
from batchstate.testing.pictures.layout import Gap, Layout, access_of, laid_out
from batchstate.testing.pictures.text_lanes import drawn_lanes, fitted, shown_name
from batchstate.testing.pictures.words import nothing_on, plain, where
from batchstate.testing.race.report import Access, RaceReport

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


def _listed(report: RaceReport, layout: Layout, width: int, pens: Pens) -> list[str]:
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
