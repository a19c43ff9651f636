"""`LateRuntime`: fences that complete when the host waits for them, or when the test says so, and in no other order."""

import gc
import weakref

import numpy as np
import pytest
import torch

from batchstate.runtime import DoneFence, Fence
from batchstate.testing import LateRuntime, ManualStream
from batchstate.testing.fences import LateFence
from tests.doubles import Gate
from tests.selfcheck.machine import is_behind


def test_fences_are_late(late: LateRuntime) -> None:
    """A fence is not complete when it is recorded, and two records are two fences."""
    first, second = late.record(), late.record()
    assert first is not second
    assert not first.query()
    assert late.pending() == late.pending(late.current_stream) == 2
    assert repr(first) == "LateFence(1, pending)"


def test_operations_run_at_once(late: LateRuntime) -> None:
    """Values are there before any fence says so: only the knowledge of the host is late."""
    packed = late.upload([np.arange(3)])
    assert late.inspect(packed.view(0)).tolist() == [0, 1, 2]
    assert not packed.ready.query()


def test_host_wait_completes_what_is_before(late: LateRuntime) -> None:
    """A host that waits for a fence has waited for all before it on that stream, and for nothing behind it."""
    first, second, third = (late.record() for _ in range(3))
    second.wait()
    assert [fence.query() for fence in (first, second, third)] == [True, True, False]
    assert late.counters.fence_waits == 1
    assert late.counters.forced_syncs == 0
    second.wait()
    assert late.counters.fence_waits == 2


def test_host_wait_follows_stream_waits(late: LateRuntime) -> None:
    """A fence is behind those that its stream had been made to wait for before, and theirs; not behind later ones."""
    a, b, c = (late.stream(name) for name in "abc")
    on_a = late.record(a)
    late.wait(on_a, stream=b)
    on_b = late.record(b)
    behind_a = late.record(a)
    late.wait(on_b, stream=c)
    on_c = late.record(c)
    late.wait(behind_a, stream=c)
    behind_c = late.record(c)
    on_c.wait()
    assert [fence.query() for fence in (on_a, on_b, on_c)] == [True, True, True]
    assert [fence.query() for fence in (behind_a, behind_c)] == [False, False]
    behind_c.wait()
    assert late.pending() == 0


def test_streams_are_not_ordered_by_themselves(late: LateRuntime) -> None:
    """A wait on one stream says nothing of another."""
    other = late.stream("other")
    elsewhere, here = late.record(other), late.record()
    here.wait()
    assert not elsewhere.query()
    assert (late.pending(other), late.pending(late.current_stream)) == (1, 0)


def test_complete_takes_the_oldest(late: LateRuntime) -> None:
    """`complete` goes in the order of recording, over all streams or on one, and says how many it completed."""
    a, b = late.stream("a"), late.stream("b")
    fences = [late.record(stream) for stream in (a, b, a, b)]
    assert late.complete() == 1
    assert [fence.query() for fence in fences] == [True, False, False, False]
    assert late.complete(stream=b) == 1
    assert [fence.query() for fence in fences] == [True, True, False, False]
    assert late.complete(5) == 2
    assert late.complete() == late.pending() == 0
    assert late.counters.fence_waits == 0


def test_complete_never_passes_a_wait(late: LateRuntime) -> None:
    """What completes on one stream completes what that stream had been made to wait for."""
    a, b = late.stream("a"), late.stream("b")
    on_a = late.record(a)
    late.wait(on_a, stream=b)
    on_b = late.record(b)
    assert late.complete(1, b) == 1
    assert on_a.query()
    assert on_b.query()


def test_complete_fences_are_waited_for_in_vain(late: LateRuntime) -> None:
    """A wait for a fence that is complete binds nothing, and one that completes meanwhile is forgotten."""
    a, b = late.stream("a"), late.stream("b")
    done, pending = late.record(a), late.record(b)
    done.wait()
    late.wait(done)
    late.wait(pending)
    late.wait(pending)
    here = late.record()
    pending.wait()
    assert not here.query()
    here.wait()
    assert late.pending() == 0


def test_synchronize_completes_everything(late: LateRuntime) -> None:
    """`synchronize` waits for all streams."""
    late.record(late.stream("other"))
    late.record()
    late.synchronize()
    assert late.pending() == 0
    assert late.counters.forced_syncs == 1


def test_read_back_completes_the_current_stream(late: LateRuntime) -> None:
    """`read_back` waits for the current stream, and for what that was made to wait for, and for no other."""
    other, third = late.stream("other"), late.stream("third")
    awaited, here, elsewhere = late.record(other), late.record(), late.record(third)
    late.wait(awaited)
    late.read_back(torch.zeros(1))
    assert [fence.query() for fence in (awaited, here, elsewhere)] == [True, True, False]


def test_checks_complete_nothing(late: LateRuntime) -> None:
    """What a check reads makes no stream wait: a check must not hide what it looks for."""
    fence = late.record()
    assert late.inspect(torch.ones(1)).tolist() == [1.0]
    assert not fence.query()
    assert late.counters.check_reads == 1


def test_fences_of_others_are_waited_for(late: LateRuntime) -> None:
    """A stream may wait for a fence of another kind, which then decides."""
    gate, stream = Gate(), late.stream("waits")
    late.wait(gate, stream=stream)
    fence = late.record(stream)
    with pytest.raises(AssertionError, match="the host waited"):
        fence.wait()
    assert not fence.query()
    gate.done = True
    fence = late.record(stream)
    fence.wait()
    assert fence.query()


def test_order_is_known_without_waiting(late: LateRuntime) -> None:
    """`is_behind` says what a wait would complete, through any number of streams, and completes nothing."""
    a, b, c = (late.stream(name) for name in "abc")
    on_a, behind_a = late.record(a), late.record(a)
    late.wait(on_a, stream=b)
    on_b = late.record(b)
    late.wait(on_b, stream=c)
    on_c = late.record(c)
    assert is_behind(on_c, on_a)
    assert is_behind(on_b, on_a)
    assert not is_behind(on_c, behind_a)
    assert not is_behind(on_a, on_c)
    assert late.pending() == 4
    gate = Gate()
    late.wait(gate, stream=c)
    assert is_behind(late.record(c), gate)
    assert not is_behind(on_c, gate)
    on_c.wait()
    assert is_behind(on_a, on_c)
    assert is_behind(on_a, DoneFence())


def test_complete_fences_let_go() -> None:
    """A complete fence keeps none before it alive, so that ten thousand steps cost what ten do."""
    late = LateRuntime()
    a, b = late.stream("a"), late.stream("b")
    gone: list[weakref.ref[LateFence]] = []
    last: Fence = late.record(a)
    gc.disable()
    try:
        for _ in range(10_000):
            late.wait(last, stream=b)
            on_b = late.record(b)
            late.wait(on_b, stream=a)
            last = late.record(a)
            assert isinstance(on_b, LateFence)
            gone.append(weakref.ref(on_b))
            del on_b
            if late.pending() > 8:
                last.wait()
        last.wait()
    finally:
        gc.enable()
    assert late.pending() == 0
    assert not [one for one in gone if one() is not None]


def test_long_chains_complete() -> None:
    """A chain of waits over thousands of steps completes at once, however long it got."""
    late = LateRuntime()
    a, b = late.stream("a"), late.stream("b")
    last: Fence = late.record(a)
    for _ in range(5_000):
        for waiting in (b, a):
            late.wait(last, stream=waiting)
            last = late.record(waiting)
    last.wait()
    assert late.pending() == 0


def test_staging_is_not_reused_before_its_fence(late: LateRuntime) -> None:
    """Staging goes by the fences: blocks in flight are not reused, and afterwards no new ones are made."""
    for _ in range(8):
        late.upload([np.arange(4)])
    assert late.counters.staging_allocations >= 8
    late.synchronize()
    made = late.counters.staging_allocations
    for _ in range(50):
        late.upload([np.arange(4)]).ready.wait()
    assert late.counters.staging_allocations == made


def test_manual_fences_complete_in_order() -> None:
    """Fences of one stream complete oldest first, by hand or by waiting for a later one."""
    stream = ManualStream("forward")
    first, second, third = stream.record(), stream.record(), stream.record()
    assert stream.complete() == 1
    assert (first.query(), second.query()) == (True, False)
    third.wait()
    assert second.query()
    assert third.waits == 1
    assert (stream.last, stream.complete()) == (None, 0)
    assert repr(first) == "ManualFence('forward', number 1, complete)"
