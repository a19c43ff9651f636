"""A continuous-batching engine without a model, driven by the arrivals and lengths of real traffic.

The smallest complete user of the library, and the place to read how an engine uses it: `engine` declares the batch and
runs a step, `scheduler` decides who is in it. `workload` is what comes in, `run` the clock and the report.
"""

from examples.traffic.engine import EngineSettings, RunningBatch, TrafficEngine, draw_requests
from examples.traffic.run import TrafficProgress, TrafficReport, TrafficRun, run_traffic
from examples.traffic.workload import Workload, fitted_workload, read_trace

__all__ = [
    "EngineSettings",
    "RunningBatch",
    "TrafficEngine",
    "TrafficProgress",
    "TrafficReport",
    "TrafficRun",
    "Workload",
    "draw_requests",
    "fitted_workload",
    "read_trace",
    "run_traffic",
]
