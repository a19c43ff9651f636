"""The race detector over code that knows nothing of it, and may catch what it raises."""

from types import TracebackType

from batchstate.testing.race.detector import Race
from batchstate.testing.race.runtime import RaceRuntime


class PlainRaceRuntime(RaceRuntime):
    """A `RaceRuntime` whose window says at its end what the code has caught. Any thread may use it."""

    def check_owner(self, operation: str) -> None:
        """Threads take turns, and are one host."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the window; torch is as it was.

        Raises:
            Race: one was raised in the window and the code caught it, or the source of a copy had changed; not where
                an error ends the window, which gets a note of what was found.
        """
        super().__exit__(kind, error, traceback)
        if error is not None:
            if self.races and not isinstance(error, Race):
                error.add_note(f"{len(self.races)} race(s) had been found by then; the first:\n{self.races[0]}")
        elif self._detector.raised:
            raise self._detector.raised[0]
