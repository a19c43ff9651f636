"""The cost of checks of SGLang's batch written by hand for this class: the least that any such check has to do.

They ask what the declaration in `sglang.py` asks, and nothing else: no path is resolved, no condition is asked, nothing
is counted or reported, no other thread may call, and all columns are taken to be in use.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain, compress
from operator import add, attrgetter
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


class Reading:
    """The columns of a batch at one moment: numbers in runs of one size of entry, lists, and what each request asks.

    Attributes:
        known: lists in memory of their own, and what requests ask, as they were when they were last right. A list that
            is still the same is not copied again, and no request is asked twice.
    """

    known: "Reading | None" = None

    def __init__(self, batch: Any) -> None:
        arrays = [tensor.numpy() for tensor in TENSORS(batch) if tensor is not None]
        self.runs = [(size, b"".join([array for array in arrays if array.itemsize == size])) for size in (8, 4)]
        self.lists: list[list[Any]] = [*LISTS(batch)]
        self.kinds: list[int] | None = None

    def own(self) -> "Reading":
        """The lists in memory of their own."""
        last = Reading.known
        if last is not None and last.lists[0] == self.lists[0]:
            self.kinds = last.kinds
            if last.lists == self.lists:
                self.lists = last.lists
                return self
        nested = list(map(list.copy, self.lists[3]))
        self.lists = [part.copy() for part in self.lists]
        self.lists[3] = nested
        return self

    def asked(self) -> list[int]:
        """The wishes of each request."""
        if self.kinds is None:
            self.kinds = [kind_of(req) for req in self.lists[0]]
        return self.kinds


KINDS: dict[Any, int] = {}
"""The wishes of a request, all flags together -> its number, which is hashed in no time."""


def kind_of(req: Any) -> int:
    """The number of what a request asks."""
    kind: int | None = vars(req).get("_kind")
    if kind is None:
        p = req.sampling_params
        flags = req.grammar is None, req.return_logprob, req.return_hidden_states
        kind = req._kind = KINDS.setdefault((*flags, p.top_k, p.top_p != 1, p.min_p > 0), len(KINDS))
    return kind


def forwarded(whole: Method) -> Method:
    """A method with a hook that does nothing."""
    return lambda *args, **kwargs: whole(*args, **kwargs)


def read_alone(whole: Method) -> Method:
    """Values that a method moves are copied before, and everything is read behind it. Nothing is compared."""
    moves = whole.__name__ != DECODE

    def run(batch: Any, *others: Any, **kwargs: Any) -> Any:
        if moves:
            for state in (batch, *others):
                Reading(state).own()
        else:
            batch.seq_lens.numpy().copy(), decode_steps(batch)
        result = whole(batch, *others, **kwargs)
        Reading(batch)
        return result

    return run


def compared(whole: Method) -> Method:
    """The questions of `full` to a batch: pairs, values derived from rows and from requests, row numbers."""

    def run(batch: Any, *others: Any, **kwargs: Any) -> Any:
        result = whole(batch, *others, **kwargs)
        now = Reading(batch)
        last = Reading.known
        if last is not None and last.lists[0] == now.lists[0][: len(last.lists[0])]:
            now.kinds = last.asked() + [kind_of(req) for req in now.lists[0][len(last.lists[0]) :]]
        if not _derived_and_pairs(batch, now):
            raise ValueError("the batch is wrong")
        now.lists[0] = now.lists[0].copy()
        Reading.known = now
        return result

    return run


def moved(whole: Method) -> Method:
    """The same, and rows by request, before and behind."""
    moves = whole.__name__ != DECODE

    def run(batch: Any, *others: Any, **kwargs: Any) -> Any:
        kept = [Reading(state).own() for state in (batch, *others)] if moves else []
        lengths = batch.seq_lens.numpy().copy()
        steps = [] if moves else decode_steps(batch)
        result = whole(batch, *others, **kwargs)
        now = Reading(batch)
        if moves:
            right = _all_moved(kept, now)
        else:
            right = (lengths + 1).tobytes() == batch.seq_lens.numpy().tobytes()
            right &= [count + 1 for count in steps] == decode_steps(batch)
            if Reading.known is not None and Reading.known.lists[0] == now.lists[0]:
                now.kinds = Reading.known.kinds
        if not (right and _derived_and_pairs(batch, now)):
            raise ValueError("the batch is wrong")
        if moves:
            Reading.known = now
        return result

    return run


def _all_moved(kept: list[Reading], now: Reading) -> bool:
    n = len(now.lists[0])
    if len(kept) > 1:
        first, second = kept
        lists = list(map(add, first.lists, second.lists))
        now.kinds = first.asked() + second.asked()
        moved = []
        for (size, run), (_, other) in zip(first.runs, second.runs, strict=True):
            part, two = len(first.lists[0]) * size, len(second.lists[0]) * size
            columns = ((run[at * part :][:part], other[at * two :][:two]) for at in range(len(run) // part))
            moved.append((size, b"".join(chain.from_iterable(columns))))
    else:
        (first,) = kept
        left, gone = iter(now.lists[0]), []
        wanted = next(left, None)
        for row, req in enumerate(first.lists[0]):
            if req is wanted:
                wanted = next(left, None)
            else:
                gone.append(row)
        lists = [part.copy() for part in (*first.lists, first.asked())]
        for part in lists:
            for row in reversed(gone):
                del part[row]
        now.kinds = lists.pop()
        flags = np.ones(len(first.lists[0]), np.bool_)
        flags[gone] = False
        blocks = [(size, np.frombuffer(run, f"V{size}").reshape(-1, len(flags))) for size, run in first.runs]
        moved = [(size, block.compress(flags, 1).tobytes()) for size, block in blocks]
    right = moved == now.runs and lists == now.lists and len(lists[0]) == n
    now.lists = lists
    return right


def _derived_and_pairs(batch: Any, now: Reading) -> bool:
    info, (_, longs), (_, ints), asked = batch.sampling_info, *now.runs, set(now.asked())
    kinds = [kind for kind, number in KINDS.items() if number in asked]
    marked = list(compress(range(len(now.lists[0])), info.return_sampling_masks))
    named, size = info.sampling_mask_batch_indices, 8 * len(now.lists[0])
    host, device, slots_host, slots = (longs[at * size : (at + 1) * size] for at in range(4))
    small = np.frombuffer(ints[: size // 2], np.int32).astype(np.int64).tobytes()
    right = batch.seq_lens_sum in (None, int(batch.seq_lens_cpu.sum())) and host == device == small
    right &= any(kind[1] for kind in kinds) == batch.return_logprob and slots_host == slots
    return bool(right and max(kind[3] for kind in kinds) <= info.max_top_k and named in (None, marked))


def sampled(whole: Method, every: int = 100) -> Method:
    """The same as `lag=1`: each hundredth call copies the pairs, and the next one compares them."""
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
            packed = torch.cat([column.view(torch.uint8) for column in device])
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
    "by hand: full, with moves": moved,
    "by hand: lag=1, every=100": sampled,
}
