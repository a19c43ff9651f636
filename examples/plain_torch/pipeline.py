"""Two stages on two streams, without gradients: the second works on one microbatch while the first makes the next.

`--forget` leaves out that it waits for the first. batchstate race run examples/plain_torch/pipeline.py
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch

FORGETS = "--forget" in sys.argv

first, second = torch.cuda.Stream(), torch.cuda.Stream()
weights = torch.eye(4, device="cuda")
torch.cuda.synchronize()  # both stages read the weights
outputs = []
with torch.no_grad():
    for step in range(4):
        with torch.cuda.stream(first):
            hidden = weights @ torch.full((4, 4), float(step), device="cuda")
            made = first.record_event()
        if not FORGETS:
            second.wait_event(made)
        with torch.cuda.stream(second):
            outputs.append(hidden @ weights)
            hidden.record_stream(second)  # it is memory of the first stream
torch.cuda.synchronize()
print([output.sum().item() for output in outputs])
