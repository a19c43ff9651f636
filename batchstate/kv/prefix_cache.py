"""`PrefixCache`: pages that stay readable under a key when their requests are gone, until their memory is needed."""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from operator import itemgetter
from typing import SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate._allocator import FREE, FreeIndices, size_of
from batchstate.errors import ArgumentError
from batchstate.kv.pages import PageLease, PagePool
from batchstate.mirror import Slots
from batchstate.runtime.base import OfThisProcess
from batchstate.violations import Where

__all__ = ["CacheFit", "PrefixCache", "PrefixCacheStats"]

Ints = npt.NDArray[np.int64]


@final
class CachedPages:
    """The free pages of a pool, some of them cached: under a key, with the KV written on them.

    Those without a key are taken first, the last freed before others. Then come the cached ones, the first freed
    before others, and lose their keys: they are evicted. Among pages that become free together the last goes first, so
    that the end of a prefix goes before its beginning. A cached page may have holders too, or wait for a fence; then
    it is not free, and not evicted.

    Attributes:
        count: free pages, the cached ones included.
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
        self._key_of = np.full(num, None, dtype=np.object_)  # of cached pages; entries of others are old
        # A queue with holes: an entry counts if its page names this place. Twice as long as it ever has pages, so that
        # closing the holes costs O(1) for each page that enters.
        self._queue = np.zeros(2 * self.capacity, dtype=np.int64)
        self._places = np.arange(2 * self.capacity)
        self._place_of = np.full(num, -1, dtype=np.int64)
        self._head = self._tail = 0
        self._shown = self._place_of[:0], 0  # the cached ones that `top` showed last, and where the queue goes on

    @property
    def idle(self) -> int:
        """Cached pages that are free."""
        return self.count - self._plain.count

    # As a free list

    def top(self, n: int) -> Ints:
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
        pages: Sequence[int]
        try:  # the fastest way to look many up
            pages = itemgetter(*keys)(self.pages) if len(keys) > 1 else [self.pages[key] for key in keys]
        except KeyError:
            pages = list(iter(map(self.pages.get, keys).__next__, None))
        return np.fromiter(pages, dtype=np.int64, count=len(pages))

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


@final
@attrs.frozen
class PrefixCacheStats:
    """A prefix cache in numbers.

    Attributes:
        keys: cached pages.
        idle: those without a holder; they are counted among the free pages of the pool.
        queried: pages that `match` was asked for, since the cache was made.
        hits: pages that it found.
        evicted: pages that were taken for others, or evicted, before anything else was done with their keys.
    """

    keys: int
    idle: int
    queried: int
    hits: int
    evicted: int


@final
@attrs.frozen
class CacheFit:
    """Effect of admitting a request.

    Attributes:
        hits: pages of its prefix that are cached.
        fits: whether the others can be taken now. Pages that wait for a fence do not count.
        evicted: the keys that would be evicted for them, in that order.
    """

    hits: int
    fits: bool
    evicted: tuple[Hashable, ...]


@final
class PrefixCache(OfThisProcess):
    """The pages of a pool that can be looked up by key.

    A key stands for all tokens up to the end of its page: a hash of them, or a tuple of the key before and the page's
    own tokens. A cached page is not written any more. When its last holder leaves, the page is free, and it
    stays in the cache until it is needed: taking pages takes those without a key first, then the cached ones, the
    first released before others, and of those released together the end of a prefix before its beginning. Costs
    O(pages that are named).

    Args:
        pages: the pool; one cache each.
        notices: keep the keys of evicted pages for `take_evicted`, as vLLM does for its KV events. They pile up until
            they are taken.

    Raises:
        ArgumentError: the pool has a cache.
    """

    def __init__(self, pages: PagePool, *, notices: bool = False) -> None:
        self.pages = pages
        self._references = pages._references
        self._match = f"{pages.name}: match"
        pages.transaction.enter(f"{pages.name}: PrefixCache")
        if self._references.cached is not None:
            raise ArgumentError(f"{pages.name} has a prefix cache already", pages, "use the one that was made first")
        self._cached = self._references.cached = self._references.allocator.replace_free_list(CachedPages)
        if notices:
            self._cached.notices = []
        self._queried = self._hits = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.pages.name!r}, {len(self)} keys, {self._cached.idle} idle)"

    def __len__(self) -> int:
        """Cached pages."""
        return len(self._cached.pages)

    def __bool__(self) -> bool:
        return True  # `if self.cache:` asks whether there is a cache; an empty one would never get its first page

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cached.pages

    @property
    def stats(self) -> PrefixCacheStats:
        """The cache in numbers, after `reap`."""
        self.pages.reap()
        cached = self._cached
        return PrefixCacheStats(len(cached.pages), cached.idle, self._queried, self._hits, cached.evicted)

    def insert(self, owner: Slots | PageLease, keys: Sequence[Hashable], *, first: SupportsIndex = 0) -> int:
        """Caches pages of a request or lease under `keys`, while it holds them.

        A key that is there keeps its page: the owner then has a copy of its own, and `PagePool.rebase` can put it onto
        the cached one.

        Args:
            owner: one live handle, or a lease.
            keys: of its pages from `first` on, in order, each once.
            first: how many pages come before: those that are cached already need not be named again.

        Returns:
            how many keys are there for another page.

        Raises:
            Violation: PAGE_UNWRITTEN, at `cheap`: no work was launched that writes the pages. LENGTH_ORDER: they are
                not committed. PAGE_RELEASED: they were given back.
            ArgumentError: keys that repeat; a page that is cached under another key; not one slot.
        """
        pool, operation, cached = self.pages, "insert", self._cached
        named, skipped = _checked(keys, f"{pool.name}: insert"), size_of(first, f"{pool.name}: insert: first")
        pool.transaction.enter(f"{pool.name}: insert")
        pages, writer = pool._sharing.prefix(owner, (skipped + len(named)) * pool.page_size, operation)
        pages = pages[skipped:]
        there = list(map(cached.pages.get, named))
        under_a_key = cached.cached[pages]
        if np.count_nonzero(under_a_key) or there.count(None) < len(named):
            numbers = pages.tolist()
            other = [page for page, old, has in zip(numbers, there, under_a_key, strict=True) if has and old != page]
            if other:
                problem = f"{pool.name}: insert: page {other[0]} is cached under another key"
                remedy = "`remove` that key first, or pass `first` and the keys after it"
                raise ArgumentError(problem, cached.keys_of(np.array(other[:1]))[0], remedy)
            new = [at for at, old in enumerate(there) if old is None]
            duplicates = sum(old not in (None, page) for page, old in zip(numbers, there, strict=True))
            pages, named = pages[new], [named[at] for at in new]
        else:
            duplicates = 0
        pool.transaction.operation = operation
        cached.enter(pages, named, self._references.generations.of(pages), writer)
        pool._sharing.note(owner, operation)
        pool._done()
        return duplicates

    def match(self, keys: Sequence[Hashable]) -> PageLease:
        """Holds the longest prefix of `keys` that is cached; share it, then release the lease.

        Returns:
            a lease of the pages of the first keys, up to the first that is not there: it may have no pages.

        Raises:
            Violation: SLOT_STALE_HANDLE, at `cheap`: a page was given to another since.
            ArgumentError: keys that repeat.
        """
        pool, references, cached = self.pages, self._references, self._cached
        pool.transaction.enter(self._match)
        references.query_fences()
        keys = keys if type(keys) is list else _checked(keys, self._match)
        pages = cached.find(keys)
        if references.allocator.repeated(pages):
            _checked(keys, self._match)
        if levels.cheap:
            held, current = cached.generations[pages], references.generations.of(pages)
            if held.tobytes() != current.tobytes():
                invariants.slot_stale_handle(pages, held, current, **pool._where("match"))
        writer = pool.writes.behind(cached.writers[pages])
        pool.transaction.operation = "match"
        references.revive(pages, "match")
        self._queried += len(keys)
        self._hits += len(pages)
        return pool._sharing.lease(pages, pages.size * pool.page_size, writer)

    def fit(self, num_pages: SupportsIndex, keys: Sequence[Hashable] = ()) -> CacheFit:
        """Says what would be evicted to admit a request of `num_pages` pages that begins with `keys`. Changes nothing.

        Raises:
            ArgumentError: keys that repeat, or more than pages.
        """
        pool, cached = self.pages, self._cached
        named, wanted = _checked(keys, f"{pool.name}: fit"), size_of(num_pages, f"{pool.name}: fit: num_pages")
        size_of(len(named), f"{pool.name}: fit: keys, one for a page", most=wanted)
        pool.reap()
        hits = cached.find(named)
        idle = cached.among_idle(hits)
        missing = wanted - hits.size
        short = missing - (cached.count - cached.idle)
        oldest = cached.oldest(min(short + idle.size, cached.idle)) if short > 0 else idle[:0]
        evicted = oldest[~np.isin(oldest, idle)][: max(short, 0)]
        fits = missing <= cached.count - idle.size
        return CacheFit(hits.size, fits, tuple(cached.keys_of(evicted)) if fits else ())

    def evict(self, num_pages: SupportsIndex) -> int:
        """Takes the keys from the `num_pages` pages that would be evicted first, or all there are; says how many."""
        number = size_of(num_pages, f"{self.pages.name}: evict: num_pages")
        self.pages.reap()
        self.pages.transaction.operation = "evict"
        evicted = self._cached.evict(number)
        self.pages._done()
        return evicted

    def take_evicted(self) -> list[Hashable]:
        """The keys evicted since this was last called, in that order: by taking pages, or by `evict`.

        Keys that `remove`, `clear` or the end of the pool took out are not among them. Call it before you insert again,
        as in each step: a key may come back.

        Raises:
            ArgumentError: the cache was made without `notices=True`.
        """
        if (keys := self._cached.notices) is None:
            problem = f"{self.pages.name}: take_evicted: the cache keeps no notices"
            raise ArgumentError(problem, self, "make it with PrefixCache(pages, notices=True)")
        self._cached.notices = []
        return keys

    def remove(self, keys: Collection[Hashable]) -> int:
        """Takes these keys out, each named once; their pages stay with their holders. Says how many were there."""
        cached = map(self._cached.pages.get, _checked(keys, f"{self.pages.name}: remove"))
        pages = np.array([page for page in cached if page is not None], dtype=np.int64)
        self.pages.transaction.enter(f"{self.pages.name}: remove")
        self.pages.transaction.operation = "remove"
        self._cached.remove(pages)
        self.pages._done()
        return int(pages.size)

    def clear(self) -> int:
        """Takes all keys out, as after new weights; says how many there were."""
        return self.remove(self._cached.pages)


def _checked(keys: Collection[Hashable], label: str) -> list[Hashable]:
    """The keys as a list."""
    if isinstance(keys, (str, bytes)):
        raise ArgumentError(f"{label}: expected a list of keys, got {keys!r}", keys, f"pass a list: [{keys!r}]")
    listed = list(keys)
    if len(set(listed)) < len(listed):
        raise ArgumentError(f"{label}: expected distinct keys, got {keys!r}", keys, "name each key once")
    return listed
