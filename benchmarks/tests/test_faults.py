"""Faults of LMDeploy that `docs/found.md` lists, on the package as released."""

import importlib

import pytest

from benchmarks.peers.installed import PeerError


def test_each_listed_fault_is_there() -> None:
    """Each program shows its fault; skipped without the package."""
    try:
        faults = importlib.import_module("benchmarks.adoption.faults")
    except PeerError as error:
        pytest.skip(str(error))
    assert faults.main([]) == 0
