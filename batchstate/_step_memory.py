"""Host memory of planned steps: each is filled anew once nobody holds it and its copy to the device has run.

A step and its batch read their rows from the memory that they were planned in, so it stays as it is while one of them,
or an array of theirs, is alive. Nothing is recorded for that: Python counts who holds the memory, its block and its
array, and a free one has the counts that it had when it was made. Device memory is new in each step, and torch keeps it
for whoever holds a view of it. Memory of the device that stayed at its address would save some 5 us of views a step,
and would need torch's private counts of users to know who still reads it.
"""

from sys import getrefcount
from typing import final

import numpy as np
import numpy.typing as npt

from batchstate._core import Columns, StepBlock
from batchstate.runtime.base import Fence, Runtime
from batchstate.runtime.memory import StagingBlock

Ints = npt.NDArray[np.int64]

MOST_MEMORIES = 16
"""Beyond these, the memory that was held longest is left to its holder."""

SMALLEST = 1 << 12

INT32 = np.dtype(np.int32)


@final
class StepMemory:
    """The memory of one step at a time.

    Attributes:
        array: pinned memory, int64[size / 8].
        block: the core's, over it.
        staging: the same memory, as the runtime copies it.
        size: in bytes.
        copied: the fence behind the last copy of it, or None.
        counts: how many hold it, its block and its arrays when it is free; None before it was asked.
        lent: number of the lending, from 1.
    """

    __slots__ = ("__weakref__", "_runtime", "array", "block", "copied", "counts", "lent", "size", "staging")

    def __init__(self, runtime: Runtime, columns: Columns, size: int) -> None:
        tensor = runtime._allocate_staging(size)
        contents: npt.NDArray[np.uint8] = tensor.numpy()
        self._runtime = runtime
        self.staging, self.size = StagingBlock(tensor, contents), size
        self.array: Ints = contents.view(np.int64)
        self.block = StepBlock(columns, self.array)
        self.copied: Fence | None = None
        self.counts: tuple[int, int, int, int] | None = None
        self.lent = 0

    def begin(self, num_rows: int) -> StepBlock:
        """The block, laid for so many rows: from here on the host writes."""
        self._runtime.host_accesses(self.staging.tensor, 0, self.size, "plan: fill", writes=True)
        self.block.lay(num_rows)
        return self.block

    def numbers(self, at: int, n: int) -> Ints:
        """N elements int64 from element `at` on, a view."""
        return self.array[at : at + n]

    def narrow(self, at: int, n: int) -> npt.NDArray[np.int32]:
        """N elements int32 from element `at` of int32 on, a view."""
        return np.ndarray((n,), INT32, self.array.data, 4 * at)


def _counted(memory: StepMemory) -> tuple[int, int, int, int]:
    array = memory.array  # a view of one holds that which numpy takes for the base of both
    return getrefcount(memory), getrefcount(memory.block), getrefcount(array), getrefcount(array.base)


@final
class StepMemories:
    """The memories of one planner.

    Attributes:
        made_for_holders: how many were made because others were held: more than the steps in flight explain.
    """

    def __init__(self, runtime: Runtime, columns: Columns) -> None:
        self._runtime, self._columns = runtime, columns
        self._all: list[StepMemory] = []
        self._lendings = 0
        self.made_for_holders = 0

    def take(self, nbytes: int) -> StepMemory:
        """Memory of at least `nbytes` that nobody holds and no copy reads. Never waits."""
        small: StepMemory | None = None
        held = 0
        for memory in self._all:
            if _counted(memory) != memory.counts:
                held += 1
            elif memory.copied is None or memory.copied.query():
                if memory.size >= nbytes:
                    return self._lend(memory)
                small = memory
        if small is not None:
            self._all.remove(small)
        elif held > self._runtime.steps_in_flight + 2:
            self.made_for_holders += 1
            if held >= MOST_MEMORIES:
                self._all.remove(min(self._all, key=lambda memory: memory.lent))
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        self._all.append(StepMemory(self._runtime, self._columns, size))
        for memory in self._all:  # as `take` asks
            if memory.counts is None:
                memory.counts = _counted(memory)
        return self._lend(self._all[-1])

    def _lend(self, memory: StepMemory) -> StepMemory:
        self._all.remove(memory)
        self._all.append(memory)  # so that the one lent longest ago is asked first
        self._lendings += 1
        memory.lent = self._lendings
        return memory
