"""The second process of the transfer benchmarks: it receives, and has ended when the block of `receiver` is left."""

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np
import torch

from batchstate.errors import TransferError
from batchstate.transport.engines.base import Engine, Ints
from batchstate.transport.engines.mooncake import MooncakeEngine
from batchstate.transport.engines.nixl import NixlEngine
from batchstate.transport.engines.tcp import TcpEngine
from benchmarks.baselines.bare_engines import Bare, BareGloo, BareMooncake, BareNixl, Bytes

ANSWERS_IN_S = 120.0

_context = multiprocessing.get_context("forkserver")  # as clean as a spawned process; torch is imported only once
_context.set_forkserver_preload([__name__])

ENGINES: dict[str, tuple[Callable[[], Engine], type[Bare]]] = {
    "nixl": (NixlEngine, BareNixl),
    "tcp": (TcpEngine, BareGloo),
    "mooncake": (functools.partial(MooncakeEngine, trusted_network=True), BareMooncake),
}
"""Our engine and the bare one, by transport."""


@final
class Receiver:
    """The second process. It turns the engines while it is asked nothing.

    Args:
        transport: a key of `ENGINES`.
        nbytes: of the memory that is written to.
    """

    def __init__(self, transport: str, nbytes: int) -> None:
        torch.set_num_threads(1)
        ours, bare = ENGINES[transport]
        self._memory = np.full(nbytes, 0xEE, dtype=np.uint8)
        self._engine, self._bare = ours(), bare(self._memory)
        self._engine.register(self._memory, "rows")

    def endpoints(self) -> tuple[bytes, Any]:
        """The address of our engine, and that of the bare one."""
        return self._engine.endpoint(), self._bare.endpoint()

    def fill(self, value: int) -> None:
        """Sets every byte."""
        self._memory[:] = value

    def digest(self, nbytes: int | None = None) -> bytes:
        """A digest of every byte, or of the first."""
        return digest(self._memory[:nbytes])

    def copy_rows(self, first: int, targets: Ints, nbytes: int) -> int:
        """Copies rows of so many bytes, which lie one behind the other from row `first` on; how many bytes."""
        rows = self._memory[: self._memory.size // nbytes * nbytes].reshape(-1, nbytes)
        rows[targets] = rows[first : first + targets.size]
        return int(targets.size) * nbytes

    def idle(self) -> None:
        """Lets the engines get on."""
        self._engine.completions()
        self._bare.idle()


def digest(memory: Bytes) -> bytes:
    """A digest of every byte."""
    return blake2b(memory.data).digest()


def _serve(pipe: Connection, transport: str, nbytes: int) -> None:
    try:
        receiver = Receiver(transport, nbytes)
    except TransferError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    with contextlib.suppress(EOFError, ConnectionError):  # the asking process has ended
        while True:
            while not pipe.poll(0.001):
                receiver.idle()
            method, args = pipe.recv()
            pipe.send(getattr(receiver, method)(*args))


@contextlib.contextmanager
def receiver(transport: str, nbytes: int) -> Iterator[Callable[..., Any]]:
    """A receiver in a process of its own, which has ended when the block is left.

    Yields:
        a function: name of a method of `Receiver`, and arguments.

    Raises:
        TransferError: an engine cannot be opened there, or the process does not answer.
    """
    pipe, theirs = _context.Pipe()
    process = _context.Process(target=_serve, args=(theirs, transport, nbytes), daemon=True)
    process.start()
    theirs.close()

    def answer() -> Any:
        try:
            if pipe.poll(ANSWERS_IN_S):
                return pipe.recv()
        except (EOFError, ConnectionError):
            pass
        raise TransferError("the receiving process does not answer", value=process.pid, remedy="read what it printed")

    def call(method: str, *args: object) -> Any:
        pipe.send((method, args))
        return answer()

    try:
        refused = answer()
        if refused is not None:
            raise TransferError(refused, value=transport, remedy="open it in one process first")
        yield call
    finally:
        process.kill()
        process.join()
        pipe.close()
