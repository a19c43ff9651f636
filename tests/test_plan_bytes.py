"""A plan that one rank makes and others use: bytes out, inputs in, and everything that does not fit refused."""

import functools
from typing import Any

import numpy as np
import pytest

from batchstate import ForwardInputs, ForwardPlan, Slots, TokenArray
from batchstate.errors import ArgumentError
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import refused
from tests.worlds import ForwardWorld, Running, values

NAMES = ("slots", "input_ids", "positions", "slot_mapping", "query_start_loc", "kv_lens", "last_token_indices")


@pytest.fixture
def ranks(device: str) -> list[ForwardWorld]:
    """Two ranks that are given the same calls."""
    return [ForwardWorld.of(open_device(device)) for _ in range(2)]


def both(ranks: list[ForwardWorld], lens: list[int]) -> list[Slots]:
    """The same requests on each."""
    slots = [world.take(lens) for world in ranks]
    for world, ours in zip(ranks, slots, strict=True):
        world.publish(ours)
    return slots


def planned(world: ForwardWorld, slots: Slots, **named: Any) -> ForwardPlan:
    """A prompt, a decode with the relay's id, and a chunk that samples nothing, padded."""
    batch = Running.build(world.rt, slots=slots, seq_lens=[3, 6, 9]).pad(4)
    return ForwardPlan.of(
        batch.slots,
        batch.seq_lens,
        [3, 1, 2],
        **{
            "prompt_ids": [[1, 2, 3], None, [4, 5]],
            "samples": np.array([True, True, False]),
            "pages": world.pages,
            "pad_tokens": 8,
            **named,
        },
    )


@pytest.mark.parametrize("deferred", [True, False])
def test_another_rank_has_the_same_inputs(full: None, ranks: list[ForwardWorld], deferred: bool) -> None:
    """The plan of rank 0 gives rank 1 the same inputs, from its own relay and pages, without planning."""
    slots = both(ranks, [3, 6, 9])
    arrays = {"types": TokenArray([[0, 1, 1], None, [2, 2]], fill=5)}
    plan = planned(ranks[0], slots[0], token_arrays=arrays, deferred=deferred, int32=["positions"])
    data = plan.to_bytes()
    frame: Any = memoryview(data)  # as a socket or shared memory gives it
    other = ForwardPlan.from_bytes(frame, ranks[1].slots, pages=ranks[1].pages)
    assert other.to_bytes() == data
    found = []
    for world, one in zip(ranks, (plan, other), strict=True):
        inputs = world.resolve(one, one.upload())
        found.append([values(world.rt, getattr(inputs, name)) for name in NAMES])
        found[-1].append(values(world.rt, inputs.arrays["types"]))
        assert inputs.sampled_slots.np.tolist() == inputs.sampled_slots.device.tolist() == slots[0].np[:2].tolist()
        world.relay.publish(inputs.sampled_slots, lens=[1, 2])
    assert found[0] == found[1]
    refused(Code.FUTURE_CONSUMED, lambda: ranks[1].resolve(other, other.upload()))


def test_a_rank_uploads_it_with_its_batch(ranks: list[ForwardWorld]) -> None:
    """A rank with a batch of its own packs the plan with it; of other rows it is refused."""
    slots = both(ranks, [3, 6, 9])
    data = planned(ranks[0], slots[0]).to_bytes()
    world = ranks[1]
    batch = Running.build(world.rt, slots=slots[1], seq_lens=[3, 6, 9])
    for order, right in (([2, 1, 0], False), ([0, 1, 2], True)):
        plan = ForwardPlan.from_bytes(data, world.slots, pages=world.pages)
        rows = batch.filter(order).pad(4)
        if right:
            world.resolve(plan, rows.upload(extras=plan.extras))
        else:
            refused(Code.DERIVED_STALE, functools.partial(rows.upload, extras=plan.extras))


def test_a_rank_without_pools(rt: Runtime, ranks: list[ForwardWorld]) -> None:
    """Where nothing is shared but the plan, a runtime is enough if the host knows all ids."""
    slots = both(ranks, [3, 6, 9])[0]
    plan = planned(ranks[0], slots, prompt_ids=[[1, 2, 3], [9], [4, 5]])
    other = ForwardPlan.from_bytes(plan.to_bytes(), rt)
    inputs = ForwardInputs.of(other, other.upload())
    assert values(rt, inputs.input_ids) == [1, 2, 3, 9, 4, 5, 0, 0]
    assert values(rt, inputs.slot_mapping) == plan.extras["slot_mapping"].tolist()


def test_bounds_travel_as_bounds(full: None, ranks: list[ForwardWorld]) -> None:
    """A rank that gets bounds takes the true lengths from its own relay."""
    slots = both(ranks, [9, 9])
    for world, ours in zip(ranks, slots, strict=True):
        world.relay.publish(ours, lens=[4, 6])
    first = ranks[0]
    batch = Running.build(first.rt, slots=slots[0], seq_lens=first.bounds([9, 9], [5, 7]))
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=first.pages)
    other = ForwardPlan.from_bytes(plan.to_bytes(), ranks[1].slots, pages=ranks[1].pages)
    inputs = ranks[1].resolve(other, other.upload(), lengths="lens", req_to_token=ranks[1].table)
    assert values(ranks[1].rt, inputs.kv_lens) == [5, 7]
    assert values(ranks[1].rt, inputs.positions) == [4, 6]


def test_ranks_that_came_to_other_requests(ranks: list[ForwardWorld]) -> None:
    """A slot that belongs to another request here, or to none, and a request of another length, are found at once."""
    slots = both(ranks, [3, 6, 9])
    data = planned(ranks[0], slots[0]).to_bytes()
    world = ranks[1]
    world.pages.truncate(slots[1].take([1]), 5, after=None)
    refused(Code.DERIVED_STALE, lambda: ForwardPlan.from_bytes(data, world.slots, pages=world.pages))
    world.pages.release_requests(slots[1].take([1]), after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: ForwardPlan.from_bytes(data, world.slots))
    world.slots.take(1)
    refused(Code.SLOT_STALE_HANDLE, lambda: ForwardPlan.from_bytes(data, world.slots))


def test_refuses_bytes_that_are_no_plan(ranks: list[ForwardWorld]) -> None:
    """What was cut or changed is a typed error, and leaves the rank as it was."""
    slots = both(ranks, [3, 6, 9])
    data = planned(ranks[0], slots[0]).to_bytes()
    world = ranks[1]
    before = world.rt.counters.snapshot(), world.states(slots[1], "last_token")
    damaged = [b"", b"batchstate", data[:40], data[:-1], data + b"0", b"x" + data]
    damaged += [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(0, len(data), 37)]
    for one in damaged:
        with pytest.raises(ArgumentError):
            ForwardPlan.from_bytes(one, world.slots, pages=world.pages)
    with pytest.raises(ArgumentError, match="pages"):
        ForwardPlan.from_bytes(data, world.slots, pages=ranks[0].pages)
    assert before == (world.rt.counters.snapshot(), world.states(slots[1], "last_token"))
