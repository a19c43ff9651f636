"""The workers on the other side: which instance of each is the current one, and which are known to have ended.

A worker that is *lost* is only suspected: it may still write. It is *ended* when somebody who can know it says so (a
supervisor that saw its process exit), or when another instance introduces itself under its name, since a supervisor
starts the next only after the last has ended. Nothing here is concluded from time alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, final

import attrs

from batchstate.errors import ArgumentError, DtypeError, HandshakeError
from batchstate.transport.engines.base import Engine, Peer, check_instance
from batchstate.transport.handshake import Description, check_peers
from batchstate.transport.regions import Region, RemoteRegion

Clock = Callable[[], float]

_LOOKS = 4
"""How often this side looks, at the least, while a worker that has ended settles."""


class Addressed(Protocol):
    """A message that says which instance it is from, and for which."""

    @property
    def sender(self) -> str:
        """Instance that sent it."""
        ...

    @property
    def to(self) -> str:
        """Instance that it is for."""
        ...


@final
@attrs.define(eq=False)
class Worker:
    """One instance of a worker on the other side.

    Attributes:
        description: as it introduced itself.
        peer: to write to, or None where this side never connects.
        lost: why it is suspected to be gone, or None.
        settles_in: seconds after which nothing that it sent can land; None while it may live.
    """

    description: Description
    peer: Peer | None = attrs.field(repr=False)
    lost: str | None = None
    settles_in: float | None = None

    @property
    def name(self) -> str:
        """Of the worker; the same for every instance."""
        return self.description.worker

    @property
    def instance(self) -> str:
        """Nonce of its engine."""
        return self.description.instance

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended. Bytes that it has sent may still be under way."""
        return self.settles_in is not None

    def settled(self) -> bool:
        """Whether it is known to have ended, so long ago that nothing it sent can still land."""
        return self.settles_in is not None and self.settles_in <= 0


@final
class Workers:
    """The other side, by name.

    Args:
        engine: of this worker, its memory registered.
        description: of this worker.
        regions: one for each layer of the layout, in its order, named as the layers are.
        clock: seconds, never going back.
        settle_seconds: how long after the end of a process its bytes may still be on their way.
        connects: whether this side connects to the other.

    Attributes:
        room: host tokens for which the smallest region has bytes.

    Raises:
        ArgumentError: description, regions and engine do not belong together, or settling that cannot be meant.
        DtypeError: `settle_seconds` is no number.
    """

    def __init__(
        self,
        engine: Engine,
        description: Description,
        regions: Sequence[Region],
        *,
        clock: Clock,
        settle_seconds: float,
        connects: bool,
    ) -> None:
        if description.instance != engine.instance:
            raise ArgumentError(
                f"the description is of instance {description.instance}, the engine is {engine.instance}",
                value=description.instance,
                remedy="describe the worker by its engine's instance and endpoint",
            )
        if tuple(region.name for region in regions) != description.layout.layers:
            raise ArgumentError(
                f"regions {[region.name for region in regions]} for layers {description.layout.layers}",
                value=len(regions),
                remedy="register one region a layer under the layer's name, and pass them in the layout's order",
            )
        self.description = description
        self.room = min(region.nbytes for region in regions) // description.layout.item_bytes
        self.regions = tuple(region.index for region in regions)
        self.ignored = 0
        self._engine = engine
        self._clock = clock
        self._settle = _seconds(settle_seconds)
        self._connects = connects
        self._by_name: dict[object, Worker] = {}
        self._ended: set[str] = set()
        self._settling: list[Worker] = []
        self._looked = 0.0

    def accept(self, introduction: bytes, from_worker: str | None = None) -> tuple[Worker, Worker | None]:
        """A worker that has introduced itself, and the earlier instance that has therefore ended.

        Args:
            introduction: what it said.
            from_worker: its name, where the channel knows it.

        Raises:
            HandshakeError: no introduction, one that does not fit this worker, or of an instance that has ended.
            TransferError: it cannot be reached.
        """
        theirs = Description.from_bytes(introduction)
        if from_worker is not None and theirs.worker != from_worker:
            raise HandshakeError(
                f"an introduction of worker {theirs.worker!r} came from {from_worker!r}",
                value=theirs.worker,
                remedy="pass an introduction on as it is, with the name of the worker that sent it",
            )
        check_instance(theirs.instance)
        check_peers(self.description, theirs)
        before = self._by_name.get(theirs.worker)
        if before is not None:
            _check_successor(before.description, theirs)
        if theirs.instance in self._ended:
            raise HandshakeError(
                f"instance {theirs.instance} of {theirs.worker} has ended",
                value=theirs.instance,
                remedy="introduce the instance that runs now",
            )
        if before is not None and before.instance == theirs.instance:
            before.lost = None
            return before, None
        peer = self._engine.connect(theirs.endpoint) if self._connects else None
        worker = Worker(theirs, peer)
        if peer is not None:
            self._check_regions(worker, peer)
        if before is not None:
            self.end(before)
        self._by_name[worker.name] = worker
        return worker, before

    def named(self, name: object) -> Worker:
        """The current instance of a worker.

        Raises:
            HandshakeError: it has not been accepted.
        """
        worker = self._by_name.get(name) if isinstance(name, str) else None
        if worker is None:
            raise HandshakeError(f"worker {name!r} is unknown", value=name, remedy="accept its introduction first")
        return worker

    def regions_of(self, worker: Worker) -> list[RemoteRegion]:
        """The other side's region of each layer, in the order of the layers. The worker is connected."""
        by_name = {} if worker.peer is None else {region.name: region for region in worker.peer.regions.values()}
        return [by_name[layer] for layer in worker.description.layout.layers if layer in by_name]

    def _check_regions(self, worker: Worker, peer: Peer) -> None:
        names = sorted(region.name for region in peer.regions.values())
        if len(self.regions_of(worker)) != len(worker.description.layout.layers) or len(set(names)) != len(names):
            self._engine.disconnect(peer)
            raise HandshakeError(
                f"{worker.name} has regions {names[:12]} for layers {worker.description.layout.layers}",
                value=worker.name,
                remedy="there, register one region a layer under its name before `endpoint()`",
            )

    def end(self, worker: Worker) -> None:
        """Notes that an instance is known to have ended; the first time counts."""
        if worker.settles_in is None:
            if not self._settling:
                self._looked = self._clock()
            worker.settles_in = self._settle
            self._settling.append(worker)
            self._ended.add(worker.instance)
            if worker.peer is not None:
                self._engine.disconnect(worker.peer)

    def let_settle(self) -> None:
        """Time in which this side has run, and looked, counts towards the settling of those that have ended.

        A process that was stopped has not taken what lay in its sockets: a long absence counts as a short one.
        """
        if not self._settling:
            return
        before, self._looked = self._looked, self._clock()
        passed = min(self._looked - before, self._settle / _LOOKS)
        for worker in self._settling:
            worker.settles_in = (worker.settles_in or 0.0) - passed
        self._settling = [worker for worker in self._settling if not worker.settled()]

    def sender_of(self, message: Addressed, name: str) -> Worker | None:
        """Who sent a message, or None, and counted, where it is for or from an instance that is no more.

        Raises:
            HandshakeError: it is from an instance that has not been accepted.
        """
        if message.to != self._engine.instance or message.sender in self._ended:
            self.ignored += 1
            return None
        worker = self.named(name)
        if message.sender != worker.instance:
            raise HandshakeError(
                f"a message of {name!r} from instance {message.sender}; known is {worker.instance}",
                value=message.sender,
                remedy="accept its introduction first",
            )
        return worker


def _seconds(settle: object) -> float:
    if isinstance(settle, bool) or not isinstance(settle, int | float):
        raise DtypeError(f"settle_seconds is {settle!r}", value=settle, remedy="pass seconds")
    if not (math.isfinite(settle) and settle >= 0):
        raise ArgumentError(f"settle_seconds is {settle}", value=settle, remedy="pass 0 or more, and finite")
    return settle


def _check_successor(before: Description, after: Description) -> None:
    """Refuses an instance that cannot be the next of a worker: it would end one that may live."""
    for name in ("rank", "degree"):
        was, now = getattr(before.layout, name), getattr(after.layout, name)
        if was != now:
            raise HandshakeError(
                f"{name} of worker {after.worker!r} was {was}, and is {now} in a new introduction",
                value=(was, now),
                remedy="give each rank a name of its own, and a new name where the group changes",
            )
