"""Triton kernels in the window, run by Triton's own interpreter: each launch is one operation of the current stream.

The interpreter takes addresses from tensors and from tables of addresses, and numpy loads and stores there. So the
accesses of a launch are known to the byte once it has run, and by whom: see `tracing.footprint`.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, final
from unittest.mock import patch

import numpy as np
import torch

from batchstate._source_lines import source_line
from batchstate.errors import DeviceError
from batchstate.races.cuda._tracer import CUDA, NotModelledError
from batchstate.races.cuda._window import CudaWindow
from batchstate.races.devices import INTERPRET
from batchstate.races.history import Entry, element_of
from batchstate.races.report import Access, EventKind, RaceKind
from batchstate.races.tracer import RaceTracer
from batchstate.races.tracing.dispatch import untraced
from batchstate.races.tracing.footprint import Addresses, Clash, Footprint
from batchstate.races.tracing.memory import MemoryKind
from batchstate.races.tracing.operations import MemoryAccess
from batchstate.races.tracing.regions import ByteRegion, of_pieces, union_of


@contextlib.contextmanager
def interpreted(rt: CudaWindow[Any]) -> Iterator[None]:
    """A window in which `rt` gets the launches of interpreted kernels, and others are refused by name.

    Triton is imported only where the environment asks for its interpreter, or where somebody has imported it.
    """
    asked = os.environ.get(INTERPRET) and importlib.util.find_spec("triton")
    if not asked and "triton.runtime.jit" not in sys.modules:
        yield
        return
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    compiled = importlib.import_module("triton.runtime.jit").JITFunction
    call = executor.__call__

    def launched(grid: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        with rt.lock, untraced():
            rt.launch_kernel(grid.fn.__name__, functools.partial(call, grid), args, kwargs)

    def refused(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        remedy = f"set {INTERPRET}=1 before Triton is imported, or say what stands for the kernel's launcher"
        raise NotModelledError.of(f"the compiled Triton kernel {kernel.__name__}", remedy)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(executor, "__call__", launched))
        # All memory is the CPU's already; triton's copy of it lives until a garbage collection.
        stack.enter_context(patch.object(executor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs)))
        stack.enter_context(patch.object(executor, "_restore_args_dev", lambda *arguments: None))
        stack.enter_context(patch.object(compiled, "run", refused))
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner  # it takes the first of equals
        stack.enter_context(patch.object(tuner, "_bench", lambda *arguments, **named: [0.0, 0.0, 0.0]))
        yield


@final
class KernelLaunch:
    """One launch for the race detector.

    Args:
        name: of the kernel.
        tracer: of the window.
    """

    def __init__(self, name: str, tracer: RaceTracer) -> None:
        self._name = name
        self._tracer = tracer
        self._footprint = Footprint()
        self._stray: DeviceError | None = None
        self._regions: dict[tuple[int, bool], list[ByteRegion]] = {}
        alive = [(storage.data_ptr(), *piece) for piece in tracer.allocations.alive() if (storage := piece[0]).nbytes()]
        self._pieces = sorted(
            (piece for piece in alive if piece[2].kind is not MemoryKind.HOST), key=lambda piece: piece[0]
        )
        self._starts = np.array([start for start, *_ in self._pieces], np.uint64)
        self._ends = np.array([start + storage.nbytes() for start, storage, _ in self._pieces], np.uint64)

    def run(self, interpret: Callable[[], object]) -> None:
        """Interprets the kernel, and then checks what it has accessed.

        Raises:
            DeviceError: it accesses memory that it was not given.
            Race: an access is not ordered, or two of its programs clash. It has run by then.
        """
        __tracebackhide__ = True
        module = importlib.import_module("triton.runtime.interpreter")
        with self._told(module.interpreter_builder):
            try:
                interpret()
            except module.InterpreterError:
                if self._stray is not None:  # one error of the interpreter for each function that it was in
                    raise self._stray from None
                raise
        self._check()

    # The interpreter's calls

    @contextlib.contextmanager
    def _told(self, builder: Any) -> Iterator[None]:
        """The time in which the interpreter tells of each load, store and atomic before it happens."""
        load, store = builder.create_masked_load, builder.create_masked_store
        cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

        def masked_load(pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            volatile = named.get("is_volatile", rest[-1])
            self._touch(builder, pointers, mask, writes=False, atomic=bool(volatile))
            return load(pointers, mask, *rest, **named)

        def masked_store(pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self._touch(builder, pointers, mask, writes=True, atomic=False)
            return store(pointers, value, mask, *rest, **named)

        def atomic_cas(pointers: Any, expected: Any, value: Any, semantics: Any, scope: Any) -> Any:
            self._touch(builder, pointers, None, writes=True, atomic=True, semantics=semantics)
            return cas(pointers, expected, value, semantics, scope)

        def atomic_rmw(operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any, scope: Any) -> Any:
            self._touch(builder, pointers, mask, writes=True, atomic=True, semantics=semantics)
            return rmw(operation, pointers, value, mask, semantics, scope)

        named: dict[str, Any] = {
            "create_masked_load": masked_load,
            "create_masked_store": masked_store,
            "create_atomic_cas": atomic_cas,
            "create_atomic_rmw": atomic_rmw,
        }
        vars(builder).update(named)  # in front of the methods of its class
        try:
            yield
        finally:
            for name in named:
                del vars(builder)[name]

    def _touch(
        self, builder: Any, pointers: Any, mask: Any, *, writes: bool, atomic: bool, semantics: Any = None
    ) -> None:
        addresses: Addresses = pointers.data if mask is None else pointers.data[mask.data]
        addresses = addresses.reshape(-1)
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        dimensions = next((axis for axis in (3, 2) if builder.grid_dim[axis - 1] > 1), 1)
        program, line = builder.grid_idx[:dimensions], source_line(2)
        at = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        self._refuse_others(at, addresses, size, f"{_shown(program)} {'writes' if writes else 'reads'}", line.line)
        for piece in np.unique(at).tolist():
            start, _, allocation = self._pieces[piece]
            region = of_pieces((addresses[at == piece] - np.uint64(start)).astype(np.int64), size)
            if region is None:
                continue
            for written in {writes, writes and not atomic}:
                self._regions.setdefault((piece, written), []).append(region)
            if allocation.kind is MemoryKind.PINNED:  # copies ahead of the kernel have landed by now
                self._tracer.host_memory.ordered(self._tracer.current(), allocation, region)
                if writes:
                    self._tracer.host_memory.overwritten(allocation, region)
        self._footprint.add(program, addresses, size, line, writes=writes, atomic=atomic)
        if semantics is not None and addresses.size == 1:
            acquires, releases = ("ACQUIRE" in semantics.name, "RELEASE" in semantics.name)
            self._footprint.orders(int(addresses[0]), acquires=acquires, releases=releases)

    def _refuse_others(self, at: Any, addresses: Addresses, size: int, does: str, line: object) -> None:
        """Refuses elements that do not lie in the pieces of memory `at`, int64[n]."""
        inside = at >= 0
        inside[inside] = addresses[inside] + np.uint64(size) <= self._ends[at[inside]]
        if not inside.all():
            stray, before = int(addresses[~inside][0]), int(at[~inside][0])
            where = f"address {stray:#x}"
            if before >= 0:
                start, _, allocation = self._pieces[before]
                where += f", byte {stray - start} from the start of {allocation.name}"
            problem = f"{self._name} in program {does} {where}, which is no memory of {CUDA} ({line})"
            remedy = "mask the lanes that lie outside; give it tensors of the device or pinned ones, and keep them"
            self._stray = DeviceError(problem, stray, remedy)
            raise self._stray

    # Checks

    def _check(self) -> None:
        __tracebackhide__ = True
        tracer = self._tracer
        accesses: list[MemoryAccess] = []
        for (piece, writes), parts in sorted(self._regions.items()):
            whole = torch.empty(0, dtype=torch.uint8).set_(self._pieces[piece][1])
            accesses.append(MemoryAccess(whole, union_of(parts), writes))
        entry, checked = tracer.begin(EventKind.OPERATION, self._name, accesses)
        tracer.end(entry, checked)
        for (allocation, region, writes), access in zip(checked, accesses, strict=True):
            for lo, hi in region.intervals() if allocation.kind is MemoryKind.PINNED else ():
                part, bytes_of_it = ByteRegion(lo, hi), access.tensor[lo:hi]
                if writes:
                    tracer.host_memory.lands(entry, allocation, part, bytes_of_it, None)
                else:
                    tracer.host_memory.reads(entry, allocation, part, bytes_of_it, False)
        for clash in self._footprint.clashes():
            self._report(clash, entry)

    def _report(self, clash: Clash, entry: Entry) -> None:
        __tracebackhide__ = True
        tracer = self._tracer
        at = int(np.searchsorted(self._starts, np.uint64(clash.address), side="right")) - 1
        start, _, allocation = self._pieces[at]
        element = element_of(allocation.name, clash.address - start)
        launch, _ = entry.source_line.words()
        called = f"{entry.name} (program {_shown(clash.second.program)})"  # beside the launch, in a page of the report
        other = tracer.detector.event(entry.stream, EventKind.OPERATION, called, at=entry.source_line)
        first, second = (
            Access(
                event=event.number,
                does="writes" if touch.writes else "reads",
                operation=entry.name,
                lane=entry.stream.name,
                step=entry.step,
                site=touch.line.words()[0],
                caller=launch,
                rows=f"{element} of {allocation.name} in program {_shown(touch.program)}",
            )
            for touch, event in ((clash.first, entry), (clash.second, other))
        )
        tracer.detector.report(RaceKind.PROGRAMS_CLASH, allocation, element, first, second)


def _shown(program: Any) -> str:
    return str(program[0]) if len(program) == 1 else str(tuple(program))
