"""`Batch`: declared columns of one batch of requests, moved as one.

    class Decode(Batch):
        slots = slot_column()
        seq_lens = mirrored(torch.int64)
        last_token = device_only(torch.int64)
        requests = host_list()

A batch is immutable; every operation returns a new one. Operations are numpy on a few packed arrays; nothing goes to
the device before `upload`, or before somebody reads a column's device side. Then all columns cross in one copy,
together with the step's table writes and derived arrays.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, SupportsIndex

import numpy as np

from batchstate import invariants, levels
from batchstate.batch_input import read_columns, rows_of
from batchstate.batch_upload import Extras, PackedBatch, pack
from batchstate.columns import Column, MirroredColumn, SlotColumn, TensorColumn
from batchstate.contracts import Contract
from batchstate.device_rows import MOST_SOURCES, DeviceRows
from batchstate.device_side import DeviceSide, Made
from batchstate.errors import ArgumentError, DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.host_arrays import Array, converted, count, kept_rows
from batchstate.host_rows import GENERATION_SUFFIX, HostRows, Layout
from batchstate.integers import across, amounts, shifted
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime
from batchstate.tables import TableWrite
from batchstate.violations import Where


class Batch:
    """Base of declared batches. Subclass it to declare columns; never to override what is here.

    Attributes:
        runtime: the device.
        num_reqs: requests; `len(batch)` too.
        num_rows: rows of each column, `num_reqs` and padding.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    __slots__ = (
        "__weakref__",
        "_device_rows",
        "_objects",
        "_packed",
        "_pool",
        "_rows",
        "_values",
        "num_reqs",
        "num_rows",
        "runtime",
        "version",
    )

    _columns: ClassVar[Mapping[str, Column]] = {}
    _layout: ClassVar[Layout] = Layout.of([])
    _slot_column: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = dict(cls._columns)
        for name, value in vars(cls).items():
            if name in _RESERVED and not name.startswith("__"):
                raise DeclarationError(
                    f"{cls.__name__}.{name} would hide what every batch has",
                    value=name,
                    remedy="choose another name for the column",
                )
            if isinstance(value, Column):
                declared[name] = value
        slots = [name for name, column in declared.items() if isinstance(column, SlotColumn)]
        if len(slots) > 1:
            raise DeclarationError(
                f"{cls.__name__} declares {len(slots)} slot columns", value=slots, remedy="a request has one slot"
            )
        cls._columns = declared
        cls._layout = Layout.of([one for one in declared.values() if isinstance(one, MirroredColumn)])
        cls._slot_column = slots[0] if slots else None

    def __init__(
        self,
        runtime: Runtime,
        rows: HostRows,
        device_rows: Mapping[str, DeviceRows],
        objects: Mapping[str, Array],
        *,
        num_reqs: int,
        num_rows: int,
        pool: int,
    ) -> None:
        """For the library; use `build` or `empty`."""
        self.runtime = runtime
        self.num_reqs = num_reqs
        self.num_rows = num_rows
        self.version = runtime.new_version()
        self._rows = rows
        self._device_rows = device_rows
        self._objects = objects
        self._pool = pool
        self._packed: PackedBatch | None = None
        self._values: dict[str, Any] = {}

    # Making

    @classmethod
    def build(cls, runtime: Runtime, **columns: object) -> Self:
        """A batch from a value for every declared column.

        Args:
            runtime: the device.
            **columns: lists, arrays, CPU tensors or mirrored values for mirrored columns (slots: what the pool handed
                out); device tensors for device-only columns; any sequence for host columns. All with one row a request.

        Raises:
            DeclarationError: a column is missing or not declared.
            ShapeError, DtypeError, ValueOverflowError, ContractError, DeviceError: see `batch_input.read_columns`.
            Violation: SLOT_SHARED, SLOT_ZERO_ALLOCATED, SENTINEL_ESCAPED, UNIT_MISMATCH.
        """
        missing = [name for name in cls._columns if name not in columns]
        if missing:
            raise DeclarationError(
                f"{cls.__name__}.build: no value for {', '.join(missing)}",
                value=missing,
                remedy="give every declared column its value",
            )
        num_rows = rows_of(columns, f"{cls.__name__}.build")
        given = read_columns(cls._columns, columns, num_rows, runtime, f"{cls.__name__}.build")
        batch = cls(
            runtime,
            HostRows.of(cls._layout, given.host, num_rows),
            given.device,
            given.objects,
            num_reqs=num_rows,
            num_rows=num_rows,
            pool=given.pool or 0,
        )
        batch._check_slots("build")
        return batch._checked("build")

    @classmethod
    def empty(cls, runtime: Runtime) -> Self:
        """A batch of no requests: what an idle step and a first merge start from."""
        values: dict[str, object] = {}
        for name, column in cls._columns.items():
            if isinstance(column, TensorColumn):
                values[name] = np.empty((0, *column.shape), dtype=column.np_dtype)
            else:
                values[name] = ()
        return cls.build(runtime, **values)

    # Reading

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        """The declarations by name, in order."""
        return dict(cls._columns)

    def __len__(self) -> int:
        return self.num_reqs

    def __getitem__(self, column: str) -> MirroredTensor:
        """The value of a mirrored or device-only column.

        Raises:
            DeclarationError: no such column, or one of Python objects.
        """
        value = self._values.get(column)
        if value is None:
            declared = self._columns.get(column)
            if not isinstance(declared, TensorColumn):
                raise DeclarationError(
                    f"{type(self).__name__} has no tensor column {column!r}",
                    value=column,
                    remedy=f"use one of: {', '.join(self._columns)}",
                )
            value = self._values[column] = self._value(declared)
        return value

    def _value(self, column: TensorColumn) -> MirroredTensor:
        name = column.name
        mirrored = isinstance(column, MirroredColumn)
        contract = Contract.EXACT
        if name in self._device_rows:
            contract = Contract.UPPER_BOUND if mirrored else Contract.DEVICE_ONLY
        tags: tuple[Array, ...] = ()
        if name == self._slot_column:
            tags = (self._rows.column(name + GENERATION_SUFFIX),)
        return column.value_type(
            self.runtime,
            self._rows.column(name) if mirrored else None,
            DeviceSide(lambda: self._made(column)),
            dtype=column.dtype,
            shape=(self.num_rows, *column.shape),
            contract=contract,
            name=name,
            tags=tags,
            origin=self._pool if tags else 0,
        )

    def _made(self, column: TensorColumn) -> Made:
        """The device side of a column; uploads the whole batch if nobody did before."""
        packed = self._ensure_packed()
        rows = self._device_rows.get(column.name)
        if rows is None:
            place = self._layout.places[column.name]
            return packed.column(place.stack, place.lane, place.dtype)
        tensor = rows.gathered(self.runtime, packed.needed(column.name, self.runtime))
        return Made(tensor, self.runtime.current_stream)

    def objects(self, column: str) -> tuple[Any, ...]:
        """The Python objects of a host column, one a request.

        Raises:
            DeclarationError: no such column.
        """
        if column not in self._objects:
            raise DeclarationError(
                f"{type(self).__name__} has no host column {column!r}",
                value=column,
                remedy=f"use one of: {', '.join(self._objects)}",
            )
        return tuple(self._objects[column].tolist())

    # Moving rows

    def filter(self, keep: object) -> Self:
        """The requests that `keep` names, in its order: a mask bool[num_reqs], or unique row indices.

        Raises:
            ShapeError, DtypeError, RowIndexError, ArgumentError: see `host_arrays.kept_rows`.
        """
        rows = kept_rows(keep, self._unpadded("filter"), f"{type(self).__name__}.filter")
        return self._with(
            self._rows.taken(rows),
            {name: one.taken(rows) for name, one in self._device_rows.items()},
            {name: one[rows] for name, one in self._objects.items()},
            len(rows),
        )._checked("filter")

    def merge(self, other: Self) -> Self:
        """These requests, then those of `other`. A column exact here and bounded there becomes bounded.

        Raises:
            DeclarationError: `other` is of another declaration.
            DeviceError: `other` belongs to another runtime.
            ArgumentError: slots of two pools, or a padded batch.
            Violation: SLOT_SHARED, at `cheap`: a request stands in both.
        """
        if type(other) is not type(self):
            raise DeclarationError(
                f"merge of {type(self).__name__} with {type(other).__name__}",
                value=type(other).__name__,
                remedy="merge batches of one declaration",
            )
        if other.runtime is not self.runtime:
            raise DeviceError("merge of batches of two runtimes", value=other, remedy="use one runtime")
        self._unpadded("merge")
        other._unpadded("merge")
        if self._pool != other._pool and len(self) and len(other):
            raise ArgumentError(
                f"merge of slots of pools {self._pool} and {other._pool}",
                value=other._pool,
                remedy="requests of one batch take their slots from one pool",
            )
        device_rows = {
            name: self._rows_on_device(name).merged(other._rows_on_device(name))
            for name in (*self._device_rows, *(one for one in other._device_rows if one not in self._device_rows))
        }
        batch = self._with(
            self._rows.merged(other._rows),
            device_rows,
            {name: np.concatenate((one, other._objects[name])) for name, one in self._objects.items()},
            len(self) + len(other),
            pool=self._pool if len(self) else other._pool,
        )
        if len(other):
            batch._check_slots("merge")
        return batch._checked("merge")

    def _rows_on_device(self, column: str) -> DeviceRows:
        rows = self._device_rows.get(column)
        return DeviceRows.of(self._rows.column(column), self.num_rows) if rows is None else rows

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive batches of the given sizes, which sum to the number of requests.

        Raises:
            ArgumentError: a negative size, a sum that differs, or a padded batch.
        """
        what = f"{type(self).__name__}.split"
        num_reqs = self._unpadded("split")
        lengths = [count(size, f"{what}: size") for size in sizes]
        if sum(lengths) != num_reqs:
            raise ArgumentError(
                f"{what}: sizes {lengths} sum to {sum(lengths)}, not {num_reqs}",
                value=lengths,
                remedy="cover every row",
            )
        starts = np.cumsum([0, *lengths])
        pieces = []
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            index = np.arange(start, stop, dtype=np.int64)
            piece = self._with(
                self._rows.sliced(start, stop),
                {name: one.taken(index) for name, one in self._device_rows.items()},
                {name: one[start:stop] for name, one in self._objects.items()},
                stop - start,
            )
            pieces.append(piece._checked("split"))
        return pieces

    def pad(self, to: SupportsIndex) -> Self:
        """The same requests with padded rows up to `to` rows: slot 0, and each column's declared pad value.

        A padded batch is for one launch: it has `num_reqs` requests and `num_rows` rows, and does not move rows.

        Raises:
            ArgumentError: fewer rows than requests, or padded already.
        """
        what = f"{type(self).__name__}.pad"
        num_reqs = self._unpadded("pad")
        extra = count(to, f"{what}: rows", least=num_reqs) - num_reqs
        device_rows = {}
        for name, one in self._device_rows.items():
            column = self._columns[name]
            tail = np.repeat(column.pad[None], extra, axis=0) if isinstance(column, TensorColumn) else None
            device_rows[name] = one if tail is None else one.merged(DeviceRows.of(tail, extra))
        batch = self._with(self._rows.padded(extra), device_rows, self._objects, num_reqs, num_rows=num_reqs + extra)
        if levels.cheap:
            batch._check_tail("pad")
        return batch._checked("pad")

    # Changing values

    def advance(self, columns: str | Iterable[str], n: object) -> Self:
        """The same batch with `n` (one integer, or int[num_reqs]) added to one or several integer columns.

        Raises:
            DeclarationError: no such column.
            DtypeError: a column of floats, booleans or indices, or `n` no integer.
            ValueOverflowError: a value would leave the column's dtype.
            ArgumentError: a padded batch.
        """
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        num_reqs = self._unpadded("advance")
        host: dict[str, Array] = {}
        device_rows = dict(self._device_rows)
        for name in names:
            what = f"{type(self).__name__}.advance: column {name!r}"
            column = self._tensor_column(name, what)
            if column.np_dtype.kind not in "iu" or column.unit is not None:
                raise DtypeError(
                    f"{what} holds {column.unit or column.np_dtype}",
                    value=column.dtype,
                    remedy="only integers that are no indices are computed; set others with `update` or `evolve`",
                )
            amount = amounts(n, num_reqs, what)
            if isinstance(column, MirroredColumn):
                host[name] = shifted(self._rows.column(name), across(amount, 1 + len(column.shape)), what)
            if name in device_rows:
                device_rows[name] = device_rows[name].shifted(amount)
        return self._with(self._rows.replaced(host), device_rows, self._objects, num_reqs)._checked("advance")

    def update(self, column: str, rows: object, values: object) -> Self:
        """The same batch with other values in some rows of one mirrored column, on both sides.

        Args:
            column: a mirrored column whose value is exact; not the slots.
            rows: a mask bool[num_reqs], or unique row indices int[k].
            values: one value, or k.

        Raises:
            DeclarationError, DtypeError, ShapeError, RowIndexError, ArgumentError, ValueOverflowError: as elsewhere.
        """
        what = f"{type(self).__name__}.update: column {column!r}"
        declared = self._tensor_column(column, what)
        index = kept_rows(rows, self._unpadded("update"), what)
        if not isinstance(declared, MirroredColumn) or column in self._device_rows or column == self._slot_column:
            raise ArgumentError(
                f"{what} has no exact host side of its own", value=column, remedy=f"use evolve({column}=...)"
            )
        new = converted(values, declared.np_dtype, what)
        shape = (len(index), *declared.shape)
        if new.shape != shape and new.shape != declared.shape:
            raise ShapeError(f"{what}: {list(new.shape)} for {list(shape)}", value=new.shape, remedy="one row each")
        replaced = self._rows.column(column).copy()
        replaced[index] = new
        return self._with(
            self._rows.replaced({column: replaced}), self._device_rows, self._objects, self.num_reqs
        )._checked("update")

    def evolve(self, **columns: object) -> Self:
        """The same requests with other values for some columns, given as to `build`. Raises what `build` raises."""
        what = f"{type(self).__name__}.evolve"
        num_reqs = self._unpadded("evolve")
        given = read_columns(self._columns, columns, num_reqs, self.runtime, what)
        device_rows = {name: one for name, one in self._device_rows.items() if name not in given.exact}
        batch = self._with(
            self._rows.replaced(given.host),
            device_rows | given.device,
            {**self._objects, **given.objects},
            num_reqs,
            pool=self._pool if given.pool is None else given.pool,
        )
        if given.pool is not None:
            batch._check_slots("evolve")
        return batch._checked("evolve")

    # To the device

    def upload(self, *, writes: Sequence[TableWrite] = (), extras: Mapping[str, object] | None = None) -> Extras:
        """Sends the step to the device on the current stream: one copy, then one scatter for each table written.

        All columns ride in the copy, unless this batch was uploaded before. The host does not wait.

        Args:
            writes: table writes, from `Table.entry` or `Extension.entry`.
            extras: derived host arrays (positions, `query_start_loc`, ...) by name.

        Returns:
            the device tensors of `extras`.

        Raises:
            CaptureError: the stream is being captured.
            DtypeError: an extra that torch and numpy do not share.
        """
        again = self._packed is not None
        if again and not writes and not extras:
            return Extras(self.runtime, None, {})
        packed, mapping = pack(
            self.runtime, () if again else self._rows.stacks, {} if again else self._needs(), writes, extras or {}
        )
        if not again:
            self._packed = packed
            for name, rows in self._device_rows.items():
                if len(rows.sources) > MOST_SOURCES:
                    self[name].device_side.tensor(self.runtime)
        return mapping

    def _ensure_packed(self) -> PackedBatch:
        if self._packed is None:
            self._packed, _ = pack(self.runtime, self._rows.stacks, self._needs(), (), {})
        return self._packed

    def _needs(self) -> dict[str, list[Array]]:
        needs = {}
        for name, rows in self._device_rows.items():
            column = self._tensor_column(name, "upload")
            needs[name] = rows.arrays(column.dtype, 1 + len(column.shape))
        return needs

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
        names = [name for name, column in self._columns.items() if isinstance(column, TensorColumn)]
        for name in names if levels.full else self._values:
            self[name].check(operation)

    def _checked(self, operation: str) -> Self:
        if levels.full:
            self.check(operation)
        elif levels.cheap:
            self._check_rows(operation)
        return self

    def _check_rows(self, operation: str) -> None:
        lengths = self._rows.lengths()
        lengths.update({name: len(rows) for name, rows in self._device_rows.items()})
        where = self._where(operation)
        invariants.row_count(self.num_rows, lengths, **where)
        if self._objects:
            invariants.row_count(self.num_reqs, {name: len(one) for name, one in self._objects.items()}, **where)

    def _check_slots(self, operation: str) -> None:
        if not levels.cheap or self._slot_column is None:
            return
        slots = self._rows.column(self._slot_column)[: self.num_reqs]
        where = self._where(operation, self._slot_column)
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

    # Helpers

    def _with(
        self,
        rows: HostRows,
        device_rows: Mapping[str, DeviceRows],
        objects: Mapping[str, Array],
        num_reqs: int,
        *,
        num_rows: int | None = None,
        pool: int | None = None,
    ) -> Self:
        return type(self)(
            self.runtime,
            rows,
            device_rows,
            objects,
            num_reqs=num_reqs,
            num_rows=num_reqs if num_rows is None else num_rows,
            pool=self._pool if pool is None else pool,
        )

    def _unpadded(self, operation: str) -> int:
        if self.num_rows != self.num_reqs:
            raise ArgumentError(
                f"{type(self).__name__}.{operation}: a batch padded from {self.num_reqs} to {self.num_rows} rows",
                value=self.num_rows,
                remedy="keep the batch from before `pad`; a padded one is for one launch",
            )
        return self.num_reqs

    def _tensor_column(self, name: str, what: str) -> TensorColumn:
        column = self._columns.get(name)
        if not isinstance(column, TensorColumn):
            raise DeclarationError(
                f"{what} is no tensor column", value=name, remedy=f"use one of: {', '.join(self._columns)}"
            )
        return column

    def _where(self, operation: str, column: str | None = None) -> Where:
        where: Where = {"object": self, "operation": operation, "step": self.runtime.step}
        if column is not None:
            where["column"] = column
        return where

    def __repr__(self) -> str:
        padding = f" padded to {self.num_rows}" if self.num_rows != self.num_reqs else ""
        return (
            f"{type(self).__name__}({self.num_reqs} requests{padding}, {len(self._columns)} columns) "
            f"on {self.runtime.device}"
        )


_RESERVED = frozenset(dir(Batch)) - frozenset(dir(object))
