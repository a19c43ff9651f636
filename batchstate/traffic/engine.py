"""The engine's side of the library: a continuous-batching loop in which only the model is missing.

One step, in the order in which it happens::

    leave     rows whose answer is complete, or whose client hung up, leave; their slot and pages are freed behind
              the fence of the last step, which may still read them
    retract   when the next tokens do not fit into the pages, the youngest rows give theirs back and wait again
    admit     waiting requests join while slots, pages and this step's tokens last
    extend    each row gets page space for the tokens it computes now: one to decode, a chunk to prefill
    upload    every column, the table writes and the step's own inputs cross in one copy
    forward   (the model would run here) and a fence is recorded behind it

Leave, retract and admit are ordinary operations of an immutable batch, on the host. The device hears of all of them
in the one upload, and only of the result.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import PoolExhaustedError
from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.traffic.columns import RunningBatch, joining_batch
from batchstate.traffic.planning import StepPlan, pages_for, plan_step, rows_that_fit
from batchstate.traffic.requests import Request
from batchstate.traffic.settings import EngineSettings

T = TypeVar("T")


@final
@attrs.frozen
class StepResult:
    """What one step did.

    Attributes:
        running: requests in the batch.
        computed: tokens whose KV was computed.
        generated: tokens that came out, one a row at most.
    """

    running: int
    computed: int
    generated: int


@final
class Engine:
    """Runs requests through a batch, a slot pool and a page pool. Belongs to the runtime's thread.

    Args:
        runtime: the device.
        settings: sizes.
        max_tokens_per_request: longest prompt with its answer that will be added.

    Attributes:
        batch: the running requests.
        waiting: the others, first come first served; a retracted request goes to the front.
        finished, aborted, retractions: running totals.
    """

    def __init__(self, runtime: Runtime, settings: EngineSettings, *, max_tokens_per_request: int) -> None:
        self.runtime = runtime
        self.settings = settings
        self.slots = SlotPool(runtime, settings.max_running)
        self.req_to_token = self.slots.table("req_to_token", (max_tokens_per_request,), torch.int32, holds="token")
        self.pages = PagePool(
            runtime,
            self.slots,
            settings.num_pages,
            settings.page_size,
            max_tokens_per_request=max_tokens_per_request,
            token_table=self.req_to_token,
        )
        self.batch = RunningBatch.empty(runtime)
        self.waiting: deque[Request] = deque()
        self.finished = 0
        self.aborted = 0
        self.retractions = 0
        self._hung_up: set[Request] = set()
        self._in_flight: deque[Fence] = deque()

    @property
    def busy(self) -> bool:
        """Whether any request is here: waiting, running, or complete and about to leave."""
        return len(self.batch) > 0 or len(self.waiting) > 0

    def add(self, requests: Sequence[Request]) -> None:
        """Requests arrive."""
        self.waiting.extend(requests)

    def abort(self, request: Request) -> None:
        """The client of a request hung up. One that runs leaves with the next step; one that is done is let be."""
        if request.done:
            return
        if request in self.waiting:
            self.waiting.remove(request)
            request.done = True
            self.aborted += 1
        else:
            self._hung_up.add(request)

    def step(self) -> StepResult | None:
        """Plans and launches one step; None when no request is left to run."""
        self._leave()
        if not self.busy:
            return None
        plan = self._plan()
        fit = self._rows_that_fit(plan)
        if fit == len(self.batch):
            joined = self._admit(plan)
            return self._launch(self._plan() if joined else plan)
        while fit < len(self.batch):
            self._retract(fit)
            plan = self._plan()  # the rows left share the tokens of the step anew
            fit = self._rows_that_fit(plan)
        return self._launch(plan)

    def _leave(self) -> None:
        batch = self.batch
        leaves = batch.num_generated.np == batch.max_new_tokens.np
        if self._hung_up:
            leaves |= np.fromiter((request in self._hung_up for request in batch.requests), np.bool_, len(batch))
        if leaves.any():
            for request in self._give_back(leaves):
                request.done = True
                complete = request.num_generated == request.answer_tokens
                self.finished += complete
                self.aborted += not complete
            self._hung_up.clear()

    def _plan(self) -> StepPlan:
        return plan_step(
            self.batch.seq_lens.np,
            self.batch.prefill_lens.np,
            budget=self.settings.max_tokens_per_step,
            page_size=self.settings.page_size,
        )

    def _rows_that_fit(self, plan: StepPlan) -> int:
        return rows_that_fit(plan.new_pages, plan.owned_pages, self._pages_available)

    @property
    def _pages_available(self) -> int:
        """Pages that are nobody's, or will be when the steps in flight are complete (see `_when_free`)."""
        stats = self.pages.stats
        return stats.free + stats.pending

    def _retract(self, fit: int) -> None:
        """Makes all but the `fit` oldest rows wait again, ahead of the others."""
        youngest = self._give_back(np.arange(len(self.batch)) >= fit)
        self.waiting.extendleft(reversed(youngest))
        self.retractions += len(youngest)

    def _give_back(self, leaves: npt.NDArray[np.bool_]) -> Sequence[Request]:
        """Takes rows out of the batch; their slots and pages are free once the last launched step is complete."""
        leaving = self.batch.filter(leaves)
        for request, num_generated in zip(leaving.requests, leaving.num_generated.np.tolist(), strict=True):
            request.num_generated = num_generated
        self.pages.release_requests(leaving.slots, after=self._in_flight[-1] if self._in_flight else None)
        self.batch = self.batch.filter(~leaves)
        return leaving.requests

    def _admit(self, plan: StepPlan) -> bool:
        """Lets waiting requests join while this step's tokens, rows and pages last. Whether any did."""
        settings = self.settings
        rows, tokens = len(self.batch), settings.max_tokens_per_step - int(plan.remaining.sum())
        if not self.waiting or tokens <= 0 or rows == settings.max_running:
            return False
        # What the running rows take up to their next token is spoken for. What their answers will take is not: that
        # would leave pages idle. Where it comes to that, `step` retracts.
        full = pages_for(self.batch.seq_lens.np + plan.remaining, settings.page_size)
        pages = self._pages_available - int((full - plan.owned_pages).sum())
        joining: list[Request] = []
        while self.waiting and tokens > 0 and rows < settings.max_running:
            request = self.waiting[0]
            needed = -(-request.tokens_to_prefill // settings.page_size)
            if needed > pages:
                break
            joining.append(self.waiting.popleft())
            tokens -= request.tokens_to_prefill
            pages -= needed
            rows += 1
        if joining:
            slots = self._when_free(lambda: self.slots.take(len(joining)))
            self.batch = self.batch.merge(joining_batch(self.runtime, slots, joining))
        return bool(joining)

    def _launch(self, plan: StepPlan) -> StepResult:
        runtime = self.runtime
        # The host may run ahead of the device by so many steps, and no further.
        while len(self._in_flight) >= runtime.steps_in_flight:
            self._in_flight.popleft().wait()
        runtime.next_step()

        if plan.only_decodes:  # nearly always: one token a row, in and out
            generated = len(self.batch)
            batch = self.batch.advance(("seq_lens", "num_generated"), 1)
            extension = self._when_free(lambda: self.pages.advance(batch.slots, 1))
        else:
            generates = plan.generates
            generated = int(generates.sum())
            batch = self.batch.advance({"seq_lens": plan.chunks, "num_generated": generates})
            extension = self._when_free(lambda: self.pages.advance(batch.slots, plan.chunks))
        query_start_loc = np.zeros(len(batch) + 1, np.int32)
        np.cumsum(plan.chunks, out=query_start_loc[1:])
        batch.upload(
            writes=[extension.entry()],
            extras={
                "positions": extension.positions,  # int64[tokens]
                "out_cache_loc": extension.tokens.np,  # int64[tokens]
                "query_start_loc": query_start_loc,  # int32[rows + 1]
            },
        )
        # The forward would run here, on the tensors that `upload` returned and the device sides of `batch`.
        forward_done = runtime.record()
        self.req_to_token.read_until(forward_done)
        self._in_flight.append(forward_done)
        self.batch = batch
        return StepResult(len(batch), len(extension), generated)

    def _when_free(self, take: Callable[[], T]) -> T:
        """What `take` returns. Plans count what is pending as free, so now and then steps in flight must end first."""
        try:
            return take()
        except PoolExhaustedError:  # nothing was taken
            while self._in_flight:
                self._in_flight.popleft().wait()
            return take()
