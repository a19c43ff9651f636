"""A page pool in numbers."""

import attrs


@attrs.frozen
class PageStats:
    """A page pool in numbers: free + pending + live = num_pages.

    Attributes:
        num_pages: pages that can be allocated; page 0 is not among them.
        free: nobody's.
        pending: released behind a fence that is not complete; waiting helps.
        live: held by slots or leases.
        shared: live pages with more than one holder.
        leases: leases that are not released.
    """

    num_pages: int
    free: int
    pending: int
    live: int
    shared: int
    leases: int
