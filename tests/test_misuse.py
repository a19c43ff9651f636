"""Sizes beyond memory and odd values are typed errors; small pieces, long use, threads and processes are right."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import levels
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    ContractError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    ShapeError,
)
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.mirror import MirroredTensor
from batchstate.pools import SlotPool
from batchstate.runtime import CpuRuntime, Runtime, open_runtime
from tests.doubles import in_a_thread
from tests.worlds import Pools


class Requests(Batch):
    """Columns of every kind."""

    slots = slot_column()
    lens = mirrored(torch.int64)
    most = mirrored(torch.int64, contract="upper_bound")
    hidden = device_only(torch.float32)
    who = host_list()


def built(pools: Pools, **columns: Any) -> Requests:
    """A batch of two requests, with these columns instead of others."""
    hidden = torch.zeros(2, device=pools.rt.device)
    usual = {"slots": pools.slots.take(2), "lens": [1, 2], "most": [3, 4], "hidden": hidden, "who": ["a", "b"]}
    return Requests.build(pools.rt, **usual | columns)


def vector(pools: Pools) -> MirroredTensor:
    """Three numbers."""
    return MirroredTensor.from_host(pools.rt, [1, 2, 3])


def sparse(rt: Runtime) -> torch.Tensor:
    """float32[2], of a layout without strides."""
    return torch.ones(2, device=rt.device).to_sparse()


MISUSES: dict[str, tuple[type[BatchStateError], Callable[[Pools], object]]] = {
    "a batch padded beyond memory": (ArgumentError, lambda w: built(w).pad(2**62)),
    "a batch padded beyond int64": (ArgumentError, lambda w: built(w).pad(2**100)),
    "a value padded beyond memory": (ArgumentError, lambda w: vector(w).pad(2**62)),
    "a value padded beyond int64": (ArgumentError, lambda w: vector(w).pad(2**100)),
    "compared with another length": (ShapeError, lambda w: vector(w) == [1, 2]),
    "compared with a tensor": (DeviceError, lambda w: vector(w) == torch.tensor([1, 2, 3])),
    "a tensor compared with it": (DeviceError, lambda w: torch.tensor([1, 2, 3]) != vector(w)),
    "objects in a set": (DtypeError, lambda w: built(w, who={"a", "b"})),
    "objects by name": (DtypeError, lambda w: built(w, who={"a": 1, "b": 2})),
    "an iterator of too few": (ShapeError, lambda w: built(w, who=iter("a"))),
    "an iterator of too many": (ShapeError, lambda w: built(w, who=iter("abc"))),
    "a shape in a set": (ShapeError, lambda _: mirrored(torch.int64, shape={3, 1})),
    "a sparse device side": (DtypeError, lambda w: MirroredTensor.from_device(w.rt, sparse(w.rt))),
    "a sparse column": (DtypeError, lambda w: built(w, hidden=sparse(w.rt))),
    "a table beyond memory": (ArgumentError, lambda w: w.slots.table("t", (2**60,))),
    "a table beyond int64": (ArgumentError, lambda w: w.slots.table("t", (2**100,))),
    "a quantised table": (DtypeError, lambda w: w.slots.table("t", (), torch.qint8)),
    "a column beyond memory": (ArgumentError, lambda _: mirrored(torch.int64, shape=(2**70,))),
    "a pad of another shape": (ShapeError, lambda _: mirrored(torch.int64, pad=[1])),
    "a relay beyond memory": (ArgumentError, lambda w: FutureMap(w.slots, {"x": relay_field(torch.int64, (2**58,))})),
    "a relay beyond int64": (ArgumentError, lambda _: relay_field(torch.int64, (2**70,))),
    "requests beyond memory": (ArgumentError, lambda w: PagePool(w.rt, w.slots, 4, 1, max_tokens_per_request=2**60)),
    "endless steps in flight": (ArgumentError, lambda _: open_runtime("cpu", steps_in_flight=2**70)),
    "a flag of steps in flight": (ArgumentError, lambda _: open_runtime("cpu", steps_in_flight=True)),
    "no step in flight": (ArgumentError, lambda _: open_runtime("cpu", steps_in_flight=0)),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_a_typed_error(rt: Runtime, name: str) -> None:
    """A typed error with the value and a remedy, and not one of numpy's or torch's."""
    expected, call = MISUSES[name]
    with pytest.raises(expected) as caught:
        call(Pools.of(rt, 4))
    assert caught.value.problem
    assert caught.value.remedy


# Small pieces of something large


def _base(array: Any) -> Any:
    while array.base is not None:
        array = array.base
    return array


def test_a_small_piece_does_not_keep_the_whole(rt: Runtime) -> None:
    """`split` gives small pieces of a large value memory of their own, on both sides, whatever their contract."""
    host = np.arange(100_000)
    device = rt.upload([host]).view(0).clone()
    for whole in (
        MirroredTensor.from_pair(rt, host, device),
        MirroredTensor.from_pair(rt, host, device, contract="upper_bound"),
        MirroredTensor.from_device(rt, device),
    ):
        small, rest = whole.split([10, 99_990])
        assert small.device.untyped_storage().nbytes() < 20_000
        assert rt.read_back(small.device).tolist() == list(range(10))
        assert rest.device.untyped_storage().nbytes() == device.untyped_storage().nbytes()  # no copy of the most part
        if small._host is not None:
            assert _base(small.np).nbytes == 80


def test_a_small_batch_does_not_keep_the_large_one(rt: Runtime) -> None:
    """Objects, columns of one kind and device columns of a split batch go with the batch that they were split from."""

    class Many(Batch):
        lens = mirrored(torch.int64)
        hidden = device_only(torch.float32)
        who = host_list()

    class Person:
        pass

    people = [Person() for _ in range(20_000)]
    last = weakref.ref(people[-1])
    whole = Many.build(rt, lens=np.arange(20_000), hidden=torch.zeros(20_000, device=rt.device), who=people)
    small = whole.split([10, 19_990])[0]
    del whole, people
    gc.collect()
    assert last() is None
    assert _base(small["lens"].np).nbytes == 80
    small.upload()
    assert small["hidden"].device.untyped_storage().nbytes() == 40


# Long use


def test_a_chain_without_a_read(rt: Runtime) -> None:
    """A batch whose bounds are carried over 2,000 times without a read is gathered once, from where they came."""
    device = rt.upload([np.array([1, 2])]).view(0).clone()
    most = MirroredTensor.from_pair(rt, [3, 4], device, contract="upper_bound")
    batch = built(Pools.of(rt, 4), most=most)
    for _ in range(2000):
        batch = batch.replace(most=batch["most"]).advance("most")
    before = rt.counters.device_operations
    assert rt.read_back(batch["most"].device).tolist() == [2001, 2002]
    assert rt.counters.device_operations - before <= 3
    assert batch["most"].np.tolist() == [2003, 2004]


def test_streams_made_anew_in_each_step(rt: Runtime) -> None:
    """Notes that are kept by stream do not grow with the streams that an engine has ever made."""
    pools = Pools.of(rt, 4)
    relay = FutureMap(pools.slots, {"x": relay_field(torch.int64, must_read=False)})
    slots, values, table = pools.slots.take(2), vector(pools), pools.slots.table("t", (1,))
    table.write(slots, None, [[1], [2]])
    for step in range(300):
        with rt.use(rt.stream(f"step {step}")):
            rt.next_step()
            relay.publish(slots, x=[step, step])
            relay.gather(slots, "x")
            _ = table.device_for(slots), values.device
            rt.synchronize()
    assert len(rt._staging._in_flight) < 5
    assert len(relay._synchronised["x"]) <= 64
    assert len(table._fixed._synchronised) <= 64
    assert len(values._device.ready().synchronised) <= 64
    assert len(relay._entries.publishes) <= 64


# Threads and processes


def test_a_runtime_whose_thread_has_ended(rt: Runtime) -> None:
    """It belongs to no thread, also not to a later one that has the same number."""
    made: list[SlotPool] = []
    thread = threading.Thread(target=lambda: made.append(SlotPool(CpuRuntime(), 2)))
    thread.start()
    thread.join()
    assert made[0].runtime.owner.ident == 0
    with pytest.raises(OwnerThreadError):
        made[0].take(0)
    assert isinstance(in_a_thread(lambda: made[0].take(0)), OwnerThreadError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_owns_nothing() -> None:
    """A child has copies of pools, and no device of its own: it is refused, and makes its own."""
    pool = SlotPool(CpuRuntime(), 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.take(1)
        except OwnerThreadError:
            code = 0 if len(SlotPool(CpuRuntime(), 2).take(1)) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(pool.take(1)) == 1


# Bounds near the end of a dtype


@pytest.mark.parametrize("level", ["off", "cheap"])
def test_a_signed_bound_does_not_wrap(rt: Runtime, level: str) -> None:
    """A bound that is lowered near the least value is refused: its device side, which is smaller, would wrap."""
    device = rt.upload([np.array([-125, 0], np.int8)]).view(0).clone()
    value = MirroredTensor.from_pair(rt, np.array([-60, 100], np.int8), device, contract="upper_bound")

    class Bounded(Batch):
        most = mirrored(torch.int8, contract="upper_bound")

    with levels.checks(level):
        with pytest.raises(ContractError, match="wrap"):
            _ = value - 10
        with pytest.raises(ContractError, match="wrap"):
            Bounded.build(rt, most=value).advance("most", -10)
        assert (value + 5).np.tolist() == [-55, 105]
        lowest = MirroredTensor.from_pair(rt, np.array([-128, 100], np.int8), device, contract="upper_bound")
        with pytest.raises(ContractError, match="wrap"):
            _ = lowest - 1  # the bound itself would wrap
