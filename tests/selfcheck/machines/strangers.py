"""A listener among strangers: what is taken comes from the one who knows the secret, and that one always gets in.

Strangers are silent, send noise, replay what they have seen, reflect what they are told, and call in crowds. Between
the two sides of a connection an attacker changes, drops, repeats, swaps and reflects messages, and so it does with the
datagrams of a mailbox. Endpoints are damaged.
"""

import contextlib
import json
import os
import random
import socket
from typing import final

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants
from batchstate.errors import HandshakeError
from batchstate.transport.connection import (
    ANSWER,
    MAC,
    MOST_UNPROVED,
    NONCE,
    Connection,
    Listener,
    _hello,
    _keys,
    _proof,
    new_secret,
)
from batchstate.transport.engines.base import Endpoint, RemoteRegion
from batchstate.transport.engines.nixl import Mailbox
from tests.selfcheck.machine import Machine, ask
from tests.selfcheck.machines.transfers import LAYERS

HEAD = MAC + 4
KEPT = 150  # sockets of strangers that stay open
PATIENCE = 0.002  # seconds that the listener waits for a caller who has to be heard; it does not wait for others


@final
@attrs.define(eq=False)
class Relay:
    """Two ends of a connection, and an attacker between them who passes messages on, changed or not."""

    ends: tuple[Connection, Connection]
    wires: tuple[socket.socket, socket.socket]  # towards each of them
    sent: tuple[list[bytes], list[bytes]]  # messages of each side that the other has not taken, oldest first
    seen: tuple[list[bytes], list[bytes]]  # messages as they travelled, by the side that said them

    @classmethod
    def opened(cls) -> "Relay":
        (here, to_one), (other, to_other) = socket.socketpair(), socket.socketpair()
        keys = _keys(new_secret(), new_secret())
        return cls((Connection(here, keys), Connection(other, keys[::-1])), (to_one, to_other), ([], []), ([], []))

    def say(self, side: int, message: bytes) -> bytes:
        """A side says something. The message as it travels."""
        self.ends[side].send_bytes(message)
        travelled = self.wires[side].recv(HEAD + len(message))
        self.sent[side].append(message)
        self.seen[side].append(travelled)
        return travelled

    def close(self) -> None:
        for wire in (*self.ends, *self.wires):
            wire.close()


class StrangersMachine(Machine):
    """A listener, those who call it, and a connection which an attacker disturbs."""

    NAME = "strangers"
    TARGETS = (
        "let in among strangers",
        "let in behind a crowd",
        "a caller dropped for another",
        "a message refused",
        "a message taken",
        "an endpoint refused",
        "mail refused",
        "mail behind a crowd",
    )

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.open()
        self.dice = random.Random(seed)
        self.secret = self.dice.randbytes(32)
        self.arrived: list[Connection] = []
        self.strangers: list[socket.socket] = []
        self.recorded: list[tuple[bytes, bytes]] = []
        self.listener = self._listen()
        self.relay = Relay.opened()
        writer, *boxes = (Mailbox(f"{number:016x}", self.dice.randbytes(32), "strangers") for number in range(3))
        self.writer, self.box, self.stolen = writer, boxes[0], boxes[1]  # the last is one that strangers read
        self.mailed: list[bytes] = []

    def _listen(self) -> Listener:
        self.heard: list[bytes] = []  # first proofs that this listener has taken
        return Listener(("127.0.0.1", 0), self.secret, self.arrived.append, start=False)

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):  # it never began
            self.listener.close()
            self.relay.close()
            for box in (self.writer, self.box, self.stolen):
                box.close()
            for wire in self.strangers:
                wire.close()
            for connection in self.arrived:
                connection.close()
        super().teardown()

    def check(self) -> None:
        """No stranger has come in, and no more of them are kept than are to be."""
        ask(invariants.peer_unknown, b"", b"", self.listener.waiting, 2 * MOST_UNPROVED, object=self.listener)
        self._let_in(False)

    def _let_in(self, wanted: bool) -> None:
        """The only caller that came in since the last time knows the secret, or nobody did."""
        expected, actual = b"came in" * wanted, b"came in" * len(self.arrived)
        ask(invariants.peer_unknown, expected, actual, object=self.listener, operation="calling")

    def _turn(self, wait: float = 0.0) -> None:
        for _ in range(3):
            self.listener.turn(wait)

    def _reach(self) -> socket.socket:
        wire = socket.create_connection(self.listener.address)
        wire.settimeout(0.5)
        self.strangers.append(wire)
        while len(self.strangers) > KEPT:
            self.strangers.pop(0).close()
        return wire

    def _said(self, wire: socket.socket, count: int) -> bytes:
        self._turn(PATIENCE)
        with contextlib.suppress(OSError):
            return wire.recv(count)
        return b""

    def _crowd(self, count: int) -> None:
        before = self.listener.refused
        for _ in range(count):
            wire = self._reach()
            if self.heard and self.dice.random() < 0.9:
                with contextlib.suppress(OSError):
                    wire.sendall(self.dice.choice(self.heard))
            if self.dice.random() < 0.1:
                self._turn()
        self._turn()
        self.reached("a caller dropped for another", self.listener.refused > before)

    # Callers

    @rule(before=st.integers(0, 5), between=st.sampled_from([0, 0, 3, 80]), slow=st.booleans())
    def call(self, before: int, between: int, slow: bool) -> None:
        """A caller that knows the secret comes, while strangers come; slowly, it connects before it says anything."""
        self._crowd(before)
        wire = self._reach()
        if slow:
            self._turn(PATIENCE)
        nonce = self.dice.randbytes(NONCE)
        hello = nonce + _hello(self.secret, nonce)
        with contextlib.suppress(OSError):
            wire.sendall(hello)
        answer = self._said(wire, ANSWER)
        self._crowd(between)
        nonces = nonce + answer[:NONCE]
        proof = _proof(self.secret, nonces)
        with contextlib.suppress(OSError):
            wire.sendall(proof)
        self._turn(PATIENCE)
        self._let_in(True)
        self.recorded.append((hello, proof))
        self.heard.append(hello)
        self.reached("let in among strangers", len(self.strangers) > 1)
        self.reached("let in behind a crowd", between > MOST_UNPROVED)
        caller, server = Connection(wire, _keys(self.secret, nonces)), self.arrived.pop()
        message = self.dice.randbytes(20)
        caller.send_bytes(message)
        taken = server.recv_bytes() if server.poll(0.5) else b""
        ask(invariants.peer_unknown, message, taken, object=self.listener, operation="receiving")
        server.close()

    @rule(count=st.sampled_from([1, 7, 100]))
    def silence(self, count: int) -> None:
        self._crowd(count)

    @rule(noise=st.binary(max_size=200), times=st.integers(1, 4))
    def noise(self, noise: bytes, times: int) -> None:
        for _ in range(times):
            wire = self._reach()
            with contextlib.suppress(OSError):
                wire.sendall(noise)
        self._turn()

    @precondition(lambda self: self.recorded)
    @rule(again=st.booleans())
    def replay(self, again: bool) -> None:
        """A stranger says what it has heard a caller say, and is told nothing; perhaps the listener was started again.

        A listener that was started since does not know the first proof yet, and answers it once.
        """
        if again:
            self.listener.close()
            self.listener = self._listen()
        hello, proof = self.dice.choice(self.recorded)
        wire = self._reach()
        with contextlib.suppress(OSError):
            wire.sendall(hello)
            told = self._said(wire, ANSWER)
            if hello in self.heard:
                ask(invariants.peer_unknown, b"", told, object=self.listener, operation="answering")
            self.heard.append(hello)
            wire.sendall(proof)
        self._turn()

    @rule(of=st.sampled_from(["another secret", "the answer", "nothing"]), knows=st.booleans())
    def pretend(self, of: str, knows: bool) -> None:
        """A stranger gets past the first proof by a replay, or does not, and makes up the second."""
        wire, nonce = self._reach(), self.dice.randbytes(NONCE)
        other = self.dice.randbytes(32)
        hello = nonce + _hello(self.secret if knows else other, nonce)
        with contextlib.suppress(OSError):
            wire.sendall(hello)
            answer = self._said(wire, ANSWER)
            if not knows:
                ask(invariants.peer_unknown, b"", answer, object=self.listener, operation="answering")
            if of == "another secret":
                wire.sendall(_proof(other, nonce + answer[:NONCE]))
            else:
                wire.sendall(answer[NONCE:] if of == "the answer" else bytes(MAC))
        self._turn()

    # Messages

    @rule(
        side=st.integers(0, 1),
        how=st.sampled_from(["pass", "pass", "pass", "flip", "shorten", "repeat", "swap", "reflect", "forge", "skip"]),
        at=st.integers(0, 400),
        size=st.sampled_from([0, 1, 30, 300]),
    )
    def message(self, side: int, how: str, at: int, size: int) -> None:
        relay, message = self.relay, self.dice.randbytes(size)
        travels = relay.say(side, message)
        to = 1 - side
        if how == "flip":
            at %= len(travels)
            travels = travels[:at] + bytes([travels[at] ^ 1 << self.dice.randrange(8)]) + travels[at + 1 :]
        elif how == "shorten":
            travels = max(0, size - 1).to_bytes(4) + travels[4:]
        elif how == "repeat" and len(relay.seen[side]) > 1:
            travels = self.dice.choice(relay.seen[side][:-1])
        elif how == "swap":
            travels = relay.say(side, self.dice.randbytes(size)) + travels
        elif how == "reflect":
            to = side
        elif how == "forge":
            travels = travels[:HEAD] + self.dice.randbytes(size)
        elif how == "skip":
            travels = relay.say(side, self.dice.randbytes(size))
        relay.wires[to].sendall(travels)
        self._take(to)

    def _take(self, side: int) -> None:
        """A side takes the next message of the other, or nothing ever again."""
        relay = self.relay
        try:
            while relay.ends[side].poll():
                taken = relay.ends[side].recv_bytes()
                said = relay.sent[1 - side]
                expected = said.pop(0) if said else b"nothing: this side has said it itself"
                ask(invariants.peer_unknown, expected, taken, object=relay, operation="receiving")
                self.reached("a message taken")
        except ConnectionError:
            self.reached("a message refused")
        if relay.sent[0] or relay.sent[1]:  # something was lost, refused, or is not complete
            relay.close()
            self.relay = Relay.opened()

    # Mail

    @rule(
        how=st.sampled_from(["pass", "pass", "flip", "shorten", "repeat", "rename", "forge"]),
        noise=st.sampled_from([0, 0, 1, 20]),
        at=st.integers(0, 400),
    )
    def mail(self, how: str, noise: int, at: int) -> None:
        """A writer mails a tag, and a stranger that has got hold of it does something else with it, among noise."""
        box, tag = self.box, self.dice.randbytes(1 + at % 128)
        Mailbox(box._instance, self.secret, "strangers").close()  # the next one removes those without a process
        there = b"" if os.path.exists(box.path) else b"removed"
        ask(invariants.peer_unknown, b"", there, object=box, operation="Mailbox")
        self.writer.send(self.stolen.path, box._secret, tag)
        travels = self.stolen._socket.recv(4096)
        at %= len(travels)
        changed = {
            "flip": travels[:at] + bytes([travels[at] ^ 1 << self.dice.randrange(8)]) + travels[at + 1 :],
            "shorten": travels[:-1],
            "repeat": self.dice.choice([*self.mailed, b""]),
            "rename": self.box._instance.encode() + travels[16:],
            "forge": travels[:17] + bytes(MAC) + travels[17 + MAC :],
        }
        if how == "pass":
            self.mailed.append(travels)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(noise):
                    stranger.sendto(self.dice.randbytes(at), box.path)
        taken = [] if noise < 20 else box.received()  # where it is full the writer would come again
        self.writer._socket.sendto(changed.get(how, travels), box.path)
        taken += box.received()
        expected = tag if how == "pass" else b""
        ask(invariants.peer_unknown, expected, b"".join(mail.tag for mail in taken), object=box, operation="receiving")
        self.reached("mail refused", how != "pass")
        self.reached("mail behind a crowd", how == "pass" and noise > 10)

    # Endpoints

    @rule(how=st.sampled_from(["native", "region", "instance", "secret"]))
    def damage(self, how: str) -> None:
        """An endpoint is changed on its way, or put together from two."""
        regions = {0: RemoteRegion(0, LAYERS[0], 4096, 4096)}
        endpoint, other = (
            Endpoint("nixl", f"{number:016x}", new_secret(), regions, self.dice.randbytes(8)) for number in range(2)
        )
        fields, others = json.loads(endpoint.to_bytes()), json.loads(other.to_bytes())
        if how == "region":
            fields["regions"][0][2] += 4096
        else:
            fields[how] = others[how]
        try:
            taken = Endpoint.from_bytes(json.dumps(fields).encode())
        except HandshakeError:
            self.reached("an endpoint refused")
            return
        ask(
            invariants.peer_unknown,
            endpoint.to_bytes(),
            taken.to_bytes(),
            object=taken,
            operation="reading an endpoint",
        )
