"""For tests of engines: strategies, state machines, fences completed by hand, and guards.

Begin with `twin_machine` to fuzz a batch class of your own, with `RaceRuntime` to find races between streams, with
`no_hidden_sync` to guard a step loop, and with `ManualFence` where a test has to say when a step ends, or with
`LateRuntime` where it has to say so of every fence. Runtimes, fences and the guard need nothing else; all other names
need hypothesis (extra `testing`) and are imported when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchstate.testing.devices import open_device, window_of
    from batchstate.testing.fences import LateRuntime, ManualFence, ManualStream
    from batchstate.testing.machine import DisagreementError, Machine, Misuse, OpenRuntime, Session, session
    from batchstate.testing.models import AllocatorModel, Modelled
    from batchstate.testing.race import Race, RaceFence, RaceKind, RaceReport, RaceRuntime
    from batchstate.testing.runner import MachineResult, run_machine
    from batchstate.testing.sim import DeviceFault, SimRuntime
    from batchstate.testing.strategies import (
        amounts,
        column_values,
        contracts,
        dtypes,
        keep_lists,
        mirrored_tensors,
        row_lists,
        row_shapes,
        split_sizes,
    )
    from batchstate.testing.sync_guard import no_hidden_sync
    from batchstate.testing.tracing.dispatch import raw_kernel
    from batchstate.testing.tracing.runtime import DeviceEvent
    from batchstate.testing.twins import Twin, TwinSpec, fuzz_twins, twin_machine

__all__ = [
    "AllocatorModel",
    "DeviceEvent",
    "DeviceFault",
    "DisagreementError",
    "LateRuntime",
    "Machine",
    "MachineResult",
    "ManualFence",
    "ManualStream",
    "Misuse",
    "Modelled",
    "OpenRuntime",
    "Race",
    "RaceFence",
    "RaceKind",
    "RaceReport",
    "RaceRuntime",
    "Session",
    "SimRuntime",
    "Twin",
    "TwinSpec",
    "amounts",
    "column_values",
    "contracts",
    "dtypes",
    "fuzz_twins",
    "keep_lists",
    "mirrored_tensors",
    "no_hidden_sync",
    "open_device",
    "raw_kernel",
    "row_lists",
    "row_shapes",
    "run_machine",
    "session",
    "split_sizes",
    "twin_machine",
    "window_of",
]

# Imported when first used, so that what needs no hypothesis works without it. No module here may have the name of
# something public: importing the module would hide it.
_HOMES = {
    "DeviceEvent": "tracing.runtime",
    "DeviceFault": "sim",
    "DisagreementError": "machine",
    "LateRuntime": "fences",
    "AllocatorModel": "models",
    "Machine": "machine",
    "MachineResult": "runner",
    "ManualFence": "fences",
    "ManualStream": "fences",
    "Misuse": "machine",
    "Modelled": "models",
    "OpenRuntime": "machine",
    "Race": "race",
    "RaceFence": "race",
    "RaceKind": "race",
    "RaceReport": "race",
    "RaceRuntime": "race",
    "Session": "machine",
    "SimRuntime": "sim",
    "Twin": "twins",
    "TwinSpec": "twins",
    "amounts": "strategies",
    "column_values": "strategies",
    "contracts": "strategies",
    "dtypes": "strategies",
    "fuzz_twins": "twins",
    "keep_lists": "strategies",
    "mirrored_tensors": "strategies",
    "no_hidden_sync": "sync_guard",
    "open_device": "devices",
    "raw_kernel": "tracing.dispatch",
    "row_lists": "strategies",
    "row_shapes": "strategies",
    "run_machine": "runner",
    "session": "machine",
    "split_sizes": "strategies",
    "twin_machine": "twins",
    "window_of": "devices",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs hypothesis: pip install 'batchstate[testing]'", name="hypothesis"
        ) from None
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
