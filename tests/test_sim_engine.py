"""The engine example on the simulated device: right tokens in any order, and wrong ones where an order is missing."""

from collections.abc import Callable

import attrs
import pytest
import torch

from batchstate import checks
from batchstate.errors import BatchStateError
from batchstate.races.sim import PORTFOLIO, SimRuntime
from batchstate.runtime import Runtime
from batchstate.runtime.memory import Staging
from tests.selfcheck.mutants.diffs import Change

pytest.importorskip("transformers")

from examples.engine.engine import Engine
from examples.engine.model import Family
from examples.engine.request import Request
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import (
    SMALL,
    busy,
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


# What an engine may forget


def _waits(patch: pytest.MonkeyPatch) -> None:
    """Streams wait for nothing."""
    patch.setattr(Runtime, "wait", lambda self, fence, *, stream=None: None)


def _hand_over(patch: pytest.MonkeyPatch) -> None:
    """Prebuilt KV is used on the forward's stream and dropped, and the allocator is not told."""
    patch.setattr(SimRuntime, "_keep_alive", lambda self, tensor, stream: None)


def _landing(patch: pytest.MonkeyPatch) -> None:
    """Results are read before they are there."""
    change = Change("runtime.base:Download.resolve", (("self.done.wait()", "pass"),))
    patch.setattr(change.function(), "__code__", change.code())


def _staging(patch: pytest.MonkeyPatch) -> None:
    """Pinned memory is filled again before its copy has run."""

    def reap(self: Staging) -> None:
        for in_flight in self._in_flight.values():
            while in_flight:
                self.give_up(in_flight.popleft()[2])

    patch.setattr(Staging, "reap", reap)


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """What transformers answers to the requests of an engine that forgets something."""
    model = model_of("llama", "cpu")
    return right_answers(model, some_requests(model, 8, seed=1))


@pytest.mark.parametrize("forget", [_waits, _hand_over, _landing, _staging])
def test_what_an_engine_forgets_makes_wrong_tokens(
    forget: Callable[[pytest.MonkeyPatch], None], right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it fails, under one order or another; where everything runs at once nothing would show it."""
    forget(monkeypatch)
    wrong = []
    for scheduler in ("eager", "lazy", "oldest"):
        try:
            with checks("off"), SimRuntime(scheduler=scheduler) as rt:
                requests = some_requests(model_of("llama", "cpu"), 8, seed=1, prebuilt_every=2)
                engine = started(rt, model_of("llama", "cpu"), SMALL, requests, eos_token_ids=())
                while busy(engine):
                    engine.step()
                    rt.device_empty((1,), torch.int64)  # where prebuilt requests arrive, memory is wanted for others
        except (BatchStateError, LookupError, ValueError, RuntimeError):  # what an engine makes of poison
            wrong.append(scheduler)
        else:
            wrong += [scheduler] if outputs(requests) != right else []
    assert wrong
    assert "eager" not in wrong
