"""What a report tells the author of plain torch code: a line of torch that adds the missing edge."""

from typing import final

from batchstate.testing.race.hints import HintFor
from batchstate.testing.race.history import Entry
from batchstate.testing.race.report import Access
from batchstate.testing.tracing.clocks import HOST

_DEFAULT = "default"
"""Name of the stream that is current at first."""


@final
class _TorchHintFor(HintFor):
    FENCES = "event "

    def keep(self, first: Access, behind: Entry | None) -> str:
        return (
            f"`tensor.record_stream({_named(first.lane)})` before the tensor is dropped, or keep it until "
            f"{first.operation} on {first.lane!r} is over"
        )

    def record_behind(self, first: Access, early: Entry) -> str:
        return (
            f"`{_event(early)}.record({_named(first.lane)})` after {first.operation}: "
            f"the recording at {early.source_line.line} comes before it"
        )

    def wait(self, first: Access, second: Access, behind: Entry | None) -> str:
        on_host, said = second.lane == HOST, _named(first.lane)
        if behind is None:
            wait = f"{said}.synchronize()" if on_host else f"{_named(second.lane)}.wait_stream({said})"
            return f"`{wait}` before {second.operation}"
        event = _event(behind)
        wait = f"{event}.synchronize()" if on_host else f"{_named(second.lane)}.wait_event({event})"
        return f"`{wait}` before {second.operation}; the event is recorded at {behind.source_line.line}"


torch_hint_for = _TorchHintFor()


def _event(fence: Entry) -> str:
    return fence.name.removeprefix("event ")


def _named(lane: str) -> str:
    if lane == _DEFAULT:
        return "torch.cuda.default_stream()"
    return lane if lane.isidentifier() else f"<{lane}>"
