"""Forwards as an engine that uses a relay would launch them, and what their inputs should be, token by token."""

from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batchstate.batching.upload import Extras
from batchstate.forward_inputs import ForwardInputs
from batchstate.forward_plan import ForwardPlan
from batchstate.future_map import FutureMap
from batchstate.mirror import MirroredTensor
from batchstate.pages import PagePool
from batchstate.relaying.fields import DEVICE
from batchstate.runtime import Runtime, Stream
from batchstate.testing.machine import agree
from batchstate.testing.machines.future_map_model import NUM_DRAFTS, RelayModel, Request, Running, handles_of

Array = npt.NDArray[Any]


@final
@attrs.frozen(eq=False)
class Part:
    """What one request puts into a forward.

    Attributes:
        request: whose.
        prompt: its ids, or None where the relay has them.
        query: how many.
        samples: whether this is all of its prompt, or a decode.
    """

    request: Request
    prompt: tuple[int, ...] | None
    query: int
    samples: bool


@final
@attrs.frozen(eq=False)
class Shape:
    """How a forward is laid out.

    Attributes:
        drafts: decodes put in a token and drafts.
        bounded: the host knows only bounds of the lengths of decodes.
        lengths: the field of lengths is named; with bounds it has to be.
        pad_rows: padded requests.
        pad_tokens: padded tokens, or None.
    """

    drafts: bool
    bounded: bool
    lengths: bool
    pad_rows: int
    pad_tokens: int | None

    @property
    def ids(self) -> tuple[str, ...]:
        """The fields that the ids of decodes come from."""
        return ("token", "drafts") if self.drafts else ("token",)

    @property
    def takes(self) -> tuple[str, ...]:
        """All fields that a decode takes."""
        return (*self.ids, "lengths") if self.bounded or self.lengths else self.ids

    @property
    def width(self) -> int:
        """The tokens of a decode."""
        return 1 + NUM_DRAFTS if self.drafts else 1


@final
@attrs.frozen(eq=False)
class Launched:
    """A forward whose inputs are made.

    Attributes:
        parts: who is in it.
        shape: how it is laid out.
        plan, uploaded, inputs: what the library made.
    """

    parts: Sequence[Part]
    shape: Shape
    plan: ForwardPlan
    uploaded: Extras
    inputs: ForwardInputs


@final
class Forwards:
    """Launches forwards on a stream of their own.

    Args:
        relay: whose entries the decodes take.
        pages: with a token table.
        stream: of the forwards.
        model: of the relay.
    """

    def __init__(self, relay: FutureMap, pages: PagePool, stream: Stream, model: RelayModel) -> None:
        self._runtime: Runtime = relay.runtime
        self._relay = relay
        self._pages = pages
        self._stream = stream
        self._model = model

    def launch(self, parts: Sequence[Part], shape: Shape) -> Launched:
        """Plans, uploads, and makes the inputs at forward entry."""
        requests = [part.request for part in parts]
        if not shape.bounded:
            self._make_exact(requests)
        else:
            self._make_exact([part.request for part in parts if part.prompt is not None])
        queries = np.array([part.query for part in parts], dtype=np.int64)
        bounds = np.array([one.bound for one in requests], dtype=np.int64) + queries
        exact = np.array([one.length for one in requests], dtype=np.int64) + queries
        handles = handles_of(requests, self._runtime)
        extension = self._pages.extend(handles, bounds)
        true = self._runtime.upload([exact]).view(0)
        bound_lens = MirroredTensor.from_pair(self._runtime, bounds, true, contract="upper_bound")
        batch = Running.build(self._runtime, slots=handles, seq_lens=exact, bound_lens=bound_lens)
        if shape.pad_rows:
            batch = batch.pad(len(parts) + shape.pad_rows)
        plan = ForwardPlan.of(
            batch.slots,
            batch.bound_lens if shape.bounded else batch.seq_lens,
            queries,
            prompt_ids=[part.prompt for part in parts],
            samples=[part.samples for part in parts],
            pages=self._pages,
            pad_tokens=None if shape.pad_tokens is None else int(queries.sum()) + shape.pad_tokens,
        )
        uploaded = batch.upload(writes=[extension.entry()], extras=plan.extras)
        with self._runtime.use(self._stream):
            inputs = self.inputs(*self.installed(plan, uploaded), shape)
            if self._pages.token_table is not None:
                self._pages.token_table.read_until(self._runtime.record())
        for one, query in zip(requests, queries.tolist(), strict=True):
            one.bound += query
        return Launched(parts, shape, plan, uploaded, inputs)

    def installed(self, plan: ForwardPlan, uploaded: Extras) -> tuple[ForwardPlan, Extras]:
        """The plan that the forward takes, and what crossed with it: that of its own step."""
        return plan, uploaded

    def inputs(self, plan: ForwardPlan, uploaded: Extras, shape: Shape) -> ForwardInputs:
        """At forward entry, on the stream of the forward."""
        return self._relay.resolve_forward_inputs(
            plan,
            uploaded,
            ids=shape.ids[0] if len(shape.ids) == 1 else shape.ids,
            lengths="lengths" if "lengths" in shape.takes else None,
            token_table=self._pages.token_table,
        )

    def with_results(self, sampled: Sequence[Request], here: Sequence[Request]) -> list[Request]:
        """Those who sampled and whose results still matter: who has left meanwhile gets none."""
        return [one for one in sampled if one in here]

    def _make_exact(self, requests: Sequence[Request]) -> None:
        """The host has learned the lengths: pages beyond go back."""
        loose = [one for one in requests if one.bound > one.length]
        if loose:
            lengths = np.array([one.length for one in loose], dtype=np.int64)
            self._pages.truncate(handles_of(loose, self._runtime), lengths, after=self._runtime.record(self._stream))
            for one in loose:
                one.bound = one.length

    def take(self, parts: Sequence[Part], shape: Shape) -> dict[int, list[int]]:
        """The model of what a forward takes from the relay: row -> ids. Call it once the forward was launched."""
        taken = {}
        for row, part in enumerate(parts):
            if part.prompt is None:
                found = {name: self._model.take([part.request], name, DEVICE, 1) for name in shape.takes}
                taken[row] = [int(number) for name in shape.ids for number in found[name].reshape(-1)]
        return taken

    def judge(self, launched: Launched, relayed: dict[int, list[int]]) -> None:
        """The inputs of a forward, built again token by token.

        Raises:
            DisagreementError: they are others.
        """
        parts, inputs, plan = launched.parts, launched.inputs, launched.plan
        ids: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        starts = [0]
        size = self._pages.page_size
        for row, part in enumerate(parts):
            ids += relayed[row] if part.prompt is None else part.prompt
            for at in range(part.request.length, part.request.length + part.query):
                positions.append(at)
                tokens.append(int(self._pages.page_table[part.request.slot][at // size]) * size + at % size)
            starts.append(len(ids))
        shape = launched.shape
        agree((len(ids), len(ids) + (shape.pad_tokens or 0)), (plan.num_tokens, plan.num_padded_tokens), "token counts")
        behind, pads = [0] * (shape.pad_tokens or 0), [0] * shape.pad_rows
        last = [starts[row + 1] - 1 for row, part in enumerate(parts) if part.samples]
        if len(last) == len(parts):
            last += pads
        slot_mapping = torch.empty(0) if inputs.slot_mapping is None else inputs.slot_mapping
        for name, expected, actual in (
            ("slots", [part.request.slot for part in parts] + pads, inputs.slots),
            ("input_ids", ids + behind, inputs.input_ids),
            ("positions", positions + behind, inputs.positions),
            ("slot_mapping", tokens + behind, slot_mapping),
            ("query_start_loc", starts + [starts[-1]] * shape.pad_rows, inputs.query_start_loc),
            ("kv_lens", [part.request.length + part.query for part in parts] + pads, inputs.kv_lens),
            ("last_token_indices", last, inputs.last_token_indices),
        ):
            agree(expected, self._runtime.inspect(actual).tolist(), f"{name} of a forward of {shape}")
        sampled = [part.request.slot for part in parts if part.samples]
        agree(sampled, [slot for slot in inputs.sampling.np.tolist() if slot], "who samples")
