"""An engine's state whose steps come from a planner, or from the parts alone: what tests of steps have in common.

`StepByParts` is a planner that is composed of public calls. What `StepPlanner` makes in one loop is compared with it.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import attrs
import numpy as np
import torch

from batchstate import Batch, ForwardPlan, FutureMap, PagePool, Runtime, StepPlanner, mirrored, relay_field, slot_column
from batchstate.batch import Extras
from batchstate.forward.inputs import ForwardInputs
from batchstate.mirror import Slots
from batchstate.step import PlannedStep
from tests.selfcheck.machines.failures import failing
from tests.worlds import LONGEST, Pools


class Running(Batch):
    """Columns of each width, packed and not."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    temperature = mirrored(torch.float32)
    seed = mirrored(torch.int32)
    greedy = mirrored(torch.bool)
    pair = mirrored(torch.int16, shape=(2,))


class RunningToo(Running):
    """Another declaration."""

    more = mirrored(torch.int64)


def columns(rows: Any, lens: list[int]) -> dict[str, Any]:
    """The columns of requests that have the slots `rows`, or will have them."""
    n = len(lens)
    return {
        "seq_lens": np.array(lens, dtype=np.int64),
        "temperature": rows / np.float32(7),
        "seed": rows.tolist(),
        "greedy": rows % 2 == 0,
        "pair": np.arange(2 * n, dtype=np.int16).reshape(n, 2),
    }


@final
@attrs.define(eq=False)
class StepOfParts:
    """A step that was composed of the parts: what `PlannedStep` is to `StepPlanner`."""

    by: "StepByParts"
    batch: Batch
    sent: Batch
    plan: ForwardPlan
    extras: Extras
    results: Any = None
    sampled: Slots | None = None

    def inputs(self) -> ForwardInputs:
        """The inputs of the forward."""
        by = self.by
        if by.relay is None:
            inputs = ForwardInputs.of(self.plan, self.extras)
        else:
            inputs = by.relay.resolve_forward_inputs(
                self.plan,
                self.extras,
                ids=by.ids if by.has_ids else (),
                lengths=by.lengths,
                req_to_token=by.pages.req_to_token,
            )
        self.sampled = inputs.sampled_slots
        return inputs

    def publish(self, **values: object) -> None:
        """Makes the values known to the next step, and sends the results to the host."""
        slots = self.plan.sampled_slots if self.sampled is None else self.sampled
        relay = cast(FutureMap, self.by.relay)
        relay.publish(slots, **values)
        self.results = relay.prefetch(slots, *self.by.results) if self.by.results else None


@final
@attrs.define(eq=False)
class StepByParts:
    """Plans steps by one public call after the other: the reference for `StepPlanner`, and with its declaration.

    A plan that is refused may have changed what came before.
    """

    kind: type[Batch]
    pages: PagePool = attrs.field(kw_only=True)
    relay: FutureMap | None = attrs.field(default=None, kw_only=True)
    seq_lens: str = attrs.field(default="seq_lens", kw_only=True)
    ids: str | Sequence[str] = attrs.field(default=(), kw_only=True)
    lengths: str | None = attrs.field(default=None, kw_only=True)
    results: Sequence[str] = attrs.field(default=(), kw_only=True)
    has_ids: bool = attrs.field(default=True, kw_only=True)
    int32: Sequence[str] = attrs.field(default=(), kw_only=True)
    kv_offset: str | None = attrs.field(default=None, kw_only=True)
    window: int | None = attrs.field(default=None, kw_only=True)
    layouts: str | Sequence[str] = attrs.field(default=(), kw_only=True)

    def plan(
        self,
        batch: Batch,
        query_lens: Any = 1,
        *,
        keep: Any = None,
        joining: Batch | Mapping[str, Any] | None = None,
        after: Any = None,
        published: Mapping[str, object] | None = None,
        pad_rows: int | None = None,
        writes: Sequence[Any] = (),
        extras: Mapping[str, object] | None = None,
        **options: Any,
    ) -> StepOfParts:
        """A step; the arguments are those of `StepPlanner.plan`."""
        pages, leaving = self.pages, None
        pages.slots.query_fences()  # as a step does, whether it takes slots or not
        if keep is not None:
            stays = np.zeros(batch.num_reqs, dtype=np.bool_)
            stays[keep] = True
            leaving, batch = batch.filter(~stays), batch.filter(keep)
        if joining is not None:
            joined = self._joined(joining, batch, query_lens)
            batch = batch.merge(joined)
            if published is not None and self.relay is not None:
                self.relay.publish(self._slots(joined), **published)
            if pages.req_to_token is not None:
                slots = self._slots(joined)
                new = joined.filter(~pages.req_to_token.written(slots) & (pages.committed(slots) > 0))
                writes = (pages.entry(self._slots(new)), *writes) if new.num_reqs else writes
        advanced = batch.advance(self.seq_lens, query_lens)
        extension = pages.extend(self._slots(advanced), self._totals(advanced))
        sent = advanced if pad_rows is None else advanced.pad(pad_rows)
        plan = ForwardPlan.of(
            self._slots(sent),
            sent[self.seq_lens],
            query_lens,
            pages=pages,
            kv_offset=None if self.kv_offset is None else sent[self.kv_offset],
            has_ids=self.has_ids,
            deferred=False,
            int32=tuple(self.int32),
            window=self.window,
            layouts=self.layouts,
            **options,
        )
        writes = writes if pages.req_to_token is None else (extension.entry(), *writes)
        uploaded = sent.upload(writes=writes, extras=plan.extras | dict(extras or {}))
        if leaving is not None and leaving.num_reqs:
            pages.release_requests(self._slots(leaving), after=after)
        return StepOfParts(self, advanced, sent, plan, uploaded)

    def _joined(self, joining: Batch | Mapping[str, Any], batch: Batch, query_lens: Any) -> Batch:
        """Those that join. The step takes slots and pages row by row, and so does this, for those without slots."""
        if isinstance(joining, Batch):
            return joining
        name, pages = str(self.kind._slot_column), self.pages
        if name in joining:
            return self.kind.build(pages.runtime, **joining)
        slots = pages.slots.take(len(joining[self.seq_lens]))
        joined = self.kind.build(pages.runtime, slots=slots, **joining)
        running = batch.merge(joined)
        pages.grow(self._slots(running), self._totals(running.advance(self.seq_lens, query_lens)))
        pages.commit(slots, self._totals(joined))
        return joined

    def _totals(self, batch: Batch) -> Any:
        totals = batch[self.seq_lens].np
        return totals if self.kv_offset is None else np.where(totals > 0, totals + batch[self.kv_offset].np, 0)

    def _slots(self, batch: Batch) -> Slots:
        return cast(Slots, batch[str(self.kind._slot_column)])


Step = PlannedStep | StepOfParts


@attrs.define(eq=False)
class World(Pools):
    """An engine's state. Its steps come from a planner, or with `by_parts` from the parts alone."""

    relay: FutureMap = attrs.field(init=False)
    planner: StepPlanner | StepByParts = attrs.field(init=False)
    batch: Any = attrs.field(init=False)
    prompts: dict[tuple[int, int], list[int]] = attrs.field(factory=dict)  # of handles: what was not put in yet
    fails: tuple[object, str, int] | None = None  # a method of a part that fails in the plan of the next steps, when

    @classmethod
    def planned(
        cls,
        rt: Runtime,
        size: int = 8,
        *,
        pages: int = 64,
        longest: int = LONGEST,
        by_parts: bool = False,
        must_read: bool = True,
        **options: Any,
    ) -> "World":
        """No requests yet; `options` are of the planner."""
        world = cls.of(rt, size, pages=pages, longest=longest)
        last = relay_field(torch.int64, read_by="both", must_read=must_read)
        fields = {"last": last, "logit": relay_field(torch.float32, read_by="host")}
        world.relay = FutureMap(world.slots, fields)
        options = {"ids": "last", "results": ("last",), **options}
        planner: Any = StepByParts if by_parts else StepPlanner
        world.batch, world.planner = (
            Running.empty(rt),
            planner(Running, pages=world.pages, relay=world.relay, **options),
        )
        return world

    def join(self, lens: list[int]) -> None:
        """Requests whose prompt is there, and the first token after it, 10 * slot."""
        slots = self.slots.take(len(lens))
        extension = self.pages.extend(slots, lens)
        self.pages.commit(slots, lens)
        self.relay.publish(slots, last=10 * slots.np)
        joining = self.built(slots, lens)
        joining.upload(writes=[extension.entry()])
        self.batch = self.batch.merge(joining) if len(self.batch) else joining

    def prompted(self, lens: list[int]) -> Any:
        """Requests whose prompts of so many tokens run in the next steps, three tokens in each."""
        slots = self.slots.take(len(lens))
        self.note_prompts(slots.np, slots.generations, lens)
        return self.built(slots, [0] * len(lens))

    def note_prompts(self, rows: Any, generations: Any, lens: list[int]) -> None:
        """The prompts of requests with these handles."""
        for slot, generation, n in zip(rows.tolist(), generations.tolist(), lens, strict=True):
            self.prompts[slot, generation] = [100 * slot + i for i in range(n)]

    def arrived(self, lens: list[int]) -> Any:
        """Requests that were prefilled elsewhere."""
        return self.built(self.pages.take_requests(lens), lens)

    def built(self, slots: Slots, lens: list[int]) -> Any:
        """A batch of these requests."""
        return Running.build(self.rt, slots=slots, **columns(slots.np, lens))

    def turn_over(
        self, gone: list[int], lens: list[int], prompted: bool = False, as_columns: bool = False
    ) -> tuple[Step, dict[str, Any]]:
        """A step before which requests leave and others come."""
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[gone] = False
        joining: Any
        if as_columns:
            rows, generations = self.next_handles(len(lens))
            joining = columns(rows, [0] * len(lens) if prompted else lens)
            if prompted:
                self.note_prompts(rows, generations, lens)
        else:
            joining = self.prompted(lens) if prompted else self.arrived(lens)
            rows = joining.slots.np
        published = None if prompted else {"last": 10 * rows}
        return self.step(keep=keep, after=self.rt.record() if gone else None, joining=joining, published=published)

    def next_handles(self, n: int) -> tuple[Any, Any]:
        """Numbers and generations of the slots that the next requests get."""
        _ = self.slots.stats  # which asks what is free by now
        return self.slots._allocator.next_handles(n, "take")

    def tokens(self, keep: Any = None, joining: Any = None) -> dict[str, Any]:
        """The tokens that each of the running requests puts in, as arguments of `plan`."""
        running = (self.batch if keep is None else self.batch.filter(keep)).slots
        parts: list[Any] = [(running.np, running.generations)]
        if isinstance(joining, dict):
            parts.append(self.next_handles(len(joining["seq_lens"])))
        elif joining is not None:
            parts.append((joining.slots.np, joining.slots.generations))
        handles = [handle for slots, held in parts for handle in zip(slots.tolist(), held.tolist(), strict=True)]
        chunks = [self.prompts.get(handle) for handle in handles]
        if not any(chunks):
            return {}
        for handle in handles:
            self.prompts[handle] = (self.prompts.get(handle) or [])[3:]
        return {
            "query_lens": np.array([len(chunk[:3]) if chunk else 1 for chunk in chunks]),
            "prompt_ids": [chunk[:3] if chunk else None for chunk in chunks],
            "samples": np.array([not chunk or len(chunk) <= 3 for chunk in chunks]),
        }

    def leave(self, rows: list[int]) -> None:
        """Some requests leave, with all that they have."""
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[rows] = False
        self.pages.release_requests(self.batch.filter(~keep).slots, after=self.rt.record())
        self.batch = self.batch.filter(keep)

    def run(self, step: Step) -> Any:
        """The inputs of a step, whose forward finds the ids plus one; the engine goes on with its batch."""
        inputs = step.inputs()
        if len(inputs.last_token_indices):
            step.publish(last=inputs.input_ids[inputs.last_token_indices] + 1)
        self.batch = step.batch
        return inputs

    def step(self, **options: Any) -> tuple[Step, dict[str, Any]]:
        """A step: what it gave to the forward, and what both sides of the engine's state are after it."""
        self.rt.next_step()
        tokens = self.tokens(options.get("keep"), options.get("joining"))
        with failing(*self.fails) if self.fails else contextlib.nullcontext():
            step = self.planner.plan(self.batch, **tokens, **options)
        inputs, read = self.run(step), self.rt.inspect
        names = "slots", "input_ids", "positions", "query_start_loc", "kv_lens", "last_token_indices", "slot_mapping"
        seen: dict[str, Any] = {name: read(getattr(inputs, name)).tolist() for name in names}
        seen["table"] = read(self.table.memory).tolist()
        seen["table on the host"] = np.asarray(self.table.host_memory).tolist()
        for name in Running.columns():
            column = self.batch[name]
            seen[f"{name}, host"], seen[f"{name}, device"] = column.np.tolist(), read(column.device).tolist()
        seen["relay"] = [str(state) for state in self.relay.states(self.batch.slots, "last")]
        seen["committed"] = self.pages.committed(self.batch.slots).tolist()
        names = "query_lens", "seq_lens", "relay_rows", "sample_rows", "num_tokens", "max_kv_len", "kv_starts"
        seen["plan"] = {name: np.asarray(getattr(step.plan, name)).tolist() for name in names}
        assert (inputs.max_query_len, inputs.max_kv_len) == (step.plan.max_query_len, step.plan.max_kv_len)
        assert inputs.query_lens.tolist() == seen["plan"]["query_lens"]
        return step, seen

    def state(self) -> object:
        """All that a plan which fails leaves as it was."""
        slots, pages = self.slots.stats, self.pages.stats
        states, lens = self.relay.states(self.batch.slots, "last"), self.batch.seq_lens.np.tolist()
        return slots.free, slots.pending, slots.live, pages, self.pages.committed_lengths.tolist(), states, lens

    def check_table(self) -> None:
        """Each row of the token table says where the tokens of its request lie, and the pools are whole."""
        memory, lens = self.rt.inspect(self.table.memory), self.batch.seq_lens.np
        for row, n in zip(self.batch.slots.np.tolist(), lens.tolist(), strict=True):
            assert memory[row, :n].tolist() == self.locations(row, range(n))
        self.slots.verify()
        self.pages.verify()
