"""What a forward takes besides ids from the relay: values of tokens, no ids at all, no relay, and int32."""

import numpy as np
import pytest
import torch

from batchstate import ForwardInputs, ForwardPlan, StaticBuffers, TokenArray
from batchstate.errors import (
    ArgumentError,
    DtypeError,
    OwnerThreadError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import in_a_thread, refused
from tests.worlds import ForwardWorld, Running, values


@pytest.fixture
def world(rt: Runtime) -> ForwardWorld:
    """8 requests at most."""
    return ForwardWorld.of(rt)


PROMPTS = [[11, 12, 13], None, [31]]
ARRAYS = {
    "types": TokenArray([[0, 1, 1], None, [2]], torch.int32, fill=7),
    "grid": TokenArray([[[0, 0], [0, 1], [1, 0]], None, np.array([[5, 6]])], shape=(2,)),
    "nothing": TokenArray(None, torch.bool),
}


@pytest.mark.parametrize("deferred", [True, False])
def test_values_of_tokens_go_the_way_of_ids(rt: Runtime, world: ForwardWorld, full: None, deferred: bool) -> None:
    """All values of tokens and the ids of prompts cross together: at forward entry, or in the step's copy."""
    slots = world.take([3, 4, 1])
    world.publish(slots)
    batch = Running.build(rt, slots=slots, seq_lens=[3, 4, 1])
    plan = ForwardPlan.of(
        batch.slots,
        batch.seq_lens,
        [3, 1, 1],
        prompt_ids=PROMPTS,
        pad_tokens=6,
        token_arrays=ARRAYS,
        deferred=deferred,
        pages=world.pages,
    )
    uploaded = batch.upload(extras=plan.extras)
    before = rt.counters.snapshot()
    inputs = world.resolve(plan, uploaded)
    assert (rt.counters - before).host_to_device_copies == deferred
    assert values(rt, inputs.input_ids) == [11, 12, 13, 10 * int(slots.np[1]), 31, 0]
    assert values(rt, inputs.arrays["types"]) == [0, 1, 1, 7, 2, 7]
    assert values(rt, inputs.arrays["grid"]) == [[0, 0], [0, 1], [1, 0], [0, 0], [5, 6], [0, 0]]
    assert inputs.arrays["nothing"].dtype == torch.bool
    assert list(inputs.arrays) == list(ARRAYS)


def test_full_compares_values_of_tokens(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """Values that change between plan and forward entry are MIRROR_EQUAL: the two sides of one array differ."""
    slots = world.take([3])
    batch = Running.build(rt, slots=slots, seq_lens=[3])
    plan = ForwardPlan.of(
        batch.slots,
        batch.seq_lens,
        3,
        prompt_ids=[[1, 2, 3]],
        token_arrays={"types": TokenArray([[0, 0, 1]])},
        deferred=False,
    )
    uploaded = batch.upload(extras=plan.extras)
    plan.token_arrays["types"][1] = 5
    assert refused(Code.MIRROR_EQUAL, lambda: world.resolve(plan, uploaded)).column == "types"


def test_full_compares_the_slot_mapping_with_the_pages(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """A slot mapping that an engine has changed after planning is MIRROR_EQUAL at forward entry, with its token."""
    slots = world.take([6])
    batch = Running.build(rt, slots=slots, seq_lens=[6])
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, 2, prompt_ids=[[1, 2]], pages=world.pages)
    plan.extras["slot_mapping"][1] -= 1
    uploaded = batch.upload(extras=plan.extras)
    violation = refused(Code.MIRROR_EQUAL, lambda: world.resolve(plan, uploaded))
    assert (violation.column, violation.row) == ("slot_mapping", 1)


def test_a_rank_without_ids(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """A later rank of a pipeline gives its plan what the first does, lays out no ids, and takes none from the relay."""
    slots = world.take([3, 4])
    world.publish(slots)
    plan, uploaded = world.planned(
        slots, [3, 4], [3, 1], prompt_ids=[[1, 2, 3], None], pages=world.pages, has_ids=False
    )
    before = rt.counters.snapshot()
    inputs = world.relay.resolve_forward_inputs(plan, uploaded)
    assert (rt.counters - before).host_to_device_copies == 0
    assert "input_ids" not in plan.extras
    assert values(rt, inputs.positions) == [0, 1, 2, 3]
    assert values(rt, inputs.slot_mapping) == [
        *world.locations(int(slots.np[0]), [0, 1, 2]),
        *world.locations(int(slots.np[1]), [3]),
    ]
    assert world.states(slots, "last_token") == ["published", "published"]
    with pytest.raises(ArgumentError, match="which has none"):
        _ = inputs.input_ids


def test_true_lengths_without_ids(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """A rank without ids takes the true lengths of bounded requests from its relay, and of these alone."""
    slots = world.take([9, 3, 9])
    decodes = slots.take([0, 2])
    world.relay.publish(decodes, lens=[4, 6])
    plan, uploaded = world.planned(
        slots,
        world.bounds([9, 3, 9], [6, 3, 8]),
        [2, 3, 2],
        prompt_ids=[None, [1, 2, 3], None],
        pages=world.pages,
        has_ids=False,
        int32=["positions", "slot_mapping"],
    )
    inputs = world.relay.resolve_forward_inputs(plan, uploaded, lengths="lens", req_to_token=world.table)
    assert values(rt, inputs.kv_lens) == [6, 3, 8]
    assert values(rt, inputs.positions) == [4, 5, 0, 1, 2, 6, 7]
    assert inputs.positions.dtype == torch.int32
    assert inputs.slot_mapping is not None
    assert inputs.slot_mapping.dtype == torch.int32
    assert world.states(decodes, "lens") == ["consumed", "consumed"]


def test_inputs_without_a_relay(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """An engine that knows all ids has inputs without a relay and without a batch: in one copy, if it wants."""
    slots = world.take([3, 4])
    plan = ForwardPlan.of(
        slots.pad(3),
        [3, 4],
        [3, 1],
        prompt_ids=[[1, 2, 3], [44]],
        pages=world.pages,
        deferred=False,
        pad_tokens=5,
        int32=["input_ids", "positions", "slot_mapping", "last_token_indices"],
    )
    before = rt.counters.snapshot()
    inputs = ForwardInputs.of(plan, plan.upload())
    spent = rt.counters - before
    assert (spent.host_to_device_copies, spent.forced_syncs, spent.fence_waits) == (1, 0, 0)
    assert spent.device_operations == 0
    assert values(rt, inputs.slots) == [*slots.np.tolist(), 0]
    assert values(rt, inputs.input_ids) == [1, 2, 3, 44, 0]
    assert values(rt, inputs.last_token_indices) == [2, 3, 0]
    wanted = (inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.last_token_indices)
    assert [one.dtype for one in wanted if one is not None] == [torch.int32] * 4
    refused(Code.FUTURE_CONSUMED, lambda: ForwardInputs.of(plan, plan.upload()))


def test_ids_of_int32_come_from_a_field_of_int32(rt: Runtime) -> None:
    """Where kernels take ids as int32, the relay holds them so: no launch converts them."""
    world = ForwardWorld.of(rt)
    slots = world.take([3, 4])
    world.relay.publish(slots, narrow=rt.upload([np.array([8, 9], np.int32)]).view(0))
    plan, uploaded = world.planned(slots, [3, 4], pages=world.pages, int32=["input_ids"])
    before = rt.counters.snapshot()
    inputs = world.resolve(plan, uploaded, ids="narrow")
    assert (rt.counters - before).device_operations == 1
    assert inputs.input_ids.dtype == torch.int32
    assert values(rt, inputs.input_ids) == [8, 9]


def test_refuses_declarations() -> None:
    """A token array has a dtype that numpy has, one fill of it, and a shape."""
    for error, arguments in (
        (DtypeError, {"dtype": torch.bfloat16}),
        (ShapeError, {"shape": 2}),
        (ShapeError, {"fill": [1]}),
        (DtypeError, {"fill": 0.5}),
        (ValueOverflowError, {"dtype": torch.uint8, "fill": -1}),
    ):
        with pytest.raises(error):
            TokenArray(None, **arguments)


def test_values_of_tokens_at_fixed_addresses(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """A graph reads ids and values of tokens where its buffers have them: all cross in the step's copy."""
    slots = world.take([3, 4])
    buffers: StaticBuffers | None = None
    addresses: dict[str, int] = {}
    for step in range(3):
        world.relay.discard(slots)
        world.publish(slots)
        batch = Running.build(rt, slots=slots, seq_lens=[3, 4])
        plan = ForwardPlan.of(
            batch.pad(4).slots,
            [3, 4],
            [2, 1],
            prompt_ids=[[step, step + 1], None],
            pages=world.pages,
            pad_tokens=8,
            token_arrays={"types": TokenArray([[step, 2], None], torch.int32, fill=9)},
            int32=["positions"],
            deferred=False,
        )
        if buffers is None:
            buffers = StaticBuffers(rt, Running, rows=4, extras=plan.extras)
            addresses = {name: buffers[name].data_ptr() for name in plan.extras}
        before = rt.counters.snapshot()
        inputs = world.resolve(plan, batch.to_static(buffers, extras=plan.extras))
        assert (rt.counters - before).host_to_device_copies == 1
        assert values(rt, inputs.input_ids) == [step, step + 1, 10 * int(slots.np[1]), 0, 0, 0, 0, 0]
        assert values(rt, inputs.arrays["types"]) == [step, 2, 9, 9, 9, 9, 9, 9]
        for name in ("input_ids", "types", "positions"):
            found = inputs.arrays["types"] if name == "types" else getattr(inputs, name)
            assert found.data_ptr() == addresses[name]


def test_requests_without_a_batch_are_checked(rt: Runtime, world: ForwardWorld) -> None:
    """Where no batch does it, a plan refuses a request in two rows, and one that has left; and a second thread."""
    slots = world.take([3, 4])
    ids = [[1], [2]]
    for pages in (world.pages, None):
        twice = ForwardPlan.of(slots.take([0, 0]), [3, 3], prompt_ids=ids, pages=pages)
        refused(Code.SLOT_SHARED, twice.upload)
    plan = ForwardPlan.of(slots, [3, 4], prompt_ids=ids, pages=world.pages)
    assert isinstance(in_a_thread(plan.upload), OwnerThreadError)
    uploaded = plan.upload()
    assert isinstance(in_a_thread(lambda: ForwardInputs.of(plan, uploaded)), OwnerThreadError)
    world.pages.release_requests(slots.take([1]), after=None)
    refused(Code.DERIVED_STALE, plan.upload)
    refused(Code.DERIVED_STALE, lambda: ForwardInputs.of(plan, uploaded))
