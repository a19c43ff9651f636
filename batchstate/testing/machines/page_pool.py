"""`PagePool` against a memory of stamps: growing, speculation, shared prefixes, fenced releases, exhaustion."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate.errors import PoolExhaustedError
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.pages import PageLease, PagePool
from batchstate.testing.fences import ManualFence
from batchstate.testing.machine import agree
from batchstate.testing.machines.growing_requests import EXHAUSTED, HAS_REQUESTS, GrowingRequests
from batchstate.testing.machines.page_model import Holding
from batchstate.testing.machines.page_pool_misuse import MISUSES
from batchstate.testing.misuse import Misuse


class PagePoolMachine(GrowingRequests):
    """Requests that also share and leave, in a pool too small for all of them."""

    NAME = "page_pool"

    # Sharing

    @rule(n=st.integers(0, 3))
    def take_pages(self, n: int) -> None:
        """KV arrives on pages that no request has yet; if too few are free, nothing is taken."""
        stats = self.pages.stats
        if n > stats.free:
            self.reached(EXHAUSTED[n <= stats.free + stats.pending])
            with self.refused(PoolExhaustedError):
                self.pages.take(n)
            return
        self.model.take(self.pages.take(n))

    @HAS_REQUESTS
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
        shared = self._share(lease, holding, 9, n) > 0
        self.reached("begun on pages taken before" if holding.taken else "a prefix shared from a lease", shared)

    def _share(self, source: Slots | PageLease, holding: Holding, pages: int, n: int) -> int:
        tokens = min(pages, len(holding.stamps) // self.pages.page_size) * self.pages.page_size
        slots = self.take(n)
        if not slots:
            return 0
        extension = self.pages.share(source, self.handles(slots), tokens)
        for slot in slots:
            self.model.share(holding, slot, tokens)
        given = [self.model.token(holding, position) for position in range(tokens)] * len(slots)
        agree(given, extension.tokens.np.tolist(), "tokens of a shared prefix")
        self.extend_to(slots, [min(tokens + 1, self.most)] * len(slots))
        return tokens

    @HAS_REQUESTS
    @rule(
        data=st.data(), more=st.integers(0, 2), then=st.sampled_from(["write on", "take one back and write", "leave"])
    )
    def hold(self, data: st.DataObject, more: int, then: str) -> None:
        """A prefix cache keeps what a request has in whole pages; the request goes on, or leaves."""
        slot = self.some(data)[0]
        holding, size = self.model.requests[slot], self.pages.page_size
        self.extend_to([slot], [min(max(size, len(holding.stamps)) + more, self.most)])
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
        self.extend_to([slot], [min(length + 1, self.most)])

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

    @HAS_REQUESTS
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

    @HAS_REQUESTS
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Requests give their pages back and keep their slots."""
        slots, fence = self.some(data), self.fence(data)
        self.pages.release(self.handles(slots), after=fence)
        for slot in slots:
            self.model.cut(slot, 0, fence)

    @HAS_REQUESTS
    @rule(more=st.integers(2, 6))
    def retract_under_pressure(self, more: int) -> None:
        """Step, grow; while pages run out the youngest leaves behind the step, which ends, and growing goes on."""
        oldest = next(iter(self.held))
        length = min(self.most, len(self.model.requests[oldest].stamps) + more)
        while not self.extend_to([oldest], [length]) and len(self.held) > 1:
            fence = self.steps.record()
            self.steps.record()
            self._finish([list(self.held)[-1]], fence)
            self.extend_to([oldest], [length])  # the pages are pending still
            self.steps.complete_until(fence)
            self.reached("retraction")
            length = max(length, len(self.model.requests[oldest].stamps))

    @HAS_REQUESTS
    @rule()
    def leave_apart(self) -> None:
        """Two share a page; the first leaves behind a step in flight, the second behind none: the page waits."""
        first = next(iter(self.held))
        self.extend_to([first], [max(self.pages.page_size, len(self.model.requests[first].stamps))])
        if self._share(self.held[first], self.model.requests[first], 1, 1):
            second = list(self.held)[-1]
            self._finish([first], self.steps.record())
            self._finish([second], None)

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

    @HAS_REQUESTS
    @rule(data=st.data(), misuse=st.sampled_from(MISUSES))
    def misuse(self, data: st.DataObject, misuse: Misuse[tuple[PagePool, Slots]]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        it = (self.pages, self.held[self.some(data)[0]])
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)
