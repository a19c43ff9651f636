"""transformers' continuous batching, preparing a decode step, against the same inputs made by a `StepPlanner`.

Its own scheduler, cache and processor prepare the step, synchronously, in the way that goes with FlashAttention: a
block table and no mask. The forward that would read them is not run, so the model is a configuration only. Theirs is
set back after each step, and no request needs a new block. Ours decodes on, takes pages as they begin, and also
publishes the tokens that were sampled, for the step after.
"""

import logging
import queue
from types import SimpleNamespace
from typing import Any, cast, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batch import Batch
from batchstate.columns import mirrored, slot_column
from batchstate.forward.inputs import ForwardInputs
from batchstate.future_map import FutureMap, relay_field
from batchstate.kv.pages import PagePool
from batchstate.levels import Level
from batchstate.pools import SlotPool
from batchstate.runtime import Runtime
from batchstate.step import StepPlanner
from benchmarks.comparisons import Absent, Comparison, require_equal
from benchmarks.peers.installed import named, or_absent, peer, theirs
from benchmarks.timing import Contender

Ints = npt.NDArray[np.int64]

PAGE_SIZE = 16
CONTEXT = 100
"""Tokens of each request; no multiple of the page size, so that the next token needs no new page."""
LONGEST = 256
"""Tokens at which our requests leave, and as many arrive."""
OURS = "StepPlanner, checks"
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
    """Inputs of the forward of a decode step."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


@final
@attrs.frozen(eq=False)
class Prepared:
    """A step of ours.

    Attributes:
        inputs: of the forward.
        kv_start_loc: int32[requests + 1], on the device.
        block_table: int32[requests, pages], on the device; it stays there until a page begins.
    """

    inputs: ForwardInputs
    kv_start_loc: torch.Tensor
    block_table: torch.Tensor


@final
class OurStep:
    """The requests, their pages, and the tokens that they sample."""

    def __init__(self, runtime: Runtime, tokens: Ints) -> None:
        num_requests = len(tokens)
        self._runtime, self._tokens = runtime, tokens
        self._slots = SlotPool(runtime, 2 * num_requests)
        self._pages = PagePool(
            runtime,
            self._slots,
            2 * num_requests * (LONGEST // PAGE_SIZE),
            PAGE_SIZE,
            max_tokens_per_request=LONGEST,
            req_to_token=self._slots.table("req_to_token", (LONGEST,), torch.int32, holds="location"),
        )
        self._relay = FutureMap(self._slots, {"last_token": relay_field(torch.int64)})
        self._planner = StepPlanner(Running, pages=self._pages, relay=self._relay, ids="last_token")
        self._sampled = torch.from_numpy(tokens.copy()).to(runtime.device)
        self._batch: Running | None = None
        self._table: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """All leave. Others arrive with a prompt whose KV is there, and with their first token."""
        if self._batch is not None:
            self._pages.release_requests(self._batch.slots, after=None)
        lens = np.full(len(self._tokens), CONTEXT, dtype=np.int64)
        slots = self._pages.take_requests(lens)
        self._pages.entry(slots).launch()
        self._relay.publish(slots, last_token=self._tokens)
        self._batch = Running.build(self._runtime, slots=slots, seq_lens=lens)
        self._lens, self._table = lens, None

    def step(self) -> Prepared:
        """One token of each request goes in: all that the forward reads, in one copy."""
        self._runtime.next_step()
        if self._lens[0] == LONGEST:
            self.begin()
        batch = cast(Running, self._batch)
        begins = self._table is None or bool((self._lens % PAGE_SIZE == 0).any())
        self._lens = self._lens + 1
        starts = np.zeros(self._lens.size + 1, dtype=np.int32)
        np.cumsum(self._lens, out=starts[1:])
        extras = {"kv_start_loc": starts}
        if begins:
            slots = batch.slots
            self._pages.grow(slots, self._lens)
            width = -(-int(self._lens.max()) // PAGE_SIZE)
            extras["block_table"] = self._pages.page_table[slots.np, :width].astype(np.int32)
        step = self._planner.plan(batch, extras=extras)
        if begins:
            self._table = step.extras["block_table"]
        inputs = step.inputs()
        step.publish(last_token=self._sampled)
        self._batch = cast(Running, step.batch)
        return Prepared(inputs, step.extras["kv_start_loc"], cast(torch.Tensor, self._table))


@final
class RealProcessor:
    """`ContinuousBatchProcessor` with requests that decode.

    Attributes:
        inputs: its static tensors.
    """

    def __init__(self, tokens: Ints, device: torch.device) -> None:
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
                self._processor = _processor(modules, len(tokens), device)
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
        while not all(state.generated_len() for state in self._active()) or not self._active():
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
        real = RealProcessor(tokens, runtime.device)
        ours = {level: OurStep(runtime, tokens) for level in (Level.CHEAP, Level.OFF)}

        def verify() -> None:
            real.step()
            for way in ours.values():
                way.begin()
                _require_equal_inputs(way, real.inputs)

        return Comparison(
            task=task,
            ours=[Contender(f"{OURS} {level.value}", way.step, level) for level, way in ours.items()],
            baselines=[Contender(name, real.step)],
            verify=verify,
            target=TARGETS.get(num_requests),
        )

    return or_absent(task, f"{OURS} {Level.CHEAP.value}", name, make)


def _require_equal_inputs(ours: OurStep, inputs: Any) -> None:
    """The inputs are the same; which blocks a request has is for each side to choose, but not how many, nor twice."""
    step = ours.step()
    num_requests = step.inputs.plan.num_reqs
    pairs = {
        "ids": (step.inputs.input_ids, inputs.input_ids[:num_requests]),
        "positions": (step.inputs.positions, inputs.position_ids[:num_requests]),
        "query_start_loc": (step.inputs.query_start_loc, inputs.cumulative_seqlens_q[: num_requests + 1]),
        "kv_start_loc": (
            step.kv_start_loc,
            inputs.cumulative_seqlens_k["full_attention"][: num_requests + 1],
        ),
        "indices of logits": (step.inputs.last_token_indices, inputs.logits_indices[:num_requests]),
    }
    for name, (mine, other) in pairs.items():
        require_equal(name, mine.cpu().to(torch.int32), other.cpu().to(torch.int32))
    ours_table = step.block_table.cpu().numpy()
    their_table = inputs.block_table[0, :num_requests].cpu().numpy()
    ours_used, theirs_used = ours_table > 0, their_table >= 0
    require_equal("blocks of each request", ours_used.sum(axis=1), theirs_used.sum(axis=1))
    require_equal("blocks in all", np.unique(ours_table[ours_used]).size, np.unique(their_table[theirs_used]).size)


def _processor(modules: Any, num_requests: int, device: torch.device) -> Any:
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
        device,
    )
    # both are switched off where FlashAttention is missing, which only the forward would need
    settings.max_blocks_per_request, config._attn_implementation = blocks, "flash_attention_2"
    alone = modules.distributed.DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    cache = modules.cache.PagedAttentionCache(config, settings, device, alone, torch.float32)
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
        model_device=device,
        model_dtype=torch.float32,
        scheduler=modules.scheduler.FIFOScheduler(cache, settings.safety_margin, settings.max_requests_per_batch),
        distributed_helper=alone,
    )
