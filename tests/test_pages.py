"""Page pools: each token has one location, each page as many references as holders, and lengths are in order."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import levels
from batchstate.batch import Batch
from batchstate.columns import slot_column
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
from batchstate.kv.pages import PagePool
from batchstate.kv.prefix_cache import PrefixCache
from batchstate.mirror import Locations, Slots
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from batchstate.runtime import Runtime
from batchstate.violations import Code
from tests.doubles import Gate, in_a_thread, refused
from tests.selfcheck.machine import Misuse
from tests.selfcheck.machines.page_pool import PagePoolMachine
from tests.selfcheck.models import snapshot_pages, snapshot_slots


@pytest.fixture
def slots(rt: Runtime) -> SlotPool:
    """8 slots."""
    return SlotPool(rt, 8)


@pytest.fixture
def pages(rt: Runtime, slots: SlotPool) -> PagePool:
    """12 pages of 4 tokens; a request has 16 at most."""
    return PagePool(rt, slots, 12, 4, max_tokens_per_request=16)


class Holder(Batch):
    """A batch with nothing but slots."""

    slots = slot_column()


# Who has which page and which lengths, when pages are free, and that refusals change nothing: the model of the
# state machine `page_pool` compares all of it after every call.


@pytest.mark.parametrize("name", ["Extension", "Origin"])
@pytest.mark.parametrize("grown", [False, True])
def test_short_memory_commits_nothing(
    slots: SlotPool, pages: PagePool, monkeypatch: pytest.MonkeyPatch, name: str, grown: bool
) -> None:
    """What `extend` and `advance` return is made before they change anything: the call can be made again."""
    two = slots.take(2)
    pages.extend(two, 3)
    if grown:
        pages.grow(two, 12)
    before = snapshot_pages(pages), pages.committed(two).tolist()

    def fails(*_: object) -> None:
        raise MemoryError

    calls: tuple[Callable[[], object], ...] = (
        lambda: pages.extend(two, [9, 6]),
        lambda: pages.advance(two, [6, 3]),
    )
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(f"batchstate.kv.pages.{name}", fails)
            with pytest.raises(MemoryError):
                call()
        assert (snapshot_pages(pages), pages.committed(two).tolist()) == before
        pages.verify()
    assert pages.advance(two, [6, 3]).positions.tolist() == [3, 4, 5, 6, 7, 8, 3, 4, 5]
    slots.verify()


def test_an_extension_that_no_memory_holds_leaves_the_pool_good(rt: Runtime, slots: SlotPool) -> None:
    """The core makes its array of 2^46 numbers before it changes anything, and the pool serves on."""
    pages = PagePool(rt, slots, 2, 2**45, max_tokens_per_request=2**45)
    one = slots.take(1)
    with pytest.raises(MemoryError):
        pages.extend(one, 2**45)
    assert pages.committed(one).tolist() == pages.allocated(one).tolist() == [0]
    assert pages.extend(one, 4).locations.np.tolist() == [2**45 + at for at in range(4)]


def test_locations_of_positions(slots: SlotPool, pages: PagePool) -> None:
    """`locations` says where committed tokens of one request lie, as a typed value; others are refused."""
    one, two = slots.take(1), slots.take(1)
    places = [pages.extend(one, total).locations.np for total in (3, 7, 9) if pages.extend(two, total)]
    refused(Code.PAGE_UNWRITTEN, lambda: pages.locations(one, 0, 9))
    pages.commit(one, 9)
    found = pages.locations(one, 0, 9)
    assert isinstance(found, Locations)
    assert found.np.tolist() == np.concatenate(places).tolist()
    assert pages.locations(one, 4, 6).np.tolist() == found.np[4:6].tolist()
    assert pages.locations(one, 9, 9).np.size == 0
    refused(Code.LENGTH_ORDER, lambda: pages.locations(one, 0, 10))
    for source, first in ((one, 2), (slots.take(0), 0)):
        with pytest.raises(ArgumentError):
            pages.locations(source, first, first // 2)


@pytest.mark.parametrize("publish", ["share", "hold", "locations", "insert", "wait_written"])
def test_a_draft_models_memory_has_a_mark_of_its_own(slots: SlotPool, pages: PagePool, publish: str) -> None:
    """Pages that the target has written and the draft model has not are given to nobody; reports name its memory."""
    pages.register_kv(torch.zeros(13, 3, device=pages.runtime.device), memory="draft")
    cache = PrefixCache(pages)
    ways: dict[str, Callable[[Slots], Any]] = {
        "share": lambda source: pages.share(source, slots.take(1), 8),
        "hold": lambda source: pages.hold(source, 8),
        "locations": lambda source: pages.locations(source, 0, 8),
        "insert": lambda source: cache.insert(source, ["a", "b"]),
        "wait_written": pages.wait_written,
    }
    given, one = ways[publish], slots.take(1)
    pages.extend(one, 8)
    pages.commit(one, 8)
    broken = refused(Code.PAGE_UNWRITTEN, lambda: given(one))
    assert (broken.column, broken.expected, broken.actual) == ("draft", "at most 0, whose writes are launched", 8)
    pages.mark_written(one, 4, 8, memory="draft")  # its forward over the first chunk was left out
    refused(Code.PAGE_UNWRITTEN, lambda: given(one))
    pages.mark_written(one, [0], [5], memory="draft")
    refused(Code.PAGE_UNWRITTEN, lambda: given(one))
    pages.mark_written(one, 5, 8, memory="draft")
    pages.truncate(one, 7, after=None)
    pages.extend(one, 8)
    pages.commit(one, 8)
    assert refused(Code.PAGE_UNWRITTEN, lambda: given(one)).expected == "at most 7, whose writes are launched"
    pages.mark_written(one, 7, 8, memory="draft")
    given(one)
    pages.release_requests(one, after=None)
    successor = slots.take(1)
    pages.extend(successor, 8)
    pages.commit(successor, 8)
    assert refused(Code.PAGE_UNWRITTEN, lambda: given(successor)).column == "draft"
    pages.verify()


def test_pages_of_a_lease_have_a_mark_for_each_memory(slots: SlotPool, pages: PagePool) -> None:
    """What arrives for the target alone is not assigned, shared or held on; parts of a lease keep both marks."""
    pages.register_kv(memory="draft")
    lease = pages.take(2)
    pages.commit(lease, 8)
    for call in (lambda: pages.assign(lease, slots.take(1), 8), lambda: pages.share(lease, slots.take(1), 8)):
        assert refused(Code.PAGE_UNWRITTEN, call).column == "draft"
    pages.mark_written(lease, 4, 8, memory="draft")  # the first page has not come
    pages.mark_written(lease, 0, 4, memory="draft")
    front, back = lease.split(4)
    source, one = [front, back], slots.take(1)
    assert refused(Code.PAGE_UNWRITTEN, lambda: pages.share(source, one, 8)).column == "draft"
    assert pages.share(front, one, 4).locations.np.size == 4
    pages.mark_written(back, 0, 4, memory="draft")
    two = slots.take(1)
    pages.share(source, two, 8)
    pages.rebase(one, front, 4, after=None)
    third = pages.hold(two, 8)
    pages.assign(pages.hold(two, 4), slots.take(1), 4)
    assert third.tokens == 8
    pages.verify()


def test_marks_that_cannot_be_are_refused(slots: SlotPool, pages: PagePool) -> None:
    """No memory of that name, one that is registered late, tokens that are not there: nothing changes."""
    pages.register_kv(memory="draft")
    one, lease = slots.take(1), pages.take(1)
    pages.extend(one, 8)
    for memory in ("kv", "other"):
        with pytest.raises(ArgumentError, match=rf"memory '{memory}'; others than forwards write \['draft'\]"):
            pages.mark_written(one, 0, 8, memory=memory)
    with pytest.raises(ArgumentError, match="memory 'late' while 3 pages are in use or cached"):
        pages.register_kv(memory="late")
    pages.register_kv(memory="draft")  # further buffers of it
    for first, stop in ((0, 9), (-1, 8), (5, 4)):
        refused(Code.LENGTH_ORDER, lambda: pages.mark_written(one, first, stop, memory="draft"))  # noqa: B023
    refused(Code.LENGTH_ORDER, lambda: pages.mark_written(lease, 0, 5, memory="draft"))
    assert {name: int(mark[one.np[0]]) for name, mark in pages.writes.marks.items()} == {"kv": 0, "draft": 0}
    assert lease._written == {"kv": 0, "draft": 0}


@pytest.mark.parametrize("publish", ["share", "hold", "locations", "wait_written"])
def test_only_what_is_written_is_given_to_others(slots: SlotPool, pages: PagePool, publish: str) -> None:
    """Tokens whose write was not launched are refused at `cheap`: allocated, taken back, or of a slot's next owner."""

    def given(source: Slots) -> object:
        if publish == "share":
            return pages.share(source, slots.take(1), 8)
        arguments = {"hold": (8,), "locations": (0, 8), "wait_written": ()}[publish]
        found: object = getattr(pages, publish)(source, *arguments)
        return found

    one = slots.take(1)
    pages.extend(one, 8)
    refused(Code.PAGE_UNWRITTEN, lambda: given(one))
    pages.commit(one, 8)
    given(one)
    if publish in ("locations", "wait_written"):  # else the pages have another holder now
        pages.truncate(one, 5, after=None)
        pages.extend(one, 8)
        refused(Code.PAGE_UNWRITTEN, lambda: given(one))
    pages.release_requests(one, after=None)
    successor = slots.take(1)
    pages.extend(successor, 8)
    refused(Code.PAGE_UNWRITTEN, lambda: given(successor))
    with levels.checks("off"):
        given(successor)


def test_pages_taken_for_a_cache_are_written_before_they_are_shared(slots: SlotPool, pages: PagePool) -> None:
    """A lease of pages that KV arrives on is shared as far as it was committed, and no further."""
    lease = pages.take(3)
    refused(Code.PAGE_UNWRITTEN, lambda: pages.share(lease, slots.take(1), 4))
    pages.commit(lease, 8)
    pages.share(lease, slots.take(1), 8)
    refused(Code.PAGE_UNWRITTEN, lambda: pages.share(lease, slots.take(1), 12))
    refused(Code.LENGTH_ORDER, lambda: pages.commit(lease, 13))
    refused(Code.LENGTH_ORDER, lambda: pages.commit(lease, -1))
    lease.release(after=None)
    with pytest.raises(ArgumentError, match="does not hold"):
        pages.commit(lease, 12)


def test_pages_may_come_back_to_a_slot_as_shared_ones(slots: SlotPool, pages: PagePool) -> None:
    """A new request shares the pages that the former one of its slot had alone: `verify` has nothing to report.

    Its leaving is noted, and refuses all that was derived before. In one request the further holder has to be noted.
    """
    former, other = slots.take(1), slots.take(1)
    pages.extend(former, 8)
    pages.commit(former, 8)
    slots.verify()
    before = pages.page_table[former.np].tolist()
    pages.release_requests(former, after=None)
    pages.extend(other, 8)
    pages.commit(other, 8)
    new = slots.take(1)
    pages.share(other, new, 8)
    assert (new.np.tolist(), pages.page_table[new.np].tolist()) == (former.np.tolist(), before)
    slots.verify()
    pages.release_requests(other, after=None)
    slots.verify()
    noted = pages.shares.rows.copy()
    pages.hold(new, 8)
    pages.shares.rows[:] = noted
    refused(Code.DERIVED_STALE, slots.verify)


def test_a_reader_on_another_stream_waits_for_the_writer(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """On the writer's stream nothing waits; on another the device waits once, also for a prefix that was shared."""
    writer, reader = rt.stream("writer"), rt.stream("reader")
    one, two, three = slots.take(1), slots.take(1), slots.take(1)
    pages.extend(one, 8)
    with rt.use(writer):
        pages.commit(one, 8)
        pages.wait_written(one)
        lease = pages.hold(one, 8)
        pages.share(one, two, 4)
        pages.share(lease, three, 8)
    assert rt.counters.stream_waits == 0
    for slot, waits in ((one, 1), (two, 2), (three, 3)):
        with rt.use(reader):
            pages.wait_written(slot)
        assert rt.counters.stream_waits == waits
    fresh = slots.take(1)
    pages.extend(fresh, 4)
    with rt.use(reader):  # nothing was written before
        pages.commit(fresh, 4)
        pages.wait_written(fresh)
        assert rt.counters.stream_waits == 3
        pages.extend(three, 9)
        pages.commit(three, 9)  # behind the writes on the other stream
        assert rt.counters.stream_waits == 4
        pages.wait_written(three)
    assert rt.counters.stream_waits == 4
    with rt.use(writer):
        pages.wait_written(three)
    assert (rt.counters.stream_waits, rt.counters.forced_syncs, rt.counters.fence_waits) == (5, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rows", ["locations", "pages"])
def test_padding_of_registered_kv_is_finite_at_full(
    rt: Runtime, pages: PagePool, dtype: torch.dtype, rows: str
) -> None:
    """A NaN in page 0 of KV memory is found at `full`; one on a page of a request is that request's."""
    per_page = 1 if rows == "locations" else 4
    kv = rt.device_zeros((pages.location_capacity // per_page, per_page, 2), dtype)
    pages.register_kv(kv, rt.device_zeros((13, 3), torch.float32))
    kv[4 // per_page].fill_(float("nan") if dtype.is_floating_point else 7)
    with levels.checks("full"):
        pages.check_kv()
    kv[0, 0, 1] = float("inf") if dtype.is_floating_point else 7
    pages.check_kv()
    with levels.checks("full"):
        if dtype.is_floating_point:
            refused(Code.PAGE_ZERO_FINITE, pages.check_kv)
        else:
            pages.check_kv()
    for wrong in (torch.zeros(5), torch.zeros(())):
        with pytest.raises((ShapeError, DeviceError)):
            pages.register_kv(wrong)


def test_too_few_pages_take_none(slots: SlotPool, pages: PagePool) -> None:
    """A take that finds too few pages takes none of them and leaves no lease."""
    first = pages.take(8)
    with pytest.raises(PoolExhaustedError) as caught:
        pages.take(5)
    assert (caught.value.requested, caught.value.free, caught.value.pending) == (5, 4, 0)
    with pytest.raises(PoolExhaustedError):
        pages.take(2**63)  # more than a number of the core holds
    assert (pages.stats.free, pages.stats.leases) == (4, 1)
    none = pages.take(0)
    assert (none.pages.size, none.tokens) == (0, 0)
    none.release(after=None)
    first.release(after=None)
    pages.expect_idle()
    pages.verify()


def test_pending_pages_of_leases_are_traced_to_their_fence(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """`pending` has pages of requests and of leases, with fence and step, and the error of the pool names it."""
    request, lease, forward, stuck = slots.take(1), pages.take(2), Gate(), Gate()
    pages.extend(request, 5)
    of_lease, of_request = lease.pages.tolist(), pages.pages_of(request).np.tolist()
    lease.release(after=stuck)
    rt.next_step()
    pages.release_requests(request, after=forward)
    asked = stuck.asked
    groups = [(group.pages.tolist(), group.fence, group.step) for group in pages.pending()]
    assert groups == [(of_lease, stuck, rt.step - 1), (of_request, forward, rt.step)]
    assert stuck.asked == asked
    for _ in range(rt.steps_in_flight):
        rt.next_step()
    with pytest.raises(PoolExhaustedError, match=r"since step 0\n.*recorded behind: `PagePool.pending\(\)`"):
        pages.take(9)
    assert isinstance(in_a_thread(pages.pending), OwnerThreadError)


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_misused_leases_of_taken_pages_are_refused(rt: Runtime, slots: SlotPool, pages: PagePool, level: str) -> None:
    """A second release, another pool's lease, half a page and a foreign thread are refused and change nothing."""
    other = PagePool(rt, slots, 4, 4, max_tokens_per_request=16, name="other")
    foreign = other.take(2)
    with levels.checks(level):
        lease = pages.take(2)
        lease.release(after=None)
        again = pages.take(2)  # the pages are another's by now
        refused(Code.SLOT_DOUBLE_FREE, lambda: lease.release(after=None))
        refused(
            Code.SLOT_DOUBLE_FREE, lambda: copy.copy(again).release(after=None)
        )  # another object, which holds nothing
        for given in (lease, foreign):
            with pytest.raises(ArgumentError, match="does not hold"):
                pages.share(given, slots.take(1), 4)
        for act in (lambda: pages.take(1), lambda: again.release(after=None)):
            assert isinstance(in_a_thread(act), OwnerThreadError)
        assert not again.released
        assert (pages.stats.live, pages.stats.leases, other.stats.live) == (2, 1, 2)
        pages.verify()


def test_pages_are_taken_under_capture(slots: SlotPool, pages: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking and releasing pages touches the host alone, so that a captured stream does not stand against it."""
    monkeypatch.setattr(type(pages.runtime), "capturing", property(lambda self: True))
    lease = pages.take(2)
    lease.release(after=None)
    assert pages.stats.free == 12


def test_pages_of_every_pool_leave_with_their_request(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """`release_requests` of any pool gives back the pages of all pools behind one fence; `free` alone is refused."""
    window = PagePool(rt, slots, 4, 4, max_tokens_per_request=8, name="window")
    one, two = slots.take(1), slots.take(1)
    for pool, total in ((pages, 8), (window, 4)):
        pool.extend(Slots.cat([one, two]), total)
    refused(Code.SLOT_CONSERVATION, lambda: slots.free(one, after=None))
    assert [pages.committed(one).tolist(), window.committed(one).tolist()] == [[8], [4]]
    forward = Gate()
    pages.release_requests(one, after=forward)
    slots.release_requests(two, after=forward)
    assert (slots.stats.pending, pages.stats.pending, window.stats.pending) == (2, 4, 2)
    forward.done = True
    for all_of_it in (slots, pages, window):
        all_of_it.expect_idle()
        assert not all_of_it.stats.pending


def test_clear_names_the_fence_that_it_would_ignore(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """A clear behind a forward in flight is refused and says which; then slots and pages come in order, from 1."""
    window = PagePool(rt, slots, 4, 4, max_tokens_per_request=8, name="window")
    several = slots.take(3)
    pages.extend(several, 8)
    pages.commit(several, 8)
    window.extend(several.take([0]), 8)
    extension = window.extend(several.take([1]), 3)
    lease, forward = pages.hold(several.take([1]), 4), Gate()
    window.release(several.take([0]), after=forward)
    broken = refused(Code.SLOT_IN_FLIGHT, slots.clear)
    assert "Gate" in str(broken)
    assert "step 0" in str(broken)
    assert (slots.stats.live, pages.stats.leases, window.stats.pending) == (3, 1, 2)
    forward.done = True
    slots.clear()
    assert lease.released
    assert (slots.stats.free, pages.stats.free, window.stats.free) == (8, 12, 4)
    anew = slots.take(2)
    assert anew.np.tolist() == [1, 2]
    for pool in (pages, window):
        pool.extend(anew, 4)
        assert pool.page_table[1:3, 0].tolist() == [1, 2]
    refused(Code.SLOT_STALE_HANDLE, lambda: pages.advance(several.take([0])))
    refused(Code.DERIVED_STALE, lambda: extension.locations)
    with pytest.raises(ArgumentError):
        pages.share(lease, slots.take(1), 4)


def test_a_clear_waits_for_readers_of_shared_pages(slots: SlotPool, pages: PagePool) -> None:
    """A page that a former sharer's forward still reads is not given back by a clear, though its holder is live."""
    one, two, forward = slots.take(1), slots.take(1), Gate()
    pages.extend(one, 4)
    pages.commit(one, 4)
    pages.share(one, two, 4)
    pages.release(two, after=forward)
    refused(Code.SLOT_IN_FLIGHT, slots.clear)
    forward.done = True
    slots.clear()
    assert (slots.stats.free, pages.stats.free) == (8, 12)


def test_pages_before_a_window_are_given_back(slots: SlotPool, pages: PagePool) -> None:
    """`truncate(first=)` releases whole pages in front behind a fence; the tokens that stay keep positions, places."""
    one, two, forward = slots.take(1), slots.take(1), Gate()
    both = Slots.cat([one, two])
    extension = pages.extend(both, [11, 6])
    pages.commit(both, [11, 6])
    kept = pages.locations(one, 8, 11).np.tolist()
    pages.truncate(both, first=[9, 3], after=forward)
    assert (pages.stats.pending, pages.stats.live) == (2, 3)
    assert pages.first_positions(both).tolist() == [8, 0]
    assert pages.committed(both).tolist() == [11, 6]
    assert pages.allocated(both).tolist() == [12, 8]
    assert pages.page_table[one.np[0], :3].tolist() == [0, 0, kept[0] // 4]
    assert len(pages.pages_of(both)) == 3
    assert pages.locations(one, 8, 11).np.tolist() == kept
    refused(Code.PAGE_RELEASED, lambda: pages.locations(one, 7, 11))
    refused(Code.PAGE_RELEASED, lambda: pages.hold(one, 8))
    refused(Code.PAGE_RELEASED, lambda: pages.share(one, slots.take(1), 4))
    refused(Code.DERIVED_STALE, lambda: extension.locations)
    refused(Code.LENGTH_ORDER, lambda: pages.truncate(one, 7, after=None))
    assert pages.advance(both).positions.tolist() == [11, 6]
    pages.truncate(one, 9, first=9, after=None)
    assert pages.committed(one).tolist() == [9]
    forward.done = True
    assert pages.stats.pending == 0
    pages.release(one, after=None)
    assert pages.first_positions(one).tolist() == [0]
    assert pages.extend(one, 5).positions.tolist() == [0, 1, 2, 3, 4]


def test_the_chain_of_a_window_and_its_states(rt: Runtime, slots: SlotPool, pages: PagePool, full: None) -> None:
    """`req_to_token` -> `full_to_swa` -> `state_loc`, as DeepSeek V4 has it: a link that is broken is named."""
    swa = PagePool(rt, slots, 12, 4, max_tokens_per_request=16, name="swa")
    states = PagePool(rt, slots, 12, 4, max_tokens_per_request=16, name="states")
    req_to_token = slots.table("req_to_token", (16,), holds="location")
    full_to_swa = pages.table("full_to_swa", of=swa)
    state_loc = swa.table("state_loc", of=states)
    one, two = slots.take(1), slots.take(1)
    states.extend(two, 3)  # so that numbers differ
    swa.extend(Slots.cat([two, one]), [9, 10])
    extension, last = pages.extend(one, 10), states.extend(one, 10).locations
    swa.commit(one, 10)
    pages.commit(one, 10)
    here, there = extension.locations, swa.locations(one, 0, 10)
    for write in (
        extension.entry(req_to_token),
        full_to_swa.entry(here, None, there),
        state_loc.entry(there, None, last),
    ):
        write.launch()
    row = rt.inspect(req_to_token.device_for(one))[one.np[0], :10]
    chained = rt.inspect(state_loc.device_for(there))[rt.inspect(full_to_swa.device_for(here))[row]]
    assert chained.tolist() == last.np.tolist()
    pages.verify()
    swa.verify()
    for wrong in (here, last):  # places of another pool
        with pytest.raises(ArgumentError):
            full_to_swa.entry(here, None, wrong)
    refused(Code.SLOT_OUT_OF_RANGE, lambda: full_to_swa.entry(here, None, [swa.location_capacity] * 10))
    full_to_swa.write(here.take([3]), None, there.np[4:5])  # the place of the next token
    broken = refused(Code.TABLE_LINK, lambda: pages.advance(one))
    assert (broken.slot, broken.actual, broken.column) == (here.np[3], there.np[4], "full_to_swa")
    full_to_swa.write(here.take([3]), None, there.take([3]))
    begins = there.np[0]
    swa.truncate(one, first=6, after=None)
    assert refused(Code.TABLE_LINK, lambda: pages.advance(one)).actual == begins
    full_to_swa.clear(here.take([0, 1, 2, 3]))
    pages.advance(one)
    states.truncate(one, first=9, after=None)
    assert refused(Code.TABLE_LINK, lambda: swa.advance(one)).column == "state_loc"


@pytest.mark.parametrize(
    "options", [{"by": "page"}, {"shape": (2,)}, {"holds": "page"}, {"of": "itself"}, {"of": "others"}, {"of": 3}]
)
def test_maps_to_what_cannot_be_mapped_are_refused(
    rt: Runtime, slots: SlotPool, pages: PagePool, options: dict[str, Any]
) -> None:
    """A map goes from locations to those of another page pool of the same slots and page size."""
    swa = PagePool(rt, slots, 4, 4, max_tokens_per_request=16, name="swa")
    small = PagePool(rt, slots, 4, 2, max_tokens_per_request=16, name="small")
    strangers = PagePool(rt, SlotPool(rt, 8), 4, 4, max_tokens_per_request=16, name="strangers")
    named = {"itself": pages, "others": strangers, None: swa, 3: small}
    arguments = {**options, "of": named[options.get("of")]}
    with pytest.raises(ArgumentError, match="map locations"):
        pages.table("map", **arguments)


@pytest.mark.parametrize("misuse", PagePoolMachine.MISUSES, ids=lambda misuse: str(misuse.name))
def test_misuse_is_refused(slots: SlotPool, pages: PagePool, misuse: Misuse[tuple[PagePool, Slots]]) -> None:
    """Calls that cannot be meant are refused as the table of the machine says, and change nothing."""
    one = slots.take(1)
    pages.extend(one, 5)
    before = snapshot_slots(slots), snapshot_pages(pages)
    with pytest.raises(BatchStateError) as caught:
        misuse.call((pages, one))
    assert getattr(caught.value, "code", type(caught.value)) in misuse.expected
    assert (snapshot_slots(slots), snapshot_pages(pages)) == before
    assert pages.committed(one).tolist() == [5]


def test_no_rows_is_fine(slots: SlotPool, pages: PagePool) -> None:
    """Operations on no requests do nothing."""
    none = slots.take(0)
    before = pages.stats
    assert len(pages.advance(none)) == 0
    assert len(pages.extend(none, [])) == 0
    pages.grow(none, 5)
    pages.commit(none, 5)
    pages.truncate(none, 5, after=None)
    pages.release(none, after=None)
    pages.release_requests(none, after=None)
    assert pages.stats == before


def test_extension_writes_the_token_table(rt: Runtime, slots: SlotPool) -> None:
    """An extension becomes one table write [slot, position] -> location, equal to one that is checked again."""
    table = slots.table("req_to_token", (16,), torch.int32, holds="location", host=True)
    pages = PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=table)
    assert pages.req_to_token is table
    extension = pages.extend(slots.take(2), [5, 2])
    quick = extension.entry()
    with levels.checks("full"):
        careful = extension.entry()
    assert quick.index.tolist() == careful.index.tolist()
    assert quick.values.tolist() == careful.values.tolist()
    assert quick.values.dtype == careful.values.dtype
    quick.launch()
    on_device = rt.read_back(table.memory)
    assert on_device[extension.slots, extension.positions].tolist() == extension.locations.np.tolist()
    assert np.count_nonzero(on_device) == 12


def test_a_row_names_no_place_of_another_request(rt: Runtime, slots: SlotPool) -> None:
    """Up to the end of its last page a row is the request's own, whatever the slot's last owner left behind it."""
    table = slots.table("req_to_token", (14,), torch.int32, holds="location", host=True)
    pages = PagePool(rt, slots, 12, 4, max_tokens_per_request=14, req_to_token=table)
    other = slots.take(2)
    pages.extend(other, 14).entry().launch()
    pages.release_requests(other, after=None)
    slots.take(1)  # not in the order in which they were freed
    here = slots.take(1)
    for n in (1, 1, 0, 3, 1, 5):
        pages.advance(here, n).entry().launch()
        length = int(pages.committed(here)[0])
        own = {int(page) for page in pages.pages_of(here).np}
        row = rt.inspect(table.device_for(here))[here.np[0]]
        assert {int(location) // 4 for location in row[: -(-length // 4) * 4]} == own
    both = here.merge(slots.take(1))
    extension = pages.advance(both, [1, 0])
    extension.entry().launch()
    assert table.written(both).tolist() == [True, False]
    table.check()


@pytest.mark.usefixtures("full")
def test_entries_of_one_page_go_together(rt: Runtime, slots: SlotPool) -> None:
    """Two extensions of one request may be uploaded at once: what both write, they write alike."""
    table = slots.table("req_to_token", (16,), torch.int32, holds="location", host=True)
    pages = PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=table)
    batch = Holder.build(rt, slots=slots.take(2))
    batch.upload(writes=[pages.extend(batch.slots, 2).entry(), pages.advance(batch.slots, [1, 3]).entry()])
    expected = pages.page_table[batch.slots.np][:, [0, 0, 0, 0]] * 4 + np.arange(4)
    assert rt.inspect(table.device_for(batch.slots))[batch.slots.np, :4].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("tokens", "dtype", "holds", "num_pages", "expected", "match"),
    [
        (16, torch.int32, "page", 12, Code.UNIT_MISMATCH, "page"),
        (15, torch.int32, "location", 12, ShapeError, r"rows of at least 16 locations, got shape \[15\]"),
        (16, torch.int8, "location", 200, ValueOverflowError, "req_to_token"),
        (16, torch.bool, "location", 12, DtypeError, "req_to_token"),
        (16, torch.float16, None, 12, DtypeError, "expected integers, got float16"),
    ],
)
def test_a_token_table_holds_locations(
    rt: Runtime,
    slots: SlotPool,
    tokens: int,
    dtype: torch.dtype,
    holds: str | None,
    num_pages: int,
    expected: type[Exception] | Code,
    match: str,
) -> None:
    """Integers that can name every location, one for each token of a request: no other table becomes one."""
    table = slots.table("odd", (tokens,), dtype, holds=holds)
    with pytest.raises(BatchStateError, match=match) as caught:
        PagePool(rt, slots, num_pages, 4, max_tokens_per_request=16, req_to_token=table)
    assert getattr(caught.value, "code", type(caught.value)) == expected


def test_nothing_touches_the_device(rt: Runtime, slots: SlotPool, pages: PagePool) -> None:
    """Planning of pages launches, copies and waits for nothing."""
    two = slots.take(2)
    before = rt.counters.snapshot()
    with levels.checks("cheap"):
        pages.extend(two, 5)
        pages.advance(two)
        pages.commit(two, 6)
        pages.share(two.take([0]), slots.take(1), 4)
        pages.truncate(two, 2, after=None)
        pages.release_requests(two, after=None)
    assert rt.counters == before
    assert repr(pages) == "PagePool('pages', 12 pages of 4, free=11, pending=0, live=1)"


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
@pytest.mark.parametrize("operation", ["release", "truncate", "extend", "lease"])
def test_a_fence_that_fails_changes_nothing(slots: SlotPool, pages: PagePool, operation: str, level: str) -> None:
    """Fences are queried before rows, references and slots change: an error of one leaves the pool as it was."""
    with levels.checks(level):
        first, second = slots.take(1), slots.take(1)
        pages.extend(first, 8)
        pages.commit(first, 8)
        pages.share(first, second, 8)
        lease = pages.hold(second, 8)
        fence = Failing()
        pages.release(first, after=fence)
        fence.lost = True
        actions: dict[str, Callable[[], object]] = {
            "release": lambda: pages.release(second, after=None),
            "truncate": lambda: pages.truncate(second, 4, after=None),
            "extend": lambda: pages.extend(second, 12),
            "lease": lambda: lease.release(after=None),
        }
        table, before = pages.page_table.copy(), pages.committed(second).tolist()
        with pytest.raises(RuntimeError, match="device lost"):
            actions[operation]()
        assert np.array_equal(pages.page_table, table)
        assert pages.committed(second).tolist() == before
        assert not lease.released
        pages.verify()
        fence.lost = False
        pages.release_requests(second, after=None)
        lease.release(after=None)
        slots.free(first, after=None)
        pages.expect_idle()
        pages.verify()


@pytest.mark.parametrize("operation", ["extend", "grow", "advance", "commit", "release", "truncate"])
def test_a_handle_is_named_once_at_every_level(slots: SlotPool, pages: PagePool, operation: str) -> None:
    """A handle named twice is refused with checks off too: the two rows would get pages of each other."""
    one = slots.take(1)
    pages.extend(one, 4)
    twice = one.take([0, 0])
    act = getattr(pages, operation)
    with levels.checks("off"):
        arguments = {} if operation in ("extend", "grow", "commit", "advance") else {"after": None}
        refused(Code.SLOT_SHARED, lambda: act(*([twice] if operation == "release" else [twice, 4]), **arguments))
    pages.verify()


def test_the_owners_of_an_extension_are_checked_again(slots: SlotPool, pages: PagePool) -> None:
    """The tokens of a request that has left are not written into the row of its successor."""
    table = slots.table("tokens", (16,), holds="location")
    one = slots.take(1)
    added = pages.extend(one, 4)
    pages.release_requests(one, after=None)
    slots.take(1)
    refused(Code.SLOT_STALE_HANDLE, lambda: added.entry(table))


def test_an_extension_cannot_be_changed(slots: SlotPool, pages: PagePool) -> None:
    """Slots, positions and counts of new tokens, and pages of a lease, are read-only: they were checked as they are."""
    added = pages.extend(slots.take(2), 4)
    for array in (added.slots, added.positions, added.counts, pages.take(1).pages):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_tables_of_other_slots_take_no_tokens(rt: Runtime, device: str, slots: SlotPool, pages: PagePool) -> None:
    """A token table is indexed by the slots of the pool, and a pool of pages serves slots of its own runtime."""
    other = SlotPool(rt, 8).table("tokens", (16,), holds="location")
    added = pages.extend(slots.take(1), 4)
    with pytest.raises(ArgumentError, match="another pool"):
        PagePool(rt, slots, 12, 4, max_tokens_per_request=16, req_to_token=other)
    with pytest.raises(ArgumentError, match="made by the pool of these slots"):
        added.entry(other)
    with pytest.raises(ArgumentError):
        added.entry()  # these pages have no table
    refused(Code.UNIT_MISMATCH, lambda: added.entry(slots.table("other", (16,), holds="page")))
    with pytest.raises(DeviceError):
        PagePool(open_device(device), slots, 4, 4, max_tokens_per_request=4)


def test_refusals_say_what_was_asked_for(slots: SlotPool, pages: PagePool) -> None:
    """The report of a length names what the caller asked for, and the operation that does what is meant."""
    one, other = slots.take(1), slots.take(1)
    pages.extend(one, 5)
    pages.commit(one, 5)
    lease = pages.hold(one, 4)
    told = {
        "17 tokens asked for, a request may have 16": lambda: pages.extend(one, 17),
        f"{2**62} tokens asked for, a request may have 16": lambda: pages.extend(slots.take(2), [16, 2**62]),
        "`truncate` takes tokens back, `advance` adds": lambda: pages.extend(one, 3),
        "105 tokens asked for, a request may have 16": lambda: pages.advance(one, 100),
        "9 tokens are to be committed, 8 are allocated": lambda: pages.commit(one, 9),
        "truncation to 9 tokens, of 5": lambda: pages.truncate(one, 9, after=None),
        "a prefix of 8 tokens asked for, 5 are committed": lambda: pages.share(one, other, 8),
        "a prefix of 8 tokens asked for, 4 are": lambda: pages.share(lease, other, 8),
    }
    for words, action in told.items():
        assert words in str(refused(Code.LENGTH_ORDER, action))
    report = refused(Code.SLOT_CONSERVATION, lambda: slots.free(one, after=None))
    assert report.slot == one.np[0]
    assert "1 of these slots still own 2 pages: [1]" in str(report)
    assert "pages.release_requests(slots, after=...)" in str(report)
    pages.truncate(one, 3, after=None)
    for write in (pages.advance, lambda one: pages.extend(one, 5), lambda one: pages.commit(one, 4)):
        assert refused(Code.PAGE_OWNER, functools.partial(write, one)).slot == lease.pages[0]
    pages.release_requests(one, after=None)
    assert "1 leaked" in str(refused(Code.SLOT_CONSERVATION, pages.expect_idle))
    with pytest.raises(ArgumentError, match="use slots with the pool that returned them"):
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_locations_of_ranges_are_those_of_each_position(rt: Runtime, page_size: int) -> None:
    """Page by page and position by position give the same, also where a request has none, or begins inside a page."""
    generator = np.random.default_rng(page_size)
    slots = SlotPool(rt, 6)
    pool = PagePool(rt, slots, 6 * 40, page_size, max_tokens_per_request=40)
    held = slots.take(6)
    pool.extend(held, 40)
    for _ in range(50):
        start = generator.integers(0, 20, 6)
        counts = generator.integers(0, 20, 6) * generator.integers(0, 2, 6)
        positions = np.concatenate([np.arange(one, one + n) for one, n in zip(start, counts, strict=True)])
        locations = pool.lay(held.np, start, counts, "lay")[1]
        pages = pool.page_table[held.np.repeat(counts), positions // page_size]
        assert locations.tolist() == (pages * page_size + positions % page_size).tolist()


def test_a_lease_may_be_longer_than_a_request(rt: Runtime) -> None:
    """Pages for a cache are not of one request; what a request begins with has to fit its own length."""
    slots = SlotPool(rt, 2)
    pool = PagePool(rt, slots, 8, 2, max_tokens_per_request=4)
    lease, slot = pool.take(4), slots.take(1)
    pool.commit(lease, 8)
    pool.share(lease, slot, 4)
    assert pool.committed(slot).tolist() == [4]
    refused(Code.LENGTH_ORDER, lambda: pool.share(lease, slots.take(1), 6))
    lease.release(after=None)
    pool.release_requests(slot, after=None)
    pool.verify()
