"""What `Batch.to_static` asks of the memory that it writes to; `batchstate.static` has it."""

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, as_array
from batchstate._rows import MOST_SOURCES, DeviceRows, HostRows
from batchstate.columns import Column, TensorColumn
from batchstate.errors import ArgumentError, DeviceError
from batchstate.mirror import DeviceSide, Made, version_mark
from batchstate.runtime import PackedUpload, Runtime
from batchstate.runtime.memory import ALIGNMENT
from batchstate.tables import TableWrite

# The one copy of a step: every column of a batch, table writes and derived arrays, packed together.


@final
@attrs.define(eq=False, repr=False)
class Extras(Mapping[str, torch.Tensor]):
    """Derived arrays that rode in a batch's copy: name -> device tensor, safe on the stream that asks.

    Attributes:
        given: name -> what was given for it: who made it recognises it.
        slots: the slots that crossed with them to fixed addresses, int64[rows], and their device side; else None.
    """

    _runtime: Runtime
    _upload: PackedUpload | None
    _places: Mapping[str, int]
    given: Mapping[str, object] = attrs.field(factory=dict)
    slots: tuple[Array, DeviceSide] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if self._upload is None:
            raise KeyError(name)
        return self._runtime.use_part_on_current_stream(self._upload, place)

    def side(self, name: str) -> DeviceSide:
        """The same as the device side of a value, with the fence that is behind the copy. For the library."""
        if self._upload is None:
            raise KeyError(name)
        upload = self._upload
        return DeviceSide(None, Made(upload.view(self._places[name]), upload.stream, upload.ready, upload.synchronised))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __repr__(self) -> str:
        return f"Extras({', '.join(self._places)})"

    def __len__(self) -> int:
        return len(self._places)


@final
class BatchDevice:
    """The device side of a batch, which does not exist before somebody uses it.

    It refers to the rows and not to the batch, and columns refer to it: without a cycle, device memory goes back when
    the last user drops it and not whenever Python next collects garbage.

    Attributes:
        rows: the batch's host rows.
        device_rows: columns of which the host side is no copy. Once gathered, a column's rows are what was gathered.
    """

    __slots__ = (
        "_columns",
        "_handed_out",
        "_lanes",
        "_mark",
        "_marks",
        "_needs",
        "_packed",
        "_runtime",
        "device_rows",
        "rows",
    )

    def __init__(
        self, runtime: Runtime, columns: Mapping[str, Column], rows: HostRows, device_rows: Mapping[str, DeviceRows]
    ) -> None:
        self._runtime = runtime
        self._columns = columns
        self.rows = rows
        self.device_rows = device_rows
        self._packed: PackedUpload | None = None
        self._needs: dict[str, range] = {}
        self._lanes: dict[tuple[int, np.dtype[np.generic]], tuple[torch.Tensor, ...]] = {}
        self._handed_out: dict[str, torch.Tensor] = {}
        self._mark: int | None = None
        self._marks: list[tuple[str, torch.Tensor, int]] = []

    @property
    def uploaded(self) -> bool:
        """Whether the columns have crossed."""
        return self._packed is not None

    def upload(self, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Uploads what has not crossed yet in one copy, then launches one scatter for each table that is written.

        Every write is asked again before the copy: an error of the library's changes nothing. The scatters are
        launched one after the other, and a device cannot take one back: if torch fails to launch the second, the first
        table is written, on the device and in its `host` alike, and the second on neither.

        Args:
            writes: table writes; those of one table are joined.
            extras: name -> host array.

        Raises:
            DeviceError: a table of another runtime.
            Violation: SLOT_STALE_HANDLE: a slot of a write has become somebody else's since it was made.
            ArgumentError: one element is written twice, at level `full`.
        """
        arrays: list[Array] = []
        needs: dict[str, range] = {}
        if self._packed is None:
            arrays += self.rows.in_lanes(ALIGNMENT)
            if self.device_rows:
                needs = append_needs(arrays, self.device_rows, self._columns)
        elif not writes and not extras:
            return Extras(self._runtime, None, {})
        joined = joined_writes(self._runtime, writes) if writes else []
        first_write = len(arrays)
        for write in joined:
            arrays += (write.index, write.values)
        places: dict[str, int] = {}
        for name, values in extras.items():
            places[name] = len(arrays)
            arrays.append(as_array(values, f"extra {name!r}"))
        upload = self._runtime.upload(arrays)
        if self._packed is None:
            self._packed, self._needs, self._mark = upload, needs, version_mark(upload.buffer)
        for i, write in enumerate(joined):
            write.table.apply(write, upload.view(first_write + 2 * i), upload.view(first_write + 2 * i + 1))
        if self.device_rows:
            self._gather_what_piled_up()  # last: it may have to wait for the stream that made the sources
        return Extras(self._runtime, upload, places, dict(extras))

    def _gather_what_piled_up(self) -> None:
        for name, rows in self.device_rows.items():
            if len(rows.sources) > MOST_SOURCES:
                self._gathered(name, rows)

    def column(self, name: str) -> Made:
        """The device side of a column; uploads the whole batch if nobody did before."""
        if self._packed is None:
            self.upload((), {})
        rows = self.device_rows.get(name)
        if rows is not None:
            return self._gathered(name, rows)
        packed = self._packed_now()
        view = self._handed_out.get(name)
        if view is None:
            # `.data` counts writes in place of its own: a write then names its column.
            view = self._hand_out(name, self._shared(name, packed).data)
        return Made(view, packed.stream, packed.ready, packed.synchronised)

    def columns(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The device sides of several columns, safe on the current stream. What `column` does, for all in one go."""
        if self._packed is None:
            self.upload((), {})
        packed = self._packed_now()
        self._runtime.use_on_current_stream(
            packed.buffer, packed.stream, packed.ready, synchronised=packed.synchronised
        )
        sides = {}
        for name in names:
            rows = self.device_rows.get(name)
            if rows is None:
                sides[name] = self._shared(name, packed)
            else:
                made = self._gathered(name, rows)
                sides[name] = self._runtime.use_on_current_stream(
                    made.tensor, made.stream, made.ready, synchronised=made.synchronised
                )
        return sides

    def written(self) -> tuple[str, int, int] | None:
        """A column into which somebody has written, and torch's count of writes in place before and now; or None.

        One look for all that `columns` gave, whatever their number: then the name is found by comparing the sides, and
        is empty if none differs.
        """
        packed = self._packed
        if packed is not None and self._mark is not None and packed.buffer._version != self._mark:
            return self._differing(packed), self._mark, packed.buffer._version
        for name, handed_out, before in self._marks:
            now = handed_out._version
            if now != before:
                return name, before, now
        return None

    def _differing(self, packed: PackedUpload) -> str:
        if not self._runtime.capturing:
            for name in self.rows.layout.places:
                if name in self._columns and name not in self.device_rows:
                    host, device = self.rows.column(name), self._runtime.inspect(self._shared(name, packed))
                    if host.tobytes() != device.tobytes():
                        return name
        return ""

    def _hand_out(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._handed_out[name] = tensor
        mark = version_mark(tensor)
        if mark is not None:
            self._marks.append((name, tensor, mark))
        return tensor

    def _shared(self, name: str, packed: PackedUpload) -> torch.Tensor:
        """A column as a view of the copy; no launch."""
        place = self.rows.layout.places[name]
        if place.lane is None:
            return packed.shared(place.array)
        kind = place.array, place.dtype
        lanes = self._lanes.get(kind)
        if lanes is None:
            num_rows = self.rows.stacks[place.array].shape[1]  # behind the rows lies alignment
            lanes = self._lanes[kind] = packed.lanes(place.array, place.dtype, num_rows)
        lane = lanes[place.lane]
        return lane.view(-1, *place.shape) if place.shape else lane

    def _gathered(self, name: str, rows: DeviceRows) -> Made:
        if self._runtime.capturing and rows.as_it_is() is None:
            # The kernels of a captured gather do not run: what it returns must not become the column's device side.
            self._runtime._refuse_capture(f"gathering column {name!r}")
        crossed: list[torch.Tensor] = []
        if name in self._needs:
            packed, places = self._packed_now(), self._needs[name]
            crossed = [self._runtime.use_part_on_current_stream(packed, place) for place in places]
        made = rows.gathered(self._runtime, crossed)
        if self._handed_out.get(name) is not made.tensor:
            self._hand_out(name, made.tensor)
            self.start_from(name, made)
        return made

    def start_from(self, name: str, made: Made) -> None:
        """The column, and batches derived from here on, start from what was gathered, not from where it came from.

        Args:
            name: of a column of which the host side is no copy.
            made: its rows, with padded ones behind them or not.
        """
        num_rows = len(self.device_rows[name])
        if made.tensor.shape[0] != num_rows:
            made = made._replace(tensor=made.tensor[:num_rows])
        self._needs.pop(name, None)
        self.device_rows = {**self.device_rows, name: DeviceRows.of(DeviceSide(None, made), num_rows)}

    def _packed_now(self) -> PackedUpload:
        if self._packed is None:  # pragma: no cover - callers upload first
            raise RuntimeError("the batch has not been uploaded")
        return self._packed


def append_needs(
    arrays: list[Array], device_rows: Mapping[str, DeviceRows], columns: Mapping[str, Column]
) -> dict[str, range]:
    """Appends what each column's gathering needs on the device; column -> its places among the arrays."""
    needs = {}
    for name, rows in device_rows.items():
        column = columns[name]
        if isinstance(column, TensorColumn):
            wanted = rows.arrays(column.dtype, 1 + len(column.shape))
            needs[name] = range(len(arrays), len(arrays) + len(wanted))
            arrays += wanted
    return needs


def joined_writes(runtime: Runtime, writes: Sequence[TableWrite]) -> list[TableWrite]:
    """One write a table, all asked again; see `BatchDevice.upload` for what is refused."""
    for write in writes:
        if write.table.runtime is not runtime:
            raise DeviceError(f"upload of {write!r}, of another runtime", value=write, remedy="use one runtime")
        write.table.check_write(write, "upload")
    joined = _one_a_table(writes)
    if levels.full:
        for write in joined:
            copy = invariants.first_duplicate(write.index)
            if copy is not None:
                raise ArgumentError(
                    f"upload: element {write.index[copy]} of {write.table!r} is written twice",
                    value=int(write.index[copy]),
                    remedy="write each element once a step; a device does not order the writes of one scatter",
                )
    return joined


def _one_a_table(writes: Sequence[TableWrite]) -> list[TableWrite]:
    if len(writes) < 2:
        return list(writes)
    by_table: dict[int, list[TableWrite]] = {}
    for write in writes:
        by_table.setdefault(id(write.table), []).append(write)
    return [
        same[0]
        if len(same) == 1
        else TableWrite(
            same[0].table, np.concatenate([one.index for one in same]), np.concatenate([one.values for one in same])
        )
        for same in by_table.values()
    ]


def named_arrays(extras: object, what: str) -> Mapping[str, object]:
    """`extras` if they are a mapping from names.

    Raises:
        ArgumentError: they are none.
    """
    if isinstance(extras, Mapping) and all(isinstance(name, str) for name in extras):
        return extras
    raise ArgumentError(f"{what}: extras are {extras!r}", value=extras, remedy="pass a mapping: name -> host array")


class StaticMemory(abc.ABC):
    """Takes a batch over to addresses that stay."""

    @abc.abstractmethod
    def receive(self, batch: Any, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        """Copies the batch, its writes and its extras to the device."""
