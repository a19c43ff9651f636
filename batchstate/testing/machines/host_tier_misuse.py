"""Ways to misuse a `HiSparse`, given the tier and the handle of a live request of some state."""

import numpy as np

from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.hisparse import HiSparse
from batchstate.indices import Pages, Slots
from batchstate.invariants import Code
from batchstate.pools import SlotPool
from batchstate.testing.misuse import Misuse
from batchstate.tiering.books import TierState

It = tuple[HiSparse, Slots]
_TIER = (Code.TIER_STATE,)


def _state(it: It) -> TierState:
    return it[0].states(it[1])[0]


def _inside(it: It) -> bool:
    return _state(it) is not TierState.OUTSIDE


def _outside(it: It) -> bool:
    return not _inside(it)


def _not_ready(it: It) -> bool:
    return _state(it) is not TierState.READY


def _not_direct(it: It) -> bool:
    return _state(it) is not TierState.DIRECT


def _ready(it: It) -> bool:
    return not _not_ready(it)


def _cold(it: It) -> bool:
    return _outside(it) and not it[0].pages.committed(it[1])[0]


def _hot(it: It) -> bool:
    return _outside(it) and bool(it[0].pages.committed(it[1])[0])


def _next(it: It) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return it[0].lengths(it[1]) + 1


MISUSES: tuple[Misuse[It], ...] = (
    Misuse("reserve what is in the tier", _TIER, lambda it: it[0].reserve(it[1], 1, 1), _inside),
    Misuse("reserve what is on the device", (ArgumentError,), lambda it: it[0].reserve(it[1], 1, 1), _hot),
    Misuse("reserve behind a number", (ArgumentError,), lambda it: it[0].reserve(it[1], 1, 1, writer=3), _cold),  # type: ignore[arg-type]
    Misuse("reserve less than comes", (Code.LENGTH_ORDER,), lambda it: it[0].reserve(it[1], 2, 1), _cold),
    Misuse("reserve nothing", (ArgumentError,), lambda it: it[0].reserve(it[1], 0, 1), _cold),
    Misuse("reserve -1", (ArgumentError,), lambda it: it[0].reserve(it[1], -1, 1), _cold),
    Misuse("reserve half a token", (DtypeError,), lambda it: it[0].reserve(it[1], 0.5, 1), _cold),
    Misuse(
        "reserve more than there is",
        (Code.LENGTH_ORDER,),
        lambda it: it[0].reserve(it[1], 1, it[0].host.num_tokens + 1),
        _cold,
    ),
    Misuse("admit what has not been reserved", _TIER, lambda it: it[0].admit_direct(it[1]), _not_direct),
    Misuse("stage what is in the tier", _TIER, lambda it: it[0].admit_staged(it[1], 99), _inside),
    Misuse(
        "stage into too little",
        (Code.LENGTH_ORDER,),
        lambda it: it[0].admit_staged(it[1], it[0].pages.committed(it[1]) - 1),
        _hot,
    ),
    Misuse("decode what is not ready", _TIER, lambda it: it[0].map_last_location(it[1], 9), _not_ready),
    Misuse("finish what is not ready", _TIER, lambda it: it[0].finish(it[1]), _not_ready),
    Misuse("abort what is outside", _TIER, lambda it: it[0].abort(it[1]), _outside),
    Misuse("abort behind a number", (ArgumentError,), lambda it: it[0].abort(it[1], after=3), _inside),  # type: ignore[arg-type]
    Misuse("abort one twice", (Code.SLOT_SHARED,), lambda it: it[0].abort(it[1].take([0, 0])), _inside),
    Misuse(
        "decode without a new token",
        (ArgumentError, Code.LENGTH_ORDER),
        lambda it: it[0].map_last_location(it[1], _next(it) - 1),
        _ready,
    ),
    Misuse(
        "decode two tokens",
        (ArgumentError, Code.LENGTH_ORDER),
        lambda it: it[0].map_last_location(it[1], _next(it) + 1),
        _ready,
    ),
    Misuse(
        "decode with one length too many",
        (ShapeError,),
        lambda it: it[0].map_last_location(it[1], np.concatenate([_next(it), [1]])),
        _ready,
    ),
    Misuse(
        "decode one twice",
        (Code.SLOT_SHARED,),
        lambda it: it[0].map_last_location(it[1].take([0, 0]), _next(it)),
        _ready,
    ),
    Misuse(
        "decode padding",
        (Code.SLOT_ZERO_ALLOCATED,),
        lambda it: it[0].map_last_location(it[1].pad(2), _next(it)),
        _ready,
    ),
    Misuse("host tokens beyond the runs", (ArgumentError,), lambda it: it[0].host_tokens(it[1], 10_000), _inside),
    Misuse("host tokens of nobody", _TIER, lambda it: it[0].host_tokens(it[1], 1), _outside),
    Misuse(
        "finish slots of another pool",
        (ArgumentError,),
        lambda it: it[0].finish(SlotPool(it[0].runtime, 1).take(1)),
    ),
    Misuse(
        "abort pages",
        (Code.UNIT_MISMATCH,),
        lambda it: it[0].abort(Pages.from_host(it[0].runtime, [1])),  # type: ignore[arg-type]
    ),
)
