"""The slots of each step on the host: a column with both sides, against slots that the device has and `.cpu()` brings.

An engine frees, publishes and plans by slot, so its host wants them in every step. Where the device alone has them, the
copy comes behind the forward that runs: the host waits for it, and the device for what the host then plans. So SGLang
did it before `req_pool_indices_cpu` (sglang #26425). Both ways plan the same step behind their slots.
"""

from typing import final

import numpy as np
import torch

from batchstate.levels import Level
from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.decode_steps import Array, Decode, Scene
from benchmarks.forward_inputs import Forwards
from benchmarks.steady_steps import Steady
from benchmarks.timing import Contender


@final
class BothSides:
    """Our step: the host has the slots before anything runs, and reads results of the step before."""

    def __init__(self, scene: Scene, busy_us: float) -> None:
        self._scene, self._forwards, self._before = scene, Forwards(busy_us), 0.0
        self._planned = Steady(scene.runtime, len(scene.running), 0)

    def step(self) -> Array:
        """A step; returns its slots."""
        batch: Decode = self._scene.packed_step()
        slots = batch.slots.np
        self._planned.step()
        done = self._forwards.launch()
        self._forwards.wait(self._before)
        self._before = done
        return slots


@final
class ReadBack:
    """Slots and lengths as tensors on the device, moved there; the slots are read back in each step."""

    def __init__(self, scene: Scene, busy_us: float) -> None:
        self._forwards, self._before, self._keep = Forwards(busy_us), 0.0, scene.keep
        self._device = scene.runtime.device
        self._planned = Steady(scene.runtime, len(scene.running), 0)
        self._running, self._joining = (
            {name: torch.tensor(batch[name].np, device=self._device) for name in ("slots", "seq_lens")}
            for batch in (scene.running, scene.joining)
        )

    def step(self) -> Array:
        """A step; returns its slots."""
        rows = torch.from_numpy(np.flatnonzero(self._keep)).to(self._device, non_blocking=True)
        moved = {name: torch.cat([column[rows], self._joining[name]]) for name, column in self._running.items()}
        moved["seq_lens"] += 1
        self._forwards.wait(self._before)  # the copy comes behind the forward that runs
        slots: Array = moved["slots"].cpu().numpy()
        self._planned.step()
        self._before = self._forwards.launch()
        return slots


def against_read_back(runtime: Runtime, *, busy_us: int, rows: int = 256, churn: int = 5) -> Comparison:
    """Two columns with both sides, against two tensors on the device of which one is read back."""
    scene = Scene.of(runtime, num_columns=2, rows=rows, churn=churn)
    ours, theirs = BothSides(scene, busy_us), ReadBack(scene, busy_us)

    def verify() -> None:
        for _ in range(3):
            require_equal("slots", ours.step(), theirs.step())

    return Comparison(
        task=f"slots on the host in each step, forwards of {busy_us} us, {rows} rows",
        ours=[Contender("both sides", ours.step, Level.CHEAP)],
        baselines=[Contender("read back by .cpu()", theirs.step)],
        verify=verify,
    )
