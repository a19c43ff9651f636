"""The engine example: its tokens, one step ahead or not, what a step costs, and who may come and go when."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import attrs
import numpy as np
import pytest
import torch

from batchstate import Contract, checks
from batchstate.errors import ArgumentError
from batchstate.runtime import Fence, Runtime
from batchstate.testing import LateRuntime, no_hidden_sync

pytest.importorskip("transformers")

from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.forward import Forward
from examples.engine.model import Family, Model
from examples.engine.prebuilt import prefill
from examples.engine.request import Request
from examples.engine.scheduler import Ints, Scheduler
from examples.engine.settings import EngineSettings
from tests.engine_cases import (
    SMALL,
    Watch,
    assert_runs_ahead,
    model_of,
    nothing_left,
    one_thread,
    right_answers,
    served,
    sides_of,
    some_requests,
    whole,
)

COMBINATIONS: list[tuple[Family, bool, bool, int, bool]] = [
    *product(["llama"], [False, True], [False, True], [0, 1, 4], [False, True]),  # type: ignore[list-item]
    *product(["qwen3"], [False, True], [True], [0, 4], [True]),  # type: ignore[list-item]
    ("qwen3", True, False, 1, False),
]
"""Model, overlapped, mixed, drafts, tight pages."""

overlapped_or_not = pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
plain_or_speculative = pytest.mark.parametrize("num_drafts", [0, 3], ids=["plain", "speculative"])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread for torch."""
    with one_thread():
        yield


@pytest.fixture
def model(device: str) -> Model:
    """The random llama."""
    return model_of("llama", device)


@pytest.fixture
def late() -> LateRuntime:
    """A device of which the host knows nothing before it waits."""
    return LateRuntime()


@pytest.fixture
def lagging_model() -> Model:
    """The model on that device."""
    return model_of("llama", "cpu")


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    """The answers as far as the host knows them."""
    return [request.output for request in requests]


def tight(settings: EngineSettings, pages: int) -> EngineSettings:
    """The same with few pages."""
    return attrs.evolve(settings, num_pages=pages)


# Tokens


@pytest.mark.parametrize(("family", "overlap", "mixed", "num_drafts", "few_pages"), COMBINATIONS)
def test_tokens_are_those_of_transformers(
    rt: Runtime, device: str, family: Family, overlap: bool, mixed: bool, num_drafts: int, few_pages: bool
) -> None:
    """In every combination of modes each answer is that of `generate`, retracted or not, and nothing waits or leaks."""
    model = model_of(family, device)
    requests = some_requests(model, 12)
    settings = attrs.evolve(
        SMALL, overlap=overlap, mixed=mixed, num_drafts=num_drafts, num_pages=28 if few_pages else 128
    )
    before = rt.counters.snapshot()
    engine = served(rt, model, requests, settings)
    assert outputs(requests) == right_answers(model, requests)
    assert (engine.scheduler.retractions > 0) == few_pages
    assert engine.in_flight_depth_max == 1 + overlap
    assert (rt.counters - before).forced_syncs == 0
    assert (engine.accepted_drafts > 5) == (num_drafts > 0)


@overlapped_or_not
@plain_or_speculative
def test_answers_end_with_eos(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """Tokens that end an answer end it there, also where they come among right guesses or in a step that runs ahead."""
    requests = some_requests(model, 16)
    eos = {answer[len(answer) // 2] for answer in right_answers(model, requests)[::2]}
    expected = right_answers(model, requests, eos)
    early = sum(len(answer) < request.max_new_tokens for answer, request in zip(expected, requests, strict=True))
    assert early >= len(requests) // 2
    served(rt, model, requests, attrs.evolve(SMALL, overlap=overlap, num_drafts=num_drafts, num_pages=32), eos)
    assert outputs(requests) == expected


@overlapped_or_not
def test_end_is_known_one_step_late(rt: Runtime, model: Model, overlap: bool) -> None:
    """Overlapped, a request whose EOS was sampled takes part in one more step, whose token is dropped."""
    request, other = some_requests(model, 2, seed=3, longest=8)
    request.max_new_tokens = other.max_new_tokens = 20
    answer = right_answers(model, [request])[0]
    eos = {answer[5]}
    expected = right_answers(model, [request, other], eos)
    engine = Engine(rt, model, attrs.evolve(SMALL, overlap=overlap), eos_token_ids=eos)
    for one in (request, other):
        engine.add(one)
    while request.state != "finished":
        engine.step()
    assert request.in_flight == int(overlap)
    assert request in engine.scheduler.batch.requests
    engine.step()
    assert request not in engine.scheduler.batch.requests
    assert request.in_flight == 0
    engine.run()
    assert outputs([request, other]) == expected
    nothing_left(engine)


@overlapped_or_not
@plain_or_speculative
def test_prebuilt_requests_go_on(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """Requests that come with their KV get the same tokens, beside others and where they are retracted again."""
    requests = some_requests(model, 12, seed=1, prebuilt_every=2)
    prebuilt = {request for request in requests if request.prebuilt is not None}
    requests[2].max_new_tokens = 1
    settings = attrs.evolve(SMALL, overlap=overlap, num_drafts=num_drafts, num_pages=28)
    expected = right_answers(model, requests)
    retracted: set[Request] = set()
    with checks("full"):
        engine = Engine(rt, model, settings)
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            retracted |= {one for one in prebuilt if one.state == "waiting" and one.prebuilt is None}
        nothing_left(engine)
    assert retracted
    assert outputs(requests) == expected


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


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size_does(rt: Runtime, model: Model, page_size: int, num_drafts: int) -> None:
    """Pages of one token, of a few and of many hold the same answers, where they suffice and where they do not."""
    requests = some_requests(model, 10, seed=2)
    settings = attrs.evolve(SMALL, page_size=page_size, num_drafts=num_drafts, num_pages=96 // page_size)
    engine = served(rt, model, requests, settings)
    assert engine.scheduler.retractions > 0
    assert outputs(requests) == right_answers(model, requests)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_any_budget_does(rt: Runtime, model: Model, tokens: int, num_drafts: int) -> None:
    """Prompts one token a step, in chunks or several at once give the same answers."""
    requests = some_requests(model, 6, seed=4, longest=24, most_new=12)
    engine = served(rt, model, requests, attrs.evolve(SMALL, max_tokens_per_step=tokens, num_drafts=num_drafts))
    assert outputs(requests) == right_answers(model, requests)
    if tokens == 1:
        assert engine.steps > sum(len(request.prompt) for request in requests)


@overlapped_or_not
@plain_or_speculative
def test_one_at_a_time(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """With room for one request they run one after the other, on the same slot."""
    requests = some_requests(model, 5, seed=5)
    served(rt, model, requests, attrs.evolve(SMALL, max_running=1, overlap=overlap, num_drafts=num_drafts))
    assert outputs(requests) == right_answers(model, requests)


def test_guesses_are_the_same_in_both_modes(rt: Runtime, model: Model) -> None:
    """Guesses hang on the tokens alone: as many are right overlapped as not, whatever the chunks of the prompt."""
    accepted = set()
    for overlap, tokens in product((False, True), (4, 32)):
        requests = some_requests(model, 3, seed=6)
        settings = attrs.evolve(SMALL, overlap=overlap, max_tokens_per_step=tokens, num_drafts=3)
        accepted.add(served(rt, model, requests, settings).accepted_drafts)
    assert len(accepted) == 1
    assert accepted.pop() > 5


# One step ahead


def watched(runtime: Runtime, model: Model, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """An engine that has served a dozen requests under watch, with room for all."""
    engine = Engine(runtime, model, settings)
    for request in some_requests(model, 12, seed=7):
        engine.add(request)
    watch = Watch(engine, monkeypatch)
    watch.run()
    return watch


ROOMY = attrs.evolve(SMALL, max_running=12, num_pages=512)


@pytest.mark.parametrize("mixed", [False, True])
@plain_or_speculative
def test_overlapped_runs_one_step_ahead(
    late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch, mixed: bool, num_drafts: int
) -> None:
    """A step is launched while the one before it runs; the host waits for nothing but the results of that, and then."""
    with checks("full"):
        watch = watched(late, lagging_model, attrs.evolve(ROOMY, mixed=mixed, num_drafts=num_drafts), monkeypatch)
    assert_runs_ahead(watch)
    nothing_left(watch.engine)


def synchronizes(run: Callable[..., RunningBatch], forward: Forward, step: Step) -> RunningBatch:
    """A forward that waits for the whole device."""
    batch = run(forward, step)
    forward.relay.runtime.synchronize()
    return batch


def resolves(run: Callable[..., RunningBatch], forward: Forward, step: Step) -> RunningBatch:
    """A forward that reads its results at once."""
    batch = run(forward, step)
    if step.results is not None:
        step.results.resolve()
    return batch


def awaits_itself(run: Callable[..., RunningBatch], forward: Forward, step: Step) -> RunningBatch:
    """A forward that waits for its own end."""
    batch = run(forward, step)
    assert step.forward_done is not None
    step.forward_done.wait()
    return batch


@pytest.mark.parametrize(
    ("accident", "found"),
    [
        (synchronizes, "the host waited for the whole device"),
        (resolves, "unread when step|waited for something"),
        (awaits_itself, "had ended when|waited for something"),
    ],
)
@plain_or_speculative
def test_accidental_waits_are_found(
    late: LateRuntime,
    lagging_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    accident: Callable[..., RunningBatch],
    found: str,
    num_drafts: int,
) -> None:
    """What the test before asserts fails as soon as a forward waits for the device, for its results or for its end."""
    run = Forward.run
    monkeypatch.setattr(Forward, "run", lambda forward, step: accident(run, forward, step))
    watch = watched(late, lagging_model, attrs.evolve(ROOMY, num_drafts=num_drafts), monkeypatch)
    with pytest.raises(AssertionError, match=found):
        assert_runs_ahead(watch)


def test_plans_that_wait_are_found(late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a wait before the launch is found, for the step before."""
    plan = Scheduler.plan

    def waiting(scheduler: Scheduler) -> Ints:
        if scheduler.last_step is not None:
            scheduler.last_step.wait()
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "plan", waiting)
    watch = watched(late, lagging_model, ROOMY, monkeypatch)
    with pytest.raises(AssertionError, match="step 0 had ended when step 1 was launched"):
        assert_runs_ahead(watch)


@plain_or_speculative
def test_synchronous_reads_each_step_at_once(
    late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Synchronous, the same loop waits for the results of each step before it plans the next, and for nothing else."""
    settings = attrs.evolve(ROOMY, overlap=False, num_drafts=num_drafts)
    watch = watched(late, lagging_model, settings, monkeypatch)
    assert len(watch.launches) > 10
    assert all(launch.waits == [launch.results] for launch in watch.launches)
    assert {launch.unread for launch in watch.launches} == {1}
    assert watch.engine.in_flight_depth_max == 1
    assert watch.forced_syncs == 0
    assert watch.drained in ([], [[]])


@pytest.mark.parametrize("settings", [SMALL, tight(SMALL, 28)], ids=["roomy", "tight"])
@plain_or_speculative
def test_overlapped_hides_no_synchronisation(
    rt: Runtime, model: Model, settings: EngineSettings, num_drafts: int
) -> None:
    """From the first request to the last nothing waits for the device but calls that are named for it."""
    requests = some_requests(model, 8, prebuilt_every=3)
    engine = Engine(rt, model, attrs.evolve(settings, num_drafts=num_drafts))
    before = rt.counters.snapshot()
    with no_hidden_sync(rt):
        for request in requests:
            engine.add(request)
        engine.run()
    assert (rt.counters - before).forced_syncs == 0
    assert outputs(requests) == right_answers(model, requests)


@overlapped_or_not
@plain_or_speculative
def test_lagging_device_changes_no_token(
    late: LateRuntime, lagging_model: Model, overlap: bool, num_drafts: int
) -> None:
    """Where every fence is late, long prompts, prebuilt requests and few pages run no deeper than was declared."""
    requests = some_requests(lagging_model, 12, prebuilt_every=3)
    settings = attrs.evolve(SMALL, max_tokens_per_step=16, overlap=overlap, num_drafts=num_drafts, num_pages=28)
    engine = served(late, lagging_model, requests, settings)
    assert engine.scheduler.retractions > 0
    assert outputs(requests) == right_answers(lagging_model, requests)
    assert late.counters.forced_syncs == 0


# What a step costs


@overlapped_or_not
@plain_or_speculative
def test_step_costs_one_copy_each_way(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, overlap: bool, num_drafts: int
) -> None:
    """A step of decodes is one copy to the device and one back; ids of prompts cross in one more."""
    settings = attrs.evolve(ROOMY, overlap=overlap, num_drafts=num_drafts, max_tokens_per_step=64)
    with checks("cheap"):
        watch = watched(rt, model, settings, monkeypatch)
    decodes = [launch for launch in watch.launches if launch.decodes_alone]
    prompts = [launch for launch in watch.launches if not launch.decodes_alone]
    assert len(decodes) > 5
    assert {(launch.uploaded, launch.downloaded) for launch in decodes} == {(1, 1)}
    assert len(prompts) > 2
    assert {(launch.uploaded, launch.downloaded) for launch in prompts} <= {(2, 0), (2, 1)}
    assert watch.forced_syncs == 0


# Lengths


def test_bounds_bound_what_is_true(rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped and speculative, the host has upper bounds while a step is in flight, the device what is true."""
    engine = Engine(rt, model, attrs.evolve(SMALL, num_drafts=3))
    for request in some_requests(model, 8, seed=8):
        engine.add(request)
    watch = Watch(engine, monkeypatch)
    loose = 0
    with checks("full"):
        while engine.busy:
            launched = watch.step()
            lengths = engine.scheduler.batch.seq_lens
            if launched and watch.launches[-1].step.results is not None:
                assert lengths.contract is Contract.UPPER_BOUND
                true = rt.inspect(lengths.device)
                assert (true <= lengths.np).all()
                loose += int((true < lengths.np).sum())
    assert loose > 10
    for launch in watch.launches:
        step = launch.step
        if step.results is not None:
            true = step.results["seq_lens"].np
            assert (true <= step.plan.seq_lens[step.plan.sample_rows]).all()


def test_lengths_are_exact_after_a_synchronous_decode(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronous, both sides hold the true lengths again when the results of a decode step have been read."""
    engine = Engine(rt, model, attrs.evolve(SMALL, num_drafts=3, overlap=False))
    for request in some_requests(model, 8, seed=8):
        engine.add(request)
    watch = Watch(engine, monkeypatch)
    exact = 0
    with checks("full"):
        while engine.busy:
            watch.step()
            batch = engine.scheduler.batch
            if watch.launches[-1].decodes_alone:
                exact += len(batch)
                assert batch.seq_lens.contract is Contract.EXACT
                assert rt.inspect(batch.seq_lens.device).tolist() == batch.seq_lens.np.tolist()
                for request, length in zip(batch.requests, batch.seq_lens.np.tolist(), strict=True):
                    assert request.state == "finished" or length == request.kv_len
    assert exact > 20


@plain_or_speculative
def test_forward_changes_no_side_of_the_batch(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """What a forward sets right is its own view: the batch it was given has the same sides before and after."""
    engine = Engine(rt, model, attrs.evolve(SMALL, num_drafts=num_drafts))
    for request in some_requests(model, 8, seed=9):
        engine.add(request)
    run, compared = engine.scheduler.forward.run, 0

    def compare(step: Step) -> RunningBatch:
        nonlocal compared
        before = sides_of(step.batch)
        after = run(step)
        for name, (device, writes, on_device, on_host) in sides_of(step.batch).items():
            assert device is before[name][0]
            assert writes == before[name][1], f"the forward wrote into {name}"
            np.testing.assert_array_equal(on_device, before[name][2])
            np.testing.assert_array_equal(on_host, before[name][3])
            compared += len(on_host)
        step.batch.check()
        return after

    monkeypatch.setattr(engine.scheduler.forward, "run", compare)
    with checks("full"):
        engine.run()
    assert compared > 100


# Coming and going


def state_of(engine: Engine, requests: Sequence[Request]) -> tuple[object, ...]:
    """All that a refused call must leave alone."""
    scheduler = engine.scheduler
    return (
        [(one.state, list(one.output), one.in_flight, one.prebuilt) for one in requests],
        list(scheduler.batch.requests),
        list(scheduler.waiting),
        scheduler.batch.version,
        scheduler.slots.stats,
        scheduler.pages.stats,
        engine.steps,
        list(scheduler.writes),
    )


def until(engine: Engine, reached: Callable[[], bool]) -> None:
    """Steps until something is so."""
    while not reached():
        assert engine.step(), "nothing left to run, and it has not happened"


@overlapped_or_not
@plain_or_speculative
def test_waiting_and_running_requests_are_aborted(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """A client may hang up while its request waits, runs or is in flight: others go on, and nothing stays behind."""
    requests = some_requests(model, 6, seed=10)
    for request in requests:
        request.max_new_tokens = 20
    expected = right_answers(model, requests)
    waits, runs, fills = requests[5], requests[1], requests[4]
    settings = attrs.evolve(SMALL, max_running=5, overlap=overlap, num_drafts=num_drafts, max_tokens_per_step=24)
    known: dict[Request, list[int]] = {}

    def hang_up(request: Request) -> None:
        engine.abort(request.number)
        assert request.state == "aborted"
        known[request] = list(request.output)

    with checks("full"):
        engine = Engine(rt, model, settings)
        for request in requests:
            engine.add(request)
        until(engine, lambda: fills.state == "running")
        assert waits.state == "waiting"
        assert not fills.output
        hang_up(waits)
        hang_up(fills)
        until(engine, lambda: len(runs.output) > 3)
        assert runs.in_flight == int(overlap)
        hang_up(runs)
        engine.step()
        assert runs not in engine.scheduler.batch.requests
        engine.run()
        nothing_left(engine)
    for request, answer in zip(requests, expected, strict=True):
        if request in known:
            assert request.output == known[request] == answer[: len(known[request])]
            assert (request.in_flight, request.state) == (0, "aborted")
        else:
            assert request.output == answer


@overlapped_or_not
@plain_or_speculative
def test_retracted_requests_are_aborted(rt: Runtime, model: Model, overlap: bool, num_drafts: int) -> None:
    """A retracted request may be aborted too, with all tokens that came before and after it was retracted."""
    requests = some_requests(model, 8, seed=11)
    for request in requests:
        request.max_new_tokens = 20
    expected = right_answers(model, requests)
    aborted: dict[Request, list[int]] = {}
    with checks("full"):
        engine = Engine(rt, model, attrs.evolve(SMALL, overlap=overlap, num_drafts=num_drafts, num_pages=28))
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            back = [one for one in engine.scheduler.waiting if one.output]
            if back and len(aborted) < 2:
                aborted[back[0]] = list(back[0].output)
                engine.abort(back[0].number)
                assert back[0] not in engine.scheduler.waiting
        nothing_left(engine)
    assert len(aborted) == 2
    for request, answer in zip(requests, expected, strict=True):
        assert request.output == answer[: len(aborted[request])] if request in aborted else request.output == answer


@plain_or_speculative
def test_answers_may_end_while_their_requests_wait(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """A request that is retracted with its last token in flight is finished when that is read, and never comes back."""
    requests = some_requests(model, 24, seed=12, longest=12)
    engine = Engine(rt, model, attrs.evolve(SMALL, num_pages=20, num_drafts=num_drafts))
    for request in requests:
        engine.add(request)
    run = engine.scheduler.forward.run
    left_in_flight: set[Request] = set()

    def look(step: Step) -> RunningBatch:
        left_in_flight.update(one for one in engine.scheduler.waiting if one.in_flight)
        return run(step)

    monkeypatch.setattr(engine.scheduler.forward, "run", look)
    ended = 0
    with checks("full"):
        while engine.busy:
            left_in_flight.clear()
            engine.step()
            ended += sum(one.state == "finished" for one in left_in_flight)
        nothing_left(engine)
    assert ended
    assert outputs(requests) == right_answers(model, requests)


@overlapped_or_not
def test_refusals_change_nothing(rt: Runtime, model: Model, overlap: bool) -> None:
    """Unknown and finished requests, numbers twice and lengths that never fit are typed errors that change nothing."""
    first, second, *others = some_requests(model, 6, seed=13)
    first.max_new_tokens = 2
    second.max_new_tokens = 20
    engine = Engine(rt, model, attrs.evolve(SMALL, overlap=overlap, max_running=2))
    for request in (first, second, *others):
        engine.add(request)
    until(engine, lambda: first.state == "finished")
    requests = [first, second, *others]
    gone = others.pop()
    engine.abort(gone.number)
    long = Request(90, [1] * 50, 15)
    known = prefill(model, [1, 2, 3])
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: engine.abort(77), "abort of request 77, which is not here"),
        (lambda: engine.abort(first.number), f"abort of request {first.number}, which is not here"),
        (lambda: engine.abort(gone.number), f"abort of request {gone.number}, which is not here"),
        (lambda: engine.add(second), f"request {second.number} is here already"),
        (lambda: engine.add(others[0]), f"request {others[0].number} is here already"),
        (lambda: engine.add(first), "or has run"),
        (lambda: engine.add(gone), "or has run"),
        (lambda: engine.add(Request(second.number, [5], 1)), f"request {second.number} is here already"),
        (lambda: engine.add(Request(second.number, [1, 2, 3], 4, known)), "here already"),
        (lambda: engine.add(long), "50 tokens and 15 new ones"),
        (lambda: engine.add(Request(91, [], 1)), "0 tokens and 1 new ones"),
        (lambda: engine.add(Request(92, [1], 0)), "1 tokens and 0 new ones"),
        (lambda: engine.add(Request(93, [1] * 3, 62, known)), "3 tokens and 62 new ones"),
    ]
    for action, message in refused:
        before = state_of(engine, [*requests, long])
        with pytest.raises(ArgumentError, match=message) as caught:
            action()
        assert caught.value.remedy
        assert state_of(engine, [*requests, long]) == before
    engine.run()
    nothing_left(engine)
    going = [one for one in requests if one is not gone]
    assert outputs(going) == right_answers(model, going)


@overlapped_or_not
@plain_or_speculative
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
        while engine.busy:
            engine.step()
            scheduler = engine.scheduler
            for _ in range(3):
                rt.synchronize()
                kv, live = model.read_kv(rows), scheduler.slots.live_slots()
                slots = scheduler.batch.slots.np.copy()
                engine.idle()
                rt.synchronize()
                assert all(map(torch.equal, sum(kv, ()), sum(model.read_kv(rows), ())))
                assert scheduler.slots.live_slots().tolist() == live.tolist()
                assert scheduler.batch.slots.np.tolist() == slots.tolist()
        engine.idle()
        engine.run()
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
    engine.run()
    nothing_left(engine)


@overlapped_or_not
@plain_or_speculative
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
        engine = Engine(rt, model, settings)
        for request in (other, long):
            engine.add(request)
        while engine.busy:
            batch = engine.scheduler.batch
            put_in = {one: int(batch.seq_lens.np[row]) for row, one in enumerate(batch.requests)}
            engine.step()
            if long in put_in and long.state == "waiting":
                cut.append(put_in[long])
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


# Two fences


def test_table_is_free_behind_read_done(
    late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token table is rewritten behind the last forward's read-done, long before its forward-done."""
    engine = Engine(late, lagging_model, SMALL)
    for request in some_requests(lagging_model, 3, seed=17, longest=8):
        engine.add(request)
    table, run = engine.scheduler.pages.token_table, engine.scheduler.forward.run
    assert table is not None
    read_until, read_done, steps = table.read_until, list[Fence](), list[Step]()

    def noted_read(fence: Fence) -> None:
        read_done.append(fence)
        read_until(fence)

    def at_launch(step: Step) -> RunningBatch:
        if steps:  # this step's writes to the table have been sent on their way
            before = steps[-1]
            assert before.forward_done is not None
            assert not read_done[-1].query()
            late.record().wait()  # on the stream that wrote
            assert read_done[-1].query(), "the table was written before its reader had read"
            assert not before.forward_done.query(), "the table was held until the end of the forward"
        steps.append(step)
        return run(step)

    monkeypatch.setattr(table, "read_until", noted_read)
    monkeypatch.setattr(engine.scheduler.forward, "run", at_launch)
    engine.run()
    assert len(steps) == len(read_done) > 5


def test_slots_change_hands_behind_forward_done(late: LateRuntime, lagging_model: Model) -> None:
    """What a request leaves is nobody's until the last forward that was launched with it has ended."""
    short, long, next_one = some_requests(lagging_model, 3, seed=18, longest=8)
    short.max_new_tokens, long.max_new_tokens = 3, 20
    engine = Engine(late, lagging_model, attrs.evolve(SMALL, max_running=3))
    for request in (short, long):
        engine.add(request)
    scheduler = engine.scheduler
    until(engine, lambda: short.state == "finished")
    slot = int(scheduler.batch.slots.np[list(scheduler.batch.requests).index(short)])
    last_with_it = scheduler.last_step
    engine.add(next_one)
    engine.step()
    assert last_with_it is not None
    assert next_one.state == "running"
    assert slot not in scheduler.batch.slots.np
    assert slot not in scheduler.slots.live_slots()
    assert not last_with_it.query()
    assert scheduler.slots.stats.pending == 1
    assert scheduler.pages.stats.pending > 0
    last_with_it.wait()
    assert scheduler.slots.stats.pending == scheduler.pages.stats.pending == 0
    engine.run()
    nothing_left(engine)


def test_who_needs_a_pending_slot_waits_for_its_fence(
    late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot, the next request waits for the forward of the last one to end, and for nothing else."""
    requests = some_requests(lagging_model, 4, seed=19, longest=8)
    engine = Engine(late, lagging_model, attrs.evolve(SMALL, max_running=1))
    for request in requests:
        engine.add(request)
    watch = Watch(engine, monkeypatch)
    watch.run()
    handed_over = 0
    for before, launch in zip(watch.launches, watch.launches[1:], strict=False):
        if before.step.batch.requests[0] is not launch.step.batch.requests[0]:
            handed_over += 1
            assert launch.before_ended
            assert launch.step.batch.slots.np.tolist() == before.step.batch.slots.np.tolist()
        else:
            assert not launch.before_ended
    assert handed_over == 3
    assert outputs(requests) == right_answers(lagging_model, requests)
    whole(engine)
