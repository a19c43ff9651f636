"""The device's part of a step: everything here runs on the forward stream, and nothing waits for it.

One forward, in the order in which it happens::

    inputs      ids from the host or from the relay, positions and lengths, in the forward's own view; the token
                table is written here, behind the forward before, which reads it
    model       KV of the new tokens is written, logits come out
    accept      tokens accepted, and so true lengths, as soon as the guesses are verified (speculation only)
    publish     the last token, for the next forward; new tokens, for the host
    prefetch    the host's part sets out, over a stream of its own
    forward-done  slots and pages of requests that leave may change hands
"""

from collections.abc import Sequence
from typing import final

import torch

from batchstate import FutureMap, Locations, MirroredTensor, PagePool, Slots, Table, relay_field
from batchstate.forward.inputs import ForwardInputs
from batchstate.runtime import Runtime
from examples.engine.attention import PagedView
from examples.engine.batch import RunningBatch, Step
from examples.engine.drafting import Drafter, verify
from examples.engine.model import Model
from examples.engine.request import Prebuilt, Request
from examples.engine.settings import EngineSettings


@final
class Forward:
    """Runs steps.

    Args:
        runtime: the device.
        settings: modes.
        model: the model.
        pages: the pool of KV pages, over the slots of the requests.
        req_to_token: [slot, position] -> token of KV memory.

    Attributes:
        stream: where everything runs.
        relay: what a forward leaves for the next one and for the host.
        ids: its fields with the next tokens of a request.
        results: its fields that the host reads.
        kv: keys and values of all pages; only this stream reads and writes them.
    """

    def __init__(
        self, runtime: Runtime, settings: EngineSettings, model: Model, pages: PagePool, req_to_token: Table
    ) -> None:
        self.stream = runtime.stream("forward")
        self._arrivals = runtime.current_stream
        self._runtime = runtime
        self._model = model
        with runtime.use(self.stream):
            self.kv = model.new_kv(pages.location_capacity)
            pages.register_kv(*self.kv.keys, *self.kv.values)
        self._req_to_token = req_to_token
        self._drafts = settings.num_drafts
        fields = {
            "last_token": relay_field(torch.int64, read_by="device" if self._drafts else "both", non_negative=True)
        }
        self.ids: tuple[str, ...] = ("last_token",)
        self.results: tuple[str, ...] = ("last_token",)
        if self._drafts:
            fields["drafts"] = relay_field(torch.int64, (self._drafts,), non_negative=True)  # with its ids
            fields["outputs"] = relay_field(torch.int64, (settings.decode_len,), read_by="host", non_negative=True)
            fields["seq_lens"] = relay_field(torch.int64, read_by="both", non_negative=True)
            fields["accepted"] = relay_field(torch.int64, read_by="host")
            self.ids, self.results = ("last_token", "drafts"), ("outputs", "seq_lens", "accepted")
            with runtime.use(self.stream):
                history = runtime.device_zeros((pages.slots.capacity, settings.row_width), torch.int64)
            self._drafter = Drafter(self._drafts, history)
        self.relay = FutureMap(pages.slots, fields)

    def publish_known(self, slots: Slots, requests: list[Request]) -> None:
        """Requests that come with tokens put the last one into the relay; from there on they are like all others."""
        published: dict[str, list[object]] = {"last_token": [request.output[-1] for request in requests]}
        if self._drafts:
            published["drafts"] = [[token] * self._drafts for token in published["last_token"]]
            published["seq_lens"] = [request.kv_len for request in requests]
        with self._runtime.use(self.stream):
            self.relay.publish(slots, **published)

    def load(self, tokens: Locations, slots: Slots, prompt: Sequence[int], prebuilt: Prebuilt) -> None:
        """Copies KV that was computed elsewhere into a request's pages.

        It came on the stream on which the engine was made, and is kept until it is copied.
        """
        runtime, arrivals = self._runtime, self._arrivals
        with runtime.use(self.stream):
            came = runtime.record(arrivals)
            keys, values = (
                [runtime.use_on_current_stream(layer, arrivals, came) for layer in layers]
                for layers in (prebuilt.keys, prebuilt.values)
            )
            self.kv.write(tokens.device, keys, values)
            if self._drafts:
                ids = MirroredTensor.from_host(self._runtime, prompt, contract="host_only").device
                places = torch.arange(len(prompt), device=ids.device)
                self._drafter.note(slots.device.expand(len(prompt)), places, ids)

    def run(self, step: Step) -> RunningBatch:
        """Launches one step; its results set out for the host. Returns the batch as it is after the step."""
        runtime, batch = self._runtime, step.batch
        with runtime.use(self.stream):
            inputs = step.planned.inputs()
            table = self._req_to_token.device_for(batch.slots)
            kv_tokens = table.index_select(0, inputs.slots)[:, : inputs.max_kv_len].long()
            assert inputs.slot_mapping is not None  # the plan has pages
            view = PagedView(
                inputs.positions,
                inputs.slot_mapping,
                inputs.query_start_loc,
                inputs.query_lens,
                inputs.kv_lens,
                kv_tokens,
            )
            if self._drafts:
                self._note_inputs(inputs)
            if not step.sampling:  # chunks of prompts that are not their last, or an idle step
                self._model.forward(inputs.input_ids, view, self.kv, inputs.last_token_indices)
            elif self._drafts:
                batch = self._speculate(step, inputs, view)
            else:
                chosen = self._model.forward(inputs.input_ids, view, self.kv, inputs.last_token_indices).argmax(-1)
                step.planned.publish(last_token=chosen)
            if step.sampling:
                step.results = step.planned.results
            step.forward_done = runtime.record()
        return batch

    def _speculate(self, step: Step, inputs: ForwardInputs, view: PagedView) -> RunningBatch:
        """Runs the last tokens with their guesses, keeps those that are right, and guesses anew."""
        width = 1 + self._drafts
        columns = torch.arange(width, device=self._runtime.device)
        # The last `width` tokens of each request; before the first token of a short prompt lie those of another.
        last = (inputs.last_token_indices[:, None] + columns - self._drafts).clamp_(min=0)  # int64[n, width]
        logits = self._model.forward(inputs.input_ids, view, self.kv, last.reshape(-1))
        targets = logits.argmax(-1).view(-1, width)
        decodes = step.planned.extras["decodes"][:, None]
        outputs, accepted = verify(targets, inputs.input_ids[last], decodes)

        rows = step.planned.extras["sample_rows"]
        put_in = inputs.query_start_loc.diff()[rows]
        true_lens = step.planned.accept(torch.where(decodes[:, 0], 1 + accepted, put_in))

        slots = inputs.sampled_slots.device
        self._drafter.note(slots[:, None], (true_lens - accepted)[:, None] + columns, outputs)
        step.planned.publish(
            last_token=outputs.gather(1, accepted[:, None])[:, 0],
            drafts=self._drafter.propose(slots, true_lens + 1, inputs.max_kv_len + 1),
            outputs=outputs,
        )
        lens = MirroredTensor.from_pair(
            self._runtime,
            step.batch.seq_lens.np,
            step.batch.seq_lens.device.index_copy(0, rows, true_lens),
            contract="upper_bound",
        )
        return step.batch.replace(seq_lens=lens)

    def _note_inputs(self, inputs: ForwardInputs) -> None:
        lengths, num_tokens = inputs.query_start_loc.diff(), int(inputs.query_lens.sum())
        slots = torch.repeat_interleave(inputs.slots, lengths, output_size=num_tokens)
        tokens = slice(num_tokens)
        self._drafter.note(slots, inputs.positions[tokens], inputs.input_ids[tokens])
