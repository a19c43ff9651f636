"""What a writer does for one grant, and when its own memory is no longer read."""

import enum
from collections import OrderedDict
from typing import final

import attrs

from batchstate.errors import TransferError
from batchstate.transport.copies import Ints
from batchstate.transport.engines.base import Handle
from batchstate.transport.messages import Grant
from batchstate.transport.workers import Worker

REMEMBERED = 4096
"""How many closed leases a writer remembers of each receiver."""


class SendState(enum.Enum):
    """OPEN: may write. DONE: all is written. FAILED, ABORTED: no further write begins; some may be under way."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


@final
@attrs.define(eq=False)
class Sending:
    """What is written for one grant. Made by a `Sender` that is granted something.

    Attributes:
        worker: the instance that is written to.
        grant: what it has granted.
        targets: int64[num_tokens], its host token of each token.
        state: final once it is not OPEN.
        reason: why it failed or was aborted.
        sent: tokens for which writes have begun.
        complete: whether the last of them are among these.
        handles: the writes, by chunk id.
        sources_free: a fence: true when no write reads the source tokens any more.
    """

    worker: Worker = attrs.field(repr=False)
    grant: Grant
    targets: Ints = attrs.field(repr=False)
    state: SendState = SendState.OPEN
    reason: str = ""
    sent: int = 0
    complete: bool = False
    handles: list[Handle] = attrs.field(factory=list, repr=False)
    sources_free: "SourcesFree" = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.sources_free = SourcesFree(self)

    @property
    def request(self) -> str:
        """Name of the request."""
        return self.grant.request

    def become(self, state: SendState, reason: str = "") -> bool:
        """Makes the state final; False, and nothing changes, where it is already."""
        if self.state is not SendState.OPEN:
            return False
        self.state, self.reason = state, reason
        return True


@final
@attrs.frozen(eq=False)
class SourcesFree:
    """A fence in the life of a sending: its source tokens are not read any more. Once true, always true.

    It follows `Sender.poll`, which asks the engine.
    """

    sending: Sending

    def query(self) -> bool:
        """Whether its state is final and every write has ended, or the receiver has."""
        if self.sending.state is SendState.OPEN:
            return False
        return self.sending.worker.ended or all(handle.drained for handle in self.sending.handles)

    def wait(self) -> None:
        """Returns if the sources are free. It never blocks: only `Sender.poll` gets on.

        Raises:
            TransferError: they are not.
        """
        if not self.query():
            raise TransferError(
                f"{self.sending!r} may still read its source tokens",
                value=self.sending.grant.serial,
                remedy="poll the sender, and call `peer_ended` when a supervisor saw the receiver's end",
                in_flight=True,
            )


@final
class Closed:
    """The leases of one receiver that are over here, so that a grant of one that arrives late starts nothing.

    It remembers the last `REMEMBERED` one by one; of those before, only that they are not to be told from new ones.
    """

    def __init__(self) -> None:
        self._serials: OrderedDict[int, None] = OrderedDict()
        self._floor = 0

    def __contains__(self, serial: int) -> bool:
        return serial in self._serials

    def add(self, serial: int) -> None:
        """Remembers a lease that is over."""
        self._serials[serial] = None
        while len(self._serials) > REMEMBERED:
            self._floor = max(self._floor, self._serials.popitem(last=False)[0])

    def forgets(self, serial: int) -> bool:
        """Whether a lease is so old that it may have been forgotten."""
        return serial <= self._floor
