"""How another process reaches an engine: one question and one answer to a connection, in JSON lines.

Questions are "meet" (form a pair with me) and "ended" (has your receiving thread of that pair ended?).

Guarantees: who asks has an answer or an error within its time, also of a process that is stopped. It listens on one
address only, and until after the last receiving thread has ended: so nobody listening means that nothing more lands.
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

import attrs

from batchstate.errors import HandshakeError

Address = tuple[str, int]

MOST_BYTES = 4096
ASKS_WITHIN = 1.0
"""Seconds that one who connects has for the question."""


@final
class Reception:
    """Answers for one engine.

    Attributes:
        address: where it listens.
        live: names of the pairs that have a receiving thread.
    """

    def __init__(self, host: str, port: int, instance: str, store_port: int, meet: Callable[[str, str], None]) -> None:
        self.live: set[str] = set()
        self._socket = socket.create_server((host, port))
        self.address: Address = (host, self._socket.getsockname()[1])
        self._instance = instance
        self._store_port = store_port
        self._meet = meet
        self._lock = threading.Lock()
        self._meeting = True
        self._open = True
        self._thread = threading.Thread(target=self._run, name="batchstate reception", daemon=True)
        self._thread.start()

    def refuse(self) -> None:
        """Forms no more pairs; when it returns, none is being formed."""
        with self._lock:
            self._meeting = False

    def close(self) -> None:
        """Stops listening."""
        self._open = False
        socket.create_connection(self.address, ASKS_WITHIN).close()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while self._open:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(ASKS_WITHIN)
                try:
                    question = json.loads(_line(connection))
                    connection.sendall(json.dumps(self._answer(question)).encode() + b"\n")
                except (OSError, ValueError, TypeError, KeyError):
                    continue  # whoever it was does not speak this, or has gone

    def _answer(self, question: dict[str, Any]) -> dict[str, object]:
        answer: dict[str, object] = {"instance": self._instance, "store": self._store_port}
        asked, expected, pair = question["ask"], question["instance"], str(question["pair"])
        with self._lock:
            if asked == "meet" and expected == self._instance and self._meeting:
                self.live.add(pair)
                self._meet(pair, str(question["writer"]))
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
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(json.dumps({**question, "instance": instance}).encode() + b"\n")
        answer = json.loads(_line(connection))
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
        """Whether it has. Waits for the answer, `timeout` seconds at most for each step."""
        try:
            answer = ask(self.address, self.instance, self.timeout, {"ask": "ended", "pair": self.pair})
        except (ConnectionRefusedError, HandshakeError):
            return True
        except (OSError, ValueError):
            return False
        return answer.get("ended") is True


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        part = connection.recv(MOST_BYTES)
        if not part or len(found) > MOST_BYTES:
            raise ValueError("no line")
        found += part
    return found
