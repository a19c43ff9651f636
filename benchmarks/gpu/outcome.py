"""The stages, in the order in which they run, and what came of each: ok, failed or not run, why, and its figures."""

from collections.abc import Mapping
from typing import Any, Literal, final

import attrs

State = Literal["ok", "failed", "not run"]


@final
@attrs.frozen
class Setting:
    """Options of a stage.

    Attributes:
        device: name of the device, as `open_runtime` takes it.
        quick: small sizes, few repetitions: a trial run.
        seconds: how long it may take; a stage that starts processes gives them less.
    """

    device: str
    quick: bool = False
    seconds: float = 60.0

    @property
    def on_cuda(self) -> bool:
        """Whether the device is one of CUDA's."""
        return self.device.partition(":")[0] == "cuda"


@final
@attrs.frozen
class Outcome:
    """The outcome of a stage.

    Attributes:
        state: `failed` if anything was not as it must be; `not run` where it has no meaning on this device or machine.
        why: what was wrong, or why it did not run.
        figures: what it counted and measured, for JSON.
        seconds: it took.
    """

    state: State
    why: str = ""
    figures: dict[str, Any] = attrs.field(factory=dict)
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Outcome":
        """The outcome of which `attrs.asdict` made a dictionary."""
        return cls(**values)


@final
@attrs.define
class Notes:
    """Findings of a stage on its way: what it has found when it fails or its time is up is not lost.

    A stage without a demand proves nothing, and fails.

    Attributes:
        figures: see `Outcome`.
        problems: demands that were not met.
        demands: how many were made.
        not_run: why the stage has no meaning here, if it has none.
    """

    figures: dict[str, Any] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    demands: int = 0
    not_run: str = ""

    def require(self, holds: bool, problem: str) -> None:
        """Notes `problem` unless it holds."""
        self.demands += 1
        if not holds:
            self.problems.append(problem)

    def require_equal(self, name: str, value: object, wanted: object) -> None:
        """Notes a problem unless the two are equal."""
        self.require(value == wanted, f"{name}: {value!r}, and not {wanted!r}")

    def outcome(self) -> Outcome:
        """The outcome."""
        if self.not_run and not self.problems:
            return Outcome("not run", self.not_run, self.figures)
        problems = self.problems or ([] if self.demands else ["it asked for nothing"])
        return Outcome("failed" if problems else "ok", "; ".join(problems), self.figures)


@final
@attrs.frozen
class Stage:
    """One of the things that a GPU has to show.

    Attributes:
        name: of its file in `stages/`, which has a function `run(setting, notes)`.
        title: what it shows, in a few words.
        limit: seconds that it may take.
    """

    name: str
    title: str
    limit: float

    @property
    def module(self) -> str:
        """Where it is."""
        return f"benchmarks.gpu.stages.{self.name}"


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("machine", "what it runs on", 40),
        Stage("mapped", "kernels and host share pinned memory", 40),
        Stage("sync", "steps under torch's sync-debug mode, set to error", 50),
        Stage("profiler", "kernels and copies of a step, by torch's profiler", 60),
        Stage("capture", "a captured graph replays steps from fixed addresses", 50),
        Stage("engine", "every token of an engine one step ahead", 90),
        Stage("race", "the race detector beside torch's sanitizer", 110),
        Stage("rates", "the benchmarks", 240),
        Stage("suite", "the tests on the device", 260),
    )
}
