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
@attrs.frozen
class HostTime:
    """Host time of a step, in microseconds: planning, batch operations, pools and upload.

    Attributes:
        median: half of the steps take less.
        p99: 99 of 100 steps take less.
    """

    median: float
    p99: float


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
        finished: requests that got their whole answer.
        aborted: requests whose client hung up first.
        retractions: times a request had to give back its pages, to be prefilled again later.
        tokens: tokens generated, counted step by step.
        tokens_delivered: tokens that the requests have got; the same, if none was generated twice or lost.
        prefill_tokens: tokens whose KV was computed without generating one, retracted requests' again.
        steps: steps of the engine.
        peak_running: most requests in the batch at once.
        peak_pages: most pages owned at once.
        pages: pages of the pool.
        simulated_seconds: what the clock of the simulation says at the end.
        seconds: what it took.
        host_us_per_step: host time of a step.
        host_to_device_copies_per_step: mean.
        device_operations_per_step: mean.
        most_host_to_device_copies: of any one step.
        most_device_operations: of any one step.
        host_to_device_bytes_per_step: mean.
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
    host_us_per_step: HostTime
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
@attrs.frozen
class TrafficProgress:
    """Where a run is.

    Attributes:
        done: requests that finished or were aborted.
        requests: requests of the workload.
        running: requests in the batch.
        waiting: requests that have arrived and wait.
        tokens: tokens generated.
        steps: steps launched.
        simulated_seconds: the clock.
        slots: slots that have an owner.
        pages: pages that have an owner.
        host_to_device_copies: since the run began.
        device_operations: since the run began.
        host_seconds: host time of all steps.
    """

    done: int
    requests: int
    running: int
    waiting: int
    tokens: int
    steps: int
    simulated_seconds: float
    slots: int
    pages: int
    host_to_device_copies: int
    device_operations: int
    host_seconds: float


@final
@attrs.define
class _Measured:
    """Totals over the steps."""

    host_ns: list[int] = attrs.field(factory=list)
    tokens: int = 0
    computed: int = 0
    peak_running: int = 0
    peak_pages: int = 0
    most_copies: int = 0
    most_operations: int = 0
    total_ns: int = 0
    copies: int = 0
    operations: int = 0

    def add(self, result: StepResult, host_ns: int, copies: int, operations: int, pages: int) -> None:
        self.host_ns.append(host_ns)
        self.total_ns += host_ns
        self.tokens += result.generated
        self.computed += result.computed
        self.peak_running = max(self.peak_running, result.running)
        self.peak_pages = max(self.peak_pages, pages)
        self.copies += copies
        self.operations += operations
        self.most_copies = max(self.most_copies, copies)
        self.most_operations = max(self.most_operations, operations)


@final
class TrafficRun:
    """One run, step by step; `run_traffic` drives it to the end.

    Args:
        workload: the requests.
        runtime: the device.
        settings: sizes and speed of the engine.
        seed: of sampling parameters and impatient clients.
        aborts: share of clients that hang up, see `draw_requests`.

    Attributes:
        engine: the engine, for callers that want to look at its state.
        clock: simulated seconds.
        requests: the requests, in order of arrival.
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
        self.clock = 0.0
        self._arrived = 0
        self._hang_ups = sorted((one for one in self.requests if one.hangs_up < np.inf), key=_hangs_up, reverse=True)
        self._measured = _Measured()

    @property
    def steps(self) -> int:
        """Steps launched."""
        return len(self._measured.host_ns)

    @property
    def progress(self) -> TrafficProgress:
        """Where the run is."""
        engine, measured = self.engine, self._measured
        return TrafficProgress(
            done=engine.finished + engine.aborted,
            requests=len(self.requests),
            running=len(engine.batch),
            waiting=len(engine.waiting),
            tokens=measured.tokens,
            steps=self.steps,
            simulated_seconds=self.clock,
            slots=engine.slots.stats.live,
            pages=engine.pages.stats.live,
            host_to_device_copies=measured.copies,
            device_operations=measured.operations,
            host_seconds=measured.total_ns / 1e9,
        )

    def step(self) -> bool:
        """Delivers what has happened by now and runs one step of the engine. False when all is done."""
        engine, measured, counters = self.engine, self._measured, self.runtime.counters
        engine.add(self._arrivals())
        while self._hang_ups and self._hang_ups[-1].hangs_up <= self.clock:
            engine.abort(self._hang_ups.pop())
        copies, operations = counters.host_to_device_copies, counters.device_operations
        begin = time.perf_counter_ns()
        result = engine.step()
        host_ns = time.perf_counter_ns() - begin
        if result is None:
            if self._arrived == len(self.requests):
                return False
            self.clock = self.requests[self._arrived].arrival
            return True
        measured.add(
            result,
            host_ns,
            counters.host_to_device_copies - copies,
            counters.device_operations - operations,
            engine.pages.stats.live,
        )
        self.clock += self.settings.step_seconds + self.settings.token_seconds * result.computed
        return True

    def _arrivals(self) -> Sequence[Request]:
        first = self._arrived
        while self._arrived < len(self.requests) and self.requests[self._arrived].arrival <= self.clock:
            self._arrived += 1
        return self.requests[first : self._arrived]

    def report(
        self, *, spent: Counters, laws_asked: int, seconds: float, violations: Sequence[Violation]
    ) -> TrafficReport:
        """The figures so far."""
        engine, measured = self.engine, self._measured
        steps = len(measured.host_ns)
        median, p99 = np.percentile(measured.host_ns, [50, 99]) / 1000 if steps else (0.0, 0.0)
        return TrafficReport(
            workload=self.workload.source,
            device=str(self.runtime.device),
            checks=levels.current_checks().value,
            columns=len(RunningBatch.columns()),
            requests=self._arrived,
            finished=engine.finished,
            aborted=engine.aborted,
            retractions=engine.retractions,
            tokens=measured.tokens,
            tokens_delivered=sum(request.num_generated for request in self.requests),
            prefill_tokens=measured.computed - measured.tokens,
            steps=steps,
            peak_running=measured.peak_running,
            peak_pages=measured.peak_pages,
            pages=self.settings.num_pages,
            simulated_seconds=self.clock,
            seconds=seconds,
            host_us_per_step=HostTime(round(float(median), 1), round(float(p99), 1)),
            host_to_device_copies_per_step=spent.host_to_device_copies / max(steps, 1),
            device_operations_per_step=spent.device_operations / max(steps, 1),
            most_host_to_device_copies=measured.most_copies,
            most_device_operations=measured.most_operations,
            host_to_device_bytes_per_step=spent.host_to_device_bytes / max(steps, 1),
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
        workload: the requests.
        device: a device name, or a runtime.
        settings: sizes and speed of the engine.
        seed: of sampling parameters and impatient clients.
        aborts: share of clients that hang up, 0 to 1.
        checks: level of the checks during the run.
        progress: called every `STEPS_BETWEEN_PROGRESS` steps and at the end.

    Raises:
        ArgumentError: the workload does not fit the settings, or an argument out of range.
    """
    runtime = device if isinstance(device, Runtime) else open_runtime(device)
    run = TrafficRun(workload, runtime, settings=settings, seed=seed, aborts=aborts)
    before, asked = runtime.counters.snapshot(), sum(invariants.times_checked.values())
    begin = time.perf_counter()
    violations: list[Violation] = []
    with levels.checks(checks):
        try:
            while run.step():
                if progress is not None and run.steps % STEPS_BETWEEN_PROGRESS == 0:
                    progress(run.progress)
        except Violation as violation:
            violations.append(violation)
        spent = runtime.counters.snapshot() - before
        if not violations:
            violations += _audit(run.engine)
        if progress is not None:
            progress(run.progress)
        return run.report(
            spent=spent,
            laws_asked=sum(invariants.times_checked.values()) - asked,
            seconds=time.perf_counter() - begin,
            violations=violations,
        )


def _audit(engine: TrafficEngine) -> list[Violation]:
    """Recounts both pools, which should be idle."""
    found = []
    for check in (engine.slots.verify, engine.pages.verify, engine.slots.expect_idle, engine.pages.expect_idle):
        try:
            check()
        except Violation as violation:
            found.append(violation)
    return found


def _hangs_up(request: Request) -> float:
    return request.hangs_up
