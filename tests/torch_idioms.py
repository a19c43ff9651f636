"""Programs in pairs, racy and safe, about how torch really runs them: beside `cuda_idioms`, and judged in the same way.

Operators that wait in the middle, operators whose schema lies, memory that numpy, graphs and kernels share.
"""

# mypy: disable-error-code="no-untyped-call"

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own code calls it
from torch.cuda import Stream, current_stream, synchronize

from batchstate.races.cuda import declared_kernel
from batchstate.races.report import RaceKind
from tests.cuda_idioms import Idiom

PAIRS: dict[str, tuple[RaceKind, Idiom]] = {}
"""Name -> kind of the race of the racy side, and the program."""


def program(kind: RaceKind) -> Callable[[Idiom], Idiom]:
    """Registers a program by its name."""

    def register(function: Idiom) -> Idiom:
        PAIRS[function.__name__] = (kind, function)
        return function

    return register


# Operators that wait in the middle: the host waits for what came before, and their last kernel is in flight.


def _behind(racy: bool, operate: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """A side stream runs an operator, and the default stream uses its result, with or without a wait."""
    side = Stream()
    operand = values.cuda()
    synchronize()
    with torch.cuda.stream(side):
        result = operate(operand)
        result.record_stream(current_stream())
    if not racy:
        current_stream().wait_stream(side)
    return result.clone()


def _set(key: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def operate(operand: torch.Tensor) -> torch.Tensor:
        operand[key() if callable(key) else key] = value() if callable(value) else value
        return operand

    return operate


DOUBLE: Any = torch.DoubleTensor
NUMBERS = torch.arange(12.0).view(4, 3)
MASK = torch.tensor([True, False, True, True])
COUNTS = torch.tensor([1, 3, 2, 3])

MIDDLE: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "rows_of_a_list_are_set": (_set([1, 2], lambda: torch.ones(2, 3, device="cuda")), NUMBERS),
    "rows_of_a_list_are_taken": (lambda x: x[[1, 2]], NUMBERS),
    "rows_are_set_to_a_number": (_set(lambda: torch.tensor([1, 2]).cuda(), 5.0), NUMBERS),
    "rows_of_a_mask_are_taken": (lambda x: x[MASK.cuda()], NUMBERS),
    "rows_of_a_mask_are_set": (_set(lambda: MASK.cuda(), lambda: torch.ones(3, 3, device="cuda")), NUMBERS),
    "masked_select": (lambda x: x.masked_select(MASK.cuda()[:, None]), NUMBERS),
    "nonzero": (lambda x: x.nonzero(), NUMBERS),
    "where_of_a_condition": (lambda x: torch.where(x > 3)[0], NUMBERS),
    "argwhere": (torch.argwhere, NUMBERS),
    "bincount": (torch.bincount, COUNTS),
    "histc": (lambda x: torch.histc(x, bins=4), NUMBERS),
    "repeat_interleave": (torch.repeat_interleave, COUNTS),
    "unique_rows": (lambda x: torch.unique(x, dim=0), NUMBERS),
    "unique_consecutive_rows": (lambda x: torch.unique_consecutive(x, dim=0), NUMBERS),
    "multinomial": (lambda x: torch.multinomial(x + 1, 1), NUMBERS),
    "masked_fill_with_a_number_of_the_device": (lambda x: x.masked_fill(x > 3, x[0, 1]), NUMBERS),
    "index_fill_with_a_number_of_the_device": (lambda x: x.index_fill(0, torch.tensor([1]).cuda(), x[0, 1]), NUMBERS),
    "normal_with_deviations": (lambda x: torch.normal(x, x), NUMBERS),
    "searchsorted_with_a_sorter": (
        lambda x: torch.searchsorted(x[:, 0].contiguous(), x[:, 0].contiguous(), sorter=torch.arange(4).cuda()),
        NUMBERS,
    ),
    "pinv": (torch.linalg.pinv, NUMBERS),
    "isin_of_many": (lambda x: torch.isin(x, torch.arange(100.0).cuda() + 0.5), NUMBERS),
    "embedding_with_a_largest_norm": (
        lambda x: (F.embedding(torch.tensor([1]).cuda(), x, max_norm=1.0), x)[1],
        NUMBERS,
    ),
}
"""Name -> an operator that waits for what came before it, and its operand."""


def _pair(operate: Callable[[torch.Tensor], Any], values: torch.Tensor) -> Idiom:
    return lambda racy: _behind(racy, operate, values)


PAIRS |= {name: (RaceKind.READ_AFTER_WRITE, _pair(*operands)) for name, operands in MIDDLE.items()}

WHOLE: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "item": (lambda x: x[0, 0].item(), NUMBERS),
    "equal": (lambda x: torch.equal(x, x), NUMBERS),
    "allclose": (lambda x: torch.allclose(x, x), NUMBERS),
    "unique": (lambda x: torch.unique(x), NUMBERS),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), NUMBERS),
    "linalg.solve": (lambda x: torch.linalg.solve(torch.eye(3).cuda(), x.T), NUMBERS),
    "linalg.solve_ex": (lambda x: torch.linalg.solve_ex(torch.eye(3).cuda(), x.T, check_errors=True), NUMBERS),
    "linalg.lstsq": (lambda x: torch.linalg.lstsq(x, x), NUMBERS),
    "linalg.eigh": (lambda x: torch.linalg.eigh(x @ x.T), NUMBERS),
    "a tensor of a tensor": (lambda x: torch.tensor([x[0, 0], 1.0]), NUMBERS),
    "type": (lambda x: torch.Tensor.type(x, DOUBLE), NUMBERS),
    "type by name": (lambda x: x.type("torch.FloatTensor"), NUMBERS),
}
"""Name -> an operator whose result the host has waited for."""

NEVER: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "rows of a mask set to a number": (_set(lambda: MASK.cuda(non_blocking=True), 5.0), NUMBERS),
    "rows of a mask of the host": (lambda x: x[MASK], NUMBERS),
    "masked_fill": (lambda x: x.masked_fill(x > 3, 0), NUMBERS),
    "histc of a range": (lambda x: torch.histc(x, bins=4, min=0, max=12), NUMBERS),
    "multinomial with replacement": (lambda x: torch.multinomial(x + 1, 2, replacement=True), NUMBERS),
    "masked_fill with a number of the host": (lambda x: x.masked_fill(x > 3, torch.tensor(0.0)), NUMBERS),
    "normal with one deviation": (lambda x: torch.normal(x, 1.0), NUMBERS),
    "linalg.solve_ex": (lambda x: torch.linalg.solve_ex(torch.eye(3).cuda(non_blocking=True), x.T), NUMBERS),
    "isin of few": (lambda x: torch.isin(x, x[0, :1]), NUMBERS),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=4), NUMBERS),
    "type": (lambda x: x.type(torch.float64), NUMBERS),
}
"""Name -> an operator that never waits."""


# Operators whose schema lies: running statistics are written, and it does not say so.


@program(RaceKind.READ_AFTER_WRITE)
def running_statistics_of_a_batch_norm(racy: bool) -> Any:
    """A side stream trains a layer, and the default stream reads the statistics that it has moved."""
    side = Stream()
    batch, mean, variance = torch.ones(4, 3, 2, 2).cuda(), torch.zeros(3).cuda(), torch.ones(3).cuda()
    synchronize()
    with torch.cuda.stream(side):
        F.batch_norm(batch, mean, variance, training=True)
    if not racy:
        current_stream().wait_stream(side)
    return mean.clone()


@program(RaceKind.WRITE_AFTER_READ)
def statistics_read_in_evaluation(racy: bool) -> Any:
    """In evaluation the same statistics are read alone: two streams may do so at once, and nobody may write them."""
    side = Stream()
    batch, mean, variance = torch.ones(4, 3, 2, 2).cuda(), torch.zeros(3).cuda(), torch.ones(3).cuda()
    synchronize()
    with torch.cuda.stream(side):
        result = F.batch_norm(batch, mean, variance, training=False)
        result.record_stream(current_stream())
    F.batch_norm(batch, mean, variance, training=False)
    if not racy:
        current_stream().wait_stream(side)
    mean.fill_(1)
    synchronize()
    return result


# Kernels that torch does not see.


@declared_kernel(reads=["cache", "rows"], writes=["out"], rows={"cache": "rows"})
def _offloaded(cache: torch.Tensor, rows: Any, out: torch.Tensor) -> None:
    out.numpy()[:] = cache.numpy()[rows.numpy() if isinstance(rows, torch.Tensor) else rows]


@program(RaceKind.WRITE_AFTER_READ)
def rows_of_a_declared_kernel(racy: bool) -> Any:
    """A kernel offloads some rows of a cache while another stream fills others."""
    side, cache = Stream(), torch.arange(8.0).view(4, 2).cuda()
    out, chosen = torch.zeros(2, 2).cuda(), torch.tensor([0, 2]).cuda()
    synchronize()
    with torch.cuda.stream(side):
        _offloaded(cache, chosen, out)
    cache[2 if racy else 1].fill_(9)
    synchronize()
    return out


@declared_kernel(reads=["source"], writes=["out"])
def _mapped_read(source: torch.Tensor, out: torch.Tensor) -> None:
    out.numpy()[:] = source.numpy()


@program(RaceKind.STAGING_REFILLED)
def pinned_memory_that_a_kernel_reads(racy: bool) -> Any:
    """A kernel reads pinned memory over the bus (vLLM's `UvaBufferPool`): two buffers, and three steps in flight."""
    buffers = [torch.zeros(4, pin_memory=True) for _ in range(2)]
    done = [torch.cuda.Event() for _ in buffers]
    outs = []
    for step in range(3):
        turn = step % 2
        if not racy:
            done[turn].synchronize()
        buffers[turn].numpy()[:] = step + 1
        outs.append(torch.zeros(4, device="cuda"))
        _mapped_read(buffers[turn], outs[-1])
        done[turn].record()
    synchronize()
    return outs


# Memory that is freed and allocated again under the same tensors.


@program(RaceKind.FREED_IN_USE)
def storage_freed_while_it_is_read(racy: bool) -> Any:
    """FSDP's way: a gathered parameter is freed by `storage.resize_(0)` while another stream may still read it."""
    side, parameter = Stream(), torch.ones(256, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        out = parameter * 2
        out.record_stream(current_stream())
    if not racy:
        current_stream().wait_stream(side)
    parameter.untyped_storage().resize_(0)
    assert parameter.untyped_storage().size() == 0
    other = torch.zeros(256, device="cuda")
    synchronize()
    return out, other


@program(RaceKind.READ_AFTER_WRITE)
def storage_gathered_again(racy: bool) -> Any:
    """The next layer is gathered on a side stream into memory that its storage has got again."""
    side, parameter = Stream(), torch.ones(256, device="cuda")
    storage = parameter.untyped_storage()
    nbytes = storage.size()
    storage.resize_(0)
    synchronize()
    with torch.cuda.stream(side):
        storage.resize_(nbytes)
        parameter.fill_(3.0)
    if not racy:
        current_stream().wait_stream(side)
    return parameter * 2


# Host reads of landings that torch does not see.

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "element": lambda landing: float(landing.numpy()[1]),
    "slice": lambda landing: landing.numpy()[1:].tolist(),
    "sum": lambda landing: float(landing.numpy().sum()),
    "arithmetic": lambda landing: (landing.numpy() + 1).tolist(),
    "index": lambda landing: landing.numpy()[[0, 2]].tolist(),
    "asarray": lambda landing: np.asarray(landing).tolist(),
    "concatenate": lambda landing: np.concatenate([landing.numpy(), [1.0]]).tolist(),
    "pickle": lambda landing: pickle.loads(pickle.dumps(landing)).tolist(),
    "pickle of an array": lambda landing: pickle.loads(pickle.dumps(landing.numpy())).tolist(),
}
"""Name -> reads memory that a copy lands in."""


def _landing(read: Callable[[torch.Tensor], Any]) -> Idiom:
    def program(racy: bool) -> Any:
        tokens, landing = torch.arange(4.0).cuda(), torch.zeros(4, pin_memory=True)
        before = landing.numpy()[:2]
        landing.copy_(tokens, non_blocking=True)
        landed = current_stream().record_event()
        if not racy:
            landed.synchronize()
        seen = read(landing)
        landed.synchronize()
        return seen, before.tolist()

    return program


PAIRS |= {f"landing_read_by_{name}": (RaceKind.HOST_READS_EARLY, _landing(read)) for name, read in READS.items()}
