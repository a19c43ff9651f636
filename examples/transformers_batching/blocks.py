"""The cache allocator: each request has a slot, and the pages of the slot are its blocks."""

from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from batchstate import FutureMap, PagePool, SlotPool, Slots, open_runtime, relay_field
from batchstate.runtime import Fence

Ints = npt.NDArray[np.int64]


@final
class FreeBlocks:
    """The free blocks of an allocator, as transformers' `CachePool` asks for them. The page pool hands them out."""

    def __init__(self, blocks: "PooledBlocks") -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return self._blocks.pages_left

    def delete_full_trees(self) -> list[int]:
        """No sector is given back to the cache: all are this allocator's."""
        return []


class PooledBlocks(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Blocks of full attention, handed out by a `PagePool`.

    transformers schedules request by request. Here that only counts; promised blocks are allocated once a step, for all
    requests in one call, when the step is planned. Requests that have ended are released when the next is scheduled.

    Attributes:
        runtime, pages, relay: of batchstate, from `open` on.
        live: handles of all requests that have slots.
        forward_done: behind the last forward.
        pages_left: pages that nothing was promised in this step.
    """

    supports_block_sharing = False

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        """All sectors are this allocator's from the start."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        if pool.num_allocators != 1:
            raise NotImplementedError("expected a model with full attention only, got one that has sliding windows too")
        self.first_block = 2 * self.blocks_per_sector  # behind the two sectors for padding
        pool.free_sectors.clear()
        pool._free_blocks[self.index] = FreeBlocks(self)
        self.pages_left: int = self.num_blocks

    def open(self, max_requests: int, max_tokens: int) -> None:
        """Makes the pools of a session, which belong to its thread; the scheduler knows how many requests there are."""
        self.runtime = open_runtime(self.cache_tensor.device)
        self._slots = SlotPool(self.runtime, max_requests)
        most = min(self.num_blocks * self.tokens_per_page, max_tokens)
        table = self._slots.table("req_to_token", (most,), torch.int32, holds="location")
        self.pages = PagePool(
            self.runtime,
            self._slots,
            self.num_blocks,
            self.tokens_per_page,
            max_tokens_per_request=most,
            req_to_token=table,
        )
        blocks = self.cache_tensor.view(self.first_block + self.num_blocks, -1)
        self.pages.register_kv(blocks[self.first_block - 1 :])  # pages begin with 1
        fields = {"last_token": relay_field(torch.int64, read_by="both", non_negative=True)}
        self.relay = FutureMap(self._slots, fields)
        self.live = self._slots.take(0)
        self._rows: dict[str, int] = {}  # request -> row of `live`
        self._ended: set[str] = set()
        self._slots_left = max_requests
        self.forward_done: Fence | None = None

    # Questions of the scheduler, request by request

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """The pages that begin in the tokens of the next step: those before have theirs."""
        size = self.tokens_per_page
        needed: int = past_length // -size - (past_length + query_length) // -size
        return needed

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """0 if there is room; else more than there are."""
        room = self.needs_new_blocks(request_id, past_length, query_length) <= self.pages_left
        return 0 if room and (past_length or request_id in self._rows or self._slots_left) else self.num_blocks + 1

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Promises pages, and a slot to a new request."""
        self.pages_left -= self.needs_new_blocks(request_id, past_length, query_length)
        self._slots_left -= request_id not in self._rows

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """The request has ended, or begins anew. It has no blocks to be copied to the host (`block_table` is empty)."""
        if request_id in self._rows and request_id not in self._ended:
            self._ended.add(request_id)
            committed = self.pages.committed_lengths[self.live.np[self._rows[request_id]]]
            self.pages_left += int(-(-committed // self.tokens_per_page))

    def free_all_requests(self) -> None:
        """All have ended."""
        for request_id in self._rows:
            self.free_blocks(request_id)

    # Work once a step

    def begin_step(self) -> None:
        """Releases what has ended, with all that it has, and counts what is free."""
        if self._ended:
            rows = self._rows
            keep = np.ones(len(rows), dtype=np.bool_)
            keep[[rows[request] for request in self._ended]] = False
            self._slots.release_requests(self.live.filter(~keep), after=self.forward_done)
            self.live = self.live.filter(keep)
            self._rows = {
                request: row for row, request in enumerate(request for request in rows if request not in self._ended)
            }
            self._ended.clear()
        self.pages_left, self._slots_left = self.pages.stats.free, self._slots.stats.free

    def slots_of(self, request_ids: Sequence[str], total_lens: Ints) -> Slots:
        """The slots of the requests of a step, with pages for so many tokens; new requests get theirs."""
        new = [request for request in request_ids if request not in self._rows]
        if new:
            self._rows.update(zip(new, range(len(self._rows), len(self._rows) + len(new)), strict=True))
            self.live = self.live.merge(self._slots.take(len(new)))
        slots = self.live.take(np.array([self._rows[request] for request in request_ids]))
        self.pages.grow(slots, total_lens)
        return slots

    # Where pages lie in the cache tensor, which all layers share

    def kernel_block_table(self, rows: Ints, max_blocks: int) -> npt.NDArray[np.int32]:
        """The first pages of each request as kernels number them, int32[n, max_blocks]; -1 where there is none."""
        pages = self.pages.page_table[rows, :max_blocks]
        first = self.first_block - 1  # pages begin with 1
        numbers = (pages + first) * (self.block_physical_stride // self.tokens_per_page)
        return np.where(pages > 0, numbers, -1).astype(np.int32)

    def cache_indices(self, rows: Ints, positions: Ints) -> Ints:
        """The row of the cache tensor of each token, int64[t]."""
        page, offset = np.divmod(positions, self.tokens_per_page)
        blocks = self.pages.page_table[rows, page] + (self.first_block - 1)
        return np.asarray(blocks.astype(np.int64) * self.block_physical_stride + offset)

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> NoReturn:
        """Refuses to fork a request."""
        raise NotImplementedError("expected one answer to each prompt, got num_return_sequences above 1")
