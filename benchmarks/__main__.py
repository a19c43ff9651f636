"""`python -m benchmarks`: compares, prints tables, and if asked to writes figures for machines and draws plots."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from batchstate.errors import BatchStateError
from batchstate.runtime import open_runtime
from benchmarks import plots
from benchmarks.comparisons import MismatchError
from benchmarks.machine import machine
from benchmarks.report import show, show_counts, summary
from benchmarks.suite import Results, works
from benchmarks.timing import no_collector, one_thread
from examples.console import add_device, add_json, chosen_device, progress, write_json
from examples.traffic import read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what was chosen. A ratio that misses its target is reported, but is not a failure: machines are noisy.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0, or 1 when two ways to do one work gave different results, or 2 when the device, a file or the library that
        draws is not there, a transfer failed, or nothing has the name that was asked for.
    """
    args = _parser().parse_args(argv)
    try:
        return _measured(args)
    except (BatchStateError, MismatchError, plots.PlotsError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, MismatchError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What batch state costs, against the ways in which engines keep it today.",
    )
    add_device(parser)
    add_json(parser)
    parser.add_argument("--plots", metavar="DIR", type=Path, help="draw cost against size: PNG and SVG files in DIR")
    parser.add_argument("--only", metavar="TEXT", action="append", help="what has TEXT in its name; may be repeated")
    parser.add_argument("--list", action="store_true", help="name what there is to measure, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="a few short samples of small pools: a trial run")
    parser.add_argument(
        "--trace", metavar="CSV", type=Path, help="the real hour of traffic (default: one drawn like it)"
    )
    return parser


def _measured(args: argparse.Namespace) -> int:
    if args.plots is not None:
        plots.require_matplotlib()
    runtime = open_runtime(chosen_device(args.device))
    hour = None if args.trace is None else read_trace(args.trace)
    everything = works(runtime, quick=args.quick, hour=hour)
    chosen = [work for work in everything if args.only is None or any(text in work.name for text in args.only)]
    if not chosen:
        of = "of a trial run " if args.quick else ""
        print(f"benchmarks: nothing {of}is named like {' or '.join(args.only)!r}; --list names all", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(work.name for work in chosen))
        return 0
    facts, results = machine(runtime), Results()

    def write() -> None:
        write_json(args.json, {"machine": facts, "commit": facts["commit"], "quick": args.quick, **results.as_json()})

    with one_thread(), progress("benchmarks", len(chosen)) as update:
        for done, work in enumerate(chosen):
            update(done, work.name)
            with no_collector():
                work.measure(results)
            write()  # now: a run that is ended keeps what it has measured
    show(facts, results.lines)
    show_counts(results.counts)
    if args.plots is not None:
        for file in plots.draw(results.scaling, args.plots, facts):
            print(file)
        if not results.scaling:
            print("no plot was drawn: nothing that was measured is named 'scaling of ...'")
    print(f"\n{summary([*results.lines, *results.counts], quick=args.quick)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
