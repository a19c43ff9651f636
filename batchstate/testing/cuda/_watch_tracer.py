"""What torch does on a GPU, told to the race detector as it happens: nothing is replaced, and nothing waits."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from batchstate.testing.cuda._tracer import CudaTracer
from batchstate.testing.race.detector import RaceAllocation
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.tracer import Checked, RaceTracer
from batchstate.testing.tracing.dispatch import TracedCall
from batchstate.testing.tracing.memory import MemoryKind
from batchstate.testing.tracing.operations import Operation, tensors_in
from batchstate.testing.tracing.regions import of_tensor


class Node(NamedTuple):
    """One operation of a graph: its name, and what it accesses. It keeps no memory."""

    name: str
    accesses: Checked


@final
class WatchTracer(CudaTracer[RaceAllocation], RaceTracer):
    """Tells the detector of every access to a GPU's memory. Torch runs what it is asked to run."""

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies, as it says itself; host memory that is not known to be pinned is pageable."""
        return MemoryKind.DEVICE if self.on_device(tensor) else super().kind_of(tensor)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the GPU."""
        return tensor.device.type == self.device.type

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return self.on_device(tensor) or self.allocations.of(tensor) is not None

    def _refuse_host_operands(self, operation: Operation, args: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        """Torch refuses them itself."""

    def _moved(self, source: torch.Tensor, kwargs: Mapping[str, Any], to_device: bool) -> torch.Tensor:
        return self._converted(source, kwargs)

    def _held_back(self, result: torch.Tensor) -> None:
        return None

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to_host(source, target, None)
        target.copy_(source, non_blocking=True)

    def _on_host(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, tensors = call
        if any(self.kind_of(one) is MemoryKind.PINNED for one in tensors):
            for tensor, region, writes in operation.accesses(args, kwargs, self._read_index):
                if self.kind_of(tensor) is MemoryKind.PINNED:
                    self.host_accesses(tensor, operation.name, writes=writes, region=region)
        result = func(*args, **kwargs)
        return self.keep(result, MemoryKind.PINNED) if operation.name == "_pin_memory" else result

    # Graphs

    def _new_capture(self) -> list[Node]:
        return []

    def _check_capture(self, call: TracedCall, *, copies: bool) -> None:
        """Torch refuses what cannot be captured."""

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        operation, func, args, kwargs, _ = call
        accesses: Checked = []
        for one in operation.accesses(args, kwargs, _unknown):
            if self._is_pinned(one.tensor) or self._is_checked(one.tensor):
                accesses.append((self._accessed(one.tensor), one.region, one.writes))
        result = func(*args, **kwargs)
        for made in tensors_in(result):
            if self.on_device(made) and self.allocations.of(made) is None and (region := of_tensor(made)) is not None:
                known = self.allocate(made, MemoryKind.DEVICE)
                known.allocated_on = None  # of the graph's own pool, which no stream gets back
                accesses.append((known, region, True))
        self.capture.append(Node(operation.name, accesses))
        return result

    def replay(self, capture: list[Node]) -> None:
        """A graph is about to be launched on the current stream.

        Raises:
            Race: one of its accesses is not ordered.
        """
        __tracebackhide__ = True
        with self.lock:
            for name, accesses in capture:
                entry = self.detector.event(
                    self.current(),
                    EventKind.OPERATION,
                    f"{name} (graph)",
                    reads=[(known.name, region.brief()) for known, region, writes in accesses if not writes],
                    writes=[(known.name, region.brief()) for known, region, writes in accesses if writes],
                )
                self.detector.check(entry, accesses)
                self.end(entry, accesses)


def _unknown(index: torch.Tensor) -> Any:
    """What an index of a graph names is not known before the graph runs: the whole tensor counts."""
    raise IndexError
