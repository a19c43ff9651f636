"""`batchstate race`: draws a race report that was kept in a file."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchstate.cli._options import new_file

if TYPE_CHECKING:
    from batchstate.races.report import RaceReport

NAME = "race"
SUMMARY = "draw a race report: in the terminal, as a page for a browser, or as a trace for a trace viewer"

_WIDTH, _MOST = 100, 140
"""Characters in a line where the output is not a terminal and `COLUMNS` is not set, and at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("report", metavar="REPORT", type=_report, help="file that a race report was saved to")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=_picture,
        help="write the picture to FILE instead: .html or .htm a page, .json a Chrome trace, .txt text",
    )


def run(args: argparse.Namespace) -> int:
    """Draws the report, and returns 0."""
    from batchstate.races.report import RaceReport

    report = RaceReport.load(args.report)
    if args.out is None:
        print(_for_terminal(report), end="")
        return 0
    args.out.write_text(_DRAWN[args.out.suffix.lower()](report), encoding="utf-8")
    return 0


def _for_terminal(report: "RaceReport") -> str:
    from batchstate.races.render.text import LEAST_WIDTH, race_text

    width = max(LEAST_WIDTH, min(shutil.get_terminal_size((_WIDTH, 24)).columns, _MOST))
    picture = race_text(report, width)
    try:
        picture.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return race_text(report, width, ascii=True)
    return picture


def _page(report: "RaceReport") -> str:
    from batchstate.races.render import race_html

    return race_html(report)


def _trace(report: "RaceReport") -> str:
    from batchstate.races.render import race_trace

    return json.dumps(race_trace(report)) + "\n"


def _text(report: "RaceReport") -> str:
    from batchstate.races.render import race_text

    return race_text(report)


_DRAWN: dict[str, Callable[["RaceReport"], str]] = {".html": _page, ".htm": _page, ".json": _trace, ".txt": _text}
"""Suffix of a file -> what draws its content."""


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() == ".py":
        raise argparse.ArgumentTypeError(
            f"{text} is a script, not a race report; did you mean `batchstate race run {text}`?"
        )
    return path


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in _DRAWN:
        raise argparse.ArgumentTypeError(f"{text!r} has none of the suffixes {', '.join(_DRAWN)}")
    return new_file(text)
