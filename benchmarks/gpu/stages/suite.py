"""The tests on the device, those that a device can change, in a few processes side by side."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.gpu.runner import LAST_WORDS, ROOT

FILES = (
    "tests/test_machines.py",
    "examples/tests/test_engine.py",
    "tests/test_future_map.py",
    "tests/test_batch.py",
    "tests/test_overlap_machine.py",
    "tests/test_forward_inputs.py",
    "tests/test_pools.py",
    "examples/tests/test_engine_steps.py",
    "tests/test_hisparse.py",
    "examples/tests/test_traffic.py",
    "tests/test_pages.py",
    "examples/tests/test_engine_model.py",
    "tests/test_mirror.py",
    "tests/test_twins.py",
    "tests/test_tables.py",
    "tests/test_forward_plan.py",
    "tests/test_hybrid.py",
    "tests/test_call_budget.py",
    "tests/test_static.py",
    "tests/test_runtime.py",
    "tests/test_memory.py",
    "tests/test_accelerator.py",
    "tests/test_sync_guard.py",
    "tests/test_host_pool.py",
    "tests/test_tighten.py",
    "tests/test_levels.py",
)
"""Test files of code that a device can change, long ones first. The others are named in the figures."""
QUICK = ("tests/test_call_budget.py",)
FIRST_FAILURES = 20
"""So many messages of failures are kept."""
END = 15.0
"""Seconds before the stage's own end at which the tests are interrupted, so that what they found is still told."""
MOST_PROCESSES = 12
"""They share the GPU: each has a context of it, and leaves most of its time to the others."""
HANGS = 100
"""Seconds after which a test is taken to hang: pytest then prints where each thread stands."""


def run(setting: Setting, notes: Notes) -> None:
    """Runs the files and reads the reports. Tests are dealt out to processes; without pytest-xdist, whole files are."""
    files = QUICK if setting.quick else FILES
    paths = [path for folder in ("tests", "examples/tests") for path in (ROOT / folder).glob("test_*.py")]
    there = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    notes.figures["left out"] = [file for file in there if file not in files]
    missing = [file for file in files if file not in there]
    notes.require(not missing, f"no such test files: {missing}")
    workers = min(len(files), MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) * 3 // 4))
    notes.figures["processes"] = workers
    parts = 1 if find_spec("xdist") else workers
    shares = [[file for file in files[i::parts] if file not in missing] for i in range(parts)]
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{i}.xml") for i in range(parts)]
        endings = _run(shares, reports, setting, ["-n", str(workers)] if parts < workers else [])
        for share, ending in zip(shares, endings, strict=True):
            notes.require(ending in ("0", "1"), f"pytest of {len(share)} files ended with {ending}")
        _read(notes, [report for report in reports if report.exists()])


def _run(shares: Sequence[Sequence[str]], reports: Sequence[Path], setting: Setting, xdist: Sequence[str]) -> list[str]:
    """How each process ended: pytest's exit code, or that its time was up."""
    end = time.monotonic() + setting.seconds - END
    options = ["-q", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANGS}", "--device", setting.device]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *xdist, f"--junitxml={report}", *share],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
        )
        for share, report in zip(shares, reports, strict=True)
    ]
    endings = []
    for process in processes:
        try:
            endings.append(str(process.wait(max(end - time.monotonic(), 0.1))))
        except subprocess.TimeoutExpired:
            endings.append(_interrupted(process))
    return endings


def _interrupted(process: subprocess.Popen[bytes]) -> str:
    """Lets pytest write its report, if it still can."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END / 3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return "an interruption, since its time was up"


def _read(notes: Notes, reports: Sequence[Path]) -> None:
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    failed: list[dict[str, Any]] = []
    skipped: dict[str, int] = {}
    for report in reports:
        root = ElementTree.parse(report).getroot()
        for suite in root.iter("testsuite"):
            for name in totals:
                totals[name] += int(suite.get(name, 0))
        for case in root.iter("testcase"):
            for kind in ("failure", "error"):
                for skip in case.findall(kind):
                    text = (skip.get("message") or "") + "\n" + (skip.text or "")
                    failed.append({"test": f"{case.get('classname')}::{case.get('name')}", "said": text[-LAST_WORDS:]})
            for skip in case.findall("skipped"):
                why = skip.get("message") or ""
                skipped[why] = skipped.get(why, 0) + 1
    notes.figures |= totals
    notes.figures["why skipped"] = skipped
    notes.figures["failed"] = [test["test"] for test in failed]
    notes.figures["first failures"] = failed[:FIRST_FAILURES]
    passed = totals["tests"] - totals["failures"] - totals["errors"] - totals["skipped"]
    notes.figures["passed"] = passed
    notes.require(passed > 0, "no test passed")
    notes.require(not failed, f"{len(failed)} tests failed: {', '.join(test['test'] for test in failed[:5])}")
