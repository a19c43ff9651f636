"""The table that the command prints, and the line of figures that each stage has in it."""

from collections.abc import Mapping
from typing import Any

from batchstate.cli._output import Row, Section, show
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.registry import STAGES

LONGEST = 160
"""Characters of a remark."""


def print_table(device: str, outcomes: Mapping[str, Outcome]) -> None:
    """Prints what came of each stage."""
    rows = [
        Row(
            f"{name}: {STAGES[name].title}",
            f"{outcome.state}, {outcome.seconds:.0f} s",
            remark(name, outcome),
            outcome.state == "failed",
        )
        for name, outcome in outcomes.items()
    ]
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    failed = sum(outcome.state == "failed" for outcome in outcomes.values())
    verdict = Row("failed", str(failed), f"of {len(rows)}, in {seconds:,.0f} s", failed > 0)
    show(f"What a GPU has to show, on {device}", [Section("Stages", rows), Section("In all", [verdict])])


def remark(name: str, outcome: Outcome) -> str:
    """Why, where something was wrong, and else the figures that matter, in a line."""
    words = " ".join((_figures(name, outcome.figures) if outcome.state == "ok" else outcome.why).split())
    return words if len(words) <= LONGEST else words[: LONGEST - 4] + " ..."


def _figures(name: str, figures: Mapping[str, Any]) -> str:
    match name:
        case "machine":
            return f"{figures['device_name']}, torch {figures['torch']}, {figures['cores']} cores"
        case "mapped":
            return f"{figures['scatter into host memory']['gb_per_s']} GB/s into host memory, scattered rows"
        case "sync":
            levels = [figures[level] for level in ("off", "cheap", "full")]
            return f"{sum(one['steps'] for one in levels):,} steps, {sum(one['forced_syncs'] for one in levels)} syncs"
        case "profiler":
            step = figures["40 columns, a table written"]
            if "kernels" in step:
                return f"40 columns: {step['kernels']:g} kernel, {sum(step['copies'].values()):g} copy a step"
            return f"40 columns: {step['dispatched']:g} operation a step"
        case "capture":
            return f"{sum(one['replays'] for one in figures.values()):,} replays, none wrong"
        case "engine":
            runs = [one for one in figures.values() if isinstance(one, dict)]
            return f"{sum(one['tokens'] for one in runs):,} tokens in {len(runs)} runs, none differs"
        case "race":
            found = figures.get("sanitizer", {})
            beside = f"; the sanitizer finds {found['races found']} of {found['races']} races" if found else ""
            return f"right about {figures['cases']} programs{beside}; {figures['fuzz']['rules']:,} rules fuzzed"
        case "rates":
            return f"{len(figures['rows'])} rows, {len(figures['missed'])} targets missed"
        case "suite":
            return (
                f"{figures['passed']:,} passed, {figures['skipped']} skipped; {len(figures['left out'])} files left out"
            )
    return ""
