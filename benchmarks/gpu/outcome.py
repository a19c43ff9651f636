"""What came of a stage: ok, failed or not run, why, and its figures."""

from typing import Any, Literal, final

import attrs

State = Literal["ok", "failed", "not run"]


@final
@attrs.frozen
class Setting:
    """What a stage is told.

    Attributes:
        device: name of the device, as `open_runtime` takes it.
        quick: small sizes, few repetitions: a trial run.
        seconds: how long it may take; who starts processes of its own gives them less.
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
    """What a stage found.

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
    """What a stage gathers on its way: what it has found when it fails or its time is up is not lost.

    Nothing required is no proof: a stage without a demand fails.

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

    def require_equal(self, what: str, found: object, wanted: object) -> None:
        """Notes a problem unless the two are equal."""
        self.require(found == wanted, f"{what}: {found!r}, and not {wanted!r}")

    def outcome(self) -> Outcome:
        """What came of it."""
        if self.not_run and not self.problems:
            return Outcome("not run", self.not_run, self.figures)
        problems = self.problems or ([] if self.demands else ["it asked for nothing"])
        return Outcome("failed" if problems else "ok", "; ".join(problems), self.figures)
