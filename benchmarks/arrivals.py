"""The cost of arriving requests: a whole prefill step, and the single calls on handles, against plain Python."""

from collections import deque
from collections.abc import Callable
from typing import cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.columns import TensorColumn
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.host_pool import HostKVPool
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.step import StepPlanner
from benchmarks.baselines.request_loops import PAGE_SIZE, PAGES, START, Inputs, PrefillOfLists
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.decode_steps import declared
from benchmarks.steady_steps import COLUMNS, require_equal_inputs
from benchmarks.timing import Contender

Ints = npt.NDArray[np.int64]

REQUESTS = 256
PREFILLS_US = {256: 2_500, 1_024: None}
"""The most microseconds for so many prompts."""


@final
class Prefill:
    """Requests arrive with prompts of `START` tokens, put them in, and leave."""

    def __init__(self, runtime: Runtime, prompts: list[list[int]]) -> None:
        n = len(prompts)
        self._runtime, self._kind = runtime, declared(COLUMNS)
        self._prompts = [np.array(prompt) for prompt in prompts]
        in_flight = runtime.steps_in_flight
        self._slots = SlotPool(runtime, in_flight * n)
        table = self._slots.table("req_to_token", (PAGES * PAGE_SIZE,), torch.int32, holds="location")
        self._pages = PagePool(
            runtime,
            self._slots,
            in_flight * n * PAGES,
            PAGE_SIZE,
            max_tokens_per_request=PAGES * PAGE_SIZE,
            req_to_token=table,
        )
        relay = FutureMap(self._slots, {"last": relay_field(torch.int64, read_by="both")})
        self._planner = StepPlanner(self._kind, pages=self._pages, relay=relay, ids="last")
        self._queries = np.array([len(prompt) for prompt in prompts])
        self._running: deque[Fence] = deque(maxlen=in_flight)
        self._values = {
            name: np.zeros(n, column.np_dtype)
            for name, column in self._kind.columns().items()
            if isinstance(column, TensorColumn) and name != "slots"
        }

    def step(self) -> Inputs:
        """The step, after which all requests leave."""
        if len(self._running) == self._running.maxlen:
            self._running[0].wait()  # whose slots these requests take
        self._runtime.next_step()
        slots = self._slots.take(self._queries.size)
        batch = self._kind.build(self._runtime, slots=slots, **self._values)
        inputs = self._planner.plan(batch, self._queries, prompt_ids=self._prompts).inputs()
        self._running.append(self._runtime.record())
        self._pages.release_requests(slots, after=self._running[-1])
        return Inputs(inputs.input_ids, inputs.positions, inputs.kv_lens, cast(torch.Tensor, inputs.slot_mapping))


def prefill(runtime: Runtime, num_requests: int = REQUESTS) -> Comparison:
    """A prefill of prompts of 100 tokens."""
    prompts = np.random.default_rng(0).integers(0, 50_000, (num_requests, START)).tolist()
    ours = {level: Prefill(runtime, prompts) for level in (Level.CHEAP, Level.OFF)}
    loop = PrefillOfLists(prompts, runtime.device)

    def verify() -> None:
        for _ in range(3):
            require_equal_inputs([*(engine.step for engine in ours.values()), loop.step])

    name = "checks cheap"
    return Comparison(
        task=f"prefill of {num_requests:,} x {START} tokens",
        ours=[Contender(f"checks {level.value}", engine.step, level) for level, engine in ours.items()],
        baselines=[Contender(loop.name, loop.step)],
        verify=verify,
        asks={(name, loop.name): Asked(limit_us=PREFILLS_US.get(num_requests))},
    )


SHORT, HOT, LAYERS = 100, 256, 4
"""Tokens of a short request, and of what the device has of each request of the host tier; buffers of KV."""


@final
class Landed:
    """Short requests whose KV has come from another worker: admitted, and gone again.

    With `tier` it came into the host tier, which loads all of it into their pages; else into pages that are assigned.
    """

    def __init__(self, runtime: Runtime, num_requests: int, tier: bool) -> None:
        self._runtime, self._n = runtime, num_requests
        self._slots = SlotPool(runtime, 2 * num_requests)
        num_pages = 2 * num_requests * HOT // PAGE_SIZE
        self._pages = PagePool(runtime, self._slots, num_pages, PAGE_SIZE, max_tokens_per_request=HOT)
        self._tier: HiSparse | None = None
        if tier:
            host = HostKVPool(runtime, num_pages, PAGE_SIZE, layers=LAYERS, item_shape=(128,), dtype=torch.uint8)
            shape = self._pages.location_capacity, 128
            kv = [runtime.device_zeros(shape, torch.uint8) for _ in range(LAYERS)]
            self._tier = HiSparse(self._pages, host, kv, hot_tokens=HOT)

    def step(self) -> Ints:
        """All arrive, and leave; the places of their tokens."""
        pages, tier, slots = self._pages, self._tier, self._slots.take(self._n)
        if tier is not None:
            tier.reserve(slots, SHORT, HOT)
            places = tier.admit_direct(slots).locations.np
            tier.finish(slots, after=None)
            return places
        parts = []
        for slot in slots.split([1] * self._n):
            lease = pages.take(-(-SHORT // PAGE_SIZE))
            pages.commit(lease, SHORT)
            parts.append(pages.assign(lease, slot, SHORT).locations.np)
        pages.release_requests(slots, after=None)
        return np.concatenate(parts)


def short_requests(runtime: Runtime, num_requests: int = 8) -> Comparison:
    """Short requests of a decode worker land in its device pages, and do not pass through the host tier."""
    device, tier = (Landed(runtime, num_requests, way) for way in (False, True))

    def verify() -> None:
        require_equal("tokens that have a place", *(np.unique(way.step()).size for way in (device, tier)))

    return Comparison(
        task=f"{num_requests} requests of {SHORT} tokens admitted",
        ours=[Contender("landed in device pages", device.step, Level.CHEAP)],
        baselines=[Contender("through the host tier", tier.step, Level.CHEAP)],
        verify=verify,
    )


def joined_handles(runtime: Runtime) -> Comparison:
    """Handles of 256 requests, taken one by one, as one value."""
    pool = SlotPool(runtime, REQUESTS)
    parts = [pool.take(1) for _ in range(REQUESTS)]
    arrays = [part.np for part in parts]
    return _single(
        f"handles of {REQUESTS} requests joined",
        Contender("Slots.cat", lambda: Slots.cat(parts), Level.CHEAP),
        Contender("np.concatenate", lambda: np.concatenate(arrays)),
        15,
        lambda: require_equal("slots", Slots.cat(parts).np, np.concatenate(arrays)),
    )


def one_slot(runtime: Runtime) -> Comparison:
    """One slot taken and freed, which a loop over requests does for each."""
    pool, free = SlotPool(runtime, REQUESTS), deque(range(1, REQUESTS + 1))

    def ours() -> None:
        pool.free(pool.take(1), after=None)

    def theirs() -> None:
        free.append(free.popleft())

    return _single("one slot taken and freed", Contender("SlotPool", ours, Level.CHEAP), Contender("deque", theirs), 4)


def one_extension(runtime: Runtime) -> Comparison:
    """One request grows by a token, which a loop over requests does for each."""
    pool = SlotPool(runtime, 4)
    pages = PagePool(runtime, pool, 1_024, PAGE_SIZE, max_tokens_per_request=1_024 * PAGE_SIZE)
    slot, most = pool.take(1), 1_024 * PAGE_SIZE
    total = 0
    free, held, length = deque(range(1, 1_025)), list[int](), 0

    def ours() -> None:
        nonlocal total
        total += 1
        pages.extend(slot, total)
        if total == most:
            pages.release(slot, after=None)
            total = 0

    def theirs() -> None:
        nonlocal length
        if length % PAGE_SIZE == 0:
            held.append(free.popleft())
        length += 1
        if length == most:
            free.extend(held)
            held.clear()
            length = 0

    return _single(
        "one request grows by a token", Contender("extend", ours, Level.CHEAP), Contender("list of pages", theirs), 6
    )


def _single(
    task: str, ours: Contender, theirs: Contender, limit_us: float, verify: Callable[[], None] = lambda: None
) -> Comparison:
    asks = {(ours.name, theirs.name): Asked(limit_us=limit_us)}
    return Comparison(task=task, ours=[ours], baselines=[theirs], verify=verify, asks=asks)
