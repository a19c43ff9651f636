"""`StepPlanner`: what a plan can do, a planned step can do: values of tokens, encoders, no ids, no relay, int32."""

from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    Code,
    MirroredTensor,
    PagePool,
    Runtime,
    StepPlanner,
    TokenArray,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.errors import ArgumentError
from tests.doubles import refused
from tests.worlds import Pools, Relayed


class Running(Batch):
    """Requests with an encoder, perhaps."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    encoder_lens = mirrored(torch.int32)


@pytest.fixture
def world(rt: Runtime) -> Relayed:
    """Pools and a relay."""
    fields = {"last": relay_field(torch.int64), "narrow": relay_field(torch.int32)}
    return Relayed.of(Pools.of(rt, 4, pages=40), fields)


@pytest.fixture
def batch(rt: Runtime, world: Relayed) -> Running:
    """Three requests that put in their prompt."""
    return Running.build(rt, slots=world.pools.slots.take(3), seq_lens=[0, 0, 0], encoder_lens=[5, 0, 2])


PROMPTS: list[Any] = [[1, 2], [3], [4, 5, 6]]


def test_a_planned_prompt_with_an_encoder(rt: Runtime, world: Relayed, batch: Running, full: None) -> None:
    """A planner that knows the column of encoder tokens gets pages for them, and decodes behind them."""
    planner = StepPlanner(
        Running, pages=world.pools.pages, relay=world.relay, ids="narrow", kv_offset="encoder_lens", int32=["input_ids"]
    )
    arrays = {"types": TokenArray([[7, 8], None, [9, 9, 9]], torch.int32, fill=5)}
    step = planner.plan(batch, [2, 1, 3], prompt_ids=PROMPTS, token_arrays=arrays, pad_tokens=8)
    inputs = step.inputs()
    assert world.pools.pages.committed(batch.slots).tolist() == [7, 1, 5]
    assert inputs.slot_mapping is not None
    a, b, c = batch.slots.np.tolist()
    at = world.pools.locations
    expected = at(a, [5, 6]) + at(b, [0]) + at(c, [2, 3, 4])
    assert rt.inspect(inputs.slot_mapping).tolist() == [*expected, 0, 0]
    assert rt.inspect(inputs.arrays["types"]).tolist() == [7, 8, 5, 9, 9, 9, 5, 5]
    assert inputs.input_ids.dtype == torch.int32
    step.publish(narrow=inputs.input_ids[inputs.last_token_indices])
    step = planner.plan(step.batch)
    inputs = step.inputs()
    assert rt.inspect(inputs.input_ids).tolist() == [2, 3, 6]
    assert rt.inspect(inputs.positions).tolist() == [2, 1, 3]
    assert inputs.slot_mapping is not None
    assert rt.inspect(inputs.slot_mapping).tolist() == at(a, [7]) + at(b, [1]) + at(c, [5])


def test_a_planner_without_a_relay(rt: Runtime, world: Relayed, batch: Running, full: None) -> None:
    """Where the host knows all ids, steps are planned without a relay, and publish nothing."""
    planner = StepPlanner(Running, pages=world.pools.pages)
    step = planner.plan(batch, [2, 1, 3], prompt_ids=PROMPTS)
    assert rt.inspect(step.inputs().input_ids).tolist() == [1, 2, 3, 4, 5, 6]
    step = planner.plan(step.batch, prompt_ids=[[7], [8], [9]])
    inputs = step.inputs()
    assert rt.inspect(inputs.input_ids).tolist() == [7, 8, 9]
    assert rt.inspect(inputs.positions).tolist() == [2, 1, 3]
    refused(Code.FUTURE_CONSUMED, step.inputs)
    with pytest.raises(ArgumentError, match="publish without a relay"):
        step.publish(last=[1, 2, 3])
    with pytest.raises(ArgumentError, match="published= and no relay"):
        planner.plan(step.batch, published={"last": []}, joining=Running.empty(rt))
    with pytest.raises(ArgumentError, match="no field of a relay has their ids"):
        planner.plan(step.batch)
    assert "no relay" in repr(planner)


class Bounded(Batch):
    """Requests whose true lengths the relay has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


@pytest.mark.parametrize("pad_tokens", [1, 2])
def test_bounds_need_a_token_table(rt: Runtime, world: Relayed, pad_tokens: int) -> None:
    """Without one the device cannot look up where KV goes: inputs are refused, and nothing is taken from the relay."""
    slots = world.pools.slots.take(1)
    pages = PagePool(rt, world.pools.slots, 8, 4, max_tokens_per_request=8)
    pages.extend(slots, 6)
    world.relay.publish(slots, last=[1], narrow=[4])
    planner = StepPlanner(Bounded, pages=pages, relay=world.relay, ids="last", lengths="narrow")
    lens = MirroredTensor.from_pair(rt, [6], rt.upload([np.array([4])]).view(0), contract="upper_bound")
    step = planner.plan(Bounded.build(rt, slots=slots, seq_lens=lens), pad_tokens=pad_tokens)
    with pytest.raises(ArgumentError, match="no token table"):
        step.inputs()
    assert [str(state) for state in world.relay.states(slots, "last")] == ["published"]


def test_a_planner_of_a_later_rank(rt: Runtime, world: Relayed, batch: Running, full: None) -> None:
    """A rank that takes hidden states plans the same steps, without ids."""
    planner = StepPlanner(Running, pages=world.pools.pages, relay=world.relay, has_ids=False)
    step = planner.plan(batch, [2, 1, 3], prompt_ids=PROMPTS)
    assert rt.inspect(step.inputs().positions).tolist() == [0, 1, 0, 0, 1, 2]
    inputs = planner.plan(step.batch).inputs()
    assert rt.inspect(inputs.positions).tolist() == [2, 1, 3]
    with pytest.raises(ArgumentError, match="has none"):
        _ = inputs.input_ids
