"""A data loader that brings the next batch while the model works on this one. `--forget` leaves its waits out.

batchstate race run examples/plain_torch/prefetch.py
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from collections.abc import Iterator

import torch

FORGETS = "--forget" in sys.argv


def prefetched(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The batches on the device, each copied one step ahead on a stream of its own."""
    copies = torch.cuda.Stream()
    waiting: list[torch.Tensor] = []
    for host in [*batches, None]:
        if waiting:
            batch = waiting.pop()
            if not FORGETS:
                torch.cuda.current_stream().wait_stream(copies)
            batch.record_stream(torch.cuda.current_stream())
            yield batch
        if host is not None:
            with torch.cuda.stream(copies):
                waiting.append(host.pin_memory().to("cuda", non_blocking=True))


weights = torch.eye(4, device="cuda")
outputs = [batch @ weights for batch in prefetched([torch.full((2, 4), float(step)) for step in range(4)])]
print([output.sum().item() for output in outputs])
