"""The engine example on the simulated device: right tokens in any order, whatever lags."""

import attrs
import pytest

from batchstate import checks
from batchstate.races.sim import PORTFOLIO, SimRuntime

pytest.importorskip("transformers")

from examples.engine.engine import Engine
from examples.engine.model import Family
from examples.engine.request import Request
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import (
    SMALL,
    model_of,
    nothing_left,
    outputs,
    plain_or_speculative,
    right_answers,
    run_all,
    some_requests,
    started,
)

TIGHT = attrs.evolve(SMALL, num_pages=40)


def serve(
    rt: SimRuntime, settings: EngineSettings, requests: list[Request], *, family: Family = "llama", level: str = "cheap"
) -> Engine:
    """An engine that has served the requests, on a device that lags, and has nothing left."""
    with checks(level), rt:
        engine = started(rt, model_of(family, "cpu"), settings, requests, eos_token_ids=())
        run_all(engine)
        nothing_left(engine)
    assert rt.pending() == 0
    return engine


@plain_or_speculative
@pytest.mark.parametrize("scheduler", PORTFOLIO)
def test_tokens_are_right_in_any_order(scheduler: str, num_drafts: int) -> None:
    """Those of transformers, while steps overlap, memory is used again and nothing makes the host wait."""
    model = model_of("llama", "cpu")
    requests = some_requests(model, 12, seed=3)
    rt = SimRuntime(scheduler=scheduler, seed=3)
    engine = serve(rt, attrs.evolve(SMALL, num_drafts=num_drafts), requests)
    assert outputs(requests) == right_answers(model, requests)
    assert (rt.counters.forced_syncs, rt.synchronised, rt.unmodelled) == (0, {}, {})
    assert engine.in_flight_depth_max == 2
    assert rt.in_flight_depth_max >= (1 if scheduler == "eager" else 2)
    assert rt.reused > 2_000


@pytest.mark.parametrize(
    ("scheduler", "family", "settings", "level"),
    [
        ("lazy", "qwen3", TIGHT, "cheap"),
        ("oldest", "llama", attrs.evolve(TIGHT, num_drafts=2), "off"),
        ("pct", "llama", attrs.evolve(SMALL, mixed=False), "cheap"),
        ("newest", "llama", attrs.evolve(SMALL, overlap=False), "cheap"),
        ("lazy", "llama", attrs.evolve(SMALL, num_drafts=1), "full"),
    ],
    ids=["tight", "tight and speculative", "not mixed", "synchronous", "checks at full"],
)
def test_tokens_are_right_in_every_mode(scheduler: str, family: Family, settings: EngineSettings, level: str) -> None:
    """With requests that come prebuilt, with few pages, and with checks that look at a device that lags."""
    model = model_of(family, "cpu")
    requests = some_requests(model, 10, seed=5, longest=24, most_new=12, prebuilt_every=4)
    rt = SimRuntime(scheduler=scheduler, seed=1)
    serve(rt, settings, requests, family=family, level=level)
    assert outputs(requests) == right_answers(model, requests)
    assert (rt.counters.forced_syncs, rt.synchronised, rt.unmodelled) == (0, {}, {})


def test_a_seed_gives_the_same_run() -> None:
    """Every operation in the same place; another seed gives another order, and the same tokens."""
    told = []
    for seed in (7, 7, 8):
        requests = some_requests(model_of("llama", "cpu"), 4, seed=2, longest=12, most_new=6)
        rt = SimRuntime(scheduler="random", seed=seed)
        serve(rt, SMALL, requests)
        told.append((rt.trace(), outputs(requests)))
    assert told[0] == told[1]
    assert told[0][0] != told[2][0]
    assert told[0][1] == told[2][1]
