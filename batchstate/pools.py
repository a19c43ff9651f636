"""`SlotPool`: which request owns which row of every slot-indexed table.

`take` returns handles, each a number and a generation, and `free` takes handles back, so that a handle may outlive its
slot without harm. A slot freed behind a fence can be taken again only after the fence, since a launched forward still
uses it. Bookkeeping is numpy on the host, on the owning thread; no operation here waits for the device.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Self, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import _core, _interpreted, invariants, levels
from batchstate._allocator import DOUBLE_FREE, LIVE, Allocator, SlotListener, Transaction, check_of_pool, size_of
from batchstate._arrays import Ints, as_array, count
from batchstate._core import Requests
from batchstate._launches import Launches
from batchstate.errors import DtypeError
from batchstate.invariants import times_checked
from batchstate.mirror import Slots
from batchstate.nvtx import ranges
from batchstate.runtime.base import Fence, OfThisProcess, Owners, Runtime, check_fence
from batchstate.tables import RowZero, Table

__all__ = ["PendingSlots", "SlotListener", "SlotPool", "SlotStats"]

_NO_ROWS: Ints = np.empty(0, dtype=np.int64)
Check = Callable[[Ints, str], None]


@final
@attrs.frozen
class SlotStats:
    """A pool in numbers: free + pending + live + retired = size + reserve.

    Attributes:
        size: slots that can be taken ordinarily.
        reserve: further slots, for `take(reserved=True)` alone.
        free: slots without an owner, `free_reserved` included.
        free_reserved: those among the free that only a reserved take hands out.
        pending: freed behind a fence that is not complete. They become free by themselves, so waiting helps.
        live: slots that have an owner.
        taken_total, freed_total: since the pool was created. A take that was refused counts in none of these.
        peak_live: the most that were ever live at once.
        takes: calls that took some. As many as `taken_total` says that each slot is taken by a call of its own.
        retired: slots that were taken 2^31 - 1 times, as often as a generation can say: they are never taken again.
    """

    size: int
    reserve: int
    free: int
    free_reserved: int
    pending: int
    live: int
    taken_total: int
    freed_total: int
    peak_live: int
    takes: int
    retired: int = 0

    @classmethod
    def of(cls, allocator: Allocator) -> Self:
        """The numbers of an allocator now."""
        return cls(*_NUMBERS(allocator))


_NUMBERS = attrgetter(*(field.name for field in attrs.fields(SlotStats)))


@final
@attrs.frozen(eq=False)
class PendingSlots:
    """Slots that wait for one fence.

    Attributes:
        slots: their numbers, int64[n].
        fence: as it was passed to `free`.
        step: of the runtime, when the first of them were freed.
    """

    slots: Ints
    fence: Fence
    step: int


@ranges("take", "free", "release_requests")
class SlotPool(OfThisProcess):
    """Slots 1 to size + reserve. Slot 0 is padding and is never taken.

    Args:
        runtime: the device of the pool's tables.
        size: slots that can be taken ordinarily.
        reserve: further slots that only `take(n, reserved=True)` returns: for requests whose KV is still arriving.
        name: for reports.

    Attributes:
        capacity: rows that a table indexed by slots has in memory: size + reserve + 1.
        pool_id: id of the pool, which its handles carry.

    Raises:
        ArgumentError, DtypeError: `size` is not a positive integer, or `reserve` not a count; their sum does not fit
            into int32.
    """

    def __init__(
        self, runtime: Runtime, size: SupportsIndex, *, reserve: SupportsIndex = 0, name: str = "slots"
    ) -> None:
        ordinary = size_of(size, f"{name}: size", least=1)
        reserved = size_of(reserve, f"{name}: reserve")
        size_of(ordinary + reserved, f"{name}: size + reserve")
        if not _core.compiled:
            _interpreted.tell()
        self.runtime = runtime
        self.name = name
        label = f"SlotPool {name!r}"
        self.transaction = Transaction(runtime, label)  # of all that its slots own; for the library
        self._allocator = Allocator(
            runtime, ordinary, reserve=reserved, label=label, transaction=self.transaction, name=name
        )
        self._core = self._allocator.core
        self.owners_of: Owners = self._allocator.owners_of
        self.transaction.launches = Launches(runtime, self._core.arrays["forward"])
        self.size, self.reserve, self.capacity = ordinary, reserved, self._allocator.capacity
        self.pool_id = self._allocator.pool_id
        self._take, self._free, self._release = (f"{name}: {call}" for call in ("take", "free", "release_requests"))
        runtime.declare_indices("slot", self.capacity)
        self._tables: list[Table] = []
        self._set_listeners([])

    def __repr__(self) -> str:
        allocator = self._allocator
        return (
            f"SlotPool({self.name!r}, size={self.size}, reserve={self.reserve}, "
            f"free={allocator.free}, pending={allocator.pending}, live={allocator.live}"
            f"{f', retired={allocator.retired}' if allocator.retired else ''})"
        )

    @property
    def stats(self) -> SlotStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        return SlotStats.of(self._allocator)

    # Taking and freeing

    def take(self, n: SupportsIndex, *, reserved: bool = False) -> Slots:
        """Takes `n` slots and raises the generation of each. Costs O(n), whatever the size of the pool.

        With `reserved` it uses the reserve first, then ordinary slots; without it the reserve is left alone.

        Returns:
            handles int64[n].

        Raises:
            PoolExhaustedError: fewer are free, here or of states and pages that the slots own. Nothing was taken.
            PoolBrokenError: an earlier operation was interrupted.
            Violation: SLOT_ZERO_DIRTY, MIRROR_EQUAL, at `full`: a table is damaged. Nothing was taken.
        """
        self.transaction.enter(self._take)
        wanted = n if type(n) is int and n >= 0 else count(n, f"{self._take}: n")
        if self.transaction.groups or self.before_take:
            self.query_fences()
        return self._taken(wanted, reserved, None)

    def query_fences(self) -> None:
        """Queries fences, before a take is checked: it may run code of the engine. For the library."""
        self.transaction.reap()
        for query in self.before_take:
            query()

    def take_with(self, n: int, give: Callable[[Ints], None]) -> Slots:
        """`take` after `query_fences`, with `give(rows)` as the last `on_take` of slots int64[n]. For the library."""
        return self._taken(n, False, give)

    def give_back(self, slots: Slots, operation: str) -> None:
        """Releases slots of a take that no caller has seen, with all they own. For the library.

        A pool that is marked stays as it is: its change was interrupted.
        """
        if self.transaction.operation is None and self._core.first_not_held(slots.requests) < 0:
            self.transaction.undoing = True
            try:
                self.release_rows(slots._host_side(), slots.requests, None, operation)
            finally:
                self.transaction.undoing = False

    def _taken(self, wanted: int, reserved: bool, give: Callable[[Ints], None] | None) -> Slots:
        allocator = self._allocator
        if self._taking:  # else `allocator.take` asks
            allocator.check_available(wanted, reserved=reserved)
            for listener in self._taking:
                listener.check_take(wanted)
        if levels.full:
            self._verify_tables("take")
        slots = Slots.of_core(self.runtime, allocator.take(wanted, "take", reserved=reserved), self.name)
        if self._listeners or give is not None or levels.full:
            self._give(slots, give)
        self.transaction.operation = None
        return slots

    def _give(self, slots: Slots, give: Callable[[Ints], None] | None) -> None:
        """Gives slots that were just taken what they own besides, or frees them again."""
        rows = slots._host_side()
        try:
            for listener in self._taking:
                listener.on_take(rows)
            if give is not None:
                give(rows)
            self.transaction.operation = None  # a listener may ask the pool
            if self._counting or levels.full:
                self._check_after("take")
        except Exception:
            self.transaction.operation = None
            self.give_back(slots, "take")
            raise

    def check_take(self, n: int) -> None:
        """Refuses a take of `n` slots by a step, if what they need besides is not there. For the library."""
        for listener in self._taking:
            listener.check_take(n)
        if levels.full:
            self._verify_tables("take")

    def note_taken(self, rows: Ints) -> None:
        """A step has taken the slots `rows` int64[n], which `check_take` has allowed. For the library."""
        self._allocator.taken_at.note(rows)
        for listener in self._taking:
            listener.on_take(rows)

    def free(self, slots: Slots, *, after: Fence | None) -> None:
        """Frees slots, at once or when `after` is complete.

        Args:
            slots: live handles of this pool, each once.
            after: the forward-done fence of the last forward that uses them; until then they are pending. None where
                no forward uses them any more.

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_DOUBLE_FREE, SLOT_STALE_HANDLE, UNIT_MISMATCH;
                SLOT_IN_FLIGHT, at `cheap`: `after` is None, and a forward that uses a slot is known to be under way.
                Nothing was freed.
            ArgumentError: slots of another pool, or `after` is not a fence.
        """
        self._leave(slots, after, "free", self._free, self._releasing_alone)

    def release_requests(self, slots: Slots, *, after: Fence | None) -> None:
        """Frees slots with all they own, pages of every pool too: a request leaves as a whole, or nothing has changed.

        `after` is as for `free`.

        Raises:
            As `free`; and refusals of the owners of the slots' memory, such as TIER_STATE.
        """
        self._leave(slots, after, "release_requests", self._release, self._releasing_whole)

    def _leave(self, slots: Slots, after: Fence | None, operation: str, label: str, checks: Sequence[Check]) -> None:
        self.transaction.enter(label)
        if after is not None:
            check_fence(after, label)
        check_of_pool(self._allocator, slots, Slots, operation)
        needed = self._listeners or self.transaction.launches.last
        rows, handles = slots._host_side() if needed else _NO_ROWS, slots.requests
        self.check_leaving(rows, handles, after, operation, checks)
        self.release_rows(rows, handles, after, operation)

    def check_leaving(
        self,
        rows: Ints,
        handles: Requests,
        after: Fence | None,
        operation: str,
        checks: Sequence[Check] | None = None,
    ) -> None:
        """Queries fences, and refuses handles of this pool that cannot leave behind `after`. For the library.

        Listeners get their `rows`, int64[n]. `checks` are theirs, by default those of requests that leave as a whole.
        """
        for query in self._before_free:
            query(rows)
        times_checked[DOUBLE_FREE] += 1
        wrong = self._core.first_not_held(handles, False, True)
        if wrong >= 0:
            named, generations = handles.handles()
            self._allocator.refuse(named, operation, wrong, generations, freed_from=LIVE)
        if after is None:
            self.check_ended(rows, operation)
        for check in self._releasing_whole if checks is None else checks:
            check(rows, operation)
        if levels.full:
            self._verify_tables(operation)

    def check_ended(self, rows: Ints, operation: str) -> None:
        """Refuses (SLOT_IN_FLIGHT), at `cheap`, slots int64[n] that a forward may still use. For the library."""
        launches = self.transaction.launches
        if launches.last and levels.cheap:
            launches.check_ended(rows, **self._allocator.where(operation))

    def release_rows(self, rows: Ints, handles: Requests, after: Fence | None, operation: str) -> None:
        """Frees what `check_leaving` has seen. For the library."""
        self.transaction.operation = operation
        for free in self._freeing:
            free(rows, after)
        self._allocator.release(handles, after, operation)
        self.transaction.operation = None
        if self._counting or levels.full:
            self._check_after(operation)

    def clear(self, *, zero_memory: bool = False) -> None:
        """Frees every slot with all that hangs on the pool, and begins anew: slots and pages come in order, from 1.

        Pages of all requests and leases, states, relay entries and host locations are given back, all or nothing. No
        generation falls: handles, leases, plans and results from before are refused as those of requests that left are.
        To be called when the last forward is complete, as `free` without a fence. Host locations that a writer or a
        copy may still write stay pending until it has ended.

        With `zero_memory` all tables of the pool and of its pages, and page 0 of the KV memory that is registered, are
        set to zero too, on the current stream, and tables are not checked before: for memory whose contents are lost,
        as after a memory saver has released it. The host does not wait.

        Raises:
            Violation: SLOT_IN_FLIGHT: slots, states or pages wait for a fence, which is named; TIER_STATE: KV is being
                copied to the host. Nothing was freed.
            ArgumentError: a step of the host tier is planned, and its backup not launched.
            CaptureError: memory is to be zeroed while the current stream is captured.
        """
        operation = "clear"
        self.transaction.enter(f"{self.name}: {operation}")
        if zero_memory:
            self.runtime.refuse_capture(f"{self.name}: clear with zero_memory")
        self.query_fences()
        for query_free in self._before_free:
            query_free(self.live_slots())
        rows = self.live_slots()
        for group in self.transaction.groups:
            group.refuse_in_flight(operation)
        self.check_ended(rows, operation)
        for listener in self._listeners:
            listener.check_release(rows, operation)
            listener.check_clear(operation)
        if levels.full and not zero_memory:
            self._verify_tables(operation)
        self.transaction.operation = operation
        for free in self._freeing:
            free(rows, None)
        self._allocator.release(Requests(rows, rows), None, operation)
        self._core.sort()
        for listener in self._listeners:
            listener.on_clear()
            if zero_memory:
                listener.zero_memory()
        for table in self._tables if zero_memory else ():
            table.zero()
        self.transaction.operation = None
        self._check_after(operation)

    def reap(self) -> int:
        """Makes free the pending slots whose fences are complete; says how many. Never waits."""
        self.transaction.enter(f"{self.name}: reap")
        return self._allocator.reap()

    def add_listener(self, listener: SlotListener) -> None:
        """Makes `listener` part of every take and free of this pool."""
        self.transaction.enter(f"{self.name}: add_listener")
        self._set_listeners([*self._listeners, listener])

    def remove_listener(self, listener: SlotListener) -> None:
        """Removes `listener` if it is there; also while listeners are called."""
        self._set_listeners([other for other in self._listeners if other is not listener])

    def _set_listeners(self, listeners: list[SlotListener]) -> None:
        def those(*methods: str) -> list[SlotListener]:  # most do nothing at most events: they are not asked
            return [
                listener
                for listener in listeners
                if any(getattr(type(listener), method) is not getattr(SlotListener, method) for method in methods)
            ]

        self._listeners = listeners
        self.before_take = [listener.before_take for listener in those("before_take")]
        self._before_free = [listener.before_free for listener in those("before_free")]
        self._taking = those("check_take", "on_take")
        self._releasing_alone = [listener.check_free for listener in those("check_free")]
        self._releasing_whole = [listener.check_release for listener in those("check_free", "check_release")]
        self._freeing = [listener.on_free for listener in those("on_free")]
        self._counting = those("check_conservation")

    # Tables

    def table(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.int32,
        *,
        holds: str | None = None,
        host: bool = False,
        row_zero: RowZero = "zero",
    ) -> Table:
        """A new zeroed table with one row of `shape` per slot, padding included.

        Args:
            name: for reports.
            shape: of one row.
            dtype: of the elements. Host values of bfloat16 and float8, which numpy lacks, are bits: integers of a size.
            holds: index space of the values, if they are indices.
            host: keep the same values on the host too, for checks and for planning.
            row_zero: `zero`, or `scratch` where kernels write the rows of padding too, as counts and rings of states
                are: row 0 then holds anything, is not checked, and padded rows that read it are promised nothing.

        Raises:
            ArgumentError: another `row_zero`, or scratch in a table of indices.
        """
        self.transaction.enter(f"{self.name}: table")
        table = Table.new(self, name, shape, dtype, holds=holds, host=host, row_zero=row_zero)
        self._tables.append(table)
        return table

    def adopt(
        self,
        tensor: torch.Tensor,
        name: str,
        *,
        holds: str | None = None,
        host: bool = False,
        row_zero: RowZero = "zero",
    ) -> Table:
        """A table over an engine's own tensor, on the device and contiguous, with one row per slot, padding included.

        Its row 0 is read back, which waits for the device, and has to be zero unless it is scratch; with `host` all
        rows are. Other rows count as unwritten. Else as `table`.

        Raises:
            Violation: SLOT_ZERO_DIRTY; TABLE_CAPACITY: fewer rows than the pool has slots, padding included.
            DeviceError, ShapeError: on another device; not contiguous, or without rows.
        """
        self.transaction.enter(f"{self.name}: adopt")
        table = Table.adopted(self, tensor, name, holds=holds, host=host, row_zero=row_zero)
        self._tables.append(table)
        return table

    # Queries

    def is_live(self, slots: object) -> npt.NDArray[np.bool_]:
        """Whether each of the numbers `slots` int[n] is live now, bool[n]. Refuses those outside: SLOT_OUT_OF_RANGE."""
        array = as_array(slots, f"{self.name}: is_live")
        if array.size and array.dtype.kind not in "iu":
            problem = f"{self.name}: is_live: expected integers, got {array.dtype}"
            raise DtypeError(problem, array.dtype, "pass integers")
        rows = array.astype(np.int64, copy=False)
        invariants.slot_out_of_range(rows, self.capacity, object=self._allocator.label, operation="is_live")
        return self._allocator.live_among(rows)

    def pending(self) -> list[PendingSlots]:
        """The pending slots by the fence that they wait for, oldest first. Queries no fence. Costs O(pending).

        A slot becomes free in the first `reap` after its fence is complete; `take` and `stats` reap too. A fence that
        stays here for more steps than are in flight never completes, or was recorded behind the wrong work.
        """
        self.transaction.enter(f"{self.name}: pending")
        return [PendingSlots(slots, queried.fence, queried.step) for queried, slots in self._allocator.pending_groups()]

    def live_slots(self) -> Ints:
        """All live slots in ascending order, int64[live]. Costs O(capacity): for checks and shutdown."""
        return self._allocator.live_indices()

    def check_handles(self, slots: Slots, operation: str) -> None:
        """Refuses handles that are not of this pool, not live, or older than their slot's owner.

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_STALE_HANDLE, UNIT_MISMATCH.
            ArgumentError: slots of another pool.
        """
        self.rows_of(slots, operation)

    def rows_of(self, slots: Slots, operation: str, *, unique: bool = False, padded: bool = False) -> Ints:
        """The numbers of live handles, int64[n] and read-only, checked as by `check_handles`.

        With `unique` a slot named twice is refused too (SLOT_SHARED); with `padded` padded rows at the end are allowed.
        """
        self.transaction.enter(f"{self.name}: {operation}")
        return self._allocator.rows_of(slots, operation, unique=unique, padded=padded)

    def check_rows(self, rows: Ints, generations: Ints, operation: str) -> None:
        """`check_handles`, of the numbers and generations int64[n] of handles of this pool. For the library."""
        self._allocator.check_held(rows, generations, operation)

    # Checks

    def _check_after(self, operation: str) -> None:
        if levels.cheap:
            for listener in self._counting:
                listener.check_conservation(self._allocator.live, operation)
            if levels.full:
                self._verify_host()

    def verify(self) -> None:
        """Checks every invariant of pool, tables and listeners. Reads device memory; suspended under capture."""
        self.transaction.enter(f"{self.name}: verify")
        if self.runtime.capturing:
            return
        self._verify_host()
        self._verify_tables("verify")

    def _verify_host(self) -> None:
        self._allocator.verify()
        for listener in self._listeners:
            listener.verify()

    def _verify_tables(self, operation: str) -> None:
        """Checks memory that kernels can damage: at `full` before a change, so that a refusal changes nothing."""
        for table in self._tables:
            table.check(operation)

    def expect_idle(self) -> None:
        """No slot is live; pending ones are not a leak. Else SLOT_CONSERVATION, naming up to 8 of the leaked slots."""
        self.transaction.enter(f"{self.name}: expect_idle")
        self._allocator.expect_idle("expect_idle")
