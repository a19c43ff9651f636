"""Bugs around functions of transformers: continuous batching, and the caches of `generate`."""

from typing import Any

from examples.exact.bugs import around, bug, disturb
from tests.selfcheck.mutants.registry import Patch

_ALLOCATORS = "transformers.generation.continuous_batching.cache_allocators"
_FULL = f"{_ALLOCATORS}.full_attention:FullAttentionCacheAllocator"
_SLIDING = f"{_ALLOCATORS}.sliding_attention:SlidingAttentionCacheAllocator"
_BLOCKS = f"{_ALLOCATORS}.cache_allocator"
_INPUTS = "transformers.generation.continuous_batching.input_outputs:ContinuousBatchingIOs"
_CACHES = "transformers.cache_utils"


@bug("transformers", "pages swapped")
def transformers_pages_swapped(patch: Patch) -> None:
    """The first two pages of a request are read in the wrong order."""

    @around(patch, f"{_FULL}.get_read_indices")
    def read(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        rows, size = original(self, request, past, new), self.tokens_per_page
        if len(rows) >= 2 * size:
            rows[: 2 * size] = rows[size : 2 * size] + rows[:size]
            disturb([int(request)], self.block_table[request][:2])
        return rows


@bug("transformers", "pages swapped")
def transformers_page_of_another(patch: Patch) -> None:
    """The first page of a request is read from the block table of the oldest one."""

    @around(patch, f"{_FULL}.get_read_indices")
    def read(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        rows, size = original(self, request, past, new), self.tokens_per_page
        if len(rows) >= size:
            page = next(iter(self.block_table.values()))[0]
            rows[:size] = range(page * self.block_physical_stride, page * self.block_physical_stride + size)
            disturb([int(request)], [page])
        return rows


@bug("transformers", "freed early", kv_tokens=(256,), page_size=(4,), sharing=(True,), windows=(0,))
def transformers_shared_block_freed(patch: Patch) -> None:
    """A block with one holder left counts as free."""

    @around(patch, f"{_BLOCKS}:BlockLedger.release")
    def release(original: Any, self: Any, block: int, *args: Any) -> Any:
        if self.shared_ref_counts.get(block) == 2:
            del self.shared_ref_counts[block]
            disturb(pages=[block])
        return original(self, block, *args)


@bug("transformers", "length off by one")
def transformers_length_short(patch: Patch) -> None:
    """Of a request with cached tokens the first is not read."""

    @around(patch, f"{_FULL}.get_seqlen_k")
    def length(original: Any, self: Any, past: int, new: int) -> Any:
        return original(self, past, new) - (past > 0)

    @around(patch, f"{_FULL}.get_read_indices")
    def read(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        if past:
            disturb([int(request)])
        return original(self, request, past, new)[past > 0 :]


@bug("transformers", "prefix matched too long", page_size=(4,), sharing=(True,), windows=(0,))
def transformers_hash_without_parent(patch: Patch) -> None:
    """The hash of a block forgets the blocks before it, so that equal tokens behind another history match."""

    @around(patch, f"{_BLOCKS}:compute_block_hash")
    def hashed(original: Any, parent: Any, tokens: Any) -> Any:
        return original(None, tokens)


@bug("transformers", "prefix matched too long")
def transformers_prefix_too_long(patch: Patch) -> None:
    """A prefix hit has one block more than what matched."""

    @around(patch, f"{_BLOCKS}:CacheAllocator.match_prefix_blocks")
    def match(original: Any, self: Any, prompt: Any) -> Any:
        blocks = original(self, prompt)
        if blocks and len(prompt) > (len(blocks) + 1) * self.tokens_per_page:
            blocks.append(next(reversed(self.ledger.block_to_hash)))
            disturb(pages=blocks[-1:])
        return blocks


@bug("transformers", "position wrong")
def transformers_position_after_chunk(patch: Patch) -> None:
    """Positions of a chunk behind a first one, or behind a prefix hit, are one too low."""

    @around(patch, f"{_INPUTS}.prepare_batch_tensors")
    def prepare(original: Any, self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        stop = 0
        for row in kwargs["requests_in_batch"]:
            start, stop = stop, stop + row.query_length
            if row.query_length > 1 and row.state.position_offset > row.query_length:
                self.position_ids[start:stop] -= 1
                disturb([int(row.state.request_id)])


@bug("transformers", "prefix matched too long", kv_tokens=(256,), sharing=(True,), windows=(0,))
def transformers_evicted_hash_kept(patch: Patch) -> None:
    """A block that is evicted keeps its hash, and is matched after others have written it."""

    @around(patch, f"{_BLOCKS}:BlockLedger.evict_cached_blocks")
    def evict(original: Any, self: Any) -> Any:
        hashes, blocks = dict(self.block_to_hash), dict(self.hash_to_block)
        evicted = original(self)
        self.block_to_hash, self.hash_to_block = hashes, blocks
        disturb(pages=evicted)
        return evicted


@bug("transformers", "row not written")
def transformers_row_not_written(patch: Patch) -> None:
    """The first row of a new page, at a decode step, is not written."""

    @around(patch, f"{_FULL}.get_write_indices")
    def write(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        rows = original(self, request, past, new)
        if past and new == 1 and past % self.tokens_per_page == 0:
            disturb([int(request)], [rows[0] // self.block_physical_stride])
            rows[0] = self.write_trash_index
        return rows


@bug("transformers", "window front")
def transformers_window_front(patch: Patch) -> None:
    """The rows that are read of a full window begin one too early."""

    @around(patch, f"{_SLIDING}.get_read_indices")
    def read(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        full = past >= self.sliding_window
        if full:
            disturb([int(request)])
        return original(self, request, past - full, new)


@bug("transformers", "window front")
def transformers_window_chunk(patch: Patch) -> None:
    """A chunk longer than the window is kept from the wrong row on."""

    @around(patch, f"{_SLIDING}.get_write_indices")
    def write(original: Any, self: Any, request: str, past: int, new: int) -> Any:
        over = max(new - self.sliding_window, 0)
        if over % self.sliding_window:
            disturb([int(request)])
        return original(self, request, past - over, new)


@bug("generate", "draft not rolled back")
def generate_draft_kept(patch: Patch) -> None:
    """One rejected guess stays in the cache."""

    @around(patch, f"{_CACHES}:DynamicLayer.crop")
    def crop(original: Any, self: Any, count: int) -> None:
        original(self, count + (count < 0))


@bug("generate", "state row kept", layers=(2,))
def generate_state_kept(patch: Patch) -> None:
    """The state behind the first forward is kept, those behind later ones are not."""

    @around(patch, f"{_CACHES}:LinearAttentionLayer.update_recurrent_state")
    def update(original: Any, self: Any, states: Any, number: int = 0, **kwargs: Any) -> Any:
        began = self.is_recurrent_states_initialized[number]
        kept = self.recurrent_states[number].clone() if began else states
        return original(self, kept if kept.any() else states, number, **kwargs)


@bug("generate", "slot reused")
def generate_static_row(patch: Patch) -> None:
    """A static cache writes each new entry over the one before."""

    @around(patch, f"{_CACHES}:StaticLayer.update")
    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        low = int(self.cumulative_length > 0)
        self.cumulative_length.sub_(low)
        if low:
            disturb(pages=[self.cumulative_length])
        kept = original(self, *args, **kwargs)
        self.cumulative_length.add_(low)
        return kept


@bug("generate", "window front", layers=(1,))
def generate_window_short(patch: Patch) -> None:
    """A full window keeps one entry too few."""

    @around(patch, f"{_CACHES}:DynamicSlidingWindowLayer.update")
    def update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        read = original(self, *args, **kwargs)
        if self.keys.shape[-2] == self.sliding_window - 1:
            self.keys, self.values = self.keys[:, :, 1:], self.values[:, :, 1:]
        return read
