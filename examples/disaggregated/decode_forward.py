"""The device's part of the decode worker: all of it runs on the forward stream, and nothing waits for it.

A decode step, in order::

    back up     the KV of the token before goes to the host: what the step reads, and overwrites, is safe
    inputs      last tokens from the relay; for each position its place in either tier
    model       KV of the new tokens is written to the hot buffers, logits come out
    publish     the last token, for the next step; the same, for the host
"""

from typing import final

import attrs
import torch

from batchstate import (
    Batch,
    ForwardPlan,
    FutureMap,
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
from examples.disaggregated.kv import TieredKV, TieredView, hot_rows
from examples.engine.attention import PagedView
from examples.engine.model import Model
from examples.engine.request import Request


class TierBatch(Batch):
    """One row a request."""

    slots = slot_column()
    seq_lens = mirrored(torch.int64)  # tokens with KV after the last launched step
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

    Attributes:
        stream: where everything runs.
        relay: what a forward leaves for the next one and for the host.
    """

    def __init__(self, model: Model, pages: PagePool, kv: TieredKV, hot_table: Table, host_table: Table) -> None:
        self._runtime: Runtime = pages.runtime
        self.stream = self._runtime.stream("forward")
        self._model, self._kv = model, kv
        self._hot_table, self._host_table = hot_table, host_table
        self.relay = FutureMap(
            pages.slots,
            {
                "last_token": relay_field(torch.int64, non_negative=True),
                "output": relay_field(torch.int64, read_by="host", non_negative=True),
            },
        )

    def decode(
        self, batch: TierBatch, plan: ForwardPlan, location: LastLocation, tier: HiSparse, uploaded: Extras
    ) -> Launched:
        """One token for each request of the batch."""
        runtime = self._runtime
        with runtime.use(self.stream):
            tier.back_up(location, uploaded)
            inputs = self.relay.resolve_forward_inputs(plan, uploaded, ids="last_token")
            positions = torch.arange(plan.max_kv_len, device=runtime.device)
            hot = self._hot_table.device_for(plan.slots).index_select(0, inputs.slots)
            host = self._host_table.device_for(plan.slots).index_select(0, inputs.slots)
            view = TieredView(
                positions=inputs.positions,
                slot_mapping=uploaded["hot_locations"],
                query_start_loc=inputs.query_start_loc,
                query_lens=plan.query_lens,
                kv_lens=inputs.kv_lens,
                kv_tokens=hot[:, hot_rows(positions, tier.hot_tokens)].long(),
                on_device=positions >= uploaded["hot_from"][:, None],
                host_locations=host[:, : plan.max_kv_len].long(),
            )
            read = runtime.record()
            self._hot_table.read_until(read)
            self._host_table.read_until(read)
            logits = self._model.forward(inputs.input_ids, view, self._kv, inputs.last_token_indices)
            return self._sampled(list(batch.requests), inputs.sampled_slots, logits)

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
            logits = self._model.forward(inputs.input_ids, view, self._kv.hot, inputs.last_token_indices)
            return self._sampled(list(batch.requests), inputs.sampled_slots, logits)

    def _sampled(self, requests: list[Request], sampling: Slots, logits: torch.Tensor) -> Launched:
        chosen = logits.argmax(-1)
        self.relay.publish(sampling, last_token=chosen, output=chosen)
        results = self.relay.prefetch(sampling, "output")
        return Launched(requests, results, self._runtime.record())
