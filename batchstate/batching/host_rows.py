"""The host side of a whole batch in a few arrays, so that moving rows costs the same for 4 columns as for 40.

Columns of one number a row, whether of shape () or (1,), are stacked by width: all 8-byte columns are one array
int64[k, n], all 4-byte ones int32[k, n], and so on; a column of more numbers a row is an array of its own, [n, ...].
A row operation is then one numpy call a stack, and each column is a contiguous row of its stack, with the column's own
dtype as a view.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import attrs
import numpy as np

from batchstate.columns import MirroredColumn, SlotColumn
from batchstate.values.host_arrays import Array, Rows

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
