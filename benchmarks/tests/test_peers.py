"""Baselines by hand and real engines do the same work as this library, and an engine that is not there is said so."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchstate.runtime import Runtime
from benchmarks.adoption import placeholders
from benchmarks.baselines.free_lists import PopList
from benchmarks.baselines.persistent_buffers import PersistentBuffers, PinnedPair
from benchmarks.baselines.staged_slots import StagedSlots
from benchmarks.comparisons import Absent, Comparison, MismatchError
from benchmarks.decode_steps import Scene, against_floors, against_stable_rows, against_twins, bytes_of_a_step
from benchmarks.peers import installed
from benchmarks.peers.installed import PeerError, or_absent, peer, theirs
from benchmarks.peers.sglang import against_schedule_batch, slots_against_request_pool, slots_against_token_allocator
from benchmarks.peers.transformers_steps import against_continuous_batching
from benchmarks.peers.vllm import against_cpu_gpu_buffers, pages_against_block_pool
from benchmarks.suite import against_peers

REAL: dict[str, Callable[[Runtime], Comparison | Absent]] = {
    "sglang: ScheduleBatch": lambda rt: against_schedule_batch(rt, rows=16, churn=3),
    "sglang: token allocator": lambda rt: slots_against_token_allocator(rt, size=100, n=8),
    "sglang: ReqToTokenPool": lambda rt: slots_against_request_pool(rt, size=100, n=8),
    "vllm: BlockPool": lambda rt: pages_against_block_pool(rt, size=64, n=16),
    "vllm: CpuGpuBuffer": lambda rt: against_cpu_gpu_buffers(rt, num_columns=5, rows=16, churn=3),
    "transformers: continuous batching": lambda rt: against_continuous_batching(rt, num_requests=3),
}


def run_once(comparison: Comparison) -> None:
    """Verifies before and after each way has run: a step leaves what the next one needs."""
    for _ in range(2):
        comparison.verify()
        for contender in (*comparison.ours, *comparison.baselines):
            contender.run()
    comparison.verify()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine has a distribution."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a module that stands for one of an engine, under any version."""

    def install(name: str, **members: object) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setattr(installed, "version_of", lambda distribution: "0")

    return install


def test_modules_that_an_engine_lacks_are_stood_in_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stand_in` puts one finder behind all others, however often it is called."""
    monkeypatch.setattr(torch, "compile", torch.compile)
    for name in ("zeros", "empty", "ones", "tensor", "full"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    placeholders.stand_in()
    finders = [*sys.meta_path]
    try:
        placeholders.stand_in()
        assert sys.meta_path == finders
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # which no engine has asked for
            importlib.import_module("no_such_module")
    finally:
        sys.meta_path.remove(finders[-1])


# By hand


@pytest.mark.parametrize("churn", [0, 3, 16])
def test_stable_rows_give_the_same_columns(rt: Runtime, churn: int) -> None:
    """Both sides of each column are those of the packed step, by slot, also after other steps have run."""
    run_once(against_stable_rows(rt, num_columns=9, rows=16, churn=churn))


@pytest.mark.parametrize(("leaving", "joining"), [(6, 2), (2, 6), (5, 0), (0, 4), (8, 3)])
def test_persistent_buffers_stay_dense(rt: Runtime, leaving: int, joining: int) -> None:
    """Whoever joins takes a hole; rows from the end move into the holes that remain, or the batch grows."""
    keep = np.ones(8, dtype=np.bool_)
    keep[np.random.default_rng(leaving).choice(8, leaving, replace=False)] = False
    running = {"slots": np.arange(1, 9), "seq_lens": np.arange(10, 18)}
    others = {"slots": np.arange(20, 20 + joining), "seq_lens": np.arange(30, 30 + joining)}
    buffers = PersistentBuffers("buffers", running, others, keep, rt.device)
    for _ in range(2):
        host, device = buffers.after_one_step()
        wanted = dict(zip(running["slots"][keep].tolist(), (running["seq_lens"][keep] + 1).tolist(), strict=True))
        wanted |= dict(zip(others["slots"].tolist(), (others["seq_lens"] + 1).tolist(), strict=True))
        for side in (host, device):
            assert dict(zip(side["slots"].tolist(), side["seq_lens"].tolist(), strict=True)) == wanted
        buffers.step()
        assert buffers.rows == 8 - leaving + joining


def test_staged_slots_write_no_row_of_a_request_that_stays(rt: Runtime) -> None:
    """Only joining rows and lengths of active rows change in the device table."""
    scene = Scene.of(rt, num_columns=6, rows=12, churn=2)
    staged = scene.staged()
    before = staged.device.cpu().clone()
    staged.step()
    changed = (staged.device.cpu() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == sorted(staged.active.tolist())
    joined = scene.joining.slots.np
    others = np.setdiff1d(staged.active.cpu().numpy(), joined)
    lengths = (staged.device.cpu() - before)[others]
    assert lengths.sum(dim=1).tolist() == [1] * len(others)


@pytest.mark.parametrize("way", ["persistent", "staged"])
@pytest.mark.parametrize("side", ["host", "device"])
def test_a_forgotten_side_is_found(rt: Runtime, way: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification reads both sides of the columns of each baseline."""
    scene = Scene.of(rt, num_columns=5, rows=16, churn=3)
    baseline: PersistentBuffers | StagedSlots = scene.persistent() if way == "persistent" else scene.staged()
    scene.verify([baseline])
    right = baseline.after_one_step

    def wrong() -> Any:
        host, device = right()
        values = (host if side == "host" else device)["column_1"]
        values[3] += 1
        return host, device

    monkeypatch.setattr(type(baseline), "after_one_step", lambda self: wrong())
    with pytest.raises(MismatchError, match=f"{side} side of column_1"):
        scene.verify([baseline])


def test_floors_are_of_the_same_bytes(rt: Runtime) -> None:
    """The bare copy moves what the packed step moves, and nothing is asked of the ratio."""
    comparison = against_floors(rt, num_columns=5, rows=16, churn=3)
    run_once(comparison)
    scene = Scene.of(rt, num_columns=5, rows=16, churn=3)
    nbytes = bytes_of_a_step(scene)
    assert nbytes >= sum(scene.running[name].np.nbytes for name in scene.running.columns())
    assert [baseline.name for baseline in comparison.baselines] == [
        f"floor: one copy of {nbytes:,} bytes",
        "floor: one launch",
    ]
    assert comparison.target is None
    assert not comparison.asks


def test_the_step_against_tensors_has_its_targets(rt: Runtime) -> None:
    """256 rows of 12 and of 40 columns are asked for, no other size, and no way that also reads each column."""
    for num_columns, least in ((12, 8.0 if rt.device.type == "cuda" else 5.0), (40, 12.0)):
        asked = against_twins(rt, num_columns=num_columns).asks
        assert {demand.target for demand in asked.values()} == {least}
        assert {way for way, _ in asked} == {"packed, checks cheap", "packed, checks off"}
    assert not against_twins(rt, num_columns=12, rows=64).asks


# Real engines


@pytest.mark.parametrize("name", REAL)
def test_a_real_engine_does_the_same_work(rt: Runtime, name: str) -> None:
    """Where it is installed, its results are ours."""
    comparison = REAL[name](rt)
    if isinstance(comparison, Absent):
        pytest.skip(comparison.why)
    run_once(comparison)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", REAL)
def test_an_engine_that_is_not_installed_is_absent(rt: Runtime, name: str) -> None:
    """Its row says what is missing, and what it would have been compared with."""
    distribution = name.partition(":")[0]
    row = REAL[name](rt)
    assert isinstance(row, Absent)
    assert row.why == f"no distribution {distribution!r}"
    assert row.task
    assert "checks cheap" in row.way


@pytest.mark.parametrize(
    "error", [ImportError("no kernel"), OSError("no driver\nat all"), RuntimeError(""), KeyError(1)]
)
@pytest.mark.parametrize("name", REAL)
def test_an_engine_whose_import_fails_is_absent(
    rt: Runtime, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its import raises is named in its row, in one line."""

    def fails(module: str) -> ModuleType:
        raise error

    monkeypatch.setattr(installed, "version_of", lambda distribution: "1.2")
    monkeypatch.setattr(importlib, "import_module", fails)
    row = REAL[name](rt)
    assert isinstance(row, Absent)
    assert type(error).__name__ in row.why
    assert "1.2" in row.why
    assert "\n" not in row.why


def test_errors_of_our_own_code_are_not_absences() -> None:
    """Only what an engine raises makes it absent: a mistake here is a mistake."""

    def ours() -> Comparison:
        raise ValueError("of ours")

    def others() -> Comparison:
        with theirs("their class"):
            raise ValueError("of theirs")

    with pytest.raises(ValueError, match="of ours"):
        or_absent("task", "way", "baseline", ours)
    absent = or_absent("task", "way", "baseline", others)
    assert absent == Absent("task", "way", "baseline", "their class: ValueError: of theirs")


def test_a_module_that_is_there_is_imported() -> None:
    """The door finds installed packages by distribution and module."""
    assert peer("numpy", "numpy.linalg") is np.linalg
    with pytest.raises(PeerError, match="no_such_module"):
        peer("numpy", "numpy.no_such_module")


def test_the_block_pool_is_called_as_its_engine_does(rt: Runtime, stand_in: Callable[..., None]) -> None:
    """Blocks 1 to size of a pool with one block more are taken and freed; block 0 is its own."""

    class Pool:
        def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
            self._free = PopList(num_gpu_blocks - 1, rt.device)
            assert not enable_caching

        def get_new_blocks(self, n: int) -> list[Any]:
            return [SimpleNamespace(block_id=number) for number in self._free.take(n)]

        def free_blocks(self, blocks: list[Any]) -> None:
            self._free.free([block.block_id for block in blocks])

    stand_in("vllm.v1.core.block_pool", BlockPool=Pool)
    comparison = pages_against_block_pool(rt, size=64, n=16)
    assert isinstance(comparison, Comparison)
    run_once(comparison)
    assert {demand.target for demand in comparison.asks.values()} == {1.0}


def test_buffers_of_an_engine_are_the_two_sides_of_a_column(rt: Runtime, stand_in: Callable[..., None]) -> None:
    """Its array is written, its tensor read, and its copy called."""

    class Buffer:
        def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device, pin_memory: bool) -> None:
            assert pin_memory == (device.type == "cuda")
            pair = PinnedPair(size, dtype, device)
            self.np, self.gpu, self.copy_to_gpu = pair.np, pair.device, pair.upload

    stand_in("vllm.v1.utils", CpuGpuBuffer=Buffer)
    comparison = against_cpu_gpu_buffers(rt, num_columns=5, rows=16, churn=3)
    assert isinstance(comparison, Comparison)
    run_once(comparison)


def test_a_token_allocator_that_loses_tokens_is_found(rt: Runtime, stand_in: Callable[..., None]) -> None:
    """The numbers of both sides are compared before anything is timed."""

    class Leaky:
        def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: None, need_sort: bool) -> None:
            self._free = torch.arange(1, size + 1, device=device)

        def alloc(self, n: int) -> torch.Tensor:
            taken, self._free = self._free[:n], self._free[n:]
            return taken

        def free(self, taken: torch.Tensor) -> None:
            self._free = torch.cat((self._free, taken.clone().fill_(7)))

    stand_in("sglang.srt.mem_cache.allocator", TokenToKVPoolAllocator=Leaky)
    comparison = slots_against_token_allocator(rt, size=40, n=4)
    assert isinstance(comparison, Comparison)
    with pytest.raises(MismatchError, match="token allocator"):
        comparison.verify()


@pytest.mark.usefixtures("nothing_installed")
def test_the_catalog_names_each_engine_and_can_leave_large_ones_out(rt: Runtime) -> None:
    """Every maker gives a comparison or an absence; a quick run has fewer."""
    makers, quick = against_peers(rt, quick=False), against_peers(rt, quick=True)
    assert set(quick) < set(makers)
    absent = {name for name in quick if isinstance(quick[name](), Absent)}
    assert absent == {name for name in quick if not name.endswith(("stable rows", "floors"))}
