"""The state machines, one a file, each over a model simple enough to be seen to be right."""

from batchstate.testing.machine import Machine
from batchstate.testing.machines.batch import BatchMachine
from batchstate.testing.machines.engine import EngineMachine
from batchstate.testing.machines.future_map import FutureMapMachine
from batchstate.testing.machines.host_tier import HostTierMachine
from batchstate.testing.machines.hybrid import HybridMachine
from batchstate.testing.machines.mirrored_tensor import MirroredTensorMachine
from batchstate.testing.machines.overlap import OverlapMachine
from batchstate.testing.machines.page_pool import PagePoolMachine
from batchstate.testing.machines.slot_pool import SlotPoolMachine
from batchstate.testing.machines.transfers import TransfersMachine

__all__ = ["MACHINES"]

_ALL: tuple[type[Machine], ...] = (
    MirroredTensorMachine,
    BatchMachine,
    SlotPoolMachine,
    PagePoolMachine,
    HybridMachine,
    EngineMachine,
    FutureMapMachine,
    OverlapMachine,
    HostTierMachine,
    TransfersMachine,
)

MACHINES: dict[str, type[Machine]] = {machine.NAME: machine for machine in _ALL}
"""Name -> machine."""
