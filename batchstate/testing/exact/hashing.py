"""The hash of the exact model, for Python's integers and for int64 tensors, and words of it as bytes in KV memory.

All arithmetic is modulo 2**64. A word lies in memory as bytes, one an element, each a whole number from 0 to 255, which
float64, float32, float16 and bfloat16 hold exactly: nothing that a cache does to its elements may change one.
"""

from collections.abc import Iterable

import torch

__all__ = ["decode", "encode", "fold", "from_octets", "mix", "mix_tensor", "modulo", "octets", "signed"]

_MASK = (1 << 64) - 1
# The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = range(0, 64, 8)


def signed(word: int) -> int:
    """A word as the int64 of the same bits."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def mix(word: int) -> int:
    """A bijection of words in which each bit depends on all; 0 <= result < 2**64."""
    word &= _MASK
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def fold(words: Iterable[int]) -> int:
    """A word of several, in their order."""
    folded = 0
    for word in words:
        folded = mix(folded + word)
    return folded


def mix_tensor(words: torch.Tensor) -> torch.Tensor:
    """`mix` of each element of an int64 tensor."""
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * signed(_FIRST)  # a shift of int64 fills with the sign
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * signed(_SECOND)
    return words ^ (words >> 31 & (1 << 33) - 1)


def octets(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes dtype[..., 8] of words int64[...], lowest first."""
    return (words.unsqueeze(-1) >> torch.tensor(_BITS, device=words.device) & 255).to(dtype)


def from_octets(raw: torch.Tensor) -> torch.Tensor:
    """The words int64[...] of bytes dtype[..., 8].

    An element that is no byte, such as NaN, 0.5 or 300, counts as 256, which is no byte of any word.
    """
    raw = raw.float()
    whole = (raw == raw.round()) & (raw >= 0) & (raw < 256)
    numbers = torch.where(whole, raw, 256.0).long()
    return (numbers << torch.tensor(_BITS, device=raw.device)).sum(-1)


def encode(words: torch.Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Words int64[...] as entries of KV memory, dtype[..., heads, head_dim]; of each are made heads * head_dim / 8."""
    numbers = torch.arange(heads * head_dim // 8, device=words.device)
    made = mix_tensor(words.unsqueeze(-1) + numbers)
    return octets(made, dtype).reshape(*words.shape, heads, head_dim)


def decode(entries: torch.Tensor) -> torch.Tensor:
    """One word int64[...] of all bytes of each entry dtype[..., heads, head_dim]; another one if any byte differs."""
    flat = entries.flatten(-2)
    words = from_octets(flat.reshape(*flat.shape[:-1], flat.shape[-1] // 8, 8))
    folded = torch.zeros_like(words[..., 0])
    for number in range(words.shape[-1]):
        folded = mix_tensor(folded + words[..., number])
    return folded


def modulo(words: torch.Tensor, divisor: int) -> torch.Tensor:
    """Words int64[...], taken as unsigned, modulo a divisor."""
    return torch.remainder(torch.remainder(words, divisor) + torch.where(words < 0, (1 << 64) % divisor, 0), divisor)
