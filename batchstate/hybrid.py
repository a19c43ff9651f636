"""`HybridSlotPool`: slots that also own entries of a second pool, such as Mamba states or ping-pong buffers.

A slot and its states are taken and freed as one: never one without the other, and behind the same fence. The mapping
slot -> states is a table of the SLOTS, one row for each of them, whose values are state indices. State 0 is padding.
"""

from collections.abc import Sequence
from typing import SupportsIndex, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate._allocator import Allocator, size_of
from batchstate._arrays import count
from batchstate.errors import CaptureError
from batchstate.indices import Slots
from batchstate.pools import SlotPool, SlotStats
from batchstate.runtime import Fence, Runtime
from batchstate.tables import Table, TableWrite
from batchstate.violations import Where

__all__ = ["HybridSlotPool"]

Ints = npt.NDArray[np.int64]


@final
class StateOwner:
    """The companion of a slot pool whose every slot owns `per_slot` states.

    Attributes:
        ledger: which states are free, pending or live.
        per_slot: states of each slot.
        mapping: int64[slots.capacity, per_slot], 0 where the slot is nobody's.
    """

    def __init__(self, slots: SlotPool, states: int, per_slot: int, *, label: str) -> None:
        self._slots = slots
        self.per_slot = per_slot
        self.ledger = Allocator(slots.runtime, states, label=label)
        self.mapping = np.zeros((self._mapping_rows(), per_slot), dtype=np.int64)
        invariants.table_capacity(len(self.mapping), slots.capacity, **self._where("mapping"))

    def __repr__(self) -> str:
        return f"StateOwner({self.ledger!r}, {self.per_slot} a slot)"

    def check_take(self, n: int) -> None:
        """Refuses if there are not enough states for `n` slots.

        Raises:
            PoolExhaustedError: with the numbers of the states.
        """
        self.ledger.check_available(n * self.per_slot)

    def taken(self, rows: Ints) -> None:
        """Gives each slot its states."""
        states = self.ledger.take(rows.size * self.per_slot, "take")
        self.mapping[rows] = states.reshape(rows.size, self.per_slot)

    def check_free(self, rows: Ints, operation: str) -> None:
        """States go with their slots: nothing stands against it."""

    def freed(self, rows: Ints, after: Fence | None) -> None:
        """Releases the states of the slots."""
        states = self.mapping[rows].reshape(-1)
        self._clear(rows)
        self._release(states, after)

    def _clear(self, rows: Ints) -> None:
        # A row left behind would name states that belong to another slot by then.
        self.mapping[rows] = 0

    def _release(self, states: Ints, after: Fence | None) -> None:
        self.ledger.release(states, after, "free")

    def _mapping_rows(self) -> int:
        return self._slots.capacity

    def check_conservation(self, live: int, operation: str) -> None:
        """Exactly `per_slot` states are live for each of `live` slots.

        Raises:
            Violation: SLOT_CONSERVATION.
        """
        ledger = self.ledger
        if ledger.live != live * self.per_slot:
            invariants.slot_conservation(
                ledger.free, ledger.pending, live * self.per_slot, ledger.size, **self._where(operation)
            )

    def verify(self) -> None:
        """Every law of the states from scratch: the live ones are those that live slots own, each once.

        Raises:
            Violation: SLOT_SHARED, SLOT_CONSERVATION, and see `Allocator.verify`.
        """
        where = self._where("verify")
        self.ledger.verify()
        live = self._slots.live_slots()
        self.check_conservation(live.size, "verify")
        owned = self.mapping[live].reshape(-1)
        invariants.slot_out_of_range(owned, self.ledger.capacity, **where)
        invariants.slot_zero_allocated(owned, **where)
        invariants.slot_shared(owned, **where)
        invariants.slot_in_flight(owned, ~self.ledger.live_among(owned), **where)
        idle = np.ones(len(self.mapping), dtype=np.bool_)
        idle[live] = False
        left = np.flatnonzero(idle & self.mapping.any(axis=1))
        if left.size:
            entries = int(np.count_nonzero(self.mapping[left]))
            invariants.slot_conservation(
                self.ledger.free,
                self.ledger.pending,
                self.ledger.live + entries,
                self.ledger.size,
                leaked=left,
                **where,
            )

    def _where(self, operation: str) -> Where:
        return {"object": self.ledger.label, "operation": operation, "step": self._slots.runtime.step}


@final
class HybridSlotPool:
    """Slots 1 to size + reserve, each with `states_per_slot` of the states 1 to `states` while it is live.

    Args:
        runtime: the device.
        size: slots that can be taken ordinarily.
        states: entries of the second pool.
        states_per_slot: entries that each slot owns.
        reserve: further slots, for `take(n, reserved=True)` alone.
        name: for reports.

    Attributes:
        slots: the slot pool, for `PagePool` and for tables. Freeing there frees the states too.
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
        self.runtime = runtime
        self.name = name
        per_slot = count(states_per_slot, f"{name}: states_per_slot", least=1)
        num_states = size_of(states, f"{name}: states", least=per_slot)
        self.slots = SlotPool(runtime, size, reserve=reserve, name=name)
        self._states = StateOwner(self.slots, num_states, per_slot, label=f"states of HybridSlotPool {name!r}")
        self.slots.attach(self._states)
        self._unwritten = np.zeros(self.slots.capacity, dtype=np.bool_)  # taken with write=False; entry not seen yet
        self.state_table = self.slots.table(f"{name} states", (per_slot,), torch.int32, holds="state", host=True)

    def __repr__(self) -> str:
        ledger = self._states.ledger
        return (
            f"HybridSlotPool({self.slots!r}, states={ledger.size}, "
            f"free={ledger.free}, pending={ledger.pending}, live={ledger.live})"
        )

    @property
    def capacity(self) -> int:
        """Rows that a table indexed by slots has."""
        return self.slots.capacity

    @property
    def state_capacity(self) -> int:
        """Rows of a tensor that states index: the largest state + 1."""
        return self._states.ledger.capacity

    @property
    def stats(self) -> SlotStats:
        """The slots in numbers; `state_stats` has the states."""
        return self.slots.stats

    @property
    def state_stats(self) -> SlotStats:
        """The states in numbers."""
        self.runtime.check_owner(f"{self.name}: state_stats")
        self._states.ledger.reap()
        return SlotStats.of(self._states.ledger)

    def take(self, n: SupportsIndex, *, reserved: bool = False, write: bool = True) -> Slots:
        """Takes `n` slots with their states, and writes the mapping to the device: one upload, one kernel.

        Args:
            n: how many.
            reserved: see `SlotPool.take`.
            write: False leaves the device alone; let `state_entry(slots)` ride in the step's upload instead.

        Raises:
            PoolExhaustedError: too few slots or states. Nothing was taken.
            CaptureError: writing while the current stream is captured. Nothing was taken.
        """
        if write and self.runtime.capturing:
            raise CaptureError(
                f"{self.name}: take writes to the device, which a captured stream does not allow",
                remedy="take with write=False, and let `state_entry` ride in an upload after the capture",
            )
        slots = self.slots.take(n, reserved=reserved)
        self._unwritten[slots.np] = not write
        if write:
            try:
                self._write_states(slots)
            except BaseException:
                self.slots.release_rows(slots.np, None, "take")
                raise
        return slots

    def free(self, slots: Slots, *, after: Fence | None = None) -> None:
        """Frees slots and their states, at once or when `after` is complete. Raises what `SlotPool.free` raises."""
        self.slots.free(slots, after=after)

    def reap(self) -> int:
        """Makes free the pending slots and states whose fences are complete; says how many slots."""
        self.runtime.check_owner(f"{self.name}: reap")
        self._states.ledger.reap()
        return self.slots.reap()

    def states_of(self, slots: Slots) -> Ints:
        """The states of live slots, int64[n, states_per_slot]."""
        return self._states.mapping[self.slots.rows_of(slots, "states_of")]

    def state_entry(self, slots: Slots) -> TableWrite:
        """The write of the slots' rows of `state_table`; rides in a batch's upload."""
        return self.state_table.entry(slots, None, self.states_of(slots))

    def _write_states(self, slots: Slots) -> None:
        self.state_table.write(slots, None, self.states_of(slots))

    def table(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.int32,
        *,
        holds: str | None = None,
        host: bool = False,
    ) -> Table:
        """A table indexed by slots; see `SlotPool.table`."""
        return self.slots.table(name, shape, dtype, holds=holds, host=host)

    def adopt(self, tensor: torch.Tensor, name: str, *, holds: str | None = None) -> Table:
        """An engine's own tensor as a table indexed by slots; see `SlotPool.adopt`."""
        return self.slots.adopt(tensor, name, holds=holds)

    def check_handles(self, slots: Slots, operation: str) -> None:
        """See `SlotPool.check_handles`."""
        self.slots.check_handles(slots, operation)

    def verify(self) -> None:
        """Every law of slots and states from scratch. Reads device memory; stands aside under capture.

        Raises:
            Violation: MIRROR_EQUAL: the device maps a slot to other states than it owns; see `SlotPool.verify` and
                `StateOwner.verify`.
        """
        self.slots.verify()
        written = self.state_table.host
        if written is None:
            return
        live = self.slots.live_slots()
        owned, mapped = self._states.mapping[live].astype(written.dtype), written[live]
        # A row that waits for a step's upload is believed until it has crossed once.
        waits = self._unwritten[live] & (owned != mapped).any(axis=1)
        self._unwritten[live] = waits
        invariants.mirror_equal(
            owned[~waits], mapped[~waits], object=repr(self), operation="verify", step=self.runtime.step
        )

    def expect_idle(self) -> None:
        """No slot and no state is live.

        Raises:
            Violation: SLOT_CONSERVATION, naming up to 8 leaked slots or states.
        """
        self.slots.expect_idle()
        self._states.ledger.expect_idle("expect_idle")
