"""A simulated device: streams that run late, on real memory, in any order that a device may have.

It turns races into wrong tokens, on any machine. The race detector says where a race is; this says that it matters.
"""

from batchstate.races.sim.device import DeviceFault, DeviceStream, Scheduler, SimFence
from batchstate.races.sim.runtime import SimRuntime
from batchstate.races.sim.schedulers import PORTFOLIO
from batchstate.races.tracing.dispatch import raw_kernel

__all__ = ["PORTFOLIO", "DeviceFault", "DeviceStream", "Scheduler", "SimFence", "SimRuntime", "raw_kernel"]
