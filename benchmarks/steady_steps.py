"""A whole decode step, from the host's plan to the results, against engines that keep an object per request.

Every request advances by a token. In a steady step none leaves or joins; in one with churn an eighth do, at least one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.columns import TensorColumn
from batchstate.forward.inputs import ForwardInputs
from batchstate.future_map import FutureMap, Prefetched, relay_field
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime, Stream
from batchstate.step import PlannedStep, StepPlanner
from benchmarks.baselines.request_loops import (
    LONGEST,
    PAGE_SIZE,
    PAGES,
    START,
    Floor,
    Inputs,
    ListsAndTensors,
    PinnedBuffers,
    TensorPerRequest,
)
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.decode_steps import Decode, declared
from benchmarks.timing import Contender

REQUESTS = (1, 16, 64, 256, 1_024)
COLUMNS = 12

TARGETS: dict[str, tuple[float, ...]] = {
    TensorPerRequest.name: (1, 2.5, 8, 20),
    ListsAndTensors.name: (0.25, 0.6, 1.4, 3.6),
}
"""The least ratio asked for, at each number of requests up to 256, of a steady step."""

LIMITS_US = {False: (70, 75, 85, 120), True: (150, 170, 210, 320)}
"""The most microseconds at each of these numbers of requests, without and with churn."""


@final
class Steady:
    """Requests of this library that decode: batch, slots, pages, token table and relay.

    With `aside` the tokens come to the host over the relay's private stream, and else over that of the forward.
    """

    def __init__(self, runtime: Runtime, n: int, churn: int, *, aside: bool = False) -> None:
        self._runtime, self._churn, self._aside = runtime, churn, aside
        self._kind = declared(COLUMNS)
        self._slots = SlotPool(runtime, 4 * n)
        table = self._slots.table("req_to_token", (LONGEST + 1,), torch.int32, holds="location")
        self._pages = PagePool(
            runtime, self._slots, 4 * n * PAGES, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table
        )
        self._relay = FutureMap(self._slots, {"last": relay_field(torch.int64, read_by="both")})
        self._first, self._some = (np.full(k, START) for k in (n, churn))
        self._others = [
            (name, column.np_dtype)
            for name, column in self._kind.columns().items()
            if isinstance(column, TensorColumn) and name not in ("slots", "seq_lens")
        ]
        self._batch = self._arrived(self._first)
        self._relay.publish(self._batch.slots, last=np.ones(n, dtype=np.int64))
        self._batch.upload(writes=[self._pages.entry(self._batch.slots)])
        self._keep = np.arange(n) >= churn  # those that came first leave first
        self._length = START  # of each request, while none leaves
        results = () if aside else ("last",)
        self._planner = StepPlanner(self._kind, pages=self._pages, relay=self._relay, ids="last", results=results)
        self._before: PlannedStep | None = None
        self._tokens: Prefetched | None = None

    def _arrived(self, lengths: npt.NDArray[np.int64]) -> Decode:
        """Requests with a prompt whose KV is there."""
        return self._kind.build(self._runtime, slots=self._pages.take_requests(lengths), **self._columns(lengths))

    def _columns(self, lengths: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Columns of requests of these lengths, besides slots."""
        return {"seq_lens": lengths, **{name: np.zeros(lengths.size, dtype) for name, dtype in self._others}}

    def _plan(self) -> PlannedStep:
        plan, done = self._planner.plan, self._runtime.record
        if self._churn:
            joining = self._columns(self._some)
            first = {"last": np.ones(self._churn, dtype=np.int64)}
            return plan(self._batch, keep=self._keep, joining=joining, after=done(), published=first)
        self._length += 1
        if self._length == LONGEST:
            self._length = START + 1
            self._pages.release_requests(self._batch.slots, after=done())
            self._batch = self._arrived(self._first)
            self._relay.publish(self._batch.slots, last=np.ones(self._first.size, dtype=np.int64))
            return plan(self._batch, writes=[self._pages.entry(self._batch.slots)])
        return plan(self._batch)

    def _launched(self, step: PlannedStep) -> tuple[ForwardInputs, Prefetched | None]:
        inputs = step.inputs()
        step.publish(last=inputs.input_ids + 1)
        return inputs, self._relay.prefetch(step.sampled_slots, "last") if self._aside else None

    def step(self, forward: Stream | None = None) -> Inputs:
        """The step, whose forward may have a stream of its own. The tokens of the one before come to the host in it."""
        self._runtime.next_step()
        step = self._plan()
        if forward is None:
            inputs, tokens = self._launched(step)
        else:
            with self._runtime.use(forward):
                inputs, tokens = self._launched(step)
        if self._before is not None:
            (self._before.results if self._tokens is None else self._tokens).resolve()
        self._batch, self._before, self._tokens = cast(Decode, step.batch), step, tokens
        return Inputs(inputs.input_ids, inputs.positions, inputs.kv_lens, cast(torch.Tensor, inputs.slot_mapping))


def against_request_loops(runtime: Runtime, *, num_requests: int, churn: bool = False) -> Comparison:
    """The step at `cheap` and `off` against both loops, and against the floor."""
    leaving = max(1, num_requests // 8) if churn else 0
    others = [make(num_requests, leaving, runtime.device) for make in (TensorPerRequest, ListsAndTensors)]
    floors = [] if churn else [make(num_requests, 0, runtime.device) for make in (PinnedBuffers, Floor)]
    ours = {level: Steady(runtime, num_requests, leaving) for level in (Level.CHEAP, Level.OFF)}

    def verify() -> None:
        for _ in range(2 * PAGE_SIZE):
            require_equal_inputs([way.step for way in (*ours.values(), *others, *floors)])

    index = REQUESTS[:4].index(num_requests) if num_requests in REQUESTS[:4] else None
    asks = {}
    if index is not None:
        limit_us = LIMITS_US[churn][index]
        for name, ratios in TARGETS.items():
            target = None if churn else ratios[index]
            asks[_ours(Level.CHEAP), name] = Asked(target=target, limit_us=limit_us)
    step = "decode step with churn" if churn else "decode step"
    return Comparison(
        task=f"{step}, {num_requests:,} requests",
        ours=[Contender(_ours(level), way.step, level) for level, way in ours.items()],
        baselines=[Contender(way.name, way.step) for way in (*others, *floors)],
        verify=verify,
        asks=asks,
    )


MOST_OF_TWO_STREAMS = 1.5
"""The most that a step may take whose forward has a stream of its own, in steps on one stream."""


def on_two_streams(runtime: Runtime, *, num_requests: int) -> Comparison:
    """The cost of a stream of its own for the forward: the ratio is a step on two streams to one on a single stream.

    Plan and results are on the other stream. A CPU runs both at once: there it is the cost of the host's part.
    """
    single, double = (Steady(runtime, num_requests, 0) for _ in range(2))
    forward = runtime.stream("forward")
    ours = Contender("one stream, checks cheap", single.step, Level.CHEAP)
    theirs = Contender("the forward on a second stream", partial(double.step, forward), Level.CHEAP)

    def verify() -> None:
        for _ in range(2 * PAGE_SIZE):
            require_equal_inputs([single.step, partial(double.step, forward)])

    return Comparison(
        task=f"a forward on a stream of its own, {num_requests:,} requests",
        ours=[ours],
        baselines=[theirs],
        verify=verify,
        limit=MOST_OF_TWO_STREAMS,
        paired=True,
    )


def _ours(level: Level) -> str:
    return f"checks {level.value}"


def require_equal_inputs(steps: list[Callable[[], Inputs]]) -> None:
    """One step of each: the same ids, positions and lengths, and a place for each token where its position says."""
    wanted, *others = [step() for step in steps]
    places = [inputs.places.cpu().numpy().astype(np.int64) for inputs in (wanted, *others)]
    for other in others:
        for name in ("ids", "positions", "kv_lens"):
            mine, theirs = getattr(wanted, name), getattr(other, name)
            require_equal(name, mine.cpu().to(torch.int64), theirs.cpu().to(torch.int64))
    for locations in places:
        require_equal("place in its page", locations % PAGE_SIZE, places[0] % PAGE_SIZE)
        require_equal("places of their own", np.unique(locations).size, locations.size)
