"""Fences that know what lies before them, and events as engines use them: recorded again and again."""

from collections.abc import Callable
from typing import final

import attrs

from batchstate.errors import ArgumentError
from batchstate.runtime import Fence, Runtime, Stream
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


@final
class RaceEvent:
    """What `torch.cuda.Event` is to an engine: recorded, waited for, and recorded again.

    A stream that waits does so for the last recording before its wait, whatever is recorded later.

    Args:
        name: for errors.
        record, wait: of the runtime.
    """

    def __init__(
        self, name: str, record: Callable[[Stream | None], Fence], wait: Callable[[Fence, Stream | None], None]
    ) -> None:
        self._name = name
        self._record = record
        self._wait = wait
        self._last: Fence | None = None

    def __repr__(self) -> str:
        return f"RaceEvent({self._name!r}{'' if self._last else ', not recorded'})"

    def record(self, stream: Stream | None = None) -> None:
        """Records it on a stream, by default the current one."""
        self._last = self._record(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait for the last recording.

        Raises:
            ArgumentError: there is none. A device would not wait at all.
        """
        self._wait(self._recorded("a stream waits"), stream)

    def query(self) -> bool:
        """Whether the host knows that the last recording is complete.

        Raises:
            ArgumentError: there is none. A device would say that it is complete.
        """
        return self._recorded("it is asked").query()

    def synchronize(self) -> None:
        """The host waits for the last recording.

        Raises:
            ArgumentError: there is none. A device would not wait at all.
        """
        self._recorded("the host waits").wait()

    def _recorded(self, what: str) -> Fence:
        if self._last is None:
            raise ArgumentError(
                f"{what} for event {self._name!r} before it was recorded",
                value=self._name,
                remedy="record it first, on the stream whose work it stands for; a device would not wait at all",
            )
        return self._last
