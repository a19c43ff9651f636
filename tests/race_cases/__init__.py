"""Micro-cases: tiny programs in pairs, one racy and one safe, by which tools that look for races can be compared.

Each pair is one function that runs on any runtime with events and pinned memory; `CASES` has both sides of all of them.
`python -m tests.race_cases` shows what the race detector, the simulated device and torch's own sanitizer
say of each.
"""

from tests.race_cases import (  # noqa: F401 - each registers its programs
    between_copies,
    events,
    indexing,
    launches,
    lifetimes,
    operations,
    order,
    regions,
    to_device,
    to_host,
    views,
)
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import CASES, GROUPS, Case, Side, Values

__all__ = ["CASES", "GROUPS", "Case", "CaseRuntime", "Side", "Values"]
