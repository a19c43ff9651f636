"""`python -m benchmarks`: compares, prints a table, and writes the rows for machines if asked to."""

import argparse
import sys
from collections.abc import Sequence

from batchstate.cli.options import add_device, add_json, chosen_device, write_json
from batchstate.cli.progress import progress
from batchstate.errors import BatchStateError
from batchstate.runtime import open_runtime
from benchmarks.comparisons import MismatchError, Row
from benchmarks.machine import machine
from benchmarks.report import show
from benchmarks.suite import how_many, run_all
from benchmarks.timing import one_thread


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all comparisons.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0, or 1 when two ways to do one work gave different results, or 2 when the device is not there
        or a transfer failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What batch state costs, against the ways in which engines keep it today.",
    )
    add_device(parser)
    add_json(parser)
    parser.add_argument("--quick", action="store_true", help="a few short samples of small pools: a trial run")
    args = parser.parse_args(argv)
    try:
        runtime = open_runtime(chosen_device(args.device))
        rows: list[Row] = []
        with one_thread(), progress("benchmarks", how_many(runtime, quick=args.quick)) as update:
            for done, some in enumerate(run_all(runtime, quick=args.quick), start=1):
                rows += some
                update(done, some[-1].task)
    except (BatchStateError, MismatchError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, MismatchError) else 2
    facts = machine(runtime)
    show(facts, rows)
    write_json(args.json, {"machine": facts, "quick": args.quick, "rows": [row.as_json() for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
