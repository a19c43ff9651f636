"""The device's part of the decode worker: all of it runs on the forward stream, and nothing waits for it.

A decode step, in order::

    back up     the KV of the token before goes to the host: what the step reads, and overwrites, is safe
    inputs      last tokens and guesses from the relay; for each position its place in either tier
    model       KV of the new tokens is written to the hot buffers, logits come out
    publish     the last token, guesses and the true length, for the next step; new tokens and length, for the host
"""

from collections.abc import Sequence
from typing import final

import attrs
import torch

from batchstate import (
    Batch,
    ForwardPlan,
    FutureMap,
    MirroredTensor,
    PagePool,
    Slots,
    Table,
    host_list,
    mirrored,
    relay_field,
    slot_column,
)
from batchstate.batch import Extras
from batchstate.future_map import Prefetched
from batchstate.kv.hisparse import HiSparse, LastLocation
from batchstate.runtime import Fence, Runtime
from examples.disaggregated.kv import TieredKV, TieredView
from examples.engine.attention import PagedView
from examples.engine.drafting import Drafter, verify
from examples.engine.model import Model
from examples.engine.request import Request


class TierBatch(Batch):
    """One row a request."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64, contract="upper_bound")  # tokens with KV after the last launched step
    kv_limits = mirrored(torch.int64)  # the same when the answer has its full length
    requests = host_list(Request)


@attrs.define(eq=False)
class Launched:
    """A forward under way: whose tokens it brings, the tokens on their way to the host, and its end."""

    requests: list[Request]
    results: Prefetched
    done: Fence


@final
class TierForward:
    """Runs forwards of the decode worker.

    Args:
        model: on the device.
        pages: hot buffers, and prompts that are prefilled here.
        kv: both tiers.
        hot_table: [slot, hot row] -> device token.
        host_table: [slot, position] -> host location.
        num_drafts: tokens that a step guesses for each request.

    Attributes:
        stream: where everything runs.
        relay: what a forward leaves for the next one and for the host.
    """

    def __init__(
        self, model: Model, pages: PagePool, kv: TieredKV, hot_table: Table, host_table: Table, num_drafts: int
    ) -> None:
        self._runtime: Runtime = pages.runtime
        self.stream = self._runtime.stream("forward")
        self._model, self._kv = model, kv
        self._hot_table, self._host_table = hot_table, host_table
        self._ids: tuple[str, ...] = ("last_token",)
        fields = {
            "last_token": relay_field(torch.int64, non_negative=True),
            "outputs": relay_field(torch.int64, (1 + num_drafts,), read_by="host", non_negative=True),
            "seq_lens": relay_field(torch.int64, read_by="both", non_negative=True),
        }
        if num_drafts:
            self._ids = ("last_token", "drafts")
            fields["drafts"] = relay_field(torch.int64, (num_drafts,), non_negative=True)
        with self._runtime.use(self.stream):
            width = host_table.shape[1] + 1
            history = self._runtime.device_zeros((pages.slots.capacity, width), torch.int64)
        self._drafter = Drafter(num_drafts, history)
        self.relay = FutureMap(pages.slots, fields)

    def publish_known(self, slot: Slots, prompt: Sequence[int], first_token: int) -> None:
        """A request that was prefilled elsewhere leaves what a prefill here would have left."""
        drafts = {"drafts": [[first_token] * self._drafter.num_drafts]} if self._drafter.num_drafts else {}
        self.relay.publish(slot, last_token=[first_token], seq_lens=[len(prompt)], **drafts)
        if drafts:
            with self._runtime.use(self.stream):
                tokens = MirroredTensor.from_host(self._runtime, [*prompt, first_token], contract="host_only").device
                places = torch.arange(len(tokens), device=tokens.device)
                self._drafter.note(slot.device.expand(len(tokens)), places, tokens)

    def decode(
        self, batch: TierBatch, plan: ForwardPlan, location: LastLocation, tier: HiSparse, uploaded: Extras
    ) -> tuple[Launched, TierBatch]:
        """One step: the last token of each request with the guesses behind it; also the batch as it is after it."""
        runtime = self._runtime
        with runtime.use(self.stream):
            tier.back_up(location, uploaded)
            inputs = self.relay.resolve_forward_inputs(plan, uploaded, ids=self._ids, lengths="seq_lens")
            positions = torch.arange(plan.max_kv_len, device=runtime.device)
            hot = self._hot_table.device_for(plan.slots).index_select(0, inputs.slots)
            host = self._host_table.device_for(plan.slots).index_select(0, inputs.slots)
            spans = uploaded["spans"][:, None]
            rows = inputs.positions.view(len(batch), -1) % spans
            view = TieredView(
                positions=inputs.positions,
                slot_mapping=hot.gather(1, rows).flatten().long(),
                query_start_loc=inputs.query_start_loc,
                query_lens=plan.query_lens,
                kv_lens=inputs.kv_lens,
                kv_tokens=hot.gather(1, positions % spans).long(),
                on_device=positions >= uploaded["hot_from"][:, None],
                host_locations=host[:, : plan.max_kv_len].long(),
            )
            read = runtime.record()
            self._hot_table.read_until(read)
            self._host_table.read_until(read)
            every = torch.arange(plan.num_tokens, device=runtime.device)
            targets = self._model.forward(inputs.input_ids, view, self._kv, every).argmax(-1).view(len(batch), -1)
            tokens = inputs.input_ids.view(len(batch), -1)
            outputs, accepted = verify(targets, tokens, torch.ones_like(targets[:, :1], dtype=torch.bool))
            seq_lens = inputs.kv_lens.long() - self._drafter.num_drafts + accepted
            launched = self._sampled(batch, inputs.sampled_slots, outputs, accepted, seq_lens, plan.max_kv_len)
            if not self._drafter.num_drafts:
                return launched, batch
            bounds = MirroredTensor.from_pair(runtime, batch.seq_lens.np, seq_lens, contract="upper_bound")
            return launched, batch.replace(seq_lens=bounds)

    def prefill(self, batch: TierBatch, plan: ForwardPlan, uploaded: Extras) -> Launched:
        """A whole prompt, whose KV goes to device pages; its first token."""
        runtime = self._runtime
        with runtime.use(self.stream):
            inputs = self.relay.resolve_forward_inputs(plan, uploaded, ids="last_token", req_to_token=self._hot_table)
            rows = self._hot_table.device_for(plan.slots).index_select(0, inputs.slots)[:, : plan.max_kv_len].long()
            self._hot_table.read_until(runtime.record())
            assert inputs.slot_mapping is not None
            view = PagedView(
                inputs.positions, inputs.slot_mapping, inputs.query_start_loc, plan.query_lens, inputs.kv_lens, rows
            )
            chosen = self._model.forward(inputs.input_ids, view, self._kv.hot, inputs.last_token_indices).argmax(-1)
            if self._drafter.num_drafts:
                self._drafter.note(inputs.slots.expand(plan.num_tokens), inputs.positions, inputs.input_ids)
            outputs = chosen[:, None].expand(-1, 1 + self._drafter.num_drafts)
            accepted = torch.zeros_like(chosen)
            return self._sampled(batch, inputs.sampled_slots, outputs, accepted, inputs.kv_lens.long(), plan.max_kv_len)

    def _sampled(
        self,
        batch: TierBatch,
        sampling: Slots,
        outputs: torch.Tensor,
        accepted: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int,
    ) -> Launched:
        """Publishes what a forward has found: int64[n, 1 + num_drafts] tokens, new ones first; int64[n] the others."""
        drafts, slots = {}, sampling.device
        if self._drafter.num_drafts:
            columns = torch.arange(outputs.shape[1], device=outputs.device)
            self._drafter.note(slots[:, None], (seq_lens - accepted)[:, None] + columns, outputs)
            drafts["drafts"] = self._drafter.propose(slots, seq_lens + 1, longest + 1)
        last = outputs.gather(1, accepted[:, None])[:, 0]
        self.relay.publish(sampling, last_token=last, outputs=outputs, seq_lens=seq_lens, **drafts)
        results = self.relay.prefetch(sampling, "outputs", "seq_lens")
        return Launched(list(batch.requests), results, self._runtime.record())
