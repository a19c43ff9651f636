"""All numbers of a step, and all rules about them, as plain loops over rows. Numbers alone: nothing here knows torch.

Cython compiles this file (`setup.py`); where there is no compiler it runs as it is, and `compiled` says which. A call
first looks at all that it was given, and changes nothing; the part that changes cannot fail. A loop that meets a broken
rule says in which row: `invariants` has the rules in words, and raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from batchstate import _cython as cython

if not TYPE_CHECKING and cython.compiled:  # true only for Cython, which reads the name `cython` from here on itself
    import cython

compiled: bool = cython.compiled
"""Whether this is the compiled core."""

PADDING = cython.declare(cython.int, 0)  # states of an index
FREE = cython.declare(cython.int, 1)
PENDING = cython.declare(cython.int, 2)
LIVE = cython.declare(cython.int, 3)
RETIRED = cython.declare(cython.int, 4)

DEVICE = cython.declare(cython.int, 1)  # the reader of an entry that is a forward, as a bit

STATES: Any = (PADDING, FREE, PENDING, LIVE, RETIRED)  # for Python: those above are names of C

MOST_GENERATIONS = cython.declare(cython.longlong, 2**31 - 1)


@cython.cfunc
def _view(array: Any) -> Any:
    """An array as typed memory where this is compiled; else as a view whose elements are plain numbers."""
    if cython.compiled:
        return array
    return memoryview(array)


Number = cython.fused_type(cython.uchar, cython.short, cython.int, cython.longlong)  # of a column, as it moves

MOST = cython.declare(cython.longlong, 2**63 - 1)
LEAST = cython.declare(cython.longlong, -MOST - 1)
WORD = cython.declare(cython.longlong, 2**32)
FAR = cython.declare(cython.longlong, 2**40)  # from zero, for numbers of 4 bytes and less
INT64, INT32, INT16, UINT8 = (np.dtype(kind) for kind in ("int64", "int32", "int16", "uint8"))


def tally(counts: dict[Any, int], keys: tuple[Any, ...]) -> None:
    """Adds 1 to each of some counts."""
    for key in keys:
        counts[key] += 1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _aligned(nbytes: cython.longlong) -> cython.longlong:
    return (nbytes + 15) // 16 * 16


@cython.final
@cython.cclass
class Requests:
    """Requests in order, by slot and generation: those of handles, or some of a step, in its block."""

    n = cython.declare(cython.Py_ssize_t, visibility="readonly")
    slots: cython.const[cython.longlong][::1]
    gens: cython.const[cython.longlong][::1]
    order: cython.const[cython.longlong][::1]
    first_slot: cython.Py_ssize_t  # where those of the first row lie
    first_gen: cython.Py_ssize_t
    first: cython.Py_ssize_t  # where the row of the first request lies in `order`, unless that is -1: all are in order
    pool = cython.declare(cython.longlong, visibility="readonly")  # whose handles they are, or 0

    def __init__(self, slots: Any, generations: Any, pool: int = 0) -> None:
        """From slots and generations, int64[n] each, which nobody writes any more."""
        self.slots, self.gens, self.n, self.pool = _view(slots), _view(generations), len(slots), pool
        self.first_slot, self.first_gen, self.first = 0, 0, -1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def slot(self, i: cython.Py_ssize_t) -> cython.longlong:
        return self.slots[self.first_slot + (i if self.first < 0 else self.order[self.first + i])]

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def gen(self, i: cython.Py_ssize_t) -> cython.longlong:
        return self.gens[self.first_gen + (i if self.first < 0 else self.order[self.first + i])]

    def handles(self) -> tuple[Any, Any]:
        """Slots and generations as new arrays, int64[n] each."""
        i: cython.Py_ssize_t
        slots: Any = np.empty(self.n, INT64)
        generations: Any = np.empty(self.n, INT64)
        rows: cython.longlong[::1] = _view(slots)
        gens: cython.longlong[::1] = _view(generations)
        for i in range(self.n):
            rows[i], gens[i] = self.slot(i), self.gen(i)
        return slots, generations

    @staticmethod
    def joined(parts: list[Any]) -> Any:
        """The handles of all parts in order, or None: where a part is None, or of another pool than the first."""
        first: Requests = parts[0]
        part: Requests
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t = 0
        for other in parts:
            if other is None:
                return None
            part = other
            if part.pool != first.pool:
                return None
            at += part.n
        memory: cython.longlong[::1] = _view(np.empty(2 * at, INT64))
        every: Requests = _handles_in(memory, 0, at, at, first.pool)
        at = 0
        for other in parts:
            part = other
            for i in range(part.n):
                memory[at], memory[every.n + at] = part.slot(i), part.gen(i)
                at += 1
        return every


@cython.cfunc
def _handles_in(
    memory: cython.longlong[::1], slots: cython.Py_ssize_t, gens: cython.Py_ssize_t, n: cython.Py_ssize_t,
    pool: cython.longlong,
) -> Requests:  # fmt: skip
    """The `n` handles whose slots and generations lie there in some memory."""
    handles: Requests = Requests.__new__(Requests)
    handles.slots = handles.gens = memory
    handles.first_slot, handles.first_gen, handles.n, handles.pool, handles.first = slots, gens, n, pool, -1
    return handles


@cython.final
@cython.cclass
class Indices:
    """Indices 1 to size + reserve of one pool, in one state each. Index 0 is padding, and in no list.

    Freed ones go onto a stack, so that the last freed is the first taken. Those behind a fence are a chain through
    `link`, which its first index stands for. The generation of an index rises each time that it is taken. One that
    comes back with the last generation is retired: no list has it, and it is never taken again.

    Where `listed` is False somebody else keeps the free ones: `rows` says which are taken, and `take_returned` which
    have come back.
    """

    size = cython.declare(cython.longlong, visibility="readonly")
    reserve = cython.declare(cython.longlong, visibility="readonly")
    capacity = cython.declare(cython.longlong, visibility="readonly")
    free = cython.declare(cython.longlong, visibility="readonly")  # of `size`
    free_reserved = cython.declare(cython.longlong, visibility="readonly")
    pending = cython.declare(cython.longlong, visibility="readonly")
    deferred = cython.declare(cython.longlong, visibility="readonly")  # the pending ones, as their groups count them
    live = cython.declare(cython.longlong, visibility="readonly")
    retired = cython.declare(cython.longlong, visibility="readonly")
    taken_total = cython.declare(cython.longlong, visibility="readonly")  # but for takes that were undone, as the next
    freed_total = cython.declare(cython.longlong, visibility="readonly")
    takes = cython.declare(cython.longlong, visibility="readonly")  # calls
    peak_live = cython.declare(cython.longlong, visibility="readonly")
    peak_before: cython.longlong  # the last take
    listed: cython.bint
    state: cython.uchar[::1]
    generation: cython.longlong[::1]
    link: cython.int[::1]
    forward: cython.longlong[::1]  # the last forward of a step that uses each index, by number; 0 for none
    stack: cython.int[::1]  # the first `free` of them, the next one to be taken last; those returned if not `listed`
    returned: cython.longlong
    reserved: cython.int[::1]  # likewise
    seen: cython.longlong[::1]  # the call that has named each index last
    stamp: cython.longlong
    rows: cython.longlong[::1]  # the handles of the last `look`
    gens: cython.longlong[::1]
    made: cython.longlong[::1]  # memory for handles of the next takes, which is written once
    used: cython.Py_ssize_t  # of it
    pool = cython.declare(cython.longlong, visibility="public")  # the number that the handles carry
    arrays = cython.declare(dict, visibility="readonly")  # by name: for Python

    def __init__(self, size: int, reserve: int = 0, listed: bool = True) -> None:
        total = size + reserve
        self.size, self.reserve, self.capacity = size, reserve, total + 1
        self.free, self.free_reserved, self.pending, self.live, self.retired = size, reserve, 0, 0, 0
        self.taken_total, self.freed_total, self.takes, self.peak_live, self.peak_before = 0, 0, 0, 0, 0
        self.listed, self.stamp, self.deferred, self.returned, self.used, self.pool = listed, 0, 0, 0, 0, 0
        state: Any = np.full(total + 1, FREE, dtype=np.uint8)
        state[0] = PADDING
        # Both lists have room for all, so that putting an index back cannot fail.
        stack: Any = np.zeros(total, dtype=np.int32)
        reserved: Any = np.zeros(total if listed and reserve else 0, dtype=np.int32)
        if listed:
            stack[:size] = np.arange(size, 0, -1)
        reserved[:reserve] = np.arange(total, size, -1)
        self.arrays = {
            "state": state,
            "generation": np.zeros(total + 1, dtype=np.int64),
            "link": np.zeros(total + 1, dtype=np.int32),
            "forward": np.zeros(total + 1, dtype=np.int64),
            "seen": np.zeros(total + 1, dtype=np.int64),
            "rows": np.zeros(total, dtype=np.int64),
            "gens": np.zeros(total, dtype=np.int64),
            "stack": stack,
            "reserved": reserved,
        }
        self.state, self.generation = _view(state), _view(self.arrays["generation"])
        self.link, self.seen = _view(self.arrays["link"]), _view(self.arrays["seen"])
        self.forward = _view(self.arrays["forward"])
        self.rows, self.gens = _view(self.arrays["rows"]), _view(self.arrays["gens"])
        self.stack, self.reserved = _view(stack), _view(reserved)
        self.made = _view(np.empty(0, INT64))

    # Questions of one index, for loops

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def held(self, slot: cython.longlong, gen: cython.longlong) -> cython.int:
        """Whether the index is live, and its owner has this generation."""
        return 0 < slot < self.capacity and self.state[slot] == LIVE and self.generation[slot] == gen

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def once(self, slot: cython.longlong) -> cython.int:
        """Whether no row since `stamp` was raised has named this index, which is in range."""
        if self.seen[slot] == self.stamp:
            return False
        self.seen[slot] = self.stamp
        return True

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-2, check=False)
    def next_free(self, i: cython.longlong) -> cython.longlong:
        """The ordinary index that is taken after `i` others, as the stack has it: `fresh` says whether it may be."""
        return self.stack[self.free - 1 - i]

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def fresh(self, slot: cython.longlong, last: cython.longlong) -> cython.int:
        """Whether an index may be taken: 1 to `last`, free, and not named before."""
        return 0 < slot <= last and self.state[slot] == FREE and self.once(slot)

    # Changes of one index, which was looked at: they cannot fail

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def own(self, slot: cython.longlong) -> cython.int:
        """Gives an index an owner: the next one of its list, with the next generation."""
        if slot > self.size:
            self.free_reserved -= 1
        else:
            self.free -= 1
        self.state[slot] = LIVE
        self.generation[slot] += 1
        self.live += 1
        return 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def wait(self, slot: cython.longlong, head: cython.longlong) -> cython.longlong:
        """Takes the owner of an index away, behind a fence: it comes before `head`, and is the head now."""
        self.state[slot] = PENDING
        self.link[slot] = cython.cast(cython.int, head)
        self.live -= 1
        self.pending += 1
        return slot

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def put_back(self, slot: cython.longlong) -> cython.int:
        """Makes an index free, or retires it."""
        if self.generation[slot] >= MOST_GENERATIONS:
            self.state[slot] = RETIRED
            self.retired += 1
            return 0
        self.state[slot] = FREE
        if slot > self.size:
            if self.listed:
                self.reserved[self.free_reserved] = cython.cast(cython.int, slot)
            self.free_reserved += 1
        else:
            if self.listed:
                self.stack[self.free] = cython.cast(cython.int, slot)
            else:
                self.stack[self.returned] = cython.cast(cython.int, slot)
                self.returned += 1
            self.free += 1
        return 0

    # Taking

    @cython.ccall
    def look(self, n: cython.Py_ssize_t, reserve: cython.bint, checked: cython.bint) -> cython.Py_ssize_t:
        """Writes the handles that `take` gives into `rows` and `gens`; the first row that is wrong, -2 for too few; -1.

        With `reserve` those of the reserve come first. With a list outside `rows` says which are to be taken. If
        `checked`: each is free, in range and named once, and its generation rises.
        """
        i: cython.Py_ssize_t
        from_reserve: cython.Py_ssize_t = min(n, self.free_reserved) if reserve else 0
        slot: cython.longlong
        gen: cython.longlong
        if n - from_reserve > self.free:
            return -2
        self.stamp += 1
        for i in range(n):
            if i < from_reserve:
                self.rows[i] = self.reserved[self.free_reserved - 1 - i]
            elif self.listed:
                self.rows[i] = self.next_free(i - from_reserve)
            slot = self.rows[i]
            if checked and not self.fresh(slot, self.capacity - 1 if i < from_reserve else self.size):
                return i
            gen = self.generation[slot] + 1
            self.gens[i] = gen
            if checked and gen <= self.generation[slot]:
                return i  # it would make the handles of the former owner valid again
        return -1

    def take(self, n: cython.Py_ssize_t, reserve: cython.bint, checked: cython.bint) -> Any:
        """Takes `n`, and returns their handles. A take that `look` refuses changes nothing, and returns its answer."""
        i: cython.Py_ssize_t
        wrong: cython.Py_ssize_t = self.look(n, reserve, checked)
        if wrong != -1:
            return wrong
        at: cython.Py_ssize_t = self.used
        if at + 2 * n > self.made.shape[0]:
            self.made = _view(np.empty(max(2 * n, 128), INT64))
            at = 0
        handles: Requests = _handles_in(self.made, at, at + n, n, self.pool)
        self.used = at + 2 * n
        for i in range(n):
            self.made[at + i], self.made[at + n + i] = self.rows[i], self.gens[i]
            self.own(self.rows[i])
        self.count_taken(n)
        return handles

    @cython.ccall
    def count_taken(self, n: cython.Py_ssize_t) -> cython.void:
        """Counts a call that has made `n` live."""
        self.taken_total += n
        self.takes += n > 0
        self.peak_before = self.peak_live
        self.peak_live = max(self.peak_live, self.live)

    def undone(self, n: cython.Py_ssize_t) -> None:
        """Counts a take as never made, whose `n` indices were released again."""
        self.taken_total -= n
        self.freed_total -= n
        self.takes -= n > 0
        self.peak_live = self.peak_before

    # Handles

    def first_not_held(
        self, handles: Requests, padded: cython.bint = False, unique: cython.bint = False
    ) -> cython.Py_ssize_t:
        """The first handle that is not that of its index's owner, or -1; where `padded` the last ones may be padding.

        Where `unique` the first that names the index of an earlier one counts too.
        """
        n: cython.Py_ssize_t = handles.n
        i: cython.Py_ssize_t
        while padded and n > 0 and handles.slot(n - 1) == 0:
            n -= 1
        self.stamp += 1
        for i in range(n):
            if not self.held(handles.slot(i), handles.gen(i)) or (unique and not self.once(handles.slot(i))):
                return i
        return -1

    @cython.cfunc
    def first_not_live(self, handles: Requests) -> cython.Py_ssize_t:
        """The first row whose index is out of range, not live, or that of an earlier row; or -1."""
        i: cython.Py_ssize_t
        slot: cython.longlong
        self.stamp += 1
        for i in range(handles.n):
            slot = handles.slot(i)
            if not (0 < slot < self.capacity and self.state[slot] == LIVE and self.once(slot)):
                return i
        return -1

    # Giving back

    def release(self, handles: Requests, checked: cython.bint) -> cython.Py_ssize_t:
        """Makes live indices free, so that they are taken next and in this order.

        Answers with the first row that is not live, and nothing has changed; where `checked` with -2 if the counts are
        not whole then; else with -1.
        """
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = handles.n
        wrong: cython.Py_ssize_t = self.first_not_live(handles)
        if wrong >= 0:
            return wrong
        for i in range(n - 1, -1, -1):
            self.put_back(handles.slot(i))
        self.live -= n  # apart from the others, so that the sum shows where one is left out
        self.freed_total += n
        return -1 if not checked or self.whole() else -2

    def take_returned(self) -> Any:
        """Those that have come back since this was last called, int64[n], where somebody else keeps the free ones."""
        rows = self.arrays["stack"][: self.returned].astype(np.int64)
        self.returned = 0
        return rows

    def sort(self) -> None:
        """Makes the free ones come in ascending order again."""
        for name, n in (("stack", self.free), ("reserved", self.free_reserved)):
            entries: Any = self.arrays[name][:n]
            entries[:] = np.sort(entries)[::-1]

    @cython.ccall
    def whole(self) -> cython.bint:
        """Whether the counts give the size, and as many are pending as wait for fences."""
        counted: cython.longlong = self.free + self.free_reserved + self.pending + self.live + self.retired
        return counted == self.capacity - 1 and self.live >= 0 and self.free >= 0 and self.pending == self.deferred


@cython.final
@cython.cclass
class SlotStates:
    """The states of each slot of a hybrid pool, `width` at most: `table[slot * width + i]`, 0 behind the last."""

    width = cython.declare(cython.longlong, visibility="readonly")
    owned = cython.declare(cython.longlong, visibility="readonly")  # states of all slots together
    table: cython.longlong[::1]
    count: cython.longlong[::1]  # states of each slot
    turns: cython.longlong[::1]  # how often its request has passed from one of its states to the next
    newest: cython.longlong[::1]  # the state that it has written last; at first its first one
    left: cython.longlong[::1]  # the states of the last `leave`
    arrays = cython.declare(dict, visibility="readonly")

    def __init__(self, capacity: int, width: int) -> None:
        self.width, self.owned = width, 0
        arrays: Any = {name: np.zeros(capacity, dtype=np.int64) for name in ("count", "turns", "newest")}
        arrays |= {"table": np.zeros((capacity, width), dtype=np.int64), "left": np.zeros(capacity * width, np.int64)}
        self.arrays = arrays
        self.table, self.left = _view(arrays["table"].reshape(-1)), _view(arrays["left"])
        self.count, self.turns, self.newest = (_view(arrays[name]) for name in ("count", "turns", "newest"))

    def give(
        self,
        rows: cython.const[cython.longlong][::1],
        counts: cython.const[cython.longlong][::1] | None,
        states: Indices,
    ) -> None:
        """Gives slots that have none the states that were just taken: `counts` of each, `width` where that is None."""
        if not cython.compiled:
            rows, counts = memoryview(rows), None if counts is None else memoryview(counts)
        i: cython.Py_ssize_t
        k: cython.longlong
        n: cython.longlong
        slot: cython.longlong
        at: cython.Py_ssize_t = 0
        for i in range(rows.shape[0]):
            slot = rows[i]
            n = self.width if counts is None else counts[i]
            for k in range(n):
                self.table[slot * self.width + k] = states.rows[at]
                at += 1
            self.count[slot] = n
            self.turns[slot] = 0
            self.newest[slot] = self.table[slot * self.width]
        self.owned += at

    def leave(self, rows: cython.const[cython.longlong][::1]) -> Any:
        """Takes their states from slots; they are good up to the next call."""
        if not cython.compiled:
            rows = memoryview(rows)
        i: cython.Py_ssize_t
        k: cython.longlong
        slot: cython.longlong
        n: cython.Py_ssize_t = 0
        for i in range(rows.shape[0]):
            slot = rows[i]
            for k in range(self.width):
                if self.table[slot * self.width + k] != 0:
                    self.left[n] = self.table[slot * self.width + k]
                    n += 1
                self.table[slot * self.width + k] = 0  # left behind it would name states of another slot by then
            self.owned -= self.count[slot]
            self.count[slot] = 0
        return _handles_in(self.left, 0, 0, n, 0)


@cython.final
@cython.cclass
class PageRows:
    """Pages 1 to num_pages, and those of each slot: `table[slot * width + i]` is page i of a slot, 0 for none.

    A page is live while it has holders, pending while only leaving ones are left, and free when it has neither. Free
    pages without a key are on a stack, the last freed on top. Cached ones come after them, the first freed before
    others, linked both ways around page 0; they lose their keys when they are taken.

    The numbers of rows and pages that come in were checked by the caller, or come from here. Methods that look answer
    with the first row that may not go on, or -1; those that change are called behind one that looks.
    """

    capacity = cython.declare(cython.longlong, visibility="readonly")  # of slots
    num_pages = cython.declare(cython.longlong, visibility="readonly")
    page_size = cython.declare(cython.longlong, visibility="readonly")
    shift = cython.declare(cython.int, visibility="readonly")  # page_size is 1 << shift, or -1
    width = cython.declare(cython.longlong, visibility="readonly")
    most = cython.declare(cython.longlong, visibility="readonly")  # tokens of a request
    free = cython.declare(cython.longlong, visibility="readonly")  # cached ones included
    idle = cython.declare(cython.longlong, visibility="readonly")  # cached ones that are free
    pending = cython.declare(cython.longlong, visibility="readonly")
    live = cython.declare(cython.longlong, visibility="readonly")
    shared = cython.declare(cython.longlong, visibility="readonly")  # with more than one holder
    needed = cython.declare(cython.longlong, visibility="readonly")  # pages, as the last `look` counted
    tokens = cython.declare(cython.longlong, visibility="readonly")  # likewise
    unplaced = cython.declare(cython.longlong, visibility="readonly")  # tokens that `lay` found no page for
    evicted = cython.declare(cython.longlong, visibility="readonly")  # pages that ever lost their keys to be taken
    num_lost = cython.declare(cython.longlong, visibility="readonly")  # of `lost`
    # By slot.
    table: cython.int[::1]
    count: cython.int[::1]  # pages, those given back in front included
    first: cython.int[::1]  # pages given back in front
    sent: cython.int[::1]  # pages whose places a step has written into the token table
    committed: cython.longlong[::1]  # tokens: 0 <= accepted <= committed <= allocated, launched <= committed
    launched: cython.longlong[::1]
    accepted: cython.longlong[::1]
    # By page.
    generation: cython.longlong[::1]
    holders: cython.int[::1]  # slots and leases
    leaving: cython.int[::1]  # holders that left behind a fence which is not complete
    stack: cython.int[::1]  # the first `free - idle`: free pages without a key, the next one to be taken last
    cached: cython.uchar[::1]
    keyed: cython.longlong[::1]  # the generation that a cached page had when it got its key; else 0
    before: cython.int[::1]  # free cached pages, from the newest at [0]
    link: cython.int[::1]  # likewise, from the oldest at [0]
    lost: cython.int[::1]  # pages that lost their keys since `take_lost`, in this order
    seen: cython.longlong[::1]
    stamp: cython.longlong
    cursor: cython.longlong  # the cached page that `next_page` has shown last
    arrays = cython.declare(dict, visibility="readonly")

    def __init__(self, capacity: int, num_pages: int, page_size: int, most: int) -> None:
        self.capacity, self.num_pages, self.page_size, self.most = capacity, num_pages, page_size, most
        self.width = -(-most // page_size)
        self.shift = page_size.bit_length() - 1 if page_size.bit_count() == 1 else -1
        self.free, self.idle, self.pending, self.live, self.shared = num_pages, 0, 0, 0, 0
        self.needed = self.tokens = self.unplaced = self.evicted = self.num_lost = self.stamp = self.cursor = 0
        kinds: Any = dict.fromkeys(("count", "first", "sent"), (np.int32, capacity))
        kinds |= dict.fromkeys(("committed", "launched", "accepted"), (np.int64, capacity))
        kinds |= dict.fromkeys(("holders", "leaving", "before", "link"), (np.int32, num_pages + 1))
        kinds |= dict.fromkeys(("generation", "keyed", "seen"), (np.int64, num_pages + 1))
        kinds |= {"cached": (np.uint8, num_pages + 1), "lost": (np.int32, num_pages), "stack": (np.int32, num_pages)}
        kinds["table"] = np.int32, capacity * self.width
        arrays: Any = {name: np.zeros(size, dtype) for name, (dtype, size) in kinds.items()}
        self.arrays = arrays
        arrays["stack"][:] = np.arange(num_pages, 0, -1)
        self.table, self.stack, self.lost = _view(arrays["table"]), _view(arrays["stack"]), _view(arrays["lost"])
        self.count, self.first, self.sent = _view(arrays["count"]), _view(arrays["first"]), _view(arrays["sent"])
        self.committed, self.launched = _view(arrays["committed"]), _view(arrays["launched"])
        self.accepted, self.generation = _view(arrays["accepted"]), _view(arrays["generation"])
        self.holders, self.leaving = _view(arrays["holders"]), _view(arrays["leaving"])
        self.cached, self.keyed, self.seen = _view(arrays["cached"]), _view(arrays["keyed"]), _view(arrays["seen"])
        self.before, self.link = _view(arrays["before"]), _view(arrays["link"])

    # Free pages

    @cython.cfunc
    def next_page(self, i: cython.longlong) -> cython.longlong:
        """The page that is taken after i others, asked in order, i < free; 0 where it is not free, or named before."""
        plain: cython.longlong = self.free - self.idle
        page: cython.longlong
        if i < plain:
            page = self.stack[plain - 1 - i]
        else:
            page = self.link[self.cursor if i > plain else 0]
            self.cursor = page
        if page < 1 or page > self.num_pages or self.seen[page] == self.stamp:
            return 0
        if self.holders[page] != 0 or self.leaving[page] != 0 or self.cached[page] != (i >= plain):
            return 0
        self.seen[page] = self.stamp
        return page

    @cython.cfunc
    def take_page(self) -> cython.longlong:
        """Takes the next page, for one holder."""
        page: cython.longlong
        if self.free > self.idle:
            page = self.stack[self.free - self.idle - 1]
        else:
            page = self.link[0]
            self._lose_key(page)
        self.free -= 1
        self.live += 1
        self.holders[page] = 1
        self.generation[page] += 1
        return page

    @cython.cfunc
    def append_page(self, row: cython.longlong) -> cython.longlong:
        """Takes the next page as the last one of a row."""
        page: cython.longlong = self.take_page()
        self.table[row * self.width + self.count[row]] = page
        self.count[row] += 1
        return page

    @cython.cfunc
    def _free_page(self, page: cython.longlong) -> cython.longlong:
        """Makes a page free that nobody holds."""
        last: cython.longlong = self.before[0]
        if self.cached[page]:
            self.link[last] = page
            self.link[page] = 0
            self.before[page] = last
            self.before[0] = page
            self.idle += 1
        else:
            self.stack[self.free - self.idle] = page
        self.free += 1
        return page

    @cython.cfunc
    def _unlink(self, page: cython.longlong) -> cython.longlong:
        """Takes a free cached page out of their order; it counts as free still."""
        self.link[self.before[page]] = self.link[page]
        self.before[self.link[page]] = self.before[page]
        self.idle -= 1
        return page

    @cython.cfunc
    def _lose_key(self, page: cython.longlong) -> cython.longlong:
        """Evicts a free cached page, which is on no list then."""
        self._unlink(page)
        self.cached[page] = 0
        self.keyed[page] = 0
        self.lost[self.num_lost] = page
        self.num_lost += 1
        self.evicted += 1
        return page

    @cython.ccall
    def look_free(self, n: cython.longlong) -> cython.bint:
        """Whether the next n pages are there and free, each once."""
        i: cython.longlong
        self.stamp += 1
        if n > self.free:
            return False
        for i in range(n):  # noqa: SIM110
            if self.next_page(i) == 0:
                return False
        return True

    @cython.ccall
    def next_pages(self, n: cython.longlong) -> Any:
        """The numbers of the next n pages, int64[n], as they stand in the lists: for reports, and for ranks."""
        i: cython.longlong
        page: cython.longlong = 0
        plain: cython.longlong = self.free - self.idle
        pages = np.empty(n, dtype=np.int64)
        out: cython.longlong[::1] = _view(pages)
        for i in range(n):
            page = self.stack[plain - 1 - i] if i < plain else self.link[page if i > plain else 0]
            out[i] = page
        return pages

    def take(self, pages: Any) -> None:
        """Takes as many pages as `pages` int64[n] has room for, with one holder each: `look_free` has found them."""
        i: cython.Py_ssize_t
        out: cython.longlong[::1] = _view(pages)
        for i in range(out.shape[0]):
            out[i] = self.take_page()

    def sort_free(self) -> None:
        """Takes all keys away, and makes the pages come in ascending order again: all of them are free."""
        i: cython.longlong
        for i in range(self.num_pages):
            self.stack[i] = self.num_pages - i
            self.cached[i + 1] = 0
            self.keyed[i + 1] = 0
        self.link[0] = self.before[0] = 0
        self.idle = self.num_lost = 0

    # Holders

    @cython.cfunc
    def writable(self, page: cython.longlong) -> cython.bint:
        """Whether the one holder of a page may write on it; page 0 stands for one that is still to be taken."""
        return page == 0 or (self.holders[page] == 1 and self.cached[page] == 0)

    def look_writable(self, pages: Any) -> int:
        """The first of pages int64[n] that is shared or cached."""
        i: cython.Py_ssize_t
        named: cython.const[cython.longlong][::1] = _view(pages)
        for i in range(named.shape[0]):
            if not self.writable(named[i]):
                return i
        return -1

    def look_distinct(self, pages: Any) -> int:
        """The first of pages int64[n] that stands there a second time."""
        i: cython.Py_ssize_t
        named: cython.const[cython.longlong][::1] = _view(pages)
        self.stamp += 1
        for i in range(named.shape[0]):
            if self.seen[named[i]] == self.stamp:
                return i
            self.seen[named[i]] = self.stamp
        return -1

    def look_held(self, numbers: Any, held: Any, per_page: cython.longlong) -> int:
        """The first of numbers int64[n], `per_page` of a page, whose page is not live or of another generation."""
        i: cython.Py_ssize_t
        page: cython.longlong
        number: cython.const[cython.longlong][::1] = _view(numbers)
        generation: cython.const[cython.longlong][::1] = _view(held)
        for i in range(number.shape[0]):
            page = number[i] // per_page if number[i] > 0 else 0
            if page < 1 or page > self.num_pages:
                return i
            if self.holders[page] == 0 or self.generation[page] != generation[i]:
                return i
        return -1

    def hold(self, pages: Any, times: cython.longlong, by_key: cython.bint) -> int:
        """Adds holders to pages int64[n], each named once, that are live; or `by_key` to cached ones in any state.

        A pending page is still read by forwards that were launched before. Cached pages are read only, so that the new
        holder need not wait for them; but whoever takes the page later does. Answers with the first that is neither.
        """
        i: cython.Py_ssize_t
        page: cython.longlong
        named: cython.const[cython.longlong][::1] = _view(pages)
        self.stamp += 1
        for i in range(named.shape[0]):
            page = named[i]
            if page < 1 or page > self.num_pages or self.seen[page] == self.stamp:
                return i
            if by_key and (self.cached[page] == 0 or self.keyed[page] != self.generation[page]):
                return i
            if not by_key and self.holders[page] == 0:
                return i
            self.seen[page] = self.stamp
        if times == 0:
            return -1
        for i in range(named.shape[0]):
            page = named[i]
            if self.holders[page] == 0:
                self.live += 1
                if self.leaving[page] > 0:
                    self.pending -= 1
                else:
                    self._unlink(page)
                    self.free -= 1
            if self.holders[page] < 2 and self.holders[page] + times > 1:
                self.shared += 1
            self.holders[page] += times
        return -1

    @cython.cfunc
    def _count_down(self, counts: cython.int[::1], named: cython.const[cython.longlong][::1]) -> cython.Py_ssize_t:
        """Takes 1 from each of the pages, up to the first that is named more often than it counts: how many."""
        n: cython.Py_ssize_t = 0
        page: cython.longlong
        while n < named.shape[0]:
            page = named[n]
            if page < 1 or page > self.num_pages or counts[page] < 1:
                break
            counts[page] -= 1
            n += 1
        return n

    @cython.cfunc
    def _count_up(
        self, counts: cython.int[::1], named: cython.const[cython.longlong][::1], n: cython.Py_ssize_t
    ) -> cython.int:
        """Gives it back to the first `n`: they were only looked at."""
        i: cython.Py_ssize_t
        for i in range(n):
            counts[named[i]] += 1
        return 0

    @cython.cfunc
    def _let_go(self, named: cython.const[cython.longlong][::1], leaves: cython.bint) -> cython.int:
        """Takes a holder from each of the pages; behind a fence it leaves.

        The last page goes first, so that the pages of a request come in its order again, and the end of a prefix is
        evicted before its beginning.
        """
        i: cython.Py_ssize_t
        page: cython.longlong
        for i in range(named.shape[0] - 1, -1, -1):
            page = named[i]
            if leaves:
                self.leaving[page] += 1
            if self.holders[page] == 2:
                self.shared -= 1
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.live -= 1
                if self.leaving[page] > 0:
                    self.pending += 1
                else:
                    self._free_page(page)
        return 0

    def drop(self, pages: Any, leaves: cython.bint, checked: cython.bint) -> int:
        """Takes a holder from each of pages int64[n], which may be named several times; behind a fence it leaves.

        Answers with the first that is named more often than it has holders, and nothing has changed; where `checked`
        with -2 if the counts are not whole then; else with -1.
        """
        named: cython.const[cython.longlong][::1] = _view(pages)
        n: cython.Py_ssize_t = self._count_down(self.holders, named)
        self._count_up(self.holders, named, n)
        if n < named.shape[0]:
            return n
        self._let_go(named, leaves)
        return -1 if not checked or self.whole() else -2

    @cython.cfunc
    def arrive(self, named: cython.const[cython.longlong][::1]) -> cython.longlong:
        """The fence that holders of pages left behind is complete; how many of them are free now."""
        i: cython.Py_ssize_t
        page: cython.longlong
        before: cython.longlong = self.free
        for i in range(named.shape[0] - 1, -1, -1):
            page = named[i]
            self.leaving[page] -= 1
            if self.leaving[page] == 0 and self.holders[page] == 0:
                self.pending -= 1
                self._free_page(page)
        return self.free - before

    # Keys

    def enter(self, pages: Any) -> None:
        """Pages int64[n], which have a holder, get keys."""
        i: cython.Py_ssize_t
        named: cython.const[cython.longlong][::1] = _view(pages)
        for i in range(named.shape[0]):
            self.cached[named[i]] = 1
            self.keyed[named[i]] = self.generation[named[i]]

    def forget(self, pages: Any) -> None:
        """Cached pages int64[n] lose their keys; those that are free stay free."""
        i: cython.Py_ssize_t
        page: cython.longlong
        named: cython.const[cython.longlong][::1] = _view(pages)
        for i in range(named.shape[0]):
            page = named[i]
            self.keyed[page] = 0
            if self.holders[page] == 0 and self.leaving[page] == 0:
                self._unlink(page)
                self.free -= 1
                self.cached[page] = 0
                self._free_page(page)
            self.cached[page] = 0

    @cython.ccall
    def whole(self) -> cython.bint:
        """Whether free + pending + live are all pages, by counts that are kept apart."""
        counted: cython.longlong = self.free + self.pending + self.live
        return counted == self.num_pages and self.free >= self.idle >= 0 and self.pending >= 0 and self.live >= 0

    def oldest(self, n: cython.longlong) -> Any:
        """The n cached and free pages that are evicted first, or all of them, int64[k]."""
        k: cython.longlong = 0
        page: cython.longlong = self.link[0]
        pages = np.empty(min(n, self.num_pages), dtype=np.int64)
        out: cython.longlong[::1] = _view(pages)
        while page != 0 and k < out.shape[0]:
            out[k] = page
            page = self.link[page]
            k += 1
        return pages[:k]

    def evict(self, n: cython.longlong) -> int:
        """Makes the n oldest, or all there are, free pages without a key; says how many."""
        i: cython.longlong
        page: cython.longlong
        number: cython.longlong = min(n, self.idle)
        for i in range(number):  # noqa: B007
            page = self.link[0]
            self._lose_key(page)
            self.free -= 1
            self._free_page(page)
        return number

    def take_lost(self) -> Any:
        """The pages that lost their keys since this was last called, in that order, int32[k]."""
        pages = self.arrays["lost"][: self.num_lost].copy()
        self.num_lost = 0
        return pages

    # The pages and lengths of slots. Rows int64[n] are slots, each once; lengths int64[n] are in tokens.

    @cython.cfunc
    def page_at(self, row: cython.longlong, position: cython.longlong) -> cython.longlong:
        """The page of a position, 0 behind the last."""
        column: cython.longlong = self.column(position)
        return self.table[row * self.width + column] if column < self.width else 0

    @cython.cfunc
    def column(self, position: cython.longlong) -> cython.longlong:
        """The page of a row that a position lies on: for powers of two by a shift, a tenth of what a division takes."""
        return position >> self.shift if self.shift >= 0 else position // self.page_size

    @cython.cfunc
    def _pages_for(self, tokens: cython.longlong) -> cython.longlong:
        return self.column(tokens + self.page_size - 1)

    @cython.cfunc
    def _fits(
        self, row: cython.longlong, start: cython.longlong, total: cython.longlong, writes: cython.bint
    ) -> cython.bint:
        """Whether a row, or a new one for 0, may have `total` tokens; see `look`, whose counts rise."""
        allocated: cython.longlong = self.count[row] * self.page_size
        if start < 0 or total < start or total > self.most:
            return False
        if writes and start < allocated and total > start and not self.writable(self.page_at(row, start)):
            return False
        self.tokens += total - start
        if total > allocated:
            self.needed += self._pages_for(total) - self.count[row]
        return True

    def look(self, rows: Any, starts: Any, totals: Any, writes: cython.bint) -> int:
        """The first row that may not get room for `totals` tokens; n where pages are too few, or not free; else -1.

        Without `rows` the slots are new ones; without `starts` no token is added. With `writes` those from `starts` on
        are written: the page that they begin on has one holder and no key. Counts `needed` pages and `tokens`.
        """
        i: cython.Py_ssize_t
        number: cython.const[cython.longlong][::1]
        begin: cython.const[cython.longlong][::1]
        total: cython.const[cython.longlong][::1] = _view(totals)
        has_rows: cython.bint = rows is not None
        has_starts: cython.bint = starts is not None
        if has_rows:
            number = _view(rows)
        if has_starts:
            begin = _view(starts)
        self.needed = self.tokens = 0
        for i in range(total.shape[0]):
            if not self._fits(number[i] if has_rows else 0, begin[i] if has_starts else total[i], total[i], writes):
                return i
        return -1 if self.look_free(self.needed) else total.shape[0]

    def extend(self, rows: Requests, numbers: Any, adds: cython.bint, checked: cython.bint) -> Any:
        """Gives slots pages for `numbers` tokens in all, or so many that it `adds`: int, or int64[n]; and commits them.

        Returns how many tokens each row got, and the positions and locations of all, int64[n + t + t]. If a row may not
        get them, the answer of `look`, and nothing has changed; where `checked`, -2 if the counts are not whole then.
        """
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t = 0
        row: cython.longlong
        start: cython.longlong
        total: cython.longlong = 0
        each: cython.longlong = 0
        several: cython.bint = not isinstance(numbers, int)
        amount: cython.const[cython.longlong][::1]
        n: cython.Py_ssize_t = rows.n
        if several:
            amount = _view(numbers)
        else:
            each = numbers
        self.needed = self.tokens = self.unplaced = 0
        for i in range(n):
            row = rows.slot(i)
            start = self.committed[row]
            total = amount[i] if several else each
            if adds and total <= self.most:  # else the sum may wrap around
                total += start
            if not self._fits(row, start, total, True):
                return i
        if not self.look_free(self.needed):
            return n
        laid = np.empty(n + 2 * self.tokens, INT64)
        count: cython.longlong[::1] = _view(laid)
        position: cython.longlong[::1] = count[n : n + self.tokens]
        location: cython.longlong[::1] = count[n + self.tokens :]
        for i in range(n):
            row = rows.slot(i)
            start = self.committed[row]
            total = (amount[i] if several else each) + (start if adds else 0)
            while self.count[row] * self.page_size < total:
                self.append_page(row)
            self.accepted[row] = self.committed[row] = total
            count[i] = total - start
            at = self._lay_row(row, start, total, position, location, at)
        return laid if not checked or self.whole() else -2

    def grow(self, rows: Any, totals: Any) -> None:
        """Gives rows the pages that they lack."""
        i: cython.Py_ssize_t
        number: cython.const[cython.longlong][::1] = _view(rows)
        total: cython.const[cython.longlong][::1] = _view(totals)
        for i in range(number.shape[0]):
            while self.count[number[i]] * self.page_size < total[i]:
                self.append_page(number[i])

    def commit(self, rows: Any, totals: Any) -> None:
        """Rows have `totals` tokens, which are accepted."""
        i: cython.Py_ssize_t
        row: cython.longlong
        number: cython.const[cython.longlong][::1] = _view(rows)
        total: cython.const[cython.longlong][::1] = _view(totals)
        for i in range(number.shape[0]):
            row = number[i]
            self.accepted[row] = self.committed[row] = total[i]

    def launch(self, rows: Any, starts: Any, stops: Any) -> bool:
        """Work that writes the tokens up to `stops` is launched; with `starts` those from there on.

        A row whose tokens before `starts` are not written stays as it is, and the result is whether there is none.
        """
        i: cython.Py_ssize_t
        row: cython.longlong
        behind: cython.bint = True
        begin: cython.const[cython.longlong][::1]
        number: cython.const[cython.longlong][::1] = _view(rows)
        stop: cython.const[cython.longlong][::1] = _view(stops)
        has_starts: cython.bint = starts is not None
        if has_starts:
            begin = _view(starts)
        for i in range(number.shape[0]):
            row = number[i]
            if has_starts and self.launched[row] < begin[i]:
                behind = False
            else:
                self.launched[row] = stop[i]
        return behind

    def append(self, rows: Any, pages: Any) -> None:
        """Each row, which has none, begins with the same pages int64[k]."""
        i: cython.Py_ssize_t
        j: cython.Py_ssize_t
        number: cython.const[cython.longlong][::1] = _view(rows)
        named: cython.const[cython.longlong][::1] = _view(pages)
        for i in range(number.shape[0]):
            for j in range(named.shape[0]):
                self.table[number[i] * self.width + j] = named[j]
            self.count[number[i]] = named.shape[0]

    def put(self, row: cython.longlong, pages: Any) -> None:
        """Replaces the first pages of a row by pages int64[k]."""
        j: cython.Py_ssize_t
        named: cython.const[cython.longlong][::1] = _view(pages)
        for j in range(named.shape[0]):
            self.table[row * self.width + j] = named[j]
        self.sent[row] = 0

    @cython.cfunc
    def list_pages(
        self, row: cython.longlong, keep: cython.longlong, front: cython.longlong, pages: cython.longlong[::1],
        at: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:  # fmt: skip
        """Writes the pages of a row before page `front` and from page `keep` on to `pages`, from `at` on."""
        i: cython.longlong
        for i in range(self.first[row], self.count[row]):
            if i < front or i >= keep:
                pages[at] = self.table[row * self.width + i]
                at += 1
        return at

    @cython.cfunc
    def clear_pages(self, row: cython.longlong, keep: cython.longlong, front: cython.longlong) -> cython.int:
        """Takes them out of the row: a stale entry would name a page that another slot owns by then."""
        i: cython.longlong
        for i in range(self.first[row], self.count[row]):
            if i < front or i >= keep:
                self.table[row * self.width + i] = 0
        self.count[row] = keep
        self.first[row] = min(max(self.first[row], front), keep)
        self.sent[row] = min(self.sent[row], keep)
        return 0

    @cython.cfunc
    def _loses(
        self, row: cython.longlong, keep: cython.longlong, front: cython.longlong, total: cython.longlong
    ) -> cython.bint:
        """Whether a row that keeps `total` tokens, and the pages from `front` to `keep`, has more of either."""
        return keep < self.count[row] or front > self.first[row] or total < self.committed[row]

    @cython.cfunc
    def cut_lengths(self, row: cython.longlong, total: cython.longlong) -> cython.int:
        self.committed[row] = total
        self.launched[row] = min(self.launched[row], total)
        self.accepted[row] = min(self.accepted[row], total)
        return 0

    @cython.cfunc
    @cython.inline
    def _kept(self, row: cython.longlong, end: cython.longlong) -> cython.longlong:
        """The pages of a row that stay with `end` tokens; all where it is -1."""
        return self.count[row] if end < 0 else self._pages_for(end)

    def cut(
        self, rows: Any, totals: Any, firsts: Any, leaves: cython.bint, checked: cython.bint
    ) -> tuple[int, Any, Any]:
        """Leaves rows `totals` tokens, and the pages of the positions from `firsts` on; drops the others.

        With neither all goes; with `firsts` alone what lies behind them stays, pages without a token too.

        Returns the first row whose lengths are out of order, and None; or the answer of `drop`, the pages int64[k], and
        the rows that lose anything, int64[m], None for no row.
        """
        i: cython.Py_ssize_t
        k: cython.Py_ssize_t = 0
        row: cython.longlong
        keep: cython.longlong
        front: cython.longlong
        end: cython.longlong = -1 if firsts is not None else 0
        length: cython.longlong
        number: cython.const[cython.longlong][::1] = _view(rows)
        total: cython.const[cython.longlong][::1]
        first: cython.const[cython.longlong][::1]
        lost: cython.longlong[::1]
        has_totals: cython.bint = totals is not None
        has_firsts: cython.bint = firsts is not None
        at: cython.Py_ssize_t = 0
        if has_totals:
            total = _view(totals)
        if has_firsts:
            first = _view(firsts)
        for i in range(number.shape[0]):
            row = number[i]
            front = self.first[row]
            if has_totals:
                end = total[i]
                if end < front * self.page_size or end > self.committed[row] or self._pages_for(end) > self.count[row]:
                    return i, None, None
            length = self.committed[row] if end < 0 else end
            if has_firsts:
                if first[i] < 0 or first[i] > length:
                    return i, None, None
                front = max(front, self.column(first[i]))
            keep = self._kept(row, end)
            k += self._loses(row, keep, front, length)
            at += self.count[row] - max(keep, self.first[row]) + front - self.first[row]
        losing = np.empty(k, INT64) if k else None
        pages = np.empty(at, INT64)
        named: cython.longlong[::1] = _view(pages)
        at = 0
        for i in range(number.shape[0]):
            row = number[i]
            keep = self._kept(row, total[i] if has_totals else end)
            at = self.list_pages(row, keep, self.column(first[i]) if has_firsts else 0, named, at)
        at = self._count_down(self.holders, named)
        self._count_up(self.holders, named, at)
        if at < named.shape[0]:
            return at, pages, None
        if k:
            lost = _view(losing)
        k = 0
        for i in range(number.shape[0]):
            row = number[i]
            if has_totals:
                end = total[i]
            keep, front = self._kept(row, end), self.column(first[i]) if has_firsts else 0
            if self._loses(row, keep, front, self.committed[row] if end < 0 else end):
                lost[k] = row
                k += 1
            self.clear_pages(row, keep, front)
            if end >= 0:
                self.cut_lengths(row, end)
        self._let_go(named, leaves)
        return -1 if not checked or self.whole() else -2, pages, losing

    def owners(self, rows: Any) -> Any:
        """How many pages each row has, int64[n], those given back in front left out."""
        i: cython.Py_ssize_t
        number: cython.const[cython.longlong][::1] = _view(rows)
        counts = np.empty(number.shape[0], dtype=np.int64)
        out: cython.longlong[::1] = _view(counts)
        for i in range(number.shape[0]):
            out[i] = self.count[number[i]] - self.first[number[i]]
        return counts

    def look_readable(self, rows: Any, positions: Any, window: cython.longlong) -> int:
        """The first row whose token at `positions` int64[n] reads what was given back in front.

        It reads the last `window` positions, its own included; with a window of 0 all up to its own.
        """
        i: cython.Py_ssize_t
        reads: cython.longlong
        number: cython.const[cython.longlong][::1] = _view(rows)
        position: cython.const[cython.longlong][::1] = _view(positions)
        for i in range(number.shape[0]):
            reads = max(position[i] - (window - 1), 0) if window > 0 else 0
            if reads < self.first[number[i]] * self.page_size:
                return i
        return -1

    def lists(self, rows: Any, there: cython.Py_ssize_t, counts: Any, firsts: Any, new: Any, lists: Any) -> None:
        """Writes `counts` pages of each row int64[n], from page `firsts` on or the first ones, into int32[m, most].

        With those that a step takes, `new` int64[k], behind what the rows have; from row `there` on they have none yet.
        """
        i: cython.Py_ssize_t
        column: cython.longlong
        has: cython.longlong
        first: cython.longlong = 0
        fresh: cython.longlong = 0
        most: cython.Py_ssize_t = lists.shape[1]
        number: cython.const[cython.longlong][::1] = _view(rows)
        count: cython.const[cython.longlong][::1] = _view(counts)
        begin: cython.const[cython.longlong][::1] = None if firsts is None else _view(firsts)
        taken: cython.const[cython.longlong][::1] = _view(new)
        into: cython.int[::1] = _view(lists.reshape(-1))
        for i in range(number.shape[0]):
            has = self.count[number[i]] if i < there else 0
            if firsts is not None:
                first = begin[i]
            for column in range(first, first + count[i]):
                if column < has:
                    into[i * most + column - first] = self.table[number[i] * self.width + column]
                elif fresh + column - has < taken.shape[0]:
                    into[i * most + column - first] = taken[fresh + column - has]
            if count[i] > 0 and first + count[i] > has:
                fresh += first + count[i] - has

    # Places of tokens

    @cython.cfunc
    @cython.inline
    def _lay_row(
        self, row: cython.longlong, position: cython.longlong, stop: cython.longlong, positions: cython.longlong[::1],
        locations: cython.longlong[::1], at: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:  # fmt: skip
        """Writes the positions of a row up to `stop`, and their locations, from `at` on; where the next begin."""
        end: cython.longlong
        shift: cython.longlong
        column: cython.longlong = self.column(position)
        while position < stop:
            end = min((column + 1) * self.page_size, stop)
            if column >= self.width or self.table[row * self.width + column] == 0:
                self.unplaced += end - position
                shift = -column * self.page_size
            else:
                shift = (self.table[row * self.width + column] - column) * self.page_size
            while position < end:
                positions[at] = position
                locations[at] = position + shift
                position += 1
                at += 1
            column += 1
        return at

    def lay(self, rows: Any, starts: Any, counts: Any, positions: Any, locations: Any) -> int:
        """Positions and locations int64[t] of `counts` tokens of each row from `starts` on, one row after the other.

        Answers how many of them are `unplaced`: on page 0, since the row has no page there.
        """
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t = 0
        number: cython.const[cython.longlong][::1] = _view(rows)
        start: cython.const[cython.longlong][::1] = _view(starts)
        count: cython.const[cython.longlong][::1] = _view(counts)
        position: cython.longlong[::1] = _view(positions)
        location: cython.longlong[::1] = _view(locations)
        self.unplaced = 0
        for i in range(number.shape[0]):
            at = self._lay_row(number[i], start[i], start[i] + count[i], position, location, at)
        return self.unplaced

    def elements(
        self, rows: Any, counts: Any, positions: Any, locations: Any, width: cython.longlong
    ) -> tuple[Any, Any]:
        """Elements of a flat token table with rows of `width`, and the locations that go there, int64[k] each.

        Those of tokens, as `lay` has written them, then the rest of each page that begins with one of them: a page that
        began earlier was written then, to its end.
        """
        i: cython.Py_ssize_t
        j: cython.Py_ssize_t
        at: cython.Py_ssize_t = 0
        rest: cython.Py_ssize_t = 0
        shift: cython.longlong
        last: cython.longlong
        number: cython.const[cython.longlong][::1] = _view(rows)
        count: cython.const[cython.longlong][::1] = _view(counts)
        position: cython.const[cython.longlong][::1] = _view(positions)
        location: cython.const[cython.longlong][::1] = _view(locations)
        for i in range(number.shape[0]):
            at += count[i]
            if count[i] > 0:
                rest += self._rest(position[at - 1], count[i], width)
        index, values = np.empty(at + rest, dtype=np.int64), np.empty(at + rest, dtype=np.int64)
        element: cython.longlong[::1] = _view(index)
        value: cython.longlong[::1] = _view(values)
        rest = at
        at = 0
        for i in range(number.shape[0]):
            for j in range(count[i]):  # noqa: B007
                element[at] = number[i] * width + position[at]
                value[at] = location[at]
                at += 1
            if count[i] > 0:
                last = position[at - 1]
                shift = location[at - 1] - last
                for j in range(last + 1, last + 1 + self._rest(last, count[i], width)):
                    element[rest] = number[i] * width + j
                    value[rest] = j + shift
                    rest += 1
        return index, values

    @cython.cfunc
    def _rest(self, last: cython.longlong, count: cython.longlong, width: cython.longlong) -> cython.longlong:
        """Positions behind the last of `count` tokens, to the end of its page if that begins with one of them."""
        inside: cython.longlong = last - self.column(last) * self.page_size
        return max(min(self.page_size - 1 - inside, width - 1 - last), 0) if inside < count else 0

    def all_elements(self, rows: Any, width: cython.longlong) -> tuple[Any, Any]:
        """The same for all pages of rows, each to its end."""
        i: cython.Py_ssize_t
        row: cython.longlong
        column: cython.longlong
        position: cython.longlong
        shift: cython.longlong
        at: cython.Py_ssize_t = 0
        number: cython.const[cython.longlong][::1] = _view(rows)
        for i in range(number.shape[0]):
            row = number[i]
            at += max(min(self.count[row] * self.page_size, width) - self.first[row] * self.page_size, 0)
        index, values = np.empty(at, dtype=np.int64), np.empty(at, dtype=np.int64)
        element: cython.longlong[::1] = _view(index)
        value: cython.longlong[::1] = _view(values)
        at = 0
        for i in range(number.shape[0]):
            row = number[i]
            for column in range(self.first[row], self.count[row]):
                shift = (self.table[row * self.width + column] - column) * self.page_size
                for position in range(column * self.page_size, min((column + 1) * self.page_size, width)):
                    element[at] = row * width + position
                    value[at] = position + shift
                    at += 1
        return index, values


@cython.final
@cython.cclass
class Left:
    """All that was let go behind one fence: indices, a chain through `link` for each of their pools, and pages.

    A page stands there for each holder that it lost.
    """

    pools: list[Any]  # of the parts: `Indices` or `PageRows`
    numbers: list[Any]  # of each: its chain is `head, n` for indices; pages int64[n] are an array
    counts: list[int]  # of each: how many `reap` has made free

    def __init__(self) -> None:
        self.pools, self.numbers, self.counts = [], [], []

    def defer(self, pool: Indices, handles: Requests, checked: cython.bint) -> cython.Py_ssize_t:
        """Makes live indices pending. Answers as `Indices.release`; where `checked` -3 - i for a row that is not."""
        i: cython.Py_ssize_t
        k: cython.Py_ssize_t = 0
        n: cython.Py_ssize_t = handles.n
        head: cython.longlong = 0
        wrong: cython.Py_ssize_t = pool.first_not_live(handles)
        if wrong >= 0:
            return wrong
        while k < len(self.pools) and self.pools[k] is not pool:
            k += 1
        if k == len(self.pools):
            self.pools.append(pool)
            self.numbers.append((0, 0))
        head, before = self.numbers[k]
        for i in range(n):
            head = pool.wait(handles.slot(i), head)
        self.numbers[k] = head, before + n
        pool.freed_total += n
        pool.deferred += n
        for i in range(n if checked else 0):
            if pool.state[handles.slot(i)] != PENDING:
                return -3 - i
        return -1 if not checked or pool.whole() else -2

    def add(self, pool: PageRows, pages: Any) -> None:
        """Holders of pages int64[n] have left."""
        self.pools.append(pool)
        self.numbers.append(pages)

    @cython.cfunc
    def _look_chain(self, pool: Indices, head: cython.longlong, n: cython.Py_ssize_t) -> cython.bint:
        """Whether a chain has `n` pending indices, each once."""
        i: cython.Py_ssize_t
        pool.stamp += 1
        for i in range(n):  # noqa: B007
            if not (0 < head < pool.capacity and pool.state[head] == PENDING and pool.once(head)):
                return False
            head = pool.link[head]
        return head == 0

    @cython.cfunc
    def _free_chain(self, pool: Indices, head: cython.longlong, n: cython.Py_ssize_t) -> cython.int:
        after: cython.longlong
        while head != 0:
            after = pool.link[head]
            pool.put_back(head)
            head = after
        pool.pending -= n
        pool.deferred -= n
        return 0

    def reap(self, checked: cython.bint) -> cython.Py_ssize_t:
        """The fence is complete: makes all free. The first part whose numbers are broken, with no change; or -1.

        A part is a pool, and what it has let go. Where `checked`, -2 if the counts of a pool are not whole then.
        """
        k: cython.Py_ssize_t
        j: cython.Py_ssize_t
        n: cython.Py_ssize_t
        wrong: cython.Py_ssize_t = -1
        indices: Indices
        pages: PageRows
        for k in range(len(self.pools)):
            if isinstance(self.pools[k], PageRows):
                pages = self.pools[k]
                n = pages._count_down(pages.leaving, _view(self.numbers[k]))
                if n < len(self.numbers[k]):
                    pages._count_up(pages.leaving, _view(self.numbers[k]), n)
                    wrong = k
            else:
                indices = self.pools[k]
                head, length = self.numbers[k]
                if not self._look_chain(indices, head, length):
                    wrong = k
            if wrong >= 0:
                break
        for j in range(len(self.pools) if wrong < 0 else wrong):
            if isinstance(self.pools[j], PageRows):
                pages = self.pools[j]
                pages._count_up(pages.leaving, _view(self.numbers[j]), len(self.numbers[j]))
        if wrong >= 0:
            return wrong
        for k in range(len(self.pools)):
            if isinstance(self.pools[k], PageRows):
                pages = self.pools[k]
                self.counts.append(pages.arrive(_view(self.numbers[k])))
            else:
                indices = self.pools[k]
                head, length = self.numbers[k]
                self._free_chain(indices, head, length)
                self.counts.append(length)
        for k in range(len(self.pools) if checked else 0):
            if not self.pools[k].whole():
                return -2
        return -1

    def freed(self, pool: Any) -> int:
        """How many of a pool `reap` has made free."""
        return sum([n for other, n in zip(self.pools, self.counts) if other is pool])  # noqa: B905

    def of(self, pool: Any) -> Any:
        """The indices of a pool, those deferred first in front, or its pages; int64[n], without what a chain lost."""
        i: cython.Py_ssize_t
        head: cython.longlong
        parts = [np.empty(0, INT64)]
        for other, numbers in zip(self.pools, self.numbers):  # noqa: B905
            if other is pool:
                if isinstance(pool, Indices):
                    head, n = numbers
                    numbers = np.zeros(n, INT64)
                    link = pool.arrays["link"]
                    i = n
                    while i > 0 and 0 < head < pool.capacity:
                        i -= 1
                        numbers[i] = head
                        head = link[head]
                    numbers = numbers[i:]
                parts.append(numbers)
        return np.concatenate(parts)


@cython.final
@cython.cclass
class Entries:
    """The entries of one relay field, one for each slot. No publish ever wraps around.

    An unwritten entry has generation 0, which no live handle has. `last_writer` stays when an entry ends: the next
    writer of its memory still comes behind that publish, and behind the streams that read it.
    """

    readers = cython.declare(cython.int, visibility="readonly")  # bits of those that take each entry once, 0 for none
    must_read = cython.declare(cython.bint, visibility="readonly")  # before it is overwritten
    name = cython.declare(str, visibility="readonly")  # of the field
    generation: cython.longlong[::1]  # of the owner that it was published for; 0 where it is unwritten
    number: cython.longlong[::1]  # of the publish; 0 where it is unwritten
    last_writer: cython.longlong[::1]  # number of the last publish into this memory
    taken: cython.uchar[::1]  # bits of the readers that have taken it
    arrays = cython.declare(dict, visibility="readonly")

    def __init__(self, name: str, readers: cython.int, must_read: cython.bint, capacity: cython.Py_ssize_t) -> None:
        self.name, self.readers = name, readers
        self.must_read = must_read
        self.arrays = {name: np.zeros(capacity, np.int64) for name in ("generation", "number", "last_writer")}
        self.arrays["taken"] = np.zeros(capacity, np.uint8)
        self.generation = _view(self.arrays["generation"])
        self.number = _view(self.arrays["number"])
        self.last_writer = _view(self.arrays["last_writer"])
        self.taken = _view(self.arrays["taken"])

    @cython.cfunc
    @cython.inline
    def readable(self, slot: cython.Py_ssize_t, generation: cython.longlong, reader: cython.int) -> cython.bint:
        """Whether the entry was published for this generation, and `reader` has not taken it, if any takes it."""
        return self.generation[slot] == generation and (not self.taken[slot] & reader or self.readers == 0)

    @cython.cfunc
    @cython.inline
    def unread(self, slot: cython.Py_ssize_t) -> cython.bint:
        """Whether the entry is published, and a reader has not taken it."""
        return self.number[slot] != 0 and self.taken[slot] & self.readers != self.readers

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def note(
        self, slot: cython.Py_ssize_t, generation: cython.longlong, number: cython.longlong, readers: cython.int
    ) -> cython.int:
        """Publish `number` has written the entry; `readers` have its value already."""
        self.generation[slot] = generation
        self.number[slot] = self.last_writer[slot] = number
        self.taken[slot] = readers
        return 0

    @cython.cfunc
    @cython.exceptval(-2)
    def refused_read(
        self, requests: Requests, reader: cython.int, checked: cython.bint, numbers: Any
    ) -> cython.Py_ssize_t:
        """The first request whose entry `reader` may not take, if that is `checked`, or -1; see the function."""
        i: cython.Py_ssize_t
        slot: cython.longlong
        number: cython.longlong
        last: cython.longlong = 0
        for i in range(requests.n):
            slot = requests.slot(i)
            if checked and not self.readable(slot, requests.gen(i), reader):
                return i
            number = self.number[slot]
            if number != last and number != 0 and numbers is not None:
                numbers.add(number)
                last = number
        return -1

    @cython.cfunc
    @cython.exceptval(-2)
    def refused_write(self, requests: Requests, checked: cython.bint, numbers: Any) -> cython.Py_ssize_t:
        """The first request whose entry must be read before it is overwritten, if that is `checked`, or -1."""
        i: cython.Py_ssize_t
        slot: cython.longlong
        number: cython.longlong
        last: cython.longlong = 0
        must_read: cython.bint = checked and self.must_read
        for i in range(requests.n):
            slot = requests.slot(i)
            if must_read and self.unread(slot):
                return i
            number = self.last_writer[slot]
            if number != last and number != 0 and numbers is not None:
                numbers.add(number)
                last = number
        return -1

    def publish(self, requests: Requests, number: cython.longlong, readers: cython.int) -> None:
        """Notes that publish `number` has written the entries; `readers` have their values already."""
        i: cython.Py_ssize_t
        for i in range(requests.n):
            self.note(requests.slot(i), requests.gen(i), number, readers)

    @cython.cfunc
    @cython.exceptval(-1)
    def take(self, requests: Requests, reader: cython.int) -> cython.int:
        """Notes that `reader` has taken the entries."""
        i: cython.Py_ssize_t
        for i in range(requests.n):
            self.taken[requests.slot(i)] |= reader
        return 0

    def clear(self, rows: cython.const[cython.longlong][::1], number: cython.longlong = 0) -> None:
        """Makes the entries unwritten. Publish `number` has written their memory and failed, unless that is 0."""
        i: cython.Py_ssize_t
        slot: cython.Py_ssize_t
        if not cython.compiled:
            rows = _view(rows)
        for i in range(len(rows)):
            slot = rows[i]
            self.generation[slot] = 0
            self.number[slot] = 0
            self.taken[slot] = 0
            if number:
                self.last_writer[slot] = number


@cython.ccall
@cython.exceptval(-2)
def refused_read(
    fields: list[Entries], requests: Requests, reader: cython.int, checked: cython.bint, numbers: Any
) -> cython.int:
    """The first of `fields` with an entry that `reader` may not take, if that is `checked`, or -1.

    The set `numbers` gets those of the publishes that the entries come from: mostly one, so requests are compared with
    the one before. None where one stream has done all.
    """
    i: cython.int
    entries: Entries
    for i in range(len(fields)):
        entries = fields[i]
        if entries.refused_read(requests, reader, checked, numbers) >= 0:
            return i
    return -1


@cython.ccall
@cython.exceptval(-2)
def refused_write(fields: list[Entries], requests: Requests, checked: cython.bint, numbers: Any) -> cython.int:
    """The first of `fields` with an entry that must be read before it is overwritten, if that is `checked`, or -1.

    The set `numbers` gets those of the last publishes into the memory of the entries; None as for `refused_read`.
    """
    i: cython.int
    entries: Entries
    for i in range(len(fields)):
        entries = fields[i]
        if entries.refused_write(requests, checked, numbers) >= 0:
            return i
    return -1


@cython.ccall
@cython.exceptval(-1)
def take_entries(fields: list[Entries], requests: Requests, reader: cython.int) -> cython.int:
    """Notes that `reader` has taken the entries of some fields."""
    entries: Entries
    for entries in fields:
        entries.take(requests, reader)
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _gather(
    source: Number[::1],
    start: cython.Py_ssize_t,
    index: cython.const[cython.longlong][::1],
    target: Number[::1],
    begin: cython.Py_ssize_t,
    units: cython.Py_ssize_t,
) -> cython.int:
    """Rows of one column at checked indices, to rows side by side."""
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    if units == 1:
        for i in range(index.shape[0]):
            target[begin + i] = source[start + index[i]]
        return 0
    for i in range(index.shape[0]):
        for j in range(units):
            target[begin + i * units + j] = source[start + index[i] * units + j]
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _copy(
    source: Number[::1],
    start: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    target: Number[::1],
    begin: cython.Py_ssize_t,
) -> cython.int:
    """So many numbers from one place to another."""
    i: cython.Py_ssize_t
    if count > 64:  # a slice costs as much as a hundred numbers of the loop
        target[begin : begin + count] = source[start : start + count]
    else:
        for i in range(count):
            target[begin + i] = source[start + i]
    return 0


@cython.cfunc
@cython.exceptval(-1)
def _repeat(
    source: Number[::1],
    start: cython.Py_ssize_t,
    units: cython.Py_ssize_t,
    target: Number[::1],
    begin: cython.Py_ssize_t,
    times: cython.Py_ssize_t,
) -> cython.int:
    """One row of a column, several times."""
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    for i in range(times):
        for j in range(units):
            target[begin + i * units + j] = source[start + j]
    return 0


@cython.cfunc
@cython.exceptval(-2)
def _first_other(
    source: Number[::1],
    start: cython.Py_ssize_t,
    units: cython.Py_ssize_t,
    target: Number[::1],
    begin: cython.Py_ssize_t,
    times: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """The first of several rows of a column that is not this one, or -1."""
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    for i in range(times):
        for j in range(units):
            if target[begin + i * units + j] != source[start + j]:
                return i
    return -1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _read_as(bits: cython.longlong, width: cython.int, unsigned: cython.bint) -> cython.longlong:
    """A number of `1 << width` bytes as it orders: of an unsigned one of 8 bytes the upper half is shifted down."""
    if width == 0:
        return bits if unsigned or bits < 128 else bits - 256
    if not unsigned:
        return bits
    if width == 1:
        return bits & 0xFFFF
    if width == 2:
        return bits & (WORD - 1)
    return bits ^ LEAST


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _bits_of(number: cython.longlong, width: cython.int, unsigned: cython.bint) -> cython.longlong:
    """The reverse of `_read_as`, as the memory of that width holds it."""
    if width == 0:
        return number & 0xFF
    if width == 1:
        return ((number + 0x8000) & 0xFFFF) - 0x8000
    if width == 2:
        return ((number + WORD // 2) & (WORD - 1)) - WORD // 2
    return number ^ LEAST if unsigned else number


@cython.cfunc
@cython.exceptval(-2)
def _add(
    values: Number[::1],
    start: cython.Py_ssize_t,
    rows: cython.Py_ssize_t,
    units: cython.Py_ssize_t,
    by: cython.longlong,
    amounts: cython.const[cython.longlong][::1],
    width: cython.int,
    unsigned: cython.bint,
    bound: cython.bint,
) -> cython.Py_ssize_t:
    """Adds to a column; the first row whose sum its dtype cannot hold, and then nothing is added, or -1."""
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    number: cython.longlong
    ceiling: cython.longlong = MOST
    floor: cython.longlong = LEAST
    low: cython.longlong
    if width < 3:
        ceiling = (FAR >> ((40 if unsigned else 41) - (8 << width))) - 1
        floor = 0 if unsigned else -1 - ceiling
    low = floor // 2 if bound and not unsigned else floor
    for i in range(rows):
        if amounts is not None:
            by = amounts[i]
        if width < 3:  # as large an amount fits nowhere
            by = FAR if by > FAR else -FAR if by < -FAR else by
        if bound and unsigned and by < 0:
            return i
        for j in range(units):
            number = _read_as(values[start + i * units + j], width, unsigned)
            if (by > 0 and number > ceiling - by) or (by < 0 and number < low - by):
                return i
    for i in range(rows):
        if amounts is not None:
            by = amounts[i]
        for j in range(units):
            number = _read_as(values[start + i * units + j], width, unsigned)
            values[start + i * units + j] = _bits_of(number + by, width, unsigned)
    return -1


@cython.cclass
class Columns:
    """The columns of a batch class as bytes: column c has `units[c]` numbers of `1 << widths[c]` bytes in each row."""

    num = cython.declare(cython.int, visibility="readonly")
    slots = cython.declare(cython.int, visibility="readonly")  # the column of slots (one int64 a row), or -1
    widths: cython.int[::1]
    units: cython.int[::1]
    unsigned: cython.int[::1]  # whether the integers of a column are
    wide: cython.int  # bits: 1 << widths[c] of all columns

    def __init__(self, widths: Any, units: Any, unsigned: Any, slots: cython.int) -> None:
        """For each column its width, its units, and whether it is unsigned: vectors of one length."""
        self.widths = _view(np.array(widths, dtype=np.int32))
        self.units = _view(np.array(units, dtype=np.int32))
        self.unsigned = _view(np.array(unsigned, dtype=np.int32))
        self.num, self.slots = len(widths), slots
        self.wide = 8
        for width in widths:
            self.wide |= 1 << width

    @cython.ccall
    def lay(self, n: cython.longlong, at: cython.longlong[::1]) -> cython.longlong:
        """Where each column of n rows begins, into `at`; the end of all, a multiple of 16."""
        c: cython.Py_ssize_t
        end: cython.longlong = 0
        for c in range(self.num):
            at[c] = end
            end += (((n * self.units[c]) << self.widths[c]) + 15) & ~15
        at[self.num] = end
        return end


@cython.cclass
class Block:
    """The rows of one batch on the host: `at[c]` is the byte at which column c begins, a multiple of 16.

    `at[num]` is the end of the columns. Generations of the slots lie at the end of the memory, from element `gens` of
    int64 on: they do not cross to the device. Rows that an operation moves go from blocks that others have into one
    that nobody reads yet.
    """

    columns = cython.declare(Columns, visibility="readonly")
    memory = cython.declare(object, visibility="readonly")  # int64[...], which arrays of users are views of
    n = cython.declare(cython.int, visibility="readonly")  # rows, padded ones included
    gens = cython.declare(cython.longlong, visibility="readonly")
    at: cython.longlong[::1]
    w1: cython.uchar[::1]
    w2: cython.short[::1]
    w4: cython.int[::1]
    w8: cython.longlong[::1]

    def __init__(self, columns: Columns, n: cython.int, memory: Any = None) -> None:
        """A block of n rows; its memory, int64[...], is made unless it is given."""
        end: cython.longlong
        self.columns = columns
        self.at = _view(np.empty(columns.num + 1, INT64))
        if memory is None:
            end = columns.lay(n, self.at)
            memory = np.empty(end // 8 + (n if columns.slots >= 0 else 0), INT64)
        self.memory = memory
        self.w8 = _view(memory)
        if columns.wide & 4:
            self.w4 = _view(memory.view(INT32))
        if columns.wide & 2:
            self.w2 = _view(memory.view(INT16))
        if columns.wide & 1:
            self.w1 = _view(memory.view(UINT8))
        self.lay(n)

    @cython.ccall
    def lay(self, n: cython.int) -> cython.longlong:
        """Makes room for n rows, whose values are not set; the byte at which the columns end."""
        self.n = n
        self.gens = self.w8.shape[0] - n
        return self.columns.lay(n, self.at)

    @cython.ccall
    def start(self, c: cython.int) -> cython.longlong:
        """The byte at which column c begins; that of `columns.num` is the end of all."""
        return self.at[c]

    @cython.cfunc
    @cython.exceptval(-1)
    def gather(self, first: cython.Py_ssize_t, source: Block, index: cython.const[cython.longlong][::1]) -> cython.int:
        """Rows of another block at checked indices, from row `first` on."""
        c: cython.Py_ssize_t
        width: cython.int
        units: cython.Py_ssize_t
        begin: cython.Py_ssize_t
        start: cython.Py_ssize_t
        if first + index.shape[0] > self.n:
            raise IndexError("rows beyond the block")
        for c in range(self.columns.num):
            width, units = self.columns.widths[c], self.columns.units[c]
            start, begin = source.at[c] >> width, (self.at[c] >> width) + first * units
            if width == 3:
                _gather(source.w8, start, index, self.w8, begin, units)
            elif width == 2:
                _gather(source.w4, start, index, self.w4, begin, units)
            elif width == 1:
                _gather(source.w2, start, index, self.w2, begin, units)
            else:
                _gather(source.w1, start, index, self.w1, begin, units)
        if self.columns.slots >= 0:
            _gather(source.w8, source.gens, index, self.w8, self.gens + first, 1)
        return 0

    @cython.ccall
    @cython.exceptval(-1)
    def append(self, first: cython.Py_ssize_t, source: Block) -> cython.int:
        """All rows of another block, from row `first` on."""
        c: cython.Py_ssize_t
        width: cython.int
        count: cython.Py_ssize_t
        begin: cython.Py_ssize_t
        start: cython.Py_ssize_t
        if first + source.n > self.n:
            raise IndexError("rows beyond the block")
        for c in range(self.columns.num):
            width, count = self.columns.widths[c], source.n * self.columns.units[c]
            start, begin = source.at[c] >> width, (self.at[c] >> width) + first * self.columns.units[c]
            if width == 3:
                _copy(source.w8, start, count, self.w8, begin)
            elif width == 2:
                _copy(source.w4, start, count, self.w4, begin)
            elif width == 1:
                _copy(source.w2, start, count, self.w2, begin)
            else:
                _copy(source.w1, start, count, self.w1, begin)
        if self.columns.slots >= 0:
            _copy(source.w8, source.gens, source.n, self.w8, self.gens + first)
        return 0

    def take(self, source: Block, index: Any) -> None:
        """The rows of another block at checked indices int64[n]."""
        self.gather(0, source, _view(index))

    def join(self, source: Block, kept: Any, other: Block) -> None:
        """The rows of one block at checked indices int64[k], or all of them for None, then all of another."""
        if kept is None:
            self.append(0, source)
            self.append(source.n, other)
        else:
            self.gather(0, source, _view(kept))
            self.append(len(kept), other)

    def put(self, plain: dict[str, tuple[Any, Any, int]], values: Any) -> Any:
        """Fills columns from arrays of numpy that have their dtype and shape; the values that are left, by column.

        `plain` has the dtype of a column, the shape of a row, and its number.
        """
        start: cython.Py_ssize_t
        c: cython.int
        rest: Any = {}
        memory: Any = memoryview(self.memory).cast("B")
        rows: Any = (self.n,)
        kind: Any = np.ndarray
        for name, value in values.items():
            column = plain.get(name) if type(value) is kind else None
            if column is not None:
                dtype, shape, c = column
                if value.dtype == dtype and value.shape == (rows + shape if shape else rows):
                    try:
                        numbers = memoryview(value).cast("B")
                    except TypeError:  # one with strides, or of no rows
                        rest[name] = value
                        continue
                    start = self.at[c]
                    memory[start : start + len(numbers)] = numbers
                    continue
            rest[name] = value
        return rest

    def others(self, index: Any) -> tuple[Any, Any]:
        """Slots and generations of the rows that are not at checked indices int64[k], int64[n - k] each."""
        i: cython.Py_ssize_t
        k: cython.Py_ssize_t = 0
        kept: cython.const[cython.longlong][::1] = _view(index)
        stay: cython.uchar[::1] = _view(np.zeros(self.n, UINT8))
        slots: Any = np.empty(self.n - len(index), INT64)
        generations: Any = np.empty(self.n - len(index), INT64)
        rows: cython.longlong[::1] = _view(slots)
        gens: cython.longlong[::1] = _view(generations)
        at: cython.Py_ssize_t = self.at[self.columns.slots] >> 3
        for i in range(kept.shape[0]):
            stay[kept[i]] = 1
        for i in range(self.n):
            if not stay[i]:
                rows[k], gens[k] = self.w8[at + i], self.w8[self.gens + i]
                k += 1
        return slots, generations

    def copy(self, source: Block) -> None:
        """All rows of a block with as many."""
        end: cython.Py_ssize_t = self.at[self.columns.num] >> 3
        if self.n != source.n:
            raise IndexError("rows beyond the block")
        _copy(source.w8, 0, end, self.w8, 0)
        if self.columns.slots >= 0:
            _copy(source.w8, source.gens, self.n, self.w8, self.gens)

    def pad(self, pads: Block, first: cython.Py_ssize_t) -> None:
        """The row of `pads` in all rows from `first` on."""
        c: cython.Py_ssize_t
        i: cython.Py_ssize_t
        width: cython.int
        units: cython.Py_ssize_t
        begin: cython.Py_ssize_t
        times: cython.Py_ssize_t = self.n - first
        for c in range(self.columns.num):
            width, units = self.columns.widths[c], self.columns.units[c]
            begin = (self.at[c] >> width) + first * units
            if width == 3:
                _repeat(pads.w8, pads.at[c] >> 3, units, self.w8, begin, times)
            elif width == 2:
                _repeat(pads.w4, pads.at[c] >> 2, units, self.w4, begin, times)
            elif width == 1:
                _repeat(pads.w2, pads.at[c] >> 1, units, self.w2, begin, times)
            else:
                _repeat(pads.w1, pads.at[c], units, self.w1, begin, times)
        if self.columns.slots >= 0:
            for i in range(times):
                self.w8[self.gens + first + i] = 0

    def other_pad(self, pads: Block, first: cython.Py_ssize_t) -> int:
        """The first column that is not that of `pads` in each row from `first` on, or -1."""
        c: cython.Py_ssize_t
        width: cython.int
        units: cython.Py_ssize_t
        begin: cython.Py_ssize_t
        row: cython.Py_ssize_t
        times: cython.Py_ssize_t = self.n - first
        for c in range(self.columns.num):
            width, units = self.columns.widths[c], self.columns.units[c]
            begin = (self.at[c] >> width) + first * units
            if width == 3:
                row = _first_other(pads.w8, pads.at[c] >> 3, units, self.w8, begin, times)
            elif width == 2:
                row = _first_other(pads.w4, pads.at[c] >> 2, units, self.w4, begin, times)
            elif width == 1:
                row = _first_other(pads.w2, pads.at[c] >> 1, units, self.w2, begin, times)
            else:
                row = _first_other(pads.w1, pads.at[c], units, self.w1, begin, times)
            if row >= 0:
                return c
        return -1

    @cython.ccall
    @cython.exceptval(-2, check=True)
    def add(self, c: cython.int, by: cython.longlong, amounts: object, bound: cython.bint) -> cython.Py_ssize_t:
        """Adds to a column of integers: `by` to all rows, or where `amounts` int64[n] are not None, one to each.

        The first row whose sum does not fit, and then nothing is added; or -1. The device has less than a `bound`: it
        does not fall where that would wrap.
        """
        each: cython.const[cython.longlong][::1] = None if amounts is None else _view(amounts)
        width: cython.int = self.columns.widths[c]
        units: cython.Py_ssize_t = self.columns.units[c]
        start: cython.Py_ssize_t = self.at[c] >> width
        unsigned: cython.bint = self.columns.unsigned[c]
        if width == 3:
            return _add(self.w8, start, self.n, units, by, each, width, unsigned, bound)
        if width == 2:
            return _add(self.w4, start, self.n, units, by, each, width, unsigned, bound)
        if width == 1:
            return _add(self.w2, start, self.n, units, by, each, width, unsigned, bound)
        return _add(self.w1, start, self.n, units, by, each, width, unsigned, bound)

    @cython.ccall
    @cython.exceptval(-2, check=True)
    def wrong_slot(self, rows: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """The first of so many rows whose slot is no slot, or that of an earlier row; or -1."""
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t
        slot: cython.longlong
        size: cython.Py_ssize_t = 16
        start: cython.Py_ssize_t = self.at[self.columns.slots] >> 3
        while size < 2 * rows:
            size *= 2
        seen: cython.longlong[::1] = _view(np.zeros(size, INT64))  # a hash table; no slot is 0
        for i in range(rows):
            slot = self.w8[start + i]
            if slot <= 0:
                return i
            at = (slot ^ (slot >> 12) ^ (slot >> 24)) & (size - 1)
            while seen[at] != 0:
                if seen[at] == slot:
                    return i
                at = (at + 1) & (size - 1)
            seen[at] = slot
        return -1


# Steps


@cython.final
@cython.cclass
class StepRules:
    """The declaration of a planner, as its loops need it, and the pools that they ask.

    A request that the relay feeds puts in `least` to `widest` tokens, whose ids lie at `slot * stride + places[i]`;
    element 0 of the relay is 0. `window` positions are read by each token, all for 0. `table` is the width of a row of
    the token table, 0 without one, and `written` has the generation that each row was written for. `epochs` and
    `shares` number the changes of the pages of each slot. `read` are the fields of the relay that a forward takes, of
    the requests that it feeds.
    """

    slots: Indices
    pages: PageRows
    lens: cython.int  # the column with the tokens of each request before the step
    offset: cython.int  # that with tokens in its pages before its first position, or -1
    ids: cython.bint
    least: cython.longlong
    widest: cython.longlong
    stride: cython.longlong
    window: cython.longlong
    table: cython.longlong
    places: cython.const[cython.longlong][::1]
    epochs: cython.const[cython.longlong][::1]
    shares: cython.const[cython.longlong][::1]
    written: cython.longlong[::1]
    read: list[Entries]

    def __init__(
        self,
        slots: Indices,
        pages: PageRows,
        *,
        lens: int,
        offset: int,
        ids: bool,
        least: int,
        stride: int,
        window: int,
        table: int,
        places: Any,
        epochs: Any,
        shares: Any,
        written: Any,
        read: list[Entries],
    ) -> None:
        self.slots, self.pages, self.lens, self.offset, self.ids = slots, pages, lens, offset, ids
        self.least, self.widest, self.stride, self.window, self.table = least, len(places), stride, window, table
        self.places, self.epochs, self.shares = _view(places), _view(epochs), _view(shares)
        self.written, self.read = _view(written), read


@cython.cclass
class StepBlock(Block):
    """The block of a step: columns, then the arrays of a forward, each at a multiple of 16 bytes.

        columns | starts, KV lengths | sources, positions, mapping, last, sampled | writes | ids of the host | extras

    cross in one copy. Behind them, and not sent, lie the rows that sample, and the generations. `draft` moves the rows
    here, asks each of them, and writes what follows; it changes nothing but this block. `commit` takes slots and pages,
    which cannot fail.
    """

    reqs = cython.declare(cython.int, visibility="readonly")  # requests; rows behind them are padding
    takes = cython.declare(cython.int, visibility="readonly")  # the last of them, that have no slot before the step
    t = cython.declare(cython.longlong, visibility="readonly")  # tokens
    padded = cython.declare(cython.longlong, visibility="readonly")  # tokens, padded ones included
    s = cython.declare(cython.int, visibility="readonly")  # requests that sample
    last_rows = cython.declare(cython.longlong, visibility="readonly")  # those, and padded rows where all sample
    k = cython.declare(cython.longlong, visibility="readonly")  # elements of the token table that are written
    h = cython.declare(cython.longlong, visibility="readonly")  # ids of the host
    fed = cython.declare(cython.int, visibility="readonly")  # requests whose ids the relay has
    new_pages = cython.declare(cython.longlong, visibility="readonly")
    new = cython.declare(object, visibility="readonly")  # these, int64[...], or None
    need = cython.declare(cython.longlong, visibility="readonly")  # bytes of memory that the step takes
    changed = cython.declare(cython.bint, visibility="readonly")  # pages of a request, since the plan: see `running`
    row = cython.declare(cython.longlong, visibility="readonly")  # where `look` or `forward` has met a broken rule
    value = cython.declare(cython.longlong, visibility="readonly")  # the number that it met there
    # Where the arrays begin, in elements of their own dtype: int32 for the first two and the table's values.
    starts = cython.declare(cython.longlong, visibility="readonly")
    kv_lens = cython.declare(cython.longlong, visibility="readonly")
    source = cython.declare(cython.longlong, visibility="readonly")
    positions = cython.declare(cython.longlong, visibility="readonly")
    mapping = cython.declare(cython.longlong, visibility="readonly")
    last = cython.declare(cython.longlong, visibility="readonly")
    sampled = cython.declare(cython.longlong, visibility="readonly")
    elements = cython.declare(cython.longlong, visibility="readonly")
    places = cython.declare(cython.longlong, visibility="readonly")
    ids = cython.declare(cython.longlong, visibility="readonly")
    end = cython.declare(cython.longlong, visibility="readonly")  # in bytes
    rows = cython.declare(cython.longlong, visibility="readonly")  # that sample, int64
    fed_rows = cython.declare(cython.longlong, visibility="readonly")  # that the relay feeds, int64
    numbers: cython.longlong[::1]  # tokens that each request puts in
    told: cython.uchar[::1]  # whether the host has its ids
    samples: cython.uchar[::1]
    has_numbers: cython.int
    each: cython.longlong
    has_told: cython.int
    has_samples: cython.int
    lens: cython.longlong  # where the column of lengths begins, in elements of its own dtype
    long_lens: cython.bint  # whether that is int64, not int32
    guesses: cython.bint  # whether lengths of requests that the relay feeds are bounds, and it has the true ones
    offset: cython.int
    epoch = cython.declare(cython.longlong, visibility="readonly")  # the last changes of pages before the step
    share = cython.declare(cython.longlong, visibility="readonly")

    def __init__(self, columns: Columns, memory: Any) -> None:
        """Over memory int64[...] that other steps use later."""
        Block.__init__(self, columns, 0, memory)
        self.w4 = _view(memory.view(np.int32))
        self.reqs = self.takes = self.s = self.fed = self.lens = 0
        self.offset = -1
        self.epoch = self.share = self.last_rows = 0
        self.changed = self.guesses = False
        self.t = self.padded = self.k = self.h = self.new_pages = self.end = self.need = 0
        self.new = None

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def count(self, c: cython.int, row: cython.longlong) -> cython.longlong:
        """The value of a column of counts."""
        at: cython.longlong = self.at[c]
        if self.columns.widths[c] == 3:
            return self.w8[at // 8 + row]
        return self.w4[at // 4 + row]

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def in_pages(self, row: cython.longlong, tokens: cython.longlong) -> cython.longlong:
        """So many tokens of a request as its pages count them: with those before its first position."""
        return tokens + self.count(self.offset, row) if self.offset >= 0 and tokens > 0 else tokens

    @cython.cfunc
    def met(self, rule: str, row: cython.longlong, value: cython.longlong) -> object:
        self.row, self.value = row, value
        return rule

    def draft(
        self,
        rules: StepRules,
        source: Block,
        kept: Any,
        joining: Any,
        pads: Block,
        n: cython.int,
        takes: cython.int,
        numbers: Any,
        told: Any,
        samples: Any,
        checks: cython.int,
        bounds: cython.longlong,
        tokens: cython.longlong,
        host: Any,
    ) -> object:
        """Moves the rows of a step here, n with padded ones, asks each, and counts; None, or the rule that one breaks.

        Then `row` and `value` say where. Else all arrays are written, unless the memory is smaller than `need`: for
        `tokens` with padded ones, -1 for no padding; `host` int64[h] are the ids that the host has, end to end, or
        None. Rows are those of `source` at checked indices `kept` int64[k], all for None, then those of `joining` or
        None, the last `takes` of which have no slot before the step; then `pads`. `numbers` are an int, or int64[reqs],
        of tokens that each puts in; `told` and `samples` uint8[reqs] or None for all that have no ids of the host, and
        all that sample. Lengths are compared with those of the pages at `checks`, where they are exact: 2; the numbers
        of pools at 1. A planner without ids takes true lengths from the relay, of requests that put in `bounds` tokens
        each, unless these are -1.
        """
        reqs: cython.int = source.n if kept is None else len(kept)
        self.lay(n)
        if kept is None:
            self.append(0, source)
        else:
            self.gather(0, source, _view(kept))
        if joining is not None:
            other: Block = joining
            self.append(reqs, other)
            reqs += other.n
        if n > reqs:
            self.pad(pads, reqs)
        self.reqs, self.takes, self.offset = reqs, takes, rules.offset
        self.long_lens = self.columns.widths[rules.lens] == 3
        self.lens = self.at[rules.lens] // (8 if self.long_lens else 4)
        self.has_numbers = not isinstance(numbers, int)
        self.each = 0
        if self.has_numbers:
            self.numbers = _view(numbers)
        else:
            self.each = numbers
        self.has_told = told is not None
        if self.has_told:
            self.told = _view(told)
        self.has_samples = samples is not None
        if self.has_samples:
            self.samples = _view(samples)
        rule = self.look(rules, checks, bounds)
        if rule is None:
            self.need = self.lay_arrays(max(tokens, self.t), rules.ids)
            self.new = rules.pages.next_pages(self.new_pages) if self.new_pages else None
            if self.need <= 8 * self.w8.shape[0]:
                self.fill(rules, host)
        return rule

    @cython.cfunc
    def look(self, rules: StepRules, asked: cython.int, bounds: cython.longlong) -> object:
        """The second half of `draft`."""
        row: cython.longlong
        i: cython.longlong
        slot: cython.longlong
        gen: cython.longlong
        q: cython.longlong
        start: cython.longlong
        total: cython.longlong
        before: cython.longlong
        after: cython.longlong
        has: cython.longlong
        page: cython.longlong
        end: cython.longlong
        slots: Indices = rules.slots
        pages: PageRows = rules.pages
        size: cython.longlong = pages.page_size
        width: cython.longlong = rules.table
        fewest: cython.longlong = rules.least if bounds < 0 else bounds
        fullest: cython.longlong = rules.widest if bounds < 0 else bounds
        reach: cython.longlong = rules.window
        ids: cython.int = rules.ids or bounds >= 0
        first_new: cython.longlong = self.reqs - self.takes
        at: cython.longlong = self.at[self.columns.slots] // 8
        # Names of their own: to a compiler each write into memory may change every attribute.
        w8: cython.longlong[::1] = self.w8
        w4: cython.int[::1] = self.w4
        lens: cython.longlong = self.lens
        is_long: cython.bint = self.long_lens
        shifted: cython.bint = self.offset >= 0
        each: cython.longlong = self.each
        has_numbers: cython.bint = self.has_numbers
        gens: cython.longlong = self.gens
        state: cython.uchar[::1] = slots.state
        generation: cython.longlong[::1] = slots.generation
        seen: cython.longlong[::1] = slots.seen
        count: cython.int[::1] = pages.count
        begin: cython.int[::1] = pages.first
        sent: cython.int[::1] = pages.sent
        committed: cython.longlong[::1] = pages.committed
        capacity: cython.longlong = slots.capacity
        most: cython.longlong = pages.most
        tokens: cython.longlong = 0
        written: cython.longlong = 0
        host: cython.longlong = 0
        more: cython.longlong = 0
        fed: cython.int = 0
        sampling: cython.int = 0
        stamp: cython.longlong = slots.stamp + 1
        slots.stamp = stamp
        for row in range(self.reqs):
            if row < first_new:
                slot, gen = w8[at + row], w8[gens + row]
                if not 0 < slot < capacity or state[slot] != LIVE or generation[slot] != gen:
                    return self.met("held", row, slot)
                has = count[slot]
            else:
                i = row - first_new
                if i >= slots.free:
                    return self.met("slots", row, self.takes)
                slot = slots.next_free(i)
                if slot <= 0 or slot > slots.size or state[slot] != FREE or count[slot] != 0:
                    return self.met("free slot", row, slot)
                gen = generation[slot] + 1
                w8[at + row], w8[gens + row] = slot, gen
                has = 0
            if seen[slot] == stamp:
                return self.met("once", row, slot)
            seen[slot] = stamp
            q, start = (self.numbers[row] if has_numbers else each), (w8[lens + row] if is_long else w4[lens + row])
            total = start + q
            if q < 0 or start < 0:
                return self.met("negative", row, q if q < 0 else start)
            before, after = start, total
            if shifted:
                before, after = self.in_pages(row, start), self.in_pages(row, total)
            if after > most:
                return self.met("length", row, after)
            if row < first_new:
                if asked > 1 and committed[slot] != before:
                    return self.met("derived", row, before)
                if committed[slot] > after:
                    return self.met("shrinks", row, after)
                before = min(before, committed[slot])
            elif start > 0 and self.has_told and self.told[row]:  # of a prompt, whose first tokens no forward wrote
                return self.met("begun", row, start)
            if q > 0:
                if before < has * size and before < after:  # it goes on in a page that it has
                    page = pages.page_at(slot, before)
                    if page == 0 or not pages.writable(page):
                        return self.met("owner", row, page)
                if has and begin[slot] > 0:
                    i = 0 if reach == 0 else max(0, start - (reach - 1))
                    if i < begin[slot] * size:
                        return self.met("released", row, i)
                if ids:
                    if self.has_told and self.told[row]:
                        host += q
                    elif q < fewest or q > fullest:
                        return self.met("fed", row, q)
                    else:
                        fed += 1
            if not self.has_samples or self.samples[row]:
                if q == 0:
                    return self.met("samples", row, 0)
                sampling += 1
            tokens += q
            end = has
            while end * size < after:  # a division takes longer than the few rounds of most rows
                end += 1
            more += end - has
            if width:
                for i in range(sent[slot] if row < first_new else 0, end):
                    if i >= has or i >= begin[slot]:
                        written += max(0, min((i + 1) * size, width) - i * size)
        self.t, self.k, self.h, self.new_pages, self.s, self.fed = tokens, written, host, more, sampling, fed
        if more > pages.free:
            return self.met("pages", -1, more)
        if asked and not pages.look_free(more):
            return self.met("free page", -1, more)
        return None

    @cython.cfunc
    @cython.exceptval(-1)
    def lay_arrays(self, tokens: cython.longlong, has_ids: cython.bint) -> cython.longlong:
        """Where the arrays begin, for so many tokens with padded ones; the bytes that all needs, tail included."""
        n: cython.longlong = self.n
        end: cython.longlong = self.at[self.columns.num]
        sampling: cython.longlong = self.s if self.s < self.reqs else n
        self.padded = tokens
        self.starts = end // 4
        self.kv_lens = (4 * self.starts + _aligned(4 * (n + 1))) // 4
        self.source = (4 * self.kv_lens + _aligned(4 * n)) // 8
        self.positions = self.source + (_aligned(8 * tokens) // 8 if has_ids else 0)
        self.mapping = self.positions + _aligned(8 * tokens) // 8
        self.last_rows = sampling
        self.last = self.mapping + _aligned(8 * tokens) // 8
        self.sampled = self.last + _aligned(8 * sampling) // 8
        self.elements = self.sampled + _aligned(8 * sampling) // 8
        self.places = (8 * self.elements + _aligned(8 * self.k)) // 4
        self.ids = (4 * self.places + _aligned(4 * self.k)) // 8
        # Those of the host: one for each token, and 0 where the relay has it. None where the relay has all.
        self.end = 8 * self.ids + _aligned(8 * tokens if has_ids and (self.h or not self.fed) else 0)
        self.rows = self.gens - _aligned(8 * self.s) // 8
        self.fed_rows = self.rows - _aligned(8 * self.fed) // 8
        return self.end + _aligned(8 * self.fed) + _aligned(8 * self.s) + _aligned(8 * n)

    @cython.cfunc
    @cython.exceptval(-1)
    def fill(self, rules: StepRules, host: Any) -> cython.int:
        """Writes the arrays. Nothing here fails: `draft` has asked."""
        pages: PageRows = rules.pages
        row: cython.longlong
        i: cython.longlong
        x: cython.longlong
        slot: cython.longlong
        q: cython.longlong
        start: cython.longlong
        total: cython.longlong
        after: cython.longlong
        shift: cython.longlong
        has: cython.longlong
        fresh: cython.longlong = 0
        taken: cython.const[cython.longlong][::1] = None if self.new is None else _view(self.new)
        nth: cython.longlong
        inside: cython.longlong
        page: cython.longlong
        end: cython.longlong
        stop: cython.longlong
        first: cython.longlong
        size: cython.longlong = pages.page_size
        width: cython.longlong = rules.table
        wide: cython.longlong = rules.stride
        told_ids: cython.const[cython.longlong][::1]
        nth_told: cython.longlong = 0
        told: cython.int = 0
        ids: cython.int = rules.ids
        both: cython.int = ids and (self.h > 0 or self.fed == 0)
        at_id: cython.const[cython.longlong][::1] = rules.places
        t: cython.longlong = 0
        k: cython.longlong = 0
        s: cython.longlong = 0
        everyone: cython.int = self.s == self.reqs
        first_new: cython.longlong = self.reqs - self.takes
        at: cython.longlong = self.at[self.columns.slots] // 8
        if host is not None:
            told_ids = _view(host)
        # Names of their own: to a compiler each write into memory may change every attribute.
        w8: cython.longlong[::1] = self.w8
        lens: cython.longlong = self.lens
        is_long: cython.bint = self.long_lens
        each: cython.longlong = self.each
        has_numbers: cython.bint = self.has_numbers
        w4: cython.int[::1] = self.w4
        count: cython.int[::1] = pages.count
        begin: cython.int[::1] = pages.first
        sent: cython.int[::1] = pages.sent
        table_of: cython.int[::1] = pages.table
        wide_table: cython.longlong = pages.width
        has_samples: cython.int = self.has_samples
        starts: cython.longlong = self.starts
        kv_lens: cython.longlong = self.kv_lens
        source: cython.longlong = self.source
        positions: cython.longlong = self.positions
        inputs: cython.longlong = self.ids
        mapping: cython.longlong = self.mapping
        last: cython.longlong = self.last
        sampled: cython.longlong = self.sampled
        rows: cython.longlong = self.rows
        feds: cython.longlong = self.fed_rows
        elements: cython.longlong = self.elements
        values: cython.longlong = self.places
        w4[starts] = 0
        for row in range(self.reqs):
            slot, q, start = (
                w8[at + row],
                (self.numbers[row] if has_numbers else each),
                (w8[lens + row] if is_long else w4[lens + row]),
            )
            total = start + q
            has, first = 0, 0
            if row < first_new:
                has, first = count[slot], begin[slot]
            shift = self.count(self.offset, row) if self.offset >= 0 else 0
            after = total + shift if total > 0 else 0
            end = has
            while end * size < after:
                end += 1
            if is_long:
                w8[lens + row] = total
            else:
                w4[lens + row] = total
            w4[kv_lens + row] = total
            x = start + shift
            nth = x // size
            inside = x - nth * size
            page = 0
            if q > 0:
                page = table_of[slot * wide_table + nth] if nth < has else taken[fresh + nth - has]
            told = ids and self.has_told and self.told[row]
            if not told and q > 0 and self.fed > 0:
                w8[feds] = row
                feds += 1
            for i in range(q):
                if inside == size:
                    nth += 1
                    inside = 0
                    page = table_of[slot * wide_table + nth] if nth < has else taken[fresh + nth - has]
                if ids:
                    w8[source + t] = 0 if told else slot * wide + at_id[i]
                if both:
                    w8[inputs + t] = told_ids[nth_told] if told else 0
                    nth_told += told
                w8[positions + t] = start + i
                w8[mapping + t] = page * size + inside
                inside += 1
                t += 1
            w4[starts + row + 1] = t
            if width:
                for i in range(sent[slot] if row < first_new else 0, end):
                    if i < first:
                        continue
                    page = table_of[slot * wide_table + i] if i < has else taken[fresh + i - has]
                    stop = min((i + 1) * size, width)
                    for x in range(i * size, stop):
                        w8[elements + k] = slot * width + x
                        w4[values + k] = page * size + x - i * size
                        k += 1
            fresh += end - has
            if not has_samples or self.samples[row]:
                w8[last + s] = t - 1
                w8[sampled + s] = slot
                w8[rows + s] = row
                s += 1
        for row in range(self.reqs, self.n):  # padded rows end where they begin
            w4[starts + row + 1] = t
            w4[kv_lens + row] = 0
            if everyone:
                w8[last + row] = w8[sampled + row] = 0
        for i in range(t, self.padded):  # padded tokens are id 0 at position 0 of slot 0, in location 0
            if ids:
                w8[source + i] = 0
            if both:
                w8[inputs + i] = 0
            w8[positions + i] = 0
            w8[mapping + i] = 0
        return 0

    @cython.cfunc
    def _some(self, n: cython.Py_ssize_t, order: cython.longlong) -> Requests:
        requests: Requests = Requests.__new__(Requests)
        requests.slots = requests.gens = requests.order = self.w8
        requests.n, requests.first = n, -1 if n == self.reqs else order
        requests.first_slot, requests.first_gen = self.at[self.columns.slots] // 8, self.gens
        return requests

    @cython.ccall
    def those_fed(self) -> Requests:
        """The requests whose ids, or true lengths, the relay has."""
        return self._some(self.fed, self.fed_rows)

    def those_sampling(self) -> Requests:
        """The requests that sample."""
        return self._some(self.s, self.rows)

    def those_joining(self, n: cython.Py_ssize_t) -> Requests:
        """The last `n` requests."""
        requests: Requests = self._some(self.reqs, 0)
        requests.n = n
        requests.first_slot += self.reqs - n
        requests.first_gen += self.reqs - n
        return requests

    def commit(self, rules: StepRules, epoch: cython.longlong, share: cython.longlong, bounded: cython.bint) -> None:
        """Takes the slots and pages that the block names already, and moves the lengths on. Cannot fail.

        `epoch` and `share` are the last changes of pages by now. Tokens count as accepted, but for guesses: all of a
        request that the relay feeds several but the first, and of one whose length is a bound.
        """
        slots: Indices = rules.slots
        pages: PageRows = rules.pages
        row: cython.longlong
        slot: cython.longlong
        q: cython.longlong
        total: cython.longlong
        before: cython.longlong
        after: cython.longlong
        told: cython.bint
        no_ids: cython.bint = not rules.ids
        has_told: cython.bint = self.has_told
        first_new: cython.longlong = self.reqs - self.takes
        at: cython.longlong = self.at[self.columns.slots] // 8
        # Names of their own: to a compiler each write into memory may change every attribute.
        w8: cython.longlong[::1] = self.w8
        w4: cython.int[::1] = self.w4
        lens: cython.longlong = self.lens
        is_long: cython.bint = self.long_lens
        shifted: cython.bint = self.offset >= 0
        each: cython.longlong = self.each
        has_numbers: cython.bint = self.has_numbers
        count: cython.int[::1] = pages.count
        committed: cython.longlong[::1] = pages.committed
        accepted: cython.longlong[::1] = pages.accepted
        size: cython.longlong = pages.page_size
        for row in range(self.reqs):
            slot, q, total = (
                w8[at + row],
                (self.numbers[row] if has_numbers else each),
                (w8[lens + row] if is_long else w4[lens + row]),
            )
            before, after = total - q, total
            if shifted:
                before, after = self.in_pages(row, before), self.in_pages(row, after)
            told = no_ids or (has_told and self.told[row] != 0)
            if row >= first_new:
                slots.own(slot)
                pages.launched[slot] = accepted[slot] = before
                pages.sent[slot] = 0
            while count[slot] * size < after:
                pages.append_page(slot)
            committed[slot] = after
            if told or not bounded:
                accepted[slot] = before + 1 if q > 1 and not told else after
        self.epoch, self.share, self.guesses = epoch, share, bounded and self.fed > 0
        if self.takes:
            slots.count_taken(self.takes)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def behind(self, row: cython.longlong, launched: cython.longlong, before: cython.longlong) -> cython.bint:
        """Whether all tokens before those of a step are launched: true of any length that the relay has."""
        return launched >= before or (self.guesses and not (self.has_told and self.told[row]))

    def running(
        self, rules: StepRules, epoch: cython.longlong, share: cython.longlong, asked: cython.bint, numbers: Any
    ) -> object:
        """`inputs` asks first: each request is there, with the tokens of the step. None, or the rule broken.

        All tokens before these are launched. If changes of pages came after those of the step, `changed` says whether
        any was of a request. `numbers` is as for `refused_read`.
        """
        slots: Indices = rules.slots
        pages: PageRows = rules.pages
        row: cython.longlong
        slot: cython.longlong
        after: cython.longlong
        before: cython.longlong
        later: cython.bint = asked and (epoch != self.epoch or share != self.share)
        at: cython.longlong = self.at[self.columns.slots] // 8
        w8: cython.longlong[::1] = self.w8
        w4: cython.int[::1] = self.w4
        lens: cython.longlong = self.lens
        is_long: cython.bint = self.long_lens
        shifted: cython.bint = self.offset >= 0
        gens: cython.longlong = self.gens
        state: cython.uchar[::1] = slots.state
        generation: cython.longlong[::1] = slots.generation
        committed: cython.longlong[::1] = pages.committed
        self.changed = False
        for row in range(self.reqs):
            slot = w8[at + row]
            if state[slot] != LIVE or generation[slot] != w8[gens + row]:
                return self.met("held", row, slot)
            after = w8[lens + row] if is_long else w4[lens + row]
            before = after - (self.numbers[row] if self.has_numbers else self.each)
            if shifted:
                before, after = self.in_pages(row, before), self.in_pages(row, after)
            if later and (rules.epochs[slot] > self.epoch or rules.shares[slot] > self.share):
                self.changed = True
            if asked and committed[slot] < after:
                return self.met("derived", row, after)
            if asked and before < after and not self.behind(row, pages.launched[slot], before):
                return self.met("unwritten", row, before)
        if self.fed:
            row = refused_read(rules.read, self.those_fed(), DEVICE, asked, numbers)
            if row >= 0:
                return self.met("read", -1, row)
        return None

    def table_written(self, rules: StepRules) -> None:
        """The rows of the token table are written for these requests, but for those without a token."""
        row: cython.longlong
        at: cython.longlong = self.at[self.columns.slots] // 8
        for row in range(self.reqs):
            if (self.w8[self.lens + row] if self.long_lens else self.w4[self.lens + row]) > 0:
                rules.written[self.w8[at + row]] = self.w8[self.gens + row]

    def launched(self, rules: StepRules, number: cython.longlong) -> None:
        """Forward `number` was given to its stream: it writes tokens of each request that has all before them written.

        The places of its pages have been written into the token table, and it has taken the entries of the relay.
        """
        pages: PageRows = rules.pages
        row: cython.longlong
        slot: cython.longlong
        before: cython.longlong
        after: cython.longlong
        end: cython.longlong
        at: cython.longlong = self.at[self.columns.slots] // 8
        w8: cython.longlong[::1] = self.w8
        w4: cython.int[::1] = self.w4
        lens: cython.longlong = self.lens
        is_long: cython.bint = self.long_lens
        shifted: cython.bint = self.offset >= 0
        launched: cython.longlong[::1] = pages.launched
        sent: cython.int[::1] = pages.sent
        size: cython.longlong = pages.page_size
        written: cython.bint = rules.table > 0
        forward: cython.longlong[::1] = rules.slots.forward
        for row in range(self.reqs):
            slot, after = w8[at + row], (w8[lens + row] if is_long else w4[lens + row])
            forward[slot] = number
            before = after - (self.numbers[row] if self.has_numbers else self.each)
            if shifted:
                before, after = self.in_pages(row, before), self.in_pages(row, after)
            if launched[slot] < after and self.behind(row, launched[slot], before):
                launched[slot] = after
            if written:
                end = sent[slot]
                while end * size < after:
                    end += 1
                sent[slot] = cython.cast(cython.int, end)
        if self.fed:
            take_entries(rules.read, self.those_fed(), DEVICE)
