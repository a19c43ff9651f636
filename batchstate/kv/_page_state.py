"""The state of a page pool: the pages of each slot, what is written on them, and the references to each page.

All work on slot and page numbers that `PagePool` has checked.
"""

from typing import TYPE_CHECKING, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._allocator import LIVE_BYTE, AllFences, Allocator, Generations, SlotListener, Transaction
from batchstate._arrays import arange_per_row, read_only
from batchstate.kv._lengths import OVERWRITTEN
from batchstate.mirror import Contract, Handles
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, Runtime, Stream
from batchstate.violations import Where

if TYPE_CHECKING:
    from batchstate.kv.pages import PagePool
    from batchstate.kv.prefix_cache import CachedPages

Ints = npt.NDArray[np.int64]

ZERO, ONE = np.array(0), np.array(1)  # numpy takes as long to convert one number as to add 100 of them


@final
class PageTable:
    """The pages and lengths of each slot.

    Attributes:
        page_size: tokens per page.
        width: most pages of one request.
        pages: int32[capacity, width], slot -> pages in order, 0 beyond the last, and 0 for those given back in front.
        num_pages: int64[capacity], those given back in front included: the page of a position keeps its place.
        first: int64[capacity], pages given back in front.
        fronted: whether any ever were. While not, nothing looks at `first`.
        committed: int64[capacity], in tokens.
    """

    def __init__(self, capacity: int, page_size: int, max_tokens: int) -> None:
        self.page_size = page_size
        self.width = -(-max_tokens // page_size)
        self.pages = np.zeros((capacity, self.width), dtype=np.int32)
        self.num_pages = np.zeros(capacity, dtype=np.int64)
        self.first = np.zeros(capacity, dtype=np.int64)
        self.fronted = False
        self.committed = np.zeros(capacity, dtype=np.int64)
        self._flat = self.pages.reshape(-1)
        self._within = np.arange(page_size)
        self._rest = self._within[1:]
        self._size, self._rounding, self._width = np.array(page_size), np.array(page_size - 1), np.array(self.width)

    def pages_needed(self, lengths: Ints) -> Ints:
        """Pages that `lengths` tokens need, int64[n]."""
        needed: Ints = (lengths + self._rounding) // self._size
        return needed

    def put(self, row: int, pages: Ints) -> Ints:
        """Replaces the first pages of a row by `pages`, and returns them, int64[n]."""
        old = self.pages[row, : pages.size].astype(np.int64)
        self.pages[row, : pages.size] = pages
        return old

    def pages_at(self, rows: Ints, positions: Ints) -> Ints:
        """The page of each position of a request, int64[n]; 0 beyond the last page of a row."""
        pages: Ints = self._flat[rows * self._width + positions // self._size].astype(np.int64)
        return pages

    def next_pages(self, rows: Ints, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """For one position within the width of each row: its column, its index in the flat table, and its page or 0."""
        columns = positions // self._size
        index = rows * self._width + columns
        return columns, index, self._flat[index].astype(np.int64)

    def locations_at(self, rows: Ints, positions: Ints) -> Ints:
        """The location of each position of a request, int64[n]."""
        columns = positions // self._size
        return self.locations_on(self._flat[rows * self._width + columns].astype(np.int64), columns, positions)

    def locations_of(self, rows: Ints, start: Ints, counts: Ints, positions: Ints) -> Ints:
        """The location of each of `positions`: of each row the `counts` positions from `start` on. Costs O(pages).

        All int64[n] but `positions`, which has those of one row after the other.
        """
        if positions.size < 4 * rows.size:  # few on each page: one look for each
            return self.locations_at(rows.repeat(counts), positions)
        first, stop = start // self._size, start + counts
        num_pages = (stop + self._rounding) // self._size - first
        columns = arange_per_row(first, num_pages)
        at = columns + (rows * self._width).repeat(num_pages)
        tokens = np.full(columns.size, self.page_size, dtype=np.int64)
        there = num_pages > ZERO
        ends = num_pages.cumsum()
        tokens[(ends - num_pages)[there]] -= (start - first * self._size)[there]
        tokens[(ends - ONE)[there]] -= ((first + num_pages) * self._size - stop)[there]
        locations: Ints = ((self._flat[at] - columns) * self._size).repeat(tokens)
        locations += positions
        return locations

    def locations_on(self, pages: Ints, columns: Ints, positions: Ints) -> Ints:
        """The location of each position, which lies in this column, on this page."""
        locations: Ints = (pages - columns) * self._size + positions
        return locations

    def whole_pages(
        self, index: Ints, positions: Ints, locations: Ints, width: int, counts: Ints | None
    ) -> tuple[Ints, Ints]:
        """See `PagePool.whole_pages`."""
        size = self.page_size
        if size == 1 or not positions.size:
            return index, locations
        if counts is None:
            last = (positions % self._size == ZERO).nonzero()[0]
        else:
            counts = counts[counts > 0]
            last = counts.cumsum() - ONE
            last = last[positions[last] % self._size < counts]
        if not last.size:
            return index, locations
        if counts is None and (width % size == 0 or int(positions.max()) <= width - size):
            rests = [(numbers[last][:, None] + self._rest).reshape(-1) for numbers in (index, locations)]
        else:
            there = positions[last]
            left = np.minimum(size - 1 - there % self._size, width - 1 - there)
            rest = arange_per_row(index[last] + ONE, left)
            rests = [rest, rest + (locations[last] - index[last]).repeat(left)]
        return np.concatenate([index, rests[0]]), np.concatenate([locations, rests[1]])

    def token_rows(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """See `PagePool.token_rows`."""
        size, counts = self.page_size, self.num_pages[rows]
        most = counts.item(counts.argmax()) * size if rows.size else 0
        at = rows * self._width
        if self.fronted:
            first = self.first[rows]
            at, counts = at + first, counts - first
        at = arange_per_row(at, counts)  # in the flat table, where a row goes on for this many locations less or more
        further = (rows * (width - self.width * size)).repeat(counts)
        index = ((at * self._size + further)[:, None] + self._within).reshape(-1)
        locations = ((self._flat[at].astype(np.int64) * self._size)[:, None] + self._within).reshape(-1)
        if most > width >= int(self.committed[rows].max(initial=0)):
            there = (at % self.width * size)[:, None] + self._within < width  # the last page goes on behind the row
            index, locations = index[there.reshape(-1)], locations[there.reshape(-1)]
        return index, locations

    def append(self, rows: Ints, counts: Ints, pages: Ints) -> None:
        """Gives each row `counts` further pages: `pages`, those of one row after the other."""
        have = self.num_pages[rows]
        index = self._index(rows, have, counts)
        self._flat[index] = pages.astype(np.int32)  # apart from the scatter, which would convert one by one
        self.num_pages[rows] = have + counts

    def append_at(self, index: Ints, rows: Ints, pages: Ints) -> None:
        """Gives each row one further page; `index` is where in the flat table."""
        self._flat[index] = pages.astype(np.int32)
        self.num_pages[rows] += ONE

    def cut(self, rows: Ints, keep: Ints) -> Ints:
        """Takes all but the first `keep` pages from each row, and returns them, int64[k]."""
        start = keep
        if self.fronted:
            start = np.maximum(keep, self.first[rows])
            self.first[rows] = np.minimum(keep, self.first[rows])
        pages = self._cleared(rows, start, self.num_pages[rows])
        self.num_pages[rows] = keep
        return pages

    def cut_front(self, rows: Ints, first: Ints) -> Ints:
        """Takes the pages before the page `first` int64[n] from each row, and returns them, int64[k]."""
        self.fronted = True
        pages = self._cleared(rows, self.first[rows], first)
        self.first[rows] = first
        return pages

    def _cleared(self, rows: Ints, start: Ints, stop: Ints) -> Ints:
        index = self._index(rows, start, stop - start)
        pages: Ints = self._flat[index].astype(np.int64)
        self._flat[index] = 0  # a stale entry would name a page that another slot owns by then
        return pages

    def holders(self, num_pages: int) -> Ints:
        """How often each page stands in the table, int64[num_pages + 1]; page 0 is not counted."""
        counted = np.bincount(self._flat, minlength=num_pages + 1).astype(np.int64)
        counted[0] = 0
        return counted

    def _index(self, rows: Ints, columns: Ints, counts: Ints) -> Ints | slice:
        """Where `counts` entries of each row, from `columns` on, are in the flat table."""
        if rows.size == 1:
            at = int(rows[0]) * self.width + int(columns[0])
            return slice(at, at + int(counts[0]))
        return arange_per_row(rows * self._width + columns, counts)


@final
class KVWrites:
    """The tokens of each slot that launched work writes, and its stream.

    Work launched later on the same stream comes behind by itself. Another stream waits, on the device, for all that
    the writer's was given. A further writer of a slot waits so too: its last writer's stream is behind all of them.

    Attributes:
        tokens: int64[capacity], tokens of each slot whose writes are launched: the first ones.
    """

    def __init__(self, runtime: Runtime, capacity: int) -> None:
        self.runtime = runtime
        self.tokens = np.zeros(capacity, dtype=np.int64)
        self._writer = np.zeros(capacity, dtype=np.int64)  # index of the stream that wrote last
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
        if self._streams != [stream or self.runtime.current_stream]:  # with one stream nothing looks at single slots
            writer = self.writer()
            if 1 in (self._writer[rows] != writer).tobytes():
                self.wait_for_slots(rows)
                self._writer[rows] = writer
        behind = starts is None or 1 not in (gaps := self.tokens[rows] < starts).tobytes()
        if not behind:
            rows, stops = rows[~gaps], stops[~gaps]
        self.tokens[rows] = stops
        return behind

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

    def cut(self, rows: Ints, totals: Ints) -> None:
        """The slots keep `totals` tokens."""
        self.tokens[rows] = np.minimum(self.tokens[rows], totals)


@final
class PageReferences:
    """Pages 1 to num_pages with the references to each. Page 0 is padding.

    A page is free when its last reference is gone AND every forward that used it through any of its references is
    complete. The second half matters for shared prefixes: request A leaves behind fence F and its reference goes,
    request B leaves later without a fence and takes the last one, and the forward behind F may still be reading. So the
    fence of each reference that was not the last is remembered until it is complete.

    Attributes:
        allocator: which pages are free, pending or live.
        generations: of the pages.
        further: int64[num_pages + 1], references beyond the first, which being live stands for; 0 for other pages.
        shared: pages with further references. While there are none, nothing looks at single pages.
        cached: pages under a key, which stay readable when they are free; None without a `PrefixCache`.
    """

    def __init__(self, runtime: Runtime, num_pages: int, *, label: str, name: str, transaction: Transaction) -> None:
        self.runtime = runtime
        self.transaction = transaction
        self.allocator = Allocator(runtime, num_pages, label=label, transaction=transaction)
        self.generations = Generations(runtime, self.allocator, name=name)
        self.further = np.zeros(num_pages + 1, dtype=np.int64)
        self.shared = 0
        self.cached: CachedPages | None = None
        self._tickets = 0
        self._read_by = np.zeros(num_pages + 1, dtype=np.int64)  # ticket of the last fence noted for the page
        self._readers: list[tuple[int, QueriedFence]] = []  # by ticket, ascending; not known to be complete

    def take(self, n: int, operation: str) -> Ints:
        """Takes `n` pages with one reference each, int64[n]; see `Allocator.take`. `query_fences` comes first.

        SLOT_IN_FLIGHT also for a page that a former sharer's forward still reads.
        """
        if levels.cheap and self._readers:
            self.allocator.check_available(n)
            self._check_unread(self.allocator.next_free(n), operation)
        pages = self.allocator.take(n, operation)
        self.generations.rise(pages)
        if self.cached is not None and levels.cheap and b"\1" in self.cached.cached[pages].tobytes():
            held = self.cached.cached[pages].astype(np.int64)
            invariants.page_owner(held, np.zeros_like(held), pages=pages, **self.allocator.where(operation))
        return pages

    def revive(self, pages: Ints, operation: str) -> None:
        """Adds a reference to each of `pages`, cached and named once each, whether they have one, are free or pending.

        A pending one is still read by forwards that were launched before. It is read only, so that the new holder need
        not wait for them; but the owner after it does.
        """
        allocator, cached = self.allocator, self.cached
        states = allocator.states[pages].tobytes()
        if LIVE_BYTE in states:
            live = allocator.live_among(pages)
            self.add(pages[live], 1)
            pages = pages[~live]
        if cached is not None and pages.size:
            behind = allocator.revive(pages)
            cached.revive(pages, pages.size - sum(part.size for _, part in behind) if behind else pages.size)
            for fence, part in behind:
                self._note_reader(part, fence)
            allocator.check_conservation(operation)

    def add(self, pages: Ints, times: int) -> None:
        """Adds `times` references to each of `pages`, which are live and named once each."""
        if times:
            self.shared += int(np.count_nonzero(self.further[pages] == 0))
            self.further[pages] += times

    def drop(self, pages: Ints, after: Fence | None, operation: str) -> None:
        """Takes one reference from each of `pages` (a page may be named several times); those without any go.

        The caller has called `query_fences` before it checked anything: nothing here asks a fence. SLOT_DOUBLE_FREE, at
        `cheap`: a page is not live.
        """
        if not pages.size:
            return
        if levels.cheap and not self.allocator.all_are(pages, LIVE_BYTE):
            distinct = self.allocator.distinct(pages)
            invariants.slot_double_free(
                distinct, self.allocator.live_among(distinct), **self.allocator.where(operation)
            )
        if self.shared:
            pages = self._drop_shared(pages, after)
        if self._readers:
            pages = self._release_read(pages, after, operation)
        self.allocator.release(pages, after, operation)

    def _drop_shared(self, pages: Ints, after: Fence | None) -> Ints:
        """Takes one reference from each of `pages`, some of them shared; returns those without any."""
        repeated = self.allocator.repeated(pages)
        distinct = self.allocator.distinct(pages) if repeated else pages
        were_shared = self.further[distinct] > 0
        if repeated:
            np.subtract.at(self.further, pages, 1)
        else:
            self.further[pages] -= 1
        left = self.further[distinct]  # -1 where it was the last one
        self.shared -= int(np.count_nonzero(were_shared & (left <= 0)))
        self.further[distinct] = np.maximum(left, 0)
        if after is not None:
            self._note_reader(distinct[left >= 0], after)
        unreferenced: Ints = distinct[left < 0]
        return unreferenced

    def _release_read(self, pages: Ints, after: Fence | None, operation: str) -> Ints:
        """Gives back, behind the fences of former sharers too, pages that those may still read; returns the others."""
        # A page knows only its last ticket; an older one of it may be open too. So everything from the oldest open one
        # on counts as read: conservative, may defer a page longer than needed, never shorter.
        late = self._read_by[pages] >= self._readers[0][0]
        if late.any():
            fences = tuple(queried.fence for _, queried in self._readers)
            everything = AllFences(fences if after is None else (*fences, after))
            self.allocator.release(pages[late], everything, operation)
            pages = pages[~late]
        if levels.cheap:
            self._check_unread(pages, operation)
        return pages

    def _note_reader(self, pages: Ints, fence: Fence | QueriedFence) -> None:
        if not pages.size:
            return
        asked = fence.fence if isinstance(fence, QueriedFence) else fence
        if not self._readers or self._readers[-1][1].fence is not asked:
            self._tickets += 1
            queried = fence if isinstance(fence, QueriedFence) else self.transaction.watch(fence)
            self._readers.append((self._tickets, queried))
        self._read_by[pages] = self._readers[-1][0]

    def query_fences(self) -> int:
        """Makes free the pages behind complete fences and says how many; forgets forwards of former sharers.

        Fences are code of the engine, and may call the pool: to be called before anything is checked.
        """
        reaped = self.allocator.reap()
        if self._readers and not self.runtime.capturing:  # last: what is free now was read by none that is still open
            readers = tuple(self._readers)
            answers = self.transaction.query([queried for _, queried in readers])
            complete = {ticket for (ticket, _), answer in zip(readers, answers, strict=True) if answer}
            self._readers = [reader for reader in self._readers if reader[0] not in complete]
        return reaped

    def check_none_pending(self, operation: str) -> None:
        """Refuses (SLOT_IN_FLIGHT) if pages are pending, or read by forwards of former sharers, as last queried."""
        self.allocator.check_none_pending(operation)
        if self._readers:  # conservative, as `_release_read`
            oldest, fence = self._readers[0]
            pages = self.allocator.live_indices()
            read = self._read_by[pages] >= oldest
            invariants.slot_in_flight(pages, read, behind=repr(fence), **self.allocator.where(operation))

    def _check_unread(self, pages: Ints, operation: str) -> None:
        tickets = self._read_by[pages]
        if not self._readers or not np.count_nonzero(tickets >= self._readers[0][0]):
            return
        read = np.isin(tickets, [ticket for ticket, _ in self._readers])
        if read.any() and not self.runtime.capturing:
            invariants.slot_in_flight(pages, read, **self.allocator.where(operation))

    def check_exclusive(self, pages: Ints, operation: str) -> None:
        """Refuses (PAGE_OWNER) a write into pages that are shared or cached; page 0 stands for none yet."""
        if not self.shared and self.cached is None:
            return
        held = self.further[pages] + 1
        if self.cached is not None:
            held += self.cached.cached[pages]
        if np.count_nonzero(held != ONE):
            invariants.page_owner(held, np.ones_like(held), pages=pages, **self.allocator.where(operation))

    def verify(self, holders: Ints) -> None:
        """Checks every invariant of the pages from scratch. `holders` int64[num_pages + 1] were counted anew."""
        self.allocator.verify()
        self.generations.verify()
        every = np.arange(holders.size, dtype=np.int64)
        unowned = np.bincount(self.allocator.unowned(), minlength=holders.size)
        where, live = self.allocator.where("verify"), self.allocator.live_among(every)
        invariants.page_owner(np.where(live, 0, self.further), np.zeros_like(holders), **where)
        # A page that is not live is recorded as -1, and counted -1 for the one list that it stands in.
        recorded = np.where(live, self.further + 1, -1)
        recorded[0] = 0
        invariants.page_owner(holders - unowned, recorded, **where)
        lost = np.flatnonzero(live & (holders == 0))
        if lost.size:  # as many references as holders, none, and yet it cannot be taken: it would never come back
            invariants.page_owner(holders[lost], np.ones_like(lost), pages=lost, **where)
        shared = np.flatnonzero(holders > 1)
        if self.cached is not None:
            self.cached.verify(self.allocator.states, self.generations.of(every), where)
        if shared.size != self.shared:  # at 0 nothing would ask a page how many hold it
            counted, count = np.array([shared.size]), np.array([self.shared])
            invariants.page_owner(counted, count, pages=shared[:1] if shared.size else None, **where)


@final
class PageSpace:
    """The pages of a pool, or the locations on them, as an `IndexSpace` of tables.

    Attributes:
        kind: of the handles: `Pages` or `Locations`.
        per_page: rows that a page has in a table.
    """

    def __init__(self, references: PageReferences, kind: type[Handles], per_page: int) -> None:
        self.runtime = references.runtime
        self.transaction = references.transaction
        self.kind = kind
        self.per_page = per_page
        self._per_page = np.array(per_page)  # numpy takes as long to convert one number as to divide 100 by it
        self.capacity = references.allocator.capacity * per_page
        self._generations = references.generations

    @property
    def name(self) -> str:
        return self._generations.name

    def handles(self, numbers: Ints) -> Handles:
        """The handles of `numbers` int64[n], which are live."""
        generations, pool_id = self._generations.of(self._pages(numbers)), self._generations.pool_id
        return self.kind.of_pool(
            self.runtime, numbers, generations, pool_id=pool_id, contract=Contract.HOST_ONLY, name=self.name
        )

    def rows_of(self, handles: Handles, operation: str, *, padded: bool = False) -> Ints:
        self.transaction.enter(f"{self.name}: {operation}")
        rows, held = self._generations.numbers_of(handles, self.kind, operation, padded=padded)
        owned = np.count_nonzero(rows) if padded else rows.size
        self._generations.check_held(self._pages(rows[:owned]), held[:owned], operation)
        return read_only(rows)

    def _pages(self, numbers: Ints) -> Ints:
        return numbers if self.per_page == 1 else numbers // self._per_page


@final
class PageOwners(SlotListener):
    """The pages of slots. Slots are taken without pages and get them by growing; they leave with them, or without."""

    def __init__(self, pool: "PagePool") -> None:
        self._table, self._references, self._leases = pool._table, pool._references, pool._sharing.leases
        self._writes = pool.writes
        self._slots = pool.slots
        self._epochs, self._shares = pool.epochs, pool.shares
        self._seen: _Seen | None = None  # at the last `verify`

    def before_free(self, rows: Ints) -> None:
        """Queries the fences that pages wait for; nothing that follows asks one."""
        self._references.query_fences()

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses (SLOT_CONSERVATION) to free slots alone that have pages, which would never be released."""
        owned = self._table.num_pages[rows] - self._table.first[rows]
        if 1 in (owned != ZERO).tobytes():
            owners = rows[owned > 0]
            names = ", ".join(str(slot) for slot in owners[:8]) + (", ..." if owners.size > 8 else "")
            pages, allocator = int(owned.sum()), self._references.allocator
            problem = f"these slots still own {pages} pages: {names}"
            remedy = "use `pages.release_requests(slots, after=...)`, which frees a request with all it has"
            live = allocator.live - pages
            allocator.check_live(live, operation, leaked=owners, problem=problem, remedy=remedy)

    def check_release(self, rows: Ints, operation: str) -> None:
        """Whole requests leave with their pages."""

    def on_free(self, rows: Ints, after: Fence | None) -> None:
        if 1 in (self._table.num_pages[rows] > ZERO).tobytes():
            self.cut_all(rows, after, "release_requests")

    def check_clear(self, operation: str) -> None:
        self._references.check_none_pending(operation)

    def on_clear(self) -> None:
        """Leases are given back, and the pages come in order again."""
        for lease in self._leases.values():
            self._references.drop(lease.pages, None, "clear")
            lease.released = True
        self._leases.clear()
        if self._references.cached is not None:
            self._references.cached.clear()
        self._references.allocator.sort_free()

    def cut_all(self, rows: Ints, after: Fence | None, operation: str) -> None:
        """Leaves each row nothing."""
        none = np.zeros(rows.size, dtype=np.int64)
        self.cut(rows, none, none, after, operation, rows)

    def cut(
        self,
        rows: Ints,
        totals: Ints,
        keep: Ints,
        after: Fence | None,
        operation: str,
        losing: Ints,
        front: Ints | None = None,
    ) -> None:
        """Leaves each row `totals` tokens and pages `front` to `keep`; `losing` are those with less than before."""
        references = self._references
        pages = self._table.cut(rows, keep)
        if front is not None:
            pages = np.concatenate([pages, self._table.cut_front(rows, front)])
        self._table.committed[rows] = totals
        if losing.size:
            self._epochs.note(losing, operation, references.runtime.step)
        self._writes.cut(rows, totals)
        references.drop(pages, after, operation)

    def verify(self) -> None:
        """Checks every invariant of the pages from scratch, and that each belongs to a live slot or a lease."""
        table, references = self._table, self._references
        num_pages = references.allocator.size
        where = references.allocator.where("verify")
        held = [lease.pages for lease in self._leases.values()]
        leased = np.bincount(np.concatenate([np.empty(0, dtype=np.int64), *held]), minlength=num_pages + 1)
        references.verify(table.holders(num_pages) + leased)
        size = table.page_size
        invariants.length_order(table.committed, table.num_pages * size, table.width * size, **where)
        invariants.length_order(self._writes.tokens, table.committed, table.width * size, explain=OVERWRITTEN, **where)
        # Each row names pages exactly from the first that was not given back up to its last one.
        columns = np.arange(table.width)
        named = (table.pages != 0) & (columns < table.num_pages[:, None]) & (columns >= table.first[:, None])
        invariants.page_owner(named.sum(axis=1), table.num_pages - table.first, **where)
        invariants.length_order(table.first * size, table.committed, table.width * size, **where)
        owners = np.flatnonzero(table.num_pages)
        orphans = owners[~self._slots.is_live(owners)]
        if orphans.size:
            pages = int((table.num_pages - table.first)[orphans].sum())
            references.allocator.check_live(references.allocator.live - pages, "verify", leaked=orphans)
        self._check_changes(where)

    def _check_changes(self, where: Where) -> None:
        """A slot that has lost tokens, pages or the sole use of one since the last time has a change noted for that.

        A change of the pages covers the holders too, since it refuses all that was derived before: a slot's new request
        may begin with shared pages that the former request had alone.
        """
        table, held_alone = self._table, self._references.further[self._table.pages] == 0
        if self._references.cached is not None:
            held_alone &= ~self._references.cached.cached[table.pages]
        now = _Seen(
            table.pages.copy(), table.committed.copy(), held_alone, self._epochs.rows.copy(), self._shares.rows.copy()
        )
        before, self._seen = self._seen, now
        if before is None:
            return
        there = before.pages != 0
        lost = (now.committed < before.committed) | (there & (now.pages != before.pages)).any(axis=1)
        shared = (there & (now.pages == before.pages) & before.held_alone & ~held_alone).any(axis=1)
        renewed = now.epochs != before.epochs
        for changes, changed, noted in (
            (self._epochs, lost, renewed),
            (self._shares, shared, renewed | (now.shares != before.shares)),
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
