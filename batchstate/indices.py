"""The index spaces, each a type of its own: slots, pages, and locations of tokens in device or host KV memory.

All are mirrored int64 vectors. To a type checker they are different; at run time `unit` goes with them and public
functions compare it. Index 0 of every space is padding.
"""

import functools
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from batchstate._arrays import Array, converted, count
from batchstate._guidance import methods_show_signature
from batchstate._origin import RowSet
from batchstate.errors import ShapeError
from batchstate.mirror import Contract, DeviceSide, MirroredTensor
from batchstate.runtime import Runtime


@methods_show_signature()
class Handles(MirroredTensor):
    """Numbers of an index space with the generation of each: they say whose they are, and go stale with their owner.

    Pools make them. The generations go wherever the rows go; padded rows are index 0, generation 0.
    """

    _space: ClassVar[int] = 0
    __slots__ = ("held_at",)

    def __init__(
        self, runtime: Runtime, host: Array | None = None, device: DeviceSide | None = None, **rest: Any
    ) -> None:
        """For the library. Without generations they have generation 0, which nothing live has.

        `held_at` counts the changes of the pool when all of them were last found live; -1 before.
        """
        self.held_at = -1
        if rest.get("generations") is None:
            if "shape" not in rest:  # then `MirroredTensor` says how to make one
                super().__init__(runtime, host, device)
            rest["generations"] = np.zeros(rest["shape"][0], dtype=np.int64)
        rest["generations"].setflags(write=False)  # once, and not for each read
        super().__init__(runtime, host, device, **rest)
        if device is None and self.contract is Contract.EXACT and not self._windows and self._pool_id:
            self._plain = 4 * self._pool_id + self._space

    @classmethod
    def of_pool(
        cls,
        runtime: Runtime,
        numbers: npt.NDArray[np.int64],
        generations: npt.NDArray[np.int64],
        *,
        pool_id: int,
        contract: Contract = Contract.EXACT,
        name: str = "",
        device: DeviceSide | None = None,
    ) -> Self:
        """For pools: takes over both arrays, int64[n]. `pool_id` is that of the pool, `device` their device side."""
        handles = cls.__new__(cls)  # what a pool makes for each take: without a second dictionary of arguments
        handles.held_at = -1
        generations.setflags(write=False)
        MirroredTensor.__init__(
            handles,
            runtime,
            numbers,
            device,
            dtype=torch.int64,
            shape=numbers.shape,
            contract=contract,
            name=name,
            generations=generations,
            pool_id=pool_id,
        )
        if device is None and pool_id and contract is Contract.EXACT:
            handles._plain = 4 * pool_id + cls._space
        return handles

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
        """Handles from numbers, for tools that rebuild state. `generations` int64[n] defaults to 0: nothing live's.

        Raises:
            ShapeError: not one generation per number. Else as `MirroredTensor.from_host`.
        """
        plain = super().from_host(runtime, values, dtype=dtype, contract=contract, name=name or cls.__name__)
        numbers = plain.np.copy()
        own = converted(
            plain.generations if generations is None else generations, np.dtype(np.int64), "generations"
        ).copy()
        if own.shape != numbers.shape or numbers.ndim != 1:
            raise ShapeError(
                f"{list(own.shape)} generations for {list(numbers.shape)} {cls.unit}s",
                value=own.shape,
                remedy=f"one per {cls.unit}",
            )
        pool_id = count(pool_id, "pool_id")
        return cls.of_pool(runtime, numbers, own, pool_id=pool_id, contract=plain.contract, name=name)

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """The generation of each handle, int64[n], read-only."""
        return self._generations  # type: ignore[return-value]

    @property
    def pool_id(self) -> int:
        """Id of the pool that made the handles; 0 when none did."""
        return self._pool_id


class Slots(Handles):
    """Rows of requests in every slot-indexed table. Made by `SlotPool.take`; padded rows are slot 0."""

    unit: ClassVar[str | None] = "slot"
    _space: ClassVar[int] = 1
    __slots__ = ()

    @property
    def row_set(self) -> RowSet:
        """The requests of the rows, which slots say themselves. For the library."""
        if self._row_set is None:
            self._row_set = RowSet(0, (self._host_side(), self.generations), self._pool_id)
        return self._row_set


class Pages(Handles):
    """KV pages. Made by `PagePool.pages_of` and by leases. Page 0 is padding."""

    unit: ClassVar[str | None] = "page"
    _space: ClassVar[int] = 2
    __slots__ = ()


class Locations(Handles):
    """Places of tokens in device KV memory, each with the generation of its page. Those of page 0 are padding."""

    unit: ClassVar[str | None] = "location"
    _space: ClassVar[int] = 3
    __slots__ = ()


@functools.cache
def index_type(holds: str) -> type[MirroredTensor]:
    """The type of plain indices of one space, without generations: those of a column that was declared with `holds=`.

    Args:
        holds: `page`, `location`, `host_location`, `state`, or an index space of the engine's own.
    """
    return type(f"{holds.title()}Indices", (MirroredTensor,), {"unit": holds, "__slots__": (), "__module__": __name__})


class HostLocations(MirroredTensor):
    """Places of tokens in the host tier's KV memory. Place 0 is padding."""

    unit: ClassVar[str | None] = "host_location"
    __slots__ = ()
