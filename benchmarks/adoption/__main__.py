"""`python -m benchmarks.adoption`: the checks on released engines, watched, fuzzed, and with a statement less."""

import argparse
import contextlib
import importlib
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchstate.levels import checks
from batchstate.runtime import open_runtime
from batchstate.testing import fuzz_twins
from benchmarks.adoption.deletions import judge
from benchmarks.adoption.prefix_cache import compare
from benchmarks.machine import machine
from benchmarks.peers.installed import version_of

ENGINES = ("sglang", "vllm")


def found_of(engine: Any, *, seeds: int, examples: int, fuzz_deletions: bool) -> dict[str, Any]:
    """Findings of watch and fuzzer in an engine as it is, and without a statement."""
    clean = {}
    with checks("full"):
        for way, options in engine.DECLARED.items():
            with engine.declare(**options) as watched:
                for seed in range(seeds):
                    engine.drive(seed)
            clean[way] = {"calls": watched.counters.calls, "violations": watched.counters.violations.total()}
        with engine.declare(**list(engine.DECLARED.values())[-1]) as watched:  # the one that says most
            spec = engine.spec(watched)
        fuzzed = fuzz_twins(spec, examples=examples, shrink=False)

        def fuzz() -> None:
            result = fuzz_twins(spec, examples=max(examples // 3, 1), shrink=False)
            if result.failure is not None:
                raise LookupError(result.code)

        rows = judge(engine, seeds=seeds, fuzz=fuzz if fuzz_deletions else None)
    real = [row for row in rows if row["real"]]
    findings = {
        way: {
            "found": sum(row[way] is not None for row in real),
            "missed": [f"{row['class']}.{row['method']}: {row['text']}" for row in real if row[way] is None],
        }
        for way in (*engine.DECLARED, *(["fuzz"] if fuzz_deletions else []))
    }
    return {
        "clean": clean,
        "fuzzed": {"examples": fuzzed.examples, "failure": fuzzed.failure, "unproved": list(fuzzed.unproved)},
        "deletions": len(rows),
        "real": len(real),
        "found": findings,
    }


WAYS: dict[str, tuple[str, dict[str, Any]] | None] = {"bare": None, "bare again": None, "off": ("off", {})}
"""Before those of an engine."""


STEPS, WARM_UP = 100, 150
"""Steps of a turn, so that a sample in a hundred calls is taken in each, and those before it: where a hook was just put
or taken away, the interpreter specialises its code anew only after some fifty of them."""


def cost_of(engine: Any, *, num_rows: int, rounds: int) -> dict[str, Any]:
    """A round of watched operations in each way, the ways taking turns: CPU time to the bare one, and Python calls.

    For each step of a turn the least time in any turn counts. Other processes' use of a core's caches,
    and pauses of the garbage collector, only ever add. `BY_HAND` of an engine has checks without this library.
    """
    step = engine.step_of(num_rows)
    ways = WAYS | engine.WAYS | getattr(engine, "BY_HAND", {})
    seconds = {way: [float("inf")] * STEPS for way in ways}
    calls: dict[str, int] = {}
    watches = contextlib.ExitStack()
    for _ in range(rounds):
        for way, options in ways.items():
            with watches:
                if callable(options):
                    watches.enter_context(options())
                elif options is not None:
                    watches.enter_context(checks(options[0]))
                    watches.enter_context(engine.declare(**options[1]))
                for _ in range(WARM_UP):
                    step()
                least = seconds[way]
                for at in range(STEPS):
                    start = time.process_time()
                    step()
                    least[at] = min(least[at], time.process_time() - start)
                if way not in calls:  # behind the steps, so that samples are taken in the same ones in each turn
                    calls[way] = _python_calls(step)
    bare = sum(seconds["bare"])
    return {
        "rows": num_rows,
        "ratio": {way: round(sum(taken) / bare, 3) for way, taken in seconds.items()},
        "limits": engine.COST_LIMITS,
        "python_calls": calls,
        "bare_us": round(bare / STEPS * 1e6),
    }


def _python_calls(step: Any) -> int:
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 1 if an engine as released was accused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption", description=__doc__)
    parser.add_argument("engines", nargs="*", default=ENGINES, help="sglang, vllm (default: both)")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-fuzz", action="store_true", help="do not fuzz the engines without a statement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {"machine": machine(open_runtime("cpu")), "engines": {}}
    accused = 0
    for name in options.engines:
        engine = importlib.import_module(f"benchmarks.adoption.{name}")
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stderr(io.StringIO()):
            findings = found_of(
                engine, seeds=options.seeds, examples=options.examples, fuzz_deletions=not options.no_fuzz
            )
            findings["cost"] = cost_of(engine, num_rows=engine.COST_ROWS, rounds=options.rounds)
        findings["version"] = version_of(name)
        report["engines"][name] = findings
        accused += sum(run["violations"] for run in findings["clean"].values())
        accused += findings["fuzzed"]["failure"] is not None
        print(json.dumps({name: findings}, indent=1))
    if "vllm" in options.engines:
        report["prefix_cache"] = [compare(num_pages, rounds=20 * options.rounds) for num_pages in (1, 16, 64, 256)]
        print(json.dumps({"prefix_cache": report["prefix_cache"]}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(accused > 0)


if __name__ == "__main__":
    raise SystemExit(main())
