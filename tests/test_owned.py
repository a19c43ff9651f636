"""Owned is owned: who frees names a fence, only accepted tokens go to others, and numbers ask whose they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Code, FutureMap, HybridSlotPool, Runtime, StepPlanner, checks, relay_field
from batchstate.errors import ArgumentError
from batchstate.mirror import Locations, Pages, StateRow
from batchstate.testing.fences import LateRuntime
from tests.doubles import refused
from tests.step_world import Running, World
from tests.worlds import PAGE_SIZE, Pools


def in_flight(rt: Runtime, by_parts: bool = False) -> World:
    """Two requests in a forward that has not ended, as far as the host knows."""
    world = World.planned(rt, by_parts=by_parts)
    world.join([5, 6])
    step = world.planner.plan(world.batch)
    step.inputs()
    world.batch = step.batch
    return world


LEAVING: dict[str, Callable[[World], object]] = {
    "release_requests": lambda world: world.pages.release_requests(world.batch.slots, after=None),
    "release": lambda world: world.pages.release(world.batch.slots, after=None),
    "truncate": lambda world: world.pages.truncate(world.batch.slots, 1, after=None),
    "clear": lambda world: world.slots.clear(),
    "plan": lambda world: world.planner.plan(world.batch, keep=[1], after=None),
}


WAYS = [(way, by_parts) for way in LEAVING for by_parts in (False, True) if (way, by_parts) != ("plan", True)]
each_way = pytest.mark.parametrize(("way", "by_parts"), WAYS)
"""A plan by parts releases in a call of its own."""


@each_way
def test_freeing_without_a_fence_under_a_forward_is_refused(way: str, by_parts: bool) -> None:
    """The slots of a forward that may still run do not change owner: SLOT_IN_FLIGHT, and nothing has changed."""
    rt = LateRuntime()
    world = in_flight(rt, by_parts)
    before = world.state()
    broken = refused(Code.SLOT_IN_FLIGHT, lambda: LEAVING[way](world))
    assert (broken.slot, broken.step) == (1, 0)
    assert "forward of step 0" in str(broken.actual)
    assert world.state() == before
    with checks("off"):
        LEAVING[way](world)


@each_way
def test_freeing_without_a_fence_when_the_forward_has_ended(way: str, by_parts: bool) -> None:
    """A forward that is known to have ended uses nothing: the host has waited for all, for a fence, or for nothing."""
    for ends in (LateRuntime.synchronize, lambda rt: rt.record().wait(), lambda rt: rt.complete(100)):
        rt = LateRuntime()
        world = in_flight(rt, by_parts)
        live, free = world.slots.stats.live, world.pages.stats.free
        ends(rt)
        LEAVING[way](world)
        gone = {"release_requests": 2, "clear": 2, "plan": 1}.get(way, 0)
        assert world.slots.stats.live == live - gone
        assert world.pages.stats.free > free
        assert world.pages.stats.pending == 0


def test_a_request_of_an_ended_forward_leaves_while_another_runs() -> None:
    """Each request goes by its own last forward."""
    rt = LateRuntime()
    world = World.planned(rt)
    world.join([5, 6, 7])
    step = world.planner.plan(world.batch)
    world.run(step)
    ended, running = world.batch.filter([0]).slots, world.batch.filter([1, 2])
    other = world.planner.plan(running)  # request 0 sits out
    assert step.results["last"].np.size == 3  # the forward of all three has ended
    other.inputs()
    other.publish(last=torch.tensor([1, 2]))
    refused(Code.SLOT_IN_FLIGHT, lambda: world.pages.release_requests(running.slots, after=None))
    world.pages.release_requests(ended, after=None)
    assert (world.slots.stats.live, world.slots.stats.pending) == (2, 0)
    world.slots.verify()


def test_a_truncation_that_gives_nothing_back_needs_no_fence() -> None:
    """Tokens are taken back inside of their page while the forward runs; a page is not."""
    world = in_flight(LateRuntime())
    slots = world.batch.slots
    world.pages.truncate(slots, [6 - 1, 7 - 1], after=None)
    refused(Code.SLOT_IN_FLIGHT, lambda: world.pages.truncate(slots, PAGE_SIZE, after=None))
    refused(Code.SLOT_IN_FLIGHT, lambda: world.pages.truncate(slots, first=PAGE_SIZE, after=None))


def test_requests_that_leave_with_a_step_name_a_fence(rt: Runtime) -> None:
    """A plan by which requests leave says behind what; one that keeps all needs nothing."""
    world = World.planned(rt)
    world.join([5, 6])
    before = world.state()
    with pytest.raises(ArgumentError, match="1 requests leave, and no fence") as caught:
        world.planner.plan(world.batch, keep=[1])
    assert "after=" in caught.value.remedy
    assert world.state() == before
    world.run(world.planner.plan(world.batch, keep=[0, 1]))
    world.run(world.planner.plan(world.batch, keep=[1], after=rt.record()))
    for free in (world.slots.free, world.pages.release_requests, world.pages.release):
        with pytest.raises(TypeError, match="after"):
            free(world.batch.slots)  # type: ignore[call-arg]


# Accepted is not launched


def drafting(rt: Runtime) -> tuple[World, Any]:
    """Two requests that put in a token and two guesses each step."""
    world = World.planned(rt)
    fields = {"token": relay_field(torch.int64), "guesses": relay_field(torch.int64, shape=(2,))}
    relay = FutureMap(world.slots, fields)
    planner = StepPlanner(Running, pages=world.pages, relay=relay, ids=("token", "guesses"))
    slots = world.pages.take_requests([6, 6])
    relay.publish(slots, token=[1, 2], guesses=[[3, 4], [5, 6]])
    world.batch = world.built(slots, [6, 6])
    return world, planner


GIVEN: dict[str, Callable[[World, Any], object]] = {
    "hold": lambda world, slots: world.pages.hold(slots, 8),
    "share": lambda world, slots: world.pages.share(slots, world.slots.take(1), 8),
    "locations": lambda world, slots: world.pages.locations(slots, 0, 8),
    "rebase": lambda world, slots: world.pages.rebase(slots, slots, 8, after=None),
}


@pytest.mark.parametrize("way", GIVEN)
def test_guesses_are_given_to_nobody(rt: Runtime, way: str) -> None:
    """The first alone of the tokens that a step guessed is accepted; the engine says which others are."""
    world, planner = drafting(rt)
    step = planner.plan(world.batch, 3)
    step.inputs()
    first = step.batch.slots.filter([0])
    assert world.pages.committed(first).tolist() == [9]
    broken = refused(Code.LENGTH_ORDER, lambda: GIVEN[way](world, first))
    assert "a prefix of 8 tokens asked for, 7 are accepted" in broken.problem
    world.pages.truncate(step.batch.slots, [8, 7], after=rt.record())
    refused(Code.LENGTH_ORDER, lambda: GIVEN[way](world, first))
    refused(Code.LENGTH_ORDER, lambda: world.pages.accept(first, 9))
    world.pages.accept(step.batch.slots, [8, 7])
    GIVEN[way](world, first)


def test_a_step_accepts_what_it_goes_on_from(rt: Runtime) -> None:
    """The next step of a request is planned on tokens that were verified."""
    world, planner = drafting(rt)
    step = planner.plan(world.batch, 3)
    step.inputs()
    step.publish(token=torch.ones(2, dtype=torch.int64), guesses=torch.ones(2, 2, dtype=torch.int64))
    step = planner.plan(step.batch, 3)
    world.pages._rows.arrays["launched"][:] = 12
    assert world.pages.hold(step.batch.slots.filter([0]), 8).tokens == 8
    refused(Code.LENGTH_ORDER, lambda: world.pages.hold(step.batch.slots.filter([0]), 12))


@pytest.mark.parametrize("int32", [(), ("slot_mapping",)], ids=["int64", "int32"])
def test_pages_that_get_holders_behind_the_plan(rt: Runtime, int32: tuple[str, ...]) -> None:
    """A page before the tokens of a step may be shared between plan and inputs, whatever the dtype of the mapping."""
    world = World.planned(rt, int32=int32)
    world.join([PAGE_SIZE + 1, PAGE_SIZE + 2])
    step = world.planner.plan(world.batch)
    world.pages.share(world.batch.slots.filter([0]), world.slots.take(1), PAGE_SIZE)
    rows = world.batch.slots.np.tolist()
    expected = [world.locations(slot, [n])[0] for slot, n in zip(rows, (PAGE_SIZE + 1, PAGE_SIZE + 2), strict=True)]
    assert world.run(step).slot_mapping.tolist() == expected


def test_places_to_write_are_nobody_elses(rt: Runtime) -> None:
    """KV is loaded into pages that a request has alone, behind its accepted tokens, and nowhere else."""
    world = Pools.of(rt)
    one, two = world.slots.take(1), world.slots.take(1)
    world.pages.grow(one, 8)
    places = world.pages.writing(one, 0, 8)
    world.pages.commit(one, 8)
    assert places.np.tolist() == world.pages.locations(one, 0, 8).np.tolist()
    broken = refused(Code.LENGTH_ORDER, lambda: world.pages.writing(one, 7, 8))
    assert "a write from token 7 on, of 8 that are accepted" in broken.problem
    refused(Code.LENGTH_ORDER, lambda: world.pages.writing(one, 8, 9))  # no page
    world.pages.share(one, two, 8)
    world.pages.truncate(two, 5, after=None)
    refused(Code.PAGE_OWNER, lambda: world.pages.writing(two, 5, 6))
    world.pages.grow(two, 12)
    assert world.pages.writing(two, 8, 12).np.size == 4
    refused(Code.PAGE_OWNER, lambda: world.pages.writing(two, 6, 12))
    with pytest.raises(ArgumentError, match="positions of one slot"):
        world.pages.writing(two, 8, 7)


def test_what_stays_behind_a_window_can_be_held(rt: Runtime) -> None:
    """Pages in front were given back: those behind are held all the same, and pages to grow into stay."""
    world = Pools.of(rt)
    slots = world.slots.take(1)
    world.pages.extend(slots, 12)
    world.pages.commit(slots, 12)
    world.pages.grow(slots, 20)
    world.pages.truncate(slots, first=0, after=None)
    assert world.pages.allocated(slots).tolist() == [20]
    world.pages.truncate(slots, first=9, after=None)
    assert (world.pages.allocated(slots).tolist(), world.pages.committed(slots).tolist()) == ([20], [12])
    lease = world.pages.hold(slots, 12, first=8)
    assert lease.pages.tolist() == world.pages.page_table[slots.np[0], 2:3].tolist()
    refused(Code.PAGE_RELEASED, lambda: world.pages.hold(slots, 12, first=4))
    world.slots.verify()


# Numbers ask whose they are

SIDES: dict[str, Callable[[Any], object]] = {
    "np": lambda handles: handles.np,
    "host": lambda handles: handles.host,
    "device": lambda handles: handles.device,
}


@pytest.mark.parametrize("side", SIDES)
def test_places_of_a_request_that_left_are_refused(rt: Runtime, side: str) -> None:
    """Locations and pages are read while their owner has them, and in no other way afterwards."""
    world = World.planned(rt)
    world.join([5, 6])
    slots = world.batch.slots.filter([0])
    places, pages = world.pages.locations(slots, 0, 5), world.pages.pages_of(slots)
    assert isinstance(places, Locations)
    assert isinstance(pages, Pages)
    SIDES[side](places), SIDES[side](pages)
    part = places.filter([1, 2])
    world.pages.release_requests(slots, after=None)
    for handles in (places, pages, part):
        refused(Code.SLOT_STALE_HANDLE, lambda handles=handles: SIDES[side](handles))  # type: ignore[misc]
    world.pages.extend(world.slots.take(1), 5)  # the next owner has them
    refused(Code.SLOT_STALE_HANDLE, lambda: SIDES[side](places))
    with checks("off"):
        SIDES[side](places)


def test_extras_ask_whose_they_are(rt: Runtime) -> None:
    """Slots, places and states that go with an upload are those of requests that are there."""
    world = World.planned(rt)
    world.join([5, 6])
    gone, stays = world.batch.slots.split([1, 1])
    places = world.pages.locations(gone, 0, 5)
    world.batch.upload(extras={"slot": gone, "place": places})
    world.pages.release_requests(gone, after=None)
    batch = world.batch.filter([1])
    for extras in ({"slot": gone}, {"place": places}):
        refused(Code.SLOT_STALE_HANDLE, lambda extras=extras: batch.upload(extras=extras))  # type: ignore[misc]
    batch.upload(extras={"slot": stays})


def test_states_ask_whose_they_are(rt: Runtime) -> None:
    """The row of a request's state is that which it has written last, and is refused once the request has left."""
    pool = HybridSlotPool(rt, 4, states={"mamba": 8}, states_per_slot={"mamba": 2})
    slots = pool.take(2)
    rows = pool.state_rows(slots)
    assert isinstance(rows, StateRow)
    assert (rows.unit, rows.np.tolist()) == ("mamba", pool.states_of(slots)[:, 0].tolist())
    turns = pool.state_turns(slots)
    turns.launched()
    assert pool.state_rows(slots).np.tolist() == turns.writes.tolist() == pool.states_of(slots)[:, 1].tolist()
    pool.free(slots.filter([0]), after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: rows.np)
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.state_rows(slots))
    assert rows.filter([1]).np.size == 1
    some = HybridSlotPool(rt, 2, states=2)
    assert some.state_rows(some.take(2, states={"state": [0, 1]})).np.tolist() == [0, 1]
    empty = HybridSlotPool(rt, 4, states=8)
    assert empty.state_rows(empty.take(1)).unit == "state"
    np.testing.assert_array_equal(rows.generations, [1, 1])


def test_a_batch_behind_its_pages_is_refused_at_every_level(rt: Runtime) -> None:
    """A step that is planned from the batch before the last would take tokens back: it is refused in words."""
    world = World.planned(rt)
    world.join([5, 6])
    old = world.batch
    for _ in range(2):
        world.run(world.planner.plan(world.batch))
    with checks("off"):
        broken = refused(Code.LENGTH_ORDER, lambda: world.planner.plan(old, 1))
    assert "6 tokens asked for in all, and 7 are committed" in broken.problem
