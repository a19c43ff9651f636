"""transformers' continuous batching, preparing a decode step, against the same inputs made from batch and pages.

Its own scheduler, cache and processor prepare the step, synchronously, in the way that goes with FlashAttention: a
block table and no mask. The forward that would read them is not run, so the model is a configuration only. No request
needs a new block.
"""

import logging
import queue
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch, Extras
from batchstate.columns import mirrored, slot_column
from batchstate.forward.plan import ForwardPlan
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from benchmarks.comparisons import Absent, Comparison, require_equal
from benchmarks.peers.installed import named, or_absent, peer, theirs
from benchmarks.timing import Contender

Ints = npt.NDArray[np.int64]

PAGE_SIZE = 16
CONTEXT = 100
"""Tokens of each request; no multiple of the page size, so that the next token needs no new page."""
OURS = "batch, pages and plan, checks"
MODULES = (
    "cache",
    "cb_logits_processors",
    "continuous_api",
    "distributed",
    "initialization",
    "requests",
    "scheduler",
)


class Running(Batch):
    """What the forward of a decode step needs of its requests."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    last_tokens = mirrored(torch.int64)


@final
class OurStep:
    """The requests, their pages, and the tokens that they sampled last."""

    def __init__(self, runtime: Runtime, tokens: Ints) -> None:
        num_requests = len(tokens)
        pool = SlotPool(runtime, num_requests)
        num_pages = num_requests * (CONTEXT // PAGE_SIZE + 1)
        self.pages = PagePool(runtime, pool, num_pages, PAGE_SIZE, max_tokens_per_request=CONTEXT + PAGE_SIZE)
        slots = pool.take(num_requests)
        self._lens = np.full(num_requests, CONTEXT, dtype=np.int64)
        self.pages.extend(slots, self._lens)
        self._tokens = tokens
        self._batch = Running.build(runtime, slots=slots, seq_lens=self._lens, last_tokens=np.zeros_like(tokens))

    def step(self) -> tuple[Running, Extras]:
        """Tokens in, lengths and pages one on, all that the forward reads in one copy; then the pages back again."""
        batch = self._batch.replace(last_tokens=self._tokens).advance("seq_lens", 1)
        self.pages.advance(batch.slots)
        plan = ForwardPlan.of(batch.slots, batch.seq_lens, pages=self.pages, layouts="flash_attention")
        uploaded = batch.upload(extras=plan.extras)
        self.pages.truncate(batch.slots, self._lens)
        return batch, uploaded


@final
class RealProcessor:
    """`ContinuousBatchProcessor` with requests that decode.

    Attributes:
        inputs: its static tensors.
    """

    def __init__(self, tokens: Ints, place: torch.device) -> None:
        modules = SimpleNamespace(
            **{name: peer("transformers", f"transformers.generation.continuous_batching.{name}") for name in MODULES}
        )
        modules.configuration = peer("transformers", "transformers.generation.configuration_utils")
        modules.models = peer("transformers", "transformers.models.llama.configuration_llama")
        modules.processors = peer("transformers", "transformers.generation.logits_process")
        logger = logging.getLogger(modules.continuous_api.logger.name)
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # it reports that there is no psutil, which is not needed here
        try:
            with theirs("continuous batching of transformers"):
                self._processor = _processor(modules, len(tokens), place)
                self._prefill(modules, len(tokens))
        finally:
            logger.setLevel(level)
        self._states = [(state, [token]) for state, token in zip(self._active(), tokens.tolist(), strict=True)]
        self.inputs = self._processor.inputs_and_outputs

    def _active(self) -> list[Any]:
        return list(self._processor.scheduler.active_requests.values())

    def _prefill(self, modules: Any, num_requests: int) -> None:
        state = modules.requests.RequestState
        for i in range(num_requests):
            self._processor.scheduler.add_waiting_request(state(f"request {i}", list(range(1, CONTEXT + 1))))
        while not all(one.generated_len() for one in self._active()) or not self._active():
            if not self._processor.prepare_next_batch():
                raise RuntimeError("no batch was prepared for the prompts")
            self._processor.update_batch()

    def step(self) -> None:
        """Sets each request back to its last token, about one thousandth of the time, and prepares the step."""
        for state, tokens in self._states:
            state.position_offset = CONTEXT
            state.tokens_to_process = tokens
        self._processor.prepare_next_batch()


TARGETS = {64: 12.0, 256: 35.0}
"""The least ratio for so many requests."""


def against_continuous_batching(runtime: Runtime, *, num_requests: int = 256) -> Comparison | Absent:
    """Ids, positions, cumulative lengths, indices of logits and block table of a decode step."""
    task = f"inputs of a decode step, {num_requests:,} requests"
    name = named("transformers", "transformers", "continuous batching, synchronous")

    def make() -> Comparison:
        tokens = np.random.default_rng(num_requests).integers(1, 64, num_requests)
        real, ours = RealProcessor(tokens, runtime.device), OurStep(runtime, tokens)

        def verify() -> None:
            real.step()
            _require_equal_inputs(ours, real.inputs)

        return Comparison(
            task=task,
            ours=[Contender(f"{OURS} {level.value}", ours.step, level) for level in (Level.CHEAP, Level.OFF)],
            baselines=[Contender(name, real.step)],
            verify=verify,
            target=TARGETS.get(num_requests),
        )

    return or_absent(task, f"{OURS} {Level.CHEAP.value}", name, make)


def _require_equal_inputs(ours: OurStep, inputs: Any) -> None:
    """The inputs are the same; which blocks a request has is for each side to choose, but not how many, nor twice."""
    batch, uploaded = ours.step()
    num_requests = len(batch)
    pairs = {
        "ids": (batch.last_tokens.device, inputs.input_ids[:num_requests]),
        "positions": (uploaded["positions"], inputs.position_ids[:num_requests]),
        "query_start_loc": (uploaded["query_start_loc"], inputs.cumulative_seqlens_q[: num_requests + 1]),
        "kv_start_loc": (
            uploaded["kv_start_loc"],
            inputs.cumulative_seqlens_k["full_attention"][: num_requests + 1],
        ),
        "indices of logits": (uploaded["last_token_indices"], inputs.logits_indices[:num_requests]),
    }
    for name, (mine, other) in pairs.items():
        require_equal(name, mine.cpu().to(torch.int32), other.cpu().to(torch.int32))
    ours_table = uploaded["block_table"].cpu().numpy()
    their_table = inputs.block_table[0, :num_requests].cpu().numpy()
    ours_used, theirs_used = ours_table > 0, their_table >= 0
    require_equal("blocks of each request", ours_used.sum(axis=1), theirs_used.sum(axis=1))
    require_equal("blocks in all", np.unique(ours_table[ours_used]).size, np.unique(their_table[theirs_used]).size)


def _processor(modules: Any, num_requests: int, place: torch.device) -> Any:
    config = modules.models.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
        vocab_size=64,
    )
    blocks = CONTEXT // PAGE_SIZE + 1
    settings = modules.initialization.resolve_continuous_batching_config(
        config,
        modules.configuration.ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=num_requests * (blocks + 1),
            max_batch_tokens=max(num_requests, 4_096),
            max_requests_per_batch=num_requests,
            allow_block_sharing=False,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
        None,
        False,
        place,
    )
    # both are switched off where FlashAttention is missing, which only the forward would need
    settings.max_blocks_per_request, config._attn_implementation = blocks, "flash_attention_2"
    alone = modules.distributed.DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    cache = modules.cache.PagedAttentionCache(config, settings, place, alone, torch.float32)
    return modules.continuous_api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=modules.configuration.GenerationConfig(do_sample=False),
        continuous_batching_config=settings,
        logit_processor=modules.cb_logits_processors.ContinuousBatchingLogitsProcessorList(
            modules.processors.LogitsProcessorList()
        ),
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=modules.continuous_api.OutputRouter(),
        background_thread_status=modules.continuous_api.BackgroundThreadStatus(),
        model_device=place,
        model_dtype=torch.float32,
        scheduler=modules.scheduler.FIFOScheduler(cache, settings.safety_margin, settings.max_requests_per_batch),
        distributed_helper=alone,
    )
