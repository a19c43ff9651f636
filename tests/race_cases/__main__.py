"""`python -m tests.race_cases`: what each tool says of each micro-case."""

import argparse
import sys
from pathlib import Path

from examples.console import Row, Section, progress, show
from tests.race_cases.registry import CASES, GROUPS
from tests.race_cases.verdicts import TOOLS, Table, load, run_tools, save


def main() -> int:
    """Runs the tools that this machine has, prints the table, and returns 0 if the race detector is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.race_cases", description=__doc__)
    parser.add_argument(
        "--tool", metavar="NAME", action="append", choices=list(TOOLS), help="run only this tool; may be repeated"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="keep the verdicts in FILE; what it has of tools that do not run here stays",
    )
    args = parser.parse_args()
    kept = Table({}) if args.json is None else load(args.json)
    with progress("race cases", 1000) as update:
        table = run_tools(args.tool, lambda done, total, name: update(done * 1000 // total, name)).without_those_of(
            kept
        )
    show(f"{len(CASES)} race cases", _sections(table))
    if args.json is not None:
        save(table, args.json)
    right = all(
        (verdict.says == "race") == CASES[name].racy
        for name, verdict in (table.columns["detector"].verdicts.items() if "detector" in table.columns else ())
        if name in CASES
    )
    return 0 if right else 1


def _sections(table: Table) -> list[Section]:
    sections = []
    for group, title in GROUPS.items():
        rows = []
        for case in CASES.values():
            if case.group == group:
                ran = [name for name in TOOLS if name != "detector" and name in table.columns]
                others = "; ".join(f"{TOOLS[name].title}: {table.text(name, case)}" for name in ran)
                rows.append(Row(case.name, table.text("detector", case), others))
        sections.append(Section(title, rows))
    rows = [
        Row(title, found, f"races; false alarms: {alarms}. {made}") for title, found, alarms, made in table.summary()
    ]
    return [*sections, Section("In all", rows)]


if __name__ == "__main__":
    sys.exit(main())
