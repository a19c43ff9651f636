"""The state machines, one a file, each over a model simple enough to be seen to be right."""

from batchstate.selfcheck.machines.batch import BatchMachine
from batchstate.selfcheck.machines.engine import EngineMachine
from batchstate.selfcheck.machines.failures import FailureMachine
from batchstate.selfcheck.machines.future_map import FutureMapMachine
from batchstate.selfcheck.machines.host_tier import HostTierMachine
from batchstate.selfcheck.machines.mirrored_tensor import MirroredTensorMachine
from batchstate.selfcheck.machines.overlap import OverlapMachine
from batchstate.selfcheck.machines.page_pool import PagePoolMachine
from batchstate.selfcheck.machines.plain_torch import (
    PlainTorchMachine,
    PlainTorchOnSimMachine,
    PlainTorchWatchedMachine,
)
from batchstate.selfcheck.machines.pools import HybridMachine, SlotPoolMachine
from batchstate.selfcheck.machines.prefix_cache import PrefixCacheMachine
from batchstate.selfcheck.machines.ranks import RanksMachine
from batchstate.selfcheck.machines.steps import StepMachine
from batchstate.selfcheck.machines.strangers import StrangersMachine
from batchstate.selfcheck.machines.transfers import TransfersMachine
from batchstate.selfcheck.machines.watched import WatchedMachine
from batchstate.testing.machine import Machine

__all__ = ["MACHINES"]

_ALL: tuple[type[Machine], ...] = (
    MirroredTensorMachine,
    BatchMachine,
    SlotPoolMachine,
    PagePoolMachine,
    PrefixCacheMachine,
    HybridMachine,
    EngineMachine,
    FutureMapMachine,
    StepMachine,
    OverlapMachine,
    HostTierMachine,
    TransfersMachine,
    StrangersMachine,
    FailureMachine,
    RanksMachine,
    WatchedMachine,
    PlainTorchMachine,
    PlainTorchOnSimMachine,
    PlainTorchWatchedMachine,
)

MACHINES: dict[str, type[Machine]] = {machine.NAME: machine for machine in _ALL}
"""Name -> machine."""
