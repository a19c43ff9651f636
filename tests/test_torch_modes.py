"""Whole steps under what engines set for the process: inference mode, a default device, a default dtype."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from batchstate import checks
from batchstate.runtime import Runtime
from benchmarks.steady_steps import Steady
from examples.traffic import fitted_workload, run_traffic


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A window in which torch makes floating-point tensors of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "another default device": lambda: torch.device("meta"),  # a tensor made without `device=` would have no memory
    "another default dtype": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_decode_steps(rt: Runtime, mode: str, leaving: int, level: str) -> None:
    """Decode steps run, with requests that leave and join and without, where the planner is made inside or before."""
    with checks(level):
        before = Steady(rt, 8, leaving)
        with MODES[mode]():
            inside = Steady(rt, 8, leaving)
            for _ in range(20):
                before.step()
                inside.step()
                rt.synchronize()  # one runtime may have two steps in flight, and here are two engines
        before.step()


@pytest.mark.parametrize("mode", MODES)
def test_traffic(mode: str, device: str) -> None:
    """An engine in which requests are admitted, retracted and aborted ends with every slot and page back."""
    with MODES[mode]():
        assert run_traffic(fitted_workload(10), device=device).clean
