"""`cuda_on_cpu`: a window in which plain torch code that says `cuda` runs on a CPU, and races in it are found."""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, final, overload

import attrs
import torch

from batchstate.errors import ArgumentError
from batchstate.races.cuda._arrays import pinned_array
from batchstate.races.cuda._blocks import Blocks
from batchstate.races.cuda._hints import torch_hint_for
from batchstate.races.cuda._torch import replaced
from batchstate.races.cuda._tracer import CudaTracer, NotModelledError
from batchstate.races.cuda._triton import KernelLaunch
from batchstate.races.cuda._window import CudaWindow, PlainRaceRuntime, open_window
from batchstate.races.detector import OnRace, RaceAllocation
from batchstate.races.devices import PROMPT, RACE, SIM
from batchstate.races.history import Entry
from batchstate.races.report import EventKind
from batchstate.races.sim.calls import Call, View, packed
from batchstate.races.sim.device import DeviceStream, Task
from batchstate.races.sim.runtime import SimRuntime
from batchstate.races.sim.shapes import NewTensor
from batchstate.races.sim.tracer import SimAllocation, SimTracer, new_seed
from batchstate.races.tracer import RaceTracer
from batchstate.races.tracing.clocks import StreamClock
from batchstate.races.tracing.dispatch import TracedCall, raw_kernel, untraced
from batchstate.races.tracing.memory import Address, MemoryKind
from batchstate.races.tracing.operations import MemoryAccess, Operation, tensors_in, tensors_of
from batchstate.races.tracing.regions import ByteRegion, of_tensor
from batchstate.runtime import Stream

P = ParamSpec("P")
T = TypeVar("T")


class Held(NamedTuple):
    """A tensor of a graph that was there before its capture, and all of it as a read."""

    address: Address
    access: tuple[RaceAllocation, ByteRegion, bool] | None


class Node(NamedTuple):
    """One operation of a graph.

    Attributes:
        operation, func, args, kwargs: the call, with `Held` for tensors that were there before.
        made: its results that are memory of the graph, None in place of the others.
        copies: whether it is a copy between pinned memory and the device.
    """

    operation: Operation
    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    made: list[torch.Tensor | None]
    copies: bool

    def held(self) -> Iterator[Held]:
        """The tensors that were there before."""
        stack: list[Any] = [*self.args, *self.kwargs.values()]
        while stack:
            value = stack.pop()
            if isinstance(value, Held):
                yield value
            elif isinstance(value, list):
                stack += value


@final
class Capture:
    """The operations recorded between `capture_begin` and `capture_end`.

    They run while they are recorded, so that the code sees shapes; their writes to older memory are put back. Numbers
    of the host are part of an operation from then on; of memory that was there before, the address is. Kernels of
    Triton have no results, and wait for the replay.
    """

    def __init__(self) -> None:
        self.nodes: list[Node | Callable[[], None]] = []
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()

    def made(self, tensor: torch.Tensor) -> None:
        """The tensor is memory of the graph."""
        self._made.add(tensor.untyped_storage()._cdata)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory of the graph."""
        return tensor.untyped_storage()._cdata in self._made

    def keep(self, tensor: torch.Tensor) -> None:
        """Older memory is about to be written."""
        storage = tensor.untyped_storage()
        if not self.is_made(tensor) and storage._cdata not in self._kept:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._kept[storage._cdata] = (whole, whole.clone())

    def restore(self) -> None:
        """Puts older memory back."""
        for whole, before in self._kept.values():
            whole.copy_(before)
        self._kept.clear()


@final
class CudaRaceTracer(CudaTracer[RaceAllocation], RaceTracer):
    """Tells the detector of every access of code that names its devices.

    Attributes:
        blocks: device memory that comes back; None where each allocation has memory of its own.
    """

    blocks: Blocks | None = None

    def allocate_on_device(self, tensor: torch.Tensor, entry: Entry) -> RaceAllocation:
        """New device memory, written by an event."""
        __tracebackhide__ = True
        if self.blocks is None:
            return super().allocate_on_device(tensor, entry)
        with untraced():
            block = self.blocks.move(tensor, entry.stream.number)
        allocation = super().allocate_on_device(tensor, entry)
        allocation.block = block
        return allocation

    def _freed(self, allocation: RaceAllocation) -> None:
        super()._freed(allocation)
        if self.blocks is not None:
            self.blocks.free(allocation)

    def _is_checked(self, tensor: torch.Tensor) -> bool:
        return False

    def _read_index(self, index: torch.Tensor) -> Any:
        return index.numpy()

    def seen_by_numpy(self, array: Any) -> Any:
        """An array that tells of its reads."""
        return pinned_array(array, self.read_by_numpy)

    def read_by_numpy(self, array: Any, name: str) -> None:
        """A read by the host, if any copy to or from its memory is under way."""
        __tracebackhide__ = True
        if self.ended or self.host_memory.idle or not array.size:
            return
        with self.lock, untraced(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that cannot be written
            part = self.allocations.pinned_at(torch.from_numpy(array))
            if part is not None:
                self.host_accesses(part, name, writes=False)

    def resize(self, whole: torch.Tensor, nbytes: int, resize: Callable[[], object]) -> None:
        """See `CudaTracer`: a free, an allocation, and between two sizes a copy."""
        __tracebackhide__ = True
        old, kept = self.use_on_device(whole), whole[:nbytes]
        if nbytes == len(whole):
            return
        copied = of_tensor(kept)
        entry, checked = self.begin(
            EventKind.OPERATION, "resize_", [MemoryAccess(whole, copied, False)] if copied else []
        )
        self.end(entry, checked)
        self.detector.freed(old)
        with untraced():
            resize()
        new = RaceAllocation(MemoryKind.DEVICE, old.name, entry.stream, entry.source_line)
        self.allocations.add(whole, new)
        if nbytes:
            self.detector.allocates(entry.stream, entry)
            self.detector.unwritten(new, entry)
            if copied:
                self.detector.note(entry, [(new, copied, True)])

    # Graphs

    def _new_capture(self) -> Capture:
        return Capture()

    def end_capture(self) -> None:
        """Ends the capture of this thread, which has changed no older memory."""
        if self.capture is not None:
            with untraced():
                self.capture.restore()
        super().end_capture()

    def _captured(self, call: TracedCall, *, copies: bool) -> Any:
        operation, func, args, kwargs, *_ = call
        capture: Capture = self.capture
        for written in operation.writes(args, kwargs):
            for tensor in tensors_in(written):
                capture.keep(tensor)

        def held(tensor: torch.Tensor) -> Any:
            memory, region = self.allocations.of(tensor), of_tensor(tensor)
            if memory is None or (memory.kind is not MemoryKind.DEVICE and not copies):
                return tensor.detach().clone()  # a number
            if capture.is_made(tensor):
                return tensor.detach()
            memory.captured = True
            return Held(Address(tensor), None if region is None else (memory, region, False))

        with untraced():
            call_args, call_kwargs = packed(args, held), {key: packed(value, held) for key, value in kwargs.items()}
            result = func(*args, **kwargs)
        results: list[torch.Tensor | None] = []
        for made in tensors_in(result):
            is_new = self.allocations.of(made) is None
            if is_new:  # in the graph's own pool, which no stream gets back
                self.allocate(made, MemoryKind.DEVICE).allocated_on = None
                capture.made(made)
            results.append(made if is_new else None)
        capture.nodes.append(Node(operation, func, call_args, call_kwargs, results, copies))
        return result

    def replay(self, capture: Capture) -> None:
        """Runs the operations of a graph on the current stream."""
        __tracebackhide__ = True
        with self.lock, untraced():
            outer, self.launched, self.replaying = self.launched, "graph", True
            try:
                for node in capture.nodes:
                    self._replay(node)
            finally:
                self.launched, self.replaying = outer, False

    def _replay(self, node: Node | Callable[[], None]) -> None:
        __tracebackhide__ = True
        if not isinstance(node, Node):
            node()
            return
        gone = [held.access for held in node.held() if held.access is not None]
        if self.detector.freed_under_graph(f"{node.operation.name} (graph)", self.current(), gone):
            return
        args, kwargs = _given(node.args), {key: _given(value) for key, value in node.kwargs.items()}
        if node.copies:
            self._copy(args[0], args[1], True)
            return
        accesses = node.operation.accesses(args, kwargs, self._read_index)
        for target in node.made:
            if target is not None and (region := of_tensor(target)) is not None:
                accesses.append(MemoryAccess(target, region, True))
        updates = node.operation.updates
        entry, checked = self.begin(EventKind.OPERATION, node.operation.name, accesses, updates=updates)
        result = node.func(*args, **kwargs)
        for target, made in zip(node.made, tensors_in(result), strict=True):
            if target is not None:
                target.copy_(made)
        self.end(entry, checked)


def _given(value: Any) -> Any:
    """An argument of a graph's operation, as it was given."""
    if isinstance(value, Held):
        return value.address.tensor()
    return [_given(part) for part in value] if isinstance(value, list) else value


@final
class CudaRuntime(CudaWindow[StreamClock], PlainRaceRuntime):
    """The race detector behind `torch.cuda`. Made by `cuda_on_cpu`."""

    _tracer: CudaRaceTracer

    def __init__(self, *, reuse: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self._tracer.blocks = Blocks() if reuse else None

    def _new_tracer(self) -> CudaRaceTracer:
        return CudaRaceTracer(self, self._detector)

    def _changed(self) -> AbstractContextManager[None]:
        return replaced(self)

    def launch_kernel(self, name: str, interpret: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """See `CudaWindow`: it runs at once, or at each replay of the graph that is captured."""
        __tracebackhide__ = True

        def launch() -> None:
            __tracebackhide__ = True
            KernelLaunch(name, self._tracer).run(lambda: interpret(*args, **kwargs))

        if self.capturing:
            self._tracer.capture.nodes.append(launch)
        else:
            launch()

    def _is_idle(self, stream: Stream) -> bool:
        clock = self._known_stream(stream)
        return self._detector.clocks.host.knows(clock.number, clock.work)


@final
class CudaSimTracer(CudaTracer[SimAllocation], SimTracer):
    """Enqueues the device's operations, of code that names its devices. A graph is a list of operations to enqueue."""

    def resize(self, whole: torch.Tensor, nbytes: int, resize: Callable[[], object]) -> None:
        """See `CudaTracer`: the block stays where it is, and its content is gone once its stream has got here.

        Raises:
            NotModelledError: it would become larger than it was first.
        """
        block = self.use_on_device(whole).block
        if block is None or nbytes > block.memory.nbytes:
            raise NotModelledError.of("UntypedStorage.resize_ beyond the first size", "allocate a new tensor")
        self.resized[whole.untyped_storage()._cdata] = nbytes
        if not nbytes:
            self._device.wipe(block.stream, block.memory)

    def new(self, like: NewTensor) -> torch.Tensor:
        """New device memory of the current stream; while a graph is captured, of the graph, which keeps it."""
        tensor = super().new(like)
        if self.capture is not None:
            self.allocations.add(tensor, SimAllocation(MemoryKind.DEVICE))
        return tensor

    # Graphs

    def _new_capture(self) -> list[Task]:
        return []

    def _of_copy(self, pinned: torch.Tensor) -> View | torch.Tensor:
        return super()._of_copy(pinned) if self.capture is None else self._address(pinned)

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
        """Enqueues the operations of a graph; random numbers are drawn anew."""
        with self.lock:
            for task in capture:
                work = task.work
                if isinstance(work, Call) and work.seed is not None:
                    work = attrs.evolve(work, seed=new_seed())
                self.enqueue(f"{task.name} (graph)", work, task.writes, reads_host=task.reads_host)

    def _wait(self) -> None:
        self.refuse_capture("the host waits for the device")
        super()._wait()


@final
class CudaSimRuntime(CudaWindow[DeviceStream], SimRuntime):
    """The simulated device behind `torch.cuda`. Made by `cuda_on_cpu`."""

    _tracer: CudaSimTracer

    def _new_tracer(self) -> CudaSimTracer:
        return CudaSimTracer(self, self._device, self._allocator)

    def _changed(self) -> AbstractContextManager[None]:
        return replaced(self)

    def launch_kernel(self, name: str, interpret: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        """See `CudaWindow`: it is enqueued as a whole, on stand-ins for its tensors."""

        def late(*stand_ins: Any, **named: Any) -> None:
            with untraced():
                interpret(*(tuple(value) if isinstance(value, list) else value for value in stand_ins), **named)

        self._tracer.enqueue_kernel(name, late, args, kwargs, tensors_of(args, kwargs))

    def _is_idle(self, stream: Stream) -> bool:
        return not self.pending(stream)


@overload
def cuda_on_cpu(
    device: Literal["race", "race:prompt"] = "race",
    *,
    on_race: OnRace = "raise",
    name: str = ...,
    memory: int = ...,
    capability: tuple[int, int] = ...,
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
    reuse: bool = False,
) -> CudaRuntime: ...
@overload
def cuda_on_cpu(
    device: str,
    *,
    on_race: OnRace = "raise",
    seed: int = 0,
    name: str = ...,
    memory: int = ...,
    capability: tuple[int, int] = ...,
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
    reuse: bool = False,
) -> CudaRuntime | CudaSimRuntime: ...
def cuda_on_cpu(
    device: str = RACE,
    *,
    on_race: OnRace = "raise",
    seed: int = 0,
    name: str = "cuda_on_cpu",
    memory: int = 80 << 30,
    capability: tuple[int, int] = (9, 0),
    stands_for: Mapping[str, Callable[..., Any]] | None = None,
    note_waits: bool = False,
    reuse: bool = False,
) -> CudaRuntime | CudaSimRuntime:
    """A window in which torch has a device `cuda:0` that is the CPU, and every access to its memory is checked.

    Or, on the simulated device, one in which streams run late, in an order that a scheduler picks, so that a race makes
    wrong values.

    Code that says `device="cuda"`, `.cuda()`, `pin_memory()`, `torch.cuda.Stream` and so on runs as it is, in this
    thread and in threads that start inside of the window. A GPU is not used. After the window torch is as it was.

    Example:
        with cuda_on_cpu(on_race="collect") as rt:
            engine.run()
        for race in rt.races:
            print(race)

    Args:
        device: a name of `open_device`: `"race"`, the race detector; `"race:prompt"`, where an event is complete as
            soon as the host asks; or `"sim"`, the simulated device, where `"sim:lazy"` names the scheduler.
        on_race: `"raise"` the first race as `Race` where it happens, and once more at the end of the window if the
            code has caught it; or `"collect"` them in `races`.
        seed: of the scheduler of the simulated device.
        name: of the device, as `torch.cuda` answers.
        memory: of the device, in bytes.
        capability: of the device, major and minor.
        stands_for: code that needs a GPU -> its replacement: `package.module.attribute` (the launcher of a Triton
            kernel) or `namespace::operator` (an operator without a CPU kernel) -> a function of torch operations,
            whose accesses are seen, or a `declared_kernel`. Triton kernels that are interpreted need none.
        note_waits: see `RaceRuntime`.
        reuse: give freed blocks of a size out again, the newest first, as torch does on a GPU: then addresses come
            again, which tables keyed by `data_ptr()` meet. The simulated device always does. `UntypedStorage.resize_`
            is torch's own error then.

    Returns:
        the runtime, for `with`.

    Raises:
        ArgumentError: on entry: a window is open, or a name of `stands_for` does not exist.
    """
    described: dict[str, Any] = {"name": name, "memory": memory, "capability": capability}
    described["stands_for"] = stands_for or {}
    tool, _, rest = device.partition(":")
    if tool == SIM:
        return CudaSimRuntime(**described, seed=seed, scheduler=rest or "random")
    if device not in (RACE, f"{RACE}:{PROMPT}"):
        problem = f"cuda_on_cpu of device {device!r}"
        raise ArgumentError(problem, device, "use 'race', 'race:prompt', 'sim' or 'sim:NAME'")
    fences: Literal["eager", "lazy"] = "eager" if rest else "lazy"
    settings: dict[str, Any] = {"on_race": on_race, "note_waits": note_waits, "reuse": reuse}
    return CudaRuntime(**described, **settings, fences=fences, hint_for=torch_hint_for)


def declared_kernel(
    *, reads: Sequence[str] = (), writes: Sequence[str] = (), rows: Mapping[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declares the accesses of a kernel by the names of its arguments; lists and tuples of tensors too.

    Inside of a window of `cuda_on_cpu` a call is one operation of the current stream with these accesses. The function
    runs at once, unseen; on the simulated device it runs late, and its return value is dropped. Elsewhere it is the
    function. Pass it as `stands_for`, or decorate the launcher.

    Args:
        reads: names of arguments that it reads.
        writes: names of arguments that it writes; arguments that are read and written stand in both.
        rows: name of an argument -> that of the argument which names the rows of it that are used: an index tensor, a
            list of numbers or a slice. The others are used as a whole.

    Raises:
        ArgumentError: the function has no such argument.
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        chosen = rows or {}
        for name in (*reads, *writes, *chosen, *chosen.values()):
            if name not in signature.parameters:
                problem = f"{function.__name__} has no argument {name!r}"
                raise ArgumentError(problem, name, "name arguments of the function")

        @functools.wraps(function)
        def launch(*args: P.args, **kwargs: P.kwargs) -> T:
            rt = open_window()
            if rt is None:
                return function(*args, **kwargs)
            arguments, names = signature.bind(*args, **kwargs).arguments, tuple(kwargs)
            positional = len(args)  # the kernel may run late, and must keep no tensor

            def kernel(*values: Any) -> T:
                return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

            with rt.lock:
                launched: T = rt.launch(
                    raw_kernel(kernel),
                    *args,
                    *kwargs.values(),
                    reads=_tensors(arguments, reads, chosen),
                    writes=_tensors(arguments, writes, chosen),
                    name=function.__name__,
                )
                return launched

        return launch

    return declare


def _tensors(arguments: dict[str, Any], names: Sequence[str], rows: Mapping[str, str]) -> list[torch.Tensor]:
    values = [_rows(arguments[name], arguments[rows[name]]) if name in rows else arguments.get(name) for name in names]
    flat = [part for value in values for part in (value if isinstance(value, list | tuple) else (value,))]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def _rows(tensor: torch.Tensor, rows: Any) -> list[torch.Tensor]:
    """The rows of a tensor that an argument names, in pieces of neighbours. The tool's own look orders nothing."""
    if isinstance(rows, slice):
        return [tensor[rows]]
    with untraced():
        numbers = rows.tolist() if isinstance(rows, torch.Tensor) else list(rows)
        chosen = sorted({number + len(tensor) if number < 0 else number for number in numbers})
        ends = [row for row, after in itertools.zip_longest(chosen, chosen[1:]) if row + 1 != after]
        starts = [row for row, before in zip(chosen, [None, *chosen], strict=False) if row - 1 != before]
        return [tensor[start : end + 1] for start, end in zip(starts, ends, strict=True)]
