"""Speculation without a second model: guess what followed the last two tokens when they were seen before.

The known tokens of each request lie on the device, by slot, because the newest of them are known there first. Guesses
are made and verified there as well, and the host learns a step later how many were right.
"""

from typing import final

import attrs
import torch

NGRAM = 2
"""Tokens that have to be the same."""


@final
@attrs.define(eq=False)
class Drafter:
    """Prompt lookup. Everything runs on the forward's stream.

    Attributes:
        num_drafts: tokens guessed for each request.
        history: int64[capacity, width], the token at each position of each slot; behind its length anything.
    """

    num_drafts: int
    history: torch.Tensor = attrs.field(repr=False)

    def note(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes `tokens` at `positions` of `slots`; all int64[n]."""
        self.history[slots, positions] = tokens

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Tokens that may follow.

        Args:
            slots: int64[n].
            lengths: int64[n], known tokens of each; at least one.
            longest: a bound of the lengths.

        Returns:
            int64[n, num_drafts]; the last token again where nothing is found.
        """
        tokens = self.history.index_select(0, slots)[:, :longest]  # int64[n, longest]
        places = torch.arange(longest, device=tokens.device)
        last = tokens.gather(1, lengths[:, None] - 1)  # int64[n, 1]
        if longest <= NGRAM:
            return last.expand(-1, self.num_drafts).contiguous()
        tail = (lengths[:, None] - NGRAM + places[:NGRAM]).clamp_(min=0)
        same = tokens.unfold(1, NGRAM, 1).eq(tokens.gather(1, tail)[:, None]).all(2)  # bool[n, longest - NGRAM + 1]
        starts = places[: same.shape[1]]
        # The newest earlier place: its continuation has to begin before the end.
        match = torch.where(same & (starts + NGRAM < lengths[:, None]), starts, -1).amax(1, keepdim=True)
        follow = match + NGRAM + torch.arange(self.num_drafts, device=tokens.device)  # int64[n, num_drafts]
        usable = (match >= 0) & (follow < lengths[:, None])
        return torch.where(usable, tokens.gather(1, follow.clamp(max=longest - 1)), last)


def verify(targets: torch.Tensor, inputs: torch.Tensor, decodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the model would have made each guess itself.

    Args:
        targets: int64[n, k + 1], the model's choice behind each of the last tokens of each request.
        inputs: int64[n, k + 1], these tokens: the last known one, then the guesses.
        decodes: bool[n, 1]; elsewhere the tokens are the end of a prompt, and only the last choice counts.

    Returns:
        int64[n, k + 1], the new tokens first; int64[n], how many guesses were right: one token more is new.
    """
    right = (inputs[:, 1:] == targets[:, :-1]) & decodes
    accepted = right.long().cumprod(1).sum(1)
    return torch.where(decodes, targets, targets[:, -1:]), accepted
