"""Finds races between streams, on any machine: every pair of accesses that nothing orders, from one run.

Begin with `RaceRuntime`. A report can be read, kept and drawn without torch, which the rest needs: names are imported
when they are first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate.testing.race.detector import Race as Race
    from batchstate.testing.race.report import Access as Access
    from batchstate.testing.race.report import Event as Event
    from batchstate.testing.race.report import EventKind as EventKind
    from batchstate.testing.race.report import RaceKind as RaceKind
    from batchstate.testing.race.report import RaceReport as RaceReport
    from batchstate.testing.race.runtime import RaceFence as RaceFence
    from batchstate.testing.race.runtime import RaceRuntime as RaceRuntime
else:
    from batchstate._lazy import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "detector": "Race",
            "report": "Access Event EventKind RaceKind RaceReport",
            "runtime": "RaceFence RaceRuntime",
        },
    )
