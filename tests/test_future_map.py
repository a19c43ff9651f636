"""FutureMap: what goes in comes out once to each reader; what must not happen is refused, and changes nothing."""

import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from batchstate import Contract, ForwardPlan, MirroredTensor, Pages, Slots, checks
from batchstate._relay import KEPT
from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.errors import (
    ArgumentError,
    BatchStateError,
    CaptureError,
    ContractError,
    DeviceError,
    OwnerThreadError,
    ShapeError,
)
from batchstate.future_map import FutureMap, relay_field
from batchstate.hybrid import HybridSlotPool
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from batchstate.runtime import AcceleratorRuntime, Fence, Runtime, numpy_dtype
from batchstate.testing import LateRuntime
from batchstate.violations import Code, Violation
from tests.doubles import FakeModule, fake_accelerator, in_a_thread, refused
from tests.refusals import RELAY, RelayCase
from tests.selfcheck.machine import Misuse
from tests.selfcheck.machines.future_map import declared
from tests.selfcheck.mutants.diffs import changed

SHARED = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
]
FIELDS = {
    "tokens": relay_field(torch.int64, read_by="both", non_negative=True),
    "lens": relay_field(torch.int32),
    "outputs": relay_field(torch.int64, (3,), read_by="host"),
}


@pytest.fixture
def pool(rt: Runtime) -> SlotPool:
    """8 slots."""
    return SlotPool(rt, 8)


@pytest.fixture
def relay(pool: SlotPool) -> FutureMap:
    """A field for both readers, one for the next forward, one for the host."""
    return FutureMap(pool, FIELDS)


def on_device(rt: Runtime, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A device tensor, as a forward would make it."""
    return rt.upload([np.array(values)]).view(0).to(dtype)


def states(relay: FutureMap, slots: Slots, *fields: str) -> list[list[str]]:
    """The states of some fields as words."""
    return [[str(state) for state in relay.states(slots, field)] for field in fields or relay.fields]


def whole(relay: FutureMap) -> tuple[Any, ...]:
    """Everything that an operation could change: entries, device memory and counters."""
    entries = {
        name: {part: array.tolist() for part, array in one.arrays.items()}
        for name, one in relay._entries.fields.items()
    }
    memory = {
        name: relay.runtime.inspect(one.contiguous().view(torch.uint8)).tolist() for name, one in relay._memory.items()
    }
    reads = {number: dict(one.reads) for number, one in relay._entries.publishes.items()}
    return entries, memory, reads, attrs.evolve(relay.runtime.counters, check_reads=0)


def untouched(relay: FutureMap, error: type[Exception], match: str, action: Callable[[], object]) -> None:
    """Runs `action`, which has to raise and to change nothing."""
    before = whole(relay)
    with pytest.raises(error, match=match):
        action()
    assert whole(relay) == before


def broken(relay: FutureMap, code: Code, action: Callable[[], object]) -> Violation:
    """Runs `action`, which has to break an invariant and to change nothing."""
    before = whole(relay)
    violation = refused(code, action)
    assert whole(relay) == before
    return violation


# What goes in comes out


def test_what_is_taken_out_is_no_view(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """A gathered tensor stays what it is when the entries are overwritten."""
    slots = pool.take(2)
    relay.publish(slots, lens=on_device(rt, [5, 6], torch.int32))
    taken = relay.gather(slots, "lens")
    relay.publish(slots, lens=on_device(rt, [7, 8], torch.int32))
    assert rt.inspect(taken).tolist() == [5, 6]


@pytest.mark.parametrize("dtype", [*SHARED, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_any_dtype_and_shape(rt: Runtime, pool: SlotPool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A field of any dtype and trailing shape keeps every bit on its way to the next forward."""
    relay = FutureMap(pool, {"field": relay_field(dtype, shape)})
    slots = pool.take(3)
    values = on_device(rt, np.arange(3 * int(np.prod(shape))).reshape(3, *shape) % 5, dtype)
    relay.publish(slots, field=values)
    taken = relay.gather(slots.take([2, 0, 1]), "field")
    assert taken.dtype == dtype
    rows = on_device(rt, [2, 0, 1])
    expected = values.view(-1).view(torch.uint8).view(3, -1)[rows]
    assert rt.inspect(taken.view(-1).view(torch.uint8).view(3, -1)).tolist() == rt.inspect(expected).tolist()
    relay.check()


@pytest.mark.parametrize("dtype", SHARED)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_any_shared_dtype_reaches_the_host(
    rt: Runtime, pool: SlotPool, full: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """A field of any dtype that numpy has is seeded by the host and resolved for it, equal on both sides."""
    relay = FutureMap(pool, {"field": relay_field(dtype, shape, read_by="host")})
    slots = pool.take(3)
    limits = np.array([True]) if dtype == torch.bool else np.array([100])
    values = np.arange(3 * int(np.prod(shape))).reshape(3, *shape) % 2 * limits
    if dtype == torch.bool:
        values = values.astype(np.bool_)
    relay.publish(slots, field=on_device(rt, values, dtype))
    value = relay.resolve(slots, "field")
    assert (value.dtype, value.shape, value.contract) == (dtype, (3, *shape), Contract.EXACT)
    assert np.array_equal(value.np, values)
    assert rt.inspect(value.device).tolist() == values.tolist()
    relay.publish(slots, field=values[::-1])
    assert states(relay, slots) == [["consumed"] * 3]  # by the host, which published it
    assert rt.inspect(relay._memory["field"])[slots.np].tolist() == values[::-1].tolist()


def test_mirrored_values_are_published(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """The device side of a mirrored value goes in, whatever the host knows of it; a column goes as it is."""

    class Lens(Batch):
        slots = slot_column()
        lens = mirrored(torch.int32, contract="upper_bound")

    bound = MirroredTensor.from_pair(
        rt, np.array([9, 9], np.int32), on_device(rt, [5, 6], torch.int32), contract="upper_bound"
    )
    batch = Lens.build(rt, slots=pool.take(2), lens=bound)
    relay.publish(batch.slots, lens=batch.lens)
    assert rt.inspect(relay.gather(batch.slots, "lens")).tolist() == [5, 6]
    relay.publish(batch.slots, tokens=MirroredTensor.from_host(rt, [1, 2]))
    assert rt.inspect(relay.gather(batch.slots, "tokens")).tolist() == [1, 2]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_step_of_no_requests(rt: Runtime, pool: SlotPool, relay: FutureMap, full: None, padding: int) -> None:
    """An idle rank publishes and reads nothing, without complaint and with nothing launched for it."""
    slots = pool.take(0).pad(padding)
    before = rt.counters.snapshot()
    relay.publish(slots, lens=torch.empty(0, dtype=torch.int32, device=rt.device))
    relay.publish(slots, tokens=torch.empty(0, dtype=torch.int64, device=rt.device))
    relay.publish(slots, outputs=[], tokens=np.empty(0, np.int64))
    relay.discard(slots)
    spent = rt.counters - before
    assert (spent.device_operations, spent.host_to_device_copies) == (0, 0)
    assert rt.inspect(relay.gather(slots, "lens")).tolist() == [0] * padding
    found = relay.prefetch(slots, "tokens", "outputs")
    assert (found["tokens"].shape, found["outputs"].shape) == ((0,), (0, 3))
    assert relay.states(slots, "tokens") == []


# What it costs


def test_a_relay_made_in_inference_mode_is_written_outside(rt: Runtime) -> None:
    """Its fields lie side by side, and each is a view that any later publish writes."""
    pool = SlotPool(rt, 4)
    with torch.inference_mode():
        relay = FutureMap(pool, {name: relay_field(torch.int64, must_read=False) for name in ("one", "other")})
    slots = pool.take(2)
    relay.publish(slots, one=torch.tensor([5, 6]).to(rt.device), other=[7, 8])
    assert relay.gather(slots, "one").tolist() == [5, 6]


@pytest.mark.parametrize(
    ("fields", "launches"),
    [
        (("small", "log", "wide", "half", "last"), 1),
        (("wide", "last"), 1),
        (("log", "small"), 1),
        (("last", "log", "small"), 1),
        (("last", "small"), 1),  # with another between
        (("last", "large"), 3),  # two, and one that packs them
    ],
)
def test_fields_side_by_side_go_to_the_host_in_one_launch(rt: Runtime, fields: tuple[str, ...], launches: int) -> None:
    """Whatever their order and dtype; each has its own values on both sides. Others are selected one by one."""
    pool = SlotPool(rt, 6)
    declared = {
        "wide": relay_field(torch.int64, (2, 1), read_by="host"),
        "last": relay_field(torch.int64, read_by="host"),
        "log": relay_field(torch.float32, (2,), read_by="host"),
        "small": relay_field(torch.int32, read_by="host"),
        "half": relay_field(torch.float16, (2,), read_by="host"),
        "large": relay_field(torch.float32, (200,), read_by="host"),
    }
    relay, slots = FutureMap(pool, declared), pool.take(5).take([4, 1, 2])
    known = {
        name: np.arange(3 * int(np.prod(one.shape))).reshape(3, *one.shape) + 10 * i
        for i, (name, one) in enumerate(declared.items())
    }
    relay.publish(slots, **{name: on_device(rt, values, declared[name].dtype) for name, values in known.items()})
    before = rt.counters.snapshot()
    found = relay.prefetch(slots, *fields)
    spent = rt.counters - before
    assert (spent.device_operations, spent.device_to_host_copies, spent.forced_syncs) == (launches, 1, 0)
    for name in fields:
        assert found[name].np.dtype == numpy_dtype(declared[name].dtype)
        assert found[name].np.tolist() == rt.inspect(found[name].device).tolist() == known[name].tolist()


def test_any_number_of_fields_is_published_in_two_launches_and_ids_are_gathered_in_one(rt: Runtime) -> None:
    """Dtypes and shapes do not matter; a large field goes by itself. Each field has its values, and no other's."""
    pool = SlotPool(rt, 6)
    fields = {
        "accepted": relay_field(torch.int32, must_read=False),
        "last": relay_field(torch.int64),
        "drafts": relay_field(torch.int64, (3,), ragged=True),
        "greedy": relay_field(torch.bool, must_read=False),
        "gate": relay_field(torch.bfloat16, (2,), must_read=False),
        "hidden": relay_field(torch.bfloat16, (512,), must_read=False),
    }
    relay = FutureMap(pool, fields)
    slots, count = pool.take(4).take([3, 0, 2]), [0]
    _ = slots.device
    values = {
        name: on_device(rt, np.arange(1, 1 + 3 * math.prod(one.shape)).reshape(3, *one.shape), one.dtype)
        for name, one in fields.items()
    }

    def launches(act: Callable[[], Any]) -> Any:
        before = rt.counters.device_operations
        result = act()
        count[0] = rt.counters.device_operations - before
        return result

    small = {name: values[name] for name in fields if name != "hidden"}
    launches(lambda: relay.publish(slots, **small))
    assert count == [2]
    for name, value in small.items():
        if name not in ("last", "drafts"):
            assert torch.equal(relay.gather(slots, name), value)
    plan = ForwardPlan.of(slots, [9, 9, 9], 4)
    inputs = launches(lambda: relay.resolve_forward_inputs(plan, plan.upload(), ids=("last", "drafts")))
    assert count == [1]
    expected = np.concatenate([rt.inspect(small["last"])[:, None], rt.inspect(small["drafts"])], axis=1)
    assert rt.inspect(inputs.input_ids).tolist() == expected.reshape(-1).tolist()
    assert inputs.input_ids.is_contiguous()
    launches(lambda: relay.publish(slots, **values))
    assert count == [3]
    assert torch.equal(relay.gather(slots, "hidden"), values["hidden"])
    from_host = {name: rt.inspect(value) for name, value in small.items() if name != "gate"}
    relay.discard(slots)
    before = rt.counters.snapshot()
    relay.publish(slots, **from_host)
    spent = rt.counters - before
    assert (spent.device_operations, spent.host_to_device_copies) == (3, 1)  # of what lies on both sides of the gate
    for name, array in from_host.items():
        assert rt.inspect(relay.gather(slots, name)).tolist() == array.tolist()
    relay.check()


@pytest.mark.parametrize("n", [1, 2])
def test_columns_of_one_tensor_are_published(rt: Runtime, n: int) -> None:
    """A value may have any stride: torch calls a tensor of one element contiguous whatever its stride is."""
    fields, pool = dict.fromkeys("abc", relay_field(torch.int64, read_by="host")), SlotPool(rt, n)
    relay, slots = FutureMap(pool, fields), pool.take(n)
    out = rt.upload([np.arange(6 * n).reshape(n, 6)]).view(0)
    relay.publish(slots, **{name: out[:, at] for at, name in enumerate(fields)})
    for at, name in enumerate(fields):
        assert relay.resolve(slots, name).np.tolist() == [6 * row + at for row in range(n)]


@pytest.mark.parametrize("names", [("last", "drafts"), ("lens", "last"), ("drafts", "lens", "last")])
def test_ids_of_fields_with_others_between_are_gathered_in_two_launches(rt: Runtime, names: tuple[str, ...]) -> None:
    """Where fields lie in the record in another order, or not side by side: they are taken out, and put in order."""
    pool = SlotPool(rt, 6)
    shapes: dict[str, tuple[int, ...]] = {"last": (), "lens": (), "drafts": (3,)}
    relay = FutureMap(pool, {name: relay_field(torch.int64, shape, must_read=False) for name, shape in shapes.items()})
    slots = pool.take(4).take([3, 0, 2])
    _ = slots.device
    for turn in range(2):
        numbers = {name: turn + np.arange(3 * math.prod(one)).reshape(3, *one) for name, one in shapes.items()}
        relay.publish(slots, **{name: on_device(rt, one, torch.int64) for name, one in numbers.items()})
        expected = np.concatenate([numbers[name].reshape(3, -1) for name in names], axis=1)
        plan = ForwardPlan.of(slots, [9, 9, 9], expected.shape[1])
        uploaded, before = plan.upload(), rt.counters.snapshot()
        inputs = relay.resolve_forward_inputs(plan, uploaded, ids=names)
        spent = rt.counters - before
        assert (spent.device_operations, spent.host_to_device_copies) == (2, 0)
        assert rt.inspect(inputs.input_ids).tolist() == expected.reshape(-1).tolist()
        assert inputs.input_ids.is_contiguous()


def test_a_prefetch_never_waits() -> None:
    """Asking costs no wait; reading waits for that one copy, once, and for nothing behind it."""
    rt = LateRuntime()
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, FIELDS)
    slots, forward = pool.take(2), rt.stream("forward")
    with rt.use(forward):
        relay.publish(slots, tokens=on_device(rt, [5, 6]), outputs=on_device(rt, [[1] * 3] * 2))
    asked = relay.prefetch(slots, "tokens", "outputs")
    with rt.use(forward):
        behind = rt.record()
    assert not asked.ready()
    assert "tokens" in asked
    assert "lens" not in asked
    assert list(asked) == ["tokens", "outputs"]
    assert len(asked) == 2
    assert repr(asked) == "Prefetched(tokens, outputs of 2 requests)"
    with pytest.raises(KeyError, match="was not prefetched"):
        asked["lens"]
    assert asked != {}
    assert asked in {asked}
    assert rt.counters.fence_waits == 0
    assert asked["tokens"].tolist() == [5, 6]
    assert asked["outputs"].tolist() == [[1] * 3] * 2
    assert asked.ready()
    assert asked.resolve() is asked.resolve()
    assert asked.slots.np.tolist() == slots.np.tolist()
    assert (rt.counters.fence_waits, rt.counters.forced_syncs) == (1, 0)
    assert not behind.query()


def test_books_stay_small(rt: Runtime, pool: SlotPool) -> None:
    """Ten thousand publishes leave a few behind, and those of single slots no more than there are slots."""
    relay = FutureMap(pool, {"lens": relay_field(torch.int64), "tokens": relay_field(torch.int64)})
    slots = pool.take(8)
    single = [slots.take([row]) for row in range(8)]
    values = on_device(rt, list(range(8)))
    assert len(slots.device) == 8
    most = 0
    for turn in range(5_000):
        relay.publish(slots, lens=values)
        relay.publish(single[turn % 8], tokens=values[:1])
        relay.discard(slots)
        rt.record().wait()  # what a device is still at is kept besides
        most = max(most, len(relay._entries.publishes))
    assert most <= 2 * KEPT
    staging = rt.counters.staging_allocations
    for _ in range(100):
        relay.publish(slots, lens=values)
        relay.gather(slots, "lens")
    assert rt.counters.staging_allocations == staging


# Invariants of entries. What may be read and written when, and that refusals change nothing, is in the machine's model


def test_reports_name_entry_writer_and_reader(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """Which slot, field and step, who wrote the entry and who reads it; with checks off nothing is reported."""
    slots = pool.take(3)
    second = int(slots.np[1])
    relay.publish(slots.take([0, 2]), tokens=on_device(rt, [5, 6]))
    rt.next_step()

    def reported(code: Code, act: Callable[[], object], operation: str, writer: str, reader: str) -> Violation:
        violation = broken(relay, code, act)
        assert (violation.object, violation.operation) == (repr(relay), operation)
        assert (violation.row, violation.slot, violation.column, violation.step) == (1, second, "tokens", 1)
        assert str(violation.writer).startswith(writer)
        assert str(violation.reader).startswith(reader)
        return violation

    unwritten, reads, wrote = "not written", "gather in step 1 on stream ", "publish in step 1 on stream "
    gather = functools.partial(relay.gather, slots, "tokens")
    reported(Code.FUTURE_UNWRITTEN, gather, "gather", unwritten, reads)
    relay.publish(slots.take([1]), tokens=on_device(rt, [7]))
    relay.gather(slots.take([1]), "tokens")
    reported(Code.FUTURE_CONSUMED, gather, "gather", wrote, reads)
    later = MirroredTensor.from_host(rt, [7, 8])  # whose upload is not to be paid for either
    some = slots.take([0, 1])
    relay.gather(slots.take([0]), "tokens")
    relay.resolve(slots.take([0]), "tokens")
    publish = functools.partial(relay.publish, some, tokens=later)
    violation = reported(Code.FUTURE_UNREAD_OVERWRITTEN, publish, "publish", wrote, "not read yet")
    assert "by publish in step 1 on stream " in violation.problem
    assert violation.expected == "read by the next forward and the host"
    with checks("off"):
        publish()
        for _ in range(2):
            assert rt.inspect(gather()).tolist() == [7, 8, 6]
        assert rt.inspect(relay.gather(pool.take(1), "lens")).tolist() == [0]


def test_an_entry_belongs_to_its_owner(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """An entry that outlives its owner is never read as the next owner's: its generation says whose it is."""
    slots = pool.take(1)
    relay.publish(slots, tokens=on_device(rt, [5]))
    entries = relay._entries.fields["tokens"]
    kept = {part: entries.arrays[part].copy() for part in ("generation", "number")}
    pool.free(slots, after=None)
    for part, array in kept.items():
        entries.arrays[part][:] = array
    violation = refused(Code.FUTURE_GENERATION, relay.check)
    assert violation.slot == int(slots.np[0])
    again = pool.take(1)
    violation = broken(relay, Code.FUTURE_GENERATION, lambda: relay.gather(again, "tokens"))
    assert (violation.slot, violation.generation) == (int(again.np[0]), int(again.generations[0]))
    assert str(violation.writer).startswith("publish in step 0 ")
    assert str(violation.reader).startswith("gather in step 0 ")


def test_a_written_row_zero_is_found(rt: Runtime, pool: SlotPool, relay: FutureMap, full: None) -> None:
    """What padded rows read is zero: `check` and level `full` find a write there."""
    slots = pool.take(1)
    relay._memory["outputs"][0, 1] = 7
    violation = refused(Code.SLOT_ZERO_DIRTY, relay.check)
    assert violation.column == "outputs"
    refused(Code.SLOT_ZERO_DIRTY, lambda: relay.publish(slots, lens=on_device(rt, [5], torch.int32)))


def test_negative_stand_ins_are_found(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """In a field of ids a negative number goes in from no host, comes out to no host, and at `full` to no forward."""
    slots = pool.take(2)
    broken(relay, Code.SENTINEL_ESCAPED, lambda: relay.publish(slots, tokens=[5, -1]))
    relay.publish(slots, tokens=on_device(rt, [5, -1]))
    with checks("full"):
        violation = refused(Code.SENTINEL_ESCAPED, lambda: relay.gather(slots, "tokens"))
        assert (violation.row, violation.column) == (1, "tokens")
        assert states(relay, slots, "tokens") == [["published"] * 2]
    asked = relay.prefetch(slots, "tokens")
    for _ in range(2):
        assert refused(Code.SENTINEL_ESCAPED, asked.resolve).column == "tokens"
    relay.publish(slots, lens=[-5, -6])
    with checks("full"):
        assert rt.inspect(relay.gather(slots, "lens")).tolist() == [-5, -6]


# What is refused


TEXTS = {
    "publish an undeclared field": "publish of 'tokens', which is not declared",
    "publish nothing": "publish of no field",
    "publish int32": "expected torch.int64, got torch.int32",
    "publish a mirrored int32": "expected torch.int64, got torch.int32",
    "publish a row too many": r"relay: publish of 'token': expected shape \[2\], got \[3\]",
    "publish a mirrored row too many": r"expected shape \[2\], got \[3\]",
    "publish rows for numbers": r"expected shape \[2\], got \[2, 1\]",
    "publish drafts of another shape": r"publish of 'drafts': expected shape \[2, 2\], got \[2, 3\]",
    "publish a scalar": r"expected shape \[2\], got \[\]",
    "publish from another device": "expected a tensor on .*, got one on meta",
    "publish a value of another runtime": "another runtime",
    "publish a sparse tensor": "layout",
    "publish a good field and a bad one": "publish of 'lengths'",
    "publish a list of a row too few": r"publish of 'token': expected shape \[2\], got \[1\]",
    "publish a host number": r"expected shape \[2\], got \[\]",
    "publish half a token": "float64 do not go into int64",
    "publish None in a list": "expected numbers",
    "publish more than int64": "does not fit",
    "publish a good field and a bad host one": r"publish of 'lengths': expected shape \[2\], got \[3\]",
    "gather what only the host reads": "gather of 'accepted', which is read by the host",
    "gather an undeclared field": "use one of: token, drafts, lengths, accepted, hidden",
    "prefetch nothing": r"prefetch of \(\)",
    "prefetch a field twice": "name each field once",
    "prefetch what the host does not read": "prefetch of 'drafts', which is read by the next forward",
    "resolve an undeclared field": "which is not declared",
    "discard an undeclared field": "discard of 'no'",
    "states of an undeclared field": "states of 'tokens'",
    "a relay without fields": "got none",
    "a field for an unknown reader": "device, host, both",
    "a field that torch cannot index": "float8",
    "a field for the host that numpy lacks": "bfloat16",
    "a field of ids that numpy lacks": "bfloat16",
    "a field of a negative size": "shape is -1",
}
"""What the message of a misuse says, where the code of an invariant does not say it."""


def test_each_text_belongs_to_a_misuse() -> None:
    """No text is left over from a misuse that has gone."""
    assert TEXTS.keys() <= {misuse.name for misuse in RELAY}


@pytest.mark.parametrize("misuse", RELAY, ids=lambda misuse: str(misuse.name))
def test_misuse_changes_nothing(rt: Runtime, pool: SlotPool, misuse: Misuse[RelayCase]) -> None:
    """A call that cannot be meant is refused with a typed error, before anything is launched or noted."""
    relay = FutureMap(pool, declared(torch.float32))
    case = RelayCase(relay, pool.take(2), SlotPool(rt, 1, name="other").take(1))
    for published in (False, True):
        if published:
            relay.publish(case.slots.take([0, 1]), token=case.column(), lengths=case.column())
        before = whole(relay)
        with pytest.raises(BatchStateError, match=TEXTS.get(misuse.name)) as caught:
            misuse.call(case)
        error = caught.value
        assert (error.code if isinstance(error, Violation) else type(error)) in misuse.expected
        assert whole(relay) == before


def operations(relay: FutureMap, slots: Any) -> dict[str, Callable[[], object]]:
    """Every operation on entries, for these slots."""
    lens = on_device(relay.runtime, [5] * len(slots), torch.int32)
    return {
        "publish from the device": lambda: relay.publish(slots, lens=lens),
        "publish from the host": lambda: relay.publish(slots, lens=[5] * len(slots)),
        "gather": lambda: relay.gather(slots, "lens"),
        "prefetch": lambda: relay.prefetch(slots, "tokens"),
        "resolve": lambda: relay.resolve(slots, "tokens"),
        "states": lambda: relay.states(slots, "lens"),
        "discard": lambda: relay.discard(slots),
    }


def test_dead_and_foreign_slots_change_nothing(rt: Runtime, device: str, pool: SlotPool, relay: FutureMap) -> None:
    """Freed, repeated and foreign slots, and other indices, are refused by every operation."""
    gone = pool.take(2)
    relay.publish(gone, lens=on_device(rt, [5, 6], torch.int32))
    pool.free(gone, after=None)
    others, distant = SlotPool(rt, 8, name="others"), SlotPool(open_device(device), 8)
    live = pool.take(2)
    mixed = live.pad(3).take([2, 0, 1])  # padding is at the end; elsewhere a zero is a mistake
    for act in operations(relay, others.take(2)).values():
        untouched(relay, ArgumentError, "expected slots of pool 'slots', got slots of pool 'others'", act)
    for act in operations(relay, distant.take(2)).values():
        untouched(relay, DeviceError, "another runtime", act)
    for slots, code in ((Pages.from_host(rt, [1, 2]), Code.UNIT_MISMATCH), (mixed, Code.SLOT_ZERO_ALLOCATED)):
        for act in operations(relay, slots).values():
            broken(relay, code, act)
    for act in [*operations(relay, live.take([0, 0])).values()][:2]:
        broken(relay, Code.SLOT_SHARED, act)
    for level in ("cheap", "off"):
        with checks(level):
            for act in operations(relay, gone).values():
                broken(relay, Code.SLOT_STALE_HANDLE, act)


def test_belongs_to_its_thread(rt: Runtime, pool: SlotPool, relay: FutureMap) -> None:
    """Every operation is refused in a second thread, and so is reading what was prefetched."""
    slots = pool.take(2)
    relay.publish(slots, tokens=on_device(rt, [5, 6]))
    asked = relay.prefetch(slots, "tokens")
    acts = [*operations(relay, slots).values(), relay.check, asked.resolve, lambda: FutureMap(pool, FIELDS)]
    before = whole(relay)
    for act in acts:
        assert isinstance(in_a_thread(act), OwnerThreadError)
    assert whole(relay) == before
    assert asked["tokens"].tolist() == [5, 6]


def test_no_publish_and_no_read_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph would bypass the bookkeeping: while one is captured the relay refuses, and changes nothing."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    rt, module = fake_accelerator(monkeypatch)
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, FIELDS)
    slots = pool.take(2)
    relay.publish(slots, tokens=on_device(rt, [5, 6]))
    asked = relay.prefetch(slots, "tokens")
    acts = [act for name, act in operations(relay, slots).items() if name not in ("states", "discard")]
    acts += [asked.resolve, lambda: FutureMap(pool, FIELDS)]
    before = whole(relay)
    module.capturing = True
    for act in acts:
        with pytest.raises(CaptureError, match="captured"):
            act()
    relay.check()
    assert not asked.ready()
    assert states(relay, slots, "tokens") == [["published"] * 2]
    module.capturing = False
    assert whole(relay) == before
    assert asked["tokens"].tolist() == [5, 6]


# Pools and other relays


def test_over_a_hybrid_pool(rt: Runtime, full: None) -> None:
    """The slots of a HybridSlotPool serve as those of a SlotPool, and are freed through it."""
    pool = HybridSlotPool(rt, 4, states=4)
    relay = FutureMap(pool, FIELDS)
    assert relay.slots is pool
    slots = pool.take(2)
    relay.publish(slots, tokens=on_device(rt, [5, 6]))
    assert relay.resolve(slots, "tokens").tolist() == [5, 6]
    pool.free(slots, after=None)
    assert states(relay, pool.take(2), "tokens") == [["unwritten"] * 2]


def test_two_relays_over_one_pool(rt: Runtime, pool: SlotPool, full: None) -> None:
    """Relays of one pool know nothing of each other, and both forget a request that leaves."""
    one, two = FutureMap(pool, FIELDS, name="one"), FutureMap(pool, FIELDS, name="two")
    slots = pool.take(2)
    one.publish(slots, lens=on_device(rt, [5, 6], torch.int32))
    two.publish(slots, lens=on_device(rt, [7, 8], torch.int32))
    assert rt.inspect(two.gather(slots, "lens")).tolist() == [7, 8]
    assert states(one, slots, "lens") == [["published"] * 2]
    assert rt.inspect(one.gather(slots, "lens")).tolist() == [5, 6]
    pool.free(slots, after=None)
    again = pool.take(2)
    for relay in (one, two):
        assert states(relay, again, "lens") == [["unwritten"] * 2]


# Streams


@attrs.define(eq=False)
class Lanes:
    """A relay on a stand-in of an accelerator: which stream waits for which event, and which memory is kept for it."""

    rt: AcceleratorRuntime
    module: FakeModule
    pool: SlotPool
    relay: FutureMap
    fences: list[Any]
    kept: list[tuple[int, int]]

    def settled(self, *names: str) -> list[Any]:
        """Streams that have the relay's zeroed memory already, so that what they wait for now is what a test does."""
        streams = [self.rt.stream(name) for name in names]
        for stream in streams:
            with self.rt.use(stream):
                for field in self.relay.fields:
                    self.relay._memory_of(field)
        return streams

    def on(self, stream: Any, act: Callable[[], Any]) -> tuple[Any, list[Any], list[Any]]:
        """Runs `act` on a stream. What it returned, what that stream was made to wait for, and what was recorded."""
        waited, recorded = len(stream.native.waited), len(self.fences)
        with self.rt.use(stream):
            result = act()
        return result, stream.native.waited[waited:], [fence.event for fence in self.fences[recorded:]]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    """4 slots; what is recorded and kept alive is noted."""
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.append((tensor.data_ptr(), stream.stream_id))
    )
    rt, module = fake_accelerator(monkeypatch)
    fences: list[Any] = []
    record = rt._fence_behind

    def recorded(stream: Any) -> Fence:
        fences.append(record(stream))
        return fences[-1]

    monkeypatch.setattr(rt, "_fence_behind", recorded)
    pool = SlotPool(rt, 4)
    return Lanes(rt, module, pool, FutureMap(pool, FIELDS), fences, kept)


def device_of(slots: Slots) -> torch.Tensor:
    """The device side, safe on the current stream."""
    return slots.device


def test_a_reader_waits_for_the_very_publish(lanes: Lanes) -> None:
    """A gather on another stream waits for the publishes whose entries it reads, once for each, and for no other."""
    forward, copying, other, last = streams = lanes.settled("forward", "copying", "other", "last")
    relay, slots = lanes.relay, lanes.pool.take(4)
    one, two = slots.take([0, 1]), slots.take([2, 3])
    for stream in streams:
        for handles in (one, two, slots):
            lanes.on(stream, functools.partial(device_of, handles))
    values = torch.tensor([5, 6])
    _, waited, first = lanes.on(forward, lambda: relay.publish(one, lens=values.int(), tokens=values))
    assert waited == []
    _, waited, second = lanes.on(copying, lambda: relay.publish(two, lens=values.int(), tokens=values))
    assert waited == []
    assert len(first) == len(second) == 1  # of two fields each
    _, waited, _ = lanes.on(other, lambda: relay.gather(two, "lens"))
    assert waited == second
    _, waited, _ = lanes.on(other, lambda: relay.gather(one, "lens"))
    assert waited == first
    taken, waited, _ = lanes.on(last, lambda: relay.gather(slots, "tokens"))
    assert waited == [*first, *second]
    assert taken.tolist() == [5, 6, 5, 6]


def test_one_stream_waits_for_nothing(lanes: Lanes) -> None:
    """An engine with one stream is in order as it is: publish, gather and publish again wait for no event."""
    (forward,) = lanes.settled("forward")
    slots = lanes.pool.take(4)
    lanes.on(forward, lambda: slots.device)
    lens = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    for _ in range(3):
        _, waited, recorded = lanes.on(forward, lambda: lanes.relay.publish(slots, lens=lens))
        assert (waited, len(recorded)) == ([], 1)
        _, waited, _ = lanes.on(forward, lambda: lanes.relay.gather(slots, "lens"))
        assert waited == []


@pytest.mark.parametrize("over", [False, True])
def test_a_read_is_waited_for_however_many_publishes_follow(
    lanes: Lanes, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream reads, and publishes nothing: who writes for the slot's next owner waits for that, until it is over."""
    forward, other = lanes.settled("forward", "other")
    relay, pool = lanes.relay, lanes.pool
    monkeypatch.setattr(lanes.module.Event, "query", lambda event: over or event.stream is not other.native)
    lens = torch.tensor([5], dtype=torch.int32)
    first, second = pool.take(1), pool.take(1)
    lanes.on(forward, lambda: relay.publish(first, lens=lens))
    lanes.on(other, lambda: relay.gather(first, "lens"))
    pool.free(first, after=None)
    for _ in range(100):
        lanes.on(forward, lambda: relay.publish(second, lens=lens))
        lanes.on(forward, lambda: relay.gather(second, "lens"))
    assert len(relay._entries.publishes) <= 2 * KEPT < 100
    again = pool.take(1)
    assert again.np.tolist() == first.np.tolist()
    lanes.on(forward, lambda: again.device)
    _, waited, _ = lanes.on(forward, lambda: relay.publish(again, lens=lens))
    assert [event.stream for event in waited] == ([] if over else [other.native])


def test_a_publish_comes_behind_the_one_before_it_though_nothing_was_gathered_between(lanes: Lanes) -> None:
    """Each publish on another stream waits for the last one into its entries, and for no earlier one."""
    one, two = lanes.settled("one", "two")
    relay, slots = lanes.relay, lanes.pool.take(4)
    for stream in (one, two):
        lanes.on(stream, lambda: slots.device)
    lens = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    before: list[Any] = []
    for stream in (one, two, one, one, two):
        _, waited, recorded = lanes.on(stream, lambda: relay.publish(slots, lens=lens))
        assert waited == [event for event in before if event.stream is not stream.native]
        before = recorded
        relay.discard(slots)


@pytest.mark.parametrize("between", ["nothing", "discard", "another owner"])
def test_a_publish_comes_behind_the_reads_before_it(lanes: Lanes, between: str) -> None:
    """What overwrites entries waits for the private stream that still reads them, also where they ended meanwhile."""
    forward, schedule = lanes.settled("forward", "schedule")
    relay, slots = lanes.relay, lanes.pool.take(4)
    for stream in (forward, relay._private):
        lanes.on(stream, lambda: (slots.device, relay._memory_of("tokens")))
    values = torch.tensor([5, 6, 7, 8])
    _, _, published = lanes.on(forward, lambda: relay.publish(slots, tokens=values))
    asked, waited, recorded = lanes.on(schedule, lambda: relay.prefetch(slots, "tokens"))
    assert waited == []
    assert relay._private.native.waited[-1:] == published
    read, done = recorded
    assert read.stream is done.stream is relay._private.native
    writer = forward
    if between == "nothing":
        lanes.on(forward, lambda: relay.gather(slots, "tokens"))
    elif between == "discard":
        relay.discard(slots)
    else:
        lanes.pool.free(slots, after=None)
        slots, writer = lanes.pool.take(4), schedule
    _, waited, _ = lanes.on(writer, lambda: relay.publish(slots, tokens=[1, 2, 3, 4]))
    assert read in waited
    assert done not in waited
    assert (writer is schedule) == (published[0] in waited)
    assert asked["tokens"].tolist() == [5, 6, 7, 8]


def test_the_stream_of_a_publish_takes_out_what_the_host_gets(lanes: Lanes) -> None:
    """The private stream waits for that alone, and a publish on another stream too. `resolve` waits for the publish."""
    forward, other = lanes.settled("forward", "other")
    relay, slots, values = lanes.relay, lanes.pool.take(4), torch.tensor([5, 6, 7, 8])
    for stream in (forward, other):
        lanes.on(stream, lambda: (slots.device, relay._memory_of("tokens")))
    private, reads = relay._private.native, list[Any]()
    for writer in (forward, forward, other):
        _, waited, _ = lanes.on(writer, lambda: relay.publish(slots, tokens=values))
        assert {event.stream for event in waited} == ({forward.native} if writer is other else set())
        asked, waited, (read, done) = lanes.on(writer, lambda: relay.prefetch(slots, "tokens"))
        reads.append(read)
        assert (waited, private.waited[-len(reads) :]) == ([], reads)
        assert (read.stream, done.stream) == (writer.native, private)
        assert asked["tokens"].tolist() == [5, 6, 7, 8]
        lanes.on(writer, lambda: relay.gather(slots, "tokens"))
    _, _, published = lanes.on(other, lambda: relay.publish(slots, tokens=values))
    _, _, recorded = lanes.on(other, lambda: relay.resolve(slots, "tokens"))
    assert published[0] in private.waited
    assert {event.stream for event in recorded} == {private}


@pytest.mark.parametrize("there", [True, False])
def test_a_prefetch_keeps_memory_for_its_stream(lanes: Lanes, there: bool) -> None:
    """The private stream has the rows taken out; or entries and handles, where it takes them out."""
    forward, other = lanes.settled("forward", "other")
    relay, slots = lanes.relay, lanes.pool.take(4)
    lanes.on(forward, lambda: slots.device)
    _, _, published = lanes.on(forward, lambda: relay.publish(slots, tokens=torch.tensor([5, 6, 7, 8])))
    lanes.kept.clear()
    asked, _, _ = lanes.on(forward if there else other, lambda: relay.prefetch(slots, "tokens"))
    private = relay._private.native.stream_id
    with lanes.rt.use(other):
        kept = lanes.kept[:]
        lanes.kept.clear()
        rows = asked["tokens"].device
        assert rows is asked["tokens"].device
        assert lanes.kept == [(rows.data_ptr(), other.native.stream_id)]
    kept_entries = {(relay._memory["tokens"].data_ptr(), private), (slots.device.data_ptr(), private)}
    assert set(kept) == ({(rows.data_ptr(), private)} if there else kept_entries)
    assert there or published[0] in relay._private.native.waited


def test_a_missing_wait_is_reported(lanes: Lanes) -> None:
    """A library that forgets to wait, for a publish or for a read, is caught before it launches."""
    forward, other = lanes.settled("forward", "other")
    relay, slots = lanes.relay, lanes.pool.take(2)
    with lanes.rt.use(forward):
        relay.publish(slots, tokens=torch.tensor([5, 6]))
    relay.prefetch(slots, "tokens")
    with lanes.rt.use(forward):
        relay.gather(slots, "tokens")
    no_wait = changed(
        "_relay:RelayEntries.come_behind",
        "if key not in use.ordered:",
        "if key not in use.ordered and use.operation == 'publish':",
    )
    with no_wait, lanes.rt.use(forward):
        violation = refused(Code.FUTURE_ORDER, lambda: relay.publish(slots, tokens=torch.tensor([7, 8])))
    assert str(violation.writer).startswith("a read in step 0 on stream ")
    assert str(violation.reader).startswith("publish in step 0 ")
    assert states(relay, slots, "tokens") == [["consumed"] * 2]
    with lanes.rt.use(forward):
        relay.publish(slots, tokens=torch.tensor([7, 8]))
    no_wait = changed("_relay:RelayEntries.come_behind", "if key not in use.ordered:", "if False:")
    with no_wait, lanes.rt.use(other):
        violation = refused(Code.FUTURE_ORDER, lambda: relay.gather(slots, "tokens"))
    assert str(violation.writer).startswith("publish in step 0 ")
    assert str(violation.reader).startswith("gather in step 0 ")
    assert violation.expected == f"a wait for {violation.writer}"
    assert states(relay, slots, "tokens") == [["published"] * 2]


def test_a_host_that_reads_too_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a copy is not waited for, or a private stream not put behind the publish, the host hears of it."""
    rt = LateRuntime()
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, FIELDS)
    slots, forward = pool.take(2), rt.stream("forward")
    with rt.use(forward):
        relay.publish(slots, tokens=on_device(rt, [5, 6]), outputs=on_device(rt, [[1] * 3] * 2))
    with monkeypatch.context() as patched:
        patched.setattr(LateRuntime, "_stream_wait", lambda self, stream, fence: None)
        unordered = relay.prefetch(slots, "tokens")
    violation = refused(Code.FUTURE_ORDER, unordered.resolve)
    assert violation.writer == "publish in step 0 on stream 'forward'"
    assert (violation.reader, violation.slot) == ("the host", None)
    asked = relay.prefetch(slots, "outputs")
    with changed("runtime.base:Download.resolve", "self.done.wait()", "pass"):
        assert refused(Code.FUTURE_ORDER, asked.resolve).reader == "the host"


def test_publishes_share_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event for two publishers orders the reader of the second behind the first: it is refused."""
    rt = LateRuntime()
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, FIELDS)
    slots = pool.take(2)
    fence = rt.record()
    lens = on_device(rt, [5], torch.int32)
    monkeypatch.setattr(rt, "record", lambda stream=None: fence)
    relay.publish(slots.take([0]), lens=lens)
    violation = refused(Code.FUTURE_ORDER, lambda: relay.publish(slots.take([1]), lens=lens))
    assert violation.expected == "a fence for each publish"


def test_what_is_wanted_now_and_then_may_be_overwritten(rt: Runtime) -> None:
    """A field that need not be read is overwritten unread without a word; its readers still take an entry once."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"logprob": relay_field(torch.float32, read_by="host", must_read=False)})
    slots = pool.take(2)
    for value in (0.5, 1.5):
        relay.publish(slots, logprob=rt.upload([np.full(2, value, np.float32)]).view(0))
    assert relay.resolve(slots, "logprob").np.tolist() == [1.5, 1.5]
    refused(Code.FUTURE_CONSUMED, lambda: relay.resolve(slots, "logprob"))


# Failures half way, graphs kept alive, relays dropped


def test_a_publish_that_fails_half_way_leaves_nothing_to_read(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot launch the second scatter, what the first overwrote cannot be read any more."""
    pool = SlotPool(rt, 4)
    relay = FutureMap(
        pool, {"a": relay_field(torch.int64, must_read=False), "b": relay_field(torch.int64, must_read=False)}
    )
    slots = pool.take(2)
    relay.publish(slots, a=[1, 2], b=[3, 4])
    launch, launched = rt.launch, []

    def failing(*args: object, **kwargs: object) -> object:
        launched.append(kwargs.get("name"))
        if len(launched) == 2:
            raise RuntimeError("no more of this")
        return launch(*args, **kwargs)  # type: ignore[arg-type]

    both = on_device(rt, [9, 9]), on_device(rt, [8, 8])
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
        FutureMap(pool, {"x": relay_field(torch.int64)})
    gc.collect()
    assert len(pool._listeners) == 0
    kept = FutureMap(pool, {"x": relay_field(torch.int64)})
    assert len(pool._listeners) == 1
    pool.free(pool.take(2), after=None)
    assert kept.fields["x"].dtype is torch.int64


def test_padded_rows_cost_no_copy(rt: Runtime) -> None:
    """Publishing and prefetching for a padded batch uses the slots that were uploaded with it, with or without pads."""

    class Running(Batch):
        slots = slot_column()
        lens = mirrored(torch.int64)

    pool = SlotPool(rt, 4)
    relay = FutureMap(pool, {"x": relay_field(torch.int64, read_by="host")})
    batch = Running.build(rt, slots=pool.take(2), lens=[1, 2]).pad(4)
    batch.upload()
    values = on_device(rt, [5, 6, 0, 0])
    before = rt.counters.snapshot()
    relay.publish(batch.slots, x=values)
    found = relay.prefetch(batch.slots, "x")
    assert (rt.counters - before).host_to_device_copies == 0
    assert found["x"].np.tolist() == [5, 6]
    untouched(relay, ShapeError, r"shape \[2\] or \[4\], got \[3\]", lambda: relay.publish(batch.slots, x=values[:3]))


def test_there_are_no_bounds_of_indices(rt: Runtime) -> None:
    """Slots are exact or nothing: a bound of an index would name another request's row."""
    with pytest.raises(ContractError, match="no bound"):
        SlotPool(rt, 4).take(1).weaken("upper_bound")


def test_fields_that_were_prefetched_together_are_values_of_their_own(rt: Runtime) -> None:
    """Each device side is contiguous, as kernels take it, and a write into one is reported of that one alone."""
    slots = SlotPool(rt, 8)
    fields = {"a": relay_field(torch.int64, read_by="both"), "b": relay_field(torch.int32, (2,), read_by="both")}
    relay, live = FutureMap(slots, fields), slots.take(3)
    a, b = (torch.arange(n, device=rt.device) for n in (3, 6))
    relay.publish(live, a=a, b=b.to(torch.int32).view(3, 2))
    found = relay.prefetch(live, "a", "b")
    for name in ("a", "b"):
        assert found[name].device.is_contiguous()
        assert rt.inspect(found[name].device).tolist() == found[name].np.tolist()
    found["a"].device.add_(1)
    with checks("cheap"):
        found["b"].check("test")
        refused(Code.MIRROR_FOREIGN_WRITE, lambda: found["a"].check("test"))
