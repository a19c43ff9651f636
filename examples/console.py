"""Options and tables of the commands of this checkout. A table is coloured on a terminal and aligned text elsewhere."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, final

import attrs

from batchstate.cli._options import add_json as add_json
from batchstate.cli._options import new_file as new_file
from batchstate.cli._options import write_json as write_json


def add_names(parser: argparse.ArgumentParser, kind: str, option: str) -> None:
    """Names of what to run, as arguments or each behind `option`: a list in `args.names`, empty for all."""
    meaning = f"run only this {kind} (default: all)"
    parser.add_argument("names", metavar="NAME", nargs="*", action="extend", help=meaning)
    meaning = "the same; may be repeated"
    parser.add_argument(option, metavar="NAME", nargs=1, action="extend", dest="names", help=meaning)


def add_device(parser: argparse.ArgumentParser, tools: str = "") -> None:
    """`--device D`; see `chosen_device`."""
    meaning = f"cpu, cuda, cuda:1, ...{tools} (default: cuda where there is one)"
    parser.add_argument("--device", metavar="D", help=meaning)


def add_device_or_tool(parser: argparse.ArgumentParser) -> None:
    """`--device D`, where D may be a tool of `batchstate.races.devices`."""
    add_device(parser, "; race or race:cuda, the race detector; sim or sim:SCHEDULER, the simulated device")


def add_seed(parser: argparse.ArgumentParser, *, default: int | None = 0) -> None:
    """`--seed S`."""
    meaning = "the same seed gives the same run" + ("" if default is None else f" (default: {default})")
    parser.add_argument("--seed", metavar="S", type=whole(0), default=default, help=meaning)


def add_report(parser: argparse.ArgumentParser) -> None:
    """`--report FILE`; see `examples.page`."""
    meaning = "also write the run as one HTML page to FILE, for a browser"
    parser.add_argument("--report", metavar="FILE", type=new_file, help=meaning)


def chosen_device(name: str | None) -> str:
    """The device that was asked for, or else an accelerator if there is one."""
    if name is not None:
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def whole(least: int) -> Callable[[str], int]:
    """The type of options that are whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
        return int(text)

    return parse


def share(text: str) -> float:
    """The type of options that are a share from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


SECONDS_BETWEEN_LINES = 5.0
"""Where stderr is not a terminal: a log should tell a long run from one that hangs, and stay short."""

Update = Callable[[int, str], None]
"""Called with what is done so far and a remark."""


@contextlib.contextmanager
def progress(work: str, total: int) -> Iterator[Update]:
    """A window with progress on stderr, a bar on a terminal or else a line now and then; yields what to call with it.

    `total` is the amount that will have been done at the end.
    """
    with _bar(work, total) if on_terminal(sys.stderr) and has_rich() else _lines(work, total) as update:
        yield update


def on_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def has_rich() -> bool:
    """Whether `rich` is installed."""
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _bar(work: str, total: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),  # with the time that remains in 80 columns; the remark is cut first
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}", style="dim", table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(work, total=total, remark="")
        yield lambda done, remark: bar.update(task, completed=done, remark=remark)


@contextlib.contextmanager
def _lines(work: str, total: int) -> Iterator[Update]:
    last = time.monotonic()

    def update(done: int, remark: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{work}: {100 * done // max(total, 1):3d} %  {remark}", file=sys.stderr, flush=True)

    yield update


@final
@attrs.frozen
class Row:
    """One figure, formatted, with its name and its meaning; an alarming one should not be so."""

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
