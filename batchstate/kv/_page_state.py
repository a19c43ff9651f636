"""The books of a page pool: rows, references and leases, changed together and never in part.

Works on slot numbers that `PagePool` has checked. Each operation checks the lengths and owners first, then takes pages,
which fails without a trace, and only then writes.
"""

from collections.abc import Callable
from typing import NamedTuple, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._allocator import LIVE_BYTE, AllFences, Allocator
from batchstate.errors import ArgumentError
from batchstate.invariants import times_checked
from batchstate.kv._ranges import arange_per_row
from batchstate.runtime import Fence, Runtime
from batchstate.tables import read_only
from batchstate.violations import Code, Where

# References to pages that no slot needs to keep: what a prefix cache holds, and what is taken before a request is.

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class PageLease:
    """Pages that no slot has to have: the first `tokens` tokens of a request, kept after it, or pages taken before one.

    Made by `PagePool.hold` and `PagePool.take`; give it back with `release`.

    Attributes:
        tokens: how many tokens; whole pages.
        released: whether it was given back.
    """

    _pages: Ints
    tokens: int
    _release: "Callable[[PageLease, Ints, Fence | None], None]"
    released: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"PageLease({self.tokens} tokens, {self._pages.size} pages{', released' if self.released else ''})"

    @property
    def pages(self) -> Ints:
        """int64[tokens / page_size], in the order of their tokens; a read-only view."""
        return read_only(self._pages)

    def release(self, *, after: Fence | None = None) -> None:
        """Gives the references back, at once or when `after` is complete.

        Raises:
            Violation: SLOT_DOUBLE_FREE: it was given back before.
        """
        self._release(self, self._pages, after)


@final
class Leases:
    """The leases of one pool that are not released."""

    def __init__(self) -> None:
        self._held: dict[int, PageLease] = {}

    def __repr__(self) -> str:
        return f"Leases({len(self)})"

    def __len__(self) -> int:
        return len(self._held)

    def make(self, pages: Ints, tokens: int, release: "Callable[[PageLease, Ints, Fence | None], None]") -> PageLease:
        """A new lease; takes over `pages`."""
        lease = PageLease(pages, tokens, release)
        self._held[id(lease)] = lease
        return lease

    def end(self, lease: PageLease) -> None:
        """Forgets a lease that is released."""
        del self._held[id(lease)]
        lease.released = True

    def holds(self, lease: PageLease) -> bool:
        """Whether the lease is of this pool and not released."""
        return self._held.get(id(lease)) is lease

    def check_held(self, lease: PageLease, **where: Unpack[Where]) -> None:
        """Refuses a lease that was released.

        Raises:
            Violation: SLOT_DOUBLE_FREE.
        """
        if not self.holds(lease):
            pages = lease.pages if lease.pages.size else np.zeros(1, dtype=np.int64)
            invariants.slot_double_free(pages, np.zeros(pages.size, dtype=np.bool_), **where)

    def holders(self, num_pages: int) -> Ints:
        """How many leases hold each page, int64[num_pages + 1]."""
        pages = [lease.pages for lease in self._held.values()]
        held = np.concatenate(pages) if pages else np.empty(0, dtype=np.int64)
        return np.bincount(held, minlength=num_pages + 1).astype(np.int64)


# What was asked for where token lengths are out of order: the problem and the remedy, in the caller's words.
#
# Each takes the two lengths that the law of LENGTH_ORDER compares, the shorter first, and the most a request may have.


def total(committed: int, asked: int, most: int) -> tuple[str, str]:
    """Of operations that take total lengths."""
    if asked > most:
        return _too_many(asked, most)
    if asked < 0:
        return f"{asked} tokens asked for", "pass 0 or more"
    return (
        f"{asked} tokens asked for in all, and {committed} are committed",
        "lengths are totals and cannot shrink here; `truncate` takes tokens back, `advance` adds",
    )


def further(committed: int, asked: int, most: int) -> tuple[str, str]:
    """Of operations that add tokens."""
    return _too_many(asked, most)


def written(asked: int, allocated: int, most: int) -> tuple[str, str]:
    """Of commits."""
    return (
        f"{asked} tokens are to be committed, {allocated} are allocated",
        "`grow` first, or `extend`, which does both",
    )


def back(asked: int, committed: int, most: int) -> tuple[str, str]:
    """Of truncation."""
    return (
        f"truncation to {asked} tokens, of {committed} that are committed",
        "pass a total from 0 to what is committed; `extend` and `advance` add tokens",
    )


def prefix(asked: int, there: int, most: int) -> tuple[str, str]:
    """Of sharing and holding."""
    return f"a prefix of {asked} tokens asked for, {there} are committed", "commit the tokens first, or ask for fewer"


def reserved(asked: int, room: int, most: int) -> tuple[str, str]:
    """Of a place in the host tier for `asked` tokens, growing to `room`."""
    if room > most:
        return f"room for {room} tokens asked for, the host tier has {most}", "ask for less, or make the pool larger"
    return f"{asked} tokens, and room for {room}", "reserve room for the tokens that come and all that follow"


def outgrown(asked: int, room: int, most: int) -> tuple[str, str]:
    """Of a decode step in the host tier."""
    return f"{asked} tokens with the new one, {room} were reserved", "finish the request, or reserve more at admission"


def _too_many(asked: int, most: int) -> tuple[str, str]:
    return (
        f"{asked} tokens asked for, a request may have {most} (max_tokens_per_request)",
        "finish the request, or make the PagePool with a larger max_tokens_per_request",
    )


# Who else uses a page: reference counts, and what has to happen before a page is anybody's again.
#
# A page is free when its last reference is gone AND every forward that used it through any of its references is
# complete. The second half matters for shared prefixes: request A leaves behind fence F and its reference goes,
# request B leaves later without a fence and takes the last one, and the forward behind F may still be reading. So the
# fence of each reference that was not the last is remembered until it is complete.


@final
class PageReferences:
    """Pages 1 to num_pages with the references to each. Page 0 is padding.

    Attributes:
        ledger: which pages are free, pending or live.
        further: int64[num_pages + 1], references beyond the first, which being live stands for; 0 for other pages.
        shared: pages with further references. While there are none, nothing looks at single pages.
    """

    def __init__(self, runtime: Runtime, num_pages: int, *, label: str) -> None:
        self.runtime = runtime
        self.ledger = Allocator(runtime, num_pages, label=label)
        self.further = np.zeros(num_pages + 1, dtype=np.int64)
        self.shared = 0
        self._tickets = 0
        self._read_by = np.zeros(num_pages + 1, dtype=np.int64)  # ticket of the last fence noted for the page
        self._readers: list[tuple[int, Fence]] = []  # by ticket, ascending; not known to be complete

    def __repr__(self) -> str:
        return f"PageReferences({self.ledger!r}, {self.shared} shared)"

    def take(self, n: int, operation: str) -> Ints:
        """Takes `n` pages with one reference each, int64[n].

        Raises:
            PoolExhaustedError: fewer are free. Nothing was taken.
            Violation: see `Allocator.take`; SLOT_IN_FLIGHT also for a page that a former sharer's forward still reads.
        """
        self.ledger.check_available(n)
        if self._readers:
            self.ask_fences()  # after the ledger has asked: what it made free was read by none that is still open
            if n > self.ledger.free:  # a fence is code of the engine's, and may have taken some
                self.ledger.check_available(n)
            if levels.cheap and self._readers:
                self._check_unread(self.ledger.next_free(n), operation)
        return self.ledger.take(n, operation)

    def add(self, pages: Ints, times: int) -> None:
        """Adds `times` references to each of `pages`, which are live and named once each."""
        if times:
            self._count_shared(int(np.count_nonzero(self.further[pages] == 0)))
            self._add(pages, times)

    def drop(self, pages: Ints, after: Fence | None, operation: str) -> None:
        """Takes one reference from each of `pages` (a page may be named several times); those without any go.

        The caller has called `ask_fences` before it changed anything: nothing here asks one.

        Raises:
            Violation: SLOT_DOUBLE_FREE, at `cheap`: a page is not live. Nothing was dropped.
        """
        if not pages.size:
            return
        if levels.cheap and not self.ledger.all_are(pages, LIVE_BYTE):
            distinct = self.ledger.distinct(pages)
            invariants.slot_double_free(distinct, self.ledger.live_among(distinct), **self._where(operation))
        if self.shared:
            pages = self._drop_shared(pages, after)
        if self._readers:
            pages = self._release_read(pages, after, operation)
        self.ledger.release(pages, after, operation)

    def _drop_shared(self, pages: Ints, after: Fence | None) -> Ints:
        """Takes one reference from each of `pages`, of which some are shared; returns those without any."""
        repeated = self.ledger.repeated(pages)
        distinct = self.ledger.distinct(pages) if repeated else pages
        were_shared = self.further[distinct] > 0
        self._subtract(pages, repeated=repeated)
        left = self.further[distinct]  # -1 where it was the last one
        self._count_shared(-int(np.count_nonzero(were_shared & (left <= 0))))
        self.further[distinct] = np.maximum(left, 0)
        if after is not None:
            self._note_readers(distinct[left >= 0], after)
        return self._unreferenced(distinct, left)

    def _add(self, pages: Ints, times: int) -> None:
        self.further[pages] += times

    def _subtract(self, pages: Ints, *, repeated: bool) -> None:
        if repeated:
            np.subtract.at(self.further, pages, 1)
        else:
            self.further[pages] -= 1

    def _count_shared(self, more: int) -> None:
        self.shared += more

    def _unreferenced(self, pages: Ints, left: Ints) -> Ints:
        gone: Ints = pages[left < 0]
        return gone

    def _release_read(self, pages: Ints, after: Fence | None, operation: str) -> Ints:
        """Gives back, behind the fences of former sharers too, what those may still read; returns the others."""
        late = self._still_read(pages)
        if late.any():
            fences = tuple(fence for _, fence in self._readers)
            everything = AllFences(fences if after is None else (*fences, after))
            self.ledger.release(pages[late], everything, operation)
            pages = pages[~late]
        if levels.cheap:
            self._check_unread(pages, operation)
        return pages

    def _note_readers(self, pages: Ints, fence: Fence) -> None:
        if not pages.size:
            return
        if not self._readers or self._readers[-1][1] is not fence:
            self._tickets += 1
            self._readers.append((self._tickets, fence))
        self._read_by[pages] = self._readers[-1][0]

    def _still_read(self, pages: Ints) -> npt.NDArray[np.bool_]:
        # A page knows only its last ticket; an older one of it may be open too. So everything from the oldest open one
        # on counts as read: too careful at times, never too little.
        still: npt.NDArray[np.bool_] = self._read_by[pages] >= self._readers[0][0]
        return still

    def ask_fences(self) -> None:
        """Forgets the forwards of former sharers that are complete. Fences may raise: to be called before a change."""
        if self._readers and not self.runtime.capturing:
            complete = {ticket for ticket, fence in tuple(self._readers) if fence.query()}
            self._readers = [reader for reader in self._readers if reader[0] not in complete]

    def _check_unread(self, pages: Ints, operation: str) -> None:
        tickets = self._read_by[pages]
        if not self._readers or not np.count_nonzero(tickets >= self._readers[0][0]):
            return
        read = np.isin(tickets, [ticket for ticket, _ in self._readers])
        if read.any() and not self.runtime.capturing:
            invariants.slot_in_flight(pages, read, **self._where(operation))

    def check_exclusive(self, pages: Ints, operation: str) -> None:
        """Refuses to have a page written that somebody else uses too; page 0 stands for a page not allocated yet.

        Raises:
            Violation: PAGE_OWNER.
        """
        if self.shared and np.count_nonzero(self.further[pages]):
            held = self.further[pages] + 1
            invariants.page_owner(held, np.ones_like(held), pages=pages, **self._where(operation))

    def verify(self, holders: Ints) -> None:
        """Every law of the pages from scratch.

        Args:
            holders: int64[num_pages + 1], how many hold each page, counted anew.

        Raises:
            Violation: PAGE_OWNER, and see `Allocator.verify`.
        """
        self.ledger.verify()
        everyone = np.arange(holders.size, dtype=np.int64)
        unowned = np.bincount(self.ledger.unowned(), minlength=holders.size)
        where, live = self._where("verify"), self.ledger.live_among(everyone)
        invariants.page_owner(np.where(live, 0, self.further), np.zeros_like(holders), **where)
        # A page that is not live is recorded as -1, and counted -1 for the one list that it stands in.
        recorded = np.where(live, self.further + 1, -1)
        recorded[0] = 0
        invariants.page_owner(holders - unowned, recorded, **where)
        lost = np.flatnonzero(live & (holders == 0))
        if lost.size:  # as many references as holders, none, and yet nobody's to take: it would never come back
            invariants.page_owner(holders[lost], np.ones_like(lost), pages=lost, **where)
        shared = np.flatnonzero(holders > 1)
        if shared.size != self.shared:  # at 0 nothing would ask a page how many hold it
            counted, count = np.array([shared.size]), np.array([self.shared])
            invariants.page_owner(counted, count, pages=shared[:1] if shared.size else None, **where)

    def _where(self, operation: str) -> Where:
        return {"object": self.ledger.label, "operation": operation, "step": self.runtime.step}


# Which pages each slot has, in order, and how many of their tokens are committed.
#
#     row of a slot      [ p0 | p1 | p2 | 0 | 0 ]        one int32 for each page, 0 beyond the last
#     0 <= committed <= allocated = num_pages * page_size <= width
#
# Host bookkeeping only; whose turn it is to be freed is decided by `page_references`.

ONE = np.array(1)


@final
class PageRows:
    """The page table of every slot, padding included.

    Attributes:
        page_size: tokens a page.
        max_tokens: most tokens of one request.
        width: most pages of one request.
        table: int32[capacity, width].
        num_pages: int64[capacity].
        committed: int64[capacity], in tokens.
    """

    def __init__(self, capacity: int, page_size: int, max_tokens: int) -> None:
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.width = -(-max_tokens // page_size)
        self.table = np.zeros((capacity, self.width), dtype=np.int32)
        self.num_pages = np.zeros(capacity, dtype=np.int64)
        self.committed = np.zeros(capacity, dtype=np.int64)
        self._flat = self.table.reshape(-1)
        # As arrays: numpy takes as long to convert one number as to add 100 of them.
        self._size, self._rounding, self._width = np.array(page_size), np.array(page_size - 1), np.array(self.width)

    def __repr__(self) -> str:
        return f"PageRows({len(self.table)} rows of {self.width} pages of {self.page_size})"

    def pages_needed(self, lengths: Ints) -> Ints:
        """Pages that hold `lengths` tokens, int64[n]."""
        needed: Ints = (lengths + self._rounding) // self._size
        return needed

    def pages_at(self, rows: Ints, columns: Ints) -> Ints:
        """The page at each place, int64[n]; 0 beyond the last page of a row."""
        return self._flat[self._places(rows, columns)].astype(np.int64)

    def prefix(self, row: int, n: int) -> Ints:
        """The first `n` pages of one row, int64[n], a new array."""
        return self.table[row, :n].astype(np.int64)

    def tokens_at(self, rows: Ints, positions: Ints) -> Ints:
        """The token that holds each position of a request, int64[n]."""
        columns = positions // self._size
        return self.tokens_on(self.pages_at(rows, columns), columns, positions)

    def next_places(self, rows: Ints, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Where tokens at positions within the rows' width go: column, and place in the table; and the page there."""
        columns = positions // self._size
        places = self._places(rows, columns)
        return columns, places, self._flat[places].astype(np.int64)

    def tokens_on(self, pages: Ints, columns: Ints, positions: Ints) -> Ints:
        """The tokens of positions that lie in these columns, on these pages."""
        tokens: Ints = (pages - columns) * self._size + positions
        return tokens

    def _places(self, rows: Ints, columns: Ints) -> Ints:
        places: Ints = rows * self._width + columns
        return places

    def append(self, rows: Ints, counts: Ints, pages: Ints) -> None:
        """Gives each row `counts` further pages; `pages` are those of all rows in turn."""
        have = self.num_pages[rows]
        if rows.size == 1:
            at = int(rows[0]) * self.width + int(have[0])
            self._put(slice(at, at + pages.size), pages)
        else:
            self._put(arange_per_row(self._places(rows, have), counts), pages)
        self.num_pages[rows] = have + counts

    def append_at(self, places: Ints, rows: Ints, pages: Ints) -> None:
        """Gives each row one further page; `places` are those behind their last ones."""
        self._put(places, pages)
        self.num_pages[rows] += ONE

    def cut(self, rows: Ints, keep: Ints) -> Ints:
        """Takes all but the first `keep` pages from each row, and returns them, int64[k]."""
        counts = self.num_pages[rows] - keep
        places: Ints | slice
        if rows.size == 1:
            at = int(rows[0]) * self.width + int(keep[0])
            places = slice(at, at + int(counts[0]))
        else:
            places = arange_per_row(self._places(rows, keep), counts)
        pages: Ints = self._flat[places].astype(np.int64)
        self._clear(places)
        self.num_pages[rows] = keep
        return pages

    def commit(self, rows: Ints, lengths: Ints | int) -> None:
        """Sets how many tokens of each row are committed."""
        self.committed[rows] = lengths

    def holders(self, num_pages: int) -> Ints:
        """How often each page stands in the table, int64[num_pages + 1]; page 0 is not counted."""
        counted = np.bincount(self._flat, minlength=num_pages + 1).astype(np.int64)
        counted[0] = 0
        return counted

    def _put(self, places: Ints | slice, pages: Ints) -> None:
        self._flat[places] = pages.astype(np.int32)  # apart from the scatter, which would convert one by one

    def _clear(self, places: Ints | slice) -> None:
        # An entry left behind would name a page that is somebody else's by the time the row is used again.
        self._flat[places] = 0


LENGTH_ORDER = Code.LENGTH_ORDER
ZERO, ONE = np.array(0), np.array(1)
Explain = Callable[[int, int, int], tuple[str, str]]


class Added(NamedTuple):
    """Tokens that an operation added: for each its slot, position and place, int64[t]; and how many a row, int64[n]."""

    slots: Ints
    positions: Ints
    tokens: Ints
    counts: Ints


@final
class PageBooks:
    """Everything that a page pool knows.

    Attributes:
        rows: pages and lengths of each slot.
        references: references to each page.
        leases: prefixes held without a slot.
        page_size: tokens a page.
        max_tokens: most tokens of one request.
    """

    def __init__(
        self, runtime: Runtime, capacity: int, num_pages: int, page_size: int, max_tokens: int, *, label: str
    ) -> None:
        self.rows = PageRows(capacity, page_size, max_tokens)
        self.references = PageReferences(runtime, num_pages, label=label)
        self.leases = Leases()
        self.page_size = page_size
        self.max_tokens = max_tokens
        self._runtime = runtime
        self._label = label
        self._size, self._most = np.array(page_size), np.array(max_tokens, dtype=np.uint64)
        self._ones = np.ones(256, dtype=np.int64)

    def __repr__(self) -> str:
        return f"PageBooks({self.references!r}, {self.leases!r})"

    def allocated(self, slots: Ints) -> Ints:
        """Allocated tokens of each slot."""
        return self.rows.num_pages[slots] * self.page_size

    def grow(self, slots: Ints, lengths: Ints, operation: str) -> None:
        """Allocates until each slot has room for `lengths`."""
        self._check_lengths(lengths, lengths, operation)
        self._allocate(slots, lengths, operation)

    def commit(self, slots: Ints, lengths: Ints, operation: str) -> None:
        """Commits what is allocated."""
        start = self.rows.committed[slots]
        self._check_lengths(start, lengths, operation)
        invariants.length_order(
            lengths,
            self.allocated(slots),
            self.rows.width * self.page_size,
            explain=written,
            **self._where(operation),
        )
        self._check_writable(slots, start, lengths - start, operation)
        self.rows.commit(slots, lengths)

    def extend(self, slots: Ints, lengths: Ints, operation: str) -> Added:
        """Allocates and commits each slot to `lengths`."""
        return self._extend(slots, self.rows.committed[slots], lengths, operation)

    def advance(self, slots: Ints, counts: Ints, operation: str) -> Added:
        """Allocates and commits `counts` further tokens, each 0 or more."""
        if slots.size and not np.count_nonzero(counts != 1):
            return self.advance_by_one(slots, operation)
        start = self.rows.committed[slots]
        # A sum that wraps is less than `start`, so that the check of the lengths finds it.
        return self._extend(slots, start, start + counts, operation, further)

    def _extend(self, slots: Ints, start: Ints, lengths: Ints, operation: str, explain: Explain = total) -> Added:
        self._check_lengths(start, lengths, operation, explain)
        counts = lengths - start
        self._check_writable(slots, start, counts, operation)
        self._allocate(slots, lengths, operation)
        self.rows.commit(slots, lengths)
        return self._added(slots, start, counts, operation)

    def advance_by_one(self, slots: Ints, operation: str) -> Added:
        """`advance` by one token a slot, the hot path of decoding: nothing is ragged."""
        rows = self.rows
        start = rows.committed[slots]
        lengths = start + ONE
        self._check_lengths(lengths, lengths, operation, further)
        columns, places, pages = rows.next_places(slots, start)
        if self.references.shared:
            self.references.check_exclusive(pages, operation)
        if np.count_nonzero(pages) != pages.size:
            new = (pages == ZERO).nonzero()[0]
            pages[new] = taken = self.references.take(new.size, operation)
            rows.append_at(places[new], slots[new], taken)
        rows.commit(slots, lengths)
        if levels.cheap and np.count_nonzero(pages) != pages.size:
            invariants.slot_zero_allocated(pages, **self._where(operation))
        return Added(slots, start, rows.tokens_on(pages, columns, start), self._each_one(slots.size))

    def _each_one(self, n: int) -> Ints:
        if n > self._ones.size:
            self._ones = np.ones(2 * n, dtype=np.int64)
        return self._ones[:n]

    def prefix(self, slot: int, tokens: int, operation: str) -> Ints:
        """The pages of the first `tokens` tokens of a slot, a new array."""
        self.check_prefix(tokens, int(self.rows.committed[slot]), operation)
        return self.rows.prefix(slot, tokens // self.page_size)

    def check_prefix(self, tokens: int, available: int, operation: str) -> None:
        """Refuses a prefix that ends inside a page, or that is longer than what is there.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER.
        """
        length = np.array([tokens], dtype=np.int64)
        invariants.page_alignment(length, self.page_size, **self._where(operation))
        there = np.array([available], dtype=np.int64)
        most = max(available, self.max_tokens)  # a lease may hold more than a request may have
        invariants.length_order(length, there, most, explain=prefix, **self._where(operation))

    def share(self, pages: Ints, slots: Ints, operation: str) -> Added:
        """Lets each slot, which has no pages, begin with `pages`."""
        have = self.rows.num_pages[slots]
        if np.count_nonzero(have):
            slot = int(slots[have > 0][0])
            raise ArgumentError(
                f"{self._label}: {operation} into slot {slot}, which has pages already",
                value=slot,
                remedy="share a prefix before the request gets pages of its own, or release those",
            )
        lengths = np.full(slots.size, pages.size * self.page_size, dtype=np.int64)
        self._check_lengths(lengths, lengths, operation)
        self.references.add(pages, slots.size)
        self.rows.append(slots, np.full(slots.size, pages.size, dtype=np.int64), np.tile(pages, slots.size))
        self.rows.commit(slots, lengths)
        return self._added(slots, np.zeros(slots.size, dtype=np.int64), lengths, operation)

    def truncate(self, slots: Ints, lengths: Ints, after: Fence | None, operation: str) -> None:
        """Takes back committed tokens beyond `lengths`, and whole pages beyond them."""
        self._check_lengths(lengths, self.rows.committed[slots], operation, back)
        self._cut(slots, lengths, self.rows.pages_needed(lengths), after, operation)

    def release(self, slots: Ints, after: Fence | None, operation: str) -> None:
        """Takes everything back."""
        none = np.zeros(slots.size, dtype=np.int64)
        self._cut(slots, none, none, after, operation)

    def _cut(self, slots: Ints, lengths: Ints, keep: Ints, after: Fence | None, operation: str) -> None:
        self.references.ask_fences()
        pages = self.rows.cut(slots, keep)
        self.rows.commit(slots, lengths)
        self.references.drop(pages, after, operation)

    def _allocate(self, slots: Ints, lengths: Ints, operation: str) -> None:
        missing = np.maximum(self.rows.pages_needed(lengths) - self.rows.num_pages[slots], ZERO)
        total = int(missing[0]) if missing.size == 1 else int(missing.sum())
        if total:
            self.rows.append(slots, missing, self.references.take(total, operation))

    def _added(self, slots: Ints, start: Ints, counts: Ints, operation: str) -> Added:
        owned_by, positions = slots.repeat(counts), arange_per_row(start, counts)
        tokens = self.rows.tokens_at(owned_by, positions)
        self._check_no_padding(tokens, operation)
        return Added(owned_by, positions, tokens, counts)

    # Checks

    def _check_lengths(self, shorter: Ints, longer: Ints, operation: str, explain: Explain = total) -> None:
        """0 <= shorter <= longer <= the most a request may have."""
        high = longer.view(np.uint64)  # in which negative numbers are the largest
        if not np.count_nonzero(high > self._most) and (
            shorter is longer or not np.count_nonzero(shorter.view(np.uint64) > high)
        ):  # the law's own test, without its report
            times_checked[LENGTH_ORDER] += 1
            return
        invariants.length_order(shorter, longer, self.max_tokens, explain=explain, **self._where(operation))

    def _check_writable(self, slots: Ints, start: Ints, counts: Ints, operation: str) -> None:
        """Tokens are added in pages that nobody else uses. Only the first page of each row can be an old one."""
        if not self.references.shared:
            return
        partial = np.flatnonzero((counts > 0) & (start % self.page_size > 0))
        pages = self.rows.pages_at(slots[partial], start[partial] // self.page_size)
        self.references.check_exclusive(pages, operation)

    def _check_no_padding(self, tokens: Ints, operation: str) -> None:
        """No token lies on page 0, which would mean that a position was taken for allocated that is not."""
        if levels.cheap and tokens.size and int(tokens.min()) < self.page_size:
            invariants.slot_zero_allocated(tokens // self.page_size, **self._where(operation))

    def verify(self) -> None:
        """Every law of rows, references and leases from scratch.

        Raises:
            Violation: PAGE_OWNER, LENGTH_ORDER, and see `Allocator.verify`.
        """
        rows, where = self.rows, self._where("verify")
        num_pages = self.references.ledger.size
        self.references.verify(rows.holders(num_pages) + self.leases.holders(num_pages))
        invariants.length_order(rows.committed, rows.num_pages * self.page_size, rows.width * self.page_size, **where)
        # Each row names pages exactly up to its last one.
        named = (rows.table != 0) & (np.arange(rows.width) < rows.num_pages[:, None])
        invariants.page_owner(named.sum(axis=1), rows.num_pages, **where)

    def _where(self, operation: str) -> Where:
        return {"object": self._label, "operation": operation, "step": self._runtime.step}
