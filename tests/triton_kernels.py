"""Programs with kernels of Triton, which its interpreter runs: each racy, and with its repair.

Importing this file needs Triton, asked for its interpreter (TRITON_INTERPRET=1) before it was imported.
Each program is a function of the window and `racy`, and says what is found.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, no-any-return, attr-defined"

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from batchstate.races import RaceKind


@triton.jit
def put(out: Any, stride: Any, rows: Any, columns: Any, values: Any) -> None:
    """Program p writes one element."""
    at = tl.program_id(0)
    where = out + tl.load(rows + at) * stride + tl.load(columns + at)
    tl.store(where, tl.load(values + at))


@triton.jit
def shift(source: Any, out: Any, length: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803 - Triton's own style
    """Each element gets the one before it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at - 1, mask=(at > 0) & (at < length), other=0), mask=at < length)


@triton.jit
def loaded(where: Any, mask: Any) -> Any:
    """A function of kernels."""
    return tl.load(where, mask=mask)


@triton.jit
def double(source: Any, out: Any, length: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Each element, twice; all blocks but the last are whole."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, loaded(source + at, at < length) * 2, mask=at < length)


@triton.jit
def tally(counts: Any, keys: Any, seen: Any, LOOK: tl.constexpr) -> None:  # noqa: N803
    """Counts keys; `LOOK` reads a count that other programs add to."""
    at = tl.program_id(0)
    count = counts + tl.load(keys + at)
    before = tl.atomic_add(count, 1)
    tl.store(seen + at, tl.load(count) if LOOK else before)


@triton.jit
def add_up(lock: Any, total: Any, values: Any, LOCKED: tl.constexpr) -> None:  # noqa: N803
    """Adds to one number, under a lock or without."""
    if LOCKED:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    tl.store(total, tl.load(total) + tl.load(values + tl.program_id(0)))
    if LOCKED:
        tl.atomic_xchg(lock, 0)


@triton.jit
def relay(flag: Any, total: Any, SEM: tl.constexpr, WAIT: tl.constexpr) -> None:  # noqa: N803
    """The first program writes a number and sets a flag; others read it, the first `WAIT` of them behind the flag."""
    at = tl.program_id(0)
    if at == 0:
        tl.store(total, 5)
        tl.atomic_xchg(flag, 1, sem=SEM)
    else:
        if at <= WAIT:
            while tl.atomic_add(flag, 0, sem=SEM) == 0:
                pass
        tl.store(total + at, tl.load(total))


@triton.jit
def fill_table(tables: Any, lengths: Any, value: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Fills the tables whose addresses are in `tables`."""
    at = tl.program_id(0)
    out = tl.load(tables + at).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, value, mask=lane < tl.load(lengths + at))


@triton.jit
def cells(out: Any, columns: Any, WIDE: tl.constexpr) -> None:  # noqa: N803
    """Program (p, q) writes cell q of row p, or with `WIDE` also the next one."""
    at = tl.program_id(0) * columns + tl.program_id(1)
    tl.store(out + at, at)
    if WIDE:
        tl.store(out + at + 1, at)


@triton.jit
def widths(out: Any, at: Any) -> None:
    """One program writes two numbers of eight bytes, the other one of four."""
    if tl.program_id(0) == 0:
        tl.store(out + tl.arange(0, 2), 1)
    else:
        tl.store(out.to(tl.pointer_type(tl.int32)) + at, 1)


class Program(NamedTuple):
    """A program, and what is found in its racy side: the kind, and the rows that both touch."""

    run: Callable[[Any, bool], Any]
    kind: RaceKind
    rows: str


PROGRAMS: dict[str, Program] = {}
CLASH = RaceKind.PROGRAMS_CLASH


def program(kind: RaceKind, rows: str) -> Callable[[Callable[[Any, bool], Any]], Callable[[Any, bool], Any]]:
    """Registers a program by its name."""

    def register(function: Callable[[Any, bool], Any]) -> Callable[[Any, bool], Any]:
        PROGRAMS[function.__name__] = Program(function, kind, rows)
        return function

    return register


cuda: Any = torch.cuda


def on_device(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Numbers on the device."""
    return torch.tensor(numbers, dtype=dtype, device="cuda")


def zeros(*shape: int) -> torch.Tensor:
    """Integers on the device."""
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


@program(CLASH, "row 1, column 3")
def two_writes_of_one_element(rt: Any, racy: bool) -> Any:
    """Programs 0 and 2 put a number into one element."""
    out = zeros(4, 8)
    columns = on_device(3, 3, 3 if racy else 4)
    put[(3,)](out, out.stride(0), on_device(1, 2, 1), columns, on_device(7, 8, 9))
    return out


@program(CLASH, "element 3")
def a_read_beside_a_write(rt: Any, racy: bool) -> Any:
    """The first program reads what the second one overwrites: in place, over the edge of a block."""
    values = on_device(1, 2, 3, 4, 5, 6, 7, 8)
    out = values if racy else zeros(8)
    shift[(2,)](values, out, 8, BLOCK=4)
    return out


@program(CLASH, "element 0")
def a_read_beside_an_atomic(rt: Any, racy: bool) -> Any:
    """A count is read while other programs add to it."""
    counts, seen = zeros(2), zeros(3)
    tally[(3,)](counts, on_device(0, 1, 0), seen, LOOK=racy)
    return seen


@program(CLASH, "element 0")
def a_sum_without_a_lock(rt: Any, racy: bool) -> Any:
    """Each program reads the sum and writes it again."""
    total = zeros(1)
    add_up[(3,)](zeros(1), total, on_device(1, 2, 3), LOCKED=not racy)
    return total


@program(CLASH, "element 0")
def a_flag_that_releases_nothing(rt: Any, racy: bool) -> Any:
    """A relaxed atomic orders nothing around it."""
    total = zeros(3)
    relay[(3,)](zeros(1), total, SEM="relaxed" if racy else "acq_rel", WAIT=2)
    return total


@program(CLASH, "element 0")
def a_program_that_does_not_wait(rt: Any, racy: bool) -> Any:
    """The last program reads the number, and only the one before it has waited for the flag."""
    total = zeros(3)
    relay[(3,)](zeros(1), total, SEM="acq_rel", WAIT=1 if racy else 2)
    return total


@program(CLASH, "row 0, column 1")
def programs_of_two_axes(rt: Any, racy: bool) -> Any:
    """Cell 1 of row 0 is that of program (0, 1), and the one behind that of program (0, 0)."""
    out = zeros(2, 4)
    cells[(2, 3)](out, 4, WIDE=racy)
    return out


@program(CLASH, "element 1")
def elements_of_two_widths(rt: Any, racy: bool) -> Any:
    """Four bytes are half of an element of eight."""
    memory = torch.zeros(4, dtype=torch.int64, device="cuda")
    widths[(2,)](memory, 3 if racy else 4)
    return memory


@program(RaceKind.READ_AFTER_WRITE, "all 4 elements")
def a_kernel_behind_a_copy(rt: Any, racy: bool) -> Any:
    """The kernel reads what a copy on another stream brings."""
    side, pinned = cuda.Stream(), torch.arange(4, dtype=torch.int32).pin_memory()
    with cuda.stream(side):
        values = pinned.to("cuda", non_blocking=True)
        copied = side.record_event()
        values.record_stream(cuda.default_stream())
    if not racy:
        copied.wait()
    out = zeros(4)
    double[(1,)](values, out, 4, BLOCK=8)
    side.synchronize()
    return out


@program(RaceKind.WRITE_AFTER_READ, "elements 2-3")
def a_copy_behind_a_kernel(rt: Any, racy: bool) -> Any:
    """The kernel reads four of six elements, and a copy writes the last four, or the two that the kernel leaves out."""
    side, values, out = cuda.Stream(), zeros(6), zeros(4)
    pinned = torch.ones(6, dtype=torch.int32).pin_memory()
    cuda.synchronize()
    with cuda.stream(side):
        double[(2,)](values, out, 4, BLOCK=2)
    first = 2 if racy else 4
    values[first:].copy_(pinned[first:], non_blocking=True)
    cuda.synchronize()
    return out


@program(RaceKind.WRITE_AFTER_WRITE, "row 2")
def rows_of_two_streams(rt: Any, racy: bool) -> Any:
    """Two launches write rows of one table that they have from a table of addresses, and nothing orders them."""
    side, table = cuda.Stream(), zeros(4, 4)
    addresses = on_device(*(row.data_ptr() for row in table), dtype=torch.int64)
    lengths = on_device(4, 4, 4, 4)
    cuda.synchronize()
    fill_table[(3,)](addresses, lengths, 1, BLOCK=4)
    with cuda.stream(side):
        first = 2 if racy else 3
        fill_table[(4 - first,)](addresses[first:], lengths, 2, BLOCK=4)
    cuda.synchronize()
    return table[:2]


@program(RaceKind.FREED_IN_USE, "all 4 elements")
def a_block_freed_under_a_kernel(rt: Any, racy: bool) -> Any:
    """Memory goes back to its stream while the kernel reads it on another one."""
    side, out = cuda.Stream(), zeros(4)
    lent = on_device(1, 2, 3, 4)
    side.wait_stream(cuda.default_stream())
    with cuda.stream(side):
        double[(1,)](lent, out, 4, BLOCK=4)
        if not racy:
            lent.record_stream(side)
    del lent
    zeros(4)
    cuda.synchronize()
    return out


@program(RaceKind.STAGING_REFILLED, "elements 0-3")
def pinned_memory_refilled_by_numpy(rt: Any, racy: bool) -> Any:
    """The kernel reads pinned memory where it lies; the host fills it for the next step."""
    pinned, out = torch.ones(8, dtype=torch.int32).pin_memory(), zeros(4)
    double[(1,)](pinned[:4], out, 4, BLOCK=8)
    if not racy:
        cuda.synchronize()
    pinned.numpy()[:] = 9
    cuda.synchronize()
    return out


@program(RaceKind.STAGING_REFILLED, "elements 0-3")
def pinned_memory_refilled_by_torch(rt: Any, racy: bool) -> Any:
    """The host writes what the kernel reads, or what it leaves out."""
    pinned, out = torch.ones(8, dtype=torch.int32).pin_memory(), zeros(4)
    double[(1,)](pinned, out, 4, BLOCK=8)
    pinned[:4].fill_(9) if racy else pinned[4:].fill_(9)
    cuda.synchronize()
    return out


@program(RaceKind.HOST_READS_EARLY, "elements 0-3")
def pinned_results_read_early(rt: Any, racy: bool) -> Any:
    """The kernel writes pinned memory, which numpy reads."""
    pinned = torch.zeros(8, dtype=torch.int32).pin_memory()
    seen, done = pinned.numpy(), cuda.Event()
    double[(1,)](on_device(1, 2, 3, 4), pinned, 4, BLOCK=8)
    done.record()
    if not racy:
        done.synchronize()
    result = seen[:4].sum()
    cuda.synchronize()
    return result


@program(RaceKind.HOST_MEMORY_REUSED, "all 4 elements")
def a_landing_that_a_kernel_reads(rt: Any, racy: bool) -> Any:
    """A copy to the host lands in pinned memory, which a kernel on another stream reads."""
    side, pinned, out = cuda.Stream(), torch.zeros(4, dtype=torch.int32).pin_memory(), zeros(4)
    values = on_device(1, 2, 3, 4)
    cuda.synchronize()
    with cuda.stream(side):
        pinned.copy_(values, non_blocking=True)
    if not racy:
        cuda.default_stream().wait_stream(side)
    double[(1,)](pinned, out, 4, BLOCK=4)
    cuda.synchronize()
    return out


@program(RaceKind.WRITE_AFTER_READ, "all 4 elements")
def a_kernel_in_a_graph(rt: Any, racy: bool) -> Any:
    """A replay reads what another stream writes."""
    side, values, out, graph = cuda.Stream(), zeros(4), zeros(4), cuda.CUDAGraph()
    cuda.synchronize()
    with cuda.graph(graph, stream=side):
        double[(1,)](values, out, 4, BLOCK=4)
    values.copy_(on_device(1, 2, 3, 4))
    cuda.synchronize()
    with cuda.stream(side):
        graph.replay()
        replayed = side.record_event()
    if not racy:
        replayed.wait()
    values.fill_(5)
    cuda.synchronize()
    return out


@program(RaceKind.LEFTOVER_READ, "row 1")
def a_row_of_another_request(rt: Any, racy: bool) -> Any:
    """The kernel reads a row that its last owner has left."""
    state, out = zeros(3, 4), zeros(4)
    rt.owned_by(state, [1], "a")
    state[1].fill_(3)
    rt.owned_by(state, [1], "b")
    if not racy:
        state[1].fill_(4)
    double[(1,)](state[1], out, 4, BLOCK=4)
    return out


@program(RaceKind.UNWRITTEN_READ, "elements 0-3")
def memory_that_nothing_has_written(rt: Any, racy: bool) -> Any:
    """Half of the memory is written, and the kernel reads that half."""
    values, out = torch.empty(8, dtype=torch.int32, device="cuda"), zeros(4)
    if not racy:
        values[:4].fill_(1)
    double[(1,)](values, out, 4, BLOCK=8)
    return out
