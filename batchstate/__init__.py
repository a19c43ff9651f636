"""Mirrored batch state for LLM inference engines: host and device sides that agree, slots with owners, checked laws.

The names below are the whole public surface for an engine; `batchstate.testing` is the surface for its tests.
"""

from batchstate.contracts import Contract
from batchstate.errors import BatchStateError
from batchstate.indices import HostTokens, Pages, Slots, Tokens
from batchstate.invariants import Code, Level, Violation, checks, set_checks
from batchstate.mirror import MirroredTensor
from batchstate.runtime import Runtime, open_runtime

__all__ = [
    "BatchStateError",
    "Code",
    "Contract",
    "HostTokens",
    "Level",
    "MirroredTensor",
    "Pages",
    "Runtime",
    "Slots",
    "Tokens",
    "Violation",
    "checks",
    "open_runtime",
    "set_checks",
]
