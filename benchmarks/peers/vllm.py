"""vLLM's `CpuGpuBuffer` against packed columns, and its `BlockPool` against `PagePool`.

Its prefix cache is off: nothing is hashed, and nothing is evicted.
"""

from typing import Any, ClassVar, final

import attrs
import torch

from batchstate.levels import Level
from batchstate.runtime import Runtime
from benchmarks.baselines.free_lists import shuffled
from benchmarks.baselines.persistent_buffers import Array
from benchmarks.comparisons import Absent, Comparison, require_equal
from benchmarks.decode_steps import Scene
from benchmarks.peers.installed import named, or_absent, peer, theirs
from benchmarks.pools import PAGE_SIZE, TAKE, all_numbers, pages_against_lists
from benchmarks.timing import Contender


@final
class VllmPair:
    """A `Pair` made of one buffer."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        module = peer("vllm", "vllm.v1.utils")
        with theirs("CpuGpuBuffer"):
            buffer = module.CpuGpuBuffer(size, dtype=dtype, device=device, pin_memory=device.type == "cuda")
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


@final
class BlockPool:
    """Block objects in a linked list, block 0 left out."""

    name: ClassVar[str] = "BlockPool, prefix cache off"

    def __init__(self, size: int, device: torch.device) -> None:
        module = peer("vllm", "vllm.v1.core.block_pool")
        with theirs("BlockPool"):
            self._pool: Any = module.BlockPool(size + 1, enable_caching=False, hash_block_size=PAGE_SIZE)

    def take(self, n: int) -> Any:
        return self._pool.get_new_blocks(n)

    def free(self, taken: Any) -> None:
        self._pool.free_blocks(taken)

    def numbers(self, taken: Any) -> list[int]:
        return [block.block_id for block in taken]


def pages_against_block_pool(runtime: Runtime, *, size: int = 65_536, n: int = 2_048) -> Comparison | Absent:
    """Pages against blocks: of these is asked what is asked against a linked list that is written by hand."""
    name = named("vLLM", "vllm", BlockPool.name)

    def make() -> Comparison:
        blocks = BlockPool(size, runtime.device)
        shuffled(blocks, size)
        ours = pages_against_lists(runtime, size=size, n=n)

        def verify() -> None:
            ours.verify()
            numbers = all_numbers(blocks.take, blocks.free, blocks.numbers, size, n)
            require_equal("numbers of the block pool", list(range(1, size + 1)), numbers)

        return attrs.evolve(
            ours,
            baselines=[Contender(name, lambda: blocks.free(blocks.take(n)))],
            verify=verify,
            asks={(way, name): asked for (way, _), asked in ours.asks.items()},
        )

    task = f"take and return {n:,} of {size:,} pages"
    return or_absent(task, f"PagePool {TAKE}, checks {Level.CHEAP.value}", name, make)
