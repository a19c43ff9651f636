"""LMDeploy's `Scheduler` as released, with its blocks, prefix cache and states, watched: nothing of it is changed."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from batchstate.watch import WatchedPool, watch_pages
from benchmarks.adoption.checkouts import module_of

PACKAGES = ["lmdeploy", "lmdeploy.pytorch"]
module = module_of("lmdeploy.pytorch.paging.scheduler", packages=PACKAGES)
config = module_of("lmdeploy.pytorch.config", packages=PACKAGES)
messages = module_of("lmdeploy.pytorch.messages", packages=PACKAGES)
sequences = module_of("lmdeploy.pytorch.strategies.ar.sequence", packages=PACKAGES)
blocks = module_of("lmdeploy.pytorch.paging.block_manager.base_block_manager", packages=PACKAGES)
default = module_of("lmdeploy.pytorch.paging.block_manager.default_block_manager", packages=PACKAGES)
tries = module_of("lmdeploy.pytorch.paging.block_trie.trie", packages=PACKAGES)
kv = module_of("lmdeploy.pytorch.paging.block_trie.kv_lifecycle", packages=PACKAGES)
states = module_of("lmdeploy.pytorch.paging.seq_states.states", packages=PACKAGES)
BLOCK, BLOCKS = 4, 24


def in_trie(scheduler: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """The tokens up to the end of each block of the prefix cache, and the block."""
    nodes = [((), root) for root in scheduler.block_trie._roots.values()]
    while nodes:
        prefix, parent = nodes.pop()
        for node in parent.children.values():
            nodes.append(((*prefix, *node.token_ids.tolist()), node))
            yield nodes[-1][0], node.block_id


def contents(scheduler: Any) -> dict[int, tuple[int, ...]]:
    """The tokens up to the end of each block of the prefix cache, by the sequences that have it."""
    tokens = {block: prefix for prefix, block in in_trie(scheduler)}
    for sequence in all_sequences(scheduler):
        for at, block in enumerate(sequence.logical_blocks.get_real_blocks().tolist(), 1):
            if block in tokens:
                tokens[block] = tuple(sequence.history_cache[: at * BLOCK].tolist())
    return tokens


def all_sequences(scheduler: Any) -> list[Any]:
    """The sequences of all sessions."""
    return list(scheduler.seq_manager.get_all_sequences())


def free_blocks(scheduler: Any) -> Any:
    """The blocks that can be handed out."""
    allocator = scheduler.block_manager.allocator
    return allocator._free_blocks[allocator._num_blocks - allocator._free_count :]


def physical_free(scheduler: Any) -> list[int]:
    """The blocks of memory that can be handed out."""
    physical = scheduler.block_manager.allocator._gpu_allocator
    return sorted(physical._free_blocks[physical._num_blocks - physical._free_count :].tolist())


def physical_unused(scheduler: Any) -> list[int]:
    """The blocks of memory that no block with a holder is mapped to."""
    memory = scheduler.block_manager.allocator._log_mem
    return sorted(set(range(BLOCKS)) - set(memory.phy_map[memory.ref_count > 0].tolist()))


def alive(scheduler: Any) -> list[int]:
    """The sequences that the scheduler knows."""
    return sorted(sequence.seq_id for sequence in all_sequences(scheduler))


def in_sessions(scheduler: Any) -> list[int]:
    """The sequences of all sessions."""
    return sorted(number for session in scheduler.sessions.values() for number in session.sequences)


def in_use(scheduler: Any) -> list[int]:
    """The blocks of all sequences."""
    return [block for sequence in all_sequences(scheduler) for block in sequence.logical_blocks.get_real_blocks()]


def only_cached(scheduler: Any) -> list[int]:
    """Blocks that the prefix cache has alone."""
    return sorted({block for _, block in in_trie(scheduler)} - set(in_use(scheduler)))


def held_by_cache(scheduler: Any) -> list[int]:
    """How many holders are recorded of blocks that the prefix cache has alone."""
    counts = scheduler.block_manager.allocator._log_mem.ref_count
    return [int(counts[block]) for block in only_cached(scheduler)]


# fmt: off
def declare(**options: Any) -> WatchedPool:
    """The declaration."""
    return watch_pages(
        module.Scheduler, after=["schedule", "schedule_running", "end_session", "stop_session"],
        holders=lambda s: [*(seq.logical_blocks.get_real_blocks() for seq in all_sequences(s)),
                           *([block] for _, block in in_trie(s) if block in in_use(s))],
        cached=only_cached,
        free=free_blocks, references=lambda s: dict(enumerate(s.block_manager.allocator._log_mem.ref_count.tolist())),
        num_pages=BLOCKS, page_size=BLOCK,
        lengths=lambda s: [seq.num_history_ids if seq.status.name == "RUNNING" else 0 for seq in all_sequences(s)],
        keys=contents, index=lambda s: dict(in_trie(s)),
        counters={held_by_cache: lambda s: [1] * len(only_cached(s)), physical_free: physical_unused,
                  alive: in_sessions},
        **options)
# fmt: on


def drive(seed: int, steps: int = 24, after_each: Callable[[Any], object] = id) -> Any:
    """Sessions begin and end, prompts begin alike, blocks run out. Nothing is compared."""
    drawn = random.Random(seed)
    scheduler = module.Scheduler(
        config.SchedulerConfig(max_batches=4, max_session_len=64),
        config.CacheConfig(
            max_batches=4, block_size=BLOCK, num_cpu_blocks=0, num_gpu_blocks=BLOCKS, enable_prefix_caching=True
        ),
        seq_meta=messages.SequenceMeta(BLOCK, strategy=sequences.ARSequenceStrategy()),
    )
    running: list[Any] = []
    for number in range(steps):
        if drawn.random() < 0.5:
            prompt = [drawn.randrange(2)] * BLOCK + [drawn.randrange(2) for _ in range(drawn.randrange(1, 9))]
            scheduler.add_session(number).add_sequence(np.array(prompt))
        if scheduler.has_waiting() and drawn.random() < 0.7:
            joined = scheduler.schedule(is_prefill=True).running
            scheduler.activate_seqs(joined)
            advance(joined, messages.UpdateTokenMode.PREFILL)
            running += joined
        elif running:
            valid = scheduler.schedule_running(running, prealloc_size=1)
            running = [sequence for sequence, is_valid in zip(running, valid, strict=True) if is_valid]
            advance(running, messages.UpdateTokenMode.DECODE)
        for sequence in [sequence for sequence in running if drawn.random() < 0.15]:
            running.remove(sequence)
            scheduler.end_session(sequence.session.session_id)
        after_each(seen(scheduler))
    for session in list(scheduler.sessions):
        scheduler.end_session(session)
    after_each(seen(scheduler))
    return scheduler


def advance(running: list[Any], mode: Any) -> None:
    """A token for each."""
    for sequence in running:
        sequence.update_token_ids(np.array([sequence.seq_id % 2]), mode=mode)


def seen(scheduler: Any) -> Any:
    """What its blocks are, without times and objects that name each other."""
    allocator = scheduler.block_manager.allocator
    tables = [
        (sequence.seq_id, str(sequence.status), sequence.num_history_ids, sequence.logical_blocks.get_real_blocks())
        for sequence in all_sequences(scheduler)
    ]
    memory = allocator._log_mem
    held = memory.phy_map[memory.ref_count > 0], memory.ref_count
    physical = allocator._gpu_allocator
    gpu = physical._free_blocks[physical._num_blocks - physical._free_count :], physical._free_count
    return [tables, free_blocks(scheduler), *held, gpu, sorted(in_trie(scheduler))]


DECLARED: dict[str, dict[str, Any]] = {"full": {}}


def endless(text: str) -> bool:
    """No statement keeps a loop from ending that the time of a call does not."""
    return False


LESS_REUSED = (
    "self._extend_trie_path(seq, node, num_complete_blocks)",
    "self._match_block_prefix(seq)",
    "matched_nodes.append(child)",
    "self.block_trie.allocate(seq)",
)


def apart(row: dict[str, Any]) -> str | None:
    """The kind of a deletion by which no block is wrong."""
    if any(word in row["text"] for word in ("stats", "access_time", "heap")):
        return "eviction order or a statistic"
    return "less of a cached prefix is reused" if row["text"] in LESS_REUSED else None


TARGETS = [(blocks.LogicalAllocator, name, blocks) for name in ("allocate", "free", "add_ref_count")]
TARGETS += [(blocks.PhysicalAllocator, name, blocks) for name in ("allocate", "free")]
TARGETS += [(blocks.BaseBlockManager, name, blocks) for name in ("truncate", "allocate")]
TARGETS += [(default.DefaultBlockManager, name, default) for name in ("allocate_msg", "free")]
TARGETS += [(tries.BlockTrie, name, tries) for name in ("_extend_trie_path", "allocate", "evict", "match")]
TARGETS += [(tries.BlockTrie, name, tries) for name in ("_match_block_prefix", "_ensure_attached_allocation_cursor")]
TARGETS += [(states.SequenceLifecycle, name, states) for name in ("release_paging_resources", "remove_sequence")]
TARGETS += [(module.Scheduler, name, module) for name in ("schedule_running", "preempt_seqs", "end_session")]
"""Methods whose statements are deleted, one at a time."""
