"""The overlapped engine: every token compared, two steps in flight, no wait; with and without guesses."""

import importlib.util
from typing import cast

import torch

from batchstate.runtime import open_runtime
from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.timing import one_thread
from examples.traffic import fitted_workload

SCALE = 8
"""The workload's lengths are divided by it."""


def run(setting: Setting, notes: Notes) -> None:
    """Serves requests with the plain model, and with one of transformers where that is installed."""
    with one_thread():
        _runs(setting, notes)


def _runs(setting: Setting, notes: Notes) -> None:
    requests = 6 if setting.quick else 100
    _serve(setting, notes, "plain", level="full", drafts=0, requests=requests)
    _serve(setting, notes, "plain", level="cheap", drafts=0, requests=requests)
    _serve(setting, notes, "plain", level="cheap", drafts=3, requests=requests)
    if importlib.util.find_spec("transformers") is not None:
        _serve(setting, notes, "llama", level="cheap", drafts=0, requests=requests // 2)
    else:
        notes.figures["llama"] = "not run: transformers is not installed"


def _serve(setting: Setting, notes: Notes, family: str, *, level: str, drafts: int, requests: int) -> None:
    from examples.engine.model import Family, Model
    from examples.engine.serving import requests_of, serve
    from examples.engine.settings import EngineSettings

    runtime = open_runtime(setting.device)
    model = Model.random(cast("Family", family), device=runtime.device, dtype=torch.float64)
    workload = fitted_workload(requests, 0)
    served = requests_of(workload, model, scale=2 * SCALE if setting.quick else SCALE, seed=0, prebuilt=0.1)
    longest = max(len(request.prompt) + request.max_new_tokens for request in served)
    settings = EngineSettings(num_pages=max(200, longest // 16 + 8), max_tokens_per_request=longest, num_drafts=drafts)
    report = serve(runtime, model, served, settings, level=level, name=family)
    name = f"{family}, checks {level}{f', {drafts} guesses' if drafts else ''}"
    notes.figures[name] = {key: value for key, value in report.as_dict().items() if key != "broken"}
    notes.require(report.broken is None, f"{name}: {(report.broken or '').splitlines()[:1]}")
    for figure in ("mismatches", "violations", "leaks", "forced_syncs"):
        notes.require_equal(f"{name}: {figure}", getattr(report, figure), 0)
    notes.require_equal(f"{name}: steps in flight", report.in_flight_depth_max, 2)
    notes.require(report.tokens > 5 * len(served), f"{name}: {report.tokens} tokens are too few to say anything")
