"""What both sides of a transfer have in common: who is on the other side, and what is to be said to them."""

import abc
from collections.abc import Sequence

from batchstate.transport.engines.base import Engine
from batchstate.transport.handshake import Description
from batchstate.transport.regions import Region
from batchstate.transport.workers import Clock, Worker, Workers


class Session(abc.ABC):
    """One rank of a worker that transfers KV: a `Sender` or a `Receiver`. Belongs to the thread of its engine.

    Attributes:
        outbox: messages to be carried: name of the worker, and bytes.
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
        self._engine = engine
        self._workers = Workers(
            engine, description, regions, clock=clock, settle_seconds=settle_seconds, connects=connects
        )
        self.outbox: list[tuple[str, bytes]] = []

    @abc.abstractmethod
    def _suspected(self, worker: Worker, reason: str) -> None:
        """What a worker has to do with fails: it may be gone, and may be not."""

    @abc.abstractmethod
    def _gone(self, worker: Worker, reason: str) -> None:
        """What an instance that has ended has to do with fails."""

    def introduce(self) -> bytes:
        """What each worker of the other side passes to its `accept`."""
        self._engine.check_owner("introduce")
        return self._workers.description.to_bytes()

    def accept(self, introduction: bytes, from_worker: str | None = None) -> str:
        """Takes note of a worker, connects to it where this side writes, and returns its name.

        An earlier instance of that name has ended. So introductions under one name are to be passed in the order in
        which its instances started.

        Args:
            introduction: what the other side's `introduce` returned.
            from_worker: name of the worker that the channel has it from: then no other name is believed.

        Raises:
            HandshakeError: no introduction, one that does not fit this worker, of an instance that has ended, of
                another worker than `from_worker`, of another rank or degree than the instance before, or, where this
                side writes, without a region for each layer.
            TransferError: it cannot be reached.
        """
        self._engine.check_owner("accept")
        worker, before = self._workers.accept(introduction, from_worker)
        if before is not None:
            self._gone(before, f"{before.name} was started again")
        return worker.name

    def peer_lost(self, worker: str, reason: str = "lost") -> None:
        """A worker is suspected to be gone: what is under way with it fails. It may still write and be written to.

        So memory that it may write stays taken.

        Raises:
            HandshakeError: it has not been accepted.
        """
        self._engine.check_owner("peer_lost")
        suspected = self._workers.named(worker)
        suspected.lost = reason
        self._suspected(suspected, f"{worker} is suspected to be gone: {reason}")

    def peer_ended(self, worker: str, instance: str | None = None) -> None:
        """A worker is known to have ended: its process was seen to exit. What is under way with it fails.

        Memory that it may have written is free of it once it has settled.

        Args:
            worker: its name.
            instance: which of its instances; without it, the current one.

        Raises:
            HandshakeError: it has not been accepted.
        """
        self._engine.check_owner("peer_ended")
        ended = self._workers.named(worker)
        if instance in (None, ended.instance):
            self._workers.end(ended)
            self._gone(ended, f"{worker} has ended")
