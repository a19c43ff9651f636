"""`python -m tests.selfcheck fuzz`: state machines look for a history of calls that breaks an invariant."""

import argparse
import secrets
import sys
from typing import TYPE_CHECKING

from examples import console as options
from examples.console import Row, Section, progress, show

if TYPE_CHECKING:
    from batchstate.testing import MachineResult
    from tests.selfcheck.fuzzing import FuzzReport

NAME = "fuzz"
SUMMARY = "look for a history of calls that breaks an invariant, and print the shortest one found"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    options.add_names(parser, "machine", "--machine")
    parser.add_argument(
        "--examples",
        metavar="N",
        type=options.whole(1),
        default=100,
        help="histories that each machine tries (default: %(default)s)",
    )
    options.add_seed(parser, default=None)
    options.add_device_or_tool(parser)
    options.add_json(parser)
    options.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the machines, prints the table, and returns 0 if none found anything."""
    from tests.selfcheck.fuzzing import fuzz
    from tests.selfcheck.machines import MACHINES

    device = options.chosen_device(args.device)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    machines = args.names or list(MACHINES)
    total = args.examples * len(machines)
    with progress("fuzz", total) as update:
        report = fuzz(device, args.examples, seed, machines, progress=lambda done, name: update(min(done, total), name))
    title, sections = f"seed {report.seed}, on {report.device}", _sections(report)
    show(title, sections)
    _show_failures(report)
    options.write_json(args.json, report.as_dict())
    if args.report is not None:
        from examples.page import Failure, page

        failures = [Failure(one.name, one.failure) for one in report.machines if one.failure is not None]
        args.report.write_text(page("fuzz", title, [*sections, *_reached(report)], failures), encoding="utf-8")
    return 1 if report.violations else 0


def _reached(report: "FuzzReport") -> list[Section]:
    """How often each machine came into the situations that it looks for."""
    return [
        Section(
            f"Reached by {result.name}",
            [Row(target, f"{times:,}", "times") for target, times in result.reached.items()],
        )
        for result in report.machines
        if result.reached
    ]


def _sections(report: "FuzzReport") -> list[Section]:
    examples = sum(result.examples for result in report.machines)
    verdict = Row("violations", f"{report.violations:,}", f"in {examples:,} examples", report.violations > 0)
    return [Section("Machines", [_row(result) for result in report.machines]), Section("In all", [verdict])]


def _row(result: "MachineResult") -> Row:
    found = f"broken: {result.code}" if result.code else ""
    remark = f"{result.steps:,} rules in {result.seconds:.1f} s{'; ' if found else ''}{found}"
    name = f"{result.name}, {result.device}" if result.device.startswith("sim:") else result.name
    return Row(name, f"{result.examples:,} examples", remark, bool(result.violations))


def _show_failures(report: "FuzzReport") -> None:
    for result in report.machines:
        if result.failure is not None:
            print(f"\nmachine {result.name}\n{result.failure}", file=sys.stderr)
        if result.race is not None:
            path = f"race-{result.name}.json"
            result.race.save(path)
            print(f"\nTo see it:\n    batchstate race {path} --out race.html", file=sys.stderr)
