"""A simulated device: streams that run late, on real memory, in any order that a device may have.

It turns races into wrong tokens, on any machine. The race detector says where a race is; this shows that it matters.
"""

from batchstate.races.sim.device import DeviceFault
from batchstate.races.sim.runtime import SimRuntime
from batchstate.races.sim.schedulers import LATE, PORTFOLIO

__all__ = ["LATE", "PORTFOLIO", "DeviceFault", "SimRuntime"]
