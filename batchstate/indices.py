"""The index spaces, each a type of its own: a slot is no page, a page is no token (R10).

All are mirrored int64 vectors. To a type checker they are different; at run time `unit` goes with them and public
functions compare it. Index 0 of every space is padding.
"""

from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import Array, converted, count
from batchstate.errors import ArgumentError, ShapeError
from batchstate.mirror import Contract, DeviceSide, MirroredTensor
from batchstate.runtime import Runtime


class Slots(MirroredTensor):
    """Rows of requests in every slot-indexed table, with the generation of each: handles.

    Made by `SlotPool.take`. The generations go wherever the rows go; padded rows are slot 0, generation 0.
    """

    unit: ClassVar[str | None] = "slot"
    __slots__ = ()

    def __init__(self, runtime: Runtime, host: Array | None, device: DeviceSide | None, **rest: Any) -> None:
        """For the library. Slots that no pool gave generations have generation 0, which no live slot has."""
        if not rest.get("tags"):
            rest["tags"] = (np.zeros(rest["shape"][0], dtype=np.int64),)
        super().__init__(runtime, host, device, **rest)

    @classmethod
    def of_pool(
        cls,
        runtime: Runtime,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.int64],
        *,
        pool: int,
        name: str = "",
    ) -> Self:
        """For pools: takes over both arrays, int64[n]. `pool` identifies the pool to itself."""
        return cls(
            runtime,
            slots,
            None,
            dtype=torch.int64,
            shape=slots.shape,
            contract=Contract.EXACT,
            name=name,
            tags=(generations,),
            origin=pool,
        )

    @classmethod
    def from_host(
        cls,
        runtime: Runtime,
        values: object,
        *,
        dtype: torch.dtype | None = None,
        contract: str | Contract = Contract.EXACT,
        name: str = "",
        generations: object = None,
        pool: int = 0,
    ) -> Self:
        """Handles from numbers, for tools that rebuild state. `generations` int64[n] defaults to 0: no live slot's.

        Raises:
            ShapeError: not one generation a slot. Else as `MirroredTensor.from_host`.
        """
        if isinstance(values, Slots):
            values = values.exact_host(name or cls.__name__)
        plain = Pages.from_host(runtime, values, dtype=dtype, contract=contract, name=name or cls.__name__)
        slots = plain.np.copy()
        held = (
            np.zeros_like(slots) if generations is None else converted(generations, np.dtype(np.int64), "generations")
        )
        if held.shape != slots.shape or slots.ndim != 1:
            raise ShapeError(
                f"{list(held.shape)} generations for {list(slots.shape)} slots", value=held.shape, remedy="one a slot"
            )
        return cls.of_pool(runtime, slots, held, pool=pool, name=name)

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """The generation of each handle, int64[n], read-only."""
        view = self._tags[0].view()
        view.flags.writeable = False
        return view

    @property
    def pool(self) -> int:
        """Identity of the pool that handed the slots out; 0 when none did."""
        return self._origin


class Pages(MirroredTensor):
    """KV pages. Page 0 is padding."""

    unit: ClassVar[str | None] = "page"
    __slots__ = ()


class Locations(MirroredTensor):
    """Token positions in device KV memory. The tokens of page 0 are padding."""

    unit: ClassVar[str | None] = "location"
    __slots__ = ()


class HostLocations(MirroredTensor):
    """Token positions in the host tier's KV memory. Host token 0 is padding."""

    unit: ClassVar[str | None] = "host_location"
    __slots__ = ()


def tokens_of_pages(pages: Pages, *, page_size: int, num_tokens: int) -> Locations:
    """The tokens on `pages`, in order: page * page_size + 0 .. page_size - 1.

    Args:
        pages: the pages, in the order of the request.
        page_size: tokens a page.
        num_tokens: how many tokens; only the last page may be used in part.

    Returns:
        `host_only` int64[num_tokens].

    Raises:
        ArgumentError: `num_tokens` does not end on the last page.
        DtypeError: no integer.
    """
    size = count(page_size, "page_size", least=1)
    total = count(num_tokens, "num_tokens")
    if -(-total // size) != len(pages):
        raise ArgumentError(
            f"{total} tokens do not end on the last of {len(pages)} pages of {size}",
            value=total,
            remedy="pass exactly the pages that hold the tokens",
        )
    expanded = (pages.np[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)[:total]
    return Locations.from_host(pages.runtime, expanded, contract=Contract.HOST_ONLY, name=pages.name)
