"""What is given to a relay, checked before anything is launched."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import DeviceError, DtypeError, ShapeError
from batchstate.mirror import MirroredTensor
from batchstate.relaying.fields import RelayField
from batchstate.runtime import Runtime, numpy_dtype
from batchstate.values.host_arrays import converted

Array = npt.NDArray[Any]


def device_values(
    value: object, field: RelayField, num_rows: tuple[int, int], runtime: Runtime, what: str
) -> torch.Tensor:
    """The live rows of a device tensor for `field`.

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
        tensor = value.device
    elif isinstance(value, torch.Tensor):
        tensor = value
    else:
        raise DtypeError(
            f"{what}: {type(value).__name__} is no device tensor",
            value=value,
            remedy="pass what the forward made; host values go in by `seed`",
        )
    if tensor.dtype != field.dtype:
        raise DtypeError(
            f"{what}: {tensor.dtype} for {field.dtype}", value=tensor.dtype, remedy="convert it in the forward"
        )
    if tensor.device != runtime.device:
        raise DeviceError(
            f"{what}: a tensor on {tensor.device}, runtime on {runtime.device}",
            value=str(tensor.device),
            remedy="pass a tensor of the runtime's device; host values go in by `seed`",
        )
    live, with_padding = num_rows
    if tuple(tensor.shape[1:]) != field.shape or tensor.ndim == 0 or tensor.shape[0] not in num_rows:
        rows = str(live) if live == with_padding else f"{live} or {with_padding}"
        raise ShapeError(
            f"{what}: {list(tensor.shape)} for {rows} rows of {list(field.shape)}",
            value=tuple(tensor.shape),
            remedy="pass one entry a request, in the order of the slots",
        )
    return tensor[:live] if tensor.shape[0] != live else tensor


def host_values(value: object, field: RelayField, num_rows: int, what: str) -> Array:
    """Host values [num_rows, *shape] for `field`, in an array of their own.

    Raises:
        DtypeError, ShapeError, ValueOverflowError: they do not go into the field, or numpy lacks its dtype.
    """
    given = value.exact_numbers(what) if isinstance(value, MirroredTensor) else value
    array: Array = converted(given, numpy_dtype(field.dtype), what)
    if array.size == 0:
        array = np.empty((num_rows, *field.shape), array.dtype) if num_rows == 0 else array
    if array.shape != (num_rows, *field.shape):
        raise ShapeError(
            f"{what}: {list(array.shape)} for {num_rows} rows of {list(field.shape)}",
            value=array.shape,
            remedy="pass one entry a request, in the order of the slots",
        )
    return array
