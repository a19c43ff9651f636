"""A step that waits for the device, or that runs deeper than declared."""

from typing import Any

from batchstate.mirror import MirroredTensor
from batchstate.runtime.staging import Staging
from batchstate.testing.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.STAGING_OVERRUN, machine="engine", origin="sglang #36661, TRT-LLM#18485")
def staging_never_reaped(patch: Patch) -> None:
    """What was staged for a copy is kept by the number of launches and not by the copy's own fence."""
    patch(Staging, "reap", lambda self: None)


@mutant(Code.HIDDEN_SYNC, machine="engine", origin="sglang #28480")
def max_asks_device(patch: Patch) -> None:
    """Planning asks the device for the longest request: `seq_lens.max().item()`."""
    patch(MirroredTensor, "max", lambda self: self.device.max().item())


@mutant(Code.HIDDEN_SYNC, machine="engine", origin="sglang #29420")
def filter_reads_list_of_device(patch: Patch) -> None:
    """`filter` lists the device's values to find out which rows stay: `seq_lens.tolist()`."""

    def taken(self: MirroredTensor, rows: Any, operation: str) -> MirroredTensor:
        self.device.tolist()
        result: MirroredTensor = original(self, rows, operation)
        return result

    original = patch(MirroredTensor, "_taken", taken)
