"""Runs a state machine.

All of Hypothesis' settings are passed, none come from a profile: where the environment variable CI is set, Hypothesis
loads one that tries the same examples every time. Here the seed alone decides.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, final
from unittest import mock

import attrs
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from batchstate._arrays import count
from batchstate.levels import Level
from batchstate.races import Race, RaceReport
from batchstate.races.devices import is_tool, open_device
from batchstate.testing.machine import DisagreementError, Machine, OpenRuntime, session
from batchstate.violations import Violation

__all__ = ["STEPS", "MachineResult", "error_of", "run_machine", "with_replay"]

STEPS = 50
"""Rules of one example, unless said otherwise."""


@final
@attrs.frozen
class MachineResult:
    """The outcome of one machine.

    Attributes:
        name: of the machine.
        device: where it ran.
        examples: examples run, until the first failure if there was one.
        steps: rules run in them.
        violations: failures: 0 or 1, since a run stops at the first.
        seconds: wall time, shrinking included.
        failure: the report and the shrunk program; None without a failure.
        code: the invariant that was broken, `MODEL` where only the model noticed, or the name of another error; None
            without a failure.
        race: the report of a race, to be kept and drawn; None for everything else.
        first_failure: examples run until the first failure, that one included; None without a failure.
        reached: coverage target -> times reached.
        unproved: columns of a class under `fuzz_twins` that held one value in all rows of all examples: the code that
            moves them may be wrong, and nothing has shown it. Draw rows in which they differ.
    """

    name: str
    device: str
    examples: int
    steps: int
    violations: int
    seconds: float
    failure: str | None
    code: str | None
    race: RaceReport | None
    first_failure: int | None
    reached: Mapping[str, int]
    unproved: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "name": self.name,
            "device": self.device,
            "examples": self.examples,
            "steps": self.steps,
            "violations": self.violations,
            "seconds": round(self.seconds, 3),
        }


def run_machine(
    machine: type[Machine],
    *,
    device: str = "cpu",
    examples: int = 100,
    seed: int = 0,
    derandomize: bool = False,
    steps: int = STEPS,
    shrink: bool = True,
    database: ExampleDatabase | None = None,
    runtimes: OpenRuntime | None = None,
    level: str | Level | None = None,
    on_example: Callable[[int], None] | None = None,
) -> MachineResult:
    """Runs one machine.

    Args:
        machine: the class.
        device: where it runs; see `devices.open_device`.
        examples: how many examples to try.
        seed: the same seed tries the same examples.
        derandomize: ignore the seed and derive the examples from the machine's name.
        steps: rules of one example.
        shrink: look for the shortest program once one fails; without it the first is reported.
        database: failing examples of earlier runs, tried first; new ones are added.
        runtimes: makes the runtime of each example; by default `open_device(device)`.
        level: of the checks; by default `full`, and `cheap` on the tools, since checks that read device memory
            synchronise streams. Below `full` a machine compares only what its rules read.
        on_example: called after each example with the number run so far. It may end a failed run with an exception.

    Raises:
        ArgumentError: `examples` or `steps` below 1, a negative seed, or an unknown device or level.
    """
    if level is None:
        level = Level.CHEAP if is_tool(device) else Level.FULL
    level = Level(level)  # before anything runs: an unknown level is not a failure of the machine
    for name, value in (("examples", examples), ("steps", steps)):
        count(value, f"run_machine: {name}", least=1)
    count(seed, "run_machine: seed")
    if runtimes is None:
        open_device(device)  # an unknown device is not a failure of the machine either
        runtimes = partial(open_device, device, seed=seed)
    phases = [Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None if derandomize else database,
        deadline=None,
        print_blob=database is not None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
    )
    start = time.perf_counter()
    with same_examples(), session(runtimes, level=level, on_example=on_example) as ran:
        error = error_of(lambda: run_state_machine_as_test(_named(machine, seed, derandomize), settings=profile))
    seconds = time.perf_counter() - start
    flaky = None
    ended_early = isinstance(error, Flaky) or (error is not None and not isinstance(error, Exception))
    if ended_early and ran.first_error is not None:  # the machine's own failure counts
        flaky, error = error if isinstance(error, Flaky) else None, ran.first_error
    return MachineResult(
        name=machine.NAME,
        device=device,
        examples=ran.examples,
        steps=ran.steps,
        violations=0 if error is None else 1,
        seconds=seconds,
        failure=None if error is None else _report(error, flaky),
        code=None if error is None else _code(error),
        race=error.report if isinstance(error, Race) else None,
        first_failure=None if error is None else ran.first_failure,
        reached={target: ran.reached[machine.NAME, target] for target in machine.TARGETS},
    )


@contextlib.contextmanager
def same_examples() -> Iterator[None]:
    """A window in which Hypothesis draws no numbers and words from the source of the modules that are loaded.

    It mixes them in, one draw in twenty: with other modules in the process, the same seed would try other examples.
    """
    if not hasattr(providers, "_get_local_constants"):  # a release that does not do so
        yield
        return
    none = type(providers.GLOBAL_CONSTANTS)()
    with mock.patch.object(providers, "_get_local_constants", return_value=none):
        providers.CONSTANTS_CACHE.cache.clear()
        try:
            yield
        finally:
            providers.CONSTANTS_CACHE.cache.clear()


def _named(machine: type[Machine], number: int, derandomize: bool) -> Any:
    """A factory with a name of its own for Hypothesis' database, which carries the seed."""

    def begin() -> RuleBasedStateMachine:
        return machine()

    begin.__name__ = begin.__qualname__ = f"{machine.__module__}.{machine.__name__}"
    return begin if derandomize else seed(number)(begin)


def error_of(body: Callable[[], object]) -> BaseException | None:
    """The exception that `body` raises, of any type but KeyboardInterrupt; None if it returns."""
    try:
        body()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def _code(error: BaseException) -> str:
    if isinstance(error, Violation):
        return error.code.value
    return "MODEL" if isinstance(error, DisagreementError) else type(error).__name__


def _report(error: BaseException, flaky: Flaky | None) -> str:
    lines = [f"{type(error).__name__}: {error}" if not isinstance(error, Violation) else str(error)]
    if not isinstance(error, Violation | DisagreementError) and (frames := traceback.extract_tb(error.__traceback__)):
        lines.append(f"  {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}")
    if flaky is not None:
        lines += ["", "It did not fail when it was run again: it depends on how long a device or a thread takes."]
    program = [line for note in getattr(flaky or error, "__notes__", []) for line in note.splitlines()]
    if program:
        lines += ["", "A short program that shows it:", *(f"    {line}" for line in program)]
    return "\n".join(lines)


def with_replay(result: MachineResult, command: str) -> MachineResult:
    """The result whose failure, if any, ends with the command that replays it."""
    if result.failure is None:
        return result
    return attrs.evolve(result, failure=f"{result.failure}\n\nTo replay it:\n    {command}")
