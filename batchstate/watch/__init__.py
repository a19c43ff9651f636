"""Checks for the engine that is there: a declaration over a class that others wrote, and no change of its code.

`watch` checks the batch class, `watch_pages` and `watch_slots` who holds what, `watch_copy` staging buffers. Nothing
else is needed: no test library, no runtime of this library. `batchstate.set_checks` says how much is checked. `audit`
compares both sides of a `Batch` of this library in the same way.
"""

from batchstate.watch._requests import OverRequests, over_requests
from batchstate.watch.batches import Watched, WatchedSpec, audit, watch
from batchstate.watch.hooks import WatchCounters
from batchstate.watch.pools import WatchedPool, watch_copy, watch_pages, watch_slots
from batchstate.watch.rows import Declaration
from batchstate.watch.snapshots import Snapshot

__all__ = [
    "Declaration",
    "OverRequests",
    "Snapshot",
    "WatchCounters",
    "Watched",
    "WatchedPool",
    "WatchedSpec",
    "audit",
    "over_requests",
    "watch",
    "watch_copy",
    "watch_pages",
    "watch_slots",
]
