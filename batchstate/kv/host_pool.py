"""`HostKVPool`: KV memory of the host tier, one pinned buffer a layer, handed out in runs.

Host token 0 (with pages, the tokens of page 0) is padding. A run has an owner and a generation, and is handed out again
only when the fence that it was freed behind is complete: a copy of the device's that still writes it, or a writer in
another process that may (quarantine is nothing else than a fence that only the writer's end completes).
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate._allocator import FREE, MOST_TOKENS, Allocator, size_of
from batchstate._arrays import amounts, as_array
from batchstate.errors import ArgumentError, DtypeError, ShapeError
from batchstate.runtime import Fence, MappedMemory, Runtime, check_fence, check_runtime
from batchstate.tables import read_only
from batchstate.violations import Where

# Free indices as intervals: what is taken together comes in few runs, and neighbours that are freed grow together.
#
# Takes the place of a `FreeList` in an `Allocator`. Best fit: the smallest interval that holds all that is asked for,
# from its low end; where none does, the largest ones. Costs O(intervals): at most one more than there are runs in use.

Ints = npt.NDArray[np.int64]


@final
class ExtentList:
    """Free ones among the indices `first` to `last`. At first all are free, in one interval.

    Attributes:
        count: how many are free.
        room: how many there can be.
    """

    def __init__(self, first: int, last: int) -> None:
        whole = last >= first
        self._starts: Ints = np.array([first] if whole else [], dtype=np.int64)
        self._ends: Ints = np.array([last + 1] if whole else [], dtype=np.int64)  # exclusive
        self.room = last - first + 1
        self.count = self.room

    def __repr__(self) -> str:
        return f"ExtentList({self.count} of {self.room} in {self._starts.size} intervals)"

    @property
    def largest(self) -> int:
        """The most that can be had in one run."""
        return int((self._ends - self._starts).max(initial=0))

    def top(self, n: int) -> Ints:
        """The next `n` to be handed out, in that order, as a new array. They stay free."""
        chosen, sizes = self._choose(n)
        return spread(self._starts[chosen], sizes)

    def drop(self, n: int) -> None:
        """Takes away what `top(n)` shows."""
        chosen, sizes = self._choose(n)
        self._starts[chosen] += sizes
        self.count -= n
        self._keep_nonempty()

    def push(self, indices: Ints) -> None:
        """Makes `indices` free, in any order; intervals that touch become one."""
        if not indices.size:
            return
        starts, ends = intervals(np.sort(indices))
        starts = np.concatenate([self._starts, starts])
        ends = np.concatenate([self._ends, ends])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        apart = np.flatnonzero(starts[1:] != ends[:-1])
        self._starts = starts[np.concatenate([[0], apart + 1])]
        self._ends = ends[np.concatenate([apart, [ends.size - 1]])]
        self.count += indices.size

    def entries(self) -> Ints:
        """All free indices in ascending order, as a new array."""
        return spread(self._starts, self._ends - self._starts)

    def _choose(self, n: int) -> tuple[Ints, Ints]:
        """Which intervals, and how many of each."""
        sizes = self._ends - self._starts
        fitting = np.flatnonzero(sizes >= n)
        if fitting.size:
            best = fitting[[np.argmin(sizes[fitting])]]
            return best, np.full(1, n, dtype=np.int64)
        chosen = np.argsort(-sizes, kind="stable")
        taken = np.diff(np.minimum(np.cumsum(sizes[chosen]), n), prepend=0)
        used = taken > 0
        return chosen[used], taken[used]

    def _keep_nonempty(self) -> None:
        left = self._starts < self._ends
        self._starts, self._ends = self._starts[left], self._ends[left]


def intervals(ascending: Ints) -> tuple[Ints, Ints]:
    """The intervals that ascending, distinct indices form: starts and ends (exclusive), int64[k] each."""
    breaks = np.flatnonzero(np.diff(ascending) != 1)
    starts = ascending[np.concatenate([[0], breaks + 1])]
    ends = ascending[np.concatenate([breaks, [ascending.size - 1]])] + 1
    return starts, ends


def runs_of(indices: Ints) -> tuple[Ints, Ints]:
    """Runs of consecutive indices in the order given: starts and lengths, int64[k] each."""
    if not indices.size:
        return indices, indices
    starts, ends = intervals(indices)
    return starts, ends - starts


def spread(starts: Ints, lengths: Ints) -> Ints:
    """All indices of runs, one run after the other, int64[sum of lengths]."""
    if starts.size == 1:
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int64)
    ends: Ints = lengths.cumsum()
    total = int(ends[-1]) if ends.size else 0
    bases: Ints = starts - (ends - lengths)
    return bases.repeat(lengths) + np.arange(total, dtype=np.int64)


# The host tokens of one request: few runs, with an owner and a generation.


@final
@attrs.frozen(eq=False)
class HostRuns:
    """Consecutive host tokens for consecutive positions of a request. Made by `HostKVPool.take`.

    Attributes:
        pool: identity of the pool.
        owner: whom they were taken for: a slot, or any number the caller chose.
        generation: another one for each that the pool ever made.
        starts: int64[r], first host token of each run, read-only.
        lengths: int64[r], tokens of each run, whole pages, read-only.
    """

    pool: int
    owner: int
    generation: int
    starts: Ints = attrs.field(converter=read_only)
    lengths: Ints = attrs.field(converter=read_only)

    def __repr__(self) -> str:
        return (
            f"HostRuns({len(self)} tokens in {self.starts.size} runs, owner {self.owner}, generation {self.generation})"
        )

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def table(self) -> Ints:
        """int64[r, 2]: start and length of each run, as a grant to a writer says it."""
        return np.stack([self.starts, self.lengths], axis=1)

    def tokens(self, first: int = 0, count: int | None = None) -> Ints:
        """Host tokens of the positions `first` to `first + count - 1`, int64[count]; by default to the end.

        Raises:
            ArgumentError: positions that the runs do not have.
        """
        room = len(self)
        begin = operator.index(first)
        stop = room if count is None else begin + operator.index(count)
        if not 0 <= begin <= stop <= room:
            raise ArgumentError(
                f"positions {first} to {stop} (exclusive) of {self!r}",
                value=(first, stop),
                remedy="stay inside the runs",
            )
        return spread(self.starts, self.lengths)[begin:stop]


__all__ = ["HostBuffer", "HostKVPool", "HostRuns", "HostStats"]


_identities = itertools.count(1)
_SEAL = 0xC3
"""Each byte of memory that is nobody's, at `full`."""


@final
@attrs.frozen
class HostStats:
    """A pool in tokens: free + pending + live = size.

    Attributes:
        size: tokens that can be handed out.
        free: nobody's.
        pending: freed behind a fence that is not complete: a copy under way, or a writer not known to have ended.
        live: somebody's.
        largest_free_run: the most that can be had in one run.
    """

    size: int
    free: int
    pending: int
    live: int
    largest_free_run: int


@final
@attrs.frozen(eq=False)
class HostBuffer:
    """One buffer as a transfer engine registers it.

    Attributes:
        name: of the layer.
        address: of its first byte.
        nbytes: how long; host token t begins at t * item_bytes.
        item_bytes: of one token.
        memory: the tensor, which keeps it alive.
    """

    name: str
    address: int
    nbytes: int
    item_bytes: int
    memory: torch.Tensor = attrs.field(repr=False)


@final
class HostKVPool:
    """Host tokens page_size to (num_pages + 1) * page_size - 1.

    Args:
        runtime: the device whose kernels read and write the memory.
        num_pages: pages that can be handed out.
        page_size: tokens a page; 1 for none.
        layers: names of the buffers, or how many; keys and values are two.
        item_shape: of one token in one buffer.
        dtype: of the buffers.
        name: for reports.

    Raises:
        ArgumentError, DtypeError: sizes that are no positive integers, or too large; no layers, or two of one name.

    Attributes:
        buffers: for each layer dtype[location_capacity, ...], as kernels of the device address it.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_pages: SupportsIndex,
        page_size: SupportsIndex = 1,
        *,
        layers: int | Sequence[str],
        item_shape: Sequence[int],
        dtype: torch.dtype,
        name: str = "host tier",
    ) -> None:
        check_runtime(runtime, name)
        self.runtime = runtime
        self.name = name
        self.identity = next(_identities)
        self.num_pages = size_of(num_pages, f"{name}: num_pages", least=1)
        self.page_size = size_of(page_size, f"{name}: page_size", least=1, most=MOST_TOKENS // (self.num_pages + 1))
        if not isinstance(dtype, torch.dtype):
            raise DtypeError(f"{name}: dtype is {dtype!r}", value=dtype, remedy="pass a torch.dtype")
        if isinstance(layers, bool | str) or not isinstance(layers, int | Sequence):
            raise ArgumentError(f"{name}: layers are {layers!r}", value=layers, remedy="pass names, or how many")
        if not isinstance(item_shape, tuple | list):
            raise ShapeError(
                f"{name}: item_shape is {item_shape!r}", value=item_shape, remedy="pass a tuple, as (8, 128)"
            )
        self.layers = tuple(str(one) for one in (range(layers) if isinstance(layers, int) else layers))
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ArgumentError(
                f"{name}: layers are {list(self.layers)}", value=layers, remedy="name each buffer, at least one"
            )
        self.item_shape = tuple(size_of(size, f"{name}: item_shape", least=1) for size in item_shape)
        self.dtype = dtype
        shape = (self.location_capacity, *self.item_shape)
        self._memory: tuple[MappedMemory, ...] = tuple(
            runtime.mapped_zeros(shape, dtype, name=f"{name} {layer}") for layer in self.layers
        )
        self.buffers: tuple[torch.Tensor, ...] = tuple(memory.device for memory in self._memory)
        self._free = ExtentList(1, self.num_pages)
        self._ledger = Allocator(runtime, self.num_pages, label=self._label(), free_list=self._extents)
        self._generation = np.zeros(self.num_pages + 1, dtype=np.int64)  # of the run that has the page, 0 for none
        self._owner = np.zeros(self.num_pages + 1, dtype=np.int64)
        self._newest = 0  # generation
        self._kept: dict[int, object] = {}  # generation -> who alone may free it
        self._sizes: dict[int, int] = {}  # generation -> pages, of runs that are somebody's
        self._sealed = np.zeros(self.num_pages + 1, dtype=np.bool_)

    def _label(self) -> str:
        pages = f", in pages of {self.page_size}" if self.page_size > 1 else ""
        return f"HostKVPool {self.name!r}{pages}"

    def _extents(self, first: int, last: int) -> ExtentList:
        return self._free if first == 1 else ExtentList(first, last)

    def __repr__(self) -> str:
        ledger = self._ledger
        return (
            f"HostKVPool({self.name!r}, {self.num_pages} pages of {self.page_size}, "
            f"free={ledger.free}, pending={ledger.pending}, live={ledger.live})"
        )

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
        """Bytes of one token in one buffer."""
        return int(np.prod(self.item_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def stats(self) -> HostStats:
        """The pool in numbers, after `reap`."""
        self.reap()
        ledger, size = self._ledger, self.page_size
        return HostStats(
            self.num_tokens, ledger.free * size, ledger.pending * size, ledger.live * size, self._free.largest * size
        )

    @property
    def live_pages(self) -> int:
        """Pages that are somebody's."""
        return self._ledger.live

    def contiguous_buffers(self) -> tuple[HostBuffer, ...]:
        """The buffers as a transfer engine registers them, in the order of the layers."""
        return tuple(
            HostBuffer(layer, memory.host.data_ptr(), memory.bytes.size, self.item_bytes, memory.host)
            for layer, memory in zip(self.layers, self._memory, strict=True)
        )

    # Taking and freeing

    def take(self, tokens: object, owners: object) -> list[HostRuns]:
        """Takes room for `tokens` tokens for each owner, in as few runs as there is room for: whole pages.

        Args:
            tokens: int[n], at least 1 each.
            owners: int[n], for reports and for `owner_of`: slots, mostly.

        Returns:
            one for each.

        Raises:
            PoolExhaustedError: too few pages are free. Nothing was taken.
            ArgumentError: nothing asked for, or not one owner each.
            Violation: TRANSFER_LATE_WRITE, at `full`: somebody wrote into memory that was nobody's.
        """
        self.runtime.check_owner(f"{self.name}: take")
        whose = self._integers(owners, "take: owners")
        wanted = np.broadcast_to(amounts(tokens, whose.size, f"{self.name}: take"), whose.shape)
        if wanted.size and (int(wanted.min()) < 1 or int(wanted.max()) > MOST_TOKENS):
            raise ArgumentError(f"{self.name}: take {wanted.min()}", value=int(wanted.min()), remedy="take at least 1")
        counts = (-(-wanted // self.page_size)).tolist()
        self._ledger.check_available(sum(counts))
        self._seal()
        taken = [self._ledger.take(n, "take") for n in counts]
        newest = self._newest
        try:
            self._check_seals(np.concatenate([np.empty(0, dtype=np.int64), *taken]), "take")
            return [self._granted(pages, owner) for pages, owner in zip(taken, whose.tolist(), strict=True)]
        except BaseException:
            self._sizes = {one: size for one, size in self._sizes.items() if one <= newest}
            for pages in taken:
                self._forget(pages)
                self._ledger.release(pages, None, "take")
            raise

    def _granted(self, pages: Ints, owner: int) -> HostRuns:
        generation = self._next_generation()
        if levels.cheap:
            newest = np.full(pages.size, self._newest + 1, dtype=np.int64)
            given = np.full(pages.size, generation, dtype=np.int64)
            invariants.slot_stale_handle(pages, np.maximum(newest, given), given, **self._where("take"))
        self._newest = generation
        self._sizes[generation] = pages.size
        self._generation[pages] = generation
        self._owner[pages] = owner
        self._sealed[pages] = False
        starts, lengths = runs_of(pages)
        for start, length in zip((starts * self.page_size).tolist(), (lengths * self.page_size).tolist(), strict=True):
            for buffer in self.buffers:
                self.runtime.host_writes_rows(buffer, start, start + length)
        return HostRuns(self.identity, owner, generation, starts * self.page_size, lengths * self.page_size)

    def _next_generation(self) -> int:
        return self._newest + 1

    def keep(self, runs: HostRuns, keeper: object) -> None:
        """For the library: from here on only `keeper` may free these runs."""
        self._kept[runs.generation] = keeper

    def free(self, runs: HostRuns | Iterable[HostRuns], *, after: Fence | None = None, keeper: object = None) -> None:
        """Frees runs, at once or when `after` is complete: the copy or the writer that may still write them has ended.

        Raises:
            Violation: SLOT_DOUBLE_FREE, SLOT_STALE_HANDLE; SLOT_CONSERVATION: not all of it. Nothing was freed.
            ArgumentError: runs of another pool, or of a request of the host tier; or `after` is no fence.
        """
        operation = "free"
        self.runtime.check_owner(f"{self.name}: {operation}")
        check_fence(after, f"{self.name}: {operation}")
        given = list(runs) if isinstance(runs, Iterable) else [runs]
        parts = [self._pages_of(one, operation) for one in given]
        for one in given:
            if self._kept.get(one.generation) is not keeper:
                raise ArgumentError(
                    f"{self.name}: free of {one!r}, which a request of the host tier has",
                    value=one,
                    remedy="let the request go with `finish` or `abort` of the HiSparse, or free its slot",
                )
        pages = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if self._ledger.repeated(pages):
            invariants.slot_double_free(pages, np.ones(pages.size, dtype=np.bool_), **self._where(operation))
        self._forget(pages)
        for one in given:
            self._sizes.pop(one.generation, None)
            self._kept.pop(one.generation, None)
        self._ledger.release(pages, after, operation)
        self._seal()

    def _forget(self, pages: Ints) -> None:
        self._generation[pages] = 0
        self._owner[pages] = 0

    def reap(self) -> int:
        """Makes free the pending runs whose fences are complete; says how many tokens. Never waits."""
        self.runtime.check_owner(f"{self.name}: reap")
        reaped = self._ledger.reap() * self.page_size
        self._seal()
        return reaped

    # Asking

    def check_held(self, runs: HostRuns, operation: str) -> None:
        """Refuses runs that are not of this pool, or no longer their owner's.

        Raises:
            Violation: SLOT_STALE_HANDLE.
            ArgumentError: runs of another pool.
        """
        self._check_generation(runs, self._pages(runs, operation), operation)

    def owner_of(self, tokens: object) -> Ints:
        """Whose each host token int[n] is, int64[n]; 0 where nobody's.

        Raises:
            Violation: SLOT_OUT_OF_RANGE.
        """
        given = self._integers(tokens, "owner_of")
        invariants.slot_out_of_range(given, self.location_capacity, **self._where("owner_of"))
        return self._owner[given // self.page_size]

    def _integers(self, numbers: object, operation: str) -> Ints:
        """int64[n] of one number or of n."""
        array = np.atleast_1d(as_array(numbers, f"{self.name}: {operation}"))
        return np.atleast_1d(amounts(array, array.shape[0], f"{self.name}: {operation}"))

    def _pages(self, runs: object, operation: str) -> Ints:
        if not isinstance(runs, HostRuns) or runs.pool != self.identity:
            raise ArgumentError(
                f"{self.name}: {operation} of {runs!r}, which this pool did not make",
                value=runs,
                remedy="pass what `take` of this pool returned",
            )
        return runs.tokens()[:: self.page_size] // self.page_size

    def _pages_of(self, runs: HostRuns, operation: str) -> Ints:
        pages = self._pages(runs, operation)
        live = self._ledger.live_among(pages)
        if not live.all():
            invariants.slot_double_free(pages, live, **self._where(operation))
        self._check_generation(runs, pages, operation)
        if pages.size != self._sizes.get(runs.generation):
            self._refuse_part(runs, pages, operation)
        return pages

    def _refuse_part(self, runs: HostRuns, pages: Ints, operation: str) -> None:
        """What is freed is exactly what was taken: nobody could name the rest any more."""
        ledger = self._ledger
        left = np.setdiff1d(np.flatnonzero(self._generation == runs.generation), pages)
        invariants.slot_conservation(
            ledger.free,
            ledger.pending,
            ledger.live - left.size,
            ledger.size,
            leaked=left,
            problem=f"{operation} of {pages.size} pages of a run that has {pages.size + left.size}",
            remedy="free what `take` returned, as a whole",
            **self._where(operation),
        )

    def _check_generation(self, runs: HostRuns, pages: Ints, operation: str) -> None:
        held = np.full(pages.size, runs.generation, dtype=np.int64)
        invariants.slot_stale_handle(pages, held, self._generation[pages], **self._where(operation))

    # Checks

    def _seal(self) -> None:
        """At `full`: memory that is nobody's from now on is filled, so that whoever writes it is found out."""
        if not levels.full:
            return
        pages = np.flatnonzero((self._ledger.states == FREE) & ~self._sealed)
        for memory in self._memory:
            memory.bytes.reshape(self.num_pages + 1, -1)[pages] = _SEAL
        self._sealed[pages] = True

    def _check_seals(self, pages: Ints, operation: str) -> None:
        if not levels.full:
            return
        sealed = pages[self._sealed[pages]]
        for memory in self._memory:
            changed = (memory.bytes.reshape(self.num_pages + 1, -1)[sealed] != _SEAL).any(axis=1)
            invariants.transfer_late_write(sealed * self.page_size, changed, **self._where(operation))

    def verify(self) -> None:
        """Every law of the pool from scratch. At `full` it reads the memory that is nobody's.

        Raises:
            Violation: SLOT_STALE_HANDLE, TRANSFER_LATE_WRITE, and see `Allocator.verify`.
        """
        self.runtime.check_owner(f"{self.name}: verify")
        self._ledger.verify()
        pages = np.arange(self.num_pages + 1, dtype=np.int64)
        live = self._ledger.live_among(pages)
        of_nobody = np.where(live, self._generation, 0)
        invariants.slot_stale_handle(pages, self._generation, of_nobody, **self._where("verify"))
        self._check_seals(pages[1:], "verify")

    def expect_idle(self) -> None:
        """Nothing is live; what is pending is no leak.

        Raises:
            Violation: SLOT_CONSERVATION, naming up to 8 of the leaked pages.
        """
        self.reap()
        self._ledger.expect_idle("expect_idle")

    def _where(self, operation: str) -> Where:
        return {"object": self._ledger.label, "operation": operation, "step": self.runtime.step}
