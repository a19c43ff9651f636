"""Memory of planned steps, on the host and on the device: used again once nobody holds it and no work reads it.

A step, its batch and its inputs read their values from the memory that the step was planned in, so it stays as it is
while one of them, an array or a tensor of theirs is alive. Nothing is recorded for that. Python counts who holds the
memory, its block, its array and the tensors that were handed out; torch counts the tensors that share the storage,
views of views and DLPack's among them. Free memory has the counts that it had when it was made. A kept `data_ptr()` is
not seen. The memory of the device stays at its address, so its views are made once for each size of a step: with new
memory and views in each, a decode step of one request took 63 us and not 53.

Work of the stream that plans comes behind what it was given before. For other streams that were given values of the
step a fence is recorded once nobody holds these, and the memory is not used before it is complete.
"""

from sys import getrefcount
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack

from batchstate._arrays import Ints
from batchstate._core import Columns, StepBlock
from batchstate.mirror import DeviceSide, Slots
from batchstate.pools import SlotPool
from batchstate.runtime.base import MOST_SYNCHRONISED, Fence, Stream
from batchstate.runtime.memory import TORCH_DTYPES, PackedUpload, Place, ReadyTensor, StagingBlock, strided

MOST_MEMORIES = 16
"""Beyond these, the memory that was held longest is left to its holder."""

MOST_VIEWS = 320
"""Views that a memory keeps, for steps of some 40 sizes."""

SMALLEST = 1 << 12

INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)

STAYS = hasattr(torch._C, "_storage_Use_Count")
"""Whether torch says how many tensors share a storage: a function of its own CUDA graphs. If not, memory is new."""

_sharing: Any = torch._C._storage_Use_Count if STAYS else lambda address: 0


def _references() -> int:
    tensors = (torch.empty(0),)
    return sum(map(getrefcount, tensors))


HELD = _references()
"""Python's references to a tensor that a tuple of views has and nobody else, as `StepMemory.held` sees them."""


def _alone() -> Any:
    """The question how many in C++ hold a tensor, or None where Python's references count these too (torch 2.10)."""
    tensors = (torch.empty(0),)
    held = torch.utils.dlpack.from_dlpack(tensors[0])
    counts = sum(map(getrefcount, tensors)) > HELD
    del held
    return None if counts else torch.Tensor._use_count  # type: ignore[attr-defined]


_users = _alone()


class Views(NamedTuple):
    """The device side of a step's arrays: int64, those of `starts` and `kv_lens` int32."""

    source: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    kv_lens: torch.Tensor
    last: torch.Tensor
    mapping: torch.Tensor
    sampled: torch.Tensor


@final
class StepMemory:
    """The memory of one step at a time, and for `FutureMap` the requests of the step that publish; see `Publishing`.

    Attributes:
        array: pinned memory, int64[size / 8].
        block: the core's, over it.
        staging: the same memory, as the runtime copies it.
        size: in bytes.
        columns: the device's memory as int64.
        wide, narrow: the same as int64 and int32, with a count of writes apart from that of the columns: a forward may
            write into its inputs.
        copied: the fence behind the last copy of it, and the stream that ran it.
        sent: the same, also of a copy that failed; None before the first.
        others: further streams that use it since then, by their keys.
        counts: how many hold it when it is free, but for views that it keeps.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_fences",
        "_handed",
        "_heads",
        "_objects",
        "_pool",
        "_runtime",
        "_shared",
        "_storage",
        "_table_views",
        "_typed",
        "_views",
        "array",
        "block",
        "columns",
        "copied",
        "counts",
        "narrow",
        "others",
        "sent",
        "size",
        "staging",
        "wide",
    )

    copied: tuple[Fence, Stream]

    def __init__(self, pool: SlotPool, columns: Columns, size: int) -> None:
        runtime = pool.runtime
        tensor = runtime._allocate_staging(size)
        contents: npt.NDArray[np.uint8] = tensor.numpy()
        self._pool, self._runtime = pool, runtime
        self.staging, self.size = StagingBlock(tensor, contents), size
        self.array: Ints = contents.view(np.int64)
        self.block = StepBlock(columns, self.array)
        self._fences: tuple[Stream, list[Fence]] | None = None
        self.sent: tuple[Fence, Stream] | None = None
        self.others: dict[object, Stream] = {}
        self.counts = 0
        self._renew()

    def _renew(self) -> None:
        """New memory of the device."""
        with torch.inference_mode(False):  # else torch would not count writes
            self._buffer = self._runtime.device_empty((self.size,), torch.uint8)
            self._runtime.name_memory(self._buffer, "step")
            data, self.columns = self._buffer.data, self._buffer.view(torch.int64)
            self.wide, self.narrow = data.view(torch.int64), data.view(torch.int32)
        self._storage = self._buffer.untyped_storage()
        self._forget()

    def _forget(self) -> None:
        """Makes no view yet."""
        self._heads: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, int, int], Views] = {}
        self._table_views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._handed: tuple[torch.Tensor, ...] = ()
        self._typed = {INT64: self.wide, INT32: self.narrow}
        self._objects = self.block, self.array, self.array.base, self._storage  # numpy takes the base for that of views
        self._shared = 0  # how many of those that share the storage are views here

    def held(self) -> int:
        """How many hold it, but for views that it keeps: never fewer than `counts`. Called on an item of one list.

        Python's references to it, its parts and the tensors that were handed out last, and torch's count of tensors
        that share the storage.
        """
        handed = self._handed
        held: int = _sharing(self._storage._cdata) - self._shared
        held += getrefcount(self) + sum(map(getrefcount, self._objects))
        if _users is not None:
            held += sum(map(_users, handed)) - len(handed)
        return held + sum(map(getrefcount, handed)) - len(handed) * HELD

    def numbers(self, at: int, n: int) -> Ints:
        """N elements int64 from element `at` on, a view."""
        return self.array[at : at + n]

    def small_numbers(self, at: int, n: int) -> npt.NDArray[np.int32]:
        """N elements int32 from element `at` of int32 on, a view."""
        return np.ndarray((n,), INT32, self.array.data, 4 * at)

    def send(self, end: int, places: list[Place], stream: Stream) -> PackedUpload:
        """Copies the first bytes to the device, on `stream`, the current one."""
        self._fences = None  # of uses before this one
        if not STAYS:
            self._renew()
        elif self._shared > MOST_VIEWS:
            self._forget()
        head = self._heads.get(end)
        if head is None:
            with torch.inference_mode(False):
                head = self._heads[end] = self._buffer[:end]
            self._shared += 1
        self._handed = ()
        try:
            _, ready = self._runtime.copied(self.staging, end, stream, into=head)
        except BaseException:
            self.sent = self._runtime.record(stream), stream  # it may be under way
            raise
        self.sent = self.copied = ready, stream
        upload = PackedUpload(self._buffer, stream, ready, places)  # not kept: it keeps views
        self.others = upload.synchronised
        return upload

    def views(self) -> Views:
        """The arrays of the step on the device."""
        block = self.block
        sampling = block.last_rows
        size = block.n, block.padded, sampling
        views = self._views.get(size)
        if views is None:
            wide, narrow, n, padded = self.wide, self.narrow, block.n, block.padded
            with torch.inference_mode(False):
                views = self._views[size] = Views(
                    wide[block.source : block.source + padded],
                    wide[block.positions : block.positions + padded],
                    narrow[block.starts : block.starts + n + 1],
                    narrow[block.kv_lens : block.kv_lens + n],
                    wide[block.last : block.last + sampling],
                    wide[block.mapping : block.mapping + padded],
                    wide[block.sampled : block.sampled + sampling],
                )
            self._shared += len(views)
        self._handed = views
        return views

    def table_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of the token table that the step writes, int64[k], and their places, int32[k]: for no holder."""
        block = self.block
        at = block.elements, block.places, block.k
        views = self._table_views.get(at)
        if views is None:
            with torch.inference_mode(False):
                elements = self.wide[block.elements : block.elements + block.k]
                views = self._table_views[at] = elements, self.narrow[block.places : block.places + block.k]
            self._shared += 2
        return views

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """The slots of some rows on the device, for the stream of the copy. A write counts as one into the columns."""
        block = self.block
        at = block.start(block.columns.slots) >> 3
        return self.columns[at + start : at + stop]

    def part(self, at: Place) -> torch.Tensor:
        """An array that crossed with the step, likewise. A write counts as one into the inputs."""
        start, dtype, shape = at
        typed = self._typed.get(dtype)
        if typed is None:
            with torch.inference_mode(False):
                typed = self._typed[dtype] = self._buffer.data.view(TORCH_DTYPES[dtype])
            self._shared += 1
        return strided(typed, start // dtype.itemsize, shape)

    # The requests that sample

    @property
    def num_rows(self) -> int:
        """How many, or with padded rows where all requests sample."""
        num_rows: int = self.block.last_rows
        return num_rows

    def index(self, stream: Stream) -> torch.Tensor:
        """Their slots on the device, safe on `stream`, the current one."""
        ready, own = self.copied
        block = self.block
        if stream is not own:
            self._runtime.use_on_current_stream(self._buffer, own, ready, synchronised=self.others, current=stream)
        index = (self._handed or self.views())[-1]
        return index if block.last_rows == block.s else index[: block.s]

    def handles(self, *, padded: bool = False) -> Slots:
        """Their handles."""
        rows, generations = self.block.those_sampling().handles()
        if padded and self.num_rows > rows.size:
            more = np.zeros(self.num_rows - rows.size, dtype=np.int64)
            rows, generations = np.append(rows, more), np.append(generations, more)
        ready, own = self.copied
        index, pool = (self._handed or self.views())[-1], self._pool
        side = DeviceSide(ReadyTensor(index[: len(rows)], own, ready, self.others))
        return Slots.of_pool(self._runtime, rows, generations, pool_id=pool.pool_id, name=pool.name, device=side)

    def free(self, stream: Stream) -> bool:
        """Whether the next step may be planned here, on `stream`, the current one: nobody holds what was sent."""
        ready, own = self.sent  # type: ignore[misc]
        if not ready.query():
            return False
        if self.others or (own is not stream and own != stream):
            if self._fences is None or self._fences[0] != stream:
                used = [own, *self.others.values()]
                self._fences = stream, [self._runtime.record(other) for other in used if other != stream]
            return all(fence.query() for fence in self._fences[1])
        return True


@final
class StepMemories:
    """The memories of one planner.

    Attributes:
        made_for_holders: how many were made because others were held: more than the steps in flight explain.
    """

    def __init__(self, pool: SlotPool, columns: Columns) -> None:
        self._pool, self._runtime, self._columns = pool, pool.runtime, columns
        self._all: list[StepMemory] = []
        self._counts = 0
        self._aside = False  # whether other streams have used memory
        self.made_for_holders = 0
        self._made(None, 0, SMALLEST)  # now: its counts are compared with those of memory that is made later

    def take(self, nbytes: int, stream: Stream) -> StepMemory:
        """Memory of at least `nbytes` for a step that is planned on `stream`, the current one. Never waits."""
        free: StepMemory | None = None
        held, memories = 0, self._all
        for memory in memories:
            others = memory.others
            if others:
                self._aside = True
            elif free is not None:
                continue
            # Beyond so many streams the first have been forgotten.
            if memory.held() != memory.counts or len(others) >= MOST_SYNCHRONISED:
                held += 1
            elif (memory.sent is None or memory.free(stream)) and free is None:
                free = memory
                if not self._aside:  # of memory that other streams use each gets its fence soon
                    break
        if free is None or free.size < nbytes:
            free = self._made(free, held, nbytes)
        memories.remove(free)
        memories.append(free)  # so that the one lent longest ago is asked first
        if self._runtime.notes_host:
            self._runtime.host_accesses(free.staging.tensor, 0, free.size, "plan: fill", writes=True)
        return free

    def _made(self, small: StepMemory | None, held: int, nbytes: int) -> StepMemory:
        """New memory, instead of one that is too small, or since none is free."""
        if small is not None:
            self._all.remove(small)
        elif held > self._runtime.steps_in_flight + 2:
            self.made_for_holders += 1
            if held >= MOST_MEMORIES:
                del self._all[0]
        self._all.append(StepMemory(self._pool, self._columns, max(SMALLEST, 1 << (nbytes - 1).bit_length())))
        counts = 0
        for memory in self._all:  # as `take` asks
            if memory is self._all[-1]:
                counts = memory.held()
        # All are held alike while they are free. The least counts: somebody may look at all objects just now.
        self._counts = min(counts, self._counts or counts)
        for memory in self._all:
            memory.counts = self._counts
        return self._all[-1]
