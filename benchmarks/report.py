"""Rows as a table: on a terminal with rich where that is installed, and otherwise as aligned text."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comparisons import Absent, Row
from benchmarks.counts import Count
from examples.console import has_rich, on_terminal

HEADINGS = ("ours", "us", "baseline", "us", "ratio", "quartiles", "asked", "")
LEFT = (0, 2, 7)
"""Columns of words."""


def show(machine: Mapping[str, Any], rows: Sequence[Row | Absent]) -> None:
    """Prints what was measured, grouped by work."""
    commit = f"commit {machine['commit'] or 'unknown'}"
    note = (
        f"{machine['cpu']}, {machine['cores']} cores; device {machine['device']}; "
        f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}, {commit}\n"
        "Medians of an interleaved run, device included; ratio = baseline / ours.\n"
        "Above 1 ours is faster, below 1 it is slower. "
        "Baselines do less: no generations, no double frees found, no fences, no checks of twins."
    )
    if on_terminal(sys.stdout) and has_rich():
        _show_rich(note, rows)
    else:
        _show_plain(note, rows)


def show_counts(counts: Sequence[Count]) -> None:
    """Prints counts as lines, those of one work behind its name."""
    by_work: dict[str, list[Count]] = {}
    for count in counts:
        by_work.setdefault(count.work, []).append(count)
    for work, some in by_work.items():
        print(f"\ncounts of a {work}")
        width = max(len(count.counted) for count in some)
        for count in some:
            asked = "" if count.limit is None else f"  <= {count.limit}  {_verdict(count.met)}"
            print(f"  {count.counted.replace('_', ' ').ljust(width)}  {count.count:3d}{asked}")


def summary(rows: Sequence[Row | Absent | Count], *, quick: bool = False) -> str:
    """How many are as asked, and which are not."""
    asked = [one for one in rows if not isinstance(one, Absent) and one.met is not None]
    missed = [one for one in asked if not one.met]
    lines = [
        f"{sum(bool(one.met) for one in some)} of {len(some)} {what} as asked"
        for what, kind in (("ratios", Row), ("counts", Count))
        if (some := [one for one in asked if isinstance(one, kind)])
    ]
    if quick and lines:
        lines.append("a trial run: its ratios are noise")
    if missed:
        lines.append("missed:")
    for one in missed:
        if isinstance(one, Row):
            lines.append(f"  {one.work}, against {one.baseline}: {_ratio(one)}, asked {_asked(one)}")
        else:
            lines.append(f"  {one.work}: {one.counted} {one.count}, asked <= {one.limit}")
    absent = [one for one in rows if isinstance(one, Absent)]
    lines += [f"not measured: {one.task}, against {one.baseline}: not installed, {one.why}" for one in absent]
    return "\n".join(lines)


def _cells(row: Row | Absent) -> tuple[str, ...]:
    if isinstance(row, Absent):
        return (row.way, "", row.baseline, "", "", "", "", f"not installed: {row.why}")
    low, high = (_rounded(row, ratio) for ratio in row.spread["ratio"])
    verdict = "; ".join(filter(None, (_verdict(row.met), row.note)))
    spread = f"{low} to {high}"
    return (
        row.way,
        f"{row.ours_us:,.1f}",
        row.baseline,
        f"{row.baseline_us:,.1f}",
        _ratio(row),
        spread,
        _asked(row),
        verdict,
    )


def _ratio(row: Row) -> str:
    return _rounded(row, row.ratio)


def _rounded(row: Row, ratio: float) -> str:
    """What is paired is exact enough for a third digit."""
    return f"{ratio:.{3 if row.paired else 2}f}"


def _asked(row: Row) -> str:
    all_asked = ((">=", row.target, ""), ("<=", row.limit, ""), ("<=", row.limit_us, " us"))
    return " and ".join(f"{sign} {value:g}{unit}" for sign, value, unit in all_asked if value is not None)


def _verdict(met: bool | None) -> str:
    return "" if met is None else "met" if met else "missed"


def _groups(rows: Sequence[Row | Absent]) -> dict[str, list[Row | Absent]]:
    groups: dict[str, list[Row | Absent]] = {}
    for row in rows:
        groups.setdefault(row.task, []).append(row)
    return groups


def _show_plain(note: str, rows: Sequence[Row | Absent]) -> None:
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]

    def line(values: Sequence[str]) -> str:
        aligned = (
            value.ljust(width) if i in LEFT else value.rjust(width)
            for i, (value, width) in enumerate(zip(values, widths, strict=True))
        )
        return f"  {'  '.join(aligned)}".rstrip()

    print(note)
    for task, group in _groups(rows).items():
        print(f"\n{task}\n{line(HEADINGS)}")
        for row in group:
            print(line(_cells(row)))


def _show_rich(note: str, rows: Sequence[Row | Absent]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(note, style="dim"))
    for task, group in _groups(rows).items():
        table = Table(title=Text(task, style="bold cyan"), box=box.SIMPLE_HEAD, title_justify="left")
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if i in LEFT else "right")
        for row in group:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        console.print(table)
