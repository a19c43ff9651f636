"""Which stages there are, in the order in which they run: short ones first, and the suite in what time is left."""

from collections.abc import Mapping
from typing import final

import attrs


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
        Stage("rates", "the benchmarks", 170),
        Stage("suite", "the tests on the device", 260),
    )
}
