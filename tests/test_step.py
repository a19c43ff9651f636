"""`StepPlanner`: a planned step is what the parts, called one after the other, make of it."""

import functools
from collections.abc import Callable
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchstate import (
    Batch,
    Code,
    ForwardPlan,
    FutureMap,
    MirroredTensor,
    PagePool,
    PoolExhaustedError,
    Runtime,
    SlotPool,
    StepPlanner,
    TokenArray,
    Violation,
    checks,
    device_only,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from batchstate._planned_step import PlannedStep
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    DeclarationError,
    DeviceError,
    DtypeError,
    PoolBrokenError,
    RowIndexError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.invariants import times_checked
from batchstate.mirror import Slots
from batchstate.races import RaceRuntime
from batchstate.races.sim import SimRuntime
from batchstate.runtime import Stream
from batchstate.testing.fences import LateRuntime
from tests.doubles import refused
from tests.refusals import Expected, refuses
from tests.selfcheck.machines.failures import PlantedError, failing
from tests.step_world import Running, RunningToo, StepByParts, World, columns
from tests.worlds import LONGEST, PAGE_SIZE

both_ways = pytest.mark.parametrize("by_parts", [False, True], ids=["by the planner", "by the parts"])


def test_a_prefetch_that_failed_is_waited_for() -> None:
    """The private stream has read before its copy failed: the next publish of these requests waits for that."""
    world = World.planned(open_runtime("cpu"), results=(), must_read=False)
    rt, waited = world.rt, []
    world.join([3, 5])
    for _ in range(3):
        world.step()
    with rt.use(rt.stream("host")), failing(rt, "download", 1), pytest.raises(PlantedError):
        world.relay.prefetch(world.batch.slots, "last")
    real = rt.wait

    def wait(fence: Any, **options: Any) -> None:
        waited.append(fence)
        real(fence, **options)

    rt.wait = wait  # type: ignore[method-assign]
    for _ in range(2):
        step = world.planner.plan(world.batch)
        step.inputs()
        step.publish(last=torch.tensor([1, 2]))
        world.batch = step.batch
        assert len(waited) == 1


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        st.tuples(st.just("prompts"), st.lists(st.integers(1, 8), min_size=1, max_size=2)),
        st.tuples(st.just("leave"), st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True)),
        st.tuples(st.just("reorder"), st.integers(0, 99)),
        st.tuples(st.just("replace"), st.floats(0, 1, width=32)),
        st.tuples(
            st.just("turn over"),
            st.tuples(
                st.lists(st.integers(0, 7), max_size=2, unique=True),
                st.lists(st.integers(1, 9), max_size=2),
                st.booleans(),
                st.booleans(),
            ),
        ),
        st.tuples(st.just("step"), st.just(None)),
        st.tuples(st.just("step"), st.just(None)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@given(events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_as_by_the_parts(level: str, events: list[tuple[str, Any]]) -> None:
    """After any history, a planned step leaves what the parts leave, and hands the same to the forward."""
    with checks(level):
        worlds = [World.planned(open_runtime("cpu"), by_parts=by_parts) for by_parts in (False, True)]
        for event, value in events:
            seen = [happen(world, event, value) for world in worlds]
            assert seen[0] == seen[1]
        for world in worlds:
            world.check_table()
            world.relay.check()


def happen(world: World, event: str, value: Any) -> object:
    """An event of `EVENTS`, if there is room for it; what a step leaves, and its results."""
    n = len(world.batch)
    longest = int(world.batch.seq_lens.max()) if n else 0
    if event == "join" and n + len(value) <= world.slots.size:
        world.join(value)
    elif event == "prompts" and n + len(value) <= world.slots.size:
        world.batch = world.batch.merge(world.prompted(value))
    elif event == "leave":
        world.leave([row for row in value if row < n])
    elif event == "reorder":
        world.batch = world.batch.filter(np.random.default_rng(value).permutation(n))
    elif event == "replace" and n:
        world.batch = world.batch.replace(temperature=np.full(n, value, np.float32))
    stepped = None
    if event == "turn over" and value[1] and n + len(value[1]) <= world.slots.size and longest < LONGEST:
        stepped = world.turn_over([row for row in value[0] if row < n], *value[1:])
    elif event == "step" and n and longest < LONGEST:
        stepped = world.step()
    if stepped is None:
        return None
    step, seen = stepped
    return seen, step.results["last"].np.tolist() if step.plan.sample_rows.size else None


def test_on_a_device_that_lags(device: str) -> None:
    """Two steps ahead of the device and over two streams, each token is right, and the results are waited for once."""
    if device != "cpu":
        pytest.skip("the lagging device is a stand-in for one with streams")
    rt = LateRuntime(steps_in_flight=2)
    world = World.planned(rt)
    world.join([3, 4, 5])
    rt.synchronize()
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    tokens, steps = [], []
    with rt.use(schedule):
        for _ in range(6):
            rt.next_step()
            step = world.planner.plan(world.batch)
            with rt.use(forward):
                inputs = step.inputs()
                step.publish(last=rt.launch(torch.add, inputs.input_ids, 1, reads=(inputs.input_ids,)))
            world.batch = step.batch
            steps.append(step)
            if len(steps) > 1:
                tokens.append(steps[-2].results["last"].np.tolist())
    assert tokens == [[10 * slot + k for slot in (1, 2, 3)] for k in range(1, 6)]


def test_a_token_table_that_was_written_token_by_token_is_filled_to_the_end_of_each_page(rt: Runtime) -> None:
    """Steps that write whole pages miss no token of a page that began before them, after tokens went back too."""
    world = World.planned(rt)
    slots, lens = world.slots.take(3), [5, 8, 2]
    extension = world.pages.extend(slots, lens)
    world.pages.commit(slots, lens)
    world.relay.publish(slots, last=slots.np)
    world.batch = world.built(slots, lens)
    entry = world.table.entry_of(slots.np.repeat(lens), extension.positions, extension.locations.np, slots)
    world.batch.upload(writes=[entry])
    for k in range(9):
        if k == 5:  # a token goes back, and comes again
            world.pages.truncate(world.batch.slots, world.batch.seq_lens.np - 1, after=None)
            world.batch = world.batch.advance("seq_lens", -1)
        world.run(world.planner.plan(world.batch))
        world.check_table()


def test_what_a_plan_shares_with_its_step_is_read_only(rt: Runtime) -> None:
    """The plan of a decode step is one object, made when it is asked for; its lengths and places cannot be written."""
    world = World.planned(rt)
    world.join([3, 4])
    for asked_before in (True, False):
        step = world.planner.plan(world.batch)
        plan = step.plan if asked_before else None
        inputs = world.run(step)
        assert inputs.plan is step.plan
        assert plan in (None, step.plan)
        shared = step.plan.query_lens, step.plan.relay_rows, step.plan.sample_rows  # also with later steps
        for array in (*shared, step.plan.seq_lens, step.plan.extras["slot_mapping"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        refused(Code.FUTURE_CONSUMED, step.inputs)


@both_ways
def test_what_is_broken_is_reported_as_by_the_parts(rt: Runtime, by_parts: bool) -> None:
    """Stale handles, a plan used twice, ids that are missing or unread: the same codes."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([3, 4])
    world.step()
    gone = world.batch
    world.leave([0])
    refused(Code.SLOT_STALE_HANDLE, lambda: world.planner.plan(gone))
    operation = refused(Code.SLOT_DOUBLE_FREE, lambda: world.planner.plan(gone, keep=[1], after=None)).operation
    assert operation == ("release_requests" if by_parts else "plan, of those that leave")
    world.step()

    step = world.planner.plan(world.batch)
    step.inputs()
    refused(Code.FUTURE_CONSUMED, step.inputs)
    refused(Code.FUTURE_CONSUMED, world.planner.plan(step.batch).inputs)  # nothing was published for it
    ids = torch.zeros(1, dtype=torch.int64, device=rt.device)
    step.publish(last=ids)
    refused(Code.FUTURE_UNREAD_OVERWRITTEN, lambda: step.publish(last=ids))


@both_ways
def test_a_plan_is_refused_once_its_pages_have_changed(rt: Runtime, by_parts: bool) -> None:
    """Tokens taken back behind a planned step, and lengths that are not those of the pages, are DERIVED_STALE."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([3, 4])
    step = world.planner.plan(world.batch)
    world.pages.truncate(world.batch.slots, [3, 4], after=None)
    refused(Code.DERIVED_STALE, step.inputs)
    world.batch = world.batch.replace(seq_lens=[3, 3])
    if not by_parts:
        refused(Code.DERIVED_STALE, lambda: world.planner.plan(world.batch))
    assert world.pages.committed(world.batch.slots).tolist() == [3, 4]


@both_ways
@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_step_may_be_planned_before_the_one_before_it_runs(rt: Runtime, level: str, by_parts: bool) -> None:
    """The pages of the first have grown by then, and it takes its inputs all the same."""
    with checks(level):
        world = World.planned(rt, by_parts=by_parts)
        world.join([3, 4])
        first = world.planner.plan(world.batch)
        second = world.planner.plan(first.batch)
        for number, step in enumerate((first, second)):
            inputs = step.inputs()
            assert rt.inspect(inputs.input_ids).tolist() == [10 + number, 20 + number]
            assert rt.inspect(inputs.positions).tolist() == [3 + number, 4 + number]
            step.publish(last=inputs.input_ids + 1)
        world.batch = second.batch
        world.check_table()


@pytest.mark.parametrize("left", [None, 2])
def test_a_row_of_the_token_table_may_end_within_a_page(rt: Runtime, left: int | None) -> None:
    """A page that begins there is written to the end of the row, and not into the next one, also where one leaves."""
    world = World.planned(rt, longest=LONGEST - 2)
    world.join([LONGEST - 6, 5, 3])
    assert world.batch.slots.np.tolist() == [1, 2, 3]
    for k in range(4):
        world.step(**{"keep": [0, 1], "after": rt.record()} if k == left else {})
        world.check_table()


def test_device_columns_extras_and_table_writes(rt: Runtime) -> None:
    """Columns on the device alone, arrays and writes of the engine go with a decode step, in one copy."""

    class Hidden(Batch):
        slots = slot_column()
        seq_lens = mirrored(torch.int64)
        state = device_only(torch.float32, shape=(2,))

    slots = SlotPool(rt, 4)
    table = slots.table("req_to_token", (LONGEST,), torch.int32, holds="location")
    marks = slots.table("marks", (), torch.int64)
    pages = PagePool(rt, slots, 16, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table)
    relay = FutureMap(slots, {"last": relay_field(torch.int64, read_by="both")})
    planner = StepPlanner(Hidden, pages=pages, relay=relay, ids="last", results=("last",))
    taken = slots.take(2)
    state = rt.upload([np.arange(4, dtype=np.float32).reshape(2, 2)]).view(0)
    extension = pages.extend(taken, [3, 3])
    pages.commit(taken, 3)
    batch: Any = Hidden.build(rt, slots=taken, seq_lens=[3, 3], state=state)
    batch.upload(writes=[extension.entry()])
    relay.publish(taken, last=[5, 6])
    for k in range(1, 4):
        before = rt.counters.snapshot()
        step = planner.plan(batch, writes=[marks.entry(batch.slots, None, [k, 10 * k])], extras={"salt": np.array([k])})
        inputs = step.inputs()
        spent = rt.counters - before
        # A write of the engine's, the gather, and the token table's: its row, then a page that begins, then nothing.
        assert (spent.host_to_device_copies, spent.device_operations) == (1, 3 if k < 3 else 2)
        assert rt.inspect(step.extras["salt"]).tolist() == [k]
        assert rt.inspect(marks.memory)[[1, 2]].tolist() == [k, 10 * k]
        state = step.batch["state"].device + 1
        step.publish(last=inputs.input_ids + 1)
        batch = step.batch.replace(state=state)
    assert rt.inspect(batch["state"].device).tolist() == [[3, 4], [5, 6]]
    before = rt.counters.snapshot()
    planner.plan(batch, writes=[table.entry(batch.slots, [LONGEST - 1] * 2, [1, 2])])
    assert (rt.counters - before).device_operations == 1, "the step's own write comes with its inputs"
    assert rt.inspect(table.memory)[[1, 2], -1].tolist() == [1, 2]


def test_full_compares_the_copy_of_the_step(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """At `full` what crossed with a step is compared with its columns, and is what reading a column gives."""
    world = World.planned(rt)
    world.join([3, 4])
    world.step()
    with checks("full"):
        before = rt.counters.snapshot()
        step = world.planner.plan(world.batch)
        assert step.batch["seed"].device.tolist() == [1, 2]
        assert (rt.counters - before).host_to_device_copies == 1
        send = PlannedStep._send

        def wrong(step: PlannedStep, stream: Stream) -> None:
            send(step, stream)
            step._memory.wide[1] = 0  # the slot of row 1

        monkeypatch.setattr(PlannedStep, "_send", wrong)
        new = world.arrived([2])
        with pytest.raises(Violation) as caught:
            world.planner.plan(step.batch, keep=[0, 1], joining=new, published={"last": [5]})
        assert (caught.value.code, caught.value.row) == (Code.MIRROR_EQUAL, 1)
        assert world.pages.committed(world.batch.slots).tolist() == [5, 6]  # of the last step: nothing is half done
        world.pages.verify()


def test_columns_written_from_outside_are_noticed(rt: Runtime) -> None:
    """A write into a column's device side is reported by the next step; one into an input of the forward is its own."""
    world = World.planned(rt)
    world.join([3, 4])
    inputs = world.run(world.planner.plan(world.batch))
    inputs.positions.add_(1)
    inputs.kv_lens.add_(1)
    world.planner.plan(world.batch).inputs()
    world.batch["temperature"].device.add_(1)
    refused(Code.MIRROR_FOREIGN_WRITE, lambda: world.planner.plan(world.batch))


@pytest.mark.parametrize("mixed", [False, True])
def test_each_invariant_is_asked_once(rt: Runtime, mixed: bool) -> None:
    """What the parts check in a step is checked in a planned step too, and not once for each part."""
    asked: dict[bool, dict[Code, int]] = {}
    for by_parts in (False, True):
        with checks("cheap"):
            world = World.planned(rt, by_parts=by_parts)
            world.join([5, 6, 7])  # the last step begins a page
            if mixed:
                world.batch = world.batch.merge(world.prompted([9]))
            before: dict[Code, int] = {}
            for _ in range(3):
                before = dict(times_checked)
                rt.next_step()
                step = world.planner.plan(world.batch, **world.tokens())
                inputs = step.inputs()
                step.publish(last=inputs.input_ids[inputs.last_token_indices])
                step.results.resolve()
                world.batch = step.batch
            asked[by_parts] = {code: times - before[code] for code, times in times_checked.items()}
    parts = {code for code, times in asked[True].items() if times}
    planned = {code for code, times in asked[False].items() if times}
    # Asked by torch's count of writes, in one look; and of handles, of which slot 0 is none.
    lost = {Code.MIRROR_FOREIGN_WRITE, Code.SLOT_ZERO_ALLOCATED}
    assert parts - planned == lost
    assert sum(asked[False].values()) <= 18 + mixed < sum(asked[True].values())


def test_a_planner_without_a_relay(rt: Runtime, full: None) -> None:
    """Where the host knows all ids, steps are planned without a relay, and publish nothing."""
    world = World.planned(rt)
    planner = StepPlanner(Running, pages=world.pages)
    step = planner.plan(world.prompted([2, 1, 3]), [2, 1, 3], prompt_ids=[[1, 2], [3], [4, 5, 6]])
    assert rt.inspect(step.inputs().input_ids).tolist() == [1, 2, 3, 4, 5, 6]
    step = planner.plan(step.batch, prompt_ids=[[7], [8], [9]])
    inputs = step.inputs()
    assert rt.inspect(inputs.input_ids).tolist() == [7, 8, 9]
    assert rt.inspect(inputs.positions).tolist() == [2, 1, 3]
    refused(Code.FUTURE_CONSUMED, step.inputs)
    refuses(ArgumentError, "publish without a relay", lambda: step.publish(last=[1, 2, 3]))
    first: dict[str, Any] = {"published": {"last": []}, "joining": Running.empty(rt)}
    refuses(ArgumentError, "published= and no relay", lambda: planner.plan(step.batch, **first))
    refuses(ArgumentError, "no field of a relay has their ids", lambda: planner.plan(step.batch))
    assert "no relay" in repr(planner)


def test_requests_without_tokens_have_nothing_to_read(full: None) -> None:
    """Checks read the rows of those with tokens alone, and no ids are as good as None, of one with KV too."""
    with RaceRuntime() as rt:
        world = World.planned(rt, 1)
        for length, ids in ((0, [1]), (0, []), (2, [])):
            first: dict[str, Any] = {"joining": columns(np.arange(1), [length]), "prompt_ids": [ids]}
            step: Any = world.planner.plan(Running.empty(rt), len(ids), samples=[False], **first)
            step.inputs()
            world.pages.release_requests(step.batch.slots, after=rt.record())
            rt.synchronize()


def test_no_step_is_planned_while_a_graph_is_captured(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything changes, and the step is planned once the capture is over."""
    world = World.planned(rt)
    world.join([PAGE_SIZE, 3])
    world.step()
    allocated, before = world.pages.allocated(world.batch.slots).tolist(), rt.counters.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "capturing", property(lambda runtime: True))
        with pytest.raises(CaptureError):
            world.planner.plan(world.batch)
    assert (rt.counters - before).host_to_device_copies == 0
    assert world.pages.allocated(world.batch.slots).tolist() == allocated
    world.step()


def test_a_mask_that_keeps_all_changes_nothing_of_the_batch_given(rt: Runtime) -> None:
    """The lengths move on in the batch of the step alone: that of the step before stays what it was."""
    world = World.planned(rt)
    world.join([3, 5])
    before = world.batch
    step, _ = world.step(keep=np.ones(2, dtype=np.bool_))
    assert before.seq_lens.np.tolist() == [3, 5]
    assert step.batch["seq_lens"].np.tolist() == [4, 6]


@given(
    seed=st.integers(0, 2**32),
    level=st.sampled_from(["off", "cheap", "full"]),
    mixed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_turn_overs_that_fail_are_taken_back(seed: int, level: str, mixed: bool) -> None:
    """Copies, launches and fences that fail leave all as it was, and the step that is planned again is right."""
    rng = np.random.default_rng(seed)
    with checks(level):
        worlds = [World.planned(open_runtime("cpu")) for _ in range(2)]
        for world in worlds:
            world.join([3, 6, 2, 7])
        failed, twin = worlds
        for _ in range(6):
            gone = rng.permutation(len(twin.batch))[: rng.integers(0, 3)].tolist()
            lens = rng.integers(1, 9, size=rng.integers(0, 3)).tolist()
            prompted = mixed and bool(rng.integers(2))
            if len(twin.batch) == len(gone) or len(twin.batch) + len(lens) > twin.slots.size:
                continue
            if int(twin.batch.seq_lens.max()) >= LONGEST - 1:
                break
            prompts, seen = dict(failed.prompts), []
            before = failed.state()
            failed.fails = (
                (failed.rt, "_copied_to_device", 1),
                (failed.rt, "launch", 1),
                (failed.rt, "launch", 2),
                (failed.slots, "query_fences", 1),
            )[rng.integers(4)]
            try:
                seen.append(failed.turn_over(gone, lens, prompted, as_columns=True)[1])
            except PlantedError:
                failed.prompts = prompts
                assert failed.state() == before
            failed.fails = None
            if not seen:
                seen.append(failed.turn_over(gone, lens, prompted, as_columns=True)[1])
            seen.append(twin.turn_over(gone, lens, prompted)[1])
            for leaves in seen:  # others of the free pages may have come
                for name in ("slot_mapping", "table", "table on the host", "slots, device", "slots"):
                    leaves.pop(name, None)
            assert seen[0] == seen[1]
            for world in worlds:
                world.check_table()
                world.relay.check()


# Refusals

DECLARED: dict[str, tuple[Expected, str, dict[str, Any]]] = {
    "no such column": (DeclarationError, "no column 'lens'", {"seq_lens": "lens"}),
    "a column of pairs": (DeclarationError, "no column 'pair'", {"seq_lens": "pair"}),
    "no such encoder": (DeclarationError, "no column 'encoders'", {"kv_offset": "encoders"}),
    "an encoder of pairs": (DeclarationError, "no column 'pair'", {"kv_offset": "pair"}),
    "no such field": (DeclarationError, "'tokens' is not declared", {"ids": "tokens"}),
    "no such result": (DeclarationError, "'tokens' is not declared", {"results": ("tokens",)}),
    "no such lengths": (DeclarationError, "'tokens' is not declared", {"lengths": "tokens"}),
    "ids without a relay": (DeclarationError, "'last' is not declared", {"relay": None}),
    "results without a relay": (DeclarationError, "'last' is not", {"relay": None, "ids": (), "results": ["last"]}),
    "an unknown layout": (DeclarationError, "'paged' in layouts", {"layouts": "paged"}),
    "a window of none": (ArgumentError, "window is 0", {"window": 0}),
}


@pytest.mark.parametrize("name", DECLARED)
def test_refuses_declarations(rt: Runtime, name: str) -> None:
    """A planner is declared with the columns and fields that there are, and with parts of one slot pool."""
    expected, words, wrong = DECLARED[name]
    world, other = World.planned(rt), World.planned(rt)
    options: dict[str, Any] = {"pages": world.pages, "relay": world.relay, "ids": "last"}
    refuses(expected, words, lambda: StepPlanner(Running, **options | wrong))
    refuses(ArgumentError, "two slot pools", lambda: StepPlanner(Running, **options | {"relay": other.relay}))


def joining(**changes: Any) -> Callable[[World], dict[str, Any]]:
    """Options of a plan in which the first request leaves, and two join whose columns are changed; None is left out."""

    def options(world: World) -> dict[str, Any]:
        named = {name: value for name, value in changes.items() if name in ("published", "extras")}
        given = {**columns(np.arange(2), [3, 4]), **{name: changes[name] for name in changes.keys() - named}}
        given = {name: value for name, value in given.items() if value is not None}
        return {"keep": [1], "joining": given, "published": {"last": [7, 8]}, "after": world.rt.record(), **named}

    return options


def of_another_runtime(world: World) -> dict[str, Any]:
    """A batch whose rows have the same number there, as after the same calls."""
    other = World.planned(open_runtime("cpu"))
    other.join([3, 5])
    return {"batch": other.batch}


def with_slots(world: World, slots: Any) -> dict[str, Any]:
    """Options of a plan in which one joins who has a slot."""
    return {"keep": [0], "joining": {"slots": slots, **columns(np.arange(1), [4])}}


PROMPT: dict[str, Any] = {"query_lens": [1, 1, 3], "prompt_ids": [None, None, [5, 6, 7]]}
"""A third request puts in three tokens of its prompt."""

Options = Callable[[World], dict[str, Any]]
PLANNED: dict[str, tuple[Expected, str, Options]] = {
    "another class": (ArgumentError, "expected a batch of Running", lambda w: {"batch": RunningToo.empty(w.rt)}),
    "another runtime": (DeviceError, "another runtime", of_another_runtime),
    "counts for others": (ShapeError, "one for each of 2 rows", lambda w: {"query_lens": np.ones(3, np.int64)}),
    "counts as floats": (DtypeError, "integers, got float64", lambda w: {"query_lens": np.ones(2)}),
    "counts as booleans": (DtypeError, "integers, got bool", lambda w: {"query_lens": np.ones(2, np.bool_)}),
    "counts as objects": (DtypeError, "values of dtype object", lambda w: {"query_lens": np.array([1, 1], object)}),
    "less than no token": (Code.LENGTH_ORDER, "3 tokens asked for", lambda w: {"query_lens": -1}),
    "ids for others": (ShapeError, "prompt_ids of 1 for 2", lambda w: {"prompt_ids": [None]}),
    "a prompt, and a token each": (ShapeError, "as many as `query_lens`", lambda w: {"prompt_ids": [None, [7, 8]]}),
    "the batch before": (Code.DERIVED_STALE, "`step.batch`", lambda w: {"batch": w.batch.replace(seq_lens=[3, 5])}),
    "samples for others": (ShapeError, r"expected bool\[2\]", lambda w: {"samples": np.ones(1, np.bool_)}),
    "fewer rows than requests": (ArgumentError, "pad", lambda w: {"pad_rows": 1}),
    "fewer tokens than there are": (ArgumentError, "pad_tokens is 1", lambda w: {"pad_tokens": 1}),
    "more rows than int32 has": (ArgumentError, "pad_rows is 2147483648", lambda w: {"pad_rows": 2**31}),
    "more tokens than int32 has": (ArgumentError, "pad_tokens is 2147483648", lambda w: {"pad_tokens": 2**31}),
    "more tokens than int64 has": (ValueOverflowError, "query_lens", lambda w: {"query_lens": 2**63}),
    "values for others": (ShapeError, "types of 1 for 2", lambda w: {"token_arrays": {"types": TokenArray([[1]])}}),
    "rows that are not there": (RowIndexError, "row 5", lambda w: {"keep": [0, 5]}),
    "another class joins": (
        DeclarationError,
        "expected another Running",
        lambda w: {"keep": [0], "joining": RunningToo.empty(w.rt)},
    ),
    "one leaves and joins": (
        ArgumentError,
        r"leave and join, in slots \[1\]",
        lambda w: {"keep": [1], "joining": w.batch.filter([0]), "after": None},
    ),
    "columns of one who leaves": (
        ArgumentError,
        r"leave and join, in slots \[2\]",
        lambda w: with_slots(w, w.batch.filter([1]).slots) | {"after": None},
    ),
    "a slot of another pool": (ArgumentError, "slots of pool", lambda w: with_slots(w, SlotPool(w.rt, 3).take(1))),
    "columns without lengths": (DeclarationError, "seq_lens", joining(seq_lens=None)),
    "lengths of others": (ShapeError, "joining", joining(seq_lens=[3, 4, 5])),
    "halves as booleans": (DtypeError, "greedy", joining(greedy=[0.5, 1.0])),
    "a column more": (DeclarationError, "further", joining(further=[1, 2])),
    "slots as numbers": (DtypeError, "slots", joining(slots=[1, 2])),
    "a token too many": (Code.LENGTH_ORDER, "row        2", joining(seq_lens=[3, LONGEST + 1])),
    "a prompt behind tokens": (
        ArgumentError,
        "row 2 joins with 3 tokens",
        lambda w: {"joining": columns(np.arange(1), [3]), **PROMPT},
    ),
    "more pages than there are": (PoolExhaustedError, "pages", joining(seq_lens=[LONGEST - 1, LONGEST - 1])),
    "one first value for two": (ShapeError, "publish of 'last'", joining(published={"last": [1]})),
    "an unknown first value": (
        DeclarationError,
        "'other', which is not declared",
        joining(published={"other": [1, 2]}),
    ),
    "no fence, and none leaves": (ArgumentError, "expected a fence as `after`", lambda w: {"after": "x"}),
    "first values, and none joins": (ArgumentError, "none joins", lambda w: {"published": {"last": [7]}}),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_that_is_refused_changes_nothing(rt: Runtime, name: str) -> None:
    """Nothing is taken, released, committed or published, and the next plan goes through."""
    expected, words, make = PLANNED[name]
    world = World.planned(rt, pages=10)
    world.join([3, 5])
    world.step()
    options = {"batch": world.batch, **make(world)}
    before, statistics = world.state(), world.slots.stats
    refuses(expected, words, lambda: world.planner.plan(**options))
    assert world.state() == before
    assert world.slots.stats == statistics  # slots that it took before the pages ran out were never taken
    world.check_table()
    step = world.planner.plan(world.batch, **joining()(world))
    assert step.inputs().input_ids.tolist() == [21, 7, 8]


def test_memory_that_cannot_be_had(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for which there is no memory has changed nothing, and the next one asks for what it needs."""
    world, allocate = World.planned(rt), rt._allocate_staging
    world.join([5, 6])
    before = world.state()

    def allocated(nbytes: int) -> torch.Tensor:
        if nbytes > 1 << 16:
            raise RuntimeError("no memory")
        return allocate(nbytes)

    monkeypatch.setattr(rt, "_allocate_staging", allocated)
    with pytest.raises(RuntimeError, match="no memory"):
        world.planner.plan(world.batch, pad_tokens=1 << 16)
    assert world.state() == before
    world.run(world.planner.plan(world.batch))


@pytest.mark.parametrize("padded", [{}, {"pad_rows": 4, "pad_tokens": 4}])
@pytest.mark.parametrize("wrong", [{"pad_tokens": 1}, {"samples": [True]}, {"query_lens": LONGEST}])
def test_a_refused_plan_spoils_no_step_and_keeps_grown_pages(
    rt: Runtime, padded: dict[str, int], wrong: dict[str, Any]
) -> None:
    """The step that was planned before takes its inputs, and pages that were grown in advance stay allocated."""
    world = World.planned(rt, pages=10)
    world.join([3, 5])
    world.step()
    slots = world.batch.slots
    world.pages.grow(slots.filter([0]), LONGEST)
    step = world.planner.plan(world.batch, **padded)  # type: ignore[arg-type]
    committed, allocated = world.pages.committed(slots), world.pages.allocated(slots)
    with pytest.raises((ArgumentError, ShapeError, Violation)):
        world.planner.plan(step.batch, **{**padded, **wrong})
    assert world.pages.committed(slots).tolist() == committed.tolist()
    assert world.pages.allocated(slots).tolist() == allocated.tolist()
    assert allocated[0] >= LONGEST
    assert step.inputs().positions.tolist()[:2] == (committed - 1).tolist()
    world.pages.verify()


PAUSED: dict[str, Any] = {"query_lens": [0, 1], "samples": [False, True]}


@pytest.mark.parametrize("options", [{}, {"pad_rows": 4, "pad_tokens": 4}, {"keep": [0], "after": None}, PAUSED])
def test_no_extra_has_the_name_of_an_array_of_the_step(rt: Runtime, options: dict[str, Any]) -> None:
    """Whatever the step: decode, padded, one that leaves, one that pauses."""
    world = World.planned(rt)
    world.join([3, 4])
    before = world.state()
    for name in ("positions", "kv_lens", "slot_mapping", "query_start_loc"):
        extras = {name: np.arange(2)}
        refuses(DeclarationError, name, functools.partial(world.planner.plan, world.batch, **options, extras=extras))
    assert world.state() == before
    world.planner.plan(world.batch, **options, extras={"own": np.arange(2)})


def test_one_write_in_the_place_of_a_list_sends_nothing(rt: Runtime) -> None:
    """It is Python's error, before the relay has the first values of those that join."""
    world = World.planned(rt)
    world.join([3, 5])
    options = {**joining()(world), "writes": world.pages.entry(world.batch.slots)}
    before, counters = world.state(), rt.counters.snapshot()
    with pytest.raises(TypeError, match="not iterable"):
        world.planner.plan(world.batch, **options)
    assert (world.state(), rt.counters) == (before, counters)


@both_ways
def test_the_longest_request(rt: Runtime, by_parts: bool) -> None:
    """A token more than a request may have is refused before anything changes."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([LONGEST])
    refused(Code.LENGTH_ORDER, lambda: world.planner.plan(world.batch))
    assert world.pages.committed(world.batch.slots).tolist() == [LONGEST]


def test_refusals_of_names_and_results(rt: Runtime) -> None:
    """Results and publishes too early, and an extra array named like one that a mixed step sends to the forward."""
    world = World.planned(rt)
    world.join([3])
    step = world.planner.plan(world.batch)
    refuses(ArgumentError, "has no results", lambda: step.results)
    refuses(ArgumentError, "its inputs were never taken", lambda: step.publish(last=[1]))
    step.inputs()
    refuses(DeclarationError, "publish of 'lost', which is not declared", lambda: step.publish(lost=[1]))
    world.batch = step.batch.merge(world.prompted([4]))
    before, extras = world.state(), {"positions": np.arange(3)}
    tokens = world.tokens()
    refuses(DeclarationError, "positions", lambda: world.planner.plan(world.batch, **tokens, extras=extras))
    assert world.state() == before


def strided_results(rt: Runtime) -> None:
    """A result of a single request is a column of a wider tensor: torch calls it contiguous, and keeps its stride."""
    world = World.planned(rt)
    world.join([3])
    step = world.planner.plan(world.batch)
    ids = step.inputs().input_ids
    step.publish(last=torch.stack([ids, ids + 1], 1)[:, 1])
    assert step.results["last"].np.tolist() == [11]


def test_strided_results(rt: Runtime) -> None:
    """On each device that records what is done."""
    strided_results(rt)
    with RaceRuntime() as traced:
        strided_results(traced)
    with SimRuntime() as simulated:
        strided_results(simulated)


@pytest.mark.parametrize("write", ["plain", "data", "numpy", "dlpack"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_into_inputs_spoils_no_other_step(rt: Runtime, write: str, inference: bool) -> None:
    """A forward writes into its slots, in a way that torch counts or not: later steps index by the host's rows."""
    world, read = World.planned(rt), []
    with checks("cheap"), torch.inference_mode(inference):
        world.join([5, 3])
        for turn in range(3):
            step = world.planner.plan(world.batch)
            inputs: Any = step.inputs()
            if turn == 0:
                slots = inputs.slots
                slots = {"data": slots.data, "dlpack": torch.utils.dlpack.from_dlpack(slots)}.get(write, slots)
                if write == "numpy" and rt.device.type == "cpu":
                    slots.numpy()[0] = 2
                else:
                    slots[0] = 2
            read.append(inputs.input_ids.tolist())
            step.publish(last=inputs.input_ids + 1)
            world.batch = step.batch
    assert read == [[10, 20], [11, 21], [12, 22]]


def test_arguments_that_would_be_lost_are_refused(rt: Runtime) -> None:
    """Ids that leave their dtype, extras named like an array of the planner or of tokens, rows that somebody writes."""
    world = World.planned(rt)
    world.join([3])
    kind, named = type(world.batch), {"seq_lens": "seq_lens", "pages": world.pages}
    narrow = StepPlanner(kind, **named, int32=["input_ids"])  # type: ignore[arg-type]
    flash = StepPlanner(kind, **named, relay=world.relay, ids="last", layouts="flash_attention")  # type: ignore[arg-type]
    before, batch, two = world.state(), world.batch, np.zeros(2, dtype=np.int64)
    refuses(ValueOverflowError, "prompt_ids", lambda: narrow.plan(batch, 2, prompt_ids=[[2**32 + 7, 1]]))
    refuses(DeclarationError, "block_table", lambda: flash.plan(batch, extras={"block_table": two}))
    both = {"extras": {"types": two}, "token_arrays": {"types": TokenArray([[3]])}}
    refuses(DeclarationError, "types", lambda: flash.plan(batch, **both))  # type: ignore[arg-type]
    assert world.state() == before
    step = flash.plan(batch)
    for array in (step.rows, step.generations):
        assert not array.flags.writeable


def test_an_interrupt_behind_first_values_leaves_the_mark(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """First values of a request that has no slot yet would be those of the slot's next owner: the pool refuses."""
    world = World.planned(rt)
    world.join([3])

    def interrupted(new: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(world.pages._holders, "note", interrupted)
    joining = columns(np.array([2]), [2])
    with pytest.raises(KeyboardInterrupt):
        world.planner.plan(world.batch, joining=joining, published={"last": [7]})
    refuses(PoolBrokenError, "plan", lambda: world.planner.plan(world.batch))


# Requests that leave and join


@pytest.mark.parametrize("published", [None, {"logit": [1.0]}])
def test_a_request_that_joins_without_its_first_token_is_noticed(rt: Runtime, published: dict[str, Any] | None) -> None:
    """Entries of those that stay are not read again; one that joins has to have one, whatever else it has."""
    world = World.planned(rt)
    world.join([3, 4])
    world.step()
    new = world.arrived([5])
    step = world.planner.plan(world.batch, keep=[1], joining=new, after=rt.record(), published=published)
    violation = refused(Code.FUTURE_UNWRITTEN, step.inputs)
    assert (violation.slot, violation.row) == (int(new.slots.np[0]), 1)


@pytest.mark.parametrize(("code", "act"), [(Code.FUTURE_UNWRITTEN, "discard"), (Code.FUTURE_CONSUMED, "gather")])
def test_what_happens_to_those_that_stay_between_two_steps_is_noticed(rt: Runtime, code: Code, act: str) -> None:
    """An entry that was discarded, or taken, since the step before is none for the step in which others join."""
    world = World.planned(rt)
    world.join([3, 4])
    world.step()
    getattr(world.relay, act)(world.batch.filter([1]).slots, "last")
    new = world.arrived([5])
    first = {"last": 10 * new.slots.np}
    step = world.planner.plan(world.batch, keep=[1], joining=new, after=rt.record(), published=first)
    assert refused(code, step.inputs).row == 0


@pytest.mark.parametrize("there", [0, 3])
def test_a_prompt_begins_behind_the_tokens_that_are_there(rt: Runtime, there: int) -> None:
    """A request that has its slot and KV from elsewhere puts in the rest; one without puts in all."""
    world = World.planned(rt)
    world.join([3, 5])
    joining: Any = world.arrived([there]) if there else columns(np.arange(1), [0])
    inputs = world.planner.plan(world.batch, joining=joining, **PROMPT).inputs()
    assert rt.inspect(inputs.positions).tolist() == [3, 5, there, there + 1, there + 2]


def test_requests_arrive_with_pages(rt: Runtime) -> None:
    """Slots and pages of many are taken together or not at all, and their token rows are what `extend` would write."""
    world = World.planned(rt, pages=4)
    for lens in ([5, 9, 1], [LONGEST + 1]):
        with pytest.raises((PoolExhaustedError, Violation)):
            world.pages.take_requests(lens)
        assert (world.slots.stats.live, world.pages.stats.live) == (0, 0)
    slots = world.pages.take_requests([5, 0, 8])
    assert world.pages.committed(slots).tolist() == [5, 0, 8]
    assert world.pages.locations(slots.split([2, 1])[1], 0, 8).np.tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    world.pages.entry(slots).launch()
    rows = rt.inspect(world.table.memory)[slots.np]
    assert rows[0, :8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert rows[1].tolist() == [0] * LONGEST
    assert rows[2, :8].tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    narrow = world.slots.table("narrow", (8,), torch.int64, holds="location")
    with checks("full"):
        world.pages.entry(slots, narrow).launch()
    assert rt.inspect(narrow.memory)[slots.np].tolist() == rows[:, :8].tolist()
    too_narrow = world.slots.table("too narrow", (7,), torch.int64, holds="location")
    with pytest.raises(RowIndexError):
        world.pages.entry(slots, too_narrow)
    world.pages.release_requests(slots, after=None)
    world.slots.expect_idle()


def test_handles_of_many_are_joined_at_once(rt: Runtime) -> None:
    """As merging them one by one, whatever they are."""
    pool, other = SlotPool(rt, 300), SlotPool(rt, 3)
    parts = [pool.take(n % 3) for n in range(256)]
    joined = Slots.cat(parts)
    assert joined.np.tolist() == [slot for part in parts for slot in part.np.tolist()]
    assert joined.generations.tolist() == [1] * len(joined)
    pool.check_handles(joined, "test")
    assert parts[1].device.tolist() == parts[1].np.tolist()  # it has a device side from here on
    assert Slots.cat(parts).device.tolist() == joined.np.tolist()
    with pytest.raises(ArgumentError):
        Slots.cat([joined, other.take(1)])


def test_joined_handles_are_checked_once_a_side_was_read(rt: Runtime) -> None:
    """A handle whose device side, host tensor or window somebody has is checked before it is joined with others."""
    pool = SlotPool(rt, 8)
    with checks("cheap"):
        for side in ("device", "host", "device_side"):
            first, second = pool.take(1), pool.take(1)
            theirs = getattr(second, side)
            joined = Slots.cat([first, second])
            assert joined.device.tolist() == [*first.np.tolist(), *second.np.tolist()]
            (theirs.tensor(rt) if side == "device_side" else theirs).add_(1)
            refused(Code.MIRROR_FOREIGN_WRITE, lambda first=first, second=second: Slots.cat([first, second]))  # type: ignore[misc]
            pool.free(first, after=None)
        first, second = pool.take(1), pool.take(1)
        with second.stale("host", reason="being resolved"):
            joined = Slots.cat([first, second])
            refused(Code.MIRROR_STALE_READ, lambda: joined.np)


@both_ways
def test_rows_of_requests_that_arrive_are_written_with_the_step(rt: Runtime, by_parts: bool) -> None:
    """No caller has to name them, and a caller that has written or names them does no harm."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([3])
    for named in ("by the step", "before it", "with it"):
        new = world.arrived([6])
        entry = world.pages.entry(new.slots)
        if named == "before it":
            entry.launch()
        with checks("full"):
            world.step(joining=new, published={"last": [7]}, writes=[entry] if named == "with it" else [])
        world.check_table()


@pytest.mark.parametrize("at", [1, 2])
def test_slots_written_by_a_forward_are_noticed_in_any_step(at: int) -> None:
    """They are memory of the step alone: what is published goes where it belongs, and the batch reports the write."""
    with open_runtime("cpu") as rt:
        world = World.planned(rt)
        world.join([3, 4])
        for _ in range(at):
            world.step()
        step = world.planner.plan(world.batch)
        inputs = step.inputs()
        inputs.slots.fill_(1)
        step.publish(last=inputs.input_ids + 1)
        assert step.batch["slots"].device.tolist() == [1, 1]
        assert refused(Code.MIRROR_FOREIGN_WRITE, lambda: world.planner.plan(step.batch)).column == "slots"
        assert step.results["last"].np.tolist() == [11 + at, 21 + at]
        assert world.relay.gather(world.batch.slots, "last").tolist() == [11 + at, 21 + at]


@both_ways
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_tokens_of_a_step_that_was_never_launched_are_not_written(dropped: int, by_parts: bool) -> None:
    """A step that was planned and whose forward never ran leaves a gap: no step goes on, and no prefix is held."""
    with open_runtime("cpu") as rt:
        world = World.planned(rt, by_parts=by_parts)
        world.join([3, 4])
        for turn in range(5):
            if turn > dropped and not by_parts:
                breach = refused(Code.PAGE_UNWRITTEN, world.step)
                assert (breach.row, breach.operation, breach.actual) == (0, "inputs", 4 + dropped)
                return
            if turn != dropped:
                world.step()
                continue
            rt.next_step()
            world.batch = world.planner.plan(world.batch).batch
        refused(Code.PAGE_UNWRITTEN, lambda: world.pages.hold(world.batch.filter([0]).slots, 8))


@pytest.mark.parametrize("level", ["cheap", "full"])
@pytest.mark.parametrize("launched", [False, True])
def test_a_step_is_taken_back(rt: Runtime, launched: bool, level: str) -> None:
    """A step whose forward never ran, or failed, is planned anew from the same tokens; its own inputs are gone."""

    def taken(step: Any) -> list[list[int]]:
        inputs = step.inputs()
        return [rt.inspect(array).tolist() for array in (inputs.input_ids, inputs.positions, inputs.slot_mapping)]

    with checks(level):
        world = World.planned(rt)
        world.join([3, PAGE_SIZE])
        world.step()
        free, lens = world.pages.stats.free, world.batch.seq_lens.np.tolist()
        step: Any = world.planner.plan(world.batch)
        wanted = taken(step) if launched else None
        after = rt.record()
        batch = step.rollback(after=after)
        assert (batch.seq_lens.np.tolist(), batch.slots.np.tolist()) == (lens, step.batch.slots.np.tolist())
        refused(Code.DERIVED_STALE, step.inputs)
        with pytest.raises(ArgumentError, match="never taken"):
            step.publish(last=rt.upload([np.array([5, 6])]).view(0))
        with pytest.raises(ArgumentError, match="it was taken back"):
            step.rollback(after=after)
        after.wait()
        world.pages.slots.query_fences()
        assert world.pages.stats.free == free
        again: Any = world.planner.plan(batch)
        got = taken(again)
        assert wanted is None or got[:2] == wanted[:2]
        again.publish(last=rt.upload([np.array([5, 6])]).view(0))
        assert again.results["last"].np.tolist() == [5, 6]
        with pytest.raises(ArgumentError, match="it has published"):
            again.rollback(after=rt.record())


def test_a_step_is_taken_back_without_those_that_left(rt: Runtime) -> None:
    """A request that hangs up between a plan and its rollback is gone, and the others go on; so with all of them."""
    world = World.planned(rt)
    world.join([3, 4, 5])
    step: Any = world.planner.plan(world.batch)
    step.inputs()
    world.pages.release_requests(step.batch.filter([1]).slots, after=rt.record())
    batch = step.rollback(after=rt.record())
    assert (batch.slots.np.tolist(), batch.seq_lens.np.tolist()) == ([1, 3], [3, 5])
    assert rt.inspect(world.planner.plan(batch).inputs().input_ids).tolist() == [10, 30]
    ended: Any = world.planner.plan(world.arrived([2]))
    world.pages.release_requests(ended.batch.slots, after=rt.record())
    assert len(ended.rollback(after=rt.record())) == 0
    world.slots.verify()


def test_steps_are_taken_back_from_the_last_on(rt: Runtime) -> None:
    """The tokens of a step behind it would go with those of the first, and nothing would say so."""
    world = World.planned(rt)
    world.join([3, 4])
    first: Any = world.planner.plan(world.batch)
    later: Any = world.planner.plan(first.batch)
    with pytest.raises(ArgumentError, match="row 0, of which a later step has put in more"):
        first.rollback(after=rt.record())
    assert later.rollback(after=rt.record()).seq_lens.np.tolist() == [4, 5]
    assert first.rollback(after=rt.record()).seq_lens.np.tolist() == [3, 4]


def test_tokens_that_others_have_are_not_taken_back(rt: Runtime) -> None:
    """Nobody wrote the tokens of a forward that failed: a cache that has their page lets go of it first."""
    world = World.planned(rt)
    world.join([PAGE_SIZE - 1])
    step: Any = world.planner.plan(world.batch)
    step.inputs()
    lease = world.pages.hold(step.batch.slots, PAGE_SIZE)
    refused(Code.PAGE_OWNER, lambda: step.rollback(after=rt.record()))
    lease.release(after=rt.record())
    assert step.rollback(after=rt.record()).seq_lens.np.tolist() == [PAGE_SIZE - 1]


def test_a_prompt_behind_an_encoder_is_taken_back(rt: Runtime) -> None:
    """The pages hold no token of the encoder either, and the request stays."""
    world = World.planned(rt, kv_offset="seed")
    rt.next_step()
    joining = {**columns(np.array([5]), [0]), "seed": [5]}
    step: Any = world.planner.plan(world.batch, 3, joining=joining, prompt_ids=[[7, 8, 9]])
    assert world.pages.committed(step.batch.slots).tolist() == [8]
    batch = step.rollback(after=None)
    assert world.pages.committed(batch.slots).tolist() == [0]
    assert batch.seq_lens.np.tolist() == [0]
    step = world.planner.plan(batch, 3, prompt_ids=[[7, 8, 9]])
    assert world.pages.committed(step.batch.slots).tolist() == [8]


@both_ways
@pytest.mark.parametrize("level", ["off", "cheap"])
def test_what_a_step_finds_is_published_for_its_own_requests_alone(rt: Runtime, level: str, by_parts: bool) -> None:
    """A request that left since the step was planned has no inputs and no entry; the one in its slot has its own."""
    with checks(level):
        world = World.planned(rt, by_parts=by_parts)
        world.join([3, 4])
        step = world.planner.plan(world.batch)
        ids = step.inputs().input_ids + 1
        world.pages.release_requests(world.batch.filter([0]).slots, after=None)
        refused(Code.SLOT_STALE_HANDLE, step.inputs)
        refused(Code.SLOT_STALE_HANDLE, lambda: step.publish(last=ids))
        later = world.slots.take(1)
        world.relay.publish(later, last=[70])
        refused(Code.SLOT_STALE_HANDLE, lambda: step.publish(last=ids))
        assert rt.inspect(world.relay.gather(later, "last")).tolist() == [70]


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("chunks", [True, False])
def test_another_rank_has_the_inputs_of_a_planned_step(rt: Runtime, has_ids: bool, chunks: bool) -> None:
    """The plan of a planned step says what the plan of the parts does, and travels as that does."""
    seen = []
    for by_parts in (False, True):
        first, other = ranks = [World.planned(rt, by_parts=by_parts) for _ in range(2)]
        for world in ranks:
            world.join([3, 4])
        options: dict[str, Any] = {"relay": first.relay, "ids": "last"} if has_ids else {"has_ids": False}
        kind: Any = StepByParts if by_parts else StepPlanner
        planner = kind(Running, pages=first.pages, window=4, **options)
        plan = planner.plan(first.batch, 0 if chunks else 1, samples=np.full(2, not chunks)).plan
        other.pages.advance(other.batch.slots, 0 if chunks else 1)
        theirs = ForwardPlan.from_bytes(plan.to_bytes(), other.slots, pages=other.pages)
        names = ["has_ids", "deferred", "int32", "relay_rows", "sample_rows", "query_lens", "seq_lens", "_reach"]
        numbers = [np.asarray(getattr(theirs, name)).tolist() for name in names]
        inputs = other.relay.resolve_forward_inputs(theirs, theirs.upload(), ids="last" if has_ids else ())
        names = ["slots", "positions", "query_start_loc", "kv_lens", "last_token_indices", "slot_mapping"]
        tensors = [getattr(inputs, name) for name in names + ["input_ids"] * has_ids]
        seen.append([numbers, [(str(tensor.dtype), rt.inspect(tensor).tolist()) for tensor in tensors]])
    assert seen[0] == seen[1]


@both_ways
def test_the_row_of_a_request_that_arrives_and_pauses_is_written(rt: Runtime, by_parts: bool) -> None:
    """It is sent with the step in which the request joins, and the request is its owner from then on."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([3])
    new = world.arrived([6]).merge(world.prompted([4]))
    samples = np.array([True, False, False])
    step = world.planner.plan(world.batch, [1, 0, 0], prompt_ids=[None] * 3, samples=samples, joining=new)
    slots: Any = step.batch["slots"]
    with checks("full"):  # which reads the rows of those that have tokens
        step.inputs()
    assert world.table.written(slots).tolist() == [True, True, False]


def begun_elsewhere(world: World, rows: list[int]) -> None:
    """An engine extends its requests of 4 and 5 tokens itself, and writes the places of the tokens, of `rows` alone."""
    slots = world.batch.slots
    extension = world.pages.extend(slots, [5, 6])  # the first begins a page, whose rest is not written
    world.pages.commit(slots, [5, 6])
    world.table.write(slots.take(rows), extension.positions[rows], extension.locations.np[rows])
    world.batch = world.batch.replace(seq_lens=[5, 6])


def test_a_page_that_was_begun_elsewhere_is_written_when_others_join(rt: Runtime) -> None:
    """An engine that writes its rows token by token leaves the rest of a page out: the step that comes next has it."""
    world = World.planned(rt)
    world.join([3, 4])
    world.step()
    begun_elsewhere(world, [0])
    for _ in range(2):
        rows, _generations = world.next_handles(1)
        world.step(keep=[0, 1], joining=columns(rows, [2]), published={"last": [7]}, after=rt.record())
        world.check_table()


def test_a_row_is_written_by_the_step_after_one_that_failed(rt: Runtime) -> None:
    """The second step writes the rest of each page: if its copy fails, the next one has the place of its token too."""
    world = World.planned(rt)
    world.join([4, 5])
    begun_elsewhere(world, [0, 1])
    world.step()
    with failing(rt, "_copied_to_device", 1), pytest.raises(PlantedError):
        world.planner.plan(world.batch)
    rows, _generations = world.next_handles(1)
    world.step(joining=columns(rows, [3]), published={"last": [7]})
    world.check_table()


@attrs.define(eq=False)
class Meddling:
    """A fence, or values, of an engine that releases requests as soon as they are asked."""

    world: World
    row: int
    values: list[int] = attrs.field(factory=list)

    def act(self) -> None:
        if self.row >= 0:
            row, self.row = self.row, -1
            self.world.pages.release_requests(self.world.batch.slots.filter([row]), after=None)

    def query(self) -> bool:
        self.act()
        return True

    def wait(self) -> None:
        raise AssertionError("the host waited")

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.act()
        return np.array(self.values, dtype=dtype or np.int64)


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("asked", ["fence", "prompt_ids", "extras", "published", "joining"])
def test_a_plan_whose_arguments_release_requests_is_refused(rt: Runtime, asked: str, row: int, level: str) -> None:
    """Whoever it releases, that runs or leaves, is released once, and the pools stay whole."""
    with checks(level):
        world = World.planned(rt)
        world.join([3, 4, 5])
        world.step()
        meddling = Meddling(world, row, [7])
        new, options = columns(np.arange(1), [3]), {"published": {"last": [7]}}
        if asked == "fence":
            world.slots.free(world.slots.take(1), after=meddling)
        elif asked == "joining":
            new["seed"] = meddling
        elif asked == "prompt_ids":
            new, options = columns(np.arange(1), [0]), {"prompt_ids": [None, None, meddling]}  # type: ignore[dict-item]
        else:
            options[asked] = {"last" if asked == "published" else "x": meddling}  # type: ignore[dict-item]
        with pytest.raises(Violation):
            world.planner.plan(world.batch, keep=[0, 2], joining=new, after=rt.record(), **options)  # type: ignore[arg-type]
        assert meddling.row == -1
        assert world.slots.stats.live == 2
        world.slots.verify()
        world.pages.verify()


class Bounded(Batch):
    """Requests whose true lengths the relay has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


@pytest.mark.parametrize("pad_tokens", [1, 2])
def test_bounds_need_a_token_table(rt: Runtime, pad_tokens: int) -> None:
    """Without one the device cannot look up where KV goes: inputs are refused, and nothing is taken from the relay."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {name: relay_field(torch.int64, read_by="both") for name in ("last", "lens", "kept")})
    pages, slots = PagePool(rt, pool, 8, 4, max_tokens_per_request=8), pool.take(1)
    pages.extend(slots, 6)
    relay.publish(slots, last=[1], lens=[4])
    planner = StepPlanner(
        Bounded, pages=pages, relay=relay, ids="last", lengths="lens", accepted="kept", results=("kept",)
    )
    lens = MirroredTensor.from_pair(rt, [6], rt.upload([np.array([4])]).view(0), contract="upper_bound")
    step = planner.plan(Bounded.build(rt, slots=slots, seq_lens=lens), pad_tokens=pad_tokens)
    with pytest.raises(ArgumentError, match="no token table"):
        step.inputs()
    assert [str(state) for state in relay.states(slots, "last")] == ["published"]


class Tagged(Batch):
    """Requests with a column that the device has alone."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    tag = device_only(torch.int64)


def test_device_columns_of_many_joins_are_gathered(rt: Runtime) -> None:
    """Each request that joins brings a tensor, which is not kept for ever; what is made of the batch has its rows."""
    pages = PagePool(rt, SlotPool(rt, 40), 80, 4, max_tokens_per_request=32)
    planner, batch = StepPlanner(Tagged, pages=pages), Tagged.empty(rt)
    for i in range(20):
        n, tag = len(batch) + 1, rt.upload([np.array([i])]).view(0)
        step = planner.plan(batch, prompt_ids=[[7]] * n, joining={"seq_lens": [0], "tag": tag}, pad_rows=n + i % 2)
        batch = cast(Tagged, step.batch)
        assert len(batch._state.device["tag"].sources) <= 9
        if i % 7 == 6:
            assert rt.inspect(batch.replace(seq_lens=batch.seq_lens.np).tag.device).tolist() == list(range(n))
    assert rt.inspect(batch.tag.device).tolist() == list(range(20))
