"""The side that writes: takes grants, writes the rows of a request chunk by chunk, and says when it has stopped.

    for sending in sender.poll(): ...           # new ones are OPEN; later DONE, FAILED or ABORTED, each once
    sender.send(sending, source_tokens, first, last)
    pages.free(..., after=sending.sources_free)

A sending that fails or is aborted starts no further write. The receiver hears FAILED at once, and DRAINED when no write
of it can land any more. What is to be said collects in `outbox`; the caller carries it.
"""

import enum
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate._arrays import count
from batchstate.errors import ArgumentError, BatchStateError, DtypeError, TransferError
from batchstate.transport._session import Session
from batchstate.transport.engines.base import Engine, Handle, Status
from batchstate.transport.handshake import Description
from batchstate.transport.plan import check_chunk, chunked, coalesced, indices_of, owned_by, token_rows
from batchstate.transport.regions import Copies, Ints, Region
from batchstate.transport.wire import Grant, Kind, Notice, Tag, packed, unpacked
from batchstate.transport.workers import Clock, Worker
from batchstate.violations import Violation

# What a writer does for one grant, and when its own memory is no longer read.

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


Key = tuple[str, int]
"""Instance of a receiver, and serial of its lease."""


@final
class Sender(Session):
    """One rank of a prefill worker. Belongs to the thread of its engine.

    Args:
        engine: its regions registered.
        description: of this worker.
        regions: one for each layer, in the layout's order, named as the layers are.
        max_bytes: most bytes of one write, or None.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        engine: Engine,
        description: Description,
        regions: Sequence[Region],
        *,
        max_bytes: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(engine, description, regions, clock=clock, settle_seconds=0.0, connects=True)
        self._max_bytes = None if max_bytes is None else count(max_bytes, "max_bytes", least=1)
        self._live: dict[Key, Sending] = {}
        self._closed: dict[str, Closed] = {}
        self._changed: list[Sending] = []
        self._left: list[Handle] = []

    def __repr__(self) -> str:
        return f"Sender({self._workers.description.worker}, {len(self._live)} sendings)"

    # Sendings

    def on_message(self, message: bytes, from_worker: str) -> None:
        """Takes a message of a receiver. Repeated and late ones change nothing.

        Raises:
            ArgumentError: malformed, or none that a receiver sends.
            HandshakeError: of a worker that has not been accepted.

        A grant of memory that the receiver does not have is answered with FAILED and DRAINED.
        """
        self._engine.check_owner("on_message")
        heard = unpacked(message)
        if isinstance(heard, Notice) and heard.kind is not Kind.ABORT:
            raise ArgumentError(f"{heard!r} is nothing that a receiver says", value=heard, remedy="swap the two sides")
        worker = self._workers.sender_of(heard, from_worker)
        if worker is None:
            return
        if isinstance(heard, Grant):
            self._granted(worker, heard)
        else:
            self._aborted(worker, heard)

    def send(self, sending: Sending, source_tokens: npt.ArrayLike, first: int, last: bool) -> None:
        """Starts to write the next tokens of a request. Returns at once; see `poll`.

        Args:
            sending: OPEN, from `poll`.
            source_tokens: int64[k], where the tokens at positions first, first + 1, ... lie here. They stay as they are
                until `sending.sources_free`.
            first: position of the first; what has been sent so far ends there.
            last: whether the request ends with these.

        Raises:
            TransferError: it has failed or was aborted, or the engine cannot write: then it has failed now.
            ArgumentError, ShapeError, DtypeError, Violation: these tokens cannot be meant. Nothing was sent, and it is
                as OPEN as before; where an engine refuses a later write of several, it has failed.
        """
        self._engine.check_owner("send")
        self._check_mine(sending)
        writes = self._planned(sending, source_tokens, first, last)
        before = len(sending.handles)
        try:
            for copies in writes:
                self._write(sending, copies, last and copies is writes[-1])
        except BaseException as error:
            # Refused before anything was sent, for what the caller has passed: he may pass something else.
            if len(sending.handles) > before or not isinstance(error, ArgumentError | Violation):
                self._fail(sending, f"a write was refused: {getattr(error, 'problem', error)}")
            raise
        sending.sent += np.size(source_tokens)
        sending.complete = bool(last)

    def poll(self) -> list[Sending]:
        """The sendings that are new, or whose state became final, since the last time. Never waits."""
        self._engine.check_owner("poll")
        self._workers.let_settle()
        self._left = [handle for handle in self._left if not self._drain(handle)]
        for sending in list(self._live.values()):
            self._look_at(sending)
        changed, self._changed = self._changed, []
        return changed

    def sendings(self) -> tuple[Sending, ...]:
        """Those that are open, or may still write."""
        self._engine.check_owner("sendings")
        return tuple(self._live.values())

    def fail(self, sending: Sending, reason: str) -> None:
        """Gives a sending up: its KV will not come. Nothing happens where its state is final.

        Raises:
            ArgumentError: a sending of another sender.
        """
        self._engine.check_owner("fail")
        self._check_mine(sending)
        self._fail(sending, reason)

    # Messages

    def _granted(self, worker: Worker, grant: Grant) -> None:
        key = (worker.instance, grant.serial)
        closed = self._closed.setdefault(worker.instance, Closed())
        if key in self._live or grant.serial in closed:
            return
        refusal = "the grant came too late" if closed.forgets(grant.serial) else self._refusal(worker, grant)
        if refusal:
            closed.add(grant.serial)
            self._say(worker, Kind.FAILED, grant.serial, refusal)
            self._say(worker, Kind.DRAINED, grant.serial)
            return
        self._live[key] = sending = Sending(worker, grant, grant.targets)
        self._changed.append(sending)

    def _aborted(self, worker: Worker, notice: Notice) -> None:
        sending = self._live.get((worker.instance, notice.serial))
        if sending is None:
            self._closed.setdefault(worker.instance, Closed()).add(notice.serial)
            self._say(worker, Kind.DRAINED, notice.serial)
        elif sending.become(SendState.ABORTED, notice.reason):
            self._changed.append(sending)

    def _say(self, worker: Worker, kind: Kind, serial: int, reason: str = "") -> None:
        notice = Notice(kind, self._engine.instance, worker.instance, serial, reason)
        self.outbox.append((worker.name, packed(notice)))

    # Writes

    def _refusal(self, worker: Worker, grant: Grant) -> str:
        """Why a grant is not taken: host tokens outside the receiver's memory. Else nothing."""
        regions = self._workers.regions_of(worker)
        item_bytes = worker.description.layout.item_bytes
        room = min(region.nbytes for region in regions) // item_bytes
        if grant.runs.size and int(grant.runs.sum(axis=1).max()) > room:
            return f"the grant ends at host token {grant.runs.sum(axis=1).max()}, {worker.name} has {room}"
        return ""

    def _planned(self, sending: Sending, source_tokens: npt.ArrayLike, first: int, last: bool) -> list[Copies]:
        """The writes, once everything that can be checked has been."""
        if sending.state is not SendState.OPEN:
            raise TransferError(f"{sending!r}: {sending.reason}", value=sending.state, remedy="send what is OPEN")
        if not isinstance(last, bool | np.bool_):
            raise DtypeError(f"last is {last!r}", value=last, remedy="pass True or False")
        tokens = indices_of(source_tokens, "source tokens")
        layout, theirs = self._workers.description.layout, sending.worker.description.layout
        begin = count(first, "first")
        check_chunk(begin, tokens.size, sending.grant.num_tokens, layout.page_size, last)
        if sending.complete or begin != sending.sent:
            raise ArgumentError(
                f"{sending!r}: tokens from {begin} on, {sending.sent} are sent" + (", all" if sending.complete else ""),
                value=begin,
                remedy="send the tokens of a request once, in order",
            )
        targets = sending.targets[begin : begin + tokens.size]
        owned_by(targets, sending.grant.runs)
        there = [region.index for region in self._workers.regions_of(sending.worker)]
        rows = token_rows(tokens, targets, layout, theirs, self._workers.regions, there)
        return chunked(coalesced(rows), self._engine.capabilities.max_rows, self._max_bytes)

    def _write(self, sending: Sending, copies: Copies, last: bool) -> None:
        peer = sending.worker.peer
        if peer is None:
            raise TransferError(f"{sending.worker.name} is not connected", value=sending, remedy="accept it first")
        chunk = len(sending.handles)
        grant = sending.grant
        tag = Tag(grant.sender, grant.serial, grant.attempt, grant.writer, chunk, chunk + 1 if last else 0)
        begun: Handle | None = None
        try:
            begun = self._engine.write(peer, copies, tag.packed())
        finally:  # also what was interrupted, once bytes may be under way
            if begun is None:
                begun = self._engine.begun(tag.packed())
            if begun is not None:
                sending.handles.append(begun)

    def _look_at(self, sending: Sending) -> None:
        """Follows the writes of one sending."""
        for handle in sending.handles:
            if self._status(handle) in (Status.FAILED, Status.UNKNOWN):
                self._fail(sending, handle.reason or f"a write ended as {handle.status.value}")
        if sending.state is SendState.OPEN:
            if sending.complete and all(handle.status is Status.DONE for handle in sending.handles):
                sending.become(SendState.DONE)
                self._changed.append(sending)
                self._close(sending)
        elif self._drained(sending):
            self._say(sending.worker, Kind.DRAINED, sending.grant.serial)
            self._close(sending)

    def _drained(self, sending: Sending) -> bool:
        """Whether no write of it can land any more. Each is asked: asking is what lets an engine find out."""
        open_ones = [handle for handle in sending.handles if not self._drain(handle)]
        return not open_ones

    def _status(self, handle: Handle) -> Status:
        """Where a write is. One that its engine cannot be asked about is UNKNOWN: it holds up no other."""
        try:
            return self._engine.poll(handle) if handle.status is Status.PENDING else handle.status
        except (BatchStateError, OSError, RuntimeError, ValueError) as error:
            handle.status, handle.reason = Status.UNKNOWN, f"its engine cannot say how it ended: {error!r}"
            return handle.status

    def _drain(self, handle: Handle) -> bool:
        try:
            return handle.drained or self._engine.drain(handle)
        except (BatchStateError, OSError, RuntimeError, ValueError):  # it cannot be asked: so not
            return False

    def _check_mine(self, sending: object) -> None:
        if not isinstance(sending, Sending) or sending.grant.to != self._engine.instance:
            raise ArgumentError(
                f"{sending!r} is no sending of {self!r}",
                value=sending,
                remedy="pass what `poll` of this sender returned",
            )

    def _fail(self, sending: Sending, reason: str) -> None:
        if sending.become(SendState.FAILED, reason):
            self._changed.append(sending)
            if not sending.worker.ended:
                self._say(sending.worker, Kind.FAILED, sending.grant.serial, reason)

    def _close(self, sending: Sending) -> None:
        del self._live[sending.worker.instance, sending.grant.serial]
        self._closed.setdefault(sending.worker.instance, Closed()).add(sending.grant.serial)

    def _suspected(self, worker: Worker, reason: str) -> None:
        for sending in list(self._live.values()):
            if sending.worker is worker:
                self._fail(sending, reason)

    def _gone(self, worker: Worker, reason: str) -> None:
        """Ends what was sent to an instance that has ended. Its writes are followed until they have drained."""
        for key, sending in list(self._live.items()):
            if sending.worker is worker:
                self._fail(sending, reason)
                self._left += sending.handles
                del self._live[key]
        self._closed.pop(worker.instance, None)
