"""Adapters of transformers, nothing of which is changed: continuous batching, and `generate` in padded batches."""

import contextlib
import logging
import queue
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from batchstate.testing.exact import EngineUnderTest, ExactModel, ExactSpec, Request, Verifier
from examples.exact.transformers_model import ExactLM

continuous_api.logger.setLevel(logging.CRITICAL)


@final
class ContinuousBatching:
    """Continuous batching, one turn of its own loop a step; see `batchstate.testing.exact.Adapter`."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        lm = ExactLM(model, verifier).eval()
        lm.requests = self._batch
        self.manager = ContinuousBatchingManager(
            lm,
            GenerationConfig(max_new_tokens=32, do_sample=settings["sample"], eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=settings["page_size"],
                num_blocks=-(-settings["kv_tokens"] // settings["page_size"]),
                max_batch_tokens=settings["step_tokens"],
                max_requests_per_batch=settings["max_running"],
                allow_block_sharing=settings["sharing"],
                scheduler_type=settings["scheduler"],
                use_cuda_graph=False,
                use_async_batching=False,
                max_memory_percent=0.5,
            ),
        )
        self.processor = self.manager._create_batch_processor()
        self.manager.batch_processor = self.processor  # as its thread would; a thread would step when it pleases
        self.manager.current_batch = 0
        self._seen: dict[int, int] = {}

    def _batch(self) -> list[int]:
        return [int(row.state.request_id) for row in self.processor.inputs_and_outputs.requests_in_batch]

    def add(self, request: Request) -> None:
        """A request arrives."""
        self._seen[request.number] = 0
        self.manager.add_request(
            list(request.prompt), str(request.number), max_new_tokens=request.max_new_tokens, streaming=True,
            eos_token_id=-1,
        )  # fmt: skip

    def abort(self, number: int) -> None:
        """Its client hangs up."""
        del self._seen[number]
        self.manager.cancel_request(str(number))

    def step(self) -> Mapping[int, Sequence[int]]:
        """One turn of the loop."""
        if self.processor.prepare_next_batch():
            self.manager._generation_step()
            self.processor.update_batch()
        came: dict[int, Sequence[int]] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                output = self.manager.output_router.output_queue.get_nowait()
                if output.error:
                    raise RuntimeError(output.error)
                number = int(output.request_id)
                if number in self._seen:
                    new = output.generated_tokens[self._seen[number] :]
                    came[number] = [*came.get(number, ()), *new]
                    self._seen[number] += len(new)
                    if output.is_finished():
                        del self._seen[number]
        return came

    @property
    def busy(self) -> bool:
        """Whether a request is in a queue of it."""
        manager = self.manager
        return not (manager.input_queue.empty() and manager.cancel_queue.empty()) or (
            self.processor.has_pending_requests()
        )

    def close(self) -> None:
        """Lets its memory go."""
        self.manager.batch_processor = None


TRANSFORMERS = EngineUnderTest(
    "transformers",
    ContinuousBatching,
    {
        "page_size": (16, 4, 8, 32),
        "kv_tokens": (2048, 256, 384, 512),
        "max_running": (16, 2, 4, 8),
        "step_tokens": (128, 16, 32, 64),
        "sharing": (True, False),
        "scheduler": ("fifo", "prefill_first"),
        "sample": (False, True),
        "windows": (0, 1),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
    },
    lambda settings: ExactSpec(layers=(16, None, 16) if settings["windows"] else (None, None)),
)


@final
class Generate:
    """`generate`: all requests that wait, in one padded batch a step; with drafts one alone, and an assistant."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        self._settings, self._lm = settings, ExactLM(model, verifier).eval()
        self._assistant = None
        if settings["assistant"] is not None and settings["cache"] is None and settings["layers"] != 2:
            self._assistant = ExactLM(model, error_rate=settings["assistant"]).eval()
            self._assistant.generation_config = GenerationConfig(num_assistant_tokens=4, pad_token_id=0)
        self._waiting: list[Request] = []

    def add(self, request: Request) -> None:
        """A request arrives."""
        self._waiting.append(request)

    def abort(self, number: int) -> None:
        """Its client hangs up."""
        self._waiting = [request for request in self._waiting if request.number != number]

    def step(self) -> Mapping[int, Sequence[int]]:
        """One call of `generate`."""
        count = 1 if self._assistant is not None else self._settings["batch"]
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if not batch:
            return {}
        self._lm.requests = lambda: [request.number for request in batch]
        self._lm.guesses = self._assistant is not None
        width = max(len(request.prompt) for request in batch)
        pads = [width - len(request.prompt) for request in batch]
        output = self._lm.generate(
            torch.tensor([[0] * pad + list(request.prompt) for pad, request in zip(pads, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
            generation_config=GenerationConfig(
                max_new_tokens=max(request.max_new_tokens for request in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation=None if self._settings["layers"] else self._settings["cache"],
                prefill_chunk_size=self._settings["chunk"],
            ),
            assistant_model=self._assistant,
        )
        return {
            request.number: tokens[: request.max_new_tokens]
            for request, tokens in zip(batch, output[:, width:].tolist(), strict=True)
        }

    @property
    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def close(self) -> None:
        """Nothing is held."""


GENERATE = EngineUnderTest(
    "generate",
    Generate,
    {
        "batch": (8, 1, 3),
        "cache": (None, "static"),
        "chunk": (None, 7),
        "assistant": (None, 0.0, 0.3, 0.9),
        "layers": (0, 1, 2),
        "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    },
    lambda settings: ExactSpec(layers=((None, None), (16, None, 16), ("state", None))[settings["layers"]]),
)
