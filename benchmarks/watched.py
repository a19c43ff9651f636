"""`python -m benchmarks.watched`: what the race detector and the simulated device cost, on the engine of `examples`.

Each run is a process of its own, and the ways take turns, so that their memory can be told apart and a busy machine is
unfair to none of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import attrs

from batchstate.runtime import open_runtime
from benchmarks.machine import machine
from examples.console import Row, Section, add_json, show, whole, write_json

WAYS = ("cpu", "race", "sim:lazy", "sim:random", "sim:pct")
"""Devices that the engine runs on; the first is the plain one."""


@final
@attrs.frozen
class Run:
    """One run of the engine.

    Attributes:
        seconds: of the serving, checks included; without starting Python and without the comparison behind it.
        megabytes: the most memory that the process had.
        steps, tokens: what it did.
    """

    seconds: float
    megabytes: float
    steps: int
    tokens: int


def run_engine(device: str, requests: int, *options: str) -> Run:
    """Serves requests on a device, at checks `cheap`, in a process of its own; `options` are more of the engine's.

    Raises:
        subprocess.CalledProcessError: a token is wrong, or something was found broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        command = [sys.executable, "-m", "examples.engine", "--device", device, "--requests", str(requests), *options]
        with subprocess.Popen(
            [*command, "--checks", "cheap", "--json", str(figures)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            errors = b"" if process.stderr is None else process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # it was awaited here, for what it used
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, stderr=errors.decode())
        report = json.loads(figures.read_text())
    return Run(report["seconds"], usage.ru_maxrss / 1024, report["steps"], report["tokens"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all ways in turns, prints medians and ratios, and returns 0; 1 where a run was not clean."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--requests", metavar="N", type=whole(1), default=60, help="default: %(default)s")
    parser.add_argument("--rounds", metavar="N", type=whole(1), default=5, help="default: %(default)s")
    add_json(parser)
    args = parser.parse_args(argv)
    sizes = (args.requests, 3 * args.requests)
    runs: dict[tuple[int, str], list[Run]] = {(size, way): [] for size in sizes for way in WAYS}
    try:
        for _ in range(args.rounds):
            for size, way in runs:
                runs[size, way].append(run_engine(way, size))
    except subprocess.CalledProcessError as error:
        print(f"benchmarks.watched: {' '.join(error.cmd)}\n{error.stderr}", file=sys.stderr)
        return 1
    facts = machine(open_runtime("cpu"))
    sections = [
        Section(f"{size} requests", [_row(runs[size, way], runs[size, "cpu"], way) for way in WAYS]) for size in sizes
    ]
    show(f"the example engine, watched: {facts['cpu']}, {facts['date']}", sections)
    write_json(args.json, {"machine": facts, "rows": [_figures(size, way, runs) for size, way in runs]})
    return 0


def _median(runs: Sequence[Run], name: str) -> float:
    return float(statistics.median(getattr(run, name) for run in runs))


def _row(runs: Sequence[Run], plain: Sequence[Run], way: str) -> Row:
    ratios = [run.seconds / other.seconds for run, other in zip(runs, plain, strict=True)]
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    memory = f"{_median(runs, 'megabytes') - _median(plain, 'megabytes'):+,.0f} MB"
    return Row(
        way, f"{statistics.median(ratios):.1f} times", f"plain ({spread}); {_median(runs, 'seconds'):.2f} s, {memory}"
    )


def _figures(size: int, way: str, runs: dict[tuple[int, str], list[Run]]) -> dict[str, Any]:
    ratios = [run.seconds / other.seconds for run, other in zip(runs[size, way], runs[size, "cpu"], strict=True)]
    return {
        "requests": size,
        "device": way,
        "seconds": _median(runs[size, way], "seconds"),
        "ratio": statistics.median(ratios),
        "megabytes": _median(runs[size, way], "megabytes"),
        "steps": runs[size, way][0].steps,
        "tokens": runs[size, way][0].tokens,
    }


if __name__ == "__main__":
    sys.exit(main())
