"""A graph captured once, over buffers at fixed addresses, replayed for batches of every size up to the most.

On a CPU a plain function over the same buffers stands for the graph: addresses and values are looked at all the same.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchstate import Batch, SlotPool, StaticBuffers, checks, device_only, mirrored, slot_column
from batchstate.errors import CaptureError
from batchstate.runtime import Runtime, open_runtime
from benchmarks.gpu.outcome import Notes, Setting

PAD = 1
"""The length of padded rows."""
TOKEN = 7
"""Their last token."""


class Decode(Batch):
    """Inputs of the graph; the last token is known to the device alone."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, pad=PAD)
    last_token = device_only(torch.int64, pad=TOKEN)


def run(setting: Setting, notes: Notes) -> None:
    """Captures, then replays with batches that shrink and grow; reads each result a step later.

    The step is written on the stream that replays, or on another one, behind whose copy the graph's then waits.
    """
    runtime = open_runtime(setting.device)
    rows, steps = (8, 12) if setting.quick else (32, 200)
    for level in ("off", "cheap", "full"):
        for own_stream in (True, False):
            with checks(level):
                _replayed(runtime, notes, level, own_stream=own_stream, rows=rows, steps=steps)


def _replayed(runtime: Runtime, notes: Notes, level: str, *, own_stream: bool, rows: int, steps: int) -> None:
    name = f"checks {level}, {'one stream' if own_stream else 'two streams'}"
    pool = SlotPool(runtime, rows)
    table = pool.table("values", (), torch.int64)
    slots = pool.take(rows)
    tokens = torch.arange(rows, device=runtime.device) + 100
    everyone = Decode.build(runtime, slots=slots, seq_lens=np.arange(rows) + 10, last_token=tokens)
    buffers = StaticBuffers(runtime, Decode, rows=rows, extras={"step": np.zeros(1, dtype=np.int64)})
    out = runtime.device_zeros((rows,), torch.int64)
    forward, planning = runtime.stream("forward"), runtime.stream("planning")
    read = table.memory, [buffers[column] for column in ("slots", "seq_lens", "last_token", "step")]

    def body() -> None:
        values, (rows_of, lengths, last, step) = read
        out.copy_(10**6 * values.index_select(0, rows_of) + 10**3 * (lengths + step) + last)

    runtime.synchronize()
    with runtime.use(forward):
        body()  # loads the kernels, before the capture
    runtime.synchronize()
    replay, refused = _captured(runtime, body, lambda: everyone.to_static(buffers, extras={"step": np.zeros(1, int)}))
    notes.require(refused, f"{name}: a copy into the buffers was not refused during the capture")
    addresses = [tensor.data_ptr() for tensor in buffers.values()]
    dice = np.random.default_rng(0)
    unread: deque[tuple[Any, npt.NDArray[np.int64]]] = deque()
    wrong, before = 0, runtime.counters.snapshot()
    for step in range(steps):
        runtime.next_step()
        keep = np.sort(dice.choice(rows, dice.integers(1, rows + 1), replace=False))
        batch = everyone.filter(keep).advance("seq_lens", 1)
        writes = [table.entry(batch.slots, None, batch.slots.np + step)]
        with runtime.use(forward if own_stream else planning):
            batch.to_static(buffers, writes=writes, extras={"step": np.array([step])})
        with runtime.use(forward):
            # Asked for here: the stream waits for what was written elsewhere.
            reads = [table.device_for(batch.slots), *buffers.values()]
            runtime.launch(replay, reads=reads, writes=(out,), name="replay")
            done = runtime.record()
            for holder in (table, buffers):
                holder.read_until(done)
            unread.append((runtime.download([out]), _wanted(batch, keep, step, rows)))
        if len(unread) > 1:
            wrong += _wrong(unread)
    wrong += _wrong(unread)
    spent = runtime.counters - before
    notes.figures[name] = {"replays": steps, "wrong elements": wrong, "copies": spent.host_to_device_copies}
    notes.require_equal(f"{name}: wrong elements of the replays", wrong, 0)
    notes.require_equal(f"{name}: copies to the device", spent.host_to_device_copies, steps)
    notes.require_equal(f"{name}: forced syncs", spent.forced_syncs, 0)
    same = addresses == [tensor.data_ptr() for tensor in buffers.values()]
    notes.require(same, f"{name}: the buffers have moved")


def _wanted(batch: Decode, keep: npt.NDArray[np.int64], step: int, rows: int) -> npt.NDArray[np.int64]:
    """The right result of the graph, padded rows and all: row 0 of the table is zero."""
    wanted = np.full(rows, 10**3 * (PAD + step) + TOKEN, dtype=np.int64)
    values = batch.slots.np + step
    wanted[: len(keep)] = 10**6 * values + 10**3 * (batch.seq_lens.np + step) + keep + 100
    return wanted


def _wrong(unread: deque[tuple[Any, npt.NDArray[np.int64]]]) -> int:
    download, wanted = unread.popleft()
    return int((download.resolve()[0] != wanted).sum())


def _captured(
    runtime: Runtime, body: Callable[[], None], forbidden: Callable[[], object]
) -> tuple[Callable[[], None], bool]:
    """A function that replays `body`, and whether the library refused `forbidden` while `body` was captured."""
    if runtime.device.type == "cpu":
        return body, True
    graph, refused = torch.cuda.CUDAGraph(), False
    with torch.cuda.graph(graph):
        try:
            forbidden()
        except CaptureError:
            refused = True
        body()
    return graph.replay, refused
