"""The requests of a run: lengths on both sides of everything that has an edge, and all the same from one seed."""

import numpy as np

from examples.engine.request import Request

MOST_NEW_TOKENS = 24


def mixed_requests(
    total: int, *, page_size: int, hot_tokens: int, max_prompt: int, vocab_size: int, seed: int
) -> list[Request]:
    """Requests whose prompts are shorter and longer than hot buffer and page, the edges among them.

    Args:
        total: how many.
        page_size: of the host tier.
        hot_tokens: of the hot buffers.
        max_prompt: longest prompt.
        vocab_size: of the model.
        seed: of lengths and ids.

    Returns:
        requests numbered from 0; prompts of 1 to 8 times `hot_tokens` ids, and answers of 1 to 24 tokens.
    """
    rng = np.random.default_rng(seed)
    longest = min(8 * hot_tokens, max_prompt)
    edges = [2 * hot_tokens + 1, hot_tokens - 1, hot_tokens, hot_tokens + 1, page_size, page_size + 1, 3 * page_size, 1]
    lengths = np.exp(rng.uniform(0, np.log(longest), total)).astype(np.int64)
    lengths[: len(edges)] = edges[:total]
    answers = rng.integers(1, MOST_NEW_TOKENS + 1, total)
    answers[: len(edges)] = MOST_NEW_TOKENS
    return [
        Request(number, rng.integers(0, vocab_size, int(length)).tolist(), int(answer))
        for number, (length, answer) in enumerate(zip(np.clip(lengths, 1, longest), answers, strict=True))
    ]
