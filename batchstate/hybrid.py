"""`HybridSlotPool`: slots that also own entries of further pools, such as Mamba states or ping-pong buffers.

A slot and its states are taken and freed as one: never one without the other, and behind the same fence. States are of
one kind or of several, each with a pool and a count of its own; a request may have none of a kind. The mapping slot ->
states is a table indexed by SLOTS for each kind, one row per slot, whose values are state indices. State 0 is padding.
"""

from collections.abc import Callable, Mapping
from typing import SupportsIndex, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._allocator import Allocator, size_of
from batchstate._arrays import Ints, amounts, check_rows, count
from batchstate._core import SlotStates
from batchstate.errors import ArgumentError
from batchstate.mirror import Contract, Slots, StateRow, state_type
from batchstate.nvtx import ranges
from batchstate.pools import SlotListener, SlotPool, SlotStats
from batchstate.runtime.base import Fence, Runtime
from batchstate.tables import Table, TableWrite

__all__ = ["HybridSlotPool", "StateTurns"]

_ONLY = "state"
"""Name of the only kind, where none was given."""


@final
class StateOwner(SlotListener):
    """The states of one kind. A slot owns `per_slot` of them, or as many as were asked for when it was taken.

    `wanted` int64[n] are those of the slots that the present take takes; None for `per_slot` each.
    """

    def __init__(self, slots: SlotPool, kind: str, states: int, per_slot: int) -> None:
        self._slots = slots
        self.kind = kind
        self.title = "states" if kind == _ONLY else f"{kind} states"
        self.per_slot = per_slot
        self.wanted: Ints | None = None
        label = f"{self.title} of HybridSlotPool {slots.name!r}"
        self.allocator = Allocator(slots.runtime, states, label=label, transaction=slots.transaction)
        self.states = SlotStates(slots.capacity, per_slot)
        arrays: dict[str, Ints] = self.states.arrays
        self.counts, self.mapping, self.turns = arrays["count"], arrays["table"], arrays["turns"]
        self.newest = arrays["newest"]
        invariants.table_capacity(len(self.mapping), slots.capacity, **self.allocator.where("mapping"))
        slots.add_listener(self)
        slots.runtime.declare_indices(kind, self.allocator.capacity)
        self.table = slots.table(f"{slots.name} {self.title}", (per_slot,), torch.int32, holds=kind, host=True)

    def after(self, rows: Ints, turns: int) -> Ints:
        """The state that slots int64[n] have so many turns from now, int64[n]; 0 where a slot has none."""
        numbers: Ints = self.mapping[rows, (self.turns[rows] + turns) % np.maximum(self.counts[rows], 1)]
        return numbers

    def check_take(self, n: int) -> None:
        """PoolExhaustedError where there are too few states for `n` slots."""
        self.allocator.check_available(self._needed(n))

    def on_take(self, rows: Ints) -> None:
        self.allocator.take(self._needed(rows.size), "take")
        self.states.give(rows, self.wanted, self.allocator.core)

    def _needed(self, n: int) -> int:
        """States of `n` slots that are to be taken."""
        return n * self.per_slot if self.wanted is None else int(self.wanted.sum())

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        self.allocator.release(self.states.leave(rows), after, "free")

    def on_clear(self) -> None:
        self.allocator.core.sort()

    def check_conservation(self, live: int, operation: str) -> None:
        """Checks that as many states are live as slots own: SLOT_CONSERVATION."""
        if self.allocator.live != self.states.owned:
            self.allocator.check_live(self.states.owned, operation)

    def verify(self) -> None:
        """Checks the states from scratch: the live ones are those that live slots own, each once."""
        states, where = self.allocator, self.allocator.where("verify")
        states.verify()
        live = np.zeros(len(self.mapping), dtype=np.bool_)
        live[self._slots.live_slots()] = True
        self.check_conservation(int(np.count_nonzero(live)), "verify")
        has = live[:, None] & (np.arange(self.per_slot) < self.counts[:, None])
        owned = self.mapping[has]
        invariants.slot_out_of_range(owned, states.capacity, **where)
        invariants.slot_zero_allocated(owned, **where)
        invariants.slot_shared(owned, **where)
        invariants.slot_in_flight(owned, ~states.live_among(owned), **where)
        strays = (self.mapping != 0) & ~has
        left = np.flatnonzero(strays.any(axis=1))
        if left.size:
            states.check_live(states.live + int(np.count_nonzero(strays)), "verify", leaked=left)


@final
@attrs.frozen(eq=False, repr=False)
class StateTurns:
    """The states that a forward reads and writes, of requests that take turns. Made by `state_turns`.

    Attributes:
        reads: int64[n], the state that each has written last; at first the first of its states. 0 for padding.
        writes: int64[n], the next one.
    """

    slots: Slots
    reads: Ints
    writes: Ints
    kind: str
    _turns: Ints
    _pool: "HybridSlotPool"

    def __repr__(self) -> str:
        return f"StateTurns({len(self.slots)} requests)"

    @property
    def extras(self) -> dict[str, Ints]:
        """`state_reads` and `state_writes`, for `batch.upload(extras=...)`; another kind has its name in front.

        Raises as `launched`.
        """
        self._pool.check_turns(self, "extras")
        return {f"{self.kind}_reads": self.reads, f"{self.kind}_writes": self.writes}

    def launched(self) -> None:
        """Declares that the forward which writes `writes` was launched: the next one reads them.

        Raises:
            Violation: STATE_TURN: a request has had another turn since; SLOT_STALE_HANDLE: it has left.
        """
        rows, states = self._pool.check_turns(self, "launched")
        rows, transaction = rows[: np.count_nonzero(rows)], self._pool.transaction
        transaction.operation = "launched"
        states.turns[rows] += 1
        states.newest[rows] = self.writes[: rows.size]
        transaction.operation = None


@ranges("take")
@final
class HybridSlotPool(SlotPool):
    """Slots 1 to size + reserve, each with up to `states_per_slot` of the states 1 to `states` while it is live.

    `states` and `states_per_slot` are numbers, or map names of kinds to numbers, the second 1 for kinds it leaves out.
    The rest is as for `SlotPool`. Methods about states take the name of the kind; without it they are about the only
    one. Its index space is called as the kind is, `state` if it was given no name.

    Raises:
        ArgumentError, DtypeError: numbers as for `SlotPool`; fewer states than one slot has; no kinds, a name that is
            no identifier or that of another index space, or a count of a kind that is not there.
    """

    def __init__(
        self,
        runtime: Runtime,
        size: SupportsIndex,
        *,
        states: SupportsIndex | Mapping[str, SupportsIndex],
        states_per_slot: SupportsIndex | Mapping[str, SupportsIndex] = 1,
        reserve: SupportsIndex = 0,
        name: str = "slots",
    ) -> None:
        kinds = _kinds(states, states_per_slot, name)
        super().__init__(runtime, size, reserve=reserve, name=name)
        self._owners = {kind: StateOwner(self, kind, *numbers) for kind, numbers in kinds.items()}

    def __repr__(self) -> str:
        parts = [super().__repr__()]
        for owner in self._owners.values():
            states = owner.allocator
            counts = f"free={states.free}, pending={states.pending}, live={states.live}"
            parts.append(f"{owner.title}={states.size}, {counts}")
        return f"HybridSlotPool({', '.join(parts)})"

    def _owner(self, kind: str | None) -> StateOwner:
        if kind is None and len(self._owners) == 1:
            return next(iter(self._owners.values()))
        if kind not in self._owners:
            remedy = f"name one of: {', '.join(self._owners)}"
            raise ArgumentError(f"{self.name}: no states of kind {kind!r}", kind, remedy)
        return self._owners[kind]

    def state_table(self, kind: str | None = None) -> Table:
        """int32[capacity, states_per_slot] on the device, slot -> states, 0 where a slot has none; holds the kind."""
        return self._owner(kind).table

    def state_capacity(self, kind: str | None = None) -> int:
        """Rows of a tensor that states index: the largest state + 1."""
        return self._owner(kind).allocator.capacity

    def register_states(self, *buffers: torch.Tensor, kind: str | None = None) -> None:
        """Says which memory of the engine states index, for the race detector: it then knows whose the rows are.

        Raises:
            ShapeError, DeviceError: buffers are [state_capacity, ...], on the device.
        """
        states = self._owner(kind).allocator
        check_rows(buffers, (states.capacity,), self.runtime.device, f"{self.name}: register_states")
        for buffer in buffers:
            self.runtime.own_rows(buffer, states.owners_of)

    def state_stats(self, kind: str | None = None) -> SlotStats:
        """The states in numbers; `stats` has the slots."""
        self.transaction.enter(f"{self.name}: state_stats")
        self.transaction.reap()
        return SlotStats.of(self._owner(kind).allocator)

    def take(
        self,
        n: SupportsIndex,
        *,
        reserved: bool = False,
        write: bool = True,
        states: Mapping[str, object] | None = None,
    ) -> Slots:
        """Takes `n` slots with their states, and writes the mapping to the device: one upload, one kernel a kind.

        `write=False` leaves the device alone: pack `state_entry(slots)` with the upload of the step instead. `states`
        maps kinds to states for each of the slots, one number or int[n] from 0 to `states_per_slot`, the default.
        `reserved` is as for `SlotPool.take`.

        Raises:
            PoolExhaustedError: too few slots or states. Nothing was taken, nor by the others.
            CaptureError: writing while the current stream is captured.
            ArgumentError, DtypeError, ShapeError: no such kind, or not one count for each slot.
        """
        self.transaction.enter(self._take)
        number = count(n, f"{self._take}: n")
        wanted = self._wanted(number, states or {})
        self.query_fences()
        return self._with_states(number, reserved, None, wanted, write)

    def check_take(self, n: int) -> None:
        """See `SlotPool.check_take`: a step sends no states."""
        problem = f"{self.name}: a step that takes {n} slots, which have states"
        raise ArgumentError(problem, n, "take them with `take`, and join with them: name the column of slots too")

    def take_with(self, n: int, give: Callable[[Ints], None]) -> Slots:
        """See `SlotPool.take_with`; each slot gets `states_per_slot`."""
        return self._with_states(n, False, give, {}, True)

    def _with_states(
        self, n: int, reserved: bool, give: Callable[[Ints], None] | None, wanted: Mapping[str, Ints], write: bool
    ) -> Slots:
        """Slots with states, as many as `wanted` of each kind, once fences were queried."""
        if write:
            self.runtime.refuse_capture(f"{self.name}: take without write=False")
        for kind, owner in self._owners.items():
            owner.wanted = wanted.get(kind)
        slots = self._taken(n, reserved, give)
        try:
            for kind, owner in self._owners.items() if write else ():
                owner.table.write(slots, None, self.states_of(slots, kind))
        except BaseException:
            self.give_back(slots, "take")
            raise
        return slots

    def _wanted(self, n: int, states: Mapping[str, object]) -> dict[str, Ints]:
        """The states of each slot by kind, int64[n], checked."""
        wanted = {}
        for kind, counts in states.items():
            most, label = self._owner(kind).per_slot, f"{self._take}: {kind}"
            each = np.ascontiguousarray(np.broadcast_to(amounts(counts, n, label), (n,)))
            for wrong in each[(each < 0) | (each > most)][:1].tolist():
                problem = f"{self.name}: take of {wrong} {kind} states for a slot"
                raise ArgumentError(problem, wrong, f"pass 0 to {most} for each slot (states_per_slot)")
            wanted[kind] = each
        return wanted

    def states_of(self, slots: Slots, kind: str | None = None) -> Ints:
        """The states of live slots, int64[n, states_per_slot], 0 where a slot has fewer."""
        return self._owner(kind).mapping[self.rows_of(slots, "states_of")]

    def state_rows(self, slots: Slots, kind: str | None = None) -> StateRow:
        """The state that each request has written last, `host_only` int64[n]; 0 where it has none.

        They ask their owner where they are used: as extras of a step, in a table that holds the kind, in `Sender.send`.
        Once the request has left they are refused (SLOT_STALE_HANDLE).
        """
        states = self._owner(kind)
        numbers = states.after(self.rows_of(slots, "state_rows"), 0)
        allocator = states.allocator
        return state_type(states.kind).of_pool(
            self.runtime,
            numbers,
            allocator.of(numbers),
            pool_id=allocator.pool_id,
            contract=Contract.HOST_ONLY,
            name=states.title,
        )

    def state_entry(self, slots: Slots, kind: str | None = None) -> TableWrite:
        """The write of the slots' rows of `state_table`, to be packed with a batch's upload."""
        return self.state_table(kind).entry(slots, None, self.states_of(slots, kind))

    def state_turns(self, slots: Slots, kind: str | None = None) -> StateTurns:
        """The state that each request reads, and the one it writes, where states are written alternately (ping-pong).

        Each request passes from one of its states to the next in the forwards that it takes part in, whatever the
        others do and however many steps it sits out. It begins by reading the first, which is written when it joins.
        `slots` are those of the forward, padded rows at the end; declare it with `launched`.

        Raises:
            Violation: handles as for `rows_of`; STATE_TURN, at `cheap`.
        """
        rows = self.rows_of(slots, "state_turns", padded=True)
        states = self._owner(kind)
        reads, writes, turns = states.after(rows, 0), states.after(rows, 1), states.turns[rows]
        self._check_turns(rows, states.newest, reads, "state", "state_turns")
        return StateTurns(slots, reads, writes, states.kind, turns, self)

    def check_turns(self, turns: StateTurns, operation: str) -> tuple[Ints, StateOwner]:
        """The rows of turns that are still the next of their requests, and the states. For the library."""
        rows, states = self.rows_of(turns.slots, operation, padded=True), self._owner(turns.kind)
        self._check_turns(rows, states.turns, turns._turns, "turn", operation)
        return rows, states

    def _check_turns(self, rows: Ints, now: Ints, planned: Ints, unit: str, operation: str) -> None:
        if levels.cheap:
            step = self.runtime.step
            invariants.state_turn(rows, now[rows], planned, unit, object=self, operation=operation, step=step)

    def verify(self) -> None:
        """See `SlotPool.verify`; MIRROR_EQUAL also if the device maps a slot to other states than it owns."""
        super().verify()
        everyone = self._allocator.handles(self.live_slots())
        for owner in self._owners.values():
            live = everyone.filter(owner.table.written(everyone))  # others wait for the upload of a step
            owned, mapped = owner.mapping[live.np].astype(np.int32), owner.table.host_for(live)
            invariants.mirror_equal(owned, mapped, object=repr(self), operation="verify", step=self.runtime.step)

    def expect_idle(self) -> None:
        """Checks that no slot and no state is live. Else SLOT_CONSERVATION, naming up to 8 that are."""
        super().expect_idle()
        for owner in self._owners.values():
            owner.allocator.expect_idle("expect_idle")


def _kinds(
    states: SupportsIndex | Mapping[str, SupportsIndex],
    per_slot: SupportsIndex | Mapping[str, SupportsIndex],
    name: str,
) -> dict[str, tuple[int, int]]:
    """Kind -> states, and states per slot."""
    sizes = states if isinstance(states, Mapping) else {_ONLY: states}
    counts = per_slot if isinstance(per_slot, Mapping) else dict.fromkeys(sizes, per_slot)
    taken = ("slot", "page", "location", "host_location")
    wrong = [kind for kind in sizes if not kind.isidentifier() or kind in taken]
    wrong = [kind for kind in counts if kind not in sizes] or wrong
    if not sizes or wrong:
        problem = f"{name}: expected kinds of states and a count for each, got states {[*sizes]} and counts {[*counts]}"
        remedy = f"name each kind by an identifier other than {', '.join(taken)}, and count these kinds only"
        raise ArgumentError(problem, wrong or [*sizes], remedy)
    kinds = {}
    for kind, size in sizes.items():
        label = name if kind == _ONLY else f"{name}: {kind}"
        each = count(counts.get(kind, 1), f"{label}: states_per_slot", least=1)
        kinds[kind] = size_of(size, f"{label}: states", least=each), each
    return kinds
