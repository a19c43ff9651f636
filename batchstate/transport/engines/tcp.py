"""Rows sent over TCP, by connections on which both sides have proved that they know the engine's secret.

Two-sided: rows are packed here, sent, and put into place by a thread of the receiver, which answers. So the receiver
decides what lands, and checks each row anew against its own regions. It needs nothing but Python, and works wherever
two processes reach each other.

Guarantees: `write`, `poll`, `drain` and `completions` never wait. One port listens, on `host` alone, and takes nothing
from, and tells nothing to, who does not know the secret; every byte of a row has a MAC. A peer that dies is noticed at
once, also while nothing is written. What was begun when a connection broke is UNKNOWN, and drained once the peer has
closed its end of it, or its process has ended. Nothing is encrypted.
"""

import json
import queue
from typing import final

from batchstate._arrays import count
from batchstate._guidance import check_kind, shows_signature
from batchstate.errors import ArgumentError
from batchstate.transport.connection import Connection, Listener, connect
from batchstate.transport.engines._packing import as_bytes, in_order
from batchstate.transport.engines._streams import MOST_CUT_ROWS, MOST_ROWS, Inbox, Incoming, Job, Outgoing
from batchstate.transport.engines.base import Capabilities, Delivery, Engine, Handle, Peer, Status
from batchstate.transport.regions import Copies, Ints, Region
from batchstate.transport.wire import number, parsed_native, row, text

_ADDRESS = row(text(), number(1, 65_535))
"""Host and port: this engine's part of an endpoint."""

CLOSES_IN = 5.0
"""Seconds that `close` waits for each thread at most; each is woken before."""


@shows_signature
@final
class TcpEngine(Engine):
    """Writes over a connection for each direction.

    What wrote the rows must have finished before `write`, on a device too: they are read by another thread, on another
    stream. A write needs 24 bytes a row beside them, and each connection 2 MiB of staging on each side.

    Args:
        host: address or name to listen on, which peers reach.
        port: to listen on; 0 takes any.
        connect_timeout: seconds for `connect`.

    Raises:
        TransferError: the address cannot be bound.
    """

    name = "tcp"
    capabilities = Capabilities(one_sided=False, max_rows=MOST_ROWS)

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, connect_timeout: float = 10.0) -> None:
        check_kind(host, str, "TcpEngine: host", "pass a name or an address of this machine, as '127.0.0.1'")
        port = count(port, "TcpEngine: port", most=65_535)
        super().__init__()
        self._timeout = connect_timeout
        self._inbox = Inbox()
        self._outgoing: list[Outgoing] = []
        self._incoming: list[Incoming] = []
        self._listener = Listener((host, port), self._secret, self._arrived)

    # Memory

    def _register(self, region: Region) -> None:
        self._inbox[region.index] = as_bytes(region.memory, region.name)

    def _unregister(self, region: Region) -> None:
        del self._inbox[region.index]

    # Peers

    def _endpoint(self) -> bytes:
        return json.dumps(self._listener.address).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        address = parsed_native(endpoint, _ADDRESS, "an address of this engine")
        connection = connect(address, peer.secret, self._timeout)
        connection.send_bytes(self.instance.encode())

        def lost(reason: str) -> None:
            peer.lost = peer.lost or reason

        self._outgoing = [one for one in self._outgoing if one.alive]
        peer.native = Outgoing(connection, lost)
        self._outgoing.append(peer.native)

    def _disconnect(self, peer: Peer) -> None:
        peer.native.finish()

    def _arrived(self, connection: Connection) -> None:
        """Called by the thread of the listener."""
        self._incoming = [one for one in self._incoming if one.alive]
        self._incoming.append(Incoming(self._inbox, connection))

    # Transfers

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        rows = in_order(copies)
        if len(rows) > MOST_CUT_ROWS:
            raise ArgumentError(
                f"{len(rows)} rows once long ones are cut; {MOST_CUT_ROWS} fit into a message",
                value=len(rows),
                remedy="cut the write with `transport.plan.chunked` and fewer `max_bytes`",
            )
        handle.native = Job(handle.tag, rows, self._inbox.memories(), handle.peer.native)
        handle.peer.native.submit(handle.native)

    def _poll(self, handle: Handle) -> Status:
        job: Job = handle.native
        status = job.status
        if status is not Status.PENDING:
            handle.reason = job.reason
        return status

    def _drained(self, handle: Handle) -> bool:
        job: Job = handle.native
        return job.outgoing.drained

    def _completions(self) -> list[Delivery]:
        found = []
        while True:
            try:
                found.append(self._inbox.deliveries.get_nowait())
            except queue.Empty:
                return found

    def _close(self) -> None:
        """Waits for its threads: a moment."""
        self._listener.close()
        pairs: list[Outgoing | Incoming] = [*self._outgoing, *self._incoming]
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.join(CLOSES_IN)
        self._outgoing, self._incoming = [], []
