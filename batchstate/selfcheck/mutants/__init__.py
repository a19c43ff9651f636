"""Named mutants: real bugs of inference engines, each switched on in our own code, each found by a named invariant.

They show how strong the checks are. `run` runs them, and the library as it is, which gets no report.
A mutant belongs to a group, which is a kind of bug. `<group>.mutants` holds those that change a few lines (see
`diffs`), `<group>.py` those that need state.
"""

import importlib
from importlib import resources

from batchstate.selfcheck.mutants import diffs
from batchstate.selfcheck.mutants.registry import MUTANTS, Mutant
from batchstate.selfcheck.mutants.runner import (
    MutantReport,
    MutantResult,
    mutants_table,
    run,
    run_mutant,
)

_ORDER = (
    "drift",
    "watched",
    "plain_torch",
    "graph_inputs",
    "sides",
    "reuse",
    "ownership",
    "rows",
    "leaks",
    "slot_zero",
    "pages",
    "prefix_cache",
    "derived",
    "states",
    "units",
    "requests",
    "steps",
    "relay",
    "races",
    "host_memory",
    "lifetimes",
    "host_tier",
    "transfers",
    "strangers",
    "failures",
)


def _load(group: str) -> str:
    """Registers the mutants of a group, and returns what they have in common."""
    files = resources.files(__name__)
    title = ""
    if files.joinpath(f"{group}.mutants").is_file():
        title = diffs.read(group)
    if files.joinpath(f"{group}.py").is_file():
        module = importlib.import_module(f"{__name__}.{group}")
        title = title or (module.__doc__ or "").partition("\n")[0]
    return title


GROUPS = {group: _load(group) for group in _ORDER}
"""The kinds of bugs: name of the group -> what its mutants have in common."""

__all__ = ["GROUPS", "MUTANTS", "Mutant", "MutantReport", "MutantResult", "mutants_table", "run", "run_mutant"]
