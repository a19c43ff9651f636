"""Values that callers give for columns: every one is checked and converted here, whichever call takes it.

| call | goes through |
| --- | --- |
| `build`, `replace`, `plan(joining={column: values})` | `put_values`: all rows of some columns, on any side |
| `update`, and `bound=` of `update_device` | `host_values`, through which all host values go |
| `update_device` | `device_rows`, through which all device sides go |
| `advance`, `next_batch(advance=)` | `amounts_by_column`; `RowState.add` adds them, and refuses an overflow |
| `tighten` | `MirroredTensor.tighten` |
| `merge`, `next_batch` and `plan` with a batch as `joining=` | nothing: its values were checked when it was built |

The declaration of a column says which values it takes: `dtype`, `shape`, `contract`, `unit`. A kind that takes fewer
overrides `TensorColumn.check_values`, which is called for all host values; `advance` refuses such a kind. All functions
raise as `Batch.build` does, and what `check_values` raises.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import UNORDERED, Array, carried, check_dense
from batchstate._core import Block
from batchstate._rows import DeviceRows, Layout, RowState
from batchstate.columns import DeviceColumn, HostColumn, MirroredColumn, TensorColumn
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    ShapeError,
    another_runtime,
    expected,
    one_of,
    wrong_shape,
)
from batchstate.mirror import Contract, DeviceSide, MirroredTensor, Slots
from batchstate.runtime.base import Runtime
from batchstate.runtime.memory import ReadyTensor

Objects = npt.NDArray[np.object_]


def put_values(
    state: RowState, values: Mapping[str, object], num_rows: int, runtime: Runtime, subject: str
) -> int | None:
    """Checks values for some columns, one row each for `num_rows` requests, and puts them into rows nobody has yet.

    A mirrored column takes lists, arrays, CPU tensors and mirrored values; the slots take handles alone. A device-only
    column takes tensors of the device too, and a host column any sequence. Returns the id of the pool of the slots,
    None without slots.
    """
    layout, pool_id = state.layout, None
    device, objects = dict(state.device), dict(state.objects)
    for name, value in values.items():
        column = layout.columns.get(name)
        label = f"{subject}: column {name!r}"
        if levels.full and isinstance(value, MirroredTensor):
            value.check(subject)
        if isinstance(column, MirroredColumn):
            device.pop(name, None)
            if not isinstance(value, MirroredTensor):
                if name == layout.slots:
                    if num_rows:
                        remedy = "pass what `pool.take` returned; if the numbers come from your own allocator, "
                        remedy += "`Slots.from_host(runtime, numbers)`"
                        raise DtypeError(f"{label}: expected slots, got numbers", value, remedy)
                    pool_id = 0
                state.column(name)[...] = host_values(column, value, num_rows, runtime, label)
                continue
            state.column(name)[...] = _exact_or_bounds(column, value, num_rows, runtime, label)
            if value.contract is Contract.UPPER_BOUND:
                device[name] = DeviceRows.of(value.device_side, num_rows)
            if isinstance(value, Slots):
                state.generations[...], pool_id = value.generations, value.pool_id
        elif isinstance(column, DeviceColumn):
            device[name] = device_rows(column, value, num_rows, runtime, label)
        elif isinstance(column, HostColumn):
            objects[name] = _object_rows(value, num_rows, label)
        else:
            remedy = one_of(layout.columns, name) if layout.columns else "declare it, in a subclass of `Batch`"
            raise DeclarationError(f"{label} is not declared", name, remedy)
    state.device, state.objects = device, objects
    return pool_id


def rows_from(
    layout: Layout, values: Mapping[str, object], runtime: Runtime, subject: str
) -> tuple[RowState, int, int | None]:
    """Rows from values of all columns, their number, and the pool of their slots.

    None if the values have no slots, which the caller then fills in. Raises as `Batch.build`.
    """
    if not values:
        raise ArgumentError(f"{subject}: no columns", (), "use `empty` for a batch of no requests")
    num_rows = len(next(iter(values.values())))  # type: ignore[arg-type]
    block = Block(layout.core, num_rows)
    others, state = block.put(layout.plain, values), RowState(layout, block, {}, {})
    return state, num_rows, put_values(state, others, num_rows, runtime, subject) if others else None


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

    Values for `some` rows may be one row for all, and `bounds` for some rows one number for all.
    """
    values = carried(value, column.np_dtype, column.bits_of, label)
    shape = (num_rows, *column.shape)
    if not some:
        _check_shape(column, values.shape, num_rows, label)
    elif values.shape != shape and values.shape != (() if bounds else column.shape):
        part, each = (": bound", "one bound for each value") if bounds else ("", "one row of values for each row")
        raise wrong_shape(f"{label}{part}", shape, values.shape, f"pass {each}, or one for all")
    column.check_values(values, runtime, label)
    return values


def device_rows(column: TensorColumn, value: object, num_rows: int, runtime: Runtime, label: str) -> DeviceRows:
    """Values of a column as rows of its device side: a mirrored value, a device tensor, or host values."""
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


def amounts_by_column(columns: Iterable[str] | Mapping[str, object], n: object, subject: str) -> Mapping[str, object]:
    """Column -> its amounts, from the arguments of `Batch.advance`."""
    if isinstance(columns, str):
        return {columns: n}
    if not isinstance(columns, list | tuple) and isinstance(columns, Mapping):
        return columns
    names = tuple(columns)
    added = dict.fromkeys(names, n)
    if len(added) < len(names):
        raise ArgumentError(f"{subject}: a column is named twice in {names}", names, "name each once, with the sum")
    return added


def _object_rows(value: Any, num_rows: int, label: str) -> Objects:
    if isinstance(value, UNORDERED):
        raise expected(label, "a sequence", value, "pass a list with one object per request", DtypeError)
    objects = np.fromiter(value, np.object_)
    if objects.size != num_rows:
        raise ShapeError(f"{label}: expected {num_rows} objects, got {objects.size}", value, "pass one per request")
    return objects


def _exact_or_bounds(
    column: MirroredColumn, value: MirroredTensor, num_rows: int, runtime: Runtime, label: str
) -> Array:
    _check_value(column, value, runtime, label)
    bounded = value.contract is Contract.UPPER_BOUND
    if value.contract is Contract.DEVICE_ONLY or (bounded and column.contract is not Contract.UPPER_BOUND):
        problem = f"{label}: expected contract {column.contract.value!r}, got {value.contract.value!r}"
        remedy = "resolve the value, or declare the column with contract='upper_bound'"
        raise ContractError(problem, value.contract.value, remedy)
    _check_shape(column, value.shape, num_rows, label)
    numbers = value.np
    column.check_values(numbers, runtime, label)
    return numbers


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
            rows = "1 row" if shape[0] == 1 else f"{shape[0]} rows"
            problem = f"{label} has {rows}, expected {num_rows}, as the other columns have"
        else:
            problem = f"{label}: expected shape {[num_rows, *column.shape]}, got {list(shape)}"
        raise ShapeError(problem, shape, "pass one row per request, each of the declared shape")


def _check_dtype(column: TensorColumn, dtype: torch.dtype, label: str) -> None:
    if dtype != column.dtype:
        raise DtypeError(f"{label}: expected {column.dtype}, got {dtype}", dtype, "convert the values first")
