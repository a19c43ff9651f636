"""The benchmarks, as `python -m benchmarks` measures them, with the rows that it writes."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.gpu.runner import LAST_WORDS, ROOT

LEFT_OUT = (
    "scaling",
    "transfers",
    "direct against staged",
    "the real hour",
    "growth",
    "256 of",
    "16 of",
    "128 of",
    "2,048 of",
    "random sizes",
    "token allocator",
    "ReqToTokenPool",
    "BlockPool",
    "ScheduleBatch",
    "continuous batching",
)
"""Beginnings of the names of what is not measured here: it takes long, or the host alone does it."""
END = 5.0
"""Seconds before the stage's own end at which the benchmarks are ended."""


def run(setting: Setting, notes: Notes) -> None:
    """Runs them on the device. A ratio that misses what is asked for is noted; that they run and agree is demanded."""
    command = [sys.executable, "-m", "benchmarks", "--device", setting.device, *(["--quick"] if setting.quick else [])]
    end = time.monotonic() + setting.seconds - END
    names = _ended([*command, "--list"], end).stdout.splitlines()
    chosen = [name for name in names if not name.startswith(LEFT_OUT)]
    notes.figures["left out"] = [name for name in names if name not in chosen]
    notes.require(bool(chosen), "the benchmarks name nothing to measure")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        only = [word for name in chosen for word in ("--only", name)]
        try:
            done = _ended([*command, *only, "--json", str(out)], end)
        except subprocess.TimeoutExpired:
            notes.require(False, "the benchmarks were not done in time; the rows are what they had measured")
        else:
            notes.require_equal("exit code of the benchmarks", done.returncode, 0)
            if done.returncode:
                notes.figures["said"] = done.stderr[-LAST_WORDS:]
        notes.require(out.exists(), "nothing was written")
        if out.exists():
            _rows(notes, json.loads(out.read_text(encoding="utf-8")))


def _ended(command: list[str], end: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=max(end - time.monotonic(), 1),
    )


def _rows(notes: Notes, report: dict[str, Any]) -> None:
    rows = report.get("rows", [])
    notes.require(bool(rows), "there is no row")
    notes.figures |= {"quick": report.get("quick"), "rows": rows, "counts": report.get("counts", [])}
    broken = [f"{count['work']}: {count['counted']}" for count in report.get("counts", []) if count["met"] is False]
    notes.require(not broken, f"counts beyond what they may be: {', '.join(broken)}")
    notes.figures["missed"] = [f"{row['work']}: {row['ratio']:.2f}" for row in rows if missed(row)]


def missed(row: dict[str, Any]) -> bool:
    """Whether a ratio is below its target, or above its limit. A peer that is not installed has none."""
    ratio, target, limit = row["ratio"], row.get("target"), row.get("limit")
    if ratio is None:
        return False
    return (target is not None and ratio < target) or (limit is not None and ratio > limit)
