"""Everything together, driven by a scheduler: who finds whose tokens where, and when a slot changes hands."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants
from batchstate.contracts import Contract
from batchstate.hybrid import HybridSlotPool
from batchstate.pages import Extension, PagePool
from batchstate.pools import SlotPool
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.machines.engine_scheduler import Request, Running, Scheduler
from batchstate.testing.sync_guard import no_hidden_sync

_MOST_TOKENS = 12
_DEPTH = 3


class EngineMachine(Machine):
    """Requests arrive, run, hang up and finish, while steps end late."""

    NAME = "engine"

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
        self.slots = pool.slots if isinstance(pool, HybridSlotPool) else pool
        self.table = self.slots.table("req_to_token", (_MOST_TOKENS,), holds="token", host=True)
        self.pages = PagePool(
            self.rt,
            pool,
            max(num_pages, -(-_MOST_TOKENS // page_size)),
            page_size,
            max_tokens_per_request=_MOST_TOKENS,
            token_table=self.table,
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
        self.stamps[request.number] = [] if shared is None else [self.memory[token] for token in shared.tokens.np]
        self.reached("a shared prefix", shared is not None and len(shared) > 0)

    def extended(self, batch: Running, extension: Extension) -> None:
        """No token is written that a step in flight still reads."""
        self.reading = [(fence, tokens) for fence, tokens in self.reading if not fence.query()]
        owners = dict(zip(batch.slots.np.tolist(), batch.requests, strict=True))
        written = extension.tokens.np
        read = np.isin(written, [token for _, tokens in self.reading for token in tokens])
        invariants.slot_in_flight(written, read, object="tokens of steps in flight", operation="extend")
        for slot, token in zip(extension.slots.tolist(), written.tolist(), strict=True):
            self.written += 1
            self.memory[token] = self.written
            self.stamps[owners[slot].number].append(self.written)

    # Judging

    def judge(self) -> None:
        """Lengths, tables, tokens and both sides of the batch agree; every law holds."""
        self.pool.verify()
        self.pages.verify()
        batch = self.engine.batch
        batch.check("judge")
        agree([r for r in self.requests if r.state == "running"], sorted(batch.requests, key=_number), "running")
        agree_on(self.pages.committed(batch.slots), np.array(batch.seq_lens.np), "committed tokens")
        stats, size = self.slots.stats, self.slots.size
        invariants.slot_conservation(stats.free, stats.pending, len(batch), size, object="slots of running requests")
        self._judge_tables(batch)
        self._judge_sides(batch)
        self.reached("two steps in flight", self.steps.depth >= 2)
        self.reached("retraction", self.engine.retracted > 0)
        self.reached("waited for a step that held what was needed", self.engine.waited > 0)
        self.reached("a page held by two", self.pages.stats.shared > 0)
        self.reached("slots free behind step N while N+1 is in flight", stats.pending > 0 and self.steps.depth >= 2)

    def _judge_tables(self, batch: Running) -> None:
        """What the device finds in each row is where the page table says, and what this request wrote there."""
        table, size = self.rt.inspect(self.table.device), self.pages.page_size
        lengths = batch.seq_lens.np.tolist()
        for slot, length, request in zip(batch.slots.np.tolist(), lengths, batch.requests, strict=True):
            positions = np.arange(length)
            tokens = (self.pages.page_table[slot][positions // size] * size + positions % size).tolist()
            agree(tokens, table[slot, :length].tolist(), f"req_to_token of slot {slot}")
            found = [self.memory[token] for token in tokens]
            agree(self.stamps[request.number], found, f"tokens of request {request.number}")

    def _judge_sides(self, batch: Running) -> None:
        """The two sides of what was launched, and what the forward left on the device, request by request."""
        agree([r.most for r in batch.requests], batch.bound_lens.np.tolist(), "host bounds of lengths")
        launched = self.engine.launched
        if launched is not None:
            launched.check("judge")
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
