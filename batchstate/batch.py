"""`Batch`: declared columns of one batch of requests, moved as one.

A class declares them::

    class Decode(Batch):
        slots = slot_column()
        seq_lens = mirrored(torch.int64)
        last_token = device_only(torch.int64)
        requests = host_list()

A batch is immutable; every operation returns a new one. Operations are numpy on a few packed arrays; nothing goes to
the device before `upload`, or before a column's device side is read. Then all columns cross in one copy, together with
the step's table writes and extra arrays.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
    MOST_ROWS,
    Amount,
    Array,
    ColumnValues,
    Rows,
    Selection,
    Values,
    as_array,
    count,
    kept_rows,
    slices_of,
)
from batchstate._column_inputs import amounts_by_column, device_rows, host_values, put_values, rows_from
from batchstate._origin import DerivedArrays, RowSet
from batchstate._rows import Layout, RowState
from batchstate._upload import BatchDevice, Extras, packed_step
from batchstate.columns import Column, TensorColumn, declared_columns
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DeviceError,
    another_runtime,
    closest,
    expected,
    one_of,
    wrong_shape,
)
from batchstate.invariants import times_checked
from batchstate.mirror import Contract, MirroredTensor, Slots, StaleWindow, check_fresh, lined_up, pools
from batchstate.nvtx import ranges
from batchstate.runtime.base import OfThisProcess, Runtime
from batchstate.runtime.memory import PackedUpload
from batchstate.tables import TableWrite
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.static import StaticBuffers

__all__ = ["Batch", "Extras"]

Windows = Mapping[str, tuple[StaleWindow, ...]]

NO_WINDOWS: Windows = MappingProxyType({})

_ROW_COUNT = Code.ROW_COUNT
_OF_SLOTS = Code.SENTINEL_ESCAPED, Code.SLOT_ZERO_ALLOCATED, Code.SLOT_SHARED


class BatchType(type):
    """Makes batch classes without a `__dict__`: an attribute that is not a column cannot be carried beside a batch."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> "BatchType":
        """The class, its instances without room for more."""
        namespace.setdefault("__slots__", ())
        return super().__new__(cls, name, bases, namespace, **kwargs)


@ranges("build", "filter", "merge", "next_batch", "advance", "update", "pad", "upload", "to_static", "on_device")
class Batch(OfThisProcess, metaclass=BatchType):
    """Base of declared batches. Subclass it to declare columns; its own names cannot be overridden.

    Attributes:
        runtime: the device.
        num_reqs: requests; `len(batch)` too.
        num_rows: rows of each column, `num_reqs` and padding.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    __slots__ = (
        "__weakref__",
        "_crossed",
        "_device",
        "_exposed",
        "_guesses",
        "_pool_id",
        "_row_set",
        "_state",
        "_values",
        "_windows",
        "lease",
        "num_reqs",
        "num_rows",
        "runtime",
        "version",
    )

    _columns: ClassVar[Mapping[str, Column]] = {}
    _layout: ClassVar[Layout] = Layout({})
    _slot_column: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = declared_columns(cls, reserved=frozenset(dir(Batch)) - frozenset(dir(object)))
        cls._columns = declared
        cls._layout = Layout(declared)
        cls._slot_column = cls._layout.slots

    def __init__(
        self,
        runtime: Runtime,
        state: RowState,
        num_reqs: int,
        num_rows: int,
        pool_id: int = 0,
        windows: Windows = NO_WINDOWS,
        row_set: RowSet | None = None,
        lease: object = None,
    ) -> None:
        """For the library: `build` and `empty` make batches. `row_set` is that of another batch of the same rows.

        `lease` owns memory of the rows, on either side, which is filled again once nobody holds it.
        """
        self.runtime = runtime
        self.num_reqs = num_reqs
        self.num_rows = num_rows
        self.version = runtime.new_version()
        self.lease = lease
        self._row_set = row_set
        self._state = state
        self._device: BatchDevice | None = None  # once it is used
        self._crossed: PackedUpload | None = None  # the copy that has all columns, where one upload sent them
        self._guesses = False  # whether its exact lengths count guesses of a step that says later what it accepts
        self._pool_id = pool_id
        self._windows = windows
        self._values: dict[str, Any] = {}
        self._exposed: list[MirroredTensor] = []  # that can be written from outside, or have stale windows

    @classmethod
    def build(cls, runtime: Runtime, /, **columns: ColumnValues) -> Self:
        """A batch from a value for every declared column.

        Mirrored columns take lists, arrays, CPU tensors or mirrored values (slots: what `pool.take` returned),
        device-only columns device tensors too, host columns any sequence. All have one row per request.

        Raises:
            DeclarationError: a column is missing or not declared.
            ShapeError, DtypeError, ValueOverflowError: values that do not go into the column.
            ContractError, DeviceError: a contract weaker than the column takes; another runtime or device.
            Violation: SLOT_SHARED, SLOT_ZERO_ALLOCATED, SENTINEL_ESCAPED, UNIT_MISMATCH, MIRROR_STALE_READ.
        """
        if columns.keys() != cls._columns.keys():
            cls._check_none_missing(columns, f"{cls.__name__}.build")
        state, num_rows, pool_id = rows_from(cls._layout, columns, runtime, f"{cls.__name__}.build")
        batch = cls(runtime, state, num_rows, num_rows, pool_id or 0)
        if levels.full:
            batch.check("build")
            return batch
        if levels.cheap:
            batch._check_rows("build")
        batch._check_slots("build")  # slots from a caller are checked at every level
        return batch

    @classmethod
    def _check_none_missing(cls, values: Mapping[str, object], subject: str, *, but: str | None = None) -> None:
        """Refuses columns of a caller if one is missing that is not the column `but`."""
        missing = [name for name in cls._columns if name not in values and name != but]
        if missing:
            unknown = [name for name in values if name not in cls._columns]
            also = f", but values for {', '.join(unknown)}, which it does not declare" if unknown else ""
            question = closest(missing, unknown[0]) if unknown else ""
            problem = f"{subject}: no value for {', '.join(missing)}{also}"
            raise DeclarationError(problem, missing, f"{question} give every declared column its value".lstrip())

    @classmethod
    def empty(cls, runtime: Runtime) -> Self:
        """A batch of no requests: the start of an idle step and of a first merge."""
        values: dict[str, Any] = {
            name: np.empty((0, *column.shape), column.np_dtype) for name, column in cls._layout.tensors.items()
        }
        values |= {name: () for name in cls._columns if name not in values}
        return cls.build(runtime, **values)

    def __repr__(self) -> str:
        padding = f" padded to {self.num_rows}" if self.num_rows != self.num_reqs else ""
        columns = ", ".join(self._columns)
        return f"{type(self).__name__}({self.num_reqs} requests{padding}; {columns}) on {self.runtime.device}"

    # Reading

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        """The declarations by name, in order."""
        return dict(cls._columns)

    def __len__(self) -> int:
        return self.num_reqs

    def __getitem__(self, column: str) -> MirroredTensor:
        """The value of a mirrored or device-only column.

        Raises `DeclarationError` (no such column, or one of Python objects).
        """
        value: MirroredTensor | None = self._values.get(column)
        if value is None:
            declared, _ = self._tensor_column(column, "[]")
            value = self._values[column] = self._value(declared)
        return value

    def to_dict(self) -> dict[str, Array | tuple[Any, ...]]:
        """The host side by column: a read-only array of each mirrored column, the objects of each host column.

        Columns without a host side (`device_only`) are left out; nothing waits for the device. Raises MIRROR_STALE_READ
        inside a stale window of a host side.
        """
        tensors, mirrored = self._layout.tensors, self._layout.index
        names = [name for name in self._columns if name in mirrored or name not in tensors]
        return {name: self[name].np if name in mirrored else self.objects(name) for name in names}

    def _value(self, column: TensorColumn) -> MirroredTensor:
        name = column.name
        mirrored = name in self._layout.index
        contract = Contract.EXACT
        if name in self._state.device:
            contract = Contract.UPPER_BOUND if mirrored else Contract.DEVICE_ONLY
        generations = self._state.generations if name == self._slot_column else None
        value = column.value_type.__new__(column.value_type)
        MirroredTensor.__init__(
            value,
            self.runtime,
            self._state.column(name) if mirrored else None,
            functools.partial(self.device_side.side, name),
            dtype=column.dtype,
            shape=(self.num_rows, *column.shape),
            contract=contract,
            name=name,
            windows=self._windows.get(name, ()),
            generations=generations,
            pool_id=0 if generations is None else self._pool_id,
            row_set=self.row_set,
            exposed=self._exposed,
        )
        return value

    @property
    def row_set(self) -> RowSet:
        """The requests that the rows belong to; the same for all batches made of this one while no row moves."""
        if self._row_set is None:
            self._row_set = self._named_rows(self.version)
        return self._row_set

    def _named_rows(self, number: int) -> RowSet:
        state, slots = self._state, self._slot_column
        handles = None if slots is None else lambda: (state.column(slots), state.generations)
        return RowSet(number, handles, self._pool_id)

    def _open_windows(self) -> Windows:
        """Column -> its stale windows that are open: batches derived now inherit them."""
        if not self._exposed and not self._windows:
            return NO_WINDOWS
        windows = dict(self._windows)
        windows |= {value.name: value.open_windows for value in self._exposed if value.open_windows}
        return windows or NO_WINDOWS

    @property
    def device_side(self) -> BatchDevice:
        """The device side and its rows. For the library; most batches of a step need none."""
        if self._device is None:
            self._device = BatchDevice(self.runtime, self._state, self._crossed)
        return self._device

    def objects(self, column: str) -> tuple[Any, ...]:
        """The Python objects of a host column, one per request. Raises `DeclarationError` (no such column)."""
        if column not in self._state.objects:
            problem = f"{type(self).__name__} has no host column {column!r}"
            raise DeclarationError(problem, column, one_of(self._state.objects, column))
        return tuple(self._state.objects[column].tolist())

    # Moving rows

    def filter(self, keep: "Selection") -> Self:
        """The requests that `keep` names, in its order: a mask bool[num_reqs], or unique row indices.

        Raises `ShapeError`, `DtypeError`, `RowIndexError` (as `MirroredTensor.filter`), `ArgumentError` (an index
        twice, or a padded batch), DERIVED_STALE (at `cheap`: a mask of other requests).
        """
        return self._next("filter", keep)

    def merge(self, other: Self) -> Self:
        """These requests, then those of `other`. A column exact here and bounded there becomes bounded.

        Raises `DeclarationError` and `DeviceError` (a batch of another class, or of another runtime), `ArgumentError`
        (slots of two pools, or a padded batch), SLOT_SHARED (at `cheap`: a request stands in both).
        """
        return self._next("merge", None, other)

    def next_batch(
        self,
        *,
        keep: "Selection | None" = None,
        joining: Self | None = None,
        advance: "str | Iterable[str] | Mapping[str, Amount]" = (),
        n: "Amount" = 1,
    ) -> Self:
        """Some requests leave, others join, and counts move on: the operation of a decode step.

        The same as `filter(keep)`, then `merge(joining)`, then `advance(advance, n)`, each of them optional: one new
        batch instead of three, checked once. `n` is one integer, or one for each request of the result.
        """
        if type(advance) is tuple and not advance and (type(n) is not int or n != 1):
            raise ArgumentError(f"next_batch: n={n!r} of no column", n, "name columns: advance='seq_lens'")
        return self._next("next_batch", keep, joining, advance, n)

    def advance(self, columns: "str | Iterable[str] | Mapping[str, Amount]", n: "Amount" = 1) -> Self:
        """The same batch with integers added to one or several integer columns.

        `columns` is one column, several that all get `n`, or a mapping column -> its amounts; `n` one integer, or
        int[num_reqs].

        Raises:
            DeclarationError, ArgumentError: no such column, a column named twice, or a padded batch.
            DtypeError: a column of floats, booleans or indices, or `n` is not an integer.
            ShapeError: neither one amount nor one per row.
            ValueOverflowError, ContractError: a value would leave the column's dtype; an unsigned bound is lowered.
            Violation: DERIVED_STALE, at `cheap`: a mirrored value of other requests is added.
        """
        return self._next("advance", advance=columns, n=n)

    def _next(
        self, operation: str, keep: object = None, joining: Self | None = None, advance: Any = (), n: object = 1
    ) -> Self:
        subject = f"{type(self).__name__}.{operation}"
        num_reqs = self._begin(operation)
        state = self._state
        index = None if keep is None else self._kept(keep, num_reqs, subject)
        if index is not None:
            num_reqs = index.size
        if joining is not None or operation == "merge":
            if type(joining) is not type(self):
                remedy = "pass a batch of the same class, one in each call"
                raise expected(operation, f"another {type(self).__name__}", joining, remedy, DeclarationError)
            if joining.runtime is not self.runtime:
                raise another_runtime(operation, joining)
            joining._begin(operation)
            if self._pool_id != joining._pool_id and num_reqs and joining.num_reqs:
                problem = f"{operation}: expected slots of pool {self._pool_id}, got slots of pool {joining._pool_id}"
                raise ArgumentError(problem, joining._pool_id, "take all slots of a batch from one pool")
            state = state.merged(joining._state, index)
        elif index is not None:
            state = state.taken(index)
        added = amounts_by_column(advance, n, subject) if type(advance) is not tuple or advance else {}
        moved = state is not self._state
        if not moved:
            state = state.copied([name for name in added if name in self._layout.index])
        if added:
            state.add(added, subject)
        batch = self._derived(operation, state, num_reqs, moved=moved, joined=joining)
        batch._guesses = self._guesses or (joining is not None and joining._guesses)
        for name, amount in added.items():
            if isinstance(amount, MirroredTensor):
                batch._check_same_rows(amount, operation, name)
        return batch

    def _kept(self, keep: object, num_reqs: int, subject: str) -> Rows | None:
        """The rows that a filter keeps; None if it keeps all of them in order."""
        index = kept_rows(keep, num_reqs, subject)
        if type(keep) is not np.ndarray and isinstance(keep, MirroredTensor) and keep.dtype is torch.bool:
            self._check_same_rows(keep, subject.partition(".")[2])  # a column of indices has no rows of requests
        if index.size == num_reqs and (index == np.arange(num_reqs)).all():
            return None
        return index

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive batches of the given sizes, which sum to the number of requests.

        Raises `ArgumentError` (a negative size, a sum that differs, or a padded batch).
        """
        pieces = slices_of(sizes, self._begin("split"), f"{type(self).__name__}.split")
        return [
            self._derived("split", self._state.taken(np.arange(rows.start, rows.stop)), rows.stop - rows.start)
            for rows in pieces
        ]

    def pad(self, to: SupportsIndex) -> Self:
        """The same requests with padded rows up to `to` rows: slot 0, and each column's declared pad value.

        A padded batch is for one launch: it has `num_reqs` requests and `num_rows` rows, and does not move rows. Raises
        `ArgumentError` (fewer rows than requests, or padded already).
        """
        subject = f"{type(self).__name__}.pad"
        num_reqs = self._begin("pad")
        extra = count(to, f"{subject}: rows", least=num_reqs, most=MOST_ROWS) - num_reqs
        padded = self._state.padded(extra)
        batch = self._derived("pad", padded, num_reqs, num_rows=num_reqs + extra)
        batch._row_set = batch._named_rows(self.row_set.number)
        if levels.cheap:
            batch._check_tail("pad")
        return batch

    # Changing values

    def update(self, column: str, rows: "Selection", values: "Values") -> Self:
        """The same batch with other values in some rows of one mirrored column, on both sides.

        `column` has exact values and is not the slots. `rows` are a mask bool[num_reqs], or unique row indices int[k];
        `values` one value, or k. Values that do not fit are refused as elsewhere.
        """
        declared, subject = self._tensor_column(column, "update")
        index = kept_rows(rows, self._begin("update"), subject)
        if column not in self._layout.index or column in self._state.device or column == self._slot_column:
            raise ArgumentError(f"{subject}: the host has no exact values", column, f"use replace({column}=...)")
        new = host_values(declared, values, index.size, self.runtime, subject, some=True)
        return self._rewritten("update", column, index, new)

    def update_device(self, column: str, rows: "Selection", values: "Values", bound: object = None) -> Self:
        """The same batch with values of the device in some rows: those that a mixed step has verified.

        Nothing is launched: the rows are gathered with the others when they are read.

        Args:
            column: a mirrored column declared with `contract="upper_bound"`, or a device-only column.
            rows: a mask bool[num_reqs], or unique row indices int[k].
            values: `[k, *shape]`, a device tensor, taken over, or a mirrored value, whose device side is taken.
            bound: of a mirrored column: none of the values is more. One number, or `[k, *shape]`.

        Raises:
            ContractError: a column declared exact.
            ArgumentError: a mirrored column without a bound, a device-only one with a bound, or a padded batch.
            DeviceError: a tensor on another device, or host values.
            Violation: DERIVED_STALE, at `cheap`: rows of other requests. MIRROR_BOUND, at `full`.
        """
        declared, subject = self._tensor_column(column, "update_device")
        index = kept_rows(rows, self._begin("update_device"), subject)
        mirrored = column in self._layout.index
        if declared.contract is Contract.EXACT:
            problem = f"{subject}: expected a column of bounds, got an exact one"
            raise ContractError(problem, column, "declare it with contract='upper_bound', or use `update`")
        if mirrored != (bound is not None):
            problem = f"{subject}: expected {'a bound' if mirrored else 'no bound'}, got {bound!r}"
            raise ArgumentError(problem, bound, "pass bound= for a mirrored column, and no bound for a device-only one")
        if not isinstance(values, torch.Tensor | MirroredTensor):
            raise expected(subject, "a device tensor", values, "give host values to `update`", DeviceError)
        self._check_same_rows(values, "update_device", column, index)
        self._check_same_rows(bound, "update_device", column, index)
        if levels.full and isinstance(values, MirroredTensor):
            values.check("update_device")
        new = device_rows(declared, values, index.size, self.runtime, subject)
        bounds = None
        if bound is not None:
            bounds = host_values(declared, bound, index.size, self.runtime, subject, some=True, bounds=True)
        state = self._state.overwritten(column, index, new, bounds)
        return self._derived("update_device", state, self.num_reqs, moved=False)

    def tighten(self, column: str, bound: object, *, slots: Slots | None = None) -> Self:
        """The same batch with lower bounds on the host for one bounded column; nothing happens on the device.

        Args:
            column: a mirrored column that holds bounds.
            bound: numbers `[n, *shape]`, none above the present bounds: those that results of earlier steps prove.
                Each request of the batch needs one; rows of others are passed over.
            slots: of the rows of `bound`, int[n]. A result of a relay and a column know them; an array does not, and
                is refused without (`ArgumentError`). Else as `MirroredTensor.tighten`.
        """
        self._begin("tighten")
        declared, subject = self._tensor_column(column, "tighten")
        if slots is not None:
            handles = slots.row_set if slots.unit == "slot" else None
            if handles is None:
                raise ArgumentError(f"{subject}: slots are {slots!r}", slots, "pass handles, as `batch.slots`")
            numbers = as_array(lined_up(bound, handles, subject), subject)
            if numbers.shape[:1] != (len(slots),):
                shape = len(slots), *numbers.shape[1:]
                raise wrong_shape(subject, shape, numbers.shape, "pass one row for each slot")
            bound = handles.in_order_of(self.row_set, numbers, subject, operation=subject, step=self.runtime.step)
        elif self._slot_column is not None and getattr(bound, "row_set", None) is None:
            problem = f"{subject}: {type(bound).__name__} does not say to which requests its rows belong"
            raise ArgumentError(problem, bound, "pass a result of the relay, or slots= of the rows: slots=batch.slots")
        lower = self[column].tighten(bound).np
        declared.check_values(lower, self.runtime, subject)
        return self._rewritten("tighten", column, ..., lower)

    def _rewritten(self, operation: str, column: str, rows: Any, values: Array) -> Self:
        state = self._state.copied((column,))
        state.column(column)[rows] = values
        return self._derived(operation, state, self.num_reqs, moved=False)

    def replace(self, /, **columns: ColumnValues) -> Self:
        """The same requests with other values for some columns, given as to `build`.

        Raises as `build`, DERIVED_STALE (at `cheap`: a mirrored value whose rows are of other requests).
        """
        subject = f"{type(self).__name__}.replace"
        num_reqs = self._begin("replace")
        state = self._state.copied([name for name in columns if name in self._layout.index])
        pool_id = put_values(state, columns, num_reqs, self.runtime, subject)
        if pool_id is None:
            for name, value in columns.items():
                self._check_same_rows(value, "replace", name)
        windows = {name: windows for name, windows in self._open_windows().items() if name not in columns}
        batch = self._derived("replace", state, num_reqs, moved=False, pool_id=pool_id, windows=windows)
        if pool_id is not None:
            batch._check_slots("replace")
        return batch

    __replace__ = replace  # for `copy.replace`

    # To the device

    def on_device(self, *columns: str) -> dict[str, torch.Tensor]:
        """The device sides of some columns, to be read only, safe on the current stream: the inputs of a forward.

        The same tensors as `batch[name].device`, by default for all columns, in one call, which is several times as
        fast. Raises `DeclarationError` (no such column, or one of Python objects), MIRROR_STALE_READ,
        MIRROR_FOREIGN_WRITE, and at `full` what `check` raises.
        """
        names = columns or self._layout.tensors
        for name in columns:
            self._tensor_column(name, "on_device")
        for name, windows in self._open_windows().items():
            if name in names:
                check_fresh(windows, "device", **self._where("on_device", name))
        if levels.full:
            self._check_unwritten("on_device")
        return self.device_side.columns(names)

    def upload(self, *, writes: Sequence[TableWrite] = (), extras: Mapping[str, object] | None = None) -> Extras:
        """Sends the step to the device on the current stream: one copy, then one scatter for each table written.

        The copy has all columns too, unless this batch was uploaded before. The host does not wait.

        `writes` are table writes, from `Table.entry` or `Extension.entry`; `extras` further host arrays (positions,
        `query_start_loc`, ...) by name, whose device tensors are returned.

        Raises:
            CaptureError: the stream is being captured.
            DtypeError, DeviceError: an extra that torch and numpy do not share; a table of another runtime.
            ArgumentError: one element is written twice, at level `full`.
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_STALE_READ of a host side, and at `full` those of `check`.
                SLOT_STALE_HANDLE: a request has left; DERIVED_STALE: extras or writes of other rows or changed pages.
        """
        self._check_step(extras, "upload")
        arrays, state = {} if extras is None else extras, self._state
        alone = self._device is None and self._crossed is None and not state.device
        first = alone or not self.device_side.uploaded
        if first:
            self._check_host_is_fresh("upload")
        if alone:  # all columns cross now, and no `BatchDevice` is needed before one is read
            self._crossed, uploaded = packed_step(self.runtime, [state.crossing()], writes, arrays)
        else:
            uploaded = self.device_side.upload(writes, arrays)
        if arrays:  # by which a plan knows them
            uploaded.row_set = self.row_set
        if first and levels.full:
            self.check("upload")
        return uploaded

    def to_static(
        self, buffers: "StaticBuffers", *, writes: Sequence[TableWrite] = (), extras: Mapping[str, object] | None = None
    ) -> Extras:
        """Sends the step to the fixed addresses of `StaticBuffers`, on the current stream, in one copy.

        The batch is padded to the rows of the buffers, which are of this class and have as many rows or more. The step
        before is overwritten: replay a graph that reads it on the same stream before, or declare it with
        `buffers.read_until`. The batch's own device side is neither made nor changed. The host does not wait. `writes`
        and `extras` are as for `upload`; the extras those that the buffers were made with, whose tensors are returned.

        Raises:
            ArgumentError, ShapeError, DtypeError: more rows than the buffers have, or other extras.
            DeclarationError, DeviceError: buffers of another batch class, or of another runtime.
            CaptureError: the stream is being captured: fill the buffers before, or between replays.
            Violation: as for `upload`; at `full` MIRROR_EQUAL, MIRROR_BOUND, TAIL_STALE.
        """
        self._check_step(extras, "to_static")
        self._check_host_is_fresh("to_static")
        uploaded = buffers.receive(self, writes, {} if extras is None else extras)
        uploaded.row_set = self.row_set
        return uploaded

    def _check_host_is_fresh(self, operation: str) -> None:
        """A step is sent from the host side: not inside a window in which that side is knowingly old."""
        for name, windows in self._open_windows().items():
            if name not in self._state.device:
                check_fresh(windows, "host", **self._where(operation, name))

    def _check_step(self, extras: Mapping[str, object] | None, operation: str) -> None:
        """Checks, before a step is sent, the origin of its extras, the columns, and the requests."""
        if extras is not None:
            for name, values in self._checked_extras(extras, operation).items():
                if not isinstance(values, MirroredTensor) or values.unit is not None or len(values) < self.num_reqs:
                    continue  # fewer are of some requests
                if (rows := values.row_set) is not None:
                    self.row_set.check_same(rows, values, **self._where(operation, name))
        if levels.full or self._exposed or self._device is not None:
            self._check_unwritten(operation)
        if levels.cheap and self._pool_id:
            self.check_live(operation)

    def _checked_extras(self, extras: Mapping[str, object], operation: str) -> Mapping[str, object]:
        if isinstance(extras, DerivedArrays) and levels.cheap:
            where = self._where(operation)
            extras.origin.check_rows(self.row_set, **where)
            extras.origin.check(**where)
        return extras

    # Checks

    def check(self, operation: str = "check") -> None:
        """Checks every invariant of this batch and its columns that applies at the present level.

        Raises ROW_COUNT, TAIL_STALE, SLOT_SHARED, SLOT_ZERO_ALLOCATED, SENTINEL_ESCAPED, and those of
        `MirroredTensor.check`.
        """
        if not levels.cheap:
            return
        if levels.full:  # first: it says which row. Columns not read yet are compared too, and nothing is launched
            for name, column in self._layout.tensors.items():
                value, rows = self[name], self._state.device.get(name)
                if rows is not None:
                    if not value.open_windows:
                        rows.check_sources(self.runtime, self._where(operation, name), value._host)
                    checked = column.takes_any or name in self._layout.index
                    if not checked and (contents := rows.contents(self.runtime)) is not None:
                        column.check_values(contents[1], self.runtime, operation)
                elif self.device_side.packed is not None:
                    value._device.tensor(self.runtime)  # a view of the copy
                value.check(operation)
        self._check_rows(operation)
        self._check_slots(operation)
        self._check_tail(operation)
        self._check_read_columns(operation)

    def _check_unwritten(self, operation: str) -> None:
        """Reports a write from outside before an operation replaces its value: at `full` by comparing the sides."""
        if levels.full:
            self.check(operation)
        elif levels.cheap:
            self._check_read_columns(operation)

    def check_live(self, operation: str = "check_live") -> None:
        """Raises SLOT_STALE_HANDLE unless each request still has its slot. Slots of no pool have no owner to ask."""
        pool = pools.get(self._pool_id)
        if pool is None or self._slot_column is None:
            return
        slots, live = self._state.column(self._slot_column), slice(self.num_reqs)
        pool.check_held(slots[live], self._state.generations[live], operation)

    def _check_read_columns(self, operation: str) -> None:
        """Checks exposed values, as only these can have been written: device sides, and host sides as tensors."""
        for value in self._exposed:
            value.check(operation)
        if self._device is not None and (written := self._device.written()) is not None:
            name, before, now = written
            invariants.mirror_foreign_write("device", before, now, **self._where(operation, name or None))

    def _check_rows(self, operation: str) -> None:
        state = self._state
        if state.block.n == self.num_rows and not (state.device or state.objects):
            times_checked[_ROW_COUNT] += 1
            return
        counts, padding = {"mirrored columns": state.block.n}, self.num_rows - self.num_reqs
        counts |= {name: len(rows) for name, rows in state.device.items()}
        counts |= {name: len(objects) + padding for name, objects in state.objects.items()}  # padded rows have none
        invariants.row_count(self.num_rows, counts, **self._where(operation))

    def _check_slots(self, operation: str) -> None:
        """No request has slot 0, a negative one, or that of another."""
        if self._slot_column is None:
            return
        if self._state.block.wrong_slot(self.num_reqs) < 0:
            for code in _OF_SLOTS:
                times_checked[code] += 1
            return
        slots, where = self._state.column(self._slot_column)[: self.num_reqs], self._where(operation, self._slot_column)
        invariants.sentinel_escaped(slots, **where)
        invariants.slot_zero_allocated(slots, **where)
        invariants.slot_shared(slots, **where)
        raise RuntimeError(f"{operation}: slots were refused that no rule refuses")  # pragma: no cover

    def _check_tail(self, operation: str) -> None:
        if self.num_rows == self.num_reqs:
            return
        start, c = self.num_reqs, self._state.block.other_pad(self._layout.pads, self.num_reqs)
        for name, at in self._layout.index.items():
            if c in (-1, at):
                tail, pad = self._state.column(name)[start:], self._layout.tensors[name].pad
                invariants.tail_stale(tail, pad, start, **self._where(operation, name))

    # Helpers

    def _derived(
        self,
        operation: str,
        state: RowState,
        num_reqs: int,
        *,
        num_rows: int | None = None,
        pool_id: int | None = None,
        windows: Windows | None = None,
        moved: bool = True,
        joined: Self | None = None,
    ) -> Self:
        """The result of an operation, checked; `joined` are the requests that come behind `num_reqs` of this one.

        `moved` is False if no row moved: all that did not change stays on the device. `pool_id` is of other slots.
        """
        row_set = self.row_set if not moved and pool_id is None else None
        if pool_id is None:
            pool_id = self._pool_id
        if windows is None:
            windows = self._open_windows()
        if joined is not None:
            if theirs := joined._open_windows():
                windows = {**windows, **theirs}
            if not num_reqs:
                pool_id = joined._pool_id
            num_reqs += joined.num_reqs
        rows = num_reqs if num_rows is None else num_rows
        lease = None if moved else self.lease  # the block may be the same, and what is on the device
        batch = type(self)(self.runtime, state, num_reqs, rows, pool_id, windows, row_set, lease)
        if state.changed is not None and (self._device is not None or self._crossed is not None):
            batch._device = self.device_side.kept(state, state.changed)
        if levels.full:
            batch.check(operation)
        elif levels.cheap:
            if moved:
                batch._check_rows(operation)
            if joined is not None and joined.num_reqs:
                batch._check_slots(operation)
        return batch

    def _begin(self, operation: str) -> int:
        """Checks before an operation: nothing that is exposed was written, and the batch has no padding."""
        if levels.full:
            self._check_unwritten(operation)
        elif levels.cheap and (self._exposed or ((device := self._device) is not None and device.packed is not None)):
            self._check_read_columns(operation)
        num_reqs = self.num_reqs
        if self.num_rows != num_reqs:
            problem = f"{type(self).__name__}.{operation}: a batch padded from {num_reqs} to {self.num_rows} rows"
            raise ArgumentError(problem, self.num_rows, "keep the batch from before `pad`: this one is for one launch")
        return num_reqs

    def _check_same_rows(
        self, value: object, operation: str, column: str | None = None, rows: Rows | None = None
    ) -> None:
        """Refuses a value of other requests than those in `rows`, by default all; a value without requests is fine."""
        if isinstance(value, MirroredTensor) and value.row_set is not None and levels.cheap:
            ours = self.row_set if rows is None else self.row_set.taken(rows)
            if ours is not None:
                ours.check_same(value.row_set, value, **self._where(operation, column))

    def _tensor_column(self, name: str, operation: str) -> tuple[TensorColumn, str]:
        column, subject = self._layout.tensors.get(name), f"{type(self).__name__}.{operation}: column {name!r}"
        if column is None:
            raise DeclarationError(f"{subject} is not a tensor column", name, one_of(self._layout.tensors, name))
        return column, subject

    def _where(self, operation: str, column: str | None = None) -> Where:
        where: Where = {"object": self, "operation": operation, "step": self.runtime.step}
        if column is not None:
            where["column"] = column
        return where
