"""The memory of a recording: a few segments that are taken once, of which the oldest is given up."""

from collections.abc import Callable
from typing import Any, final

import attrs

from batchstate.replay.format import HEAD

__all__ = ["Ring"]

_FULL = 0.75


@final
@attrs.define(eq=False)
class Ring:
    """Segments of events, and what each step asks of the recording, side by side.

    Attributes:
        size: bytes of a segment.
        count: segments; 0 keeps all events in memory of its own.
        turned: called when a segment begins.
        dropped: events that did not fit into a segment.
        number: of the last event.
        first: the last number before this segment.
        buffer: the current segment, uint8[size], of which `at` bytes are written; a plan behind `mark` begins the next.
        turns: segments that were begun, but for the first.
        inside: whether a recorded call, or the recorder, is under way: what it calls is not recorded.
        stream, stream_number: the current one, as it was last seen.
    """

    size: int
    count: int
    turned: Callable[[], None]
    number: int
    first: int = 0
    at: int = 0
    buffer: memoryview = attrs.field(init=False)
    mark: int = attrs.field(init=False)
    inside: bool = False
    stream: Any = None
    stream_number: int = 0
    turns: int = 0
    dropped: int = 0
    _segments: list[memoryview] = attrs.field(init=False)
    _ends: list[int] = attrs.field(init=False)
    _spool: list[bytes] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._segments = [memoryview(bytearray(self.size)) for _ in range(self.count or 1)]
        self._ends = [0] * len(self._segments)
        self.buffer, self.mark = self._segments[0], int(self.size * _FULL)

    def events(self) -> bytes:
        """The events, oldest first."""
        count = len(self._segments)
        older = [(self.turns + 1 + number) % count for number in range(count - 1)]
        kept = [self._segments[i][: self._ends[i]] for i in older]
        return b"".join([*self._spool, *kept, self.buffer[: self.at]])

    def write(self, code: int, stream: int, step: int, number: int, body: bytes) -> None:
        """Writes an event."""
        at = self.at
        end = at + HEAD.size + len(body)
        if end > self.size:
            if self.count or end - at > self.size:
                self.dropped += 1  # the next plan begins a segment; what does not fit until then is lost
                return
            self.turn()
            at, end = 0, end - at
        HEAD.pack_into(self.buffer, at, code, stream, step, number, 0, 0, len(body))
        self.buffer[at + HEAD.size : end] = body
        self.at = end

    def turn(self) -> None:
        """Begins the next segment."""
        if not self.count:
            self._spool.append(bytes(self.buffer[: self.at]))
            self.at = 0
            return
        self._ends[self.turns % self.count] = self.at
        self.turns += 1
        self.buffer = self._segments[self.turns % self.count]
        self.at = 0
        self.turned()
