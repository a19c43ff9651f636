"""Values that an earlier owner or step has left, after bugs of engines: each program racy, and with its repair.

No stream is missing here: everything runs on one, or waits as it should. Each is a function of the window and `racy`.
"""

# mypy: disable-error-code="no-untyped-call, possibly-undefined"

from collections.abc import Callable
from typing import Any

import torch

Program = Callable[[Any, bool], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Registers a program by its name."""
    PROGRAMS[function.__name__] = function
    return function


def rows(*numbers: int) -> torch.Tensor:
    """An index on the device."""
    return torch.tensor(numbers, device="cuda")


@program
def recycled_slot(cuda: Any, racy: bool) -> Any:
    """A slot gets its next request, whose state is read before anything was written for it (vllm #39833)."""
    state = torch.zeros(4, 8, device="cuda")
    cuda.owned_by(state, [1], "a")
    state[rows(1)] = torch.ones(1, 8, device="cuda")
    cuda.owned_by(state, [1], "b")
    if not racy:
        state.index_fill_(0, rows(1), 0.0)
    return state.index_select(0, rows(1))


@program
def recycled_slot_by_callback(cuda: Any, racy: bool) -> Any:
    """The same where the engine's own dictionary says who owns what."""
    owners = {2: "a"}
    state = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    cuda.rows_of(state, owner=lambda: owners)
    state[2].fill_(7)
    owners[2] = "b"
    if not racy:
        state[2].zero_()
    return state[2] + 1


@program
def recycled_page(cuda: Any, racy: bool) -> Any:
    """A page of KV goes to another request, which attends one token more than it has written."""
    pages = torch.zeros(3, 4, 2, device="cuda")
    cuda.owned_by(pages, [2], "a")
    pages[2].fill_(1.0)
    cuda.owned_by(pages, [2], "b")
    pages[2, :2].fill_(2.0)
    return pages[2, : 3 if racy else 2].sum()


@program
def padded_rows_of_a_graph(cuda: Any, racy: bool) -> Any:
    """A static buffer is filled for fewer requests than the step before, and the kernel reads the rows behind them."""
    slots = torch.zeros(4, dtype=torch.int64, device="cuda")
    cuda.fresh(slots)
    for count in (3, 2):
        cuda.next_step()
        slots[:count].copy_(torch.arange(count, device="cuda"))
        if not racy:
            slots[count:].fill_(0)
        seen = slots[:3] + 1
    return seen


@program
def padded_rows_of_a_replay(cuda: Any, racy: bool) -> Any:
    """The same where a captured graph reads all of the buffer, and `valid` says how many rows count."""
    slots, count = torch.zeros(4, dtype=torch.int64, device="cuda"), [3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = slots * 2
    cuda.fresh(slots, valid=lambda: count[0])
    for filled in (3, 2):
        cuda.next_step()
        count[0] = 3 if racy else filled
        slots[:filled].copy_(torch.arange(filled, device="cuda"))
        graph.replay()
    return out


@program
def lent_buffer(cuda: Any, racy: bool) -> Any:
    """A scratch buffer is lent to the sampler, and then read as if it still held the logits."""
    scratch = torch.zeros(2, 6, device="cuda")
    cuda.owned_by(scratch, [0, 1], "logits")
    scratch[0].fill_(1.0)
    cuda.owned_by(scratch, [0], "sampler")
    scratch[0].fill_(2.0)
    cuda.owned_by(scratch, [0], "logits")
    if not racy:
        scratch[0].fill_(1.0)
    return scratch[0].max()


@program
def state_row_goes_on(cuda: Any, racy: bool) -> Any:
    """The recurrent state of a new request is updated in place from what the row held."""
    state = torch.zeros(4, 3, device="cuda")
    cuda.owned_by(state, [3], "a")
    state[3].add_(1.0)
    cuda.owned_by(state, [3], "b")
    if not racy:
        state[3].zero_()
    state[3].mul_(0.5).add_(1.0)
    return state


@program
def static_metadata(cuda: Any, racy: bool) -> Any:
    """Lengths of the step before are used again, because a step without a change does not fill them."""
    lengths = torch.zeros(4, dtype=torch.int32, device="cuda")
    cuda.fresh(lengths)
    for changed in (True, False):
        cuda.next_step()
        if changed or not racy:
            lengths[:2].copy_(torch.tensor([5, 6], dtype=torch.int32, device="cuda"))
        total = lengths[:2].sum()
    return total


@program
def draft_rows(cuda: Any, racy: bool) -> Any:
    """Four drafts are read where this step has proposed two."""
    drafts = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    lengths = {0: 4, 1: 4}
    cuda.fresh(drafts, valid=lambda: lengths)
    for proposed in (4, 2):
        cuda.next_step()
        drafts[:, :proposed].fill_(proposed)
        lengths.update(dict.fromkeys(lengths, 4 if racy else proposed))
        seen = drafts + 1
    return seen


@program
def dummy_run(cuda: Any, racy: bool) -> Any:
    """A warm-up has written a row that the first request takes for its own."""
    table = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    cuda.owned_by(table, [1], "warm-up")
    table[1].fill_(9)
    cuda.owned_by(table, [1], None)
    if not racy:
        table[1].zero_()
    cuda.owned_by(table, [1], "first request")
    return table[1] + 0


@program
def resume(cuda: Any, racy: bool) -> Any:
    """A request that was set aside comes back to its slot, and goes on from what it had written the turn before."""
    state = torch.zeros(4, 2, device="cuda")
    cuda.owned_by(state, [2], ("a", 1))
    state[2].fill_(3.0)
    cuda.owned_by(state, [2], None)
    cuda.owned_by(state, [2], ("a", 2))
    if not racy:
        state[2].copy_(torch.full((2,), 3.0, device="cuda"))
    return state[2] * 2


@program
def copied_to_the_host(cuda: Any, racy: bool) -> Any:
    """Results of a slot are brought to the host after the slot has its next owner."""
    results = torch.zeros(4, dtype=torch.int64, device="cuda")
    cuda.owned_by(results, [1, 2], "a")
    results[1:3].fill_(4)
    if not racy:
        on_host = results[1:3].cpu()
    cuda.owned_by(results, [1, 2], "b")
    return results[1:3].cpu() if racy else on_host


@program
def rows_of_two_owners(cuda: Any, racy: bool) -> Any:
    """Rows by index: one of them belongs to a request that has written nothing yet."""
    table = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    cuda.owned_by(table, [1], "a")
    cuda.owned_by(table, [2], "b")
    table[rows(1, 2)] = torch.ones(2, 2, dtype=torch.int64, device="cuda")
    cuda.owned_by(table, [2], "c")
    return table.index_select(0, rows(1, 2) if racy else rows(1))
