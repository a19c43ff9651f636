"""The batch of this engine: what it knows about each running request, declared once."""

from collections.abc import Sequence

import torch

from batchstate.batch import Batch
from batchstate.columns import HostColumn, host_list, mirrored, slot_column
from batchstate.indices import Slots
from batchstate.runtime import Runtime
from batchstate.traffic.requests import Request


class RunningBatch(Batch):
    """Row i of every column belongs to one request. Rows stand in order of admission: the last is the youngest.

    A column that is added here takes part in every operation; there is no other place to add it to.
    """

    slots = slot_column()
    """Row of the request in every table."""
    seq_lens = mirrored(torch.int64)
    """Tokens whose KV is computed, those of the step under way included."""
    prefill_lens = mirrored(torch.int64)
    """Tokens to prefill: the prompt, and for a request that was retracted its answer up to then."""
    num_generated = mirrored(torch.int64)
    """Tokens of the answer so far."""
    max_new_tokens = mirrored(torch.int64)
    """Tokens of the whole answer."""
    priority = mirrored(torch.int32)
    temperature = mirrored(torch.float32, pad=1.0)
    top_p = mirrored(torch.float32, pad=1.0)
    top_k = mirrored(torch.int32, pad=-1)
    min_p = mirrored(torch.float32)
    repetition_penalty = mirrored(torch.float32, pad=1.0)
    seeds = mirrored(torch.int64)
    eos_ids = mirrored(torch.int32)
    lora_ids = mirrored(torch.int32)
    requests: HostColumn[Request] = host_list()
    """The request objects, on the host only."""


def joining_batch(runtime: Runtime, slots: Slots, requests: Sequence[Request]) -> RunningBatch:
    """The rows of requests that join, one a slot; nothing of them is computed yet."""
    sampling = [request.sampling for request in requests]
    return RunningBatch.build(
        runtime,
        slots=slots,
        seq_lens=[0] * len(requests),
        prefill_lens=[request.tokens_to_prefill for request in requests],
        num_generated=[request.num_generated for request in requests],
        max_new_tokens=[request.answer_tokens for request in requests],
        priority=[request.priority for request in requests],
        temperature=[params.temperature for params in sampling],
        top_p=[params.top_p for params in sampling],
        top_k=[params.top_k for params in sampling],
        min_p=[params.min_p for params in sampling],
        repetition_penalty=[params.repetition_penalty for params in sampling],
        seeds=[params.seed for params in sampling],
        eos_ids=[params.eos_id for params in sampling],
        lora_ids=[params.lora_id for params in sampling],
        requests=requests,
    )
