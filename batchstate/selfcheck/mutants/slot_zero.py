"""Index 0 is padding, tables have a row for every index, and no placeholder is an index."""

import torch

from batchstate._allocator import FreeList, Ints
from batchstate.pools import SlotPool
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import Table
from batchstate.violations import Code


@mutant(Code.SLOT_ZERO_ALLOCATED, machine="slot_pool", origin="sglang #23635, sglang #24243")
def pool_counts_from_zero(patch: Patch) -> None:
    """The pool hands out 0, and every padded lane of a captured graph writes that request's state."""

    def initial(self: FreeList, first: int, last: int) -> Ints:
        indices: Ints = original(self, first, last)
        return indices - 1

    original = patch(FreeList, "_initial", initial)


@mutant(Code.SLOT_OUT_OF_RANGE, machine="slot_pool", origin="sglang #24439, sglang #36880")
def pool_counts_one_too_far(patch: Patch) -> None:
    """The pool takes its capacity for its size and hands out the row behind the last of every table."""

    def initial(self: FreeList, first: int, last: int) -> Ints:
        indices: Ints = original(self, first, last)
        return indices + 1

    original = patch(FreeList, "_initial", initial)


@mutant(Code.TABLE_CAPACITY, machine="slot_pool", origin="sglang #24439, sglang #32184")
def table_sized_by_size(patch: Patch) -> None:
    """A table has `size` rows, and the request in the last slot writes behind its end."""
    patch(SlotPool, "_table_rows", lambda self: self.size)


@mutant(Code.SLOT_ZERO_DIRTY, machine="slot_pool", origin="sglang #23635, vllm #57156")
def padded_lane_writes_row_zero(patch: Patch) -> None:
    """Padded lanes of a write store too, into row 0, where all later padded lanes read."""

    def scatter(self: Table, index: torch.Tensor, values: torch.Tensor) -> None:
        original(self, index, values)
        self._flat[:1].fill_(7)

    original = patch(Table, "_scatter", scatter)
