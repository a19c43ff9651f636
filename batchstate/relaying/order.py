"""The order of streams around a relay: who reads comes behind who wrote, and who overwrites comes behind both.

Every publish has its own fence, and a stream waits for the fences of those publishes whose entries it touches, on the
device and once each. On one stream its own order does, and nothing is waited for.
"""

from collections.abc import Callable, Sequence
from typing import final

from batchstate import invariants, levels
from batchstate.relaying.entries import Publication
from batchstate.runtime import Fence, Runtime, Stream
from batchstate.violations import Where


@final
class StreamOrder:
    """Makes streams wait, and judges that they did.

    Args:
        runtime: the device.
        where: of reports, for an operation.
    """

    def __init__(self, runtime: Runtime, where: Callable[[str], Where]) -> None:
        self._runtime = runtime
        self._where = where

    def read(self, publications: Sequence[Publication], reader: str, operation: str) -> None:
        """Puts the current stream behind the publishes.

        Raises:
            Violation: FUTURE_ORDER, at `cheap`.
        """
        stream = self._runtime.current_stream
        for made in publications:
            self._await_publish(made, stream)
        if levels.cheap:
            for made in publications:
                invariants.future_order(
                    stream.key in made.known_to, made.by, reader, f"a wait for {made.by}", **self._where(operation)
                )

    def noted(self, publications: Sequence[Publication], fence: Fence) -> None:
        """Notes a read of the current stream; `fence` is behind it."""
        stream = self._runtime.current_stream
        for made in publications:
            made.reads[stream] = fence
            made.passed = {pair for pair in made.passed if pair[0] != stream}

    def overwrite(self, publications: Sequence[Publication], writer: str, operation: str) -> None:
        """Puts the current stream behind the publishes and behind everybody who has read from them.

        Raises:
            Violation: FUTURE_ORDER, at `cheap`.
        """
        self.read(publications, writer, operation)
        stream = self._runtime.current_stream
        for made in publications:
            waited = self._await_reads(made, stream)
            if levels.cheap:
                for reader in made.reads:
                    invariants.future_order(
                        reader == stream or reader in waited,
                        f"a read on stream {reader.name!r} of {made.by}",
                        writer,
                        "a wait for that read",
                        **self._where(operation),
                    )

    def check_fence(self, fence: Fence, others: Sequence[Publication], writer: str, operation: str) -> None:
        """Two publishes share no fence, unless it is complete and orders everything.

        Raises:
            Violation: FUTURE_ORDER.
        """
        shared = next((made for made in others if made.fence is fence), None)
        invariants.future_order(
            shared is None or fence.query(),
            "" if shared is None else shared.by,
            writer,
            "a fence for each publish",
            **self._where(operation),
        )

    def _await_publish(self, made: Publication, stream: Stream) -> None:
        if stream.key not in made.known_to:
            self._runtime.wait(made.fence, stream=stream)
            made.known_to.add(stream.key)

    def _await_reads(self, made: Publication, stream: Stream) -> set[Stream]:
        """The streams whose reads the current one now comes behind."""
        others = [reader for reader in made.reads if reader != stream]
        for reader in others:
            if (reader, stream.key) not in made.passed:
                self._runtime.wait(made.reads[reader], stream=stream)
                made.passed.add((reader, stream.key))
        return set(others)
