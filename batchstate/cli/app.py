"""Chooses the command and turns its errors into messages and exit codes."""

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from batchstate.cli import fuzz, mutants, traffic
from batchstate.errors import BatchStateError
from batchstate.violations import Violation


class Command(Protocol):
    """What a module has to offer to be a command."""

    NAME: str
    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the options."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit code: 0 for all well, 1 for violations found."""
        ...


COMMANDS: tuple[Command, ...] = (fuzz, mutants, traffic)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0 when all is well, 1 when a violation was found, 2 when the command could not do its work, and 130 when it was
        interrupted.
    """
    args = _parser().parse_args(argv)
    command: Command = args.command
    try:
        return command.run(args)
    except Violation as violation:
        return _failed(str(violation), 1)
    except BatchStateError as error:
        return _failed(str(error), 2)
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchstate",
        description="Checks that the host and the device side of an inference batch agree.",
        epilog="`batchstate COMMAND --help` lists the options of a command.",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def _failed(message: str, code: int) -> int:
    print(f"batchstate: {message}", file=sys.stderr)
    return code
