"""Where the KV of a token lies: behind the tokens of an encoder, and in the ring of a request of the host tier."""

from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    ForwardInputs,
    ForwardPlan,
    FutureMap,
    HiSparse,
    HostKVPool,
    MirroredTensor,
    PagePool,
    SlotPool,
    Slots,
    relay_field,
)
from batchstate.errors import ArgumentError, BatchStateError, ContractError, DtypeError, ShapeError
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import refused
from tests.worlds import PAGE_SIZE, ForwardWorld, Running, values

ENCODER = [5, 0, 4]
LENS = [3, 6, 2]


@pytest.fixture
def world(rt: Runtime) -> ForwardWorld:
    """8 requests at most."""
    return ForwardWorld.of(rt)


def mixed(world: ForwardWorld) -> Slots:
    """Requests whose pages have the tokens of an encoder first."""
    return world.take([a + b for a, b in zip(ENCODER, LENS, strict=True)])


def test_kv_lies_behind_the_encoder(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """Positions and lengths do not count the encoder's tokens, locations do."""
    slots = mixed(world)
    plan, uploaded = world.planned(
        slots, LENS, [3, 1, 2], prompt_ids=[[1, 2, 3], None, [4, 5]], pages=world.pages, kv_offset=ENCODER
    )
    world.publish(slots)
    inputs = world.resolve(plan, uploaded)
    assert values(rt, inputs.positions) == [0, 1, 2, 5, 0, 1]
    assert values(rt, inputs.kv_lens) == LENS
    numbers = slots.np.tolist()
    assert values(rt, inputs.slot_mapping) == [
        *world.locations(numbers[0], [5, 6, 7]),
        *world.locations(numbers[1], [5]),
        *world.locations(numbers[2], [4, 5]),
    ]


def test_the_first_forward_writes_the_encoder(rt: Runtime, world: ForwardWorld) -> None:
    """With position 0 the tokens of the encoder are written: all of a request's pages can be shared afterwards."""
    slots = world.take([8])
    refused(Code.PAGE_UNWRITTEN, lambda: world.pages.hold(slots, 8))
    plan, uploaded = world.planned(slots, [3], 3, prompt_ids=[[1, 2, 3]], pages=world.pages, kv_offset=5)
    world.resolve(plan, uploaded)
    world.pages.hold(slots, 8).release(after=None)


def test_lengths_without_the_encoder_are_not_those_of_the_pages(rt: Runtime, world: ForwardWorld) -> None:
    """A plan that forgets the encoder is refused: its lengths are not what the pages were given."""
    slots = mixed(world)
    refused(Code.DERIVED_STALE, lambda: ForwardPlan.of(slots, LENS, prompt_ids=[[1]] * 3, pages=world.pages))


def test_true_lengths_behind_the_encoder(rt: Runtime, world: ForwardWorld, full: None) -> None:
    """With bounds the device looks locations up in the token table, behind the encoder's tokens."""
    slots = world.take([5 + 8, 4 + 9, 3])
    fed = slots.take([0, 1])
    world.relay.publish(fed, last_token=[1, 2], drafts=[[3, 4], [5, 6]], lens=[3, 5])
    plan, uploaded = world.planned(
        slots,
        world.bounds([8, 9, 3], [6, 8, 3]),
        [3, 3, 3],
        prompt_ids=[None, None, [7, 8, 9]],
        pages=world.pages,
        kv_offset=[5, 4, 0],
    )
    inputs = world.resolve(plan, uploaded, ids=("last_token", "drafts"), lengths="lens", req_to_token=world.table)
    numbers = slots.np.tolist()
    assert values(rt, inputs.positions) == [3, 4, 5, 5, 6, 7, 0, 1, 2]
    assert values(rt, inputs.slot_mapping) == [
        *world.locations(numbers[0], [8, 9, 10]),
        *world.locations(numbers[1], [9, 10, 11]),
        *world.locations(numbers[2], [0, 1, 2]),
    ]


@pytest.mark.parametrize("layout", ["flash_attention", "flashinfer"])
def test_page_lists_begin_behind_the_encoder(rt: Runtime, world: ForwardWorld, layout: str) -> None:
    """Attention over the prompt reads the pages from position 0 on; an encoder that ends within a page is refused."""
    slots = world.take([PAGE_SIZE + 6, 3])
    plan = ForwardPlan.of(
        slots, [6, 3], prompt_ids=[[1], [2]], pages=world.pages, kv_offset=[PAGE_SIZE, 0], layouts=layout
    )
    table = world.pages.page_table[slots.np]
    expected = [*table[0, 1:3].tolist(), int(table[1, 0])]
    if layout == "flashinfer":
        assert plan.extras["kv_page_indices"].tolist() == expected
    else:
        assert plan.extras["block_table"].tolist() == [expected[:2], [expected[2], 0]]
    odd = world.take([5])
    with pytest.raises(ArgumentError, match="offset fill whole pages"):
        ForwardPlan.of(odd, [2], prompt_ids=[[1]], pages=world.pages, kv_offset=3, layouts=layout)


WRONG: dict[str, tuple[type[BatchStateError], str, dict[str, Any]]] = {
    "less than none": (ArgumentError, "expected a kv_offset of 0 or more and a PagePool, got -1", {"kv_offset": -1}),
    "half a token": (DtypeError, "kv_offset", {"kv_offset": 0.5}),
    "too many": (ShapeError, "kv_offset", {"kv_offset": [1, 2, 3, 4]}),
    "without pages": (ArgumentError, "and None", {"kv_offset": 1, "pages": None}),
    "more than allocated": (ArgumentError, "pages for", {"kv_offset": 20}),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_arguments(rt: Runtime, world: ForwardWorld, name: str) -> None:
    """Offsets that cannot be meant are typed errors, on the host alone."""
    error, match, wrong = WRONG[name]
    slots = world.take(LENS)
    before = rt.counters.snapshot()
    with pytest.raises(error, match=match):
        ForwardPlan.of(slots, LENS, prompt_ids=[[1]] * 3, **{"pages": world.pages, **wrong})
    assert rt.counters == before


class Tiered:
    """A tier with hot buffers of 4 tokens, and ordinary requests beside it."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.slots = SlotPool(rt, 6)
        self.table = self.slots.table("req_to_token", (16,), holds="location")
        self.pages = PagePool(rt, self.slots, 40, 2, max_tokens_per_request=16, req_to_token=self.table)
        host = HostKVPool(rt, 40, 2, layers=1, item_shape=(1,), dtype=torch.int64)
        kv = rt.device_zeros((self.pages.location_capacity, 1), torch.int64)
        self.tier = HiSparse(self.pages, host, [kv], hot_tokens=4)
        fields = {name: relay_field(torch.int64, shape) for name, shape in (("ids", (3,)), ("lens", ()))}
        self.relay = FutureMap(self.slots, fields)

    def places(self, slot: int, index: list[int]) -> list[int]:
        """Where tokens of a request lie in its pages."""
        pages = self.pages.page_table[slot]
        return [int(pages[at // 2]) * 2 + at % 2 for at in index]

    def inside(self, lengths: list[int]) -> Slots:
        """Requests of the tier that decode."""
        slots = self.slots.take(len(lengths))
        self.tier.reserve(slots, lengths, 20)
        self.tier.admit_direct(slots).entry().launch()
        return slots

    def outside(self, lengths: list[int]) -> Slots:
        """Other requests."""
        slots = self.slots.take(len(lengths))
        self.pages.extend(slots, lengths).entry().launch()
        self.pages.commit(slots, lengths)
        return slots


def test_requests_inside_and_outside_the_tier(rt: Runtime, full: None) -> None:
    """One batch, one plan and one copy: ring rows for requests of the tier, positions for others, and the backup."""
    world = Tiered(rt)
    inside, outside = world.inside([9, 3]), world.outside([5])
    slots = Slots.cat([inside.take([0]), outside, inside.take([1])])
    for step in range(1, 4):
        batch = Running.build(rt, slots=slots, seq_lens=[9 + step, 5 + step, 3 + step])
        last = world.tier.map_last_location(inside, [9 + step, 3 + step])
        added = world.pages.advance(outside)
        padded = batch.pad(4)
        plan = ForwardPlan.of(
            padded.slots, padded.seq_lens, prompt_ids=[[1], [2], [3]], pages=world.pages, tier=last, pad_tokens=4
        )
        uploaded = padded.upload(writes=[last.entry(world.table), added.entry()], extras=plan.extras)
        before = rt.counters.snapshot()
        world.tier.back_up(last, uploaded)
        assert (rt.counters - before).host_to_device_copies == 0
        inputs = ForwardInputs.of(plan, uploaded)
        rows = [(9 + step - 1) % 4, 5 + step - 1, (3 + step - 1) % 4]
        pages = world.pages.page_table[slots.np]
        expected = [int(pages[i, row // 2]) * 2 + row % 2 for i, row in enumerate(rows)]
        assert values(rt, inputs.slot_mapping) == [*expected, 0]
        assert values(rt, uploaded["hot_from"]) == [max(9, 9 + step - 4), 0, max(0, 3 + step - 4), 0]
        assert values(rt, inputs.kv_lens) == [9 + step, 5 + step, 3 + step, 0]
    world.tier.verify()


@pytest.mark.parametrize("bounded", [False, True])
def test_drafts_inside_and_outside_the_tier(rt: Runtime, full: None, bounded: bool) -> None:
    """Both kinds verify drafts in one plan; with bounds the device finds the rows of the ring."""
    world = Tiered(rt)
    inside, outside = world.inside([9, 2]), world.outside([5])
    slots = Slots.cat([outside, inside])
    true, spare = [8, 12, 5], int(bounded)
    world.relay.publish(slots, ids=[[1, 2, 3]] * 3, lens=[5, 9, 2])
    added = world.pages.extend(outside, [8 + spare])
    bounds: Any = true
    if bounded:
        device = rt.upload([np.array(true)]).view(0)
        bounds = MirroredTensor.from_pair(rt, [9, 12, 5], device, contract="upper_bound")
    last = world.tier.map_last_location(inside.pad(3), [12, 5, 0], 3)
    batch = Running.build(rt, slots=slots, seq_lens=bounds)
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, 3, pages=world.pages, tier=last)
    assert plan.bounded == bounded
    uploaded = batch.upload(writes=[last.entry(world.table), added.entry()], extras=plan.extras)
    world.tier.back_up(last, uploaded)
    inputs = world.relay.resolve_forward_inputs(plan, uploaded, ids="ids", lengths="lens", req_to_token=world.table)
    number = slots.np.tolist()
    assert values(rt, inputs.positions) == [5, 6, 7, 9, 10, 11, 2, 3, 4]
    assert values(rt, inputs.kv_lens) == true
    assert values(rt, inputs.slot_mapping) == [
        *world.places(number[0], [5, 6, 7]),
        *world.places(number[1], [1, 2, 3]),
        *world.places(number[2], [2, 3, 0]),
    ]
    assert values(rt, uploaded["hot_from"]) == [0, 9, 1]


def test_the_tier_is_asked_first(rt: Runtime) -> None:
    """Requests of the tier that were not mapped, or at other positions, are refused; so is what kernels cannot read."""
    world = Tiered(rt)
    inside, outside = world.inside([9, 3]), world.outside([5])
    everyone = Slots.cat([inside, outside])
    ids: dict[str, Any] = {"prompt_ids": [[1]] * 3, "pages": world.pages}
    with pytest.raises(ArgumentError, match="pages for"):
        ForwardPlan.of(everyone, [10, 4, 5], **ids)
    last = world.tier.map_last_location(inside, [10, 4])
    for lens, queries in (([11, 4, 5], 1), ([10, 4, 5], [1, 2, 1])):
        with pytest.raises(ArgumentError, match="mapped others"):
            ForwardPlan.of(
                everyone,
                lens,
                queries,
                prompt_ids=[[1] * n for n in np.broadcast_to(queries, 3)],
                pages=world.pages,
                tier=last,
            )
    wrong: dict[str, Any]
    for wrong in ({"pages": None}, {"layouts": "flashinfer"}, {"kv_offset": 0}):
        with pytest.raises(ContractError):
            ForwardPlan.of(everyone, [10, 4, 5], **{**ids, "tier": last, **wrong})
    refused(Code.DERIVED_STALE, lambda: ForwardPlan.of(outside, [5], prompt_ids=[[1]], pages=world.pages, tier=last))
    ForwardPlan.of(everyone, [10, 4, 5], tier=last, **ids)
