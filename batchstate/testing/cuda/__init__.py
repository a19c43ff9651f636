"""Code that says `cuda`, on a machine without a GPU: it runs on the CPU, and the race detector watches it.

Begin with `cuda_on_cpu`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.testing.cuda._kernels import declared_kernel as declared_kernel
    from batchstate.testing.cuda.runtime import CudaRuntime as CudaRuntime
    from batchstate.testing.cuda.runtime import CudaSimRuntime as CudaSimRuntime
    from batchstate.testing.cuda.runtime import cuda_on_cpu as cuda_on_cpu
    from batchstate.testing.cuda.watching import WatchedCuda as WatchedCuda
    from batchstate.testing.cuda.watching import watch_cuda as watch_cuda
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "_kernels": "declared_kernel",
            "runtime": "CudaRuntime CudaSimRuntime cuda_on_cpu",
            "watching": "WatchedCuda watch_cuda",
        },
    )
