"""Bare engines, moving rows as one writes it by hand: what the transfer benchmarks measure against.

Each has two sides of one class, over one piece of memory. The sending side's `movers` prepare what does not change; the
functions that they return move the rows and return when they have landed.
"""

import importlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, final
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from batchstate.errors import TransferError
from batchstate.transport.engines.base import Ints

Bytes = npt.NDArray[np.uint8]
Move = Callable[[], object]

LOOKS_EVERY_S = 50e-6
"""Between two looks whether a transfer has ended. Who spins instead takes a core from the threads that move it."""
ENDS_IN_S = 60.0
MOONCAKE_ROWS = 1024
"""Most rows of a Mooncake batch: with more it fails while rows still land."""

dist: Any = torch.distributed


def wait_until(ended: Callable[[], bool]) -> None:
    """Looks again and again.

    Raises:
        TransferError: a minute is over.
    """
    give_up = time.monotonic() + ENDS_IN_S
    while not ended():
        if time.monotonic() > give_up:
            raise TransferError(f"no end within {ENDS_IN_S:g} s", value=ENDS_IN_S, remedy="see whether the peer runs")
        time.sleep(LOOKS_EVERY_S)


class Bare(Protocol):
    """An engine without this library, on either side."""

    name: str

    def __init__(self, memory: Bytes) -> None: ...

    def endpoint(self) -> Any:
        """The address for the sending side."""

    def connect(self, endpoint: Any) -> None:
        """On the sending side, once."""

    def movers(self, sources: Ints, targets: Ints, nbytes: int) -> dict[str, Move]:
        """Ways to move rows of so many bytes, by name. Offsets into the memories int64[n]."""

    def idle(self) -> None:
        """On the receiving side, about each millisecond."""

    def close(self) -> None:
        """Lets everything go."""


@final
class BareNixl(Bare):
    """NIXL by its bindings, with the settings that `NixlEngine` has by default: shared memory, and no thread."""

    name = "bare NIXL"

    def __init__(self, memory: Bytes) -> None:
        self._nixl: Any = importlib.import_module("nixl")._bindings
        settings = {
            "UCX_TLS": "cma,posix" + (",cuda" if torch.version.cuda else ""),
            "UCX_MODULES": "^ib",
            "UCX_LOG_LEVEL": "FATAL",
            "NIXL_LOG_LEVEL": "ERROR",
        }
        with mock.patch.dict(os.environ, settings | dict(os.environ)):
            config = self._nixl.nixlAgentConfig()
            config.useProgThread, config.useListenThread = False, False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            self._agent: Any = self._nixl.nixlAgent(secrets.token_hex(8), config)
            self._backends = [self._agent.createBackend("UCX", {"ucx_error_handling_mode": "none"})]
        self._memory = memory
        region = [(memory.ctypes.data, memory.nbytes, 0, "")]
        self._registered = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, region)
        self._agent.registerMem(self._registered, self._backends)
        self._peer, self._there = "", 0

    def endpoint(self) -> Any:
        return self._agent.getLocalMD(), self._memory.ctypes.data

    def connect(self, endpoint: Any) -> None:
        agent, self._there = endpoint
        name = self._agent.loadRemoteMD(agent)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def movers(self, sources: Ints, targets: Ints, nbytes: int) -> dict[str, Move]:
        here, there = self._rows(sources + self._memory.ctypes.data, nbytes), self._rows(targets + self._there, nbytes)
        prepared = self._request(here, there)

        def anew() -> None:
            request = self._request(here, there)
            self._move(request)
            self._agent.releaseXferReq(request)

        return {self.name: anew, f"{self.name}, prepared once": lambda: self._move(prepared)}

    def _rows(self, addresses: Ints, nbytes: int) -> npt.NDArray[np.uint64]:
        rows = np.zeros((addresses.size, 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = addresses, nbytes
        return rows

    def _request(self, here: npt.NDArray[np.uint64], there: npt.NDArray[np.uint64]) -> int:
        nixl = self._nixl
        ours, theirs = nixl.nixlXferDList(nixl.DRAM_SEG, here), nixl.nixlXferDList(nixl.DRAM_SEG, there)
        return int(self._agent.createXferReq(nixl.NIXL_WRITE, ours, theirs, self._peer, b"moved", self._backends))

    def _move(self, request: int) -> None:
        self._agent.postXferReq(request, b"moved")
        wait_until(lambda: bool(self._agent.getXferStatus(request) == self._nixl.NIXL_SUCCESS))

    def idle(self) -> None:
        self._agent.getNotifs({}, self._backends)

    def close(self) -> None:
        if self._peer:
            self._agent.invalidateRemoteMD(self._peer)
        self._agent.deregisterMem(self._registered, self._backends)
        self._agent = None


@final
class BareGloo(Bare):
    """Pack, send, receive, scatter, answer: by torch.distributed's public functions."""

    name = "bare gloo"

    def __init__(self, memory: Bytes) -> None:
        self._memory = torch.from_numpy(memory)
        self._store: Any = None

    def endpoint(self) -> Any:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threading.Thread(target=self._receive, daemon=True).start()
        return self._store.port

    def connect(self, endpoint: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", endpoint, is_master=False)
        self._join(0)

    def _join(self, rank: int) -> None:
        with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)):
            dist.init_process_group("gloo", store=self._store, rank=rank, world_size=2)

    def movers(self, sources: Ints, targets: Ints, nbytes: int) -> dict[str, Move]:
        places, goals = torch.from_numpy(sources // nbytes), torch.from_numpy(targets // nbytes)
        rows = _matrix(self._memory, nbytes)
        packed = torch.empty((places.numel(), nbytes), dtype=torch.uint8)
        shape, answer = torch.tensor(packed.shape), torch.empty(1)

        def move() -> None:
            torch.index_select(rows, 0, places, out=packed)
            for message in (shape, goals, packed):
                dist.send(message, 1)
            dist.recv(answer, 1)

        return {self.name: move}

    def _receive(self) -> None:
        self._join(1)
        shape, answer, packed = torch.empty(2, dtype=torch.int64), torch.zeros(1), torch.empty(0, dtype=torch.uint8)
        while True:
            try:
                dist.recv(shape, 0)
                num_rows, nbytes = shape.tolist()
                if packed.shape != (num_rows, nbytes):
                    packed = torch.empty((num_rows, nbytes), dtype=torch.uint8)
                goals = torch.empty(num_rows, dtype=torch.int64)
                for message in (goals, packed):
                    dist.recv(message, 0)
                _matrix(self._memory, nbytes).index_copy_(0, goals, packed)
                dist.send(answer, 0)
            except RuntimeError:  # the other side has ended
                return

    def idle(self) -> None: ...

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def _matrix(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    return memory[: memory.numel() // nbytes * nbytes].view(-1, nbytes)


@final
class BareMooncake(Bare):
    """Mooncake's own batches, each waited for by Mooncake."""

    name = "bare Mooncake"

    def __init__(self, memory: Bytes) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        status = self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        status = status or self._engine.register_memory(memory.ctypes.data, memory.nbytes)
        if status:
            raise TransferError(f"Mooncake did not start: {status}", value=status, remedy="set MC_LOG_LEVEL=INFO")
        self._memory = memory
        self._peer, self._there = "", 0

    def endpoint(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._memory.ctypes.data

    def connect(self, endpoint: Any) -> None:
        self._peer, self._there = endpoint

    def movers(self, sources: Ints, targets: Ints, nbytes: int) -> dict[str, Move]:
        here, there = (sources + self._memory.ctypes.data).tolist(), (targets + self._there).tolist()
        cuts = [slice(start, start + MOONCAKE_ROWS) for start in range(0, len(here), MOONCAKE_ROWS)]
        batches = [(here[cut], there[cut], [nbytes] * len(here[cut])) for cut in cuts]

        def move() -> None:
            for batch in batches:
                status = self._engine.batch_transfer_sync_write(self._peer, *batch)
                if status:
                    raise TransferError(f"bare Mooncake: {status}", value=status, remedy="set MC_LOG_LEVEL=INFO")

        return {self.name: move}

    def idle(self) -> None: ...

    def close(self) -> None:
        self._engine = None
