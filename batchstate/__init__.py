"""Mirrored batch state for LLM inference engines: two sides that agree, slots with owners, checked invariants.

The names below are the whole public surface for an engine; `batchstate.testing` is the surface for its tests.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from batchstate.batch import Batch
    from batchstate.columns import device_only, host_list, mirrored, slot_column
    from batchstate.errors import BatchStateError, PoolExhaustedError
    from batchstate.forward.inputs import ForwardInputs
    from batchstate.forward.plan import ForwardPlan
    from batchstate.future_map import FutureMap, relay_field
    from batchstate.hybrid import HybridSlotPool
    from batchstate.indices import HostLocations, Locations, Pages, Slots
    from batchstate.kv.hisparse import HiSparse
    from batchstate.kv.host_pool import HostKVPool
    from batchstate.kv.pages import PagePool
    from batchstate.levels import Level, checks, set_checks
    from batchstate.mirror import Contract, MirroredTensor
    from batchstate.pools import SlotPool
    from batchstate.runtime import Runtime, open_runtime
    from batchstate.static import StaticBuffers
    from batchstate.tables import Table
    from batchstate.violations import Code, Violation

__all__ = [
    "Batch",
    "BatchStateError",
    "Code",
    "Contract",
    "ForwardInputs",
    "ForwardPlan",
    "FutureMap",
    "HiSparse",
    "HostKVPool",
    "HostLocations",
    "HybridSlotPool",
    "Level",
    "Locations",
    "MirroredTensor",
    "PagePool",
    "Pages",
    "PoolExhaustedError",
    "Runtime",
    "SlotPool",
    "Slots",
    "StaticBuffers",
    "Table",
    "Violation",
    "checks",
    "device_only",
    "host_list",
    "mirrored",
    "open_runtime",
    "relay_field",
    "set_checks",
    "slot_column",
]

# Imported when first used: `batchstate --help` and the pytest plugin import this package and must not import torch.
_HOMES = {
    "Batch": "batchstate.batch",
    "BatchStateError": "batchstate.errors",
    "Code": "batchstate.violations",
    "Contract": "batchstate.mirror",
    "ForwardInputs": "batchstate.forward.inputs",
    "ForwardPlan": "batchstate.forward.plan",
    "FutureMap": "batchstate.future_map",
    "HiSparse": "batchstate.kv.hisparse",
    "HostKVPool": "batchstate.kv.host_pool",
    "HostLocations": "batchstate.indices",
    "HybridSlotPool": "batchstate.hybrid",
    "Level": "batchstate.levels",
    "MirroredTensor": "batchstate.mirror",
    "PagePool": "batchstate.kv.pages",
    "Pages": "batchstate.indices",
    "PoolExhaustedError": "batchstate.errors",
    "Runtime": "batchstate.runtime",
    "SlotPool": "batchstate.pools",
    "Slots": "batchstate.indices",
    "StaticBuffers": "batchstate.static",
    "Table": "batchstate.tables",
    "Locations": "batchstate.indices",
    "Violation": "batchstate.violations",
    "checks": "batchstate.levels",
    "device_only": "batchstate.columns",
    "host_list": "batchstate.columns",
    "mirrored": "batchstate.columns",
    "open_runtime": "batchstate.runtime",
    "relay_field": "batchstate.future_map",
    "set_checks": "batchstate.levels",
    "slot_column": "batchstate.columns",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    importlib.import_module("batchstate.levels")  # first of all: it refuses a wrong level in the environment
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("batchstate")
    except metadata.PackageNotFoundError:
        return "unknown (a checkout that is not installed)"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
