"""vLLM's `CpuGpuBuffer`, one a column, against packed columns: `PersistentBuffers` with its class for the two sides."""

from typing import final

import torch

from batchstate.runtime import Runtime
from benchmarks.baselines.persistent_buffers import Array
from benchmarks.comparisons import Absent, Comparison
from benchmarks.decode_steps import Scene
from benchmarks.peers.installed import named, or_absent, peer, theirs
from benchmarks.timing import Contender


@final
class VllmPair:
    """A `Pair` made of one buffer."""

    def __init__(self, size: int, dtype: torch.dtype, place: torch.device) -> None:
        module = peer("vllm", "vllm.v1.utils")
        with theirs("CpuGpuBuffer"):
            buffer = module.CpuGpuBuffer(size, dtype=dtype, device=place, pin_memory=place.type == "cuda")
        self.np: Array = buffer.np
        self.device: torch.Tensor = buffer.gpu
        self.upload = buffer.copy_to_gpu


def against_cpu_gpu_buffers(
    runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5
) -> Comparison | Absent:
    """A step in which requests leave, join and advance."""
    task = f"decode step, {num_columns} columns, {rows} rows"
    name = named("vLLM", "vllm", "one CpuGpuBuffer a column")

    def make() -> Comparison:
        scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
        buffers = scene.persistent(name, VllmPair)
        return Comparison(
            task=task,
            ours=scene.packed_contenders(),
            baselines=[Contender(name, buffers.step)],
            verify=lambda: scene.verify([buffers]),
        )

    return or_absent(task, "packed, checks cheap", name, make)
