"""A drafter that is right with a chosen probability: what speculation does to the state depends on little else."""

from typing import final

import numpy as np
import torch


@final
class ExactDrafter:
    """In place of `examples.engine.drafting.Drafter`.

    Attributes:
        num_drafts: tokens guessed for each request.
        history: int64[capacity, width], the tokens of each slot as the engine has noted them.
    """

    def __init__(self, num_drafts: int, history: torch.Tensor, vocab_size: int, accepted: float) -> None:
        self.num_drafts, self.history = num_drafts, history
        self._vocab_size, self._accepted = vocab_size, accepted
        self._texts: list[list[int]] = []
        self._draw = np.random.default_rng(0)

    def expect(self, text: list[int]) -> None:
        """A prompt with its right answer, and as many tokens behind it as may be guessed."""
        self._texts.append(text)

    def note(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """See `Drafter.note`."""
        self.history[slots, positions] = tokens

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """See `Drafter.propose`: the right next tokens, each kept with probability `accepted`, else another one."""
        rows = []
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            tokens = self.history[slot, :length].tolist()
            text = next((text for text in self._texts if text[:length] == tokens), [0] * (length + self.num_drafts))
            right = np.resize([*text[length : length + self.num_drafts], 0], self.num_drafts)
            wrong = self._draw.random(self.num_drafts) >= self._accepted
            rows.append((right + wrong) % self._vocab_size)
        return torch.from_numpy(np.array(rows, np.int64).reshape(-1, self.num_drafts))
