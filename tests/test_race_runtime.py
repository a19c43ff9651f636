"""The race detector as a runtime: what it refuses, what it raises or collects, and that it says the same every time."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchstate.errors import ArgumentError
from batchstate.races import Race, RaceKind, RaceRuntime, open_device
from batchstate.races import runtime as race_fences
from batchstate.races.tracing.dispatch import raw_kernel
from batchstate.runtime import CpuRuntime, Stream, open_runtime
from batchstate.violations import Code
from tests.race_cases import CASES
from tests.race_cases.tools import SEEDED, simulated


@pytest.fixture
def rt() -> Iterator[RaceRuntime]:
    """A detector in its window, which raises what it finds."""
    with RaceRuntime() as rt:
        yield rt


def table(rt: RaceRuntime, rows: int = 8) -> torch.Tensor:
    """int64[rows, 4] on the device, which every stream may use."""
    made = rt.device_zeros((rows, 4), torch.int64)
    rt.synchronize()
    return made


def two(rt: RaceRuntime) -> tuple[Stream, Stream]:
    """Two streams."""
    return rt.stream("left"), rt.stream("right")


def race(rt: RaceRuntime, numbers: torch.Tensor) -> None:
    """One stream writes a table and another reads it."""
    left, right = rt.stream("left"), rt.stream("right")
    with rt.use(left):
        numbers.fill_(7)
    with rt.use(right):
        numbers.clone()


# Launches


def hidden(numbers: torch.Tensor) -> None:
    """Raises all numbers where torch does not see it."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        numbers.numpy()[...] += 1


def test_a_launch_says_what_it_touches(rt: RaceRuntime) -> None:
    """One that says nothing and is given traced memory is refused, and so is one that writes something else."""
    numbers, other = table(rt), table(rt)
    with pytest.raises(ArgumentError, match=r"'hidden' declares nothing.*\n.*`reads=` and `writes=`"):
        rt.launch(hidden, numbers)
    with pytest.raises(ArgumentError, match="'fill' declares nothing"):
        rt.launch(lambda: numbers.fill_(1), name="fill")
    with pytest.raises(ArgumentError, match=r"'fill' writes .*which it does not declare"):
        rt.launch(lambda: other.fill_(1), reads=[numbers], name="fill")
    rt.launch(hidden, numbers, writes=[numbers])
    rt.launch(lambda: None)
    rt.launch(hidden, torch.zeros(0))


def test_a_launch_may_write_what_it_makes_itself(rt: RaceRuntime) -> None:
    """New memory is the launch's own affair."""
    numbers = table(rt)
    made = rt.launch(lambda: (numbers + 1).mul_(2), reads=[numbers])
    assert made.sum().item() == 64


def test_a_launch_inside_of_another_declares_for_itself(rt: RaceRuntime) -> None:
    """What the inner one writes, the outer one need not name."""
    numbers, other = table(rt), table(rt)

    def outer() -> None:
        rt.launch(hidden, other, writes=[other], name="inner")

    rt.launch(outer, reads=[numbers])


def test_what_torch_shows_counts_and_not_what_is_declared(rt: RaceRuntime) -> None:
    """A launch that declares a table and touches two rows of it touches two rows."""
    numbers = table(rt)
    left, right = two(rt)
    with rt.use(left):
        rt.launch(lambda: numbers[1:3].fill_(1), writes=[numbers])
    with rt.use(right):
        numbers[4:].fill_(2)


def test_a_marked_kernel_may_use_numpy() -> None:
    """Its arguments are plain tensors, and what it declares is checked: here a slice of them."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = table(rt)
        left, right = two(rt)

        @raw_kernel
        def double(rows: torch.Tensor) -> None:
            rows.numpy()[...] *= 2

        numbers.fill_(3)
        rt.synchronize()
        with rt.use(left):
            rt.launch(double, numbers[2:4], writes=[numbers[2:4]])
        with rt.use(right):
            numbers[5:].clone()
            assert not rt.races
            numbers[3:].clone()
    (report,) = rt.races
    assert (report.kind, report.first.operation, report.rows) == (RaceKind.READ_AFTER_WRITE, "double", "row 3")
    assert numbers[2:4].tolist() == [[6] * 4] * 2


# What happens with what is found


def test_a_race_is_raised_before_the_second_access_happens() -> None:
    """The numbers are as the first left them, and the report comes with the error."""
    with RaceRuntime() as rt:
        numbers = table(rt)
        left, right = two(rt)
        with rt.use(left):
            numbers.fill_(7)
        with rt.use(right), pytest.raises(Race) as caught:
            numbers.fill_(8)
        assert rt.inspect(numbers).tolist() == [[7] * 4] * 8
    found = caught.value
    assert found.code == Code.RACE
    assert found.report.kind is RaceKind.WRITE_AFTER_WRITE
    assert str(found) == f"RACE: {found.report}"
    assert (found.operation, found.step) == ("fill_", 0)
    assert rt.races == (found.report,)


def test_collected_races_are_reported_once_for_the_same_lines() -> None:
    """The program runs to its end; the same two lines count once, other lines for themselves."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = table(rt)
        left, right = two(rt)
        for _ in range(5):
            with rt.use(left):
                numbers.fill_(7)
            with rt.use(right):
                numbers[0].clone()
                numbers[1].clone()
            rt.synchronize()
    assert [(one.second.site.split(":")[1], one.rows) for one in rt.races] == [
        (one.second.site.split(":")[1], rows) for one, rows in zip(rt.races, ("row 0", "row 1"), strict=True)
    ]


def test_a_raised_race_leaves_the_detector_usable() -> None:
    """The access that was refused is not noted: after a wait, the same one is fine."""
    with RaceRuntime() as rt:
        numbers = table(rt)
        left, right = two(rt)
        with rt.use(left):
            numbers.fill_(7)
            written = rt.record()
        with rt.use(right):
            with pytest.raises(Race):
                numbers.clone()
            rt.wait(written)
            numbers.clone()
        with rt.use(left), pytest.raises(Race, match="clone on 'right'"):
            numbers.fill_(8)
    assert len(rt.races) == 2


def test_an_error_in_the_window_is_not_covered_up() -> None:
    """A source that was refilled is not reported behind it."""

    def refill(rt: RaceRuntime) -> None:
        numbers, staged = table(rt), rt.pinned((8, 4), torch.int64)
        numbers.copy_(staged, non_blocking=True)
        staged.numpy()[...] = 3

    def failing() -> None:
        with RaceRuntime() as rt:
            refill(rt)
            raise ZeroDivisionError

    def ending() -> None:
        with RaceRuntime() as rt:
            refill(rt)

    with pytest.raises(ZeroDivisionError):
        failing()
    with pytest.raises(Race):
        ending()


def test_nothing_is_traced_outside_of_the_window() -> None:
    """Operations of torch are not traced then; the runtime works as the one it runs on."""
    rt = RaceRuntime()
    numbers = rt.device_zeros((4,), torch.int64)
    race(rt, numbers)
    assert rt.upload([np.arange(3)]).view(0).tolist() == [0, 1, 2]
    with rt:
        numbers.add_(1)
    race(rt, numbers)
    assert not rt.races


# Waiting and asking


def test_a_host_that_asks_often_enough_is_told_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that polls gets on, as on a device; one that asks now and then finds the copy under way."""
    monkeypatch.setattr(race_fences, "PATIENCE", 50)
    with RaceRuntime() as rt:
        numbers = table(rt)
        left, right = two(rt)
        with rt.use(left):
            numbers.fill_(7)
            written = rt.record()
        assert [written.query() for _ in range(49)] == [False] * 49
        assert written.query()
        assert written.query()
        with rt.use(right):
            numbers.clone()


def test_a_fence_behind_one_that_was_waited_for_is_not_complete(rt: RaceRuntime) -> None:
    """One before it is: on its own stream, and on those that its stream waited for."""
    left, right = two(rt)
    with rt.use(left):
        first = rt.record()
        rt.wait(first, stream=right)
    with rt.use(right):
        second = rt.record()
    with rt.use(left):
        third = rt.record()
    second.wait()
    assert first.query()
    assert second.query()
    assert not third.query()
    rt.synchronize()
    assert third.query()
    assert rt.counters.fence_waits == 1


def test_the_depth_counts_steps_that_the_host_has_not_waited_for(rt: RaceRuntime) -> None:
    """The present one included; the most there ever were is kept."""
    numbers = table(rt)
    assert rt.in_flight_depths == []
    for _ in range(3):
        rt.next_step()
        numbers.add_(1)
    rt.record().wait()
    rt.next_step()
    numbers.add_(1)
    assert (rt.in_flight_depths, rt.in_flight_depth_max) == ([1, 2, 3, 1], 3)


def test_streams_of_one_name_are_told_apart() -> None:
    """Also one that is called as the host is."""
    with RaceRuntime(on_race="collect") as rt:
        numbers = table(rt)
        for stream in (rt.stream("host"), rt.stream("copy"), rt.stream("copy")):
            with rt.use(stream):
                numbers.add_(1)
    assert rt.races[0].lanes == ("host", "default", "host 2", "copy", "copy 2")


def test_the_runtime_below_does_the_work() -> None:
    """Its device, its depth and its streams; it need not be the plain CPU."""
    inner = CpuRuntime(steps_in_flight=3)
    with RaceRuntime(inner) as rt:
        assert (rt.device, rt.steps_in_flight) == (inner.device, 3)
        stream = rt.stream("left")
        with rt.use(stream):
            assert rt.current_stream is inner.current_stream is stream
        assert not rt.capturing
        assert rt.read_back(table(rt)).tolist() == [[0] * 4] * 8


def test_checks_of_the_library_are_no_accesses(rt: RaceRuntime) -> None:
    """They read what they like: no race, no order, and nothing in the report."""
    numbers = table(rt)
    left, right = two(rt)
    with rt.use(left):
        numbers.fill_(7)
    before = rt.accesses
    assert rt.inspect(numbers)[0, 0] == 7
    assert rt.accesses == before
    with rt.use(right), pytest.raises(Race):
        numbers.clone()


def test_a_thread_beside_is_not_traced(rt: RaceRuntime) -> None:
    """Its operations are its own: the modes of torch belong to one thread."""
    numbers = table(rt)
    with rt.use(rt.stream("left")):
        numbers.fill_(7)
    before = rt.accesses
    beside = threading.Thread(target=numbers.clone)
    beside.start()
    beside.join()
    assert rt.accesses == before


# Memory of which a CPU cannot tell whose it is


def test_host_numbers_have_no_streams() -> None:
    """What a factory made and nothing of the device ever touched may be used in any window, and freed in any."""
    with RaceRuntime() as rt:
        left, right = two(rt)
        counts = torch.zeros(4, dtype=torch.int64)
        for stream in (left, right, left):
            with rt.use(stream):
                counts += 1
        del counts
        with rt.use(left):
            rt.device_empty((4,), torch.int64).fill_(1)
    assert not rt.races


def test_a_copy_that_does_not_block_goes_to_the_device() -> None:
    """It makes no sense for a copy within host memory, so what a factory made is known by it."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = two(rt)
        staged = rt.pinned((4,), torch.int64)
        with rt.use(left):
            numbers = torch.empty(4, dtype=torch.int64, device=rt.device)
            numbers.copy_(staged, non_blocking=True)
        with rt.use(right):
            numbers.clone()
    (report,) = rt.races
    assert (report.kind, report.first.operation) == (RaceKind.READ_AFTER_WRITE, "copy to device")


def test_an_index_of_the_host_makes_the_host_wait(rt: RaceRuntime) -> None:
    """It is copied to the device first, and that copy blocks: numbers of a list, and pinned memory too.

    The index is free then, and what came before is over; rows are taken behind that wait, which nobody has waited for.
    """
    numbers, (left, right) = table(rt), two(rt)
    places = rt.pinned((2,), torch.int64)
    other = numbers + 1
    rt.synchronize()
    with rt.use(left):
        other.fill_(3)
        numbers[[1, 2]].clone()
        taken = numbers[places]
    places.fill_(1)
    with rt.use(right):
        other.fill_(2)
        with pytest.raises(Race, match="add_ on 'right' after index on 'left'"):
            taken.add_(1)


def test_factories_read_only_the_shape_of_their_model(rt: RaceRuntime) -> None:
    """`zeros_like` and `new_full` touch nothing of the tensor that they are given."""
    numbers, (left, right) = table(rt), two(rt)
    with rt.use(left):
        numbers.fill_(1)
    with rt.use(right):
        torch.zeros_like(numbers).add_(numbers.new_full((4,), 3))
        with pytest.raises(Race):
            numbers.clone()


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda t, to: t.to(to, torch.int32), torch.int32),
        (lambda t, to: t.to(device=to, dtype=torch.float32), torch.float32),
        (lambda t, to: t.to(to, torch.int16, True), torch.int16),
        (lambda t, to: t.to(to, non_blocking=True), torch.int64),
        (lambda t, to: t.to(to), torch.int64),
        (lambda t, to: t.cpu().to(to), torch.int64),
    ],
)
def test_numbers_come_as_they_were_asked_for(
    rt: RaceRuntime, call: Callable[[torch.Tensor, Any], torch.Tensor], dtype: torch.dtype, to_host: bool
) -> None:
    """To the host or to the device, with the dtype that the call names, whether it blocks or not."""
    source = table(rt) if to_host else rt.pinned((8, 4), torch.int64)
    brought = call(source.fill_(3), "cpu" if to_host else rt.device)
    assert brought.dtype is dtype
    rt.synchronize()
    assert brought.add_(1).tolist() == [[4] * 4] * 8


# The same every time


TRACED = """
import sys
from tests.race_cases.tools import SEEDED, simulated
from tests.test_race_runtime import traced

print(traced(sys.argv[1:]))
for name in SEEDED:
    print(*simulated(name, 5), sep="\\n")
"""


def traced(names: list[str]) -> str:
    """All events of some cases, and all reports."""
    lines = []
    for name in names:
        with RaceRuntime(on_race="collect") as rt:
            CASES[name].run(rt)
        lines += [name, *(f"{event.lane}: {event.name}, step {event.step}" for event in rt.races[0].events)]
        lines += map(str, rt.races)
    return "\n".join(lines)


def test_two_processes_see_the_same_events() -> None:
    """Neither addresses nor the order of hashes nor the time decide anything, on the simulated device either."""
    names = ["many readers (racy)", "name bound to the next batch (racy)", "ring of pinned buffers (racy)"]
    another = subprocess.run(
        [sys.executable, "-c", TRACED, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    ours = traced(names)
    late = [line for name in SEEDED for line in simulated(name, 5)]
    assert another.stdout.splitlines() == [*ours.splitlines(), *late]
    assert len(late) > 500
    assert "right: fill_, step 0" in ours
    assert ours.count("nothing orders") == 3


@pytest.mark.parametrize(("device", "shown"), [("race", "<fence 1 on 'side'>"), ("sim:lazy", "<fence on 'side'>")])
def test_a_fence_is_shown_by_its_stream(device: str, shown: str) -> None:
    """A pool that waits for it says so in these words."""
    with open_device(device) as rt:
        assert repr(rt.record(rt.stream("side"))) == shown


def test_a_device_of_the_tools_is_opened_elsewhere() -> None:
    """`open_runtime` opens devices of torch alone, and says where the others are."""
    with pytest.raises(ArgumentError, match=r"`batchstate\.races\.open_device` also opens 'race' and 'sim'"):
        open_runtime("race")
