"""SGLang's `ScheduleBatch` as released, watched and fuzzed: nothing of it is changed.

Stubbed are its configuration, of which its methods read flags, and the allocation of KV.
"""

import copy
import itertools
import random
from array import array
from collections.abc import Callable
from functools import partial
from itertools import compress, count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from batchstate.watch import OverRequests, Watched, WatchedSpec, over_requests, watch
from benchmarks.adoption.by_hand import WAYS as HOOKS
from benchmarks.adoption.by_hand import hooked
from benchmarks.adoption.placeholders import stand_in

stand_in()

from sglang.srt.managers import schedule_batch as sb  # noqa: E402
from sglang.srt.managers.schedule_batch import (  # noqa: E402
    Req,
    ScheduleBatch,
    get_batch_return_hidden_states_mode,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.sampling import sampling_batch_info as si  # noqa: E402
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

CONFIG = SimpleNamespace(
    deterministic=SimpleNamespace(enable_deterministic_inference=True),
    features=SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False),
    mamba=SimpleNamespace(enable_mamba_extra_buffer=False),
)
sb.get_exec = si.get_exec = lambda: CONFIG
sb.alloc_for_decode = lambda batch, token_per_req: torch.arange(len(batch.reqs))
MODEL = SimpleNamespace(is_encoder_decoder=False, vocab_size=32)

SAMPLING = (
    "temperatures top_ps top_ks min_ps sampling_seed logit_bias return_sampling_masks return_sampling_support_logprobs"
    " sampling_mask_top_ks"
)


def penalties(batch: Any) -> Any:
    """The counts that the frequency penalty keeps, one row per request; None while nobody uses it."""
    penalizer = batch.sampling_info.penalizer_orchestrator.penalizers[BatchedFrequencyPenalizer]
    return penalizer.cumulated_frequency_penalties if penalizer.is_prepared() else None


def decode_steps(batch: Any) -> list[int]:
    """How often each request was decoded."""
    return [req.decode_batch_idx for req in batch.reqs]


def support(batch: Any) -> Any:
    """Numbers of the requests with a mask that capture support."""
    info = batch.sampling_info
    return list(compress(count(), compress(info.return_sampling_support_logprobs, info.return_sampling_masks)))


def some(wants: Callable[[Any], Any]) -> OverRequests:
    """Whether a request of the batch is sampled so."""
    return over_requests(any, lambda req: wants(req.sampling_params))


# fmt: off
def declare(**options: Any) -> Watched:
    """The declaration."""
    return watch(ScheduleBatch, num_rows="batch_size", key="reqs", pairs=[("seq_lens_cpu", "seq_lens"),
               ("seq_lens_cpu", "orig_seq_lens"), ("req_pool_indices_cpu", "req_pool_indices")],
        rows=["input_ids", "multimodal_inputs", "top_logprobs_nums", "token_ids_logprobs", "out_cache_loc",
              *(f"sampling_info.{name}" for name in SAMPLING.split()), penalties],
        when=dict.fromkeys(["out_cache_loc", "input_ids", "top_logprobs_nums", "token_ids_logprobs",
                            "penalties", "sampling_info.logit_bias"]),
        indices={"sampling_info.sampling_mask_batch_indices": "sampling_info.return_sampling_masks"},
        derived={"seq_lens_sum": lambda b: int(b.seq_lens_cpu.sum()),
                 "sampling_info.sampling_support_logprobs_capture_indices": support,
                 "has_grammar": over_requests(any, attrgetter("grammar")),
                 "return_hidden_states_mode": over_requests(max, attrgetter("return_hidden_states_mode")),
                 **{n: over_requests(any, attrgetter(n)) for n in ("return_logprob", "return_hidden_states")}},
        implied={"not sampling_info.is_all_greedy": some(lambda p: p.top_k > 1),
                 "sampling_info.is_any_greedy": some(lambda p: p.top_k <= 1),
                 "sampling_info.need_top_p_sampling": some(lambda p: p.top_p != 1),
                 "sampling_info.need_min_p_sampling": some(lambda p: p.min_p > 0),
                 "sampling_info.need_top_k_sampling": some(lambda p: p.top_k != TOP_K_ALL),
                 "not sampling_info.npu_top_k_top_p_eligible": some(lambda p: not 1 <= p.top_k <= 1024),
                 "sampling_info.max_top_k": over_requests(max, attrgetter("sampling_params.top_k"))},
        **{"after": ["filter_batch", "merge_batch", "prepare_for_decode"]} | options)


MOVES: dict[str, Any] = {
    "moves": ["filter_batch", "merge_batch"], "adds": {"prepare_for_decode": {"seq_lens": 1, decode_steps: 1}}}
"""Effects of the methods on rows: each request keeps what it had. The declaration with it has 20 lines."""
# fmt: on


Row = tuple[int, float, int, bool, Any]
"""Prompt length, temperature, top_k, whether log-probabilities are wanted, logit bias."""

_number = itertools.count()
TOP_KS = [1, 1, 1, 3, 10, 18, TOP_K_ALL]


def make_req(row: Row) -> Any:
    """A request; what else it wants follows from its length and its top_k."""
    length, temperature, top_k, logprobs, bias = row
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=0.5 if length == 3 else 1.0,
        min_p=0.1 if length == 4 else 0.0,
        max_new_tokens=9,
        logit_bias=bias,
        frequency_penalty=temperature if 15 < top_k < 20 else 0,
    )
    req = Req(
        str(next(_number)),
        "",
        array("q", range(1, 1 + length)),
        params,
        return_logprob=logprobs,
        top_logprobs_num=3 * logprobs,
        token_ids_logprob=[length] if logprobs else None,
        return_sampling_mask=top_k < 5,
        sampling_logprobs_mode="support" if top_k < 3 else "selected",
        return_hidden_states=length == 5,
    )
    req.grammar = "grammar" if length == 6 else None
    return req


def build(rows: list[Row]) -> Any:
    """A running batch, as prefill leaves it."""
    reqs = [make_req(row) for row in rows]
    lens, slots = [row[0] for row in rows], [next(_number) for _ in rows]
    batch = ScheduleBatch(
        reqs=reqs,
        device="cpu",
        model_config=MODEL,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        return_logprob=any(req.return_logprob for req in reqs),
        has_grammar=any(req.grammar for req in reqs),
        req_pool_indices=torch.tensor(slots),
        req_pool_indices_cpu=torch.tensor(slots),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        orig_seq_lens=torch.tensor(lens, dtype=torch.int32),
        multimodal_inputs=[f"image of {req.rid}" for req in reqs],
        input_ids=torch.tensor(lens) + 100,
        seq_lens_sum=sum(lens),
    )
    batch.forward_mode = ForwardMode.EXTEND
    batch.return_hidden_states_mode = get_batch_return_hidden_states_mode(reqs)
    batch.return_hidden_states = batch.return_hidden_states_mode.need_capture()
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, MODEL.vocab_size)
    return batch


def random_row(drawn: random.Random) -> Row:
    """A request that may want anything."""
    temperature, bias = drawn.choice([0.5, 1.0]), drawn.choice([None, None, {"3": 1.0}])
    return drawn.randrange(1, 9), temperature, drawn.choice(TOP_KS), drawn.random() < 0.3, bias


def drive(seed: int, steps: int = 40, after_each: Callable[[Any], object] = id) -> None:
    """A running batch that requests join and leave: what an engine's own test does. Nothing is compared."""
    global _number
    _number = itertools.count()
    drawn = random.Random(seed)
    batch = build([random_row(drawn) for _ in range(drawn.randrange(1, 4))])
    for _ in range(steps):
        chance, n = drawn.random(), len(batch.reqs)
        if chance < 0.35:
            batch.merge_batch(build([random_row(drawn) for _ in range(drawn.randrange(1, 4))]))
        elif chance < 0.6 and n > 1:
            batch.filter_batch(keep_indices=sorted(drawn.sample(range(n), drawn.randrange(1, n))))
        else:
            batch.prepare_for_decode()
        after_each(batch)


ROWS = st.tuples(
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from(TOP_KS),
    st.booleans(),
    st.sampled_from([None, {"3": 1.0}]),
)


def spec(watched: Watched) -> WatchedSpec:
    """The same declaration for the fuzzer."""
    return watched.spec(
        row=ROWS,
        build=build,
        filter=lambda batch, keep: batch.filter_batch(keep_indices=keep),
        merge=lambda batch, other: batch.merge_batch(other),
        advance="prepare_for_decode",
        ascending=True,
    )


LAG: dict[str, Any] = {"lag": 1, "every": 100}
DECLARED: dict[str, dict[str, Any]] = {"watch": {}, "watch_with_moves": MOVES}
COST_ROWS = 256
COST_LIMITS = {"cheap": 1.15, "full": 1.8, "lag=1, every=100": 1.02}
"""The most that each way is to cost."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "cheap": ("cheap", {}),
    "full": ("full", {}),
    "full, with moves": ("full", MOVES),
    "lag=1, every=100": ("cheap", LAG | {"after": ["prepare_for_decode"]}),
    "lag=1, every=100, each method": ("cheap", LAG),
}
"""The level and the declaration. In production the last method of a step is enough: what was written is still there."""
BY_HAND = {way: partial(hooked, ScheduleBatch, hook) for way, hook in HOOKS.items()}


def step_of(num_rows: int) -> Callable[[], None]:
    """A step of the scheduler: some requests leave, four join, all decode. Its changes are put back by copies."""
    base = build([(5 + row % 9, 1.0, 10, True, None) for row in range(num_rows)])
    joining = build([(4, 1.0, 10, True, None)] * 4)
    keep = [row for row in range(num_rows) if row % 37 != 5]

    def step() -> None:
        batch = copy.copy(base)
        batch.sampling_info = copy.copy(base.sampling_info)
        batch.filter_batch(keep_indices=keep)
        batch.merge_batch(joining)
        batch.prepare_for_decode()

    return step


def endless(text: str) -> bool:
    """No statement keeps a loop from ending."""
    return False


TARGETS = [
    (ScheduleBatch, "filter_batch", sb),
    (ScheduleBatch, "merge_batch", sb),
    (ScheduleBatch, "prepare_for_decode", sb),
    (SamplingBatchInfo, "filter_batch", si),
    (SamplingBatchInfo, "merge_batch", si),
]
"""Methods whose statements are deleted, one at a time."""
