"""Both workers on this machine: starts them, sees them end, and tells the decode worker what it has seen.

A supervisor is the one who knows that a process has ended. Memory that a killed prefill worker was writing is free
again only because the supervisor has seen it exit and says so.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, final

import attrs

from batchstate import BatchStateError, Violation
from batchstate.transport.connection import Listener, new_secret
from examples.disaggregated.channel import Channel, ChannelClosedError, Kind
from examples.disaggregated.options import MOST_RESTARTS, Options, writer_name
from examples.disaggregated.worker import open_engine

SERVED_IN = 900.0
"""Seconds after which a run is given up."""
ENDS_IN = 60.0
"""Seconds that a worker may take to end once it has said all, on a machine that is busy."""

_context = multiprocessing.get_context("forkserver")  # as clean as spawned ones, but torch is imported only once
_context.set_forkserver_preload(["examples.disaggregated.roles"])


class RunFailedError(Exception):
    """A worker has ended with an error; it has said which on stderr."""


@final
@attrs.define(eq=False)
class Child:
    """A worker's process, and what is said with it."""

    name: str
    process: ForkServerProcess
    channel: Channel
    open: bool = True
    joined: bool = False  # whether the decode worker is connected to it

    def heard(self) -> list[dict[str, Any]]:
        """Its words since the last time. Never waits."""
        if not self.open:
            return []
        try:
            return [Channel.words(payload) for kind, payload in self.channel.poll() if kind is Kind.WORDS]
        except ChannelClosedError:
            self.open = False
            return []


def supervise(options: Options) -> dict[str, Any]:
    """Serves a run's requests with processes of its own, none of which is left behind; the decode worker's figures.

    Raises:
        RunFailedError: a worker has ended with an error, or did not end.
        TransferError: the transport is not installed, or does not work with this host or interface.
    """
    Listener((options.host, 0), new_secret(), lambda _: None).close()
    open_engine(options).close()  # what does not work here would not in the workers, and each would tell so
    supervisor = Supervisor(options)
    try:
        return supervisor.run()
    finally:
        supervisor.end()


@final
class Supervisor:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._authkey = new_secret()
        self._children: list[Child] = []
        self._restarts = 0
        self._killed = 0

    def run(self) -> dict[str, Any]:
        """See `supervise`."""
        prefills = [self._started_prefill(rank) for rank in range(self._options.prefill_workers)]
        decode = self._started("decode", decode_process, self._options, self._authkey)
        end = time.monotonic() + SERVED_IN
        while time.monotonic() < end:
            prefills = [self._alive(child, decode) for child in prefills]
            for child in prefills:
                for words in child.heard():
                    self._tell(decode, rank=words["rank"], address=words["address"])
            for words in decode.heard():
                if "figures" in words:
                    figures = words["figures"]
                    parted = [
                        prefill for prefill in prefills if prefill.joined and prefill.name in figures["farewells"]
                    ]
                    self._await_ends([*parted, decode])
                    return {**figures, "killed": self._killed}
                if "joined" in words:
                    prefills[words["joined"]].joined = True
                if "kill" in words:
                    self._killed += 1
                    prefills[words["kill"]].process.kill()
            if not decode.open and not decode.process.is_alive():
                raise RunFailedError(f"the decode worker has ended with exit code {decode.process.exitcode}")
            time.sleep(0.001)
        raise RunFailedError(f"the run has not ended within {SERVED_IN:.0f} s")

    def end(self) -> None:
        """Kills what still runs. All are stopped first: one that outlived another for a moment would report its end."""
        running = [child.process for child in self._children if child.process.is_alive()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (process.pid for process in running if process.pid is not None):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for process in running:
            process.join(ENDS_IN)
        for child in self._children:
            child.channel.close()

    def _alive(self, child: Child, decode: Child) -> Child:
        """A prefill worker, or the next one in its place: one that was killed is followed by another, a few times."""
        code = child.process.exitcode
        if not code:
            return child
        child.channel.close()
        if code > 0 or self._restarts == MOST_RESTARTS:
            raise RunFailedError(f"{child.name} has ended with exit code {code}")
        self._restarts += 1
        rank = int(child.name.rpartition("-")[2])
        self._tell(decode, ended=rank)
        return self._started_prefill(rank)

    def _started_prefill(self, rank: int) -> Child:
        return self._started(writer_name(rank), prefill_process, self._options, rank, self._authkey)

    def _started(self, name: str, target: Any, *args: object) -> Child:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
        resource_tracker.ensure_running()  # before the window: starting it makes this process hear interrupts again
        with deaf_to_interrupts():
            process.start()
            child = Child(name, process, Channel(ours, name))
            self._children.append(child)  # before an interrupt that came meanwhile is heard: `end` has to know it
        theirs.close()
        return child

    @staticmethod
    def _tell(child: Child, **words: object) -> None:
        try:
            child.channel.say(**words)
        except ChannelClosedError as error:
            raise RunFailedError(f"{child.name} has ended") from error

    def _await_ends(self, children: list[Child]) -> None:
        """Those that are waiting for a decode worker, or were killed meanwhile, are not among `children`."""
        for child in children:
            child.process.join(ENDS_IN)
            if child.process.is_alive():
                raise RunFailedError(f"{child.name} did not end")
            if child.process.exitcode not in (0, -signal.SIGKILL):  # killed, after all was said, it costs nothing
                raise RunFailedError(f"{child.name} has ended with exit code {child.process.exitcode}")


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started in this window never hear Ctrl-C, which a terminal sends to all: the supervisor ends them.

    A signal that this thread blocks stays blocked in a child, and in the server that forks the workers. Here one that
    comes meanwhile, by way of whichever thread, is heard at the end of the window.
    """
    heard: list[int] = []
    main = threading.current_thread() is threading.main_thread()  # which alone may change what a signal does
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if main:
            signal.signal(signal.SIGINT, handler)
            if heard:
                signal.raise_signal(signal.SIGINT)


def in_one_line(error: Exception) -> str:
    """The event, and the remedy behind it. The report of a violation stays as it is."""
    if isinstance(error, BatchStateError) and not isinstance(error, Violation) and error.remedy:
        return f"{error.problem}; {error.remedy}"
    return str(error)


def prefill_process(connection: Connection, options: Options, rank: int, authkey: bytes) -> None:
    """The prefill worker's process."""
    from examples.disaggregated.channel import Door
    from examples.disaggregated.roles import serve_prefill
    from examples.disaggregated.worker import opened

    supervisor = Channel(connection, "the supervisor")
    name = writer_name(rank)
    try:
        with opened(options) as parts:
            door = Door((options.host, 0), authkey)
            supervisor.say(rank=rank, address=door.address)
            serve_prefill(parts, options, rank, door, supervisor)
    except (BatchStateError, ChannelClosedError) as error:
        sys.exit(f"{name}: {in_one_line(error)}")


def decode_process(connection: Connection, options: Options, authkey: bytes) -> None:
    """The decode worker's process."""
    from examples.disaggregated.arrivals import WriterFailedError
    from examples.disaggregated.roles import serve_decode
    from examples.disaggregated.worker import opened, requests_of

    supervisor = Channel(connection, "the supervisor")
    try:
        with opened(options) as parts:
            requests = requests_of(options, parts.model)
            figures = serve_decode(parts, options, requests, authkey, supervisor=supervisor)
            supervisor.say(figures=figures)
    except (BatchStateError, ChannelClosedError, WriterFailedError) as error:
        sys.exit(f"decode: {in_one_line(error)}")
