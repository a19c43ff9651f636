"""What an engine's own tensor must be to become a table."""

import torch

from batchstate.errors import ArgumentError, DeviceError, ShapeError


def check_adoptable(tensor: torch.Tensor, device: torch.device, name: str) -> None:
    """Refuses what kernels could not use as a table of a pool on `device`.

    Raises:
        ArgumentError: no tensor.
        DeviceError, ShapeError: on another device; not contiguous, or without rows.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{name}: adopt of {type(tensor).__name__}", value=tensor, remedy="pass a tensor of the device"
        )
    if tensor.device != device:
        raise DeviceError(
            f"{name}: a tensor on {tensor.device}, pool on {device}",
            value=str(tensor.device),
            remedy="adopt a tensor of the pool's device",
        )
    if tensor.ndim == 0 or not tensor.is_contiguous():
        raise ShapeError(
            f"{name}: {list(tensor.shape)} with strides {list(tensor.stride())}",
            value=tuple(tensor.shape),
            remedy="adopt a contiguous tensor with one row a slot",
        )
