"""Bugs around functions of nano-vllm: its block manager and its model runner."""

from importlib import import_module
from typing import Any

from examples.exact.bugs import around, bug, disturb
from tests.selfcheck.mutants.registry import Patch

_RUNNER = "nanovllm.engine.model_runner:ModelRunner"
_MANAGER = "nanovllm.engine.block_manager:BlockManager"


def _context() -> Any:
    return import_module("nanovllm.utils.context").get_context()


@bug("nano_vllm", "pages swapped")
def nano_vllm_pages_swapped(patch: Patch) -> None:
    """The first two pages of a request are read in the wrong order."""

    @around(patch, f"{_RUNNER}.prepare_block_tables")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        table = original(self, seqs)
        for row, request in zip(table, self.model.requests, strict=True):
            if len(row) > 1 and row[1] >= 0:
                disturb([request], row[:2])
                row[:2] = row[:2].flip(0)
        return table


@bug("nano_vllm", "pages swapped")
def nano_vllm_page_of_another(patch: Patch) -> None:
    """The first page of each request is that of the first one in the batch."""

    @around(patch, f"{_RUNNER}.prepare_block_tables")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        table = original(self, seqs)
        table[:, 0] = int(table[0, 0])
        disturb(self.model.requests[1:], [table[0, 0]])
        return table


@bug("nano_vllm", "freed early", kv_tokens=(128,))
def nano_vllm_not_shared(patch: Patch) -> None:
    """A prefix hit on a page in use does not count as a holder of it."""

    @around(patch, f"{_MANAGER}.allocate")
    def allocate(original: Any, self: Any, seq: Any, cached: int) -> None:
        used = set(self.used_block_ids)
        original(self, seq, cached)
        for number in seq.block_table[:cached]:
            if number in used:
                self.blocks[number].ref_count -= 1
                disturb(pages=[number])

    @around(patch, f"{_MANAGER}._allocate_block")
    def allocate_block(original: Any, self: Any) -> Any:
        self.blocks[self.free_block_ids[0]].ref_count = 0  # freed twice it is below, which the engine asserts
        return original(self)


@bug("nano_vllm", "length off by one")
def nano_vllm_length_short(patch: Patch) -> None:
    """A decode step sees one token too few."""

    @around(patch, f"{_RUNNER}.prepare_decode")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        inputs = original(self, seqs)
        _context().context_lens.sub_(1)
        disturb(self.model.requests)
        return inputs


@bug("nano_vllm", "prefix matched too long")
def nano_vllm_hash_without_parent(patch: Patch) -> None:
    """The hash of a page forgets the pages before it."""

    @around(patch, f"{_MANAGER}.compute_hash")
    def hashed(original: Any, cls: Any, tokens: Any, prefix: int = -1) -> Any:
        return original(cls, tokens)


@bug("nano_vllm", "prefix matched too long")
def nano_vllm_parent_after_chunk(patch: Patch) -> None:
    """The hash of a page behind a chunk or a prefix hit forgets the pages before it."""

    @around(patch, f"{_MANAGER}.hash_blocks")
    def hash_blocks(original: Any, self: Any, seq: Any) -> None:
        first = seq.num_cached_tokens // self.block_size
        parent = self.blocks[seq.block_table[max(first - 1, 0)]]
        before = parent.hash
        if first:
            parent.hash = -1
        original(self, seq)
        if first:
            parent.hash = before


@bug("nano_vllm", "position wrong")
def nano_vllm_position_after_chunk(patch: Patch) -> None:
    """Positions of a chunk behind a first one, or behind a prefix hit, are one too low."""

    @around(patch, f"{_RUNNER}.prepare_prefill")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        ids, positions = original(self, seqs)
        stop = 0
        for seq, request in zip(seqs, self.model.requests, strict=True):
            start, stop = stop, stop + seq.num_scheduled_tokens
            if seq.num_cached_tokens:
                positions[start:stop] -= 1
                disturb([request])
        return ids, positions


@bug("nano_vllm", "slot reused")
def nano_vllm_row_low(patch: Patch) -> None:
    """A decode step writes its entry one row too low in its page."""

    @around(patch, f"{_RUNNER}.prepare_decode")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        inputs = original(self, seqs)
        for slot, request in zip(_context().slot_mapping, self.model.requests, strict=True):
            if slot % self.block_size:
                slot -= 1
                disturb([request], [slot // self.block_size])
        return inputs


@bug("nano_vllm", "prefix matched too long")
def nano_vllm_reused_hash_kept(patch: Patch) -> None:
    """A page that is taken again can still be matched for what it held."""

    @around(patch, f"{_MANAGER}._allocate_block")
    def allocate_block(original: Any, self: Any) -> Any:
        block = self.blocks[self.free_block_ids[0]]
        kept, tokens = block.hash, block.token_ids
        matched = self.hash_to_block_id.get(kept) == block.block_id
        number = original(self)
        block.hash, block.token_ids = kept, tokens
        if matched:
            self.hash_to_block_id[kept] = number
            disturb(pages=[number])
        return number


@bug("nano_vllm", "prefix lost")
def nano_vllm_prefix_lost(patch: Patch) -> None:
    """A chunk behind a first one, or behind a prefix hit, sees itself alone."""

    @around(patch, f"{_RUNNER}.prepare_prefill")
    def prepare(original: Any, self: Any, seqs: Any) -> Any:
        inputs, context = original(self, seqs), _context()
        context.cu_seqlens_k, context.block_tables = context.cu_seqlens_q, None
        disturb(number for seq, number in zip(seqs, self.model.requests, strict=True) if seq.num_cached_tokens)
        return inputs
