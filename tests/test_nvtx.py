"""NVTX ranges round the operations of a step."""

import runpy
from collections.abc import Iterator

import pytest
import torch

from batchstate import Batch, SlotPool, mirrored, nvtx, open_runtime, set_nvtx, slot_column
from batchstate.errors import ArgumentError


class Rows(Batch):
    """A small batch."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ranges as they are opened and closed, by a stand-in for the library of NVIDIA; they are off at the end."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("end"))
    yield found
    set_nvtx(False)


def test_each_operation_has_a_range(calls: list[str]) -> None:
    """Each call of an operation opens a range of its name and closes it, also where it raises."""
    runtime = open_runtime("cpu")
    pool = SlotPool(runtime, 4)
    assert not set_nvtx(True)
    calls.clear()
    batch = Rows.build(runtime, slots=pool.take(2), seq_lens=[5, 3])
    assert type(batch) is Rows
    batch.filter([0]).upload()
    with pytest.raises(ArgumentError):
        batch.filter([0, 0])
    opened = [one for one in calls if one != "end"]
    names = ["SlotPool.take", "Batch.build", "Batch.filter", "Batch.upload", "Batch.filter"]
    assert opened == [f"batchstate: {name}" for name in names]
    assert len(calls) == 2 * len(names)
    assert calls[-1] == "end"


def test_off_puts_every_method_back(calls: list[str]) -> None:
    """While ranges are off each method is the function of its class, and no range is opened."""
    before = {key: vars(key[0])[key[1]] for key in nvtx._methods}
    assert before == nvtx._methods
    set_nvtx(True)
    assert not any(vars(cls)[name] is method for (cls, name), method in before.items())
    assert set_nvtx(True)
    assert set_nvtx(False)
    assert {key: vars(key[0])[key[1]] for key in before} == before
    calls.clear()
    SlotPool(open_runtime("cpu"), 4).take(1)
    assert calls == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NVTX")
def test_a_build_without_nvtx_says_so() -> None:
    """Without the library of NVIDIA the switch is a typed error, and stays off."""
    with pytest.raises(ArgumentError, match="expected a build of torch with NVTX"):
        set_nvtx(True)
    assert not set_nvtx(False)


def test_the_environment_is_read_once(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`BATCHSTATE_NVTX=1` switches on as classes are made; another value than 0 and 1 is a typed error."""
    monkeypatch.setenv("BATCHSTATE_NVTX", "1")
    decorator = runpy.run_path(nvtx.__file__)["ranges"]("take")
    calls.clear()
    decorator(type("Pool", (), {"take": lambda self: None}))().take()
    assert calls == ["batchstate: Pool.take", "end"]
    monkeypatch.setenv("BATCHSTATE_NVTX", "yes")
    with pytest.raises(ArgumentError, match="expected 0 or 1, got 'yes'"):
        runpy.run_path(nvtx.__file__)
