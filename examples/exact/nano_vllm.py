"""The adapter of nano-vllm: its engine, scheduler, block manager and model runner, on a CPU.

Replaced are model and sampler. Needs a checkout of GeeeekExplorer/nano-vllm; see `stand_ins.checkout`.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from batchstate.testing.exact import EngineUnderTest, ExactModel, PackedCache, PagedMemory, Request, Verifier
from examples.exact.stand_ins import checkout, import_with_stand_ins, without_cuda

ABSENT = ("xxhash", "triton", "triton.language", "flash_attn")


def modules() -> Any:
    """The engine's package, imported."""
    checkout("nano-vllm")
    import_with_stand_ins("nanovllm.engine.llm_engine", *ABSENT)
    return sys.modules["nanovllm"]


class ExactForward:
    """In the place of the engine's model: reads by the context that its model runner has set."""

    def __init__(self, context: Any, model: ExactModel, memory: PagedMemory, verifier: Verifier | None) -> None:
        self._context, self._model, self._memory, self._verifier = context, model, memory, verifier
        self.requests: list[int] = []

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hashes int64[t] behind the tokens int64[t] of the batch in the engine's context."""
        context, size = self._context.get_context(), self._memory.page_size
        if context.is_prefill:
            queries, lens = context.cu_seqlens_q.diff().tolist(), context.cu_seqlens_k.diff().tolist()
        else:
            queries, lens = [1] * len(input_ids), context.context_lens.tolist()
        read_rows = None
        if context.block_tables is not None:
            read_rows = torch.cat([
                (blocks[: -(-length // size), None].long() * size + torch.arange(size)).flatten()[:length]
                for blocks, length in zip(context.block_tables, lens, strict=True)
            ])  # fmt: skip
        packed = PackedCache(
            self._memory, positions, queries, lens, read_rows, context.slot_mapping, requests=self.requests,
            verifier=self._verifier,
        )  # fmt: skip
        return self._model.run(input_ids[None], positions[None], packed)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the last token of each request."""
        context = self._context.get_context()
        if context.is_prefill:
            hidden = hidden[context.cu_seqlens_q[1:].long() - 1]
        return self._model.logits(hidden)


@final
class NanoVLLM:
    """See `batchstate.testing.exact.Adapter`."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        nanovllm = modules()
        self._windows = contextlib.ExitStack()
        self._windows.enter_context(without_cuda())
        size, spec = settings["block_size"], model.spec
        blocks = -(-settings["kv_tokens"] // size)
        # Its constructors load a checkpoint, and its config allows blocks of 256 tokens alone.
        config = object.__new__(nanovllm.config.Config)
        for name, value in {
            "max_num_batched_tokens": settings["step_tokens"],
            "max_num_seqs": settings["max_running"],
            "kvcache_block_size": size,
            "num_kvcache_blocks": blocks,
            "eos": -1,
        }.items():
            setattr(config, name, value)
        self._sequences = nanovllm.engine.sequence.Sequence
        self._sequences.block_size = size
        self._sampling = nanovllm.sampling_params.SamplingParams
        keys, values = (
            [torch.zeros(blocks * size, spec.heads, spec.head_dim, dtype=model.dtype) for _ in spec.layers]
            for _ in range(2)
        )
        runner = object.__new__(nanovllm.engine.model_runner.ModelRunner)
        runner.block_size, runner.world_size, runner.rank, runner.enforce_eager = size, 1, 0, True
        forward = ExactForward(nanovllm.utils.context, model, PagedMemory(keys, values, size), verifier)
        runner.model, runner.sampler = forward, model.sample
        self.engine = object.__new__(nanovllm.engine.llm_engine.LLMEngine)
        self.engine.model_runner = runner
        self.engine.scheduler = nanovllm.engine.scheduler.Scheduler(config)
        self._numbers: dict[int, int] = {}
        run = runner.run

        def running(seqs: Sequence[Any], is_prefill: bool) -> list[int]:
            forward.requests = [self._numbers[seq.seq_id] for seq in seqs]
            tokens: list[int] = run(seqs, is_prefill)
            return tokens

        runner.run = running

    def add(self, request: Request) -> None:
        """A request arrives."""
        sampling = self._sampling(temperature=request.temperature, max_tokens=request.max_new_tokens, ignore_eos=True)
        self.engine.add_request(list(request.prompt), sampling)
        self._numbers[self.engine.scheduler.waiting[-1].seq_id] = request.number

    def abort(self, number: int) -> None:
        """The engine cannot."""
        raise NotImplementedError

    def step(self) -> Mapping[int, Sequence[int]]:
        """One step; it tells the tokens of a request when that has finished."""
        outputs, _ = self.engine.step()
        return {self._numbers[sequence]: tokens for sequence, tokens in outputs}

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return not self.engine.is_finished()

    def close(self) -> None:
        """Ends the windows of the stand-ins."""
        self._windows.close()


NANO_VLLM = EngineUnderTest(
    "nano_vllm",
    NanoVLLM,
    {
        "block_size": (16, 2, 4, 8),
        "kv_tokens": (2048, 128, 200, 400),
        "max_running": (16, 1, 2, 4, 8),
        "step_tokens": (256, 16, 32, 64),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
    },
    temperatures=(0.5, 0.75, 1.0, 1.5),
    aborts=False,
)
