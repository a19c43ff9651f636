"""At `full` what was written into either side of any column is reported by the very next operation, on every tool."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.forward.plan import ForwardPlan
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PageLease, PagePool
from batchstate.levels import checks
from batchstate.mirror import MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device, window_of
from batchstate.runtime import Runtime
from batchstate.static import StaticBuffers
from batchstate.step import PlannedStep, StepPlanner
from batchstate.tables import Table
from batchstate.violations import Code, Violation
from tests.selfcheck.machines.batch import COLUMNS, OPERATIONS, Decode, Written
from tests.selfcheck.machines.mirrored_tensor import OPERATIONS as OF_VALUES
from tests.selfcheck.machines.mirrored_tensor import write_uncounted
from tests.selfcheck.machines.steps import OPERATIONS as OF_STEPS
from tests.selfcheck.mutants import MUTANTS
from tests.selfcheck.mutants.diffs import changed
from tests.worlds import Pools

ROW = 1

READINGS: dict[type, str] = {
    Batch: "build empty columns row_set device_side objects to_dict check_live",
    MirroredTensor: "label from_device from_pair np host device device_side row_set open_windows stale sum max min "
    "tolist aligned exact_numbers exact_host",
    StepPlanner: "made_for_holders",
    PlannedStep: "plan accept publish rollback results batch sent slots sampled_slots rows generations used_on "
    "query_lens max_kv_len",
}
"""Names that make a batch or value, or read one side of it, and replace nothing."""

CALLED = {
    Batch: {*dict(OPERATIONS), "check"},
    MirroredTensor: {*dict(OF_VALUES), "merge", "check"} - {"+ n", "- n"},
    StepPlanner: {"plan"},
    PlannedStep: {"inputs"},
}
"""Names that the tests below call on a written batch or value, and those that compare by name."""


def public(kind: type) -> set[str]:
    """The functions and properties of a class that anyone may use."""
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {name for name, member in members.items() if callable(member) or isinstance(member, classmethod | property)}


@pytest.mark.parametrize("kind", READINGS, ids=lambda kind: kind.__name__)
def test_every_operation_is_tried(kind: type) -> None:
    """An operation that is added has a line in `OPERATIONS`, or is named here as one that replaces nothing."""
    assert public(kind) == CALLED[kind] | set(READINGS[kind].split())
    assert {"plan", "inputs"} == set(dict(OF_STEPS))


@pytest.fixture(params=["cpu", "race", "sim:random"], autouse=True)
def tool(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Checks at `full` on a plain CPU, under the race detector and on the simulated device."""
    with checks("full"), window_of(open_device(request.param)) as runtime:
        yield runtime


def built(rt: Runtime, pool: SlotPool, n: int) -> Decode:
    """A batch of `n` requests; its bounds are far above the device side: a write does not exceed them."""
    values: dict[str, Any] = {"slots": pool.take(n), "requests": ["a"] * n}
    for name, column in COLUMNS.items():
        numbers = np.full((n, *column.shape), 1 if column.np_dtype.kind == "b" else 4, column.np_dtype)
        device = rt.upload([numbers]).view(0).view(column.dtype)
        if name in ("accepted", "drafts"):
            values[name] = MirroredTensor.from_pair(rt, numbers + 50, device.clone(), contract="upper_bound")
        elif name != "slots":
            values[name] = numbers if isinstance(column, MirroredColumn) else device.clone()
    return Decode.build(rt, **values)


SIDES = [(name, "host") for name, column in COLUMNS.items() if isinstance(column, MirroredColumn)]
SIDES += [(name, "device") for name in COLUMNS]


@pytest.mark.parametrize("place", range(len(OPERATIONS)), ids=lambda place: f"{place}-{OPERATIONS[place][0]}")
def test_batch_reports_before_it_replaces(tool: Runtime, place: int) -> None:
    """Each operation of a batch compares each side of each column of each batch that it takes, and names the place."""
    operation, call = OPERATIONS[place]
    pool = SlotPool(tool, 4 * len(SIDES))
    graph = StaticBuffers(tool, Decode, rows=4, extras={"positions": np.zeros(3, np.int32)})
    other, kept = built(tool, pool, 1), built(tool, pool, 2)
    kept.upload()
    kept.on_device()
    for i, (column, side) in enumerate(SIDES):
        one = kept if i % 3 else built(tool, pool, 2)
        write_uncounted(one[column], side, ROW)
        with pytest.raises(Violation) as caught:
            call(Written(one, other, graph))
        error = caught.value
        assert (error.column, error.row, error.operation) == (column, ROW, operation), (side, error)
        assert error.code in (Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL)
        assert str(error.expected) != str(error.actual)
        write_uncounted(one[column], side, ROW)  # as it was


@pytest.mark.parametrize("place", range(len(OF_VALUES)), ids=lambda place: f"{place}-{OF_VALUES[place][0]}")
@pytest.mark.parametrize("contract", ["exact", "upper_bound", "device_only"])
def test_value_reports_before_it_replaces(tool: Runtime, contract: str, place: int) -> None:
    """Each operation of a mirrored value compares both sides, under each contract."""
    operation, call = OF_VALUES[place]
    if (operation, contract) in (("from_host", "upper_bound"), ("from_host", "device_only"), ("tighten", "exact")):
        pytest.skip("the operation does not apply")
    if contract == "device_only" and operation in ("tighten", "update"):
        pytest.skip("the operation does not apply")
    for side in ("host", "device") if contract != "device_only" else ("device",):
        value = MirroredTensor.from_host(tool, [4, 4, 4], name="lens")
        value = value if contract == "exact" else value.weaken(contract)
        write_uncounted(value, side, ROW)
        with pytest.raises(Violation) as caught:
            call(value)
        error = caught.value
        assert (error.column, error.row, error.operation) == ("lens", ROW, operation), (side, error)


def test_values_are_compared_when_a_batch_takes_them(tool: Runtime) -> None:
    """A value whose side was written is not built into a batch, and replaces no column."""
    pool = SlotPool(tool, 4)
    one = built(tool, pool, 2)
    for side in ("host", "device"):
        lens = MirroredTensor.from_host(tool, [4, 4], name="lens")
        write_uncounted(lens, side, ROW)
        for call in (lambda lens=lens: one.replace(seq_lens=lens), lambda lens=lens: Lens.build(tool, seq_lens=lens)):
            with pytest.raises(Violation) as caught:
                call()
            assert (caught.value.column, caught.value.row) == ("lens", ROW)


class Lens(Batch):
    """One column."""

    seq_lens = COLUMNS["seq_lens"]


def test_bounds_are_compared_before_anybody_reads_them(tool: Runtime) -> None:
    """The operation after which the device exceeds a bound says so at once; for that nothing is sent or launched."""
    with MUTANTS["bound_exceeded"].switched_on():
        one = built(tool, SlotPool(tool, 4), 2)
        before = tool.counters.snapshot()
        for _ in range(6):
            one = one.advance("accepted", 1)  # 8 too many on the device, each time
        with pytest.raises(Violation) as caught:
            one.advance("accepted", 1)
    assert (caught.value.code, caught.value.column, caught.value.row) == (Code.MIRROR_BOUND, "accepted", 0)
    assert caught.value.operation == "advance"
    assert attrs.evolve(tool.counters, check_reads=0) == attrs.evolve(before, check_reads=0)


def test_a_gather_is_compared_with_its_sources(tool: Runtime) -> None:
    """What a gather leaves on the device is what its sources held, in the rows that the batch has."""
    one = built(tool, SlotPool(tool, 4), 3)
    tokens = tool.upload([np.arange(3)]).view(0).clone()
    one = one.replace(last_token=tokens).filter([2, 0])
    turned = changed("_rows:DeviceRows.gathered", "select_rows, base, index,", "select_rows, base, index.flip(0),")
    with turned, pytest.raises(Violation) as caught:
        one.on_device("last_token")
    assert (caught.value.code, caught.value.column) == (Code.MIRROR_EQUAL, "last_token")


def test_nothing_is_compared_in_a_stale_window(tool: Runtime) -> None:
    """Inside a window that declares a side old, the sides may differ."""
    one = built(tool, SlotPool(tool, 4), 2)
    one.upload()
    with one["seq_lens"].stale("device", reason="a forward is about to change it"):
        one["seq_lens"]._device.tensor(tool).data.add_(1)
        one.filter([0])
    with pytest.raises(Violation):
        one.filter([0])


def test_cheap_reads_nothing_back(tool: Runtime) -> None:
    """At `cheap` no operation reads the device, and no launch or copy is added."""
    pool = SlotPool(tool, 80)
    graph = StaticBuffers(tool, Decode, rows=4, extras={"positions": np.zeros(3, np.int32)})
    with checks("cheap"):
        for _, call in OPERATIONS:
            it = Written(built(tool, pool, 2), built(tool, pool, 1), graph)
            reads = tool.counters.check_reads
            call(it)
            assert tool.counters.check_reads == reads


# Handles that are given to pools, tables and relays


@attrs.define(eq=False)
class World(Pools):
    """Two requests that have a token each; one field of theirs is published. Their slots are on both sides."""

    relay: FutureMap = attrs.field(init=False)
    two: Slots = attrs.field(init=False)
    lease: PageLease = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.relay = FutureMap(self.slots, {"ids": relay_field(torch.int64, read_by="both")})
        self.two = self.slots.take(2)
        self.pages.extend(self.two, [1, 1]).entry().launch()
        self.relay.publish(self.two, ids=[5, 6])
        self.lease = self.pages.take(1)
        _ = self.two.device


BY_HANDLE: dict[type, dict[str, Callable[[World], object]]] = {
    SlotPool: {
        "free": lambda it: it.slots.free(it.two, after=None),
        "check_handles": lambda it: it.slots.check_handles(it.two, "check"),
        "rows_of": lambda it: it.slots.rows_of(it.two, "rows_of"),
        "release_requests": lambda it: it.slots.release_requests(it.two, after=None),
    },
    PagePool: {
        "committed": lambda it: it.pages.committed(it.two),
        "allocated": lambda it: it.pages.allocated(it.two),
        "locations": lambda it: it.pages.locations(it.two, 0, 1),
        "entry": lambda it: it.pages.entry(it.two, it.table),
        "first_positions": lambda it: it.pages.first_positions(it.two),
        "writing": lambda it: it.pages.writing(it.two, 0, 1),
        "grow": lambda it: it.pages.grow(it.two, [2, 2]),
        "accept": lambda it: it.pages.accept(it.two, 0),
        "assign": lambda it: it.pages.assign(it.lease, it.two, 0),
        "wait_written": lambda it: it.pages.wait_written(it.two),
        "extend": lambda it: it.pages.extend(it.two, [2, 2]),
        "advance": lambda it: it.pages.advance(it.two, 1),
        "hold": lambda it: it.pages.hold(it.two, 1),
        "truncate": lambda it: it.pages.truncate(it.two, [0, 0], after=None),
        "rebase": lambda it: it.pages.rebase(it.two, it.two, 1, after=None),  # handles are asked before their number
        "release": lambda it: it.pages.release(it.two, after=None),
        "release_requests": lambda it: it.pages.release_requests(it.two, after=None),
    },
    Table: {
        "device_for": lambda it: it.table.device_for(it.two),
        "host_for": lambda it: it.table.host_for(it.two),
        "gather": lambda it: it.table.gather(it.two),
        "written": lambda it: it.table.written(it.two),
        "entry": lambda it: it.table.entry(it.two, [0, 0], [1, 1]),
        "write": lambda it: it.table.write(it.two, [0, 0], [1, 1]),
        "clear": lambda it: it.table.clear(it.two),
        "note_write": lambda it: it.slots.table("noted", ()).note_write(it.two),
    },
    FutureMap: {
        "states": lambda it: it.relay.states(it.two, "ids"),
        "publish": lambda it: it.relay.publish(it.two, ids=[7, 8]),
        "discard": lambda it: it.relay.discard(it.two),
        "gather": lambda it: it.relay.gather(it.two, "ids"),
        "prefetch": lambda it: it.relay.prefetch(it.two, "ids"),
        "resolve": lambda it: it.relay.resolve(it.two, "ids"),
    },
}

BY_NUMBER = {(SlotPool, "is_live")}
"""Calls that take rows."""


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("kind", BY_HANDLE, ids=lambda kind: kind.__name__)
def test_handles_are_compared_when_they_are_used(tool: Runtime, kind: type, side: str) -> None:
    """Slots of which a side was written name another request: every call that takes handles refuses them."""
    for call in BY_HANDLE[kind].values():
        it = World.of(tool, 4)
        before = it.slots.stats, it.pages.stats, it.relay.states(it.two, "ids")
        write_uncounted(it.two, side, ROW)
        with pytest.raises(Violation) as caught:
            call(it)
        assert caught.value.code in (Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL)
        assert caught.value.row == ROW
        write_uncounted(it.two, side, ROW)  # as it was
        assert before == (it.slots.stats, it.pages.stats, it.relay.states(it.two, "ids"))


@pytest.mark.parametrize("kind", BY_HANDLE, ids=lambda kind: kind.__name__)
def test_every_call_by_handle_is_tried(kind: type) -> None:
    """A call by handle that is added has a line in `BY_HANDLE`."""
    takers = {name for name in public(kind) if callable(getattr(kind, name)) and _takes_handles(getattr(kind, name))}
    assert takers == BY_HANDLE[kind].keys() | {name for of, name in BY_NUMBER if of is kind}


def _takes_handles(function: Any) -> bool:
    of_library = "For the library." in (function.__doc__ or "")
    return not of_library and bool({"slots", "handles", "live"} & set(inspect.signature(function).parameters))


def test_a_value_is_compared_when_a_relay_takes_it(tool: Runtime) -> None:
    """A mirrored value whose side was written is not published."""
    it = World.of(tool, 4)
    it.relay.gather(it.two, "ids")
    for side in ("host", "device"):
        ids = MirroredTensor.from_host(tool, [4, 4], name="ids")
        write_uncounted(ids, side, ROW)
        with pytest.raises(Violation) as caught:
            it.relay.publish(it.two, ids=ids)
        assert (caught.value.column, caught.value.row) == ("ids", ROW)


@pytest.mark.parametrize("name", [*COLUMNS, "positions"])
def test_fixed_addresses_are_compared_before_they_are_used(tool: Runtime, name: str) -> None:
    """What a kernel wrote into the buffers of a graph is reported by its next replay, and by the next step."""
    one = built(tool, SlotPool(tool, 8), 2)
    graph = StaticBuffers(tool, Decode, rows=4, extras={"positions": np.zeros(3, np.int32)})
    replay = graph.bind(lambda: None)

    def fill() -> None:
        one.to_static(graph, extras={"positions": np.zeros(3, np.int32)})

    def run() -> None:
        replay(one)

    for operation, call in (("replay", run), ("to_static", fill)):
        fill()
        replay(one)
        graph[name].data[ROW : ROW + 1].view(torch.uint8).bitwise_xor_(1)
        with pytest.raises(Violation) as caught:
            call()
        error = caught.value
        assert (error.code, error.column, error.row) == (Code.MIRROR_FOREIGN_WRITE, name, ROW)
        assert error.operation == operation


def test_inputs_of_a_forward_are_what_was_sent(tool: Runtime) -> None:
    """What the plan laid out and a kernel wrote before the forward entered is reported at its entry, by name."""
    for name in ("positions", "kv_lens", "slot_mapping", "query_start_loc"):
        it = World.of(tool, 4)
        batch = Lens.build(tool, seq_lens=[2, 2])
        extension = it.pages.extend(it.two, [2, 2])
        plan = ForwardPlan.of(it.two, [2, 2], pages=it.pages)
        uploaded = batch.upload(extras=plan.extras)
        uploaded[name].data[ROW] += 1
        with pytest.raises(Violation) as caught:
            it.relay.resolve_forward_inputs(plan, uploaded, ids="ids")
        assert (caught.value.code, caught.value.column, caught.value.row) == (Code.MIRROR_EQUAL, name, ROW)
        assert extension is not None
