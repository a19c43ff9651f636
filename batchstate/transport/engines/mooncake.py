"""Transfers over Mooncake's transfer engine, by TCP: one-sided writes into memory that the peer has registered.

Guarantees:

- DONE means landed. Mooncake's receiver acknowledges each row once its bytes are in memory; a setting that turns this
  off is refused. The tag leaves after the last acknowledgement, over a connection of this engine's own, and so arrives
  after the data.
- Rows are handed over one by one and never more than `ROWS_IN_FLIGHT` at a time to one peer: beyond its queue Mooncake
  reports a failure while rows still land, and its own wait for a batch burns a core and does not return before the end.
- A row that failed may still land for as long as the peer lives (a peer that stood still for 30 s takes up what lies in
  its socket). Such a write is UNKNOWN, and drained only when the peer has ended, which its connection tells at once.

Warning: Mooncake listens on all interfaces, whatever `host` says, on two ports, and authenticates no client: a process
that reaches a port can read and write the registered memory. Keep the ports behind a firewall, or the process in a
network namespace of its own. Tags and the end of a peer go over a third port, which is bound to `host` alone.
"""

import contextlib
import importlib
import json
import os
import socket
import time
from collections import deque
from types import ModuleType
from typing import Any, final

import attrs
import numpy as np

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.engines.base import MOST_TAG_BYTES, Capabilities, Delivery, Engine, Handle, Peer, Status
from batchstate.transport.regions import Copies, Ints, Region
from batchstate.transport.wire import number, parsed_native, record, text

ROWS_IN_FLIGHT = 1024
"""Rows that Mooncake is given at a time, for each peer: as many as its queue takes by default."""

INSTANCE_BYTES = 16
MOST_AT_ONCE = 1 << 16
"""Bytes read of one connection at a time, so that one that sends without end holds up no other."""

GREETING_BYTES = 2 * INSTANCE_BYTES


@final
@attrs.define(eq=False)
class Progress:
    """How far one write is.

    Attributes:
        behind: the place in the peer's stream of tags behind which this tag is, once it is written there.
    """

    rows: list[tuple[int, int, int]]  # address here, address there, bytes
    tag: bytes  # its tag
    sent: int = 0  # rows that Mooncake has taken
    ended: int = 0  # of these, rows that it has given an end to
    refused: bool = False  # it did not take a row
    doubtful: bool = False  # a row failed: bytes of it may still land
    behind: int | None = None


@final
@attrs.define(eq=False)
class Connection:
    """What leads to one peer: its rows under way, oldest first, and the connection for tags.

    A tag is queued once each row of its write is acknowledged. The end of the connection tells at once that the peer
    has ended.

    Attributes:
        wire: connection for tags; its end is the peer's, unless the peer writes to it: it then only refuses it.
        flying: batch ids that Mooncake has not been seen to end, with their writes.
    """

    peer: Peer  # to which it leads
    engine: Any  # Mooncake's, which opened the peer; None once closed
    target: str  # Mooncake's name of the peer
    wire: socket.socket
    outbox: bytearray = attrs.field(factory=bytearray)  # of tags, what the connection has not taken
    passed: int = 0  # how many bytes of tags it has taken
    flying: deque[tuple[int, Progress]] = attrs.field(factory=deque)
    waiting: deque[Progress] = attrs.field(factory=deque)  # writes of which rows are not handed over
    lost: str | None = None  # why the peer is gone, or None
    ended: bool = False  # whether its engine has ended for sure, and with it everything that could still land
    left: bool = False  # whether the peer was let go

    def add(self, write: Progress) -> None:
        """Takes on a write."""
        if write.rows:
            self.waiting.append(write)
        else:
            self._append_tag(write)
        self.turn()

    def turn(self) -> None:
        """Sees what ended, hands over what fits, passes tags on. Never waits."""
        self._collect()
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

    def _collect(self) -> None:
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
            # A reset is told once, here or in `watch`: either way the other side has the connection open no more.
            ended = isinstance(error, BrokenPipeError | ConnectionResetError)
            self._lose(f"its connection failed: {error}", ended=ended)
            return
        del self.outbox[:taken]
        self.passed += taken


@final
@attrs.define(eq=False)
class Client:
    """A connection by which a writer's tags arrive."""

    wire: socket.socket  # the connection
    since: float = attrs.field(factory=time.monotonic)  # when it came, on the monotonic clock
    writer: str | None = None  # the writer's instance, once it has told
    unread: bytearray = attrs.field(factory=bytearray)  # bytes of a record that is not complete

    def tags(self, instance: str) -> tuple[list[Delivery], bool]:
        """The tags in the next `MOST_AT_ONCE` bytes, and whether more can come. `instance` is what it has to name."""
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


CONNECTS_IN_S = 5.0
"""How long `connect` waits for a machine that does not answer."""

GREETS_WITHIN_S = 5.0
"""How long a client of the port for tags may take to say who it is."""

MOST_SILENT = 64
"""Clients that have connected and not said so: of more, those that came first are sent away."""

_NATIVE = record(mooncake=text(), host=text(), tags=number(), identity=number())
"""This engine's part of an endpoint."""

CHANGED_BY = {"MC_TCP_PROTO": ("1",), "MC_USE_TENT": None, "MC_USE_TEV1": None}
"""Settings under which a completed row need not have landed: values, or None for any."""


@final
class MooncakeEngine(Engine):
    """Writes over Mooncake's transfer engine. See the warning at the top of this module: its ports are open to all.

    Needs `pip install 'batchstate[mooncake]'` and the system library libibverbs1. Mooncake logs errors to stderr, one
    ("Local segment descriptor not found") at each start and of no meaning; `MC_LOG_LEVEL=INFO` makes it tell more.

    Args:
        host: IPv4 address, or name, by which peers reach this machine.

    Raises:
        TransferError: Mooncake or a library of the system is missing, a setting of Mooncake makes completed rows
            unsafe, or no port could be opened.
    """

    name = "mooncake"
    capabilities = Capabilities(one_sided=True, max_rows=1024)

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__()
        self._module = _loaded()
        self._host = host
        try:
            self._listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            raise TransferError(
                f"no port on {host!r}: {error}", value=host, remedy="pass an address of this machine"
            ) from error
        try:
            self._native = self._started()
            # Peers read this memory to learn who is behind the port.
            self._identity = np.frombuffer(self.instance.encode(), dtype=np.uint8).copy()
            self._registered(self._identity.ctypes.data, self._identity.nbytes, "its identity")
        except TransferError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._outgoing = self._native
        self._opened: dict[str, str] = {}
        self._connections: list[Connection] = []
        self._clients: list[Client] = []

    def _started(self) -> Any:
        engine = self._module.TransferEngine()
        status = engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "")
        if status:
            raise TransferError(
                f"Mooncake did not start: {status}", value=status, remedy="set MC_LOG_LEVEL=INFO, and read why"
            )
        return engine

    def _registered(self, address: int, nbytes: int, what: str) -> None:
        status = self._native.register_memory(address, nbytes)
        if status:
            raise TransferError(
                f"Mooncake did not register {what} ({nbytes} bytes): {status}",
                value=status,
                remedy="register each piece of memory with one engine of the process, once",
            )

    def _register(self, region: Region) -> None:
        if region.device != "cpu" and not getattr(self._module, "SUPPORT_CUDA", False):
            raise ArgumentError(
                f"region {region.name!r} lies on {region.device}, and this build of Mooncake knows host memory only",
                value=region.device,
                remedy="register pinned host memory, or install a build for the device",
            )
        self._registered(region.address, region.nbytes, repr(region.name))

    def _unregister(self, region: Region) -> None:
        status = self._native.unregister_memory(region.address)
        if status:
            raise TransferError(
                f"Mooncake did not let {region.name!r} go: {status}", value=status, remedy="close the engine"
            )

    def _endpoint(self) -> bytes:
        mooncake = f"{self._host}:{self._native.get_rpc_port()}"
        tags = self._listener.getsockname()[1]
        fields = {"mooncake": mooncake, "host": self._host, "tags": tags, "identity": self._identity.ctypes.data}
        return json.dumps(fields).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        """Waits: for `CONNECTS_IN_S` on a machine that is silent, for up to 30 s on a process that stands still."""
        fields = parsed_native(endpoint, _NATIVE, f"an endpoint of {self.name}")
        target, host, port = fields["mooncake"], fields["host"], fields["tags"]
        try:
            wire = socket.create_connection((host, port), CONNECTS_IN_S)
        except (OSError, OverflowError, ValueError) as error:
            raise TransferError(
                f"{host}:{port} cannot be reached: {error}",
                value=f"{host}:{port}",
                remedy="see that the peer runs, and that its `host` is an address that leads there",
            ) from error
        try:
            prepare(wire)
            wire.sendall((self.instance + peer.instance).encode())  # at once: a silent client is sent away
            engine = self._opener(target, peer.instance)
            self._check_identity(engine, target, fields["identity"], peer.instance)
        except OSError as error:
            wire.close()
            raise TransferError(
                f"{host}:{port} cannot be reached: {error}", value=f"{host}:{port}", remedy="see that the peer runs"
            ) from error
        except (TransferError, HandshakeError):
            wire.close()
            raise
        wire.setblocking(False)
        peer.native = Connection(peer, engine, target, wire)
        self._connections.append(peer.native)

    def _opener(self, target: str, instance: str) -> Any:
        """Mooncake remembers a peer by host and port: a new instance behind the same two needs a new memory."""
        if self._opened.get(target, instance) != instance:
            self._outgoing = self._started()
            self._opened.clear()
        self._opened[target] = instance
        return self._outgoing

    def _check_identity(self, engine: Any, target: str, identity: int, instance: str) -> None:
        found = np.zeros(INSTANCE_BYTES, dtype=np.uint8)
        if engine.transfer_sync_read(target, found.ctypes.data, identity, found.nbytes):
            raise TransferError(
                f"{target} does not tell who it is",
                value=target,
                remedy="see that the peer runs; take its new endpoint",
            )
        if found.tobytes() != instance.encode():
            raise HandshakeError(
                f"behind {target} is not instance {instance}", value=target, remedy="take the peer's new endpoint"
            )

    def _disconnect(self, peer: Peer) -> None:
        peer.native.left = True
        self._sweep()

    def _sweep(self) -> None:
        """Lets go of lines to peers that are gone or let go, once no write of theirs is open."""
        for connection in [one for one in self._connections if one.left or one.lost is not None]:
            needed = any(handle.peer is connection.peer for handle in self._open.values())
            if not (
                needed or connection.flying or connection.waiting or (connection.outbox and connection.lost is None)
            ):
                connection.wire.close()
                connection.engine = None
                self._connections.remove(connection)

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        rows = list(zip(sources.tolist(), targets.tolist(), copies.lengths.tolist(), strict=True))
        handle.native = Progress(rows, handle.tag)
        handle.peer.native.add(handle.native)

    def _poll(self, handle: Handle) -> Status:
        connection, write = handle.peer.native, handle.native
        connection.turn()
        if write.behind is not None and connection.passed >= write.behind:
            return Status.DONE
        if write.doubtful or connection.lost is not None:
            handle.reason = connection.lost or "Mooncake reports that a row failed"
            return Status.FAILED if connection.quiet(write) else Status.UNKNOWN
        if write.refused and connection.quiet(write):
            handle.reason = "Mooncake did not take a row"
            return Status.FAILED
        return Status.PENDING

    def _drained(self, handle: Handle) -> bool:
        connection = handle.peer.native
        connection.turn()
        return bool(connection.quiet(handle.native))

    def lost_peers(self) -> tuple[Peer, ...]:
        """Connected peers that are gone: noticed at once when the process ends, within a minute when a machine does."""
        for connection in self._connections:
            connection.watch()
        return super().lost_peers()

    def _completions(self) -> list[Delivery]:
        for connection in self._connections:
            connection.turn()
        self._sweep()
        with contextlib.suppress(OSError):  # no client more, or one that has gone, or no room for one more file
            for _ in range(MOST_SILENT):
                wire, _ = self._listener.accept()
                wire.setblocking(False)
                self._clients.append(Client(wire))
        arrived: list[Delivery] = []
        for client in list(self._clients):
            found, opened = client.tags(self.instance)
            arrived += found
            if not opened:
                client.wire.close()
                self._clients.remove(client)
        silent = [client for client in self._clients if client.writer is None]
        latest = time.monotonic() - GREETS_WITHIN_S
        for index, client in enumerate(reversed(silent)):
            if index >= MOST_SILENT or client.since < latest:
                client.refuse()
                self._clients.remove(client)
        return arrived

    def _close(self) -> None:
        # Mooncake first: a peer that sees its connection end may rely on it that nothing lands here any more.
        for connection in self._connections:
            connection.engine = None
        self._outgoing = self._native = None
        for connection in self._connections:
            connection.wire.close()
        for client in self._clients:
            client.wire.close()
        self._listener.close()


def _loaded() -> ModuleType:
    for setting, values in CHANGED_BY.items():
        value = os.environ.get(setting)
        if value is not None and (values is None or value in values):
            raise TransferError(
                f"{setting}={value}: completed rows may not have landed", value=value, remedy=f"unset {setting}"
            )
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferError(
            f"Mooncake cannot be loaded: {error}",
            value=str(error),
            remedy="pip install 'batchstate[mooncake]', and apt-get install libibverbs1 (slim: libnuma1 libcurl4)",
        ) from error
