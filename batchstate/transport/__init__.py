"""How KV reaches another process: what is to be written, by which worker, and when its memory is free of writers.

`open_engine` brings bytes into another process's memory; `KVLayout`, `Description` and `batchstate.transport.plan` say
which bytes; `Receiver`, `Sender` and `Lease` say who may write, until when, and what has arrived.
"""

from batchstate.transport.engines.base import (
    ENGINES,
    Capabilities,
    Copies,
    Delivery,
    Engine,
    Handle,
    Peer,
    Region,
    RemoteRegion,
    Status,
    open_engine,
)
from batchstate.transport.plan import KVLayout
from batchstate.transport.receiver import Ignored, Lease, LeaseState, Receiver
from batchstate.transport.sender import Sender, Transfer, TransferState
from batchstate.transport.workers import Description, Session

__all__ = [
    "ENGINES",
    "Capabilities",
    "Copies",
    "Delivery",
    "Description",
    "Engine",
    "Handle",
    "Ignored",
    "KVLayout",
    "Lease",
    "LeaseState",
    "Peer",
    "Receiver",
    "Region",
    "RemoteRegion",
    "Sender",
    "Session",
    "Status",
    "Transfer",
    "TransferState",
    "open_engine",
]
