"""What checks cost: each level against `off`, and `off` against a build that never had them."""

import importlib
from collections.abc import Callable
from itertools import cycle
from types import ModuleType
from typing import Any

import attrs

from batchstate.levels import Level
from batchstate.runtime import Runtime
from benchmarks.builds.unchecked import Build, second_build, unchecked_build
from benchmarks.comparisons import Asked, Comparison, require_equal
from benchmarks.timing import Contender

NOTHING_LEFT = Asked(limit=1.01)
"""Of the step of a batch. A whole step is long and touches much memory: a per cent of it cannot be told."""

SECOND = "checks off, imported a second time"

IMPORTS = 3
"""Imports of each build, used in turns."""

COPIES = 4
"""Equal batches, used in turns: where in memory one happens to lie moves a step by more than a per cent."""

Step = Callable[[], Any]
"""Does a step, and returns the batch."""
Import = Callable[[str], ModuleType]
"""Gives a module of a build, by its name in the package."""
MakeStep = Callable[[Import, Any], Step]
"""Makes a step from the modules of a build, and its runtime."""


def of_cheap(comparison: Comparison, *, limit: float | None = None) -> Comparison:
    """Of a comparison of levels, `cheap` against `off`, as exactly as can be, and the most that it may be."""
    asks = {("checks off", "checks cheap"): Asked(limit=limit)}
    return attrs.evolve(comparison, baselines=_named("checks cheap", comparison), asks=asks, paired=True)


def of_full(comparison: Comparison) -> Comparison:
    """Of a comparison of levels, `full` against `off`: by itself, since its long steps would allow few rounds."""
    return attrs.evolve(comparison, baselines=_named("checks full", comparison))


def _named(name: str, comparison: Comparison) -> list[Contender]:
    (found,) = (baseline for baseline in comparison.baselines if baseline.name == name)
    return [found]


def decode_step(num_columns: int, *, rows: int = 256, churn: int = 5) -> MakeStep:
    """A step of the batch alone."""

    def make(module: Import, runtime: Any) -> Step:
        scene = module("benchmarks.decode_steps").Scene
        step: Step = scene.of(runtime, num_columns=num_columns, rows=rows, churn=churn).packed_step
        return step

    return make


def whole_step(num_columns: int, *, rows: int = 256) -> MakeStep:
    """A step with slots, pages and a table."""

    def make(module: Import, runtime: Any) -> Step:
        step: Step = module("benchmarks.whole_steps").EngineState(runtime, num_columns=num_columns, rows=rows).step
        return step

    return make


def against_deleted(runtime: Runtime, what: str, make: MakeStep, asked: Asked = NOTHING_LEFT) -> Comparison:
    """A step without checks, in builds that never had them and in imports of the package as it is.

    Several of each are used in turns. Further imports of the package show how exact the measurement is.
    """
    as_it_is = [second_build(number) for number in range(2 * IMPORTS - 1)]
    steps = {
        "checks deleted": _steps_of([unchecked_build(number) for number in range(IMPORTS)], runtime, make),
        "checks off": [make(importlib.import_module, runtime) for _ in range(COPIES)]
        + _steps_of(as_it_is[: IMPORTS - 1], runtime, make),
        SECOND: _steps_of(as_it_is[IMPORTS - 1 :], runtime, make),
    }
    ours, *others = (Contender(name, _in_turns(some), Level.OFF) for name, some in steps.items())

    def verify() -> None:
        for i, step in enumerate(steps["checks off"]):
            wanted = step()
            for name in ("checks deleted", SECOND):
                found = steps[name][i]()
                for column in wanted.columns():
                    require_equal(f"{name}: host side of {column}", wanted[column].np, found[column].np)
                    device, same = wanted[column].device.cpu(), found[column].device.cpu()
                    require_equal(f"{name}: device side of {column}", device, same)

    return Comparison(
        task=f"{what}, builds",
        ours=[ours],
        baselines=others,
        verify=verify,
        asks={("checks deleted", "checks off"): asked},
        paired=True,
    )


def _steps_of(builds: list[Build], runtime: Runtime, make: MakeStep) -> list[Step]:
    """Steps of other builds, each of which has a switch for its checks, and a runtime, of its own."""
    steps = []
    for build in builds:
        build.module("batchstate.levels").set_checks("off")
        its_runtime = build.module("batchstate.runtime").open_runtime(str(runtime.device))
        steps += [make(build.module, its_runtime) for _ in range(COPIES)]
    return steps


def _in_turns(steps: list[Step]) -> Callable[[], object]:
    turns = cycle(steps)
    return lambda: next(turns)()
