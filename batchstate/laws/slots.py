"""Laws of slots: who owns which row, since when, and until when."""

from typing import Unpack

import numpy as np
import numpy.typing as npt

from batchstate.laws.catalog import Array, Ints, broken, first_duplicate, first_row, law, made
from batchstate.violations import Code, Where


@law(
    Code.SLOT_ZERO_ALLOCATED,
    asked="always",
    remedy="0 is padding: hand out, free, share and write indices from 1 upwards only",
    origins=("sglang #23635", "sglang #24243", "vllm #39064"),
)
def slot_zero_allocated(slots: Ints, **where: Unpack[Where]) -> None:
    """Slot 0 (page 0, token 0) belongs to nobody: it is never handed out, freed or written as somebody's.

    Cost: one comparison an index. Broken by a pool that counts from 0: padded lanes then write a live request's row.
    """
    made[Code.SLOT_ZERO_ALLOCATED] += 1
    zero = slots == 0
    if zero.any():
        row = first_row(zero)
        broken(
            Code.SLOT_ZERO_ALLOCATED,
            "index 0 is used as somebody's",
            where,
            expected="1 or more",
            actual=0,
            row=row,
            slot=0,
        )


@law(
    Code.SLOT_ZERO_DIRTY,
    asked="full",
    remedy="find the kernel whose padded lanes store into the table; padded lanes may read row 0, not change it",
    origins=("sglang #23635", "vllm #57156"),
)
def slot_zero_dirty(row_zero: Array, **where: Unpack[Where]) -> None:
    """Row 0 of a slot-indexed table is all zeros, so that a padded lane reads something harmless.

    Cost: reads one row back. Broken by a write to slot 0 of a table whose values are indices.
    """
    made[Code.SLOT_ZERO_DIRTY] += 1
    if row_zero.any():
        position = int(np.flatnonzero(row_zero.reshape(-1))[0])
        broken(
            Code.SLOT_ZERO_DIRTY,
            f"row 0 was written (first at element {position})",
            where,
            expected=0,
            actual=row_zero.reshape(-1)[position],
            row=0,
            slot=0,
        )


@law(
    Code.SLOT_OUT_OF_RANGE,
    asked="always",
    remedy="index a table only with entries of its pool; `size` of them are handed out, `capacity` rows are in memory",
    origins=("sglang #24439", "sglang #36880", "sglang #34399", "vllm #43810"),
)
def slot_out_of_range(slots: Ints, capacity: int, **where: Unpack[Where]) -> None:
    """Every index lies in [0, capacity).

    Cost: a minimum and a maximum. Broken by handles of another pool, by -1, and by capacity taken for size.
    """
    made[Code.SLOT_OUT_OF_RANGE] += 1
    if slots.size and (slots.min() < 0 or slots.max() >= capacity):
        row = first_row((slots < 0) | (slots >= capacity))
        broken(
            Code.SLOT_OUT_OF_RANGE,
            f"index {slots[row]} lies outside",
            where,
            expected=f"0 to {capacity - 1}",
            actual=slots[row],
            row=row,
            slot=int(slots[row]),
        )


@law(
    Code.SLOT_DOUBLE_FREE,
    asked="always",
    remedy="one owner frees, once: look for two exits of one request (finish and abort, result and retraction)",
    origins=("sglang #12224", "sglang #6888", "sglang #27779", "sglang #35501", "FreeToken#204"),
)
def slot_double_free(slots: Ints, live: npt.NDArray[np.bool_], **where: Unpack[Where]) -> None:
    """What is freed is live, and named once in the call. `live` bool[n] says so for each of `slots`.

    Cost: a sort of the freed indices. Broken by two exits of one request that both free.
    """
    made[Code.SLOT_DOUBLE_FREE] += 1
    if not live.all():
        row = first_row(~live)
        broken(
            Code.SLOT_DOUBLE_FREE,
            f"index {slots[row]} is freed although it is not live",
            where,
            expected="live",
            actual="free or pending",
            row=row,
            slot=int(slots[row]),
        )
    row_of_copy = first_duplicate(slots)
    if row_of_copy is not None:
        broken(
            Code.SLOT_DOUBLE_FREE,
            f"index {slots[row_of_copy]} is freed twice in one call",
            where,
            expected="each index once",
            actual=slots[row_of_copy],
            row=row_of_copy,
            slot=int(slots[row_of_copy]),
        )


@law(
    Code.SLOT_STALE_HANDLE,
    asked="always",
    remedy="drop handles when their slot is freed; take the handle from the batch, do not keep it beside it",
    origins=("sglang #26941", "sglang #34876", "sglang #25945", "sglang #11970"),
)
def slot_stale_handle(slots: Ints, held: Ints, current: Ints, **where: Unpack[Where]) -> None:
    """The generation a handle holds is the slot's present one. `held` and `current` are integer[n], row by row.

    `current` is negative where the slot belongs to nobody, and 0 where it never had an owner.
    Cost: one comparison a handle. Broken by keeping a slot number past its free: it then names another request.
    """
    made[Code.SLOT_STALE_HANDLE] += 1
    stale = held != current
    if stale.any():
        row = first_row(stale)
        broken(
            Code.SLOT_STALE_HANDLE,
            f"the handle of index {slots[row]} "
            + ("is older than its present owner" if current[row] > 0 else "outlived its owner; the slot is nobody's"),
            where,
            expected=f"generation {current[row]}" if current[row] > 0 else "a live slot",
            actual=f"generation {held[row]}",
            row=row,
            slot=int(slots[row]),
            generation=int(held[row]),
        )


@law(
    Code.SLOT_SHARED,
    asked="cheap",
    remedy="a slot has one request: look for a merge of a batch with rows it already holds",
    origins=("FreeToken#204", "sglang #35501", "sglang #18744"),
)
def slot_shared(slots: Ints, **where: Unpack[Where]) -> None:
    """No two rows name the same slot; padded rows (slot 0) are left out.

    Cost: a sort of the rows. Broken by a free list that holds a slot twice, and by merging a batch with itself.
    """
    made[Code.SLOT_SHARED] += 1
    in_order = np.sort(slots)
    if not np.count_nonzero(in_order[1:] == in_order[:-1]):
        return
    row = first_duplicate(slots, ignore_zero=True)
    if row is not None:
        broken(
            Code.SLOT_SHARED,
            f"slot {slots[row]} belongs to two rows",
            where,
            expected="one row a slot",
            actual=f"rows {int(np.flatnonzero(slots == slots[row])[0])} and {row}",
            row=row,
            slot=int(slots[row]),
        )


@law(
    Code.SLOT_CONSERVATION,
    asked="cheap",
    remedy="every exit of a request (finish, abort, retract, error) frees what it took, exactly once",
    origins=("sglang #10871", "sglang #11970", "sglang #13741", "sglang #23496", "sglang #21652"),
)
def slot_conservation(
    free: int,
    pending: int,
    live: int,
    size: int,
    *,
    leaked: Ints | None = None,
    problem: str | None = None,
    remedy: str | None = None,
    **where: Unpack[Where],
) -> None:
    """Free + pending + live = size, each counted on its own.

    `leaked` are indices to name in the report: those whose owner is gone or should be. `problem` and `remedy` say it in
    the words of a place that knows what is being done.
    Cost: three additions at `cheap`; `verify` counts the states anew. Broken by a leak or by a free list that grew.
    """
    made[Code.SLOT_CONSERVATION] += 1
    if min(free, pending, live) < 0 or free + pending + live != size:
        broken(
            Code.SLOT_CONSERVATION,
            problem or _named(leaked) + f"{free} free + {pending} pending + {live} live is {free + pending + live}",
            where,
            expected=f"{size} in all",
            actual=free + pending + live,
            slot=None if leaked is None or not leaked.size else int(leaked[0]),
            remedy=remedy,
        )


@law(
    Code.SLOT_IN_FLIGHT,
    asked="cheap",
    remedy="free with `after=` the fence of the last forward that reads the slot; take only what `stats.free` counts",
    origins=("sglang #18744", "sglang #26376", "sglang #31687", "sglang #29352", "sglang #24527"),
)
def slot_in_flight(slots: Ints, in_flight: npt.NDArray[np.bool_], **where: Unpack[Where]) -> None:
    """Nothing changes owner while a forward in flight still uses it. `in_flight` bool[n] says so for each of `slots`.

    Cost: one look-up a slot. Broken by freeing at the end of planning instead of the end of the forward.
    """
    made[Code.SLOT_IN_FLIGHT] += 1
    if in_flight.any():
        row = first_row(in_flight)
        broken(
            Code.SLOT_IN_FLIGHT,
            f"index {slots[row]} changes owner while a forward may still use it",
            where,
            expected="its fence complete",
            actual="its fence pending",
            row=row,
            slot=int(slots[row]),
        )


@law(
    Code.TABLE_CAPACITY,
    asked="always",
    remedy="make the table with `pool.table(...)` of the pool whose entries index it: it then has"
    " capacity = size + reserve + 1 rows",
    origins=("sglang #24439", "sglang #24244", "sglang #32184"),
)
def table_capacity(rows: int, needed: int, **where: Unpack[Where]) -> None:
    """A table has a row for every index that can reach it: `needed` = the indexing pool's capacity.

    Cost: one comparison. Broken by sizing by `size` instead of `capacity`, or by the pool whose entries are the values.
    """
    made[Code.TABLE_CAPACITY] += 1
    if rows < needed:
        broken(
            Code.TABLE_CAPACITY,
            f"a table of {rows} rows is indexed by entries up to {needed - 1}",
            where,
            expected=f"at least {needed} rows",
            actual=rows,
        )


def _named(leaked: Ints | None) -> str:
    """Up to 8 leaked indices, for a report."""
    if leaked is None or not leaked.size:
        return ""
    names = ", ".join(str(index) for index in leaked[:8])
    return f"{leaked.size} leaked: {names}{', ...' if leaked.size > 8 else ''}; without them "
