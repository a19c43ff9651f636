"""What an attack on the relay found: half-done publishes, graphs kept alive, dropped relays, rows named twice."""

import gc

import numpy as np
import pytest
import torch

from batchstate import Batch, SlotPool, mirrored, relay_field, slot_column
from batchstate.errors import ContractError, DeclarationError, DtypeError
from batchstate.future_map import FutureMap
from batchstate.runtime import Runtime
from batchstate.testing import LateRuntime
from batchstate.violations import Code
from tests.doubles import refused

INT = torch.int64


def tokens(rt: Runtime, values: list[int]) -> torch.Tensor:
    """Device tokens."""
    return rt.upload([np.array(values, dtype=np.int64)]).view(0)


def test_what_cannot_be_scattered_is_refused_at_the_door(rt: Runtime) -> None:
    """A sparse value and a dtype without index kernels are typed errors, before anything is written."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"a": relay_field(INT, must_read=False), "b": relay_field(INT, must_read=False)})
    slots = pool.take(1)
    relay.publish(slots, a=[1], b=[2])
    with pytest.raises(DtypeError, match="layout"):
        relay.publish(slots, a=tokens(rt, [9]), b=tokens(rt, [8]).to_sparse())
    assert rt.read_back(relay.gather(slots, "a")).tolist() == [1]
    with pytest.raises(DtypeError, match="float8"):
        relay_field(torch.float8_e4m3fn)


def test_a_publish_that_fails_half_way_leaves_nothing_to_read(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot launch the second scatter, what the first overwrote is nobody's value any more."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"a": relay_field(INT, must_read=False), "b": relay_field(INT, must_read=False)})
    slots = pool.take(2)
    relay.publish(slots, a=[1, 2], b=[3, 4])
    launch, launched = rt.launch, []

    def failing(*args: object, **kwargs: object) -> object:
        launched.append(kwargs.get("name"))
        if len(launched) == 2:
            raise RuntimeError("no more of this")
        return launch(*args, **kwargs)  # type: ignore[arg-type]

    both = tokens(rt, [9, 9]), tokens(rt, [8, 8])
    with monkeypatch.context() as patch:
        patch.setattr(rt, "launch", failing)
        with pytest.raises(RuntimeError, match="no more"):
            relay.publish(slots, a=both[0], b=both[1])
    assert [str(state) for state in relay.states(slots, "a")] == ["unwritten"] * 2
    assert rt.read_back(relay.gather(slots, "b")).tolist() == [3, 4]
    refused(Code.FUTURE_UNWRITTEN, lambda: relay.gather(slots, "a"))


def test_a_relay_keeps_no_graph_alive(rt: Runtime) -> None:
    """What is published out of a differentiable forward enters the relay without its history."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(torch.float32, (2,))})
    slots = pool.take(2)
    weight = torch.nn.Parameter(torch.ones(2, 2, device=rt.device))
    relay.publish(slots, x=weight * 2)
    taken = relay.gather(slots, "x")
    assert not taken.requires_grad
    assert rt.read_back(taken).tolist() == [[2, 2], [2, 2]]


def test_a_dropped_relay_leaves_its_pool(rt: Runtime) -> None:
    """A pool asks no relay that is gone, and keeps none of its memory."""
    pool = SlotPool(rt, 4)
    for _ in range(20):
        FutureMap(pool, {"x": relay_field(INT)})
    gc.collect()
    assert len(pool._listeners) == 0
    kept = FutureMap(pool, {"x": relay_field(INT)})
    assert len(pool._listeners) == 1
    pool.free(pool.take(2))
    assert kept.fields["x"].dtype is INT


def test_a_request_is_named_once(rt: Runtime) -> None:
    """An entry is taken once: handles that name a request twice are SLOT_SHARED, and nothing is taken."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(INT, read_by="both")})
    slots = pool.take(2)
    relay.publish(slots, x=tokens(rt, [5, 6]))
    twice = slots.take([0, 0])
    refused(Code.SLOT_SHARED, lambda: relay.gather(twice, "x"))
    refused(Code.SLOT_SHARED, lambda: relay.prefetch(twice, "x"))
    assert [str(state) for state in relay.states(slots, "x")] == ["published"] * 2


def test_padded_rows_cost_no_copy(rt: Runtime) -> None:
    """Publishing and prefetching for a padded batch uses the slots that crossed with it."""

    class Running(Batch):
        slots = slot_column()
        lens = mirrored(INT)

    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(INT, read_by="host")})
    batch = Running.build(rt, slots=pool.take(2), lens=[1, 2]).pad(4)
    batch.upload()
    values = tokens(rt, [5, 6, 0, 0])
    before = rt.counters.snapshot()
    relay.publish(batch.slots, x=values)
    found = relay.prefetch(batch.slots, "x")
    assert (rt.counters - before).host_to_device_copies == 0
    assert found["x"].np.tolist() == [5, 6]


def test_comparing_prefetches_waits_for_nobody() -> None:
    """Two prefetches are never equal, and asking does not wait for their copies."""
    rt = LateRuntime()
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(INT, read_by="host")})
    slots = pool.take(1)
    relay.publish(slots, x=tokens(rt, [5]))
    found = relay.prefetch(slots, "x")
    assert found != {}
    assert found in {found}
    assert not found.ready()
    with pytest.raises(KeyError, match="was not prefetched"):
        found["y"]


@pytest.mark.parametrize("names", [(["x"],), ({},), (5,), (None,), ()])
def test_odd_names_are_typed_errors(rt: Runtime, names: tuple[object, ...]) -> None:
    """Whatever is no name of a field is a DeclarationError."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(INT, read_by="both")})
    with pytest.raises(DeclarationError):
        relay.prefetch(pool.take(1), *names)  # type: ignore[arg-type]


def test_there_are_no_bounds_of_indices(rt: Runtime) -> None:
    """Slots are exact or nothing: a bound of an index would name somebody else's row."""
    with pytest.raises(ContractError, match="no bound"):
        SlotPool(rt, 4).take(1).weaken("upper_bound")
