"""`no_hidden_sync`: what would wait for the device is reported, and what would not is left alone."""

import warnings
from collections.abc import Callable

import pytest
import torch

from batchstate import MirroredTensor, Violation
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime, open_runtime
from batchstate.testing import no_hidden_sync
from batchstate.violations import Code

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy of a copy": lambda t: t.cpu().numpy(),
    "to": lambda t: t.to("cpu"),
    "to device": lambda t: t.to(device=torch.device("cpu")),
    "bool": lambda t: bool(t[0]),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "as an index": lambda t: range(t[0]),
    "a comparison in an if": lambda t: 1 if t.max() > 2 else 0,
    "in": lambda t: 2 in t,
    "equal": lambda t: torch.equal(t, t + 1),
    "repr": repr,
    "an f-string": lambda t: f"{t[0]}",
    "a boolean mask": lambda t: t[t > 1],
    "an assignment through a mask": lambda t: t.clone().__setitem__(t > 1, t[:2]),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 1),
    "unique": lambda t: torch.unique(t),
    "isin of many": lambda t: torch.isin(t, t.new_zeros(11)),
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "a copy into host memory": lambda t: torch.empty(3, dtype=t.dtype).copy_(t),
    "what was computed from it": lambda t: (t * 2 + 1).sum().item(),
    "a view of it": lambda t: t[1:].view(2, 1)[0, 0].item(),
}


@pytest.mark.parametrize("name", list(WAITS))
def test_hidden_sync_is_reported(name: str, rt: Runtime) -> None:
    """A call that makes the host wait for the device is HIDDEN_SYNC."""
    with pytest.raises(Violation) as caught, no_hidden_sync(rt):
        WAITS[name](MirroredTensor.from_host(rt, [1, 2, 3]).device)
    assert caught.value.code is Code.HIDDEN_SYNC


def test_tables_from_before_the_window_are_known(rt: Runtime) -> None:
    """A table that was made before the window is device memory in it."""
    table = SlotPool(rt, 3).table("table")
    with pytest.raises(Violation, match="HIDDEN_SYNC"), no_hidden_sync(rt):
        table.memory.sum().item()


def test_results_of_the_step_before_are_known(rt: Runtime) -> None:
    """What was made before the window is device memory in it: uploads, results of launches, what a window computed."""
    value = MirroredTensor.from_host(rt, [1, 2, 3]).device
    launched = rt.launch(torch.add, value, 1, reads=(value,))
    with no_hidden_sync(rt):
        sampled = (value * 2)[1:]
    for before in (value, launched, launched[1:], sampled, rt.device_empty((2,), torch.int64)):
        with pytest.raises(Violation, match="HIDDEN_SYNC"), no_hidden_sync(rt):
            before.tolist()


def test_memory_of_the_device_is_not_kept_alive(rt: Runtime) -> None:
    """What is remembered of device memory ends with it: its address may be the host's next."""
    if rt.device.type != "cpu":
        pytest.skip("only a CPU remembers")
    known = rt.known_memory()
    before = len(known._alive)
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    with no_hidden_sync(rt):
        made = value.device + 1
    assert len(known._alive) > before
    del made, value
    assert len(known._alive) == before


def test_host_tensors_are_left_alone(rt: Runtime) -> None:
    """Reading the host side, or any tensor of the engine's own on the host, is no synchronisation."""
    with no_hidden_sync(rt):
        value = MirroredTensor.from_host(rt, [1, 2, 3])
        _ = value.device
        assert value.host[0].item() == 1
        assert value.host.tolist() == [1, 2, 3]
        assert value.host[value.host > 1].numpy().sum() == 5
        assert bool(torch.ones(1))
        assert int(torch.arange(3)[2]) == 2
        assert (value > 1).sum() == 2
        repr(value)


def test_work_on_the_device_is_left_alone(rt: Runtime) -> None:
    """Kernels, and indices of known size, make nobody wait."""
    with no_hidden_sync(rt):
        value = MirroredTensor.from_host(rt, [1, 2, 3]).device
        rows = MirroredTensor.from_host(rt, [2, 0]).device
        total = (value[rows] + value[:2]).to(torch.int32).sum()
        value.clone()[0] = total
        torch.where(value > 1, value, 0)
        torch.isin(value, rows)
        assert total.shape == ()


def test_calls_named_for_waiting_may_wait(rt: Runtime) -> None:
    """`resolve`, `read_back`, `synchronize` and the checks at level full wait openly."""
    with no_hidden_sync(rt):
        value = MirroredTensor.from_host(rt, [1, 2, 3]).weaken("upper_bound")
        assert value.resolve().np.tolist() == [1, 2, 3]
        assert rt.read_back(value.device).tolist() == [1, 2, 3]
        assert rt.inspect(value.device).tolist() == [1, 2, 3]
        rt.synchronize()
    assert rt.counters.forced_syncs == 3


def test_window_closes(rt: Runtime) -> None:
    """Behind the window everything is as it was, also when it closed with a violation."""
    value = MirroredTensor.from_host(rt, [1, 2, 3])
    with pytest.raises(Violation, match="HIDDEN_SYNC"), no_hidden_sync(rt):
        value.device.tolist()
    assert value.device.tolist() == [1, 2, 3]
    assert value.resolve() is value


def test_torchs_own_mode_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has a sync-debug mode it holds inside the window alone, and its first warning is no error."""

    class Module:
        mode: object = 0

        def get_sync_debug_mode(self) -> object:
            return self.mode

        def set_sync_debug_mode(self, mode: object) -> None:
            self.mode = mode
            if mode == "error":
                warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    module = Module()
    runtime = open_runtime("cpu")
    runtime.device = torch.device("cuda:0")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with no_hidden_sync(runtime):
            assert [module.mode] == ["error"]
        assert [module.mode] == [0]
        with pytest.raises(Violation) as caught, no_hidden_sync(runtime):
            raise RuntimeError("called a synchronizing CUDA operation")
    assert caught.value.code is Code.HIDDEN_SYNC
    assert [module.mode] == [0]
