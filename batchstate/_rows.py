"""The door of a batch: what a caller gives for its columns, checked and sorted by side."""

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
    Array,
    Rows,
    across,
    add,
    amounts,
    check_bound_can_move,
    concatenate,
    converted,
    select_rows,
    shift,
    signed_twin,
)
from batchstate.columns import Column, DeviceColumn, HostColumn, MirroredColumn, SlotColumn, TensorColumn
from batchstate.errors import ArgumentError, ContractError, DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.indices import Slots
from batchstate.mirror import Contract, DeviceSide, Made, MirroredTensor, version_mark
from batchstate.runtime import Runtime, numpy_dtype
from batchstate.violations import Where

# The host side of a whole batch in a few arrays, so that moving rows costs the same for 4 columns as for 40.
#
# Columns of one number a row, whether of shape () or (1,), are stacked by width: all 8-byte columns are one array
# int64[k, n], all 4-byte ones int32[k, n], and so on; a column of more numbers a row is an array of its own, [n,
# ...]. A row operation is then one numpy call a stack, and each column is a contiguous row of its stack, with the
# column's own dtype as a view.

GENERATION_SUFFIX = ".generation"
"""Names the hidden lane that carries the generations of a slot column."""


@attrs.frozen
class Place:
    """Where a column lies.

    Attributes:
        array: index among all arrays, stacks first.
        lane: lane of the stack, or None for a column that is an array of its own.
        dtype: of the column.
        shape: of one row.
    """

    array: int
    lane: int | None
    dtype: "np.dtype[np.generic]"
    shape: tuple[int, ...]


@final
@attrs.frozen(eq=False)
class Layout:
    """Places of all mirrored columns of a batch class.

    Attributes:
        places: column -> place; a slot column has a second entry for its generations.
        names: for each array a name for reports: its column, or its width.
        pads: for each array one padded row, with the rows' axis of length 1.
        num_stacks: how many of the arrays are stacks, with the rows along axis 1; behind them are columns of their own.
    """

    places: Mapping[str, Place]
    names: tuple[str, ...]
    pads: tuple[Array, ...]
    num_stacks: int

    @classmethod
    def of(cls, columns: Sequence[MirroredColumn]) -> "Layout":
        """Stacks the columns: widest first, in the order of declaration within a width."""
        lanes: dict[int, list[tuple[str, MirroredColumn]]] = {}
        wholes = [column for column in columns if math.prod(column.shape) != 1]
        for column in columns:
            if math.prod(column.shape) == 1:
                stack = lanes.setdefault(column.np_dtype.itemsize, [])
                stack.append((column.name, column))
                if isinstance(column, SlotColumn):
                    stack.append((column.name + GENERATION_SUFFIX, column))
        places: dict[str, Place] = {}
        pads: list[Array] = []
        for width in sorted(lanes, reverse=True):
            for lane, (name, column) in enumerate(lanes[width]):
                places[name] = Place(len(pads), lane, column.np_dtype, column.shape)
            bits = np.dtype(f"i{width}")
            pads.append(np.stack([column.pad.reshape(1).view(bits) for _, column in lanes[width]]))
        for column in wholes:
            places[column.name] = Place(len(pads), None, column.np_dtype, column.shape)
            pads.append(column.pad.reshape(1, *column.shape).copy())
        names = [f"{width}-byte columns" for width in sorted(lanes, reverse=True)]
        names += [column.name for column in wholes]
        return cls(places, tuple(names), tuple(pads), len(lanes))


@final
class HostRows:
    """The rows of a batch on the host. Immutable: every operation returns new arrays, or shares untouched ones.

    Attributes:
        layout: places of the columns.
        stacks: int[k, n] each, a lane a column.
        wholes: columns of more numbers a row, [n, ...] each.
    """

    __slots__ = ("layout", "stacks", "wholes")

    def __init__(self, layout: Layout, stacks: Sequence[Array], wholes: Sequence[Array]) -> None:
        self.layout = layout
        self.stacks = stacks
        self.wholes = wholes

    @classmethod
    def of(cls, layout: Layout, columns: Mapping[str, Array], num_rows: int) -> "HostRows":
        """From one array a place, each [num_rows, ...]."""
        stacks, wholes = _padded_rows(layout, num_rows)
        rows = cls(layout, stacks, wholes)
        for name, values in columns.items():
            rows.column(name)[...] = values
        return rows

    def __repr__(self) -> str:
        return f"HostRows({', '.join(f'{name}: {rows} rows' for name, rows in self.lengths().items())})"

    def column(self, name: str) -> Array:
        """The values of a column, a view [n, ...]."""
        place = self.layout.places[name]
        if place.lane is None:
            return self.wholes[place.array - self.layout.num_stacks]
        lane: Array = self.stacks[place.array][place.lane]
        if lane.dtype is not place.dtype:
            lane = lane.view(place.dtype)
        return lane.reshape(-1, *place.shape) if place.shape else lane

    def have(self, num_rows: int) -> bool:
        """Whether each array has so many rows, counted on its own."""
        for stack in self.stacks:
            if stack.shape[1] != num_rows:
                return False
        return not self.wholes or {len(whole) for whole in self.wholes} == {num_rows}

    def lengths(self) -> dict[str, int]:
        """Rows of each array, counted on its own."""
        rows = [*(stack.shape[1] for stack in self.stacks), *(len(whole) for whole in self.wholes)]
        return dict(zip(self.layout.names, rows, strict=True))

    # What a step does runs a few times in each: numpy's methods with arguments by position, and no loop where there are
    # no columns of more numbers a row.

    def taken(self, rows: Rows) -> "HostRows":
        """The rows at checked indices int64[k]."""
        return HostRows(
            self.layout,
            [stack.take(rows, 1, None, "wrap") for stack in self.stacks],  # checked already: "wrap" is the fastest mode
            self.wholes and [whole.take(rows, 0, None, "wrap") for whole in self.wholes],
        )

    def merged(self, other: "HostRows") -> "HostRows":
        """These rows, then those of `other`."""
        return HostRows(
            self.layout,
            [np.concatenate(pair, 1) for pair in zip(self.stacks, other.stacks, strict=True)],
            self.wholes and [np.concatenate(pair) for pair in zip(self.wholes, other.wholes, strict=True)],
        )

    def sliced(self, start: int, stop: int) -> "HostRows":
        """Rows start to stop, as copies: a stack's lanes must stay contiguous."""
        return HostRows(
            self.layout,
            [np.ascontiguousarray(stack[:, start:stop]) for stack in self.stacks],
            [np.ascontiguousarray(whole[start:stop]) for whole in self.wholes],
        )

    def padded(self, count: int) -> "HostRows":
        """These rows, then `count` padded rows."""
        return self.merged(HostRows(self.layout, *_padded_rows(self.layout, count)))

    def copied(self, columns: Iterable[str]) -> "HostRows":
        """The same rows, with `columns` in memory that nobody else has seen yet; other arrays are shared."""
        layout, stacks, wholes = self.layout, list(self.stacks), list(self.wholes)
        for name in columns:
            i = layout.places[name].array
            if i >= layout.num_stacks:
                wholes[i - layout.num_stacks] = self.wholes[i - layout.num_stacks].copy()
            elif stacks[i] is self.stacks[i]:  # not copied yet, for another column of the stack
                stacks[i] = stacks[i].copy()
        return HostRows(layout, stacks, wholes)

    def replaced(self, columns: Mapping[str, Array]) -> "HostRows":
        """The same rows with other values in some columns."""
        rows = self.copied(columns)
        for name, values in columns.items():
            rows.column(name)[...] = values
        return rows

    def in_lanes(self, alignment: int) -> list[Array]:
        """All arrays as they cross: behind each lane is room, so that the next starts at a multiple of `alignment`.

        Args:
            alignment: in bytes, a multiple of every item size.
        """
        crossing = [*self.stacks, *self.wholes]
        for i, stack in enumerate(self.stacks):
            if stack.shape[1] * stack.itemsize % alignment:
                crossing[i] = _widened(stack, alignment)
        return crossing


def _padded_rows(layout: Layout, count: int) -> tuple[list[Array], list[Array]]:
    return (
        [np.repeat(pad, count, axis=1) for pad in layout.pads[: layout.num_stacks]],
        [np.repeat(pad, count, axis=0) for pad in layout.pads[layout.num_stacks :]],
    )


def _widened(stack: Array, alignment: int) -> Array:
    lanes, num_rows = stack.shape
    spare = -num_rows * stack.itemsize % alignment // stack.itemsize
    wider = np.zeros((lanes, num_rows + spare), dtype=stack.dtype)
    wider[:, :num_rows] = stack
    return wider


# Rows that only the device knows, moved without touching the device.
#
# A column without an exact host side cannot ride in the packed copy. It is kept as the tensors it came from and an
# index into their rows: filtering and merging change the index on the host, which costs no launch, and the rows are
# gathered when somebody reads them. The index, padded rows and what was added since ride in the batch's packed copy.

MOST_SOURCES = 8
"""Beyond this many tensors a column is gathered at the next upload: each source is memory kept alive."""


@final
@attrs.frozen(eq=False, repr=False)
class DeviceRows:
    """Row i is row `rows[i]` of all sources laid end to end, plus `added[i]`.

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
        """All rows of one source."""
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
        """With int64 `amount` (one, or one a row) added."""
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

    def gathered(self, runtime: Runtime, uploaded: Sequence[torch.Tensor]) -> Made:
        """The rows as one device tensor: at most one concatenation, one selection and one addition.

        A source that is wanted as it is stays what it is, made where it was made.

        Args:
            runtime: the device.
            uploaded: the device sides of `arrays`.
        """
        self.check_sources(runtime)
        source = self.as_it_is()
        if source is not None:
            return source.make(runtime)
        crossed = list(uploaded)
        index = crossed.pop(0)
        amount = None if self.added is None else crossed.pop(0)
        parts = [one.tensor(runtime) if isinstance(one, DeviceSide) else crossed.pop(0) for one, _ in self.sources]
        base = parts[0]
        if len(parts) > 1:
            base = runtime.launch(concatenate, parts, reads=parts, name="gather: concatenate")
        rows = runtime.launch(select_rows, base, index, reads=(base, index), name="gather")
        if amount is not None:
            rows = runtime.launch(add, rows, amount, reads=(rows, amount), name="gather: add")
        return Made(rows, runtime.current_stream, None, set())

    def check_sources(self, runtime: Runtime, column: str = "") -> None:
        """Nobody wrote into the tensors between their becoming part of a batch and now.

        Raises:
            Violation: MIRROR_FOREIGN_WRITE.
        """
        if levels.cheap:
            for source, _ in self.sources:
                if isinstance(source, DeviceSide) and source.made is not None and source.mark is not None:
                    where: Where = {"object": self, "operation": "gather", "step": runtime.step}
                    if column:
                        where["column"] = column
                    invariants.mirror_foreign_write("device", source.mark, version_mark(source.made) or 0, **where)

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


# What moves when rows move: host rows, rows that only the device knows, and objects; all three alike.

Parts = tuple[HostRows, Mapping[str, DeviceRows], Mapping[str, Array]]
"""The rows of a batch: on the host, on the device alone by column, and Python objects by column."""


_NOTHING = np.zeros((), dtype=np.int64)


def taken(parts: Parts, index: Rows) -> Parts:
    """The rows at checked indices int64[k]."""
    rows, device_rows, objects = parts
    return (
        rows.taken(index),
        device_rows and {name: one.taken(index) for name, one in device_rows.items()},
        objects and {name: one.take(index, 0, None, "wrap") for name, one in objects.items()},
    )


def merged(mine: Parts, theirs: Parts) -> Parts:
    """The rows of both. A column that is a copy on one side and no copy on the other is none."""
    rows, device_rows, objects = mine
    other_rows, other_device_rows, other_objects = theirs
    both: Mapping[str, DeviceRows] = device_rows or other_device_rows
    if both:
        both = {
            name: _on_device(rows, device_rows, name).merged(_on_device(other_rows, other_device_rows, name))
            for name in (*device_rows, *(one for one in other_device_rows if one not in device_rows))
        }
    return (
        rows.merged(other_rows),
        both,
        objects and {name: np.concatenate((one, other_objects[name])) for name, one in objects.items()},
    )


def _on_device(rows: HostRows, device_rows: Mapping[str, DeviceRows], column: str) -> DeviceRows:
    known = device_rows.get(column)
    if known is not None:
        return known
    values = rows.column(column)
    return DeviceRows.of(values, len(values))


def shifted(
    parts: Parts, added: Mapping[str, object], columns: Mapping[str, Column], num_rows: int, what: str, *, fresh: bool
) -> Parts:
    """With integers added to some columns.

    Args:
        parts: what is changed.
        added: column -> what is added.
        columns: all declarations.
        num_rows: of the batch.
        what: the operation, for messages.
        fresh: whether nobody else has seen the host rows yet: then they are changed in place.

    Raises:
        DeclarationError: no such column.
        DtypeError: a column of floats, booleans or indices, or no integer is added.
        ShapeError: neither one amount nor one a row.
        ValueOverflowError: a value would leave the column's dtype.
        ContractError: a bound of an unsigned dtype is lowered.
    """
    rows, device_rows, objects = parts
    places = rows.layout.places
    if not fresh:
        rows = rows.copied([name for name in added if name in places])
    same: object = None  # the amount of the column before, which mostly is that of all
    amount = _NOTHING
    for name, by in added.items():
        label = f"{what}: column {name!r}"
        column = columns.get(name)
        if not isinstance(column, TensorColumn) or not column.counted:
            raise _not_counted(column, name, columns, label)
        if by is not same or by is None:
            amount, same = amounts(by, num_rows, label), by
        if name in places:
            if name in device_rows:
                check_bound_can_move(column.dtype, amount, label)
            shift(rows.column(name), across(amount, 1 + len(column.shape)) if amount.ndim else amount, label)
        if name in device_rows:
            device_rows = {**device_rows, name: device_rows[name].shifted(amount)}
    return rows, device_rows, objects


def _not_counted(column: Column | None, name: str, columns: Mapping[str, Column], label: str) -> Exception:
    if isinstance(column, TensorColumn):
        return DtypeError(
            f"{label} holds {column.unit or column.np_dtype}",
            value=column.dtype,
            remedy="only integers that are no indices are computed; set others with `update` or `replace`",
        )
    return DeclarationError(f"{label} is no tensor column", value=name, remedy=f"use one of: {', '.join(columns)}")


def amounts_by_column(columns: Iterable[str] | Mapping[str, object], n: object, what: str) -> Mapping[str, object]:
    """Column -> what is added to it, from what `Batch.advance` takes.

    Raises:
        DeclarationError: no names.
        ArgumentError: a column is named twice.
    """
    if isinstance(columns, str):
        return {columns: n}
    given: object = columns
    if not isinstance(given, list | tuple):
        if not isinstance(given, Iterable):
            raise DeclarationError(f"{what}: {columns!r} names no column", value=columns, remedy="pass column names")
        if isinstance(columns, Mapping):
            return columns
    names = tuple(columns)
    if not all(isinstance(name, str) for name in names):
        raise DeclarationError(f"{what}: {columns!r} are no names", value=columns, remedy="pass column names")
    added = dict.fromkeys(names, n)
    if len(added) < len(names):
        raise ArgumentError(
            f"{what}: a column is named twice in {names}", value=names, remedy="name each column once, and add the sum"
        )
    return added


Objects = npt.NDArray[np.object_]


@attrs.define
class Given:
    """Columns by side.

    Attributes:
        host: host rows of mirrored columns (and generations of slots).
        device: rows of columns of which the host side is no copy.
        objects: Python objects, object[n].
        exact: mirrored columns that were given exactly, so that older device rows of theirs no longer count.
        pool: the pool of the slots; None when no slots were given.
    """

    host: dict[str, Array] = attrs.field(factory=dict)
    device: dict[str, DeviceRows] = attrs.field(factory=dict)
    objects: dict[str, Objects] = attrs.field(factory=dict)
    exact: list[str] = attrs.field(factory=list)
    pool: int | None = None


def read_columns(
    columns: Mapping[str, Column], values: Mapping[str, object], num_rows: int, runtime: Runtime, what: str
) -> Given:
    """Checks and sorts what was given for some columns.

    Raises:
        DeclarationError: an undeclared name.
        ShapeError: another number of rows, or another shape of a row.
        DtypeError, ValueOverflowError: values that do not go into the column.
        ContractError: a contract weaker than the column takes.
        DeviceError: values of another runtime, or a tensor on another device.
        Violation: UNIT_MISMATCH, MIRROR_STALE_READ.
    """
    given = Given()
    for name, value in values.items():
        column = columns.get(name)
        label = f"{what}: column {name!r}"
        if isinstance(column, MirroredColumn):
            _read_mirrored(column, value, num_rows, runtime, label, given)
        elif isinstance(column, DeviceColumn):
            given.device[name] = _read_device(column, value, num_rows, runtime, label)
        elif isinstance(column, HostColumn):
            given.objects[name] = _read_objects(value, num_rows, label)
        else:
            raise DeclarationError(
                f"{label} is not declared", value=name, remedy=f"declare it, or use one of: {', '.join(columns)}"
            )
    return given


def rows_of(values: Mapping[str, object], what: str) -> int:
    """The number of rows of the first column given.

    Raises:
        ArgumentError: no column, or a column without a length.
    """
    for name, value in values.items():
        try:
            return len(value)  # type: ignore[arg-type]
        except TypeError:  # also of what has a length in general, and none as it is: an array of no dimensions
            raise ArgumentError(
                f"{what}: column {name!r} has no rows", value=value, remedy="pass one row a request"
            ) from None
    raise ArgumentError(f"{what}: no columns", value=(), remedy="use `empty` for a batch of no requests")


def _read_mirrored(
    column: MirroredColumn, value: object, num_rows: int, runtime: Runtime, label: str, given: Given
) -> None:
    if not isinstance(value, MirroredTensor):
        if issubclass(column.value_type, Slots) and num_rows:
            raise DtypeError(
                f"{label}: numbers are no slots",
                value=value,
                remedy="pass what `pool.take` returned; wrap numbers of an allocator of your own in `Slots.from_host`",
            )
        given.host[column.name] = _fitting(column, converted(value, column.np_dtype, label), num_rows, label)
        given.exact.append(column.name)
        if issubclass(column.value_type, Slots):
            given.host[column.name + GENERATION_SUFFIX] = np.zeros(num_rows, dtype=np.int64)
            given.pool = 0
        return
    _check_value(column, value, runtime, label)
    if value.contract is Contract.DEVICE_ONLY or (
        value.contract is Contract.UPPER_BOUND and column.contract is not Contract.UPPER_BOUND
    ):
        raise ContractError(
            f"{label} takes {column.contract.value}, was given {value.contract.value}",
            value=value.contract.value,
            remedy="resolve the value, or declare the column with contract='upper_bound'",
        )
    given.host[column.name] = _fitting(column, value.np, num_rows, label)
    if value.contract is Contract.UPPER_BOUND:
        given.device[column.name] = DeviceRows.of(value.device_side, num_rows)
    else:
        given.exact.append(column.name)
    if isinstance(value, Slots):
        given.host[column.name + GENERATION_SUFFIX] = value.generations
        given.pool = value.pool


def _read_device(column: DeviceColumn, value: object, num_rows: int, runtime: Runtime, label: str) -> DeviceRows:
    if isinstance(value, MirroredTensor):
        _check_value(column, value, runtime, label)
        _check_shape(column, value.shape, num_rows, label)
        return DeviceRows.of(value.device_side, num_rows)
    if isinstance(value, torch.Tensor):
        if value.device != runtime.device:
            raise DeviceError(
                f"{label}: a tensor on {value.device}, runtime on {runtime.device}",
                value=str(value.device),
                remedy="pass a tensor of the runtime's device, or host values as a list or array",
            )
        if value.dtype != column.dtype:
            raise _other_dtype(column, value.dtype, label)
        _check_shape(column, tuple(value.shape), num_rows, label)
        return DeviceRows.of(DeviceSide.of(value, runtime), num_rows)
    return DeviceRows.of(_fitting(column, converted(value, column.np_dtype, label), num_rows, label), num_rows)


def _read_objects(value: Any, num_rows: int, label: str) -> Objects:
    if not isinstance(value, Sized) or isinstance(value, str | bytes):
        raise DtypeError(
            f"{label}: {type(value).__name__} is no sequence", value=value, remedy="pass one object a request"
        )
    if len(value) != num_rows:
        raise ShapeError(f"{label}: {len(value)} rows of {num_rows}", value=len(value), remedy="pass one a request")
    return np.fromiter(iter(value), dtype=np.object_, count=num_rows)  # type: ignore[call-overload]


def _check_value(column: TensorColumn, value: MirroredTensor, runtime: Runtime, label: str) -> None:
    if value.runtime is not runtime:
        raise DeviceError(f"{label}: {value!r} belongs to another runtime", value=value, remedy="use one runtime")
    if value.dtype != column.dtype:
        raise _other_dtype(column, value.dtype, label)
    if value.unit != column.unit:
        invariants.unit_mismatch(
            str(column.unit), str(value.unit), object=repr(value), column=column.name, step=runtime.step
        )


def _fitting(column: TensorColumn, values: Array, num_rows: int, label: str) -> Array:
    _check_shape(column, values.shape, num_rows, label)
    return values


def _check_shape(column: TensorColumn, shape: tuple[int, ...], num_rows: int, label: str) -> None:
    if shape != (num_rows, *column.shape):
        raise ShapeError(
            f"{label}: shape {list(shape)}, declared {[num_rows, *column.shape]}",
            value=shape,
            remedy="pass one row a request, each of the declared shape",
        )


def _other_dtype(column: TensorColumn, dtype: torch.dtype, label: str) -> DtypeError:
    return DtypeError(f"{label} is {column.dtype}, was given {dtype}", value=dtype, remedy="convert before, explicitly")
