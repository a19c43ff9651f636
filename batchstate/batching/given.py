"""The door of a batch: what a caller gives for its columns, checked and sorted by side."""

from collections.abc import Mapping, Sized
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants
from batchstate.batching.device_rows import DeviceRows
from batchstate.batching.host_rows import GENERATION_SUFFIX
from batchstate.columns import Column, DeviceColumn, HostColumn, MirroredColumn, TensorColumn
from batchstate.contracts import Contract
from batchstate.errors import ArgumentError, ContractError, DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime
from batchstate.values.device_side import DeviceSide
from batchstate.values.host_arrays import Array, converted

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
