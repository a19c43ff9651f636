"""The memory that crosses between host and device: staging, downloads, and host memory that kernels address."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from batchstate.errors import DeviceError, DtypeError
from batchstate.runtime import Runtime
from batchstate.runtime.base import Download
from batchstate.runtime.memory import Staging, bytes_of, device_view
from batchstate.testing import LateRuntime
from batchstate.violations import Code
from tests.doubles import Gate, fake_accelerator, refused

ARRAYS: list[np.ndarray] = [
    np.array([1, 2, 3], np.uint8),
    np.array([-(2**62), 5]),
    np.array([True]),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array(2.5),
    np.zeros((0, 3), np.int32),
    np.array([2**64 - 1], np.uint64),
    np.array([7, 8, 9], np.uint16),
    np.array([[1.5], [2.5]], np.float16),
]


def test_a_block_in_flight_is_never_refilled() -> None:
    """While a copy has not run, no later upload gets its staging memory, however many there are."""
    staging = Staging(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), depth=2)
    gates = [Gate() for _ in range(10)]
    blocks = []
    for step, gate in enumerate(gates):
        block = staging.take(100)
        staging.release(block, gate, step)
        blocks.append(block)
    assert len({id(block) for block in blocks}) == 10
    gates[0].done = True
    assert staging.take(100) is blocks[0]
    gates[2].done = True  # behind one that has not run: it waits its turn
    assert staging.take(100) not in blocks
    assert staging.reap()[0] == 1  # type: ignore[index]


def test_a_busy_stream_keeps_no_block_of_another() -> None:
    """Blocks whose copies have run come back, whatever other streams are still to copy."""
    staging = Staging(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), depth=1)
    busy, idle = Gate(), Gate()
    first = staging.take(100)
    staging.release(first, busy, 0, "forward")
    second = staging.take(100)
    staging.release(second, idle, 1, "schedule")
    idle.done = True
    assert staging.take(100) is second
    assert staging.reap()[0] == 0  # type: ignore[index]


def test_large_uploads_get_larger_blocks() -> None:
    """A block is at least as large as what it is asked for."""
    staging = Staging(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), depth=1)
    for nbytes in (0, 1, 1 << 14, (1 << 14) + 1, 1_000_000):
        assert len(staging.take(nbytes).bytes) >= nbytes


@pytest.mark.parametrize("taken", [True, False])
def test_steady_state_allocates_no_staging(rt: Runtime, taken: bool) -> None:
    """One upload and one download per step reuse the blocks made in advance, whether a download is read or dropped."""
    tensor = torch.zeros(3, dtype=torch.int64, device=rt.device)
    last: Download | None = None
    for _ in range(50):
        rt.next_step()
        rt.upload([np.arange(100)])
        download = rt.download([tensor])
        if last is not None and taken:
            last.resolve()
        last = download
        rt.record().wait()
    assert rt.counters.staging_allocations == 2 * (rt.steps_in_flight + 1)


def on_device(rt: Runtime, *arrays: Any) -> list[torch.Tensor]:
    """Device tensors."""
    packed = rt.upload([np.array(array) for array in arrays])
    return [packed.view(i) for i in range(len(arrays))]


def test_values_arrive_in_order(rt: Runtime) -> None:
    """Tensors of any dtype and shape, wherever they come to lie, arrive whole, by one launch and one copy."""
    tensors = on_device(rt, *ARRAYS)
    before = rt.counters.snapshot()
    download = rt.download(tensors, name="everything")
    spent = rt.counters - before
    assert (spent.device_operations, spent.device_to_host_copies) == (1, 1)
    assert (spent.forced_syncs, spent.host_to_device_copies, spent.check_reads) == (0, 0, 0)
    assert repr(download) == "Download('everything', 9 arrays)"
    arrived = download.resolve()
    for array, expected in zip(arrived, ARRAYS, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(array, expected)
        assert array.flags.aligned
    assert download.resolve() is arrived
    assert rt.counters.forced_syncs == 0


def test_one_tensor_needs_no_packing(rt: Runtime) -> None:
    """A single tensor is copied as it is; one that is not contiguous arrives in its own order."""
    plain, matrix = on_device(rt, [1, 2, 3], np.arange(6).reshape(2, 3))
    before = rt.counters.snapshot()
    assert rt.download([plain]).resolve()[0].tolist() == [1, 2, 3]
    assert (rt.counters - before).device_operations == 0
    assert rt.download([matrix.t()]).resolve()[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rt.download([matrix[:, 1], plain[::2]]).resolve()[1].tolist() == [1, 3]


def test_nothing_arrives_too(rt: Runtime) -> None:
    """No tensors give no arrays, and tensors of nothing give arrays of nothing, of their dtype and shape."""
    assert rt.download([]).resolve() == []
    empty, more = on_device(rt, np.zeros((0, 3), np.int32), np.zeros(0, np.bool_))
    before = rt.counters.snapshot()
    arrays = rt.download([empty, more]).resolve()
    assert (rt.counters - before).device_operations == 0
    assert [(array.dtype.name, array.shape) for array in arrays] == [("int32", (0, 3)), ("bool", (0,))]


def test_what_was_asked_for_is_what_arrives(rt: Runtime) -> None:
    """What happens to a tensor after it was asked for does not show, and arrays share memory with nothing."""
    (tensor,) = on_device(rt, [1, 2, 3])
    first = rt.download([tensor])
    tensor.zero_()
    second = rt.download([tensor])
    array = first.resolve()[0]
    array[0] = 99
    assert array.tolist() == [99, 2, 3]
    assert second.resolve()[0].tolist() == [0, 0, 0]
    assert rt.download([tensor]).resolve()[0].tolist() == [0, 0, 0]
    assert array.tolist() == [99, 2, 3]


def test_a_dtype_that_numpy_lacks_is_refused(rt: Runtime) -> None:
    """Nothing is launched for what the host could not read."""
    (tensor,) = on_device(rt, [1.0, 2.0])
    narrow = tensor.to(torch.bfloat16)
    before = rt.counters.snapshot()
    with pytest.raises(DtypeError, match="bfloat16"):
        rt.download([tensor, narrow])
    assert rt.counters == before


def test_reading_waits_for_its_own_copy() -> None:
    """`ready` says whether reading would wait; reading waits once, for this copy and for nothing behind it."""
    rt = LateRuntime()
    (tensor,) = on_device(rt, [1, 2, 3])
    download, other = rt.download([tensor]), rt.download([tensor])
    assert not download.ready()
    assert rt.counters.fence_waits == 0
    assert download.resolve()[0].tolist() == [1, 2, 3]
    assert download.ready()
    assert not other.ready()
    download.resolve()
    assert (rt.counters.fence_waits, rt.counters.forced_syncs) == (1, 0)
    rt.complete(rt.pending())
    assert other.ready()
    other.resolve()
    assert rt.counters.fence_waits == 1


def test_memory_is_lent_until_values_are_taken_out() -> None:
    """However many copies are out, run or not, none lands where another's values still lie."""
    rt = LateRuntime()
    downloads = [rt.download(on_device(rt, [number] * 3)) for number in range(12)]
    rt.complete(rt.pending())
    downloads += [rt.download(on_device(rt, [number] * 3)) for number in range(12, 20)]
    assert len({id(download._block) for download in downloads}) == 20
    for number in reversed(range(20)):
        assert downloads[number].resolve()[0].tolist() == [number] * 3
    before = rt.counters.staging_allocations
    again = [rt.download(on_device(rt, [number])) for number in range(20)]
    assert len({id(download._block) for download in again}) == 20
    assert {id(download._block) for download in again} == {id(download._block) for download in downloads}
    rt.complete(rt.pending())
    assert rt.counters.staging_allocations - before <= 20  # of uploads, none of which has run


def test_a_dropped_download_gives_its_memory_back() -> None:
    """Dropped, it goes at once; its memory comes back when its copy has run, and not before."""
    rt = LateRuntime()
    (tensor,) = on_device(rt, [1, 2, 3])
    download = rt.download([tensor])
    block, gone = download._block, weakref.ref(download)
    del download
    assert gone() is None
    kept = [rt.download([tensor]) for _ in range(5)]
    assert block not in [one._block for one in kept]
    rt.complete(rt.pending())
    kept += [rt.download([tensor]) for _ in range(5)]
    assert [one._block for one in kept].count(block) == 1
    assert all(one.resolve()[0].tolist() == [1, 2, 3] for one in kept)


def test_memory_of_a_dropped_cycle_comes_back(rt: Runtime) -> None:
    """Where a cycle keeps a download, its memory comes back when Python collects the cycle."""
    (tensor,) = on_device(rt, [1, 2, 3])
    before = rt.counters.snapshot()
    for _ in range(2 * (rt.steps_in_flight + 1)):
        cycle: list[Any] = [rt.download([tensor])]
        cycle.append(cycle)
        del cycle
        gc.collect()
        rt.synchronize()
    assert (rt.counters - before).staging_allocations == rt.steps_in_flight + 1


def test_large_downloads(rt: Runtime) -> None:
    """A download has memory of its own size."""
    large = np.arange(100_000)
    small, tensor = on_device(rt, [1], large)
    arrays = rt.download([small, tensor, small]).resolve()
    assert np.array_equal(arrays[1], large)
    assert arrays[2].tolist() == [1]


def test_memory_that_was_given_away_is_reported(rt: Runtime) -> None:
    """Values whose memory another copy has got are not returned; that one keeps its memory, and its values."""
    one, two = on_device(rt, [1, 2, 3], [4, 5, 6])
    early = rt.download([one])
    rt._landing.give_up(early._block)
    late = rt.download([two])
    assert late._block is early._block
    refused(Code.STAGING_REUSED, early.resolve)
    violation = refused(Code.STAGING_REUSED, early.resolve)
    assert (violation.operation, violation.object) == ("resolve", "Download('download', 1 arrays)")
    assert (violation.expected, violation.actual) == (f"lending {early._lending}", f"lending {late._lending}")
    del early, violation
    gc.collect()
    others = [rt.download([one]) for _ in range(5)]
    assert late._block not in [other._block for other in others]
    assert late.resolve()[0].tolist() == [4, 5, 6]


def test_a_download_that_fails_keeps_its_memory(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that cannot be enqueued counts nothing and gives its block back."""
    (tensor,) = on_device(rt, [1, 2, 3])
    rt.download([tensor]).resolve()

    def fail(*arguments: object) -> None:
        raise RuntimeError("no copy")

    before = rt.counters.snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(type(rt), "_copied_to_host", fail)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="no copy"):
                rt.download([tensor])
    assert rt.counters == before
    assert rt.download([tensor]).resolve()[0].tolist() == [1, 2, 3]
    assert (rt.counters - before).staging_allocations == 0


def test_the_process_may_end_with_a_copy_out() -> None:
    """A download that is still out when the process ends says nothing."""
    program = """
import torch
from batchstate.runtime import CpuRuntime
rt = CpuRuntime()
kept = [rt.download([torch.ones(3)]) for _ in range(2)]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_a_kernel_writes_the_host_reads(rt: Runtime) -> None:
    """A scatter into the device's view lands in the host's bytes, and the memory begins as zeros."""
    mapped = rt.mapped_zeros((4, 2), torch.int16, name="tier")
    assert not mapped.bytes.any()
    rows = torch.tensor([1, 3], device=rt.device)
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16, device=rt.device)
    rt.launch(mapped.device.index_copy_, 0, rows, values, reads=(rows, values), writes=(mapped.device,))
    rt.synchronize()
    assert mapped.bytes.view(np.int16).reshape(4, 2).tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    assert mapped.host.device.type == "cpu"
    assert mapped.device.device == rt.device


def test_what_the_host_writes_a_kernel_reads(rt: Runtime) -> None:
    """Bytes written by the host, as a transport writes them, are what a gather finds."""
    mapped = rt.mapped_zeros((3,), torch.bfloat16)
    mapped.bytes[2:4] = (0x80, 0x3F)  # 1.0, little-endian
    assert rt.read_back(mapped.device[1:2].float()).tolist() == [1.0]


def test_memory_of_no_bytes_is_fine() -> None:
    """An empty tensor has no bytes to show."""
    assert bytes_of(torch.empty(0)).size == 0


def test_bytes_of_a_device_are_refused() -> None:
    """Their address is not the host's: reading there would end the process."""
    with pytest.raises(DeviceError, match="expected memory of the host, got a tensor on meta"):
        bytes_of(torch.empty(4, device="meta"))


def test_a_device_that_does_not_address_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would copy silently, and the copy be another memory."""
    pinned = torch.zeros(4)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(DeviceError, match="copy"):
        device_view(pinned, torch.device("cpu"))


def test_the_view_describes_the_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, length and dtype reach torch as the array interface says; dtype and shape come back."""
    pinned = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    asked = []

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        asked.append(memory.__cuda_array_interface__)
        return pinned.view(-1).view(torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    view = device_view(pinned, torch.device("cpu"))
    assert torch.equal(view, pinned)
    assert view.data_ptr() == pinned.data_ptr()
    assert asked[0]["data"] == (pinned.data_ptr(), False)
    assert asked[0]["shape"] == (48,)
    assert asked[0]["typestr"] == "|u1"


def test_an_accelerator_pins_what_it_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's side is asked for as pinned memory, and the device's is a view of it."""
    runtime, _ = fake_accelerator(monkeypatch)
    monkeypatch.setattr("batchstate.runtime.devices.device_view", lambda pinned, device: pinned)
    pinned = []
    empty: Any = torch.empty

    def remember(*shape: Any, pin_memory: bool = False, **rest: Any) -> Any:
        pinned.append(pin_memory)
        return empty(*shape, **rest)

    monkeypatch.setattr(torch, "empty", remember)
    mapped = runtime.mapped_zeros((2, 2), torch.float32)
    assert True in pinned
    assert mapped.device.data_ptr() == mapped.host.data_ptr()
