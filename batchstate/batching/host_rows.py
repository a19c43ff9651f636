"""The host side of a whole batch in a few arrays, so that moving rows costs the same for 4 columns as for 40.

Columns of one number a row are stacked by width: all 8-byte columns are one array int64[k, n], all 4-byte ones
int32[k, n], and so on; a column with a trailing shape is an array of its own, [n, ...]. A row operation is then one
numpy call a stack, and each column is a contiguous row of its stack, with the column's own dtype as a view.
"""

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
    """Where a column lies: its stack, its lane in it (None for a column that is a stack of its own), its dtype."""

    stack: int
    lane: int | None
    dtype: "np.dtype[np.generic]"


@final
@attrs.frozen(eq=False)
class Layout:
    """Places of all mirrored columns of a batch class.

    Attributes:
        places: column -> place; a slot column has a second entry for its generations.
        names: for each stack a name for reports: its column, or its width.
        row_axes: for each stack the axis of the rows.
        pads: for each stack one padded row, with the rows' axis of length 1.
    """

    places: Mapping[str, Place]
    names: tuple[str, ...]
    row_axes: tuple[int, ...]
    pads: tuple[Array, ...]

    @classmethod
    def of(cls, columns: Sequence[MirroredColumn]) -> "Layout":
        """Stacks the columns: widest first, in the order of declaration within a width."""
        lanes: dict[int, list[tuple[str, np.dtype[np.generic], Array]]] = {}
        for column in columns:
            if not column.shape:
                stack = lanes.setdefault(column.np_dtype.itemsize, [])
                stack.append((column.name, column.np_dtype, column.pad))
                if isinstance(column, SlotColumn):
                    stack.append((column.name + GENERATION_SUFFIX, column.np_dtype, column.pad))
        places: dict[str, Place] = {}
        axes: list[int] = []
        pads: list[Array] = []
        for width in sorted(lanes, reverse=True):
            bits = np.dtype(f"i{width}")
            for lane, (name, dtype, _) in enumerate(lanes[width]):
                places[name] = Place(len(axes), lane, dtype)
            pads.append(np.stack([pad.reshape(1).view(bits) for _, _, pad in lanes[width]]))
            axes.append(1)
        for column in columns:
            if column.shape:
                places[column.name] = Place(len(axes), None, column.np_dtype)
                pads.append(column.pad.reshape(1, *column.shape).copy())
                axes.append(0)
        names = [f"{width}-byte columns" for width in sorted(lanes, reverse=True)]
        names += [column.name for column in columns if column.shape]
        return cls(places, tuple(names), tuple(axes), tuple(pads))


@final
@attrs.frozen(eq=False, repr=False)
class HostRows:
    """The rows of a batch on the host. Immutable: every operation returns new arrays, or shares untouched ones.

    Attributes:
        layout: places of the columns.
        stacks: the arrays.
    """

    layout: Layout
    stacks: tuple[Array, ...]

    @classmethod
    def of(cls, layout: Layout, columns: Mapping[str, Array], num_rows: int) -> "HostRows":
        """From one array a place, each [num_rows, ...]."""
        stacks = tuple(
            np.repeat(pad, num_rows, axis=axis) for pad, axis in zip(layout.pads, layout.row_axes, strict=True)
        )
        rows = cls(layout, stacks)
        for name, values in columns.items():
            rows.column(name)[...] = values
        return rows

    def __repr__(self) -> str:
        return f"HostRows({', '.join(f'{name}: {rows} rows' for name, rows in self.lengths().items())})"

    def column(self, name: str) -> Array:
        """The values of a column, a view [n, ...]."""
        place = self.layout.places[name]
        stack = self.stacks[place.stack]
        if place.lane is None:
            return stack
        lane: Array = stack[place.lane]
        return lane if lane.dtype is place.dtype else lane.view(place.dtype)

    def have(self, num_rows: int) -> bool:
        """Whether each stack has so many rows, counted on its own."""
        lengths = [stack.shape[axis] for stack, axis in zip(self.stacks, self.layout.row_axes, strict=True)]
        return lengths == [num_rows] * len(lengths)

    def lengths(self) -> dict[str, int]:
        """Rows of each stack, counted on its own."""
        return {
            name: stack.shape[axis]
            for name, stack, axis in zip(self.layout.names, self.stacks, self.layout.row_axes, strict=True)
        }

    def taken(self, rows: Rows) -> "HostRows":
        """The rows at checked indices int64[k]."""
        return self._with(
            [
                stack.take(rows, axis=axis, mode="clip")  # checked already; "clip" spares numpy a second look
                for stack, axis in zip(self.stacks, self.layout.row_axes, strict=True)
            ]
        )

    def merged(self, other: "HostRows") -> "HostRows":
        """These rows, then those of `other`."""
        return self._with(
            [
                np.concatenate((mine, theirs), axis=axis)
                for mine, theirs, axis in zip(self.stacks, other.stacks, self.layout.row_axes, strict=True)
            ]
        )

    def sliced(self, start: int, stop: int) -> "HostRows":
        """Rows start to stop, as copies: a stack's lanes must stay contiguous."""
        return self._with(
            [
                np.ascontiguousarray(stack[:, start:stop] if axis else stack[start:stop])
                for stack, axis in zip(self.stacks, self.layout.row_axes, strict=True)
            ]
        )

    def padded(self, count: int) -> "HostRows":
        """These rows, then `count` padded rows."""
        return self._with(
            [
                np.concatenate((stack, np.repeat(pad, count, axis=axis)), axis=axis)
                for stack, pad, axis in zip(self.stacks, self.layout.pads, self.layout.row_axes, strict=True)
            ]
        )

    def copied(self, columns: Iterable[str]) -> "HostRows":
        """The same rows, with `columns` in memory that nobody else has seen yet; other stacks are shared."""
        touched = {self.layout.places[name].stack for name in columns}
        return self._with([stack.copy() if i in touched else stack for i, stack in enumerate(self.stacks)])

    def replaced(self, columns: Mapping[str, Array]) -> "HostRows":
        """The same rows with other values in some columns."""
        rows = self.copied(columns)
        for name, values in columns.items():
            rows.column(name)[...] = values
        return rows

    def _with(self, stacks: list[Array]) -> "HostRows":
        return HostRows(self.layout, tuple(stacks))
