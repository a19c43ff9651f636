"""`watch_pages`, `watch_slots` and `watch_copy`: over a model of a prefix cache, and over transformers' allocator."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Violation
from batchstate.errors import ArgumentError, BatchStateError, DeclarationError
from batchstate.violations import Code
from batchstate.watch import WatchedPool, watch_copy, watch_pages, watch_slots


class PrefixCache:
    """A radix cache in small, as mini-sglang's at its PR #142: pages of size 1, a table of each request's pages.

    When a request ends its prefill, its pages go into the cache. Of a prefix that is there already the duplicate pages
    are freed, and the request is to read those of the cache from then on: the line that says so is missing.
    """

    repaired = False

    def __init__(self, num_pages: int) -> None:
        self.free_pages = list(range(num_pages))
        self.num_pages = num_pages
        self.tree: dict[tuple[int, ...], int] = {}
        self.tables: dict[str, list[int]] = {}

    def start(self, name: str, tokens: list[int]) -> None:
        """A request takes pages for its prompt: of others' prefixes it uses what the cache knows by now."""
        known = [self.tree[key] for end in range(len(tokens)) if (key := tuple(tokens[: end + 1])) in self.tree]
        fresh = [self.free_pages.pop() for _ in tokens[len(known) :]]
        self.tables[name] = known + fresh

    def finish_prefill(self, name: str, tokens: list[int]) -> None:
        """The pages of a prompt become shared."""
        table = self.tables[name]
        for end, page in enumerate(table):
            cached = self.tree.setdefault(tuple(tokens[: end + 1]), page)
            if cached != page:
                self.free_pages.append(page)
                if self.repaired:
                    table[end] = cached


def watched_cache() -> WatchedPool:
    """The whole declaration."""
    return watch_pages(
        PrefixCache,
        after=["start", "finish_prefill"],
        holders=lambda cache: [*cache.tables.values(), cache.tree.values()],
        free="free_pages",
        num_pages="num_pages",
    )


def serve_twins() -> PrefixCache:
    """Two requests of one prompt, in one batch: both prefill before either is cached."""
    cache = PrefixCache(16)
    cache.start("a", [5, 6, 7])
    cache.start("b", [5, 6, 7])
    cache.finish_prefill("a", [5, 6, 7])
    cache.finish_prefill("b", [5, 6, 7])
    return cache


def test_pages_freed_while_a_request_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of mini-sglang's PR #142 is found in the call that makes it, and its repair is silent."""
    with watched_cache(), pytest.raises(Violation) as caught:
        serve_twins()
    violation = caught.value
    assert (violation.code, violation.object, violation.operation) == (
        Code.PAGE_OWNER,
        "PrefixCache",
        "after finish_prefill",
    )
    assert violation.slot in range(16)
    assert violation.problem == f"page {violation.slot} is free and has 1 holders"
    assert "`PrefixCache.finish_prefill`" in violation.remedy
    monkeypatch.setattr(PrefixCache, "repaired", True)
    with watched_cache() as watching:
        serve_twins()
    assert watching.counters.checked == 4


def test_a_page_that_is_nowhere_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is in no list is counted."""
    monkeypatch.setattr(PrefixCache, "repaired", True)
    with watched_cache() as watching:
        cache = serve_twins()
        cache.free_pages.pop()
        with pytest.raises(Violation, match="1 of 16 pages are neither free") as caught:
            watching.check(cache)
        assert caught.value.code == Code.SLOT_CONSERVATION
        cache.num_pages = 8
        with pytest.raises(Violation, match="there are 7 more pages than `num_pages`, 8"):
            watching.check(cache)


class Slots:
    """A list of rows, handed out from its end."""

    def __init__(self) -> None:
        self.free = [3, 2, 1]
        self.running: dict[str, int] = {}

    def alloc(self, name: str) -> None:
        self.running[name] = self.free.pop()

    def release(self, name: str, times: int = 1, forget: bool = True) -> None:
        self.free += [self.running[name]] * times
        if forget:
            del self.running[name]


@pytest.mark.parametrize(
    ("misuse", "code"),
    [
        (lambda slots: slots.release("a", times=2), Code.SLOT_DOUBLE_FREE),
        (lambda slots: slots.release("a", forget=False), Code.SLOT_DOUBLE_FREE),
        (lambda slots: slots.release("a", times=0), Code.SLOT_CONSERVATION),
        (lambda slots: (slots.free.append(1), slots.alloc("b")), Code.SLOT_SHARED),
        (lambda slots: (slots.free.append(0), slots.alloc("b")), Code.SLOT_ZERO_ALLOCATED),
    ],
)
def test_slots_have_one_owner(misuse: Any, code: Code) -> None:
    """A slot is free once, or has one request; 0 has none; none is lost."""
    watching = watch_slots(
        Slots, after=["alloc", "release"], live=lambda slots: slots.running.values(), free="free", size=3
    )
    with watching:
        slots = Slots()
        slots.alloc("a")
        with pytest.raises(Violation) as caught:
            misuse(slots)
    assert caught.value.code == code


class Buffer:
    """A staging buffer, as vLLM's `CpuGpuBuffer`."""

    late = False

    def __init__(self) -> None:
        self.cpu = torch.zeros(6, dtype=torch.int32)
        self.gpu = torch.zeros(6, dtype=torch.int32)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        rows = slice(n)
        self.gpu[rows] = self.cpu[rows]
        if self.late:
            self.cpu[0] += 1  # refilled while the copy is under way
        return self.gpu[rows]


def test_a_staging_buffer_brings_what_it_holds(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were copied are compared, and no others."""
    with watch_copy(Buffer, "copy_to_gpu", host="cpu", device="gpu"):
        buffer = Buffer()
        buffer.cpu[:] = torch.arange(6)
        buffer.copy_to_gpu(3)
        buffer.copy_to_gpu()
        monkeypatch.setattr(Buffer, "late", True)
        with pytest.raises(Violation) as caught:
            buffer.copy_to_gpu(2)
    assert (caught.value.code, caught.value.column, caught.value.row) == (Code.MIRROR_EQUAL, "cpu / gpu", 0)


def test_what_cannot_be_watched_is_refused() -> None:
    """Names that do not exist, no methods, no class, a method watched twice."""
    arguments: dict[str, Any] = {"holders": lambda cache: [], "free": "free_pages"}
    with pytest.raises(ArgumentError, match="PrefixCache has no method 'begin'"):
        watch_pages(PrefixCache, after=["begin"], **arguments)
    with pytest.raises(ArgumentError, match="no method is named"):
        watch_pages(PrefixCache, after=[], **arguments)
    with pytest.raises(ArgumentError, match="expected a class, got 3"):
        watch_pages(3, after=["start"], **arguments)  # type: ignore[arg-type]
    with watched_cache():
        with pytest.raises(DeclarationError, match=r"PrefixCache\.start is watched already"):
            watched_cache()
        PrefixCache(4)
    misnamed = watch_pages(PrefixCache, after=["start"], holders=lambda cache: [], free="free_lst")
    with misnamed, pytest.raises(DeclarationError, match="no attribute 'free_lst'"):
        PrefixCache(4).start("a", [1])


# transformers, as it is installed


FOUND: list[BatchStateError] = []


def free_blocks(allocator: Any) -> list[int]:
    """The blocks that its pool can hand out: leaves of trees, one tree for each sector."""
    trees = allocator.pool._free_blocks[allocator.index]
    return [leaf for leaves in trees.trees.values() for leaf in leaves]


@pytest.fixture
def allocators() -> Iterator[list[WatchedPool]]:
    """Transformers' allocators of KV blocks, watched."""
    pytest.importorskip(
        "transformers.generation.continuous_batching.cache_allocators",
        reason="the declaration is of allocators that this transformers does not have",
    )
    from transformers.generation.continuous_batching import cache

    watching = [
        watch_pages(
            allocator,
            after=["allocate_cache_to_request", "free_blocks", "acquire_prefix_blocks", "mark_complete_blocks"],
            holders=lambda pool: pool.block_table.values(),
            free=free_blocks,
            references=lambda pool: pool.ledger.shared_ref_counts,
            cached="ledger.cached_blocks",
            on_violation=FOUND.append,
        )
        for allocator in set(cache.ATTN_TYPE_TO_ALLOCATOR.values())
    ]
    FOUND.clear()
    yield watching
    for one in watching:
        one.stop()


def generate() -> int:
    """Requests with a common prefix, served by transformers' continuous batching; how many were answered."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    asked = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prefix = (np.arange(260) % 100 + 5).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = model.generate_batch(
            inputs=[[*prefix, number] for number in range(5)],
            generation_config=asked,
            continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=100, max_batch_tokens=128),
        )
    return len(answers)


def test_transformers_allocators_are_clean(allocators: list[WatchedPool]) -> None:
    """Its continuous batching serves requests with a common prefix, and each page has the holders recorded of it."""
    assert generate() == 5
    assert sum(one.counters.checked for one in allocators) > 20
    assert FOUND == []


def test_a_lost_reference_in_transformers_is_found(
    allocators: list[WatchedPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared block that is acquired without a reference is found in the call that acquires it."""
    ledger = pytest.importorskip("transformers.generation.continuous_batching.cache_allocators.cache_allocator")

    def acquire(self: Any, block: int) -> None:
        self.cached_blocks.pop(block, None)  # and nothing, where another request has it

    monkeypatch.setattr(ledger.BlockLedger, "acquire", acquire)
    generate()
    first = FOUND[0]
    assert isinstance(first, Violation)
    assert (first.code, first.object) == (Code.PAGE_OWNER, "FullAttentionCacheAllocator")
    assert first.operation in ("after acquire_prefix_blocks", "after mark_complete_blocks")
