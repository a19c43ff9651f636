"""A stream that looks at what the others hold, and tells the host later: it waits for all, and nobody waits for it."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batching.upload import Extras
from batchstate.mirror import MirroredTensor
from batchstate.runtime.download import Download
from batchstate.testing.machine import agree_on
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import column
from batchstate.testing.machines.overlap.requests import MARKS, Running
from batchstate.testing.machines.overlap.steps import Step

Array = npt.NDArray[Any]


@final
@attrs.frozen(eq=False)
class Look:
    """What was looked at, on its way to the host, and what should be there."""

    download: Download
    expected: Sequence[Array]

    def judge(self) -> None:
        """Reads it.

        Raises:
            DisagreementError: the host finds something else.
        """
        for place, (expected, found) in enumerate(zip(self.expected, self.download.resolve(), strict=True)):
            agree_on(expected, found, f"{self.download.name}, array {place}")


@final
class Audit:
    """Looks, and keeps what the host has not read.

    Attributes:
        unread: oldest first.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self.unread: list[Look] = []

    def columns(self, batch: Running, ages: MirroredTensor) -> None:
        """The columns of a batch that was not launched: they cross here, and what only the device has is gathered."""
        with self._runtime.use(self._memory.streams.audit):
            total = batch.seq_lens.device + 2 * ages.device + 3 * batch.last.device + 5 * batch.odd.device
            expected = batch.seq_lens.np + 2 * ages.np
            expected = expected + 3 * column(batch.requests, "last") + 5 * column(batch.requests, "odd")
            self._tell("columns", [total, batch.slots.device], [expected, batch.slots.np])

    def tables(self, batch: Running) -> None:
        """Rows of the tables, which may be written again once this has read them."""
        tokens, marks = self._memory.tokens, self._memory.marks
        with self._runtime.use(self._memory.streams.audit):
            slots = batch.slots.device
            rows = [table.device.index_select(0, slots) for table in (marks, tokens)]
            read_done = self._runtime.record()
            for table in (marks, tokens):
                table.read_until(read_done)
            assert tokens.host is not None
            expected = np.array([one.held.marks for one in batch.requests], np.int64)
            self._tell("tables", rows, [expected, tokens.host[batch.slots.np]])

    def extras(self, uploaded: Extras, salts: Array) -> None:
        """What crossed with a step."""
        with self._runtime.use(self._memory.streams.audit):
            self._tell("salts", [uploaded["salts"] * 2], [salts * 2])

    def results(self, step: Step) -> None:
        """The device side of results that the host has read, from the relay's own stream."""
        if step.results is not None:
            with self._runtime.use(self._memory.streams.audit):
                tokens, logs = (step.results[name] for name in ("token", "log"))
                total = tokens.device[:, None] + 2 * logs.device
                self._tell("results", [total], [tokens.np[:, None] + 2 * logs.np])

    def what_is_left(self) -> None:
        """When everybody has gone: marks are cleared, and nobody wrote for slot, page or token 0."""
        memory = self._memory
        with self._runtime.use(memory.streams.audit):
            padding = torch.stack((memory.kv[0].sum(), memory.states.device[0]))
            marks = memory.marks.device.sum(0)
            nothing = np.zeros(2, np.int64)
            self._tell("what is left", [padding, marks], [nothing, np.zeros(MARKS, np.int64)])

    def read(self, at: int) -> None:
        """The host reads one."""
        self.unread.pop(at).judge()

    def _tell(self, what: str, found: Sequence[torch.Tensor], expected: Sequence[Array]) -> None:
        self.unread.append(Look(self._runtime.download(found, name=what), expected))
