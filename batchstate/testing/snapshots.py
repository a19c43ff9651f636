"""All that a caller can see of a pool or table, as plain values that compare with `==`."""

from batchstate.pages import PagePool
from batchstate.pools import SlotPool
from batchstate.tables import Table


def snapshot_slots(pool: SlotPool) -> object:
    """Numbers and live slots."""
    return pool.stats, pool.live_slots().tolist()


def snapshot_table(table: Table) -> object:
    """Both sides of a table."""
    host = None if table.host is None else table.host.tobytes()
    return host, table.runtime.inspect(table.device).tobytes()


def snapshot_pages(pool: PagePool) -> object:
    """Numbers and the page table."""
    return pool.stats, pool.page_table.tolist()
