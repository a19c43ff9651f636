"""`PagePool` against a memory of stamps: growing, speculation, shared prefixes, fenced releases, exhaustion."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Code, levels
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.kv.pages import Extension, PagePool
from batchstate.mirror import Handles, Locations, Slots
from batchstate.testing.fences import ManualFence
from tests import refusals
from tests.selfcheck.machine import STALE, agree, agree_on
from tests.selfcheck.machines.pools import HAS_REQUESTS, KVOwner, PagesMachine, TableModel

T = TypeVar("T")

_NAMED = 12  # rows kept of pages that were given out lately


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
        "pages before a window given back",
        "truncated into what was given back refused",
        "a prefix that was given back refused",
        "a map cleared where a window moved on",
        "exhausted while pending would suffice",
        "exhausted for good",
        "released behind step N while N+1 is in flight",
        "retraction",
        "a row of the last owner refused",
        "rows read",
        "a page written to its end",
        "handles of pages that were given back refused",
        "shared before it is written refused",
        "written on one stream and read on another",
        "cleared with a lease and a request",
        "clearing behind a step in flight refused",
        "a guess held refused",
        "memory that was lost begins anew",
        "a prefix without the draft model's KV refused",
    )
    MISUSES = refusals.PAGES

    @initialize(size=st.integers(2, 4), num_pages=st.integers(3, 8), page_size=st.integers(1, 3))
    def begin(self, size: int, num_pages: int, page_size: int) -> None:
        self.open_pages(size, num_pages, page_size, 4 * page_size - (page_size > 1))
        self.table = self.slots.table("req_to_token", (self.most,), holds="location", host=True)
        tensor = self.rt.device_zeros((self.pages.location_capacity,), torch.int64)
        self.by_location = TableModel(self.pages.adopt(tensor, "by location", by="location"))
        self.swa = PagePool(self.rt, self.slots, 5 * size, page_size, max_tokens_per_request=self.most, name="swa")
        self.full_to_swa = self.pages.table("full_to_swa", (), torch.int32, of=self.swa)
        self.swa_to_state = self.swa.table("swa_to_state", (), torch.int32, by="page")
        self.by_page = TableModel(self.pages.table("by page", (), torch.int64, by="page", host=True))
        self.named: list[tuple[TableModel, Handles]] = []  # rows that were given to a request
        self.settle()
        self.launches, self.cleared = True, False
        self.stamp = 0
        self.rooms: dict[int, int] = {}  # slot -> pages that it has had, those before its window included
        self.gone: list[Slots] = []
        self.extend_to(self.take(1), [page_size])

    def check(self) -> None:
        super().check()
        for slot, holder in self.requests.items():
            agree(len(holder.tokens), int(self.pages.committed(holder.owner)[0]), f"committed tokens of slot {slot}")
            allocated = self.rooms[slot] * self.pages.page_size
            agree(allocated, int(self.pages.allocated(holder.owner)[0]), f"allocated tokens of slot {slot}")
            agree(allocated - holder.first, len(self.pages_of(holder)) * self.pages.page_size, f"pages of slot {slot}")
        stats = self.pages.stats
        if not self.steps.depth:
            agree(0, stats.pending, "pages pending when no step is in flight")
        if stats.live:
            self.refused(Code.SLOT_CONSERVATION, self.pages.expect_idle)
        self.reached("a page held by three", any(n > 2 for n in self.held_pages().values()))

    def handles(self, slots: list[int]) -> Slots:
        return Slots.cat([self.requests[slot].owner for slot in slots]) if slots else self.slots.take(0)

    def some(self, data: st.DataObject, least: int = 1) -> list[int]:
        return data.draw(st.lists(st.sampled_from(list(self.requests)), min_size=least, unique=True), label="slots")

    def misused(self, data: st.DataObject) -> refusals.PageCase | None:
        return (self.pages, self.requests[self.some(data)[0]].owner) if self.requests else None

    def _lengths(self, slots: list[int], more: int) -> list[int]:
        return [max(0, len(self.requests[slot].tokens) + more) for slot in slots]

    def _write(self, holder: KVOwner, length: int) -> range:
        """Gives each token up to `length` a stamp of its own; their positions."""
        positions = range(len(holder.tokens), length)
        self.put(holder, [self.stamp + 1 + at for at in range(len(positions))])
        self.stamp += len(positions)
        return positions

    def _writable(self, slots: list[int], lengths: list[int]) -> bool:
        """Whether the next token of each, up to its length, lies on a page without another holder."""
        held, size = self.held_pages(), self.pages.page_size
        for holder, length in zip((self.requests[slot] for slot in slots), lengths, strict=True):
            start = len(holder.tokens)
            if length > start and start % size and held[self.pages_of(holder)[(start - holder.first) // size]] > 1:
                return False
        return True

    # Slots

    @rule(n=st.integers(1, 2), length=st.integers(0, 6))
    def admit(self, n: int, length: int) -> None:
        slots = self.take(n)
        self.extend_to(slots, [length] * len(slots))

    def take(self, n: int) -> list[int]:
        """Takes up to `n` slots, without pages; their numbers."""
        n = min(n, self.slots.stats.free)
        taken = self.slots.take(n)
        for at, slot in enumerate(taken.np.tolist()):
            self.requests[slot], self.rooms[slot] = KVOwner(taken.take([at])), 0
        return [int(slot) for slot in taken.np]

    # Growing

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(0, 3))
    def extend(self, data: st.DataObject, more: int) -> None:
        """Requests get tokens, or all are refused: too long, too many pages, or on a page that others hold."""
        slots = self.some(data)
        self.extend_to(slots, self._lengths(slots, more))

    def extend_to(self, slots: list[int], lengths: list[int]) -> bool:
        """Extends requests, or finds the call refused as it has to be. Whether it went through."""
        return self._grown(slots, lengths, lambda: self.pages.extend(self.handles(slots), np.array(lengths, np.int64)))

    @HAS_REQUESTS
    @rule(data=st.data(), counts=st.lists(st.integers(0, 2), min_size=4, max_size=4), single=st.booleans())
    def advance(self, data: st.DataObject, counts: list[int], single: bool) -> None:
        """A decode step: one token each, or some more."""
        slots = self.some(data)
        more = [1] * len(slots) if single else counts[: len(slots)]
        lengths = [len(self.requests[slot].tokens) + n for slot, n in zip(slots, more, strict=True)]
        n = 1 if single else np.array(more, dtype=np.int64)
        self._grown(slots, lengths, lambda: self.pages.advance(self.handles(slots), n))

    def _grown(self, slots: list[int], lengths: list[int], call: Callable[[], Extension]) -> bool:
        """Runs a call that extends, and compares it with the model. Whether it went through."""
        self.reached("a write into a shared page refused", not self._writable(slots, lengths))
        extension = self._allowed(slots, lengths, call, writes=True)
        if extension is None:
            return False
        agree_on(np.diff([0, *np.cumsum(extension.counts)]), extension.counts, "counts")
        expected: list[tuple[int, int, int]] = []
        for slot, length in zip(slots, lengths, strict=True):
            holder = self.requests[slot]
            expected += [(slot, at, self.location(holder, at)) for at in self._write(holder, length)]
        columns = (extension.slots, extension.positions, extension.locations.np)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        agree(expected, rows, "slot, position and location of an extension")
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
        """Each row has its new tokens, and the rest of a page that began with one of them."""
        size = self.pages.page_size
        for slot, n in zip(slots, counts, strict=True):
            if n:
                holder = self.requests[slot]
                length = stop = len(holder.tokens)
                if (length - 1) % size < n:
                    stop = min(-(-length // size) * size, self.most)
                row = self.table.host_for(holder.owner)[0]
                expected = [self.location(holder, position) for position in range(length - n, stop)]
                agree(expected, row[length - n : stop].tolist(), f"row of slot {slot}")
                self.reached("a page written to its end", stop > length)

    def _name_rows(self, extension: Extension) -> None:
        """Rows of new tokens are read too early, then written, or by their next owner; older ones are read too."""
        new: list[tuple[TableModel, Handles]] = [
            (self.by_location, extension.locations),
            (self.by_page, self.pages.pages_of(extension.owners.take([0]))),
        ]
        for table, handles in new:
            self._use_rows(table, handles, writes=False)
            if self.stamp % 3:
                self._use_rows(table, handles, writes=True)
        if self.named:
            self._use_rows(*self.named[self.stamp % len(self.named)], writes=False)
        self.named = [*self.named[-_NAMED:], *new]

    def _use_rows(self, model: TableModel, handles: Handles, *, writes: bool) -> None:
        """Rows by page and by location belong to the holder of the page; the next owner finds them unwritten."""
        numbers = handles._host_side()  # whoever has them by now
        held, pages = self.held_pages(), numbers // (self.pages.page_size if model is self.by_location else 1)
        ours = zip(pages.tolist(), handles.generations.tolist(), strict=True)
        good = all(page in held and self.generations[page] == generation for page, generation in ours)
        if not good:
            self.reached("handles of pages that were given back refused")
            self.refused(Code.SLOT_STALE_HANDLE, lambda: model.table.clear(handles), lambda: handles.np)
        if good and writes:
            self.stamp += 1
            values = self.stamp * 100 + np.arange(len(handles))
            model.table.write(handles, None, values)
            model.write(handles, None, values)
        else:
            self.read_rows(model, handles, good)

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
            for holder in (self.requests[slot] for slot in slots):
                length, written = len(holder.tokens), holder.written
                self.pages.writes.launched(holder.owner.np, np.array([length]), np.array([written]))
                self.launch_forward(holder, length, side)

    def _allowed(self, slots: list[int], lengths: list[int], call: Callable[[], T], *, writes: bool) -> T | None:
        """The result of a call that grows requests; None where it is refused, as it has to be."""
        before = [self.pages_of(self.requests[slot]) for slot in slots]
        if any(length > self.most for length in lengths):
            self.reached("a request too long refused")
            self.refused(Code.LENGTH_ORDER, call)
            return None
        if writes and not self._writable(slots, lengths):
            self.refused(Code.PAGE_OWNER, call)
            return None
        result = self._tried(call)
        if result is not None:
            for slot, length, older in zip(slots, lengths, before, strict=True):
                pages = self.pages_of(self.requests[slot])
                agree(older, pages[: len(older)], f"older pages of slot {slot}")
                self.taken(pages[len(older) :])
                self.rooms[slot] = max(self.rooms[slot], -(-length // self.pages.page_size))
        return result

    def _tried(self, call: Callable[[], T]) -> T | None:
        """The result of a call; None where too few pages are free, and then nothing has changed."""
        before = self.snapshot()
        try:
            return call()
        except PoolExhaustedError as error:
            helps = error.requested <= error.free + error.pending
            self.reached("exhausted while pending would suffice" if helps else "exhausted for good")
            agree(True, error.requested > error.free == self.pages.stats.free, "whether too few pages are free")
            agree(before, self.snapshot(), "a refused call changed something")
            return None

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def grow(self, data: st.DataObject, length: int) -> None:
        """Pages are allocated, and no token is committed."""
        self._grow(self.some(data), length)

    def _grow(self, slots: list[int], length: int) -> None:
        def grow() -> bool:
            self.pages.grow(self.handles(slots), length)
            return True

        self._allowed(slots, [length] * len(slots), grow, writes=False)

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow_and_commit(self, data: st.DataObject, more: int) -> None:
        """Pages first; the tokens are committed when they are known, and perhaps fewer."""
        slot = self.some(data)[0]
        length = min(self.most, len(self.requests[slot].tokens) + more)
        self._grow([slot], length)
        self._commit(slot, length - more // 2)

    @HAS_REQUESTS
    @rule(data=st.data(), length=st.integers(0, 8))
    def commit(self, data: st.DataObject, length: int) -> None:
        """Allocated tokens are committed; others, and fewer than before, are refused."""
        self._commit(self.some(data)[0], length)

    def _commit(self, slot: int, length: int) -> None:
        holder = self.requests[slot]
        handle = holder.owner
        fits = len(holder.tokens) <= length <= min(self.most, self.rooms[slot] * self.pages.page_size)
        if not fits or not self._writable([slot], [length]):
            self.refused(Code.LENGTH_ORDER if not fits else Code.PAGE_OWNER, lambda: self.pages.commit(handle, length))
            return
        self.reached("allocated first and committed later", length > len(holder.tokens))
        self.pages.commit(handle, length)
        self._write(holder, length)
        self.launch_forward(holder, length)

    @HAS_REQUESTS
    @rule(data=st.data(), back=st.integers(0, 4))
    def truncate(self, data: st.DataObject, back: int) -> None:
        slots, fence = self.some(data), self.fence(data)
        self.settle()
        handles, lengths = self.handles(slots), self._lengths(slots, -back)
        if any(length < self.requests[slot].first for slot, length in zip(slots, lengths, strict=True)):
            self.refused(Code.LENGTH_ORDER, lambda: self.pages.truncate(handles, np.array(lengths), after=fence))
            return
        self._cut(slots, lengths, fence)

    def _cut(self, slots: list[int], lengths: list[int], fence: ManualFence | None) -> None:
        """Takes back tokens, and the pages beyond them."""
        ones = [self.requests[slot] for slot in slots]
        with self.giving_back(ones, fence):
            self.pages.truncate(self.handles(slots), np.array(lengths, np.int64), after=fence)
            for slot, holder, length in zip(slots, ones, lengths, strict=True):
                del holder.tokens[length:]
                holder.written = min(holder.written, length)
                self.rooms[slot] = -(-length // self.pages.page_size)

    @HAS_REQUESTS
    @rule(data=st.data(), drafts=st.integers(1, 3), accepted=st.integers(0, 3))
    def speculate(self, data: st.DataObject, drafts: int, accepted: int) -> None:
        slots = self.some(data)
        before = self._lengths(slots, 0)
        if self.extend_to(slots, [length + drafts for length in before]):
            self.pages.guess(self.handles(slots).np, np.array(before) + 1)  # as at the entry of a forward
            fence = self.steps.record()
            self.settle()
            owner, size = self.requests[slots[0]].owner, self.pages.page_size
            guessed = (before[0] + drafts) // size * size
            if guessed > before[0] + 1 and not self.requests[slots[0]].first:
                self.reached("a guess held refused")
                self.refused(Code.LENGTH_ORDER, lambda: self.pages.hold(owner, guessed))
            stay = [length + min(accepted, drafts) for length in before]
            self._cut(slots, stay, fence)
            self.pages.accept(self.handles(slots), np.array(stay))
            self.extend_to(slots, self._lengths(slots, 1))

    @HAS_REQUESTS
    @rule(data=st.data(), window=st.integers(1, 3), back=st.integers(0, 1), leave=st.booleans())
    def slide(self, data: st.DataObject, window: int, back: int, leave: bool) -> None:
        """A request goes on, and pages before its window are given back, at times with a rejected token behind."""
        slots, fence = self.some(data)[:1], self.fence(data)
        (slot,) = slots
        holder, size = self.requests[slot], self.pages.page_size
        for length in range(len(holder.tokens) + 1, self.most + 1 - (0 if back else size)):
            self.extend_to(slots, [length])
        if not back:
            self._grow(slots, self.most)  # pages behind the window are the request's still
        self.settle()
        total = max(0, len(holder.tokens) - back)
        first = max(0, total - window)
        if total < holder.first:
            return
        ends = {"total_lens": total} if back else {}
        with self.giving_back([holder], fence):
            self.pages.truncate(holder.owner, **ends, first=first, after=fence)
            del holder.tokens[total:]
            holder.written = min(holder.written, total)
            self.rooms[slot] = -(-total // size) if back else self.rooms[slot]
            holder.first = max(holder.first, first // size * size)
        agree(holder.first, int(self.pages.first_positions(holder.owner)[0]), f"first position of slot {slot}")
        if not back and self.rooms[slot] * size > total:
            self._commit(slot, total + 1)
            total = len(holder.tokens)
        self.reached("pages before a window given back", holder.first > 0)
        self._forward([slot])
        if holder.first:
            self.reached("truncated into what was given back refused")
            self.refused(Code.LENGTH_ORDER, lambda: self.pages.truncate(holder.owner, holder.first - 1, after=None))
            self.refused(Code.PAGE_RELEASED, lambda: self.pages.hold(holder.owner, size))
            self.refused(Code.PAGE_RELEASED, lambda: self.pages.locations(holder.owner, holder.first - 1, total))
            agree(
                total - holder.first,
                len(self.pages.locations(holder.owner, holder.first, total)),
                "tokens in the window",
            )
        if leave:
            self._finish(slots, None)

    @HAS_REQUESTS
    @rule(data=st.data(), window=st.integers(1, 4), leave=st.booleans())
    def map_to_window(self, data: st.DataObject, window: int, leave: bool) -> None:
        """A chain of tables: the second pool has the same tokens, then those of a window alone; a map names them."""
        slot = self.some(data)[0]
        holder, held = self.requests[slot], self.held_pages()
        handle = holder.owner
        self.extend_to([slot], [max(len(holder.tokens), min(self.most, window + self.pages.page_size))])
        length = len(holder.tokens)
        if holder.first or any(held[page] > 1 for page in self.pages_of(holder)) or not length:
            return
        self._commit(slot, length)
        self.swa.release(handle, after=None)
        places = self.swa.extend(handle, length).locations
        here = self.pages.locations(handle, 0, length)
        self.full_to_swa.entry(here, None, places).launch()
        states = self.swa.pages_of(handle)
        self.swa_to_state.write(states, None, states.np + 100)
        self.refused(ArgumentError, lambda: self.full_to_swa.entry(here, None, here))
        beyond = np.full(length, self.swa.location_capacity)
        self.refused(Code.SLOT_OUT_OF_RANGE, lambda: self.full_to_swa.entry(here, None, beyond))
        self._check_chain(slot, 0)
        first = max(0, length - window)
        self.swa.truncate(handle, first=first, after=None)
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
        holder, size = self.requests[slot], self.pages.page_size
        if not levels.full:
            return
        full = np.array([self.location(holder, position) for position in range(len(holder.tokens))])
        places = self.rt.inspect(self.full_to_swa.device_for(self.pages.locations(holder.owner, 0, full.size)))[full]
        row, at = self.swa.page_table[slot].astype(np.int64), np.arange(full.size)
        agree_on(np.where(at < first, 0, row[at // size] * size + at % size).astype(np.int32), places, "a map")
        states = self.rt.inspect(self.swa_to_state.device_for(self.swa.pages_of(holder.owner)))[places[first:] // size]
        agree_on((row[at // size] + 100)[first:].astype(np.int32), states, "states at the end of a chain")

    # Sharing

    @rule(n=st.integers(0, 3))
    def take_pages(self, n: int) -> None:
        """KV arrives on pages that no request has yet; if too few are free, nothing is taken."""
        lease = self._tried(lambda: self.pages.take(n))
        if lease is not None:
            holder = KVOwner(lease, taken=True)
            self.taken(lease.pages.tolist())
            self._write(holder, lease.tokens)
            self.leases.append(holder)
            if self.launches:
                self._arrive(holder, False)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), side=st.booleans())
    def arrive(self, data: st.DataObject, side: bool) -> None:
        self._arrive(data.draw(st.sampled_from(self.leases), label="lease"), side)

    def _arrive(self, holder: KVOwner, side: bool) -> None:
        with self.on(side):
            self.pages.commit(holder.owner, len(holder.tokens))
            self.launch_forward(holder, len(holder.tokens), side)

    @HAS_REQUESTS
    @rule(data=st.data(), pages=st.integers(0, 3), n=st.integers(1, 2))
    def share(self, data: st.DataObject, pages: int, n: int) -> None:
        self._share(self.requests[self.some(data)[0]], pages, n)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), n=st.integers(1, 2))
    def share_cached(self, data: st.DataObject, n: int) -> None:
        """New requests begin with a prefix that is held for them."""
        lease = data.draw(st.sampled_from(self.leases), label="lease")
        if not self.slots.stats.free and self.requests:
            self._finish([list(self.requests)[-1]], None)
        shared = self._share(lease, 9, n) > 0
        self.reached("begun on pages taken before" if lease.taken else "a prefix shared from a lease", shared)

    def _share(self, source: KVOwner, pages: int, n: int) -> int:
        size = self.pages.page_size
        tokens = min(pages, len(source.tokens) // size) * size
        slots = self.take(n)
        if not slots:
            return 0
        if tokens and source.first:
            self.reached("a prefix that was given back refused")
            self.refused(Code.PAGE_RELEASED, lambda: self.pages.share(source.owner, self.handles(slots), tokens))
            tokens = 0
        if tokens > source.written:
            if levels.cheap:
                self.reached("shared before it is written refused")
                self.refused(Code.PAGE_UNWRITTEN, lambda: self.pages.share(source.owner, self.handles(slots), tokens))
            tokens = source.written // size * size
        extension = self.pages.share(source.owner, self.handles(slots), tokens)
        for slot in slots:
            holder, self.rooms[slot] = self.requests[slot], tokens // size
            holder.tokens, holder.written, holder.side = source.tokens[:tokens], tokens, source.side
        expected = [self.location(source, position) for position in range(tokens)] * len(slots)
        agree(expected, extension.locations.np.tolist(), "locations of a shared prefix")
        self.extend_to(slots, [min(tokens + 1, self.most)] * len(slots))
        return tokens

    @HAS_REQUESTS
    @rule(
        data=st.data(), more=st.integers(0, 2), then=st.sampled_from(["write on", "take one back and write", "leave"])
    )
    def hold(self, data: st.DataObject, more: int, then: str) -> None:
        """A prefix cache keeps the whole pages of a request, which goes on, or leaves."""
        slot = self.some(data)[0]
        holder, size = self.requests[slot], self.pages.page_size
        self.extend_to([slot], [min(max(size, len(holder.tokens)) + more, self.most)])
        held = len(holder.tokens) // size * size
        if held and holder.first:
            self.refused(Code.PAGE_RELEASED, lambda: self.pages.hold(holder.owner, held))
            return
        if held > holder.written:
            if levels.cheap:
                self.refused(Code.PAGE_UNWRITTEN, lambda: self.pages.hold(holder.owner, held))
            self._forward([slot])
        self.leases.append(KVOwner(self.pages.hold(holder.owner, held), holder.tokens[:held], 0, held, holder.side))
        if then == "leave":
            self._finish([slot], self.fence(data))
            return
        length = len(holder.tokens)
        if then != "write on":
            length = max(0, length - 1 if length % size else held - 1)
            self.settle()
            self._cut([slot], [length], None)
        self.extend_to([slot], [min(length + 1, self.most)])

    # Leaving

    @HAS_REQUESTS
    @rule(data=st.data(), late=st.booleans())
    def finish(self, data: st.DataObject, late: bool) -> None:
        """Requests leave with pages and slot, behind a step; a second exit is refused."""
        slots = self.some(data)
        self._finish(slots, self.fence(data))
        if late:
            self.refused(STALE, lambda: self.pages.release_requests(self.gone[-1], after=None))

    def _finish(self, slots: list[int], fence: ManualFence | None) -> None:
        self.settle()
        ones, handles = [self.requests[slot] for slot in slots], self.handles(slots)
        owned = any(self.pages_of(holder) for holder in ones)
        if owned:
            self.refused(Code.SLOT_CONSERVATION, lambda: self.slots.free(handles, after=fence))
        with self.giving_back(ones, fence):
            self.pages.release_requests(handles, after=fence)
            self._left(slots)
        behind = fence is not None and fence is not self.steps.last and owned
        self.reached("released behind step N while N+1 is in flight", behind)

    def _left(self, slots: list[int]) -> None:
        self.gone += [self.requests.pop(slot).owner for slot in slots]

    @precondition(lambda self: not self.cleared)
    @rule(behind=st.booleans())
    def clear(self, behind: bool) -> None:
        """Both pools begin anew, once: requests and leases are gone; refused while something waits for a step."""
        self.settle()
        if behind and self.requests:
            self._finish([next(iter(self.requests))], self.steps.record())
        if self.slots.stats.pending or self.pages.stats.pending:
            self.reached("clearing behind a step in flight refused")
            self.refused(Code.SLOT_IN_FLIGHT, self.slots.clear)
        self.steps.complete(self.steps.depth)
        lost = bool(self.leases)
        if lost:
            for model in (self.by_location, self.by_page):
                model.rows[...] = 0
            tables = self.table, self.full_to_swa, self.swa_to_state, self.by_location.table, self.by_page.table
            for table in tables:
                table.memory.fill_(7)
            self.reached("memory that was lost begins anew")
        self.slots.clear(zero_memory=lost)
        self.cleared = True
        self.reached("cleared with a lease and a request", bool(self.leases and self.requests))
        self._left(list(self.requests))
        while self.leases:
            self.refused(Code.SLOT_DOUBLE_FREE, lambda: self.leases.pop().owner.release(after=None))
        slots = self.take(2)
        self.extend_to(slots, [self.pages.page_size] * 2)
        pages = [self.pages_of(self.requests[slot]) for slot in slots]
        agree(([1, 2], [[1], [2]]), (slots, pages), "slots and pages after a clear")

    @HAS_REQUESTS
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots, fence = self.some(data), self.fence(data)
        self.settle()
        ones = [self.requests[slot] for slot in slots]
        with self.giving_back(ones, fence):
            self.pages.release(self.handles(slots), after=fence)
        for slot, holder in zip(slots, ones, strict=True):
            holder.tokens, holder.first, holder.written, self.rooms[slot] = [], 0, 0, 0

    @HAS_REQUESTS
    @rule(more=st.integers(2, 6))
    def retract_under_pressure(self, more: int) -> None:
        """All grow; while pages run out the youngest leaves behind a step, which ends, and the oldest grows on."""
        oldest, *others = self.requests
        for slot in others:
            self._grow([slot], self.most)
        length = min(self.most, len(self.requests[oldest].tokens) + more)
        while not self.extend_to([oldest], [length]) and len(self.requests) > 1:
            fence = self.steps.record()
            self.steps.record()
            self._finish([list(self.requests)[-1]], fence)
            self.extend_to([oldest], [length])  # the pages are pending still
            self.steps.complete_until(fence)
            self.reached("retraction")
            length = max(length, len(self.requests[oldest].tokens))

    @rule()
    def prefill_apart(self) -> None:
        """A prompt is written on the second stream; a request that begins with it runs on the first, and a third so."""
        slots = self.take(1) if self.slots.stats.free > 1 else []
        launches, self.launches = self.launches, False
        grown = slots and self.extend_to(slots, [self.pages.page_size])
        self.launches = launches
        if grown:
            self._forward(slots, side=True)
            if self._share(self.requests[slots[0]], 1, 1):
                second = list(self.requests)[-1]
                self._forward([second])
                self._share(self.requests[second], 1, 1)

    @rule()
    def leave_draft_out(self) -> None:
        """The target writes a prompt, and the draft model has not: nobody else begins with it before that."""
        slots, size = self.take(1), self.pages.page_size
        launches, self.launches = self.launches, False
        grown = slots and self.extend_to(slots, [size])
        self.launches = launches
        if grown:
            holder = self.requests[slots[0]]
            self.pages.commit(holder.owner, size)
            if levels.cheap:
                self.reached("a prefix without the draft model's KV refused")
                self.refused(Code.PAGE_UNWRITTEN, lambda: self.pages.hold(holder.owner, size))
            self.launch_forward(holder, size)

    @HAS_REQUESTS
    @rule()
    def leave_apart(self) -> None:
        """Two share a page; the first leaves behind a step in flight, the second behind none: the page waits."""
        first = next(iter(self.requests))
        self.extend_to([first], [max(self.pages.page_size, len(self.requests[first].tokens))])
        if self._share(self.requests[first], 1, 1):
            second = list(self.requests)[-1]
            if self.pages.page_size > 1:  # the rest of a page that both hold is not written
                self._cut([second], [1], None)
                self.extend_to([second], [2])
            self._finish([first], self.steps.record())
            self._finish([second], None)

    # Misuse

    @precondition(lambda self: self.gone)
    @rule(back=st.integers(1, 3))
    def use_gone(self, back: int) -> None:
        """Handles of requests that left are refused everywhere."""
        pages, late = self.pages, self.gone[-min(back, len(self.gone))]
        calls = (lambda: pages.extend(late, 1), lambda: pages.release(late, after=None), lambda: pages.committed(late))
        self.refused(Code.SLOT_STALE_HANDLE, *calls)
