"""Which pages of a pool are cached, under which keys, and in which order those without a holder are evicted."""

from collections import deque
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate._allocator import FREE, FreeIndices
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@final
class CachedPages:
    """The free pages of a pool, of which some are cached: under a key, with what was written on them.

    Those without a key are taken first, the last freed before others. Then come the cached ones, the first freed
    before others, and lose their keys: they are evicted. Of pages that become free together the last goes first, so
    that the end of a prefix goes before its beginning. A cached page may have holders too, or wait for a fence; then
    it is not free, and not evicted.

    Attributes:
        count: free pages, the cached ones included.
        capacity: most pages that can be free.
        pages: key -> page.
        cached: bool[num_pages + 1], pages with a key.
        generations: int64[num_pages + 1], of the pages when they were cached.
        writers: int64[num_pages + 1], the stream that wrote each, of `KVWrites`.
        evicted: how many ever lost their keys to be taken, or by `evict`.
        notices: their keys, in that order, until `take_evicted` takes them; None if they are not kept.
    """

    def __init__(self, plain: FreeIndices) -> None:
        self._plain = plain
        self.count, self.capacity = plain.count, plain.capacity
        num = self.capacity + 1
        self.pages: dict[Hashable, int] = {}
        self.cached = np.zeros(num, dtype=np.bool_)
        self.generations = np.zeros(num, dtype=np.int64)
        self.writers = np.zeros(num, dtype=np.int64)
        self.evicted = 0
        self.notices: list[Hashable] | None = None
        self._key_of = np.full(num, None, dtype=np.object_)  # of cached pages; what stands there for others is old
        # A queue with holes: an entry counts if its page names this place. Twice as long as it ever has pages, so that
        # closing the holes costs O(1) for each page that enters.
        self._queue = np.zeros(2 * self.capacity, dtype=np.int64)
        self._places = np.arange(2 * self.capacity)
        self._place_of = np.full(num, -1, dtype=np.int64)
        self._head = self._tail = 0
        self._shown = self._place_of[:0], 0  # the cached ones that `top` showed last, and where the queue goes on

    def __repr__(self) -> str:
        return f"CachedPages({len(self.pages)} keys, {self.idle} of {self.count} free pages)"

    @property
    def idle(self) -> int:
        """Cached pages that are free."""
        return self.count - self._plain.count

    # As a free list

    def top(self, n: int) -> Ints:
        """The next `n` to be taken, in that order, as a new array. They stay free."""
        there = self._plain.count
        if n <= there:
            return self._plain.top(n)
        self._shown = self._standing(n - there)
        return self._shown[0] if not there else np.concatenate([self._plain.top(there), self._shown[0]])

    def drop(self, n: int) -> None:
        """Takes away what `top(n)`, just called, has shown; the cached ones are evicted."""
        there = self._plain.count
        self.count -= n
        if n <= there:
            self._plain.drop(n)
        else:
            if there:
                self._plain.drop(there)
            self._pop(*self._shown)

    def push(self, indices: Ints) -> None:
        """Makes pages free; those with a key stay cached."""
        self.count += indices.size
        if self.pages:
            cached = self.cached[indices]
            number = np.count_nonzero(cached)
            if number:
                self._enqueue(indices[::-1] if number == indices.size else indices[cached][::-1])
                if number == indices.size:
                    return
                indices = indices[~cached]
        self._plain.push(indices)

    def entries(self) -> Ints:
        """All free pages, as a new array."""
        return np.concatenate([self._plain.entries(), self.oldest(self.idle)])

    # The order of eviction

    def oldest(self, n: int) -> Ints:
        """The `n` cached and free pages that are evicted first, int64[n], a new array."""
        return self._standing(n)[0]

    def _standing(self, n: int) -> tuple[Ints, int]:
        """The first `n` entries that count, and where the queue goes on behind them."""
        stop = self._head + n
        entries = self._queue[self._head : stop].copy()
        if self._place_of[entries].tobytes() == self._places[self._head : stop].tobytes():
            return entries, stop
        reach = 2 * n
        while True:
            places = self._places[self._head : min(self._head + reach, self._tail)]
            entries = self._queue[places]
            there = np.flatnonzero(self._place_of[entries] == places)[:n]
            if there.size == n or places.size < reach:
                return entries[there], int(places[there[-1]]) + 1 if there.size else self._tail
            reach *= 4

    def _pop(self, pages: Ints, head: int) -> None:
        """Evicts the first pages of the queue, which goes on at `head`."""
        self._head = head
        self._place_of[pages] = -1
        if self.notices is not None:
            self.notices += self.keys_of(pages)
        self.forget(pages)
        self.evicted += pages.size

    def _enqueue(self, pages: Ints) -> None:
        if self._tail + pages.size > self._queue.size:
            entries = self._standing(self.idle)[0]
            self._queue[: entries.size] = entries
            self._place_of[entries] = self._places[: entries.size]
            self._head, self._tail = 0, entries.size
        stop = self._tail + pages.size
        self._queue[self._tail : stop] = pages
        self._place_of[pages] = self._places[self._tail : stop]
        self._tail = stop

    # Keys

    def find(self, keys: Sequence[Hashable]) -> Ints:
        """The pages of `keys` int64[n], up to the first that is not there."""
        found: Sequence[int]
        try:  # the fastest way to look many up
            found = itemgetter(*keys)(self.pages) if len(keys) > 1 else [self.pages[key] for key in keys]
        except KeyError:
            found = list(iter(map(self.pages.get, keys).__next__, None))
        return np.fromiter(found, dtype=np.int64, count=len(found))

    def among_idle(self, pages: Ints) -> Ints:
        """Those of `pages` that are cached and free."""
        return pages[self._place_of[pages] >= 0]

    def keys_of(self, pages: Ints) -> list[Hashable]:
        """The keys of cached pages."""
        keys: list[Hashable] = self._key_of[pages].tolist()
        return keys

    def enter(self, pages: Ints, keys: Sequence[Hashable], generations: Ints, writer: int) -> None:
        """Caches pages that have a holder and no key, under keys that are not there."""
        self.pages.update(zip(keys, pages.tolist(), strict=True))
        self._key_of[pages] = np.fromiter(keys, dtype=np.object_, count=len(keys))
        self.cached[pages] = True
        self.generations[pages] = generations
        self.writers[pages] = writer

    def forget(self, pages: Ints) -> None:
        """Takes the keys from cached pages, which are none of the free ones any more, or not free."""
        deque(map(self.pages.pop, self._key_of[pages].tolist()), 0)  # the fastest way to delete many
        self.cached[pages] = False
        self.generations[pages] = 0  # which no page has that was taken: found before, it is refused

    def revive(self, pages: Ints, free: int) -> None:
        """Cached pages get a holder, of which `free` are free until now."""
        self.count -= free
        self._place_of[pages] = -1

    def evict(self, n: int) -> int:
        """Makes the `n` oldest, or as many as there are, free pages without a key; says how many."""
        pages, head = self._standing(min(n, self.idle))
        self._pop(pages, head)
        self._plain.push(pages)
        return int(pages.size)

    def clear(self) -> None:
        """Takes the keys from all."""
        self.remove(self.cached.nonzero()[0])

    def remove(self, pages: Ints) -> None:
        """Takes the keys from cached pages int64[n]; those that are free stay free."""
        free = self.among_idle(pages)
        self._place_of[free] = -1
        self.forget(pages)
        self._plain.push(free)

    # Checks

    def verify(self, states: npt.NDArray[np.uint8], generations: Ints, where: Where) -> None:
        """Checks that each key names a page and each cached page a key, and that the free ones stand in the queue."""
        size = self.cached.size
        cached = self.cached.astype(np.int64)
        named = np.fromiter(self.pages.values(), dtype=np.int64, count=len(self.pages))
        invariants.page_owner(np.bincount(named, minlength=size), cached, **where)
        queued = np.bincount(self._standing(self._tail)[0], minlength=size)
        invariants.page_owner(queued, cached * (states == FREE), **where)
        invariants.slot_stale_handle(named, self.generations[named], generations[named], **where)
