"""A peer in a real second process, for the tests of transfer engines.

    with spawn_peer(EngineSide, make_engine) as peer:      # EngineSide(make_engine) is made in the child
        region = peer.call("register", 4096, 0xEE)         # and its methods are called there
        peer.kill()                                        # SIGKILL

Guarantees: every wait has an end, after which it raises; one in the child ends before that of its caller, so that the
report says what did not come; the process is dead when the block is left.
"""

import base64
import contextlib
import json
import multiprocessing
import os
import socket
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from batchstate.transport.connection import Connection, new_secret
from batchstate.transport.engines.base import Copies, Delivery, Engine, Handle, Peer, Region, Status
from batchstate.transport.wire import sealed

STARTS_IN = 60.0
ANSWERS_IN = 30.0
LATER = 10.0
"""Seconds that a caller goes on waiting when the time of its call is over, in which the child reports its own wait."""

SENTINEL = 0xEE

_context = multiprocessing.get_context("forkserver")  # clean as a spawned process, but torch is imported only once
_context.set_forkserver_preload([__name__])
_call_ends = float("inf")
"""In a child: when the time of the present call is over, on the clock that all processes of a machine share."""


class PeerError(Exception):
    """What a peer's method raised, as text; or the peer did not answer."""


def until(true: Callable[[], bool], what: str, seconds: float = ANSWERS_IN) -> None:
    """Asks again and again until it is so; raises after so many seconds, or when the time of the call is over."""
    start = time.monotonic()
    while not true():
        if time.monotonic() > min(start + seconds, _call_ends):
            raise TimeoutError(f"{what}: not within {time.monotonic() - start:.1f} s")
        time.sleep(0.0002)


def _serve(pipe: Pipe, target: Callable[..., object], args: tuple[object, ...]) -> None:
    global _call_ends
    try:
        served = target(*args)
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    idle = getattr(served, "idle", None)
    while True:
        while not pipe.poll(0.001 if idle else 0.5):
            if idle is not None:
                idle()
        try:
            method, given, _call_ends = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, object] = (True, getattr(served, method)(*given))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@final
class PeerProcess:
    """An object in another process. Made by `spawn_peer`.

    Its `idle()`, if it has one, is called about each millisecond between calls: for engines that need to be turned.
    """

    def __init__(self, target: Callable[..., object], args: tuple[object, ...]) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, target, args), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, method: str, *args: object, timeout: float = ANSWERS_IN) -> None:
        """Asks for a call without waiting; `answer` is what it returned. Its waits (`until`) end within `timeout`."""
        self._pipe.send((method, args, time.monotonic() + timeout))

    def answer(self, timeout: float = ANSWERS_IN) -> Any:
        """What the call returned that was asked for first and is not answered yet; its own waits have ended before."""
        if not self._pipe.poll(timeout + LATER):
            raise PeerError(f"no answer within {timeout + LATER} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerError("the peer's process has ended") from error
        if not good:
            raise PeerError(value)
        return value

    def call(self, method: str, *args: object, timeout: float = ANSWERS_IN) -> Any:
        """Calls a method in the other process."""
        self.send(method, *args, timeout=timeout)
        return self.answer(timeout)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone. Twice is fine."""
        self.process.kill()
        self.process.join(10)
        self._pipe.close()


@contextlib.contextmanager
def spawn_peer(target: Callable[..., object], *args: object) -> Iterator[PeerProcess]:
    """Runs `target(*args)`, of the top of a module, in a second process; its methods can be called in the block."""
    peer = PeerProcess(target, args)
    try:
        peer.answer(STARTS_IN)
        yield peer
    finally:
        peer.kill()


@contextlib.contextmanager
def peers_of(target: Callable[..., object], *args: object) -> Iterator[Callable[[], PeerProcess]]:
    """Gives a second process with a new engine: the last one, if it lives."""
    with contextlib.ExitStack() as stack:
        last: list[PeerProcess] = []

        def get() -> PeerProcess:
            if not last or not last[-1].process.is_alive():
                last.append(stack.enter_context(spawn_peer(target, *args)))
            last[-1].call("renew")
            return last[-1]

        yield get


class EngineSide:
    """One engine with its memory, driven from the test's process or in a peer's. Peers, handles, tags go by name."""

    def __init__(self, make: Callable[..., Engine], *args: object) -> None:
        self.engine = make(*args)
        self._made = (make, *args)
        self.memory: list[npt.NDArray[np.uint8]] = []
        self.regions: list[Region] = []
        self.peers: dict[str, Peer] = {}
        self.handles: dict[bytes, Handle] = {}
        self.arrived: list[Delivery] = []

    def register(self, nbytes: int, fill: int | None = None, seed: int = 0) -> int:
        """Memory of so many bytes, all `fill`, or random. Returns the region's index."""
        if fill is None:
            memory = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        else:
            memory = np.full(nbytes, fill, dtype=np.uint8)
        self.regions.append(self.engine.register(memory, f"memory {len(self.memory)}"))
        self.memory.append(memory)
        return self.regions[-1].index

    def endpoint(self) -> bytes:
        return self.engine.endpoint()

    def connect(self, endpoint: bytes) -> str:
        peer = self.engine.connect(endpoint)
        self.peers[peer.instance] = peer
        return peer.instance

    def disconnect(self, name: str) -> None:
        self.engine.disconnect(self.peers[name])

    def write(self, name: str, copies: Copies, tag: bytes) -> None:
        self.handles[tag] = self.engine.write(self.peers[name], copies, tag)

    def poll(self, tag: bytes) -> Status:
        return self.engine.poll(self.handles[tag])

    def ended(self, tag: bytes, seconds: float = ANSWERS_IN) -> Status:
        until(lambda: self.poll(tag) is not Status.PENDING, f"the end of {tag!r}", seconds)
        return self.poll(tag)

    def drain(self, tag: bytes) -> bool:
        return self.engine.drain(self.handles[tag])

    def completions(self) -> list[Delivery]:
        """All that have arrived, ever."""
        self.arrived += self.engine.completions()
        return self.arrived

    def received(self, tag: bytes, seconds: float = ANSWERS_IN) -> None:
        until(lambda: any(one.tag == tag for one in self.completions()), f"the arrival of {tag!r}", seconds)

    def renew(self) -> None:
        """Takes a new engine and forgets all: tests share a process, which takes seconds to start."""
        self.engine.close()
        self.__init__(*self._made)  # type: ignore[misc]

    def idle(self) -> None:
        if not self.engine._closed:
            self.completions()

    def read(self, index: int = 0, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """A copy of bytes of the memory registered as the `index`-th."""
        return self.memory[index][start:stop].copy()

    def checksum(self, index: int) -> int:
        """Of the memory registered as the `index`-th."""
        return zlib.crc32(self.memory[index].data)

    def fill(self, value: int, index: int = 0) -> None:
        """Sets all bytes of the memory registered as the `index`-th."""
        self.memory[index][:] = value

    def lost(self) -> list[str]:
        """Names of the peers known to be gone, and not let go by this side."""
        self.completions()
        return [name for name, peer in self.peers.items() if peer.lost not in (None, "disconnected")]

    def close(self) -> None:
        self.engine.close()


def altered(endpoint: bytes, **fields: Any) -> bytes:
    """An endpoint with other fields, and a MAC that fits: what only who has the endpoint can make."""
    whole = json.loads(endpoint) | fields
    del whole["mac"]
    return sealed(whole, base64.b64decode(whole["secret"]))


def joined(here: EngineSide, there: Any, nbytes: int = 8 << 20) -> str:
    """Random bytes here, sentinels in a peer, and a connection to it, whose name is returned."""
    here.register(nbytes, seed=1)
    there.call("register", nbytes, SENTINEL)
    return here.connect(there.call("endpoint"))


def listening(pid: int | None) -> list[tuple[str, int]]:
    """Where a process listens by TCP: addresses as the kernel writes them, and ports."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    listeners = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for fields in map(str.split, path.read_text().splitlines()[1:] if path.exists() else []):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                listeners.append((address, int(port, 16)))
    return listeners


def local_pair() -> tuple[Connection, Connection]:
    """Both ends of a connection within this process."""
    one, other = socket.socketpair()
    keys = new_secret(), new_secret()
    return Connection(one, keys), Connection(other, keys[::-1])


NOISE = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8, b"\xff" * 200_000, b'{"is": 1}\n', b"[" * 99)
"""What strangers say: nothing, too little, another protocol, noise, too much, JSON."""


def strangers(port: int, count: int, stack: contextlib.ExitStack) -> int:
    """So many callers of a port of this machine, which stay until `stack` is left; how many bytes they were told."""
    wires, told = [], 0
    for number in range(count):
        wire = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        wire.setblocking(False)
        with contextlib.suppress(OSError):
            wire.send(NOISE[number % len(NOISE)])
        wires.append(wire)
    for wire in wires:
        with contextlib.suppress(OSError):
            told += len(wire.recv(4096))
    return told


def sentinels(nbytes: int = 8 << 20) -> npt.NDArray[np.uint8]:
    """Untouched memory."""
    return np.full(nbytes, SENTINEL, dtype=np.uint8)


def scattered(rows: int, row_bytes: int, source_bytes: int, target_bytes: int, seed: int = 0) -> Copies:
    """Copies of rows from random row places of region 0 to random row places of the peer's region 0."""
    random = np.random.default_rng(seed)
    zeros = np.zeros(rows, dtype=np.int64)
    return Copies(
        zeros,
        random.permutation(source_bytes // row_bytes)[:rows] * row_bytes,
        zeros,
        random.permutation(target_bytes // row_bytes)[:rows] * row_bytes,
        np.full(rows, row_bytes),
    )


def expected(copies: Copies, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """What the target holds after the copies; row by row, in plain numpy."""
    after = target.copy()
    for _, start, _, place, length in np.stack(copies.arrays(), axis=1).tolist():
        after[place : place + length] = source[start : start + length]
    return after
