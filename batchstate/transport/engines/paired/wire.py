"""What the two sides of a pair say to each other, byte for byte."""

import struct
from typing import final

import attrs
import numpy as np
import torch

from batchstate.transport.copies import Ints
from batchstate.transport.engines.base import MOST_TAG_BYTES

WRITE, PIECE_COMES, BYE = 1, 2, 3
"""Kinds of header. Rows, if a write has any, follow on the data group: int64[3, n] (region, offset, length) and the
first piece at once, each further piece behind a header of its own."""

LANDED, REFUSED, ENDED, GOT = 1, 2, 3, 4
"""Answers in the order of the writes and the end. GOT comes before them, for each piece but the last of a write: it is
there. REFUSED: nothing more of the write lands. ENDED: nor is anything more received."""

MOST_ROWS = 1 << 20
"""Of one write, before long rows are cut into pieces."""

_HEADER = struct.Struct(f"<qqq{MOST_TAG_BYTES}s")
_ANSWER = struct.Struct("<qq240s")


@final
@attrs.frozen
class Header:
    """Announces a write of so many rows and its tag, or the end."""

    kind: int
    rows: int = 0
    tag: bytes = b""

    def packed(self) -> torch.Tensor:
        """As uint8."""
        return _message(_HEADER.pack(self.kind, self.rows, len(self.tag), self.tag))

    @classmethod
    def read(cls, message: torch.Tensor) -> "Header":
        """Of `packed`. Values are as they came, unchecked."""
        kind, rows, length, tag = _HEADER.unpack(message.numpy().data)
        return cls(kind, rows, tag[:length])


@final
@attrs.frozen
class Answer:
    """What became of a write."""

    verdict: int
    reason: str = ""

    def packed(self) -> torch.Tensor:
        """As uint8."""
        reason = self.reason.encode("ascii", "replace")[:240]
        return _message(_ANSWER.pack(self.verdict, len(reason), reason))

    @classmethod
    def read(cls, message: torch.Tensor) -> "Answer":
        """Of `packed`."""
        verdict, length, reason = _ANSWER.unpack(message.numpy().data)
        return cls(verdict, reason[:length].decode("ascii", "replace"))


def header_room() -> torch.Tensor:
    """Memory for a header."""
    return torch.empty(_HEADER.size, dtype=torch.uint8)


def answer_room() -> torch.Tensor:
    """Memory for an answer."""
    return torch.empty(_ANSWER.size, dtype=torch.uint8)


def refusal(sizes: dict[int, int], table: Ints) -> str:
    """Why rows int64[3, n] may not be written into regions of those sizes (index -> bytes), or an empty string."""
    regions, offsets, lengths = table
    present = np.unique(regions)
    unknown = [index for index in present.tolist() if index not in sizes]
    if unknown:
        return f"region {unknown[0]} is not registered at the receiver"
    room = np.array([sizes[index] for index in present.tolist()], dtype=np.int64)[np.searchsorted(present, regions)]
    outside = np.flatnonzero((offsets < 0) | (offsets > room) | (lengths > room - offsets))
    if outside.size:
        row = int(outside[0])
        return (
            f"row {row}: {lengths[row]} bytes from {offsets[row]} on leave region {regions[row]} of {room[row]} bytes"
        )
    return ""


def _message(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
