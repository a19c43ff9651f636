"""The control channel: what two workers say to each other beside the KV. Bytes only; nothing is ever unpickled.

A message is one byte that says what it is, and its payload: an introduction, a message of the transport's, or a few
words as JSON. `poll` never waits. Between workers it is a connection of the library's: both ends prove that they know a
secret, and each message has a MAC. Between a worker and its supervisor it is the pipe that the worker was started with.

Warning: nothing is encrypted, and introductions hold the secrets of engines. Stay on loopback, or on a network in which
nobody else reads along.
"""

import contextlib
import enum
import json
import queue
import sys
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any, final

from batchstate.errors import HandshakeError, TransferError
from batchstate.transport.connection import Address, Connection, Listener, connect
from examples.disaggregated.options import AUTHKEY

TRIES_FOR = 2.0
"""Seconds of one attempt to connect to a machine that does not answer."""


class ChannelClosedError(Exception):
    """The other end is gone."""


class Kind(enum.Enum):
    """The kind of a message."""

    INTRODUCTION = b"I"
    TRANSPORT = b"T"
    WORDS = b"W"


@final
class Channel:
    """One connection.

    Args:
        connection: between workers, or the pipe to a supervisor.
        name: of the other end, for reports.
    """

    def __init__(self, connection: Connection | Pipe, name: str) -> None:
        self._connection = connection
        self.name = name

    def __repr__(self) -> str:
        return f"Channel({self.name})"

    def send(self, kind: Kind, payload: bytes) -> None:
        """Sends a message.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        try:
            self._connection.send_bytes(kind.value + payload)
        except OSError as error:
            raise ChannelClosedError(f"{self.name} is gone: {error}") from error

    def say(self, **words: Any) -> None:
        """Sends words.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        self.send(Kind.WORDS, json.dumps(words).encode())

    @staticmethod
    def words(payload: bytes) -> dict[str, Any]:
        """Words that were sent with `say`.

        Raises:
            ChannelClosedError: these are none, so the other end cannot be trusted.
        """
        try:
            words = json.loads(payload)
        except ValueError as error:
            raise ChannelClosedError(f"no words: {payload[:60]!r}") from error
        if not isinstance(words, dict):
            raise ChannelClosedError(f"no words: {payload[:60]!r}")
        return words

    def poll(self) -> list[tuple[Kind, bytes]]:
        """Messages that have arrived. Never waits.

        Raises:
            ChannelClosedError: the other end is gone, and all that it said has been handed out.
        """
        messages: list[tuple[Kind, bytes]] = []
        try:
            while self._connection.poll(0):
                message = self._connection.recv_bytes()
                messages.append((Kind(message[:1]), message[1:]))
        except (EOFError, OSError, ValueError) as error:
            if not messages:
                raise ChannelClosedError(f"{self.name} is gone: {str(error) or 'it hung up'}") from error
        return messages

    def await_one(self, seconds: float) -> tuple[Kind, bytes]:
        """The next message; for the beginning, when there is nothing else to do.

        Raises:
            ChannelClosedError: the other end is gone, or silent.
        """
        try:
            if not self._connection.poll(seconds):
                raise ChannelClosedError(f"{self.name} said nothing for {seconds:.0f} s")
            message = self._connection.recv_bytes()
            return Kind(message[:1]), message[1:]
        except (EOFError, OSError, ValueError) as error:
            raise ChannelClosedError(f"{self.name} is gone: {str(error) or 'it hung up'}") from error

    def close(self) -> None:
        """Hangs up; twice is fine."""
        with contextlib.suppress(OSError):
            self._connection.close()


@final
class Door:
    """Listens until the one who knows the secret has come.

    Args:
        address: host and port to listen on; port 0 takes any.
        authkey: the secret.

    Raises:
        TransferError: that is not an address of this machine, or the port is taken.
        ArgumentError: the secret is too short.
    """

    def __init__(self, address: Address, authkey: bytes) -> None:
        self._came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._listener = Listener(address, authkey, self._came.put)
        self.address = self._listener.address

    def entered(self) -> Connection | None:
        """Who has come, once; then nobody else is let in. Never waits."""
        with contextlib.suppress(queue.Empty):
            connection = self._came.get_nowait()
            self._listener.close()
            return connection
        return None


def call(address: Address, authkey: bytes, name: str, seconds: float) -> Channel:
    """Connects to a door, which may open within so many seconds. Says on stderr that it waits, once it has to.

    Raises:
        ChannelClosedError: no worker listens there, or it knows another secret, or is another program.
    """
    where = f"{name} at {address[0]}:{address[1]}"
    end = time.monotonic() + seconds
    told = False
    while True:
        try:
            return Channel(connect(address, authkey, min(TRIES_FOR, seconds)), name)
        except HandshakeError as error:
            raise ChannelClosedError(
                f"{where} does not let us in: its {AUTHKEY} is another, or it is no prefill worker, or not free"
            ) from error
        except TransferError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError | TimeoutError):
                raise ChannelClosedError(f"cannot reach {where}: {error.problem}; correct --connect") from error
            if time.monotonic() > end:
                raise ChannelClosedError(f"nothing listens for {where}; start it, or correct --connect") from error
        if not told:
            print(f"waiting for {where}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.05)
