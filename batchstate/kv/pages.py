"""`PagePool`: which KV pages a request has, how many of its tokens are committed, and who else uses a page.

A request grows (pages are allocated), commits (tokens are written), truncates (speculation was rejected) and is
released, pages and slot together. Whole pages of a prefix may be shared: each holder has a reference, and a page with
two references is not written. Pages may also be taken before there is a request; a lease holds them then. Bookkeeping
is numpy on the host, O(what changes), on the owning thread; nothing here touches the device.
"""

from collections.abc import Callable, Sequence
from typing import Literal, SupportsIndex, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import MOST_TOKENS, size_of
from batchstate._arrays import Amount, amounts, arange_per_row, as_array, count, read_only, shape_of
from batchstate._origin import Changes, Origin
from batchstate.errors import ArgumentError, ShapeError, another_runtime
from batchstate.invariants import times_checked
from batchstate.kv._lengths import (
    BEHIND_THE_FRONT,
    BEYOND,
    FURTHER,
    SHORT_PREFIX,
    TRUNCATED,
    UNCOMMITTED,
    Explain,
    explain_total,
)
from batchstate.kv._page_state import ONE, KVWrites, PageOwners, PageReferences, PageSpace, PageTable
from batchstate.kv._page_tables import check_buffers, check_map, check_map_to, check_page_zero, check_req_to_token
from batchstate.kv._sharing import PageLease, PageSharing, Source
from batchstate.mirror import Locations, MirroredTensor, Pages, Slots, lined_up
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Fence, OfThisProcess, Runtime, check_fence
from batchstate.tables import Table, TableWrite
from batchstate.violations import Code, Where

__all__ = ["Extension", "PageLease", "PagePool", "PageStats", "PendingPages"]

Ints = npt.NDArray[np.int64]

LENGTH_ORDER, DERIVED_STALE = Code.LENGTH_ORDER, Code.DERIVED_STALE
ZERO = np.array(0)  # numpy takes as long to convert one number as to compare 100 of them


@final
@attrs.frozen
class PageStats:
    """A page pool in numbers: free + pending + live = num_pages.

    Attributes:
        num_pages: pages that can be allocated; page 0 is not among them.
        free: pages without a holder.
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


@final
@attrs.frozen(eq=False)
class PendingPages:
    """Pages that wait for one fence.

    Attributes:
        pages: their numbers, int64[n].
        fence: as it was passed where their holder was released; of pages that others read too, all their fences as one.
        step: of the runtime, when the first of them were released.
    """

    pages: Ints
    fence: Fence
    step: int


@final
@attrs.frozen(eq=False)
class Extension:
    """t tokens that an operation added to n requests, those of one request together, in order.

    The arrays are read-only: they were checked as they are. Once one of the requests has given back tokens or pages,
    the locations may be those of another: `locations` and `entry` then refuse (DERIVED_STALE, at `cheap`).

    Attributes:
        slots: int64[t], the slot of each token.
        positions: int64[t], its position in the request.
        counts: int64[n], tokens per request.
        owners: the handles of the n requests, which `entry` checks again: a slot may have another owner by then.
    """

    slots: Ints
    positions: Ints
    _numbers: Ints
    counts: Ints
    owners: Slots
    _pool: "PagePool"
    _origin: Origin
    _made: list[Locations] = attrs.field(factory=list, init=False)  # of the locations, once they were asked for

    def __len__(self) -> int:
        return self._numbers.size

    @property
    def locations(self) -> Locations:
        """The place of each token in KV memory, `host_only` int64[t]."""
        if levels.cheap:
            self._check("locations")
        if not self._made:
            self._made.append(self._pool._locations(self._numbers))
        return self._made[0]

    def _check(self, operation: str) -> None:
        self._origin.check(object=self, operation=operation, step=self.owners.runtime.step)

    def __repr__(self) -> str:
        return f"Extension({len(self)} tokens of {self.counts.size} requests)"

    def entry(self, table: Table | None = None) -> TableWrite:
        """The write that records the locations in a table [slot, position] -> location, packed with a batch's upload.

        Where a page begins it goes on to the end of the page: up to there a row names no place of another request.

        Args:
            table: by default the pool's `req_to_token`.

        Raises:
            ArgumentError: no table passed, and the pool has none; or a table of other slots.
            Violation: SLOT_STALE_HANDLE: a request has left since. DERIVED_STALE, at `cheap`: tokens were taken back
                since. Else see `Table.entry`.
            RowIndexError: see `Table.entry`.
        """
        target = self._pool._token_table(table)
        self._pool.slots.check_handles(self.owners, "entry")
        if levels.cheap:
            self._check("entry")
        width, counts = target.shape[-1], self.counts
        if target is not self._pool.req_to_token:
            width = max(width, int(self.positions.max(initial=0)) + 1)  # longer requests are refused
        one_each = counts.size == len(self) == np.count_nonzero(counts)
        at, counted = self.slots * width + self.positions, None if one_each else counts
        index, locations = self._pool.whole_pages(at, self.positions, self._numbers, width, counted)
        return self._pool._token_write(target, width, index, locations, self._writers(), self._origin)

    def _writers(self) -> Slots:
        """The requests that have got tokens."""
        owners, got = self.owners, self.counts > 0
        if np.count_nonzero(got) == got.size:
            return owners
        return Slots.of_pool(
            owners.runtime, owners.np[got], owners.generations[got], pool_id=owners.pool_id, name=owners.name
        )


@ranges("extend", "advance", "commit", "release_requests")
@final
class PagePool(OfThisProcess):
    """Pages 1 to num_pages for the requests of one slot pool. Location t lies on page t // page_size.

    Args:
        runtime: the device.
        slots: the pool whose slots own the pages. From now on a slot that still has pages cannot be freed.
        num_pages: pages that can be allocated.
        page_size: tokens per page.
        max_tokens_per_request: most tokens that one request can have.
        name: for reports.
        req_to_token: default table of `Extension.entry`, [slot, position] -> location.

    Attributes:
        epochs: when each slot last gave back tokens or pages. Values derived from them before, such as a plan or an
            extension, name places that may be another request's by now, and are refused. Growing raises nothing.
        shares: when pages of each slot last got further holders: they are no longer its own to write.

    Raises:
        ArgumentError, DtypeError: sizes that are not positive integers, or whose product goes beyond int64;
            `req_to_token` is indexed by another pool's slots, or does not hold integers.
        ShapeError: a row of `req_to_token` is too short for a request.
        DtypeError, ValueOverflowError: its dtype is too small for the last location.
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
        self.runtime = runtime
        self.name = name
        self.slots = slots
        self.num_pages = size_of(num_pages, f"{name}: num_pages", least=1)
        self.page_size = size_of(page_size, f"{name}: page_size", least=1, most=MOST_TOKENS // (self.num_pages + 1))
        most = size_of(max_tokens_per_request, f"{name}: max_tokens_per_request", least=1, most=MOST_TOKENS)
        self.max_tokens_per_request = most
        shape_of((-(-most // self.page_size),), f"{name}: pages per request", rows=slots.capacity)
        if slots.runtime is not runtime:
            raise another_runtime(name, slots)
        self._table = PageTable(slots.capacity, self.page_size, self.max_tokens_per_request)
        self.transaction = slots.transaction
        self._references = PageReferences(
            runtime, self.num_pages, label=f"PagePool {name!r}", name=name, transaction=self.transaction
        )
        self._space_of_locations = PageSpace(self._references, Locations, self.page_size)
        self._space_of_pages = PageSpace(self._references, Pages, 1)
        self._tables: list[Table] = []
        self._maps: list[tuple[Table, PagePool]] = []
        self._kv: tuple[torch.Tensor, ...] = ()
        runtime.declare_indices("page", self.num_pages + 1)
        runtime.declare_indices("location", self.location_capacity)
        self.writes = KVWrites(runtime, slots.capacity)  # for the library
        self.epochs = Changes(slots.capacity, "pages")
        self.shares = Changes(slots.capacity, "holders of the pages")
        if req_to_token is not None:
            check_req_to_token(self, req_to_token)
        self._req_to_token = req_to_token
        self._most = np.array(most, dtype=np.uint64)
        self._ones = np.ones(256, dtype=np.int64)
        self._release_checks: list[Callable[[Ints, str], None]] = []
        self._sharing = PageSharing(self)
        self._listener = PageOwners(self)
        slots.add_listener(self._listener)

    def __repr__(self) -> str:
        pages = self._references.allocator
        return (
            f"PagePool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={pages.free}, pending={pages.pending}, live={pages.live})"
        )

    @property
    def req_to_token(self) -> Table | None:
        """The default table of `Extension.entry`."""
        return self._req_to_token

    @property
    def location_capacity(self) -> int:
        """Rows of KV memory that locations index: those of all pages, page 0 included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def stats(self) -> PageStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        pages = self._references.allocator
        return PageStats(
            num_pages=self.num_pages,
            free=pages.free,
            pending=pages.pending,
            live=pages.live,
            shared=self._references.shared,
            leases=len(self._sharing.leases),
        )

    @property
    def page_table(self) -> npt.NDArray[np.int32]:
        """The pages of each slot in order, int32[slots.capacity, max_pages], 0 beyond the last; a read-only view."""
        return read_only(self._table.pages)

    @property
    def committed_lengths(self) -> Ints:
        """Committed tokens of every slot, int64[slots.capacity]; a read-only view."""
        return read_only(self._table.committed)

    def committed(self, slots: Slots) -> Ints:
        """Committed tokens of each slot, int64[n]."""
        return self._table.committed[self.slots.rows_of(slots, "committed")]

    def allocated(self, slots: Slots) -> Ints:
        """Allocated tokens of each slot, int64[n]: where its last page ends, in tokens."""
        return self._table.num_pages[self.slots.rows_of(slots, "allocated")] * self.page_size

    def first_positions(self, slots: Slots) -> Ints:
        """The first position of each slot whose page was not given back (`truncate(first=)`), int64[n]; at first 0."""
        return self._table.first[self.slots.rows_of(slots, "first_positions")] * self.page_size

    def check_readable(self, rows: Ints, positions: Ints, operation: str, *, window: int | None = None) -> None:
        """Refuses that tokens at `positions` int64[n] of live slots read what was given back. For the library.

        Each token reads the last `window` positions, its own included, or all up to its own.

        Raises:
            Violation: PAGE_RELEASED.
        """
        table = self._table
        if table.fronted:
            reads = np.zeros_like(rows) if window is None else np.maximum(positions - (window - 1), 0)
            first = table.first[rows] * self.page_size
            invariants.page_released(reads, first, slots=rows, **self._where(operation))

    def locations(self, slots: Slots, first: SupportsIndex, stop: SupportsIndex) -> Locations:
        """Where the tokens at positions first to stop - 1 of one slot lie, `host_only` int64[stop - first].

        Raises:
            Violation: LENGTH_ORDER: they are not committed; PAGE_UNWRITTEN, at `cheap`: nothing was launched that
                writes them; PAGE_RELEASED: some were given back.
            ArgumentError: not one slot, or `stop` before `first`.
        """
        operation = "locations"
        label = f"{self.name}: {operation}"
        begin, end = count(first, label), count(stop, label)
        rows = self.slots.rows_of(slots, operation)
        if rows.size != 1 or end < begin:
            problem = f"{label}: expected positions of one slot, got {begin} to {end} of {rows.size} slots"
            raise ArgumentError(problem, (begin, end), "name one slot, and positions in ascending order")
        lengths = np.array([end], dtype=np.int64)
        self._check_lengths(lengths, self._table.committed[rows], operation, SHORT_PREFIX)
        self._check_written(lengths, self.writes.tokens[rows], operation)
        self.check_readable(rows, np.array([begin]), operation, window=1)
        positions = np.arange(begin, end, dtype=np.int64)
        return self._locations(self._table.locations_at(rows.repeat(positions.size), positions))

    def pages_of(self, owner: Slots | PageLease) -> Pages:
        """The pages of requests, one after the other, or of a lease, in the order of their tokens. O(pages).

        Raises:
            ArgumentError: a lease that this pool does not hold.
        """
        if isinstance(owner, PageLease):
            pages = self._sharing.held(owner, "pages_of").pages
        else:
            rows = self.slots.rows_of(owner, "pages_of")
            table = self._table.pages[rows]
            pages = table[table > 0].astype(np.int64)
        return cast(Pages, self._space_of_pages.handles(pages))

    # Tables

    def table(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.int32,
        *,
        by: Literal["location", "page"] = "location",
        holds: str | None = None,
        of: "PagePool | None" = None,
        host: bool = False,
    ) -> Table:
        """A new zeroed table with one row of `shape` per location or per page, those of page 0 included.

        Its rows are named by `Locations` and `Pages` of this pool. A page that is allocated anew has unwritten rows.

        Args:
            name: for reports.
            shape: of one row.
            dtype: one that numpy has too.
            by: kind of the handles that name its rows.
            holds: index space of the values, if they are indices.
            of: another page pool over the same slots, where the table maps each location to that of the same token
                there, as from all of KV memory to that of a sliding window. Locations of other pools are then refused,
                and at `full` each row that is written is compared with where that pool has the token (TABLE_LINK).
            host: keep the same values on the host too.

        Raises:
            ArgumentError: another `by`; `of` is not a page pool of these slots with as many tokens per page, or the
                table is not by location, of one location each.
        """
        self.runtime.check_owner(f"{self.name}: table")
        space = self._space(by, holds, shape_of(shape, name), of)
        table = Table.new(space, name, shape, dtype, holds="location" if of else holds, host=host)
        return self._added(table, of)

    def adopt(
        self,
        tensor: torch.Tensor,
        name: str,
        *,
        by: Literal["location", "page"] = "location",
        holds: str | None = None,
        of: "PagePool | None" = None,
        host: bool = False,
    ) -> Table:
        """A table by location or page over an engine's own tensor. Arguments and errors as for `SlotPool.adopt`.

        `of` is as for `table`.
        """
        self.runtime.check_owner(f"{self.name}: adopt")
        space = self._space(by, holds, tuple(tensor.shape)[1:], of)
        return self._added(Table.adopted(space, tensor, name, holds="location" if of else holds, host=host), of)

    def _space(self, by: str, holds: str | None, shape: tuple[int, ...], of: "PagePool | None") -> PageSpace:
        """The index space of a table, which may map to another pool."""
        spaces = {space.kind.unit: space for space in (self._space_of_locations, self._space_of_pages)}
        if by not in spaces:
            problem = f"{self.name}: a table: expected by='location' or by='page', got {by!r}"
            raise ArgumentError(problem, by, "name one of the two; `SlotPool.table` makes tables by slot")
        if of is not None:
            check_map_to(self, by, holds, shape, of)
        return spaces[by]

    def _added(self, table: Table, of: "PagePool | None") -> Table:
        self._tables.append(table)
        if of is not None:
            table.of = of._space_of_locations
            self._maps.append((table, of))
        return table

    def register_kv(self, *buffers: torch.Tensor) -> None:
        """Says which KV memory the locations index, so that `full` can check that page 0, which is padding, is finite.

        Each forward of a `ForwardPlan` with these pages is checked at its entry, on its stream; others by `check_kv`.

        Args:
            *buffers: of the device, [location_capacity, ...] or [num_pages + 1, ...].

        Raises:
            ShapeError, DeviceError: other rows; on another device.
        """
        self.runtime.check_owner(f"{self.name}: register_kv")
        check_buffers(self, buffers)
        self._kv += buffers

    def check_kv(self, operation: str = "check_kv") -> None:
        """Checks, at `full`, that page 0 of the registered KV memory is finite (PAGE_ZERO_FINITE), on this stream."""
        if levels.full and not self.runtime.checks_suspended():
            check_page_zero(self, self._kv, operation)

    def reap(self) -> int:
        """Makes free the pending pages whose fences are complete; says how many. Never waits."""
        self.transaction.enter(f"{self.name}: reap")
        return self._references.query_fences()

    def pending(self) -> list[PendingPages]:
        """The pending pages, of requests and leases, by the fence that they wait for; see `SlotPool.pending`."""
        self.transaction.enter(f"{self.name}: pending")
        groups = self._references.allocator.pending_groups()
        return [PendingPages(pages, queried.fence, queried.step) for queried, pages in groups]

    def check_unshared(self, pages: Ints, operation: str) -> None:
        """Refuses (PAGE_OWNER) a write into pages int64[n] if one has another holder too."""
        self._references.check_exclusive(pages, operation)

    # Growing

    def take_requests(self, total_lens: "Amount") -> Slots:
        """Takes a slot for each of n requests, and pages for tokens whose KV is there: they arrive with all they have.

        The counterpart of `release_requests`, for requests that were prefilled elsewhere. The tokens count as
        committed, and the current stream has been given the work that writes them, as for `commit`. `entry` has their
        rows of a token table.

        Args:
            total_lens: tokens of each, int[n].

        Returns:
            handles int64[n].

        Raises:
            PoolExhaustedError: too few slots or pages are free. Nothing was taken.
            Violation: LENGTH_ORDER: longer than a request may be.
            ShapeError, DtypeError: `total_lens` are not n integers.
        """
        operation = "take_requests"
        if type(total_lens) is np.ndarray and total_lens.ndim == 1 and total_lens.dtype is ONE.dtype:
            totals: Ints = total_lens.copy()
        else:
            label = f"{self.name}: {operation}"
            lengths = as_array(total_lens, label)
            if lengths.ndim != 1:
                raise ShapeError(f"{label} of {total_lens!r}", total_lens, "pass one length per request")
            totals = amounts(lengths, lengths.size, label)
        self.transaction.enter(operation)
        self.query_fences()
        return self.take_rows(totals, operation)

    def query_fences(self) -> None:
        """Queries fences, before slots and pages are taken: it may run code of the engine. For the library."""
        self._references.query_fences()
        self.slots.query_fences()

    def take_rows(self, totals: Ints, operation: str) -> Slots:
        """`take_requests` of lengths int64[n], after `query_fences`. For the library."""
        self._check_lengths(totals, totals, operation)
        needed = self._table.pages_needed(totals)
        total = int(np.add.reduce(needed))  # half of what the method takes

        def give(rows: Ints) -> None:
            if total:
                self._table.append(rows, needed, self._references.take(total, operation))
                self.writes.launched(rows, totals)
            self._table.committed[rows] = totals

        if total > self._references.allocator.free:
            self._references.allocator.check_available(total)
        slots = self.slots.take_with(totals.size, give)
        self._check_after()
        return slots

    def entry(self, slots: Slots, table: Table | None = None) -> TableWrite:
        """The write that records where all tokens of some requests lie in a table [slot, position] -> location.

        Each page that they have goes in to its end. `Extension.entry` does so for the tokens of one operation.

        Args:
            slots: live handles, each once.
            table: by default the pool's `req_to_token`.

        Raises:
            As `Extension.entry`.
        """
        operation = "entry"
        target = self._token_table(table)
        rows = self.slots.rows_of(slots, operation, unique=True)
        width = max(target.shape[-1], int(self._table.committed[rows].max(initial=0)))  # longer requests are refused
        origin = Origin("token rows", self.runtime.step, slots, self.epochs, self.epochs.last)
        index, locations = self.token_rows(rows, width)
        return self._token_write(target, width, index, locations, slots, origin)

    def have_tokens(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether each of the live slots `rows` int64[n] has committed tokens, bool[n]. For the library."""
        return self._table.committed[rows] > ZERO

    def token_rows(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """For all tokens of slots, to the end of each page: elements of a token table, and locations. For the library.

        `rows` int64[n] are live; the table has rows of `width`.
        """
        return self._table.token_rows(rows, width)

    def _token_write(
        self, target: Table, width: int, index: Ints, locations: Ints, owners: Slots, origin: Origin
    ) -> TableWrite:
        """The write of `locations` into elements `index` of a flat token table with rows of `width`."""
        if self._is_token_table(target) and width == target.shape[-1] and not levels.full:
            return target.planned(index, locations, owners, origin)  # the pool made and checked all
        rows, positions = np.divmod(index, width)
        return target.entry_of(rows, positions, self._locations(locations), owners, origin)

    def _is_token_table(self, table: Table) -> bool:
        """Whether each location of the pool goes into a table that is declared to hold locations."""
        if table is self.req_to_token:
            return True
        fits = table.dtype is torch.int64 or (table.dtype is torch.int32 and self.location_capacity <= 2**31)
        return fits and table.holds == "location"

    def _token_table(self, table: Table | None) -> Table:
        """The table, or by default the pool's, that records locations of its slots."""
        target = self.req_to_token if table is None else table
        if target is None:
            raise ArgumentError("entry without a table", None, "pass a table, or give the PagePool a req_to_token")
        if target.space is not self.slots:
            problem = f"entry of slots of {self.slots.name!r} in {target!r} of {target.space.name!r}"
            raise ArgumentError(problem, target, "pass a table that was made by the pool of these slots")
        return target

    def grow(self, slots: Slots, total_lens: "Amount") -> None:
        """Allocates pages until each slot has room for `total_lens` tokens. Commits nothing, releases nothing.

        Args:
            slots: live handles, each once.
            total_lens: tokens in all, one number or int[n].

        Raises:
            PoolExhaustedError: too few pages are free. Nothing was allocated.
            Violation: LENGTH_ORDER: longer than a request may be; SLOT_SHARED.
        """
        rows, totals = self._begin_with(slots, total_lens, "grow")
        self._check_lengths(totals, totals, "grow")
        self._allocate(rows, totals, "grow")
        self._done()

    def commit(self, owner: Slots | PageLease, total_lens: "Amount") -> None:
        """Declares that work which the current stream has been given writes the first `total_lens` tokens.

        At least as many as are committed, and at most as many as are allocated. From here on they can be shared, held
        and sent: who reads them on this stream comes behind, and another stream waits (`wait_written`). Forwards whose
        inputs come from `resolve_forward_inputs`, of a plan with `pages=`, are noted by it.

        Args:
            owner: live handles, each once; or a lease of pages that KV arrives on.
            total_lens: tokens in all, one number or int[n].

        Raises:
            Violation: LENGTH_ORDER; PAGE_OWNER: new tokens lie on a page that others use too.
            ArgumentError: a lease that this pool does not hold.
        """
        if isinstance(owner, PageLease):
            self._sharing.commit(owner, total_lens)
            return
        rows, totals = self._begin_with(owner, total_lens, "commit")
        table = self._table
        start = table.committed[rows]
        self._check_lengths(start, totals, "commit")
        allocated, most = table.num_pages[rows] * self.page_size, table.width * self.page_size
        invariants.length_order(totals, allocated, most, explain=UNCOMMITTED, **self._where("commit"))
        self._check_writable(rows, start, totals - start, "commit")
        self.transaction.operation = "commit"
        self.writes.launched(rows, totals)
        table.committed[rows] = totals
        self._done()

    def wait_written(self, slots: Slots) -> None:
        """Makes the current stream wait, on the device, for the writes of all committed tokens on other streams.

        For kernels that read KV on a stream of their own, such as copies to another memory. The host does not wait.

        Raises:
            Violation: PAGE_UNWRITTEN, at `cheap`: for some no work was launched that writes them.
        """
        rows = self.slots.rows_of(slots, "wait_written")
        self._check_written(self._table.committed[rows], self.writes.tokens[rows], "wait_written")
        self.writes.wait_for_slots(rows)

    def extend(self, slots: Slots, total_lens: "Amount") -> Extension:
        """Grows and commits each slot to `total_lens` tokens.

        Returns:
            the tokens from the old committed length to the new one.

        Raises:
            As `grow` and `commit`. Nothing was changed.
        """
        rows, totals = self._begin_with(slots, total_lens, "extend")
        return self._extend(slots, rows, self._table.committed[rows], totals, "extend", explain_total)

    def advance(self, slots: Slots, num_new_tokens: "Amount" = 1) -> Extension:
        """Grows and commits each slot by `num_new_tokens`, as a decode step does, O(requests).

        Args:
            slots: live handles, each once.
            num_new_tokens: one number or int[n], 0 or more.

        Returns:
            the new tokens.

        Raises:
            As `grow` and `commit`. Nothing was changed.
        """
        if type(num_new_tokens) is int and num_new_tokens == 1:
            rows = self._begin(slots, "advance")
            start = self._table.committed[rows]
            totals = start + ONE
            self.check_totals(totals, "advance")
            return self._extend_by_one(slots, rows, start, totals, "advance")
        rows, counts = self._begin_with(slots, num_new_tokens, "advance")
        if 1 in (counts < ZERO).tobytes():
            problem = f"{self.name}: advance by {counts.min()}"
            raise ArgumentError(problem, int(counts.min()), "advance by 0 or more; `truncate` takes tokens back")
        start = self._table.committed[rows]
        # A sum that wraps is less than `start`, so that the check of the lengths finds it.
        return self._extend(slots, rows, start, start + counts, "advance", FURTHER)

    def _extend_by_one(self, slots: Slots, rows: Ints, start: Ints, totals: Ints, operation: str) -> Extension:
        """The hot path of decoding: nothing is ragged. The lengths are checked."""
        locations = self.next_locations(rows, start, operation)
        self.commit_rows(rows, totals)
        self.transaction.operation = None
        if rows.size > self._ones.size:
            self._ones = np.ones(2 * rows.size, dtype=np.int64)
        return self._extension(slots, rows, start, locations, self._ones[: rows.size])

    def check_totals(self, totals: Ints, operation: str, longest: int | None = None) -> None:
        """Refuses (LENGTH_ORDER) lengths int64[n] that are too long; `longest` of them, if known. For the library."""
        if longest is not None and longest <= self.max_tokens_per_request:
            times_checked[LENGTH_ORDER] += 1
        else:
            self._check_lengths(totals, totals, operation, FURTHER)

    def locations_of(self, rows: Ints, start: Ints, counts: Ints, positions: Ints) -> Ints:
        """Locations int64[t] of the `counts` positions of each of `rows` from `start` on, int64[n]. For the library.

        `positions` are these, int64[t], those of one slot after the other; they are allocated.
        """
        return self._table.locations_of(rows, start, counts, positions)

    def next_locations(self, rows: Ints, start: Ints, operation: str) -> Ints:
        """Where the KV of each request's next token goes, int64[n]; takes a page where one begins. For the library.

        Nothing is committed. Leaves the mark of the transaction, which the caller takes away. Raises as `grow` and
        `commit`.

        Args:
            rows: live slots int64[n], each once.
            start: their committed tokens; `check_totals` has found that one more may follow.
            operation: for reports.
        """
        table, references = self._table, self._references
        columns, index, pages = table.next_pages(rows, start)
        if references.shared or references.cached is not None:
            references.check_exclusive(pages, operation)
        new = (pages == ZERO).nonzero()[0]
        if new.size:
            pages[new] = taken = references.take(new.size, operation)
            table.append_at(index[new], rows[new], taken)
            if levels.cheap and np.count_nonzero(pages) != pages.size:
                invariants.slot_zero_allocated(pages, **self._where(operation))
        return table.locations_on(pages, columns, start)

    def whole_pages(
        self, index: Ints, positions: Ints, locations: Ints, width: int, counts: Ints | None = None
    ) -> tuple[Ints, Ints]:
        """Elements of a token table and their locations, and behind those of tokens the rest of each page that begins.

        A page that began earlier was written then, to its end. For the library.

        Args:
            index: of the tokens' elements in the flat table, int64[t].
            positions: of the tokens in their requests, int64[t].
            locations: of the tokens, int64[t].
            width: elements of a row of the table.
            counts: tokens of each request, one request after the other; None for one each.
        """
        return self._table.whole_pages(index, positions, locations, width, counts)

    def check_committed(self, rows: Ints, lens: Ints, operation: str) -> None:
        """Refuses (DERIVED_STALE), at `cheap`, lengths int64[n] of live slots other than committed. For the library."""
        if not levels.cheap:
            return
        committed = self._table.committed[rows]
        if committed.tobytes() == lens.tobytes():
            times_checked[DERIVED_STALE] += 1
            return
        where: Where = {**self._where(operation), "column": "seq_lens"}

        def explain(row: int) -> tuple[str, object, object]:
            return "the lengths are not those of the pages", committed[row], lens[row]

        invariants.derived_stale(committed != lens, explain, slots=rows, **where)

    def commit_rows(self, rows: Ints, totals: Ints) -> None:
        """Notes that `totals` tokens of each row are committed. For the library: both are checked."""
        self._table.committed[rows] = totals

    def _extend(
        self, slots: Slots, rows: Ints, start: Ints, totals: Ints, operation: str, explain: Explain
    ) -> Extension:
        """Allocates and commits each row from `start` to `totals`."""
        self._check_lengths(start, totals, operation, explain)
        counts = totals - start
        if rows.size and 1 not in (counts != ONE).tobytes():
            return self._extend_by_one(slots, rows, start, totals, operation)
        self._check_writable(rows, start, counts, operation)
        self._allocate(rows, totals, operation)
        self._table.committed[rows] = totals
        self.transaction.operation = None
        return self._ragged(slots, rows, start, counts, operation)

    def further_locations(self, rows: Ints, start: Ints, totals: Ints, operation: str) -> tuple[Ints, Ints]:
        """Positions and locations of the tokens of each request from `start` to `totals`, int64[t]. For the library.

        As `next_locations`, of any number of tokens: takes the pages, commits nothing, and leaves the mark.
        """
        self._check_lengths(start, totals, operation)
        counts = totals - start
        self._check_writable(rows, start, counts, operation)
        self._allocate(rows, totals, operation)
        positions = arange_per_row(start, counts)
        return positions, self._located(rows, start, counts, positions, operation)

    def _allocate(self, rows: Ints, totals: Ints, operation: str) -> None:
        missing = np.maximum(self._table.pages_needed(totals) - self._table.num_pages[rows], ZERO)
        total = int(np.add.reduce(missing))
        if total:
            self._table.append(rows, missing, self._references.take(total, operation))

    def _ragged(self, slots: Slots, rows: Ints, start: Ints, counts: Ints, operation: str) -> Extension:
        """The extension of `counts` committed tokens of each row from `start` on."""
        owned_by, positions = rows.repeat(counts), arange_per_row(start, counts)
        locations = self._located(rows, start, counts, positions, operation)
        return self._extension(slots, owned_by, positions, locations, counts)

    def _located(self, rows: Ints, start: Ints, counts: Ints, positions: Ints, operation: str) -> Ints:
        locations = self.locations_of(rows, start, counts, positions)
        if levels.cheap and locations.size and int(locations.min()) < self.page_size:
            # A position counted as allocated that is not.
            invariants.slot_zero_allocated(locations // self.page_size, **self._where(operation))
        return locations

    def _extension(self, owners: Slots, slots: Ints, positions: Ints, locations: Ints, counts: Ints) -> Extension:
        self._check_after()
        for array in (slots, positions, counts):  # made for it
            array.setflags(write=False)
        origin = Origin("extension", self.runtime.step, owners, self.epochs, self.epochs.last)
        return Extension(slots, positions, locations, counts, owners, self, origin)

    def _locations(self, numbers: Ints) -> Locations:
        return cast(Locations, self._space_of_locations.handles(numbers))

    # Sharing

    def take(self, n: SupportsIndex) -> PageLease:
        """Takes `n` pages for no slot yet: for KV that arrives before its request has a slot, or for a cache.

        The lease holds them alone, all `n * page_size` tokens of them. Once `commit` has said how many are written,
        `share` lets slots begin with them, and the slots that still hold them when the lease is released own them.
        Costs O(n), whatever the size of the pool.

        Args:
            n: how many, 0 or more.

        Returns:
            a lease, to be given back with `release`.

        Raises:
            PoolExhaustedError: fewer are free. Nothing was taken.
        """
        return self._sharing.take(n)

    def share(self, source: Source, target: Slots, num_tokens: SupportsIndex) -> Extension:
        """Lets `target` begin with the first `num_tokens` tokens of `source`: pages get further holders, with no copy.

        Args:
            source: one live handle, a lease, or leases of which each goes on where the one before ends.
            target: live handles without pages.
            num_tokens: whole pages; at most what the source has committed.

        Returns:
            these tokens as tokens of the targets, for their rows of a token table.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER; PAGE_UNWRITTEN, at `cheap`: no work was launched that writes them;
                PAGE_RELEASED: the source has given some back.
            ArgumentError: a target has pages already; the source is not one slot or not leases of this pool, or has a
                page twice.
        """
        return self._sharing.share(source, target, num_tokens)

    def hold(self, slots: Slots, num_tokens: SupportsIndex, *, first: SupportsIndex = 0) -> PageLease:
        """Keeps tokens of one slot when the slot is gone: one reference to each of their pages.

        Args:
            slots: one live handle.
            num_tokens: where they end, as a length; whole pages.
            first: where they begin: those before are held otherwise, or not at all.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER, PAGE_RELEASED; PAGE_UNWRITTEN, at `cheap`.
            ArgumentError: not one slot.
        """
        return self._sharing.hold(slots, num_tokens, first)

    def rebase(
        self, slots: Slots, source: Source, num_tokens: SupportsIndex, *, after: Fence | None = None
    ) -> Extension:
        """Puts a live request onto the pages of another that begins alike, and gives its own copies of them back.

        As a prefix cache does when it finds, once a prefill is done, that it has the prefix already. Plans and
        extensions of the request that were made before are refused from then on; its token row is to be written anew.

        Args:
            slots: one live handle.
            source: as for `share`, with the same tokens.
            num_tokens: whole pages; at most what is committed on both sides.
            after: the forward-done fence of the last forward that uses the pages that the request gives back.

        Returns:
            these tokens as tokens of the request, for its row of a token table.

        Raises:
            Violation: as `share`; PAGE_RELEASED also if the request has given back some of them.
            ArgumentError: not one slot, or not a source; the request would have a page at two places.
        """
        return self._sharing.rebase(slots, source, num_tokens, after)

    # Releasing

    def truncate(
        self,
        slots: Slots,
        total_lens: "Amount | None" = None,
        *,
        first: "Amount | None" = None,
        after: Fence | None = None,
    ) -> None:
        """Takes tokens back: behind, those of rejected speculation, and in front, those before a sliding window.

        Whole pages are released. In front the tokens that stay keep their positions, and count as committed still; the
        pages before cannot be read, shared or held any more, and page 0 stands for them in the page lists of a plan.

        Args:
            slots: live handles, each once.
            total_lens: tokens that stay, one number or int[n]; at most what is committed. Results of a relay go by
                handle: those of requests that left are dropped. None takes none back.
            first: the first position that is still read, one number or int[n]; pages that lie before it are released.
            after: the forward-done fence of the last forward that uses the pages.

        Raises:
            Violation: LENGTH_ORDER; DERIVED_STALE: a mirrored value that has no row for a slot.
        """
        operation = "truncate"
        check_fence(after, f"{self.name}: {operation}")
        ends = None if total_lens is None else self._numbers(slots, total_lens, operation)
        begins = None if first is None else self._numbers(slots, first, operation)
        rows = self._begin(slots, operation)
        table = self._table
        committed = table.committed[rows]
        totals = committed if ends is None else _each(ends, rows)
        self._check_release(rows, operation)
        self._check_lengths(totals, committed, operation, TRUNCATED)
        keep, front = table.pages_needed(totals), table.first[rows]
        self._check_lengths(front * self.page_size, totals, operation, BEHIND_THE_FRONT)
        loses = (totals < committed) | (keep < table.num_pages[rows])
        if begins is not None:
            starts = _each(begins, rows)
            self._check_lengths(starts, totals, operation, BEYOND)
            new_front = np.maximum(starts // self.page_size, front)
            loses |= new_front > front
            front = new_front
        self.transaction.operation = operation
        self._listener.cut(rows, totals, keep, after, operation, rows[loses], None if begins is None else front)
        self._done()

    def release(self, slots: Slots, *, after: Fence | None = None) -> None:
        """Releases every page of the slots, which stay live. See `release_requests` for requests that leave."""
        check_fence(after, f"{self.name}: release")
        rows = self._begin(slots, "release")
        self._check_release(rows, "release")
        self.transaction.operation = "release"
        self._listener.cut_all(rows, after, "release")
        self._done()

    def release_requests(self, slots: Slots, *, after: Fence | None = None) -> None:
        """As `SlotPool.release_requests`: requests leave with their pages, those of other pools and all else."""
        self.slots.release_requests(slots, after=after)

    def add_release_check(self, check: Callable[[Ints, str], None]) -> None:
        """For the library: `check(rows, operation)` may refuse, by raising, that pages of live slots are released."""
        self.runtime.check_owner(f"{self.name}: add_release_check")
        self._release_checks.append(check)

    def _check_release(self, rows: Ints, operation: str) -> None:
        for check in self._release_checks:
            check(rows, operation)

    # Checks

    def verify(self) -> None:
        """Checks every invariant of the pool from scratch, with its tables. Costs O(pages + slots x width).

        Reads device memory where it has tables, but not under capture.

        Raises:
            Violation: PAGE_OWNER, LENGTH_ORDER, SLOT_CONSERVATION, and any code of slots and tables.
        """
        self.transaction.enter(f"{self.name}: verify")
        self._listener.verify()
        self._verify_tables("verify")

    def _verify_tables(self, operation: str) -> None:
        for table in self._tables:
            table.check(operation)
        if not self.runtime.capturing:
            for table, of in self._maps:
                check_map(self, table, of, operation)

    def expect_idle(self) -> None:
        """No slot and no lease holds a page; pending ones are no leak. Else SLOT_CONSERVATION, naming up to 8."""
        self.transaction.enter(f"{self.name}: expect_idle")
        self._references.allocator.expect_idle("expect_idle")

    def _done(self) -> None:
        """An operation has changed all that it changes."""
        self.transaction.operation = None
        self._check_after()

    def _check_after(self) -> None:
        if levels.full:
            self._listener.verify()

    def _begin(self, slots: Slots, operation: str) -> Ints:
        """Queries fences, then checks the handles, and at `full` what kernels can damage; int64[n].

        From here on no code of the engine runs.
        """
        self.transaction.enter(f"{self.name}: {operation}")
        self._references.query_fences()
        if levels.full:
            self._verify_tables(operation)
        return self.slots.rows_of(slots, operation, unique=True)

    def _begin_with(self, slots: Slots, numbers: object, operation: str) -> tuple[Ints, Ints]:
        """Rows as `_begin`, and one number for each, int64[n]; those of a mirrored value go by handle.

        The numbers are read first, since that may run code of the engine.
        """
        per_slot = self._numbers(slots, numbers, operation)
        rows = self._begin(slots, operation)
        return rows, _each(per_slot, rows)

    def _numbers(self, slots: Slots, numbers: object, operation: str) -> Ints:
        """One number, or one per slot, int64."""
        label = f"{self.name}: {operation}"
        if isinstance(numbers, MirroredTensor):
            numbers = lined_up(numbers, slots.row_set, label)
        return amounts(numbers, len(slots), label)

    def _check_lengths(self, shorter: Ints, longer: Ints, operation: str, explain: Explain = explain_total) -> None:
        """0 <= shorter <= longer <= the most a request may have."""
        if longer.size == 1:  # as plain numbers, in a fifth of the time
            in_order = 0 <= shorter.item() <= longer.item() <= self.max_tokens_per_request
        else:
            high = longer.view(np.uint64)  # in which negative numbers are the largest
            in_order = 1 not in (high > self._most).tobytes() and (  # a fraction of what `np.count_nonzero` takes
                shorter is longer or 1 not in (shorter.view(np.uint64) > high).tobytes()
            )
        if in_order:
            times_checked[LENGTH_ORDER] += 1
            return
        most = self.max_tokens_per_request
        invariants.length_order(shorter, longer, most, explain=explain, **self._where(operation))

    def _check_written(self, tokens: Ints, written: Ints, operation: str) -> None:
        if levels.cheap:
            invariants.page_unwritten(tokens, written, **self._where(operation))

    def _check_writable(self, rows: Ints, start: Ints, counts: Ints, operation: str) -> None:
        """Tokens are added in pages with one holder. Only the first page of each row can be an old one."""
        if not self._references.shared and self._references.cached is None:
            return
        partial = np.flatnonzero((counts > 0) & (start % self.page_size > 0))
        self._references.check_exclusive(self._table.pages_at(rows[partial], start[partial]), operation)

    def _where(self, operation: str) -> Where:
        return {"object": f"PagePool {self.name!r}", "operation": operation, "step": self.runtime.step}


def _each(numbers: Ints, rows: Ints) -> Ints:
    """One number for each row, int64[n]."""
    if numbers.ndim:
        return numbers
    each = np.empty(rows.size, dtype=np.int64)
    each[:] = numbers
    return each
