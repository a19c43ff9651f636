"""`python -m examples.transformers_batching`: serve requests without batchstate, then with it, and compare both."""

import argparse
import os
import sys

from batchstate.levels import Level
from examples import console as options
from examples.console import Row, Section, show


def main(arguments: list[str] | None = None) -> int:
    """Serves, prints the table, and returns 0 if every token is the same and nothing was found broken."""
    args = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    try:
        from examples.transformers_batching.comparison import compare
    except ModuleNotFoundError as error:
        needed = "needs torch and transformers 5.23, whose classes it takes the places of"
        print(f"examples.transformers_batching: {needed}: {error}", file=sys.stderr)
        return 2

    device = options.chosen_device(args.device)
    if device == "cpu":
        torch.set_num_threads(1)
    report = compare(args.requests, device=device, level=args.checks, seed=args.seed)
    times = f"of {report.batch_size} requests, without the forward"
    show(
        f"{report.requests:,} requests served by generate_batch on {device}, and again with batchstate",
        [
            Section(
                "Tokens",
                [
                    Row("tokens generated", f"{report.tokens:,}"),
                    Row("requests that differ", f"{report.mismatches:,}", "", report.mismatches > 0),
                    Row("violations", f"{report.violations:,}", f"checks at {args.checks}", report.violations > 0),
                ],
            ),
            Section(
                "Host time of a decode step",
                [
                    Row("with batchstate", f"{report.host_us_per_step:,.0f} us", times),
                    Row("transformers alone", f"{report.original_us_per_step:,.0f} us", times),
                    Row("ratio", f"{report.ratio:.1f}"),
                ],
            ),
        ],
    )
    if report.broken is not None:
        print(f"\n{report.broken}", file=sys.stderr)
    options.write_json(args.json, report.as_dict())
    return int(report.mismatches > 0 or report.violations > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.transformers_batching", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument("--requests", metavar="N", type=options.whole(1), default=200, help="default: %(default)s")
    parser.add_argument(
        "--checks", choices=[level.value for level in Level], default="cheap", help="default: %(default)s"
    )
    options.add_device(parser)
    options.add_seed(parser)
    options.add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
