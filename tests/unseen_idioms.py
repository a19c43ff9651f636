"""Plain torch with what torch does unseen, racy and safe: pinned blocks, memory of graphs, backward passes.

Each is a function of the window and `racy`; with the kind of its one finding.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import CUDAGraph, Stream, current_stream, synchronize

from batchstate.races import RaceKind, declared_kernel

Program = Callable[[Any, bool], Any]
PROGRAMS: dict[str, tuple[RaceKind, Program]] = {}


def program(kind: RaceKind) -> Callable[[Program], Program]:
    """Registers a program by its name."""

    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = (kind, function)
        return function

    return register


@declared_kernel(reads=["source"], writes=["target"])
def raw_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Stands for `cudaMemcpyAsync`, or for a kernel that reads host memory by its address."""
    target.numpy()[:] = source.numpy()


@program(RaceKind.FREED_IN_USE)
def pinned_block_under_a_raw_copy(cuda: Any, racy: bool) -> Any:
    """Torch keeps a pinned temporary for its own copies; it knows of no other."""
    side = Stream()
    out = torch.zeros(4, device="cuda")
    synchronize()
    staged = torch.ones(4).pin_memory()
    with torch.cuda.stream(side):
        raw_copy(staged, out)
    if not racy:
        side.synchronize()
    del staged
    torch.zeros(4).pin_memory()
    synchronize()
    return out


@program(RaceKind.FREED_IN_USE)
def landing_of_a_raw_copy(cuda: Any, racy: bool) -> Any:
    """The landing of a raw copy is dropped, and the next pinned tensor gets the block that it lands in."""
    side, source = Stream(), torch.ones(4, device="cuda")
    synchronize()
    landing = torch.zeros(4, pin_memory=True)
    with torch.cuda.stream(side):
        raw_copy(source, landing)
        if not racy:
            side.synchronize()
    del landing
    other = torch.zeros(4, pin_memory=True)
    synchronize()
    return other


@program(RaceKind.FREED_IN_USE)
def graph_reads_a_dropped_source(cuda: Any, racy: bool) -> Any:
    """A graph copies from a pinned temporary, whose block goes back behind the capture."""
    static, graph = torch.zeros(4, device="cuda"), CUDAGraph()
    staged = torch.ones(4).pin_memory()
    with torch.cuda.graph(graph):
        static.copy_(staged, non_blocking=True)
    if racy:
        del staged
    torch.zeros(4).pin_memory()
    graph.replay()
    synchronize()
    return static


@program(RaceKind.FREED_IN_USE)
def graph_uses_a_workspace_that_grew(cuda: Any, racy: bool) -> Any:
    """A workspace is made anew for a longer prompt; the graph has the address of the one before."""
    workspace, graph = torch.zeros(4, device="cuda"), CUDAGraph()
    with torch.cuda.graph(graph):
        workspace.add_(1)
        out = workspace * 2
    if racy:
        workspace = torch.zeros(100, device="cuda")
    kept = torch.full((4,), 7.0, device="cuda")
    graph.replay()
    synchronize()
    return out, kept


@program(RaceKind.FREED_IN_USE)
def graph_uses_storage_that_was_resized(cuda: Any, racy: bool) -> Any:
    """Weights that sleep give their memory back; those that wake lie elsewhere."""
    weights, graph = torch.ones(4, device="cuda"), CUDAGraph()
    with torch.cuda.graph(graph):
        out = weights * 2
    if racy:
        storage = weights.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        weights.fill_(1)
    graph.replay()
    return out


@program(RaceKind.WRITE_AFTER_WRITE)
def graphs_of_one_pool_at_once(cuda: Any, racy: bool) -> Any:
    """Graphs that share a pool share the memory of what lies in between."""
    first, second, x = CUDAGraph(), CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(first):
        left = (x * 2) + 1
    with torch.cuda.graph(second, pool=first.pool()):
        right = (x * 3) + 1
    side = Stream()
    synchronize()
    first.replay()
    if not racy:
        side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        second.replay()
    synchronize()
    return left, right


@program(RaceKind.LEFTOVER_READ)
def number_baked_into_a_graph(cuda: Any, racy: bool) -> Any:
    """A Python number is what it was when the graph was captured."""
    scale, x, graph = [2.0], torch.ones(4, device="cuda"), CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * scale[0]
    if cuda is not None:
        cuda.bind(graph, scale=lambda: scale[0])
    graph.replay()
    scale[0] = 3.0 if racy else 2.0
    graph.replay()
    return y, scale[0]


@program(RaceKind.READ_AFTER_WRITE)
def gradient_hook_on_a_side_stream(cuda: Any, racy: bool) -> Any:
    """A backward node runs on the stream of its forward: a hook that waits for another one reads the gradient early."""
    main, side, comm = current_stream(), Stream(), Stream()
    weight = torch.ones(4, device="cuda", requires_grad=True)
    other, x, out = torch.ones(4, device="cuda", requires_grad=True), torch.ones(4, device="cuda"), []
    synchronize()

    def reduce(gradient: torch.Tensor) -> None:
        comm.wait_stream(main if racy else current_stream())
        with torch.cuda.stream(comm):
            out.append(gradient * 2)
            gradient.record_stream(comm)

    with torch.cuda.stream(side):
        hidden = weight * x
        hidden.register_hook(reduce)
        loss = (hidden * hidden).sum()
    main.wait_stream(side)
    (loss + (other * weight).sum()).backward()
    (again,) = torch.autograd.grad((weight * other).sum(), [other])
    main.wait_stream(comm)
    return out, weight.grad, other.grad, again
