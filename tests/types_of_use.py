"""Ordinary use, and what a type checker refuses: `mypy` reads this file, and nothing runs it.

A line that must not type-check has the error that it gets in `type: ignore[...]`. Where it type-checks after all, the
comment is unused, which is an error too (`warn_unused_ignores`). pyright reads the same comments, see CONTRIBUTING.md.
"""

from typing import assert_type

import numpy as np
import torch

from batchstate import Batch, MirroredTensor, Runtime, SlotPool, device_only, host_list, mirrored, slot_column
from batchstate.kv.pages import PagePool
from batchstate.mirror import Slots


class Request:
    """A request of an engine."""

    name: str


class Decode(Batch):
    """A batch with a column of each kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    last_token = device_only(torch.int64)
    requests = host_list(Request)
    notes = host_list()


def ordinary_use(rt: Runtime, pool: SlotPool, pages: PagePool, request: Request) -> None:
    """What may be built, kept, added and written."""
    batch = Decode.build(rt, slots=pool.take(2), seq_lens=[5, 3], requests=[request, request], notes=("a", None))
    assert_type(batch, Decode)
    assert_type(batch.slots, Slots)
    assert_type(batch.seq_lens, MirroredTensor)
    assert_type(batch.seq_lens.device, torch.Tensor)
    assert_type(batch.last_token, MirroredTensor)
    assert_type(batch.requests, tuple[Request, ...])
    assert_type(batch.requests[0].name, str)
    for kept in (
        batch.filter([0, 1]),
        batch.filter([True, False]),
        batch.filter(range(2)),
        batch.filter((np.int64(1),)),
        batch.filter(np.array([True, False])),
        batch.filter(torch.tensor([1, 0])),
        batch.filter(batch.seq_lens),
    ):
        assert_type(kept, Decode)
    assert_type(batch.merge(batch.advance("seq_lens")), Decode)
    assert_type(batch.next_batch(keep=[0], joining=batch, advance=["seq_lens"], n=np.ones(2, np.int64)), Decode)
    batch.advance({"seq_lens": [1, 2], "position": 1, "other": batch.seq_lens})
    batch.update("seq_lens", [0], 1.5)
    batch.update("seq_lens", np.array([0]), [[1, 2], [3, 4]])
    batch.replace(seq_lens=np.array([1, 2]), requests=[request])
    assert_type(1 + batch.seq_lens - [1, 2], MirroredTensor)
    pages.extend(batch.slots, batch.seq_lens)
    pages.advance(batch.slots, torch.tensor([1, 2]))


def refused(rt: Runtime, pool: SlotPool, pages: PagePool, batch: Decode, other: Batch) -> None:
    """What a type checker refuses before the program runs."""
    Decode()  # type: ignore[call-arg]
    Decode(rt, seq_lens=[1])  # type: ignore[call-arg]
    batch.seq_lens = [1, 2]  # type: ignore[assignment]
    batch.slots = pool.take(2)  # type: ignore[assignment]
    batch.requests = ()  # type: ignore[assignment]
    Decode.build("cpu", slots=pool.take(1))  # type: ignore[arg-type]
    mirrored(int)  # type: ignore[arg-type]
    mirrored(np.int64)  # type: ignore[arg-type]
    Decode.build(rt, slots=pool.take(1), seq_lens=5)  # type: ignore[arg-type]
    batch.replace(seq_lens=None)  # type: ignore[arg-type]
    batch.filter("first")  # type: ignore[arg-type]
    batch.filter([0.5])  # type: ignore[list-item]
    batch.filter(1)  # type: ignore[arg-type]
    batch.filter({0, 1})  # type: ignore[arg-type]
    batch.seq_lens.filter(None)  # type: ignore[arg-type]
    batch.merge(other)  # type: ignore[arg-type]
    batch.next_batch(keep="all")  # type: ignore[arg-type]
    batch.advance("seq_lens", 0.5)  # type: ignore[arg-type]
    batch.update("seq_lens", [0], "1")  # type: ignore[arg-type]
    _ = batch.seq_lens + 1.5  # type: ignore[operator]
    _ = batch.requests[0].missing  # type: ignore[attr-defined]
    _ = batch.seq_len  # type: ignore[attr-defined]
    pages.extend(batch.seq_lens, [1])  # type: ignore[arg-type]
    pages.extend(batch.slots, "1")  # type: ignore[arg-type]
    pool.take("three")  # type: ignore[arg-type]
    pool.free([1, 2], after=None)  # type: ignore[arg-type]
