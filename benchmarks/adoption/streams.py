"""`python -m benchmarks.adoption.streams`: helpers of released engines that order streams, under `cuda_on_cpu`.

Each helper is taken out of the engine's own source, unchanged, and driven as the engine drives it. Then each statement
of it that waits, records or keeps memory is deleted, one at a time: the race detector has to find it, or some order of
the simulated device has to come to other values; otherwise it is redundant there. Nothing of an engine is imported.
"""

import argparse
import ast
import contextlib
import copy
import functools
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch

from batchstate.races import DeviceFault, cuda_on_cpu
from benchmarks.peers.installed import PeerError, version_of

Code = SimpleNamespace
"""Functions and classes of an engine."""

cuda: Any = torch.cuda  # its streams and events have no types

ORDERING = ("record", "record_event", "record_stream", "synchronize", "wait", "wait_event", "wait_stream")
"""Calls that order streams, or keep memory for one."""

SEEDS = 4
ORDERS = (
    ("lazy", 0),
    ("newest", 0),
    ("oldest", 0),
    *((name, seed) for name in ("random", "priority", "pct") for seed in range(SEEDS)),
)
"""Orders of the simulated device, with their seeds."""

_BROKEN = (AssertionError, LookupError, RuntimeError, ValueError)
"""Errors of an engine that goes on with wrong values."""

KEPT = ("contextlib.contextmanager", "contextmanager", "classmethod", "property", "staticmethod")
"""Decorators that a definition keeps."""


@attrs.frozen(eq=False)
class Helper:
    """Some definitions of an engine, and how it uses them.

    Attributes:
        name: of it.
        parts: file of the package -> its definitions: `function`, `Class` or `Class.method`, taken as a function.
        use: drives them rightly, in a window (`code.window`); returns values.
        misuses: what is done wrongly -> drives them so.
        given: what the definitions take from elsewhere; a function where that is imported from the engine, and then
            they keep their decorators.
        redundant: the text of a statement -> why the engine's other statements make up for it.
        depth: steps that are in flight together, if `use` says where steps begin.
    """

    name: str
    parts: Mapping[str, tuple[str, ...]]
    use: Callable[[Code], Any]
    misuses: Mapping[str, Callable[[Code], Any]] = attrs.field(factory=dict)
    given: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = attrs.field(factory=dict)
    redundant: Mapping[str, str] = attrs.field(factory=dict)
    depth: int = 1


# The engine's source


def statements(helper: Helper) -> Iterator[tuple[str, int]]:
    """Every statement of a helper that orders something: file and line."""
    node: Any
    for file, names in helper.parts.items():
        for name in names:
            for node in ast.walk(_definition(file, name, callable(helper.given))):
                if _orders(node):
                    yield file, node.lineno


def _orders(node: Any) -> bool:
    """Whether a statement orders something: a call, or a loop that asks until something is over."""
    if isinstance(node, ast.While):
        return ast.unparse(node.test).startswith("not ") and ast.unparse(node.test).endswith(".query()")
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", None)) in ORDERING


def code_of(helper: Helper, without: tuple[str, int] | None = None) -> Code:
    """A helper's definitions; `reached` counts how often the statement that is deleted would have run."""
    given = helper.given() if callable(helper.given) else helper.given
    made: dict[str, Any] = {"torch": torch, "np": np, "contextlib": contextlib, "reached": [], **given}
    for code in _compiled(helper, without):
        exec(code, made)
    return SimpleNamespace(**made)


@functools.cache
def _compiled(helper: Helper, without: tuple[str, int] | None) -> list[Any]:
    methods = []
    for file, names in helper.parts.items():
        future = ast.parse("from __future__ import annotations").body
        whole = callable(helper.given)
        tree = ast.Module([*future, *(copy.deepcopy(_definition(file, name, whole)) for name in names)], [])
        if without is not None and without[0] == file:
            tree = _Without(without[1]).visit(tree)
        methods.append(compile(ast.fix_missing_locations(tree), str(_path(file)), "exec"))
    return methods


class _Without(ast.NodeTransformer):
    """Deletes the statement of a line."""

    def __init__(self, line: int) -> None:
        self._line = line

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if getattr(node, "lineno", None) == self._line and _orders(node):
            return ast.copy_location(ast.parse("reached.append(1)").body[0], node)
        return super().generic_visit(node)


class _Imports(ast.NodeTransformer):
    """Drops imports inside of functions: what they bring is given."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)


@functools.cache
def _definition(file: str, name: str, whole: bool) -> Any:
    owner, _, method = name.rpartition(".")
    node: Any
    (node,) = [inner for inner in _tree(file, whole).body if getattr(inner, "name", None) == (owner or name)]
    if owner:
        (node,) = [inner for inner in node.body if getattr(inner, "name", None) == method]
    for inner in () if whole else ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            inner.decorator_list = [each for each in inner.decorator_list if ast.unparse(each) in KEPT]
    return node


@functools.cache
def _tree(file: str, whole: bool) -> ast.Module:
    tree = ast.parse(_path(file).read_text())
    return tree if whole else _Imports().visit(tree)


@functools.cache
def _path(file: str) -> Path:
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(file)
    return Path(spec.origin).parent / rest


# Verdicts of the tools


def values_of(result: Any) -> Any:
    """The numbers of a result, on the host."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [values_of(item) for item in result] if isinstance(result, list | tuple) else result


def races_of(helper: Helper, use: Callable[[Code], Any], without: tuple[str, int] | None = None) -> dict[str, Any]:
    """Reports of the race detector, lines that wait inside of torch, and whether the deleted line was reached."""
    code = code_of(helper, without)
    breaks = () if without is None else _BROKEN  # what landed early may be no index
    with cuda_on_cpu(on_race="collect") as rt, contextlib.suppress(*breaks):
        code.window = rt
        use(code)
        cuda.synchronize()
    races = sorted({str(race.kind) for race in rt.races})
    waits = sorted({str(at.line) for _, at in rt.waited_at if at.line and "adoption" not in at.line.code.co_filename})
    return {
        "races": races,
        "waits": waits,
        "reached": bool(code.reached),
        "depth": max(rt.in_flight_depths, default=1),
        "accesses": rt.accesses,
    }


def wrong_orders(helper: Helper, use: Callable[[Code], Any], without: tuple[str, int] | None = None) -> list[str]:
    """Orders of the simulated device in which it does not come to the right values."""
    with cuda_on_cpu("sim:eager") as window:
        torch.manual_seed(0)
        code = code_of(helper)
        code.window = window
        right = values_of(helper.use(code))
    orders = [name for name, seed in ORDERS if _outcome(name, seed, use, code_of(helper, without)) != right]
    return sorted({*orders})


def _outcome(order: str, seed: int, use: Callable[[Code], Any], code: Code) -> Any:
    torch.manual_seed(0)
    try:
        with cuda_on_cpu(f"sim:{order}", seed=seed) as code.window:
            result = use(code)
            cuda.synchronize()
            return values_of(result)
    except (DeviceFault, *_BROKEN) as error:
        return type(error).__name__


def examined(helper: Helper) -> dict[str, Any]:
    """The verdicts of both tools on a helper: used rightly, misused, and without each statement."""
    report: dict[str, Any] = {
        "helper": helper.name,
        "right": {**races_of(helper, helper.use), "wrong": wrong_orders(helper, helper.use)},
        "misused": {
            name: {**races_of(helper, use), "wrong": wrong_orders(helper, use)} for name, use in helper.misuses.items()
        },
        "deleted": [],
    }
    for file, line in statements(helper):
        races = races_of(helper, helper.use, (file, line))
        text = _path(file).read_text().splitlines()[line - 1].strip()
        row = {"statement": text, "line": f"{file}:{line}", "verdict": "not reached", **races}
        if races["reached"]:
            row["wrong"] = wrong_orders(helper, helper.use, (file, line))
            row["verdict"] = "found" if row["races"] or row["wrong"] else "redundant"
        row["why"] = "" if row["verdict"] == "found" else helper.redundant.get(text, "")
        report["deleted"].append(row)
    return report


# vLLM


def prepares_inputs(code: Code, *, waits: bool = True) -> Any:
    """Inputs of four steps go through one pinned buffer."""
    runner = SimpleNamespace(prepare_inputs_event=cuda.Event())
    buffer = code.CpuGpuBuffer(8, dtype=torch.int32, device=torch.device("cuda"), pin_memory=True)
    seen = []
    for step in range(4):
        with code.synchronize_input_prep(runner) if waits else contextlib.nullcontext():
            buffer.np[:4] = step
            moved = buffer.copy_to_gpu(4)
        seen.append(moved * 2)
    return seen


def reads_back(code: Code, *, waits: bool = True) -> Any:
    """A value of the device comes to the host by the buffer."""
    buffer = code.CpuGpuBuffer(4, dtype=torch.int64, device=torch.device("cuda"), pin_memory=True)
    seen = []
    for step in range(3):
        buffer.gpu.fill_(step)
        host = buffer.copy_to_cpu()
        if waits:
            cuda.current_stream().synchronize()
        seen.append(host.tolist())
    return seen


def sent(code: Code, *, refills: bool = False) -> Any:
    """Lists, arrays and tensors of the host go to the device while the host uses them again."""
    array, pinned = np.zeros(4, np.int64), torch.zeros(4, dtype=torch.int64, pin_memory=True)
    seen = []
    for step in range(3):
        array[:] = step
        seen.append(code.async_tensor_h2d(array, device="cuda") + 1)
        seen.append(code.async_tensor_h2d([step, step], device="cuda", dtype=torch.int64) + 1)
        if refills:
            pinned.fill_(step)
            seen[-2] = code.async_tensor_h2d(pinned, device="cuda") + 1
    return seen


def sampled(step: int) -> torch.Tensor:
    """Tokens that a forward makes on the current stream."""
    return torch.full((3, 1), step, dtype=torch.int64, device="cuda") + torch.arange(3, device="cuda")[:, None]


def output_of_a_step(code: Code, *, early: bool = False) -> Any:
    """Tokens of a step are copied while the next one runs, and taken out then."""
    copies, seen = cuda.Stream(), list[Any]()
    before: Any = None
    for step in range(4):
        tokens = sampled(step)
        output = SimpleNamespace(sampled_token_ids=None, logprobs=None)
        now = code.AsyncGPUModelRunnerOutput(output, tokens, None, [], copies, 64)
        if early:
            seen.append(now.sampled_token_ids_cpu.tolist())
        del tokens
        if before is not None:
            seen.append(before.get_output().sampled_token_ids)
        before = now
    seen.append(before.get_output().sampled_token_ids)
    return seen


def output_with_arrays(code: Code) -> Any:
    """The same by the newer runner, whose arrays of numpy torch does not see."""
    main, copies, seen = cuda.current_stream(), cuda.Stream(), list[Any]()
    before: Any = None
    for step in range(4):
        sampler = SimpleNamespace(
            sampled_token_ids=sampled(step), logprobs_tensors=None, num_nans=None, sampling_mask_tensors=None
        )
        output = SimpleNamespace(
            prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={}, req_ids=["a", "b", "c"], sampled_token_ids=None
        )
        counts = torch.ones(3, dtype=torch.int64, device="cuda")
        now = code.AsyncOutput(output, sampler, counts, main, copies, False, None)
        del sampler, counts
        if before is not None:
            seen.append(before.get_output().sampled_token_ids)
        before = now
    seen.append(before.get_output().sampled_token_ids)
    return seen


def pooled(code: Code, *, newer: bool, partly: bool) -> Any:
    """Embeddings of the requests that have ended go to the host."""
    copies, seen = cuda.Stream(), list[Any]()
    before: Any = None
    finished = [True, not partly, True]
    for step in range(3):
        raw, output = sampled(step).float(), SimpleNamespace(pooler_output=None)
        if newer:
            now = code.AsyncPoolingOutput(output, raw, finished, cuda.current_stream(), copies)
        else:
            now = code.AsyncGPUPoolingModelRunnerOutput(output, raw, finished, copies)
        del raw
        torch.zeros(3, 1, device="cuda")
        if before is not None:
            seen.append(values_of(before.get_output().pooler_output))
        before = now
    seen.append(values_of(before.get_output().pooler_output))
    return seen


# SGLang


def relayed(code: Code, *, mixed: bool = False) -> Any:
    """Lengths of a speculative run: published by a forward, resolved by the scheduler while it goes on."""
    schedule, forward, device = cuda.Stream(), cuda.Stream(), torch.device("cuda")
    algorithm = SimpleNamespace(
        is_none=lambda: False, is_some=lambda: True, is_ngram=lambda: False, need_topk=lambda: False
    )
    seen, kept = [], []
    with cuda.stream(schedule):
        pool = SimpleNamespace(req_to_token=torch.arange(8 * 64, device="cuda").reshape(8, 64), req_generation=None)
        future = code.FutureMap(device, algorithm, pool)
        rows, rows_cpu = torch.tensor([1, 2, 5], device="cuda"), torch.tensor([1, 2, 5])
        forward.wait_stream(schedule)
        with cuda.stream(forward):
            future.publish(rows, torch.tensor([4, 5, 6], device="cuda"))
            future.stash_bonus_tokens(rows, torch.tensor([7, 8, 9], device="cuda"))
        for _ in range(4):
            batch = SimpleNamespace(
                spec_info=SimpleNamespace(future_indices=rows, future_dsa_topk_indices_available=False),
                req_pool_indices=rows,
                req_pool_indices_cpu=rows_cpu,
                mix_running_indices=rows,
                mix_running_indices_cpu=rows_cpu,
                seq_lens=torch.zeros(3, dtype=torch.int64, device="cuda"),
                seq_lens_cpu=torch.zeros(3, dtype=torch.int64),
                out_cache_loc=torch.zeros(3, dtype=torch.int64, device="cuda"),
                prefix_lens=[0, 0, 0],
            )
            kept.append(dict(vars(batch)))  # as the scheduler does, for two steps
            if not mixed:
                future.resolve_seq_lens_cpu(batch)
            with cuda.stream(forward):
                forward.wait_stream(schedule)
                if mixed:
                    future.resolve_mixed_spec_tails(batch)
                else:
                    future._resolve_spec_extras(batch)
                    future.stash_bonus_tokens(rows, batch.spec_info.bonus_tokens + 1)
                future.publish(rows, batch.seq_lens + 2)
            seen.append((batch.seq_lens_cpu.clone(), batch.out_cache_loc, batch.seq_lens))
            kept.append(dict(vars(batch)))
    return seen


def mixed_inputs(code: Code) -> Any:
    """Ids of a mixed batch: prompts from pinned memory, decode ids from the relay; its indices are dropped at once."""
    schedule, forward, device = cuda.Stream(), cuda.Stream(), torch.device("cuda")
    none = SimpleNamespace(is_none=lambda: True, is_some=lambda: False, is_ngram=lambda: False)
    seen = []
    with cuda.stream(schedule):
        pool = SimpleNamespace(req_to_token=torch.zeros(8, 4, device="cuda"), req_generation=None)
        future = code.FutureMap(device, none, pool)
        rows = torch.tensor([1, 2], device="cuda")
        forward.wait_stream(schedule)
        with cuda.stream(forward):
            future.stash(rows, _payload(torch.tensor([7, 8], device="cuda")))
        for step in range(3):
            batch = SimpleNamespace(
                prefill_input_ids_cpu=torch.full((2,), step).pin_memory(),
                mix_running_indices=rows.clone(),
                device="cuda",
                enable_overlap=True,
                spec_algorithm=none,
                input_ids=None,
            )
            with cuda.stream(forward):
                forward.wait_stream(schedule)
                code.resolve_forward_inputs(batch, future)
                seen.append(batch.input_ids)
                future.stash(rows, _payload(batch.input_ids[-2:] + 1))
            torch.zeros(2, dtype=torch.int64, device="cuda")  # the scheduler prepares the next batch
    return seen


def _payload(tokens: torch.Tensor) -> SimpleNamespace:
    others = ("topk_p", "topk_index", "hidden_states", "draft_probs", "dsa_topk_indices")
    return SimpleNamespace(bonus_tokens=tokens, **dict.fromkeys(others))


def confidences(code: Code) -> Any:
    """A ring of pinned copies, asked without waiting: what it gives is of two steps before, or nothing."""
    forward, copies, right = cuda.Stream(), cuda.Stream(), []
    pool = SimpleNamespace(req_generation=torch.zeros(4, dtype=torch.int64))
    relay = code.ConfidenceRelay(device=torch.device("cuda"), req_pool_size=4, pool=pool)
    rows, rows_cpu = torch.tensor([1, 2], device="cuda"), torch.tensor([1, 2])
    batch = SimpleNamespace(spec_info=SimpleNamespace(future_indices=rows), req_pool_indices_cpu=rows_cpu)
    published = cuda.Event()
    forward.wait_stream(cuda.current_stream())
    for step in range(6):
        resolved = relay.resolve(batch, stream=copies, publish_ready=published)
        right.append(resolved is None or resolved.confidence.tolist() == [[step - 2.0]] * 2)
        with cuda.stream(forward):
            forward.wait_stream(copies)
            relay.scatter(rows, torch.full((2, 1), float(step), device="cuda"))
            published.record()
        relay.issue_ring_copy(stream=copies, publish_ready=published)
        if step == 3:
            copies.synchronize()
    return right


def results(code: Code, *, early: bool = False) -> Any:
    """Results of a forward go to the host on a copy stream; the tensors of the device are dropped there."""
    forward, copies, seen = cuda.Stream(), cuda.Stream(), list[Any]()
    before: Any = None
    scheduler = SimpleNamespace(
        copy_stream=copies, forward_stream=forward, copy_stream_ctx=cuda.stream(copies), enable_async_d2h_copy=False
    )
    batch = SimpleNamespace(return_logprob=False, return_hidden_states=False)
    for step in range(4):
        with cuda.stream(forward):
            result = _Absent(next_token_ids=sampled(step), copy_done=cuda.Event())
        code.copy_to_cpu.__globals__["_async_d2h"] = code.async_d2h  # its name there
        result.copy_to_cpu = functools.partial(code.copy_to_cpu, result)
        result.copy_auxiliary_output_to_cpu = lambda: None
        code._copy_result_to_cpu(scheduler, result, batch)
        with cuda.stream(forward):
            torch.zeros(3, 1, dtype=torch.int64, device="cuda")
        if early:
            seen.append(result.next_token_ids.tolist())
        if before is not None:
            before.copy_done.synchronize()
            seen.append(before.next_token_ids.tolist())
        before = result
    before.copy_done.synchronize()
    return [*seen, before.next_token_ids.tolist()]


class _Absent(SimpleNamespace):
    """A result of which most fields are None."""

    def __getattr__(self, name: str) -> None:
        return None


def in_parallel(code: Code) -> Any:
    """Two functions in two streams, the same two events each time."""
    auxiliary, events = cuda.Stream(), [cuda.Event(), cuda.Event()]
    table, seen = torch.zeros(4, device="cuda"), []
    scratch = torch.zeros(4, device="cuda")
    for _ in range(3):
        table.add_(1)
        left, right = code.maybe_execute_in_parallel(
            lambda: table * 2, lambda: scratch.copy_(table * 3), events, auxiliary
        )
        seen.append(left + right)
    return seen


def behind_the_reads(code: Code, *, coarse: bool = False) -> Any:
    """The scheduler rewrites a table that the forward before has read."""
    schedule, forward = cuda.Stream(), cuda.Stream()
    runner = SimpleNamespace(shared_read_done_event=None)
    scheduler = SimpleNamespace(
        _war_barrier_enabled=True,
        model_worker=SimpleNamespace(last_shared_read_runner=runner),
        schedule_stream=schedule,
        forward_stream=forward,
    )
    seen = []
    with cuda.stream(schedule):
        table = torch.zeros(4, device="cuda")
        for step in range(4):
            table.fill_(step)
            with cuda.stream(forward):
                forward.wait_stream(schedule)
                seen.append(table * 2)
                runner.shared_read_done_event = None if coarse else forward.record_event()
            code._apply_war_barrier(scheduler)
    return seen


_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_OUTPUT = {"AsyncModelRunnerOutput": object, "RejectionSampler": None, "envs": None}
_FUTURE = {
    "_is_cuda": True,
    "_is_hip": False,
    "_DEBUG_ASSERT": False,
    "_offered_relay": None,
    "spec_need_hidden_states": lambda: False,
    "msgspec": SimpleNamespace(Struct=SimpleNamespace),
    "CONFIDENCE_RELAY_RING_LAG": 2,
    "CONFIDENCE_RELAY_RING_DEPTH": 3,
    "Optional": Any,
}
_RELAY = {
    "sglang/srt/managers/overlap_utils.py": (
        "ConfidenceRelay",
        "ResolvedConfidence",
        "FutureMap",
        "resolve_forward_inputs",
    )
}

HELPERS = (
    Helper(
        "vLLM: CpuGpuBuffer and synchronize_input_prep",
        {"vllm/v1/utils.py": ("CpuGpuBuffer",), _RUNNER: ("GPUModelRunner.synchronize_input_prep",)},
        prepares_inputs,
        {"refilled without waiting": functools.partial(prepares_inputs, waits=False)},
        {"PIN_MEMORY": True, "contextmanager": contextlib.contextmanager},
    ),
    Helper(
        "vLLM: CpuGpuBuffer.copy_to_cpu",
        {"vllm/v1/utils.py": ("CpuGpuBuffer",)},
        reads_back,
        {"read without waiting": functools.partial(reads_back, waits=False)},
        {"PIN_MEMORY": True},
    ),
    Helper(
        "vLLM: async_tensor_h2d",
        {"vllm/utils/torch_utils.py": ("async_tensor_h2d",)},
        sent,
        {"a pinned source refilled": functools.partial(sent, refills=True)},
        {"PIN_MEMORY": True},
    ),
    Helper(
        "vLLM: AsyncGPUModelRunnerOutput",
        {_RUNNER: ("AsyncGPUModelRunnerOutput",)},
        output_of_a_step,
        {"tokens taken before get_output": functools.partial(output_of_a_step, early=True)},
        _OUTPUT,
    ),
    Helper(
        "vLLM: AsyncOutput, async_copy_to_np, stream",
        {"vllm/v1/worker/gpu/async_utils.py": ("AsyncOutput", "async_copy_to_np", "stream")},
        output_with_arrays,
        {},
        _OUTPUT,
    ),
    *(
        Helper(
            f"vLLM: AsyncPoolingOutput{', some requests' * partly}",
            {"vllm/v1/worker/gpu/async_utils.py": ("AsyncPoolingOutput", "stream")},
            functools.partial(pooled, newer=True, partly=partly),
            {},
            _OUTPUT,
        )
        for partly in (False, True)
    ),
    *(
        Helper(
            f"vLLM: AsyncGPUPoolingModelRunnerOutput{', some requests' * partly}",
            {_RUNNER: ("AsyncGPUPoolingModelRunnerOutput", "_copy_pooler_output_to_cpu")},
            functools.partial(pooled, newer=False, partly=partly),
            {},
            _OUTPUT,
        )
        for partly in (False, True)
    ),
    Helper("SGLang: FutureMap, lengths of a speculative run", _RELAY, relayed, {}, _FUTURE),
    Helper("SGLang: FutureMap, mixed batch", _RELAY, functools.partial(relayed, mixed=True), {}, _FUTURE),
    Helper("SGLang: resolve_forward_inputs", _RELAY, mixed_inputs, {}, _FUTURE),
    Helper("SGLang: ConfidenceRelay", _RELAY, confidences, {}, _FUTURE),
    Helper(
        "SGLang: results on the copy stream",
        {
            "sglang/srt/managers/scheduler.py": ("Scheduler._copy_result_to_cpu",),
            "sglang/srt/managers/utils.py": ("GenerationBatchResult.copy_to_cpu",),
            "sglang/srt/utils/common.py": ("async_d2h",),
        },
        results,
        {"tokens taken before copy_done": functools.partial(results, early=True)},
        {
            "partial": functools.partial,
            "is_pin_memory_available": lambda device: True,
        },
    ),
    Helper(
        "SGLang: maybe_execute_in_parallel",
        {"sglang/srt/utils/multi_stream_utils.py": ("maybe_execute_in_parallel",)},
        in_parallel,
        {},
        {"do_multi_stream": lambda: True},
    ),
    *(
        Helper(
            f"SGLang: barrier behind shared reads, {'coarse' if coarse else 'by event'}",
            {"sglang/srt/managers/scheduler.py": ("Scheduler._apply_war_barrier",)},
            functools.partial(behind_the_reads, coarse=coarse),
            {},
            {"envs": SimpleNamespace(SGLANG_FORCE_COARSE_WAR_BARRIER=SimpleNamespace(get=lambda: False))},
        )
        for coarse in (False, True)
    ),
)


def main(arguments: Sequence[str] | None = None, helpers: Sequence[Helper] = HELPERS) -> int:
    """Examines helpers; 1 if one that is used rightly is accused, or a misuse is not found.

    Also if fewer steps are in flight than a helper says, or if it has reasons and gives none for a redundant statement.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption.streams", description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    reports, bad = [], 0
    for helper in helpers:
        try:
            report = examined(helper)
        except (ModuleNotFoundError, FileNotFoundError, PeerError) as error:
            print(f"{helper.name}: skipped, not there: {error}")
            continue
        reports.append(report)
        right, rows = report["right"], report["deleted"]
        unexplained = [row for row in rows if row["verdict"] == "redundant" and not row["why"]]
        bad += bool(right["races"] or right["wrong"]) + (right["depth"] < helper.depth)
        bad += sum(not (run["races"] or run["wrong"]) for run in report["misused"].values())
        bad += len(unexplained) if helper.redundant else 0
        print(
            f"{helper.name}: used rightly: {right['races'] or 'silent'}, {right['wrong'] or 'right in all orders'}"
            f" ({right['accesses']:,} accesses, {right['depth']} steps in flight)"
        )
        for name, run in report["misused"].items():
            print(
                f"  misused, {name}: {', '.join(run['races'])}; wrong values in {', '.join(run['wrong']) or 'no order'}"
            )
        if right["waits"]:
            print(f"  waits inside of torch at {', '.join(right['waits'])}")
        for row in rows:
            if not row["reached"]:
                continue
            said = f"{', '.join(row['races']) or 'no race'}; wrong values in {', '.join(row['wrong']) or 'no order'}"
            why = f": {row['why']}" if row["why"] else ""
            print(f"  {row['verdict']}: {row['statement']} ({row['line']}): {said}{why}", flush=True)
    reached = {row["line"] for report in reports for row in report["deleted"] if row["reached"]}
    rest = {
        row["line"]: f"{row['statement']} ({row['line']}){': ' * bool(row['why'])}{row['why']}"
        for report in reports
        for row in report["deleted"]
        if row["line"] not in reached
    }
    for statement in rest.values():
        print(f"reached by no use: {statement}")
    verdicts = Counter(row["verdict"] for report in reports for row in report["deleted"] if row["reached"])
    print(f"{len(reports)} helpers, {bad} wrongly judged; statements deleted: {dict(verdicts)}")
    if options.json is not None:
        versions = {engine: version_of(engine) for engine in ("lmdeploy", "sglang", "vllm")}
        options.json.write_text(json.dumps({"versions": versions, "helpers": reports}, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
