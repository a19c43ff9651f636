"""Classes as engines write them, with twins, pages and slots kept by hand and no word of this library, under `watch`.

Nothing else looks: what its methods forget is found by the declaration alone, so its mutants show what a watch sees.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate.watch import watch, watch_copy, watch_pages, watch_slots
from tests.selfcheck.machine import Machine, agree, ask
from tests.selfcheck.strategies import keep_lists

DTYPE = torch.int64
NUM_PAGES, NUM_SLOTS, NUM_STAGED = 12, 4, 8


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
        self.names = [self.names[row] for row in keep]
        self.lengths_host = self.lengths_host[keep]
        self.lengths = self.lengths[keep]
        self.small = self.small[keep]
        self.weights = self.weights[keep]
        self.total = None
        self.marks = [self.marks[row] for row in keep]
        self.marked = [row for row, mark in enumerate(self.marks) if mark]

    def merge(self, other: "HandBatch") -> None:
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
        self.lengths_host = self.lengths_host + 1
        self.lengths = self.lengths + 1
        self.small = self.small + 1
        self.total = None
        self.has_long = bool((self.lengths_host > 5).any())


@final
class Production(HandBatch):
    """The same batch where an audit looks at it a call later."""

    def accept(self) -> None:
        self.lengths_host = self.lengths_host + 1
        self.lengths = self.lengths + 1
        self.small = self.small + 1


@final
class HandPages:
    """Pages of requests, of which a request may share the first of another."""

    def __init__(self) -> None:
        self.free = list(range(1, 1 + NUM_PAGES))
        self.references: dict[int, int] = {}
        self.held: dict[str, list[int]] = {}

    def allocate(self, name: str, number: int, prefix_of: str | None) -> None:
        shared = [] if prefix_of is None else self.held[prefix_of][:1]
        for page in shared:
            self.references[page] += 1
        fresh = [self.free.pop() for _ in range(number)]
        self.references.update(dict.fromkeys(fresh, 1))
        self.held[name] = shared + fresh

    def release(self, name: str) -> None:
        for page in self.held.pop(name):
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                self.free.append(page)


@final
class HandSlots:
    """Rows of requests in the tables; row 0 is padding."""

    def __init__(self) -> None:
        self.free = list(range(1, 1 + NUM_SLOTS))
        self.of: dict[str, int] = {}

    def take(self, name: str) -> None:
        self.of[name] = self.free.pop()

    def give_back(self, name: str) -> None:
        self.free.append(self.of.pop(name))


@final
class HandStaging:
    """A buffer on the host, of which the first rows are copied to the device for each step."""

    def __init__(self, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> None:
        self.upload = upload
        self.cpu = np.zeros(NUM_STAGED, dtype=np.int64)
        self.gpu = upload(self.cpu)

    def copy_to_gpu(self, num_rows: int) -> None:
        self.gpu = self.upload(self.cpu[:num_rows])


@final
class WatchedMachine(Machine):
    """One running batch of a watched class, another one that is audited, and what has their pages and slots."""

    NAME = "watched"
    TARGETS = ("another order", "a long request", "a sample compared", "a shared page")

    @initialize()
    def begin(self) -> None:
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
        pairs = [("lengths_host", "lengths"), ("lengths_host", "small")]
        changes = ["filter", "merge", "step"]
        self.audited = watch(
            Production, after=[*changes, "accept"], num_rows=len, pairs=pairs, rows=["weights"], lag=1, runtime=self.rt
        )
        pools = [
            watch_pages(
                HandPages,
                after=["allocate", "release"],
                holders=lambda pool: pool.held.values(),
                free="free",
                references=lambda pool: pool.references,
                num_pages=NUM_PAGES,
            ),
            watch_slots(
                HandSlots, after=["take", "give_back"], live=lambda pool: pool.of.values(), free="free", size=NUM_SLOTS
            ),
            watch_copy(HandStaging, "copy_to_gpu", host="cpu", device="gpu"),
        ]
        for window in (self.audited, *pools):
            self._windows.enter_context(window)
        self.pages, self.slots, self.staging = HandPages(), HandSlots(), HandStaging(self.on_device)
        self.drawn = 0
        self.batch = self._new([])
        self.production = self._new([1, 2], Production)

    def _new(self, lengths: list[int], kind: type[HandBatch] = HandBatch) -> Any:
        names = [f"request {self.drawn + number}" for number in range(len(lengths))]
        self.drawn += len(lengths)
        return kind(names, lengths, self.on_device(np.array(lengths, dtype=np.int64)))

    @rule(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3))
    def join(self, lengths: list[int]) -> None:
        self.batch.merge(self._new(lengths))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        n = len(self.batch)
        keep = np.asarray(data.draw(keep_lists(n)))
        rows = np.flatnonzero(keep) if keep.dtype == bool else keep.astype(np.int64)
        self.reached("another order", sorted(rows.tolist()) != rows.tolist())
        self.batch.filter(rows.tolist())

    @rule()
    def decode(self) -> None:
        self.batch.step()
        self.reached("a long request", self.batch.has_long)

    @rule(length=st.integers(1, 7), accept=st.booleans(), leaves=st.booleans())
    def produce(self, length: int, accept: bool, leaves: bool) -> None:
        """A step of the batch that is audited, in which a request joins and one may leave."""
        production = self.production
        production.merge(self._new([length], Production))
        self._arrive()
        if accept:
            production.accept()
        else:
            production.step()
        self._arrive()
        if leaves or len(production) > 3:
            production.filter(list(range(1, len(production))))
            self._arrive()
        self.reached("a sample compared", self.audited.counters.compared > 0)

    def _arrive(self) -> None:
        """The sample of a call is there in the next one, also where an accelerator takes its time."""
        if self.rt.device.type != "cpu":
            self.rt.synchronize()

    @rule(number=st.integers(1, 3), shares=st.booleans(), data=st.data())
    def allocate(self, number: int, shares: bool, data: st.DataObject) -> None:
        if not self.slots.free or len(self.pages.free) < number:
            return
        held = sorted(self.pages.held)
        prefix_of = data.draw(st.sampled_from(held), label="prefix of") if shares and held else None
        name = f"request {self.drawn}"
        self.drawn += 1
        self.slots.take(name)
        self.pages.allocate(name, number, prefix_of)
        self.reached("a shared page", prefix_of is not None)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.pages.held:
            return
        name = data.draw(st.sampled_from(sorted(self.pages.held)), label="name")
        self.pages.release(name)
        self.slots.give_back(name)

    @rule(num_rows=st.integers(1, NUM_STAGED), first=st.integers(1, 9))
    def stage(self, num_rows: int, first: int) -> None:
        self.staging.cpu[:num_rows] = np.arange(first, first + num_rows)
        self.staging.copy_to_gpu(num_rows)

    def check(self) -> None:
        agree(self.watched.counters.calls, self.watched.counters.checked, "calls that were checked")
        ask(self.watched.check, self.batch)
