"""`PagePool` against a memory of stamps: growing, speculation, shared prefixes, fenced releases, exhaustion."""

from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import levels
from batchstate.errors import ArgumentError, DtypeError, PoolExhaustedError, ShapeError
from batchstate.indices import Handles, Locations, Pages, Slots
from batchstate.kv.pages import Extension, PageLease, PagePool
from batchstate.pools import SlotPool
from batchstate.selfcheck.machines.pools import PagesMachine
from batchstate.tables import Table
from batchstate.testing.fences import ManualFence
from batchstate.testing.machine import agree, agree_on, disagree, misuses
from batchstate.testing.models import AllocatorModel
from batchstate.violations import Code


@final
@attrs.define(eq=False)
class Holding:
    """Pages in order, and the stamps of the committed tokens on them; whether they were taken without a request.

    The first `front` pages were given back, and are 0.

    Of the tokens the first `written` are written, by forwards that were launched, the last of them on the second stream
    if `side`; the others are to come.
    """

    pages: list[int] = attrs.field(factory=list)
    stamps: list[int] = attrs.field(factory=list)
    taken: bool = False
    written: int = 0
    side: bool = False
    front: int = 0


@final
@attrs.define(eq=False)
class PageModel:
    """KV memory as it should be: who owns each page, and what every request finds at each of its positions.

    Each token that is written gets a stamp of its own. A request, or a prefix that is held, must find its stamps for as
    long as it lives: a page handed out twice, or too early, shows as another owner's stamp.

    Attributes:
        pool: the pool.
        allocator: which pages are live or pending; the pool may keep a shared page pending longer, never less long.
        requests: slot -> what it holds.
        leases: prefixes held without a slot.
        memory: location -> stamp.
        readers: page -> fences of sharers that left before the last one.
    """

    pool: PagePool
    allocator: AllocatorModel
    requests: dict[int, Holding] = attrs.field(factory=dict)
    leases: list[tuple[PageLease, Holding]] = attrs.field(factory=list)
    memory: dict[int, int] = attrs.field(factory=dict)
    readers: dict[int, list[ManualFence]] = attrs.field(factory=dict)
    written: int = 0

    def holders(self, page: int) -> int:
        everyone = (*self.requests.values(), *(holding for _, holding in self.leases))
        return sum(page in holding.pages for holding in everyone)

    def lacks(self, slot: int, length: int) -> int:
        """Pages that a request needs on top to hold `length` tokens."""
        return max(0, -(-length // self.pool.page_size) - len(self.requests[slot].pages))

    def writable(self, slot: int, length: int) -> bool:
        """Whether the tokens up to `length` lie on pages without another holder."""
        holding, size = self.requests[slot], self.pool.page_size
        start = len(holding.stamps)
        partial = length > start and start % size > 0
        return not partial or self.holders(holding.pages[start // size]) == 1

    def grew(self, slot: int) -> None:
        """Reads which pages a request got, and checks that they were free."""
        holding = self.requests[slot]
        row = [0] * holding.front + [page for page in self.pool.page_table[slot].tolist() if page]
        agree(holding.pages, row[: len(holding.pages)], f"older pages of slot {slot}")
        self.allocator.take(row[len(holding.pages) :])
        holding.pages = row

    def take(self, lease: PageLease) -> None:
        """Pages were taken without a request, and KV arrives on all of them."""
        holding = Holding(lease.pages.tolist(), taken=True)
        self.allocator.take(holding.pages)
        self.write(holding, lease.tokens)
        self.leases.append((lease, holding))

    def extended(self, slots: list[int], lengths: list[int], extension: Extension) -> None:
        """Stamps the tokens of an extension, and checks that each lies where the page table says."""
        expected: list[tuple[int, int, int]] = []
        for slot, length in zip(slots, lengths, strict=True):
            self.grew(slot)
            positions = self.write(self.requests[slot], length)
            expected += [(slot, at, self.location(self.requests[slot], at)) for at in positions]
        columns = (extension.slots, extension.positions, extension.locations.np)
        found = list(zip(*(column.tolist() for column in columns), strict=True))
        agree(expected, found, "slot, position and location of an extension")

    def write(self, holding: Holding, length: int) -> range:
        """Stamps the tokens up to `length`; their positions."""
        positions = range(len(holding.stamps), length)
        for position in positions:
            self.written += 1
            self.memory[self.location(holding, position)] = self.written
            holding.stamps.append(self.written)
        return positions

    def location(self, holding: Holding, position: int) -> int:
        size = self.pool.page_size
        return holding.pages[position // size] * size + position % size

    def cut(self, slot: int, length: int, after: ManualFence | None) -> None:
        """Takes back the tokens beyond `length`, and the pages beyond them."""
        holding = self.requests[slot]
        keep = -(-length // self.pool.page_size)
        pages, holding.pages = holding.pages[keep:], holding.pages[:keep]
        holding.front = min(holding.front, keep)
        del holding.stamps[length:]
        holding.written = min(holding.written, length)
        self.drop([page for page in pages if page], after)

    def slide(self, slot: int, first: int, after: ManualFence | None) -> None:
        """Gives back the pages before the position `first`."""
        holding = self.requests[slot]
        before, holding.front = holding.front, max(holding.front, first // self.pool.page_size)
        pages = holding.pages[before : holding.front]
        holding.pages[: holding.front] = [0] * holding.front
        self.drop(pages, after)

    def release(self, slot: int, after: ManualFence | None) -> None:
        self.cut(slot, 0, after)
        del self.requests[slot]

    def drop(self, pages: list[int], after: ManualFence | None) -> None:
        """One holder of each page left, behind `after`."""
        for page in pages:
            if self.holders(page):
                if after is not None:
                    self.readers.setdefault(page, []).append(after)
            else:
                self.allocator.release([page], after, *self.readers.pop(page, ()))

    def share(self, source: Holding, slot: int, tokens: int) -> None:
        """A request begins with the first tokens of another, or of a lease."""
        pages = source.pages[: tokens // self.pool.page_size]
        self.requests[slot] = Holding(pages, source.stamps[:tokens], written=tokens, side=source.side)

    def check(self) -> None:
        """Compares the pool with the model, and every request with its stamps."""
        pool, stats = self.pool, self.pool.stats
        self.allocator.reap()
        pages = {page for holding in self.requests.values() for page in holding.pages}
        pages |= {page for _, holding in self.leases for page in holding.pages}
        pages -= {0}
        agree(len(pages), stats.live, "live pages")
        agree(pages, self.allocator.live, "live pages of the model")
        agree(sum(self.holders(page) > 1 for page in sorted(pages)), stats.shared, "shared pages")
        agree(len(self.leases), stats.leases, "leases")
        if stats.pending < len(self.allocator.pending):
            disagree(f"{stats.pending} pages are pending, {len(self.allocator.pending)} have to be")
        for slot, holding in sorted(self.requests.items()):
            row = np.zeros(pool.page_table.shape[1], np.int32)
            row[: len(holding.pages)] = holding.pages
            agree(row.tolist(), pool.page_table[slot].tolist(), f"pages of slot {slot}")
            self._check_stamps(holding, f"slot {slot}")
        for lease, holding in self.leases:
            agree(holding.pages, lease.pages.tolist(), "pages", lease)
            self._check_stamps(holding, repr(lease))

    def _check_stamps(self, holding: Holding, whose: str) -> None:
        first = holding.front * self.pool.page_size
        found = [self.memory.get(self.location(holding, position)) for position in range(first, len(holding.stamps))]
        agree(holding.stamps[first:], found, f"tokens of {whose}")


HAS_REQUESTS = precondition(lambda self: bool(self.held))
EXHAUSTED = {True: "exhausted while pending would suffice", False: "exhausted for good"}


# Ways to misuse a `PagePool`, from the pool and the handle of a live request.

It = tuple[PagePool, Slots]


def _pages_of_two(it: It) -> bool:
    return it[0].page_size > 1


def _has_pages(it: It) -> bool:
    return bool(it[0].allocated(it[1])[0])


def _none(it: It) -> Slots:
    return it[0].slots.take(0)


def _foreign(it: It) -> Slots:
    return SlotPool(it[0].runtime, 2).take(1)


def _made(it: It, **options: Any) -> PagePool:
    arguments = {"slots": it[0].slots, "num_pages": 4, "page_size": 4, "max_tokens_per_request": 4}
    return PagePool(it[0].runtime, **{**arguments, **options})


_MISUSES = misuses(
    ("grow to -1", Code.LENGTH_ORDER, lambda it: it[0].grow(it[1], -1)),
    ("grow beyond a row", Code.LENGTH_ORDER, lambda it: it[0].grow(it[1], it[0].max_tokens_per_request + 1)),
    ("grow to half a token", DtypeError, lambda it: it[0].grow(it[1], 0.5)),
    ("one length too many", ShapeError, lambda it: it[0].grow(it[1], np.array([1, 1]))),
    ("advance by -1", ArgumentError, lambda it: it[0].advance(it[1], -1)),
    ("advance beyond int64", Code.LENGTH_ORDER, lambda it: it[0].advance(it[1], 2**63 - 1)),
    ("truncate to more", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], it[0].committed(it[1]) + 1)),
    ("give back too much", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], first=it[0].committed(it[1]) + 1)),
    ("give back before -1", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], first=-1)),
    ("give back half a token", DtypeError, lambda it: it[0].truncate(it[1], first=0.5)),
    ("give back for too many", ShapeError, lambda it: it[0].truncate(it[1], first=np.array([0, 0]))),
    ("truncate to -1", Code.LENGTH_ORDER, lambda it: it[0].truncate(it[1], -1)),
    ("take -1 pages", ArgumentError, lambda it: it[0].take(-1)),
    ("take half a page", DtypeError, lambda it: it[0].take(0.5)),
    ("hold half a page", Code.PAGE_ALIGNMENT, lambda it: it[0].hold(it[1], 1), _pages_of_two),
    ("hold what is not committed", Code.LENGTH_ORDER, lambda it: it[0].hold(it[1], 8 * it[0].page_size)),
    ("share half a page", Code.PAGE_ALIGNMENT, lambda it: it[0].share(it[1], _none(it), 1), _pages_of_two),
    ("share what is not committed", Code.LENGTH_ORDER, lambda it: it[0].share(it[1], _none(it), 8 * it[0].page_size)),
    ("share True tokens", DtypeError, lambda it: it[0].share(it[1], _none(it), True)),
    ("share beyond int64", ArgumentError, lambda it: it[0].share(it[1], _none(it), 2**63)),
    ("share from no request", ArgumentError, lambda it: it[0].share(_none(it), _none(it), 0)),
    ("grow requests of another pool", ArgumentError, lambda it: it[0].grow(_foreign(it), 1)),
    ("hold two requests", (ArgumentError, Code.SLOT_SHARED), lambda it: it[0].hold(it[1].take([0, 0]), 0)),
    ("share into a request with pages", ArgumentError, lambda it: it[0].share(it[1], it[1], 0), _has_pages),
    ("one request twice", Code.SLOT_SHARED, lambda it: it[0].advance(it[1].take([0, 0]))),
    ("leave twice in one call", Code.SLOT_DOUBLE_FREE, lambda it: it[0].release_requests(it[1].take([0, 0]))),
    ("release padding", Code.SLOT_ZERO_ALLOCATED, lambda it: it[0].release(it[1].pad(2))),
    ("release behind a number", ArgumentError, lambda it: it[0].release(it[1], after=3)),
    ("release numbers", DtypeError, lambda it: it[0].release([1])),
    ("release pages as slots", Code.UNIT_MISMATCH, lambda it: it[0].release(Pages.from_host(it[0].runtime, [1]))),
    ("a lease made by hand", (ArgumentError, DtypeError), lambda it: it[0].share(7, it[1], 0)),
    ("a page size beyond int64", ArgumentError, lambda it: _made(it, page_size=2**62)),
    ("requests beyond int64", ArgumentError, lambda it: _made(it, max_tokens_per_request=2**63)),
    ("pages of no slot pool", ArgumentError, lambda it: _made(it, slots=it[0])),
    ("pages of no tokens", ArgumentError, lambda it: _made(it, page_size=0)),
)


_NAMED = 12
"""Rows that are remembered, of pages that were given out lately."""


class PagePoolMachine(PagesMachine):
    """Requests that grow, commit, speculate, share and leave, in a pool too small for all of them."""

    NAME = "page_pool"
    TARGETS = (
        "two steps in flight",
        "a page held by three",
        "a prefix shared from a lease",
        "begun on pages taken before",
        "a write into a shared page refused",
        "a request too long refused",
        "allocated first and committed later",
        "tokens taken back",
        "pages before a window given back",
        "truncated into what was given back refused",
        "a prefix that was given back refused",
        "a map to another pool read",
        "a map cleared where a window moved on",
        "exhausted while pending would suffice",
        "exhausted for good",
        "released behind step N while N+1 is in flight",
        "retraction",
        "a row of a recycled page refused",
        "rows of pages read",
        "a page written to its end",
        "handles of pages that were given back refused",
        "shared before it is written refused",
        "written on one stream and read on another",
        "cleared with a lease and a request",
        "clearing behind a step in flight refused",
    )
    MISUSES = _MISUSES

    @initialize(size=st.integers(2, 4), num_pages=st.integers(3, 8), page_size=st.integers(1, 3))
    def begin(self, size: int, num_pages: int, page_size: int) -> None:
        """Opens a pool of slots and a pool of pages."""
        self.open_pages(size, num_pages, page_size, 4 * page_size - (page_size > 1))
        self.table = self.slots.table("req_to_token", (self.most,), holds="location", host=True)
        tensor = self.rt.device_zeros((self.pages.location_capacity,), torch.int64)
        self.by_location = self.pages.adopt(tensor, "by location", by="location")
        self.swa = PagePool(self.rt, self.slots, 5 * size, page_size, max_tokens_per_request=self.most, name="swa")
        self.full_to_swa = self.pages.table("full_to_swa", (), torch.int32, of=self.swa)
        self.swa_to_state = self.swa.table("swa_to_state", (), torch.int32, by="page")
        self.by_page = self.pages.table("by page", (), torch.int64, by="page", host=True)
        self.rows: dict[tuple[Table, int], tuple[int, int]] = {}  # (table, row) -> generation of the writer, value
        self.named: list[tuple[Table, Handles]] = []  # rows that were given to a request
        self.settle()
        self.launches, self.cleared = True, False
        self.model = PageModel(self.pages, AllocatorModel(num_pages))
        self.held: dict[int, Slots] = {}
        self.gone: list[Slots] = []
        self.extend_to(self.take(1), [page_size])

    def check(self) -> None:
        super().check()
        self.model.check()
        for slot, handle in self.held.items():
            holding = self.model.requests[slot]
            agree(len(holding.stamps), int(self.pages.committed(handle)[0]), f"committed tokens of slot {slot}")
            allocated = len(holding.pages) * self.pages.page_size
            agree(allocated, int(self.pages.allocated(handle)[0]), f"allocated tokens of slot {slot}")
        stats = self.pages.stats
        if not self.steps.depth:
            agree(0, stats.pending, "pages pending when no step is in flight")
        if stats.live:
            with self.refused(Code.SLOT_CONSERVATION):
                self.pages.expect_idle()
        self.reached("a page held by three", any(self.model.holders(page) > 2 for page in self.model.allocator.live))

    def handles(self, slots: list[int]) -> Slots:
        return Slots.cat([self.held[slot] for slot in slots]) if slots else self.slots.take(0)

    def some(self, data: st.DataObject, least: int = 1) -> list[int]:
        return data.draw(st.lists(st.sampled_from(list(self.held)), min_size=least, unique=True), label="slots")

    def misused(self, data: st.DataObject) -> It | None:
        return (self.pages, self.held[self.some(data)[0]]) if self.held else None

    # Slots

    @rule(n=st.integers(1, 2), length=st.integers(0, 6))
    def admit(self, n: int, length: int) -> None:
        """Requests come with a prompt."""
        slots = self.take(n)
        self.extend_to(slots, [length] * len(slots))

    def take(self, n: int) -> list[int]:
        """Takes up to `n` slots, without pages; their numbers."""
        n = min(n, self.slots.stats.free)
        taken = self.slots.take(n)
        for at, slot in enumerate(taken.np.tolist()):
            self.held[slot] = taken.take([at])
            self.model.requests[slot] = Holding()
        return [int(slot) for slot in taken.np]

    # Growing

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(0, 3))
    def extend(self, data: st.DataObject, more: int) -> None:
        """Requests get tokens, or all are refused: too long, too many pages, or on a page that others hold."""
        slots = self.some(data)
        self.extend_to(slots, [len(self.model.requests[slot].stamps) + more for slot in slots])

    def extend_to(self, slots: list[int], lengths: list[int]) -> bool:
        """Extends requests, or finds the call refused as it has to be; whether it went through."""
        return self._grown(slots, lengths, lambda: self.pages.extend(self.handles(slots), np.array(lengths, np.int64)))

    @HAS_REQUESTS
    @rule(data=st.data(), counts=st.lists(st.integers(0, 2), min_size=4, max_size=4), one=st.booleans())
    def advance(self, data: st.DataObject, counts: list[int], one: bool) -> None:
        """A decode step: one token each, or some more."""
        slots = self.some(data)
        more = [1] * len(slots) if one else counts[: len(slots)]
        lengths = [len(self.model.requests[slot].stamps) + n for slot, n in zip(slots, more, strict=True)]
        n = 1 if one else np.array(more, dtype=np.int64)
        self._grown(slots, lengths, lambda: self.pages.advance(self.handles(slots), n))

    def _grown(self, slots: list[int], lengths: list[int], call: Callable[[], Extension]) -> bool:
        """Runs a call that extends, and expects what the model does. Whether it went through."""
        if not all(self.model.writable(slot, length) for slot, length in zip(slots, lengths, strict=True)):
            self.reached("a write into a shared page refused")
        if not self._allowed(slots, lengths, call, writes=True):
            return False
        extension = call()
        agree_on(np.diff([0, *np.cumsum(extension.counts)]), extension.counts, "counts")
        self.model.extended(slots, lengths, extension)
        if len(extension):
            write = extension.entry(self.table)
            agree_on(
                write.values[: len(extension)], extension.locations.np.astype(np.int32), "values of the table write"
            )
            write.launch()
            self._check_rows(slots, extension.counts.tolist())
            if levels.cheap:  # which finds rows that were not written
                self._name_rows(extension)
        return True

    def _check_rows(self, slots: list[int], counts: list[int]) -> None:
        """What was just written: the new tokens of each slot, and the rest of a page that began with one of them."""
        size = self.pages.page_size
        for slot, n in zip(slots, counts, strict=True):
            if n:
                holding = self.model.requests[slot]
                length = stop = len(holding.stamps)
                if (length - 1) % size < n:
                    stop = min(-(-length // size) * size, self.most)
                row = self.table.host_for(self.held[slot])[0]
                expected = [self.model.location(holding, position) for position in range(length - n, stop)]
                agree(expected, row[length - n : stop].tolist(), f"row of slot {slot}")
                self.reached("a page written to its end", stop > length)

    def _name_rows(self, extension: Extension) -> None:
        """Rows of new tokens are read too early, then written, or by their next owner; some older ones are read too."""
        new: list[tuple[Table, Handles]] = [
            (self.by_location, extension.locations),
            (self.by_page, self.pages.pages_of(extension.owners.take([0]))),
        ]
        for table, handles in new:
            self._use_rows(table, handles, writes=False)
            if self.model.written % 3:
                self._use_rows(table, handles, writes=True)
        if self.named:
            self._use_rows(*self.named[self.model.written % len(self.named)], writes=False)
        self.named = [*self.named[-_NAMED:], *new]

    def _use_rows(self, table: Table, handles: Handles, *, writes: bool) -> None:
        """Rows by page and by location belong to whom the page was given; the next owner finds them unwritten."""
        per_page, allocator = self.pages.page_size if table is self.by_location else 1, self.model.allocator
        numbers, generations = handles.np.tolist(), handles.generations.tolist()
        owned = [
            number // per_page in allocator.live and allocator.generations[number // per_page] == generation
            for number, generation in zip(numbers, generations, strict=True)
        ]
        rows = [self.rows.get((table, number), (0, 0)) for number in numbers]
        if not all(owned):
            self.reached("handles of pages that were given back refused")
            for use in (table.device_for, table.clear):
                with self.refused(Code.SLOT_STALE_HANDLE):
                    use(handles)
        elif writes:
            self.model.written += 1
            values = [self.model.written * 100 + at for at in range(len(numbers))]
            table.write(handles, None, values)
            for number, generation, value in zip(numbers, generations, values, strict=True):
                self.rows[table, number] = generation, value
        elif [generation for generation, _ in rows] != generations:
            self.reached("a row of a recycled page refused", any(value for _, value in rows))
            with self.refused(Code.ROW_UNWRITTEN):
                table.device_for(handles)
        else:
            self.reached("rows of pages read")
            found = self.rt.inspect(table.device_for(handles).index_select(0, handles.device))
            agree([value for _, value in rows], found.tolist(), "rows of pages")

    @HAS_REQUESTS
    @rule(data=st.data(), side=st.booleans())
    def forward(self, data: st.DataObject, side: bool) -> None:
        """A forward on one of the two streams reads what some requests have written, and writes the rest."""
        self._forward(self.some(data), side)

    @rule(launches=st.booleans())
    def plan_ahead(self, launches: bool) -> None:
        """From here on tokens are written as soon as they are allocated, or by the next `forward`."""
        self.launches = launches

    def _forward(self, slots: list[int], side: bool = False) -> None:
        with self.on(side):
            for holding, handle in ((self.model.requests[slot], self.held[slot]) for slot in slots):
                length, written = len(holding.stamps), holding.written
                self.reached("written on one stream and read on another", written > 0 and side is not holding.side)
                self.pages.writes.launched(handle.np, np.array([length]), np.array([written]))
                self._launch(holding, length, side)

    def _launch(self, holding: Holding, length: int, side: bool = False) -> None:
        """Reads the tokens that are written, and writes those up to `length`."""
        for position in range(holding.front * self.pages.page_size, length):
            written = position < holding.written
            self.use_kv(self.model.location(holding, position), None if written else holding.stamps[position])
        holding.written, holding.side = length, side

    def _allowed(self, slots: list[int], lengths: list[int], call: Callable[[], object], *, writes: bool) -> bool:
        """Whether a call that grows requests is to be refused; if so, it is tried."""
        pairs = list(zip(slots, lengths, strict=True))
        free, pending = self.pages.stats.free, self.pages.stats.pending
        lacks = sum(self.model.lacks(slot, length) for slot, length in pairs)
        if any(length > self.most for length in lengths):
            self.reached("a request too long refused")
            with self.refused(Code.LENGTH_ORDER):
                call()
        elif writes and not all(self.model.writable(slot, length) for slot, length in pairs):
            with self.refused(Code.PAGE_OWNER):
                call()
        elif lacks > free:
            waits = lacks <= free + pending
            self.reached(EXHAUSTED[waits])
            with self.refused(PoolExhaustedError):
                call()
        else:
            return True
        return False

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def grow(self, data: st.DataObject, length: int) -> None:
        """Pages are allocated, and no token is committed."""
        self._grow(self.some(data), length)

    def _grow(self, slots: list[int], length: int) -> None:
        def call() -> None:
            self.pages.grow(self.handles(slots), length)

        if self._allowed(slots, [length] * len(slots), call, writes=False):
            call()
            for slot in slots:
                self.model.grew(slot)

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow_and_commit(self, data: st.DataObject, more: int) -> None:
        """Pages first; the tokens are committed when they are known, and perhaps fewer."""
        slot = self.some(data)[0]
        length = min(self.most, len(self.model.requests[slot].stamps) + more)
        self._grow([slot], length)
        self._commit(slot, length - more // 2)

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def commit(self, data: st.DataObject, length: int) -> None:
        """What is allocated is committed; what is not, and fewer than before, is refused."""
        self._commit(self.some(data)[0], length)

    def _commit(self, slot: int, length: int) -> None:
        holding = self.model.requests[slot]
        handle = self.held[slot]
        fits = len(holding.stamps) <= length <= min(self.most, len(holding.pages) * self.pages.page_size)
        if not fits or not self.model.writable(slot, length):
            with self.refused(Code.LENGTH_ORDER if not fits else Code.PAGE_OWNER):
                self.pages.commit(handle, length)
            return
        self.reached("allocated first and committed later", length > len(holding.stamps))
        self.pages.commit(handle, length)
        self.model.write(holding, length)
        self._launch(holding, length)

    @HAS_REQUESTS
    @rule(data=st.data(), back=st.integers(0, 4))
    def truncate(self, data: st.DataObject, back: int) -> None:
        """Tokens are taken back after rejected speculation."""
        slots, fence = self.some(data), self.fence(data)
        self.settle()
        lengths = [max(0, len(self.model.requests[slot].stamps) - back) for slot in slots]
        first = [self.model.requests[slot].front * self.pages.page_size for slot in slots]
        if any(length < least for length, least in zip(lengths, first, strict=True)):
            with self.refused(Code.LENGTH_ORDER):
                self.pages.truncate(self.handles(slots), np.array(lengths, dtype=np.int64), after=fence)
            return
        self.pages.truncate(self.handles(slots), np.array(lengths, dtype=np.int64), after=fence)
        for slot, length in zip(slots, lengths, strict=True):
            self.model.cut(slot, length, fence)
        self.reached("tokens taken back", back > 0 and bool(slots))

    @HAS_REQUESTS
    @rule(data=st.data(), drafts=st.integers(1, 3), accepted=st.integers(0, 3))
    def speculate(self, data: st.DataObject, drafts: int, accepted: int) -> None:
        """Extend by drafts, launch, take the rejected ones back, extend again."""
        slots = self.some(data)
        before = [len(self.model.requests[slot].stamps) for slot in slots]
        if self.extend_to(slots, [length + drafts for length in before]):
            fence = self.steps.record()
            self.settle()
            kept = np.array([length + min(accepted, drafts) for length in before], dtype=np.int64)
            self.pages.truncate(self.handles(slots), kept, after=fence)
            for slot, length in zip(slots, kept.tolist(), strict=True):
                self.model.cut(slot, length, fence)
            self.extend_to(slots, [length + 1 for length in kept.tolist()])

    @HAS_REQUESTS
    @rule(data=st.data(), window=st.integers(1, 3), back=st.integers(0, 1), leave=st.booleans())
    def slide(self, data: st.DataObject, window: int, back: int, leave: bool) -> None:
        """A request goes on, and what lies before its window is given back, at times with a rejected token behind."""
        slots, fence = self.some(data)[:1], self.fence(data)
        for length in range(len(self.model.requests[slots[0]].stamps) + 1, self.most + 1):
            self.extend_to(slots, [length])
        self.settle()
        totals = [max(0, len(self.model.requests[slot].stamps) - back) for slot in slots]
        firsts = [max(0, total - window) for total in totals]
        least = [self.model.requests[slot].front * self.pages.page_size for slot in slots]
        if any(total < one for total, one in zip(totals, least, strict=True)):
            return
        ends = {"total_lens": np.array(totals)} if back else {}
        self.pages.truncate(self.handles(slots), **ends, first=np.array(firsts), after=fence)
        for slot, total, first in zip(slots, totals, firsts, strict=True):
            self.model.cut(slot, total, fence)
            self.model.slide(slot, first, fence)
            front = self.model.requests[slot].front * self.pages.page_size
            agree(front, int(self.pages.first_positions(self.held[slot])[0]), f"first position of slot {slot}")
            self.reached("pages before a window given back", front > 0)
            self._forward([slot])
            if front:
                self.reached("truncated into what was given back refused")
                with self.refused(Code.LENGTH_ORDER):
                    self.pages.truncate(self.held[slot], front - 1)
                with self.refused(Code.PAGE_RELEASED):
                    self.pages.hold(self.held[slot], self.pages.page_size)
                with self.refused(Code.PAGE_RELEASED):
                    self.pages.locations(self.held[slot], front - 1, total)
                agree(total - front, len(self.pages.locations(self.held[slot], front, total)), "tokens in the window")
        if leave:
            self._finish(slots, None)

    @HAS_REQUESTS
    @rule(data=st.data(), window=st.integers(1, 4), leave=st.booleans())
    def map_to_window(self, data: st.DataObject, window: int, leave: bool) -> None:
        """A chain of tables: the second pool has the same tokens, then those of a window alone; a map names them."""
        slot = self.some(data)[0]
        handle, holding = self.held[slot], self.model.requests[slot]
        self.extend_to([slot], [max(len(holding.stamps), min(self.most, window + self.pages.page_size))])
        length = len(holding.stamps)
        if holding.front or any(self.model.holders(page) > 1 for page in holding.pages) or not length:
            return
        self._commit(slot, length)
        self.swa.release(handle)
        places = self.swa.extend(handle, length).locations
        here = self.pages.locations(handle, 0, length)
        self.full_to_swa.entry(here, None, places).launch()
        states = self.swa.pages_of(handle)
        self.swa_to_state.write(states, None, states.np + 100)
        with self.refused(ArgumentError):
            self.full_to_swa.entry(here, None, here)
        with self.refused(Code.SLOT_OUT_OF_RANGE):
            self.full_to_swa.entry(here, None, np.full(length, self.swa.location_capacity))
        self._check_chain(slot, 0)
        self.reached("a map to another pool read")
        first = max(0, length - window)
        self.swa.truncate(handle, first=first)
        gone = int(self.swa.first_positions(handle)[0])
        self._clear_map(here.filter(np.arange(gone)))
        self.reached("a map cleared where a window moved on", gone > 0)
        self._check_chain(slot, gone)
        if leave:
            self._finish([slot], None)

    def _clear_map(self, gone: Locations) -> None:
        if len(gone):
            self.full_to_swa.clear(gone)

    def _check_chain(self, slot: int, first: int) -> None:
        """Position -> location -> location in the window -> state, through the tables, ends where the pools say."""
        handle, holding, size = self.held[slot], self.model.requests[slot], self.pages.page_size
        if not levels.full:
            return
        full = np.array([self.model.location(holding, position) for position in range(len(holding.stamps))])
        found = self.rt.inspect(self.full_to_swa.device_for(self.pages.locations(handle, 0, full.size)))[full]
        row, at = self.swa.page_table[slot].astype(np.int64), np.arange(full.size)
        agree_on(np.where(at < first, 0, row[at // size] * size + at % size).astype(np.int32), found, "a map")
        states = self.rt.inspect(self.swa_to_state.device_for(self.swa.pages_of(handle)))[found[first:] // size]
        agree_on((row[at // size] + 100)[first:].astype(np.int32), states, "states at the end of a chain")

    # Sharing

    @rule(n=st.integers(0, 3))
    def take_pages(self, n: int) -> None:
        """KV arrives on pages that no request has yet; if too few are free, nothing is taken."""
        stats = self.pages.stats
        if n > stats.free:
            self.reached(EXHAUSTED[n <= stats.free + stats.pending])
            with self.refused(PoolExhaustedError):
                self.pages.take(n)
            return
        self.model.take(self.pages.take(n))
        if self.launches:
            self._arrive(*self.model.leases[-1], False)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), side=st.booleans())
    def arrive(self, data: st.DataObject, side: bool) -> None:
        """KV arrives on the pages of a lease, on one of the two streams."""
        self._arrive(*data.draw(st.sampled_from(self.model.leases), label="lease"), side)

    def _arrive(self, lease: PageLease, holding: Holding, side: bool) -> None:
        with self.on(side):
            self.pages.commit(lease, lease.tokens)
            self._launch(holding, lease.tokens, side)

    @HAS_REQUESTS
    @rule(data=st.data(), pages=st.integers(0, 3), n=st.integers(1, 2))
    def share(self, data: st.DataObject, pages: int, n: int) -> None:
        """New requests begin with whole pages of another's prefix."""
        slot = self.some(data)[0]
        self._share(self.held[slot], self.model.requests[slot], pages, n)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), n=st.integers(1, 2))
    def share_cached(self, data: st.DataObject, n: int) -> None:
        """New requests begin with a prefix that is held for them."""
        lease, holding = data.draw(st.sampled_from(self.model.leases), label="lease")
        if not self.slots.stats.free and self.held:
            self._finish([list(self.held)[-1]], None)
        shared = self._share(lease, holding, 9, n) > 0
        self.reached("begun on pages taken before" if holding.taken else "a prefix shared from a lease", shared)

    def _share(self, source: Slots | PageLease, holding: Holding, pages: int, n: int) -> int:
        tokens = min(pages, len(holding.stamps) // self.pages.page_size) * self.pages.page_size
        slots = self.take(n)
        if not slots:
            return 0
        if tokens and holding.front:
            self.reached("a prefix that was given back refused")
            with self.refused(Code.PAGE_RELEASED):
                self.pages.share(source, self.handles(slots), tokens)
            tokens = 0
        if tokens > holding.written:
            if levels.cheap:
                self.reached("shared before it is written refused")
                with self.refused(Code.PAGE_UNWRITTEN):
                    self.pages.share(source, self.handles(slots), tokens)
            tokens = holding.written // self.pages.page_size * self.pages.page_size
        extension = self.pages.share(source, self.handles(slots), tokens)
        for slot in slots:
            self.model.share(holding, slot, tokens)
        expected = [self.model.location(holding, position) for position in range(tokens)] * len(slots)
        agree(expected, extension.locations.np.tolist(), "locations of a shared prefix")
        self.extend_to(slots, [min(tokens + 1, self.most)] * len(slots))
        return tokens

    @HAS_REQUESTS
    @rule(
        data=st.data(), more=st.integers(0, 2), then=st.sampled_from(["write on", "take one back and write", "leave"])
    )
    def hold(self, data: st.DataObject, more: int, then: str) -> None:
        """A prefix cache keeps what a request has in whole pages; the request goes on, or leaves."""
        slot = self.some(data)[0]
        holding, size = self.model.requests[slot], self.pages.page_size
        self.extend_to([slot], [min(max(size, len(holding.stamps)) + more, self.most)])
        pages = len(holding.stamps) // size
        if pages and holding.front:
            with self.refused(Code.PAGE_RELEASED):
                self.pages.hold(self.held[slot], pages * size)
            return
        if pages * size > holding.written:
            if levels.cheap:
                with self.refused(Code.PAGE_UNWRITTEN):
                    self.pages.hold(self.held[slot], pages * size)
            self._forward([slot])
        lease = self.pages.hold(self.held[slot], pages * size)
        held = Holding(holding.pages[:pages], holding.stamps[: pages * size], written=pages * size, side=holding.side)
        self.model.leases.append((lease, held))
        if then == "leave":
            self._finish([slot], self.fence(data))
            return
        length = len(holding.stamps)
        if then != "write on":
            length = max(0, length - 1 if length % size else pages * size - 1)
            self.settle()
            self.pages.truncate(self.held[slot], length)
            self.model.cut(slot, length, None)
        self.extend_to([slot], [min(length + 1, self.most)])

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        """The cache forgets a prefix, once."""
        at = data.draw(st.integers(0, len(self.model.leases) - 1), label="lease")
        fence = self.fence(data)
        self.settle()
        lease, holding = self.model.leases.pop(at)
        lease.release(after=fence)
        self.model.drop(holding.pages, fence)
        with self.refused(Code.SLOT_DOUBLE_FREE):
            lease.release()

    # Leaving

    @HAS_REQUESTS
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: st.DataObject, late: bool) -> None:
        """Requests leave with pages and slot, behind a step; a second exit is refused."""
        slots = self.some(data)
        self._finish(slots, self.fence(data))
        if late:
            with self.refused(Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE):
                self.pages.release_requests(self.gone[-1])

    def _finish(self, slots: list[int], fence: ManualFence | None) -> None:
        self.settle()
        owned = sum(page > 0 for slot in slots for page in self.model.requests[slot].pages)
        if owned:
            with self.refused(Code.SLOT_CONSERVATION):
                self.slots.free(self.handles(slots), after=fence)
        self.pages.release_requests(self.handles(slots), after=fence)
        for slot in slots:
            self.gone.append(self.held.pop(slot))
            self.model.release(slot, fence)
        behind = fence is not None and fence is not self.steps.last and owned > 0
        self.reached("released behind step N while N+1 is in flight", behind)

    @precondition(lambda self: not self.cleared)
    @rule(behind=st.booleans())
    def clear(self, behind: bool) -> None:
        """Both pools begin anew, once: requests and leases are gone; refused while something waits for a step."""
        self.settle()
        if behind and self.held:
            self._finish([next(iter(self.held))], self.steps.record())
        if self.slots.stats.pending or self.pages.stats.pending:
            self.reached("clearing behind a step in flight refused")
            with self.refused(Code.SLOT_IN_FLIGHT):
                self.slots.clear()
        self.steps.complete(self.steps.depth)
        self.slots.clear()
        self.cleared = True
        self.reached("cleared with a lease and a request", bool(self.model.leases and self.held))
        for slot in list(self.held):
            self.gone.append(self.held.pop(slot))
            self.model.release(slot, None)
        while self.model.leases:
            lease, holding = self.model.leases.pop()
            self.model.drop(holding.pages, None)
            with self.refused(Code.SLOT_DOUBLE_FREE):
                lease.release()
        slots = self.take(2)
        self.extend_to(slots, [self.pages.page_size] * 2)
        found = slots, [self.model.requests[slot].pages for slot in slots]
        agree(([1, 2], [[1], [2]]), found, "slots and pages after a clear")

    @HAS_REQUESTS
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Requests give their pages back and keep their slots."""
        slots, fence = self.some(data), self.fence(data)
        self.settle()
        self.pages.release(self.handles(slots), after=fence)
        for slot in slots:
            self.model.cut(slot, 0, fence)

    @HAS_REQUESTS
    @rule(more=st.integers(2, 6))
    def retract_under_pressure(self, more: int) -> None:
        """All grow; while pages run out the youngest leaves behind a step, which ends, and the oldest grows on."""
        oldest, *others = self.held
        for slot in others:
            self._grow([slot], self.most)
        length = min(self.most, len(self.model.requests[oldest].stamps) + more)
        while not self.extend_to([oldest], [length]) and len(self.held) > 1:
            fence = self.steps.record()
            self.steps.record()
            self._finish([list(self.held)[-1]], fence)
            self.extend_to([oldest], [length])  # the pages are pending still
            self.steps.complete_until(fence)
            self.reached("retraction")
            length = max(length, len(self.model.requests[oldest].stamps))

    @rule()
    def prefill_apart(self) -> None:
        """A prompt is written on the second stream, and a request that begins with it runs on the first at once."""
        slots = self.take(1) if self.slots.stats.free > 1 else []
        launches, self.launches = self.launches, False
        grown = slots and self.extend_to(slots, [self.pages.page_size])
        self.launches = launches
        if grown:
            self._forward(slots, side=True)
            if self._share(self.held[slots[0]], self.model.requests[slots[0]], 1, 1):
                self._forward([list(self.held)[-1]])

    @HAS_REQUESTS
    @rule()
    def leave_apart(self) -> None:
        """Two share a page; the first leaves behind a step in flight, the second behind none: the page waits."""
        first = next(iter(self.held))
        self.extend_to([first], [max(self.pages.page_size, len(self.model.requests[first].stamps))])
        if self._share(self.held[first], self.model.requests[first], 1, 1):
            second = list(self.held)[-1]
            if self.pages.page_size > 1:  # the rest of a page that both hold is not written
                self.pages.truncate(self.held[second], 1)
                self.model.cut(second, 1, None)
                self.extend_to([second], [2])
            self._finish([first], self.steps.record())
            self._finish([second], None)

    # Misuse

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles of requests that left are refused everywhere."""
        late = self.gone[-min(back, len(self.gone))]
        for call in (
            lambda: self.pages.extend(late, 1),
            lambda: self.pages.advance(late),
            lambda: self.pages.truncate(late, 0),
            lambda: self.pages.release(late),
            lambda: self.pages.committed(late),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()
