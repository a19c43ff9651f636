"""The accelerator runtime against a stand-in for torch's device module, where no accelerator is needed."""

import contextlib
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batchstate import Batch, MirroredTensor, SlotPool, checks, device_only, mirrored
from batchstate.errors import ArgumentError, CaptureError
from batchstate.runtime import AcceleratorRuntime, DoneFence, Fence
from batchstate.runtime.devices import MOST_EVENTS, EventFence, _stream_ids
from benchmarks.steady_steps import Steady
from tests.doubles import FakeEvent, FakeModule, fake_accelerator


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> tuple[AcceleratorRuntime, FakeModule]:
    """The runtime and the stand-in."""
    return fake_accelerator(monkeypatch)


@pytest.fixture
def module(accelerator: tuple[AcceleratorRuntime, FakeModule]) -> FakeModule:
    """The stand-in, where torch would give the device's module."""
    return accelerator[1]


@pytest.fixture
def runtime(accelerator: tuple[AcceleratorRuntime, FakeModule]) -> AcceleratorRuntime:
    """An accelerator runtime whose memory is CPU memory."""
    return accelerator[0]


def test_an_index_is_chosen(module: FakeModule) -> None:
    """A device without an index is the current one."""
    assert AcceleratorRuntime(torch.device("cuda")).device == torch.device("cuda:0")
    module.available = False
    with pytest.raises(ArgumentError, match="not available"):
        AcceleratorRuntime(torch.device("cuda"))


def test_values_cross_streams_in_order_and_alive(runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value made on one stream and read on another is waited for on the device, and kept alive for it."""
    kept: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.stream_id))
    value = MirroredTensor.from_host(runtime, [1, 2, 3])
    assert value.device.tolist() == [1, 2, 3]
    assert not kept
    forward = runtime.stream("forward")
    with runtime.use(forward):
        for _ in range(3):
            assert value.device.tolist() == [1, 2, 3]
    assert kept == [forward.native.stream_id]
    assert len(forward.native.waited) == 1
    assert runtime.counters.cross_stream_uses == 1


@pytest.mark.parametrize("on", [0, 1])
def test_a_window_of_a_stream_leaves_stream_and_device_as_they_were(
    runtime: AcceleratorRuntime, module: FakeModule, on: int
) -> None:
    """Also where an error ends it, and where another device is the current one."""
    first, second, module.on = runtime.current_stream, runtime.stream("second"), on
    with contextlib.suppress(ZeroDivisionError), runtime.use(second):
        assert (runtime.current_stream, module.on) == (second, 0)
        with runtime.use(runtime.stream("third")):
            assert runtime.current_stream.name == "third"
        assert runtime.current_stream is second
        _ = 1 / 0
    assert (runtime.current_stream, module.on) == (first, on)


def test_columns_cross_streams_together(runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a batch lie in one buffer: a stream that reads them all waits once and keeps it once."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    class Columns(Batch):
        a = mirrored(torch.int64)
        b = mirrored(torch.float32)

    batch = Columns.build(runtime, a=[1, 2], b=[0.5, 1.5])
    extras = batch.upload(extras={"positions": [3, 4]})
    with runtime.use(runtime.stream("forward")):
        assert extras["positions"].tolist() == extras["positions"].tolist() == [3, 4]
        assert batch.a.device.tolist() == [1, 2]
        assert batch.b.device.tolist() == [0.5, 1.5]
    assert runtime.counters.cross_stream_uses == 1


def test_only_calls_named_for_waiting_wait(runtime: AcceleratorRuntime, module: FakeModule) -> None:
    """`synchronize` lifts torch's sync-debug mode for its own length, and puts it back."""
    module.sync_debug_mode = 2
    runtime.synchronize()
    assert module.modes == [0]
    assert module.sync_debug_mode == 2
    assert runtime.read_back(torch.arange(3)).tolist() == [0, 1, 2]
    assert module.sync_debug_mode == 2
    assert runtime.counters.forced_syncs == 2


def test_fences_are_events(runtime: AcceleratorRuntime) -> None:
    """A fence asks its event, and waiting for one is counted."""
    fence = runtime.record()
    fence.event.happened = False  # type: ignore[attr-defined]
    assert not fence.query()
    fence.wait()
    assert fence.query()
    assert runtime.counters.fence_waits == 1
    runtime.wait(DoneFence())

    class Foreign:
        def query(self) -> bool:
            return False

        def wait(self) -> None: ...

    with pytest.raises(ArgumentError, match="not recorded by this runtime"):
        runtime.wait(Foreign())


def test_the_event_of_a_fence_that_is_gone_is_recorded_anew(runtime: AcceleratorRuntime) -> None:
    """Unless it has another holder: then it stays as it was recorded."""
    fence = runtime.record()
    assert isinstance(fence, EventFence)
    number = id(fence.event)
    del fence
    fence = runtime.record()
    assert isinstance(fence, EventFence)
    assert id(fence.event) == number
    held = fence.event
    del fence
    again = runtime.record()
    assert isinstance(again, EventFence)
    assert again.event is not held


def test_a_fence_is_shown_without_being_asked(runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repr has stream and number. It may be printed under capture, where asking an event ends the capture."""
    side, asked = runtime.stream("side"), list[object]()
    monkeypatch.setattr(FakeEvent, "query", asked.append)
    shown = [repr(runtime.record(stream)) for stream in (side, runtime.current_stream, side)]  # events are used anew
    names = "side", runtime.current_stream.name, "side"
    assert shown == [f"<fence {number} on {name!r}>" for number, name in enumerate(names, 1)]
    assert not asked


def test_some_steps_in_inference_mode(runtime: AcceleratorRuntime) -> None:
    """What a step in inference mode leaves in staging memory is written by others too."""
    steady = Steady(runtime, 4, 0)
    for step in range(6):
        with torch.inference_mode(step % 3 == 0):
            steady.step()


def test_a_fence_that_a_finalizer_keeps_has_its_event_alone(runtime: AcceleratorRuntime) -> None:
    """A request in a cycle frees its slot when it is found as garbage: the fence, found with it, is still asked."""
    kept: list[Fence] = []

    class Request:
        def __init__(self) -> None:
            self.itself, self.fence = self, runtime.record()

        def __del__(self) -> None:
            kept.append(self.fence)

    Request()
    gc.collect()
    fences = [runtime.record() for _ in range(3)]
    events = [fence.event for fence in (*kept, *fences)]  # type: ignore[attr-defined]
    assert len(kept) == 1
    assert len({id(event) for event in events}) == 4


def test_the_events_that_are_recorded_anew_are_bounded(runtime: AcceleratorRuntime) -> None:
    """However many fences are held, and for however long, no event is recorded anew while one of them is."""
    held = [runtime.record() for _ in range(2 * MOST_EVENTS)]
    for _ in range(3 * MOST_EVENTS):
        held.append(runtime.record())
        runtime.record()
        assert len(runtime._events) <= MOST_EVENTS
    assert len({id(fence.event) for fence in held}) == len(held)  # type: ignore[attr-defined]


def test_nothing_happens_under_capture(
    runtime: AcceleratorRuntime, module: FakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    """While a graph is captured the library neither allocates nor uploads nor asks events, and says why."""
    value = MirroredTensor.from_host(runtime, [1, 2, 3])
    assert len(value.device) == 3
    fresh = MirroredTensor.from_host(runtime, [1, 2, 3])

    class Sampled(Batch):
        last_token = device_only(torch.int64)

    moved = Sampled.build(runtime, last_token=[1, 2, 3]).filter([2, 0])
    moved.upload()
    download = runtime.download([value.device])
    module.capturing = True
    before = runtime.counters.snapshot()
    with checks("full"):
        assert value.device.shape == (3,)
        value.check()
        value.check()
        runtime.next_step()
        for forbidden in (
            lambda: fresh.device,
            lambda: runtime.upload([np.arange(3)]),
            lambda: runtime.download([value.device]),
            lambda: runtime.mapped_zeros((2,), torch.int64),
            download.resolve,
            lambda: runtime.synchronize(),
            lambda: runtime.record(),
            lambda: runtime.inspect(value.device),
            lambda: runtime.read_back(value.device),
            lambda: runtime.device_zeros((2,), torch.int64),
            lambda: value + 1,
            lambda: value.merge(value),
            lambda: moved.last_token.device,
        ):
            with pytest.raises(CaptureError, match="captured"):
                forbidden()
    assert runtime.counters == before
    assert [record.message.endswith("while a graph is captured") for record in caplog.records] == [True]
    module.capturing = False
    assert download.resolve()[0].tolist() == [1, 2, 3]
    assert moved.last_token.device.tolist() == [3, 1]


def test_a_table_is_read_after_it_was_written(runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward on another stream that takes a table's memory waits for the scatter, and the memory is kept for it."""
    kept: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.stream_id))
    pool = SlotPool(runtime, 4)
    table = pool.table("lens", (), torch.int64)
    slots = pool.take(2)
    table.write(slots, None, np.array([5, 6]))
    forward = runtime.stream("forward")
    with runtime.use(forward):
        assert sorted(table.device_for(slots).tolist()) == [0, 0, 0, 5, 6]
    assert len(forward.native.waited) == 1
    assert kept == [forward.native.stream_id]


def test_columns_start_where_the_widest_load_may_start(runtime: AcceleratorRuntime) -> None:
    """Whatever the number of requests, the device side of every column is aligned to 16 bytes in the packed copy."""

    class Columns(Batch):
        a = mirrored(torch.int64)
        b = mirrored(torch.int64)
        c = mirrored(torch.int32)
        d = mirrored(torch.bool)
        e = mirrored(torch.bool)

    for num_reqs in range(1, 20):
        batch = Columns.build(
            runtime, **{name: [1] * num_reqs for name in "abc"}, d=[True] * num_reqs, e=[False] * num_reqs
        )
        for name in Columns.columns():
            column = batch[name].device
            assert column.tolist() == batch[name].np.tolist()
            assert column.storage_offset() * column.element_size() % 16 == 0


def test_a_reader_of_a_table_waits_for_its_last_write_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream waits once for the fence behind the last write, whatever the writer's stream did since."""
    rt, _ = fake_accelerator(monkeypatch)
    monkeypatch.setattr(rt, "_keep_alive", lambda tensor, stream: None)  # a stand-in has no memory to keep
    pool = SlotPool(rt, 4)
    table, slots = pool.table("tokens", (2,), torch.int64), pool.take(1)
    reader = rt.stream("reader")
    for value in (5, 6):
        table.write(slots, [0], [value])
        behind_the_write = table._fixed._written
        rt.record()
        before = len(reader.native.waited)
        with rt.use(reader):
            assert table.device_for(slots) is table.device_for(slots)
        assert isinstance(behind_the_write, EventFence)
        assert reader.native.waited[before:] == [behind_the_write.event]


def test_who_reads_a_column_as_it_is_does_not_become_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that another stream has read is still its maker's, which waits for no reader."""

    class Bare(Batch):
        lens = device_only(torch.int64)

    rt, _ = fake_accelerator(monkeypatch)
    monkeypatch.setattr(rt, "_keep_alive", lambda tensor, stream: None)  # a stand-in has no memory to keep
    maker, reader = rt.stream("maker"), rt.stream("reader")
    with rt.use(maker):
        batch = Bare.build(rt, lens=torch.arange(3))
    with rt.use(reader):
        assert batch.lens.device.tolist() == [0, 1, 2]
    assert len(reader.native.waited) == 1
    with rt.use(maker):
        assert batch.filter([0, 1, 2]).lens.device.tolist() == [0, 1, 2]
    assert maker.native.waited == []


@pytest.mark.parametrize(
    ("answer", "direct"),
    [
        (lambda index: (7, 0, 1), True),
        (lambda index: (8, 0, 1), False),  # another stream: not what it seems
        (lambda index: 7, False),
        (lambda: (7, 0, 1), False),
    ],
)
def test_the_current_stream_is_asked_for_directly_where_torch_says_the_same(
    monkeypatch: pytest.MonkeyPatch, answer: object, direct: bool
) -> None:
    """The short way is taken only if it agrees with the public one, and the public one is asked otherwise."""
    asked: list[str] = []

    def current_stream(device: torch.device) -> SimpleNamespace:
        asked.append(str(device))
        return SimpleNamespace(device_index=0, stream_id=7)

    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", answer, raising=False)
    ids = _stream_ids(SimpleNamespace(current_stream=current_stream), torch.device("cuda", 0))
    asked.clear()
    assert ids() == (0, 7)
    assert asked == ([] if direct else ["cuda:0"])
