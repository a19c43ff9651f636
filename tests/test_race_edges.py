"""Corners of the detector: eager fences, kernels on pinned memory, operations that torch refuses, other tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from batchstate import SlotPool
from batchstate.errors import ArgumentError, OwnerThreadError
from batchstate.races import Race, RaceKind, RaceRuntime, open_device, raw_kernel
from batchstate.races.devices import torch_device_of
from batchstate.runtime import Stream
from tests.doubles import in_a_thread


@pytest.fixture
def rt() -> Iterator[RaceRuntime]:
    """A detector in its window, which raises what it finds."""
    with RaceRuntime() as rt:
        yield rt


def table(rt: RaceRuntime, rows: int = 4) -> torch.Tensor:
    """Device memory that is zero for every stream."""
    made = rt.device_zeros((rows,), torch.int64)
    rt.synchronize()
    return made


def other(rt: RaceRuntime) -> Stream:
    """A second stream."""
    return rt.stream("other")


@pytest.mark.parametrize(("fences", "found"), [("lazy", 0), ("eager", 1)])
def test_slots_behind_the_wrong_fence_change_hands_where_fences_are_eager(fences: Any, found: int) -> None:
    """A slot freed behind the plan and not behind the forward is given out when a device is quick to say so."""
    with RaceRuntime(on_race="collect", fences=fences) as rt:
        pool, forward = SlotPool(rt, 1), other(rt)
        states = rt.device_zeros((2,), torch.int64)
        slots = pool.take(1)
        planned = rt.record()
        with rt.use(forward):
            rt.wait(planned)
            states[1:].add(1)
        pool.free(slots, after=planned)
        if pool.stats.free:
            pool.take(1)
            states[1:].fill_(9)
    assert len(rt.races) == found


def test_devices_name_the_kind_of_fences() -> None:
    """`race:prompt` asks for eager fences; other words are refused with all names there are."""
    rt = open_device("race:prompt")
    assert rt.record().query()
    assert not open_device("race").record().query()
    for wrong in ("racee", "simm", "race:nobody"):
        with pytest.raises(ArgumentError) as refused:
            open_device(wrong)
        assert refused.value.remedy
    with pytest.raises(ArgumentError, match="expected on_race 'raise' or 'collect', got 'ignore'"):
        RaceRuntime(on_race="ignore")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="fences is 'now'"):
        RaceRuntime(fences="now")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [
        ("cpu", "cpu"),
        ("cuda:1", "cuda:1"),
        ("race", "cpu"),
        ("race:cuda:1", "cuda:1"),
        ("race:prompt", "cpu"),
        ("race:prompt:cuda", "cuda"),
        ("sim", "cpu"),
        ("sim:lazy", "cpu"),
    ],
)
def test_names_of_tools_stand_on_devices_of_torch(name: str, torch_name: str) -> None:
    """A test that needs a device asks for that one."""
    assert torch_device_of(name) == torch_name


def test_only_work_of_steps_counts_as_depth(rt: RaceRuntime) -> None:
    """Set-up before the first step, numbers of the host, fences and waits are no steps in flight."""
    numbers = rt.device_zeros((4,), torch.int64)
    numbers.add_(1)
    for _ in range(4):
        rt.next_step()
        numbers.add_(1)
        rt.synchronize()
        torch.tensor([1, 2]) + 1
        rt.record()
    assert rt.in_flight_depth_max == 1


def test_waits_inside_torch_are_forced_syncs() -> None:
    """`.item()`, `.cpu()` and blocking copies are counted, by name and with all others."""
    with RaceRuntime() as rt:
        numbers = rt.device_zeros((4,), torch.int64)
        numbers[0].item()
        numbers.cpu()
        numbers.copy_(rt.pinned((4,), torch.int64))
    assert rt.synchronised == {"_local_scalar_dense": 1, "cpu": 1, "copy_": 1}
    assert rt.counters.forced_syncs == 3


def test_what_torch_refuses_has_not_happened() -> None:
    """An operation with wrong shapes is no access, and the next access is not accused."""
    with RaceRuntime() as rt:
        numbers = table(rt)
        with rt.use(other(rt)), pytest.raises(RuntimeError):
            numbers.add_(torch.zeros(5, dtype=torch.int64))
        numbers.add_(1)
    assert not rt.races


@raw_kernel
def fill(memory: Any, value: int) -> None:
    """Stands for a kernel."""
    for one in memory if isinstance(memory, list) else [memory]:
        one.numpy()[:] = value


@raw_kernel
def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Stands for a kernel."""
    target.numpy()[:] = source.numpy()


def test_kernels_use_pinned_memory_in_the_order_of_their_stream(rt: RaceRuntime) -> None:
    """What landed there before is there, what a copy reads was read, and nothing is reported."""
    numbers, pinned, out = table(rt), rt.pinned((4,), torch.int64, name="ring"), table(rt)
    numbers.copy_(pinned, non_blocking=True)
    rt.launch(fill, pinned, 9, writes=[pinned])
    numbers.add_(5)
    pinned.copy_(numbers, non_blocking=True)
    rt.launch(copy, pinned, out, reads=[pinned], writes=[out])
    rt.launch(fill, pinned, 7, writes=[pinned])
    rt.record().wait()
    assert rt.inspect(out).tolist() == [5] * 4
    assert pinned.tolist() == [7] * 4


def test_kernels_declare_what_is_in_their_lists(rt: RaceRuntime) -> None:
    """Memory in a list or a dict is given as well as memory by itself."""
    numbers = table(rt)
    for given in ([numbers], (numbers,), {"numbers": numbers}):
        with pytest.raises(ArgumentError, match="declares nothing"):
            rt.launch(fill, given, 1)


def test_the_hint_names_a_fence_that_is_too_early() -> None:
    """Who waits for a fence recorded before the write is told that, and not to wait for another."""
    with pytest.raises(Race) as caught, RaceRuntime() as rt:  # noqa: PT012 - the race is in its window
        numbers, forward = table(rt), other(rt)
        with rt.use(forward):
            early = rt.record()
            numbers.add_(1)
        rt.wait(early)
        numbers.add_(1)
    report = caught.value.report
    assert report.missing == "stream 'default' waits for fence 1, which was recorded before add_ on stream 'other'"
    assert report.suggestion.startswith("record the fence after add_")


def test_memory_freed_in_use_is_remembered_after_a_race(rt: RaceRuntime) -> None:
    """A race that is caught does not make the detector forget what else was freed; it says where it was dropped."""
    forward = other(rt)
    held = [rt.device_zeros((4,), torch.int64) for _ in range(2)]
    made = rt.record()
    with rt.use(forward):
        rt.wait(made)
        sums = [one + 1 for one in held]
    held.clear()
    for _ in range(2):
        with pytest.raises(Race) as caught:
            rt.device_empty((1,), torch.int64)
        assert caught.value.report.kind is RaceKind.FREED_IN_USE
        assert "dropped at tests/test_race_edges.py" in caught.value.report.missing
    assert len(sums) == 2


@pytest.mark.parametrize("freed", ["nothing", "unused", "used", "used, and waited for"])
def test_memory_that_an_allocation_may_have_got(rt: RaceRuntime, freed: str) -> None:
    """An allocation without a write orders nothing; what its stream has freed before may still be in use."""
    forward = other(rt)
    used = None
    if freed != "nothing":
        scratch = rt.device_empty((4,), torch.int64)
        if freed != "unused":
            scratch.fill_(1)
            used = rt.record()
        del scratch
    memory = rt.device_empty((4,), torch.int64)
    with rt.use(forward):
        if freed == "used":
            with pytest.raises(Race) as caught:
                memory.fill_(2)
            report = caught.value.report
            assert (report.kind, report.first.does, report.second.does) == (
                RaceKind.FREED_IN_USE,
                "allocates",
                "writes",
            )
            assert report.problem.startswith("memory is used on 'other' with no order after its allocation on ")
            assert report.problem.endswith("whose earlier work may still use that block")
        else:
            if used is not None:
                rt.wait(used)
            memory.fill_(2)


def test_a_copy_from_pageable_memory_is_not_waited_for_to_its_end() -> None:
    """The host waits until its numbers were taken; a reader on the device waits for the copy."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = table(rt)
        with rt.use(other(rt)):
            numbers.copy_(torch.from_numpy(np.ones(4, np.int64)), non_blocking=True)
        numbers.add(1)
    assert [one.kind for one in rt.races] == [RaceKind.READ_AFTER_WRITE]


@pytest.mark.parametrize("accelerator", [False, True])
def test_pinned_memory_of_any_factory_is_pinned(
    rt: RaceRuntime, monkeypatch: pytest.MonkeyPatch, accelerator: bool
) -> None:
    """A CPU has none to pin, and `torch.tensor(..., pin_memory=True)` and `is_pinned` are as on a device.

    So they are where the machine has an accelerator, of which the detector is not told.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    assert torch.tensor([1, 2], pin_memory=True).is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert rt.pinned((2,), torch.int64).is_pinned()
    assert not torch.empty(2).is_pinned()
    assert not table(rt).is_pinned()


def test_fences_belong_to_the_thread_of_their_runtime() -> None:
    """Another thread that waited would know for the host what the host does not know."""
    rt = RaceRuntime()
    fence = rt.record()
    assert isinstance(in_a_thread(fence.wait), OwnerThreadError)
    assert isinstance(in_a_thread(fence.query), OwnerThreadError)


class Wrapped(torch.Tensor):
    """A tensor that takes itself apart, as quantised ones do."""

    within: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.within = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(lambda one: one.within if isinstance(one, Wrapped) else one, args), **(kwargs or {}))


def test_wrapped_tensors_are_seen_through() -> None:
    """What a tensor of another class does inside is an access to the memory inside."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = table(rt)
        wrapped = Wrapped(numbers)
        with rt.use(other(rt)):
            wrapped + 1
        numbers.add_(1)
    assert [one.kind for one in rt.races] == [RaceKind.WRITE_AFTER_READ]


def test_calls_that_torch_allows_do_not_fail(rt: RaceRuntime) -> None:
    """Broadcast masks, indices of a number, batched functions, conjugate views: they run as without the detector."""
    grid = rt.device_zeros((4, 1), torch.int64).expand(4, 3)
    assert torch.masked_select(grid[:, :1], torch.ones(4, 3, dtype=torch.bool)).shape == (12,)
    assert rt.device_zeros((), torch.int64).index_select(0, torch.tensor([0])).shape == ()
    assert torch.vmap(lambda one: one.to(torch.float32) + 1)(grid).shape == (4, 3)
    numbers = rt.device_zeros((2,), torch.complex64)
    numbers.copy_(torch.ones(2, dtype=torch.complex64).pin_memory().conj(), non_blocking=True)
    with pytest.raises(IndexError):
        grid[torch.tensor([0, 1, 2]), torch.tensor([0, 1])]


def test_large_regions_are_kept_briefly() -> None:
    """The history keeps a few of the rows that an operation touched, and says how many more there were."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = rt.device_zeros((4_000, 2), torch.int64)
        rt.synchronize()
        with rt.use(other(rt)):
            numbers[:, 0].add_(1)
        numbers[:, 0].add_(1)
    entry = next(iter(rt._detector.history.newest_first()))
    assert all(len(region.intervals()) < 20 for _, region in entry.writes)
    assert rt.races[0].rows == "parts of rows 0-3999"
    assert rt.races[0].events[-1].writes[0].endswith("and 3988 more")


UNWRITTEN: dict[str, Callable[[RaceRuntime], object]] = {
    "memory of the runtime": lambda rt: rt.device_empty((4,), torch.int64).clone(),
    "memory of torch": lambda rt: torch.empty_like(rt.device_zeros((4,), torch.int64)) + 1,
    "a factory's": lambda rt: rt.device_zeros((4,), torch.int64) + torch.empty(4, dtype=torch.int64),
    "other rows than were written": lambda rt: _written(rt, 2)[2:].sum(),
    "a launch that declares it": lambda rt: rt.launch(
        raw_kernel(lambda *_: None), reads=(rt.device_empty((4,), torch.int64),), name="attention"
    ),
    "read back": lambda rt: rt.read_back(rt.device_empty((4,), torch.int64)),
}
WRITTEN: dict[str, Callable[[RaceRuntime], object]] = {
    "all of it": lambda rt: _written(rt, 4).clone(),
    "some of what is read": lambda rt: _written(rt, 1).clone(),
    "before it met the device": lambda rt: (
        rt.device_zeros((4,), torch.int64) + torch.empty(4, dtype=torch.int64).fill_(1)
    ),
    "by a kernel": lambda rt: _by_kernel(rt).sum(),
    "no byte": lambda rt: rt.device_empty((0,), torch.int64).clone(),
}


def _written(rt: RaceRuntime, rows: int) -> torch.Tensor:
    memory = rt.device_empty((4,), torch.int64)
    memory[:rows].fill_(7)
    return memory


def _by_kernel(rt: RaceRuntime) -> torch.Tensor:
    memory = rt.device_empty((4,), torch.int64)
    rt.launch(raw_kernel(lambda target: target.numpy().fill(1)), memory, writes=(memory,), name="kernel")
    return memory


@pytest.mark.parametrize("way", [*UNWRITTEN, *WRITTEN])
def test_memory_that_nothing_wrote_is_not_read(way: str) -> None:
    """A read of fresh memory of which nothing wrote a byte is a finding of its own; beside written rows it is none."""
    with RaceRuntime(on_race="collect") as rt:
        (UNWRITTEN | WRITTEN)[way](rt)
    assert [race.kind for race in rt.races] == [RaceKind.UNWRITTEN_READ] * (way in UNWRITTEN)
    for race in rt.races:
        assert (race.first.does, race.second.does) == ("allocates", "reads")
        assert "nothing writes any of it" in race.missing
