"""`RaceRuntime(note_waits=True)`: waits for more than is needed, what they have to order, and what they need not."""

# mypy: disable-error-code="no-untyped-call"

import pytest
import torch

from batchstate.errors import ArgumentError
from batchstate.races import RaceRuntime, cuda_on_cpu
from batchstate.races.waits import WideWait


def waits(*, late: bool, uses_logits: bool = False, through: bool = False) -> tuple[WideWait, ...]:
    """A forward reads a table and goes on; then another stream rewrites the table behind a fence."""
    with RaceRuntime(note_waits=True) as rt:
        forward, schedule = rt.stream("forward"), rt.stream("schedule")
        table, weights = rt.device_zeros((4,), torch.int64), rt.device_zeros((4,), torch.int64)
        rt.synchronize()
        with rt.use(forward):
            rows = table.clone()
            read_done = rt.record()
            logits = rows + weights
            tokens = logits * 2
            forward_done = rt.record()
        fence = forward_done if late else read_done
        if through:
            middle = rt.stream("middle")
            rt.wait(fence, stream=middle)
            fence = rt.record(middle)
        with rt.use(schedule):
            rt.wait(fence)
            table.fill_(1)
            if uses_logits:
                rt.use_on_current_stream(tokens, forward, forward_done).clone()
        found = rt.wide_waits()
    assert not rt.races
    return found


def test_a_wait_for_the_whole_forward_is_wide() -> None:
    """The table was read at its beginning: the wait has to order that read, and not the rest."""
    (wide,) = waits(late=True)
    assert (wide.lane, wide.of) == ("schedule", "forward")
    assert wide.orders is not None
    assert wide.orders.startswith("clone at ")
    assert wide.for_what is not None
    assert wide.for_what.startswith("fill_ at ")
    assert [one.split(" at ")[0] for one in wide.spare] == ["add", "mul"]
    assert "has to order clone" in str(wide)
    assert "need not   add" in str(wide)


def test_a_wait_for_what_is_needed_is_not() -> None:
    """Neither one for the end of the read, nor one for the end of a forward whose results are used."""
    assert waits(late=False) == ()
    assert waits(late=True, uses_logits=True) == ()
    assert waits(late=False, uses_logits=True) == ()


def test_a_wait_through_another_stream_counts() -> None:
    """The wait of the stream in between is the wide one."""
    assert waits(late=False, through=True) == ()
    (wide,) = waits(late=True, through=True)
    assert (wide.lane, wide.of) == ("middle", "forward")


def test_a_wait_that_orders_nothing() -> None:
    """All that it waits for is spare."""
    with RaceRuntime(note_waits=True) as rt:
        with rt.use(rt.stream("forward")):
            rt.device_zeros((4,), torch.int64).add_(1)
            done = rt.record()
        done.wait()
        (wide,) = rt.wide_waits()
    assert (wide.lane, wide.orders, wide.for_what) == ("host", None, None)
    assert "orders nothing" in str(wide)


def test_waits_are_kept_on_request_alone() -> None:
    """Without `note_waits` there is nothing to ask for."""
    with RaceRuntime() as rt, pytest.raises(ArgumentError, match="kept no waits"):
        rt.wide_waits()


def one_event_for_all_steps(*, racy: bool) -> tuple[WideWait, ...]:
    """An output thread reads step n, and step n + 1 has recorded the event anew meanwhile (vllm #39115)."""
    with cuda_on_cpu(note_waits=True) as rt:
        copies = torch.cuda.Stream()
        landings = [torch.zeros(4, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        for step in range(2):
            tokens = torch.full((4,), float(step), device="cuda")
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                landings[step].copy_(tokens, non_blocking=True)
                tokens.record_stream(copies)
                done = events[0 if racy else step]
                done.record()
        events[0].synchronize()
        assert landings[0].tolist() == [0.0] * 4
        wide = rt.wide_waits()
    assert rt.races == ()
    return wide


def test_an_event_that_is_recorded_anew_before_its_waiter_woke() -> None:
    """The wait is for the next step too; one event per step ends that."""
    assert one_event_for_all_steps(racy=False) == ()
    (wide,) = one_event_for_all_steps(racy=True)
    assert wide.recorded is not None
    assert wide.recorded.startswith("tests/test_race_waits.py:")
    assert [one.split(" at ")[0] for one in wide.spare] == ["copy to host"]
    assert "was recorded in time at" in str(wide)


@pytest.mark.parametrize("priority", [0, -1])
def test_streams_that_are_one(priority: int) -> None:
    """Torch hands out 32 of each priority in turn: of 33 that are alive two are one; of 33 in turn none are."""
    with cuda_on_cpu() as rt:
        for _ in range(40):
            torch.cuda.Stream(priority=priority)
        assert rt.aliased_streams == []
        kept = [torch.cuda.Stream(priority=priority) for _ in range(32)]
        torch.cuda.Stream(priority=priority - 1)
        assert rt.aliased_streams == []
        last = torch.cuda.Stream(priority=priority)
        ((first, second),) = rt.aliased_streams
        assert rt.label_of_stream(kept[0]) in first
        assert second.startswith("'last', made at tests/test_race_waits.py:")
        assert last is not None
