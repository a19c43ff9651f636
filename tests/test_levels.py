"""The switch of checks: read once, changed by name, cheap to ask."""

import subprocess
import sys

import numpy as np
import pytest

from batchstate import MirroredTensor, Runtime, checks, invariants, levels, set_checks
from batchstate.errors import ArgumentError
from batchstate.levels import Level, current_checks


def started_with(value: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports the switch under an environment variable."""
    return subprocess.run(
        [sys.executable, "-c", "from batchstate import levels; print(levels.current_checks().value)"],
        env={"BATCHSTATE_CHECKS": value, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_cheap_is_the_default() -> None:
    """Where no level was set, checks are on."""
    assert current_checks() is Level.CHEAP


@pytest.mark.parametrize("level", ["off", "cheap", "full"])
def test_the_environment_sets_the_level(level: str) -> None:
    """`BATCHSTATE_CHECKS` is read at import."""
    assert started_with(level).stdout.strip() == level


def test_a_wrong_environment_is_an_error_that_lists_what_is_legal() -> None:
    """A typo does not switch checks off in silence."""
    result = started_with("ful")
    assert result.returncode != 0
    for word in ("BATCHSTATE_CHECKS", "'ful'", "off, cheap, full"):
        assert word in result.stderr


@pytest.mark.parametrize("name", ["Batch", "checks", "BatchStateError"])
def test_a_wrong_environment_is_found_by_the_first_import_of_a_name(name: str) -> None:
    """Whatever an engine takes from the package first, the typo is told."""
    code = f"from batchstate import {name}"
    environment = {"BATCHSTATE_CHECKS": "ful", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ArgumentError: environment variable BATCHSTATE_CHECKS: unknown level of checks 'ful'" in done.stderr


def test_windows_and_switches() -> None:
    """`set_checks` returns what was before; `checks` puts it back, after an error too."""
    assert set_checks("full") is Level.CHEAP
    assert (levels.cheap, levels.full) == (True, True)
    assert set_checks(Level.OFF) is Level.FULL
    assert (levels.cheap, levels.full) == (False, False)
    with pytest.raises(KeyError), checks("full"):
        raise KeyError
    assert current_checks() is Level.OFF
    with pytest.raises(ArgumentError, match="off, cheap, full"):
        set_checks("everything")
    set_checks("cheap")


def test_off_asks_nothing_and_cheap_reads_nothing(rt: Runtime) -> None:
    """At `off` no invariant is checked; at `cheap` some are and the device is not read; at `full` it is."""
    asked = {}
    for level in ("off", "cheap", "full"):
        with checks(level):
            before, reads = sum(invariants.times_checked.values()), rt.counters.check_reads
            value = MirroredTensor.from_host(rt, np.arange(4))
            assert len(value.device) == 4
            value.filter([1, 2]).merge(value)
            asked[level] = (sum(invariants.times_checked.values()) - before, rt.counters.check_reads - reads)
    assert asked["off"] == (0, 0)
    assert asked["cheap"][0] > 0
    assert asked["cheap"][1] == 0
    assert asked["full"][1] > 0
