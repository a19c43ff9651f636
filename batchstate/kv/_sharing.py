"""Who holds pages besides the one request that wrote them: leases, and requests that begin with the same tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, SupportsIndex, final

import attrs
import numpy as np

from batchstate import invariants
from batchstate._allocator import MOST_TOKENS, joined, size_of
from batchstate._arrays import Ints, amounts, count, ranges_of, read_only
from batchstate.errors import ArgumentError, expected
from batchstate.kv._lengths import SHORT_PREFIX, UNCOMMITTED, explain_total
from batchstate.mirror import Locations, Slots
from batchstate.runtime.base import Fence, check_fence
from batchstate.runtime.streams import missing

if TYPE_CHECKING:
    from batchstate.kv.pages import Extension, PagePool


@final
@attrs.define(eq=False)
class PageLease:
    """Pages held without a slot: tokens of a request, kept after it, pages taken before one, or a cached prefix.

    Made by `PagePool.hold`, `PagePool.take` and `PrefixCache.match`; give it back with `release`, or to a request with
    `PagePool.assign`.

    Attributes:
        tokens: how many tokens; whole pages.
        writer: the end of the writer in another process that may write the pages, as `Lease.ended`; None without one.
            Whatever they are released behind, they are free again only after it.
        released: whether it was given back.
    """

    holds: ClassVar[str] = str(Locations.unit)
    _pages: Ints
    tokens: int
    _sharing: "PageSharing"
    _written: dict[str, int]  # tokens whose writes are launched, by memory; the pool keeps it
    _stream: int  # that wrote them last, by its number; the pool keeps it
    writer: Fence | None = None
    released: bool = attrs.field(default=False, init=False)
    _generations: Ints | None = attrs.field(init=False, default=None)  # of pages that a writer may write

    def __attrs_post_init__(self) -> None:
        if self.writer is not None:
            self._generations = self._now()

    def __repr__(self) -> str:
        return f"PageLease({self.tokens} tokens, {self._pages.size} pages{', released' if self.released else ''})"

    @property
    def pool_id(self) -> int:
        """Id of the pool."""
        return self._sharing.holders.pool_id

    @property
    def pages(self) -> Ints:
        """int64[tokens / page_size], in the order of their tokens; a read-only view."""
        return read_only(self._pages)

    @property
    def table(self) -> Ints:
        """int64[r, 2]: start and length of each range of locations, as `Receiver.grant` sends it to a writer."""
        return np.stack(ranges_of(self._pages), axis=1) * self._sharing.pool.page_size

    def check_kept(self, operation: str) -> None:
        """Refuses (SLOT_STALE_HANDLE) pages that are another's by now: a writer that has not ended may write them."""
        if self._generations is not None:
            where = self._sharing.holders.where(operation)
            invariants.slot_stale_handle(self._pages, self._generations, self._now(), **where)

    def _now(self) -> Ints:
        return self._sharing.pool._spaces["page"].generations_of(self._pages)

    def release(self, *, after: Fence | None) -> None:
        """Gives the references back, at once or when `after` is complete; once, or else SLOT_DOUBLE_FREE.

        `after` is the fence of the last work that reads or writes the pages for the holder of the lease; None for none.
        Pages that were taken with `writer=` wait for its end too.
        """
        sharing, operation = self._sharing, "release a lease"
        sharing.transaction.enter(sharing.releasing)
        if after is not None:
            check_fence(after, sharing.releasing)
        sharing.transaction.reap()
        if sharing.leases.get(id(self)) is not self:
            named = self.pages if self.pages.size else np.zeros(1, dtype=np.int64)
            invariants.slot_double_free(named, np.zeros(named.size, np.bool_), **sharing.holders.where(operation))
        sharing.drop(self, joined(after, self.writer), operation)
        sharing.pool._done()

    def split(self, num_tokens: SupportsIndex) -> "tuple[PageLease, PageLease]":
        """Cuts the lease in two: its first `num_tokens` tokens, and the others. This one counts as released then.

        As a node of a radix tree is split where two prompts part.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER: `num_tokens` are not whole pages, or more than there are.
            ArgumentError: it was released before.
        """
        sharing, operation = self._sharing, "split"
        tokens = sharing.tokens_of(num_tokens, operation)
        sharing.transaction.enter(f"{sharing.pool.name}: {operation}")
        at = sharing.whole_pages(tokens, sharing.held(self, operation).tokens, operation)
        sharing.transaction.operation = operation
        del sharing.leases[id(self)]
        self.released = True
        first_written = {memory: min(written, tokens) for memory, written in self._written.items()}
        last_written = {memory: written - first_written[memory] for memory, written in self._written.items()}
        by = self._stream, self.writer
        first = PageLease(self.pages[:at], tokens, sharing, first_written, *by)
        last = PageLease(self.pages[at:], self.tokens - tokens, sharing, last_written, *by)
        sharing.leases.update({id(first): first, id(last): last})
        sharing.pool._done()
        return first, last


Source = Slots | PageLease | Sequence[PageLease]
"""Holder of tokens that others begin with."""


@final
class PageSharing:
    """The further holders of a pool's pages; `PagePool` and `PageLease` document the methods that they call."""

    def __init__(self, pool: "PagePool") -> None:
        self.pool = pool
        self.holders, self.transaction, self.leases = pool._holders, pool.transaction, pool._holders.leases
        self._rows, self._writes = pool._rows, pool.writes
        self._take, self.releasing = f"{pool.name}: take", f"{pool.name}: release a lease"

    # Leases

    def take(self, n: SupportsIndex, writer: Fence | None) -> PageLease:
        self.transaction.enter(self._take)
        check_fence(writer, self._take)
        wanted = n if type(n) is int and n >= 0 else count(n, f"{self._take}: n")
        self.transaction.reap()
        if wanted > self._rows.free or not self._rows.look_free(wanted):
            self.holders.explain_free(wanted, "take")
        pages: Ints = np.empty(wanted, dtype=np.int64)
        self.transaction.operation = "take"
        self._rows.take(pages)
        self.holders.note(pages)
        self.holders.check_whole("take")
        return self.lease(pages, 0, 0, writer)

    def hold(self, slots: Slots, num_tokens: SupportsIndex, first: SupportsIndex) -> PageLease:
        tokens, begin = self.tokens_of(num_tokens, "hold"), self.tokens_of(first, "hold")
        self.transaction.enter(f"{self.pool.name}: hold")
        pages, writer = self.prefix(slots, tokens, "hold", begin)
        pages = pages[self.whole_pages(begin, tokens, "hold") :]
        self.holders.hold(pages, 1, "hold")
        self.note(slots, "hold")
        return self.lease(pages, pages.size * self.pool.page_size, writer)

    def lease(self, pages: Ints, written: int, stream: int, writer: Fence | None = None) -> PageLease:
        """A lease of pages that have a reference for it already; given back if a check fails. Takes the mark away."""
        marks = dict.fromkeys(self._writes.marks, written)
        lease = PageLease(pages, pages.size * self.pool.page_size, self, marks, stream, writer)
        self.leases[id(lease)] = lease
        self.transaction.operation = None
        try:
            self.pool._done()
        except Exception:
            self.drop(lease, None, self._take)
            raise
        return lease

    def held(self, lease: PageLease, operation: str) -> PageLease:
        """The lease, which this pool made and which is not released."""
        if self.leases.get(id(lease)) is not lease:
            problem = f"{self.pool.name}: {operation} of {lease!r}, which this pool does not hold"
            raise ArgumentError(problem, lease, "use a lease before it is released, in the pool that made it")
        return lease

    def commit(self, lease: PageLease, first: object, total: object, memory: str, operation: str) -> None:
        pool = self.pool
        self.transaction.enter(f"{pool.name}: {operation}")
        begin = np.atleast_1d(amounts(first, 1, f"{pool.name}: {operation}"))
        tokens = np.atleast_1d(amounts(total, 1, f"{pool.name}: {operation}"))
        there = np.array([self.held(lease, operation).tokens])
        if lease.writer is not None:
            arrived = tokens - missing(lease.writer, int(tokens[0]))
            pool._check_written(tokens, {memory: arrived}, operation)
            self.held(lease, operation)  # again: writers are code of the engine
        where, most = pool._where(operation), max(lease.tokens, int(tokens[0]))  # it may be longer than a request
        before = np.array([lease._written[memory]])
        invariants.length_order(before, tokens, most, explain=explain_total, **where)
        invariants.length_order(tokens, there, lease.tokens, explain=UNCOMMITTED, **where)
        if begin[0] > lease._written[memory]:
            return
        if any(lease._written.values()):
            self._writes.wait(np.array([lease._stream]))
        self.transaction.operation = operation
        lease._written[memory], lease._stream = int(tokens[0]), self._writes.writer()
        self.transaction.operation = None

    def drop(self, lease: PageLease, after: Fence | None, operation: str) -> None:
        self.holders.drop(lease._pages, after, operation)
        self.leases.pop(id(lease), None)  # a check that fails may be one of what it holds
        lease.released = True
        self.transaction.operation = None

    # Requests that begin with tokens of others

    def share(self, source: Source, target: Slots, num_tokens: SupportsIndex) -> "Extension":
        operation, pool = "share", self.pool
        tokens = self.tokens_of(num_tokens, operation)
        rows = pool._begin(target, operation)
        pages, writer = self.prefix(source, tokens, operation)
        self._check_no_pages(rows, operation)
        lengths = np.full(rows.size, tokens, dtype=np.int64)
        pool._check_lengths(lengths, lengths, operation)
        self.holders.hold(pages, rows.size, operation)
        self._rows.append(rows, pages)
        self._rows.commit(rows, lengths)
        self.note(source, operation)
        self._writes.begin(rows, tokens, writer)
        return pool._extension_from_start(target, rows, lengths, operation)

    def assign(self, lease: PageLease, target: Slots, num_tokens: SupportsIndex) -> "Extension":
        operation, pool = "assign", self.pool
        tokens = self.tokens_of(num_tokens, operation)
        ended = self.held(lease, operation).writer is None or lease.writer.query()  # type: ignore[union-attr]
        rows = pool._begin(target, operation)
        pages = self.held(lease, operation)._pages
        self._one(rows, operation)
        self._check_no_pages(rows, operation)
        if not ended:
            where = self.holders.where(operation)
            invariants.slot_in_flight(pages, np.ones(pages.size, np.bool_), behind=repr(lease.writer), **where)
        length = np.array([tokens], dtype=np.int64)
        pool._check_lengths(length, length, operation)
        most = self._rows.width * pool.page_size
        there = np.array([lease.tokens])
        invariants.length_order(length, there, most, explain=UNCOMMITTED, **self.holders.where(operation))
        pool._check_written(length, lease._written, operation)
        self.transaction.operation = operation
        del self.leases[id(lease)]
        lease.released = True
        self._rows.append(rows, pages)
        self._rows.commit(rows, length)
        self._writes.begin(rows, tokens, lease._stream)
        return pool._extension_from_start(target, rows, length, operation)

    def _check_no_pages(self, rows: Ints, operation: str) -> None:
        have = self._rows.arrays["count"][rows]
        if np.count_nonzero(have):
            slot = int(rows[have > 0][0])
            problem = f"{self.holders.label}: {operation} into slot {slot}, which has pages already"
            raise ArgumentError(problem, slot, "share a prefix before the request gets pages, or release those")

    def rebase(self, slots: Slots, source: Source, num_tokens: SupportsIndex, after: Fence | None) -> "Extension":
        operation, pool = "rebase", self.pool
        tokens = self.tokens_of(num_tokens, operation)
        check_fence(after, f"{pool.name}: {operation}")
        rows = pool._begin(slots, operation)
        row = self._one(rows, operation)
        pages, writer = self.prefix(source, tokens, operation)
        length = np.array([tokens])
        pool._check_lengths(length, pool._committed(rows), operation, SHORT_PREFIX)
        if tokens:
            pool.check_readable(rows, length, operation)
        if after is None:
            pool.slots.check_ended(rows, operation)
        pool._check_release(rows, operation)
        own = pool.page_table[row, : int(self._rows.arrays["count"][row])].astype(np.int64)
        own, behind = own[: pages.size], own[pages.size :]
        changed = pages != own
        if np.count_nonzero(changed):
            self._check_distinct(np.concatenate([pages, behind]), source, operation)
            self.holders.hold(pages[changed], 1, operation)
            self._rows.put(row, pages)
            pool.epochs.note(rows, operation, pool.runtime.step)
            self.note(source, operation)
            self._writes.begin(rows, tokens, self._writes.behind(np.array([writer, self._writes.writers[row]])))
            self.holders.drop(own[changed], after, operation)
        return pool._extension_from_start(slots, rows, length, operation)

    def note(self, source: Source, operation: str) -> None:
        """Pages of the source have further holders from now on, and must not be written by it."""
        if isinstance(source, Slots):
            self.pool.shares.note(source.np, operation, self.pool.runtime.step)

    def prefix(self, source: Source, tokens: int, operation: str, first: int = 0) -> tuple[Ints, int]:
        """The pages of the first `tokens` tokens of a source, a new array; and who wrote them.

        They are checked from token `first` on: those before are not used.
        """
        pool, length = self.pool, np.array([tokens], dtype=np.int64)
        if isinstance(source, PageLease):
            available, pages = source.tokens, self.held(source, operation).pages
            written, writer = source._written, source._stream
        elif isinstance(source, Sequence):
            leases = [self.held(lease, operation) for lease in source]
            available, written = sum(lease.tokens for lease in leases), dict.fromkeys(self._writes.marks, 0)
            pages = np.concatenate([length[:0], *(lease.pages for lease in leases)])
            self._check_distinct(pages[: tokens // pool.page_size], source, operation)
            for memory in written:
                for lease in leases:
                    written[memory] += lease._written[memory]
                    if lease._written[memory] < lease.tokens:
                        break
            writer = self._writes.behind(np.array([lease._stream for lease in leases], dtype=np.int64))
        else:
            rows = pool.slots.rows_of(source, operation)
            row = self._one(rows, operation)
            available, pages = int(pool._committed(rows)[0]), pool.page_table[row]
            written, writer = self._writes.written(row), int(self._writes.writers[row])
        number = self.whole_pages(tokens, available, operation)
        if isinstance(source, Slots) and tokens:
            pool.check_accepted(source.np, length, operation)
            pool.check_readable(source.np, np.array([min(first, tokens)]), operation, window=1)
        pool._check_written(length, written, operation)
        return pages[:number].astype(np.int64), writer

    def tokens_of(self, num_tokens: SupportsIndex, operation: str) -> int:
        return size_of(num_tokens, f"{self.pool.name}: {operation}: num_tokens", most=MOST_TOKENS)

    def _one(self, rows: Ints, operation: str) -> int:
        if rows.size != 1:
            raise expected(f"{self.pool.name}: {operation}", "one slot", rows.size, "pass the slot of one request")
        return int(rows[0])

    def whole_pages(self, tokens: int, available: int, operation: str) -> int:
        """How many pages `tokens` tokens are, which have to be whole pages and at most `available`."""
        length, where = np.array([tokens]), self.pool._where(operation)
        invariants.page_alignment(length, self.pool.page_size, **where)
        invariants.length_order(length, np.array([available]), available, explain=SHORT_PREFIX, **where)
        return tokens // self.pool.page_size

    def _check_distinct(self, pages: Ints, source: Source, operation: str) -> None:
        """A request names a page once: each place where it is named counts as a holder."""
        if self._rows.look_distinct(pages) >= 0:
            problem = f"{self.pool.name}: {operation} of {source!r}: a request would have a page at two places"
            remedy = "pass leases of different pages, each of which goes on where the one before ends"
            raise ArgumentError(problem, source, remedy)
