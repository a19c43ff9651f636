"""Who else uses a page: reference counts, and what has to happen before a page is anybody's again.

A page is free when its last reference is gone AND every forward that used it through any of its references is
complete. The second half matters for shared prefixes: request A leaves behind fence F and its reference goes, request B
leaves later without a fence and takes the last one, and the forward behind F may still be reading. So the fence of each
reference that was not the last is remembered until it is complete.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.ownership.fence_queue import AllFences
from batchstate.ownership.ledger import LIVE_BYTE, Ledger
from batchstate.runtime import Fence, Runtime
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


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
        self.ledger = Ledger(runtime, num_pages, label=label)
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
            Violation: see `Ledger.take`; SLOT_IN_FLIGHT also for a page that a former sharer's forward still reads.
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
            Violation: PAGE_OWNER, and see `Ledger.verify`.
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
