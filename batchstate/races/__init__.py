"""Races between streams: found on any machine, and turned into wrong results on a simulated device.

Begin with `cuda_on_cpu` for plain torch code (on a GPU `watch_cuda`), and with `RaceRuntime` for code on a runtime. A
report can be read, kept and drawn without torch, which the rest needs: names are imported when they are first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.races.cuda import CudaRuntime as CudaRuntime
    from batchstate.races.cuda import CudaSimRuntime as CudaSimRuntime
    from batchstate.races.cuda import WatchedCuda as WatchedCuda
    from batchstate.races.cuda import cuda_on_cpu as cuda_on_cpu
    from batchstate.races.cuda import declared_kernel as declared_kernel
    from batchstate.races.cuda import watch_cuda as watch_cuda
    from batchstate.races.detector import Race as Race
    from batchstate.races.devices import open_device as open_device
    from batchstate.races.devices import window_of as window_of
    from batchstate.races.report import Access as Access
    from batchstate.races.report import Event as Event
    from batchstate.races.report import EventKind as EventKind
    from batchstate.races.report import RaceKind as RaceKind
    from batchstate.races.report import RaceReport as RaceReport
    from batchstate.races.runtime import RaceFence as RaceFence
    from batchstate.races.runtime import RaceRuntime as RaceRuntime
    from batchstate.races.sim import DeviceFault as DeviceFault
    from batchstate.races.sim import SimRuntime as SimRuntime
    from batchstate.races.tracing.dispatch import raw_kernel as raw_kernel
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "cuda": "CudaRuntime CudaSimRuntime WatchedCuda cuda_on_cpu declared_kernel watch_cuda",
            "detector": "Race",
            "devices": "open_device window_of",
            "report": "Access Event EventKind RaceKind RaceReport",
            "runtime": "RaceFence RaceRuntime",
            "sim": "DeviceFault SimRuntime",
            "tracing.dispatch": "raw_kernel",
        },
    )
