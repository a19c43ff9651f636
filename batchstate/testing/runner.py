"""Runs the machines: one with `run_machine`, several with `fuzz`.

The settings are given in full and come from no profile: Hypothesis loads one by itself where it finds the environment
variable CI, which tries the same examples every time. Here the seed alone decides.
"""

import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import attrs
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from batchstate.errors import ArgumentError
from batchstate.invariants import Violation
from batchstate.levels import Level, parse_level
from batchstate.selfcheck.machines import MACHINES
from batchstate.testing.devices import devices_of, is_tool, open_device
from batchstate.testing.machine import DisagreementError, Machine, OpenRuntime, session
from batchstate.testing.race import Race, RaceReport

__all__ = ["EXAMPLES_FOLDER", "MACHINES", "FuzzReport", "MachineResult", "fuzz", "run_machine"]

EXAMPLES_FOLDER = ".hypothesis/examples"
"""Where failing examples are kept, so that the next run tries them first."""

STEPS = 50
"""Rules of one example, unless said otherwise."""


@final
@attrs.frozen
class MachineResult:
    """What came of one machine.

    Attributes:
        name: of the machine.
        device: where it ran.
        examples: examples run, until the first failure if there was one.
        steps: rules run in them.
        violations: failures found: 0 or 1, since a run stops at the first.
        seconds: wall time, shrinking included.
        failure: the report, the shrunk program and how to replay it; None when all was well.
        code: the invariant that was broken, `MODEL` where only the model knew better, or the name of another error;
            None when all was well.
        race: the report of a race, to be kept and drawn; None for everything else.
        first_failure: examples run until the first failure, that one included; None when all was well.
        reached: interesting state -> times reached.
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


@final
@attrs.frozen
class FuzzReport:
    """What came of a run of several machines.

    Attributes:
        device: where it ran.
        seed: that repeats it.
        machines: one result each.
    """

    device: str
    seed: int
    machines: tuple[MachineResult, ...]

    @property
    def violations(self) -> int:
        """Failures of all machines."""
        return sum(result.violations for result in self.machines)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "device": self.device,
            "seed": self.seed,
            "machines": [result.as_dict() for result in self.machines],
            "violations": self.violations,
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
        machine: one of `MACHINES`, or any other `Machine`.
        device: where it runs; see `devices.open_device`.
        examples: how many examples to try.
        seed: the same seed tries the same examples.
        derandomize: leave the seed aside and derive the examples from the machine's name.
        steps: rules of one example.
        shrink: look for the shortest program once one fails; without it the first is reported.
        database: failing examples of earlier runs, tried first; new ones are added.
        runtimes: makes the runtime of each example; by default `open_device(device)`.
        level: of the checks; by default `full`, and `cheap` on the tools, since checks that read device memory put
            streams in order. Below `full` a machine judges only what its rules ask for.
        on_example: called after each example with the number run so far.

    Raises:
        ArgumentError: no positive number of examples or steps, an unknown device or level.
    """
    if level is None:
        level = Level.CHEAP if is_tool(device) else Level.FULL
    level = parse_level(level)  # before anything runs: a wrong one is no failure of the machine
    for name, value in (("examples", examples), ("steps", steps)):
        if value < 1:
            raise ArgumentError(f"run_machine: {name} is {value}", value=value, remedy="pass 1 or more")
    if seed < 0:
        raise ArgumentError(f"run_machine: seed is {seed}", value=seed, remedy="pass 0 or more")
    if runtimes is None:
        open_device(device)  # an unknown device is the caller's mistake, not a failure of the machine
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
    with session(runtimes, level=level, on_example=on_example) as found:
        error = error_of(lambda: run_state_machine_as_test(_named(machine, seed, derandomize), settings=profile))
    seconds = time.perf_counter() - start
    return MachineResult(
        name=machine.NAME,
        device=device,
        examples=found.examples,
        steps=found.steps,
        violations=0 if error is None else 1,
        seconds=seconds,
        failure=None if error is None else _report(error, machine, seed=seed, examples=examples, device=device),
        code=None if error is None else _code(error),
        race=error.report if isinstance(error, Race) else None,
        first_failure=None if error is None else found.first_failure,
        reached=found.reach.of(machine.NAME),
    )


def fuzz(
    device: str = "cpu",
    examples: int = 100,
    seed: int = 0,
    machines: Sequence[str] | None = None,
    *,
    steps: int = STEPS,
    database: ExampleDatabase | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> FuzzReport:
    """Runs several machines one after the other.

    Args:
        device: where they run; on `sim`, each scheduler takes its part of the examples.
        examples: of each.
        seed: the same seed tries the same examples.
        machines: names out of `MACHINES`; all by default.
        steps: rules of one example.
        database: failing examples of earlier runs; by default those in `EXAMPLES_FOLDER`.
        progress: called after each example with the number run so far, and the name of the machine.

    Raises:
        ArgumentError: an unknown machine, and what `run_machine` refuses.
    """
    names = list(MACHINES) if machines is None else list(machines)
    for name in names:
        if name not in MACHINES:
            raise ArgumentError(
                f"unknown machine {name!r}", value=name, remedy=f"use one or several of: {', '.join(MACHINES)}"
            )
    kept = DirectoryBasedExampleDatabase(EXAMPLES_FOLDER) if database is None else database
    results: list[MachineResult] = []
    done = 0
    for name in names:
        for one, part in devices_of(device, examples).items():
            results.append(
                run_machine(
                    MACHINES[name],
                    device=one,
                    examples=part,
                    seed=seed,
                    steps=steps,
                    database=kept,
                    on_example=None if progress is None else partial(_tell, progress, name, done),
                )
            )
            done += part
    return FuzzReport(device, seed, tuple(results))


def _tell(progress: Callable[[int, str], None], name: str, before: int, done: int) -> None:
    progress(before + done, name)


def _named(machine: type[Machine], number: int, derandomize: bool) -> Any:
    """A factory that Hypothesis tells from those of other machines, and that carries the seed."""

    def begin() -> RuleBasedStateMachine:
        return machine()

    begin.__name__ = begin.__qualname__ = f"{machine.__module__}.{machine.__name__}"
    return begin if derandomize else seed(number)(begin)


class _Outcome(unittest.TestResult):
    """Keeps the exception that ended a test, whatever it is: that is what a test runner is for."""

    error: BaseException | None = None

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802 - the name is unittest's
        self.error = err[1]

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self.error = err[1]


def error_of(body: Callable[[], object]) -> BaseException | None:
    """What the body raises, whatever it is; None if nothing."""
    outcome = _Outcome()

    def run() -> object:  # a function, whatever the body is: unittest asks for its name
        return body()

    unittest.FunctionTestCase(run).run(outcome)
    return outcome.error


def _code(error: BaseException) -> str:
    if isinstance(error, Violation):
        return error.code.value
    return "MODEL" if isinstance(error, DisagreementError) else type(error).__name__


def _report(error: BaseException, machine: type[Machine], *, seed: int, examples: int, device: str) -> str:
    lines = [f"{type(error).__name__}: {error}" if not isinstance(error, Violation) else str(error)]
    program = getattr(error, "__notes__", [])
    if program:
        lines += [
            "",
            "The shortest program that shows it:",
            *(f"    {line}" for note in program for line in note.splitlines()),
        ]
    if machine.NAME in MACHINES:
        lines += [
            "",
            "To replay it:",
            f"    batchstate fuzz --machine {machine.NAME} --seed {seed} --examples {examples} --device {device}",
        ]
    return "\n".join(lines)
