"""Plain torch code that says `cuda`, without a GPU: each use comes behind the one before, in some way.

A class as engines write them keeps counts on the host and on the device. It knows nothing of this library and has no
race, so an edge that a front end loses is a race, or on the simulated device a wrong count in some order of streams.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own code calls it
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from batchstate import invariants, levels
from batchstate.races import runtime as race
from batchstate.races.cuda import (
    CudaRuntime,
    WatchedCuda,
    _streams,
    _window,
    cuda_on_cpu,
    declared_kernel,
    watch_cuda,
    watching,
)
from batchstate.races.cuda._torch import replace
from batchstate.races.sim import PORTFOLIO
from batchstate.watch import watch
from tests.selfcheck.machine import Machine, ask

cuda: Any = torch.cuda  # its streams and events have no types

DTYPE = torch.int64

WAYS = (
    "event",
    "event by stream",
    "stream",
    "event on the host",
    "stream on the host",
    "device",
    "read back",
    "count",
    "number",
    "type",
    "comparison",
)
"""How a stream comes behind another one."""

SOURCES = ("pageable memory", "pinned until an event is over", "pinned until a stream is idle", "pinned until a wait")
"""The source of a copy to the device, and when it is refilled."""


UNSEEN = ("two launches", "pinned temporaries", "a backward pass")
"""What torch does without a word."""

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "read back": lambda buffer: buffer.cpu(),
    "count": lambda buffer: torch.ones_like(buffer).nonzero(),
    "number": lambda buffer: torch.tensor([buffer[0], 1]),
    "type": lambda buffer: buffer.type("torch.LongTensor"),
    "comparison": lambda buffer: torch.allclose(buffer, buffer),
}
"""Calls of torch that make the host wait for what came before."""


@declared_kernel(reads=["source", "rows"], writes=["target"], rows={"source": "rows", "target": "rows"})
def moved_rows(source: torch.Tensor, target: torch.Tensor, rows: list[int]) -> None:
    """A kernel that moves rows, which torch does not see."""
    target.numpy()[rows] = source.numpy()[rows]


def come_behind(stream: Any, last: Any, way: str, buffer: torch.Tensor) -> None:
    """Orders a stream behind another one, which has used a buffer last."""
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
            READS[way](buffer)


class Counts:
    """Four counts, on both sides."""

    def __init__(self) -> None:
        self.host = torch.zeros(4, dtype=DTYPE)
        self.device = torch.zeros(4, dtype=DTYPE, device="cuda")
        self.side: Any = cuda.Stream()
        self.staging = torch.zeros(4, dtype=DTYPE, pin_memory=True)
        self.graph: Any = cuda.CUDAGraph()
        step = torch.tensor(1, dtype=DTYPE)
        with cuda.graph(self.graph, stream=self.side):
            self.device.add_(torch.ones_like(self.device)).mul_(step)
        step.fill_(7)  # the graph has the number of its capture
        self.weight = torch.ones(4, device="cuda", requires_grad=True)
        self.scale = torch.ones(4, device="cuda", requires_grad=True)
        self.default: Any = cuda.current_stream()
        cuda.synchronize()

    def add(self, number: int, way: str) -> None:
        """The side stream adds behind the default stream, which then adds behind it."""
        come_behind(self.side, self.default, way, self.device)
        with cuda.stream(self.side):
            self.device.add_(number)
        come_behind(self.default, self.side, way, self.device)
        self.device.add_(number)
        self.host = self.host + 2 * number

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

    def replay_twice(self) -> None:
        """A graph is launched behind its launch before, whatever the stream."""
        self.side.wait_stream(self.default)
        self.graph.replay()
        with cuda.stream(self.side):
            self.graph.replay()
        self.default.wait_stream(self.side)
        self.host = self.host + 2

    def stage(self, number: int) -> None:
        """Pinned temporaries are dropped under copies of torch, which keeps them."""
        for _ in range(2):
            staged = torch.full((4,), number, dtype=DTYPE).pin_memory()
            self.device.add_(staged.to("cuda", non_blocking=True))
            del staged
            torch.zeros(4, dtype=DTYPE).pin_memory()
        self.host = self.host + 2 * number

    def learn(self, number: int) -> None:
        """A loss of two streams, whose gradients are there behind the pass."""
        right = self.weight + 0  # the first use: torch adds gradients on its stream
        self.side.wait_stream(self.default)
        with cuda.stream(self.side):
            left = self.scale * number * self.weight
        self.default.wait_stream(self.side)
        left.record_stream(self.default)
        loss: Any = (left * right).sum()
        loss.backward()
        twice: Any = self.weight.grad
        once: Any = self.scale.grad
        once.record_stream(self.default)  # of a leaf that the side stream used first, and alone
        self.device.add_((twice - once).to(DTYPE))
        self.weight.grad = self.scale.grad = None
        self.host = self.host + number

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

    def move(self, row: int) -> None:
        """Two streams move rows of their own, which they name, and read the same statistics in evaluation."""
        table, moved = torch.ones(4, 2, device="cuda"), torch.zeros(4, 2, device="cuda")
        mean, variance = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")
        cuda.synchronize()
        for stream, rows in ((self.default, [row]), (self.side, [(row + 1) % 4, (row + 2) % 4])):
            with cuda.stream(stream):
                moved_rows(table, moved, rows)
                F.batch_norm(torch.ones(3, 2, device="cuda"), mean, variance, training=False)
        cuda.synchronize()

    def upload(self, number: int, source: str) -> None:
        """A buffer is refilled as soon as the copy from it is over."""
        buffer = torch.zeros(4, dtype=DTYPE) if source == "pageable memory" else self.staging
        buffer.fill_(number)
        with cuda.stream(self.side):
            moved = buffer.to("cuda", non_blocking=True)
            copied = self.side.record_event()
        if source == "pinned until a wait":
            self.side.synchronize()
        elif source != "pageable memory":
            while not (copied if source == "pinned until an event is over" else self.side).query():
                pass
        buffer.fill_(-1)
        self.default.wait_event(copied)
        moved.record_stream(self.default)
        self.device.add_(moved)
        self.host = self.host + number


class PlainTorchMachine(Machine):
    """One object of the class, under the race detector."""

    NAME = "plain_torch"
    window: CudaRuntime | WatchedCuda | None = None
    TARGETS = (
        *(f"behind by {way}" for way in WAYS),
        *SOURCES,
        "memory lent",
        "a replay",
        "rows moved",
        "owners",
        *UNSEEN,
    )

    @initialize(scheduler=st.sampled_from(tuple(PORTFOLIO)), seed=st.integers(0, 99))
    def begin(self, scheduler: str, seed: int) -> None:
        self._windows.enter_context(levels.checks(self.session.level))
        replace(self._windows, race, "PATIENCE", 20)  # `Counts.upload` polls: it would ask 10,000 times
        self._open(scheduler, seed)
        self.counts = Counts()
        if self.window is not None:
            self.window.bind(self.counts.graph, number=lambda: int("1000"))
        self.expected = 0

    def _open(self, scheduler: str, seed: int) -> None:
        self._owners(self._windows.enter_context(cuda_on_cpu(reuse=bool(seed % 2))))

    def _owners(self, rt: CudaRuntime | WatchedCuda) -> None:
        """A table whose rows have owners, and a buffer that each step writes."""
        self.window = rt
        self.owned, self.static = torch.zeros(4, 2, device="cuda"), torch.zeros(4, device="cuda")
        self.whose: dict[int, int] = {}
        rt.rows_of(self.owned, owner=lambda: self.whose, valid=lambda: 4)
        rt.fresh(self.static, valid=lambda: 4)

    @precondition(lambda self: self.window is not None)
    @rule(row=st.integers(0, 3), who=st.integers(1, 9))
    def serve(self, row: int, who: int) -> None:
        """In a new step a row gets an owner, which writes it and reads it; all of the static buffer is written."""
        rt = self.window
        if rt is None:
            return
        rt.next_step()
        self.whose[row] = who
        self.owned[row].fill_(who)
        self.static[:2].fill_(1)
        self.static[2:].fill_(2)
        self.counts.default.synchronize()
        self.owned + 1
        self.static + 1
        self.reached("owners")

    @rule(number=st.integers(1, 9), way=st.sampled_from(WAYS))
    def add(self, number: int, way: str) -> None:
        self.counts.add(number, way)
        self.expected += 2 * number
        self.reached(f"behind by {way}")

    @rule(number=st.integers(1, 9), on_side=st.booleans())
    def replay(self, number: int, on_side: bool) -> None:
        self.counts.replay(number, on_side)
        self.expected = -self.expected + number + 1
        self.reached("a replay")

    @rule(number=st.integers(1, 9))
    def lend(self, number: int) -> None:
        self.counts.lend(number)
        self.expected += number
        self.reached("memory lent")

    @rule()
    def replay_twice(self) -> None:
        self.counts.replay_twice()
        self.expected += 2
        self.reached("two launches")

    @rule(number=st.integers(1, 9))
    def stage(self, number: int) -> None:
        self.counts.stage(number)
        self.expected += 2 * number
        self.reached("pinned temporaries")

    @precondition(lambda self: self.NAME != "plain_torch_watched")  # torch's engine runs it unseen on a GPU
    @rule(number=st.integers(1, 9))
    def learn(self, number: int) -> None:
        self.counts.learn(number)
        self.expected += number
        self.reached("a backward pass")

    @rule(row=st.integers(0, 3))
    def move(self, row: int) -> None:
        self.counts.move(row)
        self.reached("rows moved")

    @rule(number=st.integers(1, 9), source=st.sampled_from(SOURCES))
    def upload(self, number: int, source: str) -> None:
        self.counts.upload(number, source)
        self.expected += number
        self.reached(source)

    def check(self) -> None:
        for side in (self.counts.host, self.counts.device):
            actual = np.array(side.tolist())
            ask(invariants.mirror_equal, np.full(4, self.expected), actual, object="counts", operation="check")


@final
class PlainTorchOnSimMachine(PlainTorchMachine):
    """The same on the simulated device, in some order of its streams; a watch compares the sides."""

    NAME = "plain_torch_on_sim"
    TARGETS = tuple(target for target in PlainTorchMachine.TARGETS if target != "owners")

    def _open(self, scheduler: str, seed: int) -> None:
        self._windows.enter_context(cuda_on_cpu(f"sim:{scheduler}", seed=seed))
        changes = ["add", "replay", "replay_twice", "stage", "learn", "lend", "upload"]
        self._windows.enter_context(watch(Counts, after=changes, num_rows=lambda _: 4, pairs=[("host", "device")]))


@contextlib.contextmanager
def watched_over(window: CudaRuntime, **options: Any) -> Iterator[WatchedCuda]:
    """A window of `watch_cuda` inside of one of `cuda_on_cpu`, whose tensors, streams and graphs count as the GPU's."""
    with contextlib.ExitStack() as stack:
        replace(stack, _window, "_open", [])
        replace(stack, watching, "KINDS", (_streams._Stream, _streams._Event, _streams._Graph))
        replace(stack, watching.WatchTracer, "on_device", lambda self, tensor: window.tracer.on_device(tensor))
        yield stack.enter_context(watch_cuda(**options))


@final
class PlainTorchWatchedMachine(PlainTorchMachine):
    """The same while a device runs it, told to `watch_cuda` alone; and rows that two streams write at once."""

    NAME = "plain_torch_watched"
    TARGETS = (*(target for target in PlainTorchMachine.TARGETS if target != "a backward pass"), "rows apart")

    def _open(self, scheduler: str, seed: int) -> None:
        device = self._windows.enter_context(cuda_on_cpu(on_race="collect"))
        self._owners(self._windows.enter_context(watched_over(device)))

    @rule(row=st.integers(0, 6))
    def write_rows(self, row: int) -> None:
        """Two streams write rows of one table that their indices name, and nothing orders them: the rows are apart."""
        table = torch.zeros(8, 2, device="cuda")
        indices = [torch.tensor([index], device="cuda") for index in (row, row + 1)]
        values = torch.ones(1, 2, device="cuda")
        cuda.synchronize()
        for stream, index in zip((self.counts.default, self.counts.side), indices, strict=True):
            with cuda.stream(stream):
                table.index_copy_(0, index, values)
        cuda.synchronize()
        self.reached("rows apart")
