"""`python -m benchmarks.adoption.small_engines`: mini-sglang's cache and nano-vllm's scheduler, watched as they are.

Neither is on a package index: put their checkouts, `mini-sglang` and `nano-vllm`, into a folder that `BATCHSTATE_PEERS`
names, and install xxhash. Their packages are opened without what their `__init__` imports, which is models and kernels;
mini-sglang's comparison of two keys, which is compiled, is written here.
"""

import importlib
import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from batchstate import Violation
from batchstate.watch import WatchedPool, watch_pages
from benchmarks.adoption.checkouts import module_of
from benchmarks.peers.installed import PeerError

NUM_PAGES, STEPS = 64, 60


def nano_vllm(seed: int) -> WatchedPool:
    """Prompts that begin alike, in fewer blocks than they need: its scheduler shares, evicts and preempts."""
    scheduling = module_of("nanovllm.engine.scheduler", checkout="nano-vllm", packages=["nanovllm"])
    sequences = importlib.import_module("nanovllm.engine.sequence")
    params = importlib.import_module("nanovllm.sampling_params").SamplingParams
    sequences.Sequence.block_size = 4
    config = SimpleNamespace(
        max_num_seqs=8, max_num_batched_tokens=64, eos=-1, kvcache_block_size=4, num_kvcache_blocks=NUM_PAGES // 4
    )
    with watch_pages(
        scheduling.Scheduler,
        after=["schedule", "postprocess"],
        holders=lambda s: [sequence.block_table for sequence in (*s.running, *s.waiting)],
        free="block_manager.free_block_ids",
        references=lambda s: {block.block_id: block.ref_count for block in s.block_manager.blocks},
        num_pages=lambda s: len(s.block_manager.blocks),
    ) as watched:
        drawn, scheduler = random.Random(seed), scheduling.Scheduler(config)
        for _ in range(STEPS):
            if drawn.random() < 0.5:
                prompt = [drawn.randrange(2)] * drawn.randrange(1, 20)
                scheduler.add(sequences.Sequence(prompt, params(max_tokens=drawn.randrange(1, 12))))
            if not scheduler.is_finished():
                seqs, is_prefill = scheduler.schedule()
                scheduler.postprocess(seqs, [drawn.randrange(2) for _ in seqs], is_prefill)
    return watched


def _nodes(node: Any) -> Iterator[Any]:
    for child in node.children.values():
        yield child.value
        yield from _nodes(child)


def mini_sglang(seed: int, *, alike: bool) -> WatchedPool:
    """Requests prefill over its cache manager and leave; `alike` ones prefill one prompt side by side."""
    core = module_of("minisgl.core", checkout="mini-sglang/python", packages=["minisgl.scheduler", "minisgl.kernel"])
    kernel: Any = importlib.import_module("minisgl.kernel")
    caching = importlib.import_module("minisgl.scheduler.cache")
    kernel.fast_compare_key = lambda key, other: next(
        (at for at, (a, b) in enumerate(zip(key.tolist(), other.tolist(), strict=False)) if a != b),
        min(len(key), len(other)),
    )
    if getattr(core, "_GLOBAL_CTX", None) is None:
        core.set_global_ctx(core.Context(page_size=1))
    running: list[Any] = []
    with watch_pages(
        caching.CacheManager,
        after=["allocate_paged", "cache_req"],
        holders=lambda m: [
            *(m.page_table[request.table_idx, : request.device_len] for request in running),
            *_nodes(m.prefix_cache.root_node),
        ],
        free="free_slots",
        num_pages="num_pages",
    ) as watched:
        drawn = random.Random(seed)
        manager = caching.CacheManager(NUM_PAGES, 1, torch.zeros((8, 32), dtype=torch.int32), "radix")
        for step in range(STEPS):
            joining: list[Any] = []
            for _ in range(2 if alike else 1):
                first = step if not alike else drawn.randrange(3)
                prompt = torch.tensor([first, *range(5)], dtype=torch.int32)
                handle = manager.prefix_cache.match_prefix(prompt[:-1]).cuda_handle
                manager.lock(handle)
                row = next(row for row in range(8) if row not in [request.table_idx for request in running + joining])
                if handle.cached_len:
                    manager.page_table[row, : handle.cached_len] = handle.get_matched_indices()
                joining.append(core.Req(prompt, row, handle.cached_len, 4, step, core.SamplingParams(), handle))
            running += joining
            manager.allocate_paged(joining)
            for request in joining:
                request.complete_one()
                request.device_len = request.cached_len  # the next token has no page yet
                manager.cache_req(request, finished=False)
            while len(running) > 3:
                request = running.pop(0)
                manager.cache_req(request, finished=True)
    return watched


def outcome(run: Callable[[int], WatchedPool], seeds: int) -> dict[str, Any]:
    """How many calls were watched, and the first that was accused."""
    calls = 0
    for seed in range(seeds):
        try:
            calls += run(seed).counters.calls
        except PeerError as error:
            return {"absent": str(error)}
        except Violation as violation:
            return {
                "seed": seed,
                "code": violation.code.value,
                "problem": f"{violation.operation}: {violation.problem}",
            }
    return {"seeds": seeds, "calls": calls, "violations": 0}


def main() -> int:
    """Prints what was found in each."""
    report = {
        "nano-vllm": outcome(nano_vllm, 20),
        "mini-sglang": outcome(lambda seed: mini_sglang(seed, alike=False), 20),
        "mini-sglang, two requests of one prompt": outcome(lambda seed: mini_sglang(seed, alike=True), 20),
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
