"""Rows sent over TCP, by connections on which both sides have proved that they know the engine's secret.

Two-sided: rows are packed here, sent, and put into place by a thread of the receiver, which answers. So the receiver
decides what lands, and checks each row anew against its own regions. It needs nothing but Python, and works wherever
two processes reach each other.

A write is one message that names its rows, then the rows in pieces, then the receiver's answer. On the writing side one
thread packs and sends, and one listens for the answers; the receiving side is one thread. Rows are packed without a
Python loop over them, of any lengths: in grains, the largest size that divides every offset and length of a region.

Guarantees: `write`, `poll`, `drain` and `completions` never wait. One port listens, on `host` alone, and takes nothing
from, and tells nothing to, who does not know the secret; every byte of a row has a MAC. A peer that dies is noticed at
once, also while nothing is written. DONE follows the receiver's word alone, that the rows are in memory; FAILED that a
write was never sent, or refused. A row lands only inside a registered region, and none of a write that has one
elsewhere. The tag is delivered behind all its rows, the answer behind both. A write that was begun when a connection
broke is UNKNOWN. The receiver closes a connection only when nothing of it will land any more, and the system only after
the last thread of a process: so its end says that all has drained. Nothing is encrypted.
"""

import contextlib
import itertools
import json
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import arange_per_row
from batchstate.errors import ArgumentError
from batchstate.transport.connection import MOST_BYTES, Connection, ConnectionEndedError, Listener, connect
from batchstate.transport.engines.base import (
    MOST_TAG_BYTES,
    Capabilities,
    Copies,
    Delivery,
    Engine,
    Handle,
    Ints,
    Memory,
    Peer,
    Region,
    Status,
    nonce,
    parsed_native,
)
from batchstate.transport.wire import number, row, text

PIECE = 1 << 20
"""Bytes of one message, about: a piece is at most twice as long. While one is put into place the next is packed."""
MOST_ROWS = 1 << 20
"""Rows of one write, before long ones are cut into pieces."""
MOST_CUT_ROWS = (MOST_BYTES - 256) // 24
"""The same, once they are cut: their places fit into a message."""

LANDED, REFUSED = b"+", b"-"
"""The first byte of an answer; behind it the reason of a refusal."""
_HEADER = struct.Struct("<IB")
"""Rows, bytes of the tag. Behind it the tag, and int64[3, n]: region, offset and length of each row."""
_ADDRESS = row(text(), number(1, 65_535))
"""Host and port: this engine's part of an endpoint."""

LOOKS_EVERY = 0.05
"""Seconds between two looks whether this engine is being closed, while the other side has not closed a connection."""
CLOSES_IN = 5.0
"""Seconds that `close` waits for each thread at most; each is woken before."""

# Rows of several regions packed into one piece of memory, and back


def as_bytes(memory: Memory, name: str) -> torch.Tensor:
    """The same memory as uint8[nbytes]. ArgumentError: it is read-only."""
    if isinstance(memory, torch.Tensor):
        return memory.detach().reshape(-1).view(torch.uint8)
    if not memory.flags.writeable:
        raise ArgumentError(f"region {name!r} is read-only", name, "register memory that can be written")
    return torch.from_numpy(memory.reshape(-1).view(np.uint8))


def in_order(copies: Copies) -> Copies:
    """A copy with the rows of each pair of regions behind each other, and no row longer than a piece."""
    pair = copies.target_regions * (copies.source_regions.max(initial=0) + 1) + copies.source_regions
    ordered = copies.rows(np.argsort(pair, kind="stable"))
    return ordered.cut(PIECE)


def pieces(lengths: Ints) -> Iterator[slice]:
    """The rows of each message; the same on both sides. `lengths` int64[n], each 1 to PIECE."""
    number = (np.cumsum(lengths) - 1) // PIECE
    start = 0
    for last in np.flatnonzero(np.diff(number)):  # one by one: a foreign process may announce a million pieces
        yield slice(start, int(last) + 1)
        start = int(last) + 1
    if lengths.size:
        yield slice(start, lengths.size)


def gather(memories: Mapping[int, torch.Tensor], regions: Ints, offsets: Ints, lengths: Ints, out: torch.Tensor) -> int:
    """Packs rows of regions into `out` uint8[...], behind each other. All integers int64[n]. Returns how many bytes."""
    end = 0
    for region, index, grain, start, end in _row_groups(regions, offsets, lengths):
        memory, part = memories[region], out[start:end]
        if memory.device.type == "cpu" and part.device.type == "cpu":
            np.take(_grains(memory, grain), index, out=_grains(part, grain), mode="clip")
        else:
            with _own_stream(memory.device):
                numbers = torch.from_numpy(index).to(memory.device, non_blocking=True)
                _matrix(part, grain).copy_(_matrix(memory, grain).index_select(0, numbers), non_blocking=True)
    return end


def scatter(
    memories: Mapping[int, torch.Tensor], regions: Ints, offsets: Ints, lengths: Ints, packed: torch.Tensor
) -> None:
    """Puts rows packed in `packed` uint8[...] into their places. All integers int64[n]; the places do not overlap."""
    for region, index, grain, start, end in _row_groups(regions, offsets, lengths):
        memory, part = memories[region], packed[start:end]
        if memory.device.type == "cpu" and part.device.type == "cpu":
            _grains(memory, grain)[index] = _grains(part, grain)
        else:
            with _own_stream(memory.device):
                numbers = torch.from_numpy(index).to(memory.device, non_blocking=True)
                rows = _matrix(part, grain).to(memory.device, non_blocking=True)
                _matrix(memory, grain).index_copy_(0, numbers, rows)


_streams = threading.local()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A window on this thread's own stream of a device, behind no kernel of the engine; then its copies are made.

    So a tag is delivered behind its rows, and the engine's streams need not wait for them. The thread waits by an
    event: torch's sync-debug mode, by which an engine looks for hidden waits of its own, lets it pass.
    """
    streams, name = vars(_streams), str(device)
    if name not in streams:
        streams[name] = torch.Stream(device)
    with streams[name]:
        yield
    event = torch.Event(device)
    event.record(streams[name])
    event.synchronize()


def _row_groups(regions: Ints, offsets: Ints, lengths: Ints) -> Iterator[tuple[int, Ints, int, int, int]]:
    """For rows of one region behind each other: region, int64[m] grain numbers, bytes of a grain, place when packed."""
    bounds = [0, *(np.flatnonzero(np.diff(regions)) + 1).tolist(), regions.size]
    end = 0
    for first, last in itertools.pairwise(bounds):
        begins, sizes = offsets[first:last], lengths[first:last]
        grain = int(np.gcd(np.gcd.reduce(begins), np.gcd.reduce(sizes)))
        index, counts = begins // grain, sizes // grain
        if counts.max() > 1:
            index = arange_per_row(index, counts)
        start, end = end, end + int(sizes.sum())
        yield int(regions[first]), index, grain, start, end


def _grains(memory: torch.Tensor, grain: int) -> npt.NDArray[np.void]:
    """Memory as items of `grain` bytes, without a rest at the end; numpy moves each by one copy."""
    whole = memory.numel() // grain * grain
    return memory.numpy()[:whole].view(np.dtype((np.void, grain)))


def _matrix(memory: torch.Tensor, grain: int) -> torch.Tensor:
    return memory[: memory.numel() // grain * grain].view(-1, grain)


# The two sides of a connection


@final
class Inbox:
    """Memory and deliveries (tags behind their data), shared by the receiving threads of an engine and its owner."""

    def __init__(self) -> None:
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.memories: dict[int, torch.Tensor] = {}  # uint8[nbytes] by index; never changed, but replaced

    def refusal(self, table: Ints) -> str:
        """The reason why rows int64[3, n] may not be written into the regions registered now; empty if they may."""
        regions, offsets, lengths = table
        memories = self.memories
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
        span = f"{lengths[row]} bytes from {offsets[row]} on"
        return f"row {row}: {span} leave region {regions[row]} of {size[row]} bytes"


@final
class Incoming:
    """A connection by which another process writes. Nothing of it waits, but for its `thread`."""

    def __init__(self, inbox: Inbox, connection: Connection) -> None:
        self._inbox = inbox
        self._connection = connection
        self.thread = threading.Thread(target=self._run, name="batchstate receiver", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends it now."""
        self._connection.wake()

    def _run(self) -> None:
        try:
            # The writer is gone, its message is malformed, or the memory for it cannot be had.
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
        reason, memories = self._inbox.refusal(table), self._inbox.memories
        for cut in pieces(table[2]):  # refused rows are received too, and dropped
            nbytes = int(table[2, cut].sum())
            if self._connection.recv_bytes_into(staging.numpy().data[:nbytes]) != nbytes:
                raise ValueError("a piece of another length than announced")
            if not reason:
                regions, offsets, lengths = table[:, cut]
                scatter(memories, regions, offsets, lengths, staging[:nbytes])
        if not reason:
            self._inbox.deliveries.put(Delivery(tag, writer))
        self._connection.send_bytes(REFUSED + reason.encode() if reason else LANDED)


@final
@attrs.define(eq=False)
class Job:
    """One write on its way."""

    tag: bytes
    copies: Copies  # as `in_order` gives them
    memories: Mapping[int, torch.Tensor]  # the source regions by index, uint8
    outgoing: "Outgoing"
    reason: str = ""
    status: Status = Status.PENDING  # set by a thread of `outgoing`, once

    def end(self, status: Status, reason: str = "") -> None:
        """Sets the reason of a failure, and behind it the status."""
        self.reason = reason
        self.status = status


@final
class Outgoing:
    """A connection by which this process writes. Nothing of it waits, but for its threads.

    Attributes:
        thread: the one that ends last.
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
        self.thread = threading.Thread(target=self._listen, name="batchstate answers", daemon=True)
        self._sender.start()
        self.thread.start()

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


# The engine


@final
class TcpEngine(Engine):
    """Writes over a connection for each direction.

    The rows must have been written before `write`, on a device too: they are read by another thread, on another stream.
    A write needs 24 bytes a row beside them, and each connection 2 MiB of staging on each side.

    Args:
        host: address or name to listen on, which peers reach.
        port: to listen on; 0 takes any.

    Raises:
        TransferError: the address cannot be bound.
    """

    name = "tcp"
    capabilities = Capabilities(one_sided=False, max_rows=MOST_ROWS)

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        self._inbox = Inbox()
        self._outgoing: list[Outgoing] = []
        self._incoming: list[Incoming] = []
        self._listener = Listener((host, port), self._secret, self._arrived)

    # Memory

    def _register(self, region: Region) -> None:
        self._inbox.memories = {**self._inbox.memories, region.index: as_bytes(region.memory, region.name)}

    # Peers

    def _endpoint(self) -> bytes:
        return json.dumps(self._listener.address).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        address = parsed_native(endpoint, _ADDRESS, "an address of this engine")
        connection = connect(address, peer.secret)
        connection.send_bytes(self.instance.encode())

        def lost(reason: str) -> None:
            peer.lost = peer.lost or reason

        self._outgoing = [other for other in self._outgoing if other.thread.is_alive()]
        peer.native = Outgoing(connection, lost)
        self._outgoing.append(peer.native)

    def _disconnect(self, peer: Peer) -> None:
        peer.native.finish()

    def _arrived(self, connection: Connection) -> None:
        """Called by the thread of the listener."""
        self._incoming = [other for other in self._incoming if other.thread.is_alive()]
        self._incoming.append(Incoming(self._inbox, connection))

    # Transfers

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        rows = in_order(copies)
        if len(rows) > MOST_CUT_ROWS:
            problem = f"{len(rows)} rows once long ones are cut; {MOST_CUT_ROWS} fit into a message"
            raise ArgumentError(problem, len(rows), "cut the write with `transport.plan.chunked`")
        handle.native = Job(handle.tag, rows, self._inbox.memories, handle.peer.native)
        handle.peer.native.submit(handle.native)

    def _poll(self, handle: Handle) -> Status:
        job: Job = handle.native
        status, handle.reason = job.status, job.reason  # in this order: the reason is set before the status
        return status

    def _drained(self, handle: Handle) -> bool:
        job: Job = handle.native
        return job.outgoing.drained

    def _completions(self) -> list[Delivery]:
        return [self._inbox.deliveries.get() for _ in range(self._inbox.deliveries.qsize())]

    def _close(self) -> None:
        """Waits for its threads: a moment."""
        self._listener.close()
        pairs: list[Outgoing | Incoming] = [*self._outgoing, *self._incoming]
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.thread.join(CLOSES_IN)
        self._outgoing, self._incoming = [], []
