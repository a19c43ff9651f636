"""KV blocks go to the host on a side stream, and come back when they are needed. `--forget` leaves a wait out.

batchstate race run examples/plain_torch/kv_offload.py
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch

FORGETS = "--forget" in sys.argv

cache = torch.zeros(8, 4, device="cuda")
tier = torch.zeros(8, 4, pin_memory=True)
offload = torch.cuda.Stream()
default = torch.cuda.current_stream()

for block in range(4):
    cache[block] = float(block + 1)
    offload.wait_stream(default)  # the block was written
    with torch.cuda.stream(offload):
        tier[block].copy_(cache[block], non_blocking=True)
    if not FORGETS:
        default.wait_stream(offload)  # it was read: its place may be given away
    cache[block] = -1.0

with torch.cuda.stream(offload):
    for block in range(4):
        cache[block + 4].copy_(tier[block], non_blocking=True)
default.wait_stream(offload)
print(cache[4:].sum(1).tolist())
