"""What a decode step costs, counted: one copy and at most one device operation, whatever the number of columns."""

from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Runtime, Slots, checks
from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.kv.pages import PagePool
from batchstate.pools import SlotPool

DTYPES = [torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8, torch.float64, torch.int16]


class Base(Batch):
    """What every batch of these tests has."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


def declare(num_columns: int) -> type[Base]:
    """A batch class of that many columns, slots and lengths among them."""
    columns = {f"column_{i}": mirrored(DTYPES[i % len(DTYPES)]) for i in range(num_columns - 2)}
    return type("Declared", (Base,), columns)


@pytest.mark.parametrize("level", ["off", "cheap"])
@pytest.mark.parametrize("num_columns", [4, 12, 40])
def test_one_copy_and_one_operation_a_step(rt: Runtime, num_columns: int, level: str) -> None:
    """Requests leave, join and advance, and the table is written: one copy, one scatter, no sync, no new staging."""
    declared = declare(num_columns)
    slots = SlotPool(rt, 64)
    pages = PagePool(rt, slots, 256, 4, max_tokens_per_request=64)
    table = slots.table("req_to_token", (64,), torch.int32, holds="location")

    def arrive(num_reqs: int) -> Base:
        taken = slots.take(num_reqs)
        extension = pages.extend(taken, np.full(num_reqs, 5))
        columns: dict[str, Any] = {
            name: np.zeros(num_reqs, dtype=column.np_dtype)  # type: ignore[attr-defined]
            for name, column in declared.columns().items()
        }
        batch = declared.build(rt, **{**columns, "slots": taken, "seq_lens": np.full(num_reqs, 5)})
        batch.upload(writes=[extension.entry(table)])
        return batch

    with checks(level):
        batch = arrive(16)
        for _ in range(4):
            rt.next_step()
            joining = arrive(2)
            before = rt.counters.snapshot()
            leaving = batch.filter([3, 7])
            pages.release_requests(leaving.slots, after=rt.record())
            keep = np.ones(len(batch), dtype=bool)
            keep[[3, 7]] = False
            batch = batch.filter(keep).merge(joining).advance("seq_lens", 1)
            extension = pages.advance(batch.slots, 1)
            batch.upload(writes=[extension.entry(table)], extras={"positions": extension.positions})
            for name in declared.columns():
                assert len(batch[name].device) == 16
            spent = rt.counters - before
            assert spent.host_to_device_copies == 1
            assert spent.device_operations == 1
            assert spent.forced_syncs == spent.fence_waits == spent.device_to_host_copies == 0
            assert spent.staging_allocations == 0
            assert spent.device_allocations == 1
            held = rt.inspect(table.memory)[extension.slots, extension.positions]
            assert held.tolist() == extension.locations.np.tolist()


def test_a_step_without_table_writes_launches_nothing(rt: Runtime) -> None:
    """Without table writes the copy is all: the columns are views of it."""
    declared = declare(12)
    columns: dict[str, Any] = {
        name: np.arange(1, 9).astype(column.np_dtype)  # type: ignore[attr-defined]
        for name, column in declared.columns().items()
    }
    batch = declared.build(rt, **{**columns, "slots": Slots.from_host(rt, columns["slots"])})
    before = rt.counters.snapshot()
    batch = batch.filter([0, 2, 4]).advance("seq_lens", 1)
    for name in declared.columns():
        assert len(batch[name].device) == 3
    spent = rt.counters - before
    assert (spent.host_to_device_copies, spent.device_operations) == (1, 0)


def test_bytes_of_a_step_do_not_exceed_the_columns(rt: Runtime) -> None:
    """The copy holds the columns, the slots' generations and at most 16 bytes of alignment a width."""
    declared = declare(12)
    columns: dict[str, Any] = {
        name: np.arange(1, 257).astype(column.np_dtype)  # type: ignore[attr-defined]
        for name, column in declared.columns().items()
    }
    batch = declared.build(rt, **{**columns, "slots": Slots.from_host(rt, columns["slots"])})
    before = rt.counters.snapshot()
    batch.upload()
    useful = sum(column.np_dtype.itemsize for column in declared.columns().values()) + 8  # type: ignore[attr-defined]
    assert (rt.counters - before).host_to_device_bytes <= 256 * useful + 4 * 16
