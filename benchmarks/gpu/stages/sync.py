"""Steps in which the host waits for nothing: under torch's sync-debug mode `error`, and under the library's guard."""

import contextlib
from collections.abc import Iterator

import attrs
import torch

from batchstate import checks
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing import no_hidden_sync
from batchstate.violations import Violation
from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.gpu.steps import Serving

MOST_STAGING = 6
"""Blocks that may be allocated after the first steps: a device that lags keeps those of two steps, three in each."""


def run(setting: Setting, notes: Notes) -> None:
    """Steps at `off`, `cheap` and `full`; the last reads the device back, by calls that are named for it."""
    runtime = open_runtime(setting.device)
    steps = 10 if setting.quick else 200
    for level in ("off", "cheap", "full"):
        with checks(level):
            serving = Serving(runtime, rows=16 if setting.quick else 64)
            for _ in range(5):  # kernels are loaded, memory is allocated
                serving.step()
            serving.drain()
            before = runtime.counters.snapshot()
            for window in ("torch", "guard"):
                waited = _waits(runtime, window, serving, steps)
                notes.require(waited is None, f"checks {level}, under {window}: {waited}")
            spent = runtime.counters - before
            notes.figures[level] = {"steps": serving.steps, **attrs.asdict(spent)}
            notes.require_equal(f"forced syncs at {level}", spent.forced_syncs, 0)
            notes.require(spent.staging_allocations <= MOST_STAGING, f"staging at {level}: {spent.staging_allocations}")
            notes.require_equal(f"wrong tokens at {level}", serving.wrong_tokens, 0)
    _controls(runtime, notes)


def _waits(runtime: Runtime, window: str, serving: Serving, steps: int) -> str | None:
    """The wait of the host in some steps, or None."""
    try:
        with _windows(runtime, window):
            for _ in range(steps):
                serving.step()
            serving.drain()
    except (Violation, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def _controls(runtime: Runtime, notes: Notes) -> None:
    """Something that waits is found: windows that find nothing prove nothing."""
    value = runtime.device_zeros((2,), torch.int64)
    for window in ("torch", "guard"):
        if window == "torch" and runtime.device.type == "cpu":
            continue  # a CPU has no such mode, and nothing ever waits
        try:
            with _windows(runtime, window):
                (value + 1).sum().item()
            raised = False
        except (Violation, RuntimeError):
            raised = True
        notes.figures[f"finds a wait: {window}"] = raised
        notes.require(raised, f"a call that waits was not found under {window}")


@contextlib.contextmanager
def _windows(runtime: Runtime, window: str) -> Iterator[None]:
    if window == "guard":
        with no_hidden_sync(runtime):
            yield
    elif runtime.device.type == "cpu":
        yield
    else:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
