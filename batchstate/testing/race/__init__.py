"""Finds races between streams, on any machine: every pair of accesses that nothing orders, from one run.

Begin with `RaceRuntime`. A report can be read, kept and drawn without torch, which the rest needs: names are imported
when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchstate.testing.race.detector import Race
    from batchstate.testing.race.report import Access, Event, EventKind, RaceKind, RaceReport
    from batchstate.testing.race.runtime import RaceFence, RaceRuntime

__all__ = ["Access", "Event", "EventKind", "Race", "RaceFence", "RaceKind", "RaceReport", "RaceRuntime"]

_HOMES = {
    "Access": "report",
    "Event": "report",
    "EventKind": "report",
    "Race": "detector",
    "RaceFence": "runtime",
    "RaceKind": "report",
    "RaceReport": "report",
    "RaceRuntime": "runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
