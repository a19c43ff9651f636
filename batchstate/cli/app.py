"""The commands of `batchstate`, and how a run ends: errors as messages, results as exit codes."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

import batchstate
from batchstate.cli import info, race, race_run, replay, replay_show
from batchstate.errors import BatchStateError
from batchstate.violations import Violation

_BEGIN = """\
begin with:
  batchstate race run YOUR_SCRIPT.py      races of a script that says cuda
  batchstate replay FILE                  what was recorded before a violation
  batchstate info                         versions, for a report of a bug

`batchstate COMMAND --help` lists the options of a command."""


COMMANDS = (race, race_run, replay, replay_show, info)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        0 when all is well, 1 when a violation was found, 2 when the command could not do its work, 130 when it was
        interrupted, and 141 when nobody reads its output any more.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if (two := " ".join(words[:2])) in (race_run.NAME, replay_show.NAME):  # a file of that name is `./run`
        words[:2] = [two]
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    return exit_code("batchstate", lambda: args.command.run(args))


def exit_code(program: str, run: Callable[[], int]) -> int:
    """The exit code of a run; an error becomes a message of `program` on stderr, and a code as `main` says."""
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        return 128 + signal.SIGPIPE
    except Violation as violation:
        return _failed(program, str(violation), 1)
    except BatchStateError as error:
        return _failed(program, str(error), 2)
    except OSError as error:
        return _failed(program, f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except KeyboardInterrupt:
        return _failed(program, "interrupted", 130)


def _failed(program: str, message: str, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"batchstate {batchstate.__version__}, from {os.path.dirname(batchstate.__file__)}")
        parser.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchstate",
        description="Finds races, replays recordings, and says what is installed.",
        epilog=_BEGIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser
