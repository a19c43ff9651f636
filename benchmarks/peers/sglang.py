"""SGLang's own `ScheduleBatch` against a `Batch` of the same columns.

Nine columns on the device, three on the host (two tensors and the requests), at each step: `filter_batch`,
`merge_batch`, and the three additions that its `prepare_for_decode` begins with. Its allocations are not part of it.
Requests, batch, sampling parameters and penalties are SGLang's classes; the model's configuration, of which these
methods read one flag, is not.
"""

from array import array
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import TensorColumn, host_list, mirrored, slot_column
from batchstate.levels import Level, checks
from batchstate.mirror import Slots
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.adoption.placeholders import stand_in
from benchmarks.baselines.free_lists import FreeListBaseline, shuffled
from benchmarks.comparisons import Absent, Asked, Comparison, require_equal
from benchmarks.peers.installed import named, or_absent, peer, theirs, version_of
from benchmarks.pools import all_numbers
from benchmarks.timing import Contender

Array = npt.NDArray[Any]

OURS = f"packed, checks {Level.CHEAP.value}"
VOCAB_SIZE = 32_000


class ScheduleColumns(Batch):
    """Columns that SGLang keeps of a running batch, under its names; here every column has both sides."""

    req_pool_indices = slot_column()
    seq_lens = mirrored(torch.int64)
    orig_seq_lens = mirrored(torch.int32)
    input_ids = mirrored(torch.int64)
    temperatures = mirrored(torch.float32, shape=(1,))
    top_ps = mirrored(torch.float32)
    top_ks = mirrored(torch.int32)
    min_ps = mirrored(torch.float32)
    sampling_seed = mirrored(torch.int64)
    reqs = host_list()


OF_THE_BATCH = ("req_pool_indices", "seq_lens", "orig_seq_lens", "input_ids")
OF_SAMPLING = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
HOST_TWINS = ("req_pool_indices", "seq_lens")


@final
class RealScheduleBatch:
    """A running `ScheduleBatch`, another that joins it, and who leaves.

    A step begins by putting back what the one before replaced: about one hundredth of its time at 256 rows.
    """

    def __init__(
        self,
        running: Mapping[str, Array],
        joining: Mapping[str, Array],
        keep: npt.NDArray[np.bool_],
        device: torch.device,
    ) -> None:
        self._keep = np.flatnonzero(keep).tolist()
        leaving = np.flatnonzero(~keep).tolist()
        if version_of("sglang") is not None:
            stand_in()  # its batch uses few of the modules that it imports
        modules = [
            peer("sglang", f"sglang.srt.{name}")
            for name in (
                "managers.schedule_batch",
                "sampling.sampling_batch_info",
                "sampling.sampling_params",
                "sampling.penaltylib",
            )
        ]
        with theirs("ScheduleBatch"):
            self.running = _schedule_batch(modules, running, device)
            self._joining = _schedule_batch(modules, joining, device)
            for row in leaving:
                self.running.reqs[row].finished_reason = modules[0].FINISH_LENGTH(1)
        self._batch, self._sampling = dict(vars(self.running)), dict(vars(self.running.sampling_info))

    def step_with_rows(self) -> None:
        """Told which rows stay."""
        self._step(keep_indices=self._keep)

    def step(self) -> None:
        """As its scheduler calls it: each request is asked whether it has finished."""
        self._step()

    def _step(self, **keep: object) -> None:
        batch = self.running
        vars(batch).update(self._batch)
        vars(batch.sampling_info).update(self._sampling)
        batch.filter_batch(**keep)
        batch.merge_batch(self._joining)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1


def against_schedule_batch(runtime: Runtime, *, rows: int = 256, churn: int = 5) -> Comparison | Absent:
    """A step in which requests leave, join and advance."""
    task = f"decode step, columns of SGLang's ScheduleBatch, {rows:,} rows"
    name = named("SGLang", "sglang")
    return or_absent(task, OURS, name, lambda: _comparison(runtime, task, name, rows, churn))


def _comparison(runtime: Runtime, task: str, name: str, rows: int, churn: int) -> Comparison:
    rng = np.random.default_rng(rows)
    keep = np.ones(rows, dtype=np.bool_)
    keep[rng.choice(rows, churn, replace=False)] = False
    running, joining = _values(rng, 1, rows), _values(rng, 1 + rows, churn)
    real = RealScheduleBatch(running, joining, keep, runtime.device)
    ours, others = (
        ScheduleColumns.build(
            runtime,
            req_pool_indices=Slots.from_host(runtime, values["req_pool_indices"]),
            reqs=[f"{slot}" for slot in values["req_pool_indices"].tolist()],
            **{name: column for name, column in values.items() if name != "req_pool_indices"},
        )
        for values in (running, joining)
    )

    def packed() -> ScheduleColumns:
        batch = ours.next_batch(keep=keep, joining=others, advance=("seq_lens", "orig_seq_lens"))
        batch.upload()
        return batch

    def packed_read() -> dict[str, torch.Tensor]:
        return packed().on_device()

    def verify() -> None:
        for step in (real.step, real.step_with_rows):
            step()
            _require_equal_batches(packed(), real.running)

    ways: tuple[tuple[str, Callable[[], object]], ...] = (
        ("packed", packed),
        ("packed, each device side read", packed_read),
    )
    baselines = [
        Contender(f"{name}, asking each request", real.step),
        Contender(f"{name}, told which rows stay", real.step_with_rows),
    ]
    target = 12.0 if runtime.device.type == "cuda" else 8.0
    levels = (Level.CHEAP, Level.OFF)
    asked = {
        (f"packed, checks {level.value}", baseline.name): Asked(target=target)
        for level in levels
        for baseline in baselines
        if rows == 256
    }
    return Comparison(
        task=task,
        ours=[Contender(f"{way}, checks {level.value}", run, level) for way, run in ways for level in levels],
        baselines=baselines,
        verify=verify,
        asks=asked,
    )


def _require_equal_batches(ours: ScheduleColumns, real: Any) -> None:
    for column in (*OF_THE_BATCH, *OF_SAMPLING):
        device = getattr(real if column in OF_THE_BATCH else real.sampling_info, column)
        require_equal(f"device side of {column}", ours[column].device.cpu(), device.cpu())
        if column in HOST_TWINS:
            require_equal(f"host side of {column}", ours[column].np, getattr(real, f"{column}_cpu"))
    require_equal("requests", list(ours.reqs), [request.rid for request in real.reqs])


def _values(rng: np.random.Generator, first: int, rows: int) -> dict[str, Array]:
    values: dict[str, Array] = {}
    for name, column in ScheduleColumns.columns().items():
        if isinstance(column, TensorColumn):
            values[name] = rng.integers(1, 10_000, (rows, *column.shape)).astype(column.np_dtype)
    values["req_pool_indices"] = np.arange(first, first + rows, dtype=np.int64)
    return values


def _schedule_batch(modules: list[Any], values: Mapping[str, Array], place: torch.device) -> Any:
    scheduling, sampling_info, sampling_params, penalties = modules
    device = str(place)
    tensors = {name: torch.from_numpy(array.copy()).to(place) for name, array in values.items()}
    batch = scheduling.ScheduleBatch(
        reqs=[
            scheduling.Req(str(slot), "", array("q", [1]), sampling_params.SamplingParams())
            for slot in values["req_pool_indices"].tolist()
        ],
        model_config=SimpleNamespace(is_encoder_decoder=False),
        device=device,
        **{name: tensors[name] for name in OF_THE_BATCH},
        **{f"{name}_cpu": torch.from_numpy(values[name].copy()) for name in HOST_TWINS},
    )
    batch.sampling_info = sampling_info.SamplingBatchInfo(
        **{name: tensors[name] for name in OF_SAMPLING},
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCAB_SIZE,
        penalizer_orchestrator=penalties.BatchedPenalizerOrchestrator(VOCAB_SIZE, batch, set()),
        device=device,
    )
    return batch


OURS = f"SlotPool, checks {Level.CHEAP.value}"
CONTEXT = 4


@final
class TokenAllocator:
    """Locations, out of a tensor."""

    name: ClassVar[str] = "token allocator"

    def __init__(self, size: int, device: torch.device) -> None:
        module = peer("sglang", "sglang.srt.mem_cache.allocator")
        with theirs("TokenToKVPoolAllocator"):
            self._pool: Any = module.TokenToKVPoolAllocator(size, torch.float16, str(device), None, need_sort=False)

    def take(self, n: int) -> Any:
        return self._pool.alloc(n)

    def free(self, taken: Any) -> None:
        self._pool.free(taken)

    def numbers(self, taken: Any) -> list[int]:
        numbers: list[int] = taken.tolist()
        return numbers


@final
class RequestRows:
    """Rows of requests, out of a list, all at once."""

    name: ClassVar[str] = "ReqToTokenPool, rows"

    def __init__(self, size: int, device: torch.device) -> None:
        module = peer("sglang", "sglang.srt.mem_cache.memory_pool")
        with theirs("ReqToTokenPool"):
            self.pool: Any = module.ReqToTokenPool(size, CONTEXT, str(device), enable_memory_saver=False)

    def take(self, n: int) -> list[int]:
        rows: list[int] = self.pool.alloc_rows(n)
        return rows

    def free(self, taken: list[int]) -> None:
        self.pool.free_rows(taken)

    def numbers(self, taken: list[int]) -> list[int]:
        return taken


class _Holder:
    """A request as the pool sees it."""

    def __init__(self, kv: Any) -> None:
        self.kv = kv


def slots_against_token_allocator(runtime: Runtime, *, size: int = 1_000_000, n: int = 256) -> Comparison | Absent:
    """Slots against tokens."""
    return _against(runtime, size, n, TokenAllocator.name, lambda: _turnover_of(TokenAllocator, runtime, size, n))


def slots_against_request_pool(runtime: Runtime, *, size: int = 1_000_000, n: int = 256) -> Comparison | Absent:
    """Slots against request rows: taken and freed at once, and as the scheduler does, freed one request at a time."""

    def baselines() -> tuple[RequestRows, list[Contender]]:
        rows, contenders = _turnover_of(RequestRows, runtime, size, n)
        kinds = peer("sglang", "sglang.srt.managers.schedule_batch")
        with theirs("ReqKvInfo"):
            requests = [_Holder(kinds.ReqKvInfo()) for _ in range(n)]

        def by_request() -> None:
            rows.pool.alloc(requests)
            for request in requests:
                rows.pool.free(request)

        return rows, [*contenders, Contender(_of_sglang("ReqToTokenPool, requests"), by_request)]

    return _against(runtime, size, n, RequestRows.name, baselines)


def _of_sglang(part: str) -> str:
    return named("SGLang", "sglang", part)


def _turnover_of(kind: Callable[..., Any], runtime: Runtime, size: int, n: int) -> tuple[Any, list[Contender]]:
    pool = kind(size, runtime.device)
    shuffled(pool, size)
    return pool, [Contender(_of_sglang(pool.name), lambda: pool.free(pool.take(n)))]


def _against(
    runtime: Runtime,
    size: int,
    n: int,
    name: str,
    baselines: Callable[[], tuple[FreeListBaseline, list[Contender]]],
) -> Comparison | Absent:
    task = f"take and return {n:,} of {size:,} slots"

    def make() -> Comparison:
        other, contenders = baselines()
        pool = SlotPool(runtime, size)
        with checks(Level.OFF):
            everything = pool.take(size)
            pool.free(everything.take(np.random.default_rng(0).permutation(size)), after=None)

        def verify() -> None:
            for contender in contenders:
                contender.run()
            ours = all_numbers(pool.take, partial(pool.free, after=None), lambda slots: slots.np.tolist(), size, n)
            require_equal(f"numbers of {name}", ours, all_numbers(other.take, other.free, other.numbers, size, n))
            pool.expect_idle()

        return Comparison(
            task=task,
            ours=[
                Contender(f"SlotPool, checks {level.value}", lambda: pool.free(pool.take(n), after=None), level)
                for level in (Level.CHEAP, Level.OFF)
            ],
            baselines=contenders,
            verify=verify,
        )

    return or_absent(task, OURS, _of_sglang(name), make)
