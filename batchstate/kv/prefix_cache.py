"""`PrefixCache`: pages that stay readable under a key when their requests are gone, until their memory is needed."""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from operator import itemgetter
from typing import SupportsIndex, final

import attrs
import numpy as np

from batchstate import invariants
from batchstate._allocator import size_of
from batchstate._arrays import Ints
from batchstate.errors import ArgumentError
from batchstate.kv.pages import PageLease, PagePool
from batchstate.mirror import Slots
from batchstate.runtime.base import OfThisProcess

__all__ = ["CacheFit", "PrefixCache", "PrefixCacheStats"]


@final
@attrs.frozen
class PrefixCacheStats:
    """A prefix cache in numbers; the last three since it was made.

    Attributes:
        keys: cached pages.
        idle: those without a holder; they are counted among the free pages of the pool.
        queried: pages that `match` was asked for.
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
    """Effect of admitting a request, of whose prefix `hits` pages are cached.

    Attributes:
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
    own tokens. A cached page is not written any more. When its last holder leaves, behind all fences, the page is
    free, and it stays in the cache until it is needed: taking pages takes those without a key first, then the cached
    ones, those that became free first before others, and of those of one request the end of a prefix before its
    beginning. Costs O(pages that are named). A pool has one cache, else ArgumentError. With `notices` the keys of
    evicted pages are kept for `take_evicted`, as vLLM does for its KV events, and pile up until they are taken.
    """

    def __init__(self, pages: PagePool, *, notices: bool = False) -> None:
        self.pages = pages
        self._rows, self._holders = pages._rows, pages._holders
        self._match = f"{pages.name}: match"
        pages.transaction.enter(f"{pages.name}: PrefixCache")
        if self._holders.cache is not None:
            raise ArgumentError(f"{pages.name} has a prefix cache already", pages, "use the one that was made first")
        self._holders.cache = self
        self._page_of: dict[Hashable, int] = {}  # with those that the core has taken the keys from, until `_settle`
        self._key_of = np.full(pages.num_pages + 1, None, dtype=np.object_)  # of cached pages; others' are old
        self._writers = np.zeros(pages.num_pages + 1, dtype=np.int64)  # the stream that wrote each, of `KVWrites`
        self._notices: list[Hashable] | None = [] if notices else None
        self._queried = self._hits = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.pages.name!r}, {len(self)} keys, {self._rows.idle} idle)"

    def __len__(self) -> int:
        """Cached pages."""
        return len(self._page_of) - int(self._rows.num_lost)

    def __bool__(self) -> bool:
        return True  # `if self.cache:` asks whether there is a cache; an empty one would never get its first page

    def __contains__(self, key: Hashable) -> bool:
        return bool(self._rows.arrays["cached"][self._page_of.get(key, 0)])

    @property
    def stats(self) -> PrefixCacheStats:
        """The cache in numbers, after `reap`."""
        self.pages.reap()
        return PrefixCacheStats(len(self), self._rows.idle, self._queried, self._hits, self._rows.evicted)

    def _settle(self) -> None:
        """Removes the keys of pages that were taken since: the core has noted these."""
        if self._rows.num_lost:
            with self.pages.transaction.changing("evict"):
                keys = self._removed(self._rows.take_lost())
                if self._notices is not None:
                    self._notices += keys

    def _removed(self, pages: Ints) -> list[Hashable]:
        """Removes the keys of pages, and returns them."""
        keys: list[Hashable] = self._key_of[pages].tolist()
        deque(map(self._page_of.pop, keys), 0)  # the fastest way to delete many
        return keys

    def _find(self, keys: Sequence[Hashable]) -> Ints:
        """The pages of `keys` int64[n], up to the first that is not there."""
        pages: Sequence[int]
        try:  # the fastest way to look many up
            pages = itemgetter(*keys)(self._page_of) if len(keys) > 1 else [self._page_of[key] for key in keys]
        except KeyError:
            pages = list(iter(map(self._page_of.get, keys).__next__, None))
        return np.array(pages, dtype=np.int64)

    def insert(self, owner: Slots | PageLease, keys: Sequence[Hashable], *, first: SupportsIndex = 0) -> int:
        """Caches pages of a request or lease under `keys`, while it holds them.

        `owner` is one live handle, or a lease, and the keys are of its pages from page `first` on, in order, each once:
        those that are cached already need not be named again. A key that is there keeps its page: the owner then has a
        copy of its own, and `PagePool.rebase` can put it onto the cached one. Returns how many keys are there for
        another page.

        Raises:
            Violation: PAGE_UNWRITTEN, at `cheap`: no work was launched that writes the pages. LENGTH_ORDER: they are
                not committed. PAGE_RELEASED: they were given back.
            ArgumentError: keys that repeat; a page that is cached under another key; not one slot.
        """
        pool, operation = self.pages, "insert"
        named, skipped = _checked(keys, f"{pool.name}: insert"), size_of(first, f"{pool.name}: insert: first")
        pool.transaction.enter(f"{pool.name}: insert")
        tokens = (skipped + len(named)) * pool.page_size
        pages, writer = pool._sharing.prefix(owner, tokens, operation, skipped * pool.page_size)
        self._settle()
        pages = pages[skipped:]
        there = list(map(self._page_of.get, named))
        new, under_a_key = [at for at, old in enumerate(there) if old is None], self._rows.arrays["cached"][pages]
        duplicates = 0
        if len(new) < len(named) or np.count_nonzero(under_a_key):
            for page, old, cached in zip(pages.tolist(), there, under_a_key.tolist(), strict=True):
                if cached and old != page:
                    problem = f"{pool.name}: insert: page {page} is cached under another key"
                    remedy = "`remove` that key first, or pass `first` and the keys after it"
                    raise ArgumentError(problem, self._key_of[page], remedy)
                duplicates += old not in (None, page)
            pages, named = pages[new], [named[at] for at in new]
        pool.transaction.operation = operation
        self._page_of.update(zip(named, pages.tolist(), strict=True))
        self._key_of[pages] = np.fromiter(named, dtype=np.object_, count=len(named))
        self._writers[pages] = writer
        self._rows.enter(pages)
        pool._sharing.note(owner, operation)
        pool._done()
        return duplicates

    def match(self, keys: Sequence[Hashable]) -> PageLease:
        """Holds the longest prefix of `keys` that is cached; share it, then release the lease, which may have no pages.

        Raises:
            Violation: SLOT_STALE_HANDLE, at `cheap`: a page was given to another since.
            ArgumentError: keys that repeat among those that are cached.
        """
        pool = self.pages
        pool.transaction.enter(self._match)
        self.pages.transaction.reap()
        keys = keys if type(keys) is list else _checked(keys, self._match)
        self._settle()
        pages = self._find(keys)
        if self._rows.look_distinct(pages) >= 0:
            _checked(keys, self._match)
        writer = pool.writes.behind(self._writers[pages])
        self._holders.hold(pages, 1, "match", by_key=True)
        self._queried += len(keys)
        self._hits += pages.size
        return pool._sharing.lease(pages, pages.size * pool.page_size, writer)

    def fit(self, num_pages: SupportsIndex, keys: Sequence[Hashable] = ()) -> CacheFit:
        """Says what would be evicted to admit a request of `num_pages` pages that begins with `keys`. Changes nothing.

        Raises:
            ArgumentError: keys that repeat, or more than pages.
        """
        pool, rows, arrays = self.pages, self._rows, self._rows.arrays
        named, wanted = _checked(keys, f"{pool.name}: fit"), size_of(num_pages, f"{pool.name}: fit: num_pages")
        size_of(len(named), f"{pool.name}: fit: keys, one for a page", most=wanted)
        pool.reap()
        self._settle()
        hits = self._find(named)
        idle = hits[(arrays["holders"][hits] == 0) & (arrays["leaving"][hits] == 0)]
        missing = wanted - hits.size
        short = max(missing - (rows.free - rows.idle), 0)
        oldest = rows.oldest(short + idle.size if short else 0)
        evicted = oldest[~np.isin(oldest, idle)][:short]
        fits = missing <= rows.free - idle.size
        return CacheFit(hits.size, fits, tuple(self._key_of[evicted].tolist()) if fits else ())

    def evict(self, num_pages: SupportsIndex) -> int:
        """Takes the keys from the `num_pages` pages that would be evicted first, or all there are; says how many."""
        number = size_of(num_pages, f"{self.pages.name}: evict: num_pages")
        self.pages.reap()
        self.pages.transaction.operation = "evict"
        evicted = self._rows.evict(number)
        self._holders.check_whole("evict")
        self.pages._done()
        return int(evicted)

    def take_evicted(self) -> list[Hashable]:
        """The keys evicted since this was last called, in that order: by taking pages, or by `evict`.

        Keys that `remove`, `clear` or the end of the pool took out are not among them. Call it before you insert again,
        as in each step: a key may come back. ArgumentError without `notices=True`.
        """
        label = f"{self.pages.name}: take_evicted"
        if self._notices is None:
            raise ArgumentError(f"{label} of a cache that keeps no notices", self, "make it with notices=True")
        self.pages.transaction.enter(label)
        self._settle()
        keys, self._notices = self._notices, []
        return keys

    def remove(self, keys: Collection[Hashable]) -> int:
        """Takes these keys out, each named once; their pages stay with their holders. Says how many were there."""
        named = _checked(keys, f"{self.pages.name}: remove")
        self.pages.transaction.enter(f"{self.pages.name}: remove")
        self._settle()
        cached = map(self._page_of.get, named)
        pages = np.array([page for page in cached if page is not None], dtype=np.int64)
        self.pages.transaction.operation = "remove"
        self._removed(pages)
        self._rows.forget(pages)
        self._holders.check_whole("remove")
        self.pages._done()
        return int(pages.size)

    def clear(self) -> int:
        """Takes all keys out, as after new weights; says how many there were."""
        return self.remove(self._page_of)

    def _verify(self) -> None:
        """Checks that each key names a page that has one, and each page with a key is named once."""
        named = np.fromiter(self._page_of.values(), dtype=np.int64, count=len(self._page_of))
        arrays, where = self._rows.arrays, self._holders.where("verify")
        lost, size = arrays["lost"][: self._rows.num_lost], arrays["cached"].size
        counted = np.bincount(named, minlength=size) - np.bincount(lost, minlength=size)
        invariants.page_owner(counted, arrays["cached"].astype(np.int64), **where)
        named = arrays["cached"].nonzero()[0]
        invariants.slot_stale_handle(named, arrays["keyed"][named], arrays["generation"][named], **where)


def _checked(keys: Collection[Hashable], label: str) -> list[Hashable]:
    """The keys as a list."""
    if isinstance(keys, (str, bytes)):
        raise ArgumentError(f"{label}: expected a list of keys, got {keys!r}", keys, f"pass a list: [{keys!r}]")
    listed = list(keys)
    if len(set(listed)) < len(listed):
        raise ArgumentError(f"{label}: expected distinct keys, got {keys!r}", keys, "name each key once")
    return listed
