"""Connections between processes that share a secret: how one comes about, and what keeps strangers out of it.

    listener = Listener(("127.0.0.1", 0), secret, arrived)     # its thread calls arrived(connection)
    connection = connect(listener.address, secret)
    connection.send_bytes(b"...")                              # as multiprocessing's, without its pickles

A caller proves first that it knows the secret, and is told nothing before. Each proof has the nonces of both sides, and
says which side makes it, and a nonce is taken once: nothing can be replayed or reflected. Every message has a MAC under
a key of this connection and direction, over its number, its length and its bytes: none can be forged, changed,
repeated, left out or moved. A caller that has not proved itself sends at most `HELLO + PROOF` bytes and has
`PROVES_WITHIN` seconds; beyond `MOST_UNPROVED` the first is dropped, so that silent ones keep no other caller out.

Nothing is encrypted: what lies between the two machines and can read or change packets is for the network to keep out.
See the page on security.
"""

import contextlib
import hmac
import secrets
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

import attrs

from batchstate import invariants
from batchstate.errors import ArgumentError, HandshakeError, TransferError

Address = tuple[str, int]
Buffer = bytes | bytearray | memoryview

LEAST_SECRET = 16
"""Fewest bytes of a secret."""
MOST_BYTES = 32 * 2**20
"""Most bytes of a message."""
PROVES_WITHIN = 5.0
"""Seconds that a caller has to prove that it knows the secret."""
MOST_UNPROVED = 64
"""Callers that have not proved it; as many more whose first proof was right, and new."""
TRIES = 3
"""How often `connect` calls: among many strangers it may be the one that is dropped."""
SENDS_WITHIN = 10.0
"""Seconds that the other side may take nothing of a message."""

NONCE, MAC = 32, 32
HELLO, ANSWER, PROOF = NONCE + MAC, NONCE + MAC, MAC
_HEAD = MAC + 4


def new_secret() -> bytes:
    """A secret, 32 random bytes."""
    return secrets.token_bytes(32)


def mac_of(key: bytes, *parts: Buffer) -> bytes:
    """HMAC-SHA256 over parts and their lengths."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8))
        mac.update(part)
    return mac.digest()


class ConnectionEndedError(ConnectionError):
    """The other side has closed the connection, or its process has ended: it takes nothing that was sent before."""


# Each proof names the side that makes it and what it is for.


def _hello(secret: bytes, nonce: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 hello", nonce)


def _answer(secret: bytes, nonces: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 listener", nonces)


def _proof(secret: bytes, nonces: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 caller", nonces)


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Keys of the caller's messages and of the listener's."""
    return mac_of(secret, b"batchstate 1 from caller", nonces), mac_of(secret, b"batchstate 1 from listener", nonces)


@final
class Connection:
    """One connection, both sides proved. Made by `connect` and `Listener`.

    One thread may send while another receives. Each failure is a ConnectionError; a `ConnectionEndedError` where the
    other side is known to take nothing more.

    Args:
        wire: connected.
        keys: of the messages sent, and of those received.

    Attributes:
        posted: bytes queued so far, their heads included.
        passed: bytes of these that the system has taken.
    """

    def __init__(self, wire: socket.socket, keys: tuple[bytes, bytes]) -> None:
        self._wire = wire
        self._seals, self._opens = keys
        self._sent = self._received = 0
        self._unsent: deque[memoryview] = deque()
        self._head = bytearray()
        self._body: memoryview | None = None
        self._have = 0
        self._into: memoryview | None = None
        self._ready: memoryview | None = None
        self._fault: str | None = None
        self._wakes = select.poll()
        self._wakes.register(wire, select.POLLIN)
        self._takes = select.poll()
        self._takes.register(wire, select.POLLOUT)
        self.posted = self.passed = 0
        wire.setblocking(False)
        with contextlib.suppress(OSError):  # one between two ends of this process has no such options
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):  # a machine that is gone is noticed within half a minute
                    wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    # Sending

    def post(self, *parts: Buffer) -> int:
        """Queues a message, in parts that stay as they are until `passed` has reached what this returns: `posted`."""
        nbytes = sum(map(len, parts))
        if nbytes > MOST_BYTES:
            raise ArgumentError(f"a message of {nbytes} bytes", nbytes, f"send {MOST_BYTES} at most")
        length = nbytes.to_bytes(4)
        head = length + self._mac(self._seals, self._sent, length, parts)
        self._sent += 1
        small = nbytes < 4096
        self._unsent.extend(map(memoryview, (b"".join((head, *parts)),) if small else (head, *parts)))
        self.posted += len(head) + nbytes
        return self.posted

    def flush(self) -> bool:
        """Passes on as much as the system takes now; whether that was all. Never waits."""
        while self._unsent:
            try:
                taken = self._wire.sendmsg([*self._unsent][:8])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ConnectionEndedError(f"it has hung up: {error}") from error
            self.passed += taken
            while self._unsent and taken >= len(self._unsent[0]):
                taken -= len(self._unsent.popleft())
            if taken:
                self._unsent[0] = self._unsent[0][taken:]
        return True

    def send_bytes(self, *parts: Buffer, seconds: float | None = SENDS_WITHIN) -> None:
        """Sends a message; waits until the system has all of it, at most `seconds` at a time in which it takes none."""
        self.post(*parts)
        while not self.flush():
            if not _waited(self._takes, None if seconds is None else time.monotonic() + seconds):
                raise ConnectionError(f"it took nothing for {seconds} s")

    # Receiving

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether a whole message is here; waits for one so long, or without end for None.

        ConnectionError: the other side is gone, or bytes came that are not from it.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while self._ready is None:
            if not self._advance() and not _waited(self._wakes, until):
                return False
        return True

    def recv_bytes(self) -> bytes:
        """The next message; waits for it. ConnectionError: as `poll`."""
        return bytes(self._next())

    def recv_bytes_into(self, buffer: Buffer) -> int:
        """Puts the next message where it belongs without a copy; its length. ValueError: the buffer is too small."""
        self._into = memoryview(buffer).cast("B")
        try:
            message = self._next()
        finally:
            into, self._into = self._into, None
        if message.obj is not into.obj:  # it had begun to come before, or is too large
            into[: len(message)] = message
        return len(message)

    def _next(self) -> memoryview:
        while self._ready is None:
            if not self._advance():
                _waited(self._wakes, None)
        message, self._ready = self._ready, None
        return message

    def _advance(self) -> bool:
        """Reads some; False where nothing is there to be read."""
        if self._fault is not None:
            raise ConnectionError(self._fault)
        try:
            if self._body is None:
                part = self._wire.recv(_HEAD - len(self._head))
                self._head += part
                count = len(part)
            else:
                count = self._wire.recv_into(self._body[self._have :])
                self._have += count
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise ConnectionEndedError(f"it has ended: {error}") from error
        if not count:
            raise ConnectionEndedError("it has hung up")
        if self._body is None and len(self._head) == _HEAD:
            nbytes = int.from_bytes(self._head[:4])
            if nbytes > MOST_BYTES:
                self._fault = f"a message of {nbytes} bytes came; {MOST_BYTES} are taken"
                raise ConnectionError(self._fault)
            fits = self._into is not None and nbytes <= len(self._into)
            self._body = (self._into if fits else memoryview(bytearray(nbytes)))[:nbytes]  # type: ignore[index]
            self._have = 0
        if self._body is not None and self._have == len(self._body):
            self._take(self._body)
        return True

    def _take(self, body: memoryview) -> None:
        expected = self._mac(self._opens, self._received, self._head[:4], (body,))
        if not invariants.peer_unknown.holds(expected, bytes(self._head[4:])):
            self._fault = "a message came that is not the other side's next"
            raise ConnectionError(self._fault)
        self._received += 1
        self._head.clear()
        self._body, self._ready = None, body

    @staticmethod
    def _mac(key: bytes, number: int, length: Buffer, parts: tuple[Buffer, ...]) -> bytes:
        mac = hmac.new(key, number.to_bytes(8) + length, "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()

    # Ends

    def finish(self) -> None:
        """Sends nothing more; the other side hears that, behind the last message."""
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_WR)

    def await_end(self, seconds: float) -> bool:
        """Drops all that comes; whether the other side closed the connection, or its process ended, within so long."""
        until = time.monotonic() + seconds
        rest = bytearray(65_536)
        try:
            while True:
                try:
                    if not self._wire.recv_into(rest):
                        return True
                except BlockingIOError:
                    if not _waited(self._wakes, until):
                        return False
        except ConnectionResetError:
            return True

    def wake(self) -> None:
        """Ends every wait on this side, in any thread; the threads then close it."""
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of it; twice is fine."""
        self._wire.close()


def _waited(wakes: Any, until: float | None) -> bool:
    """Waits until a socket is ready, or has failed; False: not in time."""
    left = None if until is None else until - time.monotonic()
    return bool(wakes.poll(None if left is None else max(0.0, left) * 1000))


# Calling


def connect(address: Address, secret: bytes, seconds: float = 10.0) -> Connection:
    """Calls a listener that knows the secret.

    Raises:
        TransferError: nothing listens there, or it does not answer in time.
        HandshakeError: it does not know the secret, or says that this side does not: it hangs up.
    """
    where = f"{address[0]}:{address[1]}"
    _check_secret(secret)
    until = time.monotonic() + seconds
    try:
        for _ in range(TRIES):
            with contextlib.suppress(ConnectionEndedError):
                return _called(address, secret, until)
    except (OSError, OverflowError, ValueError) as error:
        if isinstance(error, HandshakeError):
            raise
        problem = f"{where} cannot be reached: {getattr(error, 'strerror', None) or error}"
        remedy = "see that the peer runs there, and that each side's host can be reached from the other"
        raise TransferError(problem, where, remedy) from error
    problem = f"{where} hangs up: it has another secret, or is another program"
    raise HandshakeError(problem, where, "take the peer's new endpoint, or set the same secret on both sides")


def _called(address: Address, secret: bytes, until: float) -> Connection:
    wire = socket.create_connection(address, max(until - time.monotonic(), 0.001))
    try:
        nonce = secrets.token_bytes(NONCE)
        heard = bytearray()
        try:
            wire.sendall(nonce + _hello(secret, nonce))
            while len(heard) < ANSWER:
                wire.settimeout(max(until - time.monotonic(), 0.001))
                part = wire.recv(ANSWER - len(heard))
                if not part:
                    raise ConnectionEndedError("it hangs up")
                heard += part
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionEndedError("it hangs up") from error
        nonces = nonce + heard[:NONCE]
        if not invariants.peer_unknown.holds(_answer(secret, nonces), bytes(heard[NONCE:])):
            problem = f"what listens at {address[0]}:{address[1]} does not know the secret"
            raise HandshakeError(problem, address, "take the peer's new endpoint, or set the same secret on both sides")
        wire.sendall(_proof(secret, nonces))
        return Connection(wire, _keys(secret, nonces))
    except BaseException:
        wire.close()
        raise


def _check_secret(secret: bytes) -> None:
    if len(secret) < LEAST_SECRET:
        problem = f"a secret of {len(secret)} bytes"
        raise ArgumentError(problem, None, f"pass at least {LEAST_SECRET} random bytes, as `new_secret()` makes them")


# Listening


@final
@attrs.define(eq=False)
class _Caller:
    """A process that has connected and not proved that it knows the secret."""

    wire: socket.socket
    until: float
    heard: bytearray = attrs.field(factory=bytearray)
    nonces: bytes = b""  # both, once its first proof was right and new


@final
class Listener:
    """Lets in who knows a secret.

    Args:
        address: host and port to listen on; port 0 takes any.
        secret: at least 16 bytes.
        arrived: called with each connection, in the thread of the listener. Where it raises a RuntimeError,
            MemoryError or OSError, the connection is closed.
        start: whether it has a thread; otherwise `turn` is to be called.

    Attributes:
        address: where it listens.
        refused: callers that were dropped.

    Raises:
        TransferError: that is not an address of this machine, or the port is taken.
        ArgumentError: the secret is too short.
    """

    def __init__(
        self, address: Address, secret: bytes, arrived: Callable[[Connection], object], *, start: bool = True
    ) -> None:
        _check_secret(secret)
        try:
            self._wire = socket.create_server(address, backlog=4096)
        except (OSError, OverflowError) as error:
            problem = f"cannot listen on {address[0]}:{address[1]}: {getattr(error, 'strerror', None) or error}"
            remedy = "name an address of this machine and a port that is free (port 0 takes any)"
            raise TransferError(problem, address, remedy) from error
        self._wire.setblocking(False)
        self.address: Address = (address[0], self._wire.getsockname()[1])
        self.refused = 0
        self._secret = secret
        self._arrived = arrived
        self._unproved: deque[_Caller] = deque()
        self._answered: deque[_Caller] = deque()
        self._nonces: set[bytes] = set()  # of first proofs that were right: only who knows the secret adds one
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for wire in (self._wire, self._woken):
            self._selector.register(wire, selectors.EVENT_READ)
        self._open = True
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._run, name="batchstate listener", daemon=True)
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Callers that have not proved that they know the secret."""
        return len(self._unproved) + len(self._answered)

    def close(self) -> None:
        """Stops listening. When it returns, `arrived` is not called any more."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):  # a caller may have woken the thread already, which then ends by itself
                self._wakes.send(b"\0")
            self._wakes.close()
            if self._thread is None:
                self._shut()
            elif self._thread is not threading.current_thread():
                self._thread.join()

    def turn(self, seconds: float | None = 0.0) -> None:
        """Serves who calls; waits so long for the first."""
        now = time.monotonic()
        for queue in (self._unproved, self._answered):
            while queue and queue[0].until < now:
                self._drop(queue[0])
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._wire:
                self._accept()
            elif key.data is not None and key.data.wire.fileno() >= 0:
                self._hear(key.data)

    def _run(self) -> None:
        while self._open:
            self.turn(PROVES_WITHIN / 2 if self.waiting else None)
        self._shut()

    def _shut(self) -> None:
        for caller in (*self._unproved, *self._answered):
            self._drop(caller)
        self._selector.close()
        for wire in (self._wire, self._woken):
            wire.close()

    def _accept(self) -> None:
        for _ in range(MOST_UNPROVED):
            try:
                wire, _ = self._wire.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone already, or no more files can be opened
                for queue in (self._unproved, self._answered):
                    if queue:
                        self._drop(queue[0])
                time.sleep(0.01)
                return
            wire.setblocking(False)
            caller = _Caller(wire, time.monotonic() + PROVES_WITHIN)
            try:
                self._selector.register(wire, selectors.EVENT_READ, caller)
            except OSError:
                wire.close()
                return
            self._unproved.append(caller)
            self._hear(caller)  # at once: who knows the secret says so as it calls, and waits among the silent no more
            while len(self._unproved) > MOST_UNPROVED:
                self._drop(self._unproved[0])

    def _hear(self, caller: _Caller) -> None:
        try:
            wanted = PROOF if caller.nonces else HELLO
            part = caller.wire.recv(wanted - len(caller.heard))
            caller.heard += part
            if not part:
                self._drop(caller)
            elif len(caller.heard) == wanted:
                self._judge(caller, bytes(caller.heard))
        except BlockingIOError:
            return
        except OSError:
            self._drop(caller)

    def _judge(self, caller: _Caller, said: bytes) -> None:
        caller.heard.clear()
        if caller.nonces:
            if not invariants.peer_unknown.holds(_proof(self._secret, caller.nonces), said):
                self._drop(caller)
                return
            self._leave(caller)
            connection = Connection(caller.wire, _keys(self._secret, caller.nonces)[::-1])
            try:
                self._arrived(connection)
            except (RuntimeError, MemoryError, OSError):  # no room for one more thread, or file
                connection.close()
            return
        nonce = said[:NONCE]
        if not invariants.peer_unknown.holds(_hello(self._secret, nonce), said[NONCE:]) or nonce in self._nonces:
            self._drop(caller)
            return
        self._nonces.add(nonce)
        own = secrets.token_bytes(NONCE)
        caller.nonces = nonce + own
        caller.wire.send(own + _answer(self._secret, caller.nonces))  # so short that it goes whole
        self._unproved.remove(caller)
        self._answered.append(caller)
        while len(self._answered) > MOST_UNPROVED:
            self._drop(self._answered[0])

    def _leave(self, caller: _Caller) -> None:
        self._selector.unregister(caller.wire)
        (self._answered if caller.nonces and caller in self._answered else self._unproved).remove(caller)

    def _drop(self, caller: _Caller) -> None:
        self._leave(caller)
        caller.wire.close()
        self.refused += 1
