"""`RaceRuntime(note_waits=True)`: waits for more than is needed, what they have to order, and what they need not."""

import pytest
import torch

from batchstate.errors import ArgumentError
from batchstate.races import RaceRuntime
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
