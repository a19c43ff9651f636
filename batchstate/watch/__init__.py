"""Checks for an existing engine: a declaration over a class that others wrote, and no change of its code.

`watch` checks the batch class, `watch_pages` and `watch_slots` the owners of pages and slots, `watch_copy` staging
buffers, `watch_log` logs of staged writes. Nothing else is needed: no test library, no batch or pool of this library.
`batchstate.set_checks` sets how much is checked. `audit` compares both sides of a `Batch` of this library in the same
way.
"""

from batchstate.watch._requests import OverRequests, over_requests
from batchstate.watch._vacant import POISON
from batchstate.watch.batches import Watched, WatchedSpec, audit, watch
from batchstate.watch.declaration import Declaration
from batchstate.watch.hooks import WatchCounters
from batchstate.watch.logs import watch_log
from batchstate.watch.pools import WatchedPool, watch_copy, watch_pages, watch_slots

__all__ = [
    "POISON",
    "Declaration",
    "OverRequests",
    "WatchCounters",
    "Watched",
    "WatchedPool",
    "WatchedSpec",
    "audit",
    "over_requests",
    "watch",
    "watch_copy",
    "watch_log",
    "watch_pages",
    "watch_slots",
]
