"""Which memory is `cuda:0`'s, and every operation of torch on it, by the word `device=` that the code itself says."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from batchstate.errors import DeviceError
from batchstate.runtime import Runtime
from batchstate.testing.cuda._graphs import Capture, Node
from batchstate.testing.race.detector import Detector
from batchstate.testing.race.report import EventKind
from batchstate.testing.race.tracer import RaceTracer
from batchstate.testing.tracing.clocks import StreamClock
from batchstate.testing.tracing.dispatch import TracedCall, untraced
from batchstate.testing.tracing.memory import MemoryKind
from batchstate.testing.tracing.operations import MemoryAccess, Operation, tensors_in, tensors_of
from batchstate.testing.tracing.regions import of_tensor

CUDA = torch.device("cuda", 0)
"""What the memory of the device answers as its `.device`."""

CPU = torch.device("cpu")


def check_declared(device: torch.device) -> torch.device:
    """The device, if the window has it.

    Raises:
        RuntimeError: it was not declared.
    """
    if device.index not in (None, 0):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {device} was not declared; `cuda_on_cpu` has one device, {CUDA}"
        )
    return CUDA


@final
class CudaTracer(RaceTracer):
    """A tracer for code that names its devices: nothing is undecided, what is not `cuda` is the host's.

    Pageable host memory is not kept in the books at all. Threads go one after the other, and are one host.

    Args:
        detector, inner, clock_of, note_sync: see `RaceTracer`.

    Attributes:
        lock: held by whichever thread is told of an operation.
        ended: whether the window is over; threads that go on run as if there had been none.
    """

    def __init__(
        self,
        detector: Detector,
        inner: Runtime,
        clock_of: Callable[[Any], StreamClock],
        note_sync: Callable[[str], None],
    ) -> None:
        super().__init__(detector, inner, clock_of, note_sync)
        self.lock = threading.RLock()
        self.ended = False
        self._filling = threading.local()
        self._captures: dict[int, Capture] = {}  # thread -> what it captures

    # Memory

    def kind_of(self, tensor: torch.Tensor) -> MemoryKind:
        """Where a tensor lies: what was not made on the device is the host's."""
        known = self.allocations.of(tensor)
        return MemoryKind.HOST if known is None else known.kind

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device. Cheap."""
        try:
            found = self.allocations.of(tensor)
        except (RuntimeError, NotImplementedError):  # without a storage: a wrapper of another library
            return False
        return found is not None and found.kind is MemoryKind.DEVICE

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return self.allocations.of(tensor) is not None

    # Operations

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], from_factory: bool) -> Any:
        """An operation is called; returns its result. `device=` says where its result lies."""
        __tracebackhide__ = True
        if self.ended:
            return func(*args, **kwargs)
        operation = Operation.of(func)
        if operation.is_metadata:
            result = func(*args, **kwargs)
            if operation.name == "lift_fresh" and self.allocations.of(result) is None:
                with untraced():
                    pinned = self.allocations.pinned_at(result)
                return result if pinned is None else pinned
            return result
        tensors = tensors_of(args, kwargs)
        place, named = kwargs.get("device"), dict(kwargs)
        if place is not None:
            if place.type not in ("cuda", "cpu"):
                return func(*args, **kwargs)
            if place.type == "cuda":
                check_declared(place)
                named["device"] = CPU
        with self.lock:
            return self._operation(TracedCall(operation, func, args, named, tensors), place)

    def _operation(self, call: TracedCall, place: torch.device | None) -> Any:
        __tracebackhide__ = True
        operation, func, args, kwargs, tensors = call
        of_device = any(self.kind_of(one) is MemoryKind.DEVICE for one in tensors)
        to_device = of_device if place is None else place.type == "cuda"
        capture = self.capture
        if kwargs.get("pin_memory"):
            if to_device:
                raise RuntimeError(f"{operation.name}: only dense CPU tensors can be pinned, and device= says {place}")
            return self.keep(func(*args, **{**kwargs, "pin_memory": False}), MemoryKind.PINNED)
        crosses = operation.name == "copy_" and self._crosses(args[0], args[1]) and not self._fills(args[1])
        moves = operation.name == "_to_copy" and of_device is not to_device
        if capture is not None and (of_device or to_device):
            return self._captured(capture, call, copies=crosses or moves)
        if crosses:
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
        if moves:
            return self._moved(args[0], kwargs, to_device)
        if operation.name == "_foreach_copy_" and of_device:
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source, *args[2:], **kwargs)
            return None
        if not to_device:
            if of_device and place is None:
                self._refuse_host_operands(operation, args, tensors)
            return self._on_host(call)
        self._refuse_host_operands(operation, args, tensors if of_device else [])
        result = self._on_device(call)
        if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
            raise NotImplementedError(
                f"cuda_on_cpu has no model of {result.layout} tensors on {CUDA} ({operation.name})"
            )
        return result

    def _crosses(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        return (self.kind_of(target) is MemoryKind.DEVICE) is not (self.kind_of(source) is MemoryKind.DEVICE)

    def _fills(self, source: torch.Tensor) -> bool:
        """Whether a copy is of a number that is put into a tensor: on a device torch makes that a fill."""
        return source.ndim == 0 and getattr(self._filling, "now", False)

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """A window of this thread in which a number is put into a tensor of the device."""
        self._filling.now = True
        try:
            yield
        finally:
            self._filling.now = False

    def _moved(self, source: torch.Tensor, kwargs: Mapping[str, Any], to_device: bool) -> torch.Tensor:
        """`.to(...)` to the other side."""
        non_blocking = bool(kwargs.get("non_blocking", False))
        made: dict[str, Any] = {"dtype": kwargs.get("dtype") or source.dtype}
        if kwargs.get("memory_format") is not None:
            made["memory_format"] = kwargs["memory_format"]
        if to_device:
            result = torch.empty_like(source, **made)
            self.allocate_on_device(result, self.access(EventKind.ALLOCATION, "empty", ()))
            return self._copy(result, source, non_blocking)
        if non_blocking:  # lands in pinned memory of its own, as torch does
            return self._copy(self.keep(torch.empty_like(source, **made), MemoryKind.PINNED), source, True)
        return self._brought_to_host("to", source, made["dtype"])

    def _refuse_host_operands(self, operation: Operation, args: Sequence[Any], tensors: list[torch.Tensor]) -> None:
        try:
            super()._refuse_host_operands(operation, args, tensors)
        except DeviceError as error:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {CUDA} and cpu! "
                f"({error.problem})"
            ) from None

    def _on_host(self, call: TracedCall) -> Any:
        operation, func, args, kwargs, tensors = call
        if any(self.kind_of(one) is MemoryKind.PINNED for one in tensors):
            for tensor, region, writes in operation.accesses(args, kwargs, self._read_index):
                if self.kind_of(tensor) is MemoryKind.PINNED:
                    self.host_accesses(tensor, operation.name, writes=writes, region=region)
        return func(*args, **kwargs)

    def _read_index(self, index: torch.Tensor) -> Any:
        return index.numpy()

    # Calls that torch does not dispatch

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `Tensor.pin_memory` returns."""
        with self.lock, untraced():
            kind = self.kind_of(tensor)
            if kind is MemoryKind.DEVICE:
                raise RuntimeError("cannot pin a tensor of cuda:0: only dense CPU tensors can be pinned")
            if kind is MemoryKind.PINNED:
                return tensor
            return self.keep(tensor.clone(), MemoryKind.PINNED)

    def to_list(self, tensor: torch.Tensor) -> Any:
        """What `Tensor.tolist` returns; the host waits for a tensor of the device."""
        with self.lock, untraced():
            done, result = self.host_call("tolist", (tensor,), {})
            return result if done else tensor.tolist()

    # Graphs

    @property
    def capture(self) -> Capture | None:
        """What this thread captures, or None."""
        return self._captures.get(threading.get_ident()) if self._captures else None

    def begin_capture(self, capture: Capture) -> None:
        """What this thread launches from now on is recorded, and does not happen."""
        self._captures[threading.get_ident()] = capture

    def end_capture(self) -> None:
        """Ends the capture of this thread. What it recorded has changed nothing of older memory."""
        capture = self._captures.pop(threading.get_ident(), None)
        if capture is not None:
            with untraced():
                capture.restore()

    def refuse_capture(self, what: str) -> None:
        """Refuses what a stream that is captured does not permit.

        Raises:
            RuntimeError: this thread captures a graph.
        """
        if self.capture is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def _captured(self, capture: Capture, call: TracedCall, *, copies: bool) -> Any:
        operation, func, args, kwargs, _ = call
        if operation.waits(args, kwargs, self.kind_of):
            self.refuse_capture(f"{operation.name} waits for the device")
        if copies:
            source = args[1] if operation.name == "copy_" else args[0]
            pinned = all(self.kind_of(one) is not MemoryKind.HOST for one in (args[0], source))
            if operation.name == "_to_copy" or not pinned:
                self.refuse_capture("a copy from or to memory that is not pinned waits for the device")
        for written in operation.writes(args, kwargs):
            for one in tensors_in(written):
                capture.keep(one)
        with untraced():
            result = func(*args, **kwargs)
        results = list(tensors_in(result)) if isinstance(result, torch.Tensor | tuple | list) else []
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
        accesses = [one for one in accesses if self._is_checked(one.tensor)]
        for one, is_new in zip(node.results, node.new, strict=True):
            if is_new and (region := of_tensor(one)) is not None:
                accesses.append(MemoryAccess(one, region, True))
        entry, checked = self.begin(EventKind.OPERATION, node.operation.name, accesses)
        result = node.func(*node.args, **node.kwargs)
        for one, other, is_new in zip(node.results, tensors_in(result), node.new, strict=True):
            if is_new:
                one.copy_(other)
        self.end(entry, checked)
