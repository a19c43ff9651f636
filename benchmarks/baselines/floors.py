"""Floors: what no way to do a step can go below. One copy of the step's bytes, and one launch of next to nothing."""

import torch

from batchstate.runtime import Runtime
from benchmarks.comparisons import Comparison, require_equal
from benchmarks.decode_steps import Scene
from benchmarks.timing import Contender


def against_floors(runtime: Runtime, *, num_columns: int, rows: int = 256, churn: int = 5) -> Comparison:
    """A packed step against one bare copy of as many bytes, and against one launch of a kernel for one number."""
    scene = Scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn)
    nbytes = bytes_of_a_step(scene)
    source = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    if runtime.device.type == "cuda":
        source = source.pin_memory()
    target, number = (torch.zeros(n, dtype=torch.uint8, device=runtime.device) for n in (nbytes, 1))

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def launch() -> None:
        number.add_(1)

    def verify() -> None:
        before = int(number)
        copy()
        launch()
        require_equal("copied bytes", target.cpu(), source)
        require_equal("the number", number.cpu(), torch.tensor([before + 1], dtype=torch.uint8))
        require_equal("bytes of a step", bytes_of_a_step(scene), nbytes)

    return Comparison(
        task=f"decode step, {num_columns} columns, {rows} rows",
        ours=scene.packed_contenders(),
        baselines=[Contender(f"floor: one copy of {nbytes:,} bytes", copy), Contender("floor: one launch", launch)],
        verify=verify,
    )


def bytes_of_a_step(scene: Scene) -> int:
    """What the packed step sends, alignment included."""
    before = scene.runtime.counters.snapshot()
    scene.packed_step()
    return (scene.runtime.counters - before).host_to_device_bytes
