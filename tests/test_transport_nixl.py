"""The NIXL engine between two real processes over the loopback interface; every byte compared."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport.engines.base import Engine, Status
from batchstate.transport.engines.nixl import MAX_ROWS, NixlEngine, Process, here
from batchstate.transport.regions import Copies
from batchstate.violations import Violation
from tests.transport_peers import EngineSide, PeerError, PeerProcess, expected, scattered, spawn_peer, until

pytest.importorskip("nixl", reason="NIXL is not installed")

MIB = 1 << 20
SENTINEL = 0xEE
TLS = ("cma,posix,tcp", "tcp")

_tags = itertools.count()


def tag() -> bytes:
    """One that was not used before."""
    return b"tag %d" % next(_tags)


def make_nixl(tls: str) -> Engine:
    """The engine of either side."""
    return NixlEngine(tls=tls)


class Checker(EngineSide):
    """A side that looks at its memory in the moment in which a tag arrives."""

    def unlike(self, one: bytes, value: int, nbytes: int) -> int:
        """Waits for a tag; how many of the first bytes are then not of this value."""
        self.received(one)
        return int((self.memory[0][:nbytes] != value).sum())


class Pair:
    """The test's engine (random bytes) and one of another process (sentinels), connected both ways."""

    def __init__(self, here: EngineSide, there: PeerProcess, nbytes: int) -> None:
        self.here, self.there, self.nbytes = here, there, nbytes
        self.there.call("register", nbytes, SENTINEL)
        self.name = here.connect(there.call("endpoint"))
        self.back = there.call("connect", here.endpoint())

    def target(self) -> np.ndarray:
        """All bytes of the other side's memory."""
        return np.asarray(self.there.call("read"))


@pytest.fixture(scope="module", params=TLS)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that the tests that break nothing share."""
    here = EngineSide(make_nixl, request.param)
    here.register(8 * MIB, seed=1)
    with spawn_peer(Checker, make_nixl, request.param) as there:
        yield Pair(here, there, 8 * MIB)
    here.close()


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """The shared pair, its target all sentinels."""
    shared.there.call("fill", SENTINEL)
    return shared


@pytest.fixture(params=TLS)
def side(request: pytest.FixtureRequest) -> Iterator[EngineSide]:
    """An engine of this process with 32 MiB of random bytes, for tests that lose a peer."""
    here = EngineSide(make_nixl, request.param)
    here.register(32 * MIB, seed=2)
    here.tls = request.param  # type: ignore[attr-defined]
    yield here
    here.close()


def new_peer(side: EngineSide):  # type: ignore[no-untyped-def]
    """Another process with the same transports."""
    return spawn_peer(EngineSide, make_nixl, side.tls)  # type: ignore[attr-defined]


def test_scattered_rows_land_byte_exact(pair: Pair) -> None:
    """Rows of many sizes land where they should, and every other byte stays as it was."""
    for rows, size in ((1, 1), (7, 129), (64, 4096), (900, 576), (30, 65536)):
        copies = scattered(rows, size, 8 * MIB, 8 * MIB, seed=rows)
        before, one = pair.target(), tag()
        pair.here.write(pair.name, copies, one)
        assert pair.here.ended(one) is Status.DONE
        pair.there.call("received", one)
        np.testing.assert_array_equal(pair.target(), expected(copies, pair.here.memory[0], before))


def test_rows_of_unequal_lengths_land(pair: Pair) -> None:
    """Lengths from 1 byte to 100 kB in one write, from and to odd offsets."""
    lengths = np.array([1, 3, 100_000, 17, 4097, 65_535])
    starts = np.cumsum(lengths + 13) - lengths
    zeros = np.zeros_like(lengths)
    copies, one = Copies(zeros, starts[::-1].copy(), zeros, starts, lengths), tag()
    pair.here.write(pair.name, copies, one)
    assert pair.here.ended(one) is Status.DONE
    pair.there.call("received", one)
    want = expected(copies, pair.here.memory[0], np.full(pair.nbytes, SENTINEL, dtype=np.uint8))
    np.testing.assert_array_equal(pair.target(), want)


def test_no_rows_still_deliver_the_tag(pair: Pair) -> None:
    """A write of zero rows moves nothing, and its tag arrives with the writer's instance."""
    one = tag()
    pair.here.write(pair.name, Copies.empty(), one)
    assert pair.here.ended(one) is Status.DONE
    pair.there.call("received", one)
    delivered = [each for each in pair.there.call("completions") if each.tag == one]
    assert [each.instance for each in delivered] == [pair.here.engine.instance]
    assert (pair.target() == SENTINEL).all()


def test_many_writes_at_once(pair: Pair) -> None:
    """64 writes under way together all land, and each tag arrives exactly once."""
    copies = scattered(1024, 4096, 8 * MIB, 8 * MIB, seed=3)
    tags = [tag() for _ in range(64)]
    for place, one in enumerate(tags):
        pair.here.write(pair.name, copies.rows(slice(place * 16, place * 16 + 16)), one)
    assert {pair.here.ended(one) for one in tags} == {Status.DONE}
    for one in tags:
        pair.there.call("received", one)
    arrived = [each.tag for each in pair.there.call("completions")]
    assert all(arrived.count(one) == 1 for one in tags)
    want = expected(copies, pair.here.memory[0], np.full(pair.nbytes, SENTINEL, dtype=np.uint8))
    np.testing.assert_array_equal(pair.target(), want)


def test_the_tag_arrives_behind_the_data(pair: Pair) -> None:
    """Over 150 rounds, in the moment of the tag's arrival all 2 MiB of its data are there."""
    filled = pair.here.register(2 * MIB, fill=0)
    rows = scattered(512, 4096, 2 * MIB, 2 * MIB)
    copies = Copies(np.full(512, filled), rows.source_offsets, rows.target_regions, rows.target_offsets, rows.lengths)
    for round_ in range(150):
        one = tag()
        pair.here.fill(round_, filled)
        pair.there.send("unlike", one, round_, 2 * MIB)
        pair.here.write(pair.name, copies, one)
        assert pair.here.ended(one) is Status.DONE
        assert pair.there.answer() == 0


def test_both_directions_at_once(pair: Pair) -> None:
    """Each side writes into the other while it is written to."""
    mine, theirs = pair.here.register(2 * MIB, fill=SENTINEL), pair.there.call("register", 2 * MIB, None, 5)
    name = _again(pair)
    there, back, forth = scattered(256, 4096, 2 * MIB, 2 * MIB), tag(), tag()
    regions = np.full(256, theirs), np.full(256, mine)
    cross = Copies(regions[0], there.source_offsets, regions[1], there.target_offsets, there.lengths)
    pair.there.call("write", pair.back, cross, back)
    pair.here.write(name, there, forth)
    assert pair.there.call("ended", back) is Status.DONE
    assert pair.here.ended(forth) is Status.DONE
    pair.here.received(back)
    pair.there.call("received", forth)
    want = expected(cross, pair.there.call("read", theirs), np.full(2 * MIB, SENTINEL, dtype=np.uint8))
    np.testing.assert_array_equal(pair.here.memory[mine], want)


def _again(pair: Pair) -> str:
    """Disconnects and connects anew, both ways: the peers learn of memory registered since."""
    pair.here.disconnect(pair.name)
    pair.there.call("disconnect", pair.back)
    pair.name = pair.here.connect(pair.there.call("endpoint"))
    pair.back = pair.there.call("connect", pair.here.endpoint())
    return pair.name


def test_only_the_loopback_listens(pair: Pair) -> None:
    """Every socket that the two processes listen on is bound to the loopback address."""
    for process in (os.getpid(), pair.there.process.pid):
        sockets = {os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()}
        fields = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
        listening = [each[1] for each in fields if each[3] == "0A" and f"socket:[{each[9]}]" in sockets]
        assert listening
        assert all(each.startswith("0100007F:") for each in listening)
        other = Path(f"/proc/{process}/net/tcp6")
        lines = other.read_text().splitlines()[1:] if other.exists() else []
        assert not [each for each in map(str.split, lines) if each[3] == "0A" and f"socket:[{each[9]}]" in sockets]


# What is refused before a byte moves


def one_row(source: int = 0, target: int = 0, length: int = 64, region: int = 0) -> Copies:
    """A single row from and to the memories registered first."""
    return Copies([0], [source], [region], [target], [length])


def test_rows_outside_of_registered_memory_are_refused(pair: Pair) -> None:
    """Over the end, before the start, an unknown region: an error, no byte, no handle, and the tag stays unused."""
    one = tag()
    for copies in (one_row(target=pair.nbytes - 63), one_row(source=-1), one_row(length=0)):
        with pytest.raises(Violation, match="TRANSFER_BOUNDS"):
            pair.here.write(pair.name, copies, one)
    with pytest.raises(ArgumentError, match="target region 99 is not registered"):
        pair.here.write(pair.name, one_row(region=99), one)
    pair.here.write(pair.name, Copies.empty(), one)
    assert pair.here.ended(one) is Status.DONE
    assert (pair.target() == SENTINEL).all()


def test_memory_that_is_not_registered_with_nixl_is_refused(pair: Pair) -> None:
    """An endpoint that claims more memory than NIXL was given: NIXL refuses, no byte moves, the peer goes on."""
    pair.here.disconnect(pair.name)
    fields = json.loads(pair.there.call("endpoint"))
    fields["regions"][0][3] += 1 << 30
    pair.name = pair.here.connect(json.dumps(fields).encode())
    with pytest.raises(TransferError, match="NIXL refuses a write of 1 rows") as caught:
        pair.here.write(pair.name, one_row(target=pair.nbytes + 4096), tag())
    assert not caught.value.in_flight
    _again(pair)
    one = tag()
    pair.here.write(pair.name, one_row(), one)
    assert pair.here.ended(one) is Status.DONE


def test_a_tag_is_used_once_and_destinations_too(pair: Pair) -> None:
    """A second write with a tag, rows that overlap at the target, and too many rows are refused."""
    one = tag()
    pair.here.write(pair.name, one_row(), one)
    assert pair.here.ended(one) is Status.DONE
    with pytest.raises(ArgumentError, match="was used before"):
        pair.here.write(pair.name, one_row(), one)
    with pytest.raises(ArgumentError, match="lands on bytes of another row"):
        pair.here.write(pair.name, Copies([0, 0], [0, 64], [0, 0], [0, 63], [64, 64]), tag())
    many = scattered(MAX_ROWS + 1, 64, 8 * MIB, 8 * MIB)
    with pytest.raises(ArgumentError, match=f"{MAX_ROWS + 1} rows in one write; nixl takes {MAX_ROWS}"):
        pair.here.write(pair.name, many, tag())


def test_as_many_rows_as_it_takes(pair: Pair) -> None:
    """A write of exactly `max_rows` rows lands."""
    copies, one = scattered(MAX_ROWS, 512, 8 * MIB, 8 * MIB, seed=9), tag()
    pair.here.write(pair.name, copies, one)
    assert pair.here.ended(one) is Status.DONE
    pair.there.call("received", one)
    want = expected(copies, pair.here.memory[0], np.full(pair.nbytes, SENTINEL, dtype=np.uint8))
    np.testing.assert_array_equal(pair.target(), want)


def test_endpoints_that_lead_nowhere(pair: Pair) -> None:
    """Garbage, another engine's, the own, a forged and a connected endpoint: a HandshakeError, and the pair goes on."""
    endpoint = pair.there.call("endpoint")
    fields = json.loads(endpoint)
    for name, value in (
        ("engine", "mooncake"),
        ("native", ""),
        ("native", "e30="),
        ("native", "////"),
        ("instance", "0123456789abcdef"),
    ):
        with pytest.raises(HandshakeError):
            pair.here.connect(json.dumps(fields | {name: value}).encode())
    for bad in (b"", b"garbage", endpoint[:-20], pair.here.endpoint(), endpoint):
        with pytest.raises(HandshakeError):
            pair.here.connect(bad)
    one = tag()
    pair.here.write(pair.name, one_row(), one)
    assert pair.here.ended(one) is Status.DONE
    pair.there.call("received", one)


def test_an_interface_that_does_not_exist() -> None:
    """It is an error when the engine is made, and leaves the environment as it was."""
    before = dict(os.environ)
    with pytest.raises(TransferError, match="interface 'none0'"):
        NixlEngine(interface="none0", tls="tcp")
    assert dict(os.environ) == before


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without its package names the extra."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransferError, match=r"pip install 'batchstate\[nixl\]'"):
        NixlEngine()


@pytest.mark.parametrize("end", ["engine.close()", "pass"])
def test_a_process_with_an_engine_exits_cleanly(end: str) -> None:
    """With the engine closed or left open, the exit status is 0 and nothing is printed."""
    code = f"from batchstate.transport.engines.nixl import NixlEngine\nengine = NixlEngine()\n{end}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Death


def test_a_killed_receiver_is_noticed_and_its_next_instance_served(side: EngineSide) -> None:
    """Its writes end UNKNOWN and drain, it is lost, the other peer goes on, and after a restart it is served."""
    with new_peer(side) as doomed, new_peer(side) as other:
        for peer in (doomed, other):
            peer.call("register", 32 * MIB, SENTINEL)
        name, witness = side.connect(doomed.call("endpoint")), side.connect(other.call("endpoint"))
        before, tags = tag(), [tag() for _ in range(8)]
        side.write(name, one_row(), before)
        assert side.ended(before) is Status.DONE
        doomed.process.kill()  # while the writes below are under way
        copies = scattered(MAX_ROWS, 4096, 32 * MIB, 32 * MIB)
        written = []
        for one in tags:
            try:
                side.write(name, copies, one)
                written.append(one)
            except TransferError:
                break
        doomed.kill()
        assert {side.ended(one, 10) for one in written} <= {Status.UNKNOWN, Status.DONE}
        until(lambda: bool(side.completions() is not None and side.lost()), "the loss", 10)
        assert side.lost() == [name]
        until(lambda: all(side.drain(one) for one in written), "that nothing can land", 10)
        with pytest.raises(TransferError, match="is gone"):
            side.write(name, one_row(), tag())
        fine = tag()
        side.write(witness, one_row(), fine)
        assert side.ended(fine) is Status.DONE
        other.call("received", fine)
    with new_peer(side) as next_one:
        next_one.call("register", 32 * MIB, SENTINEL)
        side.disconnect(name)
        fresh, one = side.connect(next_one.call("endpoint")), tag()
        side.write(fresh, copies, one)
        assert side.ended(one) is Status.DONE
        next_one.call("received", one)
        want = expected(copies, side.memory[0], np.full(32 * MIB, SENTINEL, dtype=np.uint8))
        np.testing.assert_array_equal(next_one.call("read"), want)


def test_a_write_to_a_stopped_peer_is_neither_done_nor_drained(side: EngineSide) -> None:
    """A write that is under way when its peer dies is UNKNOWN, and drained only after the death."""
    with new_peer(side) as there:
        there.call("register", 32 * MIB, SENTINEL)
        name, first, one = side.connect(there.call("endpoint")), tag(), tag()
        side.write(name, one_row(), first)
        assert side.ended(first) is Status.DONE
        assert there.process.pid is not None
        os.kill(there.process.pid, signal.SIGSTOP)
        side.write(name, scattered(2000, 16384, 32 * MIB, 32 * MIB), one)
        if "cma" not in side.tls:  # type: ignore[attr-defined]  # there, the kernel copies while the peer stands still
            time.sleep(0.2)
            assert side.poll(one) is Status.PENDING
            assert not side.drain(one)
        there.kill()
        if side.ended(one, 10) is Status.UNKNOWN:
            assert side.handles[one].reason
            until(lambda: side.drain(one), "that nothing can land", 10)
    side.engine.unregister(side.regions[0])


class Flood(EngineSide):
    """A side that writes without end."""

    def flood(self, name: str, copies: Copies) -> None:
        """Never returns."""
        for number in itertools.count():
            one = b"flood %d" % number
            self.fill(number % 200)
            self.write(name, copies, one)
            self.ended(one)


def test_a_killed_writer_leaves_the_receiver_running(side: EngineSide) -> None:
    """Bytes stop landing soon after the writer's death, its death is seen, and a next writer is served."""
    target = side.memory[0]
    with spawn_peer(Flood, make_nixl, side.tls) as writer:  # type: ignore[attr-defined]
        writer.call("register", 32 * MIB, 0)
        back = side.connect(writer.call("endpoint"))
        there = writer.call("connect", side.endpoint())
        writer.send("flood", there, scattered(4096, 4096, 32 * MIB, 32 * MIB))
        until(lambda: len(side.completions()) > 3, "the flood")
        seen, first_bytes = target[::4096].copy(), target[::4096]
        writer.process.kill()
        died = last = time.monotonic()
        while time.monotonic() < died + 1.0:
            if not np.array_equal(seen, first_bytes):
                last, seen = time.monotonic(), first_bytes.copy()
        assert last - died < 0.5
        writer.kill()
        side.completions()
        assert side.lost() == [back]
    with new_peer(side) as writer:
        writer.call("register", MIB, None, 7)
        there, one = writer.call("connect", side.endpoint()), tag()
        writer.call("write", there, one_row(length=MIB), one)
        assert writer.call("ended", one) is Status.DONE
        side.received(one)
        np.testing.assert_array_equal(target[:MIB], writer.call("read"))


def test_closing_in_the_middle_of_writes() -> None:
    """`close` returns with writes under way, nothing crashes, and a closed engine says so."""
    for tls in TLS:
        here = EngineSide(make_nixl, tls)
        here.register(32 * MIB)
        with spawn_peer(EngineSide, make_nixl, tls) as there:
            there.call("register", 32 * MIB, SENTINEL)
            name = here.connect(there.call("endpoint"))
            for _ in range(4):
                here.write(name, scattered(8000, 4096, 32 * MIB, 32 * MIB), tag())
            here.close()
            here.close()
            with pytest.raises(TransferError, match="closed"):
                here.endpoint()
            there.call("completions")


def test_a_peer_that_has_ended_cannot_be_connected_to(side: EngineSide) -> None:
    """The endpoint of a dead process is refused at once."""
    with new_peer(side) as there:
        endpoint = there.call("endpoint")
        with pytest.raises(PeerError):
            there.call("connect", b"garbage")
    with pytest.raises(TransferError, match="its process has ended"):
        side.connect(endpoint)


def test_the_end_of_a_process_is_known_or_not_claimed() -> None:
    """A living process, one that ends, a PID given anew, and one of another machine, of which nothing is known."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with child:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        whose = [*here()[:2], str(child.pid), start]
        living, stranger = Process(whose), Process(["another boot", *whose[1:]])
        assert not living.ended()
        assert Process([*whose[:3], "1"]).ended()
        child.kill()
        until(living.ended, "the end")
    assert Process(whose).ended()
    assert not stranger.ended()
    assert not Process([]).ended()
    assert not Process(here()).ended()
