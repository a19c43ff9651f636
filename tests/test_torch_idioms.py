"""How torch really runs: the pairs of `torch_idioms` on the race detector, and on the simulated device."""

# mypy: disable-error-code="no-untyped-call"

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import synchronize

from batchstate.errors import ArgumentError
from batchstate.races.cuda import cuda_on_cpu, declared_kernel
from batchstate.races.sim import LATE, PORTFOLIO, DeviceFault
from tests.test_cuda_on_sim import values_of
from tests.torch_idioms import MIDDLE, NEVER, PAIRS, WHOLE, _offloaded


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair(name: str) -> None:
    """The racy side is reported by its kind, once, with both lines; nothing is reported of the safe one."""
    kind, program = PAIRS[name]
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as rt:
            program(racy)
        assert [race.kind for race in rt.races] == [kind] * racy, "\n".join(map(str, rt.races))
        for race in rt.races:
            assert "torch_idioms.py:" in race.first.site
            assert "torch_idioms.py:" in race.second.site, race.second.site


def outcome(name: str, racy: bool, device: str) -> str:
    """What a program comes to."""
    torch.default_generator.manual_seed(0)
    try:
        with cuda_on_cpu(device) as rt:
            result = PAIRS[name][1](racy)
            synchronize()
            assert not rt.unmodelled  # type: ignore[union-attr]
            return repr(values_of(result))
    except DeviceFault:
        return "a fault of the device"


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_on_the_simulated_device(name: str) -> None:
    """The order that swaps the two accesses gives wrong values; the safe side is right in all orders."""
    with cuda_on_cpu(on_race="collect") as rt:
        PAIRS[name][1](True)
    right = outcome(name, False, "sim:eager")
    assert outcome(name, True, "sim:eager") == right
    swaps = [f"{LATE}{race.first.lane}" for race in rt.races]
    assert any(outcome(name, True, f"sim:{order}") != right for order in swaps)
    for order in (*PORTFOLIO, *swaps):
        assert outcome(name, False, f"sim:{order}") == right, order


@pytest.mark.parametrize(
    ("operators", "waits", "in_flight"), [(MIDDLE, True, True), (WHOLE, True, False), (NEVER, False, True)]
)
def test_which_operators_wait(operators: dict[str, Any], waits: bool, in_flight: bool) -> None:
    """For what came before, for their result, or not at all; a wait is told with its line."""
    for name, (operate, values) in operators.items():
        with cuda_on_cpu() as rt:
            side, operand = torch.cuda.Stream(), values.cuda()
            synchronize()
            rt.waited_at.clear()
            with torch.cuda.stream(side):
                operate(operand)
            assert bool([at for called, at in rt.waited_at if called not in ("copy_", "_to_copy")]) is waits or (
                waits and name.startswith("type")
            ), name
            assert side.query() is not in_flight, name


def test_rows_that_a_kernel_names() -> None:
    """An index, a list with neighbours, a number from the end, a slice; a name that is no argument is refused."""
    for rows, free in (([0, 1, -1], 2), (slice(1, 3), 3), (torch.tensor([3]), 0)):
        with cuda_on_cpu() as rt:
            side, cache = torch.cuda.Stream(), torch.zeros(4, 2).cuda()
            named = rows.cuda() if isinstance(rows, torch.Tensor) else rows
            out = torch.zeros(len(range(4)[rows]) if isinstance(rows, slice) else len(rows), 2).cuda()
            synchronize()
            with torch.cuda.stream(side):
                _offloaded(cache, named, out)
            cache[free].fill_(1)
            assert rt.races == ()
    with pytest.raises(ArgumentError, match="has no argument 'other'"):
        declared_kernel(rows={"x": "other"})(lambda x: None)


@pytest.mark.parametrize("pause", [lambda: time.sleep(0), lambda: asyncio.run(asyncio.sleep(0))])
def test_a_poll_loop_that_sleeps_gets_on(pause: Callable[[], None]) -> None:
    """A hundred questions, each behind a `time.sleep` or an `asyncio.sleep`, are enough; the line is told."""
    with cuda_on_cpu() as rt:
        done = torch.cuda.Event()
        torch.zeros(4, device="cuda")
        done.record()
        asked = 0
        while not done.query():
            asked += 1
            pause()
        assert 90 < asked < 110
        ((at, times),) = rt.polled_at.items()
        assert "in test_a_poll_loop_that_sleeps_gets_on" in at.words()[0]
        assert times == 1


def test_traced_modules_run_as_they_are() -> None:
    """`torch.jit.trace` in the window returns the code itself."""
    with cuda_on_cpu():
        traced = torch.jit.trace(lambda x: x + 1, torch.zeros(2, device="cuda"))
        assert traced(torch.zeros(2, device="cuda")).tolist() == [1, 1]
