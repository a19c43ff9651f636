"""What callers give for columns: every value is checked and converted here, whichever call takes it.

| call | goes through |
| --- | --- |
| `build`, `replace`, `plan(joining={column: values})` | `ColumnInputs.read`: all rows of some columns, on any side |
| `update`, and `bound=` of `update_device` | `host_values`, through which all host values go |
| `update_device` | `device_rows`, through which all device sides go |
| `advance`, `next_batch(advance=)` | `amounts_by_column`; `RowState.shifted` adds them, and refuses what does not fit |
| `tighten` | `MirroredTensor.tighten` |
| `merge`, `next_batch` and `plan` with a batch as `joining=` | nothing: its values were checked when it was built |

What a column takes follows from its declaration: `dtype`, `shape`, `contract`, `unit`. A kind of column that takes less
overrides `TensorColumn.check_values`, which is asked of the host values of all of them; `advance` refuses such a kind.
"""

from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import Array, Rows, carried, check_dense
from batchstate._rows import GENERATION_SUFFIX, DeviceRows, Layout, RowState
from batchstate.columns import DeviceColumn, HostColumn, MirroredColumn, TensorColumn
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    another_runtime,
    one_of,
    wrong_shape,
)
from batchstate.mirror import Contract, DeviceSide, MirroredTensor, Slots
from batchstate.runtime.base import Runtime
from batchstate.runtime.ordered_memory import ReadyTensor

Objects = npt.NDArray[np.object_]


@attrs.define
class ColumnInputs:
    """Column values of a caller, checked and sorted by side.

    Attributes:
        host: host rows of mirrored columns (and generations of slots).
        device: rows of columns whose host side is not a copy.
        objects: Python objects, object[n].
        pool_id: the pool of the slots; None without slots.
    """

    host: dict[str, Array] = attrs.field(factory=dict)
    device: dict[str, DeviceRows] = attrs.field(factory=dict)
    objects: dict[str, Objects] = attrs.field(factory=dict)
    pool_id: int | None = None

    @classmethod
    def read(
        cls,
        layout: Layout,
        values: Mapping[str, object],
        num_rows: int,
        runtime: Runtime,
        what: str,
        groups: Sequence[Array] = (),
        first: int = 0,
    ) -> Self:
        """Checks and sorts values for some columns: one row each for `num_rows` requests.

        A mirrored column takes lists, arrays, CPU tensors and mirrored values; the slots take handles alone. A
        device-only column takes tensors of the device too, and a host column any sequence. An array that has the dtype
        and shape of a column that takes any numbers is taken as it is: `Layout.plain`.

        Host rows go into `groups` at once, if given, from row `first` on; the arrays of a caller are not kept.

        Raises:
            DeclarationError: an undeclared name.
            ShapeError: another number of rows, or another shape of a row.
            DtypeError, ValueOverflowError: values that do not go into the column.
            ContractError: a contract weaker than the column takes.
            DeviceError: values of another runtime, or a tensor on another device.
            Violation: UNIT_MISMATCH, MIRROR_STALE_READ; those of `TensorColumn.check_values`.
        """
        inputs = cls()
        columns, plain, shape = layout.columns, layout.plain, (num_rows,)
        kinds = [groups[group].view(dtype)[:, first:] for group, dtype in layout.kinds] if groups else None
        for name, value in values.items():
            known = plain.get(name)
            if known is not None and type(value) is np.ndarray and value.dtype is known[0] and value.shape == shape:
                if kinds is None:
                    inputs.host[name] = value  # which is copied into the rows of the batch
                else:
                    kinds[known[1]][known[2]] = value
                continue
            column = columns.get(name)
            label = f"{what}: column {name!r}"
            if levels.full and isinstance(value, MirroredTensor):
                value.check(what)
            if isinstance(column, MirroredColumn):
                inputs._read_mirrored(column, value, num_rows, runtime, label)
            elif isinstance(column, DeviceColumn):
                inputs.device[name] = device_rows(column, value, num_rows, runtime, label)
            elif isinstance(column, HostColumn):
                inputs.objects[name] = _object_rows(value, num_rows, label)
            elif column is not None:
                problem = f"{label}: expected a column of a known kind, got {type(column).__name__}"
                remedy = "derive the class of the column from MirroredColumn, DeviceColumn or HostColumn"
                raise DeclarationError(problem, column, remedy)
            else:
                known_names = one_of(columns, name) if columns else "declare it, in a subclass of `Batch`"
                raise DeclarationError(f"{label} is not declared", name, known_names)
        if groups:
            for name, rows in inputs.host.items():
                place = layout.places[name]
                target = groups[place.group][place.member].view(place.dtype)[first:]
                target[...] = rows.reshape(target.shape)
        return inputs

    def _read_mirrored(
        self, column: MirroredColumn, value: object, num_rows: int, runtime: Runtime, label: str
    ) -> None:
        name = column.name
        if not isinstance(value, MirroredTensor):
            of_slots = issubclass(column.value_type, Slots)
            if of_slots and num_rows:
                raise DtypeError(
                    f"{label}: expected slots, got numbers",
                    value,
                    "pass what `pool.take` returned; if the numbers come from your own allocator, "
                    "`Slots.from_host(runtime, numbers)`",
                )
            self.host[name] = host_values(column, value, num_rows, runtime, label)
            if of_slots:
                self.host[name + GENERATION_SUFFIX] = np.zeros(num_rows, dtype=np.int64)
                self.pool_id = 0
            return
        _check_value(column, value, runtime, label)
        bounded = value.contract is Contract.UPPER_BOUND
        if value.contract is Contract.DEVICE_ONLY or (bounded and column.contract is not Contract.UPPER_BOUND):
            problem = f"{label}: expected contract {column.contract.value!r}, got {value.contract.value!r}"
            remedy = "resolve the value, or declare the column with contract='upper_bound'"
            raise ContractError(problem, value.contract.value, remedy)
        self.host[name] = numbers = value.np
        _check_shape(column, value.shape, num_rows, label)
        column.check_values(numbers, runtime, label)
        if bounded:
            self.device[name] = DeviceRows.of(value.device_side, num_rows)
        if isinstance(value, Slots):
            self.host[name + GENERATION_SUFFIX] = value.generations
            self.pool_id = value.pool_id


def rows_from(
    layout: Layout,
    values: Mapping[str, object],
    runtime: Runtime,
    what: str,
    after: tuple[RowState, Rows] | None = None,
) -> tuple[RowState, int, int | None]:
    """Rows from values of all columns, behind those of `after` at checked indices int64[k], if given.

    The other results are the number of rows given, and the pool of their slots; None if the values have none, and then
    they are to be filled in.

    Raises:
        ArgumentError: no column, or a column without a length. Else as `ColumnInputs.read`.
    """
    num_rows = _num_rows_of(values, what)
    first = 0 if after is None else after[1].size
    if after is not None and first:
        index = np.zeros(first + num_rows, dtype=np.int64)
        index[:first] = after[1]
        groups = [group.take(index, 1, None, "wrap") for group in after[0].groups]
    else:
        groups = [np.empty((len(pad), num_rows, *pad.shape[2:]), pad.dtype) for pad in layout.pads]
    inputs = ColumnInputs.read(layout, values, num_rows, runtime, what, groups, first)
    if after is None or not (after[0].device or inputs.device or after[0].objects):
        return RowState(layout, groups, inputs.device, inputs.objects), num_rows, inputs.pool_id
    others = RowState(layout, [group[:, first:] for group in groups], inputs.device, inputs.objects)
    return after[0].merged(others, after[1], groups), num_rows, inputs.pool_id


def host_values(
    column: TensorColumn,
    value: object,
    num_rows: int,
    runtime: Runtime,
    label: str,
    *,
    some: bool = False,
    bounds: bool = False,
) -> Array:
    """Host values for rows of a column, `[num_rows, *shape]`, as a new array.

    Those for `some` rows may be one row for all, and `bounds` of them one number for all.

    Raises:
        ShapeError, DtypeError, ValueOverflowError: they do not go into the column.
        Violation: those of `TensorColumn.check_values`.
    """
    values = carried(value, column.np_dtype, column.bits_of, label)
    shape = (num_rows, *column.shape)
    if not some:
        _check_shape(column, values.shape, num_rows, label)
    elif values.shape != shape and values.shape != (() if bounds else column.shape):
        what, each = (": bound", "one bound for each value") if bounds else ("", "one row of values for each row")
        raise wrong_shape(f"{label}{what}", shape, values.shape, f"pass {each}, or one for all")
    column.check_values(values, runtime, label)
    return values


def device_rows(column: TensorColumn, value: object, num_rows: int, runtime: Runtime, label: str) -> DeviceRows:
    """Values of a column as rows of its device side: a mirrored value, a device tensor, or host values.

    Raises:
        DeviceError, DtypeError, ShapeError: they do not go into the column.
        Violation: UNIT_MISMATCH; those of `TensorColumn.check_values`.
    """
    if isinstance(value, MirroredTensor):
        _check_value(column, value, runtime, label)
        _check_shape(column, value.shape, num_rows, label)
        return DeviceRows.of(value.device_side, num_rows)
    if isinstance(value, torch.Tensor):
        if value.device != runtime.device:
            problem = f"{label}: expected a tensor on {runtime.device}, got one on {value.device}"
            remedy = "pass a tensor of the runtime's device, or host values as a list or array"
            raise DeviceError(problem, str(value.device), remedy)
        check_dense(value, label)
        _check_dtype(column, value.dtype, label)
        _check_shape(column, tuple(value.shape), num_rows, label)
        return DeviceRows.of(DeviceSide(ReadyTensor.made_now(value, runtime)), num_rows)
    return DeviceRows.of(host_values(column, value, num_rows, runtime, label), num_rows)


def amounts_by_column(columns: Iterable[str] | Mapping[str, object], n: object, what: str) -> Mapping[str, object]:
    """Column -> what is added to it, from what `Batch.advance` takes.

    Raises:
        DeclarationError: not names.
        ArgumentError: a column is named twice.
    """
    if isinstance(columns, str):
        return {columns: n}
    untyped: object = columns
    is_list = isinstance(untyped, list | tuple)
    if not is_list and isinstance(columns, Mapping):
        return columns
    names: tuple[Any, ...] = tuple(columns) if is_list or isinstance(untyped, Iterable) else (untyped,)
    if not all(isinstance(name, str) for name in names):
        raise DeclarationError(f"{what}: expected column names, got {columns!r}", columns, "pass column names")
    added = dict.fromkeys(names, n)
    if len(added) < len(names):
        raise ArgumentError(f"{what}: a column is named twice in {names}", names, "name each once, with the sum")
    return added


def _num_rows_of(values: Mapping[str, object], what: str) -> int:
    """The number of rows of the first column given."""
    for name, value in values.items():
        try:
            return len(value)  # type: ignore[arg-type]
        except TypeError:  # also of what has a length in general, and none as it is: an array of no dimensions
            number = "the number " if isinstance(value, int | float) else ""
            problem = f"{what}: column {name!r}: expected one row per request, got {number}{value!r}"
            remedy = "pass a list, array or tensor with one row per request; slots are what `pool.take` returned"
            raise ArgumentError(problem, value, remedy) from None
    raise ArgumentError(f"{what}: no columns", (), "use `empty` for a batch of no requests")


def _object_rows(value: Any, num_rows: int, label: str) -> Objects:
    if not isinstance(value, Sized) or isinstance(value, str | bytes | Set | Mapping):
        problem = f"{label}: expected a sequence, got {type(value).__name__}"
        raise DtypeError(problem, value, "pass one object per request")
    if len(value) != num_rows:
        raise ShapeError(f"{label}: expected {num_rows} objects, got {len(value)}", len(value), "pass one per request")
    rows = np.fromiter(iter(value), dtype=np.object_)  # type: ignore[call-overload]
    if rows.size != num_rows:
        raise ShapeError(f"{label}: expected {num_rows} objects, as `len` says, got {rows.size}", value, "pass a list")
    return rows


def _check_value(column: TensorColumn, value: MirroredTensor, runtime: Runtime, label: str) -> None:
    if value.runtime is not runtime:
        raise another_runtime(label, value)
    _check_dtype(column, value.dtype, label)
    if value.unit != column.unit and (value.unit is not None or column.holds is None):
        invariants.unit_mismatch(
            str(column.unit), str(value.unit), object=value.label, column=column.name, step=runtime.step
        )


def _check_shape(column: TensorColumn, shape: tuple[int, ...], num_rows: int, label: str) -> None:
    if shape != (num_rows, *column.shape):
        if not shape:
            problem = f"{label}: expected one row per request, got one number"
        elif shape[1:] == column.shape:
            problem = (
                f"{label} has {shape[0]} row{'s' * (shape[0] != 1)}, expected {num_rows}, as the other columns have"
            )
        else:
            problem = f"{label}: expected shape {[num_rows, *column.shape]}, got {list(shape)}"
        raise ShapeError(problem, shape, "pass one row per request, each of the declared shape")


def _check_dtype(column: TensorColumn, dtype: torch.dtype, label: str) -> None:
    if dtype != column.dtype:
        raise DtypeError(f"{label}: expected {column.dtype}, got {dtype}", dtype, "convert the values first")
