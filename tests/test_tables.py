"""Slot-indexed tables: what is written reaches the right rows, and what must not be written is refused."""

import functools
import gc

import numpy as np
import pytest
import torch

from batchstate import levels
from batchstate.batch import Batch
from batchstate.columns import slot_column
from batchstate.errors import ArgumentError, DeviceError, DtypeError, RowIndexError, ShapeError, ValueOverflowError
from batchstate.indices import HostLocations, Locations
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import DoneFence, Runtime
from batchstate.testing.devices import open_device
from batchstate.violations import Code
from tests.doubles import Gate, refused


@pytest.fixture
def pool(rt: Runtime) -> SlotPool:
    """4 slots and 2 in reserve."""
    return SlotPool(rt, 4, reserve=2)


def test_has_a_row_for_every_slot_and_for_padding(pool: SlotPool) -> None:
    """A table has size + reserve + 1 rows of zeros."""
    table = pool.table("kv", (3,), torch.int64)
    assert tuple(table.device.shape) == (7, 3)
    assert table.capacity == pool.capacity == 7
    assert not table.device.any()


def test_writes_elements(rt: Runtime, pool: SlotPool) -> None:
    """Element positions[i] of row slots[i] becomes values[i], and nothing else changes; rows may repeat."""
    table = pool.table("kv", (3,), torch.int32, host=True)
    table.write(np.array([2, 5, 2]), np.array([0, 2, 1]), np.array([7, 8, 9]))
    expected = np.zeros((7, 3), np.int32)
    expected[2] = [7, 9, 0]
    expected[5, 2] = 8
    assert np.array_equal(rt.read_back(table.device), expected)
    assert table.host is not None
    assert np.array_equal(table.host, expected)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_writes_whole_rows(rt: Runtime, pool: SlotPool, shape: tuple[int, ...]) -> None:
    """Without positions whole rows are written, whatever their shape."""
    table = pool.table("state", shape, torch.float32)
    values = np.arange(1, 1 + 2 * int(np.prod(shape)), dtype=np.float32).reshape(2, *shape)
    table.write(np.array([3, 1]), None, values)
    assert np.array_equal(rt.read_back(table.device)[[3, 1]], values)
    assert not rt.read_back(table.device)[[0, 2, 4, 5, 6]].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.float16, torch.int8])
def test_any_shared_dtype(rt: Runtime, pool: SlotPool, dtype: torch.dtype) -> None:
    """Tables of every dtype that numpy shares can be written and cleared."""
    table = pool.table("any", (2,), dtype, host=True)
    table.write(np.array([1, 2]), np.array([1, 0]), np.array([True, True]))
    table.check()
    table.clear(np.array([1, 2]))
    assert not rt.read_back(table.device).any()
    table.check()


def test_costs_one_copy_and_one_kernel(rt: Runtime, pool: SlotPool) -> None:
    """A write of its own is one upload and one device operation, and waits for nothing."""
    table = pool.table("kv", (8,))
    before = rt.counters.snapshot()
    table.write(np.arange(1, 5), np.arange(4), np.arange(4))
    cost = rt.counters - before
    assert (cost.host_to_device_copies, cost.device_operations, cost.forced_syncs) == (1, 1, 0)


def test_entry_launches_nothing(rt: Runtime, pool: SlotPool) -> None:
    """`entry` checks on the host; its arrays can be packed with another upload."""
    table = pool.table("kv", (8,))
    before = rt.counters.snapshot()
    entry = table.entry(np.array([1, 2]), np.array([3, 4]), np.array([5, 6]))
    assert rt.counters == before
    packed = rt.upload([entry.index, entry.values])
    table.apply(entry, packed.view(0), packed.view(1))
    assert rt.read_back(table.device)[1, 3] == 5
    assert rt.read_back(table.device)[2, 4] == 6


@pytest.mark.parametrize(
    ("slots", "positions", "values", "error"),
    [
        ([1], [8], [0], RowIndexError),
        ([1, 2], [0], [0, 0], ShapeError),
        ([1, 2], [0, 1], [0], ShapeError),
        ([1.0], [0], [0], DtypeError),
        ([1], [0.0], [0], DtypeError),
        ([1], [0], [0.5], DtypeError),
        ([1], [0], [2**31], ValueOverflowError),
        ([[1]], [0], [0], ShapeError),
    ],
)
def test_refuses_arguments(
    rt: Runtime, pool: SlotPool, slots: object, positions: object, values: object, error: type[Exception]
) -> None:
    """Arguments that do not go together are typed errors, and nothing is launched."""
    table = pool.table("kv", (8,), torch.int32)
    before = rt.counters.snapshot()
    with pytest.raises(error):
        table.write(np.array(slots), np.array(positions), np.array(values))
    assert rt.counters == before


@pytest.mark.parametrize(
    ("slots", "positions", "values", "code"),
    [
        ([0], [0], [1], Code.SLOT_ZERO_ALLOCATED),
        ([7], [0], [1], Code.SLOT_OUT_OF_RANGE),
        ([-1], [0], [1], Code.SLOT_OUT_OF_RANGE),
        ([1], [-1], [1], Code.SENTINEL_ESCAPED),
        ([1], [0], [-1], Code.SENTINEL_ESCAPED),
    ],
)
def test_refuses_what_would_corrupt(
    rt: Runtime, pool: SlotPool, slots: list[int], positions: list[int], values: list[int], code: Code
) -> None:
    """Padding, foreign rows and placeholders never reach the device."""
    table = pool.table("kv", (8,), holds="location")
    before = rt.counters.snapshot()
    refused(code, lambda: table.write(np.array(slots), np.array(positions), np.array(values)))
    assert rt.counters == before


def test_refuses_another_unit(rt: Runtime, pool: SlotPool) -> None:
    """Host locations do not go into a table of locations, plain numbers do; locations do not name rows."""
    table = pool.table("kv", (8,), holds="location")
    refused(Code.UNIT_MISMATCH, lambda: table.write(np.array([1]), np.array([0]), HostLocations.from_host(rt, [5])))
    refused(Code.UNIT_MISMATCH, lambda: table.write(Locations.from_host(rt, [1]), np.array([0]), np.array([5])))
    table.write(np.array([1]), np.array([0]), Locations.from_host(rt, [5]))
    table.write(np.array([1]), np.array([1]), MirroredTensor.from_host(rt, [6]))
    assert rt.read_back(table.device)[1, :2].tolist() == [5, 6]


@pytest.mark.usefixtures("full")
def test_refuses_an_element_twice(pool: SlotPool) -> None:
    """At level full one scatter may not write one element twice: the device does not say which value stays."""
    with pytest.raises(ArgumentError):
        pool.table("kv", (8,)).entry(np.array([1, 1]), np.array([2, 2]), np.array([3, 4]))


def test_writers_wait_for_readers_on_the_device(rt: Runtime, pool: SlotPool) -> None:
    """The next write makes its stream wait for the forward that still reads; once, and the host never waits."""
    table = pool.table("kv", (8,))
    table.read_until(DoneFence())
    before = rt.counters.snapshot()
    table.write(np.array([1]), np.array([0]), np.array([1]))
    assert (rt.counters - before).stream_waits == 0

    waited = []
    stream_wait = rt._stream_wait
    rt._stream_wait = lambda stream, fence: waited.append(fence)  # type: ignore[method-assign]
    gate = Gate()
    table.read_until(gate)
    table.write(np.array([1]), np.array([0]), np.array([1]))
    table.write(np.array([1]), np.array([0]), np.array([2]))
    assert waited == [gate]
    gate.done = True
    rt._stream_wait = stream_wait  # type: ignore[method-assign]


def test_writers_on_other_streams_wait_too(rt: Runtime, pool: SlotPool) -> None:
    """Every stream that writes waits for the readers, and for the writer before it."""
    table = pool.table("kv", (8,))
    table.write(np.array([1]), np.array([0]), np.array([1]))
    before = rt.counters.snapshot()
    with rt.use(rt.stream("other")):
        table.write(np.array([1]), np.array([0]), np.array([2]))
        table.check()
        assert rt.read_back(table.device)[1, 0] == 2
    assert (rt.counters - before).stream_waits >= 1


def test_finds_what_a_kernel_wrote(pool: SlotPool) -> None:
    """A store into row 0 is found, and a device side that differs from the host side."""
    table = pool.table("kv", (8,))
    table.check()
    table.device[0, 3] = 1
    refused(Code.SLOT_ZERO_DIRTY, table.check)
    table = pool.table("kv", (8,), host=True)
    table.write(np.array([1]), np.array([0]), np.array([1]))
    table.check()
    table.device[1, 0] = 2
    refused(Code.MIRROR_EQUAL, table.check)


def test_adopts_an_engines_tensor(rt: Runtime, pool: SlotPool) -> None:
    """An engine's own tensor becomes a table if it has a row for every slot; nothing is copied."""
    tensor = rt.device_zeros((9, 4), torch.int32)
    table = pool.adopt(tensor, "theirs")
    assert table.device is tensor
    table.write(np.array([6]), np.array([1]), np.array([3]))
    assert rt.read_back(tensor)[6, 1] == 3
    refused(Code.TABLE_CAPACITY, lambda: pool.adopt(rt.device_zeros((pool.size, 4), torch.int32), "short"))
    with pytest.raises(ShapeError):
        pool.adopt(rt.device_zeros((4, 9), torch.int32).t(), "strided")


def test_repr_reads_no_tensor(rt: Runtime, pool: SlotPool) -> None:
    """`repr` shows dtype and shape and costs no read-back."""
    table = pool.table("kv", (8,), holds="location")
    before = rt.counters.snapshot()
    assert repr(table) == "Table('kv', int32[7, 8], holds=location)"
    assert repr(table.entry(np.array([1]), np.array([0]), np.array([1]))).startswith("TableWrite(1 elements")
    assert rt.counters == before


def test_capacity_counts_at_every_level(pool: SlotPool) -> None:
    """Arguments are checked at level off too."""
    table = pool.table("kv", (8,))
    with levels.checks("off"):
        refused(Code.SLOT_ZERO_ALLOCATED, lambda: table.write(np.array([0]), np.array([0]), np.array([1])))
    with levels.checks("off"), pytest.raises(RowIndexError):
        table.write(np.array([1]), np.array([8]), np.array([1]))
    tokens = pool.table("tokens", (8,), holds="location")
    for level in ("off", "cheap", "full"):
        with levels.checks(level):
            refused(Code.SENTINEL_ESCAPED, functools.partial(table.write, np.array([1]), np.array([-1]), np.array([1])))
            refused(Code.SENTINEL_ESCAPED, functools.partial(tokens.write, np.array([1]), np.array([0]), [-1]))


def test_tables_made_in_inference_mode_are_written_outside(rt: Runtime) -> None:
    """An engine that builds its pools under inference mode can write their tables anywhere."""
    with torch.inference_mode():
        pool = SlotPool(rt, 4)
        table = pool.table("a", host=True)
    slots = pool.take(2)
    table.write(slots, None, [3, 4])
    table.clear(slots)
    with torch.inference_mode():
        table.write(slots, None, [5, 6])
    table.check()


def test_a_write_is_checked_again_when_it_is_launched(rt: Runtime, pool: SlotPool) -> None:
    """A write that was made for a request which has left is not launched into its successor's row."""
    table = pool.table("a", host=True)
    slots = pool.take(1)
    entry = table.entry(slots, None, [7])
    pool.free(slots)
    assert pool.take(1).np.tolist() == slots.np.tolist()
    packed = rt.upload([entry.index, entry.values])
    refused(Code.SLOT_STALE_HANDLE, lambda: table.apply(entry, packed.view(0), packed.view(1)))
    assert table.host is not None
    assert not table.host.any()
    table.check()


def test_a_write_belongs_to_its_table(rt: Runtime, pool: SlotPool) -> None:
    """A table launches its own writes alone."""
    entry = pool.table("a").entry(pool.take(1), None, [7])
    packed = rt.upload([entry.index, entry.values])
    with pytest.raises(ArgumentError, match="the table that made it"):
        pool.table("b").apply(entry, packed.view(0), packed.view(1))


def test_what_was_checked_cannot_be_changed(pool: SlotPool) -> None:
    """The arrays of a write, and the host side of a table, are read-only."""
    table = pool.table("a", (2,), host=True)
    entry = table.entry(pool.take(1), None, [[7, 8]])
    assert table.host is not None
    for array in (entry.index, entry.values, table.host):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


class Rows(Batch):
    """A batch with nothing but slots."""

    slots = slot_column()


def test_one_upload_writes_an_element_once(rt: Runtime, pool: SlotPool, full: None) -> None:
    """Two writes of one upload name one element: a device does not say which stays, so `full` refuses."""
    table = pool.table("a", (2,), host=True)
    slots = pool.take(1)
    batch = Rows.build(rt, slots=slots)
    with pytest.raises(ArgumentError, match="written twice"):
        batch.upload(writes=[table.entry(slots, [0], [1]), table.entry(slots, [0], [3])])
    assert table.host is not None
    assert not table.host.any()
    batch.upload(writes=[table.entry(slots, [0], [1]), table.entry(slots, [1], [3])])
    assert table.host[slots.np].tolist() == [[1, 3]]
    table.check()


def test_an_upload_refuses_what_is_not_of_its_time_or_runtime(rt: Runtime, device: str, pool: SlotPool) -> None:
    """A write of a request that left, or of another runtime's table, is refused before anything is copied."""
    table, foreign = pool.table("a"), SlotPool(open_device(device), 4)
    slots = pool.take(1)
    batch = Rows.build(rt, slots=slots)
    theirs = foreign.table("b").entry(foreign.take(1), None, [7])
    with pytest.raises(DeviceError, match="another runtime"):
        batch.upload(writes=[theirs])
    stale = table.entry(slots, None, [7])
    pool.free(slots)
    refused(Code.SLOT_STALE_HANDLE, lambda: batch.upload(writes=[stale]))
    assert rt.counters.host_to_device_copies == 0


def test_tables_that_are_gone_leave_nothing(rt: Runtime) -> None:
    """The runtime forgets a table that is gone."""
    for _ in range(5):
        SlotPool(rt, 4).table("a")
        gc.collect()
    assert len(rt._persistent) <= 1


def test_reading_until_nothing_is_refused(pool: SlotPool) -> None:
    """None is not a fence to wait for: a table that accepted it would fail in every later step."""
    with pytest.raises(ArgumentError, match="fence"):
        pool.table("table", (2,)).read_until(None)  # type: ignore[arg-type]
