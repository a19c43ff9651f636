"""Pinned blocks, graphs and addresses: each program racy and safe, on the detector and on the simulated device."""

# mypy: disable-error-code="no-untyped-call, possibly-undefined"

from typing import Any

import pytest
import torch
from torch.cuda import CUDAGraph, Stream, synchronize

from batchstate.races import RaceKind
from batchstate.races.cuda import cuda_on_cpu
from batchstate.races.sim import LATE, PORTFOLIO
from batchstate.races.tracing.clocks import HOST
from tests.selfcheck.machines.plain_torch import watched_over
from tests.test_cuda_on_sim import values_of
from tests.unseen_idioms import PROGRAMS, raw_copy

VALUES_OF_SIM = [name for name in PROGRAMS if name not in ("graphs_of_one_pool_at_once", "number_baked_into_a_graph")]
VALUES_OF_SIM.remove("graph_uses_storage_that_was_resized")  # the block stays where it is


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_racy_side_is_named(name: str) -> None:
    """By its kind, with two lines of the program; its safe twin is silent."""
    kind, program = PROGRAMS[name]
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as cuda:
            program(cuda, racy)
        assert {race.kind for race in cuda.races} == ({kind} if racy else set()), "\n".join(map(str, cuda.races))
        for race in cuda.races:
            assert "unseen_idioms.py:" in race.first.site
            assert "unseen_idioms.py:" in race.second.site


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith(("graph_uses_a", "graphs", "number"))])
def test_beside_a_device(name: str) -> None:
    """The same, told to `watch_cuda` alone."""
    kind, program = PROGRAMS[name]
    for racy in (True, False):
        with cuda_on_cpu(on_race="collect") as device, watched_over(device, on_race="collect") as cuda:
            program(cuda, racy)
        assert {race.kind for race in cuda.races} == ({kind} if racy else set()), "\n".join(map(str, cuda.races))


def on_sim(name: str, racy: bool, scheduler: str, seed: int) -> Any:
    """The values of a program under a scheduler."""
    with cuda_on_cpu(f"sim:{scheduler}", seed=seed):
        result = PROGRAMS[name][1](None, racy)
        synchronize()
        return repr(values_of(result))


@pytest.mark.parametrize("name", VALUES_OF_SIM)
def test_wrong_values_on_the_simulated_device(name: str) -> None:
    """The racy side has wrong values in some order, the safe side in none: blocks come back first."""
    right = on_sim(name, False, "eager", 0)
    with cuda_on_cpu(on_race="collect") as cuda:
        PROGRAMS[name][1](cuda, True)
    late = {f"{LATE}{race.first.lane}" for race in cuda.races if race.first.lane != HOST}
    orders = [(scheduler, seed) for scheduler in (*PORTFOLIO, *sorted(late)) for seed in range(4)]
    assert {on_sim(name, False, *order) for order in orders} == {right}
    assert {on_sim(name, True, *order) for order in orders} != {right}


def test_what_is_no_mistake() -> None:
    """Pinned temporaries under copies of torch; one graph on two streams; numbers of the host that change later."""
    side, graph = None, None
    for device in ("race", "sim:lazy", "sim:random"):
        with cuda_on_cpu(device) as cuda:
            side, graph = Stream(), CUDAGraph()
            total, number = torch.zeros(4, device="cuda"), torch.tensor(1.0)
            with torch.cuda.graph(graph):
                total.add_(number)
            number.fill_(5.0)
            synchronize()
            graph.replay()
            with torch.cuda.stream(side):
                graph.replay()  # behind its launch before, whatever the stream
            synchronize()
            with torch.cuda.stream(side):
                for _ in range(3):
                    total.add_(torch.ones(4).pin_memory().to("cuda", non_blocking=True))
                    torch.zeros(4).pin_memory()
                torch.empty(4, pin_memory=True).copy_(total, non_blocking=True)
            torch.zeros(4).pin_memory()
            synchronize()
            assert total.tolist() == [5.0] * 4
            assert getattr(cuda, "races", ()) == ()


def test_reports_of_memory_say_what_to_do() -> None:
    """Where the tensor was dropped, and that torch keeps pinned memory for its own copies alone."""
    with cuda_on_cpu(on_race="collect") as cuda:
        for name in ("pinned_block_under_a_raw_copy", "graph_reads_a_dropped_source", "number_baked_into_a_graph"):
            PROGRAMS[name][1](cuda, True)
    pinned, source, number = cuda.races
    assert ", dropped at tests/unseen_idioms.py:" in pinned.missing
    assert pinned.suggestion == (
        "keep it until raw_copy on 'side' is over: torch keeps pinned memory for copies that it has made itself, and "
        "for nothing else"
    )
    assert source.problem.startswith("a graph uses memory that was freed behind its capture: copy_ (graph) on ")
    assert source.first.does == "frees"
    assert source.suggestion.startswith("keep the tensor for as long as the graph is replayed")
    assert number.problem.endswith("reads for scale=3.0 what bind on the host wrote for scale=2.0")
    assert number.kind is RaceKind.LEFTOVER_READ


def test_a_kernel_of_the_simulated_device_keeps_no_tensor() -> None:
    """Memory that is dropped under a declared kernel is given away, as on a device."""
    seen = set()
    for seed in range(8):
        with cuda_on_cpu("sim:random", seed=seed):
            side, out = Stream(), torch.zeros(4, device="cuda")
            synchronize()
            source = torch.ones(4, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                raw_copy(source, out)
            del source
            torch.zeros(4, device="cuda")
            synchronize()
            seen.add(out.tolist()[0] == 1.0)
    assert seen == {True, False}


def offloaded_by_address(racy: bool) -> Any:
    """A table keyed by address, as trl #4247 had: the entry of a freed tensor is taken for that of the next one."""
    copies: dict[int, torch.Tensor] = {}
    for value in (1.0, 2.0):
        tensor = torch.full((4,), value, device="cuda")
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.cpu()
        kept: torch.Tensor = copies[tensor.data_ptr()]
        if not racy:
            del copies[tensor.data_ptr()]
        del tensor
    return kept.tolist()


@pytest.mark.parametrize("racy", [True, False])
def test_addresses_come_again(racy: bool) -> None:
    """With `reuse=True` freed blocks of a size come back first; so they always do on the simulated device."""
    with cuda_on_cpu(reuse=True) as cuda:
        assert (offloaded_by_address(racy) == [2.0] * 4) is not racy
        assert cuda.races == ()
    with cuda_on_cpu("sim:eager", reuse=True):
        assert (offloaded_by_address(racy) == [2.0] * 4) is not racy


def test_blocks_are_apart() -> None:
    """Those of two streams, of two sizes, and of tensors that are alive; one of the same bytes comes back."""
    with cuda_on_cpu(reuse=True):
        side = Stream()
        alive = torch.ones(4, device="cuda")
        again = torch.zeros(4, device="cuda")
        at = again.data_ptr()
        del again
        with torch.cuda.stream(side):
            assert torch.zeros(4, device="cuda").data_ptr() != at
        assert torch.zeros(1000, device="cuda").data_ptr() != at
        assert torch.zeros(2, 2, device="cuda").data_ptr() == at
        assert alive.tolist() == [1.0] * 4
