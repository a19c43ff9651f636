"""Engines by name."""

import importlib
from typing import Any

from batchstate.errors import ArgumentError
from batchstate.transport.engines.base import Engine

_HOMES = {
    "nixl": ("batchstate.transport.engines.nixl", "NixlEngine"),
    "distributed": ("batchstate.transport.engines.distributed", "DistributedEngine"),
    "mooncake": ("batchstate.transport.engines.mooncake", "MooncakeEngine"),
}

ENGINES = tuple(_HOMES)
"""Names that `open_engine` knows. The engine of tests, `InProcessEngine`, needs a network and is made by itself."""


def open_engine(name: str = "nixl", **options: Any) -> Engine:
    """The engine of this name; what it needs besides the library is imported now.

    Args:
        name: `nixl`, `distributed` or `mooncake`.
        options: of its class.

    Raises:
        ArgumentError: no such engine.
        TransferError: it is not installed here, or cannot be started; the message says what to install.
    """
    if name not in _HOMES:
        raise ArgumentError(f"no engine is called {name!r}", value=name, remedy=f"use one of {', '.join(ENGINES)}")
    module, kind = _HOMES[name]
    engine: Engine = getattr(importlib.import_module(module), kind)(**options)
    return engine
