"""The mailbox by which tags reach a process of the same machine and user: what comes in, and what stays behind."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchstate.transport.engines.base import MOST_TAG_BYTES
from batchstate.transport.engines.nixl import Mailbox
from tests.transport_peers import NOISE

SECRET = bytes(range(32))


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Mailbox, Mailbox]]:
    """One that receives, whose secret is SECRET, and one that writes, in a folder of their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pair = Mailbox("a" * 16, SECRET, "machine"), Mailbox("b" * 16, bytes(32), "machine")
    yield pair
    for one in pair:
        one.close()


def test_the_longest_tag_arrives_whole(boxes: tuple[Mailbox, Mailbox]) -> None:
    """A datagram cut at its end is none of the writer's; the machine `strangers` changes and repeats all else."""
    box, writer = boxes
    assert writer.send(box.path, SECRET, bytes(MOST_TAG_BYTES))
    assert writer.send(box.path, SECRET, bytes(40 * MOST_TAG_BYTES))
    assert [one.tag for one in box.received()] == [bytes(MOST_TAG_BYTES)]


def test_noise_is_dropped_and_bounded(boxes: tuple[Mailbox, Mailbox]) -> None:
    """A sender that never ends holds up no call, and a full box says so to the writer, whose tag comes later."""
    box, writer = boxes
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)

        class Endless:
            """A socket that is filled again with each datagram that is taken from it."""

            taken = 0

            def recv(self, most: int) -> bytes:
                self.taken += 1
                return NOISE[self.taken % len(NOISE)][:most]

        endless, real = Endless(), box._socket
        box._socket = endless  # type: ignore[assignment]
        assert box.received() == []
        assert endless.taken == Mailbox.MOST_AT_ONCE
        box._socket = real
        with contextlib.suppress(BlockingIOError):
            for number in range(10_000):
                stranger.sendto(NOISE[number % len(NOISE)][:100_000], box.path)
        assert not writer.send(box.path, SECRET, b"full")
        assert box.received() == []
        assert writer.send(box.path, SECRET, b"not full")
        assert [one.tag for one in box.received()] == [b"not full"]


def test_no_other_user_enters(boxes: tuple[Mailbox, Mailbox], tmp_path: Path) -> None:
    """The folder is open to its user alone: another one cannot even see whether the mailbox is there."""
    box, _ = boxes
    assert stat.S_IMODE(os.stat(os.path.dirname(box.path)).st_mode) == 0o700
    if os.geteuid() != 0:
        pytest.skip("only root can try as another user")
    tmp_path.chmod(0o755)
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "for name in (sys.argv[1], os.path.dirname(sys.argv[1]) + '/other'):\n"
        "    for call in (lambda: one.sendto(b'x', name), lambda: one.bind(name), lambda: os.unlink(name)):\n"
        "        try: call(); print('came in')\n"
        "        except PermissionError: print('kept out')\n"
    )
    said = subprocess.run([sys.executable, "-c", program, box.path], capture_output=True, text=True, check=True).stdout
    assert said == "kept out\n" * 6
    assert box.received() == []


def test_what_a_killed_process_left_is_removed(
    boxes: tuple[Mailbox, Mailbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next mailbox on the machine, with its tags; those of the living, of others and of other machines stay."""
    box, writer = boxes
    program = (
        "from batchstate.transport.engines.nixl import Mailbox; import time\n"
        "box = Mailbox('c' * 16, bytes(32), 'machine'); print(box.path, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        left = child.stdout.readline().strip()
        assert writer.send(left, bytes(32), b"unread")
        Mailbox("d" * 16, SECRET, "machine").close()
        assert os.path.exists(left)
        child.send_signal(signal.SIGKILL)
    keep, link = tmp_path / "batchstate-machine-no socket", tmp_path / "batchstate-machine-link"
    keep.mkdir()
    (keep / "tags").write_text("a file of somebody")
    dead = tmp_path / "dead"
    dead.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ended:
        ended.bind(str(dead / "tags"))
    link.symlink_to(dead)
    Mailbox("d" * 16, SECRET, "another").close()
    assert os.path.exists(left)
    Mailbox("d" * 16, SECRET, "machine").close()
    assert not os.path.exists(os.path.dirname(left))
    assert os.path.exists(box.path)
    assert os.path.exists(writer.path)
    assert (keep / "tags").exists()
    assert (dead / "tags").exists()


def test_a_folder_in_which_others_put_things(boxes: tuple[Mailbox, Mailbox], tmp_path: Path) -> None:
    """Files, folders and links beside the mailbox are never read; it is removed with them, and no link is followed."""
    box, writer = boxes
    folder, precious = Path(os.path.dirname(box.path)), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("stays")
    (folder / "link").symlink_to(precious)
    (folder / "folder").mkdir()
    (folder / "folder" / "tags").write_bytes(b"noise")
    assert writer.send(box.path, SECRET, b"tag")
    assert [one.tag for one in box.received()] == [b"tag"]
    box.close()
    assert not folder.exists()
    assert (precious / "file").read_text() == "stays"
    with pytest.raises(FileNotFoundError):
        writer.send(box.path, SECRET, b"gone")
