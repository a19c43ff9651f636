"""Device tables with one row per slot, page or location, whose rows belong to their owners.

A table is made by the pool whose indices name its rows, and has `capacity` rows, one for every index that can reach it.
It starts zero, and row 0, which padded rows read, stays zero, unless the table says that padded rows may write there
(`row_zero="scratch"`). Rows are named by handles, never by numbers. A row is
unwritten for each new generation of its index, whatever the last owner left in it, until its owner has written it; a
forward that asks for the memory names the rows that it reads, and is refused if one is unwritten.

Writes are planned on the owning thread; the scatter runs on the stream that is current then, after every forward that
still reads the table (`read_until`) and after earlier writes from other streams. The host never waits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, Ints, as_array, carried, read_only, select_rows, shape_of, signed_twin
from batchstate._origin import Changes, Origin, RowSet
from batchstate.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    RowIndexError,
    ShapeError,
    another_runtime,
    one_of,
    wrong_shape,
)
from batchstate.mirror import Handles, MirroredTensor, rows_of
from batchstate.runtime.base import Fence, OfThisProcess, Owners, Runtime, check_fence
from batchstate.runtime.memory import FixedMemory, ReadyTensor, as_on_host, host_dtype
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate._allocator import Transaction

__all__ = ["IndexSpace", "Table", "TableRows", "TableWrite"]

RowZero = Literal["zero", "scratch"]
"""Row 0, of padding: it stays zero, or padded rows may write anything into it."""

ROW_UNWRITTEN = Code.ROW_UNWRITTEN


class IndexSpace(Protocol):
    """A pool, as a table sees it, whose indices name its rows: `capacity` of them, 0 included.

    Attributes:
        owners_of: for `Runtime.own_rows`.
    """

    name: str
    runtime: Runtime
    capacity: int
    transaction: "Transaction"
    owners_of: Owners

    def rows_of(self, handles: Any, operation: str, *, padded: bool = False) -> Ints:
        """The numbers of handles of this pool that are all live, int64[n]; with `padded` the last ones may be padding.

        Raises:
            ArgumentError: handles of another pool.
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_STALE_HANDLE, UNIT_MISMATCH.
        """


@final
@attrs.frozen(eq=False)
class TableWrite:
    """A checked write that is not launched yet: `table.device.view(-1)[index] = values`.

    Attributes:
        table: that is written.
        index: int64[n] flat places in the table; read-only, as they were checked, as are the values.
        values: [n] of its dtype.
        owners: the handles of its rows, which are written for them. They are checked again before it is launched, since
            a row may belong to another request by then.
        origin: what else its values depend on, which is checked then too: the pages of locations. Or None.
    """

    table: "Table"
    index: Ints = attrs.field(converter=read_only)
    values: npt.NDArray[Any] = attrs.field(converter=read_only)
    owners: tuple[Handles, ...]
    origin: Origin | None = None

    def launch(self) -> None:
        """Launches it at once, on the current stream: one upload, one scatter.

        Raises:
            CaptureError: the current stream is being captured.
            Violation: SLOT_STALE_HANDLE, DERIVED_STALE: its rows or their pages are of other requests by now.
        """
        table = self.table
        table.runtime.check_owner(f"{table.name}: write")
        if self.index.size:
            packed = table.runtime.upload([self.index, self.values])
            table.check_write(self)
            table.launch_checked(self, packed.view(0), packed.view(1))

    def __repr__(self) -> str:
        return f"TableWrite({self.index.size} elements of {self.table!r})"


@final
@attrs.frozen(eq=False, repr=False)
class TableRows:
    """Rows of a table, of the requests `handles`, as they were when `Table.gather` took them."""

    table: "Table"
    handles: Handles
    _gathered: ReadyTensor
    _origin: Origin

    def __repr__(self) -> str:
        return f"TableRows({len(self.handles)} rows of {self.table!r})"

    @property
    def device(self) -> torch.Tensor:
        """The rows `[n, *row_shape]`, to be read only, safe to use on the current stream.

        Raises:
            Violation: DERIVED_STALE, at `cheap`: a row was written or cleared since. SLOT_STALE_HANDLE: it has another
                owner.
        """
        if levels.cheap:
            self.table.space.rows_of(self.handles, f"{self.table.name}: gathered rows", padded=True)
            self._origin.check(object=self, operation="device", step=self.table.runtime.step)
        return self._gathered.on_current_stream(self.table.runtime)


@final
class Table(OfThisProcess):
    """Device memory `[capacity, *row_shape]` indexed by the slots, pages or locations of one pool.

    Made by `SlotPool.table` and `PagePool.table`, and their `adopt`.

    Attributes:
        name: for reports.
        runtime, space: the device, and the pool whose indices name its rows.
        capacity, shape, dtype: of the memory: rows first, row 0 included.
        holds: index space of its values (`slot`, `page`, `location`, ...), or None for plain numbers.
        of: the pool that its values are of, where the table was made with it.
        row_zero: `zero`, or `scratch` where padded rows may write into row 0.
    """

    def __init__(
        self, space: IndexSpace, device: torch.Tensor, *, name: str, holds: str | None, row_zero: RowZero
    ) -> None:
        if row_zero not in ("zero", "scratch"):
            problem = f"{name}: row_zero is {row_zero!r}"
            raise ArgumentError(problem, row_zero, one_of(("zero", "scratch"), row_zero))
        if row_zero == "scratch" and holds is not None:
            problem = f"{name}: row_zero='scratch' of a table that holds {holds}"
            raise ArgumentError(problem, holds, "keep row 0 zero: padded rows would go where its indices lead")
        self.row_zero = row_zero
        self.space = space
        self.name = name
        self._write_name = f"{name}: write"
        self.runtime = space.runtime
        self.holds = holds
        self.of: IndexSpace | None = None
        self._memory = device
        self.shape, self.capacity, self.dtype = tuple(device.shape), len(device), device.dtype
        invariants.table_capacity(self.capacity, space.capacity, **self._where("table"))
        self._dtype, self._bits_of = host_dtype(device.dtype)
        self._row_width = int(np.prod(device.shape[1:], dtype=np.int64))
        with torch.inference_mode(False):  # a view made in inference mode can be written there alone
            self._flat = device.view(signed_twin(device.dtype)).view(-1)
        self._fixed = FixedMemory(self.runtime, device)
        self.runtime.own_rows(device, space.owners_of)
        self._host: Array | None = None
        self._changes: Changes | None = None
        self._written = np.zeros(self.capacity, dtype=np.int64)  # the generation that each row was last written for

    @classmethod
    def new(
        cls,
        space: IndexSpace,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        holds: str | None,
        host: bool,
        row_zero: RowZero,
    ) -> Self:
        """For pools, which document it: a table of zeros."""
        sizes, shared = (space.capacity, *shape_of(shape, name, rows=space.capacity)), host_dtype(dtype)[0]
        memory = space.runtime.device_zeros(sizes, dtype, name=name)
        table = cls(space, memory, name=name, holds=holds, row_zero=row_zero)
        if host:
            table._host = np.zeros(sizes, shared)
        return table

    @classmethod
    def adopted(
        cls, space: IndexSpace, tensor: torch.Tensor, name: str, *, holds: str | None, host: bool, row_zero: RowZero
    ) -> Self:
        """For pools, which document it: a table over an engine's own tensor."""
        if tensor.device != space.runtime.device:
            problem = f"{name}: a tensor on {tensor.device}, pool on {space.runtime.device}"
            raise DeviceError(problem, str(tensor.device), "adopt a tensor of the pool's device")
        if tensor.ndim == 0 or not tensor.is_contiguous():
            problem = f"{name}: {list(tensor.shape)} with strides {list(tensor.stride())}"
            raise ShapeError(problem, tuple(tensor.shape), "adopt a contiguous tensor with one row per index")
        table = cls(space, tensor, name=name, holds=holds, row_zero=row_zero)
        if row_zero == "zero":
            invariants.slot_zero_dirty(rows_of(space.runtime, tensor[0]), **table._where("adopt"))
        if host:
            table._host = space.runtime.read_back(as_on_host(tensor)).copy()
        return table

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Table({self.name!r}, {dtype}{list(self._memory.shape)}, holds={self.holds})"

    # Reading

    def device_for(self, handles: Handles) -> torch.Tensor:
        """The memory, for kernels that read the rows of `handles` and no others. Safe to read on the current stream.

        On a stream other than the one that wrote last, that stream's writes are waited for, on the device. The handles
        are live ones, checked at `cheap`; padded rows at the end read row 0.

        Raises:
            Violation: ROW_UNWRITTEN: a row holds what its last owner left. Handles as for `write`.
        """
        if levels.cheap:
            self._check_written(handles, "device_for")
        return self._fixed.ordered()

    def host_for(self, handles: Handles) -> Array:
        """The rows of `handles` on the host, `[n, *row_shape]`, of a table made with `host=True`. As `device_for`."""
        if self._host is None:
            raise ArgumentError(f"{self.name}: host_for of a table without a host side", self, "make it with host=True")
        rows: Array = self._host[self._check_written(handles, "host_for")]
        return rows

    def gather(self, handles: Handles) -> TableRows:
        """The rows of `handles` in memory of their own, for kernels of several steps: one launch, no copy, no wait.

        They are refused once one of them was written or cleared: gather again then.

        Raises:
            CaptureError: the stream is being captured; its kernel would not run now. Else as `device_for`.
        """
        self.runtime.refuse_capture(f"{self.name}: gather")
        memory, index = self.device_for(handles), handles.device
        rows = self.runtime.launch(select_rows, memory, index, reads=(memory, index), name=f"{self.name}: gather")
        self._fixed.read_until(self.runtime.record())
        changes, row_set = self.version, RowSet(0, (handles.np, handles.generations), 0)
        origin = Origin("gather", self.runtime.step, row_set, changes, changes.last)
        return TableRows(self, handles, ReadyTensor.made_now(rows, self.runtime), origin)

    @property
    def version(self) -> Changes:
        """When each row was last written or cleared; noted from the first time on that this is asked for."""
        if self._changes is None:
            self._changes = Changes(self.capacity, f"rows of table {self.name!r}")
        return self._changes

    def written_for(self, rows: Ints, generations: Ints) -> npt.NDArray[np.bool_]:
        """Whether each of `rows` int64[n] is written for an owner of this generation, bool[n]. For the library."""
        written: npt.NDArray[np.bool_] = self._written[rows] == generations
        return written

    def written(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """Whether their owners have written these rows, bool[n]. Refuses handles as `write` does."""
        rows = self.space.rows_of(handles, f"{self.name}: written")
        return self.written_for(rows, handles.generations)

    def _check_written(self, handles: Handles, operation: str) -> Ints:
        rows = self.space.rows_of(handles, f"{self.name}: {operation}", padded=True)
        written, generations = self._written[rows], handles.generations
        invariants.times_checked[ROW_UNWRITTEN] += 1
        if written.tobytes() != generations.tobytes():
            invariants.row_unwritten(rows, written, generations, **self._where(operation))
        return rows

    @property
    def memory(self) -> torch.Tensor:
        """All rows, for checks, and for the address, which never changes. `device_for` is to read."""
        return self._fixed.ordered()

    @property
    def host_memory(self) -> Array | None:
        """All rows on the host, read-only, for checks; None unless made with `host=True`. `host_for` is to read."""
        return None if self._host is None else read_only(self._host)

    # Writing

    def entry(self, handles: Handles, positions: object, values: object) -> TableWrite:
        """A write of `values[i]` to element `positions[i]` of row `handles[i]`, checked; nothing is launched.

        A row counts as written once any of it is: kernels read no further than its owner has written.

        Args:
            handles: of the rows, n live ones; repeats allowed.
            positions: int[n], elements of the row (flat, where a row has several dimensions). None writes whole rows.
            values: [n] with positions, `[n, *row_shape]` without. A mirrored value must have the unit of the table.
                Those of a dtype that numpy lacks are bits, integers of its size, as in `host_for`.

        Raises:
            ShapeError, DtypeError, ValueOverflowError: arrays that do not go together or into the table; bare numbers.
            RowIndexError: a position at or beyond the row's width.
            ArgumentError: handles of another pool; at `full` an element named twice, whose value a device leaves open.
            Violation: UNIT_MISMATCH, SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE (of a row, or of a value of an index space
                that a pool or the engine has declared), SLOT_STALE_HANDLE, SENTINEL_ESCAPED; DERIVED_STALE, at `cheap`:
                a mirrored value whose rows are of other requests.
        """
        rows = self.space.rows_of(handles, f"{self.name}: write")
        if isinstance(values, MirroredTensor) and handles.row_set is not None and values.row_set is not None:
            handles.row_set.check_same(values.row_set, values, **self._where("write"))
        return self.entry_of(rows, positions, values, handles)

    def entry_of(
        self, rows: Ints, positions: object, values: object, owners: Handles, origin: Origin | None = None
    ) -> TableWrite:
        """`entry`, for rows int64[n] of `owners`, who were checked. For the library."""
        label = self._write_name
        array = self._values(values, label)
        if positions is None:
            shape = (rows.size, *self._memory.shape[1:])
            index = (rows[:, None] * self._row_width + np.arange(self._row_width)).reshape(-1)
        else:
            shape = (rows.size,)
            index = rows * self._row_width + self._positions(positions, rows.size)
        if array.shape != shape:
            raise wrong_shape(f"{label}: values", shape, array.shape, "pass one value for each element that is written")
        if levels.full:
            copy = invariants.first_duplicate(index)
            if copy is not None:
                row, element = divmod(int(index[copy]), self._row_width)
                remedy = "write each element once; a device does not order the writes of one scatter"
                raise ArgumentError(f"{label}: element {element} of row {row} twice", int(index[copy]), remedy)
        return TableWrite(self, index, array.reshape(-1), (owners,), origin)

    def planned(self, index: Ints, values: Ints, owners: Handles, origin: Origin | None = None) -> TableWrite:
        """`entry`, of `values` int64[n] for flat places `index`, which a pool has checked. For the library."""
        return TableWrite(self, index, values.astype(self._dtype, copy=False), (owners,), origin)

    def check_write(self, write: TableWrite, operation: str = "write") -> None:
        """Refuses a write whose rows (SLOT_STALE_HANDLE) or pages (DERIVED_STALE) are of other requests by now."""
        for owners in write.owners:
            self.space.rows_of(owners, f"{self.name}: {operation}")
        if levels.cheap and write.origin is not None:
            write.origin.check(object=self, operation=operation, step=self.runtime.step)

    def write(self, handles: Handles, positions: object, values: object) -> None:
        """Launches an `entry` on the current stream at once: one upload, one scatter. CaptureError under capture."""
        self.entry(handles, positions, values).launch()

    def launch_checked(self, write: TableWrite, index: torch.Tensor, values: torch.Tensor) -> None:
        """Launches a write that `check_write` has just seen. For the library.

        `index` and `values` are its own on the device, safe to use on the current stream.
        """
        if write.index.size:
            owners = [(handles.np, handles.generations) for handles in write.owners]
            self.scatter(index, values, write.index, write.values, owners)

    def scatter(
        self,
        index: torch.Tensor,
        values: torch.Tensor,
        at: Ints,
        written: Array,
        owners: Sequence[tuple[Ints, Array]],
    ) -> None:
        """Launches a checked write of flat elements. For the library.

        `index` int64[n] and `values` [n] on the device are safe to use on the current stream; `at` and `written` are
        the same on the host; `owners` are rows int64[k] and the generations that they are written for from now on.
        """
        transaction, reads = self.space.transaction, (index, values)
        self._fixed.await_readers()
        transaction.operation = self._write_name
        try:
            self.runtime.launch(self._scatter, *reads, reads=reads, writes=(self._memory,), name=self._write_name)
        except Exception:
            transaction.operation = None
            raise
        self._fixed.note_write()
        if self._host is not None:
            self._host.reshape(-1)[at] = written
        for rows, generations in owners:
            self._note_rows(rows, generations)
        transaction.operation = None

    def _note_rows(self, rows: Ints, generations: Ints) -> None:
        """The rows int64[n] are written for owners of these generations from now on."""
        self._written[rows] = generations
        if self._changes is not None:
            self._changes.note(rows, "a write", self.runtime.step)

    def clear(self, handles: Handles) -> None:
        """Sets whole rows to zero on the current stream, which writes them: one upload, one kernel."""
        self.runtime.check_owner(f"{self.name}: clear")
        rows = self.space.rows_of(handles, f"{self.name}: clear")
        if not rows.size:
            return
        index, name = self.runtime.upload([rows]).view(0), f"{self.name}: clear"
        self._fixed.await_readers()
        with self.space.transaction.changing(name):
            self.runtime.launch(self._zero_rows, index, reads=(index,), writes=(self._memory,), name=name)
            self._fixed.note_write()
            if self._host is not None:
                self._host[rows] = 0
            self._note_rows(rows, handles.generations)

    def note_write(self, handles: Handles) -> None:
        """Declares that kernels of the engine, launched on the current stream, have written the rows of `handles`.

        Streams that read next wait for the work that is on the current stream now, on the device.

        Padded rows at the end may be among them where row 0 is scratch.

        Raises:
            ArgumentError: a table with a host side, which would differ from now on.
        """
        self.runtime.check_owner(f"{self.name}: note_write")
        if self._host is not None:
            problem = f"{self.name}: note_write of a table with a host side"
            raise ArgumentError(problem, self, "write both sides with `write`, or make the table with host=False")
        scratch = self.row_zero == "scratch"
        rows = self.space.rows_of(handles, f"{self.name}: note_write", padded=scratch)
        n = np.count_nonzero(rows) if scratch else rows.size
        self._fixed.note_foreign_write()
        self._note_rows(rows[:n], handles.generations[:n])

    def zero(self) -> None:
        """Sets all rows to zero, on the current stream, when no row has an owner any more. For the library."""
        self._fixed.await_readers()
        self.runtime.launch(self._flat.zero_, writes=(self._memory,), name=f"{self.name}: zero")
        self._fixed.note_write()
        if self._host is not None:
            self._host[...] = 0

    def read_until(self, fence: Fence) -> None:
        """Declares that a launched forward reads the table until `fence` (its read-done); later writes wait for it."""
        self.runtime.check_owner(f"{self.name}: read_until")
        check_fence(fence, f"{self.name}: read_until", needed=True)
        self._fixed.read_until(fence)

    def _scatter(self, index: torch.Tensor, values: torch.Tensor) -> None:
        if values.dtype is not self._flat.dtype:
            values = values.view(self._flat.dtype)
        self._flat.scatter_(0, index, values)

    def _zero_rows(self, index: torch.Tensor) -> None:
        self._flat.view(self.capacity, -1).index_fill_(0, index, 0)

    # Validation

    def _positions(self, positions: object, n: int) -> Ints:
        label = f"{self._write_name}: positions"
        array = as_array(positions, label)
        if array.shape != (n,):
            raise wrong_shape(label, (n,), array.shape, "pass one position for each row")
        if n and array.dtype.kind not in "iu":
            raise DtypeError(f"{label}: expected integers, got {array.dtype}", array.dtype, "pass integers")
        elements = array.astype(np.int64, copy=False)
        if n:
            invariants.sentinel_escaped(elements, **self._where("write"))
            most = int(elements.max())
            if most >= self._row_width:
                problem = f"{label}: expected 0 to {self._row_width - 1}, got {most}"
                raise RowIndexError(problem, most, "pass positions inside the row, or make the table wider")
        return elements

    def _values(self, values: object, label: str) -> Array:
        if isinstance(values, MirroredTensor):
            if values.runtime is not self.runtime:
                raise another_runtime(label, values)
            if self.holds is not None and values.unit is not None and values.unit != self.holds:
                invariants.unit_mismatch(self.holds, values.unit, **self._where("write"))
            array = carried(values.exact_host(label), self._dtype, self._bits_of, label)
        else:
            array = carried(values, self._dtype, self._bits_of, label)
        if self.holds is not None and self._dtype.kind in "iu" and self._bits_of is None:
            self.runtime.check_indices(array, self.holds, declared=False, **self._where("write"))
        if self.of is not None:
            if isinstance(values, Handles):
                self.of.rows_of(values, label, padded=True)
            else:
                numbers = array.reshape(-1).astype(np.int64)
                invariants.slot_out_of_range(numbers, self.of.capacity, **self._where("write"))
        return array

    # Checks

    def check(self, operation: str = "check") -> None:
        """Checks that row 0 is zero, unless it is scratch, and that the device equals the host.

        Reads device memory; suspended under capture.
        """
        if self.runtime.capturing:
            return
        where = self._where(operation)
        invariants.table_capacity(self.capacity, self.space.capacity, **where)
        device = self._fixed.ordered()
        first = int(self.row_zero == "scratch")
        if not first:
            invariants.slot_zero_dirty(rows_of(self.runtime, device[0]), **where)
        if self._host is not None:
            invariants.mirror_equal(self._host[first:], rows_of(self.runtime, device)[first:], **where)

    def _where(self, operation: str) -> Where:
        return {"object": repr(self), "operation": operation, "step": self.runtime.step}
