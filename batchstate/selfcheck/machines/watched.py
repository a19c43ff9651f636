"""A batch class as engines write it, with twins kept by hand and no word of this library, under `watch`.

Nothing else looks: what its methods forget is found by the declaration alone, so its mutants show what a watch sees.
"""

from typing import final

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate.testing.machine import Machine, agree, ask
from batchstate.testing.strategies import keep_lists
from batchstate.watch import watch

DTYPE = torch.int64


@final
class HandBatch:
    """Three columns, two of them with twins, the requests, a sum, a flag, and the rows of marked requests."""

    def __init__(self, names: list[str], lengths: list[int], device: torch.Tensor) -> None:
        self.names = names
        self.lengths_host = torch.tensor(lengths, dtype=DTYPE)
        self.lengths = device
        self.small = device.to(torch.int32)
        self.weights = device * 3
        self.total: int | None = sum(lengths)
        self.has_long = any(length > 5 for length in lengths)
        self.marks = [length % 2 == 1 for length in lengths]
        self.marked = [row for row, mark in enumerate(self.marks) if mark]

    def __len__(self) -> int:
        return len(self.names)

    def filter(self, keep: list[int]) -> None:
        """Requests leave."""
        self.names = [self.names[row] for row in keep]
        self.lengths_host = self.lengths_host[keep]
        self.lengths = self.lengths[keep]
        self.small = self.small[keep]
        self.weights = self.weights[keep]
        self.total = None
        self.marks = [self.marks[row] for row in keep]
        self.marked = [row for row, mark in enumerate(self.marks) if mark]

    def merge(self, other: "HandBatch") -> None:
        """Requests join."""
        self.marked = self.marked + [row + len(self) for row in other.marked]
        self.names = self.names + other.names
        self.lengths_host = torch.cat([self.lengths_host, other.lengths_host])
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.small = torch.cat([self.small, other.small])
        self.weights = torch.cat([self.weights, other.weights])
        self.total = None
        self.has_long = self.has_long or other.has_long
        self.marks = self.marks + other.marks

    def step(self) -> None:
        """Each request gets a token."""
        self.lengths_host = self.lengths_host + 1
        self.lengths = self.lengths + 1
        self.small = self.small + 1
        self.total = None
        self.has_long = bool((self.lengths_host > 5).any())


@final
class WatchedMachine(Machine):
    """One running batch of a watched class."""

    NAME = "watched"
    TARGETS = ("requests left", "another order", "requests joined", "a long request")

    @initialize()
    def begin(self) -> None:
        """An empty batch."""
        self.open()
        self.watched = self._windows.enter_context(
            watch(
                HandBatch,
                after=["filter", "merge", "step"],
                num_rows=len,
                pairs=[("lengths_host", "lengths"), ("lengths_host", "small")],
                rows=["weights", "marks"],
                key="names",
                moves=["filter", "merge"],
                adds={"step": {"lengths": 1, "weights": 0}},
                derived={"total": lambda batch: int(batch.lengths_host.sum())},
                implied={"has_long": lambda batch: bool((batch.lengths_host > 5).any())},
                indices={"marked": "marks"},
            )
        )
        self.drawn = 0
        self.batch = self._new([])

    def _new(self, lengths: list[int]) -> HandBatch:
        names = [f"request {self.drawn + number}" for number in range(len(lengths))]
        self.drawn += len(lengths)
        return HandBatch(names, lengths, self.on_device(np.array(lengths, dtype=np.int64)))

    @rule(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3))
    def join(self, lengths: list[int]) -> None:
        """Requests arrive in a batch of their own."""
        self.batch.merge(self._new(lengths))
        self.reached("requests joined", len(self.batch) > len(lengths))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Requests leave, and others may change places."""
        n = len(self.batch)
        keep = np.asarray(data.draw(keep_lists(n)))
        rows = np.flatnonzero(keep) if keep.dtype == bool else keep.astype(np.int64)
        self.reached("requests left", len(rows) < n)
        self.reached("another order", sorted(rows.tolist()) != rows.tolist())
        self.batch.filter(rows.tolist())

    @rule()
    def decode(self) -> None:
        """A step."""
        self.batch.step()
        self.reached("a long request", self.batch.has_long)

    def check(self) -> None:
        """No call went by unseen, and nothing is wrong between calls either."""
        agree(self.watched.counters.calls, self.watched.counters.checked, "calls that were checked")
        ask(self.watched.check, self.batch)
