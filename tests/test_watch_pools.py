"""`watch_pages`, `watch_slots` and `watch_copy`, over a model of a prefix cache, slots and a staging buffer."""

from typing import Any

import pytest
import torch

from batchstate import Violation
from batchstate.errors import ArgumentError, DeclarationError
from batchstate.violations import Code
from batchstate.watch import WatchedPool, watch_copy, watch_pages, watch_slots
from tests.test_watch import reported


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
        assert "or `holders` leaves one out" in caught.value.remedy
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
    assert ("or `live` leaves a request out" in caught.value.remedy) == (code == Code.SLOT_CONSERVATION)


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
        with reported(Code.MIRROR_EQUAL, "cpu / gpu", 0):
            buffer.copy_to_gpu(2)


def test_what_cannot_be_watched_is_refused() -> None:
    """Names that do not exist, and no methods. A method may be watched twice."""
    arguments: dict[str, Any] = {"holders": lambda cache: [], "free": "free_pages"}
    with pytest.raises(ArgumentError, match="PrefixCache has no method 'begin'"):
        watch_pages(PrefixCache, after=["begin"], **arguments)
    with pytest.raises(ArgumentError, match="no method is named"):
        watch_pages(PrefixCache, after=[], **arguments)
    with watched_cache(), watched_cache():
        PrefixCache(4)
    misnamed = watch_pages(PrefixCache, after=["start"], holders=lambda cache: [], free="free_lst")
    with misnamed, pytest.raises(DeclarationError, match="no attribute 'free_lst'"):
        PrefixCache(4).start("a", [1])
