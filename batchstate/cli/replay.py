"""`batchstate replay`: makes recorded operations again, shrinks them to a test, or shows them."""

import argparse
import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from batchstate.cli._options import new_file
from batchstate.errors import ArgumentError, RecordingError

MOST_MEMORY = 8 << 30
NAME = "replay"
SUMMARY = "make recorded operations again, and shrink them to a test; `replay show FILE` prints them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="of `record_operations`; with `show` before it: print")
    parser.add_argument("--device", default="cpu", choices=("cpu", "race", "sim"), help="default: %(default)s")
    parser.add_argument("--level", default="full", choices=("full", "cheap"), help="default: %(default)s")
    engine = "serve the recorded requests by this engine, an `EngineUnderTest`, instead of making its calls again"
    parser.add_argument("--engine", metavar="MODULE:NAME", help=engine)
    parser.add_argument("--shrink", action="store_true", help="look for the least that finds the same")
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="N", help="to shrink for (default: %(default)g)"
    )
    parser.add_argument("--test", metavar="OUT.py", type=new_file, help="write a pytest file")
    parser.add_argument("--html", metavar="OUT.html", type=new_file, help="with `show`: a page instead of text")
    parser.add_argument("--last", type=int, default=100, metavar="N", help="operations shown (default: %(default)d)")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the finding came again, 0 if not; of ranks 1 if they differ; of `show` 0."""
    from batchstate.replay.format import load

    with _bounded_memory():
        if args.files[0] == "show":
            return _show(args, [load(path) for path in args.files[1:]])
        recordings = [load(path) for path in args.files]
        if len(recordings) > 1:
            return _ranks(recordings)
        (recording,) = recordings
        print(f"recorded: {recording.finding or 'no finding'}")
        if not args.engine:
            return _by_calls(args, recording)
    return _by_engine(args, recording)


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """A window in which a file from a stranger takes no more than `MOST_MEMORY`, where the system can see to it."""
    try:
        import resource
    except ImportError:  # on Windows
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if before[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, before[1]))
    try:
        yield
    except MemoryError:
        remedy = "a damaged recording: copy it again; or record less"
        raise RecordingError(f"the recording takes more than {MOST_MEMORY >> 30} GiB", MOST_MEMORY, remedy) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _show(args: argparse.Namespace, recordings: list[Any]) -> int:
    from batchstate.replay import show

    if not recordings:
        raise ArgumentError("show without a file", None, "batchstate replay show FILE")
    for recording in recordings:
        if args.html is None:
            print(show.text(recording, last=args.last))
        else:
            with _Progress("event {:,} of {:,}") as progress:
                args.html.write_text(show.page(recording, last=args.last, progress=progress), encoding="utf-8")
    return 0


def _ranks(recordings: list[Any]) -> int:
    from batchstate.replay.show import differ

    difference = differ(recordings)
    print(difference or f"{len(recordings)} ranks made the same calls")
    return int(difference is not None)


class _Progress:
    """A line on stderr, a few times a second, if somebody looks at it; cleared at the end of a `with` block."""

    def __init__(self, words: str) -> None:
        self._words, self._next, self._on = words, 0.0, sys.stderr.isatty()

    def __call__(self, first: int, second: int) -> None:
        if self._on and time.monotonic() > self._next:
            self._next = time.monotonic() + 0.2
            print(f"\r{self._words.format(first, second)}\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _shrunk(args: argparse.Namespace, unit: str, shrink: Callable[..., Any]) -> Any:
    with _Progress(f"{{}} tries, {{}} {unit} left") as progress:
        result = shrink(seconds=args.seconds, progress=progress)
    print(f"shrunk to {result.size} {unit} in {result.tries} tries{', interrupted' * result.interrupted}")
    return result.smallest


def _by_calls(args: argparse.Namespace, recording: Any) -> int:
    from batchstate.replay import replay, shrunk_calls
    from batchstate.replay.written import test_of_calls

    try:
        with _Progress("event {:,} of {:,}") as progress:
            again = replay(recording, device=args.device, level=args.level, progress=progress)
    except KeyboardInterrupt:
        print("interrupted: the finding has not come by then")
        return 130
    print(f"replayed {len(again.made):,} calls at {args.level!r} on {args.device}, {again.refused:,} were refused")
    print(f"{'came again' if again.repeated else 'did not come again'}: {again.finding or 'nothing was found'}")
    if not again.repeated:
        return 0
    left = again.made
    if args.shrink:
        shrink = functools.partial(shrunk_calls, recording, left, device=args.device, level=args.level)
        left = _shrunk(args, "calls", shrink)
    if args.test:
        args.test.write_text(test_of_calls(recording, frozenset(left), args.level, args.test), encoding="utf-8")
        print(f"written: {args.test}")
    return 1


def _by_engine(args: argparse.Namespace, recording: Any) -> int:
    from batchstate.replay import drive, history_of
    from batchstate.replay.written import test_of_history
    from batchstate.testing.exact import History, reduced

    module, _, name = args.engine.partition(":")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        engine = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = "name a module that can be imported here, and an EngineUnderTest in it"
        raise ArgumentError(f"--engine {args.engine}: {error}", args.engine, remedy) from None
    history = history_of(recording, engine)
    finding = drive(engine, history)
    same = recording.finding is not None and recording.finding.repeats(finding)
    words = "came again" if same else "found another" if finding else "did not come again"
    print(f"served {history.requests:,} requests; {words}: {finding or 'nothing was found'}")
    if finding is None:
        return 0
    if args.shrink:
        code = finding.code

        def fails(other: History) -> bool:
            again = drive(engine, other)
            return again is not None and again.code == code

        history = _shrunk(args, "requests", functools.partial(reduced, engine, history, fails))
        finding = drive(engine, history) or finding
    if args.test:
        imports = f"from {module} import {name} as ENGINE"
        args.test.write_text(test_of_history(engine, history, finding, imports), encoding="utf-8")
        print(f"written: {args.test}")
    return 1
