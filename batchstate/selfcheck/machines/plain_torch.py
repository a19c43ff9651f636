"""Plain torch code that says `cuda`, in a window of `cuda_on_cpu`: each use comes behind the one before, in some way.

The code knows nothing of this library and has no race, so its mutants show which edges the front end has to see.
"""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate import invariants, levels
from batchstate.testing.cuda import cuda_on_cpu
from batchstate.testing.machine import Machine, ask

cuda: Any = torch.cuda  # its streams and events have no types

WAYS = ("event", "event by stream", "stream", "event on the host", "stream on the host", "device", "read back")
"""How a stream comes behind another one."""


def come_behind(stream: Any, last: Any, way: str, buffer: torch.Tensor) -> None:
    """Orders what a stream does next behind all that another one has, which has used a buffer last."""
    event: Any = cuda.Event()
    if way == "event":
        with cuda.stream(last):
            event.record()
        with cuda.stream(stream):
            event.wait()
    elif way == "event by stream":
        event.record(last)
        event.wait(stream)
    elif way == "stream":
        stream.wait_stream(last)
    elif way == "event on the host":
        event.record(last)
        event.synchronize()
    elif way == "stream on the host":
        last.synchronize()
    elif way == "device":
        cuda.synchronize()
    else:
        with cuda.stream(last):
            buffer.cpu()


class PlainTorchMachine(Machine):
    """Streams that take turns with one buffer, and memory that passes between them and the host."""

    NAME = "plain_torch"
    TARGETS = (*(f"behind by {way}" for way in WAYS), "memory lent", "pinned memory", "pageable memory", "a replay")

    @initialize()
    def begin(self) -> None:
        """A buffer, three streams and a graph."""
        self._windows.enter_context(levels.checks(self.session.level))
        self._open()
        self.streams: list[Any] = [cuda.current_stream(), cuda.Stream(), cuda.Stream()]
        self.buffer = torch.zeros(4, device="cuda")
        self.graph: Any = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            self.buffer.add_(1)
        self.last = self.streams[0]
        self.used = 0

    def _open(self) -> None:
        """Opens the window of the tool."""
        self._windows.enter_context(cuda_on_cpu())

    def _behind(self, stream: Any, way: str) -> None:
        """Orders what a stream does next behind the last use of the buffer."""
        come_behind(stream, self.last, way, self.buffer)
        self.reached(f"behind by {way}", stream != self.last)
        self.last = stream

    @rule(number=st.integers(0, 2), way=st.sampled_from(WAYS), replays=st.booleans())
    def use(self, number: int, way: str, replays: bool) -> None:
        """A stream writes the buffer, by an operation or by the graph."""
        stream = self.streams[number]
        self._behind(stream, way)
        with cuda.stream(stream):
            if replays:
                self.graph.replay()
            else:
                self.buffer.add_(1)
        self.used += 1
        self.reached("a replay", replays)

    @rule(number=st.integers(1, 2))
    def lend(self, number: int) -> None:
        """Memory of the first stream is used on another one, which its owner is told, and dropped."""
        side = self.streams[number]
        lent = torch.ones(4, device="cuda")
        side.wait_stream(self.streams[0])
        with cuda.stream(side):
            lent * 2
            lent.record_stream(side)
        del lent
        torch.ones(4, device="cuda")
        self.reached("memory lent")

    @rule(pinned=st.booleans())
    def upload(self, pinned: bool) -> None:
        """A source is copied and refilled: at once, or, where it is pinned, when its copy is over."""
        source = torch.arange(4)
        if pinned:
            source = source.pin_memory()
        moved = source.to("cuda", non_blocking=True)
        if not pinned:
            source.fill_(0)
        cuda.current_stream().synchronize()
        source.fill_(0)
        del moved
        self.reached("pinned memory" if pinned else "pageable memory")

    def check(self) -> None:
        """The values are those of a device that runs each operation in turn."""
        self._behind(self.streams[0], "stream")
        found = np.array(self.buffer.tolist())
        ask(invariants.mirror_equal, np.full(4, float(self.used)), found, object="buffer", operation="check")
