"""`python -m benchmarks.gpu`: runs the stages, prints a table, and writes the figures to a file after each of them."""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.gpu.outcome import STAGES, Outcome
from benchmarks.gpu.report import page, print_table, remark
from benchmarks.gpu.runner import ROOT, run_all
from examples.console import add_json, write_json

BUDGET = 560.0
"""Seconds for all stages: below ten minutes, and what starts and ends a run comes on top."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0, or 1 when a stage failed. One that has no meaning on the device has not failed; it is named as not run.
    """
    args = _parser().parse_args(argv)
    if args.page is not None:
        return _print_page(args.page)
    report: dict[str, Any] = {
        "device": args.device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "quick": args.quick,
        "budget": args.budget,
        "stages": {},
    }
    outcomes: dict[str, Outcome] = {}

    def done(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        report["stages"][name] = attrs.asdict(outcome)
        write_json(args.json, report)  # now: a run that is killed keeps what it has found
        print(f"{name}: {outcome.state}: {remark(name, outcome)}", file=sys.stderr, flush=True)

    names = [name for name in STAGES if name == "machine" or not args.only or name in args.only]
    run_all(names, args.device, quick=args.quick, budget=args.budget, done=done)
    print_table(args.device, outcomes)
    return 1 if any(outcome.state == "failed" for outcome in outcomes.values()) else 0


def _print_page(path: Path) -> int:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        text = page(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"benchmarks.gpu: {path} is not a file of this command: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def _commit() -> str:
    """`BATCHSTATE_COMMIT`; else the commit that is checked out, with a + if files differ from it; else `unknown`."""
    if "BATCHSTATE_COMMIT" in os.environ:
        return os.environ["BATCHSTATE_COMMIT"]
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Everything that only a GPU can show, stage by stage."
    )
    parser.add_argument("--device", metavar="D", default="cuda", help="default: cuda; cpu for a rehearsal")
    parser.add_argument(
        "--only", metavar="STAGE", action="append", choices=list(STAGES), help="run only this stage; may be repeated"
    )
    parser.add_argument(
        "--budget", metavar="SECONDS", type=_seconds, default=BUDGET, help="for all stages (default: %(default)g)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a trial run")
    parser.add_argument("--page", metavar="JSON", type=Path, help="print the file of a run as a page; runs nothing")
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
