"""What torch refuses on an accelerator, refused where host and device tensors look alike."""

import torch

from batchstate.errors import DeviceError


def mixed_operands(operation: str, host: torch.Tensor) -> DeviceError:
    """The error of an operation of device tensors that is given a host tensor with dimensions."""
    return DeviceError(
        f"{operation} of device tensors and a host tensor {tuple(host.shape)}",
        value=tuple(host.shape),
        remedy="bring it to the device first, with `Runtime.upload`; on an accelerator torch refuses too",
    )


def array_of_device(call: str, tensor: torch.Tensor) -> DeviceError:
    """The error of a call that would give numpy the memory of a device tensor."""
    return DeviceError(
        f"{call} of a device tensor {tuple(tensor.shape)}",
        value=tuple(tensor.shape),
        remedy="use `Runtime.download` or `.cpu()`; on an accelerator torch refuses too",
    )
