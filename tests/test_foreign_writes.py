"""At `full` what was written into either side of any column is reported by the very next operation, on every tool."""

from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from batchstate.batch import Batch
from batchstate.columns import MirroredColumn
from batchstate.levels import checks
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from batchstate.selfcheck.machines.batch import COLUMNS, OPERATIONS, Decode, Written
from batchstate.selfcheck.machines.mirrored_tensor import OPERATIONS as OF_VALUES
from batchstate.selfcheck.machines.mirrored_tensor import write_uncounted
from batchstate.selfcheck.mutants import MUTANTS
from batchstate.selfcheck.mutants.diffs import changed
from batchstate.static import StaticBuffers
from batchstate.testing.devices import open_device, window_of
from batchstate.violations import Code, Violation

ROW = 1


@pytest.fixture(params=["cpu", "race", "sim:random"], autouse=True)
def tool(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Checks at `full` on a plain CPU, under the race detector and on the simulated device."""
    with checks("full"), window_of(open_device(request.param)) as runtime:
        yield runtime


def built(rt: Runtime, pool: SlotPool, n: int) -> Decode:
    """A batch of `n` requests; its bounds are far above the device side: a write does not exceed them."""
    values: dict[str, object] = {"slots": pool.take(n), "requests": ["a"] * n}
    for name, column in COLUMNS.items():
        numbers = np.full((n, *column.shape), 1 if column.np_dtype.kind == "b" else 4, column.np_dtype)
        device = rt.upload([numbers]).view(0)
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
    other = built(tool, pool, 1)
    for i, (column, side) in enumerate(SIDES):
        one = built(tool, pool, 2)
        if i % 3:
            one.upload()
            one.on_device()
        write_uncounted(one[column], side, ROW)
        with pytest.raises(Violation) as caught:
            call(Written(one, other, graph))
        error = caught.value
        assert (error.column, error.row, error.operation) == (column, ROW, operation), (side, error)
        assert error.code in (Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL)
        assert str(error.expected) != str(error.actual)


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
    one = built(tool, SlotPool(tool, 4), 2)
    before = tool.counters.snapshot()
    with MUTANTS["bound_exceeded"].switched_on():
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
