"""A broken invariant: its code, and a report that a person can act on."""

import enum
from collections.abc import Callable
from typing import Any, TypedDict

import attrs

from batchstate.errors import BatchStateError


class Code(enum.StrEnum):
    """The invariants by name. Each is the function in `batchstate.invariants` that has this name in lower case."""

    MIRROR_EQUAL = "MIRROR_EQUAL"
    MIRROR_BOUND = "MIRROR_BOUND"
    MIRROR_STALE_READ = "MIRROR_STALE_READ"
    MIRROR_FOREIGN_WRITE = "MIRROR_FOREIGN_WRITE"
    MIRROR_ALIASED = "MIRROR_ALIASED"
    ROW_COUNT = "ROW_COUNT"
    ROW_KEPT = "ROW_KEPT"
    SLOT_ZERO_ALLOCATED = "SLOT_ZERO_ALLOCATED"
    SLOT_ZERO_DIRTY = "SLOT_ZERO_DIRTY"
    SLOT_OUT_OF_RANGE = "SLOT_OUT_OF_RANGE"
    SLOT_DOUBLE_FREE = "SLOT_DOUBLE_FREE"
    SLOT_STALE_HANDLE = "SLOT_STALE_HANDLE"
    SLOT_SHARED = "SLOT_SHARED"
    SLOT_CONSERVATION = "SLOT_CONSERVATION"
    SLOT_IN_FLIGHT = "SLOT_IN_FLIGHT"
    TABLE_CAPACITY = "TABLE_CAPACITY"
    ROW_UNWRITTEN = "ROW_UNWRITTEN"
    TABLE_LINK = "TABLE_LINK"
    STATE_TURN = "STATE_TURN"
    RANKS_DIFFER = "RANKS_DIFFER"
    PAGE_OWNER = "PAGE_OWNER"
    PAGE_ALIGNMENT = "PAGE_ALIGNMENT"
    PAGE_UNWRITTEN = "PAGE_UNWRITTEN"
    PAGE_RELEASED = "PAGE_RELEASED"
    PAGE_ZERO_FINITE = "PAGE_ZERO_FINITE"
    LENGTH_ORDER = "LENGTH_ORDER"
    TAIL_STALE = "TAIL_STALE"
    SENTINEL_ESCAPED = "SENTINEL_ESCAPED"
    UNIT_MISMATCH = "UNIT_MISMATCH"
    DERIVED_STALE = "DERIVED_STALE"
    HIDDEN_SYNC = "HIDDEN_SYNC"
    STAGING_OVERRUN = "STAGING_OVERRUN"
    STAGING_REUSED = "STAGING_REUSED"
    FUTURE_UNWRITTEN = "FUTURE_UNWRITTEN"
    FUTURE_UNREAD_OVERWRITTEN = "FUTURE_UNREAD_OVERWRITTEN"
    FUTURE_CONSUMED = "FUTURE_CONSUMED"
    FUTURE_GENERATION = "FUTURE_GENERATION"
    FUTURE_ORDER = "FUTURE_ORDER"
    TIER_STATE = "TIER_STATE"
    TRANSFER_BOUNDS = "TRANSFER_BOUNDS"
    TRANSFER_LATE_WRITE = "TRANSFER_LATE_WRITE"
    TRANSFER_IDLE = "TRANSFER_IDLE"
    PEER_UNKNOWN = "PEER_UNKNOWN"
    RACE = "RACE"

    __hash__ = str.__hash__  # an enum's own is Python code, and every check counts itself in a dict of codes


class Where(TypedDict, total=False):
    """Where an invariant is checked: what each takes besides the values of its question.

    Keys:
        object: the value, pool or table; its `repr` is taken only for a report.
        operation: the public operation under way.
        column: the column of a batch.
        step: the runtime's step number.
    """

    object: object
    operation: str
    column: str
    step: int


@attrs.frozen
class Breach:
    """The answer of a question whose invariant is broken. `Violation` adds code, remedy and place.

    `remedy` and `column`, if given, replace those of the invariant and of the place.
    """

    problem: str
    expected: object = attrs.field(kw_only=True)
    actual: object = attrs.field(kw_only=True)
    row: int | None = attrs.field(default=None, kw_only=True)
    slot: int | None = attrs.field(default=None, kw_only=True)
    generation: int | None = attrs.field(default=None, kw_only=True)
    writer: str | None = attrs.field(default=None, kw_only=True)
    reader: str | None = attrs.field(default=None, kw_only=True)
    column: str | None = attrs.field(default=None, kw_only=True)
    remedy: str | None = attrs.field(default=None, kw_only=True)


observers: list[Callable[["Violation"], None]] = []
"""Called with each violation when it is made: a recording writes its file then."""


class Violation(BatchStateError, RuntimeError):
    """An invariant was found broken. The state is as it was before the operation, unless the breach was older.

    Attributes:
        code: which invariant.
        object, operation, column, step: where (see `Where`); None when unknown.
        row: row of the value or batch, or None.
        slot: slot, page or location that the report is about, or None.
        generation: generation of the slot, or None.
        writer, reader: of a relay entry: which publish wrote it, and who reads it; None elsewhere.
        expected, actual: the demanded and the present state.
    """

    def __init__(self, code: Code, breach: Breach, *, remedy: str, where: Where) -> None:
        super().__init__(breach.problem, breach.actual, remedy if breach.remedy is None else breach.remedy)
        self.code = code
        self.expected, self.actual = breach.expected, breach.actual
        self.row, self.slot, self.generation = breach.row, breach.slot, breach.generation
        self.writer, self.reader = breach.writer, breach.reader
        named = where.get("object")
        self.object: str | None = named if named is None or isinstance(named, str) else repr(named)
        self.operation, self.step = where.get("operation"), where.get("step")
        self.column = breach.column or where.get("column")
        for observer in observers:
            observer(self)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for logs and JSON."""
        fields = {name: getattr(self, name) for name in _PLACE}
        words = {"expected": str(self.expected), "actual": str(self.actual), "remedy": self.remedy}
        return {"code": self.code.value, "problem": self.problem, **fields, **words}

    def __str__(self) -> str:
        fields = {name: getattr(self, name) for name in (*_PLACE, "expected", "actual", "remedy")}
        lines = [f"  {name:<10} {value}" for name, value in fields.items() if value is not None or name not in _PLACE]
        return "\n".join([f"{self.code}: {self.problem}", *lines])


_PLACE = ("object", "operation", "column", "row", "slot", "generation", "step", "writer", "reader")
"""Attributes that say where, in the order of a report; those that are None are left out."""
