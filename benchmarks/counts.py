"""The cost of a whole decode step in things that can be counted, which do not vary with the machine."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import attrs
from torch.utils._python_dispatch import TorchDispatchMode

from batchstate.levels import Level, checks
from batchstate.runtime import Runtime
from benchmarks.baselines.request_loops import PAGE_SIZE
from benchmarks.steady_steps import Steady
from benchmarks.timing import no_collector
from benchmarks.whole_steps import EngineState

COLUMNS = (2, 12, 40)
"""Columns of the batches whose steps are counted."""

LIMITS = {
    "host_to_device_copies": 1,
    "device_operations": 1,
    "device_allocations": 1,
    "device_to_host_copies": 0,
    "staging_allocations": 0,
    "forced_syncs": 0,
    "fence_waits": 0,
}
"""The most that a step may have of each, whatever the number of columns."""


@final
@attrs.frozen
class Count:
    """One count of one step.

    Attributes:
        work: what is done.
        counted: what is counted.
        count: how many.
        limit: the most that it may be, or None.
    """

    work: str
    counted: str
    count: int
    limit: int | None = None

    @property
    def met(self) -> bool | None:
        """Whether there are at most as many as the limit, or None without one."""
        return None if self.limit is None else self.count <= self.limit

    def as_json(self) -> dict[str, Any]:
        """The count under the names of its attributes."""
        return {**attrs.asdict(self), "met": self.met}


@final
class TorchOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A window that counts what torch is asked to do, views included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts a call, and makes it."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


PARTS = {
    "batchstate.runtime": "runtime",
    "batchstate._upload": "upload",
    "batchstate.future_map": "relay",
    "batchstate._relay": "relay",
    "batchstate.kv": "pools and tables",
    "batchstate.pools": "pools and tables",
    "batchstate.tables": "pools and tables",
    "batchstate._allocator": "pools and tables",
    "batchstate.step": "planner",
    "batchstate._planned_step": "planner",
    "batchstate.forward": "planner",
    "batchstate.invariants": "invariants",
    "batchstate": "batch and values",
}
"""Parts of the library that make calls in a step, by the beginning of a module's name: the first that fits."""

CALLS = 180
"""The most calls of a decode step, of Python functions and of functions in C, for any number of requests; on a CPU.

Events and streams of a GPU are calls of torch besides."""


def counted_calls(runtime: Runtime) -> list[Count]:
    """The calls of one steady decode step, benchmark included, and of one with churn: in all, and by part."""
    counts = []
    for churn, limit in ((False, CALLS if runtime.device.type == "cpu" else None), (True, None)):
        for n in (1, 256):
            steady = Steady(runtime, n, max(1, n // 8) if churn else 0)
            for _ in range(2 * PAGE_SIZE + 3):  # then no page begins
                steady.step()
            work = f"decode step{' with churn' * churn}, {n} requests"
            made = _calls(steady.step)
            counts.append(Count(work, "calls", made.total(), limit))
            counts += [Count(work, f"calls, {part}", made[part]) for part in (*dict.fromkeys(PARTS.values()), OTHER)]
    return counts


WAITS = {False: 1, True: 2}
"""The most waits, of one stream for another, of a steady step whose forward has its own; results on that, or aside."""


def counted_waits(runtime: Runtime) -> list[Count]:
    """The waits of such steps, which the device does: the most in a step."""
    counts, forward = [], runtime.stream("forward")
    for churn in (False, True):
        for n in (1, 256):
            for aside, limit in WAITS.items():
                steady = Steady(runtime, n, max(1, n // 8) if churn else 0, aside=aside)
                spent = []
                for _ in range(4 * PAGE_SIZE):
                    before = runtime.counters.snapshot()
                    steady.step(forward)
                    spent.append((runtime.counters - before).stream_waits)
                work = f"decode step{' with churn' * churn}, {n} requests, two streams{', results on a third' * aside}"
                waits = max(spent[2 * PAGE_SIZE :])
                counts.append(Count(work, "stream_waits", waits, None if churn else limit))
    return counts


OTHER = "benchmark, torch and numpy"


def _part(module: str) -> str:
    """The part of the library that a module is of."""
    fits = (part for name, part in PARTS.items() if module == name or module.startswith(f"{name}."))
    return next(fits, OTHER)


def _calls(run: Callable[[], object]) -> Counter[str]:
    """Calls by part: a function in Python counts for its own module, one in C for that of its caller."""
    made: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            made[str(frame.f_globals.get("__name__"))] += 1

    with no_collector(), checks(Level.CHEAP):
        run()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    by_part: Counter[str] = Counter()
    for module, number in made.items():
        by_part[_part(module)] += number
    return by_part


def counted_steps(runtime: Runtime, *, num_columns: int, rows: int = 256) -> list[Count]:
    """The counts of one step in the steady state."""
    state = EngineState(runtime, num_columns=num_columns, rows=rows)
    for _ in range(4):
        state.step()
    before = runtime.counters.snapshot()
    state.step()
    spent = runtime.counters - before
    with TorchOperations() as operations:
        state.step()
    work = f"whole step of an engine, {num_columns} columns, {rows} rows"
    return [
        *(Count(work, name, getattr(spent, name), limit) for name, limit in LIMITS.items()),
        Count(work, "torch_operations", len(operations.names)),
    ]
