"""`python -m benchmarks.adoption.faults [NAME ...]`: faults of LMDeploy as released, each shown on its own code.

`docs/found.md` lists them. The package has to be installed, without what it requires if need be: `make peers` does so.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from batchstate.levels import checks
from batchstate.violations import Violation
from batchstate.watch import watch, watch_pages
from benchmarks.adoption import lmdeploy, lmdeploy_pools
from benchmarks.adoption.checkouts import module_of

SEEDS, RUNS, BLOCK, BLOCKS = 12, 100, 4, 8
window = module_of("lmdeploy.pytorch.paging.block_manager.window_block_manager", packages=lmdeploy.PACKAGES)
processors = module_of("lmdeploy.pytorch.engine.logits_process", packages=lmdeploy.PACKAGES)


def logits_processors() -> str:
    """After a merge of requests of different lengths, a logits processor gets padding behind the newest token."""
    wrong = calls = 0

    def after_each(step: Any) -> None:
        nonlocal wrong, calls
        handed: list[list[int]] = []
        ids, running = step.sampling_delta.all_ids, lmdeploy.running(step)

        def processor(row: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            handed.append(row.tolist())
            return logits

        processors._apply_custom_logits_processors([[processor]] * len(running), ids, torch.zeros(len(running), 1))
        calls += len(running)
        wrong += sum(row[-len(seq.ids) :] != seq.ids for row, seq in zip(handed, running, strict=True))

    for seed in range(SEEDS):
        lmdeploy.drive(seed, after_each=after_each)
    try:
        with lmdeploy.declare(ids=lmdeploy.ALIGNED):
            for seed in range(SEEDS):
                lmdeploy.drive(seed)
    except Violation as violation:
        return f"{wrong} of {calls} calls of custom logits processors get other tokens\n{violation}"
    return ""


def sum_after_prefill() -> str:
    """The first decode step behind a prefill counts its longest prompt once more for each request."""
    step, prompts = lmdeploy.ARStepInputs(), torch.tensor([8, 5, 3])
    count = int(prompts.sum())
    inputs = lmdeploy.base.ModelInputs(
        input_ids=torch.arange(count)[None],
        seq_length=prompts,
        history_lengths=torch.zeros_like(prompts),
        block_offsets=torch.arange(9).view(3, 3),
        is_decoding=False,
        num_ignored_history=torch.zeros_like(prompts),
        max_q_seqlen=8,
        max_kv_seqlen=8,
        sum_kv_seqlen=count,  # as `inputs_maker` sums them
    )
    delta = lmdeploy.module.SamplingInputsDelta(num_ignore_eos=prompts, random_offsets=prompts)
    criteria = lmdeploy.agent.ARStoppingCriteria(prompts)
    rest = torch.tensor([1, 2, 3]), None, lmdeploy.agent.ARExtraOutputs()
    lengths = {"model_inputs.sum_kv_seqlen": lambda s: int((s.model_inputs.history_lengths + 1).sum())}
    try:
        with watch(lmdeploy.ARStepInputs, after=["merge_prefill"], num_rows=lmdeploy.count, derived=lengths):
            step.merge_prefill(inputs, lmdeploy.agent.ARExtraInputs(), criteria, delta, *rest)
    except Violation as violation:
        return str(violation)
    return ""


def scheduler_of(**options: Any) -> Any:
    """LMDeploy's scheduler over a few blocks."""
    return lmdeploy_pools.module.Scheduler(
        lmdeploy_pools.config.SchedulerConfig(max_batches=8, max_session_len=256),
        lmdeploy_pools.config.CacheConfig(
            max_batches=8, block_size=BLOCK, num_cpu_blocks=0, num_gpu_blocks=BLOCKS, **options
        ),
        seq_meta=lmdeploy_pools.messages.SequenceMeta(BLOCK, strategy=lmdeploy_pools.sequences.ARSequenceStrategy()),
    )


def window_blocks() -> str:
    """`can_allocate` counts blocks that leave the window, `allocate` uses some of them, raises, and loses the rest."""
    scheduler = scheduler_of(window_size=2 * BLOCK)
    manager, sequence = scheduler.block_manager, scheduler.add_session(0).add_sequence(np.arange(BLOCKS * BLOCK))
    manager.allocate(sequence)
    sequence.update_token_ids(np.array([1]), mode=lmdeploy_pools.messages.UpdateTokenMode.PREFILL)
    sequence.update_token_ids(np.arange(3 * BLOCK))  # the next prompt of the session
    said = manager.can_allocate(sequence)
    lost = ""
    try:
        with watch_pages(
            type(manager),
            after=["allocate_msg", "free"],
            holders=lambda _: [sequence.logical_blocks.get_real_blocks()],
            free=lambda m: m.allocator._free_blocks[m.allocator._num_blocks - m.allocator._free_count :],
            num_pages=BLOCKS,
        ):
            try:
                manager.allocate(sequence)
            except MemoryError as error:
                lost = f"can_allocate says {said}, and allocate raises {error!r}"
            manager.free(sequence)
    except Violation as violation:
        return f"{lost}\n{violation}"
    return ""


def cache_order() -> str:
    """The prefix cache evicts by time of use, and keeps whole seconds: within one, it may evict what was used last."""
    wrong = 0
    for seed in range(RUNS):
        scheduler = scheduler_of(enable_prefix_caching=True)
        prompts = [np.full(BLOCK + 1, number) for number in range(4)]
        random.Random(seed).shuffle(prompts)
        for number, prompt in enumerate([*prompts, prompts[0]]):  # the first is used again, and so the newest
            scheduler.add_session(number).add_sequence(prompt)
            joined = scheduler.schedule(is_prefill=True).running
            scheduler.activate_seqs(joined)
            lmdeploy_pools.advance(joined, lmdeploy_pools.messages.UpdateTokenMode.PREFILL)
            scheduler.end_session(number)
        (root,) = scheduler.block_trie._roots.values()
        before = {id(node): node for node in root.children.values()}
        assert scheduler.block_trie.evict(1) == 1
        (gone,) = before.keys() - {id(node) for node in root.children.values()}
        wrong += not np.array_equal(before[gone].token_ids, prompts[1][:BLOCK])
    return f"in {wrong} of {RUNS} runs another prefix than the one that was used longest ago was evicted" * (wrong > 0)


FAULTS: dict[str, Callable[[], str]] = {
    fault.__name__: fault for fault in (logits_processors, sum_after_prefill, window_blocks, cache_order)
}


def main(names: Sequence[str]) -> int:
    """Shows each; 1 if one of them is not there any more."""
    gone = 0
    for name in names or FAULTS:
        fault = FAULTS[name]
        with checks("full"):
            shown = fault()
        print(f"{name}: {fault.__doc__}\n{shown or 'NOT SEEN'}\n")
        gone += not shown
    return int(gone > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
