"""`HiSparse` against a memory of stamps: both admissions, decoding, aborts in every state, writers that write late.

Whoever brings KV from outside may write until it ends, and does, at the worst moments. Nobody else's bytes may change.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate import levels
from batchstate.errors import ArgumentError
from batchstate.hisparse import HiSparse
from batchstate.indices import Slots
from batchstate.invariants import Code
from batchstate.mirror import MirroredTensor
from batchstate.testing.fences import ManualStream
from batchstate.testing.machine import agree
from batchstate.testing.machines.host_tier_base import MOST_TOKENS, TierRequests
from batchstate.testing.machines.host_tier_misuse import MISUSES
from batchstate.testing.machines.host_tier_model import PrefillWorker, Tiered
from batchstate.testing.misuse import Misuse
from batchstate.tiering.books import TierState

OUTSIDE, STAGED, DIRECT, READY = TierState.OUTSIDE, TierState.STAGED, TierState.DIRECT, TierState.READY


_OUTSIDE = precondition(lambda self: bool(self.of(OUTSIDE)))
_STAGED = precondition(lambda self: bool(self.of(STAGED)))
_DIRECT = precondition(lambda self: bool(self.of(DIRECT)))
_READY = precondition(lambda self: bool(self.of(READY)))
_INSIDE = precondition(lambda self: bool(self.of(STAGED, DIRECT, READY)))


class HostTierMachine(TierRequests):
    """Requests that are staged, written directly, decoded, finished and aborted."""

    NAME = "host_tier"

    @rule(n=st.integers(1, 2))
    def come(self, n: int) -> None:
        """Requests come and have nothing yet."""
        self.take(n)

    # Requests whose KV comes from another process

    @rule(n=st.integers(1, 2), length=st.integers(1, 9), more=st.integers(0, 9), delivered=st.integers(0, 9))
    def reserve(self, n: int, length: int, more: int, delivered: int) -> None:
        """Requests get host tokens; their writers begin."""
        self._reserve(n, length, more, delivered)

    def _reserve(self, n: int, length: int, more: int, delivered: int) -> list[Tiered]:
        room = min(length + more, self.host.num_tokens)
        length = min(length, room)
        arriving = []
        for request in self.take(n):
            arriving += self._reserve_one(request, length, room)
            if request.writer is not None:
                request.delivered = min(delivered, length)
                request.writer.write(0, request.delivered)
        return arriving

    def _reserve_one(self, request: Tiered, length: int, room: int) -> list[Tiered]:
        content = self.stamps.new(length)
        made: list[PrefillWorker] = []
        stream = ManualStream("writer")
        ended = stream.record()

        def call() -> None:
            runs = self.tier.reserve(request.slot, length, room, writer=ended)[0]
            made.append(PrefillWorker(self.host, runs, content, stream))

        if not self.tried(call, "host tokens"):
            self._leave_outside(request)
            return []
        request.writer, request.content, request.room = made[0], content, room
        request.runs, request.state = made[0].runs, DIRECT
        self.reached(
            "host tokens used again after their writer", bool(self.haunted & set(request.runs.tokens().tolist()))
        )
        return [request]

    @_DIRECT
    @rule(data=st.data(), ended=st.booleans())
    def admit_direct(self, data: st.DataObject, ended: bool) -> None:
        """All has arrived, and the requests may decode, whether or not their writers are known to have ended."""
        self._admit(self.some(data, self.of(DIRECT)), ended)

    def _admit(self, requests: list[Tiered], ended: bool) -> bool:
        for request in requests:
            if request.writer is not None:
                request.writer.write(request.delivered, request.length)
                request.delivered = request.length
                if ended:
                    request.writer.end()
        hot = self.tier.hot_tokens
        with self.on(self.apart):
            if not self.tried(lambda: self.tier.admit_direct(self.handles(requests)), "device pages"):
                return False
        for request in requests:
            request.state = READY
            short = request.length <= hot
            request.hot_from = 0 if short else request.length
            self.reached("a short request loaded" if short else "a long request admitted")
        return True

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, 6),
        more=st.integers(0, 14),
        ended=st.booleans(),
        times=st.integers(0, 14),
    )
    def arrive(self, n: int, length: int, more: int, ended: bool, times: int) -> None:
        """Reserve, deliver, admit, decode."""
        requests = self._reserve(n, length, more, length // 2)
        if requests and self._admit(requests, ended):
            self._decode_on(requests, times)

    @precondition(lambda self: any(one.writer is not None for one in self.requests) or self.ghosts)
    @rule(data=st.data(), again=st.booleans())
    def writer_ends(self, data: st.DataObject, again: bool) -> None:
        """A writer ends, perhaps with a last write: the same bytes once more, or whatever, where nobody reads them."""
        chosen = data.draw(st.integers(-1, len(self.ghosts) - 1), label="writer of a request that left")
        if chosen >= 0:
            ghost = self.ghosts.pop(chosen)
            if again:
                ghost.scribble()
            ghost.end()
            self.reached("a writer that ends after its request")
            return
        for request in self.requests:
            if request.writer is not None and request.state is READY:
                if again:
                    request.writer.write(0, request.delivered)
                request.writer.end()

    # Requests that this worker has prefilled

    @rule(n=st.integers(1, 2), length=st.integers(1, MOST_TOKENS - 1))
    def prefill(self, n: int, length: int) -> None:
        """Requests come and stay outside: their KV is on the device."""
        self._prefill(n, length)

    def _prefill(self, n: int, length: int) -> list[Tiered]:
        return [request for request in self.take(n) if self._extended(request, length)]

    def _extended(self, request: Tiered, length: int) -> bool:
        if not self.tried(lambda: self.pages.extend(request.slot, length), "device pages"):
            self._leave_outside(request)
            return False
        self._written([request], length)
        return True

    def _written(self, requests: list[Tiered], n: int) -> None:
        """A forward writes further positions of requests outside of the tier."""
        added = [self.stamps.new(n) for _ in requests]
        size, table = self.pages.page_size, self.pages.page_table
        tokens = [
            int(table[request.number, position // size]) * size + position % size
            for request in requests
            for position in range(request.length, request.length + n)
        ]
        self.forward(requests, added, np.array(tokens, dtype=np.int64), None, False)

    @_OUTSIDE
    @rule(data=st.data())
    def decode_outside(self, data: st.DataObject) -> None:
        """Requests outside of the tier decode as if there were none."""
        growing = [one for one in self.of(OUTSIDE) if 0 < one.length < MOST_TOKENS]
        if growing:
            requests = self.some(data, growing)
            if self.tried(lambda: self.pages.advance(self.handles(requests)), "device pages"):
                self._written(requests, 1)

    @_OUTSIDE
    @rule(data=st.data(), more=st.integers(0, 6), fence=st.booleans())
    def stage(self, data: st.DataObject, more: int, fence: bool) -> None:
        """Requests outside are copied out to the host."""
        if hot := [one for one in self.of(OUTSIDE) if one.length]:
            self._stage(self.some(data, hot), more, fence)

    def _stage(self, requests: list[Tiered], more: int, fence: bool) -> bool:
        room = np.array([min(one.length + more, self.host.num_tokens) for one in requests], dtype=np.int64)
        if any(one.length > most for one, most in zip(requests, room.tolist(), strict=True)):
            return False
        after = self.last if fence else None

        def call() -> None:
            self.tier.admit_staged(self.handles(requests), room, after=after)

        with self.on(self.apart):
            staged = self.tried(call, "host tokens")
        if not staged:
            return False
        self.copies.append((self.rt.step, self.tier._staging[-1][1]))
        for request, most in zip(requests, room.tolist(), strict=True):
            request.state, request.room = STAGED, most
            request.runs = self.tier._books.runs[request.number]
        return True

    @rule()
    def settle(self) -> None:
        """What is copied may decode."""
        self._settle()

    def _settle(self) -> None:
        settled = self.tier.settle()
        ready = [one for one in self.of(STAGED) if self.tier.ready(one.slot)[0]]
        with self.on(self.apart):
            self.tier.verify()
        agree(len(ready), settled, "requests that became ready")
        for request in ready:
            request.state = READY
            request.hot_from = request.length if request.length > self.tier.hot_tokens else 0

    @rule(
        n=st.integers(1, 2),
        length=st.integers(1, MOST_TOKENS - 1),
        more=st.integers(0, 9),
        wait=st.booleans(),
        times=st.integers(0, 9),
    )
    def prefill_and_stage(self, n: int, length: int, more: int, wait: bool, times: int) -> None:
        """Prefill, stage, and perhaps wait until it is copied, and decode."""
        requests = self._prefill(n, length)
        if requests and self._stage(requests, more, True) and wait:
            self.rt.synchronize()
            self._settle()
            self._decode_on(requests, times)

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

    @_READY
    @rule(data=st.data(), raw=st.booleans())
    def finish(self, data: st.DataObject, raw: bool) -> None:
        """Requests leave behind the last forward; a second exit is refused."""
        requests = self.some(data, self.of(READY))
        slots = self.handles(requests)
        if raw:
            self.pages.release_requests(slots, after=self.last)
        else:
            self.tier.finish(slots, after=self.last)
        self.leave(requests)
        with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
            self.tier.finish(slots)

    @_INSIDE
    @rule(data=st.data(), ended=st.booleans())
    def abort(self, data: st.DataObject, ended: bool) -> None:
        """Requests leave in whatever state they are."""
        self._abort(self.some(data, self.of(STAGED, DIRECT, READY)), ended)

    def _abort(self, requests: list[Tiered], ended: bool) -> None:
        staged = [one for one in requests if one.state is STAGED]
        before = self.host.stats.pending
        self.tier.abort(self.handles(requests), after=self.last)
        for request in requests:
            if ended and request.writer is not None:
                request.writer.end()
        self.leave(requests)
        self.reached("staged abort while the copy is under way", bool(staged) and self.host.stats.pending > before)

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

    def _leave_outside(self, request: Tiered) -> None:
        self.pages.release_requests(request.slot, after=self.last)
        self.leave([request])

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
