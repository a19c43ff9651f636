"""Rows sent and received through torch.distributed: gloo, or NCCL for staging on GPUs. Works wherever torch does.

Two-sided: rows are packed here, sent, and put into place by a thread of the receiver, which answers. So the receiver
decides what lands, and checks each row anew against its own regions.

Guarantees: `write`, `poll`, `drain` and `completions` never wait. The global process group is not touched. Everything
listens on `host` alone. A peer that dies is noticed at once, also while nothing is written. What was begun when a
pair broke is UNKNOWN, and drained once the peer's receiving thread is known to have ended, or its process to be gone.
"""

import functools
import json
import queue
import secrets
from typing import final

import torch

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.engines._packing import as_bytes, in_order
from batchstate.transport.engines._pairs import (
    MOST_ROWS,
    READER,
    WRITER,
    Inbox,
    Incoming,
    Job,
    Outgoing,
    Pair,
    Store,
    host_store,
    said,
)
from batchstate.transport.engines._rendezvous import AcceptLoop, Address, EndWatch, ask
from batchstate.transport.engines.base import Capabilities, Delivery, Engine, Handle, Peer, Status
from batchstate.transport.regions import Copies, Ints, Region
from batchstate.transport.wire import number, parsed_native, row, text

MOST_WAITING = 64
"""Writers that have asked and not come yet: further ones are refused until they come, or their time is over."""

_ADDRESS = row(text(), text(), number())
"""Backend, host, port: this engine's part of an endpoint."""


@final
class DistributedEngine(Engine):
    """Writes through a pair of processes for each direction.

    What wrote the rows must have finished before `write`, on a device too: they are read by another thread, on another
    stream. A write needs 24 bytes a row beside them, and each pair 64 MiB of staging on each side at most.

    Args:
        host: address or name to listen on, which peers reach. Nothing is authenticated: keep it on loopback, or on a
            network of your own.
        port: where to be reached first; 0 takes any. The store and each pair listen on more, of the system's choice.
        backend: "gloo", or "nccl" to stage rows on the current CUDA device; both sides must have the same. NCCL
            cannot join two processes on one GPU, and ends a process by itself, after a time-out of its own, when the
            peer dies in the middle of a piece.
        connect_timeout: seconds for `connect`, and for a peer that asked to arrive.
        stall_timeout: seconds that one message, of 32 MiB at most (or 24 bytes a row), may take once it is sent. A peer
            that stands still for longer in the middle of one breaks the pair. When a peer dies there, a thread here may
            be held that long, and `close` with it.

    Raises:
        ArgumentError: another backend.
        TransferError: the address cannot be bound.
    """

    name = "distributed"
    capabilities = Capabilities(one_sided=False, max_rows=MOST_ROWS)

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        backend: str = "gloo",
        connect_timeout: float = 10.0,
        stall_timeout: float = 5.0,
    ) -> None:
        super().__init__()
        if backend not in ("gloo", "nccl"):
            raise ArgumentError(f"backend {backend!r}", value=backend, remedy='pass "gloo" or "nccl"')
        self._backend = backend
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._timeout, self._stall = connect_timeout, stall_timeout
        self._inbox = Inbox()
        self._outgoing: list[Outgoing] = []
        self._incoming: list[Incoming] = []
        try:
            self._store: Store = host_store(host, connect_timeout)
            self._accept_loop = AcceptLoop(host, port, self.instance, self._store.port, self._meet)
        except (OSError, RuntimeError) as error:
            raise TransferError(
                f"{host}:{port} cannot be listened on: {said(error)}",
                value=(host, port),
                remedy="name an address of this machine, and a port that is free, or 0",
            ) from error

    # Memory

    def _register(self, region: Region) -> None:
        self._inbox[region.index] = as_bytes(region.memory, region.name)

    def _unregister(self, region: Region) -> None:
        del self._inbox[region.index]

    # Peers

    def _endpoint(self) -> bytes:
        return json.dumps([self._backend, *self._accept_loop.address]).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        backend, host, port = parsed_native(endpoint, _ADDRESS, "an address of this engine")
        address = (host, port)
        if backend != self._backend:
            raise HandshakeError(
                f"the peer speaks {backend}, this engine {self._backend}",
                value=backend,
                remedy="open both sides with one backend",
            )
        name = secrets.token_hex(8)
        try:
            question = {"ask": "meet", "pair": name, "writer": self.instance}
            answer = ask(address, peer.instance, self._timeout, question)
            if not answer["met"]:
                raise ConnectionAbortedError("it is being closed, or too many wait for it")
            pair = self._join((address[0], answer["store"]), name, WRITER)
        except HandshakeError:
            raise
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            raise TransferError(
                f"peer {peer.instance} at {address[0]}:{address[1]} cannot be reached: {said(error)}",
                value=peer.instance,
                remedy="see whether it runs, and whether each side's `host` can be reached from the other",
            ) from error

        def lost(reason: str) -> None:
            peer.lost = peer.lost or reason

        self._outgoing = [one for one in self._outgoing if one.alive]
        peer.native = Outgoing(pair, EndWatch(address, peer.instance, name, self._timeout), lost)
        self._outgoing.append(peer.native)

    def _disconnect(self, peer: Peer) -> None:
        peer.native.finish()

    def _meet(self, name: str, writer: str) -> bool:
        """Called by the thread of the accept loop."""
        self._incoming = [one for one in self._incoming if one.alive]
        if sum(one.waiting for one in self._incoming) >= MOST_WAITING:
            return False
        own = (self._accept_loop.address[0], self._store.port)
        join = functools.partial(self._join, own, name, READER)
        self._incoming.append(Incoming(self._inbox, join, name, writer, self._accept_loop.live))
        return True

    def _join(self, store: Address, name: str, rank: int) -> Pair:
        host = self._accept_loop.address[0]
        return Pair.join(store, name, rank, host, self._device, self._timeout, self._stall)

    # Transfers

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        handle.native = Job(handle.tag, in_order(copies), self._inbox.memories(), handle.peer.native)
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
        """Waits for its threads: a moment; at worst one of the time-outs."""
        self._accept_loop.refuse()
        pairs: list[Outgoing | Incoming] = [*self._outgoing, *self._incoming]
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.join(2 * self._timeout + self._stall)
        self._accept_loop.close()
        self._outgoing, self._incoming, self._store = [], [], None
