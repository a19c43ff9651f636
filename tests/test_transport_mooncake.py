"""The Mooncake engine, between real processes over loopback.

Skipped where Mooncake cannot be loaded, unless `BATCHSTATE_MOONCAKE=required` says that it must be there.
"""

import base64
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import shared_memory

import numpy as np
import numpy.typing as npt
import pytest

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.connection import Connection, ConnectionEndedError, connect
from batchstate.transport.engines import mooncake
from batchstate.transport.engines.base import Copies, Endpoint, Status, open_engine
from batchstate.transport.engines.mooncake import MooncakeEngine
from tests.transport_peers import (
    SENTINEL,
    EngineSide,
    PeerProcess,
    altered,
    expected,
    joined,
    local_pair,
    peers_of,
    scattered,
    sentinels,
    until,
)

try:
    MooncakeEngine(trusted_network=True).close()
except TransferError as error:
    if os.environ.get("BATCHSTATE_MOONCAKE") == "required":
        raise
    pytest.skip(str(error), allow_module_level=True)

ROW = 4096
START = ("InitGoogleLogging", "Local segment descriptor not found")
"""What Mooncake says at each start."""


def make() -> MooncakeEngine:
    """An engine; only this machine's processes reach the tests' network."""
    return MooncakeEngine(trusted_network=True)


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
    side = EngineSide(make)
    yield side
    side.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[], PeerProcess]]:
    """Gives a second process with a new engine."""
    with peers_of(Side, make) as get:
        yield get


@pytest.fixture
def there(processes: Callable[[], PeerProcess]) -> PeerProcess:
    """A fresh engine in the second process."""
    return processes()


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


def test_rejected_row_is_unknown_until_the_peer_ends(here: EngineSide, there: PeerProcess) -> None:
    """A row that the peer rejects ends its write as unknown; the peer is not lost, and drained only by its end."""
    name = joined(here, there)
    here.engine._peers[name].regions[0] = type(here.engine._peers[name].regions[0])(0, "moved", 4096, 8 << 20)
    here.write(name, scattered(4, ROW, 8 << 20, 8 << 20), b"astray")
    assert here.ended(b"astray") is Status.UNKNOWN
    assert here.lost() == []
    assert not here.drain(b"astray")
    here.write(name, Copies.empty(), b"fine")
    assert here.ended(b"fine") is Status.DONE
    there.kill()
    until(lambda: here.drain(b"astray"), "the drain", 10)


def test_an_interrupted_write_drains_behind_its_rows(
    here: EngineSide, there: PeerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write interrupted before its rows were handed over is UNKNOWN, and drained when all of them have landed."""
    name, copies = joined(here, there), scattered(1000, ROW, 8 << 20, 8 << 20)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mooncake.Link, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.write(name, copies, b"cut")
    monkeypatch.undo()
    handle = here.engine.begun(b"cut")
    assert handle is not None
    assert handle.status is Status.UNKNOWN
    until(lambda: here.engine.drain(handle), "the drain", 10)
    assert np.array_equal(there.call("read"), expected(copies, here.memory[0], sentinels()))


def changed(endpoint: bytes, **native: object) -> bytes:
    """An endpoint with other fields in its native part."""
    inner = json.loads(base64.b64decode(json.loads(endpoint)["native"]))
    return altered(endpoint, native=base64.b64encode(json.dumps({**inner, **native}).encode()).decode())


def test_bad_endpoints(here: EngineSide, there: PeerProcess) -> None:
    """Other bytes, and endpoints that lead nowhere or elsewhere, are refused, and the true one is served then."""
    here.register(1 << 20, 1)
    there.call("register", 1 << 20, SENTINEL)
    good = there.call("endpoint")
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    stranger = base64.b64encode(bytes(32)).decode()
    for bad, error, words in (
        (altered(good, native=""), HandshakeError, "expected an endpoint of mooncake"),
        (altered(good, secret=stranger), HandshakeError, "hangs up: it has another secret"),
        (altered(good, instance="0" * 16), HandshakeError, "is not instance"),
        (changed(good, tags=closed), TransferError, "cannot be reached"),
        (changed(good, tags=70_000), HandshakeError, "expected an endpoint of mooncake"),
        (changed(good, mooncake=f"127.0.0.1:{closed}"), TransferError, "does not tell who it is"),
        (changed(good, identity=4096), TransferError, "does not tell who it is"),
    ):
        with pytest.raises(error, match=words):
            here.connect(bad)
    assert native(here)._links == []
    name = here.connect(good)
    here.write(name, scattered(4, ROW, 1 << 20, 1 << 20), b"after all")
    assert here.ended(b"after all") is Status.DONE


def test_port_taken_by_the_next_instance(here: EngineSide, there: PeerProcess) -> None:
    """A new instance behind host and port of an earlier one is reached afresh, not where the earlier one was."""
    here.register(1 << 20, 1)
    there.call("register", 1 << 20, SENTINEL)
    endpoint = there.call("endpoint")
    inner = json.loads(base64.b64decode(json.loads(endpoint)["native"]))
    before = native(here)._natives[-1]
    native(here)._opened[inner["mooncake"]] = "an earlier instance"
    name = here.connect(endpoint)
    assert native(here)._natives[-1] is not before
    here.write(name, scattered(4, ROW, 1 << 20, 1 << 20), b"tag")
    assert here.ended(b"tag") is Status.DONE
    there.call("received", b"tag")


def test_an_open_port_wants_a_trusted_network() -> None:
    """Mooncake's ports let in whoever calls: without the word of its user the engine does not open."""
    for host, where in (("127.0.0.1", "the loopback"), ("localhost", "the loopback"), ("192.0.2.1", "all interfaces")):
        with pytest.raises(ArgumentError, match=f"Mooncake listens on {where}, and lets every caller") as caught:
            open_engine("mooncake", host=host)
        assert "trusted_network=True" in caught.value.remedy


def ties(files: Iterable[int]) -> list[str]:
    """The network device to which each socket is tied."""
    found = []
    for file in files:
        with socket.socket(fileno=os.dup(file)) as wire:
            found.append(wire.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode())
    return found


def test_only_the_loopback_reaches_its_ports() -> None:
    """By default Mooncake's two ports, also those of a second start, take nothing that comes from another machine."""
    with socket.create_server(("", 0)) as own:  # of the program, and none of the engine's business
        before = mooncake._listeners()
        with contextlib.closing(make()) as engine:
            engine._natives.append(engine._started())
            opened = {inode: file for inode, file in mooncake._listeners().items() if inode not in before}
            assert ties(opened.values()) == ["lo"] * 4
        with contextlib.closing(MooncakeEngine("0.0.0.0", trusted_network=True)):
            opened = {inode: file for inode, file in mooncake._listeners().items() if inode not in before}
            assert ties(opened.values()) == [""] * 3  # two, and the library's own
        assert ties([own.fileno()]) == [""]


def writer_of(here: EngineSide) -> Connection:
    """A connection for tags, by a writer that knows the secret."""
    endpoint = Endpoint.from_bytes(here.endpoint())
    inner = json.loads(endpoint.native)
    connection = connect((inner["host"], inner["tags"]), endpoint.secret)
    connection.send_bytes(b"0" * 16)
    return connection


def test_tags_without_sense_end_their_connection(here: EngineSide) -> None:
    """Empty and over-long tags end the connection of their writer alone, and are not delivered."""
    for tag in (b"", b"x" * 129):
        with contextlib.closing(writer_of(here)) as writer, contextlib.closing(writer_of(here)) as other:
            writer.send_bytes(tag)
            until(functools.partial(ends, here, writer), "the end of the connection", 5)
            other.send_bytes(b"fine")
            here.received(b"fine")
        assert [one.tag for one in here.completions()] == [b"fine"]
        here.arrived.clear()


def ends(here: EngineSide, writer: Connection) -> bool:
    """Whether the other side has closed a connection."""
    here.completions()
    try:
        return writer.poll()
    except ConnectionEndedError:
        return True


def test_a_flood_of_tags_is_read_bit_by_bit(here: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a writer sends, one look for completions takes a bounded part; all tags arrive in the end."""
    monkeypatch.setattr(mooncake, "MOST_AT_ONCE", 100)
    with contextlib.closing(writer_of(here)) as writer:
        for number in range(999):
            writer.send_bytes(b"%04d" % number)
        until(lambda: bool(here.engine.completions()), "the first")
        assert 0 < len(here.engine.completions()) <= 100
        until(lambda: bool(here.completions()) and here.arrived[-1].tag == b"0998", "the last tag")


def test_a_broken_connection_is_no_end(here: EngineSide, there: PeerProcess) -> None:
    """A writer that is answered where it is to be told nothing has lost its peer, but does not take it for ended."""
    name = joined(here, there)
    link = native(here)._links[0]
    link.connection.close()
    link.connection, other = local_pair()
    with contextlib.closing(other):
        other.send_bytes(b"what?")
        assert here.lost() == [name]
        assert not link.ended


def test_settings_that_make_done_unsafe_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without acknowledged rows a completed row need not have landed: the engine does not start."""
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransferError, match="MC_TCP_PROTO=1"):
        make()


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Mooncake cannot be imported, the error says what to install."""
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferError, match=r"pip install 'batchstate\[mooncake\]'.*libibverbs1"):
        make()
