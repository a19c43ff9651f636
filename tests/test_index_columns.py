"""Columns and extra arrays that hold indices: in their space, padded with 0, and never a stand-in."""

from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, Code, Locations, MirroredTensor, PagePool, Runtime, SlotPool, StaticBuffers
from batchstate.columns import device_only, mirrored, slot_column
from batchstate.errors import ArgumentError, DeclarationError, DtypeError
from batchstate.mirror import index_type
from tests.doubles import refused


class Plain(Batch):
    """Slots alone."""

    slots = slot_column()


class Adapted(Batch):
    """Requests with indices of other spaces."""

    slots = slot_column()
    adapter = mirrored(torch.int32, holds="adapter")
    places = mirrored(torch.int64, shape=(2,), holds="location")
    state = device_only(torch.int64, holds="state")


@pytest.fixture
def pages(rt: Runtime) -> PagePool:
    """3 pages of 4 tokens, 5 adapters and 7 states."""
    rt.declare_indices("adapter", 5)
    rt.declare_indices("state", 7)
    return PagePool(rt, SlotPool(rt, 4), 3, 4, max_tokens_per_request=4)


def test_columns_hold_indices_of_their_space(rt: Runtime, pages: PagePool) -> None:
    """Their values are 0 or more and below the capacity of what they index, 0 in padded rows; nothing computes them."""
    places, slots = [[15, 1], [0, 0]], pages.slots.take(2)
    batch = Adapted.build(rt, slots=slots, adapter=[0, 4], places=places, state=[0, 6])
    assert batch.pad(4).adapter.np.tolist() == [0, 4, 0, 0]
    plain = MirroredTensor.from_host(rt, [1, 2], dtype=torch.int32)
    batch = batch.update("adapter", [0], 3).replace(adapter=batch.adapter).replace(adapter=plain)
    for column, wrong, code in (
        ("adapter", [0, -1], Code.SENTINEL_ESCAPED),
        ("adapter", [5, 0], Code.SLOT_OUT_OF_RANGE),
        ("places", [[1, 2], [3, 16]], Code.SLOT_OUT_OF_RANGE),
        ("state", [-1, 0], Code.SENTINEL_ESCAPED),
    ):
        assert refused(code, lambda new={column: wrong}: batch.replace(**new)).column == column  # type: ignore[misc]
    refused(Code.SENTINEL_ESCAPED, lambda: batch.update("adapter", [1], -1))
    refused(Code.UNIT_MISMATCH, lambda: batch.replace(state=index_type("adapter").from_host(rt, [1, 2])))
    with pytest.raises(DtypeError):
        batch.advance("adapter")
    with pytest.raises(DtypeError):
        _ = batch.places + 1


def test_only_indices_are_declared_as_such(rt: Runtime) -> None:
    """Exact integers, padded with 0, of a space whose capacity is known."""
    for wrong in (
        {"holds": "location", "pad": -1},
        {"holds": "location", "contract": "upper_bound"},
        {"holds": "slot"},
        {"holds": ""},
    ):
        with pytest.raises(DeclarationError):
            mirrored(torch.int64, **wrong)
    with pytest.raises(DeclarationError):
        device_only(torch.float32, holds="location")
    with pytest.raises(ArgumentError, match="declare_indices"):
        Adapted.build(rt, slots=SlotPool(rt, 2).take(1), adapter=[1], places=[[0, 0]], state=[0])
    for name, capacity in (("", 3), ("adapter", 0)):
        with pytest.raises(ArgumentError):
            rt.declare_indices(name, capacity)


@pytest.mark.usefixtures("full")
def test_indices_on_the_device_are_checked_at_full(rt: Runtime, pages: PagePool) -> None:
    """A column without a host side is read at `full`: a stand-in that a kernel left there is found."""
    values: dict[str, Any] = {"slots": pages.slots.take(2), "adapter": [0, 1], "places": [[0, 0], [0, 0]]}
    for state, right in (([2, 6], True), ([2, -1], False)):
        values["state"] = rt.upload([np.array(state)]).view(0)
        if right:
            Adapted.build(rt, **values)
        else:
            refused(Code.SENTINEL_ESCAPED, lambda: Adapted.build(rt, **values))


@pytest.mark.parametrize("way", ["upload", "to_static", "declared"])
def test_extras_with_an_index_space_are_checked(rt: Runtime, pages: PagePool, way: str) -> None:
    """Locations, and indices of a space of the engine's own, cross as extras once they lie in it."""
    adapters, one = index_type("adapter"), pages.slots.take(1)
    places = pages.extend(one, 4).locations

    def send(extra: MirroredTensor) -> Any:
        batch = Plain.build(rt, slots=one)
        if way == "upload":
            return batch.upload(extras={"more": extra})["more"]
        declared: object = extra if way == "declared" else np.zeros(4, np.int64)
        buffers = StaticBuffers(rt, Plain, rows=4, extras={"more": declared})
        return batch.to_static(buffers, extras={"more": extra})["more"]

    for right in (places, adapters.from_host(rt, [0, 4, 1, 2])):
        assert rt.inspect(send(right)).tolist() == right.np.tolist()
    refused(Code.SLOT_OUT_OF_RANGE, lambda: send(adapters.from_host(rt, [0, 5, 1, 2])))
    refused(Code.SENTINEL_ESCAPED, lambda: send(Locations.from_host(rt, [1, -1, 2, 3])))
