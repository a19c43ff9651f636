"""`PagePool`: which KV pages a request has, how many of its tokens are committed, and who else uses a page.

A request grows (pages are allocated), commits (tokens are written), truncates (speculation was rejected) and is
released, pages and slot together. Whole pages of a prefix may be shared: each holder has a reference, and nobody writes
into a page that has two. Pages may also be taken before there is a request; a lease holds them then. Bookkeeping is
numpy on the host, O(what changes), by the owning thread; nothing here touches the device.
"""

from collections.abc import Callable
from typing import SupportsIndex, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import levels
from batchstate.contracts import Contract
from batchstate.errors import ArgumentError, DeviceError
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Slots, Tokens
from batchstate.ownership.extension import Extension
from batchstate.ownership.page_books import Added, PageBooks
from batchstate.ownership.page_guard import PageGuard
from batchstate.ownership.page_lease import PageLease
from batchstate.ownership.page_stats import PageStats
from batchstate.ownership.sizes import MOST_TOKENS, size_of
from batchstate.ownership.token_table import check_token_table
from batchstate.pools import SlotPool
from batchstate.runtime import Fence, Runtime, check_fence, check_runtime
from batchstate.tables import Table
from batchstate.values.host_arrays import count
from batchstate.values.integers import amounts
from batchstate.violations import Where

__all__ = ["Extension", "PageLease", "PagePool", "PageStats"]

Ints = npt.NDArray[np.int64]


@final
class PagePool:
    """Pages 1 to num_pages for the requests of one slot pool. Token t lies on page t // page_size.

    Args:
        runtime: the device.
        slots: the pool whose slots own the pages. From now on a slot that still has pages cannot be freed.
        num_pages: pages that can be allocated.
        page_size: tokens a page.
        max_tokens_per_request: most tokens that one request can have.
        name: for reports.
        token_table: default table of `Extension.entry`, [slot, position] -> token.

    Raises:
        ArgumentError, DtypeError: sizes that are no positive integers, or of which a product goes beyond int64; no
            runtime or no slot pool; `token_table` is indexed by another pool's slots, or holds no integers.
        ShapeError: `token_table` has no room for a request.
        DtypeError, ValueOverflowError: it has no room for the last token.
        Violation: UNIT_MISMATCH: it holds something else.
        DeviceError: `slots` belongs to another runtime.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: SlotPool | HybridSlotPool,
        num_pages: SupportsIndex,
        page_size: SupportsIndex,
        *,
        max_tokens_per_request: SupportsIndex,
        name: str = "pages",
        token_table: Table | None = None,
    ) -> None:
        check_runtime(runtime, name)
        if not isinstance(slots, SlotPool | HybridSlotPool):
            raise ArgumentError(
                f"{name}: {type(slots).__name__} is no pool of slots",
                value=slots,
                remedy="pass the SlotPool or HybridSlotPool whose slots own the pages",
            )
        self.runtime = runtime
        self.name = name
        self.slots = slots if isinstance(slots, SlotPool) else slots.slots
        self.num_pages = size_of(num_pages, f"{name}: num_pages", least=1)
        self.page_size = size_of(page_size, f"{name}: page_size", least=1, most=MOST_TOKENS // (self.num_pages + 1))
        self.max_tokens_per_request = size_of(
            max_tokens_per_request, f"{name}: max_tokens_per_request", least=1, most=MOST_TOKENS
        )
        self._token_table = token_table
        if self.slots.runtime is not runtime:
            raise DeviceError(f"{name}: {slots!r} has another runtime", value=slots, remedy="use one runtime")
        self._books = PageBooks(
            runtime,
            self.slots.capacity,
            self.num_pages,
            self.page_size,
            self.max_tokens_per_request,
            label=f"PagePool {name!r}",
        )
        self._guard = PageGuard(self.slots.is_live, self._books)
        if token_table is not None:
            check_token_table(
                token_table,
                self.slots,
                max_tokens=self.max_tokens_per_request,
                token_capacity=self.token_capacity,
                name=name,
                where=self._where("token_table"),
            )
        self._take, self._release_lease = f"{name}: take", f"{name}: release a lease"
        self._release_checks: list[Callable[[Ints, str], None]] = []
        self.slots.attach(self._guard)

    def __repr__(self) -> str:
        ledger = self._books.references.ledger
        return (
            f"PagePool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={ledger.free}, pending={ledger.pending}, live={ledger.live})"
        )

    @property
    def token_table(self) -> Table | None:
        """The default table of `Extension.entry`."""
        return self._token_table

    @property
    def token_capacity(self) -> int:
        """Rows of KV memory that tokens index: those of all pages, page 0 included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def stats(self) -> PageStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        ledger = self._books.references.ledger
        return PageStats(
            num_pages=self.num_pages,
            free=ledger.free,
            pending=ledger.pending,
            live=ledger.live,
            shared=self._books.references.shared,
            leases=len(self._books.leases),
        )

    @property
    def page_table(self) -> npt.NDArray[np.int32]:
        """The pages of each slot in order, int32[slots.capacity, max_pages], 0 beyond the last; a read-only view."""
        view = self._books.rows.table.view()
        view.flags.writeable = False
        return view

    @property
    def committed_lengths(self) -> Ints:
        """Committed tokens of every slot, int64[slots.capacity]; a read-only view."""
        view = self._books.rows.committed.view()
        view.flags.writeable = False
        return view

    def committed(self, slots: Slots) -> Ints:
        """Committed tokens of each slot, int64[n]."""
        return self._books.rows.committed[self.slots.rows_of(slots, "committed")]

    def allocated(self, slots: Slots) -> Ints:
        """Allocated tokens of each slot, int64[n]: its pages times the page size."""
        return self._books.allocated(self.slots.rows_of(slots, "allocated"))

    def reap(self) -> int:
        """Makes free the pending pages whose fences are complete; says how many. Never waits."""
        self.runtime.check_owner(f"{self.name}: reap")
        return self._books.references.ledger.reap()

    def check_unshared(self, pages: Ints, operation: str) -> None:
        """Refuses to have pages int64[n] written that somebody else uses too.

        Raises:
            Violation: PAGE_OWNER.
        """
        self._books.references.check_exclusive(pages, operation)

    # Growing

    def grow(self, slots: Slots, lengths: object) -> None:
        """Allocates pages until each slot has room for `lengths` tokens. Commits nothing, releases nothing.

        Args:
            slots: live handles, each once.
            lengths: tokens, one number or int[n].

        Raises:
            PoolExhaustedError: too few pages are free. Nothing was allocated.
            Violation: LENGTH_ORDER: longer than a request may be. Handles as for `SlotPool.check_handles`; SLOT_SHARED.
            ShapeError, DtypeError: `lengths` does not go with `slots`.
        """
        rows = self._begin(slots, "grow")
        self._books.grow(rows, self._per_row(lengths, rows, "grow"), "grow")
        self._check_after()

    def commit(self, slots: Slots, lengths: object) -> None:
        """Declares that each slot's first `lengths` tokens are written: not fewer than before, nor than are allocated.

        Raises:
            Violation: LENGTH_ORDER; PAGE_OWNER: the tokens lie on a page that others use too.
        """
        rows = self._begin(slots, "commit")
        self._books.commit(rows, self._per_row(lengths, rows, "commit"), "commit")
        self._check_after()

    def extend(self, slots: Slots, lengths: object) -> Extension:
        """Grows and commits each slot to `lengths` tokens.

        Returns:
            the tokens from the old committed length to the new one.

        Raises:
            As `grow` and `commit`. Nothing was changed.
        """
        rows = self._begin(slots, "extend")
        return self._extension(slots, self._books.extend(rows, self._per_row(lengths, rows, "extend"), "extend"))

    def advance(self, slots: Slots, n: object = 1) -> Extension:
        """Grows and commits each slot by `n` tokens: what a decode step does, O(requests).

        Args:
            slots: live handles, each once.
            n: one number or int[n], 0 or more.

        Returns:
            the new tokens.

        Raises:
            As `grow` and `commit`. Nothing was changed.
        """
        rows = self._begin(slots, "advance")
        if type(n) is int and n == 1:
            return self._extension(slots, self._books.advance_by_one(rows, "advance"))
        counts = self._per_row(n, rows, "advance")
        if np.count_nonzero(counts < 0):
            raise ArgumentError(
                f"{self.name}: advance by {counts.min()}",
                value=int(counts.min()),
                remedy="advance by 0 or more; `truncate` takes tokens back",
            )
        return self._extension(slots, self._books.advance(rows, counts, "advance"))

    # Sharing

    def take(self, n: SupportsIndex) -> PageLease:
        """Takes `n` pages that no slot has yet: for KV that arrives before its request has a slot, or for a cache.

        The lease holds them alone, all `n * page_size` tokens of them; `share` lets slots begin with them, and whoever
        is left when the lease is released owns them. Costs O(n), whatever the size of the pool.

        Args:
            n: how many, 0 or more.

        Returns:
            a lease, to be given back with `release`.

        Raises:
            PoolExhaustedError: fewer are free. Nothing was taken.
            ArgumentError, DtypeError: `n` is no count.
            OwnerThreadError: called from a second thread.
        """
        self.runtime.check_owner(self._take)
        wanted = n if type(n) is int and n >= 0 else count(n, f"{self._take}: n")
        pages = self._books.references.take(wanted, "take")
        lease = self._books.leases.make(pages, wanted * self.page_size, self._end_lease)
        if levels.full:
            self._guard.verify()
        return lease

    def share(self, source: Slots | PageLease, target: Slots, tokens: SupportsIndex) -> Extension:
        """Lets `target` begin with the first `tokens` tokens of `source`: nothing is copied, pages get further holders.

        Args:
            source: one live handle, or a lease.
            target: live handles without pages.
            tokens: whole pages; at most what the source has committed.

        Returns:
            these tokens as tokens of the targets, for their rows of a token table.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER.
            ArgumentError: a target has pages already, or the source is not one slot or not a lease of this pool.
        """
        rows = self._begin(target, "share")
        return self._extension(target, self._books.share(self._prefix(source, tokens, "share"), rows, "share"))

    def hold(self, slots: Slots, tokens: SupportsIndex) -> PageLease:
        """Keeps the first `tokens` tokens of one slot when the slot is gone: one reference to each of their pages.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER.
            ArgumentError: not one slot.
        """
        self.runtime.check_owner(f"{self.name}: hold")
        pages = self._prefix(slots, tokens, "hold")
        self._books.references.add(pages, 1)
        lease = self._books.leases.make(pages, pages.size * self.page_size, self._end_lease)
        self._check_after()
        return lease

    def _end_lease(self, lease: PageLease, pages: Ints, after: Fence | None) -> None:
        self.runtime.check_owner(self._release_lease)
        if after is not None:
            check_fence(after, self._release_lease)
        books, operation = self._books, "release a lease"
        books.references.ask_fences()  # first: a fence is code of the engine's, and may release this very lease
        if not books.leases.holds(lease):
            books.leases.check_held(lease, **self._where(operation))
        books.references.drop(pages, after, operation)
        books.leases.end(lease)
        if levels.full:
            self._guard.verify()

    def _prefix(self, source: Slots | PageLease, tokens: SupportsIndex, operation: str) -> Ints:
        """The pages of the first `tokens` tokens of a slot or lease, checked; a new array."""
        length = size_of(tokens, f"{self.name}: {operation}: tokens", most=MOST_TOKENS)
        if isinstance(source, PageLease):
            if not self._books.leases.holds(source):
                raise ArgumentError(
                    f"{self.name}: {operation} from {source!r}, which this pool does not hold",
                    value=source,
                    remedy="share from a lease before it is released, in the pool that made it",
                )
            self._books.check_prefix(length, source.tokens, operation)
            return source.pages[: length // self.page_size].copy()
        rows = self.slots.rows_of(source, operation)
        if rows.size != 1:
            raise ArgumentError(
                f"{self.name}: {operation} from {rows.size} slots", value=rows.size, remedy="name one source"
            )
        return self._books.prefix(int(rows[0]), length, operation)

    # Releasing

    def truncate(self, slots: Slots, lengths: object, *, after: Fence | None = None) -> None:
        """Takes tokens back, after rejected speculation: committed falls to `lengths`, whole pages beyond are released.

        Args:
            slots: live handles, each once.
            lengths: tokens, one number or int[n]; at most what is committed.
            after: the forward-done fence of the last forward that uses the pages.

        Raises:
            Violation: LENGTH_ORDER.
        """
        rows = self._begin(slots, "truncate")
        check_fence(after, f"{self.name}: truncate")
        self._check_release(rows, "truncate")
        self._books.truncate(rows, self._per_row(lengths, rows, "truncate"), after, "truncate")
        self._check_after()

    def release(self, slots: Slots, *, after: Fence | None = None) -> None:
        """Releases every page of the slots, which stay live. See `release_requests` for requests that leave."""
        rows = self._begin(slots, "release")
        check_fence(after, f"{self.name}: release")
        self._check_release(rows, "release")
        self._books.release(rows, after, "release")
        self._check_after()

    def release_requests(self, slots: Slots, *, after: Fence | None = None) -> None:
        """Releases the pages and frees the slots: a request leaves with all it has, or an error changes nothing.

        Raises:
            As `SlotPool.free`.
        """
        operation = "release_requests"
        self.runtime.check_owner(f"{self.name}: {operation}")
        check_fence(after, f"{self.name}: {operation}")
        rows = self.slots.check_release(slots, operation, besides=self._guard)
        self._books.release(rows, after, operation)
        self.slots.release_rows(rows, after, operation)
        self._check_after()

    def guard_release(self, check: Callable[[Ints, str], None]) -> None:
        """For the library: `check(rows, operation)` may refuse, by raising, that pages of live slots are released."""
        self.runtime.check_owner(f"{self.name}: guard_release")
        self._release_checks.append(check)

    def _check_release(self, rows: Ints, operation: str) -> None:
        for check in self._release_checks:
            check(rows, operation)

    # The door

    def _begin(self, slots: Slots, operation: str) -> Ints:
        """Checks the caller's thread and the handles; int64[n]."""
        self.runtime.check_owner(f"{self.name}: {operation}")
        return self.slots.rows_of(slots, operation, unique=True)

    def _per_row(self, numbers: object, rows: Ints, operation: str) -> Ints:
        """One number a row, int64[n]."""
        given = amounts(numbers, rows.size, f"{self.name}: {operation}")
        if given.ndim:
            return given
        each = np.empty(rows.size, dtype=np.int64)
        each[:] = given
        return each

    def _extension(self, owners: Slots, added: Added) -> Extension:
        self._check_after()
        tokens = Tokens(
            self.runtime,
            added.tokens,
            None,
            dtype=torch.int64,
            shape=added.tokens.shape,
            contract=Contract.HOST_ONLY,
            name=self.name,
        )
        return Extension(
            added.slots, added.positions, tokens, added.counts, owners, self.slots, token_table=self._token_table
        )

    # Checks

    def _check_after(self) -> None:
        if levels.full:
            self._guard.verify()

    def verify(self) -> None:
        """Every law of the pool from scratch, on the host. Costs O(pages + slots x width).

        Raises:
            Violation: PAGE_OWNER, LENGTH_ORDER, and see `Ledger.verify`.
        """
        self.runtime.check_owner(f"{self.name}: verify")
        self._guard.verify()

    def expect_idle(self) -> None:
        """No slot and no lease holds a page; pending pages are no leak.

        Raises:
            Violation: SLOT_CONSERVATION, naming up to 8 of the leaked pages.
        """
        self.runtime.check_owner(f"{self.name}: expect_idle")
        self._books.references.ledger.expect_idle("expect_idle")

    def _where(self, operation: str) -> Where:
        return {"object": f"PagePool {self.name!r}", "operation": operation, "step": self.runtime.step}
