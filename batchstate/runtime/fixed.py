"""Device memory whose address stays, and which is written in place again and again while forwards read it.

Tables, and the buffers that a captured graph reads. Whoever writes does so behind every forward that still reads, and
behind what other streams wrote; whoever reads does so behind the last write. The order is the device's: the host never
waits.
"""

from typing import final

import torch

from batchstate.runtime.base import Runtime
from batchstate.runtime.fences import Fence, Stream


@final
class FixedMemory:
    """One piece of device memory with the order of those who use it.

    Attributes:
        runtime: the device.
        memory: itself. Without `ordered` it is in no order with anybody.
    """

    def __init__(self, runtime: Runtime, memory: torch.Tensor) -> None:
        self.runtime = runtime
        self.memory = memory
        self._last_writer: Stream = runtime.current_stream
        self._written: Fence | None = None  # behind the last write; without it, all that its stream holds is waited for
        self._handed: set[object] = set()
        self._readers: list[tuple[Fence, set[Stream]]] = []

    def __repr__(self) -> str:
        return f"FixedMemory({self.memory.dtype}{list(self.memory.shape)}, {len(self._readers)} readers)"

    def ordered(self) -> torch.Tensor:
        """The memory, for the current stream, which waits for what another stream wrote last."""
        return self.runtime.acquire(self.memory, self._last_writer, self._written, handed=self._handed)

    def read_until(self, fence: Fence) -> None:
        """A launched forward reads until `fence`: each stream that writes next waits for it."""
        self._forget_finished_readers()
        self._readers.append((fence, set()))

    def await_readers(self) -> None:
        """Orders what the current stream does next behind forwards that read, and behind writes from other streams."""
        if self.runtime.capturing:
            return  # a captured stream may not wait for what lies outside its graph; who replays it sees to the order
        self._forget_finished_readers()
        current = self.runtime.current_stream
        for fence, waited in self._readers:
            if current not in waited:
                self.runtime.wait(fence, stream=current)
                waited.add(current)
        self.ordered()
        self._last_writer = current

    def note_write(self) -> None:
        """The next reader on another stream waits for this write, and for nothing behind it."""
        self._written = None if self.runtime.capturing else self.runtime.record()
        self._handed = set()

    def _forget_finished_readers(self) -> None:
        if self._readers and not self.runtime.capturing:
            self._readers = [reader for reader in self._readers if not reader[0].query()]
