"""Operators whose schema lies: a sweep over all that torch exposes; the detector knows each that does."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.schema_sweep import operators


def swept(names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the sweep says of each operator, and those in which its process ended: they refuse no nonsense."""
    said: dict[str, Any] = {}
    died: list[str] = []
    waiting = list(names)
    while waiting:
        done = subprocess.run(
            [sys.executable, "-m", "tests.schema_sweep"],
            input=json.dumps(waiting),
            capture_output=True,
            text=True,
            check=False,
        )
        last = ""
        for line in done.stdout.splitlines():
            if line.startswith('{"'):
                values = json.loads(line)
                last = values.get("begins", last)
                if "operator" in values:
                    said[values["operator"]] = values
        if not done.returncode:
            break
        died.append(last)
        waiting = waiting[waiting.index(last) + 1 :]
    return said, died


def test_operators_that_write_statistics() -> None:
    """Those with running statistics are called, and change nothing that the detector does not know."""
    said, died = swept(["native_batch_norm", "_native_batch_norm_legit", "add.Tensor", "index_put_"])
    assert died == []
    assert all(values["calls"] > 0 for values in said.values()), said
    assert [name for name in said if said[name]["unseen"]] == []


@pytest.mark.nightly
def test_every_operator() -> None:
    """Most overloads take one of the inputs, and none changes an operand unseen."""
    said, died = swept(operators())
    called = [name for name, values in said.items() if values["calls"] > 0]
    assert [name for name in called if said[name]["unseen"]] == []
    assert len(called) > 900, (len(called), len(died))
