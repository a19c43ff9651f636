"""Two processes joined for one direction, without the global group of torch.distributed; and both sides of the pair.

Each engine hosts a store. In that of the reader the two form a group, for this one direction. Headers and answers
travel over gloo; rows too, or over NCCL where staging lies on a GPU. On the writing side (`Outgoing`) one thread packs
and sends, and one listens for the answers; the reading side (`Incoming`) is one thread.

Guarantees: everything listens on the one address it was given. Each job ends exactly once, unless the engine is closed
first. DONE follows the receiver's word alone, that the rows are in memory; FAILED that it was never sent, or refused;
all that was begun when the pair broke is UNKNOWN. A row lands only inside a region that is registered at that moment;
of a write with one row elsewhere none does. The tag is delivered behind all its rows, the answer behind both.
"""

import contextlib
import itertools
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableSet
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar, final

import attrs
import numpy as np
import torch
import torch.distributed

from batchstate.errors import TransferError
from batchstate.transport.engines._packing import PIECE, gather, pieces, scatter, staging, synchronize
from batchstate.transport.engines._rendezvous import Address, EndWatch
from batchstate.transport.engines.base import MOST_TAG_BYTES, Delivery, Status
from batchstate.transport.regions import Copies, Ints

WRITE, PIECE_COMES, BYE = 1, 2, 3
"""Kinds of header. Rows, if a write has any, follow on the data group: int64[3, n] (region, offset, length) and the
first piece at once, each further piece behind a header of its own."""

LANDED, REFUSED, ENDED, GOT = 1, 2, 3, 4
"""Answers in the order of the writes and the end. GOT comes before them, for each piece but the last of a write: it is
there. REFUSED: nothing more of the write lands. ENDED: nor is anything more received."""

MOST_ROWS = 1 << 20
"""Of one write, before long rows are cut into pieces."""

_HEADER = struct.Struct(f"<qqq{MOST_TAG_BYTES}s")
_ANSWER = struct.Struct("<qq240s")


@final
@attrs.frozen
class Header:
    """Announces a write of so many rows and its tag, or the end."""

    SIZE: ClassVar[int] = _HEADER.size

    kind: int
    rows: int = 0
    tag: bytes = b""

    def packed(self) -> bytes:
        """As it travels."""
        return _HEADER.pack(self.kind, self.rows, len(self.tag), self.tag)

    @classmethod
    def unpacked(cls, packed: bytes | memoryview) -> Self:
        """Values are as they came, unchecked."""
        kind, rows, length, tag = _HEADER.unpack(packed)
        return cls(kind, rows, tag[:length])


@final
@attrs.frozen
class Answer:
    """What became of a write."""

    SIZE: ClassVar[int] = _ANSWER.size

    verdict: int
    reason: str = ""

    def packed(self) -> bytes:
        """As it travels."""
        reason = self.reason.encode("ascii", "replace")[:240]
        return _ANSWER.pack(self.verdict, len(reason), reason)

    @classmethod
    def unpacked(cls, packed: bytes | memoryview) -> Self:
        """The reason as it came, in ASCII."""
        verdict, length, reason = _ANSWER.unpack(packed)
        return cls(verdict, reason[:length].decode("ascii", "replace"))


Message = TypeVar("Message", Header, Answer)

dist: Any = torch.distributed  # its own annotations leave most of what is used here out

Store = Any
"""Of torch: `TCPStore`, or a part of one."""

EVER = timedelta(days=365)
"""A wait that only an end of the pair ends: a time-out would close the pair, for good."""

WRITER, READER = 0, 1
_UNUSED = 99


def host_store(host: str, timeout: float) -> Store:
    """The store of an engine, listening on one address only, at any port.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = socket.create_server((host, 0))
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host, bound, is_master=True, timeout=_span(timeout), wait_for_workers=False, master_listen_fd=listener.detach()
    )


@final
@attrs.frozen(eq=False)
class Pair:
    """A group of two processes. Made by `join`."""

    control: Any  # for headers and answers, so small that they arrive whole or not at all
    data: Any  # for rows
    device: torch.device  # on which rows are staged
    other: int  # the rank of the other side
    stall: timedelta  # how long a message that was begun may take to arrive

    @classmethod
    def join(
        cls, store: Address, name: str, rank: int, host: str, device: torch.device, timeout: float, stall: float
    ) -> Self:
        """Meets the other side in the part of a store that belongs to the pair of this name. Ends within `timeout`.

        Raises:
            RuntimeError: no store answers there, or the other side did not come in time.
        """
        # Each thread has a connection of its own: a wait on one blocks all use of it.
        connection = dist.TCPStore(*store, is_master=False, timeout=_span(timeout), wait_for_workers=False)
        part = dist.PrefixStore(name, connection)
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _span(timeout)
        options._threads = 1
        control = dist.ProcessGroupGloo(dist.PrefixStore("control", part), rank, 2, options)
        if device.type == "cpu":
            data: Any = dist.ProcessGroupGloo(dist.PrefixStore("data", part), rank, 2, options)
        else:
            data = dist.ProcessGroupNCCL(dist.PrefixStore("data", part), rank, 2, dist.ProcessGroupNCCL.Options())
        return cls(control, data, device, 1 - rank, _span(stall))

    def send(self, message: Header | Answer) -> None:
        """Sends, and waits. RuntimeError: the pair is broken."""
        self.begin(message)()

    def begin(self, message: Header | Answer) -> Callable[[], object]:
        """Begins to send; returns what waits for the end."""
        work = self.control.send([torch.frombuffer(bytearray(message.packed()), dtype=torch.uint8)], self.other, 0)
        return lambda: work.wait(EVER)

    def receive(self, kind: type[Message]) -> Message:
        """Waits for the next message, which is of this kind. RuntimeError: the pair is broken."""
        packed = torch.empty(kind.SIZE, dtype=torch.uint8)
        self.control.recv([packed], self.other, 0).wait(EVER)
        return kind.unpacked(packed.numpy().data)

    def send_rows(self, piece: torch.Tensor) -> Callable[[], object]:
        """Begins to send; returns what waits for the end, to be called when the receiver has said that it is there."""
        # When the pair ends gloo wakes no wait for a message of which a part is there, on neither side: these two waits
        # need an end of their own. A small message arrives whole.
        work = self.data.send([piece], self.other, 1)
        return lambda: work.wait(self.stall)

    def receive_rows(self, piece: torch.Tensor) -> Callable[[], object]:
        """Begins to receive; returns what waits for the end, to be called when the sender has begun."""
        work = self.data.recv([piece], self.other, 1)
        return lambda: work.wait(self.stall)

    def part(self) -> None:
        """Ends the pair: every wait on it, in any thread on both sides, gets a RuntimeError.

        At once; or, for a message that is half there, after `stall`.
        """
        # A receive that is given up closes a gloo pair: the one way in the interface of torch to end other waits.
        for group in (self.control, self.data):
            if isinstance(group, dist.ProcessGroupGloo):
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], self.other, _UNUSED).wait(timedelta(milliseconds=1))
            else:
                group.abort()


def said(error: Exception) -> str:
    """The first line of an error of torch, without its place in the source."""
    line = str(error).partition("\n")[0]
    return line.rpartition("] ")[2] if line.startswith("[") else line


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


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

    def most_rows(self) -> int:
        """Of one header. Rows do not overlap, so cutting them adds no more than all memory has pieces."""
        return MOST_ROWS + sum(memory.numel() for memory in self.memories().values()) // PIECE

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
                synchronize(self._memories, table[0])
            return reason

    def memories(self) -> dict[int, torch.Tensor]:
        """The regions' memory by index, as it is now."""
        return dict(self._memories)


@final
class Incoming:
    """A pair on which another process writes. Its methods never wait, but for `join`.

    Args:
        inbox: of the engine.
        join: meets the writer, in the thread of this pair.
        name: of the pair.
        writer: the other engine's instance.
        live: names of the pairs that have such a thread: this one leaves it at its end, as `EndWatch` relies on.
    """

    def __init__(self, inbox: Inbox, join: Callable[[], Pair], name: str, writer: str, live: MutableSet[str]) -> None:
        self._inbox = inbox
        self._join_writer = join
        self._writer = writer
        self._pair: Pair | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(name, live), name="batchstate receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the pair now."""
        with self._lock:
            self._closing = True
            pair = self._pair
        if pair is not None:
            pair.part()

    def join(self, seconds: float) -> None:
        """Waits for the thread, that long at most."""
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it still has a thread."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> bool:
        """Whether its writer called and has not come yet."""
        return self._pair is None and self.alive

    def _run(self, name: str, live: MutableSet[str]) -> None:
        try:
            with contextlib.suppress(RuntimeError, MemoryError, TransferError):  # the writer has gone, or `close` came
                self._serve()
        finally:
            with self._lock:
                pair, self._pair = self._pair, None
            try:
                if pair is not None:
                    pair.part()
            finally:
                live.discard(name)

    def _serve(self) -> None:
        pair = self._join_writer()
        with self._lock:
            self._pair = pair
            if self._closing:
                return
        buffers = (staging(pair.device), staging(pair.device))
        while True:
            pair.send(self._taken(pair, pair.receive(Header), buffers))

    def _taken(self, pair: Pair, header: Header, buffers: tuple[torch.Tensor, torch.Tensor]) -> Answer:
        """Receives what a header announces."""
        if header.kind == BYE:
            return Answer(LANDED)  # and then wait: the writer closes first, so that it gets this answer
        if header.kind != WRITE or not header.tag or not 0 <= header.rows <= self._inbox.most_rows():
            return Answer(ENDED, f"a header that makes no sense: {header}")
        if header.rows:
            arrived = torch.empty((3, header.rows), dtype=torch.int64, device=pair.device)
            pair.receive_rows(arrived)()
            table = arrived.cpu().numpy()
            if ((table[2] <= 0) | (table[2] > PIECE)).any():
                return Answer(ENDED, f"rows of {table[2].min()} to {table[2].max()} bytes; 1 to {PIECE} are taken")
            reason = self._rows(pair, table, buffers)
            if reason:
                return Answer(REFUSED, reason)
        self._inbox.deliveries.put(Delivery(header.tag, self._writer))
        return Answer(LANDED)

    def _rows(self, pair: Pair, table: Ints, buffers: tuple[torch.Tensor, torch.Tensor]) -> str:
        """Puts each piece into place while the next one arrives. Refused rows are received too, and dropped."""
        reason = self._inbox.refusal(table)
        buffer = itertools.cycle(buffers)

        def receive(cut: slice) -> tuple[torch.Tensor, Callable[[], object]]:
            part = next(buffer)[: int(table[2, cut].sum())]
            return part, pair.receive_rows(part)

        cuts = pieces(table[2])
        cut = next(cuts)
        part, arrived = receive(cut)
        for following in cuts:
            arrived()
            landing = part
            part, arrived = receive(following)
            pair.send(Answer(GOT))
            reason = reason or self._inbox.land(table[:, cut], landing)
            cut = following
            if pair.receive(Header).kind != PIECE_COMES:
                raise TransferError("a piece was announced by no header", remedy="update both sides")
        arrived()
        return reason or self._inbox.land(table[:, cut], part)


LOOKS_EVERY = 0.05
"""Seconds between two looks whether the receiver of a broken pair has ended."""


@final
@attrs.define(eq=False)
class Job:
    """One write on its way."""

    tag: bytes  # its tag
    copies: Copies  # its rows, as `packing.in_order` gives them
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
    """A pair on which this process writes. Its methods never wait, but for `join`.

    Attributes:
        lost: why the pair is broken, or None.
        drained: whether nothing that was sent can still land, nor a source be read. See `EndWatch`.
    """

    def __init__(self, pair: Pair, watch: EndWatch, when_lost: Callable[[str], None]) -> None:
        self.lost: str | None = None
        self.drained = False
        self._pair: Pair | None = pair
        self._watch = watch
        self._when_lost = when_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._awaiting: deque[Job] = deque()
        self._closing = threading.Event()
        self._buffer_free = threading.Semaphore(2)
        self._flight: deque[list[Callable[[], object]]] = deque()
        self._turn = 0
        self._sender = threading.Thread(target=self._send_all, args=(pair,), name="batchstate sender", daemon=True)
        self._listener = threading.Thread(target=self._listen, args=(pair,), name="batchstate listener", daemon=True)
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
        """Ends the pair behind what was submitted."""
        self._queue.put(None)

    def close(self) -> None:
        """Ends the pair now."""
        self._closing.set()
        if pair := self._pair:
            self._lose(pair, "this engine is closed")

    def join(self, seconds: float) -> None:
        """Waits for the threads, that long at most."""
        self._listener.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether it still has a thread."""
        return self._listener.is_alive()

    def _send_all(self, pair: Pair) -> None:
        buffers = (staging(pair.device), staging(pair.device))
        while (job := self._queue.get()) is not None:
            try:
                self._send(pair, job, buffers)
            except (RuntimeError, MemoryError) as error:
                self._lose(pair, said(error))
        if not self._broken():
            try:
                pair.send(Header(BYE))
            except RuntimeError as error:
                self._lose(pair, said(error))

    def _send(self, pair: Pair, job: Job, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        with self._lock:
            if self.lost is not None:
                job.end(Status.FAILED, f"never sent: {self.lost}")
                return
            self._awaiting.append(job)
        rows = job.copies
        announced = Header(WRITE, len(rows), job.tag)
        if not len(rows):
            pair.send(announced)
            return
        for index, cut in enumerate(pieces(rows.lengths)):
            self._buffer_free.acquire()
            if self._broken():
                return
            if len(self._flight) == len(buffers):
                for ended in self._flight.popleft():  # at once: the receiver has said that it is there
                    ended()
            buffer = buffers[self._turn]
            self._turn = (self._turn + 1) % len(buffers)
            sources, offsets, lengths = rows.source_regions[cut], rows.source_offsets[cut], rows.lengths[cut]
            nbytes = gather(job.memories, sources, offsets, lengths, buffer)
            if index:
                begun = [pair.begin(Header(PIECE_COMES))]
            else:
                table = np.stack((rows.target_regions, rows.target_offsets, rows.lengths))
                begun = [pair.begin(announced), pair.send_rows(torch.from_numpy(table).to(pair.device))]
            self._flight.append([*begun, pair.send_rows(buffer[:nbytes])])

    def _listen(self, pair: Pair) -> None:
        try:
            while True:
                answer = pair.receive(Answer)
                if answer.verdict == GOT:
                    self._buffer_free.release()
                    continue
                with self._lock:
                    job = self._awaiting.popleft() if self._awaiting else None
                if job is None:  # it answers the end
                    pair.part()
                    break
                if len(job.copies):
                    self._buffer_free.release()
                job.end(Status.DONE if answer.verdict == LANDED else Status.FAILED, answer.reason)
                if answer.verdict == ENDED:
                    self._lose(pair, answer.reason)
                    break
        except RuntimeError as error:
            self._lose(pair, said(error))
        self._sender.join()
        self._pair = None
        while self.lost is not None and not self.drained and not self._closing.is_set():
            self.drained = self._watch.ended()
            self._closing.wait(0.0 if self.drained else LOOKS_EVERY)

    def _broken(self) -> bool:
        return self.lost is not None

    def _lose(self, pair: Pair, reason: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = reason
            begun, self._awaiting = self._awaiting, deque()
            for job in begun:
                job.end(Status.UNKNOWN, f"the pair broke before the receiver's answer: {reason}")
            self._queue.put(None)
            self._buffer_free.release()
        self._when_lost(reason)
        pair.part()
