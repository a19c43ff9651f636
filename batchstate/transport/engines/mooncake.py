"""Transfers over Mooncake's transfer engine, by TCP: one-sided writes into memory that the peer has registered.

Guarantees:

- DONE means landed. Mooncake's receiver acknowledges each row once its bytes are in memory; a setting that turns this
  off is refused. The tag leaves after the last acknowledgement, over a connection of this engine's own, and so arrives
  after the data.
- Rows are handed over one by one and never more than `ROWS_IN_FLIGHT` at a time to one peer: beyond its queue Mooncake
  reports a failure while rows still land, and its own wait for a batch burns a core and does not return before the end.
- A row that failed may still land for as long as the peer lives (a peer that stood still for 30 s takes up what lies in
  its socket). Such a write is UNKNOWN, and drained only when the peer has ended, which its connection tells at once.

Warning: Mooncake listens on all interfaces, whatever `host` says, on two ports, and asks nobody who they are: whoever
reaches a port can read and write the registered memory. Keep the ports behind a firewall, or the process in a network
namespace of its own. Tags and the end of a peer go over a third port, which is bound to `host` alone.
"""

import contextlib
import importlib
import json
import os
import socket
import time
from types import ModuleType
from typing import Any, final

import numpy as np

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.copies import Copies, Ints
from batchstate.transport.engines.base import Capabilities, Delivery, Engine, Handle, Peer, Status
from batchstate.transport.engines.mooncake_lines import INSTANCE_BYTES, Inlet, Line, Progress, prepare
from batchstate.transport.regions import Region

CONNECTS_IN_S = 5.0
"""How long `connect` waits for a machine that does not answer."""

GREETS_WITHIN_S = 5.0
"""How long one who connects for tags may take to say who it is."""

MOST_SILENT = 64
"""Who have connected and not said so: of more, those that came first are sent away."""

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
        self._lines: list[Line] = []
        self._inlets: list[Inlet] = []

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
        try:
            fields = json.loads(endpoint)
            target, host, port = str(fields["mooncake"]), str(fields["host"]), int(fields["tags"])
            identity = int(fields["identity"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise HandshakeError(
                f"{endpoint[:40]!r} is no endpoint of {self.name}",
                value=bytes(endpoint[:40]),
                remedy="pass what the other side's `endpoint()` returned",
            ) from error
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
            wire.sendall((self.instance + peer.instance).encode())  # at once: who stays silent is sent away
            engine = self._opener(target, peer.instance)
            self._check_identity(engine, target, identity, peer.instance)
        except OSError as error:
            wire.close()
            raise TransferError(
                f"{host}:{port} cannot be reached: {error}", value=f"{host}:{port}", remedy="see that the peer runs"
            ) from error
        except (TransferError, HandshakeError):
            wire.close()
            raise
        wire.setblocking(False)
        peer.native = Line(peer, engine, target, wire)
        self._lines.append(peer.native)

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
        for line in [line for line in self._lines if line.left or line.lost is not None]:
            needed = any(handle.peer is line.peer for handle in self._open.values())
            if not (needed or line.flying or line.waiting or (line.outbox and line.lost is None)):
                line.wire.close()
                line.engine = None
                self._lines.remove(line)

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        rows = list(zip(sources.tolist(), targets.tolist(), copies.lengths.tolist(), strict=True))
        handle.native = Progress(rows, handle.tag)
        handle.peer.native.add(handle.native)

    def _poll(self, handle: Handle) -> Status:
        line, write = handle.peer.native, handle.native
        line.turn()
        if write.behind is not None and line.passed >= write.behind:
            return Status.DONE
        if write.doubtful or line.lost is not None:
            handle.reason = line.lost or "Mooncake reports that a row failed"
            return Status.FAILED if line.quiet(write) else Status.UNKNOWN
        if write.refused and line.quiet(write):
            handle.reason = "Mooncake did not take a row"
            return Status.FAILED
        return Status.PENDING

    def _drained(self, handle: Handle) -> bool:
        line = handle.peer.native
        line.turn()
        return bool(line.quiet(handle.native))

    def lost_peers(self) -> tuple[Peer, ...]:
        """Connected peers that are gone: noticed at once when the process ends, within a minute when a machine does."""
        for line in self._lines:
            line.watch()
        return super().lost_peers()

    def _completions(self) -> list[Delivery]:
        for line in self._lines:
            line.turn()
        self._sweep()
        with contextlib.suppress(OSError):  # nobody more, or somebody who has gone, or no room for one more file
            for _ in range(MOST_SILENT):
                wire, _ = self._listener.accept()
                wire.setblocking(False)
                self._inlets.append(Inlet(wire))
        arrived: list[Delivery] = []
        for inlet in list(self._inlets):
            found, opened = inlet.tags(self.instance)
            arrived += found
            if not opened:
                inlet.wire.close()
                self._inlets.remove(inlet)
        silent = [inlet for inlet in self._inlets if inlet.writer is None]
        latest = time.monotonic() - GREETS_WITHIN_S
        for number, inlet in enumerate(reversed(silent)):
            if number >= MOST_SILENT or inlet.since < latest:
                inlet.refuse()
                self._inlets.remove(inlet)
        return arrived

    def _close(self) -> None:
        # Mooncake first: whoever sees a connection end may rely on it that nothing lands here any more.
        for line in self._lines:
            line.engine = None
        self._outgoing = self._native = None
        for line in self._lines:
            line.wire.close()
        for inlet in self._inlets:
            inlet.wire.close()
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
