"""Natural variations of the mistakes that owning answers: another call, a view, a thread, two steps later.

A variation is a generator. It yields a call that is right and has to pass, then a wrong one that has to be refused.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Code,
    ForwardPlan,
    HybridSlotPool,
    PrefixCache,
    SlotPool,
    StaticBuffers,
    checks,
    open_runtime,
)
from batchstate.errors import ArgumentError, DeclarationError, DtypeError, ShapeError
from batchstate.mirror import Locations, Slots
from batchstate.testing.fences import LateRuntime
from batchstate.transport.engines.in_process import InProcessEngine, Network
from batchstate.transport.plan import KVLayout
from batchstate.transport.sender import Sender
from batchstate.transport.workers import Description
from batchstate.violations import Violation
from tests import test_landing
from tests.step_world import Running, World
from tests.test_accepted import Speculating
from tests.test_agreement import Decode
from tests.test_owned import drafting, in_flight
from tests.worlds import Pools, Tier, Tiered

Calls = Generator[Callable[[], object], None, None]
VARIATIONS: dict[str, tuple[Callable[[], Calls], Code | type[Exception]]] = {}


def refused_with(answer: Code | type[Exception]) -> Callable[[Callable[[], Calls]], Callable[[], Calls]]:
    """Declares a variation, and what answers it."""

    def declared(variation: Callable[[], Calls]) -> Callable[[], Calls]:
        VARIATIONS[variation.__name__.strip("_")] = variation, answer
        return variation

    return declared


def in_another_thread(call: Callable[[], object]) -> Callable[[], object]:
    """The call, made on a thread of its own; raises here what it raises there."""

    def act() -> None:
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    return act


# Numbers remember their owner: locations, pages, states


def _left(world: World) -> None:
    """The first request leaves, and another has its pages; two steps go on."""
    world.run(world.planner.plan(world.batch, keep=[1], after=world.rt.record()))
    world.pages.extend(world.slots.take(1), 6)
    world.run(world.planner.plan(world.batch))


def _two() -> tuple[World, Slots]:
    world = World.planned(open_runtime("cpu"))
    world.join([5, 6])
    return world, world.batch.slots.filter([0])


@refused_with(Code.SLOT_STALE_HANDLE)
def _places_joined_with_those_of_a_live_request() -> Calls:
    world, first = _two()
    other = world.pages.locations(world.batch.slots.filter([1]), 0, 5)
    places = Locations.cat([other, world.pages.locations(first, 0, 5)])
    yield lambda: places.device
    _left(world)
    yield lambda: places.device


@refused_with(Code.SLOT_STALE_HANDLE)
def _places_read_on_the_thread_of_a_copy() -> Calls:
    world, first = _two()
    places = world.pages.locations(first, 0, 5)
    yield in_another_thread(lambda: places.np)
    _left(world)
    yield in_another_thread(lambda: places.np)


@refused_with(Code.SLOT_STALE_HANDLE)
def _a_part_of_places_padded_two_steps_later() -> Calls:
    world, first = _two()
    part = world.pages.locations(first, 0, 5).take([1, 3])
    yield lambda: part.pad(8).host
    _left(world)
    yield lambda: part.pad(8).host


@refused_with(Code.SLOT_STALE_HANDLE)
def _rows_cleared_by_places_of_another() -> Calls:
    world, first = _two()
    table, places = world.pages.table("scales", (2,), torch.int64), world.pages.locations(first, 0, 5)
    yield lambda: table.clear(places)
    _left(world)
    yield lambda: table.clear(places)


@refused_with(Code.SLOT_STALE_HANDLE)
def _pages_of_a_job_in_the_upload_of_the_next_step() -> Calls:
    world, first = _two()
    pages = world.pages.pages_of(first)
    yield lambda: world.batch.upload(extras={"pages": pages})
    _left(world)
    yield lambda: world.planner.plan(world.batch, extras={"pages": pages})


@refused_with(Code.SLOT_STALE_HANDLE)
def _places_in_the_host_tier_of_a_request_that_left() -> Calls:
    world = Tiered.of(Pools.of(open_runtime("cpu"))).join()
    places = world.tier.host_locations(world.ready, 3).pad(4)
    yield lambda: places.np
    world.tier.finish(world.ready, after=None)
    yield lambda: places.np


@refused_with(Code.SLOT_STALE_HANDLE)
def _a_state_kept_beyond_its_slot() -> Calls:
    pool = HybridSlotPool(open_runtime("cpu"), 4, states=8)
    slots = pool.take(2)
    row = pool.state_rows(slots).take([1])
    yield lambda: row.tolist()
    pool.free(slots, after=None)
    pool.take(2)
    yield lambda: row.tolist()


# Who frees names a fence


@refused_with(Code.SLOT_IN_FLIGHT)
def _a_slot_freed_alone_under_its_forward() -> Calls:
    world = in_flight(LateRuntime())
    other = world.slots.take(1)
    yield lambda: world.slots.free(other, after=None)
    yield lambda: world.pages.release_requests(world.batch.slots.take([1]), after=None)


@refused_with(Code.SLOT_IN_FLIGHT)
def _a_request_that_sat_out_two_steps_freed_without_a_fence() -> Calls:
    rt = LateRuntime(steps_in_flight=4)
    world = World.planned(rt)
    world.join([5, 6])
    first, second = world.batch.slots.split([1, 1])
    world.run(world.planner.plan(world.batch))
    for _ in range(2):
        rt.next_step()
        world.run(world.planner.plan(world.batch if len(world.batch) == 1 else world.batch.filter([1])))
    yield lambda: world.pages.hold(first, 4).release(after=None)  # the request has its pages still
    yield lambda: world.pages.release_requests(Slots.cat([second, first]), after=None)


@refused_with(Code.SLOT_IN_FLIGHT)
def _pages_exchanged_under_a_forward() -> Calls:
    world = in_flight(LateRuntime())
    first, second = world.batch.slots.split([1, 1])
    lease = world.pages.hold(first, 4)
    yield lambda: world.pages.rebase(first, lease, 4, after=world.rt.record())
    yield lambda: world.pages.rebase(second, lease, 4, after=None)


@refused_with(TypeError)
def _a_fence_left_out_where_a_request_of_the_tier_ends() -> Calls:
    tier = Tier.of(Pools.of(open_runtime("cpu")))
    (ranges,) = tier.host.take([3], [1])
    yield lambda: tier.host.free(ranges, after=None)
    yield lambda: tier.tier.finish(tier.pools.slots.take(1))  # type: ignore[call-arg]


# Writes into pages


@refused_with(Code.PAGE_OWNER)
def _places_to_write_on_a_page_that_a_cache_has() -> Calls:
    world = Pools.of(open_runtime("cpu"))
    one = world.joined([8])
    yield lambda: PrefixCache(world.pages).insert(one, ["a", "b"])
    world.pages.truncate(one, 5, after=None)
    yield lambda: world.pages.writing(one, 5, 8)


@refused_with(Code.LENGTH_ORDER)
def _guesses_cached_behind_what_is_cached() -> Calls:
    world, planner = drafting(open_runtime("cpu"))
    step = planner.plan(world.batch, 3)
    step.inputs()
    first, cache = step.batch.slots.take([0]), PrefixCache(world.pages)
    yield lambda: cache.insert(first, ["a"])
    yield lambda: cache.insert(first, ["b"], first=1)


@refused_with(Code.LENGTH_ORDER)
def _guesses_that_stay_after_a_window_has_moved_on() -> Calls:
    world, planner = drafting(open_runtime("cpu"))
    step = planner.plan(world.batch, 3)
    step.inputs()
    first = step.batch.slots.take([0])
    world.pages.truncate(first, first=5, after=world.rt.record())
    yield lambda: world.pages.locations(first, 4, 7)
    yield lambda: world.pages.locations(first, 4, 8)


@refused_with(Code.PAGE_UNWRITTEN)
def _a_chunk_that_the_draft_model_left_out() -> Calls:
    world = Pools.of(open_runtime("cpu"))
    world.pages.register_kv(memory="draft")
    one, two = world.joined([8, 8]).split([1, 1])
    world.pages.mark_written(one, 0, 8, memory="draft")
    world.pages.mark_written(two, 4, 8, memory="draft")
    yield lambda: world.pages.locations(one, 0, 8)
    yield lambda: world.pages.locations(two, 0, 8)


# Lengths come from what was accepted


@refused_with(DeclarationError)
def _lengths_published_by_the_relay_itself() -> Calls:
    engine = Speculating(open_runtime("cpu"), [10, 8])
    yield lambda: engine.step.accept(engine.counts(1, 3))
    yield lambda: engine.relay.publish(engine.step.batch.slots, lens=engine.inputs.kv_lens)


@refused_with(Code.FUTURE_UNREAD_OVERWRITTEN)
def _tokens_accepted_twice() -> Calls:
    engine = Speculating(open_runtime("cpu"), [10, 8])
    yield lambda: engine.step.accept(engine.counts(1, 3))
    yield lambda: engine.step.accept(engine.counts(1, 3))


# Leases and memory of transfers


def _granted() -> tuple[test_landing.World, Any]:
    world = test_landing.World()
    lease = world.lease(8, first=8)
    return world, world.granted(lease, world.landing(lease))


def _sends(
    world: test_landing.World, transfer: Any, sources: Locations, first: int, last: bool
) -> Callable[[], object]:
    return lambda: world.sender.send(transfer, sources, first, last, after=world.runtime.record())


@refused_with(ArgumentError)
def _a_chunk_sent_once_more() -> Calls:
    world, transfer = _granted()
    sources = Locations.from_host(world.runtime, np.arange(20, 24))
    yield _sends(world, transfer, sources, 8, False)
    yield _sends(world, transfer, sources, 8, False)


@refused_with(ArgumentError)
def _tokens_sent_that_are_not_accepted() -> Calls:
    world, transfer = _granted()
    slots = world.slots.take(1)
    extension = world.pages.extend(slots, 16)
    world.pages.commit(slots, 16)
    yield _sends(world, transfer, world.pages.locations(slots, 8, 12), 8, False)
    yield _sends(world, transfer, extension.locations.take(range(12, 16)), 12, True)


@refused_with(Code.TRANSFER_IDLE)
def _a_transfer_that_ends_in_the_middle() -> Calls:
    world, transfer = _granted()
    world.sender._idle_polls = 3
    yield _sends(world, transfer, Locations.from_host(world.runtime, np.arange(20, 24)), 8, False)
    yield lambda: [world.sender.poll() for _ in range(5)]


@refused_with(DtypeError)
def _memory_viewed_as_another_dtype() -> Calls:
    memory = torch.zeros(64, 4, dtype=torch.bfloat16)

    def sender(dtype: torch.dtype) -> object:
        engine = InProcessEngine(Network(1))
        about = Description("w", engine.instance, KVLayout(4, "bfloat16", ("keys",), 8), engine.endpoint())
        return Sender(engine, about, [engine.register(memory.view(dtype), "keys")])

    yield partial(sender, torch.bfloat16)
    yield partial(sender, torch.float16)


# Ranks


def _reports(change: Callable[[Decode], object]) -> Callable[[], object]:
    ranks = Decode(), Decode()
    change(ranks[1])
    reports = [rank.group.report() for rank in ranks]
    return lambda: ranks[0].group.agree(reports)


@refused_with(Code.RANKS_DIFFER)
def _a_page_held_on_one_rank() -> Calls:
    yield _reports(lambda rank: rank.world.pages.stats)
    yield _reports(lambda rank: rank.world.pages.hold(rank.batch.slots.take([0]), 4))


@refused_with(Code.RANKS_DIFFER)
def _a_forward_that_one_rank_leaves_out() -> Calls:
    yield _reports(lambda rank: rank.batch.slots.np)
    yield _reports(lambda rank: rank.batch.to_static(rank.graphs[4]))


# Shapes follow from rows, rows go by handle


def _padded(world: World, rows: int) -> Any:
    batch = world.batch.pad(rows)
    return ForwardPlan.of(batch.slots, batch.seq_lens, prompt_ids=[[1]] * 2, pages=world.pages, pad_tokens=4).extras


@refused_with(ShapeError)
def _another_graph_filled_from_the_plan_of_a_smaller_one() -> Calls:
    world, _ = _two()
    buffers = {rows: StaticBuffers(world.rt, Running, rows=rows, extras=_padded(world, rows)) for rows in (4, 8)}
    yield lambda: world.batch.to_static(buffers[8], extras=_padded(world, 8))
    yield lambda: world.batch.to_static(buffers[8], extras=_padded(world, 4))


@refused_with(Code.DERIVED_STALE)
def _a_column_put_in_from_another_filter() -> Calls:
    world, _ = _two()
    one, two = world.batch.filter([0]), world.batch.filter([1])
    yield lambda: one.replace(seq_lens=one.seq_lens)
    yield lambda: one.replace(seq_lens=two.seq_lens)


@refused_with(Code.DERIVED_STALE)
def _numbers_added_row_by_row_to_another_order() -> Calls:
    world, _ = _two()
    yield lambda: world.batch.advance("seq_lens", world.batch.seq_lens)
    yield lambda: world.batch.filter([0]).advance("seq_lens", world.batch.filter([1]).seq_lens)


# Row 0


@refused_with(Code.SLOT_ZERO_DIRTY)
def _row_zero_of_a_part_of_memory_adopted() -> Calls:
    pool = SlotPool(open_runtime("cpu"), 4)
    memory = torch.ones(12, 3)
    memory[4] = 0
    with checks("off"):
        yield lambda: pool.adopt(memory[4:9], "begins with zeros")
        yield lambda: pool.adopt(memory[5:10], "begins with ones")


@refused_with(Code.SLOT_ZERO_DIRTY)
def _padding_of_pages_adopted_dirty() -> Calls:
    world = Pools.of(open_runtime("cpu"))
    memory = torch.zeros(world.pages.num_pages + 1, 2)
    yield lambda: world.pages.adopt(memory, "zeros", by="page")
    memory[0, 1] = float("nan")
    yield lambda: world.pages.adopt(memory, "not a number", by="page", host=True)


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("level", ["cheap", "full"])
def test_a_variation_is_refused(name: str, level: str) -> None:
    """The call that is right passes, and the one that is wrong is refused, with the answer that is declared."""
    variation, answer = VARIATIONS[name]
    with checks(level), closing(variation()) as calls:  # closed: some are at a level of their own, which they put back
        next(calls)()
        with pytest.raises(Violation if isinstance(answer, Code) else answer) as caught:
            next(calls)()
    if isinstance(caught.value, Violation):
        assert caught.value.code is answer
