"""`MirroredTensor` against numpy: every operation, every contract, device sides made and not made."""

import operator
import sys
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from batchstate import levels
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
from batchstate.testing.machine import Machine, Misuse, agree, ask, disagree, misuses
from batchstate.testing.models import Modelled, value_of
from batchstate.testing.strategies import (
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
from batchstate.testing.sync_guard import no_hidden_sync
from batchstate.violations import Code, Violation

Array = npt.NDArray[Any]

VALUES = Bundle("values")

_FEW_DTYPES = st.one_of(st.just(torch.int64), dtypes())


def _has_rows(value: MirroredTensor) -> bool:
    return len(value) > 0


def _computes(value: MirroredTensor) -> bool:
    return numpy_dtype(value.dtype).kind in "iu" and value.unit is None


def _other_runtime(value: MirroredTensor) -> MirroredTensor:
    runtime = type(value.runtime)
    fresh = runtime() if value.runtime.device.type == "cpu" else runtime(value.runtime.device)  # type: ignore[call-arg]
    return type(value).from_host(fresh, np.zeros(value.shape, numpy_dtype(value.dtype)))


MISUSES = misuses(
    ("a mask too long", ShapeError, lambda one: one.filter(np.ones(len(one) + 1, np.bool_))),
    ("a row kept twice", ArgumentError, lambda one: one.filter([0, 0]), _has_rows),
    ("more rows kept than there are", ArgumentError, lambda one: one.filter([0] * (len(one) + 1)), _has_rows),
    ("a negative row kept", RowIndexError, lambda one: one.filter([-1])),
    ("a row beyond the last taken", RowIndexError, lambda one: one.take([len(one)])),
    ("half a row taken", DtypeError, lambda one: one.take([0.5])),
    ("rows by name", DtypeError, lambda one: one.filter(["first"])),
    ("a rectangle of rows", ShapeError, lambda one: one.filter(np.zeros((1, 1), np.int64))),
    ("merge of two runtimes", DeviceError, lambda one: one.merge(_other_runtime(one))),
    ("cat of nothing", ArgumentError, lambda one: type(one).cat([])),
    ("split into too much", ArgumentError, lambda one: one.split([len(one), 1])),
    ("split into a negative piece", ArgumentError, lambda one: one.split([-1, len(one) + 1])),
    ("pad to fewer rows", ArgumentError, lambda one: one.pad(len(one) - 1)),
    ("pad to half a row", DtypeError, lambda one: one.pad(0.5)),
    ("pad indices with 1", ArgumentError, lambda one: one.pad(len(one), 1), lambda one: one.unit is not None),
    ("update beyond the last row", RowIndexError, lambda one: one.update([len(one)], 0)),
    (
        "update with too many values",
        ShapeError,
        lambda one: one.update([0], [0, 0]),
        lambda one: _has_rows(one) and not isinstance(one, Handles) and one.dtype is not torch.bool,
    ),
    ("update with half a number", DtypeError, lambda one: one.update([], 0.5), _computes),
    (
        "update beyond the dtype",
        ValueOverflowError,
        lambda one: one.update([], 2**63),
        lambda one: one.dtype is torch.int64 and not isinstance(one, Handles),
    ),
    ("add a float", DtypeError, lambda one: operator.add(one, 0.5)),
    ("add True", DtypeError, lambda one: operator.add(one, True)),
    ("add too many amounts", (ShapeError, DtypeError), lambda one: one + np.ones(len(one) + 1, np.int64)),
    ("add 2**63", (ValueOverflowError, DtypeError), lambda one: one + 2**63),
    ("read no host side", SideMissingError, lambda one: one.np, lambda one: one.contract is Contract.DEVICE_ONLY),
    ("the truth of a vector", (ArgumentError, SideMissingError), bool),
    ("the largest of nothing", (ArgumentError, SideMissingError), lambda one: one.max(), lambda one: not one.shape[0]),
    ("weaken to something unknown", ArgumentError, lambda one: one.weaken("roughly")),
    (
        "a bound made exact",
        ContractError,
        lambda one: one.weaken("exact"),
        lambda one: one.contract is Contract.UPPER_BOUND,
    ),
    (
        "a pair of two shapes",
        ShapeError,
        lambda one: MirroredTensor.from_pair(one.runtime, [1], one.runtime.device_zeros((2,), torch.int64)),
    ),
    ("a scalar", ShapeError, lambda one: type(one).from_host(one.runtime, 1)),
    (
        "a bound of one side",
        ContractError,
        lambda one: MirroredTensor.from_host(one.runtime, [1], contract="upper_bound"),
    ),
    ("text as numbers", DtypeError, lambda one: MirroredTensor.from_host(one.runtime, ["1"])),
    ("rows of unequal lengths", ShapeError, lambda one: MirroredTensor.from_host(one.runtime, [[1], [1, 2]])),
    ("300 as int8", ValueOverflowError, lambda one: MirroredTensor.from_host(one.runtime, [300], dtype=torch.int8)),
)


def _no_rows(value: MirroredTensor) -> MirroredTensor:
    return type(value).from_host(value.runtime, np.empty((0, *value.shape[1:]), numpy_dtype(value.dtype)))


Operations = Sequence[tuple[str, Callable[[Any], object]]]

OPERATIONS: Operations = (
    ("filter", lambda one: one.filter(range(len(one)))),
    ("take", lambda one: one.take(range(len(one)))),
    ("cat", lambda one: one.merge(_no_rows(one))),
    ("cat", lambda one: _no_rows(one).merge(one)),
    ("split", lambda one: one.split([len(one)])),
    ("pad", lambda one: one.pad(len(one))),
    ("update", lambda one: one.update([], 0)),
    ("update", lambda one: one.update(range(len(one)), one)),
    ("+ n", lambda one: one + 0),
    ("- n", lambda one: one - 0),
    ("weaken", lambda one: one.weaken(one.contract if one.contract is not Contract.HOST_ONLY else "exact")),
    ("tighten", lambda one: one.tighten(one.np)),
    ("resolve", lambda one: one.resolve()),
    ("from_host", lambda one: type(one).from_host(one.runtime, one, name="from_host")),
)
"""Every operation, by the name that it has in reports, of a value to which it applies: each compares both sides."""


def write_uncounted(value: MirroredTensor, side: str, row: int) -> None:
    """Changes every byte of a row of one side in place, as a kernel does that was given an address."""
    if side == "host":
        value.host.numpy()[row : row + 1].view(np.uint8)[...] ^= 1
    else:
        value.device.data[row : row + 1].view(torch.uint8).bitwise_xor_(1)


def check_reported(operations: Operations, chosen: int, victim: Any, column: str, row: int) -> None:
    """What was written into a row is reported by the next operation on the victim. By a later one it is too late."""
    others = (one for one in operations if one[0] != operations[chosen][0])  # once: it may have side effects
    for operation, call in (operations[chosen], *others):
        try:
            call(victim)
        except Violation as error:
            if error.operation != operations[chosen][0]:
                raise
            agree((column, row), (error.column, error.row), f"column and row of {error}")
            agree(True, error.code in _WRITTEN, f"code of {error}")
            return
        except BatchStateError:
            if operation == operations[chosen][0]:
                return  # does not apply
    disagree(f"row {row} of {column} of {victim!r} was written, and no operation noticed")


_WRITTEN = (Code.MIRROR_FOREIGN_WRITE, Code.MIRROR_EQUAL, Code.MIRROR_BOUND)

_KEPT = 8
"""Values that are compared after every rule: the newest."""

_FAR = 2**63 - 1
"""An amount that takes most numbers out of their dtype."""


class MirroredTensorMachine(Machine):
    """Makes values of every kind, derives others from them, and tries what must be refused."""

    NAME = "mirrored_tensor"
    TARGETS = (
        "moved before the device side was made",
        "moved after the device side was made",
        "merge of exact with bound",
        "merge of host_only with exact",
        "merge with device_only",
        "a row taken twice",
        "an empty value",
        "a bound resolved",
        "read on a second stream",
        "overflow refused",
        "handles moved with their generations",
        "read in a stale window refused",
        "write from outside found",
    )

    @initialize(dtype=_FEW_DTYPES, shape=row_shapes())
    def begin(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Opens the runtime. Most values of one example have one dtype and shape, so that they go together."""
        self.alive: list[Modelled] = []
        self.tried_all = False
        self.dtype, self.shape = dtype, shape
        self.open()

    def check(self) -> None:
        """The newest values are as they were, since values are immutable; the others are looked at in the end."""
        for one in self.alive[-_KEPT:]:
            one.check()

    def teardown(self) -> None:
        """Every value ever made is as it was."""
        try:
            if sys.exc_info()[0] is None and not self.session.automatic:
                for one in self.alive:
                    one.check()
        finally:
            super().teardown()

    def snapshot(self) -> object:
        """Host sides, device sides that are made, and what else a value is."""
        return [
            (
                None if one.host is None else one.value.np.tobytes(),
                None if one.value.device_side.existing is None else self.rt.inspect(one.value.device).tobytes(),
                one.value.contract,
                one.value.version,
            )
            for one in self.alive
        ]

    def kept(self, one: Modelled) -> Modelled:
        """A result of an operation: checked from now on."""
        self.reached("an empty value", not len(one))
        self.alive.append(one)
        return one

    def derived(self, before: Modelled, one: Modelled) -> Modelled:
        """A result that other rows or numbers came from."""
        made = before.value.device_side.existing is not None
        self.reached("moved after the device side was made" if made else "moved before the device side was made")
        self.reached("handles moved with their generations", before.generations is not None and len(one) > 0)
        return self.kept(one)

    # Making

    @rule(target=VALUES, data=st.data(), contract=contracts("exact", "upper_bound", "host_only", "device_only"))
    def make(self, data: st.DataObject, contract: Contract) -> Modelled:
        """A value like the others."""
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
        value = kind.from_host(self.rt, array, generations=generations)
        return self.kept(Modelled(value, array, array, generations))

    @rule(one=VALUES, side=st.booleans())
    def use_on_device(self, one: Modelled, side: bool) -> None:
        """The device side is made at first use, on whichever stream uses it."""
        with self.on(side):
            one.check_device()
        self.reached("read on a second stream", side)

    # Moving rows

    @rule(target=VALUES, one=VALUES, data=st.data(), side=st.booleans())
    def filter(self, one: Modelled, data: st.DataObject, side: bool) -> Modelled:
        """`filter` is numpy's index."""
        keep = data.draw(keep_lists(len(one)), label="keep")
        rows = np.asarray(keep) if len(keep) else np.empty(0, np.int64)
        with self.on(side):
            value = one.value.filter(keep)
        return self.derived(one, one.moved(value, lambda array: array[rows]))

    @rule(target=VALUES, one=VALUES, data=st.data())
    def take(self, one: Modelled, data: st.DataObject) -> Modelled:
        """`take` is numpy's index with repeats."""
        rows = data.draw(row_lists(len(one)), label="rows")
        self.reached("a row taken twice", len(set(rows)) < len(rows))
        index = np.array(rows, dtype=np.int64)
        return self.derived(one, one.moved(one.value.take(rows), lambda array: array[index]))

    @rule(target=VALUES, first=VALUES, data=st.data(), twice=st.booleans(), side=st.booleans())
    def merge(self, first: Modelled, data: st.DataObject, twice: bool, side: bool) -> Modelled:
        """`merge` and `cat` are numpy's concatenate, under the weakest contract."""
        alike = [one for one in self.alive if _alike(first, one)]
        mixed = [one for one in alike if one.value.contract is not first.value.contract]
        second = data.draw(st.one_of(*(st.sampled_from(some) for some in (alike, mixed) if some)), label="other")
        parts = [first, second, first] if twice and len(first) < MOST_ROWS else [first, second]
        one, other = first.value, second.value
        with self.on(side):
            value = type(one).cat([part.value for part in parts]) if len(parts) > 2 else one.merge(other)
        agree(weaker_contract(one.contract, other.contract), value.contract, "contract of a merge")
        self._count_merge(one.contract, other.contract)
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
        """What does not go together is refused."""
        one, other = first.value, second.value
        if one.unit != other.unit:
            with self.refused(Code.UNIT_MISMATCH):
                one.merge(other)
        elif one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
            with self.refused(DtypeError, ShapeError):
                one.merge(other)

    def _count_merge(self, one: Contract, other: Contract) -> None:
        both = {one, other}
        self.reached("merge of exact with bound", both == {Contract.EXACT, Contract.UPPER_BOUND})
        self.reached("merge of host_only with exact", both == {Contract.EXACT, Contract.HOST_ONLY})
        self.reached("merge with device_only", Contract.DEVICE_ONLY in both and len(both) == 2)

    @rule(target=VALUES, one=VALUES, data=st.data())
    def split(self, one: Modelled, data: st.DataObject) -> Any:
        """`split` covers every row once, in order."""
        sizes = data.draw(split_sizes(len(one)), label="sizes")
        stops = np.cumsum(sizes)[:-1]
        parts = one.value.split(sizes)
        agree(len(sizes), len(parts), "pieces of a split")
        pieces = []
        for value, start, size in zip(parts, [0, *stops], sizes, strict=True):
            rows = slice(start, start + size)
            pieces.append(self.derived(one, one.moved(value, itemgetter(rows))))
        return multiple(*pieces)

    @rule(target=VALUES, one=VALUES, more=st.integers(0, 3), value=st.sampled_from([0, 0, 1]))
    def pad(self, one: Modelled, more: int, value: int) -> Modelled:
        """`pad` appends rows of one value; padded slots have no request."""
        if one.value.unit is not None:
            value = 0
        elif one.value.dtype is torch.bool:
            value = bool(value)
        if len(one) + more > 2 * MOST_ROWS:
            more = 0

        def padded(array: Array, value: int = value) -> Array:
            return np.concatenate([array, np.full((more, *array.shape[1:]), value, dtype=array.dtype)])

        return self.derived(one, one.moved(one.value.pad(len(one) + more, value), padded))

    @rule(target=VALUES, one=VALUES, data=st.data())
    def update(self, one: Modelled, data: st.DataObject) -> Modelled:
        """`update` replaces rows on both sides and leaves the old value alone."""
        rows = data.draw(row_lists(len(one)).map(lambda rows: list(dict.fromkeys(rows))), label="rows")
        new = data.draw(column_values(one.value.dtype, len(rows), one.value.shape[1:]), label="values")
        generations = np.arange(len(rows), dtype=np.int64) + 5
        given: Any = new
        if isinstance(one.value, Handles):
            given = type(one.value).from_host(self.rt, new, generations=generations)

        def replaced(array: Array, by: Array) -> Array:
            result = array.copy()
            result[rows] = by
            return result

        updated = Modelled(
            one.value.update(rows, given),
            None if one.host is None else replaced(one.host, new),
            replaced(one.device, new),
            None if one.generations is None else replaced(one.generations, generations),
        )
        return self.derived(one, updated)

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

    @rule(target=VALUES, one=VALUES, data=st.data(), minus=st.booleans())
    def add(self, one: Modelled, data: st.DataObject, minus: bool) -> Any:
        """`+` and `-` are exact integer arithmetic, or refused."""
        near = amounts(len(one))
        amount = data.draw(st.one_of(near, near, near, amounts(len(one), _FAR, _FAR)), label="amount")
        kind = one.device.dtype.kind
        if kind in "bf" or one.value.unit is not None:
            with self.refused(DtypeError):
                _ = one.value + amount
            return multiple()
        sign = -1 if minus else 1
        bounds = one.host if one.value.contract is Contract.UPPER_BOUND else None
        down = min(0, int(np.min(sign * np.asarray(amount)))) if bounds is not None and bounds.size else 0
        floor = np.iinfo(one.device.dtype).min // 2
        if down and bounds is not None and (kind == "u" or int(bounds.min()) + down < floor):
            with self.refused(ContractError):  # the device side may be smaller than what is taken off
                _ = one.value - amount if minus else one.value + amount
            return multiple()
        if one.host is not None and not fits(one.host, sign * np.asarray(amount)):
            self.reached("overflow refused")
            with self.refused(ValueOverflowError):
                _ = one.value - amount if minus else one.value + amount
            return multiple()
        if not fits(one.device, sign * np.asarray(amount)):
            return multiple()  # the host cannot know that a number which only the device has leaves its dtype
        value = one.value - amount if minus else one.value + amount
        return self.derived(one, one.moved(value, lambda array: plus(array, sign * np.asarray(amount))))

    # Contracts

    @rule(target=VALUES, one=VALUES, contract=contracts())
    def weaken(self, one: Modelled, contract: Contract) -> Any:
        """A contract gets weaker, never stronger."""
        bound_of_indices = contract is Contract.UPPER_BOUND and one.value.unit is not None
        weaker = weaker_contract(contract, one.value.contract) is contract and contract is not Contract.HOST_ONLY
        if bound_of_indices or not weaker:
            with self.refused(ContractError):
                one.value.weaken(contract)
            return multiple()
        value = one.value.weaken(contract)
        host = None if contract is Contract.DEVICE_ONLY else one.host
        agree(contract, value.contract, "contract after weaken")
        return self.derived(one, Modelled(value, host, one.device, one.generations))

    @rule(target=VALUES, one=VALUES, bound=st.booleans())
    def resolve(self, one: Modelled, bound: bool) -> Modelled:
        """`resolve` brings the exact numbers to the host, and says that it waits; `bound` prefers the newest bound."""
        if bound:
            bounds = [other for other in self.alive if other.value.contract is Contract.UPPER_BOUND]
            one = bounds[-1] if bounds else one
        waits = one.value.contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY)
        before = self.rt.counters.forced_syncs
        value = one.value.resolve()
        agree(int(waits), self.rt.counters.forced_syncs - before, "forced syncs of resolve")
        self.reached("a bound resolved", one.value.contract is Contract.UPPER_BOUND)
        return self.derived(one, Modelled(value, one.device, one.device, one.generations))

    @rule(target=VALUES, one=VALUES, side=st.sampled_from(["host", "device"]), moves=st.booleans())
    def stale_window(self, one: Modelled, side: str, moves: bool) -> Modelled:
        """In a stale window that side is not read, neither here nor in values derived inside; afterwards it is."""
        with one.value.stale(side, reason="a forward is about to change it"):
            late = one.value.filter(np.arange(len(one))) if moves else one.value.pad(len(one))
            for value in (one.value, late):
                self._refused_as_stale(value, side)
        self.reached("read in a stale window refused")
        ask(one.check)
        return self.derived(one, one.moved(late, lambda array: array))

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
        one=VALUES,
        side=st.sampled_from(["host", "device"]),
        counted=st.booleans(),
        bound=st.booleans(),
        chosen=st.integers(0, len(OPERATIONS) - 1),
    )
    def write_from_outside(self, one: Modelled, side: str, counted: bool, bound: bool, chosen: int) -> None:
        """A write in place is found by the next operation, whether torch saw it or not."""
        if not levels.full or not one.device.size or (side == "host" and one.host is None):
            return
        for at in range(chosen, chosen + (1 if self.tried_all else len(OPERATIONS))):
            victim = one.value.take(range(len(one)))  # in memory of its own
            if bound and one.host is not None and victim.unit is None:
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

    @rule(one=VALUES, misuse=st.sampled_from(MISUSES))
    def misuse(self, one: Modelled, misuse: Misuse[MirroredTensor]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        self.refuses(misuse, one.value)


def _alike(one: Modelled, other: Modelled) -> bool:
    first, second = one.value, other.value
    return (
        (first.unit, first.dtype, first.shape[1:]) == (second.unit, second.dtype, second.shape[1:])
        and len(first) + len(second) <= 2 * MOST_ROWS
    ) or one is other
