"""The adapter of `examples/disaggregated`: prefill ranks and decode worker in one process, over any transport."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from typing import Any, final

import torch

from batchstate.errors import TransferError
from batchstate.races.devices import open_device
from batchstate.testing.exact import EngineUnderTest, ExactModel, ExactSpec, Oracle, Request, Verifier
from batchstate.transport.engines.base import Engine
from batchstate.transport.engines.in_process import Faults, InProcessEngine, Network
from examples.disaggregated.channel import Channel, Kind
from examples.disaggregated.decode import DecodeWorker
from examples.disaggregated.options import Options
from examples.disaggregated.prefill import PrefillWorker
from examples.disaggregated.roles import NAP
from examples.disaggregated.worker import Parts, open_engine
from examples.engine.request import Request as EngineRequest
from examples.exact.answers import new_tokens
from examples.exact.drafts import ExactDrafter
from examples.exact.served import ServedModel

LONGEST_PROMPT, LONGEST_ANSWER = 96, 24


def transports() -> list[str]:
    """The transports that work on this machine: always the one of this process, whose network loses and delays."""
    there = ["in_process"]
    for name in ("tcp", "nixl", "mooncake"):
        with contextlib.suppress(ImportError, OSError, TransferError):
            open_engine(Options(transport=name, trusted_network=True)).close()
            there.append(name)
    return there


@final
class Disaggregated:
    """See `batchstate.testing.exact.Adapter`."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        local = settings["transport"] == "in_process"
        self._options = options = Options(
            transport="tcp" if local else settings["transport"],
            trusted_network=True,
            page_size=settings["page_size"],
            host_page_size=settings["host_page_size"],
            hot_tokens=settings["hot_tokens"],
            speculate=settings["drafts"],
            staged=settings["staged"],
            landing=settings["landing"],
            prefill_degree=settings["degree"],
            prefill_stages=settings["stages"],
            max_running=settings["max_running"],
            max_prompt=LONGEST_PROMPT,
        )
        self._network = Network(0)
        self._engines: list[Engine] = []
        self._local = local
        self._requests, self._seen = dict[int, EngineRequest](), dict[int, int]()
        served = ServedModel(model, 8, verifier, guesses=bool(options.speculate))
        longest = EngineRequest(0, [0] * LONGEST_PROMPT, LONGEST_ANSWER)
        clock = (lambda: self._network.now) if local else time.monotonic
        self.decode = DecodeWorker(self._parts(served, Faults()), options, [longest], clock=clock)
        self.decode._here.clear()  # it was there for its length
        self.decode.arrivals.waiting.clear()
        self._drafter = None
        if options.speculate:
            history = self.decode._forward._drafter.history
            self._drafter = ExactDrafter(options.speculate, history, model.spec.vocab_size, settings["accepted"])
            self.decode._forward._drafter = self._drafter  # type: ignore[assignment]
        self._oracle = Oracle(model.spec)
        self._name_forwards(served)
        self.prefills: list[tuple[PrefillWorker, Channel]] = []
        self._channels: list[Channel] = []
        for rank in range(options.prefill_workers):
            served = ServedModel(model, options.page_size, verifier)
            prefill = PrefillWorker(self._parts(served, Faults(delay=2, split=0.5)), options, rank)
            ours, theirs = (Channel(end, f"worker {rank}") for end in Pipe())
            prefill.sender.accept(self.decode.arrivals.receiver.introduce())
            self.decode.arrivals.connect(ours, prefill.sender.introduce())
            self.prefills.append((prefill, theirs))
            self._channels += [ours, theirs]
            self._name_prompts(prefill, served)

    def _parts(self, served: ServedModel, faults: Faults) -> Parts:
        engine = InProcessEngine(self._network, faults) if self._local else open_engine(self._options)
        self._engines.append(engine)
        return Parts(open_device("cpu"), served, engine)  # type: ignore[arg-type]  # a model by its calls

    def _name_forwards(self, served: ServedModel) -> None:
        """Tells the verifier whose the forwards of the decode worker are."""
        forward = self.decode._forward

        def named(run: Any) -> Any:
            def running(batch: Any, *args: Any) -> Any:
                served.requests = [request.number for request in batch.requests]
                return run(batch, *args)

            return running

        for name in ("decode", "prefill"):
            setattr(forward, name, named(getattr(forward, name)))

    def _name_prompts(self, prefill: PrefillWorker, served: ServedModel) -> None:
        planner = prefill._planner

        class Named:
            def plan(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
                served.requests = [int(job.key[0].split()[-1]) for job in batch.jobs]
                return planner.plan(batch, *args, **kwargs)

        prefill._planner = Named()  # type: ignore[assignment]

    def add(self, request: Request) -> None:
        """A request arrives; some are prefilled by the decode worker itself."""
        arrived = EngineRequest(request.number, list(request.prompt), request.max_new_tokens)
        self._requests[request.number], self._seen[request.number] = arrived, 0
        if self._drafter is not None:
            answer = self._oracle.answer(request.prompt, request.max_new_tokens + self._options.speculate)
            self._drafter.expect([*request.prompt, *answer.tokens])
        self.decode.add(arrived)

    def abort(self, number: int) -> None:
        """The decode worker cannot."""
        raise NotImplementedError

    def step(self) -> Mapping[int, Sequence[int]]:
        """One turn of each worker, and of the network between them."""
        self._network.step()
        moved = self.decode.turn()
        for prefill, channel in self.prefills:
            for kind, payload in channel.poll():
                moved = True
                if kind is Kind.TRANSPORT:
                    prefill.sender.on_message(payload, "decode")
                else:
                    prefill.prompt(**Channel.words(payload))
            moved |= prefill.turn()
            for words in prefill.words:
                channel.say(**words)
            for _, message in prefill.sender.outbox:
                channel.send(Kind.TRANSPORT, message)
            prefill.words, prefill.sender.outbox = [], []
        if not moved and not self._local:
            time.sleep(NAP)  # threads of the transport want the core
        return new_tokens(self._requests, self._seen)

    @property
    def busy(self) -> bool:
        """Whether a request is anywhere, or memory in quarantine."""
        return bool(
            self._requests
            or self.decode.busy
            or self.decode.quarantined
            or any(prefill.busy for prefill, _ in self.prefills)
        )

    def close(self) -> None:
        """Hangs up, and closes the engines of the transport."""
        for channel in self._channels:
            channel.close()
        for engine in self._engines:
            engine.close()


def over(*names: str) -> EngineUnderTest:
    """The adapter with these transports to choose from."""
    return EngineUnderTest(
        "disaggregated",
        Disaggregated,
        {
            "transport": names,
            "page_size": (16, 1, 4, 64),
            "host_page_size": (0, 1),
            "hot_tokens": (32, 8, 64),
            "drafts": (0, 1, 3),
            "accepted": (0.7, 0.0, 0.3, 1.0),
            "degree": (1, 2),
            "stages": (1, 2),
            "staged": (0.0, 0.3),
            "landing": ("host", "device", "mixed"),
            "max_running": (8, 2, 4, 16),
            "dtype": (torch.float32, torch.bfloat16, torch.float64),
        },
        lambda settings: ExactSpec(heads=2),
        longest_prompt=LONGEST_PROMPT,
        longest_answer=LONGEST_ANSWER,
        aborts=False,
        patience=100_000,
    )


DISAGGREGATED = over(*["in_process"] * 8, *transports())
"""Mostly within this process, whose network delays and reorders; starting some of the others takes seconds."""
