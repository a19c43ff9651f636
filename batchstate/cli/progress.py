"""How far a command is: a bar on a terminal, and otherwise a line now and then. Both go to stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

SECONDS_BETWEEN_LINES = 5.0
"""Where stderr is no terminal: a log should tell a long run from one that hangs, and stay short."""

Update = Callable[[int, str], None]
"""Called with what is done so far and a remark."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Update]:
    """A window in which progress is shown.

    Args:
        what: the work, in a word or two.
        total: what will have been done at the end.

    Yields:
        a function to call, as often as is convenient, with what is done and a remark.
    """
    with _bar(what, total) if on_terminal(sys.stderr) and has_rich() else _lines(what, total) as update:
        yield update


def on_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def has_rich() -> bool:
    """Whether `rich` is installed (extra `cli`)."""
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, remark="")
        yield lambda done, remark: bar.update(task, completed=done, remark=remark)


@contextlib.contextmanager
def _lines(what: str, total: int) -> Iterator[Update]:
    last = time.monotonic()

    def update(done: int, remark: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"{what}: {100 * done // max(total, 1):3d} %  {remark}", file=sys.stderr, flush=True)

    yield update
