"""Two processes joined by torch.distributed without its global group: how they meet and part.

Each engine hosts a store. In that of the reader the two form a group, for this one direction. Headers and
answers travel over gloo; rows too, or over NCCL where staging lies on a GPU.

Guarantees: everything listens on the one address it was given. `join` ends within its time. `part` ends every wait
of the pair, in any thread: at once, or, for a message that is half there, after `stall`.
"""

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self, final

import attrs
import torch
import torch.distributed

from batchstate.transport.engines.paired.reception import Address

dist: Any = torch.distributed  # its own annotations leave most of what is used here out

Store = Any
"""Of torch: `TCPStore`, or a part of one."""

EVER = timedelta(days=365)
"""A wait that only an end of the pair ends: a time-out would close the pair, for good."""

WRITER, READER = 0, 1
_UNUSED = 99


def host_store(host: str, timeout: float) -> Store:
    """The store of an engine, listening on one address only, at any port.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = socket.create_server((host, 0))
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host, bound, is_master=True, timeout=_span(timeout), wait_for_workers=False, master_listen_fd=listener.detach()
    )


def client(address: Address, timeout: float) -> Store:
    """A connection to a store. Each thread has its own: a wait on one blocks all use of it.

    Raises:
        RuntimeError: no store answers there in time.
    """
    return dist.TCPStore(*address, is_master=False, timeout=_span(timeout), wait_for_workers=False)


def private(store: Store, name: str) -> Store:
    """The part of a store that belongs to one pair."""
    return dist.PrefixStore(name, store)


@final
@attrs.frozen(eq=False)
class Pair:
    """A group of two processes. Made by `join`.

    Attributes:
        control: for headers and answers, so small that they arrive whole or not at all.
        data: for rows.
        device: on which rows are staged.
        other: the rank of the other side.
        stall: how long a message that was begun may take to arrive.
    """

    control: Any
    data: Any
    device: torch.device
    other: int
    stall: timedelta

    @classmethod
    def join(cls, store: Store, rank: int, host: str, device: torch.device, timeout: float, stall: float) -> Self:
        """Meets the other side in a store that nobody else uses.

        Raises:
            RuntimeError: the other side did not come in time.
        """
        options: Any = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _span(timeout)
        options._threads = 1
        control = dist.ProcessGroupGloo(private(store, "control"), rank, 2, options)
        if device.type == "cpu":
            data: Any = dist.ProcessGroupGloo(private(store, "data"), rank, 2, options)
        else:
            data = dist.ProcessGroupNCCL(private(store, "data"), rank, 2, dist.ProcessGroupNCCL.Options())
        return cls(control, data, device, 1 - rank, _span(stall))

    def send(self, message: torch.Tensor) -> None:
        """Sends a small message, and waits. RuntimeError: the pair is broken."""
        self.begin(message)()

    def begin(self, message: torch.Tensor) -> Callable[[], object]:
        """Begins to send a small message; returns what waits for the end."""
        work = self.control.send([message], self.other, 0)
        return lambda: work.wait(EVER)

    def receive(self, message: torch.Tensor) -> torch.Tensor:
        """Receives a small message of just that size, and waits for it. RuntimeError: the pair is broken."""
        self.control.recv([message], self.other, 0).wait(EVER)
        return message

    def send_rows(self, piece: torch.Tensor) -> Callable[[], object]:
        """Begins to send; returns what waits for the end, to be called when the receiver has said that it is there."""
        # gloo does not wake who waits for a message of which a part is there when the pair ends, on neither side: these
        # two waits need an end of their own. A small message is no such case.
        work = self.data.send([piece], self.other, 1)
        return lambda: work.wait(self.stall)

    def receive_rows(self, piece: torch.Tensor) -> Callable[[], object]:
        """Begins to receive; returns what waits for the end, to be called when the sender has begun."""
        work = self.data.recv([piece], self.other, 1)
        return lambda: work.wait(self.stall)

    def part(self) -> None:
        """Ends the pair: whoever waits on it, here or on the other side, gets a RuntimeError."""
        # A receive that is given up closes a gloo pair: the one way in the interface of torch to end other waits.
        for group in (self.control, self.data):
            if isinstance(group, dist.ProcessGroupGloo):
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], self.other, _UNUSED).wait(timedelta(milliseconds=1))
            else:
                group.abort()


def said(error: Exception) -> str:
    """The first line of an error of torch, without its place in the source."""
    line = str(error).partition("\n")[0]
    return line.rpartition("] ")[2] if line.startswith("[") else line


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
