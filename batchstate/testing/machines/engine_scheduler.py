"""A scheduler as an engine would write it, with a forward that only counts: what the engine machine drives.

One step: rows leave, rows are retracted when pages run out, waiting requests join, everyone extends, one upload, one
forward. Slots and pages of rows that leave are freed behind the last launched step, which may still read them.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.pages import Extension, PageLease, PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite
from batchstate.testing.fences import ManualStream

T = TypeVar("T")
Ints = npt.NDArray[np.int64]

BUDGET = 6
"""Tokens of one step."""


class Running(Batch):
    """The requests that run."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    prefill_lens = mirrored(torch.int64)
    num_generated = mirrored(torch.int32)
    temperature = mirrored(torch.float32, pad=1.0)
    bound_lens = mirrored(torch.int64, contract="upper_bound")
    last_token = device_only(torch.int64)
    requests = host_list()


@final
@attrs.define(eq=False)
class Request:
    """One request.

    Attributes:
        number: names it.
        prompt, answer: tokens.
        shares: begins with the prefix that the cache holds, if that is shorter than its prompt.
        generated: tokens generated so far.
        state: waiting, running, finished or aborted.
        last, bound: what the device has in `last_token` and `bound_lens`; `most` is the host's bound.
    """

    number: int
    prompt: int
    answer: int
    shares: bool = False
    generated: int = 0
    state: str = "waiting"
    last: int = 0
    bound: int = 0
    most: int = 0

    @property
    def to_prefill(self) -> int:
        """Tokens whose KV is computed before the next one is generated."""
        return self.prompt + self.generated


class Watcher(Protocol):
    """Hears of every token, before it is uploaded."""

    def joined(self, request: Request, shared: Extension | None) -> None:
        """A request joins, with a prefix or without."""
        ...

    def extended(self, batch: Running, extension: Extension) -> None:
        """Tokens are about to be written."""
        ...


@final
@attrs.define(eq=False)
class Scheduler:
    """Runs requests.

    Attributes:
        runtime, slots, pages: what it runs on.
        steps: steps in flight; `depth` is the most there may be.
        watcher: hears of every token.
        waiting: requests that do not run, first come first served.
        cache: the prefix that a finished request left behind, or None.
        batch: the running requests; `launched` is what the last step uploaded.
        waited: times a step in flight was awaited because what it held was needed.
        retracted: requests that gave their pages back.
    """

    runtime: Runtime
    slots: SlotPool | HybridSlotPool
    pages: PagePool
    steps: ManualStream
    depth: int
    watcher: Watcher
    waiting: deque[Request] = attrs.field(factory=deque)
    cache: PageLease | None = None
    waited: int = 0
    retracted: int = 0
    launched: Running | None = None
    batch: Running = attrs.field(init=False)
    _writes: list[TableWrite] = attrs.field(factory=list)
    _real: deque[Fence] = attrs.field(factory=deque)  # of the device itself, which may be slower than the steps

    def __attrs_post_init__(self) -> None:
        self.batch = Running.empty(self.runtime)

    def step(self) -> int:
        """Plans and launches one step; says how many requests it runs."""
        self._next_step()
        self._leave()
        if not self._retract():
            self._admit()
        if len(self.batch):
            self._launch()
        return len(self.batch)

    def _next_step(self) -> None:
        """A step begins before it is planned: what planning uploads is of this step, and awaited with it."""
        self._real.append(self.runtime.record())
        while len(self._real) >= self.runtime.steps_in_flight:
            self._real.popleft().wait()
        self.runtime.next_step()

    def _leave(self) -> None:
        batch = self.batch
        done = batch.num_generated.np >= np.array([request.answer for request in batch.requests], np.int64)
        aborted = np.array([request.state == "aborted" for request in batch.requests], np.bool_)
        leaves = done | aborted
        if leaves.any():
            self._keep_prefix(batch.filter(done & ~aborted))
            for request in self._give_back(leaves):
                if request.state == "running":
                    request.state = "finished"

    def _keep_prefix(self, done: Running) -> None:
        if len(done):
            size = self.pages.page_size
            self.forget_prefix()
            first = done.filter([0])
            self.cache = self.pages.hold(first.slots, int(first.seq_lens.np[0]) // size * size)

    def forget_prefix(self) -> None:
        """The cache lets go; a step in flight may still read the pages."""
        if self.cache is not None:
            self.cache.release(after=self.steps.last)
            self.cache = None

    def _give_back(self, leaves: npt.NDArray[np.bool_]) -> tuple[Request, ...]:
        leaving = self.batch.filter(leaves)
        for request, generated in zip(leaving.requests, leaving.num_generated.np.tolist(), strict=True):
            request.generated = generated
        self.pages.release_requests(leaving.slots, after=self.steps.last)
        self.batch = self.batch.filter(~leaves)
        return leaving.requests

    def _retract(self) -> bool:
        retracted = False
        while self._lacking() > self._available():
            if self.cache is not None:
                self.forget_prefix()
                continue
            for request in self._give_back(np.arange(len(self.batch)) == len(self.batch) - 1):
                request.state = "waiting"
                self.waiting.appendleft(request)
            self.retracted += 1
            retracted = True
        return retracted

    def _available(self) -> int:
        stats = self.pages.stats
        return stats.free + stats.pending

    def _lacking(self) -> int:
        """Pages that the rows need on top for this step."""
        size, lens = self.pages.page_size, self.batch.seq_lens.np
        wanted = -(-(lens + self._chunks()) // size) - self.pages.allocated(self.batch.slots) // size
        return int(np.maximum(wanted, 0).sum())

    def _left(self) -> Ints:
        """Tokens that each row computes until its next one comes out."""
        left: Ints = np.maximum(self.batch.prefill_lens.np - self.batch.seq_lens.np, 1)
        return left

    def _chunks(self) -> Ints:
        left = self._left()
        chunks: Ints = np.clip(BUDGET - (np.cumsum(left) - left), 0, left)
        return chunks

    def _admit(self) -> None:
        while self.waiting and len(self.batch) < BUDGET:
            request, slots = self.waiting[0], self.slots.stats
            needed = -(-request.to_prefill // self.pages.page_size) + self._lacking()
            if needed > self._available() and self.cache is not None and not len(self.batch):
                self.forget_prefix()
            if slots.free - slots.free_reserved + slots.pending < 1 or needed > self._available():
                return
            self._join(self.waiting.popleft())

    def _join(self, request: Request) -> None:
        slots = self._when_free(self._take_slot)
        start, extension = 0, None
        if request.shares and self.cache is not None and self.cache.tokens < request.to_prefill:
            extension = self.pages.share(self.cache, slots, self.cache.tokens)
            self._writes.append(extension.entry())
            start = self.cache.tokens
        if isinstance(self.slots, HybridSlotPool):
            self._writes.append(self.slots.state_entry(slots))
        self.watcher.joined(request, extension)
        request.state = "running"
        request.last, request.bound, request.most = 1000 * request.number + request.generated, start, start
        joining = Running.build(
            self.runtime,
            slots=slots,
            seq_lens=[start],
            prefill_lens=[request.to_prefill],
            num_generated=[request.generated],
            temperature=[request.number / 2],
            bound_lens=[start],
            last_token=[request.last],
            requests=[request],
        )
        self.batch = self.batch.merge(joining)

    def _take_slot(self) -> Slots:
        if isinstance(self.slots, HybridSlotPool):
            return self.slots.take(1, write=False)
        return self.slots.take(1)

    def _launch(self) -> None:
        while self.steps.depth >= self.depth:
            self.steps.complete()
        chunks, left = self._chunks(), self._left()
        batch = self.batch.advance("seq_lens", chunks).advance("num_generated", (chunks == left).astype(np.int64))
        batch = batch.advance("bound_lens", 2)
        extension = self._when_free(lambda: self.pages.advance(batch.slots, chunks))
        self.watcher.extended(batch, extension)
        batch.upload(
            writes=[*self._writes, extension.entry()],
            extras={"positions": extension.positions, "out_cache_loc": extension.tokens.np},
        )
        self._writes.clear()
        self.launched = batch
        self._forward(batch)
        if self.pages.token_table is not None:
            self.pages.token_table.read_until(self.runtime.record())
        self.steps.record()

    def _forward(self, batch: Running) -> None:
        """One token a row comes out, and one of the two drafts is accepted."""
        launch, tokens, lens = self.runtime.launch, batch.last_token.device, batch.bound_lens.device
        sampled = launch(torch.add, tokens, 1, reads=(tokens,), name="forward")
        accepted = launch(torch.sub, lens, 1, reads=(lens,), name="verify drafts")
        bounds = MirroredTensor.from_pair(self.runtime, batch.bound_lens.np, accepted, contract="upper_bound")
        self.batch = batch.evolve(last_token=sampled, bound_lens=bounds)
        for request in batch.requests:
            request.last += 1
            request.bound += 1
            request.most += 2

    def resolve_bounds(self) -> None:
        """Waits for the device once, and knows the lengths exactly."""
        self.batch = self.batch.evolve(bound_lens=self.batch.bound_lens.resolve())
        for request in self.batch.requests:
            request.most = request.bound

    def _when_free(self, take: Callable[[], T]) -> T:
        while True:
            try:
                return take()
            except PoolExhaustedError:  # nothing was taken; plans count what is pending as free
                if not self.steps.complete():
                    raise
                self.waited += 1
