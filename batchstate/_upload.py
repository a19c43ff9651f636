"""The device side of a batch: every column, the step's table writes and its extra arrays in one packed copy."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import LARGE, Array, as_array
from batchstate._core import Block
from batchstate._origin import RowSet
from batchstate._rows import MOST_SOURCES, DeviceRows, Layout, RowState
from batchstate.errors import ArgumentError, another_runtime, one_of
from batchstate.mirror import DeviceSide, Handles, MirroredTensor, rows_of, write_count
from batchstate.runtime.base import Fence, OfThisProcess, Runtime
from batchstate.runtime.memory import ALIGNMENT, PackedUpload, ReadyTensor, view_at
from batchstate.tables import TableWrite
from batchstate.violations import Where


@final
@attrs.define(eq=False, repr=False)
class Extras(OfThisProcess, Mapping[str, torch.Tensor]):
    """Extra arrays that were packed with a batch: name -> device tensor, safe on the current stream.

    Attributes:
        arrays: name -> the array that was passed for it, by which its owner recognises it.
        slots: the slots that crossed with them to fixed addresses, int64[rows], and their device side; else None.
        row_set: the requests that the rows of the batch belong to.
    """

    _runtime: Runtime | None = None
    _upload: PackedUpload | None = None
    _places: Mapping[str, int] = attrs.field(factory=dict)
    arrays: Mapping[str, object] = attrs.field(factory=dict)
    slots: tuple[Array, DeviceSide] | None = None
    row_set: RowSet | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        index = self._places.get(name)
        if index is None or self._upload is None or self._runtime is None:
            raise KeyError(f"no extra {name!r}; {one_of(self._places, name) if self._places else 'there are none'}")
        return self._runtime.use_part_on_current_stream(self._upload, index)

    @property
    def copied(self) -> Fence | None:
        """The fence behind the copy, where there was one. For the library."""
        return None if self._upload is None else self._upload.ready

    def several(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several of them, made safe on the current stream together. For the library."""
        packed, places = self._upload, self._places
        if packed is None or self._runtime is None:
            return {}
        self._runtime.use_on_current_stream(
            packed.buffer, packed.stream, packed.ready, synchronised=packed.synchronised
        )
        return {name: packed.view(places[name]) for name in names}

    def side(self, name: str) -> DeviceSide:
        """The same as the device side of a value, with the fence recorded after the copy. For the library."""
        if self._upload is None:
            raise KeyError(name)
        return DeviceSide(ReadyTensor.uploaded(self._upload.view(self._places[name]), self._upload))

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __repr__(self) -> str:
        return f"Extras({', '.join(self._places)})"

    def __len__(self) -> int:
        return len(self._places)


NO_EXTRAS = Extras()


def column_view(
    buffer: torch.Tensor,
    layout: Layout,
    block: Block,
    name: str,
    runs: "dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]]",
) -> torch.Tensor:
    """A column of device memory uint8[nbytes] that is laid out as a block.

    Columns that lie side by side are viewed in one call for each dtype, and kept in `runs`: one by one, each costs as
    much.
    """
    column, run, num_rows = layout.tensors[name], layout.runs.get(name), block.n
    if run is None:
        return view_at(buffer, (block.start(layout.index[name]), column.np_dtype, (num_rows, *column.shape)))
    first, count, member = run
    views = runs.get((first, column.dtype))
    if views is None:
        size, typed = column.np_dtype.itemsize, buffer.view(column.dtype)
        pitch = (num_rows * size + ALIGNMENT - 1 & -ALIGNMENT) // size
        begin = typed.storage_offset() + block.start(first) // size
        views = runs[first, column.dtype] = typed.as_strided((count, num_rows), (pitch, 1), begin).unbind(0)
    return views[member].view(num_rows, *column.shape) if column.shape else views[member]


@final
class BatchDevice:
    """The device side of a batch, which does not exist before its first use.

    It refers to the rows and not to the batch, and columns refer to it: without a cycle, device memory goes back when
    the last user drops it and not whenever Python next collects garbage.

    Attributes:
        state: the rows of the batch. Once a column is gathered, its device rows are the gathered ones.
        uploaded: whether all columns have crossed.
        packed: the copy that begins with all mirrored columns, laid out as in their block; None while they have not
            crossed, and cannot have been written on the device.
    """

    __slots__ = ("_exposed", "_gathered_views", "_needs", "_runs", "_runtime", "packed", "state", "uploaded")

    def __init__(self, runtime: Runtime, state: RowState, packed: PackedUpload | None = None) -> None:
        self._runtime = runtime
        self.state = state
        self.packed = packed
        self.uploaded = packed is not None
        # Shared by all batches that have their columns from one copy. The views that were given out of it by column,
        # with torch's count of writes into each before; and the views of columns that lie side by side.
        self._exposed: dict[str, tuple[torch.Tensor, int | None]] = {}
        self._runs: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self._needs: dict[str, tuple[PackedUpload, range]] = {}
        self._gathered_views: dict[str, tuple[torch.Tensor, int | None]] = {}

    def kept(self, state: RowState, changed: Collection[str]) -> "BatchDevice | None":
        """The device side of a batch of the same rows; None if nothing has crossed, or a column that `changed` crosses.

        Then all cross again: a copy of a few bytes takes as long as one of all columns.
        """
        if self.packed is None or not state.device.keys() >= set(changed):
            return None
        device = BatchDevice(self._runtime, state)
        device.packed, device._exposed, device._runs = self.packed, self._exposed, self._runs
        device._needs = {
            name: needs for name, needs in self._needs.items() if state.device.get(name) is self.state.device.get(name)
        }
        return device

    def note_needs(self, name: str, upload: PackedUpload, places: range) -> None:
        """The arrays by which a column is gathered have crossed in `upload`."""
        self._needs[name] = upload, places

    def upload(self, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Uploads columns that have not crossed yet in one copy, then launches one scatter for each table written.

        Every write is checked again before the copy: an error of the library's changes nothing. The scatters are
        launched one after the other, and a device cannot take one back: if torch fails to launch the second, the first
        table is written, on the device and in its `host` alike, and the second on neither. Writes of one table are
        joined. Raises as `Batch.upload`.
        """
        state, first, sends = self.state, not self.uploaded, self.packed is None
        arrays: list[Array] = [state.crossing()] if sends else []
        needs = append_needs(arrays, state, self._needs) if first and state.device else {}
        if not (arrays or writes or extras):
            self.uploaded = True
            return NO_EXTRAS
        upload, uploaded = packed_step(self._runtime, arrays, writes, extras)
        self._needs |= {name: (upload, places) for name, places in needs.items()}
        if sends:
            self.packed = upload
        self.uploaded = True
        if state.device:
            self.gather_many()  # last: it may have to wait for the stream that made the sources
        return uploaded

    def gather_many(self) -> None:
        """Gathers columns of many sources, or of few rows of large ones: each source is memory kept alive."""
        for name, rows in self.state.device.items():
            kept = sum(length for _, length in rows.sources)
            if len(rows.sources) > MOST_SOURCES or (kept >= LARGE and 2 * len(rows) < kept):
                self._gathered(name, rows)

    def side(self, name: str) -> DeviceSide:
        """The device side of a column as a value has it."""
        return DeviceSide(functools.partial(self.column, name), gathered_from=functools.partial(self.rows, name))

    def rows(self, name: str) -> DeviceRows | None:
        """The rows of a column whose host side is not a copy, as far as they are gathered."""
        return self.state.device.get(name)

    def column(self, name: str) -> ReadyTensor:
        """The device side of a column; unless it is there, all that has not crossed yet is uploaded."""
        rows = self.state.device.get(name)
        if not self.uploaded and not (self.packed is not None and (rows is None or rows.as_it_is() is not None)):
            self.upload((), {})
            rows = self.state.device.get(name)  # by now perhaps gathered
        if rows is not None:
            return self._gathered(name, rows)
        if name not in self._exposed:
            view = self._shared(name).data  # with a count of writes of its own: a report names the column
            self._exposed[name] = view, write_count(view)
        return ReadyTensor.uploaded(self._exposed[name][0], self._crossed)

    def columns(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The device sides of several columns, safe on the current stream: the same as `column`, all at once."""
        if not self.uploaded:
            self.upload((), {})
        sides, packed = {}, self._crossed
        self._runtime.use_on_current_stream(
            packed.buffer, packed.stream, packed.ready, synchronised=packed.synchronised
        )
        for name in names:
            rows = self.state.device.get(name)
            if rows is None:
                sides[name] = self._shared(name)
            else:
                sides[name] = self._gathered(name, rows).on_current_stream(self._runtime)
        return sides

    @property
    def _crossed(self) -> PackedUpload:
        if self.packed is None:  # pragma: no cover - `upload` sets it
            raise RuntimeError("the batch has not been uploaded")
        return self.packed

    def _shared(self, name: str) -> torch.Tensor:
        """A column as a view of the copy; no launch. A write into it counts as one into the copy."""
        return column_view(self._crossed.buffer, self.state.layout, self.state.block, name, self._runs)

    def written(self) -> tuple[str, int, int] | None:
        """A column that was written from outside, and torch's count of writes in place before and now; or None.

        All columns of a copy share one count; after a write, the name comes from comparing the sides, and is empty if
        none differs.
        """
        packed = self.packed
        if packed is None:
            return None
        if packed.write_count is not None and packed.buffer._version != packed.write_count:
            return self._differing(), packed.write_count, packed.buffer._version
        exposed = {name: seen for name, seen in self._exposed.items() if name not in self.state.device}
        for name, (view, before) in (exposed | self._gathered_views).items():
            if before is not None and view._version != before:
                return name, before, view._version
        return None

    def _differing(self) -> str:
        state = self.state
        if not self._runtime.capturing:
            for name in state.layout.index:
                if name not in state.device:
                    device = self._runtime.inspect(self._shared(name))
                    if state.column(name).tobytes() != device.tobytes():
                        return name
        return ""

    def _gathered(self, name: str, rows: DeviceRows) -> ReadyTensor:
        if self._runtime.capturing and rows.as_it_is() is None:
            # The kernels of a captured gather do not run: its result must not become the column's device side.
            self._runtime.refuse_capture(f"gathering column {name!r}")
        crossed: list[torch.Tensor] = []
        if name in self._needs:
            packed, places = self._needs[name]
            crossed = [self._runtime.use_part_on_current_stream(packed, index) for index in places]
        where: Where = {"object": rows, "operation": "gather", "column": name, "step": self._runtime.step}
        gathered = rows.gathered(self._runtime, crossed, self.state.layout.tensors[name].dtype, where)
        if self._gathered_views.get(name, (None,))[0] is not gathered.tensor:
            contents = rows.contents(self._runtime) if levels.full else None
            if contents is not None:
                invariants.mirror_equal(contents[0], rows_of(self._runtime, gathered.tensor), **where)
            self._gathered_views[name] = gathered.tensor, write_count(gathered.tensor)
            self.start_from(name, gathered, None if contents is None else contents[0])
        return gathered

    def start_from(self, name: str, gathered: ReadyTensor, contents: Array | None = None) -> None:
        """The column, and batches derived from here on, start from the gathered rows, not from their sources.

        Args:
            name: of a column whose host side is not a copy.
            gathered: its rows, with or without padded ones after them.
            contents: of the rows, for checks at `full`.
        """
        num_rows = len(self.state.device[name])
        if gathered.tensor.shape[0] != num_rows:
            gathered = gathered._replace(tensor=gathered.tensor[:num_rows])
        self._needs.pop(name, None)
        self.state.device = {**self.state.device, name: DeviceRows.of(DeviceSide(gathered, contents), num_rows)}


def packed_step(
    runtime: Runtime, arrays: list[Array], writes: Sequence[TableWrite], extras: Mapping[str, object]
) -> tuple[PackedUpload, Extras]:
    """One copy of `arrays`, table writes and extras, and the scatters of the writes; the copy, and its extras."""
    if not (writes or extras):
        return runtime.upload(arrays), NO_EXTRAS
    joined = joined_writes(runtime, writes) if writes else []
    first_write = len(arrays)
    for write in joined:
        arrays += (write.index, write.values)
    places: dict[str, int] = {}
    for name, values in extras.items():
        places[name] = len(arrays)
        arrays.append(extra_array(name, values))
    upload = runtime.upload(arrays)
    for at, write in enumerate(joined):
        write.table.launch_checked(write, upload.view(first_write + 2 * at), upload.view(first_write + 2 * at + 1))
    return upload, Extras(runtime, upload, places, dict(extras))


def append_needs(arrays: list[Array], state: RowState, crossed: Collection[str] = ()) -> dict[str, range]:
    """Appends the arrays for gathering each column, unless they have `crossed`; column -> their places in the list."""
    needs = {}
    for name, rows in state.device.items():
        if name not in crossed:
            column, first = state.layout.tensors[name], len(arrays)
            arrays += rows.arrays(column.dtype, 1 + len(column.shape))
            needs[name] = range(first, len(arrays))
    return needs


def joined_writes(runtime: Runtime, writes: Sequence[TableWrite]) -> list[TableWrite]:
    """One write per table, all checked again; see `BatchDevice.upload` for what is refused."""
    by_table: dict[int, list[TableWrite]] = {}
    for write in writes:
        if write.table.runtime is not runtime:
            raise another_runtime("upload", write)
        write.table.check_write(write, "upload")
        by_table.setdefault(id(write.table), []).append(write)
    joined = [group[0] if len(group) == 1 else _joined(group) for group in by_table.values()]
    if levels.full:
        for write in joined:
            copy = _first_conflict(write)
            if copy is not None:
                problem = f"upload: element {write.index[copy]} of {write.table!r} is written twice"
                remedy = "write each element once a step; a device does not order the writes of one scatter"
                raise ArgumentError(problem, int(write.index[copy]), remedy)
    return joined


def _first_conflict(write: TableWrite) -> int | None:
    """The position at which an element is written a second time, with another value; else None."""
    order = np.argsort(write.index, kind="stable")
    index, values = write.index[order], write.values[order]
    conflicts = np.flatnonzero((index[1:] == index[:-1]) & (values[1:] != values[:-1]))
    return int(order[conflicts + 1].min()) if conflicts.size else None


def _joined(writes: Sequence[TableWrite]) -> TableWrite:
    index = np.concatenate([write.index for write in writes])
    values = np.concatenate([write.values for write in writes])
    return TableWrite(writes[0].table, index, values, tuple(owners for write in writes for owners in write.owners))


def extra_array(name: str, values: object, subject: str = "upload") -> Array:
    """An extra as a host array. Indices, such as `Locations`, are checked to lie in their space.

    Raises `ContractError` for indices that the host does not know, SENTINEL_ESCAPED, SLOT_OUT_OF_RANGE,
    SLOT_STALE_HANDLE (of another owner by now); else as `as_array`.
    """
    label = f"{subject}: extra {name!r}"
    if not isinstance(values, MirroredTensor) or values.unit is None:
        return as_array(values, label)
    if isinstance(values, Handles):
        values.check_kept(label)
    indices, runtime = values.exact_host(label), values.runtime
    runtime.check_indices(indices, values.unit, object=values, operation=subject, column=name, step=runtime.step)
    return indices
