"""What a report says: the rows, both lines, what is missing, and which fence would mend it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from batchstate.pools import SlotPool
from batchstate.races import EventKind, RaceKind, RaceReport, RaceRuntime
from batchstate.races.history import KEPT, SHOWN, described, rows_of
from batchstate.races.tracing.memory import Name
from batchstate.races.tracing.regions import ByteRegion, of_tensor, union
from batchstate.runtime import Stream

TABLE, VECTOR = torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
BYTES, NUMBER = torch.zeros(64, dtype=torch.uint8), torch.tensor(3)


@pytest.mark.parametrize(
    ("tensor", "part", "said"),
    [
        (TABLE, TABLE, "all 8 rows"),
        (TABLE, TABLE[3], "row 3"),
        (TABLE, TABLE[7:], "row 7"),
        (TABLE, TABLE[2:5], "rows 2-4"),
        (TABLE, TABLE[::2], "rows 0, 2, 4, 6"),
        (TABLE, TABLE[1::5], "rows 1, 6"),
        (TABLE, TABLE[:, 1], "parts of rows 0-7"),
        (TABLE, TABLE[2:4, :3], "parts of rows 2-3"),
        (TABLE, TABLE[5, 1:3], "parts of row 5"),
        (TABLE, TABLE.view(torch.int32)[5, 1], "parts of row 5"),
        (TABLE, TABLE[3:4].expand(2, 4), "row 3"),
        (VECTOR, VECTOR, "all 8 elements"),
        (VECTOR, VECTOR[3], "element 3"),
        (VECTOR, VECTOR[2:8], "elements 2-7"),
        (VECTOR, VECTOR[1::3], "elements 1, 4, 7"),
        (VECTOR, VECTOR.view(torch.int16)[5], "parts of element 2"),
        (BYTES, BYTES[16:32], "bytes 16-31"),
        (NUMBER, NUMBER, "bytes 0-7"),
    ],
)
def test_a_part_of_a_tensor_in_words(tensor: torch.Tensor, part: torch.Tensor, said: str) -> None:
    """Whole rows or elements by their numbers, smaller places as parts of them, and a buffer or a number in bytes."""
    region = of_tensor(part)
    assert region is not None
    assert rows_of(Name(1, tensor), region) == said


def test_other_memory_is_told_in_bytes() -> None:
    """What lies beyond the tensor that the memory was first seen as."""
    assert rows_of(Name(1, torch.zeros(2, 2)), ByteRegion(8, 40)) == "bytes 8-39"
    assert rows_of(Name(1, torch.zeros(0, 4)), ByteRegion(0, 4)) == "bytes 0-3"


def test_a_long_list_of_rows_is_cut() -> None:
    """Eight are named, and how many more there are."""
    name = Name(9, torch.zeros(40, 2))
    region = union((16 * row, 16 * row + 8) for row in range(20))
    assert rows_of(name, region) == "rows 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert described(name, ByteRegion(8, 16)) == "tensor 9 float32[40, 2] row 1"


# Reports


def collected(rt: RaceRuntime) -> RaceReport:
    """The one race of a runtime."""
    (report,) = rt.races
    return report


def two(rt: RaceRuntime) -> tuple[Stream, Stream]:
    """Two streams."""
    return rt.stream("left"), rt.stream("right")


def overlapped(*, recorded: bool) -> RaceReport:
    """A table is written by one stream and read by another; with a fence behind the write that no stream waits for."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = two(rt)
        numbers = rt.device_zeros((8, 4), torch.int64)
        rt.synchronize()
        rt.next_step()
        with rt.use(left):
            rt.record()
            numbers[2:6].fill_(7)
            if recorded:
                rt.record()
                rt.record()
        rt.next_step()
        with rt.use(right):
            numbers[5:].clone()
    return collected(rt)


def test_the_suggestion_names_the_fence_that_is_there() -> None:
    """The first one behind the access: not one before it, and no later one."""
    report = overlapped(recorded=True)
    assert report.suggestion.startswith("wait for fence 2 (recorded on stream 'left' at tests/test_race_reports.py:")
    assert report.suggestion.endswith("on stream 'right' before clone")
    assert report.missing == "stream 'right' never waits for fill_ on stream 'left'"


def test_the_suggestion_asks_for_a_fence_where_there_is_none() -> None:
    """One that was recorded before the access is of no use."""
    report = overlapped(recorded=False)
    assert report.suggestion == (
        "record a fence on stream 'left' after fill_, and wait for it on stream 'right' before clone"
    )


def test_a_report_has_both_sides_with_their_lines() -> None:
    """Operation, stream, step, line and rows of each, and the rows that both touch."""
    report = overlapped(recorded=True)
    assert report.kind is RaceKind.READ_AFTER_WRITE
    first, second = report.first, report.second
    assert (first.does, first.operation, first.lane, first.step) == ("writes", "fill_", "left", 1)
    assert (second.does, second.operation, second.lane, second.step) == ("reads", "clone", "right", 2)
    assert (report.rows, first.rows[:8], second.rows[:8]) == ("row 5", "rows 2-5", "rows 5-7")
    assert first.site.startswith("tests/test_race_reports.py:")
    assert first.site.endswith("in overlapped")
    assert report.memory.startswith("tensor 1 int64[8, 4], allocated on 'default' at tests/test_race_reports.py:")
    assert "nothing orders clone on 'right' after fill_ on 'left'" in str(report)


def test_the_events_of_a_report_end_with_its_second_access() -> None:
    """In program order, both accesses among them; a wait names its fence."""
    report = overlapped(recorded=True)
    numbers = [event.number for event in report.events]
    assert numbers == sorted(numbers)
    assert numbers[-1] == report.second.event
    assert report.first.event in numbers
    assert {event.lane for event in report.events} <= set(report.lanes)
    assert [event.name for event in report.events if event.kind is EventKind.FENCE] == ["fence 1", "fence 2", "fence 3"]


def test_the_caller_is_named_where_the_library_made_the_access() -> None:
    """The line of the library, and the line that led there."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = two(rt)
        pool = SlotPool(rt, 4)
        lengths, slots = pool.table("lengths"), pool.take(3)
        tensor = lengths.memory
        rt.synchronize()
        with rt.use(left):
            lengths.write(slots.take([0, 2]), None, np.array([7, 8]))
        with rt.use(right):
            tensor[2:].clone()
    first, second = collected(rt).first, collected(rt).second
    assert first.site.startswith("batchstate/tables.py:")
    assert (first.caller or "").endswith("in test_the_caller_is_named_where_the_library_made_the_access")
    assert second.site.startswith("tests/test_race_reports.py:")
    assert second.caller is None
    assert collected(rt).rows == "element 3"


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    """Every part of it, as it was."""
    report = overlapped(recorded=True)
    report.save(tmp_path / "race.json")
    assert RaceReport.load(tmp_path / "race.json") == report
    assert RaceReport.from_dict(report.as_dict()) == report


def test_an_access_that_is_too_old_is_reported_without_its_line() -> None:
    """The race is found however long ago the first access was; the report says what it does not know."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = two(rt)
        numbers, other = rt.device_zeros((4,), torch.int64), rt.device_zeros((4,), torch.int64)
        rt.synchronize()
        with rt.use(left):
            numbers.fill_(1)
        for _ in range(KEPT):
            other.add_(1)
        with rt.use(right):
            numbers.clone()
    report = collected(rt)
    assert (report.first.operation, report.first.lane) == ("an operation too old to be known", "left")
    assert report.first.site == "an unknown line"
    assert len(report.events) <= SHOWN + 2


def test_freed_memory_names_who_uses_it_and_who_gets_it() -> None:
    """And what would keep it: a hand-over, or holding the tensor until a fence is complete."""
    with RaceRuntime(on_race="collect") as rt:
        left, right = two(rt)
        with rt.use(left):
            numbers = rt.device_empty((4, 4), torch.int64).fill_(1)
            made = rt.record()
        with rt.use(right):
            rt.wait(made)
            numbers[1:3].clone()
            rt.record()
        del numbers
        with rt.use(left):
            rt.device_empty((2,), torch.int64)
    report = collected(rt)
    assert (report.first.lane, report.first.does, report.rows) == ("right", "reads", "rows 1-2")
    assert (report.second.lane, report.second.does) == ("left", "allocates")
    assert report.second.rows == "memory that may be that of tensor 1 int64[4, 4], which was freed"
    assert "(on an accelerator also `record_stream`) before clone on 'right', or keep the tensor until fence 2" in (
        report.suggestion
    )
