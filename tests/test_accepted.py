"""Lengths of requests follow from the tokens that a step accepts: the relay believes none that were made elsewhere."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    FutureMap,
    MirroredTensor,
    PagePool,
    SlotPool,
    StepPlanner,
    checks,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.errors import ArgumentError, DeclarationError, DtypeError, ShapeError
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests import step_world
from tests.doubles import refused
from tests.worlds import Pools

DRAFTS = 3


class Running(Batch):
    """Requests of which the host knows bounds."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")


class Speculating:
    """Two requests with 10 tokens each, that put in 4 in each step: their last token and 3 drafts."""

    def __init__(self, rt: Runtime, lens: list[int], kept: torch.dtype = torch.int64) -> None:
        self.rt, self.slots = rt, SlotPool(rt, 6)
        table = self.slots.table("req_to_token", (40,), torch.int32, holds="location")
        self.pages = PagePool(rt, self.slots, 60, 4, max_tokens_per_request=40, req_to_token=table)
        fields = {
            "last": relay_field(torch.int64),
            "drafts": relay_field(torch.int64, (DRAFTS,)),
            "lens": relay_field(torch.int64, read_by="both"),
            "kept": relay_field(kept, read_by="host"),
        }
        self.relay = FutureMap(self.slots, fields)
        self.declared: dict[str, Any] = {"ids": ("last", "drafts"), "results": ("kept", "lens")}
        self.planner = StepPlanner(
            Running, pages=self.pages, relay=self.relay, lengths="lens", accepted="kept", **self.declared
        )
        self.batch: Any = Running.empty(rt)
        self.step: Any = None
        self.join(lens)

    def join(self, lens: list[int], told: list[int] | None = None) -> None:
        """The first step of requests that arrive with their KV."""
        n = len(lens)
        first = {"last": [7] * n, "drafts": [[1, 2, 3]] * n, "lens": lens if told is None else told}
        joining = {"seq_lens": np.array(lens)}
        self.done = self.rt.record()
        self.done.wait()
        self.rt.next_step()
        self.step = self.planner.plan(self.batch, 1 + DRAFTS, joining=joining, published=first)
        self.inputs = self.step.inputs()

    def plan(self, **options: Any) -> None:
        """The next step, of bounds; no more than two are under way."""
        self.done.wait()
        self.done = self.rt.record()
        self.rt.next_step()
        self.step = self.planner.plan(self.batch, **{"query_lens": 1 + DRAFTS, **options})
        self.inputs = self.step.inputs()

    def counts(self, *numbers: int) -> torch.Tensor:
        """These on the device, as a forward would leave them."""
        return self.rt.upload([np.array(numbers, dtype=np.int64)]).view(0)

    def end(self, *accepted: int) -> list[int]:
        """What a forward publishes; the true lengths as the device has them."""
        true = self.step.accept(self.counts(*accepted))
        n = len(accepted)
        self.step.publish(last=self.counts(*[7] * n), drafts=self.counts(*[1, 2, 3] * n).view(n, 3))
        self.batch = self.step.batch
        if n == len(self.batch):
            bounds = self.batch.seq_lens.np
            after = MirroredTensor.from_pair(self.rt, bounds, true, contract="upper_bound")
            self.batch = self.batch.replace(seq_lens=after)
        lens: list[int] = self.rt.inspect(true).tolist()
        return lens


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_lengths_follow_from_what_was_accepted(rt: Runtime, level: str) -> None:
    """Two steps ahead the forward has the true lengths, whatever the forward does to its inputs."""
    with checks(level):
        engine = Speculating(rt, [10, 8])
        if level == "cheap":
            engine.inputs.kv_lens.fill_(99)  # the forward's own
        assert engine.end(1, 3) == [11, 11]
        results = engine.step.results
        engine.plan()
        assert rt.inspect(engine.inputs.kv_lens).tolist() == [15, 15]
        assert rt.inspect(engine.inputs.positions).tolist() == [11, 12, 13, 14] * 2
        assert (results["kept"].np.tolist(), results["lens"].np.tolist()) == ([1, 3], [11, 11])
        assert engine.end(4, 1) == [15, 12]
        engine.plan()
        assert rt.inspect(engine.inputs.kv_lens).tolist() == [19, 16]


def test_lengths_of_a_mixed_step(rt: Runtime, full: None) -> None:
    """Some verify drafts, one pauses, one is in the middle of its prompt and one ends it; rows are padded."""
    engine = Speculating(rt, [10, 8, 9])
    assert engine.end(2, 3, 1) == [12, 11, 10]
    engine.plan(
        joining={"seq_lens": np.array([0, 0])},
        query_lens=np.array([4, 0, 4, 5, 6]),
        prompt_ids=[None, None, None, [5] * 5, [6] * 6],
        samples=np.array([True, False, True, False, True]),
        pad_rows=7,
        pad_tokens=20,
    )
    assert engine.end(3, 2, 6) == [15, 12, 6]
    assert engine.step.results["lens"].np.tolist() == [15, 12, 6]


WRONG: list[tuple[list[int], list[int], str]] = [
    ([17, 3], [14, 11], "accepted 17 tokens of a step in which it put in 4"),
    ([1, 14], [11, 12], "accepted 14 tokens"),
    ([-1, 3], [10, 11], "accepted -1 tokens"),
]
"""Tokens accepted by requests of 10 and 8; their lengths, which stay in their pages; words of the report."""


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize(("accepted", "lens", "words"), WRONG)
def test_numbers_that_were_not_put_in(
    rt: Runtime, accepted: list[int], lens: list[int], words: str, later: int
) -> None:
    """At `cheap` the host reports them when they land, even steps later; the device never leaves the pages."""
    with checks("cheap"):
        engine = Speculating(rt, [10, 8])
        assert engine.end(*accepted) == lens
        results = engine.step.results
        for _ in range(later):
            engine.plan()
            engine.end(1, 1)
        for _ in range(2):
            report = refused(Code.LENGTH_ORDER, results.resolve)
            assert words in str(report)
    with checks("full"):
        engine = Speculating(rt, [10, 8])
        refused(Code.LENGTH_ORDER, lambda: engine.end(*accepted))
        assert {str(state) for state in engine.relay.states(engine.step.batch.slots, "lens")} == {"consumed"}
        assert engine.end(1, 3) == [11, 11]


def accept(engine: Speculating, values: Any) -> Callable[[], object]:
    """As the forward calls it."""
    return lambda: engine.step.accept(values)


def test_lengths_made_elsewhere_are_refused(rt: Runtime) -> None:
    """Where `accept` is meant, by each way to publish; and nothing is published."""
    engine = Speculating(rt, [10, 8])
    wrong = engine.counts(17, 14)
    own: list[dict[str, Any]] = [{"lens": wrong}, {"last": wrong, "kept": wrong}, {"lens": [17, 14]}]
    for values in own:
        with pytest.raises(ArgumentError, match="call `accept` before"):
            engine.step.publish(**values)
    slots = engine.step.batch.slots
    calls: list[Callable[[], None]] = [
        lambda: engine.relay.publish(slots, lens=wrong),
        lambda: engine.relay.publish(slots, last=wrong, lens=engine.step.batch.seq_lens),
    ]
    for publish in calls:
        with pytest.raises(DeclarationError, match="follows from the tokens that a step accepts"):
            publish()
    for tokens, kind in ((engine.counts(1), ShapeError), (wrong.to(torch.int32), DtypeError)):
        with pytest.raises(kind):
            accept(engine, tokens)()
    states = [engine.relay.states(engine.step.batch.slots, name)[0] for name in ("last", "lens", "kept")]
    assert [*map(str, states)] == ["consumed", "consumed", "unwritten"]
    assert engine.end(1, 3) == [11, 11]
    for values in own:
        with pytest.raises(DeclarationError, match="follows from the tokens"):
            engine.step.publish(**values)
    refused(Code.FUTURE_UNREAD_OVERWRITTEN, accept(engine, engine.counts(1, 3)))
    with pytest.raises(ArgumentError, match=r"row 1 of those that join: expected 6, its length, got 7"):
        engine.join([5, 6], told=[5, 7])


def test_accept_needs_a_step_that_runs(rt: Runtime) -> None:
    """Before `inputs`, without a field for it, and after a request has left."""
    engine = Speculating(rt, [10, 8])
    engine.end(1, 3)
    engine.step = engine.planner.plan(engine.batch, 1 + DRAFTS)
    with pytest.raises(ArgumentError, match="call `inputs` first"):
        accept(engine, engine.counts(1, 1))()
    engine.step.inputs()
    with checks("cheap"):
        engine.pages.release_requests(engine.batch.slots.filter([1]), after=rt.record())
        refused(Code.SLOT_STALE_HANDLE, accept(engine, engine.counts(1, 1)))
    plain = StepPlanner(Running, pages=engine.pages, relay=engine.relay, **engine.declared)
    step = plain.plan(engine.step.batch.filter([0]), prompt_ids=[[1]])
    step.inputs()
    with pytest.raises(ArgumentError, match="without lengths"):
        step.accept(engine.counts(1))


def test_a_step_that_was_never_launched(rt: Runtime) -> None:
    """The relay has the true lengths from before it, and the next forward goes on from there; no prompt does."""
    with checks("cheap"):
        engine = Speculating(rt, [10, 8])
        assert engine.end(1, 3) == [11, 11]
        dropped: Any = engine.planner.plan(engine.batch, 1 + DRAFTS)
        engine.pages.truncate(dropped.batch.slots, 14, after=rt.record())  # the bounds stay: 18 and 16
        engine.step = engine.planner.plan(dropped.batch, 1 + DRAFTS)
        assert rt.inspect(engine.step.inputs().positions).tolist() == [11, 12, 13, 14] * 2
        assert engine.end(4, 1) == [15, 12]
        engine.pages.truncate(engine.batch.slots, [15, 12], after=rt.record())
        engine.pages.accept(engine.batch.slots, [15, 12])
        engine.pages.hold(engine.batch.slots.filter([0]), 12)  # nothing is missing in front of what ran
        last = engine.planner.plan(engine.batch.filter([0]), 3, prompt_ids=[[5, 6, 7]])
        assert refused(Code.PAGE_UNWRITTEN, last.inputs).actual == 22


@pytest.mark.parametrize("names", [{"lengths": "lens"}, {"accepted": "kept"}, {"lengths": "lens", "accepted": "last"}])
def test_one_field_without_the_other(rt: Runtime, names: dict[str, str]) -> None:
    """Lengths and what they follow from are declared together, and the host reads the second."""
    engine = Speculating(rt, [10, 8])
    with pytest.raises(DeclarationError, match="one of the results for the tokens accepted"):
        StepPlanner(Running, pages=engine.pages, relay=engine.relay, **engine.declared, **names)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [torch.int32, torch.int64])
def test_accept_on_another_stream(rt: Runtime, kept: torch.dtype) -> None:
    """It comes behind the forward that took the inputs."""
    engine = Speculating(rt, [10, 8], kept)
    done = rt.record()
    other = rt.stream("publishes")
    with rt.use(other):
        rt.wait(done)
        counts = engine.counts(2, 4).to(kept)
        assert rt.inspect(engine.step.accept(counts)).tolist() == [12, 12]


def test_lengths_that_count_rejected_guesses_are_not_gone_on_from(rt: Runtime) -> None:
    """A step follows on true lengths or bounds of them, and not on those of the batch that put the guesses in."""
    world = Pools.of(rt)
    fields = {
        "token": relay_field(torch.int64),
        "guesses": relay_field(torch.int64, shape=(2,)),
        "seq_lens": relay_field(torch.int64, read_by="both"),
        "accepted": relay_field(torch.int64, read_by="host"),
    }
    relay, names = FutureMap(world.slots, fields), ("token", "guesses")
    told: Any = {"lengths": "seq_lens", "accepted": "accepted", "results": ("accepted",)}
    kind = step_world.Running
    planner = StepPlanner(kind, pages=world.pages, relay=relay, ids=names, **told)
    first = {"token": [1], "guesses": [[2, 3]], "seq_lens": [6]}
    lens = np.array([6])
    joining = step_world.columns(np.array([1]), [6])
    step = planner.plan(kind.empty(rt), 3, joining=joining, published=first)
    step.inputs()
    true = step.accept(torch.tensor([1]))
    step.publish(token=torch.tensor([4]), guesses=torch.tensor([[5, 6]]))
    ahead: Any = step.batch
    for batch in (ahead, ahead.filter([0]), kind.empty(rt).merge(ahead), ahead.advance("seed")):
        with pytest.raises(ArgumentError, match="count guesses that the step before may have rejected"):
            planner.plan(batch, 3)
    bounds = MirroredTensor.from_pair(rt, step.batch["seq_lens"].np, true, contract="upper_bound")
    assert bounds.np.tolist() == (lens + 3).tolist()
