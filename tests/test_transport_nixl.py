"""What is NIXL's own: what it refuses, peers that stand still or end in a flood, and how their end is known."""

import base64
import contextlib
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
from batchstate.transport.engines.base import Copies, Engine, Status
from batchstate.transport.engines.nixl import NixlEngine, Process, here
from tests.transport_peers import EngineSide, altered, scattered, spawn_peer, until

pytest.importorskip("nixl", reason="NIXL is not installed")

MIB = 1 << 20
SENTINEL = 0xEE


def make_nixl(tls: str) -> Engine:
    """The engine of either side."""
    return NixlEngine("lo", tls=tls, trusted_network=True) if "tcp" in tls else NixlEngine(tls=tls)


@pytest.fixture(params=("cma,posix", "tcp"))
def tls(request: pytest.FixtureRequest) -> str:
    """Transports: with the kernel's copies between processes of one machine and no port, and with a port."""
    return str(request.param)


@pytest.fixture
def side(tls: str) -> Iterator[EngineSide]:
    """An engine of this process with 32 MiB of random bytes."""
    ours = EngineSide(make_nixl, tls)
    ours.register(32 * MIB, seed=2)
    yield ours
    ours.close()


def test_memory_that_is_not_registered_with_nixl_is_refused(side: EngineSide, tls: str) -> None:
    """An endpoint that claims more memory than NIXL was given: NIXL refuses, no byte moves, the peer goes on."""
    with spawn_peer(EngineSide, make_nixl, tls) as there:
        there.call("register", MIB, SENTINEL)
        fields = json.loads(there.call("endpoint"))
        fields["regions"][0][3] += 1 << 30
        name = side.connect(altered(there.call("endpoint"), regions=fields["regions"]))
        with pytest.raises(TransferError, match="NIXL refuses a write of 1 rows") as caught:
            side.write(name, Copies([0], [0], [0], [MIB + 4096], [64]), b"wrong")
        assert not caught.value.in_flight
        side.disconnect(name)
        side.write(side.connect(there.call("endpoint")), Copies([0], [0], [0], [0], [64]), b"right")
        assert side.ended(b"right") is Status.DONE


def test_an_interface_that_does_not_exist() -> None:
    """It is an error when the engine is made, and leaves the environment as it was."""
    before = dict(os.environ)
    with pytest.raises(TransferError, match="interface 'none0'"):
        NixlEngine(interface="none0", tls="tcp", trusted_network=True)
    assert dict(os.environ) == before


@pytest.mark.parametrize("tls", [None, "tcp", "cma,posix,tcp", "all", "^ib", "rc,posix"])
@pytest.mark.parametrize("interface", ["lo", "eth0", None])
def test_an_open_port_wants_a_trusted_network(
    interface: str | None, tls: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX's port lets in whoever calls, and noise ends it: without the word of its user the engine does not open."""
    if interface is None and tls is None:  # shared memory; but the environment wins
        monkeypatch.setenv("UCX_TLS", "posix, tcp")
    with pytest.raises(ArgumentError, match=r"UCX listens on .*, and lets every caller") as caught:
        NixlEngine(interface=interface, tls=tls)
    assert "trusted_network=True" in caught.value.remedy


def test_a_write_that_was_interrupted_before_its_rows_left_sends_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is under way, and its tag, which says that its rows are there, never arrives."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with spawn_peer(EngineSide, NixlEngine) as there, contextlib.closing(EngineSide(NixlEngine)) as side:
        there.call("register", MIB, SENTINEL)
        side.register(MIB, seed=1)
        name = side.connect(there.call("endpoint"))
        monkeypatch.setattr(side.engine, "_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            side.write(name, Copies([0], [0], [0], [0], [4096]), b"interrupted")
        monkeypatch.undo()
        assert side.engine.begun(b"interrupted") is None
        side.write(name, Copies([0], [0], [0], [0], [64]), b"next")
        assert side.ended(b"next") is Status.DONE
        there.call("received", b"next")
        assert [one.tag for one in there.call("completions")] == [b"next"]


def test_shared_memory_reaches_this_machine_alone() -> None:
    """A peer elsewhere, whose end would not be seen, is refused before it is loaded, and so is one with a port."""
    with contextlib.closing(EngineSide(NixlEngine)) as side, contextlib.closing(EngineSide(make_nixl, "tcp")) as other:
        for each in (side, other):
            each.register(64, 0)
        inner = json.loads(base64.b64decode(json.loads(other.endpoint())["native"]))
        inner["process"][0] = "another boot"
        elsewhere = altered(other.endpoint(), native=base64.b64encode(json.dumps(inner).encode()).decode())
        with pytest.raises(HandshakeError, match="runs on another machine"):
            side.connect(elsewhere)
        with pytest.raises(HandshakeError, match="leads nowhere"):
            side.connect(other.endpoint())


def test_a_tag_without_a_mac_is_not_believed(side: EngineSide, tls: str) -> None:
    """A NIXL agent that knows metadata and not the secret can send notifications: none of them is a tag."""
    with contextlib.closing(EngineSide(make_nixl, tls)) as stranger:
        stranger.register(64, 0)
        name = stranger.connect(altered(side.endpoint(), secret=base64.b64encode(bytes(32)).decode()))
        agent = stranger.engine._agent  # type: ignore[attr-defined]
        for forged in (b"", b"tag", bytes(32) + b"tag", b"x" * 500):
            agent.genNotif(name, forged)
        stranger.write(name, Copies.empty(), b"another secret")
        honest = stranger.engine._peers[name]
        honest.secret = side.engine._secret
        stranger.write(name, Copies.empty(), b"the secret")
        until(lambda: all([stranger.poll(b"the secret") is Status.DONE, side.completions()]), "the tag")
        assert [one.tag for one in side.completions()] == [b"the secret"]


def test_tags_between_processes_of_a_machine_pass_no_queue_of_ucx() -> None:
    """A writer killed while it puts a message into UCX's queue stops it for all: without a port none goes there.

    Where the mailbox is full a write waits until it is emptied.
    """
    with contextlib.closing(EngineSide(NixlEngine)) as side, contextlib.closing(EngineSide(NixlEngine)) as writer:
        for each in (side, writer):
            each.register(4096, 0)
        endpoint = side.endpoint()
        name = writer.connect(endpoint)
        box = side.engine._mailbox.path  # type: ignore[attr-defined]
        tags = [b"tag %d" % number for number in range(2000)]
        for tag in tags:
            writer.write(name, Copies([0], [0], [0], [0], [8]), tag)
        ends = [writer.poll(tag) for tag in tags]
        assert set(ends) == {Status.DONE, Status.PENDING}
        assert side.engine._agent.getNotifs({}, side.engine._backends) == {}  # type: ignore[attr-defined]
        arrived: list[bytes] = []
        while len(arrived) < len(tags):
            arrived += [one.tag for one in side.engine.completions()]
            ends = [writer.poll(tag) for tag in tags]
        assert sorted(arrived) == sorted(tags)
        assert set(ends) == {Status.DONE}
        side.engine.close()
        assert not os.path.exists(os.path.dirname(box))
        writer.write(name, Copies([0], [0], [0], [0], [8]), b"gone")
        assert writer.poll(b"gone") is Status.UNKNOWN
        assert "its mailbox is gone" in writer.handles[b"gone"].reason
        writer.disconnect(name)
        with pytest.raises(HandshakeError, match="its mailbox is not in this file system"):
            writer.connect(endpoint)


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without its package names the extra."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransferError, match=r"pip install 'batchstate\[nixl\]'"):
        NixlEngine()


def test_a_write_to_a_stopped_peer_is_neither_done_nor_drained(side: EngineSide, tls: str) -> None:
    """A write that is under way when its peer dies is UNKNOWN, and drained only after the death."""
    with spawn_peer(EngineSide, make_nixl, tls) as there:
        there.call("register", 32 * MIB, SENTINEL)
        endpoint = there.call("endpoint")
        name = side.connect(endpoint)
        side.write(name, Copies([0], [0], [0], [0], [64]), b"first")
        assert side.ended(b"first") is Status.DONE
        assert there.process.pid is not None
        os.kill(there.process.pid, signal.SIGSTOP)
        side.write(name, scattered(2000, 16384, 32 * MIB, 32 * MIB), b"stopped")
        if "cma" not in tls:  # there, the kernel copies while the peer stands still
            time.sleep(0.2)
            assert side.poll(b"stopped") is Status.PENDING
            assert not side.drain(b"stopped")
        there.kill()
        if side.ended(b"stopped", 10) is Status.UNKNOWN:
            assert side.handles[b"stopped"].reason
            until(lambda: side.drain(b"stopped"), "that nothing can land", 10)
    side.disconnect(name)
    with pytest.raises(TransferError, match="its process has ended"):
        side.connect(endpoint)


class Flood(EngineSide):
    """A side that writes without end."""

    def flood(self, name: str, copies: Copies) -> None:
        """Never returns."""
        for number in itertools.count():
            one = b"flood %d" % number
            self.fill(number % 200)
            self.write(name, copies, one)
            self.ended(one)


def test_a_killed_writer_stops_soon(side: EngineSide, tls: str) -> None:
    """Bytes stop landing soon after the death of a writer that floods, and its death is seen."""
    first_bytes = side.memory[0][::4096]
    with spawn_peer(Flood, make_nixl, tls) as writer:
        writer.call("register", 32 * MIB, 0)
        back = side.connect(writer.call("endpoint"))
        there = writer.call("connect", side.endpoint())
        writer.send("flood", there, scattered(4096, 4096, 32 * MIB, 32 * MIB))
        until(lambda: len(side.completions()) > 3, "the flood")
        seen = first_bytes.copy()
        writer.process.kill()
        died = last = time.monotonic()
        while time.monotonic() < died + 1.0:
            if not np.array_equal(seen, first_bytes):
                last, seen = time.monotonic(), first_bytes.copy()
        assert last - died < 0.5
        writer.kill()
        side.completions()
        assert side.lost() == [back]


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
