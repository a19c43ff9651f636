"""Mutants of `drift.mutants` that need state, and one for each operation that compares both sides at `full`."""

import weakref
from collections.abc import Mapping, Sequence

from batchstate._arrays import Array
from batchstate._upload import BatchDevice, Extras
from batchstate.runtime import Runtime
from batchstate.selfcheck.machines import batch as batches
from batchstate.selfcheck.machines import mirrored_tensor as values
from batchstate.selfcheck.machines import steps
from batchstate.selfcheck.mutants.diffs import Change, Diff
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import TableWrite
from batchstate.violations import Code


def _overrules_a_write(machine: str, operation: str, where: str, condition: str) -> None:
    """Registers the mutant in which one operation compares nothing."""
    change = Change(where, ((condition, f"{condition} and operation != {operation!r}"),))

    def switch(patch: Patch) -> None:
        Diff((change,))(patch)

    name = {"+ n": "add", "- n": "subtract"}.get(operation, operation)
    of = {"steps": "step"}.get(machine, machine)
    switch.__name__ = f"{name}_of_a_{of}_overrules_a_write"
    switch.__doc__ = f"A kernel wrote one side of a {of}, and `{operation}` replaces it by the other without a word."
    codes = Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL, Code.MIRROR_BOUND
    mutant(*codes, machine=machine, origin="sglang #8056, vllm #50432")(switch)


for _operation in sorted(dict(batches.OPERATIONS).keys() - {"update_device", "tighten"}):  # these replace nothing there
    _overrules_a_write("batch", _operation, "batch:Batch._check_unwritten", "if levels.full")
for _operation in dict(steps.OPERATIONS):
    _overrules_a_write("steps", _operation, "batch:Batch._check_unwritten", "if levels.full")
for _operation in dict(values.OPERATIONS):
    _overrules_a_write("mirrored_tensor", _operation, "mirror:MirroredTensor.check", "if levels.full")


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="sglang #15132, sglang #15227")
def upload_takes_older_stack(patch: Patch) -> None:
    """The upload of a batch sends the columns of the batch before it, if that had as many rows."""
    before: weakref.WeakKeyDictionary[Runtime, Sequence[Array]] = weakref.WeakKeyDictionary()

    def upload(self: BatchDevice, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        mine = self.state.groups
        if not self.uploaded:
            older = before.get(self._runtime)
            if older is not None and [one.shape for one in older] == [one.shape for one in mine]:
                self.state.groups = older
            before[self._runtime] = mine
        try:
            uploaded: Extras = original(self, writes, extras)
        finally:
            self.state.groups = mine
        return uploaded

    original = patch(BatchDevice, "upload", upload)
