"""TGI's `FlashCausalLMBatch` as it stands in a checkout, watched: nothing of it is changed.

Lists on the host stand beside tensors on the device; `filter` and `concatenate` make a new batch. Its batches begin
here as prefill leaves them, and the decode step is written as its `generate_token` does it.
"""

import itertools
import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from batchstate.watch import Watched, watch
from benchmarks.adoption.checkouts import module_of

os.environ |= {"ATTENTION": "paged", "PREFIX_CACHING": "0"}  # read where the engine is imported
NAME = "text_generation_server"
module = module_of(
    f"{NAME}.models.flash_causal_lm",
    checkout="text-generation-inference/server",
    packages=[NAME, f"{NAME}.models"],
    without=[f"{NAME}.pb", f"{NAME}.layers"],
)
Batch = module.FlashCausalLMBatch
module.get_speculate.__globals__["set_speculate"](0)
module.get_adapter_to_index = lambda: {"lora": 1}
BLOCK = 4

LISTS = "prefix_offsets read_offsets stopping_criterias prefilling_mask prefill_logprob_tokens"
TWINS = ("cache_lengths", "input_lengths", "prompt_lengths", "top_n_tokens")
CHOOSER = "seeds do_sample fsm_grammar_states grammars grammar_types"


def tensor_of(function: Callable[[Any], list[int]], dtype: Any = torch.int64) -> Callable[[Any], Any]:
    """A derived tensor."""
    return lambda batch: torch.tensor(function(batch), dtype=dtype)


def slot_numbers(batch: Any) -> list[int]:
    """The entry of `slots` that each request writes next."""
    return [start + length for start, length in zip(slot_starts(batch), batch.cache_lengths, strict=False)]


def all_slots(batch: Any) -> list[int]:
    """The slots of all blocks, request by request."""
    return [block * BLOCK + at for table in batch.block_tables for block in table for at in range(BLOCK)]


def slot_starts(batch: Any) -> list[int]:
    """Where the slots of each request begin, and where the last ones end."""
    return list(itertools.accumulate((len(table) * BLOCK for table in batch.block_tables), initial=0))


def adapters(batch: Any) -> list[int]:
    """The number of each request's adapter."""
    return [int(request.adapter_id == "lora") for request in batch.requests]


def segments(batch: Any) -> list[int]:
    """Where runs of one adapter begin, and where the last one ends."""
    return list(module.find_segments(adapters(batch))[0])


def needed(batch: Any) -> Any:
    """The length that the longest request may get."""
    return max(
        n + limit.max_new_tokens for n, limit in zip(batch.prompt_lengths, batch.stopping_criterias, strict=True)
    )


# fmt: off
def declare(**options: Any) -> Watched:
    """The declaration."""
    return watch(
        Batch, after=["filter", "concatenate"], num_rows=len, key="requests", moves=["filter", "concatenate"],
        pairs=[*((name, f"{name}_tensor") for name in TWINS),
               ("block_tables", "block_tables_tensor"), ("all_input_ids", "all_input_ids_tensor"),
               (slot_numbers, "slot_indices", "relative"), (adapters, "adapter_meta.adapter_indices"),
               ("cache_lengths", "position_ids"), (lambda b: [ids[-1] for ids in b.all_input_ids], "input_ids")],
        rows=[*LISTS.split(), *(f"next_token_chooser.{name}" for name in CHOOSER.split())],
        upto={"block_tables": lambda b: [len(table) for table in b.block_tables],
              "all_input_ids": lambda b: [len(ids) for ids in b.all_input_ids]},
        when={"prefill_logprob_tokens": None},
        derived={"requests_idx_mapping": lambda b: {request.id: row for row, request in enumerate(b.requests)},
                 "num_blocks": lambda b: sum(map(len, b.block_tables)),
                 "max_blocks": lambda b: max(map(len, b.block_tables)),
                 "max_input_length": lambda b: max(b.input_lengths),
                 "slots": tensor_of(all_slots), "cu_slots": tensor_of(slot_starts),
                 "prefilling": lambda b: any(b.prefilling_mask), "adapter_meta.adapter_set": lambda b: set(adapters(b)),
                 "adapter_meta.adapter_segments": tensor_of(segments, torch.int32)},
        implied={"max_current_length": lambda b: max(map(sum, zip(b.cache_lengths, b.input_lengths, strict=True))),
                 "all_input_ids_tensor.shape.1": needed},
        **options)
# fmt: on


_number = itertools.count()


def make_batch(drawn: random.Random, number: int) -> Any:
    """Requests that have been prefilled."""
    requests, lengths, blocks, news = [], [], [], []
    for _ in range(number):
        at, length, new = next(_number), drawn.randrange(2, 9), drawn.randrange(4, 9)
        sampling = SimpleNamespace(
            watermark=False,
            temperature=drawn.choice([0.5, 1.0]),
            repetition_penalty=drawn.choice([1.0, 1.2]),
            frequency_penalty=0.0,
            top_k=drawn.choice([0, 5]),
            top_p=1.0,
            typical_p=1.0,
            do_sample=drawn.random() < 0.5,
            seed=at,
            grammar="",
            grammar_type=0,
        )
        requests.append(SimpleNamespace(id=at, adapter_id=drawn.choice(["", "lora"]), parameters=sampling, top=at % 5))
        lengths.append(length)
        news.append(new)
        blocks.append([1000 * at + block for block in range(-(-(length + new) // BLOCK))])
    width, cu_slots = max(map(len, blocks)), [0]
    for table in blocks:
        cu_slots.append(cu_slots[-1] + len(table) * BLOCK)
    ids = [
        list(range(100 * request.id, 100 * request.id + n + 1)) for request, n in zip(requests, lengths, strict=True)
    ]
    all_ids = torch.zeros((number, max(n + new for n, new in zip(lengths, news, strict=True))), dtype=torch.int64)
    for row, known in enumerate(ids):
        all_ids[row, : len(known)] = torch.tensor(known)
    adapters = torch.tensor([int(request.adapter_id == "lora") for request in requests])
    segments, indices = module.find_segments(adapters)
    starts = torch.tensor(cu_slots)
    lengths_on_device = torch.tensor(lengths, dtype=torch.int32)
    chooser = module.HeterogeneousNextTokenChooser.from_pb(
        [request.parameters for request in requests],
        torch.float32,
        torch.device("cpu"),
        None,
        [request.id % 3 for request in requests],
    )
    return Batch(
        batch_id=0,
        requests=requests,
        requests_idx_mapping={request.id: row for row, request in enumerate(requests)},
        input_ids=torch.tensor([known[-1] for known in ids]),
        position_ids=lengths_on_device.clone(),
        speculative_ids=None,
        slot_indices=starts[:-1] + lengths_on_device,
        block_tables=blocks,
        block_tables_tensor=torch.tensor([table + [0] * (width - len(table)) for table in blocks], dtype=torch.int32),
        slots=torch.tensor([block * BLOCK + at for table in blocks for block in table for at in range(BLOCK)]),
        cu_slots=starts,
        max_input_length=1,
        max_current_length=max(lengths) + 1,
        prefilling=False,
        prefilling_mask=[False] * number,
        cu_seqlen_prefill=None,
        prefill_cache_indices=None,
        prefill_head_indices=None,
        prefill_next_token_indices=None,
        prefill_cu_outlens=None,
        prefill_logprob_tokens=[f"logprobs {request.id}" for request in requests],
        all_input_ids=ids,
        all_input_ids_tensor=all_ids,
        input_lengths=[1] * number,
        cache_lengths=lengths,
        prompt_lengths=list(lengths),
        input_lengths_tensor=torch.ones(number, dtype=torch.int32),
        cache_lengths_tensor=lengths_on_device,
        prompt_lengths_tensor=lengths_on_device.clone(),
        prefix_offsets=[n - 5 for n in lengths],
        read_offsets=list(lengths),
        next_token_chooser=chooser,
        stopping_criterias=[SimpleNamespace(max_new_tokens=new) for new in news],
        top_n_tokens=[request.top for request in requests],
        top_n_tokens_tensor=torch.tensor([request.top for request in requests]),
        adapter_meta=module.AdapterBatchMetadata(
            adapter_indices=adapters,
            adapter_set=set(adapters.tolist()),
            adapter_segments=torch.tensor(segments, dtype=torch.int32),
            segment_indices=indices,
        ),
        num_blocks=sum(map(len, blocks)),
        max_blocks=width,
    )


def decode(batch: Any) -> None:
    """One token for each request."""
    batch.max_input_length = 1
    for row, request in enumerate(batch.requests):
        token = 100 * request.id + len(batch.all_input_ids[row])
        batch.all_input_ids[row] = [*batch.all_input_ids[row], token]
        batch.cache_lengths[row] += 1
        batch.all_input_ids_tensor[row, batch.cache_lengths[row]] = token
        batch.input_ids[row] = token
        batch.prefix_offsets[row] = batch.read_offsets[row]
        batch.read_offsets[row] += 1
        batch.max_current_length = max(batch.max_current_length, batch.cache_lengths[row] + 1)
    for name in ("position_ids", "cache_lengths_tensor", "slot_indices"):
        setattr(batch, name, getattr(batch, name) + 1)


def drive(seed: int, steps: int = 16, after_each: Callable[[Any], object] = id) -> None:
    """A running batch that requests join and leave. Nothing is compared."""
    global _number
    _number = itertools.count()
    drawn = random.Random(seed)
    batch = make_batch(drawn, 3)
    for _ in range(steps):
        going = [
            request.id
            for request, known, prompt, limits in zip(
                batch.requests, batch.all_input_ids, batch.prompt_lengths, batch.stopping_criterias, strict=True
            )
            if len(known) - prompt < limits.max_new_tokens - 1 and drawn.random() < 0.9
        ]
        if going:
            batch = batch.filter(going)
            after_each(batch)
        joining = [make_batch(drawn, drawn.randrange(1, 4)) for _ in range(drawn.randrange(1, 3))]
        if not going:
            batch = joining[0]
        elif drawn.random() < 0.4 or len(going) < 3:
            batch = Batch.concatenate([batch, *joining])
            after_each(batch)
        decode(batch)
        after_each(batch)


DECLARED: dict[str, dict[str, Any]] = {"full": {}, "lag": {"lag": 1}}


def endless(text: str) -> bool:
    """No statement keeps a loop from ending."""
    return False


TARGETS = [(Batch, "filter", module), (Batch, "concatenate", module)]
"""Methods whose statements are deleted, one at a time."""
