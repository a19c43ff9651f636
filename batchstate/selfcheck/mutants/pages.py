"""A KV page with fewer, more or other owners than the books say, or found elsewhere than they say."""

from typing import Any

import numpy as np

from batchstate._allocator import Ints
from batchstate.indices import Slots
from batchstate.kv._page_state import Leases, PageReferences, PageRows
from batchstate.kv.pages import Extension, PageLease, PagePool
from batchstate.runtime import Fence
from batchstate.selfcheck.mutants.registry import Patch, mutant
from batchstate.tables import Table, TableWrite
from batchstate.violations import Code


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #26941, sglang #21652")
def reference_not_dropped(patch: Patch) -> None:
    """A request leaves and its references stay: the pages are nobody's and never free."""
    patch(PageReferences, "_subtract", lambda self, pages, *, repeated: None)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #35501")
def sharer_not_counted(patch: Patch) -> None:
    """A second request maps the pages of a prefix and adds no reference to them."""
    patch(PageReferences, "_add", lambda self, pages, times: None)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #35501")
def sharing_not_noticed(patch: Patch) -> None:
    """The pool takes all pages for unshared while some are, and the first holder that leaves would free them."""
    patch(PageReferences, "_count_shared", lambda self, more: None)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #21652, sglang #35360")
def taken_without_a_holder(patch: Patch) -> None:
    """Pages are taken for KV that is to arrive and nobody holds them: if it does not come, they never come back."""

    def make(self: Leases, pages: Ints, tokens: int, release: Any) -> PageLease:
        lease: PageLease = original(self, pages, tokens, release)
        if pages.size:
            del self._held[id(lease)]
        return lease

    original = patch(Leases, "make", make)


@mutant(Code.PAGE_OWNER, Code.SLOT_DOUBLE_FREE, machine="page_pool", origin="sglang #35501, sglang #24527")
def first_free_returns_shared_page(patch: Patch) -> None:
    """The first of two holders that leaves gives the shared page back, and the second reads a stranger's KV."""
    patch(PageReferences, "_unreferenced", lambda self, pages, left: pages)


@mutant(Code.LENGTH_ORDER, machine="page_pool", origin="sglang #4913, sglang #4914, sglang #4977")
def truncate_releases_used_page(patch: Patch) -> None:
    """Truncation to a length inside a page releases that page too, with tokens of the request on it."""

    def cut(self: PageRows, rows: Ints, keep: Ints) -> Ints:
        pages: Ints = original(self, rows, np.maximum(keep - 1, 0))
        return pages

    original = patch(PageRows, "cut", cut)


@mutant(Code.LENGTH_ORDER, Code.PAGE_OWNER, machine="page_pool", origin="sglang #28754, sglang #27731, sglang #13741")
def allocated_length_not_updated(patch: Patch) -> None:
    """A request gets pages and its allocated length stays: committed exceeds it, and pages land on each other."""

    def append(self: PageRows, rows: Ints, counts: Ints, pages: Ints) -> None:
        before = self.num_pages[rows]
        original(self, rows, counts, pages)
        self.num_pages[rows] = before

    original = patch(PageRows, "append", append)


@mutant(Code.SLOT_ZERO_ALLOCATED, Code.LENGTH_ORDER, machine="page_pool", origin="sglang #27789, sglang #31616")
def last_partial_page_not_allocated(patch: Patch) -> None:
    """The pages of a length are counted by rounding down, and the last tokens of a request lie on page 0."""
    patch(PageRows, "pages_needed", lambda self, lengths: lengths // self.page_size)


@mutant(Code.SLOT_DOUBLE_FREE, Code.PAGE_OWNER, machine="page_pool", origin="sglang #6888, sglang #9068, sglang #12224")
def last_page_freed_twice(patch: Patch) -> None:
    """Finishing frees all pages, and the extra token of the batch in flight frees the last one once more."""

    def drop(self: PageReferences, pages: Ints, after: Fence | None, operation: str) -> None:
        original(self, pages, after, operation)
        original(self, pages[-1:], after, operation)

    original = patch(PageReferences, "drop", drop)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #36457")
def more_credited_than_freed(patch: Patch) -> None:
    """A release of several pages takes them all from the request and gives all but the last one back."""

    def drop(self: PageReferences, pages: Ints, after: Fence | None, operation: str) -> None:
        original(self, pages[:-1] if pages.size > 1 else pages, after, operation)

    original = patch(PageReferences, "drop", drop)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #27779, sglang #27586")
def page_row_not_cleared(patch: Patch) -> None:
    """Released pages stay in the row of the request: a tombstone that names what is somebody else's by then."""
    patch(PageRows, "_clear", lambda self, places: None)


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #28754, FreeToken#204")
def one_page_for_two_requests(patch: Patch) -> None:
    """An allocation for several requests writes one page into two rows, and sums stay balanced."""

    def put(self: PageRows, places: Ints, pages: Ints) -> None:
        doubled = pages.copy()
        doubled[-1:] = doubled[:1]
        original(self, places, doubled)

    original = patch(PageRows, "_put", put)


@mutant(Code.SLOT_IN_FLIGHT, machine="page_pool", origin="sglang #35049, sglang #32564")
def only_last_holder_fences(patch: Patch) -> None:
    """A shared page is free when its last holder's forward is complete, while that of an earlier one reads it."""
    patch(PageReferences, "_still_read", lambda self, pages: np.zeros(pages.size, dtype=np.bool_))


@mutant(Code.PAGE_OWNER, machine="page_pool", origin="sglang #35360, sglang #12107")
def lease_not_given_back(patch: Patch) -> None:
    """The prefix cache drops an entry and keeps its references: a holder without a releaser."""

    def drop(self: PageReferences, pages: Ints, after: Fence | None, operation: str) -> None:
        if operation != "release a lease":
            original(self, pages, after, operation)

    original = patch(PageReferences, "drop", drop)


@mutant(Code.PAGE_ALIGNMENT, machine="page_pool", origin="sglang #4913, sglang #27779")
def prefix_kept_unaligned(patch: Patch) -> None:
    """The prefix cache keeps all committed tokens, and a part of the last page belongs to two requests."""

    def hold(self: PagePool, slots: Slots, tokens: int) -> PageLease:
        committed = int(self.committed(slots)[0]) if len(slots) == 1 else 0
        aligned = tokens % self.page_size == 0 and 0 <= committed - tokens < self.page_size
        lease: PageLease = original(self, slots, committed if aligned else tokens)
        return lease

    original = patch(PagePool, "hold", hold)


@mutant(Code.SLOT_CONSERVATION, machine="page_pool", origin="sglang #11970, sglang #11976, sglang #11981")
def row_freed_without_pages(patch: Patch) -> None:
    """A retracted request gives its row back and keeps its pages, which nobody can name any more."""

    def release_requests(self: PagePool, slots: Slots, *, after: Fence | None = None) -> None:
        rows = self.slots.check_release(slots, "release_requests", besides=self._guard)
        self.slots.release_rows(rows, after, "release_requests")
        self.verify()

    patch(PagePool, "release_requests", release_requests)


@mutant(Code.MIRROR_EQUAL, machine="future_map", origin="lmdeploy#4569, sglang #26376")
def places_never_cross(patch: Patch) -> None:
    """The places of new tokens stay on the host, and the forward reads those that a former owner left in the table."""

    def entry(self: Extension, table: Table | None = None) -> TableWrite:
        write: TableWrite = original(self, table)
        return TableWrite(write.table, write.index[:0], write.values[:0], write.owners)

    original = patch(Extension, "entry", entry)
