"""How KV reaches another process: what is to be written, by whom, and when its memory is anybody's again.

`open_engine` brings bytes into another process's memory; `KVLayout`, `Description` and `batchstate.transport.plan` say
which bytes; `Receiver`, `Sender` and `Lease` say who may write, until when, and what has arrived.
"""

from batchstate.transport.copies import Copies
from batchstate.transport.engines.base import Capabilities, Delivery, Engine, Handle, Peer, Status
from batchstate.transport.handshake import Description
from batchstate.transport.layout import KVLayout
from batchstate.transport.lease import Lease, LeaseState
from batchstate.transport.opening import ENGINES, open_engine
from batchstate.transport.receiver import Ignored, Receiver
from batchstate.transport.regions import Region, RemoteRegion
from batchstate.transport.sender import Sender
from batchstate.transport.sending import Sending, SendState
from batchstate.transport.session import Session

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
    "SendState",
    "Sender",
    "Sending",
    "Session",
    "Status",
    "open_engine",
]
