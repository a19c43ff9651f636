"""The index spaces, each a type of its own: slots, pages, and locations of tokens in device or host KV memory.

All are mirrored int64 vectors. To a type checker they are different; at run time `unit` goes with them and public
functions compare it. Index 0 of every space is padding.
"""

from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import Array, converted
from batchstate.errors import ShapeError
from batchstate.mirror import Contract, DeviceSide, MirroredTensor
from batchstate.runtime import Runtime


class Slots(MirroredTensor):
    """Rows of requests in every slot-indexed table, with the generation of each: handles.

    Made by `SlotPool.take`. The generations go wherever the rows go; padded rows are slot 0, generation 0.
    """

    unit: ClassVar[str | None] = "slot"
    __slots__ = ()

    def __init__(self, runtime: Runtime, host: Array | None, device: DeviceSide | None, **rest: Any) -> None:
        """For the library. Without generations, slots have generation 0, which no live slot has."""
        if rest.get("generations") is None:
            rest["generations"] = np.zeros(rest["shape"][0], dtype=np.int64)
        super().__init__(runtime, host, device, **rest)

    @classmethod
    def of_pool(
        cls,
        runtime: Runtime,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.int64],
        *,
        pool_id: int,
        name: str = "",
    ) -> Self:
        """For pools: takes over both arrays, int64[n]. `pool_id` is that of the pool."""
        return cls(
            runtime,
            slots,
            None,
            dtype=torch.int64,
            shape=slots.shape,
            contract=Contract.EXACT,
            name=name,
            generations=generations,
            pool_id=pool_id,
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
        pool_id: int = 0,
    ) -> Self:
        """Handles from numbers, for tools that rebuild state. `generations` int64[n] defaults to 0: no live slot's.

        Raises:
            ShapeError: not one generation per slot. Else as `MirroredTensor.from_host`.
        """
        if isinstance(values, Slots):
            values = values.exact_host(name or cls.__name__)
        plain = Pages.from_host(runtime, values, dtype=dtype, contract=contract, name=name or cls.__name__)
        slots = plain.np.copy()
        own = np.zeros_like(slots) if generations is None else converted(generations, np.dtype(np.int64), "generations")
        if own.shape != slots.shape or slots.ndim != 1:
            raise ShapeError(
                f"{list(own.shape)} generations for {list(slots.shape)} slots", value=own.shape, remedy="one per slot"
            )
        return cls.of_pool(runtime, slots, own, pool_id=pool_id, name=name)

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """The generation of each handle, int64[n], read-only."""
        view: npt.NDArray[np.int64] = self._generations.view()  # type: ignore[union-attr]
        view.flags.writeable = False
        return view

    @property
    def pool_id(self) -> int:
        """Id of the pool that returned the slots; 0 when none did."""
        return self._pool_id


class Pages(MirroredTensor):
    """KV pages. Page 0 is padding."""

    unit: ClassVar[str | None] = "page"
    __slots__ = ()


class Locations(MirroredTensor):
    """Places of tokens in device KV memory. Those of page 0 are padding."""

    unit: ClassVar[str | None] = "location"
    __slots__ = ()


class HostLocations(MirroredTensor):
    """Places of tokens in the host tier's KV memory. Place 0 is padding."""

    unit: ClassVar[str | None] = "host_location"
    __slots__ = ()
