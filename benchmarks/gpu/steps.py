"""Decode steps without a model: requests leave, join and advance, the table is written, the relay carries the tokens.

The next token of a request is its last one plus one, so the host knows at every moment what the device must have.
"""

from collections import deque
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate import Batch, FutureMap, PagePool, SlotPool, StaticBuffers, mirrored, relay_field, slot_column
from batchstate.columns import TensorColumn
from batchstate.future_map import Prefetched
from batchstate.runtime import Fence, Runtime
from batchstate.tables import TableWrite

Ints = npt.NDArray[np.int64]

FILLERS = (torch.float32, torch.int32, torch.int64, torch.bool)
"""Dtypes of the columns that merely come along, in turns."""
PROMPT = 5
"""Tokens that a request has when it joins."""


class Decode(Batch):
    """The two columns that each batch here has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


def declared(num_columns: int) -> type[Decode]:
    """A batch class of that many columns, all with both sides."""
    fillers = {f"column_{i}": mirrored(FILLERS[i % len(FILLERS)]) for i in range(num_columns - 2)}
    return type(f"Decode{num_columns}", (Decode,), fillers)


@final
class Serving:
    """A batch that runs: the oldest requests leave, as many join.

    Args:
        runtime: the device; two steps in flight are enough.
        num_columns: of the batch, at least 2.
        rows: requests in the batch.
        churn: requests that leave and join in each step.

    Attributes:
        batch: as of the last step.
        steps: made so far.
        wrong_tokens: tokens that came to the host and were not those that it knows must come.
    """

    def __init__(self, runtime: Runtime, *, num_columns: int = 12, rows: int = 64, churn: int = 4) -> None:
        self.runtime = runtime
        self.steps = 0
        self.wrong_tokens = 0
        self._churn = churn
        self._declared = declared(num_columns)
        self._slots = SlotPool(runtime, rows + 8 * churn)
        most = PROMPT + rows // churn + 2
        self._table = self._slots.table("req_to_token", (most,), torch.int32, holds="location")
        num_pages = (rows + 8 * churn) * -(-most // 4)
        self._pages = PagePool(
            runtime, self._slots, num_pages, 4, max_tokens_per_request=most, req_to_token=self._table
        )
        self._relay = FutureMap(self._slots, {"last_token": relay_field(torch.int64, read_by="both")})
        self._forward = runtime.stream("forward")
        self._unread: deque[tuple[Prefetched, Ints]] = deque()
        self._fences: deque[Fence] = deque()
        self._requests = 0
        self._tokens = np.zeros(0, dtype=np.int64)  # what the relay holds of each row of the batch
        self.batch = self._declared.empty(runtime)
        self.batch.upload(writes=[self._join(rows, seed=True)])
        runtime.synchronize()  # the first step is one step ahead of nothing

    def step(self) -> None:
        """One step with everything: copy and scatter; then gather, publish and prefetch on the stream of the forward.

        Tokens that joining requests bring into the relay are a copy of their own.
        """
        self.runtime.next_step()
        joined = self._leave_and_join(seed=True)
        batch, forward = self.batch, self._forward
        added = self._pages.advance(batch.slots, 1)
        uploaded = batch.upload(writes=[joined, added.entry()], extras={"positions": added.positions})
        with self.runtime.use(forward):
            last = self._relay.gather(batch.slots, "last_token")
            places = self._table.device_for(batch.slots).index_select(0, batch.slots.device)
            self._table.read_until(self.runtime.record())
            # Stands for a model: it reads the table, the lengths and the positions, and adds nothing but one.
            read = places.sum(1) + batch.seq_lens.device + uploaded["positions"]
            self._relay.publish(batch.slots, last_token=last + 1 + 0 * read)
            self._tokens = self._tokens + 1
            self._unread.append((self._relay.prefetch(batch.slots, "last_token"), self._tokens))
            self._fences.append(self.runtime.record())
        if len(self._unread) > 1:
            self._read()
        self.steps += 1

    def buffers(self) -> StaticBuffers:
        """Memory at fixed addresses for a batch of this many columns and rows."""
        buffers = StaticBuffers(self.runtime, self._declared, rows=len(self.batch))
        self.runtime.synchronize()  # what was uploaded for them is of no step
        return buffers

    def batch_step(self, *, writes: bool, buffers: StaticBuffers | None = None) -> None:
        """The batch state of a step alone: one copy, and with `writes` the scatter into the table.

        With `buffers` the copy goes to their addresses, and else to memory of its own, of which each column is read.
        """
        self.runtime.next_step()
        entries = [self._leave_and_join(seed=False), self._pages.advance(self.batch.slots, 1).entry()]
        if buffers is None:
            self.batch.upload(writes=entries if writes else [])
            for name in self.batch.columns():
                self.batch[name].device  # noqa: B018 - a kernel is given it
        else:
            self.batch.to_static(buffers, writes=entries if writes else [])
        self._fences.append(self.runtime.record())
        if len(self._fences) > 1:
            self._fences[0].wait()  # as an engine would, which reads the results of the step before
        self.steps += 1

    def drain(self) -> None:
        """Reads what is left."""
        while self._unread:
            self._read()

    def _read(self) -> None:
        prefetched, wanted = self._unread.popleft()
        self.wrong_tokens += int((prefetched["last_token"].np != wanted).sum())

    def _leave_and_join(self, *, seed: bool) -> TableWrite:
        batch, keep = self.batch, np.ones(len(self.batch), dtype=np.bool_)
        keep[: self._churn] = False
        leaving = batch.filter(~keep)
        last = self._fences[-1] if self._fences else None
        self._pages.release_requests(leaving.slots, after=last)
        while len(self._fences) > 1:
            self._fences.popleft()
        self.batch = batch.filter(keep)
        self._tokens = self._tokens[keep]
        joined = self._join(self._churn, seed=seed)
        self.batch = self.batch.advance("seq_lens", 1)
        return joined

    def _join(self, count: int, *, seed: bool) -> TableWrite:
        """Requests join; what the table has to be told of them."""
        slots = self._slots.take(count)
        numbers = np.arange(self._requests, self._requests + count, dtype=np.int64)
        self._requests += count
        values: dict[str, Any] = {
            name: (numbers % 100).astype(column.np_dtype)
            for name, column in self._declared.columns().items()
            if isinstance(column, TensorColumn)
        }
        values |= {"slots": slots, "seq_lens": np.full(count, PROMPT)}
        joining = self._declared.build(self.runtime, **values)
        self.batch = self.batch.merge(joining) if len(self.batch) else joining
        self._tokens = np.concatenate([self._tokens, 1_000 * numbers])
        if seed:
            self._relay.publish(slots, last_token=1_000 * numbers)
        return self._pages.extend(slots, np.full(count, PROMPT)).entry()
