"""Vector clocks over the events of a run: one for each stream, and one for the host.

Events are numbered in program order. A stream's clock holds, for each stream, the newest event of that stream which is
known to lie before its next operation. So an event is ordered before the next operation of a stream exactly if the
stream's clock has reached its number. The host is the first stream.

The algorithm is that of vector-clock race detectors (Mattern 1989; FastTrack, Flanagan and Freund 2009), with streams
in place of threads: a launch orders the host before the operation, a wait for a fence joins the clock of the fence.
"""

import itertools
from collections.abc import Collection
from typing import final

HOST = "host"
"""Name of the host among streams."""


@final
class StreamClock:
    """The clock of a stream, or of the host.

    Attributes:
        number: index in all clocks; the host's is 0.
        name: for reports.
        seen: stream -> newest of its events known to lie before the next operation here; grows with the streams.
        newest: its own newest event, 0 before the first.
        work: its newest event that is an operation or a copy, 0 before the first.
    """

    __slots__ = ("_host_at", "name", "newest", "number", "seen", "work")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.seen: list[int] = [0] * (number + 1)
        self.newest = 0
        self.work = 0
        self._host_at = -1

    def __repr__(self) -> str:
        return f"StreamClock({self.name!r})"

    def knows(self, other: int, event: int) -> bool:
        """Whether an event of stream `other` is ordered before the next operation here."""
        seen = self.seen
        return (seen[other] if other < len(seen) else 0) >= event

    def join(self, seen: list[int]) -> None:
        """The next operation here lies behind all events that `seen` has reached."""
        own = self.seen
        if len(own) < len(seen):
            own.extend([0] * (len(seen) - len(own)))
        for stream, event in enumerate(seen):
            if event > own[stream]:
                own[stream] = event


@final
class Clocks:
    """The clocks of all streams of a run.

    Attributes:
        streams: the host first.
        now: number of the newest event.
    """

    def __init__(self) -> None:
        self.streams: list[StreamClock] = [StreamClock(0, HOST)]
        self.now = 0
        self._joins = 0

    @property
    def host(self) -> StreamClock:
        """The clock of the host."""
        return self.streams[0]

    def add(self, name: str) -> StreamClock:
        """The clock of a new stream. With its first operation it learns all that the host knows."""
        stream = StreamClock(len(self.streams), unused_name(name, [stream.name for stream in self.streams]))
        self.streams.append(stream)
        return stream

    def happens(self, stream: StreamClock) -> int:
        """An event happens on a stream or the host; returns its number. A stream then knows all that the host does."""
        host = self.streams[0]
        if stream is not host and stream._host_at != self._joins:
            stream.join(host.seen)
            stream._host_at = self._joins
        self.now += 1
        stream.seen[stream.number] = stream.newest = self.now
        if stream is host:
            self._joins += 1
        return self.now

    def host_joins(self, seen: list[int]) -> None:
        """The host has waited for the events that `seen` has reached."""
        self._joins += 1
        self.streams[0].join(seen)


def unused_name(name: str, taken: Collection[str]) -> str:
    """The name itself, or if it is taken, with the first free number from 2 on behind it."""
    numbered = (f"{name} {number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)
