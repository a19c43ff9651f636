"""A continuous-batching engine without a model, driven by the arrivals and lengths of real traffic.

The smallest complete user of the library, and the place to read how an engine uses it: `engine` declares the batch and
runs a step, `scheduler` decides who is in it. `workload` is what comes in, `run` the clock and the report.
"""

from batchstate.traffic.engine import (
    Engine,
    EngineSettings,
    Request,
    RunningBatch,
    SamplingParams,
    StepResult,
    draw_requests,
)
from batchstate.traffic.run import HostTime, Progress, TrafficReport, TrafficRun, run_traffic
from batchstate.traffic.workload import TraceError, Workload, fitted_workload, read_trace

__all__ = [
    "Engine",
    "EngineSettings",
    "HostTime",
    "Progress",
    "Request",
    "RunningBatch",
    "SamplingParams",
    "StepResult",
    "TraceError",
    "TrafficReport",
    "TrafficRun",
    "Workload",
    "draw_requests",
    "fitted_workload",
    "read_trace",
    "run_traffic",
]
