"""What is given to a relay, or named of it, checked before anything is launched."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import DeclarationError, DeviceError, DtypeError, ShapeError
from batchstate.mirror import MirroredTensor
from batchstate.relaying.fields import RelayField
from batchstate.runtime import Runtime, numpy_dtype
from batchstate.values.host_arrays import converted

Array = npt.NDArray[Any]


def check_device_values(
    value: object, field: RelayField, num_rows: tuple[int, int], runtime: Runtime, what: str
) -> None:
    """Refuses what cannot be published into `field`. The device is not touched: a mirrored value may have none yet.

    Args:
        value: tensor or mirrored value, of as many rows as are live, or of all with the padded ones at the end.
        field: the declaration.
        num_rows: live rows, and all rows.
        runtime: the device.
        what: the operation, for messages.

    Raises:
        DtypeError, ShapeError, DeviceError: it does not go into the field.
    """
    if isinstance(value, MirroredTensor):
        if value.runtime is not runtime:
            raise DeviceError(f"{what}: {value!r} has another runtime", value=value, remedy="use one runtime")
        _ = value.device_side  # refuses one that is knowingly old
    elif not isinstance(value, torch.Tensor):
        raise DtypeError(
            f"{what}: {type(value).__name__} is no device tensor",
            value=value,
            remedy="pass what the forward made; host values go in by `seed`",
        )
    elif value.device != runtime.device:
        raise DeviceError(
            f"{what}: a tensor on {value.device}, runtime on {runtime.device}",
            value=str(value.device),
            remedy="pass a tensor of the runtime's device; host values go in by `seed`",
        )
    elif value.layout is not torch.strided:
        raise DtypeError(
            f"{what}: a tensor of layout {value.layout}", value=str(value.layout), remedy="pass a dense tensor"
        )
    if value.dtype != field.dtype:
        raise DtypeError(
            f"{what}: {value.dtype} for {field.dtype}", value=value.dtype, remedy="convert it in the forward"
        )
    _check_shape(tuple(value.shape), field, num_rows, what)


def live_rows(value: torch.Tensor | MirroredTensor, live: int) -> torch.Tensor:
    """The first `live` rows of a checked value, safe on the current stream."""
    tensor = value.device if isinstance(value, MirroredTensor) else value
    if tensor.requires_grad:
        tensor = tensor.detach()  # else the relay would keep the graph behind each value, for ever
    return tensor[:live] if tensor.shape[0] != live else tensor


def _check_shape(shape: tuple[int, ...], field: RelayField, num_rows: tuple[int, int], what: str) -> None:
    live, with_padding = num_rows
    if not shape or shape[1:] != field.shape or shape[0] not in num_rows:
        rows = str(live) if live == with_padding else f"{live} or {with_padding}"
        raise ShapeError(
            f"{what}: {list(shape)} for {rows} rows of {list(field.shape)}",
            value=shape,
            remedy="pass one entry a request, in the order of the slots",
        )


def host_values(value: object, field: RelayField, num_rows: tuple[int, int], what: str) -> Array:
    """The live rows of host values for `field`, in an array of their own.

    Arguments as for `check_device_values`.

    Raises:
        DtypeError, ShapeError, ValueOverflowError: they do not go into the field, or numpy lacks its dtype.
    """
    given = value.exact_numbers(what) if isinstance(value, MirroredTensor) else value
    array: Array = converted(given, numpy_dtype(field.dtype), what)
    if array.shape == (0,) and num_rows[0] == 0:
        array = np.empty((0, *field.shape), array.dtype)  # an empty list knows no shape of a row
    _check_shape(array.shape, field, num_rows, what)
    return array[: num_rows[0]]


def id_width(name: str, field: RelayField, what: str) -> int:
    """Ids that an entry of a field holds, for fields that feed a forward.

    Raises:
        DtypeError, DeclarationError: entries that are no ids.
    """
    if field.dtype != torch.int64:
        raise DtypeError(
            f"{what}: ids from field {name!r} of {field.dtype}",
            value=field.dtype,
            remedy="declare it torch.int64: the ids of a forward are",
        )
    if len(field.shape) > 1:
        raise DeclarationError(
            f"{what}: ids from field {name!r} of {list(field.shape)}",
            value=field.shape,
            remedy="ids of a request are one number, or one row of them",
        )
    return field.shape[0] if field.shape else 1


def check_lengths(name: str, field: RelayField, what: str) -> None:
    """Refuses a field whose entries are no lengths.

    Raises:
        DtypeError, DeclarationError: see there.
    """
    if field.shape:
        raise DeclarationError(
            f"{what}: lengths from field {name!r} of {list(field.shape)}",
            value=field.shape,
            remedy="the length of a request is one number",
        )
    if field.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"{what}: lengths from field {name!r} of {field.dtype}",
            value=field.dtype,
            remedy="declare it torch.int64 or torch.int32",
        )
