"""`HiSparse`: requests whose KV lives in host memory, with a hot buffer of the newest tokens on the device.

Long contexts do not fit on the device. A request of the host tier has a location in pinned host memory for every token
it will ever have, and pages on the device for at most `hot_tokens` of them::

    outside --admit_staged--> STAGED --poll_staged--> READY --finish--> FINISHED
    outside --reserve-------> DIRECT --admit_direct-----^   any of the three --abort--> ABORTED

STAGED copies KV that this worker prefilled out to the host. DIRECT waits for another worker that writes it there. The
engine decides per request whether it goes, and which way. In each decode step `map_last_location` plans where the new
token's KV goes and which older one has to be backed up, from host sides alone: nothing is read from the device, and
nothing depends on how long a context is.
"""

from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import AllFences
from batchstate._arrays import MOST_ROWS, Ints, amounts, arange_per_row, count
from batchstate.errors import ArgumentError, another_runtime
from batchstate.kv._lengths import explained
from batchstate.kv._tier import IN_TIER, KVCopier, TierRequests, TierState
from batchstate.kv.host_pool import HostKVPool, HostRanges, HostStats
from batchstate.kv.last_location import LastLocation
from batchstate.kv.pages import Extension, PagePool
from batchstate.mirror import Contract, HostLocations, Locations, MirroredTensor, Slots
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, OfThisProcess, Runtime, check_fence
from batchstate.violations import Violation, Where

__all__ = ["HiSparse", "InFlight", "LastLocation", "TierState", "TierStats"]

V = TypeVar("V", Locations, HostLocations)


def _host_only(unit: type[V], runtime: Runtime, numbers: Ints) -> V:
    return unit(runtime, numbers, None, dtype=torch.int64, shape=numbers.shape, contract=Contract.HOST_ONLY)


@final
@attrs.frozen
class TierStats:
    """The host tier in numbers: requests by their state, and the pool of host locations, pending ones included.

    `to_back_up` says whether a step is planned whose backup is not launched.
    """

    staged: int
    direct: int
    ready: int
    to_back_up: bool
    host: HostStats


@final
@attrs.frozen(eq=False)
class InFlight:
    """Something that the host tier waits for.

    Attributes:
        what: `staging`: copies out to the host; `arriving`: a writer in another process that may still write; `backup`:
            the newest copies of a stream; `pending`: host locations that are free behind it.
        fence: complete when it is over.
        slots: the requests, int64[n]; none for backups, and for host locations of requests that have left.
        tokens, step: host locations that wait, and since which step, or None where that is not known.
    """

    what: str
    fence: Fence
    slots: Ints
    tokens: int
    step: int | None = None


@final
class HiSparse(OfThisProcess):
    """The host tier of one worker. Belongs to the thread of its runtime.

    Position p of a request lies in row p % hot_tokens of its hot buffer, which its device pages make up.

    Args:
        pages: device pages, which hold the hot buffers; its slots are the requests. Any page size.
        host: the host locations.
        kv: for each layer of `host.backed` the device memory that `pages` index: dtype[pages.location_capacity, ...].
        hot_tokens: most tokens of a request that the device holds; at least 2.

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError: the parts do not go together.
    """

    def __init__(
        self, pages: PagePool, host: HostKVPool, kv: Sequence[torch.Tensor], *, hot_tokens: int = 4096
    ) -> None:
        self.runtime: Runtime = host.runtime
        self.pages = pages
        self.slots = pages.slots
        self.host = host
        self.hot_tokens = count(hot_tokens, "hot_tokens", least=2)
        if pages.runtime is not host.runtime:
            raise another_runtime("HiSparse", host)
        if pages.max_tokens_per_request < self.hot_tokens:
            most = pages.max_tokens_per_request
            problem = f"hot buffers of {self.hot_tokens} tokens in {pages!r} for {most} per request"
            remedy = "let max_tokens_per_request of the pages be at least hot_tokens"
            raise ArgumentError(problem, self.hot_tokens, remedy)
        self._copier = KVCopier(pages, host, kv)
        pages.register_kv(*kv)
        self._requests = TierRequests(host, self.slots, self._copier)
        self._transaction = self._requests.transaction
        self._stream = self.runtime.stream("host tier")
        self._open: LastLocation | None = None
        self._staging: list[tuple[Slots, QueriedFence]] = []
        self.slots.add_listener(self._requests)
        pages.add_release_check(self._requests.check_pages)

    def __repr__(self) -> str:
        return f"HiSparse({len(self._requests.ranges)} requests, hot_tokens={self.hot_tokens}, {self.host!r})"

    # Queries

    def states(self, slots: Slots) -> list[TierState]:
        """The state of each request."""
        return [TierState(int(state)) for state in self._requests.states[self.slots.rows_of(slots, "states")]]

    def ready(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether each decodes in the host tier, bool[n]."""
        ready: npt.NDArray[np.bool_] = self._requests.states[self.slots.rows_of(slots, "ready")] == TierState.READY
        return ready

    def lengths(self, slots: Slots) -> Ints:
        """Tokens of each request as far as the host tier knows, int64[n]."""
        return self._requests.length[self.slots.rows_of(slots, "lengths")]

    def host_locations(self, slots: Slots, counts: object) -> HostLocations:
        """The host locations of the first `counts` positions of each request, one request after the other. O(tokens).

        Raises:
            Violation: TIER_STATE. ArgumentError: more than a request has reserved.
        """
        operation = "host_locations"
        rows = self.slots.rows_of(slots, operation)
        self._requests.check_state(rows, IN_TIER, operation)
        wanted = np.broadcast_to(amounts(counts, rows.size, operation), rows.shape)
        numbers, host = self._requests.first_locations(rows, wanted), self.host
        generations, name = host._allocator.of(numbers // host.page_size), host.name
        return HostLocations.of_pool(
            self.runtime, numbers, generations, pool_id=host.pool_id, contract=Contract.HOST_ONLY, name=name
        )

    @property
    def stats(self) -> TierStats:
        """The tier in numbers, after a reap of the host locations."""
        self._begin("stats")
        held = self._requests.states[list(self._requests.ranges)]
        staged, direct, ready = (int(np.count_nonzero(held == state)) for state in IN_TIER)
        return TierStats(staged, direct, ready, self._open is not None, self.host.stats)

    def in_flight(self) -> list[InFlight]:
        """Everything that the tier waits for: copies, writers, and memory behind either. Queries no fence.

        One that stays for more steps than are in flight never completes: its copy was not launched, or its writer is
        gone and that was not declared.
        """
        self._begin("in_flight")
        requests, none = self._requests, np.empty(0, dtype=np.int64)
        entries = []
        for slots, queried in self._staging:
            waiting = slots.np[[requests.fences.get(slot) is queried.fence for slot in slots.np.tolist()]]
            if waiting.size:
                tokens = int(requests.max_tokens[waiting].sum())
                entries.append(InFlight("staging", queried.fence, waiting, tokens, queried.step))
        for slot, ranges in requests.ranges.items():
            if ranges.writer is not None:
                entries.append(InFlight("arriving", ranges.writer, np.array([slot]), len(ranges)))
        entries += [InFlight("backup", fence, none, 0) for fence in self._copier.fences]
        for queried, tokens in self.host.pending():
            entries.append(InFlight("pending", queried.fence, none, tokens, queried.step))
        return entries

    def expect_idle(self) -> None:
        """Checks that no request is in the tier, and no host location is live. Else SLOT_CONSERVATION, naming some.

        Pending host locations are not leaks: `in_flight` names their fences.
        """
        self._begin("expect_idle")
        left, where = np.fromiter(self._requests.ranges, dtype=np.int64), self._where("expect_idle")
        if left.size:
            stats = self.host.stats
            invariants.slot_conservation(stats.free, stats.pending, 0, stats.size, leaked=left, **where)
        self.host.expect_idle()

    # Admission

    def reserve(
        self, slots: Slots, lengths: object, max_tokens: object, *, writer: Fence | None = None
    ) -> list[HostRanges]:
        """Logical-only allocation: a host location for each token a request will have, and none on the device.

        From here on a writer may write the first `lengths` tokens of each. When the slots are freed, the host locations
        stay pending until `writer` is complete.

        Args:
            slots: live handles without pages, each once.
            lengths: tokens that the writer brings, one number or int[n], at least 1.
            max_tokens: tokens that the request will have at the most, growth included; rounded up to whole pages.
            writer: complete when the writer writes no more: a lease's `ended`, which also knows what has arrived.
                Leave it out only where no writer in another process exists; the memory cannot be granted to one then.

        Returns:
            the ranges of each.

        Raises:
            PoolExhaustedError: too few host locations. Nothing was reserved.
            Violation: TIER_STATE: one is in the tier already; LENGTH_ORDER.
            ArgumentError: one has device pages.
        """
        rows = self._entering(slots, "reserve")
        check_fence(writer, "reserve")
        self._check_no_pages(slots, "reserve")
        length, most = self._sizes(rows, lengths, max_tokens, "reserve")
        with self._transaction.changing("reserve"):
            return self._enter(rows, length, most, TierState.DIRECT, writer, "reserve")

    def admit_direct(self, slots: Slots) -> Extension:
        """Makes READY requests whose KV has arrived. Loads short ones onto the device.

        A request that fits into the hot buffer gets pages for its tokens, and their KV from the host, on the current
        stream. A longer one gets a whole hot buffer, which fills as it decodes.

        Returns:
            the device locations of the hot buffers, for a table [slot, hot row] -> location.

        Raises:
            PoolExhaustedError: too few device pages. Nothing was admitted.
            Violation: TIER_STATE: also where the writer that was named to `reserve` has not delivered all of it.
        """
        operation, requests = "admit_direct", self._requests
        self._begin(operation)
        rows = self.slots.rows_of(slots, operation, unique=True)
        length, size = requests.length[rows], self.hot_tokens
        requests.check_arrived(rows, length, operation)
        rows = self.slots.rows_of(slots, operation, unique=True)  # again: writers are code of the engine
        self._check_no_pages(slots, operation)
        short, held = length <= size, np.minimum(length, size)
        hot_from = np.where(short, 0, length)
        with self._transaction.changing(operation):
            try:
                hot = self.pages.extend(slots, held)
                if short.any():
                    sources = requests.first_locations(rows[short], length[short])
                    targets = hot.locations.np[np.repeat(short, hot.counts)]
                    indices = self._copier.indices(self.runtime.upload([sources, targets]))
                    self._copier.to_device(*indices, "host tier: preload")
                    self.pages.commit(slots.filter(short), length[short])
            except Exception:  # also one of `extend` itself, for want of memory once the pages are there
                if np.count_nonzero(self.pages.allocated(slots)):
                    with requests.releases(rows):
                        self.pages.release(slots, after=requests.fence_of([], None))
                raise
            requests.hot_from[rows], requests.held[rows] = hot_from, held
            requests.states[rows] = TierState.READY
        return hot

    def admit_staged(self, slots: Slots, max_tokens: object, *, after: Fence | None = None) -> None:
        """Copies the KV of these requests from their device pages to the host, on a stream of its own.

        They are STAGED until the copy is complete and `poll_staged` has seen it.

        Args:
            slots: requests with committed pages, each once; as many tokens as are committed.
            max_tokens: tokens that the request will have at the most, growth included.
            after: the fence of the forward that wrote the KV; by default all of the current stream.

        Raises:
            PoolExhaustedError: too few host locations. Nothing was staged.
            Violation: TIER_STATE, LENGTH_ORDER; PAGE_OWNER: pages that would be the hot buffer are shared;
                PAGE_UNWRITTEN, at `cheap`: no work was launched that writes the KV; PAGE_RELEASED.
            CaptureError: the stream is captured.
        """
        operation = "admit_staged"
        rows = self._entering(slots, operation)
        check_fence(after, operation)
        self.runtime.refuse_capture(operation)
        hot_pages = -(-self.hot_tokens // self.pages.page_size)
        self.pages.check_unshared(self.pages.page_table[rows, :hot_pages].ravel().astype(np.int64), operation)
        length, most = self._sizes(rows, self.pages.committed(slots), max_tokens, operation)
        if not rows.size:
            return
        self.pages.check_readable(rows, rows, operation)
        written = after if after is not None else self.runtime.record()
        with self._transaction.changing(operation):
            self._enter(rows, length, most, TierState.STAGED, None, operation)
            try:
                copied = self._staged(slots, rows, length, written)
            except Exception:
                for row in rows.tolist():
                    self._requests.leave(row, self._requests.fence_of([], None))
                    self._requests.states[row] = TierState.OUTSIDE
                raise
            own = AllFences((copied,))  # `poll_staged` knows the copy by its fence, and on a CPU all fences are one
            self._staging.append((slots, self.slots.transaction.watch(own)))
            self._requests.fences.update(dict.fromkeys(rows.tolist(), own))

    def _staged(self, slots: Slots, rows: Ints, length: Ints, written: Fence) -> Fence:
        targets, size = self._requests.first_locations(rows, length), self.pages.page_size
        positions = arange_per_row(np.zeros_like(length), length)  # a prompt does not wrap round in its pages
        page, offset = np.divmod(positions, size)
        sources = self.pages.page_table[np.repeat(rows, length), page].astype(np.int64) * size + offset
        upload = self.runtime.upload([sources, targets])  # not on the stream of the copies, which may be long
        with self.runtime.use(self._stream):
            self.runtime.wait(written)
            self.pages.wait_written(slots)
            return self._copier.to_host(*self._copier.indices(upload), "host tier: stage")

    def poll_staged(self) -> int:
        """Makes READY what is STAGED and copied; returns how many. Releases device pages beyond the hot buffer.

        Never waits, and asks no fence while the stream is captured.
        """
        self._begin("poll_staged")
        if self.runtime.capturing:
            return 0
        staging, ready = tuple(self._staging), 0
        answers = self.slots.transaction.query([fence for _, fence in staging])
        copied = [group for group, complete in zip(staging, answers, strict=True) if complete]
        for slots, fence in copied:
            ready += self._make_ready(slots, fence.fence)
        self._staging = [group for group in self._staging if not any(group is other for other in copied)]
        return ready

    def _make_ready(self, slots: Slots, copied: Fence) -> int:
        """Makes READY the requests of a group that still wait for this copy: others have left."""
        requests = self._requests
        slots = slots.filter(np.array([requests.fences.get(slot) is copied for slot in slots.np.tolist()], dtype=bool))
        rows = slots.np
        if levels.cheap:
            copying = np.full(rows.size, not copied.query())
            invariants.slot_in_flight(rows, copying, **self._where("poll_staged"))
        long = requests.length[rows] > self.hot_tokens
        with self._transaction.changing("poll_staged"):
            if long.any():
                with requests.releases(rows[long]):
                    self.pages.truncate(slots.filter(long), self.hot_tokens, after=copied)
                requests.hot_from[rows[long]] = requests.length[rows[long]]
                requests.held[rows[long]] = self.hot_tokens
            for row in rows.tolist():
                del requests.fences[row]
            requests.states[rows] = TierState.READY
        return len(slots)

    def _begin(self, operation: str) -> None:
        self.slots.transaction.enter(operation)
        self._transaction.enter(operation)

    def _check_no_pages(self, slots: Slots, operation: str) -> None:
        if np.count_nonzero(self.pages.allocated(slots)):
            remedy = "use `admit_staged` for KV that is on the device; give a DIRECT request no pages"
            raise ArgumentError(f"{operation} for a request that has device pages", slots, remedy)

    def _entering(self, slots: Slots, operation: str) -> Ints:
        self._begin(operation)
        rows = self.slots.rows_of(slots, operation, unique=True)
        self._requests.check_state(rows, (TierState.OUTSIDE,), operation)
        return rows

    def _sizes(self, rows: Ints, lengths: object, max_tokens: object, operation: str) -> tuple[Ints, Ints]:
        length = np.broadcast_to(amounts(lengths, rows.size, operation), rows.shape)
        most = np.broadcast_to(amounts(max_tokens, rows.size, operation), rows.shape)
        if length.size and int(length.min()) < 1:
            problem = f"{operation}: expected at least 1 token per request, got {length.min()}"
            raise ArgumentError(problem, int(length.min()), "admit requests that have a prompt")
        where = self._where(operation)
        invariants.length_order(length, most, self.host.num_tokens, explain=_not_reserved, **where)
        return length, most

    def _enter(
        self, rows: Ints, length: Ints, most: Ints, state: TierState, writer: Fence | None, operation: str
    ) -> list[HostRanges]:
        taken = self.host.take(most, rows, writer=writer)
        held = np.array([len(ranges) for ranges in taken], dtype=np.int64)
        try:
            invariants.length_order(length, held, self.host.num_tokens, **self._where(operation))
        except Violation:
            self.host.free(taken, after=None)
            raise
        for row, ranges, n in zip(rows.tolist(), taken, length.tolist(), strict=True):
            self._requests.enter(row, ranges, state, n)
        return taken

    # Decoding

    def map_last_location(
        self,
        slots: Slots,
        seq_lens: object,
        tokens: object = 1,
        *,
        confirmed: object = None,
        backups: SupportsIndex | None = None,
    ) -> LastLocation:
        """Plans a decode step of requests of the host tier: O(new tokens), on the host alone.

        Each request's hot buffer grows until it is full; from then on position p takes the row of position
        p - hot_tokens. The tokens of steps before are to be backed up first: call `back_up` with what is returned, at
        the entry of the step's forward and on its stream, before the next step is planned.

        With speculation a step has several tokens per request, and the next one begins behind those that were accepted:
        its `seq_lens - tokens` says how many these are. Where that is not known yet, `seq_lens` is a bound and
        `confirmed` what is known. All that may have been accepted is backed up then, and backed up again once it is.

        Args:
            slots: READY requests, each once; padding may follow them, for a graph of fixed size.
            seq_lens: tokens of each with the new ones: a mirrored column, or int[n]; anything for padding.
            tokens: new tokens of each, drafts included: one number, or int[n], at least 1.
            confirmed: int[n], tokens of each that were accepted, as far as results say. Needed where `seq_lens` is a
                bound.
            backups: for a graph, the length of the arrays of backups: entries not needed copy padding to padding.

        Raises:
            PoolExhaustedError: too few device pages. Nothing was mapped.
            Violation: TIER_STATE; LENGTH_ORDER: more tokens than were reserved, or than are left in the hot buffer
                besides those that are not confirmed; PAGE_OWNER: a page that a token goes to is shared. At `cheap`
                TRANSFER_BOUNDS: a backup would leave the ranges of its request; MIRROR_EQUAL: pages of a request were
                grown or released outside of the tier.
            ArgumentError: a request did not go on behind tokens that it had, `confirmed` is missing, there are more
                backups than `backups`, or those of the last step were not launched.
        """
        operation = "map_last_location"
        self._begin(operation)
        where = self._where(operation)
        owners = slots
        if slots.np.size and not slots.np[-1]:
            owners = slots.take(np.arange(np.count_nonzero(self.slots.rows_of(slots, operation, padded=True))))
        rows = self.slots.rows_of(owners, operation, unique=True)
        requests = self._requests
        requests.check_state(rows, (TierState.READY,), operation)
        length, counts, settled = self._lengths(slots, rows, seq_lens, tokens, confirmed)
        before = length - counts
        self._check_step(owners, rows, length, before, settled, where)
        one_each = type(tokens) is int and tokens == 1
        owner, position = (rows, before) if one_each else (rows.repeat(counts), arange_per_row(before, counts))
        ring = position >= self.hot_tokens
        if ring.any():
            self.pages.check_unshared(self._hot_pages(owner[ring], position[ring]), operation)
        backed = requests.backed[rows]
        owed = before - backed
        late, previous = rows.repeat(owed), arange_per_row(backed, owed)
        backup_from, backup_to = self._hot_locations(late, previous, where), requests.locations(late, previous)
        if levels.cheap:
            least, most = requests.bounds(late, previous)
            single = np.ones_like(backup_to)
            invariants.transfer_bounds(backup_to, single, least, most, what="host locations", **where)
        padding = len(slots) - rows.size
        if backups is not None:
            backup_from, backup_to = _padded(backup_from, backups), _padded(backup_to, backups)
        held = np.maximum(requests.held[rows], np.minimum(length, self.hot_tokens))
        new = held - requests.held[rows]
        self._transaction.operation = operation
        try:
            if np.count_nonzero(new):
                grows = owners if new.all() else owners.filter(new > 0)
                self.pages.advance(grows, 1 if (new == 1).all() else new[new > 0])
        except Exception:
            self._transaction.operation = None
            raise
        hot_from = np.maximum(requests.hot_from[rows], length - self.hot_tokens)
        locations, indexed = self._hot_locations(owner, position, where), None
        if len(self.host.backed) < len(self.host.buffers):
            indexed = requests.locations(owner, position)
        named = owners if one_each else owners.take(np.arange(rows.size).repeat(counts))
        if padding:
            more = padding * int(counts.max(initial=1))
            locations, position = _padded(locations, locations.size + more), _padded(position, position.size + more)
            indexed = None if indexed is None else _padded(indexed, indexed.size + more)
            named, hot_from = named.pad(len(named) + more), _padded(hot_from, len(slots))
        plan = LastLocation(
            slots,
            position,
            position % self.hot_tokens,
            _host_only(Locations, self.runtime, locations),
            hot_from,
            _host_only(Locations, self.runtime, backup_from),
            _host_only(HostLocations, self.runtime, backup_to),
            self.hot_tokens,
            None if indexed is None else _host_only(HostLocations, self.runtime, indexed),
            named,
            backed,
            bool((before > settled).any()),
        )
        requests.length[rows], requests.backed[rows], requests.held[rows] = length, settled, held
        requests.hot_from[rows] = hot_from[: rows.size]
        self._open = plan
        requests.planned = rows
        self._transaction.operation = None
        return plan

    def _lengths(
        self, slots: Slots, rows: Ints, seq_lens: object, tokens: object, confirmed: object
    ) -> tuple[Ints, Ints, Ints]:
        """Tokens with the new ones, new tokens, and tokens that are accepted before, each int64[n], without padding."""
        operation, n = "map_last_location", len(slots)
        bounded = isinstance(seq_lens, MirroredTensor) and seq_lens.contract is Contract.UPPER_BOUND
        lens = seq_lens.np if isinstance(seq_lens, MirroredTensor) else seq_lens

        def per_request(values: object, name: str) -> Ints:
            return np.broadcast_to(amounts(values, n, f"{operation}: {name}"), n)[: rows.size]

        length, counts = per_request(lens, "seq_lens"), per_request(tokens, "tokens")
        if rows.size and int(counts.min()) < 1:
            raise ArgumentError(f"{operation} of {counts.min()} tokens", int(counts.min()), "map at least one each")
        if confirmed is not None:
            settled = confirmed.np if isinstance(confirmed, MirroredTensor) else confirmed
            return length, counts, per_request(settled, "confirmed")
        if bounded:
            remedy = "pass how many tokens of each request the results that are known have accepted"
            raise ArgumentError(f"{operation}: seq_lens is a bound, without `confirmed`", seq_lens, remedy)
        return length, counts, length - counts

    def _check_step(self, slots: Slots, rows: Ints, length: Ints, before: Ints, settled: Ints, where: Where) -> None:
        """Refuses a second open plan, lengths beyond what was reserved, and steps that do not go on from the last."""
        if self._open is not None:
            problem = f"{self._open!r} was planned, and its backup not launched"
            raise ArgumentError(problem, self._open, "call `back_up` for each `map_last_location`, in order")
        requests = self._requests
        last, backed, most = requests.length[rows], requests.backed[rows], requests.max_tokens[rows]
        invariants.length_order(length, most, int(most.max(initial=0)), explain=_OUTGROWN, **where)
        # A step accepts one token at least. Where lengths are bounds, results say so later.
        least = np.where(settled == before, backed + (last > backed), backed)
        wrong = (settled < least) | (settled > before) | (before > last)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            new = f"{length[row]} tokens with {length[row] - before[row]} new ones"
            had = f"of those before {settled[row]} confirmed; it had {least[row]} to {last[row]}"
            remedy = "go on after tokens that were mapped, each request once a step; `tokens` says how many are new"
            raise ArgumentError(f"slot {rows[row]} has {new}, {had}", int(length[row]), remedy)
        room = np.full_like(length, self.hot_tokens)
        invariants.length_order(length - settled, room, self.hot_tokens, explain=_TOO_FAR, **where)
        if levels.cheap:
            invariants.mirror_equal(requests.held[rows], self.pages.committed(slots), **where)

    def _hot_locations(self, rows: Ints, positions: Ints, where: Where) -> Ints:
        """The device location of one position of each row, int64[n]. SLOT_ZERO_ALLOCATED, at `cheap`: it has none."""
        page = self._hot_pages(rows, positions)
        if levels.cheap and page.size and int(page.min()) == 0:
            invariants.slot_zero_allocated(page, **where)
        size = self.pages.page_size
        locations: Ints = page * size + positions % self.hot_tokens % size
        return locations

    def _hot_pages(self, rows: Ints, positions: Ints) -> Ints:
        """0 for none."""
        column = positions % self.hot_tokens // self.pages.page_size
        return self.pages.page_table[rows, column].astype(np.int64)

    def back_up(self, plan: LastLocation, uploaded: Mapping[str, torch.Tensor] | None = None) -> None:
        """Launches the backup of a planned step on the current stream: the step's forward, before the model.

        Args:
            plan: the last one.
            uploaded: returned by `batch.upload(extras=plan.extras)`; without it the indices are uploaded here.

        Raises:
            ArgumentError: it was launched already, or is not the last plan.
            Violation: UNIT_MISMATCH: indices of another space.
            CaptureError: the stream is captured.
        """
        self._begin("back_up")
        if self._open is None or plan is not self._open or plan.launched:
            problem = f"back_up of {plan!r}, which is not the plan of this step"
            raise ArgumentError(problem, plan, "call it once for each `map_last_location`, in order")
        where = self._where("back_up")
        for unit, indices in ((Locations.unit, plan.backup_from), (HostLocations.unit, plan.backup_to)):
            if indices.unit != unit:
                invariants.unit_mismatch(str(unit), str(indices.unit), **where)
        if len(plan.backup_from):
            if uploaded is None:
                upload = self.runtime.upload([plan.backup_from.np, plan.backup_to.np])
                source, target = self._copier.indices(upload)
            else:
                source, target = _uploaded_indices(plan, uploaded)
            self._copier.to_host(source, target, "host tier: back up", plan.guesses)
        self._transaction.operation = "back_up"
        plan.launched = True
        self._open = None
        self._requests.planned = np.empty(0, dtype=np.int64)
        self._transaction.operation = None
        if levels.full and not self.runtime.checks_suspended():
            self._check_backed(plan.slots.np, self._requests.backed, where)
            self.pages.check_kv("back_up")

    # Leaving

    def finish(self, slots: Slots, *, after: Fence | None) -> None:
        """Frees READY requests with all they own: slots, device pages, host locations. Behind `after` and all copies.

        Raises:
            As `SlotPool.free`; TIER_STATE. Nothing was freed.
        """
        self._release(slots, (TierState.READY,), after, "finish")

    def abort(self, slots: Slots, *, after: Fence | None) -> None:
        """`finish`, of requests in any state of the tier.

        Host locations that a writer may still write stay pending until it has ended, and pages that are being copied
        until the copy is over.
        """
        self._release(slots, IN_TIER, after, "abort")

    def _release(self, slots: Slots, allowed: tuple[TierState, ...], after: Fence | None, operation: str) -> None:
        self._begin(operation)
        check_fence(after, operation)
        requests = self._requests
        requests.before_free(slots.np)
        rows = self.slots.rows_of(slots, operation, unique=True)
        requests.check_state(rows, allowed, operation)
        behind = requests.fence_of(rows[requests.states[rows] == TierState.STAGED].tolist(), after)
        if after is None and behind is not None:  # else the release asks
            self.slots.check_ended(rows, operation)
        with requests.releases(rows):
            self.pages.release_requests(slots, after=behind)

    # Checks

    def verify(self) -> None:
        """Checks every invariant of the tier from scratch: states, ranges, pages, and that backups equal hot KV.

        Reads device memory; does nothing under capture.
        """
        self._begin("verify")
        if self.runtime.capturing:
            return
        requests, where = self._requests, self._where("verify")
        requests.verify()
        self.pages.verify()
        rows = np.flatnonzero((requests.states == TierState.READY) | (requests.states == TierState.STAGED))
        ready = rows[requests.states[rows] == TierState.READY]
        invariants.mirror_equal(requests.held[rows], self.pages.committed_lengths[rows], **where)
        backed = requests.backed.copy()
        if self._open is not None:
            backed[requests.planned] = self._open.backed
        self._check_backed(ready, backed, where)

    def _check_backed(self, rows: Ints, backed: Ints, where: Where) -> None:
        """Checks that backups equal hot KV, as far as `backed` tokens of each slot (MIRROR_EQUAL), on the device."""
        requests, inspect = self._requests, self.runtime.inspect
        first = np.maximum(requests.hot_from[rows], requests.length[rows] - self.hot_tokens)
        counts = np.maximum(backed[rows] - first, 0)
        owners, positions = np.repeat(rows, counts), arange_per_row(first, counts)
        hot, there = self._hot_locations(owners, positions, where), requests.locations(owners, positions)
        for device, host in zip(self._copier.kv, self.host.backed, strict=True):
            invariants.mirror_equal(inspect(device)[hot], inspect(host)[there], **where)

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "step": self.runtime.step}


def _uploaded_indices(plan: LastLocation, uploaded: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = (uploaded.get(name) for name in ("backup_from", "backup_to"))
    if source is None or target is None or not len(source) == len(target) == len(plan.backup_from):
        problem = f"back_up of {plan!r} with {uploaded!r}"
        raise ArgumentError(problem, plan, "pass what `batch.upload(extras=plan.extras)` returned, or nothing")
    return source, target


def _padded(numbers: Ints, size: SupportsIndex) -> Ints:
    """`numbers` with zeros behind them, int64[size]. ArgumentError: there are more."""
    width = count(size, "backups", most=MOST_ROWS)
    if numbers.size > width:
        remedy = "give `backups` room for the tokens that a step may have to back up: those of the last steps"
        raise ArgumentError(f"{numbers.size} tokens to back up, and room for {width}", numbers.size, remedy)
    return np.concatenate([numbers, np.zeros(width - numbers.size, dtype=np.int64)])


def _not_reserved(asked: int, capacity: int, most: int) -> tuple[str, str]:
    return (_TOO_LARGE if capacity > most else _NOT_RESERVED)(asked, capacity, most)


_TOO_FAR = explained(
    "{0} tokens that are new or not confirmed, in hot buffers of {2}",
    "confirm what results have shown before more is mapped, or make hot_tokens larger",
)
_OUTGROWN = explained(
    "{0} tokens with the new one, {1} were reserved", "finish the request, or reserve more at admission"
)
_TOO_LARGE = explained("room for {1} tokens asked for, the host tier has {2}", "ask for less, or make the pool larger")
_NOT_RESERVED = explained("{0} tokens, and room for {1}", "reserve room for the tokens that come and all that follow")
