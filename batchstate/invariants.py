"""Every invariant once, by code: what the runtime checks, the state machines and the unit tests all call.

A law takes plain arrays, knows nothing of pools or batches, changes nothing, and raises `Violation` or returns None.
Slot and index arrays are integer[n]; `where` is `violations.Where`. Each counts itself in `made`, so that a test can
show that a check really ran. `INVARIANTS` lists them all, with the level at which the library asks, the remedy, and
real bugs that each would have caught.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, Unpack

import attrs
import numpy as np
import numpy.typing as npt
from numpy import bool_

from batchstate.levels import Level, checks, current_checks, set_checks
from batchstate.violations import Code, Violation, Where

# The list of laws, and what every law needs to judge and to report.

Ints = npt.NDArray[np.integer[Any]]
Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., None])

made: dict[Code, int] = dict.fromkeys(Code, 0)
"""How often each law was asked in this process. A plain dict: a `Counter` takes three times as long to count."""


@attrs.frozen
class Invariant:
    """One invariant: the function that judges it, and what a person should know of it.

    Attributes:
        code: its name.
        check: the function.
        asked: when the library asks: `always` (arguments at the door), `cheap`, `full`, or `test` (test tools only).
        remedy: what to do when it is broken.
        origins: public threads of real bugs that it would have caught.
    """

    code: Code
    check: Callable[..., None]
    asked: str
    remedy: str
    origins: tuple[str, ...]

    @property
    def statement(self) -> str:
        """The law in words: the docstring of its function."""
        return (self.check.__doc__ or "").strip()


INVARIANTS: dict[Code, Invariant] = {}


def law(code: Code, *, asked: str, remedy: str, origins: tuple[str, ...]) -> Callable[[F], F]:
    """Lists a function as the law of `code`; see `Invariant` for the arguments."""

    def register(check: F) -> F:
        INVARIANTS[code] = Invariant(code, check, asked, remedy, origins)
        return check

    return register


def broken(
    code: Code,
    problem: str,
    where: Where,
    *,
    expected: object,
    actual: object,
    row: int | None = None,
    slot: int | None = None,
    generation: int | None = None,
    writer: str | None = None,
    reader: str | None = None,
    remedy: str | None = None,
) -> NoReturn:
    """Raises the violation of `code`, with the remedy of its law unless the place knows a better one.

    Raises:
        Violation: always.
    """
    raise Violation(
        code,
        problem,
        expected=expected,
        actual=actual,
        remedy=INVARIANTS[code].remedy if remedy is None else remedy,
        where=where,
        row=row,
        slot=slot,
        generation=generation,
        writer=writer,
        reader=reader,
    )


def bits(values: Array) -> Array:
    """The same memory as unsigned integers, so that NaN equals itself and -0.0 differs from 0.0."""
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(f"u{contiguous.dtype.itemsize}") if contiguous.dtype.kind == "f" else contiguous


def first_duplicate(values: Ints, *, ignore_zero: bool = False) -> int | None:
    """Row of the first value that stands in an earlier row too, or None."""
    if values.size < 2:
        return None
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    copies = in_order[1:] == in_order[:-1]
    if ignore_zero:
        copies &= in_order[1:] != 0
    return int(order[1:][copies].min()) if copies.any() else None


def first_row(hits: npt.NDArray[np.bool_]) -> int:
    """The first row of bool[n, ...] with a hit; there is one."""
    rows = hits if hits.ndim == 1 else hits.reshape(len(hits), -1).any(axis=1)
    return int(rows.argmax())


def rows_hit(hits: npt.NDArray[np.bool_]) -> int:
    """How many rows of bool[n, ...] have a hit."""
    rows = hits if hits.ndim == 1 else hits.reshape(len(hits), -1).any(axis=1)
    return int(rows.sum())


# Laws of mirrored values and of the columns of a batch.


@law(
    Code.MIRROR_EQUAL,
    asked="full",
    remedy="one side was written alone: change the value through an operation that acts on both sides",
    origins=("sglang #25944", "sglang #26020", "sglang #18647", "vllm #48419"),
)
def mirror_equal(host: Array, device: Array, **where: Unpack[Where]) -> None:
    """Host and device side hold the same dtype, shape and bits.

    Cost: reads the device side back. Broken by writing one side alone, or by an operation that forgets one side.
    """
    made[Code.MIRROR_EQUAL] += 1
    _same_kind(Code.MIRROR_EQUAL, host, device, where)
    unequal = bits(host) != bits(device)
    if unequal.any():
        row = first_row(unequal)
        broken(
            Code.MIRROR_EQUAL,
            f"the device side differs from the host side in {rows_hit(unequal)} of {len(host)} rows",
            where,
            expected=host[row],
            actual=device[row],
            row=row,
        )


@law(
    Code.MIRROR_BOUND,
    asked="full",
    remedy="raise the host bound before the forward that may exceed it is launched, or resolve the exact value",
    origins=("sglang #26128", "sglang #28480"),
)
def mirror_bound(host: Array, device: Array, **where: Unpack[Where]) -> None:
    """Under contract `upper_bound` every host element is at least its device element.

    Cost: reads the device side back. Broken by adding on the device more than was added on the host.
    """
    made[Code.MIRROR_BOUND] += 1
    _same_kind(Code.MIRROR_BOUND, host, device, where)
    above = device > host
    if above.any():
        row = first_row(above)
        broken(
            Code.MIRROR_BOUND,
            f"the device side exceeds the host bound in {rows_hit(above)} of {len(host)} rows",
            where,
            expected=f"at most {host[row]}",
            actual=device[row],
            row=row,
        )


@law(
    Code.MIRROR_STALE_READ,
    asked="always",
    remedy="read the other side, or read after the stale window has closed",
    origins=("sglang #25944", "sglang #30435"),
)
def mirror_stale_read(side: str, reasons: tuple[str, ...], **where: Unpack[Where]) -> None:
    """No side is read while a window declares it stale. `reasons` are those of the open windows of that side.

    Cost: one branch. Broken by planning with lengths that a launched verification is about to change.
    """
    made[Code.MIRROR_STALE_READ] += 1
    if reasons:
        broken(
            Code.MIRROR_STALE_READ,
            f"the {side} side was read while it is declared stale",
            where,
            expected=f"no read of the {side} side",
            actual=f"a read, although {'; '.join(reasons)}",
        )


@law(
    Code.MIRROR_FOREIGN_WRITE,
    asked="cheap",
    remedy="values are immutable: replace the write in place by `update`, `+ n` or `replace`, which return a new value",
    origins=("sglang #8056", "sglang free_group view", "vllm #50432"),
)
def mirror_foreign_write(side: str, expected: int, actual: int, **where: Unpack[Where]) -> None:
    """The mark of a side's memory is the one taken when the value was made.

    The mark is torch's version counter at `cheap` and a checksum of the host memory at `full`. Cost: one comparison
    of two numbers at `cheap`, one pass over the host side at `full`. Broken by writing in place through a tensor or
    array that the value handed out.
    """
    made[Code.MIRROR_FOREIGN_WRITE] += 1
    if expected != actual:
        broken(
            Code.MIRROR_FOREIGN_WRITE,
            f"the {side} side was written in place from outside",
            where,
            expected="no write since the value was made",
            actual=f"at least one (mark {actual}, was {expected})",
        )


@law(
    Code.MIRROR_ALIASED,
    asked="full",
    remedy="give each side memory of its own: copy before pairing (`.to('cpu')` and `from_numpy` alias on CPU)",
    origins=("sglang #34076", "vllm #43894"),
)
def mirror_aliased(host: tuple[int, int], device: tuple[int, int], **where: Unpack[Where]) -> None:
    """The two sides share no byte; each is given as (first address, address after the last), empty when equal.

    Cost: four comparisons. Broken on CPU, where `.to("cpu")` and `torch.from_numpy` return the same memory: such a
    pair always agrees, and every other check on it would be vacuous.
    """
    made[Code.MIRROR_ALIASED] += 1
    start, stop = max(host[0], device[0]), min(host[1], device[1])
    if start < stop:
        broken(
            Code.MIRROR_ALIASED,
            f"host and device side share {stop - start} bytes of memory",
            where,
            expected="disjoint memory",
            actual=f"{start:#x} to {stop:#x} on both sides",
        )


@law(
    Code.ROW_COUNT,
    asked="cheap",
    remedy="every column takes part in every operation: declare the column, do not carry it beside the batch",
    origins=("sglang #18647", "sglang #7585", "sglang #40629", "vllm #48419"),
)
def row_count(expected: int, actual: Mapping[str, int], **where: Unpack[Where]) -> None:
    """Every column of a batch has exactly as many rows as the batch has requests. `actual` maps column -> rows.

    Cost: one comparison a column. Broken by an operation that forgets a column.
    """
    made[Code.ROW_COUNT] += 1
    for column, rows in actual.items():
        if rows != expected:
            broken(
                Code.ROW_COUNT,
                f"column {column!r} has {rows} rows in a batch of {expected}",
                {**where, "column": column},
                expected=expected,
                actual=rows,
            )


@law(
    Code.TAIL_STALE,
    asked="cheap",
    remedy="padding writes the declared pad value into every padded row of every column, each step anew",
    origins=("lmdeploy#4569", "sglang #15132", "sglang #18647", "vllm #42494"),
)
def tail_stale(tail: Array, pad: object, start: int, **where: Unpack[Where]) -> None:
    """Rows beyond the last request hold the column's pad value. `tail` is those rows, `start` the first of them.

    Cost: one comparison a padded element. Broken by reusing a padded buffer without resetting its tail.
    """
    made[Code.TAIL_STALE] += 1
    filler: Array = np.asarray(pad)
    dirty = (tail != filler) & ~((tail != tail) & (filler != filler))  # a pad of NaN is kept by NaN
    if dirty.any():
        row = first_row(dirty)
        broken(
            Code.TAIL_STALE,
            f"{rows_hit(dirty)} padded rows hold old values",
            where,
            expected=pad,
            actual=tail[row],
            row=start + row,
        )


@law(
    Code.SENTINEL_ESCAPED,
    asked="cheap",
    remedy="resolve or mask placeholders before they are used as an index; -1 is the last row in Python",
    origins=("sglang #36880", "sglang #25944", "vllm #40768", "vllm #48245", "vllm #43810"),
)
def sentinel_escaped(indices: Ints, **where: Unpack[Where]) -> None:
    """No negative number is used as an index.

    Cost: one minimum. Broken by a placeholder such as -1 that reaches a gather, a scatter or an embedding.
    """
    made[Code.SENTINEL_ESCAPED] += 1
    if indices.size and indices.min() < 0:
        row = first_row(indices < 0)
        broken(
            Code.SENTINEL_ESCAPED,
            "a negative placeholder is used as an index",
            where,
            expected="0 or more",
            actual=indices[row],
            row=row,
        )


@law(
    Code.UNIT_MISMATCH,
    asked="always",
    remedy="convert with a function that names the page size and the token count, or pass the other index",
    origins=("sglang #31482", "sglang #24039", "sglang #22453", "sglang #26427"),
)
def unit_mismatch(expected: str, actual: str, **where: Unpack[Where]) -> None:
    """An index is used in the index space it belongs to (slot, page, token, host token).

    Cost: one comparison. Broken by page ids where tokens are meant, or host tokens where device tokens are meant.
    """
    made[Code.UNIT_MISMATCH] += 1
    if expected != actual:
        broken(
            Code.UNIT_MISMATCH,
            f"indices of unit {actual!r} were given where {expected!r} is meant",
            where,
            expected=expected,
            actual=actual,
        )


def _same_kind(code: Code, host: Array, device: Array, where: Where) -> None:
    if host.dtype != device.dtype or host.shape != device.shape:
        broken(
            code,
            "the two sides differ in dtype or shape",
            where,
            expected=f"{host.dtype}{list(host.shape)} (host)",
            actual=f"{device.dtype}{list(device.shape)} (device)",
        )


# Laws of slots: who owns which row, since when, and until when.


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


# Laws of pages and token lengths.


@law(
    Code.PAGE_OWNER,
    asked="full",
    remedy="take, share and release pages through the pool only; whoever keeps a page holds a reference to it",
    origins=("sglang #28754", "sglang #35501", "sglang #24527", "FreeToken#204", "sglang #36457"),
)
def page_owner(held: Ints, recorded: Ints, *, pages: Ints | None = None, **where: Unpack[Where]) -> None:
    """Each page has as many references recorded as holders. Both are integer[n], of `pages` int[n] or of page 0 to n-1.

    A free page has no holder, an owned one is in no free list (`held` counts -1 for each place in the free list, and
    `recorded` is -1 for a free page), and a live one has a holder. Cost: one pass over the pages. Broken by handing a
    page out twice.
    """
    made[Code.PAGE_OWNER] += 1
    unequal = held != recorded
    if unequal.any():
        row = first_row(unequal)
        page = row if pages is None else int(pages[row])
        broken(
            Code.PAGE_OWNER,
            f"page {page} has other holders than it has references",
            where,
            expected=f"{recorded[row]} (recorded; -1 is free)",
            actual=f"{held[row]} (counted)",
            slot=page,
        )


@law(
    Code.PAGE_ALIGNMENT,
    asked="always",
    remedy="share, hold and truncate at whole pages: round the token count down to a multiple of the page size",
    origins=("sglang #4913", "sglang #27789", "sglang #14439", "sglang #27779"),
)
def page_alignment(tokens: Ints, page_size: int, **where: Unpack[Where]) -> None:
    """Token counts at which ownership of pages changes are multiples of the page size.

    Cost: one remainder a count. Broken by sharing or releasing a page of which somebody uses a part.
    """
    made[Code.PAGE_ALIGNMENT] += 1
    if page_size == 1:
        return
    ragged = tokens % page_size != 0
    if ragged.any():
        row = first_row(ragged)
        broken(
            Code.PAGE_ALIGNMENT,
            f"{tokens[row]} tokens end inside a page",
            where,
            expected=f"a multiple of {page_size}",
            actual=tokens[row],
            row=row,
        )


@law(
    Code.LENGTH_ORDER,
    asked="always",
    remedy="grow before committing; never commit more tokens than are allocated, nor ask for more than a row holds",
    origins=("sglang #28754", "sglang #13741", "sglang #27731", "sglang #12224"),
)
def length_order(
    committed: Ints,
    allocated: Ints,
    width: int,
    *,
    explain: Callable[[int, int, int], tuple[str, str]] | None = None,
    **where: Unpack[Where],
) -> None:
    """0 <= committed <= allocated <= row width, in tokens, for each request.

    `explain` says what was asked for, from the three numbers: the problem and the remedy.
    Cost: three comparisons a request. Broken by committing speculated tokens before they are allocated.
    """
    made[Code.LENGTH_ORDER] += 1
    wrong = (committed < 0) | (committed > allocated) | (allocated > width)
    if wrong.any():
        row = first_row(wrong)
        least, most = int(committed[row]), int(allocated[row])
        if explain is not None:
            problem, remedy = explain(least, most, width)
            broken(
                Code.LENGTH_ORDER,
                problem,
                where,
                expected=f"0 <= {least} <= {most} <= {width}",
                actual="not in this order",
                row=row,
                remedy=remedy,
            )
        broken(
            Code.LENGTH_ORDER,
            "token lengths are out of order",
            where,
            expected=f"0 <= committed <= allocated <= {width}",
            actual=f"committed {least}, allocated {most}",
            row=row,
        )


# Laws of the relay: every entry is written once and read once, by its owner, in the order of the streams.

Mask = npt.NDArray[np.bool_]
Writer = Callable[[int], str]
"""Says of a row which publish wrote its entry; asked only when a law is broken."""


@law(
    Code.FUTURE_UNWRITTEN,
    asked="cheap",
    remedy="publish the field for this request before it is read; for a request that arrives prebuilt, or comes back, "
    "publish it from the host first",
    origins=("sglang #25945", "vllm #40768", "vllm #48245", "sglang #27258"),
)
def future_unwritten(slots: Ints, written: Mask, reader: str, **where: Unpack[Where]) -> None:
    """An entry is read only after somebody has published it for the slot's present owner. `written` bool[n].

    Cost: one mask. Broken by a first decode step without a token to start from, and by a stand-in for one.
    """
    made[Code.FUTURE_UNWRITTEN] += 1
    if not written.all():
        row = first_row(~written)
        broken(
            Code.FUTURE_UNWRITTEN,
            f"the entry of slot {slots[row]} was read before anybody published it",
            where,
            expected="published",
            actual="unwritten",
            row=row,
            slot=int(slots[row]),
            writer="nobody",
            reader=reader,
        )


@law(
    Code.FUTURE_GENERATION,
    asked="cheap",
    remedy="entries end with their owner: free slots through their pool, and drop results of requests that have left",
    origins=("sglang #11970", "sglang #11976", "sglang #18744"),
)
def future_generation(
    slots: Ints, published: Ints, held: Ints, writer: Writer, reader: str, **where: Unpack[Where]
) -> None:
    """An entry is read by the request that it was published for. Generations int64[n], row by row.

    Cost: one comparison. Broken by a slot that is reused with the entry of its former owner still in it.
    """
    made[Code.FUTURE_GENERATION] += 1
    foreign = published != held
    if foreign.any():
        row = first_row(foreign)
        broken(
            Code.FUTURE_GENERATION,
            f"the entry of slot {slots[row]} was published for another request",
            where,
            expected=f"generation {held[row]}",
            actual=f"generation {published[row]}",
            row=row,
            slot=int(slots[row]),
            generation=int(held[row]),
            writer=writer(row),
            reader=reader,
        )


@law(
    Code.FUTURE_CONSUMED,
    asked="cheap",
    remedy="a published value is taken once by each of its readers: look for a forward that ran twice, a step whose "
    "publish was left out, or inputs installed again after they were used",
    origins=("sglang #25945", "sglang #11970", "sglang #18647"),
)
def future_consumed(slots: Ints, taken: Mask, writer: Writer, reader: str, **where: Unpack[Where]) -> None:
    """A published entry is taken at most once by each of its readers. `taken` bool[n] says who has been there.

    Cost: one mask. Broken by reading again what the last forward read: the step then repeats an old token.
    """
    made[Code.FUTURE_CONSUMED] += 1
    if taken.any():
        row = first_row(taken)
        broken(
            Code.FUTURE_CONSUMED,
            f"the entry of slot {slots[row]} was read before, and nobody has published it anew",
            where,
            expected="published",
            actual="consumed",
            row=row,
            slot=int(slots[row]),
            writer=writer(row),
            reader=reader,
        )


@law(
    Code.FUTURE_UNREAD_OVERWRITTEN,
    asked="cheap",
    remedy="read every entry before the next publish (`prefetch` what the host needs right behind the forward), or "
    "`discard` what nobody wants",
    origins=("sglang-jax#1487", "sglang-jax#1504", "sglang #13713", "sglang #30435"),
)
def future_unread_overwritten(
    slots: Ints, unread: Mask, before: Writer, writer: str, readers: str, **where: Unpack[Where]
) -> None:
    """An entry is overwritten only after each of its readers has taken it. `unread` bool[n].

    Cost: one mask. Broken by a relay ring that wraps, by two publishes in one step, and by results nobody fetched.
    """
    made[Code.FUTURE_UNREAD_OVERWRITTEN] += 1
    if unread.any():
        row = first_row(unread)
        broken(
            Code.FUTURE_UNREAD_OVERWRITTEN,
            f"the entry of slot {slots[row]} by {before(row)} would be overwritten unread",
            where,
            expected=f"read by {readers}",
            actual="unread",
            row=row,
            slot=int(slots[row]),
            writer=writer,
            reader="nobody",
        )


@law(
    Code.FUTURE_ORDER,
    asked="cheap",
    remedy="wait for the fence of the very publish that wrote the entry, and give each publish a fence of its own",
    origins=("sglang #30435", "sglang #30471", "vllm #51571", "vllm #36013", "sglang #26376"),
)
def future_order(ordered: bool, writer: str, reader: str, missing: str, **where: Unpack[Where]) -> None:
    """Whoever touches an entry comes behind the publish that wrote it, and behind those that read it, by its fences.

    `missing` names the order that must hold. Cost: a set lookup or the query of a fence for each publish, not for each
    row. Broken by one event for two publishers, and by a host that reads before its copy has run.
    """
    made[Code.FUTURE_ORDER] += 1
    if not ordered:
        broken(
            Code.FUTURE_ORDER,
            f"nothing orders {reader} behind {writer}",
            where,
            expected=missing,
            actual="no wait for that fence",
            writer=writer,
            reader=reader,
        )


# Laws of a step: what may wait, how deep steps may overlap, whose the memory of a transfer is, what comes first.


@law(
    Code.HIDDEN_SYNC,
    asked="test",
    remedy="read the host side of the mirrored value, or call `resolve`/`synchronize`, whose names say that they wait",
    origins=("sglang #26425", "sglang #29420", "sglang #34782", "sglang #27689", "sglang #28491"),
)
def hidden_sync(call: str, allowed: bool, **where: Unpack[Where]) -> None:
    """Nothing waits for the device but calls named for it. `call` is what was about to wait.

    Cost: none at run time; test tools intercept. Broken by `.item()`, `.tolist()`, `.cpu()` or a boolean index.
    """
    made[Code.HIDDEN_SYNC] += 1
    if not allowed:
        broken(
            Code.HIDDEN_SYNC,
            f"`{call}` on a device tensor waits for the device",
            where,
            expected="no synchronisation",
            actual=call,
        )


@law(
    Code.STAGING_OVERRUN,
    asked="cheap",
    remedy="declare the true depth: open the runtime with a larger `steps_in_flight`, or wait for older steps first",
    origins=("TRT-LLM#18485", "sglang #13713", "sglang-jax#1487", "vllm #24527"),
)
def staging_overrun(oldest_step: int, next_step: int, steps_in_flight: int, **where: Unpack[Where]) -> None:
    """When step s begins, the uploads of step s - steps_in_flight and older have run.

    `oldest_step` is the oldest step with an upload that has not. Cost: one query of a fence. Broken by an engine that
    runs deeper than it declared: buffers planned for the declared depth are then in use at once.
    """
    made[Code.STAGING_OVERRUN] += 1
    if oldest_step <= next_step - steps_in_flight:
        broken(
            Code.STAGING_OVERRUN,
            f"an upload of step {oldest_step} has not run when step {next_step} begins",
            where,
            expected=f"at most {steps_in_flight} steps in flight",
            actual=next_step - oldest_step + 1,
        )


@law(
    Code.STAGING_REUSED,
    asked="cheap",
    remedy="give a block of host memory back when its values have been taken out, and never before its copy has run",
    origins=("vllm #51571", "vllm #36013", "pytorch #68749"),
)
def staging_reused(held: int, current: int, **where: Unpack[Where]) -> None:
    """Host memory that a copy from the device landed in is still lent to that copy when its values are taken out.

    `held` is the number under which it was lent, `current` that of its last lending; 0 when it is lent to nobody.
    Cost: one comparison. Broken by a ring of landing buffers that turns once a call, or that is read a step too late.
    """
    made[Code.STAGING_REUSED] += 1
    if held != current:
        broken(
            Code.STAGING_REUSED,
            "the host memory of a copy from the device was given to another before its values were taken out",
            where,
            expected=f"lending {held}",
            actual=f"lending {current}" if current else "lent to nobody",
        )


@law(
    Code.RACE,
    asked="test",
    remedy="let the stream of the second access wait for a fence recorded behind the first",
    origins=(
        "sglang #18744",
        "sglang #26376",
        "sglang #30471",
        "sglang #34076",
        "vllm #24527",
        "vllm #36013",
        "vllm #29623",
    ),
)
def race(ordered: bool, problem: str, missing: str, remedy: str | None = None, **where: Unpack[Where]) -> None:
    """Two accesses to the same memory, one of them a write, are ordered by streams, fences and waits of the host.

    `problem` names both, `missing` the order that is not there. Freeing memory counts as a write of the stream that it
    was allocated on. Cost: none at run time; the race detector asks. Broken by a missing wait, by a host that refills
    or reads memory before its copy has run, by slots that change hands too early, by memory handed over unprotected.
    """
    made[Code.RACE] += 1
    if not ordered:
        broken(Code.RACE, problem, where, expected="an order", actual=missing, remedy=remedy)


# Laws of the host tier and of what another process writes into it.


@law(
    Code.TIER_STATE,
    asked="always",
    remedy="follow the states: reserve or stage, wait until the KV is there, admit, decode, release",
    origins=("sglang #27258", "sglang #21591", "sglang #22453"),
)
def tier_state(
    slots: Ints,
    states: Ints,
    allowed: tuple[int, ...],
    names: tuple[str, ...],
    *,
    missing: Ints | None = None,
    **where: Unpack[Where],
) -> None:
    """What is asked of a request in the host tier goes with its state. `states` integer[n], of `slots` integer[n].

    `allowed` are the states in which the operation is meant, `names` the name of each state by number; `missing`
    integer[n] says, where the operation needs all of the KV, of how many tokens it has not arrived.
    Cost: one comparison a request. Broken by decoding a request whose KV has not arrived.
    """
    made[Code.TIER_STATE] += 1
    wrong = states != allowed[0]
    for state in allowed[1:]:
        wrong &= states != state
    if wrong.any():
        row = first_row(wrong)
        broken(
            Code.TIER_STATE,
            f"the request on slot {slots[row]} is {names[int(states[row])]}",
            where,
            expected=" or ".join(names[state] for state in allowed),
            actual=names[int(states[row])],
            row=row,
            slot=int(slots[row]),
        )
    if missing is not None and missing.any():
        row = first_row(missing != 0)
        broken(
            Code.TIER_STATE,
            f"the KV of the request on slot {slots[row]} has not arrived",
            where,
            expected="all of it, and a writer that has ended",
            actual=f"{missing[row]} tokens are missing" if missing[row] > 0 else f"{-missing[row]} tokens too many",
            row=row,
            slot=int(slots[row]),
            remedy="admit when the lease of the request is DELIVERED; abort it when the lease has failed",
        )


@law(
    Code.TRANSFER_BOUNDS,
    asked="always",
    remedy="write only rows of the granted run, inside the registered memory, and as many as were agreed on",
    origins=("sglang #31482", "sglang #24527", "sglang #14439"),
)
def transfer_bounds(
    starts: Ints, lengths: Ints, least: Ints | int, most: Ints | int, *, what: str = "bytes", **where: Unpack[Where]
) -> None:
    """Each row [start, start + length) lies in [least, most), and none is empty. All integer[n], bounds also numbers.

    Cost: four comparisons a row. Broken by an index of another space, or by a destination that is not the request's.
    """
    made[Code.TRANSFER_BOUNDS] += 1
    outside = (starts < least) | (lengths <= 0) | (lengths > most - starts)
    if outside.any():
        row = first_row(outside)
        low = least if isinstance(least, int) else least[row]
        high = most if isinstance(most, int) else most[row]
        broken(
            Code.TRANSFER_BOUNDS,
            f"row {row} of a transfer covers {lengths[row]} {what} from {starts[row]} on",
            where,
            expected=f"inside {low} to {high} (exclusive)",
            actual=f"{starts[row]}, {lengths[row]} long",
            row=row,
        )


@law(
    Code.TRANSFER_LATE_WRITE,
    asked="full",
    remedy="keep the memory of a failed transfer until its writer has ended; never free it by time-out alone",
    origins=("sglang #24527", "sglang #35049", "sglang #27372", "sglang #38961", "vllm #32255"),
)
def transfer_late_write(tokens: Ints, changed: npt.NDArray[bool_], **where: Unpack[Where]) -> None:
    """Memory that nobody owns does not change. `changed` bool[n] says so of host tokens integer[n].

    Cost: reads the memory that is freed and handed out. Broken by reusing a run while a peer may still write into it.
    """
    made[Code.TRANSFER_LATE_WRITE] += 1
    if changed.any():
        row = first_row(changed)
        broken(
            Code.TRANSFER_LATE_WRITE,
            f"host token {tokens[row]} was written while it was nobody's",
            where,
            expected="the bytes it was left with",
            actual="other bytes",
            row=row,
            slot=int(tokens[row]),
        )


__all__ = [
    "INVARIANTS",
    "Code",
    "Invariant",
    "Level",
    "Violation",
    "Where",
    "checks",
    "current_checks",
    "first_duplicate",
    "future_consumed",
    "future_generation",
    "future_order",
    "future_unread_overwritten",
    "future_unwritten",
    "hidden_sync",
    "length_order",
    "made",
    "mirror_aliased",
    "mirror_bound",
    "mirror_equal",
    "mirror_foreign_write",
    "mirror_stale_read",
    "page_alignment",
    "page_owner",
    "race",
    "row_count",
    "sentinel_escaped",
    "set_checks",
    "slot_conservation",
    "slot_double_free",
    "slot_in_flight",
    "slot_out_of_range",
    "slot_shared",
    "slot_stale_handle",
    "slot_zero_allocated",
    "slot_zero_dirty",
    "staging_overrun",
    "staging_reused",
    "table_capacity",
    "tail_stale",
    "tier_state",
    "transfer_bounds",
    "transfer_late_write",
    "unit_mismatch",
]
