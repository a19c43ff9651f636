"""A small model of floating point, to see how many state bugs change its text: what tests of engines compare."""

from typing import final

import torch
from torch.nn.functional import normalize, scaled_dot_product_attention, silu

from batchstate.testing.exact import Cache, ExactModel, ExactSpec

WIDTH, GROUP = 32, 2
"""Numbers of a hidden state; query heads of a head of keys."""


@final
class FloatModel(ExactModel):
    """In place of the exact model. Random weights, rotary positions, greedy sampling.

    Args:
        spec: its shape; it has no layers of state.
        scale: of the weights: 0.02 is what checkpoints begin with, at 0.3 attention is sharp.
    """

    def __init__(self, spec: ExactSpec, scale: float = 0.3) -> None:
        super().__init__(spec)
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale

        size = spec.heads * spec.head_dim
        self._tokens = weights(spec.vocab_size, WIDTH)
        self._layers = [
            {
                "query": weights(WIDTH, GROUP * size),
                "key": weights(WIDTH, size),
                "value": weights(WIDTH, size),
                "out": weights(GROUP * size, WIDTH),
                "up": weights(WIDTH, 2 * WIDTH),
                "down": weights(2 * WIDTH, WIDTH),
            }
            for _ in spec.layers
        ]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """float32[b, t, WIDTH]: as of any language model."""
        hidden = self._tokens[ids.long()]
        for layer, weights in enumerate(self._layers):
            x = _normed(hidden)
            query, key, value = (
                (x @ weights[name]).view(*x.shape[:2], -1, self.spec.head_dim) for name in ("query", "key", "value")
            )
            read = cache.attend(layer, _rotated(key, positions), value)
            attended = scaled_dot_product_attention(
                _rotated(query, positions).transpose(1, 2),
                read.keys.float().transpose(1, 2),
                read.values.float().transpose(1, 2),
                attn_mask=read.visible[:, None],
                enable_gqa=True,
            )
            hidden = hidden + attended.nan_to_num().transpose(1, 2).flatten(2) @ weights["out"]
            hidden = hidden + silu(_normed(hidden) @ weights["up"]) @ weights["down"]
        return _normed(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[..., vocab_size] of hidden states."""
        return hidden @ self._tokens.T

    def sample(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens int64[n], whatever the temperatures."""
        return logits.argmax(-1)


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = normalize(hidden, dim=-1) * hidden.shape[-1] ** 0.5
    return normed


def _rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
