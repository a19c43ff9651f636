"""What checks of SGLang's batch cost that are written by hand for this class: the least that any such check has to do.

They ask what the declaration in `sglang.py` asks, and nothing else: no path is resolved, no condition is asked, nothing
is counted or reported, no other thread may call, and all columns are taken to be in use.
"""

import contextlib
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch

Method: TypeAlias = Callable[..., Any]

_TENSORS = "seq_lens_cpu seq_lens orig_seq_lens req_pool_indices_cpu req_pool_indices input_ids out_cache_loc"
_SAMPLING = "temperatures top_ps top_ks min_ps sampling_seed"
_LISTS = "reqs multimodal_inputs top_logprobs_nums token_ids_logprobs"
_SAMPLING_LISTS = "return_sampling_masks return_sampling_support_logprobs sampling_mask_top_ks"
TENSORS = attrgetter(*_TENSORS.split(), *(f"sampling_info.{name}" for name in _SAMPLING.split()))
LISTS = attrgetter(*_LISTS.split(), *(f"sampling_info.{name}" for name in _SAMPLING_LISTS.split()))
DECODE = "prepare_for_decode"
METHODS = ("filter_batch", "merge_batch", DECODE)


def decode_steps(batch: Any) -> list[int]:
    """How often each request was decoded."""
    return [req.decode_batch_idx for req in batch.reqs]


def as_it_is(batch: Any) -> tuple[list[Any], list[list[Any]]]:
    """Its columns, where they lie."""
    return [None if one is None else one.numpy() for one in TENSORS(batch)], [*LISTS(batch), decode_steps(batch)]


def as_it_was(batch: Any) -> tuple[list[Any], list[list[Any]]]:
    """Its columns, copied."""
    tensors, lists = as_it_is(batch)
    copies = [one.copy() for one in lists]
    copies[3] = [one.copy() for one in copies[3]]
    return [None if one is None else one.copy() for one in tensors], copies


def forwarded(whole: Method) -> Method:
    """A method with a hook that does nothing."""
    return lambda *args, **kwargs: whole(*args, **kwargs)


def read_alone(whole: Method) -> Method:
    """What a method moves is copied before, and everything is read behind it. Nothing is compared."""
    moves = whole.__name__ != DECODE

    def run(batch: Any, *others: Any, **kwargs: Any) -> Any:
        if moves:
            for one in (batch, *others):
                as_it_was(one)
        else:
            batch.seq_lens.numpy().copy(), decode_steps(batch)
        result = whole(batch, *others, **kwargs)
        as_it_is(batch)
        return result

    return run


def compared(whole: Method) -> Method:
    """All that `full` asks: rows by request, pairs, values derived from rows and from requests, row numbers."""
    moves = whole.__name__ != DECODE

    def run(batch: Any, *others: Any, **kwargs: Any) -> Any:
        kept = [as_it_was(one) for one in (batch, *others)] if moves else []
        lengths = None if moves else batch.seq_lens.numpy().copy()
        steps = [] if moves else decode_steps(batch)
        result = whole(batch, *others, **kwargs)
        tensors, lists = as_it_is(batch)
        right = _derived_and_pairs(batch, tensors)
        if others:
            start = 0
            for old_tensors, old_lists in kept:
                end = start + len(old_lists[0])
                right &= _equal(old_tensors, [None if one is None else one[start:end] for one in tensors])
                right &= all(old == new[start:end] for old, new in zip(old_lists, lists, strict=True))
                start = end
        elif moves:
            ((old_tensors, old_lists),) = kept
            at = {id(req): row for row, req in enumerate(old_lists[0])}
            rows = [at[id(req)] for req in batch.reqs]
            index, pick = np.array(rows), itemgetter(*rows)
            right &= _equal([None if one is None else one[index] for one in old_tensors], tensors)
            right &= all(list(pick(old)) == new for old, new in zip(old_lists, lists, strict=True))
        else:
            right &= _equal([lengths], [tensors[1] - 1]) and [one + 1 for one in steps] == lists[-1]
        if not right:
            raise ValueError("the batch is wrong")
        return result

    return run


def _equal(old: list[Any], new: list[Any]) -> bool:
    both = [(one, other) for one, other in zip(old, new, strict=True) if one is not None and other is not None]
    return all(one.tobytes() == other.tobytes() for one, other in both)


def _derived_and_pairs(batch: Any, tensors: list[Any]) -> bool:
    """One look at each request, for all flags together."""
    info, (host, device, small, slots_host, slots, *_) = batch.sampling_info, tensors
    kinds = {
        (req.grammar is None, req.return_logprob, req.return_hidden_states, p.top_k, p.top_p != 1, p.min_p > 0)
        for req in batch.reqs
        for p in (req.sampling_params,)
    }
    marked = [row for row, mark in enumerate(info.return_sampling_masks) if mark]
    named = info.sampling_mask_batch_indices
    right = batch.seq_lens_sum in (None, int(host.sum())) and any(kind[1] for kind in kinds) == batch.return_logprob
    right &= max(kind[3] for kind in kinds) <= info.max_top_k and (named is None or list(named) == marked)
    return bool(right and (host == device).all() and (host == small).all() and (slots_host == slots).all())


def sampled(whole: Method, every: int = 100) -> Method:
    """What `lag=1` does: each hundredth call copies the pairs, and the next one compares them."""
    landed = np.empty(1 << 16, np.uint8)

    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        number = run.calls = run.calls + 1  # type: ignore[attr-defined]
        under_way = run.under_way  # type: ignore[attr-defined]
        if under_way:
            run.under_way = []  # type: ignore[attr-defined]
            start = 0
            for host, dtype, nbytes in under_way:
                if not (host == landed[start : start + nbytes].copy().view(dtype)).all():
                    raise ValueError("the batch is wrong")
                start += nbytes
        result = whole(batch, *args, **kwargs)
        if number % every == 1:
            device = [batch.seq_lens, batch.orig_seq_lens, batch.req_pool_indices]
            lengths, slots = batch.seq_lens_cpu.numpy().copy(), batch.req_pool_indices_cpu.numpy().copy()
            packed = torch.cat([one.view(torch.uint8) for one in device])
            landed[: packed.shape[0]] = packed.numpy()
            run.under_way = [  # type: ignore[attr-defined]
                (lengths, np.int64, device[0].nbytes),
                (lengths, np.int32, device[1].nbytes),
                (slots, np.int64, device[2].nbytes),
            ]
        return result

    run.calls, run.under_way = 0, []  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def hooked(owner: type, hook: Callable[[Method], Method]) -> Iterator[None]:
    """A window in which the methods have hooks."""
    whole = {name: getattr(owner, name) for name in METHODS}
    try:
        for name, method in whole.items():
            setattr(owner, name, hook(method))
        yield
    finally:
        for name, method in whole.items():
            setattr(owner, name, method)


WAYS: dict[str, Callable[[Method], Method]] = {
    "by hand: hooks that do nothing": forwarded,
    "by hand: read before and behind": read_alone,
    "by hand: full": compared,
    "by hand: lag=1, every=100": sampled,
}
