"""What stands in for CUDA and for packages that are not installed, so that an engine's own host code runs on a CPU.

Nothing of the engine is replaced here. Its kernels are, by its adapter.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PEERS = "BATCHSTATE_PEERS"
"""Environment variable with the folder of the checkouts."""


class MissingPeerError(Exception):
    """There is no checkout of an engine."""


def checkout(folder: str, source: str = ".") -> Path:
    """The checkout of an engine, put on the path of imports.

    Raises:
        MissingPeerError: there is none.
    """
    path = Path(os.environ.get(PEERS, "")) / folder / source
    if not os.environ.get(PEERS) or not path.is_dir():
        raise MissingPeerError(f"{folder}: no checkout; clone it into a folder DIR, and set {PEERS}=DIR")
    if str(path) not in sys.path:
        sys.path.append(str(path))
    return path


class _Anything(types.ModuleType):
    """A module that is not installed: whatever is imported from it can be called and does nothing."""

    __path__ = []  # noqa: RUF012  # a module with one is a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Hash:
    """In the place of `xxhash.xxh64`: another hash of 64 bits."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self.update: Callable[[bytes], None] = self._hash.update

    def intdigest(self) -> int:
        """The hash as a number."""
        return int.from_bytes(self._hash.digest(), "little")


def import_with_stand_ins(module: str, *absent: str) -> Any:
    """Imports a module of an engine, with stand-ins for those of its dependencies that are not installed."""
    missing = [name for name in absent if importlib.util.find_spec(name.partition(".")[0]) is None]
    stubs: dict[str, types.ModuleType] = {name: _Anything(name) for name in missing}
    if "xxhash" in stubs:
        stubs["xxhash"].xxh64 = _Hash  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, stubs), mock.patch.object(torch, "compile", lambda function: function):
        imported = importlib.import_module(module)
        added = {name: found for name, found in sys.modules.items() if name not in stubs}
    sys.modules.update(added)  # `patch.dict` forgets what was imported inside of it
    return imported


class _Event:
    def record(self, stream: object = None) -> None:
        """Everything has run when it returns, on a CPU."""

    synchronize = wait_stream = wait = record


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """A window in which code that says CUDA runs on the CPU: no memory is pinned, and streams do nothing."""
    stream = _Event()

    def unpinned(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    with contextlib.ExitStack() as stack:
        for name in ("tensor", "empty", "zeros", "arange"):
            stack.enter_context(mock.patch.object(torch, name, unpinned(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, **kwargs: self))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", _Event))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", return_value=stream))
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", return_value=contextlib.nullcontext()))
        yield
