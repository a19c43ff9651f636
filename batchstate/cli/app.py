"""Chooses the command and turns its errors into messages and exit codes."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

import batchstate
from batchstate.cli import fuzz, mutants, race, race_run, traffic
from batchstate.errors import ArgumentError, BatchStateError, closest, one_of
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


_BEGIN = """\
begin with:
  batchstate race run YOUR_SCRIPT.py           races of a script that says cuda
  batchstate fuzz slot_pool --examples 20      the library itself, in seconds
  batchstate traffic --requests 100            what batch state costs here

`batchstate COMMAND --help` lists the options of a command."""


COMMANDS: tuple[Command, ...] = (fuzz, mutants, race, race_run, traffic)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0 when all is well, 1 when a violation was found, 2 when the command could not do its work, and 130 when it was
        interrupted.
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:2] == race_run.NAME.split():  # a command of two words; a report of that name is `./run`
            words[:2] = [race_run.NAME]
        parser = _parser()
        if not words:
            parser.print_help(sys.stderr)
            return 2
        if words[0] == "help":
            words = [*words[1:2], "--help"]
        names = [command.NAME for command in COMMANDS]
        if not words[0].startswith("-") and words[0] not in names:
            raise ArgumentError(f"unknown command {words[0]!r}", value=words[0], remedy=one_of(names, words[0]))
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse_unknown(words, unknown[0], args.options, names)
        command: Command = args.command
        return _run(command, args)
    except Violation as violation:
        return _failed(str(violation), 1)
    except BatchStateError as error:
        return _failed(str(error), 2)
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def _run(command: Command, args: argparse.Namespace) -> int:
    try:
        return command.run(args)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        return _failed(f"`{command.NAME}` needs hypothesis: pip install 'batchstate[testing]'", 2)


def _refuse_unknown(words: Sequence[str], unknown: str, options: Sequence[str], names: Sequence[str]) -> NoReturn:
    """Says which option or command may be meant."""
    command = words[0]
    meant = closest(options, unknown) if unknown.startswith("-") else closest(names, " ".join(words[:2]))
    remedy = f"{meant}{' ' if meant else ''}`batchstate {command} --help` lists what it takes"
    raise ArgumentError(f"{command}: unknown argument {unknown!r}", value=unknown, remedy=remedy)


class _Parser(argparse.ArgumentParser):
    """Words its errors as the library does."""

    def error(self, message: str) -> NoReturn:
        """Ends with 2."""
        self.exit(2, f"{self.prog}: {message}\n  remedy: `{self.prog} --help` lists what it takes\n")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"batchstate {batchstate.__version__}")
        parser.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="batchstate",
        description="Checks that the host and the device side of an inference batch agree.",
        epilog=_BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(subparser)
        options = [name for action in subparser._actions for name in action.option_strings]
        subparser.set_defaults(command=command, options=options)
    return parser


def _failed(message: str, code: int) -> int:
    print(f"batchstate: {message}", file=sys.stderr)
    return code
