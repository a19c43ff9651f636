"""`HybridSlotPool` against plain collections: a slot and its states come and go as one."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule

from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Slots
from batchstate.pools import SlotPool
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.models import AllocatorModel, snapshot_slots, snapshot_table
from batchstate.violations import Code


class HybridMachine(Machine):
    """Takes and frees slots that own one or two states each; sometimes slots run out first, sometimes states."""

    NAME = "hybrid"
    TARGETS = (
        "two steps in flight",
        "a state used again after its fence",
        "states exhausted while slots are free",
        "exhausted while pending would suffice",
        "the reserve used",
        "the mapping written by the caller",
        "double free refused",
    )

    handles = Bundle("handles")

    @initialize(size=st.integers(1, 4), reserve=st.integers(0, 2), per_slot=st.integers(1, 2), spare=st.integers(-2, 2))
    def begin(self, size: int, reserve: int, per_slot: int, spare: int) -> None:
        """Opens the pool, with more or fewer states than all slots together need."""
        self.open()
        states = max(per_slot, (size + reserve) * per_slot + spare)
        self.pool = HybridSlotPool(self.rt, size, states=states, states_per_slot=per_slot, reserve=reserve)
        self.per_slot = per_slot
        self.slots = AllocatorModel(size, reserve)
        self.states = AllocatorModel(states)
        self.owned: dict[int, list[int]] = {}  # slot -> states
        self.written: dict[int, list[int]] = {}  # slot -> its row of the table on the device
        self.generations: dict[int, int] = {}
        self.freed_behind: set[int] = set()
        self.steps = ManualStream()

    def check(self) -> None:
        """Slots, states, the mapping on both sides, and every law."""
        self.pool.verify()
        for model, stats in ((self.slots, self.pool.stats), (self.states, self.pool.state_stats)):
            model.reap()
            agree(
                (model.free, len(model.pending), len(model.live)),
                (stats.free, stats.pending, stats.live),
                "free, pending, live",
            )
        live = sorted(self.slots.live)
        agree(live, self.pool.live_slots().tolist(), "live slots")
        owned = np.array([self.owned[slot] for slot in live], dtype=np.int64).reshape(-1, self.per_slot)
        agree_on(owned, self.pool.states_of(self._handles(live)), "states of the live slots")
        table = np.zeros((self.pool.capacity, self.per_slot), np.int32)
        for slot, states in self.written.items():
            table[slot] = states
        agree_on(table, self.rt.inspect(self.pool.state_table.device), "the table of states")
        self.reached("two steps in flight", self.steps.depth >= 2)
        if live:
            with self.refused(Code.SLOT_CONSERVATION):
                self.pool.expect_idle()
        else:
            self.pool.expect_idle()

    def snapshot(self) -> object:
        """Slots, states and the table."""
        return snapshot_slots(self.pool), self.pool.state_stats, snapshot_table(self.pool.state_table)

    def _handles(self, slots: list[int]) -> Slots:
        generations = [self.generations[slot] for slot in slots]
        identity = self.pool.identity
        return Slots.from_host(self.rt, np.array(slots, np.int64), generations=generations, pool=identity)

    @rule(launched=st.integers(0, 2), ended=st.integers(0, 2))
    def run(self, launched: int, ended: int) -> None:
        """Steps begin on the device, and the oldest end."""
        for _ in range(launched):
            self.steps.record()
        self.steps.complete(ended)

    @rule(target=handles, n=st.integers(0, 3), reserved=st.booleans(), write=st.booleans(), ended=st.integers(0, 1))
    def take(self, n: int, reserved: bool, write: bool, ended: int) -> Slots:
        """Slots come with their states, or not at all."""
        self.steps.complete(ended)
        return self._take(n, reserved=reserved, write=write)

    def _take(self, n: int, *, reserved: bool = False, write: bool = True) -> Slots:
        for model, wanted in ((self.slots, n), (self.states, n * self.per_slot)):
            by_reserve = reserved and model is self.slots
            if not model.takes(wanted, reserved=by_reserve):
                self._count_exhaustion(model, wanted, by_reserve)
                with self.refused(PoolExhaustedError) as refusal:
                    self.pool.take(n, reserved=reserved, write=write)
                if isinstance(refusal.error, PoolExhaustedError):
                    model.check_refusal(refusal.error, wanted, reserved=by_reserve)
                n = 0
                break
        slots = self.pool.take(n, reserved=reserved, write=write)
        numbers = slots.np.tolist()
        self.slots.take(numbers, reserved=reserved)
        states = self.pool.states_of(slots).tolist()
        self.states.take(state for row in states for state in row)
        self.owned.update(zip(numbers, states, strict=True))
        self.generations.update(zip(numbers, slots.generations.tolist(), strict=True))
        if not write and n:
            entry = self.pool.state_entry(slots)
            self.pool.state_table.write(slots, None, entry.values.reshape(-1, self.per_slot))
            self.reached("the mapping written by the caller")
        self.written.update(zip(numbers, states, strict=True))
        self.reached("the reserve used", any(slot > self.slots.size for slot in numbers))
        again = {state for row in states for state in row} & self.freed_behind
        self.reached("a state used again after its fence", bool(again))
        return slots

    def _count_exhaustion(self, model: AllocatorModel, n: int, reserved: bool) -> None:
        if model is self.states:
            self.reached("states exhausted while slots are free")
        self.reached("exhausted while pending would suffice", model.waiting_helps(n, reserved=reserved))

    @rule(slots=handles, data=st.data())
    def free(self, slots: Slots, data: st.DataObject) -> None:
        """Slots go with their states, behind one fence; what is not live is refused."""
        self._free(slots, data.draw(st.sampled_from([None, *self.steps.in_flight]), label="after"))

    def _free(self, slots: Slots, fence: ManualFence | None) -> None:
        numbers = slots.np.tolist()
        held = slots.generations.tolist()
        mine = [self.generations.get(slot) for slot in numbers] == held
        if not mine or not all(slot in self.slots.live for slot in numbers):
            self.reached("double free refused")
            with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
                self.pool.free(slots, after=fence)
            with self.refused(Code.SLOT_STALE_HANDLE):
                self.pool.states_of(slots)
            return
        self.pool.free(slots, after=fence)
        self.slots.release(numbers, fence)
        for slot in numbers:
            states = self.owned.pop(slot)
            self.states.release(states, fence)
            (self.freed_behind.update if fence is not None else self.freed_behind.difference_update)(states)

    @rule(target=handles, n=st.integers(1, 2))
    def turn_over(self, n: int) -> Slots:
        """Launch, finish behind it, ask too early, the step ends, take."""
        fence = self.steps.record()
        self.steps.record()
        self._free(self._handles(sorted(self.slots.live)[:n]), fence)
        self._free(self._take(n), None)
        self.steps.complete_until(fence)
        return self._take(n, reserved=True)

    @rule(slots=handles)
    def misuse(self, slots: Slots) -> None:
        """Counts and handles that cannot be meant are refused, and neither pool changes."""
        with self.refused(ArgumentError):
            self.pool.take(-1)
        with self.refused(ArgumentError):
            self.pool.free(SlotPool(self.rt, 2).take(1))
        with self.refused(ArgumentError):
            HybridSlotPool(self.rt, 1, states=1, states_per_slot=2)
        if len(slots):
            with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
                self.pool.free(slots.take([0, 0]))
