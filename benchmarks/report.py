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
    asked = [row for row in rows if not isinstance(row, Absent) and row.met is not None]
    missed = [row for row in asked if not row.met]
    lines = [
        f"{sum(bool(row.met) for row in some)} of {len(some)} {name} as asked"
        for name, kind in (("ratios", Row), ("counts", Count))
        if (some := [row for row in asked if isinstance(row, kind)])
    ]
    if quick and lines:
        lines.append("a trial run: its ratios are noise")
    if missed:
        lines.append("missed:")
    for row in missed:
        if isinstance(row, Row):
            lines.append(f"  {row.work}, against {row.baseline}: {_ratio(row)}, asked {_asked(row)}")
        else:
            lines.append(f"  {row.work}: {row.counted} {row.count}, asked <= {row.limit}")
    absent = [row for row in rows if isinstance(row, Absent)]
    lines += [f"not measured: {row.task}, against {row.baseline}: not installed, {row.why}" for row in absent]
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
    """A paired ratio is exact enough for a third digit."""
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
