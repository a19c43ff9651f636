"""A step of batch state on the device: one copy, and a kernel if it writes a table, for any number of columns.

Counted by torch's profiler on CUDA, from outside, and everywhere by the operations that torch dispatches.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchstate import checks
from batchstate.runtime import Runtime, open_runtime
from benchmarks.gpu.outcome import Notes, Setting
from benchmarks.gpu.steps import Serving

COLUMNS = (2, 12, 40)
HOST = ("cuda_runtime", "cuda_driver")
"""Kinds of events in a trace that are calls of CUDA."""


def run(setting: Setting, notes: Notes) -> None:
    """Profiles steps of several numbers of columns, with table writes and without, and those with everything."""
    runtime = open_runtime(setting.device)
    steps = 4 if setting.quick else 20
    notes.figures["steps profiled"] = steps
    _controls(runtime, notes)
    with checks("cheap"):
        for columns in COLUMNS:
            for writes in (False, True):
                name = f"{columns} columns, {'a table written' if writes else 'no table'}"
                _batch_steps(runtime, notes, name, columns, steps, writes=writes)
                _batch_steps(runtime, notes, f"{name}, fixed addresses", columns, steps, writes=writes, fixed=True)
        _whole_steps(runtime, notes, steps)


def _batch_steps(
    runtime: Runtime, notes: Notes, name: str, columns: int, steps: int, *, writes: bool, fixed: bool = False
) -> None:
    serving = Serving(runtime, num_columns=columns)
    buffers = serving.buffers() if fixed else None

    def some(count: int = steps) -> None:
        for _ in range(count):
            serving.batch_step(writes=writes, buffers=buffers)

    some(3)

    before = runtime.counters.snapshot()
    figures = notes.figures[name] = _counted(runtime, some, steps)
    spent = runtime.counters - before
    notes.require_equal(f"{name}: copies by the counters", spent.host_to_device_copies, steps * _runs(runtime))
    notes.require_equal(f"{name}: operations dispatched a step", figures["dispatched"], float(writes))
    if runtime.device.type != "cpu":
        demand(notes, name, figures, kernels=float(writes))


def demand(notes: Notes, name: str, figures: Mapping[str, Any], *, kernels: float) -> None:
    """One copy from pinned memory a step, so many kernels, and nothing else."""
    notes.require_equal(f"{name}: copies a step", figures["copies"], {"HtoD, pinned": 1.0})
    notes.require_equal(f"{name}: kernels a step", figures["kernels"], kernels)
    notes.require_equal(f"{name}: memsets a step", figures["memsets"], 0.0)


def _whole_steps(runtime: Runtime, notes: Notes, steps: int) -> None:
    """With relay and prefetch: the figures are noted; that nothing came from or went to pageable memory is demanded."""
    serving = Serving(runtime)
    for _ in range(3):
        serving.step()

    def some() -> None:
        for _ in range(steps):
            serving.step()

    figures = notes.figures["with relay, seed and prefetch"] = _counted(runtime, some, steps)
    serving.drain()
    notes.require_equal("wrong tokens", serving.wrong_tokens, 0)
    if runtime.device.type != "cpu":
        wanted = {"HtoD, pinned": 2.0, "DtoH, pinned": 1.0}
        notes.require_equal("copies of a step with relay, seed and prefetch", figures["copies"], wanted)


def _controls(runtime: Runtime, notes: Notes) -> None:
    """Known operations are counted as what they are: a profiler that sees nothing would find every step cheap."""
    value = runtime.device_zeros((64,), torch.int64)

    def three() -> None:
        for _ in range(3):
            value.add_(1)

    counts = notes.figures["control: one addition a step"] = _counted(runtime, three, 3)
    notes.require_equal("additions dispatched", counts["dispatched"], 1.0)
    if runtime.device.type != "cpu":
        counts = notes.figures["control: one addition a step"] = _counted(runtime, three, 3)  # the first loads the tool
        notes.require_equal("kernels of one addition", counts["kernels"], 1.0)
        notes.require(bool(counts["calls"]), "the profiler saw no call of CUDA")


def _runs(runtime: Runtime) -> int:
    """How often `_counted` runs what it counts."""
    return 1 if runtime.device.type == "cpu" else 2


def _counted(runtime: Runtime, some: Callable[[], None], steps: int) -> dict[str, Any]:
    """The mean of one step; `some` runs `steps` of them."""
    with Dispatched() as dispatched:
        some()
    figures: dict[str, Any] = {"dispatched": dispatched.operations.total() / steps}
    if runtime.device.type != "cpu":
        figures |= {
            name: value / steps if isinstance(value, int) else {kind: n / steps for kind, n in value.items()}
            for name, value in profiled(runtime, some).items()
        }
    return figures


def profiled(runtime: Runtime, some: Callable[[], None]) -> dict[str, Any]:
    """Events of the device and calls of CUDA while `some` runs, by the profiler's own trace."""
    from torch.profiler import ProfilerActivity, profile

    runtime.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        some()
        runtime.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return counts_of(trace["traceEvents"])


def counts_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Kernels and memsets as numbers; copies by direction and kind of host memory; calls of CUDA by name."""
    kernels, memsets = 0, 0
    copies: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        kind = event.get("cat")
        name = str(event.get("name", ""))
        if kind == "kernel":
            kernels += 1
        elif kind == "gpu_memset":
            memsets += 1
        elif kind == "gpu_memcpy":
            copies[_copy(name)] += 1
        elif kind in HOST:
            calls[name] += 1
    return {"kernels": kernels, "memsets": memsets, "copies": dict(copies), "calls": dict(calls)}


def _copy(name: str) -> str:
    """`HtoD, pinned` out of `Memcpy HtoD (Pinned -> Device)`."""
    direction = next((way for way in ("HtoD", "DtoH", "DtoD") if way in name), name)
    kind = next((memory.lower() for memory in ("Pageable", "Pinned") if memory in name), "")
    return f"{direction}, {kind}" if kind else direction


@final
class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts operations that compute or move something on one side: no views, no allocations, no copies across.

    Attributes:
        operations: by name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        views = any(result.alias_info is not None for result in schema.returns) and not schema.is_mutable
        if not (views or "::empty" in schema.name or _crosses(schema.name, args, kwargs or {})):
            self.operations[schema.name] += 1
        return func(*args, **(kwargs or {}))


def _crosses(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is a copy between host and device, which are counted as copies."""
    if name == "aten::_to_copy":  # `to(device)`
        there: torch.device | None = kwargs.get("device")
        return there is not None and bool(there.type != args[0].device.type)
    devices = {tensor.device.type for tensor in args[:2] if isinstance(tensor, torch.Tensor)}
    return name == "aten::copy_" and len(devices) == 2
