"""Slot-indexed tables: what is written reaches the right rows, and what must not be written is refused."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import levels
from batchstate.batch import Batch
from batchstate.columns import slot_column
from batchstate.errors import ArgumentError, DeviceError, DtypeError, RowIndexError, ShapeError, ValueOverflowError
from batchstate.hybrid import HybridSlotPool
from batchstate.kv.pages import PagePool
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import HostLocations, Locations, MirroredTensor, Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from batchstate.runtime import DoneFence, Runtime
from batchstate.static import StaticBuffers
from batchstate.tables import Table
from batchstate.violations import Code
from tests.doubles import Gate, forged, refused


@pytest.fixture
def pool(rt: Runtime) -> SlotPool:
    """4 slots and 2 in reserve."""
    return SlotPool(rt, 4, reserve=2)


def named(pool: SlotPool, numbers: Sequence[int]) -> Slots:
    """Handles of slots by number, all of which are taken."""
    if pool.stats.free:
        pool.take(pool.stats.free, reserved=True)
    return forged(Slots, pool.runtime, numbers, [1] * len(numbers), pool.pool_id)


def test_has_a_row_for_every_slot_and_for_padding(pool: SlotPool) -> None:
    """A table has size + reserve + 1 rows of zeros."""
    table = pool.table("kv", (3,), torch.int64)
    assert tuple(table.memory.shape) == (7, 3)
    assert table.capacity == pool.capacity == 7
    assert not table.memory.any()


def test_writes_elements(rt: Runtime, pool: SlotPool) -> None:
    """Element positions[i] of row slots[i] becomes values[i], and nothing else changes; rows may repeat."""
    table = pool.table("kv", (3,), torch.int32, host=True)
    table.write(named(pool, [2, 5, 2]), np.array([0, 2, 1]), np.array([7, 8, 9]))
    expected = np.zeros((7, 3), np.int32)
    expected[2] = [7, 9, 0]
    expected[5, 2] = 8
    assert np.array_equal(rt.read_back(table.memory), expected)
    assert table.host_memory is not None
    assert np.array_equal(table.host_memory, expected)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_writes_whole_rows(rt: Runtime, pool: SlotPool, shape: tuple[int, ...]) -> None:
    """Without positions whole rows are written, whatever their shape."""
    table = pool.table("state", shape, torch.float32)
    values = np.arange(1, 1 + 2 * int(np.prod(shape)), dtype=np.float32).reshape(2, *shape)
    table.write(named(pool, [3, 1]), None, values)
    assert np.array_equal(rt.read_back(table.memory)[[3, 1]], values)
    assert not rt.read_back(table.memory)[[0, 2, 4, 5, 6]].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.float16, torch.int8])
def test_any_shared_dtype(rt: Runtime, pool: SlotPool, dtype: torch.dtype) -> None:
    """Tables of every dtype that numpy shares can be written and cleared."""
    table = pool.table("any", (2,), dtype, host=True)
    table.write(named(pool, [1, 2]), np.array([1, 0]), np.array([True, True]))
    table.check()
    table.clear(named(pool, [1, 2]))
    assert not rt.read_back(table.memory).any()
    table.check()


def test_costs_one_copy_and_one_kernel(rt: Runtime, pool: SlotPool) -> None:
    """A write of its own is one upload and one device operation, and waits for nothing."""
    table, slots = pool.table("kv", (8,)), pool.take(4)
    before = rt.counters.snapshot()
    table.write(slots, np.arange(4), np.arange(4))
    cost = rt.counters - before
    assert (cost.host_to_device_copies, cost.device_operations, cost.forced_syncs) == (1, 1, 0)


def test_entry_launches_nothing(rt: Runtime, pool: SlotPool) -> None:
    """`entry` checks on the host alone; the write is launched later."""
    table = pool.table("kv", (8,))
    before = rt.counters.snapshot()
    entry = table.entry(named(pool, [1, 2]), np.array([3, 4]), np.array([5, 6]))
    assert rt.counters == before
    entry.launch()
    assert rt.read_back(table.memory)[1, 3] == 5
    assert rt.read_back(table.memory)[2, 4] == 6


@pytest.mark.parametrize(
    ("slots", "positions", "values", "error"),
    [
        ([1], [8], [0], RowIndexError),
        ([1, 2], [0], [0, 0], ShapeError),
        ([1, 2], [0, 1], [0], ShapeError),
        ([1], [0.0], [0], DtypeError),
        ([1], [0], [0.5], DtypeError),
        ([1], [0], [2**31], ValueOverflowError),
        ([1], [[0]], [0], ShapeError),
    ],
)
def test_refuses_arguments(
    rt: Runtime, pool: SlotPool, slots: list[int], positions: object, values: object, error: type[Exception]
) -> None:
    """Arguments that do not go together are typed errors, and nothing is launched."""
    table, handles = pool.table("kv", (8,), torch.int32), named(pool, slots)
    before = rt.counters.snapshot()
    with pytest.raises(error):
        table.write(handles, np.array(positions), np.array(values))
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
    table, handles = pool.table("kv", (8,), holds="location"), named(pool, slots)
    before = rt.counters.snapshot()
    refused(code, lambda: table.write(handles, np.array(positions), np.array(values)))
    assert rt.counters == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_values_that_are_indices_lie_in_their_space(rt: Runtime, pool: SlotPool, dtype: torch.dtype) -> None:
    """A table that holds indices takes none beyond a space that a pool or the engine has declared, in any element."""
    one = named(pool, [1])
    adapters, slots = (pool.table(holds, (2,), dtype, holds=holds) for holds in ("adapter", "slot"))
    adapters.write(one, [0], [200])  # of a space that nothing has declared
    rt.declare_indices("adapter", 9)
    for table, beyond in ((adapters, 9), (slots, pool.capacity)):
        table.write(one, None, [[0, beyond - 1]])
        with levels.checks("off"):
            refused(Code.SLOT_OUT_OF_RANGE, functools.partial(table.write, one, None, [[0, beyond]]))
        assert rt.read_back(table.memory)[1].tolist() == [0, beyond - 1]


def test_refuses_another_unit(rt: Runtime, pool: SlotPool) -> None:
    """Host locations do not go into a table of locations, plain numbers do; locations do not name rows."""
    table = pool.table("kv", (8,), holds="location")
    refused(Code.UNIT_MISMATCH, lambda: table.write(named(pool, [1]), np.array([0]), HostLocations.from_host(rt, [5])))
    refused(Code.UNIT_MISMATCH, lambda: table.write(Locations.from_host(rt, [1]), [0], [5]))
    table.write(named(pool, [1]), np.array([0]), Locations.from_host(rt, [5]))
    table.write(named(pool, [1]), np.array([1]), MirroredTensor.from_host(rt, [6]))
    assert rt.read_back(table.memory)[1, :2].tolist() == [5, 6]


@pytest.mark.usefixtures("full")
def test_refuses_an_element_twice(pool: SlotPool) -> None:
    """At level full one scatter may not write one element twice: the device does not say which value stays."""
    with pytest.raises(ArgumentError):
        pool.table("kv", (8,)).entry(named(pool, [1, 1]), np.array([2, 2]), np.array([3, 4]))


def test_writers_wait_for_readers_on_the_device(rt: Runtime, pool: SlotPool) -> None:
    """The next write makes its stream wait for the forward that still reads; once, and the host never waits."""
    table = pool.table("kv", (8,))
    table.read_until(DoneFence())
    before = rt.counters.snapshot()
    table.write(named(pool, [1]), np.array([0]), np.array([1]))
    assert (rt.counters - before).stream_waits == 0

    waited = []
    stream_wait = rt._stream_wait
    rt._stream_wait = lambda stream, fence: waited.append(fence)  # type: ignore[method-assign]
    gate = Gate()
    table.read_until(gate)
    table.write(named(pool, [1]), np.array([0]), np.array([1]))
    table.write(named(pool, [1]), np.array([0]), np.array([2]))
    assert waited == [gate]
    gate.done = True
    rt._stream_wait = stream_wait  # type: ignore[method-assign]


def test_writers_on_other_streams_wait_too(rt: Runtime, pool: SlotPool) -> None:
    """Every stream that writes waits for the readers, and for the writer before it."""
    table = pool.table("kv", (8,))
    table.write(named(pool, [1]), np.array([0]), np.array([1]))
    before = rt.counters.snapshot()
    with rt.use(rt.stream("other")):
        table.write(named(pool, [1]), np.array([0]), np.array([2]))
        table.check()
        assert rt.read_back(table.memory)[1, 0] == 2
    assert (rt.counters - before).stream_waits >= 1


def test_finds_what_a_kernel_wrote(pool: SlotPool) -> None:
    """A store into row 0 is found, and a device side that differs from the host side."""
    table = pool.table("kv", (8,))
    table.check()
    table.memory[0, 3] = 1
    refused(Code.SLOT_ZERO_DIRTY, table.check)
    table = pool.table("kv", (8,), host=True)
    table.write(named(pool, [1]), np.array([0]), np.array([1]))
    table.check()
    table.memory[1, 0] = 2
    refused(Code.MIRROR_EQUAL, table.check)


def test_adopts_an_engines_tensor(rt: Runtime, pool: SlotPool) -> None:
    """An engine's own tensor becomes a table if it has a row for every slot; nothing is copied."""
    tensor = rt.device_zeros((9, 4), torch.int32)
    table = pool.adopt(tensor, "theirs")
    assert table.memory is tensor
    table.write(named(pool, [6]), np.array([1]), np.array([3]))
    assert rt.read_back(tensor)[6, 1] == 3
    refused(Code.TABLE_CAPACITY, lambda: pool.adopt(rt.device_zeros((pool.size, 4), torch.int32), "short"))
    with pytest.raises(ShapeError):
        pool.adopt(rt.device_zeros((4, 9), torch.int32).t(), "strided")


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("host", [False, True])
def test_a_tensor_whose_row_0_holds_something_is_refused(rt: Runtime, pool: SlotPool, host: bool, level: str) -> None:
    """Padded rows would read it. Nothing is adopted; a view, a page table and float bits are looked at too."""
    pages = PagePool(rt, pool, 4, 2, max_tokens_per_request=4)
    tensor = rt.device_zeros((pages.location_capacity, 2), torch.float32)
    tensor[0, 1] = float("nan")
    with levels.checks(level):
        refused(Code.SLOT_ZERO_DIRTY, lambda: pool.adopt(tensor, "theirs", host=host))
        refused(Code.SLOT_ZERO_DIRTY, lambda: pool.adopt(tensor[:7], "a view", host=host))
        violation = refused(Code.SLOT_ZERO_DIRTY, lambda: pages.adopt(tensor, "by location", host=host))
    assert violation.slot == 0
    pool.take(1)  # at no level a table is left behind
    pages.verify()
    tensor[0] = 0
    pool.adopt(tensor, "theirs", host=host)


@pytest.mark.parametrize("host", [False, True])
def test_padded_rows_may_write_scratch(rt: Runtime, pool: SlotPool, host: bool) -> None:
    """Counts and rings of states, which a captured graph writes for padded rows too; all else is as in other tables."""
    slots, tensor = pool.take(2), rt.device_zeros((7, 2), torch.int32)
    tensor[0] = 5
    with levels.checks("full"):
        counts = pool.table("counts", (2,), host=host, row_zero="scratch")
        ring = pool.adopt(tensor, "ring", row_zero="scratch")
        counts.write(slots, None, [[1, 2], [3, 4]])
        padded = slots.pad(4)
        for table in (counts, ring):
            table.memory[0] = 9
        ring.note_write(padded)
        assert ring.device_for(padded)[0].tolist() == [9, 9]
        gathered = ring.gather(padded)
        pool.take(1)
        assert gathered.device.tolist() == [[0, 0], [0, 0], [9, 9], [9, 9]]
        refused(Code.SLOT_ZERO_ALLOCATED, lambda: counts.write(padded, None, [[0, 0]] * 4))
        if host:
            counts.memory[2, 0] = 8
            refused(Code.MIRROR_EQUAL, lambda: pool.take(1))
        else:
            refused(Code.ROW_UNWRITTEN, lambda: ring.device_for(pool.take(1)))
    refused(Code.SLOT_ZERO_ALLOCATED, lambda: pool.table("zero").note_write(padded))


def test_scratch_holds_no_indices(rt: Runtime, pool: SlotPool) -> None:
    """A padded row would go where they lead."""
    pages = PagePool(rt, pool, 4, 2, max_tokens_per_request=4)
    other = PagePool(rt, pool, 4, 2, max_tokens_per_request=4, name="other")
    tensor = rt.device_zeros((pages.location_capacity,), torch.int32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: pool.table("rows", holds="location", row_zero="scratch"),
        lambda: pages.table("map", of=other, row_zero="scratch"),
        lambda: pages.adopt(tensor, "map", of=other, row_zero="scratch"),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="row_zero='scratch' of a table that holds location"):
            call()
    with pytest.raises(ArgumentError, match="row_zero is 'scratchy'") as caught:
        pages.table("counts", row_zero="scratchy")  # type: ignore[arg-type]
    assert "did you mean 'scratch'?" in caught.value.remedy


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_lost_memory_begins_anew(rt: Runtime, level: str) -> None:
    """After a memory saver's release, tables of slots, states and pages are zero, and page 0 of KV; no host wait."""
    pool = HybridSlotPool(rt, 4, states=8, states_per_slot=2)
    pages, by_page = (PagePool(rt, pool, 8, 4, max_tokens_per_request=16, name=name) for name in ("full", "swa"))
    keys = rt.device_zeros((pages.location_capacity, 2), torch.bfloat16)
    values = rt.device_zeros((by_page.num_pages + 1, 4), torch.float32)
    pages.register_kv(keys)
    by_page.register_kv(values)
    tables = pool.table("a", (3,)), pool.table("b", row_zero="scratch"), pages.table("c", host=True), pool.state_table()
    with levels.checks(level):
        slots, cache = pool.take(3), PrefixCache(pages)
        pages.extend(slots, 5)
        pages.commit(slots, 5)
        lease = pages.hold(slots.take([0]), 4)
        cache.insert(slots.take([1]), ["key"])
        gate = Gate()
        pool.free(pool.take(1), after=gate)
        for memory in (keys, values, *(table.memory for table in tables)):
            memory.fill_(77)
        refused(Code.SLOT_IN_FLIGHT, lambda: pool.clear(zero_memory=True))
        assert keys[0, 0] == 77
        gate.done = True
        if level == "full":
            refused(Code.SLOT_ZERO_DIRTY, pool.clear)
        before = rt.counters.snapshot()
        pool.clear(zero_memory=True)
        assert (rt.counters - before).forced_syncs == 0
        assert lease.released
        assert not any(table.memory.any() for table in tables)
        assert not keys[:4].any()
        assert not values[:1].any()
        assert (keys[4:] == 77).all()
        again = pool.take(2)
        pages.extend(again, 5)
        pages.check_kv()
        refused(Code.ROW_UNWRITTEN, lambda: tables[0].device_for(again))
        pool.verify()
        assert len(cache) == 0


def test_capacity_counts_at_every_level(pool: SlotPool) -> None:
    """Arguments are checked at level off too."""
    table = pool.table("kv", (8,))
    with levels.checks("off"):
        refused(Code.SLOT_ZERO_ALLOCATED, lambda: table.write(named(pool, [0]), np.array([0]), np.array([1])))
    with levels.checks("off"), pytest.raises(RowIndexError):
        table.write(named(pool, [1]), np.array([8]), np.array([1]))
    tokens, one = pool.table("tokens", (8,), holds="location"), named(pool, [1])
    for level in ("off", "cheap", "full"):
        with levels.checks(level):
            refused(Code.SENTINEL_ESCAPED, functools.partial(table.write, one, np.array([-1]), np.array([1])))
            refused(Code.SENTINEL_ESCAPED, functools.partial(tokens.write, one, np.array([0]), [-1]))


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


def test_a_write_is_checked_again_when_it_is_launched(pool: SlotPool) -> None:
    """A write that was made for a request which has left is not launched into its successor's row."""
    table = pool.table("a", host=True)
    slots = pool.take(1)
    entry = table.entry(slots, None, [7])
    pool.free(slots, after=None)
    assert pool.take(1).np.tolist() == slots.np.tolist()
    refused(Code.SLOT_STALE_HANDLE, entry.launch)
    assert table.host_memory is not None
    assert not table.host_memory.any()
    table.check()


def test_what_was_checked_cannot_be_changed(pool: SlotPool) -> None:
    """The arrays of a write, and the host side of a table, are read-only."""
    table = pool.table("a", (2,), host=True)
    entry = table.entry(pool.take(1), None, [[7, 8]])
    assert table.host_memory is not None
    for array in (entry.index, entry.values, table.host_memory):
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
    assert table.host_memory is not None
    assert not table.host_memory.any()
    batch.upload(writes=[table.entry(slots, [0], [1]), table.entry(slots, [1], [3])])
    assert table.host_memory[slots.np].tolist() == [[1, 3]]
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
    pool.free(slots, after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: batch.upload(writes=[stale]))
    assert rt.counters.host_to_device_copies == 0


def test_reading_until_nothing_is_refused(pool: SlotPool) -> None:
    """None is not a fence to wait for: a table that accepted it would fail in every later step."""
    with pytest.raises(ArgumentError, match="fence"):
        pool.table("table", (2,)).read_until(None)  # type: ignore[arg-type]


def test_the_adapter_of_the_last_request_is_not_read(rt: Runtime, pool: SlotPool) -> None:
    """A request that leaves out its row, since its value is the default, is refused where the row is read."""
    adapters = pool.adopt(rt.device_zeros((pool.capacity,), torch.int32), "adapter_ids")
    with_adapter = pool.take(1)
    adapters.write(with_adapter, None, [3])
    assert adapters.device_for(with_adapter)[with_adapter.np[0]] == 3
    pool.free(with_adapter, after=None)
    without = pool.take(1)
    assert without.np.tolist() == with_adapter.np.tolist()
    violation = refused(Code.ROW_UNWRITTEN, lambda: adapters.device_for(without))
    assert (violation.slot, violation.generation) == (int(without.np[0]), 2)
    assert "generation 1, which has left" in str(violation)
    batch = Rows.build(rt, slots=without)
    batch.upload(writes=[adapters.entry(without, None, [0])])
    for padded in (batch.pad(4), Rows.empty(rt).pad(4)):
        assert adapters.device_for(padded.slots).tolist() == [0] * pool.capacity


def test_rows_belong_to_their_owners_on_the_host_too(rt: Runtime, pool: SlotPool) -> None:
    """The host side of a table is read by handles; a table without one says so."""
    table = pool.table("a", (2,), host=True)
    slots = pool.take(2)
    refused(Code.ROW_UNWRITTEN, lambda: table.host_for(slots))
    table.write(slots, None, [[1, 2], [3, 4]])
    assert table.host_for(slots.take([1])).tolist() == [[3, 4]]
    pool.free(slots.take([1]), after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: table.host_for(slots))
    assert table.written(slots.take([0])).tolist() == [True]
    with pytest.raises(ArgumentError, match="host=True"):
        pool.table("b").host_for(slots.take([0]))


def test_numbers_name_no_rows(rt: Runtime, pool: SlotPool) -> None:
    """A number does not say whose row it is: not to write, not to read, not to clear; nor does a freed handle."""
    table = pool.adopt(rt.device_zeros((pool.capacity, 2), torch.int32), "theirs")
    slots = pool.take(1)
    writes = (lambda rows: table.write(rows, [0], [7]), lambda rows: table.entry(rows, [0], [7]))
    uses: tuple[Callable[[Any], object], ...] = (*writes, table.clear, table.note_write, table.device_for)
    for use in uses:
        with pytest.raises(DtypeError, match="does not say whose slot it is"):
            use(slots.np)
    pool.free(slots, after=Gate())
    for use in uses:
        refused(Code.SLOT_STALE_HANDLE, functools.partial(use, slots))
    assert not table.memory.any()


def test_an_adopted_table_has_a_host_side(rt: Runtime, pool: SlotPool) -> None:
    """The host side of an adopted tensor is a copy of it, and every write keeps it."""
    tensor = rt.device_zeros((pool.capacity, 2), torch.int32)
    tensor[3] = 9
    table = pool.adopt(tensor, "theirs", host=True)
    slots = pool.take(2)
    table.write(slots, [0, 1], [5, 6])
    table.check()
    assert table.host_memory is not None
    assert table.host_memory[3].tolist() == [9, 9]
    tensor[4] = 1
    refused(Code.MIRROR_EQUAL, table.check)


def test_rows_that_kernels_write_are_declared(rt: Runtime, pool: SlotPool) -> None:
    """A kernel of the engine writes rows, says whose, and another stream reads behind it."""
    table, slots = pool.table("states", (), torch.int64), pool.take(2)
    forward = rt.stream("forward")
    with rt.use(forward):
        table.memory[slots.device] = 7
        table.note_write(slots)
    before = rt.counters.snapshot()
    assert rt.inspect(table.device_for(slots))[slots.np].tolist() == [7, 7]
    assert (rt.counters - before).stream_waits == 1
    with pytest.raises(ArgumentError, match="host side"):
        pool.table("both", host=True).note_write(slots)


def test_a_batch_of_a_request_that_left_is_not_uploaded(rt: Runtime, pool: SlotPool) -> None:
    """An upload asks each slot whether it is still the request's: before and after it has another owner."""
    slots = pool.take(3)
    batch = Rows.build(rt, slots=slots)
    buffers = StaticBuffers(rt, Rows, rows=4)
    batch.pad(4).upload()
    pool.free(slots.take([1]), after=None)
    before = rt.counters.snapshot()
    for again in (False, True):
        if again:
            pool.take(1)
        violation = refused(Code.SLOT_STALE_HANDLE, batch.upload)
        assert (violation.row, violation.operation) == (1, "upload")
        refused(Code.SLOT_STALE_HANDLE, batch.pad(4).upload)
        refused(Code.SLOT_STALE_HANDLE, lambda: batch.to_static(buffers))
    assert rt.counters == before
    batch.filter([0, 2]).upload()


# Tables by page and by location


@pytest.fixture
def pages(rt: Runtime, pool: SlotPool) -> PagePool:
    """3 pages of 4 tokens."""
    return PagePool(rt, pool, 3, 4, max_tokens_per_request=8)


def test_a_stale_map_to_the_window_is_not_read(rt: Runtime, pool: SlotPool, pages: PagePool) -> None:
    """A page that is allocated anew maps to where its last owner had its window; each new token has to be mapped."""
    full_to_window = pages.adopt(rt.device_zeros((pages.location_capacity,), torch.int32), "full_to_window")
    gone = pool.take(1)
    prompt = pages.extend(gone, 6).locations
    full_to_window.write(prompt, None, prompt.np + 100)
    assert full_to_window.device_for(prompt)[4:10].tolist() == [104, 105, 106, 107, 108, 109]
    places = prompt.np
    pages.release_requests(gone, after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: full_to_window.device_for(prompt))
    refused(Code.SLOT_STALE_HANDLE, lambda: full_to_window.write(prompt, None, [0] * 6))
    here = pool.take(1)
    again = pages.extend(here, 6)
    assert sorted(again.locations.np // 4) == sorted(places // 4)
    violation = refused(Code.ROW_UNWRITTEN, lambda: full_to_window.device_for(again.locations))
    assert violation.slot == again.locations.np[0]
    batch = Rows.build(rt, slots=here)
    batch.upload(writes=[full_to_window.entry(again.locations, None, again.locations.np + 200)])
    full_to_window.device_for(again.locations)
    refused(Code.ROW_UNWRITTEN, lambda: full_to_window.device_for(pages.advance(here).locations))


def test_a_shared_prefix_is_mapped_once(pool: SlotPool, pages: PagePool) -> None:
    """Rows of shared pages are written by who allocated them, and hold for every sharer until the last has left."""
    table = pages.table("scales", (2,), torch.float32, by="page", host=True)
    one, two = pool.take(1), pool.take(1)
    pages.extend(one, 4)
    pages.commit(one, 4)
    table.write(pages.pages_of(one), None, [[1.0, 2.0]])
    lease = pages.hold(one, 4)
    pages.release_requests(one, after=None)
    pages.share(lease, two, 4)
    table.device_for(pages.pages_of(two))
    assert table.host_for(pages.pages_of(lease)).tolist() == [[1.0, 2.0]]
    named = pages.pages_of(two)
    lease.release(after=None)
    with pytest.raises(ArgumentError, match="does not hold"):
        pages.pages_of(lease)
    pages.release_requests(two, after=None)
    refused(Code.SLOT_STALE_HANDLE, lambda: table.device_for(named))
    refused(Code.ROW_UNWRITTEN, lambda: table.device_for(pages.pages_of(pages.take(3))))


def test_a_table_is_named_by_its_own_handles(rt: Runtime, pool: SlotPool, pages: PagePool) -> None:
    """Slots, pages and locations do not name each other's rows, nor those of another pool; numbers name none."""
    slots = pool.take(1)
    locations = pages.extend(slots, 2).locations
    by_location, by_page = pages.table("places"), pages.table("scales", by="page")
    assert (by_location.capacity, by_page.capacity) == (pages.location_capacity, pages.num_pages + 1) == (16, 4)
    by_location.write(locations.take([1]), None, [5])
    assert rt.read_back(by_location.memory).tolist() == [0] * 5 + [5] + [0] * 10
    wrong: tuple[tuple[Table, Any], ...] = ((by_location, slots), (by_page, locations), (pool.table("lens"), locations))
    for table, handles in wrong:
        refused(Code.UNIT_MISMATCH, functools.partial(table.write, handles, None, [1] * len(handles)))
    others = PagePool(rt, pool, 3, 4, max_tokens_per_request=8, name="others")
    with pytest.raises(ArgumentError, match="expected locations of pool 'others', got locations of pool 'pages'"):
        others.table("theirs").write(locations, None, [1, 2])
    with pytest.raises(DtypeError, match="does not say whose location it is"):
        by_location.write(locations.np, None, [1, 2])  # type: ignore[arg-type]
    refused(Code.SLOT_STALE_HANDLE, lambda: by_location.write(_forged(locations, 4), None, [1]))
    refused(Code.SLOT_OUT_OF_RANGE, lambda: by_location.write(_forged(locations, 16), None, [1]))
    refused(Code.SLOT_ZERO_ALLOCATED, lambda: by_location.write(_forged(locations, 3), None, [1]))
    refused(Code.TABLE_CAPACITY, lambda: pages.adopt(rt.device_zeros((12,), torch.int32), "without page 0"))
    with pytest.raises(ArgumentError, match="a table: expected by='location' or by='page', got 'slot'"):
        pages.table("wrong", by="slot")  # type: ignore[arg-type]
    by_page.memory[0] = 1
    refused(Code.SLOT_ZERO_DIRTY, pages.verify)
    with levels.checks("full"):
        refused(Code.SLOT_ZERO_DIRTY, lambda: pages.advance(slots))


def _forged(locations: Locations, number: int) -> Locations:
    return forged(Locations, locations.runtime, [number], [7], locations.pool_id)
