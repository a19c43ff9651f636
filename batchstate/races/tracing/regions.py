"""The bytes of a piece of memory that an operation accesses: disjoint intervals, exact for rows, columns, elements."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Optional, final

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

_STRIDED = torch.strided

BRIEF = 12
"""Intervals that are kept for reports."""

MOST_INTERVALS = 1 << 20
"""Beyond so many, a region is all bytes from its first to its last."""


_FEW = 64
"""Up to so many positions of an index Python is faster than numpy."""


class ByteRegion:
    """Bytes of one piece of memory, `[start, end)`, as sorted intervals with gaps between them.

    Attributes:
        lo, hi: of the whole.
        starts, ends: int64[n] of each interval; None where there is one.
        more: intervals that were left out; not 0 only in results of `brief`.
        late: whether the intervals are looked up when they matter.
    """

    __slots__ = ("ends", "hi", "lo", "more", "starts")
    late: ClassVar[bool] = False

    def __init__(self, lo: int, hi: int, starts: Ints | None = None, ends: Ints | None = None) -> None:
        self.lo = lo
        self.hi = hi
        self.starts = starts
        self.ends = ends
        self.more = 0

    def __repr__(self) -> str:
        return f"ByteRegion({self.intervals()})"

    def intervals(self) -> list[tuple[int, int]]:
        """All of them."""
        if self.starts is None or self.ends is None:
            return [(self.lo, self.hi)]
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))

    def brief(self) -> "ByteRegion":
        """The part that a report shows: the first few intervals, and how many more there are."""
        if self.starts is None or self.ends is None or len(self.starts) <= BRIEF:
            return self
        short = ByteRegion(self.lo, self.hi, self.starts[:BRIEF].copy(), self.ends[:BRIEF].copy())
        short.more = self.more + len(self.starts) - BRIEF
        return short

    def bounds(self) -> tuple[Ints, Ints]:
        """Starts and ends, both int64[n]."""
        if self.starts is None or self.ends is None:
            return np.array([self.lo], np.int64), np.array([self.hi], np.int64)
        return self.starts, self.ends

    def exact(self) -> Optional["ByteRegion"]:
        """The region with its intervals; None where it has none."""
        return self

    def overlaps(self, other: "ByteRegion") -> bool:
        """Whether any byte is in both."""
        if self.hi <= other.lo or other.hi <= self.lo:
            return False
        if self.late or other.late:
            mine, others = self.exact(), other.exact()
            return mine is not None and others is not None and mine.overlaps(others)
        if self.starts is None and other.starts is None:
            return True
        few, many = (self, other) if self._count() <= other._count() else (other, self)
        starts, ends = many.bounds()
        if few.starts is None:
            at = int(np.searchsorted(ends, few.lo, side="right"))
            return at < len(starts) and int(starts[at]) < few.hi
        first, last = few.bounds()
        positions = np.searchsorted(ends, first, side="right")
        inside = positions < len(starts)
        return bool((starts[positions[inside]] < last[inside]).any())

    def common(self, other: "ByteRegion") -> "ByteRegion | None":
        """The bytes in both, or None."""
        if self.late or other.late:
            mine, others = self.exact(), other.exact()
            return None if mine is None or others is None else mine.common(others)
        shared = []
        starts, ends = other.bounds()
        for lo, hi in self.intervals():
            at = int(np.searchsorted(ends, lo, side="right"))
            while at < len(starts) and starts[at] < hi:
                shared.append((max(lo, int(starts[at])), min(hi, int(ends[at]))))
                at += 1
        return union(shared) if shared else None

    def covers(self, other: "ByteRegion") -> bool:
        """Whether all of `other` is in it."""
        if other.lo < self.lo or self.hi < other.hi:
            return False
        if self.starts is None:
            return True
        starts, ends = self.bounds()
        first, last = other.bounds()
        at = np.searchsorted(ends, first, side="right")
        if not (at < len(starts)).all():
            return False
        return bool(((starts[at] <= first) & (last <= ends[at])).all())

    def _count(self) -> int:
        return 1 if self.starts is None else len(self.starts)


@final
class LateRegion(ByteRegion):
    """Some bytes of a region, looked up when it matters whether others are among them. Until then it is all of them.

    Args:
        whole: all of them.
        find: looks them up; None where there are none.
    """

    __slots__ = ("_find", "_found")
    late: ClassVar[bool] = True

    def __init__(self, whole: ByteRegion, find: Callable[[], ByteRegion | None]) -> None:
        super().__init__(whole.lo, whole.hi)
        self._find: Callable[[], ByteRegion | None] | None = find
        self._found: ByteRegion | None = None

    def exact(self) -> ByteRegion | None:
        """The bytes themselves."""
        if self._find is not None:
            self._found, self._find = self._find(), None
        return self._found

    def brief(self) -> ByteRegion:
        """All of the region: a report does not look them up."""
        return ByteRegion(self.lo, self.hi)


def union(intervals: Iterable[tuple[int, int]]) -> ByteRegion:
    """The region of some intervals, at least one, in any order."""
    return union_of([ByteRegion(lo, hi) for lo, hi in intervals])


def union_of(regions: Sequence[ByteRegion]) -> ByteRegion:
    """The bytes of some regions, at least one."""
    bounds = [region.bounds() for region in regions]
    starts = np.concatenate([start for start, _ in bounds])
    ends = np.concatenate([end for _, end in bounds])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    starts, ends = starts[first], ends[last]
    lo, hi = int(starts[0]), int(ends[-1])
    return ByteRegion(lo, hi) if len(starts) == 1 else ByteRegion(lo, hi, starts, ends)


def of_pieces(begins: Ints, length: int) -> ByteRegion | None:
    """The region of pieces of `length` bytes that begin at `begins` int64[n], in any order, repeats allowed."""
    if not begins.size:
        return None
    if begins.size <= min(_FEW, MOST_INTERVALS):
        return _merged(sorted(set(begins.reshape(-1).tolist())), length)
    starts = np.unique(begins)
    ends = starts + length
    if len(starts) > MOST_INTERVALS:
        return ByteRegion(int(starts[0]), int(ends[-1]))
    apart = np.flatnonzero(starts[1:] > ends[:-1])
    if not apart.size:
        return ByteRegion(int(starts[0]), int(ends[-1]))
    first = np.concatenate(([0], apart + 1))
    last = np.concatenate((apart, [len(starts) - 1]))
    return ByteRegion(int(starts[0]), int(ends[-1]), starts[first], ends[last])


def of_tensor(tensor: torch.Tensor) -> ByteRegion | None:
    """Every element of a tensor; None where it has none."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return None  # several pieces of memory, each a tensor of its own
    return of_strided(tensor)


def of_strided(tensor: torch.Tensor) -> ByteRegion | None:
    """The same for a tensor that is known to lie in one piece of memory."""
    nbytes = tensor.nbytes
    if not nbytes:
        return None
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return ByteRegion(start, start + nbytes)
    begins, run = _spread(tuple(tensor.shape), tensor.stride())
    return of_pieces(start + begins * size, run * size)


def of_rows(tensor: torch.Tensor, dim: int, index: Ints) -> ByteRegion | None:
    """The rows `index` along one dimension."""
    return of_index(tensor, {dim % max(tensor.ndim, 1): index.reshape(-1)})


def of_index(tensor: torch.Tensor, indices: dict[int, Ints]) -> ByteRegion | None:
    """The elements that an index of arrays names: dimension -> positions, which go together like torch's indices.

    Negative positions count from the end. Positions that are too large make it the whole tensor: torch will refuse.
    """
    size = tensor.element_size()
    shape, stride = tuple(tensor.shape), tensor.stride()
    if not tensor.numel() or not indices:
        return of_tensor(tensor)
    if len(indices) == 1 and 0 in indices and indices[0].size <= min(_FEW, MOST_INTERVALS) and tensor.is_contiguous():
        return _of_few_rows(tensor, indices[0])
    chosen: Any = 0
    for dim, positions in indices.items():
        if positions.size and not -shape[dim] <= positions.min() <= positions.max() < shape[dim]:
            return of_tensor(tensor)
        chosen = chosen + np.where(positions < 0, positions + shape[dim], positions) * stride[dim]
    rest = [dim for dim in range(len(shape)) if dim not in indices]
    begins, run = _spread([shape[dim] for dim in rest], [stride[dim] for dim in rest])
    chosen = np.asarray(chosen, np.int64).reshape(-1)
    if chosen.size * begins.size > MOST_INTERVALS:
        return of_tensor(tensor)
    every = np.add.outer(chosen, begins).reshape(-1) if begins.size > 1 else chosen + begins[0]
    return of_pieces((tensor.storage_offset() + every) * size, run * size)


def _of_few_rows(tensor: torch.Tensor, positions: Ints) -> ByteRegion | None:
    length = int(tensor.shape[0])
    rows = {row + length if row < 0 else row for row in positions.reshape(-1).tolist()}
    if not rows:
        return None
    if min(rows) < 0 or max(rows) >= length:
        return of_tensor(tensor)
    start, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes // length
    return _merged(sorted([start + row * size for row in rows]), size)


def _merged(starts: list[int], length: int) -> ByteRegion:
    """The region of a few sorted pieces of `length` bytes."""
    firsts, lasts = [starts[0]], []
    end = starts[0] + length
    for start in starts:
        if start > end:
            lasts.append(end)
            firsts.append(start)
        end = start + length
    if not lasts:
        return ByteRegion(firsts[0], end)
    return ByteRegion(firsts[0], end, np.array(firsts, np.int64), np.array([*lasts, end], np.int64))


def of_elements(tensor: torch.Tensor, dim: int, index: Ints) -> ByteRegion | None:
    """The elements that `gather` and `scatter` name: `index` has the dimensions of the tensor."""
    if not tensor.ndim:
        return of_tensor(tensor)
    if tensor.ndim == index.ndim == 1:
        return of_index(tensor, {0: index})
    dim %= tensor.ndim
    grid: list[Ints] = list(np.indices(index.shape, sparse=True)) if index.ndim else []
    return of_index(tensor, {at: index if at == dim else positions for at, positions in enumerate(grid)})


def _spread(shape: Sequence[int], stride: Sequence[int]) -> tuple[Ints, int]:
    """Where the runs of neighbouring elements of a strided tensor begin, and how long each is; in elements."""
    run = 1
    outer: list[Ints] = []
    for length, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if length == 1:
            continue
        if step == run and not outer:
            run *= length
        elif step == 0:
            continue  # an expanded dimension: the same elements again
        else:
            outer.append(np.arange(length, dtype=np.int64) * step)
    if math.prod(map(len, outer)) > MOST_INTERVALS:
        return np.zeros(1, np.int64), 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    begins = np.zeros(1, np.int64)
    for offsets in outer:
        begins = np.add.outer(begins, offsets).reshape(-1)
    return begins, run
