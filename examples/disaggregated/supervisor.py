"""Both workers on this machine: starts them, sees them end, and tells the decode worker what it has seen.

A supervisor is the one who knows that a process has ended. Memory that a killed prefill worker was writing is free
again only because somebody says so who has seen it exit.
"""

import multiprocessing
import secrets
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, final

import attrs

from batchstate import BatchStateError
from examples.disaggregated.channel import Channel, ChannelClosedError, Kind
from examples.disaggregated.options import Options, writer_name

SERVED_IN = 900.0
"""Seconds after which a run is given up."""
ENDS_IN = 15.0
"""Seconds that a worker may take to end once it has said all."""

MOST_RESTARTS = 3
"""Prefill workers that are started in the place of others."""


class RunFailedError(Exception):
    """A worker has ended with an error; it has said which on stderr."""


@final
@attrs.define(eq=False)
class Child:
    """A worker's process, and what is said with it."""

    name: str
    process: SpawnProcess
    channel: Channel
    open: bool = True

    def heard(self) -> list[dict[str, Any]]:
        """What it has said since the last time. Never waits."""
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
    """
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
        self._authkey = secrets.token_bytes(32)
        self._children: list[Child] = []
        self._restarts = 0
        self._kill_after = options.kill_prefill_after

    def run(self) -> dict[str, Any]:
        """See `supervise`."""
        prefills = [self._started_prefill(rank) for rank in range(self._options.prefill_degree)]
        decode = self._started("decode", decode_process, self._options, self._authkey)
        end = time.monotonic() + SERVED_IN
        while time.monotonic() < end:
            prefills = [self._alive(child, decode) for child in prefills]
            for child in prefills:
                for words in child.heard():
                    self._tell(decode, name=child.name, address=words["address"])
            for words in decode.heard():
                if "figures" in words:
                    self._await_ends(prefills, decode)
                    return dict(words["figures"])
                if self._kill_after is not None and words.get("delivered", 0) >= self._kill_after:
                    self._kill_after = None
                    prefills[0].process.kill()
            if not decode.open and not decode.process.is_alive():
                raise RunFailedError(f"the decode worker has ended with exit code {decode.process.exitcode}")
            time.sleep(0.001)
        raise RunFailedError(f"the run has not ended within {SERVED_IN:.0f} s")

    def end(self) -> None:
        """Kills what still runs."""
        for child in self._children:
            if child.process.is_alive():
                child.process.kill()
                child.process.join(ENDS_IN)
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
        self._tell(decode, ended=child.name)
        return self._started_prefill(int(child.name.rpartition("-")[2]))

    def _started_prefill(self, rank: int) -> Child:
        return self._started(writer_name(rank), prefill_process, self._options, rank, self._authkey)

    def _started(self, name: str, target: Any, *args: object) -> Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
        process.start()
        theirs.close()
        child = Child(name, process, Channel(ours, name))
        self._children.append(child)
        return child

    @staticmethod
    def _tell(child: Child, **words: object) -> None:
        try:
            child.channel.say(**words)
        except ChannelClosedError as error:
            raise RunFailedError(f"{child.name} has ended") from error

    def _await_ends(self, prefills: list[Child], decode: Child) -> None:
        for child in self._children:
            child.process.join(ENDS_IN)
            if child.process.is_alive():
                raise RunFailedError(f"{child.name} did not end")
        for child in (*prefills, decode):
            if child.process.exitcode:
                raise RunFailedError(f"{child.name} has ended with exit code {child.process.exitcode}")


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
            supervisor.say(address=door.address)
            serve_prefill(parts, options, rank, door, supervisor)
    except (BatchStateError, ChannelClosedError) as error:
        sys.exit(f"{name}: {error}")


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
        sys.exit(f"decode: {error}")
