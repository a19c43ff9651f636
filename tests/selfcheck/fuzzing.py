"""Fuzzes the library with its own state machines: `python -m tests.selfcheck fuzz`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import attrs
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from batchstate.errors import ArgumentError, one_of
from batchstate.races.devices import PROMPT, RACE, SIM
from batchstate.testing.runner import STEPS, MachineResult, run_machine, with_replay
from tests.selfcheck.machines import MACHINES

EXAMPLES_FOLDER = ".hypothesis/examples"
"""Where failing examples are kept, so that the next run tries them first."""


@final
@attrs.frozen
class FuzzReport:
    """The outcome of a run of several machines; `seed` repeats it."""

    device: str
    seed: int
    machines: tuple[MachineResult, ...]  # one per machine and device

    @property
    def violations(self) -> int:
        return sum(result.violations for result in self.machines)

    def as_dict(self) -> dict[str, Any]:
        machines = [result.as_dict() for result in self.machines]
        return {"device": self.device, "seed": self.seed, "machines": machines, "violations": self.violations}


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
    """Runs several of the library's machines one after the other, by default all; see `devices_of`.

    Failing examples of earlier runs come first: those in `database`, or else in `EXAMPLES_FOLDER`. `progress` is called
    after each example with the number run so far, and the name of the machine.
    """
    names = list(MACHINES) if machines is None else list(machines)
    for name in names:
        if name not in MACHINES:
            raise ArgumentError(f"unknown machine {name!r}", name, one_of(MACHINES, name))
    kept = DirectoryBasedExampleDatabase(EXAMPLES_FOLDER) if database is None else database
    results: list[MachineResult] = []
    done = 0
    for name in names:
        for where, part in devices_of(device, examples).items():
            result = run_machine(
                MACHINES[name],
                device=where,
                examples=part,
                seed=seed,
                steps=steps,
                database=kept,
                on_example=None if progress is None else partial(_tell, progress, name, done),
            )
            command = (
                f"python -m tests.selfcheck fuzz --machine {name} --seed {seed} --examples {part} --device {where}"
            )
            results.append(with_replay(result, command))
            done += part
    return FuzzReport(device, seed, tuple(results))


def devices_of(device: str, examples: int) -> dict[str, int]:
    """Where `examples` examples run: a part under each scheduler of `sim`, and with either kind of fences on `race`."""
    if device == RACE and examples > 1:
        prompt = max(1, examples // 4)
        return {RACE: examples - prompt, f"{RACE}:{PROMPT}": prompt}
    if device != SIM:
        return {device: examples}
    from batchstate.races.sim import PORTFOLIO

    return shares(examples, [f"{SIM}:{name}" for name in PORTFOLIO])


def shares(examples: int, names: Sequence[str]) -> dict[str, int]:
    """Examples that each gets of so many, where that is any."""
    each, more = divmod(examples, max(len(names), 1))
    parts = {name: each + (number < more) for number, name in enumerate(names)}
    return {name: part for name, part in parts.items() if part}


def _tell(progress: Callable[[int, str], None], name: str, before: int, done: int) -> None:
    progress(before + done, name)
