"""The machine behind `batchstate.testing.twins`: any batch class with twins kept by hand."""

from typing import Any, ClassVar, final

import attrs
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, precondition, rule

from batchstate import invariants
from batchstate.contracts import Contract
from batchstate.testing.machine import DisagreementError, Machine
from batchstate.testing.strategies import keep_lists
from batchstate.testing.twin_reading import Seen, attribute, memory, seen
from batchstate.testing.twin_spec import Twin, TwinSpec


@final
@attrs.define(eq=False)
class Held:
    """A batch and its attributes as they have to be; `name` is how a report calls it."""

    batch: Any
    name: str
    columns: dict[str, Seen] = attrs.field(factory=dict)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"<{self.name}>")


class TwinMachine(Machine):
    """Builds, filters, merges and advances; subclasses name the class in `spec`."""

    NAME = "twins"

    spec: ClassVar[TwinSpec[Any, Any]]

    batches = Bundle("batches")

    @initialize()
    def begin(self) -> None:
        """No batch yet."""
        self.open()
        self.alive: list[Held] = []

    def judge(self) -> None:
        """The twins of every batch agree, and no operation on one batch changed another."""
        for held in self.alive:
            self._laws(held, "judge")
            self._unchanged(held, held.columns, "an operation on another batch changed it")

    # Rules

    @rule(target=batches, data=st.data())
    def build(self, data: st.DataObject) -> Held:
        """Requests arrive."""
        spec = self.spec
        rows = data.draw(st.lists(spec.row, min_size=spec.least_rows, max_size=spec.most_rows), label="rows")
        return self._made(spec.build(rows), len(rows), "build")

    @rule(target=batches, held=consumes(batches), data=st.data())
    def filter(self, held: Held, data: st.DataObject) -> Held:
        """Some requests stay, perhaps in another order."""
        n = self.spec.num_rows(held.batch)
        keep = data.draw(
            keep_lists(n).map(_as_rows).filter(lambda rows: len(rows) >= self.spec.least_rows), label="keep"
        )
        self.reached("rows left", len(keep) < n)
        self.reached("rows in another order", sorted(keep) != keep)
        self.alive.remove(held)
        return self._made(
            _result(self.spec.filter(held.batch, keep), held),
            len(keep),
            "filter",
            {name: column.rows(keep) for name, column in held.columns.items()},
        )

    @rule(target=batches, first=consumes(batches), second=consumes(batches))
    def merge(self, first: Held, second: Held) -> Held:
        """Two batches become one."""
        if first is second:
            return first
        n = self.spec.num_rows(first.batch) + self.spec.num_rows(second.batch)
        self.alive.remove(first)
        self.alive.remove(second)
        self.reached("batches merged", len(self._names) > 0 and n > 0)
        return self._made(
            _result(self.spec.merge(first.batch, second.batch), first),
            n,
            "merge",
            {name: column.merged(second.columns[name]) for name, column in first.columns.items()},
        )

    @precondition(lambda self: self.spec.advance is not None)
    @rule(target=batches, held=consumes(batches))
    def advance(self, held: Held) -> Held:
        """A step changes values and keeps rows."""
        if self.spec.advance is None:
            return held
        n = self.spec.num_rows(held.batch)
        self.alive.remove(held)
        self.reached("a batch advanced", n > 0)
        return self._made(_result(self.spec.advance(held.batch), held), n, "advance")

    # Judging

    @property
    def _names(self) -> list[str]:
        return [name for twin in self.spec.twins for name in (twin.host, twin.device)] + list(self.spec.rows)

    def _made(self, batch: Any, n: int, operation: str, expected: dict[str, Seen] | None = None) -> Held:
        held = Held(batch, f"{self.spec.name} after {operation}")
        invariants.row_count(n, {"num_rows": self.spec.num_rows(batch)}, object=held.name, operation=operation)
        self._laws(held, operation)
        held.columns = {name: seen(attribute(batch, name)).copied() for name in self._names}
        if expected is not None:
            self._unchanged(held, expected, f"{operation} moved other rows than it was told to")
        self.reached("an empty batch", n == 0)
        self.alive.append(held)
        return held

    def _laws(self, held: Held, operation: str) -> None:
        n = self.spec.num_rows(held.batch)
        values = {name: attribute(held.batch, name) for name in self._names}
        lengths = {name: len(value) for name, value in values.items()}
        invariants.row_count(n, lengths, object=held.name, operation=operation)
        for twin in self.spec.twins:
            self._twins(twin, values[twin.host], values[twin.device], held.name, operation)

    def _twins(self, twin: Twin, host: Any, device: Any, name: str, operation: str) -> None:
        where: invariants.Where = {
            "object": name,
            "operation": operation,
            "column": f"{twin.host} / {twin.device}",
        }
        ranges = (memory(host), memory(device))
        if ranges[0] is not None and ranges[1] is not None:
            invariants.mirror_aliased(ranges[0], ranges[1], **where)
        of_device = seen(device)
        if hasattr(host, "dtype"):
            of_host = seen(host)
        else:  # a list has no dtype of its own
            of_host = Seen(of_device.dtype, np.array(host, dtype=of_device.values.dtype))
        if of_host.dtype != of_device.dtype and of_host.values.dtype == of_device.values.dtype:  # else the law says it
            raise DisagreementError(
                f"{name}: the twins differ in dtype: {twin.host!r} is {of_host.dtype}, "
                f"{twin.device!r} is {of_device.dtype}"
            )
        law = invariants.mirror_bound if twin.contract is Contract.UPPER_BOUND else invariants.mirror_equal
        law(of_host.values, of_device.values, **where)

    def _unchanged(self, held: Held, expected: dict[str, Seen], problem: str) -> None:
        for name, column in expected.items():
            found = seen(attribute(held.batch, name))
            if found.dtype != column.dtype and len(column.values):
                raise DisagreementError(
                    f"{held.name}: the dtype of {name!r} changed from {column.dtype} to {found.dtype}"
                )
            if not column.same(found):
                raise DisagreementError(
                    f"{held.name}: {problem}: {name!r}\n"
                    f"  expected {column.values.tolist()}\n  found    {found.values.tolist()}"
                )


def _result(returned: Any, before: Held) -> Any:
    """What came out: a batch, or the one that was changed in place. An empty batch may be false."""
    return before.batch if returned is None else returned


def _as_rows(keep: Any) -> list[int]:
    array = np.asarray(keep)
    rows: list[int] = (np.flatnonzero(array) if array.dtype.kind == "b" else array.astype(np.int64)).tolist()
    return rows
