"""`HybridSlotPool`: slots that also own entries of a second pool, such as Mamba states or ping-pong buffers.

A slot and its states are taken and freed as one: never one without the other, and behind the same fence. The mapping
slot -> states is a table indexed by SLOTS, one row for each, whose values are state indices. State 0 is padding.
"""

from typing import SupportsIndex, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._allocator import Allocator, size_of
from batchstate._arrays import count
from batchstate.errors import CaptureError
from batchstate.indices import Slots
from batchstate.pools import Ints, SlotListener, SlotPool, SlotStats
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite
from batchstate.violations import Where

__all__ = ["HybridSlotPool", "StateTurns"]


@final
class StateOwner(SlotListener):
    """The states of a slot pool whose every slot owns `per_slot` of them.

    Attributes:
        allocator: which states are free, pending or live.
        per_slot: states per slot.
        mapping: int64[slots.capacity, per_slot], slot -> states, 0 for slots that are not live.
        turns: int64[slots.capacity], how often the request has passed from one of its states to the next.
        newest: int64[slots.capacity], the state that the request has written last; at first its first one.
    """

    def __init__(self, slots: SlotPool, states: int, per_slot: int, *, label: str) -> None:
        self._slots = slots
        self.per_slot = per_slot
        self.allocator = Allocator(slots.runtime, states, label=label, transaction=slots.transaction)
        self.mapping = np.zeros((slots.capacity, per_slot), dtype=np.int64)
        self.turns = np.zeros(slots.capacity, dtype=np.int64)
        self.newest = np.zeros(slots.capacity, dtype=np.int64)
        invariants.table_capacity(len(self.mapping), slots.capacity, **self._where("mapping"))

    def before_take(self) -> None:
        """Makes free the states whose fences are complete."""
        self.allocator.reap()

    def check_take(self, n: int) -> None:
        """Refuses if there are not enough states for `n` slots.

        Raises:
            PoolExhaustedError: with the numbers of the states.
        """
        self.allocator.check_available(n * self.per_slot)

    def on_take(self, rows: Ints) -> None:
        """Gives each slot its states."""
        states = self.allocator.take(rows.size * self.per_slot, "take")
        self.mapping[rows] = states.reshape(rows.size, self.per_slot)
        self.turns[rows] = 0
        self.newest[rows] = self.mapping[rows, 0]

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        """Releases the states of the slots."""
        states = self.mapping[rows].reshape(-1)
        self.mapping[rows] = 0  # a row left behind would name states that belong to another slot by then
        self.allocator.release(states, after, "free")

    def check_clear(self, operation: str) -> None:
        """Refuses if states are pending."""
        self.allocator.check_none_pending(operation)

    def on_clear(self) -> None:
        """The states come in order again."""
        self.allocator.sort_free()

    def check_conservation(self, live: int, operation: str) -> None:
        """Checks that exactly `per_slot` states are live for each of `live` slots.

        Raises:
            Violation: SLOT_CONSERVATION.
        """
        allocator = self.allocator
        if allocator.live != live * self.per_slot:
            invariants.slot_conservation(
                allocator.free, allocator.pending, live * self.per_slot, allocator.size, **self._where(operation)
            )

    def verify(self) -> None:
        """Checks the states from scratch: the live ones are those that live slots own, each once.

        Raises:
            Violation: SLOT_SHARED, SLOT_CONSERVATION, and see `Allocator.verify`.
        """
        where = self._where("verify")
        self.allocator.verify()
        live = self._slots.live_slots()
        self.check_conservation(live.size, "verify")
        owned = self.mapping[live].reshape(-1)
        invariants.slot_out_of_range(owned, self.allocator.capacity, **where)
        invariants.slot_zero_allocated(owned, **where)
        invariants.slot_shared(owned, **where)
        invariants.slot_in_flight(owned, ~self.allocator.live_among(owned), **where)
        idle = np.ones(len(self.mapping), dtype=np.bool_)
        idle[live] = False
        left = np.flatnonzero(idle & self.mapping.any(axis=1))
        if left.size:
            entries = int(np.count_nonzero(self.mapping[left]))
            invariants.slot_conservation(
                self.allocator.free,
                self.allocator.pending,
                self.allocator.live + entries,
                self.allocator.size,
                leaked=left,
                **where,
            )

    def _where(self, operation: str) -> Where:
        return {"object": self.allocator.label, "operation": operation, "step": self._slots.runtime.step}


@final
@attrs.frozen(eq=False, repr=False)
class StateTurns:
    """The states of requests that take turns: which a forward reads, and which it writes. Made by `state_turns`.

    Attributes:
        slots: the requests that take part in the forward, padded rows at the end.
        reads: int64[n], the state that each has written last; at first the first of its states. 0 for padding.
        writes: int64[n], the next one.
    """

    slots: Slots
    reads: Ints
    writes: Ints
    _pool: "HybridSlotPool"

    def __repr__(self) -> str:
        return f"StateTurns({len(self.slots)} requests)"

    @property
    def extras(self) -> dict[str, Ints]:
        """`state_reads` and `state_writes`, for `batch.upload(extras=...)`."""
        return {"state_reads": self.reads, "state_writes": self.writes}

    def launched(self) -> None:
        """Declares that the forward which writes `writes` was launched: the next one reads them.

        Raises:
            Violation: STATE_TURN: a request has had another turn since; SLOT_STALE_HANDLE: it has left.
        """
        self._pool.pass_turns(self)


@final
class HybridSlotPool(SlotPool):
    """Slots 1 to size + reserve, each with `states_per_slot` of the states 1 to `states` while it is live.

    Args:
        runtime: the device.
        size: slots that can be taken ordinarily.
        states: entries of the second pool.
        states_per_slot: entries that each slot owns.
        reserve: further slots, for `take(n, reserved=True)` alone.
        name: for reports.

    Attributes:
        state_table: int32[capacity, states_per_slot] on the device, slot -> states, holds `state`.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: SupportsIndex,
        *,
        states: SupportsIndex,
        states_per_slot: SupportsIndex = 1,
        reserve: SupportsIndex = 0,
        name: str = "slots",
    ) -> None:
        per_slot = count(states_per_slot, f"{name}: states_per_slot", least=1)
        num_states = size_of(states, f"{name}: states", least=per_slot)
        super().__init__(runtime, size, reserve=reserve, name=name)
        self._states = StateOwner(self, num_states, per_slot, label=f"states of HybridSlotPool {name!r}")
        self.add_listener(self._states)
        runtime.declare_indices("state", self.state_capacity)
        self.state_table = self.table(f"{name} states", (per_slot,), torch.int32, holds="state", host=True)

    def __repr__(self) -> str:
        states = self._states.allocator
        return (
            f"HybridSlotPool({super().__repr__()}, states={states.size}, "
            f"free={states.free}, pending={states.pending}, live={states.live})"
        )

    @property
    def state_capacity(self) -> int:
        """Rows of a tensor that states index: the largest state + 1."""
        return self._states.allocator.capacity

    @property
    def state_stats(self) -> SlotStats:
        """The states in numbers; `stats` has the slots."""
        self.transaction.enter(f"{self.name}: state_stats")
        self._states.allocator.reap()
        return SlotStats.of(self._states.allocator)

    def take(self, n: SupportsIndex, *, reserved: bool = False, write: bool = True) -> Slots:
        """Takes `n` slots with their states, and writes the mapping to the device: one upload, one kernel.

        Args:
            n: how many.
            reserved: see `SlotPool.take`.
            write: False leaves the device alone; pack `state_entry(slots)` with the upload of the step instead.

        Raises:
            PoolExhaustedError: too few slots or states. Nothing was taken.
            CaptureError: writing while the current stream is captured. Nothing was taken.
        """
        if write and self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: take writes to the device, which a captured stream does not allow",
                remedy="take with write=False, and pack `state_entry` with an upload after the capture",
            )
        slots = super().take(n, reserved=reserved)
        if not write:
            return slots
        try:
            self.state_table.write(slots, None, self.states_of(slots))
            return slots
        except BaseException:
            if self.transaction.operation is None:  # else the table was interrupted
                self.release_rows(slots.np, None, "take")
            raise

    def reap(self) -> int:
        """Makes free the pending slots and states whose fences are complete; says how many slots."""
        self.transaction.enter(f"{self.name}: reap")
        self._states.allocator.reap()
        return super().reap()

    def states_of(self, slots: Slots) -> Ints:
        """The states of live slots, int64[n, states_per_slot]."""
        return self._states.mapping[self.rows_of(slots, "states_of")]

    def state_entry(self, slots: Slots) -> TableWrite:
        """The write of the slots' rows of `state_table`, to be packed with a batch's upload."""
        return self.state_table.entry(slots, None, self.states_of(slots))

    def state_turns(self, slots: Slots) -> StateTurns:
        """Which state each request reads and which it writes, where states are written alternately (ping-pong).

        Each request passes from one of its states to the next in the forwards that it takes part in, whatever the
        others do and however many steps it sits out. It begins by reading the first, which is written when it joins.

        Args:
            slots: the requests that take part in the forward, padded rows at the end. Declare it with `launched`.

        Raises:
            Violation: handles as for `rows_of`; STATE_TURN, at `cheap`.
        """
        rows = self.rows_of(slots, "state_turns", padded=True)
        states, turns = self._states, self._states.turns[rows]
        reads = states.mapping[rows, turns % states.per_slot]
        writes = states.mapping[rows, (turns + 1) % states.per_slot]
        self._check_turns(rows, reads, "state_turns")
        return StateTurns(slots, reads, writes, self)

    def pass_turns(self, turns: StateTurns) -> None:
        """What `StateTurns.launched` does."""
        operation = "launched"
        self.transaction.enter(f"{self.name}: {operation}")
        rows = self.rows_of(turns.slots, operation, padded=True)
        self._check_turns(rows, turns.reads, operation)
        rows = rows[: np.count_nonzero(rows)]
        self._states.turns[rows] += 1
        self._states.newest[rows] = turns.writes[: rows.size]

    def _check_turns(self, rows: Ints, reads: Ints, operation: str) -> None:
        if levels.cheap:
            newest = self._states.newest[rows]
            invariants.state_turn(rows, newest, reads, object=self, operation=operation, step=self.runtime.step)

    def verify(self) -> None:
        """Checks every invariant of slots and states from scratch. Reads device memory; suspended under capture.

        Raises:
            Violation: MIRROR_EQUAL: the device maps a slot to other states than it owns; see `SlotPool.verify`. Any
                code of the states.
        """
        super().verify()
        live = self._generations.handles(self.live_slots())
        live = live.filter(self.state_table.written(live))  # others wait for the upload of a step
        owned = self._states.mapping[live.np].astype(np.int32)
        mapped = self.state_table.host_for(live)
        invariants.mirror_equal(owned, mapped, object=repr(self), operation="verify", step=self.runtime.step)

    def expect_idle(self) -> None:
        """Checks that no slot and no state is live.

        Raises:
            Violation: SLOT_CONSERVATION, naming up to 8 leaked slots or states.
        """
        super().expect_idle()
        self._states.allocator.expect_idle("expect_idle")
