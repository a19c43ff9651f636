"""For tests of engines: strategies, state machines, fences completed by hand, and guards. Needs the extra `testing`.

Begin with `twin_machine` to fuzz a batch class of your own, with `no_hidden_sync` to guard a step loop, and with
`ManualFence` where a test has to say when a step ends.
"""

from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.fuzz import MACHINES, FuzzReport, MachineResult, fuzz, run_machine
from batchstate.testing.ledger_model import LedgerModel
from batchstate.testing.machine import DisagreementError, Machine
from batchstate.testing.misuse import Misuse
from batchstate.testing.modelled import Modelled
from batchstate.testing.reach import Reach
from batchstate.testing.session import OpenRuntime, Session, session
from batchstate.testing.strategies import (
    amounts,
    column_values,
    contracts,
    dtypes,
    keep_lists,
    mirrored_tensors,
    row_lists,
    row_shapes,
    split_sizes,
)
from batchstate.testing.sync_guard import no_hidden_sync
from batchstate.testing.twins import Twin, TwinSpec, fuzz_twins, twin_machine

__all__ = [
    "MACHINES",
    "DisagreementError",
    "FuzzReport",
    "LedgerModel",
    "Machine",
    "MachineResult",
    "ManualFence",
    "ManualStream",
    "Misuse",
    "Modelled",
    "OpenRuntime",
    "Reach",
    "Session",
    "Twin",
    "TwinSpec",
    "amounts",
    "column_values",
    "contracts",
    "dtypes",
    "fuzz",
    "fuzz_twins",
    "keep_lists",
    "mirrored_tensors",
    "no_hidden_sync",
    "row_lists",
    "row_shapes",
    "run_machine",
    "session",
    "split_sizes",
    "twin_machine",
]
