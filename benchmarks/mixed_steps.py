"""A mixed step: some requests decode, some put in a chunk of their prompt, and an eighth leave and join.

A request joins with the first chunk of its prompt, puts in the second one a step later and then samples, decodes, and
leaves once it has been there for eight steps. So each step has two chunks in eight requests, of 20 to 64 tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.columns import TensorColumn
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from batchstate.step import PlannedStep, StepPlanner
from benchmarks.baselines.request_loops import LONGEST, PAGE_SIZE, PAGES, ChunksInLists, Inputs
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.decode_steps import Decode, declared
from benchmarks.steady_steps import COLUMNS
from benchmarks.timing import Contender

AGE = 8
"""Steps of a request."""

VERIFIED = 40
"""Steps that are compared before any is timed."""

TARGETS = {16: 1.2, 64: 2.0, 256: 4.0}
"""The least ratio asked for, by the number of requests."""

Ints = npt.NDArray[np.int64]


@final
@attrs.frozen(eq=False)
class Scheduled:
    """The requests of a step, in the order of their rows: what a scheduler has decided, as both ways take it.

    Attributes:
        chunks: of each request the ids that it puts in, or None where it decodes.
        arrays: the same in arrays.
        query_lens: tokens that each puts in.
        samples: whether each has a next token.
        leaving: so many leave before, those that came first.
        joining: so many join.
    """

    chunks: Sequence[list[int] | None]
    arrays: Sequence[Ints | None]
    query_lens: Ints
    samples: npt.NDArray[np.bool_]
    leaving: int
    joining: int


def schedule(n: int) -> list[Scheduled]:
    """The first `AGE` steps, until there are `n` requests, and last the one that is repeated from then on."""
    k, rng = n // AGE, np.random.default_rng(n)
    first, second = (
        [rng.integers(0, 50_000, least + more * (i % turns)).tolist() for i in range(k)]
        for least, more, turns in ((32, 8, 5), (20, 4, 7))
    )
    steps = []
    for age in range(AGE + 1):
        decoding = [None] * (k * max(0, min(age, AGE - 1) - 1))
        chunks = [*decoding, *(second if age else []), *first]
        arrays = [None if chunk is None else np.array(chunk) for chunk in chunks]
        lens = np.array([1 if chunk is None else len(chunk) for chunk in chunks])
        samples = np.arange(len(chunks)) < len(chunks) - k
        steps.append(Scheduled(chunks, arrays, lens, samples, k if age == AGE else 0, k))
    return steps


@final
class Planned:
    """The requests of a planner: batch, slots, pages, token table and relay."""

    def __init__(self, runtime: Runtime, steps: Sequence[Scheduled]) -> None:
        n = len(steps[-1].chunks)
        self._runtime, self._kind = runtime, declared(COLUMNS)
        self._slots = SlotPool(runtime, 4 * n)
        table = self._slots.table("req_to_token", (LONGEST + 1,), torch.int32, holds="location")
        pages = PagePool(
            runtime, self._slots, 4 * n * PAGES, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table
        )
        relay = FutureMap(self._slots, {"last": relay_field(torch.int64, read_by="both")})
        self._planner = StepPlanner(self._kind, pages=pages, relay=relay, ids="last", results=("last",))
        self._keep = np.arange(n) >= steps[-1].leaving
        self._joining: dict[str, Any] = {
            name: np.zeros(steps[-1].joining, column.np_dtype)
            for name, column in self._kind.columns().items()
            if isinstance(column, TensorColumn) and name != "slots"
        }
        self._batch = self._kind.empty(runtime)
        self._before: PlannedStep | None = None
        for scheduled in steps[:-1]:
            self.step(scheduled)

    def step(self, scheduled: Scheduled) -> Inputs:
        """The step. The tokens of the one before come to the host in it."""
        self._runtime.next_step()
        leaving = scheduled.leaving > 0
        step = self._planner.plan(
            self._batch,
            scheduled.query_lens,
            keep=self._keep if leaving else None,
            after=self._runtime.record() if leaving else None,
            joining=self._joining,
            prompt_ids=scheduled.arrays,
            samples=scheduled.samples,
        )
        inputs = step.inputs()
        last = inputs.last_token_indices
        step.publish(last=inputs.input_ids.index_select(0, last) + 1)
        if self._before is not None:
            self._before.results.resolve()
        self._batch, self._before = cast(Decode, step.batch), step
        places = cast(torch.Tensor, inputs.slot_mapping)
        return Inputs(inputs.input_ids, inputs.positions, inputs.kv_lens, places, inputs.query_start_loc, last)


def against_lists(runtime: Runtime, *, num_requests: int) -> Comparison:
    """The step at `cheap` and `off` against the loop."""
    steps = schedule(num_requests)
    repeated = steps[-1]
    ours = {level: Planned(runtime, steps) for level in (Level.CHEAP, Level.OFF)}
    loop = ChunksInLists(num_requests, repeated.leaving, runtime.device)
    for scheduled in steps[:-1]:
        loop.step(scheduled.chunks, scheduled.samples.tolist(), scheduled.leaving)
    ways: dict[Level, Callable[[], Inputs]] = {level: partial(way.step, repeated) for level, way in ours.items()}
    theirs = partial(loop.step, repeated.chunks, repeated.samples.tolist(), repeated.leaving)
    name = f"checks {Level.CHEAP.value}"
    return Comparison(
        task=f"mixed step with chunked prompts, {num_requests:,} requests",
        ours=[Contender(f"checks {level.value}", run, level) for level, run in ways.items()],
        baselines=[Contender(loop.name, theirs)],
        verify=lambda: require_equal_steps([*ways.values(), theirs], repeated),
        asks={(name, loop.name): Asked(target=TARGETS.get(num_requests))},
    )


def require_equal_steps(ways: Sequence[Callable[[], Inputs]], scheduled: Scheduled, times: int = VERIFIED) -> None:
    """Steps of each way have the same inputs; each token lies in the page of its place in its request, in all steps.

    Pages have other numbers in each way. A page is that of one request until it leaves.

    Raises:
        MismatchError: they have not.
    """
    lens, k = scheduled.query_lens, scheduled.leaving
    requests = np.arange(lens.size)
    pages: list[dict[tuple[int, int], int]] = [{} for _ in ways]  # request, place of the page in it -> page
    for _ in range(times):
        requests = np.concatenate([requests[k:], requests[-1] + 1 + np.arange(k)])
        inputs = [way() for way in ways]
        for name in ("ids", "positions", "kv_lens", "starts", "last"):
            ours, *others = (_values(getattr(each, name)) for each in inputs)
            for other in others:
                require_equal(name, ours, other)
        positions, of_token = _values(inputs[0].positions), requests.repeat(lens)
        keys = list(zip(of_token.tolist(), (positions // PAGE_SIZE).tolist(), strict=True))
        for each, held in zip(inputs, pages, strict=True):
            places = _values(each.places)
            require_equal("place in its page", places % PAGE_SIZE, positions % PAGE_SIZE)
            for key in [key for key in held if key[0] < requests[0]]:
                del held[key]
            own = [held.setdefault(key, page) for key, page in zip(keys, (places // PAGE_SIZE).tolist(), strict=True)]
            require_equal("page of a token", places // PAGE_SIZE, np.array(own))
            require_equal("pages of their own", len(set(held.values())), len(held))


def _values(tensor: torch.Tensor) -> Ints:
    values: Ints = tensor.cpu().numpy().astype(np.int64)
    return values
