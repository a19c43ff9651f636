"""Rows as a table: on a terminal with rich where that is installed, and otherwise as aligned text."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from batchstate.cli.progress import on_terminal
from benchmarks.comparisons import Row

HEADINGS = ("ours", "us", "baseline", "us", "ratio", "quartiles", "asked")


def show(machine: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Prints what was measured, grouped by work."""
    note = (
        f"{machine['cpu']}, {machine['cores']} cores; device {machine['device']}; "
        f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}\n"
        "Medians of an interleaved run, device included; ratio = baseline / ours.\n"
        "Above 1 ours is faster, below 1 it is slower. "
        "Baselines do less: no generations, no double frees found, no fences, no checks of twins."
    )
    if on_terminal(sys.stdout) and _has_rich():
        _show_rich(note, rows)
    else:
        _show_plain(note, rows)


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.spread["ratio"]
    return (
        row.way,
        f"{row.ours_us:,.1f}",
        row.baseline,
        f"{row.baseline_us:,.1f}",
        f"{row.ratio:.2f}",
        f"{low:.2f} to {high:.2f}",
        "" if row.target is None else f"{row.target:g}",
    )


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.task, []).append(row)
    return groups


def _show_plain(note: str, rows: Sequence[Row]) -> None:
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]

    def line(values: Sequence[str]) -> str:
        name, ours, baseline, other, ratio, spread, asked = (
            value.ljust(width) if i in (0, 2) else value.rjust(width)
            for i, (value, width) in enumerate(zip(values, widths, strict=True))
        )
        return f"  {name}  {ours}  {baseline}  {other}  {ratio}  {spread}  {asked}".rstrip()

    print(note)
    for task, group in _groups(rows).items():
        print(f"\n{task}\n{line(HEADINGS)}")
        for row in group:
            print(line(_cells(row)))


def _show_rich(note: str, rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(note, style="dim"))
    for task, group in _groups(rows).items():
        table = Table(title=Text(task, style="bold cyan"), box=box.SIMPLE_HEAD, title_justify="left")
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if i in (0, 2) else "right")
        for row in group:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        console.print(table)


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
