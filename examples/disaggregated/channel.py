"""The control channel: what two workers say to each other beside the KV. Bytes only; nothing is ever unpickled.

A message is one byte that says what it is, and its payload: an introduction, a message of the transport's, or a few
words as JSON. `poll` never waits. Both ends know a secret, without which no connection comes about.

Warning: the secret keeps strangers from connecting; nothing is encrypted. Stay on loopback, or on
a network of your own.
"""

import contextlib
import enum
import json
import queue
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, final

from batchstate.errors import TransferError
from examples.disaggregated.options import AUTHKEY

MOST_BYTES = 32 * 2**20
ANSWERS_IN = 10.0
"""Seconds that the listening side may take to ask for the secret."""
TRIES_FOR = 2.0
"""Seconds of one attempt to connect to a machine that does not answer."""


class ChannelClosedError(Exception):
    """The other end is gone."""


class Kind(enum.Enum):
    """What a message is."""

    INTRODUCTION = b"I"
    TRANSPORT = b"T"
    WORDS = b"W"


@final
class Channel:
    """One connection.

    Args:
        connection: of multiprocessing.
        name: of the other end, for reports.
    """

    def __init__(self, connection: Connection, name: str) -> None:
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
        """What has arrived. Never waits.

        Raises:
            ChannelClosedError: the other end is gone, and all that it said has been handed out.
        """
        found: list[tuple[Kind, bytes]] = []
        try:
            while self._connection.poll(0):
                message = self._connection.recv_bytes(MOST_BYTES)
                found.append((Kind(message[:1]), message[1:]))
        except (EOFError, OSError, ValueError) as error:
            if not found:
                raise ChannelClosedError(f"{self.name} is gone: {str(error) or 'it hung up'}") from error
        return found

    def await_one(self, seconds: float) -> tuple[Kind, bytes]:
        """The next message; for the beginning, when there is nothing else to do.

        Raises:
            ChannelClosedError: the other end is gone, or silent.
        """
        try:
            if not self._connection.poll(seconds):
                raise ChannelClosedError(f"{self.name} said nothing for {seconds:.0f} s")
            message = self._connection.recv_bytes(MOST_BYTES)
            return Kind(message[:1]), message[1:]
        except (EOFError, OSError, ValueError) as error:
            raise ChannelClosedError(f"{self.name} is gone: {str(error) or 'it hung up'}") from error

    def close(self) -> None:
        """Hangs up; twice is fine."""
        with contextlib.suppress(OSError):
            self._connection.close()


@final
class Door:
    """Listens until one who knows the secret has come.

    Args:
        address: host and port to listen on; port 0 takes any.
        authkey: the secret.

    Raises:
        TransferError: that is not an address of this machine, or the port is taken.
    """

    def __init__(self, address: tuple[str, int], authkey: bytes) -> None:
        self._listener = listening(address, authkey)
        self._came: queue.Queue[Connection] = queue.Queue()
        host, port = self._listener.address
        self.address: tuple[str, int] = (str(host), int(port))
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    self._came.put(self._listener.accept())
                    return
                except AuthenticationError:
                    host, port = self.address
                    line = f"refused a caller whose {AUTHKEY} is another; still listening on {host}:{port}"
                    print(line, file=sys.stderr, flush=True)
                except (EOFError, OSError):
                    continue

    def entered(self) -> Connection | None:
        """Who has come, once. Never waits."""
        with contextlib.suppress(queue.Empty):
            return self._came.get_nowait()
        return None


def listening(address: tuple[str, int], authkey: bytes | None = None) -> Listener:
    """Listens.

    Raises:
        TransferError: that is not an address of this machine, or the port is taken.
    """
    try:
        return Listener(address, authkey=authkey)
    except OSError as error:
        raise TransferError(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}",
            value=address,
            remedy="name an address of this machine and a port that is free (port 0 takes any)",
        ) from error


def call(address: tuple[str, int], authkey: bytes, name: str, seconds: float) -> Channel:
    """Connects to a door, which may open within so many seconds. Says on stderr that it waits, once it has to.

    Raises:
        ChannelClosedError: no worker listens there, or it knows another secret, or is another program.
    """
    where = f"{name} at {address[0]}:{address[1]}"
    connection = Connection(_reached(address, where, seconds).detach())
    refused = f"{where} does not let us in"
    try:
        if not connection.poll(ANSWERS_IN):
            raise ChannelClosedError(f"{refused}: it says nothing; is it a prefill worker?")
        answer_challenge(connection, authkey)
        deliver_challenge(connection, authkey)
    except AuthenticationError as error:
        raise ChannelClosedError(f"{refused}: its {AUTHKEY} is another; set the same on both sides") from error
    except (AssertionError, EOFError, OSError) as error:  # an assertion: the other side speaks something else
        reason = str(error) or "it hung up"
        raise ChannelClosedError(f"{refused}: {reason}; is it a prefill worker, and free?") from error
    return Channel(connection, name)


def _reached(address: tuple[str, int], where: str, seconds: float) -> socket.socket:
    end = time.monotonic() + seconds
    told = False
    while True:
        try:
            reached = socket.create_connection(address, timeout=min(TRIES_FOR, seconds))
        except (ConnectionRefusedError, TimeoutError) as error:
            if time.monotonic() > end:
                raise ChannelClosedError(f"nothing listens for {where}; start it, or correct --connect") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise ChannelClosedError(f"cannot reach {where}: {reason}; correct --connect") from error
        else:
            reached.settimeout(None)
            return reached
        if not told:
            print(f"waiting for {where}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.05)
