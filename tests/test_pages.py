"""Page pools: each token has one location, each page as many references as holders, and lengths are in order."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import levels
from batchstate._allocator import Allocator
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    PoolExhaustedError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.hybrid import HybridSlotPool
from batchstate.indices import Locations, Slots
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from batchstate.selfcheck.machines.page_pool import PagePoolMachine
from batchstate.selfcheck.mutants.diffs import changed
from batchstate.testing.devices import open_device
from batchstate.testing.machine import Misuse
from batchstate.testing.models import snapshot_pages, snapshot_slots
from batchstate.violations import Code, Violation
from tests.doubles import Gate, in_a_thread, refused


@pytest.fixture
def slots(rt: Runtime) -> SlotPool:
    """8 slots."""
    return SlotPool(rt, 8)


@pytest.fixture
def pages(rt: Runtime, slots: SlotPool) -> PagePool:
    """12 pages of 4 tokens; a request has 16 at most."""
    return PagePool(rt, slots, 12, 4, max_tokens_per_request=16)


def test_extends_by_tokens(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """`extend` allocates whole pages and returns the place of each new token, request by request."""
    two = slots.take(2)
    first = pages.extend(two, [5, 2])
    assert pages.committed(two).tolist() == [5, 2]
    assert pages.allocated(two).tolist() == [8, 4]
    assert first.slots.tolist() == [1] * 5 + [2] * 2
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert first.counts.tolist() == [5, 2]
    table = pages.page_table
    expected = [int(table[s, p // 4]) * 4 + p % 4 for s, p in zip(first.slots, first.positions, strict=True)]
    assert isinstance(first.locations, Locations)
    assert first.locations.np.tolist() == expected
    second = pages.extend(two, [6, 2])
    assert second.positions.tolist() == [5]
    assert second.counts.tolist() == [1, 0]
    assert len(second) == 1


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("as_array", [False, True])
def test_advancing_is_extending(rt: Runtime, page_size: int, as_array: bool) -> None:
    """`advance` by one, as number or array, gives the tokens that a model in plain Python gives."""
    slots = SlotPool(rt, 4)
    pages = PagePool(rt, slots, 40, page_size, max_tokens_per_request=30)
    three = slots.take(3)
    pages.extend(three, [1, 4, 3])
    seen = set()
    for step in range(9):
        step_tokens = pages.advance(three, np.ones(3, np.int64) if as_array else 1)
        lengths = [1 + step, 4 + step, 3 + step]
        assert step_tokens.positions.tolist() == lengths
        assert step_tokens.slots.tolist() == three.np.tolist()
        for slot, position, token in zip(three.np, lengths, step_tokens.locations.np, strict=True):
            assert token == int(pages.page_table[slot, position // page_size]) * page_size + position % page_size
            assert token not in seen
            seen.add(int(token))
    assert pages.committed(three).tolist() == [10, 13, 12]
    pages.verify()


def test_no_token_of_page_zero(rt: Runtime, slots: SlotPool) -> None:
    """The tokens of page 0 are padding: they are never handed out, and every other one is, once."""
    pages = PagePool(rt, slots, 4, 4, max_tokens_per_request=16)
    tokens = pages.extend(slots.take(1), 16).locations.np
    assert sorted(tokens.tolist()) == list(range(4, 20))


def test_grows_without_committing(slots: SlotPool, pages: PagePool) -> None:
    """`grow` allocates ahead; `commit` moves the committed length up to what is allocated and no further."""
    two = slots.take(2)
    pages.grow(two, [6, 1])
    assert pages.committed(two).tolist() == [0, 0]
    assert pages.allocated(two).tolist() == [8, 4]
    pages.grow(two, 2)
    assert pages.allocated(two).tolist() == [8, 4]
    pages.commit(two, [8, 4])
    refused(Code.LENGTH_ORDER, lambda: pages.commit(two, [9, 4]))
    refused(Code.LENGTH_ORDER, lambda: pages.commit(two, [7, 4]))
    assert pages.committed(two).tolist() == [8, 4]
    assert pages.stats.live == 3


@pytest.mark.parametrize("lengths", [17, -1, [16, 2**62]])
def test_refuses_lengths_out_of_order(slots: SlotPool, pages: PagePool, lengths: object) -> None:
    """No request gets longer than its row, or shorter than nothing; nothing changes."""
    two = slots.take(2)
    before = pages.stats
    for action in (pages.extend, pages.grow, pages.commit, pages.truncate):
        refused(Code.LENGTH_ORDER, functools.partial(action, two, lengths))
    assert pages.stats == before
    pages.extend(two, 16)
    refused(Code.LENGTH_ORDER, lambda: pages.advance(two))
    refused(Code.LENGTH_ORDER, lambda: pages.advance(two, [0, 1]))
    refused(Code.LENGTH_ORDER, lambda: pages.advance(two, [2**63 - 1, 0]))
    refused(Code.LENGTH_ORDER, lambda: pages.extend(two, 15))
    pages.verify()


def test_running_out_changes_nothing(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """All requests get their pages or none does; the error says what is asked, free and pending."""
    gone, two = slots.take(1), slots.take(4)
    pages.extend(gone, 8)
    pages.release_requests(gone, after=Gate())
    pages.extend(two, 8)
    table, before = pages.page_table.copy(), pages.stats
    for action in (lambda: pages.extend(two, 12), lambda: pages.advance(two), lambda: pages.grow(two, 16)):
        with pytest.raises(PoolExhaustedError) as caught:
            action()
        assert (caught.value.free, caught.value.pending) == (2, 2)
        assert pages.stats == before
        assert np.array_equal(pages.page_table, table)
        assert pages.committed(two).tolist() == [8] * 4
    pages.verify()


def test_truncates(slots: SlotPool, pages: PagePool) -> None:
    """`truncate` takes rejected tokens back: whole pages beyond the new length go, the begun one stays."""
    two = slots.take(2)
    pages.extend(two, [10, 4])
    pages.grow(two, [16, 4])
    pages.truncate(two, [5, 0])
    assert pages.committed(two).tolist() == [5, 0]
    assert pages.allocated(two).tolist() == [8, 0]
    assert pages.stats.live == 2
    refused(Code.LENGTH_ORDER, lambda: pages.truncate(two, [6, 0]))
    assert not pages.page_table[two.np[1]].any()
    gate = Gate()
    pages.truncate(two, 0, after=gate)
    assert pages.stats.pending == 2
    gate.done = True
    assert pages.stats.free == 12


def test_shares_whole_pages(slots: SlotPool, pages: PagePool) -> None:
    """Requests that share a prefix have the same pages; a page is free when its last holder is gone."""
    source, targets = slots.take(1), slots.take(2)
    pages.extend(source, 11)
    shared = pages.share(source, targets, 8)
    assert shared.positions.tolist() == [*range(8), *range(8)]
    assert pages.committed(targets).tolist() == [8, 8]
    assert pages.page_table[targets.np, :2].tolist() == [pages.page_table[1, :2].tolist()] * 2
    assert (pages.stats.live, pages.stats.shared) == (3, 2)
    own = pages.advance(targets)
    assert len(set(own.locations.np.tolist())) == 2
    pages.release_requests(source)
    assert (pages.stats.live, pages.stats.shared) == (4, 2)
    pages.release_requests(targets.take([0]))
    assert (pages.stats.live, pages.stats.shared) == (3, 0)
    pages.release_requests(targets.take([1]))
    pages.expect_idle()
    pages.verify()


def test_refuses_to_write_into_a_shared_page(slots: SlotPool, pages: PagePool) -> None:
    """Who truncates into a shared page may not write on: others read it. When they are gone it may."""
    source, target = slots.take(1), slots.take(1)
    pages.extend(source, 8)
    pages.share(source, target, 8)
    pages.truncate(source, 6)
    shared_page = int(pages.page_table[source.np[0], 1])
    for action in (
        lambda: pages.advance(source),
        lambda: pages.advance(source, [3]),
        lambda: pages.extend(source, 9),
        lambda: pages.commit(source, 7),
    ):
        assert refused(Code.PAGE_OWNER, action).slot == shared_page
    assert pages.committed(source).tolist() == [6]
    pages.release_requests(target)
    pages.advance(source)


def test_leases_outlive_their_request(slots: SlotPool, pages: PagePool) -> None:
    """A lease keeps a prefix after its request, others begin with it, and it is released once."""
    source = slots.take(1)
    pages.extend(source, 9)
    lease = pages.hold(source, 8)
    assert pages.stats.leases == 1
    pages.release_requests(source)
    assert pages.stats.live == 2
    target = slots.take(1)
    pages.share(lease, target, 4)
    assert pages.page_table[target.np[0], 0] == lease.pages[0]
    refused(Code.LENGTH_ORDER, lambda: pages.share(lease, slots.take(1), 12))
    lease.release()
    assert (pages.stats.live, pages.stats.leases, lease.released) == (1, 0, True)
    refused(Code.SLOT_DOUBLE_FREE, lease.release)
    with pytest.raises(ArgumentError):
        pages.share(lease, slots.take(1), 4)
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 1
    pages.verify()


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_takes_pages_before_a_request(slots: SlotPool, pages: PagePool, level: str) -> None:
    """Pages are taken without a slot, a request begins with them, and owns them when the lease is released."""
    with levels.checks(level):
        lease = pages.take(3)
        assert (lease.pages.tolist(), lease.tokens, lease.released) == ([1, 2, 3], 12, False)
        assert (pages.stats.live, pages.stats.leases, pages.stats.shared) == (3, 1, 0)
        one = slots.take(1)
        shared = pages.share(lease, one, 8)
        assert shared.locations.np.tolist() == list(range(4, 12))
        assert pages.stats.shared == 2
        lease.release()
        assert (pages.stats.live, pages.stats.leases, pages.stats.shared) == (2, 0, 0)
        assert pages.advance(one).locations.np.tolist() == [12]  # the request's pages have no other holder any more
        pages.release_requests(one)
        pages.expect_idle()
        pages.verify()


def test_pages_come_back_behind_a_fence(pages: PagePool) -> None:
    """Taken pages that are given back behind a fence are free when it is complete, and not before."""
    lease, gate = pages.take(12), Gate()
    lease.release(after=gate)
    assert (pages.stats.pending, pages.stats.free, lease.released) == (12, 0, True)
    with pytest.raises(PoolExhaustedError, match="pending"):
        pages.take(1)
    gate.done = True
    assert sorted(pages.take(12).pages.tolist()) == list(range(1, 13))
    pages.verify()


def test_too_few_pages_take_none(slots: SlotPool, pages: PagePool) -> None:
    """A take that finds too few pages takes none of them and leaves no lease."""
    first = pages.take(8)
    with pytest.raises(PoolExhaustedError) as caught:
        pages.take(5)
    assert (caught.value.requested, caught.value.free, caught.value.pending) == (5, 4, 0)
    assert (pages.stats.free, pages.stats.leases) == (4, 1)
    none = pages.take(0)
    assert (none.pages.size, none.tokens) == (0, 0)
    none.release()
    first.release()
    pages.expect_idle()
    pages.verify()


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_misused_leases_of_taken_pages_are_refused(rt: Runtime, slots: SlotPool, pages: PagePool, level: str) -> None:
    """A second release, another pool's lease, half a page and a foreign thread are refused and change nothing."""
    other = PagePool(rt, slots, 4, 4, max_tokens_per_request=16, name="other")
    foreign, wrong = other.take(2), 0.5
    with levels.checks(level):
        lease = pages.take(2)
        lease.release()
        again = pages.take(2)  # the pages are another's by now
        refused(Code.SLOT_DOUBLE_FREE, lease.release)
        refused(Code.SLOT_DOUBLE_FREE, copy.copy(again).release)  # another object, which holds nothing
        with pytest.raises(ArgumentError, match="expected a fence"):
            again.release(after="now")  # type: ignore[arg-type]
        for given in (lease, foreign):
            with pytest.raises(ArgumentError, match="does not hold"):
                pages.share(given, slots.take(1), 4)
        with pytest.raises(ArgumentError, match="take: n is -1"):
            pages.take(-1)
        for bad in (wrong, True):
            with pytest.raises(DtypeError):
                pages.take(bad)  # type: ignore[arg-type]
        for act in (lambda: pages.take(1), again.release):
            assert isinstance(in_a_thread(act), OwnerThreadError)
        assert not again.released
        assert (pages.stats.live, pages.stats.leases, other.stats.live) == (2, 1, 2)
        pages.verify()


def test_pages_are_taken_under_capture(slots: SlotPool, pages: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking and releasing pages touches the host alone, so that a captured stream does not stand against it."""
    monkeypatch.setattr(type(pages.runtime), "capturing", property(lambda self: True))
    lease = pages.take(2)
    lease.release()
    assert pages.stats.free == 12


@pytest.mark.parametrize("num_pages", [100, 100_000])
def test_a_turnover_asks_only_its_own_pages(
    rt: Runtime, slots: SlotPool, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking and releasing looks at as many pages as are taken, whatever the size of the pool."""
    pages = PagePool(rt, slots, num_pages, 4, max_tokens_per_request=16)
    looked: list[int] = []
    original = Allocator.all_are

    def all_are(self: Allocator, indices: Any, state: bytes) -> bool:
        looked.append(indices.size)
        return original(self, indices, state)

    monkeypatch.setattr(Allocator, "all_are", all_are)
    pages.take(7).release()
    assert looked == [7, 7]


def test_a_leaked_lease_is_found(slots: SlotPool, pages: PagePool) -> None:
    """A lease that was not released keeps the pool from being idle."""
    source = slots.take(1)
    pages.extend(source, 4)
    pages.hold(source, 4)
    pages.release_requests(source)
    slots.expect_idle()
    assert "1 leaked" in str(refused(Code.SLOT_CONSERVATION, pages.expect_idle))


def test_pages_wait_for_every_reader(slots: SlotPool, pages: PagePool) -> None:
    """A page is free only when the forwards of ALL its former holders are complete, not only the last one's."""
    source, target = slots.take(1), slots.take(1)
    pages.extend(source, 4)
    pages.share(source, target, 4)
    early, late = Gate(), Gate()
    pages.release_requests(source, after=early)
    pages.release_requests(target)
    assert (pages.stats.free, pages.stats.pending) == (11, 1)
    early.done = True
    assert pages.stats.free == 12

    source, target = slots.take(1), slots.take(1)
    pages.extend(source, 4)
    pages.share(source, target, 4)
    early.done = False
    pages.release_requests(source, after=early)
    pages.release_requests(target, after=late)
    late.done = True
    assert pages.stats.pending == 1
    early.done = True
    assert pages.stats.pending == 0
    pages.verify()


def test_slots_with_pages_are_not_freed(slots: SlotPool, pages: PagePool) -> None:
    """A slot leaves with its pages or not at all."""
    two = slots.take(2)
    pages.extend(two, [4, 0])
    report = refused(Code.SLOT_CONSERVATION, lambda: slots.free(two))
    assert report.slot == two.np[0]
    assert slots.stats.live == 2
    pages.release(two)
    assert slots.stats.live == 2
    slots.free(two)
    slots.expect_idle()


def test_two_page_pools_leave_together(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """With pages in two pools `release_requests` of one refuses and changes nothing until the other is empty."""
    window = PagePool(rt, slots, 4, 4, max_tokens_per_request=8, name="window")
    one = slots.take(1)
    pages.extend(one, 8)
    window.extend(one, 4)
    refused(Code.SLOT_CONSERVATION, lambda: pages.release_requests(one))
    assert pages.committed(one).tolist() == [8]
    window.release(one)
    pages.release_requests(one)
    for pool in (slots, pages, window):
        pool.expect_idle()


@pytest.mark.parametrize("misuse", PagePoolMachine.MISUSES, ids=lambda misuse: str(misuse.name))
def test_misuse_is_refused(slots: SlotPool, pages: PagePool, misuse: Misuse[tuple[PagePool, Slots]]) -> None:
    """What cannot be meant is refused as the table of the machine says, and changes nothing."""
    one = slots.take(1)
    pages.extend(one, 5)
    before = snapshot_slots(slots), snapshot_pages(pages)
    with pytest.raises(BatchStateError) as caught:
        misuse.call((pages, one))
    assert getattr(caught.value, "code", type(caught.value)) in misuse.expected
    assert (snapshot_slots(slots), snapshot_pages(pages)) == before
    assert pages.committed(one).tolist() == [5]


def test_refuses_what_has_left_or_is_of_another_runtime(slots: SlotPool, pages: PagePool, device: str) -> None:
    """A request leaves once, and a pool serves slots of its own runtime."""
    one = slots.take(1)
    pages.extend(one, 4)
    pages.release_requests(one)
    refused(Code.SLOT_DOUBLE_FREE, lambda: pages.release_requests(one))
    refused(Code.SLOT_STALE_HANDLE, lambda: pages.extend(one, 4))
    with pytest.raises(DeviceError):
        PagePool(open_device(device), slots, 4, 4, max_tokens_per_request=4)


def test_no_rows_is_fine(slots: SlotPool, pages: PagePool) -> None:
    """Operations on no requests do nothing."""
    none = slots.take(0)
    before = pages.stats
    assert len(pages.advance(none)) == 0
    assert len(pages.extend(none, [])) == 0
    pages.grow(none, 5)
    pages.commit(none, 5)
    pages.truncate(none, 5)
    pages.release(none)
    pages.release_requests(none)
    assert pages.stats == before


def test_extension_writes_the_token_table(rt: Runtime, slots: SlotPool) -> None:
    """An extension becomes one table write [slot, position] -> token, into the pool's table or another."""
    table = slots.table("req_to_token", (16,), torch.int32, holds="location", host=True)
    pages = PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=table)
    two = slots.take(2)
    extension = pages.extend(two, [5, 2])
    entry = extension.entry()
    packed = rt.upload([entry.index, entry.values])
    table.apply(entry, packed.view(0), packed.view(1))
    on_device = rt.read_back(table.device)
    assert on_device[extension.slots, extension.positions].tolist() == extension.locations.np.tolist()
    assert np.count_nonzero(on_device) == 7
    other = slots.table("other", (16,), holds="page")
    refused(Code.UNIT_MISMATCH, lambda: extension.entry(other))
    with pytest.raises(ArgumentError):
        PagePool(rt, slots, 2, 4, max_tokens_per_request=4).advance(slots.take(0)).entry()
    with pytest.raises(ShapeError):
        PagePool(rt, slots, 2, 4, max_tokens_per_request=17, req_to_token=table)
    refused(Code.UNIT_MISMATCH, lambda: PagePool(rt, slots, 2, 4, max_tokens_per_request=4, req_to_token=other))


def test_nothing_touches_the_device(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """Planning of pages launches, copies and waits for nothing."""
    two = slots.take(2)
    before = rt.counters.snapshot()
    with levels.checks("cheap"):
        pages.extend(two, 5)
        pages.advance(two)
        pages.share(two.take([0]), slots.take(1), 4)
        pages.truncate(two, 2)
        pages.release_requests(two)
    assert rt.counters == before
    assert repr(pages) == "PagePool('pages', 12 pages of 4, free=11, pending=0, live=1)"


def test_works_with_hybrid_slots(rt: Runtime) -> None:
    """Pages, states and slot leave as one transaction."""
    hybrid = HybridSlotPool(rt, 4, states=8, states_per_slot=2)
    pages = PagePool(rt, hybrid, 8, 4, max_tokens_per_request=8)
    two = hybrid.take(2)
    pages.extend(two, 8)
    pages.release_requests(two)
    hybrid.expect_idle()
    pages.expect_idle()


@changed("kv._page_state:PageReferences._release_read", ">= self._readers[0][0]", "< 0")
def test_finds_a_forgotten_reader(slots: SlotPool, pages: PagePool) -> None:
    """A page freed while a former sharer's forward still reads it is found then, and else when it is handed out."""
    other, last = slots.take(1), slots.take(1)
    pages.extend(other, 4)
    pages.share(other, last, 4)
    pages.release_requests(other, after=Gate())
    refused(Code.SLOT_IN_FLIGHT, lambda: pages.release_requests(last))
    source, target = slots.take(1), slots.take(1)
    pages.extend(source, 4)
    pages.share(source, target, 4)
    pages.release_requests(source, after=Gate())
    with levels.checks("off"):
        pages.release_requests(target)
    refused(Code.SLOT_IN_FLIGHT, lambda: pages.extend(slots.take(1), 4))


def test_an_entry_of_the_pools_own_table(rt: Runtime) -> None:
    """An entry for the pool's token table equals the one that is checked again; a table too narrow is refused."""
    slots = SlotPool(rt, 4)
    table = slots.table("req_to_token", (8,), torch.int32, holds="location")
    pages = PagePool(rt, slots, 8, 2, max_tokens_per_request=8, req_to_token=table)
    assert pages.req_to_token is table
    extension = pages.extend(slots.take(2), [3, 5])
    quick, careful = extension.entry(), table.entry(extension.slots, extension.positions, extension.locations)
    assert quick.index.tolist() == careful.index.tolist()
    assert quick.values.tolist() == careful.values.tolist()
    assert quick.values.dtype == careful.values.dtype
    narrow = slots.table("narrow", (8,), torch.int8, holds="location")
    with pytest.raises(ValueOverflowError, match="req_to_token"):
        PagePool(rt, slots, 200, 2, max_tokens_per_request=8, req_to_token=narrow)
    with pytest.raises(DtypeError, match="req_to_token"):
        PagePool(
            rt,
            slots,
            8,
            2,
            max_tokens_per_request=8,
            req_to_token=slots.table("mask", (8,), torch.bool, holds="location"),
        )


@pytest.mark.parametrize("made_by", ["take", "extend", "share"])
def test_what_pools_hand_out_has_two_memories(rt: Runtime, made_by: str) -> None:
    """Slots and tokens come with sides of their own: a write into one is found, and does not reach the other."""
    with levels.checks("full"):
        slots = SlotPool(rt, 4)
        pages = PagePool(rt, slots, 8, 2, max_tokens_per_request=8)
        taken = slots.take(2)
        extension = pages.extend(taken, 4)
        shared = pages.share(taken.filter([0]), slots.take(1), 4)
        value = {"take": taken, "extend": extension.locations, "share": shared.locations}[made_by]
        host, device = value.np.tolist(), rt.inspect(value.device).tolist()
        assert host == device
        value.device.data[0] += 1
        assert value.np.tolist() == host
        with pytest.raises(Violation) as caught:
            value.check()
        assert caught.value.code in (Code.MIRROR_EQUAL, Code.MIRROR_FOREIGN_WRITE)


class Failing:
    """A fence that is not complete, and fails once `lost`."""

    def __init__(self) -> None:
        self.lost = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("device lost")
        return False

    def wait(self) -> None:
        raise AssertionError("the host waited")


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("operation", ["release", "release_requests", "truncate", "extend", "lease"])
def test_a_fence_that_fails_changes_nothing(slots: SlotPool, pages: PagePool, operation: str, level: str) -> None:
    """Fences are queried before rows, references and slots change: an error of one leaves the pool as it was."""
    with levels.checks(level):
        first, second = slots.take(1), slots.take(1)
        pages.extend(first, 8)
        pages.share(first, second, 8)
        lease = pages.hold(second, 8)
        fence = Failing()
        pages.release(first, after=fence)
        fence.lost = True
        actions: dict[str, Callable[[], object]] = {
            "release": lambda: pages.release(second),
            "release_requests": lambda: pages.release_requests(second),
            "truncate": lambda: pages.truncate(second, 4),
            "extend": lambda: pages.extend(second, 12),
            "lease": lease.release,
        }
        table, before = pages.page_table.copy(), pages.committed(second).tolist()
        with pytest.raises(RuntimeError, match="device lost"):
            actions[operation]()
        assert np.array_equal(pages.page_table, table)
        assert pages.committed(second).tolist() == before
        assert not lease.released
        pages.verify()
        fence.lost = False
        pages.release_requests(second)
        lease.release()
        slots.free(first)
        pages.expect_idle()
        pages.verify()


def test_finds_a_live_page_without_a_holder(slots: SlotPool, pages: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without holder and without reference is found while it is still counted as live."""
    one = slots.take(1)
    pages.extend(one, 4)
    monkeypatch.setattr(Allocator, "release", lambda self, pages, after, operation: None)
    pages.release(one)
    refused(Code.PAGE_OWNER, pages.verify)


@pytest.mark.parametrize("operation", ["extend", "grow", "advance", "commit", "release", "truncate"])
def test_a_handle_is_named_once_at_every_level(slots: SlotPool, pages: PagePool, operation: str) -> None:
    """A handle named twice is refused with checks off too: the two rows would get pages of each other."""
    one = slots.take(1)
    pages.extend(one, 4)
    twice = one.take([0, 0])
    act = getattr(pages, operation)
    with levels.checks("off"):
        refused(Code.SLOT_SHARED, lambda: act(twice) if operation == "release" else act(twice, 4))
    pages.verify()


def test_the_owners_of_an_extension_are_checked_again(slots: SlotPool, pages: PagePool) -> None:
    """The tokens of a request that has left are not written into the row of its successor."""
    table = slots.table("tokens", (16,), holds="location")
    one = slots.take(1)
    added = pages.extend(one, 4)
    pages.release_requests(one)
    slots.take(1)
    refused(Code.SLOT_STALE_HANDLE, lambda: added.entry(table))


def test_an_extension_cannot_be_changed(slots: SlotPool, pages: PagePool) -> None:
    """Slots, positions and counts of new tokens are read-only: they were checked as they are."""
    added = pages.extend(slots.take(2), 4)
    for array in (added.slots, added.positions, added.counts):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_tables_of_other_slots_take_no_tokens(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """A token table is indexed by the slots of the pool, and holds integers."""
    other = SlotPool(rt, 8).table("tokens", (16,), holds="location")
    with pytest.raises(ArgumentError, match="another pool"):
        PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=other)
    with pytest.raises(ArgumentError, match="made by the pool of these slots"):
        pages.extend(slots.take(1), 4).entry(other)
    halves = slots.table("tokens", (16,), torch.float16)
    with pytest.raises(DtypeError, match="tokens are integers"):
        PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=halves)


def test_refusals_say_what_was_asked_for(slots: SlotPool, pages: PagePool) -> None:
    """The report of a length names what the caller asked for, and the operation that does what is meant."""
    one, other = slots.take(1), slots.take(1)
    pages.extend(one, 5)
    told = {
        "17 tokens asked for, a request may have 16": lambda: pages.extend(one, 17),
        "`truncate` takes tokens back, `advance` adds": lambda: pages.extend(one, 3),
        "105 tokens asked for, a request may have 16": lambda: pages.advance(one, 100),
        "9 tokens are to be committed, 8 are allocated": lambda: pages.commit(one, 9),
        "truncation to 9 tokens, of 5": lambda: pages.truncate(one, 9),
        "a prefix of 8 tokens asked for, 5 are committed": lambda: pages.share(one, other, 8),
    }
    for words, action in told.items():
        assert words in str(refused(Code.LENGTH_ORDER, action))
    report = str(refused(Code.SLOT_CONSERVATION, lambda: slots.free(one)))
    assert "these slots still own 2 pages: 1" in report
    assert "pages.release_requests(slots, after=...)" in report
    with pytest.raises(ArgumentError, match="use slots with the pool that handed them out"):
        pages.extend(SlotPool(slots.runtime, 2).take(1), 3)


def test_the_last_slot_is_refused_like_any_other(rt: Runtime) -> None:
    """A request that is as long as one may be gets no further token, also in the last row of the table."""
    slots = SlotPool(rt, 2)
    pool = PagePool(rt, slots, 10, 4, max_tokens_per_request=4)
    taken = slots.take(2)
    pool.extend(taken, 4)
    for some in (taken, taken.filter([1]), taken.filter([0])):
        refused(Code.LENGTH_ORDER, lambda some=some: pool.advance(some))  # type: ignore[misc]
    assert pool.committed(taken).tolist() == [4, 4]


def test_a_lease_may_be_longer_than_a_request(rt: Runtime) -> None:
    """Pages for a cache are not of one request; what a request begins with has to fit its own length."""
    slots = SlotPool(rt, 2)
    pool = PagePool(rt, slots, 8, 2, max_tokens_per_request=4)
    lease, slot = pool.take(4), slots.take(1)
    pool.share(lease, slot, 4)
    assert pool.committed(slot).tolist() == [4]
    refused(Code.LENGTH_ORDER, lambda: pool.share(lease, slots.take(1), 6))
    lease.release()
    pool.release_requests(slot)
    pool.verify()


def test_a_fence_may_take_pages_itself(rt: Runtime) -> None:
    """A fence is code of the engine: what it takes while it is queried is not handed out a second time."""
    slots = SlotPool(rt, 4)
    pool = PagePool(rt, slots, 5, 2, max_tokens_per_request=8)
    first, second = slots.take(1), slots.take(1)
    pool.extend(first, 4)
    pool.share(first, second, 4)

    class Taking:
        asked = 0

        def query(self) -> bool:
            Taking.asked += 1
            if Taking.asked == 1:
                self.lease = pool.take(2)
            return False

        def wait(self) -> None:
            """Not called."""

    pool.release(second, after=Taking())
    with pytest.raises(PoolExhaustedError):
        pool.take(3)
    pool.verify()
    assert (pool.stats.free, pool.stats.live) == (1, 4)
