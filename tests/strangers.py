"""Strangers in bulk at every socket that an engine has by default, and at the example's control channel.

`python -m tests.strangers [CALLERS [NAME ...]]` prints for each kind how many callers there were, what they were told,
and the slowest of the workers that came in among them; it returns 1 if one was told or believed, or anything changed.
Names: tcp, mooncake (its port for tags), nixl (its mailbox, and UCX's socket), control (the example's channel), replays
(first proofs that tcp's listener has taken, while workers write), and as root outside: tcp and mooncake from another
network namespace, nixl's mailbox as another user.
"""

import base64
import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batchstate.errors import TransferError
from batchstate.transport.connection import ANSWER, MAC, NONCE, Connection, _hello, _proof, new_secret
from batchstate.transport.engines.base import Copies, Endpoint, Status
from examples.disaggregated.channel import Door, call
from tests.test_transport_engines import make
from tests.transport_peers import NOISE, SENTINEL, EngineSide, PeerProcess, listening, spawn_peer

MIB = 1 << 20
WORKERS = 12
"""Workers that come in among the callers of each kind."""

CALLER = """
import base64, json, os, socket, sys, time
job = json.loads(sys.stdin.readline())
if job["user"]:
    os.setgroups([]); os.setgid(job["user"]); os.setuid(job["user"])
says = [base64.b64decode(one) for one in job["says"]]
found = dict(calls=0, reached=0, refused=0, full=0, dropped=0, told=0)
kept = []
for number in range(job["callers"]):
    for target in job["targets"]:
        unix = isinstance(target, str)
        one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if unix else socket.socket()
        one.settimeout(5.0)
        found["calls"] += 1
        try:
            one.connect(target.replace("@", chr(0), 1) if unix else tuple(target))
            found["reached"] += 1
            one.setblocking(False)
            for wait in range(200 if unix and target[0] == "/" else 1):  # until the mailbox has room
                try:
                    one.send(says[number % len(says)])
                    break
                except BlockingIOError:
                    found["full"] += not wait
                    time.sleep(0.0005)
            else:
                found["dropped"] += 1
        except OSError:
            found["refused"] += 1
        kept.append((one, unix))
        if len(kept) > 300:
            old, unix = kept.pop(0)
            try:
                found["told"] += 0 if unix else len(old.recv(4096))
            except OSError:
                pass
            old.close()
    if number % max(1, job["callers"] // job["workers"]) == 0:
        print("now", flush=True)
        sys.stdin.readline()
print(json.dumps(found), flush=True)
"""


def said(secret: bytes, addresses: list[Any]) -> list[bytes]:
    """What callers say. First proofs among it are those of workers that have called before."""
    nonce, other = secrets.token_bytes(NONCE), new_secret()
    hello = recorded(secret, nonce, addresses)
    proof = _proof(secret, nonce + secrets.token_bytes(NONCE))
    false = nonce + _hello(other, nonce)
    return [*NOISE, hello[:40], false, false + _proof(other, nonce + bytes(NONCE)), hello, hello + proof, hello * 20]


def recorded(secret: bytes, nonce: bytes, addresses: list[Any]) -> bytes:
    """The first proof of a worker that has called at each address, and was answered."""
    hello = nonce + _hello(secret, nonce)
    for address in addresses:
        with socket.create_connection(address, 5.0) as wire:
            wire.sendall(hello)
            assert len(wire.recv(ANSWER, socket.MSG_WAITALL)) == ANSWER
    return hello


@contextlib.contextmanager
def callers(
    targets: list[Any], says: list[bytes], count: int, *before: str, user: int = 0, workers: int = WORKERS
) -> Iterator["subprocess.Popen[str]"]:
    """A process of strangers, started by the command `before`; it stops where a worker is to come in."""
    command = [*before, sys.executable, "-c", CALLER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        job = {"targets": targets, "says": [base64.b64encode(one).decode() for one in says]}
        process.stdin.write(json.dumps(job | {"callers": count, "workers": workers, "user": user}) + "\n")
        process.stdin.flush()
        yield process
        process.kill()


def among(process: "subprocess.Popen[str]", enter: Callable[[int], float]) -> dict[str, float]:
    """Lets workers come in while strangers call; the figures, with the slowest of them in seconds."""
    worst, number = 0.0, 0
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        if line != "now\n":
            return {**json.loads(line), "workers": number, "slowest": round(worst, 3)}
        process.stdin.write("\n")  # they go on meanwhile
        process.stdin.flush()
        worst, number = max(worst, enter(number)), number + 1
    raise RuntimeError("the strangers ended early")


def at_an_engine(kind: str, count: int, outside: bool) -> dict[str, float]:
    """Strangers at the ports or sockets of one engine in its default configuration."""
    with spawn_peer(EngineSide, make, kind) as there, contextlib.ExitStack() as stack:
        there.call("register", MIB, SENTINEL)
        secret = Endpoint.from_bytes(there.call("endpoint")).secret
        targets: list[Any] = [("127.0.0.1", port) for address, port in listening(there.process.pid)]
        if kind == "mooncake":  # of its ports this library listens at one
            ours = [("127.0.0.1", port) for address, port in listening(there.process.pid) if address == "0100007F"]
        else:
            ours = targets
        says, before = said(secret, ours), list[str]()
        if kind == "nixl":
            targets = unix_sockets(there)
            says += mail(there, secret)
        elif outside:
            targets = [("10.77.0.1", port) for _, port in targets]
            before = stack.enter_context(another_network())
        elif kind == "mooncake":  # its own ports keep no caller of the same network out
            targets = ours
        user = 65534 if outside and kind == "nixl" else 0
        tags = [one.tag for one in there.call("completions")]

        def enter(number: int) -> float:
            with contextlib.closing(EngineSide(make, kind)) as worker:
                worker.register(MIB, seed=number + 1)
                tag, start = b"worker %d" % number, time.monotonic()
                worker.write(worker.connect(there.call("endpoint")), Copies([0], [0], [0], [0], [4096]), tag)
                assert worker.ended(tag) is Status.DONE
                there.call("received", tag)
                took = time.monotonic() - start
                after = np.concatenate([worker.memory[0][:4096], np.full(MIB - 4096, SENTINEL, np.uint8)])
                np.testing.assert_array_equal(there.call("read"), after)
                tags.append(tag)
                return took

        enter(-1)
        found = among(stack.enter_context(callers(targets, says, count, *before, user=user)), enter)
        false = [one.tag for one in there.call("completions") if one.tag not in tags]
        twice = len(there.call("completions")) - len({one.tag for one in there.call("completions")})
        assert there.process.is_alive()
        return found | {"sockets": len(targets), "believed": len(false) + twice}


def unix_sockets(there: PeerProcess) -> list[str]:
    """The sockets of a NIXL engine without a port: its mailbox, and the one by which UCX wakes."""
    sockets = {os.readlink(one) for one in Path(f"/proc/{there.process.pid}/fd").iterdir() if one.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if f"socket:[{row[6]}]" in sockets and row[7:] and row[4] == "0002"]


def mail(there: PeerProcess, secret: bytes) -> list[bytes]:
    """A datagram that the engine has believed, as a stranger would send it again, and others made from it."""
    with contextlib.closing(EngineSide(make, "nixl")) as writer:
        box = writer.engine._mailbox  # type: ignore[attr-defined]
        target = next(one for one in unix_sockets(there) if one.startswith("/"))
        seen = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            path = os.path.join(os.path.dirname(box.path), "stolen")
            stranger.bind(path)
            for number in range(3):
                assert box.send(path, secret, b"seen %d" % number)
                seen.append(stranger.recv(4096))
                stranger.sendto(seen[-1], target)
                there.call("received", b"seen %d" % number)
    one = seen[0]
    return [*seen, b"f" * 16 + one[16:], one[:17] + bytes(MAC) + one[17 + MAC :], one + b"x", one[:-1], one * 50]


@contextlib.contextmanager
def another_network() -> Iterator[list[str]]:
    """A network namespace beside this one, joined to it; how a command is started there. Wants root."""
    name = f"strangers{os.getpid()}"
    link, far = f"s{os.getpid()}a"[-15:], f"s{os.getpid()}b"[-15:]
    lines = [
        f"netns add {name}",
        f"link add {link} type veth peer name {far}",
        f"link set {far} netns {name}",
        f"addr add 10.77.0.1/24 dev {link}",
        f"link set {link} up",
        f"-n {name} addr add 10.77.0.2/24 dev {far}",
        f"-n {name} link set {far} up",
    ]
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", link], check=False)
        subprocess.run(["ip", "netns", "del", name], check=False)


def at_the_control_channel(count: int) -> dict[str, float]:
    """Strangers at the channel of the example, of which each worker has one."""
    secret = new_secret()
    believed: list[Connection] = []
    door = Door(("127.0.0.1", 0), secret)
    came: queue.SimpleQueue[Connection] = door._came

    def enter(number: int) -> float:
        start = time.monotonic()
        channel = call(door.address, secret, "prefill", 5.0)
        channel.say(number=number)
        other = came.get(timeout=5.0)
        assert json.loads(other.recv_bytes()[1:]) == {"number": number}
        channel.close()
        other.close()
        return time.monotonic() - start

    with callers([door.address], said(secret, [door.address]), count) as process:
        found = among(process, enter)
    while not came.empty():
        believed.append(came.get())
    door._listener.close()
    return found | {"sockets": 1, "believed": len(believed)}


def replays(count: int, writes: int = 200) -> dict[str, float]:
    """First proofs that a listener has taken are said again, while as many writes of as many workers go on."""
    with spawn_peer(EngineSide, make, "tcp") as there, contextlib.ExitStack() as stack:
        there.call("register", MIB, SENTINEL)
        endpoint = there.call("endpoint")
        ((_, port),) = listening(there.process.pid)
        address, secret, lost, late = ("127.0.0.1", port), Endpoint.from_bytes(endpoint).secret, 0, 0
        says = [recorded(secret, secrets.token_bytes(NONCE), [address]) for _ in range(100)]

        ended, found, worst, number = list[dict[str, float]](), dict[str, float](), 0.0, 0
        processes = [stack.enter_context(callers([address], says, count // CROWDS, workers=1)) for _ in range(CROWDS)]
        threads = [threading.Thread(target=lambda at=at: ended.append(among(at, lambda _: 0.0))) for at in processes]
        for thread in threads:
            thread.start()
        while number < writes or len(ended) < CROWDS:
            with contextlib.closing(EngineSide(make, "tcp")) as worker:
                worker.register(4096, seed=number + 1)
                tag, start, number = b"worker %d" % number, time.monotonic(), number + 1
                try:
                    worker.write(worker.connect(endpoint), Copies([0], [0], [0], [0], [4096]), tag)
                    lost += worker.ended(tag) is not Status.DONE
                except TransferError:
                    lost += 1
                took = time.monotonic() - start
                worst, late = max(worst, took), late + (took > 1.0)
        for thread in threads:
            thread.join()
        for word in ended[0]:
            found[word] = sum(figures[word] for figures in ended)
        tags = {delivery.tag for delivery in there.call("completions")}
        wrong = {"lost": lost, "late": late, "believed": len(tags) - number + lost}
        return found | wrong | {"writes": number, "slowest": round(worst, 3), "sockets": 1}


CROWDS = 4
"""Processes that replay."""
KINDS = ("tcp", "mooncake", "nixl", "control", "replays", "tcp outside", "mooncake outside", "nixl outside")


def main(count: str = "2400", *names: str) -> int:
    """Runs all kinds, or those named."""
    wrong = 0
    for name in names or KINDS:
        kind, _, outside = name.partition(" ")
        if kind in ("control", "replays"):
            found = (at_the_control_channel if kind == "control" else replays)(int(count))
        else:
            found = at_an_engine(kind, int(count), bool(outside))
        bad = found["told"] or found["believed"] or found["slowest"] > 2.0 or found.get("lost") or found.get("late")
        wrong += bool(bad)
        print(f"{name:17}", *(f"{word}: {number}" for word, number in found.items()), "WRONG" * bool(bad), sep="  ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
