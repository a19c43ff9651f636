"""What a report tells the author of plain torch code: the missing edge, and a line of torch that adds it."""

from batchstate._source_lines import SourceLine
from batchstate.testing.race.history import Hint, History, hint_for, waited_too_early
from batchstate.testing.race.report import Access, RaceKind
from batchstate.testing.tracing.clocks import HOST, StreamClock

_DEFAULT = "default"
"""Name of the stream that is current at first."""


def torch_hint_for(
    history: History,
    stream: StreamClock,
    kind: RaceKind,
    first: Access,
    second: Access,
    dropped: SourceLine | None = None,
) -> Hint:
    """As `hint_for`, in the words of torch."""
    if kind is RaceKind.UNWRITTEN_READ:
        return hint_for(history, stream, kind, first, second, dropped)
    if kind is RaceKind.FREED_IN_USE and first.does != "allocates":
        where = "" if dropped is None or dropped.line is None else f", dropped at {dropped.line},"
        return Hint(
            f"nothing keeps the memory{where} until stream {first.lane!r} is done with it",
            f"`tensor.record_stream({_named(first.lane)})` before the tensor is dropped, or keep it until "
            f"{first.operation} on {first.lane!r} is over",
        )
    on_host = second.lane == HOST
    who = "the host" if on_host else f"stream {second.lane!r}"
    early = waited_too_early(history, stream, first, second)
    if early is not None:
        return Hint(
            f"{who} waits for {early.name}, which was recorded before {first.operation} on stream {first.lane!r}",
            f"`{_event(early.name)}.record({_named(first.lane)})` after {first.operation}: "
            f"the recording at {early.source_line.line} comes before it",
        )
    missing = f"{who} never waits for {first.operation} on stream {first.lane!r}"
    behind = history.fence_behind(stream, first.event, first.step, named="event ")
    if behind is not None:
        wait = f"{_event(behind.name)}.synchronize()" if on_host else _waits(second.lane, behind.name)
        return Hint(missing, f"`{wait}` before {second.operation}; the event is recorded at {behind.source_line.line}")
    said = _named(first.lane)
    wait = f"{said}.synchronize()" if on_host else f"{_named(second.lane)}.wait_stream({said})"
    return Hint(missing, f"`{wait}` before {second.operation}")


def _waits(lane: str, event: str) -> str:
    return f"{_named(lane)}.wait_event({_event(event)})"


def _event(name: str) -> str:
    return name.removeprefix("event ")


def _named(lane: str) -> str:
    if lane == _DEFAULT:
        return "torch.cuda.default_stream()"
    return lane if lane.isidentifier() else f"<{lane}>"
