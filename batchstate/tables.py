"""Device tables with one row per slot, and writes to them that are checked on the host before anything is launched.

A table is made by the pool whose slots index it and has `capacity` rows, one for every index that can reach it. It
starts zero, and row 0, which padded rows read, stays zero. Writes are planned on the owning thread; the scatter runs
on the stream that is current then, after every forward that still reads the table (`read_until`) and after earlier
writes from other streams. The host never waits.
"""

from typing import Any, Protocol, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, as_array, converted, signed_twin
from batchstate.errors import ArgumentError, DeviceError, DtypeError, RowIndexError, ShapeError
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Fence, FixedMemory, Runtime, check_fence, numpy_dtype
from batchstate.violations import Where

__all__ = ["SlotSpace", "Table", "TableWrite"]

Ints = npt.NDArray[np.int64]


class SlotSpace(Protocol):
    """What a table needs of the pool whose slots index it."""

    name: str

    @property
    def runtime(self) -> Runtime:
        """The device of the pool."""
        ...

    @property
    def capacity(self) -> int:
        """Rows that a table needs: the largest slot + 1."""
        ...

    def check_handles(self, slots: Slots, operation: str) -> None:
        """Refuses handles that are not live or not of this pool."""
        ...


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view of `array`."""
    view = array.view()
    view.setflags(write=False)  # half the time that `flags.writeable = False` takes
    return view


@final
@attrs.frozen(eq=False)
class TableWrite:
    """A checked write that is not launched yet: `table.device.view(-1)[index] = values`.

    Attributes:
        table: where it goes.
        index: int64[n], flat places in the table; read-only, since they were checked.
        values: [n] of the table's dtype, read-only.
        owners: the handles that it was made from. They are checked again before it is launched, since a slot may belong
            to another request by then. None for a write that was made from numbers.
    """

    table: "Table"
    index: Ints = attrs.field(converter=read_only)
    values: npt.NDArray[Any] = attrs.field(converter=read_only)
    owners: Slots | None = None

    def __repr__(self) -> str:
        return f"TableWrite({self.index.size} elements of {self.table!r})"


@final
class Table:
    """Device memory `[capacity, *row_shape]` indexed by the slots of one pool.

    Made by `SlotPool.table` and `SlotPool.adopt`.

    Attributes:
        name: for reports.
        runtime: the device.
        holds: index space of its values (`slot`, `page`, `location`, ...), or None for plain numbers.
        host: the same values on the host, read-only, kept by every write, if the table was made with `host=True`; else
            None.
    """

    def __init__(
        self, slots: SlotSpace, device: torch.Tensor, *, name: str, holds: str | None = None, host: bool = False
    ) -> None:
        self._slots = slots
        self.name = name
        self.runtime = slots.runtime
        self.holds = holds
        self._memory = device
        invariants.table_capacity(self.capacity, slots.capacity, **self._where("table"))
        self._dtype = numpy_dtype(device.dtype)
        self._row_width = int(np.prod(device.shape[1:], dtype=np.int64))
        with torch.inference_mode(False):  # a view made in inference mode can be written there alone
            self._flat = device.view(signed_twin(device.dtype)).view(-1)
        self._fixed = FixedMemory(self.runtime, device)
        self._host = np.zeros(tuple(device.shape), dtype=self._dtype) if host else None
        self.host = None if self._host is None else read_only(self._host)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Table({self.name!r}, {dtype}{list(self._memory.shape)}, holds={self.holds})"

    @property
    def device(self) -> torch.Tensor:
        """The memory itself, for kernels; its address never changes. Safe to read on the current stream.

        On a stream other than the one that wrote last, that stream's writes are waited for, on the device.
        """
        return self._fixed.ordered()

    @property
    def capacity(self) -> int:
        """Rows in memory, row 0 included."""
        return int(self._memory.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the memory: rows first."""
        return tuple(self._memory.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self._memory.dtype

    @property
    def slots(self) -> SlotSpace:
        """The pool whose slots index it."""
        return self._slots

    # Writing

    def entry(self, slots: object, positions: object, values: object) -> TableWrite:
        """A write of `values[i]` to element `positions[i]` of row `slots[i]`, checked; nothing is launched.

        Args:
            slots: rows int[n], repeats allowed; the handles of `Slots` are checked.
            positions: int[n], elements of the row (flat, where a row has several dimensions). None writes whole rows.
            values: [n] with positions, `[n, *row_shape]` without. A mirrored value must be of the table's index space.

        Raises:
            ShapeError: arrays that do not go together.
            DtypeError, ValueOverflowError: values that do not go into the table's dtype.
            RowIndexError: a position at or beyond the row's width.
            ArgumentError: an element named twice, at level `full`: which value stays is not defined on a device.
            Violation: UNIT_MISMATCH, SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_STALE_HANDLE, SENTINEL_ESCAPED.
        """
        what = f"{self.name}: write"
        rows = self._rows(slots, "write")
        array = self._values(values, what)
        if positions is None:
            shape = (rows.size, *self._memory.shape[1:])
            index = (rows[:, None] * self._row_width + np.arange(self._row_width)).reshape(-1)
        else:
            shape = (rows.size,)
            index = rows * self._row_width + self._positions(positions, rows.size, what)
        if array.shape != shape:
            raise ShapeError(
                f"{what}: values {list(array.shape)} for {list(shape)}", value=array.shape, remedy="one for each place"
            )
        if levels.full:
            copy = invariants.first_duplicate(index)
            if copy is not None:
                raise ArgumentError(
                    f"{what}: element {index[copy] % self._row_width} of row {index[copy] // self._row_width} twice",
                    value=int(index[copy]),
                    remedy="write each element once; a device does not order the writes of one scatter",
                )
        return TableWrite(self, index, array.reshape(-1), slots if isinstance(slots, Slots) else None)

    def planned(self, rows: Ints, positions: Ints, values: Ints, owners: Slots | None) -> TableWrite:
        """An entry of a table with rows of one dimension, from what a pool has checked: live slots, positions, values.

        For the library: nothing is checked here. `rows`, `positions` and `values` are int64[n]; for `owners` see
        `TableWrite`.
        """
        index = rows * self._row_width + positions
        return TableWrite(self, index, values.astype(self._dtype, copy=False), owners)

    def check_write(self, write: TableWrite, operation: str = "write") -> None:
        """Refuses a write that is not of this table, or whose slots belong to other requests by now.

        Raises:
            ArgumentError: made by another table.
            Violation: SLOT_STALE_HANDLE.
        """
        if write.table is not self:
            raise ArgumentError(
                f"{self.name}: {operation} of {write!r}", value=write, remedy="give a write to the table that made it"
            )
        if write.owners is not None:
            self._slots.check_handles(write.owners, f"{self.name}: {operation}")

    def write(self, slots: object, positions: object, values: object) -> None:
        """Writes on the current stream at once: one upload, one scatter. Arguments and errors as for `entry`.

        Raises:
            CaptureError: the current stream is being captured.
        """
        self.runtime.check_owner(f"{self.name}: write")
        write = self.entry(slots, positions, values)
        if write.index.size:
            packed = self.runtime.upload([write.index, write.values])
            self.apply(write, packed.view(0), packed.view(1))

    def apply(self, write: TableWrite, index: torch.Tensor, values: torch.Tensor) -> None:
        """Launches a write whose index and values were uploaded already, packed with more.

        Args:
            write: what `entry` returned.
            index: its index on the device, safe to use on the current stream.
            values: its values on the device, likewise.

        Raises:
            As `check_write`. Nothing was launched.
        """
        self.check_write(write)
        if not write.index.size:
            return
        self._fixed.await_readers()
        self.runtime.launch(
            self._scatter, index, values, reads=(index, values), writes=(self._memory,), name=f"{self.name}: write"
        )
        self._fixed.note_write()
        if self._host is not None:
            self._host.reshape(-1)[write.index] = write.values

    def clear(self, slots: object) -> None:
        """Sets whole rows to zero on the current stream: one upload, one kernel.

        Raises:
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_STALE_HANDLE.
        """
        self.runtime.check_owner(f"{self.name}: clear")
        rows = self._rows(slots, "clear")
        if not rows.size:
            return
        index = self.runtime.upload([rows]).view(0)
        self._fixed.await_readers()
        self.runtime.launch(self._zero_rows, index, reads=(index,), writes=(self._memory,), name=f"{self.name}: clear")
        self._fixed.note_write()
        if self._host is not None:
            self._host[rows] = 0

    def read_until(self, fence: Fence) -> None:
        """Declares that a launched forward reads the table until `fence` (its read-done).

        Each stream that writes next waits for it, on the device.
        """
        self.runtime.check_owner(f"{self.name}: read_until")
        check_fence(fence, f"{self.name}: read_until", needed=True)
        self._fixed.read_until(fence)

    def _scatter(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self._flat.scatter_(0, index, values.view(self._flat.dtype))

    def _zero_rows(self, index: torch.Tensor) -> None:
        self._flat.view(self.capacity, -1).index_fill_(0, index, 0)

    # Validation

    def _rows(self, slots: object, operation: str) -> Ints:
        if isinstance(slots, MirroredTensor):
            if slots.unit != "slot":
                invariants.unit_mismatch("slot", str(slots.unit), **self._where(operation))
            if isinstance(slots, Slots):
                self._slots.check_handles(slots, operation)
            rows: Ints = slots.np
        else:
            rows = self._integers(slots, f"{self.name}: {operation}: slots")
            invariants.slot_out_of_range(rows, self._slots.capacity, **self._where(operation))
            invariants.slot_zero_allocated(rows, **self._where(operation))
        return rows

    def _positions(self, positions: object, n: int, what: str) -> Ints:
        array = self._integers(positions, f"{what}: positions")
        if array.size != n:
            raise ShapeError(f"{what}: {array.size} positions for {n} slots", value=array.size, remedy="one each")
        if array.size:
            invariants.sentinel_escaped(array, **self._where("write"))
            most = int(array.max())
            if most >= self._row_width:
                raise RowIndexError(
                    f"{what}: position {most} of a row of {self._row_width}",
                    value=most,
                    remedy="positions lie in 0 to the row's width - 1",
                )
        return array

    def _integers(self, values: object, what: str) -> Ints:
        array = as_array(values, what)
        if array.ndim != 1:
            raise ShapeError(f"{what}: {array.ndim} dimensions", value=array.shape, remedy="pass one dimension")
        if array.size and array.dtype.kind not in "iu":
            raise DtypeError(f"{what}: dtype {array.dtype}", value=array.dtype, remedy="pass integers")
        return array.astype(np.int64, copy=False)

    def _values(self, values: object, what: str) -> Array:
        if isinstance(values, MirroredTensor):
            if values.runtime is not self.runtime:
                raise DeviceError(f"{what}: {values!r} has another runtime", value=values, remedy="use one runtime")
            if self.holds is not None and values.unit is not None and values.unit != self.holds:
                invariants.unit_mismatch(self.holds, values.unit, **self._where("write"))
            array = converted(values.exact_host(what), self._dtype, what)
        else:
            array = converted(values, self._dtype, what)
        if self.holds is not None and self._dtype.kind == "i":
            invariants.sentinel_escaped(array.reshape(-1), **self._where("write"))
        return array

    # Checks

    def check(self, operation: str = "check") -> None:
        """Checks that row 0 is zero and the device equals the host. Reads device memory; suspended under capture.

        Raises:
            Violation: TABLE_CAPACITY, SLOT_ZERO_DIRTY, MIRROR_EQUAL.
        """
        if self.runtime.capturing:
            return
        where = self._where(operation)
        invariants.table_capacity(self.capacity, self._slots.capacity, **where)
        device = self._fixed.ordered()
        invariants.slot_zero_dirty(self.runtime.inspect(device[0]), **where)
        if self.host is not None:
            invariants.mirror_equal(self.host, self.runtime.inspect(device), **where)

    def _where(self, operation: str) -> Where:
        return {"object": repr(self), "operation": operation, "step": self.runtime.step}
