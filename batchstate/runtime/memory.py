"""The memory that crosses between host and device, the memory that stays, and the dtypes that both have.

Host memory that a copy reads or fills is pinned and lent: it comes back when the fence behind the copy is complete
(`Staging`). Device memory is new for each upload (`PackedUpload`), or stays at its address (`FixedMemory`): the device
orders its reads and writes. `MappedMemory` is host memory that kernels address. `ReadyTensor` is device memory that
other streams may use, each behind the work that made it.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.errors import DeviceError, DtypeError
from batchstate.runtime.streams import Fence, Stream, StreamOrder

Array = npt.NDArray[Any]

_SHARED = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64"
NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _SHARED.split()}
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
BITS = {torch.bfloat16: torch.int16, **dict.fromkeys(FLOAT8, torch.uint8)}
"""Dtypes that numpy lacks, and the integers as which their bits lie on the host and cross to the device.

Zero has no bit set in any of them; `float8_e8m0fnu` has no zero.
"""

TORCH_DTYPES = {ours: theirs for theirs, ours in NUMPY_DTYPES.items()}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Numpy's dtype of the same bits. DtypeError: it has none (bfloat16, for example)."""
    try:
        return NUMPY_DTYPES[dtype]
    except (KeyError, TypeError):
        raise _unshared(dtype) from None


def host_dtype(dtype: torch.dtype) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Numpy's dtype in which values of `dtype` lie on the host, and `dtype` itself if that has their bits alone."""
    return numpy_dtype(BITS.get(dtype, dtype)), dtype if dtype in BITS else None


def as_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that numpy has too: one that it lacks as integers of its size."""
    if tensor.dtype in NUMPY_DTYPES:
        return tensor
    return tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)


def bits_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """`host_dtype`, which names `dtype` in its metadata if it has its bits alone: so `dtype_of_bits` finds it."""
    ours, bits_of = host_dtype(dtype)
    return ours if bits_of is None else np.dtype(ours, metadata={"bits_of": bits_of})


def dtype_of_bits(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The dtype of the values whose bits an array of `bits_dtype` has; None for numbers."""
    return None if dtype.metadata is None else dtype.metadata.get("bits_of")


def torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    """Torch's dtype of the same bits. DtypeError: it has none (strings and objects, for example)."""
    try:
        return TORCH_DTYPES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise _unshared(dtype) from None


def _unshared(dtype: object) -> DtypeError:
    if isinstance(dtype, torch.dtype):
        return DtypeError(f"numpy has no dtype {dtype}", dtype, f"use one of: {', '.join(map(str, TORCH_DTYPES))}")
    return DtypeError(f"expected a torch dtype, got {dtype!r}", dtype, dtype_meant(dtype))


def dtype_meant(value: object) -> str:
    """A remedy: the torch dtype that a value, such as numpy's dtype or a name, stands for."""
    try:
        meant = TORCH_DTYPES[np.dtype(value)] if value is not None else None  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError):
        meant = None
    return f"pass {meant or 'a torch dtype, such as torch.int64'}"


SMALLEST_BLOCK = 1 << 14  # bytes; batch state of a few hundred requests fits
MOST_FRONTS = 64  # sizes of which a block keeps the views


@final
@attrs.define(eq=False)
class StagingBlock:
    """One piece of pinned memory: `tensor` uint8[nbytes], and `bytes` and `memory`, the same as an array and as bytes.

    Attributes:
        lending: number of the present lending, 0 while it is free. A download checks that it still has the block.
    """

    tensor: torch.Tensor
    bytes: npt.NDArray[np.uint8]
    lending: int = 0
    memory: memoryview = attrs.field(init=False, default=attrs.Factory(lambda block: block.bytes.data, takes_self=True))
    _fronts: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict, init=False)

    def front(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The first bytes as a vector, made once for each size."""
        front = self._fronts.get((nbytes, dtype))
        if front is None:
            if len(self._fronts) >= MOST_FRONTS:
                self._fronts.clear()
            with torch.inference_mode(False):  # a view made in inference mode can be written there alone
                front = self._fronts[nbytes, dtype] = self.tensor[:nbytes].view(dtype)
        return front

    def write(self, array: npt.NDArray[Any], start: int) -> None:
        """Copies the elements of an array, in order, to byte `start` and on."""
        try:
            contents = array.data.cast("B")
        except TypeError:  # not contiguous, or without elements
            if not array.size:
                return
            contents = np.ascontiguousarray(array).data.cast("B")
        # Takes half as long as an assignment to a typed view of the block, for which numpy makes three objects.
        self.memory[start : start + contents.nbytes] = contents


@final
@attrs.define(eq=False)
class Staging:
    """Pinned blocks by size, free or in flight.

    The host fills a block once, the copy reads it when the device gets there, and the fence behind the copy says when
    that was. Only this fence gives the block back: not the number of calls, not an index into a ring. So no source is
    refilled in flight, however deep the engine runs. `depth` sets how many blocks are made in advance, and
    STAGING_OVERRUN reports an engine that runs deeper than it declared.

    `allocate` makes uint8[nbytes] of host memory; `depth` blocks of a size are made at its first use.
    """

    allocate: Callable[[int], torch.Tensor]
    depth: int
    _free: dict[int, list[StagingBlock]] = attrs.field(factory=dict, init=False)
    _in_flight: dict[object, deque[tuple[Fence, int, StagingBlock]]] = attrs.field(factory=dict, init=False)
    _lendings: int = attrs.field(default=0, init=False)

    def take(self, nbytes: int) -> StagingBlock:
        """A block of at least `nbytes` that no copy still reads. Never waits; makes a new one if all are in flight."""
        size = SMALLEST_BLOCK if nbytes <= SMALLEST_BLOCK else 1 << (nbytes - 1).bit_length()
        free = self._free.get(size)
        block = free.pop() if free else self._freed(size)
        self._lendings = block.lending = self._lendings + 1
        return block

    def _freed(self, size: int) -> StagingBlock:
        """A block that came back meanwhile, or a new one."""
        self.reap()
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = [self._make(size) for _ in range(self.depth)]
        return free.pop() if free else self._make(size)

    def release(self, block: StagingBlock, fence: Fence, step: int, stream: object = None) -> None:
        """Gives a block back once `fence`, recorded behind the copy that reads it, is complete.

        `stream` is the key of the copying stream: blocks of one stream come back in order, and a busy stream keeps none
        of another's.
        """
        self._in_flight.setdefault(stream, deque()).append((fence, step, block))

    def give_up(self, block: StagingBlock) -> None:
        """Gives back a block that no copy reads or writes any more."""
        block.lending = 0
        self._free.setdefault(block.bytes.size, []).append(block)

    def reap(self) -> tuple[int, Fence] | None:
        """Frees every block whose copy has run; of the oldest copy that has not its step and its fence, or None."""
        oldest: tuple[int, Fence] | None = None
        # A copy: giving up an abandoned download, which a collection of garbage may do here, adds a stream.
        for stream, in_flight in list(self._in_flight.items()):
            while in_flight and in_flight[0][0].query():
                self.give_up(in_flight.popleft()[2])
            if in_flight:
                fence, step, _ = in_flight[0]
                oldest = (step, fence) if oldest is None or step < oldest[0] else oldest
            else:
                self._in_flight.pop(stream, None)
        return oldest

    def clear(self) -> None:
        """Lets go of the blocks that are free."""
        self.reap()
        self._free.clear()

    def _make(self, size: int) -> StagingBlock:
        tensor = self.allocate(size)
        array: Any = tensor.numpy()
        return StagingBlock(tensor, array)


ALIGNMENT = 16  # each array starts at a multiple of so many bytes: the widest load that a kernel makes

Place = tuple[int, "np.dtype[Any]", tuple[int, ...]]
"""Where an array starts, in bytes, its dtype and its shape."""


def packed_places(arrays: Sequence[npt.NDArray[Any]], first: int = 0) -> tuple[list[Place], int]:
    """The place of each array in the packed buffer, from byte `first` on, and its size. DtypeError: no numbers."""
    places: list[Place] = []
    size = first
    for array in arrays:
        dtype = array.dtype
        if dtype.kind not in "biuf":  # the bytes of an object are its address
            torch_dtype(dtype)
        places.append((size, dtype, array.shape))
        size += array.nbytes + ALIGNMENT - 1 & -ALIGNMENT
    return places, size


def view_at(buffer: torch.Tensor, at: Place) -> torch.Tensor:
    """The array at a place of uint8[nbytes]. A write into it in place counts as one into the buffer."""
    start, dtype, shape = at
    return strided(buffer.view(torch_dtype(dtype)), start // dtype.itemsize, shape)


def strided(typed: torch.Tensor, first: int, shape: tuple[int, ...]) -> torch.Tensor:
    """`shape` from element `first` on; of more than one dimension in one call, instead of a slice and a view."""
    if len(shape) == 1:
        return typed[first : first + shape[0]]
    strides, size = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = size
        size *= shape[axis]
    return typed.as_strided(shape, strides, typed.storage_offset() + first)


@final
class PackedUpload:
    """The device side of several host arrays, uploaded in one copy; a view of each is made at its first use.

    Attributes:
        buffer: uint8[nbytes] on the device.
        stream: that ran the copy.
        ready: the fence behind the copy.
        places: of the arrays.
        synchronised: other streams that use the buffer, by their keys; see `Runtime.use_on_current_stream`.
        write_count: torch's count of writes in place into the buffer when it was uploaded; None for inference tensors.
    """

    __slots__ = ("_typed", "_views", "buffer", "places", "ready", "stream", "synchronised", "write_count")

    def __init__(self, buffer: torch.Tensor, stream: Stream, ready: Fence, places: Sequence[Place]) -> None:
        self.buffer, self.stream, self.ready, self.places = buffer, stream, ready, places
        try:
            self.write_count: int | None = buffer._version
        except RuntimeError:  # of an inference tensor
            self.write_count = None
        self.synchronised: dict[object, Stream] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._typed: dict[np.dtype[Any], torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"PackedUpload({len(self.places)} arrays in {self.buffer.numel()} bytes)"

    def view(self, index: int) -> torch.Tensor:
        """The device side of array `index`, with its dtype and shape."""
        view = self._views.get(index)
        if view is None:
            # `.data` has a version counter of its own: a write into one array is not one into its neighbours.
            view = self._views[index] = self.shared(index).data
        return view

    def shared(self, index: int) -> torch.Tensor:
        """The same, made anew. A write into it in place counts as one into the buffer."""
        start, dtype, shape = self.places[index]
        return strided(self._typed_as(dtype), start // dtype.itemsize, shape)

    def _typed_as(self, dtype: np.dtype[Any]) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self.buffer.view(TORCH_DTYPES[dtype])
        return typed


class ReadyTensor(NamedTuple):
    """A device tensor that exists, and the work that another stream has to wait for before it uses it.

    Attributes:
        tensor: on the device.
        stream: that made it.
        ready: a fence recorded after the work that made it; None stands for all work of `stream`.
        synchronised: other streams that are synchronised with it, by their keys; see `Runtime.use_on_current_stream`.
    """

    tensor: torch.Tensor
    stream: Stream
    ready: Fence | None
    synchronised: dict[object, Stream]

    @classmethod
    def uploaded(cls, tensor: torch.Tensor, packed: PackedUpload) -> Self:
        """A view of a packed upload."""
        return cls(tensor, packed.stream, packed.ready, packed.synchronised)

    @classmethod
    def made_now(cls, tensor: torch.Tensor, runtime: StreamOrder) -> Self:
        """A tensor that the current stream has made."""
        return cls(tensor, runtime.current_stream, None, {})

    def on_current_stream(self, runtime: StreamOrder) -> torch.Tensor:
        """The tensor, ordered before and kept alive for what the current stream does next."""
        return runtime.use_on_current_stream(self.tensor, self.stream, self.ready, synchronised=self.synchronised)


@final
@attrs.frozen(eq=False)
class MappedMemory:
    """Pinned host memory that kernels can address. Both tensors are the SAME memory, not two sides of a mirror.

    `host` keeps it alive; reads and writes of kernels through `device` cross the bus.
    """

    host: torch.Tensor
    device: torch.Tensor

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory, uint8[nbytes]. Nothing orders the host's use of it behind the device's."""
        return bytes_of(self.host)


@final
class FixedMemory:
    """Device memory whose address stays, written in place again and again while forwards read it.

    Tables, and the buffers that a captured graph reads. A write comes behind every forward that still reads, and behind
    writes of other streams; a read comes behind the last write. The order is the device's: the host never waits.
    `ordered` gives the memory for the current stream, and `memory` in no order with any other use.
    """

    def __init__(self, runtime: StreamOrder, memory: torch.Tensor) -> None:
        self.runtime = runtime
        self.memory = memory
        self._last_writer = runtime.current_stream
        self._written: Fence | None = None  # behind the last write; without it, readers wait for all of its stream
        self._synchronised: dict[object, Stream] = {}
        self._readers: list[tuple[Fence, set[Stream]]] = []

    def __repr__(self) -> str:
        return f"FixedMemory({self.memory.dtype}{list(self.memory.shape)}, {len(self._readers)} readers)"

    def ordered(self) -> torch.Tensor:
        """The memory, for the current stream, which waits for the last write of another stream."""
        return self.runtime.use_on_current_stream(
            self.memory, self._last_writer, self._written, synchronised=self._synchronised
        )

    def read_until(self, fence: Fence) -> None:
        """A launched forward reads until `fence`: each stream that writes next waits for it."""
        self._forget_finished_readers()
        self._readers.append((fence, set()))

    def await_readers(self) -> None:
        """Orders the next work of the current stream behind forwards that read, and behind writes of other streams."""
        current = self.runtime.current_stream
        if not self._readers and current is self._last_writer:
            return
        if self.runtime.capturing:
            return  # a captured stream may not wait for work outside its graph: its replay is ordered instead
        if self._readers:
            self._forget_finished_readers()
        for fence, waited in self._readers:
            if current not in waited:
                self.runtime.wait(fence, stream=current)
                waited.add(current)
        if current is not self._last_writer:
            self.ordered()
            self._last_writer = current

    def note_write(self) -> None:
        """The next reader on another stream waits for this write, and for nothing behind it."""
        self._written = None if self.runtime.capturing else self.runtime.record(self._last_writer)
        self._synchronised = {}

    def note_foreign_write(self) -> None:
        """The same for a write that others launched on the current stream, in an order of their own."""
        self._last_writer = self.runtime.current_stream
        self.note_write()

    def _forget_finished_readers(self) -> None:
        if self._readers and not self.runtime.capturing:
            self._readers = [reader for reader in self._readers if not reader[0].query()]


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous host tensor of any dtype, uint8[nbytes]. The tensor must stay alive.

    Raises:
        DeviceError: it is not the host's: reading it there would end the process.
    """
    if tensor.device.type != "cpu":
        problem = f"expected memory of the host, got a tensor on {tensor.device}"
        raise DeviceError(problem, str(tensor.device), "read it with `Runtime.inspect` or `read_back`")
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr()))


@final
class _Addressable:
    """Memory as `__cuda_array_interface__` describes it (version 3 of that protocol, by Numba)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept alive by the tensor made of this
        shape, data = (tensor.numel() * tensor.element_size(),), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 3, "strides": None}


def device_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned memory as a tensor of the device, without a copy. DeviceError: the device does not address it.

    With unified addressing a pinned page has one address for host and device (CUDA C++ Programming Guide, "Mapped
    Memory" and "Unified Virtual Address Space").
    """
    flat = torch.as_tensor(_Addressable(pinned), device=device)
    if flat.device != device or flat.data_ptr() != pinned.data_ptr():  # a copy would be another memory
        problem = f"pinned memory is not addressable by {device}: torch made a copy of it on {flat.device}"
        remedy = "use a device with unified addressing, and make it the current one before the pool is made"
        raise DeviceError(problem, str(device), remedy)
    return flat.view(pinned.dtype).view(pinned.shape)


@final
class KnownMemory:
    """The device memory of a CPU that is alive: tools tell it from host memory so. It keeps nothing alive."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._alive

    def add(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor, and of all that share it, is the device's."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()  # one object for as long as any tensor shares the memory
            key, alive = storage._cdata, self._alive
            if key not in alive:
                alive[key] = weakref.ref(storage, partial(alive.pop, key))  # the reference is its default
