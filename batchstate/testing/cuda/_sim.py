"""The simulated device's part of a window: operations run late, in the order of a scheduler."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import attrs
import torch

from batchstate._source_lines import source_line
from batchstate.testing.cuda._tracer import CudaTracer
from batchstate.testing.sim.calls import Call
from batchstate.testing.sim.device import Task
from batchstate.testing.sim.shapes import NewTensor
from batchstate.testing.sim.tracer import SimAllocation, SimTracer, new_seed
from batchstate.testing.tracing.dispatch import TracedCall
from batchstate.testing.tracing.memory import MemoryKind


class _Recorded(NamedTuple):
    """One operation of a graph; as in `Task`."""

    name: str
    work: Callable[[], None]
    writes: Callable[[], Sequence[Any]]
    reads_host: object


@final
class CudaSimTracer(CudaTracer[SimAllocation], SimTracer):
    """Gives the device what is the device's, of code that names its devices. A graph is a list of what to enqueue."""

    def _on_host(self, call: TracedCall) -> Any:
        return call.func(*call.args, **call.kwargs)

    def new(self, like: NewTensor) -> torch.Tensor:
        """New device memory of the current stream; while a graph is captured, of the graph, which keeps it."""
        tensor = super().new(like)
        if self.capture is not None:
            self.allocations.add(tensor, SimAllocation(MemoryKind.DEVICE))
        return tensor

    # Graphs

    def _new_capture(self) -> list[_Recorded]:
        return []

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        if copies:
            return self._copy(call.args[0], call.args[1], True)
        return self._on_device(call)

    def enqueue(
        self,
        name: str,
        work: Callable[[], None],
        writes: Callable[[], Sequence[Any]],
        *,
        reads_host: object = None,
        dormant: bool = False,
    ) -> Task:
        """Something for the current stream to do, or for the graph that this thread captures; see `Task`."""
        if self.capture is None:
            return super().enqueue(name, work, writes, reads_host=reads_host, dormant=dormant)
        self.capture.append(_Recorded(name, work, writes, reads_host))
        return Task(name, 0, source_line(2), work, writes, reads_host)

    def replay(self, capture: list[_Recorded]) -> None:
        """Enqueues what a graph has recorded; its random numbers are drawn anew."""
        with self.lock:
            for name, work, writes, reads_host in capture:
                if isinstance(work, Call) and work.seed is not None:
                    work = attrs.evolve(work, seed=new_seed())
                self.enqueue(f"{name} (graph)", work, writes, reads_host=reads_host)

    def _wait(self) -> None:
        self.refuse_capture("the host waits for the device")
        super()._wait()
