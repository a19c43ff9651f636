"""`PagePool`: which KV pages a request has, how many of its tokens are committed, and who else uses a page.

A request grows (pages are allocated), commits (tokens are written), truncates (speculation was rejected) and is
released, pages and slot together. Whole pages of a prefix may be shared: each holder has a reference, and a page with
two references is not written. Pages may also be taken before there is a request; a lease holds them then. Bookkeeping
is on the host, O(what changes), on the owning thread; nothing here touches the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, SupportsIndex, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import MOST_TOKENS, size_of
from batchstate._arrays import Amount, Ints, amounts, as_array, check_rows, count, read_only, shape_of
from batchstate._core import PageRows, Requests, tally
from batchstate._origin import Origin
from batchstate.errors import ArgumentError, ShapeError, another_runtime, expected, unexplained
from batchstate.invariants import times_checked
from batchstate.kv import _lengths as lengths_of
from batchstate.kv._page_state import KV, PageHolders, PageSpace
from batchstate.kv._page_tables import check_map, check_map_to, check_page_zero, check_req_to_token
from batchstate.kv._sharing import PageLease, PageSharing, Source
from batchstate.mirror import Locations, MirroredTensor, NewLocations, Pages, Slots, lined_up
from batchstate.nvtx import ranges
from batchstate.pools import SlotPool
from batchstate.runtime.base import Fence, OfThisProcess, Runtime, check_fence
from batchstate.tables import RowZero, Table, TableWrite
from batchstate.violations import Code

__all__ = ["Extension", "PageLease", "PagePool", "PageStats", "PendingPages"]

LENGTH_ORDER = Code.LENGTH_ORDER
_EXTENDED = LENGTH_ORDER, Code.SLOT_CONSERVATION
NO_PAGES: Ints = np.empty(0, dtype=np.int64)


@final
@attrs.frozen
class PageStats:
    """A page pool in numbers: free + pending + live = num_pages, without page 0.

    Attributes:
        pending: released behind a fence that is not complete; waiting helps.
        live: held by slots or leases.
        shared: live pages with more than one holder.
        leases: those that are not released.
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
    """Pages int64[n] that wait for one fence.

    Attributes:
        fence: as it was passed where their holder was released; of pages that others read too, all their fences as one.
        step: of the runtime, when the first of them were released.
    """

    pages: Ints
    fence: Fence
    step: int


@final
@attrs.define(eq=False)
class Extension:
    """t tokens that an operation added to n requests, those of one request together, in order.

    The arrays are read-only: they were checked as they are. Once one of the requests has given back tokens or pages,
    the locations may be those of another: `locations` and `entry` then refuse (DERIVED_STALE, at `cheap`).

    Attributes:
        owners: the handles of the n requests, which `entry` checks again: a slot may have another owner by then.
    """

    _laid: Ints  # int64[n + t + t]: counts, positions, and places in KV memory, as the core has laid them
    owners: Slots
    _pool: "PagePool"
    _origin: Origin

    def __len__(self) -> int:
        return (self._laid.size - len(self.owners)) // 2

    def __repr__(self) -> str:
        return f"Extension({len(self)} tokens of {len(self.owners)} requests)"

    @property
    def counts(self) -> Ints:
        """Tokens per request, int64[n]."""
        return read_only(self._laid[: len(self.owners)])

    @property
    def positions(self) -> Ints:
        """The position of each token in its request, int64[t]."""
        n = len(self.owners)
        return read_only(self._laid[n : n + len(self)])

    @property
    def slots(self) -> Ints:
        """The slot of each token, int64[t]."""
        return read_only(self.owners.np.repeat(self.counts))

    @property
    def locations(self) -> Locations:
        """The place of each token in KV memory, `host_only` int64[t]."""
        self._origin.check(object=self, operation="locations", step=self.owners.runtime.step)
        return self._pool._locations(self._numbers, NewLocations)

    @property
    def _numbers(self) -> Ints:
        return self._laid[len(self.owners) + len(self) :]

    def entry(self, table: Table | None = None) -> TableWrite:
        """The write that records the locations in a table [slot, position] -> location, packed with a batch's upload.

        Where a page begins it goes on to the end of the page: up to there a row names no place of another request. By
        default the table is the pool's `req_to_token`.

        Raises:
            ArgumentError: no table passed, and the pool has none; or a table of other slots.
            Violation: SLOT_STALE_HANDLE: a request has left since. DERIVED_STALE, at `cheap`: tokens were taken back
                since. Else see `Table.entry`.
        """
        pool, owners, counts, positions = self._pool, self.owners, self.counts, self.positions
        got = counts > 0
        target, rows = pool._token_table(table), pool.slots.rows_of(owners, "entry")
        self._origin.check(object=self, operation="entry", step=owners.runtime.step)
        width = max(target.shape[-1], int(positions.max(initial=0)) + 1)  # longer requests are refused
        elements = pool._rows.elements(rows, counts, positions, self._numbers, width)
        if np.count_nonzero(got) < got.size:
            held = rows[got], owners.generations[got]
            owners = Slots.of_pool(owners.runtime, *held, pool_id=owners.pool_id, name=owners.name)
        return pool._token_write(target, width, elements, owners, self._origin)


@ranges("extend", "advance", "commit", "release_requests")
@final
class PagePool(OfThisProcess):
    """Pages 1 to num_pages for the requests of one slot pool. Location t lies on page t // page_size.

    From now on a slot of `slots` that still has pages cannot be freed alone (SLOT_CONSERVATION). A request has at most
    `max_tokens_per_request` tokens. `req_to_token` is the default table of `entry`, [slot, position] -> location.

    Attributes:
        epochs: when each slot last gave back tokens or pages. Values derived from them before, such as a plan or an
            extension, name places that may be another request's by now, and are refused. Growing raises nothing.
        shares: when pages of each slot last got further holders: they are no longer its own to write.

    Raises:
        ArgumentError, DtypeError: sizes that are not positive integers, or whose product goes beyond int64;
            `req_to_token` is indexed by another pool's slots, or does not hold integers.
        ShapeError, DtypeError, ValueOverflowError: its rows are too short for a request, or its dtype is too small.
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
        if runtime.agreement is not None:
            runtime.agreement.note_memory("tokens per request", most)
        self._rows = PageRows(slots.capacity, self.num_pages, self.page_size, most)
        self.transaction = slots.transaction
        self._holders = PageHolders(slots, self._rows, name)
        self._where, self.epochs, self.shares = self._holders.where, self._holders.epochs, self._holders.shares
        self._spaces = {
            "location": PageSpace(self._holders, Locations, self.page_size),
            "page": PageSpace(self._holders, Pages, 1),
        }
        self._tables = self._holders.tables
        self._maps: list[tuple[Table, PagePool]] = []
        self._kv = self._holders.kv
        runtime.declare_indices("page", self.num_pages + 1)
        runtime.declare_indices("location", self.location_capacity)
        self.writes = self._holders.writes  # for the library
        if req_to_token is not None:
            check_req_to_token(self, req_to_token)
        self.req_to_token = req_to_token
        self._release_checks: list[Callable[[Ints, str], None]] = []
        self._sharing = PageSharing(self)
        slots.add_listener(self._holders)

    def __repr__(self) -> str:
        return (
            f"PagePool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={self._rows.free}, pending={self._rows.pending}, live={self._rows.live})"
        )

    @property
    def location_capacity(self) -> int:
        """Rows of KV memory that locations index: those of all pages, page 0 included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def stats(self) -> PageStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        rows = self._rows
        counts = rows.free, rows.pending, rows.live, rows.shared
        return PageStats(self.num_pages, *counts, leases=len(self._holders.leases))

    @property
    def page_table(self) -> npt.NDArray[np.int32]:
        """The pages of each slot in order, int32[slots.capacity, max_pages], 0 beyond the last; a read-only view."""
        return read_only(self._holders.table)

    @property
    def committed_lengths(self) -> Ints:
        """Committed tokens of every slot, int64[slots.capacity]; a read-only view."""
        return read_only(self._rows.arrays["committed"])

    def committed(self, slots: Slots) -> Ints:
        """Committed tokens of each slot, int64[n]."""
        return self._committed(self.slots.rows_of(slots, "committed"))

    def allocated(self, slots: Slots) -> Ints:
        """Allocated tokens of each slot, int64[n]: where its last page ends, in tokens."""
        return self._tokens_of("count", self.slots.rows_of(slots, "allocated"))

    def first_positions(self, slots: Slots) -> Ints:
        """The first position of each slot whose page was not given back (`truncate(first=)`), int64[n]; at first 0."""
        return self._tokens_of("first", self.slots.rows_of(slots, "first_positions"))

    def _committed(self, rows: Ints) -> Ints:
        committed: Ints = self._rows.arrays["committed"][rows]
        return committed

    def _tokens_of(self, pages: str, rows: Ints) -> Ints:
        """Pages of slots that the core counts, in tokens, int64[n]."""
        counts: Ints = self._rows.arrays[pages][rows].astype(np.int64)
        return counts * self.page_size

    def locations(self, slots: Slots, first: SupportsIndex, stop: SupportsIndex) -> Locations:
        """Where the tokens at positions first to stop - 1 of one slot lie, `host_only` int64[stop - first].

        Raises:
            Violation: LENGTH_ORDER: they are not committed; PAGE_UNWRITTEN, at `cheap`: nothing was launched that
                writes them; PAGE_RELEASED: some were given back.
            ArgumentError: not one slot, or `stop` before `first`.
        """
        operation = "locations"
        rows, start, lengths = self._range(slots, first, stop, operation)
        self._check_lengths(lengths, self._committed(rows), operation, lengths_of.SHORT_PREFIX)
        self.check_accepted(rows, lengths, operation)
        self._check_written(lengths, self.writes.written(rows), operation)
        self.check_readable(rows, start, operation, window=1)
        return self._locations(self.lay(rows, start, lengths - start, operation)[1])

    def writing(self, slots: Slots, first: SupportsIndex, stop: SupportsIndex) -> Locations:
        """Where work of the engine is to write the tokens at positions first to stop - 1 of one slot.

        For KV that no forward of a plan writes, such as what is loaded from another memory: `grow` first, give the work
        to the stream, then `commit`. An `Extension` has the places of its tokens. `host_only` int64[stop - first].

        Raises:
            Violation: LENGTH_ORDER: some are accepted already, or have no page; PAGE_OWNER: others use a page too.
            ArgumentError: as for `locations`.
        """
        operation = "writing"
        rows, start, ends = self._range(slots, first, stop, operation)
        accepted, most = self._rows.arrays["accepted"][rows], self._rows.width * self.page_size
        invariants.length_order(accepted, start, most, explain=lengths_of.ACCEPTED, **self._where(operation))
        self._check_allocated(rows, ends, operation)
        columns = np.arange(int(start[0]) // self.page_size, -(-int(ends[0]) // self.page_size))
        self.check_unshared(self.page_table[rows[0], columns].astype(np.int64), operation)
        return self._locations(self.lay(rows, start, ends - start, operation)[1], NewLocations)

    def _range(
        self, slots: Slots, first: SupportsIndex, stop: SupportsIndex, operation: str
    ) -> tuple[Ints, Ints, Ints]:
        """The row of one live slot, and where a range of its positions begins and ends, int64[1] each."""
        label = f"{self.name}: {operation}"
        begin, end = count(first, label), count(stop, label)
        rows = self.slots.rows_of(slots, operation)
        if rows.size != 1 or end < begin:
            problem = f"{label}: expected positions of one slot, got {begin} to {end} of {rows.size} slots"
            raise ArgumentError(problem, (begin, end), "name one slot, and positions in ascending order")
        return rows, np.array([begin]), np.array([end])

    def pages_of(self, owner: Slots | PageLease) -> Pages:
        """The pages of requests, one after the other, or of a lease, in the order of their tokens. O(pages).

        Raises:
            ArgumentError: a lease that this pool does not hold.
        """
        if isinstance(owner, PageLease):
            pages = self._sharing.held(owner, "pages_of").pages
        else:
            table = self.page_table[self.slots.rows_of(owner, "pages_of")]
            pages = table[table > 0].astype(np.int64)
        return cast(Pages, self._spaces["page"].handles(pages))

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
        row_zero: RowZero = "zero",
    ) -> Table:
        """A new zeroed table with one row of `shape` per location or per page, those of page 0 included.

        Its rows are named by `Locations` or `Pages` of this pool. A page that is allocated anew has unwritten rows.
        `holds` is the index space of the values, if they are indices; with `host` they are kept on the host too.
        `dtype` and `row_zero` are as for `SlotPool.table`.

        `of` is another page pool over the same slots, where the table maps each location to that of the same token
        there, as from all of KV memory to that of a sliding window. Locations of other pools are then refused, and at
        `full` each row that is written is compared with where that pool has the token (TABLE_LINK).

        Raises:
            ArgumentError: another `by`; `of` is not a page pool of these slots with as many tokens per page, or the
                table is not by location, of one location each.
        """
        space, unit = self._space("table", by, holds, shape_of(shape, name), of)
        return self._added(Table.new(space, name, shape, dtype, holds=unit, host=host, row_zero=row_zero), of)

    def adopt(
        self,
        tensor: torch.Tensor,
        name: str,
        *,
        by: Literal["location", "page"] = "location",
        holds: str | None = None,
        of: "PagePool | None" = None,
        host: bool = False,
        row_zero: RowZero = "zero",
    ) -> Table:
        """A table over an engine's own tensor; the rest as for `SlotPool.adopt` and `table`."""
        space, unit = self._space("adopt", by, holds, tuple(tensor.shape)[1:], of)
        return self._added(Table.adopted(space, tensor, name, holds=unit, host=host, row_zero=row_zero), of)

    def _space(
        self, operation: str, by: str, holds: str | None, shape: tuple[int, ...], of: "PagePool | None"
    ) -> tuple[PageSpace, str | None]:
        """The index space of a table, which may map to another pool, and that of its values."""
        self.runtime.check_owner(f"{self.name}: {operation}")
        if by not in self._spaces:
            remedy = "name one of the two; `SlotPool.table` makes tables by slot"
            raise expected(f"{self.name}: a table", "by='location' or by='page'", by, remedy)
        if of is not None:
            check_map_to(self, by, holds, shape, of)
        return self._spaces[by], "location" if of else holds

    def _added(self, table: Table, of: "PagePool | None") -> Table:
        self._tables.append(table)
        if of is not None:
            table.of = of._spaces["location"]
            self._maps.append((table, of))
        return table

    def register_kv(self, *buffers: torch.Tensor, memory: str = KV) -> None:
        """Says which KV memory the locations index, so that `full` can check that page 0, which is padding, is finite.

        Each forward of a `ForwardPlan` with these pages is checked at its entry, on its stream; others by `check_kv`.

        `memory` names one that forwards of a plan do not write, as that of a draft model over the same pages: its
        tokens count as written when `mark_written` says so, and none are given to others before. Name it while the pool
        holds nothing.

        Raises:
            ShapeError, DeviceError: buffers are [location_capacity, ...] or [num_pages + 1, ...], on the device.
            ArgumentError: another memory, while requests, leases or a prefix cache have pages.
        """
        self.runtime.check_owner(f"{self.name}: register_kv")
        label = f"{self.name}: register_kv"
        check_rows(buffers, (self.location_capacity, self.num_pages + 1), self.runtime.device, label)
        rows = self._rows
        if memory not in self.writes.marks:
            if used := self.num_pages - rows.free + rows.idle:
                problem = f"{self.name}: register_kv of memory {memory!r} while {used} pages are in use or cached"
                raise ArgumentError(problem, memory, "register each memory before the first page is taken")
            self.writes.marks[memory] = np.zeros(rows.capacity, dtype=np.int64)
        self._kv.extend(buffers)
        for buffer in buffers:
            space = "location" if len(buffer) == self.location_capacity else "page"
            self.runtime.own_rows(buffer, self._spaces[space].owners_of)

    def check_kv(self, operation: str = "check_kv") -> None:
        """Checks, at `full`, that page 0 of the registered KV memory is finite (PAGE_ZERO_FINITE), on this stream."""
        if levels.full and not self.runtime.checks_suspended():
            check_page_zero(self, self._kv, operation)

    def reap(self) -> int:
        """Makes free the pending pages whose fences are complete; says how many. Never waits."""
        self.transaction.enter(f"{self.name}: reap")
        return sum(group.left.freed(self._rows) for group in self.transaction.reap())

    def pending(self) -> list[PendingPages]:
        """The pending pages, of requests and leases, by the fence that they wait for; see `SlotPool.pending`."""
        self.transaction.enter(f"{self.name}: pending")
        return [PendingPages(pages, fence, step) for pages, fence, step in self._holders.pending_groups()]

    # Growing

    def take_requests(self, total_lens: "Amount") -> Slots:
        """Takes a slot for each of n requests, and pages for tokens whose KV is there: they arrive with all they have.

        The counterpart of `release_requests`, for requests that were prefilled elsewhere. Their `total_lens` int[n]
        tokens count as committed, and the current stream has been given the work that writes them, as for `commit`.
        `entry` has their rows of a token table. Raises as `grow`, with nothing taken.
        """
        operation = "take_requests"
        label = f"{self.name}: {operation}"
        lengths = as_array(total_lens, label)
        if lengths.ndim != 1:
            raise ShapeError(f"{label} of {total_lens!r}", total_lens, "pass one length per request")
        totals = amounts(lengths, lengths.size, label)
        self.transaction.enter(operation)
        self.slots.query_fences()
        self._look(None, None, totals, operation)
        needed = self._rows.needed

        def give(rows: Ints) -> None:
            self._holders.grow(rows, totals, needed, operation)
            self._rows.commit(rows, totals)
            if needed:
                self.writes.launched(rows, totals)

        slots = self.slots.take_with(totals.size, give)
        self._done()
        return slots

    def entry(self, slots: Slots, table: Table | None = None) -> TableWrite:
        """The write that records where all tokens of live requests, each once, lie in a token table.

        Each page that they have goes in to its end. `Extension.entry` does so for the tokens of one operation, and
        raises as this does.
        """
        target = self._token_table(table)
        rows = self.slots.rows_of(slots, "entry", unique=True)
        width = max(target.shape[-1], int(self._committed(rows).max(initial=0)))  # longer requests are refused
        origin = Origin("token rows", self.runtime.step, slots, self.epochs, self.epochs.last)
        return self._token_write(target, width, self._rows.all_elements(rows, width), slots, origin)

    def _token_write(
        self, target: Table, width: int, elements: tuple[Ints, Ints], owners: Slots, origin: Origin
    ) -> TableWrite:
        """The write of `elements`, places and locations, into a flat token table with rows of `width`."""
        index, locations = elements
        fits = target.dtype is torch.int64 or (target.dtype is torch.int32 and self.location_capacity <= 2**31)
        holds = target is self.req_to_token or (fits and target.holds == "location")
        if holds and width == target.shape[-1] and not levels.full:
            return target.planned(index, locations, owners, origin)  # the pool made and checked all
        rows, positions = np.divmod(index, width)
        return target.entry_of(rows, positions, self._locations(locations), owners, origin)

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

        `slots` are live handles, each once, and `total_lens` one number or int[n], here and in `commit` and `extend`.

        Raises:
            PoolExhaustedError: too few pages are free. Nothing was allocated.
            Violation: LENGTH_ORDER: longer than a request may be; SLOT_SHARED.
        """
        numbers = self._numbers(slots, total_lens, "grow")
        rows = self._begin(slots, "grow")
        totals = _each(numbers, rows)
        self._look(rows, None, totals, "grow")
        self._holders.grow(rows, totals, self._rows.needed, "grow")
        self._done()

    def commit(self, owner: Slots | PageLease, total_lens: "Amount") -> None:
        """Declares that work which the current stream has been given writes the first `total_lens` tokens.

        At least as many as are committed, and at most as many as are allocated. From here on they can be shared, held
        and sent: who reads them on this stream comes behind, and another stream waits (`wait_written`). Forwards whose
        inputs come from `resolve_forward_inputs`, of a plan with `pages=`, are noted by it. A lease has pages that KV
        arrives on; what a writer in another process writes has to have arrived (PAGE_UNWRITTEN).

        Raises:
            Violation: LENGTH_ORDER; PAGE_OWNER: new tokens lie on a page that others use too.
            ArgumentError: a lease that this pool does not hold.
        """
        if isinstance(owner, PageLease):
            self._sharing.commit(owner, 0, total_lens, KV, "commit")
            return
        numbers = self._numbers(owner, total_lens, "commit")
        rows = self._begin(owner, "commit")
        start, totals = self._lengths(rows, numbers, False)
        self._look(rows, start, totals, "commit", allocated=True)
        self._holders.note(rows[:0], totals)
        self.transaction.operation = "commit"
        self.writes.launched(rows, totals)
        self._rows.commit(rows, totals)
        self._done()

    def accept(self, slots: Slots, total_lens: "Amount") -> None:
        """Declares that verification has accepted the first `total_lens` tokens of each slot: they are no guesses.

        A step accepts what its requests put in, but for guesses: of several tokens that the relay feeds a request all
        but the first, and all of one whose length is a bound. The next step accepts the guesses that it goes on from,
        unless lengths are bounds. Only accepted tokens can be shared, held, cached or sent.

        `slots` are live handles, each once; `total_lens` is one number or int[n], at most what is committed.

        Raises:
            Violation: LENGTH_ORDER; DERIVED_STALE: a mirrored value that has no row for a slot.
        """
        numbers = self._numbers(slots, total_lens, "accept")
        rows = self._begin(slots, "accept")
        totals = _each(numbers, rows)
        self._check_lengths(totals, self._committed(rows), "accept", lengths_of.SHORT_PREFIX)
        accepted = self._rows.arrays["accepted"]
        accepted[rows] = np.maximum(accepted[rows], totals)

    def mark_written(self, owner: Slots | PageLease, first: "Amount", stop: "Amount", *, memory: str) -> None:
        """Declares that work which the current stream has been given writes tokens into another memory than forwards.

        For that of a draft model over the same pages (`register_kv(memory=)`), which has a mark of its own: what it has
        not written is not shared, held, cached or sent, whatever the target has. The tokens are those at positions
        `first` to `stop - 1`, numbers or int[n]; where some before them are not written, they do not count. A lease has
        one number of each, and what a writer in another process writes has to have arrived.

        Raises:
            Violation: LENGTH_ORDER: they are not committed, or beyond the lease; PAGE_UNWRITTEN: they have not arrived.
            ArgumentError: no such memory; a lease that this pool does not hold.
        """
        operation = "mark_written"
        if memory == KV or memory not in self.writes.marks:
            names = [name for name in self.writes.marks if name != KV]
            problem = f"{self.name}: {operation} of memory {memory!r}; others than forwards write {names}"
            raise ArgumentError(problem, memory, "register it with `register_kv`; `commit` is for forwards")
        if isinstance(owner, PageLease):
            self._sharing.commit(owner, first, stop, memory, operation)
            return
        begins, ends = self._numbers(owner, first, operation), self._numbers(owner, stop, operation)
        rows = self._begin(owner, operation)
        starts, stops = _each(begins, rows), _each(ends, rows)
        self._check_lengths(starts, stops, operation)
        self._check_lengths(stops, self._committed(rows), operation, lengths_of.SHORT_PREFIX)
        self.writes.mark(memory, rows, starts, stops)

    def wait_written(self, slots: Slots) -> None:
        """Makes the current stream wait, on the device, for the writes of all committed tokens on other streams.

        For kernels that read KV on a stream of their own, such as copies to another memory. The host does not wait.

        Raises:
            Violation: PAGE_UNWRITTEN, at `cheap`: for some no work was launched that writes them.
        """
        rows = self.slots.rows_of(slots, "wait_written")
        self._check_written(self._committed(rows), self.writes.written(rows), "wait_written")
        self.writes.wait_for_slots(rows)

    def extend(self, slots: Slots, total_lens: "Amount") -> Extension:
        """Grows and commits each slot to `total_lens` tokens, and returns those from the old committed length on.

        Raises as `grow` and `commit`, with nothing changed.
        """
        return self._extend(slots, total_lens, False, "extend")

    def advance(self, slots: Slots, num_new_tokens: "Amount" = 1) -> Extension:
        """Grows and commits each slot by `num_new_tokens` >= 0, as a decode step does, O(requests); as `extend`."""
        return self._extend(slots, num_new_tokens, True, "advance")

    def _extend(self, slots: Slots, lengths: object, adds: bool, operation: str) -> Extension:
        """Allocates and commits `lengths` tokens in all, or so many more."""
        numbers = self._numbers(slots, lengths, operation)
        handles = self._enter(slots, operation)
        if self._holders.taken_at.wanted:
            rows = slots._host_side()
            starts, totals = self._lengths(rows, numbers, adds)
            self._look(rows, starts, totals, operation)
            self._holders.note(self._rows.next_pages(self._rows.needed), rows, totals)
        extension = self._of_now(slots)
        self.transaction.operation = operation
        try:
            laid = self._rows.extend(handles, numbers, adds, levels.cheap)
        except MemoryError:  # for its array, which it makes before anything changes
            self.transaction.operation = None
            raise
        if levels.cheap:
            tally(times_checked, _EXTENDED)
        if type(laid) is int:
            if laid == -2:
                self._holders.check_whole(operation)
            self.transaction.operation = None
            rows = slots._host_side()
            self._look(rows, *self._lengths(rows, numbers, adds), operation)
            raise unexplained(self._holders.label, operation, f"row {laid}")
        return self._extended(extension, laid, operation)

    def _lengths(self, rows: Ints, numbers: int | Ints, adds: bool) -> tuple[Ints, Ints]:
        """Tokens of each row before and after, int64[n]."""
        starts, numbers = self._committed(rows), _each(numbers, rows)
        if adds and (least := int(numbers.min(initial=0))) < 0:
            raise ArgumentError(
                f"{self.name}: advance by {least}", least, "pass 0 or more; `truncate` takes tokens back"
            )
        return starts, starts + np.minimum(numbers, MOST_TOKENS) if adds else numbers

    def _look(
        self, rows: Ints | None, starts: Ints | None, totals: Ints, operation: str, *, allocated: bool = False
    ) -> None:
        """Refuses lengths int64[n] that are out of order, or for which there are no pages; see `PageRows.look`.

        With `allocated` the slots have to have the pages already.
        """
        core, holders = self._rows, self._holders
        times_checked[LENGTH_ORDER] += 1
        row = core.look(rows, starts, totals, starts is not None)
        if row < 0 and not (allocated and core.needed):
            return
        self._check_lengths(totals if starts is None else starts, totals, operation)
        if rows is not None and starts is not None:
            if allocated:
                self._check_allocated(rows, totals, operation)
            at = np.flatnonzero((totals > starts) & (starts < self._tokens_of("count", rows)))
            pages = self.page_table[rows[at], starts[at] // self.page_size].astype(np.int64)
            self.check_unshared(pages, operation)
        if row < totals.size:
            raise unexplained(holders.label, operation, f"row {row}")
        holders.explain_free(core.needed, operation)

    def _of_now(self, owners: Slots) -> Extension:
        """An extension of no tokens yet. Where memory is short, making it fails before anything changes."""
        epochs = self.epochs
        return Extension(NO_PAGES, owners, self, Origin("extension", self.runtime.step, owners, epochs, epochs.last))

    def _extended(self, extension: Extension, laid: Ints, operation: str) -> Extension:
        """Ends a change by which slots have more tokens, which are the extension: `laid` is int64[n + t + t]."""
        if self._rows.unplaced:
            self._check_placed(laid[(laid.size + len(extension.owners)) // 2 :], operation)
        extension._laid = laid
        self._done()
        return extension

    def _extension_from_start(self, owners: Slots, rows: Ints, lengths: Ints, operation: str) -> Extension:
        """The same, of the first `lengths` int64[n] tokens of each."""
        positions, locations = self.lay(rows, 0 * lengths, lengths, operation)
        return self._extended(self._of_now(owners), np.concatenate([lengths, positions, locations]), operation)

    # Sharing

    def take(self, n: SupportsIndex, *, writer: Fence | None = None) -> PageLease:
        """Takes `n` pages for no slot yet: for KV that arrives before its request has a slot, or for a cache.

        The lease holds them alone, all `n * page_size` tokens of them. Once `commit` has said how many are written,
        `share` lets slots begin with them, and the slots that still hold them when the lease is released own them;
        `assign` gives them to one request. Costs O(n), whatever the size of the pool.

        `writer` is the end of the writer in another process that they are granted to, `Lease.ended`. Then `commit`
        asks what has arrived, and `release` keeps the pages pending until it is complete, whatever `after` is.

        Raises:
            PoolExhaustedError: fewer are free. Nothing was taken.
        """
        return self._sharing.take(n, writer)

    def assign(self, lease: PageLease, slots: Slots, num_tokens: SupportsIndex) -> Extension:
        """Gives all pages of a lease to one live request without pages, which has `num_tokens` tokens on them then.

        The lease is over. Unlike those of `share` the tokens may end inside a page: the pages are the request's to
        write, those behind its tokens too. Returns the tokens, for a row of a token table.

        Raises:
            Violation: LENGTH_ORDER; PAGE_UNWRITTEN, at `cheap`: `commit` has not said that they are written;
                SLOT_IN_FLIGHT: the writer of the lease may still write them.
            ArgumentError: the request has pages already; not one slot; a lease that this pool does not hold.
        """
        return self._sharing.assign(lease, slots, num_tokens)

    def share(self, source: Source, target: Slots, num_tokens: SupportsIndex) -> Extension:
        """Lets `target` begin with the first `num_tokens` tokens of `source`: pages get further holders, with no copy.

        The source is one live handle, a lease, or leases of which each goes on where the one before ends. The tokens
        are whole pages, and at most what it has committed and accepted (see `accept`). Targets are live handles without
        pages. Returns the tokens as those of the targets, for their rows of a token table.

        Raises:
            Violation: PAGE_ALIGNMENT, LENGTH_ORDER; PAGE_UNWRITTEN, at `cheap`: no work was launched that writes them;
                PAGE_RELEASED: the source has given some back.
            ArgumentError: a target has pages already; the source is not one slot or not leases of this pool, or has a
                page twice.
        """
        return self._sharing.share(source, target, num_tokens)

    def hold(self, slots: Slots, num_tokens: SupportsIndex, *, first: SupportsIndex = 0) -> PageLease:
        """Keeps tokens of one slot when the slot is gone: one reference to each of their pages.

        They end at `num_tokens`, as a length, and begin at `first`: those before are held otherwise, or not at all.
        Both are whole pages. Raises as `share`.
        """
        return self._sharing.hold(slots, num_tokens, first)

    def rebase(self, slots: Slots, source: Source, num_tokens: SupportsIndex, *, after: Fence | None) -> Extension:
        """Puts a live request onto the pages of another that begins alike, and gives its own copies of them back.

        As a prefix cache does when it finds, once a prefill is done, that it has the prefix already. Plans and
        extensions of the request that were made before are refused from then on; its token row is to be written anew.

        `slots` is one live handle. The source and its tokens are as for `share`, and the request has committed the same
        tokens. `after` is the forward-done fence of the last forward that uses the pages that it gives back; None as
        for `SlotPool.free`.

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
        after: Fence | None,
    ) -> None:
        """Takes tokens back: behind, those of rejected speculation, and in front, those before a sliding window.

        Guesses among the tokens that stay are guesses still: see `accept`.

        Whole pages are released. In front the tokens that stay keep their positions, and count as committed still; the
        pages before cannot be read, shared or held any more, and page 0 stands for them in the page lists of a plan.

        Args:
            slots: live handles, each once.
            total_lens: tokens that stay, at most what is committed; None takes none back. Results of a relay go by
                handle: those of requests that left are dropped.
            first: the first position that is still read; pages that lie before it are released.
            after: the forward-done fence of the last forward that uses the pages; None as for `SlotPool.free`.

        Raises:
            Violation: LENGTH_ORDER; DERIVED_STALE: a mirrored value that has no row for a slot; SLOT_IN_FLIGHT, at
                `cheap`: pages are given back without a fence while a forward may use them.
        """
        operation = "truncate"
        check_fence(after, f"{self.name}: {operation}")
        ends = None if total_lens is None else self._numbers(slots, total_lens, operation)
        begins = None if first is None else self._numbers(slots, first, operation)
        rows = self._begin(slots, operation)
        committed = self._committed(rows)
        totals = committed if ends is None else _each(ends, rows)
        starts = None if begins is None else _each(begins, rows)
        self._check_release(rows, operation)
        times_checked[LENGTH_ORDER] += 1
        if after is None:
            stays = self._tokens_of("count", rows) if ends is None else totals
            loses = stays + self.page_size <= self._tokens_of("count", rows)
            if starts is not None:
                loses |= starts >= self._tokens_of("first", rows) + self.page_size
            self.slots.check_ended(rows[loses], operation)
        if not self._holders.cut(rows, None if ends is None else totals, starts, after, operation):
            self._check_lengths(totals, committed, operation, lengths_of.TRUNCATED)
            self._check_allocated(rows, totals, operation)
            self._check_lengths(self._tokens_of("first", rows), totals, operation, lengths_of.BEHIND_THE_FRONT)
            if starts is not None:
                self._check_lengths(starts, totals, operation, lengths_of.BEYOND)
            raise unexplained(self._holders.label, operation, "the rows")
        self._done()

    def release(self, slots: Slots, *, after: Fence | None) -> None:
        """Releases every page of the slots, which stay live, at once or behind `after`, as `SlotPool.free`.

        `release_requests` is for requests that leave.
        """
        check_fence(after, f"{self.name}: release")
        rows = self._begin(slots, "release")
        if after is None:
            self.slots.check_ended(rows, "release")
        self._check_release(rows, "release")
        self._holders.cut(rows, None, None, after, "release")
        self._done()

    def release_requests(self, slots: Slots, *, after: Fence | None) -> None:
        """As `SlotPool.release_requests`: requests leave with their pages, those of other pools and all else."""
        self.slots.release_requests(slots, after=after)

    def verify(self) -> None:
        """Checks every invariant of the pool from scratch, with its tables. Costs O(pages + slots x width).

        Reads device memory where it has tables, but not under capture.

        Raises:
            Violation: PAGE_OWNER, LENGTH_ORDER, SLOT_CONSERVATION, and any code of slots and tables.
        """
        self.transaction.enter(f"{self.name}: verify")
        self._holders.verify()
        self._verify_tables("verify")

    def expect_idle(self) -> None:
        """No slot and no lease holds a page; pending ones are no leak. Else SLOT_CONSERVATION, naming up to 8."""
        self.transaction.enter(f"{self.name}: expect_idle")
        self._holders.expect_idle("expect_idle")

    # For the library: steps, plans and the host tier. Rows int64[n] are live slots that were checked.

    def add_release_check(self, check: Callable[[Ints, str], None]) -> None:
        """`check(rows, operation)` may refuse, by raising, that pages of live slots are released."""
        self.runtime.check_owner(f"{self.name}: add_release_check")
        self._release_checks.append(check)

    def check_accepted(self, rows: Ints, lengths: Ints, operation: str) -> None:
        """Refuses (LENGTH_ORDER) to give others tokens int64[n] that are guesses still."""
        self._check_lengths(lengths, self._rows.arrays["accepted"][rows], operation, lengths_of.GUESSED)

    def guess(self, rows: Ints, accepted: Ints) -> None:
        """At most so many of the committed tokens, int64[n], are accepted: the others are guesses."""
        now = self._rows.arrays["accepted"]
        now[rows] = np.minimum(now[rows], accepted)

    def check_unshared(self, pages: Ints, operation: str) -> None:
        """Refuses (PAGE_OWNER) a write into pages int64[n] if one is shared or cached; 0 stands for none yet."""
        if self._rows.look_writable(pages) >= 0:
            arrays = self._rows.arrays
            held = np.where(pages > 0, arrays["holders"][pages].astype(np.int64) + arrays["cached"][pages], 1)
            invariants.page_owner(held, np.ones_like(held), pages=pages, **self._where(operation))

    def check_readable(self, rows: Ints, positions: Ints, operation: str, *, window: int | None = None) -> None:
        """Refuses (PAGE_RELEASED) that tokens at `positions` int64[n] read what was given back.

        Each reads the last `window` positions, its own included, or all up to its own.
        """
        if self._rows.look_readable(rows, positions, window or 0) >= 0:
            reads = np.zeros_like(rows) if window is None else np.maximum(positions - (window - 1), 0)
            invariants.page_released(reads, self._tokens_of("first", rows), slots=rows, **self._where(operation))

    def check_committed(self, rows: Ints, lens: Ints, operation: str) -> None:
        """Refuses (DERIVED_STALE), at `cheap`, lengths int64[n] other than committed."""
        if levels.cheap:
            committed, where = self._committed(rows), self._where(operation)
            where["column"] = "seq_lens"

            def explain(row: int) -> tuple[str, object, object]:
                more = "a plan takes those without the tokens that it puts in, as `step.batch` has them"
                less = "plan from `step.batch` of the last step, not from the batch before it"
                problem = f"the lengths are not those of the pages: {more if lens[row] > committed[row] else less}"
                return problem, committed[row], lens[row]

            invariants.derived_stale(committed != lens, explain, slots=rows, **where)

    def page_lists(
        self, rows: Ints, there: int, counts: Ints, firsts: Ints | None, new: Ints, num_rows: int
    ) -> npt.NDArray[np.int32]:
        """The `counts` pages int64[n] of each slot, from page `firsts` on or the first ones, int32[num_rows, most].

        0 behind them. With the `new` ones that a step will take; the slots from row `there` on have none yet.
        """
        lists = np.zeros((num_rows, int(counts.max(initial=0))), dtype=np.int32)
        self._rows.lists(rows, there, counts, firsts, new, lists)
        return lists

    def lay(self, rows: Ints, starts: Ints, counts: Ints, operation: str) -> tuple[Ints, Ints]:
        """Positions and locations of `counts` tokens of each row from `starts` on, int64[t] each."""
        positions: Ints = np.empty(int(counts.sum()), dtype=np.int64)
        locations = np.empty_like(positions)
        self._rows.lay(rows, starts, counts, positions, locations)
        self._check_placed(locations, operation)
        return positions, locations

    # Parts of operations

    def _enter(self, slots: Slots, operation: str) -> Requests:
        """Queries fences, then checks the handles, and at `full` what kernels can damage.

        From here on no code of the engine runs.
        """
        self.transaction.enter(operation)
        self.transaction.reap()
        if levels.full:
            self._verify_tables(operation)
        return self.slots._allocator.check(slots, operation, True)

    def _begin(self, slots: Slots, operation: str) -> Ints:
        """The same; their rows int64[n]."""
        self._enter(slots, operation)
        return slots._host_side()

    def _done(self) -> None:
        """An operation has changed all that it changes."""
        self.transaction.operation = None
        if levels.full:
            self._holders.verify()

    def _verify_tables(self, operation: str) -> None:
        for table in self._tables:
            table.check(operation)
        if not self.runtime.capturing:
            for table, of in self._maps:
                check_map(self, table, of, operation)

    def _numbers(self, slots: Slots, numbers: object, operation: str) -> int | Ints:
        """One number, or one per slot, int64[n]; those of a mirrored value go by handle.

        They are read before `_begin`, since that may run code of the engine.
        """
        if type(numbers) is int and abs(numbers) <= MOST_TOKENS:
            return numbers
        label = f"{self.name}: {operation}"
        if isinstance(numbers, MirroredTensor):
            numbers = lined_up(numbers, slots.row_set, label)
        per_slot = amounts(numbers, len(slots), label)
        return per_slot if per_slot.ndim else int(per_slot)

    def _check_lengths(
        self, shorter: Ints, longer: Ints, operation: str, explain: lengths_of.Explain = lengths_of.explain_total
    ) -> None:
        """0 <= shorter <= longer <= the most a request may have."""
        most = self.max_tokens_per_request
        invariants.length_order(shorter, longer, most, explain=explain, **self._where(operation))

    def _check_allocated(self, rows: Ints, totals: Ints, operation: str) -> None:
        """Each row has pages for `totals` tokens."""
        allocated, most = self._tokens_of("count", rows), self._rows.width * self.page_size
        invariants.length_order(totals, allocated, most, explain=lengths_of.UNCOMMITTED, **self._where(operation))

    def _check_written(self, tokens: Ints, written: Mapping[str, int | Ints], operation: str) -> None:
        """Refuses (PAGE_UNWRITTEN), at `cheap`, tokens int64[n] that some memory does not have."""
        for memory, launched in written.items() if levels.cheap else ():
            where = self._where(operation)
            if memory != KV:
                where["column"] = memory
            invariants.page_unwritten(tokens, np.atleast_1d(launched), **where)

    def _check_placed(self, locations: Ints, operation: str) -> None:
        """Each location that was laid last is on a page: else a position counts as allocated that is not."""
        if self._rows.unplaced:
            invariants.slot_zero_allocated(locations // self.page_size, **self._where(operation))
            raise unexplained(self._holders.label, operation, "the rows")

    def _check_release(self, rows: Ints, operation: str) -> None:
        for check in self._release_checks:
            check(rows, operation)

    def _locations(self, numbers: Ints, kind: type[Locations] = Locations) -> Locations:
        return cast(Locations, self._spaces["location"].handles(numbers, kind))


def _each(numbers: int | Ints, rows: Ints) -> Ints:
    """One number for each row, int64[n]."""
    return np.full(rows.size, numbers, dtype=np.int64) if isinstance(numbers, int) else numbers
