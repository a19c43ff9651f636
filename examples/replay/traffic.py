"""The adapter of `examples/traffic`, whose requests have lengths and no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from batchstate.races.devices import open_device
from batchstate.testing.exact import EngineUnderTest, ExactModel, Request, Verifier
from examples.traffic.engine import EngineSettings, SamplingParams, TrafficEngine
from examples.traffic.engine import Request as TrafficRequest

_SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0, 2, 0)


@final
class TrafficAdapter:
    """See `batchstate.testing.exact.Adapter`. An answer comes when it is complete, as zeros."""

    def __init__(self, settings: Mapping[str, Any], model: ExactModel, verifier: Verifier | None) -> None:
        most = settings["room"]
        self.engine = TrafficEngine(
            open_device("cpu"),
            EngineSettings(
                max_running=settings["max_running"],
                max_tokens_per_step=settings["step_tokens"],
                page_size=settings["page_size"],
                num_pages=settings["num_pages"],
            ),
            max_tokens_per_request=most,
        )
        self._requests: dict[int, TrafficRequest] = {}

    def add(self, request: Request) -> None:
        """A request arrives."""
        arrived = TrafficRequest(request.number, 0.0, len(request.prompt), request.max_new_tokens, 0, _SAMPLING)
        self._requests[request.number] = arrived
        self.engine.add([arrived])

    def abort(self, number: int) -> None:
        """Its client hangs up."""
        request = self._requests.pop(number)
        self.engine.abort(request)

    def step(self) -> Mapping[int, Sequence[int]]:
        """One step; nothing is left in the pools when no request is."""
        engine = self.engine
        engine.step()
        if not self.busy:
            engine.slots.expect_idle()
            engine.pages.expect_idle()
        done = [number for number, request in self._requests.items() if request.done]
        return {number: [0] * self._requests.pop(number).answer_tokens for number in done}

    @property
    def busy(self) -> bool:
        """Whether requests are here."""
        return bool(len(self.engine.batch) or self.engine.waiting)

    def close(self) -> None:
        """Nothing is held."""


TRAFFIC = EngineUnderTest(
    "traffic",
    TrafficAdapter,
    {
        "max_running": (8, 4, 2, 64, 256),
        "step_tokens": (64, 16, 2048),
        "page_size": (16, 4),
        "num_pages": (64, 16, 1200, 10_240),
        "room": (512, 16_384),
    },
    texts=False,
    patience=20_000,
)
