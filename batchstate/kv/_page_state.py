"""The state of a page pool around the core's `PageRows`: fences, streams that write, reports and the full check.

All work on slot and page numbers that `PagePool` has checked.
"""

from typing import TYPE_CHECKING, Any, NoReturn, cast, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import SlotListener, TakenAt, check_of_pool, joined, new_pool_id, waiting_for
from batchstate._arrays import Ints, read_only
from batchstate._core import PageRows
from batchstate._origin import Changes
from batchstate.errors import PoolExhaustedError, unexplained
from batchstate.invariants import times_checked
from batchstate.kv._lengths import AHEAD
from batchstate.mirror import Contract, Handles, Pages
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, Owners, Runtime, Stream
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.kv._sharing import PageLease
    from batchstate.kv.prefix_cache import PrefixCache
    from batchstate.pools import SlotPool
    from batchstate.tables import Table

IN_FLIGHT, CONSERVATION, STALE_HANDLE = Code.SLOT_IN_FLIGHT, Code.SLOT_CONSERVATION, Code.SLOT_STALE_HANDLE
KV = "kv"
"""The KV memory that forwards of a plan write."""


@final
class KVWrites:
    """The streams of launched work that writes tokens of slots; the core counts these tokens.

    Work launched later on the same stream comes behind by itself. Another stream waits, on the device, for all that
    the writer's was given. A further writer of a slot waits so too: its last writer's stream is behind all of them.

    Attributes:
        marks: int64[capacity] of each registered KV memory, tokens of each slot whose writes there are launched: the
            first ones. Forwards write `KV`; a draft model's memory is written by calls of their own.
        writers: int64[capacity], the stream that wrote last, an index.
    """

    def __init__(self, runtime: Runtime, rows: PageRows) -> None:
        self.runtime = runtime
        self.marks: dict[str, Ints] = {KV: rows.arrays["launched"]}
        self.writers = np.zeros(rows.capacity, dtype=np.int64)
        self._rows = rows
        self._streams: list[Stream] = []

    def wait(self, writers: Ints) -> None:
        """Makes the current stream wait for the streams `writers` int64[n], on the device."""
        current = self.runtime.current_stream
        if not self.runtime.capturing:
            for writer in np.unique(writers).tolist():
                if writer < len(self._streams) and self._streams[writer] != current:
                    self.runtime.wait(self.runtime.record(self._streams[writer]))

    def behind(self, writers: Ints) -> int:
        """The stream behind all of `writers` int64[n]: theirs if it is one, else the current stream, which waits."""
        if len(self._streams) < 2 or not np.count_nonzero(writers != writers[:1]):
            return int(writers[0]) if writers.size else 0
        self.wait(writers)
        return self.writer()

    def wait_for_slots(self, rows: Ints) -> None:
        """Makes the current stream wait for all writes of these slots."""
        self.wait(self.writers[rows[np.any(list(self.written(rows).values()), axis=0)]])

    def written(self, rows: Ints | int) -> dict[str, Any]:
        """Tokens of rows whose writes are launched, in each memory."""
        return {memory: mark[rows] for memory, mark in self.marks.items()}

    def mark(self, memory: str, rows: Ints, starts: Ints, stops: Ints) -> None:
        """The current stream writes tokens of `rows` in another memory than `KV`, as `launched`."""
        self.note(rows, self.runtime.current_stream)
        mark = self.marks[memory]
        mark[rows] = np.where(mark[rows] < starts, mark[rows], np.maximum(mark[rows], stops))

    def cut(self, rows: Ints) -> None:
        """Tokens that were taken back are written in no memory; the core has seen to `KV`."""
        for memory, mark in self.marks.items():
            if memory != KV:
                mark[rows] = np.minimum(mark[rows], self._rows.arrays["committed"][rows])

    def launched(self, rows: Ints, stops: Ints, starts: Ints | None = None) -> bool:
        """The current stream writes the tokens of `rows` up to `stops`. Arrays int64[n].

        It waits for writes of them on other streams. A forward names the `starts` of the tokens it writes: a slot whose
        tokens before are not written then stays as it is, and the result is whether there is none.
        """
        self.note(rows, self.runtime.current_stream)
        return bool(self._rows.launch(rows, starts, stops))

    def only(self, stream: Stream) -> bool:
        """Whether no other stream has written: then nothing looks at single slots."""
        return len(self._streams) == 1 and self._streams[0] is stream

    def note(self, rows: Ints, stream: Stream) -> None:
        """The current `stream` writes further tokens of `rows` int64[n], behind writes of them on other streams."""
        if not self.only(stream):
            writer = self.writer()
            if np.count_nonzero(self.writers[rows] != writer):
                self.wait_for_slots(rows)
                self.writers[rows] = writer

    def writer(self) -> int:
        """The current stream, as a writer."""
        current = self.runtime.current_stream
        if current not in self._streams:
            self._streams.append(current)
        return self._streams.index(current)

    def begin(self, rows: Ints, tokens: int, writer: int) -> None:
        """Slots begin with tokens of another, or of a lease, which are written in each memory."""
        for mark in self.marks.values():
            mark[rows] = np.maximum(mark[rows], tokens)
        self.writers[rows] = writer


@final
class PageHolders(SlotListener):
    """The pages of a pool, those of its slots and leases, and the fences behind which holders of them have left.

    A page is free when its last holder is gone AND every forward that used it through any of its holders is complete.
    The second half matters for shared prefixes: request A leaves behind fence F, request B leaves later without a fence
    and was the last one, and the forward behind F may still be reading. So each holder that leaves behind a fence is
    counted until this fence is complete, whoever else holds the page.

    Changes begin with the mark of the transaction, which the operation of the pool takes away at its end.

    Attributes:
        table: int32[capacity, width], the pages of each slot.
        leases: by id, those that are not released.
        tables, kv, writes: by page or location; the KV memory that is registered, and what is written there.
        epochs, shares: see `PagePool`.
    """

    def __init__(self, slots: "SlotPool", rows: PageRows, name: str) -> None:
        self.runtime, self.transaction = slots.runtime, slots.transaction
        self.rows = self.core = rows
        self.table: npt.NDArray[np.int32] = rows.arrays["table"].reshape(-1, rows.width)
        self.leases: dict[int, PageLease] = {}
        self.tables: list[Table] = []
        self.kv: list[torch.Tensor] = []
        self.writes = KVWrites(slots.runtime, rows)
        self.cache: PrefixCache | None = None
        self.epochs = Changes(slots.capacity, "pages")
        self.shares = Changes(slots.capacity, "holders of the pages")
        self.name, self.label = name, f"PagePool {name!r}"
        self.pool_id = new_pool_id(self)
        self._slots = slots
        self.taken_at = TakenAt(self.runtime)
        self.note = self.taken_at.note
        self._seen: tuple[npt.NDArray[Any], ...] = ()  # arrays at the last `verify`

    def where(self, operation: str) -> Where:
        return {"object": self.label, "operation": operation, "step": self.runtime.step}

    def check_numbers(self, pages: Ints, operation: str) -> Where:
        """Refuses numbers that are no pages; where they are named, for what is asked of them next."""
        where = self.where(operation)
        invariants.slot_out_of_range(pages, self.rows.num_pages + 1, **where)
        invariants.slot_zero_allocated(pages, **where)
        return where

    def check_kept(self, handles: Handles, operation: str) -> None:
        """Refuses pages, or locations on them, that are not held still, but for padded rows at the end."""
        rows = handles._host_side()
        owned = np.count_nonzero(rows)
        per_page = 1 if isinstance(handles, Pages) else self.rows.page_size
        self.check_held(rows[:owned], handles.generations[:owned], per_page, operation)

    def check_held(self, numbers: Ints, held: Ints, per_page: int, operation: str) -> None:
        """Refuses (SLOT_STALE_HANDLE) numbers, `per_page` of a page, whose pages are not live, or were taken since."""
        times_checked[STALE_HANDLE] += 1
        if self.rows.look_held(numbers, held, per_page) >= 0:
            pages = numbers // per_page
            where = self.check_numbers(pages, operation)
            arrays = self.rows.arrays
            now = np.where(arrays["holders"][pages] > 0, arrays["generation"][pages], -1)
            invariants.slot_stale_handle(pages, held, now, **where)
            raise unexplained(self.name, operation, "pages")

    # Taking and holding

    def keep(self, locations: Handles, until: Fence, operation: str) -> None:
        """The pages of these locations are nobody else's before a fence, whoever lets go of them.

        They count as held once more, by one who has left behind the fence: so they can be written as before.
        """
        self.transaction.enter(f"{self.name}: {operation}")
        pages = np.unique(locations._host_side() // self.rows.page_size)
        self.hold(pages, 1, operation)
        self.drop(pages, until, operation)
        self.transaction.operation = None

    def grow(self, rows: Ints, totals: Ints, n: int, operation: str) -> None:
        """Gives rows int64[k] the `n` pages that they lack for `totals` tokens: `PageRows.look` has found them."""
        if self.taken_at.wanted:
            self.note(self.rows.next_pages(n), totals)
        self.transaction.operation = operation
        self.rows.grow(rows, totals)
        self.check_whole(operation)

    def hold(self, pages: Ints, times: int, operation: str, *, by_key: bool = False) -> None:
        """Begins a change that adds `times` holders to each of `pages` int64[n]; see `PageRows.hold`."""
        self.transaction.operation = operation
        row = self.rows.hold(pages, times, by_key)
        if row >= 0:
            self.transaction.operation = None
            invariants.slot_shared(pages, **self.where(operation))
            self._explain(f"row {row}", operation)
        if by_key:
            self.note(pages)
            self.check_whole(operation)
        elif self.runtime.agreement is not None:
            self.runtime.agreement.note(pages)

    def explain_free(self, n: int, operation: str) -> NoReturn:
        """Raises what stands against taking the next `n` pages."""
        rows = self.rows
        if n > rows.free:
            oldest = min((step for _, _, step in self.pending_groups()), default=None)
            raise PoolExhaustedError(
                self.label,
                requested=n,
                free=rows.free,
                pending=rows.pending,
                size=rows.num_pages,
                free_reserved=0,
                pending_since=oldest,
                overdue=oldest is not None and self.runtime.step - oldest > self.runtime.steps_in_flight,
            )
        self._explain(f"the next {n}", operation)

    def _explain(self, refused: str, operation: str) -> NoReturn:
        """Raises what is wrong where the core finds its own numbers broken."""
        self.verify(operation)
        raise unexplained(self.label, operation, refused)

    # Letting go

    def drop(self, pages: Ints, after: Fence | None, operation: str) -> None:
        """Takes a holder from each of `pages` (a page may be named several times), at once or behind `after`.

        Nothing here asks a fence.
        """
        self.transaction.operation = operation
        self._dropped(self.rows.drop(pages, after is not None, levels.cheap), pages, after, operation)

    def cut(self, rows: Ints, totals: Ints | None, firsts: Ints | None, after: Fence | None, operation: str) -> bool:
        """Leaves rows int64[n] `totals` tokens, or none, and pages from position `firsts` on; see `PageRows.cut`.

        Those that lose something have another epoch then. False, and no change, where the lengths are out of order.
        """
        self.transaction.operation = operation
        wrong, pages, losing = self.rows.cut(rows, totals, firsts, after is not None, levels.cheap)
        if pages is None:
            self.transaction.operation = None
            return False
        self._dropped(wrong, pages, after, operation)
        if totals is not None and self.runtime.agreement is not None:
            self.runtime.agreement.note(totals)
        if losing is not None:
            self.epochs.note(losing, operation, self.runtime.step)
        self.writes.cut(rows)
        return True

    def _dropped(self, wrong: int, pages: Ints, after: Fence | None, operation: str) -> None:
        if wrong >= 0:
            where = self.check_numbers(pages, operation)
            invariants.slot_double_free(pages, self.rows.arrays["holders"][pages] > 0, **where)
            raise unexplained(self.label, operation, "pages")
        if pages.size:
            if self.runtime.agreement is not None:
                self.runtime.agreement.note(pages)
            if after is not None:
                self.transaction.behind(after).add(self.rows, pages)
        if levels.cheap:
            times_checked[CONSERVATION] += 1
            if wrong < -1:
                self._check_live(self.rows.live, operation)

    def pending_groups(self) -> list[tuple[Ints, Fence, int]]:
        """The pages that nobody holds any more, by the fences that they wait for; the oldest first. Queries nothing.

        Pages int64[n] come with their fences as one, and the step in which the first holder left.
        """
        behind: dict[int, dict[int, QueriedFence]] = {}
        for group in self.transaction.groups:
            for page in dict.fromkeys(group.left.of(self.rows).tolist()):
                if self.rows.arrays["holders"][page] == 0:
                    behind.setdefault(page, {}).setdefault(id(group.fence.fence), group.fence)
        groups: dict[tuple[int, ...], tuple[list[int], list[QueriedFence]]] = {}
        for page, fences in behind.items():
            groups.setdefault(tuple(fences), ([], list(fences.values())))[0].append(page)
        return [
            (np.array(numbers), cast(Fence, joined(*(queried.fence for queried in fences))), fences[0].step)
            for numbers, fences in groups.values()
        ]

    def refuse_reaped(self, numbers: Ints) -> None:
        arrays, where = self.rows.arrays, self.check_numbers(numbers, "reap")
        times = np.bincount(numbers, minlength=self.rows.num_pages + 1)[numbers]
        invariants.slot_double_free(numbers, times <= arrays["leaving"][numbers], **where)
        self._check_live(self.rows.live, "reap")

    # Slots are taken without pages and get them by growing; they leave with them, or without.

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses (SLOT_CONSERVATION) to free slots alone that have pages, which would never be released."""
        owned = self.rows.owners(rows)
        if np.count_nonzero(owned):
            owners, pages = rows[owned > 0], int(owned.sum())
            problem = f"{owners.size} of these slots still own {pages} pages: {owners[:8].tolist()}"
            remedy = "use `pages.release_requests(slots, after=...)`, which frees a request with all it has"
            self._check_live(self.rows.live - pages, operation, leaked=owners, problem=problem, remedy=remedy)

    def check_release(self, rows: Ints, operation: str) -> None:
        """Whole requests leave with their pages."""

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        self.cut(rows, None, None, after, "release_requests")

    def check_clear(self, operation: str) -> None:
        written = [lease for lease in self.leases.values() if lease.writer is not None]
        ended = self.transaction.query([cast(Fence, lease.writer) for lease in written])
        for lease, over in zip(written, ended, strict=True):
            in_flight = np.full(lease.pages.size, not over)
            invariants.slot_in_flight(lease.pages, in_flight, behind=repr(lease.writer), **self.where(operation))

    def on_clear(self) -> None:
        """Leases are given back, and the pages come in order again, without keys."""
        for lease in self.leases.values():
            self.drop(lease.pages, None, "clear")
            lease.released = True
        self.leases.clear()
        self.rows.sort_free()
        if self.cache is not None:
            self.cache._page_of.clear()

    def zero_memory(self) -> None:
        for table in self.tables:
            table.zero()
        for memory in self.kv:
            page = memory[: 1 if len(memory) == self.rows.num_pages + 1 else self.rows.page_size]
            self.runtime.launch(page.zero_, writes=(page,), name=f"{self.name}: zero page 0")

    # Checks

    def check_whole(self, operation: str) -> None:
        """Checks, at `cheap`, that free + pending + live are all pages: SLOT_CONSERVATION."""
        if levels.cheap:
            times_checked[CONSERVATION] += 1
            if not self.rows.whole():
                self._check_live(self.rows.live, operation)

    def _check_live(self, live: int, operation: str, **report: Any) -> None:
        """Checks that so many are live, as counted elsewhere: SLOT_CONSERVATION; see there for `report`."""
        rows = self.rows
        invariants.slot_conservation(rows.free, rows.pending, live, rows.num_pages, **report, **self.where(operation))

    def expect_idle(self, operation: str) -> None:
        """Checks that nothing is live: SLOT_CONSERVATION, naming some pages that are."""
        self.transaction.reap()
        if self.rows.live:
            leaked = self.rows.arrays["holders"].nonzero()[0]
            waits = waiting_for((pages, step) for pages, _, step in self.pending_groups())
            self._check_live(0, operation, leaked=leaked, named=self.taken_at.named, waits=waits)

    def verify(self, operation: str = "verify") -> None:
        """Counts all anew: each page has as many holders as it records, and each holder is a live slot or a lease.

        Nothing here trusts the loops of the core, which it checks.
        """
        rows, arrays, table = self.rows, self.rows.arrays, self.table
        size, leased = rows.num_pages + 1, [lease.pages for lease in self.leases.values()]
        holders, leaving, cached, count, first, sent = (
            arrays[name].astype(np.int64) for name in ("holders", "leaving", "cached", "count", "first", "sent")
        )
        idle = rows.oldest(rows.num_pages)
        free = np.concatenate([arrays["stack"][: rows.free - rows.idle].astype(np.int64), idle])
        where = self.check_numbers(free, operation)
        invariants.slot_in_flight(free, leaving[free] > 0, **where)
        invariants.slot_shared(free, **where)
        left = [group.left.of(rows) for group in self.transaction.groups]
        invariants.page_owner(np.bincount(np.concatenate([free[:0], *left]), minlength=size), leaving, **where)
        listed = np.bincount(free, minlength=size)
        held = np.bincount(np.concatenate([table.reshape(-1), *leased]), minlength=size)
        unheld = holders == 0
        held[0] = unheld[0] = 0
        unused = unheld & (leaving == 0)
        # A free page is recorded as -1, and counted -1 for the one list that it stands in. One that is on no list, with
        # no holder recorded or counted, would never come back: it counts as held.
        recorded = np.where(unused, np.where(listed + held == 0, 1, -1), holders)
        invariants.page_owner(held - listed, recorded, **where)
        pending, live = int(np.count_nonzero(unheld & (leaving > 0))), int(np.count_nonzero(holders))
        for waiting, alive in ((pending, live), (rows.pending, live), (pending, rows.live)):
            invariants.slot_conservation(free.size, waiting, alive, rows.num_pages, **where)
        invariants.page_owner(np.bincount(idle, minlength=size), cached * unused, **where)
        shared = np.flatnonzero(holders > 1)
        counts = np.array([shared.size]), np.array([rows.shared])
        invariants.page_owner(*counts, pages=np.append(shared, 0)[:1], **where)
        if self.cache is not None:
            self.cache._verify()
        most, committed, allocated = rows.width * rows.page_size, arrays["committed"], count * rows.page_size
        invariants.length_order(committed, allocated, most, **where)
        for tokens in (*self.writes.marks.values(), arrays["accepted"]):
            invariants.length_order(tokens, committed, most, explain=AHEAD, **where)
        invariants.length_order(first * rows.page_size, committed, most, **where)
        invariants.length_order(sent * rows.page_size, allocated, most, **where)
        # Each row names pages exactly from the first that was not given back up to its last one.
        columns = np.arange(rows.width)
        named = (table != 0) & (columns < count[:, None]) & (columns >= first[:, None])
        invariants.page_owner(named.sum(axis=1), count - first, **where)
        owners = np.flatnonzero(count)
        orphans = owners[~self._slots.is_live(owners)]
        if orphans.size:
            self._check_live(rows.live - int((count - first)[orphans].sum()), operation, leaked=orphans)
        self._check_changes(where)

    def _check_changes(self, where: Where) -> None:
        """Nothing has changed since the last time that is not noted, and no generation fell.

        A change of the pages covers the holders too, since it refuses all that was derived before: a slot's new request
        may begin with shared pages that the former request had alone.
        """
        arrays, table = self.rows.arrays, self.table
        alone = (arrays["holders"][table] == 1) & (arrays["cached"][table] == 0)
        now = table, arrays["committed"], alone, self.epochs.rows, self.shares.rows, arrays["generation"]
        before, self._seen = self._seen, tuple(array.copy() for array in now)
        if not before:
            return
        pages, committed, held_alone, epochs, shares, generations = before
        least = np.maximum(arrays["generation"], generations)
        invariants.slot_stale_handle(np.arange(least.size), least, arrays["generation"], **where)
        there = pages != 0
        lost = (arrays["committed"] < committed) | (there & (table != pages)).any(axis=1)
        shared = (there & (table == pages) & held_alone & ~alone).any(axis=1)
        unnoted = self.epochs.rows == epochs
        for changes, changed in (
            (self.epochs, lost & unnoted),
            (self.shares, shared & unnoted & (self.shares.rows == shares)),
        ):
            problem = f"the {changes.what} of a slot have changed, and what was derived from them is not refused"
            report = problem, "a change noted for the slot", "none"
            slots = np.arange(changed.size)
            invariants.derived_stale(changed, lambda _, report=report: report, slots=slots, **where)  # type: ignore[misc]


@final
class PageSpace:
    """The `Pages` of a pool, or the `Locations` on them, `per_page` of each, as an `IndexSpace` of tables."""

    def __init__(self, holders: PageHolders, kind: type[Handles], per_page: int) -> None:
        self.runtime, self.transaction, self.name = holders.runtime, holders.transaction, holders.name
        self.kind, self.per_page = kind, per_page
        self.capacity = (holders.rows.num_pages + 1) * per_page
        self._holders = holders
        generations, held = holders.rows.arrays["generation"], holders.rows.arrays["holders"]

        def owners_of(rows: Ints) -> Ints:
            pages = rows // per_page
            owners: Ints = generations[pages] * (held[pages] > 0)
            return owners

        self.owners_of: Owners = owners_of

    def generations_of(self, numbers: Ints) -> Ints:
        """The present generations of the pages of `numbers`, int64[n]."""
        generations: Ints = self._holders.rows.arrays["generation"]
        return generations[numbers if self.per_page == 1 else numbers // self.per_page]

    def handles(self, numbers: Ints, kind: type[Handles] | None = None) -> Handles:
        """The handles of `numbers` int64[n], which are live; of a `kind` of them."""
        return (kind or self.kind).of_pool(
            self.runtime,
            numbers,
            self.generations_of(numbers),
            pool_id=self._holders.pool_id,
            contract=Contract.HOST_ONLY,
            name=self.name,
        )

    def rows_of(self, handles: Handles, operation: str, *, padded: bool = False) -> Ints:
        self.transaction.enter(f"{self.name}: {operation}")
        check_of_pool(self._holders, handles, self.kind, operation, padded)
        rows = handles._host_side()
        owned = np.count_nonzero(rows) if padded else rows.size
        self._holders.check_held(rows[:owned], handles.generations[:owned], self.per_page, operation)
        return read_only(rows)
