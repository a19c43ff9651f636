"""`python -m benchmarks.adoption.sweep ENGINE...`: engines with a statement less, and who reports it.

A deletion counts if a call without it leaves another state behind. Those after which the engine raises before that are
counted apart: nothing has to report them. A call is reported by a violation alone; what the engine raises is none.
"""

import argparse
import importlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchstate.levels import checks
from batchstate.runtime import open_runtime
from benchmarks.adoption import deletions
from benchmarks.adoption.deletions import accused, judge
from benchmarks.machine import machine
from benchmarks.peers.installed import PeerError

ENGINES = ("tgi", "lmdeploy", "vllm_mrv2", "lmdeploy_pools", "exllamav3", "tokasaurus")


def said(report: str | None) -> str | None:
    """The code and the problem of a report, without whose row it is."""
    return None if report is None else report.partition(":")[2].partition(": request")[0].strip()


def sweep_of(engine: Any, *, seeds: int) -> dict[str, Any]:
    """The deletions that change the state of an engine, and which way of its declarations reports each."""
    deletions.MOST_SECONDS = 1
    with checks("full"):
        rows = judge(engine, seeds=seeds)
    silent = [row for row in rows if row["silent"]]
    for row in silent:
        row |= {way: row[way] if (row[way] or "").startswith("Violation") else None for way in engine.DECLARED}
    kinds = [getattr(engine, "apart", lambda _: None)(row) for row in silent]
    counted = [row for row, kind in zip(silent, kinds, strict=True) if kind is None]
    return {
        "deletions": len(rows),
        "crash": sum(row["real"] and not row["silent"] for row in rows),
        "apart": [
            {"statement": f"{row['class']}.{row['method']}: {row['text']}", "kind": kind}
            | {way: said(row[way]) for way in engine.DECLARED}
            for row, kind in zip(silent, kinds, strict=True)
            if kind is not None
        ],
        "change the state": len(counted),
        "found": {way: sum(row[way] is not None for row in counted) for way in engine.DECLARED},
        "list": [
            {"statement": f"{row['class']}.{row['method']}: {row['text']}"}
            | {way: said(row[way]) for way in engine.DECLARED}
            for row in counted
        ],
    }


def sweep(name: str, seeds: int) -> dict[str, Any]:
    """Sweeps an engine and prints what its declarations miss; one that is not there is skipped with a line."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    try:
        engine = importlib.import_module(f"benchmarks.adoption.{name}")
    except PeerError as error:
        print(f"{name}: skipped, {error}")
        return {}
    start = time.process_time()
    swept = sweep_of(engine, seeds=seeds)
    print(f"{name}: {swept['change the state']} of {swept['deletions']} deletions change the state,", end=" ")
    print(f"{swept['crash']} crash; reported {swept['found']}; {time.process_time() - start:.0f} s")
    for row in swept["list"]:
        missed = [way for way in engine.DECLARED if row[way] is None]
        if missed:
            print(f"  missed by {', '.join(missed)}: {row['statement']}")
    for row in swept["apart"]:
        print(f"  apart, {row['kind']}{' (reported)' * bool(row['full'])}: {row['statement']}")
    for way, options in getattr(engine, "KNOWN", {}).items():
        with checks("full"):
            swept.setdefault("as released", {})[way] = fault = said(accused(engine, seeds, options))
        print(f"  as released, {way}: {fault}")
    return {name: swept}


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweeps what is asked for; each engine in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption.sweep", description=__doc__)
    parser.add_argument("engines", nargs="*", default=ENGINES, help=", ".join(ENGINES))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    report: dict[str, Any] = {"machine": machine(open_runtime("cpu")), "engines": {}}
    for name in options.engines:
        if len(options.engines) == 1:
            report["engines"].update(sweep(name, options.seeds))
            continue
        with tempfile.TemporaryDirectory() as folder:  # stand-ins of one engine are in the way of another
            part = Path(folder, "part.json")
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.adoption.sweep", name, "--json", str(part)]
            subprocess.run([*command, "--seeds", str(options.seeds)], check=True)
            report["engines"].update(json.loads(part.read_text())["engines"])
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
