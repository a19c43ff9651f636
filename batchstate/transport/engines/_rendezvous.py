"""How another process reaches an engine, to form a pair: one question and answer per connection, in JSON lines.

Questions are "meet" (form a pair with me) and "ended" (has your receiving thread of that pair ended?).

Guarantees: a client has an answer or an error within its time, also of a process that is stopped. The engine listens
on one address only, and until after the last receiving thread has ended: so when a connection is refused, nothing
more lands.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import attrs

from batchstate.errors import ArgumentError, HandshakeError
from batchstate.transport.wire import flag, nonce, number, parsed, record, text

Address = tuple[str, int]

MOST_LINE_BYTES = 4096
ASKS_WITHIN = 1.0
"""Seconds that a client has for the whole question."""

MOST_CLIENTS = 64
"""Clients that have connected and not asked yet: of more, the one that came first is sent away."""

CLOCK_PERIOD = 0.05
"""Seconds between two looks at the clock, while a client has not asked yet or the accept loop is to end."""

_MEET = record(ask=text("meet"), instance=text(), pair=nonce, writer=nonce)
_ENDED = record(ask=text("ended"), instance=text(), pair=nonce)
_REPLY = record(instance=text(), store=number(), met=flag, ended=flag)


def _question(value: Any) -> dict[str, Any]:
    schema = _MEET if isinstance(value, dict) and value.get("ask") == "meet" else _ENDED
    found: dict[str, Any] = schema(value)
    return found


@final
@attrs.define(eq=False)
class _Client:
    """A process that has connected and not asked yet: until when it has time, on the monotonic clock, and its words."""

    connection: socket.socket
    until: float
    heard: bytes = b""


@final
class AcceptLoop:
    """Answers for one engine. Nothing that a client sends, or does not send, keeps it from answering others.

    Args:
        host: to listen on.
        port: the same.
        instance: of the engine.
        store_port: of the engine.
        meet: starts a receiving thread for a pair, given its name and its writer; False: there are too many.

    Attributes:
        address: where it listens.
        live: names of the pairs that have a receiving thread.
    """

    def __init__(self, host: str, port: int, instance: str, store_port: int, meet: Callable[[str, str], bool]) -> None:
        self.live: set[str] = set()
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)
        self.address: Address = (host, self._socket.getsockname()[1])
        self._instance = instance
        self._store_port = store_port
        self._meet = meet
        self._lock = threading.Lock()
        self._meeting = True
        self._open = True
        self._clients: list[_Client] = []
        self._thread = threading.Thread(target=self._run, name="batchstate accept loop", daemon=True)
        self._thread.start()

    def refuse(self) -> None:
        """Forms no more pairs; when it returns, none is being formed."""
        with self._lock:
            self._meeting = False

    def close(self) -> None:
        """Stops listening: at once, or, without a wait, when the last receiving thread has ended."""
        self._open = False
        with contextlib.suppress(OSError):
            socket.create_connection(self.address, ASKS_WITHIN).close()
        if not self.live:
            self._thread.join()

    def _run(self) -> None:
        with self._socket, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while self._open or self.live:
                waits = CLOCK_PERIOD if self._clients or not self._open else None
                for key, _ in selector.select(waits):
                    if key.data is None:
                        self._accept(selector)
                    elif self._heard(key.data):
                        self._dismiss(selector, key.data)
                late = [one for one in self._clients if one.until < time.monotonic()]
                for client in (*late, *self._clients[len(late) : -MOST_CLIENTS]):
                    self._dismiss(selector, client)
            for client in tuple(self._clients):
                self._dismiss(selector, client)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has gone already, or there is no room for one more file
            time.sleep(CLOCK_PERIOD)
            return
        connection.setblocking(False)
        self._clients.append(_Client(connection, time.monotonic() + ASKS_WITHIN))
        selector.register(connection, selectors.EVENT_READ, self._clients[-1])

    def _dismiss(self, selector: selectors.BaseSelector, client: _Client) -> None:
        self._clients.remove(client)
        selector.unregister(client.connection)
        client.connection.close()

    def _heard(self, client: _Client) -> bool:
        """Hears what a client says, and answers. Whether that is all."""
        try:
            part = client.connection.recv(MOST_LINE_BYTES)
            client.heard += part
            if not client.heard.endswith(b"\n"):
                return not part or len(client.heard) > MOST_LINE_BYTES
            question = parsed(client.heard, _question, "a question to an engine", ArgumentError, "use `ask`")
            client.connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")  # short: it fits
        except (OSError, ValueError, RuntimeError, MemoryError):
            pass  # not a question, or the client has gone; or there is no room for one more thread
        return True

    def _answer(self, question: dict[str, Any]) -> dict[str, object]:
        pair, met = question["pair"], False
        with self._lock:
            wanted = question["ask"] == "meet" and question["instance"] == self._instance
            if wanted and self._meeting and pair not in self.live:
                self.live.add(pair)
                try:
                    met = self._meet(pair, question["writer"])
                finally:
                    if not met:
                        self.live.discard(pair)
        ended = question["ask"] == "ended" and pair not in self.live
        return {"instance": self._instance, "store": self._store_port, "met": met, "ended": ended}


def ask(address: Address, instance: str, timeout: float, question: Mapping[str, object]) -> dict[str, Any]:
    """Asks one engine.

    Raises:
        ConnectionRefusedError: no process listens there.
        OSError: not reached, or no answer in time.
        ArgumentError, ValueError: something else listens there.
        HandshakeError: another engine listens there.
    """
    until = time.monotonic() + timeout
    line = b""
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(json.dumps({**question, "instance": instance}).encode() + b"\n")
        while not line.endswith(b"\n"):
            connection.settimeout(max(until - time.monotonic(), 0.001))
            part = connection.recv(MOST_LINE_BYTES)
            if not part or len(line) > MOST_LINE_BYTES:
                raise ValueError("no line")
            line += part
    answer: dict[str, Any] = parsed(line, _REPLY, "an engine's answer", ArgumentError, "see what listens there")
    if answer["instance"] != instance:
        raise HandshakeError(
            f"instance {instance} was expected at {address[0]}:{address[1]}, {answer['instance']} is there",
            value=answer["instance"],
            remedy="the peer was started anew: ask it for its endpoint again",
        )
    return answer


@final
@attrs.frozen
class EndWatch:
    """Tells the writer of a broken pair when the thread that receives has ended: no row of it can still land.

    Either the other engine says so, or a connection is refused, or another engine listens there: it stops listening
    after its receiving threads have ended, and the system does so after the last thread of a process that died. A peer
    that does not answer at all may still run, and has not ended. Where addresses move between machines, a refused
    connection proves nothing.
    """

    address: Address
    instance: str
    pair: str
    timeout: float

    def ended(self) -> bool:
        """Whether it has. Waits for the answer, `timeout` seconds at most."""
        try:
            answer = ask(self.address, self.instance, self.timeout, {"ask": "ended", "pair": self.pair})
        except (ConnectionRefusedError, HandshakeError):
            return True
        except (OSError, ValueError):
            return False
        return bool(answer["ended"])
