"""Staged writes of block tables, applied by one launch of a Triton kernel; `--forget` leaves two of them on one cell.

batchstate race run examples/plain_triton/staged_writes.py
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"

import sys

import torch
import triton
import triton.language as tl

FORGETS = "--forget" in sys.argv


@triton.jit
def apply_writes(table, width, rows, columns, blocks):  # type: ignore[no-untyped-def]
    """Program p applies write p."""
    write = tl.program_id(0)
    cell = tl.load(rows + write) * width + tl.load(columns + write)
    tl.store(table + cell, tl.load(blocks + write))


table = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
staged = [(1, 3, 7), (2, 0, 8), (1, 3, 9)]  # row, column, block: the first row was written twice in one step
if not FORGETS:
    staged = staged[1:]  # the later write counts
rows, columns, blocks = (torch.tensor(part, device="cuda") for part in zip(*staged, strict=True))
apply_writes[len(staged),](table, table.stride(0), rows, columns, blocks)
print(table.sum().item())
