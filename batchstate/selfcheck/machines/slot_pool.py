"""`SlotPool` against plain collections: fenced frees, a reserve, stale handles, tables."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule

from batchstate.errors import ArgumentError, DtypeError, PoolExhaustedError, RowIndexError, ShapeError
from batchstate.indices import Pages, Slots
from batchstate.pools import SlotPool
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, Misuse, agree, agree_on
from batchstate.testing.models import AllocatorModel, snapshot_slots, snapshot_table
from batchstate.violations import Code

# Ways to misuse a `SlotPool`.


def _forged(pool: SlotPool, slot: int) -> Slots:
    return Slots.from_host(pool.runtime, [slot], generations=[1], pool=pool.identity)


MISUSES: tuple[Misuse[SlotPool], ...] = (
    Misuse("take -1", (ArgumentError,), lambda pool: pool.take(-1)),
    Misuse("take True", (DtypeError,), lambda pool: pool.take(True)),
    Misuse("take half a slot", (DtypeError,), lambda pool: pool.take(0.5)),  # type: ignore[arg-type]
    Misuse("free numbers", (DtypeError,), lambda pool: pool.free(np.array([1]))),  # type: ignore[arg-type]
    Misuse(
        "free pages",
        (Code.UNIT_MISMATCH,),
        lambda pool: pool.free(Pages.from_host(pool.runtime, [1])),  # type: ignore[arg-type]
    ),
    Misuse("free behind a number", (ArgumentError,), lambda pool: pool.free(pool.take(0), after=5)),  # type: ignore[arg-type]
    Misuse("free a slot of no pool", (ArgumentError,), lambda pool: pool.free(Slots.from_host(pool.runtime, [1]))),
    Misuse("free slot 0", (Code.SLOT_ZERO_ALLOCATED,), lambda pool: pool.free(_forged(pool, 0))),
    Misuse("free slot -1", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.free(_forged(pool, -1))),
    Misuse("free beyond the last", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.free(_forged(pool, pool.capacity))),
    Misuse("ask for a slot out of range", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.is_live([pool.capacity])),
    Misuse("ask for half a slot", (DtypeError,), lambda pool: pool.is_live([0.5])),
    Misuse(
        "adopt a table sized by size",
        (Code.TABLE_CAPACITY,),
        lambda pool: pool.adopt(pool.runtime.device_zeros((pool.size,), torch.int32), "small"),
    ),
    Misuse(
        "adopt a scalar", (ShapeError,), lambda pool: pool.adopt(pool.runtime.device_zeros((), torch.int32), "scalar")
    ),
    Misuse("a table of a negative width", (ArgumentError,), lambda pool: pool.table("t", (-1,))),
    Misuse("a pool of no slots", (ArgumentError,), lambda pool: SlotPool(pool.runtime, 0)),
    Misuse("a negative reserve", (ArgumentError,), lambda pool: SlotPool(pool.runtime, 1, reserve=-1)),
)

_STALE = (Code.SLOT_STALE_HANDLE, Code.SLOT_DOUBLE_FREE)
_WIDTH = 3


class SlotPoolMachine(Machine):
    """Takes and frees slots behind fences that the machine completes by hand."""

    NAME = "slot_pool"
    TARGETS = (
        "two steps in flight",
        "a slot used again after its fence",
        "taken while another slot is pending",
        "freed behind step N while N+1 is in flight",
        "exhausted while pending would suffice",
        "exhausted for good",
        "the reserve used",
        "double free refused",
        "handle of a slot used again refused",
        "write through a stale handle refused",
    )

    handles = Bundle("handles")

    @initialize(size=st.integers(1, 5), reserve=st.integers(0, 2))
    def begin(self, size: int, reserve: int) -> None:
        """Opens a pool so small that slots are used again and again."""
        self.open()
        self.pool = SlotPool(self.rt, size, reserve=reserve)
        self.other = SlotPool(self.rt, size, name="other")
        self.foreign = self.other.take(1)
        self.table = self.pool.table("table", (_WIDTH,), torch.int32, host=True)
        self.model = AllocatorModel(size, reserve)
        self.rows = np.zeros((size + reserve + 1, _WIDTH), np.int32)
        self.generations = np.zeros(size + reserve + 1, np.int64)
        self.owners: dict[int, ManualFence | None] = {}  # slot -> fence of its last free
        self.steps = ManualStream()

    def check(self) -> None:
        """Who is live and pending, the table, and every law of the pool."""
        self.pool.verify()
        self.model.reap()
        stats = self.pool.stats
        agree(
            (self.model.free, self.model.free_reserved, len(self.model.pending), len(self.model.live)),
            (stats.free, stats.free_reserved, stats.pending, stats.live),
            "free, free_reserved, pending, live",
        )
        agree(sorted(self.model.live), self.pool.live_slots().tolist(), "live slots")
        everyone = np.arange(self.pool.capacity)
        agree([slot in self.model.live for slot in everyone], self.pool.is_live(everyone).tolist(), "is_live")
        agree_on(self.rows, self.rt.inspect(self.table.device), "the table")
        if self.model.live:
            with self.refused(Code.SLOT_CONSERVATION):
                self.pool.expect_idle()
        else:
            self.pool.expect_idle()
        self.reached("two steps in flight", self.steps.depth >= 2)

    def snapshot(self) -> object:
        """The pool, the other pool and the table."""
        return snapshot_slots(self.pool), snapshot_slots(self.other), snapshot_table(self.table)

    # Steps

    @rule()
    def launch(self) -> None:
        """A step begins on the device."""
        self.steps.record()

    @rule(n=st.integers(1, 2))
    def complete(self, n: int) -> None:
        """The oldest steps end."""
        self.steps.complete(n)

    # Taking

    @rule(target=handles, n=st.integers(0, 3), reserved=st.booleans(), ended=st.integers(0, 2))
    def take(self, n: int, reserved: bool, ended: int) -> Slots:
        """What is free is handed out, after `ended` steps have ended; what is pending is not."""
        self.steps.complete(ended)
        return self._take(n, reserved)

    def _take(self, n: int, reserved: bool) -> Slots:
        if not self.model.takes(n, reserved=reserved):
            helps = self.model.waiting_helps(n, reserved=reserved)
            self.reached("exhausted while pending would suffice" if helps else "exhausted for good")
            with self.refused(PoolExhaustedError) as refusal:
                self.pool.take(n, reserved=reserved)
            error = refusal.error
            if isinstance(error, PoolExhaustedError):
                self.model.check_refusal(error, n, reserved=reserved)
            n = 0
        waiting = bool(self.model.pending)
        slots = self.pool.take(n, reserved=reserved)
        numbers = slots.np.tolist()
        self.model.take(numbers, reserved=reserved)
        agree_on(self.generations[numbers] + 1, slots.generations, "generations of slots just taken")
        self.generations[numbers] += 1
        self.reached("a slot used again after its fence", any(self.owners.get(slot) is not None for slot in numbers))
        self.reached("taken while another slot is pending", waiting and n > 0)
        self.reached("the reserve used", any(slot > self.pool.size for slot in numbers))
        return slots

    @rule(target=handles, one=handles, data=st.data())
    def some(self, one: Slots, data: st.DataObject) -> Slots:
        """Handles are moved like any other value."""
        return one.filter(data.draw(st.permutations(range(len(one))), label="rows")[: max(1, len(one) - 1)])

    # Freeing

    @rule(slots=handles, data=st.data())
    def free(self, slots: Slots, data: st.DataObject) -> None:
        """Live handles are freed, now or behind a step in flight; others are refused, all of them."""
        fence = data.draw(st.sampled_from([None, *self.steps.in_flight]), label="after")
        self._free(slots, fence)

    def _free(self, slots: Slots, fence: ManualFence | None) -> None:
        numbers = slots.np.tolist()
        fresh = [slot in self.model.live for slot in numbers]
        own = slots.generations == self.generations[slots.np]
        if not (all(fresh) and own.all()):
            self.reached("double free refused", not all(fresh))
            self.reached("handle of a slot used again refused", all(fresh))
            with self.refused(*_STALE):
                self.pool.free(slots, after=fence)
            return
        self.pool.free(slots, after=fence)
        self.model.release(numbers, fence)
        self.owners.update(dict.fromkeys(numbers, fence))
        behind = fence is not None and fence is not self.steps.last and bool(numbers)
        self.reached("freed behind step N while N+1 is in flight", behind)

    def _live_handles(self, n: int) -> Slots:
        numbers = np.array(sorted(self.model.live)[:n], dtype=np.int64)
        generations = self.generations[numbers]
        return Slots.from_host(self.rt, numbers, generations=generations, pool=self.pool.identity)

    # Compound: what an engine does in one go

    @rule(target=handles, n=st.integers(1, 3), more=st.integers(0, 1))
    def finish_and_admit(self, n: int, more: int) -> Slots:
        """Requests finish while their step runs, and others ask for slots at once."""
        self._free(self._live_handles(n), self.steps.record())
        return self._take(n + more, False)

    @rule(target=handles, n=st.integers(1, 2))
    def turn_over(self, n: int) -> Slots:
        """Launch, finish behind it, launch again, the first step ends, admit."""
        fence = self.steps.record()
        self.steps.record()
        self._free(self._live_handles(n), fence)
        self.steps.complete_until(fence)
        return self._take(n, False)

    @rule(target=handles, n=st.integers(1, 2))
    def late_exit(self, n: int) -> Slots:
        """Requests are freed, their slots go to others, and then their second exit frees them again."""
        late = self._live_handles(n)
        self._free(late, None)
        slots = self._take(n, True)
        if len(late):
            self._free(late, None)
        return slots

    # Tables

    @rule(slots=handles, data=st.data(), whole=st.booleans())
    def write(self, slots: Slots, data: st.DataObject, whole: bool) -> None:
        """A write through live handles reaches the table; one through others is refused."""
        count = len(slots)
        positions = data.draw(st.lists(st.integers(0, _WIDTH - 1), min_size=count, max_size=count), label="positions")
        places: npt.NDArray[Any] | None = None if whole else np.array(positions, dtype=np.int64)
        size = (count, _WIDTH) if whole else (count,)
        new = np.arange(1, int(np.prod(size)) + 1, dtype=np.int32).reshape(size)
        good = bool(self.pool.is_live(slots.np).all()) and (slots.generations == self.generations[slots.np]).all()
        if not good:
            self.reached("write through a stale handle refused")
            with self.refused(Code.SLOT_STALE_HANDLE):
                self.table.write(slots, places, new)
            return
        self.table.write(slots, places, new)
        if whole:
            self.rows[slots.np] = new
        else:
            self.rows[slots.np, places] = new

    @rule(slots=handles)
    def clear(self, slots: Slots) -> None:
        """Rows of live slots become zero."""
        if self.pool.is_live(slots.np).all() and (slots.generations == self.generations[slots.np]).all():
            self.table.clear(slots)
            self.rows[slots.np] = 0

    # Misuse

    @rule(slots=handles)
    def misuse_handles(self, slots: Slots) -> None:
        """Twice in one call, with padding, beyond the row of a table: refused, and not even one slot is freed."""
        if len(slots):
            with self.refused(*_STALE):
                self.pool.free(slots.take([0, 0]))
            with self.refused(RowIndexError, Code.SLOT_STALE_HANDLE):
                self.table.write(slots, np.full(len(slots), _WIDTH), np.zeros(len(slots), np.int32))
        with self.refused(Code.SLOT_ZERO_ALLOCATED, *_STALE):
            self.pool.free(slots.pad(len(slots) + 1))
        for call in (self.pool.free, lambda slots: self.table.write(slots, [0], [1]), self.table.clear):
            with self.refused(ArgumentError):
                call(self.foreign)

    @rule(misuse=st.sampled_from(MISUSES))
    def misuse(self, misuse: Misuse[SlotPool]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        with self.refused(*misuse.expected):
            misuse.call(self.pool)
