"""Device memory that several streams use: each use comes behind the work that made or wrote it."""

from typing import NamedTuple, Self, final

import torch

from batchstate.runtime.base import OfThisProcess, Runtime
from batchstate.runtime.memory import PackedUpload
from batchstate.runtime.streams import Fence, Stream


class ReadyTensor(NamedTuple):
    """A device tensor that exists, and the work that another stream has to wait for before it uses it.

    Attributes:
        tensor: on the device.
        stream: the stream that made it.
        ready: a fence recorded after the work that made it; None stands for all work of `stream`.
        synchronised: keys of other streams that are synchronised with it; see `Runtime.use_on_current_stream`.
    """

    tensor: torch.Tensor
    stream: Stream
    ready: Fence | None
    synchronised: set[object]

    @classmethod
    def uploaded(cls, tensor: torch.Tensor, packed: PackedUpload) -> Self:
        """`tensor`, a view of a packed upload."""
        return cls(tensor, packed.stream, packed.ready, packed.synchronised)

    @classmethod
    def made_now(cls, tensor: torch.Tensor, runtime: Runtime) -> Self:
        """A tensor that the current stream has made."""
        return cls(tensor, runtime.current_stream, None, set())

    def on_current_stream(self, runtime: Runtime) -> torch.Tensor:
        """The tensor, ordered before and kept alive for what the current stream does next."""
        return runtime.use_on_current_stream(self.tensor, self.stream, self.ready, synchronised=self.synchronised)


@final
class FixedMemory(OfThisProcess):
    """Device memory whose address stays, written in place again and again while forwards read it.

    Tables, and the buffers that a captured graph reads. A write comes behind every forward that still reads, and behind
    writes of other streams; a read comes behind the last write. The order is the device's: the host never waits.

    Attributes:
        runtime: the device.
        memory: itself, in no order with any other use. `ordered` gives it for the current stream.
    """

    def __init__(self, runtime: Runtime, memory: torch.Tensor) -> None:
        self.runtime = runtime
        self.memory = memory
        self._last_writer = runtime.current_stream
        self._written: Fence | None = None  # behind the last write; without it, readers wait for all of its stream
        self._synchronised: set[object] = set()
        self._readers: list[tuple[Fence, set[Stream]]] = []

    def __repr__(self) -> str:
        return f"FixedMemory({self.memory.dtype}{list(self.memory.shape)}, {len(self._readers)} readers)"

    def ordered(self) -> torch.Tensor:
        """The memory, for the current stream, which waits for the last write of another stream."""
        return self.runtime.use_on_current_stream(
            self.memory, self._last_writer, self._written, synchronised=self._synchronised
        )

    def read_until(self, fence: Fence) -> None:
        """A launched forward reads until `fence`: each stream that writes next waits for it."""
        self._forget_finished_readers()
        self._readers.append((fence, set()))

    def await_readers(self) -> None:
        """Orders the next work of the current stream behind forwards that read, and behind writes of other streams."""
        current = self.runtime.current_stream
        if not self._readers and current is self._last_writer:
            return
        if self.runtime.capturing:
            return  # a captured stream may not wait for work outside its graph: its replay is ordered instead
        if self._readers:
            self._forget_finished_readers()
        for fence, waited in self._readers:
            if current not in waited:
                self.runtime.wait(fence, stream=current)
                waited.add(current)
        if current is not self._last_writer:
            self.ordered()
            self._last_writer = current

    def note_write(self, fence: Fence | None = None, *, fenced: bool = True) -> None:
        """The next reader on another stream waits for this write, and for nothing behind it.

        `fence` is behind it and the work launched with it; by default one is recorded now. Unless it is `fenced`,
        readers wait for all of the stream, until another call brings a fence.
        """
        if fence is None and fenced and not self.runtime.capturing:
            fence = self.runtime.record(self._last_writer)
        self._written = fence
        self._synchronised = set()

    def note_foreign_write(self) -> None:
        """The same for a write that others launched on the current stream, in an order of their own."""
        self._last_writer = self.runtime.current_stream
        self.note_write()

    def _forget_finished_readers(self) -> None:
        if self._readers and not self.runtime.capturing:
            self._readers = [reader for reader in self._readers if not reader[0].query()]
