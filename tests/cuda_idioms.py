"""Idioms of plain torch, racy and safe: what code that has never heard of the library says to CUDA.

Each is a function of `racy`; with what kind of race the racy one has, or None where both sides are safe.
"""

# mypy: disable-error-code="no-untyped-call"

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.cuda import Event, Stream, current_stream, synchronize  # imported before there is a device

from batchstate.races.report import RaceKind

Idiom = Callable[[bool], Any]
IDIOMS: dict[str, tuple[RaceKind | None, Idiom]] = {}


def idiom(kind: RaceKind | None) -> Callable[[Idiom], Idiom]:
    """Registers a program by its name."""

    def register(program: Idiom) -> Idiom:
        IDIOMS[program.__name__] = (kind, program)
        return program

    return register


@idiom(RaceKind.FREED_IN_USE)
def record_stream_left_out(racy: bool) -> Any:
    """A tensor of the default stream is used on a side stream and dropped."""
    side = Stream()
    batch = torch.ones(8, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        total = batch * 2
        if not racy:
            batch.record_stream(side)
    del batch
    other = torch.zeros(8, device="cuda")
    return total, other


@idiom(RaceKind.FREED_IN_USE)
def freed_while_a_side_stream_reads(racy: bool) -> Any:
    """The host waits for the side stream before it drops what that reads, or does not."""
    side = Stream()
    batch = torch.ones(8, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        total = batch.sum()
    if not racy:
        side.synchronize()
    del batch
    return total, torch.empty(8, device="cuda")


@idiom(RaceKind.STAGING_REFILLED)
def non_blocking_from_pinned_or_pageable(racy: bool) -> Any:
    """`non_blocking` keeps its promise for pinned memory alone; pageable memory was read when the call returns."""
    source = torch.arange(8)
    if racy:
        source = source.pin_memory()
    moved = source.to("cuda", non_blocking=True)
    source.fill_(0)
    return moved


@idiom(RaceKind.STAGING_REFILLED)
def numpy_refills_a_pinned_buffer(racy: bool) -> Any:
    """An array of pinned memory is written where torch sees nothing."""
    staged = torch.zeros(8, pin_memory=True)
    array = staged.numpy()
    array[:] = 1
    moved = torch.empty(8, device="cuda")
    moved.copy_(staged, non_blocking=True)
    copied = current_stream().record_event()
    if not racy:
        copied.synchronize()
    array[:] = 2
    torch.cuda.synchronize()
    return moved


@idiom(RaceKind.READ_AFTER_WRITE)
def event_recorded_twice(racy: bool) -> Any:
    """One event for two producers: a wait is for the last recording alone."""
    first, second, done = Stream(), Stream(), Event()
    left, right = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        left.fill_(1)
        done.record()
    if not racy:
        current_stream().wait_event(done)
    with torch.cuda.stream(second):
        right.fill_(2)
        done.record()
    current_stream().wait_event(done)
    return left + right


@idiom(RaceKind.READ_AFTER_WRITE)
def event_recorded_before_the_work(racy: bool) -> Any:
    """An event marks what its stream was given before it was recorded."""
    side = Stream()
    out = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        ready = Event()
        if racy:
            ready.record(side)
        out.fill_(3)
        if not racy:
            ready.record(side)
    ready.wait()
    return out.clone()


@idiom(RaceKind.WRITE_AFTER_READ)
def graph_replayed_while_its_input_is_refilled(racy: bool) -> Any:
    """The copy stream brings the next batch into a static input that the replay still reads."""
    copies = Stream()
    static_in, host = torch.zeros(4, device="cuda"), torch.ones(4).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_out = static_in * 2
    graph.replay()
    if not racy:
        copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        static_in.copy_(host, non_blocking=True)
    copies.synchronize()
    return static_out


@idiom(RaceKind.WRITE_AFTER_READ)
def graph_output_overwritten_by_the_next_replay(racy: bool) -> Any:
    """A side stream brings the static output to the host while the next replay writes it."""
    side = Stream()
    counter = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
    landing = torch.empty(4, pin_memory=True)
    graph.replay()
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        landing.copy_(counter, non_blocking=True)
        landed = side.record_event()
    if not racy:
        current_stream().wait_event(landed)
    graph.replay()
    landed.synchronize()
    return landing.tolist()


@idiom(RaceKind.READ_AFTER_WRITE)
def item_that_hides_a_race(racy: bool) -> Any:
    """`.item()` makes the host wait, which orders what it launches then: by accident."""
    side = Stream()
    table = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table.fill_(1)
        total = table.sum()
        if not racy:
            total.item()
    return table.clone()


@idiom(RaceKind.READ_AFTER_WRITE)
def prefetching_data_loader(racy: bool) -> Any:
    """The next batch is brought by a stream of its own; the default stream waits for it before it is used."""
    stream = torch.cuda.Stream()
    loader = iter([torch.full((4,), float(at)).pin_memory() for at in range(3)])
    seen = []

    def preload() -> torch.Tensor | None:
        host = next(loader, None)
        if host is None:
            return None
        with torch.cuda.stream(stream):
            return host.cuda(non_blocking=True)

    batch = preload()
    while batch is not None:
        if not racy:
            torch.cuda.current_stream().wait_stream(stream)
        batch.record_stream(torch.cuda.current_stream())
        seen.append(batch * 2)
        batch = preload()
    return seen


@idiom(RaceKind.STAGING_REFILLED)
def double_buffering(racy: bool) -> Any:
    """Two pinned buffers by turns; the third step waits for the first copy."""
    ring = [(torch.zeros(4, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
    side, moved = torch.cuda.Stream(), []
    for step in range(4):
        staged, copied = ring[step % 2]
        if not racy:
            copied.synchronize()
        staged.fill_(step)
        with torch.cuda.stream(side):
            moved.append(staged.to("cuda", non_blocking=True))
            copied.record(side)
    return moved


def _double_buffer(*, waits_for_use: bool, waits_for_fill: bool) -> Any:
    copies, default, out = Stream(), current_stream(), []
    buffers = [(torch.empty(4, device="cuda"), Event(), Event()) for _ in range(2)]
    for step in range(6):
        buffer, filled, used = buffers[step % 2]
        host = torch.full((4,), float(step)).pin_memory()
        with torch.cuda.stream(copies):
            if waits_for_use:
                copies.wait_event(used)
            buffer.copy_(host, non_blocking=True)
            filled.record()
        if waits_for_fill:
            default.wait_event(filled)
        out.append(buffer * 2)
        used.record()
    synchronize()
    return [one.tolist() for one in out]


@idiom(RaceKind.WRITE_AFTER_READ)
def double_buffer_of_the_device_refilled_in_use(racy: bool) -> Any:
    """Buffers that `torch.empty` makes on the default stream are filled by another, which waits for the last use."""
    return _double_buffer(waits_for_use=not racy, waits_for_fill=True)


@idiom(RaceKind.READ_AFTER_WRITE)
def double_buffer_of_the_device_read_early(racy: bool) -> Any:
    """The same; the default stream waits until they are filled, or does not."""
    return _double_buffer(waits_for_use=True, waits_for_fill=not racy)


@idiom(RaceKind.FREED_IN_USE)
def empty_gets_what_its_stream_has_freed(racy: bool) -> Any:
    """What was freed is in use on the default stream; a new buffer may be that memory, and another stream fills it."""
    copies = Stream()
    scratch = torch.ones(4, device="cuda")
    total = scratch * 2
    del scratch
    buffer = torch.empty(4, device="cuda")
    if not racy:
        copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        buffer.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    return total, buffer


@idiom(RaceKind.READ_AFTER_WRITE)
def pipeline_of_two_streams(racy: bool) -> Any:
    """Stage two of each microbatch runs behind stage one of it."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    weights = torch.eye(4, device="cuda")
    torch.cuda.synchronize()
    out = []
    for step in range(3):
        with torch.cuda.stream(one):
            hidden = weights @ torch.full((4, 4), float(step), device="cuda")
            done = one.record_event()
        if not racy:
            two.wait_event(done)
        with torch.cuda.stream(two):
            out.append(hidden @ weights)
            hidden.record_stream(two)
    return out


@idiom(RaceKind.WRITE_AFTER_READ)
def kv_offload(racy: bool) -> Any:
    """A block goes to the host on a side stream, and its place is given to another request."""
    offload = torch.cuda.Stream()
    cache = torch.zeros(8, 4, device="cuda")
    host = torch.empty(4, pin_memory=True)
    offload.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(offload):
        host.copy_(cache[3], non_blocking=True)
    if not racy:
        torch.cuda.current_stream().wait_stream(offload)
    cache[3] = 7.0
    offload.synchronize()
    return host.tolist()


@idiom(RaceKind.READ_AFTER_WRITE)
def kv_brought_back(racy: bool) -> Any:
    """Attention reads a block that a side stream still brings."""
    onload = torch.cuda.Stream()
    cache = torch.zeros(8, 4, device="cuda")
    host = torch.ones(4).pin_memory()
    onload.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(onload):
        cache[3].copy_(host, non_blocking=True)
        brought = torch.cuda.Event()
        brought.record()
    if not racy:
        brought.wait()
    return cache.index_select(0, torch.tensor([1, 3], device="cuda"))


@idiom(RaceKind.HOST_READS_EARLY)
def results_read_by_the_host(racy: bool) -> Any:
    """Tokens are copied to pinned memory, and the host reads them."""
    tokens, landing = torch.arange(4, device="cuda"), torch.empty(4, dtype=torch.int64, pin_memory=True)
    landing.copy_(tokens, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    if not racy:
        landed.synchronize()
    return landing.tolist()


@idiom(RaceKind.HOST_READS_EARLY)
def to_cpu_without_waiting(racy: bool) -> Any:
    """`.to("cpu", non_blocking=True)` returns before the numbers are there."""
    host = torch.arange(4, device="cuda").to("cpu", non_blocking=True)
    if not racy:
        torch.cuda.current_stream().synchronize()
    return host.tolist()


@idiom(RaceKind.READ_AFTER_WRITE)
def weights_loaded_on_the_default_stream(racy: bool) -> Any:
    """A model is made on the default stream, and runs on another."""
    model = torch.nn.Linear(4, 4, device="cuda")
    serve = torch.cuda.Stream()
    if not racy:
        serve.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(serve), torch.no_grad():
        return model(torch.ones(1, 4, device="cuda"))


@idiom(RaceKind.READ_AFTER_WRITE)
def wait_stream_before_the_launch(racy: bool) -> Any:
    """`wait_stream` waits for what the other stream was given by then."""
    side = torch.cuda.Stream()
    out = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    if racy:
        torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.stream(side):
        out.fill_(1)
    if not racy:
        torch.cuda.current_stream().wait_stream(side)
    return out + 1


@idiom(RaceKind.READ_AFTER_WRITE)
def event_asked_once(racy: bool) -> Any:
    """The host asks an event once, or until it says yes."""
    side, out, done = torch.cuda.Stream(), torch.zeros(4, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        out.fill_(1)
        done.record()
    complete = done.query()
    while not racy and not complete:
        complete = done.query()
    return out.clone()


@idiom(RaceKind.READ_AFTER_WRITE)
def synchronised_with_another_stream(racy: bool) -> Any:
    """The host waits for a stream: which one matters."""
    writer, other = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        out.fill_(1)
    (other if racy else writer).synchronize()
    return out.clone()


@idiom(RaceKind.WRITE_AFTER_READ)
def lengths_raised_in_place(racy: bool) -> Any:
    """Lengths of the requests grow for the next step while a forward reads those of this one."""
    forward = torch.cuda.Stream()
    lengths = torch.arange(4, device="cuda")
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        seen = lengths * 2
        read = forward.record_event()
    if not racy:
        torch.cuda.current_stream().wait_event(read)
    lengths += 1
    return seen


@idiom(RaceKind.READ_AFTER_WRITE)
def thread_with_a_stream_of_its_own(racy: bool) -> Any:
    """A worker thread fills a tensor on its stream, and sends an event with it or not."""
    results: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        mine = torch.cuda.Stream()
        with torch.cuda.stream(mine):
            made = torch.ones(4, device="cuda")
            results.put((made, mine.record_event()))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    made, ready = results.get()
    if not racy:
        torch.cuda.current_stream().wait_event(ready)
    return made + 1


@idiom(RaceKind.READ_AFTER_WRITE)
def gradients_reduced_by_another_stream(racy: bool) -> Any:
    """A bucket is sent by a communication stream."""
    comm = torch.cuda.Stream()
    bucket = torch.zeros(8, device="cuda")
    comm.wait_stream(torch.cuda.current_stream())
    bucket[:4].copy_(torch.ones(4, device="cuda"))
    if not racy:
        comm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(comm):
        reduced = bucket / 2
    comm.synchronize()
    return reduced.tolist()


@idiom(RaceKind.WRITE_AFTER_WRITE)
def rows_of_two_requests(racy: bool) -> Any:
    """Two streams write rows of one table by index."""
    side, table = torch.cuda.Stream(), torch.zeros(8, 2, device="cuda")
    mine, theirs = torch.tensor([1, 2], device="cuda"), torch.tensor([2 if racy else 3, 4], device="cuda")
    ones, twos = torch.ones(2, 2, device="cuda"), torch.full((2, 2), 2.0, device="cuda")
    torch.cuda.synchronize()
    table[mine] = ones
    with torch.cuda.stream(side):
        table[theirs] = twos
    torch.cuda.synchronize()
    return table


@idiom(RaceKind.READ_AFTER_WRITE)
def zeros_made_inside_of_the_stream_window(racy: bool) -> Any:
    """A factory runs on the stream that is current: an accumulator is zeroed there."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        total = torch.zeros(4, device="cuda")
    if not racy:
        side.synchronize()
    return total + 1


@idiom(RaceKind.READ_AFTER_WRITE)
def generic_events_and_the_accelerator_module(racy: bool) -> Any:
    """The same said by `torch.Event` and `torch.accelerator`."""
    side = torch.Stream("cuda")
    out = torch.zeros(4, device=torch.accelerator.current_accelerator())
    torch.accelerator.synchronize()
    done = torch.Event("cuda")
    with side:
        out.fill_(1)
        done.record()
    if not racy:
        torch.accelerator.current_stream().wait_event(done)
    return out.clone()


@idiom(RaceKind.HOST_MEMORY_REUSED)
def one_landing_for_two_steps(racy: bool) -> Any:
    """Two streams bring results to one pinned buffer."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    a, b, landing = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), torch.empty(4, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        landing.copy_(a, non_blocking=True)
    if not racy:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        landing.copy_(b, non_blocking=True)
    torch.cuda.synchronize()
    return landing.tolist()


@idiom(RaceKind.UNWRITTEN_READ)
def empty_that_is_not_filled(racy: bool) -> Any:
    """`torch.empty` is read as it came."""
    scratch = torch.empty(4, device="cuda")
    if not racy:
        scratch.zero_()
    return scratch + 1


class CpuGpuBuffer:
    """One value for host and device, as vLLM has it: pinned memory, its numpy array, and memory of the device."""

    def __init__(self, size: int) -> None:
        self.cpu = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.gpu = torch.zeros_like(self.cpu, device="cuda")
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int) -> torch.Tensor:
        """Its first rows, on the device."""
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)


@idiom(RaceKind.STAGING_REFILLED)
def buffers_of_host_and_device(racy: bool) -> Any:
    """The next step prepares its inputs in the pinned side while the last copy may not have run."""
    lengths, copied, seen = CpuGpuBuffer(8), Event(), []
    for step in range(3):
        if not racy:
            copied.synchronize()
        lengths.np[:4] = step
        seen.append(lengths.copy_to_gpu(4) + 1)
        copied.record()
    torch.cuda.synchronize()
    return seen


@idiom(RaceKind.HOST_READS_EARLY)
def output_copied_by_a_stream_of_its_own(racy: bool) -> Any:
    """Sampled tokens go to the host on a copy stream, a step later they are taken out."""
    copies = Stream()
    sampled = torch.arange(4, device="cuda")
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        on_host = sampled.to("cpu", non_blocking=True)
        sampled.record_stream(copies)
        ready = Event()
        ready.record()
    if not racy:
        ready.synchronize()
    return on_host.tolist()


@idiom(RaceKind.READ_AFTER_WRITE)
def future_tokens_of_an_overlapped_scheduler(racy: bool) -> Any:
    """The next batch takes tokens that are still being computed from a map on the device, by negative ids."""
    schedule, forward = Stream(), Stream()
    future = torch.zeros(8, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        future[1:3] = torch.argmax(torch.eye(2, device="cuda"), dim=-1)
    if not racy:
        schedule.wait_stream(forward)
    with torch.cuda.stream(schedule):
        ids = torch.tensor([5, -1, -2]).pin_memory().to("cuda", non_blocking=True)
        return torch.where(ids < 0, future[torch.clamp(-ids, min=0)], ids)


@idiom(None)
def a_safe_module_moved_and_run(racy: bool) -> Any:
    """Whatever runs on one stream alone is in order: a module, its buffers, a copy of it, and printing."""
    import copy

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.ReLU()).to("cuda")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        out = twin(torch.randn(2, 4, device="cuda"))
    assert out.device == next(twin.parameters()).device == torch.device("cuda", 0)
    assert np.isfinite(out.cpu().numpy()).all()
    return repr(out)
