"""A small language model in torch alone, for machines without transformers; it answers to the same calls as theirs.

Two layers of rotary attention and gated feed-forward, with random weights. It runs in two ways: with the paged
attention of this package, in forwards that hold any tokens of any requests; and with torch's own attention over one
whole sequence, without a cache. The second is what the first has to equal: `generate` recomputes everything for every
token.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from examples.engine.attention import paged_attention

Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""One layer's attention: from the layer, and queries, keys and values dtype[1, heads, num_tokens, head_dim], to
dtype[1, num_tokens, num_heads, head_dim].
"""


@attrs.frozen
class PlainConfig:
    """Sizes, by the names of a transformers config."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0


@final
@attrs.frozen(eq=False)
class PlainOutput:
    """The result of the layers: dtype[1, num_tokens, hidden_size]."""

    last_hidden_state: torch.Tensor


@final
class PlainLM(nn.Module):
    """Token ids in, logits out.

    Args:
        config: sizes.
        dtype: of the weights.

    Attributes:
        model: the layers.
        lm_head: hidden states to logits.
    """

    def __init__(self, config: PlainConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = PlainLayers(config, dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.lm_head.weight.dtype

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy tokens behind one prompt: each from the whole sequence before it. No cache, no pages, no batch."""
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            ids = torch.tensor([tokens], device=self.device)
            positions = torch.arange(len(tokens), device=self.device)[None]
            hidden = self.model.attended(ids, positions, _whole_sequence)
            tokens.append(int(self.lm_head(hidden[0, -1]).argmax()))
        return tokens[len(prompt) :]


@final
class PlainLayers(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: PlainConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(PlainLayer(config, index, dtype) for index in range(config.num_hidden_layers))
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self.register_buffer("frequencies", config.rope_theta**-half, persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: None,
        position_ids: torch.Tensor,
        use_cache: bool,
        **paged: Any,
    ) -> PlainOutput:
        """Tokens of any requests, int64[1, num_tokens] with their positions, over paged KV; see `paged_attention`."""

        def attend(layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return paged_attention(layer, query, key, value, None, scaling=self.config.head_dim**-0.5, **paged)[0]

        return PlainOutput(self.attended(input_ids, position_ids, attend))

    def attended(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states dtype[1, num_tokens, hidden_size], with `attend` for attention."""
        hidden: torch.Tensor = self.embedding(input_ids)
        angles = position_ids[:, None, :, None] * self.get_buffer("frequencies")  # float64[1, 1, tokens, head_dim / 2]
        turns = torch.cat([angles, angles], dim=-1)
        rotation = turns.cos().to(hidden.dtype), turns.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend)
        return rms_norm(hidden, hidden.shape[-1:], eps=1e-6)


@final
class PlainLayer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and added to what came in."""

    def __init__(self, config: PlainConfig, layer_idx: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))

        def linear(of: int, to: int) -> nn.Linear:
            return nn.Linear(of, to, bias=False, dtype=dtype)

        self.query, self.output = linear(config.hidden_size, heads), linear(heads, config.hidden_size)
        self.key, self.value = linear(config.hidden_size, kv_heads), linear(config.hidden_size, kv_heads)
        self.gate, self.up = (linear(config.hidden_size, config.intermediate_size) for _ in range(2))
        self.down = linear(config.intermediate_size, config.hidden_size)

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """dtype[1, num_tokens, hidden_size] in and out."""
        normed = rms_norm(hidden, hidden.shape[-1:], eps=1e-6)
        query, key, value = (self._heads(project(normed)) for project in (self.query, self.key, self.value))
        attended = attend(self, _rotated(query, *rotation), _rotated(key, *rotation), value)
        hidden = hidden + self.output(attended.flatten(2))
        normed = rms_norm(hidden, hidden.shape[-1:], eps=1e-6)
        result: torch.Tensor = hidden + self.down(silu(self.gate(normed)) * self.up(normed))
        return result

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*tensor.shape[:2], -1, self.head_dim).transpose(1, 2)


def _rotated(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return tensor * cos + torch.cat([-second, first], dim=-1) * sin


def _whole_sequence(layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of torch's own, over every token of one sequence."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
