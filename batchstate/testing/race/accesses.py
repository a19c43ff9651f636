"""Accesses as events: who touches which memory on which lane, and what the host's waits settle."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from batchstate.runtime import Runtime
from batchstate.testing.race.clocks import Lane
from batchstate.testing.race.detector import Detector, Kept, Lifetimes
from batchstate.testing.race.history import Entry
from batchstate.testing.race.host_memory import HostMemory
from batchstate.testing.race.report import EventKind
from batchstate.testing.tracing.accesses import Touch
from batchstate.testing.tracing.memory import Memories, Name, Place
from batchstate.testing.tracing.regions import Region, of_tensor
from batchstate.testing.tracing.sites import site


@final
class Accesses:
    """Everything that is known of memory, and every access to it.

    Args:
        detector: judges.
        inner: the runtime that is watched. On a CPU, memory is known by how it came about.
        current: the lane of the current stream.
        synchronised: told of each call of torch that makes the host wait.

    Attributes:
        detector: that judges.
        current: the lane of the current stream.
        device: of the runtime.
        on_cpu: whether host and device memory look alike.
        memories: all memory that was seen.
        host_memory: copies between host and device.
        launched: name of the innermost launch under way, for reports.
        seen: memory touched since that launch began, with whether it was written; None outside of launches.
    """

    def __init__(
        self,
        detector: Detector,
        inner: Runtime,
        current: Callable[[], Lane],
        synchronised: Callable[[str], None],
    ) -> None:
        self.detector = detector
        self._synchronised = synchronised
        self.current = current
        self.device = inner.device
        self.on_cpu = inner.device.type == "cpu"
        self._inner = inner
        self._lifetimes = Lifetimes(detector)
        self._muted = 0
        self._numbers = 0
        self.memories: Memories[Kept] = Memories(self._lifetimes.freed)
        self.host_memory = HostMemory(detector)
        self.launched: str | None = None
        self.seen: dict[Kept, bool] | None = None

    @property
    def pieces(self) -> int:
        """Pieces of memory seen so far: the number of the newest."""
        return self._numbers

    @property
    def silent(self) -> bool:
        """Whether what happens now is the tool's own."""
        return self._muted > 0

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """A window in which operations are the tool's own, and nobody's access."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    # Memory

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for memory of a CPU that was not seen yet."""
        if not self.on_cpu and tensor.device.type != "cpu":
            return Place.DEVICE
        kept = self.memories.of(tensor)
        if kept is None:
            return None if self.on_cpu else Place.HOST
        return kept.place

    def kept(self, tensor: torch.Tensor) -> Kept:
        """What is known of device memory, which an operation of the device makes of any memory it touches."""
        kept = self.memories.of(tensor)
        if kept is None:
            kept = self.memories.add(tensor, Kept(self._name(tensor), Place.DEVICE, None, None))
        elif kept.place is Place.UNDECIDED:
            kept.place = Place.DEVICE
            if kept.made is not None:
                kept.made.hidden = False
                lane = kept.made.lane
                lane.work = max(lane.work, kept.made.number)
        return kept

    def made(self, tensor: torch.Tensor, entry: Entry) -> Kept:
        """New device memory, written by an event.

        Raises:
            Race: it may be memory that another stream still uses.
        """
        __tracebackhide__ = True
        kept = self.keep(tensor, Place.DEVICE)
        region = of_tensor(tensor)
        if region is not None:
            entry.writes = (*entry.writes, (kept.name, region))
            self.detector.judge(entry, [(kept, region, True)])
            self.detector.note(entry, [(kept, region, True)])
        self._lifetimes.allocates(entry.lane, entry)
        return kept

    def keep(self, tensor: torch.Tensor, place: Place) -> Kept:
        """Notes whose memory a tensor is."""
        made_on = self.current() if place in (Place.DEVICE, Place.UNDECIDED) else None
        return self.memories.add(tensor, Kept(self._name(tensor), place, made_on, site(2)))

    def pinned(self, tensor: torch.Tensor) -> None:
        """Notes host memory that copies use without the host waiting."""
        self.keep(tensor, Place.PINNED)

    def hand(self, tensor: torch.Tensor, lane: Lane) -> None:
        """The memory is kept until a stream has run what it has by then."""
        self.kept(tensor).handed.add(lane.number)

    def _name(self, tensor: torch.Tensor) -> Name:
        self._numbers += 1
        return Name(self._numbers, tensor)

    # Accesses of streams

    def access(self, kind: EventKind, name: str, touches: Sequence[Touch]) -> Entry:
        """Something on the current stream touches memory.

        Raises:
            Race: one of the accesses is not ordered.
        """
        __tracebackhide__ = True
        with self.accessing(kind, name, touches) as entry:
            return entry

    @contextlib.contextmanager
    def accessing(self, kind: EventKind, name: str, touches: Sequence[Touch]) -> Iterator[Entry]:
        """A window in which something on the current stream touches memory. What ends in an error has not done so.

        Raises:
            Race: one of the accesses is not ordered.
        """
        __tracebackhide__ = True
        judged = [(self._touched(one.tensor), one.region, one.writes) for one in touches]
        entry = self.detector.event(
            self.current(),
            kind,
            name if self.launched is None else f"{name} ({self.launched})",
            reads=[(kept.name, region.brief()) for kept, region, writes in judged if not writes],
            writes=[(kept.name, region.brief()) for kept, region, writes in judged if writes],
            at=site(3),
        )
        self.detector.judge(entry, judged)
        yield entry
        self.detector.note(entry, judged)
        if self.seen is not None:
            for kept, _, writes in judged:
                self.seen[kept] = writes or self.seen.get(kept, False)

    def declared(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Accesses that a launch declares, of what torch did not show.

        Raises:
            Race: one of them is not ordered.
        """
        found = [Touch(one, region, False) for one in reads if (region := of_tensor(one)) is not None]
        found += [Touch(one, region, True) for one in writes if (region := of_tensor(one)) is not None]
        if found:
            seen, self.seen = self.seen, None  # a launch inside of another declares for itself
            try:
                self.access(EventKind.OPERATION, name, found)
            finally:
                self.seen = seen

    def pinned_touched(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """A kernel of the current stream is about to touch pinned memory: what lands there before it is there by then.

        Raises:
            Race: the source of a copy was refilled before, unseen.
        """
        lane = self.current()
        for one in (*reads, *writes):
            kept, region = self.memories.of(one), of_tensor(one)
            if kept is not None and kept.place is Place.PINNED and region is not None:
                with self.muted(), torch._C.DisableTorchFunction():
                    self.host_memory.ordered(lane, kept, region)
                    if any(one is other for other in writes):
                        self.host_memory.overwritten(kept, region)

    def undecided(self, tensor: torch.Tensor, name: str) -> None:
        """An operation of which nobody can say where it ran has written a tensor.

        Should the tensor turn out to be the device's, it was written on the stream that is current now. Until then it
        is held against nothing: memory of the host has no streams.
        """
        kept = self.memories.of(tensor) or self.keep(tensor, Place.UNDECIDED)
        region = of_tensor(tensor)
        if kept.place is Place.UNDECIDED and region is not None:
            used = [(kept.name, region)]
            hidden = kept.made is None or kept.made.hidden
            kept.made = self.detector.event(
                self.current(), EventKind.OPERATION, name, writes=used, at=site(3), hidden=hidden
            )
            self.detector.note(kept.made, [(kept, region, True)])

    def _touched(self, tensor: torch.Tensor) -> Kept:
        """Pinned memory stays the host's, also where a copy of the device touches it."""
        kept = self.memories.of(tensor)
        return self.kept(tensor) if kept is None or kept.place is Place.UNDECIDED else kept

    # Accesses of the host

    def host_access(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        """The host touches pinned memory.

        Raises:
            Race: a copy that may not have run uses it.
        """
        __tracebackhide__ = True
        region = of_tensor(tensor)
        if region is not None:
            self.host_touches(tensor, region, name, writes=writes)

    def host_touches(self, tensor: torch.Tensor, region: Region, name: str, *, writes: bool) -> None:
        """The host touches some bytes of pinned memory; see `host_access`."""
        __tracebackhide__ = True
        kept = self.memories.of(tensor)
        if kept is None:
            return
        used = [(kept.name, region)]
        entry = self.detector.event(
            self.detector.clocks.host,
            EventKind.HOST_ACCESS,
            name,
            reads=() if writes else used,
            writes=used if writes else (),
            at=site(3),
        )
        self.detector.judge(entry, [(kept, region, writes)])
        self.detector.note(entry, [(kept, region, writes)])
        if writes:
            with self.muted(), torch._C.DisableTorchFunction():
                self.host_memory.overwritten(kept, region)

    def synchronises(self, name: str, seen: list[int]) -> None:
        """A call of torch makes the host wait for a stream; see `host_waits`."""
        self._synchronised(name)
        self.host_waits(seen)

    def host_waits(self, seen: list[int]) -> None:
        """The host has waited for all that `seen` has reached: copies that are over have landed.

        Raises:
            Race: the source of one of them was refilled meanwhile.
        """
        self.detector.clocks.host_joins(seen)
        self.settle()

    def settle(self) -> None:
        """See `host_waits`."""
        with self.muted(), torch._C.DisableTorchFunction():
            self.host_memory.settle()

    def read_index(self, index: torch.Tensor) -> Any:
        """The values of an index, whichever stream made it: the tool's own look, which orders nothing."""
        if index.device.type == "cpu":
            return index.numpy()
        self.let_finish()
        return self._inner._read_back(index)

    def let_finish(self) -> None:
        """Waits for the device, so that the tool may look at memory whichever stream writes it. Orders nothing."""
        self._inner._wait_for_device()
