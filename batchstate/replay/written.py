"""Writes what is left of a recording as a pytest file."""

import re
import textwrap
from pathlib import Path

from batchstate.replay import show
from batchstate.replay.format import Finding, Recording, load
from batchstate.testing.exact.history import EngineUnderTest, History

__all__ = ["test_of_calls", "test_of_history"]


def test_of_calls(recording: Recording, calls: frozenset[int], level: str, path: Path, device: str) -> str:
    """The source of a test that makes these calls of a recording, which is written beside it, and fails likewise."""
    small = path.with_suffix(".ops")
    recording.save(small, calls)
    finding = recording.finding or Finding("NOTHING")
    options = f"level={level!r}" + (f", device={device!r}" if device != recording.device else "")
    words = show.text(load(small), last=40).replace("\\", "/").splitlines()[1:]
    wrapped = [textwrap.wrap(line.strip(), 114, subsequent_indent="    ") for line in words]
    comment = "\n".join(f"# {line}" for lines in wrapped for line in lines)
    return (
        f'"""{_words(finding)}\n\nWritten by `batchstate replay --test`; its calls are in {small.name}.\n"""\n\n'
        f"from pathlib import Path\n\nfrom batchstate.replay import Finding, load, replay\n\n{comment}\n\n\n"
        f"def test_{_name(finding)}() -> None:\n"
        f'    """The library answers {len(calls)} recorded call{"s" * (len(calls) != 1)} without {finding.code}."""\n'
        f'    recording = load(Path(__file__).with_suffix(".ops"))\n'
        f"    assert not replay(recording, {options}, alike=Finding.resembles).repeated\n"
    )


def test_of_history(engine: EngineUnderTest, history: History, finding: Finding, imports: str) -> str:
    """The source of a test that plays a history, and fails while the finding is there.

    Args:
        engine: for its name.
        history: the requests.
        finding: of them.
        imports: statements that bring in the engine as `ENGINE`.
    """
    waves = "".join(f"        {wave!r},\n" for wave in history.waves)
    waves = re.sub(r" ?Arrival\(", "\n            Arrival(", waves)
    own = [line for line in imports.splitlines() if line.startswith(("from ", "import "))]
    rest = "\n".join(line for line in imports.splitlines() if line not in own).strip()
    torch = "import torch\n\n" if "torch." in repr(history.settings) else ""
    requests = f"{history.requests} request{'s' * (history.requests != 1)}"
    return (
        f'"""{_words(finding)}\n\nWritten by `batchstate replay --shrink --test`.\n"""\n\n'
        f"{torch}from batchstate.replay import drive\nfrom batchstate.testing.exact import Arrival, History, Wave\n"
        + "\n".join(own)
        + f"\n\n{rest}{chr(10) if rest else ''}"
        f"HISTORY = History(\n    {dict(history.settings)!r},\n    (\n{waves}    ),\n)\n\n\n"
        f"def test_{_name(finding)}() -> None:\n"
        f'    """{engine.name} serves {requests} as it should."""\n'
        f"    assert drive(ENGINE, HISTORY) is None\n"
    )


def _words(finding: Finding) -> str:
    words = f"{finding.code}: {finding.problem}".replace('"', "'").replace("\\", "/")
    return "\n".join(textwrap.wrap(words, 114))


def _name(finding: Finding) -> str:
    words = "".join(letter if letter.isalnum() else "_" for letter in finding.code.lower())
    return words or "finding"
