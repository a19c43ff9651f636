"""The seam between the library and a device: streams, fences, staging, launches and counters.

Nothing else in the library names a stream, an event or pinned memory, so the same code runs on an accelerator, on a
plain CPU and on test devices. `open_runtime` opens the runtime of a device.
"""

from batchstate.runtime.base import Counters, DoneFence, Runtime, check_fence
from batchstate.runtime.devices import AcceleratorRuntime, CpuRuntime, open_runtime
from batchstate.runtime.memory import (
    NUMPY_DTYPES,
    FixedMemory,
    MappedMemory,
    PackedUpload,
    Staging,
    dtype_meant,
    host_dtype,
    numpy_dtype,
    torch_dtype,
)
from batchstate.runtime.streams import Fence, Stream

__all__ = [
    "NUMPY_DTYPES",
    "AcceleratorRuntime",
    "Counters",
    "CpuRuntime",
    "DoneFence",
    "Fence",
    "FixedMemory",
    "MappedMemory",
    "PackedUpload",
    "Runtime",
    "Staging",
    "Stream",
    "check_fence",
    "dtype_meant",
    "host_dtype",
    "numpy_dtype",
    "open_runtime",
    "torch_dtype",
]
