"""Models as plain collections: allocators of pools, snapshots of pools and tables, the sides of mirrored values."""

from collections.abc import Callable, Iterable
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate import PagePool, PoolExhaustedError, Runtime, SlotPool, Table, invariants
from batchstate.kv.pages import PageStats
from batchstate.mirror import Contract, MirroredTensor, Slots, rows_of
from batchstate.pools import SlotStats
from batchstate.testing.fences import ManualFence
from tests.selfcheck.machine import ShownByRepr, agree, agree_on, ask, disagree


@final
@attrs.define
class AllocatorModel:
    """A pool of the indices 1 to size + reserve."""

    size: int
    reserve: int = 0
    live: set[int] = attrs.field(factory=set)
    pending: dict[int, tuple[ManualFence, ...]] = attrs.field(factory=dict)  # index -> fences before it is free

    @property
    def total(self) -> int:
        return self.size + self.reserve

    @property
    def free(self) -> int:
        return self.total - len(self.live) - len(self.pending)

    @property
    def free_reserved(self) -> int:
        """How many of those lie in the reserve."""
        return self.reserve - sum(index > self.size for index in (*self.live, *self.pending))

    def reap(self) -> None:
        """Indices that wait for complete fences alone become free."""
        self.pending = {
            index: fences for index, fences in self.pending.items() if not all(fence.query() for fence in fences)
        }

    def takes(self, n: int, *, reserved: bool = False) -> bool:
        """Whether `n` can be taken, once what is ready is free."""
        self.reap()
        return n <= self.free - (0 if reserved else self.free_reserved)

    def waiting_helps(self, n: int, *, reserved: bool = False) -> bool:
        """Whether `n` can be taken after all fences."""
        held = sum(reserved or index <= self.size for index in self.live)
        return n <= (self.total if reserved else self.size) - held

    def check_refusal(self, error: PoolExhaustedError, n: int, *, reserved: bool = False) -> None:
        free = self.free - (0 if reserved else self.free_reserved)
        pending = sum(reserved or index <= self.size for index in self.pending)
        agree((n, free, pending), (error.requested, error.free, error.pending), "requested, free, pending")

    def take(self, indices: Iterable[int], *, reserved: bool = False) -> None:
        """These were handed out, and had to be free."""
        self.reap()
        last = self.total if reserved else self.size
        for index in indices:
            if not 1 <= index <= last:
                disagree(f"index {index} was handed out of 1 to {last}")
            if index in self.live or index in self.pending:
                state = "live" if index in self.live else f"pending on {self.pending[index]}"
                disagree(f"index {index} was handed out although it is {state}")
            self.live.add(index)

    def release(self, indices: Iterable[int], *fences: ManualFence | None) -> None:
        """These were freed; they are free again once the fences that are not None are complete."""
        wanted = tuple(fence for fence in fences if fence is not None)
        for index in indices:
            self.live.remove(index)
            if wanted:
                self.pending[index] = wanted
        self.reap()


def settled(stats: SlotStats | PageStats) -> dict[str, int]:
    """The numbers of a pool; what is pending counts as free, which it becomes by itself: each reading reaps."""
    others = attrs.asdict(stats, filter=attrs.filters.exclude("free", "free_reserved", "pending"))
    return {"free": stats.free + stats.pending, **others}


def snapshot_slots(pool: SlotPool) -> object:
    """The numbers of a pool and its live slots, as plain values that compare with `==`."""
    return settled(pool.stats), pool.live_slots().tolist()


def snapshot_table(table: Table) -> object:
    """Both sides of a table."""
    host = None if table.host_memory is None else table.host_memory.tobytes()
    return host, rows_of(table.runtime, table.memory).tobytes()


def snapshot_pages(pool: PagePool) -> object:
    """Numbers and the page table."""
    return settled(pool.stats), pool.page_table.tolist()


Array = npt.NDArray[Any]
Operation = Callable[[Array], Array]


@final
@attrs.frozen(eq=False)
class Modelled(ShownByRepr):
    """A value and its model."""

    value: MirroredTensor
    host: Array | None  # None for `device_only`
    device: Array  # of the device side, whether or not it is made yet
    generations: Array | None = None  # of slots, int64[n]

    def __repr__(self) -> str:
        sides = [] if self.host is None else [f"host {self.host.tolist()}"]
        if self.host is None or self.value.contract is Contract.UPPER_BOUND:
            sides.append(f"device {self.device.tolist()}")
        if self.generations is not None:
            sides.append(f"generations {self.generations.tolist()}")
        return f"<{self.value!r}: {', '.join(sides)}>"

    def __len__(self) -> int:
        return len(self.device)

    def moved(self, value: MirroredTensor, operation: Operation) -> "Modelled":
        """The model of `value`, to which `operation` moved the rows of this one."""
        return Modelled(
            value,
            None if self.host is None else operation(self.host),
            operation(self.device),
            None if self.generations is None else operation(self.generations),
        )

    def check(self) -> None:
        """Compares the value with the model, without making its device side."""
        value = self.value
        value.check("check")  # first: a broken invariant says more than a difference
        agree(self.device.shape, value.shape, "shape", value)
        if self.host is not None:
            agree_on(self.host, value.np, "host side", value)
        if isinstance(value, Slots) and self.generations is not None:
            agree_on(self.generations, value.generations, "generations", value)
        if value.device_side.existing is not None:
            self.check_device()

    def check_device(self) -> None:
        """Compares the device side, which is made if it does not exist; the model stands for the host side."""
        device = self.value.runtime.inspect(self.value.device)
        ask(invariants.mirror_equal, self.device, device, object=f"model of {self.value!r}", operation="check")


def value_of(runtime: Runtime, host: Array, device: Array, contract: Contract, *, touch: bool = False) -> Modelled:
    """A value with these sides, of which `exact` and `host_only` need the first; `touch` makes the device side now."""
    if contract in (Contract.EXACT, Contract.HOST_ONLY):
        value = MirroredTensor.from_host(runtime, host, contract=contract)
    elif contract is Contract.UPPER_BOUND:
        value = MirroredTensor.from_pair(runtime, host, _uploaded(runtime, device), contract=contract)
    else:
        value = MirroredTensor.from_device(runtime, _uploaded(runtime, device))
    if touch:
        _ = value.device
    return Modelled(value, None if contract is Contract.DEVICE_ONLY else np.array(host), np.array(device))


def _uploaded(runtime: Runtime, values: Array) -> Any:
    return runtime.upload([values]).view(0).clone()
