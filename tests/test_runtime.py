"""The runtime: copies that are staged, counted and never waited for."""

import contextlib

import numpy as np
import pytest
import torch

from batchstate import Code, Runtime, checks
from batchstate.errors import OwnerThreadError
from batchstate.runtime import CpuRuntime, DoneFence
from batchstate.runtime.memory import StagingBlock
from tests.doubles import Gate, in_a_thread, refused


class GatedRuntime(CpuRuntime):
    """A CPU whose fences stay closed until the test opens them: copies that are forever in flight."""

    def __init__(self, steps_in_flight: int = 2) -> None:
        self.gates: list[Gate] = []
        super().__init__(steps_in_flight=steps_in_flight)

    def _fence_behind(self, stream: object) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]


def test_upload_packs_many_arrays_into_one_copy(rt: Runtime) -> None:
    """Arrays of any dtype and shape arrive whole, in one copy, in memory of their own."""
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([True, False, True]),
        np.zeros((0, 3), dtype=np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([2**63], dtype=np.uint64),
        np.arange(20, dtype=np.int32)[::3],
    ]
    packed = rt.upload(arrays)
    for i, array in enumerate(arrays):
        assert rt.inspect(packed.view(i)).tolist() == array.tolist()
        assert packed.view(i).device == rt.device
    assert rt.counters.host_to_device_copies == 1
    arrays[0][:] = 9
    assert rt.inspect(packed.view(0)).tolist() == [0, 1, 2, 3, 4]


def test_upload_of_nothing(rt: Runtime) -> None:
    """No arrays, or only empty ones, are uploaded without complaint."""
    rt.upload([])
    assert rt.upload([np.zeros(0, dtype=np.int32)]).view(0).shape == (0,)


def test_running_deeper_than_declared_is_reported() -> None:
    """An engine that begins a step although the declared depth is in flight is told so, with the step."""
    rt = GatedRuntime(steps_in_flight=2)
    for _ in range(2):
        rt.next_step()
        rt.upload([np.arange(3)])
    violation = refused(Code.STAGING_OVERRUN, rt.next_step)
    assert "step 1, Gate(done=False, asked=2), has not run when step 3 begins" in str(violation)
    assert rt.step == 2
    rt.gates[0].done = True
    assert rt.next_step() == 3
    with checks("off"):
        rt.next_step()


def test_a_failed_upload_keeps_its_staging(rt: Runtime) -> None:
    """An upload that fails gives its block back and counts nothing."""
    rt.upload([np.arange(3)])
    before = rt.counters.snapshot()
    for _ in range(5):
        with pytest.raises(TypeError):
            rt.upload([np.array([object()])])
    assert (rt.counters - before).host_to_device_copies == 0
    assert (rt.counters - before).staging_allocations == 0


def test_counters_tell_waiting_apart(rt: Runtime) -> None:
    """A read-back is a forced sync; a check's read-back is a check read and nothing else."""
    tensor = rt.upload([np.arange(3)]).view(0)
    before = rt.counters.snapshot()
    rt.inspect(tensor)
    assert (rt.counters - before).check_reads == 1
    assert (rt.counters - before).forced_syncs == 0
    copy = rt.read_back(tensor)
    rt.synchronize()
    spent = rt.counters - before
    assert (spent.forced_syncs, spent.device_to_host_copies) == (2, 1)
    copy[0] = 9
    assert rt.inspect(tensor).tolist() == [0, 1, 2]


def test_a_runtime_belongs_to_its_thread(rt: Runtime) -> None:
    """A second thread is refused whatever changes the runtime, by name, and nothing is counted."""
    stream, before = rt.stream("other"), rt.counters.snapshot()
    tensor = torch.zeros(3)

    def use() -> None:
        with rt.use(stream):
            raise AssertionError("a second thread has changed the current stream")

    for act in (
        use,
        rt.next_step,
        rt.synchronize,
        lambda: rt.upload([np.arange(3)]),
        lambda: rt.download([tensor]),
        lambda: rt.read_back(tensor),
        lambda: rt.launch(lambda: None),
        lambda: rt.device_zeros((2,), torch.int32),
        lambda: rt.mapped_zeros((1,), torch.int8),
    ):
        error = in_a_thread(act)
        assert isinstance(error, OwnerThreadError)
        assert str(error.value) in str(error)
    assert rt.counters == before


def test_streams_and_fences(rt: Runtime) -> None:
    """Streams have an identity, `use` is a window, and fences answer."""
    forward = rt.stream("forward")
    default = rt.current_stream
    assert forward != default
    with rt.use(forward):
        assert rt.current_stream == forward
        assert hash(rt.current_stream) == hash(forward)
        tensor = rt.upload([np.arange(3)])
        fence = rt.record()
    assert rt.current_stream == default
    rt.wait(fence)
    assert rt.counters.stream_waits == 1
    rt.use_on_current_stream(tensor.view(0), forward, tensor.ready)
    assert (rt.counters.stream_waits, rt.counters.cross_stream_uses) == (2, 1)
    fence.wait()
    assert fence.query()
    assert DoneFence().query()


def test_a_window_of_a_cpu_is_entered_again() -> None:
    """Inside of itself and behind an error: the stream of before is the current one each time."""
    rt = CpuRuntime()
    default, forward = rt.current_stream, rt.stream("forward")
    window = rt.use(forward)
    for _ in range(2):
        with window:
            with contextlib.suppress(KeyError), window:
                raise KeyError("theirs")
            assert rt.current_stream == forward
        assert rt.current_stream == default


def test_device_memory_is_not_host_memory(rt: Runtime) -> None:
    """Tables start zero, on the device, and may be written inside and outside of inference mode."""
    with torch.inference_mode():
        table = rt.device_zeros((3, 2), torch.int32)
        table[1] = 5
    table[2] = 6
    assert rt.inspect(table).tolist() == [[0, 0], [5, 5], [6, 6]]


def test_staging_is_written_in_and_out_of_inference_mode() -> None:
    """The front of a block is asked for in either mode, and copied into in either: a device copies results there."""
    memory = torch.empty(64, dtype=torch.uint8)
    block = StagingBlock(memory, memory.numpy())
    for first in (True, False):
        for second in (True, False):
            with torch.inference_mode(first):
                block.front(8 * (1 + first), torch.int64)
            with torch.inference_mode(second):
                block.front(8 * (1 + first), torch.int64).copy_(torch.full((1 + first,), 7))
            assert memory.numpy()[0] == 7
