"""Pinned memory between the host and copies in flight: poison, landings, checksums, and memory that is freed."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from batchstate.races import RaceKind, RaceRuntime
from batchstate.races.host_memory import POISON
from batchstate.races.sim import SimRuntime
from batchstate.runtime import Stream

UNSEEN = "a write that torch did not see"


@pytest.fixture
def rt() -> Iterator[RaceRuntime]:
    """A detector in its window, which raises what it finds."""
    with RaceRuntime() as rt:
        yield rt


def vector(rt: RaceRuntime, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """dtype[4] of 5 on the device, which every stream may use."""
    made = rt.device_empty((4,), dtype).fill_(5)
    rt.synchronize()
    return made


def kinds(rt: RaceRuntime) -> list[tuple[RaceKind, str]]:
    """What was found, with the second operation."""
    return [(one.kind, one.second.operation) for one in rt.races]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_what_has_not_landed_is_poison(rt: RaceRuntime, dtype: torch.dtype, strided: bool) -> None:
    """Every byte of it, whatever the dtype is and however it lies; the host that waited finds the numbers."""
    numbers = vector(rt, dtype)
    memory = rt.pinned((4, 2), dtype)
    landing = memory[:, 0] if strided else memory.view(-1)[:4]
    landing.copy_(numbers, non_blocking=True)
    raw = memory.view(-1).view(torch.uint8).numpy().reshape(4, 2, -1)
    poisoned = raw[:, 0] if strided else raw.reshape(-1)[: 4 * dtype.itemsize]
    if dtype is not torch.bool:
        assert (poisoned == POISON).all()
    assert (raw.reshape(-1)[-dtype.itemsize :] == 0).all()
    rt.record().wait()
    assert landing.tolist() == numbers.tolist()


def test_nothing_lands_before_its_own_fence(rt: RaceRuntime) -> None:
    """A fence from before the copy, or of another stream, brings nothing."""
    numbers, landing = vector(rt), rt.pinned((4,), torch.int64)
    array = landing.numpy()
    early = rt.record()
    landing.copy_(numbers, non_blocking=True)
    other = rt.record(rt.stream("other"))
    for fence in (early, other):
        fence.wait()
        assert array[0] != 5
    rt.record().wait()
    assert array.tolist() == [5] * 4


def test_numbers_land_as_they_were_when_the_copy_was_enqueued(rt: RaceRuntime) -> None:
    """What its own stream writes later does not travel with it."""
    numbers, landing = vector(rt), rt.pinned((4,), torch.int64)
    landing.copy_(numbers, non_blocking=True)
    numbers.fill_(6)
    rt.synchronize()
    assert landing.tolist() == [5] * 4


@pytest.mark.parametrize("waited", ["record", "synchronize", "item", "end"])
def test_a_refilled_source_is_found_whenever_the_host_waits(waited: str) -> None:
    """However it learns that the copy is over: by a fence, the device, a number that it reads, or the end."""
    with RaceRuntime(on_race="collect") as rt:
        numbers, staged = vector(rt), rt.pinned((4,), torch.int64)
        numbers.copy_(staged, non_blocking=True)
        staged.numpy()[2] = 1
        assert not rt.races
        if waited == "record":
            rt.record().wait()
        elif waited == "synchronize":
            rt.synchronize()
        elif waited == "item":
            numbers[0].item()
        assert len(rt.races) == (waited != "end")
    assert kinds(rt) == [(RaceKind.STAGING_REFILLED, UNSEEN)]
    assert rt.races[0].second.site.startswith("a line between ")


def test_a_write_that_torch_shows_is_reported_once() -> None:
    """Not a second time as one that torch did not see; what was written unseen before it is reported besides."""
    with RaceRuntime(on_race="collect") as rt:
        numbers, staged = vector(rt), rt.pinned((4,), torch.int64)
        numbers.copy_(staged, non_blocking=True)
        staged.fill_(1)
        rt.synchronize()
        assert kinds(rt) == [(RaceKind.STAGING_REFILLED, "fill_")]
        numbers.copy_(staged, non_blocking=True)
        staged.numpy()[0] = 9
        staged.zero_()
    assert kinds(rt)[1:] == [(RaceKind.STAGING_REFILLED, "zero_"), (RaceKind.STAGING_REFILLED, UNSEEN)]


def test_a_write_beside_a_source_says_nothing_of_it() -> None:
    """Only a write to the bytes that a copy reads settles whether they were refilled unseen before."""
    with RaceRuntime(on_race="collect") as rt:
        numbers, staged = vector(rt), rt.pinned((8,), torch.int64)
        numbers.copy_(staged[:4], non_blocking=True)
        staged[4:].fill_(1)
        staged.numpy()[0] = 9
        rt.synchronize()
    assert kinds(rt) == [(RaceKind.STAGING_REFILLED, UNSEEN)]


def test_a_stream_that_waits_for_no_landing_takes_poison() -> None:
    """What lands on one stream is there for another only where something orders the two."""
    with RaceRuntime(on_race="collect") as rt:
        numbers, target, between = vector(rt), vector(rt), rt.pinned((4,), torch.int64)
        between.copy_(numbers, non_blocking=True)
        with rt.use(rt.stream("other")):
            target.copy_(between, non_blocking=True)
        rt.synchronize()
        assert target.tolist() == [int.from_bytes(bytes([POISON] * 8), "little", signed=True)] * 4
    assert rt.races


def test_memory_goes_both_ways_on_one_stream(rt: RaceRuntime) -> None:
    """To the host and back without the host, and a second landing on the first: the stream orders all of it."""
    numbers, target, between = vector(rt), vector(rt), rt.pinned((4,), torch.int64)
    numbers.fill_(8)
    between.copy_(numbers, non_blocking=True)
    target.copy_(between, non_blocking=True)
    between.copy_(target + 1, non_blocking=True)
    first = rt.record()
    between.copy_(target + 2, non_blocking=True)
    first.wait()
    rt.record().wait()
    assert target.tolist() == [8] * 4
    assert between.tolist() == [10] * 4


def test_pinned_memory_of_torch_is_pinned() -> None:
    """However it came about: `pin_memory=True`, `.pin_memory()`, or a copy to the host that does not block."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = vector(rt)
        for landing in (
            torch.empty(4, dtype=torch.int64, pin_memory=True),
            torch.from_numpy(np.zeros(4, np.int64)).pin_memory(),
        ):
            landing.copy_(numbers, non_blocking=True)
            landing.tolist()
        brought = numbers.to("cpu", non_blocking=True)
        brought.clone()
    assert kinds(rt) == [
        (RaceKind.HOST_READS_EARLY, "tolist"),
        (RaceKind.HOST_READS_EARLY, "clone"),
    ]


def test_blocking_copies_need_no_fence(rt: RaceRuntime) -> None:
    """In either direction, and with memory that is not pinned whatever they are asked."""
    numbers, landing = vector(rt), rt.pinned((4,), torch.int64)
    landing.copy_(numbers)
    assert landing.tolist() == [5] * 4
    numbers.copy_(landing)
    landing.fill_(1)
    pageable = torch.from_numpy(np.zeros(4, np.int64))
    pageable.copy_(numbers, non_blocking=True)
    assert pageable.tolist() == [5] * 4
    assert numbers.cpu().tolist() == [5] * 4


# Memory that is freed


def read_and_dropped(rt: RaceRuntime) -> tuple[Stream, Stream]:
    """A tensor of one stream is read by another, which waited for it, and dropped."""
    left, right = rt.stream("left"), rt.stream("right")
    with rt.use(left):
        numbers = rt.device_empty((4,), torch.int64).fill_(1)
        made = rt.record()
    with rt.use(right):
        rt.wait(made)
        numbers.clone()
    return left, right


def test_what_only_its_own_stream_used_goes_round(rt: RaceRuntime) -> None:
    """Its own order suffices; a free by itself is no race, also in a collection of garbage: an allocation decides."""
    with rt.use(rt.stream("alone")):
        for _ in range(5):
            rt.device_empty((4,), torch.int64).fill_(1).clone()
    read_and_dropped(rt)
    gc.collect()


def test_any_allocation_of_the_stream_may_get_the_memory() -> None:
    """Results of operations, uploads and memory of the runtime; reported once."""
    for allocate in (
        lambda rt: rt.upload([np.arange(2)]),
        lambda rt: rt.device_empty((2,), torch.int64),
        lambda rt: torch.cat([rt.device_empty((0,), torch.int64)]),
    ):
        with RaceRuntime(on_race="collect") as rt:
            left, _ = read_and_dropped(rt)
            with rt.use(left):
                allocate(rt)
                allocate(rt)
        assert [one.kind for one in rt.races] == [RaceKind.FREED_IN_USE]


def test_a_cycle_of_references_frees_when_it_is_collected() -> None:
    """Until then the memory is held, and nothing can get it."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = rt.stream("left"), rt.stream("right")
        gc.disable()
        try:
            with rt.use(left):
                held = [rt.device_empty((4,), torch.int64).fill_(1)]
                made = rt.record()
            with rt.use(right):
                rt.wait(made)
                held[0].clone()
            held.append(held)  # type: ignore[arg-type]
            del held
            with rt.use(left):
                rt.device_empty((4,), torch.int64)
                assert not rt.races
                gc.collect()
                rt.device_empty((4,), torch.int64)
        finally:
            gc.enable()
    assert [one.kind for one in rt.races] == [RaceKind.FREED_IN_USE]


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "from_numpy": lambda pinned: torch.from_numpy(pinned.numpy()),
    "from_numpy of a part": lambda pinned: torch.from_numpy(pinned.numpy()[1:]),
    "as_tensor": lambda pinned: torch.as_tensor(pinned.numpy()),
}


@pytest.mark.parametrize("alias", list(ALIASES))
def test_pinned_memory_goes_by_address(alias: str) -> None:
    """A tensor over the same bytes is pinned too: its copy makes nobody wait, and refilling them is a race."""
    with RaceRuntime(on_race="collect") as rt:
        pinned, target = rt.pinned((4,), torch.int64), rt.device_zeros((4,), torch.int64)
        source = ALIASES[alias](pinned)
        assert source.is_pinned()
        target[: len(source)].copy_(source, non_blocking=True)
        pinned.fill_(9)
    assert (rt.counters.forced_syncs, rt.pageable_copies) == (0, 0)
    assert [race.kind for race in rt.races] == [RaceKind.STAGING_REFILLED]


@pytest.mark.parametrize("alias", list(ALIASES))
def test_pinned_memory_goes_by_address_on_the_simulated_device(alias: str) -> None:
    """There the copy runs late, and brings what the bytes hold by then."""
    with SimRuntime(scheduler="lazy") as rt:
        pinned, target = rt.pinned((4,), torch.int64), rt.device_zeros((4,), torch.int64)
        source = ALIASES[alias](pinned)
        target[: len(source)].copy_(source, non_blocking=True)
        pinned.fill_(9)
        assert rt.read_back(target)[: len(source)].tolist() == [9] * len(source)


@pytest.mark.parametrize("tool", [RaceRuntime, SimRuntime])
@pytest.mark.parametrize("way", ["copy_", "to"])
def test_copies_from_undecided_memory_are_pageable(tool: type[RaceRuntime | SimRuntime], way: str) -> None:
    """`torch.tensor` makes pageable host memory: a copy from it makes the host wait, asked not to block or not."""
    with tool() as rt:
        target = rt.device_zeros((3,), torch.int64)
        source = torch.tensor([1, 2, 3])
        if way == "copy_":
            target.copy_(source, non_blocking=True)
        else:
            target = source.to(rt.device, non_blocking=True)
        source.fill_(9)
        assert rt.read_back(target).tolist() == [1, 2, 3]
        assert (rt.pageable_copies, sum(rt.synchronised.values())) == (1, 1)
        target.copy_(torch.tensor([4, 5, 6]).pin_memory(), non_blocking=True)
        assert rt.pageable_copies == 1
