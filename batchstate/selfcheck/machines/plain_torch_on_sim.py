"""Plain torch code that says `cuda`, on the simulated device behind `cuda_on_cpu`, in some order of its streams.

A class as engines write them keeps counts on the host and on the device. It orders what it does in every way that
torch has, so both sides agree whatever the order, and a watch compares them. An edge that the front end loses shows.
"""

from typing import Any, final

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchstate import invariants, levels
from batchstate.selfcheck.machines.plain_torch import WAYS, come_behind, cuda
from batchstate.testing.cuda import cuda_on_cpu
from batchstate.testing.machine import Machine, ask
from batchstate.testing.sim import PORTFOLIO
from batchstate.watch import watch

DTYPE = torch.int64


class Counts:
    """Four counts, on both sides."""

    def __init__(self) -> None:
        self.host = torch.zeros(4, dtype=DTYPE)
        self.device = torch.zeros(4, dtype=DTYPE, device="cuda")
        self.side: Any = cuda.Stream()
        self.staging = torch.zeros(4, dtype=DTYPE, pin_memory=True)
        self.graph: Any = cuda.CUDAGraph()
        with cuda.graph(self.graph, stream=self.side):
            self.device.add_(torch.ones_like(self.device))
        self.default: Any = cuda.current_stream()
        cuda.synchronize()

    def add(self, number: int, way: str) -> None:
        """The side stream adds, and the default stream comes behind it."""
        come_behind(self.side, self.default, way, self.device)
        with cuda.stream(self.side):
            self.device.add_(number)
        come_behind(self.default, self.side, way, self.device)
        self.host = self.host + number

    def replay(self, number: int, on_side: bool) -> None:
        """On either stream the counts change signs, the graph adds one, and then memory made before it is added."""
        stream = self.side if on_side else self.default
        stream.wait_stream(self.default)
        with cuda.stream(stream):
            kept = torch.full_like(self.device, number)
            self.device.neg_()
            self.graph.replay()
            self.device.add_(kept)
        self.default.wait_stream(stream)
        self.host = -self.host + (number + 1)

    def lend(self, number: int) -> None:
        """Memory of the default stream is read on the side stream, which its owner is told, and dropped."""
        lent = torch.full_like(self.device, number)
        self.side.wait_stream(self.default)
        with cuda.stream(self.side):
            self.device.add_(lent)
            lent.record_stream(self.side)
        del lent
        torch.zeros_like(self.device)
        self.default.wait_stream(self.side)
        self.host = self.host + number

    def upload(self, number: int, way: str) -> None:
        """A pinned buffer is refilled as soon as the copy from it is over, of which the host asks."""
        self.staging.fill_(number)
        with cuda.stream(self.side):
            moved = self.staging.to("cuda", non_blocking=True)
            copied = self.side.record_event()
        while not (copied if way == "event" else self.side).query():
            pass
        self.staging.fill_(-1)
        self.device.add_(moved)
        self.host = self.host + number


@final
class PlainTorchOnSimMachine(Machine):
    """One object of the class."""

    NAME = "plain_torch_on_sim"
    TARGETS = (*(f"behind by {way}" for way in WAYS), "memory lent", "a copy asked for", "a replay")

    @initialize(scheduler=st.sampled_from(tuple(PORTFOLIO)), seed=st.integers(0, 99))
    def begin(self, scheduler: str, seed: int) -> None:
        """Zeros, and a graph."""
        self._windows.enter_context(levels.checks(self.session.level))
        self._windows.enter_context(cuda_on_cpu(f"sim:{scheduler}", seed=seed))
        changes = ["add", "replay", "lend", "upload"]
        self._windows.enter_context(watch(Counts, after=changes, num_rows=lambda _: 4, pairs=[("host", "device")]))
        self.counts = Counts()
        self.added = 0

    @rule(number=st.integers(1, 9), way=st.sampled_from(WAYS))
    def add(self, number: int, way: str) -> None:
        """On the side stream."""
        self.counts.add(number, way)
        self.added += number
        self.reached(f"behind by {way}")

    @rule(number=st.integers(1, 9), on_side=st.booleans())
    def replay(self, number: int, on_side: bool) -> None:
        """On either stream."""
        self.counts.replay(number, on_side)
        self.added = -self.added + number + 1
        self.reached("a replay")

    @rule(number=st.integers(1, 9))
    def lend(self, number: int) -> None:
        """To the side stream."""
        self.counts.lend(number)
        self.added += number
        self.reached("memory lent")

    @rule(number=st.integers(1, 9), way=st.sampled_from(("event", "stream")))
    def upload(self, number: int, way: str) -> None:
        """And asks whether it is over."""
        self.counts.upload(number, way)
        self.added += number
        self.reached("a copy asked for")

    def check(self) -> None:
        """The counts are those that were added."""
        ask(invariants.mirror_equal, np.full(4, self.added), self.counts.host.numpy(), object="host", operation="check")
