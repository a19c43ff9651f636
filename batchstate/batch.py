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
from batchstate.batching.moving import Parts, amounts_by_column, merged, shifted, taken
from batchstate.batching.record import BatchRecord
from batchstate.batching.sending import SendableRecord
from batchstate.batching.upload import Extras
from batchstate.columns import MirroredColumn, TensorColumn
from batchstate.errors import ArgumentError, DeclarationError, DeviceError, ShapeError
from batchstate.runtime import Runtime
from batchstate.values.host_arrays import converted, count, counts, kept_rows

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
        if levels.cheap:
            batch.check("build")
        else:
            batch._check_slots("build")  # judged at the door, whatever the level
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
        index = kept_rows(keep, self._begin("filter"), f"{type(self).__name__}.filter")
        return self._with("filter", *taken(self._parts, index), index.size)

    def merge(self, other: Self) -> Self:
        """These requests, then those of `other`. A column exact here and bounded there becomes bounded.

        Raises:
            DeclarationError: `other` is of another declaration.
            DeviceError: `other` belongs to another runtime.
            ArgumentError: slots of two pools, or a padded batch.
            Violation: SLOT_SHARED, at `cheap`: a request stands in both.
        """
        num_reqs = self._begin("merge")
        self._check_joins(other, num_reqs, "merge")
        return self._joined("merge", merged(self._parts, other._parts), num_reqs, other)

    def step(
        self,
        *,
        keep: object = None,
        joining: Self | None = None,
        advance: str | Iterable[str] | Mapping[str, object] = (),
        n: object = 1,
    ) -> Self:
        """Some requests leave, others join, and counts move on: what a decode step does, as one operation.

        The same as `filter(keep)`, then `merge(joining)`, then `advance(advance, n)`, each of which may be left out:
        one new batch instead of three, judged once.

        Args:
            keep: as for `filter`; None keeps all.
            joining: as for `merge`; None for nobody.
            advance: as for `advance`; nothing by default.
            n: as for `advance`: one integer, or one for each request that is in the result.

        Raises:
            As `filter`, `merge` and `advance`.
        """
        what = f"{type(self).__name__}.step"
        num_reqs = self._begin("step")
        parts = self._parts
        if keep is not None:
            index = kept_rows(keep, num_reqs, what)
            parts, num_reqs = taken(parts, index), index.size
        kept = num_reqs
        if joining is not None:
            self._check_joins(joining, kept, "step")
            parts, num_reqs = merged(parts, joining._parts), kept + joining.num_reqs
        if type(advance) is tuple and not advance:
            if type(n) is not int or n != 1:
                raise ArgumentError(f"{what}: n={n!r} of no column", value=n, remedy="name columns: advance='seq_lens'")
        else:
            added = amounts_by_column(advance, n, what)
            parts = shifted(parts, added, self._columns, num_reqs, what, fresh=parts[0] is not self._rows)
        return self._with("step", *parts, num_reqs) if joining is None else self._joined("step", parts, kept, joining)

    def _check_joins(self, other: Self, num_reqs: int, operation: str) -> None:
        if type(other) is not type(self):
            raise DeclarationError(
                f"{operation} of {type(self).__name__} with {type(other).__name__}",
                value=type(other).__name__,
                remedy="merge batches of one declaration",
            )
        if other.runtime is not self.runtime:
            raise DeviceError(f"{operation} of batches of two runtimes", value=other, remedy="use one runtime")
        other._begin(operation)
        if self._pool != other._pool and num_reqs and other.num_reqs:
            raise ArgumentError(
                f"{operation} of slots of pools {self._pool} and {other._pool}",
                value=other._pool,
                remedy="requests of one batch take their slots from one pool",
            )

    def _joined(self, operation: str, parts: Parts, num_reqs: int, other: Self) -> Self:
        """A batch of `num_reqs` requests of this one, then those of `other`."""
        windows, theirs = self._open_windows(), other._open_windows()
        batch = self._with(
            operation,
            *parts,
            num_reqs + other.num_reqs,
            pool=self._pool if num_reqs else other._pool,
            windows={**windows, **theirs} if theirs else windows,
        )
        if other.num_reqs and levels.cheap:
            batch._check_slots(operation)
        return batch

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
        what = f"{type(self).__name__}.advance"
        added = amounts_by_column(columns, n, what)
        num_reqs = self._begin("advance")
        rows, device_rows, _ = shifted(self._parts, added, self._columns, num_reqs, what, fresh=False)
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


# Names that a column must not hide. Known only here, where all of them are.
BatchRecord._reserved = frozenset(dir(Batch)) - frozenset(dir(object))
