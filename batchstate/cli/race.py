"""`batchstate race`: prints race reports that were kept in a file, or draws them as a page."""

import argparse
import sys
from pathlib import Path

from batchstate.cli._options import new_file

NAME = "race"
SUMMARY = "print race reports, or draw them as a page for a browser"

_SUFFIXES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("report", metavar="REPORT", type=_report, help="file of a race report, or of a run's --json")
    parser.add_argument("--out", metavar="FILE", type=_page, help="draw it in FILE instead, a page: .html or .htm")


def run(args: argparse.Namespace) -> int:
    """Prints or draws the reports, and returns 0."""
    from batchstate.races.render import race_html, run_html
    from batchstate.races.report import load_reports

    reports = load_reports(args.report)
    if args.out is None:
        encoding = sys.stdout.encoding or "ascii"
        words = "\n\n".join(map(str, reports)) or "no findings"
        print(words.encode(encoding, "backslashreplace").decode(encoding))
    else:
        page = race_html(reports[0]) if len(reports) == 1 else run_html(args.report.name, reports, ())
        args.out.write_text(page, encoding="utf-8")
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
