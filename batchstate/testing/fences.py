"""`LateRuntime`: a CPU device that lags, as far as its fences say, so that a test meets every order a device can have.

Operations run at once, as on every CPU runtime; what comes late is that the host may know of it. A fence is complete
when the host has waited for it, or for something behind it, or when the test says so. So a library that reads too early
finds the fence incomplete on any machine, and not one time in a thousand on a busy one.
"""

import itertools
from collections import deque
from typing import final

import attrs
import torch

from batchstate.errors import ArgumentError
from batchstate.runtime import Fence, Stream
from batchstate.runtime.base import Array, Counters
from batchstate.runtime.devices import CpuRuntime

# Fences completed by hand, so that a test decides when a step in flight ends.


@final
@attrs.define(eq=False)
class ManualFence:
    """A fence of a `ManualStream`. Complete when the stream has completed it.

    Attributes:
        step: its number in the stream, from 1.
        waits: how often the host waited for it.
    """

    step: int
    _stream: "ManualStream"
    _done: bool = False
    waits: int = 0

    def __repr__(self) -> str:
        return f"ManualFence({self._stream.name!r}, step {self.step}, {'complete' if self._done else 'pending'})"

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        return self._done

    def wait(self) -> None:
        """Completes it, and all before it: what a host that waits would see."""
        self.waits += 1
        self._stream.complete_until(self)

    def _complete(self) -> None:
        self._done = True


@final
@attrs.define(eq=False)
class ManualStream:
    """Fences that complete in the order in which they were recorded, one at a time, when told to.

    Attributes:
        name: for reports.
        recorded: fences recorded so far.
    """

    name: str = "manual"
    recorded: int = 0
    _pending: deque[ManualFence] = attrs.field(factory=deque)

    @property
    def depth(self) -> int:
        """Fences recorded and not complete: steps in flight."""
        return len(self._pending)

    @property
    def last(self) -> ManualFence | None:
        """The newest fence in flight, or None."""
        return self._pending[-1] if self._pending else None

    @property
    def in_flight(self) -> tuple[ManualFence, ...]:
        """The fences that are not complete, oldest first."""
        return tuple(self._pending)

    def record(self) -> ManualFence:
        """A new fence behind all earlier ones."""
        self.recorded += 1
        fence = ManualFence(self.recorded, self)
        self._pending.append(fence)
        return fence

    def complete(self, n: int = 1) -> int:
        """Completes the `n` oldest fences in flight, or as many as there are; says how many."""
        done = min(n, len(self._pending))
        for _ in range(done):
            self._pending.popleft()._complete()
        return done

    def complete_until(self, fence: ManualFence) -> None:
        """Completes the fences up to `fence`."""
        while not fence.query():
            self.complete()


@final
@attrs.define(eq=False)
class LateFence:
    """A point in a stream of a `LateRuntime`. Complete when it, or something behind it, was waited for or completed.

    Attributes:
        number: in the order in which the fences of a runtime were recorded, from 1.
    """

    number: int
    _counters: Counters
    _line: "_Line | None"
    _awaited: tuple[Fence, ...]

    def __repr__(self) -> str:
        return f"LateFence({self.number}, {'complete' if self._line is None else 'pending'})"

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        return self._line is None

    def wait(self) -> None:
        """Completes it with all that is before it: what a host that waits would see."""
        self._counters.fence_waits += 1
        if self._line is not None:
            self._line.complete_until(self)

    def _complete(self) -> None:
        """The links go, so that no fence keeps those before it alive."""
        awaited, self._awaited = self._awaited, ()
        for fence in awaited:
            if not isinstance(fence, LateFence):
                if not fence.query():
                    fence.wait()
            elif fence._line is not None:
                fence._line.complete_until(fence)
        self._line = None


@final
@attrs.define(eq=False)
class _Line:
    """What one stream still has to do.

    Attributes:
        pending: its fences that are not complete, oldest first.
        awaited: fences that it was made to wait for since it recorded the last of them.
    """

    pending: deque[LateFence] = attrs.field(factory=deque)
    awaited: list[Fence] = attrs.field(factory=list)

    def await_fence(self, fence: Fence) -> None:
        """What comes next on the stream is behind `fence`."""
        self.awaited = [one for one in self.awaited if one is not fence and not one.query()]
        if not fence.query():
            self.awaited.append(fence)

    def complete_until(self, fence: LateFence) -> None:
        """Completes the fences up to `fence`, and before each those that the stream had been made to wait for.

        A fence waits only for older ones, and the oldest comes first: no deeper than there are streams.
        """
        while not fence.query():
            self.pending[0]._complete()
            self.pending.popleft()


def is_behind(after: Fence, before: Fence) -> bool:
    """Whether a host that waits for `after` has waited for `before`, as streams and waits order them. Never waits."""
    reached: dict[int, int] = {}  # id of a line -> number of the last fence on it that is before `after`
    following = [after]
    while following and not before.query():
        fence = following.pop()
        line = fence._line if isinstance(fence, LateFence) else None
        if not isinstance(fence, LateFence) or line is None:
            if fence is before:
                return True
            continue
        if isinstance(before, LateFence) and line is before._line and before.number <= fence.number:
            return True
        known = reached.get(id(line), 0)
        reached[id(line)] = max(known, fence.number)
        for passed in line.pending:
            if known < passed.number <= fence.number:
                following += passed._awaited
    return before.query()


@final
class LateRuntime(CpuRuntime):
    """A CPU runtime whose operations run at once and whose fences complete late.

    The host's waits complete what they wait for: `fence.wait()` and `read_back` all that is before them, `synchronize`
    everything. Reads of checks complete nothing. Everything else is up to `complete`.
    """

    def __init__(self, *, steps_in_flight: int = 2) -> None:
        super().__init__(steps_in_flight=steps_in_flight)
        self._lines: dict[object, _Line] = {}
        self._numbers = itertools.count(1)

    def pending(self, stream: Stream | None = None) -> int:
        """How many fences are recorded and not complete, of one stream or of all."""
        lines = self._lines.values() if stream is None else [self._line(stream)]
        return sum(len(line.pending) for line in lines)

    def complete(self, n: int = 1, stream: Stream | None = None) -> int:
        """Completes the `n` oldest fences of a stream or of all, or as many as there are; says how many.

        With them goes whatever their streams had been made to wait for.
        """
        done = 0
        while done < n and (oldest := self._oldest(stream)) is not None:
            line, fence = oldest
            line.complete_until(fence)
            done += 1
        return done

    def complete_through(self, fence: Fence) -> None:
        """Completes `fence` and all that was recorded before it, on whatever stream: a step of the device is over.

        Raises:
            ArgumentError: the fence is not of a runtime like this.
        """
        if not isinstance(fence, LateFence):
            raise ArgumentError(f"complete_through {fence!r}", value=fence, remedy="pass what `record` returned")
        while (oldest := self._oldest(None)) is not None and oldest[1].number <= fence.number:
            oldest[0].complete_until(oldest[1])

    def _oldest(self, stream: Stream | None) -> tuple[_Line, LateFence] | None:
        lines = self._lines.values() if stream is None else [self._line(stream)]
        waiting = [line for line in lines if line.pending]
        if not waiting:
            return None
        line = min(waiting, key=lambda one: one.pending[0].number)
        return line, line.pending[0]

    def _line(self, stream: Stream) -> _Line:
        return self._lines.setdefault(stream.key, _Line())

    # What a device implements

    def record(self, stream: Stream | None = None) -> Fence:
        """A fence that is not complete, behind all that `stream` has recorded and waited for."""
        line = self._line(stream or self.current_stream)
        fence = LateFence(next(self._numbers), self.counters, line, tuple(line.awaited))
        line.awaited = []
        line.pending.append(fence)
        return fence

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        self._line(stream).await_fence(fence)

    def read_back(self, tensor: torch.Tensor) -> Array:
        """Brings a device tensor to the host, and completes all that is before it on the current stream."""
        values = super().read_back(tensor)
        line = self._line(self.current_stream)
        fence = self.record()
        if isinstance(fence, LateFence):
            line.complete_until(fence)
        return values

    def _wait_for_device(self) -> None:
        self.complete(self.pending())
