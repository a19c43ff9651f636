"""An engine between two places of one process, for tests: it copies bytes for real, and injects faults.

    network = Network(seed)
    prefill, decode = InProcessEngine(network, Faults(unknown=0.1)), InProcessEngine(network)
    ...
    network.step()  # lets some of what is under way happen

Nothing moves but in `Network.step`. A row is read when it lands, as by a real engine, so that memory reused before its
write has drained shows. A tag arrives behind its data: once, more often or never.
"""

import ctypes
import random
from collections.abc import Callable
from typing import final

import attrs

from batchstate import invariants
from batchstate.errors import HandshakeError, TransferError
from batchstate.transport.engines.base import Capabilities, Copies, Delivery, Engine, Handle, Ints, Peer, Region, Status


@final
@attrs.frozen
class Faults:
    """How likely each fault is, 0 to 1 per write. Without arguments nothing goes wrong.

    Attributes:
        delay: most steps before the first byte of a write lands, and before its tag arrives.
        split: its rows are cut in pieces that land at different times, in any order.
        failed: some of it lands, then it ends as FAILED.
        unknown: it is told to be UNKNOWN, and goes on landing, all of it or some.
        stuck: of the unknown ones: it never drains while both ends live.
        lost_tag: all of it lands, and its tag never arrives.
        duplicate_tag: its tag arrives more than once.
        duplicate_rows: some of its bytes are written again before it ends.
        refused: the write raises before anything is sent.
    """

    delay: int = 0
    split: float = 0.0
    failed: float = 0.0
    unknown: float = 0.0
    stuck: float = 0.0
    lost_tag: float = 0.0
    duplicate_tag: float = 0.0
    duplicate_rows: float = 0.0
    refused: float = 0.0


GRACE_STEPS = 4
"""How many steps after the death of a writer its bytes may still land."""


@final
@attrs.frozen
class Piece:
    """Bytes that land at once."""

    source: int
    target: int
    nbytes: int


@final
@attrs.define(eq=False)
class Flight:
    """A write under way, and its fate."""

    writer: "InProcessEngine"
    reader: "InProcessEngine"
    handle: Handle
    delay: int  # steps until it begins
    split: bool  # whether its pieces land one by one
    ends: Status  # its status in the end
    share: float  # the part of its pieces that lands, 0 to 1
    stuck: bool  # whether it never drains while both ends live
    tags: int  # how often its tag arrives, once all of it has landed
    again: bool  # whether some bytes are written a second time
    left: list[Piece] = attrs.field(factory=list)  # pieces that have not landed, the next one last
    told: Status = Status.PENDING  # its status for its writer
    over: bool = False  # whether nothing of it can still land
    ends_at: int | None = None  # the step at which the last bytes of a dead writer are gone
    kept: dict[Piece, "ctypes.Array[ctypes.c_char]"] = attrs.field(factory=dict, repr=False)  # of a dead writer


Move = Callable[[int, int, int], object]
"""Copies bytes: the address to which, the address from which, and how many."""


def _moved_by_driver() -> Move:
    """Copies between any two addresses of host and device memory; CUDA's driver knows from the address which is which.

    Torch's streams do not wait for it, nor it for them: a row is read when it lands, as by a network card. OSError:
    there is no CUDA driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def move(target: int, source: int, nbytes: int) -> None:
        copied = driver.cuMemcpy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes))
        status = copied or driver.cuStreamSynchronize(None)  # between device memories the copy returns before its end
        if status:
            raise TransferError(f"CUDA does not copy {nbytes} bytes: error {status}", status, "see cuda.h")

    return move


@final
class Network:
    """The network between engines of one process.

    Args:
        seed: of every choice; or the generator itself.

    Attributes:
        now: steps made.
        move: copies bytes within the process. `memmove`, until memory of a GPU is registered.
    """

    def __init__(self, seed: int | random.Random = 0) -> None:
        self.dice = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.now = 0
        self.move: Move = ctypes.memmove
        self.engines: dict[str, InProcessEngine] = {}
        self._flights: list[Flight] = []
        self._tags: list[tuple[int, InProcessEngine, Delivery]] = []

    def step(self) -> None:
        """Lets some of what is under way happen, in any order."""
        self.now += 1
        self.dice.shuffle(self._flights)
        for flight in self._flights:
            self._advance(flight)
        self._flights = [flight for flight in self._flights if not flight.over and not flight.reader.killed]
        waiting, self._tags = self._tags, []
        for due, reader, delivery in waiting:
            if due <= self.now:
                reader.arrived.append(delivery)
            else:
                self._tags.append((due, reader, delivery))

    def kill(self, engine: "InProcessEngine") -> None:
        """Ends an engine as the end of its process would. Bytes it has sent land for `GRACE_STEPS` more, or never."""
        engine.killed = True
        for flight in self._flights:
            if flight.reader is engine:
                self._lose(flight)
            elif flight.writer is engine:
                flight.ends_at = self.now + GRACE_STEPS
                flight.left = flight.left[self.dice.randint(0, len(flight.left)) :]
                flight.kept = {piece: self._copied(piece) for piece in flight.left}

    def under_way(self, engine: "InProcessEngine") -> list[Piece]:
        """Pieces that writes from or to an engine may still read there or change."""
        flights = [flight for flight in self._flights if engine in (flight.reader, flight.writer) and not flight.over]
        return [piece for flight in flights for piece in flight.left]

    def depart(self, flight: Flight) -> None:
        """Takes over a write."""
        if flight.reader.killed:
            self._lose(flight)
        self._flights.append(flight)

    def pieces(self, flight: Flight, copies: Copies, sources: Ints, targets: Ints) -> list[Piece]:
        """The pieces of a write that land, in their order, the last one first."""
        pieces = []
        for source, target, nbytes in zip(sources.tolist(), targets.tolist(), copies.lengths.tolist(), strict=True):
            cut = self.dice.randint(1, nbytes - 1) if flight.split and nbytes > 1 else nbytes
            pieces.append(Piece(source, target, cut))
            if cut < nbytes:
                pieces.append(Piece(source + cut, target + cut, nbytes - cut))
        self.dice.shuffle(pieces)
        pieces = pieces[: round(len(pieces) * flight.share)]
        if flight.again and pieces:
            pieces[:0] = self.dice.sample(pieces, self.dice.randint(1, len(pieces)))
        return pieces

    def _lose(self, flight: Flight) -> None:
        flight.left.clear()
        if flight.told is Status.PENDING:
            flight.told = self.dice.choice((Status.UNKNOWN, Status.FAILED))
        flight.over = flight.told is Status.FAILED or self.dice.random() < 0.5

    def _advance(self, flight: Flight) -> None:
        if flight.ends_at is not None and self.now >= flight.ends_at:
            flight.over = True
        if flight.over or flight.reader.killed:
            return
        if flight.delay:
            flight.delay -= 1
            return
        if flight.ends is Status.UNKNOWN:
            flight.told = Status.UNKNOWN
            if self.dice.random() < (0.8 if flight.stuck else 0.5):
                return
        count = len(flight.left)
        for _ in range(self.dice.randint(1, count) if flight.split and count else count):
            self._land(flight, flight.left.pop())
        if not flight.left:
            self._finish(flight)

    def _land(self, flight: Flight, piece: Piece) -> None:
        if not flight.reader.holds(piece):
            return
        source = piece.source if flight.ends_at is None else ctypes.addressof(flight.kept[piece])
        self.move(piece.target, source, piece.nbytes)

    def _copied(self, piece: Piece) -> "ctypes.Array[ctypes.c_char]":
        copied = ctypes.create_string_buffer(piece.nbytes)
        self.move(ctypes.addressof(copied), piece.source, piece.nbytes)
        return copied

    def _finish(self, flight: Flight) -> None:
        flight.told = flight.ends
        if flight.stuck and flight.ends_at is None:
            return
        flight.over = True
        if flight.share == 1.0 and flight.ends_at is None:
            for _ in range(flight.tags):
                due = self.now + self.dice.randint(0, flight.writer.faults.delay)
                self._tags.append((due, flight.reader, Delivery(flight.handle.tag, flight.writer.instance)))


@final
class InProcessEngine(Engine):
    """An engine within one process, for memory of the host and of CUDA devices.

    Args:
        network: shared with the engines that it can reach.
        faults: of its writes; none by default.
        max_rows: most rows of one write.

    Attributes:
        killed: whether its process is taken to have ended.
        arrived: tags that `completions` will report.
    """

    name = "in-process"

    def __init__(self, network: Network, faults: Faults | None = None, *, max_rows: int = 1024) -> None:
        super().__init__()
        self.instance = f"{network.dice.getrandbits(64):016x}"
        self.capabilities = Capabilities(one_sided=True, max_rows=max_rows)
        self.network = network
        self.faults = Faults() if faults is None else faults
        self.killed = False
        self.arrived: list[Delivery] = []
        network.engines[self.instance] = self

    def holds(self, piece: Piece) -> bool:
        """Whether the bytes that a piece lands on are registered here."""
        return any(
            region.address <= piece.target and piece.target + piece.nbytes <= region.address + region.nbytes
            for region in self._regions.values()
        )

    def _register(self, region: Region) -> None:
        if region.device == "cpu":
            return
        try:
            self.network.move = _moved_by_driver()
        except OSError as error:
            problem = f"{region.name} lies on {region.device}, which this engine reaches by CUDA's driver: {error}"
            raise TransferError(problem, region.device, "register memory of the host, or of a CUDA device") from error

    def _endpoint(self) -> bytes:
        return b""

    def _connect(self, peer: Peer, endpoint: bytes) -> None:
        reached = self.network.engines.get(peer.instance)
        if reached is None or reached.killed:
            raise TransferError(f"no engine {peer.instance} here", peer.instance, "use one network for both sides")
        if not invariants.peer_unknown.holds(reached._secret, peer.secret):
            raise HandshakeError(f"engine {peer.instance} has another secret", peer.instance, "pass its own endpoint")
        peer.native = reached

    def _write(self, handle: Handle, copies: Copies, sources: Ints, targets: Ints) -> None:
        dice = self.network.dice
        if dice.random() < self.faults.refused:
            raise TransferError("the write was refused", handle.tag, "write again, with another tag")
        handle.native = flight = self._fated(handle, dice)
        flight.left = self.network.pieces(flight, copies, sources, targets)
        self.network.depart(flight)

    def _fated(self, handle: Handle, dice: random.Random) -> Flight:
        faults, throw = self.faults, dice.random()
        ends = Status.DONE
        if throw < faults.failed + faults.unknown:
            ends = Status.FAILED if throw < faults.failed else Status.UNKNOWN
        again = dice.randint(2, 3) if dice.random() < faults.duplicate_tag else 1
        return Flight(
            self,
            handle.peer.native,
            handle,
            delay=dice.randint(0, faults.delay),
            split=dice.random() < faults.split,
            ends=ends,
            share=1.0 if ends is Status.DONE else dice.choice((0.0, dice.random(), 1.0)),
            stuck=ends is Status.UNKNOWN and dice.random() < faults.stuck,
            tags=0 if ends is Status.FAILED or dice.random() < faults.lost_tag else again,
            again=dice.random() < faults.duplicate_rows,
        )

    def _poll(self, handle: Handle) -> Status:
        flight: Flight = handle.native
        if flight.reader.killed:
            handle.peer.lost = "its process ended"
        if flight.told is Status.FAILED:
            handle.reason = "injected"
        return flight.told

    def _drained(self, handle: Handle) -> bool:
        return bool(handle.native.over)

    def _completions(self) -> list[Delivery]:
        arrived, self.arrived = self.arrived, []
        self.network.dice.shuffle(arrived)
        return arrived

    def _disconnect(self, peer: Peer) -> None:
        peer.native = None

    def _close(self) -> None:
        if not self.killed:
            self.network.kill(self)
        del self.network.engines[self.instance]
