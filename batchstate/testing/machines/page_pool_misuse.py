"""Ways to misuse a `PagePool`, given the pool and the handle of a live request."""

import numpy as np

from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.indices import Pages, Slots
from batchstate.invariants import Code
from batchstate.pages import PagePool
from batchstate.testing.misuse import Misuse

It = tuple[PagePool, Slots]


def _pages_of_two(it: It) -> bool:
    return it[0].page_size > 1


def _has_pages(it: It) -> bool:
    return bool(it[0].allocated(it[1])[0])


MISUSES: tuple[Misuse[It], ...] = (
    Misuse("grow to -1", (Code.LENGTH_ORDER,), lambda it: it[0].grow(it[1], -1)),
    Misuse("grow beyond a row", (Code.LENGTH_ORDER,), lambda it: it[0].grow(it[1], it[0].max_tokens_per_request + 1)),
    Misuse("grow to half a token", (DtypeError,), lambda it: it[0].grow(it[1], 0.5)),
    Misuse("one length too many", (ShapeError,), lambda it: it[0].grow(it[1], np.array([1, 1]))),
    Misuse("advance by -1", (ArgumentError,), lambda it: it[0].advance(it[1], -1)),
    Misuse("advance beyond int64", (Code.LENGTH_ORDER,), lambda it: it[0].advance(it[1], 2**63 - 1)),
    Misuse("truncate to more", (Code.LENGTH_ORDER,), lambda it: it[0].truncate(it[1], it[0].committed(it[1]) + 1)),
    Misuse("truncate to -1", (Code.LENGTH_ORDER,), lambda it: it[0].truncate(it[1], -1)),
    Misuse("take -1 pages", (ArgumentError,), lambda it: it[0].take(-1)),
    Misuse("take half a page", (DtypeError,), lambda it: it[0].take(0.5)),  # type: ignore[arg-type]
    Misuse("hold half a page", (Code.PAGE_ALIGNMENT,), lambda it: it[0].hold(it[1], 1), _pages_of_two),
    Misuse(
        "hold what is not committed",
        (Code.LENGTH_ORDER,),
        lambda it: it[0].hold(it[1], 8 * it[0].page_size),
    ),
    Misuse("hold two requests", (ArgumentError, Code.SLOT_SHARED), lambda it: it[0].hold(it[1].take([0, 0]), 0)),
    Misuse("share into a request with pages", (ArgumentError,), lambda it: it[0].share(it[1], it[1], 0), _has_pages),
    Misuse("one request twice", (Code.SLOT_SHARED,), lambda it: it[0].advance(it[1].take([0, 0]))),
    Misuse(
        "leave twice in one call",
        (Code.SLOT_DOUBLE_FREE,),
        lambda it: it[0].release_requests(it[1].take([0, 0])),
    ),
    Misuse("release padding", (Code.SLOT_ZERO_ALLOCATED,), lambda it: it[0].release(it[1].pad(2))),
    Misuse("release behind a number", (ArgumentError,), lambda it: it[0].release(it[1], after=3)),  # type: ignore[arg-type]
    Misuse("release numbers", (DtypeError,), lambda it: it[0].release([1])),  # type: ignore[arg-type]
    Misuse(
        "release pages as slots",
        (Code.UNIT_MISMATCH,),
        lambda it: it[0].release(Pages.from_host(it[0].runtime, [1])),  # type: ignore[arg-type]
    ),
    Misuse("a lease made by hand", (ArgumentError, DtypeError), lambda it: it[0].share(7, it[1], 0)),  # type: ignore[arg-type]
    Misuse(
        "pages of no tokens",
        (ArgumentError,),
        lambda it: PagePool(it[0].runtime, it[0].slots, 1, 0, max_tokens_per_request=1),
    ),
)
