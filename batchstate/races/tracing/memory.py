"""Whose memory each tensor lies in, also where host and device memory lie side by side, and when it dies.

On an accelerator a tensor says where it lies. On a CPU all look alike, so memory is told apart by its making: memory
that the runtime allocated, and results computed from it, are the device's; pinned memory, numpy's, and results brought
back are the host's. A tensor that a factory made (`torch.arange`, `torch.tensor`) is undecided until it meets
another: on a device it would lie where its `device=` says, which a CPU cannot tell.
"""

import enum
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import attrs
import torch


class MemoryKind(enum.Enum):
    """Whose memory it is."""

    DEVICE = "device"
    PINNED = "pinned host"
    HOST = "host"
    UNDECIDED = "undecided"


HOST_KINDS = (MemoryKind.HOST, MemoryKind.PINNED)


@final
class Name:
    """The name of a piece of memory in reports; outlives it.

    Attributes:
        number: in the order in which pieces were first seen, from 1.
        shape, dtype: of the tensor that it was first seen as.
        label: the library's name for it; empty where it goes by its number.
    """

    __slots__ = ("dtype", "label", "number", "shape")

    def __init__(self, number: int, tensor: torch.Tensor, label: str = "") -> None:
        self.number = number
        self.shape: tuple[int, ...] = tensor.shape
        self.dtype = tensor.dtype
        self.label = label

    def __str__(self) -> str:
        return f"{self.label or f'tensor {self.number}'} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@attrs.define(eq=False, repr=False)
class Allocation:
    """A piece of memory, as a tool knows it.

    Attributes:
        kind: whose it is.
        nbytes: its size; 0 for memory of the host.
    """

    kind: MemoryKind
    nbytes: int = attrs.field(default=0, init=False)


A = TypeVar("A", bound=Allocation)


class _Life(weakref.ref[Any]):
    """Ends when the memory does: torch keeps one storage object for as long as any tensor shares the memory."""

    __slots__ = ("key",)
    key: int


@final
class Address:
    """A tensor by where it lies, which keeps no memory."""

    __slots__ = ("_dtype", "_seen_as", "_storage", "_where")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._where = tensor.dtype, (int(tensor.storage_offset()), tensor.shape, tensor.stride())
        self._seen_as = tensor.is_conj(), tensor.is_neg()

    def tensor(self) -> torch.Tensor | None:
        """The tensor, or None once its memory is gone."""
        storage = self._storage()
        if storage is None:
            return None
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._where)
        conjugate, negative = self._seen_as
        tensor = torch._conj(tensor) if conjugate else tensor
        return torch._neg_view(tensor) if negative else tensor


@final
class Allocations(Generic[A]):
    """All pieces of memory that a tool has seen and that are alive.

    Args:
        died: called with a piece as soon as the last tensor of it is gone.

    Attributes:
        nbytes, most_nbytes: of device memory that is alive, now and at most.
    """

    def __init__(self, died: Callable[[A], None]) -> None:
        self.nbytes = self.most_nbytes = 0
        self._known: dict[int, tuple[_Life, A]] = {}
        self._pinned: dict[int, _Life] = {}
        self._died = died
        self._closed = False

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tensor: torch.Tensor) -> A | None:
        """The memory of a tensor, or None: never seen."""
        if tensor.is_nested:
            return None  # several pieces of memory
        try:
            entry = self._known.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            return None  # sparse: the same
        return None if entry is None else entry[1]

    def add(self, tensor: torch.Tensor, allocation: A) -> A:
        """Enters the memory of a tensor, in place of an older entry."""
        storage = tensor.untyped_storage()
        life = _Life(storage, self._ended)
        key = life.key = storage._cdata
        if key in self._known:
            self.nbytes -= self._known[key][1].nbytes
        self._known[key] = (life, allocation)
        if allocation.kind is MemoryKind.DEVICE:
            allocation.nbytes = storage.nbytes()
            self.nbytes += allocation.nbytes
            if self.nbytes > self.most_nbytes:
                self.most_nbytes = self.nbytes
        elif allocation.kind is MemoryKind.PINNED:
            self._pinned[key] = life
        return allocation

    def pinned_at(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A host tensor as part of the pinned memory that it lies in, or None. Addresses are pinned, not tensors."""
        start = tensor.data_ptr()
        for life in list(self._pinned.values()):  # another thread may free some meanwhile
            storage = life()
            if storage is not None and storage.data_ptr() <= start < storage.data_ptr() + storage.nbytes():
                offset, uneven = divmod(start - storage.data_ptr(), tensor.element_size())
                if not uneven:
                    part = torch.empty(0, dtype=tensor.dtype)
                    return part.set_(storage, offset, tensor.shape, tensor.stride())
        return None

    def alive(self) -> list[tuple[Any, A]]:
        """Every piece that is alive, behind its storage."""
        pieces = [(life(), allocation) for life, allocation in list(self._known.values())]
        return [(storage, allocation) for storage, allocation in pieces if storage is not None]

    def close(self) -> None:
        """Forgets everything; later deaths are not reported."""
        self._closed = True
        self._known.clear()
        self._pinned.clear()

    def _ended(self, life: Any) -> None:
        entry = self._known.get(life.key)
        if entry is not None and entry[0] is life:
            del self._known[life.key]
            self._pinned.pop(life.key, None)
            self.nbytes -= entry[1].nbytes
            if not self._closed:
                self._died(entry[1])
