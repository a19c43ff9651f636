"""A causal language model that keeps its keys and values in pages: one of transformers, or a plain one of torch alone.

Guarantees: `forward` never waits for the device, reads and writes no KV but the rows that the view names, and leaves
ordinary tensors behind (no inference tensors: what is kept of them has a version). Weights never change.
"""

from collections.abc import Sequence
from typing import Any, Literal, final

import attrs
import numpy as np
import torch

from examples.engine.attention import IMPLEMENTATION, KVMemory, PagedKV, PagedView, paged_attention
from examples.engine.plain import PlainConfig, PlainLM
from examples.engine.request import Prebuilt

Family = Literal["llama", "qwen3", "plain"]
"""Kinds of random models: two of transformers, and `plain`, which needs torch alone."""


@final
@attrs.define(eq=False)
class Model:
    """A language model that keeps its keys and values in memory that it is given.

    Attributes:
        lm: of transformers, with this package's attention except inside `reference.generate`; or a `PlainLM`.
        eos_token_ids: tokens that end an answer; none for random models.
    """

    lm: Any = attrs.field(repr=False)
    eos_token_ids: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        rope = (getattr(self.lm.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            # It would depend on the longest request of the batch, and ask the device for that in every forward.
            raise ValueError(f"rope type {rope!r} is not supported here; use a model with another one")
        self.lm.eval().requires_grad_(False)
        if not isinstance(self.lm, PlainLM):
            from transformers import AttentionInterface

            AttentionInterface.register(IMPLEMENTATION, paged_attention)
            self.lm.set_attn_implementation(IMPLEMENTATION)

    @classmethod
    def random(
        cls,
        family: Family,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        vocab_size: int = 256,
    ) -> "Model":
        """A small model with random weights, which depend on the seed alone: another dtype rounds the same numbers.

        Its greedy answers wander, and now and then repeat themselves, as real ones do.
        """
        with torch.random.fork_rng(devices=[]):  # making one draws weights that are drawn again below
            if family == "plain":
                lm: Any = PlainLM(PlainConfig(vocab_size=vocab_size), dtype=dtype)
            else:
                lm = _of_transformers(family, vocab_size, dtype)
        _draw_weights(lm, torch.Generator().manual_seed(seed))
        return cls(lm.to(device))

    @classmethod
    def load(cls, path: str, *, device: torch.device | str, dtype: torch.dtype) -> "Model":
        """The checkpoint in the folder `path`. Nothing is downloaded."""
        from transformers import AutoModelForCausalLM

        lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        eos = lm.generation_config.eos_token_id
        return cls(lm.to(device), () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos))

    @property
    def vocab_size(self) -> int:
        """Number of tokens; logits have as many columns."""
        return int(self.lm.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.lm.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, KV memory and logits."""
        dtype: torch.dtype = self.lm.dtype
        return dtype

    def new_kv(self, location_capacity: int) -> PagedKV:
        """KV memory for so many tokens, padding's page included. It belongs to the caller."""
        return PagedKV.zeros(self.lm.config, location_capacity, device=self.device, dtype=self.dtype)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        view: PagedView,
        kv: KVMemory,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Runs new tokens of any number of requests: prompts, chunks of prompts, decodes.

        Args:
            input_ids: int64[num_tokens], at least one.
            view: whose they are, and where their KV is and goes.
            kv: the memory; new tokens are written to it.
            logits_indices: int64[num_rows] -> token whose logits are wanted.

        Returns:
            dtype[num_rows, vocab_size].
        """
        hidden = self.lm.model(
            input_ids=input_ids[None],
            attention_mask=None,
            position_ids=view.positions[None],
            use_cache=False,
            paged_view=view,
            paged_runs=view.runs(),
            paged_kv=kv,
        ).last_hidden_state[0]  # dtype[num_tokens, hidden_size]
        logits: torch.Tensor = self.lm.lm_head(hidden[logits_indices])
        return logits


def _of_transformers(family: str, vocab_size: int, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _draw_weights(lm: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights about ten times as large as usual: with the usual ones every answer soon repeats one token."""
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.ndim == 2:  # the others scale norms, and stay at one
                weight.copy_(torch.randn(weight.shape, generator=generator).mul_(weight.shape[1] ** -0.5))


def prefill(model: Model, prompt: Sequence[int]) -> Prebuilt:
    """KV and first token of one prompt. Waits for the device, as another process would not."""
    num_tokens = len(prompt)
    kv = model.new_kv(num_tokens)
    places = torch.arange(num_tokens, device=model.device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=model.device)
    view = PagedView(places, places, starts, np.array([num_tokens]), starts[1:], places[None])
    ids = torch.tensor(prompt, device=model.device)
    logits = model.forward(ids, view, kv, places[-1:])
    return Prebuilt(int(logits.argmax()), kv.keys, kv.values)
