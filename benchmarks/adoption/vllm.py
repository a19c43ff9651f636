"""vLLM's `InputBatch` as released, watched and fuzzed: nothing of it is changed.

Its rows are known by request id: `condense` moves the last row into a hole. Its buffers are longer than the batch, and
a device side is copied only while a request uses it.
"""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from batchstate.watch import Watched, WatchedSpec, watch
from benchmarks.adoption.placeholders import stand_in

stand_in()

import vllm.v1.worker.gpu_input_batch as module  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

PENALTIES = ("frequency_penalties", "presence_penalties", "repetition_penalties")
BY_ROW = (
    "num_tokens_no_spec num_prompt_tokens num_computed_tokens_cpu replayssm_decode_base num_accepted_tokens_cpu"
    " request_lora_mapping req_output_token_ids generators bad_words_token_ids req_prompt_embeds"
    " allowed_token_ids_mask_cpu_tensor block_table.0.num_blocks_per_row"
)


def drafts(batch: Any) -> list[list[int]]:
    """The drafted tokens of each request. Until rows are first moved, the list is longer than it should be."""
    rows: list[list[int]] = batch.spec_token_ids[: len(batch._req_ids)]
    return rows


# fmt: off
def declare(**options: Any) -> Watched:
    """The declaration."""
    return watch(
        InputBatch, after=["refresh_metadata"], num_rows="num_reqs", key="_req_ids", moves=["condense"],
        buffers=True,
        pairs=[*((f"{name}_cpu", name) for name in ("temperature", "top_p", "top_k", *PENALTIES)),
               ("allowed_token_ids_mask_cpu_tensor", "allowed_token_ids_mask")],
        rows=[*BY_ROW.split(), drafts, "token_ids_cpu", "is_token_ids", "block_table.0.block_table.np"],
        when={"temperature": "not all_greedy", "top_p": "not no_top_p", "top_k": "not no_top_k",
              "allowed_token_ids_mask": "not no_allowed_token_ids",
              **dict.fromkeys(PENALTIES, "not no_penalties")},
        upto={"token_ids_cpu": "num_tokens_no_spec", "is_token_ids": "num_tokens_no_spec",
              "block_table.0.block_table.np": "block_table.0.num_blocks_per_row"},
        derived={"req_id_to_index": lambda b: {name: row for row, name in enumerate(b.req_ids) if name is not None}},
        **options)
# fmt: on


Row = tuple[int, float, float, int, float]
"""Prompt length, temperature, top_p, top_k, penalty."""

_number = itertools.count()


def make_state(row: Row) -> Any:
    """A request; what else it wants follows from its length."""
    length, temperature, top_p, top_k, penalty = row
    number = next(_number)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        frequency_penalty=penalty,
        presence_penalty=penalty / 2,
        repetition_penalty=1 + penalty,
        allowed_token_ids=[length] if length in (4, 8) else None,
    )
    if length == 5:
        params._bad_words_token_ids = [[number]]
    generator = torch.Generator() if length in (2, 6) else None
    lora = SimpleNamespace(lora_int_id=length) if length % 3 == 1 else None
    blocks = ([length, number],)
    tokens = list(range(number, number + length))
    return CachedRequestState(f"r{number}", tokens, [], params, generator, blocks, number, [number], lora_request=lora)


def build(rows: list[Row]) -> Any:
    """A batch of these requests."""
    batch = InputBatch(64, 64, 256, torch.device("cpu"), 100, [16], [4])
    batch.use_replayssm = True
    for value in vars(batch).values():
        if isinstance(value, torch.Tensor):
            value.zero_()  # so that two runs are alike, garbage included
    add(batch, rows)
    batch.refresh_metadata()
    return batch


def add(batch: Any, rows: list[Row]) -> None:
    """Requests join."""
    for row in rows:
        at = batch.add_request(make_state(row))
        batch.num_accepted_tokens_cpu[at] = row[0]
        batch.replayssm_decode_base[at] = row[0] + 1
        batch.spec_token_ids[at].extend(range(row[0]))
        if row[0] == 7:
            batch.req_prompt_embeds[at] = torch.full((2, 2), float(row[0]))


def random_row(drawn: random.Random) -> Row:
    """A request that may want anything."""
    temperature, top_p = drawn.choice([0.0, 0.5, 1.0]), drawn.choice([1.0, 0.5])
    return drawn.randrange(1, 9), temperature, top_p, drawn.choice([0, 5]), drawn.choice([0.0, 0.5])


def drive(seed: int, steps: int = 20, after_each: Callable[[Any], object] = id) -> None:
    """A running batch that requests join and leave: what an engine's own test does. Nothing is compared."""
    global _number
    _number = itertools.count()
    drawn = random.Random(seed)
    batch = build([random_row(drawn) for _ in range(3)])
    for _ in range(steps):
        for name in [request for request in batch.req_ids if drawn.random() < 0.3]:
            batch.remove_request(name)
        add(batch, [random_row(drawn) for _ in range(drawn.choice([0, 0, 0, 1, 2]))])
        batch.condense()
        batch.refresh_metadata()
        after_each(batch)


ROWS = st.tuples(
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([0, 5]),
    st.sampled_from([0.0, 0.5]),
)


def keep_rows(batch: Any, keep: list[int]) -> None:
    """Some requests leave, as `GPUModelRunner` lets them."""
    names = batch.req_ids
    for name in [name for row, name in enumerate(names) if row not in keep]:
        batch.remove_request(name)
    batch.condense()
    batch.refresh_metadata()


def join(batch: Any, row: Row) -> None:
    """A request joins."""
    add(batch, [row])
    batch.refresh_metadata()


def spec(watched: Watched) -> WatchedSpec:
    """The same declaration for the fuzzer: it lets single requests join."""
    return watched.spec(row=ROWS, build=build, filter=keep_rows, add=join)


DECLARED: dict[str, dict[str, Any]] = {"watch": {}}
COST_ROWS = 60
COST_LIMITS: dict[str, float] = {}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "cheap": ("cheap", {}),
    "full": ("full", {}),
    "lag=1, every=100": ("cheap", {"lag": 1, "every": 100}),
}


def step_of(num_rows: int) -> Callable[[], None]:
    """A step: two requests leave, two join, rows are moved together and the device sides are copied."""
    batch = build([(5, 0.5, 0.5, 5, 0.5)] * num_rows)

    def step() -> None:
        for name in (batch.req_ids[3], batch.req_ids[num_rows // 2]):
            batch.remove_request(name)
        batch.condense()
        add(batch, [(5, 0.5, 0.5, 5, 0.5)] * 2)
        batch.refresh_metadata()

    return step


def endless(text: str) -> bool:
    """Without it `condense` never ends."""
    return text == "last_req_index -= 1"


TARGETS = [(InputBatch, "condense", module)]
"""Methods whose statements are deleted, one at a time."""
