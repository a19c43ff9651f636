"""Host memory that kernels address: one memory, seen from both sides."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from batchstate.errors import DeviceError, OwnerThreadError
from batchstate.runtime import Runtime
from batchstate.runtime.memory import bytes_of, device_view
from tests.doubles import fake_accelerator


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


def test_a_device_that_does_not_address_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would copy silently, and the copy be another memory."""
    pinned = torch.zeros(4)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(DeviceError, match="copy"):
        device_view(pinned, torch.device("cpu"))


def test_the_view_describes_the_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, length and dtype are handed to torch as the array interface says; dtype and shape come back."""
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


def test_mapped_memory_belongs_to_the_thread_of_its_runtime(rt: Runtime) -> None:
    """As everything of a runtime does."""
    caught = []

    def other() -> None:
        try:
            rt.mapped_zeros((1,), torch.int8)
        except OwnerThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert caught
