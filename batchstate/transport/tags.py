"""The tag of one write: whose it is, and how many there are. Fixed size, so that any engine carries it."""

import struct
from typing import Self, final

import attrs

_LAYOUT = struct.Struct(">8sQIHII")
_MAGIC = b"bs1:"


@final
@attrs.frozen
class Tag:
    """Names one chunk of what one writer writes for one lease. No two writes ever have the same.

    Attributes:
        epoch: nonce of the receiving engine, 16 hex digits.
        serial: of the lease; a retry is another lease.
        attempt: which attempt of its request the lease is, from 1 on.
        writer: index of the writer among those of the lease.
        chunk: 0, 1, ... for each writer.
        total: how many chunks the writer writes, on the last of them; 0 on the others.
    """

    epoch: str
    serial: int
    attempt: int
    writer: int
    chunk: int
    total: int = 0

    def packed(self) -> bytes:
        """As an engine takes it, 34 bytes."""
        fields = (bytes.fromhex(self.epoch), self.serial, self.attempt, self.writer, self.chunk, self.total)
        return _MAGIC + _LAYOUT.pack(*fields)

    @classmethod
    def unpacked(cls, packed: bytes) -> Self | None:
        """The tag in these bytes, or None where they are none of this library."""
        if len(packed) != len(_MAGIC) + _LAYOUT.size or not packed.startswith(_MAGIC):
            return None
        epoch, *numbers = _LAYOUT.unpack(packed[len(_MAGIC) :])
        tag = cls(epoch.hex(), *numbers)
        return tag if tag.total in (0, tag.chunk + 1) else None
