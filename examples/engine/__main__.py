"""`python -m examples.engine`: serve requests with a real model, and compare every token with transformers' own."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchstate.levels import Level
from examples import console as options
from examples.console import Row, Section, progress, show

if TYPE_CHECKING:
    from examples.engine.serving import ServingReport


def main(arguments: list[str] | None = None) -> int:
    """Serves, prints the table, and returns 0 if every token is right and nothing was found broken."""
    args = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from batchstate import BatchStateError
    from batchstate.races.devices import is_tool, open_device
    from examples.engine.model import Model
    from examples.engine.serving import requests_of, serve
    from examples.engine.settings import EngineSettings
    from examples.traffic import fitted_workload, read_trace

    try:
        device = options.chosen_device(args.device)
        runtime = open_device(device, seed=args.seed)
        if runtime.device.type == "cpu":
            torch.set_num_threads(1)  # small matrices, and a machine that may be busy: more threads wait for each other
        dtype = getattr(torch, args.dtype)
        level = args.checks or ("cheap" if is_tool(device) else "full")
        if args.model is None:
            model, name = Model.random(args.family, device=runtime.device, dtype=dtype, seed=args.seed), args.family
        else:
            model, name = Model.load(str(args.model), device=runtime.device, dtype=dtype), args.model.name
        workload = fitted_workload(args.requests, args.seed) if args.trace is None else read_trace(args.trace)
        workload = workload.first(args.requests)
        requests = requests_of(workload, model, scale=args.scale, seed=args.seed, prebuilt=args.prebuilt)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        settings = EngineSettings(
            num_pages=max(args.num_pages, longest // 16 + 8),
            max_tokens_per_request=longest,
            overlap=args.mode == "overlapped",
            mixed=args.mixed,
            num_drafts=args.drafts,
        )
        total = sum(request.max_new_tokens for request in requests)
        with progress("serving", total) as update:
            report = serve(runtime, model, requests, settings, level=level, name=name, progress=update)
    except BatchStateError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    show(
        f"{report.requests:,} requests of {report.model} on {device}, {report.mode}",
        [
            Section(
                "Tokens",
                [
                    Row("tokens generated", f"{report.tokens:,}", f"in {report.seconds:,.1f} s, checks included"),
                    Row(
                        "requests that differ",
                        f"{report.mismatches:,}",
                        _compared(report),
                        report.mismatches > 0,
                    ),
                    Row("retractions", f"{report.retractions:,}", "requests that gave their pages back and came again"),
                    Row("arrived prebuilt", f"{report.prebuilt:,}", "their KV was computed elsewhere"),
                    Row("guesses accepted", f"{report.accepted_drafts:,}", "of speculation"),
                ],
            ),
            Section(
                "Steps",
                [
                    Row("steps", f"{report.steps:,}"),
                    Row("in flight at once", f"{report.in_flight_depth_max}", "launched and not read, at most"),
                    Row("host time a step", f"{report.host_us_per_step:,.0f} us", f"checks at {level} included"),
                    Row(
                        "copies a step",
                        f"{report.copies_per_step:.2f}",
                        "to the device: one; a few for who arrives or comes back",
                    ),
                    Row("forced syncs", f"{report.forced_syncs:,}", "", report.forced_syncs > 0),
                ],
            ),
            Section(
                "Checks",
                [
                    Row("mirror checks made", f"{report.mirror_checks:,}", "host side against device side"),
                    Row("checks made", f"{report.checks_made:,}", f"of all kinds, at {level}"),
                    Row("violations", f"{report.violations:,}", "", report.violations > 0),
                    Row("leaks", f"{report.leaks:,}", "slots and pages missing at the end", report.leaks > 0),
                ],
            ),
        ],
    )
    if report.broken is not None:
        print(f"\n{report.broken}", file=sys.stderr)
    options.write_json(args.json, report.as_dict())
    return 0 if report.clean else 1


def _compared(report: "ServingReport") -> str:
    if report.violations:
        return "not compared: a violation ended the run"
    return "from model.generate" if report.mismatches else "every token equals that of model.generate"


def _failed(message: str) -> int:
    print(f"examples.engine: {message}", file=sys.stderr)
    return 2


def _checkpoint(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder with a checkpoint: there is no config.json in it")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.engine", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--requests", metavar="N", type=options.whole(1), default=300, help="default: %(default)s")
    parser.add_argument(
        "--mode", choices=("overlapped", "synchronous"), default="overlapped", help="default: overlapped"
    )
    parser.add_argument(
        "--mixed", action=argparse.BooleanOptionalAction, default=True, help="prompts and decodes share steps"
    )
    parser.add_argument("--drafts", metavar="K", type=options.whole(0), default=0, help="guesses a step (default: 0)")
    parser.add_argument(
        "--prebuilt",
        metavar="SHARE",
        type=options.share,
        default=0.1,
        help="share that comes with its KV (default: 0.1)",
    )
    parser.add_argument(
        "--family",
        choices=("llama", "qwen3", "plain"),
        default="llama" if importlib.util.find_spec("transformers") else "plain",
        help="of the random model; plain needs no transformers (default: %(default)s)",
    )
    parser.add_argument(
        "--model", metavar="PATH", type=_checkpoint, help="a checkpoint folder (default: random weights)"
    )
    parser.add_argument(
        "--dtype", choices=("float64", "float32", "bfloat16"), default="float64", help="default: float64"
    )
    parser.add_argument(
        "--num-pages",
        metavar="N",
        type=options.whole(1),
        default=200,
        help="KV pages of 16 tokens, at least what the longest request needs (default: 200)",
    )
    parser.add_argument(
        "--trace", metavar="CSV", type=Path, help="lengths, columns TIMESTAMP,ContextTokens,GeneratedTokens"
    )
    parser.add_argument("--scale", metavar="N", type=options.whole(1), default=8, help="lengths are divided by it")
    parser.add_argument(
        "--checks", choices=[level.value for level in Level], help="default: full; under a test tool cheap"
    )
    options.add_device_or_tool(parser)
    options.add_seed(parser)
    options.add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
