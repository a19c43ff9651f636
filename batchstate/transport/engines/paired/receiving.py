"""The reading side of a pair: a thread that takes rows, judges where they go, and puts them there.

Guarantees: a row lands only inside a region that is registered at that moment; of a write with one row elsewhere none
does. The tag is delivered behind all its rows, the answer behind both.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from typing import final

import attrs
import torch

from batchstate.errors import TransferError
from batchstate.transport.copies import Ints
from batchstate.transport.engines.base import Delivery
from batchstate.transport.engines.paired.packing import PIECE, pieces, scatter, settle, staging
from batchstate.transport.engines.paired.pairs import READER, Pair, client, private
from batchstate.transport.engines.paired.reception import Address
from batchstate.transport.engines.paired.wire import (
    BYE,
    ENDED,
    GOT,
    LANDED,
    MOST_ROWS,
    PIECE_COMES,
    REFUSED,
    WRITE,
    Answer,
    Header,
    header_room,
    refusal,
)


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
                settle(self._memories, table[0])
            return reason

    def memories(self) -> dict[int, torch.Tensor]:
        """The regions' memory by index, as it is now."""
        return dict(self._memories)

    def _refusal(self, table: Ints) -> str:
        return refusal({index: memory.numel() for index, memory in self._memories.items()}, table)


@final
@attrs.frozen
class Meeting:
    """What a receiving thread needs to meet a writer.

    Attributes:
        live: names of the pairs that have such a thread: this one leaves it at its end, as `EndWatch` relies on.
        address: of the engine's store.
        name: of the pair.
        writer: the other engine's instance.
        device: for staging.
        timeout: for the meeting, in seconds.
        stall: for a message that was begun, in seconds.
    """

    live: set[str]
    address: Address
    name: str
    writer: str
    device: torch.device
    timeout: float
    stall: float


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
