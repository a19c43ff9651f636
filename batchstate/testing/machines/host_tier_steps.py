"""Decode steps of the host tier for its machine, and how requests leave."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.invariants import Code
from batchstate.mirror import MirroredTensor
from batchstate.testing.machine import agree
from batchstate.testing.machines.host_tier_base import TierRequests
from batchstate.testing.machines.host_tier_model import Tiered
from batchstate.tiering.books import TierState

STAGED, READY = TierState.STAGED, TierState.READY

_READY = precondition(lambda self: bool(self.of(READY)))


class TierSteps(TierRequests):
    """Requests that decode in the tier."""

    # Decoding

    @_READY
    @rule(data=st.data(), times=st.integers(1, 5), ride=st.booleans(), mirrored=st.booleans())
    def decode(self, data: st.DataObject, times: int, ride: bool, mirrored: bool) -> None:
        """Decode steps of some requests; each byte they read is compared."""
        requests = self.some(data, self.of(READY))
        for _ in range(times):
            if not self._decode(requests, ride, mirrored):
                return

    @precondition(lambda self: len(self.of(READY)) > 1)
    @rule(times=st.integers(1, 8))
    def decode_all(self, times: int) -> None:
        """Decode steps of all, for which there is room."""
        self._decode_on(self.of(READY), times)

    def _decode_on(self, requests: list[Tiered], times: int) -> None:
        for _ in range(times):
            requests = [one for one in requests if one.length < one.room]
            if not requests or not self._decode(requests, True, False):
                return

    def _decode(self, requests: list[Tiered], ride: bool, mirrored: bool) -> bool:
        slots = self.handles(requests)
        lens = np.array([one.length + 1 for one in requests], dtype=np.int64)
        given = MirroredTensor.from_host(self.rt, lens) if mirrored else lens
        if any(one.length >= len(one.runs or ()) for one in requests):
            self.reached("a request without room refused")
            with self.refused(Code.LENGTH_ORDER):
                self.tier.map_last_location(slots, given)
            return False
        size, hot = self.pages.page_size, self.tier.hot_tokens
        grown = any(one.length < hot and one.length % size == 0 for one in requests)
        plans = []
        if not self.tried(lambda: plans.append(self.tier.map_last_location(slots, given)), "device pages"):
            return False
        plan = plans[0]
        with self.refused(ArgumentError):
            self.tier.map_last_location(slots, given)
        with self.refused(ArgumentError):
            self.tier.abort(slots)
        added = [self.stamps.new(1) for _ in requests]
        for request in requests:
            request.hot_from = max(request.hot_from, request.length + 1 - hot)
            self.reached("the ring went round", request.length >= 2 * hot)
            self.reached("grown by a page", grown)
            self.reached("read from the host", request.hot_from > 0)
        self.forward(requests, added, plan.tokens.np, plan, ride)
        if levels.full:  # before what the forward read is compared
            with self.on(self.apart):
                self.tier.verify()
        agree([one.length - 1 for one in requests], plan.positions.tolist(), "positions of the new tokens")
        agree([one.hot_from for one in requests], plan.hot_from.tolist(), "first positions on the device")
        owed = sum(one.steps > 0 for one in requests)
        agree((owed, owed), (len(plan.backup_from), len(plan.backup_to)), "tokens to back up")
        with self.refused(ArgumentError):
            self.tier.back_up(plan)
        for request in requests:
            request.steps += 1
        return True

    # Leaving

    def _finish(self, requests: list[Tiered], raw: bool) -> None:
        slots = self.handles(requests)
        if raw:
            self.pages.release_requests(slots, after=self.last)
        else:
            self.tier.finish(slots, after=self.last)
        self.leave(requests)
        with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
            self.tier.finish(slots)

    def _abort(self, requests: list[Tiered], ended: bool) -> None:
        staged = [one for one in requests if one.state is STAGED]
        before = self.host.stats.pending
        self.tier.abort(self.handles(requests), after=self.last)
        for request in requests:
            if ended and request.writer is not None:
                request.writer.end()
        self.leave(requests)
        self.reached("staged abort while the copy is under way", bool(staged) and self.host.stats.pending > before)

    def _leave_outside(self, request: Tiered) -> None:
        self.pages.release_requests(request.slot, after=self.last)
        self.leave([request])
