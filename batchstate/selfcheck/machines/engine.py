"""Everything together, driven by a scheduler: who finds whose tokens where, and when a slot changes hands."""

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import PoolExhaustedError
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Slots
from batchstate.kv.pages import Extension, PageLease, PagePool
from batchstate.mirror import Contract, MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.sync_guard import no_hidden_sync

# A scheduler as an engine would write it, with a forward that only counts: what the engine machine drives.
#
# One step: rows leave, rows are retracted when pages run out, waiting requests join, everyone extends, one upload, one
# forward. Slots and pages of rows that leave are freed behind the last launched step, which may still read them.

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
    slots: SlotPool
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
            extras={"positions": extension.positions, "out_cache_loc": extension.locations.np},
        )
        self._writes.clear()
        self.launched = batch
        self._forward(batch)
        if self.pages.req_to_token is not None:
            self.pages.req_to_token.read_until(self.runtime.record())
        self.steps.record()

    def _forward(self, batch: Running) -> None:
        """One token a row comes out, and one of the two drafts is accepted."""
        launch, tokens, lens = self.runtime.launch, batch.last_token.device, batch.bound_lens.device
        sampled = launch(torch.add, tokens, 1, reads=(tokens,), name="forward")
        accepted = launch(torch.sub, lens, 1, reads=(lens,), name="verify drafts")
        bounds = MirroredTensor.from_pair(self.runtime, batch.bound_lens.np, accepted, contract="upper_bound")
        self.batch = batch.replace(last_token=sampled, bound_lens=bounds)
        for request in batch.requests:
            request.last += 1
            request.bound += 1
            request.most += 2

    def resolve_bounds(self) -> None:
        """Waits for the device once, and knows the lengths exactly."""
        self.batch = self.batch.replace(bound_lens=self.batch.bound_lens.resolve())
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


_MOST_TOKENS = 12
_DEPTH = 3


class EngineMachine(Machine):
    """Requests arrive, run, hang up and finish, while steps end late."""

    NAME = "engine"
    TARGETS = (
        "two steps in flight",
        "retraction",
        "waited for a step that held what was needed",
        "slots free behind step N while N+1 is in flight",
        "abort with a step in flight",
        "a shared prefix",
        "a page held by two",
    )

    @initialize(
        size=st.integers(1, 4),
        num_pages=st.integers(6, 12),
        page_size=st.integers(1, 3),
        hybrid=st.booleans(),
    )
    def begin(self, size: int, num_pages: int, page_size: int, hybrid: bool) -> None:
        """Opens an engine in which any one request fits, and hardly two long ones."""
        self.open()
        self._windows.enter_context(no_hidden_sync(self.rt))
        pool = HybridSlotPool(self.rt, size, states=2 * size, states_per_slot=2) if hybrid else SlotPool(self.rt, size)
        self.slots = pool
        self.table = self.slots.table("req_to_token", (_MOST_TOKENS,), holds="location", host=True)
        self.pages = PagePool(
            self.rt,
            pool,
            max(num_pages, -(-_MOST_TOKENS // page_size)),
            page_size,
            max_tokens_per_request=_MOST_TOKENS,
            req_to_token=self.table,
        )
        self.steps = ManualStream()
        self.memory: dict[int, int] = {}  # token -> stamp
        self.stamps: dict[int, list[int]] = {}  # request -> stamps of its tokens
        self.written = 0
        self.reading: list[tuple[ManualFence, set[int]]] = []  # tokens that each step in flight reads
        self.requests: list[Request] = []
        self.pool = pool
        self.engine = Scheduler(self.rt, pool, self.pages, self.steps, _DEPTH, self)

    # What the scheduler tells

    def joined(self, request: Request, shared: Extension | None) -> None:
        """The request finds what the shared prefix holds."""
        self.stamps[request.number] = [] if shared is None else [self.memory[token] for token in shared.locations.np]
        self.reached("a shared prefix", shared is not None and len(shared) > 0)

    def extended(self, batch: Running, extension: Extension) -> None:
        """No token is written that a step in flight still reads."""
        self.reading = [(fence, tokens) for fence, tokens in self.reading if not fence.query()]
        owners = dict(zip(batch.slots.np.tolist(), batch.requests, strict=True))
        written = extension.locations.np
        read = np.isin(written, [token for _, tokens in self.reading for token in tokens])
        invariants.slot_in_flight(written, read, object="tokens of steps in flight", operation="extend")
        for slot, token in zip(extension.slots.tolist(), written.tolist(), strict=True):
            self.written += 1
            self.memory[token] = self.written
            self.stamps[owners[slot].number].append(self.written)

    # Judging

    def check(self) -> None:
        """Lengths, tables, tokens and both sides of the batch agree; every law holds."""
        self.pool.verify()
        self.pages.verify()
        batch = self.engine.batch
        batch.check("check")
        agree([r for r in self.requests if r.state == "running"], sorted(batch.requests, key=_number), "running")
        agree_on(self.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        stats, size = self.slots.stats, self.slots.size
        invariants.slot_conservation(stats.free, stats.pending, len(batch), size, object="slots of running requests")
        self._check_tables(batch)
        self._check_sides(batch)
        self.reached("two steps in flight", self.steps.depth >= 2)
        self.reached("retraction", self.engine.retracted > 0)
        self.reached("waited for a step that held what was needed", self.engine.waited > 0)
        self.reached("a page held by two", self.pages.stats.shared > 0)
        self.reached("slots free behind step N while N+1 is in flight", stats.pending > 0 and self.steps.depth >= 2)

    def _check_tables(self, batch: Running) -> None:
        """What the device finds in each row is where the page table says, and what this request wrote there."""
        table, size = self.rt.inspect(self.table.device), self.pages.page_size
        lengths = batch.seq_lens.np.tolist()
        for slot, length, request in zip(batch.slots.np.tolist(), lengths, batch.requests, strict=True):
            positions = np.arange(length)
            tokens = (self.pages.page_table[slot][positions // size] * size + positions % size).tolist()
            agree(tokens, table[slot, :length].tolist(), f"req_to_token of slot {slot}")
            found = [self.memory[token] for token in tokens]
            agree(self.stamps[request.number], found, f"tokens of request {request.number}")

    def _check_sides(self, batch: Running) -> None:
        """The two sides of what was launched, and what the forward left on the device, request by request."""
        agree([r.most for r in batch.requests], batch.bound_lens.np.tolist(), "host bounds of lengths")
        launched = self.engine.launched
        if launched is not None:
            launched.check("check")
            agree_on(launched.seq_lens.np, self.rt.inspect(launched.seq_lens.device), "seq_lens on the device")
        for column, values in (
            ("last_token", [r.last for r in batch.requests]),
            ("bound_lens", [r.bound for r in batch.requests]),
        ):
            device = self.rt.inspect(batch.filter(range(len(batch)))[column].device)
            invariants.mirror_equal(np.array(values, dtype=np.int64), device, object="model", column=column)

    # Rules

    @rule(n=st.integers(1, 2), prompt=st.integers(1, 6), answer=st.integers(1, 4), shares=st.booleans())
    def arrive(self, n: int, prompt: int, answer: int, shares: bool) -> None:
        """Requests come."""
        for _ in range(n):
            request = Request(len(self.requests) + 1, prompt, answer, shares)
            self.requests.append(request)
            self.engine.waiting.append(request)

    @rule(n=st.integers(1, 2))
    def step(self, n: int) -> None:
        """The engine steps; the device lags behind."""
        for _ in range(n):
            self._step()

    def _step(self) -> None:
        before, launched = self.rt.counters.snapshot(), self.engine.launched
        running = self.engine.step()
        cost = self.rt.counters - before
        agree(0, cost.forced_syncs, "forced syncs of a step")
        if running and self.engine.launched is not launched:
            agree(1, cost.host_to_device_copies, "copies of a step")
            batch = self.engine.launched
            if batch is not None:
                self._note_reads(batch)

    def _note_reads(self, batch: Running) -> None:
        fence, size = self.steps.last, self.pages.page_size
        if fence is not None:
            tokens = set()
            for slot, length in zip(batch.slots.np.tolist(), batch.seq_lens.np.tolist(), strict=True):
                pages = self.pages.page_table[slot]
                tokens |= {int(pages[at // size]) * size + at % size for at in range(length)}
            self.reading.append((fence, tokens))

    @rule(n=st.integers(1, 2))
    def end(self, n: int) -> None:
        """The oldest steps end."""
        self.steps.complete(n)

    @precondition(lambda self: bool(self.engine.waiting) or len(self.engine.batch) > 0)
    @rule(at=st.integers(0, 5))
    def abort(self, at: int) -> None:
        """A client hangs up, whatever its request is doing, and the engine goes on."""
        here = [*self.engine.batch.requests, *self.engine.waiting]
        request = here[at % len(here)]
        if request.state == "waiting":
            self.engine.waiting.remove(request)
        self.reached("abort with a step in flight", request.state == "running" and self.steps.depth > 0)
        request.state = "aborted"
        self._step()

    @rule(prompt=st.integers(1, 6), shares=st.booleans())
    def step_finish_admit_step(self, prompt: int, shares: bool) -> None:
        """A short request runs to its end beside the others, and another takes its place at once."""
        for answer in (1, 2):
            self.arrive(1, prompt, answer, shares)
            self._step()
        self._step()

    @rule(ended=st.booleans())
    def crowd(self, ended: bool) -> None:
        """More than fits arrives, grows until somebody has to give pages back, and a step ends meanwhile, or not."""
        self.arrive(3, 2, 4, False)
        for _ in range(4):
            self._step()
        self.steps.complete(int(ended))

    @rule()
    def resolve(self) -> None:
        """The host learns the exact lengths by waiting, and says so."""
        before = self.rt.counters.forced_syncs
        bounded = self.engine.batch.bound_lens.contract is Contract.UPPER_BOUND
        self.engine.resolve_bounds()
        agree(int(bounded), self.rt.counters.forced_syncs - before, "forced syncs of resolve")

    @rule()
    def drain(self) -> None:
        """Everyone finishes, and every slot and page is back."""
        for _ in range(200):
            if not self.engine.waiting and not len(self.engine.batch):
                break
            self._step()
            self.steps.complete()
        agree(set(), {r.state for r in self.requests} - {"finished", "aborted"}, "requests left behind")
        self.engine.forget_prefix()
        self.steps.complete(_DEPTH)
        self.pool.expect_idle()
        self.pages.expect_idle()
        stats = self.pages.stats
        agree((self.slots.size, stats.num_pages), (self.slots.stats.free, stats.free), "free slots and pages when idle")


def _number(request: Request) -> int:
    return request.number
