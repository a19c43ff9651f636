"""Names what a forward was pointed at and should not have been: request, position, page, and whose entry it is.

Entries carry no tag. All right entries of all requests are known beforehand, so an entry that is not the right one is
looked up among them.
"""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import torch

from batchstate.testing.exact.hashing import decode
from batchstate.testing.exact.text import Answer

__all__ = ["Verifier", "WrongRead"]

_MOST = 64
"""Reports kept; of each request the first."""


@final
@attrs.frozen
class WrongRead:
    """One request of one forward that was pointed at a wrong entry.

    Attributes:
        request: who read it.
        layer: in which layer.
        position: of the entry, counted back from the position of the request's last query.
        row, page: where it lies.
        owners: whose entry it is, as pairs of request and position; empty where no right history has it.
        written: whether anything was ever written there.
        wrong, read: wrong entries of the request in this forward, and all.
    """

    request: int
    layer: int
    position: int
    row: int
    page: int
    owners: tuple[tuple[int, int], ...]
    written: bool
    wrong: int
    read: int

    def __str__(self) -> str:
        if self.owners:
            whose = ", ".join(f"position {position} of request {request}" for request, position in self.owners[:3])
        else:
            whose = "an entry that no right history has" if self.written else "zeros, never written"
        return (
            f"request {self.request}: position {self.position} read from page {self.page}, row {self.row}, "
            f"layer {self.layer}: {whose}; {self.wrong} of {self.read} entries are wrong"
        )


@final
class Verifier:
    """Compares all that is read with the right entries.

    Attributes:
        reports: the first of each request, up to 64.
    """

    def __init__(self) -> None:
        self.reports: list[WrongRead] = []
        self._answers: dict[int, Answer] = {}
        self._zero = int(decode(torch.zeros(1, 1, 8))[0])

    def expect(self, request: int, answer: Answer) -> None:
        """The right answer of a request, before it is served."""
        self._answers[request] = answer

    def look(
        self,
        layer: int,
        words: torch.Tensor,
        columns: torch.Tensor,
        rows: torch.Tensor,
        requests: Sequence[int],
        entries: Sequence[int],
        *,
        drafts: Sequence[int] | None = None,
        page_size: int = 1,
    ) -> None:
        """All that a forward reads in a layer, request by request.

        Args:
            layer: its number.
            words: int64[n], of `decode`; of a layer of state the states that the forward begins with.
            columns: int64[n], positions, as for the model; of a state that of the last token behind it.
            rows: int64[n] -> row of memory.
            requests: whose they are, in their order; those that are not expected are passed over.
            entries: how many each reads.
            drafts: how many of the last of each may be of guessed tokens; None for none.
            page_size: rows of a page.
        """
        all_words, all_columns, stop = words.cpu().numpy(), columns.cpu().numpy(), 0
        for request, count, guessed in zip(requests, entries, drafts or [0] * len(entries), strict=False):
            start, stop = stop, stop + count
            if request not in self._answers or any(old.request == request for old in self.reports):
                continue
            part = slice(start, stop - guessed)
            words_read, positions, right = all_words[part], all_columns[part], self._answers[request].entries[layer]
            ends = len(right)  # an engine that runs ahead goes on behind the answer, where nothing counts
            differ = (right[np.clip(positions, 0, ends - 1)] != words_read) & (positions < ends)
            wrong = np.flatnonzero(differ | (positions < 0))
            if wrong.size and len(self.reports) < _MOST:
                first = int(wrong[0])
                word, row = int(words_read[first]), int(rows[start + first])
                self.reports.append(
                    WrongRead(
                        request, layer, int(positions[first]), row, row // page_size, self._owners(layer, word),
                        word not in (0, self._zero), wrong.size, len(words_read),
                    )
                )  # fmt: skip

    def _owners(self, layer: int, word: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (request, int(position))
            for request, answer in self._answers.items()
            for position in np.flatnonzero(answer.entries[layer] == word)[:1]
        )
