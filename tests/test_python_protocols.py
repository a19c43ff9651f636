"""Public objects are plain Python: methods have their names, and what an object lacks is Python's own error."""

import copy
import pickle
from collections.abc import Callable, Iterable, Sized
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Batch,
    FutureMap,
    HybridSlotPool,
    PagePool,
    PrefixCache,
    SlotPool,
    StaticBuffers,
    StepPlanner,
    device_only,
    host_list,
    mirrored,
    open_runtime,
    relay_field,
    slot_column,
)
from batchstate.errors import DeviceError


class Decode(Batch):
    """A batch with a column of each kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    last_token = device_only(torch.int64)
    requests = host_list()


def objects() -> dict[str, Any]:
    """A public object of each kind that belongs to a runtime."""
    rt = open_runtime("cpu")
    pool = SlotPool(rt, 8)
    pages = PagePool(rt, pool, 32, 4, max_tokens_per_request=64)
    batch = Decode.build(rt, slots=pool.take(2), seq_lens=[5, 3], last_token=[1, 2], requests=["a", "b"])
    relay = FutureMap(pool, {"token": relay_field(torch.int64)})
    return {
        "runtime": rt,
        "pool": pool,
        "hybrid": HybridSlotPool(rt, 8, states=8),
        "pages": pages,
        "cache": PrefixCache(pages),
        "table": pool.table("rows", (4,), torch.int32),
        "relay": relay,
        "planner": StepPlanner(Decode, pages=pages),
        "batch": batch,
        "slots": batch.slots,
        "locations": pages.extend(batch.slots, [5, 3]).locations,
        "value": batch.seq_lens,
        "buffers": StaticBuffers(rt, Decode, rows=4),
        "extras": batch.upload(extras={"positions": [0, 1]}),
        "download": rt.download([torch.zeros(2)]),
    }


def test_methods_are_named_as_they_are_written() -> None:
    """`repr` and pickle of a method are Python's own."""
    assert repr(SlotPool.take).startswith("<function SlotPool.take at ")
    assert pickle.loads(pickle.dumps(SlotPool.take)) is SlotPool.take
    assert repr(Batch.filter).startswith("<function Batch.filter at ")


def test_pools_have_no_length_and_no_entries() -> None:
    """Nothing claims a protocol that it does not have."""
    made = objects()
    for name in ("pool", "pages", "relay", "table", "runtime"):
        assert not isinstance(made[name], Sized), name
        assert not isinstance(made[name], Iterable), name


@pytest.mark.parametrize("name", objects())
def test_every_listed_name_can_be_read(name: str) -> None:
    """A completion by the prompt reads each name that `dir` lists: none raises."""
    value = objects()[name]
    for attribute in dir(value):
        getattr(value, attribute)


@pytest.mark.parametrize(
    "call",
    [
        lambda made: made["pool"].take(),
        lambda made: made["pool"].take(1, 2),
        lambda made: made["batch"].filter(rows=[0]),
        lambda made: len(made["pool"]),
        lambda made: made["value"][0],
        lambda made: made["value"] * 2,
        lambda made: int(made["value"]),
        lambda made: type(made["batch"])(),
    ],
    ids=["missing", "too many", "unknown", "len", "index", "times", "int", "class"],
)
def test_a_wrong_call_is_a_type_error(call: Callable[[Any], object]) -> None:
    """Python refuses what does not fit a signature, and an operation that a class does not have."""
    with pytest.raises(TypeError):
        call(objects())


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Python says so, and which name it resembles."""
    made = objects()
    for name, unknown in ("pool", "alloc"), ("batch", "seq_lens_cpu"), ("value", "add_"):
        with pytest.raises(AttributeError):
            getattr(made[name], unknown)


@pytest.mark.parametrize("name", objects())
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_belongs_to_a_process_stays_in_it(name: str, how: Callable[[Any], object]) -> None:
    """Runtimes, pools, tables, batches, values and copies under way can be neither pickled nor copied."""
    with pytest.raises(DeviceError, match="cannot be copied or pickled"):
        how(objects()[name])


def test_values_act_like_their_host_side() -> None:
    """Iteration, `in`, `1 + x` and `repr` use the host side; numpy reads it by itself, and the device is not asked."""
    made = objects()
    lens, batch, runtime = made["value"], made["batch"], made["batch"].runtime
    before = runtime.counters.snapshot()
    assert list(lens) == [5, 3]
    assert 5 in lens
    assert 4 not in lens
    assert (1 + lens).tolist() == [6, 4]
    assert (np.array([2, 2]) * lens).tolist() == (lens * np.array([2, 2])).tolist() == [10, 6]
    assert repr(lens) == "MirroredTensor 'seq_lens' int64[2] exact on cpu: [5, 3]"
    assert repr(batch.last_token) == "MirroredTensor 'last_token' int64[2] device_only on cpu"
    assert repr(batch) == "Decode(2 requests; slots, seq_lens, last_token, requests) on cpu"
    assert repr(lens.take([0] * 9)).endswith(": [5, 5, 5, ..., 5, 5, 5]")
    assert runtime.counters == before


def test_host_sides_by_name() -> None:
    """`to_dict` gives the host side of each column that has one, read-only, and reads no device."""
    batch = objects()["batch"]
    before = batch.runtime.counters.snapshot()
    columns = batch.to_dict()
    assert [*columns] == ["slots", "seq_lens", "requests"]
    assert columns["seq_lens"].tolist() == [5, 3]
    assert not columns["seq_lens"].flags.writeable
    assert columns["requests"] == ("a", "b")
    assert batch.runtime.counters == before


def test_a_runtime_is_a_context_manager() -> None:
    """The end of the window waits for the device once and gives staging back; values made in it stay valid."""
    with open_runtime("cpu") as runtime:
        batch = Decode.build(runtime, slots=SlotPool(runtime, 4).take(1), seq_lens=[5], last_token=[1], requests=["a"])
        batch.upload()
        assert runtime.counters.forced_syncs == 0
    assert runtime.counters.forced_syncs == 1
    assert batch.advance("seq_lens").seq_lens.device.tolist() == [6]


def test_a_window_that_an_error_ends_does_not_wait() -> None:
    """Where an error is on its way, the device may be what failed: the end of the window does not wait for it."""
    with pytest.raises(KeyError), open_runtime("cpu") as runtime:
        raise KeyError
    assert runtime.counters.forced_syncs == 0
