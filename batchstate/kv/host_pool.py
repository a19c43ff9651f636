"""`HostKVPool`: KV memory of the host tier, one buffer per layer, pinned or on the device, handed out in ranges.

Host location 0 (with pages, the locations of page 0) is padding. Ranges have an owner and a generation, and are handed
out again only when the fence that they were freed behind is complete: that of a device copy that still writes them, or
of a writer in another process.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate._allocator import FREE, MOST_TOKENS, Allocator, Transaction, joined, size_of
from batchstate._arrays import UNORDERED, Ints, amounts, arange_per_row, as_array, ranges_of, read_only
from batchstate._core import Requests
from batchstate.errors import ArgumentError, DtypeError, expected
from batchstate.mirror import HostLocations
from batchstate.runtime.agreement import QueriedFence
from batchstate.runtime.base import Fence, OfThisProcess, Runtime, check_fence
from batchstate.runtime.memory import MappedMemory

__all__ = ["HostBuffer", "HostKVPool", "HostRanges", "HostStats", "KVBuffer"]


_POISON = 0xC3
"""Each byte of free memory, at `full`."""


@final
class FreeRanges:
    """Free indices among `first` to `last`, kept as ranges, all of them free at first.

    The free list of an `Allocator` where indices that are taken together should be neighbours. Best fit: the smallest
    range that holds all that is asked for, from its low end; where none does, the largest ones. Neighbours that are
    freed become one range. Costs O(ranges): at most one more than there are ranges in use.
    """

    def __init__(self, first: int, last: int) -> None:
        self._starts: Ints = np.empty(0, dtype=np.int64)
        self._ends: Ints = np.empty(0, dtype=np.int64)  # exclusive
        self.count = 0
        self.push(np.arange(first, last + 1))

    @property
    def largest(self) -> int:
        """Length of the largest range."""
        return int((self._ends - self._starts).max(initial=0))

    def top(self, n: int) -> Ints:
        chosen, sizes = self._choose(n)
        return arange_per_row(self._starts[chosen], sizes)

    def drop(self, n: int) -> None:
        chosen, sizes = self._choose(n)
        self._starts[chosen] += sizes
        self.count -= n
        left = self._starts < self._ends
        self._starts, self._ends = self._starts[left], self._ends[left]

    def push(self, indices: Ints) -> None:
        if not indices.size:
            return
        more, lengths = ranges_of(np.sort(indices))
        starts = np.concatenate([self._starts, more])
        ends = np.concatenate([self._ends, more + lengths])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        gaps = starts[1:] != ends[:-1]
        self._starts = starts[np.append(True, gaps)]
        self._ends = ends[np.append(gaps, True)]
        self.count += indices.size

    def entries(self) -> Ints:
        return arange_per_row(self._starts, self._ends - self._starts)

    def _choose(self, n: int) -> tuple[Ints, Ints]:
        """The ranges that `n` indices are taken from, and how many from each."""
        sizes = self._ends - self._starts
        fitting = np.flatnonzero(sizes >= n)
        if fitting.size:
            best = fitting[[np.argmin(sizes[fitting])]]
            return best, np.full(1, n, dtype=np.int64)
        chosen = np.argsort(-sizes, kind="stable")
        taken = np.diff(np.minimum(np.cumsum(sizes[chosen]), n), prepend=0)
        return chosen[taken > 0], taken[taken > 0]


@final
@attrs.frozen(eq=False)
class HostRanges:
    """The host locations of one request, for its positions 0, 1, ...: few ranges. Returned by `HostKVPool.take`.

    Attributes:
        pool_id: id of the pool.
        owner: a slot, or any number the caller chose.
        generation: differs for each that the pool ever returned.
        starts, lengths: int64[r], first host location of each range, and whole pages of locations, read-only.
        writer: the end of the writer in another process that may write them, as `Lease.ended`; None without one.
            Whatever they are freed behind, they are free again only after it.
    """

    holds: ClassVar[str] = str(HostLocations.unit)
    pool_id: int
    owner: int
    generation: int
    starts: Ints = attrs.field(converter=read_only)
    lengths: Ints = attrs.field(converter=read_only)
    writer: Fence | None = None

    def __repr__(self) -> str:
        return (
            f"HostRanges({len(self)} locations in {self.starts.size} ranges, "
            f"owner {self.owner}, generation {self.generation})"
        )

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def table(self) -> Ints:
        """int64[r, 2]: start and length of each range, as `Receiver.grant` sends it to a writer."""
        return np.stack([self.starts, self.lengths], axis=1)

    def locations(self, first: int = 0, count: int | None = None) -> Ints:
        """Host locations of the positions `first` to `first + count - 1`, int64[count]; by default to the end."""
        most = len(self)
        begin = operator.index(first)
        stop = most if count is None else begin + operator.index(count)
        if not 0 <= begin <= stop <= most:
            problem = f"expected positions inside of {self!r}, got {first} to {stop} (exclusive)"
            raise ArgumentError(problem, (first, stop), f"pass positions of 0 to {most}")
        return arange_per_row(self.starts, self.lengths)[begin:stop]


@final
@attrs.frozen
class HostStats:
    """A pool in tokens: free + pending + live = size.

    Attributes:
        size, free, live: tokens that can be handed out, that can be taken now, and that are in use.
        pending: freed behind a fence that is not complete: a copy under way, or a writer not known to have ended.
        largest_free_range: the most that can be had in one range.
    """

    size: int
    free: int
    pending: int
    live: int
    largest_free_range: int


@final
@attrs.frozen
class KVBuffer:
    """A buffer of a `HostKVPool` that differs from others: index keys, scales, or a state with one row per request.

    Attributes:
        name, item_shape, dtype: of the buffer, of one row, and of the elements.
        on_device: whether it is device memory, which kernels read at the device's speed. The pool's locations are its
            rows all the same. The host tier backs up nothing into it: a step's kernel writes the new rows itself. The
            pool waits once, when it is made, until it is zeroed: a writer in another process is on no stream.
    """

    name: str
    item_shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool = False

    def __attrs_post_init__(self) -> None:
        shape = tuple(size_of(size, f"{self.name}: item_shape", least=1) for size in self.item_shape)
        object.__setattr__(self, "item_shape", shape)
        dtype: Any = self.dtype
        if not isinstance(dtype, torch.dtype):
            remedy = "pass dtype=, as `torch.bfloat16`"
            raise expected(f"buffer {self.name!r}: dtype", "a dtype of torch", dtype, remedy, DtypeError)

    @property
    def item_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.item_shape, dtype=np.int64)) * self.dtype.itemsize


@final
@attrs.frozen(eq=False)
class HostBuffer:
    """One buffer as a transfer engine registers it.

    Attributes:
        name: of the layer.
        address: of its first byte; host location i begins at i * item_bytes.
        nbytes: bytes of all.
        item_bytes: bytes of one token.
        memory: the tensor, which keeps it alive.
    """

    name: str
    address: int
    nbytes: int
    item_bytes: int
    memory: torch.Tensor = attrs.field(repr=False)


@final
class HostKVPool(OfThisProcess):
    """Host locations page_size to (num_pages + 1) * page_size - 1.

    Args:
        runtime: the device whose kernels read and write the memory.
        num_pages: pages that can be handed out.
        page_size: tokens per page; 1 for no pages.
        layers: names of the buffers, or how many; keys and values are two. A `KVBuffer` in the place of a name has an
            item shape, a dtype and a memory of its own.
        item_shape, dtype: of one token in one buffer, where names are given.
        name: for reports.

    Raises:
        ArgumentError, DtypeError: sizes that are not positive integers, or too large; two layers of one name, or none.

    Attributes:
        specs: a `KVBuffer` for each layer.
        buffers: for each layer dtype[location_capacity, ...], as kernels of the device address it.
        backed: those in host memory, which the host tier backs up into and reads.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_pages: SupportsIndex,
        page_size: SupportsIndex = 1,
        *,
        layers: int | Sequence[str | KVBuffer],
        item_shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        name: str = "host tier",
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.num_pages = size_of(num_pages, f"{name}: num_pages", least=1)
        self.page_size = size_of(page_size, f"{name}: page_size", least=1, most=MOST_TOKENS // (self.num_pages + 1))
        if isinstance(layers, (bool, *UNORDERED)):
            raise expected(name, "layers", layers, "pass names in a list, or how many")
        self.specs = tuple(
            layer if isinstance(layer, KVBuffer) else KVBuffer(str(layer), item_shape, dtype)  # type: ignore[arg-type]
            for layer in (range(layers) if isinstance(layers, int) else layers)
        )
        self.layers = tuple(spec.name for spec in self.specs)
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ArgumentError(f"{name}: layers are {list(self.layers)}", layers, "name each buffer, at least one")
        runtime.declare_indices("host_location", self.location_capacity)
        self._memory: tuple[MappedMemory, ...] = tuple(self._zeros(spec) for spec in self.specs)
        self.buffers: tuple[torch.Tensor, ...] = tuple(memory.device for memory in self._memory)
        on_device = [spec.on_device for spec in self.specs]
        self.backed = tuple(buffer for buffer, there in zip(self.buffers, on_device, strict=True) if not there)
        if any(on_device):
            runtime.record().wait()  # a writer in another process is on no stream that could wait for the zeros
        # Memory that the host can address; where the device has memory of its own, only kernels look at it.
        self._visible = tuple(memory for memory in self._memory if memory.host.device.type == "cpu")
        self._free = FreeRanges(1, self.num_pages)
        pages = f", in pages of {self.page_size}" if self.page_size > 1 else ""
        label, self._transaction = f"HostKVPool {name!r}{pages}", Transaction(runtime, f"HostKVPool {name!r}")
        self._allocator = Allocator(
            runtime,
            self.num_pages,
            label=label,
            transaction=self._transaction,
            outside=self._free,
            per_index=self.page_size,
        )
        self.pool_id = self._allocator.pool_id
        self._generation = np.zeros(self.num_pages + 1, dtype=np.int64)  # of the ranges with the page, 0 for none
        self._owner = np.zeros(self.num_pages + 1, dtype=np.int64)
        self._newest = 0  # generation
        self._used: dict[int, tuple[int, object]] = {}  # generation -> pages in use, and the one who may free them
        self._poisoned = np.zeros(self.num_pages + 1, dtype=np.bool_)

    def __repr__(self) -> str:
        allocator = self._allocator
        return (
            f"HostKVPool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={allocator.free}, pending={allocator.pending}, live={allocator.live})"
        )

    def _zeros(self, spec: KVBuffer) -> MappedMemory:
        shape, name = (self.location_capacity, *spec.item_shape), f"{self.name} {spec.name}"
        if not spec.on_device:
            return self.runtime.mapped_zeros(shape, spec.dtype, name=name)
        memory = self.runtime.device_zeros(shape, spec.dtype, name=name)
        return MappedMemory(memory, memory)

    @property
    def num_tokens(self) -> int:
        """Tokens that can be handed out."""
        return self.num_pages * self.page_size

    @property
    def location_capacity(self) -> int:
        """Rows of each buffer: those of all pages, page 0 included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def item_bytes(self) -> int:
        """Bytes of one token in the first buffer."""
        return self.specs[0].item_bytes

    @property
    def stats(self) -> HostStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        here = self._allocator
        pages = self.num_pages, here.free, here.pending, here.live, self._free.largest
        return HostStats(*(number * self.page_size for number in pages))

    def contiguous_buffers(self) -> tuple[HostBuffer, ...]:
        """The buffers as a transfer engine registers them, in the order of the layers."""
        return tuple(
            HostBuffer(spec.name, memory.host.data_ptr(), memory.host.nbytes, spec.item_bytes, memory.host)
            for spec, memory in zip(self.specs, self._memory, strict=True)
        )

    # Taking and freeing

    def take(self, tokens: object, owners: object, *, writer: Fence | None = None) -> list[HostRanges]:
        """Takes host locations for `tokens` tokens per owner, in as few ranges as the free memory allows: whole pages.

        Args:
            tokens: int[n], at least 1 each.
            owners: int[n], for reports and for `owner_of`: usually slots.
            writer: the end of the writer in another process that they are granted to, `Lease.ended`. `free` keeps them
                pending until it is complete, whatever `after` is.

        Raises:
            PoolExhaustedError: too few pages are free. Nothing was taken.
            ArgumentError: less than one token, or not one owner each.
            Violation: TRANSFER_LATE_WRITE, at `full`: free memory was written.
        """
        self._transaction.enter(f"{self.name}: take")
        check_fence(writer, f"{self.name}: take")
        whose = self._integers(owners, "take: owners")
        wanted = np.broadcast_to(amounts(tokens, whose.size, f"{self.name}: take"), whose.shape)
        if wanted.size and (int(wanted.min()) < 1 or int(wanted.max()) > MOST_TOKENS):
            problem = f"{self.name}: take of {wanted.min()} to {wanted.max()} tokens"
            raise ArgumentError(problem, int(wanted.min()), f"take 1 to {MOST_TOKENS} for each")
        counts = (-(-wanted // self.page_size)).tolist()
        self._allocator.reap()
        self._allocator.check_available(sum(counts))
        self._poison_free()
        taken, granted = [self._allocator.take(n, "take").handles()[0] for n in counts], list[HostRanges]()
        try:
            self._check_poison(np.concatenate([np.empty(0, dtype=np.int64), *taken]), "take")
            for pages, owner in zip(taken, whose.tolist(), strict=True):
                granted.append(self._granted(pages, owner, writer))
        except Exception:
            for ranges in granted:
                self._used.pop(ranges.generation)
            for pages in taken:
                self._forget(pages)
                self._allocator.release(Requests(pages, pages), None, "take")
            self._transaction.operation = None
            raise
        self._transaction.operation = None
        return granted

    def _granted(self, pages: Ints, owner: int, writer: Fence | None) -> HostRanges:
        generation = self._newest + 1
        if levels.cheap:
            newer, own = (np.full(pages.size, number) for number in (self._newest + 1, generation))
            invariants.slot_stale_handle(pages, newer, own, **self._allocator.where("take"))
        self._newest = generation
        self._generation[pages] = generation
        self._owner[pages] = owner
        self._poisoned[pages] = False
        starts, lengths = (part * self.page_size for part in ranges_of(pages))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            for buffer in self.buffers:
                self.runtime.host_accesses(buffer, start, start + length, "host tier: rows change hands", writes=True)
        self._used[generation] = pages.size, None
        return HostRanges(self.pool_id, owner, generation, starts, lengths, writer)

    def keep(self, ranges: HostRanges, keeper: object) -> None:
        """From here on only `keeper` may free these ranges. For the library."""
        self._used[ranges.generation] = self._used[ranges.generation][0], keeper

    def free(self, ranges: HostRanges | Iterable[HostRanges], *, after: Fence | None, keeper: object = None) -> None:
        """Frees ranges, at once or when `after` is complete: behind the copy that may still read or write them.

        None where no copy reads or writes them. Ranges that were taken with `writer=` wait for its end too.

        Raises:
            Violation: SLOT_DOUBLE_FREE, SLOT_STALE_HANDLE; SLOT_CONSERVATION: only a part of what `take` returned.
                Nothing was freed.
            ArgumentError: ranges of another pool, or of a request of the host tier.
        """
        operation = "free"
        self._transaction.enter(f"{self.name}: {operation}")
        check_fence(after, f"{self.name}: {operation}")
        freed = list(ranges) if isinstance(ranges, Iterable) else [ranges]
        parts = [self._pages_to_free(part, keeper, operation) for part in freed]
        pages = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        invariants.slot_double_free(pages, np.ones(pages.size, dtype=np.bool_), **self._allocator.where(operation))
        self._transaction.operation = operation
        self._forget(pages)
        for part, its_pages in zip(freed, parts, strict=True):
            self._used.pop(part.generation, None)
            self._allocator.release(Requests(its_pages, its_pages), joined(after, part.writer), operation)
        self._transaction.operation = None
        self._poison_free()

    def _forget(self, pages: Ints) -> None:
        self._generation[pages] = 0
        self._owner[pages] = 0

    def reap(self) -> int:
        """Frees the pending ranges whose fences are complete; returns how many tokens. Never waits."""
        self._transaction.enter(f"{self.name}: reap")
        reaped = self._allocator.reap() * self.page_size
        self._poison_free()
        return reaped

    # Queries

    def pending(self) -> list[tuple[QueriedFence, int]]:
        """The fences that freed host locations wait for, oldest first, and how many locations each. Queries none."""
        self._transaction.enter(f"{self.name}: pending")
        return [(queried, pages.size * self.page_size) for queried, pages in self._allocator.pending_groups()]

    def check_held(self, ranges: HostRanges, operation: str) -> None:
        """Refuses ranges of another pool (ArgumentError), and ranges that were freed (SLOT_STALE_HANDLE)."""
        self._check_generation(ranges, self._pages(ranges, operation), operation)

    def owner_of(self, locations: object) -> Ints:
        """The owner of each host location int[n], int64[n]; 0 where it is free or pending."""
        asked = self._integers(locations, "owner_of")
        invariants.slot_out_of_range(asked, self.location_capacity, **self._allocator.where("owner_of"))
        return self._owner[asked // self.page_size]

    def _integers(self, numbers: object, operation: str) -> Ints:
        """int64[n] of one number or of n."""
        array = np.atleast_1d(as_array(numbers, f"{self.name}: {operation}"))
        return np.atleast_1d(amounts(array, array.shape[0], f"{self.name}: {operation}"))

    def _pages(self, ranges: HostRanges, operation: str) -> Ints:
        if ranges.pool_id != self.pool_id:
            problem = f"{self.name}: {operation} of {ranges!r}, which this pool did not return"
            raise ArgumentError(problem, ranges, "pass what `take` of this pool returned")
        return ranges.locations()[:: self.page_size] // self.page_size

    def _pages_to_free(self, ranges: HostRanges, keeper: object, operation: str) -> Ints:
        """The pages of ranges that are freed: live, of this generation, and all that were taken with them."""
        pages, allocator = self._pages(ranges, operation), self._allocator
        live = allocator.live_among(pages)
        if not live.all():
            invariants.slot_double_free(pages, live, **allocator.where(operation))
        self._check_generation(ranges, pages, operation)
        size, owner = self._used.get(ranges.generation, (0, None))
        if pages.size != size:  # the rest could not be named by any handle
            left = np.setdiff1d(np.flatnonzero(self._generation == ranges.generation), pages)
            problem = f"{operation} of {pages.size} pages of ranges that have {pages.size + left.size}"
            remedy = "free what `take` returned, as a whole"
            count = allocator.live - left.size
            allocator.check_live(count, operation, leaked=left, problem=problem, remedy=remedy)
        if owner is not keeper:
            problem = f"{self.name}: free of {ranges!r}, which a request of the host tier owns"
            raise ArgumentError(problem, ranges, "call `HiSparse.finish` or `abort`, or free the slot of the request")
        return pages

    def _check_generation(self, ranges: HostRanges, pages: Ints, operation: str) -> None:
        held = np.full(pages.size, ranges.generation, dtype=np.int64)
        invariants.slot_stale_handle(pages, held, self._generation[pages], **self._allocator.where(operation))

    # Checks

    def _poison_free(self) -> None:
        """At `full`: fills memory that has become free, so that a late write into it is found."""
        if not levels.full:
            return
        pages = np.flatnonzero((self._allocator.states == FREE) & ~self._poisoned)
        for memory in self._visible:
            memory.bytes.reshape(self.num_pages + 1, -1)[pages] = _POISON
        self._poisoned[pages] = True

    def _check_poison(self, pages: Ints, operation: str) -> None:
        if not levels.full:
            return
        poisoned = pages[self._poisoned[pages]]
        for memory in self._visible:
            changed = (memory.bytes.reshape(self.num_pages + 1, -1)[poisoned] != _POISON).any(axis=1)
            invariants.transfer_late_write(poisoned * self.page_size, changed, **self._allocator.where(operation))

    def verify(self) -> None:
        """Checks every invariant of the pool from scratch. At `full` it reads all free memory."""
        self._transaction.enter(f"{self.name}: verify")
        self._allocator.verify()
        pages = np.arange(self.num_pages + 1, dtype=np.int64)
        live = self._allocator.live_among(pages)
        expected = np.where(live, self._generation, 0)
        invariants.slot_stale_handle(pages, self._generation, expected, **self._allocator.where("verify"))
        self._check_poison(pages[1:], "verify")
        for memory in self._visible if levels.full else ():
            rows = memory.bytes.reshape(self.location_capacity, -1)[: self.page_size]
            padding = torch.from_numpy(rows.copy()).view(memory.host.dtype).float()
            invariants.page_zero_finite(torch.isfinite(padding).all(1).numpy(), **self._allocator.where("verify"))

    def expect_idle(self) -> None:
        """Checks that nothing is live. Pending pages are not leaks. Else SLOT_CONSERVATION, naming up to 8 of them."""
        self.reap()
        self._allocator.expect_idle("expect_idle")
