"""Host locations: ranges with an owner and a generation, freed behind fences, poisoned while they are free."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchstate import invariants, levels
from batchstate._arrays import arange_per_row
from batchstate.errors import ArgumentError, CaptureError, DtypeError, OwnerThreadError, PoolExhaustedError, ShapeError
from batchstate.kv.host_pool import FreeRanges, HostKVPool, HostStats, ranges_of
from batchstate.runtime import Runtime
from batchstate.runtime.memory import bytes_of
from batchstate.testing.fences import ManualStream
from batchstate.violations import Code
from tests.doubles import fake_accelerator, in_a_thread, refused

Make = Callable[..., HostKVPool]


@pytest.fixture
def make(rt: Runtime) -> Make:
    """Makes a pool: two layers of two int64 a token."""
    return functools.partial(HostKVPool, rt, layers=2, item_shape=(2,), dtype=torch.int64)


def numbers(pool: HostKVPool, layer: int = 0) -> Any:
    """The memory of a layer as a writer in another process sees it: by address."""
    return bytes_of(pool.contiguous_buffers()[layer].memory).view(np.int64).reshape(-1, 2)


def counts(pool: HostKVPool) -> tuple[int, int, int]:
    """Free, pending, live."""
    stats = pool.stats
    assert stats.free + stats.pending + stats.live == stats.size == pool.num_tokens
    return stats.free, stats.pending, stats.live


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_whole_pages_in_one_run(make: Make, page_size: int) -> None:
    """Each owner gets whole pages, in one run where there is room for one; page 0 is never among them."""
    pool = make(20, page_size)
    one, two = pool.take([1, 3 * page_size + 1 if page_size > 1 else 4], [7, 8])
    assert one.table.tolist() == [[page_size, page_size]]
    assert two.table.tolist() == [[2 * page_size, 4 * page_size]]
    assert (len(one), len(two)) == (page_size, 4 * page_size)
    assert (one.owner, two.owner) == (7, 8)
    assert two.generation > one.generation
    assert two.locations(1, 3).tolist() == [2 * page_size + 1, 2 * page_size + 2, 2 * page_size + 3]
    assert two.locations().tolist() == list(range(2 * page_size, 6 * page_size))
    assert pool.owner_of([0, page_size, 2 * page_size, 6 * page_size - 1, 6 * page_size]).tolist() == [0, 7, 8, 8, 0]
    assert counts(pool) == (15 * page_size, 0, 5 * page_size)
    assert pool.stats.live == 5 * pool.page_size
    pool.free([one, two], after=None)
    pool.verify()
    pool.expect_idle()
    assert pool.stats == HostStats(20 * page_size, 20 * page_size, 0, 0, 20 * page_size)


def test_best_fit_and_fragments(make: Make) -> None:
    """The shortest free run that is long enough is used; where none is, several are, and positions go across them."""
    pool = make(12)
    ranges = pool.take([2, 1, 4, 1, 4], [1, 2, 3, 4, 5])
    pool.free([ranges[0], ranges[2], ranges[4]], after=None)
    assert pool.stats.largest_free_range == 4
    fit = pool.take(2, 6)[0]
    assert fit.table.tolist() == [[1, 2]]
    pieces = pool.take(7, 7)[0]
    assert sorted(pieces.table.tolist()) == [[4, 4], [9, 3]]
    assert pieces.locations().tolist() == [
        token for start, n in pieces.table.tolist() for token in range(start, start + n)
    ]
    assert pieces.locations(3, 2).tolist() == [pieces.table[0].sum() - 1, pieces.table[1, 0]]
    with pytest.raises(ArgumentError, match="expected positions inside of"):
        pieces.locations(5, 3)
    with pytest.raises(ArgumentError):
        pieces.locations(-1, 1)
    assert not pieces.starts.flags.writeable
    pool.free([fit, pieces, ranges[1], ranges[3]], after=None)
    assert pool.stats.largest_free_range == 12


def test_exhaustion_takes_nothing(make: Make) -> None:
    """Too few pages are an error that says how many are free and how many will be, and nothing is taken."""
    pool = make(4, 4)
    step = ManualStream()
    first = pool.take([8], [1])[0]
    second = pool.take([4], [2])[0]
    pool.free(first, after=step.record())
    with pytest.raises(PoolExhaustedError, match="the pending entries suffice") as caught:
        pool.take([4, 5], [3, 4])
    assert (caught.value.requested, caught.value.free, caught.value.pending) == (3, 1, 2)
    with pytest.raises(PoolExhaustedError, match="can never succeed"):
        pool.take(17, 3)
    with pytest.raises(PoolExhaustedError):
        pool.take([2**62] * 3, [3, 4, 5])  # a sum beyond int64
    assert counts(pool) == (4, 8, 4)
    step.complete()
    assert [len(one) for one in pool.take([4, 5], [3, 4])] == [4, 8]
    assert pool.owner_of(second.starts).tolist() == [2]


def test_free_behind_a_fence(make: Make) -> None:
    """What is freed behind a fence has no owner at once, and is handed out again when the fence is complete."""
    pool, step = make(2), ManualStream()
    ranges = pool.take(2, 1)[0]
    fence = step.record()
    pool.free(ranges, after=fence)
    assert counts(pool) == (0, 2, 0)
    assert pool.owner_of([1, 2]).tolist() == [0, 0]
    assert pool.reap() == 0
    pool.expect_idle()
    step.complete()
    assert pool.reap() == 2
    assert fence.waits == 0
    again = pool.take(2, 9)[0]
    assert again.generation > ranges.generation
    assert again.table.tolist() == ranges.table.tolist()


def test_misuse_of_ranges_is_refused(make: Make, rt: Runtime) -> None:
    """Runs are freed once, whole, in the pool that made them, and by who took them last; an error frees nothing."""
    pool, other = make(8), make(8)
    one, two = pool.take([2, 3], [1, 2])
    refused(Code.SLOT_DOUBLE_FREE, lambda: pool.free([one, one], after=None))
    with pytest.raises(ArgumentError, match="did not return"):
        pool.free(other.take(1, 1)[0], after=None)
    part = attrs.evolve(two, starts=two.starts, lengths=two.lengths - 1)
    refused(Code.SLOT_CONSERVATION, lambda: pool.free([one, part], after=None))
    assert counts(pool) == (3, 0, 5)
    pool.free(one, after=None)
    refused(Code.SLOT_DOUBLE_FREE, lambda: pool.free([two, one], after=None))
    again = pool.take(2, 3)[0]
    assert again.table.tolist() == one.table.tolist()
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.free([two, one], after=None))
    refused(Code.SLOT_STALE_HANDLE, lambda: pool.check_held(one, "look"))
    pool.check_held(two, "look")
    refused(Code.SLOT_OUT_OF_RANGE, lambda: pool.owner_of([9]))
    leak = refused(Code.SLOT_CONSERVATION, pool.expect_idle)
    assert "1" in str(leak)
    assert counts(pool) == (3, 0, 5)
    pool.verify()


@pytest.mark.parametrize(
    ("tokens", "owners", "error"),
    [(0, 1, ArgumentError), (-1, 1, ArgumentError), (1.5, 1, DtypeError), ([1, 2], [1], ShapeError)],
)
def test_takes_that_cannot_be_meant(make: Make, tokens: object, owners: object, error: type[Exception]) -> None:
    """At least one token each, whole numbers, one for each owner."""
    pool = make(8)
    with pytest.raises(error):
        pool.take(tokens, owners)
    assert counts(pool) == (8, 0, 0)
    assert pool.take([], []) == []


def test_pools_that_cannot_be_meant(rt: Runtime) -> None:
    """Sizes are positive, and layers have names of their own."""
    good: dict[str, Any] = {"num_pages": 2, "page_size": 1, "layers": 1, "item_shape": (2,), "dtype": torch.int64}
    for wrong in ({"num_pages": 0}, {"page_size": 0}, {"layers": 0}, {"layers": ["k", "k"]}, {"item_shape": (0,)}):
        with pytest.raises(ArgumentError):
            HostKVPool(rt, **{**good, **wrong})


def test_buffers_for_registration(make: Make) -> None:
    """Each buffer is one piece of memory: what is written at its address is what kernels of the device read."""
    pool = make(5, 4)
    buffers = pool.contiguous_buffers()
    assert [buffer.name for buffer in buffers] == ["0", "1"]
    for layer, buffer in enumerate(buffers):
        assert buffer.item_bytes == pool.item_bytes == 16
        assert buffer.nbytes == pool.location_capacity * 16 == 24 * 16
        assert buffer.address == buffer.memory.data_ptr()
        numbers(pool, layer)[7] = (layer, 42)
        assert pool.runtime.inspect(pool.buffers[layer])[7].tolist() == [layer, 42]
    first, second = buffers
    assert first.address + first.nbytes <= second.address or second.address + second.nbytes <= first.address


def test_late_write_is_found_when_handed_out(make: Make, full: None) -> None:
    """At `full` a write into free memory is found before it is handed out, wherever that is."""
    pool = make(8)
    ranges = pool.take([2, 1, 5], [1, 2, 3])
    pool.free([ranges[0], ranges[2]], after=None)
    numbers(pool, 1)[1] = 5
    # The two go into the short run although five are free elsewhere: each part is looked at, not the longest run alone.
    violation = refused(Code.TRANSFER_LATE_WRITE, lambda: pool.take([2, 1], [4, 5]))
    assert violation.slot == 1
    assert counts(pool) == (7, 0, 1)
    assert refused(Code.TRANSFER_LATE_WRITE, pool.verify).slot == 1


def test_late_write_behind_a_fence_is_no_fault(make: Make, full: None) -> None:
    """While its fence is open a writer may write; what it leaves is overwritten when the fence is complete."""
    pool, writer = make(4, 2), ManualStream()
    ranges = pool.take(4, 1)[0]
    pool.free(ranges, after=writer.record())
    numbers(pool)[2:6] = 7
    pool.verify()
    writer.complete()
    numbers(pool)[2:6] = 8
    pool.verify()
    pool.reap()
    pool.verify()
    numbers(pool)[3] = 9
    refused(Code.TRANSFER_LATE_WRITE, pool.verify)


def test_below_full_memory_is_left_alone(make: Make) -> None:
    """At `cheap` the pool neither reads nor writes its memory."""
    pool = make(2)
    with levels.checks("cheap"):
        before = invariants.times_checked[Code.TRANSFER_LATE_WRITE]
        ranges = pool.take(2, 1)[0]
        numbers(pool)[1] = 5
        pool.free(ranges, after=None)
        pool.take(2, 1)
        assert numbers(pool)[1].tolist() == [5, 5]
        assert invariants.times_checked[Code.TRANSFER_LATE_WRITE] == before


def test_one_thread_and_no_capture(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread is refused everywhere; no memory is made while a graph is captured."""
    pool = make(2)
    ranges = pool.take(1, 1)[0]
    for act in (
        lambda: pool.take(1, 1),
        lambda: pool.free(ranges, after=None),
        pool.reap,
        pool.verify,
        pool.expect_idle,
    ):
        assert isinstance(in_a_thread(act), OwnerThreadError)
    assert counts(pool) == (1, 0, 1)
    rt, module = fake_accelerator(monkeypatch)
    module.capturing = True
    with pytest.raises(CaptureError):
        HostKVPool(rt, 2, layers=1, item_shape=(1,), dtype=torch.int64)


def ranges(indices: set[int]) -> list[tuple[int, int]]:
    """The maximal intervals of a set: start and length."""
    found: list[tuple[int, int]] = []
    for index in sorted(indices):
        if found and found[-1][0] + found[-1][1] == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found


@given(size=st.integers(0, 30), data=st.data())
def test_is_a_set_that_hands_out_best_fits(size: int, data: st.DataObject) -> None:
    """What is taken was free, lies in one run where one run is long enough (the shortest such), and comes back."""
    pool, free, taken = FreeRanges(1, size), set(range(1, size + 1)), set[int]()
    for _ in range(data.draw(st.integers(0, 12), label="operations")):
        push: bool = data.draw(st.booleans(), label="push")
        if taken and push:
            back = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True), label="back")
            pool.push(np.array(back, dtype=np.int64))
            free |= set(back)
            taken -= set(back)
        else:
            n = data.draw(st.integers(0, len(free)), label="n")
            before = ranges(free)
            given_out = pool.top(n)
            assert pool.count == len(free), "looking takes nothing"
            pool.drop(n)
            numbers = given_out.tolist()
            assert given_out.dtype == np.int64
            assert len(set(numbers)) == len(numbers) == n
            assert set(numbers) <= free
            fitting = [length for _, length in before if length >= n]
            pieces = ranges_of(given_out)[1].tolist()
            if n and fitting:
                assert pieces == [n]
                assert next(length for start, length in before if start == numbers[0]) == min(fitting)
            elif n:
                longest = sorted((length for _, length in before), reverse=True)
                needed = next(k for k in range(1, len(longest) + 1) if sum(longest[:k]) >= n)
                assert len(pieces) <= needed
            free -= set(numbers)
            taken |= set(numbers)
        assert pool.entries().tolist() == sorted(free)
        assert pool.count == len(free)
        assert pool.largest == max((length for _, length in ranges(free)), default=0)


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 6))))
def test_ranges_expand_and_join_again(pieces: list[tuple[int, int]]) -> None:
    """Ranges expand to their indices in order, and joining those again names the same indices."""
    starts = np.array([start for start, _ in pieces], dtype=np.int64)
    lengths = np.array([length for _, length in pieces], dtype=np.int64)
    everything = [index for start, length in pieces for index in range(start, start + length)]
    assert arange_per_row(starts, lengths).tolist() == everything
    again = ranges_of(np.array(everything, dtype=np.int64))
    assert arange_per_row(*again).tolist() == everything
    assert (again[1] > 0).all()
    assert (again[0][1:] != again[0][:-1] + again[1][:-1]).all(), "neighbours in order are one range"


def test_memory_of_a_writer_waits_for_its_end(make: Make) -> None:
    """Ranges taken with `writer=` are free only when its fence is complete too, whatever they are freed behind."""
    pool, writer, reader = make(8), ManualStream(), ManualStream()
    written, plain = pool.take(2, 1, writer=writer.record()), pool.take(1, 2)
    assert written[0].writer is writer.last
    assert plain[0].writer is None
    pool.free([*written, *plain], after=reader.record())
    reader.complete()
    assert counts(pool) == (6, 2, 0)
    writer.complete()
    assert counts(pool) == (8, 0, 0)
    pool.free(pool.take(2, 1, writer=writer.record()), after=None)
    assert counts(pool) == (6, 2, 0)
    writer.complete()
    assert counts(pool) == (8, 0, 0)


def test_padding_of_the_host_tier_is_finite_at_full(rt: Runtime) -> None:
    """A NaN in page 0 of a host buffer, which masked positions read, is found by `verify` at `full`."""
    pool = HostKVPool(rt, 4, 2, layers=2, item_shape=(2,), dtype=torch.float32)
    pool._memory[1].host[1, 1] = float("nan")
    pool.verify()
    with levels.checks("full"):
        assert refused(Code.PAGE_ZERO_FINITE, pool.verify).row == 1
