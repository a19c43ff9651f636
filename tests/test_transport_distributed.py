"""What is the paired engine's own: pieces, receivers that end or stand still, and clients that ask for nothing good."""

import base64
import contextlib
import gc
import json
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import pytest
import torch

from batchstate.errors import ArgumentError, TransferError
from batchstate.transport.engines import _packing as packing
from batchstate.transport.engines import _pairs as pairs
from batchstate.transport.engines import _rendezvous, distributed
from batchstate.transport.engines._pairs import WRITER, Header, Pair
from batchstate.transport.engines._rendezvous import EndWatch, ask
from batchstate.transport.engines.base import Status
from batchstate.transport.engines.distributed import DistributedEngine
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

MIB = 1 << 20


def make(connect_timeout: float = 5.0) -> DistributedEngine:
    """An engine with short time-outs."""
    return DistributedEngine(connect_timeout=connect_timeout, stall_timeout=2.0)


@pytest.fixture
def here() -> Iterator[EngineSide]:
    """An engine in this process."""
    side = EngineSide(make)
    yield side
    side.close()
    ours = [one.name for one in threading.enumerate() if one.name.startswith("batchstate")]
    assert not ours, "close leaves no thread"


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[], PeerProcess]]:
    """Gives a second process with a new engine: the last one, if it lives."""
    with contextlib.ExitStack() as stack:
        last: list[PeerProcess] = []

        def get() -> PeerProcess:
            if not last or not last[-1].process.is_alive():
                last.append(stack.enter_context(spawn_peer(EngineSide, make)))
            last[-1].call("renew")
            return last[-1]

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


def native(address: list[object]) -> str:
    """An endpoint's part that says where, as it is inside of one."""
    return base64.b64encode(json.dumps(address).encode()).decode()


def meet(pair: str) -> dict[str, object]:
    """What a writer asks first."""
    return {"ask": "meet", "pair": pair, "writer": "0" * 16}


def ours(side: EngineSide) -> DistributedEngine:
    """The engine itself, for a look inside."""
    assert isinstance(side.engine, DistributedEngine)
    return side.engine


def close_within(side: EngineSide, seconds: float) -> None:
    """Closes, and sees how long it took."""
    start = time.monotonic()
    side.close()
    assert time.monotonic() - start < seconds


# Bytes


def test_rows_longer_than_a_piece(here: EngineSide, processes: Callable[[], PeerProcess]) -> None:
    """A row longer than a message is cut, and one write of many messages arrives whole."""
    nbytes = 3 * packing.PIECE + 12_345
    peer = processes()
    name = joined(here, peer, nbytes)
    long = 2 * packing.PIECE + 7
    copies = Copies([0, 0], [nbytes - 100, 1], [0, 0], [0, 111], [100, long])
    here.write(name, copies, b"long")
    assert here.ended(b"long") is Status.DONE
    assert np.array_equal(peer.call("read"), expected(copies, here.memory[0], sentinels(nbytes)))


def test_two_engines_of_one_thread() -> None:
    """Two engines in one thread connect to each other, both ways, and write: connecting needs no call of the other."""
    with contextlib.closing(EngineSide(make)) as one, contextlib.closing(EngineSide(make)) as other:
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
    here.engine.unregister(here.regions[-1])


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
    endpoint = there.call("endpoint")
    assert there.process.pid is not None
    os.kill(there.process.pid, signal.SIGSTOP)
    job = here.handles[b"big"].native
    job.outgoing._pair.part()  # as a broken connection
    assert here.ended(b"big") is Status.UNKNOWN
    for _ in range(6):  # the engine looks each 50 ms
        assert not here.drain(b"big")
        time.sleep(0.05)
    with contextlib.closing(EngineSide(make, 1.0)) as other, pytest.raises(TransferError, match="cannot be reached"):
        other.connect(endpoint)
    os.kill(there.process.pid, signal.SIGCONT)
    until(lambda: here.drain(b"big"), "the end of the receiver")


def test_a_lost_peer_that_lives_can_be_reached_again(here: EngineSide, there: PeerProcess) -> None:
    """After a broken connection the same instance is connected to again, and receives."""
    name = peer_of(here)
    here.peers[name].native._pair.part()
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
        with contextlib.closing(EngineSide(make)) as one, contextlib.closing(EngineSide(make)) as other:
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


def test_a_header_without_sense(here: EngineSide, there: PeerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that makes no sense fails the write with the reason and ends the pair; the receiver serves the next."""
    name = peer_of(here)

    def nonsense(kind: int, rows: int, tag: bytes) -> Header:
        return Header(kind, rows - 5, tag)

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "Header", nonsense)
        here.write(name, Copies.empty(), b"nonsense")
        assert here.ended(b"nonsense") is Status.FAILED
    assert "makes no sense" in here.handles[b"nonsense"].reason
    until(lambda: here.lost() == [name], "the loss")
    here.disconnect(name)
    here.write(here.connect(there.call("endpoint")), Copies.empty(), b"fine")
    assert here.ended(b"fine") is Status.DONE


def test_an_endpoint_that_is_dead() -> None:
    """Connecting to an engine that is closed, or to what never answers, is an error within the time-out."""
    with contextlib.closing(EngineSide(make, 1.0)) as here, socket.create_server(("127.0.0.1", 0)) as silent:
        with contextlib.closing(EngineSide(make)) as gone:
            endpoint = gone.endpoint()
        start = time.monotonic()
        with pytest.raises(TransferError, match="cannot be reached"):
            here.connect(endpoint)
        fields = json.loads(endpoint)
        fields["native"] = native(["gloo", *silent.getsockname()])
        with pytest.raises(TransferError, match="cannot be reached"):
            here.connect(json.dumps(fields).encode())
        assert time.monotonic() - start < 10.0


def test_a_client_that_never_comes() -> None:
    """A client that asks and does not come, or sends garbage, holds up no other; closing waits for its time only."""
    here = EngineSide(make, 1.0)
    address = here.engine._accept_loop.address  # type: ignore[attr-defined]
    with socket.create_connection(address) as caller:
        caller.sendall(b"garbage\n")
    socket.create_connection(address).close()
    assert ask(address, here.engine.instance, 5.0, meet("0" * 16))["met"]
    here.register(64)
    with contextlib.closing(EngineSide(make)) as other:
        other.register(64)
        other.write(other.connect(here.endpoint()), Copies([0], [0], [0], [0], [64]), b"served")
        assert other.ended(b"served") is Status.DONE
    close_within(here, 4.0)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 4000,
        b"1" * 5000,
        b"null",
        b"[]",
        b"\xff\xfe",
        json.dumps({"ask": [], "instance": {}, "pair": [], "writer": []}).encode(),
        json.dumps({"ask": "meet", "pair": "\ud800", "writer": "0" * 16}).encode(),
        json.dumps({"ask": "meet", "pair": "0" * 16, "writer": "\ud800"}).encode(),
        json.dumps({"ask": "meet", "pair": "../" + "0" * 13, "writer": "0" * 16}).encode(),
    ],
    ids=range(9),
)
def test_foreign_clients_end_nothing(here: EngineSide, line: bytes) -> None:
    """Whatever a foreign client says closes its own connection alone; the next client is served, and closing closes."""
    engine = ours(here)
    address = engine._accept_loop.address
    line = line.replace(b'"meet"', b'"meet", "instance": "%s"' % engine.instance.encode())
    with socket.create_connection(address, 2.0) as stranger:
        stranger.sendall(line + b"\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert engine._accept_loop.live == set()
    assert ask(address, engine.instance, 1.0, {"ask": "ended", "pair": "0" * 16})["ended"] is True
    close_within(here, 1.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1.0)


def test_slow_clients_hold_up_no_other(here: EngineSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients are silent or drip others are answered at once; each has its time, and the oldest give way."""
    monkeypatch.setattr(_rendezvous, "ASKS_WITHIN", 0.6)
    address, instance = ours(here)._accept_loop.address, here.engine.instance
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(address, 2.0)) for _ in range(_rendezvous.MOST_CLIENTS + 6)
        ]
        start = time.monotonic()
        ask(address, instance, 5.0, {"ask": "ended", "pair": "0" * 16})
        assert time.monotonic() - start < 0.5
        slow[0].settimeout(0.5)
        assert slow[0].recv(1) == b""
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012
            while time.monotonic() < start + 2.0:
                slow[-1].sendall(b" ")
                time.sleep(0.1)


def test_answers_that_never_end() -> None:
    """A client waits for its time alone, and takes brackets without end for no answer, also to look for an end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection = server.accept()[0]
            with connection:
                connection.sendall(b"[" * 4000 + b"\n")
            connection = server.accept()[0]
            with connection, contextlib.suppress(OSError):
                for _ in range(20):
                    connection.sendall(b" ")
                    time.sleep(0.1)

        thread = threading.Thread(target=serve)
        thread.start()
        watch = EndWatch(server.getsockname(), "0" * 16, "0" * 16, 0.5)
        assert not watch.ended()
        start = time.monotonic()
        assert not watch.ended()
        assert time.monotonic() - start < 1.0
        thread.join()


def test_clients_that_never_come_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of writers that call and do not come only so many are waited for; others are told, and served later."""
    monkeypatch.setattr(distributed, "MOST_WAITING", 3)
    with contextlib.closing(EngineSide(make, 0.5)) as here, contextlib.closing(EngineSide(make)) as other:
        address, instance = ours(here)._accept_loop.address, here.engine.instance
        assert [ask(address, instance, 5.0, meet(f"{number:016x}"))["met"] for number in (1, 1, 2, 3, 4, 5)] == [
            True,
            False,
            True,
            True,
            False,
            False,
        ]
        assert ask(address, instance, 5.0, {"ask": "ended", "pair": f"{1:016x}"})["ended"] is False
        with pytest.raises(TransferError, match="too many wait"):
            other.connect(here.endpoint())
        until(lambda: not ours(here)._accept_loop.live, "the end of the wait")
        other.connect(here.endpoint())


def test_a_million_pieces_cost_little(here: EngineSide) -> None:
    """Rows of 16 TiB that a foreign process announces are dropped in little memory; more rows are nonsense."""
    address, instance = ours(here)._accept_loop.address, here.engine.instance
    here.register(4096)
    name, rows = "0" * 16, pairs.MOST_ROWS
    store = int(ask(address, instance, 5.0, meet(name))["store"])
    pair = Pair.join((address[0], store), name, WRITER, address[0], torch.device("cpu"), 5.0, 5.0)
    table = torch.zeros((3, rows), dtype=torch.int64)
    table[2] = packing.PIECE
    piece = torch.zeros(packing.PIECE, dtype=torch.uint8)

    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    sent = [pair.begin(Header(pairs.WRITE, rows, b"much")), pair.send_rows(table), pair.send_rows(piece)]
    assert pair.receive(pairs.Answer).verdict == pairs.GOT
    assert resident() - before < 200 * MIB
    for ended in sent:
        ended()
    pair.part()

    name = "1" * 16
    ask(address, instance, 5.0, meet(name))
    pair = Pair.join((address[0], store), name, WRITER, address[0], torch.device("cpu"), 5.0, 5.0)
    pair.send(Header(pairs.WRITE, rows + 1, b"more"))
    assert "makes no sense" in pair.receive(pairs.Answer).reason
    pair.part()
    assert here.completions() == []


def test_read_only_memory(here: EngineSide) -> None:
    """Memory that cannot be written is not registered."""
    memory = np.zeros(64, dtype=np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        here.engine.register(memory, "fixed")
    assert json.loads(here.endpoint())["regions"] == []


def test_arguments() -> None:
    """Another backend, and an address of another machine, are refused."""
    with pytest.raises(ArgumentError, match="backend"):
        DistributedEngine(backend="mpi")
    with pytest.raises(TransferError, match="cannot be listened on"):
        DistributedEngine(host="192.0.2.1")
