"""`PagePool` against a memory of stamps: growing, speculation, shared prefixes, fenced releases, exhaustion."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate.errors import PoolExhaustedError
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.pages import Extension, PageLease, PagePool
from batchstate.pools import SlotPool
from batchstate.testing.fences import ManualFence, ManualStream
from batchstate.testing.ledger_model import LedgerModel
from batchstate.testing.machine import Machine, agree, agree_on
from batchstate.testing.machines.page_model import Holding, PageModel
from batchstate.testing.machines.page_pool_misuse import MISUSES
from batchstate.testing.misuse import Misuse
from batchstate.testing.snapshots import snapshot_pages, snapshot_slots

_HAS_REQUESTS = precondition(lambda self: bool(self.held))


class PagePoolMachine(Machine):
    """Requests that grow, share and leave, in a pool too small for all of them."""

    NAME = "page_pool"

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
        self._extend(self._take(1), [page_size])

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
        slots = self._take(n)
        self._extend(slots, [length] * len(slots))

    def _take(self, n: int) -> list[int]:
        n = min(n, self.slots.stats.free)
        taken = self.slots.take(n)
        for at, slot in enumerate(taken.np.tolist()):
            self.held[slot] = taken.take([at])
            self.model.admit(slot)
        return taken.np.tolist()

    # Growing

    @_HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(0, 3))
    def extend(self, data: st.DataObject, more: int) -> None:
        """Requests get tokens, or all are refused: too long, too many pages, or on a page that others hold."""
        slots = self.some(data)
        self._extend(slots, [len(self.model.requests[slot].stamps) + more for slot in slots])

    def _extend(self, slots: list[int], lengths: list[int]) -> bool:
        return self._grown(slots, lengths, lambda: self.pages.extend(self.handles(slots), np.array(lengths, np.int64)))

    @_HAS_REQUESTS
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
            self.reached("exhausted while pending would suffice" if waits else "exhausted for good")
            with self.refused(PoolExhaustedError):
                call()
        else:
            return True
        return False

    @_HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def grow(self, data: st.DataObject, length: int) -> None:
        """Pages are allocated, and no token is committed."""
        slots = self.some(data)

        def call() -> None:
            self.pages.grow(self.handles(slots), length)

        if self._allowed(slots, [length] * len(slots), call, writes=False):
            call()
            for slot in slots:
                self.model.grew(slot)

    @_HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def commit(self, data: st.DataObject, length: int) -> None:
        """What is allocated is committed; what is not, and fewer than before, is refused."""
        slot = self.some(data)[0]
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

    @_HAS_REQUESTS
    @rule(data=st.data(), back=st.integers(0, 4))
    def truncate(self, data: st.DataObject, back: int) -> None:
        """Tokens are taken back after rejected speculation."""
        slots, fence = self.some(data), self.fence(data)
        lengths = [max(0, len(self.model.requests[slot].stamps) - back) for slot in slots]
        self.pages.truncate(self.handles(slots), np.array(lengths, dtype=np.int64), after=fence)
        for slot, length in zip(slots, lengths, strict=True):
            self.model.cut(slot, length, fence)
        self.reached("tokens taken back", back > 0 and bool(slots))

    @_HAS_REQUESTS
    @rule(data=st.data(), drafts=st.integers(1, 3), accepted=st.integers(0, 3))
    def speculate(self, data: st.DataObject, drafts: int, accepted: int) -> None:
        """Extend by drafts, launch, take the rejected ones back, extend again."""
        slots = self.some(data)
        before = [len(self.model.requests[slot].stamps) for slot in slots]
        if self._extend(slots, [length + drafts for length in before]):
            fence = self.steps.record()
            kept = np.array([length + min(accepted, drafts) for length in before], dtype=np.int64)
            self.pages.truncate(self.handles(slots), kept, after=fence)
            for slot, length in zip(slots, kept.tolist(), strict=True):
                self.model.cut(slot, length, fence)
            self._extend(slots, [length + 1 for length in kept.tolist()])

    # Sharing

    @_HAS_REQUESTS
    @rule(data=st.data(), pages=st.integers(0, 3), n=st.integers(1, 2))
    def share(self, data: st.DataObject, pages: int, n: int) -> None:
        """New requests begin with whole pages of another's prefix."""
        slot = self.some(data)[0]
        self._share(self.held[slot], self.model.requests[slot], pages, n)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), n=st.integers(1, 2))
    def share_cached(self, data: st.DataObject, n: int) -> None:
        """New requests begin with a prefix that is held for them."""
        lease, holding = data.draw(st.sampled_from(self.model.leases), label="lease")
        if not self.slots.stats.free and self.held:
            self._finish([list(self.held)[-1]], None)
        self.reached("a prefix shared from a lease", self._share(lease, holding, 9, n) > 0)

    def _share(self, source: Slots | PageLease, holding: Holding, pages: int, n: int) -> int:
        tokens = min(pages, len(holding.stamps) // self.pages.page_size) * self.pages.page_size
        slots = self._take(n)
        if not slots:
            return 0
        extension = self.pages.share(source, self.handles(slots), tokens)
        for slot in slots:
            self.model.share(holding, slot, tokens)
        given = [self.model.token(holding, position) for position in range(tokens)] * len(slots)
        agree(given, extension.tokens.np.tolist(), "tokens of a shared prefix")
        self._extend(slots, [min(tokens + 1, self.most)] * len(slots))
        return tokens

    @_HAS_REQUESTS
    @rule(data=st.data(), then=st.sampled_from(["write on", "take one back and write", "leave"]))
    def hold(self, data: st.DataObject, then: str) -> None:
        """A prefix cache keeps what a request has in whole pages; the request goes on, or leaves."""
        slot = self.some(data)[0]
        holding, size = self.model.requests[slot], self.pages.page_size
        self._extend([slot], [max(size, len(holding.stamps))])
        pages = len(holding.stamps) // size
        lease = self.pages.hold(self.held[slot], pages * size)
        self.model.leases.append((lease, Holding(holding.pages[:pages], holding.stamps[: pages * size])))
        if then == "leave":
            self._finish([slot], self.fence(data))
            return
        length = len(holding.stamps)
        if then != "write on":
            length = max(0, length - 1 if length % size else pages * size - 1)
            self.pages.truncate(self.held[slot], length)
            self.model.cut(slot, length, None)
        self._extend([slot], [min(length + 1, self.most)])

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        """The cache forgets a prefix, once."""
        at = data.draw(st.integers(0, len(self.model.leases) - 1), label="lease")
        fence = self.fence(data)
        lease, holding = self.model.leases.pop(at)
        lease.release(after=fence)
        self.model.drop(holding.pages, fence)
        with self.refused(Code.SLOT_DOUBLE_FREE):
            lease.release()

    # Leaving

    @_HAS_REQUESTS
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: st.DataObject, late: bool) -> None:
        """Requests leave with pages and slot, behind a step; a second exit is refused."""
        slots = self.some(data)
        self._finish(slots, self.fence(data))
        if late:
            with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
                self.pages.release_requests(self.gone[-1])

    def _finish(self, slots: list[int], fence: ManualFence | None) -> None:
        owned = sum(len(self.model.requests[slot].pages) for slot in slots)
        if owned:
            with self.refused(Code.SLOT_CONSERVATION):
                self.slots.free(self.handles(slots), after=fence)
        self.pages.release_requests(self.handles(slots), after=fence)
        for slot in slots:
            self.gone.append(self.held.pop(slot))
            self.model.release(slot, fence)
        behind = fence is not None and fence is not self.steps.last and owned > 0
        self.reached("released behind step N while N+1 is in flight", behind)

    @_HAS_REQUESTS
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Requests give their pages back and keep their slots."""
        slots, fence = self.some(data), self.fence(data)
        self.pages.release(self.handles(slots), after=fence)
        for slot in slots:
            self.model.cut(slot, 0, fence)

    @_HAS_REQUESTS
    @rule(more=st.integers(2, 6))
    def retract_under_pressure(self, more: int) -> None:
        """Step, grow; while pages run out the youngest leaves behind the step, which ends, and growing goes on."""
        oldest = next(iter(self.held))
        length = min(self.most, len(self.model.requests[oldest].stamps) + more)
        while not self._extend([oldest], [length]) and len(self.held) > 1:
            fence = self.steps.record()
            self.steps.record()
            self._finish([list(self.held)[-1]], fence)
            self._extend([oldest], [length])  # the pages are pending still
            self.steps.complete_until(fence)
            self.reached("retraction")
            length = max(length, len(self.model.requests[oldest].stamps))

    # Misuse

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles of requests that left are refused everywhere."""
        late = self.gone[-min(back, len(self.gone))]
        for call in (
            lambda: self.pages.extend(late, 1),
            lambda: self.pages.advance(late),
            lambda: self.pages.truncate(late, 0),
            lambda: self.pages.release(late),
            lambda: self.pages.committed(late),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()

    @_HAS_REQUESTS
    @rule(data=st.data(), misuse=st.sampled_from(MISUSES))
    def misuse(self, data: st.DataObject, misuse: Misuse[tuple[PagePool, Slots]]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        it = (self.pages, self.held[self.some(data)[0]])
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)
