"""Tokasaurus' manager as released: pages with a prefix tree, rows, and the inputs of each step, watched unmodified.

The driver does what `manager_loop` does, with queues of one process; what a model would answer is drawn. Requests begin
alike, so that blocks are shared, they are cancelled, and with few blocks they are bumped.
"""

import contextlib
import itertools
import queue
import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from batchstate.watch import watch, watch_pages, watch_slots
from benchmarks.adoption.checkouts import module_of

NAME = "tokasaurus"
manager = module_of(f"{NAME}.manager.manager", packages=[NAME])
types = module_of(f"{NAME}.manager.types", packages=[NAME])
allocators = module_of(f"{NAME}.manager.allocator", packages=[NAME])
inputs = module_of(f"{NAME}.manager.input_building", packages=[NAME])
model = module_of(f"{NAME}.model.types", packages=[NAME])
server = module_of(f"{NAME}.server.types", packages=[NAME])
ManagerState, ModelInput, BlockAllocator = types.ManagerState, model.ModelInput, allocators.BlockAllocator
PAGE, PAGES, ROWS, EOS = 4, 24, 64, 999
TOKENIZER = SimpleNamespace(decode_batch=lambda rows, **options: ["" for _ in rows])
types.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: SimpleNamespace(_tokenizer=TOKENIZER))
types.GenerationConfig = SimpleNamespace(from_pretrained=lambda *_, **options: SimpleNamespace(eos_token_id=EOS))
STATES: list[Any] = []
"""The state of the manager that runs: the inputs of a step name rows, and it knows whose they are."""


def running(state: Any) -> list[Any]:
    """Sequences that have blocks and a row."""
    return list(state.scheduling_queue.running_seqs())


def in_tree(state: Any) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The tokens up to the end of each block of the prefix tree, and the block."""
    nodes = [((), state.block_allocator.prefix_tree)]
    while nodes:
        prefix, node = nodes.pop()
        for contents, child in node.children.items():
            nodes.append(((*prefix, *contents), child))
            yield nodes[-1][0], child.idx


def contents(state: Any) -> dict[int, tuple[Any, ...]]:
    """The tokens up to the end of each block with a parent, as sequences say it, else as its parents do."""

    def prefix_of(block: Any) -> tuple[Any, ...]:
        return () if block.parent is None else (*prefix_of(block.parent), *block.contents)

    tokens = {block.idx: prefix_of(block) for block in state.block_allocator.all_blocks if block.parent is not None}
    for sequence in running(state):
        for at, block in enumerate(sequence.kv_indices[: sequence.prompt_total() // PAGE], 1):
            if block in tokens:
                tokens[block] = tuple(sequence.input_ids[: at * PAGE])
    return tokens


def unused(state: Any) -> list[Any]:
    """Blocks that no sequence has."""
    return [block for block in state.block_allocator.all_blocks if not block.seq_ids]


def leaves(state: Any) -> list[int]:
    """Blocks of the tree that may be taken."""
    return sorted(block.idx for block in unused(state) if block.parent is not None and not block.children)


def row_of(batch: Any) -> list[Any]:
    """The sequence of each token, by its row."""
    rows = {sequence.batch_index: sequence for sequence in running(STATES[-1])}
    return [rows[row] for row in batch.batch_indices]


def written(batch: Any) -> list[int]:
    """Where the keys and values of each token belong."""
    pairs = zip(row_of(batch), batch.position_ids, strict=True)
    return [sequence.kv_indices[at // PAGE] * PAGE + at % PAGE for sequence, at in pairs]


def prompts(batch: Any) -> list[int]:
    """The tokens of prompts that go through the model."""
    sequences, number = row_of(batch), len(batch.prefill_input_ids)
    return [sequences[at].input_ids[batch.position_ids[at]] for at in range(number)]


def sampled(field: str) -> Callable[[Any], list[Any]]:
    """A parameter of each token that is sampled."""

    def values(batch: Any) -> list[Any]:
        sequences = row_of(batch)
        wanted = [getattr(sequences[at].sampling_params, "top_p" if field == "top_p" else "temperature")
                  for at in batch.lm_head_indices]  # fmt: skip
        return [value == 0 for value in wanted] if field == "greedy_mask" else [value or 1.0 for value in wanted]

    return values


def pages(batch: Any) -> tuple[list[Any], list[Any]]:
    """What the attention kernels get of the prompts and of the other rows."""
    parts: list[list[Any]] = []
    prefilled = len(batch.prefill_input_ids)
    sequences = row_of(batch)
    for tokens in (range(prefilled), range(prefilled, len(sequences))):
        runs = [list(run) for _, run in itertools.groupby(tokens, lambda at: sequences[at].id)]
        ends = [batch.position_ids[run[-1]] + 1 for run in runs]
        tables = [sequences[run[0]].kv_indices[: -(-end // PAGE)] for run, end in zip(runs, ends, strict=True)]
        parts.append([
            [0, *itertools.accumulate(map(len, runs))], [0, *itertools.accumulate(map(len, tables))],
            [*itertools.chain(*tables)], [(end - 1) % PAGE + 1 for end in ends], len(runs), len(tokens),
        ])  # fmt: skip
    return parts[0], parts[1]


def sent(batch: Any) -> tuple[list[Any], list[Any]]:
    """The same, as it was made."""
    info = batch.attention_info_builder
    fields = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "num_seqs", "num_tokens")
    first, second = ([getattr(part, name) for name in fields] for part in (info.prefill_builder, info.decode_builder))
    return first, second


# fmt: off
def declare(**options: Any) -> contextlib.ExitStack:
    """The declaration: of blocks, of rows, and of the inputs of a step."""
    steps = [(manager, name) for name in ("schedule_steps", "finish_sequences", "try_cancelling_requests")]
    watches = contextlib.ExitStack()
    watches.enter_context(watch_pages(
        ManagerState, after=steps, holders=lambda s: [sequence.kv_indices for sequence in running(s)],
        free=lambda s: [block.idx for block in s.block_allocator.floating_blocks],
        cached=lambda s: [block.idx for block in unused(s) if block.parent is not None],
        references=lambda s: {block.idx: len(block.seq_ids) for block in s.block_allocator.all_blocks},
        num_pages="block_allocator.num_blocks", page_size="block_allocator.page_size",
        lengths=lambda s: [sequence.total_scheduled() - 1 for sequence in running(s)],
        keys=contents, index=lambda s: dict(in_tree(s)),
        counters={"block_allocator.num_free_blocks": lambda s: len(unused(s)),
                  lambda s: sorted(block.idx for block in s.block_allocator.available_leaves): leaves},
        **options))
    watches.enter_context(watch_slots(
        ManagerState, after=steps, live=lambda s: [sequence.batch_index for sequence in running(s)],
        free="batch_index_allocator.available_indices", size=ROWS, zero=True, **options))
    watches.enter_context(watch(
        ModelInput, after=[(manager, "seqs_to_input")], num_rows=lambda b: len(b.position_ids),
        rows=["batch_indices", "attention_info_builder.append_kv_token_indices"],
        derived={"attention_info_builder.append_kv_token_indices": written, "prefill_input_ids": prompts, sent: pages,
                 **{f"sampling_builder.{name}": sampled(name) for name in ("temperature", "top_p", "greedy_mask")}},
        **options))
    return watches
# fmt: on


def drive(seed: int, steps: int = 24, after_each: Callable[[Any], object] = id) -> None:
    """Requests come, end, are cancelled and bumped. Nothing is compared."""
    drawn, clock = random.Random(seed), itertools.count()
    allocators.time = SimpleNamespace(time=lambda: float(next(clock)))
    config = manager.ServerConfig(
        model="", tokenizer="", page_size=PAGE, kv_cache_num_tokens=PAGE * PAGES, max_tokens_per_forward=ROWS,
        max_seqs_per_forward=8, scheduling_steps_ahead=2, track_early_stopping=False, use_spec_allocation=False,
        bump_city_population_me=bool(seed % 2), prefill_round_up_multiple=1,
    )  # fmt: skip
    queues: list[Any] = [queue.Queue() for _ in range(4)]
    state = ManagerState(
        config, BlockAllocator(PAGES, PAGE), allocators.BatchIndexAllocator(ROWS), *queues, process_name="manager"
    )
    state.stats_tracker.reset()
    cancelled = set[str]()
    STATES[:] = [state]
    for number in range(steps):
        if drawn.random() < 0.6:
            prompt = [drawn.randrange(2)] * PAGE + [drawn.randrange(2) for _ in range(drawn.randrange(1, 9))]
            params = server.SamplingParams(drawn.choice([0.0, 0.5, 0.7]), 1.0)
            n = drawn.randrange(1, 3)
            request = server.TokasaurusRequest(f"r{number}", prompt, drawn.randrange(2, 12), params, [], n, False)
            state.q_server_to_manager.put(request)
        if drawn.random() < 0.1:
            name = f"r{drawn.randrange(number + 1)}"
            if name not in cancelled:  # as released a second time ends the manager
                cancelled.add(name)
                state.q_server_to_manager.put(server.CancelledRequest(name))
        for decision in list(state.inflight_schedule_decisions.values())[: drawn.randrange(3)]:
            ids = [drawn.choice([1, 2, 3, EOS]) for _ in decision.seqs_with_tokens_to_return]
            tensors = model.ModelOutputTensors(torch.tensor(ids, dtype=torch.int64))
            state.q_model_to_manager.put(model.ModelOutput(decision.id, tensors))
        manager.handle_new_server_commands(state)
        manager.handle_new_model_outputs(state)
        manager.try_cancelling_requests(state)
        ahead = config.scheduling_steps_ahead - state.num_inflight_batches
        if state.scheduling_queue.num_unfinished_seqs() and ahead > 0:
            manager.schedule_steps(state, ahead)
        after_each(seen(state))


def seen(state: Any) -> list[Any]:
    """Its sequences, blocks and rows, and the inputs of the steps that were sent."""
    blocks, rows = state.block_allocator, state.batch_index_allocator
    sequences = [
        [part, s.id, s.prompt_scheduled, s.completion_scheduled, s.batch_index, s.kv_indices]
        for part in ("decoding_seqs", "prefilling_seqs", "queued_seqs")
        for s in getattr(state.scheduling_queue, part).values()
    ]
    tree = [
        [b.idx, b.contents, sorted(b.seq_ids), b.last_used_at, b.parent and b.parent.idx] for b in blocks.all_blocks
    ]
    sent = []
    while not state.q_manager_to_model.empty():  # the ids of steps are random
        sent.append(re.sub(r"'[0-9a-f-]{36}'", "", str(state.q_manager_to_model.get_nowait())))
    lists = [b.idx for b in blocks.floating_blocks], sorted(b.idx for b in blocks.available_leaves)
    ids = sorted(map(str, state.finished_seq_ids)), sorted(state.req_ids_to_cancel), state.num_inflight_batches
    return [str(sequences), str(tree), lists, blocks.num_free_blocks, list(rows.available_indices), sent, ids]


DECLARED: dict[str, dict[str, Any]] = {"full": {}}


def endless(text: str) -> bool:
    """No statement keeps a loop from ending that the time of a call does not."""
    return False


KINDS = {
    "eviction order": ("last_used_at",),
    "less of a cached prefix is reused": (
        "self.update_prefix_tree(", "seq.prompt_scheduled = num_cached_prompt_tokens",
    ),
}  # fmt: skip


def apart(row: dict[str, Any]) -> str | None:
    """The kind of a deletion by which no block and no input of a step is wrong."""
    return next((kind for kind, texts in KINDS.items() if any(text in row["text"] for text in texts)), None)


TREE = ("add_floating", "update_prefix_tree", "free_and_update", "assign_block_to_seq", "allocate_up_to_length")
STEPS = ("finish_sequences", "real_allocate", "soft_allocate", "soft_deallocate", "try_cancelling_requests")
TARGETS = [(BlockAllocator, name, allocators) for name in (*TREE, "allocate_with_prefix_match")]
TARGETS += [(allocators.PrefixTreeBlock, name, allocators) for name in ("wipe", "detach_from_parent")]
TARGETS += [
    (allocators, "pick_blocks_for_allocation", allocators),
    (allocators.BatchIndexAllocator, "free", allocators),
]
TARGETS += [(ManagerState, "deallocate", types), (types.SchedulingQueue, "insert_at_head_of_queued", types)]
TARGETS += [(manager, name, manager) for name in STEPS]
TARGETS += [(manager, "allocate_tokens_for_decode_bumping_seqs_if_necessary", manager)]
TARGETS += [(manager, "seqs_to_input", inputs), (model.PageInformationBuilder, "add_sequence", model)]
TARGETS += [(model.BatchSamplingParamsBuilder, "add_sequence", model)]
"""Methods and functions whose statements are deleted, one at a time."""
