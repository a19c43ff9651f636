"""`HiSparse` against a memory of stamps: both admissions, decoding, aborts in every state, writers that write late.

Whoever brings KV from outside may write until it ends, and does, at the worst moments. Nobody else's bytes may change.
"""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate.hisparse import HiSparse
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.testing.machine import agree
from batchstate.testing.machines.host_tier_arrivals import TierArrivals
from batchstate.testing.machines.host_tier_misuse import MISUSES
from batchstate.testing.misuse import Misuse
from batchstate.tiering.books import TierState

OUTSIDE, STAGED, DIRECT, READY = TierState.OUTSIDE, TierState.STAGED, TierState.DIRECT, TierState.READY

_OUTSIDE = precondition(lambda self: bool(self.of(OUTSIDE)))
_STAGED = precondition(lambda self: bool(self.of(STAGED)))
_DIRECT = precondition(lambda self: bool(self.of(DIRECT)))
_READY = precondition(lambda self: bool(self.of(READY)))
_INSIDE = precondition(lambda self: bool(self.of(STAGED, DIRECT, READY)))


class HostTierMachine(TierArrivals):
    """Requests that are staged, written directly, decoded, finished and aborted."""

    NAME = "host_tier"

    # Leaving

    @_READY
    @rule(data=st.data(), raw=st.booleans())
    def finish(self, data: st.DataObject, raw: bool) -> None:
        """Requests leave behind the last forward; a second exit is refused."""
        self._finish(self.some(data, self.of(READY)), raw)

    @_INSIDE
    @rule(data=st.data(), ended=st.booleans())
    def abort(self, data: st.DataObject, ended: bool) -> None:
        """Requests leave in whatever state they are."""
        self._abort(self.some(data, self.of(STAGED, DIRECT, READY)), ended)

    @_STAGED
    @rule()
    def abort_staged(self) -> None:
        """What is being copied leaves, behind the copy."""
        self._abort(self.of(STAGED), False)

    @_DIRECT
    @rule()
    def free_direct(self) -> None:
        """The slots alone are freed, by one who knows nothing of the tier: the host tokens go with them."""
        requests = self.of(DIRECT)
        self.slots.free(self.handles(requests), after=self.last)
        self.leave(requests)

    @_OUTSIDE
    @rule(data=st.data())
    def leave_outside(self, data: st.DataObject) -> None:
        """Requests outside leave."""
        for request in self.some(data, self.of(OUTSIDE)):
            self._leave_outside(request)

    @rule()
    def all_leave(self) -> None:
        """Everybody leaves, the device ends: what is pending then is what writers may still write, and no more."""
        self._abort(self.of(STAGED, DIRECT, READY), False)
        for request in self.of(OUTSIDE):
            self._leave_outside(request)
        self.host.free(self.strangers)
        self.strangers = []
        self.resolve(0)
        self.rt.synchronize()
        self.slots.expect_idle()
        self.pages.expect_idle()
        self.host.expect_idle()
        for _ in range(4):
            self.haunt()
            self.host.verify()
        stats, haunted = self.host.stats, sum(len(ghost.runs) for ghost in self.ghosts)
        agree((haunted, stats.size - haunted), (stats.pending, stats.free), "host tokens pending and free, all gone")
        agree(self.pages.num_pages, self.pages.stats.free, "device pages free, all gone")

    # Time and misuse

    @rule(read=st.integers(0, 2), all_of_it=st.booleans())
    def time_passes(self, read: int, all_of_it: bool) -> None:
        """The host reads what forwards brought, or waits for everything."""
        self.resolve(read)
        if all_of_it:
            self.rt.synchronize()

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles and runs of requests that left are refused everywhere."""
        late = self.gone[-min(back, len(self.gone))]
        tier, slot = self.tier, late.slot
        for call in (
            lambda: tier.reserve(slot, 1, 1),
            lambda: tier.admit_direct(slot),
            lambda: tier.admit_staged(slot, 1),
            lambda: tier.map_last_location(slot, late.length + 1),
            lambda: tier.states(slot),
            lambda: tier.host_tokens(slot, 1),
            lambda: tier.abort(slot),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()
        runs = late.runs
        if runs is not None:
            with self.refused(Code.SLOT_STALE_HANDLE, Code.SLOT_DOUBLE_FREE):
                self.host.free(runs)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), misuse=st.sampled_from(MISUSES))
    def misuse(self, data: st.DataObject, misuse: Misuse[tuple[HiSparse, Slots]]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        it = (self.tier, self.some(data, self.requests)[0].slot)
        if misuse.applies(it):
            with self.refused(*misuse.expected):
                misuse.call(it)
