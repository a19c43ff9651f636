"""The same plain torch code, watched while a device runs it: here that is a window of `cuda_on_cpu`."""

from typing import final

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from batchstate.selfcheck._stand_in_gpu import watched_over
from batchstate.selfcheck.machines.plain_torch import PlainTorchMachine, cuda
from batchstate.testing.cuda import cuda_on_cpu


@final
class PlainTorchWatchedMachine(PlainTorchMachine):
    """Streams that take turns, told to `watch_cuda` alone; and rows that two streams write at once."""

    NAME = "plain_torch_watched"
    TARGETS = (*PlainTorchMachine.TARGETS, "rows apart")

    def _open(self) -> None:
        device = self._windows.enter_context(cuda_on_cpu(on_race="collect"))
        self._windows.enter_context(watched_over(device))

    @rule(row=st.integers(0, 6))
    def write_rows(self, row: int) -> None:
        """Two streams write rows of one table that their indices name, and nothing orders them: the rows are apart."""
        table = torch.zeros(8, 2, device="cuda")
        indices = [torch.tensor([place], device="cuda") for place in (row, row + 1)]
        values = torch.ones(1, 2, device="cuda")
        cuda.synchronize()
        for stream, index in zip(self.streams[1:], indices, strict=True):
            with cuda.stream(stream):
                table.index_copy_(0, index, values)
        cuda.synchronize()
        self.reached("rows apart")
