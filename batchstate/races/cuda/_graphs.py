"""Graphs as a whole: the numbers that they have from their capture, and the memory that several of them share."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from batchstate.races.detector import RaceAllocation
from batchstate.races.report import EventKind, RaceKind
from batchstate.races.tracer import RaceTracer
from batchstate.races.tracing.dispatch import untraced
from batchstate.races.tracing.memory import MemoryKind, Name
from batchstate.races.tracing.regions import ByteRegion

_WHOLE = ByteRegion(0, 1)


@final
class Graphs:
    """Checks graphs when they are launched; `tracer` has the streams and the detector."""

    def __init__(self, tracer: RaceTracer) -> None:
        self._tracer = tracer
        self._pools: dict[Any, RaceAllocation] = {}

    def _stand_in(self, label: str) -> RaceAllocation:
        """Something that is no tensor, in reports."""
        with untraced():
            return RaceAllocation(MemoryKind.HOST, Name(0, torch.empty(1, dtype=torch.uint8), label), None, None)

    def captured(self, pool: Any) -> None:
        """A capture begins, with the pool of other graphs or with None: then no other launch touches its memory."""
        if pool is not None and pool not in self._pools:
            self._pools[pool] = self._stand_in("the pool of several graphs")
            self._pools[pool].kind = MemoryKind.DEVICE

    def bind(self, graph: Any, values: Mapping[str, Callable[[], object]]) -> None:
        """See `PlainRaceRuntime.bind`."""
        detector = self._tracer.detector
        entry = detector.event(detector.clocks.host, EventKind.HOST_ACCESS, "bind")
        graph._batchstate_bound = [(name, ask, ask(), entry) for name, ask in values.items()]

    def launched(self, graph: Any) -> None:
        """A graph is about to be launched on the current stream.

        Raises:
            Race: it has another number from its capture than the code has now, or nothing orders it after another
                graph of its pool.
        """
        __tracebackhide__ = True
        detector, pool = self._tracer.detector, self._pools.get(graph.pool())
        bound = getattr(graph, "_batchstate_bound", ())
        if pool is None and not bound:
            return
        entry = detector.event(self._tracer.current(), EventKind.OPERATION, "a graph")
        for name, ask, then, by in bound:
            now = ask()
            if now != then:
                memory = self._stand_in(name)
                detector.report(
                    RaceKind.LEFTOVER_READ,
                    memory,
                    "the number",
                    detector.access(by.number, 0, "gives", memory, _WHOLE),
                    detector.access(entry.number, entry.stream.number, "reads", memory, _WHOLE),
                    owners=(f"{name}={then!r}", f"{name}={now!r}"),
                )
        if pool is not None:
            detector.check(entry, [(pool, _WHOLE, True)])
            detector.note(entry, [(pool, _WHOLE, True)])
