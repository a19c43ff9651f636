"""References to pages that no slot needs to keep: what a prefix cache holds, and what is taken before a request is."""

from collections.abc import Callable
from typing import Unpack, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import invariants
from batchstate.ownership.table_write import read_only
from batchstate.runtime import Fence
from batchstate.violations import Where

Ints = npt.NDArray[np.int64]


@final
@attrs.define(eq=False)
class PageLease:
    """Pages that no slot has to have: the first `tokens` tokens of a request, kept after it, or pages taken before one.

    Made by `PagePool.hold` and `PagePool.take`; give it back with `release`.

    Attributes:
        tokens: how many tokens; whole pages.
        released: whether it was given back.
    """

    _pages: Ints
    tokens: int
    _release: "Callable[[PageLease, Ints, Fence | None], None]"
    released: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"PageLease({self.tokens} tokens, {self._pages.size} pages{', released' if self.released else ''})"

    @property
    def pages(self) -> Ints:
        """int64[tokens / page_size], in the order of their tokens; a read-only view."""
        return read_only(self._pages)

    def release(self, *, after: Fence | None = None) -> None:
        """Gives the references back, at once or when `after` is complete.

        Raises:
            Violation: SLOT_DOUBLE_FREE: it was given back before.
        """
        self._release(self, self._pages, after)


@final
class Leases:
    """The leases of one pool that are not released."""

    def __init__(self) -> None:
        self._held: dict[int, PageLease] = {}

    def __repr__(self) -> str:
        return f"Leases({len(self)})"

    def __len__(self) -> int:
        return len(self._held)

    def make(self, pages: Ints, tokens: int, release: "Callable[[PageLease, Ints, Fence | None], None]") -> PageLease:
        """A new lease; takes over `pages`."""
        lease = PageLease(pages, tokens, release)
        self._held[id(lease)] = lease
        return lease

    def end(self, lease: PageLease) -> None:
        """Forgets a lease that is released."""
        del self._held[id(lease)]
        lease.released = True

    def holds(self, lease: PageLease) -> bool:
        """Whether the lease is of this pool and not released."""
        return self._held.get(id(lease)) is lease

    def check_held(self, lease: PageLease, **where: Unpack[Where]) -> None:
        """Refuses a lease that was released.

        Raises:
            Violation: SLOT_DOUBLE_FREE.
        """
        if not self.holds(lease):
            pages = lease.pages if lease.pages.size else np.zeros(1, dtype=np.int64)
            invariants.slot_double_free(pages, np.zeros(pages.size, dtype=np.bool_), **where)

    def holders(self, num_pages: int) -> Ints:
        """How many leases hold each page, int64[num_pages + 1]."""
        pages = [lease.pages for lease in self._held.values()]
        held = np.concatenate(pages) if pages else np.empty(0, dtype=np.int64)
        return np.bincount(held, minlength=num_pages + 1).astype(np.int64)
