"""The engine example: its tokens in every combination of modes, and who may come and go when."""

from collections.abc import Callable, Sequence
from itertools import product

import attrs
import pytest
import torch

from batchstate import checks
from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime
from batchstate.testing import LateRuntime

pytest.importorskip("transformers")

from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.model import Family, Model, prefill
from examples.engine.request import Request
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import (
    SMALL,
    busy,
    model_of,
    nothing_left,
    outputs,
    overlapped_or_not,
    plain_or_speculative,
    right_answers,
    run_all,
    served,
    some_requests,
    started,
    two_of_the_modes,
    until,
)

LLAMA: list[Family] = ["llama"]
QWEN3: list[Family] = ["qwen3"]
COMBINATIONS = [
    *product(LLAMA, [False, True], [True], [0, 4], [True]),
    *product(LLAMA, [False, True], [False], [0, 1], [False]),
    *product(QWEN3, [True], [False, True], [4], [True]),
]
"""Model, overlapped, mixed, drafts, tight pages."""


def kv_at(engine: Engine, rows: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values at rows of KV memory, in memory of their own."""
    kv = engine.scheduler.forward.kv
    return [memory.index_select(0, rows) for memory in (*kv.keys, *kv.values)]


# Locations


@pytest.mark.parametrize(("family", "overlap", "mixed", "num_drafts", "few_pages"), COMBINATIONS)
def test_tokens_are_those_of_transformers(
    rt: Runtime, device: str, family: Family, overlap: bool, mixed: bool, num_drafts: int, few_pages: bool
) -> None:
    """In every combination of modes each answer is that of `generate`, retracted or not, and nothing waits or leaks."""
    model = model_of(family, device)
    requests = some_requests(model, 9, most_new=16)
    settings = attrs.evolve(
        SMALL, overlap=overlap, mixed=mixed, num_drafts=num_drafts, num_pages=25 if few_pages else 128
    )
    before = rt.counters.snapshot()
    engine = served(rt, model, requests, settings)
    assert outputs(requests) == right_answers(model, requests)
    assert (engine.scheduler.retractions > 0) == few_pages
    assert engine.in_flight_depth_max == 1 + overlap
    assert (rt.counters - before).forced_syncs == 0
    assert (engine.accepted_drafts > 5) == (num_drafts > 0)


@overlapped_or_not
def test_end_is_known_one_step_late(rt: Runtime, model: Model, overlap: bool) -> None:
    """Overlapped, a request whose EOS was sampled takes part in one more step, whose token is dropped."""
    request, other = some_requests(model, 2, seed=3, longest=8)
    request.max_new_tokens = other.max_new_tokens = 20
    answer = right_answers(model, [request])[0]
    eos = {answer[5]}
    expected = right_answers(model, [request, other], eos)
    engine = started(rt, model, attrs.evolve(SMALL, overlap=overlap), [request, other], eos_token_ids=eos)
    until(engine, lambda: request.state == "finished")
    assert request.in_flight == int(overlap)
    assert request in engine.scheduler.batch.requests
    engine.step()
    assert request not in engine.scheduler.batch.requests
    assert request.in_flight == 0
    run_all(engine)
    assert outputs([request, other]) == expected
    nothing_left(engine)


def test_prebuilt_answer_may_be_complete(rt: Runtime, model: Model) -> None:
    """A prebuilt request of one token, or one that begins with EOS, is finished when it is added, and costs nothing."""
    short, ended = some_requests(model, 2, prebuilt_every=1)
    short.max_new_tokens = 1
    assert ended.prebuilt is not None
    engine = Engine(rt, model, SMALL, eos_token_ids={ended.prebuilt.first_token})
    for request in (short, ended):
        engine.add(request)
        assert request.state == "finished"
        with pytest.raises(ArgumentError, match="not here"):
            engine.abort(request.number)
    assert not engine.busy
    assert not engine.step()
    assert outputs([short, ended]) == right_answers(model, [short, ended], {ended.prebuilt.first_token})


def test_guesses_are_the_same_in_both_modes(rt: Runtime, model: Model) -> None:
    """Guesses hang on the tokens alone: as many are right overlapped as not, whatever the chunks of the prompt."""
    accepted = set()
    for overlap, tokens in product((False, True), (4, 32)):
        requests = some_requests(model, 3, seed=6)
        settings = attrs.evolve(SMALL, overlap=overlap, max_tokens_per_step=tokens, num_drafts=3)
        accepted.add(served(rt, model, requests, settings).accepted_drafts)
    assert len(accepted) == 1
    assert accepted.pop() > 5


def test_guesses_know_every_token(rt: Runtime, model: Model) -> None:
    """Guesses are made from each prompt, in chunks or prebuilt, and each answer as far as it is known."""
    requests = some_requests(model, 6, seed=6, prebuilt_every=3)
    engine = started(rt, model, attrs.evolve(SMALL, overlap=False, max_tokens_per_step=7, num_drafts=3), requests)
    compared = 0
    while busy(engine):
        engine.step()
        history = rt.inspect(engine.scheduler.forward._drafter.history)
        batch = engine.scheduler.batch
        for request, slot, computed in zip(batch.requests, batch.slots.np, batch.seq_lens.np, strict=True):
            tokens = [*request.prompt, *request.output][: int(computed)]
            assert history[slot, : len(tokens)].tolist() == tokens
            compared += len(tokens)
    assert compared > 500


# Coming and going


def state_of(engine: Engine, requests: Sequence[Request]) -> tuple[object, ...]:
    """All that a refused call must leave alone."""
    scheduler = engine.scheduler
    return (
        [(request.state, list(request.output), request.in_flight, request.prebuilt) for request in requests],
        list(scheduler.batch.requests),
        list(scheduler.waiting),
        scheduler.batch.version,
        scheduler.slots.stats,
        scheduler.pages.stats,
        engine.steps,
    )


@plain_or_speculative
def test_answers_may_end_while_their_requests_wait(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """A request that is retracted with its last token in flight is finished when that is read, and never comes back."""
    requests = some_requests(model, 24, seed=12, longest=12)
    engine = started(rt, model, attrs.evolve(SMALL, num_pages=24, num_drafts=num_drafts), requests)
    run = engine.scheduler.forward.run
    left_in_flight: set[Request] = set()

    def look(step: Step) -> RunningBatch:
        left_in_flight.update(request for request in engine.scheduler.waiting if request.in_flight)
        return run(step)

    monkeypatch.setattr(engine.scheduler.forward, "run", look)
    ended = 0
    with checks("full"):
        while busy(engine):
            left_in_flight.clear()
            engine.step()
            ended += sum(request.state == "finished" for request in left_in_flight)
        nothing_left(engine)
    assert ended
    assert outputs(requests) == right_answers(model, requests)


@overlapped_or_not
def test_refusals_change_nothing(rt: Runtime, model: Model, overlap: bool) -> None:
    """Unknown and finished requests, numbers twice and lengths that never fit are typed errors that change nothing."""
    first, second, *others = some_requests(model, 6, seed=13)
    first.max_new_tokens = 2
    second.max_new_tokens = 20
    engine = started(rt, model, attrs.evolve(SMALL, overlap=overlap, max_running=2), [first, second, *others])
    until(engine, lambda: first.state == "finished")
    requests = [first, second, *others]
    gone = others.pop()
    engine.abort(gone.number)
    long = Request(90, [1] * 50, 15)
    sent = prefill(model, [1, 2, 3])
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: engine.abort(77), "abort of request 77, which is not here"),
        (lambda: engine.abort(first.number), f"abort of request {first.number}, which is not here"),
        (lambda: engine.abort(gone.number), f"abort of request {gone.number}, which is not here"),
        (lambda: engine.add(second), f"request {second.number} is here already"),
        (lambda: engine.add(others[0]), f"request {others[0].number} is here already"),
        (lambda: engine.add(first), "or has run"),
        (lambda: engine.add(gone), "or has run"),
        (lambda: engine.add(Request(second.number, [5], 1)), f"request {second.number} is here already"),
        (lambda: engine.add(Request(second.number, [1, 2, 3], 4, sent)), "here already"),
        (lambda: engine.add(long), "50 tokens and 15 new ones"),
        (lambda: engine.add(Request(91, [], 1)), "request 91: a prompt of 0 ids"),
        (lambda: engine.add(Request(94, [1, 256], 1)), "request 94: a prompt of 2 ids"),
        (lambda: engine.add(Request(95, [1, -1], 1)), "request 95: a prompt of 2 ids"),
        (lambda: engine.add(Request(96, [1] * 4, 4, sent)), "KV that is not of this model and prompt"),
        (lambda: engine.add(Request(97, [1, 2], 4, sent)), "KV that is not of this model and prompt"),
        (lambda: engine.add(Request(98, [1, 10**6], 4)), "request 98: a prompt of 2 ids"),
        (lambda: engine.add(Request(99, [1.5], 4)), "request 99"),  # type: ignore[list-item]
        (lambda: engine.add(Request(89, "abc", 4)), "request 89"),  # type: ignore[arg-type]
        (lambda: engine.add(Request(88, [1], 2.5)), "request 88"),  # type: ignore[arg-type]
        (lambda: engine.add(Request(92, [1], 0)), "1 tokens and 0 new ones"),
        (lambda: engine.add(Request(93, [1] * 3, 62, sent)), "3 tokens and 62 new ones"),
    ]
    for action, message in refused:
        before = state_of(engine, [*requests, long])
        with pytest.raises(ArgumentError, match=message) as caught:
            action()
        assert caught.value.remedy
        assert state_of(engine, [*requests, long]) == before
    run_all(engine)
    nothing_left(engine)
    going = [request for request in requests if request is not gone]
    assert outputs(going) == right_answers(model, going)


@two_of_the_modes
def test_idle_steps_change_nothing(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """Steps of no requests between the others change no token, no slot and no KV, on a batch or on none."""
    requests = some_requests(model, 8, seed=14, prebuilt_every=4)
    settings = attrs.evolve(SMALL, overlap=overlap, num_drafts=num_drafts, num_pages=32)
    rows = torch.arange(settings.page_size, (settings.num_pages + 1) * settings.page_size, device=model.device)
    with checks("full"):
        engine = Engine(rt, model, settings)
        engine.idle()
        for request in requests:
            engine.add(request)
        while busy(engine):
            engine.step()
            scheduler = engine.scheduler
            for _ in range(3):
                rt.synchronize()
                kv, live = kv_at(engine, rows), scheduler.slots.live_slots()
                slots = scheduler.batch.slots.np.copy()
                engine.idle()
                rt.synchronize()
                assert all(map(torch.equal, kv, kv_at(engine, rows)))
                assert scheduler.slots.live_slots().tolist() == live.tolist()
                assert scheduler.batch.slots.np.tolist() == slots.tolist()
        engine.idle()
        run_all(engine)
        nothing_left(engine)
    assert engine.scheduler.retractions > 0
    assert engine.in_flight_depth_max == 1 + overlap
    assert engine.host_seconds > 0
    assert outputs(requests) == right_answers(model, requests)


def test_idle_steps_run_no_further_ahead(late: LateRuntime, lagging_model: Model) -> None:
    """However many steps of no requests follow each other, a lagging device is at most as far behind as declared."""
    engine = Engine(late, lagging_model, SMALL)
    engine.add(some_requests(lagging_model, 1)[0])
    engine.step()
    for _ in range(10):
        engine.idle()
    assert engine.in_flight_depth_max == 2
    run_all(engine)
    nothing_left(engine)


@two_of_the_modes
def test_prompts_are_resumed_mid_chunk(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """A request that is retracted between two chunks of its prompt comes back, and starts again from the beginning."""
    long, other = Request(1, [7, 8, 9, 10] * 9, 4), Request(0, [1, 2, 3, 4], 24)
    width = 1 + num_drafts
    settings = attrs.evolve(
        SMALL,
        page_size=1,
        num_pages=40 + 3 * width,
        max_tokens_per_step=2 + width,
        overlap=overlap,
        num_drafts=num_drafts,
    )
    cut: list[int] = []
    with checks("full"):
        engine = started(rt, model, settings, [other, long])
        while busy(engine):
            batch = engine.scheduler.batch
            computed = {request: int(batch.seq_lens.np[row]) for row, request in enumerate(batch.requests)}
            engine.step()
            if long in computed and long.state == "waiting":
                cut.append(computed[long])
        nothing_left(engine)
    assert any(0 < length < len(long.prompt) for length in cut)
    assert outputs([other, long]) == right_answers(model, [other, long])


def test_requests_come_while_others_run(rt: Runtime, model: Model) -> None:
    """A request may be added between any two steps; a number may be used again when its request has gone."""
    first = some_requests(model, 6, seed=15)
    second = some_requests(model, 6, seed=16)
    engine = Engine(rt, model, attrs.evolve(SMALL, num_drafts=2))
    with checks("full"):
        for request in first:
            engine.add(request)
            engine.step()
        for request, earlier in zip(second, first, strict=True):
            while earlier.state != "finished":
                engine.step()
            engine.add(request)
        engine.run()
        nothing_left(engine)
    assert outputs([*first, *second]) == right_answers(model, [*first, *second])


@pytest.mark.parametrize("drafts", [4, 8])
def test_more_guesses_than_known_tokens(rt: Runtime, model: Model, drafts: int) -> None:
    """Prompts shorter than what is guessed are served like all others."""
    requests = [Request(number, list(range(5, 6 + number)), 5) for number in range(7)]
    served(rt, model, requests, EngineSettings(num_drafts=drafts))
    assert outputs(requests) == right_answers(model, requests)


@pytest.mark.parametrize("action", ["step", "idle", "run"])
def test_a_failed_forward_ends_the_engine(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """An error in a step comes out once; then the engine says so instead of going on from an unknown state."""
    engine = Engine(rt, model, SMALL)
    engine.add(Request(0, [1, 2, 3], 5))
    engine.step()

    def failing(*args: object) -> torch.Tensor:
        raise MemoryError("out of memory for activations")

    monkeypatch.setattr(Model, "forward", failing)
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(RuntimeError, match="make a new engine"):
        getattr(engine, action)()


def test_two_engines_share_a_model(rt: Runtime, model: Model) -> None:
    """Engines of one runtime and one model have KV memory of their own, and leave each other alone."""
    engines = [Engine(rt, model, EngineSettings(overlap=overlap)) for overlap in (True, False)]
    requests = [Request(0, [1, 2, 3, 4], 6), Request(0, [9, 8, 7], 6)]
    for engine, request in zip(engines, requests, strict=True):
        engine.add(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    assert outputs(requests) == right_answers(model, requests)


@pytest.mark.parametrize("size", ["max_running", "num_pages", "page_size", "max_tokens_per_step"])
def test_sizes_of_nothing_are_refused(size: str) -> None:
    """An engine without any capacity would never end."""
    with pytest.raises(ValueError, match=size):
        EngineSettings(**{size: 0})  # type: ignore[arg-type]
