"""Fences that complete when a test says so: of a `ManualStream`, or of a whole device that lags, `LateRuntime`.

Operations run at once, as on every CPU runtime; only the host learns of it late. A fence is complete when the host has
waited for it, or for something after it, or when the test says so. So a library that reads too early finds the fence
incomplete on any machine, and not one time in a thousand on a busy one.
"""

from collections import deque
from typing import final

import attrs
import torch

from batchstate._arrays import count
from batchstate.races.tracing.clocks import Clocks, StreamClock
from batchstate.runtime import Fence, Stream
from batchstate.runtime.base import Array
from batchstate.runtime.devices import CpuRuntime


@final
@attrs.define(eq=False)
class ManualFence:
    """A fence of a `ManualStream`. Complete when the stream has completed it.

    Attributes:
        number: in the order in which its stream recorded them, from 1.
        waits: how often the host waited for it.
    """

    number: int
    _stream: "ManualStream"
    _done: bool = False
    waits: int = 0

    def __repr__(self) -> str:
        return f"ManualFence({self._stream.name!r}, number {self.number}, {'complete' if self._done else 'pending'})"

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        return self._done

    def wait(self) -> None:
        """Completes it, and all before it: what a host that waits would see."""
        self.waits += 1
        self._stream.complete_until(self)


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
        """A new fence after all earlier ones."""
        self.recorded += 1
        fence = ManualFence(self.recorded, self)
        self._pending.append(fence)
        return fence

    def complete(self, n: int = 1) -> int:
        """Completes the `n` oldest fences in flight, or as many as there are; says how many."""
        done = min(n, len(self._pending))
        for _ in range(done):
            self._pending.popleft()._done = True
        return done

    def complete_until(self, fence: ManualFence) -> None:
        """Completes the fences up to `fence`."""
        while not fence.query():
            self.complete()


@final
@attrs.define(eq=False)
class LateFence:
    """A point in a stream of a `LateRuntime`. Complete when it, or something after it, was waited for or completed.

    Attributes:
        number: in the order in which the fences of a runtime were recorded, from 1.
    """

    number: int
    _runtime: "LateRuntime"
    _stream: StreamClock
    _seen: list[int]
    _foreign: tuple[Fence, ...]

    def __repr__(self) -> str:
        return f"LateFence({self.number}, {'complete' if self.query() else 'pending'})"

    def query(self) -> bool:
        """Whether it is complete. Never waits."""
        return self._runtime._clocks.host.knows(self._stream.number, self.number)

    def wait(self) -> None:
        """Completes it with all that is before it: what a host that waits would see."""
        self._runtime.counters.fence_waits += 1
        self._runtime._complete_before(self._seen)


@final
class LateRuntime(CpuRuntime):
    """A CPU runtime whose operations run at once and whose fences complete late.

    The host's waits complete what they wait for: `fence.wait()` and `read_back` all that is before them, `synchronize`
    everything. Reads of checks complete nothing. Everything else is up to `complete`.
    """

    def __init__(self, *, steps_in_flight: int = 2) -> None:
        self._clocks = Clocks()
        self._streams: dict[object, StreamClock] = {}
        self._pending: list[LateFence] = []  # oldest first
        self._foreign: dict[StreamClock, list[Fence]] = {}  # what a stream has to wait for since its last fence
        super().__init__(steps_in_flight=steps_in_flight)

    def pending(self, stream: Stream | None = None) -> int:
        """How many fences are recorded and not complete, of one stream or of all."""
        return len(self._of(stream))

    def complete(self, n: int = 1, stream: Stream | None = None) -> int:
        """Completes the `n` oldest fences of a stream or of all, or as many as there are; says how many.

        With them completes whatever their streams had to wait for.
        """
        done, n = 0, count(n, "complete: n")
        while done < n and (pending := self._of(stream)):
            self._complete_before(pending[0]._seen)
            done += 1
        return done

    def _of(self, stream: Stream | None) -> list[LateFence]:
        pending = self._pending
        return pending if stream is None else [fence for fence in pending if fence._stream is self._late(stream)]

    def _late(self, stream: Stream) -> StreamClock:
        late = self._streams.get(stream.key)
        if late is None:
            late = self._streams[stream.key] = self._clocks.add(stream.name)
        return late

    def _before(self, seen: list[int]) -> list[LateFence]:
        """The fences before a point that are not complete, oldest first."""
        streams = len(seen)
        return [
            fence
            for fence in self._pending
            if fence._stream.number < streams and fence.number <= seen[fence._stream.number]
        ]

    def _complete_before(self, seen: list[int]) -> None:
        """Completes the fences before a point, each after those of others that its stream had to wait for."""
        for fence in self._before(seen):
            for foreign in fence._foreign:
                if not foreign.query():
                    foreign.wait()
            self._clocks.host_joins(fence._seen)
            self._pending.remove(fence)

    def _record(self, stream: Stream) -> LateFence:
        """A fence that is not complete, after all that `stream` has recorded and waited for."""
        late = self._late(stream)
        number = self._clocks.happens(late)
        fence = LateFence(number, self, late, list(late.seen), tuple(self._foreign.pop(late, ())))
        self._pending.append(fence)
        return fence

    # The operations that a device implements

    def _fence_behind(self, stream: Stream) -> Fence:
        return self._record(stream)

    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        late = self._late(stream)
        if isinstance(fence, LateFence) and fence._runtime is self:
            late.join(fence._seen)
        elif not fence.query():
            self._foreign[late] = [other for other in self._foreign.get(late, ()) if other is not fence] + [fence]

    def read_back(self, tensor: torch.Tensor) -> Array:
        """Brings a device tensor to the host, and completes all that is before it on the current stream."""
        values = super().read_back(tensor)
        self._complete_before(self._record(self.current_stream)._seen)
        return values

    def _wait_for_device(self) -> None:
        self.complete(self.pending())
