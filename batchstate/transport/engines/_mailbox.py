"""`Mailbox`: tags as datagrams between processes of one machine and user, each believed once, and only with a MAC."""

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import weakref
from typing import final

from batchstate import invariants
from batchstate.errors import TransferError
from batchstate.transport.connection import MAC, mac_of
from batchstate.transport.engines.base import MOST_TAG_BYTES, Delivery

_NUMBER = 8


@final
class Mailbox:
    """Takes tags of peers. It lies in a folder that no other user may enter.

    A tag has a MAC under the secret of the one who takes it, over the writer's instance, a number and the tag. Numbers
    of a writer rise, and datagrams of one socket arrive in order: a tag that comes twice is believed once.

    A process that is killed leaves its folder behind. The next mailbox of its user on this machine removes it.

    Args:
        instance: of the engine whose mailbox it is.
        secret: of that engine.
        machine: names it, as no other machine that may share the folder for temporary files; empty if that is unknown.

    Raises:
        TransferError: the folder for temporary files cannot have it.

    Attributes:
        path: where it is.
        close: lets it go; twice is fine.
    """

    MOST_AT_ONCE = 256
    """Datagrams taken at a time, so that a process that sends without end holds up no call."""

    def __init__(self, instance: str, secret: bytes, machine: str) -> None:
        self._instance, self._secret = instance, secret
        self._sent = 0
        self._last: dict[str, int] = {}  # number of the last tag of each writer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        prefix = f"batchstate-{machine[:8]}-"
        if machine:
            _remove_dead(prefix)
        folder = tempfile.mkdtemp(prefix=prefix)
        self.path = os.path.join(folder, "tags")
        self.close = weakref.finalize(self, _close, self._socket, folder)
        try:
            self._socket.bind(self.path)
        except OSError as error:
            self.close()
            raise TransferError(
                f"no socket at {self.path}: {error}", value=self.path, remedy="set TMPDIR to a folder with a short path"
            ) from error

    def __repr__(self) -> str:
        return f"Mailbox({self.path!r})"

    def send(self, path: str, secret: bytes, tag: bytes) -> bool:
        """Sends a tag to the mailbox at `path`, whose secret that is; False where it is full.

        Raises:
            OSError: it is gone.
        """
        self._sent += 1  # what is not taken leaves out its number
        message = self._sent.to_bytes(_NUMBER) + tag
        writer = self._instance.encode()
        try:
            self._socket.sendto(b"%s\0%s%s" % (writer, _mac_of(secret, writer, message), message), path)
        except BlockingIOError:
            return False
        return True

    def received(self) -> list[Delivery]:
        """The tags among what has come, of which up to `MOST_AT_ONCE` datagrams are taken."""
        found: list[Delivery] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(self.MOST_AT_ONCE):
                datagram = self._socket.recv(_MOST_BYTES)
                writer, _, sealed = datagram.partition(b"\0")
                mac, message = sealed[:MAC], sealed[MAC:]
                if not invariants.peer_unknown.holds(_mac_of(self._secret, writer, message), mac):
                    continue
                instance, number = writer.decode("utf-8", "replace"), int.from_bytes(message[:_NUMBER])
                if number > self._last.get(instance, 0):
                    self._last[instance] = number
                    found.append(Delivery(message[_NUMBER:], instance))
        return found


_MOST_BYTES = 64 + 1 + MAC + _NUMBER + MOST_TAG_BYTES
"""Of a datagram; the rest of one that is longer is dropped, and its MAC does not fit."""


def _mac_of(secret: bytes, writer: bytes, message: bytes) -> bytes:
    return mac_of(secret, b"batchstate 1 mail", writer, message)


def _close(one: socket.socket, folder: str) -> None:
    one.close()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(prefix: str) -> None:
    """Removes the mailboxes of processes that have ended: a socket that is bound no more never is again."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in found:
        path = os.path.join(entry.path, "tags")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            owner = entry.stat(follow_symlinks=False).st_uid
            ours = entry.is_dir(follow_symlinks=False) and owner == os.geteuid()
            if not ours or not stat.S_ISSOCK(os.stat(path).st_mode):
                continue
            try:
                one.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                os.rmdir(entry.path)
