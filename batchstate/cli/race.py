"""`batchstate race`: prints a race report that was kept in a file, or draws it as a page."""

import argparse
import sys
from pathlib import Path

from batchstate.cli._options import new_file

NAME = "race"
SUMMARY = "print a race report, or draw it as a page for a browser"

_SUFFIXES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("report", metavar="REPORT", type=_report, help="file that a race report was saved to")
    parser.add_argument("--out", metavar="FILE", type=_page, help="draw it in FILE instead, a page: .html or .htm")


def run(args: argparse.Namespace) -> int:
    """Prints or draws the report, and returns 0."""
    from batchstate.races.render import race_html
    from batchstate.races.report import RaceReport

    report = RaceReport.load(args.report)
    if args.out is None:
        encoding = sys.stdout.encoding or "ascii"
        print(str(report).encode(encoding, "backslashreplace").decode(encoding))
    else:
        args.out.write_text(race_html(report), encoding="utf-8")
    return 0


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() == ".py":
        problem = f"{text} is a script, not a race report; did you mean `batchstate race run {text}`?"
        raise argparse.ArgumentTypeError(problem)
    return path


def _page(text: str) -> Path:
    if Path(text).suffix.lower() not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} has none of the suffixes {', '.join(_SUFFIXES)}")
    return new_file(text)
