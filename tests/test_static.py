"""StaticBuffers: a step written straight to addresses that stay."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchstate import (
    Code,
    ForwardPlan,
    FutureMap,
    MirroredTensor,
    PagePool,
    Runtime,
    SlotPool,
    StaticBuffers,
    Violation,
    checks,
    relay_field,
)
from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.errors import (
    ArgumentError,
    CaptureError,
    DeclarationError,
    DeviceError,
    DtypeError,
    OwnerThreadError,
    ShapeError,
)
from batchstate.races.devices import open_device, window_of
from batchstate.races.runtime import RaceRuntime
from tests.doubles import in_a_thread, refused

ROWS = 6


class Decode(Batch):
    """One column of every kind."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, pad=1)
    top_k = mirrored(torch.int32, pad=-1)
    greedy = mirrored(torch.bool)
    bias = mirrored(torch.float32, shape=(3,), pad=0.5)
    temperatures = mirrored(torch.float32, shape=(1,), pad=1.0)
    kv_lens = mirrored(torch.int64, contract="upper_bound", pad=2)
    last_token = device_only(torch.int32, pad=9)
    requests = host_list()


def of_letters(pool: SlotPool, names: str) -> Decode:
    """One request a letter."""
    keys = np.array([ord(name) - ord("a") for name in names], dtype=np.int64)
    runtime = pool.runtime
    lens = torch.from_numpy(keys + 15).to(runtime.device)
    bound = MirroredTensor.from_pair(runtime, keys + 20, lens, contract="upper_bound")
    return Decode.build(
        runtime,
        slots=pool.take(len(names)),
        seq_lens=keys + 10,
        top_k=keys,
        greedy=keys % 2 == 0,
        bias=keys[:, None] + np.array([0.25, 0.5, 0.75]),
        temperatures=keys[:, None] / 4,
        kv_lens=bound,
        last_token=torch.from_numpy(keys.astype(np.int32) * 100).to(runtime.device),
        requests=list(names),
    )


@pytest.fixture
def pool(rt: Runtime) -> SlotPool:
    """Sixteen slots."""
    return SlotPool(rt, 16)


def _raised(error: BaseException | None) -> None:
    if error is not None:
        raise error


def held(buffers: StaticBuffers) -> dict[str, Any]:
    """What is in the buffers, as lists."""
    return {name: buffers.runtime.inspect(tensor).tolist() for name, tensor in buffers.items()}


PADDING = {
    "slots": [0] * ROWS,
    "seq_lens": [1] * ROWS,
    "top_k": [-1] * ROWS,
    "greedy": [False] * ROWS,
    "bias": [[0.5] * 3] * ROWS,
    "temperatures": [[1.0]] * ROWS,
    "kv_lens": [2] * ROWS,
    "last_token": [9] * ROWS,
}


def test_at_first_all_rows_are_padding(rt: Runtime) -> None:
    """A graph can be captured over them before there is a step: slot 0 and pad values everywhere."""
    assert held(StaticBuffers(rt, Decode, rows=ROWS)) == PADDING


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_a_step_is_at_the_same_addresses(pool: SlotPool, level: str) -> None:
    """Three steps of different sizes: each column holds the batch and then padding, and no tensor has moved."""
    rt = pool.runtime
    with checks(level):
        buffers = StaticBuffers(rt, Decode, rows=ROWS)
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
        batch = of_letters(pool, "abcd")
        for step in (
            batch,
            batch.filter([2, 0]).advance(["seq_lens", "kv_lens"], 3),
            batch.merge(of_letters(pool, "ef")),
        ):
            step.to_static(buffers)
            assert buffers.num_reqs == len(step)
            padded = step.pad(ROWS)
            assert held(buffers) == {name: rt.inspect(padded[name].device).tolist() for name in buffers}
            assert {name: tensor.data_ptr() for name, tensor in buffers.items()} == addresses


def test_idle_steps_and_full_ones(pool: SlotPool) -> None:
    """A batch of no requests leaves padding behind; one of exactly as many rows, or padded to them, needs none."""
    buffers = StaticBuffers(pool.runtime, Decode, rows=ROWS)
    full = of_letters(pool, "abcdef")
    full.to_static(buffers)
    assert held(buffers)["seq_lens"] == [10, 11, 12, 13, 14, 15]
    full.filter([1]).pad(ROWS).to_static(buffers)
    assert held(buffers)["seq_lens"] == [11, 1, 1, 1, 1, 1]
    Decode.empty(pool.runtime).to_static(buffers)
    assert held(buffers) == PADDING


class Plain(Batch):
    """Columns that all cross in the copy."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    temperature = mirrored(torch.float32)


def test_one_copy_and_one_scatter_a_step(rt: Runtime) -> None:
    """Columns, extras and a table write are one copy and one scatter, and no device memory is allocated."""
    pool = SlotPool(rt, 8)
    table = pool.table("req_to_token", (16,), torch.int32, holds="location")
    pages = PagePool(rt, pool, 16, 4, max_tokens_per_request=16, req_to_token=table)
    slots = pool.take(3)
    pages.extend(slots, [3, 4, 5])
    batch = Plain.build(rt, slots=slots, seq_lens=[3, 4, 5], temperature=[0.5, 1.0, 2.0])
    buffers = StaticBuffers(rt, Plain, rows=4, extras={"positions": np.zeros(4, dtype=np.int64)})
    batch.to_static(buffers, extras={"positions": np.arange(4)})
    for _ in range(3):
        rt.next_step()
        batch = batch.advance("seq_lens", 1)
        added = pages.advance(batch.slots, 1)
        before = rt.counters.snapshot()
        extras = batch.to_static(buffers, writes=[added.entry()], extras={"positions": np.pad(added.positions, (0, 1))})
        spent = rt.counters - before
        assert (spent.host_to_device_copies, spent.device_operations, spent.device_allocations) == (1, 1, 0)
        assert (spent.forced_syncs, spent.fence_waits, spent.staging_allocations) == (0, 0, 0)
        assert rt.inspect(table.memory)[added.slots, added.positions].tolist() == added.locations.np.tolist()
        assert extras["positions"].data_ptr() == buffers["positions"].data_ptr()
        assert held(buffers)["positions"] == [*added.positions.tolist(), 0]


def test_more_writes_than_there_is_room_for_take_a_second_copy(rt: Runtime) -> None:
    """A prefill's worth of table writes finds its way too."""
    pool = SlotPool(rt, 8)
    table = pool.table("req_to_token", (64,), torch.int32)
    slots = pool.take(2)
    batch = Plain.build(rt, slots=slots, seq_lens=[3, 4], temperature=[0.5, 1.0])
    buffers = StaticBuffers(rt, Plain, rows=2, num_writes=4)
    rows = slots.take(np.repeat([0, 1], 64))
    write = table.entry(rows, np.tile(np.arange(64), 2), np.arange(128))
    before = rt.counters.snapshot()
    batch.to_static(buffers, writes=[write])
    assert (rt.counters - before).host_to_device_copies == 2
    assert rt.inspect(table.memory)[slots.np].reshape(-1).tolist() == list(range(128))
    assert held(buffers)["seq_lens"] == [3, 4]


def test_the_batch_keeps_its_own_device_side(pool: SlotPool) -> None:
    """What was read of a batch before stays, whatever goes to the buffers later."""
    buffers = StaticBuffers(pool.runtime, Decode, rows=ROWS)
    batch = of_letters(pool, "abc")
    own = batch.seq_lens.device
    batch.advance("seq_lens", 5).to_static(buffers)
    assert pool.runtime.inspect(own).tolist() == [10, 11, 12]
    assert own.data_ptr() != buffers["seq_lens"].data_ptr()


@pytest.mark.parametrize(
    ("behind", "declared", "found"),
    [(True, True, set()), (False, True, {"read after write"}), (True, False, {"write after read"})],
)
def test_a_replay_on_another_stream_is_ordered(behind: bool, declared: bool, found: set[str]) -> None:
    """A bound one runs behind the copy that it reads, and before the next; each half that is left out is a race."""
    with RaceRuntime(on_race="collect") as rt:
        batch = Plain.build(rt, slots=SlotPool(rt, 4).take(1), seq_lens=[3], temperature=[0.5])
        buffers = StaticBuffers(rt, Plain, rows=1)
        captured = buffers["seq_lens"]
        replaying = rt.stream("replay")
        launch = functools.partial(rt.launch, torch.neg, captured, reads=(captured,), name="replay")
        replay = buffers.bind(launch)
        for _ in range(2):
            batch = batch.advance("seq_lens", 1)
            batch.to_static(buffers)
            with rt.use(replaying):
                if behind and declared:
                    replay(batch)
                    continue
                if behind:
                    _ = buffers["seq_lens"]
                launch()
                if declared:
                    buffers.read_until(rt.record())
        assert {race.kind.value for race in rt.races} == found


def test_a_forward_takes_its_slots_from_the_buffers(rt: Runtime) -> None:
    """The inputs of a forward at fixed addresses cost no second copy, and its results go to the right slots."""
    pool = SlotPool(rt, 8)
    relay = FutureMap(pool, {"last_token": relay_field(torch.int64, read_by="both")})
    slots = pool.take(3)
    relay.publish(slots, last_token=[7, 8, 9])
    batch = Plain.build(rt, slots=slots, seq_lens=[5, 3, 9], temperature=[0.5] * 3)
    buffers: StaticBuffers | None = None
    for step in range(3):
        rt.next_step()
        batch = batch.advance("seq_lens", 1)
        padded = batch.pad(4)
        plan = ForwardPlan.of(padded.slots, padded.seq_lens, pad_tokens=4)
        buffers = StaticBuffers(rt, Plain, rows=4, extras=plan.extras) if buffers is None else buffers
        before = rt.counters.snapshot()
        sent = padded.to_static(buffers, extras=plan.extras)
        inputs = relay.resolve_forward_inputs(plan, sent, ids="last_token")
        spent = rt.counters - before
        assert (spent.host_to_device_copies, spent.device_operations) == (1, 1)
        assert inputs.slots.data_ptr() == buffers["slots"].data_ptr()
        assert inputs.positions.data_ptr() == buffers["positions"].data_ptr()
        relay.publish(inputs.sampled_slots, last_token=inputs.input_ids + 1)
        assert (rt.counters - before).host_to_device_copies == 1
        arrived = relay.prefetch(inputs.sampled_slots, "last_token")["last_token"]
        assert arrived.np.tolist() == [8 + step, 9 + step, 10 + step]


def test_a_write_into_the_buffers_is_found_by_the_next_step(rt: Runtime) -> None:
    """Whoever writes in place into what a graph reads is reported at `cheap`; the library's own writes are not."""
    pool = SlotPool(rt, 4)
    batch = Decode.empty(rt)
    buffers = StaticBuffers(rt, Decode, rows=2)
    for _ in range(3):
        batch.to_static(buffers)
    one = of_letters(pool, "a")
    one.to_static(buffers)
    buffers["top_k"].add_(1)
    refused(Code.MIRROR_FOREIGN_WRITE, lambda: one.to_static(buffers))
    one.to_static(buffers)
    assert held(buffers)["top_k"] == [0, -1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": 0}, ArgumentError, "rows is 0"),
        ({"rows": 2**62}, ArgumentError, "rows is"),
        ({"num_writes": -1}, ArgumentError, "num_writes is -1"),
        ({"extras": {"seq_lens": [1]}}, ArgumentError, "named as columns"),
        ({"extras": {"text": ["a"]}}, DtypeError, "expected numbers"),
    ],
)
def test_refuses_bad_declarations(rt: Runtime, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """What cannot be laid out is refused when the buffers are made."""
    given = {"batch": Plain, "rows": 2, **arguments}
    with pytest.raises(error, match=message):
        StaticBuffers(rt, given.pop("batch"), **given)


def test_refuses_what_does_not_fit(rt: Runtime) -> None:
    """Too many rows, another class, another runtime, other extras: refused, and the buffers keep what they had."""
    pool = SlotPool(rt, 8)
    buffers: Any = StaticBuffers(rt, Plain, rows=2, extras={"positions": np.zeros(2, dtype=np.int64)})
    good: Any = Plain.build(rt, slots=pool.take(1), seq_lens=[3], temperature=[0.5])
    good.to_static(buffers, extras={"positions": np.array([7, 8])})
    before = held(buffers)
    three = Plain.build(rt, slots=pool.take(3), seq_lens=[3, 4, 5], temperature=[0.5] * 3)
    extras = {"positions": np.arange(2)}
    other = open_device("cpu")
    elsewhere = Plain.build(other, slots=SlotPool(other, 2).take(1), seq_lens=[3], temperature=[0.5])
    wrong: Any
    for wrong, error in (
        (lambda: three.to_static(buffers, extras=extras), ArgumentError),
        (lambda: good.pad(2).pad(2), ArgumentError),
        (lambda: Decode.empty(rt).to_static(buffers, extras=extras), DeclarationError),
        (lambda: elsewhere.to_static(buffers, extras=extras), DeviceError),
        (lambda: good.to_static(buffers), ArgumentError),
        (lambda: good.to_static(buffers, extras={**extras, "more": [1]}), ArgumentError),
        (lambda: good.to_static(buffers, extras={"positions": np.arange(3)}), ShapeError),
        (lambda: good.to_static(buffers, extras={"positions": np.arange(2, dtype=np.int32)}), DtypeError),
        (lambda: _raised(in_a_thread(lambda: buffers["seq_lens"])), OwnerThreadError),
        (lambda: buffers.read_until(None), ArgumentError),
    ):
        with pytest.raises(error):
            wrong()
    assert held(buffers) == before
    assert buffers.num_reqs == 1


def test_not_while_a_graph_is_captured(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under capture the buffers can be read and not filled: staging memory would be baked into the graph."""
    pool = SlotPool(rt, 4)
    batch = Plain.build(rt, slots=pool.take(1), seq_lens=[3], temperature=[0.5])
    buffers = StaticBuffers(rt, Plain, rows=2)
    batch.to_static(buffers)
    monkeypatch.setattr(type(rt), "capturing", True)
    assert buffers["seq_lens"].shape == (2,)
    with pytest.raises(CaptureError):
        batch.to_static(buffers)
    monkeypatch.undo()
    assert held(buffers)["seq_lens"] == [3, 0]


def test_a_source_written_from_outside_is_found_before_anything_is_copied(pool: SlotPool) -> None:
    """A device-only column whose tensor somebody wrote is reported, and the buffers keep what they had."""
    rt = pool.runtime
    buffers = StaticBuffers(rt, Decode, rows=ROWS)
    batch = of_letters(pool, "ab")
    batch.last_token.device.add_(1)
    refused(Code.MIRROR_FOREIGN_WRITE, lambda: batch.to_static(buffers))
    assert held(buffers) == PADDING


@pytest.mark.usefixtures("full")
def test_at_full_every_row_is_compared(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that leaves padded rows of an earlier step behind is found by TAIL_STALE."""
    rt = pool.runtime
    buffers = StaticBuffers(rt, Plain, rows=3)
    three = Plain.build(rt, slots=pool.take(3), seq_lens=[3, 4, 5], temperature=[0.5] * 3)
    three.to_static(buffers)
    monkeypatch.setattr(Plain, "pad", lambda self, rows: three)
    refused(Code.TAIL_STALE, lambda: three.filter([0]).to_static(buffers))


def test_on_device_gives_every_column_at_once(pool: SlotPool) -> None:
    """The tensors are those that single reads give; a host column has none; an unknown name is refused."""
    rt = pool.runtime
    batch = of_letters(pool, "abc")
    sides = batch.on_device()
    assert list(sides) == [name for name in Decode.columns() if name != "requests"]
    for name, side in sides.items():
        assert side.data_ptr() == batch[name].device.data_ptr()
        assert rt.inspect(side).tolist() == rt.inspect(batch[name].device).tolist()
    assert list(batch.on_device("top_k", "slots")) == ["top_k", "slots"]
    for wrong in ("requests", "nothing"):
        with pytest.raises(DeclarationError):
            batch.on_device(wrong)
    with batch.seq_lens.stale("device", reason="a test"):
        refused(Code.MIRROR_STALE_READ, batch.on_device)


def test_writes_into_what_on_device_gave_are_found(pool: SlotPool) -> None:
    """At `cheap` the next operation names the column that somebody wrote into, and no other."""
    batch = of_letters(pool, "abc").advance("seq_lens", 1)
    batch.on_device()
    batch.filter([0])
    batch.on_device()["top_k"].add_(1)
    with pytest.raises(Violation) as caught:
        batch.filter([0])
    assert (caught.value.code, caught.value.column) == (Code.MIRROR_FOREIGN_WRITE, "top_k")


@pytest.mark.parametrize("device", ["race", "race:prompt"])
def test_what_rode_along_is_not_overwritten_before_its_scatter(device: str) -> None:
    """Table writes are read by their scatters from the buffers: the next step, on another stream, goes behind them."""
    with window_of(open_device(device)) as rt:
        pool = SlotPool(rt, 8)
        tables = [pool.table(name, (4,), torch.int64) for name in ("first", "second")]
        slots = pool.take(3)
        batch = Plain.build(rt, slots=slots, seq_lens=[1, 2, 3], temperature=[0.5] * 3)
        buffers = StaticBuffers(rt, Plain, rows=8)
        streams = [rt.stream("a"), rt.stream("b")]
        for step in range(6):
            table, values = tables[step % 2], np.arange(3) + step
            with rt.use(streams[step // 2 % 2]):
                batch.to_static(buffers, writes=[table.entry(slots, [step % 4] * 3, values)])
        rt.synchronize()
        assert rt.inspect(tables[0].memory)[slots.np, 0].tolist() == [4, 5, 6]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.int32, torch.float64])
def test_any_number_of_rows_has_aligned_places(rt: Runtime, rows: int, dtype: torch.dtype) -> None:
    """Narrow columns that only the device knows lie behind wide ones, each at a multiple of 16 bytes."""
    declared = {"lens": mirrored(torch.int64), "narrow": device_only(dtype), "other": device_only(torch.int64)}
    kind: Any = type("Kind", (Batch,), declared)
    buffers = StaticBuffers(rt, kind, rows=rows)
    values = torch.ones(rows, dtype=dtype, device=rt.device)
    kind.build(rt, lens=np.arange(rows), narrow=values, other=values.to(torch.int64)).to_static(buffers)
    assert rt.inspect(buffers["narrow"]).tolist() == rt.inspect(values).tolist()
    assert {tensor.data_ptr() % 16 for tensor in buffers.values()} == {buffers["lens"].data_ptr() % 16}


def test_sources_of_device_columns_do_not_pile_up(pool: SlotPool) -> None:
    """An engine that only ever sends to fixed addresses keeps no tensors of requests that have long gone."""
    rt = pool.runtime
    buffers = StaticBuffers(rt, Decode, rows=ROWS)
    batch = of_letters(pool, "ab")
    for step in range(12):
        joining = of_letters(pool, "abcdef"[step % 6])
        leaving = batch.filter([0])
        batch = batch.next_batch(
            keep=np.arange(len(batch)) > 0, joining=joining, advance=["seq_lens", "kv_lens", "last_token"]
        )
        pool.free(leaving.slots, after=None)
        batch.to_static(buffers)
        padded = batch.pad(ROWS)
        assert held(buffers) == {name: rt.inspect(padded[name].device).tolist() for name in buffers}
        assert max(len(rows.sources) for rows in batch.device_side.state.device.values()) <= 2


def test_a_failed_scatter_leaves_the_buffers_with_the_new_batch(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy cannot be taken back: what is in the buffers is what they say, and their order is kept."""
    pool = SlotPool(rt, 8)
    table = pool.table("table", (4,), torch.int64)
    slots = pool.take(3)
    three = Plain.build(rt, slots=slots, seq_lens=[1, 2, 3], temperature=[0.5] * 3)
    buffers = StaticBuffers(rt, Plain, rows=4)
    three.to_static(buffers)

    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(table, "launch_checked", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        three.filter([1]).to_static(buffers, writes=[table.entry(slots, [0] * 3, [1, 2, 3])])
    assert (buffers.num_reqs, held(buffers)["seq_lens"]) == (1, [2, 0, 0, 0])
    three.to_static(buffers)


def test_gathered_rows_are_read_while_a_graph_is_captured(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched for it; and asking a thousand times leaves nothing behind."""
    batch = of_letters(pool, "abc").filter([2, 0])
    before = batch.on_device()
    for _ in range(1_000):
        batch.on_device()
    assert len(batch.device_side._gathered_views) < 10
    monkeypatch.setattr(type(pool.runtime), "capturing", True)
    assert batch.on_device("last_token")["last_token"].data_ptr() == before["last_token"].data_ptr()
    with pytest.raises(CaptureError):
        of_letters(pool, "d").filter([0]).on_device("last_token")


def test_a_host_side_that_is_knowingly_old_is_not_sent(pool: SlotPool) -> None:
    """Inside its window neither way to the device takes it for the truth; a bound, which is not sent, may be old."""
    buffers = StaticBuffers(pool.runtime, Decode, rows=ROWS)
    batch = of_letters(pool, "ab")
    sends: list[Callable[[], object]] = [batch.upload, lambda: batch.to_static(buffers)]
    for send in sends:
        with batch.seq_lens.stale("host", reason="a test"), pytest.raises(Violation) as caught:
            send()
        assert (caught.value.code, caught.value.column) == (Code.MIRROR_STALE_READ, "seq_lens")
        with batch.kv_lens.stale("host", reason="a test"), batch.seq_lens.stale("device", reason="a test"):
            send()
    batch.upload()
