"""A kind of column of one's own: a subclass that refuses some values, and is asked by each call that takes values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Batch, MirroredTensor, PagePool, Runtime, SlotPool, StaticBuffers, StepPlanner, slot_column
from batchstate.columns import DeviceColumn, MirroredColumn, device_only, mirrored
from batchstate.errors import ArgumentError, DeclarationError, DtypeError
from batchstate.mirror import Contract

MOST = 9


def _check_cap(name: str, values: Any, label: str) -> None:
    wrong = values[(values < 0) | (values > MOST)]
    if wrong.size:
        raise ArgumentError(f"{label}: {name} of {wrong[0]}", value=int(wrong[0]), remedy=f"pass 0 to {MOST}")


class CappedColumn(MirroredColumn):
    """Numbers of 0 to `MOST`."""

    def check_values(self, values: Any, runtime: Runtime, label: str) -> None:
        """Refuses others."""
        _check_cap(self.name, values, label)


class CappedDeviceColumn(DeviceColumn):
    """The same without a host side."""

    def check_values(self, values: Any, runtime: Runtime, label: str) -> None:
        """Refuses others."""
        _check_cap(self.name, values, label)


class Capped(Batch):
    """Requests with columns of these kinds."""

    slots = slot_column()
    lens = mirrored(torch.int64)
    seq_lens = CappedColumn(torch.int64, (), 0, Contract.EXACT)
    bound = CappedColumn(torch.int32, (), 0, Contract.UPPER_BOUND)
    drafts = CappedColumn(torch.int64, (2,), 1, Contract.EXACT)
    state = CappedDeviceColumn(torch.int64, (), 0, Contract.DEVICE_ONLY)


def _values(rt: Runtime, state: object) -> dict[str, Any]:
    bound = MirroredTensor.from_pair(
        rt, [7, 8], rt.upload([np.array([5, 8], np.int32)]).view(0), contract="upper_bound"
    )
    return {"lens": [4, 9], "seq_lens": np.array([4, 9]), "bound": bound, "drafts": [[1, 2], [3, 4]], "state": state}


@pytest.fixture
def pages(rt: Runtime) -> PagePool:
    """Pages for a few requests."""
    return PagePool(rt, SlotPool(rt, 6), 12, 4, max_tokens_per_request=12)


@pytest.fixture
def batch(rt: Runtime, pages: PagePool) -> Capped:
    """Two requests, one at the cap."""
    slots = pages.slots.take(2)
    pages.extend(slots, [4, 9])
    return Capped.build(rt, slots=slots, **_values(rt, [0, MOST]))


def test_a_subclass_of_a_kind_works_in_every_operation(rt: Runtime, batch: Capped) -> None:
    """Rows of it move, pad, cross and are filled into fixed addresses like those of the kind that it derives from."""
    assert batch.filter([1, 0]).seq_lens.np.tolist() == [9, 4]
    padded = batch.update("drafts", [0], [5, 6]).pad(3)
    assert padded.drafts.np.tolist() == [[5, 6], [3, 4], [1, 1]]
    assert rt.inspect(padded.state.device).tolist() == [0, MOST, 0]
    static = StaticBuffers(rt, Capped, rows=4)
    batch.to_static(static)
    assert rt.inspect(static["drafts"]).tolist() == [[1, 2], [3, 4], [1, 1], [1, 1]]


HIGH = MOST + 1
GIVEN: dict[str, Callable[[Runtime], Any]] = {
    "a list": lambda rt: [1, HIGH],
    "an array of its dtype": lambda rt: np.array([1, HIGH]),
    "a CPU tensor": lambda rt: torch.tensor([1, HIGH]),
    "a mirrored value": lambda rt: MirroredTensor.from_host(rt, [1, HIGH]),
}


@pytest.mark.parametrize("given", list(GIVEN))
@pytest.mark.parametrize("call", ["build", "replace", "plan(joining=)"])
def test_whole_columns_are_asked(rt: Runtime, pages: PagePool, batch: Capped, call: str, given: str) -> None:
    """However the values are given, also as the array that other columns take as it is; nothing is taken."""
    high = GIVEN[given](rt)
    stats = pages.slots.stats
    planner = StepPlanner(Capped, pages=pages, seq_lens="lens")
    calls: dict[str, Callable[[], object]] = {
        "build": lambda: Capped.build(rt, slots=batch.slots, **_values(rt, [0, 0]) | {"seq_lens": high}),
        "replace": lambda: batch.replace(seq_lens=high),
        "plan(joining=)": lambda: planner.plan(batch, joining=_values(rt, [0, 0]) | {"seq_lens": high}),
    }
    with pytest.raises(ArgumentError, match=f"column 'seq_lens': seq_lens of {HIGH}"):
        calls[call]()
    assert pages.slots.stats == stats


SOME: dict[str, Callable[[Capped], object]] = {
    "update": lambda one: one.update("seq_lens", [0], HIGH),
    "update of rows": lambda one: one.update("drafts", [1], [[1, HIGH]]),
    "update with one row for all": lambda one: one.update("drafts", [0, 1], [1, HIGH]),
    "update_device": lambda one: one.update_device(
        "bound", [0], one.runtime.upload([np.array([1], np.int32)]).view(0), bound=HIGH
    ),
    "host values of a device column": lambda one: one.replace(state=[HIGH, 0]),
}


@pytest.mark.parametrize("call", list(SOME))
def test_some_rows_are_asked(batch: Capped, call: str) -> None:
    """Also one value for several rows, bounds, and host values of a column without a host side."""
    with pytest.raises(ArgumentError, match=f" of {HIGH}"):
        SOME[call](batch)


def test_lower_bounds_are_asked(batch: Capped) -> None:
    """What results prove lowers a bound, and not below what the column takes."""
    assert batch.tighten("bound", [5, 8], slots=batch.slots).bound.np.tolist() == [5, 8]
    with pytest.raises(ArgumentError, match="tighten: column 'bound': bound of -1"):
        batch.tighten("bound", [5, -1], slots=batch.slots)


def test_what_checks_its_values_is_not_computed(pages: PagePool, batch: Capped) -> None:
    """`advance` and a step would change values without a look at them: they refuse the kind."""
    for refused in (lambda: batch.advance("seq_lens", 1), lambda: StepPlanner(Capped, pages=pages, has_ids=False)):
        with pytest.raises(DtypeError, match="'seq_lens' holds int64, of which a CappedColumn takes some"):
            refused()
    assert pages.committed(batch.slots).tolist() == [4, 9]


def test_what_advance_names_can_be_advanced(rt: Runtime) -> None:
    """A wrong name is answered with the columns that take an amount: not bits, nor what checks its values."""

    class Mixed(Batch):
        capped = CappedColumn(torch.int64, (), 0, Contract.EXACT)
        bits = device_only(torch.bfloat16)
        lens = mirrored(torch.int64)

    with pytest.raises(DeclarationError, match="column 'nope' is not declared") as refused:
        Mixed.empty(rt).advance("nope")
    assert refused.value.remedy == "use one of: lens"


@pytest.mark.usefixtures("full")
def test_values_on_the_device_are_asked_at_full(rt: Runtime, batch: Capped) -> None:
    """A column without a host side is read at `full`, and its kind is asked."""
    with pytest.raises(ArgumentError, match=f"state of {HIGH}"):
        batch.replace(state=rt.upload([np.array([0, HIGH])]).view(0))
