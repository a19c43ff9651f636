"""KV memory as it should be: whose each page is, and what every request finds at each of its positions.

Each token that is written gets a stamp of its own. A request, or a prefix that is held, must find its stamps for as
long as it lives: a page handed out twice, or too early, shows as somebody else's stamp.
"""

from typing import final

import attrs
import numpy as np

from batchstate.pages import Extension, PageLease, PagePool
from batchstate.testing.fences import ManualFence
from batchstate.testing.ledger_model import LedgerModel
from batchstate.testing.machine import DisagreementError, agree


@final
@attrs.define(eq=False)
class Holding:
    """Pages in order, and the stamps of the committed tokens on them; whether they were taken without a request."""

    pages: list[int] = attrs.field(factory=list)
    stamps: list[int] = attrs.field(factory=list)
    taken: bool = False


@final
@attrs.define(eq=False)
class PageModel:
    """The model of a page pool.

    Attributes:
        pool: the pool.
        ledger: which pages are live, and which must wait; the pool may let a shared page wait longer, never less long.
        requests: slot -> what it holds.
        leases: prefixes held without a slot.
        memory: token -> stamp.
        readers: page -> fences of sharers that left before the last one.
    """

    pool: PagePool
    ledger: LedgerModel
    requests: dict[int, Holding] = attrs.field(factory=dict)
    leases: list[tuple[PageLease, Holding]] = attrs.field(factory=list)
    memory: dict[int, int] = attrs.field(factory=dict)
    readers: dict[int, list[ManualFence]] = attrs.field(factory=dict)
    written: int = 0

    def holders(self, page: int) -> int:
        """Who holds a page."""
        everyone = (*self.requests.values(), *(holding for _, holding in self.leases))
        return sum(page in holding.pages for holding in everyone)

    def lacks(self, slot: int, length: int) -> int:
        """Pages that a request needs on top to hold `length` tokens."""
        return max(0, -(-length // self.pool.page_size) - len(self.requests[slot].pages))

    def writable(self, slot: int, length: int) -> bool:
        """Whether the tokens up to `length` lie on pages that nobody else holds."""
        holding, size = self.requests[slot], self.pool.page_size
        start = len(holding.stamps)
        partial = length > start and start % size > 0
        return not partial or self.holders(holding.pages[start // size]) == 1

    def admit(self, slot: int) -> None:
        """A request without pages."""
        self.requests[slot] = Holding()

    def grew(self, slot: int) -> None:
        """Reads which pages a request got, and checks that they were free.

        Raises:
            DisagreementError: they were not, or older ones changed.
        """
        holding = self.requests[slot]
        row = [page for page in self.pool.page_table[slot].tolist() if page]
        agree(holding.pages, row[: len(holding.pages)], f"older pages of slot {slot}")
        self.ledger.take(row[len(holding.pages) :])
        holding.pages = row

    def take(self, lease: PageLease) -> None:
        """Pages were taken without a request, and KV arrives on all of them.

        Raises:
            DisagreementError: one of them was not free.
        """
        holding = Holding(lease.pages.tolist(), taken=True)
        self.ledger.take(holding.pages)
        for position in range(lease.tokens):
            self.written += 1
            self.memory[self.token(holding, position)] = self.written
            holding.stamps.append(self.written)
        self.leases.append((lease, holding))

    def wrote(self, slots: list[int], lengths: list[int], extension: Extension) -> None:
        """Stamps the tokens of an extension, and checks that each lies where the page table says.

        Raises:
            DisagreementError: it does not.
        """
        expected: list[tuple[int, int, int]] = []
        for slot, length in zip(slots, lengths, strict=True):
            self.grew(slot)
            holding = self.requests[slot]
            for position in range(len(holding.stamps), length):
                token = self.token(holding, position)
                expected.append((slot, position, token))
                self.written += 1
                self.memory[token] = self.written
                holding.stamps.append(self.written)
        given = zip(extension.slots.tolist(), extension.positions.tolist(), extension.tokens.np.tolist(), strict=True)
        agree(expected, list(given), "slot, position and token of an extension")

    def commit(self, slot: int, length: int) -> None:
        """Stamps the tokens up to `length`."""
        holding = self.requests[slot]
        for position in range(len(holding.stamps), length):
            self.written += 1
            self.memory[self.token(holding, position)] = self.written
            holding.stamps.append(self.written)

    def token(self, holding: Holding, position: int) -> int:
        """Where a position lies."""
        size = self.pool.page_size
        return holding.pages[position // size] * size + position % size

    def cut(self, slot: int, length: int, after: ManualFence | None) -> None:
        """Takes back the tokens beyond `length`, and the pages beyond them."""
        holding = self.requests[slot]
        keep = -(-length // self.pool.page_size)
        pages, holding.pages = holding.pages[keep:], holding.pages[:keep]
        del holding.stamps[length:]
        self.drop(pages, after)

    def release(self, slot: int, after: ManualFence | None) -> None:
        """The request leaves."""
        self.cut(slot, 0, after)
        del self.requests[slot]

    def drop(self, pages: list[int], after: ManualFence | None) -> None:
        """One holder of each page left, behind `after`."""
        for page in pages:
            if self.holders(page):
                if after is not None:
                    self.readers.setdefault(page, []).append(after)
            else:
                self.ledger.release([page], after, *self.readers.pop(page, ()))

    def share(self, source: Holding, slot: int, tokens: int) -> None:
        """A request begins with the first tokens of another, or of a lease."""
        self.requests[slot] = Holding(source.pages[: tokens // self.pool.page_size], source.stamps[:tokens])

    def judge(self) -> None:
        """Compares the pool with the model, and every request with its stamps.

        Raises:
            DisagreementError: they differ.
        """
        pool, stats = self.pool, self.pool.stats
        self.ledger.reap()
        pages = {page for holding in self.requests.values() for page in holding.pages}
        pages |= {page for _, holding in self.leases for page in holding.pages}
        agree(len(pages), stats.live, "live pages")
        agree(pages, self.ledger.live, "live pages of the model")
        agree(sum(self.holders(page) > 1 for page in sorted(pages)), stats.shared, "shared pages")
        agree(len(self.leases), stats.leases, "leases")
        if stats.pending < len(self.ledger.pending):
            raise DisagreementError(f"{stats.pending} pages are pending, {len(self.ledger.pending)} have to be")
        for slot, holding in sorted(self.requests.items()):
            row = np.zeros(pool.page_table.shape[1], np.int32)
            row[: len(holding.pages)] = holding.pages
            agree(row.tolist(), pool.page_table[slot].tolist(), f"pages of slot {slot}")
            self._judge_stamps(holding, f"slot {slot}")
        for lease, holding in self.leases:
            agree(holding.pages, lease.pages.tolist(), f"pages of {lease!r}")
            self._judge_stamps(holding, repr(lease))

    def _judge_stamps(self, holding: Holding, whose: str) -> None:
        found = [self.memory.get(self.token(holding, position)) for position in range(len(holding.stamps))]
        agree(holding.stamps, found, f"tokens of {whose}")
