"""`MirroredTensor` against numpy: every operation, every contract, device sides made and not made."""

import sys
from collections.abc import Callable, Sequence, Sized
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from batchstate import Code, Violation, levels
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    ContractError,
    DeviceError,
    DtypeError,
    RowIndexError,
    ShapeError,
    SideMissingError,
    ValueOverflowError,
)
from batchstate.mirror import Contract, Handles, HostLocations, Locations, MirroredTensor, Pages, Slots, weaker_contract
from batchstate.runtime import numpy_dtype
from batchstate.testing.sync_guard import no_hidden_sync
from tests.selfcheck.machine import Machine, Misuse, agree, ask, disagree, misuses
from tests.selfcheck.models import Modelled, value_of
from tests.selfcheck.strategies import (
    MOST_ROWS,
    amounts,
    column_values,
    contracts,
    dtypes,
    fits,
    keep_lists,
    mirrored_tensors,
    plus,
    row_lists,
    row_shapes,
    split_sizes,
)

Array = npt.NDArray[Any]

VALUES = Bundle("values")

_FEW_DTYPES = st.one_of(st.just(torch.int64), dtypes())


def has_rows(value: Sized) -> bool:
    """Whether a value or a batch has any."""
    return len(value) > 0


def _other_runtime(value: MirroredTensor) -> MirroredTensor:
    runtime = type(value.runtime)
    fresh = runtime() if value.runtime.device.type == "cpu" else runtime(value.runtime.device)  # type: ignore[call-arg]
    return type(value).from_host(fresh, np.zeros(value.shape, numpy_dtype(value.dtype)))


MISUSES = misuses(
    ("a row kept twice", ArgumentError, lambda it: it.filter([0, 0]), has_rows),
    ("a negative row kept", RowIndexError, lambda it: it.filter([-1])),
    ("merge of two runtimes", DeviceError, lambda it: it.merge(_other_runtime(it))),
    ("split into too much", ArgumentError, lambda it: it.split([len(it), 1])),
    ("pad indices with 1", ArgumentError, lambda it: it.pad(len(it), 1), lambda it: it.unit is not None),
    ("update beyond the last row", RowIndexError, lambda it: it.update([len(it)], 0)),
    ("add 2**63", (ValueOverflowError, DtypeError), lambda it: it + 2**63),
    ("read no host side", SideMissingError, lambda it: it.np, lambda it: it.contract is Contract.DEVICE_ONLY),
    ("the largest of nothing", (ArgumentError, SideMissingError), lambda it: it.max(), lambda it: not it.shape[0]),
)


def _no_rows(value: MirroredTensor) -> MirroredTensor:
    return type(value).from_host(value.runtime, np.empty((0, *value.shape[1:]), numpy_dtype(value.dtype)))


Operations = Sequence[tuple[str, Callable[[Any], object]]]

OPERATIONS: Operations = (
    ("filter", lambda it: it.filter(range(len(it)))),
    ("take", lambda it: it.take(range(len(it)))),
    ("cat", lambda it: it.merge(_no_rows(it))),
    ("cat", lambda it: _no_rows(it).merge(it)),
    ("split", lambda it: it.split([len(it)])),
    ("pad", lambda it: it.pad(len(it))),
    ("update", lambda it: it.update([], 0)),
    ("update", lambda it: it.update(range(len(it)), it)),
    ("+ n", lambda it: it + 0),
    ("- n", lambda it: it - 0),
    ("weaken", lambda it: it.weaken(it.contract if it.contract is not Contract.HOST_ONLY else "exact")),
    ("tighten", lambda it: it.tighten(it.np)),
    ("resolve", lambda it: it.resolve()),
    ("from_host", lambda it: type(it).from_host(it.runtime, it, name="from_host")),
)
"""Every operation, by the name that it has in reports, of a value to which it applies: each compares both sides."""


def write_uncounted(value: MirroredTensor, side: str, row: int) -> None:
    """Changes every byte of a row of one side in place, as a kernel does that was given an address."""
    if side == "host":
        value.host.numpy()[row : row + 1].view(np.uint8)[...] ^= 1
    else:
        value.device.data[row : row + 1].view(torch.uint8).bitwise_xor_(1)


def check_reported(operations: Operations, chosen: int, victim: Any, column: str, row: int) -> None:
    """A write into a row is reported by the next operation on the victim; by a later one it is too late."""
    name = operations[chosen][0]  # tried once: it may have side effects
    for operation, call in (operations[chosen], *(other for other in operations if other[0] != name)):
        try:
            call(victim)
        except Violation as error:
            if error.operation != name:
                raise
            agree((column, row), (error.column, error.row), f"column and row of {error}")
            agree(True, error.code in _WRITTEN, f"code of {error}")
            return
        except BatchStateError:
            if operation == name:
                return  # does not apply
    disagree(f"row {row} of {column} of {victim!r} was written, and no operation noticed")


_WRITTEN = (Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL, Code.MIRROR_BOUND)

_KEPT = 8  # newest values, compared after every rule
_FAR = 2**63 - 1  # an amount that takes most numbers out of their dtype


class MirroredTensorMachine(Machine):
    """Makes values of every kind, derives others from them, and tries what must be refused."""

    NAME = "mirrored_tensor"
    TARGETS = (
        "moved before the device side was made",
        "moved after the device side was made",
        "merge of exact with bound",
        "merge of host_only with exact",
        "merge with device_only",
        "overflow refused",
        "handles moved with their generations",
        "write from outside found",
    )

    @initialize(dtype=_FEW_DTYPES, shape=row_shapes())
    def begin(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Opens the runtime. Most values of an example have one dtype and shape, so that they go together."""
        self.alive: list[Modelled] = []
        self.tried_all = False
        self.dtype, self.shape = dtype, shape
        self.open()

    def check(self) -> None:
        for model in self.alive[-_KEPT:]:
            model.check()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and not self.automatic:
                for model in self.alive:
                    model.check()
        finally:
            super().teardown()

    def snapshot(self) -> object:
        return [
            (
                None if model.host is None else model.value.np.tobytes(),
                None if model.value.device_side.existing is None else self.rt.inspect(model.value.device).tobytes(),
                model.value.contract,
                model.value.version,
            )
            for model in self.alive
        ]

    def kept(self, model: Modelled) -> Modelled:
        self.alive.append(model)
        return model

    def derived(self, before: Modelled, model: Modelled) -> Modelled:
        """A result that other rows or numbers came from."""
        made = before.value.device_side.existing is not None
        self.reached("moved after the device side was made" if made else "moved before the device side was made")
        self.reached("handles moved with their generations", before.generations is not None and len(model) > 0)
        return self.kept(model)

    # Making

    @rule(target=VALUES, data=st.data(), contract=contracts("exact", "upper_bound", "host_only", "device_only"))
    def make(self, data: st.DataObject, contract: Contract) -> Modelled:
        alike = mirrored_tensors(
            self.rt, dtypes=st.just(self.dtype), contracts=st.just(contract), shapes=st.just(self.shape)
        )
        return self.kept(data.draw(alike, label="value"))

    @rule(target=VALUES, data=st.data(), kind=st.sampled_from([Slots, Pages, Locations, HostLocations, MirroredTensor]))
    def make_another(self, data: st.DataObject, kind: type[MirroredTensor]) -> Modelled:
        """Any other value: indices of an index space, or numbers unlike the others."""
        if kind is MirroredTensor:
            return self.kept(data.draw(mirrored_tensors(self.rt), label="value"))
        array = data.draw(column_values(torch.int64, data.draw(st.integers(1, MOST_ROWS))), label="indices")
        if not issubclass(kind, Handles):
            return self.kept(Modelled(kind.from_host(self.rt, array), array, array))
        generations = np.arange(1, len(array) + 1, dtype=np.int64)
        value = kind.of_pool(self.rt, array, generations, pool_id=0)
        return self.kept(Modelled(value, array, array, generations))

    @rule(model=VALUES, side=st.booleans())
    def use_on_device(self, model: Modelled, side: bool) -> None:
        """The device side is made at first use, on whichever stream uses it."""
        with self.on(side):
            model.check_device()

    # Moving rows

    @rule(target=VALUES, model=VALUES, data=st.data(), side=st.booleans())
    def filter(self, model: Modelled, data: st.DataObject, side: bool) -> Modelled:
        keep = data.draw(keep_lists(len(model)), label="keep")
        rows = np.asarray(keep) if len(keep) else np.empty(0, np.int64)
        with self.on(side):
            value = model.value.filter(keep)
        return self.derived(model, model.moved(value, lambda array: array[rows]))

    @rule(target=VALUES, model=VALUES, data=st.data())
    def take(self, model: Modelled, data: st.DataObject) -> Modelled:
        rows = data.draw(row_lists(len(model)), label="rows")
        index = np.array(rows, dtype=np.int64)
        return self.derived(model, model.moved(model.value.take(rows), lambda array: array[index]))

    @rule(target=VALUES, first=VALUES, data=st.data(), twice=st.booleans(), side=st.booleans())
    def merge(self, first: Modelled, data: st.DataObject, twice: bool, side: bool) -> Modelled:
        """`merge` and `cat` are numpy's concatenate, under the weakest contract."""
        alike = [model for model in self.alive if _alike(first, model)]
        mixed = [model for model in alike if model.value.contract is not first.value.contract]
        second = data.draw(st.one_of(*(st.sampled_from(some) for some in (alike, mixed) if some)), label="other")
        parts = [first, second, first] if twice and len(first) < MOST_ROWS else [first, second]
        left, other = first.value, second.value
        with self.on(side):
            value = type(left).cat([part.value for part in parts]) if len(parts) > 2 else left.merge(other)
        agree(weaker_contract(left.contract, other.contract), value.contract, "contract of a merge")
        self._count_merge(left.contract, other.contract)
        hosts = [part.host for part in parts if part.host is not None]
        generations = [part.generations for part in parts if part.generations is not None]
        joined = Modelled(
            value,
            np.concatenate(hosts) if len(hosts) == len(parts) else None,
            np.concatenate([part.device for part in parts]),
            np.concatenate(generations) if len(generations) == len(parts) else None,
        )
        return self.derived(first, joined)

    @rule(first=VALUES, second=VALUES)
    def merge_unlike(self, first: Modelled, second: Modelled) -> None:
        """Values of two units, dtypes or shapes are refused."""
        left, other = first.value, second.value
        if left.unit != other.unit:
            self.refused(Code.UNIT_MISMATCH, lambda: left.merge(other))
        elif left.dtype != other.dtype or left.shape[1:] != other.shape[1:]:
            self.refused((DtypeError, ShapeError), lambda: left.merge(other))

    def _count_merge(self, contract: Contract, other: Contract) -> None:
        both = {contract, other}
        self.reached("merge of exact with bound", both == {Contract.EXACT, Contract.UPPER_BOUND})
        self.reached("merge of host_only with exact", both == {Contract.EXACT, Contract.HOST_ONLY})
        self.reached("merge with device_only", Contract.DEVICE_ONLY in both and len(both) == 2)

    @rule(target=VALUES, model=VALUES, data=st.data())
    def split(self, model: Modelled, data: st.DataObject) -> Any:
        sizes = data.draw(split_sizes(len(model)), label="sizes")
        stops = np.cumsum(sizes)[:-1]
        parts = model.value.split(sizes)
        agree(len(sizes), len(parts), "pieces of a split")
        pieces = []
        for value, start, size in zip(parts, [0, *stops], sizes, strict=True):
            rows = slice(start, start + size)
            pieces.append(self.derived(model, model.moved(value, itemgetter(rows))))
        return multiple(*pieces)

    @rule(target=VALUES, model=VALUES, more=st.integers(0, 3), value=st.sampled_from([0, 0, 1]))
    def pad(self, model: Modelled, more: int, value: int) -> Modelled:
        if model.value.unit is not None:
            value = 0
        elif model.value.dtype is torch.bool:
            value = bool(value)
        if len(model) + more > 2 * MOST_ROWS:
            more = 0

        def padded(array: Array, value: int = value) -> Array:
            return np.concatenate([array, np.full((more, *array.shape[1:]), value, dtype=array.dtype)])

        return self.derived(model, model.moved(model.value.pad(len(model) + more, value), padded))

    @rule(target=VALUES, model=VALUES, data=st.data())
    def update(self, model: Modelled, data: st.DataObject) -> Modelled:
        rows = data.draw(row_lists(len(model)).map(lambda rows: list(dict.fromkeys(rows))), label="rows")
        new = data.draw(column_values(model.value.dtype, len(rows), model.value.shape[1:]), label="values")
        generations = np.arange(len(rows), dtype=np.int64) + 5
        values: Any = new
        if isinstance(model.value, Handles):
            values = type(model.value).of_pool(self.rt, new, generations, pool_id=0)

        def replaced(array: Array, by: Array) -> Array:
            result = array.copy()
            result[rows] = by
            return result

        updated = Modelled(
            model.value.update(rows, values),
            None if model.host is None else replaced(model.host, new),
            replaced(model.device, new),
            None if model.generations is None else replaced(model.generations, generations),
        )
        return self.derived(model, updated)

    @rule(
        target=VALUES,
        lens=st.lists(st.integers(1, 9), min_size=2, max_size=MOST_ROWS),
        leaves=st.integers(0, MOST_ROWS - 1),
        n=st.integers(-1, 2),
        contract=contracts("exact", "host_only", "upper_bound"),
        touch=st.booleans(),
    )
    def decode(self, lens: list[int], leaves: int, n: int, contract: Contract, touch: bool) -> Any:
        """A step of an engine: of the running requests one leaves, one joins, and all advance."""
        array = np.array(lens, dtype=np.int64)
        running = self.kept(value_of(self.rt, array, array, Contract.EXACT, touch=touch))
        keep = np.arange(array.size) != leaves % array.size
        bound = contract is Contract.UPPER_BOUND
        other = value_of(self.rt, np.array([1 + bound]), np.array([1]), contract)
        with no_hidden_sync(self.rt):
            left = running.value.filter(keep)
            both = left.merge(other.value)
            longer = both + n
        stay = self.derived(running, running.moved(left, lambda values: values[keep]))
        self._count_merge(Contract.EXACT, contract)
        sides = [np.append(stay.device, side) for side in (1 + bound, 1)]
        joined = self.derived(stay, Modelled(both, *sides))
        advanced = self.derived(joined, joined.moved(longer, lambda values: values + n))
        return multiple(stay, joined, advanced)

    # Arithmetic

    @rule(target=VALUES, model=VALUES, data=st.data(), minus=st.booleans())
    def add(self, model: Modelled, data: st.DataObject, minus: bool) -> Any:
        """`+` and `-` are exact integer arithmetic, or refused."""
        near = amounts(len(model))
        amount = data.draw(st.one_of(near, near, near, amounts(len(model), _FAR, _FAR)), label="amount")
        kind = model.device.dtype.kind
        if kind in "bf" or model.value.unit is not None:
            self.refused(DtypeError, lambda: model.value + amount)
            return multiple()

        def added() -> MirroredTensor:
            return model.value - amount if minus else model.value + amount

        sign = -1 if minus else 1
        bounds = model.host if model.value.contract is Contract.UPPER_BOUND else None
        down = min(0, int(np.min(sign * np.asarray(amount)))) if bounds is not None and bounds.size else 0
        floor = np.iinfo(model.device.dtype).min // 2
        if down and bounds is not None and (kind == "u" or int(bounds.min()) + down < floor):
            self.refused(ContractError, added)  # the device side may be smaller than what is taken off
            return multiple()
        if model.host is not None and not fits(model.host, sign * np.asarray(amount)):
            self.reached("overflow refused")
            self.refused(ValueOverflowError, added)
            return multiple()
        if not fits(model.device, sign * np.asarray(amount)):
            return multiple()  # the host cannot know that a number which only the device has leaves its dtype
        return self.derived(model, model.moved(added(), lambda array: plus(array, sign * np.asarray(amount))))

    # Contracts

    @rule(target=VALUES, model=VALUES, contract=contracts())
    def weaken(self, model: Modelled, contract: Contract) -> Any:
        bound_of_indices = contract is Contract.UPPER_BOUND and model.value.unit is not None
        weaker = weaker_contract(contract, model.value.contract) is contract and contract is not Contract.HOST_ONLY
        if bound_of_indices or not weaker:
            self.refused(ContractError, lambda: model.value.weaken(contract))
            return multiple()
        value = model.value.weaken(contract)
        host = None if contract is Contract.DEVICE_ONLY else model.host
        agree(contract, value.contract, "contract after weaken")
        return self.derived(model, Modelled(value, host, model.device, model.generations))

    @rule(target=VALUES, model=VALUES, bound=st.booleans())
    def resolve(self, model: Modelled, bound: bool) -> Modelled:
        """`resolve` brings the exact numbers to the host, and says that it waits; `bound` prefers the newest bound."""
        if bound:
            bounds = [other for other in self.alive if other.value.contract is Contract.UPPER_BOUND]
            model = bounds[-1] if bounds else model
        waits = model.value.contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY)
        before = self.rt.counters.forced_syncs
        value = model.value.resolve()
        agree(int(waits), self.rt.counters.forced_syncs - before, "forced syncs of resolve")
        return self.derived(model, Modelled(value, model.device, model.device, model.generations))

    @rule(target=VALUES, model=VALUES, side=st.sampled_from(["host", "device"]), moves=st.booleans())
    def stale_window(self, model: Modelled, side: str, moves: bool) -> Modelled:
        """In a stale window that side is not read, neither here nor in values derived inside; afterwards it is."""
        with model.value.stale(side, reason="a forward is about to change it"):
            late = model.value.filter(np.arange(len(model))) if moves else model.value.pad(len(model))
            for value in (model.value, late):
                self._refused_as_stale(value, side)
        ask(model.check)
        return self.derived(model, model.moved(late, lambda array: array))

    def _refused_as_stale(self, value: MirroredTensor, side: str) -> None:
        try:
            _ = value.np if side == "host" else value.device
        except Violation as error:
            if error.code is not Code.MIRROR_STALE_READ:
                raise
        else:
            disagree(f"{value!r} was read in a stale window of its {side} side")

    # Misuse

    @rule(
        model=VALUES,
        side=st.sampled_from(["host", "device"]),
        counted=st.booleans(),
        bound=st.booleans(),
        chosen=st.integers(0, len(OPERATIONS) - 1),
    )
    def write_from_outside(self, model: Modelled, side: str, counted: bool, bound: bool, chosen: int) -> None:
        """A write in place is noticed by the next operation, whether torch saw it or not."""
        if not levels.full or not model.device.size or (side == "host" and model.host is None):
            return
        for at in range(chosen, chosen + (1 if self.tried_all else len(OPERATIONS))):
            victim = model.value.take(range(len(model)))  # in memory of its own
            if bound and model.host is not None and victim.unit is None:
                victim = victim.weaken("upper_bound")
            if side == "device":
                _ = victim.device
            row = len(victim) - 1
            write_uncounted(victim, side, row)
            if counted:
                memory = victim.host if side == "host" else victim.device
                memory.copy_(memory.clone())
            check_reported(OPERATIONS, at % len(OPERATIONS), victim, victim.name, row)
            self.reached("write from outside found")
        self.tried_all = True

    @rule(model=VALUES, misuse=st.sampled_from(MISUSES))
    def misuse(self, model: Modelled, misuse: Misuse[MirroredTensor]) -> None:
        self.refuses(misuse, model.value)


def _alike(model: Modelled, other: Modelled) -> bool:
    first, second = model.value, other.value
    return (
        (first.unit, first.dtype, first.shape[1:]) == (second.unit, second.dtype, second.shape[1:])
        and len(first) + len(second) <= 2 * MOST_ROWS
    ) or model is other
