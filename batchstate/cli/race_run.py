"""`batchstate race run`: runs a script of plain torch code that says `cuda`, on a CPU or a GPU, and reports its races.

On the simulated device it reports the orders of the streams in which the script comes to another result.
"""

import argparse
import contextlib
import functools
import itertools
import re
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from batchstate.cli._options import add_json, write_json
from batchstate.errors import ArgumentError

NAME = "race run"
SUMMARY = "run a script that says cuda on this CPU or GPU, and report every pair of accesses that nothing orders"

_ORDERS = "batchstate race orders 1"
"""Format of the JSON of a run on the simulated device."""

_MOST_WAITS = 10
"""Lines that make the host wait, in the output; the JSON has all."""

_CALLED = {"_local_scalar_dense": "item", "copy_": "a copy that blocks", "_to_copy": "to"}
"""Operation of torch that makes the host wait -> the call in the code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "batchstate race run [--device DEVICE] [--seed N] [--json FILE] [--baseline FILE] SCRIPT [ARGS ...]"
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
        "--device",
        metavar="DEVICE",
        help="race (default) or race:prompt, where events are complete as soon as they are asked; sim:NAME, one order "
        "of the streams; sim: the script runs once in each order, and its output is compared; or cuda or "
        "cuda:prompt: it runs on the GPU of this machine",
    )
    parser.add_argument("--seed", metavar="N", type=int, help="of the orders of sim that are drawn (default: 0)")
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=Path,
        help="findings that are accepted: a file that --json has written; only others count",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the script: 0 without new findings, 1 with some, 2 if it could not be run to its end."""
    from batchstate.races.cuda import CudaSimRuntime, cuda_on_cpu, watch_cuda
    from batchstate.races.report import FINDINGS, accepted_in, findings, identity

    arguments = _of_script(args)
    device, seed = args.device or "race", args.seed or 0
    if device.partition(":")[0] == "sim" and args.baseline is not None:
        raise ArgumentError("--baseline with sim", device, "accept findings of the race detector")
    accepted = frozenset() if args.baseline is None else accepted_in(args.baseline)
    if not args.script.is_file():
        problem = f"{args.script}: this script does not exist"
        raise ArgumentError(problem, str(args.script), "name a file of Python code")
    if device == "sim":
        return _compare(args.script, arguments, seed, args.json)
    watches: dict[str, Literal["lazy", "eager"]] = {"cuda": "lazy", "cuda:prompt": "eager"}
    with (
        (
            watch_cuda(on_race="collect", fences=watches[device])
            if device in watches
            else cuda_on_cpu(device, on_race="collect", seed=seed)
        ) as rt,
        _processes_started() as processes,
    ):
        error = _run(args.script, arguments)
    if isinstance(rt, CudaSimRuntime):
        write_json(args.json, {"format": _ORDERS, "script": str(args.script), "device": device, "error": error})
        print(f"batchstate: {args.script} on {device}: {error or 'it came to its end'}", file=sys.stderr)
        return 0 if error is None else 1
    new = [race for race in rt.races if identity(race) not in accepted]
    if error is None and not rt.accesses:
        error = "nothing was done on a device of cuda, so that nothing was checked"
    waits = [(name, *at.words(), count) for (name, at), count in rt.waited_at.most_common()]
    figures: dict[str, Any] = {
        "format": FINDINGS,
        "script": str(args.script),
        "findings": findings(rt.races, accepted),
        "new": len(new),
        "accesses": rt.accesses,
        "synchronised": dict(rt.synchronised),
        "waits": [
            {"operation": name, "line": line, "caller": caller, "count": count} for name, line, caller, count in waits
        ],
        "processes": len(processes),
        "error": error,
    }
    write_json(args.json, figures)
    for race in new:
        print(f"{race}\n")
    accepted_count, waited = len(rt.races) - len(new), sum(rt.synchronised.values())
    count = f"{len(new)} finding{'s' * (len(new) != 1)}{f', {accepted_count} accepted' * bool(accepted_count)}"
    checked = f"{rt.accesses} access{'es' * (rt.accesses != 1)} checked"
    hides = ", which can hide races:" * bool(waited)
    print(f"{count}; {checked}, {waited} wait{'s' * (waited != 1)} inside of torch{hides}")
    for name, line, caller, times in waits[:_MOST_WAITS]:
        called = f", called at {caller}" * (caller is not None)
        print(f"  {times:6} of {_CALLED.get(name, name)} at {line}{called}")
    if len(waits) > _MOST_WAITS:
        print(f"  and those of {len(waits) - _MOST_WAITS} more lines; --json FILE lists all")
    if processes:
        many = "process was" if len(processes) == 1 else "processes were"
        print(f"{len(processes)} {many} started that {'is' if len(processes) == 1 else 'are'} not watched")
    if error is not None:
        print(f"batchstate: {args.script}: {error}", file=sys.stderr)
        return 2
    return 1 if new else 0


def _compare(script: Path, arguments: list[str], seed: int, out: Path | None) -> int:
    """Runs a script in each order of the streams, in a process each: 0 where it prints the same in all, 1 where not."""
    from batchstate.races.sim import PORTFOLIO

    orders: list[dict[str, Any]] = []
    wanted: list[str] = []
    run = [sys.executable, "-m", "batchstate", "race", "run", "--seed", str(seed)]
    for name in PORTFOLIO:
        command = [*run, "--device", f"sim:{name}", str(script), "--", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        printed = [*done.stdout.splitlines(), *(["it fails: " + _last(done.stderr)] if done.returncode else [])]
        if name == "eager":
            wanted = printed
            if done.returncode:
                print(done.stderr, file=sys.stderr, end="")
                return 2
        difference = _difference(wanted, printed)
        orders.append({"device": f"sim:{name}", "exit": done.returncode, "difference": difference})
    wrong = [order for order in orders if order["difference"] is not None]
    write_json(out, {"format": _ORDERS, "script": str(script), "seed": seed, "orders": orders, "new": len(wrong)})
    for order in wrong:
        expected, got = order["difference"]
        print(f"{order['device']}: expected {expected!r}, got {got!r}")
    print(f"{len(wrong)} of {len(orders)} orders of the streams give another result")
    if not wrong:
        print("races may remain: `race run` without --device reports them; or try --seed, and other data in each step")
    return 1 if wrong else 0


def _last(text: str) -> str:
    return next(reversed(text.splitlines()), "")


def _difference(wanted: list[str], got: list[str]) -> tuple[str, str] | None:
    """The first lines that differ, of both; None if all are equal."""
    pairs = itertools.zip_longest(wanted, got, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _of_script(args: argparse.Namespace) -> list[str]:
    """The arguments of the script; this command's options among them are taken out, up to `--`."""
    words: list[str] = args.arguments
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="batchstate race run", add_help=False, allow_abbrev=False)
    _add_options(parser)
    options, rest = parser.parse_known_args(words[:at])
    for name, value in vars(options).items():
        if value is not None:
            setattr(args, name, value)
    return rest + words[at + 1 :]


def _run(script: Path, arguments: list[str]) -> str | None:
    """Runs a script as Python does. Returns why it did not come to its end, or None."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            _wait_for_threads()
    except SystemExit as end:
        return None if end.code in (None, 0) else f"it ended with {end.code!r}"
    except KeyboardInterrupt:  # as a server is ended: races found by then are reported
        return "it was interrupted"
    except Exception as error:
        traceback.print_exc()
        return f"it ended with {type(error).__name__}: {error}{_remedy(error)}"
    finally:
        sys.argv, sys.path[:] = argv, path
    return None


@contextlib.contextmanager
def _processes_started() -> Iterator[list[Any]]:
    """The processes that `subprocess` and `multiprocessing` start meanwhile, one entry each."""
    started: list[Any] = []

    def noted(start: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(start)
        def starts(self: Any, *args: Any, **kwargs: Any) -> None:
            started.append(type(self))
            start(self, *args, **kwargs)

        return starts

    with (
        patch.object(subprocess.Popen, "__init__", noted(subprocess.Popen.__init__)),
        patch.object(BaseProcess, "start", noted(BaseProcess.start)),
    ):
        yield started


def _remedy(error: Exception) -> str:
    """A remedy for a kernel that cannot run on this machine; else empty."""
    operator = re.match(r"Could not run '(\w+::\w+)\S*' with arguments from the 'CPU' backend", str(error))
    frames = [frame.f_globals.get("__name__") or "" for frame, _ in traceback.walk_tb(error.__traceback__)]
    if operator is not None and isinstance(error, NotImplementedError):
        cause, key = f"{operator[1]} has no kernel for the CPU", operator[1]
    elif re.search("libcuda|ldconfig|active driver", str(error)) and any(name.startswith("triton.") for name in frames):
        cause, key = "a kernel of Triton cannot run without its driver", "module.function_that_launches_it"
    else:
        return ""
    return (
        f'\nremedy: {cause}; run the code in `cuda_on_cpu(stands_for={{"{key}": function}})`, where the function does '
        "the same in torch, or is one that `declared_kernel(reads=..., writes=...)` has made"
    )


def _wait_for_threads() -> None:
    """Waits for the threads of a script, but for daemons, as Python does."""
    own = threading.current_thread()
    while alive := [thread for thread in threading.enumerate() if thread is not own and not thread.daemon]:
        for thread in alive:
            thread.join()
