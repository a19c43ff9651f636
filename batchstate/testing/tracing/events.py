"""Events as engines use them: recorded again and again."""

from collections.abc import Callable
from typing import final

from batchstate.errors import ArgumentError
from batchstate.runtime import Fence, Stream


@final
class DeviceEvent:
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
        return f"DeviceEvent({self._name!r}{'' if self._last else ', not recorded'})"

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
