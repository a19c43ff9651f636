"""Two pinned buffers by turns: the host fills one while the copy of the other runs. `--forget` leaves its wait out.

batchstate race run examples/plain_torch/double_buffer.py
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch

FORGETS = "--forget" in sys.argv

ring = [(torch.zeros(4, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
outputs = []
for step in range(6):
    staged, copied = ring[step % 2]
    if not FORGETS:
        copied.synchronize()  # the copy of two steps before has read it
    staged.fill_(step)
    outputs.append(staged.to("cuda", non_blocking=True) * 2)
    copied.record()
print([output.sum().item() for output in outputs])
