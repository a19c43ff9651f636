"""The suite. Comparisons are made one at a time, when their turn comes: some hold a million objects.

To add one, give `comparisons` a name and a function that makes it. A way that needs a package which is not there is
an `Absent`; it gets a row that says so.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import attrs
import torch

from batchstate.errors import TransferError
from batchstate.runtime import Runtime
from benchmarks import arrivals, curves, forward_inputs, mixed_steps, staging, steady_steps, transfers, whole_steps
from benchmarks.comparisons import Absent, Asked, Comparison, MismatchError, Row, run
from benchmarks.counts import COLUMNS, Count, counted_calls, counted_steps, counted_waits
from benchmarks.decode_steps import against_checks, against_floors, against_stable_rows, against_twins
from benchmarks.growth import growth_with_rows, pages_flat, slots_flat
from benchmarks.peers.sglang import against_schedule_batch, slots_against_request_pool, slots_against_token_allocator
from benchmarks.peers.transformers_steps import against_continuous_batching
from benchmarks.peers.vllm import against_cpu_gpu_buffers, pages_against_block_pool
from benchmarks.pools import (
    pages_against_lists,
    pages_of_random_sizes,
    slots_against_lists,
    slots_of_random_sizes,
)
from benchmarks.slot_readback import against_read_back
from benchmarks.timing import PRECISE, QUICK, THOROUGH, Effort
from examples.engine.model import Model
from examples.engine.serving import requests_of, serve
from examples.engine.settings import EngineSettings
from examples.traffic import Workload, fitted_workload, run_traffic

Make = Callable[[], Comparison | Absent]

TRANSPORT = "nixl"


@final
@attrs.define
class Results:
    """Measurements so far.

    Attributes:
        lines: our ways against those of others.
        counts: what a step costs in countable things.
        scaling: cost against size.
    """

    lines: list[Row | Absent] = attrs.field(factory=list)
    counts: list[Count] = attrs.field(factory=list)
    scaling: list[curves.Measured] = attrs.field(factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rows": [line.as_json() for line in self.lines],
            "counts": [count.as_json() for count in self.counts],
            "scaling": [curve.as_json() for curve in self.scaling],
        }


@final
@attrs.frozen
class Work:
    """Something to measure.

    Attributes:
        name: to choose it by.
        measure: does it, and adds what comes of it.
    """

    name: str
    measure: Callable[[Results], None]


def comparisons(runtime: Runtime, *, quick: bool) -> Mapping[str, Make]:
    """Makers of all comparisons, by name; `quick` leaves out large pools, and checks of many columns."""
    columns = (12, 40)
    slots = (10_000,) if quick else (10_000, 1_000_000)
    pages, large = (4_096, 10_000) if quick else (65_536, 4_000_000)
    turnovers = (16, 128, 2_048)
    makers: dict[str, Make] = {}
    for n in columns:
        makers[f"decode step, {n} columns"] = partial(against_twins, runtime, num_columns=n)
    for n in columns[:1] if quick else columns:
        for step, levels, limit in (
            ("decode step", against_checks, 1.12),
            ("whole step", whole_steps.against_checks, 1.06),
        ):
            for level, asked in (("cheap", Asked(limit=limit)), ("full", Asked())):
                makers[f"{step}, {n} columns, checks {level}"] = partial(_priced, levels, level, asked, runtime, n)
    for n in steady_steps.REQUESTS[:1] if quick else steady_steps.REQUESTS:
        for step, churn in (("decode step", False), ("decode step with churn", True)):
            make_steady = partial(steady_steps.against_request_loops, runtime, num_requests=n, churn=churn)
            makers[f"{step}, {n:,} requests"] = make_steady
    for n in (*mixed_steps.TARGETS,)[:1] if quick else mixed_steps.TARGETS:
        make_mixed = partial(mixed_steps.against_lists, runtime, num_requests=n)
        makers[f"mixed step with chunked prompts, {n:,} requests"] = make_mixed
    for n in (1, 256):
        own = partial(steady_steps.on_two_streams, runtime, num_requests=n)
        makers[f"a forward on a stream of its own, {n:,} requests"] = own
    makers["inputs of prompts"] = partial(forward_inputs.deferred_against_copies, runtime)
    for busy in forward_inputs.FORWARD_US[:1] if quick else forward_inputs.FORWARD_US:
        overlap = partial(forward_inputs.overlapped_against_synchronous, runtime, busy_us=busy)
        makers[f"overlapped steps, forwards of {busy} us"] = overlap
        makers[f"slots read back, forwards of {busy} us"] = partial(against_read_back, runtime, busy_us=busy)
    for n in (*arrivals.PREFILLS_US,)[:1] if quick else arrivals.PREFILLS_US:
        makers[f"prefill of {n:,} requests"] = partial(arrivals.prefill, runtime, n)
    makers["short requests admitted"] = partial(arrivals.short_requests, runtime)
    makers["handles joined"] = partial(arrivals.joined_handles, runtime)
    makers["one slot"] = partial(arrivals.one_slot, runtime)
    makers["one extension"] = partial(arrivals.one_extension, runtime)
    for size in slots:
        makers[f"256 of {size:,} slots"] = partial(slots_against_lists, runtime, size=size, n=256)
    for n in turnovers:
        makers[f"{n:,} of {pages:,} pages"] = partial(pages_against_lists, runtime, size=pages, n=n)
    makers[f"random sizes of {slots[-1]:,} slots"] = partial(slots_of_random_sizes, runtime, size=slots[-1])
    makers[f"random sizes of {pages:,} pages"] = partial(pages_of_random_sizes, runtime, size=pages)
    makers |= against_peers(runtime, quick=quick)
    makers["growth with rows"] = partial(growth_with_rows, runtime)
    makers["growth with slots"] = partial(slots_flat, runtime, large=large)
    makers["growth with pages"] = partial(pages_flat, runtime, large=large)
    return makers


def works(runtime: Runtime, *, quick: bool, hour: Workload | None = None) -> list[Work]:
    """Everything. `quick` leaves out the hour of traffic, and makes samples few and short.

    Only the default transport is here; `python -m benchmarks.transfers` has all.
    """
    effort = curves.QUICK if quick else curves.SWEEP
    some = [
        Work(name, partial(_compare, runtime, make, quick)) for name, make in comparisons(runtime, quick=quick).items()
    ]
    if not quick:
        some.append(Work("the real hour of traffic", lambda results: results.lines.append(served(runtime, hour))))
    some.append(Work(f"transfers over {TRANSPORT}", partial(_transfer, runtime, quick)))
    some.append(Work(f"direct against staged transfer over {TRANSPORT}", partial(_staging, runtime, quick)))
    some += [Work(f"counts of a whole step, {n} columns", partial(_count, runtime, n)) for n in COLUMNS]
    some.append(Work("calls of a decode step", lambda results: results.counts.extend(counted_calls(runtime))))
    some.append(Work("waits of a decode step", lambda results: results.counts.extend(counted_waits(runtime))))
    if not quick:
        some.append(Work("the example engine", lambda results: results.lines.append(example_engine(runtime))))
    some += [
        Work(f"scaling of {curve}", partial(_sweep, runtime, curve, effort))
        for curve in curves.curves(runtime, quick=quick)
    ]
    return some


def _priced(
    levels: Callable[..., Comparison], level: str, asked: Asked, runtime: Runtime, num_columns: int
) -> Comparison:
    """One level against `off`, `full` by itself since its long steps would allow `cheap` few rounds."""
    comparison = levels(runtime, num_columns=num_columns)
    (baseline,) = (each for each in comparison.baselines if each.name == f"checks {level}")
    asks = {("checks off", baseline.name): asked}
    return attrs.evolve(comparison, baselines=[baseline], asks=asks, paired=level == "cheap")


def _compare(runtime: Runtime, make: Make, quick: bool, results: Results) -> None:
    made = make()
    if isinstance(made, Absent):
        results.lines.append(made)
    else:
        results.lines += run(runtime, made, QUICK if quick else PRECISE if made.paired else THOROUGH)


def _transfer(runtime: Runtime, quick: bool, results: Results) -> None:
    for rows in transfers.run_all(runtime, [TRANSPORT], quick=quick):
        results.lines += rows


def _staging(runtime: Runtime, quick: bool, results: Results) -> None:
    try:
        rows, counts = staging.measured(runtime, TRANSPORT, transfers.effort_of(quick=quick), quick=quick)
    except TransferError as error:
        print(f"benchmarks: without {TRANSPORT}: {error}", file=sys.stderr)
        return
    results.lines += rows
    results.counts += counts


def _count(runtime: Runtime, num_columns: int, results: Results) -> None:
    results.counts += counted_steps(runtime, num_columns=num_columns)


def _sweep(runtime: Runtime, curve: curves.Curve, effort: Effort, results: Results) -> None:
    results.scaling.append(curve.measured(runtime, effort))


SECONDS_ASKED = 9.0


def served(runtime: Runtime, hour: Workload | None = None) -> Row:
    """The wall time of one run at `cheap`: of the hour that is given, or else of one drawn like the real one.

    Raises:
        MismatchError: a token was lost or generated twice, something leaked, or an invariant was broken.
    """
    report = run_traffic(fitted_workload() if hour is None else hour, device=str(runtime.device), checks="cheap")
    if not report.clean:
        raise MismatchError(f"the hour of traffic: {report.violations} violations, {report.leaks} leaks")
    drawn = "" if hour else "; drawn like the real hour, which --trace takes"
    note = f"{report.requests:,} requests, {report.tokens:,} tokens, {report.steps:,} steps; run once{drawn}"
    return _asked(
        "the real hour of traffic", report.seconds * 1e6, SECONDS_ASKED * 1e6, f"{SECONDS_ASKED:g} s asked", note
    )


ENGINE_US_ASKED = 300.0


def example_engine(runtime: Runtime) -> Row:
    """The host time of a step of the example engine at `cheap`, over a random model of torch's, without its forwards.

    Raises:
        MismatchError: a token differs from what the model generates for the request alone, or an invariant was broken.
    """
    model = Model.random("plain", device=runtime.device, dtype=torch.float64, seed=0)
    requests = requests_of(fitted_workload(300, 0), model, scale=8, seed=0, prebuilt=0.1)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    settings = EngineSettings(num_pages=longest // 16 + 512, max_tokens_per_request=longest)
    report = serve(runtime, model, requests, settings, level="cheap", name="plain")
    if not report.clean:
        raise MismatchError(f"the example engine: {report.mismatches} tokens, {report.violations} violations")
    task, note = "host time of a step of the example engine", f"{report.steps:,} steps; run once"
    return _asked(task, report.host_us_per_step, ENGINE_US_ASKED, f"{ENGINE_US_ASKED:g} us asked", note)


def _asked(task: str, took: float, asked: float, baseline: str, note: str) -> Row:
    """A row of our own time against what was asked."""
    return Row(
        task=task,
        way="checks cheap",
        ours_us=took,
        baseline=baseline,
        baseline_us=asked,
        ratio=asked / took,
        spread={"ours_us": (took, took), "baseline_us": (asked, asked), "ratio": (asked / took, asked / took)},
        ours_host_us=took,
        baseline_host_us=asked,
        target=1.0,
        note=note,
    )


def against_peers(runtime: Runtime, *, quick: bool) -> Mapping[str, Make]:
    """Makers by name; `quick` leaves large pools and large batches out."""
    slots, pages = (10_000, 4_096) if quick else (1_000_000, 65_536)
    makers: dict[str, Make] = {}
    for n in (12, 40):
        makers[f"decode step, {n} columns, stable rows"] = partial(against_stable_rows, runtime, num_columns=n)
        makers[f"decode step, {n} columns, CpuGpuBuffer"] = partial(against_cpu_gpu_buffers, runtime, num_columns=n)
        makers[f"decode step, {n} columns, floors"] = partial(against_floors, runtime, num_columns=n)
    for rows in (64,) if quick else (64, 256, 1_024):
        makers[f"ScheduleBatch, {rows:,} rows"] = partial(against_schedule_batch, runtime, rows=rows)
    for n in (64,) if quick else (64, 256):
        makers[f"continuous batching, {n} requests"] = partial(against_continuous_batching, runtime, num_requests=n)
    makers["token allocator"] = partial(slots_against_token_allocator, runtime, size=slots)
    makers["ReqToTokenPool"] = partial(slots_against_request_pool, runtime, size=slots)
    for n in (16, 128, 2_048):
        makers[f"BlockPool, {n:,} blocks"] = partial(pages_against_block_pool, runtime, size=pages, n=n)
    return makers
