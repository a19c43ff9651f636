"""All comparisons with baselines that move few rows or none, with floors, and with real engines."""

from collections.abc import Callable, Mapping
from functools import partial

from batchstate.runtime import Runtime
from benchmarks.baselines.floors import against_floors
from benchmarks.comparisons import Absent, Comparison
from benchmarks.decode_steps import against_stable_rows
from benchmarks.peers.sglang_batches import against_schedule_batch
from benchmarks.peers.sglang_pools import slots_against_request_pool, slots_against_token_allocator
from benchmarks.peers.transformers_steps import against_continuous_batching
from benchmarks.peers.vllm_buffers import against_cpu_gpu_buffers
from benchmarks.peers.vllm_pools import pages_against_block_pool

Make = Callable[[], Comparison | Absent]


def against_peers(runtime: Runtime, *, quick: bool) -> Mapping[str, Make]:
    """Makers by name; `quick` leaves large pools and large batches out."""
    slots, pages = (10_000, 4_096) if quick else (1_000_000, 65_536)
    makers: dict[str, Make] = {}
    for n in (12, 40):
        makers[f"decode step, {n} columns, stable rows"] = partial(against_stable_rows, runtime, num_columns=n)
        makers[f"decode step, {n} columns, CpuGpuBuffer"] = partial(against_cpu_gpu_buffers, runtime, num_columns=n)
        makers[f"decode step, {n} columns, floors"] = partial(against_floors, runtime, num_columns=n)
    for rows in (64,) if quick else (64, 256, 1_024):
        makers[f"ScheduleBatch, {rows:,} rows"] = partial(against_schedule_batch, runtime, rows=rows)
    for n in (64,) if quick else (64, 256):
        makers[f"continuous batching, {n} requests"] = partial(against_continuous_batching, runtime, num_requests=n)
    makers["token allocator"] = partial(slots_against_token_allocator, runtime, size=slots)
    makers["ReqToTokenPool"] = partial(slots_against_request_pool, runtime, size=slots)
    for n in (16, 128, 2_048):
        makers[f"BlockPool, {n:,} blocks"] = partial(pages_against_block_pool, runtime, size=pages, n=n)
    return makers
