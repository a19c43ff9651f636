"""`python -m examples.traffic`: an hour of requests through an engine without a model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from batchstate.cli.app import exit_code
from batchstate.levels import Level, current_checks
from examples import console as options
from examples.console import Row, Section, progress, show
from examples.page import Chart, Failure, page
from examples.traffic import EngineSettings, TrafficProgress, TrafficReport, fitted_workload, read_trace, run_traffic
from examples.traffic.workload import HOUR_REQUESTS

NAME = "examples.traffic"
SUMMARY = "serve an hour of requests with the model stubbed out, and show what batch state costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trace = "arrivals and lengths, columns TIMESTAMP,ContextTokens,GeneratedTokens (default: drawn like a real hour)"
    parser.add_argument("--trace", metavar="CSV", type=Path, help=trace)
    requests = "only so many (default: all, or the 19,366 of an hour)"
    parser.add_argument("--requests", metavar="N", type=options.whole(1), help=requests)
    options.add_seed(parser)
    aborts = "share of clients that hang up (default: 0)"
    parser.add_argument("--aborts", metavar="RATE", type=options.share, default=0.0, help=aborts)
    pages = EngineSettings().num_pages
    meaning = f"KV pages of the engine (default: {pages:,})"
    parser.add_argument("--num-pages", metavar="N", type=options.whole(1), default=pages, help=meaning)
    options.add_device(parser)
    levels, checks = [level.value for level in Level], "how much is checked during the run (default: %(default)s)"
    parser.add_argument("--checks", choices=levels, default=current_checks().value, help=checks)
    options.add_json(parser)
    options.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the traffic, prints the table, and returns 0 if it was clean."""
    if args.trace is None:
        workload = fitted_workload(args.requests or HOUR_REQUESTS, args.seed)
    else:
        workload = read_trace(args.trace)
        workload = workload.first(args.requests or len(workload))
    history: list[TrafficProgress] = []

    def on_progress(at: TrafficProgress) -> None:
        history.append(at)
        update(at.done, _remark(at))

    with progress("traffic", len(workload)) as update:
        report = run_traffic(
            workload,
            device=options.chosen_device(args.device),
            settings=EngineSettings(num_pages=args.num_pages),
            seed=args.seed,
            aborts=args.aborts,
            checks=args.checks,
            progress=on_progress,
        )
    title, sections = f"{report.requests:,} requests from {report.workload}, on {report.device}", _sections(report)
    show(title, sections)
    if report.broken is not None:
        print(f"\n{report.broken}", file=sys.stderr)
    options.write_json(args.json, report.as_dict())
    if args.report is not None:
        failures = [Failure("traffic", report.broken)] if report.broken else []
        args.report.write_text(page("traffic", title, sections, failures, _charts(report, history)), encoding="utf-8")
    return 0 if report.clean else 1


def _remark(at: TrafficProgress) -> str:
    minutes, seconds = divmod(int(at.simulated_seconds), 60)
    return f"{minutes:02d}:{seconds:02d} simulated, {at.running} running, {at.waiting} waiting, {at.tokens:,} tokens"


def _charts(report: TrafficReport, history: Sequence[TrafficProgress]) -> list[Chart]:
    seconds = [at.simulated_seconds for at in history]

    def values(name: str) -> list[float]:
        return [getattr(at, name) for at in history]

    def per_step(name: str, unit: float = 1) -> list[float]:
        """The mean of a total over the steps between two calls."""
        spans = zip([TrafficProgress(requests=report.requests), *history], history, strict=False)
        return [unit * (getattr(b, name) - getattr(a, name)) / max(b.steps - a.steps, 1) for a, b in spans]

    pages = f"of {report.pages:,} pages"
    return [
        Chart("Requests running", "requests", seconds, values("running")),
        Chart("Requests waiting", "requests", seconds, values("waiting")),
        Chart("Slots in use", "slots", seconds, values("slots")),
        Chart("Pages in use", pages, seconds, values("pages"), most=report.pages),
        Chart("Steps", "steps", seconds, values("steps")),
        Chart("Copies to the device", "per step", seconds, per_step("host_to_device_copies")),
        Chart("Device operations", "per step", seconds, per_step("device_operations")),
        Chart("Host time", "us per step", seconds, per_step("host_seconds", 1e6)),
    ]


def _sections(report: TrafficReport) -> list[Section]:
    minutes = report.simulated_seconds / 60
    faster = report.simulated_seconds / max(report.seconds, 1e-9)
    duplicated = report.tokens != report.tokens_delivered
    delivered = f"but {report.tokens_delivered:,} delivered" if duplicated else "each exactly once"
    lost = report.requests - report.finished - report.aborted
    missing = "slots and pages missing" if report.leaks else "every slot and page is back"
    copies = f"never more than {report.most_host_to_device_copies}"
    operations = f"never more than {report.most_device_operations}"
    nbytes = f"{report.host_to_device_bytes_per_step / 1024:,.1f} KiB"
    waited = "in all" if report.forced_syncs else "in all; the host never waited for the device"
    host = report.host_us_per_step
    work = [
        Row("requests answered", f"{report.finished:,}", f"{lost:,} lost" if lost else "", lost > 0),
        Row("requests aborted", f"{report.aborted:,}", "clients that hung up"),
        Row("tokens generated", f"{report.tokens:,}", delivered, duplicated),
        Row("tokens prefilled", f"{report.prefill_tokens:,}", "prompt tokens computed, also after retractions"),
        Row("simulated time", f"{minutes:,.1f} min", f"{report.steps:,} steps of the engine"),
        Row("real time", f"{report.seconds:,.1f} s", f"{faster:,.0f} times as fast"),
    ]
    state = [
        Row("columns", f"{report.columns}", "moved as one"),
        Row("most running", f"{report.peak_running:,}", "requests in the batch at once"),
        Row("most pages", f"{report.peak_pages:,}", f"of {report.pages:,}"),
        Row("retractions", f"{report.retractions:,}", "requests that gave their pages back and came again"),
    ]
    cost = [
        Row("host time, median", f"{host['median']:,.0f} us", "plan, batch, pools and upload"),
        Row("host time, 99 %", f"{host['p99']:,.0f} us", "of the steps take less"),
        Row("copies to the device", f"{report.host_to_device_copies_per_step:.2f}", f"{copies}; {nbytes}"),
        Row("device operations", f"{report.device_operations_per_step:.2f}", operations),
        Row("forced syncs", f"{report.forced_syncs:,}", waited, report.forced_syncs > 0),
    ]
    checks = [
        Row("level", report.checks),
        Row("checks made", f"{report.laws_asked:,}", f"{report.laws_asked / max(report.steps, 1):,.0f} a step"),
        Row("violations", f"{report.violations:,}", "", report.violations > 0),
        Row("leaks", f"{report.leaks:,}", missing, report.leaks > 0),
    ]
    return [Section("Work", work), Section("State", state), Section("Cost of a step", cost), Section("Checks", checks)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the traffic; returns 0 if it was clean, 1 for a violation, 2 when the work could not be done."""
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}", description=SUMMARY)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return exit_code(NAME, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
