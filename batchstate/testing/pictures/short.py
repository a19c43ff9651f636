"""Labels that are too long for a lane in a terminal, shortened where that hurts least."""

from collections.abc import Iterator

from batchstate.testing.pictures.words import dispensable, label, launched
from batchstate.testing.race.report import Event, EventKind

_LEAST = 5
"""Characters of an operation, or of what launched it, below which its rest says nothing."""


def short_label(event: Event, room: int, cut: str) -> str:
    """An event's label in a number of characters.

    The number of a fence stays, and what stands in parentheses behind an operation stays before the operation does.

    Args:
        event: whose label.
        room: how many characters.
        cut: stands for what is left out of a name.
    """
    full = label(event)
    if len(full) <= room:
        return full
    return next((shorter for shorter in _shorter(event, room, cut) if len(shorter) <= room), _cut(full, room, cut))


def _shorter(event: Event, room: int, cut: str) -> Iterator[str]:
    begin, middle, end = dispensable(event)
    if middle:
        yield f"{begin} {end}".strip()
    if event.kind in (EventKind.FENCE, EventKind.WAIT):
        # The mark before it tells which of the two it is.
        fence = end or label(event).removeprefix("fence ")
        yield _cut(fence, room, cut)
        return
    operation, launch = launched(event)
    if launch:
        left = room - len(launch) - 1
        if left >= min(len(operation), _LEAST):
            yield f"{_cut(operation, left, cut)} {launch}"
        yield launch
        left = room - len(operation) - 3
        if left >= _LEAST:
            yield f"{operation} ({_cut(launch[1:-1], left, cut)})"
        yield _cut(operation, room, cut)


def _cut(text: str, room: int, cut: str) -> str:
    """A text without its middle: names differ at their ends."""
    if len(text) <= room:
        return text
    tail = max(0, room - 1) // 3
    return text[: max(0, room - 1 - tail)] + cut + text[len(text) - tail :]
