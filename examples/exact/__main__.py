"""`python -m examples.exact`: random histories on an engine that runs the exact model, every text compared."""

import argparse
import gc
import sys
from importlib import import_module

from batchstate.testing.exact import EngineUnderTest
from examples import console
from examples.exact.stand_ins import MissingPeerError

ENGINES = {
    "transformers": "transformers:TRANSFORMERS",
    "generate": "transformers:GENERATE",
    "example": "example:EXAMPLE",
    "disaggregated": "disaggregated:DISAGGREGATED",
    "mini_sglang": "mini_sglang:MINI_SGLANG",
    "mini_sglang_mended": "mini_sglang:MENDED",
    "nano_vllm": "nano_vllm:NANO_VLLM",
}
"""Name of an engine -> its module and adapter. `generate` is the one of transformers."""


def engine_named(name: str) -> EngineUnderTest:
    """The adapter of an engine.

    Raises:
        MissingPeerError: it needs a checkout, and there is none.
    """
    module, _, attribute = ENGINES[name].partition(":")
    imported = import_module(f"examples.exact.{module}")
    if hasattr(imported, "modules"):
        imported.modules()
    engine: EngineUnderTest = getattr(imported, attribute)
    return engine


def main(arguments: list[str] | None = None) -> int:
    """Plays, prints what came of it, and returns 0 if every text is right."""
    args = _parser().parse_args(arguments)
    import torch

    from batchstate.testing.exact import hunt

    torch.set_num_threads(1)  # small tensors: more threads wait for each other
    reports, wrong = [], False
    for name in [args.engine] if args.engine else ENGINES:
        try:
            engine = engine_named(name)
        except MissingPeerError as error:
            print(f"{name}: skipped: {error}")
            continue
        gc.freeze()  # an engine may collect garbage when it ends, and one ends with each history
        with console.progress(name, args.requests) as update:
            report = hunt(
                engine,
                requests=args.requests,
                number=args.seed,
                verify=args.verify,
                progress=lambda done, update=update: update(min(done, args.requests), ""),  # type: ignore[misc]
            )
        reports.append(report.as_dict())
        wrong |= report.failure is not None
        print(
            f"{name}: {report.requests:,} requests in {report.histories:,} histories, "
            f"{report.differences} differences, {report.seconds:.1f} s"
        )
        if report.failure is not None:
            print(report.message)
    console.write_json(args.json, reports[0] if args.engine and reports else {"engines": reports})
    return int(wrong)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.exact", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--engine", choices=ENGINES, help="default: all that are there, one after the other")
    parser.add_argument("--requests", metavar="N", type=console.whole(1), default=1000, help="default: %(default)s")
    parser.add_argument("--verify", action="store_true", help="compare every entry that is read, too")
    console.add_seed(parser)
    console.add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
