"""The same requests served by transformers alone and with batchstate, and the host time of both."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, final

import attrs
import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, logger
from transformers.generation.continuous_batching.requests import RequestState

from batchstate import checks
from examples.transformers_batching.adoption import adopted

VOCABULARY, ENDS = 256, 12
PAGE_SIZE = 16
TURN = 20
"""Steps of one kind in a row, so that each finds its own caches warm, as in an engine."""


@final
@attrs.frozen
class Report:
    """The outcome.

    Attributes:
        device: that the model is on.
        requests, tokens: answered, and generated with batchstate.
        mismatches: requests whose tokens differ from those of transformers alone.
        violations: requests that ended with an error; `broken` is that of the first.
        batch_size: requests of the steps that were timed.
        host_us_per_step: CPU microseconds of the loop's thread for a decode step: scheduling, inputs, reading what was
            sampled and updating the requests, without the forward.
        original_us_per_step: the same of transformers alone.
        ratio: of the second to the first.
    """

    device: str
    requests: int
    tokens: int
    mismatches: int
    violations: int
    broken: str | None
    batch_size: int
    host_us_per_step: float
    original_us_per_step: float

    @property
    def ratio(self) -> float:
        """How many times less."""
        return self.original_us_per_step / self.host_us_per_step

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return attrs.asdict(self) | {"ratio": self.ratio}


def random_model(device: str, seed: int) -> Any:
    """A small model. In float64 the order of requests in a batch does not decide which token is the largest."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).to(device=device, dtype=torch.float64).eval()


def prompts_of(requests: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 90 tokens: some longer than a step takes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(ENDS, VOCABULARY, rng.integers(1, 91)).tolist() for _ in range(requests)]


def compare(requests: int, *, device: str, level: str, seed: int, batch_size: int = 64, steps: int = 300) -> Report:
    """Serves the requests twice, and times decode steps of both."""
    model, prompts = random_model(device, seed), prompts_of(requests, seed)
    with _quiet(), checks(level):
        expected = answers(model, prompts)
        with adopted():
            outputs = answers(model, prompts)
        ours, original = step_times(model, batch_size, steps)
    errors = [output.error or "no answer" for output in outputs if output is None or output.error]
    return Report(
        device=device,
        requests=len(outputs),
        tokens=sum(len(output.generated_tokens) for output in outputs),
        mismatches=sum(
            mine.generated_tokens != other.generated_tokens for mine, other in zip(outputs, expected, strict=True)
        ),
        violations=len(errors),
        broken=errors[0] if errors else None,
        batch_size=batch_size,
        host_us_per_step=ours,
        original_us_per_step=original,
    )


def answers(model: Any, prompts: list[list[int]], *, num_blocks: int = 120) -> list[Any]:
    """The answers of `generate_batch`: at most 40 tokens, or up to one of several tokens that end an answer."""
    asked = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=list(range(ENDS)), pad_token_id=0)
    settings = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=64,
        max_requests_per_batch=32,
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    outputs = model.generate_batch(
        prompts, generation_config=asked, continuous_batching_config=settings, progress_bar=False
    )
    return list(outputs.values())


# Host time


def step_times(model: Any, batch_size: int, steps: int) -> tuple[float, float]:
    """CPU microseconds of a decode step with batchstate, and of transformers alone: medians, `TURN` steps at a time."""
    processors = []
    for window in (adopted(), nullcontext()):
        with window:
            processors.append(decoding(model, batch_size, steps))
    times: list[list[float]] = [[], []]
    for _ in range(steps // TURN):
        for taken, processor in zip(times, processors, strict=True):
            taken += [step_time(processor, batch_size) for _ in range(TURN)]
    return float(np.median(times[0])), float(np.median(times[1]))


def decoding(model: Any, batch_size: int, steps: int) -> Any:
    """A batch processor whose requests' prompts are computed, with inputs as for FlashAttention: a block table."""
    blocks = (100 + steps) // PAGE_SIZE + 2
    settings = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=batch_size * blocks * 5 // 4,
        max_batch_tokens=4096,
        max_requests_per_batch=batch_size,
        allow_block_sharing=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    asked = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = ContinuousBatchingManager(model, asked, settings)
    # FlashAttention itself is what the forward would need, and no forward is run
    manager.continuous_batching_config.max_blocks_per_request = blocks
    implementation = model.config._attn_implementation
    model.config._attn_implementation_internal = "flash_attention_2"
    try:
        processor = manager._create_batch_processor()
    finally:
        model.config._attn_implementation_internal = implementation
    for number in range(batch_size):
        processor.scheduler.add_waiting_request(RequestState(f"request {number}", [7] * 100, max_new_tokens=None))
    while processor.scheduler.waiting_requests or not processor.inputs_and_outputs.use_block_table:
        step_time(processor, batch_size)
    return processor


def step_time(processor: Any, batch_size: int) -> float:
    """CPU microseconds of this thread for one turn of the loop, in which every request samples the token 7."""
    begin = time.thread_time_ns()
    if not processor.prepare_next_batch():
        raise RuntimeError("no batch was prepared")
    processor.inputs_and_outputs.get_model_kwargs()
    spent = time.thread_time_ns() - begin
    processor.inputs_and_outputs.output_ids[0, :batch_size] = 7  # in the place of forward and sampler
    begin = time.thread_time_ns()
    processor.inputs_and_outputs.retrieve_device_outputs()
    processor.update_batch()
    return (spent + time.thread_time_ns() - begin) / 1e3


@contextmanager
def _quiet() -> Iterator[None]:
    """A window without the warnings of transformers, which are about what this machine lacks."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
