"""Batching of transformers as installed, without a model: scheduler and allocators watched, histories drawn."""

import contextlib
import logging
import queue
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchstate import Violation
from batchstate.levels import checks
from batchstate.violations import Code
from batchstate.watch import Watched, WatchedPool, watch, watch_pages

FOLDER = "transformers.generation.continuous_batching"
pytest.importorskip(
    f"{FOLDER}.cache_allocators", reason="the declaration is of allocators that this transformers does not have"
)

from transformers import GenerationConfig, LlamaConfig  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as caches  # noqa: E402
from transformers.generation.continuous_batching import cb_logits_processors, continuous_api  # noqa: E402
from transformers.generation.continuous_batching.cache_allocators import cache_allocator  # noqa: E402
from transformers.generation.continuous_batching.distributed import DistributedHelper  # noqa: E402
from transformers.generation.continuous_batching.initialization import (  # noqa: E402
    resolve_continuous_batching_config,
)
from transformers.generation.continuous_batching.requests import RequestState  # noqa: E402
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler  # noqa: E402
from transformers.generation.logits_process import LogitsProcessorList  # noqa: E402

PAGE_SIZE, NUM_BLOCKS, MAX_TOKENS, MAX_REQUESTS = 16, 24, 48, 4
CPU = torch.device("cpu")

History = list[tuple[str, int]]
"""What happens: a request arrives with so many blocks of prompt, one of those that are there is cancelled, a step."""

HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 70)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=4,
    max_size=30,
)


def processor_of(kind: type[Scheduler]) -> Any:
    """The batching of one manager, without its model and its thread."""
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, vocab_size=64
    )
    wanted = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=MAX_TOKENS,
        max_requests_per_batch=MAX_REQUESTS,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    given: Any = resolve_continuous_batching_config(config, wanted, None, False, CPU)
    config._attn_implementation = "sdpa"
    alone = DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    cache = caches.PagedAttentionCache(config, given, CPU, alone, torch.float32)
    processors: Any = cb_logits_processors.ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    api: Any = continuous_api
    return api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=GenerationConfig(do_sample=False),
        continuous_batching_config=given,
        logit_processor=processors,
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=api.OutputRouter(),
        background_thread_status=api.BackgroundThreadStatus(),
        model_device=CPU,
        model_dtype=torch.float32,
        scheduler=kind(cache, None, MAX_REQUESTS),
        distributed_helper=alone,
    )


def drive(kind: type[Scheduler], history: History) -> int:
    """Lives through a history, then until all requests are over; how many steps there were."""
    processor, number, steps = processor_of(kind), 0, 0
    scheduler = processor.scheduler

    def step() -> bool:
        nonlocal steps
        if not processor.prepare_next_batch():
            return False
        processor.update_batch()
        steps += 1
        return True

    for what, n in [*history, ("step", 100)]:
        if what == "arrive":
            prompt = [token % 7 for token in range(n)]  # equal beginnings, which share blocks
            scheduler.add_waiting_request(RequestState(f"request {number}", prompt, max_new_tokens=1 + n % 5))
            number += 1
        elif what == "cancel":
            known = [*scheduler.active_requests, *scheduler.waiting_requests]
            if known:
                scheduler.set_request_cancellation(known[n % len(known)])
        else:
            for _ in range(n):
                if not step():
                    break
    assert not scheduler.has_pending_requests()
    return steps


@contextlib.contextmanager
def watched(kind: type[Scheduler]) -> Iterator[list[Watched | WatchedPool]]:
    """The declarations, of scheduler and allocators."""
    with contextlib.ExitStack() as stack:
        found: list[Watched | WatchedPool] = [
            watch(
                kind,
                after=["add_waiting_request", "schedule_batch", "finish_request", "clear_cancelled_requests"],
                num_rows=lambda one: len(one.active_requests) + 1,
                derived={
                    "waiting_requests_order": lambda one: deque(one.waiting_requests),
                    "active_requests": lambda one: {
                        name: state for name, state in one.active_requests.items() if name not in one.waiting_requests
                    },
                },
            )
        ]
        found += [
            watch_pages(
                allocator,
                after=["allocate_cache_to_request", "free_blocks", "acquire_prefix_blocks", "mark_complete_blocks"],
                holders=lambda pool: pool.block_table.values(),
                free=lambda pool: [
                    leaf for leaves in pool.pool._free_blocks[pool.index].trees.values() for leaf in leaves
                ],
                references=lambda pool: pool.ledger.shared_ref_counts,
                cached="ledger.cached_blocks",
            )
            for allocator in set(caches.ATTN_TYPE_TO_ALLOCATOR.values())
        ]
        for one in found:
            stack.enter_context(one)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield found


@pytest.mark.parametrize("name", sorted(SCHEDULER_MAPPING))
def test_its_batching_is_clean(name: str) -> None:
    """Drawn histories of arrivals, cancellations and steps: every queue and every block is as it should be."""
    steps = 0

    @settings(max_examples=30, deadline=None, derandomize=True)  # the count below would depend on what is drawn
    @example([("arrive", 40), ("arrive", 40), ("step", 2), ("cancel", 0), ("arrive", 65), ("step", 3)])
    @given(HISTORIES)
    def go(history: History) -> None:
        nonlocal steps
        steps += drive(SCHEDULER_MAPPING[name], history)

    with checks("full"), watched(SCHEDULER_MAPPING[name]) as watching:
        go()
    scheduler, *allocators = watching
    assert steps > 50
    assert scheduler.counters.checked > 50
    assert sum(one.counters.checked for one in allocators) > 50


def test_a_cancelled_request_that_stays_in_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that forgets the order of the waiting requests is named by class, method and attribute."""

    def cancel(self: Any) -> list[Any]:
        names, self._requests_to_cancel = self._requests_to_cancel, set()
        for name in names:
            self.cache.free_blocks(name)
        return [self.active_requests.pop(name, None) or self.waiting_requests.pop(name) for name in names]

    monkeypatch.setattr(Scheduler, "clear_cancelled_requests", cancel)
    kind = SCHEDULER_MAPPING["fifo"]
    history = [("arrive", 40), ("arrive", 40), ("cancel", 1), ("step", 1)]
    with checks("full"), watched(kind), pytest.raises(Violation) as caught:
        drive(kind, history)
    violation = caught.value
    assert (violation.code, violation.object) == (Code.DERIVED_STALE, kind.__name__)
    assert (violation.column, violation.operation) == ("waiting_requests_order", "after clear_cancelled_requests")


def test_a_lost_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared block that is acquired without a reference is found in the call that acquires it."""

    def acquire(self: Any, block: int) -> None:
        self.cached_blocks.pop(block, None)  # and nothing, where another request has it

    monkeypatch.setattr(cache_allocator.BlockLedger, "acquire", acquire)
    kind = SCHEDULER_MAPPING["fifo"]
    with checks("full"), watched(kind), pytest.raises(Violation) as caught:
        drive(kind, [("arrive", 69), ("step", 3), ("arrive", 69), ("step", 2)])
    assert caught.value.code is Code.PAGE_OWNER
    assert caught.value.operation in ("after acquire_prefix_blocks", "after mark_complete_blocks")
