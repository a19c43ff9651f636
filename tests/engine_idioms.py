"""What engines do with streams, events, pinned memory and graphs: programs that were written before they were run.

Each is a function of `racy`. None is in `tests/cuda_idioms.py`.
"""

# mypy: disable-error-code="no-untyped-call, possibly-undefined"
# ruff: noqa: D103 - names say what they do

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.cuda import CUDAGraph, Event, Stream, current_stream, synchronize

Program = Callable[[bool], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Registers a program by its name."""
    PROGRAMS[function.__name__] = function
    return function


def zeros(*shape: int) -> torch.Tensor:
    """Device memory that is there for every stream."""
    made = torch.zeros(*shape, device="cuda")
    synchronize()
    return made


def rows(*numbers: int) -> torch.Tensor:
    """An index that is there for every stream."""
    made = torch.tensor(numbers, device="cuda")
    synchronize()
    return made


@program
def pinned_ring(racy: bool) -> Any:
    ring = [(torch.zeros(4, pin_memory=True), Event()) for _ in range(2)]
    out, copies = zeros(4), Stream()
    for step in range(4):
        staged, copied = ring[step % 2]
        if step >= 2 and not racy:
            copied.synchronize()
        staged.fill_(step)
        with torch.cuda.stream(copies):
            out.copy_(staged, non_blocking=True)
            copied.record()


@program
def sampler_on_its_own_stream(racy: bool) -> Any:
    sampler, hidden, head = Stream(), zeros(2, 4), zeros(4, 8)
    logits = hidden @ head
    if not racy:
        sampler.wait_stream(current_stream())
    with torch.cuda.stream(sampler):
        tokens = logits.argmax(-1)
    logits.record_stream(sampler)
    return tokens


@program
def penalties_in_place_under_the_logprobs(racy: bool) -> Any:
    copies, logits = Stream(), zeros(2, 8)
    landing = torch.zeros(2, 8, pin_memory=True)
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        landing.copy_(logits, non_blocking=True)
    if not racy:
        current_stream().wait_stream(copies)
    logits.sub_(1.0)
    synchronize()
    return landing.sum()


@program
def adapter_swapped_under_the_forward(racy: bool) -> Any:
    loads, slots, x = Stream(), zeros(3, 4, 4), zeros(2, 4)
    adapter = torch.ones(4, 4).pin_memory()
    y = x @ slots[1]
    done = current_stream().record_event()
    with torch.cuda.stream(loads):
        if not racy:
            loads.wait_event(done)
        slots[1].copy_(adapter, non_blocking=True)
    return y


@program
def adapter_loaded_into_another_slot(racy: bool) -> Any:
    loads, slots, x = Stream(), zeros(3, 4, 4), zeros(2, 4)
    adapter = torch.ones(4, 4).pin_memory()
    y = x @ slots[1]
    with torch.cuda.stream(loads):
        slots[1 if racy else 2].copy_(adapter, non_blocking=True)
    return y


@program
def copy_on_write_of_a_page(racy: bool) -> Any:
    copies, pages = Stream(), zeros(4, 8)
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        pages[3].copy_(pages[1])
        copied = copies.record_event()
    if not racy:
        copied.wait()
    pages[3, 5:].fill_(1.0)


@program
def layer_by_layer_load(racy: bool) -> Any:
    loads, layers, cache, total = Stream(), 3, zeros(3, 8), zeros(8)
    host, events = torch.ones(3, 8).pin_memory(), [Event() for _ in range(3)]
    with torch.cuda.stream(loads):
        for layer in range(layers):
            cache[layer].copy_(host[layer], non_blocking=True)
            events[layer].record()
    for layer in range(layers):
        events[max(layer - 1, 0) if racy else layer].wait()
        total += cache[layer]
    return total


@program
def layer_by_layer_offload(racy: bool) -> Any:
    stores, cache = Stream(), zeros(3, 8)
    host = torch.zeros(3, 8, pin_memory=True)
    for layer in range(3):
        if racy:
            written = current_stream().record_event()
        cache[layer].fill_(layer)
        if not racy:
            written = current_stream().record_event()
        with torch.cuda.stream(stores):
            stores.wait_event(written)
            host[layer].copy_(cache[layer], non_blocking=True)
    stores.synchronize()
    return host.sum()


@program
def draft_reads_hidden_states_of_the_target(racy: bool) -> Any:
    draft, hidden = Stream(), zeros(4, 8)
    hidden.fill_(1.0)
    draft.wait_stream(current_stream())
    with torch.cuda.stream(draft):
        proposal = hidden.mean(-1)
    if not racy:
        current_stream().wait_stream(draft)
    hidden.copy_(torch.ones(4, 8, device="cuda"))
    return proposal


@program
def draft_tokens_by_slot(racy: bool) -> Any:
    draft, tokens, slots = Stream(), zeros(8, 3), rows(2, 5)
    values = torch.ones(2, 3, device="cuda")
    draft.wait_stream(current_stream())
    with torch.cuda.stream(draft):
        tokens[slots] = values
        values.record_stream(draft)
    if not racy:
        current_stream().wait_stream(draft)
    return tokens.index_select(0, slots)


@program
def bitmask_refilled_by_numpy(racy: bool) -> Any:
    mask = torch.zeros(4, 2, dtype=torch.int32, pin_memory=True)
    view, on_device = mask.numpy(), torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    for step in range(2):
        view[:, :] = step + 1
        on_device.copy_(mask, non_blocking=True)
        if not racy:
            current_stream().synchronize()
    synchronize()


@program
def bitmask_applied_before_it_is_there(racy: bool) -> Any:
    copies, logits = Stream(), zeros(4, 8)
    mask = torch.ones(4, 8, dtype=torch.bool).pin_memory()
    on_device = torch.zeros(4, 8, dtype=torch.bool, device="cuda")
    synchronize()
    with torch.cuda.stream(copies):
        on_device.copy_(mask, non_blocking=True)
    if not racy:
        current_stream().wait_stream(copies)
    logits.masked_fill_(on_device, float("-inf"))


@program
def dispatch_buffer_of_the_layer_before(racy: bool) -> Any:
    combine, buffers = Stream(), [zeros(4, 4) for _ in range(2)]
    done: list[Any] = [None, None]
    for layer in range(4):
        at = 0 if racy else layer % 2
        if done[at] is not None and not racy:
            done[at].wait()
        buffers[at].fill_(layer)
        combine.wait_stream(current_stream())
        with torch.cuda.stream(combine):
            buffers[at].sum()
            done[at] = combine.record_event()


@program
def shared_expert_joins(racy: bool) -> Any:
    other, x = Stream(), zeros(4, 4)
    other.wait_stream(current_stream())
    with torch.cuda.stream(other):
        shared = x * 2
    routed = x * 3
    if not racy:
        current_stream().wait_stream(other)
    out = routed + shared
    synchronize()
    return out


@program
def shared_expert_forks(racy: bool) -> Any:
    other, x = Stream(), zeros(4, 4)
    normed = x * 0.5
    if not racy:
        other.wait_stream(current_stream())
    with torch.cuda.stream(other):
        shared = normed * 2
    current_stream().wait_stream(other)
    out = normed + shared
    synchronize()
    return out


@program
def halves_of_one_projection(racy: bool) -> Any:
    other, qkv = Stream(), zeros(4, 12)
    other.wait_stream(current_stream())
    with torch.cuda.stream(other):
        qkv[:, 4:8].mul_(2.0)
    qkv[:, : 5 if racy else 4].mul_(3.0)
    synchronize()


@program
def weights_prefetched_into_two_slots(racy: bool) -> Any:
    loads, slots, x = Stream(), [zeros(4, 4) for _ in range(2)], zeros(2, 4)
    host = [torch.full((4, 4), float(layer)).pin_memory() for layer in range(4)]
    used = [Event() for _ in range(2)]
    for layer in range(4):
        with torch.cuda.stream(loads):
            if layer >= 2 and not racy:
                used[layer % 2].wait()
            slots[layer % 2].copy_(host[layer], non_blocking=True)
            loaded = loads.record_event()
        loaded.wait()
        x = x @ slots[layer % 2]
        used[layer % 2].record()
    return x


@program
def weights_updated_under_a_forward(racy: bool) -> Any:
    update, weight, x = Stream(), zeros(4, 4), zeros(2, 4)
    y = x @ weight.t()
    fresh = torch.ones(4, 4, device="cuda")
    update.wait_event(Event() if racy else current_stream().record_event())
    with torch.cuda.stream(update):
        weight.data.copy_(torch.ones(4, 4, device="cuda"))
    return y, fresh


@program
def one_staging_for_all_chunks(racy: bool) -> Any:
    staging, target = torch.zeros(4, pin_memory=True), zeros(12)
    for chunk in range(3):
        staging.copy_(torch.full((4,), float(chunk)))
        target[4 * chunk : 4 * chunk + 4].copy_(staging, non_blocking=True)
        if not racy:
            current_stream().record_event().synchronize()


@program
def landing_behind_the_wrong_event(racy: bool) -> Any:
    first, second = zeros(4), zeros(4)
    one = first.to("cpu", non_blocking=True)
    over = current_stream().record_event()
    two = second.to("cpu", non_blocking=True)
    also_over = current_stream().record_event()
    (over if racy else also_over).synchronize()
    return one.sum() + two.sum()


@program
def event_recorded_outside_of_the_window(racy: bool) -> Any:
    copies, value = Stream(), zeros(4)
    landing, done = torch.zeros(4, pin_memory=True), Event()
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        landing.copy_(value, non_blocking=True)
        if not racy:
            done.record()
    if racy:
        done.record()
    done.synchronize()
    return landing.tolist()


@program
def wait_stream_the_wrong_way_round(racy: bool) -> Any:
    side, value = Stream(), zeros(4)
    value.fill_(1.0)
    if racy:
        current_stream().wait_stream(side)
    else:
        side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        result = value + 1
    synchronize()
    return result


@program
def waiting_on_the_wrong_stream(racy: bool) -> Any:
    side, value, ready = Stream(), zeros(4), Event()
    value.fill_(1.0)
    ready.record()
    if racy:
        ready.wait()
    with torch.cuda.stream(side):
        if not racy:
            ready.wait()
        result = value + 1
    synchronize()
    return result


@program
def polling_another_stream(racy: bool) -> Any:
    copies, other, value = Stream(), Stream(), zeros(4)
    landing = torch.zeros(4, pin_memory=True)
    with torch.cuda.stream(copies):
        landing.copy_(value, non_blocking=True)
    while not (other if racy else copies).query():
        pass
    return landing[0].item()


@program
def recorded_for_the_wrong_stream(racy: bool) -> Any:
    side, third = Stream(), Stream()
    value = torch.ones(64, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        total = value.sum()
    value.record_stream(third if racy else side)
    del value
    return total, torch.zeros(64, device="cuda")


@program
def a_view_is_recorded(racy: bool) -> Any:
    side = Stream()
    value = torch.ones(64, device="cuda")
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        total = value.sum()
    (value.clone() if racy else value[3:7]).record_stream(side)
    del value
    return total, torch.zeros(64, device="cuda")


@program
def a_list_is_cleared(racy: bool) -> Any:
    side, batch = Stream(), [torch.ones(8, device="cuda") for _ in range(3)]
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        whole = torch.cat(batch)
    if not racy:
        side.synchronize()
    batch.clear()
    return whole, torch.zeros(8, device="cuda")


@program
def a_result_leaves_its_stream(racy: bool) -> Any:
    side = Stream()

    def made() -> torch.Tensor:
        with torch.cuda.stream(side):
            result = torch.ones(8, device="cuda") * 2
        current_stream().wait_stream(side)
        if not racy:
            result.record_stream(current_stream())
        return result

    total = made().sum()
    with torch.cuda.stream(side):
        torch.zeros(8, device="cuda")
    return total


@program
def copy_between_two_device_buffers(racy: bool) -> Any:
    copies, source, target = Stream(), zeros(4), zeros(4)
    source.fill_(1.0)
    with torch.cuda.stream(copies):
        if not racy:
            copies.wait_stream(torch.cuda.default_stream())
        target.copy_(source, non_blocking=True)
    synchronize()


@program
def index_uploaded_by_another_stream(racy: bool) -> Any:
    copies, table = Stream(), zeros(8, 4)
    host = torch.tensor([1, 3]).pin_memory()
    with torch.cuda.stream(copies):
        index = host.to("cuda", non_blocking=True)
    if not racy:
        current_stream().wait_stream(copies)
    index.record_stream(current_stream())
    return table.index_select(0, index)


@program
def rows_of_requests_are_apart(racy: bool) -> Any:
    side, table = Stream(), zeros(8, 4)
    mine, theirs = rows(1, 2), rows(2 if racy else 3, 5)
    with torch.cuda.stream(side):
        table.index_fill_(0, theirs, 1.0)
    table.index_fill_(0, mine, 2.0)
    synchronize()


@program
def scattered_columns(racy: bool) -> Any:
    side, table = Stream(), zeros(4, 8)
    with torch.cuda.stream(side):
        table[:, ::2].fill_(1.0)
    table[:, (0 if racy else 1) :: 2].fill_(2.0)
    synchronize()


@program
def lengths_land_one_step_late(racy: bool) -> Any:
    lengths, landings = zeros(4), [torch.zeros(4, pin_memory=True) for _ in range(3)]
    events = []
    for step in range(3):
        lengths.add_(1)
        landings[step].copy_(lengths, non_blocking=True)
        events.append(current_stream().record_event())
    events[1 if racy else 2].synchronize()
    return landings[2].numpy().copy()


@program
def cleared_before_or_behind_the_synchronize(racy: bool) -> Any:
    side, buffer = Stream(), zeros(8)
    if racy:
        synchronize()
    buffer.zero_()
    if not racy:
        synchronize()
    with torch.cuda.stream(side):
        buffer.add_(1.0)
    synchronize()


@program
def static_input_filled_before_a_replay(racy: bool) -> Any:
    copies, static, graph = Stream(), zeros(4), CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    host = torch.ones(4).pin_memory()
    with torch.cuda.stream(copies):
        static.copy_(host, non_blocking=True)
        filled = copies.record_event()
    if not racy:
        filled.wait()
    graph.replay()
    return out


@program
def static_output_taken_by_another_stream(racy: bool) -> Any:
    side, static, graph = Stream(), zeros(4), CUDAGraph()
    with torch.cuda.graph(graph):
        out = static + 1
    graph.replay()
    if not racy:
        side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        taken = out.clone()
    current_stream().wait_stream(side)
    graph.replay()
    synchronize()
    return taken


@program
def warm_up_on_a_side_stream(racy: bool) -> Any:
    side, static, graph = Stream(), zeros(4), CUDAGraph()
    with torch.cuda.graph(graph):  # which waits for the device
        static.add_(1)
    with torch.cuda.stream(side):
        static.add_(1)
    if not racy:
        current_stream().wait_stream(side)
    graph.replay()
    synchronize()


@program
def two_graphs_on_two_streams(racy: bool) -> Any:
    other, middle, first, second = Stream(), zeros(4), CUDAGraph(), CUDAGraph()
    with torch.cuda.graph(first):
        middle.add_(1)
    with torch.cuda.graph(second):
        out = middle * 2
    synchronize()
    first.replay()
    with torch.cuda.stream(other):
        if not racy:
            other.wait_stream(torch.cuda.default_stream())
        second.replay()
    synchronize()
    return out


@program
def a_thread_brings_results(racy: bool) -> Any:
    value, landing, taken = zeros(4), torch.zeros(4, pin_memory=True), Event()

    def bring() -> None:
        side = Stream()
        with torch.cuda.stream(side):
            landing.copy_(value, non_blocking=True)
            taken.record()

    worker = threading.Thread(target=bring)
    worker.start()
    worker.join()
    if not racy:
        taken.wait()
    value.fill_(1.0)
    synchronize()


@program
def a_queue_carries_an_event(racy: bool) -> Any:
    items: queue.Queue[Any] = queue.Queue()
    sums = []

    def consume() -> None:
        side = Stream()
        value, ready = items.get()
        with torch.cuda.stream(side):
            if not racy:
                ready.wait()
            sums.append(value.sum())
            side.synchronize()

    worker = threading.Thread(target=consume)
    worker.start()
    value = torch.ones(4, device="cuda")
    items.put((value, current_stream().record_event()))
    worker.join()
    return sums


@program
def an_executor_reads_results(racy: bool) -> Any:
    value, landing = zeros(4), torch.zeros(4, pin_memory=True)
    landing.copy_(value, non_blocking=True)
    landed = current_stream().record_event()

    def read() -> Any:
        if not racy:
            landed.synchronize()
        return landing.tolist()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result()


@program
def shards_gathered_by_several_streams(racy: bool) -> Any:
    streams, whole = [Stream() for _ in range(3)], zeros(12)
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            whole[4 * rank : 4 * rank + 4].fill_(rank)
    for stream in streams[:2] if racy else streams:
        current_stream().wait_stream(stream)
    return whole.sum()


@program
def send_buffer_used_again(racy: bool) -> Any:
    sends, buffer, wire = Stream(), zeros(4), zeros(2, 4)
    for microbatch in range(2):
        buffer.fill_(microbatch)
        sends.wait_stream(current_stream())
        with torch.cuda.stream(sends):
            wire[microbatch].copy_(buffer)
        if not racy:
            current_stream().wait_stream(sends)
    synchronize()


@program
def landing_copied_by_numpy(racy: bool) -> Any:
    landing = zeros(4).to("cpu", non_blocking=True)
    if not racy:
        current_stream().synchronize()
    return np.copy(landing.numpy())


@program
def landing_taken_as_a_number(racy: bool) -> Any:
    count, landing = zeros(1), torch.zeros(1, pin_memory=True)
    landing.copy_(count, non_blocking=True)
    if not racy:
        synchronize()
    return int(landing[0])


@program
def an_alias_of_numpy_is_written(racy: bool) -> Any:
    staged, out = torch.zeros(4, pin_memory=True), zeros(4)
    alias = torch.from_numpy(staged.numpy())
    out.copy_(staged, non_blocking=True)
    if not racy:
        synchronize()
    alias.fill_(1.0)
    synchronize()


@program
def state_copied_between_slots(racy: bool) -> Any:
    side, state = Stream(), zeros(6, 4)
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        state[2:3].copy_(state[5:6])
        copied = side.record_event()
    if not racy:
        copied.wait()
    return state.index_select(0, rows(2) if not racy else torch.tensor([2], device="cuda"))


@program
def page_table_filled_row_by_row(racy: bool) -> Any:
    host = torch.zeros(3, 4, dtype=torch.int32, pin_memory=True)
    array, table = host.numpy(), torch.zeros(3, 4, dtype=torch.int32, device="cuda")
    array[0] = 1
    table[:1].copy_(host[:1], non_blocking=True)
    array[0 if racy else 1] = 2
    table[1:].copy_(host[1:], non_blocking=True)
    synchronize()


@program
def relay_gathered_behind_an_older_publish(racy: bool) -> Any:
    forward, relay = Stream(), zeros(8)
    published = []
    slots, fresh = rows(1, 2), torch.ones(2, device="cuda")
    for _ in range(2):
        relay.index_copy_(0, slots, fresh)
        published.append(current_stream().record_event())
    with torch.cuda.stream(forward):
        published[0 if racy else 1].wait()
        tokens = relay.index_select(0, slots)
    synchronize()
    return tokens


@program
def scales_updated_by_a_side_stream(racy: bool) -> Any:
    side, scale, x = Stream(), zeros(1), zeros(4)
    y = x * scale
    if not racy:
        side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        scale.copy_(x.abs().max())
    synchronize()
    return y


@program
def rope_cache_that_grows(racy: bool) -> Any:
    side, cache = Stream(), {"cos": zeros(4)}
    with torch.cuda.stream(side):
        cache["cos"] = torch.arange(8.0, device="cuda").cos()
        made = side.record_event()
    if not racy:
        made.wait()
    y = cache["cos"][:4] * 2
    synchronize()
    return y


@program
def output_buffer_zeroed_elsewhere(racy: bool) -> Any:
    side = Stream()
    out = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        if not racy:
            side.wait_stream(torch.cuda.default_stream())
        out.add_(1.0)
    synchronize()
    return out


@program
def events_swapped_with_their_buffers(racy: bool) -> Any:
    copies, buffers = Stream(), [zeros(4), zeros(4)]
    events = [Event(), Event()]
    host = torch.ones(4).pin_memory()
    for at in range(2):
        with torch.cuda.stream(copies):
            buffers[at].copy_(host, non_blocking=True)
            events[at].record()
    events[0 if racy else 1].wait()
    return buffers[1].clone()


@program
def averages_of_all_parameters(racy: bool) -> Any:
    side, parameters, average = Stream(), [zeros(4) for _ in range(2)], [zeros(4) for _ in range(2)]
    side.wait_stream(current_stream())
    with torch.cuda.stream(side):
        torch._foreach_lerp_(average, parameters, 0.1)
    if not racy:
        current_stream().wait_stream(side)
    torch._foreach_add_(parameters, 1.0)
    synchronize()


@program
def cached_lengths_used_on_the_host(racy: bool) -> Any:
    lengths = zeros(4)
    cached = lengths.to("cpu", non_blocking=True)
    if not racy:
        current_stream().record_event().synchronize()
    return max(cached.tolist())


@program
def two_hops_without_the_first(racy: bool) -> Any:
    middle, last, value = Stream(), Stream(), zeros(4)
    value.fill_(1.0)
    if not racy:
        middle.wait_stream(current_stream())
    last.wait_stream(middle)
    with torch.cuda.stream(last):
        result = value * 2
    synchronize()
    return result


@program
def pages_zeroed_for_the_next_owner(racy: bool) -> Any:
    clean, pages, table = Stream(), zeros(6, 4), rows(1, 4)
    seen = pages.index_select(0, table)
    clean.wait_event(Event() if racy else current_stream().record_event())
    with torch.cuda.stream(clean):
        pages.index_fill_(0, table, 0.0)
    synchronize()
    return seen


@program
def chunks_of_a_long_prompt(racy: bool) -> Any:
    side, cache = Stream(), zeros(16, 4)
    for chunk in range(2):
        with torch.cuda.stream(side):
            cache[8 * chunk : 8 * chunk + 8].fill_(1.0)
            done = side.record_event()
        if not racy:
            done.wait()
        cache[: 8 * chunk + 8].sum()
    synchronize()


@program
def logits_freed_by_the_next_step(racy: bool) -> Any:
    sampler, kept = Stream(), []
    for _ in range(2):
        logits = torch.ones(32, device="cuda") * 2
        sampler.wait_stream(current_stream())
        with torch.cuda.stream(sampler):
            token = logits.argmax()
        if not racy:
            kept.append((logits, sampler.record_event()))
        del logits
    synchronize()
    return token


@program
def embedding_rows_under_an_update(racy: bool) -> Any:
    side, weight, tokens = Stream(), zeros(8, 4), rows(1, 2)
    rows_written = rows(2 if racy else 5)
    values = torch.ones(1, 4, device="cuda")
    side.wait_stream(current_stream())
    hidden = torch.nn.functional.embedding(tokens, weight)
    with torch.cuda.stream(side):
        weight.index_copy_(0, rows_written, values)
    synchronize()
    return hidden
