"""`PrefixCache` against a memory of prefixes: hits, eviction in order, rebase, leases of ranges, two streams."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import levels
from batchstate.errors import ArgumentError, DtypeError, PoolExhaustedError
from batchstate.kv.pages import PageLease
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import Slots
from batchstate.testing.fences import ManualFence
from batchstate.testing.machine import agree, misuses
from batchstate.violations import Code
from tests.selfcheck.machines.pools import KVOwner, PagesMachine

Key = tuple[int, ...]
"""All ids up to the end of a page. A token stands for its id and all before it: the last one of a page is its key."""

PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 12))
"""After how many pages a text parts from the others, and how many tokens of it there are."""


It = tuple[PrefixCache, Slots]

_MISUSES = misuses(
    ("a second cache", ArgumentError, lambda it: PrefixCache(it[0].pages)),
    (
        "match one key twice",
        ArgumentError,
        lambda it: it[0].match([*it[0]._cached.pages][:1] * 2),
        lambda it: len(it[0]),
    ),
    ("match text", ArgumentError, lambda it: it[0].match("hash")),
    ("insert before -1", ArgumentError, lambda it: it[0].insert(it[1], [], first=-1)),
    ("insert what is not committed", Code.LENGTH_ORDER, lambda it: it[0].insert(it[1], list(range(99)))),
    ("insert two requests", (ArgumentError, Code.SLOT_SHARED), lambda it: it[0].insert(it[1].take([0, 0]), [])),
    ("fit -1 pages", ArgumentError, lambda it: it[0].fit(-1)),
    ("fit more keys than pages", ArgumentError, lambda it: it[0].fit(1, [(1,), (1, 2)])),
    ("evict half a page", DtypeError, lambda it: it[0].evict(0.5)),
    ("remove text", ArgumentError, lambda it: it[0].remove("hash")),
    ("rebase onto a number", (ArgumentError, DtypeError), lambda it: it[0].pages.rebase(it[1], 7, 0)),
    ("rebase behind a number", ArgumentError, lambda it: it[0].pages.rebase(it[1], it[1], 0, after=3)),
    ("rebase two", (ArgumentError, Code.SLOT_SHARED), lambda it: it[0].pages.rebase(it[1].take([0, 0]), it[1], 0)),
    ("rebase beyond int64", ArgumentError, lambda it: it[0].pages.rebase(it[1], it[1], 2**63)),
    ("hold backwards", Code.LENGTH_ORDER, lambda it: it[0].pages.hold(it[1], 0, first=it[0].pages.page_size)),
)


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
    MISUSES = _MISUSES

    @initialize(size=st.integers(2, 4), num_pages=st.integers(4, 9), page_size=st.integers(1, 3))
    def begin(self, size: int, num_pages: int, page_size: int) -> None:
        """Opens a pool of slots, one of pages, and a cache."""
        self.open_pages(size, num_pages, page_size, 4 * page_size)
        self.settle()
        self.cache = PrefixCache(self.pages, notices=True)
        self.keys: dict[Key, int] = {}  # the cache, key -> page
        self.order: list[Key] = []  # those that are free, the next to be evicted first
        self._admit((1, page_size + 1), False)

    def misused(self, data: st.DataObject) -> It | None:
        slot = self._some(data)
        return None if slot is None else (self.cache, self.requests[slot].owner)

    def snapshot(self) -> tuple[object, ...]:
        """Both pools and the cache, with the order of eviction."""
        return *super().snapshot(), dict(self.cache._cached.pages), self._evictions()

    def check(self) -> None:
        """What is cached too, and in which order it is evicted."""
        super().check()
        agree(self.keys, dict(self.cache._cached.pages), "keys")
        for one in (*self.requests.values(), *self.leases):
            pages = -(-len(one.tokens[one.first :]) // self.pages.page_size)
            agree(pages, len(self.pages_of(one)), "pages of", one)
        self._look()
        if not self.steps.depth:
            held = self.held_pages()
            idle = {key for key, page in self.keys.items() if page not in held}
            agree(idle, set(self.order), "cached pages without a holder")

    # Requests

    def _some(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from([*self.requests]), label="slot") if self.requests else None

    def _keys(self, tokens: list[Key]) -> list[Key]:
        return tokens[self.pages.page_size - 1 :: self.pages.page_size]

    def _look(self) -> None:
        """Which cached pages are free now: new ones stand behind those that were."""
        order = self._evictions()
        stayed = [key for key in self.order if key in order]
        agree(stayed, order[: len(stayed)], "the order of eviction")
        self.order = order

    def _evictions(self) -> list[Key]:
        return list(self.cache.fit(self.pages.stats.free).evicted)  # type: ignore[arg-type]

    def _found(self, keys: list[Key]) -> int:
        misses = [at for at, key in enumerate(keys) if key not in self.keys]
        return misses[0] if misses else len(keys)

    def _match(self, keys: list[Key]) -> PageLease:
        found = keys[: self._found(keys)]
        live = self.held_pages()
        self.reached("a hit of two pages", len(found) > 1)
        for key in found:
            self.reached("a hit on a free page", key in self.order)
            self.reached("a hit on a page in use", self.keys[key] in live)
            waits = not all(fence.query() for fence in self.behind.get(self.keys[key], ()))
            self.reached("a hit on a page that waits for a fence", waits and self.keys[key] not in live)
        self.order = [key for key in self.order if key not in found]
        lease = self.cache.match(keys)
        agree([self.keys[key] for key in found], lease.pages.tolist(), "pages of a hit")
        return lease

    def _taken(self, pages: list[int], evicted: tuple[Any, ...]) -> None:
        """Pages were taken, for which these keys were evicted."""
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

    def _admit(self, drawn: tuple[int, int], insert: bool) -> None:
        self._look()
        handle, prompt = self.slots.take(1), self._text(drawn[0], 0, drawn[1])
        one, keys = KVOwner(handle, text=drawn[0]), self._keys(prompt[:-1])
        fit = self.cache.fit(-(-len(prompt) // self.pages.page_size), keys)
        agree(self._found(keys), fit.hits, "pages of a hit foretold")
        lease = self._match(keys)
        self.pages.share(lease, handle, lease.tokens)
        lease.release()
        one.tokens = prompt[: lease.tokens]
        one.written, one.side = lease.tokens, False
        self.requests[int(handle.np[0])] = one
        if not fit.fits:
            self.reached("too few pages with all evicted")
            with self.refused(PoolExhaustedError):
                self.pages.extend(handle, len(prompt))
            self._leave(int(handle.np[0]), None)
            return
        self._grow(one, prompt[lease.tokens :], fit.evicted)
        self._forward(one)
        if insert:
            self._insert(one)

    def _grow(self, one: KVOwner, tokens: list[Key], evicted: tuple[Any, ...]) -> None:
        before = self.pages_of(one)
        self.pages.extend(one.owner, len(one.tokens) + len(tokens))
        self._taken(self.pages_of(one)[len(before) :], evicted)
        self.put(one, tokens)

    def _forward(self, one: KVOwner, side: bool = False) -> None:
        with self.on(side):
            self.pages.commit(one.owner, len(one.tokens))
            self.launch_forward(one, len(one.tokens), side)

    def _leave(self, slot: int, fence: ManualFence | None) -> None:
        self.settle()
        one = self.requests[slot]
        with self.giving_back([one], fence):
            self.pages.release_requests(self.requests.pop(slot).owner, after=fence)

    @precondition(lambda self: self.slots.stats.free)
    @rule(prompt=PROMPTS, insert=st.booleans())
    def admit(self, prompt: tuple[int, int], insert: bool) -> None:
        """A request begins with what is cached of its prompt, and its prefill may be cached."""
        self._admit(prompt, insert)

    @rule(data=st.data(), more=st.integers(1, 3), forward=st.booleans(), side=st.booleans())
    def extend(self, data: st.DataObject, more: int, forward: bool, side: bool) -> None:
        """A request gets tokens, and a forward may write them, on one of two streams."""
        slot = self._some(data)
        if slot is not None:
            self._extend(self.requests[slot], more, forward, side)

    def _extend(self, one: KVOwner, more: int, forward: bool, side: bool = False) -> None:
        self._look()
        size = self.pages.page_size
        tokens = self._text(one.text, len(one.tokens), len(one.tokens) + more)
        held = self.held_pages()
        partial = self.pages_of(one)[-1] if tokens and len(one.tokens) % size else 0
        fit = self.cache.fit(-(-(len(one.tokens) + len(tokens)) // size) - len(self.pages_of(one)))
        if partial and (held[partial] > 1 or partial in self.keys.values()):
            self.reached("a write into a cached page refused", partial in self.keys.values())
            with self.refused(Code.PAGE_OWNER):
                self.pages.extend(one.owner, len(one.tokens) + len(tokens))
        elif not fit.fits:
            with self.refused(PoolExhaustedError):
                self.pages.extend(one.owner, len(one.tokens) + len(tokens))
        else:
            self._grow(one, tokens, fit.evicted)
            if forward:
                self._forward(one, side)

    @rule(data=st.data(), back=st.integers(1, 4), again=st.booleans())
    def truncate(self, data: st.DataObject, back: int, again: bool) -> None:
        """Tokens are taken back, and perhaps written again."""
        slot = self._some(data)
        if slot is not None:
            one, fence = self.requests[slot], self.fence(data)
            self.settle()
            length = max(0, len(one.tokens) - back)
            with self.giving_back([one], fence):
                self.pages.truncate(one.owner, length, after=fence)
            del one.tokens[length:]
            one.written = min(one.written, length)
            if again:
                self._extend(one, 1, True)

    @rule(data=st.data())
    def finish_and_return(self, data: st.DataObject) -> None:
        """A request leaves behind a step in flight, and one with the same prompt comes."""
        slot = self._some(data)
        if slot is not None:
            one = self.requests[slot]
            self._leave(slot, self.steps.record())
            if self.slots.stats.free:
                self._admit((one.text, max(1, len(one.tokens))), True)

    @rule(data=st.data())
    def insert_early(self, data: st.DataObject) -> None:
        """A request has got a page that no forward writes yet; once one does, on a second stream, another begins so."""
        slot = self._some(data)
        if slot is not None:
            one = self.requests[slot]
            self._extend(one, self.pages.page_size, False)
            self._cache(one)
            self._forward(one, True)
            self._cache(one)
            if self.slots.stats.free:
                self._admit((one.text, len(one.tokens) + 1), False)

    @rule()
    def two_copies(self) -> None:
        """Two requests with one prompt are prefilled side by side; one is cached, and the other put onto its pages."""
        if self.slots.stats.free > 1:
            before = set(self.requests)
            for _ in range(2):
                self._admit((0, self.pages.page_size + 1), False)
            for slot in set(self.requests) - before:
                self._insert(self.requests[slot])
                self._rebase(self.requests[slot], None)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A request leaves or is aborted, behind a step or none; what is cached of it stays."""
        slot = self._some(data)
        if slot is not None:
            self._leave(slot, self.fence(data))

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), insert=st.booleans())
    def churn(self, prompts: list[tuple[int, int]], insert: bool) -> None:
        """All requests leave, the steps end, and others come, one after the other."""
        self.steps.complete(self.steps.depth)
        for prompt in prompts:
            while self.requests:
                self._leave(next(iter(self.requests)), None)
            self._admit(prompt, insert)

    # The cache

    @rule(data=st.data(), rebase=st.booleans())
    def insert(self, data: st.DataObject, rebase: bool) -> None:
        """The whole pages of a request are cached; where they are already, it may be put onto those."""
        slot = self._some(data)
        if slot is None:
            return
        one = self.requests[slot]
        self._cache(one)
        if rebase:
            self._rebase(one, self.fence(data))

    def _cache(self, one: KVOwner) -> None:
        keys = self._keys(one.tokens)
        if len(keys) * self.pages.page_size > one.written:
            if levels.cheap:
                self.reached("cached before it is written refused")
                with self.refused(Code.PAGE_UNWRITTEN):
                    self.cache.insert(one.owner, keys)
            keys = self._keys(one.tokens[: one.written])
        self._insert(one, keys)

    def _rebase(self, one: KVOwner, fence: ManualFence | None) -> None:
        self.settle()
        keys, before, size = self._keys(one.tokens[: one.written]), self.pages_of(one), self.pages.page_size
        lease, length = self._match(keys), len(keys) * size
        with self.giving_back([one], fence):
            moved = self.pages.rebase(one.owner, lease, length, after=fence)
        pages = lease.pages.tolist()
        agree([pages[at // size] * size + at % size for at in range(length)], moved.locations.np.tolist(), "locations")
        lease.release()
        self.reached("rebased onto other pages", before != self.pages_of(one))
        self._forward(one)

    def _insert(self, one: KVOwner, keys: list[Key] | None = None) -> None:
        keys = self._keys(one.tokens[: one.written]) if keys is None else keys
        own = self.pages_of(one)
        copies = sum(self.keys.get(key, page) != page for key, page in zip(keys, own, strict=False))
        agree(copies, self.cache.insert(one.owner, keys), "second copies")
        self.reached("a second copy found", copies > 0)
        for key, page in zip(keys, own, strict=False):
            self.keys.setdefault(key, page)

    @rule(prompt=PROMPTS)
    def lookup(self, prompt: tuple[int, int]) -> None:
        """A hit is held, and stays held."""
        tokens = self._text(prompt[0], 0, self.most if len(self.leases) < 2 else prompt[1])
        lease = self._match(self._keys(tokens))
        self.leases.append(KVOwner(lease, tokens[: lease.tokens], 0, lease.tokens, text=prompt[0]))

    @rule(data=st.data(), first=st.integers(0, 2), number=st.integers(0, 3))
    def hold(self, data: st.DataObject, first: int, number: int) -> None:
        """A range of what a request has written is held."""
        slot, size = self._some(data), self.pages.page_size
        if slot is not None:
            one = self.requests[slot]
            stop = min(first + number, one.written // size) * size
            begin = min(first * size, stop)
            lease = self.pages.hold(one.owner, stop, first=begin)
            self.leases.append(KVOwner(lease, one.tokens[:stop], begin, stop, text=one.text))

    @rule(begin=st.booleans())
    def split_a_prefix(self, begin: bool) -> None:
        """A request of two pages leaves them to a lease, which becomes two."""
        size = self.pages.page_size
        found = [slot for slot, one in self.requests.items() if one.written >= 2 * size]
        if found:
            one = self.requests[found[0]]
            lease = self.pages.hold(one.owner, 2 * size)
            self.leases.append(KVOwner(lease, one.tokens[: 2 * size], 0, 2 * size, text=one.text))
            self._split(len(self.leases) - 1, 1, begin)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), at=st.integers(0, 2), begin=st.booleans())
    def split(self, data: st.DataObject, at: int, begin: bool) -> None:
        """A lease becomes two, and a request may begin with both."""
        self._split(data.draw(st.integers(0, len(self.leases) - 1), label="lease"), at, begin)

    def _split(self, number: int, at: int, begin: bool) -> None:
        one = self.leases.pop(number)
        tokens = min(at * self.pages.page_size, one.owner.tokens)
        parts, cut = one.owner.split(tokens), one.first + tokens
        self.leases += [
            KVOwner(parts[0], one.tokens[:cut], one.first, cut, text=one.text),
            KVOwner(parts[1], one.tokens, cut, one.written, text=one.text),
        ]
        with self.refused(Code.SLOT_DOUBLE_FREE):
            one.owner.release()
        if begin and self.requests and not self.slots.stats.free:
            self._leave(next(iter(self.requests)), None)
        if begin and not one.first and self.slots.stats.free and one.tokens:
            handle = self.slots.take(1)
            shared = self.pages.share(parts, handle, len(one.tokens))
            agree(self.pages.pages_of(handle).np.tolist(), [page for part in parts for page in part.pages], "a chain")
            agree(len(one.tokens), len(shared), "tokens of a chain")
            self.requests[int(handle.np[0])] = KVOwner(handle, list(one.tokens), 0, one.written, text=one.text)
            self.reached("begun with a chain of leases", 0 < tokens < len(one.tokens))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A lease is given back."""
        fence = self.fence(data)
        self.settle()
        one = self.leases[data.draw(st.integers(0, len(self.leases) - 1), label="lease")]
        with self.giving_back([one], fence):
            self.leases.remove(one)
            one.owner.release(after=fence)

    @rule(number=st.integers(0, 3))
    def evict(self, number: int) -> None:
        """The oldest lose their keys."""
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
        lease.release()
