"""Bugs around functions of mini-sglang, whose known faults are mended: see `mini_sglang.mended`."""

from importlib import import_module
from typing import Any

import torch

from examples.exact.bugs import around, bug, disturb
from tests.selfcheck.mutants.registry import Patch

_ENGINE = "mini_sglang_mended"
_ATTENTION = "minisgl.attention.fa:FlashAttentionBackend"
_SCHEDULER = "minisgl.scheduler.scheduler"
_RADIX = "minisgl.kvcache.radix_cache"
_CACHE = "minisgl.scheduler.cache:CacheManager"


def _page_size() -> int:
    size: int = import_module("minisgl.core").get_global_ctx().page_size
    return size


@bug(_ENGINE, "pages swapped")
def mini_sglang_pages_swapped(patch: Patch) -> None:
    """The first two pages of a request are read in the wrong order."""

    @around(patch, f"{_ATTENTION}.prepare_metadata")
    def prepare(original: Any, self: Any, batch: Any) -> None:
        original(self, batch)
        read = batch.attn_metadata
        for request, length, pages in zip(batch.padded_reqs, read.cache_seqlens, read.page_table, strict=True):
            if length >= 2 * self.page_size:
                disturb([request.uid], pages[:2])
                pages[:2] = pages[:2].flip(0)


@bug(_ENGINE, "pages swapped")
def mini_sglang_page_of_another(patch: Patch) -> None:
    """The first page of each request is that of the first one in the batch."""

    @around(patch, f"{_ATTENTION}.prepare_metadata")
    def prepare(original: Any, self: Any, batch: Any) -> None:
        original(self, batch)
        table = batch.attn_metadata.page_table
        table[:, 0] = int(table[0, 0])
        disturb([request.uid for request in batch.padded_reqs[1:]], [table[0, 0]])


@bug(_ENGINE, "length off by one")
def mini_sglang_length_short(patch: Patch) -> None:
    """A request with cached tokens sees one too few."""

    @around(patch, f"{_ATTENTION}.prepare_metadata")
    def prepare(original: Any, self: Any, batch: Any) -> None:
        original(self, batch)
        cached = torch.tensor([int(request.cached_len > 0) for request in batch.padded_reqs])
        batch.attn_metadata.cache_seqlens -= cached
        disturb(request.uid for request in batch.padded_reqs if request.cached_len)


@bug(_ENGINE, "position wrong")
def mini_sglang_position_after_chunk(patch: Patch) -> None:
    """Positions of a chunk behind a first one, or behind a prefix hit, are one too low."""

    @around(patch, f"{_SCHEDULER}:_make_positions")
    def make(original: Any, batch: Any, device: Any) -> Any:
        positions, stop = original(batch, device), 0
        for request in batch.padded_reqs:
            start, stop = stop, stop + request.extend_len
            if request.cached_len and request.extend_len > 1:
                positions[start:stop] -= 1
                disturb([request.uid])
        return positions


@bug(_ENGINE, "prefix matched too long")
def mini_sglang_prefix_too_long(patch: Patch) -> None:
    """A match that ends inside of a node goes on for one page."""

    @around(patch, f"{_RADIX}:RadixTreeNode.get_match_len")
    def match(original: Any, self: Any, ids: Any) -> Any:
        size, length = _page_size(), original(self, ids)
        longer = min(length // size * size + size, self.length, len(ids) // size * size)
        disturb(pages=self.value[length // size * size : longer] // size)
        return longer


@bug(_ENGINE, "freed early", kv_tokens=(128,), cache=("radix",))
def mini_sglang_tail_freed(patch: Patch) -> None:
    """The end of a request frees the last page that it has left in the tree."""

    @around(patch, f"{_CACHE}.cache_req")
    def cache(original: Any, self: Any, request: Any, *, finished: bool) -> None:
        original(self, request, finished=finished)
        stop = request.cached_len // self.page_size * self.page_size
        if finished and stop and hasattr(self.prefix_cache, "root_node"):
            page = self.page_table[request.table_idx, stop - self.page_size : stop]
            self._free(page)
            disturb(pages=page[:1] // self.page_size)


@bug(_ENGINE, "slot reused")
def mini_sglang_slot_twice(patch: Patch) -> None:
    """The last free row of the page table is given to every request that comes."""

    @around(patch, "minisgl.scheduler.table:TableManager.allocate")
    def allocate(original: Any, self: Any) -> Any:
        slot = original(self)
        if not self.available_size:
            self.free(slot)
        return slot


@bug(_ENGINE, "token of another")
def mini_sglang_tokens_swapped(patch: Patch) -> None:
    """The next tokens of a batch go to the rows of its requests in the wrong order."""

    @around(patch, f"{_SCHEDULER}:_make_write_tuple")
    def make(original: Any, batch: Any, device: Any) -> Any:
        rows, places = original(batch, device)
        if len(rows) > 1:
            disturb(request.uid for request in batch.reqs)
        return rows.flip(0), places


@bug(_ENGINE, "pages swapped")
def mini_sglang_split_values(patch: Patch) -> None:
    """The lower half of a node that is split keeps the pages of the upper one."""

    @around(patch, f"{_RADIX}:RadixTreeNode.split_at")
    def split(original: Any, self: Any, place: int) -> Any:
        pages = self.value
        upper = original(self, place)
        self._value = pages[: self.length]
        disturb(pages=self._value // _page_size())
        return upper


@bug(_ENGINE, "freed early")
def mini_sglang_evicted_kept(patch: Patch) -> None:
    """A node that is evicted stays in the tree."""

    @around(patch, f"{_RADIX}:RadixPrefixCache.evict")
    def evict(original: Any, self: Any, size: int) -> Any:
        nodes, kept = [self.root_node], []
        while nodes:
            node = nodes.pop()
            kept.append((node, dict(node.children)))
            nodes += node.children.values()
        evicted = original(self, size)
        for node, children in kept:
            node.children = children
        disturb(pages=evicted // self.page_size)
        return evicted


@bug(_ENGINE, "prefix lost")
def mini_sglang_half_page_replaced(patch: Patch) -> None:
    """A page that is half full is replaced by a new one."""

    @around(patch, f"{_CACHE}.allocate_paged")
    def allocate(original: Any, self: Any, requests: Any) -> None:
        cached = [request.cached_len for request in requests]
        for request in requests:
            request.cached_len -= request.cached_len % self.page_size
        original(self, requests)
        for request, length in zip(requests, cached, strict=True):
            if request.cached_len < length:
                disturb([request.uid], [self.page_table[request.table_idx, request.cached_len] // self.page_size])
            request.cached_len = length


@bug(_ENGINE, "pages swapped")
def mini_sglang_nodes_reversed(patch: Patch) -> None:
    """The pages of a prefix that lies in several nodes come in the wrong order."""

    @around(patch, f"{_RADIX}:RadixCacheHandle.get_matched_indices")
    def matched(original: Any, self: Any) -> Any:
        rows, lengths, node = original(self), list[int](), self.node
        while not node.is_root():
            lengths.insert(0, node.length)
            node = node.parent
        if len(lengths) > 1:
            disturb(pages=rows // _page_size())
        return torch.cat(rows.split(lengths)[::-1])


@bug(_ENGINE, "slot reused")
def mini_sglang_stale_row(patch: Patch) -> None:
    """The pages of a prefix hit are not written into the row of the request, which has those of the request before."""

    @around(patch, "minisgl.scheduler.prefill:PrefillAdder._try_allocate_one")
    def allocate(original: Any, self: Any, request: Any) -> Any:
        table = self.table_manager.page_table
        before = table.clone()
        allocated = original(self, request)
        if allocated is not None:
            handle, row = allocated
            table[row, : handle.cached_len] = before[row, : handle.cached_len]
            if handle.cached_len:
                disturb([request.uid], before[row, : handle.cached_len] // self.cache_manager.page_size)
        return allocated
