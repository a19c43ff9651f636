"""`python -m tests.selfcheck fuzz | mutants`: the library checks itself."""

import argparse
import secrets
import sys
from collections.abc import Sequence

from batchstate.cli.app import exit_code
from batchstate.errors import ArgumentError, one_of
from batchstate.testing import MachineResult
from examples import console as options
from examples.console import Row, Section, progress, show
from examples.page import Failure, page
from tests.selfcheck import mutants
from tests.selfcheck.fuzzing import FuzzReport, fuzz
from tests.selfcheck.machines import MACHINES
from tests.selfcheck.mutants import GROUPS, MUTANTS, MutantReport, MutantResult

CLEAN_NAMED = 20
"""Examples without a mutant where mutants are named: they are what the user asks about."""

PARTS = 1000  # that the progress bar of `mutants` has


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 when all is well, 1 for violations, 2 when the work could not be done."""
    parser = argparse.ArgumentParser(prog="python -m tests.selfcheck", description="The library checks itself.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    summary = "look for a history of calls that breaks an invariant, and print the shortest one found"
    fuzzing = subparsers.add_parser("fuzz", help=summary, description=summary)
    fuzzing.set_defaults(run=run_fuzz)
    options.add_names(fuzzing, "machine", "--machine")
    _add_count(fuzzing, "--examples", 1, 100, "histories that each machine tries (default: 100)")
    options.add_seed(fuzzing, default=None)
    options.add_device_or_tool(fuzzing)
    options.add_json(fuzzing)
    options.add_report(fuzzing)

    summary = "switch real bugs on in the library, one at a time, and show which invariant finds each"
    killing = subparsers.add_parser("mutants", help=summary, description=summary)
    killing.set_defaults(run=run_mutants)
    options.add_names(killing, "mutant", "--name")
    killing.add_argument("--machine", metavar="NAME", help="only the mutants that this machine is to find")
    _add_count(killing, "--examples", 1, mutants.EXAMPLES, "examples after which a mutant has survived (default: 100)")
    clean = f"(default: {mutants.CLEAN_EXAMPLES:,}; {CLEAN_NAMED} with names)"
    _add_count(killing, "--clean-examples", 0, None, f"examples without a mutant; none may be reported {clean}")
    killing.add_argument("--list", action="store_true", help="only show all mutants: name, what finds it, what it does")
    options.add_device(killing)
    options.add_json(killing)

    args = parser.parse_args(argv)
    return exit_code("tests.selfcheck", lambda: args.run(args))


def _add_count(parser: argparse.ArgumentParser, option: str, least: int, default: int | None, text: str) -> None:
    parser.add_argument(option, metavar="N", type=options.whole(least), default=default, help=text)


# fuzz: state machines look for a history of calls that breaks an invariant


def run_fuzz(args: argparse.Namespace) -> int:
    """Runs the machines, prints the table, and returns 0 if none found anything."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    machines = args.names or list(MACHINES)
    total = args.examples * len(machines)
    with progress("fuzz", total) as update:
        report = fuzz(
            options.chosen_device(args.device),
            args.examples,
            seed,
            machines,
            progress=lambda done, name: update(min(done, total), name),
        )
    title, sections = f"seed {report.seed}, on {report.device}", _machines(report)
    show(title, sections)
    _show_failures(report)
    options.write_json(args.json, report.as_dict())
    if args.report is not None:
        failures = [Failure(result.name, result.failure) for result in report.machines if result.failure is not None]
        args.report.write_text(page("fuzz", title, [*sections, *_reached(report)], failures), encoding="utf-8")
    return 1 if report.violations else 0


def _machines(report: FuzzReport) -> list[Section]:
    examples = sum(result.examples for result in report.machines)
    verdict = Row("violations", f"{report.violations:,}", f"in {examples:,} examples", report.violations > 0)
    return [Section("Machines", [_machine(result) for result in report.machines]), Section("In all", [verdict])]


def _machine(result: MachineResult) -> Row:
    broken = f"; broken: {result.code}" if result.code else ""
    remark = f"{result.steps:,} rules in {result.seconds:.1f} s{broken}"
    name = f"{result.name}, {result.device}" if result.device.startswith("sim:") else result.name
    return Row(name, f"{result.examples:,} examples", remark, bool(result.violations))


def _reached(report: FuzzReport) -> list[Section]:
    return [
        Section(f"Reached by {result.name}", [Row(name, f"{n:,}", "times") for name, n in result.reached.items()])
        for result in report.machines
        if result.reached
    ]


def _show_failures(report: FuzzReport) -> None:
    for result in report.machines:
        if result.failure is not None:
            print(f"\nmachine {result.name}\n{result.failure}", file=sys.stderr)
        if result.race is not None:
            path = f"race-{result.name}.json"
            result.race.save(path)
            print(f"\nTo see it:\n    batchstate race {path} --out race.html", file=sys.stderr)


# mutants: real bugs, switched on one at a time, and which invariant finds each


def run_mutants(args: argparse.Namespace) -> int:
    """Runs the mutants, prints the table, and returns 0 if all were killed and nothing else was reported."""
    if args.list:
        show(f"{len(MUTANTS)} mutants", _list())
        return 0
    names = list(args.names)
    if args.machine is not None:
        names += _found_by(args.machine)
    clean_examples = args.clean_examples
    if clean_examples is None:
        clean_examples = CLEAN_NAMED if names else mutants.CLEAN_EXAMPLES
    with progress("mutants", PARTS) as update:
        report = mutants.run(
            names or None,
            device=options.chosen_device(args.device),
            examples=args.examples,
            clean_examples=clean_examples,
            progress=lambda done, total, name: update(done * PARTS // total, name),
        )
    show(f"{report.killed} of {report.total} mutants killed, on {report.device}", _mutants(report))
    for result in report.clean:
        if result.failure is not None:
            print(f"\nreported without a mutant, by machine {result.name}:\n{result.failure}", file=sys.stderr)
    options.write_json(args.json, report.as_dict())
    return 0 if report.sound else 1


def _found_by(machine: str) -> list[str]:
    names = [mutant.name for mutant in MUTANTS.values() if mutant.machine == machine]
    if not names:
        machines = sorted({mutant.machine for mutant in MUTANTS.values()})
        raise ArgumentError(f"machine {machine!r} has no mutant", machine, one_of(machines, machine))
    return names


def _list() -> list[Section]:
    rows: dict[str, list[Row]] = {group: [] for group in GROUPS}
    for mutant in MUTANTS.values():
        rows[mutant.group].append(Row(mutant.name, " or ".join(mutant.killed_by), mutant.mechanism))
    return [Section(title, rows[group]) for group, title in GROUPS.items()]


def _mutants(report: MutantReport) -> list[Section]:
    groups = {group: [result for result in report.results if result.mutant.group == group] for group in GROUPS}
    remark = f"in {report.clean_examples:,} examples; {report.seconds:,.0f} s in all"
    clean = Row("false reports", f"{report.false_reports}", remark, report.false_reports > 0)
    sections = [
        Section(GROUPS[group], [_mutant(result) for result in results]) for group, results in groups.items() if results
    ]
    return [*sections, Section("The library as it is.", [clean])]


def _mutant(result: MutantResult) -> Row:
    tried = f"{result.examples} example{'s' if result.examples > 1 else ''}"
    if not result.killed:
        codes = " or ".join(code.value for code in result.mutant.killed_by)
        unreached = f"; changed lines that never ran: {', '.join(result.never_ran)}" if result.never_ran else ""
        remark = f"SURVIVED {tried}; {codes} should have fired{unreached}"
    elif result.simulated is not None:
        scheduler, by, examples = result.simulated
        remark = f"{tried}; sim:{scheduler}: {by}, {examples}; {result.mutant.origin}"
    else:
        remark = f"{tried}; {result.mutant.origin}"
    return Row(result.mutant.name, result.by or "nothing", remark, not result.killed)


if __name__ == "__main__":
    sys.exit(main())
