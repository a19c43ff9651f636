"""The running requests, and what one launched step leaves to be read later."""

from typing import cast

import attrs
import torch

from batchstate import Batch, ForwardPlan, host_list, mirrored, slot_column
from batchstate.future_map import Prefetched
from batchstate.runtime import Fence
from batchstate.step import PlannedStep
from examples.engine.request import Request


class RunningBatch(Batch):
    """One row a request."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")  # tokens in KV memory after the last launched step
    requests = host_list(Request)


@attrs.define(eq=False)
class Step:
    """One step on its way through the engine.

    Attributes:
        planned: what was planned and uploaded; its batch has the lengths after the step.
        sampling: the requests that get tokens.
        results: their tokens (and true lengths), on their way to the host.
        forward_done: behind all of the step.
    """

    planned: PlannedStep
    sampling: list[Request]
    results: Prefetched | None = None
    forward_done: Fence | None = None

    @property
    def batch(self) -> RunningBatch:
        """The running requests, with the lengths that they have after the step."""
        return cast(RunningBatch, self.planned.batch)

    @property
    def plan(self) -> ForwardPlan:
        """The forward's inputs as the host knows them."""
        return self.planned.plan

    def await_end(self) -> None:
        """Waits for the forward, if it has not ended."""
        if self.forward_done is not None and not self.forward_done.query():
            self.forward_done.wait()
