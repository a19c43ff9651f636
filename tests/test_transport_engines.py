"""What every engine has to keep: bytes, tags, refusals, ends. Each case runs over all engines that can be opened here.

They run between this process and a second one, over loopback; `BATCHSTATE_MOONCAKE=required` says that Mooncake's must
not be left out. The engine within a process is that of the machine `transfers`.
"""

import base64
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.kv.host_pool import HostKVPool, KVBuffer
from batchstate.runtime import Runtime
from batchstate.testing import no_hidden_sync
from batchstate.transport.engines.base import Copies, Delivery, Engine, Status, open_engine
from batchstate.transport.engines.in_process import InProcessEngine, Network
from batchstate.violations import Violation
from tests.transport_peers import (
    SENTINEL,
    EngineSide,
    PeerError,
    PeerProcess,
    altered,
    expected,
    joined,
    listening,
    scattered,
    sentinels,
    spawn_peer,
    strangers,
    until,
)

MIB = 1 << 20
OPTIONS: dict[str, dict[str, Any]] = {
    "nixl": {},
    "nixl-tcp": {"interface": "lo", "tls": "tcp", "trusted_network": True},
    "tcp": {},
    "mooncake": {"trusted_network": True},
}
_network = Network()


def make(kind: str) -> Engine:
    """An engine of a kind."""
    if kind == "in-process":
        return InProcessEngine(_network)
    return open_engine(kind.removesuffix("-tcp"), **OPTIONS[kind])


class Side(EngineSide):
    """One that looks at its memory in the moment in which a tag arrives."""

    def unlike(self, tag: bytes, value: int) -> int:
        """Waits for a tag; how many bytes of the first memory are then not of this value."""
        self.received(tag)
        return int((self.memory[0] != value).sum())


@pytest.fixture(scope="module", params=OPTIONS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each engine that can be opened here."""
    try:
        make(request.param).close()
    except TransferError as error:
        if request.param == "mooncake" and os.environ.get("BATCHSTATE_MOONCAKE") == "required":
            raise
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="module")
def process(kind: str) -> Iterator[PeerProcess]:
    """A second process, which no test may kill."""
    with spawn_peer(Side, make, kind) as peer:
        yield peer


@pytest.fixture
def mortal(kind: str) -> Iterator[PeerProcess]:
    """An engine in a process that the test may kill."""
    with spawn_peer(Side, make, kind) as peer:
        yield peer


@pytest.fixture
def here(kind: str) -> Iterator[EngineSide]:
    """This process's engine."""
    side = Side(make, kind)
    yield side
    side.close()


@pytest.fixture
def there(process: PeerProcess) -> PeerProcess:
    """A fresh engine in the second process."""
    process.call("renew")
    return process


@pytest.fixture
def name(here: EngineSide, there: PeerProcess) -> str:
    """8 MiB of random bytes here, of sentinels there, and a connection from here to there."""
    return joined(here, there)


def one_row(source: int = 0, target: int = 0, length: int = 64, region: int = 0) -> Copies:
    """A single row from and to the memories registered first."""
    return Copies([0], [source], [region], [target], [length])


def served(here: EngineSide, name: str, there: PeerProcess, tag: bytes = b"served") -> None:
    """A peer takes a write, and its tag."""
    here.write(name, one_row(), tag)
    assert here.ended(tag) is Status.DONE
    there.call("received", tag)


def test_a_wait_of_the_peer_ends_before_that_of_its_caller(there: PeerProcess) -> None:
    """Each report is the peer's own, which names what did not arrive; its process goes on."""
    with pytest.raises(PeerError, match="the arrival of b'none': not within"):
        there.call("received", b"none", timeout=0.1)
    assert there.call("completions") == []


# Bytes and tags


def ragged(rows: int) -> Copies:
    """Rows of any length at any offset of 8 MiB, in any order, which do not overlap at the target."""
    random = np.random.default_rng(rows)
    lengths = random.integers(1, 9000, rows)
    places = np.cumsum(lengths + random.integers(0, 50, rows)) - lengths
    order = random.permutation(rows)
    zeros = np.zeros(rows, dtype=np.int64)
    return Copies(zeros, random.integers(0, 8 * MIB - 9000, rows), zeros, places[order], lengths[order])


def test_rows_land_where_they_belong(here: EngineSide, there: PeerProcess, name: str) -> None:
    """Rows of all sizes, from and to any offset, arrive byte for byte, and no other byte changes."""
    target = sentinels()
    sizes = [(1, 1), (100, 7), (300, 100), (500, 4096), (900, 1152), (16, 65_536), (3, MIB), (2, 2 * MIB + 7)]
    writes = [scattered(rows, nbytes, 8 * MIB, 8 * MIB, rows) for rows, nbytes in sizes]
    for number, copies in enumerate([*writes, ragged(1000)]):
        tag = b"%d" % number
        target = expected(copies, here.memory[0], target)
        here.write(name, copies, tag)
        assert here.ended(tag) is Status.DONE
        assert here.drain(tag)
        there.call("received", tag)
        assert there.call("checksum", 0) == zlib.crc32(target.data), f"write {number}"


def test_several_regions_of_any_dtype(here: EngineSide, there: PeerProcess) -> None:
    """Rows of several regions go into the regions they name, in any order; memory may be a tensor of any dtype."""
    for seed in range(2):
        here.register(MIB, seed=seed)
    tensor = torch.randn(512, 1024, dtype=torch.bfloat16)
    here.regions.append(here.engine.register(tensor, "bf16"))
    here.memory.append(tensor.view(torch.uint8).reshape(-1).numpy())
    for _ in range(3):
        there.call("register", MIB, SENTINEL)
    name = here.connect(there.call("endpoint"))
    random, rows, size = np.random.default_rng(3), 600, 512
    sources, targets = random.integers(0, 3, (2, rows))
    starts, places = (random.permutation(MIB // size)[:rows] * size for _ in range(2))
    copies = Copies(sources, starts, targets, places, np.full(rows, size))
    here.write(name, copies, b"regions")
    assert here.ended(b"regions") is Status.DONE
    there.call("received", b"regions")
    after = [sentinels(MIB) for _ in range(3)]
    for source, start, target, place, length in np.stack(copies.arrays(), axis=1).tolist():
        after[target][place : place + length] = here.memory[source][start : start + length]
    for index, memory in enumerate(after):
        np.testing.assert_array_equal(there.call("read", index), memory)


def test_no_rows_deliver_the_tag(here: EngineSide, there: PeerProcess, name: str) -> None:
    """A write of no rows ends as DONE, delivers its tag, of 1 to 128 bytes, once, and changes nothing."""
    tags = [b"\0", b"\xff" * 128]
    for tag in tags:
        here.write(name, Copies.empty(), tag)
        assert here.ended(tag) is Status.DONE
        there.call("received", tag)
    assert there.call("completions") == [Delivery(tag, here.engine.instance) for tag in tags]
    np.testing.assert_array_equal(there.call("read"), sentinels())


def test_the_tag_comes_behind_the_data(here: EngineSide, there: PeerProcess) -> None:
    """In the moment of a tag's arrival all bytes of its write are there, each of fifty times."""
    name = joined(here, there, 2 * MIB)
    copies = scattered(512, 4096, 2 * MIB, 2 * MIB)
    for number in range(50):
        here.fill(number)
        there.send("unlike", b"%d" % number, number)
        here.write(name, copies, b"%d" % number)
        assert here.ended(b"%d" % number) is Status.DONE
        assert there.answer() == 0


def test_many_writes_in_both_directions(here: EngineSide, there: PeerProcess, name: str) -> None:
    """Writes under way together, in both directions, all land, and each tag arrives once, with its writer."""
    half, count, rows = 4 * MIB, 40, 16
    back = there.call("connect", here.endpoint())
    zeros, length = np.zeros(rows, dtype=np.int64), np.full(rows, 4096)
    here.fill(7)
    for number in range(count):
        places = (np.arange(rows) + number * rows) * 4096
        there.call("write", back, Copies(zeros, places + half, zeros, places + half, length), b"back %d" % number)
        here.write(name, Copies(zeros, places, zeros, places, length), b"out %d" % number)
    for number in range(count):
        assert here.ended(b"out %d" % number) is Status.DONE
        assert there.call("ended", b"back %d" % number) is Status.DONE
        here.received(b"back %d" % number)
        there.call("received", b"out %d" % number)
    done = count * rows * 4096
    for memory, before, written in ((here.memory[0], 7, SENTINEL), (there.call("read"), SENTINEL, 7)):
        low, high = (written, before) if written == 7 else (before, written)
        assert (memory[:done] == low).all()
        assert (memory[half : half + done] == high).all()
    assert sorted(one.tag for one in here.completions()) == sorted(b"back %d" % number for number in range(count))
    assert {one.instance for one in there.call("completions")} == {here.engine.instance}
    assert len(there.call("completions")) == count


def test_as_many_rows_as_it_takes(here: EngineSide, there: PeerProcess) -> None:
    """A write of exactly `max_rows` rows lands; of one more no row does, and its tag may be used."""
    most = here.engine.capabilities.max_rows
    size = 8 if most > 10_000 else 512
    nbytes = 2 * most * size
    name = joined(here, there, nbytes)
    with pytest.raises(ArgumentError, match=f"at most {most} rows in one write of .*, got {most + 1}"):
        here.write(name, scattered(most + 1, size, nbytes, nbytes), b"tag")
    copies = scattered(most, size, nbytes, nbytes, seed=9)
    here.write(name, copies, b"tag")
    assert here.ended(b"tag") is Status.DONE
    there.call("received", b"tag")
    after = sentinels(nbytes).reshape(-1, size)
    after[copies.target_offsets // size] = here.memory[0].reshape(-1, size)[copies.source_offsets // size]
    np.testing.assert_array_equal(there.call("read"), after.reshape(-1))


# What is refused before a byte moves


def test_writes_are_checked_before_they_are_sent(here: EngineSide, there: PeerProcess, name: str) -> None:
    """Rows outside, unknown regions, overlaps, bad and used tags, foreign peers: an error, no byte, and a free tag."""
    for copies in (one_row(target=8 * MIB - 63), one_row(source=-1), one_row(length=0)):
        with pytest.raises(Violation, match="TRANSFER_BOUNDS"):
            here.write(name, copies, b"tag")
    with pytest.raises(ArgumentError, match="target region 99 is not registered"):
        here.write(name, one_row(region=99), b"tag")
    with pytest.raises(ArgumentError, match="overlaps another row at its destination"):
        here.write(name, Copies([0, 0], [0, 64], [0, 0], [0, 63], [64, 64]), b"tag")
    tags: list[Any] = [b"", b"x" * 129, "tag"]
    for tag in tags:
        with pytest.raises(ArgumentError, match="a tag is 1 to 128 bytes"):
            here.write(name, Copies.empty(), tag)
    with pytest.raises(ArgumentError, match="expected a peer of"):
        here.engine.write(type(here.peers[name])("0" * 16, {}), Copies.empty(), b"tag")
    here.write(name, Copies.empty(), b"tag")
    assert here.ended(b"tag") is Status.DONE
    with pytest.raises(ArgumentError, match="used before"):
        here.write(name, Copies.empty(), b"tag")
    np.testing.assert_array_equal(there.call("read"), sentinels())


def test_memory_is_registered_once(here: EngineSide, name: str) -> None:
    """No overlaps, gaps or empty memory."""
    for one in (here.memory[0][16:32], np.zeros((4, 4), dtype=np.uint8)[:, :2], np.empty(0, np.uint8)):
        with pytest.raises(ArgumentError):
            here.engine.register(one, "wrong")


def test_endpoints_that_lead_nowhere(here: EngineSide, there: PeerProcess, name: str) -> None:
    """Garbage, another engine's, the own, forged, damaged and connected ones are refused, and the pair goes on."""
    endpoint = there.call("endpoint")
    fields = json.loads(endpoint)
    natives = [base64.b64encode(one).decode() for one in (b"{}", b"[]", b"\xff", b"[" * 9999)]
    forged = [{"engine": "other"}, {"instance": "0123456789abcdef"}, {"native": "////"}]
    forged += [{"instance": "0123456789abcdef", "native": one} for one in ("", *natives)]
    bad = [json.dumps(fields | one).encode() for one in forged]  # whose MAC is that of another endpoint
    bad += [altered(endpoint, **one) for one in forged if set(one) != {"instance"}]
    for one in (*bad, b"", b"garbage", b"[]", endpoint[:-20], here.endpoint(), endpoint):
        with pytest.raises(HandshakeError):
            here.connect(one)
    assert list(here.engine._peers) == [name]
    served(here, name, there)


def test_only_loopback_listens(kind: str, there: PeerProcess, name: str) -> None:
    """By default no socket of the two processes listens beyond the loopback; NIXL's listen nowhere at all."""
    if kind == "mooncake":
        pytest.skip("it listens on sockets that it ties to the loopback")
    for process in (os.getpid(), there.process.pid):
        assert {address for address, _ in listening(process)} == (set() if kind == "nixl" else {"0100007F"})


def test_strangers_at_every_port(kind: str, here: EngineSide, there: PeerProcess) -> None:
    """Silent, noisy and over-long callers change no byte, deliver no tag, and keep no peer out: it comes within 2 s."""
    if kind == "nixl":
        pytest.skip("it listens nowhere")
    here.register(MIB, seed=1)
    there.call("register", MIB, SENTINEL)
    (port,) = [port for address, port in listening(there.process.pid) if address == "0100007F"]
    with contextlib.ExitStack() as stack:  # Mooncake's own ports keep nobody out, and let nobody in
        assert strangers(port, 140, stack) == 0
        start = time.monotonic()
        name = here.connect(there.call("endpoint"))
        here.write(name, one_row(length=4096), b"a peer")
        assert here.ended(b"a peer") is Status.DONE
        there.call("received", b"a peer")
        assert time.monotonic() - start < 2.0
        after = sentinels(MIB)
        after[:4096] = here.memory[0][:4096]
        np.testing.assert_array_equal(there.call("read"), after)
        assert [one.tag for one in there.call("completions")] == [b"a peer"]


# Ends


def test_a_peer_that_was_let_go_can_be_reached_again(here: EngineSide, there: PeerProcess, name: str) -> None:
    """It takes no write until it is connected to again, and learns of memory that was registered since."""
    here.disconnect(name)
    here.disconnect(name)
    with pytest.raises(ArgumentError, match="expected a peer of"):
        here.write(name, Copies.empty(), b"later")
    index = there.call("register", MIB, SENTINEL)
    assert here.connect(there.call("endpoint")) == name
    here.write(name, one_row(region=index, length=4096), b"again")
    assert here.ended(b"again") is Status.DONE
    there.call("received", b"again")
    np.testing.assert_array_equal(there.call("read", index, 0, 4096), here.memory[0][:4096])


def test_close_in_the_middle_of_writes(kind: str, here: EngineSide, there: PeerProcess) -> None:
    """Closing takes a bounded time, twice is fine, what follows is refused; the receiver serves on."""
    name = joined(here, there, 64 * MIB)
    for number in range(4):
        here.write(name, scattered(1000, 65_536, 64 * MIB, 64 * MIB), b"%d" % number)
    start = time.monotonic()
    here.close()
    assert time.monotonic() - start < 5.0
    here.close()
    with pytest.raises(TransferError, match="closed"):
        here.endpoint()
    with contextlib.closing(Side(make, kind)) as other:
        other.register(MIB)
        served(other, other.connect(there.call("endpoint")), there)


def test_a_peer_that_has_closed_is_noticed(here: EngineSide, there: PeerProcess, name: str) -> None:
    """A peer's closed engine is lost, where an engine notices the end of engines and not of processes alone."""
    if here.engine.name not in ("tcp", "mooncake"):
        pytest.skip("it notices the end of a process")
    there.call("close")
    until(lambda: here.lost() == [name], "the loss", 5)


def test_killed_receiver(here: EngineSide, there: PeerProcess, mortal: PeerProcess) -> None:
    """Its writes end and are drained within seconds, it is lost, and others and its next instance are served."""
    name, old = joined(here, mortal, 64 * MIB), mortal.call("endpoint")
    there.call("register", MIB, SENTINEL)
    witness = here.connect(there.call("endpoint"))
    rows, tags = scattered(4 * 1024, 16_384, 64 * MIB, 64 * MIB), [b"cut %d" % number for number in range(4)]
    for number, tag in enumerate(tags):
        here.write(name, rows.rows(slice(number * 1024, (number + 1) * 1024)), tag)
    mortal.kill()
    ends = {here.ended(tag, 10) for tag in tags}
    assert ends <= {Status.UNKNOWN, Status.FAILED, Status.DONE}
    # FAILED at once where the end of the peer is known before a look at the write. NIXL may have copied all of it.
    assert ends & {Status.UNKNOWN, Status.FAILED} or here.engine.name == "nixl"
    until(lambda: here.completions() is not None and here.lost() == [name], "the loss", 10)
    for tag in tags:
        until(functools.partial(here.drain, tag), f"the drain of {tag!r}", 10)
    with pytest.raises(TransferError, match="is gone"):
        here.write(name, Copies.empty(), b"late")
    served(here, witness, there)
    here.disconnect(name)
    with pytest.raises(TransferError):
        here.connect(old)
    here.disconnect(witness)
    there.call("renew")
    there.call("register", MIB, SENTINEL)
    copies = scattered(64, 4096, MIB, MIB)
    here.write(here.connect(there.call("endpoint")), copies, b"next")
    assert here.ended(b"next") is Status.DONE
    there.call("received", b"next")
    np.testing.assert_array_equal(there.call("read"), expected(copies, here.memory[0], sentinels(MIB)))


def test_killed_writer(here: EngineSide, there: PeerProcess, mortal: PeerProcess) -> None:
    """The receiver, connected back, learns of it, delivers no tag of the cut write, and serves another writer."""
    here.register(64 * MIB, SENTINEL)
    mortal.call("register", 64 * MIB, 1)
    name = mortal.call("connect", here.endpoint())
    back = here.connect(mortal.call("endpoint"))
    assert here.lost() == []
    mortal.call("write", name, scattered(1024, 65_536, 64 * MIB, 64 * MIB), b"cut")
    mortal.kill()
    until(lambda: here.completions() is not None and here.lost() == [back], "the loss", 5)
    if here.completions():  # where the kernel copies, all of it may have been there before the end
        assert here.engine.name == "nixl"
        assert (here.memory[0] == 1).all()
        here.arrived.clear()
    there.call("register", MIB, None, 7)
    name = there.call("connect", here.endpoint())
    there.call("write", name, one_row(length=MIB), b"whole")
    assert there.call("ended", b"whole") is Status.DONE
    here.received(b"whole")
    assert [(one.tag, one.instance) for one in here.completions()] == [
        (b"whole", json.loads(there.call("endpoint"))["instance"])
    ]
    np.testing.assert_array_equal(here.memory[0][:MIB], there.call("read"))


PROGRAM = """
import os, sys, numpy as np
from tests.test_transport_engines import make
from tests.transport_peers import scattered
endpoint = sys.stdin.buffer.read()
child = os.fork()  # before there is an engine: each has a process, and torch is imported once
if child and os.waitpid(child, 0)[1]:
    sys.exit("the process that closed its engine failed")
engine = make(sys.argv[1])
engine.register(np.zeros(16 << 20, dtype=np.uint8))
peer = engine.connect(endpoint)
for number in range(4):
    engine.write(peer, scattered(1024, 16384, 16 << 20, 16 << 20), b"%d" % number)
if not child:
    engine.close()
print("left" if child else "closed", flush=True)
"""
STARTS = ("InitGoogleLogging", "Local segment descriptor not found")
"""What Mooncake says at each start."""


def test_a_process_ends_with_rows_under_way(kind: str, here: EngineSide) -> None:
    """A process that ends with a write open, its engine closed or not, ends without a crash, in time, and silently."""
    if kind not in ("nixl", "mooncake"):
        pytest.skip("it is Python alone, or another kind's")
    here.register(16 * MIB, SENTINEL)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], input=here.endpoint(), capture_output=True, timeout=60, check=False
    )
    errors = ended.stderr.decode()
    assert (ended.returncode, ended.stdout.decode().split()) == (0, ["closed", "left"]), errors
    assert [line for line in errors.splitlines() if not any(word in line for word in STARTS)] == []


# Memory of a device


@pytest.mark.parametrize("name", ["in-process", "tcp"])
def test_memory_of_the_device_is_read_and_written(rt: Runtime, name: str) -> None:
    """From device memory, as prefill's KV is, into the host tier's and into device memory: every byte, and no other."""
    source = rt.upload([np.arange(64, dtype=np.uint8)]).view(0)
    host = HostKVPool(
        rt, 7, layers=[KVBuffer("kv", (8,), torch.uint8), KVBuffer("index", (8,), torch.uint8, on_device=True)]
    )
    rt.synchronize()
    with contextlib.closing(make(name)) as writer, contextlib.closing(make(name)) as reader:
        writer.register(source, "kv")
        for one in host.contiguous_buffers():
            reader.register(one.memory, one.name)
        peer = writer.connect(reader.endpoint())
        handle = writer.write(peer, Copies([0, 0], [8, 40], [0, 1], [16, 24], [24, 16]), b"kv")

        def ended() -> bool:
            _network.step()
            return writer.poll(handle) is Status.DONE

        def arrived() -> bool:
            _network.step()
            return reader.completions() != []

        with no_hidden_sync(rt):  # the engine's own threads wait for the device, and the caller does not
            until(ended, "the write")
            until(arrived, "its tag")
        found = [rt.inspect(one.memory).reshape(-1).tolist() for one in host.contiguous_buffers()]
    assert found == [[0] * 16 + list(range(8, 32)) + [0] * 24, [0] * 24 + list(range(40, 56)) + [0] * 24]
