"""`python -m examples.traffic`: an hour of requests through an engine without a model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchstate.cli.app import exit_code
from examples import console as options
from examples.console import Row, Section, progress, show

if TYPE_CHECKING:
    from examples.page import Chart
    from examples.traffic import TrafficProgress, TrafficReport


NUM_PAGES = 10_240
"""The default of `EngineSettings`, known here without importing torch."""
SUMMARY = "serve an hour of requests with the model stubbed out, and show what batch state costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    from batchstate.levels import Level, current_checks  # reads the environment, and may refuse what it finds there

    parser.add_argument(
        "--trace",
        metavar="CSV",
        type=Path,
        help="arrivals and lengths, columns TIMESTAMP,ContextTokens,GeneratedTokens (default: drawn like a real hour)",
    )
    parser.add_argument(
        "--requests", metavar="N", type=options.whole(1), help="only so many (default: all, or the 19,366 of an hour)"
    )
    options.add_seed(parser)
    parser.add_argument(
        "--aborts", metavar="RATE", type=options.share, default=0.0, help="share of clients that hang up (default: 0)"
    )
    parser.add_argument(
        "--num-pages", metavar="N", type=options.whole(1), help=f"KV pages of the engine (default: {NUM_PAGES:,})"
    )
    options.add_device(parser)
    parser.add_argument(
        "--checks",
        choices=[level.value for level in Level],
        default=current_checks().value,
        help="how much is checked during the run (default: %(default)s)",
    )
    options.add_json(parser)
    options.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the traffic, prints the table, and returns 0 if it was clean."""
    from examples.traffic import EngineSettings, fitted_workload, read_trace, run_traffic

    if args.trace is not None:
        workload = read_trace(args.trace)
        if args.requests is not None:
            workload = workload.first(args.requests)
    elif args.requests is not None:
        workload = fitted_workload(args.requests, args.seed)
    else:
        workload = fitted_workload(seed=args.seed)
    heard: list[TrafficProgress] = []

    def on_progress(at: "TrafficProgress") -> None:
        heard.append(at)
        update(at.done, _remark(at))

    with progress("traffic", len(workload)) as update:
        report = run_traffic(
            workload,
            device=options.chosen_device(args.device),
            settings=EngineSettings(num_pages=args.num_pages or NUM_PAGES),
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
        from examples.page import Failure, page

        failures = [Failure("traffic", report.broken)] if report.broken else []
        args.report.write_text(page("traffic", title, sections, failures, _charts(report, heard)), encoding="utf-8")
    return 0 if report.clean else 1


def _remark(at: "TrafficProgress") -> str:
    minutes, seconds = divmod(int(at.simulated_seconds), 60)
    return f"{minutes:02d}:{seconds:02d} simulated, {at.running} running, {at.waiting} waiting, {at.tokens:,} tokens"


def _charts(report: "TrafficReport", heard: "Sequence[TrafficProgress]") -> "list[Chart]":
    from examples.page import Chart

    seconds = [at.simulated_seconds for at in heard]
    spans = list(zip([None, *heard], heard, strict=False))

    def per_step(name: str) -> list[float]:
        """The mean of a total over the steps between two calls."""
        return [
            (getattr(at, name) - (getattr(before, name) if before else 0))
            / max(at.steps - (before.steps if before else 0), 1)
            for before, at in spans
        ]

    return [
        Chart("Requests running", "requests", seconds, [at.running for at in heard]),
        Chart("Requests waiting", "requests", seconds, [at.waiting for at in heard]),
        Chart("Slots in use", "slots", seconds, [at.slots for at in heard]),
        Chart("Pages in use", f"of {report.pages:,} pages", seconds, [at.pages for at in heard], most=report.pages),
        Chart("Steps", "steps", seconds, [at.steps for at in heard]),
        Chart("Copies to the device", "per step", seconds, per_step("host_to_device_copies")),
        Chart("Device operations", "per step", seconds, per_step("device_operations")),
        Chart("Host time", "us per step", seconds, [1e6 * value for value in per_step("host_seconds")]),
    ]


def _sections(report: "TrafficReport") -> list[Section]:
    minutes = report.simulated_seconds / 60
    faster = report.simulated_seconds / max(report.seconds, 1e-9)
    duplicated = report.tokens != report.tokens_delivered
    lost = report.requests - report.finished - report.aborted
    return [
        Section(
            "Work",
            [
                Row("requests answered", f"{report.finished:,}", f"{lost:,} lost" if lost else "", lost > 0),
                Row("requests aborted", f"{report.aborted:,}", "clients that hung up"),
                Row(
                    "tokens generated",
                    f"{report.tokens:,}",
                    f"but {report.tokens_delivered:,} delivered" if duplicated else "each exactly once",
                    duplicated,
                ),
                Row("tokens prefilled", f"{report.prefill_tokens:,}", "prompt tokens computed, also after retractions"),
                Row("simulated time", f"{minutes:,.1f} min", f"{report.steps:,} steps of the engine"),
                Row("real time", f"{report.seconds:,.1f} s", f"{faster:,.0f} times as fast"),
            ],
        ),
        Section(
            "State",
            [
                Row("columns", f"{report.columns}", "moved as one"),
                Row("most running", f"{report.peak_running:,}", "requests in the batch at once"),
                Row("most pages", f"{report.peak_pages:,}", f"of {report.pages:,}"),
                Row("retractions", f"{report.retractions:,}", "requests that gave their pages back and came again"),
            ],
        ),
        Section(
            "Cost of a step",
            [
                Row("host time, median", f"{report.host_us_per_step.median:,.0f} us", "plan, batch, pools and upload"),
                Row("host time, 99 %", f"{report.host_us_per_step.p99:,.0f} us", "of the steps take less"),
                Row(
                    "copies to the device",
                    f"{report.host_to_device_copies_per_step:.2f}",
                    f"never more than {report.most_host_to_device_copies}; "
                    f"{report.host_to_device_bytes_per_step / 1024:,.1f} KiB",
                ),
                Row(
                    "device operations",
                    f"{report.device_operations_per_step:.2f}",
                    f"never more than {report.most_device_operations}",
                ),
                Row(
                    "forced syncs",
                    f"{report.forced_syncs:,}",
                    "in all; the host never waited for the device" if not report.forced_syncs else "in all",
                    report.forced_syncs > 0,
                ),
            ],
        ),
        Section(
            "Checks",
            [
                Row("level", report.checks),
                Row("checks made", f"{report.laws_asked:,}", f"{report.laws_asked / max(report.steps, 1):,.0f} a step"),
                Row("violations", f"{report.violations:,}", "", report.violations > 0),
                Row(
                    "leaks",
                    f"{report.leaks:,}",
                    "slots and pages missing" if report.leaks else "every slot and page is back",
                    report.leaks > 0,
                ),
            ],
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the traffic; returns 0 if it was clean, 1 for a violation, 2 when the work could not be done."""
    parser = argparse.ArgumentParser(prog="python -m examples.traffic", description=SUMMARY)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return exit_code("examples.traffic", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
