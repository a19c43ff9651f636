"""The seam between the library and a device: streams, fences, staging, launches and counters.

Nothing else in the library names a stream, an event or pinned memory, so the same code runs on an accelerator, on a
plain CPU and on test devices. `open_runtime` chooses.
"""

from batchstate.runtime.accelerator import AcceleratorRuntime
from batchstate.runtime.base import Runtime, check_runtime
from batchstate.runtime.counters import Counters
from batchstate.runtime.cpu import CpuRuntime
from batchstate.runtime.dtypes import NUMPY_DTYPES, numpy_dtype, torch_dtype
from batchstate.runtime.fences import DoneFence, Fence, Stream, check_fence
from batchstate.runtime.fixed import FixedMemory
from batchstate.runtime.mapped import MappedMemory
from batchstate.runtime.opening import open_runtime
from batchstate.runtime.packed import PackedUpload
from batchstate.runtime.staging import Staging

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
    "check_runtime",
    "numpy_dtype",
    "open_runtime",
    "torch_dtype",
]
