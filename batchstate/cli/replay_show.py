"""`batchstate replay show`: prints the last operations of a recording, or draws them as a page."""

import argparse

from batchstate.cli._options import new_file
from batchstate.cli.replay import Progress, bounded_memory

NAME = "replay show"
SUMMARY = "print the last operations of a recording, or draw its requests, slots and pages"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("file", metavar="FILE", help="of `record_operations`")
    parser.add_argument("--html", metavar="OUT.html", type=new_file, help="draw a page instead")
    parser.add_argument("--last", type=int, default=100, metavar="N", help="operations shown (default: %(default)d)")


def run(args: argparse.Namespace) -> int:
    """Prints or draws it, and returns 0."""
    from batchstate.replay import load, show

    with bounded_memory():
        recording = load(args.file)
        if args.html is None:
            print(show.text(recording, last=args.last))
        else:
            with Progress("event {:,} of {:,}") as progress:
                args.html.write_text(show.page(recording, last=args.last, progress=progress), encoding="utf-8")
    return 0
