"""Baseline: one pinned host array and one device tensor per column, allocated once; each is copied up every step.

Rows stay together: who joins takes the rows of those who left, and rows from the end move into the holes that remain.
All of it is numpy on whole columns: as favourable to this way as an engine can have it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


class Pair(Protocol):
    """A column in two memories.

    Attributes:
        np: the host side, written in place.
        device: the device side.
    """

    np: Array
    device: torch.Tensor

    def upload(self, rows: int) -> object:
        """Copies the first rows to the device; the host does not wait."""
        ...


MakePair = Callable[[int, torch.dtype, torch.device], Pair]


@final
class PinnedPair:
    """A `Pair` in plain torch."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.np: Array = self._host.numpy()
        self.device = torch.zeros(size, dtype=dtype, device=device)

    def upload(self, rows: int) -> object:
        return self.device[:rows].copy_(self._host[:rows], non_blocking=True)


@final
class PersistentBuffers:
    """The running batch, the requests that join it at each step, and those that stay.

    A step changes the buffers in place, so the next one starts from other values; it does the same work.

    Attributes:
        name: for reports.
        keeps_order: False, since rows fill holes.
        columns: the buffers.
        rows: how many of their rows are requests, after a step.
    """

    keeps_order = False

    def __init__(
        self,
        name: str,
        running: Mapping[str, Array],
        joining: Mapping[str, Array],
        keep: npt.NDArray[np.bool_],
        device: torch.device,
        make: MakePair = PinnedPair,
    ) -> None:
        self.name = name
        self._start, self._joining, self._keep = running, joining, keep
        self._num_joining = len(joining["slots"])
        size = len(keep) + self._num_joining
        self.columns = {
            column: make(size, torch.from_numpy(values[:0].copy()).dtype, device) for column, values in running.items()
        }
        event: Any = torch.cuda.Event
        self._copied = event() if device.type == "cuda" else None
        self.rows = 0
        self.reset()

    def reset(self) -> None:
        """Goes back to the start."""
        self.rows = len(self._keep)
        for column, pair in self.columns.items():
            pair.np[: self.rows] = self._start[column]

    def step(self) -> None:
        """Requests leave, others join, all advance, and each column is copied up."""
        if self._copied is not None:
            self._copied.synchronize()  # the copies of the step before still read what is written now
        before, holes, joining = len(self._keep), np.flatnonzero(~self._keep), self._num_joining
        behind = before + max(joining - len(holes), 0)
        goals = np.concatenate((holes[:joining], np.arange(before, behind)))
        left = holes[joining:]
        self.rows = behind - len(left)
        for column, pair in self.columns.items():
            pair.np[goals] = self._joining[column]
        if len(left):  # more left than join
            moved = np.setdiff1d(np.arange(self.rows, behind), left)
            for pair in self.columns.values():
                pair.np[left[: len(moved)]] = pair.np[moved]
        self.columns["seq_lens"].np[: self.rows] += 1
        for pair in self.columns.values():
            pair.upload(self.rows)
        if self._copied is not None:
            self._copied.record()

    def after_one_step(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Host and device side of each column, one step after the start."""
        self.reset()
        self.step()
        host = {column: pair.np[: self.rows].copy() for column, pair in self.columns.items()}
        device = {column: pair.device[: self.rows].cpu().numpy() for column, pair in self.columns.items()}
        self.reset()
        return host, device
