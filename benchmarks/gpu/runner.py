"""All stages, one after the other, each in a process of its own that ends when its time is up."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from benchmarks.gpu.outcome import STAGES, Outcome, Setting

ROOT = Path(__file__).parents[2]
LAST_WORDS = 3_000
"""Characters kept of what a stage that failed has printed."""
LEAST = 5.0
"""Seconds below which no stage is begun."""

GRACE = 5.0
"""Seconds in which a stage whose time is up may still write what it has found."""

Done = Callable[[str, Outcome], None]


def run_all(names: Sequence[str], device: str, *, quick: bool, budget: float, done: Done) -> dict[str, Outcome]:
    """Runs stages in turn.

    Args:
        names: of stages.
        device: see `Setting`.
        quick: see `Setting`.
        budget: seconds for all of them. A stage for which none are left has failed: its outcome is unknown.
        done: called with each outcome, when it is there.
    """
    end = time.monotonic() + budget
    outcomes: dict[str, Outcome] = {}
    for name in names:
        left = min(STAGES[name].limit, end - time.monotonic())
        if left < LEAST:
            outcome = Outcome("failed", f"nothing was left of {budget:g} seconds")
        elif outcomes.get("machine", Outcome("ok")).state == "failed":
            outcome = Outcome("failed", "the device cannot be used: see stage 'machine'")
        else:
            outcome = run_child(name, Setting(device, quick, left))
        outcomes[name] = outcome
        done(name, outcome)
    return outcomes


def run_child(name: str, setting: Setting) -> Outcome:
    """The outcome of one stage in a process of its own, which is killed with its children when its time is up."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "outcome.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu.child", name, "--device", setting.device]
        command += ["--seconds", f"{setting.seconds:.1f}", "--out", str(out), *(["--quick"] if setting.quick else [])]
        start = time.monotonic()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, process_group=0
            )
        try:
            code = _waited(process, setting.seconds)
        finally:
            _kill(process)
        seconds = time.monotonic() - start
        words = log.read_bytes()[-LAST_WORDS:].decode(errors="replace")
        if code == 0 and out.exists():
            outcome = Outcome.from_dict(json.loads(out.read_text(encoding="utf-8")))
        else:
            late = code is None or seconds >= setting.seconds
            why = f"not done within {setting.seconds:.0f} seconds" if late else f"its process ended with {code}"
            outcome = Outcome("failed", why, {}, seconds)
        if outcome.state == "failed":
            outcome = attrs.evolve(outcome, figures={**outcome.figures, "printed": words})
        return attrs.evolve(outcome, seconds=round(seconds, 2))


def _waited(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """A child's exit code. When its time is up it is asked to end; None if it does not hear."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(GRACE)
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the group of a child: itself if it still runs, and what it left behind in any case."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
