"""Batch: declared columns of every kind, moved as one."""

import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import Code, Contract, MirroredTensor, Runtime, Slots, Violation, checks, invariants
from batchstate._core import Block
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import (
    ArgumentError,
    ContractError,
    DeclarationError,
    DeviceError,
    DtypeError,
    RowIndexError,
    ShapeError,
    ValueOverflowError,
)
from batchstate.pools import SlotPool
from batchstate.races.devices import open_device
from tests.doubles import refused


class Decode(Batch):
    """One column of every kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    top_k = mirrored(torch.int32, pad=-1)
    temperature = mirrored(torch.float32, pad=1.0)
    greedy = mirrored(torch.bool)
    adapter = mirrored(torch.uint8)
    bias = mirrored(torch.float32, shape=(3,))
    kv_lens = mirrored(torch.int64, contract="upper_bound")
    last_token = device_only(torch.int64)
    requests = host_list()


class Small(Batch):
    """Slots alone."""

    slots = slot_column()


def rows(pool: SlotPool, names: str) -> dict[str, Any]:
    """Columns for one request a letter, each value made from the letter."""
    keys = np.array([ord(name) - ord("a") for name in names], dtype=np.int64)
    return {
        "slots": pool.take(len(names)),
        "seq_lens": keys + 10,
        "top_k": keys,
        "temperature": keys / 8,
        "greedy": keys % 2 == 0,
        "adapter": keys,
        "bias": keys[:, None] + np.array([0.25, 0.5, 0.75]),
        "kv_lens": keys + 20,
        "last_token": torch.from_numpy(keys * 100).to(pool.runtime.device),
        "requests": list(names),
    }


@pytest.fixture
def pool(rt: Runtime) -> SlotPool:
    """Sixteen slots."""
    return SlotPool(rt, 16)


@pytest.fixture
def abcd(rt: Runtime, pool: SlotPool) -> Decode:
    """Four requests."""
    return Decode.build(rt, **rows(pool, "abcd"))


def assert_holds(batch: Decode, names: str) -> None:
    """Every column of every side holds what belongs to these requests, in this order."""
    keys = [ord(name) - ord("a") for name in names]
    expected = {
        "seq_lens": [key + 10 for key in keys],
        "top_k": keys,
        "temperature": [key / 8 for key in keys],
        "greedy": [key % 2 == 0 for key in keys],
        "adapter": keys,
        "bias": [[key + 0.25, key + 0.5, key + 0.75] for key in keys],
        "kv_lens": [key + 20 for key in keys],
    }
    for column, values in expected.items():
        assert batch[column].np.tolist() == values, column
        assert batch.runtime.inspect(batch[column].device).tolist() == values, column
    assert batch.runtime.inspect(batch.last_token.device).tolist() == [100 * key for key in keys]
    assert batch.runtime.inspect(batch.slots.device).tolist() == batch.slots.np.tolist()
    assert batch.requests == tuple(names)
    assert len(batch) == batch.num_reqs == batch.num_rows == len(names)
    batch.check()


# What each operation makes of each column on each side is compared with a list of dictionaries by the machine `batch`.


def test_slots_are_replaced_by_handles(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """`replace` takes slots of a pool or of none, and is what `copy.replace` calls."""
    assert abcd.__replace__(top_k=[9, 9, 9, 9]).top_k.np.tolist() == [9, 9, 9, 9]
    assert abcd.replace(slots=Slots.from_host(rt, [11, 12, 13, 14])).slots.np.tolist() == [11, 12, 13, 14]
    fresh = abcd.replace(slots=pool.take(4))
    pool.free(fresh.slots, after=None)
    pool.free(abcd.slots, after=None)


def test_device_columns_are_gathered_only_when_read(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """Moving rows of a device-only column launches nothing; reading it costs one concatenation and one gather."""
    batch = abcd
    before = rt.counters.snapshot()
    for name in "efgh":
        batch = batch.filter(range(1, len(batch))).merge(Decode.build(rt, **rows(pool, name)))
    batch.upload()
    assert (rt.counters - before).device_operations == 0
    assert (rt.counters - before).host_to_device_copies == 1
    assert rt.inspect(batch.last_token.device).tolist() == [400, 500, 600, 700]
    assert batch.last_token.contract is Contract.DEVICE_ONLY
    assert (rt.counters - before).device_operations == 2
    assert (rt.counters - before).host_to_device_copies == 1


def test_device_columns_do_not_pile_up(rt: Runtime, pool: SlotPool) -> None:
    """The tensors that a device-only column still refers to stay few, however many batches were merged."""
    batch = Decode.build(rt, **rows(pool, "a"))
    for _ in range(60):
        joined = Decode.build(rt, **rows(pool, "b"))
        batch = batch.merge(joined)
        batch.upload()
        pool.free(batch.split([1, 1])[0].slots, after=None)
        batch = batch.filter([1])
        assert len(batch.device_side.state.device["last_token"].sources) <= 10
    assert rt.inspect(batch.last_token.device).tolist() == [100]


def test_empty_batches(rt: Runtime, abcd: Decode, full: None) -> None:
    """A batch of no requests goes through every operation, and merging it changes nothing."""
    none = Decode.empty(rt)
    assert_holds(none, "")
    assert_holds(none.filter([]).advance("seq_lens", 1).merge(abcd), "abcd")
    assert_holds(abcd.merge(none), "abcd")
    assert abcd.merge(none).slots.pool_id == none.merge(abcd).slots.pool_id == abcd.slots.pool_id
    assert none.pad(3).slots.np.tolist() == [0, 0, 0]
    assert none.split([]) == []
    assert len(none.upload()) == 0


def test_upload_carries_extras(rt: Runtime, abcd: Decode) -> None:
    """Derived arrays of any shape ride in the batch's one copy, and come back by name."""
    before = rt.counters.snapshot()
    extras = abcd.upload(
        extras={"positions": np.array([3, 4, 5]), "query_start_loc": [0, 1, 2], "none": np.zeros((0, 2))}
    )
    assert (rt.counters - before).host_to_device_copies == 1
    assert rt.inspect(extras["positions"]).tolist() == [3, 4, 5]
    assert rt.inspect(extras["query_start_loc"]).tolist() == [0, 1, 2]
    assert tuple(extras["none"].shape) == (0, 2)
    assert list(extras) == ["positions", "query_start_loc", "none"]
    abcd.upload()
    assert abcd.seq_lens.device.shape == (4,)
    assert (rt.counters - before).host_to_device_copies == 1


# What is refused


def test_a_slot_in_two_rows_is_reported(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """Merging requests that are in the batch already is found at once."""
    violation = refused(Code.SLOT_SHARED, lambda: abcd.merge(abcd.filter([2])))
    assert violation.column == "slots"
    assert violation.row == 4


def test_a_column_of_another_length_is_reported(rt: Runtime, abcd: Decode) -> None:
    """Rows that were lost on one side are found by the next check, with the name of the column."""
    state = abcd.device_side.state
    before = state.device
    state.device = {**before, "last_token": before["last_token"].taken(np.arange(3))}
    assert refused(Code.ROW_COUNT, lambda: abcd.check()).column == "last_token"
    state.device, state.block = before, Block(Decode._layout.core, 3)
    assert refused(Code.ROW_COUNT, lambda: abcd.check()).column == "mirrored columns"


def test_writes_from_outside_are_reported(rt: Runtime, abcd: Decode) -> None:
    """A write into a column's device side is found at `cheap`, by torch's version counter, by whatever comes next."""
    abcd.seq_lens.device.add_(1)
    operation: Any
    for operation in (abcd.check, abcd.upload, lambda: abcd.filter([0]), lambda: abcd.advance("top_k", 1)):
        violation = refused(Code.MIRROR_FOREIGN_WRITE, operation)
        assert violation.column == "seq_lens"


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        (lambda b: b.filter([4]), RowIndexError, "row 4 is out of range, expected rows of 0 to 3"),
        (lambda b: b.filter([-1]), RowIndexError, "row -1"),
        (lambda b: b.filter([True]), ShapeError, "1 rows for 4"),
        (lambda b: b.split([1, 1]), ArgumentError, "sum to 2"),
        (lambda b: b.pad(4.5), DtypeError, "4.5"),
        (lambda b: b.advance("temperature", 1), DtypeError, "float32"),
        (lambda b: b.advance("slots", 1), DtypeError, "slot"),
        (lambda b: b.advance("nothing", 1), DeclarationError, "'nothing'"),
        (lambda b: b.advance("seq_lens", 0.5), DtypeError, "float64"),
        (lambda b: b.advance("seq_lens", [1, 2]), ShapeError, "got an array of"),
        (lambda b: b.advance("adapter", 253), ValueOverflowError, "256"),
        (lambda b: b.advance(("seq_lens", "adapter"), -1), ValueOverflowError, "-1"),
        (lambda b: b.update("seq_lens", [0, 0], 1), ArgumentError, "twice"),
        (lambda b: b.update("adapter", [0], 256), ValueOverflowError, "256"),
        (lambda b: b.update("slots", [0], 1), ArgumentError, "replace"),
        (lambda b: b.replace(seq_lens=[1]), ShapeError, "has 1 row, expected 4"),
        (lambda b: b.replace(bias=[1, 2, 3, 4]), ShapeError, r"\[4, 3\]"),
        (lambda b: b.replace(requests=["a"]), ShapeError, "expected 4 objects, got 1"),
        (lambda b: b.replace(requests="abcd"), DtypeError, "expected a sequence, got 'abcd'"),
        (lambda b: b.replace(unknown=[1]), DeclarationError, "'unknown'"),
        (lambda b: b.replace(last_token=torch.ones(4, device=b.runtime.device)), DtypeError, "float32"),
        (lambda b: b.replace(last_token=torch.ones(4, dtype=torch.int64, device="meta")), DeviceError, "meta"),
        (lambda b: b.upload(extras={"x": ["text"]}), DtypeError, "extra 'x'"),
        (lambda b: b.next_batch(keep=[1, 1]), ArgumentError, "twice"),
        (lambda b: b.next_batch(joining=Small.empty(b.runtime)), DeclarationError, "another Decode, got a Small"),
        (lambda b: b.next_batch(joining=b), Code.SLOT_SHARED, ""),
        (lambda b: b.next_batch(advance="nothing"), DeclarationError, "'nothing'"),
        (lambda b: b.next_batch(advance=["seq_lens", "seq_lens"]), ArgumentError, "twice"),
        (lambda b: b.next_batch(n=2), ArgumentError, "of no column"),
        (lambda b: b.advance("seq_lens", 2**63), ValueOverflowError, str(2**63)),
        (lambda b: b.advance("seq_lens", -(2**63) - 1), ValueOverflowError, str(-(2**63) - 1)),
        (lambda b: b.next_batch(keep=[0], n=[1]), ArgumentError, "of no column"),
        (lambda b: b.next_batch(keep=[3], advance="adapter", n=253), ValueOverflowError, "256"),
        (lambda b: b.replace(slots=[1, 2, 3, 4]), DtypeError, r"pool\.take"),
        (lambda b: Small.build(b.runtime, slots=Slots.from_host(b.runtime, [1, 0])), Code.SLOT_ZERO_ALLOCATED, ""),
        (lambda b: Small.build(b.runtime, slots=Slots.from_host(b.runtime, [1, -1])), Code.SENTINEL_ESCAPED, ""),
        (lambda b: Small.build(b.runtime), DeclarationError, "no value for slots"),
        (lambda b: Small.build(b.runtime, slots=[], x=[1]), DeclarationError, "'x' is not declared"),
        (lambda b: b.filter(b.filter([0]).slots), Code.UNIT_MISMATCH, ""),
        (lambda b: b.advance("seq_lens", b.slots), Code.UNIT_MISMATCH, ""),
        (lambda b: b.update("seq_lens", [0, 1, 2, 3], b.slots), Code.UNIT_MISMATCH, ""),
        (lambda b: b.replace(seq_lens=b.slots), Code.UNIT_MISMATCH, ""),
        (lambda b: b.seq_lens.take(b.slots), Code.UNIT_MISMATCH, ""),
        (lambda b: setattr(b, "seq_lens", [1, 2, 3, 4]), DeclarationError, "replace"),
        (lambda b: setattr(b, "lengths", [1, 2, 3, 4]), AttributeError, "lengths"),
    ],
)
def test_bad_arguments(abcd: Decode, operation: Any, error: Code | type[Exception], message: str) -> None:
    """A bad argument raises a typed error that names it, costs nothing on the device, and changes nothing."""
    before = abcd.runtime.counters.snapshot()
    if isinstance(error, Code):
        refused(error, lambda: operation(abcd))
    else:
        with pytest.raises(error, match=message):
            operation(abcd)
    assert abcd.runtime.counters == before
    assert_holds(abcd, "abcd")


@pytest.mark.parametrize(
    "operation",
    [
        lambda b, padded: padded.filter([0]),
        lambda b, padded: padded.merge(b),
        lambda b, padded: b.merge(padded),
        lambda b, padded: padded.advance("seq_lens", 1),
        lambda b, padded: padded.pad(8),
        lambda b, padded: padded.split([4]),
        lambda b, padded: padded.replace(seq_lens=[1] * 4),
        lambda b, padded: padded.update("seq_lens", [0], 1),
        lambda b, padded: padded.next_batch(keep=[0]),
    ],
)
def test_a_padded_batch_is_for_one_launch(abcd: Decode, operation: Any) -> None:
    """No operation takes it."""
    with pytest.raises(ArgumentError, match="padded from 4 to 6"):
        operation(abcd, abcd.pad(6))


def test_batches_that_do_not_go_together(rt: Runtime, pool: SlotPool, abcd: Decode, device: str) -> None:
    """Another declaration, another runtime or another pool is refused by a merge."""
    with pytest.raises(DeclarationError, match="another Decode, got a Small"):
        abcd.merge(Small.empty(rt))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="belongs to another runtime"):
        abcd.merge(Decode.empty(open_device(device)))
    with pytest.raises(ArgumentError, match="expected slots of pool"):
        abcd.merge(Decode.build(rt, **rows(SlotPool(rt, 40), "e")))
    with pytest.raises(DeviceError, match="another runtime"):
        abcd.replace(seq_lens=MirroredTensor.from_host(open_device(device), [1, 2, 3, 4]))


def test_declarations(rt: Runtime) -> None:
    """What cannot be declared is refused where it is declared."""
    with pytest.raises(DeclarationError, match="hide"):
        type("Bad", (Batch,), {"filter": mirrored(torch.int64)})
    with pytest.raises(DeclarationError, match="2 slot columns"):
        type("Bad", (Batch,), {"a": slot_column(), "b": slot_column()})
    with pytest.raises(DeclarationError, match="cannot be device_only"):
        mirrored(torch.int64, contract="device_only")
    with pytest.raises(DtypeError, match="bfloat16"):
        mirrored(torch.bfloat16)
    with pytest.raises(ValueOverflowError, match="-1"):
        mirrored(torch.uint8, pad=-1)
    shared = mirrored(torch.int64)
    with pytest.raises((DeclarationError, RuntimeError)):
        type("Bad", (Batch,), {"a": shared, "b": shared})

    class Wider(Decode):
        priority = mirrored(torch.int32)

    assert [*Wider.columns()] == [*Decode.columns(), "priority"]
    assert Decode.seq_lens.dtype is torch.int64


def test_memory_goes_back_with_the_last_user(rt: Runtime, pool: SlotPool) -> None:
    """A dropped batch and its columns are gone at once, read, made stale or not: they are in no reference cycle."""
    gc.disable()
    try:
        for read in (False, True):
            batch = Decode.build(rt, **rows(pool, "abc"))
            column = batch.seq_lens
            if read:
                assert len(column.device) == len(batch.last_token.device) == len(column.host) == 3
                with column.stale("device", reason="a test"):
                    batch.filter([0])
            gone: list[Any] = [weakref.ref(batch), weakref.ref(column), weakref.ref(batch.last_token)]
            del batch, column
            assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()


def test_a_bound_is_never_taken_for_exact(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """A bounded value as amount, as new rows or as table values is refused: it would become exact in silence."""
    device = torch.tensor([1, 2, 3, 4]).to(rt.device)
    bound = MirroredTensor.from_pair(rt, [9, 9, 9, 9], device, contract="upper_bound")
    table = pool.table("lens", (), torch.int64)
    for operation in (
        lambda: abcd.advance("seq_lens", bound),
        lambda: abcd.update("seq_lens", [0, 1, 2, 3], bound),
        lambda: abcd.seq_lens.update([0, 1, 2, 3], bound),
        lambda: abcd.seq_lens + bound,
        lambda: MirroredTensor.from_host(rt, bound),
        lambda: table.entry(abcd.slots, None, bound),
    ):
        with pytest.raises(ContractError, match="no exact host side"):
            operation()


def test_stale_windows_cover_derived_batches(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """What was derived from a batch inside a stale window of a column is as stale; a column given anew is not."""
    for side in ("host", "device"):
        with abcd.seq_lens.stale(side, reason="verifying"):
            derived = [
                abcd.filter([0]),
                abcd.advance("seq_lens", 1),
                abcd.replace(top_k=[1, 2, 3, 4]).split([2, 2])[1],
                abcd.pad(6),
                abcd.update("top_k", [0], 1).filter([1]),
                Decode.build(rt, **rows(pool, "e")).merge(abcd),
            ]
            for batch in derived:
                refused(Code.MIRROR_STALE_READ, functools.partial(getattr, batch.seq_lens, side))
                assert len(batch.top_k.np)
            assert abcd.replace(seq_lens=[1, 2, 3, 4]).seq_lens.np.tolist() == [1, 2, 3, 4]
        assert [len(getattr(batch.seq_lens, side)) for batch in derived] == [1, 4, 2, 6, 1, 5]
        pool.free(derived[5].filter([0]).slots, after=None)


def test_declarations_that_would_be_lost_are_refused() -> None:
    """Forgotten parentheses, a bare annotation, a dtype, a hidden column or an overridden method are found at once."""
    bodies: list[dict[str, Any]] = [
        {"slots": slot_column},
        {"lens": torch.int64},
        {"__annotations__": {"lens": torch.Tensor}},
        {"__init__": lambda self: None},
        {"check": lambda self: None},
        {"seq_lens": 5},
        {"a.b": mirrored(torch.int64)},
    ]
    for body in bodies:
        with pytest.raises(DeclarationError):
            type("Bad", (Decode,), body)


def test_columns_of_all_bases_are_declared(rt: Runtime) -> None:
    """A batch class has the columns of every base, mixins that are no batches included."""

    class First(Batch):
        x = mirrored(torch.int64)

    class Second(Batch):
        y = mirrored(torch.int64)

    class Sampling:
        z = mirrored(torch.int64)

    class All(First, Second, Sampling):
        pass

    assert set(All.columns()) == {"x", "y", "z"}
    assert All.build(rt, x=[1], y=[2], z=[3]).filter([0]).z.np.tolist() == [3]


def test_columns_may_have_any_name(rt: Runtime) -> None:
    """A column may be called like an argument of `build` and `replace`."""

    class Named(Batch):
        cls = mirrored(torch.int64)
        runtime_ = mirrored(torch.int64)

    batch = Named.build(rt, cls=[1], runtime_=[2])
    assert batch.replace(cls=[3])["cls"].np.tolist() == [3]


def test_a_failed_gather_can_be_tried_again(rt: Runtime, abcd: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that fails while a device-only column is gathered leaves the batch as it was."""
    moved = abcd.filter([2, 0])

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rt, "launch", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            moved.last_token.device  # noqa: B018
    assert rt.inspect(moved.last_token.device).tolist() == [200, 0]


def test_writing_into_an_extra_does_not_accuse_a_column(rt: Runtime, abcd: Decode) -> None:
    """Extras are the engine's to write; a written column is named, and no other."""
    extras = abcd.upload(extras={"positions": [0, 1, 2, 3]})
    assert len(abcd.seq_lens.device) == len(abcd.top_k.device) == len(abcd.kv_lens.device) == 4
    extras["positions"].add_(1)
    abcd.check()
    abcd.kv_lens.device.add_(1)
    with pytest.raises(Violation) as caught:
        abcd.check()
    assert caught.value.column == "kv_lens"


def test_a_foreign_write_before_the_first_read_is_seen(rt: Runtime, pool: SlotPool) -> None:
    """A device tensor given to a batch and written afterwards is reported, although nobody had read the column."""
    tensor = torch.tensor([1, 2]).to(rt.device)
    batch = Decode.build(rt, **{**rows(pool, "ab"), "last_token": tensor})
    tensor[0] = 99
    refused(Code.MIRROR_FOREIGN_WRITE, lambda: batch.filter([1]).last_token.device)


def test_reports_name_no_tensor(abcd: Decode) -> None:
    """What prints in a session or a log is short, and reads no tensor."""
    extras = abcd.upload(extras={"positions": [0, 1, 2, 3]})
    for thing in (abcd, extras, abcd.seq_lens, abcd.device_side.state, *abcd.device_side.state.device.values()):
        assert len(repr(thing)) < 160
        assert "tensor(" not in repr(thing)


def _copied(rt: Runtime, action: Any) -> int:
    """Copies to the device that an action makes."""
    before = rt.counters.host_to_device_copies
    action()
    return rt.counters.host_to_device_copies - before


def _first(batch: Decode) -> torch.Tensor:
    return batch["last_token"].device[:1]


@pytest.mark.parametrize(
    ("operation", "copied"),
    [
        pytest.param(lambda one: one.filter([True] * 4), 0, id="filter"),
        pytest.param(lambda one: one.filter([0, 1, 2, 3]), 0, id="filter by rows"),
        pytest.param(lambda one: one.next_batch(keep=np.ones(4, bool)), 0, id="next_batch"),
        pytest.param(lambda one: one.replace(requests=list("wxyz")), 0, id="replace of objects"),
        pytest.param(lambda one: one.tighten("kv_lens", one.kv_lens.np, slots=one.slots), 0, id="tighten"),
        pytest.param(lambda one: one.replace(seq_lens=[1] * 4), 1, id="replace"),
        pytest.param(lambda one: one.replace(bias=np.ones((4, 3))), 1, id="replace of rows"),
        pytest.param(lambda one: one.update("top_k", [2], 9), 1, id="update"),
        pytest.param(lambda one: one.advance(["seq_lens", "top_k"]), 1, id="advance"),
        pytest.param(lambda one: one.advance("top_k").replace(greedy=[True] * 4), 1, id="two"),
        pytest.param(lambda one: one.replace(last_token=one["last_token"].device + 1), 0, id="a device tensor"),
        pytest.param(lambda one: one.update_device("last_token", [1], _first(one)), 1, id="verified rows"),
    ],
)
@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_what_did_not_change_stays_on_the_device(
    rt: Runtime, pool: SlotPool, level: str, operation: Any, copied: int
) -> None:
    """Where no row moves, the next read brings all columns if one has changed, in one copy, and nothing if none has."""
    with checks(level):
        bound = MirroredTensor.from_pair(
            rt, np.arange(4) + 30, torch.arange(4, device=rt.device) + 20, contract="upper_bound"
        )
        batch = Decode.build(rt, **{**rows(pool, "abcd"), "kv_lens": bound})
        before = batch.on_device()
        changed = operation(batch)
        assert _copied(rt, changed.on_device) == copied
        assert _copied(rt, changed.upload) == 0
        fresh = operation(Decode.build(rt, **{name: batch[name] for name in before}, requests=batch.requests))
        for name, side in changed.on_device().items():
            assert torch.equal(side, fresh[name].device), name
            assert torch.equal(batch[name].device, before[name]), name
        assert _copied(rt, lambda: [changed[name].device for name in before]) == 0


@pytest.mark.parametrize("column", ["seq_lens", "top_k", "bias"])
def test_a_write_into_a_kept_device_side_is_reported(rt: Runtime, abcd: Decode, column: str) -> None:
    """A column that several batches have in one place was written: each of them says so, at `cheap`."""
    abcd.upload()
    later = abcd.replace(requests=list("wxyz"))
    later[column].device.add_(1)
    for batch in (abcd, later):
        assert refused(Code.MIRROR_FOREIGN_WRITE, functools.partial(batch.filter, [1])).column == column
    with checks("full"):
        assert refused(Code.MIRROR_EQUAL, lambda: abcd.replace(requests=list("wxyz"))).column == column


def test_an_uncounted_write_into_a_kept_device_side_is_found_at_full(rt: Runtime, abcd: Decode) -> None:
    """What a kernel wrote through an address is found by comparing the sides, in the batch that kept the column."""
    with checks("full"):
        abcd.on_device()
        later = abcd.replace(requests=list("wxyz"))
        abcd["top_k"].device.data[2] += 1
        for operation in (lambda: later.advance("seq_lens"), later.upload, later.on_device, lambda: later.filter([1])):
            violation = refused(Code.MIRROR_EQUAL, operation)
            assert (violation.column, violation.row) == ("top_k", 2)


def test_next_batch_is_three_operations(rt: Runtime, pool: SlotPool, abcd: Decode) -> None:
    """Leave, join and advance at once give what one after the other gives, and each may be left out."""
    joining = Decode.build(rt, **rows(pool, "xy"))
    for keep in (None, [2, 0], np.array([True, False, True, True])):
        for other in (None, joining, Decode.empty(rt)):
            for advance, n in (((), 1), ("seq_lens", 2), (["seq_lens", "kv_lens"], 1), ({"top_k": 1}, 1)):
                one = abcd.next_batch(keep=keep, joining=other, advance=advance, n=n)
                three = abcd if keep is None else abcd.filter(keep)
                three = three if other is None else three.merge(other)
                three = three.advance(advance, n)
                assert list(one.requests) == list(three.requests)
                for name in ("slots", "seq_lens", "top_k", "temperature", "bias", "kv_lens"):
                    assert one[name].np.tolist() == three[name].np.tolist()
                    assert one[name].contract is three[name].contract
                for name in ("seq_lens", "kv_lens", "last_token"):
                    assert rt.inspect(one[name].device).tolist() == rt.inspect(three[name].device).tolist()
    assert abcd.next_batch(keep=[0, 1], joining=abcd.filter([2])).slots.tolist() == [1, 2, 3]
    assert abcd.next_batch(advance=np.array(["seq_lens"])).seq_lens.tolist() == [11, 12, 13, 14]
    assert abcd.seq_lens.tolist() == [10, 11, 12, 13]


def test_next_batch_is_checked_once(rt: Runtime, abcd: Decode) -> None:
    """At `cheap` rows are counted once, where three operations count them twice."""
    joining = Decode.empty(rt)
    before = dict(invariants.times_checked)
    abcd.next_batch(keep=[0, 1], joining=joining, advance="seq_lens")
    once = invariants.times_checked[Code.ROW_COUNT] - before[Code.ROW_COUNT]
    abcd.filter([0, 1]).merge(joining).advance("seq_lens", 1)
    assert (once, invariants.times_checked[Code.ROW_COUNT] - before[Code.ROW_COUNT]) == (1, 3)


@pytest.mark.parametrize("far", [0, 10**6, 2**60])
@pytest.mark.parametrize("numbers", [[], [1], [2, 1], [0], [1, 0], [-1, 1], [3, 3], [1, 2, 3, 2], [-5, -5]])
def test_one_look_at_live_slots_answers_for_three_invariants(rt: Runtime, numbers: list[int], far: int) -> None:
    """A batch asks in one loop what the three invariants say, for slots close together and far apart."""
    slots = np.array([*numbers, far + 9, far + 9 + 2**12] if far else numbers, dtype=np.int64)
    three = (invariants.sentinel_escaped, invariants.slot_zero_allocated, invariants.slot_shared)
    before = dict(invariants.times_checked)
    hold = not any(invariant.question(slots) for invariant in three)
    block = Block(Small._layout.core, len(slots))
    block.memory[: len(slots)] = slots
    assert (block.wrong_slot(len(slots)) < 0) == hold
    if hold:
        Small.build(rt, slots=Slots.from_host(rt, slots))
        asked = {code for code, times in invariants.times_checked.items() if times > before[code]}
        assert {invariant.code for invariant in three} <= asked


def test_requests_that_have_left_are_found_in_each_batch() -> None:
    """Batches made of live requests ask their pool each time: whatever has a request that left says so."""
    runtime = open_device("cpu")
    pool = SlotPool(runtime, 6)
    with checks("cheap"):
        decode, other = Small.build(runtime, slots=pool.take(3)), pool.take(1)
        asked = invariants.times_checked[Code.SLOT_STALE_HANDLE]
        joined = decode.merge(Small.build(runtime, slots=pool.take(2)))
        for batch in (decode, decode.filter([2, 0]), joined, joined.pad(8)):
            batch.upload()
        pool.check_handles(joined.slots, "a call")
        assert invariants.times_checked[Code.SLOT_STALE_HANDLE] == asked + 5
        pool.free(other, after=None)
        joined.upload()
        pool.free(decode.slots.take([1]), after=None)
        for batch in (decode.filter([1]), joined, joined.pad(8)):
            refused(Code.SLOT_STALE_HANDLE, batch.upload)
        pool.take(1)
        refused(Code.SLOT_STALE_HANDLE, joined.upload)
        joined.filter([0, 2, 3, 4]).upload()


def test_replaced_values_are_not_kept_alive() -> None:
    """A batch copies the rows that it is given, and does not keep the array, which may be part of a large one."""
    runtime = open_device("cpu")
    decode = Decode.build(runtime, **rows(SlotPool(runtime, 2), "ab"))
    large = np.zeros((2, 100), dtype=np.float32)
    known = weakref.ref(large)
    replaced = decode.replace(temperature=large[:, 0])
    del large
    assert known() is None
    assert len(replaced) == 2
