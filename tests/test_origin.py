"""What is derived knows what it was derived from: used late, or for other rows, it is refused before anything runs."""

import functools
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

from batchstate import MirroredTensor, Runtime, Slots, StaticBuffers, Violation, checks
from batchstate.errors import ArgumentError
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, Prefetched, relay_field
from batchstate.violations import Code
from tests.doubles import refused
from tests.worlds import ForwardWorld, Running


@pytest.fixture
def world(rt: Runtime) -> ForwardWorld:
    """Pools, pages, a token table and a relay."""
    return ForwardWorld.of(rt)


def nothing_moves(rt: Runtime, call: Callable[[], object], code: Code = Code.DERIVED_STALE) -> Violation:
    """The violation of a call that launches and copies nothing."""
    before = rt.counters.snapshot()
    violation = refused(code, call)
    assert attrs.evolve(rt.counters, check_reads=before.check_reads) == before
    return violation


# Pages that have changed


def test_a_plan_older_than_a_release(rt: Runtime, world: ForwardWorld) -> None:
    """A request gives its pages back and gets others: the plan from before would write into those of its neighbour."""
    one, other = world.take([5]), world.take([5])
    world.publish(one)
    plan, uploaded = world.planned(one, [5], pages=world.pages)
    world.pages.release(one, after=None)
    world.pages.extend(other, 9)  # takes the page that `plan` writes
    world.pages.extend(one, 5)  # as many tokens as before: allocated, committed and live
    violation = nothing_moves(rt, lambda: world.resolve(plan, uploaded))
    assert (violation.row, violation.slot) == (0, int(one.np[0]))
    assert str(violation.actual).endswith(f"release in step {rt.step}")
    batch = Running.build(rt, slots=one, seq_lens=[5])
    nothing_moves(rt, lambda: batch.upload(extras=plan.extras))
    nothing_moves(rt, lambda: batch.upload(extras={"more": np.zeros(1)} | plan.extras))
    assert world.states(one, "last_token") == ["published"]


@pytest.mark.parametrize("change", ["release", "truncate", "shared anew"])
def test_a_write_older_than_its_pages(rt: Runtime, world: ForwardWorld, change: str) -> None:
    """Locations are not written to the table once their tokens were taken back, whatever the slot has since."""
    one, other = world.slots.take(2).split([1, 1])
    extension = world.pages.extend(one, 5)
    write = extension.entry()
    if change == "truncate":
        world.pages.truncate(one, 4, after=None)
    else:
        world.pages.release(one, after=None)
    if change == "shared anew":
        world.pages.extend(other, 8)
        world.pages.commit(other, 8)
        world.pages.share(other, one, 8)
    batch = Running.build(rt, slots=one, seq_lens=[5])
    for late in (lambda: batch.upload(writes=[write]), extension.entry, lambda: extension.locations):
        assert nothing_moves(rt, late).slot == int(one.np[0])


def test_what_adds_keeps_everything_good(rt: Runtime, world: ForwardWorld) -> None:
    """Growing and committing leave plans and extensions as they are, and so does what happens to other requests."""
    one, other = world.take([5]), world.take([7])
    world.publish(one)
    first = world.pages.extend(one, 6)
    plan, uploaded = world.planned(one, [6], pages=world.pages)
    world.pages.grow(one, 20)
    world.pages.advance(one, 3)
    first.entry()
    world.resolve(plan, uploaded)
    world.pages.truncate(one, 9, after=None)  # as many as there are: the pages that were not in use go
    assert world.pages.epochs.rows[one.np].tolist() == [1]
    world.pages.release_requests(other, after=None)
    assert world.pages.epochs.rows[[one.np[0], other.np[0]]].tolist() == [1, 2]
    refused(Code.DERIVED_STALE, first.entry)


def test_a_page_that_others_use_is_not_written_by_an_older_plan(rt: Runtime, world: ForwardWorld) -> None:
    """Once a request shares the page that a plan writes, the plan is refused; sharing what it only reads is fine."""
    one, two, three = world.take([8]), *world.slots.take(2).split([1, 1])
    world.publish(one)
    plan, uploaded = world.planned(one, [8], pages=world.pages)
    world.pages.commit(one, 8)  # another forward writes the tokens
    world.pages.share(one, two, 4)  # the plan writes position 7
    plan.check(uploaded.row_set, "resolve")
    world.pages.share(one, three, 8)
    nothing_moves(rt, lambda: world.resolve(plan, uploaded), Code.PAGE_OWNER)


# Rows of another batch


def test_a_plan_of_other_rows(rt: Runtime, world: ForwardWorld) -> None:
    """The arrays of a plan go with the batch that it was made of, or one of the same requests in the same order."""
    slots = world.take([3, 5, 7])
    world.publish(slots)
    batch = Running.build(rt, slots=slots, seq_lens=[3, 5, 7])
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=world.pages)
    for other in (batch.filter([1, 0, 2]), batch.filter([0, 1])):
        violation = nothing_moves(rt, functools.partial(other.upload, extras=plan.extras))
        assert violation.operation == "upload"
        assert "the plan of step" in violation.problem
        uploaded = other.upload(extras=dict(plan.extras))  # plain arrays say nothing
        nothing_moves(rt, functools.partial(world.resolve, plan, uploaded))
    same = batch.filter([2, 1, 0]).filter([2, 1, 0]).advance("seq_lens", 0)
    world.resolve(plan, same.upload(extras=plan.extras))


def test_rows_of_two_sets_make_no_plan(rt: Runtime, world: ForwardWorld) -> None:
    """Slots of one batch and lengths of another, in another order, are refused."""
    batch = Running.build(rt, slots=world.take([3, 5]), seq_lens=[3, 5])
    turned = batch.filter([1, 0])
    violation = refused(Code.DERIVED_STALE, lambda: ForwardPlan.of(batch.slots, turned.seq_lens))
    assert violation.row == 0
    refused(Code.DERIVED_STALE, lambda: ForwardPlan.of(batch.slots, batch.seq_lens, turned.seq_lens))
    refused(Code.DERIVED_STALE, lambda: batch.replace(seq_lens=turned.seq_lens))
    ForwardPlan.of(turned.slots, batch.filter([1, 0]).seq_lens)


@pytest.mark.parametrize("lens", [[5, 5], [6, 8]])
def test_lengths_that_are_not_those_of_the_pages(rt: Runtime, world: ForwardWorld, lens: list[int]) -> None:
    """Exact lengths of a plan are the committed ones: one behind or ahead would read or write a token beside them."""
    slots = world.take([5, 6])
    violation = refused(Code.DERIVED_STALE, lambda: ForwardPlan.of(slots, lens, pages=world.pages))
    row = int(lens[0] == 5)
    assert (violation.row, violation.expected, violation.actual) == (row, [5, 6][row], lens[row])
    with checks("off"):
        ForwardPlan.of(slots, lens, pages=world.pages)


# Results by handle


@pytest.fixture
def results(rt: Runtime, world: ForwardWorld) -> tuple[Running, Prefetched]:
    """Three requests with bounds 9, and their true lengths 3, 5 and 7 on the way to the host."""
    slots = world.take([9, 9, 9])
    relay = FutureMap(world.slots, {"lens": relay_field(torch.int64, read_by="host")})
    relay.publish(slots, lens=rt.upload([np.array([3, 5, 7])]).view(0))
    batch = Running.build(rt, slots=slots, seq_lens=world.bounds([9, 9, 9], [3, 5, 7]))
    return batch, relay.prefetch(slots, "lens")


def test_results_go_by_handle(world: ForwardWorld, results: tuple[Running, Prefetched]) -> None:
    """A batch in another order, of fewer requests, finds the results of its own."""
    batch, found = results
    turned = batch.filter([2, 0])
    assert found["lens"].aligned(turned.slots).tolist() == [7, 3]
    assert turned.tighten("seq_lens", found["lens"]).seq_lens.np.tolist() == [7, 3]
    assert turned.tighten("seq_lens", found["lens"].np + 1, slots=found.slots).seq_lens.np.tolist() == [8, 4]
    assert turned.seq_lens.tighten(found["lens"]).np.tolist() == [7, 3]
    assert batch.seq_lens.filter([1]).tighten(found["lens"]).np.tolist() == [5]
    world.pages.truncate(turned.slots, found["lens"], after=None)
    assert world.pages.committed(batch.slots).tolist() == [3, 9, 7]


def test_an_array_has_to_say_whose_rows_it_has(results: tuple[Running, Prefetched]) -> None:
    """A batch with slots takes no bare array: it would go by position."""
    batch, found = results
    with pytest.raises(ArgumentError, match="does not say to which requests"):
        batch.tighten("seq_lens", found["lens"].np)
    with pytest.raises(ArgumentError, match="rows of requests are not known"):
        found["lens"].aligned(batch.seq_lens)


def test_a_result_of_a_former_owner(rt: Runtime, world: ForwardWorld, results: tuple[Running, Prefetched]) -> None:
    """A request that left keeps its results: the next owner of its slot has none, and is named."""
    batch, found = results
    left = batch.filter([1]).slots
    world.pages.release_requests(left, after=None)
    joined = world.take([9])
    assert int(joined.np[0]) == int(left.np[0])
    now = batch.filter([0, 2]).merge(Running.build(rt, slots=joined, seq_lens=[9]))
    for late in (
        lambda: found["lens"].aligned(now.slots),
        lambda: now.tighten("seq_lens", found["lens"]),
        lambda: world.pages.truncate(now.slots, found["lens"], after=None),
    ):
        violation = refused(Code.DERIVED_STALE, late)
        assert (violation.row, violation.slot) == (2, int(joined.np[0]))
    with checks("off"):
        refused(Code.DERIVED_STALE, lambda: found["lens"].aligned(now.slots))
    assert world.pages.committed(now.slots).tolist() == [9, 9, 9]


def test_slots_of_another_pool_have_no_results(rt: Runtime, results: tuple[Running, Prefetched]) -> None:
    """Handles of two pools are never the same, though their numbers are."""
    _, found = results
    other: Slots = ForwardWorld.of(rt).take([9, 9, 9])
    refused(Code.DERIVED_STALE, lambda: found["lens"].aligned(other))


# Graphs and tables


def test_a_graph_of_another_batch(rt: Runtime, world: ForwardWorld) -> None:
    """A bound replay runs the batch that is in its buffers: not another, not the one that fills another graph's."""
    batch = Running.build(rt, slots=world.take([3, 5]), seq_lens=[3, 5])
    buffers = {rows: StaticBuffers(rt, Running, rows=rows) for rows in (4, 8)}
    ran: list[int] = []
    replay = {rows: one.bind(functools.partial(ran.append, rows)) for rows, one in buffers.items()}
    nothing_moves(rt, lambda: replay[4](batch))
    batch.to_static(buffers[4])
    replay[4](batch)
    violation = nothing_moves(rt, lambda: replay[8](batch))
    assert (violation.row, violation.operation) == (None, "replay")
    batch.to_static(buffers[8])
    later = batch.advance("seq_lens", 1)
    nothing_moves(rt, lambda: replay[8](later))
    later.to_static(buffers[4])
    replay[8](batch)
    nothing_moves(rt, lambda: replay[4](batch))
    assert ran == [4, 8]


def test_a_graph_whose_pages_or_requests_went(rt: Runtime, world: ForwardWorld) -> None:
    """Buffers that hold a plan are not replayed once its pages were given back, nor when a request has left."""
    slots = world.take([3, 5])
    batch = Running.build(rt, slots=slots, seq_lens=[3, 5])
    plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=world.pages)
    buffers = StaticBuffers(rt, Running, rows=2, extras=plan.extras)
    replay = buffers.bind(lambda: None)
    batch.to_static(buffers, extras=plan.extras)
    replay(batch)
    world.pages.truncate(slots, [3, 4], after=None)
    assert nothing_moves(rt, lambda: replay(batch)).row == 1
    world.pages.release_requests(slots, after=None)
    nothing_moves(rt, lambda: replay(batch), Code.SLOT_STALE_HANDLE)


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_rows_gathered_from_a_table_that_was_written(rt: Runtime, world: ForwardWorld, level: str) -> None:
    """Gathered rows serve until one of them is written or cleared; what happens to other rows does not matter."""
    with checks(level):
        values = world.slots.table("values", (2,), torch.int64, host=True)
        slots, other = world.slots.take(3).split([2, 1])
        values.write(slots, None, [[1, 2], [3, 4]])
        gathered = values.gather(slots)
        values.write(other, None, [[5, 6]])
        assert rt.inspect(gathered.device).tolist() == [[1, 2], [3, 4]]
        values.write(slots.filter([1]), [0], [7])
        violation = nothing_moves(rt, lambda: gathered.device)
        assert (violation.row, violation.slot) == (1, int(slots.np[1]))
        again = values.gather(slots.pad(3))
        assert rt.inspect(again.device).tolist() == [[1, 2], [7, 4], [0, 0]]
        values.clear(slots.filter([0]))
        nothing_moves(rt, lambda: again.device)
        third = values.gather(slots)
        world.slots.free(slots, after=None)
        nothing_moves(rt, lambda: third.device, Code.SLOT_STALE_HANDLE)


def test_values_given_to_a_batch_are_of_its_requests(rt: Runtime, world: ForwardWorld) -> None:
    """Masks, amounts and values of another order are refused by every operation that would take them by position."""
    batch = Running.build(rt, slots=world.take([3, 5]), seq_lens=[3, 5])
    turned = batch.filter([1, 0])
    relay = FutureMap(world.slots, {"lens": relay_field(torch.int64)})
    table = world.slots.table("lens", (), torch.int64)
    done = MirroredTensor.from_host(rt, [True, False])
    for call in (
        lambda: batch.advance("seq_lens", turned.seq_lens),
        lambda: batch.next_batch(keep=[1, 0], advance="seq_lens", n=batch.seq_lens),
        lambda: batch.replace(seq_lens=turned.seq_lens),
        lambda: relay.publish(batch.slots, lens=turned.seq_lens),
        lambda: table.write(batch.slots, None, turned.seq_lens),
        lambda: batch.seq_lens + turned.seq_lens,
    ):
        nothing_moves(rt, call)
    assert batch.filter(done).seq_lens.np.tolist() == [3]
    table.write(batch.slots, None, batch.seq_lens)
    assert (batch.seq_lens + batch.seq_lens).np.tolist() == [6, 10]
    assert batch.advance("seq_lens", batch.seq_lens).seq_lens.np.tolist() == [6, 10]
