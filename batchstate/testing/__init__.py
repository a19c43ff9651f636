"""For tests of engines: strategies, state machines, fences completed by hand, and guards.

Begin with `twin_machine` to fuzz a batch class of your own and `pool_machine` to fuzz a pool, with `no_hidden_sync` to
guard a step loop, and with `ManualFence` where a test has to say when a step ends, or with `LateRuntime` where it has
to say so of every fence. Fences and the guard need nothing else; all other names need hypothesis (extra `testing`) and
are imported when first used. `batchstate.races` finds races between streams.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.testing.fences import LateRuntime as LateRuntime
    from batchstate.testing.fences import ManualFence as ManualFence
    from batchstate.testing.fences import ManualStream as ManualStream
    from batchstate.testing.machine import DisagreementError as DisagreementError
    from batchstate.testing.machine import Machine as Machine
    from batchstate.testing.machine import MachineSession as MachineSession
    from batchstate.testing.machine import Misuse as Misuse
    from batchstate.testing.machine import OpenRuntime as OpenRuntime
    from batchstate.testing.machine import session as session
    from batchstate.testing.models import AllocatorModel as AllocatorModel
    from batchstate.testing.models import Modelled as Modelled
    from batchstate.testing.pools import InjectedError as InjectedError
    from batchstate.testing.pools import PoolSpec as PoolSpec
    from batchstate.testing.pools import fuzz_pool as fuzz_pool
    from batchstate.testing.pools import pool_machine as pool_machine
    from batchstate.testing.runner import MachineResult as MachineResult
    from batchstate.testing.runner import run_machine as run_machine
    from batchstate.testing.strategies import amounts as amounts
    from batchstate.testing.strategies import column_values as column_values
    from batchstate.testing.strategies import contracts as contracts
    from batchstate.testing.strategies import dtypes as dtypes
    from batchstate.testing.strategies import keep_lists as keep_lists
    from batchstate.testing.strategies import mirrored_tensors as mirrored_tensors
    from batchstate.testing.strategies import row_lists as row_lists
    from batchstate.testing.strategies import row_shapes as row_shapes
    from batchstate.testing.strategies import split_sizes as split_sizes
    from batchstate.testing.sync_guard import no_hidden_sync as no_hidden_sync
    from batchstate.testing.twins import Twin as Twin
    from batchstate.testing.twins import TwinSlots as TwinSlots
    from batchstate.testing.twins import TwinSpec as TwinSpec
    from batchstate.testing.twins import fuzz_twins as fuzz_twins
    from batchstate.testing.twins import twin_machine as twin_machine
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "fences": "LateRuntime ManualFence ManualStream",
            "machine": "DisagreementError Machine Misuse OpenRuntime MachineSession session",
            "models": "AllocatorModel Modelled",
            "pools": "InjectedError PoolSpec fuzz_pool pool_machine",
            "runner": "MachineResult run_machine",
            "strategies": "amounts column_values contracts dtypes keep_lists mirrored_tensors"
            " row_lists row_shapes split_sizes",
            "sync_guard": "no_hidden_sync",
            "twins": "Twin TwinSlots TwinSpec fuzz_twins twin_machine",
        },
        needs="hypothesis",
        extra="testing",
    )
