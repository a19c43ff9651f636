"""Host memory that kernels of the device can address: what a host tier is made of."""

import ctypes
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import DeviceError


@final
@attrs.frozen(eq=False)
class MappedMemory:
    """Pinned host memory, seen from both sides. Both tensors are the SAME memory: this is no pair of twins.

    Attributes:
        host: the host's tensor; it keeps the memory alive.
        device: what kernels index: reads and writes cross the bus.
    """

    host: torch.Tensor
    device: torch.Tensor

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory, uint8[nbytes]. The host has to know by itself when it may look."""
        return bytes_of(self.host)


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous host tensor, uint8[nbytes], whatever its dtype. The tensor must stay alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()))


@final
class _Addressable:
    """Memory as `__cuda_array_interface__` describes it (version 3 of that protocol, by Numba)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept alive by whoever made a tensor of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "strides": None,
        }


def device_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned memory as a tensor of the device, without a copy.

    With unified addressing a pinned page has one address for host and device (CUDA C++ Programming Guide, "Mapped
    Memory" and "Unified Virtual Address Space").

    Raises:
        DeviceError: the device does not address it.
    """
    flat = torch.as_tensor(_Addressable(pinned), device=device)
    if flat.device != device or flat.data_ptr() != pinned.data_ptr():  # a copy would be another memory
        raise DeviceError(
            f"pinned memory is not addressable by {device}: torch made a copy of it on {flat.device}",
            value=str(device),
            remedy="use a device with unified addressing, and make it the current one before the pool is made",
        )
    return flat.view(pinned.dtype).view(pinned.shape)
