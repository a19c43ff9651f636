"""Writes what is left of a recording as a pytest file."""

import textwrap
from pathlib import Path
from typing import Any

from batchstate.replay import show
from batchstate.replay.engine import EngineLog, Served
from batchstate.replay.format import Finding, Recording
from batchstate.testing.exact.history import EngineUnderTest

__all__ = ["test_of_calls", "test_of_log"]


def test_of_calls(recording: Recording, calls: frozenset[int], level: str, path: Path) -> str:
    """The source of a test that makes these calls of a recording, which is written beside it, and fails likewise."""
    small = path.with_suffix(".ops")
    recording.save(small, calls)
    made = [event for event in recording.events if event.is_call and event.number in calls]
    defined = [event for event in recording.events if event.kind == "define"]
    finding = recording.finding or Finding("NOTHING")
    words = show.text(Recording([*defined, *made], finding), last=40).replace("\\", "/").splitlines()[1:]
    wrapped = [textwrap.wrap(line.strip(), 114, subsequent_indent="    ") for line in words]
    comment = "\n".join(f"# {line}" for lines in wrapped for line in lines)
    return (
        f'"""{_words(finding)}\n\nWritten by `batchstate replay --test`; its calls are in {small.name}.\n"""\n\n'
        f"from pathlib import Path\n\nfrom batchstate.replay import Finding, load, replay\n\n{comment}\n\n\n"
        f"def test_{_name(finding)}() -> None:\n"
        f'    """The library answers {len(made)} recorded call{"s" * (len(made) != 1)} without {finding.code}."""\n'
        f'    recording = load(Path(__file__).with_suffix(".ops"))\n'
        f"    assert not replay(recording, level={level!r}, alike=Finding.resembles).repeated\n"
    )


def test_of_log(engine: EngineUnderTest, log: EngineLog, finding: Finding, imports: str) -> str:
    """The source of a test that serves a log, and fails while the finding is there.

    Args:
        engine: for its name.
        log: the requests.
        finding: of them.
        imports: statements that bring in the engine as `ENGINE`.
    """
    settings = ", ".join(f"{name!r}: {_source(value)}" for name, value in log.settings.items())
    texts = "" if log.texts else ", texts=False"
    requests = "".join(f"        {_request(served)},\n" for served in log.requests)
    own = [line for line in imports.splitlines() if line.startswith(("from ", "import "))]
    rest = "\n".join(line for line in imports.splitlines() if line not in own).strip()
    torch = "import torch\n\n" if "torch." in settings else ""
    verify = ", verify=True" if log.texts else ""
    return (
        f'"""{_words(finding)}\n\nWritten by `batchstate replay --shrink --test`.\n"""\n\n'
        f"{torch}from batchstate.replay import EngineLog, Served, drive\n"
        + "\n".join(own)
        + f"\n\n{rest}{chr(10) if rest else ''}"
        f"LOG = EngineLog(\n    {{{settings}}},\n    (\n{requests}    ){texts},\n)\n\n\n"
        f"def test_{_name(finding)}() -> None:\n"
        f'    """{engine.name} serves {len(log.requests)} request{"s" * (len(log.requests) != 1)} as it should."""\n'
        f"    assert drive(ENGINE, LOG{verify}) is None\n"
    )


def _words(finding: Finding) -> str:
    words = f"{finding.code}: {finding.problem}".replace('"', "'").replace("\\", "/")
    return "\n".join(textwrap.wrap(words, 114))


def _name(finding: Finding) -> str:
    words = "".join(letter if letter.isalnum() else "_" for letter in finding.code.lower())
    return words or "finding"


def _request(served: Served) -> str:
    parts = [f"at={served.at}", f"prompt={_source(served.prompt)}", f"answer={served.answer}"]
    if served.temperature:
        parts.append(f"temperature={served.temperature}")
    if served.abort is not None:
        parts.append(f"abort={served.abort}")
    return f"Served({', '.join(parts)})"


def _source(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 4 and len(set(value)) == 1:
        return f"({value[0]!r},) * {len(value)}"
    return repr(value)
