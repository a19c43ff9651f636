"""Plants each bug, records the engine until something is found, replays the file, shrinks it, and writes a test."""

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from batchstate.replay import drive, history_of, load, record_operations, recorded, replay
from batchstate.replay.written import test_of_history
from batchstate.testing.exact import Arrival, EngineUnderTest, History, Wave, reduced
from examples import console
from examples.exact.__main__ import engine_named
from examples.exact.bugs import Bug
from examples.exact.stand_ins import MissingPeerError
from examples.replay.bugs import twenty
from examples.replay.traffic import TRAFFIC
from examples.traffic import fitted_workload, read_trace

REQUESTS = 5_000
TRY_SECONDS = 5.0
"""That a smaller log is served for, when it is tried."""
STEP_SECONDS = 0.065
"""Of a step of the traffic engine, to turn arrivals into steps."""
SETTINGS: dict[str, dict[str, Any]] = {
    "example": {"kv_tokens": 140, "max_running": 8, "step_tokens": 32, "page_size": 4, "prebuilt": True},
    "transformers": {"kv_tokens": 256, "max_running": 8, "step_tokens": 32, "page_size": 4, "sharing": True},
    "mini_sglang_mended": {"kv_tokens": 400, "max_running": 8, "step_tokens": 32, "page_size": 4},
    "traffic": {"max_running": 256, "step_tokens": 2048, "page_size": 16, "num_pages": 1_200, "room": 16_384},
}


def engine_of(bug: Bug) -> tuple[EngineUnderTest, str]:
    """The engine of a bug, and how a test imports it."""
    if bug.engine == "traffic":
        return TRAFFIC, "from examples.replay.traffic import TRAFFIC as ENGINE"
    source = f"from examples.exact.__main__ import engine_named\n\nENGINE = engine_named({bug.engine!r})"
    return engine_named(bug.engine), source


def requests_of(engine: EngineUnderTest, requests: int, trace: Path | None, *, seed: int = 0) -> History:
    """An hour of a trace for the traffic engine; for others requests with prefixes in common, some of them aborted."""
    rng = np.random.default_rng(seed)
    settings = {name: values[0] for name, values in engine.choices.items()} | SETTINGS[engine.name]
    arrivals: list[tuple[int, Arrival]] = []
    if engine is TRAFFIC:
        workload = fitted_workload(requests, seed) if trace is None else read_trace(trace)
        rows = zip(
            workload.arrival, workload.context_tokens, workload.generated_tokens, rng.random(len(workload)), strict=True
        )
        for arrival, prompt, answer, luck in rows:
            abort = 1 + int(luck * 1000) if luck < 0.04 else None
            zeros = ((0,), int(prompt))
            arrivals.append((int(arrival / STEP_SECONDS), Arrival((zeros,), int(answer), abort=abort)))
    at = 0
    for _ in range(requests if engine is not TRAFFIC else 0):
        at += int(rng.integers(0, 12 if engine.name == "example" else 5))
        shared = [(int(rng.integers(12)), int(rng.integers(least, 24))) for least in (1, 0)]
        own = (12 + len(arrivals), int(rng.integers(0, 9)))
        abort = int(rng.integers(1, 12)) if engine.aborts and rng.random() < 0.05 else None
        pieces = tuple(piece for piece in (*shared, own) if piece[1])
        arrivals.append((at, Arrival(pieces, int(rng.integers(1, 25)), float(engine.temperatures[0]), abort)))
    groups = [
        (at, tuple(it for _, it in group)) for at, group in itertools.groupby(arrivals, lambda arrived: arrived[0])
    ]
    ends = [at for at, _ in groups[1:]] + [groups[-1][0]]
    return History(settings, tuple(Wave(group, end - at) for (at, group), end in zip(groups, ends, strict=True)))


def runs(source: str) -> bool:
    """Whether a written test passes."""
    space: dict[str, Any] = {}
    exec(compile(source, "test_written.py", "exec"), space)
    test = next(value for name, value in space.items() if name.startswith("test_"))
    try:
        test()
    except AssertionError:
        return False
    return True


def trial(bug: Bug, requests: int, trace: Path | None, seconds: float, folder: Path) -> dict[str, Any]:
    """One bug, from its record to its test."""
    engine, imports = engine_of(bug)
    history = requests_of(engine, requests, trace)
    row: dict[str, Any] = {"bug": bug.name, "engine": engine.name}
    begin = time.perf_counter()
    with bug.planted(), record_operations(folder, ring_bytes=256 << 20) as recorder:
        finding = drive(recorded(engine), history)
        if finding is None:
            return row | {"found": None}
        if not recorder.files:
            recorder.dump("finding", finding)
    path = recorder.files[0]
    row |= {"found": str(finding), "seconds": round(time.perf_counter() - begin, 1), "bytes": path.stat().st_size}
    recording = load(path)
    own = history_of(recording, engine)
    row["requests"] = own.requests
    with bug.planted():
        again = drive(engine, own)
        row["again"] = finding.repeats(again)
        if (
            recording.finding is not None
            and engine.name in ("traffic", "example")
            and finding.code.isupper()
            and "_" in finding.code
            and finding.code != "WRONG_READ"
        ):
            calls = replay(recording, level="cheap")
            row["calls"] = calls.repeated

        hasty = attrs.evolve(engine, patience=300)

        def fails(other: History) -> bool:
            end = time.perf_counter() + TRY_SECONDS
            again = drive(hasty, other, stop=lambda: time.perf_counter() > end)
            return again is not None and again.code == finding.code

        begin = time.perf_counter()
        small = reduced(engine, own, fails, seconds=seconds)
        row |= {"shrunk": small.smallest.requests, "tries": small.tries}
        row["shrink_seconds"] = round(time.perf_counter() - begin, 1)
        final = drive(engine, small.smallest)
        source = test_of_history(engine, small.smallest, final or finding, imports)
        (folder / f"test_{bug.name}.py").write_text(source, encoding="utf-8")
        row |= {"lines": len(source.splitlines()), "fails_with": not runs(source)}
    row["passes_without"] = runs(source)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Prints a row of each bug; 0 if each was replayed, shrunk and tested."""
    parser = argparse.ArgumentParser(prog="python -m examples.replay", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs, or how they begin; default: all")
    parser.add_argument(
        "--requests", type=console.whole(1), default=REQUESTS, metavar="N", help="of an engine, at most"
    )
    parser.add_argument("--trace", type=Path, metavar="CSV", help="an hour for the traffic engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="to shrink each for")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep files and tests here")
    console.add_json(parser)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.freeze()
    rows = []
    with contextlib.ExitStack() as stack:
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for bug in twenty():
            if args.names and not bug.name.startswith(tuple(args.names)):
                continue
            try:
                rows.append(trial(bug, args.requests, args.trace, args.seconds, out / bug.name))
            except MissingPeerError as error:
                print(f"{bug.name}: skipped: {error}")
                continue
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    sizes = [row["shrunk"] for row in rows if "shrunk" in row]
    good = [row for row in rows if row.get("again") and row.get("fails_with") and row.get("passes_without")]
    summary = {"bugs": len(rows), "good": len(good), "median": statistics.median(sizes) if sizes else None}
    print(summary)
    console.write_json(args.json, {**summary, "rows": rows})
    return int(len(good) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
