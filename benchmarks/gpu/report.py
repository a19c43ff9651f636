"""The findings of a run: the table that the command prints, and a page for `docs/measurements/` out of its file."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.outcome import STAGES, Outcome
from examples.console import Row, Section, show

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
            steps, syncs = (sum(level[key] for level in levels) for key in ("steps", "forced_syncs"))
            return f"{steps:,} steps, {syncs} syncs"
        case "profiler":
            step = figures["40 columns, a table written"]
            if "kernels" in step:
                return f"40 columns: {step['kernels']:g} kernel, {sum(step['copies'].values()):g} copy a step"
            return f"40 columns: {step['dispatched']:g} operation a step"
        case "capture":
            return f"{sum(run['replays'] for run in figures.values()):,} replays, none wrong"
        case "engine":
            runs = [run for run in figures.values() if isinstance(run, dict)]
            return f"{sum(run['tokens'] for run in runs):,} tokens in {len(runs)} runs, none differs"
        case "race":
            sanitizer = figures.get("sanitizer", {})
            beside = (
                f"; the sanitizer finds {sanitizer['races found']} of {sanitizer['races']} races" if sanitizer else ""
            )
            return f"right about {figures['cases']} programs{beside}; {figures['fuzz']['rules']:,} rules fuzzed"
        case "rates":
            return f"{len(figures['rows'])} rows, {len(figures['missed'])} targets missed"
        case "suite":
            return (
                f"{figures['passed']:,} passed, {figures['skipped']} skipped; {len(figures['left out'])} files left out"
            )
    return ""


RUN = ("requests", "tokens", "mismatches", "steps", "forced_syncs", "in_flight_depth_max", "host_us_per_step")
"""Figures of a run of the engine."""
ASKED = {"target": "at least", "limit": "at most"}
"""Keys of a row's demands."""


def page(report: Mapping[str, Any]) -> str:
    """The page, in Markdown.

    Args:
        report: what the command wrote to its file.
    """
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    outcomes = {name: Outcome.from_dict(stage) for name, stage in report["stages"].items()}
    machine = outcomes["machine"].figures if "machine" in outcomes else {}
    yield from ("---", "orphan: true", "---", "")
    yield from (f"# {machine.get('device_name', report['device'])}, {report['date'][:10]}", "")
    yield "Written by `python -m benchmarks.gpu --page` out of the file of the same name, which has every figure."
    yield ""
    if report.get("quick") or report["device"] == "cpu":
        yield from ("**A rehearsal**, which shows that the command works and nothing more.", "")
    facts = {**_flat(machine), "device": report["device"], "commit": report["commit"]}
    yield from _table(("machine", ""), [(name, str(value)) for name, value in facts.items()])
    yield from ("", "## Stages", "")
    stages = [
        (
            name,
            STAGES[name].title if name in STAGES else "",
            outcome.state,
            f"{outcome.seconds:.0f}",
            remark(name, outcome),
        )
        for name, outcome in outcomes.items()
    ]
    yield from _table(("stage", "shows", "state", "s", "in short"), stages)
    for name, outcome in outcomes.items():
        lines = list(_details(name, outcome))
        if lines:
            yield from ("", f"## {name}", "", *lines)


def _details(name: str, outcome: Outcome) -> Iterator[str]:
    figures = outcome.figures
    if outcome.state != "ok":
        yield from ("```text", outcome.why, "```")
        if not (name == "rates" and figures.get("rows")):
            return
        yield ""
    if name == "profiler":
        yield from _table(("a step of", "operations dispatched", "kernels", "copies"), _profiled(figures))
    elif name == "engine":
        runs = [(name, run) for name, run in figures.items() if isinstance(run, dict)]
        yield from _table(("run", *RUN), [(name, *(f"{run[key]:,.0f}" for key in RUN)) for name, run in runs])
    elif name == "rates":
        yield from _table(("work", "ours, us", "baseline", "us", "ratio", "asked", ""), map(_rated, figures["rows"]))
        yield from ("", "Not measured here: " + ", ".join(figures["left out"]) + ".")
    elif name == "suite":
        counts = ("passed", "failures", "errors", "skipped", "processes")
        yield from _table(("tests", ""), [(key, f"{figures[key]:,}") for key in counts])
        yield from ("", "Left out: " + ", ".join(f"`{file}`" for file in figures["left out"]) + ".")


def _profiled(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, step in figures.items():
        if isinstance(step, dict):
            copies = ", ".join(f"{count:g} {kind}" for kind, count in step.get("copies", {}).items())
            yield name, f"{step['dispatched']:g}", f"{step.get('kernels', '')}", copies


def _rated(row: Mapping[str, Any]) -> tuple[str, ...]:
    asked = next((f"{word} {row[key]:g}" for key, word in ASKED.items() if row.get(key) is not None), "")
    ours, other, ratio = row["ours_us"], row["baseline_us"], row["ratio"]
    if ratio is None:
        return str(row["work"]), "", str(row["baseline"]), "", str(row.get("note") or "not measured"), asked, ""
    verdict = "" if row.get("met") is None else "met" if row["met"] else "missed"
    return str(row["work"]), f"{ours:,.1f}", str(row["baseline"]), f"{other:,.1f}", f"{ratio:.2f}", asked, verdict


def _flat(machine: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in machine.items() if not isinstance(value, dict | list)}
    # torch's own version names its build (`+cu130`), which that of the distribution may leave out.
    return {name: version for name, version in machine.get("packages", {}).items() if version is not None} | flat


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    yield line(head)
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield line(row)
