"""Rows of several regions packed into one piece of staging memory, and back; for engines that send messages.

Guarantees: no Python loop over rows, only over regions and pieces; memory outside the named rows is neither read nor
written. Any lengths: rows are moved in grains, the largest size that divides every offset and length of a region.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import arange_per_row
from batchstate.errors import ArgumentError
from batchstate.transport.regions import Copies, Ints, Memory

PIECE = 1 << 20
"""Bytes of one message, about: a piece is at most twice as long. While one is put into place the next is packed."""


def as_bytes(memory: Memory, name: str) -> torch.Tensor:
    """The same memory as uint8[nbytes].

    Raises:
        ArgumentError: it is read-only.
    """
    if isinstance(memory, torch.Tensor):
        return memory.detach().reshape(-1).view(torch.uint8)
    if not memory.flags.writeable:
        raise ArgumentError(f"region {name!r} is read-only", value=name, remedy="register memory that can be written")
    return torch.from_numpy(memory.reshape(-1).view(np.uint8))


def in_order(copies: Copies) -> Copies:
    """A copy with the rows of each pair of regions behind each other, and no row longer than a piece."""
    pair = copies.target_regions * (copies.source_regions.max(initial=0) + 1) + copies.source_regions
    ordered = copies.rows(np.argsort(pair, kind="stable"))
    return ordered.cut(PIECE)


def pieces(lengths: Ints) -> Iterator[slice]:
    """The rows of each message; the same on both sides. `lengths` int64[n], each 1 to PIECE."""
    number = (np.cumsum(lengths) - 1) // PIECE
    start = 0
    for last in np.flatnonzero(np.diff(number)):  # one by one: a foreign process may announce a million pieces
        yield slice(start, int(last) + 1)
        start = int(last) + 1
    if lengths.size:
        yield slice(start, lengths.size)


def gather(memories: Mapping[int, torch.Tensor], regions: Ints, offsets: Ints, lengths: Ints, out: torch.Tensor) -> int:
    """Packs rows of regions into `out` uint8[...], behind each other. All integers int64[n]. Returns how many bytes."""
    end = 0
    for region, index, grain, start, end in _row_groups(regions, offsets, lengths):
        memory, part = memories[region], out[start:end]
        if memory.device.type == "cpu" and part.device.type == "cpu":
            np.take(_grains(memory, grain), index, out=_grains(part, grain), mode="clip")
        else:
            numbers = torch.from_numpy(index)
            rows = _matrix(memory, grain).index_select(0, numbers.to(memory.device, non_blocking=True))
            _matrix(part, grain).copy_(rows, non_blocking=True)
            _await(memory.device)
    return end


def scatter(
    memories: Mapping[int, torch.Tensor], regions: Ints, offsets: Ints, lengths: Ints, packed: torch.Tensor
) -> None:
    """Puts rows packed in `packed` uint8[...] into their places. All integers int64[n]; the places do not overlap."""
    for region, index, grain, start, end in _row_groups(regions, offsets, lengths):
        memory, part = memories[region], packed[start:end]
        if memory.device.type == "cpu" and part.device.type == "cpu":
            _grains(memory, grain)[index] = _grains(part, grain)
        else:
            numbers, rows = torch.from_numpy(index), _matrix(part, grain)
            rows = rows.to(memory.device, non_blocking=True)
            _matrix(memory, grain).index_copy_(0, numbers.to(memory.device, non_blocking=True), rows)
            _await(memory.device)


def _await(device: torch.device) -> None:
    """Waits until the copies of this thread are made.

    By an event: torch's sync-debug mode, by which an engine looks for hidden waits of its own, lets it pass.
    """
    if device.type != "cpu":
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        event.synchronize()


def _row_groups(regions: Ints, offsets: Ints, lengths: Ints) -> Iterator[tuple[int, Ints, int, int, int]]:
    """For rows of one region behind each other: region, int64[m] grain numbers, bytes of a grain, place when packed."""
    bounds = [0, *(np.flatnonzero(np.diff(regions)) + 1).tolist(), regions.size]
    end = 0
    for first, last in itertools.pairwise(bounds):
        begins, sizes = offsets[first:last], lengths[first:last]
        grain = int(np.gcd(np.gcd.reduce(begins), np.gcd.reduce(sizes)))
        index, counts = begins // grain, sizes // grain
        if counts.max() > 1:
            index = arange_per_row(index, counts)
        start, end = end, end + int(sizes.sum())
        yield int(regions[first]), index, grain, start, end


def _grains(memory: torch.Tensor, grain: int) -> npt.NDArray[np.void]:
    """Memory as items of `grain` bytes; numpy moves each by one copy. What is left at the end is not in it."""
    whole = memory.numel() // grain * grain
    return memory.numpy()[:whole].view(np.dtype((np.void, grain)))


def _matrix(memory: torch.Tensor, grain: int) -> torch.Tensor:
    return memory[: memory.numel() // grain * grain].view(-1, grain)
