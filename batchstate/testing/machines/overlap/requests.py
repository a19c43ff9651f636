"""The requests of the overlap machine: what the engine keeps of each, and what the device should hold for it."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, final

import attrs
import torch

from batchstate.batch import Batch
from batchstate.columns import device_only, host_list, mirrored, slot_column
from batchstate.indices import Slots

MOST_TOKENS = 12
"""Tokens that a request may have, one that is only tried included."""

MARKS = 2
"""Numbers in a request's row of the table of marks."""


class Way(Enum):
    """How a request arrives."""

    PROMPT = "prompt"
    """The forward computes the KV of its prompt."""
    WRITTEN = "written"
    """Prebuilt: its KV is written into its pages on the stream on which it arrives."""
    HANDED = "handed"
    """Prebuilt: its KV arrives on one stream, and is handed to the forward's, which writes it."""


class Running(Batch):
    """The requests that run, with the lengths that they have after the step."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)
    temperature = mirrored(torch.float32, pad=1.0)
    odd = mirrored(torch.int64, contract="upper_bound")  # steps with an odd mix, of which the host counts all
    last = device_only(torch.int64)  # the mix of the last step
    requests = host_list()


@final
@attrs.define(eq=False)
class OnDevice:
    """What the device holds for a request when all that was launched has run.

    Attributes:
        kv: the row of each token in KV memory.
        state: its row of the table of states.
        marks: its row of the table of marks.
        last, odd, age, temperature: its columns.
        token: its entry in the relay.
    """

    state: int
    kv: list[tuple[int, int]] = attrs.field(factory=list)
    marks: tuple[int, ...] = (0,) * MARKS
    last: int = 0
    odd: int = 0
    age: int = 0
    temperature: int = 1
    token: int = 0


@final
@attrs.define(eq=False, repr=False)
class Request:
    """One request.

    Attributes:
        number: names it.
        prompt: ids.
        answer: tokens that it wants.
        way: how it arrives the first time.
        marks: what its row of marks should hold; zeros are not written.
        handle: its slot, while it runs.
        fill: ids that are put in, or were when it arrived, before it decodes.
        sampled: tokens sampled, those in flight included.
        in_flight: steps that sampled for it and were not read.
        output: place in the answer -> token that the host has read.
        aborted: whether its client hung up.
        held: what the device holds for it, while it runs.
    """

    number: int
    prompt: Sequence[int]
    answer: int
    way: Way = Way.PROMPT
    marks: tuple[int, ...] = (0,) * MARKS
    handle: Slots | None = None
    fill: Sequence[int] = ()
    sampled: int = 0
    in_flight: int = 0
    output: dict[int, int] = attrs.field(factory=dict)
    aborted: bool = False
    held: OnDevice = attrs.field(factory=lambda: OnDevice(0))

    def __repr__(self) -> str:
        return f"<request {self.number}: {len(self.prompt)} ids, {self.sampled} of {self.answer} tokens>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would list the fields

    @property
    def length(self) -> int:
        """Tokens in KV memory after the last launched step."""
        return len(self.held.kv)

    @property
    def over(self) -> bool:
        """Whether it leaves before the next step."""
        return self.aborted or self.sampled >= self.answer

    @property
    def known(self) -> Sequence[int]:
        """All ids that the host knows, to be put in where its KV is not there."""
        return [*self.prompt, *(self.output[place] for place in range(self.sampled))]

    def query(self, chunk: int) -> int:
        """Ids that it puts in next, `chunk` of its prompt at most."""
        return min(chunk, len(self.fill) - self.length) if self.length < len(self.fill) else 1

    def ids(self, query: int) -> Sequence[int] | None:
        """The next ids as the host knows them, or None where the relay has the one."""
        return self.fill[self.length : self.length + query] if self.length < len(self.fill) else None


def handles_of(requests: Sequence[Request]) -> Slots:
    """The handles of requests that run, in order: fresh ones, whose device side nobody has made."""
    handles = [one.handle for one in requests]
    return Slots.cat([one for one in handles if one is not None])
