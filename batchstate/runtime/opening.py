"""From the name of a device to its runtime."""

import torch

from batchstate.errors import ArgumentError
from batchstate.runtime.accelerator import AcceleratorRuntime
from batchstate.runtime.base import Runtime
from batchstate.runtime.cpu import CpuRuntime


def open_runtime(device: str | torch.device = "cpu", *, steps_in_flight: int = 2) -> Runtime:
    """The runtime of a device.

    Args:
        device: `"cpu"`, or an accelerator that torch was built for (`"cuda"`, `"cuda:1"`, ...).
        steps_in_flight: see `Runtime`.

    Raises:
        ArgumentError: torch does not know the device, or it is not available here.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"unknown device {device!r}", value=device, remedy="use 'cpu' or 'cuda'") from None
    if wanted.type == "cpu":
        return CpuRuntime(steps_in_flight=steps_in_flight)
    return AcceleratorRuntime(wanted, steps_in_flight=steps_in_flight)
