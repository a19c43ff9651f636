"""Remedies for plain torch code: a line of torch that adds the missing edge."""

from typing import final

import torch

from batchstate.races.cuda._names import expression_of
from batchstate.races.cuda._window import open_window
from batchstate.races.hints import HintFor
from batchstate.races.history import Entry
from batchstate.races.report import Access
from batchstate.races.tracing.clocks import HOST

_DEFAULT = "default"
"""Name of the stream that is current at first."""


@final
class _TorchHintFor(HintFor):
    FENCES = "event "

    def keep(self, first: Access, behind: Entry | None) -> str:
        return (
            f"`tensor.record_stream({_named(first.lane)})` before the tensor is dropped, or keep it until "
            f"{first.operation} on {first.lane!r} is over{_made_at(first.lane)}"
        )

    def record_behind(self, first: Access, early: Entry) -> str:
        return (
            f"`{_event(early)}.record({_named(first.lane)})` after {first.operation}: "
            f"the recording at {early.source_line.line} comes before it{_made_at(first.lane)}"
        )

    def wait(self, first: Access, second: Access, behind: Entry | None) -> str:
        on_host, said = second.lane == HOST, _named(first.lane)
        if behind is None:
            wait = f"{said}.synchronize()" if on_host else f"{_named(second.lane)}.wait_stream({said})"
            return f"`{wait}` before {second.operation}{_made_at(first.lane)}{'' if on_host else _made_at(second.lane)}"
        event = _event(behind)
        wait = f"{event}.synchronize()" if on_host else f"{_named(second.lane)}.wait_event({event})"
        recorded = f"; the event is recorded at {behind.source_line.line}"
        return f"`{wait}` before {second.operation}{recorded}{'' if on_host else _made_at(second.lane)}"


torch_hint_for = _TorchHintFor()


def _event(fence: Entry) -> str:
    """The event in the code of the second access; `<name>` where it has no name for it."""
    name = fence.name.removeprefix("event ")
    window = open_window()

    def is_it(value: object) -> bool:
        return window is not None and isinstance(value, torch.cuda.Event) and window.label_of_event(value) is fence.name

    return expression_of(name, is_it) or f"<{name}>"


def _stream(lane: str) -> str | None:
    window = open_window()

    def is_it(value: object) -> bool:
        return window is not None and isinstance(value, torch.cuda.Stream) and window.label_of_stream(value) == lane

    return expression_of(lane, is_it)


def _named(lane: str) -> str:
    """The stream in the code of the second access; `<name>` where it has no name for it."""
    return "torch.cuda.default_stream()" if lane == _DEFAULT else _stream(lane) or f"<{lane}>"


def _made_at(lane: str) -> str:
    """Where a stream was made, if the code of the second access has no name for it."""
    window = open_window()  # None for a race that the end of the window has found
    made = None if window is None or lane in (_DEFAULT, HOST) or _stream(lane) else window.made_at.get(lane)
    if window is None or made is None:
        return ""
    same = [name for name, line in window.made_at.items() if line == made]
    number = f", number {same.index(lane) + 1} of the {len(same)} so far" if len(same) > 1 else ""
    return f"; <{lane}> is the stream made at {made.line}{number}"
