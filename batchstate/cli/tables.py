"""Results as a table: coloured on a terminal, aligned text elsewhere. Goes to stdout."""

import sys
from collections.abc import Sequence
from typing import final

import attrs

from batchstate.cli.progress import has_rich, on_terminal


@final
@attrs.frozen
class Row:
    """One figure.

    Attributes:
        label: what it is.
        value: the figure, formatted, with its unit.
        remark: what it means.
        alarming: it should not be so.
    """

    label: str
    value: str
    remark: str = ""
    alarming: bool = False


@final
@attrs.frozen
class Section:
    """Figures that belong together."""

    title: str
    rows: Sequence[Row]


def show(title: str, sections: Sequence[Section]) -> None:
    """Prints a table of sections. Values of all sections stand in one column, aligned to the right."""
    if on_terminal(sys.stdout) and has_rich():
        _show_rich(title, sections)
    else:
        _show_plain(title, sections)


def _show_plain(title: str, sections: Sequence[Section]) -> None:
    rows = [row for section in sections for row in section.rows]
    label = max(len(row.label) for row in rows)
    value = max(len(row.value) for row in rows)
    lines = [title, "=" * len(title)]
    for section in sections:
        lines += ["", section.title]
        for row in section.rows:
            mark = "!" if row.alarming else " "
            lines.append(f" {mark} {row.label:<{label}}  {row.value:>{value}}  {row.remark}".rstrip())
    print("\n".join(lines))


def _show_rich(title: str, sections: Sequence[Section]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for section in sections:
        table.add_row(Text(section.title, style="bold cyan"))
        for row in section.rows:
            style = "bold red" if row.alarming else ""
            table.add_row(Text("  " + row.label), Text(row.value, style=style), Text(row.remark, style=style))
        table.add_section()
    Console().print(table)
