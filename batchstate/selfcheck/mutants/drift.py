"""Mutants of `drift.mutants` that need state."""

import weakref
from collections.abc import Mapping, Sequence

from batchstate._rows import HostRows
from batchstate._upload import BatchDevice, Extras
from batchstate.runtime import Runtime
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import TableWrite
from batchstate.violations import Code


@mutant(Code.MIRROR_EQUAL, machine="batch", origin="sglang #15132, sglang #15227")
def upload_takes_older_stack(patch: Patch) -> None:
    """The upload of a batch sends the columns of the batch before it, if that had as many rows."""
    before: weakref.WeakKeyDictionary[Runtime, HostRows] = weakref.WeakKeyDictionary()

    def upload(self: BatchDevice, writes: Sequence[TableWrite], extras: Mapping[str, object]) -> Extras:
        mine = self.state.host
        if not self.uploaded:
            older = before.get(self._runtime)
            if older is not None and [one.shape for one in older.groups] == [one.shape for one in mine.groups]:
                self.state.host = older
            before[self._runtime] = mine
        try:
            uploaded: Extras = original(self, writes, extras)
        finally:
            self.state.host = mine
        return uploaded

    original = patch(BatchDevice, "upload", upload)
