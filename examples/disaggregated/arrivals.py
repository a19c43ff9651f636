"""Requests on their way into the decode worker: leases, memory, grants, and what to do when a writer is lost.

One request, in order::

    lease      who will write, before any memory is taken
    reserve    a slot and a host location for each token it will ever have, or device pages, behind `lease.ended`
    grant      the writers may write; the prompt goes to each of them
    complete   DELIVERED, and the first token is known: the decode worker takes it over

An attempt that fails gives its slot up at once. Its memory stays pending until no writer can write it any more, and the
next attempt gets other. One that is delivered, and whose writers are gone before any has told the first
token, has failed too.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import final

import attrs

from batchstate import SlotPool, Slots
from batchstate.errors import HandshakeError, TransferError
from batchstate.kv.hisparse import HiSparse
from batchstate.kv.pages import PageLease
from batchstate.transport.receiver import Lease, LeaseState, Receiver
from batchstate.transport.workers import Clock
from examples.disaggregated.channel import Channel, ChannelClosedError, Kind
from examples.engine.request import Request


class WriterFailedError(Exception):
    """A prefill worker has said why it cannot go on.

    Attributes:
        violation: whether a check of its own has found something broken.
    """

    def __init__(self, reason: str, *, violation: bool = False) -> None:
        super().__init__(reason)
        self.violation = violation


@attrs.define(eq=False)
class Arrival:
    """One attempt to bring a request here: into `pages` of the device, or, without them, into the host tier."""

    request: Request
    slot: Slots
    lease: Lease
    pages: PageLease | None
    since: float
    first_token: int | None = None


@final
class Arrivals:
    """Belongs to the runtime's thread.

    Args:
        tier: the host tier that the requests come to.
        slots: of the requests.
        receiver: its engine writes into the tier's memory.
        writers: names of the prefill workers, all of which write a part of each request.
        room: host locations that a request takes, growth included.
        landing: device pages that the KV of a request comes into; 0 for the host tier.
        hot_pages: device pages that are not taken so, but kept for hot buffers.
        lease_seconds: after which an attempt is given up. Its memory still waits for its writers.
        clock: seconds, never going back.

    Attributes:
        receiver: see above.
        keep_free: slots that are not taken for requests of this kind.
        waiting: requests that were not asked for yet, or have to be asked for again, with the attempt that failed.
        delivered: attempts that were.
        retried: attempts that failed and were made again.
        transferred_bytes: of all that was delivered.
    """

    def __init__(
        self,
        tier: HiSparse,
        slots: SlotPool,
        receiver: Receiver,
        writers: tuple[str, ...],
        room: Callable[[Request], int],
        landing: Callable[[Request], int],
        hot_pages: int,
        *,
        lease_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self.receiver = receiver
        self.waiting: deque[tuple[Request, Lease | None]] = deque()
        self.keep_free = 0
        self.delivered = 0
        self.retried = 0
        self.transferred_bytes = 0
        self._tier, self._slots, self._writers, self._room = tier, slots, writers, room
        self._landing, self._hot_pages = landing, hot_pages
        self._lease_seconds, self._clock = lease_seconds, clock
        self._token_bytes = tier.host.item_bytes * len(tier.host.layers)
        self._channels: dict[str, Channel] = {}
        self._open: dict[int, Arrival] = {}
        self._by_name: dict[tuple[str, int], Arrival] = {}
        self._failed: list[Lease] = []
        self._complete: deque[Arrival] = deque()

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or on its way."""
        return bool(self.waiting or self._open or self._complete)

    def writes(self, name: str) -> bool:
        """Whether a writer that is here has part of a request left to write."""
        leases = [arrival.lease for arrival in self._open.values()]
        open_writers = [writer for lease in leases if lease.state is LeaseState.WAITING for writer in lease.writers]
        return name in self._channels and any(
            writer.worker.name == name and not writer.complete for writer in open_writers
        )

    @property
    def connected(self) -> bool:
        """Whether every writer is here."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Names of the writers that are not here."""
        return [name for name in self._writers if name not in self._channels]

    @property
    def quarantined(self) -> int:
        """Locations of failed attempts, in the host or the device, that a writer may still write."""
        self._failed = [lease for lease in self._failed if not lease.ended.query()]
        return sum(lease.tokens for lease in self._failed)

    def channels(self) -> dict[str, Channel]:
        """To each writer that is here."""
        return dict(self._channels)

    # Writers

    def connect(self, channel: Channel, introduction: bytes) -> str:
        """A writer has introduced itself.

        Raises:
            HandshakeError: it does not fit this worker.
        """
        name = self.receiver.accept(introduction)
        self._channels[name] = channel
        return name

    def lost(self, name: str, reason: str) -> None:
        """A writer is suspected to be gone; what it was to write fails, and stays taken."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
            self.receiver.peer_lost(name, reason)

    def ended(self, name: str) -> None:
        """A supervisor has seen a writer's process exit; maybe before it has introduced itself."""
        self.lost(name, "its process has ended")
        with contextlib.suppress(HandshakeError):
            self.receiver.peer_ended(name)

    # Turns

    def turn(self) -> list[Arrival]:
        """Hears, asks for more, and says; the attempts that are complete. Never waits."""
        no_room = bool(self._complete)  # put back: what gets free is theirs
        self._hear()
        self._give_up()
        for lease in self.receiver.poll():
            self._changed(lease)
        while not no_room and self.waiting and self._ask():
            pass
        self._say()
        complete, self._complete = list(self._complete), deque()
        return complete

    def put_back(self, arrivals: list[Arrival]) -> None:
        """Attempts that are complete, and for which there was no room: they come again with the next turn."""
        self._complete.extendleft(reversed(arrivals))

    def _give_up(self) -> None:
        for arrival in list(self._open.values()):
            late = self._clock() - arrival.since > self._lease_seconds
            if arrival.lease.state is LeaseState.DELIVERED:  # and nobody has told its first token
                if late or all(
                    writer.worker.ended or writer.worker.lost is not None for writer in arrival.lease.writers
                ):
                    self._again(arrival)
            elif late:
                self.receiver.abort(arrival.lease, f"not here after {self._lease_seconds} s")

    def _hear(self) -> None:
        for name, channel in list(self._channels.items()):
            try:
                heard = channel.poll()
            except ChannelClosedError as error:
                self.lost(name, str(error))
                continue
            for kind, payload in heard:
                if kind is Kind.TRANSPORT:
                    self.receiver.on_message(payload, name)
                elif kind is Kind.WORDS:
                    self._told(channel.words(payload))

    def _told(self, words: dict[str, object]) -> None:
        if "failed" in words:
            raise WriterFailedError(str(words["failed"]), violation=bool(words.get("violation")))
        arrival = self._by_name.get((str(words.get("request")), int(str(words.get("attempt", 0)))))
        if arrival is not None and "first_token" in words and arrival.first_token is None:
            arrival.first_token = int(str(words["first_token"]))
            self._complete_if(arrival)

    def _changed(self, lease: Lease) -> None:
        arrival = self._open[lease.serial]
        if lease.state is LeaseState.DELIVERED:
            self.delivered += 1
            self.transferred_bytes += lease.num_tokens * self._token_bytes
            self._complete_if(arrival)
            return
        self._again(arrival)

    def _again(self, arrival: Arrival) -> None:
        lease = arrival.lease
        del self._open[lease.serial], self._by_name[lease.request, lease.attempt]
        if arrival.pages is None:
            self._tier.abort(arrival.slot, after=None)
        else:
            arrival.pages.release(after=None)  # and behind `lease.ended`
            self._slots.free(arrival.slot, after=None)
        self._failed.append(lease)
        self.retried += 1
        self.waiting.appendleft((arrival.request, lease))

    def _complete_if(self, arrival: Arrival) -> None:
        lease = arrival.lease
        if lease.state is LeaseState.DELIVERED and arrival.first_token is not None:
            del self._open[lease.serial], self._by_name[lease.request, lease.attempt]
            self._complete.append(arrival)

    def _ask(self) -> bool:
        """Asks for the first request that waits, if there is room for it."""
        request, before = self.waiting[0]
        if not self.connected or not self.room_for(request, besides=self.keep_free):
            return False
        name = f"request {request.number}"
        try:
            if before is None or before.state is LeaseState.DELIVERED:
                attempt = 1 if before is None else before.attempt + 1
                lease = self.receiver.lease(name, len(request.prompt), self._writers, attempt=attempt)
            else:
                lease = self.receiver.retry(before, self._writers)
        except TransferError:  # a writer is gone, and its channel has not told so yet
            return False
        self.waiting.popleft()
        slot, pages = self._slots.take(1), None
        if self._landing(request):
            pages = self._tier.pages.take(self._landing(request), writer=lease.ended)
            self.receiver.grant(lease, pages)
        else:
            (ranges,) = self._tier.reserve(slot, len(request.prompt), self._room(request), writer=lease.ended)
            self.receiver.grant(lease, ranges)
        arrival = Arrival(request, slot, lease, pages, self._clock())
        self._open[lease.serial] = self._by_name[lease.request, lease.attempt] = arrival
        for writer in self._writers:
            self._tell(writer, request=name, attempt=lease.attempt, prompt=list(request.prompt))
        return True

    def room_for(self, request: Request, *, besides: int = 0) -> bool:
        """Whether there is a slot, besides some for others, and memory for one more."""
        if self._slots.stats.free <= besides:
            return False
        if pages := self._landing(request):
            return self._tier.pages.stats.free >= pages + self._hot_pages
        return self.host_room_for(request)

    def host_room_for(self, request: Request) -> bool:
        """Whether there are host locations for one more."""
        size = self._tier.host.page_size
        return self._tier.host.stats.free >= -(-self._room(request) // size) * size

    def _say(self) -> None:
        messages, self.receiver.outbox = self.receiver.outbox, []
        for name, message in messages:
            channel = self._channels.get(name)
            if channel is not None:
                try:
                    channel.send(Kind.TRANSPORT, message)
                except ChannelClosedError as error:
                    self.lost(name, str(error))

    def _tell(self, name: str, **words: object) -> None:
        channel = self._channels.get(name)
        if channel is not None:
            try:
                channel.say(**words)
            except ChannelClosedError as error:
                self.lost(name, str(error))
