"""`python -m benchmarks.gpu.child NAME`: runs one stage in this process, and writes what came of it to a file."""

import argparse
import faulthandler
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import attrs

from benchmarks.gpu.outcome import STAGES, Notes, Outcome, Setting


class TimeIsUp(BaseException):
    """The stage is asked to end. No stage takes it for an error of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stage; 0, also where it failed: that is in the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.child")
    parser.add_argument("name", choices=list(STAGES))
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    faulthandler.dump_traceback_later(args.seconds)  # where it stands, should it hang in a call that hears no signal
    outcome = run_here(args.name, Setting(args.device, args.quick, args.seconds))
    args.out.write_text(json.dumps(attrs.asdict(outcome)), encoding="utf-8")
    return 0


def run_here(name: str, setting: Setting) -> Outcome:
    """The outcome of a stage, run in this process; what it raises is a failure of it, with the end of the traceback."""
    start, notes = time.perf_counter(), Notes()
    try:
        importlib.import_module(STAGES[name].module).run(setting, notes)
    except (Exception, TimeIsUp) as error:
        traceback.print_exc()
        late = isinstance(error, TimeIsUp)
        why = f"not done within {setting.seconds:.0f} seconds" if late else f"{type(error).__name__}: {error}"
        notes.problems.append(why)
        notes.figures["traceback"] = "".join(traceback.format_exception(error)[-3:])
    return attrs.evolve(notes.outcome(), seconds=time.perf_counter() - start)


def _end(*_: object) -> NoReturn:
    raise TimeIsUp


if __name__ == "__main__":
    sys.exit(main())
