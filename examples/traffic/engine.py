"""A continuous-batching engine in which only the model is missing: the engine's side of the library.

One step, in the order in which it happens::

    leave     rows whose answer is complete, or whose client hung up, leave; their slot and pages are freed behind
              the fence of the last step, which may still read them
    retract   when the next tokens do not fit into the pages, the youngest rows give theirs back and wait again
    admit     waiting requests are chosen while slots, pages and this step's tokens last
    plan      those that were chosen join with slots of their own; each row gets page space for the tokens it computes
              now: one to decode, a chunk to prefill; every column, the table writes and the step's own inputs cross in
              one copy
    forward   (the model would run here) and a fence is recorded after it

All but the plan is decided on the host (`scheduler`). The one copy tells the device of all of it at once, and only of
the result.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast, final

import attrs
import numpy as np
import torch

from batchstate.columns import HostColumn, host_list, mirrored
from batchstate.errors import ArgumentError
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.step import StepPlanner
from examples.traffic.scheduler import BatchScheduler, ScheduledBatch, StepPlan
from examples.traffic.workload import Workload

END_OF_TEXT = 2
"""Token id at which an answer would end. Here lengths are given, and the id only fills its column."""

LONGEST_PATIENCE = 20.0
"""Seconds after which a client that hangs up has done so; drawn evenly from 0 on."""


@final
@attrs.frozen
class SamplingParams:
    """How the tokens of one request are drawn. Every field becomes a column of the batch, of the same name."""

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
        prompt_tokens, answer_tokens: lengths.
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
    """The requests of a workload, in order of arrival, with random sampling parameters and impatient clients.

    `aborts` is the share of clients that hang up within `LONGEST_PATIENCE` seconds. Some answers finish first.

    Raises:
        ArgumentError: `aborts` outside 0 to 1, or a negative seed.
    """
    if not 0 <= aborts <= 1:
        raise ArgumentError(f"aborts is {aborts}", aborts, "give a share from 0 (none) to 1 (all)")
    if seed < 0:
        raise ArgumentError(f"seed is {seed}", seed, "use a seed of 0 or more")
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
    lengths = (workload.context_tokens.tolist(), workload.generated_tokens.tolist())
    return list(map(Request, range(count), workload.arrival.tolist(), *lengths, priority, sampling, hangs_up.tolist()))


class RunningBatch(ScheduledBatch):
    """The batch of this engine: row i of every column belongs to one request.

    A column that is added here takes part in every operation, and need not be added anywhere else.
    """

    max_seq_lens = mirrored(torch.int64)
    """Tokens of the prompt and the whole answer, of which the last is never computed, since none follows it."""
    priority = mirrored(torch.int32)
    temperature = mirrored(torch.float32, pad=1.0)
    top_p = mirrored(torch.float32, pad=1.0)
    top_k = mirrored(torch.int32, pad=-1)
    min_p = mirrored(torch.float32)
    repetition_penalty = mirrored(torch.float32, pad=1.0)
    seed = mirrored(torch.int64)
    eos_id = mirrored(torch.int32)
    lora_id = mirrored(torch.int32)
    requests: HostColumn[Request] = host_list()


@final
@attrs.frozen(kw_only=True)
class EngineSettings:
    """Sizes and speed of the engine.

    The speed is that of a large model: a full step of 2,048 tokens takes about 140 ms, a step of 64 decoding requests
    about 43 ms. Under the load of the fitted hour some 75 requests run at once and pages get scarce in its peak.

    Attributes:
        max_running: requests in the batch at once.
        max_tokens_per_step: tokens that one step computes, decode and prompt chunks together; at least `max_running`.
        page_size, num_pages: tokens of a KV page, and KV pages.
        step_seconds, token_seconds: simulated time of a step, and what each of its tokens adds.
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
                raise ArgumentError(f"{name} is {value}", value, f"use {bound} or more")
        tokens, rows = self.max_tokens_per_step, self.max_running
        if tokens < rows:
            problem = f"max_tokens_per_step is {tokens} and max_running {rows}"
            raise ArgumentError(problem, tokens, "let a step hold one token of each running request at least")

    def check_fits(self, workload: Workload) -> None:
        """Refuses a workload whose longest request needs more pages than there are."""
        tokens, needed = workload.longest, -(-workload.longest // self.page_size)
        if needed > self.num_pages:
            problem = f"the longest request needs {needed} pages for {tokens} tokens; there are {self.num_pages}"
            remedy = "raise num_pages (`python -m examples.traffic --num-pages`), or leave out the longest requests"
            raise ArgumentError(problem, needed, remedy)


@final
@attrs.frozen
class StepResult:
    """One step: requests in the batch, tokens whose KV was computed, and tokens that came out."""

    running: int
    computed: int
    generated: int


@final
class TrafficEngine(BatchScheduler[RunningBatch, Request]):
    """Runs requests, of at most `max_tokens_per_request` with the answer, through a batch, slots and pages.

    Attributes:
        slots: the slot pool.
        req_to_token: int32[slot, position] -> location.
        finished, aborted: running totals.
    """

    def __init__(self, runtime: Runtime, settings: EngineSettings, *, max_tokens_per_request: int) -> None:
        self.slots = SlotPool(runtime, settings.max_running)
        self.req_to_token = self.slots.table("req_to_token", (max_tokens_per_request,), torch.int32, holds="location")
        pages = PagePool(
            runtime,
            self.slots,
            settings.num_pages,
            settings.page_size,
            max_tokens_per_request=max_tokens_per_request,
            req_to_token=self.req_to_token,
        )
        super().__init__(pages, RunningBatch.empty(runtime), max_tokens_per_step=settings.max_tokens_per_step)
        self._planner = StepPlanner(RunningBatch, pages=pages, has_ids=False)
        self.finished = 0
        self.aborted = 0
        self._hung_up: set[Request] = set()
        self._in_flight: deque[Fence] = deque()

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests that arrive."""
        self.waiting.extend(requests)

    def abort(self, request: Request) -> None:
        """Aborts a request whose client hung up. A running one leaves with the next step; a finished one stays so."""
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
        plan = self.schedule()
        return None if plan is None else self._launch(plan)

    @property
    def last_step(self) -> Fence | None:
        """The fence of the last launched step; None when none is in flight."""
        return self._in_flight[-1] if self._in_flight else None

    def wait_for_step(self) -> bool:
        """Waits for the oldest step in flight; False when there is none."""
        if not self._in_flight:
            return False
        self._in_flight.popleft().wait()
        return True

    def leave(self) -> None:
        """Gives back the rows of requests whose answer is complete or whose client hung up."""
        batch = self.batch
        leaves = batch.seq_lens.np + 1 == batch.max_seq_lens.np
        if self._hung_up:
            leaves |= np.fromiter((request in self._hung_up for request in batch.requests), np.bool_, len(batch))
        if np.count_nonzero(leaves):
            for request in self.give_back(leaves):
                request.done = True
                complete = request.num_generated == request.answer_tokens
                self.finished += complete
                self.aborted += not complete
            self._hung_up.clear()

    def _launch(self, plan: StepPlan) -> StepResult:
        runtime = self.runtime
        # The host may run ahead of the device by so many steps, and no further.
        while len(self._in_flight) >= runtime.steps_in_flight:
            self._in_flight.popleft().wait()
        runtime.next_step()
        samples = plan.samples
        joining = _rows(plan.joining) if plan.joining else None
        step = self.when_free(lambda: self._planner.plan(self.batch, plan.chunks, joining=joining, samples=samples))
        step.inputs()  # the forward would run here, on these and the device sides of `step.batch`
        forward_done = runtime.record()
        self.req_to_token.read_until(forward_done)
        self._in_flight.append(forward_done)
        self.batch = cast(RunningBatch, step.batch)
        return StepResult(len(self.batch), int(plan.chunks.sum()), int(np.count_nonzero(samples)))


def _rows(requests: Sequence[Request]) -> dict[str, object]:
    """The rows of requests that join, with nothing computed yet. The step takes their slots."""
    rows: dict[str, list[Any]] = {
        "seq_lens": [0] * len(requests),
        "prefill_lens": [request.tokens_to_prefill for request in requests],
        "max_seq_lens": [request.prompt_tokens + request.answer_tokens for request in requests],
        "priority": [request.priority for request in requests],
    }
    for field in attrs.fields(SamplingParams):
        rows[field.name] = [getattr(request.sampling, field.name) for request in requests]
    # An array of the column's own dtype is taken as it is; each number of a list is looked at first.
    columns = {name: np.array(values, getattr(RunningBatch, name).np_dtype) for name, values in rows.items()}
    return {"requests": requests, **columns}
