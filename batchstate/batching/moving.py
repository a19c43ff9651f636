"""What moves when rows move: host rows, rows that only the device knows, and objects; all three alike."""

from collections.abc import Iterable, Mapping

import numpy as np

from batchstate.batching.device_rows import DeviceRows
from batchstate.batching.host_rows import HostRows
from batchstate.columns import Column, TensorColumn
from batchstate.errors import ArgumentError, DeclarationError, DtypeError
from batchstate.values.host_arrays import Array, Rows
from batchstate.values.integers import across, amounts, check_bound_can_move, shift

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
            remedy="only integers that are no indices are computed; set others with `update` or `evolve`",
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
