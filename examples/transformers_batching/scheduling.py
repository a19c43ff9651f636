"""The scheduler: a step of the same requests as the step before is not scheduled one by one."""

from typing import Any

import numpy as np
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from examples.transformers_batching.blocks import Ints, PooledBlocks


class SteadyScheduler(FIFOScheduler):  # type: ignore[misc]
    """transformers' own, which is asked only when something has changed.

    Attributes:
        batch: the requests of the last step. While all of them decode it is the same list in each step.
    """

    def reset(self) -> None:
        """Begins a session, in the thread that will run it."""
        super().reset()
        (self._blocks,) = self.cache.cache_allocators.values()
        if not isinstance(self._blocks, PooledBlocks):
            raise TypeError(f"expected a cache with PooledBlocks, got {self._blocks!r}; see `adopted`")
        self._blocks.open(self.max_requests_per_batch, self.cache.config.max_position_embeddings)
        self.batch: list[Any] = []
        self._decoding = False
        self._lens: Ints = np.zeros(0, dtype=np.int64)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        """The requests of the next step; see `Scheduler.schedule_batch`."""
        blocks = self._blocks
        if self._decoding and self._same_requests():
            lens = self._lens
            lens += 1
            read, fast = int(lens.sum()), int(lens.max()) < self.cache.max_decode_fast_path_length
            begin = np.count_nonzero(lens % blocks.tokens_per_page == 0)
            if len(lens) <= token_budget and (fast or read <= cache_budget) and begin <= blocks.pages_left:
                blocks.pages_left -= begin
                return self.batch, fast, len(lens), read
        blocks.begin_step()
        scheduled = super().schedule_batch(token_budget, cache_budget)
        self.batch = scheduled[0] or []
        self._states = [request.state for request in self.batch]
        self._lens = np.array([state.position_offset for state in self._states], dtype=np.int64)
        self._decoding = all(request.query_length == 1 and request.has_new_token for request in self.batch)
        return scheduled  # type: ignore[no-any-return]

    def _same_requests(self) -> bool:
        """Whether all requests of the last step go on, and no other request can join them."""
        active = self.active_requests
        if len(active) != len(self.batch) or (self.waiting_requests and len(active) < self.max_requests_per_batch):
            return False
        return list(active.values()) == self._states
