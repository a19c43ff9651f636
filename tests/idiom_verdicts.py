"""`python -m tests.idiom_verdicts`: idioms of plain torch on a GPU, watched, under torch's sanitizer, and plain.

Each tool has a process of its own. One that ends loses the program that it was at, and the next begins behind it.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.cuda_idioms import IDIOMS
from tests.race_cases import CASES, sanitizer
from tests.race_cases.plain import PlainCuda
from tests.race_cases.tools import Says, Verdict
from tests.race_cases.verdicts import Column, Made, Table, save

IDIOM_NAMES = [f"{name} ({side})" for name in IDIOMS for side in ("racy", "safe")]

TOOLS = {
    "watched": [*IDIOM_NAMES, *CASES],
    "sanitizer": IDIOM_NAMES,
    "plain": IDIOM_NAMES,
}
"""Who runs what: `watch_cuda` also runs the pairs of race cases, said in plain torch."""

UNSEEN = {"landing written through numpy (racy)"}
"""Races that leave no trace on a GPU: what numpy wrote is overwritten when the copy lands."""


def kind_of(name: str) -> str | None:
    """The kind of race that a program has, or None."""
    racy = name.endswith("(racy)")
    if name in CASES:
        return str(CASES[name].kind) if racy and name not in UNSEEN else None
    kind = IDIOMS[name.partition(" ")[0]][0]
    return str(kind) if racy and kind is not None else None


def right(name: str, verdict: Verdict) -> bool:
    """Whether a verdict says what is so."""
    return (verdict.says is Says.RACE) is (kind_of(name) is not None) and verdict.says in (Says.RACE, Says.NONE)


def run(name: str, rt: Any = None) -> Any:
    """Runs one program; a pair of the race cases needs the window that is open."""
    if name in CASES:
        return CASES[name].run(PlainCuda(rt))
    return IDIOMS[name.partition(" ")[0]][1](name.endswith("(racy)"))


def watched(name: str, window: Any) -> Verdict:
    """What `watch_cuda` says.

    Args:
        name: of the program.
        window: makes one.
    """
    with window() as rt:
        run(name, rt)
    kinds = [str(race.kind) for race in rt.races]
    if not kinds:
        return Verdict(Says.NONE)
    wanted = kind_of(name)
    return Verdict(Says.RACE if wanted is None or set(kinds) == {wanted} else Says.ANOTHER, ", ".join(kinds))


def verdict_on(tool: str, name: str) -> Verdict:
    """What a tool says, in this process."""
    try:
        if tool == "watched":
            from batchstate.races.cuda import watch_cuda

            try:
                return watched(name, lambda: watch_cuda(on_race="collect"))
            finally:
                torch.cuda.synchronize()
        errors: Any = ()
        if tool == "sanitizer":
            from torch.cuda._sanitizer import CUDASanitizerErrors as errors  # noqa: N813
        program: Any = SimpleNamespace(run=lambda rt: run(name))
        device: Any = torch.cuda
        return sanitizer.verdict_on(program, device, errors)
    except Exception as error:
        return Verdict(Says.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])


def verdicts(tool: str, names: Sequence[str]) -> dict[str, Verdict]:
    """What a tool says of each program, in processes of its own."""

    def child(waiting: Sequence[str]) -> Iterator[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.idiom_verdicts", "--child", tool],
            input=json.dumps(list(waiting)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if tool == "sanitizer" else None,  # it prints what it raises
            text=True,
            check=False,
            env={**os.environ, **({sanitizer.SWITCH: "1"} if tool == "sanitizer" else {})},
        )
        yield from done.stdout.splitlines()

    return sanitizer.verdicts(names, child)


def table(tools: Sequence[str] = tuple(TOOLS)) -> Table:
    """What the tools say, on this machine."""
    columns = {tool: Column(Made.here(accelerator=True), verdicts(tool, TOOLS[tool])) for tool in tools}
    return Table(columns)


def lines(found: Table) -> Iterator[str]:
    """The table in words: idioms first, then what is not right of the pairs, then sums."""
    for name in IDIOM_NAMES:
        said = [
            f"{tool}: {column.verdicts[name].text(kind_of(name) is not None)}" for tool, column in found.columns.items()
        ]
        yield f"{name:58} {'; '.join(said)}"
    for tool, column in found.columns.items():
        for title, names in (("idioms", IDIOM_NAMES), ("pairs in plain torch", list(CASES))):
            judged = {name: column.verdicts[name] for name in names if name in column.verdicts}
            wrong = [name for name, verdict in judged.items() if not right(name, verdict)]
            if judged and tool != "plain":
                yield f"{tool}: right about {len(judged) - len(wrong)} of {len(judged)} {title}"
            if tool == "watched" or title != "idioms":
                yield from (f"  wrong: {name}: {judged[name].says} {judged[name].detail}" for name in wrong)


def main() -> int:
    """Prints the table; 0 if what `watch_cuda` says is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.idiom_verdicts", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the verdicts in FILE")
    parser.add_argument("--tool", metavar="NAME", action="append", choices=list(TOOLS), help="run only this one")
    parser.add_argument("--child", metavar="NAME", choices=list(TOOLS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        faulthandler.enable()
        for name in json.load(sys.stdin):
            verdict = verdict_on(args.child, name)
            print(json.dumps({"case": name, "says": verdict.says, "detail": verdict.detail}), flush=True)
        return 0
    found = table(args.tool or tuple(TOOLS))
    for line in lines(found):
        print(line)
    if args.json is not None:
        save(found, args.json)
    column = found.columns.get("watched")
    return 0 if column is None or all(right(*one) for one in column.verdicts.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
