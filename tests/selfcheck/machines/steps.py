"""Steps of an engine by `StepPlanner`, overlapped over two streams, against what each request must be given.

Requests join with a prompt or prefilled, decode, change places, get other columns, and leave while their step runs. The
model is a list of tokens per request: the token after `t` is `t` + 1 + what the request adds. A forward reads all that
it is given, so that a wrong place, a stale column or a missing wait ends in wrong tokens.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import Batch, Code, ForwardInputs, PagePool, PoolExhaustedError, SlotPool, TokenArray, levels
from batchstate.columns import HostColumn, host_list, mirrored, slot_column
from batchstate.future_map import FutureMap, Prefetched, relay_field
from batchstate.runtime import Fence
from batchstate.step import PlannedStep, StepPlanner
from tests.selfcheck.machine import Machine, agree, ask
from tests.selfcheck.machines.failures import PlantedError, failing
from tests.selfcheck.machines.mirrored_tensor import Operations, check_reported, write_uncounted
from tests.selfcheck.models import snapshot_pages, snapshot_slots

LONGEST, PAGE_SIZE = 20, 4
SIZE, NUM_PAGES = 6, 18


@final
@attrs.define(eq=False)
class StepRequest:
    """A request and its tokens, the prompt first."""

    adds: int  # in a column, and part of each of its tokens
    tokens: list[int]
    prompt: int
    encoder: int  # tokens that its pages have before the first


class StepBatch(Batch):
    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    adds = mirrored(torch.int64)
    encoder = mirrored(torch.int64)
    narrow = mirrored(torch.int32)
    small = mirrored(torch.bool)
    requests: HostColumn[StepRequest] = host_list()


OPERATIONS: Operations = (("inputs", lambda it: it.step.inputs()), ("plan", lambda it: it.planner.plan(it.step.sent)))
"""Operations on a batch that was written from outside, by the name that they have in reports."""


@final
@attrs.frozen
class Written:
    """A step that was planned and not entered, and a column of its batch was written from outside."""

    planner: StepPlanner
    step: PlannedStep


@final
@attrs.frozen(eq=False)
class Launched:
    requests: Sequence[StepRequest]
    expected: list[int]
    results: Prefetched
    done: Fence


@final
class StepMachine(Machine):
    """One engine whose steps all come from a planner."""

    NAME = "steps"
    TARGETS = (
        "a decode step",
        "a page begins",
        "a mixed step",
        "requests leave and arrive with a decode step",
        "pages run out for those that arrive",
        "two steps in flight",
        "pages run out",
        "a stale batch refused",
        "a stale step refused",
        "a copy fails where requests join",
        "write from outside found",
    )

    @initialize(encoders=st.sampled_from([False, False, True]))
    def begin(self, encoders: bool) -> None:
        """No requests; with `encoders` some will have tokens of one in their pages."""
        self.open()
        self.encoders = encoders
        rt = self.rt
        self.slots = SlotPool(rt, SIZE)
        table = self.slots.table("req_to_token", (LONGEST,), torch.int32, holds="location")
        self.pages = PagePool(rt, self.slots, NUM_PAGES, PAGE_SIZE, max_tokens_per_request=LONGEST, req_to_token=table)
        self.relay = FutureMap(self.slots, {"token": relay_field(torch.int64, read_by="both", non_negative=True)})
        self.planner = StepPlanner(
            StepBatch,
            pages=self.pages,
            relay=self.relay,
            ids="token",
            results=("token",),
            kv_offset="encoder" if encoders else None,
        )
        with rt.use(self.side):
            self.kv = rt.device_zeros((self.pages.location_capacity,), torch.int64, name="kv")
        self.batch = StepBatch.empty(rt)
        self.in_flight: deque[Launched] = deque()
        self._drawn = 0

    def _behind(self) -> Fence:
        """A fence behind all forwards."""
        with self.rt.use(self.side):
            return self.rt.record()

    # Requests come and go

    @rule(prompts=st.lists(st.integers(1, 7), min_size=1, max_size=3))
    def join(self, prompts: list[int]) -> None:
        free = self.slots.stats.free
        prompts = prompts[:free]
        if not prompts:
            return
        requests = [self._request(n, n, encoder=self.encoders) for n in prompts]
        columns = self._columns(requests, [0] * len(requests))
        joining = StepBatch.build(self.rt, slots=self.slots.take(len(requests)), **columns)
        self.batch = self.batch.merge(joining)

    @precondition(lambda self: len(self.batch) > 0)
    @rule(rows=st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=2))
    def leave(self, rows: set[int]) -> None:
        keep = np.array([row not in rows for row in range(len(self.batch))], dtype=np.bool_)
        after = self.in_flight[-1].done if self.in_flight else None
        leaving, before = self.batch.filter(~keep), self.batch
        self.pages.release_requests(leaving.slots, after=after)
        if len(leaving) and keep.any() and self._ready(before):
            for part in (self.slots, self.pages):  # a plan that is refused has asked the fences
                part.reap()
            self.refused(Code.SLOT_STALE_HANDLE, lambda: self.planner.plan(before))
            self.reached("a stale batch refused")
            # as if only those stayed that have left
            self.refused(Code.SLOT_STALE_HANDLE, lambda: self.planner.plan(before, keep=~keep, after=after))
        self.batch = self.batch.filter(keep)

    @precondition(lambda self: not self.in_flight)
    @rule()
    def end(self) -> None:
        self.pages.release_requests(self.batch.slots, after=None)
        self.batch = StepBatch.empty(self.rt)
        self.slots.expect_idle()
        self.pages.expect_idle()

    @precondition(lambda self: self._ready(self.batch) and self._fits())
    @rule(arriving=st.lists(st.integers(1, 6), min_size=1, max_size=2))
    def fail_to_join(self, arriving: list[int]) -> None:
        """The copy of a step fails, and those that were to join with it have nothing."""
        arrived, joining = self._arrived(arriving, columns=True)
        first = {"token": [req.tokens[-1] for req in arrived]}
        with contextlib.suppress(PoolExhaustedError, PlantedError), failing(self.rt, "_copied_to_device", 1):
            self.planner.plan(self.batch, joining=joining, published=first)
        self.rt.record().wait()  # no forward comes behind its copy
        self.reached("a copy fails where requests join")

    @precondition(lambda self: len(self.batch) > 1)
    @rule(seed=st.integers(0, 20))
    def change_places(self, seed: int) -> None:
        self.batch = self.batch.filter(np.random.default_rng(seed).permutation(len(self.batch)))

    @precondition(lambda self: len(self.batch) > 0)
    @rule(adds=st.integers(0, 6))
    def replace(self, adds: int) -> None:
        values = [(req.adds + adds) % 7 for req in self.batch.requests]
        for req, value in zip(self.batch.requests, values, strict=True):
            req.adds = value
        self.batch = self.batch.replace(adds=values)

    # Steps

    @precondition(lambda self: self._fits())
    @rule(
        padded=st.booleans(),
        gone=st.sets(st.integers(0, SIZE - 1), max_size=2),
        arriving=st.lists(st.integers(1, 6), max_size=2),
        typed=st.booleans(),
        columns=st.booleans(),
    )
    def step(self, padded: bool, gone: set[int], arriving: list[int], typed: bool, columns: bool) -> None:
        """Some leave and others arrive; each request puts in its prompt, or the token that it got last."""
        stays = [row not in gone for row in range(len(self.batch))]
        running = [pair for pair, stay in zip(self._with_lengths(), stays, strict=True) if stay]
        if not running:
            return
        arrived, joining = self._arrived(arriving, columns)
        requests = [req for req, _ in running] + arrived
        prompts: list[Any] = [req.tokens if not length else None for req, length in running] + [None] * len(arrived)
        queries = np.array([1 if ids is None else len(ids) for ids in prompts])
        if len(self.in_flight) == 2:
            self.read()
        self.rt.next_step()
        rows = len(requests) + 1 if padded else None
        options: dict[str, Any] = {"pad_rows": rows, "pad_tokens": queries.sum() + 1} if padded else {}
        typed = typed and any(ids is not None for ids in prompts)
        if typed:
            options["token_arrays"] = {"kinds": TokenArray(prompts, torch.int32, fill=9)}
        if not all(stays):
            after = self.in_flight[-1].done if self.in_flight else None
            options |= {"keep": np.array(stays), "after": after}
        if arrived:
            options |= {"joining": joining, "published": {"token": [req.tokens[-1] for req in arrived]}}
        try:
            step = self.planner.plan(self.batch, queries, prompt_ids=prompts, **options)
        except PoolExhaustedError:
            self.reached("pages run out")
            self.reached("pages run out for those that arrive", columns and bool(arrived))
            if isinstance(joining, StepBatch):
                self.pages.release_requests(joining.slots, after=None)
            while self.in_flight:  # a step without a launch: an engine reads what is under way, and tries again
                self.read()
            return
        decodes = all(ids is None for ids in prompts)
        self.reached("a decode step", decodes)
        self.reached("a page begins", decodes and bool((self.batch.seq_lens.np % PAGE_SIZE == 0).any()))
        mixed = None in prompts and any(ids is not None for ids in prompts)
        self.reached("a mixed step", mixed)
        self.reached("requests leave and arrive with a decode step", decodes and len(options) == 4)
        expected = [(req.tokens[-1] + 1 + req.adds) % 1000 for req in requests]
        with self.rt.use(self.side):
            inputs = step.inputs()
            if typed and levels.full:
                values = [value for ids, n in zip(prompts, queries.tolist(), strict=True) for value in ids or [9] * n]
                agree(values, self.rt.inspect(inputs.arrays["kinds"]).tolist()[: len(values)], "values of tokens")
            step.publish(token=self._forward(step, inputs))
            done = self.rt.record()
        if self.pages.req_to_token is not None:
            self.pages.req_to_token.read_until(done)
        for req, token in zip(requests, expected, strict=True):
            req.tokens.append(token)
        self.batch = step.batch  # type: ignore[assignment]
        self.in_flight.append(Launched(requests, expected, step.results, done))
        self.reached("two steps in flight", len(self.in_flight) == 2)

    @precondition(lambda self: self._fits())
    @rule(times=st.integers(2, 5))
    def decode_on(self, times: int) -> None:
        for _ in range(times):
            if self._fits():
                self.step(False, set(), [], False, False)

    def _arrived(self, lens: list[int], columns: bool) -> "tuple[list[StepRequest], StepBatch | dict[str, Any]]":
        """Requests that were prefilled elsewhere, with the first token of each: a batch of them, or their columns."""
        lens, slots = lens[: self.slots.stats.free], None
        if not columns:
            try:
                slots = self.pages.take_requests(lens)
            except PoolExhaustedError:
                slots, lens = self.pages.take_requests([]), []
        requests = [self._request(n + 1, n) for n in lens]
        values = self._columns(requests, lens)
        return requests, values if slots is None else StepBatch.build(self.rt, slots=slots, **values)

    def _request(self, length: int, prompt: int, *, encoder: bool = False) -> StepRequest:
        self._drawn += 1
        tokens = [(self._drawn * 37 + at * 11) % 1000 for at in range(length)]
        return StepRequest(self._drawn % 7, tokens, prompt, self._drawn % 4 if encoder else 0)

    def _columns(self, requests: list[StepRequest], lens: list[int]) -> dict[str, Any]:
        adds = np.array([req.adds for req in requests], dtype=np.int64)
        return {
            "seq_lens": np.array(lens, dtype=np.int64),
            "adds": adds,
            "encoder": np.array([req.encoder for req in requests], dtype=np.int64),
            "narrow": adds,
            "small": adds % 2 == 0,
            "requests": requests,
        }

    def _forward(self, step: PlannedStep, inputs: ForwardInputs) -> torch.Tensor:
        """The next token of each request, and the ids of its tokens into KV memory, read back from where they lie."""
        rt, n = self.rt, len(step.batch)
        mapping = inputs.slot_mapping
        if mapping is None:
            raise RuntimeError("a plan with pages has a slot mapping")
        rt.launch(_put, self.kv, mapping, inputs.input_ids, reads=(mapping, inputs.input_ids), writes=(self.kv,))
        last = inputs.last_token_indices[:n]
        adds = step.sent["adds"].device[:n]
        return rt.launch(_next, self.kv, mapping, last, adds, reads=(self.kv, mapping, last, adds))

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self) -> None:
        launched = self.in_flight.popleft()
        agree(launched.expected, launched.results["token"].np.tolist(), "tokens of a step")

    @precondition(lambda self: self._ready(self.batch) and self._fits())
    @rule(launched=st.booleans())
    def roll_back(self, launched: bool) -> None:
        """A step whose forward fails or never runs is refused at forward entry, and the requests of before go on."""
        try:
            step = self.planner.plan(self.batch)
        except PoolExhaustedError:
            return
        with self.rt.use(self.side):
            if launched:
                step.inputs()
        self.batch = step.rollback(after=self._behind())  # type: ignore[assignment]
        with self.rt.use(self.side):
            self.refused(Code.DERIVED_STALE, step.inputs)
        self.reached("a stale step refused")
        self.rt.record().wait()  # no forward comes behind its copy

    @precondition(lambda self: levels.full and self._ready(self.batch) and self._fits())
    @rule(
        column=st.sampled_from(("slots", "seq_lens", "adds", "narrow", "small")),
        side=st.sampled_from(("device", "host")),
    )
    def write_from_outside(self, column: str, side: str) -> None:
        """A write into either side of a column of a planned batch is noticed before a forward reads it."""
        committed = self.pages.committed(self.batch.slots)
        for chosen in range(len(OPERATIONS)):
            try:
                step = self.planner.plan(self.batch.split([len(self.batch)])[0])  # in memory of its own
            except PoolExhaustedError:
                return
            write_uncounted(step.sent[column], side, 0)
            check_reported(OPERATIONS, chosen, Written(self.planner, step), column, 0)
            self.reached("write from outside found")
            self.pages.truncate(self.batch.slots, committed, after=self._behind())
        self.rt.record().wait()  # no forward comes behind its copy

    # The model

    def _with_lengths(self) -> list[tuple[StepRequest, int]]:
        return list(zip(self.batch.requests, self.batch.seq_lens.np.tolist(), strict=True))

    def _ready(self, batch: StepBatch) -> bool:
        return len(batch) > 0 and bool((batch.seq_lens.np > 0).all())

    def _fits(self) -> bool:
        return len(self.batch) > 0 and all(len(req.tokens) + req.encoder < LONGEST for req in self.batch.requests)

    def snapshot(self) -> object:
        return snapshot_slots(self.slots), snapshot_pages(self.pages), self.pages.committed_lengths.tolist()

    def check(self) -> None:
        for req, length in self._with_lengths():
            agree(0 if len(req.tokens) == req.prompt else len(req.tokens) - 1, length, "the length of", req)
        committed: npt.NDArray[np.int64] = self.pages.committed(self.batch.slots)
        held = [length + req.encoder if length else 0 for req, length in self._with_lengths()]
        agree(held, committed.tolist(), "committed tokens")
        for part in (self.slots, self.pages):
            ask(part.verify)
        ask(self.relay.check)
        ask(self.batch.check)


def _put(kv: torch.Tensor, locations: torch.Tensor, ids: torch.Tensor) -> None:
    kv.index_copy_(0, locations, ids)


def _next(kv: torch.Tensor, locations: torch.Tensor, last: torch.Tensor, adds: torch.Tensor) -> torch.Tensor:
    return (kv.index_select(0, locations.index_select(0, last)) + 1 + adds) % 1000
