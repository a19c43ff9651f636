"""What one operation of torch reads and writes, read off its schema; for index operations, which rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.tracing.regions import Region, of_elements, of_index, of_rows, of_tensor

Ints = npt.NDArray[np.int64]


class Touch(NamedTuple):
    """A tensor, the bytes of its memory that are touched, and whether they are written."""

    tensor: torch.Tensor
    region: Region
    writes: bool


ReadIndex = Callable[[torch.Tensor], Ints]
"""Brings an index to the host, whatever it takes; masks as bool."""

Precise = Callable[[Sequence[Any], ReadIndex], Region | None]

WAITS = frozenset(
    (
        "_local_scalar_dense",
        "_unique2",
        "argwhere",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operations whose result the host needs at once: it waits for the stream."""


_NEUTRAL = frozenset(("is_pinned", "record_stream", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"))
"""Operations that read and write nothing."""


@final
class Operation:
    """What the schema of one operation says. Made once for each, by `Operation.of`.

    Attributes:
        name: without namespace and overload.
        views: whether the result is only another view of an argument.
        touches_nothing: whether no element is read or written.
        waits: whether the host waits for the result, as far as the name says.
        takes_host_index: whether torch accepts a host tensor as index of a device tensor.
    """

    _known: dict[Any, "Operation"] = {}  # noqa: RUF012 - one for the process: schemas do not change

    __slots__ = (
        "_models",
        "_precise",
        "_written_names",
        "_written_places",
        "name",
        "takes_host_index",
        "touches_nothing",
        "views",
        "waits",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.partition("::")[2]
        written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
        self._written_places = frozenset(place for place, writes in enumerate(written) if writes)
        self._written_names = frozenset(
            one.name for one, writes in zip(schema.arguments, written, strict=True) if writes
        )
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        self.views = torch.Tag.inplace_view in func.tags or (bool(aliases) and not any(one.is_write for one in aliases))
        self.touches_nothing = self.views or self.name in _NEUTRAL
        self.waits = self.name in WAITS
        self.takes_host_index = self.name in ("index", "index_put_", "_index_put_impl_", "_unsafe_index")
        self._models = self.name.startswith("new_") or self.name.endswith("_like")  # for shape and dtype alone
        self._precise = _PRECISE.get(self.name)

    @classmethod
    def of(cls, func: Any) -> "Operation":
        """The operation behind an overload."""
        found = cls._known.get(func)
        if found is None:
            found = cls._known[func] = cls(func)
        return found

    def touches(self, args: Sequence[Any], kwargs: Mapping[str, Any], read_index: ReadIndex) -> list[Touch]:
        """Everything that a call touches of memory that was there before."""
        found: list[Touch] = []
        for place, value in enumerate(args):
            writes = place in self._written_places
            for tensor in tensors_in(value):
                region = self._named(args, read_index) if place == 0 and self._precise else of_tensor(tensor)
                if region is not None and (writes or not self._models):
                    found.append(Touch(tensor, region, writes))
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                region = of_tensor(tensor)
                if region is not None:
                    found.append(Touch(tensor, region, name in self._written_names))
        return found

    def _named(self, args: Sequence[Any], read_index: ReadIndex) -> Region | None:
        """The bytes that an index names; the whole tensor where it names none, so that torch may say what is wrong."""
        try:
            return None if self._precise is None else self._precise(args, read_index)
        except (IndexError, ValueError):
            return of_tensor(args[0])

    def by_mask(self, args: Sequence[Any]) -> bool:
        """Whether the shape of the result, or what is written, depends on the values of a mask."""
        if self.name not in ("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"):
            return False
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an argument that lie in one piece of memory: sparse ones do not."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, list | tuple):
        for one in value:
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and not one.is_nested:
                yield one


def _along(args: Sequence[Any], read: ReadIndex) -> Region | None:
    return of_rows(args[0], args[1], read(args[2]))


def _elements(args: Sequence[Any], read: ReadIndex) -> Region | None:
    return of_elements(args[0], args[1], read(args[2]))


def _indexed(args: Sequence[Any], read: ReadIndex) -> Region | None:
    indices: dict[int, Ints] = {}
    dim = 0
    for one in args[1]:
        if one is None:
            dim += 1
            continue
        values = read(one)
        if values.dtype in (np.bool_, np.uint8):
            for place, positions in enumerate(values.nonzero()):
                indices[dim + place] = positions
            dim += values.ndim
        else:
            indices[dim] = values
            dim += 1
    return of_index(args[0], indices) if indices else of_tensor(args[0])


def _flat(args: Sequence[Any], read: ReadIndex) -> Region | None:
    tensor, index = args[0], read(args[1])
    if not tensor.is_contiguous():
        return of_tensor(tensor)
    return of_index(tensor.view(-1), {0: index.reshape(-1)})


def _masked(args: Sequence[Any], read: ReadIndex) -> Region | None:
    tensor = args[0]
    mask = np.broadcast_to(read(args[1]).astype(np.bool_), tuple(tensor.shape))
    if not mask.any():
        return None
    return of_index(tensor, dict(enumerate(mask.nonzero()))) if tensor.ndim else of_tensor(tensor)


def _looked_up(args: Sequence[Any], read: ReadIndex) -> Region | None:
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
"""Operations whose first argument is touched in part."""
