"""The inputs of the forward: one plan and one copy a step."""

from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from batchstate import Batch, Slots, StepPlanner, mirrored, slot_column
from batchstate.step import PlannedStep
from examples.transformers_batching.blocks import Ints, PooledBlocks

_ZERO = np.zeros(1, dtype=np.int64)


class Running(Batch):
    """The requests of a step."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)


class PlannedInputs(ContinuousBatchingIOs):  # type: ignore[misc]
    """Inputs and outputs of transformers' synchronous batching, planned by a `StepPlanner`.

    Tokens of requests that decode come from the relay, where the last forward left them.
    """

    def __init__(self, cache: Any, **rest: Any) -> None:
        super().__init__(cache=cache, **rest)
        (blocks,) = cache.cache_allocators.values()
        self._blocks: PooledBlocks = blocks
        self.compute_stream = None  # the forward runs on the stream that the step is planned on
        self.reset()

    def reset(self) -> None:
        """Begins a session, with the pools of the scheduler's."""
        super().reset()
        blocks = self._blocks
        self._planner = StepPlanner(
            Running, pages=blocks.pages, relay=blocks.relay, ids="last_token", results=["last_token"]
        )
        self._step: PlannedStep | None = None
        self.requests_in_batch: list[Any] = []
        self._slots: Slots = blocks.live
        self._rows: Ints = blocks.live.np
        self._totals: Ints = blocks.live.np  # tokens of each request with those of the step
        self._table: torch.Tensor | None = None  # of the kernels, on the device, until a page begins

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Plans the step of these requests and sends it to the device."""
        if use_padding:
            raise NotImplementedError("expected inputs of their own size, got CUDA graphs: set use_cuda_graph=False")
        blocks = self._blocks
        self.use_block_table = use_decode_fast_path and self.block_table.numel() > 0
        blocks.runtime.next_step()
        extras: dict[str, Any] = {}
        if requests_in_batch is self.requests_in_batch and self._step is not None:  # each schedules the one token
            batch, rows, past = self._step.batch, self._rows, self._totals
            totals = past + 1
            grown = bool(np.count_nonzero(past % blocks.tokens_per_page == 0))
            if grown:
                blocks.pages.grow(self._slots, totals)
            arguments: dict[str, Any] = {}
        else:
            states = [request.state for request in requests_in_batch]
            past = np.array([state.position_offset for state in states], dtype=np.int64)
            queries = np.array([request.query_length for request in requests_in_batch], dtype=np.int64)
            totals, grown = past + queries, True
            self._slots = blocks.slots_of([state.request_id for state in states], totals)
            batch, rows = Running.build(blocks.runtime, slots=self._slots, seq_lens=past), self._slots.np
            prompts = [
                None if start >= len(state.initial_tokens) else state.tokens_to_process
                for state, start in zip(states, past.tolist(), strict=True)
            ]
            samples = np.array([request.has_new_token for request in requests_in_batch], dtype=np.bool_)
            arguments = {"query_lens": queries, "prompt_ids": prompts, "samples": samples}
            self.requests_in_batch, self._rows, self._num_sampled = requests_in_batch, rows, int(samples.sum())
            self.max_length_q = int(queries.max())
        extras["kv_start_loc"] = np.concatenate((_ZERO, totals.cumsum())).astype(np.int32)
        if not self.use_block_table:
            extras |= self._indices(rows, past, totals)
        elif grown or self._table is None:
            extras["block_table"] = blocks.kernel_block_table(rows, self.block_table.shape[2])
        self._step = self._planner.plan(batch, extras=extras, **arguments)
        self._totals = totals
        if "block_table" in extras:
            self._table = self._step.extras["block_table"][None]
        elif not self.use_block_table:
            self._table = None
        for request in requests_in_batch:
            request.state.position_offset += request.query_length
        if logits_processors.tensors_required:
            logits_processors.prepare_tensor_args(requests_in_batch, self._bulk_input_tensor[self.static_inputs :])

    def _indices(self, rows: Ints, past: Ints, totals: Ints) -> dict[str, Ints]:
        """Where the forward reads and writes; and, where a mask is needed, which tokens are of one request."""
        request = np.repeat(np.arange(len(totals)), totals)
        positions = np.arange(len(request)) - np.repeat(np.cumsum(totals) - totals, totals)
        new = positions >= past[request]
        read = self._blocks.cache_indices(rows[request], positions)
        indices = {"write": read[new], "read": read if past.any() else read[:0]}
        if self.attention_mask is not None:
            first = request * self.cache.max_tokens_read  # of each request's tokens, numbered through
            indices |= {"tokens": first + positions, "queries": (first + positions)[new], "firsts": first[new]}
        return indices

    def get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        """The inputs on the device, as the model takes them."""
        step = self._require_step()
        inputs, extras = step.inputs(), step.extras
        mask = None
        if self.attention_mask is not None and not self.use_block_table:
            tokens, queries, firsts = extras["tokens"], extras["queries"][:, None], extras["firsts"][:, None]
            seen = (firsts <= tokens) & (tokens <= queries)
            mask = torch.zeros(seen.shape, dtype=self.model_dtype, device=seen.device)
            mask = mask.masked_fill_(~seen, torch.finfo(self.model_dtype).min)[None, None]
        lengths = self.use_block_table  # then kernels take no longest lengths
        return {
            "input_ids": inputs.input_ids[None],
            "position_ids": inputs.positions[None],
            "attention_mask": mask,
            "cu_seq_lens_q": inputs.query_start_loc,
            "cu_seq_lens_k": {self._blocks.layer_type: extras["kv_start_loc"]},
            "max_length_q": 1 if lengths else self.max_length_q,
            "max_length_k": {self._blocks.layer_type: 1 if lengths else int(self._totals.max())},
            "logits_indices": inputs.last_token_indices,
            "logits_processor_args": self._bulk_input_tensor[self.static_inputs :, : len(self.requests_in_batch)],
            "read_index": [] if lengths else [extras["read"]],
            "write_index": [] if lengths else [extras["write"]],
            "block_table": self._table,
            "cache": self.cache,
            "use_cache": False,
            "is_causal": self.attention_mask is None,
        }

    def retrieve_device_outputs(self) -> None:
        """Sampled tokens go to the next step, and to the host."""
        if self._num_sampled:
            self._require_step().publish(last_token=self.output_ids[0, : self._num_sampled].long())
        self._blocks.forward_done = self._blocks.runtime.record()

    def prepare_batch_update(self) -> tuple[list[Any], list[int], list[float] | None]:
        """The requests of the step and their tokens; waits for the copy."""
        tokens = self._require_step().results["last_token"].np.tolist() if self._num_sampled else []
        logprobs = self.output_ids[1, : len(tokens)].view(torch.float32).tolist() if self.return_logprobs else None
        return self.requests_in_batch, tokens, logprobs

    def _require_step(self) -> PlannedStep:
        if self._step is None:
            raise RuntimeError("expected a step, got none: prepare_batch_tensors comes first")
        return self._step
