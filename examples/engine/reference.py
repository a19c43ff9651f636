"""Greedy answers by transformers alone: its own attention, its own cache, its own loop. The engine has to equal them.

Guarantees: nothing of this engine takes part, the model's settings are afterwards what they were before, and a
checkpoint's own sampling settings have no say. Batches are padded on the left, which in float64 changes no token. A
plain model answers by itself: each token from the whole sequence, by torch's own attention.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from examples.engine.model import Model
from examples.engine.plain import PlainLM


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Greedy tokens of each prompt.

    Args:
        model: the model; its KV memory is not touched.
        prompts: token ids; at least one each.
        max_new_tokens: length of each answer, unless it ends before.
        eos_token_ids: tokens that end an answer; they are its last token. Empty: none does.
        batch_size: prompts that run together, of similar lengths.
        progress: called after each batch with the number of answers so far, and of all.

    Returns:
        the answers, in the order of the prompts.

    Raises:
        ValueError: a prompt is empty, or there are not as many limits as prompts.
    """
    if len(prompts) != len(max_new_tokens) or not all(map(len, prompts)):
        raise ValueError(
            f"want a limit for each of {len(prompts)} prompts, got {len(max_new_tokens)}; and no empty prompt"
        )
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(filter(max_new_tokens.__getitem__, range(len(prompts))), key=lambda index: len(prompts[index]))
    with _plain(model.lm):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            limits = [max_new_tokens[index] for index in batch]
            tokens = _generate_batch(model, [prompts[index] for index in batch], limits, eos_token_ids)
            for index, row in zip(batch, tokens, strict=True):
                answers[index] = _cut(row[: max_new_tokens[index]], eos_token_ids)
            if progress is not None:
                progress(start + len(batch), len(order))
    return answers


def _generate_batch(
    model: Model, prompts: list[Sequence[int]], limits: list[int], eos_token_ids: Collection[int]
) -> list[list[int]]:
    """Tokens behind each prompt, at least to its limit, and padding behind those that ended before the others."""
    if isinstance(model.lm, PlainLM):
        return [model.lm.generate(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(limits),
        eos_token_id=sorted(eos_token_ids) or None,
        pad_token_id=0,  # any token: it stands where the mask is zero, or behind an answer's end
    )
    output = model.lm.generate(input_ids, attention_mask=mask, generation_config=greedy)
    tokens: list[list[int]] = output[:, width:].tolist()
    return tokens


def _cut(tokens: list[int], eos_token_ids: Collection[int]) -> list[int]:
    """The tokens up to the first that ends an answer, and that one."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


@contextlib.contextmanager
def _plain(lm: Any) -> Iterator[None]:
    """The model with an attention of transformers, and without the checkpoint's own generation settings."""
    if isinstance(lm, PlainLM):
        yield
        return
    from transformers import GenerationConfig

    attention, settings = lm.config._attn_implementation, lm.generation_config
    lm.set_attn_implementation("sdpa")
    lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        lm.generation_config = settings
        lm.set_attn_implementation(attention)
