"""Kernels that torch does not see, graphs, and the library's own transfers."""

import numpy as np
import torch

from batchstate.races.report import RaceKind
from batchstate.races.tracing.dispatch import raw_kernel
from batchstate.runtime import Stream
from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import Values, pair
from tests.race_cases.scenes import fence_behind, index, table, use, vector


@raw_kernel
def raise_all(numbers: torch.Tensor) -> None:
    """A foreign kernel: no tool sees what it does to its argument."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        numbers.add_(100)


@raw_kernel
def double_all(numbers: torch.Tensor) -> None:
    """Another foreign kernel."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        numbers.mul_(2)


@raw_kernel
def copy_all(source: torch.Tensor, target: torch.Tensor) -> None:
    """A foreign kernel that copies."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        target.copy_(source)


@pair(RaceKind.READ_AFTER_WRITE, "left: raise_all", "right: clone", "all 8 rows")
def raw_kernel_writes(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A kernel that torch does not see, declared where it is launched.

    Racy: nothing waits for the kernel.
    Safe: the reader waits for it.
    """
    numbers = table(rt)
    raised = fence_behind(rt, left, lambda: rt.launch(raise_all, numbers, writes=[numbers]))
    with use(rt, right, behind=None if racy else raised):
        return [numbers.clone()]


@pair(RaceKind.WRITE_AFTER_READ, "left: copy_all", "right: fill_", "all 8 rows")
def raw_kernel_reads(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A kernel that torch does not see reads one table and writes another.

    Racy: nothing waits for the kernel, which reads.
    Safe: the writer waits for it.
    """
    numbers, target = table(rt), table(rt)
    read = fence_behind(rt, left, lambda: rt.launch(copy_all, numbers, target, reads=[numbers], writes=[target]))
    with use(rt, right, behind=None if racy else read):
        numbers.fill_(-1)
    return [target]


@pair(RaceKind.WRITE_AFTER_WRITE, "left: raise_all", "right: double_all", "row 4")
def raw_kernels_on_rows(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two kernels that torch does not see write slices of one table.

    Racy: the rows of one launch and those of the other share one.
    Safe: the rows are not the same, though the table is.
    """
    numbers = table(rt)
    upper, lower = numbers[:5], numbers[4 if racy else 5 :]
    with rt.use(left):
        rt.launch(raise_all, upper, writes=[upper])
    with rt.use(right):
        rt.launch(double_all, lower, writes=[lower])
    return [numbers]


@pair(RaceKind.WRITE_AFTER_READ, "forward: replay", "schedule: fill_", "row 2")
def graph_replayed(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A graph reads the first rows of static inputs, as many as there are requests, and is replayed.

    Racy: a row that the graph reads is overwritten.
    Safe: the rows behind those of the graph are overwritten.
    """
    schedule, forward = rt.stream("schedule"), rt.stream("forward")
    inputs, outputs = table(rt), table(rt, 3)
    rows = inputs[:3]
    with rt.use(forward):
        rt.launch(copy_all, rows, outputs, reads=[rows], writes=[outputs], name="replay")
    with rt.use(schedule):
        inputs[2 if racy else 3 :].fill_(-1)
    return [outputs]


@pair(RaceKind.READ_AFTER_WRITE, "left: copy to device", "right: add", "bytes 0-63")
def two_uploads(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams upload at the same time.

    Racy: each stream takes what the other one uploaded.
    Safe: each stream takes what it uploaded itself: two uploads share nothing.
    """
    with rt.use(left):
        ours = rt.upload([np.arange(8)])
    with rt.use(right):
        theirs = rt.upload([np.arange(8) * 2])
        return [(ours if racy else theirs).view(0) + 1]


@pair(RaceKind.READ_AFTER_WRITE, "left: copy to device", "right: add", "bytes 64-79")
def part_of_an_upload(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two arrays travel in one upload, and another stream takes one of them.

    Racy: the second array is taken as it is.
    Safe: the second array is acquired.
    """
    with rt.use(left):
        packed = rt.upload([np.arange(8), np.arange(2)])
    with rt.use(right):
        part = packed.view(1) if racy else rt.use_part_on_current_stream(packed, 1)
        return [part + 1]


@pair(RaceKind.FREED_IN_USE, "right: add", "left: upload", "bytes 0-63")
def uploads_step_after_step(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """A stream uploads the inputs of each step, another uses them, and no reference holds them.

    Racy: the stream waited by hand, and the next upload may get the memory.
    Safe: acquired, the memory is kept.
    """
    seen = []
    for step in range(2):
        with rt.use(left):
            packed = rt.upload([np.arange(8) + step])
        with rt.use(right):
            if racy:
                rt.wait(packed.ready)
                inputs = packed.view(0)
            else:
                inputs = rt.use_part_on_current_stream(packed, 0)
            seen.append(inputs + 1)
        del packed, inputs
    return seen


@pair(RaceKind.WRITE_AFTER_READ, "left: copy to host", "right: fill_", "all 8 elements")
def download_and_overwrite(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Values are brought to the host by the library, and their tensor is used again.

    Racy: the tensor is overwritten while it may not have been brought.
    Safe: the fence of the download is waited for.
    """
    numbers = vector(rt)
    with rt.use(left):
        pending = rt.download([numbers])
    with rt.use(right):
        if not racy:
            rt.wait(pending.done)
        numbers.fill_(-1)
    return pending.resolve()


@pair(RaceKind.READ_AFTER_WRITE, "forward: index_copy_", "prefill: index_select", "row 3")
def published_by_two_streams(rt: CaseRuntime, racy: bool, left: Stream, right: Stream) -> Values:
    """Two streams publish results of their requests to a table, and a third takes one of each.

    Racy: the fence of the last publisher was waited for, and it is another stream's.
    Safe: the fences of both publishers are waited for.
    """
    forward, other, prefill = rt.stream("forward"), rt.stream("other"), rt.stream("prefill")
    relay = table(rt)
    fences = []
    for stream, slot in ((forward, 3), (other, 5)):
        with rt.use(stream):
            relay.index_copy_(0, index(rt, slot), relay.new_full((1, 4), slot))
            fences.append(rt.record())
    with rt.use(prefill):
        for fence in fences[1 if racy else 0 :]:
            rt.wait(fence)
        return [relay.index_select(0, index(rt, 3, 5))]
