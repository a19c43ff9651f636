"""A continuous-batching engine without a model, driven by the arrivals and lengths of real traffic.

The smallest complete user of the library, and the place to read how an engine uses it: `columns` declares the batch,
`engine` runs a step, `planning` decides. `workload`, `fitted` and `requests` are what comes in, `run` is the clock,
`report` the outcome.
"""

from batchstate.traffic.columns import RunningBatch
from batchstate.traffic.engine import Engine, StepResult
from batchstate.traffic.fitted import fitted_workload
from batchstate.traffic.report import HostTime, TrafficReport
from batchstate.traffic.requests import Request, SamplingParams, draw_requests
from batchstate.traffic.run import Progress, TrafficRun, run_traffic
from batchstate.traffic.settings import EngineSettings
from batchstate.traffic.workload import TraceError, Workload, read_trace

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
