"""A slot changes hands while a forward still uses it, or while an old handle is still good for it."""

from batchstate._allocator import Ints
from batchstate._rows import GENERATION_SUFFIX, RowState
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.violations import Code


@mutant(Code.SLOT_STALE_HANDLE, machine="engine", origin="sglang #18647, sglang #26941")
def generations_not_filtered(patch: Patch) -> None:
    """`filter` moves the slots and forgets their generations: the rows hold handles of others."""

    def taken(self: RowState, rows: Ints) -> RowState:
        result: RowState = original(self, rows)
        for name in self.layout.places:
            if name.endswith(GENERATION_SUFFIX):
                result.column(name)[...] = self.column(name)[: rows.size]
        return result

    original = patch(RowState, "taken", taken)
