"""Fields of a relay that may be stale, that a graph publishes, and that have several rows for one request."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import FutureMap, PagePool, SlotPool, StepPlanner, checks, open_runtime, relay_field
from batchstate.errors import DeclarationError, DtypeError, ShapeError
from batchstate.future_map import GraphPublish, RelayField
from batchstate.mirror import Slots
from batchstate.races import cuda_on_cpu
from batchstate.races.devices import open_device, window_of
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import refused
from tests.step_world import Running

BOTH: dict[str, Any] = {"read_by": "both"}


def made(rt: Runtime, size: int = 6, **fields: RelayField) -> FutureMap:
    """A relay over a pool of its own, with an ordinary field besides."""
    return FutureMap(SlotPool(rt, size), {"token": relay_field(torch.int64, read_by="both"), **fields})


def on_device(rt: Runtime, *numbers: float) -> torch.Tensor:
    """These as a forward would leave them."""
    return rt.upload([np.array(numbers, dtype=np.float32)]).view(0)


# Fields that may be stale


def confidence(relay: FutureMap, slots: Slots) -> list[float]:
    """As the next forward reads it."""
    values: list[float] = relay.runtime.inspect(relay.gather(slots, "confidence")).tolist()
    return values


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_stale_field_is_masked_by_generation(rt: Runtime, level: str) -> None:
    """It is read twice, overwritten unread and never published; the next owner of a slot reads the value declared."""
    with checks(level):
        relay = made(rt, confidence=relay_field(torch.float32, stale=-1.0, **BOTH))
        pool, slots = relay.slots, relay.slots.take(3)
        assert confidence(relay, slots) == [-1, -1, -1]
        relay.publish(slots.filter([0, 2]), confidence=on_device(rt, 0.5, 0.25))
        relay.publish(slots.filter([2]), confidence=on_device(rt, 0.75))
        for _ in range(2):
            assert confidence(relay, slots) == [0.5, -1, 0.75]
            assert relay.resolve(slots, "confidence").np.tolist() == [0.5, -1, 0.75]
        assert [str(state) for state in relay.states(slots, "confidence")] == ["published"] * 3
        pool.free(slots.filter([2]), after=rt.record())
        rt.synchronize()
        again = pool.take(1)
        assert again.np.tolist() == slots.np[2:].tolist()
        both = Slots.cat([slots.filter([0]), again])
        found = relay.prefetch(both, "confidence")
        relay.publish(again, confidence=on_device(rt, 0.125))
        assert found["confidence"].np.tolist() == [0.5, -1]
        assert confidence(relay, both) == [0.5, 0.125]
        relay.discard(both, "confidence")
        assert confidence(relay, both) == [-1, -1]
        relay.check()


def test_a_refused_prefetch_publishes_nothing(rt: Runtime) -> None:
    """The value of a field that may be stale is written when all other fields may be read."""
    relay = made(rt, confidence=relay_field(torch.float32, stale=-1.0, **BOTH), ids=relay_field(torch.int64, **BOTH))
    slots, before = relay.slots.take(1), rt.counters.snapshot()
    refused(Code.FUTURE_UNWRITTEN, lambda: relay.prefetch(slots, "confidence", "ids"))
    assert [str(state) for state in relay.states(slots, "confidence")] == ["unwritten"]
    assert (rt.counters - before).device_operations == 0


def test_the_former_owner_still_publishes(rt: Runtime) -> None:
    """Its forward runs on another stream when the slot changes hands: the value for the new owner comes behind it."""
    relay = made(rt, confidence=relay_field(torch.float32, stale=0.5))
    pool, slots = relay.slots, relay.slots.take(2)
    forward = rt.stream("forward")
    with rt.use(forward):
        relay.publish(slots, confidence=on_device(rt, 7, 8))
    pool.free(slots, after=None)
    with rt.use(rt.stream("schedule")):
        again = pool.take(2)
        assert confidence(relay, again) == [0.5, 0.5]
        with checks("full"):
            refused(Code.SLOT_STALE_HANDLE, lambda: relay.gather(slots, "confidence"))


def test_it_costs_nothing_where_all_have_an_entry(rt: Runtime) -> None:
    """The value is uploaded once for a request, and the host waits for nothing."""
    relay = made(rt, confidence=relay_field(torch.float32, stale=0.5))
    slots = relay.slots.take(4)
    spent = []
    for _ in range(3):
        before = rt.counters.snapshot()
        relay.gather(slots, "confidence")
        spent.append((rt.counters - before).host_to_device_copies)
        assert (rt.counters - before).forced_syncs == 0
    assert spent == [2, 0, 0]  # the slots of the gather, too


def test_vectors_and_bits(rt: Runtime) -> None:
    """Of any shape and any dtype that the host can write, each entry filled with the number."""
    half, flag = relay_field(torch.bfloat16, (2,), stale=-0.5), relay_field(torch.bool, stale=True)
    relay = made(rt, half=half, flag=flag, ids=relay_field(torch.int32, (3,), stale=4))
    slots = relay.slots.take(2)
    seen = {name: rt.inspect(relay.gather(slots, name).float()).tolist() for name in ("half", "flag", "ids")}
    assert seen == {"half": [[-0.5, -0.5]] * 2, "flag": [1, 1], "ids": [[4, 4, 4]] * 2}


def test_what_may_not_be_stale(rt: Runtime) -> None:
    """Ids and lengths, and a value that the field cannot hold."""
    relay = made(rt, lens=relay_field(torch.int64, stale=0))
    pages = PagePool(rt, relay.slots, 8, 4, max_tokens_per_request=8)
    with pytest.raises(DeclarationError, match="ids from field 'lens', which may be stale"):
        StepPlanner(Running, pages=pages, relay=relay, ids="lens")
    with pytest.raises(DeclarationError, match="lengths from field 'lens', which may be stale"):
        StepPlanner(Running, pages=pages, relay=relay, lengths="lens", accepted="token", results=("token",))
    with pytest.raises(DeclarationError, match="expected 0 or more"):
        relay_field(torch.int64, non_negative=True, stale=-1)
    with pytest.raises(DtypeError):
        relay_field(torch.int64, stale=0.5)


# Fields that a graph publishes


@attrs.define(eq=False)
class Graph:
    """A graph of four rows: ids plus one, and twice them; the inputs are at fixed addresses."""

    relay: FutureMap
    slots: torch.Tensor
    ids: torch.Tensor
    replay: Callable[[], object]
    published: GraphPublish

    @classmethod
    def of(cls, relay: FutureMap, captured: bool) -> "Graph":
        """Captured on a device that has graphs, and else a function."""
        rt = relay.runtime
        slots, ids = (rt.upload([np.zeros(4, np.int64)]).view(0).clone() for _ in range(2))

        def forward() -> GraphPublish:
            more = rt.launch(torch.add, ids, 1, reads=(ids,), name="model")
            pair = rt.launch(torch.stack, [more, more * 2], 1, reads=(more,), name="drafts")
            return relay.publish_in_graph(slots, token=more, drafts=pair)

        if not captured:
            return cls(relay, slots, ids, forward, forward())
        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            published = forward()
        return cls(relay, slots, ids, graph.replay, published)

    def run(self, slots: Slots, ids: Sequence[int], held: Sequence[int] | None = None) -> None:
        """Fills the inputs, and replays."""
        rt, n = self.relay.runtime, len(slots)
        for target, values in ((self.slots, slots.tolist() if held is None else held), (self.ids, ids)):
            source = rt.upload([np.array([*values, *[0] * (4 - n)], dtype=np.int64)]).view(0)
            rt.launch(target.copy_, source, reads=(source,), writes=(target,), name="fill")
        self.published.replay(slots, self.replay)


@contextlib.contextmanager
def graphs_of(device: str) -> Iterator[tuple[FutureMap, Graph]]:
    """A graph on the device under test, or captured by torch where `device` says so."""
    captured = device.startswith("graph")
    window = cuda_on_cpu(device.partition(" ")[2]) if captured else window_of(open_device(device))
    with window as opened:
        rt = open_runtime("cuda") if captured else opened
        drafts = relay_field(torch.int64, (2,), must_read=False)
        relay = made(rt, drafts=drafts)
        yield relay, Graph.of(relay, captured)


@pytest.fixture(params=["the device under test", "graph race", "graph sim"])
def graphs(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[FutureMap, Graph]]:
    """A relay, and a graph that publishes into it."""
    with graphs_of(device if request.param == "the device under test" else request.param) as both:
        yield both


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_graph_publishes(graphs: tuple[FutureMap, Graph], level: str) -> None:
    """Each replay is a publish of its requests, on its stream; padded rows leave row 0 as it is."""
    relay, graph = graphs
    rt, forward = relay.runtime, relay.runtime.stream("forward")
    rt.wait(rt.record(), stream=forward)  # for the inputs of the graph
    with checks(level):
        slots = relay.slots.take(3)
        for first, some in ((5, slots), (10, slots.filter([2, 0])), (20, slots)):
            ids = list(range(first, first + len(some)))
            with rt.use(forward):
                graph.run(some, ids)
            found = relay.prefetch(some, "token")
            assert rt.inspect(relay.gather(some, "token")).tolist() == [n + 1 for n in ids]
            assert rt.inspect(relay.gather(some, "drafts")).tolist() == [[n + 1, 2 * n + 2] for n in ids]
            assert found["token"].np.tolist() == [n + 1 for n in ids]
        with rt.use(forward):
            graph.run(slots.filter([]), [])
        relay.check()


def test_a_replay_is_refused_before_it_runs(graphs: tuple[FutureMap, Graph]) -> None:
    """Entries that were not read, requests that have left, slots of others in the graph: nothing has changed."""
    relay, graph = graphs
    slots = relay.slots.take(2)
    graph.run(slots, [5, 6])
    refused(Code.FUTURE_UNREAD_OVERWRITTEN, lambda: graph.run(slots, [7, 8]))
    assert relay.runtime.inspect(relay.gather(slots, "token")).tolist() == [6, 7]
    assert relay.resolve(slots, "token").np.tolist() == [6, 7]
    with checks("full"):
        report = refused(Code.MIRROR_EQUAL, lambda: graph.run(slots, [7, 8], held=slots.tolist()[::-1]))
        assert "slots of the graph" in str(report)
    relay.slots.free(slots.filter([1]), after=relay.runtime.record())
    refused(Code.SLOT_STALE_HANDLE, lambda: graph.run(slots, [7, 8]))
    refused(Code.FUTURE_CONSUMED, lambda: relay.gather(slots.filter([0]), "token"))


def test_a_replay_that_fails(graphs: tuple[FutureMap, Graph]) -> None:
    """Nobody knows what it has written: the entries are unwritten, and the next replay writes them."""
    relay, graph = graphs
    slots = relay.slots.take(2)

    def fails() -> None:
        graph.replay()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graph.published.replay(slots, fails)
    assert [str(state) for state in relay.states(slots, "token")] == ["unwritten"] * 2
    graph.run(slots, [5, 6])
    assert relay.runtime.inspect(relay.gather(slots, "token")).tolist() == [6, 7]


def test_what_a_graph_may_publish(graphs: tuple[FutureMap, Graph]) -> None:
    """A run that warms up writes nothing; values have the shape and dtype of their field, on every device."""
    relay, graph = graphs
    rt, slots = relay.runtime, relay.slots.take(1)
    graph.slots.fill_(int(slots.np[0]))
    relay.publish_in_graph(graph.slots, token=graph.ids + 7)
    assert [str(state) for state in relay.states(slots, "token")] == ["unwritten"]
    assert not rt.inspect(relay._memory["token"]).any()
    for values, kind in (
        ({"token": graph.ids[:3]}, ShapeError),
        ({"token": graph.ids.float()}, DtypeError),
        ({"tokens": graph.ids}, DeclarationError),
    ):
        with pytest.raises(kind):
            relay.publish_in_graph(graph.slots, **values)
    assert "token, drafts" in repr(graph.published)


def test_no_graph_publishes_lengths(rt: Runtime) -> None:
    """They follow from what a step accepts, in a graph too."""
    relay = made(rt, lens=relay_field(torch.int64), kept=relay_field(torch.int64, read_by="host"))
    pages = PagePool(rt, relay.slots, 8, 4, max_tokens_per_request=8)
    StepPlanner(Running, pages=pages, relay=relay, lengths="lens", accepted="kept", results=("kept",))
    zeros = rt.upload([np.zeros(2, np.int64)]).view(0)
    with pytest.raises(DeclarationError, match="follows from the tokens"):
        relay.publish_in_graph(zeros, lens=zeros)


# More rows than requests


def test_beams_are_a_trailing_shape(rt: Runtime, full: None) -> None:
    """Each request has a row for each of its beams: published, gathered and prefetched as one entry, by one handle."""
    width = 3
    tokens = relay_field(torch.int64, (width,), read_by="both", non_negative=True)
    relay = made(rt, beams=tokens, parents=relay_field(torch.int64, (width,)))
    slots = relay.slots.take(2)
    rows = rt.upload([np.arange(10, 16)]).view(0)  # as a sampler leaves them: a row for each beam
    parents = rt.upload([np.array([0, 0, 2, 1, 0, 1])]).view(0)
    relay.publish(slots, beams=rows.view(-1, width), parents=parents.view(-1, width))
    results = relay.prefetch(slots, "beams")
    one = slots.filter([1])
    gathered = relay.gather(one, "beams").gather(1, relay.gather(one, "parents")).view(-1)
    assert rt.inspect(gathered).tolist() == [14, 13, 14]
    assert results["beams"].np.tolist() == [[10, 11, 12], [13, 14, 15]]
    with pytest.raises(ShapeError):
        relay.publish(one, beams=rows[:3], parents=parents[:3])
    refused(Code.FUTURE_UNREAD_OVERWRITTEN, lambda: relay.publish(slots, beams=rows.view(-1, width)))
