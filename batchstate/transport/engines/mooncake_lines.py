"""What leads from a Mooncake engine to a peer: rows under way, and the connection that carries their tags.

A tag is queued once each row of its write is acknowledged. The connection's end tells at once that the peer has ended.
"""

import contextlib
import socket
import time
from collections import deque
from typing import Any, final

import attrs

from batchstate.transport.engines.base import MOST_TAG_BYTES, Delivery, Peer

ROWS_IN_FLIGHT = 1024
"""Rows that Mooncake is given at a time, for each peer: as many as its queue takes by default."""

INSTANCE_BYTES = 16
MOST_AT_ONCE = 1 << 16
"""Bytes read of one connection at a time: who sends without end holds nobody up."""

GREETING_BYTES = 2 * INSTANCE_BYTES


@final
@attrs.define(eq=False)
class Progress:
    """How far one write is.

    Attributes:
        rows: address here, address there, bytes.
        tag: its tag.
        sent: rows that Mooncake has taken.
        ended: of these, rows that it has given an end to.
        refused: it did not take a row.
        doubtful: a row failed: bytes of it may still land.
        behind: the place in the peer's stream of tags behind which this tag is, once it is written there.
    """

    rows: list[tuple[int, int, int]]
    tag: bytes
    sent: int = 0
    ended: int = 0
    refused: bool = False
    doubtful: bool = False
    behind: int | None = None


@final
@attrs.define(eq=False)
class Line:
    """What leads to one peer: its rows under way, oldest first, and the connection for tags.

    Attributes:
        peer: whom it leads to.
        engine: Mooncake's, which opened the peer; None once closed.
        target: Mooncake's name of the peer.
        wire: connection for tags; its end is the peer's, unless the peer writes to it: it then only refuses it.
        outbox: of tags, what the connection has not taken.
        passed: how many bytes of tags it has taken.
        flying: batch ids that Mooncake has not been seen to end, with their writes.
        waiting: writes of which rows are not handed over.
        lost: why the peer is gone, or None.
        ended: whether its engine has ended for sure, and with it everything that could still land.
        left: whether the peer was let go.
    """

    peer: Peer
    engine: Any
    target: str
    wire: socket.socket
    outbox: bytearray = attrs.field(factory=bytearray)
    passed: int = 0
    flying: deque[tuple[int, Progress]] = attrs.field(factory=deque)
    waiting: deque[Progress] = attrs.field(factory=deque)
    lost: str | None = None
    ended: bool = False
    left: bool = False

    def add(self, write: Progress) -> None:
        """Takes on a write."""
        if write.rows:
            self.waiting.append(write)
        else:
            self._append_tag(write)
        self.turn()

    def turn(self) -> None:
        """Sees what ended, hands over what fits, passes tags on. Never waits."""
        self._settle()
        self.watch()
        while self.waiting and len(self.flying) < ROWS_IN_FLIGHT:
            self._submit(self.waiting[0])
        self._flush()

    def quiet(self, write: Progress) -> bool:
        """Whether no byte of a write can still land, nor be read."""
        return write.ended == write.sent and (self.ended or not write.doubtful)

    def watch(self) -> None:
        """Notices that the peer has gone."""
        if self.lost is not None:
            return
        try:
            if self.wire.recv(1):
                self._lose("it did not take the connection for tags", ended=False)
            else:
                self._lose("its engine has ended", ended=True)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            self._lose("its process has ended", ended=True)
        except OSError as error:
            self._lose(f"its connection failed: {error}", ended=False)

    def _lose(self, why: str, *, ended: bool) -> None:
        self.lost, self.ended = why, ended
        self.peer.lost = self.peer.lost or why
        self.waiting.clear()
        self.outbox.clear()
        self.wire.close()

    def _settle(self) -> None:
        while self.flying:
            batch, write = self.flying[0]
            status = self.engine.transfer_check_status(batch)
            if status == 0:
                return
            self.flying.popleft()
            write.ended += 1
            write.doubtful |= status < 0
            if write.ended == len(write.rows) and not write.doubtful:
                self._append_tag(write)

    def _submit(self, write: Progress) -> None:
        """Hands over rows of the first write that waits, as many as fit."""
        until = min(len(write.rows), write.sent + ROWS_IN_FLIGHT - len(self.flying))
        submit, target = self.engine.transfer_submit_write, self.target
        for source, destination, nbytes in write.rows[write.sent : until]:
            if write.doubtful:
                break
            batch = submit(target, source, destination, nbytes)
            if not batch:
                write.refused = True
                break
            self.flying.append((batch, write))
            write.sent += 1
        if write.sent == len(write.rows) or write.refused or write.doubtful:
            self.waiting.popleft()

    def _append_tag(self, write: Progress) -> None:
        self.outbox += bytes([len(write.tag)]) + write.tag
        write.behind = self.passed + len(self.outbox)

    def _flush(self) -> None:
        if not self.outbox or self.lost is not None:
            return
        try:
            taken = self.wire.send(self.outbox)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # A reset is told once, here or in `watch`: either way nobody has the connection open any more.
            ended = isinstance(error, BrokenPipeError | ConnectionResetError)
            self._lose(f"its connection failed: {error}", ended=ended)
            return
        del self.outbox[:taken]
        self.passed += taken


@final
@attrs.define(eq=False)
class Inlet:
    """A connection by which a writer's tags arrive.

    Attributes:
        wire: the connection.
        since: when it came, on the monotonic clock.
        writer: the writer's instance, once it has told.
        unread: bytes of a record that is not complete.
    """

    wire: socket.socket
    since: float = attrs.field(factory=time.monotonic)
    writer: str | None = None
    unread: bytearray = attrs.field(factory=bytearray)

    def tags(self, instance: str) -> tuple[list[Delivery], bool]:
        """The tags in the next `MOST_AT_ONCE` bytes, and whether more can come. `instance`: whom it has to mean."""
        opened = True
        try:
            piece = self.wire.recv(MOST_AT_ONCE)
            self.unread += piece
            opened = bool(piece)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            opened = False
        if self.writer is None:
            if len(self.unread) < GREETING_BYTES:
                return [], opened
            if self.unread[INSTANCE_BYTES:GREETING_BYTES] != instance.encode():
                return [], False
            self.writer = self.unread[:INSTANCE_BYTES].decode("ascii", "replace")
            del self.unread[:GREETING_BYTES]
        found: list[Delivery] = []
        start = 0
        while start < len(self.unread) and start + self.unread[start] < len(self.unread):
            nbytes = self.unread[start]
            if not 0 < nbytes <= MOST_TAG_BYTES:
                return found, False
            found.append(Delivery(bytes(self.unread[start + 1 : start + 1 + nbytes]), self.writer))
            start += 1 + nbytes
        del self.unread[:start]
        return found, opened

    def refuse(self) -> None:
        """Closes it, and says so: were it a writer, it would take the end alone for that of this engine."""
        with contextlib.suppress(OSError):
            self.wire.send(b"\0")
        self.wire.close()


def prepare(wire: socket.socket) -> None:
    """Tags leave at once, and a machine that is gone is noticed within half a minute."""
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
