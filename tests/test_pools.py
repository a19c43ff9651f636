"""Slot pools: no slot has two owners, and everything that was taken can be accounted for."""

import functools
import re

import pytest

from batchstate import levels
from batchstate.errors import ArgumentError, BatchStateError, DeviceError, OwnerThreadError, PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.pages import PagePool
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import Gate, forged, in_a_thread, refused
from tests.selfcheck.machine import Misuse
from tests.selfcheck.machines.pools import SlotMachine
from tests.selfcheck.models import snapshot_slots

# Who owns which slot, what is free, pending and in reserve, and which handles are refused: the model of the machine
# `slot_pool` compares all of it after every call.


def test_last_freed_is_first_taken(rt: Runtime) -> None:
    """Reuse is last in, first out; generations make that safe."""
    pool = SlotPool(rt, 8)
    first = pool.take(4)
    pool.free(first.take([1, 2]), after=None)
    assert pool.take(2).np.tolist() == first.np[[1, 2]].tolist()


def test_pending_until_the_fence(rt: Runtime) -> None:
    """A slot freed behind a fence is neither free nor live until that fence is complete, in whatever order they are."""
    pool = SlotPool(rt, 4)
    old, new = Gate(), Gate()
    first, second = pool.take(2), pool.take(2)
    pool.free(first, after=old)
    pool.free(second, after=new)
    assert (pool.stats.free, pool.stats.pending, pool.stats.live) == (0, 4, 0)
    assert not pool.is_live(first.np).any()
    with pytest.raises(PoolExhaustedError):
        pool.take(1)
    new.done = True
    assert sorted(pool.take(2).np.tolist()) == sorted(second.np.tolist())
    old.done = True
    assert (pool.reap(), pool.reap(), pool.stats.free) == (2, 0, 2)


def test_pending_says_which_fence_and_since_when(rt: Runtime) -> None:
    """A slot that does not come back can be traced to its fence, and to the step in which it was freed."""
    pool = SlotPool(rt, 8)
    stuck, other = Gate(), Gate()
    first, second, third = pool.take(2), pool.take(1), pool.take(3)
    rt.next_step()
    pool.free(first, after=stuck)
    pool.free(second, after=stuck)
    rt.next_step()
    pool.free(third, after=other)
    assert [(one.slots.tolist(), one.step) for one in pool.pending()] == [
        ([*first.np, *second.np], rt.step - 1),
        (third.np.tolist(), rt.step),
    ]
    assert [one.fence for one in pool.pending()] == [stuck, other]
    assert (stuck.asked, other.asked) == (0, 0)
    other.done = True
    pool.reap()
    assert [one.fence for one in pool.pending()] == [stuck]


def test_one_query_for_one_step(rt: Runtime) -> None:
    """Requests freed behind one fence cost one query of it."""
    pool = SlotPool(rt, 64)
    gate = Gate()
    slots = pool.take(64)
    for row in range(64):
        pool.free(slots.take([row]), after=gate)
    gate.asked = 0
    pool.reap()
    assert gate.asked == 1


def test_capture_asks_no_fence(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """During capture fences are not queried; pending slots simply stay pending."""
    pool = SlotPool(rt, 4)
    gate = Gate(done=True)
    slots = pool.take(2)
    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "capturing", property(lambda self: True))
        pool.free(slots, after=gate)
        assert pool.reap() == 0
        assert pool.stats.pending == 2
        pool.take(1)
        pool.verify()
    assert gate.asked == 0
    assert pool.reap() == 2


def test_reports_name_row_slot_and_generation(rt: Runtime) -> None:
    """Of the first handle that is dead, pending or another owner's."""
    pool = SlotPool(rt, 2)
    old, other = pool.take(1), pool.take(1)
    pool.free(old, after=Gate(done=True))
    report = refused(Code.SLOT_DOUBLE_FREE, lambda: pool.free(other.merge(old), after=None))
    assert (report.row, report.slot) == (1, 1)
    pool.take(1)
    report = refused(Code.SLOT_STALE_HANDLE, lambda: pool.free(old, after=None))
    assert (report.slot, report.generation) == (1, 1)
    assert "generation 2" in str(report)


def test_refuses_other_pools_and_runtimes(rt: Runtime, device: str) -> None:
    """Slots of another pool and of another runtime are typed errors; the message names both pools."""
    pool, other = SlotPool(rt, 4, name="mine"), SlotPool(rt, 4, name="theirs")
    with pytest.raises(ArgumentError, match=r"'mine', got slots of pool 'theirs'"):
        pool.free(other.take(1), after=None)
    with pytest.raises(DeviceError):
        pool.free(SlotPool(open_device(device), 4).take(1), after=None)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("misuse", SlotMachine.MISUSES, ids=lambda misuse: str(misuse.name))
def test_misuse_is_refused(rt: Runtime, misuse: Misuse[SlotPool], hybrid: bool) -> None:
    """Calls that cannot be meant are refused as the machine's table says, and change nothing, by a hybrid pool too."""
    pool = HybridSlotPool(rt, 4, states=8, reserve=2) if hybrid else SlotPool(rt, 4, reserve=2)
    pool.take(2)
    before = snapshot_slots(pool)
    with pytest.raises(BatchStateError) as caught:
        misuse.call(pool)
    assert getattr(caught.value, "code", type(caught.value)) in misuse.expected
    assert snapshot_slots(pool) == before


def test_arguments_are_checked_at_level_off(rt: Runtime) -> None:
    """With checks off a double free, a stale handle and padding are refused all the same."""
    with levels.checks("off"):
        pool = SlotPool(rt, 2)
        slots = pool.take(1)
        pool.free(slots, after=None)
        refused(Code.SLOT_DOUBLE_FREE, lambda: pool.free(slots, after=None))
        pool.take(1)
        refused(Code.SLOT_STALE_HANDLE, lambda: pool.free(slots, after=None))


def test_statistics_add_up(rt: Runtime) -> None:
    """The sum of free, pending and live is size + reserve; totals, the peak and the number of calls are kept."""
    pool = SlotPool(rt, 6, reserve=2)
    slots = pool.take(5)
    pool.free(slots.take([0]), after=None)
    pool.free(slots.take([1, 2]), after=Gate())
    stats = pool.stats
    assert (stats.free, stats.free_reserved, stats.pending, stats.live) == (4, 2, 2, 2)
    assert (stats.taken_total, stats.freed_total, stats.peak_live, stats.takes) == (5, 3, 5, 1)
    assert pool.live_slots().tolist() == slots.np[3:].tolist()


def test_idle_names_the_leaked(rt: Runtime) -> None:
    """A slot that was not freed is named at shutdown, up to 8 of them; pending slots are no leak."""
    pool = SlotPool(rt, 20)
    slots = pool.take(12)
    report = refused(Code.SLOT_CONSERVATION, pool.expect_idle)
    assert "12 leaked: 1, 2, 3, 4, 5, 6, 7, 8, ..." in str(report)
    pool.free(slots, after=Gate())
    pool.expect_idle()


def test_owns_what_was_freed(rt: Runtime) -> None:
    """The pool copies what it is given: writing into the caller's memory afterwards changes nothing."""
    pool = SlotPool(rt, 8)
    gate = Gate()
    slots = pool.take(3)
    pool.free(slots, after=gate)
    slots.host.fill_(7)
    gate.done = True
    assert sorted(pool.take(3).np.tolist()) == [1, 2, 3]
    pool.verify()


@pytest.mark.parametrize("operation", ["free", "rows_of"])
def test_refuses_what_is_out_of_range(rt: Runtime, operation: str) -> None:
    """A handle whose number lies outside is refused, however far, and whatever generation it says."""
    pool = SlotPool(rt, 3)
    pool.take(3)
    given: dict[str, object] = {"operation": "x"} if operation == "rows_of" else {"after": None}
    far = 4 * pool.capacity
    for row in (*range(-far, 0), *range(pool.capacity, far), 2**62, -(2**62)):
        handle = forged(Slots, rt, [row], [1], pool.pool_id)
        refused(Code.SLOT_OUT_OF_RANGE, functools.partial(getattr(pool, operation), handle, **given))
    assert pool.stats.live == 3


class Shaky:
    """A fence that answers as told, or fails."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def query(self) -> bool:
        if not self.answers:
            raise RuntimeError("device lost")
        return self.answers.pop(0)

    def wait(self) -> None:
        raise AssertionError("the host waited")


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_completed_fence_is_not_asked_again(rt: Runtime, level: str) -> None:
    """What a fence has released once is free, whatever the fence says or raises later."""
    with levels.checks(level):
        for fence in (Shaky(True), Shaky(True, False)):
            pool = SlotPool(rt, 4)
            pool.free(pool.take(4), after=fence)
            pool.take(1)
            pool.verify()
            assert (pool.stats.free, pool.stats.pending, pool.stats.live) == (3, 0, 1)


def test_a_fence_that_fails_loses_nothing(rt: Runtime) -> None:
    """An error of one fence comes through, and every slot is where it was, those behind other fences included."""
    pool = SlotPool(rt, 4)
    two, other = pool.take(2), pool.take(1)
    pool.free(two, after=Gate(done=True))
    failing = Shaky()
    pool.free(other, after=failing)
    with pytest.raises(RuntimeError, match="device lost"):
        pool.take(1)
    pool.verify()
    failing.answers = [True]
    assert pool.reap() == 3
    assert (pool.stats.free, pool.stats.pending) == (4, 0)


def test_a_damaged_table_refuses_without_a_change(rt: Runtime, full: None) -> None:
    """At `full` a dirty row 0 is found before a take or a free has changed anything."""
    pool = SlotPool(rt, 4)
    table = pool.table("a")
    slots = pool.take(1)
    table.memory[0] = 7
    refused(Code.SLOT_ZERO_DIRTY, lambda: pool.take(1))
    refused(Code.SLOT_ZERO_DIRTY, lambda: pool.free(slots, after=None))
    with levels.checks("off"):
        assert (pool.stats.free, pool.stats.live) == (3, 1)
        assert pool.is_live(slots.np).all()


def test_belongs_to_one_thread(rt: Runtime) -> None:
    """A second thread is refused everywhere; looking handles up uses scratch memory of the pool."""
    pool = SlotPool(rt, 4)
    slots = pool.take(1)
    for call in (
        lambda: pool.take(1),
        lambda: pool.free(slots, after=None),
        lambda: pool.rows_of(slots, "x", unique=True),
        lambda: pool.check_handles(slots, "x"),
        lambda: pool.release_requests(slots, after=None),
        lambda: pool.clear(),
    ):
        assert isinstance(in_a_thread(call), OwnerThreadError)
    assert pool.stats.live == 1


def test_running_out_says_whether_it_can_ever_succeed(rt: Runtime) -> None:
    """The error says what is free, what waiting would give, what the reserve has, and whether the pool is too small."""
    pool = SlotPool(rt, 6, reserve=2)
    for n in (100, 2**70):
        with pytest.raises(PoolExhaustedError, match="can never succeed: the pool has 6"):
            pool.take(n)
    with pytest.raises(PoolExhaustedError, match="can never succeed: the pool has 8"):
        pool.take(9, reserved=True)
    slots = pool.take(6)
    with pytest.raises(PoolExhaustedError, match="2 more are free in the reserve") as caught:
        pool.take(1)
    assert (caught.value.size, caught.value.free_reserved) == (6, 2)
    pool.free(slots.take([0, 1]), after=Gate())
    pool.free(pool.take(2, reserved=True), after=Gate())  # those of the reserve do not help an ordinary take
    with pytest.raises(PoolExhaustedError) as caught:
        pool.take(3)
    assert (caught.value.requested, caught.value.free, caught.value.pending) == (3, 0, 2)


def test_running_out_says_when_a_fence_is_overdue(rt: Runtime) -> None:
    """Where a fence is older than the steps in flight, waiting is not what helps: the error says where to look."""
    pool = SlotPool(rt, 4, reserve=1)
    rt.next_step()
    pool.free(pool.take(1, reserved=True), after=Gate())  # older, but of the reserve
    rt.next_step()
    pool.free(pool.take(3), after=Gate())
    since = rt.step
    for _ in range(rt.steps_in_flight + 1):
        with pytest.raises(
            PoolExhaustedError, match=f"3 pending on a fence since step {since}\n.*the pending entries suffice"
        ):
            pool.take(2)
        rt.next_step()
    with pytest.raises(PoolExhaustedError, match=r"remedy: the oldest fence should.*`SlotPool.pending\(\)`") as caught:
        pool.take(2)
    assert (caught.value.pending, caught.value.pending_since) == (3, since)
    pool.take(1)
    with pytest.raises(PoolExhaustedError, match=r"remedy: retract.*: plans take, then free; .*be complete by now"):
        pool.take(4)  # nothing that is pending suffices
    with pytest.raises(PoolExhaustedError, match=r"remedy: this can never succeed: the pool has 4; ask for fewer.*$"):
        pool.take(5)


def test_a_handle_without_a_generation_has_no_owner(rt: Runtime) -> None:
    """Numbers wrapped by hand have generation 0, which no live slot has: refused also while the slot is free."""
    pool = SlotPool(rt, 4)
    table = pool.table("table", (2,))
    for free in (True, False):
        wrapped = forged(Slots, rt, [1], [0], pool.pool_id)
        for use in (lambda w=wrapped: pool.check_handles(w, "use"), lambda w=wrapped: table.entry(w, [0], [5])):
            refused(Code.SLOT_STALE_HANDLE, use)
        if free:
            pool.take(1)


def test_a_leak_is_named_with_the_line_that_took_it(rt: Runtime) -> None:
    """At `full` the report of a leak says where each slot and page was taken; what was taken below says no line."""
    pool = SlotPool(rt, 8)
    pages = PagePool(rt, pool, 8, 4, max_tokens_per_request=8)

    def admitted() -> Slots:
        return pool.take(1)

    def grown(slots: Slots) -> None:
        pages.extend(slots, 5)

    with levels.checks("full"):
        admitted()
        kept = pool.take(1)
        grown(kept)
    with levels.checks("cheap"):
        pool.free(pool.take(2), after=None)
        pool.take(1)
    slots, owned = (refused(Code.SLOT_CONSERVATION, one.expect_idle) for one in (pool, pages))
    found = re.findall(r"(\d+)(?: \(taken at \S*test_pools.py:\d+ in (\w+)\))?[,;]", slots.problem)
    assert found == [("1", "admitted"), ("2", test_a_leak_is_named_with_the_line_that_took_it.__name__), ("3", "")]
    assert owned.problem.count(" in grown)") == 2


@pytest.mark.parametrize("after", [None, Gate(done=True)])
@pytest.mark.parametrize("reserved", [False, True])
def test_a_slot_with_the_last_generation_is_retired(rt: Runtime, reserved: bool, after: Gate | None) -> None:
    """It is taken never again, counts as retired in the sum, and a pool that has lost it says what is left."""
    pool = SlotPool(rt, 2, reserve=1)
    slot = 3 if reserved else 1
    pool._allocator.core.arrays["generation"][slot] = 2**31 - 2
    slots = pool.take(1, reserved=reserved)
    assert (slots.np.tolist(), slots.generations.tolist()) == ([slot], [2**31 - 1])
    pool.check_handles(slots, "use")
    pool.verify()
    pool.free(slots, after=after)
    stats = pool.stats
    assert (stats.free, stats.pending, stats.live, stats.retired) == (2, 0, 0, 1)
    assert "retired=1" in repr(pool)
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.check_handles(slots, "use"))
    refused(Code.SLOT_DOUBLE_FREE, lambda: pool.free(slots, after=None))
    rest = pool.take(2, reserved=True)
    assert slot not in rest.np
    with pytest.raises(PoolExhaustedError, match=f"can never succeed: the pool has {2 if reserved else 1}"):
        pool.take(2 + reserved)
    pool.verify()
    pool.clear()
    assert slot not in pool.take(2, reserved=True).np
    pool.verify()
