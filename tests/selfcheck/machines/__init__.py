"""The state machines, one a file, each over a model simple enough to be seen to be right."""

from tests.selfcheck.machine import Machine
from tests.selfcheck.machines.batch import BatchMachine
from tests.selfcheck.machines.engine import EngineMachine
from tests.selfcheck.machines.failures import FailureMachine
from tests.selfcheck.machines.future_map import FutureMapMachine
from tests.selfcheck.machines.host_tier import HostTierMachine
from tests.selfcheck.machines.mirrored_tensor import MirroredTensorMachine
from tests.selfcheck.machines.overlap import OverlapMachine
from tests.selfcheck.machines.page_pool import PagePoolMachine
from tests.selfcheck.machines.plain_torch import PlainTorchMachine, PlainTorchOnSimMachine, PlainTorchWatchedMachine
from tests.selfcheck.machines.pools import HybridMachine, SlotPoolMachine
from tests.selfcheck.machines.prefix_cache import PrefixCacheMachine
from tests.selfcheck.machines.ranks import RanksMachine
from tests.selfcheck.machines.speculation import SpeculationMachine
from tests.selfcheck.machines.steps import StepMachine
from tests.selfcheck.machines.strangers import StrangersMachine
from tests.selfcheck.machines.transfers import TransfersMachine
from tests.selfcheck.machines.watched import WatchedMachine
from tests.selfcheck.machines.watched_rows import WatchedRowsMachine

MACHINES: dict[str, type[Machine]] = {
    machine.NAME: machine
    for machine in (
        MirroredTensorMachine,
        BatchMachine,
        SlotPoolMachine,
        PagePoolMachine,
        PrefixCacheMachine,
        HybridMachine,
        EngineMachine,
        FutureMapMachine,
        StepMachine,
        SpeculationMachine,
        OverlapMachine,
        HostTierMachine,
        TransfersMachine,
        StrangersMachine,
        FailureMachine,
        RanksMachine,
        WatchedMachine,
        WatchedRowsMachine,
        PlainTorchMachine,
        PlainTorchOnSimMachine,
        PlainTorchWatchedMachine,
    )
}
"""Name -> machine."""
