"""The outcome of a run, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any, final

import attrs

from examples.console import Row, Section, show
from examples.disaggregated.options import Options
from examples.engine.model import Model
from examples.engine.reference import generate
from examples.engine.request import Request


@final
@attrs.frozen
class Report:
    """Figures of a run.

    Attributes:
        transport: name of the engine.
        requests, tokens: served, and generated.
        mismatches: requests whose tokens differ from those of `model.generate`; 0 where a violation ended the run.
        violations: 0 or 1, since a run ends at the first; `broken` is its report.
        leaks: slots, pages and host locations missing at the end, in all workers.
        page_size, host_page_size, hot_tokens, speculate, prefill_degree, prefill_stages, landing, device, checks: of
            the options.
        kill_prefill_after: of the options.
        not_longer_than_hot, longer_than_hot: requests by their prompts: those that fit into the hot buffer, and others.
        direct, staged: requests by who prefilled them: attempts delivered, and prefilled by decode.
        landed, ordinary: requests delivered into device pages, and those of them that stayed there; others were staged
            out to the host tier.
        retried: attempts that failed and were made again.
        killed: prefill workers that the supervisor has killed, as `kill_prefill_after` asks for.
        quarantined_max: the most host locations of failed attempts that were kept from reuse.
        quarantined: of these, at the end.
        transferred_bytes: KV that was delivered.
        seconds: of the serving.
        drafted, accepted: tokens guessed for requests that ran, and those of them that were right.
        steps, prefill_steps: decode steps, and forwards of the prefill workers.
        mixed_steps: decode steps in which direct, staged and ordinary requests, or two kinds of them, ran together.
        in_flight_depth_max: the most decode turns of which the results were unread at once.
        forced_syncs: times the decode worker's host waited for its device.
        device_to_host_copies: of the decode worker, beside the one a turn that carries results: for planning.
        host_to_device_copies: of the decode worker.
    """

    transport: str
    requests: int
    tokens: int
    mismatches: int
    violations: int
    broken: str | None
    leaks: int
    page_size: int
    hot_tokens: int
    speculate: int
    prefill_degree: int
    prefill_stages: int
    landing: str
    host_page_size: int
    device: str
    checks: str
    not_longer_than_hot: int
    longer_than_hot: int
    direct: int
    staged: int
    landed: int
    ordinary: int
    retried: int
    kill_prefill_after: int | None
    killed: int
    quarantined_max: int
    quarantined: int
    transferred_bytes: int
    seconds: float
    drafted: int
    accepted: int
    steps: int
    mixed_steps: int
    prefill_steps: int
    in_flight_depth_max: int
    forced_syncs: int
    device_to_host_copies: int
    host_to_device_copies: int

    @property
    def unkilled(self) -> str | None:
        """Why the run does not show what it was asked to show: no kill has failed an attempt. None if it does."""
        if self.kill_prefill_after is None or (self.killed and self.retried):
            return None
        return (
            f"--kill-prefill-after {self.kill_prefill_after}: {self.killed} kills of a worker failed {self.retried} "
            f"attempts, with {self.direct} requests delivered; kill after fewer, or serve more --requests, or a "
            "smaller share of them --staged"
        )

    @property
    def clean(self) -> bool:
        """Whether every token is right, nothing was found broken, and who was to be killed was killed."""
        wrong = self.mismatches, self.violations, self.leaks, self.forced_syncs, self.device_to_host_copies
        return not any(wrong) and self.unkilled is None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return attrs.asdict(self)


def report_of(options: Options, model: Model, requests: Sequence[Request], figures: dict[str, Any]) -> Report:
    """Compares each answer with `reference.generate`.

    Args:
        options: of the run.
        model: the reference's.
        requests: what was asked for; their own outputs are not looked at.
        figures: what the decode worker has said.
    """
    outputs: list[list[int]] = figures["outputs"]
    broken = figures["broken"]
    mismatches = 0
    if broken is None:
        prompts, limits = [request.prompt for request in requests], [request.max_new_tokens for request in requests]
        expected = generate(model, prompts, limits, eos_token_ids=model.eos_token_ids)
        mismatches = sum(output != right for output, right in zip(outputs, expected, strict=True))
    short = sum(len(request.prompt) <= options.hot_tokens for request in requests)
    names = {field.name for field in attrs.fields(Report)}
    return Report(
        **{name: getattr(options, name) for name in names if hasattr(options, name)}
        | {name: value for name, value in figures.items() if name in names}
        | {
            "requests": len(requests),
            "tokens": sum(map(len, outputs)),
            "mismatches": mismatches,
            "violations": int(broken is not None),
            "not_longer_than_hot": short,
            "longer_than_hot": len(requests) - short,
            "direct": figures["delivered"],
        }
    )


def show_report(report: Report) -> None:
    """Prints the table."""
    compared = "from model.generate" if report.mismatches else "every token equals that of model.generate"
    if report.violations:
        compared = "not compared: a violation ended the run"
    rate = report.transferred_bytes / max(report.seconds, 1e-9) / 2**20
    show(
        f"{report.requests:,} requests, prefilled elsewhere, over {report.transport}",
        [
            Section(
                "Tokens",
                [
                    Row("tokens generated", f"{report.tokens:,}", f"in {report.seconds:,.1f} s, checks included"),
                    Row("requests that differ", f"{report.mismatches:,}", compared, report.mismatches > 0),
                    Row("not longer than hot", f"{report.not_longer_than_hot:,}", f"of {report.hot_tokens} tokens"),
                    Row("longer than hot", f"{report.longer_than_hot:,}", "read from the host tier"),
                ],
            ),
            Section(
                "Transfers",
                [
                    Row(
                        "delivered",
                        f"{report.direct:,}",
                        f"by {report.prefill_stages} x {report.prefill_degree} prefill processes, "
                        f"in pages of {report.page_size}",
                    ),
                    Row("on the device", f"{report.landed:,}", f"{report.ordinary:,} stay, the others are staged out"),
                    Row("staged", f"{report.staged:,}", "prefilled by the decode worker, copied out to the host"),
                    Row("bytes", f"{report.transferred_bytes:,}", f"{rate:,.1f} MiB/s of serving, not of the wire"),
                    Row("retried", f"{report.retried:,}", "attempts that failed and were made again"),
                    Row("killed", f"{report.killed:,}", _asked_to_kill(report), report.unkilled is not None),
                    Row("quarantined", f"{report.quarantined_max:,}", "host locations of failed attempts, at most"),
                    Row("in quarantine still", f"{report.quarantined:,}", "", report.quarantined > 0),
                ],
            ),
            Section(
                "Decode steps",
                [
                    Row("steps", f"{report.steps:,}", f"besides {report.prefill_steps:,} forwards of prefill"),
                    Row("guesses", f"{report.drafted:,}", f"{report.accepted:,} of them right"),
                    Row("mixed", f"{report.mixed_steps:,}", "steps with requests of several kinds"),
                    Row("in flight at once", f"{report.in_flight_depth_max}", "launched and not read, at most"),
                    Row("forced syncs", f"{report.forced_syncs:,}", "", report.forced_syncs > 0),
                    Row(
                        "copies to plan by",
                        f"{report.device_to_host_copies:,}",
                        "from the device, beside those that carry results",
                        report.device_to_host_copies > 0,
                    ),
                ],
            ),
            Section(
                "Checks",
                [
                    Row("violations", f"{report.violations:,}", f"at {report.checks}", report.violations > 0),
                    Row("leaks", f"{report.leaks:,}", "slots, pages, host locations at the end", report.leaks > 0),
                ],
            ),
        ],
    )


def _asked_to_kill(report: Report) -> str:
    after = report.kill_prefill_after
    return "prefill workers" + ("" if after is None else f"; one was to be, after {after:,} deliveries")
