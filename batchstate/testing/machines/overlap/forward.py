"""The device's part of a step: plain torch operations and launched kernels on the forward's stream; nobody waits.

Everything that a forward reads ends up in its tokens, in the sums of `overlap_model`.
"""

from typing import final

import attrs
import torch

from batchstate.batching.upload import Extras
from batchstate.forward_plan import ForwardPlan
from batchstate.future_map import Prefetched
from batchstate.indices import Slots
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Fence
from batchstate.testing.machines.overlap.choices import Choices
from batchstate.testing.machines.overlap.memory import Memory
from batchstate.testing.machines.overlap.model import (
    AGE,
    ID,
    LAST,
    LENGTH,
    MARK,
    NUDGE,
    ODD,
    PRIME,
    SALT,
    STATE,
    TEMPERATURE,
)
from batchstate.testing.machines.overlap.requests import MOST_TOKENS, Running, handles_of


@final
@attrs.frozen(eq=False)
class Work:
    """What the schedule hands over to one forward.

    Attributes:
        choices: how it is run.
        batch: the requests.
        ages: steps of each, with this one.
        uploaded: what crossed with the batch.
        plan: of its inputs; None where the forward gathers them itself.
        sampling: which requests sample.
        came: fences behind what arrived for them on another stream.
    """

    choices: Choices
    batch: Running
    ages: MirroredTensor
    uploaded: Extras
    plan: ForwardPlan | None
    sampling: tuple[int, ...]
    came: tuple[Fence, ...]


@final
@attrs.frozen(eq=False)
class Launched:
    """A forward on its way.

    Attributes:
        batch: the requests as they are after it.
        results: tokens and logs, on their way to the host; None where nobody samples.
        done: forward-done.
    """

    batch: Running
    results: Prefetched | None
    done: Fence


@final
@attrs.frozen(eq=False)
class _Inputs:
    """int64[t] ids, positions and places in KV memory, and what results are published by."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    sampling: Slots


@final
class Forward:
    """Launches forwards over the memory of one engine."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._runtime = memory.runtime

    def run(self, work: Work) -> Launched:
        """One forward. What is handed over is read first, each in its own way; what is the forward's own comes last."""
        memory, runtime, batch = self._memory, self._runtime, work.batch
        with runtime.use(memory.streams.forward):
            total, rows = self._read(work)
            inputs = self._inputs(work, rows)
            if work.choices.nudged:
                total = total + memory.relay.gather(batch.slots, "nudge") * NUDGE
            for fence in work.came:
                runtime.wait(fence)
            odd = batch.odd.device
            total = total + batch.last.device * LAST + odd * ODD
            total = total + inputs.ids.index_select(0, work.uploaded["ends"]) * ID
            attended = self._attend(work, rows, inputs)
            slots = batch.slots.device
            states = memory.states.device
            state = states.index_select(0, slots)
            mix = (total + attended + state * STATE) % PRIME
            state = runtime.launch(_next_state, state, mix, reads=(state, mix), name="next state")
            states.index_copy_(0, slots, state)
            results = self._leave(work, inputs, mix, torch.stack((state, attended), dim=1))
            true_odd = MirroredTensor.from_pair(runtime, batch.odd.np, odd - 1 + mix % 2, contract="upper_bound")
            batch = batch.evolve(last=MirroredTensor.from_device(runtime, mix), odd=true_odd)
            return Launched(batch, results, runtime.record())

    def _read(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """What the schedule hands over: a sum int64[n], and the rows [n, MOST_TOKENS] of the token table."""
        memory, batch = self._memory, work.batch
        parts: list[torch.Tensor] = []
        rows: torch.Tensor | None = None
        for name in work.choices.readings:
            if name == "salts":
                parts.append(work.uploaded["salts"] * SALT)
            elif name == "columns":
                parts.append(batch.seq_lens.device * LENGTH)
                parts.append(batch.temperature.device.to(torch.int64) * TEMPERATURE)
            elif name == "ages":
                parts.append(work.ages.device * AGE)
            elif name == "marks":
                slots = batch.slots.device
                parts.append(memory.marks.device.index_select(0, slots).sum(1) * MARK)
                memory.marks.read_until(self._runtime.record())
            else:
                slots = batch.slots.device
                rows = memory.tokens.device.index_select(0, slots)
                memory.tokens.read_until(self._runtime.record())  # read-done: the next plan may write it
        assert rows is not None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total, rows

    def _inputs(self, work: Work, rows: torch.Tensor) -> _Inputs:
        batch, relay = work.batch, self._memory.relay
        if work.plan is None:
            positions = batch.seq_lens.device - 1
            places = rows.gather(1, positions[:, None]).view(-1).to(torch.int64)
            return _Inputs(relay.gather(batch.slots, "token"), positions, places, batch.slots)
        inputs = relay.resolve_forward_inputs(work.plan, work.uploaded, ids="token")
        assert inputs.slot_mapping is not None  # the plan has pages
        return _Inputs(inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.sampling)

    def _attend(self, work: Work, rows: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        """Writes the KV of the new tokens, and reads that of all: int64[n]."""
        runtime, kv = self._runtime, self._memory.kv
        ids, positions, places = inputs.ids, inputs.positions, inputs.places
        runtime.launch(
            _write_kv, kv, places, ids, positions, reads=(places, ids, positions), writes=(kv,), name="write KV"
        )
        if work.choices.tries:
            tried = work.uploaded["tried"]
            kv.index_copy_(0, tried, torch.stack((tried, tried + 1), dim=1))
        there = work.uploaded["columns"] < work.batch.seq_lens.device[:, None]
        known = (rows * there).to(torch.int64)  # beyond its tokens a request reads token 0, which is zero
        weights = work.uploaded["weights"]
        return runtime.launch(_attend, kv, known, weights, reads=(kv, known, weights), name="attend", operations=3)

    def _leave(self, work: Work, inputs: _Inputs, mix: torch.Tensor, log: torch.Tensor) -> Prefetched | None:
        """Tokens for the next forward and the host, and logs for the host alone."""
        if not work.sampling:
            return None
        if len(work.sampling) < len(work.batch):
            chosen = work.uploaded["chosen"]
            mix, log = mix.index_select(0, chosen), log.index_select(0, chosen)
        relay = self._memory.relay
        relay.stash(inputs.sampling, token=mix, log=log)
        asked = inputs.sampling
        if work.choices.own_handles:
            asked = handles_of([work.batch.requests[row] for row in work.sampling])
            _ = asked.device  # crosses here: what the relay's stream uploads would be over only when it is read
        return relay.prefetch(asked, "token", "log")


def _write_kv(kv: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
    keys = (ids * 31 + positions * 17 + 5) % PRIME
    values = (ids * 7 + positions * 3 + 1) % PRIME
    kv.index_copy_(0, places, torch.stack((keys, values), dim=1))


def _attend(kv: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64[n]: the KV at `places` [n, MOST_TOKENS], weighted by position."""
    found = kv.index_select(0, places.view(-1)).view(-1, MOST_TOKENS, 2)
    return (found * weights).sum((1, 2)) % PRIME


def _next_state(state: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (state * 53 + mix * 59 + 1) % PRIME
