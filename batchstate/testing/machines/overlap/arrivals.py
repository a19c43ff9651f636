"""How requests begin: their slot's state is set on the stream that brings them, which waits for no forward.

That is allowed because a slot changes hands only when the last forward of its owner is done. Nothing else orders the
two: a slot or a page that is given out too early is written here while a forward still uses it.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from batchstate.indices import Slots
from batchstate.pages import Extension
from batchstate.runtime import Fence, PackedUpload
from batchstate.tables import TableWrite
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import PRIME, kv_row
from batchstate.testing.machines.overlap.requests import OnDevice, Request, Running, Way, handles_of


@final
class Arrivals:
    """Begins requests that have slots.

    Attributes:
        writes: rows of the token table that ride in the next upload.
        came: fences of what the next forward has to wait for.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime
        self.writes: list[TableWrite] = []
        self.came: list[Fence] = []

    def begin(self, requests: Sequence[Request]) -> Running:
        """Requests whose prompt the forward computes begin on the current stream, which uploads the step."""
        for one in requests:
            one.held = OnDevice(_first_state(one))
            one.fill = one.known
        batch, _ = self._begun(requests)
        return batch

    def begin_prebuilt(self, request: Request) -> Running:
        """A request that arrives with its KV and a token begins where it arrives."""
        memory, runtime, slot = self._memory, self._runtime, handles_of([request])
        token = (request.number * 7919 + 11) % PRIME
        held = request.held = OnDevice(_first_state(request), token=token, last=token, marks=request.marks)
        held.kv = [kv_row(one, at) for at, one in enumerate(request.prompt)]
        request.output[0], request.sampled, request.fill = token, 1, request.prompt
        with runtime.use(memory.streams.arrivals):
            batch, crossed = self._begun([request], np.array(held.kv, np.int64))
            extension = memory.pages.extend(slot, len(request.prompt))
            if request.way is Way.WRITTEN:
                _put_kv(memory.kv, extension.tokens.device, crossed.view(3))
            came = runtime.record()
            self.came.append(came)
            self._note(request, slot, extension)
            memory.relay.seed(slot, token=[token])
        if request.way is Way.HANDED:
            with runtime.use(memory.streams.forward):
                rows = runtime.acquire(crossed.view(3), memory.streams.arrivals, came)
                _put_kv(memory.kv, extension.tokens.device, rows)
        request.way = Way.PROMPT  # should it come again: its KV is then gone
        return batch

    def _begun(self, requests: Sequence[Request], *more: np.ndarray) -> tuple[Running, PackedUpload]:
        """The rows of a batch, made on the current stream, which sets the states; and `more` in the same copy."""
        handles, states = handles_of(requests), self._memory.states.device
        values = [np.array([getattr(one.held, name) for one in requests], np.int64) for name in ("state", "last")]
        crossed = self._runtime.upload([handles.np, *values, *more])
        states.index_copy_(0, crossed.view(0), crossed.view(1))
        batch = Running.build(
            self._runtime,
            slots=handles,
            seq_lens=[one.length for one in requests],
            temperature=[float(one.held.temperature) for one in requests],
            odd=[0] * len(requests),
            last=crossed.view(2),
            requests=list(requests),
        )
        return batch, crossed

    def _note(self, request: Request, slot: Slots, extension: Extension) -> None:
        """Its tokens go into the table here, or with the step's upload; its marks here."""
        if request.number % 2:
            self._memory.tokens.write(extension.slots, extension.positions, extension.tokens)
        else:
            self.writes.append(extension.entry())
        if any(request.marks):
            self._memory.marks.write(slot, None, [request.marks])


def _put_kv(kv: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    kv.index_copy_(0, places, rows)


def _first_state(request: Request) -> int:
    return (request.number * 104_729 + request.sampled) % PRIME
