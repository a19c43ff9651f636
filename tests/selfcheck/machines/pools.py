"""`SlotPool` and `HybridSlotPool` against plain collections: fenced frees, a reserve, stale handles, tables, states."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, precondition, rule

from batchstate import Batch, Code, HybridSlotPool, PagePool, Violation, slot_column
from batchstate.errors import ArgumentError, DtypeError, PoolExhaustedError, RowIndexError, ShapeError
from batchstate.mirror import Handles, Slots, rows_of
from batchstate.pools import SlotPool, SlotStats
from batchstate.runtime import host_dtype
from batchstate.tables import Table, TableRows, TableWrite
from batchstate.testing.fences import ManualFence, ManualStream
from tests import refusals
from tests.selfcheck.machine import STALE, Machine, Misuse, agree, agree_on, disagree, misuses
from tests.selfcheck.models import AllocatorModel, settled, snapshot_pages, snapshot_slots, snapshot_table

Ints = npt.NDArray[np.int64]

HAS_REQUESTS = precondition(lambda self: bool(self.requests))

_WIDTH = 3


@attrs.define(eq=False)
class TableModel:
    table: Table
    rows: npt.NDArray[Any] = attrs.field(init=False)
    written: Ints = attrs.field(init=False)  # the generation that each row was written for, int64[capacity]
    writes: Ints = attrs.field(init=False)  # how often each was written, int64[capacity]

    def __attrs_post_init__(self) -> None:
        memory = self.table.memory
        self.rows = np.zeros(memory.shape, host_dtype(memory.dtype)[0])
        self.written, self.writes = np.zeros((2, len(self.rows)), np.int64)

    def write(self, handles: Handles, positions: Ints | None, values: Any) -> None:
        self.rows[(handles.np,) if positions is None else (handles.np, positions)] = values
        self.written[handles.np] = handles.generations
        self.writes[handles.np] += 1

    def readable(self, handles: Handles) -> bool:
        return bool((self.written[handles.np] == handles.generations).all())


class PoolMachine(Machine):
    """Steps in flight, which the machine completes by hand, and misuses."""

    MISUSES: ClassVar[tuple[Misuse[Any], ...]] = ()

    def open(self) -> None:
        super().open()
        self.steps = ManualStream()

    def check(self) -> None:
        self.reached("two steps in flight", self.steps.depth >= 2)

    def misused(self, data: st.DataObject) -> Any:
        raise NotImplementedError

    def fence(self, data: st.DataObject) -> ManualFence | None:
        return data.draw(st.sampled_from([None, *self.steps.in_flight]), label="after")

    def read_rows(self, model: TableModel, handles: Handles, good: bool, padding: int = 0) -> None:
        """A forward reads rows that their owners have written; others are refused, whatever they hold."""
        padded = handles.pad(len(handles) + padding)
        if not good:
            self.refused(Code.SLOT_STALE_HANDLE, lambda: model.table.device_for(padded))
        elif not model.readable(handles):
            self.reached("a row of the last owner refused", bool(model.rows[handles.np].any()))
            self.refused(Code.ROW_UNWRITTEN, lambda: model.table.device_for(padded))
        else:
            self.reached("rows read", len(handles) > 0)
            values = rows_of(self.rt, model.table.device_for(padded).index_select(0, padded.device))
            agree_on(model.rows[padded.np], values, "rows that were read")
            if model.table.host_memory is not None:
                agree_on(model.rows[handles.np], model.table.host_for(handles), "rows on the host")

    @rule(launched=st.integers(0, 2), ended=st.integers(0, 3))
    def run(self, launched: int, ended: int) -> None:
        for _ in range(launched):
            self.steps.record()
        self.steps.complete(ended)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """A misuse is refused, and changes nothing."""
        misuse, it = data.draw(st.sampled_from(self.MISUSES), label="misuse"), self.misused(data)
        if it is not None:
            self.refuses(misuse, it)


@final
@attrs.define(eq=False)
class KVOwner:
    """A request or a lease, and the KV that it has to find."""

    owner: Any  # one handle, or a lease
    tokens: list[Any] = attrs.field(factory=list)  # of each position; those before `first` are not its own
    first: int = 0
    written: int = 0  # by forwards that were launched; the other tokens are to come
    side: bool = False  # the last forward was on the second stream
    text: int = 0  # that its tokens begin with
    taken: bool = False  # its pages were taken without a request


class PagesMachine(PoolMachine):
    """Pages of requests and leases, and KV on them that forwards on two streams write.

    Each owner must find its tokens for as long as it lives: a page that two have, or that was handed out too early, has
    another's token.
    """

    def open_pages(self, size: int, num_pages: int, page_size: int, most: int) -> None:
        """Opens a pool of slots, one of pages, and KV by location; a request has at most `most` tokens."""
        self.open()
        self.slots, self.most = SlotPool(self.rt, size), most
        self.pages = PagePool(self.rt, self.slots, num_pages, page_size, max_tokens_per_request=most)
        self.kv = self.rt.device_zeros((self.pages.location_capacity,), torch.int64, name="kv")
        self.pages.register_kv(memory="draft")
        self.requests: dict[int, KVOwner] = {}  # by slot
        self.leases: list[KVOwner] = []  # pages held without a slot
        self.memory: dict[int, Any] = {}  # location -> token
        self.behind: dict[int, list[ManualFence]] = {}  # page -> fences of those that left since it was taken
        self.generations: Counter[int] = Counter()  # page -> how often it was taken

    def check(self) -> None:
        """Holders and tokens of each page, and every invariant of both pools."""
        super().check()
        self.slots.verify()
        held, stats = self.held_pages(), self.pages.stats
        agree((len(held), len(self.leases)), (stats.live, stats.leases), "live pages and leases")
        agree(sum(held[page] > 1 for page in held), stats.shared, "shared pages")
        waiting = [page for page, fences in self.behind.items() if page not in held and not _all_complete(fences)]
        if stats.pending < len(waiting):
            disagree(f"{stats.pending} pages are pending, {len(waiting)} have to be")
        for holder in (*self.requests.values(), *self.leases):
            pages = self.pages_of(holder)
            tokens = [
                self.memory.get(self.location(holder, at, pages)) for at in range(holder.first, len(holder.tokens))
            ]
            agree(holder.tokens[holder.first :], tokens, "tokens of", holder)

    def snapshot(self) -> tuple[object, ...]:
        return snapshot_slots(self.slots), snapshot_pages(self.pages)

    def pages_of(self, holder: KVOwner) -> list[int]:
        pages: list[int] = self.pages.pages_of(holder.owner).np.tolist()
        return pages

    def held_pages(self) -> Counter[int]:
        return Counter(page for holder in (*self.requests.values(), *self.leases) for page in self.pages_of(holder))

    def location(self, holder: KVOwner, position: int, pages: list[int] | None = None) -> int:
        """The location of a position; on page 0 if the owner has too few pages."""
        size, pages = self.pages.page_size, self.pages_of(holder) if pages is None else pages
        at = (position - holder.first) // size
        return (pages[at] if at < len(pages) else 0) * size + position % size

    def put(self, holder: KVOwner, tokens: list[Any]) -> None:
        pages = self.pages_of(holder)
        for token in tokens:
            self.memory[self.location(holder, len(holder.tokens), pages)] = token
            holder.tokens.append(token)

    def taken(self, pages: list[int]) -> None:
        """Pages were handed out: they have no other holder, and those that had them are done."""
        for page in pages:
            agree(True, _all_complete(self.behind.pop(page, [])), "the fences of a page that was taken")
            self.generations[page] += 1

    @contextlib.contextmanager
    def giving_back(self, ones: Sequence[KVOwner], after: ManualFence | None) -> Iterator[None]:
        """A window in which some give pages back, behind `after`, or leave."""
        before = [(holder, self.pages_of(holder)) for holder in ones]
        yield
        here = (*self.requests.values(), *self.leases)
        for holder, pages in before:
            for page in set(pages) - set(self.pages_of(holder) if holder in here else ()):
                self.behind.setdefault(page, []).extend(() if after is None else (after,))

    def launch_forward(self, holder: KVOwner, length: int, side: bool = False) -> None:
        """A forward on the current stream reads the tokens that are written, and writes those up to `length`."""
        pages = self.pages_of(holder)
        self.reached("written on one stream and read on another", holder.written > 0 and side is not holder.side)
        for at in range(holder.first, length):
            self.use_kv(self.location(holder, at, pages), None if at < holder.written else at)
        self.pages.mark_written(holder.owner, holder.written, length, memory="draft")
        holder.written, holder.side = length, side

    def use_kv(self, location: int, value: int | None) -> None:
        """A forward reads what is written at a location, or writes a value there."""
        row = self.kv[location : location + 1]
        if value is None:
            self.rt.launch(row.clone, reads=(row,), name="forward reads KV")
        else:
            self.rt.launch(row.fill_, value, writes=(row,), name="forward writes KV")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        """A lease is given back, once."""
        fence, holder = self.fence(data), data.draw(st.sampled_from(self.leases), label="lease")
        self.settle()
        with self.giving_back([holder], fence):
            self.leases.remove(holder)
            holder.owner.release(after=fence)
        self.refused(Code.SLOT_DOUBLE_FREE, lambda: holder.owner.release(after=None))

    def settle(self) -> None:
        """Orders both streams, as fences of forwards do for pages that are given back."""
        for side in (False, True):
            with self.on(side):
                behind = self.rt.record()
            with self.on(not side):
                self.rt.wait(behind)


def _all_complete(fences: Sequence[ManualFence]) -> bool:
    return all(fence.query() for fence in fences)


@attrs.define
class Part:
    """The indices of one allocator that each slot owns: itself, or states."""

    name: str
    model: AllocatorModel
    per_slot: int
    stats: Callable[[], SlotStats]  # of the pool
    of: Callable[[Ints], list[int]]  # the indices that slots int64[n] own
    freed_behind: dict[int, ManualFence | None] = attrs.field(factory=dict)  # by index


class SlotMachine(PoolMachine):
    """Takes and frees slots in a pool so small that they are used again and again; subclasses add states and tables."""

    TARGETS: ClassVar[tuple[str, ...]] = (
        "two steps in flight",
        "a slot used again after its fence",
        "taken while another slot is pending",
        "freed behind step N while N+1 is in flight",
        "exhausted while pending would suffice",
        "exhausted for good",
        "the reserve used",
        "double free refused",
        "handle of a slot used again refused",
        "cleared while slots are live",
        "clearing behind a step in flight refused",
    )
    MISUSES: ClassVar[tuple[Misuse[Any], ...]] = refusals.SLOTS

    handles = Bundle("handles")
    pool: SlotPool

    def start(self, *others: Part) -> None:
        """The models of `pool`, of the slots and of `others` that they own."""
        pool, self.model = self.pool, AllocatorModel(self.pool.size, self.pool.reserve)
        self.parts = (Part("slot", self.model, 1, lambda: pool.stats, lambda rows: rows.tolist()), *others)
        self.foreign = SlotPool(self.rt, 2, name="other").take(1)
        self.cleared = False
        self.generations = np.zeros(pool.capacity, np.int64)

    def check(self) -> None:
        super().check()
        self.pool.verify()
        for part in self.parts:
            part.model.reap()
            model, stats = part.model, part.stats()
            agree(
                (model.free, model.free_reserved, len(model.pending), len(model.live)),
                (stats.free, stats.free_reserved, stats.pending, stats.live),
                "free, free_reserved, pending, live",
            )
        agree(sorted(self.model.live), self.pool.live_slots().tolist(), "live slots")
        every = np.arange(self.pool.capacity)
        agree([slot in self.model.live for slot in every], self.pool.is_live(every).tolist(), "is_live")
        if self.model.live:
            self.refused(Code.SLOT_CONSERVATION, self.pool.expect_idle)
        else:
            self.pool.expect_idle()

    def snapshot(self) -> object:
        return snapshot_slots(self.pool), [settled(part.stats()) for part in self.parts[1:]]

    def misused(self, data: st.DataObject) -> SlotPool:
        return self.pool

    def live(self, n: int) -> Slots:
        numbers = np.array(sorted(self.model.live)[:n], dtype=np.int64)
        return Slots.of_pool(self.rt, numbers, self.generations[numbers], pool_id=self.pool.pool_id)

    def good(self, slots: Slots) -> bool:
        return {*slots.np.tolist()} <= self.model.live and bool((slots.generations == self.generations[slots.np]).all())

    # Taking

    @rule(target=handles, n=st.integers(0, 3), reserved=st.booleans(), ended=st.integers(0, 2))
    def take(self, n: int, reserved: bool, ended: int) -> Slots:
        """Free slots are handed out, after `ended` steps have ended; pending ones are not."""
        self.steps.complete(ended)
        return self._take(n, reserved)

    def _take(self, n: int, reserved: bool = False, **options: bool) -> Slots:
        def take() -> Slots:
            return self.pool.take(n, reserved=reserved, **options, **self.asking(n))

        for part in self.parts:
            model, wanted, by_reserve = part.model, self.needs(part, n), reserved and part.model is self.model
            if not model.takes(wanted, reserved=by_reserve):
                helps = model.waiting_helps(wanted, reserved=by_reserve)
                self.reached("exhausted while pending would suffice" if helps else "exhausted for good")
                if model is not self.model:
                    self.reached("states exhausted while slots are free")
                refusal = self.refusal(PoolExhaustedError, take)
                if isinstance(refusal, PoolExhaustedError):
                    model.check_refusal(refusal, wanted, reserved=by_reserve)
                n = 0
        pending = bool(self.model.pending)
        slots = take()
        numbers = slots.np.tolist()
        self.taken(slots)
        for part in self.parts:
            indices = part.of(slots.np)
            part.model.take(indices, reserved=reserved and part.model is self.model)
            again = any(part.freed_behind.get(index) is not None for index in indices)
            self.reached(f"a {part.name} used again after its fence", again)
        agree_on(self.generations[numbers] + 1, slots.generations, "generations of slots just taken")
        self.generations[numbers] += 1
        self.reached("taken while another slot is pending", pending and n > 0)
        self.reached("the reserve used", any(slot > self.pool.size for slot in numbers))
        return slots

    def needs(self, part: Part, n: int) -> int:
        return n * part.per_slot

    def asking(self, n: int) -> dict[str, Any]:
        return {}

    def taken(self, slots: Slots) -> None:
        """Uses new slots, before the models know of them."""

    @rule(target=handles, slots=handles, data=st.data())
    def some(self, slots: Slots, data: st.DataObject) -> Slots:
        """Handles are moved like any other value."""
        return slots.filter(data.draw(st.permutations(range(len(slots))), label="rows")[: max(1, len(slots) - 1)])

    # Freeing

    @rule(slots=handles, data=st.data())
    def free(self, slots: Slots, data: st.DataObject) -> None:
        """Live handles are freed, now or behind a step in flight; others are refused, all of them."""
        self._free(slots, self.fence(data))

    def _free(self, slots: Slots, fence: ManualFence | None) -> None:
        numbers = slots.np.tolist()
        if not self.good(slots):
            dead = not {*numbers} <= self.model.live
            self.reached("double free refused" if dead else "handle of a slot used again refused")
            self.refused(STALE, lambda: self.pool.free(slots, after=fence))
            self.refused(Code.SLOT_STALE_HANDLE, lambda: self.pool.check_handles(slots, "check"))
            return
        owned = [part.of(slots.np) for part in self.parts]
        self.pool.free(slots, after=fence)
        for part, indices in zip(self.parts, owned, strict=True):
            part.model.release(indices, fence)
            part.freed_behind |= dict.fromkeys(indices, fence)
        behind = fence is not None and fence is not self.steps.last and bool(numbers)
        self.reached("freed behind step N while N+1 is in flight", behind)

    # Compound, as in an engine

    @rule(target=handles, n=st.integers(1, 3), more=st.integers(0, 1))
    def finish_and_admit(self, n: int, more: int) -> Slots:
        """Requests finish while their step runs, and others ask for slots at once."""
        self._free(self.live(n), self.steps.record())
        return self._take(n + more)

    @rule(target=handles, n=st.integers(1, 2))
    def turn_over(self, n: int) -> Slots:
        """Launch, finish behind it, launch again, the first step ends, admit."""
        fence = self.steps.record()
        self.steps.record()
        self._free(self.live(n), fence)
        self.steps.complete_until(fence)
        return self._take(n)

    @rule(target=handles, n=st.integers(1, 2))
    def late_exit(self, n: int) -> Slots:
        late = self.live(n)
        self._free(late, None)
        slots = self._take(n, True)
        if len(late):
            self._free(late, None)
        return slots

    def lose_memory(self) -> None:
        """The contents of all tables are lost, which the pool is about to zero."""

    @precondition(lambda self: not self.cleared)
    @rule(target=handles, n=st.integers(1, 3), behind=st.integers(0, 2))
    def clear_pool(self, n: int, behind: int) -> Slots:
        """The pool begins anew, once; while a slot waits for a step, that is refused."""
        lost = n > 1
        self._free(self.live(behind), self.steps.record())
        if any(part.model.pending for part in self.parts):
            self.reached("clearing behind a step in flight refused")
            self.refused(Code.SLOT_IN_FLIGHT, self.pool.clear)
        self.steps.complete(self.steps.depth)
        for part in self.parts:
            part.model.reap()
        late = self.live(len(self.model.live))
        if lost:
            self.lose_memory()
        self.pool.clear(zero_memory=lost)
        self.cleared = True
        for part in self.parts:
            part.model.release(sorted(part.model.live), None)
        if len(late):
            self.reached("cleared while slots are live")
            self._free(late, None)  # refused
        slots = self._take(n)
        agree([*range(1, len(slots) + 1)], slots.np.tolist(), "slots after a clear")
        return slots

    @rule(slots=handles)
    def misuse_handles(self, slots: Slots) -> None:
        """Twice in one call, with padding, of another pool: refused, and not even one slot is freed."""
        if len(slots):
            self.refused(STALE, lambda: self.pool.free(slots.take([0, 0]), after=None))
        self.refused((Code.SLOT_ZERO_ALLOCATED, *STALE), lambda: self.pool.free(slots.pad(len(slots) + 1), after=None))
        self.refused(ArgumentError, lambda: self.pool.free(self.foreign, after=None))


class Rows(Batch):
    slots = slot_column()


@attrs.frozen(eq=False)
class Gathered:
    """Rows that were gathered from a table, and the model of them then."""

    model: TableModel
    slots: Slots
    rows: TableRows
    values: npt.NDArray[np.int16]
    writes: Ints

    def rewritten(self) -> bool:
        return bool((self.model.writes[self.slots.np] != self.writes).any())


class SlotPoolMachine(SlotMachine):
    """A pool of slots, a table of its own, by bits, and one over a tensor of the engine; not all write their rows."""

    NAME = "slot_pool"
    TARGETS = (
        *SlotMachine.TARGETS,
        "write through a stale handle refused",
        "a row of the last owner refused",
        "rows read",
        "a write that was left behind",
        "a batch of a request that left refused",
        "gathered rows used late",
        "gathered rows that were rewritten refused",
        "a tensor with a dirty row 0 refused",
        "padded rows write row 0",
        "memory that was lost begins anew",
    )

    @initialize(size=st.integers(1, 5), reserve=st.integers(0, 2))
    def begin(self, size: int, reserve: int) -> None:
        self.open()
        self.pool = SlotPool(self.rt, size, reserve=reserve)
        self.start()
        tensor = self.rt.device_zeros((self.pool.capacity, _WIDTH), torch.int16)
        dirty = reserve > 0
        tensor[:1].fill_(7 * dirty)
        try:
            adopted = self.pool.adopt(tensor, "adopted", host=False)
        except Violation as error:
            agree((True, Code.SLOT_ZERO_DIRTY), (dirty, error.code), "a tensor that is refused")
            self.reached("a tensor with a dirty row 0 refused")
            adopted = self.pool.adopt(tensor.zero_(), "adopted", host=False)
        self.tables = [
            TableModel(self.pool.table("table", (_WIDTH,), torch.bfloat16, host=True)),
            TableModel(adopted),
        ]
        self.counts = TableModel(self.pool.table("counts", (), torch.int32, row_zero="scratch"))
        self.gathered: list[Gathered] = []
        self.entries: list[tuple[TableModel, Slots, TableWrite]] = []  # that no upload has taken along yet
        self.joins = 0

    def taken(self, slots: Slots) -> None:
        """Every second time the requests that join write their rows, of one table or both."""
        self.joins += 1
        for model in self.tables[: self.joins % 4]:
            if self.joins % 2:
                new = np.arange(slots.np.size * _WIDTH, dtype=np.int16).reshape(-1, _WIDTH)
                model.table.write(slots, None, new)
                model.write(slots, None, new)

    def check(self) -> None:
        super().check()
        live = self.live(len(self.model.live))
        for model in (*self.tables, self.counts):
            agree_on(model.rows, rows_of(self.rt, model.table.memory), "a table")
            agree_on(model.written[live.np] == live.generations, model.table.written(live), "rows that are written")

    def snapshot(self) -> object:
        return super().snapshot(), [snapshot_table(model.table) for model in (*self.tables, self.counts)]

    def _table(self, data: st.DataObject) -> TableModel:
        return self.tables[data.draw(st.integers(0, 1), label="table")]

    def lose_memory(self) -> None:
        self.reached("memory that was lost begins anew")
        for model in (*self.tables, self.counts):
            model.table.memory.fill_(7)
            model.rows[...] = 0

    @rule(slots=SlotMachine.handles, data=st.data(), whole=st.booleans())
    def write(self, slots: Slots, data: st.DataObject, whole: bool) -> None:
        n, model = len(slots), self._table(data)
        drawn = data.draw(st.lists(st.integers(0, _WIDTH - 1), min_size=n, max_size=n), label="positions")
        places: Ints | None = None if whole else np.array(drawn, dtype=np.int64)
        size = (n, _WIDTH) if whole else (n,)
        new = np.arange(1, int(np.prod(size)) + 1, dtype=np.int16).reshape(size)
        if n:
            beyond, zeros = np.full(n, _WIDTH), np.zeros(n, np.int16)
            self.refused((RowIndexError, Code.SLOT_STALE_HANDLE), lambda: model.table.write(slots, beyond, zeros))
        foreign = self.foreign
        self.refused(
            ArgumentError,
            lambda: model.table.write(foreign, [0], np.ones(1, np.int16)),
            lambda: model.table.clear(foreign),
        )
        if not self.good(slots):
            self.reached("write through a stale handle refused")
            self.refused(Code.SLOT_STALE_HANDLE, lambda: model.table.write(slots, places, new))
        elif whole and data.draw(st.booleans(), label="later"):
            self.entries.append((model, slots, model.table.entry(slots, None, new)))
        else:
            model.table.write(slots, places, new)
            model.write(slots, places, new)

    @rule(slots=SlotMachine.handles, data=st.data())
    def clear(self, slots: Slots, data: st.DataObject) -> None:
        """Rows of live slots become zero, or what a kernel of the engine writes."""
        if self.good(slots):
            self._count(slots)
            model = self._table(data)
            if model.table.host_memory is None and data.draw(st.booleans(), label="by a kernel"):
                model.table.memory.index_fill_(0, slots.device, 7)
                model.table.note_write(slots)
                model.write(slots, None, 7)
            else:
                model.table.clear(slots)
                model.write(slots, None, 0)

    def _count(self, slots: Slots) -> None:
        """A captured graph writes counts of its padded rows too."""
        padded = slots.pad(len(slots) + 1)
        self.counts.table.memory.index_fill_(0, padded.device, 7)
        self.counts.table.note_write(padded)
        self.counts.write(padded, None, 7)
        self.reached("padded rows write row 0")

    @rule(slots=SlotMachine.handles, data=st.data())
    def read(self, slots: Slots, data: st.DataObject) -> None:
        model, padding = self._table(data), data.draw(st.integers(0, 2), label="padded rows")
        self.read_rows(model, slots, self.good(slots), padding)

    @rule(n=st.integers(1, 2), rewrites=st.booleans(), along=st.booleans())
    def gather(self, n: int, rewrites: bool, along: bool) -> None:
        """Rows are gathered for several steps; an upload may write them meanwhile."""
        for late in self.gathered[-2:]:
            self._use_gathered(late)
        slots, model = self.live(n), self.tables[0]
        if not len(slots):
            return
        if not model.readable(slots):
            self.reached("a row of the last owner refused", bool(model.rows[slots.np].any()))
            self.refused(Code.ROW_UNWRITTEN, lambda: model.table.gather(slots))
            model.table.write(slots, None, model.rows[slots.np] + 1)
            model.write(slots, None, model.rows[slots.np] + 1)
        padded = slots.pad(len(slots) + 1)
        gathered = model.table.gather(padded)
        self.gathered.append(Gathered(model, slots, gathered, model.rows[padded.np], model.writes[slots.np]))
        if rewrites:
            self.entries.append((model, slots, model.table.entry(slots, None, model.rows[slots.np] + 1)))
            self.upload(slots, along)
        self._use_gathered(self.gathered[-1])

    def _use_gathered(self, gathered: Gathered) -> None:
        if not self.good(gathered.slots):
            self.refused(Code.SLOT_STALE_HANDLE, lambda: gathered.rows.device)
        elif gathered.rewritten():
            self.reached("gathered rows that were rewritten refused")
            self.refused(Code.DERIVED_STALE, lambda: gathered.rows.device)
        else:
            self.reached("gathered rows used late")
            agree_on(gathered.values, rows_of(self.rt, gathered.rows.device), "gathered rows")

    @rule(slots=SlotMachine.handles, along=st.booleans())
    def upload(self, slots: Slots, along: bool) -> None:
        """A batch of live requests is uploaded, with the writes that were made meanwhile or without."""
        slots = slots.filter(np.sort(np.unique(slots.np, return_index=True)[1]))
        batch = Rows.build(self.rt, slots=slots)
        if not self.good(slots):
            self.reached("a batch of a request that left refused")
            self.refused(Code.SLOT_STALE_HANDLE, batch.upload)
            return
        due = [entry for entry in self.entries if self.good(entry[1])]
        self.entries.clear()
        self.reached("a write that was left behind", bool(due) and not along)
        last = {(id(model), slot): at for at, (model, slots, _) in enumerate(due) for slot in slots.np.tolist()}
        due = [
            entry
            for at, entry in enumerate(due)
            if all(last[id(entry[0]), slot] == at for slot in entry[1].np.tolist())
        ]
        batch.upload(writes=[write for _, _, write in due] if along else [])
        for model, owners, write in due if along else []:
            model.write(owners, None, write.values.reshape(-1, _WIDTH))


class HybridMachine(SlotMachine):
    """Slots that own states of two kinds, of the second not all; sometimes slots run out first, sometimes states."""

    NAME = "hybrid"
    TARGETS = (
        *SlotMachine.TARGETS,
        "a state used again after its fence",
        "a window used again after its fence",
        "states exhausted while slots are free",
        "slots taken with and without states",
    )
    MISUSES: ClassVar[tuple[Misuse[Any], ...]] = (
        *SlotMachine.MISUSES,
        *misuses(
            ("a kind that is not there", ArgumentError, lambda pool: pool.take(0, states={"swa": 1})),
            ("states of no slot", ShapeError, lambda pool: pool.take(0, states={"window": [1]})),
            ("-1 states", ArgumentError, lambda pool: pool.take(1, states={"window": -1})),
            ("more states than a slot has", ArgumentError, lambda pool: pool.take(1, states={"window": [3]})),
            ("half a state", DtypeError, lambda pool: pool.take(1, states={"window": 0.5})),
            ("a table of one of two kinds", ArgumentError, lambda pool: pool.state_table()),
        ),
    )

    pool: HybridSlotPool

    @initialize(size=st.integers(1, 4), reserve=st.integers(0, 2), per_slot=st.integers(1, 2), spare=st.integers(-2, 2))
    def begin(self, size: int, reserve: int, per_slot: int, spare: int) -> None:
        self.open()
        sizes = {"state": max(per_slot, (size + reserve) * per_slot + spare), "window": max(2, size + spare)}
        self.pool = HybridSlotPool(
            self.rt, size, states=sizes, states_per_slot={"state": per_slot, "window": 2}, reserve=reserve
        )
        self.pattern: list[int] | None = None  # window states of the slots that are taken next
        self.states = {  # slot -> states of its last owner
            "state": np.zeros((self.pool.capacity, per_slot), np.int64),
            "window": np.zeros((self.pool.capacity, 2), np.int64),
        }
        self.start(*(self._part(kind, sizes[kind]) for kind in self.states))

    def _part(self, kind: str, size: int) -> Part:
        states = self.states[kind]

        def owned(rows: Ints) -> list[int]:
            indices: list[int] = states[rows][states[rows] > 0].tolist()
            return indices

        return Part(kind, AllocatorModel(size), states.shape[1], lambda: self.pool.state_stats(kind), owned)

    def needs(self, part: Part, n: int) -> int:
        return sum(self.pattern[:n]) if self.pattern and part.name == "window" else super().needs(part, n)

    def asking(self, n: int) -> dict[str, Any]:
        return {"states": {"window": self.pattern[:n]}} if self.pattern else {}

    def check(self) -> None:
        super().check()
        live = self.live(len(self.model.live))
        for kind, states in self.states.items():
            agree_on(states[live.np], self.pool.states_of(live, kind), f"{kind} states of the live slots")
            table = self.rt.inspect(self.pool.state_table(kind).memory)
            agree_on(states.astype(np.int32), table, f"the table of {kind} states")

    def lose_memory(self) -> None:
        for kind, states in self.states.items():
            self.pool.state_table(kind).memory.fill_(7)
            states[...] = 0

    def snapshot(self) -> object:
        return super().snapshot(), [snapshot_table(self.pool.state_table(kind)) for kind in self.states]

    @rule(target=SlotMachine.handles, n=st.integers(0, 3), reserved=st.booleans())
    def take_unwritten(self, n: int, reserved: bool) -> Slots:
        """Slots come with their states, and the caller writes the mappings."""
        slots = self._take(n, reserved, write=False)
        if len(slots):
            for kind in self.states:
                entry = self.pool.state_entry(slots, kind)
                self.pool.state_table(kind).write(slots, None, entry.values.reshape(len(slots), -1))
        return slots

    @rule(target=SlotMachine.handles, pattern=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def take_some_without(self, pattern: list[int]) -> Slots:
        """Each slot comes with as many window states as it needs, or none."""
        self.pattern = pattern
        try:
            slots = self._take(len(pattern))
        finally:
            self.pattern = None
        self.reached("slots taken with and without states", len(slots) > 0 and 0 in pattern and any(pattern))
        return slots

    def taken(self, slots: Slots) -> None:
        """Reads the states of slots that were just taken."""
        for kind, states in self.states.items():
            states[slots.np] = self.pool.states_of(slots, kind)
