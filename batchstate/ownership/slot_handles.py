"""Handles: whose slot a number is. The generation of a slot rises when it is taken and never falls.

A handle is good while its slot is live and has the generation that the handle holds. So the order in which slots are
reused does not matter: the last one freed may be the next one taken, and a handle kept too long is still found out.
"""

import itertools
import weakref
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate import invariants, levels
from batchstate.errors import ArgumentError, DeviceError, DtypeError
from batchstate.indices import Slots
from batchstate.invariants import made
from batchstate.mirror import MirroredTensor
from batchstate.ownership.ledger import LIVE_BYTE, Ledger
from batchstate.runtime import Runtime
from batchstate.violations import Code, Where

Ints = npt.NDArray[np.int64]

ONE = np.array(1)  # numpy takes as long to convert one number as to add 100 of them
DOUBLE_FREE, STALE_HANDLE = Code.SLOT_DOUBLE_FREE, Code.SLOT_STALE_HANDLE

_identities = itertools.count(1)
_books: "weakref.WeakValueDictionary[int, HandleBook]" = weakref.WeakValueDictionary()


@final
class HandleBook:
    """The generations of one pool's slots.

    Attributes:
        identity: number of the pool that its handles carry.
        name: of the pool.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger, *, name: str) -> None:
        self.identity = next(_identities)
        self.name = name
        self._runtime = runtime
        self._ledger = ledger
        self._generations = np.zeros(ledger.capacity, dtype=np.int64)
        self._seen = self._generations.copy()  # at the last `verify`
        _books[self.identity] = self

    def __repr__(self) -> str:
        return f"HandleBook({self.name!r}, pool {self.identity})"

    def make(self, rows: Ints) -> Slots:
        """New handles for slots that were just taken: takes over `rows`, int64[n].

        Raises:
            Violation: SLOT_STALE_HANDLE, at `cheap`: a generation did not rise.
        """
        before = self._generations[rows]
        generations = self._raise_generations(rows, before)
        if levels.cheap and (generations > before).tobytes() != b"\1" * rows.size:
            # A generation that stands still would make the handles of the former owner valid again.
            invariants.slot_stale_handle(rows, before + 1, generations, **self._where("take"))
        return Slots.of_pool(self._runtime, rows, generations, pool=self.identity, name=self.name)

    def rows_of(self, slots: Slots, operation: str, *, unique: bool = False) -> Ints:
        """The numbers of handles of this pool that are all good, int64[n], read-only; see `SlotPool.rows_of`."""
        rows, held = self._read(slots, operation)
        made[STALE_HANDLE] += 1
        if not self._all_held(rows, held):
            where = self._where(operation)
            invariants.slot_out_of_range(rows, self._ledger.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            current = np.where(self._ledger.live_among(rows), self._generations[rows], -1)
            invariants.slot_stale_handle(rows, held, current, **where)
        if unique and self._ledger.repeated(rows):
            invariants.slot_shared(rows, **self._where(operation))
        return rows

    def rows_to_free(self, slots: Slots, operation: str) -> Ints:
        """The same for handles that are about to be freed: dead and repeated ones are SLOT_DOUBLE_FREE."""
        rows, held = self._read(slots, operation)
        made[DOUBLE_FREE] += 1
        if not self._all_held(rows, held) or self._ledger.repeated(rows):
            where = self._where(operation)
            invariants.slot_out_of_range(rows, self._ledger.capacity, **where)
            invariants.slot_zero_allocated(rows, **where)
            invariants.slot_double_free(rows, self._ledger.live_among(rows), **where)
            invariants.slot_stale_handle(rows, held, self._generations[rows], **where)
        return rows

    def verify(self) -> None:
        """No generation fell since the last time.

        Raises:
            Violation: SLOT_STALE_HANDLE.
        """
        everyone = np.arange(self._generations.size, dtype=np.int64)
        least = np.maximum(self._generations, self._seen)
        invariants.slot_stale_handle(everyone, least, self._generations, **self._where("verify"))
        self._seen = self._generations.copy()

    def _read(self, slots: object, operation: str) -> tuple[Ints, Ints]:
        """Numbers and generations of slots that this pool handed out; both int64[n]."""
        if not isinstance(slots, Slots):
            if isinstance(slots, MirroredTensor):
                invariants.unit_mismatch("slot", str(slots.unit), **self._where(operation))
            raise DtypeError(
                f"{self.name}: {operation} of {type(slots).__name__}",
                value=slots,
                remedy="pass the handles that `take` returned; a number does not say whose slot it is",
            )
        rows: Ints = slots.np
        if slots.runtime is not self._runtime:
            raise DeviceError(f"{self.name}: {slots!r} has another runtime", value=slots, remedy="use one runtime")
        if slots.pool != self.identity and rows.size:
            other = _books.get(slots.pool)
            raise ArgumentError(
                f"{operation}: slots of {'no pool' if other is None else f'pool {other.name!r}'} "
                f"given to pool {self.name!r}",
                value=slots,
                remedy="use slots with the pool that handed them out, and with the pages and tables made over it",
            )
        return rows, slots.generations

    def _all_held(self, rows: Ints, held: Ints) -> bool:
        """Whether each handle is live and of its slot's present owner: the fast form of four laws, O(n).

        What lies outside is in no state, or beyond the generations, which are half as many.
        """
        try:
            return self._ledger.all_are(rows, LIVE_BYTE) and self._generations[rows].tobytes() == held.tobytes()
        except IndexError:
            return False

    def _raise_generations(self, rows: Ints, before: Ints) -> Ints:
        generations: Ints = before + ONE
        self._generations[rows] = generations
        return generations

    def _where(self, operation: str) -> Where:
        return {"object": self._ledger.label, "operation": operation, "step": self._runtime.step}
