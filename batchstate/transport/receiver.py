"""The side whose memory is written: makes leases, grants memory to writers, and says what has arrived.

    lease = receiver.lease("request 7", num_tokens, ["prefill-0", "prefill-1"])
    (memory,) = host.take(num_tokens, slot, writer=lease.ended)  # or `HiSparse.reserve`
    memory = pages.take(num_pages, writer=lease.ended)           # or, for this request, pages of the device
    receiver.grant(lease, memory)
    ...
    for lease in receiver.poll(): ...           # DELIVERED, FAILED or ABORTED, each once

A lease ends twice. Its *state* says what the request may count on, and is final once it is not WAITING. `ended` says
when the memory is free of writers. Only memory that is kept until then, whatever the state, can be granted. Messages to
other workers collect in `outbox`; the caller carries them, in any order, repeated if it must.
"""

import enum
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast, final

import attrs
import numpy as np

from batchstate import levels
from batchstate._arrays import count
from batchstate.errors import ArgumentError, TransferError, expected
from batchstate.kv.host_pool import HostRanges
from batchstate.kv.pages import PageLease
from batchstate.transport.engines.base import Delivery, Engine, Ints, Region
from batchstate.transport.plan import check_sources
from batchstate.transport.wire import (
    HOST,
    MOST_ATTEMPTS,
    MOST_TEXT,
    MOST_TOKENS,
    Grant,
    Kind,
    Notice,
    Tag,
    check_ranges,
    packed,
)
from batchstate.transport.workers import Clock, Description, Session, Worker

Memory = HostRanges | PageLease
"""Memory that can be granted: host locations, or device pages."""


class LeaseState(enum.Enum):
    """DELIVERED: all rows are there. FAILED, ABORTED: they will never count."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"
    ABORTED = "aborted"


@final
@attrs.define(eq=False)
class WriterProgress:
    """Chunks of one writer of a lease that have arrived.

    Attributes:
        total: number of its chunks; 0 until the last has arrived.
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
        return self.complete or self.drained or self.worker.quiet


@final
@attrs.define(eq=False)
class Lease:
    """One attempt to receive tokens of one request, from `first` on. Made by `Receiver.lease`.

    Attributes:
        epoch: nonce of the receiving engine.
        serial: number of the lease; never given twice by one receiver.
        attempt: number of the attempt of the request, from 1 on.
        state: final once it is not WAITING.
        memory: that was granted, or None for none.
        ranges: int64[r, 2], the locations granted, or None before the grant.
        state_row: the row granted for states; 0 for none.
        retried: whether there was another attempt after it.
        ended: a fence: true when no writer can write the memory any more. Never before the state is final.
        delivered: a fence: true when the lease is DELIVERED.
    """

    request: str
    first: int
    num_tokens: int
    epoch: str
    serial: int
    attempt: int
    writers: tuple[WriterProgress, ...] = attrs.field(repr=False)
    state: LeaseState = LeaseState.WAITING
    reason: str = ""
    memory: Memory | None = attrs.field(default=None, repr=False)
    ranges: Ints | None = attrs.field(default=None, repr=False)
    state_row: int = 0
    retried: bool = False
    ended: "Ended" = attrs.field(init=False, repr=False)
    delivered: "Delivered" = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.ended = Ended(self)
        self.delivered = Delivered(self)

    def become(self, state: LeaseState, reason: str = "") -> bool:
        """Makes the state final; False, and nothing changes, where it was."""
        if self.state is not LeaseState.WAITING:
            return False
        self.state, self.reason = state, reason
        return True

    @property
    def complete(self) -> bool:
        """Whether every chunk of every writer has arrived."""
        return all(writer.complete for writer in self.writers)

    @property
    def holds(self) -> str:
        """Index space of the ranges."""
        return HOST if self.memory is None else self.memory.holds

    @property
    def tokens(self) -> int:
        """Locations granted."""
        return 0 if self.ranges is None else int(np.sum(self.ranges[:, 1]))


@final
@attrs.frozen(eq=False)
class Ended:
    """A fence: nothing can write the memory of a lease any more. Once true, always true."""

    lease: Lease

    def query(self) -> bool:
        """Whether every writer has delivered all, drained, or ended a grace period ago; or none was ever granted."""
        if self.lease.state is LeaseState.WAITING:
            return False
        return self.lease.ranges is None or all(writer.ended for writer in self.lease.writers)

    def arrived(self) -> int:
        """Tokens that a request may count on: all of the lease's once it is DELIVERED, and none before or else."""
        return self.lease.num_tokens if self.lease.state is LeaseState.DELIVERED else 0

    def wait(self) -> None:
        """Never blocks, since only messages and other processes end a lease. TransferError: it has not ended."""
        if not self.query():
            names = ", ".join(writer.worker.name for writer in self.lease.writers if not writer.ended)
            problem = f"{self.lease!r} may still be written by {names}"
            remedy = "poll the receiver, pass it its messages, and `peer_ended` when a supervisor saw a writer's end"
            raise TransferError(problem, self.lease.serial, remedy, in_flight=True)


@final
@attrs.frozen(eq=False)
class Delivered:
    """A fence: all rows of a lease are there. Never, where it fails. For ranks that admit together."""

    lease: Lease

    def query(self) -> bool:
        """Whether the lease is DELIVERED."""
        return self.lease.state is LeaseState.DELIVERED


@final
@attrs.define
class Ignored:
    """Numbers of tags and messages that were not counted.

    Attributes:
        duplicate: tags that had arrived before.
        late: tags of leases that have ended.
        foreign: tags of another instance, writer or library, and chunks that a writer cannot have.
        notices: messages about leases that have ended.
    """

    duplicate: int = 0
    late: int = 0
    foreign: int = 0
    notices: int = 0


@final
class Receiver(Session):
    """One rank of a decode worker. Belongs to the thread of its engine.

    Args:
        engine, description, regions, device, clock: see `Session`. Only this receiver asks the engine for completions.
            Without memory of a host pool `regions` are empty.
        grace_seconds: how long after the end of a process its bytes may still be on their way. Time in which `poll` is
            not called counts little: bytes in the sockets of a process that stands still stay there.

    Attributes:
        ignored: numbers of tags and messages that were not counted.
    """

    writes = False
    _hears = (Kind.FAILED, Kind.DRAINED)

    def __init__(
        self,
        engine: Engine,
        description: Description,
        regions: Sequence[Region],
        device: Sequence[Region] = (),
        *,
        clock: Clock = time.monotonic,
        grace_seconds: float = 1.0,
    ) -> None:
        super().__init__(engine, description, regions, device, clock=clock, grace_seconds=grace_seconds)
        self._leases: dict[int, Lease] = {}
        self._changed: list[Lease] = []
        self._serial = 0
        self._pools: dict[str, int] = {}  # by what their memory holds, of what was granted
        self.ignored = Ignored()

    def __repr__(self) -> str:
        return f"Receiver({self._description.worker}, {len(self._leases)} leases)"

    # Leases

    def lease(
        self, request: str, num_tokens: int, writers: Sequence[str], *, first: int = 0, attempt: int = 1
    ) -> Lease:
        """A lease, before any memory is taken for it.

        Args:
            request: its name, for the writers.
            num_tokens: its tokens that are to come.
            writers: names of the workers that hold its KV, once each: all that `plan.sources_of` names, of every
                pipeline stage.
            first: position of the first of them: those before are here already, or come by leases of their own. It
                begins a page, on each side.
            attempt: which attempt of the request it is.

        Raises:
            HandshakeError: a writer has not been accepted.
            ArgumentError: these writers do not hold all of it, or hold some of it twice; more tokens or attempts than a
                message can say.
            TransferError: a writer is gone.
        """
        self._engine.check_owner("lease")
        if not writers:
            problem = f"expected the names of writers, got {writers!r}"
            raise ArgumentError(problem, writers, "pass a list of at least one name")
        total = count(num_tokens, "num_tokens", most=MOST_TOKENS)
        begin, size = count(first, "first", most=MOST_TOKENS - total), self._description.layout.page_size
        if begin % size:
            problem = f"expected `first` to begin a page of {size}, got {begin}"
            raise ArgumentError(problem, begin, f"begin at {begin - begin % size}")
        which = count(attempt, "attempt", least=1, most=MOST_ATTEMPTS)
        name: Any = request
        if not isinstance(name, str) or len(request) > MOST_TEXT:
            remedy = "pass its name as a string"
            raise expected("lease: request", f"a name of at most {MOST_TEXT} characters", request, remedy)
        workers = tuple(map(self._named, writers))
        for worker in workers:
            if worker.ended or worker.lost is not None:
                problem = f"{worker.name} is gone: {worker.lost or 'it has ended'}"
                raise TransferError(problem, worker.name, "accept its next introduction, or use other writers")
        check_sources(self._description.layouts, tuple(worker.description.layouts for worker in workers))
        self._serial += 1
        epoch = self._engine.instance
        lease = Lease(request, begin, total, epoch, self._serial, which, tuple(map(WriterProgress, workers)))
        self._leases[lease.serial] = lease
        return lease

    def retry(self, lease: Lease, writers: Sequence[str] | None = None) -> Lease:
        """The next attempt of a request: a new lease, for other memory, that nothing of the last one can touch.

        Raises:
            ArgumentError: the last attempt has not failed, or had its next one already; else as `lease`.
        """
        self._check_own("retry", lease, lease.epoch)
        if lease.state not in (LeaseState.FAILED, LeaseState.ABORTED):
            raise ArgumentError(f"{lease!r} has not failed", lease.serial, "retry it once it fails")
        if lease.retried:
            raise ArgumentError(f"{lease!r} was retried already", lease.serial, "use its last attempt")
        names = [writer.worker.name for writer in lease.writers] if writers is None else writers
        following = self.lease(lease.request, lease.num_tokens, names, first=lease.first, attempt=lease.attempt + 1)
        lease.retried = True
        return following

    def grant(self, lease: Lease, memory: Memory | None, states: HostRanges | None = None) -> None:
        """Lets the writers of a lease write memory of this worker: one message for each of them goes to the outbox.

        Args:
            lease: waiting, not granted before.
            memory: for its tokens from the first on: from `HiSparse.reserve` or `HostKVPool.take`, or of the device
                from `PagePool.take`, with `writer=lease.ended`, so that it is not free before the writers have stopped.
                None for a request without tokens.
            states: one row for the request's states, taken in the same way from the pool that has the buffers of the
                `per_request` layouts. None without such layouts.

        Raises:
            ArgumentError: granted before, memory that is not kept behind `lease.ended`, does not hold the tokens, lies
                outside the regions, is of another pool than what was granted before, or that another lease may still
                write; states without buffers for them, or none for some.
            TransferError: the lease is not waiting any more: a writer was lost, or it was aborted.
            Violation: as `poll`.
        """
        self._check_own("grant", lease, lease.epoch)
        ranges, holds = _kept_behind(lease, memory), HOST if memory is None else memory.holds
        if lease.state is not LeaseState.WAITING:
            raise TransferError(f"{lease!r}: {lease.reason}", lease.serial, "free the memory, and retry")
        if lease.ranges is not None or self._leases.get(lease.serial) is not lease:
            raise ArgumentError(f"{lease!r} is granted already", lease.serial, "grant each once")
        check_ranges(ranges, lease.num_tokens)
        state_row = self._state_row(lease, states)
        end, capacity = int(ranges.sum(axis=1).max(initial=0)), self._capacities.get(holds, (0, 0))[0]
        remedy = "grant memory of the pool whose regions the receiver was made with"
        if end > capacity:
            problem = f"expected ranges below {holds} {capacity}, got one up to {end}"
            raise ArgumentError(problem, end, remedy)
        pools = {where: taken.pool_id for where, taken in ((holds, memory), ("states", states)) if taken is not None}
        for where, pool_id in pools.items():
            if self._pools.get(where, pool_id) != pool_id:
                problem = f"{lease!r}: grant of a {where} of another pool than those granted before"
                raise ArgumentError(problem, memory, remedy)
        self._check_kept("grant")
        _check_unleased(lease, ranges, holds, state_row, self._leases.values())
        said = lease.serial, lease.attempt, lease.request
        tokens = lease.first, lease.num_tokens
        messages = [
            (
                to.name,
                packed(Grant(self._engine.instance, to.instance, *said, index, *tokens, holds, ranges, state_row)),
            )
            for index, to in enumerate(writer.worker for writer in lease.writers)
        ]
        self._pools |= pools
        lease.memory, lease.ranges, lease.state_row = memory, ranges.copy(), state_row
        self.outbox += messages

    def abort(self, lease: Lease, reason: str = "aborted") -> None:
        """Gives a lease up; its writers are told. Nothing happens where its state is final."""
        self._check_own("abort", lease, lease.epoch)
        self._stop(lease, LeaseState.ABORTED, reason)

    def poll(self) -> list[Lease]:
        """The leases whose state became final since the last time, each once. Never waits.

        Violation: SLOT_STALE_HANDLE, at `cheap`: device pages that a writer may still write are another's.
        """
        self._engine.check_owner("poll")
        self._check_kept("poll")
        for delivery in self._engine.completions():
            self._arrive(delivery)
        self._count_grace()
        changed, self._changed = self._changed, []
        for lease in [lease for lease in self._leases.values() if lease.ended.query()]:
            del self._leases[lease.serial]
        return changed

    def leases(self) -> tuple[Lease, ...]:
        """Those that have not ended, as of the last `poll`."""
        self._engine.check_owner("leases")
        return tuple(self._leases.values())

    # Parts

    def _check_kept(self, operation: str) -> None:
        for lease in self._leases.values() if levels.cheap else ():
            if isinstance(lease.memory, PageLease) and not lease.ended.query():
                lease.memory.check_kept(operation)

    def _take(self, worker: Worker, message: Grant | Notice) -> None:
        notice = cast(Notice, message)
        lease = self._leases.get(notice.serial)
        writer = None if lease is None else _writer_of(lease, notice.sender)
        if lease is None or writer is None:
            self.ignored.notices += 1
            return
        writer.drained |= notice.kind is Kind.DRAINED
        if not writer.complete:  # all of it has arrived, whatever its writer knows
            self._stop(lease, LeaseState.FAILED, notice.reason or f"{worker.name} gave it up")

    def _arrive(self, delivery: Delivery) -> None:
        tag = Tag.unpacked(delivery.tag)
        if tag is None or tag.epoch != self._engine.instance:
            self.ignored.foreign += 1
            return
        lease = self._leases.get(tag.serial)
        if lease is None:
            self.ignored.late += 1
            return
        writer = lease.writers[tag.writer] if tag.writer < len(lease.writers) else None
        if writer is None or writer.worker.instance != delivery.instance or tag.attempt != lease.attempt:
            self.ignored.foreign += 1
        elif not writer.take(tag):
            again = tag.chunk in writer.chunks
            self.ignored.duplicate += again
            self.ignored.foreign += not again
        elif lease.complete and lease.become(LeaseState.DELIVERED):
            self._changed.append(lease)

    def _fail_worker(self, worker: Worker, reason: str) -> None:
        for lease in list(self._leases.values()):
            writer = _writer_of(lease, worker.instance)
            if writer is not None and not writer.complete:
                self._stop(lease, LeaseState.FAILED, reason)

    def _stop(self, lease: Lease, state: LeaseState, reason: str) -> None:
        """Ends a lease that waits. Tells every writer that may still write to stop, and to say when it has."""
        if not lease.become(state, reason):
            return
        self._changed.append(lease)
        if lease.ranges is None:
            return
        for writer in lease.writers:
            if not writer.ended and not writer.worker.ended:
                self._say(writer.worker, Kind.ABORT, lease.serial, reason)

    def _state_row(self, lease: Lease, states: HostRanges | None) -> int:
        """The row that `states` are, checked; 0 where this worker has no buffers of states."""
        rows = _kept_behind(lease, states)
        wanted = any(layout.per_request for layout in self._description.layouts)
        capacity = next(iter(self._capacities.values()))[1]
        if rows[:, 1].sum() != wanted or (wanted and int(rows[0, 0]) >= capacity):
            expected = f"one row of {capacity}" if wanted else "no row"
            problem = f"{lease!r}: expected {expected} for states, got {rows.tolist()}"
            remedy = "pass one row of the pool of the `per_request` buffers, or None without such buffers"
            raise ArgumentError(problem, rows.tolist(), remedy)
        return int(rows[0, 0]) if wanted else 0


def _writer_of(lease: Lease, instance: str) -> WriterProgress | None:
    return next((writer for writer in lease.writers if writer.worker.instance == instance), None)


def _kept_behind(lease: Lease, memory: Memory | None) -> Ints:
    """Start and length int64[r, 2] of memory that is kept until no writer of the lease can write it."""
    if memory is None:
        return np.empty((0, 2), dtype=np.int64)
    if memory.writer is not lease.ended:
        kept = f"kept until {memory.writer!r}" if memory.writer is not None else "not kept until a writer has ended"
        remedy = (
            "take the memory with `writer=lease.ended` (`HostKVPool.take`, `HiSparse.reserve`, `PagePool.take`): freed "
            "before its end, it would be another request's while a writer still writes it"
        )
        raise ArgumentError(f"{lease!r}: grant of {memory!r}, {kept}", memory, remedy)
    return memory.table


def _check_unleased(lease: Lease, memory: Ints, holds: str, state_row: int, leases: Iterable[Lease]) -> None:
    """Refuses locations int64[r, 2] and a row of states that another of `leases` may still write."""
    others = [other for other in leases if other.ranges is not None and not other.ended.query()]
    if state_row and state_row in [other.state_row for other in others]:
        problem = f"{lease!r} is to have row {state_row} for states, which another lease may still write"
        raise ArgumentError(problem, state_row, "take another row; that of a lease is free when `lease.ended` says so")
    leased = [other.ranges for other in others if other.ranges is not None and other.holds == holds]
    if not leased or not memory.size:
        return
    ranges = np.concatenate(leased)
    starts, ends = ranges[:, 0, None], ranges.sum(axis=1)[:, None]
    shared = ((memory[:, 0] < ends) & (starts < memory.sum(axis=1))).any(axis=1)
    if shared.any():
        start, length = ranges[int(np.flatnonzero(shared)[0])].tolist()
        problem = f"{lease!r} is to have {holds}s that another lease may still write: {length} from {start} on"
        remedy = "take other memory; that of a lease is free when `lease.ended` says so"
        raise ArgumentError(problem, memory.tolist(), remedy)
