"""Each of the two processes from its start to its end. Neither outlives the other for long.

A worker ends with an error when its peer or its supervisor hangs up, and when nothing has happened for
`Options.patience` seconds.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any, final

from batchstate import Violation
from examples.disaggregated.arrivals import Arrivals, WriterFailedError
from examples.disaggregated.channel import TRIES_FOR, Channel, ChannelClosedError, Door, Kind, call
from examples.disaggregated.decode import DecodeWorker
from examples.disaggregated.options import MOST_RESTARTS, Options, writer_name
from examples.disaggregated.prefill import PrefillWorker
from examples.disaggregated.worker import STARTS_IN, Parts, agreed, introduced, shared_of
from examples.engine.model import Model
from examples.engine.request import Request

NAP = 0.0003
"""Seconds that a worker sleeps when there is nothing to do: threads of engines, and the other worker, want the core."""

Address = tuple[str, int]


@final
class Patience:
    """Ends a loop in which nothing happens."""

    def __init__(self, seconds: float, work: str) -> None:
        self._seconds, self._what = seconds, work
        self._since = time.monotonic()

    def after(self, *, moved: bool) -> None:
        """A turn has passed.

        Raises:
            ChannelClosedError: nothing has happened for too long.
        """
        if moved:
            self._since = time.monotonic()
            return
        if time.monotonic() - self._since > self._seconds:
            raise ChannelClosedError(f"{self._what}: nothing has happened for {self._seconds:.0f} s")
        time.sleep(NAP)


# Prefill


def serve_prefill(parts: Parts, options: Options, rank: int, door: Door, supervisor: Channel | None) -> dict[str, Any]:
    """Waits for the decode worker, and serves it until it says stop; figures of the run.

    Raises:
        HandshakeError: the two do not fit. ChannelClosedError: the decode worker or the supervisor is gone.
        Violation: something is broken; the decode worker was told.
    """
    worker = PrefillWorker(parts, options, rank)
    decode = _visitor(door, supervisor)
    try:
        agreed(decode, shared_of(options, parts.model, rank))
        peer = worker.sender.accept(introduced(decode, worker.sender.introduce()))
        _serve_prompts(worker, decode, peer, options, supervisor)
    except Violation as violation:
        decode.say(failed=f"{writer_name(rank)}: {violation}", violation=True)
        raise
    figures = {"leaks": worker.leaks, "steps": worker.steps, "bytes": worker.bytes_written}
    decode.say(farewell=figures)
    _until_gone(decode)
    return figures


def _visitor(door: Door, supervisor: Channel | None) -> Channel:
    patience = Patience(STARTS_IN, "waiting for the decode worker")
    while (connection := door.entered()) is None:
        if supervisor is not None:
            supervisor.poll()
        patience.after(moved=False)
    return Channel(connection, "decode")


def _serve_prompts(
    worker: PrefillWorker, decode: Channel, peer: str, options: Options, supervisor: Channel | None
) -> None:
    patience = Patience(options.patience, "prefill")
    stop = False
    while not stop or worker.busy:
        heard = decode.poll()
        for kind, payload in heard:
            if kind is Kind.TRANSPORT:
                worker.sender.on_message(payload, peer)
                continue
            words = Channel.words(payload)
            if "prompt" in words:
                worker.prompt(words["request"], words["attempt"], words["prompt"])
            stop = stop or "stop" in words
        moved = worker.turn()
        for words in worker.words:
            decode.say(**words)
        for _, message in worker.sender.outbox:
            decode.send(Kind.TRANSPORT, message)
        worker.words, worker.sender.outbox = [], []
        if supervisor is not None:
            supervisor.poll()
        patience.after(moved=moved or bool(heard))


def _until_gone(channel: Channel) -> None:
    """The last words are heard before this end hangs up."""
    patience = Patience(STARTS_IN, f"waiting for {channel.name} to hang up")
    try:
        while True:
            channel.poll()
            patience.after(moved=False)
    except ChannelClosedError:
        channel.close()


# Decode


def serve_decode(
    parts: Parts,
    options: Options,
    requests: Sequence[Request],
    authkey: bytes,
    *,
    addresses: Sequence[Address] = (),
    supervisor: Channel | None = None,
) -> dict[str, Any]:
    """Serves all requests; figures of the run and their tokens.

    Args:
        parts: device, model, engine.
        options: sizes.
        requests: fresh ones.
        authkey: the secret.
        addresses: of the prefill workers, by rank; without them the supervisor says where they are.
        supervisor: who starts prefill workers, and sees them end.

    Raises:
        HandshakeError: a prefill worker does not fit. ChannelClosedError: one is gone and is not started again, or the
            supervisor is.
    """
    worker = DecodeWorker(parts, options, requests)
    joining = Joining(worker, options, parts.model, authkey)
    before = parts.runtime.counters.snapshot()
    broken, start = None, time.perf_counter()
    farewells: dict[str, dict[str, Any]] = {}
    try:
        for rank, address in enumerate(addresses):
            joining.join(rank, address)
        while supervisor is not None and not worker.arrivals.connected:
            joining.heed(supervisor)
            time.sleep(NAP)
        start = time.perf_counter()
        _serve_requests(worker, options, joining, supervisor)
        farewells = _farewells(worker, supervisor)
    except Violation as violation:
        broken = str(violation)
    except WriterFailedError as error:
        if not error.violation:
            raise
        broken = str(error)
    finally:
        for channel in worker.arrivals.channels().values():
            channel.close()
    cost = parts.runtime.counters - before
    return {
        "outputs": [request.output for request in requests],
        "broken": broken,
        "seconds": time.perf_counter() - start,
        "steps": worker.steps,
        "mixed_steps": worker.mixed_steps,
        "staged": worker.staged,
        "landed": worker.landed,
        "ordinary": worker.ordinary,
        "drafted": worker.drafted,
        "accepted": worker.accepted,
        "retried": worker.arrivals.retried,
        "delivered": worker.arrivals.delivered,
        "transferred_bytes": worker.arrivals.transferred_bytes,
        "in_flight_depth_max": worker.in_flight_depth_max,
        "forced_syncs": cost.forced_syncs,
        "device_to_host_copies": cost.device_to_host_copies - worker.result_copies,
        "result_copies": worker.result_copies,
        "host_to_device_copies": cost.host_to_device_copies,
        "quarantined": worker.quarantined,
        "quarantined_max": worker.quarantined_max,
        "leaks": worker.leaks + sum(figures["leaks"] for figures in farewells.values()),
        "prefill_steps": sum(figures["steps"] for figures in farewells.values()),
        "farewells": list(farewells),
    }


@final
class Joining:
    """How prefill workers come to the decode worker, and go.

    Attributes:
        ended: how many the supervisor has seen end.
    """

    def __init__(self, worker: DecodeWorker, options: Options, model: Model, authkey: bytes) -> None:
        self._worker, self._options, self._model, self._authkey = worker, options, model, authkey
        self.ended = 0

    def join(self, rank: int, address: Address, seconds: float = STARTS_IN) -> None:
        """Connects to the prefill worker of a rank, which may begin to listen within so many seconds."""
        channel = call(address, self._authkey, writer_name(rank), seconds)
        arrivals = self._worker.arrivals
        try:
            agreed(channel, shared_of(self._options, self._model, rank))
            arrivals.connect(channel, introduced(channel, arrivals.receiver.introduce()))
        except BaseException:
            channel.close()
            raise

    def heed(self, supervisor: Channel) -> None:
        """Words of the supervisor: a prefill worker has ended, or a new one is there."""
        for _, payload in supervisor.poll():
            words = Channel.words(payload)
            if "ended" in words:
                self.ended += 1
                name = writer_name(words["ended"])
                self._worker.arrivals.lost(name, "its process has ended")
                self._worker.turn()  # what it was writing is quarantined before its end is known
                self._worker.arrivals.ended(name)
            if "address" in words:
                host, port = words["address"]
                with contextlib.suppress(ChannelClosedError):  # it has ended meanwhile: the supervisor will say so
                    self.join(int(words["rank"]), (str(host), int(port)), TRIES_FOR)  # it listens, or is gone
                    supervisor.say(joined=words["rank"])


def _serve_requests(worker: DecodeWorker, options: Options, joining: Joining, supervisor: Channel | None) -> None:
    patience = Patience(options.patience, "decode")
    arrivals = worker.arrivals
    kills = 0
    while worker.busy or worker.quarantined or _kill_pends(options, joining, arrivals):
        if supervisor is not None:
            joining.heed(supervisor)
            if kills < MOST_RESTARTS and _kill_is_due(options, arrivals):
                kills, ended = kills + 1, joining.ended
                supervisor.say(kill=0)
                while joining.ended == ended:  # what is on its way must not arrive before the kill
                    joining.heed(supervisor)
                    time.sleep(NAP)
        elif not arrivals.connected and arrivals.busy:
            raise ChannelClosedError(
                f"gone: {', '.join(arrivals.missing)}, and requests still need them; start it again, and the decode "
                "role too (to go on without that takes the supervisor, who sees processes end: leave --role out)"
            )
        patience.after(moved=worker.turn())


def _kill_is_due(options: Options, arrivals: Arrivals) -> bool:
    """Whether enough is delivered for prefill 0 to be killed, which writes a request, and no kill has hit one yet."""
    if options.kill_prefill_after is None or arrivals.delivered < options.kill_prefill_after or arrivals.retried:
        return False
    return arrivals.writes(writer_name(0))


def _kill_pends(options: Options, joining: Joining, arrivals: Arrivals) -> bool:
    """Whether the next prefill 0 is not here: who says farewell must not be killed in it."""
    return bool(options.kill_prefill_after is not None and joining.ended and not arrivals.connected)


def _farewells(worker: DecodeWorker, supervisor: Channel | None) -> dict[str, dict[str, Any]]:
    """Tells each prefill worker to stop, and hears what it has to say at the end, by name.

    One that ends before it has said so costs nothing any more. Without a supervisor it is an error.
    """
    farewells = {}
    for name, channel in worker.arrivals.channels().items():
        try:
            farewells[name] = _farewell(worker, name, channel)
        except ChannelClosedError:
            if supervisor is None:
                raise
        channel.close()
    return farewells


def _farewell(worker: DecodeWorker, name: str, channel: Channel) -> dict[str, Any]:
    channel.say(stop=True)
    while True:
        kind, payload = channel.await_one(STARTS_IN)
        words = Channel.words(payload) if kind is Kind.WORDS else {}
        if "failed" in words:
            raise WriterFailedError(str(words["failed"]), violation=bool(words.get("violation")))
        if "farewell" in words:
            farewell: dict[str, Any] = words["farewell"]
            return farewell
        if kind is Kind.TRANSPORT:
            worker.arrivals.receiver.on_message(payload, name)
