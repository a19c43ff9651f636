"""The simulated device's part of a window: operations run late, in the order of a scheduler."""

from typing import Any, final

import attrs
import torch

from batchstate.testing.cuda._tracer import CudaTracer
from batchstate.testing.sim.calls import Call
from batchstate.testing.sim.device import Task
from batchstate.testing.sim.shapes import NewTensor
from batchstate.testing.sim.tracer import SimAllocation, SimTracer, new_seed
from batchstate.testing.tracing.dispatch import TracedCall
from batchstate.testing.tracing.memory import MemoryKind


@final
class CudaSimTracer(CudaTracer[SimAllocation], SimTracer):
    """Gives the device what is the device's, of code that names its devices. A graph is a list of what to enqueue."""

    def _undecided_result(self, call: TracedCall) -> Any:
        return super()._on_host(call)

    def _on_host(self, call: TracedCall) -> Any:
        return call.func(*call.args, **call.kwargs)

    def new(self, like: NewTensor) -> torch.Tensor:
        """New device memory of the current stream; while a graph is captured, of the graph, which keeps it."""
        tensor = super().new(like)
        if self.capture is not None:
            self.allocations.add(tensor, SimAllocation(MemoryKind.DEVICE))
        return tensor

    # Graphs

    def _new_capture(self) -> list[Task]:
        return []

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        if copies:
            return self._copy(call.args[0], call.args[1], True)
        return self._on_device(call)

    def _enqueue(self, task: Task) -> None:
        if self.capture is None:
            super()._enqueue(task)
        else:
            self.capture.append(task)

    def replay(self, capture: list[Task]) -> None:
        """Enqueues what a graph has recorded; its random numbers are drawn anew."""
        with self.lock:
            for task in capture:
                work = task.work
                if isinstance(work, Call) and work.seed is not None:
                    work = attrs.evolve(work, seed=new_seed())
                self.enqueue(f"{task.name} (graph)", work, task.writes, reads_host=task.reads_host)

    def _wait(self) -> None:
        self.refuse_capture("the host waits for the device")
        super()._wait()
