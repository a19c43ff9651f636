"""`batchstate race run`: runs a script of plain torch code that says `cuda`, on a CPU, and reports its races."""

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from batchstate.cli._output import add_json, write_json
from batchstate.errors import ArgumentError

NAME = "race run"
SUMMARY = "run a script that says cuda on this CPU, and report every pair of accesses that nothing orders"

_MOST_WAITS = 10
"""Lines that make the host wait and are printed."""

_CALLED = {"_local_scalar_dense": "item", "copy_": "a copy that blocks", "_to_copy": "to"}
"""What code says for an operation of torch that makes the host wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "batchstate race run [--json FILE] [--baseline FILE] SCRIPT [ARGS ...]"
    _add_options(parser)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python script; it imports nothing of batchstate")
    arguments = parser.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="arguments of the script; options of this command are taken out, unless they come after `--`",
    )
    arguments.required = False  # or argparse lists it as missing together with SCRIPT


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=Path,
        help="findings that are accepted: a file that --json has written; only others count",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the script: 0 without findings that are new, 1 with some, 2 where it could not be run to its end."""
    from batchstate.testing.cuda import cuda_on_cpu
    from batchstate.testing.race.findings import FORMAT, accepted_in, findings, identity

    arguments = _of_script(args)
    accepted = frozenset() if args.baseline is None else accepted_in(args.baseline)
    if not args.script.is_file():
        raise ArgumentError(
            f"{args.script}: this script does not exist", value=str(args.script), remedy="name a file of Python code"
        )
    with cuda_on_cpu(on_race="collect") as rt:
        error = _run(args.script, arguments)
    new = [race for race in rt.races if identity(race) not in accepted]
    if error is None and not rt.accesses:
        error = "nothing was done on a device of cuda, so that nothing was checked"
    waits = [(name, *at.words(), count) for (name, at), count in rt.waited_at.most_common()]
    figures: dict[str, Any] = {
        "format": FORMAT,
        "script": str(args.script),
        "findings": findings(rt.races, accepted),
        "new": len(new),
        "accesses": rt.accesses,
        "synchronised": dict(rt.synchronised),
        "waits": [
            {"operation": name, "line": line, "caller": caller, "count": count} for name, line, caller, count in waits
        ],
        "error": error,
    }
    write_json(args.json, figures)
    for race in new:
        print(f"{race}\n")
    known, waited = len(rt.races) - len(new), sum(rt.synchronised.values())
    count = f"{len(new)} finding{'s' * (len(new) != 1)}{f', {known} accepted' * bool(known)}"
    checked = f"{rt.accesses} access{'es' * (rt.accesses != 1)} checked"
    hides = ", which can hide races:" * bool(waited)
    print(f"{count}; {checked}, {waited} wait{'s' * (waited != 1)} inside of torch{hides}")
    for name, line, caller, times in waits[:_MOST_WAITS]:
        called = f", called at {caller}" * (caller is not None)
        print(f"  {times:6} of {_CALLED.get(name, name)} at {line}{called}")
    if len(waits) > _MOST_WAITS:
        print(f"  and those of {len(waits) - _MOST_WAITS} more lines; --json FILE lists all")
    if error is not None:
        print(f"batchstate: {args.script}: {error}", file=sys.stderr)
        return 2
    return 1 if new else 0


def _of_script(args: argparse.Namespace) -> list[str]:
    """The arguments of the script; this command's options among them are taken out, up to `--`."""
    given: list[str] = args.arguments
    at = given.index("--") if "--" in given else len(given)
    options = argparse.ArgumentParser(prog="batchstate race run", add_help=False, allow_abbrev=False)
    _add_options(options)
    found, rest = options.parse_known_args(given[:at])
    args.json, args.baseline = found.json or args.json, found.baseline or args.baseline
    return rest + given[at + 1 :]


def _run(script: Path, arguments: list[str]) -> str | None:
    """Runs a script as Python does. Returns why it did not come to its end, or None."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return None if end.code in (None, 0) else f"it ended with {end.code!r}"
    except Exception as error:
        traceback.print_exc()
        return f"it ended with {type(error).__name__}: {error}"
    finally:
        sys.argv, sys.path[:] = argv, path
    return None
