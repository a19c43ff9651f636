"""Code that says `cuda`, on a machine without a GPU: it runs on the CPU, and the race detector watches it.

Begin with `cuda_on_cpu`.
"""

from batchstate.races.cuda.runtime import CudaRuntime, CudaSimRuntime, cuda_on_cpu, declared_kernel
from batchstate.races.cuda.watching import WatchedCuda, watch_cuda

__all__ = ["CudaRuntime", "CudaSimRuntime", "WatchedCuda", "cuda_on_cpu", "declared_kernel", "watch_cuda"]
