"""Shared by the tests of the engine example: models, requests, right answers, and an eye on the host."""

import functools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, final

import attrs
import numpy as np
import pytest
import torch

from batchstate import checks
from batchstate.runtime import Fence, Runtime
from batchstate.runtime.base import Download
from batchstate.testing.fences import LateFence
from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.model import Family, Model, prefill
from examples.engine.reference import generate
from examples.engine.request import Request
from examples.engine.settings import EngineSettings

SMALL = EngineSettings(
    max_running=8, num_pages=128, page_size=3, max_tokens_per_request=64, max_tokens_per_step=32, overlap=True
)


overlapped_or_not = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
two_of_the_modes = pytest.mark.parametrize(
    ("overlap", "num_drafts"), [(False, 0), (True, 3)], ids=["synchronous, plain", "overlapped, speculative"]
)
"""Where one combination shows what the others would: tokens of all four are compared elsewhere."""
plain_or_speculative = pytest.mark.parametrize("num_drafts", [0, 3], ids=["plain", "speculative"])


@functools.cache
def model_of(family: Family, device: str) -> Model:
    """A random float64 model. Every engine gives it KV memory of its own."""
    return Model.random(family, device=device)


def some_requests(
    model: Model, count: int, *, seed: int = 0, longest: int = 40, most_new: int = 20, prebuilt_every: int = 0
) -> list[Request]:
    """Requests whose prompts repeat parts of themselves; each n-th comes prebuilt."""
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        length = draw.randint(1, longest)
        phrase = [draw.randrange(model.vocab_size) for _ in range(max(1, length // 3))]
        prompt = (phrase * length)[:length]
        sent = prefill(model, prompt) if prebuilt_every and number % prebuilt_every == 0 else None
        requests.append(Request(number, prompt, draw.randint(1, most_new), sent))
    return requests


def right_answers(model: Model, requests: Sequence[Request], eos: Collection[int] = ()) -> list[list[int]]:
    """The answers of transformers; it is asked once for the same requests."""
    prompts = tuple(tuple(request.prompt) for request in requests)
    answers = _answers(model, prompts, tuple(request.max_new_tokens for request in requests), frozenset(eos))
    return [list(answer) for answer in answers]


@functools.cache
def _answers(
    model: Model, prompts: tuple[tuple[int, ...], ...], limits: tuple[int, ...], eos: frozenset[int]
) -> list[list[int]]:
    return generate(model, prompts, limits, eos_token_ids=eos)


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    """The answers as far as the host knows them."""
    return [request.output for request in requests]


def busy(engine: Engine) -> bool:
    """Whether an engine has something to do. Fails where that never ends."""
    assert engine.runtime.step < 3_000, f"{len(engine.scheduler.waiting)} requests wait for ever"
    return engine.busy


def run_all(engine: Engine) -> None:
    """As `Engine.run`, but not for ever."""
    while busy(engine):
        engine.step()


def until(engine: Engine, reached: Callable[[], bool]) -> None:
    """Steps until something is so."""
    while not reached():
        assert busy(engine), "nothing left to run, and it has not happened"
        engine.step()


def started(
    runtime: Runtime, model: Model, settings: EngineSettings, requests: Iterable[Request], **named: Any
) -> Engine:
    """An engine to which the requests were added, in order."""
    engine = Engine(runtime, model, settings, **named)
    for request in requests:
        engine.add(request)
    return engine


def served(
    runtime: Runtime, model: Model, requests: Sequence[Request], settings: EngineSettings, eos: Collection[int] = ()
) -> Engine:
    """An engine that has served the requests, with checks at `full`, and has nothing left."""
    with checks("full"):
        engine = started(runtime, model, settings, requests, eos_token_ids=eos)
        run_all(engine)
        nothing_left(engine)
    return engine


def nothing_left(engine: Engine) -> None:
    """Asserts that behind the last fence every slot and every page is free, and no relay entry has an owner."""
    scheduler = engine.scheduler
    assert not engine.busy
    if scheduler.last_step is not None:
        scheduler.last_step.wait()
    whole(engine)
    scheduler.slots.expect_idle()
    scheduler.pages.expect_idle()
    assert scheduler.slots.stats.free == engine.settings.max_running
    assert scheduler.pages.stats.free == engine.settings.num_pages


def whole(engine: Engine) -> None:
    """Asks every law of the pools, the relay and the batch."""
    scheduler = engine.scheduler
    scheduler.slots.verify()
    scheduler.pages.verify()
    scheduler.forward.relay.check()
    with checks("full"):
        scheduler.batch.check()


@final
@attrs.define(eq=False)
class Launch:
    """One launched step as the host saw it.

    Attributes:
        step: the step.
        results: behind the copy of its results; where there are none, its forward-done fence.
        waits: what the host waited for in the call of `Engine.step` that launched it.
        before_ended: whether the forward before it had ended, as far as the host knew, when this one was launched.
        unread: launches that had not ended, as far as the host knew, when this one was launched: it, and those before.
        uploaded, downloaded: copies of the call.
    """

    step: Step
    results: Fence
    waits: list[object]
    before_ended: bool
    unread: int
    uploaded: int = 0
    downloaded: int = 0

    @property
    def decodes_alone(self) -> bool:
        """Whether the step has no chunk of a prompt."""
        return self.step.plan.prompt_ids is None


@final
class Watch:
    """Steps an engine, and notes what the host launches and waits for.

    Attributes:
        engine: the engine.
        launches: in order.
        drained: what the host waited for in calls that launched nothing, each.
        forced_syncs: since the watch began.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.launches: list[Launch] = []
        self.drained: list[list[object]] = []
        self._runtime = engine.runtime
        self._start = engine.runtime.counters.snapshot()
        self._waits: list[object] = []
        self._downloads: list[Download] = []
        self._download = engine.runtime.download
        self._run = engine.scheduler.forward.run
        self._wait = LateFence.wait
        monkeypatch.setattr(engine.runtime, "download", self._noted_download)
        monkeypatch.setattr(engine.scheduler.forward, "run", self._noted_run)
        waits = self

        def noted_wait(fence: LateFence) -> None:
            waits._waits.append(fence)
            waits._wait(fence)

        monkeypatch.setattr(LateFence, "wait", noted_wait)

    @property
    def forced_syncs(self) -> int:
        return (self._runtime.counters - self._start).forced_syncs

    def step(self) -> bool:
        """One step of the engine."""
        self._waits, launched = [], len(self.launches)
        before = self._runtime.counters.snapshot()
        result = self.engine.step()
        cost = self._runtime.counters - before
        assert len(self.launches) == launched + result
        if result:
            launch = self.launches[-1]
            launch.waits = self._waits
            launch.uploaded, launch.downloaded = cost.host_to_device_copies, cost.device_to_host_copies
        else:
            self.drained.append(self._waits)
        return result

    def run(self) -> None:
        """Steps until nothing is left."""
        while busy(self.engine):
            self.step()

    def _noted_run(self, step: Step) -> RunningBatch:
        before = self.launches[-1] if self.launches else None
        ended = before is not None and before.step.forward_done is not None and before.step.forward_done.query()
        asked = len(self._downloads)
        batch = self._run(step)
        assert step.forward_done is not None
        results: Fence = self._downloads[-1].done if len(self._downloads) > asked else step.forward_done
        unread = [*(launch.results for launch in self.launches), results]
        self.launches.append(Launch(step, results, [], ended, sum(not fence.query() for fence in unread)))
        return batch

    def _noted_download(self, *args: Any, **kwargs: Any) -> Download:
        self._downloads.append(self._download(*args, **kwargs))
        return self._downloads[-1]


def assert_runs_ahead(watch: Watch) -> None:
    """Each step was launched while the one before it was still running, and only then was that one's result read.

    For an engine on a `LateRuntime`, where nothing ends before the host has waited for it.
    """
    first, *others = watch.launches
    assert len(others) > 10, "too few steps to say anything"
    assert watch.forced_syncs == 0, "the host waited for the whole device"
    assert watch.engine.in_flight_depth_max == 2
    assert first.waits == [], "the first step waited for something"
    for number, (before, launch) in enumerate(zip(watch.launches, others, strict=False), 1):
        assert not launch.before_ended, f"step {number - 1} had ended when step {number} was launched"
        assert launch.unread == 2, f"{launch.unread} steps were unread when step {number} was launched"
        assert launch.waits == [before.results], f"step {number}: the host waited for something else than step before"
    assert [fence for waits in watch.drained for fence in waits] == [watch.launches[-1].results]


def sides_of(batch: RunningBatch) -> dict[str, tuple[torch.Tensor, int, np.ndarray, np.ndarray]]:
    """For each mirrored column its device tensor, writes to it so far, and both sides as they are now."""
    sides = {}
    for name in ("slots", "seq_lens"):
        device = batch[name].device
        sides[name] = (device, device._version, batch.runtime.inspect(device), batch[name].np.copy())
    return sides
