"""Drafts whose number differs from request to request: a ragged field of the relay."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from batchstate import Code, Runtime, checks
from batchstate.errors import DeclarationError, ShapeError
from batchstate.forward.inputs import ForwardInputs
from batchstate.future_map import FutureMap, relay_field
from tests.doubles import refused
from tests.worlds import LONGEST, ForwardWorld

DRAFTS = [[11, 12, 13], [], [31], [41, 42]]
IDS = ("last_token", "drafts")
LAST = [10, 20, 30, 40]


@pytest.fixture
def world(rt: Runtime) -> ForwardWorld:
    """Pools, and a relay with up to three drafts for each request."""
    world = ForwardWorld.of(rt)
    drafts = relay_field(torch.int64, (3,), non_negative=True, ragged=True)
    lens, last = relay_field(torch.int64, non_negative=True), relay_field(torch.int64, non_negative=True)
    world.relay = FutureMap(world.slots, {"last_token": last, "drafts": drafts, "lens": lens})
    return world


def values(rt: Runtime, tensor: torch.Tensor | None) -> list[int]:
    """On the host."""
    assert tensor is not None
    found: list[int] = rt.inspect(tensor).tolist()
    return found


def put_in(drafts: Sequence[Sequence[int]]) -> list[int]:
    """Ids of the last tokens and drafts, request by request."""
    return [one for last, more in zip(LAST, drafts, strict=False) for one in (last, *more)]


@pytest.mark.parametrize("level", ["cheap", "full"])
@pytest.mark.parametrize("prompt", [False, True])
def test_each_request_puts_in_its_own_number(rt: Runtime, world: ForwardWorld, level: str, prompt: bool) -> None:
    """Lists of unequal lengths are published, and each request puts in its token and its drafts, beside a prompt."""
    with checks(level):
        queries = [1 + len(one) for one in DRAFTS]
        lens = [5 + query for query in queries]
        slots = world.take([*lens, 4] if prompt else lens)
        decoding = slots.filter(range(4))
        world.relay.publish(decoding, last_token=LAST, drafts=DRAFTS)
        if prompt:
            lens, queries = [*lens, 4], [*queries, 2]
        plan, uploaded = world.planned(
            slots, lens, queries, prompt_ids=[None] * 4 + [[7, 8]] * prompt, pages=world.pages, rows=6 * prompt
        )
        before = rt.counters.snapshot()
        inputs = world.resolve(plan, uploaded, ids=IDS, req_to_token=world.table)
        cost = rt.counters - before
        assert values(rt, inputs.input_ids) == put_in(DRAFTS) + [7, 8] * prompt
        assert values(rt, inputs.positions)[:6] == [5, 6, 7, 8, 5, 5]
        assert (cost.host_to_device_copies, cost.forced_syncs) == (1 + prompt, 0)


@pytest.mark.parametrize("level", ["cheap", "full"])
@pytest.mark.parametrize("queries", [[4, 1, 2, 3], [2, 2, 2, 2], [1, 1, 1, 1], [4, 4, 4, 4]])
def test_lengths_that_the_host_bounds(rt: Runtime, world: ForwardWorld, level: str, queries: list[int]) -> None:
    """With bounds, positions, lengths and places are the true ones, up to the end of a row of the token table."""
    with checks(level):
        true = [5, 6, LONGEST - queries[2], 3]
        after = [length + query for length, query in zip(true, queries, strict=True)]
        bounds = [min(length + 2, LONGEST) for length in after]
        slots = world.take(bounds)
        drafts = [[10 * row + 1 + at for at in range(3)] for row in range(1, 5)]
        world.relay.publish(slots, last_token=LAST, drafts=drafts, lens=true)
        plan, uploaded = world.planned(
            slots, world.bounds(bounds, after), queries, pages=world.pages, layouts="flash_attention"
        )
        inputs: ForwardInputs = world.resolve(plan, uploaded, ids=IDS, lengths="lens", req_to_token=world.table)
        expected = [(row, at) for row, query in enumerate(queries) for at in range(true[row], true[row] + query)]
        assert values(rt, inputs.positions) == [at for _, at in expected]
        assert values(rt, inputs.kv_lens) == after
        assert values(rt, inputs.kv_start_loc) == [0, *np.cumsum(after).tolist()]
        places = [place for row, at in expected for place in world.locations(int(slots.np[row]), [at])]
        assert values(rt, inputs.slot_mapping) == places
        ids = put_in([more[: query - 1] for more, query in zip(drafts, queries, strict=True)])
        assert values(rt, inputs.input_ids) == ids


def test_more_drafts_than_were_published(rt: Runtime, world: ForwardWorld) -> None:
    """At `full` a request that puts in what lies behind its drafts is SENTINEL_ESCAPED: no -1 goes to the model."""
    with checks("full"):
        slots = world.take([8, 8])
        world.relay.publish(slots, last_token=LAST[:2], drafts=[[11], [21]])
        plan, uploaded = world.planned(slots, [8, 8], [2, 3])
        violation = refused(Code.SENTINEL_ESCAPED, lambda: world.resolve(plan, uploaded, ids=IDS))
        assert violation.row == 4


@pytest.mark.parametrize(
    ("queries", "ids", "error", "words"),
    [
        ([5, 1], IDS, ShapeError, "row 0 puts in 5 tokens, and the relay has 1 to 4"),
        ([2, 1], ("last_token",), ShapeError, "row 0 puts in 2 tokens, and the relay has 1 "),
        ([1, 1], ("drafts", "last_token"), DeclarationError, "name it last"),
    ],
)
def test_what_the_relay_cannot_serve_is_refused(
    rt: Runtime, world: ForwardWorld, queries: list[int], ids: tuple[str, ...], error: type[Exception], words: str
) -> None:
    """More tokens than an entry has, or a ragged field that is not the last: a typed error, and nothing is taken."""
    slots = world.take([8, 8])
    world.relay.publish(slots, last_token=LAST[:2], drafts=[[11], [21]])
    plan, uploaded = world.planned(slots, [8, 8], queries)
    before = rt.counters.snapshot()
    with pytest.raises(error, match=words):
        world.resolve(plan, uploaded, ids=ids)
    assert rt.counters == before
    assert [world.states(slots, name) for name in IDS] == [["published"] * 2] * 2


@pytest.mark.parametrize("drafts", [[[1, 2, 3, 4], []], [[1]], [1, 2]])
def test_lists_that_do_not_fit_are_refused(world: ForwardWorld, drafts: object) -> None:
    """A request with more drafts than the field has, or too few requests, publishes nothing."""
    slots = world.take([8, 8])
    with pytest.raises(ShapeError):
        world.relay.publish(slots, drafts=drafts)
    assert world.states(slots, "drafts") == ["unwritten"] * 2


@pytest.mark.parametrize(("dtype", "shape"), [(torch.int64, ()), (torch.int64, (2, 2)), (torch.float32, (3,))])
def test_ragged_is_a_row_of_ids(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A ragged field is one row of signed integers."""
    with pytest.raises(DeclarationError, match="ragged"):
        relay_field(dtype, shape, ragged=True)
