"""`python -m tests.selfcheck fuzz | mutants`: the library checks itself."""

import argparse
import sys
from collections.abc import Sequence

from batchstate.cli.app import exit_code
from tests.selfcheck import fuzz_command, mutants_command

COMMANDS = (fuzz_command, mutants_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 when all is well, 1 for violations, 2 when the work could not be done."""
    parser = argparse.ArgumentParser(prog="python -m tests.selfcheck", description=__doc__.partition(": ")[2])
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    args = parser.parse_args(argv)
    return exit_code("tests.selfcheck", lambda: args.command.run(args))


if __name__ == "__main__":
    sys.exit(main())
