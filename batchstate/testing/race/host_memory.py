"""Pinned host memory between the host and copies that have not run yet.

What a copy to the device reads is remembered as a checksum until the copy is known to be over: a source that has
changed by then was refilled too early, even where nothing of torch's did it. What a copy to the host brings is held
back, and the memory poisoned, until the host has waited for the copy: whoever reads before finds no plausible number.
"""

import zlib
from collections import deque
from typing import final

import attrs
import torch

from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.detector import Detector, Kept
from batchstate.testing.race.journal import Entry, rows_of
from batchstate.testing.race.report import EventKind, RaceKind
from batchstate.testing.watching.regions import Region

POISON = 0xA5
"""Each byte of host memory that a copy has not reached yet."""


@final
@attrs.frozen(eq=False)
class _Source:
    entry: Entry
    kept: Kept
    region: Region
    tensor: torch.Tensor
    checksum: int


@final
@attrs.frozen(eq=False)
class _Landing:
    entry: Entry
    tensor: torch.Tensor
    values: torch.Tensor


@final
class HostMemory:
    """Copies in flight between host memory and the device.

    Args:
        detector: judges and reports.
    """

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._sources: deque[_Source] = deque()
        self._landings: deque[_Landing] = deque()

    def reads(self, entry: Entry, kept: Kept, region: Region, tensor: torch.Tensor) -> None:
        """A copy to the device reads `tensor` when it runs."""
        self._sources.append(_Source(entry, kept, region, tensor, _checksum(tensor)))

    def lands(self, entry: Entry, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """A copy to the host brings `values` into `tensor` when it runs."""
        _bytes(tensor).fill_(POISON)
        self._landings.append(_Landing(entry, tensor, values))

    def settle(self) -> None:
        """The host has waited for something: what is over by now has landed, and was read.

        Raises:
            Race: a source has changed meanwhile.
        """
        if not self._landings and not self._sources:
            return
        host = self._detector.clocks.host
        landings, self._landings = self._landings, deque()
        for landing in landings:
            if _over(host, landing.entry):
                landing.tensor.copy_(landing.values)
            else:
                self._landings.append(landing)
        sources, self._sources = self._sources, deque()
        over = [source for source in sources if _over(host, source.entry)]
        self._sources.extend(source for source in sources if source not in over)
        for source in over:
            self._judge(source)

    def close(self) -> None:
        """The end of the watching: everything has run."""
        for landing in self._landings:
            landing.tensor.copy_(landing.values)
        self._landings.clear()
        while self._sources:
            self._judge(self._sources.popleft())

    def _judge(self, source: _Source) -> None:
        if _checksum(source.tensor) == source.checksum:
            return
        detector = self._detector
        event = detector.event(detector.clocks.host, EventKind.HOST_ACCESS, "a write that torch did not see")
        second = detector.access(event.number, 0, "writes", source.kept, source.region)
        second = attrs.evolve(second, site=f"some line before {second.site}")
        first = detector.access(source.entry.number, source.entry.lane.number, "reads", source.kept, source.region)
        rows = rows_of(source.kept.name, source.region)
        detector.report(RaceKind.STAGING_REFILLED, source.kept, rows, first, second)


def _over(host: Lane, entry: Entry) -> bool:
    return host.knows(entry.lane.number, entry.number)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data) if flat.numel() else 0
