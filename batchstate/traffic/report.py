"""What a run of traffic did and what it cost."""

from typing import Any, final

import attrs


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
