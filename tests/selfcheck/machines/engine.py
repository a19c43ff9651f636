"""Everything together, driven by a scheduler: who finds whose tokens where, and when a slot changes hands."""

from collections import deque
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Contract, HybridSlotPool, Locations, MirroredTensor, device_only, invariants, mirrored
from batchstate.kv.pages import Extension, PageLease, PagePool
from batchstate.runtime import Fence
from batchstate.tables import TableWrite
from batchstate.testing import ManualFence, ManualStream, no_hidden_sync
from examples.traffic.scheduler import BatchScheduler, ScheduledBatch, StepPlan
from tests.selfcheck.machine import Machine, agree, agree_on, ask
from tests.worlds import Pools

BUDGET = 6  # tokens per step
DEPTH = 3  # steps in flight at most
WINDOW = 4  # tokens of a request whose KV the layers with a window keep


class EngineBatch(ScheduledBatch):
    num_generated = mirrored(torch.int32)
    temperature = mirrored(torch.float32, pad=1.0)
    bound_lens = mirrored(torch.int64, contract="upper_bound")
    last_token = device_only(torch.int64)


@final
@attrs.define(eq=False)
class EngineRequest:
    number: int
    prompt: int  # tokens, as of the answer
    answer: int
    shares: bool = False  # begins with the prefix that the cache holds, if that is shorter than its prompt
    num_generated: int = 0  # tokens generated when it last left the batch
    state: str = "waiting"  # or running, finished, aborted
    forwards: int = 0  # that it has taken part in since it joined
    last: int = 0  # `last_token` on the device
    bound: int = 0  # `bound_lens` on the device
    most: int = 0  # `bound_lens` on the host

    @property
    def adapter(self) -> int:
        return self.number % 3

    @property
    def tokens_to_prefill(self) -> int:
        return self.prompt + self.num_generated


@final
class SmallEngine(BatchScheduler[EngineBatch, EngineRequest]):
    """A scheduler with a prefix cache, whose forward only counts. It tells its machine which rows join and grow."""

    def __init__(self, pages: PagePool, machine: "EngineMachine") -> None:
        super().__init__(pages, EngineBatch.empty(pages.runtime), max_tokens_per_step=BUDGET)
        self.slots = pages.slots
        self.steps = ManualStream()  # in flight
        self.cache: PageLease | None = None  # the prefix that a finished request left behind
        self.launched: EngineBatch | None = None  # uploaded by the last step
        self.waited = 0  # times that slots or pages of a step in flight were needed
        self.adapters = pages.slots.adopt(
            pages.runtime.device_zeros((pages.slots.capacity,), torch.int32), "adapter_ids", host=True
        )
        memory = pages.runtime.device_zeros((pages.location_capacity,), torch.int32)
        self.window = pages.adopt(memory, "full_to_window", by="location", host=True)  # that of the last tokens is kept
        self._machine = machine
        self._writes: list[TableWrite] = []
        self._reads: list[Locations] = []  # of the next forward
        self.states: torch.Tensor | None = None  # forwards of each request, in one of its states
        if isinstance(self.slots, HybridSlotPool):
            self.states = pages.runtime.device_zeros((self.slots.state_capacity(),), torch.int64)
        self._begun: list[npt.NDArray[np.int64]] = []  # states of requests that join
        self._real: deque[Fence] = deque()  # of the device itself, which may be slower than `steps`

    def step(self) -> int:
        self._next_step()
        plan = self.schedule()
        for request in self.waiting:
            request.state = "waiting"  # a retracted one, too
        if len(self.batch) and plan is not None:
            self._launch(plan)
        return len(self.batch)

    def _next_step(self) -> None:
        """A step begins before it is planned: uploads of the plan are of this step, and awaited with it."""
        self._real.append(self.runtime.record())
        while len(self._real) >= self.runtime.steps_in_flight:
            self._real.popleft().wait()
        self.runtime.next_step()

    @property
    def slots_available(self) -> int:
        """Slots without an owner, as the pool says: one that leaked is missing."""
        stats = self.slots.stats
        return stats.free - stats.free_reserved + stats.pending

    @property
    def last_step(self) -> Fence | None:
        return self.steps.last

    def wait_for_step(self) -> bool:
        completed = self.steps.complete() > 0
        self.waited += completed
        return completed

    def leave(self) -> None:
        batch = self.batch
        done = batch.num_generated.np >= np.array([request.answer for request in batch.requests], np.int64)
        aborted = np.array([request.state == "aborted" for request in batch.requests], np.bool_)
        leaves = done | aborted
        if leaves.any():
            self._keep_prefix(batch.filter(done & ~aborted))
            for request in self.give_back(leaves):
                if request.state == "running":
                    request.state = "finished"

    def _keep_prefix(self, done: EngineBatch) -> None:
        if len(done):
            size = self.pages.page_size
            self.reclaim()
            first = done.filter([0])
            self.cache = self.pages.hold(first.slots, int(first.seq_lens.np[0]) // size * size)

    def reclaim(self) -> bool:
        if self.cache is None:
            return False
        self.cache.release(after=self.steps.last)
        self.cache = None
        return True

    def join(self, requests: Sequence[EngineRequest]) -> StepPlan:
        """Requests get slots and rows before the step, since some begin on a shared prefix."""
        hybrid = self.slots if isinstance(self.slots, HybridSlotPool) else None
        n = len(requests)
        slots = self.when_free(lambda: self.slots.take(n) if hybrid is None else hybrid.take(n, write=False))
        if hybrid is not None:
            self._writes.append(hybrid.state_entry(slots))
            self._begun.append(hybrid.states_of(slots)[:, 0])
        self._writes.append(self.adapters.entry(slots, None, [request.adapter for request in requests]))
        for request, slot in zip(requests, slots.split([1] * n), strict=True):
            start, extension = 0, None
            if request.shares and self.cache is not None and self.cache.tokens < request.tokens_to_prefill:
                start = self.cache.tokens
                extension = self.pages.share(self.cache, slot, start)
                self._writes.append(extension.entry())
                self._reads.append(extension.locations)
            self._machine.on_join(request, extension)
            request.state = "running"
            request.forwards = 0
            request.last = 1000 * request.number + request.num_generated
            request.bound = request.most = start
        joined = EngineBatch.build(
            self.runtime,
            slots=slots,
            seq_lens=[request.bound for request in requests],
            prefill_lens=[request.tokens_to_prefill for request in requests],
            num_generated=[request.num_generated for request in requests],
            temperature=[request.number / 2 for request in requests],
            bound_lens=[request.bound for request in requests],
            last_token=[request.last for request in requests],
            requests=requests,
        )
        self.batch = self.batch.merge(joined)
        return self.plan()

    def _launch(self, plan: StepPlan) -> None:
        while self.steps.depth >= DEPTH:
            self.steps.complete()
        batch = self.batch.advance(
            {"seq_lens": plan.chunks, "num_generated": plan.samples.astype(int), "bound_lens": 2}
        )
        extension = self.when_free(lambda: self.pages.advance(batch.slots, plan.chunks))
        self._machine.on_extend(batch, extension)
        self._writes.append(self.window.entry(extension.locations, None, in_window(extension)))
        self._reads.append(extension.locations)
        extras: dict[str, object] = {"positions": extension.positions, "out_cache_loc": extension.locations}
        turns = None
        if isinstance(self.slots, HybridSlotPool):  # a request that puts in no token keeps its state
            turns = self.slots.state_turns(batch.filter(plan.chunks > 0).slots)
            extras |= {**turns.extras, "begun": np.concatenate([np.empty(0, np.int64), *self._begun])}
            self._begun.clear()
        uploaded = batch.upload(writes=[*self._writes, extension.entry()], extras=extras)
        self._writes.clear()
        self.launched = batch
        if turns is not None and self.states is not None:
            self.states.index_fill_(0, uploaded["begun"], 0)
            counted = self.states.index_select(0, uploaded["state_reads"]) + 1
            self.states.index_copy_(0, uploaded["state_writes"], counted)
            turns.launched()
            for request, chunk in zip(batch.requests, plan.chunks.tolist(), strict=True):
                request.forwards += chunk > 0
        self._forward(batch)
        self.pages.commit(batch.slots, batch.seq_lens)
        self.steps.record()

    def _forward(self, batch: EngineBatch) -> None:
        """One token per row comes out, and one of the two drafts is accepted."""
        read = [self.adapters, self.pages.req_to_token]
        if isinstance(self.slots, HybridSlotPool):
            read.append(self.slots.state_table())
        for table in read:
            if table is not None:
                table.device_for(batch.slots)
                table.read_until(self.runtime.record())
        for locations in self._reads:
            self.window.device_for(locations)
        self._reads.clear()
        self.window.read_until(self.runtime.record())
        launch, tokens, lens = self.runtime.launch, batch.last_token.device, batch.bound_lens.device
        sampled = launch(torch.add, tokens, 1, reads=(tokens,), name="forward")
        accepted = launch(torch.sub, lens, 1, reads=(lens,), name="verify drafts")
        bounds = MirroredTensor.from_pair(self.runtime, batch.bound_lens.np, accepted, contract="upper_bound")
        self.batch = batch.replace(last_token=sampled, bound_lens=bounds)
        for request in batch.requests:
            request.last += 1
            request.bound += 1
            request.most += 2


def in_window(extension: Extension) -> npt.NDArray[np.int64]:
    """Where tokens lie in the window's memory, which goes round: int64[t]."""
    where: npt.NDArray[np.int64] = extension.slots * 100 + extension.positions % WINDOW
    return where


_MAX_TOKENS = 12


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
        "no adapter in a slot that had one",
        "a request that sat a step out",
    )

    @initialize(size=st.integers(1, 4), num_pages=st.integers(6, 12), page_size=st.integers(1, 3), hybrid=st.booleans())
    def begin(self, size: int, num_pages: int, page_size: int, hybrid: bool) -> None:
        """Opens an engine in which any one request fits, and hardly two long ones."""
        self.open()
        self._windows.enter_context(no_hidden_sync(self.rt))
        slots = HybridSlotPool(self.rt, size, states=2 * size, states_per_slot=2) if hybrid else None
        pages = max(num_pages, -(-_MAX_TOKENS // page_size))
        self.pools = Pools.of(self.rt, size, pages=pages, page_size=page_size, longest=_MAX_TOKENS, slots=slots)
        self.slots, self.table, self.pages = self.pools.slots, self.pools.table, self.pools.pages
        self.engine = SmallEngine(self.pages, self)
        self.steps = self.engine.steps
        self.memory: dict[int, int] = {}  # location -> stamp
        self.stamps: dict[int, list[int]] = {}  # request -> stamps of its tokens
        self.written = 0
        self.reading: list[tuple[ManualFence, set[int]]] = []  # locations that each step in flight reads
        self.requests: list[EngineRequest] = []
        self.adapted: set[int] = set()  # slots that have had an adapter

    # Told by the engine

    def on_join(self, request: EngineRequest, shared: Extension | None) -> None:
        self.stamps[request.number] = [] if shared is None else [self.memory[token] for token in shared.locations.np]
        self.reached("a shared prefix", shared is not None and len(shared) > 0)

    def on_extend(self, batch: EngineBatch, extension: Extension) -> None:
        """No token is written that a step in flight still reads."""
        self.reading = [(fence, tokens) for fence, tokens in self.reading if not fence.query()]
        owners = dict(zip(batch.slots.np.tolist(), batch.requests, strict=True))
        written = extension.locations.np
        read = np.isin(written, [token for _, tokens in self.reading for token in tokens])
        ask(invariants.slot_in_flight, written, read, object="tokens of steps in flight", operation="extend")
        for slot, token in zip(extension.slots.tolist(), written.tolist(), strict=True):
            self.written += 1
            self.memory[token] = self.written
            self.stamps[owners[slot].number].append(self.written)

    # Checking

    def check(self) -> None:
        self.slots.verify()
        self.pages.verify()
        batch = self.engine.batch
        batch.check("check")
        by_number = sorted(batch.requests, key=lambda request: request.number)
        agree([r for r in self.requests if r.state == "running"], by_number, "running")
        agree_on(self.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        stats, size = self.slots.stats, self.slots.size
        invariants.slot_conservation(stats.free, stats.pending, len(batch), size, object="slots of running requests")
        self._check_tables(batch)
        self._check_states(batch)
        self._check_sides(batch)
        self.reached("two steps in flight", self.steps.depth >= 2)
        self.reached("retraction", self.engine.retractions > 0)
        self.reached("waited for a step that held what was needed", self.engine.waited > 0)
        self.reached("a page held by two", self.pages.stats.shared > 0)
        self.reached("slots free behind step N while N+1 is in flight", stats.pending > 0 and self.steps.depth >= 2)

    def _check_tables(self, batch: EngineBatch) -> None:
        """Each row on the device names the locations of the page table, and they hold the tokens of this request."""
        table, adapters = (self.rt.inspect(part.memory) for part in (self.table, self.engine.adapters))
        lengths = batch.seq_lens.np.tolist()
        for slot, length, request in zip(batch.slots.np.tolist(), lengths, batch.requests, strict=True):
            tokens = self.pools.locations(slot, range(length))
            agree(tokens, table[slot, :length].tolist(), f"req_to_token of slot {slot}")
            agree(request.adapter, adapters[slot].item(), f"adapter of request {request.number}")
            self.reached("no adapter in a slot that had one", not request.adapter and slot in self.adapted)
            self.adapted |= {slot} if request.adapter else set()
            stamps = [self.memory[token] for token in tokens]
            agree(self.stamps[request.number], stamps, f"tokens of request {request.number}")

    def _check_states(self, batch: EngineBatch) -> None:
        if isinstance(self.slots, HybridSlotPool) and self.engine.states is not None:
            counts = self.rt.inspect(self.engine.states)[self.slots.state_turns(batch.slots).reads]
            agree([request.forwards for request in batch.requests], counts.tolist(), "forwards counted in states")
            self.reached("a request that sat a step out", len({r.forwards % 2 for r in batch.requests}) > 1)

    def _check_sides(self, batch: EngineBatch) -> None:
        """The two sides of the launched batch, and the columns that the forward left on the device."""
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
        for _ in range(n):
            request = EngineRequest(len(self.requests) + 1, prompt, answer, shares)
            self.requests.append(request)
            self.engine.waiting.append(request)

    @rule(n=st.integers(1, 2))
    def step(self, n: int) -> None:
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

    def _note_reads(self, batch: EngineBatch) -> None:
        fence = self.steps.last
        if fence is not None:
            rows = zip(batch.slots.np.tolist(), batch.seq_lens.np.tolist(), strict=True)
            tokens = {token for slot, length in rows for token in self.pools.locations(slot, range(length))}
            self.reading.append((fence, tokens))

    @rule(n=st.integers(1, 2))
    def end(self, n: int) -> None:
        self.steps.complete(n)

    @precondition(lambda self: bool(self.engine.waiting) or len(self.engine.batch) > 0)
    @rule(at=st.integers(0, 5))
    def abort(self, at: int) -> None:
        """A client hangs up, and the engine goes on."""
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
        """More than fits arrives, grows until a request has to give pages back; a step ends meanwhile, or not."""
        self.arrive(3, 2, 4, False)
        for _ in range(4):
            self._step()
        self.steps.complete(int(ended))

    @rule()
    def resolve(self) -> None:
        before, batch = self.rt.counters.forced_syncs, self.engine.batch
        bounded = batch.bound_lens.contract is Contract.UPPER_BOUND
        self.engine.batch = batch.replace(bound_lens=batch.bound_lens.resolve())
        for request in batch.requests:
            request.most = request.bound
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
        self.engine.reclaim()
        self.steps.complete(DEPTH)
        self.slots.expect_idle()
        self.pages.expect_idle()
        stats = self.pages.stats
        agree((self.slots.size, stats.num_pages), (self.slots.stats.free, stats.free), "free slots and pages when idle")
