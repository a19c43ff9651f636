"""The right text of every request, from its prompt alone: no engine and no tensor takes part.

A layer keeps of each position one entry, a key and a value. That of the first layer is a hash of token and position,
that of the next a hash of all entries that the layer before was pointed at, and so on: an entry of the last layer is a
hash of the whole history *as it was read*. The next token is a hash of what the last layer was pointed at.
"""

import struct
from collections.abc import Sequence
from typing import Literal, final

import attrs
import numpy as np
import numpy.typing as npt

from batchstate._arrays import count
from batchstate.errors import ArgumentError
from batchstate.testing.exact.hashing import fold, mix, signed

__all__ = ["Answer", "ExactSpec", "Layer", "Oracle", "sampling_shift"]

Layer = int | None | Literal["state"]
"""A layer keeps: None all positions, a number the newest so many, "state" one row that each token advances."""

TOKEN, POSITION, KEY, VALUE, LAYER, COLUMN, TURN = (
    0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x2545F4914F6CDD1D, 0x9FB21C651E98DF25,
    0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xFF51AFD7ED558CCD,
)  # fmt: skip
"""Odd numbers without a pattern, one for each use of the hash."""


@final
@attrs.frozen
class ExactSpec:
    """Shape of an exact model.

    Attributes:
        layers: what each layer keeps.
        vocab_size: a wrong state gives the right token by chance once in so many.
        heads, head_dim: of an entry in KV memory; their product is a multiple of 8, one byte an element.

    Raises:
        ArgumentError: no layer, a window below 1, or entries that are no whole words.
    """

    layers: tuple[Layer, ...] = (None, None)
    vocab_size: int = 8192
    heads: int = 1
    head_dim: int = 8

    def __attrs_post_init__(self) -> None:
        if not self.layers or self.heads * self.head_dim % 8 or not self.heads * self.head_dim:
            shape = f"an exact model of layers {self.layers}, {self.heads} heads of {self.head_dim}"
            raise ArgumentError(shape, self.layers, "pass at least one layer, and heads * head_dim a multiple of 8")
        for layer in self.layers:
            if layer is not None and layer != "state":
                count(layer, "ExactSpec: window of a layer", least=1)
        count(self.vocab_size, "ExactSpec: vocab_size", least=2)

    @property
    def words(self) -> int:
        """Words of a key, and of a value."""
        return self.heads * self.head_dim // 8


def sampling_shift(temperature: float, vocab_size: int) -> int:
    """By how much a request's sampling row moves its tokens: a hash of the temperature as a float32; 0 for 0."""
    (bits,) = struct.unpack("<I", struct.pack("<f", temperature))
    return mix(bits * TURN) % vocab_size if bits else 0


@final
@attrs.frozen(eq=False)
class Answer:
    """The right text and the right entries of one request.

    Attributes:
        tokens: of the answer.
        entries: for each layer int64[prompt + answer - 1], the key of each position as it lies in memory, or for a
            layer of state the state behind it.
    """

    tokens: tuple[int, ...]
    entries: tuple[npt.NDArray[np.int64], ...] = attrs.field(repr=False)


@final
class Oracle:
    """Knows every right text of a model. Answers are kept: a prompt that comes again costs a look.

    Args:
        spec: of the model.

    Attributes:
        forced: hash behind a history -> token that goes on with it, not yet moved by a sampling row; for the model.
    """

    def __init__(self, spec: ExactSpec) -> None:
        self.spec = spec
        self.forced: dict[int, int] = {}
        self._answers: dict[tuple[tuple[int, ...], int, float], Answer] = {}

    def answer(self, prompt: Sequence[int], max_new_tokens: int, temperature: float = 0.0) -> Answer:
        """The answer to a prompt of at least one token, `max_new_tokens` long."""
        key = tuple(prompt), max_new_tokens, temperature
        if key not in self._answers:
            self._answers[key] = self._answered(*key)
        return self._answers[key]

    def force(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 0.0) -> None:
        """Makes tokens, as of a recording, the right answer to a prompt, before that is asked for.

        If a prompt has two answers, the first stays up to where they part: only the history tells a model whose forward
        it runs.
        """
        shift, chain = sampling_shift(temperature, self.spec.vocab_size), _Chain(self.spec)
        for token in prompt[:-1]:
            chain.append(token)
        for token, following in zip([prompt[-1], *tokens], tokens, strict=False):
            self.forced.setdefault(signed(chain.append(token)), (following - shift) % self.spec.vocab_size)

    def _answered(self, prompt: tuple[int, ...], max_new_tokens: int, temperature: float) -> Answer:
        shift, chain, tokens = sampling_shift(temperature, self.spec.vocab_size), _Chain(self.spec), list(prompt)
        for position in range(len(prompt) + max_new_tokens - 1):
            hidden = chain.append(tokens[position])
            if position >= len(prompt) - 1:
                tokens.append((self.forced.get(signed(hidden), hidden) + shift) % self.spec.vocab_size)
        entries = tuple(np.array(layer, np.int64) for layer in chain.entries)
        return Answer(tuple(tokens[len(prompt) :]), entries)


class _Chain:
    """The layers of one request, a token at a time."""

    def __init__(self, spec: ExactSpec) -> None:
        self._spec = spec
        self.entries: list[list[int]] = [[] for _ in spec.layers]
        self._terms: list[list[int]] = [[] for _ in spec.layers]
        self._sums = [0] * len(spec.layers)

    def append(self, token: int) -> int:
        """The hash behind a token, after all before it."""
        position = len(self.entries[0])
        hidden = mix(mix(token * TOKEN) + position * POSITION)
        for layer, kept in enumerate(self._spec.layers):
            if kept == "state":
                self._sums[layer] = signed(self._sums[layer] * TURN + mix(hidden + layer * LAYER))
                self.entries[layer].append(self._sums[layer])
                hidden = mix(hidden ^ mix(self._sums[layer]))
                continue
            key, value = (self._stored(mix(hidden + kind + layer * LAYER)) for kind in (KEY, VALUE))
            self.entries[layer].append(signed(key))
            terms = self._terms[layer]
            terms.append(mix(key + position * COLUMN) + mix(value - position * COLUMN))
            self._sums[layer] += terms[-1]
            if kept is not None and len(terms) > kept:
                self._sums[layer] -= terms[-1 - kept]
            hidden = mix(hidden ^ mix(self._sums[layer]))
        return hidden

    def _stored(self, word: int) -> int:
        return fold(mix(word + number) for number in range(self._spec.words))
