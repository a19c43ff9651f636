"""The side that writes: takes grants, writes the rows of a request chunk by chunk, and says when it has stopped.

    for transfer in sender.poll(): ...          # new ones are OPEN; later DONE, FAILED or ABORTED, each once
    sender.send(transfer, sources, first, last, after=forward_done)
    pages.release_requests(slots, after=transfer.sources_free)

A transfer that fails or is aborted starts no further write. The receiver hears FAILED at once, and DRAINED when no
write of it can land any more. Messages collect in `outbox`; the caller carries them.
"""

import contextlib
import enum
import time
from collections.abc import Sequence
from typing import SupportsIndex, final

import attrs
import numpy as np

from batchstate import invariants, levels
from batchstate._arrays import converted, count
from batchstate.errors import ArgumentError, BatchStateError, TransferError
from batchstate.mirror import HostLocations, Locations, NewLocations, Slots, StateRow
from batchstate.runtime import Fence, check_fence
from batchstate.transport.engines.base import Copies, Engine, Handle, Ints, Region, Status
from batchstate.transport.plan import check_chunk, check_places, chunked, coalesced, location_rows, owned_by
from batchstate.transport.wire import LARGEST, Grant, Kind, Notice, Tag
from batchstate.transport.workers import (
    Clock,
    Description,
    Session,
    Worker,
    capacities,
    regions_by_layout,
    suffix_of,
)
from batchstate.violations import Violation

_CANNOT_SAY = (BatchStateError, OSError, RuntimeError, ValueError)

IDLE_POLLS = 10_000
"""Polls of a sender in which a transfer may stand still, by default."""
REMEMBERED = 4096
"""Closed leases of each receiver that a writer remembers."""


class TransferState(enum.Enum):
    """OPEN: may write. DONE: all is written. FAILED, ABORTED: no further write begins; some may be under way."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


@final
@attrs.define(eq=False)
class Transfer:
    """The writes for one grant. Made by a `Sender` that is granted memory.

    Attributes:
        worker: the instance that is written to.
        targets: int64[num_tokens], its location of each token of the grant.
        state: final once it is not OPEN.
        sent: tokens for which writes have begun.
        complete: whether the last of them are among these.
        idle: polls since the grant, the last `send` or the last `hold`.
        handles: the writes, by chunk id.
        sources_free: a fence: true when no write reads the source locations any more.
    """

    worker: Worker = attrs.field(repr=False)
    grant: Grant
    targets: Ints = attrs.field(repr=False)
    state: TransferState = TransferState.OPEN
    reason: str = ""
    sent: int = 0
    complete: bool = False
    idle: int = 0
    handles: list[Handle] = attrs.field(factory=list, repr=False)
    sources_free: "SourcesFree" = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.sources_free = SourcesFree(self)

    @property
    def request(self) -> str:
        """Name of the request."""
        return self.grant.request

    def become(self, state: TransferState, reason: str = "") -> bool:
        """Makes the state final; False, and nothing changes, where it was."""
        if self.state is not TransferState.OPEN:
            return False
        self.state, self.reason = state, reason
        return True


@final
@attrs.frozen(eq=False)
class SourcesFree:
    """A fence: the source locations of a transfer are not read any more. It follows `Sender.poll`, and stays true."""

    transfer: Transfer

    def query(self) -> bool:
        """Whether its state is final and every write has ended, or the receiver has."""
        if self.transfer.state is TransferState.OPEN:
            return False
        return self.transfer.worker.ended or all(handle.drained for handle in self.transfer.handles)

    def wait(self) -> None:
        """Never blocks, since only `Sender.poll` gets on. TransferError: the sources are not free."""
        if not self.query():
            problem = f"{self.transfer!r} may still read its source locations"
            remedy = "poll the sender, and call `peer_ended` when a supervisor saw the receiver's end"
            raise TransferError(problem, self.transfer.grant.serial, remedy, in_flight=True)


@final
class Closed(dict[int, None]):
    """The leases of one receiver that are over here, so that a grant of one that arrives late starts nothing.

    It remembers the last `REMEMBERED` one by one; those before cannot be told from new ones.
    """

    _floor = 0

    def add(self, serial: int) -> None:
        """Takes note of a lease that is over."""
        self[serial] = None
        if len(self) > REMEMBERED:
            oldest = next(iter(self))
            self._floor = max(self._floor, oldest)
            del self[oldest]

    def forgets(self, serial: int) -> bool:
        """Whether a lease is so old that it may be over and forgotten."""
        return serial <= self._floor


@final
class Sender(Session):
    """One rank of a prefill worker. Belongs to the thread of its engine.

    Args:
        engine, description, regions, clock: see `Session`.
        holds: index space of their rows: `location` for KV on the device, `host_location` for that of a host pool.
        idle_polls: so often `poll`, once a step, may be called while a transfer stands still.

    Raises:
        ArgumentError: another index space; else as `Session`.
    """

    writes = True
    _hears = (Kind.GRANT, Kind.ABORT)

    def __init__(
        self,
        engine: Engine,
        description: Description,
        regions: Sequence[Region],
        *,
        holds: str = "location",
        idle_polls: SupportsIndex = IDLE_POLLS,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(engine, description, regions, clock=clock, grace_seconds=0.0)
        if holds not in (Locations.unit, HostLocations.unit):
            problem = f"expected holds={Locations.unit!r} or {HostLocations.unit!r}, got {holds!r}"
            raise ArgumentError(problem, holds, "say which memory the regions of this sender are")
        self._holds = holds
        self._idle_polls = count(idle_polls, "idle_polls", least=1)
        self._regions = regions_by_layout(description, regions)
        self._names = {region.index: region.name for region in regions}
        self._live: dict[tuple[str, int], Transfer] = {}  # by instance of the receiver, and serial of its lease
        self._closed: dict[str, Closed] = {}
        self._changed: list[Transfer] = []
        self._left: list[Handle] = []

    def __repr__(self) -> str:
        return f"Sender({self._description.worker}, {len(self._live)} transfers)"

    # Transfers

    def send(
        self,
        transfer: Transfer,
        sources: Locations | HostLocations,
        first: int,
        last: bool,
        *,
        after: Fence,
        state_row: Slots | StateRow | None = None,
    ) -> None:
        """Starts to write the next tokens of a request. Returns at once; see `poll`.

        Args:
            transfer: OPEN, from `poll`.
            sources: integer[k], where the tokens at positions first, first + 1, ... lie here: `PagePool.locations`.
                Until `transfer.sources_free` their pages are nobody else's, whoever lets go of them.
            first: position of the first; the tokens sent so far end there.
            last: whether the request ends with these.
            after: the fence of the forward that wrote them. It is complete: an engine reads memory in the order of no
                stream.
            state_row: with the last tokens, the row here that has the request's states, in the buffers of the
                `per_request` layouts: `HybridSlotPool.state_rows`, or its slot, of a request that is here; None where
                this worker has none.

        Raises:
            TransferError: it has failed or was aborted, or the engine cannot write: then it has failed now.
            ArgumentError, ShapeError, DtypeError, Violation: these locations are refused, or are not written yet.
                Nothing was sent, and it is as OPEN as before; where an engine refuses a later write of several, it has
                failed.
        """
        self._check_own("send", transfer, transfer.grant.to)
        check_fence(after, "send", needed=True)
        writes = self._planned(transfer, sources, first, last, state_row)
        if not after.query():
            problem = f"{transfer!r}: send of {len(sources)} tokens that may not be written yet"
            remedy = "send when the fence of the forward that writes them is complete; ask it in each step"
            raise ArgumentError(problem, after, remedy)
        if isinstance(sources, Locations):
            sources.keep(transfer.sources_free, "send")
        before = len(transfer.handles)
        try:
            for copies in writes:
                self._write(transfer, copies, last and copies is writes[-1])
        except BaseException as error:
            # Arguments that are refused before anything was sent leave it open: the caller may pass others.
            if len(transfer.handles) > before or not isinstance(error, ArgumentError | Violation):
                self._fail(transfer, f"a write was refused: {getattr(error, 'problem', error)}")
            raise
        transfer.sent += len(sources)
        transfer.complete, transfer.idle = bool(last), 0

    def poll(self) -> list[Transfer]:
        """The transfers that are new, or whose state became final, since the last time. Never waits.

        Violation: TRANSFER_IDLE, at `cheap`: one has stood still for more than `idle_polls` polls. Reported once; it
            stays OPEN, and the next poll goes on.
        """
        self._engine.check_owner("poll")
        self._count_idle()
        self._count_grace()
        self._left = [handle for handle in self._left if not self._drain(handle)]
        for transfer in list(self._live.values()):
            self._follow(transfer)
        changed, self._changed = self._changed, []
        return changed

    def transfers(self) -> tuple[Transfer, ...]:
        """Those that are open, or may still write."""
        self._engine.check_owner("transfers")
        return tuple(self._live.values())

    def fail(self, transfer: Transfer, reason: str) -> None:
        """Gives a transfer up: its KV will not come. Nothing happens where its state is final."""
        self._check_own("fail", transfer, transfer.grant.to)
        self._fail(transfer, reason)

    def hold(self, transfer: Transfer) -> None:
        """Says that the request of a transfer is known here, and waits for its turn: `idle` begins anew."""
        self._check_own("hold", transfer, transfer.grant.to)
        transfer.idle = 0

    def _count_idle(self) -> None:
        late = []
        for transfer in self._live.values():
            if transfer.state is TransferState.OPEN and not transfer.complete:
                transfer.idle += 1
                if transfer.idle > self._idle_polls:
                    late.append(transfer)
        if late and levels.cheap:
            polls, requests = np.array([transfer.idle for transfer in late]), [transfer.request for transfer in late]
            late[0].idle = -LARGEST  # reported once
            invariants.transfer_idle(polls, self._idle_polls, requests, object=self, operation="poll")

    # Messages

    def _take(self, worker: Worker, message: Grant | Notice) -> None:
        """A grant of memory that the receiver does not have is answered with FAILED and DRAINED."""
        key, closed = (worker.instance, message.serial), self._closed.setdefault(worker.instance, Closed())
        transfer = self._live.get(key)
        if isinstance(message, Notice):
            if transfer is None:
                closed.add(message.serial)
                self._say(worker, Kind.DRAINED, message.serial)
            elif transfer.become(TransferState.ABORTED, message.reason):
                self._changed.append(transfer)
        elif transfer is None and message.serial not in closed:
            refusal = "the grant came too late" if closed.forgets(message.serial) else _refusal(worker, message)
            if refusal:
                closed.add(message.serial)
                self._say(worker, Kind.FAILED, message.serial, refusal)
                self._say(worker, Kind.DRAINED, message.serial)
            else:
                self._live[key] = transfer = Transfer(worker, message, message.targets)
                self._changed.append(transfer)

    # Writes

    def _planned(
        self,
        transfer: Transfer,
        locations: Locations | HostLocations,
        first: int,
        last: bool,
        state_row: Slots | StateRow | None,
    ) -> list[Copies]:
        """The writes, checked."""
        if transfer.state is not TransferState.OPEN:
            raise TransferError(f"{transfer!r}: {transfer.reason}", transfer.state, "send while it is OPEN")
        grant, sources = transfer.grant, self._sources(locations)
        end = grant.first + grant.num_tokens
        begun = grant.first + transfer.sent
        if transfer.complete or first != begun:
            sent = f"{transfer.sent} of {grant.first} to {end - 1} are sent" + (", all" if transfer.complete else "")
            problem = f"{transfer!r}: expected the tokens from {begun} on, got those from {first} on; {sent}"
            raise ArgumentError(problem, first, "send the tokens that were granted once, in order")
        layouts = self._description.layouts
        unit = max(layout.unit for layout in layouts)
        check_chunk(first, sources.size, end, max(unit, layouts[0].page_size), last)
        targets = transfer.targets[transfer.sent : transfer.sent + sources.size]
        rest = -targets.size % unit  # of a page that goes as a whole
        owned_by(np.append(targets, targets[-1:] + np.arange(1, rest + 1)) if rest else targets, grant.ranges)
        states = self._states(state_row, last)
        theirs = transfer.worker.description
        there = regions_by_layout(theirs, transfer.worker.regions(grant.holds))
        parts = []
        by_kind = zip(self._description.layouts, theirs.layouts, self._regions, there, strict=True)
        for ours, other, here, regions in by_kind:
            target_states = np.full_like(states, grant.state_row)
            pair = (states, target_states) if ours.per_request else (sources, targets)
            parts.append(location_rows(*pair, ours, other, here, regions))
            if levels.full and transfer.worker.peer is not None:
                names = self._names, {at: region.name for at, region in transfer.worker.peer.regions.items()}
                suffix = suffix_of(grant.holds, other)
                check_places(parts[-1], ours, other, *names, suffix, object=self, operation="send")
        return chunked(coalesced(Copies.cat(parts)), self._engine.capabilities.max_rows)

    def _states(self, row: Slots | StateRow | None, last: bool) -> Ints:
        """Where the states lie here, int64[1], with the last tokens; int64[0] before, and where this rank has none."""
        states = np.empty(0, dtype=np.int64)
        if row is not None:
            row.check_kept("send")
            states = row.exact_host("send: state_row")
        wanted = last and any(layout.per_request and layout.stage for layout in self._description.layouts)
        if states.size != wanted or not states.all():
            remedy = "if this worker has buffers of states, pass their row with the last tokens, and only then"
            problem = f"send: expected {'a' if wanted else 'no'} state_row, got {states.tolist()}"
            raise ArgumentError(problem, row, remedy)
        return states

    def _sources(self, locations: Locations | HostLocations) -> Ints:
        """Where the tokens lie, int64[k], in the index space of the regions."""
        invariants.unit_mismatch(self._holds, str(locations.unit), object=self, operation="send")
        if isinstance(locations, NewLocations):
            remedy = "`pages.locations(slots, first, stop)` has those of tokens that are written and accepted"
            raise ArgumentError(f"send of tokens that nothing says are written: {locations!r}", locations, remedy)
        locations.check_kept("send")
        sources, dtype = locations.exact_host("send: source locations"), np.dtype(np.int64)
        return sources if sources.dtype == dtype else converted(sources, dtype, "source locations")

    def _write(self, transfer: Transfer, copies: Copies, last: bool) -> None:
        peer = transfer.worker.peer
        if peer is None:
            raise TransferError(f"{transfer.worker.name} is not connected", transfer, "accept its introduction first")
        chunk = len(transfer.handles)
        grant = transfer.grant
        tag = Tag(grant.sender, grant.serial, grant.attempt, grant.writer, chunk, chunk + 1 if last else 0).packed()
        try:
            transfer.handles.append(self._engine.write(peer, copies, tag))
        except BaseException:
            begun = self._engine.begun(tag)
            if begun is not None:  # bytes may be under way: it is followed until it has drained
                transfer.handles.append(begun)
            raise

    def _follow(self, transfer: Transfer) -> None:
        for handle in transfer.handles:
            if self._status(handle) in (Status.FAILED, Status.UNKNOWN):
                self._fail(transfer, handle.reason or f"a write ended as {handle.status.value}")
        if transfer.state is TransferState.OPEN:
            if transfer.complete and all(handle.status is Status.DONE for handle in transfer.handles):
                transfer.become(TransferState.DONE)
                self._changed.append(transfer)
                self._close(transfer)
            return
        under_way = [handle for handle in transfer.handles if not self._drain(handle)]  # asks each, not up to the first
        if not under_way:
            self._say(transfer.worker, Kind.DRAINED, transfer.grant.serial)
            self._close(transfer)

    def _status(self, handle: Handle) -> Status:
        """The status of a write; UNKNOWN where its engine raises, so that it holds up no other."""
        try:
            return self._engine.poll(handle) if handle.status is Status.PENDING else handle.status
        except _CANNOT_SAY as error:
            handle.status, handle.reason = Status.UNKNOWN, f"its engine cannot say how it ended: {error!r}"
            return handle.status

    def _drain(self, handle: Handle) -> bool:
        with contextlib.suppress(*_CANNOT_SAY):
            return handle.drained or self._engine.drain(handle)
        return False

    def _fail(self, transfer: Transfer, reason: str) -> None:
        if transfer.become(TransferState.FAILED, reason):
            self._changed.append(transfer)
            if not transfer.worker.ended:
                self._say(transfer.worker, Kind.FAILED, transfer.grant.serial, reason)

    def _close(self, transfer: Transfer) -> None:
        del self._live[transfer.worker.instance, transfer.grant.serial]
        self._closed.setdefault(transfer.worker.instance, Closed()).add(transfer.grant.serial)

    def _fail_worker(self, worker: Worker, reason: str) -> None:
        """Transfers to a worker that has ended end too; their writes are followed until they have drained."""
        for key, transfer in list(self._live.items()):
            if transfer.worker is worker:
                self._fail(transfer, reason)
                if worker.ended:
                    self._left += transfer.handles
                    del self._live[key]
        if worker.ended:
            self._closed.pop(worker.instance, None)


def _refusal(worker: Worker, grant: Grant) -> str:
    """Why a grant is refused: locations outside the receiver's memory. Else nothing."""
    regions = worker.regions(grant.holds)
    if not regions:
        return f"the grant is of {grant.holds}s, and {worker.name} has registered no such memory for all of its layers"
    capacity, states = capacities(worker.description, regions)
    if grant.state_row > max(states - 1, 0):
        return f"the grant has row {grant.state_row} for states, {worker.name} has {states}"
    if grant.ranges.size and int(grant.ranges.sum(axis=1).max()) > capacity:
        return f"the grant ends at {grant.holds} {grant.ranges.sum(axis=1).max()}, {worker.name} has {capacity}"
    return ""
