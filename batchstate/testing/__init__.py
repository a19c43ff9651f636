"""For tests of engines: state machines, fences completed by hand, and guards.

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
    from batchstate.testing.pools import InjectedError as InjectedError
    from batchstate.testing.pools import PoolSpec as PoolSpec
    from batchstate.testing.pools import fuzz_pool as fuzz_pool
    from batchstate.testing.pools import pool_machine as pool_machine
    from batchstate.testing.runner import MachineResult as MachineResult
    from batchstate.testing.runner import run_machine as run_machine
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
            "machine": "DisagreementError Machine",
            "pools": "InjectedError PoolSpec fuzz_pool pool_machine",
            "runner": "MachineResult run_machine",
            "sync_guard": "no_hidden_sync",
            "twins": "Twin TwinSlots TwinSpec fuzz_twins twin_machine",
        },
        needs="hypothesis",
        extra="testing",
    )
