"""exllamav3's `PageTable` as it stands in a checkout, watched: nothing of it is changed."""

import contextlib
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from batchstate.watch import watch, watch_pages
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


def listed(table: Any) -> list[int]:
    """How many pages are listed as used, and how many in all."""
    return [len(table.referenced_pages), len({id(page) for page in table.all_pages})]


def wrong(table: Any) -> list[int]:
    """Pages of jobs whose key or whose predecessor is not that of their content, and tables that name other pages."""
    pages = [
        page.page_index
        for job in running(table)
        for at, page in enumerate(job.allocated_pages[: len(job.page_hashes)])
        if page.phash != job.page_hashes[at] or (page.prev_hash or None) not in (None, *job.page_hashes[:at])
    ]
    jobs = [[page.page_index for page in job.allocated_pages] for job in running(table)]
    return pages + [row[0] for row, job in zip(jobs, running(table), strict=True) if job_table(job) != row]


def contents(table: Any) -> list[int]:
    """Pages that are full, or that no job has, and whose key is not that of their tokens behind those before."""
    return [
        page.page_index
        for page in table.all_pages
        if module.is_content_hash(page.phash) and (page.kv_position == PAGE or not page.ref_count)
        if page.phash != module.tensor_hash_checksum(page.sequence, page.prev_hash)
    ]


def keys(job: Any) -> list[bytes]:
    """The keys of the full pages of a prompt."""
    chain: list[Any] = [None]
    for at in range((len(job.sequence_ids) - 1) // PAGE):
        tokens = job.sequence_ids.torch_slice(at * PAGE, (at + 1) * PAGE)
        chain.append(module.tensor_hash_checksum(tokens, chain[-1]))
    return chain[1:]


def computed(job: Any) -> int:
    """The tokens of the prompt that its first pages hold already."""
    before = [None, *job.page_hashes]
    held = [
        page.kv_position == PAGE and module.tensor_hash_checksum(page.sequence, before[at]) == key
        for at, (page, key) in enumerate(zip(job.allocated_pages, job.page_hashes, strict=False))
    ]
    return PAGE * [*held, False].index(False)


def behind(job: Any) -> list[int]:
    """How many tokens the pages behind the prompt have."""
    return [page.kv_position for page in job.allocated_pages[len(job.page_hashes) :] if page.kv_position]


def job_table(job: Any) -> list[int]:
    """The page numbers that a kernel gets."""
    return [] if job.block_index_tensor is None else list(job.block_index_tensor[0].tolist())


# fmt: off
def declare(**options: Any) -> contextlib.ExitStack:
    """The declaration: of the pages, and of a job that was given its own."""
    watches = contextlib.ExitStack()
    watches.enter_context(watch_pages(
        PageTable, after=["deallocate_pages", "num_unreferenced_pages"],
        holders=lambda t: [[page.page_index for page in job.allocated_pages] for job in running(t)],
        free=lambda _: [], cached=lambda t: [page.page_index for page in t.unreferenced_pages.values()],
        references=lambda t: {page.page_index: page.ref_count for page in t.all_pages},
        num_pages="max_pages", page_size=PAGE,
        lengths=lambda t: [len(job.sequence_ids) + job.new_tokens for job in running(t)],
        keys=lambda t: {page.page_index: page.phash for page in t.all_pages},
        index=lambda t: {key: page.page_index for key, page in (t.referenced_pages | t.unreferenced_pages).items()},
        counters={listed: lambda t: [sum(page.ref_count > 0 for page in t.all_pages), t.max_pages],
                  wrong: lambda _: [], contents: lambda _: []},
        **options))
    watches.enter_context(watch(
        Sequence, after=["allocate_pages"], num_rows=lambda job: len(job.allocated_pages),
        derived={"page_hashes": keys, "kv_position": computed, behind: lambda _: []}, **options))
    return watches
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
        page.kv_position, page.can_revert = part.shape[1], False
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
        after_each(seen(table))
    for job in list(itertools.chain(generator.active)):
        generator.active.remove(job)
        table.deallocate_pages(job.allocated_pages)
    after_each(seen(table))


def seen(table: Any) -> list[Any]:
    """Its pages and those of its jobs, without objects that name each other."""
    names = ("page_index", "phash", "prev_hash", "ref_count", "access_serial", "kv_position", "can_revert")
    pages = [[getattr(page, name) for name in names] for page in table.all_pages]
    tables = table.referenced_pages, table.unreferenced_pages
    listed = [[page.page_index for page in part.values()] for part in tables]
    jobs = [
        [[page.page_index for page in job.allocated_pages], job.page_hashes, job.block_index_tensor, job.kv_position]
        for job in running(table)
    ]
    return [str(pages), listed, [str(key) for key in table.unreferenced_pages], str(jobs), table.metrics]


DECLARED: dict[str, dict[str, Any]] = {"full": {}}


def endless(text: str) -> bool:
    """Statements without which a loop does not end."""
    return text in ("stack.extend(p.children)", "available_pages.popleft()")


KINDS = {
    "eviction order or a statistic": (
        "access_serial += 1", "access_serial = ", "access_serial_revert", "metrics", "non_sequential_pages", "children",
        "self.evict(page, protected_hashes)",
    ),
    "links of pages, which eviction follows": ("prev = op", "prev_hash = prev.phash", "prev_hash = None"),
    "saved hashes: less is found again": ("_revert", "can_revert", "self.backup()", "self.revert()"),
}  # fmt: skip


def apart(row: dict[str, Any]) -> str | None:
    """The kind of a deletion by which no page table is wrong."""
    if row["method"] in ("build_eviction_order", "evict"):
        return "eviction order or a statistic"
    return next((kind for kind, texts in KINDS.items() if any(text in row["text"] for text in texts)), None)


TARGETS = [
    (PageTable, name, module)
    for name in ("reset_page_table", "build_eviction_order", "evict", "allocate_pages", "deallocate_pages")
]
TARGETS += [(CachePage, name, module) for name in ("backup", "revert", "add_ref", "add_ref_clear")]
TARGETS += [(CachePage, name, module) for name in ("add_ref_unique", "sub_ref")]
TARGETS += [(Sequence, name, module) for name in ("prepare", "build_block_index_tensor", "allocate_pages")]
"""Methods whose statements are deleted, one at a time."""
