"""The laws that judge a batch: asked of what an operation is given, and of what it makes."""

from collections.abc import Mapping
from typing import Self

import numpy as np

from batchstate import invariants, levels
from batchstate.batching.device_rows import DeviceRows
from batchstate.batching.host_rows import HostRows
from batchstate.batching.record import BatchRecord, Windows
from batchstate.columns import MirroredColumn
from batchstate.errors import ArgumentError
from batchstate.values.host_arrays import Array
from batchstate.violations import Code


class JudgedRecord(BatchRecord):
    """A batch that can be judged, and makes others that are."""

    __slots__ = ()

    # Checks

    def check(self, operation: str = "check") -> None:
        """Judges this batch and all its columns by every law that applies at the level in force.

        Raises:
            Violation: ROW_COUNT, TAIL_STALE, SLOT_SHARED, SLOT_ZERO_ALLOCATED, SENTINEL_ESCAPED, and those of
                `MirroredTensor.check`.
        """
        if not levels.cheap:
            return
        self._check_rows(operation)
        self._check_slots(operation)
        self._check_tail(operation)
        self._check_read_columns(operation)
        for name in self._tensor_columns if levels.full else ():
            value = self[name]
            if levels.full and self._device.uploaded and name not in self._device_rows:
                # What crossed is compared although nobody read it yet: a view of the copy, nothing is launched.
                value._device.tensor(self.runtime)
            value.check(operation)

    def _check_read_columns(self, operation: str) -> None:
        """Only what was handed out to be written can have been written: device sides, and host sides as tensors."""
        for value in self._watched:
            value.check(operation)
        written = None if self._crossing is None else self._crossing.written()
        if written is not None:
            name, before, now = written
            invariants.mirror_foreign_write("device", before, now, **self._where(operation, name or None))

    def _check_rows(self, operation: str) -> None:
        agree = self._rows.have(self.num_rows)  # the test of ROW_COUNT, without its report: the law names the column
        for rows in self._device_rows.values():
            agree = agree and len(rows) == self.num_rows
        for objects in self._objects.values():
            agree = agree and len(objects) == self.num_reqs
        if agree:
            invariants.made[_ROW_COUNT] += 1
            return
        where = self._where(operation)
        # Counted apart: a bounded column has rows on both sides, under one name.
        invariants.row_count(self.num_rows, self._rows.lengths(), **where)
        invariants.row_count(self.num_rows, {name: len(rows) for name, rows in self._device_rows.items()}, **where)
        if self._objects:
            invariants.row_count(self.num_reqs, {name: len(one) for name, one in self._objects.items()}, **where)

    def _check_slots(self, operation: str) -> None:
        if self._slot_column is None:
            return
        place = self._layout.places[self._slot_column]
        slots: Array = self._rows.stacks[place.array][place.lane]  # a lane of int64: as it lies
        if self.num_reqs != self.num_rows:
            slots = slots[: self.num_reqs]
        if _positive_and_distinct(slots):
            made = invariants.made
            made[_ESCAPED] += 1
            made[_ALLOCATED] += 1
            made[_SHARED] += 1
            return
        where = self._where(operation, self._slot_column)
        if slots.min(initial=1) < 1:  # one look decides that neither of the two is broken
            invariants.sentinel_escaped(slots, **where)
            invariants.slot_zero_allocated(slots, **where)
        invariants.slot_shared(slots, **where)

    def _check_tail(self, operation: str) -> None:
        if self.num_rows == self.num_reqs:
            return
        for name, column in self._columns.items():
            if isinstance(column, MirroredColumn):
                tail = self._rows.column(name)[self.num_reqs :]
                invariants.tail_stale(tail, column.pad, self.num_reqs, **self._where(operation, name))

    # Making

    def _with(
        self,
        operation: str,
        rows: HostRows,
        device_rows: Mapping[str, DeviceRows],
        objects: Mapping[str, Array],
        num_reqs: int,
        *,
        num_rows: int | None = None,
        pool: int | None = None,
        windows: Windows | None = None,
    ) -> Self:
        """The result of an operation on this batch, judged."""
        if windows is None:
            windows = self._open_windows()
        batch = type(self)(
            self.runtime,
            rows,
            device_rows,
            objects,
            num_reqs,
            num_reqs if num_rows is None else num_rows,
            self._pool if pool is None else pool,
            windows,
        )
        if levels.full:
            batch.check(operation)
        elif levels.cheap:
            batch._check_rows(operation)
        return batch

    def _changed(self, operation: str, rows: HostRows, device_rows: Mapping[str, DeviceRows]) -> Self:
        """The result of an operation that moves no row, and has none to count."""
        windows = self._open_windows()
        batch = type(self)(
            self.runtime, rows, device_rows, self._objects, self.num_reqs, self.num_rows, self._pool, windows
        )
        if levels.full:
            batch.check(operation)
        return batch

    def _begin(self, operation: str) -> int:
        """What every operation asks first: nobody wrote into what was handed out, and there is no padding."""
        if levels.cheap and (self._watched or (self._crossing is not None and self._crossing.uploaded)):
            self._check_read_columns(operation)
        if self.num_rows != self.num_reqs:
            raise ArgumentError(
                f"{type(self).__name__}.{operation}: a batch padded from {self.num_reqs} to {self.num_rows} rows",
                value=self.num_rows,
                remedy="keep the batch from before `pad`; a padded one is for one launch",
            )
        return self.num_reqs


def _positive_and_distinct(slots: Array) -> bool:
    """The tests of three laws without their reports: no slot is negative, none is 0, none stands twice."""
    if not slots.size:
        return True
    if slots.item(slots.argmax()) > _DENSE * slots.size + _FEW:
        in_order = slots.copy()
        in_order.sort()
        return bool(in_order[0] > 0) and not np.count_nonzero(in_order[1:] == in_order[:-1])
    try:
        uses = np.bincount(slots)
    except ValueError:  # a negative one
        return False
    return uses.item(0) == 0 and uses.item(uses.argmax()) == 1


_ROW_COUNT = Code.ROW_COUNT
_ESCAPED, _ALLOCATED, _SHARED = Code.SENTINEL_ESCAPED, Code.SLOT_ZERO_ALLOCATED, Code.SLOT_SHARED
_FEW, _DENSE = 1024, 32
"""Up to so many slots, and so many for each row, a count for each that there may be costs less than a sort."""
