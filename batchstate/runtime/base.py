"""The protocol that a device has to speak, and everything that does not depend on the device.

The device runs what is enqueued on a `Stream` in order, and a `Fence` is a point in it. A copy to the host is a
`Download`, whose pinned memory comes back when its values were taken out.
"""

import abc
import contextlib
import itertools
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, SupportsIndex, TypeVar, Unpack, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate import invariants, levels
from batchstate.errors import ArgumentError, CaptureError, DeviceError, OwnerThreadError, ShapeError
from batchstate.invariants import times_checked
from batchstate.runtime.memory import (
    NUMPY_DTYPES,
    KnownMemory,
    MappedMemory,
    PackedUpload,
    Staging,
    StagingBlock,
    numpy_dtype,
    packed_places,
)
from batchstate.runtime.streams import Fence, Stream
from batchstate.violations import Code, Where

if TYPE_CHECKING:
    from batchstate.runtime.agreement import Agreement

__all__ = ["Counters", "Download", "Fence", "OfThisProcess", "Runtime", "Stream", "check_fence", "foreign_fence"]


@attrs.frozen
class DoneFence:
    """A complete fence: a device that runs everything at once records it."""

    def query(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


def foreign_fence(fence: object) -> ArgumentError:
    """The error for a fence that another runtime recorded: this one cannot know when it completes."""
    return ArgumentError(f"{fence!r} was not recorded by this runtime", fence, "record fences with `Runtime.record`")


def check_fence(fence: Any, operation: str, *, needed: bool = False) -> None:
    """Refuses (ArgumentError) anything but an object with a method `query()`, or None unless a fence is `needed`."""
    if fence is None and not needed:
        return
    if isinstance(fence, type) or not callable(getattr(fence, "query", None)):
        problem = f"{operation}: expected a fence as `after`, got {fence!r}"
        raise ArgumentError(problem, fence, "pass what `Runtime.record()` returns")


@attrs.define
class Counters:
    """Running totals of one runtime: the cost of steps, the same on every machine. Subtract two snapshots.

    Attributes:
        host_to_device_copies: uploads; a packed upload of many arrays is one.
        host_to_device_bytes: bytes of those copies, alignment included.
        device_to_host_copies: rows brought to the host by calls named for it.
        device_operations: kernels launched through `Runtime.launch` (a replayed graph or fused kernel is one).
        forced_syncs: times the host waited for the device (`synchronize`, `resolve`, a blocking read-back).
        fence_waits: times the host waited for a single fence.
        check_reads: read-backs made by checks at level `full`; they are in none of the other figures.
        device_allocations: device tensors allocated through the runtime.
        staging_allocations: staging blocks allocated; does not grow in the steady state.
        stream_waits: times a stream was made to wait for a fence, on the device.
        cross_stream_uses: times memory was kept alive for another stream than the one that made it.
    """

    host_to_device_copies: int = 0
    host_to_device_bytes: int = 0
    device_to_host_copies: int = 0
    device_operations: int = 0
    forced_syncs: int = 0
    fence_waits: int = 0
    check_reads: int = 0
    device_allocations: int = 0
    staging_allocations: int = 0
    stream_waits: int = 0
    cross_stream_uses: int = 0

    def snapshot(self) -> "Counters":
        """A copy that no longer counts."""
        return attrs.evolve(self)

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(
            **{field.name: getattr(self, field.name) - getattr(before, field.name) for field in attrs.fields(Counters)}
        )


_STAGING_REUSED = Code.STAGING_REUSED
FLAT = (1,)  # the strides of a vector
MOST_STEPS = 64  # in flight: there are as many staging blocks of each size
MOST_SYNCHRONISED = 64  # streams that are remembered as synchronised with one tensor

T = TypeVar("T")
_log = logging.getLogger("batchstate")
Array = npt.NDArray[Any]
Owners = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Of rows: the number of the owner of each, 0 for nobody."""


class OfThisProcess:
    """Base of objects that belong to a runtime of this process: they can be neither copied nor pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:  # `copy` and `deepcopy` call it too
        problem = f"{self!r} cannot be copied or pickled: it belongs to a runtime of this process"
        raise DeviceError(problem, type(self).__name__, "send host values, and make it anew on the other side")


@final
class Download(OfThisProcess):
    """Several device tensors on their way to the host in one copy. Made by `Runtime.download`.

    The copy lands in pinned memory that is lent to it until its values are taken out. A dropped download gives the
    memory back when its copy has run. `done` is the fence behind the copy, `step` that in which it was asked for.
    """

    _lent = False  # until it is made
    _arrays: list[Array] | None = None  # until they are taken out

    def __init__(
        self,
        runtime: "Runtime",
        packed: torch.Tensor | None,
        kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...], int]],
        name: str,
        stream: Stream,
    ) -> None:
        """Copies a vector of bytes, or of a dtype that numpy has, or nothing, on `stream`, the current one.

        `kinds` are dtype, shape and bytes of each tensor in it.
        """
        self._runtime, self._kinds, self.name, self._stream, self.step = runtime, kinds, name, stream, runtime.step
        landing = runtime._landing
        self._block = block = landing.take(0 if packed is None else packed.nbytes)
        self._lending = block.lending
        try:
            if packed is not None:
                runtime._copied_to_host(block, packed)
            self.done = runtime._fence_behind(stream)
        except BaseException:
            landing.release(block, runtime.record(stream), self.step, stream.key)  # the copy may be under way
            raise
        runtime.counters.device_to_host_copies += 1
        self._lent = True

    def __del__(self) -> None:
        if self._lent:
            self._runtime._landing.release(self._block, self.done, self.step, self._stream.key)

    def __repr__(self) -> str:
        return f"Download({self.name!r}, {len(self._kinds)} arrays)"

    def ready(self) -> bool:
        """Whether `resolve` would return at once. Never waits; not to be asked while a stream is captured."""
        return self._arrays is not None or self.done.query()

    def resolve(self) -> list[Array]:
        """The values, in memory of their own. Waits for this copy and for nothing behind it.

        Raises:
            CaptureError: the current stream is being captured; its fences may then not be queried.
            Violation: STAGING_REUSED, at `cheap`: the memory was given to another copy meanwhile.
        """
        arrays = self._arrays
        if arrays is None:
            runtime, block = self._runtime, self._block
            if runtime.capturing:
                runtime.refuse_capture(f"{self.name}: resolve")
            if not self.done.query():
                self.done.wait()
            self._lent = False  # from here on the block is given back below, or is already another's
            if levels.cheap:
                if block.lending == self._lending:
                    times_checked[_STAGING_REUSED] += 1
                else:
                    invariants.staging_reused(
                        self._lending, block.lending, object=self, operation="resolve", step=self.step
                    )
            arrays, start, contents = [], 0, block.memory
            for dtype, shape, nbytes in self._kinds:
                arrays.append(np.ndarray(shape, dtype, bytearray(contents[start : start + nbytes])))
                start += nbytes
            if runtime.notes_host:
                runtime.host_accesses(block.tensor, 0, start, "download: take out", writes=False)
            self._arrays = arrays
            runtime._landing.give_up(block)
        return arrays


@final
@attrs.define(eq=False)
class Owner:
    """A thread that owns runtimes.

    Attributes:
        ident: its number, or 0 once it has ended, since numbers are used again; in a forked process 0 from the start.
    """

    ident: int


@final
class _Lifetime:
    def __init__(self) -> None:
        self.owner = Owner(threading.get_ident())

    def __del__(self) -> None:
        self.owner.ident = 0


@final
class _ThisThread(threading.local):
    def __init__(self) -> None:  # called anew in each thread; what it sets goes when the thread ends
        self.lifetime = _Lifetime()


_this_thread = _ThisThread()
if hasattr(os, "register_at_fork"):  # the child has copies of pools, and no device of its own
    os.register_at_fork(after_in_child=lambda: setattr(_this_thread, "lifetime", _Lifetime()))


class Runtime(OfThisProcess, abc.ABC):
    """One device as the library uses it. Belongs to the thread that made it; `open_runtime` makes the one for a name.

    A new kind of device implements the methods marked abstract; the rest is shared.

    Attributes:
        device: where `device_empty` allocates.
        steps_in_flight: steps that may be under way at once, the one being planned included. Staging is sized by it.
        step: number of the present step, raised by `next_step`.
        counters: running totals.
        owner: the thread that may use it.
        new_version: gives a number that no other value of this runtime has.
        inspecting: whether a check looks at device memory: whatever it finds there, it reads for nobody.
        told: tools beside every runtime of the process that `own_rows` and `name_memory` tell.
        remember_memory: whether every runtime of a CPU remembers from its beginning which memory is the device's. Set
            where `no_hidden_sync` is imported.
    """

    inspecting: ClassVar[bool] = False
    told: ClassVar[list["Runtime"]] = []
    remember_memory: ClassVar[bool] = False

    def __init__(self, device: torch.device, *, steps_in_flight: int = 2) -> None:
        if isinstance(steps_in_flight, bool) or not 1 <= operator.index(steps_in_flight) <= MOST_STEPS:
            problem = f"expected steps_in_flight of 1 to {MOST_STEPS}, got {steps_in_flight}"
            remedy = "declare 1 for a synchronous engine, 2 for one step of overlap"
            raise ArgumentError(problem, steps_in_flight, remedy)
        self.device = device
        self.steps_in_flight = operator.index(steps_in_flight)
        self.step = 0
        self.counters = Counters()
        self.owner = _this_thread.lifetime.owner
        self._staging = Staging(self._allocate_staging, depth=self.steps_in_flight + 1)
        self._landing = Staging(self._allocate_staging, depth=self.steps_in_flight + 1)
        self.new_version: Callable[[], int] = itertools.count(1).__next__
        self._index_spaces: dict[str, int] = {}
        self._persistent: list[weakref.ref[torch.Tensor]] = []
        self._known_memory = KnownMemory() if self.remember_memory and device.type == "cpu" else None
        self._suspension_logged = False
        self.agreement: Agreement | None = None
        levels.opened()

    def __repr__(self) -> str:
        kind, device = type(self).__name__, str(self.device)
        return f"{kind}(device={device!r}, steps_in_flight={self.steps_in_flight}, step={self.step})"

    def join_group(self, *, size: SupportsIndex) -> "Agreement":
        """Makes the pools of this runtime count a fence as complete when all ranks of a group do; see `Agreement`.

        To be called once, before any pool is made. The group has `size` ranks.
        """
        self.check_owner("join_group")
        ranks = operator.index(size)
        if isinstance(size, bool) or ranks < 1:
            problem = f"join_group: expected a size of 1 or more ranks, got {size}"
            raise ArgumentError(problem, size, "say how many ranks exchange reports, this one included")
        if self.agreement is not None or self.step or self._index_spaces:
            pools = f"has pools already, of {', '.join(self._index_spaces) or 'nothing'}"
            begun = "is in a group" if self.agreement else "has begun to work" if self.step else pools
            remedy = "join once, before any pool is made: what was freed before has no number that ranks share"
            raise ArgumentError(f"join_group of {self!r}, which {begun}", self.step, remedy)
        from batchstate.runtime.agreement import Agreement  # few join one

        self.agreement = Agreement(ranks, self.check_owner)
        return self.agreement

    # The methods of a device

    @abc.abstractmethod
    def _pinned(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of host memory that a copy can read without the host waiting."""

    @abc.abstractmethod
    def _device_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, allocated on the current stream."""

    @abc.abstractmethod
    def _copied_to_device(self, block: StagingBlock, nbytes: int, into: torch.Tensor | None) -> torch.Tensor:
        """New device memory uint8[nbytes], or `into`, with a copy of the front of `block`. Never waits."""

    @abc.abstractmethod
    def _copied_to_host(self, block: StagingBlock, source: torch.Tensor) -> None:
        """Copies a vector of a dtype that numpy has to the front of `block`, on the current stream. Never waits."""

    @abc.abstractmethod
    def _read_back(self, source: torch.Tensor) -> Array:
        """Waits for the current stream and returns a host copy that shares no memory with `source`."""

    @abc.abstractmethod
    def _wait_for_device(self) -> None:
        """Blocks the host until the device has run everything."""

    @abc.abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream."""

    @property
    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream that operations of this thread go to."""

    @abc.abstractmethod
    def use(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """A window in which `stream` is the current one."""

    @abc.abstractmethod
    def record(self, stream: Stream | None = None) -> Fence:
        """A fence behind everything enqueued on `stream` (the current one by default) so far."""

    def _fence_behind(self, stream: Stream) -> Fence:
        """`record` without the check for a capture, in a call that has made it before."""
        return self.record(stream)

    @abc.abstractmethod
    def _stream_wait(self, stream: Stream, fence: Fence) -> None:
        """Makes `stream` wait for `fence`, on the device."""

    @abc.abstractmethod
    def _keep_alive(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps the memory of `tensor` from being reused until `stream` has run what it has enqueued by then."""

    @property
    @abc.abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    # Ownership and steps

    def check_owner(self, operation: str) -> None:
        """Refuses (OwnerThreadError) calls from a thread other than the one that made the runtime."""
        if threading.get_ident() != self.owner.ident:
            name = threading.current_thread().name
            if not self.owner.ident:
                name = f"{name}, of another process or later than the thread that made it"
            problem = f"{operation} was called from thread {name!r}, which does not own {self!r}"
            remedy = "make one runtime per thread and process, or pass the call to the owning thread"
            raise OwnerThreadError(problem, name, remedy)

    def stream_for(self, action: str) -> Stream:
        """The current stream, for a call that its thread may make now: OwnerThreadError, CaptureError."""
        if threading.get_ident() != self.owner.ident:
            self.check_owner(action)
        if self.capturing:
            self.refuse_capture(action)
        return self.current_stream

    def next_step(self) -> int:
        """Begins the next step; its number. STAGING_OVERRUN, at `cheap`: more are in flight than were declared."""
        if threading.get_ident() != self.owner.ident:
            self.check_owner("next_step")
        if levels.cheap and not (self.capturing and self.checks_suspended()):
            oldest = self._staging.reap()
            if oldest is not None:
                invariants.staging_overrun(
                    *oldest, self.step + 1, self.steps_in_flight, object=self, operation="next_step", step=self.step
                )
        self.step += 1
        return self.step

    # Index spaces

    def declare_indices(self, space: str, capacity: SupportsIndex) -> None:
        """Says how many indices an index space has, 0 included, so that columns and extras that hold them are checked.

        Pools declare `slot`, `page`, `location`, `host_location` and `state`; the largest of several pools counts.
        """
        self.check_owner("declare_indices")
        number = operator.index(capacity)
        if not space or number < 1:
            problem = f"declare_indices: expected a name and a capacity of 1 or more, got {space!r} and {number}"
            raise ArgumentError(problem, space, "name the index space, and say how many indices it has")
        self._index_spaces[space] = max(number, self._index_spaces.get(space, 0))
        if self.agreement is not None:
            self.agreement.note_memory(space, number)

    def check_indices(self, indices: Array, space: str, *, declared: bool = True, **where: Unpack[Where]) -> None:
        """Refuses integers of any shape that are no indices of a space: negative ones, or beyond its capacity. O(n).

        A space that was not declared has no end, unless it has to be `declared`.

        Raises:
            ArgumentError: nothing has declared the space.
            Violation: SENTINEL_ESCAPED, SLOT_OUT_OF_RANGE.
        """
        capacity = self._index_spaces.get(space)
        if capacity is None and declared:
            remedy = f"make the pool first, or call `runtime.declare_indices({space!r}, capacity)`"
            raise ArgumentError(f"the capacity of index space {space!r} is not known", space, remedy)
        flat = indices.reshape(-1)
        invariants.sentinel_escaped(flat, **where)
        if capacity is not None:
            invariants.slot_out_of_range(flat, capacity, **where)

    # Memory

    def device_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory that lives as long as its users."""
        self.refuse_capture("allocating device memory")
        return self._allocated(self._device_memory(shape, dtype))

    def _allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counters.device_allocations += 1
        if self._known_memory is not None:
            self._known_memory.add(tensor)
        return tensor

    def device_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> torch.Tensor:
        """Zeroed device memory for tables that outlive a step. Not counted as an operation. `name` is for reports."""
        self.check_owner("device_zeros")
        # A table is written in place for as long as it lives; only inference mode may write an inference tensor.
        with torch.inference_mode(False):
            tensor = self.device_empty(shape, dtype).zero_()
        if name:
            self.name_memory(tensor, name)
        self._persistent = [reference for reference in self._persistent if reference() is not None]
        self._persistent.append(weakref.ref(tensor))
        return tensor

    def mapped_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> MappedMemory:
        """Zeroed pinned host memory that kernels can address too, and that outlives a step; `name` is for reports."""
        self.check_owner("mapped_zeros")
        self.refuse_capture("allocating host memory")
        with torch.inference_mode(False):
            mapped = self._mapped(shape, dtype)
        mapped.bytes[...] = 0  # by the host: nothing is enqueued, and no stream has to be waited for
        if name:
            self.name_memory(mapped.device, name)
        return mapped

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedMemory:
        """Uninitialised. Where host and device share their memory, any will do."""
        memory = self._device_memory(shape, dtype)
        return MappedMemory(memory, memory)

    def _allocate_staging(self, nbytes: int) -> torch.Tensor:
        self.counters.staging_allocations += 1
        return self._pinned(nbytes)

    # Transfers

    def upload(self, arrays: Sequence[Array], *, into: torch.Tensor | None = None) -> PackedUpload:
        """Copies host arrays to the device in one copy, on the current stream. The host does not wait.

        The arrays may be changed afterwards: they were copied into staging memory, which is reused only when its fence
        is complete.

        With `into`, device memory uint8[nbytes], that is written and no new memory; the caller sees to it that no
        earlier forward still reads it.

        Raises:
            CaptureError: the current stream is being captured; staging memory would be baked into the graph.
            DtypeError: an array of anything but numbers.
            ShapeError: `into` is too small.
        """
        if threading.get_ident() != self.owner.ident:
            self.check_owner("upload")
        if self.capturing:
            self.refuse_capture("an upload")
        places, nbytes = packed_places(arrays)
        if into is not None:
            if into.numel() < nbytes:
                problem = f"upload: expected at least {nbytes} bytes of memory, got {into.numel()}"
                raise ShapeError(problem, nbytes, "pass a larger tensor as `into`")
            into = into[:nbytes]
        block = self._staging.take(nbytes)
        if self.notes_host:
            self.host_accesses(block.tensor, 0, nbytes, "staging: fill", writes=True)
        for array, (start, _, _) in zip(arrays, places, strict=True):
            block.write(array, start)
        stream = self.current_stream
        try:
            buffer, ready = self.copied(block, nbytes, stream, into=into)
        except BaseException:
            self._staging.release(block, self.record(stream), self.step, stream.key)  # it may be under way
            raise
        self._staging.release(block, ready, self.step, stream.key)
        return PackedUpload(buffer, stream, ready, places)

    def copied(
        self, block: StagingBlock, nbytes: int, stream: Stream, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Fence]:
        """The first bytes of a block, copied on `stream`, the current one, and a fence behind that. For the library."""
        buffer = self._copied_to_device(block, nbytes, into)
        if into is None:
            self._allocated(buffer)
        counters = self.counters
        counters.host_to_device_copies += 1
        counters.host_to_device_bytes += nbytes
        return buffer, self._fence_behind(stream)

    def download(
        self, tensors: Sequence[torch.Tensor], *, name: str = "download", stream: Stream | None = None
    ) -> Download:
        """Starts to bring device tensors to the host in one copy, on the current stream. The host does not wait.

        `stream` is the current one, on which they were made, where the caller has asked for it and for a capture.

        Raises:
            CaptureError: the current stream is being captured.
            DtypeError: a dtype that numpy lacks.
        """
        if stream is None:
            self.check_owner("download")
            self.refuse_capture("a download")
            stream = self.current_stream
        kinds, parts = [], []
        for tensor in tensors:
            if tensor.requires_grad:
                tensor = tensor.detach()  # else pinned memory would keep the graph
            dtype, nbytes = NUMPY_DTYPES.get(tensor.dtype), tensor.nbytes
            if dtype is None:
                dtype = numpy_dtype(tensor.dtype)  # refuses
            kinds.append((dtype, tensor.shape, nbytes))
            if nbytes:
                # Not by a view: torch keeps the stride of a single element, whatever it is.
                flat = tensor.stride() == FLAT
                parts.append(tensor if flat else tensor.contiguous().as_strided((tensor.numel(),), FLAT))
        if len(parts) > 1:
            parts = [part.view(torch.uint8) for part in parts]
            parts = [self.launch(torch.cat, parts, reads=parts, name=f"{name}: pack")]
        return Download(self, parts[0] if parts else None, kinds, name, stream)

    def read_back(self, tensor: torch.Tensor) -> Array:
        """Brings a device tensor to the host. Waits for the device: counted as a forced sync."""
        self.check_owner("read_back")
        self.refuse_capture("a read-back")
        self.counters.forced_syncs += 1
        self.counters.device_to_host_copies += 1
        return self._read_back(tensor)

    def inspect(self, tensor: torch.Tensor) -> Array:
        """The same as `read_back` for checks: counted in `check_reads` and nowhere else."""
        self.refuse_capture("a check's read-back")
        self.counters.check_reads += 1
        Runtime.inspecting = True
        try:
            return self._read_back(tensor)
        finally:
            Runtime.inspecting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the runtime; where an error ends the window, without waiting for the device."""
        if error is None:
            self.close()

    def close(self) -> None:
        """Waits until the device has run everything, and gives the staging memory back. Values stay valid."""
        self.synchronize()
        self._staging.clear()
        self._landing.clear()

    def synchronize(self) -> None:
        """Waits until the device has run everything: counted as a forced sync."""
        self.check_owner("synchronize")
        self.refuse_capture("synchronize")
        self.counters.forced_syncs += 1
        self._wait_for_device()

    # Operations and order

    def launch(
        self,
        operation: Callable[..., T],
        *args: Any,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        name: str = "",
        operations: int = 1,
        **kwargs: Any,
    ) -> T:
        """Runs `operation(*args, **kwargs)` on the current stream, counts it, and returns its result.

        Args:
            operation: enqueues kernels, or replays one graph.
            *args: for `operation`.
            reads: device tensors that it reads, for the race detector.
            writes: device tensors that it writes in place.
            name: for reports.
            operations: how many kernels it enqueues.
            **kwargs: for `operation`.
        """
        if threading.get_ident() != self.owner.ident:
            self.check_owner(name or "launch")
        result = operation(*args, **kwargs)
        self.counters.device_operations += operations
        if self._known_memory is not None and isinstance(result, torch.Tensor):
            self._known_memory.add(result)
        return result

    def wait(self, fence: Fence, *, stream: Stream | None = None) -> None:
        """Makes `stream` (the current one by default) wait for `fence`, on the device. The host does not wait."""
        self.counters.stream_waits += 1
        self._stream_wait(stream or self.current_stream, fence)

    def use_on_current_stream(
        self,
        tensor: torch.Tensor,
        made_on: Stream,
        ready: Fence | None = None,
        *,
        synchronised: dict[object, Stream] | None = None,
        current: Stream | None = None,
    ) -> torch.Tensor:
        """Makes `tensor` safe to use on the current stream, whichever stream made it, and returns it.

        If that is another stream, the current one waits for `ready` (or for all that `made_on` has enqueued), and the
        memory is kept until the current stream is done with it: an order of execution alone does not protect memory.

        `synchronised` are the streams that have it already, by their keys, if the memory is not written again: nothing
        is done for these, and a new one is added. `current` is the current stream, where the caller has asked for it.
        """
        current = current or self.current_stream
        if current is made_on or current == made_on or (synchronised is not None and current.key in synchronised):
            return tensor
        if synchronised is not None and len(synchronised) >= MOST_SYNCHRONISED:
            del synchronised[next(iter(synchronised))]  # an engine may make its streams anew in each step
        if not self.capturing:
            self.wait(ready or self.record(made_on), stream=current)
            self.counters.cross_stream_uses += 1
            self._keep_alive(tensor, current)
            if synchronised is not None:
                synchronised[current.key] = current
        return tensor

    def use_part_on_current_stream(self, packed: PackedUpload, index: int) -> torch.Tensor:
        """Array `index` of a packed upload, safe to use on the current stream."""
        return self.use_on_current_stream(
            packed.view(index), packed.stream, packed.ready, synchronised=packed.synchronised
        )

    def checks_suspended(self) -> bool:
        """Whether checks that would touch the device must not run now, because the stream is captured. Logs it once."""
        suspended = self.capturing
        if suspended and not self._suspension_logged:
            self._suspension_logged = True
            _log.warning("%r: checks that read the device are suspended while a graph is captured", self)
        return suspended

    def refuse_capture(self, action: str) -> None:
        """Refuses (CaptureError) an action while the current stream is captured."""
        if self.capturing:
            problem = f"{action} is not possible while the stream is captured"
            raise CaptureError(problem, None, "prepare inputs before the capture, into buffers with fixed addresses")

    # For test tools. The first three are hooks that a tool overrides: here they do nothing.

    notes_host: ClassVar[bool] = False
    """Whether `host_accesses` does something."""

    def name_memory(self, tensor: torch.Tensor, name: str) -> None:
        """Names the memory of a tensor, for reports."""
        for tool in self.told:
            tool.name_memory(tensor, name)

    def own_rows(self, memory: torch.Tensor, owners: Owners, *, by_step: bool = False) -> None:
        """Says whose the rows of device memory are: reading what an earlier owner has left is then `LEFTOVER_READ`.

        `owners` returns for rows int64[n] the generation of each owner, int64[n], and 0 for nobody; `by_step` the step,
        where each step writes all rows anew. It must not keep the memory alive.
        """
        for tool in self.told:
            tool.own_rows(memory, owners, by_step=by_step)

    def host_accesses(self, memory: torch.Tensor, start: int, stop: int, name: str, *, writes: bool) -> None:
        """Says that the host, or a peer, is about to use rows `start` to `stop - 1` of memory that the device uses too.

        It is staging memory, memory where a download landed, or mapped memory.
        """

    def known_memory(self) -> KnownMemory:
        """The device memory that was made through the runtime and is alive, from now on if not from the beginning."""
        if self._known_memory is None:
            self._known_memory = KnownMemory()
            for reference in self._persistent:
                if (tensor := reference()) is not None:
                    self._known_memory.add(tensor)
        return self._known_memory
