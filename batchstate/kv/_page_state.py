"""The state of a page pool around the core's `PageRows`: fences, streams that write, reports and the full check.

All work on slot and page numbers that `PagePool` has checked.
"""

from typing import TYPE_CHECKING, Any, NoReturn, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._allocator import SlotListener, TakenAt, Transaction, joined, new_pool_id, numbers_of_pool
from batchstate._arrays import read_only
from batchstate._core import PageRows
from batchstate.errors import PoolExhaustedError, unexplained
from batchstate.invariants import times_checked
from batchstate.kv._lengths import AHEAD, OVERWRITTEN
from batchstate.mirror import Contract, Handles
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.kv.pages import PagePool

Ints = npt.NDArray[np.int64]

IN_FLIGHT, DOUBLE_FREE, CONSERVATION = Code.SLOT_IN_FLIGHT, Code.SLOT_DOUBLE_FREE, Code.SLOT_CONSERVATION
STALE_HANDLE = Code.SLOT_STALE_HANDLE


@final
class KVWrites:
    """The streams of launched work that writes tokens of slots; the core counts these tokens.

    Work launched later on the same stream comes behind by itself. Another stream waits, on the device, for all that
    the writer's was given. A further writer of a slot waits so too: its last writer's stream is behind all of them.

    Attributes:
        tokens: int64[capacity], tokens of each slot whose writes are launched: the first ones.
    """

    def __init__(self, runtime: Runtime, rows: PageRows) -> None:
        self.runtime = runtime
        self.tokens: Ints = rows.arrays["launched"]
        self._rows = rows
        self._writer = np.zeros(rows.capacity, dtype=np.int64)  # index of the stream that wrote last
        self._streams: list[Stream] = []

    def writer_of(self, row: int) -> int:
        """The stream of a slot's last write, for `begin` and `wait`."""
        return int(self._writer[row])

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
        self.wait(self._writer[rows[self.tokens[rows] > 0]])

    def launched(self, rows: Ints, stops: Ints, starts: Ints | None = None, stream: Stream | None = None) -> bool:
        """The current `stream` writes the tokens of `rows` up to `stops`. Arrays int64[n].

        It waits for writes of them on other streams. A forward names the `starts` of the tokens it writes: a slot whose
        tokens before are not written then stays as it is, and the result is whether there is none.
        """
        self.note(rows, stream or self.runtime.current_stream)
        return bool(self._rows.launch(rows, starts, stops))

    def only(self, stream: Stream) -> bool:
        """Whether no other stream has written: then nothing looks at single slots."""
        return len(self._streams) == 1 and self._streams[0] is stream

    def note(self, rows: Ints, stream: Stream) -> None:
        """The current `stream` writes further tokens of `rows` int64[n], behind writes of them on other streams."""
        if not self.only(stream):
            writer = self.writer()
            if np.count_nonzero(self._writer[rows] != writer):
                self.wait_for_slots(rows)
                self._writer[rows] = writer

    def writer(self) -> int:
        """The current stream, as a writer."""
        current = self.runtime.current_stream
        if current not in self._streams:
            self._streams.append(current)
        return self._streams.index(current)

    def begin(self, rows: Ints, tokens: int, writer: int) -> None:
        """Fresh slots begin with written tokens of another, or of a lease."""
        self.tokens[rows] = tokens
        self._writer[rows] = writer


@final
class PageHolders:
    """The pages of a pool, and the fences behind which holders of them have left.

    A page is free when its last holder is gone AND every forward that used it through any of its holders is complete.
    The second half matters for shared prefixes: request A leaves behind fence F, request B leaves later without a fence
    and was the last one, and the forward behind F may still be reading. So each holder that leaves behind a fence is
    counted until this fence is complete, whoever else holds the page.

    Changes begin with the mark of the transaction, which the operation of the pool takes away at its end.

    Attributes:
        rows: pages of slots, holders and states.
        pool_id, name, label: of the pool.
    """

    def __init__(self, runtime: Runtime, rows: PageRows, *, name: str, transaction: Transaction) -> None:
        self.runtime = runtime
        self.rows = rows
        self.transaction = transaction
        self.name = name
        self.pool_id = new_pool_id(self)
        self.label = f"PagePool {name!r}"
        self._leaving: list[tuple[QueriedFence, list[Ints]]] = []
        self._taken_at = TakenAt()

    def where(self, operation: str) -> Where:
        return {"object": self.label, "operation": operation, "step": self.runtime.step}

    # Taking and holding

    def take(self, n: int, operation: str) -> Ints:
        """Takes `n` pages with one holder each, int64[n]. `query_fences` comes first.

        Raises:
            PoolExhaustedError: fewer are free.
            Violation: SLOT_ZERO_ALLOCATED, SLOT_OUT_OF_RANGE, SLOT_IN_FLIGHT, SLOT_SHARED, PAGE_OWNER.
        """
        if not self.rows.look_free(n):
            self.explain_free(n, operation)
        pages: Ints = np.empty(n, dtype=np.int64)
        self.transaction.operation = operation
        self.rows.take(pages)
        self.note(pages)
        self.check_whole(operation)
        return pages

    def grow(self, rows: Ints, totals: Ints, n: int, operation: str) -> None:
        """Gives rows int64[k] the `n` pages that they lack for `totals` tokens: `PageRows.look` has found them."""
        if self.notes:
            self.note(self.rows.next_pages(n))
        self.transaction.operation = operation
        self.rows.grow(rows, totals)
        self.check_whole(operation)

    def hold(self, pages: Ints, times: int, operation: str, *, by_key: bool = False) -> None:
        """Begins a change that adds `times` holders to each of `pages` int64[n]; see `PageRows.hold`."""
        self.transaction.operation = operation
        row = self.rows.hold(pages, times, by_key)
        if row >= 0:
            self.transaction.operation = None
            where, arrays = self.where(operation), self.rows.arrays
            if by_key:
                held, current = (np.where(arrays["cached"] > 0, arrays["keyed"], 0), arrays["generation"])
                invariants.slot_stale_handle(pages, held[pages], current[pages], **where)
            invariants.slot_shared(pages, **where)
            held = arrays["holders"][pages].astype(np.int64)
            invariants.page_owner(held, np.maximum(held, 1), pages=pages, **where)
            raise unexplained(self.label, operation, f"row {row}")
        if by_key:
            self.note(pages)
            self.check_whole(operation)

    @property
    def notes(self) -> bool:
        """Whether `note` wants the pages that are taken."""
        return levels.full or bool(self._taken_at.lines) or self.runtime.agreement is not None

    def note(self, pages: Ints) -> None:
        """Tells ranks which pages are taken, and remembers at `full` the lines that led there, innermost first."""
        if self.runtime.agreement is not None:
            self.runtime.agreement.note(pages)
        if levels.full or self._taken_at.lines:
            self._taken_at.note(pages)

    def explain_free(self, n: int, operation: str) -> NoReturn:
        """Raises what stands against taking the next `n` pages."""
        rows, where = self.rows, self.where(operation)
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
        pages = rows.next_pages(n)
        invariants.slot_out_of_range(pages, rows.num_pages + 1, **where)
        invariants.slot_zero_allocated(pages, **where)
        invariants.slot_in_flight(pages, rows.arrays["leaving"][pages] > 0, **where)
        invariants.slot_shared(np.concatenate([rows.arrays["holders"].nonzero()[0], pages]), **where)
        cached = (rows.arrays["cached"][pages] > 0).astype(np.int64)
        invariants.page_owner(cached, 0 * cached, pages=pages, **where)
        raise unexplained(self.label, operation, f"the next {n}")

    def explain_writable(self, pages: Ints, operation: str) -> None:
        """Refuses (PAGE_OWNER) a write into one of `pages` that is shared or cached; page 0 stands for none yet."""
        arrays = self.rows.arrays
        held = np.where(pages > 0, arrays["holders"][pages].astype(np.int64) + arrays["cached"][pages], 1)
        invariants.page_owner(held, np.ones_like(held), pages=pages, **self.where(operation))

    # Letting go

    def drop(self, pages: Ints, after: Fence | None, operation: str) -> None:
        """Takes a holder from each of `pages` (a page may be named several times), at once or behind `after`.

        The caller has called `query_fences` before it checked anything: nothing here asks a fence.

        Raises:
            Violation: SLOT_DOUBLE_FREE: a page is not live. SLOT_CONSERVATION, at `cheap`.
        """
        self.transaction.operation = operation
        self._dropped(self.rows.drop(pages, after is not None), pages, after, operation)

    def cut(
        self, rows: Ints, totals: Ints | None, firsts: Ints | None, after: Fence | None, operation: str
    ) -> Ints | None:
        """Leaves rows int64[n] `totals` tokens, or none, and pages from position `firsts` on; see `PageRows.cut`.

        Returns:
            rows that have lost tokens or pages, int64[k]; None where the lengths are out of order: nothing was changed.

        Raises:
            As `drop`.
        """
        loses = np.empty(rows.size, dtype=np.bool_)
        self.transaction.operation = operation
        row, pages = self.rows.cut(rows, totals, firsts, after is not None, loses.view(np.uint8))
        if pages is None:
            self.transaction.operation = None
            return None
        self._dropped(row, pages, after, operation)
        losing: Ints = rows[loses]
        return losing

    def _dropped(self, row: int, pages: Ints, after: Fence | None, operation: str) -> None:
        if row >= 0:
            self._explain_counted(pages, "holders", operation)
        if pages.size:
            if self.runtime.agreement is not None:
                self.runtime.agreement.note(pages)
            if after is not None:
                self._defer(self.transaction.watch(after), pages)
        self.check_whole(operation)

    def _defer(self, fence: QueriedFence, pages: Ints) -> None:
        """Keeps `pages` until `fence` is complete, or agreed to be. Nobody writes the array any more."""
        if self._leaving and self._leaving[-1][0].fence is fence.fence:
            self._leaving[-1][1].append(pages)
        else:
            self._leaving.append((fence, [pages]))

    def query_fences(self) -> int:
        """Lets those go whose fences are complete; says how many pages are free now. Never waits.

        Fences are code of the engine, and may call the pool: to be called before anything is checked. If one raises,
        nothing has changed. Called by a fence that it queries, it does nothing; nor does it under capture.

        Raises:
            Violation: SLOT_IN_FLIGHT, SLOT_DOUBLE_FREE, SLOT_CONSERVATION, at `cheap`.
        """
        if not self._leaving or self.runtime.capturing:
            return 0
        groups = tuple(self._leaving)
        answers = self.transaction.query([fence for fence, _ in groups])
        done = [group for group, complete in zip(groups, answers, strict=True) if complete]
        if not done:
            return 0
        if levels.cheap:
            times_checked[IN_FLIGHT] += 1
            for fence, parts in done:
                if not fence.complete:
                    pages = np.concatenate(parts)
                    invariants.slot_in_flight(pages, np.ones(pages.size, np.bool_), **self.where("reap"))
        self.transaction.operation = "reap"
        free = self.rows.free
        gone = {id(group) for group in done}
        self._leaving = [group for group in self._leaving if id(group) not in gone]
        for _, parts in done:
            for pages in parts:
                if self.rows.reap(pages) >= 0:
                    self._explain_counted(pages, "leaving", "reap")
        self.transaction.operation = None
        self.check_whole("reap")
        return int(self.rows.free - free)

    def pending_groups(self) -> list[tuple[Ints, Fence, int]]:
        """The pages that nobody holds any more, by the fences that they wait for; the oldest first. Queries nothing.

        Returns:
            pages int64[n], their fences as one, and the step in which the first holder left.
        """
        behind: dict[int, list[QueriedFence]] = {}
        for fence, parts in self._leaving:
            for page in dict.fromkeys(np.concatenate(parts).tolist()):
                if self.rows.arrays["holders"][page] == 0:
                    behind.setdefault(page, []).append(fence)
        groups: dict[tuple[int, ...], list[int]] = {}
        for page, fences in behind.items():
            groups.setdefault(tuple(map(id, fences)), []).append(page)
        pending: list[tuple[Ints, Fence, int]] = []
        for pages in groups.values():
            fences = behind[pages[0]]
            together: Any = joined(*(queried.fence for queried in fences))
            pending.append((np.array(pages), together, fences[0].step))
        return pending

    def _explain_counted(self, pages: Ints, counts: str, operation: str) -> NoReturn:
        """Raises that one of `pages` is named more often than it is held, or than holders of it have left."""
        where = self.where(operation)
        invariants.slot_out_of_range(pages, self.rows.num_pages + 1, **where)
        invariants.slot_zero_allocated(pages, **where)
        invariants.slot_double_free(pages, self.rows.arrays[counts][pages] > 0, **where)
        raise unexplained(self.label, operation, "pages")

    def check_none_pending(self, operation: str) -> None:
        """Refuses (SLOT_IN_FLIGHT) if a forward still reads pages, as last queried; names its fence."""
        for fence, parts in self._leaving:
            pages, behind = np.concatenate(parts), f"{fence.fence!r}, freed in step {fence.step}"
            invariants.slot_in_flight(pages, np.ones(pages.size, np.bool_), behind=behind, **self.where(operation))

    # Checks

    def check_whole(self, operation: str) -> None:
        """Checks, at `cheap`, that free + pending + live are all pages: SLOT_CONSERVATION."""
        if levels.cheap:
            times_checked[CONSERVATION] += 1
            if not self.rows.whole():
                self.check_live(self.rows.live, operation)

    def check_live(
        self,
        live: int,
        operation: str,
        *,
        leaked: Ints | None = None,
        problem: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """Checks that so many are live, as counted elsewhere: SLOT_CONSERVATION; see there for the rest."""
        rows, where = self.rows, self.where(operation)
        options = {"leaked": leaked, "problem": problem, "remedy": remedy}
        invariants.slot_conservation(rows.free, rows.pending, live, rows.num_pages, **options, **where)  # type: ignore[arg-type]

    def expect_idle(self, operation: str) -> None:
        """Checks that nothing is live: SLOT_CONSERVATION, naming some pages that are."""
        self.query_fences()
        rows = self.rows
        if rows.live:
            leaked = rows.arrays["holders"].nonzero()[0]
            free, pending, size = rows.free, rows.pending, rows.num_pages
            where = self.where(operation)
            invariants.slot_conservation(free, pending, 0, size, leaked=leaked, named=self._taken_at.named, **where)

    def verify(self, counted: Ints) -> None:
        """Checks every invariant of the pages from scratch. `counted` int64[num_pages + 1] are their holders."""
        rows, where = self.rows, self.where("verify")
        size = rows.num_pages + 1
        arrays = rows.arrays
        holders, leaving, cached = (arrays[name].astype(np.int64) for name in ("holders", "leaving", "cached"))
        idle = rows.oldest(rows.num_pages)
        free = np.concatenate([arrays["stack"][: rows.free - rows.idle].astype(np.int64), idle])
        invariants.slot_out_of_range(free, size, **where)
        invariants.slot_zero_allocated(free, **where)
        invariants.slot_in_flight(free, leaving[free] > 0, **where)
        invariants.slot_shared(free, **where)
        listed = np.bincount(free, minlength=size)
        left = [pages for _, parts in self._leaving for pages in parts]
        invariants.page_owner(np.bincount(np.concatenate([free[:0], *left]), minlength=size), leaving, **where)
        unheld = holders == 0
        unheld[0] = False
        lost = np.flatnonzero(unheld & (leaving == 0) & (listed == 0) & (counted == 0))
        if lost.size:  # as many references as holders, none, and yet it cannot be taken: it would never come back
            invariants.page_owner(counted[lost], np.ones_like(lost), pages=lost, **where)
        # A free page is recorded as -1, and counted -1 for the one list that it stands in.
        recorded = np.where(unheld & (leaving == 0), -1, holders)
        invariants.page_owner(counted - listed, recorded, **where)
        pending, live = int(np.count_nonzero(unheld & (leaving > 0))), int(np.count_nonzero(holders))
        for waiting, held in ((pending, live), (rows.pending, live), (pending, rows.live)):
            invariants.slot_conservation(free.size, waiting, held, rows.num_pages, **where)
        invariants.page_owner(np.bincount(idle, minlength=size), cached * (unheld & (leaving == 0)), **where)
        shared = np.flatnonzero(holders > 1)
        if shared.size != rows.shared:
            recorded = np.array([rows.shared])
            first = shared[:1] if shared.size else None
            invariants.page_owner(np.array([shared.size]), recorded, pages=first, **where)


@final
class PageSpace:
    """The pages of a pool, or the locations on them, as an `IndexSpace` of tables.

    Attributes:
        kind: of the handles: `Pages` or `Locations`.
        per_page: rows that a page has in a table.
    """

    def __init__(self, holders: PageHolders, kind: type[Handles], per_page: int) -> None:
        self.runtime = holders.runtime
        self.transaction = holders.transaction
        self.name = holders.name
        self.kind = kind
        self.per_page = per_page
        self.capacity = (holders.rows.num_pages + 1) * per_page
        self._holders = holders

    def generations_of(self, numbers: Ints) -> Ints:
        """The present generations of the pages of `numbers`, int64[n]."""
        generations: Ints = self._holders.rows.arrays["generation"]
        return generations[numbers if self.per_page == 1 else numbers // self.per_page]

    def handles(self, numbers: Ints) -> Handles:
        """The handles of `numbers` int64[n], which are live."""
        return self.kind.of_pool(
            self.runtime,
            numbers,
            self.generations_of(numbers),
            pool_id=self._holders.pool_id,
            contract=Contract.HOST_ONLY,
            name=self.name,
        )

    def rows_of(self, handles: Handles, operation: str, *, padded: bool = False) -> Ints:
        self.transaction.enter(f"{self.name}: {operation}")
        rows = numbers_of_pool(self._holders, handles, self.kind, operation, padded)
        owned = np.count_nonzero(rows) if padded else rows.size
        numbers, held = rows[:owned], handles.generations[:owned]
        times_checked[STALE_HANDLE] += 1
        if self._holders.rows.look_held(numbers, held, self.per_page) >= 0:
            where = self._holders.where(operation)
            pages, end = numbers // self.per_page, self._holders.rows.num_pages + 1
            invariants.slot_out_of_range(pages, end, **where)
            invariants.slot_zero_allocated(pages, **where)
            live = self._holders.rows.arrays["holders"][pages] > 0
            invariants.slot_stale_handle(pages, held, np.where(live, self.generations_of(numbers), -1), **where)
            raise unexplained(self.name, operation, "pages")
        return read_only(rows)


@final
class PageOwners(SlotListener):
    """The pages of slots. Slots are taken without pages and get them by growing; they leave with them, or without."""

    def __init__(self, pool: "PagePool") -> None:
        self._pool = pool
        self._rows, self._holders = pool._rows, pool._holders
        self._seen: _Seen | None = None  # at the last `verify`

    def before_free(self, rows: Ints) -> None:
        """Queries the fences that pages wait for; nothing that follows asks one."""
        self._holders.query_fences()

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses (SLOT_CONSERVATION) to free slots alone that have pages, which would never be released."""
        owned = self._rows.owners(rows)
        if np.count_nonzero(owned):
            owners, pages = rows[owned > 0], int(owned.sum())
            names = ", ".join(str(slot) for slot in owners[:8]) + (", ..." if owners.size > 8 else "")
            problem = f"these slots still own {pages} pages: {names}"
            remedy = "use `pages.release_requests(slots, after=...)`, which frees a request with all it has"
            live = self._rows.live - pages
            self._holders.check_live(live, operation, leaked=owners, problem=problem, remedy=remedy)

    def check_release(self, rows: Ints, operation: str) -> None:
        """Whole requests leave with their pages."""

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        self.cut(rows, None, None, after, "release_requests")

    def check_clear(self, operation: str) -> None:
        self._holders.check_none_pending(operation)

    def on_clear(self) -> None:
        """Leases are given back, and the pages come in order again."""
        leases = self._pool._sharing.leases
        for lease in leases.values():
            self._holders.drop(lease.pages, None, "clear")
            lease.released = True
        leases.clear()
        self._rows.sort_free()
        if self._pool._cache is not None:
            self._pool._cache._forget_all()

    def cut(self, rows: Ints, totals: Ints | None, firsts: Ints | None, after: Fence | None, operation: str) -> bool:
        """As `PageHolders.cut`; those that lose something have another epoch then. Whether it went through."""
        losing = self._holders.cut(rows, totals, firsts, after, operation)
        if losing is not None and losing.size:
            self._pool.epochs.note(losing, operation, self._pool.runtime.step)
        return losing is not None

    def verify(self) -> None:
        """Checks every invariant of the pages from scratch, and that each belongs to a live slot or a lease."""
        rows, where, arrays = self._rows, self._holders.where("verify"), self._rows.arrays
        size, pages = rows.page_size, self._pool.page_table
        leased = [lease.pages for lease in self._pool._sharing.leases.values()]
        held = np.bincount(np.concatenate([pages.reshape(-1), *leased]), minlength=rows.num_pages + 1)
        held[0] = 0
        self._holders.verify(held)
        if self._pool._cache is not None:
            self._pool._cache._verify()
        count, first, sent = (arrays[name].astype(np.int64) for name in ("count", "first", "sent"))
        most, committed = rows.width * size, arrays["committed"]
        invariants.length_order(committed, count * size, most, **where)
        invariants.length_order(arrays["launched"], committed, most, explain=OVERWRITTEN, **where)
        invariants.length_order(arrays["accepted"], committed, most, explain=AHEAD, **where)
        invariants.length_order(first * size, committed, most, **where)
        invariants.length_order(sent * size, count * size, most, **where)
        # Each row names pages exactly from the first that was not given back up to its last one.
        columns = np.arange(rows.width)
        named = (pages != 0) & (columns < count[:, None]) & (columns >= first[:, None])
        invariants.page_owner(named.sum(axis=1), count - first, **where)
        owners = np.flatnonzero(count)
        orphans = owners[~self._pool.slots.is_live(owners)]
        if orphans.size:
            live = rows.live - int((count - first)[orphans].sum())
            self._holders.check_live(live, "verify", leaked=orphans)
        self._check_changes(where)

    def _check_changes(self, where: Where) -> None:
        """Nothing has changed since the last time that is not noted, and no generation fell.

        A slot that has lost tokens, pages or the sole use of one has a change noted for that. A change of the pages
        covers the holders too, since it refuses all that was derived before: a slot's new request may begin with shared
        pages that the former request had alone.
        """
        arrays, pages = self._rows.arrays, self._pool.page_table
        held_alone = (arrays["holders"][pages] == 1) & (arrays["cached"][pages] == 0)
        epochs, shares = self._pool.epochs, self._pool.shares
        now = _Seen(
            pages.copy(),
            arrays["committed"].copy(),
            held_alone,
            epochs.rows.copy(),
            shares.rows.copy(),
            arrays["generation"].copy(),
        )
        before, self._seen = self._seen, now
        if before is None:
            return
        least = np.maximum(now.generations, before.generations)
        invariants.slot_stale_handle(np.arange(least.size), least, now.generations, **where)
        there = before.pages != 0
        lost = (now.committed < before.committed) | (there & (now.pages != before.pages)).any(axis=1)
        shared = (there & (now.pages == before.pages) & before.held_alone & ~held_alone).any(axis=1)
        renewed = now.epochs != before.epochs
        for changes, changed, noted in (
            (epochs, lost, renewed),
            (shares, shared, renewed | (now.shares != before.shares)),
        ):
            invariants.derived_stale(
                changed & ~noted,
                lambda slot, name=changes.what: (  # type: ignore[misc]
                    f"the {name} of slot {slot} have changed, and what was derived from them is not refused",
                    "a change noted for the slot",
                    "none",
                ),
                slots=np.arange(changed.size),
                **where,
            )


@final
@attrs.frozen(eq=False)
class _Seen:
    """The pages of all slots, as `verify` saw them."""

    pages: npt.NDArray[np.int32]
    committed: Ints
    held_alone: npt.NDArray[np.bool_]
    epochs: Ints
    shares: Ints
    generations: Ints
