"""Decides which requests run in the next step: rows are retracted when pages run out, and waiting requests join.

Rows stand in order of admission, so the last row is the youngest request. The traffic engine is a `BatchScheduler`, and
so is the engine that the library fuzzes itself with.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import host_list, mirrored, slot_column
from batchstate.errors import PoolExhaustedError
from batchstate.kv.pages import PagePool
from batchstate.runtime import Fence, Runtime

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@final
@attrs.frozen(eq=False)
class StepPlan:
    """The part of each row in a step. The last rows are those of requests that join with it, if any do.

    Attributes:
        seq_lens: int64[rows], tokens whose KV is computed.
        remaining: int64[rows], tokens to compute until the row's next token comes out: 1 when it decodes.
        chunks: int64[rows], tokens that it computes in this step.
        page_size: tokens per page.
        joining: the requests that join.
    """

    seq_lens: Ints
    remaining: Ints
    chunks: Ints
    page_size: int
    joining: Sequence[Any] = ()

    @property
    def owned_pages(self) -> Ints:
        """Pages that each row has, int64[rows]."""
        return pages_for(self.seq_lens, self.page_size)

    @property
    def new_pages(self) -> Ints:
        """Pages that the chunk of each row needs on top, int64[rows]."""
        return pages_for(self.seq_lens + self.chunks, self.page_size) - self.owned_pages

    @property
    def samples(self) -> Mask:
        """Whether the next token of each row comes out of this step, bool[rows]."""
        samples: Mask = self.chunks == self.remaining
        return samples


def chunk_lengths(remaining: Ints, budget: int) -> Ints:
    """How many tokens of each row this step computes, int64[rows]: at most `remaining` each, at most `budget` together.

    Rows that decode (1 remains) go first, one token each. The rest of the budget, which is at least the number of rows,
    goes to the prompts, oldest first; the one that does not fit is cut, and goes on in the next step (chunked prefill).
    """
    if int(remaining.sum()) <= budget:
        return remaining
    decodes = remaining == 1
    wanted = np.where(decodes, 0, remaining)
    for_prompts = budget - np.count_nonzero(decodes)
    before = np.cumsum(wanted) - wanted
    chunks: Ints = np.clip(for_prompts - before, 0, wanted) + decodes
    return chunks


def pages_for(tokens: Ints, page_size: int) -> Ints:
    return -(-tokens // page_size)


def rows_that_fit(new_pages: Ints, owned_pages: Ints, available: int) -> int:
    """How many of the oldest rows can take their next step when all younger ones give back their pages."""
    if int(new_pages.sum()) <= available:
        return len(new_pages)
    needed = np.concatenate([[0], np.cumsum(new_pages)])
    given_back = owned_pages.sum() - np.concatenate([[0], np.cumsum(owned_pages)])
    return int(np.flatnonzero(needed <= available + given_back)[-1])


class ScheduledBatch(Batch):
    """The columns that a scheduler plans by."""

    slots = slot_column()
    """Row of the request in every table."""
    seq_lens = mirrored(torch.int64)
    """Tokens whose KV is computed, those of the step under way included."""
    prefill_lens = mirrored(torch.int64)
    """Tokens to prefill: the prompt, and for a request that was retracted its answer up to then."""
    requests = host_list()
    """The request objects, on the host only."""


class Schedulable(Protocol):
    """A request as the scheduler sees it."""

    num_generated: int
    """Tokens generated when it last left the batch; a retracted request goes on from there."""

    @property
    def tokens_to_prefill(self) -> int:
        """Tokens whose KV has to be computed before the next one is generated: prompt and answer so far."""


T = TypeVar("T")
B = TypeVar("B", bound=ScheduledBatch)
R = TypeVar("R", bound=Schedulable)


class BatchScheduler(Generic[B, R]):
    """The running batch and the requests that wait. Subclasses say how rows leave and join, and what a step launches.

    Slots and pages of rows that leave are freed behind the fence of the last launched step, which may still read them.

    Args:
        pages: the page pool, with the slot pool in `pages.slots`.
        batch: an empty batch.
        max_tokens_per_step: tokens that one step computes, decode and prompt chunks together; at least one per slot.

    Attributes:
        runtime: the device.
        batch: the running requests.
        waiting: the others, first come first served; a retracted request goes to the front.
        retractions: how often a request had to give its pages back.
    """

    def __init__(self, pages: PagePool, batch: B, *, max_tokens_per_step: int) -> None:
        self.runtime: Runtime = pages.runtime
        self.pages = pages
        self.batch = batch
        self.waiting: deque[R] = deque()
        self.retractions = 0
        self._max_tokens_per_step = max_tokens_per_step

    # For subclasses

    @property
    def last_step(self) -> Fence | None:
        """The fence of the last launched step; None when none is in flight."""
        raise NotImplementedError

    def leave(self) -> None:
        """Gives back the rows of requests that are complete or aborted."""
        raise NotImplementedError

    def join(self, requests: Sequence[R]) -> StepPlan:
        """The step that requests join. Here its planner makes their rows, of which nothing is computed yet."""
        return self.plan(requests)

    def wait_for_step(self) -> bool:
        """Waits for the oldest step in flight; False when there is none."""
        raise NotImplementedError

    @property
    def slots_available(self) -> int:
        """Slots without an owner, now or when the steps in flight are complete."""
        return self.pages.slots.size - len(self.batch)

    def reclaim(self) -> bool:
        """Gives back pages that no running request needs, such as a prefix cache. Whether there were any."""
        return False

    # The beginning of a step

    def schedule(self) -> StepPlan | None:
        """Rows leave, are retracted and join. Returns the plan of the next step; None when no request is left."""
        self.leave()
        if not len(self.batch) and not self.waiting:
            return None
        plan, pages, retracted = self.plan(), self._pages_available, False
        most = self._max_tokens_per_step // self.pages.page_size + len(self.batch)  # pages that a step takes
        while pages < most and (fit := rows_that_fit(plan.new_pages, plan.owned_pages, pages)) < len(self.batch):
            if not self.reclaim():
                self._retract(fit)
                plan, retracted = self.plan(), True  # the rows left share the tokens of the step anew
            pages = self._pages_available
        joining = [] if retracted else self._joining(plan, pages)
        return self.join(joining) if joining else plan

    def plan(self, joining: Sequence[R] = ()) -> StepPlan:
        """The next step of the running rows, then of those of `joining`, which begin with nothing computed."""
        seq_lens, prefill_lens = self.batch.seq_lens.np, self.batch.prefill_lens.np
        if joining:
            seq_lens = np.concatenate((seq_lens, np.zeros(len(joining), np.int64)))
            prefill_lens = np.concatenate((prefill_lens, [request.tokens_to_prefill for request in joining]))
        remaining = np.maximum(prefill_lens - seq_lens, 1)
        chunks = chunk_lengths(remaining, self._max_tokens_per_step)
        return StepPlan(seq_lens, remaining, chunks, self.pages.page_size, joining)

    @property
    def _pages_available(self) -> int:
        """Pages without an owner, now or when the steps in flight are complete (see `when_free`)."""
        stats = self.pages.stats
        return stats.free + stats.pending

    def _retract(self, fit: int) -> None:
        """Makes all but the `fit` oldest rows wait again, ahead of the others."""
        youngest = self.give_back(np.arange(len(self.batch)) >= fit)
        self.waiting.extendleft(reversed(youngest))
        self.retractions += len(youngest)

    def give_back(self, leaves: Mask) -> Sequence[R]:
        """Takes rows out of the batch and returns their requests; slots and pages are freed behind `last_step`."""
        leaving = self.batch.filter(leaves)
        requests: Sequence[R] = leaving.requests
        for request, length in zip(requests, self.batch.seq_lens.np[leaves].tolist(), strict=True):
            request.num_generated += max(length + 1 - request.tokens_to_prefill, 0)
        self.pages.release_requests(leaving.slots, after=self.last_step)
        self.batch = self.batch.filter(~leaves)
        return requests

    def _joining(self, plan: StepPlan, pages: int) -> list[R]:
        """Waiting requests that join while this step's tokens, the slots and `pages` last; they wait no longer."""
        if not self.waiting:
            return []
        joining: list[R] = []
        tokens, slots = self._max_tokens_per_step - int(plan.remaining.sum()), self.slots_available
        # Pages up to the next token of the running rows are reserved. Those of their whole answers are not: that would
        # leave pages idle. Where it comes to that, `schedule` retracts.
        page_size = self.pages.page_size
        pages -= int((pages_for(self.batch.seq_lens.np + plan.remaining, page_size) - plan.owned_pages).sum())
        while self.waiting and tokens > 0 and slots > 0:
            request = self.waiting[0]
            needed = -(-request.tokens_to_prefill // page_size)
            if needed > pages:
                if len(self.batch) or joining or not self.reclaim():
                    break
                pages = self._pages_available
                continue
            joining.append(self.waiting.popleft())
            tokens -= request.tokens_to_prefill
            pages -= needed
            slots -= 1
        return joining

    def when_free(self, take: Callable[[], T]) -> T:
        """The result of `take`. Plans count pending pages as free, so now and then steps in flight must end first."""
        while True:
            try:
                return take()
            except PoolExhaustedError:  # nothing was taken
                if not self.wait_for_step():
                    raise
