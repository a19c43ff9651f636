"""Traffic: an engine without a model serves requests, and the batch state costs and loses nothing."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing import LateRuntime
from examples.traffic import (
    EngineSettings,
    RunningBatch,
    TrafficEngine,
    TrafficProgress,
    TrafficReport,
    TrafficRun,
    Workload,
    fitted_workload,
    run_traffic,
)
from examples.traffic.scheduler import chunk_lengths, rows_that_fit

TINY = EngineSettings(max_running=8, max_tokens_per_step=24, page_size=4, num_pages=30, step_seconds=1.0)


def workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests by arrival, prompt tokens, answer tokens."""
    arrival, context, generated = zip(*rows, strict=True)
    return Workload(np.array(arrival), np.array(context, np.int64), np.array(generated, np.int64))


def many(count: int, seed: int = 0) -> Workload:
    """Requests that crowd the tiny engine: up to 60 tokens each, two a step."""
    rng = np.random.default_rng(seed)
    return Workload(np.sort(rng.uniform(0, count / 2, count)), rng.integers(1, 24, count), rng.integers(8, 40, count))


def outcome(report: TrafficReport) -> dict:
    """All of a report that does not depend on the machine's speed."""
    figures = report.as_dict()
    for timing in ("seconds", "host_us_per_step", "laws_asked"):  # a fence that is late is asked again
        figures.pop(timing)
    return figures


def test_every_token_is_generated_once(rt: Runtime) -> None:
    """All requests are answered in full, and each token is generated exactly once."""
    hour = fitted_workload(60, seed=1)
    report = run_traffic(hour, device=rt)
    assert report.clean
    assert report.finished == report.requests == 60
    assert report.tokens == report.tokens_delivered == hour.total_generated
    # The last token of an answer is generated but never computed: nobody asks what follows it.
    assert report.prefill_tokens + report.tokens == (hour.context_tokens + hour.generated_tokens - 1).sum()
    assert report.retractions == 0


def test_retraction_repeats_no_token(rt: Runtime) -> None:
    """Where pages run out again and again, KV is computed anew, but no token is generated twice."""
    crowd = many(60)
    report = run_traffic(crowd, device=rt, settings=TINY)
    assert report.clean, report.broken
    assert report.retractions > 20
    assert report.finished == 60
    assert report.tokens == report.tokens_delivered == crowd.total_generated
    assert report.prefill_tokens > crowd.context_tokens.sum()


def test_step_costs_one_copy_and_one_operation(rt: Runtime) -> None:
    """Every step, whoever leaves, joins or is retracted: one copy, at most one device operation, no sync."""
    report = run_traffic(many(60), device=rt, settings=TINY, aborts=0.3)
    assert report.host_to_device_copies_per_step == report.most_host_to_device_copies == 1
    assert report.device_operations_per_step <= 1
    assert report.most_device_operations == 1
    assert report.forced_syncs == 0


@pytest.mark.parametrize(("count", "aborts", "least"), [(80, 0.6, 10), (30, 1.0, 1)])
def test_aborts_give_everything_back(rt: Runtime, count: int, aborts: float, least: int) -> None:
    """Clients that hang up while they wait, prefill or decode, even all of them, leave no slot and no page behind."""
    crowd = many(count, seed=4)
    report = run_traffic(crowd, device=rt, settings=TINY, aborts=aborts, seed=2)
    assert report.clean, report.broken
    assert report.aborted > least
    assert report.finished + report.aborted == count
    assert report.tokens == report.tokens_delivered < crowd.total_generated


def test_seed_settles_everything(device: str) -> None:
    """The same workload and seed give the same run; another seed of aborts another."""
    crowd = many(40)
    first, same, other = (run_traffic(crowd, device=device, settings=TINY, aborts=0.5, seed=seed) for seed in (7, 7, 8))
    assert outcome(first) == outcome(same)
    assert outcome(first) != outcome(other)


def test_slow_device_changes_no_decision() -> None:
    """Where nothing is complete before the host waits for it, the run is the same, and nothing is lost."""
    crowd = many(60)
    slow = run_traffic(crowd, device=LateRuntime(), settings=TINY, aborts=0.2)
    quick = run_traffic(crowd, settings=TINY, aborts=0.2)
    assert slow.clean, slow.broken
    assert slow.retractions > 0
    # Whoever asks a pool too early asks twice, and the laws with it.
    assert outcome(attrs.evolve(slow, laws_asked=0)) == outcome(attrs.evolve(quick, laws_asked=0))


def test_full_checks_find_nothing(rt: Runtime) -> None:
    """At level `full`, where both sides are compared again and again, a crowded run is clean and decides the same."""
    crowd = many(20)
    full = run_traffic(crowd, device=rt, settings=TINY, checks="full")
    off = run_traffic(crowd, device=open_runtime(rt.device), settings=TINY, checks="off")
    assert full.clean, full.broken
    assert (full.steps, full.retractions, full.tokens) == (off.steps, off.retractions, off.tokens)
    assert full.laws_asked > off.laws_asked
    assert levels.current_checks() is levels.Level.CHEAP


def test_device_has_what_the_host_planned(rt: Runtime) -> None:
    """After every step, the table on the device names the pages of each running request, each token for one of them."""
    run = TrafficRun(many(25), rt, settings=TINY)
    engine = run.engine
    while run.step():
        batch = engine.batch
        table = rt.inspect(engine.req_to_token.memory)
        seen: set[int] = set()
        for slot, length in zip(batch.slots.np.tolist(), batch.seq_lens.np.tolist(), strict=True):
            tokens = table[slot, :length]
            pages = engine.pages.page_table[slot, : -(-length // TINY.page_size)]
            assert tokens.tolist() == [
                int(pages[position // TINY.page_size]) * TINY.page_size + position % TINY.page_size
                for position in range(length)
            ]
            assert seen.isdisjoint(tokens.tolist())
            seen.update(tokens.tolist())
        assert not any(token < TINY.page_size for token in seen)
        for column in ("slots", "seq_lens", "temperature", "lora_id"):
            np.testing.assert_array_equal(rt.inspect(batch[column].device), batch[column].np)


def test_youngest_is_retracted_and_comes_back_first(rt: Runtime) -> None:
    """When pages run out, the youngest request waits again, ahead of those that never ran."""
    # Five pages of four tokens: two requests fit at first, and grow to four pages each.
    small = EngineSettings(max_running=4, max_tokens_per_step=24, page_size=4, num_pages=5, step_seconds=1.0)
    run = TrafficRun(workload((0, 6, 8), (0, 6, 8), (0, 6, 8)), rt, settings=small)
    while not run.engine.retractions:
        assert run.step()
    assert [request.request_id for request in run.engine.batch.requests] == [0]
    assert [request.request_id for request in run.engine.waiting] == [1, 2]
    assert run.engine.waiting[0].num_generated > 0
    while run.step():
        pass
    assert run.engine.finished == 3


def test_long_prompt_is_computed_in_chunks(rt: Runtime) -> None:
    """A prompt longer than a step is cut, and whoever decodes meanwhile goes on decoding."""
    run = TrafficRun(workload((0, 2, 10), (0.5, 50, 1)), rt, settings=TINY)
    lengths = []
    while run.step():
        batch = run.engine.batch
        lengths.append({one.request_id: batch.seq_lens.np[row] for row, one in enumerate(batch.requests)})
    assert [at[1] for at in lengths if 1 in at] == [23, 46, 50]
    assert [at[0] for at in lengths if 0 in at] == list(range(2, 12))


def test_clock_jumps_over_silence(rt: Runtime) -> None:
    """Where nobody is there, no step is made."""
    report = run_traffic(workload((0, 3, 2), (1000, 3, 2)), device=rt, settings=TINY)
    assert report.steps == 4
    assert report.simulated_seconds > 1000


def test_batch_has_at_least_12_columns() -> None:
    """The batch is as wide as an engine's."""
    assert len(RunningBatch.columns()) >= 12


def test_request_that_can_never_run_is_refused() -> None:
    """A request larger than all pages together is refused before anything runs."""
    with pytest.raises(ArgumentError, match="needs 33 pages for 130 tokens; there are 30"):
        run_traffic(workload((0, 100, 30)), settings=TINY)


def test_request_as_large_as_the_pool_runs(rt: Runtime) -> None:
    """A request that needs every page runs, alone."""
    report = run_traffic(workload((0, 5, 5), (0, 100, 20), (0, 5, 5)), device=rt, settings=TINY)
    assert report.clean, report.broken
    assert report.finished == 3


@pytest.mark.parametrize(
    "wrong",
    [{"max_running": 0}, {"page_size": 0}, {"num_pages": -1}, {"step_seconds": -1.0}, {"max_tokens_per_step": 7}],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    """Sizes of nothing, times before now and steps too small to decode raise a typed error that names the value."""
    with pytest.raises(ArgumentError, match=str(next(iter(wrong.values())))):
        attrs.evolve(TINY, **wrong)


def test_progress_is_reported(rt: Runtime) -> None:
    """`progress` hears where the run is, the end included."""
    heard: list[TrafficProgress] = []
    run_traffic(many(40), device=rt, settings=TINY, progress=heard.append)
    assert [at.done for at in heard] == sorted(at.done for at in heard)
    assert heard[-1].done == heard[-1].requests == 40


def test_hang_up_of_a_finished_request_is_no_news(rt: Runtime) -> None:
    """An abort that comes too late changes nothing."""
    run = TrafficRun(workload((0, 3, 1)), rt, settings=TINY)
    engine: TrafficEngine = run.engine
    while run.step():
        pass
    engine.abort(run.requests[0])
    assert (engine.finished, engine.aborted, engine.busy) == (1, 0, False)


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 60))
def test_chunks_fill_the_budget(remaining: list[int], spare: int) -> None:
    """Each row that decodes gets its token; prompts get the rest, oldest first, until nothing is left."""
    lengths = np.array(remaining, np.int64)
    budget = len(remaining) + spare
    chunks = chunk_lengths(lengths, budget)
    assert ((chunks >= 0) & (chunks <= lengths)).all()
    assert (chunks[lengths == 1] == 1).all()
    assert chunks.sum() == min(budget, lengths.sum())
    prompts = lengths > 1
    cut = np.flatnonzero(chunks[prompts] < lengths[prompts])
    assert not chunks[prompts][cut[1:]].any()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=10),
    st.integers(0, 20),
)
def test_rows_that_fit_are_the_most_that_do(rows: list[tuple[int, int]], available: int) -> None:
    """The oldest rows that fit with the pages of the younger ones; one row more would not."""
    new = np.array([row[0] for row in rows], np.int64)
    owned = np.array([row[1] for row in rows], np.int64)
    fitting = [kept for kept in range(len(rows) + 1) if new[:kept].sum() <= available + owned[kept:].sum()]
    assert rows_that_fit(new, owned, available) == max(fitting)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_small_traffic_is_served(data: st.DataObject) -> None:
    """Whatever arrives, whatever the sizes: all is served or aborted, nothing is lost, nothing is broken."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    sizes = EngineSettings(
        max_running=data.draw(st.integers(1, 5)),
        max_tokens_per_step=data.draw(st.integers(5, 20)),
        page_size=page_size,
        num_pages=data.draw(st.integers(-(-24 // page_size), 40)),
        step_seconds=1.0,
    )
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 16), st.integers(1, 8)), min_size=1, max_size=9)
    )
    report = run_traffic(
        workload(*sorted(rows)),
        settings=sizes,
        aborts=data.draw(st.sampled_from([0.0, 0.5])),
        checks=data.draw(st.sampled_from(["cheap", "full"])),
    )
    assert report.clean, report.broken
    assert report.finished + report.aborted == len(rows)
    assert report.most_host_to_device_copies == 1
