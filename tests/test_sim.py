"""The simulated device: what runs when, on which memory, and what of it the host may know."""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from batchstate.errors import ArgumentError, DeviceError
from batchstate.mirror import MirroredTensor
from batchstate.races import DeviceFault, SimRuntime, raw_kernel
from batchstate.races.sim.device import LONGEST_QUEUE, PATIENCE
from batchstate.races.sim.shapes import NewTensor, results_of

POISON = -2914092361341531
"""What an int64 holds that was never filled."""


def lazy() -> SimRuntime:
    """A device on which nothing runs before the host needs it."""
    return SimRuntime(scheduler="lazy")


@pytest.fixture
def rt() -> Iterator[SimRuntime]:
    """A device on which nothing runs before the host needs it, in its window."""
    with lazy() as rt:
        yield rt


def looked_at(tensor: torch.Tensor) -> list[int]:
    """What lies in device memory now, whatever has run: what only a test may do."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return list(tensor.reshape(-1).tolist())


def numbers(rt: SimRuntime, *values: int) -> torch.Tensor:
    """int64[n] on the device, and the device has got there."""
    made = rt.upload([np.array(values, np.int64)]).view(0).clone()
    rt.synchronize()
    return made


# When operations run


def test_an_operation_runs_when_the_host_needs_it(rt: SimRuntime) -> None:
    """Until then its result is poison, and so is what is computed from it."""
    here = numbers(rt, 1, 2, 3)
    more = here + 1
    most = more * 2
    assert (more.shape, more.dtype, more.stride()) == ((3,), torch.int64, (1,))
    assert looked_at(more) == looked_at(most) == [POISON] * 3
    assert rt.pending() == 2
    assert rt.read_back(most).tolist() == [4, 6, 8]
    assert rt.pending() == 0
    assert looked_at(more) == [2, 3, 4]


def test_poison_is_no_plausible_number(rt: SimRuntime) -> None:
    """Integers are large and negative, also of 32 bits; floats are not numbers."""
    made = {dtype: rt.device_empty((2,), dtype) for dtype in (torch.int64, torch.int32)}
    floats = [rt.device_empty((2,), dtype) for dtype in (torch.float32, torch.float64)]
    assert all(one < -600_000 for tensor in made.values() for one in looked_at(tensor))
    assert all(np.isnan(one) for tensor in floats for one in looked_at(tensor))


def test_operations_in_place_run_late_on_the_memory_itself(rt: SimRuntime) -> None:
    """Also through a view, and torch counts the write when it is called."""
    here = numbers(rt, 1, 2, 3, 4)
    version = here._version
    part = here[1:3]
    assert part.mul_(10) is part
    assert here._version == version + 1
    assert looked_at(here) == [1, 2, 3, 4]
    assert rt.read_back(here).tolist() == [1, 20, 30, 4]
    assert here._version == version + 1


def test_views_are_made_at_once(rt: SimRuntime) -> None:
    """They read nothing, so they take no place on a stream, and share the memory."""
    here = numbers(rt, 1, 2, 3, 4)
    more = here + 1
    seen = more.view(2, 2).t()[0]
    assert rt.pending() == 1
    more.add_(1)
    assert rt.read_back(seen).tolist() == [3, 5]
    assert looked_at(seen) == [3, 5]


def test_operations_see_what_was_there_when_they_ran(rt: SimRuntime) -> None:
    """A stream runs in order: a result is of its place on the stream, whatever is done afterwards."""
    here = numbers(rt, 1, 2)
    results = []
    for _ in range(3):
        here.add_(1)
        results.append(here.clone())
    assert [rt.read_back(one).tolist() for one in results] == [[2, 3], [3, 4], [4, 5]]


def test_what_torch_refuses_is_refused_at_once(rt: SimRuntime) -> None:
    """Shapes that do not go together are the caller's mistake, and no fault of the device."""
    with pytest.raises(RuntimeError, match="must match"):
        numbers(rt, 1, 2) + numbers(rt, 1, 2, 3)
    assert rt.unmodelled == Counter()


def test_a_factory_is_of_the_host_until_it_meets_the_device(rt: SimRuntime) -> None:
    """Its numbers are there for the host; for the device they are put there by an operation of the stream."""
    one, two = rt.stream("one"), rt.stream("two")
    here = numbers(rt, 0, 0, 0)
    with rt.use(one):
        rows = torch.arange(3)
        assert rows.tolist() == [0, 1, 2]
        assert rt.pending() == 0
    with rt.use(two):
        early = here + rows
        assert rt.pending(one) == 1
        assert rt.read_back(early).tolist() == [POISON, POISON, POISON]
        rt.wait(rt.record(one))
        assert rt.read_back(here + rows).tolist() == [0, 1, 2]


def test_a_single_number_goes_along(rt: SimRuntime) -> None:
    """An operation takes a scalar of the host with it when it is enqueued."""
    here, factor = numbers(rt, 1, 2), torch.tensor(3)
    more = here * factor
    factor.fill_(5)
    assert float(factor) == 5
    assert rt.read_back(more).tolist() == [3, 6]
    assert rt.synchronised == Counter()


def test_what_was_made_before_the_window_can_be_used(rt: SimRuntime) -> None:
    """Weights, for example: what an operation of the device touches is the device's."""
    weights = torch.eye(2, dtype=torch.float64)
    here = rt.upload([np.array([[1.0, 2.0]])]).view(0)
    weights.mul_(3)
    result = here @ weights
    weights.fill_(0)
    assert rt.pending() > 0
    assert rt.read_back(result).tolist() == [[3.0, 6.0]]


def test_random_numbers_do_not_depend_on_the_order() -> None:
    """They are drawn by the place in the program, whichever stream runs first."""

    def drawn(scheduler: str, seed: int) -> list[list[int]]:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(11)
        with SimRuntime(scheduler=scheduler, seed=seed) as rt:
            streams = rt.stream("one"), rt.stream("two")
            rt.synchronize()
            results = []
            for step in range(4):
                with rt.use(streams[step % 2]):
                    weights = torch.ones(8, 50) + rt.device_zeros((8, 50), torch.float32)
                    results.append(torch.multinomial(weights, 1))
                    results.append(torch.multinomial(weights, 1, generator=generator))
                    results[-1] = results[-1] + 0
            rt.synchronize()
            return [rt.read_back(one).reshape(-1).tolist() for one in results]

    first = drawn("eager", 0)
    assert len({tuple(one) for one in first}) == len(first)
    assert all(drawn(scheduler, seed) == first for scheduler in ("lazy", "random") for seed in range(3))


# What makes the host wait


@pytest.mark.parametrize(
    ("call", "name", "wanted"),
    [
        (lambda one: one.cpu().tolist(), "cpu", [4, 0, 6]),
        (lambda one: one.to("cpu").tolist(), "to", [4, 0, 6]),
        (lambda one: one.to("cpu", torch.float32).tolist(), "to", [4.0, 0.0, 6.0]),
        (lambda one: one.tolist(), "tolist", [4, 0, 6]),
        (lambda one: one[0].item(), "_local_scalar_dense", 4),
        (lambda one: bool(one.sum() > 3), "_local_scalar_dense", True),
        (lambda one: torch.equal(one, one), "equal", True),
    ],
)
def test_numbers_for_the_host_make_it_wait(
    rt: SimRuntime, call: Callable[[torch.Tensor], object], name: str, wanted: object
) -> None:
    """They are right, and each wait has the name of what waited."""
    here = numbers(rt, 3, -1, 5) + 1
    assert call(here) == wanted
    assert rt.synchronised == Counter({name: 1})
    assert rt.unmodelled == Counter()
    assert rt.counters.forced_syncs == 2, "that of `numbers`, and this one"


@pytest.mark.parametrize(
    ("call", "name", "wanted"),
    [
        (lambda one: one.nonzero().view(-1), "nonzero", [0, 2]),
        (lambda one: one[one > 0], "index", [4, 6]),
        (lambda one: one.masked_select(one > 0), "masked_select", [4, 6]),
        (lambda one: one.unique(), "_unique2", [0, 4, 6]),
        (lambda one: torch.repeat_interleave(one), "repeat_interleave", [0] * 4 + [2] * 6),
        (lambda one: one[torch.from_numpy(np.array([2, 2]))], "index", [6, 6]),
        (lambda one: one.index_put_((one > 0,), one[:2] + 1), "index_put_", [5, 0, 1]),
    ],
)
def test_shapes_that_only_the_device_knows_make_the_host_wait(
    rt: SimRuntime, call: Callable[[torch.Tensor], torch.Tensor], name: str, wanted: list[int]
) -> None:
    """So it is on an accelerator. What comes of them is device memory, and is written behind the wait, late."""
    found = call(numbers(rt, 3, -1, 5) + 1)
    assert rt.synchronised == Counter({name: 1})
    if name != "index_put_":
        assert (looked_at(found) == wanted) is (name == "_unique2")
    more = found + 1
    assert looked_at(more) != [number + 1 for number in wanted]
    assert rt.read_back(more).tolist() == [one + 1 for one in wanted]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda one: torch.where(one > 0, one, -1), [4, -1, 6]),
        (lambda one: one.masked_fill_(one > 0, 9), [9, 0, 9]),
        (lambda one: one.index_put_((one > 0,), torch.tensor(7)), [7, 0, 7]),
        (lambda one: torch.repeat_interleave(one, one - one + 2, output_size=6), [4, 4, 0, 0, 6, 6]),
        (lambda one: one[one - one], [4, 4, 4]),
        (lambda one: one.cumsum(0).flip(0), [10, 4, 4]),
        (lambda one: one.to(torch.float64).softmax(0).argmax(0, keepdim=True), [2]),
    ],
)
def test_other_operations_do_not_make_the_host_wait(
    rt: SimRuntime, call: Callable[[torch.Tensor], torch.Tensor], wanted: list[int]
) -> None:
    """A mask that fills, an index, a repetition of a known length."""
    found = call(numbers(rt, 3, -1, 5) + 1)
    assert rt.synchronised == rt.unmodelled == Counter()
    assert rt.pending() > 1
    assert rt.read_back(found).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_an_attention_returns_is_foreseen(dtype: torch.dtype) -> None:
    """Both results have the dtype that was foreseen, also where torch's own answer is another."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    operands = [torch.zeros(1, 2, 3, 4, dtype=dtype)] * 3
    assert results_of(attention, operands, {}) == [NewTensor.like(one) for one in attention(*operands)]


def test_an_operation_that_torch_cannot_foresee_waits_and_is_named() -> None:
    """So that a test can assert that there is none."""
    with torch.library._scoped_library("batchstate_test", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x[x % 2 == 1].clone(), "CPU")
        with lazy() as rt:
            here = numbers(rt, 1, 2, 3) + 1
            found = torch.ops.batchstate_test.odd(here)
            assert rt.unmodelled == Counter({"odd": 1})
            assert rt.read_back(found + 1).tolist() == [4]


# Copies


@pytest.mark.parametrize("way", ["to", "copy_"])
def test_a_copy_to_the_host_lands_when_it_runs(rt: SimRuntime, way: str) -> None:
    """Before, the host finds poison."""
    here = numbers(rt, 1, 2) + 1
    if way == "to":
        there = here.to("cpu", non_blocking=True)
    else:
        there = rt.pinned((2,), torch.int64).copy_(here, non_blocking=True)
    landed = rt.record()
    assert there.tolist() == [POISON, POISON]
    landed.wait()
    assert there.tolist() == [2, 3]
    assert rt.synchronised == Counter()


def test_what_a_copy_still_has_to_read_is_not_poisoned(rt: SimRuntime) -> None:
    """One piece of pinned memory goes to the device and back, in order: nothing reads too early."""
    staged, here = rt.pinned((2,), torch.int64), numbers(rt, 7, 8)
    staged.fill_(3)
    there = rt.device_empty((2,), torch.int64).copy_(staged, non_blocking=True)
    staged.copy_(here, non_blocking=True)
    rt.record().wait()
    assert (staged.tolist(), rt.read_back(there).tolist()) == ([7, 8], [3, 3])


@pytest.mark.parametrize("non_blocking", [False, True])
def test_pageable_memory_makes_the_host_wait(rt: SimRuntime, non_blocking: bool) -> None:
    """In both directions, whatever it is asked to do; so does pinned memory that is asked to block."""
    here, pageable = numbers(rt, 1, 2) + 1, torch.from_numpy(np.array([5, 6]))
    pageable.copy_(here, non_blocking=non_blocking)
    assert pageable.tolist() == [2, 3]
    there = rt.device_empty((2,), torch.int64).copy_(pageable, non_blocking=non_blocking)
    pageable.fill_(0)
    rt.pinned((2,), torch.int64).copy_(there)
    assert rt.synchronised == Counter({"copy_": 3})
    assert rt.read_back(there).tolist() == [2, 3]


def test_a_host_tensor_can_be_sent(rt: SimRuntime) -> None:
    """By `.to` the runtime's device, with the dtype that is asked for; pinned, the host does not wait."""
    pinned = torch.from_numpy(np.array([1, 2])).pin_memory()
    sent = pinned.to(rt.device, torch.float32, non_blocking=True)
    assert (sent.dtype, rt.synchronised) == (torch.float32, Counter())
    made = torch.empty(2, dtype=torch.int64, pin_memory=True).copy_(sent, non_blocking=True)
    rt.record().wait()
    assert made.tolist() == [1, 2]


def test_uploads_and_downloads_are_late_copies(rt: SimRuntime) -> None:
    """The library's own transfers run on their streams, from and to staging memory."""
    packed = rt.upload([np.arange(3), np.array([0.5])])
    assert not packed.ready.query()
    came = rt.download([packed.view(0) * 2, packed.view(1)])
    assert not came.ready()
    assert [one.tolist() for one in came.resolve()] == [[0, 2, 4], [0.5]]
    assert packed.ready.query()
    assert came.ready()
    assert (rt.counters.host_to_device_copies, rt.counters.device_to_host_copies) == (1, 1)


# Memory


def test_memory_that_is_freed_goes_to_the_next_of_its_stream(rt: SimRuntime) -> None:
    """At once, in program order; its stream runs in order, so nothing is harmed."""
    here = numbers(rt, 1, 2)
    first = here + 1
    address = first.data_ptr()
    second = first + 1
    del first
    third = here + 2
    assert third.data_ptr() == address
    assert rt.reused >= 1
    assert (rt.read_back(second).tolist(), rt.read_back(third).tolist()) == ([3, 4], [3, 4])


def test_what_is_enqueued_keeps_no_memory(rt: SimRuntime) -> None:
    """An operation that has not run must not hide that what it reads was given back."""
    one, two = rt.stream("one"), rt.stream("two")
    here = numbers(rt, 1, 2)
    with rt.use(two):
        late = here + 1
    del here
    rt.device_empty((2,), torch.int64)
    with rt.use(two):
        assert rt.read_back(late).tolist() == [POISON + 1] * 2
    with rt.use(one):
        assert rt.pending(one) == 0


def test_memory_is_wiped_when_its_stream_allocates(rt: SimRuntime) -> None:
    """Not before: what is freed and waited for is not given away yet."""
    two = rt.stream("two")
    here = numbers(rt, 1, 2)
    with rt.use(two):
        late = here + 1
        read = rt.record()
    del here
    rt.wait(read)
    rt.device_empty((2,), torch.int64).fill_(9)
    assert rt.read_back(late).tolist() == [2, 3]


def test_recorded_memory_waits_aside(rt: SimRuntime) -> None:
    """Until the other stream has run what it had at the free. The streams are not ordered by it."""
    one, two = rt.stream("one"), rt.stream("two")
    with rt.use(one):
        here = numbers(rt, 1, 2)
    address = here.data_ptr()
    with rt.use(two):
        late = here + 1
        rt._keep_alive(here, two)
    del here
    with rt.use(one):
        others = [rt.device_empty((2,), torch.int64) for _ in range(3)]
        others[0].fill_(9)
        assert address not in [other.data_ptr() for other in others]
        assert rt.read_back(others[0]).tolist() == [9, 9]
    assert rt.pending(two) == 1, "the allocating stream does not wait"
    with rt.use(two):
        assert rt.read_back(late).tolist() == [2, 3]
    with rt.use(one):
        assert rt.device_empty((2,), torch.int64).data_ptr() == address


def test_sizes_are_rounded_so_that_memory_meets_again(rt: SimRuntime) -> None:
    """A small result may get the memory of another small one, of whatever shape; a large one does not."""
    address = rt.device_empty((3,), torch.int64).data_ptr()
    large = rt.device_empty((1000,), torch.int64)
    assert large.data_ptr() != address
    assert rt.device_empty((5, 5), torch.float32).data_ptr() == address


def test_empty_tensors_are_device_memory_too(rt: SimRuntime) -> None:
    """They have no memory to give away."""
    none = rt.device_empty((0, 3), torch.int64)
    more = torch.cat([none, none + 1])
    assert more.shape == (0, 3)
    assert rt.read_back(more).tolist() == []
    assert rt.upload([]).buffer.numel() == 0


# Order


def test_waits_are_transitive(rt: SimRuntime) -> None:
    """A host that waits for one stream has waited for those that it waits for."""
    streams = [rt.stream(name) for name in ("one", "two", "three")]
    here, last = numbers(rt, 0), None
    for stream in streams:
        with rt.use(stream):
            if last is not None:
                rt.wait(last)
            here.mul_(2).add_(1)
            last = rt.record()
    assert last is not None
    last.wait()
    assert looked_at(here) == [7]
    assert rt.pending() == 0
    assert rt.counters.fence_waits == 1


def test_a_fence_is_complete_when_all_before_it_has_run(rt: SimRuntime) -> None:
    """Not when the host asks, and not when something behind it has not run."""
    here = numbers(rt, 0)
    assert rt.record().query(), "there is nothing before it"
    here.add_(1)
    first = rt.record()
    here.add_(1)
    second = rt.record()
    assert not first.query()
    first.wait()
    assert first.query()
    assert not second.query()
    assert looked_at(here) == [1]


def test_a_host_that_polls_gets_on(rt: SimRuntime) -> None:
    """Even on a device that is as late as it can be, and behind other streams."""
    one, two = rt.stream("one"), rt.stream("two")
    here = numbers(rt, 0)
    with rt.use(one):
        here.add_(1)
        ready = rt.record()
    with rt.use(two):
        rt.wait(ready)
        here.add_(1)
        done = rt.record()
    asked = 1
    while not done.query():
        asked += 1
    assert PATIENCE < asked < PATIENCE + 10


def test_a_queue_that_is_full_makes_the_host_wait(rt: SimRuntime) -> None:
    """As on a device: a host cannot be ahead for ever."""
    here = numbers(rt, 0)
    for _ in range(LONGEST_QUEUE + 50):
        here.add_(1)
    assert rt.pending() == LONGEST_QUEUE
    assert looked_at(here) == [50]


def test_steps_in_flight_are_counted(rt: SimRuntime) -> None:
    """A step is in flight from its first operation until its last has run."""
    here = numbers(rt, 0)
    assert rt.in_flight_depth_max == 0  # operations before the first step are none
    fences = []
    for _ in range(3):
        rt.next_step()
        here.add_(1)
        here.add_(1)
        fences.append(rt.record())
    assert (rt.in_flight_depths, rt.pending()) == ([1, 2, 3], 6)
    fences[1].wait()
    rt.next_step()
    here.add_(1)
    assert (rt.in_flight_depths, rt.in_flight_depth_max) == ([1, 2, 3, 2], 3)


def test_a_trace_says_what_ran_in_which_order() -> None:
    """With the stream, the operation and the step in which it was enqueued."""
    with lazy() as rt:
        one, two = rt.stream("one"), rt.stream("two")
        with rt.use(one):
            here = rt.device_empty((1,), torch.int64).fill_(1)
        rt.next_step()
        with rt.use(two):
            here.add_(1)
            rt.record().wait()
        assert rt.trace() == ["1 two: add_, step 1"]
    assert rt.trace() == ["1 two: add_, step 1", "2 one: fill_, step 0"]


# Checks


def test_a_check_sees_what_the_stream_would_see(rt: SimRuntime) -> None:
    """If it ran to here; and it has run no further than before."""
    one, two = rt.stream("one"), rt.stream("two")
    here, landing = numbers(rt, 1), rt.pinned((1,), torch.int64)
    with rt.use(one):
        here.add_(1)
        ready = rt.record()
    with rt.use(two):
        rt.wait(ready)
        here.mul_(10)
        landing.copy_(here, non_blocking=True)
        seen = here + 5
        assert rt.inspect(here).tolist() == [20]
        assert rt.inspect(seen).tolist() == [25]
    assert (rt.pending(), looked_at(here), looked_at(seen), landing.tolist()) == (4, [1], [POISON], [POISON])
    assert not ready.query()
    assert (rt.counters.check_reads, rt.counters.forced_syncs, rt.synchronised) == (2, 1, Counter())
    rt.synchronize()
    assert (looked_at(here), landing.tolist()) == ([20], [20])


def test_many_checks_of_a_device_that_lags_run_it_once(rt: SimRuntime) -> None:
    """What was run for one look is kept for the next, until the device gets on."""
    runs = []

    @raw_kernel
    def raise_all(tensor: torch.Tensor) -> None:
        runs.append(tensor.numpy().copy())
        tensor.numpy()[...] += 1

    here = numbers(rt, 0)
    for step in range(1, 4):
        rt.launch(raise_all, here, writes=[here])
        assert [rt.inspect(here).tolist() for _ in range(3)] == [[step]] * 3
    assert len(runs) == 3
    fence = rt.record()
    rt.launch(raise_all, here, writes=[here])
    fence.wait()
    assert len(runs) == 6
    assert looked_at(here) == [3]
    assert rt.inspect(here).tolist() == [4]
    assert len(runs) == 7


def test_values_of_the_library_can_be_checked(rt: SimRuntime) -> None:
    """Both sides are compared while nothing has run."""
    lens = MirroredTensor.from_host(rt, [3, 1, 2]) + 1
    assert lens.device.shape == (3,)
    lens.check("test")
    assert rt.inspect(lens.device).tolist() == [4, 2, 3]
    assert rt.pending() > 0


# Faults


def test_what_fails_when_it_runs_is_a_fault_with_a_name() -> None:
    """An index that was read too early is outside of everything; the error says which operation, and whose line."""
    with lazy() as rt:
        one, two = rt.stream("one"), rt.stream("two")
        table = numbers(rt, 1, 2, 3)
        rt.next_step()
        with rt.use(one):
            rows = numbers(rt, 0, 1) + 1
        with rt.use(two):
            found = table.index_select(0, rows)
            with pytest.raises(DeviceFault) as caught:
                rt.read_back(found)
    fault = caught.value
    assert (fault.operation, fault.stream, fault.step) == ("index_select", "two", 1)
    assert "test_sim.py" in fault.site
    assert "out of range" in str(fault)
    assert "enqueued in step 1 at" in str(fault)


def test_after_a_fault_the_device_is_of_no_use(rt: SimRuntime) -> None:
    """Whatever is asked next says which operation it was, and the window closes."""
    table = numbers(rt, 1, 2, 3)
    found = table.index_select(0, table)
    with pytest.raises(DeviceFault, match="index_select failed"):
        rt.read_back(found)
    with pytest.raises(DeviceFault, match=r"index_select failed.*before this"):
        table.add_(1)
    with pytest.raises(DeviceFault, match="before this"):
        rt.synchronize()


def test_a_fault_may_come_when_the_window_closes() -> None:
    """What the host did not wait for has run by then; but an error that is on its way comes first."""

    def misread(error: Exception | None) -> None:
        with lazy() as rt:
            table = numbers(rt, 1, 2, 3)
            table.index_select(0, table)
            if error is not None:
                raise error

    with pytest.raises(DeviceFault):
        misread(None)
    with pytest.raises(KeyError):
        misread(KeyError("another"))


# Launches


def test_a_launch_is_enqueued_one_operation_after_the_other(rt: SimRuntime) -> None:
    """What torch sees of it runs late; it counts as what it says it is."""
    here = numbers(rt, 1, 2)
    before = rt.counters.device_operations
    more = rt.launch(lambda one: (one + 1) * 2, here, reads=[here], operations=2)
    assert rt.pending() == 2
    assert rt.counters.device_operations == before + 2
    assert rt.read_back(more).tolist() == [4, 6]


def test_a_raw_kernel_is_enqueued_as_a_whole(rt: SimRuntime) -> None:
    """When it runs, its arguments are plain tensors over the memory, also in lists; numpy may have them."""

    @raw_kernel
    def add_up(target: torch.Tensor, parts: list[torch.Tensor], *, times: int) -> None:
        for part in parts:
            target.numpy()[...] += part.numpy() * times

    here, more = numbers(rt, 1, 2), numbers(rt, 10, 20)
    target = rt.device_zeros((2,), torch.int64)
    rt.launch(add_up, target, [here, more], times=2, reads=[here, more], writes=[target], name="sum")
    assert rt.pending() == 2
    assert rt.read_back(target).tolist() == [22, 44]
    assert rt.trace()[-1].endswith("default: sum, step 0")


def test_a_raw_kernel_says_what_it_touches(rt: SimRuntime) -> None:
    """It declares some of its arguments, and takes no pageable memory; a kernel without the mark is refused."""

    @raw_kernel
    def touch(*tensors: torch.Tensor) -> None:
        """Never runs."""

    here, other = numbers(rt, 1), numbers(rt, 2)
    with pytest.raises(ArgumentError, match="'touch' declares nothing"):
        rt.launch(touch, here)
    with pytest.raises(ArgumentError, match="'touch' declares memory that it is not given"):
        rt.launch(touch, here, writes=[other])
    with pytest.raises(DeviceError, match="touch of a host tensor"):
        rt.launch(touch, here, torch.from_numpy(np.ones(3)), writes=[here])
    with pytest.raises(ArgumentError, match="mark the function with `raw_kernel`"):
        rt.launch(lambda one: None, here, writes=[here])
    rt.launch(lambda: None)


def test_memory_that_a_launch_declares_is_the_device_s(rt: SimRuntime) -> None:
    """Even if nothing else says so."""
    rows = torch.arange(3)
    doubled = rt.launch(lambda one: one * 2, rows, reads=[rows])
    assert rt.pending() == 2
    assert rt.read_back(doubled).tolist() == [0, 2, 4]


# The window


def test_outside_of_its_window_everything_runs_at_once() -> None:
    """Before it and behind it, a simulated device is an ordinary one."""
    rt = lazy()
    here = rt.upload([np.arange(3)]).view(0)
    assert here.tolist() == [0, 1, 2]
    with rt:
        more = here + 1
        assert looked_at(more) == [POISON] * 3
    assert more.tolist() == [1, 2, 3]
    assert rt.pending() == 0
    assert rt.download([more]).ready()
    assert rt.record().query()
