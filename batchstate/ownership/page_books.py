"""The books of a page pool: rows, references and leases, changed together and never in part.

Works on slot numbers that `PagePool` has checked. Each operation checks the lengths and owners first, then takes pages,
which fails without a trace, and only then writes.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import ArgumentError
from batchstate.invariants import made
from batchstate.ownership import length_words
from batchstate.ownership.extent_list import spread
from batchstate.ownership.page_lease import Leases
from batchstate.ownership.page_references import PageReferences
from batchstate.ownership.page_rows import PageRows
from batchstate.runtime import Fence, Runtime
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]
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
            explain=length_words.written,
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
        return self._extend(slots, start, start + counts, operation, length_words.further)

    def _extend(
        self, slots: Ints, start: Ints, lengths: Ints, operation: str, explain: Explain = length_words.total
    ) -> Added:
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
        self._check_lengths(lengths, lengths, operation, length_words.further)
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
        invariants.length_order(length, there, most, explain=length_words.prefix, **self._where(operation))

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
        self._check_lengths(lengths, self.rows.committed[slots], operation, length_words.back)
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
        owned_by, positions = slots.repeat(counts), spread(start, counts)
        tokens = self.rows.tokens_at(owned_by, positions)
        self._check_no_padding(tokens, operation)
        return Added(owned_by, positions, tokens, counts)

    # Checks

    def _check_lengths(
        self, shorter: Ints, longer: Ints, operation: str, explain: Explain = length_words.total
    ) -> None:
        """0 <= shorter <= longer <= the most a request may have."""
        high = longer.view(np.uint64)  # in which negative numbers are the largest
        if not np.count_nonzero(high > self._most) and (
            shorter is longer or not np.count_nonzero(shorter.view(np.uint64) > high)
        ):  # the law's own test, without its report
            made[LENGTH_ORDER] += 1
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
            Violation: PAGE_OWNER, LENGTH_ORDER, and see `Ledger.verify`.
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
