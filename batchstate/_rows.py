"""The rows of a batch: on the host in one block of memory, on the device alone, and as Python objects.

Mirrored columns lie one after the other in a `_core.Block`, widest first, so that they cross in one copy; moving rows
is one loop of the core for all of them. Operations make another block: nobody writes a block that a batch has.

Columns without an exact host side are the tensors that they came from, and an index into their rows: moving rows
changes the index on the host and launches nothing; the rows are gathered when they are read. The index, padded rows and
added amounts cross in the batch's packed copy.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import (
    INT64,
    Array,
    Rows,
    across,
    add,
    amounts,
    check_bound_can_move,
    concatenate,
    of_dtype,
    select_rows,
    shifted,
    signed_twin,
)
from batchstate._core import Block, Columns
from batchstate.columns import Column, MirroredColumn, SlotColumn, TensorColumn
from batchstate.errors import DeclarationError, DtypeError, one_of
from batchstate.mirror import Contract, DeviceSide
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ReadyTensor, numpy_dtype
from batchstate.violations import Where

MOST_SOURCES = 8
"""A column of more sources than these is gathered at the next upload: each source is memory kept alive."""


@final
class Layout:
    """The columns of a batch class, and the order in which the mirrored ones lie in a block.

    Attributes:
        columns: all declarations of the class.
        tensors: those of tensor columns.
        index: mirrored column -> its number in a block.
        core: widths and units of these.
        slots: the column of slots, or None.
        plain: mirrored column of which every number is a value -> its dtype, the shape of a row, and its number.
        runs: column of one number per row -> the first column of its width, how many there are, and its number among
            these: they lie side by side, so that one call of torch gives views of all.
        pads: one padded row.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self.tensors = {name: column for name, column in columns.items() if isinstance(column, TensorColumn)}
        mirrored = [column for column in self.tensors.values() if isinstance(column, MirroredColumn)]
        mirrored.sort(key=lambda column: (-column.np_dtype.itemsize, math.prod(column.shape) != 1))
        self.index = {column.name: c for c, column in enumerate(mirrored)}
        self.slots = next((column.name for column in mirrored if isinstance(column, SlotColumn)), None)
        sizes = [column.np_dtype.itemsize for column in mirrored]
        units = [math.prod(column.shape) for column in mirrored]
        unsigned = [column.np_dtype.kind == "u" for column in mirrored]
        slots = -1 if self.slots is None else self.index[self.slots]
        self.core = Columns([size.bit_length() - 1 for size in sizes], units, unsigned, slots)
        self.plain = {
            column.name: (column.np_dtype, column.shape, c) for c, column in enumerate(mirrored) if column.takes_any
        }
        self.runs: dict[str, tuple[int, int, int]] = {}
        for size in set(sizes):
            run = [c for c in self.index.values() if sizes[c] == size and units[c] == 1]
            self.runs |= {mirrored[c].name: (run[0], len(run), at) for at, c in enumerate(run)}
        # Whether a column may have rows on the device alone.
        self.on_device = any(column.contract is not Contract.EXACT for column in self.tensors.values())
        self._row_size = sum(map(math.prod, zip(sizes, units, strict=True))) + 8
        self.pads = Block(self.core, 1)
        pads = RowState(self, self.pads, {}, {})
        for column in mirrored:
            pads.column(column.name)[...] = column.pad

    def nbytes(self, num_rows: int) -> int:
        """Memory in which a block of so many rows lies, or less: each column begins at a multiple of 16."""
        return num_rows * self._row_size + 16 * len(self.index)


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
        if not len(self) or not len(other):
            return self if len(self) else other
        offset = sum(length for _, length in self.sources)
        added = None
        if self.added is not None or other.added is not None:
            added = np.concatenate([part._amounts() for part in (self, other)])
        return DeviceRows(self.sources + other.sources, np.concatenate([self.rows, other.rows + offset]), added)

    def shifted(self, amount: Rows | int) -> "DeviceRows":
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
        Raises MIRROR_FOREIGN_WRITE.
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
        """The tensors have not been written from outside since they became part of a batch: MIRROR_FOREIGN_WRITE.

        At `full`, the host side of a bounded column, `bound`, is compared too: MIRROR_BOUND.
        """
        if levels.full and (contents := self.contents(runtime)) is not None:  # first: it says which row
            invariants.mirror_foreign_write("device", *contents, **where)
            if bound is not None:
                invariants.mirror_bound(bound, contents[1], **where)
        if levels.cheap:
            for source, _ in self.sources:
                if isinstance(source, DeviceSide):
                    source.check_count(where)

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
class RowState:
    """The rows of one batch, in three parts that move alike. An operation makes another one; no two batches share it.

    Attributes:
        layout: of the batch class.
        block: rows of the mirrored columns on the host, which nobody writes.
        device: columns whose host side is not a copy. A batch that has gathered a column replaces its rows here.
        objects: Python objects by column, object[num_reqs].
        changed: mirrored columns whose values the operation that made these rows may have changed; None if it moved
            rows.
    """

    __slots__ = ("_views", "block", "changed", "device", "layout", "objects")

    def __init__(
        self,
        layout: Layout,
        block: Block,
        device: Mapping[str, DeviceRows],
        objects: Mapping[str, Array],
        changed: Collection[str] | None = None,
    ) -> None:
        self.layout, self.block, self.device, self.objects, self.changed = layout, block, device, objects, changed
        self._views: dict[str, Array] = {}

    def __repr__(self) -> str:
        return f"RowState({self.block.n} rows; {len(self.device)} device columns, {len(self.objects)} object columns)"

    def column(self, name: str) -> Array:
        """The values of a mirrored column, a view [n, ...]."""
        view = self._views.get(name)
        if view is None:
            column, block = self.layout.tensors[name], self.block
            start = block.start(self.layout.index[name])
            view = self._views[name] = np.ndarray((block.n, *column.shape), column.np_dtype, block.memory, start)
        return view

    @property
    def generations(self) -> Rows:
        """The generations of the slots, a view int64[n]."""
        block = self.block
        return np.ndarray((block.n,), INT64, block.memory, 8 * block.gens)

    def crossing(self) -> Array:
        """All mirrored columns, as they cross to the device."""
        block = self.block
        memory: Array = block.memory[: block.start(block.columns.num) >> 3]
        return memory

    def taken(self, index: Rows) -> "RowState":
        """The rows at checked indices int64[k]."""
        block = Block(self.layout.core, index.size)
        block.take(self.block, index)
        return self.moved(index, None, block)

    def merged(self, other: "RowState", kept: Rows | None = None) -> "RowState":
        """The rows of both; only those at checked indices `kept` int64[k] of these, if given."""
        block = Block(self.layout.core, (self.block.n if kept is None else kept.size) + other.block.n)
        block.join(self.block, kept, other.block)
        return self.moved(kept, other, block)

    def moved(self, index: Rows | None, other: "RowState | None", block: Block | None = None) -> "RowState":
        """The device rows and objects at checked indices, all without, then those of `other`.

        The mirrored columns are in `block` already; without one they have not moved yet. A column that is exact in one
        of the two alone is a device column of the result.
        """
        device, objects = self.device, self.objects
        if device or (other is not None and other.device):
            names = dict.fromkeys((*device, *(() if other is None else other.device)))
            device = {name: self._device_rows(name, index) for name in names}
            if other is not None:
                device = {name: rows.merged(other._device_rows(name)) for name, rows in device.items()}
        if objects:
            objects = {name: mine if index is None else mine[index] for name, mine in objects.items()}
            if other is not None:
                objects = {name: np.concatenate((mine, other.objects[name])) for name, mine in objects.items()}
        return RowState(self.layout, self.block if block is None else block, device, objects)

    def _device_rows(self, column: str, kept: Rows | None = None) -> DeviceRows:
        rows = self.device.get(column)
        if rows is None:
            values = self.column(column)
            rows = DeviceRows.of(values, len(values))
        return rows if kept is None else rows.taken(kept)

    def padded(self, count: int) -> "RowState":
        """These rows, then `count` padded rows; they have no objects."""
        layout, num_rows = self.layout, self.block.n
        block = Block(layout.core, num_rows + count)
        block.append(0, self.block)
        block.pad(layout.pads, num_rows)
        state = self.on(block)
        state.pad_device(count)
        return state

    def on(self, block: Block) -> "RowState":
        """The same, where the mirrored columns are in `block`."""
        return RowState(self.layout, block, self.device, self.objects)

    def first(self, num_rows: int) -> "RowState":
        """The first rows, in memory of their own."""
        return self.taken(np.arange(num_rows))

    def pad_device(self, count: int) -> None:
        """Appends `count` padded rows to the columns on the device alone."""
        pads = {name: np.repeat(self.layout.tensors[name].pad[None], count, axis=0) for name in self.device}
        self.device = {name: rows.merged(DeviceRows.of(pads[name], count)) for name, rows in self.device.items()}

    def copied(self, columns: Collection[str]) -> "RowState":
        """The same rows in memory of their own, where some `columns` are to be changed."""
        block = self.block
        if columns:
            block = Block(self.layout.core, block.n)
            block.copy(self.block)
        return RowState(self.layout, block, self.device, self.objects, tuple(columns))

    def add(self, added: Mapping[str, object], subject: str) -> None:
        """Adds integers to some columns of rows that nobody has yet: `added` maps a column to its amounts.

        Raises as `Batch.advance`.
        """
        layout, block = self.layout, self.block
        for name, by in added.items():
            label, column = f"{subject}: column {name!r}", layout.tensors.get(name)
            if column is None or not column.counted:
                raise not_counted(layout, name, label)
            rows, c, each, same = self.device.get(name), layout.index.get(name), None, 0
            if type(by) is int and -(2**63) <= by < 2**63:
                same = by
            else:
                amount = amounts(by, block.n, label)
                each, same = (amount, 0) if amount.ndim else (None, amount.item())
            if c is not None and block.add(c, same, each, rows is not None) >= 0:
                amount, values = amounts(by, block.n, label), self.column(name)
                if rows is not None:
                    check_bound_can_move(values, amount, label)
                shifted(values, across(amount, values.ndim), label)
                raise RuntimeError(f"{label}: a sum was refused that fits")  # pragma: no cover
            if rows is not None:
                self.device = {**self.device, name: rows.shifted(same if each is None else each)}

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


def not_counted(layout: Layout, name: str, label: str) -> Exception:
    """The error of a column to which nothing can be added, or of no column."""
    column = layout.tensors.get(name)
    if column is not None:
        some = "" if column.takes_any or column.unit else f", of which a {type(column).__name__} takes some"
        remedy = "`advance` adds to columns of integers that are not indices; set others with `update` or `replace`"
        holds = column.unit or column.bits_of or column.np_dtype
        return DtypeError(f"{label} holds {holds}{some}", column.dtype, remedy)
    problem = f"{label} {'holds Python objects' if name in layout.columns else 'is not declared'}"
    return DeclarationError(
        problem, name, one_of([key for key, other in layout.tensors.items() if other.counted], name)
    )
