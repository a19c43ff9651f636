"""One whole decode step as an engine makes it: batch, slots, pages, the request-to-token table, and one upload.

Requests come and go at a constant rate and each lives equally long, so that every step does the same work.
"""

from typing import final

import numpy as np
import torch

from batchstate.columns import TensorColumn
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.decode_steps import Decode, declared
from benchmarks.timing import Contender

PAGE_SIZE = 16
PROMPT = 40
"""Tokens of each prompt; the step in which it is prefilled is not looked at, only its arrival in the batch."""


@final
class EngineState:
    """The state of an engine between steps.

    Args:
        runtime: the device.
        num_columns: columns of the batch.
        rows: requests that run; they stay `rows`.
        churn: how many leave and join in each step; `rows` is a multiple.
    """

    def __init__(self, runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 8) -> None:
        self.runtime, self._kind, self._churn = runtime, declared(num_columns), churn
        longest = PROMPT + rows // churn + 1
        self._slots = SlotPool(runtime, 4 * rows)
        num_pages = 4 * rows * -(-longest // PAGE_SIZE)
        self._pages = PagePool(runtime, self._slots, num_pages, PAGE_SIZE, max_tokens_per_request=longest)
        self._table = self._slots.table("req_to_token", (longest,), torch.int32, holds="location")
        self._keep = np.arange(rows) >= churn  # those that came first leave first
        self._values = {
            name: np.zeros(churn, column.np_dtype)
            for name, column in self._kind.columns().items()
            if isinstance(column, TensorColumn) and name not in ("slots", "seq_lens")
        }
        self.batch = self._arriving().advance("seq_lens", 1)
        while len(self.batch) < rows:
            self.batch = self.batch.merge(self._arriving()).advance("seq_lens", 1)
            self._pages.extend(self.batch.slots, self.batch.seq_lens.np)
        self.batch.upload()

    def _arriving(self) -> Decode:
        slots = self._slots.take(self._churn)
        lengths = np.full(self._churn, PROMPT)
        self._pages.extend(slots, lengths)
        return self._kind.build(self.runtime, slots=slots, seq_lens=lengths, **self._values)

    def step(self) -> Decode:
        """Some leave, others join, all advance by a token that has a place, and the device hears of all that."""
        self.runtime.next_step()
        joining = self._arriving()
        leaving = self.batch.filter(~self._keep)
        self._pages.release_requests(leaving.slots, after=self.runtime.record())
        batch = self.batch.next_batch(keep=self._keep, joining=joining, advance="seq_lens")
        extension = self._pages.advance(batch.slots, 1)
        batch.upload(writes=[extension.entry(self._table)], extras={"positions": extension.positions})
        self.batch = batch
        return batch


def against_checks(runtime: Runtime, *, num_columns: int, rows: int = 256) -> Comparison:
    """The cost of the levels in a whole step."""
    levels = (Level.OFF, Level.CHEAP, Level.FULL)
    states = {level: EngineState(runtime, num_columns=num_columns, rows=rows) for level in levels}

    def verify() -> None:
        batches = [state.step() for state in states.values()]
        for name in batches[0].columns():
            for other in batches[1:]:
                require_equal(f"host side of {name}", batches[0][name].np, other[name].np)

    return Comparison(
        task=f"whole step of an engine, {num_columns} columns, {rows} rows",
        ours=[Contender("checks off", states[Level.OFF].step, Level.OFF)],
        baselines=[Contender(f"checks {level.value}", states[level].step, level) for level in levels[1:]],
        verify=verify,
    )
