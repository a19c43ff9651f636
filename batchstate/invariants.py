"""Every invariant once, by code: what the library, its state machines and its unit tests all check.

An invariant is a question about plain arrays. It knows nothing of pools or batches, changes nothing, and answers with
a `Breach`, or with None where it holds. Three ways lead to it::

    invariants.slot_shared(slots, **where)       raises `Violation` where it is broken
    invariants.slot_shared.holds(slots)          True or False; for a place that may never build a report
    invariants.slot_shared.question(slots)       the `Breach` or None; not counted

Slot and index arrays are integer[n]. `where` is `violations.Where`: it goes into the report, the question never sees
it. Each check counts itself in `times_checked`, so that a test can show that it really ran. `INVARIANTS` lists all
invariants, with the level at which the library checks them, the remedy, and real bugs that each would have caught.
"""

import functools
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, final

import numpy as np
import numpy.typing as npt

from batchstate.violations import Breach, Code, Violation, Where

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]
Writer = Callable[[int], str]
"""Names the publish that wrote the entry of a row; called only for a report."""

P = ParamSpec("P")
Q = TypeVar("Q")

times_checked: dict[Code, int] = dict.fromkeys(Code, 0)
"""How often each invariant was checked in this process. A plain dict: a `Counter` takes three times as long."""


@final
class Invariant(Generic[P]):
    """One invariant: its question, and what a person should know of it.

    Attributes:
        code: its name.
        question: the function that answers with a `Breach` or with None.
        level: when the library checks it: `always` (arguments of a call), `cheap`, `full`, or `test` (test tools only).
        remedy: what to do when it is broken.
        origins: public threads of real bugs that it would have caught.
    """

    def __init__(self, question: Callable[P, Breach | None], level: str, remedy: str) -> None:
        functools.update_wrapper(self, question)
        self.code = Code(question.__name__.upper())
        INVARIANTS[self.code] = self
        self.question = question
        self.level = level
        self.remedy = remedy
        self.origins = _origins[question.__name__]

    def __repr__(self) -> str:
        return f"<invariant {self.code}>"

    def __reduce__(self) -> str:
        return self.question.__name__  # by reference, as a function

    @property
    def statement(self) -> str:
        """The invariant in words: the docstring of its question."""
        return (self.question.__doc__ or "").strip()

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
            """Checks and counts.

            Raises:
                Violation: the invariant is broken.
            """

    else:  # A `ParamSpec` cannot set the keys of `Where` apart; Python does, and that costs less than to pass them on.

        def __call__(self, *args, object=None, operation=None, column=None, step=None, **options):  # noqa: D102
            times_checked[self.code] += 1
            breach = self.question(*args, **options)
            if breach is not None:
                __tracebackhide__ = True
                where = {"object": object, "operation": operation, "column": column, "step": step}
                raise Violation(self.code, breach, remedy=self.remedy, where=where)

    def holds(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Checks and counts without a report: the fast path, as nothing has to be said of the place."""
        times_checked[self.code] += 1
        return self.question(*args, **kwargs) is None


INVARIANTS: dict[Code, Invariant[...]] = {}
_origins: dict[str, tuple[str, ...]] = {}


def origins(*threads: str) -> Callable[[Q], Q]:
    """Names public threads of real bugs that an invariant would have caught."""

    def note(question: Any) -> Any:
        _origins[question.__name__] = threads
        return question

    return note


def always(remedy: str) -> Callable[[Callable[P, Breach | None]], Invariant[P]]:
    """Lists the invariant of a question about the arguments of a call, which is checked at every level."""
    return lambda question: Invariant(question, "always", remedy)


def cheap(remedy: str) -> Callable[[Callable[P, Breach | None]], Invariant[P]]:
    """Lists the invariant of a question that is checked at `cheap` and `full`."""
    return lambda question: Invariant(question, "cheap", remedy)


def full(remedy: str) -> Callable[[Callable[P, Breach | None]], Invariant[P]]:
    """Lists the invariant of a question that is checked at `full`."""
    return lambda question: Invariant(question, "full", remedy)


def test(remedy: str) -> Callable[[Callable[P, Breach | None]], Invariant[P]]:
    """Lists the invariant of a question that test tools alone check."""
    return lambda question: Invariant(question, "test", remedy)


def bits(values: Array) -> Array:
    """The same memory as unsigned integers, so that NaN equals itself and -0.0 differs from 0.0."""
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(f"u{contiguous.dtype.itemsize}") if contiguous.dtype.kind == "f" else contiguous


def same(first: Array, second: Array) -> bool:
    """Whether dtype, shape and bits are equal: one comparison of memory, which suffices for nearly all checks."""
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def first_duplicate(values: Ints, *, ignore_zero: bool = False) -> int | None:
    """Row of the first value that stands in an earlier row too, or None."""
    if values.size < 2:
        return None
    in_order = values.copy()
    in_order.sort()
    if 1 not in (in_order[1:] == in_order[:-1]).tobytes():
        return None
    order = np.argsort(values, kind="stable")
    copies = in_order[1:] == in_order[:-1]
    if ignore_zero:
        copies &= in_order[1:] != 0
    return int(order[1:][copies].min()) if copies.any() else None


def first_row(hits: Mask) -> int | None:
    """The first row of bool[n, ...] with a hit, or None."""
    if 1 not in hits.tobytes():  # a fraction of what `np.count_nonzero` takes, and that takes less than `any`
        return None
    return int(_rows(hits).argmax())


def _rows(hits: Mask) -> Mask:
    return hits if hits.ndim == 1 else np.any(hits.reshape(len(hits), -1), axis=1)


# Mirrored values and the columns of a batch.


@full("one side was written or moved alone: let the operation that changed it change both sides")
@origins("sglang #25944", "sglang #26020", "sglang #18647", "vllm #48419")
def mirror_equal(host: Array, device: Array, **where: Unpack[Where]) -> Breach | None:
    """Host and device side hold the same dtype, shape and bits.

    Cost: reads the device side back. Broken by writing one side alone, or by an operation that forgets one side.
    """
    if same(host, device):
        return None
    if host.dtype != device.dtype or host.shape != device.shape:
        return _unlike(host, device)
    unequal = bits(host) != bits(device)
    row = first_row(unequal)
    problem = f"the device side differs from the host side in {_rows(unequal).sum()} of {len(host)} rows"
    if host.dtype.kind != "O" and sorted(bits(host).tolist()) == sorted(bits(device).tolist()):
        problem += ", as the same rows in another order"
    return Breach(problem, expected=host[row], actual=device[row], row=row)


@full("raise the host bound before the forward that may exceed it is launched, or bring the exact value to the host")
@origins("sglang #26128", "sglang #28480")
def mirror_bound(host: Array, device: Array, **where: Unpack[Where]) -> Breach | None:
    """Under contract `upper_bound` every host element is at least its device element.

    Cost: reads the device side back. Broken by adding on the device more than was added on the host.
    """
    if host.dtype != device.dtype or host.shape != device.shape:
        return _unlike(host, device)
    above = device > host
    if (row := first_row(above)) is None:
        return None
    problem = f"the device side exceeds the host bound in {_rows(above).sum()} of {len(host)} rows"
    return Breach(problem, expected=f"at most {host[row]}", actual=device[row], row=row)


def _unlike(host: Array, device: Array) -> Breach:
    problem = "the two sides differ in dtype or shape"
    expected = f"{host.dtype}{list(host.shape)} (host)"
    return Breach(problem, expected=expected, actual=f"{device.dtype}{list(device.shape)} (device)")


@always("read the other side, or read after the stale window has closed")
@origins("sglang #25944", "sglang #30435")
def mirror_stale_read(side: str, reasons: tuple[str, ...], **where: Unpack[Where]) -> Breach | None:
    """No side is read while a window declares it stale. `reasons` are those of the open windows of that side.

    Cost: one branch. Broken by planning with lengths that a launched verification is about to change.
    """
    if not reasons:
        return None
    problem = f"the {side} side was read while it is declared stale"
    return Breach(problem, expected=f"no read of the {side} side", actual=f"a read, although {'; '.join(reasons)}")


@cheap("values are immutable: replace the write in place by `update`, `+ n` or `replace`, which return a new value")
@origins("sglang #8056", "sglang free_group view", "vllm #50432")
def mirror_foreign_write(
    side: str, expected: int | Array, actual: int | Array, **where: Unpack[Where]
) -> Breach | None:
    """A side is as it was when the value was made.

    Cost: at `cheap` torch's counts of writes in place are compared, at `full` every row. Broken by writing in place
    through a tensor or array that the value handed out.
    """
    if isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        if same(expected, actual):
            return None
        unequal = bits(expected) != bits(actual)
        if (row := first_row(unequal)) is None:
            return None
        return Breach(
            f"the {side} side was written in place from outside, in {_rows(unequal).sum()} of {len(expected)} rows",
            expected=expected[row],
            actual=actual[row],
            row=row,
        )
    if expected == actual:
        return None
    return Breach(
        f"the {side} side was written in place from outside",
        expected="no write since the value was made",
        actual=f"at least one (mark {actual}, was {expected})",
    )


@full("give each side memory of its own: copy before pairing (`.to('cpu')` and `from_numpy` alias on CPU)")
@origins("sglang #34076", "vllm #43894")
def mirror_aliased(host: tuple[int, int], device: tuple[int, int], **where: Unpack[Where]) -> Breach | None:
    """The two sides share no byte; each is given as (first address, address after the last), empty when equal.

    Cost: four comparisons. Broken on CPU, where `.to("cpu")` and `torch.from_numpy` return the same memory: such a
    pair always agrees, and every other check on it would be vacuous.
    """
    start, stop = max(host[0], device[0]), min(host[1], device[1])
    if start >= stop:
        return None
    problem = f"host and device side share {stop - start} bytes of memory"
    return Breach(problem, expected="disjoint memory", actual=f"{start:#x} to {stop:#x} on both sides")


@cheap("every column takes part in every operation: find the operation that leaves this column out")
@origins("sglang #18647", "sglang #7585", "sglang #40629", "vllm #48419")
def row_count(expected: int, actual: Mapping[str, int], **where: Unpack[Where]) -> Breach | None:
    """Every column of a batch has exactly as many rows as the batch has requests. `actual` maps column -> rows.

    Cost: one comparison per column. Broken by an operation that forgets a column.
    """
    for column, rows in actual.items():
        if rows != expected:
            problem = f"column {column!r} has {rows} rows in a batch of {expected}"
            return Breach(problem, expected=expected, actual=rows, column=column)
    return None


@full("let the operation treat this column as it treats the others; values are changed by other operations")
@origins("sglang #18647", "vllm #48419", "sglang #40629", "vllm #43894")
def row_kept(
    expected: Array, actual: Array, *, rows: Ints | None = None, what: str = "entry", **where: Unpack[Where]
) -> Breach | None:
    """An operation that moves rows changes none: each request has in each column what it had before, and the dtype.

    Both arrays hold the requests that stayed, in one order; `rows` integer[n] says where they are now, and `what` names
    what is compared. Python objects compare by `==`.
    Cost: reads the column before and after the operation. Broken by an operation that moves a column by other rows than
    the rest, or not at all, and by merging with an empty tensor of another dtype.
    """
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return Breach(
            f"the operation changed the dtype or shape of the {what}",
            expected=f"{expected.dtype}{list(expected.shape)}",
            actual=f"{actual.dtype}{list(actual.shape)}",
        )
    if expected.dtype.kind == "O":
        if expected.tolist() == actual.tolist():
            return None
        unequal = np.array([old is not new and old != new for old, new in zip(expected, actual, strict=True)], bool)
    else:
        unequal = _rows(bits(expected) != bits(actual))
    if (row := first_row(unequal)) is None:
        return None
    problem = f"the operation gave {np.count_nonzero(unequal)} of {len(expected)} requests another {what} than they had"
    return Breach(problem, expected=expected[row], actual=actual[row], row=row if rows is None else int(rows[row]))


@cheap("padding writes the declared pad value into every padded row of every column, each step anew")
@origins("lmdeploy#4569", "sglang #15132", "sglang #18647", "vllm #42494")
def tail_stale(tail: Array, pad: object, start: int, **where: Unpack[Where]) -> Breach | None:
    """Rows beyond the last request hold the column's pad value. `tail` is those rows, `start` the first of them.

    Cost: one comparison per padded element. Broken by reusing a padded buffer without resetting its tail.
    """
    filler: Array = np.asarray(pad)
    dirty = (tail != filler) & ~((tail != tail) & (filler != filler))  # a pad of NaN is kept by NaN
    if (row := first_row(dirty)) is None:
        return None
    problem = f"{_rows(dirty).sum()} padded rows hold old values"
    return Breach(problem, expected=pad, actual=tail[row], row=start + row)


@cheap("resolve or mask placeholders before they are used as an index; -1 is the last row in Python")
@origins("sglang #36880", "sglang #25944", "vllm #40768", "vllm #48245", "vllm #43810")
def sentinel_escaped(indices: Ints, **where: Unpack[Where]) -> Breach | None:
    """No negative number is used as an index.

    Cost: one comparison per index. Broken by a placeholder such as -1 that reaches a gather, a scatter or an embedding.
    """
    if (row := first_row(indices < 0)) is None:
        return None
    return Breach("a negative placeholder is used as an index", expected="0 or more", actual=indices[row], row=row)


@always("pass indices of the expected unit; between units convert with the page size and the token count")
@origins("sglang #31482", "sglang #24039", "sglang #22453", "sglang #26427")
def unit_mismatch(expected: str, actual: str, **where: Unpack[Where]) -> Breach | None:
    """An index is used in the index space it belongs to (slot, page, location, host location).

    Cost: one comparison. Broken by page ids where locations are meant, or host locations where device ones are meant.
    """
    if expected == actual:
        return None
    values = "plain numbers" if actual == str(None) else f"indices of unit {actual!r}"
    problem = f"{values} were given where {expected!r} is meant"
    return Breach(problem, expected=expected, actual=actual)


@cheap("derive it again from the rows, pages or table as they are now, and use it before they change")
@origins("sglang #15132", "sglang #15227", "sglang #31687", "vllm #50432")
def derived_stale(
    stale: Mask,
    explain: Callable[[int], tuple[str, object, object]],
    *,
    slots: Ints | None = None,
    **where: Unpack[Where],
) -> Breach | None:
    """A derived value is used for the rows it was derived from, and while they, their pages and tables are unchanged.

    `stale`, bool[n] or one for all, marks the rows for which that does not hold. `explain` gives, for one of them, the
    problem, the expected and the actual state. `slots` integer[n] are those of the rows.
    Cost: two numbers are compared while nothing has changed, else a few comparisons per row. Broken by a plan of the
    step before, by a table write that is uploaded after its pages were released, by matching results by position.
    """
    if (row := first_row(np.atleast_1d(stale))) is None:
        return None
    problem, expected, actual = explain(row)
    slot = None if slots is None or row >= slots.size else int(slots[row])
    return Breach(problem, expected=expected, actual=actual, row=row if stale.ndim else None, slot=slot)


# Slots: who owns which row, since when, and until when.


@always("0 is padding: hand out, free, share and write indices from 1 upwards only")
@origins("sglang #23635", "sglang #24243", "vllm #39064")
def slot_zero_allocated(slots: Ints, **where: Unpack[Where]) -> Breach | None:
    """Slot 0 (page 0, location 0) is padding: it is never handed out, freed or written for a request.

    Cost: one comparison per index. Broken by a pool that counts from 0: padded rows then write a live request's row.
    """
    if (row := first_row(slots == 0)) is None:
        return None
    return Breach("index 0, which is padding, is used for a request", expected="1 or more", actual=0, row=row, slot=0)


@full("find the kernel whose padded rows store into the table, or make the table with row_zero='scratch'")
@origins("sglang #23635", "vllm #57156")
def slot_zero_dirty(row_zero: Array, **where: Unpack[Where]) -> Breach | None:
    """Row 0 of a table is all zeros, so that a padded row reads something harmless; not where it is scratch.

    Cost: reads one row back. Broken by a write to slot 0 of a table whose values are indices. `adopt` asks at every
    level.
    """
    flat = row_zero.reshape(-1)
    if not np.count_nonzero(flat):
        return None
    position = int(np.flatnonzero(flat)[0])
    problem = f"row 0 was written (first at element {position})"
    return Breach(problem, expected=0, actual=flat[position], row=0, slot=0)


@always("index a table only with entries of its pool; `size` of them are handed out, `capacity` rows are in memory")
@origins("sglang #24439", "sglang #36880", "sglang #34399", "vllm #43810")
def slot_out_of_range(slots: Ints, capacity: int, **where: Unpack[Where]) -> Breach | None:
    """Every index lies in [0, capacity).

    Cost: two comparisons per index. Broken by handles of another pool, by -1, and by capacity taken for size.
    """
    if (row := first_row((slots < 0) | (slots >= capacity))) is None:
        return None
    problem = f"index {slots[row]} lies outside"
    return Breach(problem, expected=f"0 to {capacity - 1}", actual=slots[row], row=row, slot=int(slots[row]))


@always("one owner frees, once: look for two exits of one request (finish and abort, result and retraction)")
@origins("sglang #12224", "sglang #6888", "sglang #27779", "sglang #35501", "FreeToken#204")
def slot_double_free(slots: Ints, live: Mask, **where: Unpack[Where]) -> Breach | None:
    """Each freed index is live, and named once in the call. `live` bool[n] says so for each of `slots`.

    Cost: a sort of the freed indices. Broken by two exits of one request that both free.
    """
    if (row := first_row(~live)) is not None:
        problem, expected, actual = "is freed although it is not live", "live", "free or pending"
    elif (row := first_duplicate(slots)) is not None:
        problem, expected, actual = "is freed twice in one call", "each index once", slots[row]
    else:
        return None
    return Breach(f"index {slots[row]} {problem}", expected=expected, actual=actual, row=row, slot=int(slots[row]))


@always("drop handles when their slot is freed; take the handle from the batch, do not keep it beside it")
@origins("sglang #26941", "sglang #34876", "sglang #25945", "sglang #11970")
def slot_stale_handle(slots: Ints, held: Ints, current: Ints, **where: Unpack[Where]) -> Breach | None:
    """The generation a handle holds is the slot's present one. `held` and `current` are integer[n], row by row.

    `current` is negative where the slot has no owner, and 0 where it never had one.
    Cost: one comparison per handle. Broken by keeping a slot number past its free: it then names another request.
    """
    if (row := first_row(held != current)) is None:
        return None
    owned = current[row] > 0
    why = "is older than its present owner" if owned else "outlived its owner; the slot has none now"
    problem = f"the handle of index {slots[row]} {why}"
    expected = f"generation {current[row]}" if owned else "a live slot"
    actual = f"generation {held[row]}"
    return Breach(problem, expected=expected, actual=actual, row=row, slot=int(slots[row]), generation=int(held[row]))


@cheap("a slot has one request: look for a merge of a batch with rows it already holds")
@origins("FreeToken#204", "sglang #35501", "sglang #18744")
def slot_shared(slots: Ints, **where: Unpack[Where]) -> Breach | None:
    """No two rows name the same slot; padded rows (slot 0) are left out.

    Cost: a sort of the rows. Broken by a free list that holds a slot twice, and by merging a batch with itself.
    """
    if (row := first_duplicate(slots, ignore_zero=True)) is None:
        return None
    slot, rows = int(slots[row]), f"rows {int(np.flatnonzero(slots == slots[row])[0])} and {row}"
    return Breach(f"slot {slot} belongs to two rows", expected="one row per slot", actual=rows, row=row, slot=slot)


@cheap("every exit of a request (finish, abort, retract, error) frees what it took, exactly once")
@origins("sglang #10871", "sglang #11970", "sglang #13741", "sglang #23496", "sglang #21652")
def slot_conservation(
    free: int,
    pending: int,
    live: int,
    size: int,
    *,
    leaked: Ints | None = None,
    named: Callable[[int], str] = str,
    waits: str = "",
    problem: str | None = None,
    remedy: str | None = None,
    **where: Unpack[Where],
) -> Breach | None:
    """Free + pending + live = size, each counted on its own.

    `leaked` are indices to name in the report, by `named`: those whose owner is gone or should be. `waits` names those
    that are pending. `problem` and `remedy` say it in the words of a place that knows what is being done.
    Cost: two additions at `cheap`; `verify` counts the states anew. Broken by a leak or by a free list that grew.
    """
    total = free + pending + live
    if total == size and free >= 0 and pending >= 0 and live >= 0:
        return None
    lost, slot = "", None
    if leaked is not None and leaked.size:
        slot = int(leaked[0])
        names = ", ".join(named(index) for index in leaked[:8].tolist())
        lost = f"{leaked.size} leaked: {names}{', ...' if leaked.size > 8 else ''}; without them "
    return Breach(
        problem or f"{lost}{free} free + {pending} pending{waits} + {live} live is {total}",
        expected=f"{size} in all",
        actual=total,
        slot=slot,
        remedy=remedy,
    )


@cheap("free with `after=` the fence of the last forward that reads the slot; take only what `stats.free` counts")
@origins("sglang #18744", "sglang #26376", "sglang #31687", "sglang #29352", "sglang #24527")
def slot_in_flight(slots: Ints, in_flight: Mask, *, behind: str | None = None, **where: Unpack[Where]) -> Breach | None:
    """Nothing changes owner while a forward in flight still uses it. `in_flight` bool[n] says so for each of `slots`.

    `behind` names the fence, where it is known.
    Cost: one look-up per slot. Broken by freeing at the end of planning instead of the end of the forward.
    """
    if (row := first_row(in_flight)) is None:
        return None
    problem = f"index {slots[row]} changes owner while a forward may still use it"
    actual = f"pending on {behind}" if behind else "its fence pending"
    return Breach(problem, expected="its fence complete", actual=actual, row=row, slot=int(slots[row]))


@always(
    "make the table with `pool.table(...)` of the pool whose entries index it: it then has"
    " capacity = size + reserve + 1 rows"
)
@origins("sglang #24439", "sglang #24244", "sglang #32184")
def table_capacity(rows: int, needed: int, **where: Unpack[Where]) -> Breach | None:
    """A table has a row for every index that can reach it: `needed` = the indexing pool's capacity.

    Cost: one comparison. Broken by sizing by `size` instead of `capacity`, or by the pool whose entries are the values.
    """
    if rows >= needed:
        return None
    problem = f"a table of {rows} rows is indexed by entries up to {needed - 1}"
    return Breach(problem, expected=f"at least {needed} rows", actual=rows)


@cheap("write the row when its owner begins, a default too: with `Table.write`, or with the upload of the step")
@origins("sglang #25805", "sglang #25385", "sglang #37837", "vllm #47724")
def row_unwritten(rows: Ints, written: Ints, current: Ints, **where: Unpack[Where]) -> Breach | None:
    """A row of a table is read only after its present owner has written it. All integer[n], row by row.

    `written` is the generation that each of `rows` was last written for, `current` that of its owner.
    Cost: one comparison per row. Broken by a request that leaves out a row because its value is the default: it runs
    with the adapter, the mapping or the state of the request before.
    """
    if (row := first_row(written != current)) is None:
        return None
    last = f"generation {written[row]}, which has left" if written[row] else "no request"
    problem = f"row {rows[row]} is read, and its owner has not written it"
    expected = f"written for generation {current[row]}"
    actual = f"written for {last}"
    return Breach(problem, expected=expected, actual=actual, row=row, slot=int(rows[row]), generation=int(current[row]))


@full(
    "write the map when the pages are allocated, with the upload of the step, and clear it (`table.clear`) when what "
    "it names is given back"
)
@origins("sglang #27586", "sglang #25385", "sglang #25834", "sglang #35501")
def table_link(rows: Ints, expected: Ints, actual: Ints, **where: Unpack[Where]) -> Breach | None:
    """A map from one pool to another names where the other has the same token, and 0 where that was given back.

    All integer[n]: of the locations `rows`, what the other pool says and what the map says.
    Cost: reads the map back. Broken by a map that keeps its entries when a window moves on, and by one that names
    places of the wrong pool: the next table of a chain is then read for another request.
    """
    if (row := first_row(expected != actual)) is None:
        return None
    return Breach(
        f"location {rows[row]} is mapped to another place than its token has",
        expected=expected[row] if expected[row] else "0: it was given back",
        actual=actual[row],
        row=row,
        slot=int(rows[row]),
    )


@cheap("plan each forward with `state_turns`, and declare it with `launched` once: a request counts its own turns")
@origins("sglang #22542", "sglang #37837", "sglang #23496", "sglang #29792")
def state_turn(slots: Ints, now: Ints, given: Ints, unit: str, **where: Unpack[Where]) -> Breach | None:
    """A forward reads the state that the request's own last forward has written. All integer[n], row by row.

    `unit` is "state" where it is planned, and "turn", by number, where it is launched: of two states, the one that was
    right is right again two turns later. Cost: one comparison per row. Broken by a parity of the step: a request that
    sat a step out reads the older state. Or by a forward that is declared twice.
    """
    if (row := first_row(now != given)) is None:
        return None
    problem = f"the request on slot {slots[row]} is given another {unit} than its next"
    return Breach(problem, expected=f"{unit} {now[row]}", actual=f"{unit} {given[row]}", row=row, slot=int(slots[row]))


@always("make the same calls on every rank, in the same order; decide by what is agreed, as `Agreement.watch` says it")
@origins("sglang #36928", "sglang #28039")
def ranks_differ(held: Ints, **where: Unpack[Where]) -> Breach | None:
    """The ranks of a group have memory of the same sizes, and the same indices, lengths and rows were used in each.

    `held` integer[ranks, 3]: fences that were freed behind, a digest of capacities, a digest of what happened since.
    Cost: once per exchange, three comparisons per rank. Broken by a rank that reaps what it alone has seen complete: it
    has other free slots than the rest, and admits what they cannot. Or by one that measured more free memory.
    """
    if (row := first_row((held != held[:1]).any(axis=1))) is None:
        return None
    other = "pools or graphs of other sizes" if held[row, 1] != held[0, 1] else "used other indices, lengths or rows"
    words = "{} fences, memory {:08x}, calls {:08x}"
    expected, actual = words.format(*held[0]), words.format(*held[row])
    return Breach(f"rank {row} of {len(held)} has {other} than rank 0", expected=expected, actual=actual, row=row)


# Pages and token lengths.


@full("take, share and release pages through the pool only; to keep a page, hold a reference to it")
@origins("sglang #28754", "sglang #35501", "sglang #24527", "FreeToken#204", "sglang #36457")
def page_owner(held: Ints, recorded: Ints, *, pages: Ints | None = None, **where: Unpack[Where]) -> Breach | None:
    """Each page has as many references recorded as holders. Both are integer[n], of `pages` int[n] or of page 0 to n-1.

    A free page has no holder, an owned one is in no free list (`held` counts -1 for each place in the free list, and
    `recorded` is -1 for a free page), and a live one has a holder. Cost: one pass over the pages. Broken by handing a
    page out twice.
    """
    if (row := first_row(held != recorded)) is None:
        return None
    page = row if pages is None else int(pages[row])
    problem = f"page {page} has other holders than it has references"
    if recorded[row] == -1:
        holders = f"is free and has {held[row] + 1} holders" if held[row] >= 0 else f"is free {-held[row]} times"
        problem = f"page {page} {holders}"
    expected = f"{recorded[row]} (recorded; -1 is free)"
    return Breach(problem, expected=expected, actual=f"{held[row]} (counted)", slot=page)


@always("share, hold and truncate at whole pages: round the token count down to a multiple of the page size")
@origins("sglang #4913", "sglang #27789", "sglang #14439", "sglang #27779")
def page_alignment(tokens: Ints, page_size: int, **where: Unpack[Where]) -> Breach | None:
    """Token counts at which ownership of pages changes are multiples of the page size.

    Cost: one remainder per count. Broken by sharing or releasing a page of which a part is in use.
    """
    if page_size == 1 or (row := first_row(tokens % page_size != 0)) is None:
        return None
    problem = f"{tokens[row]} tokens end inside a page"
    return Breach(problem, expected=f"a multiple of {page_size}", actual=tokens[row], row=row)


@cheap(
    "use tokens after the forward that writes them: `inputs` of its step notes it, or `resolve_forward_inputs` of "
    "a plan with `pages=`; if a step was dropped, `step.rollback(after=...)`; after the launch of other work "
    "`pages.commit(slots, total_lens)`, for the memory that is named `pages.mark_written`"
)
@origins("sglang #22453", "sglang #27258", "vllm #36013")
def page_unwritten(tokens: Ints, written: Ints, **where: Unpack[Where]) -> Breach | None:
    """Tokens are shared, held, sent, copied out or built on only after the work that writes their KV was launched.

    The first `tokens` integer[n] of each request are read by others or the next step, and writes of the first `written`
    are launched, in a memory that the report names unless it is the one of forwards. Cost: one comparison per request
    and memory. Broken by a prefix that is cached when its pages are allocated, or before the draft model has run, and
    by a step behind one that was planned and dropped: what comes next reads what the last owner of the pages left.
    """
    if (row := first_row(tokens > written)) is None:
        return None
    problem = f"{tokens[row]} tokens are to be read, and nothing has written them all"
    return Breach(problem, expected=f"at most {written[row]}, whose writes are launched", actual=tokens[row], row=row)


@always(
    "read from the first position that the request still has: name the window (`window=`) of what is planned, and give "
    "back (`truncate(first=)`) no more than every reader is beyond"
)
@origins("sglang #29350", "sglang #31687", "vllm #17398")
def page_released(reads: Ints, first: Ints, *, slots: Ints | None = None, **where: Unpack[Where]) -> Breach | None:
    """Nothing reads positions whose pages were given back in front, as those before a sliding window are.

    `reads` integer[n] are the first positions that are read, `first` those that the requests still have.
    Cost: none while nothing was given back, else one comparison per request. Broken by a prefix that goes to a cache
    after its first pages have left the window, and by full attention over pages of a window.
    """
    if (row := first_row(reads < first)) is None:
        return None
    problem = f"position {reads[row]} is read, and the pages of the positions before {first[row]} were given back"
    slot = None if slots is None else int(slots[row])
    return Breach(problem, expected=f"{first[row]} or later", actual=reads[row], row=row, slot=slot)


@full("make KV memory of zeros, and find the kernel that stores into padding what is not finite")
@origins("vllm #57156", "sglang #35351", "vllm #42494")
def page_zero_finite(finite: Mask, **where: Unpack[Where]) -> Breach | None:
    """The KV of page 0, which padded rows and masked positions read, is finite. `finite` bool[n] says so of each token.

    A masked score times NaN is NaN, so that one such token spoils every row that has padding.
    Cost: reads one page of each KV buffer. Broken by memory that was never written, and by graphs that were captured
    over dummy inputs.
    """
    if (row := first_row(~finite)) is None:
        return None
    problem = f"the KV of token {row} of page 0, which is padding, is not finite"
    return Breach(problem, expected="finite numbers", actual="NaN or infinity", row=row, slot=0)


@always("grow before committing; never commit more tokens than are allocated, nor ask for more than a row holds")
@origins("sglang #28754", "sglang #13741", "sglang #27731", "sglang #12224")
def length_order(
    committed: Ints,
    allocated: Ints,
    width: int,
    *,
    explain: Callable[[int, int, int], tuple[str, str]] | None = None,
    **where: Unpack[Where],
) -> Breach | None:
    """0 <= committed <= allocated <= row width, in tokens, for each request.

    `explain` describes the request from the three numbers: the problem and the remedy.
    Cost: three comparisons per request. Broken by committing speculated tokens before they are allocated.
    """
    if (row := first_row((committed < 0) | (committed > allocated) | (allocated > width))) is None:
        return None
    least, most = int(committed[row]), int(allocated[row])
    if explain is not None:
        problem, remedy = explain(least, most, width)
        limit, number = (most, least) if not 0 <= least <= most else (width, most)
        return Breach(problem, expected=f"0 to {limit}", actual=number, row=row, remedy=remedy)
    expected = f"0 <= committed <= allocated <= {width}"
    actual = f"committed {least}, allocated {most}"
    return Breach("token lengths are out of order", expected=expected, actual=actual, row=row)


# The relay: every entry is written once and read once, by its owner, in the order of the streams.


@cheap(
    "publish the field for this request before it is read; for a request that arrives prebuilt, or comes back, "
    "publish it from the host first"
)
@origins("sglang #25945", "vllm #40768", "vllm #48245", "sglang #27258")
def future_unwritten(slots: Ints, written: Mask, reader: str, **where: Unpack[Where]) -> Breach | None:
    """An entry is read only after it was published for the slot's present owner. `written` bool[n].

    Cost: one mask. Broken by a first decode step without a token to start from, and by a placeholder for one.
    """
    if (row := first_row(~written)) is None:
        return None
    slot, writer = int(slots[row]), "not written"
    problem = f"the entry of slot {slot} was read before it was published"
    return Breach(problem, expected="published", actual="unwritten", row=row, slot=slot, writer=writer, reader=reader)


@cheap("entries end with their owner: free slots through their pool, and drop results of requests that have left")
@origins("sglang #11970", "sglang #11976", "sglang #18744")
def future_generation(
    slots: Ints, published: Ints, held: Ints, writer: Writer, reader: str, **where: Unpack[Where]
) -> Breach | None:
    """An entry is read by the request that it was published for. Generations int64[n], row by row.

    Cost: one comparison. Broken by a slot that is reused with the entry of its former owner still in it.
    """
    if (row := first_row(published != held)) is None:
        return None
    return Breach(
        f"the entry of slot {slots[row]} was published for another request",
        expected=f"generation {held[row]}",
        actual=f"generation {published[row]}",
        row=row,
        slot=int(slots[row]),
        generation=int(held[row]),
        writer=writer(row),
        reader=reader,
    )


@cheap(
    "a published value is taken once by each of its readers: look for a forward that ran twice, a step whose "
    "publish was left out, inputs installed again after they were used, or `step.results` beside `prefetch`"
)
@origins("sglang #25945", "sglang #11970", "sglang #18647")
def future_consumed(slots: Ints, taken: Mask, writer: Writer, reader: str, **where: Unpack[Where]) -> Breach | None:
    """A published entry is taken at most once by each of its readers. `taken` bool[n] marks what this one has read.

    Cost: one mask. Broken by reading again what the last forward read: the step then repeats an old token.
    """
    if (row := first_row(taken)) is None:
        return None
    slot, by = int(slots[row]), writer(row)
    problem = f"the entry of slot {slot} was read before, and was not published anew"
    return Breach(problem, expected="published", actual="consumed", row=row, slot=slot, writer=by, reader=reader)


@cheap(
    "read every entry before the next publish (`prefetch` what the host needs right after the forward), or `discard` "
    "what is not wanted; a chunk of a prompt that is not its last samples nothing: say so in the plan, `samples=`"
)
@origins("sglang-jax#1487", "sglang-jax#1504", "sglang #13713", "sglang #30435")
def future_unread_overwritten(
    slots: Ints, unread: Mask, before: Writer, writer: str, readers: str, **where: Unpack[Where]
) -> Breach | None:
    """An entry is overwritten only after each of its readers has taken it. `unread` bool[n].

    Cost: one mask. Broken by a relay ring that wraps, by two publishes in one step, and by results never fetched.
    """
    if (row := first_row(unread)) is None:
        return None
    slot, expected, reader = int(slots[row]), f"read by {readers}", "not read yet"
    problem = f"the entry of slot {slot} by {before(row)} would be overwritten unread"
    return Breach(problem, expected=expected, actual="unread", row=row, slot=slot, writer=writer, reader=reader)


@cheap("wait for the fence of the very publish that wrote the entry, and give each publish a fence of its own")
@origins("sglang #30435", "sglang #30471", "vllm #51571", "vllm #36013", "sglang #26376")
def future_order(ordered: bool, writer: str, reader: str, missing: str, **where: Unpack[Where]) -> Breach | None:
    """A use of an entry is ordered after the publish that wrote it, and after those that read it, by their fences.

    `missing` names the order that must hold. Cost: a set lookup or the query of a fence for each publish, not for each
    row. Broken by one event for two publishers, and by a host that reads before its copy has run.
    """
    if ordered:
        return None
    problem = f"nothing orders {reader} after {writer}"
    return Breach(problem, expected=missing, actual="no wait for that fence", writer=writer, reader=reader)


# A step: what may wait, how deep steps may overlap, whose the memory of a transfer is, what comes first.


@test("read the host side of the mirrored value, or call `resolve`/`synchronize`, whose names say that they wait")
@origins("sglang #26425", "sglang #29420", "sglang #34782", "sglang #27689", "sglang #28491")
def hidden_sync(call: str, allowed: bool, **where: Unpack[Where]) -> Breach | None:
    """Nothing waits for the device but calls named for it. `call` is what was about to wait.

    Cost: none at run time; test tools intercept. Broken by `.item()`, `.tolist()`, `.cpu()` or a boolean index.
    """
    if allowed:
        return None
    return Breach(f"`{call}` on a device tensor waits for the device", expected="no synchronisation", actual=call)


@cheap("declare the true depth: open the runtime with a larger `steps_in_flight`, or wait for older steps first")
@origins("TRT-LLM#18485", "sglang #13713", "sglang-jax#1487", "vllm #24527")
def staging_overrun(oldest: int, fence: object, now: int, depth: int, **where: Unpack[Where]) -> Breach | None:
    """When step s begins, the uploads of step s - depth and older have run.

    `oldest` is the oldest step with an upload that has not, `fence` behind it. Cost: one query of a fence. Broken by an
    engine that runs deeper than it declared, and by an upload on a stream that nothing waits for.
    """
    if oldest > now - depth:
        return None
    problem = f"an upload of step {oldest}, {fence!r}, has not run when step {now} begins"
    return Breach(problem, expected=f"at most {depth} steps in flight", actual=now - oldest + 1)


@cheap("give a block of host memory back when its values have been taken out, and never before its copy has run")
@origins("vllm #51571", "vllm #36013", "pytorch #68749")
def staging_reused(held: int, current: int, **where: Unpack[Where]) -> Breach | None:
    """Host memory that a copy from the device landed in is still lent to that copy when its values are taken out.

    `held` is the number under which it was lent, `current` that of its last lending; 0 when it is not lent.
    Cost: one comparison. Broken by a ring of landing buffers that turns once per call, or that is read a step too late.
    """
    if held == current:
        return None
    problem = "the host memory of a copy from the device was given to another before its values were taken out"
    return Breach(problem, expected=f"lending {held}", actual=f"lending {current}" if current else "not lent")


@test("let the stream of the second access wait for a fence recorded after the first")
@origins(
    "sglang #18744", "sglang #26376", "sglang #30471", "sglang #34076", "vllm #24527", "vllm #36013", "vllm #29623"
)
def race(ordered: bool, problem: str, missing: str, remedy: str | None = None, **where: Unpack[Where]) -> Breach | None:
    """Two accesses to the same memory, one of them a write, are ordered by streams, fences and waits of the host.

    `problem` names both, `missing` the order that is not there. Freeing memory counts as a write of the stream that it
    was allocated on. Cost: none at run time; the race detector checks. Broken by a missing wait, by a host that refills
    or reads memory before its copy has run, by slots that get a new owner too early, by memory that another stream
    uses unprotected.
    """
    return None if ordered else Breach(problem, expected="an order", actual=missing, remedy=remedy)


# The host tier, and what another process writes into it.


@always("follow the states: reserve or stage, wait until the KV is there, admit, decode, release")
@origins("sglang #27258", "sglang #21591", "sglang #22453")
def tier_state(
    slots: Ints,
    states: Ints,
    allowed: tuple[int, ...],
    names: tuple[str, ...],
    *,
    missing: Ints | None = None,
    **where: Unpack[Where],
) -> Breach | None:
    """An operation on a request in the host tier goes with its state. `states` integer[n], of `slots` integer[n].

    `allowed` are the states in which the operation is meant, `names` the name of each state by number; `missing`
    integer[n] says, where the operation needs all of the KV, of how many tokens it has not arrived.
    Cost: one comparison per request. Broken by decoding a request whose KV has not arrived.
    """
    wrong = states != allowed[0]
    for state in allowed[1:]:
        wrong &= states != state
    if (row := first_row(wrong)) is not None:
        name = names[int(states[row])]
        problem = f"the request on slot {slots[row]} is {name}"
        expected = " or ".join(names[state] for state in allowed)
        return Breach(problem, expected=expected, actual=name, row=row, slot=int(slots[row]))
    if missing is None or (row := first_row(missing != 0)) is None:
        return None
    return Breach(
        f"the KV of the request on slot {slots[row]} has not arrived",
        expected="all of it, and a writer that has ended",
        actual=f"{missing[row]} tokens are missing" if missing[row] > 0 else f"{-missing[row]} tokens too many",
        row=row,
        slot=int(slots[row]),
        remedy="admit when the lease of the request is DELIVERED; abort it when the lease has failed",
    )


@always("write only rows of the granted run, inside the registered memory, and as many as were agreed on")
@origins("sglang #31482", "sglang #24527", "sglang #14439")
def transfer_bounds(
    starts: Ints, lengths: Ints, least: Ints | int, most: Ints | int, *, what: str = "bytes", **where: Unpack[Where]
) -> Breach | None:
    """Each row [start, start + length) lies in [least, most), and none is empty. All integer[n], bounds also numbers.

    At `full` a sender also checks the place in a token's KV: each row goes to the layer and heads it comes from.
    Cost: four comparisons per row. Broken by an index of another space, by a destination that is not the request's, or
    by layers of two stages that are paired by position.
    """
    if (row := first_row((starts < least) | (lengths <= 0) | (lengths > most - starts))) is None:
        return None
    low = least if isinstance(least, int) else least[row]
    high = most if isinstance(most, int) else most[row]
    problem = f"row {row} of a transfer covers {lengths[row]} {what} from {starts[row]} on"
    expected = f"inside {low} to {high} (exclusive)"
    return Breach(problem, expected=expected, actual=f"{starts[row]}, {lengths[row]} long", row=row)


@full("keep the memory of a failed transfer until its writer has ended; never free it by time-out alone")
@origins("sglang #24527", "sglang #35049", "sglang #27372", "sglang #38961", "vllm #32255")
def transfer_late_write(locations: Ints, changed: Mask, **where: Unpack[Where]) -> Breach | None:
    """Memory without an owner does not change. `changed` bool[n] says so of host locations integer[n].

    Checked for memory that the host can address, and not for an accelerator's own (`KVBuffer(on_device=True)`).
    Cost: reads the memory that is freed and handed out. Broken by reusing a run while a peer may still write into it.
    """
    if (row := first_row(changed)) is None:
        return None
    location = int(locations[row])
    problem = f"host location {location} was written while it had no owner"
    return Breach(problem, expected="the bytes it was left with", actual="other bytes", row=row, slot=location)


@cheap("`send` what was granted, `fail` a transfer that will not come, and `hold` one whose request waits its turn")
@origins("sglang #34457", "sglang #28652")
def transfer_idle(polls: Ints, most: int, requests: Sequence[str], **where: Unpack[Where]) -> Breach | None:
    """A transfer that was granted goes on: each has been sent for, or held, within `most` polls of its writer.

    `polls` integer[n] are those since then, of the transfers of n `requests` that are open and not all sent.
    Cost: one comparison per transfer. Broken by a part of a request that nothing starts: the receiver waits forever.
    """
    if (row := first_row(polls > most)) is None:
        return None
    problem = f"the transfer of {requests[row]!r} was granted, and nothing is sent for it"
    return Breach(problem, expected=f"`send`, `fail` or `hold` within {most} polls", actual=f"{polls[row]}", row=row)


@always("keep the secret between the two peers; a peer that was started again has a new endpoint, with a new one")
@origins("vllm #17192", "vllm #15988", "vllm #17197", "sglang #24618", "sglang #21435")
def peer_unknown(
    expected: bytes, actual: bytes, callers: int = 0, most: int = 0, **where: Unpack[Where]
) -> Breach | None:
    """Data taken as a peer's, a MAC or a message, was made by that peer; at most `most` unknown callers are kept.

    `expected` is computed here, `actual` came from outside; they are compared in constant time. `callers` have
    connected and not proved that they know the secret.
    Cost: a comparison of 32 bytes per message. Broken by a port that trusts every caller.
    """
    if callers > most:
        return Breach(f"{callers} unknown callers are kept", expected=f"{most} at most", actual=callers)
    if hmac.compare_digest(expected, actual):
        return None
    return Breach("what came is not what the peer has made", expected=expected[:64], actual=actual[:64])
