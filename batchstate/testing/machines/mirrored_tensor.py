"""`MirroredTensor` against numpy: every operation, every contract, device sides made and not made."""

from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule

from batchstate.contracts import Contract, combined, weaker_or_equal
from batchstate.errors import ContractError, DtypeError, ShapeError, ValueOverflowError
from batchstate.indices import Slots
from batchstate.invariants import Code, Violation
from batchstate.mirror import MirroredTensor
from batchstate.testing.arithmetic import fits, plus
from batchstate.testing.machine import DisagreementError, agree
from batchstate.testing.machines.mirrored_tensor_misuse import MISUSES
from batchstate.testing.machines.values import VALUES, ValueMachine
from batchstate.testing.misuse import Misuse
from batchstate.testing.modelled import Modelled, value_of
from batchstate.testing.strategies import (
    MOST_ROWS,
    amounts,
    column_values,
    contracts,
    keep_lists,
    row_lists,
    split_sizes,
)
from batchstate.testing.sync_guard import no_hidden_sync

Array = npt.NDArray[Any]

_FAR = 2**63 - 1
"""An amount that takes most numbers out of their dtype."""


class MirroredTensorMachine(ValueMachine):
    """Derives values from values, and tries what must be refused."""

    NAME = "mirrored_tensor"

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

    @rule(target=VALUES, one=VALUES, data=st.data())
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
        bounded = one.value.contract is Contract.UPPER_BOUND
        if kind == "u" and bounded and (sign * np.asarray(amount) < 0).any():
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
        weaker = weaker_or_equal(contract, one.value.contract) and contract is not Contract.HOST_ONLY
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

    @rule(one=VALUES, side=st.sampled_from(["host", "device"]))
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

    @rule(one=VALUES, misuse=st.sampled_from(MISUSES))
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
