"""Fences completed by hand, so that a test decides when a step in flight ends."""

from collections import deque
from typing import final

import attrs


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
