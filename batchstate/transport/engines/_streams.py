"""Both sides of a connection by which rows travel: `Outgoing` packs and sends them, `Incoming` puts them into place.

A write is one message that names its rows, then the rows in pieces, then the receiver's answer. On the writing side one
thread packs and sends, and one listens for the answers; the receiving side is one thread.

Guarantees: each job ends exactly once, unless the engine is closed first. DONE follows the receiver's word alone, that
the rows are in memory; FAILED that it was never sent, or refused; all that was begun when the connection broke is
UNKNOWN. A row lands only inside a region that is registered at that moment, and none of a write that has one elsewhere.
The tag is delivered behind all its rows, the answer behind both. The receiver closes a connection only when nothing of
it will land any more, and the system only after the last thread of a process: so its end says that all has drained.
"""

import contextlib
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import final

import attrs
import numpy as np
import torch

from batchstate.transport.connection import MOST_BYTES, Connection, ConnectionEndedError
from batchstate.transport.engines._packing import PIECE, gather, pieces, scatter
from batchstate.transport.engines.base import MOST_TAG_BYTES, Delivery, Status
from batchstate.transport.regions import Copies, Ints
from batchstate.transport.wire import nonce

MOST_ROWS = 1 << 20
"""Of one write, before long rows are cut into pieces."""
MOST_CUT_ROWS = (MOST_BYTES - 256) // 24
"""The same, once they are cut: their places fit into a message."""

LANDED, REFUSED = b"+", b"-"
"""How an answer begins; behind it, why not."""

_HEADER = struct.Struct("<IB")
"""Rows, bytes of the tag. Behind it the tag, and int64[3, n]: region, offset and length of each row."""

LOOKS_EVERY = 0.05
"""Seconds between two looks whether this engine is being closed, while the other side has not closed a connection."""


@final
class Inbox:
    """What the receiving threads of an engine share with its owner.

    Attributes:
        deliveries: tags behind their data.
    """

    def __init__(self) -> None:
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._memories: dict[int, torch.Tensor] = {}

    def __setitem__(self, index: int, memory: torch.Tensor) -> None:
        """Lists a region's memory, uint8[nbytes]."""
        with self._lock:
            self._memories[index] = memory

    def __delitem__(self, index: int) -> None:
        """Waits until no piece is being put into it, at most about a millisecond, and forgets it."""
        with self._lock:
            del self._memories[index]

    def refusal(self, table: Ints) -> str:
        """Why rows int64[3, n] may not be written into the regions registered now, or an empty string."""
        regions, offsets, lengths = table
        memories = self.memories()
        present = np.unique(regions)
        unknown = [index for index in present.tolist() if index not in memories]
        if unknown:
            return f"region {unknown[0]} is not registered at the receiver"
        sizes = [memories[index].numel() for index in present.tolist()]
        size = np.array(sizes, dtype=np.int64)[np.searchsorted(present, regions)]
        outside = np.flatnonzero((offsets < 0) | (offsets > size) | (lengths > size - offsets))
        if not outside.size:
            return ""
        row = int(outside[0])
        return (
            f"row {row}: {lengths[row]} bytes from {offsets[row]} on leave region {regions[row]} of {size[row]} bytes"
        )

    def land(self, table: Ints, packed: torch.Tensor) -> str:
        """Puts rows int64[3, n] into place, all or none; why none, or an empty string."""
        with self._lock:
            reason = self.refusal(table)
            if not reason:
                scatter(self._memories, table[0], table[1], table[2], packed)
            return reason

    def memories(self) -> dict[int, torch.Tensor]:
        """The regions' memory by index, as it is now."""
        return dict(self._memories)


@final
class Incoming:
    """A connection by which another process writes. Its methods never wait, but for `join`."""

    def __init__(self, inbox: Inbox, connection: Connection) -> None:
        self._inbox = inbox
        self._connection = connection
        self._thread = threading.Thread(target=self._run, name="batchstate receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it now."""
        self._connection.wake()

    def join(self, seconds: float) -> None:
        """Waits for the thread, that long at most."""
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it still has a thread."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            # The writer has gone, or says what makes no sense, or there is no memory for it.
            with contextlib.suppress(OSError, ValueError, struct.error, RuntimeError, MemoryError):
                writer = nonce(self._connection.recv_bytes().decode())
                staging = torch.empty(2 * PIECE, dtype=torch.uint8)
                while True:
                    self._take(writer, staging)
        finally:
            self._connection.close()  # last: to the writer it says that nothing of its rows can land any more

    def _take(self, writer: str, staging: torch.Tensor) -> None:
        """Receives one write, and answers."""
        message = self._connection.recv_bytes()
        rows, length = _HEADER.unpack_from(message)
        tag, places = message[_HEADER.size : _HEADER.size + length], message[_HEADER.size + length :]
        table = np.frombuffer(places, dtype="<i8").astype(np.int64, copy=False).reshape(3, rows)
        if not 0 < len(tag) <= MOST_TAG_BYTES or ((table[2] <= 0) | (table[2] > PIECE)).any():
            raise ValueError("a write that makes no sense")
        reason = self._inbox.refusal(table)
        for cut in pieces(table[2]):  # refused rows are received too, and dropped
            nbytes = int(table[2, cut].sum())
            if self._connection.recv_bytes_into(staging.numpy().data[:nbytes]) != nbytes:
                raise ValueError("a piece of another length than announced")
            reason = reason or self._inbox.land(table[:, cut], staging[:nbytes])
        if not reason:
            self._inbox.deliveries.put(Delivery(tag, writer))
        self._connection.send_bytes(REFUSED + reason.encode() if reason else LANDED)


@final
@attrs.define(eq=False)
class Job:
    """One write on its way."""

    tag: bytes  # its tag
    copies: Copies  # its rows, as `in_order` gives them
    memories: Mapping[int, torch.Tensor]  # the source regions by index, uint8
    outgoing: "Outgoing"  # whose it is
    reason: str = ""  # why it failed; set before the status
    status: Status = Status.PENDING  # set by a thread of `outgoing`, once

    def end(self, status: Status, reason: str = "") -> None:
        """Sets the two."""
        self.reason = reason
        self.status = status


@final
class Outgoing:
    """A connection by which this process writes. Its methods never wait, but for `join`.

    Attributes:
        lost: why the connection is broken, or None.
        drained: whether nothing that was sent can still land, nor a source be read.
    """

    def __init__(self, connection: Connection, when_lost: Callable[[str], None]) -> None:
        self.lost: str | None = None
        self.drained = False
        self._connection = connection
        self._when_lost = when_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._awaiting: deque[Job] = deque()
        self._closing = False
        self._sender = threading.Thread(target=self._send_all, name="batchstate sender", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="batchstate answers", daemon=True)
        self._sender.start()
        self._listener.start()

    def submit(self, job: Job) -> None:
        """Takes a write."""
        with self._lock:
            if self.lost is None:
                self._queue.put(job)
                return
        job.end(Status.FAILED, f"never sent: {self.lost}")

    def finish(self) -> None:
        """Ends the connection behind what was submitted."""
        self._queue.put(None)

    def close(self) -> None:
        """Ends it now."""
        self._closing = True
        self._lose("this engine is closed")
        self._connection.wake()

    def join(self, seconds: float) -> None:
        """Waits for the threads, that long at most."""
        self._listener.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it still has a thread."""
        return self._listener.is_alive()

    def _send_all(self) -> None:
        staging = torch.empty(2 * PIECE, dtype=torch.uint8)
        while (job := self._queue.get()) is not None:
            with self._lock:
                if self.lost is not None:
                    job.end(Status.FAILED, f"never sent: {self.lost}")
                    continue
                self._awaiting.append(job)
            try:
                self._send(job, staging)
            except (OSError, RuntimeError, MemoryError) as error:
                self._lose(str(error))
        self._connection.finish()

    def _send(self, job: Job, staging: torch.Tensor) -> None:
        rows, send = job.copies, self._connection.send_bytes
        table = np.stack((rows.target_regions, rows.target_offsets, rows.lengths)).astype("<i8", copy=False)
        send(_HEADER.pack(len(rows), len(job.tag)), job.tag, table.data.cast("B") if table.size else b"", seconds=None)
        for cut in pieces(rows.lengths):
            sources, offsets, lengths = rows.source_regions[cut], rows.source_offsets[cut], rows.lengths[cut]
            nbytes = gather(job.memories, sources, offsets, lengths, staging)
            send(staging.numpy().data[:nbytes], seconds=None)

    def _listen(self) -> None:
        ended = False
        try:
            while True:
                answer = self._connection.recv_bytes()
                with self._lock:
                    job = self._awaiting.popleft() if self._awaiting else None
                if job is None or answer[:1] not in (LANDED, REFUSED):
                    raise ConnectionError("it answered what it was not asked")
                job.end(Status.DONE if answer == LANDED else Status.FAILED, answer[1:].decode("utf-8", "replace"))
        except OSError as error:
            ended = isinstance(error, ConnectionEndedError)
            self._lose(str(error))
        while not ended and not self._closing:
            try:
                ended = self._connection.await_end(LOOKS_EVERY)
            except OSError:  # the machine cannot be reached: nothing is known of it, until a supervisor says so
                break
        self.drained = ended and not self._closing
        self._sender.join()
        self._connection.close()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = reason
            begun, self._awaiting = self._awaiting, deque()
            for job in begun:
                job.end(Status.UNKNOWN, f"the connection broke before the receiver's answer: {reason}")
            self._queue.put(None)
        self._when_lost(reason)
        self._connection.finish()  # so that the receiver ends too, and says so by closing its end
