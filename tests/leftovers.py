"""Values that an earlier owner or step has left, after bugs of engines: each program racy, and with its repair.

No stream is missing here: everything runs on one, or waits as it should. Each is a function of the window and `racy`.
"""

# mypy: disable-error-code="no-untyped-call, possibly-undefined"

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from batchstate import (
    Batch,
    FutureMap,
    HybridSlotPool,
    PagePool,
    SlotPool,
    StaticBuffers,
    checks,
    mirrored,
    relay_field,
    slot_column,
)

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


# Memory of our own pools, whose owners nobody declares. `rt` is the runtime of the pools.


class Running(Batch):
    """Requests with one number each."""

    slots = slot_column()
    lens = mirrored(torch.int32)


OWN: dict[str, Program] = {}


def own(function: Program) -> Program:
    """Registers a program by its name."""
    OWN[function.__name__] = function
    return function


@own
def row_of_a_table(rt: Any, racy: bool) -> Any:
    """A slot gets its next request, and a kernel that has the table's address reads its row."""
    slots = SlotPool(rt, 1)
    table = slots.table("temperatures", (3,), torch.float32)
    first = slots.take(1)
    table.write(first, None, [[0.5, 0.5, 0.5]])
    slots.free(first, after=None)
    second = slots.take(1)
    if not racy:
        table.write(second, [1], [1.0])  # a kernel reads no further than its owner has written
    return table.memory.index_select(0, second.device)


@own
def entry_of_a_relay(rt: Any, racy: bool) -> Any:
    """A forward takes two fields for a request that has published one, with checks off."""
    slots = SlotPool(rt, 1)
    relay = FutureMap(slots, {"token": relay_field(torch.int64), "hidden": relay_field(torch.float32, (400,))})
    first = slots.take(1)
    relay.publish(first, token=[7], hidden=np.ones((1, 400), np.float32))
    slots.free(first, after=None)
    second = slots.take(1)
    relay.publish(second, token=[8])
    if not racy:
        relay.publish(second, hidden=np.zeros((1, 400), np.float32))
    with checks("off"):
        return relay.gather(second, "token"), relay.gather(second, "hidden")


@own
def padded_rows_of_static_buffers(rt: Any, racy: bool) -> Any:
    """A step fills the rows of its two requests with a kernel of its own; the graph reads all four rows."""
    slots = SlotPool(rt, 4)
    buffers = StaticBuffers(rt, Running, rows=4)
    batch = Running.build(rt, slots=slots.take(3), lens=[5, 6, 7])
    for step in range(2):
        rt.next_step()
        if step == 0 or not racy:
            batch.to_static(buffers)
        else:
            buffers["lens"][:2].fill_(8)
        total = buffers["lens"] * 2
        rt.synchronize()
    return total


@own
def row_of_a_state(rt: Any, racy: bool) -> Any:
    """The recurrent state of a new request goes on from what the request before has left."""
    slots = HybridSlotPool(rt, 1, states=1)
    memory = rt.device_zeros((slots.state_capacity(), 3), torch.float32)
    slots.register_states(memory)
    for request in range(2):
        slot = slots.take(1)
        row = slots.states_of(slot)[0, 0]
        if request == 0 or not racy:
            memory[row].fill_(1.0)
        memory[row].mul_(0.5)
        slots.free(slot, after=None)
    return memory


@own
def token_of_a_page(rt: Any, racy: bool) -> Any:
    """A page gets its next request, which attends one token more than it has written."""
    pages = PagePool(rt, SlotPool(rt, 1), 1, 4, max_tokens_per_request=4)
    memory = rt.device_zeros((8, 2), torch.float32)
    pages.register_kv(memory)
    for count in (4, 2):
        slot = pages.slots.take(1)
        first = int(pages.extend(slot, count).locations.np[0])
        memory[first : first + count].fill_(count)
        read = memory[first : first + (3 if racy else count)].sum()
        pages.release_requests(slot, after=None)
    return read


@own
def page_by_page(rt: Any, racy: bool) -> Any:
    """A kernel may read all of a page that its request has begun. The next request writes its keys, and no values."""
    pages = PagePool(rt, SlotPool(rt, 1), 1, 4, max_tokens_per_request=4)
    memory = rt.device_zeros((2, 2, 4, 2), torch.float32)  # keys and values of each page
    pages.register_kv(memory[:, 0], memory[:, 1])
    for count in (4, 2):
        slot = pages.slots.take(1)
        pages.extend(slot, count)
        page = int(pages.pages_of(slot).np[0])
        memory[page, 0, :count].fill_(count)
        if count == 4 or not racy:
            memory[page, 1, :count].fill_(count)
        read = memory[page, 0].sum() + memory[page, 1].sum()
        pages.release_requests(slot, after=None)
    return read
