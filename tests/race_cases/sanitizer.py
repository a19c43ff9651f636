"""What `torch.cuda._sanitizer` says of the micro-cases: it runs in a process of its own, and needs CUDA.

The sanitizer watches a whole process, from its first operation on, and says what it finds by an exception out of the
operation that finds it. A program that ends so may leave the device in any state, and one that the sanitizer cannot
bear may end the process: then the next process begins with the next case.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tests.race_cases.plain import CaseRuntime
from tests.race_cases.registry import CASES, Case
from tests.race_cases.tools import Says, Verdict

SWITCH = "TORCH_CUDA_SANITIZER"
"""Environment variable that makes `import torch` begin to watch."""

Child = Callable[[Sequence[str]], Iterable[str]]
"""Runs some cases in a process with the sanitizer, and gives the lines that it prints."""


def available() -> bool:
    """Whether there is a device that the sanitizer watches."""
    return torch.cuda.is_available()


def verdicts(names: Sequence[str], child: Child | None = None) -> dict[str, Verdict]:
    """The sanitizer's verdict on each case.

    Args:
        names: of cases.
        child: runs some of them; by default another Python.
    """
    run = _in_process if child is None else child
    found: dict[str, Verdict] = {}
    waiting = list(names)
    while waiting:
        for line in run(waiting):
            said = _read(line)
            if said is not None:
                found[said[0]] = said[1]
        left = [name for name in waiting if name not in found]
        if left:
            found[left[0]] = Verdict(Says.ERROR, "the process ended")
        waiting = left[1:]
    return {name: found[name] for name in names}


def _in_process(names: Sequence[str]) -> Iterator[str]:
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(list(names)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, SWITCH: "1"},
    )
    yield from child.stdout.splitlines()


def _read(line: str) -> tuple[str, Verdict] | None:
    """A line of the child, or None: something else that a library printed."""
    try:
        said = json.loads(line)
        return said["case"], Verdict(said["says"], said["detail"])
    except (ValueError, KeyError, TypeError):
        return None


# In the child


def verdict_on(case: Case, rt: CaseRuntime, errors: type[Exception]) -> Verdict:
    """Runs a case under the sanitizer.

    Args:
        case: to run.
        rt: a fresh runtime.
        errors: `CUDASanitizerErrors`, whose `errors` are what one operation was found to do.
    """
    try:
        case.run(rt)
    except errors as found:
        accesses = [(one.previous_access, one.current_access) for one in getattr(found, "errors", ())]
        names = {f"{_operation(second)} behind {_operation(first)}" for first, second in accesses}
        return Verdict(Says.RACE, ", ".join(sorted(names)))
    except RuntimeError as error:
        return Verdict(Says.ERROR, f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        rt.synchronize()
    return Verdict(Says.NONE)


def _operation(access: object) -> str:
    """`aten::fill_` out of the schema of an access."""
    schema = getattr(access, "operator", "")
    return str(getattr(schema, "name", schema)).rpartition("::")[2]


def main() -> None:
    """Runs the cases whose names come in, and prints a line of JSON for each."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    from tests.race_cases.plain import PlainAccelerator

    for name in json.load(sys.stdin):
        verdict = verdict_on(CASES[name], PlainAccelerator(torch.device("cuda")), CUDASanitizerErrors)
        print(json.dumps({"case": name, "says": verdict.says, "detail": verdict.detail}), flush=True)


if __name__ == "__main__":
    main()
