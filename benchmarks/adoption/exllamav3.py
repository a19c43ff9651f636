"""exllamav3's `PageTable` as it stands in a checkout, watched: nothing of it is changed."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from batchstate.watch import WatchedPool, watch_pages
from benchmarks.adoption.checkouts import module_of

NAME = "exllamav3"
module = module_of(
    f"{NAME}.generator.pagetable",
    checkout=NAME,
    packages=[NAME, f"{NAME}.generator", f"{NAME}.tokenizer"],
    without=[f"{NAME}.ext", f"{NAME}.cache", f"{NAME}.util"],
)
PageTable, CachePage, Sequence = module.PageTable, module.CachePage, module.Sequence
PAGE, PAGES = 4, 24
module.PAGE_SIZE = PAGE
module.FIRST_MM_EMBEDDING_INDEX = 1_000_000_000


class Tokens:
    """The tokens of a sequence, as `SeqTensor` keeps them."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @classmethod
    def from_tensor(cls, tensor: Any, seq_dim: int) -> "Tokens":
        return cls(tensor)

    def __len__(self) -> int:
        return int(self.tensor.shape[1])

    def torch_slice(self, start: int, end: int) -> Any:
        return self.tensor[:, start:end]


module.SeqTensor = Tokens


def running(table: Any) -> list[Any]:
    """The sequences that have pages."""
    jobs: list[Any] = table.generator.active
    return jobs


# fmt: off
def declare(**options: Any) -> WatchedPool:
    """The declaration."""
    return watch_pages(
        PageTable, after=["deallocate_pages", "num_unreferenced_pages"],
        holders=lambda t: [[page.page_index for page in job.allocated_pages] for job in running(t)],
        free=lambda t: [page.page_index for page in t.unreferenced_pages.values()],
        references=lambda t: {page.page_index: page.ref_count for page in t.all_pages},
        num_pages="max_pages", **options)
# fmt: on


def start(table: Any, drawn: random.Random) -> None:
    """A job begins: prompts begin alike, so that pages are shared."""
    prompt = [drawn.randrange(3)] * PAGE + [drawn.randrange(2) for _ in range(drawn.randrange(1, 9))]
    ids = torch.tensor([prompt])
    job = Sequence(ids, ids)
    job.new_tokens = drawn.randrange(1, 6)
    job.prepare(False, job.new_tokens)
    new = [h for h in job.page_hashes if h not in table.referenced_pages]
    if len(new) + job.new_unique_pages > table.num_unreferenced_pages():
        return
    job.allocate_pages(table, None)
    table.generator.active.append(job)
    for page, at in zip(job.allocated_pages, range(0, len(prompt), PAGE), strict=False):
        part = ids[:, at : at + PAGE]
        full = part.shape[1] == PAGE and at // PAGE < len(job.page_hashes)
        page.sequence[:, : part.shape[1]] = part
        page.kv_position = part.shape[1]
        if full and at:
            page.prev_hash = job.page_hashes[at // PAGE - 1]


def drive(seed: int, steps: int = 24, after_each: Callable[[Any], object] = id) -> None:
    """Jobs begin and end, pages are evicted and found again. Nothing is compared."""
    module._uniquehash = 0
    drawn = random.Random(seed)
    generator = SimpleNamespace(active=[], recurrent_cache=None, enable_defrag=False)
    table = PageTable(generator, SimpleNamespace(max_num_tokens=PAGE * PAGES))
    for page in table.all_pages:
        page.sequence.zero_()  # so that two runs are alike, garbage included
    for _ in range(steps):
        table.num_unreferenced_pages()  # the generator asks for it before it starts jobs
        if drawn.random() < 0.6:
            start(table, drawn)
        elif generator.active:
            job = generator.active.pop(drawn.randrange(len(generator.active)))
            table.deallocate_pages(job.allocated_pages)
        after_each(table)
    for job in list(itertools.chain(generator.active)):
        generator.active.remove(job)
        table.deallocate_pages(job.allocated_pages)
    after_each(table)


DECLARED: dict[str, dict[str, Any]] = {"full": {}}


def endless(text: str) -> bool:
    """Statements without which a loop does not end."""
    return text in ("stack.extend(p.children)", "available_pages.popleft()")


def apart(row: dict[str, Any]) -> bool:
    """Eviction order and statistics, which no page table can be wrong by."""
    text = row["text"]
    return row["method"] in ("build_eviction_order", "evict") or any(
        word in text for word in ("access_serial", "metrics", "non_sequential_pages", "can_revert", "children")
    )


TARGETS = [
    (PageTable, name, module)
    for name in ("reset_page_table", "build_eviction_order", "evict", "allocate_pages", "deallocate_pages")
]
TARGETS += [(CachePage, name, module) for name in ("backup", "revert", "add_ref", "add_ref_clear")]
TARGETS += [(CachePage, name, module) for name in ("add_ref_unique", "sub_ref")]
TARGETS += [(Sequence, name, module) for name in ("prepare", "build_block_index_tensor", "allocate_pages")]
"""Methods whose statements are deleted, one at a time."""
