"""`MirroredTensor` against numpy: every operation, every contract, device sides made and not made."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from batchstate.contracts import Contract, combined, weaker_or_equal
from batchstate.errors import ContractError, DtypeError, ShapeError, ValueOverflowError
from batchstate.indices import HostTokens, Pages, Slots, Tokens
from batchstate.invariants import Code, Violation
from batchstate.mirror import MirroredTensor
from batchstate.testing.machine import DisagreementError, Machine, agree
from batchstate.testing.machines.mirrored_tensor_misuse import MISUSES
from batchstate.testing.misuse import Misuse
from batchstate.testing.modelled import Modelled, value_of
from batchstate.testing.strategies import (
    MOST_ROWS,
    amounts,
    column_values,
    contracts,
    dtypes,
    keep_lists,
    mirrored_tensors,
    row_lists,
    row_shapes,
    split_sizes,
)

Array = npt.NDArray[Any]

_FEW_DTYPES = st.one_of(st.just(torch.int64), dtypes())


class MirroredTensorMachine(Machine):
    """Makes values, derives values from values, and tries what must be refused."""

    NAME = "mirrored_tensor"

    values = Bundle("values")

    @initialize(dtype=_FEW_DTYPES, shape=row_shapes())
    def begin(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Opens the runtime. Most values of one example have one dtype and shape, so that they go together."""
        self.alive: list[Modelled] = []
        self.dtype, self.shape = dtype, shape
        self.open()

    def judge(self) -> None:
        """Every value ever made is as it was, since values are immutable."""
        for one in self.alive:
            one.judge()

    def snapshot(self) -> object:
        """Host sides, device sides that are made, and what else a value is."""
        return [
            (
                None if one.host is None else one.value.np.tobytes(),
                None if (made := one.value.device_side.made) is None else self.rt.inspect(made).tobytes(),
                one.value.contract,
                one.value.version,
            )
            for one in self.alive
        ]

    def kept(self, one: Modelled) -> Modelled:
        """A result of an operation: judged from now on."""
        self.reached("an empty value", not len(one))
        self.alive.append(one)
        return one

    def derived(self, before: Modelled, one: Modelled) -> Modelled:
        """A result that other rows or numbers came from."""
        made = before.value.device_side.made is not None
        self.reached("moved after the device side was made" if made else "moved before the device side was made")
        self.reached("handles moved with their generations", before.generations is not None and len(one) > 0)
        return self.kept(one)

    # Making

    @rule(target=values, data=st.data(), contract=contracts("exact", "upper_bound", "host_only", "device_only"))
    def make(self, data: st.DataObject, contract: Contract) -> Modelled:
        """A value like the others."""
        alike = mirrored_tensors(
            self.rt, dtypes=st.just(self.dtype), contracts=st.just(contract), shapes=st.just(self.shape)
        )
        return self.kept(data.draw(alike, label="value"))

    @rule(target=values, data=st.data(), kind=st.sampled_from([Slots, Pages, Tokens, HostTokens, MirroredTensor]))
    def make_another(self, data: st.DataObject, kind: type[MirroredTensor]) -> Modelled:
        """Any other value: indices of an index space, or numbers unlike the others."""
        if kind is MirroredTensor:
            return self.kept(data.draw(mirrored_tensors(self.rt), label="value"))
        array = data.draw(column_values(torch.int64, data.draw(st.integers(1, MOST_ROWS))), label="indices")
        if kind is not Slots:
            return self.kept(Modelled(kind.from_host(self.rt, array), array, array))
        generations = np.arange(1, len(array) + 1, dtype=np.int64)
        value = Slots.from_host(self.rt, array, generations=generations)
        return self.kept(Modelled(value, array, array, generations))

    @rule(one=values, side=st.booleans())
    def use_on_device(self, one: Modelled, side: bool) -> None:
        """The device side is made at first use, on whichever stream uses it."""
        with self.on(side):
            one.judge_device()
        self.reached("read on a second stream", side)

    # Moving rows

    @rule(target=values, one=values, data=st.data(), side=st.booleans())
    def filter(self, one: Modelled, data: st.DataObject, side: bool) -> Modelled:
        """`filter` is numpy's index."""
        keep = data.draw(keep_lists(len(one)), label="keep")
        rows = np.asarray(keep) if len(keep) else np.empty(0, np.int64)
        with self.on(side):
            value = one.value.filter(keep)
        return self.derived(one, one.moved(value, lambda array: array[rows]))

    @rule(target=values, one=values, data=st.data())
    def take(self, one: Modelled, data: st.DataObject) -> Modelled:
        """`take` is numpy's index with repeats."""
        rows = data.draw(row_lists(len(one)), label="rows")
        self.reached("a row taken twice", len(set(rows)) < len(rows))
        index = np.array(rows, dtype=np.int64)
        return self.derived(one, one.moved(one.value.take(rows), lambda array: array[index]))

    @rule(target=values, first=values, data=st.data(), twice=st.booleans(), side=st.booleans())
    def merge(self, first: Modelled, data: st.DataObject, twice: bool, side: bool) -> Modelled:
        """`merge` and `cat` are numpy's concatenate, under the weakest contract."""
        second = data.draw(st.sampled_from([one for one in self.alive if _alike(first, one)]), label="other")
        parts = [first, second, first] if twice and len(first) < MOST_ROWS else [first, second]
        one, other = first.value, second.value
        with self.on(side):
            value = type(one).cat([part.value for part in parts]) if len(parts) > 2 else one.merge(other)
        agree(combined(one.contract, other.contract), value.contract, "contract of a merge")
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

    @rule(first=values, second=values)
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

    @rule(target=values, one=values, data=st.data())
    def split(self, one: Modelled, data: st.DataObject) -> Any:
        """`split` covers every row once, in order."""
        sizes = data.draw(split_sizes(len(one)), label="sizes")
        stops = np.cumsum(sizes)[:-1]
        parts = one.value.split(sizes)
        agree(len(sizes), len(parts), "pieces of a split")
        pieces = []
        for place, value in enumerate(parts):
            piece = one.moved(value, lambda array, place=place: np.split(array, stops)[place])
            pieces.append(self.derived(one, piece))
        return multiple(*pieces)

    @rule(target=values, one=values, more=st.integers(0, 3), value=st.sampled_from([0, 0, 1]))
    def pad(self, one: Modelled, more: int, value: int) -> Modelled:
        """`pad` appends rows of one value; padded slots are nobody's."""
        if one.value.unit is not None:
            value = 0
        elif one.value.dtype is torch.bool:
            value = bool(value)
        if len(one) + more > 2 * MOST_ROWS:
            more = 0

        def padded(array: Array, value: int = value) -> Array:
            return np.concatenate([array, np.full((more, *array.shape[1:]), value, dtype=array.dtype)])

        return self.derived(one, one.moved(one.value.pad(len(one) + more, value), padded))

    @rule(target=values, one=values, data=st.data())
    def update(self, one: Modelled, data: st.DataObject) -> Modelled:
        """`update` replaces rows on both sides and leaves the old value alone."""
        rows = data.draw(row_lists(len(one)).map(lambda rows: list(dict.fromkeys(rows))), label="rows")
        new = data.draw(column_values(one.value.dtype, len(rows), one.value.shape[1:]), label="values")
        generations = np.arange(len(rows), dtype=np.int64) + 5
        given: Any = new
        if one.generations is not None:
            given = Slots.from_host(self.rt, new, generations=generations)

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
        target=values,
        lens=st.lists(st.integers(1, 9), min_size=2, max_size=MOST_ROWS),
        leaves=st.integers(0, MOST_ROWS - 1),
        n=st.integers(-1, 2),
        touch=st.booleans(),
    )
    def decode(self, lens: list[int], leaves: int, n: int, touch: bool) -> Any:
        """A step of an engine: of the running requests one leaves, one joins, and all advance."""
        array = np.array(lens, dtype=np.int64)
        running = self.kept(value_of(self.rt, array, array, Contract.EXACT, touch=touch), "make")
        keep = np.arange(array.size) != leaves % array.size
        stay = self.derived(running, running.moved(running.value.filter(keep), lambda values: values[keep]), "filter")
        both = stay.value.merge(MirroredTensor.from_host(self.rt, np.array([1])))
        joined = self.derived(stay, stay.moved(both, lambda values: np.append(values, np.int64(1))), "merge")
        advanced = self.derived(joined, joined.moved(joined.value + n, lambda values: values + n), "add")
        return multiple(stay, joined, advanced)

    # Arithmetic

    @rule(target=values, one=values, data=st.data(), minus=st.booleans())
    def add(self, one: Modelled, data: st.DataObject, minus: bool) -> Any:
        """`+` and `-` are exact integer arithmetic, or refused."""
        amount = data.draw(amounts(len(one)), label="amount")
        kind = one.device.dtype.kind
        if kind in "bf" or one.value.unit is not None:
            with self.refused(DtypeError):
                _ = one.value + amount
            return multiple()
        sign = -1 if minus else 1
        if one.host is not None and not _fits(one.host, sign * np.asarray(amount)):
            self.reached("overflow refused")
            with self.refused(ValueOverflowError):
                _ = one.value - amount if minus else one.value + amount
            return multiple()
        if not _fits(one.device, sign * np.asarray(amount)):
            return multiple()  # the host cannot know that a number which only the device has leaves its dtype
        value = one.value - amount if minus else one.value + amount
        return self.derived(one, one.moved(value, lambda array: _sum(array, sign * np.asarray(amount))))

    # Contracts

    @rule(target=values, one=values, contract=contracts())
    def weaken(self, one: Modelled, contract: Contract) -> Any:
        """A contract gets weaker, never stronger."""
        if not weaker_or_equal(contract, one.value.contract) or contract is Contract.HOST_ONLY:
            with self.refused(ContractError):
                one.value.weaken(contract)
            return multiple()
        value = one.value.weaken(contract)
        host = None if contract is Contract.DEVICE_ONLY else one.host
        agree(contract, value.contract, "contract after weaken")
        return self.derived(one, Modelled(value, host, one.device, one.generations))

    @rule(target=values, one=values)
    def resolve(self, one: Modelled) -> Modelled:
        """`resolve` brings the exact numbers to the host, and says that it waits."""
        waits = one.value.contract in (Contract.UPPER_BOUND, Contract.DEVICE_ONLY)
        before = self.rt.counters.forced_syncs
        value = one.value.resolve()
        agree(int(waits), self.rt.counters.forced_syncs - before, "forced syncs of resolve")
        self.reached("a bound resolved", one.value.contract is Contract.UPPER_BOUND)
        return self.derived(one, Modelled(value, one.device, one.device, one.generations))

    @rule(target=values, one=values, side=st.sampled_from(["host", "device"]), moves=st.booleans())
    def stale_window(self, one: Modelled, side: str, moves: bool) -> Modelled:
        """In a stale window that side is not read, neither here nor in values derived inside; afterwards it is."""
        with one.value.stale(side, reason="a forward is about to change it"):
            late = one.value.filter(np.arange(len(one))) if moves else one.value.pad(len(one))
            for value in (one.value, late):
                self._refused_as_stale(value, side)
        self.reached("read in a stale window refused")
        one.judge()
        return self.derived(one, one.moved(late, lambda array: array))

    def _refused_as_stale(self, value: MirroredTensor, side: str) -> None:
        try:
            _ = value.np if side == "host" else value.device
        except Violation as error:
            if error.code is not Code.MIRROR_STALE_READ:
                raise
        else:
            raise DisagreementError(f"{value!r} was read in a stale window of its {side} side")

    # Misuse

    @rule(one=values, side=st.sampled_from(["host", "device"]))
    def write_from_outside(self, one: Modelled, side: str) -> None:
        """A write in place through what a value hands out is found at the next check."""
        victim = one.value.take(range(len(one)))  # in memory of its own
        if not one.device.size or (side == "host" and one.host is None):
            return
        _ = victim.device
        memory = victim.host if side == "host" else victim.device
        memory.view(torch.uint8 if memory.dtype is torch.bool else memory.dtype).zero_()
        try:
            victim.check()
        except Violation as error:
            if error.code is not Code.MIRROR_FOREIGN_WRITE:
                raise
            self.reached("write from outside found")
        else:
            raise DisagreementError(f"the {side} side of {victim!r} was written from outside, and nobody noticed")

    @rule(one=values, misuse=st.sampled_from(MISUSES))
    def misuse(self, one: Modelled, misuse: Misuse[MirroredTensor]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        if misuse.applies(one.value):
            with self.refused(*misuse.expected):
                misuse.call(one.value)


def _alike(one: Modelled, other: Modelled) -> bool:
    first, second = one.value, other.value
    return (
        (first.unit, first.dtype, first.shape[1:]) == (second.unit, second.dtype, second.shape[1:])
        and len(first) + len(second) <= 2 * MOST_ROWS
    ) or one is other


def _fits(values: Array, amount: Array) -> bool:
    limits = np.iinfo(values.dtype)
    sums = values.astype(object) + _across(amount, values.ndim).astype(object)
    return all(int(limits.min) <= int(one) <= int(limits.max) for one in sums.reshape(-1))


def _sum(values: Array, amount: Array) -> Array:
    return (values.astype(object) + _across(amount, values.ndim).astype(object)).astype(values.dtype)


def _across(amount: Array, ndim: int) -> Array:
    return amount.reshape(-1, *[1] * (ndim - 1)) if amount.ndim else amount
