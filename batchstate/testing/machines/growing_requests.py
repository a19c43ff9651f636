"""Requests for a page machine: they come, grow, commit, speculate and truncate."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate.errors import PoolExhaustedError
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.pages import Extension, PagePool
from batchstate.pools import SlotPool
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.ledger_model import LedgerModel
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.machines.page_model import PageModel
from batchstate.testing.snapshots import snapshot_pages, snapshot_slots

HAS_REQUESTS = precondition(lambda self: bool(self.held))
EXHAUSTED = {True: "exhausted while pending would suffice", False: "exhausted for good"}


class GrowingRequests(Machine):
    """Requests that come, grow and take tokens back; subclasses let them share and leave."""

    @initialize(size=st.integers(2, 4), num_pages=st.integers(3, 8), page_size=st.integers(1, 3))
    def begin(self, size: int, num_pages: int, page_size: int) -> None:
        """Opens a pool of slots and a pool of pages."""
        self.open()
        self.slots = SlotPool(self.rt, size)
        self.most = 4 * page_size - (page_size > 1)
        self.pages = PagePool(self.rt, self.slots, num_pages, page_size, max_tokens_per_request=self.most)
        self.table = self.slots.table("req_to_token", (self.most,), holds="token", host=True)
        self.model = PageModel(self.pages, LedgerModel(num_pages))
        self.held: dict[int, Slots] = {}
        self.gone: list[Slots] = []
        self.steps = ManualStream()
        self.extend_to(self.take(1), [page_size])

    def judge(self) -> None:
        """Pages, lengths, the token table, and every law of both pools."""
        self.slots.verify()
        self.model.judge()
        for slot, handle in self.held.items():
            holding = self.model.requests[slot]
            agree(len(holding.stamps), int(self.pages.committed(handle)[0]), f"committed tokens of slot {slot}")
            allocated = len(holding.pages) * self.pages.page_size
            agree(allocated, int(self.pages.allocated(handle)[0]), f"allocated tokens of slot {slot}")
        stats = self.pages.stats
        if not self.steps.depth:
            agree(0, stats.pending, "pages pending when no step is in flight")
        if stats.live:
            with self.refused(Code.SLOT_CONSERVATION):
                self.pages.expect_idle()
        self.reached("two steps in flight", self.steps.depth >= 2)
        self.reached("a page held by three", any(self.model.holders(page) > 2 for page in self.model.ledger.live))

    def snapshot(self) -> object:
        """Both pools."""
        return snapshot_slots(self.slots), snapshot_pages(self.pages)

    def handles(self, slots: list[int]) -> Slots:
        """The handles of live slots."""
        return Slots.cat([self.slots.take(0), *(self.held[slot] for slot in slots)])

    def some(self, data: st.DataObject, least: int = 1) -> list[int]:
        """Some live slots."""
        return data.draw(st.lists(st.sampled_from(list(self.held)), min_size=least, unique=True), label="slots")

    def fence(self, data: st.DataObject) -> ManualFence | None:
        """A step in flight, or None."""
        return data.draw(st.sampled_from([None, *self.steps.in_flight]), label="after")

    # Steps and slots

    @rule(launched=st.integers(0, 2), ended=st.integers(0, 3))
    def run(self, launched: int, ended: int) -> None:
        """Steps begin on the device, and the oldest end."""
        for _ in range(launched):
            self.steps.record()
        self.steps.complete(ended)

    @rule(n=st.integers(1, 2), length=st.integers(0, 6))
    def admit(self, n: int, length: int) -> None:
        """Requests come with a prompt."""
        slots = self.take(n)
        self.extend_to(slots, [length] * len(slots))

    def take(self, n: int) -> list[int]:
        """Takes up to `n` slots, without pages; their numbers."""
        n = min(n, self.slots.stats.free)
        taken = self.slots.take(n)
        for at, slot in enumerate(taken.np.tolist()):
            self.held[slot] = taken.take([at])
            self.model.admit(slot)
        return [int(slot) for slot in taken.np]

    # Growing

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(0, 3))
    def extend(self, data: st.DataObject, more: int) -> None:
        """Requests get tokens, or all are refused: too long, too many pages, or on a page that others hold."""
        slots = self.some(data)
        self.extend_to(slots, [len(self.model.requests[slot].stamps) + more for slot in slots])

    def extend_to(self, slots: list[int], lengths: list[int]) -> bool:
        """Extends requests, or finds the call refused as it has to be; whether it went through."""
        return self._grown(slots, lengths, lambda: self.pages.extend(self.handles(slots), np.array(lengths, np.int64)))

    @HAS_REQUESTS
    @rule(data=st.data(), counts=st.lists(st.integers(0, 2), min_size=4, max_size=4), one=st.booleans())
    def advance(self, data: st.DataObject, counts: list[int], one: bool) -> None:
        """A decode step: one token each, or some more."""
        slots = self.some(data)
        more = [1] * len(slots) if one else counts[: len(slots)]
        lengths = [len(self.model.requests[slot].stamps) + n for slot, n in zip(slots, more, strict=True)]
        n = 1 if one else np.array(more, dtype=np.int64)
        self._grown(slots, lengths, lambda: self.pages.advance(self.handles(slots), n))

    def _grown(self, slots: list[int], lengths: list[int], call: Callable[[], Extension]) -> bool:
        """Runs a call that extends, and expects what the model does. Whether it went through."""
        if not all(self.model.writable(slot, length) for slot, length in zip(slots, lengths, strict=True)):
            self.reached("a write into a shared page refused")
        if not self._allowed(slots, lengths, call, writes=True):
            return False
        extension = call()
        agree_on(np.diff([0, *np.cumsum(extension.counts)]), extension.counts, "counts")
        self.model.wrote(slots, lengths, extension)
        if len(extension):
            write = extension.entry(self.table)
            self.table.write(extension.slots, extension.positions, extension.tokens)
            agree_on(write.values, extension.tokens.np.astype(np.int32), "values of the table write")
        return True

    def _allowed(self, slots: list[int], lengths: list[int], call: Callable[[], object], *, writes: bool) -> bool:
        """Whether a call that grows requests is to be refused; if so, it is tried."""
        pairs = list(zip(slots, lengths, strict=True))
        free, pending = self.pages.stats.free, self.pages.stats.pending
        lacks = sum(self.model.lacks(slot, length) for slot, length in pairs)
        if any(length > self.most for length in lengths):
            self.reached("a request too long refused")
            with self.refused(Code.LENGTH_ORDER):
                call()
        elif writes and not all(self.model.writable(slot, length) for slot, length in pairs):
            with self.refused(Code.PAGE_OWNER):
                call()
        elif lacks > free:
            waits = lacks <= free + pending
            self.reached(EXHAUSTED[waits])
            with self.refused(PoolExhaustedError):
                call()
        else:
            return True
        return False

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def grow(self, data: st.DataObject, length: int) -> None:
        """Pages are allocated, and no token is committed."""
        self._grow(self.some(data), length)

    def _grow(self, slots: list[int], length: int) -> None:
        def call() -> None:
            self.pages.grow(self.handles(slots), length)

        if self._allowed(slots, [length] * len(slots), call, writes=False):
            call()
            for slot in slots:
                self.model.grew(slot)

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow_and_commit(self, data: st.DataObject, more: int) -> None:
        """Pages first; the tokens are committed when they are known, and perhaps fewer."""
        slot = self.some(data)[0]
        length = min(self.most, len(self.model.requests[slot].stamps) + more)
        self._grow([slot], length)
        self._commit(slot, length - more // 2)

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def commit(self, data: st.DataObject, length: int) -> None:
        """What is allocated is committed; what is not, and fewer than before, is refused."""
        self._commit(self.some(data)[0], length)

    def _commit(self, slot: int, length: int) -> None:
        holding = self.model.requests[slot]
        handle = self.held[slot]
        fits = len(holding.stamps) <= length <= min(self.most, len(holding.pages) * self.pages.page_size)
        if not fits or not self.model.writable(slot, length):
            with self.refused(Code.LENGTH_ORDER if not fits else Code.PAGE_OWNER):
                self.pages.commit(handle, length)
            return
        self.reached("allocated first and committed later", length > len(holding.stamps))
        self.pages.commit(handle, length)
        self.model.commit(slot, length)

    @HAS_REQUESTS
    @rule(data=st.data(), back=st.integers(0, 4))
    def truncate(self, data: st.DataObject, back: int) -> None:
        """Tokens are taken back after rejected speculation."""
        slots, fence = self.some(data), self.fence(data)
        lengths = [max(0, len(self.model.requests[slot].stamps) - back) for slot in slots]
        self.pages.truncate(self.handles(slots), np.array(lengths, dtype=np.int64), after=fence)
        for slot, length in zip(slots, lengths, strict=True):
            self.model.cut(slot, length, fence)
        self.reached("tokens taken back", back > 0 and bool(slots))

    @HAS_REQUESTS
    @rule(data=st.data(), drafts=st.integers(1, 3), accepted=st.integers(0, 3))
    def speculate(self, data: st.DataObject, drafts: int, accepted: int) -> None:
        """Extend by drafts, launch, take the rejected ones back, extend again."""
        slots = self.some(data)
        before = [len(self.model.requests[slot].stamps) for slot in slots]
        if self.extend_to(slots, [length + drafts for length in before]):
            fence = self.steps.record()
            kept = np.array([length + min(accepted, drafts) for length in before], dtype=np.int64)
            self.pages.truncate(self.handles(slots), kept, after=fence)
            for slot, length in zip(slots, kept.tolist(), strict=True):
                self.model.cut(slot, length, fence)
            self.extend_to(slots, [length + 1 for length in kept.tolist()])
