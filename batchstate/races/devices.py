"""Names of devices that a test can run on: those of torch, and the tools that stand in for one."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

from batchstate.runtime import Runtime, open_runtime

RACE = "race"
SIM = "sim"
PROMPT = "prompt"
INTERPRET = "TRITON_INTERPRET"
"""Environment variable by which Triton runs kernels on a CPU; read when it is imported and when one is decorated."""


def is_tool(device: str) -> bool:
    """Whether a name is that of a tool, and not of a device of torch."""
    return device.partition(":")[0] in (RACE, SIM)


def torch_device_of(device: str) -> str:
    """Torch's name of the device that a tool runs on: `cuda` of `race:prompt:cuda`, and `cpu` of every `sim`."""
    tool, _, rest = device.partition(":")
    if tool == SIM:
        return "cpu"
    if tool != RACE:
        return device
    fences, _, inner = rest.partition(":")
    return (inner if fences == PROMPT else rest) or "cpu"


def open_device(device: str = "cpu", *, steps_in_flight: int = 2, seed: int = 0) -> Runtime:
    """The runtime of a device by name.

    Args:
        device: a device of `open_runtime`; `race`, the race detector on a CPU, or `race:cuda` round an accelerator, or
            `race:prompt` and `race:prompt:cuda` where fences are eager; or `sim`, the simulated device, where
            `sim:NAME` names its scheduler.
        steps_in_flight: see `Runtime`.
        seed: of the scheduler.

    Returns:
        a fresh runtime. The tools trace inside a `with` window of it; see `window_of`.

    Raises:
        ArgumentError: no such device, or none here; no such scheduler.
    """
    tool, _, rest = device.partition(":")
    if tool == RACE:
        from batchstate.races import RaceRuntime

        inner = open_runtime(torch_device_of(device), steps_in_flight=steps_in_flight)
        return RaceRuntime(inner, fences="eager" if rest.partition(":")[0] == PROMPT else "lazy")
    if tool == SIM:
        from batchstate.races.sim import SimRuntime

        return SimRuntime(scheduler=rest or "random", seed=seed, steps_in_flight=steps_in_flight)
    return open_runtime(device, steps_in_flight=steps_in_flight)


@contextlib.contextmanager
def window_of(runtime: Runtime) -> Iterator[Runtime]:
    """The window in which a tool traces; it does nothing for any other runtime."""
    if type(runtime).__enter__ is Runtime.__enter__:  # its window ends with a wait for the device
        yield runtime
    else:
        with runtime:
            yield runtime


def interpret_kernels() -> None:
    """Asks Triton for its interpreter, where it is installed and nobody has decided: before it is imported."""
    if importlib.util.find_spec("triton") is not None:
        os.environ.setdefault(INTERPRET, "1")
