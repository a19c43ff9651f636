"""A lease: memory that others may write for one request, until all of it is there or none of them can write any more.

A lease ends twice. Its *state* says what the request may count on, and is final once it is not WAITING. `ended` says
when the memory is free of writers: free it behind that fence, whatever the state.
"""

import enum
from typing import final

import attrs
import numpy as np

from batchstate.errors import TransferError
from batchstate.transport.copies import Ints
from batchstate.transport.tags import Tag
from batchstate.transport.workers import Worker


class LeaseState(enum.Enum):
    """What a request may count on. DELIVERED: all rows are there. FAILED, ABORTED: they will never count."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"
    ABORTED = "aborted"


@final
@attrs.define(eq=False)
class Share:
    """What one writer writes for a lease.

    Attributes:
        worker: the instance that was granted it.
        total: how many chunks there are; 0 until the last has arrived.
        chunks: ids of those that have arrived.
        drained: whether the writer has said that nothing of it can land any more.
    """

    worker: Worker
    total: int = 0
    chunks: set[int] = attrs.field(factory=set, repr=False)
    drained: bool = False

    def take(self, tag: Tag) -> bool:
        """Counts a chunk; False, and nothing changes, where it was counted before or cannot be one of this writer's."""
        total = self.total or tag.total
        if tag.chunk in self.chunks or self.complete or tag.total not in (0, total):
            return False
        if total and max(tag.chunk, *self.chunks, 0) >= total:
            return False
        self.chunks.add(tag.chunk)
        self.total = total
        return True

    @property
    def complete(self) -> bool:
        """Whether every chunk has arrived, each behind its data."""
        return self.total > 0 and len(self.chunks) == self.total

    @property
    def ended(self) -> bool:
        """Whether nothing of it can land any more."""
        return self.complete or self.drained or self.worker.settled()


@final
@attrs.define(eq=False)
class Lease:
    """One attempt to receive the KV of one request. Made by `Receiver.lease`.

    Attributes:
        request: its name.
        num_tokens: its tokens.
        epoch: nonce of the receiving engine.
        serial: number of the lease; never given twice by one receiver.
        attempt: which attempt of the request it is, from 1 on.
        shares: what each writer writes.
        state: final once it is not WAITING.
        reason: why it failed or was aborted.
        runs: int64[r, 2], the host tokens granted, or None before the grant.
        retried: whether there was another attempt after it.
        ended: a fence: true when no writer can write the memory any more. Never before the state is final.
    """

    request: str
    num_tokens: int
    epoch: str
    serial: int
    attempt: int
    shares: tuple[Share, ...] = attrs.field(repr=False)
    state: LeaseState = LeaseState.WAITING
    reason: str = ""
    runs: Ints | None = attrs.field(default=None, repr=False)
    retried: bool = False
    ended: "Ended" = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.ended = Ended(self)

    def become(self, state: LeaseState, reason: str = "") -> bool:
        """Makes the state final; False, and nothing changes, where it is already."""
        if self.state is not LeaseState.WAITING:
            return False
        self.state, self.reason = state, reason
        return True

    @property
    def complete(self) -> bool:
        """Whether every chunk of every writer has arrived."""
        return all(share.complete for share in self.shares)

    @property
    def tokens(self) -> int:
        """How many host tokens were granted."""
        return 0 if self.runs is None else int(np.sum(self.runs[:, 1]))


@final
@attrs.frozen(eq=False)
class Ended:
    """A fence in the life of a lease: nothing can write its memory any more. Once true, always true."""

    lease: Lease

    def query(self) -> bool:
        """Whether every writer has delivered all, has drained, or has ended and settled; or none was ever granted."""
        if self.lease.state is LeaseState.WAITING:
            return False
        return self.lease.runs is None or all(share.ended for share in self.lease.shares)

    def arrived(self) -> int:
        """How many tokens a request may count on: all of the lease's once it is DELIVERED, and none before or else."""
        return self.lease.num_tokens if self.lease.state is LeaseState.DELIVERED else 0

    def wait(self) -> None:
        """Returns if the lease has ended. It never blocks: only messages and other processes can end a lease.

        Raises:
            TransferError: it has not ended.
        """
        if not self.query():
            raise TransferError(
                f"{self.lease!r} may still be written by "
                + ", ".join(share.worker.name for share in self.lease.shares if not share.ended),
                value=self.lease.serial,
                remedy="poll the receiver, pass it its messages, and `peer_ended` when a supervisor saw a writer's end",
                in_flight=True,
            )
