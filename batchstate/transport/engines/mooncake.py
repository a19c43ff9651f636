"""Transfers over Mooncake's transfer engine, by TCP: one-sided writes into memory that the peer has registered.

Guarantees:

- DONE means landed. Mooncake's receiver acknowledges each row once its bytes are in memory; a setting that turns this
  off is refused. The tag leaves after the last acknowledgement, over a connection of this engine's own, and so arrives
  after the data.
- Rows are handed over one by one and never more than `ROWS_IN_FLIGHT` at a time to one peer: beyond its queue Mooncake
  reports a failure while rows still land, and its own wait for a batch burns a core and does not return before the end.
- A row that failed may still land for as long as the peer lives (a peer that stood still for 30 s takes up what lies in
  its socket). Such a write is UNKNOWN, and drained only when the peer has ended, which its connection tells at once.

Warning: Mooncake listens on two ports, and asks no client for anything: a process that reaches them can read and write
the registered memory. It binds them to all interfaces, whatever `host` says; where `host` is on the loopback, as it is
by default, this engine ties them to that device before any memory is registered. So the engine opens only for who says
that the network keeps others away, on the loopback too: `trusted_network=True`. Tags, the end of a peer and its
name go over a connection of this engine's own, bound to `host` alone, on which both sides prove that they know the
secret.
"""

import contextlib
import importlib
import ipaddress
import json
import os
import queue
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any, final

import attrs
import numpy as np

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.connection import Connection, ConnectionEndedError, Listener, connect
from batchstate.transport.engines.base import (
    MOST_TAG_BYTES,
    Capabilities,
    Copies,
    Delivery,
    Engine,
    Handle,
    Ints,
    Peer,
    Region,
    Status,
    check_trusted,
    nonce,
    parsed_native,
)
from batchstate.transport.wire import number, record, text

ROWS_IN_FLIGHT = 1024
"""Rows that Mooncake is given at a time, for each peer: as many as its queue takes by default."""

INSTANCE_BYTES = 16
MOST_AT_ONCE = 4096
"""Tags taken from one writer at a time, so that one that sends without end holds up no other."""


@final
@attrs.define(eq=False)
class Progress:
    """The progress of one write."""

    rows: list[tuple[int, int, int]]  # address here, address there, bytes
    tag: bytes  # its tag
    sent: int = 0  # rows that Mooncake has taken
    ended: int = 0  # of these, rows that it has given an end to
    refused: bool = False  # it did not take a row
    doubtful: bool = False  # a row failed: bytes of it may still land
    behind: int | None = None  # once the tag is queued: `Connection.passed` by which it has left


@final
@attrs.define(eq=False)
class Link:
    """The way to one peer. A tag is queued once each row of its write is acknowledged."""

    peer: Peer  # to which it leads
    engine: Any  # Mooncake's, which opened the peer; None once closed
    target: str  # Mooncake's name of the peer
    connection: Connection  # for tags; its end tells at once that the peer has ended
    flying: deque[tuple[int, Progress]] = attrs.field(factory=deque)  # batch ids under way with their writes, in order
    waiting: deque[Progress] = attrs.field(factory=deque)  # writes of which rows are not handed over
    lost: str | None = None  # why the peer is gone, or None
    ended: bool = False  # whether its engine has ended for sure, and with it everything that could still land
    left: bool = False  # whether the peer was let go

    def add(self, write: Progress) -> None:
        """Takes on a write."""
        if write.rows:
            self.waiting.append(write)
        else:
            write.behind = self.connection.post(write.tag)
        self.turn()

    def turn(self) -> None:
        """Sees which rows ended, hands over as many as fit, passes tags on. Never waits."""
        self._collect()
        self.watch()
        while self.waiting and len(self.flying) < ROWS_IN_FLIGHT:
            self._submit(self.waiting[0])
        self.watch()

    def quiet(self, write: Progress) -> bool:
        """Whether no byte of a write can still land, nor be read."""
        under_way = write.ended < write.sent or write in self.waiting
        return not under_way and (self.ended or not write.doubtful)

    def watch(self) -> None:
        """Passes tags on, and notices that the peer has gone."""
        if self.lost is not None:
            return
        try:
            self.connection.flush()
            if self.connection.poll():
                self._lose("it answered on the connection for tags", ended=False)
        except ConnectionEndedError as error:
            self._lose(f"its engine has ended: {error}", ended=True)
        except OSError as error:
            self._lose(f"its connection failed: {error}", ended=False)

    def _lose(self, why: str, *, ended: bool) -> None:
        self.lost, self.ended = why, ended
        self.peer.lost = self.peer.lost or why
        self.waiting.clear()
        self.connection.close()

    def _collect(self) -> None:
        while self.flying:
            batch, write = self.flying[0]
            status = self.engine.transfer_check_status(batch)
            if status == 0:
                return
            self.flying.popleft()
            write.ended += 1
            write.doubtful |= status < 0
            if write.ended == len(write.rows) and not write.doubtful and self.lost is None:
                write.behind = self.connection.post(write.tag)

    def _submit(self, write: Progress) -> None:
        """Hands over as many rows of the first write that waits as fit."""
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


@final
@attrs.define(eq=False)
class Client:
    """A connection by which a writer's tags arrive."""

    connection: Connection
    writer: str | None = None  # the writer's instance, once it has told

    def tags(self) -> tuple[list[Delivery], bool]:
        """The next `MOST_AT_ONCE` tags that are here, and whether more can come."""
        deliveries: list[Delivery] = []
        try:
            while len(deliveries) < MOST_AT_ONCE and self.connection.poll():
                message = self.connection.recv_bytes()
                if self.writer is None:
                    self.writer = nonce(message.decode())
                elif 0 < len(message) <= MOST_TAG_BYTES:
                    deliveries.append(Delivery(message, self.writer))
                else:
                    return deliveries, False
        except (OSError, ValueError):
            return deliveries, False
        return deliveries, True


_NATIVE = record(mooncake=text(), host=text(), tags=number(1, 65_535), identity=number())
"""This engine's part of an endpoint."""

CHANGED_BY = {"MC_TCP_PROTO": ("1",), "MC_USE_TENT": None, "MC_USE_TEV1": None}
"""Settings under which a completed row need not have landed: values, or None for any."""


@final
class MooncakeEngine(Engine):
    """Writes over Mooncake's transfer engine. Its ports are open to all: see the warning at the top of this module.

    Needs `pip install 'batchstate[mooncake]'` and the system library libibverbs1. Mooncake logs errors to stderr, one
    ("Local segment descriptor not found") at each start and of no meaning; `MC_LOG_LEVEL=INFO` makes it tell more.

    Args:
        host: IPv4 address, or name, by which peers reach this machine. With any but the loopback's, Mooncake listens on
            all interfaces.
        trusted_network: that only workers who may write here reach this machine's ports: a firewall, or a network
            namespace of its own, keeps all others out, processes of this machine among them.

    Raises:
        ArgumentError: without `trusted_network=True`.
        TransferError: Mooncake or a library of the system is missing, a setting of Mooncake makes completed rows
            unsafe, no port could be opened, or the system does not let it be tied to the loopback.
    """

    name = "mooncake"
    capabilities = Capabilities(one_sided=True, max_rows=1024)

    def __init__(self, host: str = "127.0.0.1", *, trusted_network: bool = False) -> None:
        local = _is_loopback(host)
        check_trusted(f"Mooncake listens on {'the loopback' if local else 'all interfaces'}", trusted_network)
        super().__init__()
        self._module = _loaded()
        self._host, self._local = host, local
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._listener = Listener((host, 0), self._secret, self._arrived.put)
        self._links: list[Link] = []
        # Mooncake's engines: this one's, and the one that opens peers. They end first, before the memory goes.
        self._natives: list[Any] = []
        self._end_natives = weakref.finalize(self, _end_natives, self._natives, self._links)
        try:
            self._natives.append(self._started())
            # Peers read this memory to learn who is behind the port.
            self._identity = np.frombuffer(self.instance.encode(), dtype=np.uint8).copy()
            self._registered(self._identity.ctypes.data, self._identity.nbytes, "its identity")
        except TransferError:
            self._listener.close()
            raise
        self._opened: dict[str, str] = {}
        self._clients: list[Client] = []

    def _started(self) -> Any:
        engine = self._module.TransferEngine()
        before = _listeners() if self._local else {}
        status = engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "")
        if status:
            raise TransferError(f"Mooncake did not start: {status}", status, "set MC_LOG_LEVEL=INFO, and read why")
        if self._local:
            _tie_to_loopback(file for inode, file in _listeners().items() if inode not in before)
        return engine

    def _registered(self, address: int, nbytes: int, name: str) -> None:
        status = self._natives[0].register_memory(address, nbytes)
        if status:
            problem = f"Mooncake did not register {name} ({nbytes} bytes): {status}"
            raise TransferError(problem, status, "register each piece of memory with one engine of the process, once")

    def _register(self, region: Region) -> None:
        if region.device != "cpu" and not getattr(self._module, "SUPPORT_CUDA", False):
            where = f"region {region.name!r} lies on {region.device}"
            remedy = "register pinned host memory, or install a build for the device"
            raise ArgumentError(f"{where}, and this build of Mooncake knows host memory only", region.device, remedy)
        self._registered(region.address, region.nbytes, repr(region.name))

    def _endpoint(self) -> bytes:
        mooncake = f"{self._host}:{self._natives[0].get_rpc_port()}"
        tags = self._listener.address[1]
        fields = {"mooncake": mooncake, "host": self._host, "tags": tags, "identity": self._identity.ctypes.data}
        return json.dumps(fields).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        """Waits: 10 s at most for the peer's answer, and up to 30 s more for Mooncake's."""
        fields = parsed_native(endpoint, _NATIVE, f"an endpoint of {self.name}")
        target, connection = fields["mooncake"], connect((fields["host"], fields["tags"]), peer.secret)
        try:
            connection.send_bytes(self.instance.encode())
            # Mooncake remembers a peer by host and port: a new instance behind the same two needs a new memory.
            if self._opened.get(target, peer.instance) != peer.instance:
                self._natives[1:] = [self._started()]
                self._opened.clear()
            self._opened[target] = peer.instance
            engine, identity = self._natives[-1], np.zeros(INSTANCE_BYTES, dtype=np.uint8)
            if engine.transfer_sync_read(target, identity.ctypes.data, fields["identity"], identity.nbytes):
                problem = f"{target} does not tell who it is"
                raise TransferError(problem, target, "see that the peer runs; take its new endpoint")
            if identity.tobytes() != peer.instance.encode():
                problem = f"behind {target} is not instance {peer.instance}"
                raise HandshakeError(problem, target, "take the peer's new endpoint")
        except BaseException:
            connection.close()
            raise
        peer.native = Link(peer, engine, target, connection)
        self._links.append(peer.native)

    def _disconnect(self, peer: Peer) -> None:
        peer.native.left = True
        self._sweep()

    def _sweep(self) -> None:
        """Lets go of links to peers that are gone or let go, once no write of theirs is open."""
        for link in [link for link in self._links if link.left or link.lost is not None]:
            needed = any(handle.peer is link.peer for handle in self._open.values())
            unsent = link.lost is None and link.connection.passed < link.connection.posted
            if not (needed or link.flying or link.waiting or unsent):
                link.connection.close()
                link.engine = None
                self._links.remove(link)

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        rows = list(zip(sources.tolist(), targets.tolist(), copies.lengths.tolist(), strict=True))
        handle.native = Progress(rows, handle.tag)
        handle.peer.native.add(handle.native)

    def _poll(self, handle: Handle) -> Status:
        link, write = handle.peer.native, handle.native
        link.turn()
        if write.behind is not None and link.connection.passed >= write.behind:
            return Status.DONE
        if write.doubtful or link.lost is not None:
            handle.reason = link.lost or "Mooncake reports that a row failed"
            return Status.FAILED if link.quiet(write) else Status.UNKNOWN
        if write.refused and link.quiet(write):
            handle.reason = "Mooncake did not take a row"
            return Status.FAILED
        return Status.PENDING

    def _drained(self, handle: Handle) -> bool:
        link: Link = handle.peer.native
        link.turn()
        return link.quiet(handle.native)

    def _completions(self) -> list[Delivery]:
        for link in self._links:
            link.turn()
        self._sweep()
        while not self._arrived.empty():
            self._clients.append(Client(self._arrived.get()))
        arrived: list[Delivery] = []
        for client in list(self._clients):
            deliveries, opened = client.tags()
            arrived += deliveries
            if not opened:
                client.connection.close()
                self._clients.remove(client)
        return arrived

    def _close(self) -> None:
        # Mooncake first: a peer that sees its connection end may rely on it that nothing lands here any more.
        self._end_natives()
        self._listener.close()
        while not self._arrived.empty():
            self._clients.append(Client(self._arrived.get()))
        for connection in [link.connection for link in self._links] + [client.connection for client in self._clients]:
            connection.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:  # Mooncake says what is wrong with it
        return False


def _listeners() -> dict[str, int]:
    """Sockets of this process that listen by TCP on all interfaces: inode, and file."""
    listeners = {}
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed since
            inode = os.readlink(f"/proc/self/fd/{file}")
            if inode.startswith("socket:"):
                with socket.socket(fileno=os.dup(file)) as wire:
                    listens = wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and wire.family != socket.AF_UNIX and wire.getsockname()[0] in ("0.0.0.0", "::"):
                        listeners[inode] = file
    return listeners


def _tie_to_loopback(files: Iterable[int]) -> None:
    """Lets only what comes by the loopback device reach sockets that listen on all interfaces."""
    try:
        for file in files:
            with socket.socket(fileno=os.dup(file)) as wire:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    except OSError as error:
        remedy = "use Linux 5.7 or newer, or name the host by which other machines reach this one"
        raise TransferError(f"Mooncake's ports cannot be tied to the loopback: {error}", error.errno, remedy) from error


def _end_natives(natives: list[Any], links: list[Link]) -> None:
    for link in links:
        link.engine = None
    natives.clear()


def _loaded() -> ModuleType:
    for setting, values in CHANGED_BY.items():
        value = os.environ.get(setting)
        if value is not None and (values is None or value in values):
            raise TransferError(f"{setting}={value}: completed rows may not have landed", value, f"unset {setting}")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        remedy = "pip install 'batchstate[mooncake]', and apt-get install libibverbs1 (slim: libnuma1 libcurl4)"
        raise TransferError(f"Mooncake cannot be loaded: {error}", str(error), remedy) from error
