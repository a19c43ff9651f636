"""A whole decode step, counted: no copy, launch, allocation or call of torch for a column, and none more with time."""

import gc
import sys
import tracemalloc
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, ForwardPlan, FutureMap, PagePool, Runtime, SlotPool, checks, mirrored, slot_column
from batchstate.future_map import relay_field
from batchstate.runtime import open_runtime
from batchstate.tables import Table, TableWrite
from benchmarks.baselines.request_loops import PAGE_SIZE
from benchmarks.baselines.twin_columns import TENSORS
from benchmarks.counts import COLUMNS, LIMITS, TorchOperations, counted_steps
from benchmarks.decode_steps import Scene
from benchmarks.steady_steps import Steady
from benchmarks.whole_steps import EngineState
from tests.doubles import FakeEvent, FakeModule, FakeStream, fake_accelerator

SMALL = 32
"""Rows: counts do not depend on them."""
LIFE = 4
"""Steps that a request lives in a batch of that size, of which eight leave in each step."""
MANY = 100 * LIFE


class Decode(Batch):
    """What a decode step has at the least."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    bound = mirrored(torch.int64)


SMALLEST = 90
"""Bytes, and less than the smallest array takes. numpy fills lists of freed memory meanwhile, with half of that."""


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_a_step_keeps_its_limits(rt: Runtime, num_columns: int, level: str) -> None:
    """Leave, join, advance, pages, table: one copy, one operation, one allocation, and nothing waits."""
    with checks(level):
        counts = {one.counted: one for one in counted_steps(rt, num_columns=num_columns, rows=SMALL)}
    assert set(LIMITS) < set(counts)
    assert [one for one in counts.values() if one.met is False] == []
    assert counts["host_to_device_copies"].count == counts["device_operations"].count == 1


def test_a_second_copy_is_counted(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload more in a step misses the limit, and the torch calls show it too."""
    right = EngineState.step
    before = {one.counted: one.count for one in counted_steps(rt, num_columns=2, rows=SMALL)}

    def wasteful(self: EngineState) -> object:
        self.batch.advance("seq_lens", 1).upload()
        return right(self)

    monkeypatch.setattr(EngineState, "step", wasteful)
    after = {one.counted: one for one in counted_steps(rt, num_columns=2, rows=SMALL)}
    assert (after["host_to_device_copies"].count, after["host_to_device_copies"].met) == (2, False)
    assert after["torch_operations"].count > before["torch_operations"]


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_columns_add_no_call_of_torch(rt: Runtime, level: str) -> None:
    """Each call costs microseconds wherever it runs; 2, 12 and 40 columns make the same ones in the same order."""
    made = []
    for num_columns in COLUMNS:
        state = EngineState(rt, num_columns=num_columns, rows=SMALL)
        with checks(level):
            for _ in range(4):  # until each block of staging memory has been one of this size
                state.step()
            rt.synchronize()
            with TorchOperations() as operations:
                state.step()
        made.append(operations.names)
    assert made[0] == made[1] == made[2]
    assert 0 < len(made[0]) < 30


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_host_memory_of_a_step_does_not_grow_with_steps(rt: Runtime, level: str) -> None:
    """After requests have come and gone, a step takes no more memory than before, and keeps none of it."""
    state = EngineState(rt, num_columns=12, rows=SMALL)
    with checks(level):
        for _ in range(2 * LIFE):
            state.step()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            early, kept_early, _ = _memory(state, 32 * LIFE)
            late, kept_late, cycles = _memory(state, MANY)
        finally:
            tracemalloc.stop()
            gc.enable()
    assert 0 < late <= early + 1_024
    assert kept_late - kept_early < MANY * SMALLEST
    assert cycles == 0, "what a step leaves behind waits for no garbage collector"


def test_arrays_that_are_kept_are_noticed(rt: Runtime) -> None:
    """The measurement sees a step that keeps a small array, and one that leaves a cycle."""
    kept = []

    class Hoarder:
        def step(self) -> None:
            kept.append(np.empty(0))
            cycle: list[object] = []
            cycle.append(cycle)

    gc.disable()
    tracemalloc.start()
    try:
        _, before, _ = _memory(Hoarder(), LIFE)
        _, after, cycles = _memory(Hoarder(), MANY)
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before > MANY * SMALLEST
    assert cycles == MANY


def calls_of_a_step_of_parts(rt: Runtime, rows: int) -> Counter[str]:
    """Python functions of the library that a steady decode step calls, composed of its parts; how often each."""
    pool = SlotPool(rt, rows)
    table = pool.table("req_to_token", (64,), torch.int32, holds="location")
    pages = PagePool(rt, pool, 4 * rows, 16, max_tokens_per_request=64, req_to_token=table)
    relay = FutureMap(pool, {"last_token": relay_field(torch.int64, read_by="both")})
    slots, lens = pool.take(rows), np.full(rows, 17)
    pages.extend(slots, lens)
    relay.publish(slots, last_token=np.ones(rows, np.int64))
    batch = Decode.build(rt, slots=slots, seq_lens=lens, bound=lens)

    def step() -> None:
        nonlocal batch
        rt.next_step()
        batch = batch.next_batch(advance="seq_lens")
        grown = pages.advance(batch.slots, 1)
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=pages)
        uploaded = batch.upload(writes=[grown.entry()], extras=plan.extras)
        inputs = relay.resolve_forward_inputs(plan, uploaded, ids="last_token")
        relay.publish(plan.sampled_slots, last_token=inputs.input_ids + 1)
        relay.prefetch(plan.sampled_slots, "last_token")["last_token"].np.sum()

    for _ in range(8):
        step()
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/batchstate/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


MOST_OF_A_BATCH = {"off": (41, 7), "cheap": (46, 13)}
"""Python calls, and calls of numpy, of a decode step of the batch alone: leave, join, advance, upload."""


@pytest.mark.parametrize("level", list(MOST_OF_A_BATCH))
def test_calls_of_the_batch_alone(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many for 12 columns of 16 rows as for 40 of 256, and not more than are declared here."""
    monkeypatch.setattr(Runtime, "remember_memory", False)
    with checks(level):
        counts = [_calls_of_the_batch(*size) for size in ((12, 16), (40, 16), (12, 256), (40, 256))]
    assert counts == counts[:1] * 4
    assert all(made <= most for made, most in zip(counts[0], MOST_OF_A_BATCH[level], strict=True)), counts[0]


def _calls_of_the_batch(num_columns: int, rows: int) -> tuple[int, int]:
    """Python functions, and functions of numpy, that a step calls once it has been made several times."""
    scene = Scene.of(open_runtime("cpu"), num_columns=num_columns, rows=rows, churn=2)
    scene.twins(TENSORS)  # reads the host sides, which adds nothing
    functions = arrays = 0

    def note(frame: FrameType, event: str, called: Any) -> None:
        nonlocal functions, arrays
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            arrays += isinstance(owner, np.ndarray) or getattr(owner, "__name__", "").startswith("numpy")
        elif event == "call":
            of_numpy = "/numpy/" in frame.f_code.co_filename  # the dispatcher of a function written in C
            functions, arrays = functions + (not of_numpy), arrays + of_numpy

    gc.disable()
    try:
        for _ in range(4):
            functions = arrays = 0
            sys.setprofile(note)
            try:
                scene.packed_step()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return functions, arrays


def test_locations_of_a_pool_are_not_checked_again(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step writes into its token table what the page pool made and checked; `full` alone asks once more."""
    state, asked, entry_of = EngineState(rt, num_columns=2, rows=SMALL), [], Table.entry_of

    def noted(self: Table, *args: Any) -> TableWrite:
        asked.append(self)
        return entry_of(self, *args)

    monkeypatch.setattr(Table, "entry_of", noted)
    with checks("cheap"):
        state.step()
    assert not asked
    with checks("full"):
        state.step()
    assert len(asked) == 1


def test_parts_of_a_step_ask_each_question_once(rt: Runtime) -> None:
    """A table write is checked once, nothing is described, padding is sought once, and rows add no call."""
    with checks("cheap"):
        small, large = (calls_of_a_step_of_parts(rt, rows) for rows in (16, 256))
    for one in (small, large):
        one.pop("EventFence.wait", None)  # a GPU that others use too may not be done
    assert small == large
    assert small["Table.check_write"] == small["Table.launch_checked"] == 1
    assert [name for name in small if name.endswith((".label", ".__repr__"))] == []
    assert small["Generations.check_held"] == 0, "the step before found them live, and no slot was freed since"
    assert sum(small.values()) <= 610


MOST_WITH_CHURN = 370
"""Python functions of the library that a decode step with arrivals calls: admission, batch, plan, inputs, results."""


def test_calls_of_a_step_with_churn(rt: Runtime) -> None:
    """As many when 2 of 16 requests leave and 2 join as when it is 32 of 256, and not more than are declared here."""
    counts = []
    for n in (16, 256):
        steady, calls = Steady(rt, n, n // 8), 0

        def note(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and "/batchstate/" in frame.f_code.co_filename

        with checks("cheap"):
            for _ in range(PAGE_SIZE):
                steady.step()
            gc.collect()
            sys.setprofile(note)
            try:
                steady.step()
            finally:
                sys.setprofile(None)
        counts.append(calls)
    assert counts[0] == counts[1] <= MOST_WITH_CHURN


DEVICE_CALLS = {
    # A fence behind the copy to the device, and one behind the publish and the copy from it.
    "steady": {"record": 2, "query": 3, "is_current_stream_capturing": 4, "current_stream": 3},
    "steady, on two streams": {
        "record": 2,
        "query": 3,
        "is_current_stream_capturing": 5,
        "current_stream": 6,
        "wait_event": 1,
        "set_stream": 2,
    },
    # Besides one behind the table's scatter and that of the first ids, and the engine's own.
    "with churn": {"record": 4, "query": 5, "is_current_stream_capturing": 8, "current_stream": 13},
    "with churn, on two streams": {
        "record": 7,
        "query": 6,
        "is_current_stream_capturing": 14,
        "current_stream": 19,
        "wait_event": 5,
        "set_stream": 2,
    },
}
"""What most decode steps ask of an accelerator beside copies and launches, at the most. Each takes up to 20 us there.

No event is made: those of fences that are gone are recorded anew.
"""


@pytest.mark.parametrize("kind", list(DEVICE_CALLS))
def test_device_calls_of_a_decode_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events made, recorded, asked and waited for, streams asked for and entered, and questions about a capture."""
    runtime, _ = fake_accelerator(monkeypatch)
    monkeypatch.setattr(runtime, "_keep_alive", lambda tensor, stream: None)
    called: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any) -> Any:
            called[name] += 1
            return None if name == "wait_event" else call(*args)  # which keeps the event

        monkeypatch.setattr(owner, name, counted)

    for owner, names in (
        (FakeModule, ("current_stream", "is_current_stream_capturing", "set_stream", "stream")),
        (FakeEvent, ("__init__", "record", "query")),
        (FakeStream, ("wait_event",)),
    ):
        for name in names:
            count(owner, name)
    steady = Steady(runtime, 16, 2 if "churn" in kind else 0)
    forward = runtime.stream("forward") if "two" in kind else None
    with checks("cheap"):
        for _ in range(2 * PAGE_SIZE):
            steady.step(forward)
        steps = []
        for _ in range(2 * PAGE_SIZE):  # where a page begins, and where old publishes are forgotten, there are more
            called.clear()
            steady.step(forward)
            steps.append(frozenset(called.items()))
    most, made = DEVICE_CALLS[kind], dict(Counter(steps).most_common(1)[0][0])
    assert all(made[name] <= most.get(name, 0) for name in made), made


def _memory(state: Any, steps: int) -> tuple[int, int, int]:
    """Bytes that a step takes at most, above what was there before it; bytes kept at the end; and objects in cycles."""
    most = 0
    for _ in range(steps):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        state.step()
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    cycles = gc.collect()  # it also empties Python's own lists of free objects
    return most, tracemalloc.get_traced_memory()[0], cycles
