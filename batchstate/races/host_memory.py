"""Pinned host memory between the host and copies that have not run yet.

The source of a copy to the device is kept as a checksum until the copy is known to be over: a source that has changed
by then was refilled too early, even if torch did not do it. The values of a copy to the host are held back, and the
memory is poisoned, until the host has waited for the copy: an earlier read finds no plausible number.
"""

import zlib
from collections import deque
from typing import final

import attrs
import torch

from batchstate.races.detector import Detector, RaceAllocation
from batchstate.races.history import Entry, rows_of
from batchstate.races.report import EventKind, RaceKind
from batchstate.races.tracing.clocks import StreamClock
from batchstate.races.tracing.memory import Address
from batchstate.races.tracing.regions import ByteRegion

POISON = 0xA5
"""Each byte of host memory that a copy has not reached yet."""


@final
@attrs.define(eq=False)
class _Copy:
    entry: Entry
    allocation: RaceAllocation
    region: ByteRegion
    tensor: torch.Tensor | None  # of host memory; None where nothing keeps it until the copy has run
    address: Address  # of the tensor
    checksum: int  # of it, when the copy was enqueued
    values: torch.Tensor | None = None  # that land there
    disturbed: bool = False  # a traced operation has written it since

    def touches(self, allocation: RaceAllocation, region: ByteRegion) -> bool:
        return self.allocation is allocation and self.region.overlaps(region)


@final
class HostMemory:
    """Copies in flight between host memory and the device; `detector` reports sources that were refilled too early."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._sources: deque[_Copy] = deque()
        self._landings: deque[_Copy] = deque()

    def reads(
        self, entry: Entry, allocation: RaceAllocation, region: ByteRegion, tensor: torch.Tensor, kept: bool
    ) -> None:
        """A copy to the device reads `tensor` when it runs: copies that land there before it have landed by then.

        `kept` says that torch keeps the memory for it.
        """
        self.ordered(entry.stream, allocation, region)
        if not any(landing.values is None and landing.touches(allocation, region) for landing in self._landings):
            held = tensor if kept else None
            self._sources.append(_Copy(entry, allocation, region, held, Address(tensor), _checksum(tensor)))
        # else a device fills it at a time of its own, and it has no checksum

    def ordered(self, stream: StreamClock, allocation: RaceAllocation, region: ByteRegion) -> None:
        """A stream is about to access host memory: copies that land there, and are ordered before it, land now."""
        for landing in [landing for landing in self._landings if landing.touches(allocation, region)]:
            if landing.values is not None and stream.knows(landing.entry.stream.number, landing.entry.number):
                self._landings.remove(landing)
                self._land(landing)

    def lands(
        self,
        entry: Entry,
        allocation: RaceAllocation,
        region: ByteRegion,
        tensor: torch.Tensor,
        values: torch.Tensor | None,
    ) -> None:
        """A copy to the host writes `values` into `tensor` when it runs; None where a device copies by itself."""
        self.overwritten(allocation, region)
        if values is not None:
            _poison(tensor)
        checksum = 0 if values is None else _checksum(tensor)
        self._landings.append(_Copy(entry, allocation, region, tensor, Address(tensor), checksum, values))

    def overwritten(self, allocation: RaceAllocation, region: ByteRegion) -> None:
        """A traced write: unseen writes before it are checked for now, so that it is not blamed for them."""
        for source in [source for source in self._sources if source.touches(allocation, region)]:
            self._sources.remove(source)
            self._check(source)
        for landing in self._landings:
            landing.disturbed |= landing.touches(allocation, region)

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._landings and not self._sources

    def settle(self) -> None:
        """The host has waited: copies that are over by now have landed, and have read their sources."""
        host = self._detector.clocks.host
        for landing in [landing for landing in self._landings if _over(host, landing.entry)]:
            self._landings.remove(landing)
            self._land(landing)
        for source in [source for source in self._sources if _over(host, source.entry)]:
            self._sources.remove(source)
            self._check(source)

    def close(self) -> None:
        """The end of the window: everything has run."""
        while self._landings:
            self._land(self._landings.popleft())
        while self._sources:
            self._check(self._sources.popleft())

    def _check(self, source: _Copy) -> None:
        tensor = source.address.tensor()
        if tensor is not None and _checksum(tensor) != source.checksum:
            self._unseen(source, RaceKind.STAGING_REFILLED, "reads")

    def _land(self, landing: _Copy) -> None:
        tensor = landing.address.tensor()
        if landing.values is None or tensor is None:
            return
        changed = not landing.disturbed and _checksum(tensor) != landing.checksum
        tensor.copy_(landing.values)
        where = landing.allocation, landing.region
        self._sources = deque(source for source in self._sources if not source.touches(*where))
        for other in self._landings:
            other.disturbed |= other.touches(*where)
        if changed:
            self._unseen(landing, RaceKind.HOST_MEMORY_REUSED, "writes")

    def _unseen(self, copy: _Copy, kind: RaceKind, does: str) -> None:
        detector = self._detector
        event = detector.event(detector.clocks.host, EventKind.HOST_ACCESS, "a write that torch did not see")
        second = detector.access(event.number, 0, "writes", copy.allocation, copy.region)
        first = detector.access(copy.entry.number, copy.entry.stream.number, does, copy.allocation, copy.region)
        second = attrs.evolve(second, site=f"a line between {first.site} and {second.site}", step=first.step)
        detector.report(kind, copy.allocation, rows_of(copy.allocation.name, copy.region), first, second)


def _over(host: StreamClock, entry: Entry) -> bool:
    return host.knows(entry.stream.number, entry.number)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(POISON)
    else:
        tensor.copy_(torch.full((tensor.element_size(),), POISON, dtype=torch.uint8).view(tensor.dtype))


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data) if flat.numel() else 0
