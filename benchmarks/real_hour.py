"""The hour of production traffic, served by an engine that lacks only the model, against what is asked of it."""

from batchstate.runtime import Runtime
from batchstate.traffic import Workload, fitted_workload, run_traffic
from benchmarks.comparisons import MismatchError, Row

SECONDS_ASKED = 40.0


def served(runtime: Runtime, hour: Workload | None = None) -> Row:
    """The wall time of one run at `cheap`: of the hour that is given, or else of one drawn like the real one.

    Raises:
        MismatchError: a token was lost or generated twice, something leaked, or an invariant was broken.
    """
    report = run_traffic(fitted_workload() if hour is None else hour, device=str(runtime.device), checks="cheap")
    if not report.clean:
        raise MismatchError(f"the hour of traffic: {report.violations} violations, {report.leaks} leaks")
    took, asked = report.seconds * 1e6, SECONDS_ASKED * 1e6
    drawn = "" if hour else "; drawn like the real hour, which --trace takes"
    return Row(
        task="the real hour of traffic",
        way="checks cheap",
        ours_us=took,
        baseline=f"{SECONDS_ASKED:g} s asked",
        baseline_us=asked,
        ratio=asked / took,
        spread={"ours_us": (took, took), "baseline_us": (asked, asked), "ratio": (asked / took, asked / took)},
        ours_host_us=took,
        baseline_host_us=asked,
        target=1.0,
        note=f"{report.requests:,} requests, {report.tokens:,} tokens, {report.steps:,} steps; run once{drawn}",
    )
