"""How requests come into the host tier for its machine: from another process, or from device pages."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate.testing.fences import ManualStream
from batchstate.testing.machine import agree
from batchstate.testing.machines.host_tier_base import MOST_TOKENS
from batchstate.testing.machines.host_tier_model import Arrival, PrefillWorker, Tiered
from batchstate.testing.machines.host_tier_steps import TierSteps
from batchstate.tiering.books import TierState

OUTSIDE, STAGED, DIRECT, READY = TierState.OUTSIDE, TierState.STAGED, TierState.DIRECT, TierState.READY

_OUTSIDE = precondition(lambda self: bool(self.of(OUTSIDE)))
_DIRECT = precondition(lambda self: bool(self.of(DIRECT)))


class TierArrivals(TierSteps):
    """Requests that are staged, or written directly."""

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
        ended = Arrival(stream.record())

        def call() -> None:
            runs = self.tier.reserve(request.slot, length, room, writer=ended)[0]
            made.append(PrefillWorker(self.host, runs, content, stream, ended))

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
                request.delivered = request.writer.ended.tokens = request.length
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
        more=st.sampled_from([0, 1, 5, 14]),
        ended=st.booleans(),
        times=st.integers(0, 14),
        leave=st.booleans(),
    )
    def arrive(self, n: int, length: int, more: int, ended: bool, times: int, leave: bool) -> None:
        """Reserve, deliver, admit, decode, and perhaps leave."""
        requests = self._reserve(n, length, more, length // 2)
        if requests and self._admit(requests, ended):
            self._decode_on(requests, times)
            if leave:
                self._finish(requests, False)

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
        then=st.sampled_from(["ask too early", "abort", "wait", "wait"]),
        times=st.integers(0, 9),
    )
    def prefill_and_stage(self, n: int, length: int, more: int, then: str, times: int) -> None:
        """Prefill and stage; then ask too early, abort and prefill others, or wait until it is copied, and decode."""
        requests = self._prefill(n, length)
        if not requests or not self._stage(requests, more, True):
            return
        if then == "ask too early":
            self._settle()
        elif then == "abort":
            self._abort(requests, False)
            if self.last is not None:
                self.last.wait()  # for the forward, and not for the copy
            self._prefill(n, length)
        else:
            self.rt.synchronize()
            self._settle()
            self._decode_on(requests, times)
