"""Runs a workload through the engine by a simulated clock, and measures."""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import numpy as np
import torch

from batchstate import invariants, levels
from batchstate.runtime import Counters, Runtime, open_runtime
from batchstate.violations import Violation
from examples.traffic.engine import EngineSettings, Request, RunningBatch, StepResult, TrafficEngine, draw_requests
from examples.traffic.workload import Workload


@final
@attrs.frozen(kw_only=True)
class TrafficReport:
    """The result of `run_traffic`.

    Attributes:
        workload: where the requests come from.
        device: where the device sides lay.
        checks: level of the checks.
        columns: columns of the batch.
        requests: requests that arrived.
        finished, aborted: requests that got their whole answer, and those whose client hung up first.
        retractions: times a request had to give back its pages, to be prefilled again later.
        tokens: tokens generated, counted step by step.
        tokens_delivered: tokens that the requests have got; the same, if none was generated twice or lost.
        prefill_tokens: tokens whose KV was computed without generating one, retracted requests' again.
        steps: steps of the engine.
        peak_running, peak_pages: most requests in the batch, and most pages owned, at once.
        pages: pages of the pool.
        simulated_seconds, seconds: simulated time at the end, and real time.
        host_us_per_step: host time of a step, median and 99th percentile: planning, batch operations, pools and upload.
        host_to_device_copies_per_step, device_operations_per_step, host_to_device_bytes_per_step: mean.
        most_host_to_device_copies, most_device_operations: of any one step.
        forced_syncs: times the host waited for the whole device.
        laws_asked: how often an invariant was checked.
        violations: invariants found broken.
        leaks: slots and pages that were not given back.
        broken: the report of the violation that ended the run, or None.
    """

    workload: str
    device: str
    checks: str
    columns: int
    requests: int
    finished: int
    aborted: int
    retractions: int
    tokens: int
    tokens_delivered: int
    prefill_tokens: int
    steps: int
    peak_running: int
    peak_pages: int
    pages: int
    simulated_seconds: float
    seconds: float
    host_us_per_step: dict[str, float]
    host_to_device_copies_per_step: float
    device_operations_per_step: float
    most_host_to_device_copies: int
    most_device_operations: int
    host_to_device_bytes_per_step: float
    forced_syncs: int
    laws_asked: int
    violations: int
    leaks: int
    broken: str | None

    @property
    def clean(self) -> bool:
        """Nothing was broken and nothing is missing."""
        return self.violations == 0 and self.leaks == 0 and self.tokens == self.tokens_delivered

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return attrs.asdict(self)


STEPS_BETWEEN_PROGRESS = 16
"""Steps between two calls of `progress`: some milliseconds."""


@final
@attrs.define(kw_only=True)
class TrafficProgress:
    """Totals since the run began, and its state after the last step.

    Attributes:
        requests: requests of the workload.
        done: those that finished or were aborted.
        steps: steps launched.
        simulated_seconds: the clock.
        tokens, computed: tokens generated, and tokens whose KV was computed.
        running, waiting: requests in the batch, and those that have arrived and wait.
        slots, pages: those that have an owner.
    """

    requests: int
    done: int = 0
    steps: int = 0
    simulated_seconds: float = 0.0
    tokens: int = 0
    computed: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    pages: int = 0
    peak_running: int = 0
    peak_pages: int = 0
    host_seconds: float = 0.0
    host_to_device_copies: int = 0
    device_operations: int = 0
    most_host_to_device_copies: int = 0
    most_device_operations: int = 0

    def add(self, result: StepResult, host_ns: int, copies: int, operations: int, pages: int) -> None:
        """Counts a step."""
        self.steps += 1
        self.host_seconds += host_ns / 1e9
        self.tokens += result.generated
        self.computed += result.computed
        self.peak_running = max(self.peak_running, result.running)
        self.peak_pages = max(self.peak_pages, pages)
        self.host_to_device_copies += copies
        self.device_operations += operations
        self.most_host_to_device_copies = max(self.most_host_to_device_copies, copies)
        self.most_device_operations = max(self.most_device_operations, operations)


@final
class TrafficRun:
    """One run, step by step; `run_traffic` drives it to the end, and says what the arguments are.

    Attributes:
        engine: the engine, for callers that want to look at its state.
        requests: the requests, in order of arrival.
        totals: where the run is; see `progress`.
    """

    def __init__(
        self,
        workload: Workload,
        runtime: Runtime,
        *,
        settings: EngineSettings | None = None,
        seed: int = 0,
        aborts: float = 0.0,
    ) -> None:
        self.workload = workload
        self.runtime = runtime
        self.settings = settings or EngineSettings()
        self.settings.check_fits(workload)
        self.requests = draw_requests(workload, seed=seed, aborts=aborts)
        self.engine = TrafficEngine(runtime, self.settings, max_tokens_per_request=workload.longest)
        self.totals = TrafficProgress(requests=len(workload))
        self._arrived = 0
        impatient = [request for request in self.requests if request.hangs_up < np.inf]
        self._hang_ups = sorted(impatient, key=lambda request: request.hangs_up, reverse=True)
        self._host_ns: list[int] = []

    def progress(self) -> TrafficProgress:
        """A copy of the totals."""
        engine, totals = self.engine, self.totals
        totals.done = engine.finished + engine.aborted
        totals.running, totals.waiting = len(engine.batch), len(engine.waiting)
        totals.slots, totals.pages = engine.slots.stats.live, engine.pages.stats.live
        return attrs.evolve(totals)

    def step(self) -> bool:
        """Delivers arrivals and hang-ups due by now and runs one step of the engine. False when all is done."""
        engine, totals, counters = self.engine, self.totals, self.runtime.counters
        engine.add(self._arrivals())
        while self._hang_ups and self._hang_ups[-1].hangs_up <= totals.simulated_seconds:
            engine.abort(self._hang_ups.pop())
        copies, operations = counters.host_to_device_copies, counters.device_operations
        begin = time.perf_counter_ns()
        result = engine.step()
        host_ns = time.perf_counter_ns() - begin
        if result is None:
            if self._arrived == len(self.requests):
                return False
            totals.simulated_seconds = self.requests[self._arrived].arrival
            return True
        self._host_ns.append(host_ns)
        copies, operations = counters.host_to_device_copies - copies, counters.device_operations - operations
        totals.add(result, host_ns, copies, operations, engine.pages.stats.live)
        totals.simulated_seconds += self.settings.step_seconds + self.settings.token_seconds * result.computed
        return True

    def _arrivals(self) -> Sequence[Request]:
        first, now = self._arrived, self.totals.simulated_seconds
        while self._arrived < len(self.requests) and self.requests[self._arrived].arrival <= now:
            self._arrived += 1
        return self.requests[first : self._arrived]

    def report(
        self, *, spent: Counters, laws_asked: int, seconds: float, violations: Sequence[Violation]
    ) -> TrafficReport:
        """The figures so far."""
        engine, totals, steps = self.engine, self.totals, max(self.totals.steps, 1)
        median, p99 = np.percentile(self._host_ns or [0], [50, 99]) / 1000
        return TrafficReport(
            workload=self.workload.source,
            device=str(self.runtime.device),
            checks=levels.current_checks().value,
            columns=len(RunningBatch.columns()),
            requests=self._arrived,
            finished=engine.finished,
            aborted=engine.aborted,
            retractions=engine.retractions,
            tokens=totals.tokens,
            tokens_delivered=sum(request.num_generated for request in self.requests),
            prefill_tokens=totals.computed - totals.tokens,
            steps=totals.steps,
            peak_running=totals.peak_running,
            peak_pages=totals.peak_pages,
            pages=self.settings.num_pages,
            simulated_seconds=totals.simulated_seconds,
            seconds=seconds,
            host_us_per_step={"median": round(float(median), 1), "p99": round(float(p99), 1)},
            host_to_device_copies_per_step=spent.host_to_device_copies / steps,
            device_operations_per_step=spent.device_operations / steps,
            most_host_to_device_copies=totals.most_host_to_device_copies,
            most_device_operations=totals.most_device_operations,
            host_to_device_bytes_per_step=spent.host_to_device_bytes / steps,
            forced_syncs=spent.forced_syncs,
            laws_asked=laws_asked,
            violations=len(violations),
            leaks=engine.slots.stats.live + engine.pages.stats.live,
            broken="\n\n".join(map(str, violations)) or None,
        )


def run_traffic(
    workload: Workload,
    *,
    device: str | torch.device | Runtime = "cpu",
    settings: EngineSettings | None = None,
    seed: int = 0,
    aborts: float = 0.0,
    checks: str | levels.Level = levels.Level.CHEAP,
    progress: Callable[[TrafficProgress], None] | None = None,
) -> TrafficReport:
    """Serves every request of a workload and reports what it cost.

    At the end, both pools are counted anew and every slot and page has to be back. A broken invariant ends the run and
    is in the report.

    Args:
        workload: the requests; each has to fit the settings.
        device: a device name, or a runtime.
        settings: sizes and speed of the engine.
        seed: of sampling parameters and impatient clients.
        aborts: share of clients that hang up, 0 to 1.
        checks: level of the checks during the run.
        progress: called every `STEPS_BETWEEN_PROGRESS` steps and at the end.
    """
    runtime = device if isinstance(device, Runtime) else open_runtime(device)
    run = TrafficRun(workload, runtime, settings=settings, seed=seed, aborts=aborts)
    before, asked = runtime.counters.snapshot(), sum(invariants.times_checked.values())
    begin = time.perf_counter()
    violations: list[Violation] = []
    with levels.checks(checks):
        try:
            while run.step():
                if progress is not None and run.totals.steps % STEPS_BETWEEN_PROGRESS == 0:
                    progress(run.progress())
        except Violation as violation:
            violations.append(violation)
        spent = runtime.counters - before
        if not violations:
            violations += _audit(run.engine)
        if progress is not None:
            progress(run.progress())
        return run.report(
            spent=spent,
            laws_asked=sum(invariants.times_checked.values()) - asked,
            seconds=time.perf_counter() - begin,
            violations=violations,
        )


def _audit(engine: TrafficEngine) -> list[Violation]:
    """Recounts both pools, which should be idle."""
    violations = []
    for check in (engine.slots.verify, engine.pages.verify, engine.slots.expect_idle, engine.pages.expect_idle):
        try:
            check()
        except Violation as violation:
            violations.append(violation)
    return violations
