"""How another process reaches an engine: one question and one answer to a connection, in JSON lines.

Questions are "meet" (form a pair with me) and "ended" (has your receiving thread of that pair ended?).

Guarantees: who asks has an answer or an error within its time, also of a process that is stopped. It listens on one
address only, and until after the last receiving thread has ended: so nobody listening means that nothing more lands.
"""

import contextlib
import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import attrs

from batchstate.errors import HandshakeError

Address = tuple[str, int]

MOST_BYTES = 4096
ASKS_WITHIN = 1.0
"""Seconds that one who connects has for the whole question."""

MOST_CALLERS = 64
"""Who have connected and not asked yet: of more, the one that came first is sent away."""

LOOKS_EVERY = 0.05
"""Seconds between two looks at the clock, while somebody has not asked yet or the reception is to end."""

_NAME = re.compile("[0-9a-f]{16}")


@final
@attrs.define(eq=False)
class _Caller:
    """Who has connected and not asked yet: until when there is time, on the monotonic clock, and what was heard."""

    connection: socket.socket
    until: float
    heard: bytes = b""


@final
class Reception:
    """Answers for one engine. Nothing that a caller sends, or does not send, keeps it from answering others.

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
        self._callers: list[_Caller] = []
        self._thread = threading.Thread(target=self._run, name="batchstate reception", daemon=True)
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
                waits = LOOKS_EVERY if self._callers or not self._open else None
                for key, _ in selector.select(waits):
                    if key.data is None:
                        self._accept(selector)
                    elif self._heard(key.data):
                        self._dismiss(selector, key.data)
                late = [one for one in self._callers if one.until < time.monotonic()]
                for caller in (*late, *self._callers[len(late) : -MOST_CALLERS]):
                    self._dismiss(selector, caller)
            for caller in tuple(self._callers):
                self._dismiss(selector, caller)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has gone already, or there is no room for one more file
            time.sleep(LOOKS_EVERY)
            return
        connection.setblocking(False)
        self._callers.append(_Caller(connection, time.monotonic() + ASKS_WITHIN))
        selector.register(connection, selectors.EVENT_READ, self._callers[-1])

    def _dismiss(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        self._callers.remove(caller)
        selector.unregister(caller.connection)
        caller.connection.close()

    def _heard(self, caller: _Caller) -> bool:
        """Hears what a caller says, and answers. Whether that is all."""
        try:
            part = caller.connection.recv(MOST_BYTES)
            caller.heard += part
            if not caller.heard.endswith(b"\n"):
                return not part or len(caller.heard) > MOST_BYTES
            answer = self._answer(json.loads(caller.heard))
            caller.connection.sendall(json.dumps(answer).encode() + b"\n")  # short: it fits
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError):
            pass  # whoever it was does not speak this, or has gone; or there is no room for one more thread
        return True

    def _answer(self, question: dict[str, Any]) -> dict[str, object]:
        answer: dict[str, object] = {"instance": self._instance, "store": self._store_port}
        asked, expected, pair = question["ask"], question["instance"], _name(question["pair"])
        with self._lock:
            if asked == "meet" and expected == self._instance and self._meeting and pair not in self.live:
                writer = _name(question["writer"])
                self.live.add(pair)
                met = False
                try:
                    met = self._meet(pair, writer)
                finally:
                    if not met:
                        self.live.discard(pair)
                if met:
                    answer["met"] = True
        if asked == "ended":
            answer["ended"] = pair not in self.live
        return answer


def ask(address: Address, instance: str, timeout: float, question: Mapping[str, object]) -> dict[str, Any]:
    """Asks one engine.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: not reached, or no answer in time.
        ValueError: something else listens there.
        HandshakeError: another engine listens there.
    """
    until = time.monotonic() + timeout
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(json.dumps({**question, "instance": instance}).encode() + b"\n")
        line = _line(connection, until)
    try:
        answer = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets without end") from error
    if not isinstance(answer, dict) or "instance" not in answer:
        raise ValueError(f"something else answers at {address[0]}:{address[1]}")
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
    """Tells the writer of a broken pair when the thread that receives has ended, and so no row of it can still land.

    Either the other engine says so, or nobody listens there any more, or another engine does: it stops listening after
    its receiving threads have ended, and the system does so after the last thread of a process that died. A peer that
    does not answer at all may still run, and has not ended. Where addresses move between machines, a refused
    connection is no such proof.
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
        return answer.get("ended") is True


def _line(connection: socket.socket, until: float) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(MOST_BYTES)
        if not part or len(found) > MOST_BYTES:
            raise ValueError("no line")
        found += part
    return found


def _name(value: object) -> str:
    """A pair's or an engine's name, as `secrets.token_hex(8)` makes them. ValueError: it is none."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name")
    return value
