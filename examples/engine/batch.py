"""The running requests, and what one launched step leaves to be read later."""

import attrs
import torch

from batchstate import Batch, ForwardPlan, host_list, mirrored, slot_column
from batchstate.batch import Extras
from batchstate.future_map import Prefetched
from batchstate.runtime import Fence
from examples.engine.request import Request


class RunningBatch(Batch):
    """One row a request."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")  # tokens in KV memory after the last launched step
    fill_lens = mirrored(torch.int64)  # of these, tokens whose ids the host knows: they are put in before it decodes
    kv_limits = mirrored(torch.int64)  # tokens in KV memory when the answer has its full length
    requests = host_list(Request)


@attrs.define(eq=False)
class Step:
    """One step on its way through the engine.

    Attributes:
        batch: the running requests, with the lengths that they have after the step.
        plan: the forward's inputs as the host knows them.
        uploaded: what crossed with the batch.
        sampling: the requests that get tokens.
        results: their tokens (and true lengths), on their way to the host.
        forward_done: behind all of the step.
    """

    batch: RunningBatch
    plan: ForwardPlan
    uploaded: Extras
    sampling: list[Request]
    results: Prefetched | None = None
    forward_done: Fence | None = None

    def await_end(self) -> None:
        """Waits for the forward, if it has not ended."""
        if self.forward_done is not None and not self.forward_done.query():
            self.forward_done.wait()
