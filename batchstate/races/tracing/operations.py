"""The reads and writes of an operation of torch, taken from its schema; for index operations, which rows."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.races.tracing.memory import HOST_KINDS, MemoryKind
from batchstate.races.tracing.regions import ByteRegion, of_elements, of_index, of_rows, of_strided, of_tensor

Ints = npt.NDArray[np.int64]


class MemoryAccess(NamedTuple):
    """A tensor, the bytes of its memory that are read or written, and which of the two."""

    tensor: torch.Tensor
    region: ByteRegion
    writes: bool


ReadIndex = Callable[[torch.Tensor], Ints]
"""Brings an index to the host; masks as bool."""

Precise = Callable[[Sequence[Any], ReadIndex], ByteRegion | None]


class Awaits(enum.Enum):
    """The part of a stream that the host waits for inside of an operation.

    `BEFORE`: what came before the operation, and perhaps a first pass of it that counts; its last kernel is launched
    behind the wait and is in flight when the call returns.
    """

    NOTHING = "nothing"
    BEFORE = "what came before"
    RESULT = "its result"


_AWAITS = {
    **dict.fromkeys(
        (
            "_linalg_check_errors",
            "_linalg_eigh",
            "_linalg_eigvals",
            "_linalg_svd",
            "_local_scalar_dense",
            "_unique",
            "_unique2",
            "allclose",
            "equal",
            "is_nonzero",
            "linalg_eig",
            "linalg_lstsq",
        ),
        Awaits.RESULT,
    ),
    **dict.fromkeys(
        (
            "argwhere",
            "bincount",
            "embedding_renorm_",
            "linalg_matrix_exp",
            "linalg_pinv",
            "masked_select",
            "nonzero",
            "unique_dim",
            "unique_dim_consecutive",
        ),
        Awaits.BEFORE,
    ),
}
"""Operations with a result that the host needs at once, or that need a number of the device to go on.

The table in `docs/reference/race-waits.md` has the function of ATen behind each."""


def isin_waits(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> bool:
    """Whether `torch.isin` makes the host wait: for many test elements it sorts distinct values, and counts them.

    So says ATen's TensorCompare.cpp, and so does an H100 with torch 2.11.
    """
    if assume_unique or not isinstance(test_elements, torch.Tensor):
        return False
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    return count > 0 and test_elements.numel() >= int(10 * count**0.145)


_ASKED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "histc": lambda named: named.get("min", 0) == named.get("max", 0),
    "isin": lambda named: isin_waits(*named.values()) if len(named) == 2 else isin_waits(**named),
    "multinomial": lambda named: not named.get("replacement", False) or named["num_samples"] == 1,
    "normal": lambda named: isinstance(named.get("std"), torch.Tensor),
    "repeat_interleave": lambda named: named.get("output_size") is None,
    "searchsorted": lambda named: named.get("sorter") is not None,
}
"""Operations that wait for some arguments only, then for what came before them."""

_FILLS = ("index_fill", "index_fill_", "masked_fill", "masked_fill_")
"""Operations that fetch a number which a tensor of the device holds, and are launched behind that."""

_OVERWRITES = frozenset(
    (
        "_index_put_impl_",
        "bernoulli_",
        "copy_",
        "exponential_",
        "fill_",
        "index_copy_",
        "index_fill_",
        "index_put_",
        "masked_fill_",
        "masked_scatter_",
        "normal_",
        "put_",
        "random_",
        "scatter_",
        "uniform_",
        "zero_",
    )
)
"""Operations in place that read nothing of what they write; all others go on from it."""

_NO_ACCESS = frozenset(
    (
        "_fused_sdp_choice",
        "_unsafe_view",
        "is_pinned",
        "is_same_size",
        "record_stream",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    )
)
"""Operations that read and write no element, though their schemas do not say so."""

_UNDECLARED = {
    "batch_norm_gather_stats": None,
    "batch_norm_gather_stats_with_counts": None,
    "batch_norm_update_stats": None,
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "native_batch_norm": "training",
}
"""Operators that write running statistics though their schemas do not say so -> the flag on which they do, or None.

`tests/schema_sweep.py` calls the operators of ATen on a CPU and compares bytes and versions; those that only a GPU has
were read."""

_STATISTICS = ("running_mean", "running_var")

_EMPTY = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))

_STRIDED = torch.strided
_LISTS = (list, tuple)

_BY_MASK = ("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_")


@final
class Operation:
    """The schema of an operation. Made once for each, by `Operation.of`.

    Attributes:
        name: without namespace and overload.
        is_metadata: whether no element is read or written: views, and questions about shapes.
        leaves_empty: whether it allocates, and writes nothing.
        takes_host_index: whether torch accepts a host tensor as index of a device tensor.
        written: arguments that it writes, by position, or by name if they are keyword-only.
        updates: whether it reads what it writes: `add_`, and not `fill_`.
        returned: for each result the argument that it is, by position or name, or None for a new tensor.
    """

    _known: dict[Any, "Operation"] = {}  # noqa: RUF012 - one for the process: schemas do not change

    def __init__(self, func: Any) -> None:
        schema = func._schema
        arguments, returns = schema.arguments, [result.alias_info for result in schema.returns]
        self.name: str = schema.name.partition("::")[2]
        sets: dict[int | str, Any] = {
            argument.name if argument.kwarg_only else position: argument.alias_info.before_set
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.written = frozenset(sets)
        self._undeclared: frozenset[int] = frozenset()
        self._flag: int | None = None
        if self.name in _UNDECLARED:
            names = [argument.name for argument in arguments]
            self._undeclared = frozenset(map(names.index, _STATISTICS))
            flag = _UNDECLARED[self.name]
            self._flag = None if flag is None else names.index(flag)
        self.returned: tuple[int | str | None, ...] = tuple(
            None if alias is None else next((key for key, of in sets.items() if of == alias.before_set), None)
            for alias in returns
        )
        aliases = [alias for alias in returns if alias is not None]
        is_view = torch.Tag.inplace_view in func.tags or (bool(aliases) and not any(a.is_write for a in aliases))
        self.is_metadata = is_view or self.name in _NO_ACCESS
        self.leaves_empty = self.name in _EMPTY
        self.takes_host_index = self.name in _BY_MASK
        self.updates = self.name.endswith("_") and bool(sets) and self.name not in _OVERWRITES
        self._awaits = _AWAITS.get(self.name)
        self._names = [argument.name for argument in arguments]
        self._may_wait = (
            self._awaits is not None
            or self.takes_host_index
            or self.name in (*_ASKED, *_FILLS, "unique_consecutive")
            or "check_errors" in self._names
        )
        self._only_shapes = self.name.startswith("new_") or self.name.endswith("_like")
        self._precise = _PRECISE.get(self.name)
        self._reads_whole = not (sets or self._only_shapes or self._precise or self._undeclared)
        self._draws = torch.Tag.nondeterministic_seeded in func.tags
        self._dropout = next((at for at, argument in enumerate(arguments) if argument.name == "dropout_p"), None)

    @classmethod
    def of(cls, func: Any) -> "Operation":
        """The operation behind an overload."""
        operation = cls._known.get(func)
        if operation is None:
            operation = cls._known[func] = cls(func)
        return operation

    def accesses(self, args: Sequence[Any], kwargs: Mapping[str, Any], read_index: ReadIndex) -> list[MemoryAccess]:
        """Every access of a call to memory that was there before."""
        if self._reads_whole:
            return [
                MemoryAccess(tensor, region, False)
                for tensor in tensors_of(args, kwargs)
                if (region := of_strided(tensor)) is not None
            ]
        accesses: list[MemoryAccess] = []
        written = self._written_by(args)
        for key, value in (*enumerate(args), *kwargs.items()) if kwargs else enumerate(args):
            tensors = tensors_in(value)
            if not tensors:
                continue
            writes = key in written
            if self._only_shapes and not writes and not isinstance(key, str):
                continue
            for tensor in tensors:
                region = self.parts(args, read_index) if key == 0 and self._precise else of_strided(tensor)
                if region is not None:
                    accesses.append(MemoryAccess(tensor, region, writes))
        return accesses

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments that a call writes: tensors, or lists of them."""
        written = self._written_by(args)
        named = [value for key, value in (*enumerate(args), *kwargs.items()) if key in written]
        return [value for value in named if value is not None]

    def _written_by(self, args: Sequence[Any]) -> frozenset[int | str]:
        """The arguments that a call writes, by position or name: those of the schema, and those that it leaves out."""
        if self._undeclared and (self._flag is None or args[self._flag]):
            return self.written | self._undeclared
        return self.written

    def awaits(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], kind_of: Callable[[torch.Tensor], MemoryKind | None]
    ) -> Awaits:
        """The part that the host waits for, because it needs the result or its shape, or brings an operand across."""
        if not self._may_wait:
            return Awaits.NOTHING
        if self._awaits is not None:
            return self._awaits
        if self.takes_host_index:
            return Awaits.BEFORE if self._index_waits(args, kind_of) else Awaits.NOTHING
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self.name == "unique_consecutive":
            return Awaits.RESULT if named.get("dim") is None else Awaits.BEFORE
        if "check_errors" in self._names:
            return Awaits.RESULT if named.get("check_errors") else Awaits.NOTHING
        if self.name in _FILLS:
            number = named.get("value")
            on_device = isinstance(number, torch.Tensor) and kind_of(number) is MemoryKind.DEVICE
            return Awaits.BEFORE if on_device else Awaits.NOTHING
        return Awaits.BEFORE if _ASKED[self.name](named) else Awaits.NOTHING

    def _index_waits(self, args: Sequence[Any], kind_of: Callable[[torch.Tensor], MemoryKind | None]) -> bool:
        """Indices of the host are copied first, and the host waits; masks of the host are counted there.

        A number that is written through a mask of the device is a fill; through all else, it is copied first.
        """
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        here = [index for index in indices if index.ndim and kind_of(index) in HOST_KINDS]
        if any(index is mask for index in here for mask in masks) and len(here) == len(indices):
            return len(args) > 2 and args[2].ndim == 0 and kind_of(args[2]) is not MemoryKind.DEVICE
        if here:
            return True
        number = len(args) > 2 and args[2].ndim == 0 and kind_of(args[2]) is not MemoryKind.DEVICE
        return bool(masks) is not number

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws random numbers. Attention does so only with dropout."""
        if not self._draws or self._dropout is None:
            return self._draws
        dropout = args[self._dropout] if self._dropout < len(args) else None
        return bool(kwargs.get("dropout_p", dropout))

    @property
    def index_at(self) -> int | None:
        """Position of the index by which a call accesses its first argument in part; None if it uses all of it."""
        return None if self._precise is None else 2 if self._precise in (_along, _elements) else 1

    def parts(self, args: Sequence[Any], read_index: ReadIndex) -> ByteRegion | None:
        """The bytes that an index names; the whole tensor for a wrong index, which torch refuses in its own words."""
        try:
            return None if self._precise is None else self._precise(args, read_index)
        except (IndexError, ValueError):
            return of_tensor(args[0])


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """The tensors among an argument that lie in one piece of memory: sparse ones do not."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.layout is _STRIDED and not value.is_nested else ()
    if isinstance(value, _LISTS):
        return [
            part for part in value if isinstance(part, torch.Tensor) and part.layout is _STRIDED and not part.is_nested
        ]
    return ()


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among all arguments of a call."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.layout is _STRIDED and not value.is_nested:
                tensors.append(value)
        elif isinstance(value, _LISTS):
            tensors += tensors_in(value)
    return tensors


def _along(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    return of_rows(args[0], args[1], read(args[2]))


def _elements(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    return of_elements(args[0], args[1], read(args[2]))


def _indexed(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    indices: dict[int, Ints] = {}
    dim = 0
    for index in args[1]:
        if index is None:
            dim += 1
            continue
        values = read(index)
        if values.dtype in (np.bool_, np.uint8):
            for axis, positions in enumerate(values.nonzero()):
                indices[dim + axis] = positions
            dim += values.ndim
        else:
            indices[dim] = values
            dim += 1
    return of_index(args[0], indices) if indices else of_tensor(args[0])


def _flat(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    tensor, index = args[0], read(args[1])
    if not tensor.is_contiguous():
        return of_tensor(tensor)
    return of_index(tensor.view(-1), {0: index.reshape(-1)})


def _masked(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    tensor = args[0]
    mask = np.broadcast_to(read(args[1]).astype(np.bool_), tuple(tensor.shape))
    if not mask.any():
        return None
    return of_index(tensor, dict(enumerate(mask.nonzero()))) if tensor.ndim else of_tensor(tensor)


def _looked_up(args: Sequence[Any], read: ReadIndex) -> ByteRegion | None:
    return of_rows(args[0], 0, read(args[1]))


_PRECISE: dict[str, Precise] = {
    "_index_put_impl_": _indexed,
    "_unsafe_index": _indexed,
    "embedding": _looked_up,
    "gather": _elements,
    "index": _indexed,
    "index_add_": _along,
    "index_copy_": _along,
    "index_fill_": _along,
    "index_put_": _indexed,
    "index_reduce_": _along,
    "index_select": _along,
    "masked_fill_": _masked,
    "masked_scatter_": _masked,
    "masked_select": _masked,
    "put_": _flat,
    "scatter_": _elements,
    "scatter_add_": _elements,
    "scatter_reduce_": _elements,
    "take": _flat,
}
"""Operations that access their first argument in part."""
