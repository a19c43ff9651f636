"""The rows of a batch: on the host in a few packed arrays, on the device alone, and as Python objects.

Columns of one number per row, whether of shape () or (1,), are packed into one group per item size: all 8-byte columns
are one array int64[k, n], all 4-byte ones int32[k, n], and so on. A column of more numbers per row is a group of its
own, [1, n, ...]. So moving rows is one numpy call per group, and costs the same for 4 columns as for 40. Each column is
a contiguous row of its group, viewed with the column's own dtype.

Columns without an exact host side stay the tensors that they came from, and an index into their rows: moving rows
changes the index on the host, launches nothing, and the rows are gathered when they are read. The index, padded
rows and added amounts cross in the batch's packed copy.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
    LARGE,
    Array,
    Rows,
    across,
    add,
    amounts,
    check_bound_can_move,
    concatenate,
    of_dtype,
    select_rows,
    shift,
    signed_twin,
)
from batchstate.columns import Column, MirroredColumn, SlotColumn, TensorColumn
from batchstate.errors import DeclarationError, DtypeError, one_of
from batchstate.invariants import times_checked
from batchstate.mirror import DeviceSide
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ALIGNMENT, numpy_dtype
from batchstate.runtime.ordered_memory import ReadyTensor
from batchstate.violations import Code, Where

GENERATION_SUFFIX = ".generation"
"""Names the hidden column that carries the generations of a slot column."""

MOST_SOURCES = 8
"""A column of more sources than these is gathered at the next upload: each source is memory kept alive."""

_NOTHING = np.zeros((), dtype=np.int64)

_ROW_COUNT = Code.ROW_COUNT


@attrs.frozen
class Place:
    """Where a column lies.

    Attributes:
        group: index among the groups.
        member: row of the group.
        dtype: of the column.
        shape: of one row.
    """

    group: int
    member: int
    dtype: "np.dtype[np.generic]"
    shape: tuple[int, ...]


@final
@attrs.frozen(eq=False)
class Layout:
    """Places of the mirrored columns of a batch class.

    Attributes:
        columns: all declarations of the class.
        tensors: those of tensor columns; the mirrored ones of them have places.
        places: column -> place; a slot column has a second entry for its generations.
        names: for each group a name for reports: the size of its items, or its only column.
        pads: for each group one padded row, [k, 1, ...].
        row_bytes: column -> bytes of one row of it.
        plain: column of one number per row that takes any -> its dtype, its kind, and its row of the group: an array
            of that dtype is taken as it is.
        kinds: groups with each dtype that such columns in them have.
    """

    columns: Mapping[str, Column]
    tensors: Mapping[str, TensorColumn]
    places: Mapping[str, Place]
    names: tuple[str, ...]
    pads: tuple[Array, ...]
    row_bytes: Mapping[str, int]
    plain: "Mapping[str, tuple[np.dtype[Any], int, int]]"
    kinds: "tuple[tuple[int, np.dtype[Any]], ...]"

    @classmethod
    def of(cls, columns: Mapping[str, Column]) -> Self:
        """Groups the columns: widest first, in the order of declaration within a width."""
        groups: dict[int, list[tuple[str, MirroredColumn]]] = {}
        alone: list[MirroredColumn] = []
        tensors = {name: one for name, one in columns.items() if isinstance(one, TensorColumn)}
        for column in tensors.values():
            if not isinstance(column, MirroredColumn):
                continue
            if math.prod(column.shape) != 1:
                alone.append(column)
                continue
            group = groups.setdefault(column.np_dtype.itemsize, [])
            group.append((column.name, column))
            if isinstance(column, SlotColumn):
                group.append((column.name + GENERATION_SUFFIX, column))
        places: dict[str, Place] = {}
        names: list[str] = []
        pads: list[Array] = []
        for width, group in sorted(groups.items(), reverse=True):
            for member, (name, column) in enumerate(group):
                places[name] = Place(len(pads), member, column.np_dtype, column.shape)
            names.append(f"{width}-byte columns")
            pads.append(np.stack([column.pad.reshape(1).view(f"i{width}") for _, column in group]))
        for column in alone:
            places[column.name] = Place(len(pads), 0, column.np_dtype, column.shape)
            names.append(column.name)
            pads.append(column.pad.reshape(1, 1, *column.shape).copy())
        row_bytes = {name: math.prod(place.shape) * place.dtype.itemsize for name, place in places.items()}
        kinds: dict[tuple[int, np.dtype[Any]], int] = {}
        plain = {}
        for name, one in tensors.items():
            place = places.get(name)
            if place is not None and one.takes_any and not one.shape:
                plain[name] = place.dtype, kinds.setdefault((place.group, place.dtype), len(kinds)), place.member
        return cls(columns, tensors, places, tuple(names), tuple(pads), row_bytes, plain, tuple(kinds))


@final
@attrs.frozen(eq=False, repr=False)
class DeviceRows:
    """Rows of a column without an exact host side.

    Row i is row `rows[i]` of all sources laid end to end, plus `added[i]`.

    Attributes:
        sources: device sides, or host arrays that are uploaded with the index; each with its number of rows.
        rows: int64[n].
        added: int64[n], or None for nothing.
    """

    sources: tuple[tuple[DeviceSide | Array, int], ...]
    rows: Rows
    added: Rows | None = None

    @classmethod
    def of(cls, source: DeviceSide | Array, num_rows: int) -> "DeviceRows":
        """All rows of one source. Those of a column that is not gathered yet are the rows that it would gather."""
        if isinstance(source, DeviceSide) and source.gathered_from is not None:
            known = source.gathered_from()
            if isinstance(known, cls):
                return known
        return cls(((source, num_rows),), np.arange(num_rows, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"DeviceRows({len(self)} rows of {len(self.sources)} sources)"

    def taken(self, rows: Rows) -> "DeviceRows":
        """The rows at checked indices int64[k]."""
        return DeviceRows(self.sources, self.rows[rows], None if self.added is None else self.added[rows])

    def merged(self, other: "DeviceRows") -> "DeviceRows":
        """These rows, then those of `other`."""
        offset = sum(length for _, length in self.sources)
        added = None
        if self.added is not None or other.added is not None:
            added = np.concatenate([part._amounts() for part in (self, other)])
        return DeviceRows(self.sources + other.sources, np.concatenate([self.rows, other.rows + offset]), added)

    def shifted(self, amount: Rows) -> "DeviceRows":
        """With int64 `amount` (one, or one per row) added."""
        return DeviceRows(self.sources, self.rows, self._amounts() + amount)

    def _amounts(self) -> Rows:
        return np.zeros(len(self), dtype=np.int64) if self.added is None else self.added

    def arrays(self, dtype: torch.dtype, ndim: int) -> list[Array]:
        """What must cross to the device before `gathered`, in the order in which it takes them."""
        if self.as_it_is() is not None:
            return []
        wanted: list[Array] = [self.rows]
        if self.added is not None:
            wanted.append(across(self.added, ndim).astype(numpy_dtype(signed_twin(dtype))))
        return wanted + [source for source, _ in self.sources if not isinstance(source, DeviceSide)]

    def gathered(
        self, runtime: Runtime, uploaded: Sequence[torch.Tensor], dtype: torch.dtype, where: Where
    ) -> ReadyTensor:
        """The rows as one device tensor: at most one concatenation, one selection and one addition.

        A source that is wanted as it is stays the tensor that it was.

        Args:
            runtime: the device.
            uploaded: the device sides of `arrays`.
            dtype: of the column.
            where: for reports.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE.
        """
        self.check_sources(runtime, where)
        source = self.as_it_is()
        if source is not None:
            source.tensor(runtime)
            return source.ready()
        crossed = list(uploaded)
        index = crossed.pop(0)
        amount = None if self.added is None else crossed.pop(0)
        parts = [one.tensor(runtime) if isinstance(one, DeviceSide) else crossed.pop(0) for one, _ in self.sources]
        base = parts[0] = of_dtype(parts[0], dtype)
        if len(parts) > 1:
            base = runtime.launch(concatenate, parts, reads=parts, name="gather: concatenate")
        rows = runtime.launch(select_rows, base, index, reads=(base, index), name="gather")
        if amount is not None:
            rows = runtime.launch(add, rows, amount, reads=(rows, amount), name="gather: add")
        return ReadyTensor.made_now(rows, runtime)

    def contents(self, runtime: Runtime) -> tuple[Array, Array] | None:
        """The rows that the device has to hold, by what checks first read of the sources and by what they read now.

        For checks at `full`. None where a source does not exist yet, or while the stream is captured.
        """
        sides = [source for source, _ in self.sources if isinstance(source, DeviceSide)]
        if runtime.checks_suspended() or any(side.existing is None for side in sides):
            return None
        known = [one.rows(runtime) if isinstance(one, DeviceSide) else (one, one) for one, _ in self.sources]
        before, now = (np.concatenate(parts)[self.rows] for parts in zip(*known, strict=True))
        if self.added is not None:
            amount = across(self.added, before.ndim).astype(before.dtype)
            before, now = before + amount, now + amount
        return before, now

    def check_sources(self, runtime: Runtime, where: Where, bound: Array | None = None) -> None:
        """The tensors have not been written from outside since they became part of a batch.

        Args:
            runtime: the device.
            where: for reports.
            bound: the host side of a bounded column, compared at `full`.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE, MIRROR_BOUND.
        """
        if levels.full and (contents := self.contents(runtime)) is not None:  # first: it says which row
            invariants.mirror_foreign_write("device", *contents, **where)
            if bound is not None:
                invariants.mirror_bound(bound, contents[1], **where)
        if levels.cheap:
            for source, _ in self.sources:
                if isinstance(source, DeviceSide):
                    source.check_count(where)

    def wasteful(self) -> bool:
        """Whether few of many rows are wanted, so that the sources should not be kept."""
        rows = sum(length for _, length in self.sources)
        return rows >= LARGE and 2 * len(self.rows) < rows

    def as_it_is(self) -> DeviceSide | None:
        """The only source, where its rows are wanted unmoved and unchanged."""
        source, length = self.sources[0]
        unmoved = (
            len(self.sources) == 1
            and self.added is None
            and len(self.rows) == length
            and bool((self.rows == np.arange(length)).all())
        )
        return source if unmoved and isinstance(source, DeviceSide) else None


@final
@attrs.define(eq=False, repr=False)
class RowState:
    """The rows of one batch, in three parts that move alike. An operation makes another one; no two batches share it.

    Attributes:
        layout: places of the mirrored columns.
        groups: rows of the mirrored columns on the host, [k, n, ...] each. Never written: operations make new arrays,
            or share those that they leave as they are.
        device: columns whose host side is not a copy. A batch that has gathered a column replaces its rows here.
        objects: Python objects by column, object[num_reqs].
        changed: mirrored columns whose values the operation that made these rows may have changed; None where it moved
            rows.
    """

    # What a step does runs a few times in each: numpy's methods with arguments by position, and no call in between.

    layout: Layout
    groups: Sequence[Array]
    device: Mapping[str, DeviceRows]
    objects: Mapping[str, Array]
    changed: Collection[str] | None = attrs.field(default=None, init=False)

    @classmethod
    def padding(cls, layout: Layout, num_rows: int) -> "RowState":
        """Padded rows alone, of the mirrored columns."""
        return cls(layout, [np.repeat(pad, num_rows, axis=1) for pad in layout.pads], {}, {})

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {rows} rows" for name, rows in self.lengths().items())
        return f"RowState({groups}; {len(self.device)} device columns, {len(self.objects)} object columns)"

    def column(self, name: str) -> Array:
        """The values of a mirrored column, a view [n, ...]."""
        place = self.layout.places[name]
        values: Array = self.groups[place.group][place.member]
        if values.dtype is not place.dtype:
            values = values.view(place.dtype)
        return values.reshape(len(values), *place.shape) if place.shape else values

    def have(self, num_rows: int, num_reqs: int) -> bool:
        """Whether each part of each column has as many rows as the batch, and objects for each request: ROW_COUNT.

        Counts it if so; else it counts none: check each for its report.
        """
        for group in self.groups:
            if group.shape[1] != num_rows:
                return False
        if self.device:
            for rows in self.device.values():
                if len(rows.rows) != num_rows:
                    return False
        if self.objects:
            for objects in self.objects.values():
                if len(objects) != num_reqs:
                    return False
        times_checked[_ROW_COUNT] += 1
        return True

    def lengths(self) -> dict[str, int]:
        """Rows of each group, counted on its own."""
        return {name: group.shape[1] for name, group in zip(self.layout.names, self.groups, strict=True)}

    def taken(self, index: Rows) -> "RowState":
        """The rows at checked indices int64[k]."""
        return RowState(
            self.layout,
            [group.take(index, 1, None, "wrap") for group in self.groups],  # "wrap" is the fastest mode
            self.device and {name: rows.taken(index) for name, rows in self.device.items()},
            self.objects and {name: one.take(index, 0, None, "wrap") for name, one in self.objects.items()},
        )

    def merged(self, other: "RowState", kept: Rows | None = None, groups: Sequence[Array] | None = None) -> "RowState":
        """The rows of both, of these only those at checked indices `kept` int64[k], if given.

        A column that is a copy on one side and no copy on the other is none. The `groups` may be made already.
        """
        if kept is None:
            groups = [np.concatenate(pair, 1) for pair in zip(self.groups, other.groups, strict=True)]
        elif groups is None:
            # The places of the rows that join are taken along, and filled after: without a second array for each group.
            size, groups = kept.size, []
            index = np.zeros(size + (other.groups[0].shape[1] if other.groups else 0), dtype=np.int64)
            index[:size] = kept
            for mine, theirs in zip(self.groups, other.groups, strict=True):
                group = mine.take(index, 1, None, "wrap")
                group[:, size:] = theirs
                groups.append(group)
        device: Mapping[str, DeviceRows] = self.device or other.device
        if device:
            names = (*self.device, *(name for name in other.device if name not in self.device))
            device = {name: self._device_rows(name, kept).merged(other._device_rows(name)) for name in names}
        objects = self.objects
        if objects and kept is not None:
            objects = {name: one.take(kept, 0, None, "wrap") for name, one in objects.items()}
        if objects:
            objects = {name: np.concatenate((one, other.objects[name])) for name, one in objects.items()}
        return RowState(self.layout, groups, device, objects)

    def _device_rows(self, column: str, kept: Rows | None = None) -> DeviceRows:
        rows = self.device.get(column)
        if rows is None:
            values = self.column(column)
            rows = DeviceRows.of(values, len(values))
        return rows if kept is None else rows.taken(kept)

    def padded(self, count: int) -> "RowState":
        """These rows, then `count` padded rows; they have no objects."""
        padding = RowState.padding(self.layout, count)
        pads = {name: self.layout.tensors[name].pad for name in self.device}
        padding.device = {name: DeviceRows.of(np.repeat(pad[None], count, axis=0), count) for name, pad in pads.items()}
        padding.objects = {name: objects[:0] for name, objects in self.objects.items()}
        return self.merged(padding)

    def copied(self, columns: Collection[str]) -> "RowState":
        """The same rows, with the groups of `columns` in memory of their own, to be changed; the others are shared."""
        groups = list(self.groups)
        for name in columns:
            i = self.layout.places[name].group
            if groups[i] is self.groups[i]:  # not copied yet, for another column of the group
                groups[i] = groups[i].copy()
        state = RowState(self.layout, groups, self.device, self.objects)
        state.changed = tuple(columns)  # without the arrays that a mapping has for them
        return state

    def aligned(self) -> list[Array]:
        """All groups as they cross to the device: each column of one begins at a multiple of `ALIGNMENT`."""
        arrays = list(self.groups)
        if arrays and not arrays[0].shape[1] % ALIGNMENT:
            return arrays
        for i, group in enumerate(arrays):
            spare = -group.shape[1] * group.itemsize % ALIGNMENT // group.itemsize
            if spare and group.ndim == 2:
                arrays[i] = np.zeros((len(group), group.shape[1] + spare), dtype=group.dtype)
                arrays[i][:, : group.shape[1]] = group
        return arrays

    def shifted(self, added: Mapping[str, object], num_rows: int, what: str, *, in_place: bool = False) -> "RowState":
        """With integers added to some columns.

        Args:
            added: column -> what is added.
            num_rows: of the batch.
            what: the operation, for messages.
            in_place: the host rows are not in use elsewhere, and are changed in place.

        Raises:
            DeclarationError: no such column.
            DtypeError: a column of floats, booleans or indices, or the amount is not an integer.
            ShapeError: neither one amount nor one per row.
            ValueOverflowError: a value would leave the column's dtype.
            ContractError: a bound of an unsigned dtype is lowered.
        """
        places, columns = self.layout.places, self.layout.tensors
        state = self if in_place else self.copied([name for name in added if name in places])
        same: object = None  # the amount of the column before, which mostly is that of all
        amount = _NOTHING
        for name, by in added.items():
            column = columns.get(name)
            if column is None or not column.counted:
                raise _not_counted(self.layout, name, f"{what}: column {name!r}")
            if type(by) is int and name not in state.device and -(2**63) <= by < 2**63:  # what a decode step adds
                shift(state.column(name), by, what, name)
                continue
            label = f"{what}: column {name!r}"
            if by is not same or by is None:
                amount, same = amounts(by, num_rows, label), by
            if name in places:
                values = state.column(name)
                if name in state.device:
                    check_bound_can_move(values, amount, label)
                shift(values, across(amount, 1 + len(column.shape)) if amount.ndim else amount, label)
            if name in state.device:
                state.device = {**state.device, name: state.device[name].shifted(amount)}
        return state

    def overwritten(self, column: str, rows: Rows, new: DeviceRows, bound: Array | None) -> "RowState":
        """With `new` in checked rows int64[k] of the device side of a column, and `bound` there on the host."""
        old = self._device_rows(column)
        index = np.arange(len(old), dtype=np.int64)
        index[rows] = len(old) + np.arange(rows.size)
        state = self.copied(() if bound is None else (column,))
        if bound is not None:
            state.column(column)[rows] = bound
        state.device = {**self.device, column: old.merged(new).taken(index)}
        return state

    def replaced(
        self, host: Mapping[str, Array], device: Mapping[str, DeviceRows], objects: Mapping[str, Array]
    ) -> "RowState":
        """With other checked values in some columns: host rows, device rows, and objects."""
        state = self.copied(host)
        for name, values in host.items():
            state.column(name)[...] = values
        state.device = {name: rows for name, rows in self.device.items() if name not in host} | dict(device)
        state.objects = {**self.objects, **objects}
        return state


def _not_counted(layout: Layout, name: str, label: str) -> Exception:
    column = layout.tensors.get(name)
    if column is not None:
        some = "" if column.takes_any or column.unit else f", of which a {type(column).__name__} takes some"
        return DtypeError(
            f"{label} holds {column.unit or column.np_dtype}{some}",
            column.dtype,
            "`advance` adds to columns of integers that are not indices; set others with `update` or `replace`",
        )
    what = "holds Python objects" if name in layout.columns else "is not declared"
    remedy = one_of([one for one, declared in layout.tensors.items() if declared.counted], name)
    return DeclarationError(f"{label} {what}", name, remedy)
