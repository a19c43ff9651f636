"""Budgets of operations: calls, copies, launches, allocations and questions to the device, which no machine changes.

`BUDGETS` has them all, and one test holds them. A commit that raises a number says what was bought.
"""

import functools
import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import batchstate
from batchstate import (
    Batch,
    ForwardPlan,
    FutureMap,
    MirroredTensor,
    PagePool,
    Runtime,
    SlotPool,
    Slots,
    StepPlanner,
    checks,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from benchmarks.arrivals import Prefill
from benchmarks.baselines.request_loops import PAGE_SIZE
from benchmarks.baselines.twin_columns import TENSORS
from benchmarks.counts import COLUMNS, LIMITS, TorchOperations, counted_steps
from benchmarks.decode_steps import Scene, declared
from benchmarks.steady_steps import Steady
from benchmarks.timing import no_collector
from benchmarks.whole_steps import EngineState
from tests.doubles import FakeEvent, FakeStream, fake_accelerator
from tests.step_world import World
from tests.worlds import LONGEST, ForwardWorld

PACKAGE = str(Path(batchstate.__file__).parent)
CORE = {f"{PACKAGE}/_core.py", f"{PACKAGE}/_cython.py"}

Run = Callable[[], object]

AT_MOST = {"calls", "functions", "python", "numpy", "host_to_device_bytes"}
"""Counts that may be lower than their limit, as may questions to a device; all others are exact.

`calls` are of Python functions and of functions in C, `functions` those of the library, `numpy` those of numpy, and
`python` those of Python functions that are not of numpy. Attributes of `Counters` are differences of these. Any other
name is a function of the library or of the tests, or the end of its name."""

SMALL = 32
"""Rows: counts do not depend on them."""


@attrs.frozen
class Budget:
    """The limits of one operation.

    Attributes:
        make: prepares the operation for a number of rows, or columns, and returns it.
        most: what is counted -> limit.
        sizes: numbers of rows, or columns, for all of which the counts are equal.
        levels: of the checks.
        warm: how often it runs before it is counted.
        runs: how often it is counted: the fewest calls are taken, and the other counts are those of each run.
        on: `device` that is under test, a `cpu`, on which nothing is pending, a `plain` one without test tools, or the
            stand-in of an `accelerator`.
    """

    make: Callable[[Runtime, Any], Run]
    most: dict[str, int]
    sizes: tuple[Any, ...] = (SMALL,)
    levels: tuple[str, ...] = ("cheap",)
    warm: int = 0
    runs: int = 1
    on: str = "device"


# Operations


def steady(rt: Runtime, n: int, chunks: bool = False) -> Run:
    """Decode steps from the plan to the results; with `chunks` one request more puts in chunks of its prompt."""
    world = World.planned(rt, n + chunks, pages=8 * n)
    world.join([5] * n)
    tokens: dict[str, Any] = {}
    if chunks:
        world.batch = world.batch.merge(world.prompted([LONGEST]))
        queries = np.array([1] * n + [2])
        tokens = {"query_lens": queries, "prompt_ids": [None] * n + [[7, 8]], "samples": queries == 1}
    steps: list[Any] = [None] * 3  # as an engine keeps those in flight
    batch, at = world.batch, 0

    def run() -> None:
        nonlocal batch, at
        rt.next_step()
        step = world.planner.plan(batch, **tokens)
        inputs = step.inputs()
        step.publish(last=inputs.input_ids[:n])
        if at:
            steps[at % 3].results.resolve()
        batch, at = step.batch, at + 1
        steps[at % 3] = step

    return run


class Bounded(Batch):
    """Requests of which the host knows bounds."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


def drafted(rt: Runtime, n: int) -> Run:
    """Steps that verify two drafts of each request, accept one, and go on from the bounds."""
    pool = SlotPool(rt, n)
    table = pool.table("req_to_token", (256,), torch.int32, holds="location")
    pages = PagePool(rt, pool, 64 * n, 4, max_tokens_per_request=256, req_to_token=table)
    told = {"last": relay_field(torch.int64), "drafts": relay_field(torch.int64, (2,))}
    told |= {"lens": relay_field(torch.int64, read_by="both"), "kept": relay_field(torch.int64, read_by="host")}
    options: dict[str, Any] = {"relay": FutureMap(pool, told), "ids": ("last", "drafts"), "results": ("kept", "lens")}
    planner = StepPlanner(Bounded, pages=pages, lengths="lens", accepted="kept", **options)
    last, drafts = torch.ones(n, dtype=torch.int64), torch.ones(n, 2, dtype=torch.int64)
    first = {"last": last.tolist(), "drafts": drafts.tolist(), "lens": [5] * n}
    ahead = planner.plan(Bounded.empty(rt), 3, joining={"seq_lens": [5] * n}, published=first)

    def run() -> None:
        nonlocal ahead
        step = ahead
        step.inputs()
        true = step.accept(2 * last)
        step.publish(last=last, drafts=drafts)
        bounds = MirroredTensor.from_pair(rt, step.batch["seq_lens"].np, true, contract="upper_bound")
        rt.next_step()
        ahead = planner.plan(step.batch.replace(seq_lens=bounds), 3)
        step.results.resolve()

    return run


def churn(rt: Runtime, n: int) -> Run:
    """Decode steps in which an eighth of the requests leave and as many join."""
    return Steady(rt, n, max(1, n // 8)).step


def churn_of(leave: int, forward: str = "") -> Callable[[Runtime, int], Run]:
    """Decode steps of 16 requests, some of which leave, with the forward on a stream of its own."""

    def make(rt: Runtime, n: int) -> Run:
        state = Steady(rt, 16, leave)
        return functools.partial(state.step, rt.stream(forward) if forward else None)

    return make


def parts(rt: Runtime, n: int) -> Run:
    """A steady decode step, composed of its parts."""
    pool = SlotPool(rt, n)
    table = pool.table("req_to_token", (64,), torch.int32, holds="location")
    pages = PagePool(rt, pool, 4 * n, 16, max_tokens_per_request=64, req_to_token=table)
    relay = FutureMap(pool, {"last_token": relay_field(torch.int64, read_by="both")})
    slots, lens = pool.take(n), np.full(n, 17)
    pages.extend(slots, lens)
    relay.publish(slots, last_token=np.ones(n, np.int64))
    batch: Any = Decode.build(rt, slots=slots, seq_lens=lens, bound=lens)

    def run() -> None:
        nonlocal batch
        rt.next_step()
        batch = batch.next_batch(advance="seq_lens")
        grown = pages.advance(batch.slots, 1)
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=pages)
        uploaded = batch.upload(writes=[grown.entry()], extras=plan.extras)
        inputs = relay.resolve_forward_inputs(plan, uploaded, ids="last_token")
        relay.publish(plan.sampled_slots, last_token=inputs.input_ids + 1)
        relay.prefetch(plan.sampled_slots, "last_token")["last_token"].np.sum()

    return run


class Decode(Batch):
    """What a decode step has at the least."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    bound = mirrored(torch.int64)


def batch_alone(rt: Runtime, size: tuple[int, int]) -> Run:
    """A decode step of the batch alone: leave, join, advance, upload."""
    scene = Scene.of(rt, num_columns=size[0], rows=size[1], churn=2)
    scene.twins(TENSORS)  # reads the host sides, which adds nothing
    return scene.packed_step


def whole_step(rt: Runtime, num_columns: int) -> Run:
    """Leave, join, advance, pages, table."""
    return EngineState(rt, num_columns=num_columns, rows=SMALL).step


def without_table(rt: Runtime, num_columns: int) -> Run:
    """A batch filters, advances, and is read on the device."""
    batch = numbered(rt, num_columns, 8)

    def run() -> None:
        later = batch.filter([0, 2, 4]).advance("seq_lens", 1)
        for name in type(batch).columns():
            assert len(later[name].device) == 3

    return run


def upload(rt: Runtime, num_columns: int) -> Run:
    """A batch of 256 rows is sent."""
    return numbered(rt, num_columns, 256).upload


def numbered(rt: Runtime, num_columns: int, rows: int) -> Any:
    """A batch with numbers in its columns."""
    kind: Any = declared(num_columns)
    numbers = np.arange(1, rows + 1)
    columns = {name: numbers.astype(column.np_dtype) for name, column in kind.columns().items()}
    return kind.build(rt, **{**columns, "slots": Slots.from_host(rt, numbers)})


def bytes_of_upload(num_columns: int = COLUMNS[1], rows: int = 256) -> int:
    """The columns, the slots' generations, and at most 16 bytes of alignment a width."""
    columns = declared(num_columns).columns().values()
    return rows * (sum(column.np_dtype.itemsize for column in columns) + 8) + 4 * 16  # type: ignore[attr-defined]


def one_slot(rt: Runtime, n: int) -> Run:
    """A slot is taken and freed."""
    pool = SlotPool(rt, 64)
    return lambda: pool.free(pool.take(1), after=None)


def one_extension(rt: Runtime, n: int) -> Run:
    """A request grows by a token."""
    slots = SlotPool(rt, 1)
    pages, slot = PagePool(rt, slots, 64, 16, max_tokens_per_request=1_024), slots.take(1)
    return lambda: pages.extend(slot, pages.committed_lengths[1] + 1)


def arrivals(rt: Runtime, n: int) -> Run:
    """Requests arrive with all they have, and leave."""
    slots = SlotPool(rt, 64)
    pages = PagePool(rt, slots, 512, 16, max_tokens_per_request=128)
    lengths = np.full(n, 100)
    return lambda: pages.release_requests(pages.take_requests(lengths), after=rt.record())


def joined(rt: Runtime, n: int) -> Run:
    """Handles of some requests are joined."""
    pool = SlotPool(rt, n)
    parts = [pool.take(1) for _ in range(n)]
    return lambda: Slots.cat(parts)


def prefill(rt: Runtime, n: int) -> Run:
    """Prompts of 10 tokens arrive, run and leave."""
    return Prefill(rt, [[1] * 10] * n).step


def planned_step(steps: int) -> Callable[[Runtime, int], Run]:
    """A decode step behind some others, of requests with 3 tokens and pages of 4."""

    def make(rt: Runtime, n: int) -> Run:
        world = World.planned(rt)
        world.join([3] * 8)
        for _ in range(steps):
            rt.next_step()
            step = world.planner.plan(world.batch)
            world.run(step)
            step.results.resolve()
        rt.next_step()
        return lambda: world.run(world.planner.plan(world.batch))

    return make


def turn_over(rt: Runtime, leave: int) -> Run:
    """Some requests leave and as many join: columns, token rows, first ids and the step itself cross together."""
    world = World.planned(rt)
    world.join([3] * 4)
    world.step()
    joining, keep = world.arrived([5, 6][:leave]), np.arange(4) >= leave
    published, after = {"last": 10 * joining.slots.np}, rt.record()
    plan = functools.partial(world.planner.plan, keep=keep, joining=joining, after=after, published=published)
    return lambda: plan(world.batch).inputs()


def relay(act: str) -> Callable[[Runtime, int], Run]:
    """One operation of a relay on 4 requests, whose slots are on the device."""

    def make(rt: Runtime, n: int) -> Run:
        fields = {
            "tokens": relay_field(torch.int64, read_by="both", non_negative=True),
            "lens": relay_field(torch.int32),
            "outputs": relay_field(torch.int64, (3,), read_by="host"),
        }
        pool = SlotPool(rt, 8)
        relay, slots = FutureMap(pool, fields), pool.take(4)
        tokens, lens, outputs = (rt.upload([np.ones(shape, dtype)]).view(0) for shape, dtype in _VALUES)
        assert len(slots.device) == 4
        runs: dict[str, Run] = {
            "publish a field": lambda: relay.publish(slots, lens=lens),
            "publish two": lambda: relay.publish(slots, tokens=tokens, outputs=outputs),
            "publish from the host": lambda: relay.publish(slots, tokens=[3] * 4, lens=[4] * 4),
            "gather": lambda: relay.gather(slots, "lens"),
            "prefetch a field": lambda: relay.prefetch(slots, "outputs"),
            "prefetch two": lambda: relay.prefetch(slots, "tokens", "outputs"),
            "states": lambda: relay.states(slots, "tokens"),
            "discard": lambda: relay.discard(slots),
        }
        if not act.startswith("publish"):
            relay.publish(slots, tokens=tokens, lens=lens, outputs=outputs)
        return runs[act]

    return make


_VALUES: tuple[tuple[Any, Any], ...] = (4, np.int64), (4, np.int32), ((4, 3), np.int64)


def inputs(prompts: list[Any] | None, padding: int = 0) -> Callable[[Runtime, int], Run]:
    """The inputs of two requests at forward entry."""

    def make(rt: Runtime, n: int) -> Run:
        world = ForwardWorld.of(rt)
        slots = world.take([5, 6])
        world.publish(slots)
        padded = 2 + padding
        plan, uploaded = world.planned(
            slots, [5, 6], prompt_ids=prompts, rows=padded, pad_tokens=padded if padding else None
        )
        return lambda: world.resolve(plan, uploaded)

    return make


def true_lengths(width: int, padding: int = 0, prompt: bool = False) -> Callable[[Runtime, int], Run]:
    """The same of three requests whose true lengths the relay has, with the locations of the tokens."""

    def make(rt: Runtime, n: int) -> Run:
        world = ForwardWorld.of(rt)
        slots = world.take([9, 9, 9])
        world.publish(slots)
        world.relay.publish(slots, lens=[4, 5, 9 - width])
        plan, uploaded = world.planned(
            slots,
            world.bounds([9, 9, 9], [4 + width, 5 + width, 9]),
            width,
            prompt_ids=[None, None, list(range(width)) if prompt else None],
            pages=world.pages,
            pad_tokens=(3 + padding) * width,
            rows=3 + padding,
        )
        fields = ("last_token", "drafts")[: 1 if width == 1 else 2]
        return lambda: world.resolve(plan, uploaded, ids=fields, lengths="lens", req_to_token=world.table)

    return make


# Budgets


def device(copies: int, operations: int, back: int = 0, **others: int) -> dict[str, int]:
    """Copies to the device, operations on it, copies back, and no wait."""
    counts = {"host_to_device_copies": copies, "device_operations": operations, "device_to_host_copies": back}
    return {**counts, "forced_syncs": 0, "fence_waits": 0, "check_reads": 0, **others}


def asked(records: int, queries: int, captures: int, streams: int, waits: int = 0, entered: int = 0) -> dict[str, int]:
    """The most that is asked of an accelerator beside copies and launches. Each question takes up to 20 us there.

    No event is made: those of fences that are gone are recorded anew.
    """
    return {
        "FakeEvent.record": records,
        "FakeEvent.query": queries,
        "FakeModule.is_current_stream_capturing": captures,
        "FakeModule.current_stream": streams,
        "FakeModule.set_stream": entered,
        "FakeModule.stream": 0,
        "wait_event": waits,
        "event_made": 0,
    }


OFF_TOO = ("off", "cheap")
PLAIN: dict[str, Any] = {"levels": OFF_TOO, "warm": 8, "runs": 8, "on": "plain"}
CPU: dict[str, Any] = {"warm": 3, "runs": 8, "on": "cpu"}
ASKED: dict[str, Any] = {"warm": 10 * PAGE_SIZE, "runs": 2 * PAGE_SIZE, "on": "accelerator"}
ALONE: dict[str, Any] = {"sizes": ((12, 16), (40, 16), (12, 256), (40, 256)), "warm": 3, "on": "plain"}
ONCE = {"Table.check_write": 1, "Table.launch_checked": 1, "Allocator.rows_of": 6, ".label": 0, ".__repr__": 0}
STEP = {"device_allocations": 0, "staging_allocations": 0}

BUDGETS: dict[str, Budget] = {
    # Calls
    "steady step": Budget(steady, {"calls": 113}, (1, 256), **PLAIN),
    "mixed step": Budget(functools.partial(steady, chunks=True), {"calls": 180}, (8, 256), **{**PLAIN, "warm": 3}),
    "step with churn of one": Budget(churn, {"calls": 275}, (1,), **CPU),
    "step with churn of 256": Budget(churn, {"calls": 273}, (256,), **CPU),
    "step with churn of an eighth": Budget(churn, {"functions": 152}, (16, 64), warm=PAGE_SIZE),
    "step with drafts": Budget(drafted, {"calls": 730}, (256,), **PLAIN),
    "step of parts": Budget(parts, {"functions": 570, **ONCE}, (16, 256), warm=8),
    "batch alone, unchecked": Budget(batch_alone, {"python": 41, "numpy": 2}, levels=("off",), **ALONE),
    "batch alone": Budget(batch_alone, {"python": 43, "numpy": 2}, **ALONE),
    "one slot": Budget(one_slot, {"calls": 20}, **CPU),
    "one extension": Budget(one_extension, {"calls": 32}, **CPU),
    "256 handles joined": Budget(joined, {"calls": 16}, (256,), **CPU),
    "arrivals": Budget(arrivals, {"calls": 72}, (32,), **CPU),
    "prefill": Budget(prefill, {"calls": 193}, (64,), **CPU),
    # Copies, launches, allocations
    "whole step": Budget(whole_step, {**LIMITS, "Table.entry_of": 0}, COLUMNS, OFF_TOO, warm=4),
    "whole step, looked at again": Budget(whole_step, {"Table.entry_of": 1}, COLUMNS[:1], ("full",)),
    "step without table writes": Budget(without_table, device(1, 0), COLUMNS[1:2]),
    "upload": Budget(upload, {**device(1, 0), "host_to_device_bytes": bytes_of_upload()}, COLUMNS[1:2]),
    "planned step, the first": Budget(planned_step(0), device(1, 3, 1, device_allocations=0), levels=OFF_TOO),
    "planned step": Budget(planned_step(2), device(1, 2, 1, **STEP), levels=OFF_TOO),
    "planned step in which pages begin": Budget(planned_step(5), device(1, 3, 1, **STEP), levels=OFF_TOO),
    "requests leave and join": Budget(turn_over, device(1, 3), (1, 2)),
    "publish of a field": Budget(relay("publish a field"), device(0, 1)),
    "publish of two fields": Budget(relay("publish two"), device(0, 2)),
    "publish of two fields from the host": Budget(relay("publish from the host"), device(1, 2)),
    "gather": Budget(relay("gather"), device(0, 1)),
    "prefetch of a field": Budget(relay("prefetch a field"), device(0, 1, 1)),
    "prefetch of two fields": Budget(relay("prefetch two"), device(0, 1, 1)),
    "states": Budget(relay("states"), device(0, 0)),
    "discard": Budget(relay("discard"), device(0, 0)),
    "inputs of decodes": Budget(inputs(None), device(0, 1)),
    "inputs of decodes, padded": Budget(inputs(None, padding=2), device(0, 1)),
    "inputs of prompts": Budget(inputs([[7], [8]]), device(1, 0)),
    "inputs of both": Budget(inputs([None, [8]]), device(1, 2)),
    "true lengths": Budget(true_lengths(1), device(0, 5)),
    "true lengths of drafts": Budget(true_lengths(3), device(0, 7)),
    "true lengths, padded": Budget(true_lengths(1, padding=1), device(0, 9)),
    "true lengths of drafts, padded": Budget(true_lengths(3, padding=1), device(0, 11)),
    "true lengths of drafts and a prompt": Budget(true_lengths(3, prompt=True), device(1, 11)),
    # Questions to an accelerator: a fence behind the copy to the device, and one behind the publish and the copy back;
    # with churn also one behind the table's scatter and that of the first ids, and the engine's own; where the forward
    # has a stream of its own, one there behind the last use of the step's memory.
    "asked in a steady step": Budget(churn_of(0), asked(2, 3, 5, 3), **ASKED),
    "asked in a steady step, on two streams": Budget(churn_of(0, "forward"), asked(3, 4, 7, 5, 1, 2), **ASKED),
    "asked in a step with churn": Budget(churn_of(2), asked(5, 4, 11, 5), **ASKED),
    "asked in a step with churn, on two streams": Budget(churn_of(2, "forward"), asked(6, 5, 13, 7, 5, 2), **ASKED),
}


# Tests


@pytest.mark.parametrize("name", BUDGETS)
def test_budget(rt: Runtime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation takes what its budget says, the same for any number of rows or columns."""
    budget = BUDGETS[name]
    if budget.on == "plain":
        monkeypatch.setattr(Runtime, "remember_memory", False)
    for level in budget.levels:
        with checks(level):
            spent = [counts(budget, runtime_of(budget, rt, monkeypatch), size) for size in budget.sizes]
        assert spent[1:] == spent[:-1]
        at_most = AT_MOST | (budget.most.keys() if budget.on == "accelerator" else set())
        wrong = {
            name: (count, budget.most[name])
            for name, count in spent[0].items()
            if count > budget.most[name] or (count < budget.most[name] and name not in at_most)
        }
        assert wrong == {}


def runtime_of(budget: Budget, rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The runtime that an operation is counted on."""
    if budget.on == "device":
        return rt
    if budget.on != "accelerator":
        return open_runtime("cpu")
    runtime, _ = fake_accelerator(monkeypatch)
    monkeypatch.setattr(runtime, "_keep_alive", lambda tensor, stream: None)
    monkeypatch.setattr(FakeEvent, "__init__", event_made)
    monkeypatch.setattr(FakeStream, "wait_event", wait_event)
    return runtime


def event_made(event: FakeEvent) -> None:
    """An event is made."""


def wait_event(stream: FakeStream, event: object) -> None:
    """A stream waits for an event, which it does not keep."""


def counts(budget: Budget, rt: Runtime, size: Any) -> dict[str, int]:
    """The counts of an operation that its budget limits, in the commonest of its runs."""
    run = budget.make(rt, size)
    for _ in range(budget.warm):
        run()
    spent = [counted(run, rt) for _ in range(budget.runs)]
    if budget.on == "accelerator":  # where a page begins, and where old publishes are forgotten, there are more
        limited = Counter(frozenset((name, count(one, name)) for name in budget.most) for one in spent)
        return dict(limited.most_common(1)[0][0])
    fewest = {name: min(count(one, name) for one in spent) for name in budget.most}
    assert all(count(one, name) == fewest[name] for one in spent for name in fewest.keys() - AT_MOST)
    return fewest


def count(spent: Counter[str], name: str) -> int:
    """What a name of a budget counts."""
    return spent[name] if name[0] != "." else sum(made for other, made in spent.items() if other.endswith(name))


def counted(run: Run, rt: Runtime) -> Counter[str]:
    """The counts of one run."""
    made = Counter({"calls": -1, "python": -1})  # the operation itself is none

    def note(frame: FrameType, event: str, called: Any) -> None:
        file = frame.f_code.co_filename
        if file in CORE:  # a call of it is one in C, where it is compiled
            made["calls"] += (
                event == "call" and frame.f_back is not None and frame.f_back.f_code.co_filename not in CORE
            )
        elif event == "call":
            made["calls"] += 1
            made["numpy" if "/numpy/" in file else "python"] += 1  # the dispatcher of a function written in C
            made["functions"] += file.startswith(PACKAGE) and frame.f_code.co_qualname != "EventFence.wait"
            if "/numpy/" not in file:
                made[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            made["calls"] += 1
            made["numpy"] += isinstance(owner, np.ndarray) or getattr(owner, "__name__", "").startswith("numpy")

    with no_collector():
        before = rt.counters.snapshot()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    made.update(attrs.asdict(rt.counters - before))
    return made


def test_a_second_copy_is_counted(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload more in a step misses the limit of `make bench` too, and the torch calls show it."""
    right = EngineState.step
    before = {one.counted: one for one in counted_steps(rt, num_columns=2, rows=SMALL)}
    assert [one for one in before.values() if one.met is False] == []

    def wasteful(self: EngineState) -> object:
        self.batch.advance("seq_lens", 1).upload()
        return right(self)

    monkeypatch.setattr(EngineState, "step", wasteful)
    after = {one.counted: one for one in counted_steps(rt, num_columns=2, rows=SMALL)}
    assert (after["host_to_device_copies"].count, after["host_to_device_copies"].met) == (2, False)
    assert after["torch_operations"].count > before["torch_operations"].count


@pytest.mark.parametrize("level", OFF_TOO)
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


# Host memory

LIFE = 4
"""Steps that a request lives in a batch of that size, of which eight leave in each step."""
MANY = 100 * LIFE
SMALLEST = 90
"""Bytes, and less than the smallest array takes. numpy fills lists of freed memory meanwhile, with half of that."""


@pytest.mark.parametrize("level", OFF_TOO)
def test_host_memory_of_a_step_does_not_grow_with_steps(rt: Runtime, level: str) -> None:
    """After requests have come and gone, a step takes no more memory than before, and keeps none of it."""
    state = EngineState(rt, num_columns=12, rows=SMALL)
    with checks(level):
        for _ in range(2 * LIFE):
            state.step()
        (early, kept_early, _), (late, kept_late, cycles) = memory(state.step, 32 * LIFE, MANY)
    assert 0 < late <= early + 1_024
    assert kept_late - kept_early < MANY * SMALLEST
    assert cycles == 0, "what a step leaves behind waits for no garbage collector"


def test_arrays_that_are_kept_are_noticed() -> None:
    """The measurement sees a step that keeps a small array, and one that leaves a cycle."""
    kept = []

    def hoard() -> None:
        kept.append(np.empty(0))
        cycle: list[object] = []
        cycle.append(cycle)

    (_, before, _), (_, after, cycles) = memory(hoard, LIFE, MANY)
    assert after - before > MANY * SMALLEST
    assert cycles == MANY


def memory(step: Run, *turns: int) -> list[tuple[int, int, int]]:
    """Of each number of steps: bytes that a step takes at most, bytes that are kept, and objects in cycles."""
    seen = []
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for steps in turns:
            most = 0
            for _ in range(steps):
                tracemalloc.reset_peak()
                before, _peak = tracemalloc.get_traced_memory()
                step()
                most = max(most, tracemalloc.get_traced_memory()[1] - before)
            cycles = gc.collect()  # it also empties Python's own lists of free objects
            seen.append((most, tracemalloc.get_traced_memory()[0], cycles))
    finally:
        tracemalloc.stop()
        gc.enable()
    return seen
