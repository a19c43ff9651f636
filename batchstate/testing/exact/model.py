"""The exact model on tensors: a causal language model of integers, whose KV entries are bytes in memory of any dtype.

It reads through the engine's own cache, and all that it is pointed at counts: entries, their number, their order, the
positions that it is given. One wrong byte changes the next token of the request and every one behind it.
"""

from collections.abc import Mapping
from typing import Protocol, final

import attrs
import torch

from batchstate.testing.exact.hashing import decode, encode, mix_tensor, modulo, signed
from batchstate.testing.exact.text import COLUMN, KEY, LAYER, POSITION, TOKEN, TURN, VALUE, ExactSpec, sampling_shift

__all__ = ["Cache", "ExactModel", "Read", "advanced"]


@final
@attrs.frozen(eq=False)
class Read:
    """All that a layer's queries are pointed at.

    Attributes:
        keys, values: dtype[b, n, heads, head_dim], entries as they lie in memory, those just written included.
        visible: bool[b, t, n], the entries of each query: its engine's mask, or its lengths, and the layer's window.
        columns: int64[b, n], the position of each entry, counted back from the position that the last query of its
            request was given.
    """

    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    columns: torch.Tensor


class Cache(Protocol):
    """The engine's memory, as one forward sees it."""

    def attend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Read:
        """Keeps new entries, dtype[b, t, heads, head_dim] each, where the engine says, and reads what it says."""

    def advance(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        """The states int64[b, t] of a layer of state behind each input int64[b, t]; see `advanced`. Keeps the last."""


class ExactModel:
    """See the module. A model of floating point, to be compared with it, is a subclass with these three methods.

    Args:
        spec: its shape.
        dtype: of the entries in memory: a floating dtype of 16 bits or more.
        forced: of the oracle, where it forces answers.
    """

    def __init__(
        self, spec: ExactSpec, *, dtype: torch.dtype = torch.float32, forced: Mapping[int, int] | None = None
    ) -> None:
        self.spec, self.dtype, self._forced = spec, dtype, forced

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The hash int64[b, t] behind each token int64[b, t] at its position int64[b, t]."""
        spec = self.spec
        hidden = mix_tensor(mix_tensor(ids.long() * signed(TOKEN)) + positions.long() * signed(POSITION))
        for layer, kept in enumerate(spec.layers):
            salted = hidden + signed(layer * LAYER)
            if kept == "state":
                hidden = mix_tensor(hidden ^ mix_tensor(cache.advance(layer, mix_tensor(salted))))
                continue
            entries = (
                encode(mix_tensor(salted + signed(kind)), spec.heads, spec.head_dim, self.dtype)
                for kind in (KEY, VALUE)
            )
            read = cache.attend(layer, *entries)
            salts = read.columns * signed(COLUMN)
            terms = mix_tensor(decode(read.keys) + salts) + mix_tensor(decode(read.values) - salts)
            hidden = mix_tensor(hidden ^ mix_tensor(_sums(read.visible, terms)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[..., vocab_size] of hashes int64[...]: 0 for the next token, and -10,000 for all others."""
        tokens = modulo(hidden, self.spec.vocab_size)
        if self._forced:
            words = hidden.flatten().tolist()
            chosen = [self._forced.get(*pair) for pair in zip(words, tokens.flatten().tolist(), strict=True)]
            tokens = torch.tensor(chosen, device=hidden.device).view(hidden.shape)
        logits = torch.full((*tokens.shape, self.spec.vocab_size), -1e4, device=tokens.device)
        return logits.scatter_(-1, tokens.unsqueeze(-1), 0.0)

    def sample(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Tokens int64[n] of logits float[n, vocab_size], moved by what each row's temperature float32[n] is."""
        shifts = [sampling_shift(temperature, self.spec.vocab_size) for temperature in temperatures.tolist()]
        return (logits.argmax(-1) + torch.tensor(shifts, device=logits.device)) % self.spec.vocab_size


def _sums(visible: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """bool[b, t, n] and int64[b, n] -> int64[b, t], modulo 2**64.

    In four products of float64, 16 bits each: exact below 2**37 entries, and there is no product of int64 on CUDA.
    """
    shifts = torch.arange(0, 64, 16, device=terms.device)
    limbs = (terms.unsqueeze(-1) >> shifts & 0xFFFF).double()
    return ((visible.double() @ limbs).long() << shifts).sum(-1)


def advanced(before: torch.Tensor, inputs: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
    """States int64[b, t] behind inputs int64[b, t] in order, from states int64[b]: TURN * the one before + the input.

    An input that is not `used`, bool[b, t], is padding, and leaves the state as it is.
    """
    steps = []
    for number, column in enumerate(inputs.unbind(-1)):
        after = before * signed(TURN) + column
        before = after if used is None else torch.where(used[:, number], after, before)
        steps.append(before)
    return torch.stack(steps, -1)
