"""Whether another process of this machine has ended, without being its parent.

`here()` goes to the other side, which makes a `Process` of it. A process that is `ended` has no memory any more: no
byte can land in it, and none comes from it. A number that was given to another process since is told apart by the
time of its start. Of a process of another machine, or of another PID namespace, nothing is known: it never counts
as ended.
"""

import os
import select
import weakref
from pathlib import Path
from typing import final


def here() -> list[str]:
    """This process among all: boot, PID namespace, PID, start. Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid"), str(os.getpid()), _start(os.getpid())]
    except OSError:
        return []


@final
class Process:
    """A process that may be watched from here.

    Args:
        whose: what `here` returned there.
    """

    def __init__(self, whose: list[str]) -> None:
        self._ended = False
        self._poll: select.poll | None = None
        if len(whose) != 4 or whose[:2] != here()[:2] or not whose[2].isdecimal():
            return
        number = int(whose[2])
        try:
            descriptor = os.pidfd_open(number)
        except ProcessLookupError:
            self._ended = True
            return
        except OSError:  # a system without this call
            return
        weakref.finalize(self, os.close, descriptor)
        try:
            self._ended = _start(number) != whose[3]
        except (FileNotFoundError, ProcessLookupError):
            self._ended = True
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> bool:
        """Whether it is known to have ended, with all of its threads. One system call."""
        if not self._ended and self._poll is not None:
            self._ended = bool(self._poll.poll(0))
        return self._ended


def _start(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
