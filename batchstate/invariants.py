"""Every invariant once, by code: what the runtime checks, the state machines and the unit tests all call.

A law takes plain arrays, knows nothing of pools or batches, changes nothing, and raises `Violation` or returns None.
Slot and index arrays are integer[n]; `where` is `violations.Where`. Each counts itself in `made`, so that a test can
show that a check really ran. The laws stand in `batchstate.laws`, by what they are about, and are read from here.
`LAWS` lists them all, with the level at which the library asks, the remedy, and real bugs that each would have caught.
"""

from batchstate.laws.catalog import LAWS, Law, first_duplicate, made
from batchstate.laws.futures import (
    future_consumed,
    future_generation,
    future_order,
    future_unread_overwritten,
    future_unwritten,
)
from batchstate.laws.mirrors import (
    mirror_aliased,
    mirror_bound,
    mirror_equal,
    mirror_foreign_write,
    mirror_stale_read,
    row_count,
    sentinel_escaped,
    tail_stale,
    unit_mismatch,
)
from batchstate.laws.pages import length_order, page_alignment, page_owner
from batchstate.laws.slots import (
    slot_conservation,
    slot_double_free,
    slot_in_flight,
    slot_out_of_range,
    slot_shared,
    slot_stale_handle,
    slot_zero_allocated,
    slot_zero_dirty,
    table_capacity,
)
from batchstate.laws.steps import hidden_sync, race, staging_overrun, staging_reused
from batchstate.laws.transfers import tier_state, transfer_bounds, transfer_late_write
from batchstate.levels import Level, checks, current_checks, set_checks
from batchstate.violations import Code, Violation, Where

__all__ = [
    "LAWS",
    "Code",
    "Law",
    "Level",
    "Violation",
    "Where",
    "checks",
    "current_checks",
    "first_duplicate",
    "future_consumed",
    "future_generation",
    "future_order",
    "future_unread_overwritten",
    "future_unwritten",
    "hidden_sync",
    "length_order",
    "made",
    "mirror_aliased",
    "mirror_bound",
    "mirror_equal",
    "mirror_foreign_write",
    "mirror_stale_read",
    "page_alignment",
    "page_owner",
    "race",
    "row_count",
    "sentinel_escaped",
    "set_checks",
    "slot_conservation",
    "slot_double_free",
    "slot_in_flight",
    "slot_out_of_range",
    "slot_shared",
    "slot_stale_handle",
    "slot_zero_allocated",
    "slot_zero_dirty",
    "staging_overrun",
    "staging_reused",
    "table_capacity",
    "tail_stale",
    "tier_state",
    "transfer_bounds",
    "transfer_late_write",
    "unit_mismatch",
]
