"""Baseline: rows never move. A request has a row in tables on both sides, and a step sends who is active.

Changes, here whole rows of those who join, are staged beside the active rows, cross with them in one copy, and
is scattered into the device table in one write. Kernels find the rows through the index, each for itself, which is not
measured here; the lengths advance on the device.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

WORD = 8


@final
class StagedSlots:
    """The running batch, the requests that join it at each step, and those that stay.

    A step starts from the same active rows each time, and does the same work; only lengths go on growing.

    Attributes:
        name: for reports.
        keeps_order: True: the active rows are in the order of the batch.
        host, device: int64[slots, words], the tables; the columns are views of them.
        active: int64[rows], of the last step.
    """

    name = "stable slots, staged writes"
    keeps_order = True

    def __init__(
        self,
        running: Mapping[str, Array],
        joining: Mapping[str, Array],
        keep: npt.NDArray[np.bool_],
        device: torch.device,
    ) -> None:
        self._running, self._joined, self._keep = running["slots"], joining["slots"], keep
        self._pinned = device.type == "cuda"
        stored = sorted((name for name in running if name != "slots"), key=lambda name: -running[name].itemsize)
        self._places: dict[str, tuple[np.dtype[Any], int]] = {}
        end = 0
        for name in stored:  # wide columns first: each is aligned then
            self._places[name] = (running[name].dtype, end // running[name].itemsize)
            end += running[name].itemsize
        words = -(-end // WORD)
        most = max(int(lengths.max(initial=0)) for lengths in (self._running, self._joined))
        self.host = np.zeros((1 + most, words), dtype=np.int64)
        for columns, slots in ((running, self._running), (joining, self._joined)):
            for name in stored:
                self._host_column(name)[slots] = columns[name]
        self._joining = self.host[self._joined]
        self.host[self._joined] = 0
        self._start = self.host.copy()
        self.device = torch.from_numpy(self._start.copy()).to(device)
        self._device_lens = self._device_column("seq_lens")
        self._host_lens = self._host_column("seq_lens")
        self._ones = torch.ones(len(keep) + len(self._joined), dtype=torch.int64, device=device)
        self.active = torch.from_numpy(self._running.copy()).to(device)

    def _host_column(self, name: str) -> Array:
        dtype, at = self._places[name]
        column: Array = self.host.view(dtype)[:, at]
        return column

    def _device_column(self, name: str) -> torch.Tensor:
        dtype, at = self._places[name]
        return self.device.view(torch.from_numpy(np.empty(0, dtype)).dtype)[:, at]

    def step(self) -> None:
        """Requests leave, others join, all advance: one copy, one scatter of rows, one addition."""
        active = np.concatenate((self._running[self._keep], self._joined))
        num_active, num_joined = len(active), len(self._joined)
        self.host[self._joined] = self._joining
        self._host_lens[active] += 1
        # pinned anew each step: torch gives the memory out again once the copy out of it has run
        staged = torch.empty(num_active + num_joined + self._joining.size, dtype=torch.int64, pin_memory=self._pinned)
        words = staged.numpy()
        words[:num_active] = active
        words[num_active : num_active + num_joined] = self._joined
        words[num_active + num_joined :] = self._joining.ravel()
        arrived = torch.empty_like(staged, device=self.device.device, pin_memory=False)
        arrived.copy_(staged, non_blocking=True)
        self.active = arrived[:num_active]
        rows = arrived[num_active + num_joined :].view(num_joined, self.device.shape[1])
        self.device.index_copy_(0, arrived[num_active : num_active + num_joined], rows)
        self._device_lens.index_add_(0, self.active, self._ones[:num_active])

    def after_one_step(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Host and device side of each column, one step after the start, at the active rows."""
        self.host[:] = self._start
        self.device.copy_(torch.from_numpy(self._start))
        self.step()
        active = np.concatenate((self._running[self._keep], self._joined))
        host = {name: self._host_column(name)[active] for name in self._places}
        device = {name: self._device_column(name)[self.active].cpu().numpy() for name in self._places}
        return host | {"slots": active}, device | {"slots": self.active.cpu().numpy()}
