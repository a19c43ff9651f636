"""The origin of a derived value, so that using it late is noticed before anything is launched.

A plan, an extension, a table write, filled buffers and results on their way to the host are made of rows of requests,
and some of them of pages or table rows that change. Each carries an `Origin`, or a `RowSet` if nothing but the rows
counts. Rows are matched by handle, never by position.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.invariants import times_checked
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.mirror import MirroredTensor

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Handles = tuple[Ints, Ints]

_DERIVED_STALE = Code.DERIVED_STALE
KEPT = 64
"""Changes whose operations reports can still name."""


@final
class Changes:
    """Changes of slot-indexed rows that make values derived from them stale, numbered from 1.

    A derived value notes the last one: while nothing changes, a check compares two numbers.

    Attributes:
        what: whose rows, for reports.
        last: number of the last change.
        rows: int64[capacity], number of the last change of each row; 0 before the first.
        by: the number of a change, the operation that made it, and its step; of the last `KEPT`, by number modulo that.
    """

    __slots__ = ("by", "last", "rows", "what")

    def __init__(self, capacity: int, subject: str) -> None:
        self.what = subject
        self.last = 0
        self.rows = np.zeros(capacity, dtype=np.int64)
        self.by: list[tuple[int, str, int]] = [(0, "", 0)] * KEPT

    def note(self, rows: Ints, operation: str, step: int) -> None:
        """Numbers a change of rows int64[n]."""
        self.last = last = self.last + 1
        self.rows[rows] = last
        self.by[last % KEPT] = last, operation, step

    def since(self, rows: Ints, then: int) -> npt.NDArray[np.bool_]:
        """Whether each row has changed since change number `then` was the last, bool[n]."""
        changed: npt.NDArray[np.bool_] = self.rows[rows] > then
        return changed


@final
@attrs.define(eq=False, repr=False)
class RowSet:
    """The requests that the rows of a value belong to, in order. Padded rows at the end belong to none.

    Attributes:
        number: the version of the first batch that had these rows; 0 for rows of no batch.
        pool_id: id of the pool of the slots.
    """

    number: int
    _handles: Handles | Callable[[], Handles] | None
    pool_id: int

    def __repr__(self) -> str:
        return f"rows of batch version {self.number}" if self.number else "rows of no batch"

    @property
    def handles(self) -> Handles | None:
        """Slots and generations, int64[n] each, or None."""
        if callable(self._handles):
            self._handles = self._handles()
        return self._handles

    def taken(self, rows: Ints | slice) -> "RowSet | None":
        """The requests of some rows."""
        handles = self.handles
        return None if handles is None else RowSet(0, (handles[0][rows], handles[1][rows]), self.pool_id)

    def check_same(self, other: "RowSet", subject: object, **where: Unpack[Where]) -> None:
        """Refuses `other`, the rows of `subject`, unless row i of both belongs to one request.

        `subject` is a value, which is described only in a report, or words. Raises DERIVED_STALE, at `cheap`.
        """
        if not levels.cheap:
            return
        if self.number and self.number == other.number:
            times_checked[_DERIVED_STALE] += 1
            return
        handles, others = self.handles, other.handles
        if handles is None or others is None:
            differ = np.array(self.number != 0 and other.number != 0)
        else:
            mine, theirs = _keys(handles), _keys(others)
            short, differ = sorted((mine, theirs), key=len)
            differ = differ != 0  # padded rows are 0
            differ[: short.size] = mine[: short.size] != theirs[: short.size]
            differ |= self.pool_id != other.pool_id

        def explain(row: int) -> tuple[str, object, object]:
            named = subject if isinstance(subject, str) else getattr(subject, "label", repr(subject))
            problem = f"{named} was derived from {other!r}, and is used for {self!r}"
            return problem, self._named(row), other._named(row)

        invariants.derived_stale(differ, explain, **where)

    def _named(self, row: int) -> str:
        if self.handles is None:
            return repr(self)
        slots, generations = self.handles
        return f"slot {slots[row]}, generation {generations[row]}" if row < slots.size else "no request"

    def rows_of(self, wanted: "RowSet", subject: str, **where: Unpack[Where]) -> Ints | None:
        """The row here of each request of `wanted`, int64[n]; None if the rows are the same. Others are left out.

        Raises DERIVED_STALE (at every level: a request has no row here).
        """
        handles, others = self.handles, wanted.handles
        if (self.number and self.number == wanted.number) or handles is None or others is None:
            return None
        same_pool = self.pool_id == wanted.pool_id
        if same_pool and [part.tobytes() for part in handles] == [part.tobytes() for part in others]:
            return None
        mine, theirs = _keys(handles), _keys(others)
        rows, missing = np.zeros(theirs.size, dtype=np.int64), np.ones(theirs.size, dtype=np.bool_)
        if same_pool and mine.size:
            order = mine.argsort(kind="stable")
            rows = order.take(mine.searchsorted(theirs, sorter=order), mode="clip")
            missing = mine[rows] != theirs

        def explain(row: int) -> tuple[str, object, object]:
            return f"{subject} has no row for a request", wanted._named(row), "a row of another request, or none"

        if np.count_nonzero(missing):
            invariants.derived_stale(missing, explain, slots=others[0], **where)
        return rows

    def in_order_of(self, wanted: "RowSet", values: Array, subject: str, **where: Unpack[Where]) -> Array:
        """`values`, whose row i is of request i here, with a row for each request of `wanted`; see `rows_of`."""
        rows = self.rows_of(wanted, subject, **where)
        return values if rows is None else values[rows]


def _keys(handles: Handles) -> Ints:
    """One number for each request, int64[n], 0 for padding."""
    return (handles[1] << 32) + handles[0]


def joined(parts: "list[RowSet | None]") -> RowSet | None:
    """The requests of all parts in order; None if those of a part are unknown, or parts are of several pools."""
    handles = [part.handles for part in parts if part is not None and part.handles is not None]
    pools = {part.pool_id for part in parts if part is not None}
    if len(handles) < len(parts) or len(pools) != 1:
        return None
    slots, generations = (np.concatenate(arrays) for arrays in zip(*handles, strict=True))
    return RowSet(0, (slots, generations), *pools)


@final
@attrs.define(eq=False, repr=False)
class Origin:
    """The rows that a value was derived from, and the changing rows that it depends on besides.

    Attributes:
        kind: of the derived value, in a word.
        step: of the runtime, when it was derived.
        of: whose rows they are: a row set, or a value that has one.
        read: the changes of pages or table rows that it depends on, or None.
        then: the number of the last of these when it was derived.
    """

    kind: str
    step: int
    of: "RowSet | MirroredTensor"
    read: Changes | None = None
    then: int = 0

    def __repr__(self) -> str:
        return f"the {self.kind} of step {self.step}"

    @property
    def rows(self) -> RowSet | None:
        """The requests that the rows belong to."""
        return self.of if isinstance(self.of, RowSet) else self.of.row_set

    def check(self, **where: Unpack[Where]) -> None:
        """Refuses it if the rows it read have changed since: two numbers are compared while none has, else O(rows).

        Raises DERIVED_STALE, at `cheap`.
        """
        changes, then = self.read, self.then
        if changes is None or not levels.cheap:
            return
        if changes.last == then:
            times_checked[_DERIVED_STALE] += 1
            return
        rows = self.rows
        handles = None if rows is None else rows.handles
        if handles is None:
            return
        slots, _ = handles

        def explain(row: int) -> tuple[str, object, object]:
            slot = int(slots[row])
            number = int(changes.rows[slot])
            last, operation, step = changes.by[number % KEPT]
            problem = f"{self!r} was derived from the {changes.what} of index {slot}, which have changed since"
            made = f": {operation} in step {step}" if last == number else ""
            return problem, f"change {then} or before", f"change {number}{made}"

        invariants.derived_stale(changes.since(slots, then), explain, slots=slots, **where)

    def check_rows(self, rows: RowSet, **where: Unpack[Where]) -> None:
        """Refuses to be used for other rows. Raises DERIVED_STALE, at `cheap`."""
        if self.rows is not None:
            rows.check_same(self.rows, self, **where)


@final
class DerivedArrays(dict[str, npt.NDArray[Any]]):
    """Arrays by name that know their origin; a union with others keeps it."""

    __slots__ = ("origin",)

    def __init__(self, arrays: Any, origin: Origin) -> None:
        super().__init__(arrays)
        self.origin = origin

    def __or__(self, other: Any) -> Any:
        return DerivedArrays({**self, **other}, self.origin)

    def __ror__(self, other: Any) -> Any:
        return DerivedArrays({**other, **self}, self.origin)
