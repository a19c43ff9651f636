"""Fences that know what lies before them."""

from collections.abc import Callable
from typing import final

import attrs

from batchstate.runtime import Fence, Runtime
from batchstate.runtime.counters import Counters

PATIENCE = 10_000
"""Times that a fence is asked before it is complete: what polls instead of waiting gets on, as on a device."""


@final
@attrs.define(eq=False)
class RaceFence:
    """A point in a stream. Complete once the host has waited for it, or for something behind it.

    Attributes:
        number: in the order in which the fences of a runtime were recorded, from 1.
        event: of its recording.
        lane: of its stream.
        seen: what is known to lie before it: lane -> newest event.
        owner: the runtime.
    """

    number: int
    event: int
    lane: int
    seen: list[int] = attrs.field(repr=False)
    owner: Runtime = attrs.field(repr=False)
    _inner: Fence = attrs.field(repr=False)
    _over: Callable[["RaceFence"], bool] = attrs.field(repr=False)
    _join: Callable[["RaceFence"], None] = attrs.field(repr=False)
    _counters: Counters = attrs.field(repr=False)
    _patience: int | None = attrs.field(repr=False)  # None: PATIENCE
    _asked: int = 0

    def query(self) -> bool:
        """Whether the host knows that everything before it has run. Never waits."""
        self.owner.check_owner("asking a fence")
        if self._over(self):
            return True
        self._asked += 1
        if self._asked >= (PATIENCE if self._patience is None else self._patience) and self._inner.query():
            self._join(self)
            return True
        return False

    def wait(self) -> None:
        """The host waits until everything before it has run, and knows so from then on."""
        self.owner.check_owner("waiting for a fence")
        self._counters.fence_waits += 1
        self._inner.wait()
        self._join(self)
