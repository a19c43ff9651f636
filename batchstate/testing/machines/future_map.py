"""`FutureMap` put to use: forwards of prompts, decodes and both, results that come late, and every misuse."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchstate import levels
from batchstate.testing.machines.future_map_base import MOST_TOKENS, OFTEN, PADS
from batchstate.testing.machines.future_map_entries import RelayEntries
from batchstate.testing.machines.future_map_forward import Forwards, Launched, Part, Shape
from batchstate.testing.machines.future_map_misuse import MISUSES, RelayCase
from batchstate.testing.machines.future_map_model import Request, handles_of
from batchstate.testing.misuse import Misuse
from batchstate.violations import Code

_SHAPES = st.builds(Shape, st.booleans(), st.booleans(), st.booleans(), PADS, st.sampled_from([None, 0, 3]))


class FutureMapMachine(RelayEntries):
    """An engine that runs ahead of its device, in all the orders it can."""

    NAME = "future_map"

    @property
    def forwards(self) -> Forwards:
        """Launches forwards over the relay of the example."""
        return Forwards(self.relay, self.pages, self.streams["forward"], self.model)

    # Forwards

    @precondition(lambda self: bool(self.requests))
    @rule(
        data=st.data(),
        who=st.sampled_from(["prompts", "decodes", "mixed"]),
        shape=_SHAPES,
        twice=st.booleans(),
        leaves=st.sampled_from([False, False, True]),
        fetched=OFTEN,
    )
    def forward(self, data: st.DataObject, who: str, shape: Shape, twice: bool, leaves: bool, fetched: bool) -> None:
        """A whole step: plan, upload, inputs at entry, lengths early, tokens late, and the host asks for them."""
        requests = self._chosen(data) if who != "mixed" else list(self.requests)
        if who != "prompts":
            self._make_decodable(requests if who == "decodes" else requests[::2], "seeding")
        kinds = ["prompts" if who == "mixed" and row % 2 else who for row in range(len(requests))]
        drawn = [self._part(data, one, kind, shape) for one, kind in zip(requests, kinds, strict=True)]
        parts = [part for part in drawn if part is not None]
        if parts:
            self._results(self._launch(parts, shape, twice), leaves, fetched)

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), shapes=st.tuples(_SHAPES, _SHAPES), leaves=st.sampled_from([False, False, True]))
    def run_ahead(self, data: st.DataObject, shapes: tuple[Shape, Shape], leaves: bool) -> None:
        """Two decodes of the same requests, one behind the other; the host reads the first when the second runs."""
        self._make_decodable(self.requests, "forward")
        for shape in shapes:
            parts = [part for one in self.requests if (part := self._part(data, one, "decodes", shape)) is not None]
            if not parts:
                return
            asked = len(self.asked)
            self._results(self._launch(parts, shape, False), leaves, True)
            if asked:
                self._fetch(self.asked.pop(asked - 1), "default")

    def _launch(self, parts: Sequence[Part], shape: Shape, twice: bool) -> Launched:
        self._next_step()
        launched = self.forwards.launch(parts, shape)
        relayed = self.forwards.take(parts, shape)
        if levels.full:
            self.forwards.judge(launched, relayed)
        self._reached_by(launched)
        if twice:
            self.reached("a plan used twice refused")
            with self.rt.use(self.streams["forward"]), self.refused(Code.FUTURE_CONSUMED):
                self.forwards.inputs(launched.plan, launched.uploaded, shape)
        return launched

    def _part(self, data: st.DataObject, one: Request, who: str, shape: Shape) -> Part | None:
        """What a request puts in, or None if it has to sit this one out."""
        known = self.model.peek(one, "lengths")
        decodes = who != "prompts" and self.model.readable(one, shape.takes)
        if decodes and "lengths" in shape.takes:
            decodes = known is not None and int(known) == one.length
        if not decodes and who == "decodes":
            return None
        query = shape.width if decodes else data.draw(st.integers(1, 3), label="tokens of a prompt")
        if one.bound + query > MOST_TOKENS:
            return None
        if decodes:
            return Part(one, None, query, True)
        self.numbers += 1
        return Part(
            one, tuple(range(self.numbers, self.numbers + query)), query, data.draw(st.booleans(), label="last")
        )

    def _results(self, launched: Launched, leaves: bool, fetched: bool) -> None:
        """Lengths are published early, tokens stashed after sampling; one may have left since the launch."""
        for part in launched.parts:
            known = part.query if part.prompt is not None else 1 + self.numbers % part.query
            part.request.length += known
        sampled = [part.request for part in launched.parts if part.samples]
        if leaves and sampled:
            self._leave(sampled[0], "forward")
            self.reached("left between launch and results")
        here = self.forwards.with_results(sampled, self.requests)
        if not here:
            return
        complete = len(here) == len(sampled)
        slots = launched.inputs.sampling if complete else handles_of(here, self.rt)
        late = ("token", "drafts", "hidden", "accepted")
        self._clear_way([one for one in here if one in self.requests], ("lengths", *late))
        early, values = self._values(here, ("lengths",)), self._values(here, late)
        with self.rt.use(self.streams["forward"]):
            self.relay.publish(slots, **self._given(early))
            self.relay.stash(slots, **self._given(values))
            self._published(here, early | values, "forward")
            if fetched:
                self._prefetch(here, ("token", "lengths", "accepted"), slots)

    def _reached_by(self, launched: Launched) -> None:
        decodes = [part.prompt is None for part in launched.parts]
        shape = launched.shape
        self.reached("a forward of prompts alone", not any(decodes))
        self.reached("a forward of decodes alone", all(decodes))
        self.reached("a forward of prompts and decodes", any(decodes) and not all(decodes))
        self.reached("drafts put in", shape.drafts and any(decodes))
        self.reached("padded to a graph's size", bool(shape.pad_tokens))
        self.reached(
            "bounded lengths set right",
            launched.plan.bounded
            and any(part.request.bound > part.request.length + part.query for part in launched.parts),
        )

    # Misuse

    @precondition(lambda self: bool(self.gone))
    @rule(at=st.integers(0, 3), name=st.sampled_from(["token", "lengths"]))
    def misuse_a_handle(self, at: int, name: str) -> None:
        """Who has left gets nothing more, reads nothing, and does not pass for the slot's next owner."""
        slots = self.gone[at % len(self.gone)].handle
        values = self.on_device(np.zeros(1, np.int64))
        self.reached("handle of a slot used again refused", bool(self.pool.is_live(slots.np).any()))
        for call in (
            lambda: self.relay.publish(slots, **{name: values}),
            lambda: self.relay.seed(slots, **{name: [0]}),
            lambda: self.relay.gather(slots, name),
            lambda: self.relay.prefetch(slots, name),
            lambda: self.relay.discard(slots),
            lambda: self.relay.states(slots, name),
        ):
            with self.refused(Code.SLOT_STALE_HANDLE):
                call()

    @precondition(lambda self: bool(self.requests))
    @rule(misuse=st.sampled_from(MISUSES))
    def misuse(self, misuse: Misuse[RelayCase]) -> None:
        """What cannot be meant is refused, and changes nothing."""
        case = RelayCase(self.relay, handles_of(self.requests, self.rt), self.foreign)
        with self.refused(*misuse.expected):
            misuse.call(case)
