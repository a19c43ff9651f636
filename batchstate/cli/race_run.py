"""`batchstate race run`: runs a script of plain torch code that says `cuda`, on a CPU or a GPU, and reports its races.

On the simulated device it reports the orders of the streams in which the script comes to another result.
"""

import argparse
import contextlib
import functools
import itertools
import json
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from batchstate.cli._options import add_json, new_file, write_json
from batchstate.errors import ArgumentError, one_of
from batchstate.races.tracing.clocks import HOST

NAME = "race run"
SUMMARY = "run a script that says cuda on this CPU or GPU, and report every pair of accesses that nothing orders"

_ORDERS = "batchstate race orders 1"
"""Format of the JSON of a run on the simulated device."""

_MOST_WAITS = 10
"""Lines that make the host wait, in the output; the JSON has all, and so has an output with too many waits."""

_CALLED = {"_local_scalar_dense": "item", "copy_": "a copy that blocks", "_to_copy": "to"}
"""Operation of torch that makes the host wait -> the call in the code."""

_WATCHES: dict[str, Literal["lazy", "eager"]] = {"cuda": "lazy", "cuda:prompt": "eager"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "batchstate race run [OPTIONS] SCRIPT [ARGS ...]"
    add_json(parser)
    parser.add_argument("--report", metavar="FILE", type=new_file, help="also draw the findings in FILE, a page (HTML)")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        default="race",
        help="race (default) or race:prompt, where events are complete as soon as they are asked; sim:NAME, one order "
        "of the streams; sim: the script runs once in each order, and its output is compared; or cuda or "
        "cuda:prompt: it runs on the GPU of this machine",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the orders of sim that are drawn")
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=Path,
        help="findings that are accepted: a file that --json has written; only others count",
    )
    parser.add_argument(
        "--declare",
        metavar="FILE",
        type=Path,
        help="Python code with a function declare(cuda): whose the rows of tensors are, and when steps begin",
    )
    parser.add_argument(
        "--max-waits", metavar="N", type=int, help="exit with 1 if calls of torch make the host wait more often"
    )
    parser.add_argument(
        "--note-waits", action="store_true", help="also say which waits for streams are wider than they need to be"
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python script; it imports nothing of batchstate")
    arguments = parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script: all that is behind it"
    )
    arguments.required = False  # or argparse lists it as missing together with SCRIPT


def run(args: argparse.Namespace) -> int:
    """Runs the script: 0 without new findings, 1 with some or too many waits, 2 if it could not be run to its end."""
    from batchstate.races.cuda import CudaSimRuntime, cuda_on_cpu, watch_cuda
    from batchstate.races.devices import interpret_kernels
    from batchstate.races.render import run_html
    from batchstate.races.report import FINDINGS, accepted_in, findings, identity

    device = args.device
    _check_device(device)
    if device.partition(":")[0] == "sim":
        for option in ("baseline", "report", "declare", "max_waits", "note_waits"):
            if getattr(args, option) not in (None, False):
                problem = f"--{option.replace('_', '-')} with --device {device}"
                raise ArgumentError(problem, device, "leave one out: these are of the race detector")
    accepted = frozenset() if args.baseline is None else accepted_in(args.baseline)
    if not args.script.is_file():
        problem = f"{args.script}: this script does not exist"
        raise ArgumentError(problem, str(args.script), "name a file of Python code")
    declare = None if args.declare is None else _declaration(args.declare)
    if device not in _WATCHES:
        interpret_kernels()
    if device == "sim":
        return _compare(args.script, args.arguments, args.seed, args.json)
    settings: dict[str, Any] = {"on_race": "collect", "note_waits": args.note_waits}
    with (
        (
            watch_cuda(fences=_WATCHES[device], **settings)
            if device in _WATCHES
            else cuda_on_cpu(device, seed=args.seed, **settings)
        ) as rt,
        _processes_started() as processes,
    ):
        if declare is not None:
            declare(rt)
        error = _run(args.script, args.arguments)
    if isinstance(rt, CudaSimRuntime):
        write_json(args.json, {"format": _ORDERS, "script": str(args.script), "device": device, "error": error})
        _say(f"batchstate: {args.script} on {device}: {error or 'it came to its end'}")
        return 0 if error is None else 1
    new = [race for race in rt.races if identity(race) not in accepted]
    if error is None and not rt.accesses:
        error = "nothing was done on a device of cuda, so that nothing was checked"
    waits = [(name, *at.words(), count) for (name, at), count in rt.waited_at.most_common()]
    wide = rt.wide_waits() if args.note_waits else ()
    waited = sum(rt.synchronised.values())
    too_many = args.max_waits is not None and waited > args.max_waits
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
        "wide_waits": [str(wait) for wait in wide],
        "processes": len(processes),
        "error": error,
    }
    write_json(args.json, figures)
    accepted_count = len(rt.races) - len(new)
    count = f"{len(new)} finding{'s' * (len(new) != 1)}{f', {accepted_count} accepted' * bool(accepted_count)}"
    checked = f"{rt.accesses} access{'es' * (rt.accesses != 1)} checked"
    hides = ", which can hide races:" * bool(waited)
    notes = [f"{count}; {checked}, {waited} wait{'s' * (waited != 1)} inside of torch{hides}"]
    shown = waits if too_many else waits[:_MOST_WAITS]
    for name, line, caller, times in shown:
        called = f", called at {caller}" * (caller is not None)
        notes.append(f"  {times:6} of {_CALLED.get(name, name)} at {line}{called}")
    if len(waits) > len(shown):
        notes.append(f"  and those of {len(waits) - len(shown)} more lines; --json FILE lists all")
    notes += [line for wait in wide for line in str(wait).split("\n")]
    for at, times in rt.polled_at.most_common():
        notes.append(
            f"{times} poll{'s' * (times != 1)} until the fence gave in, at {at.words()[0]}: nothing waits there"
        )
    for first, second in rt.aliased_streams:
        notes.append(f"one stream of torch, which hands out 32 in turn: {first}, and {second}")
    if processes:
        many = "process was" if len(processes) == 1 else "processes were"
        notes.append(f"{len(processes)} {many} started that {'is' if len(processes) == 1 else 'are'} not watched")
    if too_many:
        notes.append(f"{waited} waits inside of torch, where --max-waits allows {args.max_waits}")
    if args.report is not None:
        args.report.write_text(run_html(str(args.script), new, notes), encoding="utf-8")
    _say(*(f"{race}\n" for race in new), *notes)
    if error is not None:
        _say(f"batchstate: {args.script}: {error}")
        return 2
    return 1 if new or too_many else 0


def _declaration(path: Path) -> Callable[[Any], object]:
    """The function `declare` of a file.

    Raises:
        ArgumentError: it has none.
        OSError: it cannot be read.
    """
    path.read_bytes()
    declare = runpy.run_path(str(path)).get("declare")
    if not callable(declare):
        raise ArgumentError(f"--declare {path}: it has no function declare(cuda)", str(path), "define one")
    function: Callable[[Any], object] = declare
    return function


def _say(*lines: str) -> None:
    """Prints to stderr: stdout is the script's."""
    for line in lines:
        print(line, file=sys.stderr)


def _check_device(device: str) -> None:
    """Refuses a device in the words of the command, before torch is asked.

    Raises:
        ArgumentError: there is no such device, or none here.
    """
    import torch

    from batchstate.races.sim import LATE, PORTFOLIO

    names = ["race", "race:prompt", "sim", *(f"sim:{name}" for name in PORTFOLIO), *_WATCHES]
    if device not in names and not device.startswith(f"sim:{LATE}"):
        raise ArgumentError(f"--device {device}: there is none of this name", device, one_of(names, device))
    if device in _WATCHES and not torch.cuda.is_available():
        problem = f"--device {device}: torch {torch.__version__} finds no GPU here"
        raise ArgumentError(problem, device, "leave --device out: the default needs none")


def _compare(script: Path, arguments: list[str], seed: int, out: Path | None) -> int:
    """Runs a script in each order of the streams, in a process each: 1 if one prints something else or it has races.

    The race detector comes first: each stream with the first access of a race gets an order in which that is the last.
    """
    from batchstate.races.sim import LATE, PORTFOLIO

    orders: list[dict[str, Any]] = []
    wanted: list[str] = []
    swaps = [f"{LATE}{stream}" for stream in _streams_of_races(script, arguments)]
    for name in (*PORTFOLIO, *swaps):
        done = _in_a_process("--seed", str(seed), "--device", f"sim:{name}", str(script), *arguments)
        printed = [*done.stdout.splitlines(), *(["it fails: " + _last(done.stderr)] if done.returncode else [])]
        if name == "eager":
            wanted = printed
            if done.returncode:
                print(done.stderr, file=sys.stderr, end="")
                return 2
        difference = _difference(wanted, printed)
        orders.append({"device": f"sim:{name}", "exit": done.returncode, "difference": difference})
    wrong = [order for order in orders if order["difference"] is not None]
    figures = {"script": str(script), "seed": seed, "orders": orders, "swaps": len(swaps), "new": len(wrong)}
    write_json(out, {"format": _ORDERS, **figures})
    for order in wrong:
        expected, got = order["difference"]
        _say(f"{order['device']}: expected {expected!r}, got {got!r}")
    many = f", {len(swaps)} of them for the races that the detector reports," * bool(swaps)
    _say(f"{len(wrong)} of {len(orders)} orders of the streams{many} give another result")
    if not wrong and swaps:
        _say(
            "the script has races all the same: `race run` without --device reports them; no value it prints shows them"
        )
    return 1 if wrong or swaps else 0


def _in_a_process(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "batchstate", "race", "run", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _streams_of_races(script: Path, arguments: list[str]) -> list[str]:
    """The streams that have the first access of a race, without the host, in the order of the reports."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings.json"
        _in_a_process("--json", str(path), str(script), *arguments)
        races = json.loads(path.read_text(encoding="utf-8"))["findings"] if path.exists() else []
    return list(dict.fromkeys(race["first"]["lane"] for race in races if race["first"]["lane"] != HOST))


def _last(text: str) -> str:
    return next(reversed(text.splitlines()), "")


def _difference(wanted: list[str], got: list[str]) -> tuple[str, str] | None:
    """The first lines that differ, of both; None if all are equal."""
    pairs = itertools.zip_longest(wanted, got, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


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
    except BrokenPipeError:
        return "its output was closed"
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
