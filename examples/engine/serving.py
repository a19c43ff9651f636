"""A few hundred requests through the engine, and every token of them compared with transformers' own."""

import time
from collections.abc import Callable
from typing import Any, final

import attrs
import numpy as np

from batchstate import Violation, checks
from batchstate.invariants import times_checked
from batchstate.races.devices import window_of
from batchstate.runtime import Runtime
from examples.engine.engine import Engine
from examples.engine.model import Model, prefill
from examples.engine.reference import generate
from examples.engine.request import Request
from examples.engine.settings import EngineSettings
from examples.traffic import Workload

Progress = Callable[[int, str], None]


@final
@attrs.frozen
class ServingReport:
    """The outcome.

    Attributes:
        mode: `overlapped` or `synchronous`, with `mixed` and `speculative` where they apply.
        device, model: what ran.
        requests, tokens: served, and generated.
        mismatches: requests whose tokens differ from those of `model.generate`; 0 where a violation ended the run, and
            nothing was compared.
        steps: launched.
        retractions: times a request gave its pages back and was resumed.
        prebuilt: requests that arrived with their KV.
        accepted_drafts: guesses that were right.
        violations: 0 or 1, since a run ends at the first; `broken` is its report.
        leaks: slots and pages missing at the end.
        forced_syncs: times the host waited for the whole device.
        in_flight_depth_max: the most steps launched and unread at once.
        mirror_checks: comparisons of host and device sides, and of who wrote them.
        checks_made: invariants checked, of all kinds.
        copies_per_step: host-to-device copies, those of checks included.
        host_us_per_step: microseconds of planning, uploading and reading, without the forward.
        seconds: of the serving, forwards included.
    """

    mode: str
    device: str
    model: str
    requests: int
    tokens: int
    mismatches: int
    steps: int
    retractions: int
    prebuilt: int
    accepted_drafts: int
    violations: int
    broken: str | None
    leaks: int
    forced_syncs: int
    in_flight_depth_max: int
    mirror_checks: int
    checks_made: int
    copies_per_step: float
    host_us_per_step: float
    seconds: float

    @property
    def clean(self) -> bool:
        """Whether every token is right and nothing was found broken."""
        return not (self.mismatches or self.violations or self.leaks or self.forced_syncs)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return attrs.asdict(self)


def requests_of(workload: Workload, model: Model, *, scale: int, seed: int, prebuilt: float = 0.0) -> list[Request]:
    """Requests with the lengths of a workload, shorter by `scale`, and drawn tokens.

    The share `prebuilt` of them comes with its KV. Prompts repeat parts of themselves, as real ones do.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(len(workload)):
        length = max(1, int(workload.context_tokens[number]) // scale)
        answer = max(1, int(workload.generated_tokens[number]) // scale)
        phrase = rng.integers(0, model.vocab_size, max(1, length // 3))
        prompt = np.resize(phrase, length).tolist()
        sent = prefill(model, prompt) if rng.random() < prebuilt else None
        requests.append(Request(number, prompt, answer, sent))
    return requests


def serve(
    runtime: Runtime,
    model: Model,
    requests: list[Request],
    settings: EngineSettings,
    *,
    level: str = "full",
    name: str = "",
    progress: Progress | None = None,
) -> ServingReport:
    """Serves requests, then compares each with `reference.generate`.

    Args:
        runtime: the device, or a test tool that stands in for one.
        model: on it.
        requests: fresh ones.
        settings: sizes and modes.
        level: of the checks while it serves.
        name: of the model, for the report.
        progress: called with tokens generated so far, and a remark.
    """
    before, checked = runtime.counters.snapshot(), times_checked.copy()
    broken, leaks, prebuilt = None, 0, sum(request.prebuilt is not None for request in requests)
    with (
        window_of(runtime),
        checks(level),
    ):  # a test tool sees the engine from its first allocation on
        engine = Engine(runtime, model, settings)
        start = time.perf_counter()
        try:
            for request in requests:
                engine.add(request)
            while engine.busy:
                engine.step()
                if progress is not None:
                    done = sum(len(request.output) for request in requests)
                    progress(done, f"{len(engine.scheduler.batch)} running, {len(engine.scheduler.waiting)} waiting")
            leaks = _leaks(engine)
        except Violation as violation:
            broken = str(violation)
        seconds = time.perf_counter() - start
    asked = {code: asked - checked[code] for code, asked in times_checked.items()}
    cost = runtime.counters - before
    mismatches = 0 if broken else _mismatches(engine, model, requests)
    steps = max(engine.steps, 1)
    return ServingReport(
        mode=_mode(settings),
        device=str(runtime.device),
        model=name,
        requests=len(requests),
        tokens=sum(len(request.output) for request in requests),
        mismatches=mismatches,
        steps=engine.steps,
        retractions=engine.scheduler.retractions,
        prebuilt=prebuilt,
        accepted_drafts=engine.accepted_drafts,
        violations=int(broken is not None),
        broken=broken,
        leaks=leaks,
        forced_syncs=cost.forced_syncs,
        in_flight_depth_max=engine.in_flight_depth_max,
        mirror_checks=sum(count for code, count in asked.items() if code.startswith("MIRROR_")),
        checks_made=sum(asked.values()),
        copies_per_step=cost.host_to_device_copies / steps,
        host_us_per_step=1e6 * engine.host_seconds / steps,
        seconds=seconds,
    )


def _mode(settings: EngineSettings) -> str:
    words = ["overlapped" if settings.overlap else "synchronous"]
    words += ["mixed"] if settings.mixed else []
    words += ["speculative"] if settings.num_drafts else []
    return ", ".join(words)


def _leaks(engine: Engine) -> int:
    """Slots and pages that are missing when all requests have gone and every step has ended."""
    scheduler = engine.scheduler
    if scheduler.last_step is not None:
        scheduler.last_step.wait()
    slots, pages = scheduler.slots.stats, scheduler.pages.stats
    return scheduler.slots.size - slots.free + pages.num_pages - pages.free


def _mismatches(engine: Engine, model: Model, requests: list[Request]) -> int:
    expected = generate(
        model,
        [request.prompt for request in requests],
        [request.max_new_tokens for request in requests],
        eos_token_ids=engine.eos_token_ids,
    )
    return sum(request.output != tokens for request, tokens in zip(requests, expected, strict=True))
