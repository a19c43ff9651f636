"""The NIXL engine (UCX): one-sided writes, with the tag behind the data.

Guarantees, each tested between two processes:

* Without an interface no port is opened: bytes go through shared memory, between processes of one machine that have the
  same user. With one, UCX listens there; a name that does not exist is an error.
* A tag is believed only with a MAC under the receiver's secret. NIXL's loader gets the metadata of a peer only from an
  endpoint whose MAC is right, and NIXL's own listening thread is off.
* A tag arrives after the last byte of its data. It is sent from the writer's `poll`: a write that is never polled
  never delivers its tag, though its data lands. Over an interface it is a notification of NIXL's. Through shared memory
  it is a datagram, which the kernel hands over whole or not at all: UCX's own messages lie in one queue, and a writer
  that is killed while it puts one there stops that queue for all writers (NIXL 1.5.1; seen at 156 instructions).
* A write that failed once it was posted is UNKNOWN, never FAILED: NIXL does not say which rows went, it cannot stop
  them, and after a lost connection a live peer still applies what its sockets hold. Such a write is drained only
  when the peer's process is known to have ended. On the same machine (and in the same PID namespace) the engine sees
  that for itself. The end of a peer elsewhere it never sees: keep the memory, or end both engines.
* Over an interface, a thread of NIXL's moves bytes in and out between calls. It looks each `PROGRESS_US`; NIXL's
  default, 0, keeps one core busy for each engine, idle or not. Through shared memory nothing moves between calls: both
  sides poll, or ask for completions.

Warning: UCX asks no client of its TCP port for anything: a process that speaks its protocol can write into this one,
and noise behind its magic number ends it. Nothing here can change that. So an engine with a port opens only for who
says that the network keeps others away, on the loopback too: `trusted_network=True`.

Through shared memory UCX does not notice that a peer is gone; this engine does, by its process.

`write` copies on the calling thread what the transport takes at once: all of it between processes of one machine
(`cma`), what fits into the sockets with `tcp`.
"""

import base64
import contextlib
import importlib
import json
import os
import select
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate import invariants
from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.connection import MAC, mac_of
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
    parsed_native,
)
from batchstate.transport.wire import array, binary, number, record, row, text

MAX_ROWS = 8192
"""Rows of one write. NIXL takes more; so long the calling thread would be away, which copies them."""
PROGRESS_US = 10
"""Microseconds between two looks of NIXL's thread."""

_VERBS = ("all", "ib", "rc", "ud", "dc", "srd", "gga")
_WITHOUT_PORT = frozenset(
    ("self", "sm", "shm", "posix", "sysv", "cma", "xpmem", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy")
)
"""UCX's transports between processes of one machine. Any other may listen."""

_Home = tuple[str, int]
"""Kind of a piece of memory, as NIXL calls it, and number of its device."""


def here() -> list[str]:
    """This process among all: boot, PID namespace, PID, start. Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), str(os.getpid()), _start(os.getpid())]
    except OSError:
        return []


@final
class Process:
    """Another process of this machine, whose end is seen without being its parent.

    A process that is `ended` has no memory any more: no byte can land in it, and none comes from it. A number that was
    given to another process since is told apart by the time of its start. A process of another machine, or of another
    PID namespace, never counts as ended.

    Args:
        whose: the answer of `here` there.

    Attributes:
        seen: whether its end is seen.
    """

    def __init__(self, whose: list[str]) -> None:
        self._ended = self.seen = False
        self._poll: select.poll | None = None
        if len(whose) != 4 or whose[:2] != here()[:2] or not whose[2].isdecimal():
            return
        number = int(whose[2])
        try:
            descriptor = os.pidfd_open(number)
        except ProcessLookupError:
            self._ended = self.seen = True
            return
        except OSError:  # a system without this call
            return
        weakref.finalize(self, os.close, descriptor)
        try:
            self._ended = _start(number) != whose[3]
        except (FileNotFoundError, ProcessLookupError):
            self._ended = True
        self.seen = True
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> bool:
        """Whether it is known to have ended, with all of its threads. One system call."""
        if not self._ended and self._poll is not None:
            self._ended = bool(self._poll.poll(0))
        return self._ended


def _start(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]


_NUMBER = 8


@final
class Mailbox:
    """Takes tags of peers. It lies in a folder that no other user may enter.

    A tag has a MAC under the secret of the one who takes it, over the writer's instance, a number and the tag. Numbers
    of a writer rise, and datagrams of one socket arrive in order: a tag that comes twice is believed once.

    A process that is killed leaves its folder behind. The next mailbox of its user on this machine removes it.

    Args:
        instance: of the engine that takes the tags.
        secret: of that engine.
        machine: names it, as no other machine that may share the folder for temporary files; empty if that is unknown.

    Raises:
        TransferError: the folder for temporary files cannot have it.

    Attributes:
        path: of its socket.
        close: lets it go; twice is fine.
    """

    MOST_AT_ONCE = 256
    """Datagrams taken at a time, so that a process that sends without end holds up no call."""

    def __init__(self, instance: str, secret: bytes, machine: str) -> None:
        self._instance, self._secret = instance, secret
        self._sent = 0
        self._last: dict[str, int] = {}  # number of the last tag of each writer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        prefix = f"batchstate-{machine[:8]}-"
        if machine:
            _remove_dead(prefix)
        folder = tempfile.mkdtemp(prefix=prefix)
        self.path = os.path.join(folder, "tags")
        self.close = weakref.finalize(self, _close, self._socket, folder)
        try:
            self._socket.bind(self.path)
        except OSError as error:
            self.close()
            problem = f"no socket at {self.path}: {error}"
            raise TransferError(problem, self.path, "set TMPDIR to a folder with a short path") from error

    def send(self, path: str, secret: bytes, tag: bytes) -> bool:
        """Sends a tag to the mailbox at `path`, whose secret that is; False where it is full. OSError: it is gone."""
        self._sent += 1  # what is not taken leaves out its number
        message = self._sent.to_bytes(_NUMBER) + tag
        writer = self._instance.encode()
        try:
            self._socket.sendto(b"%s\0%s%s" % (writer, _mac_of(secret, writer, message), message), path)
        except BlockingIOError:
            return False
        return True

    def received(self) -> list[Delivery]:
        """The tags among up to `MOST_AT_ONCE` datagrams that have come."""
        deliveries: list[Delivery] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(self.MOST_AT_ONCE):
                datagram = self._socket.recv(_MOST_BYTES)
                writer, _, sealed = datagram.partition(b"\0")
                mac, message = sealed[:MAC], sealed[MAC:]
                if not invariants.peer_unknown.holds(_mac_of(self._secret, writer, message), mac):
                    continue
                instance, number = writer.decode("utf-8", "replace"), int.from_bytes(message[:_NUMBER])
                if number > self._last.get(instance, 0):
                    self._last[instance] = number
                    deliveries.append(Delivery(message[_NUMBER:], instance))
        return deliveries


_MOST_BYTES = 64 + 1 + MAC + _NUMBER + MOST_TAG_BYTES
"""Bytes of a datagram; the rest of a longer one is dropped, and its MAC does not fit."""


def _mac_of(secret: bytes, writer: bytes, message: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 mail", writer, message)


def _close(wire: socket.socket, folder: str) -> None:
    wire.close()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(prefix: str) -> None:
    """Removes the mailboxes of processes that have ended: a socket that is bound no more never is again."""
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in folders:
        path = os.path.join(entry.path, "tags")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
            owner = entry.stat(follow_symlinks=False).st_uid
            ours = entry.is_dir(follow_symlinks=False) and owner == os.geteuid()
            if not ours or not stat.S_ISSOCK(os.stat(path).st_mode):
                continue
            try:
                wire.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                os.rmdir(entry.path)


_NO_PORT = {"ucx_error_handling_mode": "none"}
"""Setting of NIXL's backend: with "peer", its default, UCX opens only with a transport that has a connection."""

_NATIVE = record(
    agent=binary,
    places=array(row(number(), row(text("DRAM|VRAM"), number()))),
    process=array(text(), most=4),
    mailbox=text(),
)
"""This engine's part of an endpoint."""


@final
@attrs.define(eq=False)
class _Link:
    """A peer: its NIXL name, where its regions lie, its process and mailbox, and whether NIXL was told to let it go."""

    name: str
    homes: dict[int, _Home]
    process: Process
    mailbox: str
    cut: bool = False


@final
@attrs.define(eq=False)
class _Request:
    """A NIXL transfer request, or None where none is held; the tag to be mailed behind it; and why it has failed."""

    number: int | None
    mail: bytes | None = None
    error: str = ""


@final
class NixlEngine(Engine):
    """Writes over UCX.

    Args:
        interface: network interface that is listened on and connected from; without one, peers are processes of this
            machine and user, and no port is opened. Both sides say the same.
        tls: UCX transports, with commas. By default shared memory, `tcp` with an interface, and `cuda` where torch
            has a GPU. Any that is not of one machine is taken to open a port; keep `tcp` among these.
        trusted_network: that only workers who may write here reach the interface: a firewall, or a network namespace of
            its own, keeps all others out, processes of this machine among them.

    `UCX_NET_DEVICES`, `UCX_TLS` and `NIXL_LOG_LEVEL` of the environment win over these.

    Raises:
        ArgumentError: with a port, but without `trusted_network=True`.
        TransferError: NIXL is not installed, or cannot be opened with this interface and these transports.
    """

    name = "nixl"
    capabilities = Capabilities(one_sided=True, max_rows=MAX_ROWS)

    def __init__(self, interface: str | None = None, tls: str | None = None, *, trusted_network: bool = False) -> None:
        wanted = tls or "cma,posix" + (",tcp" if interface else "") + (",cuda" if torch.cuda.is_available() else "")
        used = os.environ.get("UCX_TLS", wanted)
        self._has_port = not _WITHOUT_PORT.issuperset(map(str.strip, used.split(",")))
        if self._has_port:
            check_trusted(f"UCX listens on {interface or 'all interfaces'} with transports {used}", trusted_network)
        super().__init__()
        with _environment(_settings(interface, wanted)):
            self._nixl = _bindings()
            self._errors: tuple[type[Exception], ...] = tuple(
                kind for kind in vars(self._nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)
            )
            config = self._nixl.nixlAgentConfig()
            # Without its port UCX notices no end of a peer; NIXL's thread would then spin, and never be joined.
            config.useProgThread = self._has_port
            config.useListenThread = False
            config.pthrDelay = PROGRESS_US
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            try:
                self._agent = self._nixl.nixlAgent(self.instance, config)
                self._backends = [self._agent.createBackend("UCX", {} if self._has_port else _NO_PORT)]
            except self._errors as error:
                problem = f"NIXL does not open UCX on interface {interface!r} with transports {wanted!r}: {error}"
                remedy = "name an interface that exists and transports that UCX has (`ucx_info -d` lists them)"
                raise TransferError(problem, interface, remedy) from error
        self._homes: dict[int, _Home] = {}
        self._native: list[Any] = []
        self._mailbox = None if self._has_port else Mailbox(self.instance, self._secret, "".join(here()[:1]))

    # Memory

    def _register(self, region: Region) -> None:
        on_device = region.device == "cuda" and isinstance(region.memory, torch.Tensor)
        kind, device = ("VRAM", region.memory.get_device()) if on_device else ("DRAM", 0)  # type: ignore[union-attr]
        native = self._nixl.nixlRegDList(self._kind(kind), [(region.address, region.nbytes, device, "")])
        try:
            self._agent.registerMem(native, self._backends)
        except self._errors as error:
            remedy = "name transports that reach it (`cuda` for device memory)"
            raise TransferError(f"NIXL does not register {region}: {error}", region.name, remedy) from error
        self._native.append(native)
        self._homes[region.index] = (kind, device)

    # Peers

    def _endpoint(self) -> bytes:
        agent = base64.b64encode(self._agent.getLocalMD()).decode()
        box = {"mailbox": "" if self._mailbox is None else self._mailbox.path}
        return json.dumps({"agent": agent, "places": list(self._homes.items()), "process": here()} | box).encode()

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        fields = parsed_native(endpoint, _NATIVE, f"the endpoint of {peer.instance}")
        homes = dict(fields["places"])
        if not peer.regions.keys() <= homes.keys():
            raise _no_endpoint(peer, "it does not say where its regions lie")
        peer.native = link = _Link(peer.instance, homes, Process(fields["process"]), fields["mailbox"])
        self._look(peer)
        peer.check_lost()
        if not (self._has_port or link.process.seen):
            problem = f"peer {peer.instance} runs on another machine, or in another PID namespace"
            remedy = "name an interface on both sides, or open tcp; shared memory joins processes of one machine"
            raise HandshakeError(problem, peer.instance, remedy)
        if (self._mailbox is None) != (not link.mailbox) or (link.mailbox and not os.path.exists(link.mailbox)):
            raise _no_endpoint(peer, "its tags go another way, or its mailbox is not in this file system")
        try:
            name = self._agent.loadRemoteMD(fields["agent"])
        except self._errors as error:
            raise _no_endpoint(peer, str(error)) from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != peer.instance:
            if name not in self._peers:
                self._agent.invalidateRemoteMD(name)
            raise _no_endpoint(peer, f"it reaches {name}")

    def _disconnect(self, peer: Peer) -> None:
        link: _Link = peer.native
        if not link.cut:
            link.cut = True
            with contextlib.suppress(*self._errors):  # NIXL may have let the peer go by itself
                self._agent.invalidateRemoteMD(link.name)

    # Transfers

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        peer, link, request = handle.peer, handle.peer.native, _Request(None)
        self._look(peer)
        peer.check_lost()
        mailed = self._mailbox is not None
        tag = b"" if mailed else _tag_mac(peer.secret, self.instance, handle.tag) + handle.tag
        here, there, lengths = copies.source_regions, copies.target_regions, copies.lengths
        if not len(copies):
            if mailed:
                handle.native = _Request(None, handle.tag)
                return
            if self._regions and peer.regions:  # a row of no bytes: its end says that the tag has left
                ours, theirs = next(iter(self._regions.values())), next(iter(peer.regions.values()))
                here, there, lengths = np.array([ours.index]), np.array([theirs.index]), np.zeros(1, dtype=np.int64)
                sources, targets = np.array([ours.address]), np.array([theirs.address])
        try:
            if not len(lengths):
                self._agent.genNotif(link.name, tag)
                handle.native = request
                return
            rows = self._rows(self._homes, here, sources, lengths), self._rows(link.homes, there, targets, lengths)
            request.number = self._agent.createXferReq(self._nixl.NIXL_WRITE, *rows, link.name, tag, self._backends)
        except self._errors as error:
            self._notice_loss(peer, error)
            peer.check_lost()
            problem = f"NIXL refuses a write of {len(copies)} rows to {peer.instance}: {error}"
            remedy = "connect to an endpoint made after the memory was registered, still registered there"
            raise TransferError(problem, peer.instance, remedy) from error
        handle.native = request
        try:
            self._agent.postXferReq(request.number, b"")
            request.mail = handle.tag if mailed else None  # not before: without its rows the tag must never go
        except self._errors as error:
            self._notice_loss(peer, error)
            request.error = str(error)

    def _poll(self, handle: Handle) -> Status:
        request, peer = handle.native, handle.peer
        if not request.error:
            try:
                state = self._nixl.NIXL_SUCCESS
                if request.number is not None:
                    state = self._agent.getXferStatus(request.number)
                if state == self._nixl.NIXL_SUCCESS:
                    self._release(request)
                    # A tag is mailed behind a write that has landed, and waits while the mailbox is full.
                    box, mail = self._mailbox, request.mail
                    if box is None or mail is None or box.send(peer.native.mailbox, peer.secret, mail):
                        return Status.DONE
                    state = self._nixl.NIXL_IN_PROG
                self._look(peer)
                if state == self._nixl.NIXL_IN_PROG and peer.lost is None:
                    return Status.PENDING
                request.error = peer.lost or str(state)
            except self._errors as error:
                self._notice_loss(peer, error)
                request.error = str(error)
            except OSError as error:
                request.error = f"its mailbox is gone ({error})"
        handle.reason = request.error
        return Status.UNKNOWN

    def _drained(self, handle: Handle) -> bool:
        if not handle.peer.native.process.ended():
            return False
        self._disconnect(handle.peer)  # so that the source is no longer read
        self._release(handle.native)
        return True

    def _completions(self) -> list[Delivery]:
        for peer in self._peers.values():
            self._look(peer)
        if self._mailbox is not None:
            return self._mailbox.received()
        return [
            Delivery(tag[MAC:], instance)
            for instance, tags in self._agent.getNotifs({}, self._backends).items()
            for tag in tags
            if invariants.peer_unknown.holds(_tag_mac(self._secret, instance, tag[MAC:]), tag[:MAC])
        ]

    def _close(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        for handle in self._open.values():
            self._release(handle.native)
        for native in self._native:
            with contextlib.suppress(*self._errors):
                self._agent.deregisterMem(native, self._backends)
        self._native.clear()
        if self._mailbox is not None:
            self._mailbox.close()
        self._backends = []
        self._agent = None

    # Parts

    def _kind(self, kind: str) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG

    def _rows(self, homes: dict[int, _Home], regions: Ints, addresses: Ints, lengths: Ints) -> Any:
        """A NIXL list of descriptors."""
        rows = np.empty((len(regions), 3), dtype=np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = lengths
        if len(set(homes.values())) > 1:  # several devices, or both kinds
            present, which = np.unique(regions, return_inverse=True)
            homes = {index: homes[index] for index in present.tolist()}
            rows[:, 2] = np.array([device for _, device in homes.values()])[which]
        else:
            rows[:, 2] = next(iter(homes.values()))[1]
        kinds = {kind for kind, _ in homes.values()}
        if len(kinds) > 1:
            raise ArgumentError("one write with rows of host memory and of device memory", kinds, "write them apart")
        return self._nixl.nixlXferDList(self._kind(kinds.pop()), rows)

    def _look(self, peer: Peer) -> None:
        """Notices a peer whose process has ended."""
        if peer.lost is None and peer.native.process.ended():
            peer.lost = "its process has ended"

    def _notice_loss(self, peer: Peer, error: Exception) -> None:
        """Notices a peer that NIXL has lost."""
        if isinstance(error, self._nixl.nixlRemoteDisconnectError):
            peer.lost = peer.lost or f"the connection is lost ({error})"

    def _release(self, request: _Request) -> None:
        number, request.number = request.number, None
        if number is not None:
            with contextlib.suppress(*self._errors):  # NIXL cannot always cancel it; it goes with the agent
                self._agent.releaseXferReq(number)


def _tag_mac(secret: bytes, writer: str, tag: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 tag", writer.encode("utf-8", "replace"), tag)


def _bindings() -> Any:
    try:
        # The documented class, `nixl_agent`, always has its thread spin; what it wraps can be told not to.
        return importlib.import_module("nixl")._bindings
    except ImportError as error:
        raise TransferError(f"NIXL cannot be imported: {error}", "nixl", "pip install 'batchstate[nixl]'") from error


def _settings(interface: str | None, tls: str) -> dict[str, str]:
    settings = {"UCX_TLS": tls, "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "FATAL"}
    if interface is not None:
        settings["UCX_NET_DEVICES"] = interface
    if not any(transport.strip().startswith(_VERBS) for transport in tls.split(",")):
        settings["UCX_MODULES"] = "^ib"  # unused; and its libnl crashes when the process exits (NIXL 1.5.1)
    return settings


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Variables for the length of a block, but for those that are set already."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _no_endpoint(peer: Peer, why: str) -> HandshakeError:
    problem = f"the endpoint of {peer.instance} leads nowhere: {why}"
    return HandshakeError(problem, peer.instance, "pass what the other side's `endpoint()` returned")
