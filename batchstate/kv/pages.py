"""`PagePool`: which KV pages a request has, how many of its tokens are committed, and who else uses a page.

A request grows (pages are allocated), commits (tokens are written), truncates (speculation was rejected) and is
released, pages and slot together. Whole pages of a prefix may be shared: each holder has a reference, and nobody writes
into a page that has two. Pages may also be taken before there is a request; a lease holds them then. Bookkeeping is
numpy on the host, O(what changes), by the owning thread; nothing here touches the device.
"""

from collections.abc import Callable
from typing import SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import MOST_TOKENS, size_of
from batchstate._arrays import amounts, converted, count
from batchstate.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from batchstate.indices import Locations, Slots
from batchstate.kv._page_state import Added, PageBooks, PageLease
from batchstate.mirror import Contract
from batchstate.pools import SlotListener, SlotPool
from batchstate.runtime import Fence, Runtime, check_fence, check_runtime, numpy_dtype
from batchstate.tables import SlotSpace, Table, TableWrite, read_only
from batchstate.violations import Where

# A page pool in numbers.


@attrs.frozen
class PageStats:
    """A page pool in numbers: free + pending + live = num_pages.

    Attributes:
        num_pages: pages that can be allocated; page 0 is not among them.
        free: nobody's.
        pending: released behind a fence that is not complete; waiting helps.
        live: held by slots or leases.
        shared: live pages with more than one holder.
        leases: leases that are not released.
    """

    num_pages: int
    free: int
    pending: int
    live: int
    shared: int
    leases: int


# What a slot pool asks of the pages that its slots own: no slot is freed while it has pages.

Ints = npt.NDArray[np.int64]


@final
class PageGuard(SlotListener):
    """The listener of a slot pool whose slots own pages. Slots are taken without pages and get them by growing.

    Args:
        is_live: which of some slots int64[n] are live, bool[n].
        books: the pages.
    """

    def __init__(self, is_live: Callable[[Ints], npt.NDArray[np.bool_]], books: PageBooks) -> None:
        self._is_live = is_live
        self._books = books

    def __repr__(self) -> str:
        return f"PageGuard({self._books!r})"

    def check_free(self, rows: Ints, operation: str) -> None:
        """Refuses to free slots that have pages: nobody would give those back.

        Raises:
            Violation: SLOT_CONSERVATION, naming slots.
        """
        owned = self._books.rows.num_pages[rows]
        if np.count_nonzero(owned):
            owners = rows[owned > 0]
            names = ", ".join(str(slot) for slot in owners[:8]) + (", ..." if owners.size > 8 else "")
            self._refuse(
                owners,
                int(owned.sum()),
                operation,
                problem=f"these slots still own {int(owned.sum())} pages: {names}",
                remedy="use `pages.release_requests(slots, after=...)`, which frees a request with all it has",
            )

    def _refuse(
        self, owners: Ints, pages: int, operation: str, *, problem: str | None = None, remedy: str | None = None
    ) -> None:
        ledger = self._books.references.ledger
        invariants.slot_conservation(
            ledger.free,
            ledger.pending,
            ledger.live - pages,
            ledger.size,
            leaked=owners,
            problem=problem,
            remedy=remedy,
            object=ledger.label,
            operation=operation,
        )

    def verify(self) -> None:
        """Every law of the pages from scratch, and none belongs to a slot that is nobody's.

        Raises:
            Violation: SLOT_CONSERVATION, and see `PageBooks.verify`.
        """
        self._books.verify()
        owners = np.flatnonzero(self._books.rows.num_pages)
        orphans = owners[~self._is_live(owners)]
        if orphans.size:
            self._refuse(orphans, int(self._books.rows.num_pages[orphans].sum()), "verify")


# The tokens that a step adds to its requests: where each lies, and whose it is.


@final
@attrs.frozen(eq=False)
class Extension:
    """t tokens of n requests, those of one request together, in order.

    The arrays are read-only: they were checked as they are.

    Attributes:
        slots: int64[t], the slot of each token.
        positions: int64[t], its position in the request.
        tokens: `host_only` int64[t], its place in KV memory.
        counts: int64[n], tokens of each request.
        owners: the handles of the n requests, which `entry` asks again: numbers do not say whose slot it is by then.
    """

    slots: Ints = attrs.field(converter=read_only)
    positions: Ints = attrs.field(converter=read_only)
    locations: Locations
    counts: Ints = attrs.field(converter=read_only)
    owners: Slots
    _space: SlotSpace
    _req_to_token: Table | None = None

    def __len__(self) -> int:
        return len(self.locations)

    def __repr__(self) -> str:
        return f"Extension({len(self)} tokens of {self.counts.size} requests)"

    def entry(self, table: Table | None = None) -> TableWrite:
        """The write that records the tokens in a table [slot, position] -> token; rides in a batch's upload.

        Args:
            table: by default the pool's token table.

        Raises:
            ArgumentError: no table given, and the pool has none; or a table of other slots.
            Violation: SLOT_STALE_HANDLE: a request has left since. Else see `Table.entry`.
            RowIndexError: see `Table.entry`.
        """
        target = self._req_to_token if table is None else table
        if target is None:
            raise ArgumentError(
                "entry without a table", value=None, remedy="pass a table, or give the PagePool a req_to_token"
            )
        if target.slots is not self._space:
            raise ArgumentError(
                f"entry of slots of {self._space.name!r} in {target!r} of {target.slots.name!r}",
                value=target,
                remedy="pass a table that was made by the pool of these slots",
            )
        self._space.check_handles(self.owners, "entry")
        if target is self._req_to_token and not levels.full:  # the pool made and checked all three
            return target.planned(self.slots, self.positions, self.locations.np, self.owners)
        checked = target.entry(self.slots, self.positions, self.locations)
        return attrs.evolve(checked, owners=self.owners)


# What a table must be to hold the tokens of a page pool.


def check_req_to_token(
    table: Table, slots: SlotSpace, *, max_tokens: int, location_capacity: int, name: str, where: Where
) -> None:
    """Refuses a table of other slots, without room for a request, or with values that are or hold no tokens.

    Raises:
        ArgumentError, ShapeError, DtypeError, ValueOverflowError: see `PagePool`.
        Violation: TABLE_CAPACITY, UNIT_MISMATCH.
    """
    if table.slots is not slots:
        raise ArgumentError(
            f"{name}: req_to_token {table!r} is indexed by slots of another pool, {table.slots.name!r}",
            value=table,
            remedy=f"make it with `table(...)` of {slots!r}",
        )
    shape, dtype = tuple(table.device.shape), numpy_dtype(table.device.dtype)
    if dtype.kind not in "iu":
        raise DtypeError(
            f"{name}: req_to_token of {dtype}", value=dtype, remedy="tokens are integers: use int32 or int64"
        )
    invariants.table_capacity(table.capacity, slots.capacity, **where)
    if table.holds not in (None, "location"):
        invariants.unit_mismatch("location", table.holds, **where)
    if len(shape) != 2 or shape[1] < max_tokens:
        raise ShapeError(
            f"{name}: rows of {list(shape[1:])} for {max_tokens} tokens",
            value=shape,
            remedy="make the table with `slots.table(name, (max_tokens_per_request,), holds='location')`",
        )
    converted(np.array([location_capacity - 1]), dtype, f"{name}: req_to_token")


__all__ = ["Extension", "PageLease", "PagePool", "PageStats"]


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
        req_to_token: default table of `Extension.entry`, [slot, position] -> token.

    Raises:
        ArgumentError, DtypeError: sizes that are no positive integers, or of which a product goes beyond int64; no
            runtime or no slot pool; `req_to_token` is indexed by another pool's slots, or holds no integers.
        ShapeError: `req_to_token` has no room for a request.
        DtypeError, ValueOverflowError: it has no room for the last token.
        Violation: UNIT_MISMATCH: it holds something else.
        DeviceError: `slots` belongs to another runtime.
    """

    def __init__(
        self,
        runtime: Runtime,
        slots: SlotPool,
        num_pages: SupportsIndex,
        page_size: SupportsIndex,
        *,
        max_tokens_per_request: SupportsIndex,
        name: str = "pages",
        req_to_token: Table | None = None,
    ) -> None:
        check_runtime(runtime, name)
        if not isinstance(slots, SlotPool):
            raise ArgumentError(
                f"{name}: {type(slots).__name__} is no pool of slots",
                value=slots,
                remedy="pass the SlotPool or HybridSlotPool whose slots own the pages",
            )
        self.runtime = runtime
        self.name = name
        self.slots = slots
        self.num_pages = size_of(num_pages, f"{name}: num_pages", least=1)
        self.page_size = size_of(page_size, f"{name}: page_size", least=1, most=MOST_TOKENS // (self.num_pages + 1))
        self.max_tokens_per_request = size_of(
            max_tokens_per_request, f"{name}: max_tokens_per_request", least=1, most=MOST_TOKENS
        )
        self._req_to_token = req_to_token
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
        if req_to_token is not None:
            check_req_to_token(
                req_to_token,
                self.slots,
                max_tokens=self.max_tokens_per_request,
                location_capacity=self.location_capacity,
                name=name,
                where=self._where("req_to_token"),
            )
        self._take, self._release_lease = f"{name}: take", f"{name}: release a lease"
        self._release_checks: list[Callable[[Ints, str], None]] = []
        self.slots.add_listener(self._guard)

    def __repr__(self) -> str:
        ledger = self._books.references.ledger
        return (
            f"PagePool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={ledger.free}, pending={ledger.pending}, live={ledger.live})"
        )

    @property
    def req_to_token(self) -> Table | None:
        """The default table of `Extension.entry`."""
        return self._req_to_token

    @property
    def location_capacity(self) -> int:
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
        tokens = Locations(
            self.runtime,
            added.tokens,
            None,
            dtype=torch.int64,
            shape=added.tokens.shape,
            contract=Contract.HOST_ONLY,
            name=self.name,
        )
        return Extension(
            added.slots, added.positions, tokens, added.counts, owners, self.slots, req_to_token=self._req_to_token
        )

    # Checks

    def _check_after(self) -> None:
        if levels.full:
            self._guard.verify()

    def verify(self) -> None:
        """Every law of the pool from scratch, on the host. Costs O(pages + slots x width).

        Raises:
            Violation: PAGE_OWNER, LENGTH_ORDER, and see `Allocator.verify`.
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
