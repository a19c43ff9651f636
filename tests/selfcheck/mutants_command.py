"""`python -m tests.selfcheck mutants`: real bugs, switched on one at a time, and which invariant finds each."""

import argparse
import sys
from typing import TYPE_CHECKING

from batchstate.errors import ArgumentError, one_of
from examples import console as options
from examples.console import Row, Section, progress, show

if TYPE_CHECKING:
    from tests.selfcheck.mutants import MutantReport, MutantResult

NAME = "mutants"
CLEAN = 2000
CLEAN_NAMED = 20
"""Fewer: a named mutant is what the user asks about."""
SUMMARY = "switch real bugs on in the library, one at a time, and show which invariant finds each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    options.add_names(parser, "mutant", "--name")
    parser.add_argument("--machine", metavar="NAME", help="only the mutants that this machine is to find")
    parser.add_argument(
        "--examples",
        metavar="N",
        type=options.whole(1),
        default=100,
        help="examples after which a mutant has survived (default: %(default)s)",
    )
    parser.add_argument(
        "--clean-examples",
        metavar="N",
        type=options.whole(0),
        help=f"examples without a mutant; none may be reported (default: {CLEAN:,}; {CLEAN_NAMED} with names)",
    )
    parser.add_argument("--list", action="store_true", help="only show all mutants: name, what finds it, what it does")
    options.add_device(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the mutants, prints the table, and returns 0 if all were killed and nothing else was reported."""
    from tests.selfcheck import mutants

    if args.list:
        show(f"{len(mutants.MUTANTS)} mutants", _list())
        return 0
    names, clean_examples = args.names, args.clean_examples
    if args.machine is not None:
        of_machine = [one.name for one in mutants.MUTANTS.values() if one.machine == args.machine]
        if not of_machine:
            machines = sorted({one.machine for one in mutants.MUTANTS.values()})
            problem = f"machine {args.machine!r} has no mutant"
            raise ArgumentError(problem, value=args.machine, remedy=one_of(machines, args.machine))
        names = [*names, *of_machine]
    if clean_examples is None:
        clean_examples = CLEAN_NAMED if names else CLEAN
    parts = 1000
    with progress("mutants", parts) as update:
        report = mutants.run(
            names or None,
            device=options.chosen_device(args.device),
            examples=args.examples,
            clean_examples=clean_examples,
            progress=lambda done, total, name: update(done * parts // total, name),
        )
    show(f"{report.killed} of {report.total} mutants killed, on {report.device}", _sections(report))
    for result in report.clean:
        if result.failure is not None:
            print(f"\nreported without a mutant, by machine {result.name}:\n{result.failure}", file=sys.stderr)
    options.write_json(args.json, report.as_dict())
    return 0 if report.sound else 1


def _list() -> list[Section]:
    from tests.selfcheck.mutants import GROUPS, MUTANTS

    rows: dict[str, list[Row]] = {group: [] for group in GROUPS}
    for mutant in MUTANTS.values():
        rows[mutant.group].append(Row(mutant.name, " or ".join(mutant.killed_by), mutant.mechanism))
    return [Section(title, rows[group]) for group, title in GROUPS.items()]


def _sections(report: "MutantReport") -> list[Section]:
    from tests.selfcheck.mutants import GROUPS

    sections = []
    for group, title in GROUPS.items():
        rows = [_row(result) for result in report.results if result.mutant.group == group]
        if rows:
            sections.append(Section(title, rows))
    clean = Row(
        "false reports",
        f"{report.false_reports}",
        f"in {report.clean_examples:,} examples; {report.seconds:,.0f} s in all",
        report.false_reports > 0,
    )
    return [*sections, Section("The library as it is.", [clean])]


def _row(result: "MutantResult") -> Row:
    tried = f"{result.examples} example{'s' if result.examples > 1 else ''}"
    remark = f"{tried}; {result.mutant.origin}"
    if result.simulated is not None:
        scheduler, by, examples = result.simulated
        remark = f"{tried}; sim:{scheduler}: {by}, {examples}; {result.mutant.origin}"
    if not result.killed:
        wanted = " or ".join(code.value for code in result.mutant.killed_by)
        remark = f"SURVIVED {tried}; {wanted} should have fired"
    return Row(result.mutant.name, result.by or "nothing", remark, not result.killed)
