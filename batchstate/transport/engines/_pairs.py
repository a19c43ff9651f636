"""Two processes joined for one direction: how they meet, what they say to each other, and the two sides of a pair.

On the writing side one thread packs and sends, and one listens for the answers; the reading side is one thread.

Guarantees: each job ends exactly once, unless the engine is closed first. DONE follows the receiver's word alone, that
the rows are in memory; FAILED that it was never sent, or refused; all that was begun when the pair broke is UNKNOWN.
"""

import contextlib
import itertools
import json
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Self, final

import attrs
import numpy as np
import torch
import torch.distributed

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.engines._packing import PIECE, gather, pieces, scatter, staging, synchronize
from batchstate.transport.engines.base import MOST_TAG_BYTES, Delivery, Status
from batchstate.transport.regions import Copies, Ints
from batchstate.transport.wire import flag, nonce, number, parsed, record, text

# What the two sides of a pair say to each other, byte for byte.

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

    kind: int
    rows: int = 0
    tag: bytes = b""

    def packed(self) -> torch.Tensor:
        """As uint8."""
        return _message(_HEADER.pack(self.kind, self.rows, len(self.tag), self.tag))

    @classmethod
    def read(cls, message: torch.Tensor) -> "Header":
        """Of `packed`. Values are as they came, unchecked."""
        kind, rows, length, tag = _HEADER.unpack(message.numpy().data)
        return cls(kind, rows, tag[:length])


@final
@attrs.frozen
class Answer:
    """What became of a write."""

    verdict: int
    reason: str = ""

    def packed(self) -> torch.Tensor:
        """As uint8."""
        reason = self.reason.encode("ascii", "replace")[:240]
        return _message(_ANSWER.pack(self.verdict, len(reason), reason))

    @classmethod
    def read(cls, message: torch.Tensor) -> "Answer":
        """Of `packed`."""
        verdict, length, reason = _ANSWER.unpack(message.numpy().data)
        return cls(verdict, reason[:length].decode("ascii", "replace"))


def header_room() -> torch.Tensor:
    """Memory for a header."""
    return torch.empty(_HEADER.size, dtype=torch.uint8)


def answer_room() -> torch.Tensor:
    """Memory for an answer."""
    return torch.empty(_ANSWER.size, dtype=torch.uint8)


def refusal(sizes: dict[int, int], table: Ints) -> str:
    """Why rows int64[3, n] may not be written into regions of those sizes (index -> bytes), or an empty string."""
    regions, offsets, lengths = table
    present = np.unique(regions)
    unknown = [index for index in present.tolist() if index not in sizes]
    if unknown:
        return f"region {unknown[0]} is not registered at the receiver"
    room = np.array([sizes[index] for index in present.tolist()], dtype=np.int64)[np.searchsorted(present, regions)]
    outside = np.flatnonzero((offsets < 0) | (offsets > room) | (lengths > room - offsets))
    if outside.size:
        row = int(outside[0])
        return (
            f"row {row}: {lengths[row]} bytes from {offsets[row]} on leave region {regions[row]} of {room[row]} bytes"
        )
    return ""


def _message(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# How another process reaches an engine: one question and one answer per connection, in JSON lines.
#
# Questions are "meet" (form a pair with me) and "ended" (has your receiving thread of that pair ended?).
#
# Guarantees: a client has an answer or an error within its time, also of a process that is stopped. The engine listens
# on one address only, and until after the last receiving thread has ended: so when a connection is refused, nothing
# more lands.

Address = tuple[str, int]

MOST_LINE_BYTES = 4096
ASKS_WITHIN = 1.0
"""Seconds that a client has for the whole question."""

MOST_CLIENTS = 64
"""Clients that have connected and not asked yet: of more, the one that came first is sent away."""

CLOCK_PERIOD = 0.05
"""Seconds between two looks at the clock, while a client has not asked yet or the accept loop is to end."""

_MEET = record(ask=text("meet"), instance=text(), pair=nonce, writer=nonce)
_ENDED = record(ask=text("ended"), instance=text(), pair=nonce)
_REPLY = record(instance=text(), store=number(), met=flag, ended=flag)


def _question(value: Any) -> dict[str, Any]:
    schema = _MEET if isinstance(value, dict) and value.get("ask") == "meet" else _ENDED
    found: dict[str, Any] = schema(value)
    return found


@final
@attrs.define(eq=False)
class _Client:
    """A process that has connected and not asked yet: until when it has time, on the monotonic clock, and its words."""

    connection: socket.socket
    until: float
    heard: bytes = b""


@final
class AcceptLoop:
    """Answers for one engine. Nothing that a client sends, or does not send, keeps it from answering others.

    Args:
        host: to listen on.
        port: the same.
        instance: of the engine.
        store_port: of the engine.
        meet: starts a receiving thread for a pair, given its name and its writer; False: there are too many.

    Attributes:
        address: where it listens.
        live: names of the pairs that have a receiving thread.
    """

    def __init__(self, host: str, port: int, instance: str, store_port: int, meet: Callable[[str, str], bool]) -> None:
        self.live: set[str] = set()
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)
        self.address: Address = (host, self._socket.getsockname()[1])
        self._instance = instance
        self._store_port = store_port
        self._meet = meet
        self._lock = threading.Lock()
        self._meeting = True
        self._open = True
        self._clients: list[_Client] = []
        self._thread = threading.Thread(target=self._run, name="batchstate accept loop", daemon=True)
        self._thread.start()

    def refuse(self) -> None:
        """Forms no more pairs; when it returns, none is being formed."""
        with self._lock:
            self._meeting = False

    def close(self) -> None:
        """Stops listening: at once, or, without a wait, when the last receiving thread has ended."""
        self._open = False
        with contextlib.suppress(OSError):
            socket.create_connection(self.address, ASKS_WITHIN).close()
        if not self.live:
            self._thread.join()

    def _run(self) -> None:
        with self._socket, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while self._open or self.live:
                waits = CLOCK_PERIOD if self._clients or not self._open else None
                for key, _ in selector.select(waits):
                    if key.data is None:
                        self._accept(selector)
                    elif self._heard(key.data):
                        self._dismiss(selector, key.data)
                late = [one for one in self._clients if one.until < time.monotonic()]
                for client in (*late, *self._clients[len(late) : -MOST_CLIENTS]):
                    self._dismiss(selector, client)
            for client in tuple(self._clients):
                self._dismiss(selector, client)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has gone already, or there is no room for one more file
            time.sleep(CLOCK_PERIOD)
            return
        connection.setblocking(False)
        self._clients.append(_Client(connection, time.monotonic() + ASKS_WITHIN))
        selector.register(connection, selectors.EVENT_READ, self._clients[-1])

    def _dismiss(self, selector: selectors.BaseSelector, client: _Client) -> None:
        self._clients.remove(client)
        selector.unregister(client.connection)
        client.connection.close()

    def _heard(self, client: _Client) -> bool:
        """Hears what a client says, and answers. Whether that is all."""
        try:
            part = client.connection.recv(MOST_LINE_BYTES)
            client.heard += part
            if not client.heard.endswith(b"\n"):
                return not part or len(client.heard) > MOST_LINE_BYTES
            question = parsed(client.heard, _question, "a question to an engine", ArgumentError, "use `ask`")
            client.connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")  # short: it fits
        except (OSError, ValueError, RuntimeError, MemoryError):
            pass  # not a question, or the client has gone; or there is no room for one more thread
        return True

    def _answer(self, question: dict[str, Any]) -> dict[str, object]:
        pair, met = question["pair"], False
        with self._lock:
            wanted = question["ask"] == "meet" and question["instance"] == self._instance
            if wanted and self._meeting and pair not in self.live:
                self.live.add(pair)
                try:
                    met = self._meet(pair, question["writer"])
                finally:
                    if not met:
                        self.live.discard(pair)
        ended = question["ask"] == "ended" and pair not in self.live
        return {"instance": self._instance, "store": self._store_port, "met": met, "ended": ended}


def ask(address: Address, instance: str, timeout: float, question: Mapping[str, object]) -> dict[str, Any]:
    """Asks one engine.

    Raises:
        ConnectionRefusedError: no process listens there.
        OSError: not reached, or no answer in time.
        ArgumentError, ValueError: something else listens there.
        HandshakeError: another engine listens there.
    """
    until = time.monotonic() + timeout
    line = b""
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(json.dumps({**question, "instance": instance}).encode() + b"\n")
        while not line.endswith(b"\n"):
            connection.settimeout(max(until - time.monotonic(), 0.001))
            part = connection.recv(MOST_LINE_BYTES)
            if not part or len(line) > MOST_LINE_BYTES:
                raise ValueError("no line")
            line += part
    answer: dict[str, Any] = parsed(line, _REPLY, "an engine's answer", ArgumentError, "see what listens there")
    if answer["instance"] != instance:
        raise HandshakeError(
            f"instance {instance} was expected at {address[0]}:{address[1]}, {answer['instance']} is there",
            value=answer["instance"],
            remedy="the peer was started anew: ask it for its endpoint again",
        )
    return answer


@final
@attrs.frozen
class EndWatch:
    """Tells the writer of a broken pair when the thread that receives has ended: no row of it can still land.

    Either the other engine says so, or a connection is refused, or another engine listens there: it stops listening
    after its receiving threads have ended, and the system does so after the last thread of a process that died. A peer
    that does not answer at all may still run, and has not ended. Where addresses move between machines, a refused
    connection proves nothing.
    """

    address: Address
    instance: str
    pair: str
    timeout: float

    def ended(self) -> bool:
        """Whether it has. Waits for the answer, `timeout` seconds at most."""
        try:
            answer = ask(self.address, self.instance, self.timeout, {"ask": "ended", "pair": self.pair})
        except (ConnectionRefusedError, HandshakeError):
            return True
        except (OSError, ValueError):
            return False
        return bool(answer["ended"])


# Two processes joined by torch.distributed without its global group: how they meet and part.
#
# Each engine hosts a store. In that of the reader the two form a group, for this one direction. Headers and
# answers travel over gloo; rows too, or over NCCL where staging lies on a GPU.
#
# Guarantees: everything listens on the one address it was given. `join` ends within its time. `part` ends every wait
# of the pair, in any thread: at once, or, for a message that is half there, after `stall`.

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


def client(address: Address, timeout: float) -> Store:
    """A connection to a store. Each thread has its own: a wait on one blocks all use of it.

    Raises:
        RuntimeError: no store answers there in time.
    """
    return dist.TCPStore(*address, is_master=False, timeout=_span(timeout), wait_for_workers=False)


def private(store: Store, name: str) -> Store:
    """The part of a store that belongs to one pair."""
    return dist.PrefixStore(name, store)


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
    def join(cls, store: Store, rank: int, host: str, device: torch.device, timeout: float, stall: float) -> Self:
        """Meets the other side in a part of a store that only the two use.

        Raises:
            RuntimeError: the other side did not come in time.
        """
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _span(timeout)
        options._threads = 1
        control = dist.ProcessGroupGloo(private(store, "control"), rank, 2, options)
        if device.type == "cpu":
            data: Any = dist.ProcessGroupGloo(private(store, "data"), rank, 2, options)
        else:
            data = dist.ProcessGroupNCCL(private(store, "data"), rank, 2, dist.ProcessGroupNCCL.Options())
        return cls(control, data, device, 1 - rank, _span(stall))

    def send(self, message: torch.Tensor) -> None:
        """Sends a small message, and waits. RuntimeError: the pair is broken."""
        self.begin(message)()

    def begin(self, message: torch.Tensor) -> Callable[[], object]:
        """Begins to send a small message; returns what waits for the end."""
        work = self.control.send([message], self.other, 0)
        return lambda: work.wait(EVER)

    def receive(self, message: torch.Tensor) -> torch.Tensor:
        """Receives a small message of just that size, and waits for it. RuntimeError: the pair is broken."""
        self.control.recv([message], self.other, 0).wait(EVER)
        return message

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
        """Ends the pair: every wait on it, here and on the other side, gets a RuntimeError."""
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


# The reading side of a pair: a thread that takes rows, checks where they go, and puts them there.
#
# Guarantees: a row lands only inside a region that is registered at that moment; of a write with one row elsewhere none
# does. The tag is delivered behind all its rows, the answer behind both.


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
        """Why rows int64[3, n] may not be written, or an empty string."""
        with self._lock:
            return self._refusal(table)

    def land(self, table: Ints, packed: torch.Tensor) -> str:
        """Puts rows int64[3, n] into place, all or none; why none, or an empty string."""
        with self._lock:
            reason = self._refusal(table)
            if not reason:
                scatter(self._memories, table[0], table[1], table[2], packed)
                synchronize(self._memories, table[0])
            return reason

    def memories(self) -> dict[int, torch.Tensor]:
        """The regions' memory by index, as it is now."""
        return dict(self._memories)

    def _refusal(self, table: Ints) -> str:
        return refusal({index: memory.numel() for index, memory in self._memories.items()}, table)


@final
@attrs.frozen
class Meeting:
    """What a receiving thread needs to meet a writer."""

    live: set[str]  # names of the pairs that have such a thread: this one leaves it at its end, as `EndWatch` relies on
    address: Address  # of the engine's store
    name: str  # of the pair
    writer: str  # the other engine's instance
    device: torch.device  # for staging
    timeout: float  # for the meeting, in seconds
    stall: float  # for a message that was begun, in seconds


@final
class Incoming:
    """A pair on which another process writes. Its methods never wait, but for `join`."""

    def __init__(self, meeting: Meeting, inbox: Inbox) -> None:
        self._inbox = inbox
        self._pair: Pair | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(meeting,), name="batchstate receiver", daemon=True)
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

    def _run(self, meeting: Meeting) -> None:
        try:
            with contextlib.suppress(RuntimeError, MemoryError, TransferError):  # the writer has gone, or `close` came
                self._serve(meeting)
        finally:
            with self._lock:
                pair, self._pair = self._pair, None
            try:
                if pair is not None:
                    pair.part()
            finally:
                meeting.live.discard(meeting.name)

    def _serve(self, meeting: Meeting) -> None:
        store = private(client(meeting.address, meeting.timeout), meeting.name)
        pair = Pair.join(store, READER, meeting.address[0], meeting.device, meeting.timeout, meeting.stall)
        with self._lock:
            self._pair = pair
            if self._closing:
                return
        rooms = (staging(meeting.device), staging(meeting.device))
        while True:
            header = Header.read(pair.receive(header_room()))
            pair.send(self._taken(pair, header, meeting.writer, rooms).packed())

    def _taken(self, pair: Pair, header: Header, writer: str, rooms: tuple[torch.Tensor, torch.Tensor]) -> Answer:
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
            reason = self._rows(pair, table, rooms)
            if reason:
                return Answer(REFUSED, reason)
        self._inbox.deliveries.put(Delivery(header.tag, writer))
        return Answer(LANDED)

    def _rows(self, pair: Pair, table: Ints, rooms: tuple[torch.Tensor, torch.Tensor]) -> str:
        """Puts each piece into place while the next one arrives. Refused rows are received too, and dropped."""
        reason = self._inbox.refusal(table)
        room = itertools.cycle(rooms)

        def receive(cut: slice) -> tuple[torch.Tensor, Callable[[], object]]:
            part = next(room)[: int(table[2, cut].sum())]
            return part, pair.receive_rows(part)

        cuts = pieces(table[2])
        cut = next(cuts)
        part, arrived = receive(cut)
        for following in cuts:
            arrived()
            landing = part
            part, arrived = receive(following)
            pair.send(Answer(GOT).packed())
            reason = reason or self._inbox.land(table[:, cut], landing)
            cut = following
            if Header.read(pair.receive(header_room())).kind != PIECE_COMES:
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
    """

    def __init__(self, pair: Pair, watch: EndWatch, when_lost: Callable[[str], None]) -> None:
        self.lost: str | None = None
        self._pair: Pair | None = pair
        self._watch = watch
        self._when_lost = when_lost
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._awaiting: deque[Job] = deque()
        self._closing = threading.Event()
        self._ended = False
        self._room_free = threading.Semaphore(2)
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

    @property
    def drained(self) -> bool:
        """Whether nothing that was sent can still land, nor a source be read. See `EndWatch`."""
        return self._ended

    def _send_all(self, pair: Pair) -> None:
        rooms = (staging(pair.device), staging(pair.device))
        while (job := self._queue.get()) is not None:
            try:
                self._send(pair, job, rooms)
            except (RuntimeError, MemoryError) as error:
                self._lose(pair, said(error))
        if not self._broken():
            try:
                pair.send(Header(BYE).packed())
            except RuntimeError as error:
                self._lose(pair, said(error))

    def _send(self, pair: Pair, job: Job, rooms: tuple[torch.Tensor, torch.Tensor]) -> None:
        with self._lock:
            if self.lost is not None:
                job.end(Status.FAILED, f"never sent: {self.lost}")
                return
            self._awaiting.append(job)
        rows = job.copies
        announced = Header(WRITE, len(rows), job.tag).packed()
        if not len(rows):
            pair.send(announced)
            return
        for index, cut in enumerate(pieces(rows.lengths)):
            self._room_free.acquire()
            if self._broken():
                return
            if len(self._flight) == len(rooms):
                for ended in self._flight.popleft():  # at once: the receiver has said that it is there
                    ended()
            room = rooms[self._turn]
            self._turn = (self._turn + 1) % len(rooms)
            nbytes = gather(job.memories, rows.source_regions[cut], rows.source_offsets[cut], rows.lengths[cut], room)
            if index:
                begun = [pair.begin(Header(PIECE_COMES).packed())]
            else:
                table = np.stack((rows.target_regions, rows.target_offsets, rows.lengths))
                begun = [pair.begin(announced), pair.send_rows(torch.from_numpy(table).to(pair.device))]
            self._flight.append([*begun, pair.send_rows(room[:nbytes])])

    def _listen(self, pair: Pair) -> None:
        try:
            while True:
                answer = Answer.read(pair.receive(answer_room()))
                if answer.verdict == GOT:
                    self._room_free.release()
                    continue
                with self._lock:
                    job = self._awaiting.popleft() if self._awaiting else None
                if job is None:  # it answers the end
                    pair.part()
                    break
                if len(job.copies):
                    self._room_free.release()
                job.end(Status.DONE if answer.verdict == LANDED else Status.FAILED, answer.reason)
                if answer.verdict == ENDED:
                    self._lose(pair, answer.reason)
                    break
        except RuntimeError as error:
            self._lose(pair, said(error))
        self._sender.join()
        self._pair = None
        while self.lost is not None and not self._ended and not self._closing.is_set():
            self._ended = self._watch.ended()
            self._closing.wait(0.0 if self._ended else LOOKS_EVERY)

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
            self._room_free.release()
        self._when_lost(reason)
        pair.part()
