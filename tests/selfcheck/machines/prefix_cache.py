"""`PrefixCache` against a memory of prefixes: hits, eviction in order, rebase, leases of ranges, two streams."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Code, PoolExhaustedError, PrefixCache, levels
from batchstate.kv.pages import PageLease
from batchstate.testing.fences import ManualFence
from tests import refusals
from tests.selfcheck.machine import agree
from tests.selfcheck.machines.pools import HAS_REQUESTS, KVOwner, PagesMachine

Key = tuple[int, ...]
"""All ids up to the end of a page. A token stands for its id and all before it: the last one of a page is its key."""

PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 12))
"""After how many pages a text parts from the others, and how many tokens of it there are."""


class PrefixCacheMachine(PagesMachine):
    """Requests over few tokens, so that many begin alike, in a pool in which cached pages are evicted all the time."""

    NAME = "prefix_cache"
    TARGETS = (
        "two steps in flight",
        "a hit on a free page",
        "a hit on a page that waits for a fence",
        "a hit on a page in use",
        "a hit of two pages",
        "evicted to make room",
        "too few pages with all evicted",
        "a second copy found",
        "rebased onto other pages",
        "a write into a cached page refused",
        "cached before it is written refused",
        "begun with a chain of leases",
        "written on one stream and read on another",
        "a key removed from a page in use",
    )
    MISUSES = refusals.PAGES

    @initialize(size=st.integers(2, 4), num_pages=st.integers(4, 9), page_size=st.integers(1, 3))
    def begin(self, size: int, num_pages: int, page_size: int) -> None:
        self.open_pages(size, num_pages, page_size, 4 * page_size)
        self.settle()
        self.cache = PrefixCache(self.pages, notices=True)
        self.keys: dict[Key, int] = {}  # the cache, key -> page
        self.order: list[Key] = []  # those that are free, the next to be evicted first
        self.admit((1, page_size + 1), False)

    def misused(self, data: st.DataObject) -> refusals.PageCase | None:
        return (self.pages, self._some(data).owner) if self.requests else None

    def snapshot(self) -> tuple[object, ...]:
        return *super().snapshot(), dict(self.cache._page_of), self._evictions()

    def check(self) -> None:
        super().check()
        agree(self.keys, dict(self.cache._page_of), "keys")
        for holder in (*self.requests.values(), *self.leases):
            pages = -(-len(holder.tokens[holder.first :]) // self.pages.page_size)
            agree(pages, len(self.pages_of(holder)), "pages of", holder)
        self._look()
        if not self.steps.depth:
            held = self.held_pages()
            idle = {key for key, page in self.keys.items() if page not in held}
            agree(idle, set(self.order), "cached pages without a holder")

    # Requests

    def _some(self, data: st.DataObject) -> KVOwner:
        return self.requests[data.draw(st.sampled_from([*self.requests]), label="slot")]

    def _keys(self, tokens: list[Key]) -> list[Key]:
        return tokens[self.pages.page_size - 1 :: self.pages.page_size]

    def _look(self) -> None:
        """Free cached pages: new ones stand behind those that were free before."""
        order = self._evictions()
        stayed = [key for key in self.order if key in order]
        agree(stayed, order[: len(stayed)], "the order of eviction")
        self.order = order

    def _evictions(self) -> list[Key]:
        return list(self.cache.fit(self.pages.stats.free).evicted)  # type: ignore[arg-type]

    def _hits(self, keys: list[Key]) -> int:
        misses = [at for at, key in enumerate(keys) if key not in self.keys]
        return misses[0] if misses else len(keys)

    def _match(self, keys: list[Key]) -> PageLease:
        hits = keys[: self._hits(keys)]
        live = self.held_pages()
        self.reached("a hit of two pages", len(hits) > 1)
        for key in hits:
            self.reached("a hit on a free page", key in self.order)
            self.reached("a hit on a page in use", self.keys[key] in live)
            waits = not all(fence.query() for fence in self.behind.get(self.keys[key], ()))
            self.reached("a hit on a page that waits for a fence", waits and self.keys[key] not in live)
        self.order = [key for key in self.order if key not in hits]
        lease = self.cache.match(keys)
        agree([self.keys[key] for key in hits], lease.pages.tolist(), "pages of a hit")
        return lease

    def _taken(self, pages: list[int], evicted: tuple[Any, ...]) -> None:
        agree(self.order[: len(evicted)], list(evicted), "evicted keys")
        agree(list(evicted), self.cache.take_evicted(), "keys that were reported")
        self.order = self.order[len(evicted) :]
        for key in evicted:
            del self.keys[key]
        for page in pages:
            agree([], [key for key, cached in self.keys.items() if cached == page], "keys of a page that was taken")
        self.taken(pages)
        self.reached("evicted to make room", bool(evicted))

    def _text(self, text: int, start: int, stop: int) -> list[Key]:
        ids = [int(at >= text * self.pages.page_size) for at in range(min(stop, self.most))]
        return [tuple(ids[: at + 1]) for at in range(start, len(ids))]

    def _grow(self, holder: KVOwner, tokens: list[Key], evicted: tuple[Any, ...]) -> None:
        before = self.pages_of(holder)
        self.pages.extend(holder.owner, len(holder.tokens) + len(tokens))
        self._taken(self.pages_of(holder)[len(before) :], evicted)
        self.put(holder, tokens)

    def _forward(self, holder: KVOwner, side: bool = False) -> None:
        with self.on(side):
            self.pages.commit(holder.owner, len(holder.tokens))
            self.launch_forward(holder, len(holder.tokens), side)

    def _leave(self, holder: KVOwner, fence: ManualFence | None) -> None:
        self.settle()
        with self.giving_back([holder], fence):
            del self.requests[int(holder.owner.np[0])]
            self.pages.release_requests(holder.owner, after=fence)

    @precondition(lambda self: self.slots.stats.free)
    @rule(drawn=PROMPTS, insert=st.booleans())
    def admit(self, drawn: tuple[int, int], insert: bool) -> None:
        """A request begins with the cached pages of its prompt, and its prefill may be cached."""
        self._look()
        handle, prompt = self.slots.take(1), self._text(drawn[0], 0, drawn[1])
        holder, keys = KVOwner(handle, text=drawn[0]), self._keys(prompt[:-1])
        fit = self.cache.fit(-(-len(prompt) // self.pages.page_size), keys)
        agree(self._hits(keys), fit.hits, "pages of a hit foretold")
        lease = self._match(keys)
        self.pages.share(lease, handle, lease.tokens)
        lease.release(after=None)
        holder.tokens = prompt[: lease.tokens]
        holder.written, holder.side = lease.tokens, False
        self.requests[int(handle.np[0])] = holder
        if not fit.fits:
            self.reached("too few pages with all evicted")
            self.refused(PoolExhaustedError, lambda: self.pages.extend(handle, len(prompt)))
            self._leave(holder, None)
            return
        self._grow(holder, prompt[lease.tokens :], fit.evicted)
        self._forward(holder)
        if insert:
            self._insert(holder)

    @HAS_REQUESTS
    @rule(data=st.data(), more=st.integers(1, 3), forward=st.booleans(), side=st.booleans())
    def extend(self, data: st.DataObject, more: int, forward: bool, side: bool) -> None:
        self._extend(self._some(data), more, forward, side)

    def _extend(self, holder: KVOwner, more: int, forward: bool, side: bool = False) -> None:
        self._look()
        size = self.pages.page_size
        tokens = self._text(holder.text, len(holder.tokens), len(holder.tokens) + more)
        held = self.held_pages()
        partial = self.pages_of(holder)[-1] if tokens and len(holder.tokens) % size else 0
        fit = self.cache.fit(-(-(len(holder.tokens) + len(tokens)) // size) - len(self.pages_of(holder)))
        if partial and (held[partial] > 1 or partial in self.keys.values()):
            self.reached("a write into a cached page refused", partial in self.keys.values())
            self.refused(Code.PAGE_OWNER, lambda: self.pages.extend(holder.owner, len(holder.tokens) + len(tokens)))
        elif not fit.fits:
            self.refused(PoolExhaustedError, lambda: self.pages.extend(holder.owner, len(holder.tokens) + len(tokens)))
        else:
            self._grow(holder, tokens, fit.evicted)
            if forward:
                self._forward(holder, side)

    @HAS_REQUESTS
    @rule(data=st.data(), back=st.integers(1, 4), again=st.booleans())
    def truncate(self, data: st.DataObject, back: int, again: bool) -> None:
        holder, fence = self._some(data), self.fence(data)
        self.settle()
        length = max(0, len(holder.tokens) - back)
        with self.giving_back([holder], fence):
            self.pages.truncate(holder.owner, length, after=fence)
        del holder.tokens[length:]
        holder.written = min(holder.written, length)
        if again:
            self._extend(holder, 1, True)

    @HAS_REQUESTS
    @rule(data=st.data())
    def finish_and_return(self, data: st.DataObject) -> None:
        """A request leaves behind a step in flight, and one with the same prompt comes."""
        holder = self._some(data)
        self._leave(holder, self.steps.record())
        if self.slots.stats.free:
            self.admit((holder.text, max(1, len(holder.tokens))), True)

    @HAS_REQUESTS
    @rule(data=st.data())
    def insert_early(self, data: st.DataObject) -> None:
        """A request has got a page that no forward writes yet; once one does, on a second stream, another begins so."""
        holder = self._some(data)
        self._extend(holder, self.pages.page_size, False)
        self._cache(holder)
        self._forward(holder, True)
        self._cache(holder)
        if self.slots.stats.free:
            self.admit((holder.text, len(holder.tokens) + 1), False)

    @rule()
    def two_copies(self) -> None:
        """Two requests with one prompt are prefilled side by side; one is cached, and the other put onto its pages."""
        if self.slots.stats.free > 1:
            before = set(self.requests)
            for _ in range(2):
                self.admit((0, self.pages.page_size + 1), False)
            for slot in set(self.requests) - before:
                self._insert(self.requests[slot])
                self._rebase(self.requests[slot], None)

    @HAS_REQUESTS
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self._leave(self._some(data), self.fence(data))

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), insert=st.booleans())
    def churn(self, prompts: list[tuple[int, int]], insert: bool) -> None:
        self.steps.complete(self.steps.depth)
        for prompt in prompts:
            for holder in list(self.requests.values()):
                self._leave(holder, None)
            self.admit(prompt, insert)

    # The cache

    @HAS_REQUESTS
    @rule(data=st.data(), rebase=st.booleans())
    def insert(self, data: st.DataObject, rebase: bool) -> None:
        """The whole pages of a request are cached; where they are already, it may be put onto those."""
        holder = self._some(data)
        self._cache(holder)
        if rebase:
            self._rebase(holder, self.fence(data))

    def _cache(self, holder: KVOwner) -> None:
        keys = self._keys(holder.tokens)
        if len(keys) * self.pages.page_size > holder.written:
            if levels.cheap:
                self.reached("cached before it is written refused")
                self.refused(Code.PAGE_UNWRITTEN, lambda: self.cache.insert(holder.owner, keys))
            keys = self._keys(holder.tokens[: holder.written])
        self._insert(holder, keys)

    def _rebase(self, holder: KVOwner, fence: ManualFence | None) -> None:
        self.settle()
        keys, before, size = self._keys(holder.tokens[: holder.written]), self.pages_of(holder), self.pages.page_size
        lease, length = self._match(keys), len(keys) * size
        with self.giving_back([holder], fence):
            moved = self.pages.rebase(holder.owner, lease, length, after=fence)
        pages = lease.pages.tolist()
        agree([pages[at // size] * size + at % size for at in range(length)], moved.locations.np.tolist(), "locations")
        lease.release(after=None)
        self.reached("rebased onto other pages", before != self.pages_of(holder))
        self._forward(holder)

    def _insert(self, holder: KVOwner, keys: list[Key] | None = None) -> None:
        keys = self._keys(holder.tokens[: holder.written]) if keys is None else keys
        own = self.pages_of(holder)
        copies = sum(self.keys.get(key, page) != page for key, page in zip(keys, own, strict=False))
        agree(copies, self.cache.insert(holder.owner, keys), "second copies")
        self.reached("a second copy found", copies > 0)
        for key, page in zip(keys, own, strict=False):
            self.keys.setdefault(key, page)

    @rule(prompt=PROMPTS)
    def lookup(self, prompt: tuple[int, int]) -> None:
        tokens = self._text(prompt[0], 0, self.most if len(self.leases) < 2 else prompt[1])
        lease = self._match(self._keys(tokens))
        self.leases.append(KVOwner(lease, tokens[: lease.tokens], 0, lease.tokens, text=prompt[0]))

    @HAS_REQUESTS
    @rule(data=st.data(), first=st.integers(0, 2), number=st.integers(0, 3))
    def hold(self, data: st.DataObject, first: int, number: int) -> None:
        holder, size = self._some(data), self.pages.page_size
        stop = min(first + number, holder.written // size) * size
        self._hold(holder, min(first * size, stop), stop)

    def _hold(self, holder: KVOwner, begin: int, stop: int) -> None:
        lease = self.pages.hold(holder.owner, stop, first=begin)
        self.leases.append(KVOwner(lease, holder.tokens[:stop], begin, stop, text=holder.text))

    @rule(begin=st.booleans())
    def split_a_prefix(self, begin: bool) -> None:
        """A request of two pages leaves them to a lease, which becomes two."""
        two = 2 * self.pages.page_size
        if long := [holder for holder in self.requests.values() if holder.written >= two]:
            self._hold(long[0], 0, two)
            self._split(self.leases[-1], 1, begin)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), at=st.integers(0, 2), begin=st.booleans())
    def split(self, data: st.DataObject, at: int, begin: bool) -> None:
        self._split(data.draw(st.sampled_from(self.leases), label="lease"), at, begin)

    def _split(self, holder: KVOwner, at: int, begin: bool) -> None:
        self.leases.remove(holder)
        tokens = min(at * self.pages.page_size, holder.owner.tokens)
        parts, cut = holder.owner.split(tokens), holder.first + tokens
        self.leases += [
            KVOwner(parts[0], holder.tokens[:cut], holder.first, cut, text=holder.text),
            KVOwner(parts[1], holder.tokens, cut, holder.written, text=holder.text),
        ]
        self.refused(Code.SLOT_DOUBLE_FREE, lambda: holder.owner.release(after=None))
        if begin and self.requests and not self.slots.stats.free:
            self._leave(next(iter(self.requests.values())), None)
        if begin and not holder.first and self.slots.stats.free and holder.tokens:
            handle = self.slots.take(1)
            shared = self.pages.share(parts, handle, len(holder.tokens))
            agree(self.pages.pages_of(handle).np.tolist(), [page for part in parts for page in part.pages], "a chain")
            agree(len(holder.tokens), len(shared), "tokens of a chain")
            self.requests[int(handle.np[0])] = KVOwner(handle, list(holder.tokens), 0, holder.written, text=holder.text)
            self.reached("begun with a chain of leases", 0 < tokens < len(holder.tokens))

    @rule(number=st.integers(0, 3))
    def evict(self, number: int) -> None:
        self._look()
        gone = self.order[:number]
        agree(len(gone), self.cache.evict(number), "evicted")
        agree(gone, self.cache.take_evicted(), "keys that were reported")
        self._forget(gone)

    @rule(data=st.data(), everything=st.booleans())
    def remove(self, data: st.DataObject, everything: bool) -> None:
        """A chain, a single key, or all are forgotten; requests keep their pages."""
        live = self.held_pages()
        if everything and data.draw(st.booleans(), label="really"):
            agree(len(self.keys), self.cache.clear(), "keys cleared")
            self._forget(list(self.keys))
        elif self.keys:
            keys = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True, max_size=3), label="keys")
            self.reached("a key removed from a page in use", any(self.keys[key] in live for key in keys))
            agree(len(keys), self.cache.remove([*keys, (9, 9)]), "keys removed")
            self._forget(keys)

    def _forget(self, keys: list[Key]) -> None:
        self.order = [key for key in self.order if key not in keys]
        for key in keys:
            del self.keys[key]

    @rule()
    def clear_all(self) -> None:
        """Slots, pages and cache begin anew, if nothing waits."""
        if self.slots.stats.pending or self.pages.stats.pending or self.steps.depth:
            return
        self.settle()
        self.slots.clear()
        self.requests.clear()
        self.leases.clear()
        self.keys.clear()
        self.order, self.behind = [], {}
        lease = self.pages.take(2)
        agree([1, 2], lease.pages.tolist(), "pages after a clear")
        lease.release(after=None)
