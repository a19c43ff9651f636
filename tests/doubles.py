"""What several tests stand in for the real thing."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TypeVar

import attrs
import numpy as np
import pytest
import torch

from batchstate.mirror import Handles
from batchstate.runtime import AcceleratorRuntime, Runtime
from batchstate.violations import Code, Violation


@attrs.define(eq=False)
class Gate:
    """A fence that a test opens; counts how often it was asked."""

    done: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done

    def wait(self) -> None:
        raise AssertionError("the host waited")


def refused(code: Code, action: Callable[[], object]) -> Violation:
    """Runs `action`, which has to break the invariant of `code`."""
    with pytest.raises(Violation) as caught:
        action()
    assert caught.value.code == code, caught.value
    return caught.value


H = TypeVar("H", bound=Handles)


def forged(kind: type[H], runtime: Runtime, numbers: object, generations: object, pool_id: int) -> H:
    """Handles that no pool has made."""
    arrays = np.array(numbers, np.int64), np.array(generations, np.int64)
    return kind.of_pool(runtime, *arrays, pool_id=pool_id)


def in_a_thread(action: Callable[[], object]) -> BaseException | None:
    """Runs `action` in a second thread and returns what it raised."""
    raised: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return raised[0] if raised else None


class FakeStream:
    """Numbers itself, and notes what it waits for."""

    count = 0

    def __init__(self, device: torch.device | None = None) -> None:
        FakeStream.count += 1
        self.stream_id = FakeStream.count
        self.device_index = 0
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class FakeEvent:
    """Happens when the test says so."""

    happened = True

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


class FakeModule(SimpleNamespace):
    """The part of `torch.cuda` that the runtime uses."""

    Event = FakeEvent
    Stream = FakeStream
    current: FakeStream
    on: int

    def __init__(self) -> None:
        super().__init__(current=FakeStream(), on=0, capturing=False, sync_debug_mode=0, modes=[], available=True)

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return self.on

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current, on = self.current, stream, self.on
        self.on = 0
        try:
            yield
        finally:
            self.current, self.on = before, on

    def set_stream(self, stream: FakeStream) -> None:
        self.current, self.on = stream, 0

    def synchronize(self, device: torch.device) -> None:
        self.modes.append(self.sync_debug_mode)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def get_sync_debug_mode(self) -> int:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int) -> None:
        self.sync_debug_mode = mode


def fake_accelerator(monkeypatch: pytest.MonkeyPatch) -> tuple[AcceleratorRuntime, FakeModule]:
    """An accelerator runtime whose memory is CPU memory, and the stand-in that it takes for torch's device module."""
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)  # of the real module
    runtime = AcceleratorRuntime(torch.device("cpu"))
    runtime.device = torch.device("cpu")
    monkeypatch.setattr(runtime, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    return runtime, module
