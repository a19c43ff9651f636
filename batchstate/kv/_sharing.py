"""Who holds pages besides the one request that wrote them: leases, and requests that begin with the same tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate._allocator import MOST_TOKENS, size_of
from batchstate._arrays import amounts, count, read_only
from batchstate.errors import ArgumentError
from batchstate.kv._lengths import SHORT_PREFIX, UNCOMMITTED, explain_total
from batchstate.mirror import Slots
from batchstate.runtime.base import Fence, check_fence

if TYPE_CHECKING:
    from batchstate.kv.pages import Extension, PagePool

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class PageLease:
    """Pages held without a slot: tokens of a request, kept after it, pages taken before one, or a cached prefix.

    Made by `PagePool.hold`, `PagePool.take` and `PrefixCache.match`; give it back with `release`.

    Attributes:
        tokens: how many tokens; whole pages.
        released: whether it was given back.
    """

    _pages: Ints
    tokens: int
    _sharing: "PageSharing"
    _written: int  # tokens whose writes are launched, and the stream that wrote them last; the pool keeps both
    _writer: int
    released: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"PageLease({self.tokens} tokens, {self._pages.size} pages{', released' if self.released else ''})"

    @property
    def pages(self) -> Ints:
        """int64[tokens / page_size], in the order of their tokens; a read-only view."""
        return read_only(self._pages)

    def release(self, *, after: Fence | None = None) -> None:
        """Gives the references back, at once or when `after` is complete; once, or else SLOT_DOUBLE_FREE."""
        self._sharing.end(self, self._pages, after)

    def split(self, num_tokens: SupportsIndex) -> "tuple[PageLease, PageLease]":
        """Cuts the lease in two: its first `num_tokens` tokens, and the others. This one counts as released then.

        As a node of a radix tree is split where two prompts part.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER: `num_tokens` are not whole pages, or more than there are.
            ArgumentError: it was released before.
        """
        return self._sharing.split(self, num_tokens)


Source = Slots | PageLease | Sequence[PageLease]
"""Holder of tokens that others begin with."""


@final
class PageSharing:
    """The further holders of a pool's pages; `PagePool` and `PageLease` document the methods that they call.

    Attributes:
        leases: by id, those that are not released.
    """

    def __init__(self, pool: "PagePool") -> None:
        self._pool = pool
        self._slots, self._rows, self._holders = pool.slots, pool._rows, pool._holders
        self._writes, self._transaction = pool.writes, pool.transaction
        self.leases: dict[int, PageLease] = {}
        self._take, self._release = f"{pool.name}: take", f"{pool.name}: release a lease"

    # Leases

    def take(self, n: SupportsIndex) -> PageLease:
        self._transaction.enter(self._take)
        wanted = n if type(n) is int and n >= 0 else count(n, f"{self._take}: n")
        self._holders.query_fences()
        return self.lease(self._holders.take(wanted, "take"), 0, 0)

    def hold(self, slots: Slots, num_tokens: SupportsIndex, first: SupportsIndex) -> PageLease:
        tokens, begin = self._tokens(num_tokens, "hold"), self._tokens(first, "hold")
        self._transaction.enter(f"{self._pool.name}: hold")
        pages, writer = self.prefix(slots, tokens, "hold")
        pages = pages[self._whole_pages(begin, tokens, "hold") :]
        self._holders.hold(pages, 1, "hold")
        self.note(slots, "hold")
        return self.lease(pages, pages.size * self._pool.page_size, writer)

    def lease(self, pages: Ints, written: int, writer: int) -> PageLease:
        """A lease of pages that have a reference for it already; given back if a check fails. Takes the mark away."""
        lease = PageLease(pages, pages.size * self._pool.page_size, self, written, writer)
        self.leases[id(lease)] = lease
        self._transaction.operation = None
        try:
            self._pool._check_after()
        except Exception:
            self._drop(lease, pages, None, self._take)
            raise
        return lease

    def held(self, lease: PageLease, operation: str) -> PageLease:
        """The lease, which this pool made and which is not released."""
        if self.leases.get(id(lease)) is not lease:
            problem = f"{self._pool.name}: {operation} of {lease!r}, which this pool does not hold"
            raise ArgumentError(problem, lease, "use a lease before it is released, in the pool that made it")
        return lease

    def commit(self, lease: PageLease, total: object) -> None:
        self._transaction.enter(f"{self._pool.name}: commit")
        tokens = np.atleast_1d(amounts(total, 1, f"{self._pool.name}: commit"))
        there = np.array([self.held(lease, "commit").tokens])
        where, before = self._pool._where("commit"), np.array([lease._written])
        most = max(lease.tokens, int(tokens[0]))  # a lease may be longer than a request
        invariants.length_order(before, tokens, most, explain=explain_total, **where)
        invariants.length_order(tokens, there, lease.tokens, explain=UNCOMMITTED, **where)
        if lease._written:
            self._writes.wait(np.array([lease._writer]))
        self._transaction.operation = "commit"
        lease._written, lease._writer = int(tokens[0]), self._writes.writer()
        self._transaction.operation = None

    def split(self, lease: PageLease, num_tokens: SupportsIndex) -> tuple[PageLease, PageLease]:
        tokens = self._tokens(num_tokens, "split")
        self._transaction.enter(f"{self._pool.name}: split")
        pages, at = self.held(lease, "split").pages, self._whole_pages(tokens, lease.tokens, "split")
        self._transaction.operation = "split"
        del self.leases[id(lease)]
        lease.released = True
        size = self._pool.page_size
        first, last = (
            PageLease(
                part, part.size * size, self, max(0, min(lease._written - begin, part.size * size)), lease._writer
            )
            for part, begin in ((pages[:at], 0), (pages[at:], tokens))
        )
        self.leases |= {id(first): first, id(last): last}
        self._pool._done()
        return first, last

    def end(self, lease: PageLease, pages: Ints, after: Fence | None) -> None:
        self._transaction.enter(self._release)
        if after is not None:
            check_fence(after, self._release)
        operation = "release a lease"
        self._holders.query_fences()
        if self.leases.get(id(lease)) is not lease:
            named = pages if pages.size else np.zeros(1, dtype=np.int64)
            where = self._pool._where(operation)
            invariants.slot_double_free(named, np.zeros(named.size, dtype=np.bool_), **where)
        self._drop(lease, pages, after, operation)
        self._pool._check_after()

    def _drop(self, lease: PageLease, pages: Ints, after: Fence | None, operation: str) -> None:
        self._holders.drop(pages, after, operation)
        self.leases.pop(id(lease), None)  # a check that fails may be one of what it holds
        lease.released = True
        self._transaction.operation = None

    # Requests that begin with tokens of others

    def share(self, source: Source, target: Slots, num_tokens: SupportsIndex) -> "Extension":
        operation, pool = "share", self._pool
        tokens = self._tokens(num_tokens, operation)
        rows = pool._begin(target, operation)
        pages, writer = self.prefix(source, tokens, operation)
        have = self._rows.arrays["count"][rows]
        if np.count_nonzero(have):
            slot = int(rows[have > 0][0])
            problem = f"{self._holders.label}: {operation} into slot {slot}, which has pages already"
            remedy = "share a prefix before the request gets pages of its own, or release those"
            raise ArgumentError(problem, slot, remedy)
        lengths = np.full(rows.size, tokens, dtype=np.int64)
        pool._check_lengths(lengths, lengths, operation)
        self._holders.hold(pages, rows.size, operation)
        self._rows.append(rows, pages)
        self._rows.commit(rows, lengths, True)
        self.note(source, operation)
        self._writes.begin(rows, tokens, writer)
        return pool._extension(target, *pool.lay(rows, 0 * lengths, lengths, operation), lengths, operation)

    def rebase(self, slots: Slots, source: Source, num_tokens: SupportsIndex, after: Fence | None) -> "Extension":
        operation, pool = "rebase", self._pool
        tokens = self._tokens(num_tokens, operation)
        check_fence(after, f"{pool.name}: {operation}")
        rows = pool._begin(self._one(slots, operation), operation)
        pages, writer = self.prefix(source, tokens, operation)
        length = np.array([tokens])
        pool._check_lengths(length, pool._committed(rows), operation, SHORT_PREFIX)
        if tokens:
            pool.check_readable(rows, length, operation)
        pool._check_release(rows, operation)
        row = int(rows[0])
        own = pool.page_table[row, : int(self._rows.arrays["count"][row])].astype(np.int64)
        own, behind = own[: pages.size], own[pages.size :]
        changed = pages != own
        if np.count_nonzero(changed):
            self._check_distinct(np.concatenate([pages, behind]), source, operation)
            self._holders.hold(pages[changed], 1, operation)
            self._rows.put(row, pages)
            pool.epochs.note(rows, operation, pool.runtime.step)
            self.note(source, operation)
            written = max(tokens, int(self._writes.tokens[row]))
            self._writes.begin(rows, written, self._writes.behind(np.array([writer, self._writes.writer_of(row)])))
            self._holders.drop(own[changed], after, operation)
        return pool._extension(slots, *pool.lay(rows, 0 * length, length, operation), length, operation)

    def note(self, source: Source, operation: str) -> None:
        """Pages of the source have further holders from now on, and must not be written by it."""
        if isinstance(source, Slots):
            self._pool.shares.note(source.np, operation, self._pool.runtime.step)

    def prefix(self, source: Source, tokens: int, operation: str) -> tuple[Ints, int]:
        """The pages of the first `tokens` tokens of a source, checked, a new array; and who wrote them."""
        pool = self._pool
        if isinstance(source, PageLease):
            available, pages = source.tokens, self.held(source, operation).pages
            written, writer = np.array([source._written]), source._writer
        elif isinstance(source, Sequence):
            leases = [self.held(lease, operation) for lease in source]
            available = sum(lease.tokens for lease in leases)
            pages = np.concatenate([np.empty(0, dtype=np.int64), *(lease.pages for lease in leases)])
            self._check_distinct(pages[: tokens // pool.page_size], source, operation)
            full = [lease._written == lease.tokens for lease in leases]
            first_part = leases[: full.index(False) + 1] if False in full else leases
            written = np.array([sum(lease._written for lease in first_part)])
            writer = self._writes.behind(np.array([lease._writer for lease in leases], dtype=np.int64))
        else:
            row = int(self._slots.rows_of(self._one(source, operation), operation)[0])
            rows = np.array([row])
            available, pages = int(pool._committed(rows)[0]), pool.page_table[row]
            written, writer = self._writes.tokens[rows], self._writes.writer_of(row)
        number, length = self._whole_pages(tokens, available, operation), np.array([tokens], dtype=np.int64)
        if isinstance(source, Slots) and tokens:
            pool.check_readable(source.np, length, operation)
        pool._check_written(length, written, operation)
        return pages[:number].astype(np.int64), writer

    def _tokens(self, num_tokens: SupportsIndex, operation: str) -> int:
        return size_of(num_tokens, f"{self._pool.name}: {operation}: num_tokens", most=MOST_TOKENS)

    def _one(self, slots: Slots, operation: str) -> Slots:
        if self._slots.rows_of(slots, operation).size != 1:
            problem = f"{self._pool.name}: {operation}: expected one slot, got {len(slots)}"
            raise ArgumentError(problem, len(slots), "pass the slot of one request")
        return slots

    def _whole_pages(self, tokens: int, available: int, operation: str) -> int:
        """How many pages `tokens` tokens are, which have to be whole pages and at most `available`."""
        length, there, where = np.array([tokens]), np.array([available]), self._pool._where(operation)
        invariants.page_alignment(length, self._pool.page_size, **where)
        invariants.length_order(length, there, available, explain=SHORT_PREFIX, **where)
        return tokens // self._pool.page_size

    def _check_distinct(self, pages: Ints, source: Source, operation: str) -> None:
        """A request names a page once: each place where it is named counts as a holder."""
        if self._rows.look_distinct(pages) >= 0:
            named = f"{self._pool.name}: {operation} of {source!r}"
            problem = f"{named}, after which a request would have a page at two places"
            remedy = "pass leases of different pages, each of which goes on where the one before ends"
            raise ArgumentError(problem, source, remedy)
