"""Steps that verify drafts, of which the device alone knows the lengths, and the fields of a relay that serve them.

A request puts in a token and two drafts and keeps one to three of them, or pauses. Besides, requests have a confidence,
which is published now and then and may be stale, and beams, which a graph publishes and the next forward reads. The
model is a number or a tuple for each.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Batch, Code, MirroredTensor, PagePool, PoolExhaustedError, SlotPool, levels
from batchstate.columns import mirrored, slot_column
from batchstate.future_map import FutureMap, GraphPublish, Prefetched, relay_field
from batchstate.mirror import Slots
from batchstate.runtime import Fence
from batchstate.step import StepPlanner
from tests.selfcheck.machine import Machine, agree, ask

SIZE, LONGEST, PAGE_SIZE, PUT_IN, BEAMS = 4, 32, 4, 3, 2
ROWS = st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE)


class SpeculatingBatch(Batch):
    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


@final
@attrs.define(eq=False)
class Speculating:
    """A request: the tokens in its KV memory and the host's bound of them, its confidence, and its unread beams."""

    length: int
    bound: int
    confidence: float = -1.0
    beams: list[int] | None = None


@final
class SpeculationMachine(Machine):
    """One engine that speculates."""

    NAME = "speculation"
    TARGETS = (
        "a request pauses",
        "requests arrive at those whose lengths are bounds",
        "two steps in flight",
        "numbers that were not put in refused",
        "no confidence yet",
        "a graph with padded rows",
    )

    @initialize()
    def begin(self) -> None:
        """No requests."""
        self.open()
        rt = self.rt
        self.slots = SlotPool(rt, SIZE)
        table = self.slots.table("req_to_token", (LONGEST,), torch.int32, holds="location")
        self.pages = PagePool(rt, self.slots, 28, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table)
        fields = {
            "token": relay_field(torch.int64, non_negative=True),
            "drafts": relay_field(torch.int64, (PUT_IN - 1,), non_negative=True),
            "lens": relay_field(torch.int64, non_negative=True),
            "kept": relay_field(torch.int64, read_by="host"),
            "confidence": relay_field(torch.float64, read_by="both", stale=-1.0),
            "beams": relay_field(torch.int64, (BEAMS,)),
        }
        self.relay = FutureMap(self.slots, fields)
        declared: dict[str, Any] = {"lengths": "lens", "accepted": "kept", "results": ("kept",)}
        self.planner = StepPlanner(
            SpeculatingBatch, pages=self.pages, relay=self.relay, ids=("token", "drafts"), **declared
        )
        self.batch = SpeculatingBatch.empty(rt)
        self.running: list[Speculating] = []
        self.in_flight: deque[tuple[list[int], Prefetched]] = deque()
        self.done: Fence | None = None
        self.ended: deque[tuple[Fence, Fence]] = deque()
        self.drawn = 0
        with rt.use(self.side):
            self.graph_slots, self.graph_ids = (rt.device_zeros((SIZE + 1,), torch.int64) for _ in range(2))
            self.published = self._graph()

    def _graph(self) -> GraphPublish:
        """Stands for a captured graph: beams of each row are its id and the next ones."""
        beams = self.rt.launch(_beams, self.graph_ids, reads=(self.graph_ids,))
        return self.relay.publish_in_graph(self.graph_slots, beams=beams)

    # Steps

    @rule(
        gone=st.sets(st.integers(0, SIZE - 1), max_size=1),
        arriving=st.lists(st.integers(1, 6), max_size=2),
        pauses=st.sets(st.integers(0, SIZE - 1), max_size=1),
        accepts=st.lists(st.integers(1, PUT_IN), min_size=1, max_size=SIZE),
        padded=st.booleans(),
        wrong=st.sampled_from([None, None, -1, PUT_IN + 1]),
    )
    def step(
        self,
        gone: set[int],
        arriving: list[int],
        pauses: set[int],
        accepts: list[int],
        padded: bool,
        wrong: int | None,
    ) -> None:
        """Some leave, others arrive with their KV, and each verifies its drafts or pauses."""
        gone = gone | {row for row, req in enumerate(self.running) if req.bound + PUT_IN > LONGEST}
        stays = [row not in gone for row in range(len(self.running))]
        requests = [req for req, stay in zip(self.running, stays, strict=True) if stay]
        bounded = any(req.bound != req.length for req in requests)
        lens = arriving[: self.slots.stats.free]
        options: dict[str, Any] = {}
        if not all(stays):
            options |= {"keep": np.array(stays), "after": self.done}
        if lens:
            requests += [Speculating(n, n) for n in lens]
            first = {"token": [1] * len(lens), "drafts": [[2, 3]] * len(lens), "lens": lens}
            options |= {"joining": {"seq_lens": np.array(lens)}, "published": first}
        n = len(requests)
        if not n:
            return
        runs = np.array([row not in pauses for row in range(n)])
        if padded:
            options |= {"pad_rows": n + 1, "pad_tokens": PUT_IN * n + 2}
        if len(self.in_flight) == 2:
            self.read()
        self._begin_step()
        try:
            step = self.planner.plan(self.batch, np.where(runs, PUT_IN, 0), samples=runs, **options)
        except PoolExhaustedError:
            while self.in_flight:
                self.read()
            return
        self.reached("a request pauses", not runs.all())
        self.reached("requests arrive at those whose lengths are bounds", bool(lens) and bounded)
        counts = [accepts[row % len(accepts)] for row in range(n) if runs[row]]
        for req, keeps in zip([req for req, run in zip(requests, runs, strict=True) if run], counts, strict=True):
            req.length, req.bound = req.length + keeps, req.bound + PUT_IN
        with self.rt.use(self.side):
            self._forward(step, counts, wrong)
            true = self.on_device(np.array([req.length for req in requests]))
            bounds = [req.bound for req in requests]
            column = MirroredTensor.from_pair(self.rt, bounds, true, contract="upper_bound", name="seq_lens")
            self.done = self.rt.record()
        self.batch = step.batch.replace(seq_lens=column)  # type: ignore[assignment]
        self.running = requests
        if counts:
            self.in_flight.append((counts, step.results))
        self.reached("two steps in flight", len(self.in_flight) == 2)

    def _begin_step(self) -> None:
        """What came before the step before has ended."""
        self.ended.append((self.rt.record(), self.rt.record(self.side)))
        if len(self.ended) > 1:
            for fence in self.ended.popleft():
                fence.wait()
        self.rt.next_step()

    def _forward(self, step: Any, counts: list[int], wrong: int | None) -> None:
        """Takes the inputs and publishes; at `full` numbers that were not put in are refused there and then."""
        step.inputs()
        self.pages.req_to_token.read_until(self.rt.record())  # type: ignore[union-attr]
        if not counts:
            return
        if wrong is not None and levels.full:
            refused = self.on_device(np.array([*counts[1:], wrong]))
            self.refused(Code.LENGTH_ORDER, lambda: step.accept(refused))
            self.reached("numbers that were not put in refused")
        step.accept(self._accepted(counts))
        token = self.on_device(np.arange(len(counts)) + 1)
        step.publish(token=token, drafts=self.rt.launch(_beams, token, reads=(token,)))

    def _accepted(self, counts: list[int]) -> torch.Tensor:
        """As the forward counts them."""
        return self.on_device(np.array(counts))

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self) -> None:
        """The host reads a step late."""
        counts, results = self.in_flight.popleft()
        agree(counts, results["kept"].np.tolist(), "tokens accepted")

    # Fields

    def _some(self, rows: set[int]) -> tuple[list[Speculating], Slots]:
        chosen = sorted(row for row in rows if row < len(self.running))
        return [self.running[row] for row in chosen], self.batch.slots.filter(chosen)

    @precondition(lambda self: self.running)
    @rule(rows=ROWS)
    def tell(self, rows: set[int]) -> None:
        """A forward publishes what it is confident of, whether anybody has read the last value or not."""
        requests, slots = self._some(rows)
        if not requests:
            return
        self.drawn += 1
        for req in requests:
            req.confidence = float(self.drawn)
        with self.rt.use(self.side):
            values = self.on_device(np.full(len(requests), float(self.drawn)))
            self.relay.publish(slots, confidence=values)

    @precondition(lambda self: self.running)
    @rule(rows=ROWS, side=st.booleans())
    def look(self, rows: set[int], side: bool) -> None:
        """Both readers look, on either stream, as often as they like."""
        requests, slots = self._some(rows)
        if not requests:
            return
        values = [req.confidence for req in requests]
        self.reached("no confidence yet", -1.0 in values)
        with self.on(side):
            gathered = self.relay.gather(slots, "confidence")
            agree(values, self.rt.inspect(gathered).tolist(), "confidence on the device")
        agree(values, self.relay.resolve(slots, "confidence").np.tolist(), "confidence on the host")

    @precondition(lambda self: self.running)
    @rule(rows=ROWS, side=st.booleans())
    def replay(self, rows: set[int], side: bool) -> None:
        """A graph publishes the beams of some requests, padded to its rows; those from before are read first."""
        requests, slots = self._some(rows)
        if not requests:
            return
        unread = [row for row, req in enumerate(requests) if req.beams is not None]
        with self.on(side):
            gathered = self.relay.gather(slots.filter(unread), "beams") if unread else None
        self.drawn += 1
        ids = [self.drawn + row for row in range(len(requests))]
        padding = [0] * (SIZE + 1 - len(ids))
        with self.rt.use(self.side):
            for target, numbers in ((self.graph_slots, self._filled(slots)), (self.graph_ids, ids)):
                source = self.on_device(np.array([*numbers, *padding]))
                self.rt.launch(_copy, target, source, reads=(source,), writes=(target,))
            self.published.replay(slots, self._graph)
        self.reached("a graph with padded rows", bool(padding))
        if gathered is not None:  # the host waits for it only now
            with self.on(side):
                beams = self.rt.inspect(gathered).tolist()
            agree([requests[row].beams for row in unread], beams, "beams")
        for req, first in zip(requests, ids, strict=True):
            req.beams = [first, first + 1]

    def _filled(self, slots: Slots) -> Sequence[int]:
        """As the engine fills the slots of its graph."""
        numbers: list[int] = slots.tolist()
        return numbers

    def check(self) -> None:
        for part in (self.slots.verify, self.pages.verify, self.relay.check):
            ask(part)
        agree([req.bound for req in self.running], self.batch.seq_lens.np.tolist(), "bounds")
        agree([req.bound for req in self.running], self.pages.committed(self.batch.slots).tolist(), "committed tokens")


def _beams(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids, ids + 1], dim=1)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
