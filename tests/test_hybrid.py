"""Hybrid pools: a slot and its states are taken and freed as one."""

import numpy as np
import pytest

from batchstate.errors import ArgumentError, CaptureError, OwnerThreadError, PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from batchstate.tables import Table
from batchstate.violations import Code
from tests.doubles import Gate, in_a_thread, refused


@pytest.fixture
def pool(rt: Runtime) -> HybridSlotPool:
    """4 slots and 2 in reserve, with 2 of 8 states each."""
    return HybridSlotPool(rt, 4, states=8, states_per_slot=2, reserve=2)


def test_is_a_slot_pool(rt: Runtime, pool: HybridSlotPool) -> None:
    """A hybrid pool goes wherever a slot pool goes; its mapping has a row for every slot, not for every state."""
    assert isinstance(pool, SlotPool)
    assert (pool.size, pool.reserve, pool.capacity, pool.state_capacity()) == (4, 2, 7, 9)
    assert pool.state_table().shape == (7, 2)
    assert pool.state_table().holds == "state"
    assert pool.table("more").space is pool


def test_all_or_nothing(pool: HybridSlotPool) -> None:
    """When either pool is short nothing is taken from the other, and the error names the short one."""
    pool.take(4)
    with pytest.raises(PoolExhaustedError, match="states of HybridSlotPool"):
        pool.take(1, reserved=True)
    with pytest.raises(PoolExhaustedError, match="SlotPool 'slots'"):
        pool.take(1)
    assert (pool.stats.live, pool.state_stats().live) == (4, 8)
    pool.verify()


def test_costs_one_copy_and_one_kernel(rt: Runtime, pool: HybridSlotPool) -> None:
    """Taking writes the mapping in one upload and one kernel; with write=False it is packed with another upload."""
    before = rt.counters.snapshot()
    pool.take(2)
    cost = rt.counters - before
    assert (cost.host_to_device_copies, cost.device_operations) == (1, 1)
    before = rt.counters.snapshot()
    slots = pool.take(2, write=False)
    entry = pool.state_entry(slots)
    pool.verify()
    assert (rt.counters - before).host_to_device_copies == 0
    entry.launch()
    assert np.array_equal(rt.read_back(pool.state_table().device_for(slots))[slots.np], pool.states_of(slots))
    pool.verify()


def test_capture_refuses_the_write(rt: Runtime, pool: HybridSlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream is captured the mapping cannot be written; nothing is taken."""
    with monkeypatch.context() as patch:
        patch.setattr(type(rt), "capturing", property(lambda self: True))
        with pytest.raises(CaptureError):
            pool.take(1)
        pool.free(pool.take(1, write=False), after=None)
    assert pool.stats.live == pool.state_stats().live == 0


def test_a_failed_write_gives_everything_back(pool: HybridSlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device write fails, slots and states are free again, and were never taken."""
    before = pool.stats, pool.state_stats()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Table, "write", fail)
    with pytest.raises(MemoryError):
        pool.take(2)
    assert (pool.stats, pool.state_stats()) == before
    pool.verify()


def test_a_second_thread_changes_nothing(rt: Runtime) -> None:
    """`reap` and `state_stats` refuse a foreign thread before they have touched the states."""
    pool = HybridSlotPool(rt, 4, states=4)
    gate = Gate()
    pool.free(pool.take(2), after=gate)
    gate.done = True
    asked = gate.asked
    for ask in (pool.reap, lambda: pool.state_stats()):
        assert isinstance(in_a_thread(ask), OwnerThreadError)
    assert gate.asked == asked
    assert pool.reap() == 2


def test_a_state_entry_that_was_not_taken_along_is_found(rt: Runtime, pool: HybridSlotPool) -> None:
    """A slot that is taken again without its entry still maps to the states of its last owner, on the device."""
    pool.free(pool.take(4), after=None)
    slots = pool.take(2, write=False)
    pool.verify()
    refused(Code.ROW_UNWRITTEN, lambda: pool.state_table().device_for(slots))
    pool.state_table().write(slots, None, pool.states_of(slots))
    assert np.array_equal(rt.inspect(pool.state_table().device_for(slots))[slots.np], pool.states_of(slots))
    pool.verify()


def test_states_take_turns_by_request(rt: Runtime, pool: HybridSlotPool) -> None:
    """A request that sits a step out reads what its own last forward wrote, whatever the step."""
    slots = pool.take(2)
    one, states = slots.take([0]), pool.states_of(slots)
    memory = np.zeros(pool.state_capacity(), dtype=np.int64)
    forwards = dict.fromkeys(slots.np.tolist(), 0)
    for taking_part in (slots, one, slots, slots, one, one, slots):
        rt.synchronize()
        rt.next_step()
        turns = pool.state_turns(taking_part.pad(3))
        assert turns.reads[len(taking_part) :].tolist() == turns.writes[len(taking_part) :].tolist()
        assert not (turns.reads == turns.writes)[: len(taking_part)].any()
        memory[turns.writes] = memory[turns.reads] + 1
        memory[0] = 0
        turns.launched()
        for slot in taking_part.np.tolist():
            forwards[slot] += 1
    assert memory[pool.state_turns(slots).reads].tolist() == [forwards[slot] for slot in slots.np.tolist()] == [7, 4]
    assert pool.state_turns(slots).extras["state_reads"].tolist() == [states[0, 1], states[1, 0]]


def test_turns_are_used_once_and_in_order(pool: HybridSlotPool) -> None:
    """A turn that was planned before another was launched is stale; a request begins with its first state."""
    slots = pool.take(2)
    early, late = pool.state_turns(slots), pool.state_turns(slots.take([1]))
    late.launched()
    violation = refused(Code.STATE_TURN, early.launched)
    assert (violation.row, violation.slot) == (1, int(slots.np[1]))
    refused(Code.STATE_TURN, late.launched)
    refused(Code.STATE_TURN, lambda: early.extras)
    pool.state_turns(slots).launched()
    assert late.reads.tolist() == pool.state_turns(late.slots).reads.tolist()  # two turns later
    violation = refused(Code.STATE_TURN, late.launched)
    assert (violation.row, violation.expected, violation.actual) == (0, "turn 2", "turn 0")
    pool.free(slots, after=None)
    refused(Code.SLOT_STALE_HANDLE, late.launched)
    refused(Code.SLOT_STALE_HANDLE, lambda: late.extras)
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.state_turns(slots))
    again = pool.take(2)
    assert pool.state_turns(again).reads.tolist() == pool.states_of(again)[:, 0].tolist()


def test_several_kinds_of_states(rt: Runtime) -> None:
    """A pool has states of several kinds, each with its count and table; a request may have none of a kind."""
    pool = HybridSlotPool(rt, 4, states={"mamba": 6, "window": 3}, states_per_slot={"mamba": 2})
    assert (pool.state_table("mamba").shape, pool.state_table("window").shape) == ((5, 2), (5, 1))
    assert pool.state_table("window").holds == "window"
    slots = pool.take(3, states={"mamba": [2, 0, 1]})
    assert pool.states_of(slots, "mamba").tolist() == [[1, 2], [0, 0], [3, 0]]
    assert pool.states_of(slots, "window").tolist() == [[1], [2], [3]]
    table = pool.state_table("mamba").device_for(slots)
    assert np.array_equal(rt.inspect(table)[slots.np], pool.states_of(slots, "mamba"))
    turns = pool.state_turns(slots.pad(4), "mamba")
    assert (turns.reads.tolist(), turns.writes.tolist()) == ([1, 0, 3, 0], [2, 0, 3, 0])
    assert list(turns.extras) == ["mamba_reads", "mamba_writes"]
    with pytest.raises(PoolExhaustedError, match="window states"):
        pool.take(1)
    one = pool.take(1, states={"window": 0})
    assert (pool.state_stats("mamba").live, pool.state_stats("window").live) == (5, 3)
    pool.free(Slots.cat([slots, one]), after=None)
    pool.expect_idle()
    for ask in (pool.state_table, pool.state_capacity, pool.state_stats, lambda: pool.states_of(pool.take(0), "swa")):
        with pytest.raises(ArgumentError, match="mamba, window"):
            ask()


def test_a_fence_may_take_slots_while_states_are_counted(rt: Runtime) -> None:
    """A fence that takes slots while a take with its own counts queries it gets the usual states; the take its own."""
    pool = HybridSlotPool(rt, 4, states=8, states_per_slot=2)
    inner: list[Slots] = []

    class Taking:
        def query(self) -> bool:
            if not inner:
                inner.append(pool.take(1))
            return True

        def wait(self) -> None:
            raise AssertionError("the host waited")

    pool.free(pool.take(1), after=Taking())
    outer = pool.take(1, states={"state": 1})
    assert (pool.states_of(inner[0]) > 0).sum() == 2
    assert (pool.states_of(outer) > 0).sum() == 1
    pool.verify()
