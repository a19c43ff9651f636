"""The Mooncake engine, between real processes over loopback.

Skipped where Mooncake cannot be loaded, unless `BATCHSTATE_MOONCAKE=required` says that it must be there.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing import shared_memory

import numpy as np
import numpy.typing as npt
import pytest

from batchstate.errors import HandshakeError, TransferError
from batchstate.transport.engines import mooncake
from batchstate.transport.engines.base import Status
from batchstate.transport.engines.mooncake import Client, MooncakeEngine
from batchstate.transport.regions import Copies
from tests.transport_peers import (
    SENTINEL,
    EngineSide,
    PeerProcess,
    expected,
    joined,
    scattered,
    sentinels,
    spawn_peer,
    until,
)

try:
    MooncakeEngine().close()
except TransferError as error:
    if os.environ.get("BATCHSTATE_MOONCAKE") == "required":
        raise
    pytest.skip(str(error), allow_module_level=True)

ROW = 4096
START = ("InitGoogleLogging", "Local segment descriptor not found")
"""What Mooncake says at each start."""


def seen_in(shared: shared_memory.SharedMemory) -> npt.NDArray[np.uint8]:
    """The bytes of shared memory."""
    return np.ndarray((shared.size,), dtype=np.uint8, buffer=shared.buf)


def native(side: EngineSide) -> MooncakeEngine:
    """The engine itself, for a look inside."""
    assert isinstance(side.engine, MooncakeEngine)
    return side.engine


class Side(EngineSide):
    """An engine, and memory that two processes see."""

    def share(self, name: str) -> None:
        """Registers shared memory."""
        self.shared = shared_memory.SharedMemory(name=name)
        memory = seen_in(self.shared)
        self.regions.append(self.engine.register(memory, "shared"))
        self.memory.append(memory)


@pytest.fixture
def here() -> Iterator[EngineSide]:
    """This process's engine."""
    side = EngineSide(MooncakeEngine)
    yield side
    side.close()


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    """A second process."""
    with spawn_peer(Side, MooncakeEngine) as peer:
        yield peer


@pytest.fixture
def there(process: PeerProcess) -> PeerProcess:
    """A fresh engine in the second process, which outlives the test."""
    process.call("renew")
    return process


@pytest.fixture
def mortal() -> Iterator[PeerProcess]:
    """An engine in a process that the test may kill."""
    with spawn_peer(Side, MooncakeEngine) as peer:
        yield peer


def test_many_writes_at_once(here: EngineSide, there: PeerProcess) -> None:
    """Eight writes of 1024 rows, begun together, all land: rows beyond Mooncake's queue wait here."""
    name = joined(here, there, 32 << 20)
    rows = scattered(8 * 1024, ROW, 32 << 20, 32 << 20)
    tags = [b"write %d" % number for number in range(8)]
    for number, tag in enumerate(tags):
        here.write(name, rows.rows(slice(number * 1024, (number + 1) * 1024)), tag)
        assert len(here.engine._peers[name].native.flying) <= 1024
    assert {here.ended(tag) for tag in tags} == {Status.DONE}
    for tag in tags:
        there.call("received", tag)
    assert np.array_equal(there.call("read"), expected(rows, here.memory[0], sentinels(32 << 20)))


def test_done_is_after_the_data(here: EngineSide, there: PeerProcess) -> None:
    """At the moment a write is done all its bytes are in the peer's memory, while the peer takes no part in it."""
    shared = shared_memory.SharedMemory(create=True, size=1 << 22)
    seen = seen_in(shared)
    try:
        there.call("share", shared.name)
        here.register(1 << 22, 0)
        name = here.connect(there.call("endpoint"))
        for number in range(1, 201):
            here.fill(number)
            copies = scattered(60, ROW * (1 + number % 16), 1 << 22, 1 << 22, number)
            tag = b"round %d" % number
            here.write(name, copies, tag)
            assert here.ended(tag) is Status.DONE
            for start, length in zip(copies.target_offsets.tolist(), copies.lengths.tolist(), strict=True):
                assert (seen[start : start + length] == number).all()
    finally:
        del seen
        shared.close()
        shared.unlink()


def test_several_writers(here: EngineSide, there: PeerProcess, mortal: PeerProcess) -> None:
    """Two processes write into one memory at once; each tag names its writer."""
    here.register(2 << 20, SENTINEL)
    instances = set()
    for number, writer in enumerate((there, mortal)):
        writer.call("register", 1 << 20, number)
        name = writer.call("connect", here.endpoint())
        instances.add(json.loads(writer.call("endpoint"))["instance"])
        rows = np.arange(256)
        writer.send(
            "write",
            name,
            Copies(rows * 0, rows * ROW, rows * 0, rows * ROW + (number << 20), rows * 0 + ROW),
            b"same tag",
        )
    for writer in (there, mortal):
        writer.answer()
        assert writer.call("ended", b"same tag") is Status.DONE
    until(lambda: len(here.completions()) == 2, "two tags")
    assert {one.instance for one in here.arrived} == instances
    assert np.array_equal(here.memory[0], np.repeat(np.arange(2, dtype=np.uint8), 1 << 20))


def test_peer_that_stands_still(here: EngineSide, there: PeerProcess) -> None:
    """While a peer stands still nothing waits and nothing is drained; when it goes on, all lands."""
    name = joined(here, there, 64 << 20)
    assert there.process.pid is not None
    os.kill(there.process.pid, signal.SIGSTOP)
    try:
        copies = scattered(1024, 65_536, 64 << 20, 64 << 20)
        here.write(name, copies, b"slow")
        started = time.monotonic()
        for _ in range(100):
            assert here.poll(b"slow") is Status.PENDING
            assert not here.drain(b"slow")
        assert time.monotonic() - started < 0.5
    finally:
        os.kill(there.process.pid, signal.SIGCONT)
    assert here.ended(b"slow") is Status.DONE


def test_rejected_row_is_unknown_until_the_peer_ends(here: EngineSide, mortal: PeerProcess) -> None:
    """A row that the peer rejects ends its write as unknown; the peer is not lost, and drained only by its end."""
    name = joined(here, mortal)
    here.engine._peers[name].regions[0] = type(here.engine._peers[name].regions[0])(0, "moved", 4096, 8 << 20)
    here.write(name, scattered(4, ROW, 8 << 20, 8 << 20), b"astray")
    assert here.ended(b"astray") is Status.UNKNOWN
    assert here.lost() == []
    assert not here.drain(b"astray")
    here.write(name, Copies.empty(), b"fine")
    assert here.ended(b"fine") is Status.DONE
    with pytest.raises(TransferError, match="1 writes are open"):
        here.engine.unregister(here.regions[0])
    mortal.kill()
    until(lambda: here.drain(b"astray"), "the drain", 10)


def changed(endpoint: bytes, **native: object) -> bytes:
    """An endpoint with other fields in its native part."""
    fields = json.loads(endpoint)
    inner = json.loads(base64.b64decode(fields["native"]))
    fields["native"] = base64.b64encode(json.dumps({**inner, **native}).encode()).decode()
    return json.dumps(fields).encode()


def test_bad_endpoints(here: EngineSide, there: PeerProcess) -> None:
    """Other bytes, and endpoints that lead nowhere or elsewhere, are refused, and the true one is served then."""
    here.register(1 << 20, 1)
    there.call("register", 1 << 20, SENTINEL)
    good = there.call("endpoint")
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    fields = json.loads(good)
    for bad, error, words in (
        (b"hello", HandshakeError, "expected an endpoint"),
        (json.dumps({**fields, "native": ""}).encode(), HandshakeError, "expected an endpoint of mooncake"),
        (json.dumps({**fields, "engine": "nixl"}).encode(), HandshakeError, "speaks nixl"),
        (here.endpoint(), HandshakeError, "own"),
        (json.dumps({**fields, "instance": "0" * 16}).encode(), HandshakeError, "is not instance"),
        (changed(good, tags=closed), TransferError, "cannot be reached"),
        (changed(good, tags=70_000), TransferError, "cannot be reached"),
        (changed(good, mooncake=f"127.0.0.1:{closed}"), TransferError, "does not tell who it is"),
        (changed(good, identity=4096), TransferError, "does not tell who it is"),
    ):
        with pytest.raises(error, match=words):
            here.connect(bad)
    assert native(here)._connections == []
    name = here.connect(good)
    with pytest.raises(HandshakeError, match="connected already"):
        here.connect(good)
    here.write(name, scattered(4, ROW, 1 << 20, 1 << 20), b"after all")
    assert here.ended(b"after all") is Status.DONE


def test_port_taken_by_the_next_instance(here: EngineSide, there: PeerProcess) -> None:
    """A new instance behind host and port of an earlier one is reached afresh, not where the earlier one was."""
    here.register(1 << 20, 1)
    there.call("register", 1 << 20, SENTINEL)
    endpoint = there.call("endpoint")
    inner = json.loads(base64.b64decode(json.loads(endpoint)["native"]))
    before = native(here)._outgoing
    native(here)._opened[inner["mooncake"]] = "an earlier instance"
    name = here.connect(endpoint)
    assert native(here)._outgoing is not before
    here.write(name, scattered(4, ROW, 1 << 20, 1 << 20), b"tag")
    assert here.ended(b"tag") is Status.DONE
    there.call("received", b"tag")


def test_foreign_connections_are_dropped(here: EngineSide) -> None:
    """A client of the tag port that does not name this instance, or sends a broken record, delivers no tag."""
    inner = json.loads(base64.b64decode(json.loads(here.endpoint())["native"]))
    greeting = b"0" * 16 + here.engine.instance.encode()
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n      ", b"0" * 32 + b"\x03tag", greeting + b"\0" + b"x" * 300):
        with socket.create_connection((inner["host"], inner["tags"]), 5) as stranger:
            stranger.sendall(sent)
            until(lambda: here.completions() == [] and not native(here)._clients, "the end of the connection", 5)
    with socket.create_connection((inner["host"], inner["tags"]), 5) as half:
        half.sendall(greeting + b"\x05hal")
        time.sleep(0.05)
        assert here.completions() == []
    until(lambda: here.completions() == [] and not native(here)._clients, "the end of the connection", 5)


def test_silent_connections_are_dropped(here: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent client of the tag port is kept for its time alone, and only so many; others stay."""
    inner = json.loads(base64.b64decode(json.loads(here.endpoint())["native"]))
    monkeypatch.setattr(mooncake, "MOST_SILENT", 4)

    def reach() -> socket.socket:
        return stack.enter_context(socket.create_connection((inner["host"], inner["tags"]), 5))

    with contextlib.ExitStack() as stack:
        writer = reach()
        writer.sendall(b"0" * 16 + here.engine.instance.encode())
        until(lambda: here.completions() == [] and len(native(here)._clients) == 1, "the writer")
        silent = [reach() for _ in range(6)]
        for _ in range(3):
            here.completions()
        assert len(native(here)._clients) == 1 + 4
        assert [one.recv(9) for one in silent[:2]] == [b"\0"] * 2
        monkeypatch.setattr(mooncake, "GREETS_WITHIN_S", 0.0)
        assert here.completions() == []
        assert [inlet.writer for inlet in native(here)._clients] == ["0" * 16]
        writer.sendall(b"\x03tag")
        here.received(b"tag")


def test_a_flood_of_tags_is_read_bit_by_bit(here: EngineSide) -> None:
    """However much a connection sends, one look for completions reads a bounded part; all tags arrive in the end."""
    inner = json.loads(base64.b64decode(json.loads(here.endpoint())["native"]))
    with socket.create_connection((inner["host"], inner["tags"]), 5) as writer:
        writer.sendall(b"0" * 16 + here.engine.instance.encode() + b"".join(b"\x04%04d" % n for n in range(9999)) * 2)
        time.sleep(0.1)
        assert 0 < len(here.engine.completions()) <= (1 << 16) // 5
        here.arrived.clear()
        until(lambda: bool(here.completions()) and here.arrived[-1].tag == b"9998", "the last tag")


def test_a_refused_connection_is_no_end(here: EngineSide, there: PeerProcess) -> None:
    """A writer whose connection for tags was refused has lost its peer, but does not take it for ended."""
    name = joined(here, there)
    line = native(here)._connections[0]
    line.wire.close()
    line.wire, other = socket.socketpair()
    line.wire.setblocking(False)
    Client(other).refuse()
    assert here.lost() == [name]
    assert not line.ended


def test_settings_that_make_done_unsafe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without acknowledged rows a completed row need not have landed: the engine does not start."""
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransferError, match="MC_TCP_PROTO=1"):
        MooncakeEngine()


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Mooncake cannot be imported, the error says what to install."""
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match=r"pip install 'batchstate\[mooncake\]'.*libibverbs1"):
        MooncakeEngine()
