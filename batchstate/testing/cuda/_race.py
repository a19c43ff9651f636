"""The race detector's part of a window: operations run at once, and the detector is told of what they access."""

from typing import Any, final

import torch

from batchstate.testing.cuda._graphs import Capture, Node
from batchstate.testing.cuda._tracer import CudaTracer
from batchstate.testing.race.detector import RaceAllocation
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.tracer import RaceTracer
from batchstate.testing.tracing.dispatch import TracedCall, untraced
from batchstate.testing.tracing.memory import MemoryKind
from batchstate.testing.tracing.operations import MemoryAccess, tensors_in
from batchstate.testing.tracing.regions import of_tensor


@final
class CudaRaceTracer(CudaTracer[RaceAllocation], RaceTracer):
    """Tells the detector of every access of code that names its devices."""

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return False

    def _undecided_result(self, call: TracedCall) -> Any:
        return super()._on_host(call)

    def _on_host(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, tensors = call
        if any(self.kind_of(one) is MemoryKind.PINNED for one in tensors):
            for tensor, region, writes in operation.accesses(args, kwargs, self._read_index):
                if self.kind_of(tensor) is MemoryKind.PINNED:
                    self.host_accesses(tensor, operation.name, writes=writes, region=region)
        return func(*args, **kwargs)

    def _read_index(self, index: torch.Tensor) -> Any:
        return index.numpy()

    # Graphs

    def _new_capture(self) -> Capture:
        return Capture()

    def end_capture(self) -> None:
        """Ends the capture of this thread. What it recorded has changed nothing of older memory."""
        if self.capture is not None:
            with untraced():
                self.capture.restore()
        super().end_capture()

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        operation, func, args, kwargs, _ = call
        capture: Capture = self.capture
        for written in operation.writes(args, kwargs):
            for one in tensors_in(written):
                capture.keep(one)
        with untraced():
            result = func(*args, **kwargs)
        results = list(tensors_in(result))
        new = [self.allocations.of(one) is None for one in results]
        for one, is_new in zip(results, new, strict=True):
            if is_new:  # of the graph's own pool, which no stream gets back
                known = self.allocate(one, MemoryKind.DEVICE)
                known.allocated_on = None
                capture.made(one)
        capture.nodes.append(Node(operation, func, tuple(args), dict(kwargs), results, new, copies))
        return result

    def replay(self, capture: Capture) -> None:
        """Runs what a graph has recorded, on the current stream."""
        __tracebackhide__ = True
        with self.lock, untraced():
            outer, self.launched = self.launched, "graph"
            try:
                for node in capture.nodes:
                    self._replay(node)
            finally:
                self.launched = outer

    def _replay(self, node: Node) -> None:
        __tracebackhide__ = True
        if node.copies:
            self._copy(node.args[0], node.args[1], True)
            return
        accesses = node.operation.accesses(node.args, node.kwargs, self._read_index)
        for one, is_new in zip(node.results, node.new, strict=True):
            if is_new and (region := of_tensor(one)) is not None:
                accesses.append(MemoryAccess(one, region, True))
        entry, checked = self.begin(EventKind.OPERATION, node.operation.name, accesses)
        result = node.func(*node.args, **node.kwargs)
        for one, other, is_new in zip(node.results, tensors_in(result), node.new, strict=True):
            if is_new:
                one.copy_(other)
        self.end(entry, checked)
