"""What torch does on a GPU, told to the race detector as it happens: nothing is replaced, and nothing waits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from batchstate.runtime import AcceleratorRuntime
from batchstate.testing.cuda._tracer import CudaTracer
from batchstate.testing.race.detector import RaceAllocation
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.tracer import Checked, RaceTracer
from batchstate.testing.tracing.dispatch import TracedCall, untraced
from batchstate.testing.tracing.memory import MemoryKind
from batchstate.testing.tracing.operations import MemoryAccess, Operation, tensors_in
from batchstate.testing.tracing.regions import ByteRegion, LateRegion, of_tensor


class Node(NamedTuple):
    """One operation of a graph: its name, and what it accesses. It keeps no memory."""

    name: str
    accesses: Checked


MOST_KEPT = 1 << 16
"""Elements of an index, beyond which the whole tensor counts."""


@final
class WatchTracer(CudaTracer[RaceAllocation], RaceTracer):
    """Tells the detector of every access to a GPU's memory. Torch runs what it is asked to run.

    Attributes:
        lookups: times that values of an index mattered, for which the tool itself has waited.
    """

    _inner: AcceleratorRuntime

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lookups = 0
        self._wait: Callable[[], None] = torch._C._cuda_synchronize  # before it is one that is noted

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies, as it says itself; host memory that is not known to be pinned is pageable."""
        return MemoryKind.DEVICE if self.on_device(tensor) else super().kind_of(tensor)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the GPU."""
        return tensor.device.type == self.device.type

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return self.on_device(tensor)

    def _refuse_host_operands(self, operation: Operation, args: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        """Torch refuses them itself."""

    def _moved(self, source: torch.Tensor, kwargs: Mapping[str, Any], to_device: bool) -> torch.Tensor:
        return self._converted(source, kwargs)

    def _accesses(self, call: TracedCall) -> list[MemoryAccess]:
        """What a call accesses. Values of an index on the GPU are kept there, and looked up only if they matter."""
        operation, _, args, kwargs, _ = call
        at = operation.index_at
        indices = [] if at is None else [one for one in tensors_in(args[at]) if self.on_device(one)]
        if at is None or not indices:
            return operation.accesses(args, kwargs, self._read_index)
        found = operation.accesses(args, kwargs, _unknown)
        if found and found[0].tensor is args[0] and sum(one.numel() for one in indices) <= MOST_KEPT:
            kept = list(args[: at + 1])
            with untraced():
                kept[0] = _without_memory(args[0])
                index = args[at]
                kept[at] = (
                    index.clone()
                    if isinstance(index, torch.Tensor)
                    else [None if one is None else one.clone() for one in index]
                )

            def look_up() -> ByteRegion | None:
                with untraced(), self._inner._synchronisation_allowed():
                    self.lookups += 1
                    self._wait()
                    return operation.parts(kept, lambda index: index.cpu().numpy())

            found[0] = found[0]._replace(region=LateRegion(found[0].region, look_up))
        return found

    def _read_index(self, index: torch.Tensor) -> Any:
        return index.numpy()

    def _held_back(self, result: torch.Tensor) -> None:
        return None

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_to_host(source, target, None)
        target.copy_(source, non_blocking=True)

    def _undecided_result(self, call: TracedCall) -> Any:
        return self._on_host(call)

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
            self._is_pinned(one.tensor)  # which is known from then on
            if (memory := self._accessed(one.tensor)) is not None:
                accesses.append((memory, one.region, one.writes))
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


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and place in its memory, that has none."""
    extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = int(tensor.storage_offset())
    whole = torch.empty(offset + extent, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


def _unknown(index: torch.Tensor) -> Any:
    """What an index of a graph names is not known before the graph runs: the whole tensor counts."""
    raise IndexError
