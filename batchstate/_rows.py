"""The rows of a batch: on the host in a few packed arrays, on the device alone, and as Python objects.

Columns of one number per row, whether of shape () or (1,), are packed into one group per item size: all 8-byte columns
are one array int64[k, n], all 4-byte ones int32[k, n], and so on. A column of more numbers per row is a group of its
own, [1, n, ...]. So moving rows is one numpy call per group, and costs the same for 4 columns as for 40. Each column is
a contiguous row of its group, viewed with the column's own dtype.

Columns without an exact host side are the tensors that they came from, and an index into their rows: moving rows
changes the index on the host and launches nothing; the rows are gathered when they are read. The index, padded rows and
added amounts cross in the batch's packed copy.
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
from batchstate.runtime.memory import ALIGNMENT, ReadyTensor, numpy_dtype
from batchstate.violations import Code, Where

GENERATION_SUFFIX = ".generation"
"""Names the hidden column that carries the generations of a slot column."""

MOST_SOURCES = 8
"""A column of more sources than these is gathered at the next upload: each source is memory kept alive."""

_NOTHING = np.zeros((), dtype=np.int64)

_ROW_COUNT = Code.ROW_COUNT


@attrs.frozen
class Place:
    """The place of a column.

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
        plain: column of one number per row that takes any number -> its dtype, its kind, and its row of the group: an
            array of that dtype needs no check.
        kinds: each group and dtype that has such columns.
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
        tensors = {name: column for name, column in columns.items() if isinstance(column, TensorColumn)}
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
        row_bytes = {name: math.prod(at.shape) * at.dtype.itemsize for name, at in places.items()}
        kinds: dict[tuple[int, np.dtype[Any]], int] = {}
        plain = {}
        for name, at in places.items():
            if name in tensors and tensors[name].takes_any and not at.shape:
                plain[name] = at.dtype, kinds.setdefault((at.group, at.dtype), len(kinds)), at.member
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
        """All rows of one source. A column that is not gathered yet gives the rows that it would gather."""
        if isinstance(source, DeviceSide) and source.gathered_from is not None:
            rows = source.gathered_from()
            if isinstance(rows, cls):
                return rows
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
        """The arrays that must cross to the device before `gathered`, in the order in which it takes them."""
        if self.as_it_is() is not None:
            return []
        arrays: list[Array] = [self.rows]
        if self.added is not None:
            arrays.append(across(self.added, ndim).astype(numpy_dtype(signed_twin(dtype))))
        return arrays + [source for source, _ in self.sources if not isinstance(source, DeviceSide)]

    def gathered(
        self, runtime: Runtime, uploaded: Sequence[torch.Tensor], dtype: torch.dtype, where: Where
    ) -> ReadyTensor:
        """The rows as one device tensor: at most one concatenation, one selection and one addition.

        `uploaded` are the device sides of `arrays`, `dtype` that of the column. An unmoved source stays its tensor.

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
        parts = [side.tensor(runtime) if isinstance(side, DeviceSide) else crossed.pop(0) for side, _ in self.sources]
        base = parts[0] = of_dtype(parts[0], dtype)
        if len(parts) > 1:
            base = runtime.launch(concatenate, parts, reads=parts, name="gather: concatenate")
        rows = runtime.launch(select_rows, base, index, reads=(base, index), name="gather")
        if amount is not None:
            rows = runtime.launch(add, rows, amount, reads=(rows, amount), name="gather: add")
        return ReadyTensor.made_now(rows, runtime)

    def contents(self, runtime: Runtime) -> tuple[Array, Array] | None:
        """The rows that the device has to hold: from the sources as checks first read them, and as they are now.

        For checks at `full`. None if a source does not exist yet, or while the stream is captured.
        """
        sources = [source for source, _ in self.sources]
        if runtime.checks_suspended() or any(
            isinstance(side, DeviceSide) and side.existing is None for side in sources
        ):
            return None
        parts = [source.rows(runtime) if isinstance(source, DeviceSide) else (source, source) for source in sources]
        before, now = (np.concatenate(arrays)[self.rows] for arrays in zip(*parts, strict=True))
        if self.added is not None:
            amount = across(self.added, before.ndim).astype(before.dtype)
            before, now = before + amount, now + amount
        return before, now

    def check_sources(self, runtime: Runtime, where: Where, bound: Array | None = None) -> None:
        """The tensors have not been written from outside since they became part of a batch.

        At `full`, the host side of a bounded column, `bound`, is compared too.

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
        """Whether few of many rows are used, so that the sources should not be kept."""
        rows = sum(length for _, length in self.sources)
        return rows >= LARGE and 2 * len(self.rows) < rows

    def as_it_is(self) -> DeviceSide | None:
        """The only source, if its rows are unmoved and unchanged; else None."""
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
            or share unchanged ones.
        device: columns whose host side is not a copy. A batch that has gathered a column replaces its rows here.
        objects: Python objects by column, object[num_reqs].
        changed: mirrored columns whose values the operation that made these rows may have changed; None if it moved
            rows.
    """

    # These methods run a few times in each step: numpy's own with arguments by position, and no call in between.

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
        at = self.layout.places[name]
        values: Array = self.groups[at.group][at.member]
        if values.dtype is not at.dtype:
            values = values.view(at.dtype)
        return values.reshape(len(values), *at.shape) if at.shape else values

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
            self.objects and {name: objects.take(index, 0, None, "wrap") for name, objects in self.objects.items()},
        )

    def merged(self, other: "RowState", kept: Rows | None = None, groups: Sequence[Array] | None = None) -> "RowState":
        """The rows of both; only those at checked indices `kept` int64[k] of these, if given.

        A column that is exact in one of them alone is a device column of the result. The `groups` may be made already.
        """
        if kept is None:
            groups = [np.concatenate(pair, 1) for pair in zip(self.groups, other.groups, strict=True)]
        elif groups is None:
            # One array for each group: the rows that join get room in `take`, and are filled in after it.
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
            objects = {name: mine.take(kept, 0, None, "wrap") for name, mine in objects.items()}
        if objects:
            objects = {name: np.concatenate((mine, other.objects[name])) for name, mine in objects.items()}
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

    def shifted(
        self, added: Mapping[str, object], num_rows: int, subject: str, *, in_place: bool = False
    ) -> "RowState":
        """With integers added to some columns: `added` maps a column to its amounts.

        Host rows that are not in use elsewhere are changed `in_place`.

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
                raise _not_counted(self.layout, name, f"{subject}: column {name!r}")
            if type(by) is int and name not in state.device and -(2**63) <= by < 2**63:  # as in a decode step
                shift(state.column(name), by, subject, name)
                continue
            label = f"{subject}: column {name!r}"
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
        remedy = "`advance` adds to columns of integers that are not indices; set others with `update` or `replace`"
        return DtypeError(f"{label} holds {column.unit or column.np_dtype}{some}", column.dtype, remedy)
    problem = f"{label} {'holds Python objects' if name in layout.columns else 'is not declared'}"
    return DeclarationError(
        problem, name, one_of([key for key, other in layout.tensors.items() if other.counted], name)
    )
