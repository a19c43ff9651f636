"""Names what a forward was pointed at and should not have been: request, position, page, and whose entry it is.

Entries carry no tag. All right entries of all requests are known beforehand, so an entry that is not the right one is
looked up among them.
"""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.testing.exact.hashing import decode
from batchstate.testing.exact.model import Read
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
        read: Read,
        requests: Sequence[int],
        kv_lens: Sequence[int],
        rows: torch.Tensor,
        page_size: int,
        drafts: Sequence[int],
    ) -> None:
        """The entries that a packed forward reads in a layer.

        Args:
            layer: its number.
            read: as for the model, with one row.
            requests: whose the entries are, in their order; those that are not expected are passed over.
            kv_lens: entries of each.
            rows: int64[n] -> row of memory.
            page_size: rows of a page.
            drafts: for each request how many of its last entries may be of guessed tokens.
        """
        words, columns = decode(read.keys[0]).cpu().numpy(), read.columns[0].cpu().numpy()
        start = 0
        for request, entries, guessed in zip(requests, kv_lens, drafts, strict=False):
            part = slice(start, start + entries - guessed)
            start += entries
            if request in self._answers:
                self._compare(request, layer, words[part], columns[part], rows[part], page_size)

    def look_at_states(
        self, layer: int, states: torch.Tensor, requests: Sequence[int], past: Sequence[int], rows: torch.Tensor
    ) -> None:
        """The states int64[n] that a forward begins with, behind `past` tokens of each request."""
        words = states.cpu().numpy()
        for number, (request, tokens) in enumerate(zip(requests, past, strict=False)):
            if tokens and request in self._answers:
                part, column = slice(number, number + 1), np.array([tokens - 1])
                self._compare(request, layer, words[part], column, rows[part], 1)

    def _compare(
        self,
        request: int,
        layer: int,
        words: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
        rows: torch.Tensor,
        page_size: int,
    ) -> None:
        right = self._answers[request].entries[layer]
        ends = len(right)  # an engine that runs ahead goes on behind the answer, where nothing counts
        wrong = (columns < 0) | ((right[np.clip(columns, 0, ends - 1)] != words) & (columns < ends))
        if not wrong.any() or len(self.reports) == _MOST or any(old.request == request for old in self.reports):
            return
        first = int(wrong.argmax())
        word, row = int(words[first]), int(rows[first])
        self.reports.append(
            WrongRead(
                request, layer, int(columns[first]), row, row // page_size, self._owners(layer, word),
                word not in (0, self._zero), int(wrong.sum()), len(words),
            )
        )  # fmt: skip

    def _owners(self, layer: int, word: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (request, int(position))
            for request, answer in self._answers.items()
            for position in np.flatnonzero(answer.entries[layer] == word)[:1]
        )
