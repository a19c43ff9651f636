"""What is the TCP engine's own: pieces, receivers that end or stand still, strangers, and writers without sense."""

import base64
import contextlib
import gc
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.connection import ANSWER, Connection, connect
from batchstate.transport.engines import tcp
from batchstate.transport.engines.base import Copies, Endpoint, Status
from batchstate.transport.engines.tcp import TcpEngine
from tests.strangers import replays
from tests.transport_peers import (
    SENTINEL,
    EngineSide,
    PeerProcess,
    altered,
    joined,
    peers_of,
    scattered,
    sentinels,
    until,
)

MIB = 1 << 20


@pytest.fixture
def here() -> Iterator[EngineSide]:
    """An engine in this process."""
    side = EngineSide(TcpEngine)
    yield side
    side.close()
    ours = [one.name for one in threading.enumerate() if one.name.startswith("batchstate")]
    assert not ours, "close leaves no thread"


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[], PeerProcess]]:
    """Gives a second process with a new engine."""
    with peers_of(EngineSide, TcpEngine) as get:
        yield get


@pytest.fixture
def there(here: EngineSide, processes: Callable[[], PeerProcess]) -> PeerProcess:
    """A second process with 8 MiB of sentinel, connected to by `here`, which has 8 MiB of random bytes."""
    peer = processes()
    joined(here, peer)
    return peer


def peer_of(side: EngineSide) -> str:
    """The name of the last peer."""
    return list(side.peers)[-1]


def writer_of(endpoint: bytes) -> Connection:
    """A connection by which a writer that knows the secret can say anything."""
    to = Endpoint.from_bytes(endpoint)
    host, port = json.loads(to.native)
    connection = connect((host, port), to.secret)
    connection.send_bytes(b"0" * 16)
    return connection


def close_within(side: EngineSide, seconds: float) -> None:
    """Closes, and sees how long it took."""
    start = time.monotonic()
    side.close()
    assert time.monotonic() - start < seconds


# Bytes


def test_two_engines_of_one_thread() -> None:
    """Two engines in one thread connect to each other, both ways, and write: connecting needs no call of the other."""
    with contextlib.closing(EngineSide(TcpEngine)) as one, contextlib.closing(EngineSide(TcpEngine)) as other:
        for side in (one, other):
            side.register(MIB, seed=5)
        names = one.connect(other.endpoint()), other.connect(one.endpoint())
        copies = Copies([0], [0], [0], [MIB // 2], [4096])
        one.write(names[0], copies, b"a")
        other.write(names[1], copies, b"b")
        assert one.ended(b"a") is other.ended(b"b") is Status.DONE
        assert [item.tag for item in (*one.completions(), *other.completions())] == [b"b", b"a"]


# Ends


def big_write(here: EngineSide, there: PeerProcess, tag: bytes) -> str:
    """Begins a write of 256 MiB, and returns when a part of it has arrived."""
    nbytes = 256 * MIB
    index = here.register(nbytes, 1)
    there.call("register", nbytes, SENTINEL)
    for name in list(here.peers):
        here.disconnect(name)
    name = here.connect(there.call("endpoint"))
    rows = nbytes // 65536
    zeros = np.zeros(rows, dtype=np.int64)
    places = np.arange(rows) * 65536
    here.write(name, Copies(zeros + index, places, zeros + 1, places, np.full(rows, 65536)), tag)
    until(lambda: bool((there.call("read", 1, 0, 4096) != SENTINEL).any()), "the first row")
    return name


def test_receiver_killed_in_the_middle(here: EngineSide, there: PeerProcess) -> None:
    """A receiver killed in the middle: the write is UNKNOWN, the peer lost, and all is drained since it is gone."""
    name = big_write(here, there, b"big")
    here.write(name, Copies.empty(), b"behind")
    there.kill()
    assert here.ended(b"big") is Status.UNKNOWN
    assert "before the receiver's answer" in here.handles[b"big"].reason
    assert here.ended(b"behind") is Status.FAILED
    assert "never sent" in here.handles[b"behind"].reason
    assert here.lost() == [name]
    until(lambda: here.drain(b"big"), "the end of the receiver")
    assert here.poll(b"big") is Status.UNKNOWN
    with pytest.raises(TransferError, match="is gone"):
        here.write(name, Copies.empty(), b"later")


def test_a_receiver_that_closes_drains(here: EngineSide, there: PeerProcess) -> None:
    """A receiver that closes its engine in the middle, its process alive: UNKNOWN, and drained once it is closed."""
    big_write(here, there, b"big")
    there.call("close")
    assert here.ended(b"big") is Status.UNKNOWN
    until(lambda: here.drain(b"big"), "the end of the receiver")
    before = there.call("checksum", 1)
    time.sleep(0.1)
    assert there.call("checksum", 1) == before


def test_a_receiver_that_stands_still_is_not_drained(here: EngineSide, there: PeerProcess) -> None:
    """A write that broke while the receiver's process is stopped is not drained before it goes on, or is gone."""
    big_write(here, there, b"big")
    assert there.process.pid is not None
    state = Path(f"/proc/{there.process.pid}/stat")
    os.kill(there.process.pid, signal.SIGSTOP)
    try:
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the stop")
        job = here.handles[b"big"].native
        job.outgoing._lose("broken")  # as a connection that fails on this side
        assert here.ended(b"big") is Status.UNKNOWN
        for _ in range(6):  # the engine looks each 50 ms
            assert not here.drain(b"big")
            time.sleep(0.05)
    finally:
        os.kill(there.process.pid, signal.SIGCONT)
    until(lambda: here.drain(b"big"), "the end of the receiver")


def test_a_lost_peer_that_lives_can_be_reached_again(here: EngineSide, there: PeerProcess) -> None:
    """After a broken connection the same instance is connected to again, and receives."""
    name = peer_of(here)
    here.peers[name].native._lose("broken")
    until(lambda: here.lost() == [name], "the loss")
    here.disconnect(name)
    assert here.connect(there.call("endpoint")) == name
    here.write(name, Copies([0], [0], [0], [0], [64]), b"again")
    assert here.ended(b"again") is Status.DONE


def test_disconnect_lets_open_writes_end(here: EngineSide, there: PeerProcess) -> None:
    """Writes that are open when a peer is let go end as DONE; the peer is not reported as lost."""
    name = peer_of(here)
    for number in range(20):
        here.write(name, scattered(500, 4096, 8 * MIB, 8 * MIB, seed=number), b"%d" % number)
    here.disconnect(name)
    assert {here.ended(b"%d" % number) for number in range(20)} == {Status.DONE}
    assert here.lost() == []
    with pytest.raises(ArgumentError, match="expected a peer"):
        here.write(name, Copies.empty(), b"later")


def test_nothing_is_left_over() -> None:
    """Engines that were opened, joined and closed leave no thread and no open file."""

    def once() -> None:
        with contextlib.closing(EngineSide(TcpEngine)) as one, contextlib.closing(EngineSide(TcpEngine)) as other:
            other.register(64)
            one.register(64)
            one.write(one.connect(other.endpoint()), Copies([0], [0], [0], [0], [64]), b"x")
            one.ended(b"x")

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        once()
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2


def test_close_while_a_writer_stands_still(here: EngineSide, there: PeerProcess) -> None:
    """Closing takes a bounded time also when a peer was stopped in the middle of a message to this engine."""
    nbytes = 256 * MIB
    index = here.register(nbytes, SENTINEL)
    there.call("register", nbytes, 1)
    back = there.call("connect", here.endpoint())
    rows = nbytes // 65536
    zeros, places = np.zeros(rows, dtype=np.int64), np.arange(rows) * 65536
    there.call("write", back, Copies(zeros + 1, places, zeros + index, places, zeros + 65536), b"stopped")
    until(lambda: bool((here.memory[index][:4096] != SENTINEL).any()), "the first row")
    assert there.process.pid is not None
    os.kill(there.process.pid, signal.SIGSTOP)
    close_within(here, 6.0)
    after = here.memory[index].copy()
    os.kill(there.process.pid, signal.SIGCONT)
    assert there.call("ended", b"stopped") is Status.UNKNOWN
    assert np.array_equal(here.memory[index], after)


# Refusals


def test_the_receiver_checks_for_itself(here: EngineSide, there: PeerProcess) -> None:
    """Rows for memory that the receiver lacks are refused there: FAILED, nothing written, and the pair serves on."""
    name = peer_of(here)
    peer = here.peers[name]
    peer.regions[7] = attrs.evolve(peer.regions[0], index=7)
    peer.regions[0] = attrs.evolve(peer.regions[0], nbytes=64 * MIB)
    zeros = np.zeros(100, dtype=np.int64)
    places = np.arange(100) * 4096
    here.write(name, Copies(zeros, places, zeros + 7, places, zeros + 4096), b"unregistered")
    here.write(name, Copies(zeros, places, zeros, places + 8 * MIB - 50 * 4096, zeros + 4096), b"outside")
    here.write(name, Copies([0], [0], [0], [4096], [4096]), b"fine")
    assert here.ended(b"unregistered") is Status.FAILED
    assert "region 7 is not registered at the receiver" in here.handles[b"unregistered"].reason
    assert here.ended(b"outside") is Status.FAILED
    assert "row 50" in here.handles[b"outside"].reason
    assert here.drain(b"outside")
    assert here.ended(b"fine") is Status.DONE
    after = sentinels()
    after[4096:8192] = here.memory[0][:4096]
    assert np.array_equal(there.call("read"), after)
    there.call("received", b"fine")
    assert [one.tag for one in there.call("completions")] == [b"fine"]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 4,
        struct.pack("<IB", 1, 3) + b"tag",
        struct.pack("<IB", 2**32 - 1, 3) + b"tag" + bytes(24),
        struct.pack("<IB", 0, 0),
        struct.pack("<IB", 0, 129) + b"t" * 129,
        struct.pack("<IB", 1, 3) + b"tag" + struct.pack("<qqq", 0, 0, 0),
        struct.pack("<IB", 1, 3) + b"tag" + struct.pack("<qqq", 0, 0, 2**40),
        struct.pack("<IB", 1, 3) + b"tag" + struct.pack("<qqq", 0, 0, -1),
    ],
    ids=range(9),
)
def test_a_write_without_sense(here: EngineSide, message: bytes) -> None:
    """It ends the connection of its writer alone; nothing lands, no tag is delivered, and the next one is served."""
    here.register(64, SENTINEL)
    with contextlib.closing(writer_of(here.endpoint())) as writer:
        writer.send_bytes(message)
        assert writer.await_end(5.0)
    with contextlib.closing(EngineSide(TcpEngine)) as other:
        other.register(64, SENTINEL)
        other.write(other.connect(here.endpoint()), Copies([0], [0], [0], [0], [64]), b"fine")
        assert other.ended(b"fine") is Status.DONE
    assert [one.tag for one in here.completions()] == [b"fine"]
    assert (here.memory[0] == SENTINEL).all()


def test_a_million_pieces_cost_little(here: EngineSide) -> None:
    """Rows of a tebibyte that a writer announces are refused piece by piece, in little memory."""
    here.register(4096, SENTINEL)
    with contextlib.closing(writer_of(here.endpoint())) as writer:
        rows = 1 << 20
        table = np.zeros((3, rows), dtype="<i8")
        table[2] = tcp.PIECE
        writer.send_bytes(struct.pack("<IB", rows, 4), b"much", table.data.cast("B"))
        for _ in range(3):
            writer.send_bytes(bytes(tcp.PIECE))
        writer.send_bytes(b"another length")
        assert writer.await_end(5.0)
    assert here.completions() == []
    assert (here.memory[0] == SENTINEL).all()


def test_who_pretends_to_be_the_peer_is_found_out() -> None:
    """A stranger that listens in the place of a peer proves nothing: it is not connected to, and learns no secret."""
    with contextlib.closing(EngineSide(TcpEngine)) as here, socket.create_server(("127.0.0.1", 0)) as server:
        with contextlib.closing(EngineSide(TcpEngine)) as gone:
            endpoint = gone.endpoint()
        heard: list[bytes] = []

        def serve() -> None:
            with server.accept()[0] as caller:
                heard.append(caller.recv(4096))
                caller.sendall(heard[0][:ANSWER].ljust(ANSWER, b"\0"))  # its own hello, reflected
                heard.append(caller.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        native = base64.b64encode(json.dumps(server.getsockname()).encode()).decode()
        with pytest.raises(HandshakeError, match="does not know the secret"):
            here.connect(altered(endpoint, native=native))
        thread.join()
        assert heard[1] == b""
        assert Endpoint.from_bytes(endpoint).secret not in heard[0]


def test_read_only_memory(here: EngineSide) -> None:
    """Memory that cannot be written is not registered."""
    memory = np.zeros(64, dtype=np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        here.engine.register(memory, "fixed")
    assert json.loads(here.endpoint())["regions"] == []


def test_arguments(here: EngineSide, there: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of another machine, and more rows than a message can name once they are cut, are refused."""
    with pytest.raises(TransferError, match=r"cannot listen on 192\.0\.2\.1:0"):
        TcpEngine(host="192.0.2.1")
    monkeypatch.setattr(tcp, "MOST_CUT_ROWS", 7)
    with pytest.raises(ArgumentError, match="8 rows once long ones are cut; 7 fit"):
        here.write(peer_of(here), Copies([0], [0], [0], [0], [8 * tcp.PIECE]), b"long")
    here.write(peer_of(here), Copies([0], [0], [0], [0], [7 * tcp.PIECE]), b"long")
    assert here.ended(b"long") is Status.DONE


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_first_proofs_said_again_keep_nobody_out(count: int) -> None:
    """Recorded first proofs are told nothing, and of writes that go on meanwhile none is lost or late by a second."""
    figures = replays(count, count // 50)
    assert figures["calls"] == count
    assert (figures["told"], figures["believed"], figures["lost"], figures["late"]) == (0, 0, 0, 0)
