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
@pytest.mark.parametrize("leaving", [0, 2])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_decode_steps(rt: Runtime, mode: str, every: int, leaving: int, level: str) -> None:
    """Each step runs in the mode, or some do, with requests that stay or not, and a planner made inside or before."""
    with checks(level):
        engines = [Steady(rt, 8, leaving)]
        with MODES[mode]():
            engines.append(Steady(rt, 8, leaving))
        for turn in range(11):
            with MODES[mode]() if turn % every == 0 else contextlib.nullcontext():
                for engine in engines:
                    engine.step()
                rt.synchronize()  # one runtime may have two steps in flight, and here are two engines
        for engine in engines:
            assert max(engine.step().ids.tolist()) == (4 if leaving else 12)


@pytest.mark.parametrize("mode", MODES)
def test_traffic(mode: str, device: str) -> None:
    """An engine in which requests are admitted, retracted and aborted ends with every slot and page back."""
    with MODES[mode]():
        assert run_traffic(fitted_workload(10), device=device).clean
