"""`HiSparse`: requests whose KV lives in host memory, with a hot buffer of the newest tokens on the device.

Long contexts do not fit on the device. A request of the host tier has a place in pinned host memory for every token it
will ever have, and pages on the device for at most `hot_tokens` of them::

    outside --admit_staged--> STAGED --settle--> READY --finish--> FINISHED
    outside --reserve-------> DIRECT --admit_direct--^    any of the three --abort--> ABORTED

STAGED copies KV that this worker prefilled out to the host. DIRECT waits for another worker that writes it there. Which
way a request goes, and whether it goes at all, is said request by request. In each decode step `map_last_location`
says where the new token's KV goes and which older one has to be backed up, from host sides alone: nothing is read from
the device, and nothing depends on how long a context is.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._arrays import amounts, count
from batchstate.errors import ArgumentError, CaptureError, DeviceError
from batchstate.indices import HostLocations, Locations, Slots
from batchstate.kv import _page_state as length_words
from batchstate.kv._tier import HotBuffers, Moves, TierBooks, TierGuard, TierState, within
from batchstate.kv.host_pool import HostKVPool as HostKVPool
from batchstate.kv.host_pool import HostRuns
from batchstate.kv.pages import Extension, PagePool
from batchstate.mirror import Contract, MirroredTensor
from batchstate.runtime import Fence, Runtime, check_fence
from batchstate.tables import Table, TableWrite
from batchstate.violations import Violation, Where

# The plan of a decode step in the host tier.

Ints = npt.NDArray[np.int64]
V = TypeVar("V", Locations, HostLocations)


def host_only(unit: type[V], runtime: Runtime, numbers: Ints) -> V:
    """A value of an index space, of which the host has the numbers int64[n]."""
    shape, contract = numbers.shape, Contract.HOST_ONLY
    return unit(runtime, numbers, None, dtype=torch.int64, shape=shape, contract=contract)


@final
@attrs.define(eq=False, repr=False)
class LastLocation:
    """Where the newest token of each request goes, and what is backed up before. Made by `HiSparse.map_last_location`.

    Attributes:
        slots: the n requests.
        positions: int64[n], of the new token.
        hot_rows: int64[n], row of the hot buffer that takes it.
        tokens: int64[n], device tokens that take its KV: the slot mapping of the step. Riding as `hot_tokens`.
        hot_from: int64[n], first position whose KV is on the device; those before are read from the host.
        backup_from, backup_to: the tokens of the step before: int64[k] device tokens, int64[k] host tokens.
        extras: name -> array, for `batch.upload(extras=...)`.
        launched: whether `back_up` has been called.
    """

    slots: Slots
    positions: Ints
    hot_rows: Ints
    tokens: Locations
    hot_from: Ints
    backup_from: Locations
    backup_to: HostLocations
    launched: bool = False

    def __repr__(self) -> str:
        return f"LastLocation({self.positions.size} requests, {len(self.backup_from)} to back up)"

    @property
    def extras(self) -> dict[str, Ints]:
        """What rides in the step's copy."""
        return {
            "hot_tokens": self.tokens.np,
            "hot_from": self.hot_from,
            "backup_from": self.backup_from.np,
            "backup_to": self.backup_to.np,
        }

    def entry(self, table: Table) -> TableWrite:
        """The write of new rows of hot buffers into a table [slot, hot row] -> token; rides in a batch's upload.

        A row that is used again has its token in the table already: it is written once, while the buffer grows.

        Raises:
            As `Table.entry`.
        """
        grows = self.hot_rows == self.positions
        if grows.all():
            return table.entry(self.slots, self.hot_rows, self.tokens)
        return table.entry(self.slots.filter(grows), self.hot_rows[grows], self.tokens.filter(grows))


__all__ = ["HiSparse", "LastLocation", "TierState"]


@final
class HiSparse:
    """The host tier of one worker. Belongs to the thread of its runtime.

    Args:
        pages: device pages, which hold the hot buffers; its slots are the requests. Its page size is free.
        host: the host tokens.
        kv: for each layer of `host` the device memory that `pages` index: dtype[pages.location_capacity, ...].
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
            raise DeviceError(f"{host!r} has another runtime", value=host, remedy="use one runtime")
        if pages.max_tokens_per_request < self.hot_tokens:
            raise ArgumentError(
                f"hot buffers of {self.hot_tokens} tokens in {pages!r} for {pages.max_tokens_per_request} a request",
                value=self.hot_tokens,
                remedy="let max_tokens_per_request of the pages be at least hot_tokens",
            )
        self._moves = Moves(pages, host, kv)
        self._books = TierBooks(self.slots.capacity)
        self._hot = HotBuffers(pages, host, self._books, self._moves, self.hot_tokens)
        self._guard = TierGuard(host, self.slots.is_live, self._books, self._moves)
        self._stream = self.runtime.stream("host tier")
        self._open: LastLocation | None = None
        self._staging: list[tuple[Slots, Fence]] = []
        self.slots.add_listener(self._guard)
        pages.guard_release(self._guard.check_pages)

    def __repr__(self) -> str:
        return f"HiSparse({len(self._books.runs)} requests, hot_tokens={self.hot_tokens}, {self.host!r})"

    # Asking

    def states(self, slots: Slots) -> list[TierState]:
        """The state of each request."""
        return [TierState(int(one)) for one in self._books.states[self.slots.rows_of(slots, "states")]]

    def ready(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of them decode in the host tier, bool[n]."""
        ready: npt.NDArray[np.bool_] = self._books.states[self.slots.rows_of(slots, "ready")] == TierState.READY
        return ready

    def lengths(self, slots: Slots) -> Ints:
        """Tokens of each request as far as the host tier has been told, int64[n]."""
        return self._books.length[self.slots.rows_of(slots, "lengths")]

    def host_tokens(self, slots: Slots, counts: object) -> HostLocations:
        """The host tokens of the first `counts` positions of each request, one request after the other. O(tokens).

        Raises:
            Violation: TIER_STATE. ArgumentError: more than a request has room for.
        """
        rows = self.slots.rows_of(slots, "host_tokens")
        self._guard.check_state(rows, (TierState.STAGED, TierState.DIRECT, TierState.READY), "host_tokens")
        wanted = np.broadcast_to(amounts(counts, rows.size, "host_tokens"), rows.shape)
        parts = [self._books.runs[row].tokens(0, n) for row, n in zip(rows.tolist(), wanted.tolist(), strict=True)]
        return HostLocations.from_host(
            self.runtime, np.concatenate([np.empty(0, np.int64), *parts]), contract=Contract.HOST_ONLY
        )

    # Admission

    def reserve(
        self, slots: Slots, lengths: object, max_tokens: object, *, writer: Fence | None = None
    ) -> list[HostRuns]:
        """Logical-only allocation: a place in host memory for each token a request will have, and none on the device.

        From here on a writer may write the first `lengths` tokens of each. When the slots are freed, the host tokens
        stay pending until `writer` is complete.

        Args:
            slots: live handles without pages, each once.
            lengths: tokens that the writer brings, one number or int[n], at least 1.
            max_tokens: tokens that the request will have at the most, growth included; rounded up to whole pages.
            writer: complete when nobody writes any more: a lease's `ended`, which also knows what has arrived.
                WITHOUT IT THE MEMORY IS FREE AT ONCE when the slots are: leave it out only where nobody else writes.

        Returns:
            the runs of each.

        Raises:
            PoolExhaustedError: too few host tokens. Nothing was reserved.
            Violation: TIER_STATE: one is in the tier already; LENGTH_ORDER.
            ArgumentError: one has device pages.
        """
        rows = self._entering(slots, "reserve")
        check_fence(writer, "reserve")
        self._check_no_pages(slots, "reserve")
        length, room = self._sizes(rows, lengths, max_tokens, "reserve")
        return self._enter(rows, length, room, TierState.DIRECT, writer, "reserve")

    def admit_direct(self, slots: Slots) -> Extension:
        """The rows of these requests have arrived: they become READY. Short ones are loaded onto the device.

        A request that fits into the hot buffer gets pages for its tokens, and their KV from the host, on the current
        stream. A longer one gets a whole hot buffer, which fills as it decodes.

        Args:
            slots: requests that are DIRECT.

        Returns:
            the device tokens of the hot buffers, for a table [slot, hot row] -> token.

        Raises:
            PoolExhaustedError: too few device pages. Nothing was admitted.
            Violation: TIER_STATE: also where the writer that was named to `reserve` has not delivered all of it.
        """
        rows = self.slots.rows_of(slots, "admit_direct", unique=True)
        length = self._books.length[rows]
        self._guard.check_arrived(rows, length, "admit_direct")
        self._check_no_pages(slots, "admit_direct")
        short = length <= self.hot_tokens
        hot = self.pages.extend(slots, np.minimum(length, self.hot_tokens))
        if short.any():
            self._preload(slots, hot, np.repeat(short, hot.counts), length[short], rows[short])
        self._books.hot_from[rows] = np.where(short, 0, length)
        self._books.states[rows] = TierState.READY
        return hot

    def _preload(
        self, slots: Slots, hot: Extension, of_short: npt.NDArray[np.bool_], lengths: Ints, rows: Ints
    ) -> None:
        sources = np.concatenate(
            [self._books.runs[row].tokens(0, n) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]
        )
        targets = hot.locations.np[of_short]
        try:
            self._moves.to_device(*self._moves.indices(self._moves.uploaded(sources, targets)), "host tier: preload")
        except BaseException:
            with self._guard.at_work():
                self.pages.release(slots, after=self._guard.fence_of([], None))
            raise

    def admit_staged(self, slots: Slots, max_tokens: object, *, after: Fence | None = None) -> None:
        """Copies the KV of these requests from their device pages to the host, on a stream of its own.

        They are STAGED until the copy is complete and `settle` has seen it.

        Args:
            slots: requests with committed pages, each once; as many tokens as are committed.
            max_tokens: tokens that the request will have at the most, growth included.
            after: the fence behind the forward that wrote the KV; by default all of the current stream.

        Raises:
            PoolExhaustedError: too few host tokens. Nothing was staged.
            Violation: TIER_STATE, LENGTH_ORDER; PAGE_OWNER: somebody shares pages that would be the hot buffer.
            CaptureError: the stream is captured.
        """
        operation = "admit_staged"
        rows = self._entering(slots, operation)
        check_fence(after, operation)
        if self.runtime.capturing:
            raise CaptureError(f"{operation} while the stream is captured", remedy="admit outside of the capture")
        hot_pages = -(-self.hot_tokens // self.pages.page_size)
        self.pages.check_unshared(self.pages.page_table[rows, :hot_pages].ravel().astype(np.int64), operation)
        length, room = self._sizes(rows, self.pages.committed(slots), max_tokens, operation)
        if not rows.size:
            return
        written = after if after is not None else self.runtime.record()
        runs = self._enter(rows, length, room, TierState.STAGED, None, operation)
        try:
            targets = np.concatenate([one.tokens(0, n) for one, n in zip(runs, length.tolist(), strict=True)])
            at, size = within(length), self.pages.page_size  # a prompt does not go round in its pages
            sources = self.pages.page_table[np.repeat(rows, length), at // size].astype(np.int64) * size + at % size
            upload = self._moves.uploaded(sources, targets)  # not on the stream of the copies, which may be long
            with self.runtime.use(self._stream):
                self.runtime.wait(written)
                copied = self._moves.to_host(*self._moves.indices(upload), "host tier: stage")
        except BaseException:
            for row in rows.tolist():
                self._guard.give_back(row, self._guard.fence_of([], None))
                self._books.states[row] = TierState.OUTSIDE
            raise
        self._staging.append((slots, copied))
        for row in rows.tolist():
            self._guard.holds[row] = copied

    def settle(self) -> int:
        """Makes READY what is STAGED and copied; says how many. Never waits. Device pages beyond the hot buffer go.

        Asks no fence while the stream is captured.
        """
        self.runtime.check_owner("settle")
        if self.runtime.capturing:
            return 0
        answers = [fence.query() for _, fence in self._staging]
        settled = 0
        for (slots, fence), copied in zip(self._staging, answers, strict=True):
            if copied:
                settled += self._settle(slots, fence)
        self._staging = [group for group, copied in zip(self._staging, answers, strict=True) if not copied]
        return settled

    def wait_staged(self) -> int:
        """Waits for the oldest copy that is under way, then settles; says how many became READY. 0: none is under way.

        For an engine that has nothing else to do.
        """
        self.runtime.check_owner("wait_staged")
        if self._staging and not self.runtime.capturing:
            self._staging[0][1].wait()
        return self.settle()

    def _settle(self, slots: Slots, copied: Fence) -> int:
        """Those of a group that have not left: what waits for this copy is theirs."""
        still = np.array([self._guard.holds.get(slot) is copied for slot in slots.np.tolist()], dtype=np.bool_)
        slots = slots.filter(still)
        rows = slots.np
        if levels.cheap:
            invariants.slot_in_flight(rows, np.full(rows.size, not copied.query()), **self._where("settle"))
        long = self._books.length[rows] > self.hot_tokens
        if long.any():
            with self._guard.at_work():
                self.pages.truncate(slots.filter(long), self.hot_tokens)
            self._books.hot_from[rows[long]] = self._books.length[rows[long]]
        for row in rows.tolist():
            del self._guard.holds[row]
        self._books.states[rows] = TierState.READY
        return len(slots)

    # Decoding

    def map_last_location(self, slots: Slots, seq_lens: object) -> LastLocation:
        """Plans a decode step of requests of the host tier: O(requests), on the host alone.

        Each request's hot buffer grows by a token until it is full; from then on position p takes the row of position
        p - hot_tokens. The token of the step before is to be backed up first: call `back_up` with what is returned,
        at the entry of the step's forward and on its stream, before the next step is planned.

        Args:
            slots: READY requests, each once, without padding.
            seq_lens: tokens of each with the new one: a mirrored column, or int[n]; one more than in the last step.

        Raises:
            PoolExhaustedError: too few device pages. Nothing was mapped.
            Violation: TIER_STATE: a request is not READY; LENGTH_ORDER: more tokens than were reserved; PAGE_OWNER:
                somebody shares the page that the token goes to; TRANSFER_BOUNDS, at `cheap`: a backup would leave the
                run of its position; MIRROR_EQUAL, at `cheap`: somebody else has grown or released pages of a request.
            ArgumentError: a request did not grow by one token, or the backup of the last step was not launched.
        """
        operation = "map_last_location"
        where = self._where(operation)
        rows = self.slots.rows_of(slots, operation, unique=True)
        books = self._books
        self._guard.check_state(rows, (TierState.READY,), operation)
        lens = seq_lens.np if isinstance(seq_lens, MirroredTensor) else seq_lens
        length = np.broadcast_to(amounts(lens, rows.size, operation), rows.shape)
        self._check_step(slots, rows, length)
        position = length - 1
        grows = position < self.hot_tokens
        if not grows.all():
            self.pages.check_unshared(self._hot.pages_of(rows[~grows], position[~grows]), operation)
        owed = books.backed[rows] < position
        late, previous = rows[owed], position[owed] - 1
        backup_from, backup_to = self._hot.tokens(late, previous, **where), books.host_tokens(late, previous)
        if levels.cheap:
            least, most = books.bounds(late, previous)
            one = np.ones_like(backup_to)
            invariants.transfer_bounds(backup_to, one, least, most, what="host tokens", **where)
        if grows.all():
            self.pages.advance(slots)
        elif grows.any():
            self.pages.advance(slots.filter(grows))
        location = LastLocation(
            slots,
            position,
            position % self.hot_tokens,
            host_only(Locations, self.runtime, self._hot.tokens(rows, position, **where)),
            np.maximum(books.hot_from[rows], length - self.hot_tokens),
            host_only(Locations, self.runtime, backup_from),
            host_only(HostLocations, self.runtime, backup_to),
        )
        books.length[rows] = length
        books.backed[rows] = position
        self._open = location
        self._guard.planned = rows
        return location

    def back_up(self, location: LastLocation, uploaded: Mapping[str, torch.Tensor] | None = None) -> None:
        """Launches the backup of a planned step on the current stream: the step's forward, before the model.

        Args:
            location: the last plan.
            uploaded: what `batch.upload(extras=location.extras)` returned; without it the indices are uploaded here.

        Raises:
            ArgumentError: it was launched already, or is not the last plan.
            Violation: UNIT_MISMATCH: indices of another space.
            CaptureError: the stream is captured.
        """
        self.runtime.check_owner("back_up")
        if location is not self._open or location.launched:
            raise ArgumentError(
                f"back_up of {location!r}, which is not the plan of this step",
                value=location,
                remedy="call it once for each `map_last_location`, in order",
            )
        self._check_units(location)
        if len(location.backup_from):
            if uploaded is None:
                upload = self._moves.uploaded(location.backup_from.np, location.backup_to.np)
                source, target = self._moves.indices(upload)
            else:
                source, target = self._riding(location, uploaded)
            self._moves.to_host(source, target, "host tier: back up")
        location.launched = True
        self._open = None
        self._guard.planned = np.empty(0, dtype=np.int64)
        if levels.full and not self.runtime.checks_suspended():
            self._hot.check_backed(location.slots.np, 0, **self._where("back_up"))

    # Leaving

    def finish(self, slots: Slots, *, after: Fence | None = None) -> None:
        """READY requests leave with all they have: slots, device pages, host tokens. Behind `after` and all copies.

        Raises:
            As `SlotPool.free`; TIER_STATE. Nothing was freed.
        """
        self._release(slots, (TierState.READY,), after, "finish")

    def abort(self, slots: Slots, *, after: Fence | None = None) -> None:
        """Requests in any state of the tier leave with all they have.

        Host tokens that a writer may still write stay pending until it has ended, and pages that are being copied until
        they are.

        Raises:
            As `SlotPool.free`; TIER_STATE. Nothing was freed.
        """
        self._release(slots, (TierState.STAGED, TierState.DIRECT, TierState.READY), after, "abort")

    def _release(self, slots: Slots, allowed: tuple[TierState, ...], after: Fence | None, operation: str) -> None:
        check_fence(after, operation)
        rows = self.slots.rows_of(slots, operation, unique=True)
        self._guard.check_state(rows, allowed, operation)
        staged = [row for row in rows.tolist() if self._books.states[row] == TierState.STAGED]
        with self._guard.at_work():
            self.pages.release_requests(slots, after=self._guard.fence_of(staged, after))

    # Parts

    def _check_no_pages(self, slots: Slots, operation: str) -> None:
        if np.count_nonzero(self.pages.allocated(slots)):
            raise ArgumentError(
                f"{operation} for a request that has device pages",
                value=slots,
                remedy="use `admit_staged` for KV that is on the device; give a DIRECT request no pages",
            )

    def _entering(self, slots: Slots, operation: str) -> Ints:
        rows = self.slots.rows_of(slots, operation, unique=True)
        self._guard.check_state(rows, (TierState.OUTSIDE,), operation)
        return rows

    def _sizes(self, rows: Ints, lengths: object, max_tokens: object, operation: str) -> tuple[Ints, Ints]:
        length = np.broadcast_to(amounts(lengths, rows.size, operation), rows.shape)
        room = np.broadcast_to(amounts(max_tokens, rows.size, operation), rows.shape)
        if length.size and int(length.min()) < 1:
            raise ArgumentError(
                f"{operation} of {length.min()} tokens",
                value=int(length.min()),
                remedy="a request has at least one token",
            )
        most = self.host.num_tokens
        invariants.length_order(length, room, most, explain=length_words.reserved, **self._where(operation))
        return length, room

    def _enter(
        self, rows: Ints, length: Ints, room: Ints, state: TierState, writer: Fence | None, operation: str
    ) -> list[HostRuns]:
        runs = self.host.take(room, rows)
        held = np.array([len(one) for one in runs], dtype=np.int64)
        try:
            invariants.length_order(length, held, self.host.num_tokens, **self._where(operation))
        except Violation:
            self.host.free(runs)
            raise
        for row, one, n in zip(rows.tolist(), runs, length.tolist(), strict=True):
            self._books.enter(row, one, state, n)
            self.host.keep(one, self._guard)
            if writer is not None:
                self._guard.holds[row] = writer
        return runs

    def _check_step(self, slots: Slots, rows: Ints, length: Ints) -> None:
        if self._open is not None:
            raise ArgumentError(
                f"{self._open!r} was planned, and its backup not launched",
                value=self._open,
                remedy="call `back_up` for each `map_last_location`, in order",
            )
        self._hot.check_step(slots, rows, length, **self._where("map_last_location"))

    # Checks

    def _riding(
        self, location: LastLocation, uploaded: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of a plan that rode in a step's copy."""
        found = [uploaded.get(name) for name in ("backup_from", "backup_to")]
        source, target = found
        if source is None or target is None or not len(source) == len(target) == len(location.backup_from):
            raise ArgumentError(
                f"back_up of {location!r} with {uploaded!r}",
                value=location,
                remedy="pass what `batch.upload(extras=location.extras)` of this plan returned, or nothing",
            )
        return source, target

    def _check_units(self, location: LastLocation) -> None:
        where = self._where("back_up")
        for unit, given in (("location", location.backup_from), ("host_location", location.backup_to)):
            if given.unit != unit:
                invariants.unit_mismatch(unit, str(given.unit), **where)

    def verify(self) -> None:
        """Every law of the tier from scratch: states, runs, pages, and that what is backed up equals what is hot.

        Reads device memory; stands aside under capture.

        Raises:
            Violation: MIRROR_EQUAL; see `TierGuard.verify` and `PagePool.verify`.
        """
        self.runtime.check_owner("verify")
        if self.runtime.capturing:
            return
        self._guard.verify()
        self.pages.verify()
        self._hot.verify(0 if self._open is None else 1, **self._where("verify"))

    def _where(self, operation: str) -> Where:
        return {"object": self, "operation": operation, "step": self.runtime.step}
