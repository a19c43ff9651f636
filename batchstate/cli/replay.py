"""`batchstate replay`: makes recorded operations again, and shrinks them to a test."""

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
SUMMARY = "make recorded operations again, and shrink them to a test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="of `record_operations`; several: those of ranks")
    device = "default: race or sim where it was recorded under them, else cpu"
    parser.add_argument("--device", choices=("cpu", "race", "sim"), help=device)
    parser.add_argument("--level", default="full", choices=("full", "cheap"), help="default: %(default)s")
    engine = "serve the recorded requests by this engine, an `EngineUnderTest`, instead of making its calls again"
    parser.add_argument("--engine", metavar="MODULE:NAME", help=engine)
    parser.add_argument("--shrink", action="store_true", help="look for the least that finds the same")
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="N", help="to shrink for (default: %(default)g)"
    )
    parser.add_argument("--test", metavar="OUT.py", type=new_file, help="write a pytest file")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if anything was found, 0 if not; of ranks 1 if they differ."""
    from batchstate.replay.format import load

    if args.test and len(args.files) > 1:
        raise ArgumentError("--test with several files: ranks are compared, and not replayed", None, "name one file")
    with bounded_memory():
        recordings = [load(path) for path in args.files]
        if len(recordings) > 1:
            return _ranks(recordings)
        (recording,) = recordings
        print(f"recorded: {recording.finding or 'no finding'}")
        if not args.engine:
            return _by_calls(args, recording)
    return _by_engine(args, recording)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
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


def _ranks(recordings: list[Any]) -> int:
    from batchstate.replay.show import differ

    difference = differ(recordings)
    print(difference or f"{len(recordings)} ranks made the same calls")
    return int(difference is not None)


class Progress:
    """A line on stderr, a few times a second, if somebody looks at it; cleared at the end of a `with` block."""

    def __init__(self, words: str) -> None:
        self._words, self._next, self._on = words, 0.0, sys.stderr.isatty()

    def __call__(self, first: int, second: int) -> None:
        """Fills the words."""
        if self._on and time.monotonic() > self._next:
            self._next = time.monotonic() + 0.2
            print(f"\r{self._words.format(first, second)}\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _shrunk(args: argparse.Namespace, unit: str, shrink: Callable[..., Any]) -> Any:
    with Progress(f"{{}} tries, {{}} {unit} left") as progress:
        result = shrink(seconds=args.seconds, progress=progress)
    print(f"shrunk to {result.size} {unit} in {result.tries} tries{', interrupted' * result.interrupted}")
    return result.smallest


def _said(args: argparse.Namespace, wanted: Any, finding: Any) -> str:
    if finding is None:
        return "did not come again: nothing was found" + ", and no test is written" * bool(args.test)
    return f"{'came again' if wanted is not None and wanted.repeats(finding) else 'found another'}: {finding}"


def _by_calls(args: argparse.Namespace, recording: Any) -> int:
    import attrs

    from batchstate.replay import replay, shrunk_calls
    from batchstate.replay.written import test_of_calls

    where = {"device": args.device or recording.device, "level": args.level}
    wanted = recording.finding
    try:
        with Progress("event {:,} of {:,}") as progress:
            again = replay(recording, **where, progress=progress)
            if again.finding is not None and not again.repeated:  # another: the calls up to it, and no others
                recording = attrs.evolve(recording, finding=again.finding)
                again = replay(recording, **where, progress=progress)
    except KeyboardInterrupt:
        print("interrupted: the finding has not come by then")
        return 130
    if not again.made:
        remedy = "look at it with `batchstate replay show`; requests are served by --engine"
        raise RecordingError("the recording has no call that can be made again", again.refused, remedy)
    last = f"up to #{again.made[-1]}, " if again.repeated else ""
    at = f"at {args.level!r} on {where['device']}"
    print(f"replayed {len(again.made):,} calls {last}{at}; {again.refused:,} others were refused")
    print(_said(args, wanted, again.finding))
    if again.finding is None:
        return 0
    left = again.made
    if args.shrink:
        left = _shrunk(args, "calls", functools.partial(shrunk_calls, recording, left, **where))
    if args.test:
        source = test_of_calls(recording, frozenset(left), args.level, args.test, where["device"])
        args.test.write_text(source, encoding="utf-8")
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
    print(f"served {history.requests:,} requests; {_said(args, recording.finding, finding)}")
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
