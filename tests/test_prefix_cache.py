"""`PrefixCache`, `rebase`, leases of ranges: what each does, and the policies of three engines written on them.

State machine `prefix_cache` compares all of it with a model after every call.
"""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from batchstate import PagePool, PrefixCache, SlotPool, levels
from batchstate.errors import ArgumentError, PoolExhaustedError
from batchstate.mirror import Slots
from batchstate.runtime import CpuRuntime
from batchstate.testing.fences import ManualStream
from batchstate.violations import Code
from tests.doubles import refused
from tests.test_call_budget import counted

SIZE = 4


@pytest.fixture
def pages() -> PagePool:
    """Nine pages of four tokens."""
    runtime = CpuRuntime()
    slots = SlotPool(runtime, 8)
    table = slots.table("req_to_token", (32,), torch.int32, holds="location")
    return PagePool(runtime, slots, 9, SIZE, max_tokens_per_request=32, req_to_token=table)


def prefilled(pages: PagePool, num_tokens: int) -> Slots:
    """A request whose prefill is launched."""
    slot = pages.slots.take(1)
    pages.extend(slot, num_tokens)
    pages.commit(slot, num_tokens)
    return slot


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_cached_page_is_free_and_found(pages: PagePool, level: str) -> None:
    """A released page is free and found by its key, with what was written on it, until its memory is needed."""
    with levels.checks(level):
        cache = PrefixCache(pages)
        ada = prefilled(pages, 10)
        assert cache  # `if self.cache:` is true before the first page
        assert cache.insert(ada, ["a", "ab"]) == 0
        pages.release_requests(ada, after=None)
        assert (pages.stats.free, cache.stats.idle, len(cache), "ab" in cache) == (9, 2, 2, True)
        hit = cache.match(["a", "ab", "abc"])
        assert (hit.pages.tolist(), cache.stats.queried, cache.stats.hits) == ([1, 2], 3, 2)
        hit.release(after=None)
        taken = pages.take(8)  # the end of the prefix goes first
        assert (taken.pages.tolist()[-1], "a" in cache, "ab" in cache, cache.stats.evicted) == (2, True, False, 1)
        taken.release(after=None)
        pages.expect_idle()
        pages.verify()


def test_the_fences_of_former_holders_order_eviction(pages: PagePool) -> None:
    """Pages are evicted in the order in which they became free; the last release decides where both were free then."""
    cache, stream = PrefixCache(pages), ManualStream()
    for ended in (0, 1, 2):
        ada = prefilled(pages, 2 * SIZE)
        cache.insert(ada, ["a", "ab"])
        again = pages.hold(ada, 2 * SIZE)
        beginning, end = pages.hold(ada, 2 * SIZE).split(SIZE)
        pages.release_requests(ada, after=None)
        beginning.release(after=stream.record())
        end.release(after=stream.record())
        stream.complete(ended)
        assert pages.stats.pending == 0
        again.release(after=None)
        stream.complete(2 - ended)
        assert cache.fit(pages.num_pages).evicted == (("ab", "a") if ended == 2 else ("a", "ab"))
        cache.clear()


def test_a_page_with_a_holder_again_is_not_pending(pages: PagePool) -> None:
    """A cached page that a new request holds before its fence is complete is behind no fence that `pending` names."""
    cache, ada = PrefixCache(pages), prefilled(pages, SIZE)
    cache.insert(ada, ["a"])
    pages.release_requests(ada, after=ManualStream().record())
    assert [group.pages.tolist() for group in pages.pending()] == [[1]]
    cache.match(["a"])
    assert pages.pending() == []
    with pytest.raises(PoolExhaustedError) as caught:
        pages.take(9)
    assert (caught.value.pending, caught.value.pending_since) == (0, None)


def test_keys_of_evicted_pages_are_handed_out_once(pages: PagePool) -> None:
    """With `notices` each evicted key is reported once, in order; removed keys are not."""
    cache = PrefixCache(pages, notices=True)
    ada, bob = prefilled(pages, 12), prefilled(pages, SIZE)
    cache.insert(ada, ["a", "ab", "abc"])
    cache.insert(bob, ["b"])
    pages.release_requests(ada, after=None)
    pages.release_requests(bob, after=None)
    assert cache.take_evicted() == []
    lease = pages.take(7)  # five pages have no key
    assert cache.take_evicted() == ["abc", "ab"]
    with pytest.raises(PoolExhaustedError):
        pages.take(3)
    assert (cache.remove(["a"]), cache.evict(1), cache.take_evicted(), cache.take_evicted()) == (1, 1, ["b"], [])
    assert cache.stats.evicted == 3
    lease.release(after=None)


def test_notices_are_asked_for(pages: PagePool) -> None:
    """Without `notices=True` nothing is kept, and asking says how."""
    with pytest.raises(ArgumentError, match="keeps no notices") as caught:
        PrefixCache(pages).take_evicted()
    assert "notices=True" in str(caught.value)


def test_a_lease_is_committed_to_no_fewer_tokens(pages: PagePool) -> None:
    """What a lease was committed to stays written: its pages may be cached, and shared by then."""
    cache = PrefixCache(pages)
    lease = pages.take(2)
    pages.commit(lease, 8)
    cache.insert(lease, ["a", "ab"])
    refused(Code.LENGTH_ORDER, lambda: pages.commit(lease, 4))
    pages.commit(lease, 8)
    lease.release(after=None)
    pages.verify()


def test_what_is_cached_is_not_written(pages: PagePool) -> None:
    """A cached page is read only for its one holder too, until its key is removed."""
    cache = PrefixCache(pages)
    ada = prefilled(pages, 8)
    cache.insert(ada, ["ab"], first=1)
    pages.truncate(ada, 6, after=None)
    refused(Code.PAGE_OWNER, lambda: pages.advance(ada))
    assert cache.remove(["ab", "unknown"]) == 1
    pages.advance(ada)


def test_a_second_copy_is_put_onto_the_first(pages: PagePool) -> None:
    """A request whose prefix is cached already is put onto those pages; its copies are free behind their fence."""
    cache, steps = PrefixCache(pages), ManualStream()
    ada, bob = prefilled(pages, 10), prefilled(pages, 10)
    assert (cache.insert(ada, ["a", "ab"]), cache.insert(bob, ["a", "ab"])) == (0, 2)
    old = pages.extend(bob, 11)
    lease = cache.match(["a", "ab"])
    moved = pages.rebase(bob, lease, lease.tokens, after=steps.record())
    lease.release(after=None)
    assert moved.locations.np.tolist() == list(range(4, 12))
    assert pages.page_table[bob.np, :3].tolist() == [[1, 2, 6]]
    assert (pages.stats.shared, pages.stats.pending) == (2, 2)
    refused(Code.DERIVED_STALE, old.entry)
    steps.complete()
    pages.verify()
    assert pages.rebase(bob, ada, 8, after=None).locations.np.tolist() == list(range(4, 12))  # it is there already
    refused(Code.PAGE_ALIGNMENT, lambda: pages.rebase(bob, ada, 7, after=None))
    refused(Code.LENGTH_ORDER, lambda: pages.rebase(bob, ada, 12, after=None))


def test_leases_of_ranges(pages: PagePool) -> None:
    """A range is held without what comes before, a lease is split, and requests begin with leases in a row."""
    ada = prefilled(pages, 12)
    head, tail = pages.hold(ada, 4), pages.hold(ada, 12, first=4)
    assert (head.pages.tolist(), tail.pages.tolist()) == ([1], [2, 3])
    pages.release_requests(ada, after=None)
    middle, end = tail.split(4)
    assert (tail.released, middle.pages.tolist(), end.pages.tolist(), pages.stats.live) == (True, [2], [3], 3)
    bob = pages.slots.take(1)
    assert pages.share([head, middle, end], bob, 12).locations.np.tolist() == list(range(4, 16))
    refused(Code.SLOT_DOUBLE_FREE, lambda: tail.release(after=None))
    refused(Code.PAGE_ALIGNMENT, lambda: end.split(1))
    refused(Code.LENGTH_ORDER, lambda: end.split(8))
    with pytest.raises(ArgumentError, match="does not hold"):
        pages.share([head, tail], pages.slots.take(1), 4)
    for lease in (head, middle, end):
        lease.release(after=None)
    pages.release_requests(bob, after=None)
    pages.expect_idle()


def test_misuse_changes_nothing(pages: PagePool) -> None:
    """Keys that repeat, other keys for a cached page, and a second cache are refused."""
    cache = PrefixCache(pages)
    ada = prefilled(pages, 8)
    cache.insert(ada, ["a"])
    for call in (
        lambda: cache.match(["a", "a"]),
        lambda: cache.match("a"),
        lambda: cache.insert(ada, ["x"]),
        lambda: cache.insert(ada, ["b", "b"]),
        lambda: cache.remove(["a", "a"]),
        lambda: cache.fit(0, ["a"]),
        lambda: PrefixCache(pages),
    ):
        with pytest.raises(ArgumentError):
            call()
    pages.extend(ada, 12)
    refused(Code.PAGE_UNWRITTEN, lambda: cache.insert(ada, ["a", "ab", "abc"]))
    assert (len(cache), pages.stats.live, pages.stats.leases) == (1, 3, 0)


# Policies of engines


class VllmCache:
    """vLLM's: keys are hashes of prefixes; a request begins with what is found, and its full blocks are cached."""

    def __init__(self, pages: PagePool) -> None:
        self.pages, self.cache = pages, PrefixCache(pages)

    def keys(self, tokens: list[int]) -> list[Hashable]:
        """One hash per full block, of all tokens up to its end."""
        hashes: list[Hashable] = []
        for stop in range(SIZE, len(tokens) + 1, SIZE):
            hashes.append(hash((hashes[-1] if hashes else None, *tokens[stop - SIZE : stop])))
        return hashes

    def allocate(self, tokens: list[int]) -> tuple[Slots, int] | None:
        """A request and how many of its tokens are computed; None if it does not fit. The last one is computed anew."""
        keys = self.keys(tokens[:-1])
        if not self.cache.fit(-(-len(tokens) // SIZE), keys).fits:
            return None
        slot, hit = self.pages.slots.take(1), self.cache.match(keys)
        self.pages.share(hit, slot, hit.tokens)
        hit.release(after=None)
        self.pages.extend(slot, len(tokens))
        return slot, hit.tokens

    def computed(self, slot: Slots, tokens: list[int]) -> None:
        """The forward is launched: full blocks are cached."""
        self.pages.commit(slot, len(tokens))
        self.cache.insert(slot, self.keys(tokens))

    def free(self, slot: Slots) -> None:
        """The request leaves; its blocks stay until they are needed."""
        self.pages.release_requests(slot, after=None)


class NanoCache(VllmCache):
    """nano-vllm's: the same with the tokens of a block compared too, which is to say that they are the key."""

    def keys(self, tokens: list[int]) -> list[Hashable]:
        """The tokens themselves, so that no two prefixes have one key."""
        return [tuple(tokens[:stop]) for stop in range(SIZE, len(tokens) + 1, SIZE)]


class Node:
    """A node of a radix tree: tokens, the lease of their pages, and when it was used last."""

    def __init__(self, tokens: list[int], lease: Any, parent: Any) -> None:
        self.tokens, self.lease, self.parent, self.used = tokens, lease, parent, 0
        self.children: dict[tuple[int, ...], Node] = {}


class RadixCache:
    """SGLang's: a radix tree whose nodes hold ranges of tokens; a live request moves onto the tree's pages."""

    def __init__(self, pages: PagePool) -> None:
        self.pages, self.root, self.clock = pages, Node([], None, None), 0

    def match(self, tokens: list[int]) -> list[Node]:
        """The nodes of the longest cached prefix; the last is split where the tokens part."""
        node, path = self.root, list[Node]()
        self.clock += 1
        while child := node.children.get(tuple(tokens[:SIZE])):
            same = next(
                (
                    at
                    for at in range(0, len(child.tokens), SIZE)
                    if child.tokens[at : at + SIZE] != tokens[at : at + SIZE]
                ),
                len(child.tokens),
            )
            if same < len(child.tokens):
                head, tail = child.lease.split(same)
                upper = Node(child.tokens[:same], head, node)
                child.tokens, child.lease, child.parent = child.tokens[same:], tail, upper
                upper.children[tuple(child.tokens[:SIZE])] = child
                node.children[tuple(tokens[:SIZE])] = child = upper
            child.used = self.clock
            path.append(child)
            node, tokens = child, tokens[same:]
        return path

    def begin(self, slot: Slots, tokens: list[int]) -> int:
        """A request begins with what is cached."""
        leases = [node.lease for node in self.match(tokens[:-1])]
        return len(self.pages.share(leases, slot, sum(lease.tokens for lease in leases)))

    def insert(self, slot: Slots, tokens: list[int]) -> None:
        """An unfinished request's prefix is cached; what the tree had already takes the place of its own copy."""
        path, whole = self.match(tokens), len(tokens) // SIZE * SIZE
        found = sum(len(node.tokens) for node in path)
        self.pages.rebase(slot, [node.lease for node in path], found, after=None)
        if whole > found:
            parent = path[-1] if path else self.root
            node = Node(tokens[found:whole], self.pages.hold(slot, whole, first=found), parent)
            node.used = self.clock
            parent.children[tuple(node.tokens[:SIZE])] = node

    def evict(self, num_pages: int) -> None:
        """The least recently used leaves go until so many pages are free, or none is left."""
        while self.pages.stats.free < num_pages and (leaves := [node for node in self.nodes() if not node.children]):
            oldest = min(leaves, key=lambda node: node.used)
            oldest.lease.release(after=None)
            del oldest.parent.children[tuple(oldest.tokens[:SIZE])]

    def nodes(self) -> list[Node]:
        """All nodes but the root."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found


@pytest.mark.parametrize("policy", [VllmCache, NanoCache])
@pytest.mark.parametrize("level", ["off", "full"])
def test_policies_of_block_managers(pages: PagePool, policy: type[VllmCache], level: str) -> None:
    """vLLM's, nano-vllm's: a returning prompt computes its last block only, and old prompts make room for new ones."""
    with levels.checks(level):
        manager, prompt = policy(pages), list(range(14))
        computed = []
        for tokens in (prompt, prompt, prompt[:8] + [50] * 6, [60] * 20, [70] * 20, prompt):
            admitted = manager.allocate(tokens)
            assert admitted is not None
            manager.computed(admitted[0], tokens)
            computed.append(admitted[1])
            manager.free(admitted[0])
        assert computed == [0, 12, 8, 0, 0, 0]
        assert manager.allocate([80] * 32) is not None
        assert manager.allocate([90] * 8) is None
        pages.verify()


@pytest.mark.parametrize("level", ["off", "full"])
def test_policy_of_a_radix_tree(pages: PagePool, level: str) -> None:
    """SGLang's: two requests prefill one prompt, the second moves onto the tree's pages, and leaves are evicted."""
    with levels.checks(level):
        tree, prompt = RadixCache(pages), list(range(10))
        ada, bob = prefilled(pages, 10), prefilled(pages, 10)
        tree.insert(ada, prompt)
        tree.insert(bob, prompt)  # the same pages now
        assert (pages.page_table[bob.np, :2] == pages.page_table[ada.np, :2]).all()
        cleo = pages.slots.take(1)
        other = prompt[:4] + [50] * 6
        assert tree.begin(cleo, other) == 4  # which splits the node
        pages.extend(cleo, 10)
        pages.commit(cleo, 10)
        tree.insert(cleo, other)
        assert sorted(len(node.tokens) for node in tree.nodes()) == [4, 4, 4]
        for slot in (ada, bob, cleo):
            pages.release_requests(slot, after=None)
        assert pages.stats.live == 3
        tree.evict(8)
        assert [node.tokens for node in tree.nodes()] in ([prompt[:4]], [prompt[:4], other[4:8]])
        tree.evict(9)
        pages.expect_idle()


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_request_has_a_page_at_one_place(pages: PagePool, level: str) -> None:
    """Leases that hold a page twice, or a page that the request has elsewhere, are refused, and nothing has changed."""
    with levels.checks(level):
        ada, eve = prefilled(pages, 8), pages.slots.take(1)
        one, both, second = pages.hold(ada, 4), pages.hold(ada, 8), pages.hold(ada, 8, first=4)
        with pytest.raises(ArgumentError, match="at two places"):
            pages.share([one, one], eve, 8)
        with pytest.raises(ArgumentError, match="at two places"):
            pages.share([one, both], eve, 12)
        with pytest.raises(ArgumentError, match="at two places"):
            pages.rebase(ada, [one, one], 8, after=None)
        with pytest.raises(ArgumentError, match="at two places"):
            pages.rebase(ada, second, 4, after=None)
        pages.share([one, both], eve, 4)
        pages.release_requests(ada, after=None)
        pages.release_requests(eve, after=None)
        for lease in (one, both, second):
            lease.release(after=None)
        pages.verify()
        assert pages.stats.free == 9


def test_calls_of_a_hit_do_not_grow(pages: PagePool) -> None:
    """A hit and a take make as many calls for 64 pages as for 2, and as few as they do now."""
    pages = PagePool(pages.runtime, pages.slots, 256, SIZE, max_tokens_per_request=1024)
    cache = PrefixCache(pages)
    keys: list[list[Hashable]] = [[(number, at) for at in range(64)] for number in range(6)]

    def fewest(run: Callable[[], object]) -> int:
        return min(counted(run, pages.runtime)["calls"] for _ in range(8))

    with levels.checks("cheap"):
        for chain in keys:
            lease = pages.take(64)
            pages.commit(lease, 64 * SIZE)
            cache.insert(lease, chain)
            lease.release(after=None)
        assert pages.stats.free == cache.stats.idle == 256
        hits = [fewest(lambda n=n: cache.match(keys[5][:n]).release(after=None)) for n in (2, 64)]  # type: ignore[misc]
        takes = [fewest(lambda n=n: pages.take(n).release(after=None)) for n in (2, 64)]  # type: ignore[misc]
        assert hits[0] == hits[1] <= 57
        assert max(takes) <= 49
