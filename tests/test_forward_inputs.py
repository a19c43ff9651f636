"""ForwardInputs: what a forward gets is what its requests hold, known to the host, the relay, or both."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchstate import MirroredTensor, Slots, checks
from batchstate.batch import Extras
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    ShapeError,
)
from batchstate.forward.inputs import ForwardInputs
from batchstate.forward.plan import ForwardPlan
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from batchstate.testing import LateRuntime, no_hidden_sync
from batchstate.violations import Code
from tests.doubles import fake_accelerator, in_a_thread, refused
from tests.refusals import Expected, refuses
from tests.worlds import LONGEST, PAGE_SIZE, ForwardWorld, Running, values

some = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture
def world(rt: Runtime) -> ForwardWorld:
    """8 requests at most."""
    return ForwardWorld.of(rt)


# Ids


@attrs.define(eq=False)
class Case:
    """One batch: of each request its length, and its chunk; None is a request that the relay feeds."""

    seq_lens: list[int]
    chunks: list[int | None]
    width: int
    padded_rows: int
    padded_tokens: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Prompts, chunks, requests that put in nothing, decodes, and decodes with two drafts, all in one batch."""
    width = draw(st.sampled_from([1, 3]))
    seq_lens = draw(st.lists(st.integers(width, LONGEST), max_size=5))
    chunks = [draw(st.none() | st.integers(0, length)) for length in seq_lens]
    padding = st.integers(0, 3)
    return Case(seq_lens, chunks, width, draw(padding), draw(padding))


@some
@given(cases())
def test_ids_of_any_batch(device: str, case: Case) -> None:
    """Prompts' ids come from the host and all others from the relay, each at its token, and padding is 0."""
    world = ForwardWorld.of(open_device(device))
    rt, relay = world.rt, world.relay
    slots = world.take(case.seq_lens)
    world.publish(slots)
    ids: list[list[int] | None] = []
    expected: list[int] = []
    for row, (length, chunk) in enumerate(zip(case.seq_lens, case.chunks, strict=True)):
        ids.append(None if chunk is None else [1000 * row + p for p in range(length - chunk, length)])
        last = 10 * int(slots.np[row])
        expected += [last, last + 1, last + 2][: case.width] if ids[-1] is None else ids[-1]
    queries = [case.width if chunk is None else chunk for chunk in case.chunks]
    batch = Running.build(rt, slots=slots, seq_lens=case.seq_lens).pad(len(slots) + case.padded_rows)
    plan = ForwardPlan.of(
        batch.slots,
        batch.seq_lens,
        queries,
        prompt_ids=ids,
        samples=np.array(queries, np.int64) > 0,
        pages=world.pages,
        pad_tokens=len(expected) + case.padded_tokens,
    )
    uploaded = batch.upload(extras=plan.extras)
    before = rt.counters.snapshot()
    fields = "last_token" if case.width == 1 else ("last_token", "drafts")
    inputs = relay.resolve_forward_inputs(plan, uploaded, ids=fields)
    spent = rt.counters - before
    assert spent.host_to_device_copies == any(case.chunks)  # neither None nor of no tokens
    assert spent.forced_syncs == spent.fence_waits == spent.device_to_host_copies == 0
    assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64
    assert values(rt, inputs.input_ids) == expected + [0] * case.padded_tokens
    assert values(rt, inputs.slots) == slots.np.tolist() + [0] * case.padded_rows
    for name, array in plan.extras.items():
        if hasattr(inputs, name) and name != "input_ids":
            assert values(rt, getattr(inputs, name)) == array.tolist(), name
    assert values(rt, inputs.sampled_slots.device) == inputs.sampled_slots.np.tolist()
    for field in ("last_token", "drafts"):
        taken = field == "last_token" or case.width == 3
        wanted = ["consumed" if chunk is None and taken else "published" for chunk in case.chunks]
        assert world.states(slots, field) == wanted


def test_forward_entry_publishes_what_the_forward_writes(rt: Runtime, world: ForwardWorld) -> None:
    """A prefix is shared one step after its prefill was launched: nothing waits on that stream, another one does."""
    slots, pages, later = world.take([8, 6]), world.pages, world.slots
    first, other = slots.take([0]), slots.take([1])
    forward, elsewhere = rt.stream("forward"), rt.stream("elsewhere")
    plan, uploaded = world.planned(slots, [8, 6], [8, 2], prompt_ids=[range(8), range(2)], pages=pages)
    refused(Code.PAGE_UNWRITTEN, lambda: pages.share(first, later.take(1), PAGE_SIZE))
    with rt.use(forward):
        world.resolve(plan, uploaded)
        sharer = later.take(1)
        pages.share(first, sharer, PAGE_SIZE)
        refused(Code.PAGE_UNWRITTEN, lambda: pages.hold(other, PAGE_SIZE))  # nothing has written its first tokens
        pages.extend(sharer, PAGE_SIZE + 1)
    for stream, waits in ((forward, 0), (elsewhere, 1), (elsewhere, 0)):
        with rt.use(stream):
            plan, uploaded = world.planned(sharer, [PAGE_SIZE + 1], [1], prompt_ids=[[7]], pages=pages)
            before = rt.counters.snapshot()
            world.resolve(plan, uploaded)
        spent = rt.counters - before
        assert (spent.stream_waits, spent.forced_syncs, spent.fence_waits) == (waits, 0, 0)


@pytest.mark.usefixtures("full")
def test_full_finds_padding_that_is_not_finite(rt: Runtime, world: ForwardWorld) -> None:
    """The forward that would read NaN in page 0 of the KV memory is refused at its entry."""
    kv = rt.device_zeros((world.pages.location_capacity, 2), torch.float32)
    world.pages.register_kv(kv)
    slots = world.take([3])

    def forward() -> None:
        world.resolve(*world.planned(slots, [3], [3], prompt_ids=[range(3)], pages=world.pages))

    forward()
    kv[0, 1] = float("nan")
    refused(Code.PAGE_ZERO_FINITE, forward)


@pytest.mark.usefixtures("full")
def test_full_compares_the_column_with_the_relay(rt: Runtime, world: ForwardWorld) -> None:
    """A bounded column whose device side holds other lengths than the last forward published is MIRROR_EQUAL."""
    slots = world.take([9, 9])
    world.relay.publish(slots, last_token=[1, 2], lens=[5, 6])
    lens = world.bounds([9, 9], [6, 8])  # with this step's token: the second should be 7
    plan, uploaded = world.planned(slots, lens)
    refused(Code.MIRROR_EQUAL, lambda: world.resolve(plan, uploaded, lengths="lens"))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_idle_step(rt: Runtime, world: ForwardWorld, full: None, rows: int) -> None:
    """A step of no requests has inputs too: none, or padded lanes."""
    batch = Running.empty(rt).pad(rows)
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=world.pages, pad_tokens=rows)
    inputs = world.resolve(plan, batch.upload(extras=plan.extras))
    assert values(rt, inputs.input_ids) == values(rt, inputs.slot_mapping) == [0] * rows
    assert values(rt, inputs.last_token_indices) == [0] * rows
    assert repr(inputs) == "ForwardInputs(ForwardPlan(0 requests, 0 tokens, 0 by the relay))"


def test_no_stand_in_becomes_an_id(rt: Runtime, world: ForwardWorld) -> None:
    """A request that the relay is to feed, and has nothing for, is an error: no zero and no -1 goes to the model."""
    slots = world.take([5, 6])
    world.publish(slots.take([0]))
    for level in ("cheap", "full"):
        with checks(level):
            plan, uploaded = world.planned(slots, [5, 6], prompt_ids=[None, None])
            violation = refused(Code.FUTURE_UNWRITTEN, functools.partial(world.resolve, plan, uploaded))
            assert (violation.row, violation.slot) == (1, int(slots.np[1]))
            assert str(violation.reader).startswith("resolve_forward_inputs in step 0")


def test_negative_ids_are_found_on_the_device(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """At level `full` a stand-in that a forward has published is found before a model embeds it."""
    slots = world.take([5, 6])
    world.relay.publish(slots, last_token=rt.upload([np.array([5, -1])]).view(0))
    plan, uploaded = world.planned(slots, [5, 6])
    violation = refused(Code.SENTINEL_ESCAPED, lambda: world.resolve(plan, uploaded))
    assert violation.row == 1


# Lengths that the host does not know


@attrs.define(eq=False)
class Bounded:
    """A batch of which the host has bounds; `chunks[i]` None is a request that the relay feeds."""

    true_lens: list[int]  # before the step
    slack: list[int]
    chunks: list[int | None]
    width: int
    padded_rows: int
    padded_tokens: int


@st.composite
def bounded_cases(draw: st.DrawFn) -> Bounded:
    """Speculating requests whose lengths lie below their bounds, and prompts beside them."""
    width = draw(st.sampled_from([1, 3]))
    true_lens = draw(st.lists(st.integers(1, LONGEST - 6), min_size=1, max_size=5))
    chunks = [draw(st.none() | st.integers(1, 4)) for _ in true_lens]
    slack = [0 if chunk is not None else draw(st.integers(0, 2)) for chunk in chunks]
    padding = st.integers(0, 2)
    return Bounded(true_lens, slack, chunks, width, draw(padding), draw(padding))


@some
@given(bounded_cases())
def test_lengths_that_only_the_device_knows(device: str, case: Bounded) -> None:
    """Positions, KV lengths, starts and locations follow the true lengths; prompts, and the batch, stay as they are."""
    with checks("full"):
        follow_true_lengths(ForwardWorld.of(open_device(device)), case)


def follow_true_lengths(world: ForwardWorld, case: Bounded) -> None:
    """Plans with bounds, resolves, and compares with a loop over true lengths."""
    rt, width = world.rt, case.width
    queries = [width if chunk is None else chunk for chunk in case.chunks]
    after = [true + query for true, query in zip(case.true_lens, queries, strict=True)]
    bounds = [true + slack for true, slack in zip(after, case.slack, strict=True)]
    slots = world.take(bounds)
    world.publish(slots)
    world.relay.publish(slots, lens=rt.upload([np.array(case.true_lens)]).view(0))
    column = MirroredTensor.from_pair(rt, bounds, rt.upload([np.array(after)]).view(0), contract="upper_bound")
    batch = Running.build(rt, slots=slots, seq_lens=column).pad(len(slots) + case.padded_rows)
    ids = [None if chunk is None else [7] * chunk for chunk in case.chunks]
    plan = ForwardPlan.of(
        batch.slots,
        batch.seq_lens,
        queries,
        prompt_ids=ids,
        pages=world.pages,
        pad_tokens=sum(queries) + case.padded_tokens,
        layouts="flash_attention",
    )
    assert plan.bounded == (None in case.chunks)
    uploaded = batch.upload(extras=plan.extras)
    before = rt.counters.snapshot()
    inputs = world.relay.resolve_forward_inputs(
        plan,
        uploaded,
        ids="last_token" if width == 1 else ("last_token", "drafts"),
        lengths="lens",
        req_to_token=world.table,
    )
    assert (rt.counters - before).host_to_device_copies == any(chunk is not None for chunk in case.chunks)
    assert (rt.counters - before).forced_syncs == 0
    positions = [list(range(length - query, length)) for length, query in zip(after, queries, strict=True)]
    locations = [world.locations(int(slot), run) for slot, run in zip(slots.np, positions, strict=True)]
    tail, rows = [0] * case.padded_tokens, [0] * case.padded_rows
    starts = np.cumsum([0, *after, *rows]).tolist()
    assert values(rt, inputs.positions) == [p for run in positions for p in run] + tail
    assert values(rt, inputs.slot_mapping) == [one for run in locations for one in run] + tail
    assert values(rt, inputs.kv_lens) == after + rows
    assert values(rt, inputs.kv_start_loc) == starts
    assert inputs.kv_lens.dtype == torch.int32
    assert inputs.kv_start_loc is not None
    assert inputs.kv_start_loc.dtype == torch.int32
    assert values(rt, inputs.query_start_loc) == plan.extras["query_start_loc"].tolist()
    assert inputs.block_table is not None
    table = rt.inspect(inputs.block_table)
    for row, (slot, length) in enumerate(zip(slots.np.tolist(), after, strict=True)):
        found = [int(table[row, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in range(length)]
        assert found == world.locations(slot, range(length))
    assert batch.seq_lens.np.tolist() == bounds + rows
    assert values(rt, batch.seq_lens.device) == after + rows
    assert plan.seq_lens.tolist() == bounds
    batch.check()
    wanted = ["consumed" if chunk is None else "published" for chunk in case.chunks]
    assert world.states(slots, "lens") == wanted


def test_a_prompt_beside_a_bound_stays_as_planned(rt: Runtime, world: ForwardWorld) -> None:
    """Of a request whose ids the host gives nothing is looked up: its length is what the host says, bound or not."""
    slots = world.take([8, 8])
    world.publish(slots)
    world.relay.publish(slots.take([0]), lens=rt.upload([np.array([4])]).view(0))
    column = world.bounds([8, 8], [5, 6])
    plan, uploaded = world.planned(slots, column, [1, 2], prompt_ids=[None, [3, 4]], pages=world.pages)
    inputs = world.resolve(plan, uploaded, lengths="lens", req_to_token=world.table)
    assert values(rt, inputs.positions) == [4, 6, 7]
    assert values(rt, inputs.kv_lens) == [5, 8]
    assert values(rt, inputs.slot_mapping) == [
        *world.locations(int(slots.np[0]), [4]),
        *world.locations(int(slots.np[1]), [6, 7]),
    ]


def test_narrow_lengths(rt: Runtime, world: ForwardWorld) -> None:
    """Lengths may be int32 in the relay; positions are int64 all the same."""
    slots = world.take([8, 8])
    world.publish(slots)
    world.relay.publish(slots, narrow=rt.upload([np.array([4, 5], np.int32)]).view(0))
    column = world.bounds([8, 8], [5, 6])
    plan, uploaded = world.planned(slots, column)
    inputs = world.resolve(plan, uploaded, lengths="narrow")
    assert (inputs.positions.dtype, inputs.kv_lens.dtype) == (torch.int64, torch.int32)
    assert values(rt, inputs.positions) == [4, 5]
    assert values(rt, inputs.kv_lens) == [5, 6]


def test_lengths_that_the_host_knows_are_taken_unread(rt: Runtime, world: ForwardWorld) -> None:
    """Where lengths are exact their entries are used up without a launch, and at `full` compared with the host's."""
    slots = world.take([8, 8])
    for level, true in (("cheap", [4, 5]), ("full", [4, 5]), ("full", [4, 6])):
        world.relay.discard(slots)
        world.publish(slots)
        world.relay.publish(slots, lens=rt.upload([np.array(true)]).view(0))
        plan, uploaded = world.planned(slots, [5, 6])
        before = rt.counters.snapshot()

        def resolve(plan: ForwardPlan = plan, uploaded: Extras = uploaded) -> ForwardInputs:
            return world.resolve(plan, uploaded, lengths="lens")

        with checks(level):
            if true == [4, 6]:
                assert refused(Code.MIRROR_EQUAL, resolve).row == 1
                continue
            inputs = resolve()
        assert values(rt, inputs.kv_lens) == [5, 6]
        assert world.states(slots, "lens") == ["consumed"] * 2
        if level == "cheap":
            assert (rt.counters - before).device_operations == 1  # the gather of the ids


# Once, and whole


def test_a_plan_is_used_once(rt: Runtime, world: ForwardWorld) -> None:
    """A second forward from one plan would repeat the step: it is refused, and takes nothing."""
    slots = world.take([5, 6])
    world.publish(slots)
    for ids in (None, [[1], [2]], [None, [2]]):
        plan, uploaded = world.planned(slots, [5, 6], prompt_ids=ids)
        world.resolve(plan, uploaded)
        world.relay.discard(slots)
        world.publish(slots)
        rt.next_step()
        before = rt.counters.snapshot()
        violation = refused(Code.FUTURE_CONSUMED, functools.partial(world.resolve, plan, uploaded))
        assert violation.writer == f"the plan of step {plan.step}"
        assert violation.reader == f"resolve_forward_inputs in step {rt.step}"
        assert world.states(slots, "last_token") == ["published"] * 2
        assert rt.counters == before


def test_nothing_is_taken_where_one_field_is_missing(rt: Runtime, world: ForwardWorld) -> None:
    """If the second of two fields is unwritten, the first is not used up; the plan serves when the cause is mended."""
    slots = world.take([5, 6])
    world.relay.publish(slots, last_token=[50, 60])
    plan, uploaded = world.planned(slots, [5, 6], 3)

    def resolve() -> ForwardInputs:
        return world.relay.resolve_forward_inputs(plan, uploaded, ids=("last_token", "drafts"))

    before = rt.counters.snapshot()
    violation = refused(Code.FUTURE_UNWRITTEN, resolve)
    assert violation.column == "drafts"
    assert rt.counters == before
    assert world.states(slots, "last_token") == ["published"] * 2
    world.relay.publish(slots, drafts=[[51, 52], [61, 62]])
    assert values(rt, resolve().input_ids) == [50, 51, 52, 60, 61, 62]


WRONG: dict[str, tuple[Expected, str, dict[str, Any], dict[str, Any]]] = {
    # of the plan beside lengths [8, 8], and of the resolution beside ids="last_token"
    "an undeclared field": (DeclarationError, "'token', which is not declared", {}, {"ids": "token"}),
    "no field": (DeclarationError, r"no field for their ids", {}, {"ids": ()}),
    "ids for a plan without any": (DeclarationError, "which has none", {"has_ids": False}, {}),
    "a field twice": (DeclarationError, "name each field once", {"query_lens": 2}, {"ids": ("last_token",) * 2}),
    "ids for lengths": (DeclarationError, "name each field once", {}, {"lengths": "last_token"}),
    "a field of the host": (DeclarationError, "read by the host", {}, {"ids": "outputs"}),
    "ids in two dimensions": (DeclarationError, r"'pairs' of \[2, 2\]", {"query_lens": 4}, {"ids": "pairs"}),
    "narrow ids": (DtypeError, "ids from field 'narrow' of torch.int32", {}, {"ids": "narrow"}),
    "wide ids": (DtypeError, "ids from field 'last_token'", {"int32": ["input_ids"]}, {}),
    "undeclared lengths": (DeclarationError, "'length', which is not declared", {}, {"lengths": "length"}),
    "lengths that are rows": (DeclarationError, r"lengths from field 'drafts' of \[2\]", {}, {"lengths": "drafts"}),
    "more tokens than entries": (ShapeError, "puts in 3 tokens, and the relay has 1", {"query_lens": 3}, {}),
    "fewer tokens than entries": (ShapeError, "puts in 1 tokens, and the relay has 2", {}, {"ids": "drafts"}),
    "bounds without lengths": (ContractError, "has bounds of the lengths", {"bounded": True}, {}),
    "bounds without a table": (ArgumentError, "need the token table", {"bounded": True}, {"lengths": "lens"}),
    "a table of numbers": (ArgumentError, "up to 8 tokens", {"bounded": True}, {"req_to_token": ((), torch.int32)}),
    "a narrow table": (ArgumentError, "up to 8 tokens", {"bounded": True}, {"req_to_token": ((3,), torch.int32)}),
    "a table of pairs": (ArgumentError, "up to 8 tokens", {"bounded": True}, {"req_to_token": ((32, 2), torch.int32)}),
    "a table of floats": (ArgumentError, "up to 8 tokens", {"bounded": True}, {"req_to_token": ((32,), torch.float32)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_change_nothing(rt: Runtime, world: ForwardWorld, name: str) -> None:
    """What the relay cannot serve is a typed error before anything is taken; the plan can still be used."""
    expected, words, planned, asked = WRONG[name]
    slots = world.take([8, 8])
    world.publish(slots)
    world.relay.publish(
        slots,
        lens=rt.upload([np.array([7, 7])]).view(0),
        narrow=rt.upload([np.array([7, 7], np.int32)]).view(0),
        pairs=rt.upload([np.zeros((2, 2, 2), np.int64)]).view(0),
        outputs=rt.upload([np.array([1, 2])]).view(0),
    )
    lens: Any = [8, 8]
    if planned.get("bounded"):
        lens, planned = world.bounds([8, 8], [8, 8]), {"pages": world.pages}
    if "req_to_token" in asked:
        asked = {"lengths": "lens", "req_to_token": world.slots.table("odd", *asked["req_to_token"])}
    plan, uploaded = world.planned(slots, lens, **planned)
    before = rt.counters.snapshot()
    refuses(expected, words, lambda: world.resolve(plan, uploaded, **asked))
    assert rt.counters == before
    for field in world.relay.fields:
        assert world.states(slots, field) == ["published"] * 2
    if not planned:
        assert len(world.resolve(plan, uploaded).input_ids) == 2


def test_wrong_objects_change_nothing(rt: Runtime, device: str, world: ForwardWorld) -> None:
    """Another upload than the plan's own, a table of another pool, or a relay of another pool or runtime."""
    slots = world.take([8, 8])
    world.publish(slots)
    batch = Running.build(rt, slots=slots, seq_lens=[8, 8])
    plan, other = ForwardPlan.of(batch.slots, batch.seq_lens), ForwardPlan.of(batch.slots, batch.seq_lens)
    uploaded = batch.upload(extras={**plan.extras, "temperature": [0.5, 1.0]})
    theirs, bare = batch.upload(extras=other.extras), batch.upload()
    others, far = ForwardWorld.of(rt), ForwardWorld.of(open_device(device))
    not_uploaded = "kv_lens, last_token_indices, positions, query_start_loc of ForwardPlan.* were not uploaded"
    acts: list[tuple[Expected, str, Callable[[], object]]] = [
        (ArgumentError, not_uploaded, lambda: world.resolve(plan, bare)),
        (ArgumentError, "were not uploaded with this batch", lambda: world.resolve(plan, theirs)),
        (ArgumentError, "row 0 waits for a relay", lambda: ForwardInputs.of(plan, uploaded)),
        (
            ArgumentError,
            "the token table, by slot of",
            lambda: world.resolve(plan, uploaded, req_to_token=others.table),
        ),
        (ArgumentError, "expected slots of pool", lambda: others.resolve(plan, uploaded)),
        (DeviceError, "another runtime", lambda: far.resolve(plan, uploaded)),
    ]
    before = rt.counters.snapshot()
    for act in acts:
        refuses(*act)
    assert isinstance(in_a_thread(lambda: world.resolve(plan, uploaded)), OwnerThreadError)
    assert rt.counters == before
    assert world.states(slots, "last_token") == ["published"] * 2
    assert values(rt, world.resolve(plan, uploaded).input_ids) == (10 * slots.np).tolist()


def test_requests_that_left_are_refused(rt: Runtime, world: ForwardWorld) -> None:
    """A plan of requests that are gone is refused, wherever their ids come from."""
    for ids in (None, [[1], [2]]):
        slots = world.slots.take(2)
        world.publish(slots)
        plan, uploaded = world.planned(slots, [8, 8], prompt_ids=ids)
        world.slots.free(slots, after=None)
        before = rt.counters.snapshot()
        for level in ("off", "cheap"):
            with checks(level):
                refused(Code.SLOT_STALE_HANDLE, functools.partial(world.resolve, plan, uploaded))
        assert rt.counters == before


def test_none_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are made before the replay, not inside the graph."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    rt, module = fake_accelerator(monkeypatch)
    world = ForwardWorld.of(rt)
    slots = world.take([8, 8])
    world.publish(slots)
    plan, uploaded = world.planned(slots, [8, 8])
    module.capturing = True
    with pytest.raises(CaptureError, match="gather before the replay"):
        world.resolve(plan, uploaded)
    module.capturing = False
    world.resolve(plan, uploaded)


# What a step costs


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("speculating", [False, True])
def test_a_step_is_one_copy(rt: Runtime, level: str, speculating: bool) -> None:
    """256 requests leave, join and advance, with table writes and all inputs: one copy, two with prompts, no sync."""
    with checks(level), no_hidden_sync(rt):
        run_steps(ForwardWorld.of(rt, 280), speculating)


def run_steps(world: ForwardWorld, speculating: bool) -> None:
    """Four steps of 256 requests, the second with prompts among them."""
    rt, relay, width = world.rt, world.relay, 3 if speculating else 1
    ids = ("last_token", "drafts") if speculating else ("last_token",)

    def lens_of(slots: Slots, lens: list[int]) -> Any:
        if not speculating:
            return lens
        true = rt.upload([np.array(lens) - 1]).view(0)
        return MirroredTensor.from_pair(rt, lens, true, contract="upper_bound", name="seq_lens")

    def arrive(n: int) -> Running:
        slots = world.take([5] * n)
        world.publish(slots)
        relay.publish(slots, lens=[4 if speculating else 5] * n)
        batch = Running.build(rt, slots=slots, seq_lens=lens_of(slots, [5] * n))
        assert len(batch.seq_lens.device) == len(batch.slots.device) == n
        return batch

    batch = arrive(256)
    for step in range(4):
        rt.next_step()
        joining = arrive(2)
        forward = rt.stream("forward")
        before = rt.counters.snapshot()
        leaving = batch.filter([3, 7])
        world.pages.release_requests(leaving.slots, after=rt.record())
        keep = np.ones(len(batch), dtype=bool)
        keep[[3, 7]] = False
        batch = batch.filter(keep).merge(joining)
        prompts: list[list[int] | None] | None = None
        queries: Any = width
        if step == 1:
            prompts = [None] * 254 + [[1, 2], [3, 4]]
            queries = np.array([width] * 254 + [2, 2])
        batch = batch.advance("seq_lens", queries)
        extension = world.pages.advance(batch.slots, queries)
        plan = ForwardPlan.of(
            batch.slots, batch.seq_lens, queries, prompt_ids=prompts, pages=world.pages, layouts="flash_attention"
        )
        uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
        with rt.use(forward):
            inputs = relay.resolve_forward_inputs(plan, uploaded, ids=ids, lengths="lens", req_to_token=world.table)
        spent = rt.counters - before
        assert spent.host_to_device_copies == (2 if step == 1 else 1)
        assert spent.forced_syncs == spent.fence_waits == spent.device_to_host_copies == spent.check_reads == 0
        assert spent.staging_allocations == 0 or step == 0
        assert len(inputs.input_ids) == plan.num_tokens
        if prompts is not None:
            relay.discard(joining.slots)
        with rt.use(forward):
            relay.publish(
                inputs.sampled_slots,
                last_token=torch.zeros(256, dtype=torch.int64, device=rt.device),
                lens=inputs.kv_lens.long(),
                **({"drafts": torch.zeros((256, 2), dtype=torch.int64, device=rt.device)} if speculating else {}),
            )
        if not speculating:
            relay.discard(batch.slots, "drafts")


def test_inputs_are_made_on_the_forwards_stream() -> None:
    """A forward on its own stream gets its inputs without the host waiting, although nothing has run yet."""
    rt = LateRuntime()
    world = ForwardWorld.of(rt)
    slots = world.take([5, 6])
    forward = rt.stream("forward")
    with rt.use(forward):
        world.relay.publish(slots, last_token=rt.upload([np.array([50, 60])]).view(0))
    plan, uploaded = world.planned(slots, [5, 6])
    with rt.use(forward):
        inputs = world.resolve(plan, uploaded)
        assert values(rt, inputs.input_ids) == [50, 60]
    assert (rt.counters.fence_waits, rt.counters.forced_syncs) == (0, 0)
    assert rt.pending() > 0


def test_padded_rows_may_have_an_entry_everywhere(rt: Runtime, world: ForwardWorld) -> None:
    """Lengths, ids and the mask of samples may have one entry per padded row, which is ignored."""
    slots = world.take([5, 6])
    plan, uploaded = world.planned(
        slots, [5, 6], [1, 2, 0, 0], prompt_ids=[[7], [8, 9], None, None], samples=np.ones(4, np.bool_), rows=4
    )
    inputs = world.resolve(plan, uploaded)
    assert values(rt, inputs.input_ids) == [7, 8, 9]
    assert plan.sample_rows.tolist() == [0, 1]


@pytest.mark.usefixtures("full")
def test_a_false_bound_is_found_before_it_is_used_as_an_index(rt: Runtime, world: ForwardWorld) -> None:
    """A true length beyond the host's bound, by which pages were allocated, is reported, and no lookup fails."""
    slots = world.take([8, 9])
    world.relay.publish(slots, last_token=[1, 2], lens=[4, LONGEST + 10])
    plan, uploaded = world.planned(slots, world.bounds([8, 9], [5, 6]), pages=world.pages)
    violation = refused(
        Code.MIRROR_BOUND, lambda: world.resolve(plan, uploaded, lengths="lens", req_to_token=world.table)
    )
    assert (violation.row, violation.column) == (1, "kv_lens")


def test_pages_that_were_taken_back_are_noticed(rt: Runtime, world: ForwardWorld) -> None:
    """A plan whose requests lost pages since is refused, and nothing is taken."""
    slots = world.take([9])
    world.publish(slots)
    plan, uploaded = world.planned(slots, [9], pages=world.pages)
    world.pages.truncate(slots, 2, after=None)
    violation = refused(Code.DERIVED_STALE, lambda: world.resolve(plan, uploaded))
    assert (violation.row, violation.slot) == (0, int(slots.np[0]))
    assert "truncate in step" in str(violation.actual)
    assert world.states(slots, "last_token") == ["published"]


@pytest.mark.usefixtures("full")
def test_locations_that_were_not_uploaded_are_found(rt: Runtime, world: ForwardWorld) -> None:
    """A forgotten `extension.entry()` is MIRROR_EQUAL at full, naming the table; with it the plan is served."""
    slots = world.take([8])
    batch = Running.build(rt, slots=slots, seq_lens=[10])
    extension = world.pages.advance(slots, 2)
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, 2, prompt_ids=[[8, 9]], pages=world.pages)
    uploaded = batch.upload(extras=plan.extras)
    violation = refused(Code.MIRROR_EQUAL, lambda: world.resolve(plan, uploaded))
    assert "req_to_token" in str(violation.object)
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, 2, prompt_ids=[[8, 9]], pages=world.pages)
    uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
    world.resolve(plan, uploaded)
