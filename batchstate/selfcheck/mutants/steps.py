"""A step that waits for the device, or that runs deeper than declared."""

from typing import Any

from batchstate.mirror import MirroredTensor
from batchstate.runtime.memory import Staging
from batchstate.selfcheck.machines.engine import Running, Scheduler
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.STAGING_OVERRUN, machine="engine", origin="sglang #36661, TRT-LLM#18485")
def staging_never_reaped(patch: Patch) -> None:
    """What was staged for a copy is kept by the number of launches and not by the copy's own fence."""
    patch(Staging, "reap", lambda self: None)


@mutant(Code.HIDDEN_SYNC, machine="engine", origin="sglang #28480")
def planning_asks_device_for_longest(patch: Patch) -> None:
    """Planning asks the device for the longest of the running requests: `seq_lens.max().item()`."""

    def lacking(self: Scheduler) -> int:
        if self.launched is not None:
            self.launched.seq_lens.device.max().item()
        pages: int = original(self)
        return pages

    original = patch(Scheduler, "_lacking", lacking)


@mutant(Code.HIDDEN_SYNC, machine="engine", origin="sglang #27689, sglang #26425")
def drafts_copied_to_host(patch: Patch) -> None:
    """The step after the drafts were verified is planned with lengths that come back by `.cpu()`."""

    def forward(self: Scheduler, batch: Running) -> None:
        original(self, batch)
        self.batch.bound_lens.device.cpu()

    original = patch(Scheduler, "_forward", forward)


@mutant(Code.HIDDEN_SYNC, machine="mirrored_tensor", origin="sglang #29420")
def filter_lists_device(patch: Patch) -> None:
    """`filter` lists the device's values to find out which rows stay: `seq_lens.tolist()`."""

    def taken(self: MirroredTensor, rows: Any, operation: str) -> MirroredTensor:
        self._device.tensor(self.runtime).tolist()
        result: MirroredTensor = original(self, rows, operation)
        return result

    original = patch(MirroredTensor, "_taken", taken)
