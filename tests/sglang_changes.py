"""The five changes of SGLang that the library comes from, point by point, with the tests that show each here.

The page `docs/reference/sglang-changes.md` is made of `TEXT`. Add a point for each capability, below it SGLang's name
for it, and then what shows it: a test as `test_file.py::test_name`, a state machine as `machine NAME`, a mutant as
`mutant NAME`. What an engine has to do itself has no test, and says why: `an engine's business: ...`.
"""

import ast
import functools
import re
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
BUSINESS = "an engine's business: "


@attrs.frozen
class Point:
    """One point of a change.

    Attributes:
        point: what has to hold, or what can be done.
        sglang: what it is called there.
        shown: references to what shows it.
    """

    point: str
    sglang: str
    shown: tuple[str, ...]


@functools.cache
def tests_of(file: str) -> dict[str, str]:
    """The first line of the docstring of each test in a file."""
    (path,) = (path for folder in (".", "examples", "benchmarks") for path in (ROOT / folder / "tests").glob(file))
    nodes = ast.parse(path.read_text()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {test.name: (ast.get_docstring(test) or "").split("\n")[0] for test in functions}


def fact(reference: str) -> str:
    """The fact that a reference shows, in a sentence.

    Raises:
        KeyError: there is no such test, machine or mutant.
    """
    from tests.selfcheck.machines import MACHINES
    from tests.selfcheck.mutants import MUTANTS

    if reference.startswith(BUSINESS):
        return reference
    kind, _, name = reference.partition(" ")
    if kind == "mutant":
        return f"found: {MUTANTS[name].mechanism} (`{name}`)"
    if kind == "machine":
        return f"state machine `{MACHINES[name].NAME}`"
    file, _, test = reference.partition("::")
    return f"{tests_of(file)[test]} (`{file.removesuffix('.py')}::{test}`)"


def parsed(text: str) -> dict[str, tuple[Point, ...]]:
    """The points of each change in `TEXT`."""
    changes: dict[str, tuple[Point, ...]] = {}
    for section in text.strip().split("\n#"):
        change, _, body = section.strip("#\n").partition("\n\n")
        points = []
        for paragraph in re.split(r"\n {4}(?=\S)", "\n" + body)[1:]:
            point, sglang, *lines = (line.strip() for line in paragraph.split("\n"))
            shown = " ".join(lines)
            points.append(Point(point, sglang, (shown,) if shown.startswith(BUSINESS) else tuple(shown.split(", "))))
        changes[f"#{change}"] = tuple(points)
    return changes


TEXT = """
#24243: request pools

    row 0 belongs to nobody, and has a row in every table
        `req_pool_idx` 0 for padded lanes of a graph
        test_tables.py::test_has_a_row_for_every_slot_and_for_padding, mutant pool_counts_from_zero
    what can be taken and the rows in memory are two numbers
        `ReqToTokenPool.size`, and the rows of `req_to_token`
        test_tables.py::test_adopts_an_engines_tensor, mutant table_sized_by_size
    the last row freed may be the first taken, and old handles are refused
        the free list as a stack
        test_pools.py::test_last_freed_is_first_taken, mutant generation_not_raised
    a row that a forward reads changes hands after it
        result processing that frees behind a launched forward
        test_pools.py::test_pending_until_the_fence, mutant free_ignores_fence
    rows for requests whose KV is to arrive
        `DecodeReqToTokenPool(pre_alloc_size=)`
        test_pools.py::test_running_out_says_whether_it_can_ever_succeed, machine slot_pool
    a state pool beside the rows, taken and freed with them
        `HybridReqToTokenPool`, `req_index_to_mamba_index_mapping`
        test_hybrid.py::test_all_or_nothing, machine hybrid
    several state pools of different kinds and counts at once, and none for some requests
        `HybridReqToTokenPool` beside `SWAKVPool`
        test_hybrid.py::test_several_kinds_of_states, mutant states_of_short_requests_leak
    states that are written in turns
        `mamba_ping_pong_track_buffer`
        test_hybrid.py::test_states_take_turns_by_request
    everything begins anew, in one operation
        `clear` of each pool, `flush_cache`
        test_pages.py::test_clear_names_the_fence_that_it_would_ignore, mutant clear_begins_generations_anew, mutant
        clear_keeps_references_of_leases
    one release over all page pools of a request
        `release_kv_cache`, `free` of `SWATokenToKVPoolAllocator`
        test_pages.py::test_pages_of_every_pool_leave_with_their_request, mutant row_freed_without_pages
    pages before a sliding window are given back while the request runs
        `evict_swa`, `swa_evicted_seqlen`
        test_pages.py::test_pages_before_a_window_are_given_back,
        test_forward_plan.py::test_a_window_reads_what_is_left, mutant window_rounded_up
    the chain of tables by slot, location and location, inside the invariants
        `req_to_token` -> `full_to_swa` -> `state_loc` of DeepSeek V4
        test_pages.py::test_the_chain_of_a_window_and_its_states, mutant map_kept_where_a_window_moved_on, mutant
        map_of_the_wrong_pool
    slot 0, shared slots and liveness in the fuzz of an engine's own class
        `ScheduleBatch.req_pool_indices`
        test_twin_slots.py::test_a_right_class_is_never_accused,
        test_twin_slots.py::test_what_goes_wrong_with_slots_is_found
    tables by location, whose rows belong to the owner of the page
        `full_to_swa_index_mapping`
        test_tables.py::test_a_stale_map_to_the_window_is_not_read, mutant map_written_per_page

#26425: request slots on both sides

    the host has the slots of a step before anything runs
        `req_pool_indices_cpu`, in the place of `req_pool_indices.cpu()` in each step
        test_step.py::test_on_a_device_that_lags, mutant filter_forgets_host
    both sides of the slots move with every operation on rows
        `filter_batch`, `merge_batch`, `split`
        machine batch, mutant merge_forgets_column, mutant filter_forgets_device
    an engine's own class is fuzzed with all its operations, one line each
        `split_batch`, `mix_with_running`, `prepare_for_idle`, `prepare_for_prebuilt`, `retract_decode`
        test_twin_ops.py::test_a_correct_class_is_left_in_peace, test_twin_ops.py::test_a_broken_operation_is_found
    handles of which a side was written are refused by each pool, table and relay
        `req_to_token_pool.free`, `alloc_for_decode`
        test_foreign_writes.py::test_handles_are_compared_when_they_are_used

#26020: one owner of both sides

    what is written into either side is reported by the next operation, whichever it is
        `seq_lens`, `seq_lens_cpu`, `seq_lens_sum`, kept by hand
        test_foreign_writes.py::test_batch_reports_before_it_replaces,
        test_foreign_writes.py::test_value_reports_before_it_replaces,
        test_foreign_writes.py::test_every_operation_is_tried, mutant plan_of_a_step_overrules_a_write
    the inputs of a graph hold what was sent to them
        the buffers of `CudaGraphRunner`
        test_foreign_writes.py::test_fixed_addresses_are_compared_before_they_are_used
    the host plans with bounds while the device knows better
        `seq_lens_cpu` under speculation
        test_foreign_writes.py::test_bounds_are_compared_before_anybody_reads_them, mutant bound_exceeded
    some rows are set from the device: those that a mixed step has verified
        `accept_length`, `new_seq_lens`
        mutant verified_rows_go_to_the_first, mutant bounds_of_verified_rows_forgotten
    numbers of drafts that differ from request to request
        the n-gram and tree drafts of `SpecInput`
        test_ragged_drafts.py::test_each_request_puts_in_its_own_number,
        test_ragged_drafts.py::test_lengths_that_the_host_bounds, mutant drafts_of_the_request_before
    hidden states in bfloat16, seeded from the host by bits
        `hidden_states` of `EagleDraftInput`
        test_bits.py::test_rows_seeded_by_bits_move_like_others, test_bits.py::test_a_relay_is_seeded_by_bits,
        mutant bits_taken_for_numbers

#25945: deferred inputs

    ids of prompts wait on the host, and cross at forward entry, on its stream
        `prefill_input_ids_cpu`, `resolve_forward_inputs`
        test_forward_inputs.py::test_inputs_are_made_on_the_forwards_stream, mutant lazy_ids_taken_for_a_prompt
    one path for prompts, decodes and both
        `mix_running_indices`
        test_forward_inputs.py::test_ids_of_any_batch, mutant stand_in_embedded, machine future_map
    inputs are installed once
        one-shot fields that are cleared when they were read
        test_forward_inputs.py::test_a_plan_is_used_once, mutant inputs_made_twice
    every other value of a token goes the way of its id, by name
        `token_type_ids`, `encoder_input_ids`, `mrope_positions`
        test_token_arrays.py::test_values_of_tokens_go_the_way_of_ids,
        test_token_arrays.py::test_values_of_tokens_at_fixed_addresses, mutant token_types_of_the_step_before
    forwards that take no ids
        `PPProxyTensors` of a pipeline rank above 0
        test_token_arrays.py::test_a_rank_without_ids, test_token_arrays.py::test_true_lengths_without_ids, mutant
        later_rank_takes_no_lengths
    tokens of an encoder before the prompt, in the same pages
        `encoder_lens`, `encoder_out_cache_loc`
        test_kv_offset.py::test_kv_lies_behind_the_encoder, test_kv_offset.py::test_true_lengths_behind_the_encoder,
        test_kv_offset.py::test_page_lists_begin_behind_the_encoder, mutant encoder_tokens_not_counted
    a wrong slot mapping is found
        `out_cache_loc`
        test_token_arrays.py::test_full_compares_the_slot_mapping_with_the_pages
    requests of the host tier and others in one batch and one plan
        HiSparse requests beside those of `ScheduleBatch`
        test_kv_offset.py::test_requests_inside_and_outside_the_tier,
        test_kv_offset.py::test_drafts_inside_and_outside_the_tier, mutant tier_request_planned_as_any_other
    the true lengths, where the host knows bounds
        `resolve_seq_lens_cpu`, `seq_lens` of the relay
        test_forward_inputs.py::test_lengths_that_only_the_device_knows, mutant gather_before_publish
    an idle rank, and the size of a graph
        `prepare_for_idle`, padding of `ForwardBatch`
        test_forward_inputs.py::test_an_idle_step,
        test_forward_inputs.py::test_padded_rows_may_have_an_entry_everywhere

#21591: direct transfer into the host tier

    KV is written where it stays, and nothing is staged on the decode worker's device
        `admit_request_direct` of HiSparse
        test_transport_sessions.py::test_a_request_arrives_where_it_was_granted,
        test_benchmarks.py::test_a_direct_transfer_moves_half_the_bytes_of_a_staged_one, machine host_tier
    a host pool of single tokens, and a prefill of larger pages
        page size 1 of `MLATokenToKVPoolHost`, and that of the prefill
        test_transport_handshake.py::test_pages_stages_and_degrees_may_differ,
        test_transport_sessions.py::test_pages_of_another_size_are_said_in_the_log,
        test_transport_plan.py::test_moved_bytes_are_those_of_the_request
    a prefill of other stages and ranks, and one lease over all of its writers
        `target_tp_ranks`, `target_pp_ranks`, `required_dst_info_num`
        test_transport_plan.py::test_every_stage_and_rank_of_a_source_is_needed_once,
        test_transport_plan.py::test_rows_of_the_layers_that_both_sides_have,
        test_disaggregated.py::test_two_stages_of_two_ranks_into_a_host_tier_without_pages, mutant
        one_writer_ends_the_lease
    index keys and states in device memory, with the same lease
        `state_data_ptrs`, `state_item_lens`, `state_types`
        test_transport_sessions.py::test_wrong_states_and_stages_change_nothing, mutant
        state_of_another_request, machine transfers
    memory is free of a writer when that has ended, whatever became of the request
        `KVPoll.Failed`, `abort`, the bootstrap room that is used again
        test_host_pool.py::test_memory_of_a_writer_waits_for_its_end, mutant ended_with_the_state, mutant
        suspicion_ends_a_writer, test_disaggregated.py::test_a_killed_prefill_worker_is_followed_by_another
    all KV is there before a request decodes: behind the data, of every rank and chunk
        `required_prefill_response_num`, `update_status`
        mutant tags_counted_not_ids, mutant last_chunk_is_enough, mutant decodes_without_admission
    several tokens a step, of bounded lengths too, and steps of a graph's size
        `speculative_num_draft_tokens`, padded `ForwardBatch`
        test_hisparse.py::test_a_padded_step_of_several_tokens_has_one_size, mutant one_backup_for_several_tokens,
        mutant guesses_backed_up_once, mutant padding_backed_up_over_a_request, mutant hot_buffer_grows_by_one
    prefilled here and staged out, beside what came directly
        `admit_request_into_staging`, `collect_ready_reqs`
        test_disaggregated.py::test_tokens_are_those_of_transformers, mutant settles_before_the_copy, mutant
        staging_flag_never_cleared
    what the tier waits for, and that nothing is left
        the leak check of the scheduler's idle loop
        test_hisparse.py::test_what_the_tier_waits_for_is_one_question, mutant abort_forgets_the_host
    the ranks of a decode group come to the same answers
        `poll_and_all_reduce`
        test_agreement.py::test_two_ranks_have_the_same_slots_and_admissions, mutant one_rank_reaps_what_it_sees,
        machine ranks
    which positions of a long context a step reads
        the indexer and its top-k
        an engine's business: the model chooses positions; the library says where each lies, in the hot buffer or in
        host memory
"""

CHANGES = parsed(TEXT)
