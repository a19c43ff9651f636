"""Connections of two processes that share a secret: what is taken, what is refused, and who keeps whom waiting.

What changed, replayed, reflected and crowding callers cannot do is shown by the machine `strangers`.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from batchstate.errors import ArgumentError, HandshakeError, TransferError
from batchstate.transport import connection as module
from batchstate.transport.connection import (
    MOST_BYTES,
    MOST_UNPROVED,
    Connection,
    ConnectionEndedError,
    Listener,
    connect,
    new_secret,
)
from tests.transport_peers import until

SECRET = new_secret()


@attrs.define(eq=False)
class Place:
    """A listener, and who has come."""

    arrived: "queue.SimpleQueue[Connection]" = attrs.field(factory=queue.SimpleQueue)
    listener: Listener = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.listener = Listener(("127.0.0.1", 0), SECRET, self.arrived.put)

    def call(self) -> tuple[Connection, Connection]:
        """Both ends of a connection."""
        return connect(self.listener.address, SECRET), self.arrived.get(timeout=5.0)


@pytest.fixture
def place() -> Iterator[Place]:
    """It listens."""
    here = Place()
    yield here
    here.listener.close()


@pytest.fixture
def pair(place: Place) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    ends = place.call()
    yield ends
    for one in ends:
        one.close()


def test_messages_arrive_in_order_both_ways(pair: tuple[Connection, Connection]) -> None:
    """Messages of any size, in one part or several, arrive whole, in their order, in both directions."""
    sizes = [0, 1, 35, 36, 37, 4095, 4096, 70_000]
    for sender, receiver in (pair, pair[::-1]):
        for size in sizes:
            message = os.urandom(size)
            sender.send_bytes(message[: size // 3], message[size // 3 :])
            assert receiver.recv_bytes() == message
        assert not receiver.poll()


def test_a_large_message_goes_into_its_place(pair: tuple[Connection, Connection]) -> None:
    """It goes into a buffer, also where its beginning was read before; one that is too small is refused."""
    message = os.urandom(8 << 20)
    thread = threading.Thread(target=pair[0].send_bytes, args=(message,))
    thread.start()
    until(lambda: pair[1].poll() or True, "a beginning")
    buffer = bytearray(len(message) + 5)
    assert pair[1].recv_bytes_into(buffer) == len(message)
    assert buffer[: len(message)] == message
    thread.join()
    pair[0].send_bytes(b"seven")
    with pytest.raises(ValueError, match="structures"):
        pair[1].recv_bytes_into(bytearray(4))


def test_poll_never_waits_for_the_rest(pair: tuple[Connection, Connection]) -> None:
    """Of a message of which a part is there, `poll` takes the part, and says that it is not whole."""
    pair[0].post(os.urandom(20 << 20))
    assert not pair[0].flush()
    start = time.monotonic()
    for _ in range(50):
        assert not pair[1].poll()
    assert time.monotonic() - start < 2.0
    while not pair[0].flush():
        pair[1].poll()
    assert pair[1].poll(5.0)


def test_too_much_is_refused(pair: tuple[Connection, Connection]) -> None:
    """A message that is too long is refused where it is sent, and one that says so before any memory is taken."""
    with pytest.raises(ArgumentError, match=f"a message of {MOST_BYTES + 1} bytes"):
        pair[0].send_bytes(bytes(MOST_BYTES), b"1")
    pair[0]._wire.send(b"\xff" * 36)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"a message of 4294967295 bytes came; \d+ are taken"):
            pair[1].recv_bytes()


def test_ends_are_told_apart(place: Place) -> None:
    """An end of the other side is one; what is not from it is none, also when it is asked again."""
    one, other = place.call()
    one.send_bytes(b"last")
    one.close()
    assert other.recv_bytes() == b"last"
    for _ in range(2):
        with pytest.raises(ConnectionEndedError):
            other.poll()
    other.close()
    one, other = place.call()
    one._wire.send(bytes(36))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="not the other side's next") as caught:
            other.poll(1.0)
        assert not isinstance(caught.value, ConnectionEndedError)
    other.close()
    assert one.await_end(5.0)
    one.close()


def test_finish_is_heard_behind_what_was_sent(pair: tuple[Connection, Connection]) -> None:
    """A side that sends nothing more is heard to its last message, and hears the other to its end."""
    pair[0].send_bytes(b"last")
    pair[0].finish()
    assert pair[1].recv_bytes() == b"last"
    with pytest.raises(ConnectionEndedError):
        pair[1].poll()
    pair[1].send_bytes(b"answer")
    assert pair[0].recv_bytes() == b"answer"
    assert not pair[0].await_end(0.05)
    pair[1].close()
    assert pair[0].await_end(5.0)


def test_who_takes_nothing_is_given_up(pair: tuple[Connection, Connection]) -> None:
    """A side that stands still holds up a message for its time alone; a wait is ended from another thread."""
    with pytest.raises(ConnectionError, match=r"took nothing for 0\.2 s"):
        pair[0].send_bytes(bytes(MOST_BYTES), seconds=0.2)

    def wait() -> None:
        with contextlib.suppress(ConnectionError):
            pair[1].recv_bytes()

    waits = threading.Thread(target=wait)
    waits.start()
    pair[1].wake()
    waits.join(5.0)
    assert not waits.is_alive()


def test_secrets_that_differ(place: Place) -> None:
    """A caller with another secret is told nothing but the end; a short secret is refused on both sides."""
    with pytest.raises(HandshakeError, match="hangs up: it has another secret, or is another program"):
        connect(place.listener.address, new_secret())
    with pytest.raises(ArgumentError, match="a secret of 15 bytes"):
        connect(place.listener.address, bytes(15))
    with pytest.raises(ArgumentError, match="a secret of 15 bytes"):
        Listener(("127.0.0.1", 0), bytes(15), lambda _: None)
    assert place.arrived.empty()


def test_a_caller_may_wake_a_listener_that_closes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread then ends before `close` wakes it, which is no error."""
    listener, wakes = place.listener, place.listener._wakes
    thread = listener._thread
    assert thread is not None

    def send(data: bytes) -> int:
        with socket.create_connection(listener.address):
            thread.join(10.0)
        assert not thread.is_alive()
        return wakes.send(data)

    monkeypatch.setattr(listener, "_wakes", SimpleNamespace(send=send, close=wakes.close))
    listener.close()
    assert wakes.fileno() == -1


def test_addresses_that_lead_nowhere(place: Place) -> None:
    """Nothing listens, nothing answers, no such port or name: an error within the time, that says where."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(TransferError, match="cannot be reached: timed out"):
            connect(silent.getsockname(), SECRET, 0.2)
        assert time.monotonic() - start < 5.0
        with pytest.raises(TransferError, match=r"cannot listen on 127\.0\.0\.1:"):
            Listener(silent.getsockname(), SECRET, lambda _: None)
        closed = silent.getsockname()
    for address in (closed, ("127.0.0.1", 70_000), ("\0", 1), ("x" * 300, 1)):
        with pytest.raises(TransferError, match="cannot be reached"):
            connect(address, SECRET, 2.0)


def test_strangers_have_their_time_and_place(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent and dripping callers are dropped when their time is over, or for others; none is told a thing."""
    monkeypatch.setattr(module, "PROVES_WITHIN", 0.3)
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection(place.listener.address)) for _ in range(MOST_UNPROVED + 20)
        ]
        until(lambda: place.listener.refused >= 20, "the crowd")
        assert place.listener.waiting <= MOST_UNPROVED
        for wire in callers:
            wire.settimeout(5.0)
            with contextlib.suppress(OSError):
                wire.send(b"\0")
        for wire in callers:
            with contextlib.suppress(ConnectionResetError):
                assert wire.recv(1) == b""
        assert place.listener.waiting == 0


def test_a_connection_that_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no thread for a connection, or no place for a caller, that one ends; the next is served."""
    arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    failures: list[Exception] = [RuntimeError("can't start new thread"), MemoryError()]

    def serve(connection: Connection) -> None:
        if failures:
            raise failures.pop()
        arrived.put(connection)

    listener = Listener(("127.0.0.1", 0), SECRET, serve)
    register, full = listener._selector.register, [OSError(28, "No space left on device")]

    def crowded(*args: Any) -> Any:
        if full:
            raise full.pop()
        return register(*args)

    with contextlib.closing(listener):
        for _ in range(2):
            with contextlib.closing(connect(listener.address, SECRET)) as one:
                assert one.await_end(5.0)
        monkeypatch.setattr(listener._selector, "register", crowded)
        with contextlib.closing(connect(listener.address, SECRET)) as one:
            one.send_bytes(b"served")
            with contextlib.closing(arrived.get(timeout=5.0)) as other:
                assert other.recv_bytes() == b"served"
        assert not full


def test_closing_leaves_nothing(place: Place) -> None:
    """A closed listener has no thread and no socket, and calls nobody; twice is fine."""
    one, other = place.call()
    with contextlib.closing(one), contextlib.closing(other), socket.create_connection(place.listener.address) as wire:
        place.listener.close()
        place.listener.close()
        with contextlib.suppress(ConnectionResetError):
            assert wire.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place.listener.address)
        one.send_bytes(b"still")
        assert other.recv_bytes() == b"still"
    assert not [thread for thread in threading.enumerate() if thread.name == "batchstate listener"]
