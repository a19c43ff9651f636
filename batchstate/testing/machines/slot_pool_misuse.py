"""Ways to misuse a `SlotPool`."""

import numpy as np
import torch

from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.indices import Pages, Slots
from batchstate.invariants import Code
from batchstate.pools import SlotPool
from batchstate.testing.misuse import Misuse


def _forged(pool: SlotPool, slot: int) -> Slots:
    return Slots.from_host(pool.runtime, [slot], generations=[1], pool=pool.identity)


MISUSES: tuple[Misuse[SlotPool], ...] = (
    Misuse("take -1", (ArgumentError,), lambda pool: pool.take(-1)),
    Misuse("take True", (DtypeError,), lambda pool: pool.take(True)),
    Misuse("take half a slot", (DtypeError,), lambda pool: pool.take(0.5)),  # type: ignore[arg-type]
    Misuse("free numbers", (DtypeError,), lambda pool: pool.free(np.array([1]))),  # type: ignore[arg-type]
    Misuse(
        "free pages",
        (Code.UNIT_MISMATCH,),
        lambda pool: pool.free(Pages.from_host(pool.runtime, [1])),  # type: ignore[arg-type]
    ),
    Misuse("free behind a number", (ArgumentError,), lambda pool: pool.free(pool.take(0), after=5)),  # type: ignore[arg-type]
    Misuse("free a slot of no pool", (ArgumentError,), lambda pool: pool.free(Slots.from_host(pool.runtime, [1]))),
    Misuse("free slot 0", (Code.SLOT_ZERO_ALLOCATED,), lambda pool: pool.free(_forged(pool, 0))),
    Misuse("free slot -1", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.free(_forged(pool, -1))),
    Misuse("free beyond the last", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.free(_forged(pool, pool.capacity))),
    Misuse("ask for a slot out of range", (Code.SLOT_OUT_OF_RANGE,), lambda pool: pool.is_live([pool.capacity])),
    Misuse("ask for half a slot", (DtypeError,), lambda pool: pool.is_live([0.5])),
    Misuse(
        "adopt a table sized by size",
        (Code.TABLE_CAPACITY,),
        lambda pool: pool.adopt(pool.runtime.device_zeros((pool.size,), torch.int32), "small"),
    ),
    Misuse(
        "adopt a scalar", (ShapeError,), lambda pool: pool.adopt(pool.runtime.device_zeros((), torch.int32), "scalar")
    ),
    Misuse("a table of a negative width", (ArgumentError,), lambda pool: pool.table("t", (-1,))),
    Misuse("a pool of no slots", (ArgumentError,), lambda pool: SlotPool(pool.runtime, 0)),
    Misuse("a negative reserve", (ArgumentError,), lambda pool: SlotPool(pool.runtime, 1, reserve=-1)),
)
