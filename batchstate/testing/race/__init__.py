"""Finds races between streams, on any machine: every pair of accesses that nothing orders, from one run."""

from batchstate.testing.race.detector import Race
from batchstate.testing.race.fences import RaceEvent, RaceFence
from batchstate.testing.race.report import Access, Event, EventKind, RaceKind, RaceReport
from batchstate.testing.race.runtime import RaceRuntime

__all__ = ["Access", "Event", "EventKind", "Race", "RaceEvent", "RaceFence", "RaceKind", "RaceReport", "RaceRuntime"]
