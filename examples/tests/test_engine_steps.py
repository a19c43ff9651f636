"""Steps of the engine example: one ahead or not, what each costs, and what is known and free when."""

from collections import Counter
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from batchstate import Contract, checks
from batchstate.runtime import Runtime
from batchstate.testing import LateRuntime, no_hidden_sync

pytest.importorskip("transformers")

from examples.engine.batch import RunningBatch, Step
from examples.engine.engine import Engine
from examples.engine.forward import Forward
from examples.engine.model import Model
from examples.engine.scheduler import Scheduler, Turn
from examples.engine.settings import EngineSettings
from examples.tests.engine_cases import (
    SMALL,
    Watch,
    assert_runs_ahead,
    busy,
    nothing_left,
    outputs,
    overlapped_or_not,
    plain_or_speculative,
    right_answers,
    run_all,
    sides_of,
    some_requests,
    started,
    until,
    whole,
)

# One step ahead


def watched(runtime: Runtime, model: Model, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """An engine that has served a dozen requests under watch, with room for all."""
    engine = started(runtime, model, settings, some_requests(model, 12, seed=7))
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
    ("accident", "num_drafts", "message"),
    [
        (synchronizes, 0, "the host waited for the whole device"),
        (resolves, 3, "unread when step|waited for something"),
        (awaits_itself, 0, "had ended when|waited for something"),
    ],
)
def test_accidental_waits_are_found(
    late: LateRuntime,
    lagging_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    accident: Callable[..., RunningBatch],
    message: str,
    num_drafts: int,
) -> None:
    """The assertions of the test before fail once a forward waits for the device, for its results or for its end."""
    run = Forward.run
    monkeypatch.setattr(Forward, "run", lambda forward, step: accident(run, forward, step))
    watch = watched(late, lagging_model, attrs.evolve(ROOMY, num_drafts=num_drafts), monkeypatch)
    with pytest.raises(AssertionError, match=message):
        assert_runs_ahead(watch)


def test_plans_that_wait_are_found(late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a wait before the launch is found, for the step before."""
    plan = Scheduler.plan

    def waiting(scheduler: Scheduler) -> Turn:
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


@plain_or_speculative
def test_overlapped_hides_no_synchronisation(rt: Runtime, model: Model, num_drafts: int) -> None:
    """From the first request to the last nothing waits for the device but calls that are named for it."""
    requests = some_requests(model, 8, prebuilt_every=3)
    engine = Engine(rt, model, attrs.evolve(SMALL, num_pages=28, num_drafts=num_drafts))
    before = rt.counters.snapshot()
    with no_hidden_sync(rt):
        for request in requests:
            engine.add(request)
        run_all(engine)
    assert (rt.counters - before).forced_syncs == 0
    assert outputs(requests) == right_answers(model, requests)


# The cost of a step


@overlapped_or_not
@plain_or_speculative
def test_step_costs_one_copy_each_way(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, overlap: bool, num_drafts: int
) -> None:
    """A step is one copy to the device, ids of prompts included, and one back if a request samples."""
    settings = attrs.evolve(ROOMY, overlap=overlap, num_drafts=num_drafts, max_tokens_per_step=64)
    with checks("cheap"):
        watch = watched(rt, model, settings, monkeypatch)
    decodes = [launch for launch in watch.launches if launch.decodes_alone]
    prompts = [launch for launch in watch.launches if not launch.decodes_alone]
    assert len(decodes) > 5
    assert {(launch.uploaded, launch.downloaded) for launch in decodes} == {(1, 1)}
    assert len(prompts) > 2
    assert {(launch.uploaded, launch.downloaded) for launch in prompts} <= {(1, 0), (1, 1)}
    assert watch.forced_syncs == 0


@plain_or_speculative
def test_no_token_is_sampled_in_vain(
    rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Whose full answer is on its way takes part in no further step; with guesses that is known one step later."""
    watch = watched(rt, model, attrs.evolve(ROOMY, num_drafts=num_drafts), monkeypatch)
    sampled = Counter(request for launch in watch.launches for request in launch.step.sampling)
    assert len(sampled) == 12
    if num_drafts:
        assert all(times <= request.max_new_tokens + 1 for request, times in sampled.items())
    else:
        assert all(times == request.max_new_tokens for request, times in sampled.items())


# Lengths


def test_bounds_bound_what_is_true(rt: Runtime, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped and speculative, the host has upper bounds while a step is in flight, the device what is true."""
    engine = started(rt, model, attrs.evolve(SMALL, num_drafts=3), some_requests(model, 8, seed=8))
    watch = Watch(engine, monkeypatch)
    loose = 0
    with checks("full"):
        while busy(engine):
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
    engine = started(rt, model, attrs.evolve(SMALL, num_drafts=3, overlap=False), some_requests(model, 8, seed=8))
    watch = Watch(engine, monkeypatch)
    exact = 0
    with checks("full"):
        while busy(engine):
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
    """A forward sets right its own view alone: the batch it was given has the same sides before and after."""
    engine = started(rt, model, attrs.evolve(SMALL, num_drafts=num_drafts), some_requests(model, 8, seed=9))
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
        run_all(engine)
    assert compared > 100


# Two fences


def test_slots_change_hands_behind_forward_done(late: LateRuntime, lagging_model: Model) -> None:
    """Slots and pages that a request leaves are pending until the last forward that was launched with it has ended."""
    short, long, next_one = some_requests(lagging_model, 3, seed=18, longest=8)
    short.max_new_tokens, long.max_new_tokens = 3, 20
    engine = started(late, lagging_model, attrs.evolve(SMALL, max_running=3), [short, long])
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
    run_all(engine)
    nothing_left(engine)


def test_who_needs_a_pending_slot_waits_for_its_fence(
    late: LateRuntime, lagging_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot, the next request waits for the forward of the last one to end, and for nothing else."""
    requests = some_requests(lagging_model, 4, seed=19, longest=8)
    engine = started(late, lagging_model, attrs.evolve(SMALL, max_running=1), requests)
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
