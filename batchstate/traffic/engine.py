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

from batchstate.batch import Batch
from batchstate.columns import HostColumn, host_list, mirrored, slot_column
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.indices import Slots
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.traffic.workload import Workload

# A request as the engine's user sends it, and what the engine notes about it while it is not in the batch.

END_OF_TEXT = 2
"""Token id at which an answer would end. Here lengths are given, and the id only fills its column."""

LONGEST_PATIENCE = 20.0
"""Seconds after which a client that hangs up has done so; drawn evenly from 0 on."""


@final
@attrs.frozen
class SamplingParams:
    """How the tokens of one request are drawn. Every field becomes a column of the batch."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    eos_id: int
    lora_id: int


@final
@attrs.define(eq=False)
class Request:
    """One request.

    Attributes:
        request_id: its row in the workload.
        arrival: seconds since the first request.
        prompt_tokens: tokens of the prompt.
        answer_tokens: tokens to generate.
        priority: of the request; rides along.
        sampling: how its tokens are drawn.
        hangs_up: second at which the client gives up, or infinity.
        num_generated: tokens generated when it last left the batch; a retracted request goes on from there.
        done: it has finished or was aborted.
    """

    request_id: int
    arrival: float
    prompt_tokens: int
    answer_tokens: int
    priority: int
    sampling: SamplingParams
    hangs_up: float = float("inf")
    num_generated: int = 0
    done: bool = False

    @property
    def tokens_to_prefill(self) -> int:
        """Tokens whose KV has to be computed before the next one is generated: prompt and answer so far."""
        return self.prompt_tokens + self.num_generated


def draw_requests(workload: Workload, *, seed: int = 0, aborts: float = 0.0) -> list[Request]:
    """Makes the requests of a workload, in order of arrival, with sampling parameters and impatient clients drawn.

    Args:
        workload: arrivals and lengths.
        seed: the same seed gives the same requests.
        aborts: share of clients that hang up within `LONGEST_PATIENCE` seconds, 0 to 1. Some answers finish first.

    Raises:
        ArgumentError: `aborts` is no share, or a negative seed.
    """
    if not 0 <= aborts <= 1:
        raise ArgumentError(f"aborts is {aborts}", value=aborts, remedy="give a share from 0 (none) to 1 (all)")
    if seed < 0:
        raise ArgumentError(f"seed is {seed}", value=seed, remedy="use a seed of 0 or more")
    rng = np.random.default_rng(seed)
    count = len(workload)
    greedy = rng.random(count) < 0.2
    sampling = map(
        SamplingParams,
        np.where(greedy, 0.0, rng.choice([0.6, 0.7, 1.0], count)).tolist(),
        rng.choice([0.9, 0.95, 1.0], count).tolist(),
        np.where(greedy, 1, rng.choice([-1, 20, 50], count)).tolist(),
        rng.choice([0.0, 0.05], count).tolist(),
        rng.choice([1.0, 1.05, 1.1], count).tolist(),
        rng.integers(0, 2**31, count).tolist(),
        [END_OF_TEXT] * count,
        rng.choice(4, count, p=[0.85, 0.05, 0.05, 0.05]).tolist(),
    )
    priority = rng.choice(3, count, p=[0.1, 0.8, 0.1]).tolist()
    impatient = rng.random(count) < aborts
    hangs_up = np.where(impatient, workload.arrival + rng.uniform(0, LONGEST_PATIENCE, count), np.inf)
    return [
        Request(*row)
        for row in zip(
            range(count),
            workload.arrival.tolist(),
            workload.context_tokens.tolist(),
            workload.generated_tokens.tolist(),
            priority,
            sampling,
            hangs_up.tolist(),
            strict=True,
        )
    ]


# The batch of this engine: what it knows about each running request, declared once.


class RunningBatch(Batch):
    """Row i of every column belongs to one request. Rows stand in order of admission: the last is the youngest.

    A column that is added here takes part in every operation; there is no other place to add it to.
    """

    slots = slot_column()
    """Row of the request in every table."""
    seq_lens = mirrored(torch.int64)
    """Tokens whose KV is computed, those of the step under way included."""
    prefill_lens = mirrored(torch.int64)
    """Tokens to prefill: the prompt, and for a request that was retracted its answer up to then."""
    num_generated = mirrored(torch.int64)
    """Tokens of the answer so far."""
    max_new_tokens = mirrored(torch.int64)
    """Tokens of the whole answer."""
    priority = mirrored(torch.int32)
    temperature = mirrored(torch.float32, pad=1.0)
    top_p = mirrored(torch.float32, pad=1.0)
    top_k = mirrored(torch.int32, pad=-1)
    min_p = mirrored(torch.float32)
    repetition_penalty = mirrored(torch.float32, pad=1.0)
    seeds = mirrored(torch.int64)
    eos_ids = mirrored(torch.int32)
    lora_ids = mirrored(torch.int32)
    requests: HostColumn[Request] = host_list()
    """The request objects, on the host only."""


def joining_batch(runtime: Runtime, slots: Slots, requests: Sequence[Request]) -> RunningBatch:
    """The rows of requests that join, one a slot; nothing of them is computed yet."""
    sampling = [request.sampling for request in requests]
    return RunningBatch.build(
        runtime,
        slots=slots,
        seq_lens=[0] * len(requests),
        prefill_lens=[request.tokens_to_prefill for request in requests],
        num_generated=[request.num_generated for request in requests],
        max_new_tokens=[request.answer_tokens for request in requests],
        priority=[request.priority for request in requests],
        temperature=[params.temperature for params in sampling],
        top_p=[params.top_p for params in sampling],
        top_k=[params.top_k for params in sampling],
        min_p=[params.min_p for params in sampling],
        repetition_penalty=[params.repetition_penalty for params in sampling],
        seeds=[params.seed for params in sampling],
        eos_ids=[params.eos_id for params in sampling],
        lora_ids=[params.lora_id for params in sampling],
        requests=requests,
    )


# How large the simulated engine is, and how long its steps would take with a model.


@final
@attrs.frozen(kw_only=True)
class EngineSettings:
    """Sizes and speed of the engine.

    The speed is that of a large model: a full step of 2,048 tokens takes about 140 ms, a step of 64 decoding requests
    about 43 ms. Under the load of the fitted hour some 75 requests run at once and pages get scarce in its peak.

    Attributes:
        max_running: requests in the batch at once.
        max_tokens_per_step: tokens that one step computes, decode and prompt chunks together.
        page_size: tokens of a KV page.
        num_pages: KV pages.
        step_seconds: simulated time of a step, whatever it holds.
        token_seconds: simulated time that each token of the step adds.

    Raises:
        ArgumentError: a size below 1, a time below 0, or a step too small for a full batch to decode.
    """

    max_running: int = 256
    max_tokens_per_step: int = 2048
    page_size: int = 16
    num_pages: int = 10_240
    step_seconds: float = 0.04
    token_seconds: float = 0.000_05

    def __attrs_post_init__(self) -> None:
        least = {"max_running": 1, "max_tokens_per_step": 1, "page_size": 1, "num_pages": 1}
        least |= {"step_seconds": 0, "token_seconds": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not value >= bound:
                raise ArgumentError(f"{name} is {value}", value=value, remedy=f"use {bound} or more")
        if self.max_tokens_per_step < self.max_running:
            raise ArgumentError(
                f"max_tokens_per_step is {self.max_tokens_per_step} and max_running {self.max_running}",
                value=self.max_tokens_per_step,
                remedy="let a step hold one token of each running request at least",
            )

    def check_fits(self, workload: Workload) -> None:
        """Refuses a workload with a request that could not run even alone.

        Raises:
            ArgumentError: its longest request needs more pages than there are.
        """
        needed = -(-workload.longest // self.page_size)
        if needed > self.num_pages:
            raise ArgumentError(
                f"the longest request needs {needed} pages for {workload.longest} tokens; there are {self.num_pages}",
                value=needed,
                remedy="raise num_pages (`batchstate traffic --num-pages`), or leave out the longest requests",
            )


# The scheduler's decisions as arithmetic: arrays in, arrays out, nothing changed.
#
# Rows stand in order of admission, so the last row is the youngest request.

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class StepPlan:
    """What each row does in a step, if no row leaves or joins before; see `plan_step`.

    Attributes:
        remaining: int64[rows], tokens to compute until the row's next token comes out: 1 when it decodes.
        chunks: int64[rows], tokens that it computes in this step.
        owned_pages: int64[rows], pages that it has.
        new_pages: int64[rows], pages that its chunk needs on top.
    """

    remaining: Ints
    chunks: Ints
    owned_pages: Ints
    new_pages: Ints

    @property
    def only_decodes(self) -> bool:
        """Whether every row computes and generates exactly one token."""
        return int(self.remaining.max(initial=1)) == 1

    @property
    def generates(self) -> Ints:
        """1 for each row whose next token comes out of this step, else 0; int64[rows]."""
        generates: Ints = (self.chunks == self.remaining).astype(np.int64)
        return generates


def plan_step(seq_lens: Ints, prefill_lens: Ints, *, budget: int, page_size: int) -> StepPlan:
    """Plans one step.

    Args:
        seq_lens: int64[rows], tokens whose KV is computed.
        prefill_lens: int64[rows], tokens whose KV has to be computed before the row decodes.
        budget: tokens of a step, at least the number of rows.
        page_size: tokens of a page.
    """
    remaining = np.maximum(prefill_lens - seq_lens, 1)
    chunks = chunk_lengths(remaining, budget)
    owned_pages = pages_for(seq_lens, page_size)
    return StepPlan(remaining, chunks, owned_pages, pages_for(seq_lens + chunks, page_size) - owned_pages)


def chunk_lengths(remaining: Ints, budget: int) -> Ints:
    """How many tokens of each row this step computes.

    Rows that decode go first, one token each. What is left of the budget goes to the prompts, oldest first; the one
    that does not fit is cut, and goes on in the next step (chunked prefill).

    Args:
        remaining: int64[rows], tokens to compute until the row's next token comes out; 1 for a row that decodes.
        budget: tokens of a step, at least the number of rows.

    Returns:
        int64[rows], each from 0 to `remaining`, together at most `budget`.
    """
    if int(remaining.sum()) <= budget:
        return remaining
    decodes = remaining == 1
    wanted = np.where(decodes, 0, remaining)
    room = budget - np.count_nonzero(decodes)
    before = np.cumsum(wanted) - wanted
    chunks: Ints = np.clip(room - before, 0, wanted) + decodes
    return chunks


def pages_for(tokens: Ints, page_size: int) -> Ints:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def rows_that_fit(new_pages: Ints, owned_pages: Ints, available: int) -> int:
    """How many of the oldest rows can take their next step when all younger ones give back their pages.

    Args:
        new_pages: int64[rows], pages that each row's next tokens need.
        owned_pages: int64[rows], pages that each row has.
        available: pages nobody has.
    """
    if int(new_pages.sum()) <= available:
        return len(new_pages)
    needed = np.concatenate([[0], np.cumsum(new_pages)])
    given_back = owned_pages.sum() - np.concatenate([[0], np.cumsum(owned_pages)])
    return int(np.flatnonzero(needed <= available + given_back)[-1])


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
        self.req_to_token = self.slots.table("req_to_token", (max_tokens_per_request,), torch.int32, holds="location")
        self.pages = PagePool(
            runtime,
            self.slots,
            settings.num_pages,
            settings.page_size,
            max_tokens_per_request=max_tokens_per_request,
            req_to_token=self.req_to_token,
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
                "out_cache_loc": extension.locations.np,  # int64[tokens]
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
