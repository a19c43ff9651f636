"""Mirrored batch state for LLM inference engines: two sides that agree, slots with owners, checked invariants.

The names below are what an engine needs to keep its state here. `batchstate.watch` checks classes that an engine has,
`batchstate.races` its streams, `batchstate.testing` fuzzes it, and `batchstate.transport` moves KV to other processes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchstate import races as races
    from batchstate import testing as testing
    from batchstate import transport as transport
    from batchstate import watch as watch
    from batchstate._core import compiled as compiled
    from batchstate._planned_step import PlannedStep as PlannedStep
    from batchstate._version import __version__ as __version__
    from batchstate.batch import Batch as Batch
    from batchstate.columns import device_only as device_only
    from batchstate.columns import host_list as host_list
    from batchstate.columns import mirrored as mirrored
    from batchstate.columns import slot_column as slot_column
    from batchstate.errors import ArgumentError as ArgumentError
    from batchstate.errors import BatchStateError as BatchStateError
    from batchstate.errors import CaptureError as CaptureError
    from batchstate.errors import ContractError as ContractError
    from batchstate.errors import DeclarationError as DeclarationError
    from batchstate.errors import DeviceError as DeviceError
    from batchstate.errors import DtypeError as DtypeError
    from batchstate.errors import HandshakeError as HandshakeError
    from batchstate.errors import OwnerThreadError as OwnerThreadError
    from batchstate.errors import PoolBrokenError as PoolBrokenError
    from batchstate.errors import PoolExhaustedError as PoolExhaustedError
    from batchstate.errors import RecordingError as RecordingError
    from batchstate.errors import RowIndexError as RowIndexError
    from batchstate.errors import ShapeError as ShapeError
    from batchstate.errors import SideMissingError as SideMissingError
    from batchstate.errors import TransferError as TransferError
    from batchstate.errors import ValueOverflowError as ValueOverflowError
    from batchstate.forward.inputs import ForwardInputs as ForwardInputs
    from batchstate.forward.plan import ForwardPlan as ForwardPlan
    from batchstate.forward.token_array import TokenArray as TokenArray
    from batchstate.future_map import FutureMap as FutureMap
    from batchstate.future_map import relay_field as relay_field
    from batchstate.hybrid import HybridSlotPool as HybridSlotPool
    from batchstate.kv.hisparse import HiSparse as HiSparse
    from batchstate.kv.host_pool import HostKVPool as HostKVPool
    from batchstate.kv.pages import PagePool as PagePool
    from batchstate.kv.prefix_cache import PrefixCache as PrefixCache
    from batchstate.levels import Level as Level
    from batchstate.levels import checks as checks
    from batchstate.levels import set_checks as set_checks
    from batchstate.mirror import Contract as Contract
    from batchstate.mirror import HostLocations as HostLocations
    from batchstate.mirror import Locations as Locations
    from batchstate.mirror import MirroredTensor as MirroredTensor
    from batchstate.mirror import Pages as Pages
    from batchstate.mirror import Slots as Slots
    from batchstate.mirror import StateRow as StateRow
    from batchstate.nvtx import set_nvtx as set_nvtx
    from batchstate.pools import SlotPool as SlotPool
    from batchstate.runtime import Runtime as Runtime
    from batchstate.runtime import open_runtime as open_runtime
    from batchstate.static import StaticBuffers as StaticBuffers
    from batchstate.step import StepPlanner as StepPlanner
    from batchstate.tables import Table as Table
    from batchstate.violations import Code as Code
    from batchstate.violations import Violation as Violation
else:
    import os
    import sys

    from batchstate._lazy import lazy_names

    if "BATCHSTATE_COMPILED" in os.environ:  # see there: it decides which core is imported
        from batchstate._interpreted import Finder

        sys.meta_path.insert(0, Finder)

    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "_core": "compiled",
            "_planned_step": "PlannedStep",
            "_version": "__version__",
            "batch": "Batch",
            "columns": "device_only host_list mirrored slot_column",
            "errors": "ArgumentError BatchStateError CaptureError ContractError DeclarationError DeviceError "
            "DtypeError HandshakeError OwnerThreadError PoolBrokenError PoolExhaustedError RecordingError "
            "RowIndexError ShapeError SideMissingError TransferError ValueOverflowError",
            "forward.inputs": "ForwardInputs",
            "forward.plan": "ForwardPlan",
            "forward.token_array": "TokenArray",
            "future_map": "FutureMap relay_field",
            "hybrid": "HybridSlotPool",
            "kv.hisparse": "HiSparse",
            "kv.host_pool": "HostKVPool",
            "kv.pages": "PagePool",
            "kv.prefix_cache": "PrefixCache",
            "levels": "Level checks set_checks",
            "mirror": "Contract HostLocations Locations MirroredTensor Pages Slots StateRow",
            "nvtx": "set_nvtx",
            "pools": "SlotPool",
            "runtime": "Runtime open_runtime",
            "static": "StaticBuffers",
            "step": "StepPlanner",
            "tables": "Table",
            "violations": "Code Violation",
        },
        modules="races testing transport watch",
    )
