"""Mirrored values for a machine: makes them, keeps them, and judges all of them after every rule."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, rule

from batchstate.contracts import Contract
from batchstate.indices import HostTokens, Pages, Slots, Tokens
from batchstate.mirror import MirroredTensor
from batchstate.testing.machine import Machine
from batchstate.testing.modelled import Modelled
from batchstate.testing.strategies import (
    MOST_ROWS,
    column_values,
    contracts,
    dtypes,
    mirrored_tensors,
    row_shapes,
)

Array = npt.NDArray[Any]

VALUES = Bundle("values")

_FEW_DTYPES = st.one_of(st.just(torch.int64), dtypes())


class ValueMachine(Machine):
    """Makes values of every kind; subclasses derive others from them."""

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
                None if one.value.device_side.made is None else self.rt.inspect(one.value.device).tobytes(),
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

    @rule(target=VALUES, data=st.data(), contract=contracts("exact", "upper_bound", "host_only", "device_only"))
    def make(self, data: st.DataObject, contract: Contract) -> Modelled:
        """A value like the others."""
        alike = mirrored_tensors(
            self.rt, dtypes=st.just(self.dtype), contracts=st.just(contract), shapes=st.just(self.shape)
        )
        return self.kept(data.draw(alike, label="value"))

    @rule(target=VALUES, data=st.data(), kind=st.sampled_from([Slots, Pages, Tokens, HostTokens, MirroredTensor]))
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

    @rule(one=VALUES, side=st.booleans())
    def use_on_device(self, one: Modelled, side: bool) -> None:
        """The device side is made at first use, on whichever stream uses it."""
        with self.on(side):
            one.judge_device()
        self.reached("read on a second stream", side)
