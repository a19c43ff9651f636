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
from typing import Self, SupportsIndex

import numpy as np

from batchstate import levels
from batchstate.batching.device_rows import DeviceRows
from batchstate.batching.given import read_columns, rows_of
from batchstate.batching.host_rows import HostRows
from batchstate.batching.record import BatchRecord
from batchstate.batching.sending import SendableRecord
from batchstate.batching.upload import Extras
from batchstate.columns import MirroredColumn, TensorColumn
from batchstate.errors import ArgumentError, DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.runtime import Runtime
from batchstate.values.host_arrays import converted, count, counts, kept_rows
from batchstate.values.integers import across, amounts, check_bound_can_move, shift

__all__ = ["Batch", "Extras"]


class Batch(SendableRecord):
    """Base of declared batches. Subclass it to declare columns; never to override what is here.

    Attributes:
        runtime: the device.
        num_reqs: requests; `len(batch)` too.
        num_rows: rows of each column, `num_reqs` and padding.
        version: a number that no other value of the runtime has; stamp derived metadata with it.
    """

    __slots__ = ()

    # Making

    @classmethod
    def build(cls, runtime: Runtime, /, **columns: object) -> Self:
        """A batch from a value for every declared column.

        Args:
            runtime: the device.
            **columns: lists, arrays, CPU tensors or mirrored values for mirrored columns (slots: what the pool handed
                out); device tensors for device-only columns; any sequence for host columns. All with one row a request.

        Raises:
            DeclarationError: a column is missing or not declared.
            ShapeError: another number of rows, or another shape of a row.
            DtypeError, ValueOverflowError: values that do not go into the column.
            ContractError: a contract weaker than the column takes.
            DeviceError: values of another runtime, or a tensor on another device.
            Violation: SLOT_SHARED, SLOT_ZERO_ALLOCATED, SENTINEL_ESCAPED, UNIT_MISMATCH.
        """
        missing = [name for name in cls._columns if name not in columns]
        if missing:
            unknown = [name for name in columns if name not in cls._columns]
            also = f", but values for {', '.join(unknown)}, which it does not declare" if unknown else ""
            raise DeclarationError(
                f"{cls.__name__}.build: no value for {', '.join(missing)}{also}",
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
            num_rows,
            num_rows,
            given.pool or 0,
        )
        batch._check_slots("build")
        batch._check_made("build")
        return batch

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

    # Moving rows

    def filter(self, keep: object) -> Self:
        """The requests that `keep` names, in its order: a mask bool[num_reqs], or unique row indices.

        Raises:
            ShapeError: a mask of another length.
            DtypeError: neither booleans nor integers.
            RowIndexError: an index outside [0, num_reqs).
            ArgumentError: an index twice, or a padded batch.
        """
        rows = kept_rows(keep, self._begin("filter"), f"{type(self).__name__}.filter")
        device_rows, objects = self._device_rows, self._objects
        return self._with(
            "filter",
            self._rows.taken(rows),
            device_rows and {name: one.taken(rows) for name, one in device_rows.items()},
            objects and {name: one[rows] for name, one in objects.items()},
            rows.size,
        )

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
        self._begin("merge")
        other._begin("merge")
        if self._pool != other._pool and self.num_reqs and other.num_reqs:
            raise ArgumentError(
                f"merge of slots of pools {self._pool} and {other._pool}",
                value=other._pool,
                remedy="requests of one batch take their slots from one pool",
            )
        mine, theirs = self._device_rows, other._device_rows
        windows, their_windows = self._open_windows(), other._open_windows()
        batch = self._with(
            "merge",
            self._rows.merged(other._rows),
            (mine or theirs)
            and {
                name: self._rows_on_device(name).merged(other._rows_on_device(name))
                for name in (*mine, *(one for one in theirs if one not in mine))
            },
            self._objects
            and {name: np.concatenate((one, other._objects[name])) for name, one in self._objects.items()},
            self.num_reqs + other.num_reqs,
            pool=self._pool if self.num_reqs else other._pool,
            windows={**windows, **their_windows} if their_windows else windows,
        )
        if other.num_reqs and levels.cheap:
            batch._check_slots("merge")
        return batch

    def _rows_on_device(self, column: str) -> DeviceRows:
        rows = self._device_rows.get(column)
        return DeviceRows.of(self._rows.column(column), self.num_rows) if rows is None else rows

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive batches of the given sizes, which sum to the number of requests.

        Raises:
            ArgumentError: a negative size, a sum that differs, or a padded batch.
        """
        what = f"{type(self).__name__}.split"
        num_reqs = self._begin("split")
        lengths = counts(sizes, what)
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
                "split",
                self._rows.sliced(start, stop),
                {name: one.taken(index) for name, one in self._device_rows.items()},
                {name: one[start:stop] for name, one in self._objects.items()},
                stop - start,
            )
            pieces.append(piece)
        return pieces

    def pad(self, to: SupportsIndex) -> Self:
        """The same requests with padded rows up to `to` rows: slot 0, and each column's declared pad value.

        A padded batch is for one launch: it has `num_reqs` requests and `num_rows` rows, and does not move rows.

        Raises:
            ArgumentError: fewer rows than requests, or padded already.
        """
        what = f"{type(self).__name__}.pad"
        num_reqs = self._begin("pad")
        extra = count(to, f"{what}: rows", least=num_reqs) - num_reqs
        device_rows = {}
        for name, one in self._device_rows.items():
            column = self._columns[name]
            tail = np.repeat(column.pad[None], extra, axis=0) if isinstance(column, TensorColumn) else None
            device_rows[name] = one if tail is None else one.merged(DeviceRows.of(tail, extra))
        batch = self._with(
            "pad", self._rows.padded(extra), device_rows, self._objects, num_reqs, num_rows=num_reqs + extra
        )
        if levels.cheap:
            batch._check_tail("pad")
        return batch

    # Changing values

    def advance(self, columns: str | Iterable[str] | Mapping[str, object], n: object = 1) -> Self:
        """The same batch with integers added to one or several integer columns.

        Args:
            columns: one column, several that all get `n`, or a mapping column -> what is added to it.
            n: one integer, or int[num_reqs]; not looked at when `columns` is a mapping.

        Raises:
            DeclarationError: no such column.
            DtypeError: a column of floats, booleans or indices, or `n` no integer.
            ValueOverflowError: a value would leave the column's dtype.
            ArgumentError: a padded batch, or a column named twice.
        """
        added = {columns: n} if isinstance(columns, str) else _added(columns, n, f"{type(self).__name__}.advance")
        num_reqs = self._begin("advance")
        places = self._layout.places
        rows = self._rows.copied([name for name in added if name in places])
        device_rows = self._device_rows
        for name, by in added.items():
            what = f"{type(self).__name__}.advance: column {name!r}"
            column = self._tensor_column(name, what)
            if not column.counted:
                raise DtypeError(
                    f"{what} holds {column.unit or column.np_dtype}",
                    value=column.dtype,
                    remedy="only integers that are no indices are computed; set others with `update` or `evolve`",
                )
            amount = amounts(by, num_reqs, what)
            if name in places:
                if name in device_rows:
                    check_bound_can_move(column.dtype, amount, what)
                shift(rows.column(name), across(amount, 1 + len(column.shape)) if amount.ndim else amount, what)
            if name in device_rows:
                device_rows = {**device_rows, name: device_rows[name].shifted(amount)}
        return self._changed("advance", rows, device_rows)

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
        index = kept_rows(rows, self._begin("update"), what)
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
        return self._changed("update", self._rows.replaced({column: replaced}), self._device_rows)

    def tighten(self, column: str, bound: object) -> Self:
        """The same batch with lower bounds on the host for one bounded column; nothing happens on the device.

        Args:
            column: a mirrored column that holds bounds.
            bound: numbers `[num_reqs, *shape]`, none above the present bounds: what results of earlier steps prove.

        Raises:
            DeclarationError: no such column. Else as `MirroredTensor.tighten`.
        """
        self._begin("tighten")
        what = f"{type(self).__name__}.tighten: column {column!r}"
        if not isinstance(column, str):
            raise DeclarationError(f"{what} names no column", value=column, remedy="pass one column name")
        self._tensor_column(column, what)
        lower = self[column].tighten(bound).np.copy()
        rows = self._rows.replaced({column: lower})
        return self._changed("tighten", rows, self._device_rows)

    def evolve(self, /, **columns: object) -> Self:
        """The same requests with other values for some columns, given as to `build`. Raises what `build` raises."""
        what = f"{type(self).__name__}.evolve"
        num_reqs = self._begin("evolve")
        given = read_columns(self._columns, columns, num_reqs, self.runtime, what)
        device_rows = {name: one for name, one in self._device_rows.items() if name not in given.exact}
        batch = self._with(
            "evolve",
            self._rows.replaced(given.host),
            device_rows | given.device,
            {**self._objects, **given.objects},
            num_reqs,
            pool=self._pool if given.pool is None else given.pool,
            windows={name: one for name, one in self._open_windows().items() if name not in columns},
        )
        if given.pool is not None:
            batch._check_slots("evolve")
        return batch


def _added(columns: Iterable[str] | Mapping[str, object], n: object, what: str) -> Mapping[str, object]:
    """What is added to each of several columns; see `Batch.advance`."""
    if not isinstance(columns, Iterable):
        raise DeclarationError(f"{what}: {columns!r} names no column", value=columns, remedy="pass column names")
    if isinstance(columns, Mapping):
        return columns
    names = tuple(columns)
    added = dict.fromkeys(names, n)
    if len(added) < len(names):
        raise ArgumentError(
            f"{what}: a column is named twice in {names}", value=names, remedy="name each column once, and add the sum"
        )
    return added


# Names that a column must not hide. Known only here, where all of them are.
BatchRecord._reserved = frozenset(dir(Batch)) - frozenset(dir(object))
